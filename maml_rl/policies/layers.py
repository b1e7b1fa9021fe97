"""Layers of torch whose weights come from a generator of their own, not from the global random state."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from maml_rl.machine import single_threaded

Layer = TypeVar("Layer", bound=nn.Module)


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


def within(params: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the parameters whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
