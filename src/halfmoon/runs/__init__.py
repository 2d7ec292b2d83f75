"""Runs from a configuration: build an experiment, run, resume or compare it, follow its progress, write its results."""
