"""Files that survive a kill: atomic writes, trees as bytes, checkpoints and run folders."""
