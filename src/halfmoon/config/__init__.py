"""The configuration of a run: every option once, with type, default, help and checks."""
