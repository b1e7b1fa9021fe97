"""The cost of slots that wait concurrently: wall time against the longest wait of one slot, memory, equal episodes.

    python -m benchmarks.slow_environments --json slow.json

Every call of the environment sleeps for half a second, 50 % more or less, like a service. No sampler can be faster than
the slot with the longest total wait: that is the limit. `--faults` kills workers and raises `Retry` at random
moments instead, and compares the episodes with undisturbed ones.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
from gymnasium import spaces

from benchmarks.measuring import Participant, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from maml_rl import MultiTaskSampler
from maml_rl.envs import Retry
from maml_rl.policies import NormalMLPPolicy
from maml_rl.seeding import seeded_torch

TIMES, MEMORY, FAULTS = "Wall time against the limit", "Memory of all processes", "Faults"
# Latencies and faults do not depend on the seed.
_CHANCE = random.SystemRandom()


class SleepingEnv(gymnasium.Env[Any, Any]):
    """A point whose calls take time.

    Args:
        folder: each slot writes to it how long it has waited, or what went wrong.
        wait: mean seconds of a call.
        length: steps of an episode.
        kill: probability that a call ends the process.
        retry: probability that a call raises `Retry`.
        most: after so many kills in all slots there are no more, and likewise after so many retries.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(
        self,
        folder: str,
        wait: float = 0.5,
        length: int = 40,
        kill: float = 0.0,
        retry: float = 0.0,
        most: int = 0,
    ) -> None:
        self._folder, self._wait, self._length = Path(folder), wait, length
        self._kill, self._retry, self._most = kill, retry, most
        self._waited = 0.0
        self._goal = np.zeros(2)

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw goals."""
        return [{"goal": goal} for goal in self.np_random.uniform(-1.0, 1.0, (num_tasks, 2))]

    def reset_task(self, task: dict[str, Any]) -> None:
        """Take a goal."""
        self._goal = np.asarray(task["goal"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, after a while."""
        time.sleep(self._begin(seed))
        return self._place.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move, after a while."""
        time.sleep(self._latency())
        return self._move(action)

    def _begin(self, seed: int | None) -> float:
        super().reset(seed=seed)
        self._place, self._steps, self._waited = self.np_random.normal(size=2), 0, 0.0
        return self._latency()

    def _move(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._place = self._place + 0.1 * np.asarray(action) + 0.01 * self.np_random.normal(size=2)
        over = self._steps == self._length
        if over:
            self._note(f"waited-{self._waited:.6f}")
        return self._place.astype(np.float32), -float(np.linalg.norm(self._place - self._goal)), False, over, {}

    def _latency(self) -> float:
        if self._happens("kill", self._kill):
            self._note("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        if self._happens("retry", self._retry):
            self._note("retry")
            raise Retry(after=self._wait)
        seconds = self._wait * _CHANCE.uniform(0.5, 1.5)
        self._waited += seconds
        return seconds

    def _happens(self, what: str, probability: float) -> bool:
        return _CHANCE.random() < probability and len(list(self._folder.glob(f"{what}-*"))) < self._most

    def _note(self, what: str) -> None:
        (self._folder / f"{what}-{_CHANCE.randrange(2**62)}").touch()


class AwaitedSleepingEnv(SleepingEnv):
    """The same, awaited."""

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Begin an episode, after a while."""
        await asyncio.sleep(self._begin(seed))
        return self._place.astype(np.float32), {}

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        """Move, after a while."""
        await asyncio.sleep(self._latency())
        return self._move(action)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    report = Report("slow environments", machine(), chosen(options))
    if options.faults:
        _survive(report, options)
    else:
        _measure(report, options)
    finish(report, options)


def _measure(report: Report, options: argparse.Namespace) -> None:
    """Measure wall time and memory, and compare digests."""
    undisturbed = {size: _sample(SleepingEnv, size, options, wait=0.0, num_workers=0)[0] for size in options.slots}
    ways: dict[str, tuple[Any, int]] = {
        "threads, in process": (SleepingEnv, 0),
        "threads, 2 workers": (SleepingEnv, 2),
        "awaited, in process": (AwaitedSleepingEnv, 0),
    }

    def turn(name: str, size: int) -> dict[str, float]:
        env, num_workers = ways[name]
        found, seconds, limit, memory = _sample(
            env, size, options, wait=options.wait, num_workers=num_workers, stepping="threads"
        )
        if found != undisturbed[size]:
            raise RuntimeError(f"{name}, {size} slots: the episodes differ from those of serial stepping")
        row = f"{name}, {size} slots"
        return {f"{row}: seconds": seconds, f"{row}: limit": limit, f"{row}: memory": memory}

    participants = [
        Participant(f"{name}, {size}", partial(turn, name, size)) for size in options.slots for name in ways
    ]
    rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    note = f"{options.steps} steps of {options.wait:g} s +- 50 %"
    for size in options.slots:
        for name in ways:
            row = f"{name}, {size} slots"
            report.add(TIMES, Row(row, ratios(rows[f"{row}: seconds"], rows[f"{row}: limit"]), "of the limit", note))
            report.add(MEMORY, Row(f"{row}, memory", rows[f"{row}: memory"], "MB", note))


