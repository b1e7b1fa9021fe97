"""Slots that other code steps at once: a `gymnasium.vector.VectorEnv` with tasks, or a `MetaVectorEnv`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import ArrayLike, NDArray

from maml_rl.arrays import Mask
from maml_rl.envs.calls import close_quietly, five_parts, read_reset, recorded_number, seeded_reset
from maml_rl.envs.checking import refuse_statistics, seed_draws
from maml_rl.envs.global_generators import SharedGenerators
from maml_rl.envs.meta_env import (
    MetaVectorEnv,
    MetaVectorWrapper,
    OfTheWrapped,
    OneBatchVectorEnv,
    Seeds,
    Task,
    check_flags,
    declarations,
    declared,
    low_seeds,
    read_reset_mask,
    slot_seeds,
)
from maml_rl.envs.tasks import all_drawn, own_drawn, own_task, require_one_each
from maml_rl.spaces import ArrayElements, array_writer, own_actions, require_numbers, stored_actions

_TASK_METHODS = ("sample_tasks", "reset_task")


def has_tasks(env: Any) -> bool:
    """Return whether a vector environment, or a class of them, has the methods of a task family."""
    found = getattr if isinstance(env, type) else declared
    return all(callable(found(env, name, None)) for name in _TASK_METHODS)


class _BatchOfOthers(MetaVectorEnv):
    """Slots that a batch of other code steps: it gets copies of tasks, and its draws from the process are noticed."""

    env: Any

    def _take(self, env: Any, limit: int | None, current_slots: NDArray[np.int64] | None) -> None:
        """Begin with a batch.

        Args:
            env: the batch.
            limit: steps after which episodes are truncated, whatever the batch does; None for never.
            current_slots: (1,) where to write the slot whose observation is not in its space.
        """
        self.env, self._name = env, type(env).__name__
        self._current_slots = np.zeros(1, np.int64) if current_slots is None else current_slots
        remedy = f"np_random, or the streams of its slots, in {self._name}"
        self._generators = SharedGenerators(env.num_envs, (), remedy)
        self._limit, self._steps = limit, np.zeros(env.num_envs, np.int64)

    def watched(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call of the batch, whose draws from the process are noticed."""
        return self._generators.step(0, call)

    def _count(self, stepped: Mask) -> None:
        """Count a step of slots (N,), and truncate episodes at the limit as Gymnasium's TimeLimit does."""
        if self._limit is not None:
            self._steps += stepped
            self.buffers.truncated |= self._steps >= self._limit

    def _drawn(self, draw: Callable[[int], Any], num_tasks: int, name: str) -> list[Task]:
        """Return copies of the tasks that its method `name` draws."""
        tasks = self.watched(lambda: all_drawn(draw(num_tasks), num_tasks))
        return own_drawn(tasks, num_tasks, name, self.env)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        require_one_each(tasks, self.num_envs)
        give = declared(self.env, "reset_task")
        self.watched(lambda: give([own_task(task) for task in tasks]))

    def _refuse_outside(self, elements: ArrayElements, observations: NDArray[Any]) -> None:
        """Refuse the first of observations (N, *obs) that is not in the space of one, and name its slot."""
        for slot in [] if elements.contain(observations) else range(len(observations)):
            self._current_slots[0] = slot
            elements.array(observations[slot])

    def close(self, **kwargs: Any) -> None:
        """Close it, once; an error of its `close` is only a warning."""
        if not self.closed:
            close_quietly(partial(self.env.close, **kwargs), self._name)
            self.closed = True


