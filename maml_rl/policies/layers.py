"""What layers are made of: weights from a generator of their own, not from the global random state, and tanh."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from maml_rl.machine import single_threaded

Layer = TypeVar("Layer", bound=nn.Module)
# The types whose tanh NumPy computes.
BY_NUMPY = (torch.float32, torch.float64)


def orthogonal(weights: Tensor, generator: torch.Generator, gain: float = 1.0) -> None:
    """Fill a matrix with orthogonal rows or columns of length `gain`, the same on any number of cores."""
    if weights.is_meta:
        # Only its size is wanted; torch would import sympy.
        return
    with single_threaded():
        nn.init.orthogonal_(weights, gain, generator)


def empty_layer(make: Callable[..., Layer], *args: Any, **options: Any) -> Layer:
    """Make a layer without values of its parameters, by a class of `torch.nn` that has no other layers in it.

    The constructors of `torch.nn` draw from the global random state. `nn.utils.skip_init` does not, but it imports
    sympy, which takes each process more than a second.
    """
    layer = make(*args, device="meta", **options)
    for name, param in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.empty(param.shape, dtype=param.dtype)))
    return layer


def tanh_(units: Tensor) -> Tensor:
    """Apply tanh in place.

    On a CPU by NumPy, unless it is differentiated: in a sixth of torch's time, with values that differ from torch's by
    at most one unit in the last place. A value does not depend on its place in an array.
    """
    if units.device.type != "cpu" or units.dtype not in BY_NUMPY or units.requires_grad:
        return units.tanh_()
    values = units.numpy()
    np.tanh(values, out=values)
    return units


def within(params: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the parameters whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
