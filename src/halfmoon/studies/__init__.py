"""Sweeps: grids of runs with published numbers beside them."""
