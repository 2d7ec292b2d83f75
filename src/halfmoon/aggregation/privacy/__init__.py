"""Client-level differential privacy: clipping, noised sums, the accountant and its ledger."""
