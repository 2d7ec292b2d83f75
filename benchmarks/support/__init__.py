"""Modules that several benchmarks import."""
