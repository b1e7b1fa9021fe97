"""The state of optimizers from `torch.optim` as flat names and tensors, as checkpoints keep it."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# The name of a learner's only optimizer, whose entries have no further name.
SINGLE = "optimizer"


def optimizer_state(optimizer: torch.optim.Optimizer, name: str = SINGLE) -> dict[str, Any]:
    """Return an optimizer's state; its hyperparameters are settings.

    Args:
        optimizer: any.
        name: of the optimizer, where a learner has several.

    Returns:
        {"optimizer.0.exp_avg": tensor, ...}, or with a name {"optimizer.NAME.0.exp_avg": tensor, ...}.
    """
    return {
        f"{_prefix(name)}.{index}.{entry}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for entry, value in entries.items()
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], name: str = SINGLE) -> None:
    """Give an optimizer what `optimizer_state` returned under its name; other names in `state` are ignored.

    Raises:
        ValueError: If it is for other parameters.
    """
    whole = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if match := re.fullmatch(rf"{re.escape(_prefix(name))}\.(\d+)\.(\w+)", key):
            entries.setdefault(int(match[1]), {})[match[2]] = value.clone() if isinstance(value, Tensor) else value
    known = {index for group in whole["param_groups"] for index in group["params"]}
    if not entries.keys() <= known:
        whose = "the optimizer's state" if name == SINGLE else f"the state of the optimizer {name!r}"
        raise ValueError(f"{whose} is for {len(entries)} parameters, and there are {len(known)}")
    optimizer.load_state_dict({**whole, "state": entries})


def _prefix(name: str) -> str:
    return SINGLE if name == SINGLE else f"{SINGLE}.{name}"
