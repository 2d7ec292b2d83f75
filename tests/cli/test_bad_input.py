"""Impossible requests: each ends in its exact sentence and code 2 with nothing written; what is odd but legal works."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from halfmoon.cli import main as cli
from halfmoon.data import Split, load
from halfmoon.data.partition.split import SplitOrigin, hash_labels
from halfmoon.methods import registry

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
TINY = "--clients 4 --cohort 2 --rounds 1 --steps 1 --width 4 --threads 1"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listing() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


SENTENCES = {
    "run --method fedure": "unknown method 'fedure': did you mean 'feddure'?",
    "run --data digts": "no data set or folder is called 'digts'; did you mean 'digits'?",
    "run --clients 0": "clients is 0: it must be at least 1.",
    "run --clients 1438": "1438 clients cannot share 1437 images; ask for fewer clients.",
    "run --clients 4 --cohort 5": "cohort is 5, but clients is 4: it must be at most 4.",
    "run --labeled-batch 1": (
        "labeled_batch is 1: a batch of one image has no variance to normalize by; use at least 2."
    ),
    "run --unlabeled-batch 1 --statistics separate": (
        "unlabeled_batch is 1: a batch of one image has no variance to normalize by; use at least 2."
    ),
    "run --labels-per-class 9": (
        "labels_per_class 9 for 20 clients needs 180 labeled images of class 8, which has 139; set labels_per_class "
        "to 6.95 or less, or clients to 15 or less."
    ),
    "run --labels-per-class 500": (
        "labels_per_class 500 for 20 clients needs 10000 labeled images of class 8, which has 139; set labels_per_class "
        "to 6.95 or less."
    ),
    "run --method fixmatch-fedavg": "unknown method 'fixmatch-fedavg': did you mean 'fedavg-fixmatch'?",
    "run --label-ratio 1": (
        "client 0 (20 of 20 in all) has no unlabeled image, but feddure needs some at every client; ask for fewer "
        "labels or a larger min_size."
    ),
    "run --label-ratio 0.0001": "label_ratio 0.0001 leaves class 0 without a label; ask for more labels.",
    "run --setting dir-dir --labels-per-class 1 --min-size 40": (
        "20 clients with at least 40 labeled images each need 800, but there are 200; ask for fewer clients, a "
        "smaller min_size or another share of labels."
    ),
    "run --network resnet9 --image-size 10": (
        "ResNet-9 takes images whose sides are multiples of 8 and at least 16, not 10x10; set image_size to the next "
        "such size, or use network = 'small'."
    ),
    "run --image-size 6": "images of 8x8 do not fit into 6x6; shrink them first.",
    "run --shrink 3": "digits: 3 does not divide images of 8x8; choose a factor that divides both.",
    "run --shrink 4": "The small network takes images of at least 4x4 pixels, not 2x2.",
    "run --width 1000000000": (
        f"width is 1000000000: network small would take 216,000,000,176,000,000,040 bytes for its parameters "
        f"alone, but this machine's memory has {MEMORY:,}; choose a smaller width."
    ),
    "run --option fedavg.threshold=0.9": "method fedavg has no option 'threshold': "
    "choose one of: decay, keep_optimizer, prox.",
    "run --config unknown.toml": "unknown option 'roundz' in unknown.toml: did you mean 'rounds'?",
    "compare --methods fedavg fedavg": "compare needs one or more different methods, not fedavg, fedavg.",
    "compare --methods fedavg --seeds 1 1": "compare needs one or more different seeds, not 1, 1.",
}


@pytest.mark.parametrize(("message", "sentence"), SENTENCES.items())
def test_the_exact_sentence(message: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("unknown.toml").write_text("roundz = 3\n")
    before = listing()
    assert cli.main(message.split()) == 2
    assert capsys.readouterr() == ("", f"halfmoon: {sentence}\n")
    assert listing() == before


def test_method_option_with_thousands_of_digits(capsys: pytest.CaptureFixture[str]) -> None:
    """Python refuses to parse such a number, so it remains a text; this was a traceback."""
    digits = "1" * 5000
    assert cli.main(["run", "--method", "fedavg-fixmatch", "--option", f"threshold={digits}"]) == 2
    assert capsys.readouterr().err.endswith("111 ...: it must be a number.\n")


def test_a_mistyped_folder_is_not_said_to_be_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative path of two folders looks like owner/name."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert cli.main(["run", "--data", "data/imgaes"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(
        "halfmoon: data/imgaes is no folder here, so it is looked up on the Hugging Face hub, which needs the library "
        "datasets: correct the path, pip install "
    )
    assert listing() == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--device", "cuda"]) == 2
    text = "halfmoon: device is 'cuda', but this PyTorch sees no GPU; use device = 'auto' or 'cpu'.\n"
    assert capsys.readouterr().err == text
    assert listing() == {}


def test_a_smallest_size_that_no_draw_meets(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine clients share 90 labeled images, so each needs exactly ten of whole classes: the drawing ends."""
    text = "run --setting dir-dir --clients 9 --labels-per-class 1 --min-size 10 --dirichlet-alpha 0.001"
    assert cli.main(text.split()) == 2
    assert capsys.readouterr().err == (
        "halfmoon: in 100 draws no split with dirichlet_alpha 0.001 gave each of 9 clients 10 labeled images; the best "
        "minimum was 1, and 3 or more had fewer. Ask for 4 clients, or set min_size to 1 or less.\n"
    )
    assert listing() == {}


