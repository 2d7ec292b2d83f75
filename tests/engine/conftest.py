"""What tests of the engine share."""

import pytest

from halfmoon.engine import local_clients


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that grows with every program of several clients: their numbers."""
    seen: list[list[int]] = []
    update_many = local_clients.update_many

    def watched(context, broadcast, tasks):
        seen.append([task.client for task in tasks])
        return update_many(context, broadcast, tasks)

    monkeypatch.setattr(local_clients, "update_many", watched)
    return seen
