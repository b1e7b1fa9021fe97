"""Slots on a device: a family whose arrays are tensors there, and what its observations show beside its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.last_step import LastStepVectorEnv
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.envs.task_entries import TaskArrays, parse_tasks
from maml_rl.envs.task_observation import TaskObservationVectorEnv
from maml_rl.errors import TaskError
from maml_rl.samplers.device.streams import DeviceSlotStreams
from maml_rl.spaces import PackedSpace, array_layout, is_image

# Rewards, whether slots terminated (a bool: all or none ever), and the terms of the rewards by name.
Outcome = tuple[Tensor, Tensor | bool, dict[str, Tensor]]


def reason_against(env: MetaVectorEnv) -> str:
    """Return why slots cannot be on a device; "" if they can."""
    while isinstance(env, LastStepVectorEnv | TaskObservationVectorEnv):
        space = env.env.single_observation_space
        if is_image(space) or isinstance(space, PackedSpace):
            return "observations of images with further numbers are for the CPU alone"
        env = env.env
    if not isinstance(env, BatchedFamily):
        return f"{type(env).__name__} is not array code over slots, as a BatchedFamily"
    if any(entry.choices for entry in env.entries.values()):
        return f"the tasks of {type(env).__name__} have texts in them"
    return ""


class DeviceSlots:
    """Slots of a family, all of which begin and step together.

    Args:
        env: the family, made for N slots, and possibly inside of what shows tasks or the last step.
        device: where it goes.

    Attributes:
        observations: (N, *obs), of the last `begin` or `step`.
        physics: of the family; None if it has none.
    """

    def __init__(self, env: MetaVectorEnv, device: torch.device) -> None:
        self.num_envs, self.device = env.num_envs, device
        self._shown: list[_LastStep | _Tasks] = []
        while isinstance(env, LastStepVectorEnv | TaskObservationVectorEnv):
            shown = _LastStep(env, device) if isinstance(env, LastStepVectorEnv) else _Tasks(env, device)
            self._shown.insert(0, shown)
            env = env.env
        assert isinstance(env, BatchedFamily)
        self.family = env
        self.family.move_to(device)
        self.physics: Any = getattr(env, "physics", None)
        self._own = _zeros(env, device)
        self._streams = DeviceSlotStreams(self.num_envs, device)
        self._given: TaskArrays = {}
        self._keep_places(self.family.take_tasks, self.family.tasks)

    @property
    def observations(self) -> Tensor:
        """(N, *obs), of the last `begin` or `step`, always in the same place."""
        return self._shown[-1].observations if self._shown else self._own

    def take_tasks(self, tasks: Sequence[Task], seeds: np.ndarray[Any, Any]) -> Tensor:
        """Give every slot its task, for a new trial, and return the seeds there: all in one transfer.

        Args:
            tasks: M, each for N / M adjacent slots.
            seeds: of any shape, int64.

        Raises:
            TaskError: If a task is malformed; the message names the entry.
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
        packed = torch.from_numpy(np.concatenate((seeds.reshape(-1), *rows)))
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        there = packed.to(self.device, non_blocking=True)
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
            shown.begin_trial(self.family)
        return there[: seeds.size].reshape(seeds.shape)

    def begin(self, seeds: Tensor) -> None:
        """Begin an episode in every slot, from seeds (N,)."""
        self._streams.reseed(seeds)
        for shown in self._shown:
            shown.begin()
        self._keep_places(self.family.begin, self._streams, self._own)
        self._show()

    def step(self, actions: Tensor, active: Tensor | None) -> Outcome:
        """Step the active slots (None: all)."""
        outcome: Outcome = self._keep_places(self.family.advance, actions, active, self._streams, self._own)
        for shown in self._shown:
            shown.step(actions, active, outcome, self.family)
        self._show()
        return outcome

    def _show(self) -> None:
        inner = self._own
        for shown in self._shown:
            shown.write(inner)
            inner = shown.observations

    def _keep_places(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do work of the family; tensors that it replaces get their new values in their old places, for graphs."""
        before = self._tensors()
        result = work(*arguments)
        for (holder, name), old in before.items():
            owner = vars(self.family) if holder is None else vars(self.family)[holder]
            new = owner.get(name)
            if isinstance(new, Tensor) and new is not old and new.shape == old.shape:
                old.copy_(new)
                owner[name] = old
        return result

    def _tensors(self) -> dict[tuple[str | None, str], Tensor]:
        """Return the tensors that are the family's state, by attribute, or by attribute and name in it."""
        found: dict[tuple[str | None, str], Tensor] = {}
        for name, value in vars(self.family).items():
            if isinstance(value, Tensor):
                found[None, name] = value
            elif isinstance(value, dict) and name != "_reward_terms":
                found |= {(name, key): each for key, each in value.items() if isinstance(each, Tensor)}
        return found


class _LastStep:
    """What `LastStepVectorEnv` shows.

    Args:
        env: shows it on the CPU.
        device: where it is.
    """

    def __init__(self, env: LastStepVectorEnv, device: torch.device) -> None:
        self.observations, self._space = _zeros(env, device), env.single_action_space
        self._own = env.last_step_parts.observation.stop
        size = env.last_step_parts.size - self._own
        self._last = torch.zeros(env.num_envs, size, device=device)
        self._inner = env.env.single_observation_space
        self._begun = False

    def begin_trial(self, family: BatchedFamily) -> None:
        """Show nothing."""
        self._last.zero_()
        self._begun = False

    def begin(self) -> None:
        """Show that an episode has ended, except at the start of a trial."""
        if self._begun:
            self._last[:, -1] = 1.0
        self._begun = True

    def step(self, actions: Tensor, active: Tensor | None, outcome: Outcome, family: BatchedFamily) -> None:
        """Take the outcome of a step."""
        rewards, terminated, _ = outcome
        over = family.is_truncated()
        if terminated is not False:
            over = over | terminated
        new = torch.cat(
            (_flat(self._space, actions), rewards.float()[:, None], over.float().expand(len(rewards))[:, None]), 1
        )
        self._last.copy_(new if active is None else torch.where(active[:, None], new, self._last))

    def write(self, inner: Tensor) -> None:
        """Write the observations, of which `inner` (N, *obs) are the first numbers."""
        self.observations[:, : self._own] = _flat(self._inner, inner)
        self.observations[:, self._own :] = self._last


class _Tasks:
    """What `TaskObservationVectorEnv` shows; see `_LastStep`."""

    def __init__(self, env: TaskObservationVectorEnv, device: torch.device) -> None:
        self.observations = _zeros(env, device)
        self._inner = env.env.single_observation_space
        self._own = spaces.flatdim(self._inner)

    def begin_trial(self, family: BatchedFamily) -> None:
        """Show the tasks."""
        tasks = cast(dict[str, Tensor], family.tasks)
        numbers = [tasks[name].reshape(len(self.observations), -1) for name in sorted(tasks)]
        self.observations[:, self._own :] = torch.cat(numbers, 1)

    def begin(self) -> None:
        """Show the same tasks."""

    def step(self, actions: Tensor, active: Tensor | None, outcome: Outcome, family: BatchedFamily) -> None:
        """Show the same tasks."""

    def write(self, inner: Tensor) -> None:
        """Write the observations, of which `inner` (N, *obs) are the first numbers."""
        self.observations[:, : self._own] = _flat(self._inner, inner)


def _zeros(env: MetaVectorEnv, device: torch.device) -> Tensor:
    shape, dtype = array_layout(env.single_observation_space)
    return torch.zeros((env.num_envs, *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)


def _flat(space: spaces.Space[Any], values: Tensor) -> Tensor:
    """Return elements (N, ...) of a space as vectors (N, D), with one-hot vectors for discrete ones."""
    if isinstance(space, spaces.Discrete):
        numbers = torch.arange(int(space.n), device=values.device) + int(space.start)
        return (values.reshape(-1, 1) == numbers).float()
    return values.reshape(len(values), -1).float()
