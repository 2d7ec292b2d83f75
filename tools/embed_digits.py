"""Write the digits that halfmoon embeds from scikit-learn's copy of them: `python tools/embed_digits.py`.

A test compares the written file with scikit-learn's data; scikit-learn is needed here and there, not at run time.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

DIGITS = Path(__file__).resolve().parents[1] / "src" / "halfmoon" / "data" / "digits.npz"


def arrays() -> dict[str, np.ndarray]:
    """Return images, uint8 (1797, 8, 8) of 0..16, and labels, uint8 (1797,), in scikit-learn's order."""
    pixels, labels = load_digits(return_X_y=True)
    return {
        "images": np.asarray(pixels).astype(np.uint8).reshape(-1, 8, 8),
        "labels": np.asarray(labels).astype(np.uint8),
    }


if __name__ == "__main__":
    np.savez_compressed(DIGITS, **arrays())
