"""Files that survive a kill: atomic writes, TOML, trees as bytes, checkpoints and run folders."""
