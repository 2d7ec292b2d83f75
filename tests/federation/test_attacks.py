"""Everybody attacks at once: each is refused with a reason, and the model is the one that nobody has disturbed."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from attackers import ATTACKS, EXPORT, FILE, LAST, NGINX, SITES, Besieged, executed, write
from safetensors.numpy import load_file

from halfmoon.cli.main import main

pytestmark = [
    pytest.mark.nightly,  # one attack through the whole protocol is in test_hostile_site.py, refused keys in test_pki.py
    pytest.mark.skipif(sys.platform != "linux", reason="federations are made for Linux"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]

SLOW = {"unknown-key", "no-key", "same-key", "large", "garbage", "expired", "other-host"}
"""Attacks that the benchmark alone plays: they are like others, but need one more SuperNode, or hundreds of MB.

A certificate that has run out and one of another host are refused in test_pki.py.
"""
ROUNDS = 2
"""One whose answer can be replayed in the next, which is the last and waits; each is played twice, spoiled at first."""
NAMES = SITES[:2]
"""An honest site, and one that attacks: a third would do what the first does."""
ANSWERS = {
    "pickle": ("pickle:0", f"refused in round 1: the answer of {NAMES[-1]}: a message"),
    "replay": ("replay:1", f"refused in round 2: the answer of {NAMES[-1]}: it answers round 1"),
}
"""Attacks that are answers: in which round, and what the log says."""
SWIFT = {name: attack for name, attack in ATTACKS.items() if name not in SLOW}
SWIFT |= {name: replace(SWIFT[name], evil=evil, signs=(("serve.log", sign),)) for name, (evil, sign) in ANSWERS.items()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folders of the sites, with the file of a federation; beside them is its simulation."""
    folder = tmp_path_factory.mktemp("attacked") / "sites"
    assert main([*EXPORT, "--sites", str(len(NAMES)), "--out", str(folder)]) == 0
    write(folder, ROUNDS, len(NAMES))
    assert main(["run", "--config", str(folder / FILE), "--run-dir", str(folder.parent / "simulated")]) == 0
    return folder


@pytest.fixture
def fed(tmp_path: Path, exported: Path) -> Iterator[Besieged]:
    evil = " ".join(attack.evil for attack in SWIFT.values() if attack.evil)
    made = Besieged(tmp_path, exported, evil, ROUNDS, NAMES)
    try:
        yield made
    finally:
        made.end()


def test_all_attacks_at_once_change_nothing(fed: Besieged, exported: Path):
    """Each attack leaves its sentence where its name says; no pickle is executed; the weights are the simulator's."""
    fed.begin()
    fed.until(lambda: "is there" in fed.log("serve.log"), "the first site")
    for name, attack in SWIFT.items():
        if name != LAST:
            attack.act(fed)
    SWIFT[LAST].act(fed)
    for name, attack in SWIFT.items():
        if name != "replay":  # the last round's, which is held
            for where, pattern in attack.signs:
                fed.says(where, pattern)
    fed.stop(LAST)  # it would try again for ever
    fed.hold(False)
    for where, pattern in SWIFT["replay"].signs:
        fed.says(where, pattern)
    fed.until(lambda: fed.running["serve"].poll() == 0, "the end")
    assert not executed(fed), "somebody has unpickled something"
    served = load_file(fed.run / "model.safetensors")
    simulated = load_file(exported.parent / "simulated" / "model.safetensors")
    assert served.keys() == simulated.keys()
    for name, leaf in served.items():
        assert np.array_equal(leaf.view(np.uint8), simulated[name].view(np.uint8)), name
    rows = (fed.run / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == ROUNDS
    assert f"the answer of {NAMES[-1]}" in fed.log("serve.log")


def test_a_pickle_that_is_executed_is_seen(fed: Besieged):
    """What the attacks send does what it says where somebody is careless: the test above could fail."""
    import pickle

    from attacking.sitecustomize import Creates

    pickle.loads(pickle.dumps(Creates(fed.folder / "pwned"))).close()
    assert executed(fed) == [fed.folder / "pwned"]
