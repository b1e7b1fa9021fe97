"""The state of an optimizer from `torch.optim` as flat names and tensors, as checkpoints keep it."""

import re
from typing import Any

import torch
from torch import Tensor

_PREFIX = "optimizer"


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state as {"optimizer.0.exp_avg": tensor, ...}; its hyperparameters are settings."""
    return {
        f"{_PREFIX}.{index}.{name}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer what `optimizer_state` returned; other names in `state` are ignored.

    Raises:
        ValueError: If it is for other parameters.
    """
    whole = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if match := re.fullmatch(rf"{_PREFIX}\.(\d+)\.(\w+)", key):
            entries.setdefault(int(match[1]), {})[match[2]] = value.clone() if isinstance(value, Tensor) else value
    known = {index for group in whole["param_groups"] for index in group["params"]}
    if not entries.keys() <= known:
        raise ValueError(f"the optimizer's state is for {len(entries)} parameters, and there are {len(known)}")
    optimizer.load_state_dict({**whole, "state": entries})
