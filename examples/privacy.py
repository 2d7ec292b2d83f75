# Learn what a server need not see: sums of masked updates, and noise whose price is epsilon.
# %% [markdown]
# # Secure sums and differential privacy
# With `secure_aggregation` clients mask what they send. The masks cancel in the sum, so the server learns the sum
# alone. The numbers are rounded to a grid, and nothing else changes.
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
# A sum still tells something of each client. Differential privacy bounds it: every update is scaled down to the length
# `dp_clip`, the sum gets noise of `dp_noise` times that, and epsilon counts the price (extra `privacy`).
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
# Sixty clients are too few for a useful plan: noise that protects drowns what they learn. With ten times the clients,
# and a cohort ten times as large, the same epsilon costs a tenth of the noise. What a plan costs, without training:
# %%
axes = table[table["metric"] == "epsilon"].pivot(index="round", columns="noise", values="value").plot(logy=True)
axes.set_ylabel("epsilon so far")
axes.figure.set_size_inches(6, 3.4)
