"""Any environment with `sample_tasks` and `reset_task` as N slots, stepped one by one: `Slot`, `SerialVectorEnv`."""

import copy
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from inspect import iscoroutinefunction
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.envs.calls import (
    Attempt,
    Attempts,
    CallRules,
    Retry,
    awaits_steps,
    carry_out,
    close_quietly,
    is_async,
    not_awaited,
    pause_visibly,
    result_of,
    seeded_reset,
    without_wrappers,
)
from maml_rl.envs.checking import find_method, has_method, require_meta_env, seed_draws
from maml_rl.envs.global_generators import DRAWS, EPISODE, DrawsGloballyError, SlotGenerators, key_of_seed, key_of_task
from maml_rl.envs.meta_env import (
    EnvDescription,
    MetaVectorEnv,
    OneBatchVectorEnv,
    StepBuffers,
    Task,
    declarations,
    own_drawn,
    own_task,
    require_one_each,
)
from maml_rl.envs.results import ResultWriter, collect_infos, time_limit
from maml_rl.spaces import own_actions, stored_actions

Env = gymnasium.Env[Any, Any]


class Slot:
    """Makes the calls of one environment object, with copies, keyed seeds and generators, and attempts after `Retry`.

    Args:
        number: of the slot.
        env: its environment.
        attempts: of all slots.
        generators: of all slots.
        awaited: whether it was made on an event loop.

    Attributes:
        env: the environment in the form whose methods are called.
        awaited: whether its calls are made on an event loop, because `reset` or `step` must be awaited.
        limit: its time limit; None if it has none.
        resetting: whether its last call was a reset.
    """

    __slots__ = (
        "_attempts",
        "_begin",
        "_generators",
        "_mask",
        "_reset_task",
        "_steps",
        "awaited",
        "env",
        "limit",
        "number",
        "resetting",
    )

    def __init__(
        self, number: int, env: Env, attempts: Attempts, generators: SlotGenerators, *, awaited: bool = False
    ) -> None:
        self.number, self.env, self.limit = number, env, time_limit(env)
        self.awaited, self.resetting, self._steps = awaited or awaits_steps(env), False, 0
        self._attempts, self._generators = attempts, generators
        self._mask, self._reset_task = declarations(env).seed_mask, find_method(env, "reset_task")
        # What begins an episode again.
        self._begin: Callable[[], Any] = env.reset

    def __str__(self) -> str:
        return f"slot {self.number}, {self.env}"

    def awaits(self, method: Callable[..., Any]) -> bool:
        """Return whether a method of the environment is called on an event loop."""
        return self.awaited or iscoroutinefunction(method)

    def call(self, call: Callable[[], Any]) -> Attempt:
        """Return an attempt at something outside of its episodes, which is repeated after `Retry`."""
        self._attempts.retries[self.number] = 0
        return self._attempts.of(self.number, call)

    def draw(self, method: Callable[[int], Any], num_tasks: int, seed: int | None) -> tuple[Attempt, bool]:
        """Return an attempt at drawing tasks, and whether that is made on an event loop.

        A seed resets the environment, and seeds its generator, before it draws.
        """
        low = None if seed is None else int(seed) & self._mask

        def draw() -> Any:
            if low is None:
                return method(num_tasks)
            result = seeded_reset(self.env, low)
            if isinstance(result, Coroutine):
                return draw_after(result)
            seed_draws(self.env, low)
            return method(num_tasks)

        async def draw_after(coroutine: Coroutine[Any, Any, Any]) -> Any:
            await coroutine
            assert low is not None
            seed_draws(self.env, low)
            tasks = method(num_tasks)
            return await tasks if isinstance(tasks, Coroutine) else tasks

        return self.call(partial(self._generators.begin, 0, key_of_seed(low, DRAWS), draw)), self.awaits(method)

    def give(self, task: Task) -> tuple[Attempt, bool]:
        """Return an attempt at giving it a copy of a task, and whether that is made on an event loop."""
        reset_task = self._reset_task
        key = partial(key_of_task, task)
        call = partial(self._generators.begin, self.number, key, lambda: reset_task(own_task(task)))
        return self.call(call), self.awaits(reset_task)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Attempt:
        """Return an attempt at beginning an episode."""
        low = None if seed is None else int(seed) & self._mask
        reset = partial(seeded_reset, self.env, low, options=options)
        self._begin = partial(self._generators.begin, self.number, key_of_seed(low, EPISODE), reset)
        self.resetting, self._steps = True, 0
        return self.call(self._begin)

    def step(self, action: Any) -> Callable[[], Any]:
        """Return a call that takes a step with an action, which is the environment's own."""
        return partial(self._generators.step, self.number, partial(self.env.step, action))

    def attempt(self, step: Callable[[], Any], raised: Retry | None = None) -> Attempt:
        """Return an attempt at a step, which begins the episode again after `Retry`."""
        return self._attempts.of(self.number, step, self._begin, raised)

    def begin_again(self) -> Attempt:
        """Return an attempt at beginning the episode again."""
        return self._attempts.of(self.number, self._begin)

    def write(self, writer: ResultWriter, buffers: StepBuffers, result: Any, *, restarted: bool = False) -> None:
        """Write the result of the last call, a reset or a step, for which the episode may have `restarted`."""
        if restarted or self.resetting:
            self.resetting, self._steps = False, 0
            writer.write_reset(buffers, self.number, self.env, result, restarted=restarted)
            return
        self._steps += 1
        writer.write_step(buffers, self.number, self.env, result)
        # The wrapper with the limit of one that is awaited cannot await.
        if self.awaited and self._steps == self.limit and not buffers.terminated[self.number]:
            buffers.truncated[self.number] = True


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
            close_quietly(lambda: self._run(number, self._attempts.of(number, env.close), awaited=self._made_awaited))
            raise
        self.slots.append(slot)
        self._check(env)
        slot.env = without_wrappers(env)
        _description(self.slots[0].env).require_same(_description(env), "slot 0", f"slot {number}")

    def _check(self, env: Env) -> None:
        """Refuse an environment whose methods cannot be called here."""
        if is_async(env):
            raise not_awaited(type(env.unwrapped).__name__, env)

    @property
    def envs(self) -> list[Env]:
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
        attempt, awaited = first.draw(method, num_tasks, seed)
        self._ready = self._ready and seed is None
        return own_drawn(list(self._run(0, attempt, awaited=awaited)), num_tasks, name, first.env)

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
            close_quietly(partial(self._run, slot.number, slot.call(slot.env.close)), slot)


def _description(env: Env) -> EnvDescription:
    """Return the properties that all slots must have in common."""
    return EnvDescription(env.observation_space, env.action_space, None, declarations(env).recorded_infos)
