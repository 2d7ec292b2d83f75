# Learn the circle of few labels: train, label what the model is least sure of, train again, review.
# %% [markdown]
# # Label, train, review
# Two sites have 24 labels each. `halfmoon site label` shows a page in the browser; here a script answers in its place.
# %%
import subprocess
import sys
from pathlib import Path

import pandas as pd

import halfmoon


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon", *map(str, words)], check=True, capture_output=True, text=True
    )
    return done.stdout


command("site", "export", "digits", "--sites", 2, "--labels-per-class", 2, "--data-share", 0.4, "--out", "wards")
sites = sorted(Path("wards").glob("site-*"))
{site.name: len(pd.read_csv(site / "labels.csv")) for site in sites}
# %% [markdown]
# Train on both, without a federation: this is what `halfmoon run --sites` plays.
# %%
shared = {"method": "fedavg-fixmatch", "rounds": 12, "lr": 6e-3, "steps": 6, "clients": 2, "threads": 1}
first = halfmoon.run(data_share=0.4, labels_per_class=2.0, run_dir="runs/first", **shared)
first
# %% [markdown]
# The images to label next, in the order of the page: unsure ones early, and not all alike.
# %%
print(command("site", "label", sites[0], "--model", "runs/first", "--list", 8))
# %% [markdown]
# With twice the labels:
# %%
second = halfmoon.run(data_share=0.4, labels_per_class=4.0, run_dir="runs/second", **shared)
axes = first.plot().axes[0]
second.plot(axes=axes)
axes.legend([f"{result.summaries[0]['accuracy']['last']:.1%}, {words}" for result, words in
             ((first, "2 labels a class"), (second, "4 labels a class"))])  # fmt: skip
axes.figure
# %% [markdown]
# Review: where does the model disagree with a label, and how sure is it? `halfmoon review` shows these as a wall.
# %%
labels = pd.read_csv(sites[0] / "labels.csv", dtype=str)
guesses = second.model.predict(sites[0]).merge(labels, on="path", suffixes=("", "_given"))
guesses[guesses["label"] != guesses["label_given"]].sort_values("probability", ascending=False).head()
