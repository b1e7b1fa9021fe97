"""An environment that dies, hangs or raises an error at a given place, in the processes of the tests of sampling."""

import ctypes
import gc
import itertools
import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maml_rl.envs import Retry
from maml_rl.envs.meta_env import RecordedInfos

HORIZON = 6


class UnpicklableError(Exception):
    """Takes three arguments, holds a lambda, and fails when it is converted to text."""

    def __init__(self, first: object, second: object, third: object) -> None:
        super().__init__(first, second, third)
        self.callback = lambda: None

    def __str__(self) -> str:
        raise ValueError("no text")


class FaultyEnv(gymnasium.Env[Any, Any]):
    """Adds up actions and noise; has one fault, at one place.

    Args:
        fault: name of a method of this class, without its underscore.
        place: "make", "sample_tasks", "reset_task", "reset", "close", or the number of a step.
        marker: file that the fault creates, so that it happens once; None for every time.
        slot_task: if given, only slots whose task has this `goal` have the fault.
        busy_task: slots whose task has this `goal` take very long at `place`.
        script: JSON file with `fault`, `place` and `marker`, read again whenever one of them is used.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(
        self,
        fault: str = "",
        place: str | int = "",
        marker: str | None = None,
        slot_task: float | None = None,
        busy_task: float | None = None,
        script: str | None = None,
    ) -> None:
        self._fault, self._place, self._marker, self._slot_task = fault, place, marker, slot_task
        self._busy_task, self._script = busy_task, script
        self._task = {"goal": 0.0}
        self._steps = 0
        self._misbehave("make")

    def sample_tasks(self, num_tasks: int) -> list[dict[str, float]]:
        self._misbehave("sample_tasks")
        return [{"goal": float(goal)} for goal in self.np_random.uniform(size=num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self._task = task
        self._misbehave("reset_task")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        self._misbehave("reset")
        self._state = self.np_random.normal(size=2)
        return self._state.copy(), {"goal": self._task["goal"]}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._misbehave(self._steps)
        self._steps += 1
        self._state = self._state + float(action[0]) + self.np_random.normal(size=2)
        reward = float(self._task["goal"]) - self._state[0]
        over = self._steps == HORIZON
        return self._state.copy(), float(reward), False, over, {"torch": float("torch" in sys.modules)}

    def close(self) -> None:
        self._misbehave("close")

    def _misbehave(self, place: str | int) -> None:
        if self._script is not None:
            now = json.loads(Path(self._script).read_text())
            self._fault, self._place, self._marker = now["fault"], now["place"], now["marker"]
        if place == self._place and self._busy_task == self._task["goal"]:
            self._hang()
        if place != self._place or self._slot_task not in (None, self._task["goal"]):
            return
        if self._marker is not None:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        getattr(self, f"_{self._fault}")()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _segfault(self) -> None:
        ctypes.string_at(0)

    def _exit(self) -> None:
        os._exit(3)

    def _leave(self) -> None:
        sys.exit("enough")

    def _leave_quietly(self) -> None:
        sys.exit(0)

    def _raise_os(self) -> None:
        raise OSError(28, "No space left on device", "model.xml")

    def _interrupt(self) -> None:
        raise KeyboardInterrupt

    def _raise(self) -> None:
        raise RuntimeError("out of fuel")

    def _raise_unpicklable(self) -> None:
        raise UnpicklableError(1, 2, 3)

    def _raise_huge(self) -> None:
        raise RuntimeError("x" * 50_000_000)

    def _collect(self) -> None:
        gc.collect()

    def _work(self) -> None:
        """Take one third of the `step_timeout` of the tests of deadlines."""
        time.sleep(0.2)

    def _hang(self) -> None:
        time.sleep(1000)

    def _hang_with_gil(self) -> None:
        deque(itertools.repeat(None), maxlen=0)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _wait(self) -> None:
        """Wait until the file `<marker>.gate` exists."""
        while not Path(f"{self._marker}.gate").exists():
            time.sleep(0.001)


class WatchingEnv(FaultyEnv):
    """Records whether its process has imported torch."""

    recorded_infos: RecordedInfos = {"torch": "step"}  # noqa: RUF012


class LargeEnv(FaultyEnv):
    """Observes 100 kB."""

    observation_space = spaces.Box(-np.inf, np.inf, (25_000,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, infos = super().reset(seed=seed)
        return np.full(25_000, observation[0], np.float32), infos

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest = super().step(action)
        return np.full(25_000, observation[0], np.float32), *rest


class RetryingEnv(FaultyEnv):
    """Begins every episode at the second try, after a pause, and counts how often it was closed."""

    closed, retried = 0, False

    def reset(self, **options: Any) -> Any:
        self.retried = not self.retried
        if self.retried:
            raise Retry(after=0.01)
        return super().reset(**options)

    def close(self) -> None:
        RetryingEnv.closed += 1


class DifferentEnv(FaultyEnv):
    """Has another observation space in every process."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1.0, 1.0, (os.getpid(),), np.float32)


class NestedEnv(FaultyEnv):
    """Has a space that cannot be an array."""

    observation_space = spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))})  # type: ignore[assignment]


class HelpedEnv(FaultyEnv):
    """Runs a helper process, holds a lock and a socket: things that cannot be pickled."""

    def __init__(self, pid_file: str, **kwargs: Any) -> None:
        import socket
        import subprocess
        import threading

        self._lock, self._socket = threading.Lock(), socket.socket()
        helper = subprocess.Popen(["sleep", "1000"])
        with open(pid_file, "a") as file:
            file.write(f"{helper.pid}\n")
        super().__init__(**kwargs)
