"""Functions and result objects for scripts and notebooks."""
