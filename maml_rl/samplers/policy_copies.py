"""Copies of a policy in other processes and on other devices, and the parameters that they get later."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from maml_rl.policies import Policy
from maml_rl.samplers.importing import find_unimportable


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


class PolicyAt:
    """A policy on the device where it acts: itself if it is there, else a copy.

    Args:
        policy: whose parameters may change.
        device: where it acts.
    """

    def __init__(self, policy: Policy, device: str) -> None:
        self._policy, self._device = policy, torch.device(device)
        self._copy: Policy | None = None

    def __call__(self) -> Policy:
        """Return the policy, always the same object, with the present parameters."""
        if next((param.device.type for param in self._policy.parameters()), None) in (None, self._device.type):
            return self._policy
        if self._copy is None:
            self._copy = copy.deepcopy(self._policy).to(self._device)
        with torch.no_grad():
            copies = (*self._copy.parameters(), *self._copy.buffers())
            originals = (*self._policy.parameters(), *self._policy.buffers())
            for ours, theirs in zip(copies, originals, strict=True):
                ours.copy_(theirs)
        return self._copy


def require_loadable(policy: Policy, start_method: str | None) -> None:
    """Refuse a policy that a worker could not load.

    Raises:
        TypeError: If it cannot be pickled, or needs a class or function that a worker cannot import.
    """
    pickle_policy(policy)
    # Workers that are forked inherit it.
    name = "" if start_method == "fork" else find_unimportable(policy)
    if name:
        raise TypeError(
            f"the policy {type(policy).__name__} needs {name}, which workers cannot import, since it is defined in a "
            "notebook, an interactive session, `python -c` or a script from standard input; move it to a module and "
            'import it from there, or use inference="central"'
        )


def is_loadable(policy: Policy, start_method: str | None) -> bool:
    """Return whether a worker could load a policy."""
    try:
        require_loadable(policy, start_method)
    except TypeError:
        return False
    return True


def pickle_policy(policy: Policy) -> bytes:
    """Return a policy as bytes for a worker, which computes on the CPU.

    Raises:
        TypeError: If it cannot be pickled.
    """
    try:
        return pickle.dumps(copy.deepcopy(policy).to("cpu"), pickle.HIGHEST_PROTOCOL)
    # A part of the policy may raise anything.
    except Exception as error:
        raise TypeError(
            f"the policy {type(policy).__name__} cannot be pickled for a child process ({type(error).__name__}: "
            f'{error}); use functions and classes that a module defines at its top level, or inference="central"'
        ) from error
