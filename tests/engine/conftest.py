"""What tests of the engine share."""

import pytest

from halfmoon.engine import driver


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that grows with every program of several clients: their numbers."""
    seen: list[list[int]] = []
    update_many = driver.update_many

    def watched(context, broadcast, per_client, tasks):
        seen.append([task.client for task in tasks])
        return update_many(context, broadcast, per_client, tasks)

    monkeypatch.setattr(driver, "update_many", watched)
    return seen
