"""Secure aggregation: sums of masked uploads in fixed point, of which the server sees no single term."""
