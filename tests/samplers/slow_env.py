"""Environments that wait, as for a service, in the processes of the tests of sampling."""

import asyncio
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maml_rl.envs import Retry

HORIZON = 6
# Latencies and faults are drawn from the operating system: no sampled value may depend on them.
_CHANCE = random.SystemRandom()


class SlowEnv(gymnasium.Env[Any, Any]):
    """Adds up actions and noise, ends after a random number of steps, and takes a random time for every call.

    Args:
        wait: mean seconds of a call.
        retry: probability that a call raises `Retry`.
        after: its seconds.
        kill: probability that a call ends the process.
        marker: folder in which each call that goes wrong leaves a file.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    recorded_infos = {"clock": "step", "length": "episode"}  # noqa: RUF012

    def __init__(
        self, wait: float = 0.0, retry: float = 0.0, after: float = 0.0, kill: float = 0.0, marker: str | None = None
    ) -> None:
        self._wait, self._retry, self._after, self._kill = wait, retry, after, kill
        self._marker = None if marker is None else Path(marker)
        self._task = {"goal": 0.0}
        self._steps = 0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, float]]:
        return [{"goal": float(index % 40)} for index in range(num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self._task = task

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._take_time()
        self._steps = 0
        self._length = int(self.np_random.integers(2, HORIZON + 1))
        self._state = self.np_random.normal(size=2)
        return self._state.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._take_time()
        self._steps += 1
        self._state = self._state + float(action[0]) + self.np_random.normal(size=2)
        over = self._steps == self._length
        info = {"clock": float(self._steps), "length": float(self._length)}
        return self._state.astype(np.float32), float(self._task["goal"] - self._state[0]), over, False, info

    def _take_time(self) -> None:
        if self._wait:
            time.sleep(self._wait * _CHANCE.uniform(0.0, 2.0))
        self._go_wrong()

    def _go_wrong(self) -> None:
        if _CHANCE.random() < self._kill:
            self._leave_a_file("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        if _CHANCE.random() < self._retry:
            self._leave_a_file("retry")
            raise Retry(after=self._after, reason="the service is restarting")

    def _leave_a_file(self, what: str) -> None:
        if self._marker is not None:
            (self._marker / f"{what}-{_CHANCE.randrange(2**60)}").touch()


class AwaitedEnv(SlowEnv):
    """The same, for an event loop."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return await self._later(lambda: super(AwaitedEnv, self).reset(seed=seed, options=options))

    async def step(self, action: Any) -> Any:
        return await self._later(lambda: super(AwaitedEnv, self).step(action))

    async def _later(self, call: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._wait * _CHANCE.uniform(0.0, 2.0))
        wait, self._wait = self._wait, 0.0
        try:
            return call()
        finally:
            self._wait = wait


class FixedThreadEnv(SlowEnv):
    """Declares that it is not thread-safe."""

    thread_safe = False


gymnasium.register("Slow-v0", entry_point="slow_env:SlowEnv", max_episode_steps=4)


class BoundEnv(SlowEnv):
    """Has a database open, which only the thread that opened it may use, and another value in each thread."""

    stepping = "threads"

    def __init__(self, wait: float = 0.0) -> None:
        super().__init__(wait)
        self._table = sqlite3.connect(":memory:")
        self._of_thread = threading.local()
        self._of_thread.value = 1.0

    def _check(self) -> None:
        self._table.execute("select 1")
        assert self._of_thread.value == 1.0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, float]]:
        self._check()
        return super().sample_tasks(num_tasks)

    def reset_task(self, task: dict[str, Any]) -> None:
        self._check()
        super().reset_task(task)

    def _take_time(self) -> None:
        self._check()
        super()._take_time()

    def close(self) -> None:
        self._table.close()


class AsksForLoopEnv(AwaitedEnv):
    """Needs the event loop on which it is awaited, from its constructor on."""

    def __init__(self, wait: float = 0.0) -> None:
        super().__init__(wait)
        self._loop = asyncio.get_running_loop()

    def sample_tasks(self, num_tasks: int) -> list[dict[str, float]]:
        assert asyncio.get_running_loop() is self._loop
        return super().sample_tasks(num_tasks)

    def reset_task(self, task: dict[str, Any]) -> None:
        assert asyncio.get_running_loop() is self._loop
        super().reset_task(task)

    def _take_time(self) -> None:
        assert asyncio.get_running_loop() is self._loop
        super()._take_time()

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self._loop
