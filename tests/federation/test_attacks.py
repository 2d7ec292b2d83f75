"""Run many attacks at once: each is refused with a reason, and the model equals that of a run without attacks."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from attackers import (
    ATTACKS,
    EXPORT_COMMAND,
    FEDERATION_FILE,
    FINAL_ATTACK,
    NGINX,
    SITES,
    AttackedFederation,
    list_executed_pickles,
    write_federation_file,
)
from safetensors.numpy import load_file

from halfmoon.cli.main import main

pytestmark = [
    pytest.mark.nightly,  # one attack through the whole protocol is in test_hostile_site.py, refused keys in test_pki.py
    pytest.mark.skipif(sys.platform != "linux", reason="federations are made for Linux"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]

BENCHMARK_ONLY = {"unknown-key", "no-key", "same-key", "large", "garbage", "expired", "other-host"}
"""Attacks that only the benchmark runs: they resemble others, but need another SuperNode, or hundreds of MB.

test_pki.py tests expired certificates and those of another host.
"""
ROUNDS = 2
"""The reply of the first round can be replayed in the second, which is delayed. Each round is repeated once."""
NAMES = SITES[:2]
"""An honest site and an attacking one: a third would do the same as the first."""
REPLY_ATTACKS = {
    "pickle": ("pickle:0", f"refused in round 1: the answer of {NAMES[-1]}: a message"),
    "replay": ("replay:1", f"refused in round 2: the answer of {NAMES[-1]}: it answers round 1"),
}
"""Attacks by replies: their rounds, and the patterns of their log lines."""
FAST_ATTACKS = {name: attack for name, attack in ATTACKS.items() if name not in BENCHMARK_ONLY}
FAST_ATTACKS |= {
    name: replace(FAST_ATTACKS[name], site_attack=site_attack, log_patterns=(("serve.log", sign),))
    for name, (site_attack, sign) in REPLY_ATTACKS.items()
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the sites and of the federation's file, with a simulation of it next to it."""
    folder = tmp_path_factory.mktemp("attacked") / "sites"
    assert main([*EXPORT_COMMAND, "--sites", str(len(NAMES)), "--out", str(folder)]) == 0
    write_federation_file(folder, ROUNDS, len(NAMES))
    assert main(["run", "--config", str(folder / FEDERATION_FILE), "--run-dir", str(folder.parent / "simulated")]) == 0
    return folder


@pytest.fixture
def fed(tmp_path: Path, exported: Path) -> Iterator[AttackedFederation]:
    site_attack = " ".join(attack.site_attack for attack in FAST_ATTACKS.values() if attack.site_attack)
    made = AttackedFederation(tmp_path, exported, site_attack, ROUNDS, NAMES)
    try:
        yield made
    finally:
        made.stop_all()


def test_simultaneous_attacks_do_not_change_the_weights(fed: AttackedFederation, exported: Path):
    """Each attack logs its refusal, no pickle is executed, and the weights equal those of the simulation."""
    fed.start_all()
    fed.wait_until(lambda: "is there" in fed.read_log("serve.log"), "the first site")
    for name, attack in FAST_ATTACKS.items():
        if name != FINAL_ATTACK:
            attack.run(fed)
    FAST_ATTACKS[FINAL_ATTACK].run(fed)
    for name, attack in FAST_ATTACKS.items():
        if name != "replay":  # an attack of the last round, which is still delayed
            for where, pattern in attack.log_patterns:
                fed.wait_for_log(where, pattern)
    fed.stop(FINAL_ATTACK)  # it would retry forever
    fed.hold_last_reply(False)
    for where, pattern in FAST_ATTACKS["replay"].log_patterns:
        fed.wait_for_log(where, pattern)
    fed.wait_until(lambda: fed.running["serve"].poll() == 0, "the end")
    assert not list_executed_pickles(fed), "a pickle was executed"
    served = load_file(fed.run / "model.safetensors")
    simulated = load_file(exported.parent / "simulated" / "model.safetensors")
    assert served.keys() == simulated.keys()
    for name, leaf in served.items():
        assert np.array_equal(leaf.view(np.uint8), simulated[name].view(np.uint8)), name
    rows = (fed.run / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == ROUNDS
    assert f"the answer of {NAMES[-1]}" in fed.read_log("serve.log")


def test_an_executed_pickle_is_detected(fed: AttackedFederation):
    """Unpickling an attack creates the file that the test above looks for."""
    import pickle

    from attacking.sitecustomize import CreateFileOnUnpickle

    pickle.loads(pickle.dumps(CreateFileOnUnpickle(fed.folder / "pwned"))).close()
    assert list_executed_pickles(fed) == [fed.folder / "pwned"]
