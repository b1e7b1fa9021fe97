"""The state of a learner's optimizers and networks as flat names and tensors, as checkpoints keep it."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# The name of a learner's only optimizer, whose entries have no further name.
SINGLE = "optimizer"


def named_optimizers(
    single: torch.optim.Optimizer | None, others: Mapping[str, torch.optim.Optimizer]
) -> dict[str, torch.optim.Optimizer]:
    """Return all optimizers of a learner by name; a ValueError for a name that no tensor could have."""
    for name in others:
        if name == SINGLE or not name.isidentifier():
            raise ValueError(f"an optimizer's name is a word other than {SINGLE!r}, got {name!r}")
    return {**({} if single is None else {SINGLE: single}), **others}


def optimizer_state(optimizer: torch.optim.Optimizer, name: str = SINGLE) -> dict[str, Any]:
    """Return an optimizer's state; its hyperparameters are settings.

    It is {"optimizer.0.exp_avg": tensor, ...}, or where a learner has several {"optimizer.NAME.0.exp_avg": tensor,
    ...}.
    """
    return {
        f"{_prefix(name)}.{index}.{entry}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for entry, value in entries.items()
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], name: str = SINGLE) -> None:
    """Give an optimizer what `optimizer_state` returned under its name; a ValueError for other parameters."""
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


def load_networks(networks: nn.Module, state: Mapping[str, Any], optional: Collection[str]) -> None:
    """Give networks what their `state_dict` returned; other names in `state` are ignored.

    If no name begins with one of the `optional` words, the current values of these stay. A ValueError if it is for
    others.
    """
    own = networks.state_dict()
    kinds = {name.partition(".")[0] for name in own}
    mine = {name: value for name, value in state.items() if name.partition(".")[0] in kinds}
    left_out = {*optional} - {name.partition(".")[0] for name in mine}
    mine |= {name: value for name, value in own.items() if name.partition(".")[0] in left_out}
    try:
        networks.load_state_dict(mine)
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise ValueError(f"the state of {', '.join(sorted(kinds))} does not fit: {what}") from None


def _prefix(name: str) -> str:
    return SINGLE if name == SINGLE else f"{SINGLE}.{name}"
