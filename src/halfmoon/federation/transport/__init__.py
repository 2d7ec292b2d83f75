"""Federations on Flower: the same methods over the network (needs the extra `flower`)."""
