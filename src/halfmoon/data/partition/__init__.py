"""Partition of images among clients: scenarios, partition rules, splits and their statistics."""
