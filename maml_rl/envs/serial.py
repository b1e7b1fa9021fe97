"""Any environment with `sample_tasks` and `reset_task` as N slots, stepped one by one: `Slot`, `SerialVectorEnv`."""

import copy
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from inspect import getcoroutinelocals, iscoroutinefunction
from time import monotonic, perf_counter, sleep
from typing import Any, Self

import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.arrays import Mask
from maml_rl.envs.calls import (
    CallRules,
    Env,
    ResultWriter,
    Retry,
    async_methods,
    awaits_steps,
    close_quietly,
    collect_infos,
    not_awaited,
    seeded_reset,
    time_limit,
    without_wrappers,
)
from maml_rl.envs.checking import find_method, has_method, require_meta_env, seed_draws
from maml_rl.envs.global_generators import (
    DRAWS,
    EPISODE,
    DrawsGloballyError,
    SlotGenerators,
    construct,
    construct_for_holder,
    holds_generators,
    key_of_seed,
    key_of_task,
)
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, OneBatchVectorEnv, StepBuffers, Task, declarations
from maml_rl.envs.tasks import all_drawn, own_drawn, own_task, require_one_each
from maml_rl.spaces import own_actions, stored_actions

# The result of a call, or what it has raised.
Outcome = tuple[Any, BaseException | None]

# A pause is waited for in steps, so that the supervisor recognizes it.
_PAUSE_SECONDS = 0.3


