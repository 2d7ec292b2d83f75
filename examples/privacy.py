# Learn to hide clients' updates from the server: secure aggregation, and differential privacy with its epsilon.
# %% [markdown]
# # Secure aggregation and differential privacy
# With `secure_aggregation` clients mask their uploads. The masks cancel in the sum, so the server only learns the sum.
# Uploads are rounded to a grid, which is the only change of the results.
# %%
import halfmoon

shared = {"method": "fedavg", "clients": 60, "cohort": 20, "min_size": 0, "norm": "group", "steps": 2, "threads": 1}
shared |= {"labels_per_class": 1.0, "lr": 6e-3}
plain = halfmoon.run(rounds=2, run_dir="runs/plain", **shared)
masked = halfmoon.run(rounds=2, secure_aggregation=True, run_dir="runs/masked", **shared)
images = halfmoon.load_data("digits").test.images
difference = abs(plain.model.probabilities(images) - masked.model.probabilities(images)).max()
print(f"largest difference of a probability: {difference:.1e}")
# %% [markdown]
# A sum still depends on every client. Differential privacy bounds this influence: every update is clipped to the norm
# `dp_clip`, and the sum gets noise of `dp_noise` times that norm. Epsilon measures the remaining disclosure (install
# the extra `privacy`).
# %%
noises = (1, 16)
private = {
    noise: halfmoon.run(rounds=6, dp_clip=0.5, dp_noise=noise, run_dir=f"runs/noise-{noise}", **shared)
    for noise in noises
}
tables = [result.to_frame().assign(noise=noise) for noise, result in private.items()]
# %%
import pandas as pd

table = pd.concat(tables)
ends = table[table["metric"].isin(["epsilon", "accuracy"]) & (table["round"] == 6)]
ends.pivot(index="noise", columns="metric", values="value").round(1)
# %% [markdown]
# Sixty clients are too few: noise that protects them also hides what they learn. With ten times the clients and a
# cohort ten times as large, the same epsilon needs a tenth of the noise. Plot epsilon by round:
# %%
axes = table[table["metric"] == "epsilon"].pivot(index="round", columns="noise", values="value").plot(logy=True)
axes.set_ylabel("epsilon so far")
axes.figure.set_size_inches(6, 3.4)
