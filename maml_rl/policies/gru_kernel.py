"""A GRU through whole sequences, on a CPU several times as fast forward and backward as torch's own.

Torch records a dozen operations of every step, and goes back through all of them. Here a step is one matrix product and
four other operations forward, and one and two backward: what the gates contribute to the gradient is computed of all
steps at once, and so are the gradients of the weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def gru(inputs: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Return the units (L, N, H) of a GRU; differentiable once.

    r = sigmoid(W_r x + U_r h + c_r), z = sigmoid(W_z x + U_z h + c_z), n = tanh(W_n x + b_n + r (U_n h + c_n)), and the
    next h is n + z (h - n), as `torch.nn.GRU` computes it.

    Args:
        inputs: (L, N, I).
        hidden: (N, H) before the first step.
        weights: (3 H, I), (3 H, H), (3 H,) and (3 H,): of inputs and hidden units, and their biases, in torch's order.
    """
    of_inputs, of_hidden, input_bias, hidden_bias = weights
    units: Tensor = _Recurrence.apply(linear(inputs, of_inputs, input_bias), hidden, of_hidden, hidden_bias)
    return units


class _Recurrence(torch.autograd.Function):
    """The part of a GRU that goes from step to step."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        length, num, size = gates.shape[0], gates.shape[1], hidden.shape[-1]
        units, recalled = gates.new_empty(length + 1, num, size), gates.new_empty(length, num, 3 * size)
        units[0] = hidden
        # They become reset, keep and new.
        gates = gates.clone()
        transposed = weight.mT.contiguous()
        # Views of all steps at once: one by one they would take as long as the arithmetic.
        parts = (gates[..., : 2 * size], *gates.split(size, -1), recalled, *recalled.split((2 * size, size), -1))
        before = units.unbind(0)
        for gated, reset, keep, new, sums, of_gated, of_new, old, after in zip(
            *(part.unbind(0) for part in parts), before[:-1], before[1:], strict=True
        ):
            torch.addmm(bias, old, transposed, out=sums)
            gated.add_(of_gated).sigmoid_()
            new.addcmul_(reset, of_new).tanh_()
            torch.lerp(new, old, keep, out=after)
        ctx.save_for_backward(units, gates, recalled, weight)
        return units[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        units, gates, recalled, weight = ctx.saved_tensors
        size = units.shape[-1]
        reset, keep, new = gates.split(size, -1)
        # What a gradient of the units after a step is multiplied by, for each sum of a gate.
        of_new = (1.0 - keep) * (1.0 - new.square())
        of_reset = of_new * recalled[..., 2 * size :] * reset * (1.0 - reset)
        factors = torch.stack((of_reset, (units[:-1] - new) * keep * (1.0 - keep), of_new), 2)
        # The same, of what the gates take from the units before.
        recalling = factors.clone()
        recalling[:, :, 2] *= reset
        # From the last step to the first: the gradient of the units after it, and of what it took from those before.
        of_units, of_recalled = torch.empty_like(units), torch.empty_like(recalling)
        of_units[1:] = gradient
        of_units[0] = 0.0
        views = of_units.unbind(0)
        for factor, kept, out, flat, after, before in zip(
            *(part.unbind(0)[::-1] for part in (recalling, keep, of_recalled, of_recalled.flatten(2))),
            views[:0:-1],
            views[-2::-1],
            strict=True,
        ):
            torch.mul(factor, after.unsqueeze(1), out=out)
            before.addcmul_(after, kept).addmm_(flat, weight)
        of_gates = factors.mul_(of_units[1:].unsqueeze(2)).flatten(2)
        rows = of_recalled.flatten(2).flatten(0, 1)
        return of_gates, of_units[0], rows.mT @ units[:-1].flatten(0, 1), rows.sum(0)
