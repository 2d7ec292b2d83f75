"""Between clients' uploads and a method: robust aggregation, differential privacy, secure aggregation."""

from halfmoon.guards.base import Guard, Question, changed, sent, update

__all__ = ["Guard", "Question", "changed", "sent", "update"]
