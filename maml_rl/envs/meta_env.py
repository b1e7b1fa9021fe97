"""The contract of environments whose task can be changed: `MetaEnv` for one, `MetaVectorEnv` for many slots.

Terms: N slots, each one environment instance with its own task. A task is plain data: a dict of numbers and
arrays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.arrays import Floats, Mask
from maml_rl.envs.tasks import Task as Task
from maml_rl.envs.tasks import TaskSpace
from maml_rl.machine import refuse_if_too_large
from maml_rl.spaces import array_layout

# When an environment's info has a recorded number: at every step, or at the last of an episode.
InfoKind = Literal["step", "episode"]
RecordedInfos = Mapping[str, InfoKind]
# Least and greatest value of the "reward" of a step, and of recorded infos.
ValueRanges = Mapping[str, tuple[float, float]]
NEVER_POSITIVE: ValueRanges = {"reward": (-math.inf, 0.0)}
AT_MOST_1: ValueRanges = {"reward": (0.0, 1.0)}
Seeds = int | Sequence[int | None] | NDArray[np.integer] | None
# Many environments hand their seed to generators that take 32 bits.
SEED_BITS = 2**32 - 1


@dataclass(slots=True)
class StepBuffers:
    """The arrays that every reset and step writes in place, for all slots.

    Attributes:
        observations: (N, *obs), of the dtype of the observation space.
        rewards: (N,) float64.
        terminated: (N,) bool, set from the step that ended the episode until the next reset.
        truncated: (N,) bool, likewise.
        restarted: (N,) bool, set where the last step did not happen: the environment raised `Retry`, and the episode
            was restarted.
        infos: (N,) float64 by name, the recorded infos of the last step; NaN where there is none.
    """

    observations: NDArray[Any]
    rewards: Floats
    terminated: Mask
    truncated: Mask
    restarted: Mask
    infos: dict[str, Floats] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, observation_space: spaces.Space[Any], num_envs: int, recorded_infos: RecordedInfos = MappingProxyType({})
    ) -> StepBuffers:
        """Return buffers of zeros for `num_envs` slots."""
        shape, dtype = array_layout(observation_space)
        refuse_if_too_large(
            num_envs * math.prod(shape) * dtype.itemsize,
            f"one observation of {observation_space} for each of {num_envs:,} slots",
            "use fewer slots (slots_per_task) or smaller observations",
        )
        return cls(
            observations=np.zeros((num_envs, *shape), dtype),
            rewards=np.zeros(num_envs, np.float64),
            terminated=np.zeros(num_envs, np.bool_),
            truncated=np.zeros(num_envs, np.bool_),
            restarted=np.zeros(num_envs, np.bool_),
            infos={name: np.zeros(num_envs, np.float64) for name in recorded_infos},
        )

    @property
    def over(self) -> Mask:
        """(N,) whether the episode of each slot is over."""
        return self.terminated | self.truncated

    def begin(self, slots: Any, *, restarted: bool = False) -> None:
        """Write all except the observations for slots where an episode begins, or has `restarted`."""
        self.rewards[slots], self.terminated[slots], self.truncated[slots] = 0.0, False, False
        self.restarted[slots] = restarted
        for values in self.infos.values():
            values[slots] = np.nan

    def part(self, slots: slice) -> StepBuffers:
        """Return the views of a range of slots."""
        return StepBuffers(
            observations=self.observations[slots],
            rewards=self.rewards[slots],
            terminated=self.terminated[slots],
            truncated=self.truncated[slots],
            restarted=self.restarted[slots],
            infos={name: values[slots] for name, values in self.infos.items()},
        )


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Activity of slots that wait concurrently.

    Attributes:
        waiting: how many wait for a reset or a step.
        acting: how many have an observation for which the policy has not acted yet.
        done: how many have no episode left to do, or wait for the others of theirs.
        slowest: the slot whose call has run for longest; -1 if none runs.
        seconds: for how long.
    """

    waiting: int
    acting: int
    done: int
    slowest: int = -1
    seconds: float = 0.0

    def __str__(self) -> str:
        slowest = f", slot {self.slowest} for {self.seconds:.1f} s" if self.slowest >= 0 else ""
        return f"{self.waiting} slots wait{slowest}, {self.acting} act, {self.done} done"


