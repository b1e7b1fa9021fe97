from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs import MetaVectorEnv, ObservedTask, make_vector_env
from maml_rl.errors import ChildEnvError, TaskError
from maml_rl.policies import get_policy_for_env
from maml_rl.samplers import MultiTaskSampler
from maml_rl.spaces import PackedSpace
from tests.envs.contract import assert_same_tasks, play, random_actions, same
from tests.envs.third_party import CellEnv, PixelEnv, WalkEnv, WordEnv

pytestmark = pytest.mark.usefixtures("forked_workers")


def numbers_of(task: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(task[name]) for name in sorted(task)])


@pytest.mark.parametrize("env_id", ["Bandit-K5-v0", "2DNavigation-v0", "PixelNavigation-v0", "HalfCheetahVel-v5"])
def test_task_follows_the_environments_own_observation(env_id: str, vector_env: MetaVectorEnv) -> None:
    if any(isinstance(value, str) for value in vector_env.sample_tasks(1, seed=0)[0].values()):
        with pytest.raises(TaskError, match="'env_name' of a task cannot be observed: expected numbers"):
            make_vector_env(ObservedTask(env_id))
        return
    shown = make_vector_env(ObservedTask(env_id), {}, 4)
    tasks = vector_env.sample_tasks(4, seed=3)
    assert_same_tasks(shown.sample_tasks(4, seed=3), tasks)
    vector_env.reset_task(tasks)
    shown.reset_task(tasks)
    own, seen = play(vector_env, 7), play(shown, 7)
    size = spaces.flatdim(vector_env.single_observation_space)
    for index, (array, observed) in enumerate(zip(own, seen, strict=True)):
        # Observations of the reset, then for each step observations, rewards, terminated, truncated.
        if index == 0 or index % 4 == 1:
            if array.ndim == 1:
                array = np.eye(size)[array]
            own_seen, after = observed[:, :size], observed[:, size:]
            if isinstance(shown.single_observation_space, PackedSpace):
                array, after = array.reshape(4, size), shown.single_observation_space.read(observed)[1]
            np.testing.assert_array_equal(own_seen, array)
            expected = np.array([numbers_of(task) for task in tasks], after.dtype)
            np.testing.assert_array_equal(after, expected)
            assert all(shown.single_observation_space.contains(row) for row in observed)
        else:
            np.testing.assert_array_equal(observed, array)
    shown.close()


@pytest.mark.parametrize(
    ("env", "low", "size", "dtype"),
    [(WalkEnv, -1.0, 3, np.float64), (PixelEnv, 0.0, 48 + 4, np.uint8), (CellEnv, 0.0, 6, np.float32)],
)
def test_third_party_environments_show_their_tasks(env: Any, low: float, size: int, dtype: Any) -> None:
    shown = make_vector_env(ObservedTask(env), {}, 2, max_episode_steps=3)
    shown.reset_task([{"slope": 0.25}, {"slope": -0.75}])
    observations, _ = shown.reset(seed=1)
    assert (observations.shape, observations.dtype) == ((2, size), dtype)
    size_of_task = 4 if env is PixelEnv else 1
    task = observations[:, -size_of_task:].copy().view(np.float32 if env is PixelEnv else dtype)
    assert task[:, 0].tolist() == [0.25, -0.75]
    assert shown.single_observation_space.low[0] == low
    plain = make_vector_env(env, {}, 2, max_episode_steps=3)
    plain.reset_task([{"slope": 0.25}, {"slope": -0.75}])
    own, _ = plain.reset(seed=1)
    if env is CellEnv:
        assert observations[:, :-1].argmax(1).tolist() == own.tolist()
        assert observations[:, :-1].sum() == 2
    else:
        np.testing.assert_array_equal(observations[:, :-size_of_task], own.reshape(2, -1))
    assert same(play(shown, 1, 3)[2::4], play(plain, 1, 3)[2::4])
    for env_ in (shown, plain):
        env_.close()


def test_a_finished_slot_keeps_its_final_observation_with_its_task() -> None:
    shown = make_vector_env(ObservedTask("2DNavigation-v0"), {}, 2, max_episode_steps=2)
    shown.reset_task([{"goal": [0.1, 0.2]}, {"goal": [0.3, 0.4]}])
    shown.reset(seed=0)
    for actions in random_actions(shown, 4):
        last = shown.step(actions)
    assert last[3].all()
    np.testing.assert_allclose(last[0][:, 2:], [[0.1, 0.2], [0.3, 0.4]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("env", ["HalfCheetahDir-v5", WalkEnv], ids=["batched", "serial"])
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_children_sample_the_same_episodes_as_this_process(env: Any, num_workers: int) -> None:
    digests = set()
    policy = get_policy_for_env(make_vector_env(ObservedTask(env)), (4,))
    for workers in (0, num_workers):
        with MultiTaskSampler(
            ObservedTask(env), {}, 2, policy, seed=3, num_workers=workers, max_episode_steps=4
        ) as sampler:
            tasks = sampler.sample_tasks(3)
            episodes = sampler.rollout(tasks)
            digests.add(episodes.digest())
            for task, shown in zip(tasks, episodes.observations[:, :, :, -1], strict=True):
                assert shown[0].tolist() == pytest.approx([float(numbers_of(task)[-1])] * 2)
    assert len(digests) == 1


def drawing(draw: Callable[[int], list[Any]]) -> type[WalkEnv]:
    return type("Draws", (WalkEnv,), {"sample_tasks": lambda self, num_tasks: draw(num_tasks)})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (WordEnv, r"entry 'slope' of a task cannot be observed: expected numbers, got 'steep'"),
        (drawing(lambda num_tasks: [1.0] * num_tasks), r"drew 1\.0; a task is a dict of numbers and arrays"),
        (drawing(lambda num_tasks: [{}] * num_tasks), r"a dict of numbers and arrays can be observed, got \{\}"),
    ],
)
def test_tasks_that_are_not_numbers_are_refused(env: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_vector_env(ObservedTask(env))


def test_tasks_of_different_sizes_are_refused() -> None:
    growing = drawing(lambda num_tasks: [{"slope": np.zeros(1 + index)} for index in range(num_tasks)])
    shown = make_vector_env(ObservedTask(growing), {}, 2)
    with pytest.raises(TaskError, match=r"^slot 1: .* the same shape in all tasks, \(1,\) in the first, got \(2,\)"):
        shown.reset_task(shown.sample_tasks(2))


@pytest.mark.slow
def test_errors_name_the_environment_whose_tasks_are_observed() -> None:
    with (
        pytest.raises(ChildEnvError, match=r"'HalfCheetahDir-v5' with observed tasks"),
        MultiTaskSampler(
            ObservedTask("HalfCheetahDir-v5"), {"bad": 1}, 1, get_policy_for_env(WalkEnv()), num_workers=1
        ) as sampler,
    ):
        sampler.sample_tasks(1)


def test_observed_task_is_a_constructor_of_one_slot() -> None:
    slot = ObservedTask("2DNavigation-v0")(low=-0.1, high=0.1)
    assert slot.num_envs == 1
    assert abs(slot.reset(seed=0)[0][0, 2:]).max() <= 0.1
