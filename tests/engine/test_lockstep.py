"""Runs in lockstep: the numbers of runs played apart, whoever is behind, ahead, over or failed."""

import threading
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
from scenes import Snapshot, begin, dataset, furthest, play, same, simulate, task
from spies import Counting

from halfmoon.api.types import Method
from halfmoon.engine import lockstep as lockstep_module
from halfmoon.engine.driver import Diverged
from halfmoon.engine.evaluation import Spread
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg

CLOSE = 1e-12
lockstep = partial(lockstep_module.lockstep, padded=Fraction(1))
SEEDS = (0, 1, 2)


def runs_of(programs: list[list[tuple[int, int]]]) -> list[int]:
    """Return of how many runs each program had clients."""
    return [len({seed for seed, _ in program}) for program in programs]


def run(method: Method, seed: int, rounds: range = range(2), before: list[Snapshot] | None = None):
    """Return a run of unequal clients in double precision; with what was played `before`, one that goes on."""

    def played(spread: Spread) -> list[Snapshot]:
        shared = task(rounds=4)
        simulation = simulate(method, shared, dataset(), executor="vmap", seed=seed)
        simulation.local_clients.training = replace(simulation.local_clients.training, spread=spread)
        server = begin(method, shared, seed)
        if before:
            server = before[-1].server
            for name, memory in before[-1].state["client"].items():
                simulation.memories.put(name, memory)
        return play(method, simulation, server, rounds)

    return played


def agree(together: list[Snapshot], alone: list[Snapshot], costs: bool = True) -> None:
    for ours, theirs in zip(together, alone, strict=True):
        assert furthest(ours.server, theirs.server) < CLOSE
        assert furthest(ours.state, theirs.state) < CLOSE
        assert ours.report.cohort == theirs.report.cohort
        assert not costs or ours.report.cost == theirs.report.cost


@pytest.mark.parametrize("name", ["fedavg-sl", "feddure", "semifed", "heterofl"])
def test_seeds_together_are_the_seeds_alone(name: str, programs):
    """To rounding: without memory and with, masking padding or not, with what is sent to single clients."""
    method = registry.entry(name).method
    alone = [run(method, seed)(map) for seed in SEEDS]
    assert set(runs_of(programs)) <= {1}
    programs.clear()
    for ours, theirs in zip(lockstep([run(method, seed) for seed in SEEDS]), alone, strict=True):
        agree(ours, theirs)
    assert max(runs_of(programs)) == 3


@pytest.mark.parametrize("name", ["fedavg-fixmatch", "feddure"])
def test_a_run_that_is_behind_catches_up(name: str, programs):
    """One goes on after its first round, one begins: two rounds in company, one alone for each at either end."""
    method = registry.entry(name).method
    first, second = run(method, 0, range(3))(map), run(method, 1, range(2))(map)
    programs.clear()
    ours, other = lockstep([run(method, 0, range(1, 3), first[:1]), run(method, 1, range(2))])
    agree(ours, first[1:], costs=False)
    agree(other, second)
    assert runs_of(programs) == [1, 2, 1]


def test_alone_a_run_has_the_bits_of_one_played_apart():
    """Three clients train as its own one program, though runs in company were to take them one by one."""
    method = registry.entry("feddure").method
    (ours,), theirs = lockstep([run(method, 0)], 1), run(method, 0)(map)
    assert all(same(a.server, b.server) and same(a.state, b.state) for a, b in zip(ours, theirs, strict=True))


def test_who_diverges_leaves_the_others_their_way():
    """Client 3 of one run fails in the second round: the other plays on, and the failure is told at the end."""
    ends: list[list[Snapshot]] = []
    fine, doomed = Counting(), Counting(doomed=3, when=1)

    def noted(spread: Spread) -> list[Snapshot]:
        ends.append(run(fine, 1, range(4))(spread))
        return ends[-1]

    assert 3 in run(fine, 0)(map)[1].report.cohort
    with pytest.raises(Diverged, match="round 2 at client 3"):
        lockstep([run(doomed, 0, range(4)), noted])
    (ours,) = ends
    agree(ours, run(fine, 1, range(4))(map))


def test_a_program_that_fails_alone_is_said(monkeypatch):
    """Out of memory with all seeds, but not with one: the numbers are those of runs apart, with a warning."""

    def large(*rest):
        raise RuntimeError("out of memory")

    alone = [run(FedAvg(), seed)(map) for seed in SEEDS]
    monkeypatch.setattr(lockstep_module, "update_joint", large)
    with pytest.warns(RuntimeWarning, match="one program for all failed .out of memory."):
        together = lockstep([run(FedAvg(), seed) for seed in SEEDS])
    for ours, theirs in zip(together, alone, strict=True):
        assert all(same(a.server, b.server) for a, b in zip(ours, theirs, strict=True))


def test_about_so_many_clients_make_a_program(programs):
    """Nine alike: in programs of about two, four of 2, 2, 2 and 3; of about seven, one."""
    for most in (2, 7):
        lockstep([run(FedAvg(), seed, range(1)) for seed in SEEDS], most)
    assert [len(program) for program in programs] == [2, 2, 2, 3, 9]


@pytest.mark.parametrize("where", ["a run", "a program"])
def test_an_interruption_ends_all(where: str, programs, monkeypatch):
    """Whoever presses Ctrl-C, in a run or while clients train: no thread is left, and nobody trains any more."""
    before, closed = threading.active_count(), list[int]()

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    def watched(seed: int):
        def played(spread: Spread) -> None:
            try:
                run(FedAvg(), seed, range(1))(spread)
                if where == "a run" and seed == 1:
                    press()
                monkeypatch.setattr(lockstep_module, "update_joint", press)
                run(FedAvg(), seed, range(1, 4))(spread)
            finally:
                closed.append(seed)

        return played

    with pytest.raises(KeyboardInterrupt):
        lockstep([watched(seed) for seed in SEEDS])
    assert runs_of(programs) == [3]
    assert sorted(closed) == [0, 1, 2]
    assert threading.active_count() == before
