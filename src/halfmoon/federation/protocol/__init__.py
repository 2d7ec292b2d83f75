"""What server and sites say to each other: messages, their limits, the terms and the log."""
