"""What a user starts from Python or the command line: runs, sweeps of a paper, the study of a folder; their results."""
