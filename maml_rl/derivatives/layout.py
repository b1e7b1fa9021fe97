"""Parameters as flat vectors: (D,) for one policy, (k, D) for one set per task."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class ParameterLayout:
    """Where each named parameter of a module is in a flat vector, in the order of `named_parameters`.

    Attributes:
        shapes: {name: shape}.
        size: D, number of entries of all parameters together.
        width: number of outputs of the widest layer for one sample.
        units: number of outputs of all layers together, a measure of what one sample costs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(self._sizes)
        # Only a policy whose weights are used in many places, like those of convolutions, has more than their shapes.
        widths: Sequence[int] | None = getattr(module, "layer_widths", None)
        outputs = widths or [shape[0] for shape in self.shapes.values() if len(shape) > 1]
        self.width, self.units = max(outputs, default=1), sum(outputs)

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return (D,) for tensors of the parameters' own shapes, (k, D) for stacked ones; gradients flow through it."""
        lead = next(iter(params.values())).dim() - len(next(iter(self.shapes.values())))
        return torch.cat([params[name].flatten(lead) for name in self.shapes], dim=-1)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters (..., *shape) as views of `flat` (..., D); writing into them writes into it."""
        entries = flat.split(self._sizes, dim=-1)
        return {
            name: entry.reshape(*flat.shape[:-1], *shape)
            for (name, shape), entry in zip(self.shapes.items(), entries, strict=True)
        }
