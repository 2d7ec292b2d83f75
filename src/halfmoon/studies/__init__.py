"""Runs, sweeps of papers and studies of a folder, as users start them in Python or a terminal, and their results."""