LABELS = load("digits").train.labels
CLIENT = np.arange(len(LABELS), dtype=np.int64) % 4
LABELED = np.arange(len(LABELS)) < 40
"""Digits dealt in turn to four clients, ten of each labeled."""


def save_split(client: np.ndarray, labeled: np.ndarray, source: str, mark: str) -> None:
    Split(client, labeled, 4, SplitOrigin({}, source, mark)).save(Path("s.parquet"))


def test_a_client_without_labels(capsys: pytest.CaptureFixture[str]) -> None:
    save_split(CLIENT, LABELED & (CLIENT != 2), "digits", hash_labels(LABELS))
    before = listing()
    message = "run --split s.parquet --cohort 2 --rounds 1 --method"
    assert cli.main(f"{message} feddure".split()) == 2
    text = capsys.readouterr().err
    assert text.startswith(
        "halfmoon: client 2 (1 of 4 in all) has no labeled image, but feddure needs some at every client; "
        "ask for more labels or a larger min_size, or choose one of: fedavg, "
    )
    assert text.count("\n") == 1
    assert listing() == before
    # FixMatch learns there from its pseudo-labels; the upper bound trains on all rows with all labels.
    for method in ("fedavg-fixmatch", "fedavg-sl"):
        assert cli.main(f"{message} {method} --steps 1 --width 4 --threads 1".split()) == 0


def test_labels_where_a_method_cannot_use_them(capsys: pytest.CaptureFixture[str]) -> None:
    """By the option, before any data is read, and by a saved split: the reason, and the methods that can."""
    before = listing()
    reason = "halfmoon: method feddure needs labels at every client, but they are at the server; "
    for message in (
        "run --method feddure --labels-at server",
        "run --method feddure --labels-at server --data nowhere",
    ):
        assert cli.main(message.split()) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"{reason}choose another labels_at, or one of: semifl, ")
        assert text.count("\n") == 1
    assert listing() == before
    assert cli.main(["data", "digits", "--labels-at", "server", "--clients", "4", "--save", "s.parquet"]) == 0
    capsys.readouterr()
    assert cli.main(["run", "--method", "feddure", "--split", "s.parquet", "--cohort", "2"]) == 2
    assert capsys.readouterr().err.startswith(reason)


def test_a_split_of_other_data(capsys: pytest.CaptureFixture[str]) -> None:
    save_split(CLIENT, LABELED, "xrays", hash_labels(LABELS[::-1]))
    assert cli.main(["run", "--split", "s.parquet", "--cohort", "2"]) == 2
    assert capsys.readouterr().err == (
        f"halfmoon: the split was made for xrays ({len(LABELS)} images), but the labels of digits differ from its "
        "labels or are in another order; load that data set or make a new split.\n"
    )
    save_split(CLIENT[:-1], LABELED[:-1], "xrays", "")
    assert cli.main(["run", "--split", "s.parquet", "--cohort", "2"]) == 2
    assert capsys.readouterr().err == (
        f"halfmoon: the split was made for xrays ({len(LABELS) - 1} images), but digits has {len(LABELS)}; load that "
        "data set or make a new split.\n"
    )
    assert cli.main(["run", "--split", "nowhere.parquet"]) == 2
    assert capsys.readouterr().err == (
        f"halfmoon: {Path('nowhere.parquet').absolute()}: there is no such file; save a split with `halfmoon data "
        "--save`.\n"
    )
    assert not Path("runs").exists()


