"""Clients that are elsewhere: what is asked of a site and what it answers, over any link; no image among it."""
