"""`SerialVectorEnv`: any environment with `sample_tasks` and `reset_task` as N slots, stepped one by one."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import iscoroutinefunction
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
)
from maml_rl.envs.checking import find_method, has_method, require_meta_env, seed_draws
from maml_rl.envs.global_generators import DrawsGloballyError, SlotGenerators
from maml_rl.envs.meta_env import (
    MetaVectorEnv,
    OneBatchVectorEnv,
    Seeds,
    Task,
    declarations,
    low_seeds,
    own_drawn,
    own_task,
    read_reset_mask,
    require_one_each,
    slot_seeds,
)
from maml_rl.envs.results import ResultWriter, collect_infos, recorded_infos_of, time_limit
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

    Raises:
        TypeError: If the environments are not a task family, or their spaces are not supported.
        ValueError: If `num_envs` is not positive, or the spaces or recorded infos of two slots differ.
    """

    divides = True
    _not_ready = "cannot step before a reset, nor after sample_tasks(seed=...), which resets slot 0; call reset first"
    make_generators: type[SlotGenerators] = SlotGenerators

    def __init__(
        self,
        make_env: Callable[..., Any],
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        current_slots: NDArray[np.int64] | None = None,
        rules: CallRules = CallRules(),  # noqa: B008 - frozen
    ) -> None:
        self.envs: list[gymnasium.Env[Any, Any]] = []
        self.num_envs = check_count("num_envs", num_envs)
        self._attempts, self._generators = Attempts(rules.max_retries, num_envs), self.make_generators(num_envs)
        self.current_slots = np.zeros(1, np.int64) if current_slots is None else current_slots
        try:
            self._make_envs(make_env, env_kwargs or {})
        except BaseException:
            self.close_extras()
            raise
        first = self.envs[0]
        self._writer = ResultWriter(first)
        self.spec, self.render_mode = first.spec, first.render_mode
        self.max_episode_steps = time_limit(first)
        self.recorded_infos, self.task_space, self.value_ranges, self._seed_mask = declarations(first)
        self._set_up(num_envs, self._writer.space, stored_actions(first.action_space))
        self._reset_task = [find_method(env, "reset_task") for env in self.envs]
        # The method that begins the episode of each slot.
        self._begin: list[Callable[[], Any]] = [env.reset for env in self.envs]

    def _make_envs(self, make_env: Callable[..., Any], env_kwargs: Mapping[str, Any]) -> None:
        for slot in range(self.num_envs):
            self.current_slots[0] = slot
            env = self._call(slot, partial(make_env, **env_kwargs))
            require_meta_env(env)
            self.envs.append(env)
            self.envs[-1] = self._prepared(env)
            first, other = _description(self.envs[0]), _description(env)
            for kind in first:
                if first[kind] != other[kind]:
                    raise ValueError(
                        f"all slots must have the same {kind}: slot 0 has {first[kind]}, slot {slot} has {other[kind]}"
                    )

    def _prepared(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Return an environment in the form whose methods are called.

        Raises:
            TypeError: If they cannot be called here.
        """
        if is_async(env):
            raise not_awaited(type(env.unwrapped).__name__, env)
        return env

    def first_slots(self, num: int) -> MetaVectorEnv:
        part = copy.copy(self)
        part.num_envs, part.parts, part.buffers = num, (slice(0, num),), self.buffers.part(slice(num))
        part.envs, part._reset_task, part._begin = self.envs[:num], self._reset_task[:num], self._begin[:num]
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
        name = "sample_test_tasks" if evaluation and has_method(self.envs[0], "sample_test_tasks") else "sample_tasks"
        method = find_method(self.envs[0], name)
        low = None if seed is None else seed & self._seed_mask

        def draw() -> Any:
            if low is not None:
                self._ready = False
                seeded_reset(self.envs[0], low)
                seed_draws(self.envs[0], low)
            return method(num_tasks)

        tasks = self._call(0, partial(self._generators.draw_tasks, low, draw), awaited=iscoroutinefunction(method))
        return own_drawn(list(tasks), num_tasks, name, self.envs[0])

    def reset_task(self, tasks: Sequence[Task]) -> None:
        require_one_each(tasks, self.num_envs)
        for slot, (reset_task, task) in enumerate(zip(self._reset_task, tasks, strict=True)):
            self.current_slots[0] = slot
            self._call(slot, self._give(slot, reset_task, task))

    def _give(self, slot: int, reset_task: Callable[[Task], Any], task: Task) -> Callable[[], Any]:
        """Return the call that gives an environment a task of its own, at every attempt."""
        return partial(self._generators.give_task, slot, task, lambda: reset_task(own_task(task)))

    def _call(self, slot: int, call: Callable[[], Any], *, awaited: bool = False) -> Any:
        """Return the result of a call of a slot outside of its episodes, which is repeated where it raises `Retry`."""
        self._attempts.retries[slot] = 0
        return self._carry_out(slot, self._attempts.of(slot, call))[1]

    def _carry_out(self, slot: int, attempt: Attempt) -> tuple[bool, Any]:
        def mark(pausing: bool) -> None:
            self.current_slots[0] = -1 if pausing else slot

        return result_of(carry_out(attempt, partial(pause_visibly, mark=mark)))

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
        seeds = [None if entry is None else entry & self._seed_mask for entry in slot_seeds(seed, self.num_envs)]
        self._reset(seeds, mask, others or None)
        return self.buffers.observations.copy(), self._infos()

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._reset(low_seeds(seeds, self._seed_mask), None, None)

    def _reset(
        self, seeds: Sequence[int | None], mask: NDArray[np.bool_] | None, options: dict[str, Any] | None
    ) -> None:
        start = perf_counter()
        self._sent, self._writer.infos = None, {}
        for slot in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            self.current_slots[0] = slot
            begin = self._begin_with(slot, seeds[slot], options)
            result = self._carry_out(slot, self._attempts.of(slot, begin))[1]
            self._writer.write_reset(self.buffers, slot, self.envs[slot], result)
        self._ready = True
        self.physics_seconds[0] += perf_counter() - start

    def _begin_with(self, slot: int, seed: int | None, options: dict[str, Any] | None) -> Callable[[], Any]:
        """Return the call that begins an episode, whose retries count from zero."""
        self._attempts.retries[slot] = 0
        reset = partial(seeded_reset, self.envs[slot], seed, options=options)
        begin = self._begin[slot] = partial(self._generators.begin, slot, seed, reset)
        return begin

    def _step(self, actions: NDArray[Any]) -> None:
        start = perf_counter()
        buffers, writer = self.buffers, self._writer
        buffers.rewards[:], buffers.restarted[:] = 0.0, False
        writer.infos = {}
        for slot in np.flatnonzero(~buffers.over).tolist():
            self.current_slots[0] = slot
            own = own_actions(self.single_action_space, actions[slot])
            step = partial(self._generators.step, slot, partial(self.envs[slot].step, own))
            try:
                writer.write_step(buffers, slot, self.envs[slot], step())
                continue
            except Retry as retry:
                anew = self._attempts.of(slot, step, self._begin[slot], retry)
            except DrawsGloballyError:
                anew = self._attempts.of(slot, self._begin[slot])
            result = self._carry_out(slot, anew)[1]
            # It holds the error, whose traceback holds this frame, and with it what the environment had open.
            del anew
            writer.write_reset(buffers, slot, self.envs[slot], result, restarted=True)
        self.physics_seconds[0] += perf_counter() - start

    def _infos(self) -> dict[str, Any]:
        return collect_infos(self._writer.infos, self.num_envs)

    def render(self) -> tuple[Any, ...] | None:
        """Return the picture of each environment, or None without a render mode."""
        return None if self.render_mode is None else tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment; an error of `close` is only a warning, because its work is done."""
        for slot, env in enumerate(self.envs):
            self._close(slot, partial(self._call, slot, env.close))

    def _close(self, slot: int, close: Callable[[], Any]) -> None:
        try:
            with UsersCode(lambda error: ChildEnvError(explain(error))):
                close()
        except ChildEnvError as error:
            logger.warning("slot %d, %s: close() raises %s", slot, self.envs[slot], error)


def _description(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """Return the properties that all slots must have in common."""
    return {
        "observation space": env.observation_space,
        "action space": env.action_space,
        "recorded infos": recorded_infos_of(env),
    }
