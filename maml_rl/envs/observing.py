"""Slots whose observations are vectors of the environment's own and other numbers: of their tasks, or the last step.

Sources: Finn et al. 2017, section 5.3, whose oracle gets the task's parameters as input,
https://arxiv.org/abs/1703.03400; Duan et al. 2016, section 2.2, whose policies see the last step,
https://arxiv.org/abs/1611.02779
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.arrays import Floats, Mask, as_bytes, namespace
from maml_rl.envs.meta_env import MetaVectorEnv, MetaVectorWrapper, Seeds, StepBuffers, Task, read_reset_mask
from maml_rl.envs.tasks import as_numbers, for_each_task
from maml_rl.errors import TaskError
from maml_rl.spaces import PackedSpace, has_text, is_image, require_numbers, write_flat

# Seed of a first task, whose numbers are counted.
_LAYOUT_SEED = 0


class ObservingVectorEnv(MetaVectorWrapper):
    """Slots whose observations are vectors: the environment's own, flattened, then further numbers.

    A Discrete observation becomes a one-hot vector. An image, and what has text or images in it, becomes the first part
    of a `PackedSpace`, the numbers the second. Everything else is as the environment has it, so that the same seeds
    give the same tasks and, for the same actions, the same episodes.

    Args:
        env: steps its slots in this process.
        low: lowest values of the further numbers.
        high: their highest values.
        dtype: of the observations.
    """

    def __init__(self, env: MetaVectorEnv, low: NDArray[Any], high: NDArray[Any], dtype: np.dtype[Any]) -> None:
        super().__init__(env)
        space = env.single_observation_space
        flat = spaces.utils.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        self._own_size, self._dtype = flat.shape[0], dtype
        self._packs = isinstance(space, PackedSpace) or is_image(space)
        if self._packs:
            further = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)
            own = space.own if isinstance(space, PackedSpace) else space
            self.single_observation_space = PackedSpace(spaces.Tuple((own, further)))
        else:
            # A policy observes a vector, without the spaces that its numbers came from.
            self.single_observation_space = spaces.Box(
                np.concatenate([flat.low, low]).astype(dtype),
                np.concatenate([flat.high, high]).astype(dtype),
                dtype=dtype.type,
            )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.buffers = StepBuffers.allocate(self.single_observation_space, self.num_envs, env.recorded_infos)

    @abstractmethod
    def _further(self) -> Any:
        """Return the further numbers of all slots, (N, numbers)."""

    def begin_trial(self, tasks: Mapping[str, Any]) -> None:
        """Begin a trial in every slot, of tasks (N, ...) by entry, arrays or tensors."""

    def begin_episodes(self, slots: Any = None) -> None:
        """Begin another episode in slots, (N,) bool; None for all."""

    def take_step(self, slots: slice, actions: Any, rewards: Any, over: Any, stepped: Any = None) -> None:
        """Take the outcome of a step, as arrays or tensors.

        Args:
            slots: n of them.
            actions: (n, *act), zeros where a slot has not stepped.
            rewards: (n,).
            over: (n,) whether the episode is over.
            stepped: (n,) which of them have stepped; None for all.
        """

    def write(self, own: Any, observations: Any) -> None:
        """Write observations (N, *obs), of which the environment's `own` are the first numbers, arrays or tensors."""
        size, numbers = self._own_size, self._further()
        write_flat(self.env.single_observation_space, own, observations[:, :size])
        observations[:, size:] = as_bytes(numbers, self._dtype) if self._packs else numbers

    @property
    def buffers(self) -> StepBuffers:
        """The arrays that every reset and step writes; assigning others makes them write there."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        # The environment writes its observations into an array of its own, and all else directly into these buffers.
        own = self.env.buffers.observations
        self.env.buffers = replace(buffers, observations=own)

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of `options["reset_mask"]`, as the environment does."""
        infos = self.env.reset(seed=seed, options=options)[1]  # type: ignore[arg-type]
        self._observe()
        return self.buffers.observations.copy(), infos

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self.env.reset_buffers(seeds)
        self._observe()

    def first_slots(self, num: int) -> MetaVectorEnv:
        make: Callable[[MetaVectorEnv], MetaVectorEnv] = type(self)
        return make(self.env.first_slots(num))

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        received = self.env.step_recv(timeout, indices)
        self._observe()
        return received

    def _observe(self) -> None:
        self.write(self.env.buffers.observations, self.buffers.observations)