class Slot:
    """One environment object, and its next call.

    `make`, `draw`, `give`, `reset`, `step` and `close` say what is called, with copies, keyed seeds and generators, and
    return the slot; `carry_out` or `carry_out_awaited` calls it, again after every `Retry`.

    Args:
        number: of the slot.
        max_retries: how often an episode may restart because of `Retry`.
        generators: of all slots.
        awaited: whether the environment is made on an event loop.

    Attributes:
        env: the environment in the form whose methods are called.
        awaited: whether `reset` and `step` are called on an event loop, because one of them must be awaited.
        limit: its time limit; None if it has none.
        call: what is called next, or was called last.
        awaits: whether that is called on an event loop.
        restarted: whether the episode was restarted for it.
        resetting: whether it is a reset.
        restarts: number of all restarts.
    """

    def __init__(self, number: int, max_retries: int, generators: SlotGenerators, *, awaited: bool = False) -> None:
        self.number, self._max_retries, self._generators, self.awaited = number, max_retries, generators, awaited
        self.env: Env
        self.call: Callable[[], Any]
        # What is called instead after `Retry`, because it begins the episode again; None for the same.
        self._again: Callable[[], Any] | None = None
        self.awaits = self.restarted = self.resetting = False
        # How often it has raised `Retry` in this episode.
        self._retries = self._steps = self.restarts = 0

    def __str__(self) -> str:
        return f"slot {self.number}, {self.env}"

    def take(self, env: Env) -> None:
        """Use this environment from now on."""
        self.env, self.limit, self.awaited = env, time_limit(env), self.awaited or awaits_steps(env)
        self._begin: Callable[[], Any] = env.reset
        self._mask, self._reset_task = declarations(env).seed_mask, find_method(env, "reset_task")

    def make(self, make: Callable[[], Env]) -> Self:
        """Make an environment for this thread, which waits for it, and may hold the lock of the generators."""
        made = construct_for_holder if holds_generators() else construct
        return self._outside(lambda: made(make)[0], make)

    def draw(self, method: Callable[[int], Any], num_tasks: int, seed: int | None) -> Self:
        """Draw tasks; a seed resets the environment, and seeds its generator, before it draws."""
        low = None if seed is None else int(seed) & self._mask
        # Not this slot, which keeps the call: in a circle of references the environment would outlive its last use.
        env = self.env

        def draw() -> Any:
            if low is None:
                return all_drawn(method(num_tasks), num_tasks)
            result = seeded_reset(env, low)
            if isinstance(result, Coroutine):
                return draw_after(result)
            seed_draws(env, low)
            return all_drawn(method(num_tasks), num_tasks)

        async def draw_after(coroutine: Coroutine[Any, Any, Any]) -> Any:
            await coroutine
            assert low is not None
            seed_draws(env, low)
            tasks = method(num_tasks)
            return all_drawn(await tasks if isinstance(tasks, Coroutine) else tasks, num_tasks)

        return self._outside(partial(self._generators.begin, 0, key_of_seed(low, DRAWS), draw), method)

    def give(self, task: Task) -> Self:
        """Give it a task, a new copy for every attempt."""
        reset_task, key = self._reset_task, partial(key_of_task, task)
        call = partial(self._generators.begin, self.number, key, lambda: reset_task(own_task(task)))
        return self._outside(call, reset_task)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Self:
        """Begin an episode."""
        low = None if seed is None else int(seed) & self._mask
        reset = partial(seeded_reset, self.env, low, options=options)
        self._begin = partial(self._generators.begin, self.number, key_of_seed(low, EPISODE), reset)
        self._outside(self._begin, reset)
        self.resetting, self._steps = True, 0
        return self

    def step(self, action: Any) -> Self:
        """Take a step with an action, which is the environment's own."""
        self.call = partial(self._generators.step, self.number, partial(self.env.step, action))
        self._again, self.awaits, self.restarted, self.resetting = self._begin, self.awaited, False, False
        return self

    def close(self) -> Self:
        """Close the environment."""
        return self._outside(self.env.close, self.env.close)

    def _outside(self, call: Callable[[], Any], method: Callable[..., Any]) -> Self:
        """Call something that is not part of an episode, by which a method of the environment is called."""
        self.call, self._again, self.awaits = call, None, self.awaited or iscoroutinefunction(method)
        self.restarted, self.resetting, self._retries = False, False, 0
        return self

    def carry_out(self, pause: Callable[[int, float], None]) -> Any:
        """Make the call in this thread, and return its result.

        Args:
            pause: waits before another attempt; gets the number of the slot, and seconds.

        Raises:
            RuntimeError: If it raises `Retry` too often.
            TypeError: If it returns a coroutine.
        """
        while True:
            try:
                result = self.call()
                break
            except Retry as retry:
                seconds = self.begin_again(retry)
            pause(self.number, seconds)
        if isinstance(result, Coroutine):
            # That of the environment, where another coroutine looks after it.
            own = getcoroutinelocals(result).get("coroutine", result)
            result.close()
            own.close()
            name = getattr(own, "__qualname__", own)
            raise TypeError(
                f"it returned the coroutine {name}, which only a method that is async itself may; write "
                "async def and return await"
            )
        return result

    async def carry_out_awaited(self, pause: Callable[[int, float], Coroutine[Any, Any, None]]) -> Outcome:
        """Make the call in an event loop; see `carry_out`."""
        # Errors are returned: a StopIteration that leaves a coroutine would become another one.
        try:
            while True:
                try:
                    result = self.call()
                    return (await result if isinstance(result, Coroutine) else result), None
                except Retry as retry:
                    seconds = self.begin_again(retry)
                await pause(self.number, seconds)
        except BaseException as error:
            return None, error

    def begin_again(self, retry: Retry | None) -> float:
        """Have the episode begin again, or a call outside of it repeated, and return the seconds before that.

        Args:
            retry: why; None where nothing has failed, for which there is no limit.
        """
        if retry is not None:
            self._retries += 1
            if self._retries > self._max_retries:
                count, self._retries = self._retries, 0
                raise RuntimeError(
                    f"it raised Retry {count} times in one episode, more often than max_retries={self._max_retries} "
                    f"allows{f'; the last reason: {retry.reason}' if retry.reason else ''}; check the service behind "
                    "it, or raise max_retries"
                ) from retry
            self.restarts += 1
        if self._again is not None:
            self.call, self._again, self.restarted = self._again, None, True
        return 0.0 if retry is None else retry.after

    def write(self, writer: ResultWriter, buffers: StepBuffers, result: Any) -> None:
        """Write the result of the last call, a reset or a step."""
        if self.restarted or self.resetting:
            self._steps = 0
            writer.write_reset(buffers, self.number, self.env, result, restarted=self.restarted)
            return
        self._steps += 1
        writer.write_step(buffers, self.number, self.env, result)
        # The wrapper with the limit of one that is awaited cannot await.
        if self.awaited and self._steps == self.limit:
            buffers.truncated[self.number] = True


