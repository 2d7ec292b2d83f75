"""What all tests share: one thread, because the networks here are smaller than the cost of waking a second."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
