"""Values as distributions over bins: `TwoHot`, by which critics learn values of any scale by classification."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

# Size of the initial weights of a layer above which there are bins: zero, since a mass of 1e-4 too much in the last bin
# is an error of 1, which takes long to unlearn.
OF_BINS = 0.0


def symlog(values: Tensor) -> Tensor:
    """Return sign(x) log(1 + |x|)."""
    return values.sign() * values.abs().log1p()


def symexp(values: Tensor) -> Tensor:
    """Return sign(x) (exp(|x|) - 1), the inverse of `symlog`."""
    return values.sign() * values.abs().expm1()


@cache
def _symlog_of(value: float) -> float:
    # Without a tensor of the CPU between the operations of a device.
    return float(symlog(torch.tensor(value, dtype=torch.float64)))


@dataclass(frozen=True, slots=True)
class TwoHot:
    """Distributions over bins that are evenly spaced in symlog(value), from -limit to limit.

    The target of a value has the weights of the two bins beside it whose mean it is, so that the loss is one of
    classification, whose gradient does not grow with the value. A value is the mean of the bins' own values, not of
    their symlog: what is learned from random targets is their expectation.

    Attributes:
        num_bins: at least 2.
        limit: values beyond it count as it.

    Source: Hafner et al. 2023, https://arxiv.org/abs/2301.04104; Grigsby et al. 2024,
    https://arxiv.org/abs/2411.11188
    """

    num_bins: int = 128
    limit: float = 1e4

    def bins(self, like: Tensor) -> Tensor:
        """Return the values of the bins, (num_bins,), of the type and on the device of `like`."""
        end = _symlog_of(self.limit)
        return symexp(torch.linspace(-end, end, self.num_bins, dtype=like.dtype, device=like.device))

    def decode(self, logits: Tensor) -> Tensor:
        """Return the values (...) of distributions with logits (..., num_bins); equal logits give exactly 0."""
        probs = softmax(logits, -1)
        # Each bin minus its mirror image: else the largest bins, which cancel each other, leave their rounding errors.
        return (probs - probs.flip(-1)) @ self.bins(logits) / 2.0

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        """Return the cross-entropy (...) of logits (..., num_bins) and the targets of values (...)."""
        bins, end = self.bins(logits), _symlog_of(self.limit)
        place = (symlog(values) + end) * ((self.num_bins - 1) / (2.0 * end))
        # A value that is not a number has no bin, and its loss is not a number either.
        index = place.nan_to_num().floor().clamp(0.0, self.num_bins - 2.0).long()
        low, high = bins[index], bins[index + 1]
        share = ((values - low) / (high - low)).clamp(0.0, 1.0)
        log_probs, index = log_softmax(logits, -1), index.unsqueeze(-1)
        lower, upper = (log_probs.gather(-1, index + offset).squeeze(-1) for offset in (0, 1))
        return -((1.0 - share) * lower + share * upper)
