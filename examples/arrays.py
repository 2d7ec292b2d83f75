# Learn to train on images in memory: arrays of images and labels, with -1 for an unlabeled image.
# %% [markdown]
# # Arrays, PIL images and data sets
# As in scikit-learn, `X` has the images and `y` their labels. Of 1,437 digits 50 have a label, and the rest is
# unlabeled.
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
# Compare two methods: `fedavg` trains on the labeled images only, and `fedavg-soft-labels` also on the unlabeled ones.
# `clients` assigns each image to one of four hospitals.
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
# `to_frame` returns every number as a data frame, and `to_latex` returns a table for a paper.
# %%
table = results.to_frame()
print(table[table["metric"] == "used_share"].groupby("method")["value"].mean())
print(results.to_latex())
# %% [markdown]
# A model predicts arrays, PIL images, tensors, files and folders. The result has one row for each image.
# %%
model = halfmoon.load_model(results.runs[-1])
print(model.predict(digits.test.images[:3]))
print(model.predict_proba(digits.test.images[0]).round(2))
# %% [markdown]
# Instead of arrays, `data` can be a PyTorch `Dataset` of (image, label) pairs or a Hugging Face `Dataset`.
# %%
pairs = torch.utils.data.TensorDataset(torch.from_numpy(X)[:, None] / 255, torch.from_numpy(y))
again = halfmoon.run(data=pairs, test=digits.test, method="fedavg", clients=hospitals, progress=False, **options)
again
