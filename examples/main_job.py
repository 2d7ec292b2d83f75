# Learn what unlabeled images add: labels alone, soft labels for the rest, and all labels, on one split.
# %% [markdown]
# # Compare methods
# Twenty clients hold 1,437 digits, about five of them labeled each. Every method gets the same split, clients, batches
# and number of labeled steps. Two seeds show how much chance there is; a verdict needs five or more.
# %%
import halfmoon

config = halfmoon.Config(
    rounds=20, lr=6e-3, steps=6, unlabeled_batch=30, labeling="running", budget="labeled-steps", threads=1
)
config
# %% [markdown]
# Who holds what is drawn from `split_seed`, before anything is trained.
# %%
halfmoon.problem(config).split
# %% [markdown]
# A comparison shows its progress and returns its results. Running this cell again reads what is finished.
# %%
results = halfmoon.compare(["fedavg", "fedavg-soft-labels", "fedavg-sl"], config, seeds=2, run_dir="runs/main")
results
# %%
results.plot()
# %% [markdown]
# The numbers behind the picture are a data frame, a row for each run, round and metric.
# %%
table = results.to_frame()
last = table[(table["metric"] == "accuracy") & (table["round"] == 20)]
last.pivot(index="method", columns="seed", values="value").round(1)
