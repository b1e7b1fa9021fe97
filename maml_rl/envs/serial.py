"""`SerialVectorEnv`: any environment with `sample_tasks` and `reset_task` as N slots, stepped one by one."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.arguments import check_count
from maml_rl.envs.calls import (
    Attempt,
    Attempts,
    CallRules,
    Retry,
    carry_out,
    is_async,
    not_awaited,
    pause_visibly,
    result_of,
    seeded_reset,
    without_wrappers,
)
from maml_rl.envs.checking import find_method, has_method, require_meta_env, seed_draws
from maml_rl.envs.global_generators import DrawsGloballyError, SlotGenerators
from maml_rl.envs.meta_env import (
    MetaVectorEnv,
    OneBatchVectorEnv,
    Seeds,
    Task,
    declarations,
    own_drawn,
    read_reset_mask,
    require_one_each,
    slot_seeds,
)
from maml_rl.envs.results import ResultWriter, collect_infos, recorded_infos_of
from maml_rl.envs.slot import Slot
from maml_rl.errors import ChildEnvError, UsersCode, explain
from maml_rl.spaces import own_actions, stored_actions

logger = logging.getLogger(__name__)


class SerialVectorEnv(OneBatchVectorEnv):
    """Adapter around N environment objects.

    Args:
        make_env: makes one environment; called N times.
        env_kwargs: keyword arguments of `make_env`.
        num_envs: N, at least 1.
        current_slots: (1,) where to write the slot that is being made, reset, given its task, or stepped.
        rules: how their calls are carried out.
    """

    divides = True
    _not_ready = "cannot step before a reset, nor after sample_tasks(seed=...), which resets slot 0; call reset first"
    make_generators: type[SlotGenerators] = SlotGenerators
    # Whether environments are made on an event loop.
    _made_awaited = False

    def __init__(
        self,
        make_env: Callable[..., Any],
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        current_slots: NDArray[np.int64] | None = None,
        rules: CallRules = CallRules(),  # noqa: B008 - frozen
    ) -> None:
        self.slots: list[Slot] = []
        self.num_envs = check_count("num_envs", num_envs)
        self._attempts, self._generators = Attempts(rules.max_retries, num_envs), self.make_generators(num_envs)
        self.current_slots = np.zeros(1, np.int64) if current_slots is None else current_slots
        try:
            for number in range(self.num_envs):
                self._make_slot(number, partial(make_env, **(env_kwargs or {})))
        except BaseException:
            self.close_extras()
            raise
        first = self.slots[0].env
        self._writer = ResultWriter(first)
        self.spec, self.render_mode = first.spec, first.render_mode
        self.max_episode_steps = min((slot.limit for slot in self.slots if slot.limit is not None), default=None)
        self.recorded_infos, self.task_space, self.value_ranges, _ = declarations(first)
        self._set_up(num_envs, self._writer.space, stored_actions(first.action_space))

    def _make_slot(self, number: int, make: Callable[[], Any]) -> None:
        self.current_slots[0] = number
        env = self._run(number, self._attempts.of(number, make), awaited=self._made_awaited)
        try:
            require_meta_env(env)
            slot = Slot(number, env, self._attempts, self._generators, awaited=self._made_awaited)
        except BaseException:
            # What is wrong with it is the error, and not what its close raises.
            with suppress(Exception):
                self._run(number, self._attempts.of(number, env.close), awaited=self._made_awaited)
            raise
        self.slots.append(slot)
        self._check(env)
        slot.env = without_wrappers(env)
        first, other = _description(self.slots[0].env), _description(env)
        for kind in first:
            if first[kind] != other[kind]:
                raise ValueError(
                    f"all slots must have the same {kind}: slot 0 has {first[kind]}, slot {number} has {other[kind]}"
                )

    def _check(self, env: gymnasium.Env[Any, Any]) -> None:
        """Refuse an environment whose methods cannot be called here."""
        if is_async(env):
            raise not_awaited(type(env.unwrapped).__name__, env)

    @property
    def envs(self) -> list[gymnasium.Env[Any, Any]]:
        """The environments of the slots."""
        return [slot.env for slot in self.slots]

    def first_slots(self, num: int) -> MetaVectorEnv:
        part = copy.copy(self)
        part.num_envs, part.parts, part.buffers = num, (slice(0, num),), self.buffers.part(slice(num))
        part.slots = self.slots[:num]
        part.observation_space = batch_space(self.single_observation_space, num)
        part.action_space = batch_space(self.single_action_space, num)
        # It must not close its environments, not even when it is collected.
        part.closed = True
        return part

    @property
    def retries(self) -> int:
        return self._attempts.total

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks from the generator of slot 0; `seed` resets that slot, and seeds its generator, first.

        For an evaluation, `sample_test_tasks` draws them where the environment has that method.
        """
        self.current_slots[0] = 0
        first = self.slots[0]
        name = "sample_test_tasks" if evaluation and has_method(first.env, "sample_test_tasks") else "sample_tasks"
        method = find_method(first.env, name)
        tasks = self._run(0, first.draw(method, num_tasks, seed, self._seed_draws), awaited=first.awaits(method))
        return own_drawn(list(tasks), num_tasks, name, first.env)

    def _seed_draws(self, seed: int) -> None:
        self._ready = False
        seeded_reset(self.slots[0].env, seed)
        seed_draws(self.slots[0].env, seed)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        require_one_each(tasks, self.num_envs)
        for slot, task in zip(self.slots, tasks, strict=True):
            self.current_slots[0] = slot.number
            self._run(slot.number, slot.give(task)[0])

    def _run(self, number: int, attempt: Attempt, *, awaited: bool = False) -> Any:
        """Return the result of an attempt of a slot."""

        def mark(pausing: bool) -> None:
            self.current_slots[0] = -1 if pausing else number

        return result_of(carry_out(attempt, partial(pause_visibly, mark=mark)))[1]

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of the boolean array `options["reset_mask"]`.

        Args:
            seed: one per slot, of which the low `seed_bits` bits are used; an integer s means s, s + 1,
                ...; None for none.
            options: see above; other entries are passed on.

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

    def _reset(
        self, seeds: Sequence[int | None], mask: NDArray[np.bool_] | None, options: dict[str, Any] | None
    ) -> None:
        start = perf_counter()
        self._sent, self._writer.infos = None, {}
        for number in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            self.current_slots[0] = number
            slot = self.slots[number]
            slot.write(self._writer, self.buffers, self._run(number, slot.reset(seeds[number], options)))
        self._ready = True
        self.physics_seconds[0] += perf_counter() - start

    def _step(self, actions: NDArray[Any]) -> None:
        start = perf_counter()
        buffers, writer = self.buffers, self._writer
        buffers.rewards[:], buffers.restarted[:] = 0.0, False
        writer.infos = {}
        for number in np.flatnonzero(~buffers.over).tolist():
            self.current_slots[0] = number
            slot = self.slots[number]
            step = slot.step(own_actions(self.single_action_space, actions[number]))
            try:
                slot.write(writer, buffers, step())
                continue
            except Retry as retry:
                anew = slot.attempt(step, retry)
            except DrawsGloballyError:
                anew = slot.begin_again()
            result = self._run(number, anew)
            # It holds the error, whose traceback holds this frame, and with it what the environment had open.
            del anew
            slot.write(writer, buffers, result, restarted=True)
        self.physics_seconds[0] += perf_counter() - start

    def _infos(self) -> dict[str, Any]:
        return collect_infos(self._writer.infos, self.num_envs)

    def render(self) -> tuple[Any, ...] | None:
        """Return the picture of each environment, or None without a render mode."""
        return None if self.render_mode is None else tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment; an error of `close` is only a warning, because its work is done."""
        for slot in self.slots:
            self._close(slot, partial(self._run, slot.number, slot.call(slot.env.close)))

    def _close(self, slot: Slot, close: Callable[[], Any]) -> None:
        try:
            with UsersCode(lambda error: ChildEnvError(explain(error))):
                close()
        except ChildEnvError as error:
            logger.warning("slot %d, %s: close() raises %s", slot.number, slot.env, error)


def _description(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """Return the properties that all slots must have in common."""
    return {
        "observation space": env.observation_space,
        "action space": env.action_space,
        "recorded infos": recorded_infos_of(env),
    }
