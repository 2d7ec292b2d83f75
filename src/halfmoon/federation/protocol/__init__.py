"""The protocol between the server and the sites: messages, their limits, the terms and the log."""