def test_a_cohort_larger_than_the_split(capsys: pytest.CaptureFixture[str]) -> None:
    save_split(CLIENT, LABELED, "digits", hash_labels(LABELS))
    assert cli.main(["run", "--split", "s.parquet", "--cohort", "5"]) == 2
    assert capsys.readouterr().err == "halfmoon: cohort is 5, but the split has 4 clients; choose a smaller one.\n"
    assert not Path("runs").exists()


def test_a_folder_of_another_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"run --method fedavg {TINY} --run-dir r".split()) == 0
    before = listing()
    capsys.readouterr()
    assert cli.main(f"run --method fedavg {TINY} --run-dir r --seed 1".split()) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"halfmoon: {Path('r').absolute()} holds a run of another configuration (")
    assert text.endswith(f"or `halfmoon resume {Path('r').absolute()}` to go on with that one.\n")
    assert text.count("\n") == 1
    assert listing() == before


@pytest.mark.parametrize("message", ["--clients 2 --protocol few-labels", "--split s.parquet"])
def test_the_default_cohort_is_never_larger_than_the_clients(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "--clients", "2", "--labels-per-class", "5", "--save", "s.parquet"]) == 0
    capsys.readouterr()
    short = "--rounds 1 --steps 1 --network small --width 4 --threads 1 --method fedavg"
    labels = "" if "split" in message else "--labels-per-class 5"
    assert cli.main(f"run {short} {message} {labels} --json".split()) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["rounds"] == 1


def test_one_client_is_a_federation(capsys: pytest.CaptureFixture[str]) -> None:
    text = "run --method feddure --clients 1 --rounds 1 --steps 2 --width 4 --threads 1 --labels-per-class 5 --json"
    assert cli.main(text.split()) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["cost"]["labeled_steps"] == 2


def test_fewer_labels_than_a_batch_are_noticed_and_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"run --method fedavg-fixmatch {TINY} --setting iid-iid --labels-per-class 0.5"
    assert cli.main(text.split()) == 0
    assert capsys.readouterr().err.splitlines()[0] == (
        "halfmoon: 4 of 4 clients have fewer labeled images than a batch of 10: their images repeat within a batch."
    )


def test_an_option_of_federations_is_reported_as_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"run --method protofssl {TINY} --labels-per-class 5"
    assert cli.main(text.split()) == 0
    assert "min_class_images" not in capsys.readouterr().err
    Path("run.toml").write_text("[options]\nmin_class_images = 2\n")
    assert cli.main(f"{text} --config run.toml".split()) == 0
    assert "min_class_images of protofssl has no effect in a simulation" in capsys.readouterr().err


@pytest.mark.parametrize(("capability", "remarks"), [("AVX2", 1), ("AVX512", 0)])
def test_a_processor_without_bfloat16_is_noticed(capability, remarks, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    text = f"run --method fedavg {TINY} --precision bf16 --device cpu"
    assert cli.main(text.split()) == 0
    assert capsys.readouterr().err.count("has no bfloat16") == remarks


def test_resnet9_pads_digits_to_16() -> None:
    assert cli.main(f"run --method fedavg --network resnet9 {TINY} --run-dir r".split()) == 0
    with safe_open("r/model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["image"]) == [1, 16, 16]


def test_every_method_runs_batched(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"compare --methods {' '.join(registry.names())} {TINY} --executor vmap --run-dir c --json"
    assert cli.main(text.split()) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["method"] for run in runs] == registry.names()
    assert all(run["finished"] for run in runs)
    for name in registry.names():
        assert len(Path(f"c/{name}-seed0/metrics.jsonl").read_text().splitlines()) == 1


def test_the_number_of_threads_is_only_borrowed() -> None:
    """A run uses the threads it was given, at most one a processor, and PyTorch has its number back after it.

    It is one of the narrowest network, on the smallest images."""
    before = torch.get_num_threads()
    assert cli.main(f"run --method fedavg {TINY} --width 1 --shrink 2 --threads 100000".split()) == 0
    assert torch.get_num_threads() == before


def test_error_recommends_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"run --method recommended --labels-at server --labels 10 {TINY} --run-dir r".split()) == 0
    err = capsys.readouterr().err
    assert (
        "recommended method with labels at server: fl2; it gained on Fashion-MNIST and lost on X-rays: add --baselines "
        in err
    )
