"""Values by classification, one number at a time: what `TwoHot` is compared with."""

import numpy as np
import torch
from torch import Tensor


def decoded(logits: Tensor, limit: float = 1e4) -> Tensor:
    """Return the values (...) of logits (..., bins)."""
    end = np.log1p(limit)
    mean = (logits.softmax(-1) * torch.linspace(-end, end, logits.shape[-1], dtype=torch.float64)).sum(-1)
    return mean.sign() * (mean.abs().exp() - 1.0)


def cross_entropy(logits: Tensor, value: float, limit: float = 1e4) -> Tensor:
    """Return the loss of logits (bins,) for one target."""
    num, end = len(logits), np.log1p(limit)
    bins = np.linspace(-end, end, num)
    place = np.clip(np.sign(value) * np.log1p(abs(value)), -end, end)
    above = int(np.clip(np.searchsorted(bins, place, side="right"), 1, num - 1))
    share = (place - bins[above - 1]) / (bins[above] - bins[above - 1])
    target = torch.zeros(num, dtype=torch.float64)
    target[above - 1], target[above] = 1.0 - share, share
    return -(target * logits.log_softmax(-1)).sum()
