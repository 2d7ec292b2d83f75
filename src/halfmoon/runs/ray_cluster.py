"""Reaching a Ray cluster (extra `ray`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from halfmoon.core.errors import UserError, install


def installed() -> Any:
    """Return Ray; raise UserError where it is not installed."""
    try:
        return import_module("ray")  # an extra, needed here only; by name, as a type checker may lack it
    except ImportError as error:
        raise UserError(f"Ray is not installed; {install('ray')} to use it.") from error


def join(ray: Any, address: str | None) -> None:
    """Reach the cluster at `address`, at RAY_ADDRESS, or on this machine, else start one; raise UserError if none
    answers."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        place, why = f" at {address}" if address else "", " ".join(str(error).split())
        raise UserError(
            f"no Ray cluster answers{place} ({why}); start one with ray start --head, or check --ray-address and "
            "RAY_ADDRESS."
        ) from error
