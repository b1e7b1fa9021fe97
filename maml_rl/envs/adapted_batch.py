"""Slots that other code steps at once: a `gymnasium.vector.VectorEnv` with tasks, or a `MetaVectorEnv`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.calls import seeded_reset
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
    own_drawn,
    own_task,
    read_reset_mask,
    require_one_each,
    slot_seeds,
)
from maml_rl.envs.results import recorded_number
from maml_rl.spaces import ArrayElements, array_writer, own_actions, require_numbers, stored_actions

_TASK_METHODS = ("sample_tasks", "reset_task")


def has_tasks(env: Any) -> bool:
    """Return whether a vector environment, or a class of them, has the methods of a task family."""
    found = getattr if isinstance(env, type) else declared
    return all(callable(found(env, name, None)) for name in _TASK_METHODS)


class AdaptedVectorEnv(OneBatchVectorEnv):
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
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], max_episode_steps: int | None = None) -> None:
        self.env, name = env, type(env).__name__
        mode = env.metadata.get("autoreset_mode")
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
        of_spec = None if env.spec is None else env.spec.max_episode_steps
        self.max_episode_steps = max_episode_steps or declared(env, "max_episode_steps") or of_spec
        self.recorded_infos, self.task_space, self.value_ranges, self._seed_mask = declarations(env)
        self._set_up(env.num_envs, self._writer.flat_space, stored_actions(env.single_action_space))
        self._elements = ArrayElements(self.observation_space)
        self._actions = np.zeros(self.action_space.shape or (), self.action_space.dtype)
        self._generators = SharedGenerators(self.num_envs, (), f"the streams of its slots in {name}")
        self._last_infos: dict[str, Any] = {}

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks from its generator; those of an evaluation by its `sample_test_tasks`, if it has that method."""
        if seed is not None:
            self._seed_draws(seed & self._seed_mask)
        name = "sample_test_tasks" if evaluation and declared(self.env, "sample_test_tasks") else "sample_tasks"
        return own_drawn(list(declared(self.env, name)(num_tasks)), num_tasks, name, self.env)

    def _seed_draws(self, seed: int) -> None:
        """Give `sample_tasks` its generator."""
        try:
            seed_draws(self.env, seed)
        except AttributeError:
            raise TypeError(
                f"np_random of {type(self.env).__name__} cannot be set, and sample_tasks draws from it; add a line "
                "'np_random = None' to the class, which makes it an attribute"
            ) from None

    def reset_task(self, tasks: Sequence[Task]) -> None:
        require_one_each(tasks, self.num_envs)
        declared(self.env, "reset_task")([own_task(task) for task in tasks])

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, with one seed for each; see `MetaVectorEnv`."""
        mask = read_reset_mask(options, self.num_envs)
        if mask is not None and not mask.all():
            raise ValueError(f"{type(self.env).__name__} resets all its slots together; leave reset_mask out")
        seeds = [entry for entry in slot_seeds(seed, self.num_envs) if entry is not None]
        self._reset(low_seeds(seeds, self._seed_mask) if len(seeds) == self.num_envs else None)
        return self.buffers.observations.copy(), self._infos()

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._reset(low_seeds(seeds, self._seed_mask))

    def _reset(self, seeds: list[int] | None) -> None:
        begin = partial(seeded_reset, self.env, seeds)
        observations, self._last_infos = self._generators.step(0, begin)
        self._sent, self._ready = None, True
        self._write(observations, np.ones(self.num_envs, np.bool_))
        self.buffers.begin(slice(None))

    def _step(self, actions: NDArray[Any]) -> None:
        buffers = self.buffers
        active = ~buffers.over
        # A slot whose episode is over repeats its last action.
        self._actions[active] = actions[active]
        own = own_actions(self.single_action_space, self._actions)
        observations, rewards, terminated, truncated, infos = self._generators.step(0, partial(self.env.step, own))
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
                f"{type(self.env).__name__} returned {name} of shape {values.shape} and dtype {values.dtype}, expected "
                f"a number for each of the {self.num_envs} slots; {remedy}"
            )
        return values

    def _write(self, observations: Any, where: NDArray[np.bool_]) -> None:
        """Write the observations of the slots `where` (N,)."""
        out = self.buffers.observations
        try:
            if isinstance(self._writer, ArrayElements):
                array = self._elements.array(observations, (), "observations")
                np.copyto(out, array, where=where.reshape(-1, *(1,) * (out.ndim - 1)), casting="same_kind")
                return
            for slot, observation in enumerate(iterate(self.env.observation_space, observations)):
                if where[slot]:
                    self._writer.write(observation, out[slot])
        except ValueError as error:
            raise ValueError(f"{type(self.env).__name__} returned {error}") from error

    def _write_final(self, infos: dict[str, Any], ended: NDArray[np.bool_]) -> None:
        """Write the last observations of the episodes that have just ended, where the slots have gone on."""
        if "final_obs" not in infos:
            raise ValueError(
                f"{type(self.env).__name__} has begun the next episode of slot {int(ended.argmax())} without its last "
                "observation; add the info 'final_obs', as autoreset_mode SAME_STEP says"
            )
        out = self.buffers.observations
        for slot in np.flatnonzero(ended).tolist():
            final = _entry(infos["final_obs"], slot)
            try:
                self._writer.write(final, out[slot, ...])
            except ValueError as error:
                raise ValueError(f"{type(self.env).__name__} returned {error}, as a final_obs") from error

    def _write_info(
        self, name: str, infos: dict[str, Any], active: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> None:
        """Write a recorded info of the slots that have stepped; NaN where a time limit has ended an episode without."""
        values, kind = self.buffers.infos[name], self.recorded_infos[name]
        for slot in np.flatnonzero(active if kind == "step" else ended).tolist():
            final = self._mode is AutoresetMode.SAME_STEP and ended[slot]
            source = infos.get("final_info", infos) if final else infos
            required = kind == "step" or bool(self.buffers.terminated[slot])
            who = f"slot {slot} of {type(self.env).__name__}"
            values[slot] = recorded_number(who, name, kind, _info_of(source, name, slot), source, required=required)

    def _infos(self) -> dict[str, Any]:
        return self._last_infos

    def render(self) -> tuple[Any, ...] | None:
        """Return its pictures."""
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Close it."""
        self.env.close()


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