class TaskObservationVectorEnv(ObservingVectorEnv):
    """Slots whose observations are vectors: the environment's own, then the task's entries in alphabetical order."""

    def __init__(self, env: MetaVectorEnv) -> None:
        require_numbers("what observes its task", env.single_observation_space, env.single_action_space)
        (task,) = env.sample_tasks(1, seed=_LAYOUT_SEED)
        self._layout = _layout(task)
        unbounded = np.full(sum(map(int, map(np.prod, self._layout.values()))), np.inf)
        own = env.single_observation_space
        dtype = np.dtype(own.dtype if isinstance(own, spaces.Box) and own.dtype.kind == "f" else np.float32)
        super().__init__(env, -unbounded, unbounded, dtype)
        self.reset_task([task] * self.num_envs)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`, which its next observation shows."""
        super().reset_task(tasks)
        self._shown = np.array(for_each_task(tasks, lambda task: _flatten(task, self._layout)))

    def begin_trial(self, tasks: Mapping[str, Any]) -> None:
        numbers = [tasks[name].reshape(self.num_envs, -1) for name in sorted(tasks)]
        self._shown[:] = namespace(self._shown).concatenate(numbers, 1)

    def _further(self) -> Any:
        return self._shown


def _layout(task: Task) -> dict[str, tuple[int, ...]]:
    """Return the shape of every entry, by name in alphabetical order."""
    if not isinstance(task, Mapping) or not task:
        raise TaskError(f"only a task that is a dict of numbers and arrays can be observed, got {task!r}")
    return {name: _numbers(name, task[name]).shape for name in sorted(task)}


def _flatten(task: Task, layout: Mapping[str, tuple[int, ...]]) -> Floats:
    """Return the numbers of a task as one vector."""
    if set(task) != set(layout):
        raise TaskError(f"an observed task has the entries {sorted(layout)}, got {sorted(task)}")
    arrays = []
    for name, shape in layout.items():
        arrays.append(_numbers(name, task[name]))
        if arrays[-1].shape != shape:
            raise TaskError(
                f"entry {name!r} of an observed task must have the same shape in all tasks, {shape} in the first, "
                f"got {arrays[-1].shape}"
            )
    return np.concatenate([array.ravel() for array in arrays])


def _numbers(name: str, value: Any) -> Floats:
    array = as_numbers(value, "biuf")
    if array is None:
        raise TaskError(f"entry {name!r} of a task cannot be observed: expected numbers, got {value!r}")
    return array


@dataclass(frozen=True, slots=True)
class LastStepParts:
    """The positions of the parts of an observation that shows the last step.

    Attributes:
        observation: the environment's own, flattened; a Discrete one as a one-hot vector.
        last_action: a discrete one as one-hot vectors, a Box one flattened.
        last_reward: one number.
        last_termination: one number, 1 where the last step ended an episode, by termination or truncation.
        size: numbers in all.
    """

    observation: slice
    last_action: slice
    last_reward: slice
    last_termination: slice
    size: int

    @classmethod
    def of(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> LastStepParts:
        """Return the parts for the environment's own spaces."""
        own = spaces.flatdim(observation_space)
        after = own + spaces.flatdim(action_space)
        return cls(slice(0, own), slice(own, after), slice(after, after + 1), slice(after + 1, after + 2), after + 2)

    @classmethod
    def within(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> LastStepParts:
        """Return the parts of `observation_space`, which already shows the last step.

        Raises:
            ValueError: If it has no room for them.
        """
        own = spaces.flatdim(observation_space) - spaces.flatdim(action_space) - 2
        if own < 0:
            raise ValueError(
                f"observations of {spaces.flatdim(observation_space)} numbers do not show the last action and reward; "
                "make the sampler with observe_last=True, in a config 'observe-last: true'"
            )
        return cls.of(spaces.Box(-np.inf, np.inf, (own,)), action_space)


class LastStepVectorEnv(ObservingVectorEnv):
    """Slots whose observations are the environment's own, then the last step's outcome, as numbers of float32.

    The further numbers are all zero at the first step of a trial, which begins with `reset_task`. At the first step of
    a later episode they are those of the last step of the episode before it. See `LastStepParts`. Where observations
    have text in them, the further numbers are the last reward and termination alone.
    """

    def __init__(self, env: MetaVectorEnv) -> None:
        self._has_text = has_text(env.single_observation_space)
        action = spaces.utils.flatten_space(env.single_action_space)
        assert isinstance(action, spaces.Box)
        if self._has_text:
            # Actions that are text are not shown: a policy that writes text can remember what it wrote.
            action = spaces.Box(0.0, 0.0, (0,))
        self._last = np.zeros((env.num_envs, action.shape[0] + 2), np.float32)
        self._sent: dict[int, tuple[NDArray[Any], Mask]] = {}
        low, high = np.append(action.low, [-np.inf, 0.0]), np.append(action.high, [np.inf, 1.0])
        # Zeros, where there is no last action.
        super().__init__(env, np.minimum(low, 0.0), np.maximum(high, 0.0), np.dtype(np.float32))
        self._begun = np.zeros(env.num_envs, np.bool_)
        self._at_start = self._last.copy(), self._begun.copy()

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Begin a trial of the task `tasks[i]` in slot i."""
        super().reset_task(tasks)
        self.begin_trial({})

    def begin_trial(self, tasks: Mapping[str, Any]) -> None:
        """Show zeros."""
        self._last[:] = 0.0
        self._begun[:] = False

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin another episode of the trial."""
        self._begin(read_reset_mask(options, self.num_envs))
        return super().reset(seed=seed, options=options)

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._begin()
        super().reset_buffers(seeds)

    def begin_episodes(self, slots: Any = None) -> None:
        """Show that an episode has ended, except at the start of a trial."""
        # The sampler may have truncated it without the environment's knowledge.
        ended = self._begun if slots is None else self._begun & slots
        self._last[:, -1] = namespace(self._last).where(ended, 1.0, self._last[:, -1])

    def _begin(self, slots: Mask | None = None) -> None:
        """Begin another episode in slots, which may begin anew from what they show now."""
        self.begin_episodes(slots)
        for kept, now in zip(self._at_start, (self._last, self._begun), strict=True):
            np.copyto(kept.T, now.T, where=True if slots is None else slots)

    def reset_send(self, index: int, seed: int) -> None:
        # A step of a phase that was left is never received.
        self._sent.pop(index, None)
        self._begin(np.arange(self.num_envs) == index)
        super().reset_send(index, seed)

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        part = self.parts[index]
        over = self.buffers.over[part]
        # What was sent to a slot whose episode is over may be no action.
        acted = np.where(over.reshape(-1, *(1,) * (np.ndim(actions) - 1)), 0, actions) if over.any() else actions
        self._sent[index] = np.array(acted), ~over
        super().step_send(index, actions)

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        received = self.env.step_recv(timeout, indices)
        for index in received:
            if index in self._sent:
                part, (actions, stepped) = self.parts[index], self._sent.pop(index)
                over = self.buffers.over[part]
                self.take_step(part, actions, self.buffers.rewards[part], over, None if stepped.all() else stepped)
        restarted = self.buffers.restarted
        if restarted.any():
            self._last[restarted], self._begun[restarted] = (kept[restarted] for kept in self._at_start)
        self._observe()
        return received

    def take_step(self, slots: slice, actions: Any, rewards: Any, over: Any, stepped: Any = None) -> None:
        """Show the outcome of a step from now on."""
        before, xp = self._last[slots], namespace(self._last)
        last = before if stepped is None else xp.empty_like(before)
        if not self._has_text:
            write_flat(self.single_action_space, actions, last[:, :-2])
        last[:, -2], last[:, -1] = rewards, over
        if stepped is not None:
            before[:] = xp.where(stepped[:, None], last, before)
        self._begun[slots] |= True if stepped is None else stepped

    def _further(self) -> Any:
        return self._last