def declared(env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any], name: str, default: Any = None) -> Any:
    """Return what an environment declares as an attribute, even if wrappers hide it: that of the outermost counts."""
    if isinstance(env, VectorEnv):
        while isinstance(env, VectorWrapper) and not hasattr(env, name):
            env = env.env
        return getattr(env, name, default)
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return default


class Declarations(NamedTuple):
    """The declarations of an environment besides its methods; see `MetaEnv`."""

    recorded_infos: dict[str, InfoKind]
    task_space: TaskSpace | None
    value_ranges: dict[str, tuple[float, float]]
    seed_mask: int


def declarations(env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> Declarations:
    """Return what an environment, or a vector environment, declares, even if wrappers hide it.

    Raises:
        TypeError: If something is not as `MetaEnv` describes it.
    """

    def is_range(value: Any) -> bool:
        numbers = isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value)
        return numbers and len(value) == 2 and value[0] < value[1]

    def is_by_name(value: Any, fits: Callable[[Any], bool]) -> bool:
        return isinstance(value, Mapping) and all(isinstance(name, str) and fits(value[name]) for name in value)

    infos, ranges = declared(env, "recorded_infos", {}), declared(env, "value_ranges", {})
    task_space, bits = declared(env, "task_space"), declared(env, "seed_bits", 32)
    if not (task_space is None or isinstance(task_space, TaskSpace)):
        raise TypeError(f"task_space must be a maml_rl.envs.TaskSpace, got {task_space!r}")
    if not is_by_name(infos, get_args(InfoKind).__contains__):
        raise TypeError(
            "recorded_infos must be a dict of keys of info, each with 'step' (a number at every step) or 'episode' "
            f"(a number at the last step of an episode), got {infos!r}"
        )
    if not is_by_name(ranges, is_range):
        raise TypeError(
            "value_ranges must be a dict of 'reward' and keys of info, each with its least and greatest value, got "
            f"{ranges!r}"
        )
    if isinstance(bits, bool) or not isinstance(bits, int) or not 8 <= bits <= 32:
        raise TypeError(f"seed_bits must be the number of bits of a seed, 8 to 32, got {bits!r}")
    stepping = declared(env, "stepping")
    # Another package may call something else so.
    if isinstance(stepping, str) and stepping not in ("serial", "threads"):
        raise TypeError(f"stepping must be 'serial' or 'threads', got {stepping!r}")
    limits = {name: (float(low), float(high)) for name, (low, high) in ranges.items()}
    return Declarations(dict(infos), task_space, limits, 2**bits - 1)


def check_flags(name: str, flags: Any) -> Mask:
    """Return the environment's flags for the ends of its episodes, as an array of bool.

    Args:
        name: "terminated" or "truncated".
        flags: bool, or 0 and 1 as integers, of any shape.
    """
    array = np.asarray(flags)
    if array.dtype.kind != "b" and not (array.dtype.kind in "iu" and ((array == 0) | (array == 1)).all()):
        raise TypeError(f"{name} must be True or False, got {flags!r}")
    return array.astype(np.bool_, copy=False)