class SerialVectorEnv(OneBatchVectorEnv):
    """Adapter around N environment objects.

    Args:
        make_env: makes one environment; called N times.
        num_envs: N, at least 1.
        current_slots: (1,) where to write the slot that is being made, reset, given its task, or stepped.
        rules: how their calls are carried out.
        awaited: whether environments are made on an event loop, if there is one.
    """

    divides = True
    _not_ready = "cannot step before a reset, nor after sample_tasks(seed=...), which resets slot 0; call reset first"

    def __init__(
        self,
        make_env: Callable[[], Any],
        num_envs: int = 1,
        current_slots: NDArray[np.int64] | None = None,
        rules: CallRules = CallRules(),  # noqa: B008 - frozen
        *,
        awaited: bool = False,
    ) -> None:
        self.slots: list[Slot] = []
        self.num_envs, self._rules = check_count("num_envs", num_envs), rules
        self.current_slots = np.zeros(1, np.int64) if current_slots is None else current_slots
        self._generators = self._begin_calls()
        try:
            for number in range(num_envs):
                self._make_slot(Slot(number, rules.max_retries, self._generators, awaited=awaited), make_env)
        except BaseException:
            self.close_extras()
            raise
        first = self.slots[0].env
        self._writer = ResultWriter(first)
        self.spec, self.render_mode = first.spec, first.render_mode
        self.max_episode_steps = min((slot.limit for slot in self.slots if slot.limit is not None), default=None)
        self.recorded_infos, self.task_space, self.value_ranges, _ = declarations(first)
        self._set_up(num_envs, self._writer.space, stored_actions(first.action_space))

    def _begin_calls(self) -> SlotGenerators:
        """Prepare for calls, and return the generators of all slots."""
        return SlotGenerators(self.num_envs)

    def _make_slot(self, slot: Slot, make: Callable[[], Any]) -> None:
        self.current_slots[0] = slot.number
        slot.env = env = self._run(slot.make(make))
        try:
            require_meta_env(env)
            slot.take(env)
        except BaseException:
            # What is wrong with it is the error, and not what its close raises.
            close_quietly(lambda: self._run(slot.close()))
            raise
        self.slots.append(slot)
        self._check(env)
        slot.env = without_wrappers(env)
        _description(self.slots[0].env).require_same(_description(env), "slot 0", f"slot {slot.number}")

    def _check(self, env: Env) -> None:
        """Refuse an environment whose methods cannot be called here."""
        if async_methods(env):
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
        return sum(slot.restarts for slot in self.slots)

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks from the generator of slot 0; `seed` resets that slot, and seeds its generator, first.

        For an evaluation, `sample_test_tasks` draws them where the environment has that method.
        """
        self.current_slots[0] = 0
        first = self.slots[0]
        name = "sample_test_tasks" if evaluation and has_method(first.env, "sample_test_tasks") else "sample_tasks"
        method = find_method(first.env, name)
        self._ready = self._ready and seed is None
        return own_drawn(self._run(first.draw(method, num_tasks, seed)), num_tasks, name, first.env)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        require_one_each(tasks, self.num_envs)
        for slot, task in zip(self.slots, tasks, strict=True):
            self.current_slots[0] = slot.number
            slot.give(task).carry_out(self._pause)

    def _run(self, slot: Slot) -> Any:
        """Carry out the call of a slot, and return its result."""
        return slot.carry_out(self._pause)

    def _pause(self, number: int, seconds: float) -> None:
        """Wait before a slot's next attempt, with a mark that changes meanwhile: no supervisor takes it for a hang."""
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self.current_slots[0] = number if self.current_slots[0] == -1 else -1
            sleep(min(left, _PAUSE_SECONDS))
        self.current_slots[0] = number

    def _reset(self, seeds: Sequence[int | None], mask: Mask | None, options: dict[str, Any] | None) -> None:
        start = perf_counter()
        self._sent, self._writer.infos = None, {}
        for number in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            self.current_slots[0] = number
            slot = self.slots[number]
            slot.write(self._writer, self.buffers, slot.reset(seeds[number], options).carry_out(self._pause))
        self._ready = True
        self.physics_seconds[0] += perf_counter() - start

    def _step(self, actions: NDArray[Any]) -> None:
        start = perf_counter()
        buffers, writer = self.buffers, self._writer
        buffers.rewards[:], buffers.restarted[:] = 0.0, False
        writer.infos = {}
        # Of all slots at once, since the call costs as much for one; no other slot has its numbers.
        given = own_actions(self.single_action_space, actions)
        for number in np.flatnonzero(~buffers.over).tolist():
            self.current_slots[0] = number
            slot = self.slots[number].step(given[number])
            try:
                slot.write(writer, buffers, slot.call())
                continue
            except Retry as retry:
                seconds = slot.begin_again(retry)
            except DrawsGloballyError:
                seconds = slot.begin_again(None)
            self._pause(number, seconds)
            slot.write(writer, buffers, slot.carry_out(self._pause))
        self.physics_seconds[0] += perf_counter() - start

    def _infos(self) -> dict[str, Any]:
        return collect_infos(self._writer.infos, self.num_envs)

    def render(self) -> tuple[Any, ...] | None:
        """Return the picture of each environment, or None without a render mode."""
        return None if self.render_mode is None else tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment; an error of `close` is only a warning, because its work is done."""
        for slot in self.slots:
            close_quietly(partial(self._run, slot.close()), slot)


def _description(env: Env) -> EnvDescription:
    """Return the properties that all slots must have in common."""
    return EnvDescription(env.observation_space, env.action_space, None, declarations(env).recorded_infos)
