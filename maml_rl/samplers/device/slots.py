"""Slots on a device: a family whose arrays are tensors there, and what its observations show beside its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from maml_rl.arrays import to_device
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.envs.observing import ObservingVectorEnv
from maml_rl.envs.task_entries import TaskArrays, parse_tasks
from maml_rl.errors import ConfigError, TaskError
from maml_rl.samplers.device.streams import DeviceSlotStreams
from maml_rl.spaces import array_layout

# The first steps, in which a family is watched, and what the base of all families keeps.
_CHECKED_CALLS = 3
# How far objects within objects are looked at.
_DEPTH = 2
_OF_EVERY_FAMILY = frozenset(("xp", "physics", "physics_seconds", "buffers", "_reward_terms", "_streams", "_sent"))


def reason_against(env: MetaVectorEnv) -> str:
    """Return why slots cannot be on a device; "" if they can."""
    while isinstance(env, ObservingVectorEnv):
        env = env.env
    family = env.unwrapped
    if not isinstance(family, BatchedFamily):
        return f"{type(family).__name__} is not array code over slots, as a BatchedFamily"
    if any(entry.choices for entry in family.entries.values()):
        return f"the tasks of {type(family).__name__} have texts in them"
    return ""


class DeviceSlots:
    """Slots of a family, all of which begin and step together.

    Args:
        env: the family, made for N slots, and possibly inside of what shows tasks or the last step.
        device: where it goes.

    Attributes:
        observations: (N, *obs), of the last `begin` or `step`.
        physics: of the family; None if it has none.
        can_be_recorded: whether a step can be part of a CUDA graph.
        may_end: whether an episode may end by itself; None until the first step tells.
    """

    def __init__(self, env: MetaVectorEnv, device: torch.device) -> None:
        self.num_envs, self.device = env.num_envs, device
        self._shown: list[ObservingVectorEnv] = []
        while isinstance(env, ObservingVectorEnv):
            env.move_to(device)
            self._shown.insert(0, env)
            env = env.env
        family = env.unwrapped
        assert isinstance(family, BatchedFamily)
        self.family, self.can_be_recorded = family, family.can_be_recorded
        self.family.move_to(device)
        self.physics: Any = getattr(family, "physics", None)
        self.may_end: bool | None = None
        # Of the family, then of each that shows more.
        self._observations = [_zeros(shown, device) for shown in (family, *self._shown)]
        self._streams = DeviceSlotStreams(self.num_envs, device)
        self._given: TaskArrays = {}
        self._to_check = _CHECKED_CALLS if self.can_be_recorded else 0
        self._keep_places(self.family.take_tasks, self.family.tasks)

    @property
    def observations(self) -> Tensor:
        """(N, *obs), of the last `begin` or `step`, always in the same place."""
        return self._observations[-1]

    def take_tasks(self, tasks: Sequence[Task], seeds: np.ndarray[Any, Any]) -> Tensor:
        """Give every slot its task, for a new trial, and return the seeds there: all in one transfer.

        Args:
            tasks: M, each for N / M adjacent slots.
            seeds: of any shape, int64.
        """
        per_task = self.num_envs // len(tasks)
        try:
            arrays = parse_tasks(tasks, self.family.entries, len(tasks))
        except TaskError as error:
            if not error.in_slots:
                raise
            ((task, what),) = error.in_slots
            raise TaskError.of_slot(task * per_task, what) from None
        # A phase often has the tasks of the one before, and what follows from them may take long.
        known = self._given
        if known.keys() == arrays.keys() and all(np.array_equal(known[name], arrays[name]) for name in arrays):
            arrays = {}
        rows = [array.reshape(-1).view(np.int64) for array in arrays.values()]
        there = to_device(torch.from_numpy(np.concatenate((seeds.reshape(-1), *rows))), self.device)
        start, places = seeds.size, cast(dict[str, Tensor], self.family.tasks)
        if arrays:
            moved: dict[str, Any] = {}
            for name, array in arrays.items():
                values = there[start : start + array.size].view(torch.float64).reshape(array.shape)
                start += array.size
                moved[name] = values.repeat_interleave(per_task, 0).to(places[name].dtype)
            self._keep_places(self.family.take_tasks, moved)
            self._given = arrays
        for shown in self._shown:
            shown.begin_trial(self.family.tasks)
        return there[: seeds.size].reshape(seeds.shape)

    def begin(self, seeds: Tensor) -> None:
        """Begin an episode in every slot, from seeds (N,)."""
        self._streams.reseed(seeds)
        for shown in self._shown:
            shown.begin_episodes()
        self._keep_places(self.family.begin, self._streams, self._observations[0])
        self._show()

    def step(self, actions: Tensor, active: Tensor | None) -> list[Any]:
        """Step the active slots (None: all).

        Returns:
            Rewards; whether slots terminated (a bool: all or none ever); whether the family truncated them (False:
            never); and the recorded infos, in their order.
        """
        rewards, terminated, terms = self._keep_places(
            self.family.advance, actions, active, self._streams, self._observations[0]
        )
        for shown in self._shown:
            over = self.family.is_truncated()
            shown.take_step(slice(None), actions, rewards, over if terminated is False else over | terminated, active)
        self._show()
        truncated = self.family.truncated_by_itself
        may_end = not (terminated is False and truncated is False)
        if self.may_end not in (None, may_end):
            raise ConfigError(
                f"{type(self.family).__name__} returns False for terminated in one step and more in another; "
                "return a tensor (N,) of bool in every step"
            )
        self.may_end = may_end
        return [rewards, terminated, truncated, *(terms[name] for name in self.family.recorded_infos)]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a step reads and changes, by name: the family's, and what is shown beside it."""
        found = {name if holder is None else f"{holder}[{name!r}]": x for (holder, name), x in self._tensors().items()}
        for number, shown in enumerate(self._shown):
            found |= {f"{name} of {number}": x for name, x in vars(shown).items() if isinstance(x, Tensor)}
        found |= {f"observations of {number}": x for number, x in enumerate(self._observations)}
        return found | self._streams.state()

    def _show(self) -> None:
        for shown, (own, observations) in zip(self._shown, pairwise(self._observations), strict=True):
            shown.write(own, observations)

    def _keep_places(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do work of the family; tensors that it replaces get their new values in their old places, for graphs."""
        before, all_before = self._tensors(), dict(vars(self.family))
        constants = {name: _content(value) for name, value in all_before.items()} if self._to_check else {}
        result = work(*arguments)
        if self._to_check and work == self.family.advance:
            self._to_check -= 1
            self._refuse_hidden_state(all_before, constants)
        for (holder, name), old in before.items():
            owner = vars(self.family) if holder is None else vars(self.family)[holder]
            new = owner.get(name)
            if isinstance(new, Tensor) and new is not old and new.shape == old.shape:
                old.copy_(new)
                owner[name] = old
        return result

    def _refuse_hidden_state(self, before: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        """Refuse a family whose step has changed what a recorded step cannot see."""
        now = vars(self.family)
        for name in before.keys() & now.keys() - _OF_EVERY_FAMILY:
            old, new = before[name], now[name]
            moved = isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape != new.shape
            if moved or constants[name] != _content(new):
                what = f"of another shape ({tuple(new.shape)})" if moved else f"a {type(new).__name__}"
                raise ConfigError(
                    f"{type(self.family).__name__} changes its attribute {name!r}, {what}, in a step, which a "
                    "recorded step of a device would not see; keep its state in tensors of one shape, as attributes or "
                    "in dicts of them, or use backend 'auto' without a device"
                )

    def _tensors(self) -> dict[tuple[str | None, str], Tensor]:
        """Return the tensors that are the family's state, by attribute, or by attribute and name in it."""
        found: dict[tuple[str | None, str], Tensor] = {}
        for name, value in vars(self.family).items():
            if isinstance(value, Tensor):
                found[None, name] = value
            elif isinstance(value, dict) and name != "_reward_terms":
                found |= {(name, key): entry for key, entry in value.items() if isinstance(entry, Tensor)}
        return found


def _content(value: Any) -> Any:
    """Return what tells whether state outside of tensors has changed: tensors count by their place, or not at all.

    Tensors that are attributes, or in a dict that is one, get their new values in their old places.
    """
    if isinstance(value, Tensor):
        return None
    if isinstance(value, dict):
        return {key: None if isinstance(entry, Tensor) else _place(entry) for key, entry in value.items()}
    return _place(value)


def _place(value: Any, depth: int = _DEPTH) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape
    if isinstance(value, list | tuple):
        return [_place(each, depth) for each in value]
    if isinstance(value, dict):
        return {key: _place(entry, depth) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    is_code = isinstance(value, type | ModuleType | FunctionType)
    own = vars(value) if depth and hasattr(value, "__dict__") and not is_code else {}
    return id(value), {key: _place(entry, depth - 1) for key, entry in own.items()}


def _zeros(env: MetaVectorEnv, device: torch.device) -> Tensor:
    shape, dtype = array_layout(env.single_observation_space)
    return torch.zeros((env.num_envs, *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)
