"""Locations of labels: the values of the option `labels_at`, which splits, methods and sites share."""

from typing import Literal

LabelLocation = Literal["clients", "some", "server"]
"""Holder of the labels: every client, some of the clients, or the server."""

LABEL_LOCATIONS: dict[LabelLocation, str] = {
    "clients": "every client",
    "some": "some clients",
    "server": "the server",
}
ALL_LABEL_LOCATIONS: tuple[LabelLocation, ...] = ("clients", "some", "server")
