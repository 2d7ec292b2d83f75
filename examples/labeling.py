# Learn to work with few labels: train, label the images with the least confident predictions, retrain, and review.
# %% [markdown]
# # Label, train, review
# Two sites have 24 labels each. `halfmoon site label` shows a page in the browser, but this script only prints the
# list of images.
# %%
import subprocess
import sys
from pathlib import Path

import pandas as pd

import halfmoon


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon", *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return done.stdout


command("site", "export", "digits", "--sites", 2, "--labels-per-class", 2, "--data-share", 0.4, "--out", "wards")
sites = sorted(Path("wards").glob("site-*"))
{site.name: len(pd.read_csv(site / "labels.csv")) for site in sites}
# %% [markdown]
# Train on the images of both sites, without a federation. `halfmoon run --sites` does the same on the command line.
# %%
shared = {"method": "fedavg-fixmatch", "rounds": 12, "lr": 6e-3, "steps": 6, "clients": 2, "threads": 1}
first = halfmoon.run(data_share=0.4, labels_per_class=2.0, run_dir="runs/first", **shared)
first
# %% [markdown]
# List the images to label next, in the order of the page: the least confident predictions first, without many similar
# images.
# %%
print(command("site", "label", sites[0], "--model", "runs/first", "--list", 8))
# %% [markdown]
# Train with twice the labels, and compare the two runs:
# %%
second = halfmoon.run(data_share=0.4, labels_per_class=4.0, run_dir="runs/second", **shared)
axes = first.plot().axes[0]
second.plot(axes=axes)
axes.legend([f"{result.summaries[0]['accuracy']['last']:.1%}, {words}" for result, words in
             ((first, "2 labels a class"), (second, "4 labels a class"))])  # fmt: skip
axes.figure
# %% [markdown]
# Review the labels: list where the model disagrees with a label, and its confidence. `halfmoon review` shows these
# images as a page.
# %%
labels = pd.read_csv(sites[0] / "labels.csv", dtype=str)
predictions = second.model.predict(sites[0]).merge(labels, on="path", suffixes=("", "_given"))
predictions[predictions["label"] != predictions["label_given"]].sort_values("probability", ascending=False).head()