class CheckedVectorEnv(MetaVectorWrapper):
    """Slots that somebody else's `MetaVectorEnv` steps: it gets copies, and what it observes is checked by value.

    Args:
        env: steps them.
        current_slots: (1,) where to write the slot whose observation is not in its space.
    """

    observes_anywhere: Any = OfTheWrapped()

    def __init__(self, env: MetaVectorEnv, current_slots: NDArray[np.int64] | None = None) -> None:
        super().__init__(env)
        declarations(env)
        self._name, self._current_slots = type(env).__name__, current_slots
        self._elements = ArrayElements(env.single_observation_space)
        self._generators = SharedGenerators(self.num_envs, (), f"the streams of its slots in {self._name}")

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        tasks = list(self.env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation))
        return own_drawn(tasks, num_tasks, "sample_tasks", self.env)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        self.env.reset_task([own_task(task) for task in tasks])

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._generators.step(0, partial(self.env.reset_buffers, seeds))
        self._check()

    def first_slots(self, num: int) -> MetaVectorEnv:
        return CheckedVectorEnv(self.env.first_slots(num), self._current_slots)

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        self.env.step_send(index, np.array(actions))

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        received: list[int] = self._generators.step(0, partial(self.env.step_recv, timeout, indices))
        self._check()
        return received

    def _check(self) -> None:
        observations = self.buffers.observations
        for slot in [] if self._elements.contain(observations) else range(len(observations)):
            if self._current_slots is not None:
                self._current_slots[0] = slot
            try:
                self._elements.array(observations[slot])
            except ValueError as error:
                raise ValueError(f"{self._name} wrote {error}") from None

    def __getattr__(self, name: str) -> Any:
        # What a family has beside the contract, for code that looks for it.
        return getattr(self.__dict__["env"], name)
