# Learn to measure the gain from unlabeled images: labels only, soft labels for the unlabeled images, and all labels.
# %% [markdown]
# # Compare methods
# Twenty clients have 1,437 digits, with about five labeled digits each. Every method has the same split, clients,
# batches and number of labeled steps. Two seeds show how much results vary by chance; a conclusion needs five or more.
# %%
import halfmoon

config = halfmoon.Config(
    rounds=20, lr=6e-3, steps=6, unlabeled_batch=30, labeling="running", budget="labeled-steps", threads=1
)
config
# %% [markdown]
# The split assigns images to clients. It depends on `split_seed` and is drawn before training.
# %%
halfmoon.problem(config).split
# %% [markdown]
# `compare` shows its progress and returns the results. If you run this cell again, it reads the finished runs.
# %%
results = halfmoon.compare(["fedavg", "fedavg-soft-labels", "fedavg-sl"], config, seeds=2, run_dir="runs/main")
results
# %%
results.plot()
# %% [markdown]
# `to_frame` returns the numbers of the chart as a data frame, with a row for each run, round and metric.
# %%
table = results.to_frame()
last = table[(table["metric"] == "accuracy") & (table["round"] == 20)]
last.pivot(index="method", columns="seed", values="value").round(1)
