"""Runs from a configuration: what it is made of, played, resumed, side by side, watched and summed up."""
