"""Measure how many images look unlike a folder's (`halfmoon predict --like`): of the same data set, and of others.

    python benchmarks/unlike.py --set NAME=DATA NAME=DATA ... [--seeds 0 1 2 3 4] [--out results/unlike.csv]

For each set and seed: a model of the set, `KNOWN` test images as the folder, `OTHERS` others of the set (what is called
unlike among these is a false alarm), and `FOREIGN` images of each other set, of the set's negatives, and turned by 90
degrees. The models: the small network after 40 rounds on the set (seed by seed), or a head on EfficientNet-Lite0.
"""

import argparse
import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import halfmoon
from halfmoon.data import load
from halfmoon.sites.inference import InferenceModel, load_model
from halfmoon.sites.inference.image_folder import list_images, read_batches
from halfmoon.sites.inference.outliers import build_reference, too_many_outliers

KNOWN, OTHERS, FOREIGN, SHARE = 150, 200, 100, 0.02
NETWORKS: dict[str, dict[str, Any]] = {
    "small": {"network": "small", "method": "fedavg-sl", "rounds": 40, "lr": 0.01, "steps": 10, "budget": "none"},
    "efficientnet-lite0": {"network": "efficientnet-lite0", "method": "ridge-head", "rounds": 1},
}


def written(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir(parents=True)
    for n, pixels in enumerate(images):
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(folder / f"{n:04}.png")
    return folder


def features(model: InferenceModel, folder: Path) -> np.ndarray:
    return np.concatenate(
        [model.represent(each.images)[1] for each in read_batches(model, folder, list_images(folder))]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", dest="sets", nargs="+", default=["digits=digits"], help="NAME=DATA as --data takes it")
    parser.add_argument("--known", nargs="+", help="those of the sets that models are made for (default: all)")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("results/unlike.csv"))
    given = parser.parse_args()
    data = dict(each.split("=", 1) for each in given.sets)
    tests = {name: load(each).test.images for name, each in data.items()}
    rows: list[dict[str, Any]] = []
    for network in given.networks:
        for name in given.known or data:
            for seed in given.seeds:
                draw = np.random.default_rng(seed)
                own = tests[name][draw.permutation(len(tests[name]))[: KNOWN + OTHERS]]
                sides = {other: draw.permutation(images)[:FOREIGN] for other, images in tests.items() if other != name}
                sides |= {"negatives": 255 - own[-FOREIGN:], "turned": np.rot90(own[-FOREIGN:], 1, (1, 2))}
                with tempfile.TemporaryDirectory() as place:
                    root = Path(place)
                    share = 1.0 if name == "digits" else SHARE
                    shared = {"data": data[name], "data_share": share, "clients": 1, "cohort": 1, "seed": seed}
                    halfmoon.run(halfmoon.Config(**{**shared, **NETWORKS[network], "run_dir": root / "run"}))
                    model = load_model(root / "run")
                    about = build_reference(model, written(root / "known", own[:KNOWN]))
                    for side, images in {name: own[KNOWN:], **sides}.items():
                        found = about.find_outliers(features(model, written(root / side.replace(" ", "-"), images)))
                        facts = {"network": network, "known": name, "images": side, "seed": seed}
                        warned = too_many_outliers(int(found.sum()), len(found))
                        rows.append({**facts, "unlike": round(float(found.mean()), 4), "warned": int(warned)})
                with given.out.open("w", newline="") as file:
                    table = csv.DictWriter(file, rows[0])
                    table.writeheader()
                    table.writerows(rows)
    print("| network | known | images | look unlike, % | warned |\n|---|---|---|---:|---:|")
    for key in dict.fromkeys((row["network"], row["known"], row["images"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["known"], row["images"]) == key]
        shares = [100 * row["unlike"] for row in mine]
        spread = statistics.stdev(shares) if len(shares) > 1 else 0.0
        warned = f"{sum(row['warned'] for row in mine)} of {len(mine)}"
        print(f"| {' | '.join(key)} | {statistics.fmean(shares):.1f} ± {spread:.1f} | {warned} |")


if __name__ == "__main__":
    main()
