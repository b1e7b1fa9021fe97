"""The memory that a policy returns: of the shapes and types that it got, or it is refused."""

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from maml_rl.policies import Memory, Policy
from maml_rl.spaces import array_layout

# Slots of the trial call: an unusual number, so that a wrong axis shows.
_TRIED = 3


def initial_memory(policy: Policy, grid: tuple[int, int], device: torch.device) -> Memory:
    """Return the memory of a grid (M, S) of slots at the start of their trials, tensors (M, S, ...)."""
    memory = policy.initial_memory(grid[0] * grid[1])
    return tuple(tensor.detach().to(device).unflatten(0, grid) for tensor in memory)


def check_carried_memory(policy: Policy, memory: Memory, expected: Memory) -> None:
    """Refuse a memory of other shapes or types than expected."""
    if len(memory) == len(expected) and all(
        one.shape == other.shape and one.dtype == other.dtype for one, other in zip(memory, expected, strict=True)
    ):
        return
    raise ValueError(
        f"{policy.class_name} returned {_shapes(memory)}, got {_shapes(expected)}; return "
        "tensors of the same shapes and types from act"
    )


def chosen(where: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the rows of `new` where `where` (M, S) is true, and those of `old` elsewhere, (M, S, ...)."""
    return torch.where(where.reshape(*where.shape, *(1,) * (old.dim() - where.dim())), new, old)


def try_memory(policy: Policy, observation_space: gymnasium.Space[Any]) -> None:
    """Refuse a policy with a memory of the wrong shape, before a phase is sampled."""
    memory = policy.initial_memory(_TRIED)
    if not isinstance(memory, tuple) or any(
        not isinstance(tensor, Tensor) or tensor.shape[:1] != (_TRIED,) for tensor in memory
    ):
        shown = _shapes(memory) if isinstance(memory, tuple) else f"a {type(memory).__name__}"
        raise ValueError(
            f"initial_memory({_TRIED}) of {policy.class_name} returned {shown}; return a tuple of tensors of the "
            f"shape ({_TRIED}, ...), one row for each slot"
        )
    # An external policy must not be called with zeros.
    if not memory or policy.told_who_acts:
        return
    shape, dtype = array_layout(observation_space)
    zeros = np.zeros(shape, dtype)
    if isinstance(observation_space, gymnasium.spaces.Discrete):
        zeros = zeros + observation_space.start
    elif isinstance(observation_space, gymnasium.spaces.Box):
        zeros = zeros.clip(observation_space.low, observation_space.high)
    with torch.inference_mode():
        before = tuple(tensor.unsqueeze(0) for tensor in memory)
        rows = torch.from_numpy(np.broadcast_to(zeros, (1, _TRIED, *shape)).copy()).to(before[0].device)
        noise = torch.full((1, _TRIED, policy.noise_size), 0.5, device=before[0].device)
        _, after = policy.act(rows, noise, before)
    check_carried_memory(policy, after, before)


def _shapes(memory: Any) -> str:
    if not memory:
        return "no memory"
    shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in memory]
    return f"the shape {shapes[0]}" if len(shapes) == 1 else f"the shapes ({', '.join(shapes)})"
