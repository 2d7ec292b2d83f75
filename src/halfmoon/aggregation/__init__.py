"""Between clients' uploads and a method: robust aggregation, differential privacy, secure aggregation."""

from halfmoon.aggregation.base import AggregationContext, Aggregator, compute_update, downloaded_values, replace_update

__all__ = ["AggregationContext", "Aggregator", "compute_update", "downloaded_values", "replace_update"]
