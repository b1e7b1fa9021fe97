"""`Slot`: one environment object, and what a sampler calls of it, whatever carries the calls out."""

from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import gymnasium

from maml_rl.envs.calls import Attempt, Attempts, Retry, awaits_steps, seeded_reset
from maml_rl.envs.checking import find_method
from maml_rl.envs.global_generators import SlotGenerators
from maml_rl.envs.meta_env import StepBuffers, Task, declarations, own_task
from maml_rl.envs.results import ResultWriter, time_limit

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

    def awaits(self, method: Callable[..., Any]) -> bool:
        """Return whether a method of the environment is called on an event loop."""
        return self.awaited or iscoroutinefunction(method)

    def low_bits(self, seed: int) -> int:
        """Return as many bits of a seed as the environment takes."""
        return int(seed) & self._mask

    def call(self, call: Callable[[], Any]) -> Attempt:
        """Return an attempt at something outside of its episodes, which is repeated after `Retry`."""
        self._attempts.retries[self.number] = 0
        return self._attempts.of(self.number, call)

    def draw(
        self, method: Callable[[int], Any], num_tasks: int, seed: int | None, seeding: Callable[[int], Any]
    ) -> Attempt:
        """Return an attempt at drawing tasks, before which `seeding` gets the seed, if there is one."""
        low = None if seed is None else self.low_bits(seed)

        def draw() -> Any:
            if low is not None:
                seeding(low)
            return method(num_tasks)

        return self.call(partial(self._generators.draw_tasks, low, draw))

    def give(self, task: Task) -> tuple[Attempt, bool]:
        """Return an attempt at giving it a copy of a task, and whether that is made on an event loop."""
        reset_task = self._reset_task
        call = partial(self._generators.give_task, self.number, task, lambda: reset_task(own_task(task)))
        return self.call(call), self.awaits(reset_task)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Attempt:
        """Return an attempt at beginning an episode."""
        low = None if seed is None else self.low_bits(seed)
        reset = partial(seeded_reset, self.env, low, options=options)
        self._begin = partial(self._generators.begin, self.number, low, reset)
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
