"""Values by classification, one number at a time: what `TwoHot` is compared with."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def decoded(logits: Tensor, limit: float = 1e4) -> Tensor:
    """Return the values (...) of logits (..., bins)."""
    return (logits.softmax(-1) * torch.from_numpy(bins(logits.shape[-1], limit))).sum(-1)


def bins(num: int, limit: float = 1e4) -> NDArray[np.float64]:
    """Return the values (num,) of bins that are evenly spaced in sign(x) log(1 + |x|)."""
    places = np.linspace(-np.log1p(limit), np.log1p(limit), num)
    return np.sign(places) * np.expm1(np.abs(places))


def cross_entropy(logits: Tensor, value: float, limit: float = 1e4) -> Tensor:
    """Return the loss of logits (bins,) for one target."""
    num, values = len(logits), bins(len(logits), limit)
    value = float(np.clip(value, -limit, limit))
    above = int(np.clip(np.searchsorted(values, value, side="right"), 1, num - 1))
    share = (value - values[above - 1]) / (values[above] - values[above - 1])
    target = torch.zeros(num, dtype=torch.float64)
    target[above - 1], target[above] = 1.0 - share, share
    return -(target * logits.log_softmax(-1)).sum()
