# Learn to train on images that you have in memory: arrays with labels, -1 for unlabeled ones.
# %% [markdown]
# # Arrays, PIL images and data sets
# `X` are images, `y` their labels, as for scikit-learn. Of 1,437 digits 50 have a label; all others are unlabeled.
# %%
import numpy as np
import torch

import halfmoon

digits = halfmoon.load_data("digits")
X = digits.train.images[..., 0]
y = np.full(len(X), -1)
for digit in range(10):
    few = np.flatnonzero(digits.train.labels == digit)[:5]
    y[few] = digit
print(X.shape, X.dtype, "labels:", np.unique(y, return_counts=True))
# %% [markdown]
# Labels only against soft labels for the unlabeled images. Each image belongs to one of four hospitals.
# %%
hospitals = np.array(["north", "east", "south", "west"])[np.arange(len(X)) % 4]
options = {"network": "small", "rounds": 12, "lr": 6e-3, "steps": 6, "cohort": 4, "flip": False, "threads": 1}
results = halfmoon.compare(
    ["fedavg", "fedavg-soft-labels"],
    data=(X, y),
    test=digits.test,
    clients=hospitals,
    seeds=2,
    run_dir="runs/arrays",
    **options,
)
results.summary
# %%
results.plot(path="accuracy.pdf")
# %% [markdown]
# `to_frame` has every number, `to_latex` is the table of a paper.
# %%
table = results.to_frame()
print(table[table["metric"] == "used_share"].groupby("method")["value"].mean())
print(results.to_latex())
# %% [markdown]
# A model predicts arrays, PIL images, tensors, files and folders. One image is one row.
# %%
model = halfmoon.load_model(results.runs[-1])
print(model.predict(digits.test.images[:3]))
print(model.predict_proba(digits.test.images[0]).round(2))
# %% [markdown]
# A torch `Dataset` of (image, label) is as good as arrays, and so is a `Dataset` of Hugging Face.
# %%
pairs = torch.utils.data.TensorDataset(torch.from_numpy(X)[:, None] / 255, torch.from_numpy(y))
again = halfmoon.run(data=pairs, test=digits.test, method="fedavg", clients=hospitals, progress=False, **options)
again
