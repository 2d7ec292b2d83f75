"""Client-level differential privacy: clipping, noised sums, and the accountant of their privacy loss."""
