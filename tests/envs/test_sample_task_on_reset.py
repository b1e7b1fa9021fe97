"""Families as ordinary environments whose task changes with every episode."""

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from maml_rl.envs import SampleTaskOnReset, SampleTaskOnResetVector, make_vector_env
from maml_rl.envs.families.navigation import Navigation2DVectorEnv
from maml_rl.errors import TaskError
from tests.envs.third_party import NoTaskEnv, WalkEnv

FAMILIES = ["Bandit-K5-v0", "HalfCheetahVel-v5"]


def values(task: dict[str, Any]) -> bytes:
    return b"".join(np.asarray(task[name]).tobytes() for name in sorted(task))


@pytest.mark.parametrize("env_id", FAMILIES)
def test_every_episode_has_a_task_of_its_own_and_a_seed_repeats_them(env_id: str) -> None:
    env = SampleTaskOnReset(gymnasium.make(env_id))
    with warnings.catch_warnings():
        # The checker warns that the environment is wrapped, as intended, and that spaces are unusual.
        warnings.simplefilter("ignore")
        check_env(env, skip_render_check=True)
    runs = []
    for _ in range(2):
        tasks, starts = [], []
        for episode in range(4):
            observation, info = env.reset(seed=3 if episode == 0 else None)
            # The family tells its task itself.
            assert values(info["task"]) == values(env.task)
            tasks.append(values(env.task))
            starts.append(np.asarray(observation).tobytes())
        assert len(set(tasks)) == 4
        runs.append((tasks, starts))
    assert runs[0] == runs[1]


def test_family_of_others_may_be_wrapped_and_one_without_tasks_is_refused() -> None:
    env = SampleTaskOnReset(gymnasium.wrappers.TimeLimit(WalkEnv(), 3))
    env.reset(seed=0)
    assert env.task
    with pytest.raises(TypeError, match="NoTaskEnv is not a task family: it lacks sample_tasks"):
        SampleTaskOnReset(NoTaskEnv())
    with pytest.raises(TypeError, match=r"has no tasks for its slots.*wrap each of its environments"):
        SampleTaskOnResetVector(gymnasium.vector.SyncVectorEnv([NoTaskEnv]))
    same_step = gymnasium.make_vec("2DNavigation-v0", num_envs=2, autoreset_mode="SameStep")
    with pytest.raises(ValueError, match="keep their task; use NextStep"):
        SampleTaskOnResetVector(same_step)


@pytest.mark.parametrize("env_id", FAMILIES)
def test_slots_get_a_new_task_when_they_are_reset_and_keep_it_until_then(env_id: str) -> None:
    runs = []
    for _ in range(2):
        env = SampleTaskOnResetVector(gymnasium.make_vec(env_id, num_envs=3, max_episode_steps=4))
        env.action_space.seed(0)
        env.reset(seed=5)
        history, rewards = [[values(task) for task in env.tasks]], []
        ends: list[Any] = []
        env.reset(options={"reset_mask": np.array([False, True, False])})
        history.append([values(task) for task in env.tasks])
        for _ in range(12):
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            rewards.append(reward.tolist())
            ends.append(terminated | truncated)
            history.append([values(task) for task in env.tasks])
        runs.append((history, rewards))
        # The masked reset, and the step after the end of each episode, changed the task; nothing else did.
        assert [a != b for a, b in zip(history[0], history[1], strict=True)] == [False, True, False]
        assert sum(ends[:-1])[0] >= 2
        for slot in range(3):
            assert len({row[slot] for row in history[1:]}) == 1 + sum(ended[slot] for ended in ends[:-1])
        env.close()
    assert runs[0] == runs[1]


def test_a_batch_without_autoreset_changes_tasks_by_reset_only() -> None:
    env = SampleTaskOnResetVector(make_vector_env("2DNavigation-v0", num_envs=2, max_episode_steps=2))
    env.reset(seed=0)
    before = [values(task) for task in env.tasks]
    for _ in range(4):
        env.step(np.zeros((2, 2), np.float32))
    assert [values(task) for task in env.tasks] == before
    env.reset()
    assert [values(task) for task in env.tasks] != before


def test_family_that_passes_its_own_seed_on_gets_new_tasks_in_every_episode() -> None:
    class PassesALevelOn(WalkEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return super().reset(seed=3, options=options)

    def drawn(seed: int) -> list[float]:
        env = SampleTaskOnReset(PassesALevelOn())
        return [env.reset(seed=seed if episode == 0 else None)[1]["task"]["slope"] for episode in range(4)]

    assert len({*drawn(0), *drawn(1)}) == 8
    assert drawn(0) == drawn(0)


class DrawsIntoOneArray(Navigation2DVectorEnv):
    """Draws every goal into the same array, and moves those that it is given."""

    drawn = np.zeros(2)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[dict[str, Any]]:
        self.drawn[:] = random.uniform(size=2)
        return [{"goal": self.drawn}] * num_tasks

    def reset_task(self, tasks: Any) -> None:
        super().reset_task(tasks)
        for task in tasks:
            task["goal"] += 5.0


def test_tasks_of_slots_are_copies_that_no_family_changes() -> None:
    env = SampleTaskOnResetVector(DrawsIntoOneArray(2))
    env.reset(seed=0)
    assert env.tasks[0]["goal"] is not env.tasks[1]["goal"]
    assert all((np.abs(task["goal"]) <= 1.0).all() for task in env.tasks)
    single = gymnasium.Wrapper(WalkEnv())
    single.sample_tasks = lambda num_tasks: []
    with pytest.raises(TaskError, match=r"sample_tasks\(1\) of .* returned 0 tasks"):
        SampleTaskOnReset(single).reset(seed=0)
