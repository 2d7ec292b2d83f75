"""Shared foundations: trees of tensors, random streams, gradients, optimizers, option ranges, TOML and errors."""
