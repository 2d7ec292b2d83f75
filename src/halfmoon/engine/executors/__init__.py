"""Executors: how work is distributed over this process, vmapped groups, processes, and machines (`executors.base`)."""