class MetaEnv(gymnasium.Env[Any, Any], ABC):
    """A `gymnasium.Env` whose task can be changed.

    A family that keeps test tasks apart from those of training has a method `sample_test_tasks(num_tasks)`, too, from
    which evaluations draw. Any `gymnasium.Env` may have it.

    Attributes:
        recorded_infos: which numbers in `info` are recorded with the episodes: "step" for one at every step, "episode"
            for one at the last step of an episode, as `{"success": "episode"}`. Any `gymnasium.Env` may have it.
        task_space: the parameters of its tasks, for grids, strata and splits of tasks; None if it declares none. Any
            `gymnasium.Env` may have it.
        value_ranges: the least and greatest "reward" of a step, and the values of recorded infos by name, where they
            are known, as `{"reward": (-math.inf, 0.0)}`: confidence intervals stay within them. Any `gymnasium.Env`
            may have it.
        stepping: "threads" for an environment that mostly waits, for example for a service: a sampler then runs its
            slots concurrently by default. Any `gymnasium.Env` or wrapper may have it.
        seed_bits: how many bits of a seed its `reset` takes: 31 where it refuses seeds from 2**31 on. Any
            `gymnasium.Env`, wrapper or `VectorEnv` may have it.
        thread_safe: False for one whose calls must all come from one thread. Any `gymnasium.Env` or wrapper may have
            it.
    """

    recorded_infos: RecordedInfos = {}  # noqa: RUF012 - read-only by its type
    task_space: TaskSpace | None = None
    value_ranges: ValueRanges = {}  # noqa: RUF012 - read-only by its type
    stepping: Literal["serial", "threads"] = "serial"
    seed_bits: int = 32
    thread_safe: bool = True

    @abstractmethod
    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks of the family from `np_random`."""

    @abstractmethod
    def reset_task(self, task: Task) -> None:
        """Switch to a task, from the next step on and across resets.

        Raises:
            ValueError: If an entry is missing, unknown, or malformed; the message names it.
        """


class MetaVectorEnv(VectorEnv[Any, Any, Any], ABC):
    """N slots, each with its own task; the only interface that `rollout` uses.

    There is no autoreset: a slot whose episode is over stays as it is until the next reset. Its observation is the
    final one, its rewards are 0, `terminated` or `truncated` stays set, and its actions are ignored.

    Attributes:
        buffers: the arrays that every reset and step writes.
        observes_anywhere: whether every reset and step writes the observations of all slots, into the array that is
            `buffers.observations` by then; a sampler may put another one there before each.
        parts: ranges of slots that are stepped independently of each other; one range here, one per worker elsewhere.
        advances_by_slot: whether every slot is a separate part, whose resets and steps wait only for that slot.
            It can then be reset alone, with `reset_send`, and a `step_recv` with a timeout may return nothing.
        divides: whether its first slots can be used apart from the others, by `first_slots`.
        max_episode_steps: steps of the longest possible episode; None if there is no limit.
        recorded_infos: which infos are in `buffers`; see `MetaEnv`, as for `task_space` and `value_ranges`.
        physics_seconds: (len(parts),) seconds spent stepping and resetting so far; (1,) zero where slots wait
            concurrently.
        retries: how often an episode was restarted so far, because its environment raised `Retry`.
        waiting_seconds: seconds for which no slot was ready so far, where slots wait concurrently; else 0.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - gymnasium declares it an instance variable

    buffers: StepBuffers
    observes_anywhere: bool = False
    parts: tuple[slice, ...]
    advances_by_slot: bool = False
    divides: bool = False
    max_episode_steps: int | None
    recorded_infos: RecordedInfos = {}  # noqa: RUF012 - read-only by its type
    task_space: TaskSpace | None = None
    value_ranges: ValueRanges = {}  # noqa: RUF012 - read-only by its type
    physics_seconds: Floats

    @property
    def retries(self) -> int:
        """How often episodes were restarted so far; 0 for families of this package."""
        return 0

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which no slot was ready; 0 for families of this package."""
        return 0.0

    def slot_counts(self) -> SlotCounts | None:
        """Return the activity of slots that wait concurrently, for any thread; None where they do not."""
        return None

    @abstractmethod
    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks from the generator of the environment.

        Args:
            num_tasks: how many.
            seed: seeds the generator first, as `reset` would.
            evaluation: draw from the test tasks of a family that keeps them apart from those of training.
        """

    @abstractmethod
    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`, from the next step on and across resets.

        Raises:
            ValueError: If there is not one task per slot, or a task is malformed.
        """

    @abstractmethod
    def reset_buffers(self, seeds: ArrayLike) -> None:
        """Reset all slots, slot i with `seeds[i]`, and write the buffers: `reset` without copies and infos.

        Args:
            seeds: (N,) integers in [0, 2**63).
        """

    def reset_send(self, index: int, seed: int) -> None:
        """Start the reset of slot `index` with `seed`, where `advances_by_slot`; `step_recv` waits for it, too."""
        raise NotImplementedError(f"{type(self).__name__} resets all its slots together; use reset_buffers")

    def first_slots(self, num: int) -> MetaVectorEnv:
        """Return the first `num` slots as a vector environment of their own, where `divides`.

        They are the same slots, in the state of their last reset. They are closed with all others.
        """
        raise NotImplementedError(f"{type(self).__name__} steps all its slots together")

    @abstractmethod
    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Start a step of the slots `parts[index]` with `actions` (one per slot of the part)."""

    @abstractmethod
    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Wait for steps that were started, and return whose results are in the buffers.

        Args:
            timeout: None to wait for all of `indices`; else seconds after which those that have answered do, at least
                one.
            indices: which parts to wait for; all that were started by default.
        """

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all slots; the arrays are the caller's own.

        Args:
            actions: (N, *act).

        Returns:
            Observations, rewards, terminated, truncated, and infos.
        """
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape:
            raise ValueError(
                f"expected one action for each of the {self.num_envs} slots, {self.action_space.shape} in all, "
                f"got the shape {actions.shape}"
            )
        for index, part in enumerate(self.parts):
            self.step_send(index, actions[part])
        self.step_recv()
        buffers = self.buffers
        return (
            buffers.observations.copy(),
            buffers.rewards.copy(),
            buffers.terminated.copy(),
            buffers.truncated.copy(),
            self._infos(),
        )

    def _infos(self) -> dict[str, Any]:
        """Return the infos of the last reset or step."""
        return {}


class OneBatchVectorEnv(MetaVectorEnv):
    """Slots that are stepped by one call, in the process of the caller."""

    # Whether `step_send` may be called, and what it says otherwise.
    _ready: bool = False
    _not_ready: ClassVar[str] = "cannot step before the first reset; call reset first"

    def _set_up(self, num_envs: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Set the attributes that follow from the number of slots and the spaces of one."""
        if np.any(getattr(action_space, "start", 0)):
            raise TypeError(f"{type(self).__name__} has the actions {action_space}; those of array code start at 0")
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self.parts, self.physics_seconds = (slice(0, num_envs),), np.zeros(1)
        self.buffers = StepBuffers.allocate(observation_space, num_envs, self.recorded_infos)
        self._sent: NDArray[Any] | None = None

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of the boolean array `options["reset_mask"]`.

        Args:
            seed: one per slot; an integer s means s, s + 1, ...; None continues the current streams.
            options: see above; environment objects get the other entries.

        Returns:
            Observations (N, *obs), the caller's own, and infos.
        """
        mask = read_reset_mask(options, self.num_envs)
        if mask is not None and not self._ready:
            raise ResetNeeded("the first reset must be of all slots; call reset without reset_mask first")
        others = {name: value for name, value in (options or {}).items() if name != "reset_mask"}
        self._reset(slot_seeds(seed, self.num_envs), mask, others or None)
        return self.buffers.observations.copy(), self._infos()

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._reset(np.asarray(seeds).tolist(), None, None)

    def _reset(self, seeds: Sequence[int | None], mask: Mask | None, options: dict[str, Any] | None) -> None:
        """Reset the slots of the mask (None: all), each with its seed, and write their buffers."""
        raise NotImplementedError(f"{type(self).__name__} resets all its slots together; use reset_buffers")

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Take the actions of all slots (N, *act), which must stay as they are until `step_recv` runs the step."""
        if not self._ready:
            raise ResetNeeded(self._not_ready)
        if self._sent is not None:
            raise RuntimeError("the step before has not been received; call step_recv first")
        if actions.shape != self.action_space.shape:
            raise ValueError(f"expected actions of shape {self.action_space.shape}, got {actions.shape}")
        self._sent = actions

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Run the step and write the buffers."""
        if self._sent is None:
            raise RuntimeError("no step was started; call step_send first")
        actions, self._sent = self._sent, None
        self._step(actions)
        return [0]

    @abstractmethod
    def _step(self, actions: NDArray[Any]) -> None:
        """Step all slots whose episode is not over, and write the buffers."""


class OfTheWrapped:
    """An attribute or a method that a wrapper has from the environment inside."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.env, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        setattr(wrapper.env, self._name, value)


# Gymnasium's class is generic only from 1.4 on.
class MetaVectorWrapper(MetaVectorEnv, VectorWrapper):
    """A wrapper of a vector environment; a subclass overrides what it changes."""

    env: MetaVectorEnv

    metadata: Any = OfTheWrapped()
    buffers: Any = OfTheWrapped()
    parts: Any = OfTheWrapped()
    advances_by_slot: Any = OfTheWrapped()
    divides: Any = OfTheWrapped()
    max_episode_steps: Any = OfTheWrapped()
    recorded_infos: Any = OfTheWrapped()
    task_space: Any = OfTheWrapped()
    value_ranges: Any = OfTheWrapped()
    physics_seconds: Any = OfTheWrapped()
    retries: Any = OfTheWrapped()
    waiting_seconds: Any = OfTheWrapped()
    slot_counts: Any = OfTheWrapped()
    sample_tasks: Any = OfTheWrapped()
    reset_task: Any = OfTheWrapped()
    reset_buffers: Any = OfTheWrapped()
    reset_send: Any = OfTheWrapped()
    step_send: Any = OfTheWrapped()
    step_recv: Any = OfTheWrapped()
    _infos: Any = OfTheWrapped()


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """The description of one slot, which determines the layout of the arrays of a phase."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    max_episode_steps: int | None
    recorded_infos: RecordedInfos
    task_space: TaskSpace | None = None
    divides: bool = False
    advances_by_slot: bool = False
    value_ranges: ValueRanges = field(default_factory=dict)

    @classmethod
    def of(cls, env: MetaVectorEnv) -> EnvDescription:
        """Return the description of the slots of a vector environment."""
        return cls(
            env.single_observation_space,
            env.single_action_space,
            env.max_episode_steps,
            dict(env.recorded_infos),
            env.task_space,
            env.divides,
            env.advances_by_slot,
            dict(env.value_ranges),
        )

    def require_same(self, other: EnvDescription, who: str, whose: str) -> None:
        """Refuse slots of other spaces or recorded infos; `who` and `whose` name both, for the message."""
        for kind in ("observation_space", "action_space", "recorded_infos"):
            one, two = getattr(self, kind), getattr(other, kind)
            if one != two:
                raise ValueError(
                    f"all slots must have the same {kind.replace('_', ' ')}: {who} has {one}, {whose} has {two}"
                )


def low_seeds(seeds: ArrayLike, mask: int = SEED_BITS) -> list[int]:
    """Return the low bits of seeds, those of a mask of `Declarations`."""
    low: list[int] = (np.asarray(seeds, np.uint64) & np.uint64(mask)).tolist()
    return low


def slot_seeds(seed: Seeds, num_envs: int) -> list[int | None]:
    """Return one seed per slot: an integer s means s, s + 1, ..., as in Gymnasium; None means to continue unseeded."""
    if seed is None:
        return [None] * num_envs
    seeds = [seed + slot for slot in range(num_envs)] if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != num_envs:
        raise ValueError(f"expected one seed for each of the {num_envs} slots, got {len(seeds)}")
    for entry in seeds:
        if entry is not None and not (isinstance(entry, int | np.integer) and 0 <= entry < 2**63):
            raise ValueError(f"a seed must be an integer in [0, 2**63), got {entry!r}")
    return [None if entry is None else int(entry) for entry in seeds]


def read_reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> Mask | None:
    """Return `options["reset_mask"]`, which slots to reset; None for all."""
    if not options or options.get("reset_mask") is None:
        return None
    mask = np.asarray(options["reset_mask"])
    if mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(
            f"reset_mask must be a boolean array of shape ({num_envs},), True for at least one slot, got {mask!r}"
        )
    return mask
