"""Halfmoon in Python: runs that are started, watched and looked at in a script or a notebook."""