def _survive(report: Report, options: argparse.Namespace) -> None:
    """Sample until workers have been killed and `Retry` has been raised often enough."""
    size, wait = min(options.slots), 0.002
    undisturbed, *_ = _sample(SleepingEnv, size, options, wait=0.0, num_workers=0)
    before = set(psutil.Process().children(recursive=True))

    def turn() -> dict[str, float]:
        kills = retries = phases = 0
        while kills < options.faults or retries < options.faults:
            with tempfile.TemporaryDirectory() as folder:
                found, *_ = _sample(
                    SleepingEnv,
                    size,
                    options,
                    wait=wait,
                    num_workers=2,
                    stepping="threads",
                    folder=folder,
                    kill=2.0 / size / options.steps,
                    retry=5.0 / size / options.steps,
                    most=options.faults,
                )
                names = [path.name.partition("-")[0] for path in Path(folder).iterdir()]
            kills, retries, phases = kills + names.count("kill"), retries + names.count("retry"), phases + 1
            if found != undisturbed:
                raise RuntimeError(f"after {kills} kills and {retries} retries the episodes differ")
        left = set(psutil.Process().children(recursive=True)) - before
        if left:
            raise RuntimeError(f"processes were left: {left}")
        return {"kills": kills, "retries": retries, "phases": phases}

    rows = take_turns([Participant("faults", turn)], repeats=1, warmup=0, report=progress(options))
    for name, samples in rows.items():
        report.add(FAULTS, Row(name, samples, "", f"{size} slots, 2 workers, equal digests"))


def _sample(
    env: Any,
    num_slots: int,
    options: argparse.Namespace,
    *,
    num_workers: int,
    folder: str = "",
    stepping: Any = "serial",
    **settings: Any,
) -> tuple[str, float, float, float]:
    """Sample a phase; return its digest, its seconds, the longest wait of a slot, and the memory in MB."""
    with tempfile.TemporaryDirectory() as own:
        folder = folder or own
        make = partial(env, folder, length=options.steps, **settings)
        with seeded_torch(0):
            policy = NormalMLPPolicy(2, 2, (64, 64), "tanh")
        with MultiTaskSampler(
            make,
            {},
            num_slots // options.tasks,
            policy,
            seed=0,
            num_workers=num_workers,
            max_episode_steps=options.steps,
            stepping=stepping,
            max_retries=1000,
            max_restarts=1000,
        ) as sampler:
            tasks = sampler.sample_tasks(options.tasks)
            sampler.prepare(len(tasks))
            started = time.perf_counter()
            digest = sampler.rollout(tasks).digest()
            seconds = time.perf_counter() - started
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            memory = sum(process.memory_full_info().pss for process in processes) / 1e6
        waited = [float(path.name.split("-")[1]) for path in Path(folder).iterdir() if path.name.startswith("waited")]
    return digest, seconds, max(waited, default=0.0), memory


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.set_defaults(repeats=1, warmup=0)
    parser.add_argument("--slots", nargs="+", type=int, default=[64, 512], help="slots that wait at once")
    parser.add_argument("--tasks", type=int, default=8, help="of them")
    parser.add_argument("--steps", type=int, default=40, help="of an episode")
    parser.add_argument("--wait", type=float, default=0.5, help="mean seconds of a call")
    parser.add_argument("--faults", type=int, default=0, help="kills and retries to survive, instead of measuring")
    options = parser.parse_args(arguments)
    if options.quick:
        options.slots, options.tasks, options.steps, options.wait = [4], 2, 3, 0.02
    if any(size % options.tasks for size in options.slots):
        parser.error(f"every number of slots must be a multiple of --tasks, {options.tasks}, got {options.slots}")
    return options


if __name__ == "__main__":
    main()
