"""`JaxFamily`: a family that is pure functions of one environment in JAX; `JaxVectorEnv`: N slots of it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from maml_rl.arrays import copied
from maml_rl.envs.family import DEFAULT_TASK_SEED, BatchedFamily, FamilyOptions
from maml_rl.envs.jax.slot_functions import Carry, SlotFunctions, begin_jax
from maml_rl.envs.meta_env import RecordedInfos, Task, ValueRanges
from maml_rl.envs.tasks import TaskEntry, TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams

if TYPE_CHECKING:
    import torch

# Tasks as `draw_tasks` returns them.
Arrays = dict[str, NDArray[Any]]
Draw = Callable[[np.random.Generator, int], Mapping[str, ArrayLike]]


@dataclass(frozen=True, eq=False)
class JaxFamily:
    """A family as pure functions of ONE environment in JAX; a call with a number makes that many slots.

    A sampler takes it instead of an id or a class: `MultiTaskSampler(family, ...)`. Workers import its functions, which
    must therefore be in a module. `gymnasium.register("Mine-v0", vector_entry_point=family)` gives it an id.

    No function begins another episode by itself. Keys are `jax.random` keys (threefry): that of an episode is made of
    its seed, those of its reset and steps by `fold_in` of 0, 1, 2, ... An action within a Box is clipped to it.

    Attributes:
        reset: `reset(key, task) -> state, observation`; a state is any pytree of arrays.
        step: `step(key, state, action, task) -> state, observation, reward, terminated, truncated, infos`. It returns
            False itself, no array, for an end that never occurs.
        draw_tasks: `draw_tasks(random, num_tasks)` draws tasks from a NumPy generator, as arrays (num_tasks, ...) by
            entry. All tasks have the shapes and types of these.
        action_space: of one environment.
        observation_space: likewise; None: unbounded, of the shape and type that `reset` returns.
        max_episode_steps: steps after which an episode is truncated; None for never.
        draw_test_tasks: as `draw_tasks`, for evaluations; None: the same.
        recorded_infos: see `MetaEnv`; `step` returns each of them at every step.
        task_space: see `MetaEnv`.
        value_ranges: see `MetaEnv`.
        made_by: a function and its arguments that return this family, by which it is pickled; None: by its functions,
            which must be those of a module.
    """

    reset: Callable[[Any, Any], Any]
    step: Callable[[Any, Any, Any, Any], Any]
    draw_tasks: Draw
    action_space: spaces.Space[Any]
    observation_space: spaces.Space[Any] | None = None
    max_episode_steps: int | None = None
    draw_test_tasks: Draw | None = None
    recorded_infos: RecordedInfos = field(default_factory=dict)
    task_space: TaskSpace | None = None
    value_ranges: ValueRanges = field(default_factory=dict)
    made_by: tuple[Callable[..., Any], tuple[Any, ...]] | None = None

    # Its slots can be on a device; see `make_backend`.
    is_array_code = True

    def __call__(self, num_envs: int = 1, **options: Unpack[FamilyOptions]) -> JaxVectorEnv:
        """Return N slots; see `BatchedFamily` for the options."""
        return JaxVectorEnv(num_envs, self, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is compiled, which another process compiles itself.
        return self.made_by or (type(self), tuple(getattr(self, field.name) for field in fields(self)))

    def __deepcopy__(self, memo: Any) -> JaxFamily:
        return self

    def tasks_drawn(self, random: np.random.Generator, num_tasks: int, draw: Draw | None = None) -> Arrays:
        """Return drawn tasks, arrays (num_tasks, ...) by entry."""
        drawn = (draw or self.draw_tasks)(random, num_tasks)
        if not isinstance(drawn, Mapping):
            raise TypeError(f"draw_tasks must return arrays (num_tasks, ...) by entry, as a dict, got {drawn!r}")
        arrays = {name: np.asarray(array) for name, array in drawn.items()}
        for name, array in arrays.items():
            if array.shape[:1] != (num_tasks,) or array.dtype.kind not in "iuf":
                raise TypeError(
                    f"draw_tasks({num_tasks}) returned {name!r} as {array.dtype} of shape {array.shape}, expected "
                    f"numbers of shape ({num_tasks}, ...)"
                )
        return arrays

    @cached_property
    def compiled(self) -> SlotFunctions:
        """What all slots of the family share: its functions, compiled once for each number of slots."""
        # Nothing else may be the first to look for devices.
        begin_jax("cpu")
        return SlotFunctions(
            (self.reset, self.step), self.observation_space, self.action_space, self._example, self.recorded_infos
        )

    @cached_property
    def _example(self) -> Arrays:
        return self.tasks_drawn(np.random.default_rng(DEFAULT_TASK_SEED), 1)

    @property
    def entries(self) -> dict[str, TaskEntry]:
        """What its tasks look like."""
        return {name: _entry(array) for name, array in self._example.items()}


class JaxVectorEnv(BatchedFamily):
    """N slots of a `JaxFamily`, which one compiled call resets or steps.

    NumPy arrays go into that call and come out of it as views. After `move_to`, tensors do by DLPack, in the order of
    both libraries' streams, so that nothing waits for the device.

    Args:
        num_envs: N.
        family: its functions.
        **options: see `BatchedFamily`.
    """

    can_be_recorded = False
    task_description = "what draw_tasks of the family draws"

    def __init__(self, num_envs: int, family: JaxFamily, **options: Unpack[FamilyOptions]) -> None:
        self.family, self._functions = family, family.compiled
        self.recorded_infos, self.task_space = family.recorded_infos, family.task_space
        self.value_ranges, self.default_steps = family.value_ranges, family.max_episode_steps
        self._device = begin_jax("cpu")
        self._carry: Carry | None = None
        self._seen: Any = None
        # Faults of waves that have not been read yet.
        self._unread: list[Any] = []
        super().__init__(num_envs, self._functions.space, family.action_space, family.entries, **options)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in _COMPILED}
        return kept | {name: jax.tree.map(np.array, kept[name]) for name in ("_carry", "_seen")}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        self._functions, self._device = self.family.compiled, begin_jax("cpu")
        self._carry, self._seen = jax.device_put((self._carry, self._seen), self._device)
        self._tasks_changed()

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return _split(self.family.tasks_drawn(random, num_tasks), num_tasks)

    def draw_test_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return _split(self.family.tasks_drawn(random, num_tasks, self.family.draw_test_tasks), num_tasks)

    def move_to(self, device: torch.device) -> None:
        self._device, self._carry = begin_jax(device.type), None
        super().move_to(device)

    def _tasks_changed(self) -> None:
        given = {name: self._into(array, self._functions.dtypes[name]) for name, array in self.tasks.items()}
        self._given, self._everyone = _copier(self._device)((given, np.ones(self.num_envs, np.bool_)))

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        seeds, places = streams.next_episodes(mask)
        words = seeds.view(np.int32 if isinstance(seeds, np.ndarray) else self.xp.int32).reshape(-1, 2)
        arguments = self._into(words, np.int32), self._into(places, np.int32), self._given
        if mask is None or self._carry is None:
            if self._carry is not None and not isinstance(seeds, np.ndarray):
                self._unread.append(self._carry.faults)
            self._carry, self._seen = self._functions.begin(*arguments)
        else:
            some = self._into(mask, np.bool_)
            self._carry, self._seen = self._functions.begin_some(some, *arguments, self._carry, self._seen)
        self._truncated = False
        if isinstance(seeds, np.ndarray):
            self._refuse(self._carry.faults)

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[Any, Any]:
        mask = self._everyone if active is None else self._into(active, np.bool_)
        taken = self._into(actions, self.single_action_space.dtype)
        assert self._carry is not None
        self._carry, outcome = self._functions.advance(self._carry, self._seen, taken, mask, self._given)
        self._seen = outcome.observations
        # The first array that is read is there once all of them are: from then on the actions may be overwritten.
        rewards = self._out_of(outcome.rewards)
        terminated = False if outcome.terminated is None else self._out_of(outcome.terminated)
        # A copy, since it is written to.
        self._truncated = False if self._carry.truncated is None else copied(self._out_of(self._carry.truncated))
        self._reward_terms = {name: self._out_of(info) for name, info in outcome.infos.items()}
        if isinstance(actions, np.ndarray):
            self._refuse(self._carry.faults)
        return rewards, terminated

    def _write_observations(self, out: NDArray[Any]) -> None:
        seen = self._out_of(self._seen)
        if isinstance(out, np.ndarray):
            np.copyto(out, seen, casting="same_kind")
        else:
            out.copy_(seen)

    def state_numbers(self) -> NDArray[Any]:
        """Return the numbers in the states of the slots, (N, numbers), for checks."""
        assert self._carry is not None
        numbers = [np.asarray(leaf, np.float64).reshape(self.num_envs, -1) for leaf in self._carry.state]
        return np.concatenate(numbers, 1)

    def refuse_faults(self) -> None:
        unread, self._unread = [*self._unread, *([] if self._carry is None else [self._carry.faults])], []
        for faults in unread:
            self._refuse(faults)

    def _refuse(self, faults: Any) -> None:
        if faults is not None and (fault := self._functions.describe_fault(np.asarray(faults))):
            raise ValueError(f"the family returned, in {fault}")

    def _into(self, array: Any, dtype: Any) -> Any:
        """Return an array or a tensor for a compiled function, in 32 bits at most."""
        if isinstance(array, np.ndarray) and array.dtype != np.float64:
            return array
        kept = jax.dtypes.canonicalize_dtype(dtype)
        if isinstance(array, np.ndarray):
            return array.astype(kept)
        # Whole numbers as int32, whose bits are those that the function makes of them, by way of int64: what a float
        # beyond int32 becomes differs between devices.
        like = {"f": self.xp.float32, "b": self.xp.bool}.get(kept.kind, self.xp.int32)
        return jnp.from_dlpack((array if kept.kind in "fb" else array.long()).to(like).contiguous())

    def _out_of(self, array: Any) -> Any:
        """Return an array of JAX as a view, that only reads, or as a tensor."""
        return np.asarray(array) if self.xp is np else self.xp.from_dlpack(array)


class ReadyMade(JaxVectorEnv):
    """N slots of a family that `make` returns for its arguments, each of which has a default.

    Equal arguments are one family, which is compiled once, and is pickled by them.
    """

    make: ClassVar[Callable[..., JaxFamily]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _, *options = inspect.signature(ReadyMade.__init__).parameters.values()
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in cls._parameters()]
        cls.__signature__ = inspect.Signature([options[0], *own, options[-1]])  # type: ignore[attr-defined]

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        values = [_like(each, options.pop(each.name, each.default)) for each in self._parameters()]
        super().__init__(num_envs, self.family_of(*values), **options)

    @classmethod
    def _parameters(cls) -> list[inspect.Parameter]:
        return list(inspect.signature(cls.make).parameters.values())

    @classmethod
    @cache
    def family_of(cls, *values: Any) -> JaxFamily:
        """Return the family for the values of all arguments."""
        return replace(cls.make(*values), made_by=(cls.family_of, values))


_TYPES = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "text"}


def _like(parameter: inspect.Parameter, value: Any) -> Any:
    """Return the value of an argument, of the type that is annotated, or of that of its default."""
    default, kind = parameter.default, parameter.annotation
    if value is default or (value is None and default == ""):
        return default
    # An annotation may be a text.
    kind = type(default).__name__ if kind is parameter.empty else getattr(kind, "__name__", kind)
    value = value.item() if isinstance(value, np.generic) else value
    if kind == "float" and type(value) is int:
        value = float(value)
    elif kind == "str" and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind in _TYPES and type(value).__name__ != kind:
        raise ValueError(f"{parameter.name} must be {_TYPES[kind]}, got {value!r}")
    return value


@cache
def _copier(device: Any) -> Any:
    """Return a compiled function that copies arrays to a device, in a seventh of the time of `device_put`."""
    return jax.jit(lambda arrays: arrays, out_shardings=jax.sharding.SingleDeviceSharding(device))


def drawn_evenly(ranges: Mapping[str, tuple[float, float]]) -> tuple[Draw, TaskSpace]:
    """Return a function that draws tasks of numbers evenly from ranges, by entry, and their space."""
    space = TaskSpace({name: (TaskParameter.between(*limits), ()) for name, limits in ranges.items()})
    return partial(_draw_evenly, dict(ranges)), space


def _draw_evenly(ranges: Mapping[str, tuple[float, float]], random: np.random.Generator, num_tasks: int) -> Arrays:
    return {name: random.uniform(*limits, num_tasks) for name, limits in ranges.items()}


# What a copy makes anew.
_COMPILED = ("_functions", "_device", "_everyone", "_given")


def _has(kept: np.dtype[Any], values: NDArray[np.float64]) -> bool:
    """Return whether a type has all these numbers."""
    limits = np.finfo(kept) if kept.kind == "f" else np.iinfo(kept)
    outside = (values < limits.min) | (values > limits.max)
    return not np.count_nonzero(outside if kept.kind == "f" else outside | (values != np.floor(values)))


def _entry(array: NDArray[Any]) -> TaskEntry:
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    kind = "numbers" if kept.kind == "f" else "whole numbers"
    return TaskEntry(array.shape[1:], f"{kind} that {kept} has", partial(_has, kept))


def _split(arrays: Mapping[str, NDArray[Any]], num_tasks: int) -> list[Task]:
    """Return tasks as a list of dicts, whose numbers are Python's and whose arrays are their own."""
    return [
        {name: array[row].copy() if array.ndim > 1 else array[row].item() for name, array in arrays.items()}
        for row in range(num_tasks)
    ]
