"""`BatchedFamily`: the base of all families that are array code over N slots; `BatchOfOne`: one of these slots."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from numpy.typing import ArrayLike, NDArray

from maml_rl.arguments import check_choices, check_count
from maml_rl.arrays import Floats, Mask, move_state, torch_arrays
from maml_rl.envs.meta_env import MetaEnv, OneBatchVectorEnv, RecordedInfos, Task, check_flags
from maml_rl.envs.tasks import TaskArrays, TaskEntry, TaskSpace, parse_tasks
from maml_rl.machine import refuse_if_too_large
from maml_rl.seeding import SlotStreams

if TYPE_CHECKING:
    import torch

# Seed of unseeded environments: the same task in every process, until `reset_task` gives another.
DEFAULT_TASK_SEED = 0


class FamilyOptions(TypedDict, total=False):
    """Keyword arguments that every family takes; see `BatchedFamily`."""

    task: Task | None
    max_episode_steps: int | None
    render_mode: str | None
    autoreset_mode: str | AutoresetMode


class ArrayFamily(ABC):
    """What distinguishes a family: tasks, dynamics, rewards and observations, as array code over N slots.

    The arrays are NumPy's, or tensors on a device after `move_to`.

    Attributes:
        num_envs: N.
        entries: what its tasks look like.
        tasks: those of the slots, by entry (N, ...).
    """

    task_description: ClassVar[str]
    # The functions for its arrays, which `move_to` replaces; see `maml_rl.arrays`.
    xp: Any = np
    # Whether its numbers are float32 on a device, as those of a physics engine there are.
    single_on_device: ClassVar[bool] = False
    # Whether a CUDA graph of torch can have a step in it.
    can_be_recorded: ClassVar[bool] = True
    # Which slots the family itself has truncated, (N,) bool from then until they are reset; False for none ever.
    _truncated: Any = False

    num_envs: int
    recorded_infos: RecordedInfos
    entries: dict[str, TaskEntry]
    tasks: TaskArrays
    task_space: TaskSpace | None
    _time_limit: int | None
    _elapsed: NDArray[np.int64]
    _reward_terms: dict[str, Floats]

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw tasks from the distribution of the family: by default from its `task_space`."""
        if self.task_space is None:
            raise NotImplementedError(f"{type(self).__name__} has neither draw_tasks nor a task_space")
        return self.task_space.tasks_at(random.random((num_tasks, len(self.task_space.parameters))))

    @abstractmethod
    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        """Put the masked slots (None: all) into start states."""

    @abstractmethod
    def _step_slots(
        self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams
    ) -> tuple[Floats, Mask | bool]:
        """Step the active slots (None: all), and do not change the state of the others.

        A slot must draw from its own stream, and only in steps in which it is active.

        Args:
            actions: (N, *act), not clipped; zeros for inactive slots.
            active: (N,) or None.
            streams: one for each slot.

        Returns:
            Rewards (N,) and whether each slot terminated; entries of inactive slots have no meaning. The terms of the
            rewards, and any other number for `info`, go into `self._reward_terms`, (N,) by name.
        """

    @abstractmethod
    def _write_observations(self, out: NDArray[Any]) -> None:
        """Write the observations of all slots, a function of only their states, into `out` (N, *obs)."""

    def take_tasks(self, tasks: TaskArrays) -> None:
        """Give every slot its task, by entry (N, ...)."""
        self.tasks = tasks
        self._tasks_changed()

    def move_to(self, device: torch.device) -> None:
        """Make all arrays tensors on a device.

        From then on only `take_tasks`, `begin` and `advance` work, all of which take and return tensors.
        """
        self.xp = torch_arrays(device)
        move_state(self, device, single=self.single_on_device)

    def begin(self, streams: Any, observations: Any, mask: Mask | None = None) -> None:
        """Put the masked slots (None: all) into start states, and write all observations; for tensors, see `move_to`.

        Args:
            streams: one for each slot, as `SlotStreams`.
            observations: (N, *obs), gets the observations.
            mask: (N,), for arrays alone.
        """
        self._elapsed[slice(None) if mask is None else mask] = 0
        self._reset_slots(mask, streams)
        self._write_observations(observations)

    def advance(self, actions: Any, active: Any, streams: Any, observations: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Step the active slots (None: all), and write the observations; for tensors, see `move_to`.

        Args:
            actions: (N, *act), zeros for inactive slots.
            active: (N,) bool, or None.
            streams: see `begin`.
            observations: see `begin`.

        Returns:
            Rewards (N,), whether slots terminated, (N,) or a bool for all, and the terms of the rewards by name.
        """
        rewards, terminated = self._step_slots(actions, active, streams)
        found, of_slots = {**self._reward_terms, "rewards": rewards, "terminated": terminated}, ((), (self.num_envs,))
        for name in ("rewards", "terminated", *self.recorded_infos):
            if name not in found:
                raise TypeError(
                    f"{type(self).__name__} declares {name!r} in recorded_infos, so _step_slots must put it into "
                    f"self._reward_terms in every step; it has {sorted(self._reward_terms)}"
                )
            values = found[name]
            # A bool has a shape, too, but asking NumPy for it takes as long as all the rest.
            if values is not False and np.shape(values) not in of_slots:
                raise ValueError(
                    f"_step_slots of {type(self).__name__} has {name} of shape {tuple(np.shape(values))}; it must have "
                    f"a number for each of the {self.num_envs} slots"
                )
        self._write_observations(observations)
        self._elapsed += 1 if active is None else active
        return rewards, terminated, self._reward_terms

    def is_truncated(self) -> Any:
        """Return whether slots have reached the time limit, (N,) bool."""
        return (self._elapsed >= (math.inf if self._time_limit is None else self._time_limit)) | self._truncated

    def refuse_faults(self) -> None:
        """Raise the errors of a phase on a device, which are known only after it."""
        return

    def _tasks_changed(self) -> None:
        """Called after `self.tasks` has changed, for families that keep something derived from it."""
        return

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        """Draw one slot as (height, width, 3)."""
        raise NotImplementedError(f"{type(self).__name__} cannot render itself")

    def sample_default_task(self) -> Task:
        """Return the default task of an environment."""
        return self.draw_tasks(np.random.default_rng(DEFAULT_TASK_SEED), 1)[0]

    def draw_test_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw tasks for evaluations: from the same distribution, unless the family keeps test tasks apart."""
        return self.draw_tasks(random, num_tasks)

    def optimal_actions(self, observations: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[Any]:
        """Return the best actions (K, *act), for learners that imitate experts; families that know them override this.

        Args:
            observations: (K, *obs), from which the best action follows once the task is known.
            slots: (K,) whose tasks count.
        """
        raise NotImplementedError(f"{type(self).__name__} does not know its best actions")


class BatchedFamily(ArrayFamily, OneBatchVectorEnv):
    """Base of the families whose dynamics, reward and observation are array code over slots.

    A family sets its spaces and task entries, has `draw_tasks` or a `task_space`, and implements `_reset_slots`,
    `_step_slots` and `_write_observations`.

    In `step`, a slot whose episode is over is treated as in Gymnasium: by default the next call resets it and ignores
    its action. `step_send` and `step_recv`, with which `rollout` steps, never reset a slot.

    Args:
        num_envs: N, at least 1.
        observation_space: of one slot.
        action_space: of one slot.
        entries: what its tasks look like.
        task: the task of all slots; by default one drawn with a fixed seed.
        max_episode_steps: steps after which an episode is truncated; None for never, "default" for the family's
            `default_steps`.
        render_mode: None or "rgb_array", where the family can draw itself.
        autoreset_mode: treatment of slots whose episode is over, in `step`: "NextStep" resets them instead of the next
            step; "SameStep" at once, the end of the episode is then in the infos `final_obs` and `final_info`;
            "Disabled" leaves them as they are until `reset`. See https://farama.org/Vector-Autoreset-Mode.

    Attributes:
        autoreset_mode: as given; may be set at any time.

    Raises:
        ValueError: If a number is not positive, the task is malformed, or a mode unknown.
        TypeError: If a render mode is given and the family cannot draw itself.
    """

    observes_anywhere = True
    default_steps: int | None = None
    # The step by which every episode has terminated; None if episodes need not terminate.
    longest_episode: int | None = None

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        entries: Mapping[str, TaskEntry],
        *,
        task: Task | None = None,
        max_episode_steps: int | Literal["default"] | None = "default",
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        check_count("num_envs", num_envs)
        limit = self.default_steps if max_episode_steps == "default" else max_episode_steps
        if limit is not None:
            check_count("max_episode_steps", limit)
        if render_mode not in (None, *self.metadata.get("render_modes", ())):
            modes = self.metadata.get("render_modes", ())
            # As from a function without the argument: other packages request pictures, and on this error try again
            # without.
            raise (ValueError if modes else TypeError)(
                f"{type(self).__name__} has no render_mode {render_mode!r}; it has {', '.join(modes) or 'none'}"
            )
        self.autoreset_mode = autoreset_mode
        self._time_limit, self.render_mode = limit, render_mode
        self.max_episode_steps = min(filter(None, (limit, self.longest_episode)), default=None)
        self.entries = dict(entries)
        # Tasks may be drawn, and tables of them made, before their size is checked elsewhere.
        num_bytes = 8 * num_envs * sum(math.prod(entry.shape) for entry in entries.values())
        refuse_if_too_large(
            num_bytes, f"one task per slot of {type(self).__name__}", "choose smaller arguments of the environment"
        )
        self._set_up(num_envs, observation_space, action_space)
        self._elapsed, self._slots = np.zeros(num_envs, np.int64), np.arange(num_envs)
        self._streams: SlotStreams | None = None
        self._reward_terms = {}
        self._acted = np.zeros(num_envs, np.bool_)
        default = task if task is not None else self.sample_default_task()
        self.reset_task([default] * num_envs)

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """Treatment of slots whose episode is over, in `step`."""
        mode: AutoresetMode = self.metadata["autoreset_mode"]
        return mode

    @autoreset_mode.setter
    def autoreset_mode(self, mode: str | AutoresetMode) -> None:
        try:
            known = AutoresetMode(mode)
        except ValueError:
            names = ", ".join(repr(known.value) for known in AutoresetMode)
            raise ValueError(f"autoreset_mode must be one of {names}, got {mode!r}") from None
        self.metadata = {**self.metadata, "autoreset_mode": known}

    def end_after(self, steps: int) -> None:
        """Truncate episodes after so many steps, if they are not over before."""
        self._time_limit = steps if self._time_limit is None else np.minimum(self._time_limit, steps)
        self.max_episode_steps = min(filter(None, (self.max_episode_steps, steps)))

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        if num_tasks < 0:
            raise ValueError(f"num_tasks must not be negative, got {num_tasks}")
        if seed is not None:
            self._np_random, self._np_random_seed = seeding.np_random(seed)
        draw = self.draw_test_tasks if evaluation else self.draw_tasks
        return draw(self.np_random, num_tasks)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        self.take_tasks(parse_tasks(tasks, self.entries, self.num_envs))

    def _reset(self, seeds: Sequence[int | None], mask: Mask | None, options: dict[str, Any] | None) -> None:
        first = next((entry for entry in seeds if entry is not None), None)
        if first is not None:
            self._np_random, self._np_random_seed = seeding.np_random(first)
        if self._streams is None:
            # Where every slot is seeded, `np_random` is seeded as well.
            num_drawn = self.num_envs if None in seeds else 0
            self._streams = SlotStreams(np.resize(self.np_random.integers(2**63, size=num_drawn), self.num_envs))
        seeded = np.array([entry is not None for entry in seeds]) & (True if mask is None else mask)
        if seeded.any():
            self._streams.reseed(np.array([entry or 0 for entry in seeds], np.uint64)[seeded], seeded)
        self._restart(mask)

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._streams = SlotStreams(seeds)
        self._restart(None)

    def _restart(self, mask: Mask | None) -> None:
        """Put slots (None: all) into start states, and write their buffers."""
        assert self._streams is not None
        where = slice(None) if mask is None else mask
        self._sent, self._ready = None, True
        # Not as methods of `self`, here and in a step: a user's family may have helpers of these names.
        ArrayFamily.begin(self, self._streams, self.buffers.observations, mask)
        self._reward_terms = {}
        self._acted[:] = False
        self._acted[where] = True
        self.buffers.begin(where)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all slots, and reset those whose episode is over as `autoreset_mode` says.

        Args:
            actions: (N, *act); the rows of slots that are reset instead of stepped are ignored.

        Returns:
            Observations, rewards, terminated, truncated, and infos; the arrays are the caller's own.
        """
        over, everyone = self.buffers.over, np.ones(self.num_envs, np.bool_)
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and over.any():
            terminated[over], truncated[over] = False, False
            infos = self._describe(~over, everyone)
        elif self.autoreset_mode is AutoresetMode.SAME_STEP and (over := terminated | truncated).any():
            infos = self._describe(~over, everyone)
            infos |= {"final_obs": np.full(self.num_envs, None), "_final_obs": over.copy()}
            infos |= {"final_info": self._describe(over, over), "_final_info": over.copy()}
            for slot in np.flatnonzero(over):
                infos["final_obs"][slot] = observations[slot].copy()
        else:
            return observations, rewards, terminated, truncated, infos
        self._restart(over)
        return self.buffers.observations.copy(), rewards, terminated, truncated, infos

    def _step(self, actions: NDArray[Any]) -> None:
        assert self._streams is not None
        buffers = self.buffers
        over = buffers.over
        np.logical_not(over, out=self._acted)
        active = self._acted if np.count_nonzero(over) else None
        if active is not None:
            # Actions of a frozen slot, even NaN or an arm that does not exist, must not reach the family's arithmetic.
            actions = np.where(active.reshape(-1, *(1,) * (actions.ndim - 1)), actions, np.zeros_like(actions))
        if isinstance(self.single_action_space, spaces.Discrete):
            check_choices(actions, int(self.single_action_space.n))
        rewards, terminated, _ = ArrayFamily.advance(self, actions, active, self._streams, buffers.observations)
        if terminated is not True and terminated is not False:
            terminated = check_flags("terminated", terminated)
        if active is None:
            buffers.rewards[:] = rewards
            if terminated is not False:
                buffers.terminated[:] = terminated
        else:
            buffers.rewards[:] = np.where(active, rewards, 0.0)
            buffers.terminated |= active & terminated
        for name, values in buffers.infos.items():
            np.copyto(values, self._reward_terms[name], where=self._acted)
        if self._time_limit is not None:
            # As Gymnasium's TimeLimit: an episode that terminates in its last step is truncated, too.
            np.greater_equal(self._elapsed, self._time_limit, out=buffers.truncated)
        if self._truncated is not False:
            buffers.truncated |= check_flags("_truncated", self._truncated)

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Return one picture per slot, or None without a render mode."""
        if self.render_mode is None:
            return None
        return tuple(self._render_slot(slot) for slot in range(self.num_envs))

    def _infos(self) -> dict[str, Any]:
        """Return reward terms and tasks in Gymnasium's way: `_name` marks the slots that have a `name`."""
        return self._describe(self._acted, self._acted)

    def _describe(self, stepped: Mask, told: Mask) -> dict[str, Any]:
        """Return the reward terms of the slots that have `stepped`, and the tasks of those that are `told` theirs."""
        terms = with_masks(self._reward_terms, dict.fromkeys(self._reward_terms, stepped)) if stepped.any() else {}
        return {**terms, "task": with_masks(self.tasks, dict.fromkeys(self.tasks, told)), "_task": told.copy()}


class BatchOfOne(MetaEnv):
    """A family of one slot as a `gymnasium.Env`, bit-identical to a slot of the vector environment.

    It never truncates: `gymnasium.make` wraps it in the time limit that its id is registered with.
    """

    family_class: ClassVar[type[BatchedFamily]]
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it an instance variable

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        metadata = cls.family_class.metadata
        cls.metadata = {"render_modes": []} | {key: metadata[key] for key in metadata if key != "autoreset_mode"}

    def __init__(self, **kwargs: Any) -> None:
        if "autoreset_mode" in kwargs:
            raise TypeError(f"{type(self).__name__} is one environment; autoreset_mode is for gymnasium.make_vec")
        if "max_episode_steps" in kwargs:
            raise TypeError(
                f"{type(self).__name__} never truncates; pass max_episode_steps to gymnasium.make, or wrap it in "
                "gymnasium.wrappers.TimeLimit"
            )
        self._family = self.family_class(1, max_episode_steps=None, **kwargs)
        self._family.autoreset_mode = AutoresetMode.DISABLED
        self.observation_space = self._family.single_observation_space
        self.action_space = self._family.single_action_space
        self.render_mode = self._family.render_mode
        self.recorded_infos, self.max_episode_steps = self._family.recorded_infos, self._family.max_episode_steps
        self.task_space, self.value_ranges = self._family.task_space, self._family.value_ranges

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        return self._family.draw_tasks(self.np_random, num_tasks)

    def sample_test_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks for evaluations from `np_random`."""
        return self._family.draw_test_tasks(self.np_random, num_tasks)

    def reset_task(self, task: Task) -> None:
        self._family.reset_task([task])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        observations, infos = self._family.reset(seed=seed)
        return observations[0], _first_slot(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step once."""
        observations, rewards, terminated, truncated, infos = self._family.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), _first_slot(infos)

    def render(self) -> NDArray[np.uint8] | None:
        """Return a picture (height, width, 3), or None without a render mode."""
        frames = self._family.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Release the family's resources."""
        self._family.close()


def one_slot(family: type[BatchedFamily]) -> type[BatchOfOne]:
    """Return the class of one slot of a family `<name>VectorEnv`, to be assigned to `<name>Env` in the same module."""
    name = family.__name__.replace("VectorEnv", "Env")
    known = {"family_class": family, "__module__": family.__module__, "__doc__": f"One slot of `{family.__name__}`."}
    return type(name, (BatchOfOne,), known)


def _first_slot(infos: Mapping[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = {}
    for name, values in infos.items():
        if isinstance(values, Mapping):
            first[name] = _first_slot(values)
        elif not name.startswith("_"):
            text = values.dtype == object
            first[name] = values[0].copy() if values.ndim > 1 else values[0] if text else float(values[0])
    return first


def with_masks(values: Mapping[str, NDArray[Any]], masks: Mapping[str, Mask]) -> dict[str, NDArray[Any]]:
    """Return arrays (N, ...) by name, zero (text: None) outside of their masks, each with its mask as `_name`."""
    masked: dict[str, NDArray[Any]] = {}
    for name, value in values.items():
        mask = masks[name]
        filler = np.array(None if value.dtype == object else 0.0)
        masked[name] = np.where(mask.reshape(-1, *(1,) * (value.ndim - 1)), value, filler)
        masked[f"_{name}"] = mask.copy()
    return masked


def to_all_slots(numbers: Floats, active: Mask | None) -> Floats:
    """Return what was drawn for the active slots (None: all) as (N, ...), with zeros for the others."""
    if active is None or len(numbers) == len(active):
        return numbers
    spread = np.zeros((len(active), *numbers.shape[1:]))
    spread[active] = numbers
    return spread
