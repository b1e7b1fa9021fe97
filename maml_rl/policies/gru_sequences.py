"""Several GRUs on sequences at once, differentiable: the same numbers as torch's own GRU, in less time on a CPU.

torch keeps a graph of a dozen operations for every step, and multiplies the gradient of the weights step by step. Here
one backward pass goes through the steps with three element-wise operations and one product each, for all GRUs at once,
and the gradients of weights and inputs are one product each at its end. Buffers are used again by the next call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maml_rl.policies.layers import tanh_

# Of one GRU, in torch's order: weight_ih, weight_hh, bias_ih, bias_hh.
Weights = Sequence[Tensor]
# Steps whose factors are computed together: few enough for the cache.
_STEPS = 8


class GRUSequences:
    """Goes through sequences with K GRUs of one size, differentiably once.

    r = sigmoid(W_r x + U_r h + c_r), z = sigmoid(W_z x + U_z h + c_z), n = tanh(W_n x + b_n + r (U_n h + c_n)), and the
    next h is n + z (h - n), as `torch.nn.GRU` computes it.

    A call overwrites the buffers that the gradient of the previous call needs: compute that gradient first.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._buffers: dict[str, Tensor] = {}

    def __call__(
        self, inputs: Sequence[Tensor], weights: Sequence[Weights], hidden: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the units (L, N, H) of each GRU for its inputs (L, N, I) and weights.

        Its memory before the first step is (N, H); without one, zeros.
        """
        size = weights[0][1].shape[1]
        length, num, width = inputs[0].shape
        flat = torch.stack([part.reshape(length * num, width) for part in inputs])
        entering = torch.stack([weight[0].mT for weight in weights])
        held = torch.stack([weight[1].mT for weight in weights])
        # The last third of the bias of the memory is within the product with the reset gate, the rest is not.
        bias = torch.stack(
            [torch.cat((weight[2][: 2 * size] + weight[3][: 2 * size], weight[2][2 * size :])) for weight in weights]
        )
        inside = torch.stack([weight[3][2 * size :] for weight in weights]).unsqueeze(1)
        start = flat.new_zeros(len(flat), num, size) if hidden is None else torch.stack(list(hidden))
        units: Tensor = _Sequences.apply(self, start, flat, entering, bias, held, inside)
        return units.unbind(1)

    def buffer(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor of a shape, with any content; the same tensor for the same name and shape."""
        existing = self._buffers.get(name)
        if existing is None or existing.shape != shape or existing.dtype != like.dtype:
            existing = self._buffers[name] = like.new_empty(shape)
        return existing

    def together(self, name: str, steps: Tensor) -> Tensor:
        """Return steps (L, N, W) as rows (L * N, W): a view if that can be, else in a buffer."""
        if steps.is_contiguous():
            return steps.flatten(0, 1)
        rows = self.buffer(name, steps, steps.shape[0] * steps.shape[1], steps.shape[2])
        rows.view(steps.shape).copy_(steps)
        return rows


class _Sequences(torch.autograd.Function):
    """From inputs (K, L * N, I) to units (L, K, N, H); gates in torch's order: reset, keep, new."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: GRUSequences,
        start: Tensor,
        inputs: Tensor,
        entering: Tensor,
        bias: Tensor,
        held: Tensor,
        inside: Tensor,
    ) -> Tensor:
        count, num, size = start.shape
        length = inputs.shape[1] // num
        owner.num_calls += 1
        summed = owner.buffer("summed", inputs, length, count, num, 3 * size)
        product = summed.flatten(0, 2) if count == 1 else owner.buffer("rows", inputs, length * num, 3 * size)
        for index in range(count):
            torch.addmm(bias[index], inputs[index], entering[index], out=product)
            if count > 1:
                summed[:, index] = product.view(length, num, 3 * size)
        # The returned tensor is new, because the caller may keep it.
        states = inputs.new_empty(length + 1, count, num, size)
        states[0] = start
        gates = owner.buffer("gates", inputs, length, count, num, 3 * size)
        news = owner.buffer("news", inputs, length, count, num, size)
        within = inputs.new_zeros(count, 1, 3 * size)
        within[..., 2 * size :] = inside
        both = slice(0, 2 * size)
        old = states.unbind(0)
        for before, after, gate, two, reset, keep, product, sums, entered, new in zip(
            old[:-1],
            old[1:],
            gates.unbind(0),
            gates[..., both].unbind(0),
            gates[..., :size].unbind(0),
            gates[..., size : 2 * size].unbind(0),
            gates[..., 2 * size :].unbind(0),
            summed[..., both].unbind(0),
            summed[..., 2 * size :].unbind(0),
            news.unbind(0),
            strict=True,
        ):
            torch.baddbmm(within, before, held, out=gate)
            two.add_(sums).sigmoid_()
            tanh_(torch.addcmul(entered, reset, product, out=new))
            torch.lerp(new, before, keep, out=after)
        ctx.save_for_backward(inputs, entering, held, states)
        ctx.owner, ctx.number, ctx.kept = owner, owner.num_calls, (gates, news)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.number != ctx.owner.num_calls:
            raise RuntimeError("GRUSequences was called again before the gradient of this call was taken")
        inputs, entering, held, states = ctx.saved_tensors
        owner, (gates, news) = ctx.owner, ctx.kept
        length, count, num, size = news.shape
        grid = length, count, num, size
        # Factors of the gradient of a state: for the three gates on the memory's side, and for `new`.
        factors = owner.buffer("factors", inputs, length, count, num, 3, size)
        of_new, spare, slopes = (owner.buffer(name, inputs, *grid) for name in ("of new", "spare", "slopes"))
        for first in range(0, length, _STEPS):
            here = slice(first, first + _STEPS)
            reset, keep, product = gates[here].split(size, -1)
            new, other, derivative, difference = news[here], spare[here], of_new[here], slopes[here]
            of_reset, of_keep, of_product = factors[here].unbind(-2)
            torch.sub(1.0, keep, out=other)
            torch.mul(new, new, out=derivative).neg_().add_(1.0).mul_(other)
            torch.mul(derivative, reset, out=of_product)
            torch.sub(states[:-1][here], new, out=difference).mul_(keep)
            torch.mul(difference, other, out=of_keep)
            torch.sub(1.0, reset, out=other).mul_(product)
            torch.mul(of_product, other, out=of_reset)
        back = held.mT.contiguous()
        following, spare_step = inputs.new_zeros(count, num, size), inputs.new_empty(count, num, size)
        rows = factors.flatten(3)
        for given, slope, wide, factor, row, keep in zip(
            reversed(gradient.unbind(0)),
            reversed(slopes.unbind(0)),
            reversed(slopes.unsqueeze(3).unbind(0)),
            reversed(factors.unbind(0)),
            reversed(rows.unbind(0)),
            reversed(gates[..., size : 2 * size].unbind(0)),
            strict=True,
        ):
            torch.add(following, given, out=slope)
            factor.mul_(wide)
            torch.mul(slope, keep, out=spare_step)
            torch.baddbmm(spare_step, row, back, out=following)
        slopes.mul_(of_new)
        return None, following, *_gradients(owner, inputs, entering, states, rows, slopes)


def _gradients(
    owner: GRUSequences, inputs: Tensor, entering: Tensor, states: Tensor, rows: Tensor, of_new: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of inputs, weights and biases, for those of the gates (L, K, N, 3 * H) and of `new`."""
    length, count, num, size = of_new.shape
    to_inputs, to_entering = torch.empty_like(inputs), torch.empty_like(entering)
    to_bias, to_held = inputs.new_empty(count, 3 * size), inputs.new_empty(count, size, 3 * size)
    to_inside = inputs.new_empty(count, 1, size)
    for index in range(count):
        by, before = owner.together("rows", rows[:, index]), owner.together("kept", states[:-1, index])
        torch.mm(before.mT, by, out=to_held[index])
        to_bias[index] = by.sum(0)
        to_inside[index, 0] = to_bias[index, 2 * size :]
        # On the side of the inputs `new` is not multiplied by the reset gate.
        by.view(length, num, 3 * size)[..., 2 * size :] = of_new[:, index]
        to_bias[index, 2 * size :] = by[:, 2 * size :].sum(0)
        torch.mm(inputs[index].mT, by, out=to_entering[index])
        torch.mm(by, entering[index].mT, out=to_inputs[index])
    return to_inputs, to_entering, to_bias, to_held, to_inside
