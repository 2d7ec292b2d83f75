"""Federated semi-supervised learning."""
