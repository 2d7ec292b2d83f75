"""The softmax temperature that calibrates the probabilities of a trained model."""

import math

from torch import Tensor

MIN_TEMPERATURE = 0.05
MAX_TEMPERATURE = 20.0
"""The range of temperatures. If all images are classified correctly, the best temperature would be 0."""

BISECTIONS = 60
"""Number of bisections by which a temperature is found: more than a float has digits."""


def find_temperature(logits: Tensor, labels: Tensor) -> float:
    """Fit the temperature that minimizes the mean cross-entropy of softmax(logits / temperature).

    Guo et al., On Calibration of Modern Neural Networks, ICML 2017, Section 4.2: one number for all classes.

    Args:
        logits: float64 (N, classes).
        labels: int64 (N,).

    Returns:
        The temperature, between `MIN_TEMPERATURE` and `MAX_TEMPERATURE`.
    """
    true_logits = logits.gather(1, labels[:, None])[:, 0]

    def slope(scale: float) -> float:
        """Compute the derivative of the cross-entropy in scale = 1 / temperature: the mean of E_p[z] - z_y."""
        probabilities = (scale * logits).softmax(1)
        expected_logits = (probabilities * logits).sum(1)
        return float((expected_logits - true_logits).mean())

    # The cross-entropy is convex in scale, so its slope changes its sign once: bisect log(scale) between the bounds.
    low = math.log(1 / MAX_TEMPERATURE)
    high = math.log(1 / MIN_TEMPERATURE)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if slope(math.exp(middle)) < 0:
            low = middle
        else:
            high = middle
    return math.exp(-(low + high) / 2)
