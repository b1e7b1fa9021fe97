"""Copies of a policy in other processes and on other devices, and the parameters that they get later."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from numpy.typing import NDArray

from maml_rl.policies import Policy
from maml_rl.samplers.env_recipe import pickled, pickled_for_workers

_TOP_LEVEL = 'use functions and classes that a module defines at its top level, or inference="central"'


def state_of(policy: Policy) -> dict[str, NDArray[Any]]:
    """Return the policy's own parameters and constants as arrays by name, for `take_state`."""
    tensors = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def take_state(policy: Policy, state: Mapping[str, NDArray[Any]]) -> None:
    """Give a copy of a policy what `state_of` has returned."""
    with torch.no_grad():
        for name, tensor in (*policy.named_parameters(), *policy.named_buffers()):
            # The arrays may be read-only, which tensors cannot be.
            tensor.copy_(torch.tensor(state[name]))


def require_loadable(policy: Policy, start_method: str | None) -> None:
    """Refuse a policy that a worker could not load."""
    where = 'use inference="central"'
    _require_arrays(policy)
    pickled_for_workers(policy, f"the policy {policy.class_name}", _TOP_LEVEL, where, start_method)


def _require_arrays(policy: Policy) -> None:
    """Refuse, by a TypeError, tensors that no array can hold, in which workers get them."""
    for name, tensor in (*policy.named_parameters(), *policy.named_buffers()):
        try:
            torch.empty(0, dtype=tensor.dtype).numpy()
        except TypeError:
            raise TypeError(
                f"{name!r} of the policy {policy.class_name} has the type {tensor.dtype}, which NumPy lacks, so that "
                "workers cannot get it; convert it, as by policy.float(), or have the policy act in this process"
            ) from None


def pickle_policy(policy: Policy, remedy: str = _TOP_LEVEL, **how: Any) -> bytes:
    """Return a policy as bytes for a worker, which computes on the CPU; see `pickled` for the arguments."""
    name = f"the policy {policy.class_name}"
    _require_arrays(policy)
    if any(tensor.device.type != "cpu" for tensor in chain(policy.parameters(), policy.buffers())):
        try:
            policy = copy.deepcopy(policy).to("cpu")
        except TypeError:
            # What cannot be copied cannot be pickled, which names it.
            pickled(policy, name, remedy, **how)
            raise
    return pickled(policy, name, remedy, **how)
