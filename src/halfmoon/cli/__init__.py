"""The command line: the parser, the console and one module a command."""
