"""Tasks of very different length: idle workers take the next ones, and the episodes stay the same."""

import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from slow_env import SlowEnv

from maml_rl import MultiTaskSampler
from maml_rl.errors import ChildEnvError, TaskError
from maml_rl.policies import NormalMLPPolicy

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.slow, pytest.mark.timeout(120)]

# The first half takes long: all of it is one worker's share.
SLOW, TASKS = 3, 6


class UnevenEnv(SlowEnv):
    """Takes long in the first tasks, and records which process has which task; see `SlowEnv`.

    Args:
        folder: receives a file for each episode that begins.
        wait: seconds of an episode of a slow task.
        fault: what happens once, in phase 1 and the last task: "kill", "raise", or nothing.
    """

    def __init__(self, folder: str = "", wait: float = 0.0, fault: str = "") -> None:
        super().__init__()
        self._folder, self._seconds, self._fault = Path(folder), wait, fault

    def reset_task(self, task: dict[str, Any]) -> None:
        if task["goal"] < 0:
            raise ValueError("goal must not be negative")
        super().reset_task(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        goal = int(self._task["goal"])
        if self._seconds:
            (self._folder / f"{self._task['phase']}-{goal}-{os.getpid()}-{time.monotonic_ns()}").touch()
            time.sleep(self._seconds if goal < SLOW else 0.0)
        if self._fault and goal == TASKS - 1 and self._task["phase"] == 1:
            try:
                (self._folder / "fault").touch(exist_ok=False)
            except FileExistsError:
                return super().reset(seed=seed, options=options)
            if self._fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("out of fuel")
        return super().reset(seed=seed, options=options)


def tasks_of(phase: int) -> list[dict[str, float]]:
    return [{"goal": float(goal), "phase": phase} for goal in range(TASKS)]


def sampled(env: Any, **options: Any) -> list[str]:
    """Sample two phases, the second of them in units, and return their digests."""
    settings: dict[str, Any] = {"seed": 0, "max_episode_steps": 4, "num_workers": 2, "slots_per_task": 1, **options}
    with MultiTaskSampler(env, {}, 2, NormalMLPPolicy(2, 1, (4,), "tanh", seed=0), **settings) as sampler:
        return [sampler.rollout(tasks_of(phase)).digest() for phase in range(2)]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return sampled(UnevenEnv, num_workers=0)


def workers_of(folder: Path, phase: int) -> dict[int, set[str]]:
    """Return the processes that have sampled each task of a phase."""
    notes = [path.name.split("-") for path in folder.iterdir() if path.name.startswith(f"{phase}-")]
    return {task: {note[2] for note in notes if note[1] == str(task)} for task in range(TASKS)}


@pytest.mark.parametrize("observe_last", [False, True])
def test_idle_workers_take_the_next_tasks_when_their_times_differ_much(
    undisturbed: list[str], tmp_path: Path, observe_last: bool
) -> None:
    if observe_last:
        policy: Any = NormalMLPPolicy(5, 1, (4,), "tanh", seed=0)
        found = []
        for env, workers in ((UnevenEnv, 0), (partial(UnevenEnv, str(tmp_path), 0.09), 2)):
            with MultiTaskSampler(
                env, {}, 2, policy, seed=0, num_workers=workers, max_episode_steps=4, observe_last=True
            ) as sampler:
                found.append([sampler.rollout(tasks_of(phase)).digest() for phase in range(2)])
        assert found[0] == found[1]
    else:
        assert sampled(partial(UnevenEnv, str(tmp_path), 0.09)) == undisturbed
    first, second = (workers_of(tmp_path, phase) for phase in (0, 1))
    # At first each worker has its own tasks, and one worker has all the slow ones.
    assert len(set.union(*(first[task] for task in range(SLOW)))) == 1
    assert len(set.union(*(second[task] for task in range(SLOW)))) == 2


def test_worker_that_dies_with_a_unit_costs_no_finished_unit(undisturbed: list[str], tmp_path: Path) -> None:
    assert sampled(partial(UnevenEnv, str(tmp_path), 0.09, "kill")) == undisturbed
    begun = Counter(path.name.split("-")[1] for path in tmp_path.iterdir() if path.name.startswith("1-"))
    # Two episodes per task. The last unit was lost, and no finished unit was sampled again.
    assert begun.pop(str(TASKS - 1)) > 2
    assert min(begun.values()) == 2
    assert sum(count > 2 for count in begun.values()) <= 1


def test_an_error_in_a_unit_names_the_slot_and_task_of_the_phase(tmp_path: Path) -> None:
    with pytest.raises(ChildEnvError, match=r"(?s)slot 5 .*'goal': 5\.0.*out of fuel"):
        sampled(partial(UnevenEnv, str(tmp_path), 0.09, "raise"))


def test_a_malformed_task_of_a_unit_is_named_by_its_number(tmp_path: Path) -> None:
    env = partial(UnevenEnv, str(tmp_path), 0.09)
    policy = NormalMLPPolicy(2, 1, (4,), "tanh", seed=0)
    options: dict[str, Any] = {"seed": 0, "max_episode_steps": 4, "num_workers": 2, "slots_per_task": 1}
    with MultiTaskSampler(env, {}, 2, policy, **options) as sampler:
        sampler.rollout(tasks_of(0))
        tasks = tasks_of(1)
        tasks[4] = {"goal": -1.0, "phase": 1}
        with pytest.raises((ChildEnvError, TaskError), match=r"(?s)slot 4 .*in reset_task|task 4.*goal must not"):
            sampler.rollout(tasks)
        assert sampler.rollout(tasks_of(0))
