"""One module a command: `add` makes its parser, `run` does it and returns an exit code."""
