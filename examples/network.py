# Learn to train a custom network, which can be any torch.nn.Module.
# %% [markdown]
# # A custom network
# Write a function that returns the module for a number of channels, a number of classes and an image size. Register it
# under a name to use it as a `network`. On the command line, use `--network my_module:make` without registering it.
# %%
from torch import nn

import halfmoon
from halfmoon.core import plugins


def make(channels, classes, size):
    height, width = size
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 2) * (width // 2), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


plugins.register("network", "mine", make)
# %% [markdown]
# Train two networks on the same split with the same method, and combine the results of both in one data frame.
# %%
import pandas as pd

shared = {"method": "fedavg-fixmatch", "rounds": 12, "lr": 6e-3, "steps": 6, "threads": 1}
runs = {name: halfmoon.run(network=name, run_dir=f"runs/{name}", **shared) for name in ("mine", "small")}
table = pd.concat([result.to_frame().assign(network=name) for name, result in runs.items()])
accuracy = table[table["metric"] == "accuracy"].pivot(index="round", columns="network", values="value")
axes = accuracy.plot(ylabel="test accuracy (%)", figsize=(6, 3.4))
accuracy.tail(3).round(1)
# %% [markdown]
# A federation sends all parameters in every round, so the network also determines the traffic.
# %%
pd.concat({name: result.details[["megabytes_down", "megabytes_up"]] for name, result in runs.items()}).round(2)
