"""Slots on a device: a family whose arrays are tensors there, and what its observations show beside its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from maml_rl.arrays import CONTAINERS, NO_STATE, move_state, state_of, to_device
from maml_rl.envs.adapted_batch import CheckedVectorEnv
from maml_rl.envs.family import ArrayFamily, BatchedFamily
from maml_rl.envs.meta_env import MetaVectorEnv, Task, check_flags
from maml_rl.envs.observing import ObservingVectorEnv
from maml_rl.envs.tasks import TaskArrays, parse_tasks
from maml_rl.errors import ConfigError, TaskError
from maml_rl.samplers.device.streams import DeviceSlotStreams
from maml_rl.samplers.failures import describe_env
from maml_rl.samplers.in_process import WorkHere
from maml_rl.samplers.worker_progress import IN_RESET, IN_RESET_TASK
from maml_rl.spaces import array_layout

# The first steps, in which slots are watched, and what may change in all of them.
_CHECKED_STEPS = 3
_MAY_CHANGE = NO_STATE | {"env", "xp", "physics", "buffers", "_streams", "_sent"}
# How far objects within objects are looked at.
_DEPTH = 2
# What a sampler calls elsewhere, and not here.
_NOT_CALLED = ("reset_task", "reset_buffers", "step_send", "step_recv")


def reason_against(env: MetaVectorEnv) -> str:
    """Return why slots cannot be on a device; "" if they can."""
    family = env.unwrapped
    if not isinstance(family, BatchedFamily):
        return f"{type(family).__name__} is not array code over slots, as a BatchedFamily"
    if not family.entries or any(entry.choices for entry in family.entries.values()):
        return f"the tasks of {type(family).__name__} have texts in them, or no entries"
    own = [name for name in _NOT_CALLED if getattr(type(family), name) is not getattr(BatchedFamily, name)]
    if own:
        return (
            f"{type(family).__name__} has a {' and a '.join(own)} of its own, which a device does not call; what "
            "follows from a task goes into _tasks_changed, all else into _reset_slots and _step_slots"
        )
    return ""


class DeviceSlots:
    """Slots of a family, all of which begin and step together.

    Args:
        env: the family, made for N slots, and possibly inside of what shows tasks or the last step.
        device: where it goes.
        work: makes errors of what the family raises; None for a new one.

    Attributes:
        observations: (N, *obs), of the last `begin` or `step`.
        physics: of the family; None if it has none.
        can_be_recorded: whether a step can be part of a CUDA graph.
        may_end: whether an episode may end by itself; None until the first step tells.
        work: as given.
        close: closes the family.
    """

    def __init__(self, env: MetaVectorEnv, device: torch.device, work: WorkHere | None = None) -> None:
        self.num_envs, self.device, self.close = env.num_envs, device, env.close
        self.work, self._steps = work or WorkHere(describe_env(type(env.unwrapped))), 0
        self._shown: list[ObservingVectorEnv] = []
        while isinstance(env, ObservingVectorEnv):
            move_state(env, device)
            self._shown.insert(0, env)
            env = env.env
        self._watched = env.watched if isinstance(env, CheckedVectorEnv) else None
        family = env.unwrapped
        assert isinstance(family, BatchedFamily)
        self.family, self.can_be_recorded = family, family.can_be_recorded
        self.family.move_to(device)
        self.physics: Any = getattr(family, "physics", None)
        self.may_end: bool | None = None
        self._holders = family, *self._shown
        # Of the family, then of each that shows more.
        self._observations = [_zeros(shown, device) for shown in (family, *self._shown)]
        self._streams = DeviceSlotStreams(self.num_envs, device)
        self._given: TaskArrays = {}
        self._to_check = _CHECKED_STEPS
        # What each of them had after the first episodes began, beside the numbers in tensors of its state.
        self._contents: list[dict[str, Any]] = []
        self._in_place(self.family.take_tasks, self.family.tasks)

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
            with self.work.at(IN_RESET_TASK):
                self._in_place(self.family.take_tasks, moved)
            self._given = arrays
        for shown in self._shown:
            self._in_place(shown.begin_trial, self.family.tasks)
        return there[: seeds.size].reshape(seeds.shape)

    def begin(self, seeds: Tensor) -> None:
        """Begin an episode in every slot, from seeds (N,)."""
        self._streams.reseed(seeds)
        with self.work.at(IN_RESET):
            self._in_place(self._begin)
        self._steps = 0
        if not self._contents and self.can_be_recorded:
            self._contents = self._contents_now()
            self._refuse_hidden_state()

    def _begin(self) -> None:
        for shown in self._shown:
            shown.begin_episodes()
        # Not as methods of the family, which may have helpers of these names.
        ArrayFamily.begin(self.family, self._streams, self._observations[0])
        self._show()

    def step(self, actions: Tensor, active: Tensor | None) -> list[Any]:
        """Step the active slots (None: all).

        Returns:
            Rewards; whether slots terminated (a bool: all or none ever); whether the family truncated them (False:
            never); and the recorded infos, in their order.
        """
        with self.work.at(self._steps):
            outcome: list[Any] = self._in_place(self._step, actions, active)
        self._steps += 1
        may_end = outcome[1] is not False or outcome[2] is not False
        if self.may_end not in (None, may_end):
            raise ConfigError(
                f"{type(self.family).__name__} returns False for terminated in one step and more in another, or has so "
                "in _truncated; return a tensor (N,) of bool in every step"
            )
        self.may_end = may_end
        return outcome

    def _step(self, actions: Tensor, active: Tensor | None) -> list[Any]:
        family = self.family
        rewards, terminated, terms = ArrayFamily.advance(family, actions, active, self._streams, self._observations[0])
        terminated, truncated = self._flags("terminated", terminated), self._flags("_truncated", family._truncated)
        for shown in self._shown:
            over = ArrayFamily.is_truncated(family)
            shown.take_step(slice(None), actions, rewards, over if terminated is False else over | terminated, active)
        self._show()
        self._to_check = max(0, self._to_check - 1)
        recorded = [self._of_slots(name, terms[name]) for name in family.recorded_infos]
        return [self._of_slots("rewards", rewards), terminated, truncated, *recorded]

    def _of_slots(self, name: str, values: Any) -> Tensor:
        """Return numbers of a step as a tensor (N,)."""
        if isinstance(values, np.ndarray):
            raise TypeError(f"{name} is an array of NumPy; make it by functions of self.xp")
        numbers = values if isinstance(values, Tensor) else torch.full((), values, device=self.device)
        return numbers.expand(self.num_envs)

    def _flags(self, name: str, flags: Any) -> Tensor | bool:
        """Return flags of a step as a tensor (N,) of bool, or one for all slots."""
        if isinstance(flags, bool | np.bool_):
            return bool(flags)
        array = self._of_slots(name, flags)
        if array.is_floating_point():
            check_flags(name, array.cpu().numpy())
        return array.bool()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a step reads and changes, by name."""
        found = {name: owner[key] for name, (owner, key) in self._state_now().items()}
        found |= {f"observations of {number}": x for number, x in enumerate(self._observations)}
        return found | self._streams.state()

    def _state_now(self) -> dict[str, tuple[Any, Any]]:
        """Return where the tensors of all holders are now, as `state_of`."""
        states = [
            (f"{type(holder).__name__} {number}", state_of(holder, Tensor))
            for number, holder in enumerate(self._holders)
        ]
        return {f"{name} of {holder}": place for holder, state in states for name, place in state.items()}

    def _show(self) -> None:
        for shown, (own, observations) in zip(self._shown, pairwise(self._observations), strict=True):
            shown.write(own, observations)

    def _in_place(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do work; what it puts into other tensors goes to their old places, which graphs read and write."""
        call = partial(work, *arguments) if self._watched is None else partial(self._watched, partial(work, *arguments))
        if not self.can_be_recorded:
            return call()
        places = {name: owner[key] for name, (owner, key) in self._state_now().items()}
        is_checked = self._contents and (self._to_check or work != self._step)
        result = call()
        if is_checked:
            self._refuse_hidden_state()
        now = self._state_now()
        new = {name: owner[key] for name, (owner, key) in now.items() if owner[key] is not places.get(name)}
        # Nothing may be in a place that gets other numbers, or in that of another.
        left = {_storage(places[name]) for name in new.keys() & places.keys()}
        if isinstance(result, list):
            result = [x.clone() if isinstance(x, Tensor) and _storage(x) in left else x for x in result]
        taken = {_extent(owner[key]) for name, (owner, key) in now.items() if name not in new}
        for name, tensor in new.items():
            is_shared = _storage(tensor) in left or _extent(tensor) in taken
            # What is expanded cannot be written to.
            new[name] = tensor.clone() if is_shared or 0 in tensor.stride() else tensor
            taken.add(_extent(new[name]))
        for name, tensor in new.items():
            (owner, key), place = now[name], places.get(name, tensor)
            has_room = (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
            owner[key] = place.copy_(tensor) if has_room else tensor
        return result

    def _contents_now(self) -> list[dict[str, Any]]:
        return [{name: _content(value) for name, value in vars(holder).items()} for holder in self._holders]

    def _refuse_hidden_state(self) -> None:
        """Refuse slots that keep, or have changed, what a recorded step cannot see."""
        for holder, before, now in zip(self._holders, self._contents, self._contents_now(), strict=True):
            for name in before.keys() & now.keys() - _MAY_CHANGE:
                value = vars(holder)[name]
                if before[name] != now[name] or isinstance(value, np.ndarray):
                    raise ConfigError(
                        f"{type(holder).__name__} has state in its attribute {name!r}, a {type(value).__name__}, that "
                        "a recorded step of a device would not see; keep it in arrays of one shape and type, made by "
                        "functions of self.xp, as attributes or in dicts and lists that are attributes, or use "
                        "backend 'auto' without a device"
                    )
            before |= {name: now[name] for name in now.keys() - before.keys()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _content(value: Any, levels: int = 1, depth: int = _DEPTH) -> Any:
    """Return what tells whether something has changed: of tensors of the state their form, of others their place."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, levels >= 0 or value.data_ptr()
    levels = levels - 1 if type(value) in CONTAINERS else -1
    if isinstance(value, list | tuple):
        return [_content(entry, levels, depth) for entry in value]
    if isinstance(value, dict):
        return {key: _content(entry, levels, depth) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    is_code = isinstance(value, type | ModuleType | FunctionType)
    own = vars(value) if depth and hasattr(value, "__dict__") and not is_code else {}
    return id(value), {key: _content(entry, -1, depth - 1) for key, entry in own.items()}


def _zeros(env: MetaVectorEnv, device: torch.device) -> Tensor:
    shape, dtype = array_layout(env.single_observation_space)
    return torch.zeros((env.num_envs, *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)
