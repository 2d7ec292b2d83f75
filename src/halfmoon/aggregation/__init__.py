"""Between clients' uploads and a method: robust aggregation, differential privacy, secure aggregation."""

from halfmoon.aggregation.base import AggregationContext, Aggregator, changed, downlinks, update

__all__ = ["AggregationContext", "Aggregator", "changed", "downlinks", "update"]
