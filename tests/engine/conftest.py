"""What tests of the engine share."""

import pytest

from halfmoon.engine import driver


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Return a list that grows with every program of several clients: their (seed, number)."""
    seen: list[list[tuple[int, int]]] = []
    update_many = driver.update_many

    def watched(contexts, broadcast, each, tasks):
        seen.append([(context.seed, task.client) for context, task in zip(contexts, tasks, strict=True)])
        return update_many(contexts, broadcast, each, tasks)

    monkeypatch.setattr(driver, "update_many", watched)
    return seen
