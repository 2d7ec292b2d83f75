"""One module a file format, each checked: decoded images come out, or one sentence says what is wrong."""