class AdaptedVectorEnv(_BatchOfOthers, OneBatchVectorEnv):
    """Adapter around a `VectorEnv` that has `sample_tasks(num_tasks)` and `reset_task(tasks)`, one task for each slot.

    `sample_tasks` draws from its `np_random`. Its `reset` takes one seed for each slot; what a slot does must depend
    only on its task, its seed and its actions, not on the other slots.

    A slot whose episode is over stays as it is here, whatever `autoreset_mode` of its `metadata` says that it does
    there: with `NEXT_STEP` and `SAME_STEP` it goes on by itself, unseen; with `DISABLED` it is reset by `reset_mask`,
    and goes on as well.
    With `SAME_STEP` the last observation of an episode is that in the info `final_obs`.

    Args:
        env: the vector environment.
        max_episode_steps: steps of the longest possible episode; None for its own attribute, or that of its spec.
        current_slots: see `_BatchOfOthers`.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        max_episode_steps: int | None = None,
        current_slots: NDArray[np.int64] | None = None,
    ) -> None:
        own = declared(env, "max_episode_steps"), None if env.spec is None else env.spec.max_episode_steps
        limits = [int(limit) for limit in (max_episode_steps, *own) if isinstance(limit, int | np.integer) and limit]
        self.max_episode_steps = limits[0] if limits else None
        # At which nothing need know of the end: its own may come before the other.
        self._first_limit = min(limits, default=inf)
        self._take(env, self.max_episode_steps, current_slots)
        name, mode = self._name, env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise TypeError(
                f"{name} does not say what its slots do at the end of an episode; set metadata = "
                "{'autoreset_mode': gymnasium.vector.AutoresetMode.NEXT_STEP}, SAME_STEP or DISABLED"
            )
        self._mode = mode
        refuse_statistics(env)
        require_numbers(name, env.single_observation_space, env.single_action_space)
        self._writer = array_writer(env.single_observation_space)
        self.spec, self.render_mode = env.spec, env.render_mode
        self.recorded_infos, self.task_space, self.value_ranges, self._seed_mask = declarations(env)
        self._set_up(env.num_envs, self._writer.flat_space, stored_actions(env.single_action_space))
        self._elements = ArrayElements(self.observation_space)
        self._actions = np.zeros(self.action_space.shape or (), self.action_space.dtype)
        self._last_infos: dict[str, Any] = {}

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks from its generator; those of an evaluation by its `sample_test_tasks`, if it has that method."""
        if seed is not None:
            try:
                seed_draws(self.env, seed & self._seed_mask)
            except AttributeError:
                raise TypeError(
                    f"np_random of {self._name} cannot be set, and sample_tasks draws from it; add a line "
                    "'np_random = None' to the class, which makes it an attribute"
                ) from None
        name = "sample_test_tasks" if evaluation and declared(self.env, "sample_test_tasks") else "sample_tasks"
        return self._drawn(declared(self.env, name), num_tasks, name)

    def _reset(self, seeds: Sequence[int | None], mask: Mask | None, options: dict[str, Any] | None) -> None:
        if mask is not None and not mask.all():
            raise ValueError(f"{self._name} resets all its slots together; leave reset_mask out")
        low = None if None in seeds else low_seeds(seeds, self._seed_mask)  # type: ignore[arg-type]
        begin = partial(seeded_reset, self.env, low)
        started = perf_counter()
        observations, infos = read_reset(self._name, self.watched(begin))
        self._last_infos = infos or {}
        self.physics_seconds[0] += perf_counter() - started
        self._sent, self._ready = None, True
        self._steps[:] = 0
        self._write(observations, np.ones(self.num_envs, np.bool_))
        self.buffers.begin(slice(None))

    def _step(self, actions: NDArray[Any]) -> None:
        buffers = self.buffers
        active = ~buffers.over
        # A slot whose episode is over repeats its last action.
        self._actions[active] = actions[active]
        own = own_actions(self.single_action_space, self._actions)
        started = perf_counter()
        result = self.watched(partial(self.env.step, own))
        self.physics_seconds[0] += perf_counter() - started
        observations, rewards, terminated, truncated, infos = five_parts(self._name, result)
        self._last_infos = infos
        terminated, truncated = (
            self._of_slots(name, check_flags(name, flags))
            for name, flags in (("terminated", terminated), ("truncated", truncated))
        )
        ended = active & (terminated | truncated)
        goes_on = self._mode is AutoresetMode.SAME_STEP
        self._write(observations, active & ~ended if goes_on else active)
        if goes_on and ended.any():
            self._write_final(infos, ended)
        buffers.rewards[:] = np.where(active, self._of_slots("rewards", np.asarray(rewards)), 0.0)
        buffers.terminated |= active & terminated
        buffers.truncated |= active & truncated
        self._count(active)
        for name in buffers.infos:
            self._write_info(name, infos, active, ended)
        over = terminated | truncated
        if self._mode is AutoresetMode.DISABLED and over.any():
            # It would refuse to step the others. What these slots do from here on is not seen.
            self.env.reset(options={"reset_mask": over})

    def _of_slots(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return one number for each slot."""
        if values.shape != (self.num_envs,) or values.dtype.kind not in "biuf":
            remedy = "make several objectives one number, with their weights as part of the task"
            if values.size == self.num_envs:
                remedy = f"return {name}.reshape(-1)" if values.dtype.kind in "biuf" else "return numbers"
            elif name != "rewards":
                remedy = "return one for each slot"
            raise ValueError(
                f"{self._name} returned {name} of shape {values.shape} and dtype {values.dtype}, expected "
                f"a number for each of the {self.num_envs} slots; {remedy}"
            )
        return values

    def _write(self, observations: Any, where: Mask) -> None:
        """Write the observations of the slots `where` (N,)."""
        out, slot = self.buffers.observations, -1
        try:
            if isinstance(self._writer, ArrayElements):
                array = self._elements.array(observations, (), "observations")
                np.copyto(out, array, where=where.reshape(-1, *(1,) * (out.ndim - 1)), casting="same_kind")
                return
            for slot, observation in enumerate(iterate(self.env.observation_space, observations)):
                if where[slot]:
                    self._writer.write(observation, out[slot])
        except ValueError as error:
            self._current_slots[0] = slot
            if isinstance(self._writer, ArrayElements) and (rows := np.asarray(observations)).shape == out.shape:
                with suppress(ValueError):
                    self._refuse_outside(self._writer, rows)
            raise ValueError(f"{self._name} returned {error}") from error

    def _write_final(self, infos: dict[str, Any], ended: Mask) -> None:
        """Write the last observations of the episodes that have just ended, where the slots have gone on."""
        if "final_obs" not in infos:
            self._current_slots[0] = int(ended.argmax())
            raise ValueError(
                f"{self._name} has begun the next episode without the last observation; add the info 'final_obs', as "
                "autoreset_mode SAME_STEP says"
            )
        out = self.buffers.observations
        for slot in np.flatnonzero(ended).tolist():
            final = _entry(infos["final_obs"], slot)
            try:
                self._writer.write(final, out[slot, ...])
            except ValueError as error:
                self._current_slots[0] = slot
                raise ValueError(f"{self._name} returned {error}, as a final_obs") from error

    def _write_info(self, name: str, infos: dict[str, Any], active: Mask, ended: Mask) -> None:
        """Write a recorded info of the slots that have stepped; NaN where a time limit has ended an episode without."""
        values, kind = self.buffers.infos[name], self.recorded_infos[name]
        for slot in np.flatnonzero(active if kind == "step" else active & self.buffers.over).tolist():
            final = self._mode is AutoresetMode.SAME_STEP and ended[slot]
            source = infos.get("final_info", infos) if final else infos
            cut = not self.buffers.terminated[slot] and (not ended[slot] or self._steps[slot] >= self._first_limit)
            required = kind == "step" or not cut
            info = _info_of(source, name, slot)
            try:
                values[slot] = recorded_number(self._name, name, kind, info, source, required=required)
            except TypeError:
                self._current_slots[0] = slot
                raise

    def _infos(self) -> dict[str, Any]:
        return self._last_infos

    def render(self) -> tuple[Any, ...] | None:
        """Return its pictures."""
        pictures: tuple[Any, ...] | None = self.env.render()
        return pictures


def _entry(values: Any, slot: int) -> Any:
    """Return the entry of a slot in an array, or in the arrays of a dict or tuple."""
    if isinstance(values, dict):
        return {key: _entry(value, slot) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_entry(value, slot) for value in values)
    return values[slot]


def _info_of(infos: Any, name: str, slot: int) -> Any:
    """Return an info of a slot, from arrays with masks, or from an array of dicts; None if there is none."""
    if not isinstance(infos, Mapping):
        return infos[slot].get(name) if isinstance(infos[slot], Mapping) else None
    has = infos.get(f"_{name}")
    return infos[name][slot] if name in infos and (has is None or has[slot]) else None


class CheckedVectorEnv(_BatchOfOthers, MetaVectorWrapper):
    """Slots that somebody else's `MetaVectorEnv` steps: it gets copies, and what it observes is checked by value.

    Args:
        env: steps them.
        max_episode_steps: a limit that it need not know; None for none.
        current_slots: see `_BatchOfOthers`.
    """

    observes_anywhere: Any = OfTheWrapped()

    def __init__(
        self,
        env: MetaVectorEnv,
        max_episode_steps: int | None = None,
        current_slots: NDArray[np.int64] | None = None,
    ) -> None:
        MetaVectorWrapper.__init__(self, env)
        self._take(env, max_episode_steps, current_slots)
        # Which slots the steps that have been sent are of.
        self._stepping = np.zeros(env.num_envs, np.bool_)
        mask = declarations(env).seed_mask
        # Array code takes long seeds, unless it says otherwise.
        self._seed_mask = mask if declared(env, "seed_bits") else 2**63 - 1
        self._elements = ArrayElements(env.single_observation_space)

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        low = None if seed is None else seed & self._seed_mask
        draw = partial(self.env.sample_tasks, seed=low, evaluation=evaluation)
        return self._drawn(draw, num_tasks, "sample_tasks")

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._steps[:] = 0
        self.watched(partial(self.env.reset_buffers, np.asarray(seeds) & self._seed_mask))
        self._check()

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or some of them, as the environment does."""
        result: tuple[NDArray[Any], dict[str, Any]]
        low = [None if each is None else each & self._seed_mask for each in slot_seeds(seed, self.num_envs)]
        mask = read_reset_mask(options, self.num_envs)
        self._steps[slice(None) if mask is None else mask] = 0
        begin = partial(self.env.reset, seed=None if seed is None else low, options=options)
        result = self.watched(begin)
        self._check()
        return result

    def first_slots(self, num: int) -> MetaVectorEnv:
        return CheckedVectorEnv(self.env.first_slots(num), self._limit, self._current_slots)

    def reset_send(self, index: int, seed: int) -> None:
        part = self.parts[index]
        self._steps[part], self._stepping[part] = 0, False
        self.env.reset_send(index, seed & self._seed_mask)

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        part = self.parts[index]
        self._stepping[part] = ~self.buffers.over[part]
        self.env.step_send(index, np.array(actions))

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        received: list[int] = self.watched(partial(self.env.step_recv, timeout, indices))
        if self._limit is not None:
            again, stepped = self.buffers.restarted, np.zeros(self.num_envs, np.bool_)
            for part in map(self.parts.__getitem__, received):
                stepped[part] = self._stepping[part]
            self._steps[again] = 0
            self._count(stepped & ~again)
        self._check()
        return received

    def _check(self) -> None:
        try:
            self._refuse_outside(self._elements, self.buffers.observations)
        except ValueError as error:
            raise ValueError(f"{self._name} wrote {error}") from None

    def __getattr__(self, name: str) -> Any:
        # What a family has beside the contract, for code that looks for it.
        return getattr(self.__dict__["env"], name)
