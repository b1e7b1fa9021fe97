"""MultiTaskSampler: the same episodes in every placement, and MAML's inner loop in one call."""

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import LinearFeatureBaseline, MultiTaskSampler, adapt, get_policy_for_env
from maml_rl.baseline import make_baseline
from maml_rl.errors import TaskError
from maml_rl.policies import NormalMLPPolicy, Policy
from tests.envs.third_party import SplitEnv

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.slow, pytest.mark.timeout(120)]


@cache
def digests(env_name: str, **options: Any) -> list[str]:
    """Sample two iterations of two phases, the second with separate parameters for every task."""
    spaces = MultiTaskSampler.spaces(env_name)
    policy, baseline = get_policy_for_env(spaces, (8,), "tanh"), make_baseline("linear", spaces.observation_space)
    # An odd number of slots.
    settings = {"batch_size": 3, "seed": 0, "num_workers": 0, "max_episode_steps": 7, **options}
    with MultiTaskSampler(env_name, {}, policy=policy, baseline=baseline, **settings) as sampler:
        found = []
        for _ in range(2):
            train, valid = sampler.sample(sampler.sample_tasks(5), num_steps=1, fast_lr=0.5)
            found += [train[0].digest(), valid.digest()]
    assert len(set(found)) == len(found)
    return found


@pytest.fixture
def policy() -> NormalMLPPolicy:
    return NormalMLPPolicy(2, 2, (8,), "tanh")


@pytest.fixture
def sampler(policy: Policy) -> Iterator[MultiTaskSampler]:
    with make_sampler(policy) as sampler:
        yield sampler


def make_sampler(policy: Policy, env_name: Any = "2DNavigation-v0", **options: Any) -> MultiTaskSampler:
    settings = {"batch_size": 3, "seed": 0, "num_workers": 0, "max_episode_steps": 7, **options}
    return MultiTaskSampler(env_name, {}, policy=policy, baseline=LinearFeatureBaseline(policy.input_size), **settings)


# `work/child/test_child_backend.py` has the start method "spawn".
@pytest.mark.parametrize(
    ("env_name", "options"),
    [
        *(("HalfCheetahVel-v5", {"num_workers": number}) for number in (1, 3)),
        ("TabularMDP-v0", {"num_workers": 20}),
        ("TabularMDP-v0", {"num_workers": 3, "inference": "central"}),
        ("TabularMDP-v0", {"num_workers": 5, "num_groups": 3}),
        ("HalfCheetahVel-v5", {"num_workers": 2, "start_method": "forkserver"}),
    ],
    ids=str,
)
def test_episodes_are_bit_identical_with_any_workers(env_name: str, options: dict[str, Any]) -> None:
    assert digests(env_name, **options) == digests(env_name)


def test_episodes_of_every_slot_are_correct_however_late_children_answer() -> None:
    with make_sampler(NormalMLPPolicy(2, 2, (8,), "tanh"), num_workers=4, recv_timeout=0.0) as sampler:
        tasks = sampler.sample_tasks(6)
        episodes = sampler.rollout(tasks)
        sampler.seek(0)
        again = sampler.rollout(tasks)
    moves = np.clip(episodes.actions.numpy(), -0.1, 0.1).cumsum(1)
    np.testing.assert_allclose(episodes.observations[:, 1:], moves[:, :-1], atol=1e-6)
    goals = np.array([task["goal"] for task in tasks])[:, None, None]
    np.testing.assert_allclose(episodes.rewards, -np.linalg.norm(moves - goals, axis=-1), atol=1e-5)
    np.testing.assert_allclose(episodes.actions, again.actions, atol=1e-5)


def test_seed_zero_is_a_seed_and_another_seed_gives_other_episodes(policy: NormalMLPPolicy) -> None:
    found = [digests.__wrapped__("2DNavigation-v0", seed=seed) for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


def test_rollout_trials_needs_one_slot_for_each_task(policy: NormalMLPPolicy) -> None:
    found = []
    for method in ("rollout", "rollout_trials"):
        with make_sampler(policy, slots_per_task=1) as sampler:
            found.append(getattr(sampler, method)(sampler.sample_tasks(2)).digest())
    assert found[0] == found[1]
    with make_sampler(policy) as sampler, pytest.raises(ValueError, match="slots_per_task=1"):
        sampler.rollout_trials(sampler.sample_tasks(2))


def test_without_a_seed_every_sampler_draws_its_own(policy: NormalMLPPolicy) -> None:
    with make_sampler(policy, seed=None) as first, make_sampler(policy, seed=None) as second:
        assert first.seed != second.seed


def test_evaluation_never_sees_the_tasks_of_training(policy: NormalMLPPolicy) -> None:
    with make_sampler(policy) as training, make_sampler(policy, evaluation=True) as evaluation:
        goals = [{tuple(task["goal"]) for task in each.sample_tasks(50)} for each in (training, evaluation)]
    assert not goals[0] & goals[1]


def test_evaluation_draws_the_test_tasks_of_a_family_that_has_them() -> None:
    drawn = []
    validation = {"evaluation": True, "task_split": "validation"}
    for options in ({}, validation, {"evaluation": True}, {"evaluation": True, "num_workers": 2}):
        with make_sampler(NormalMLPPolicy(2, 1, (8,), "tanh"), SplitEnv, **options) as sampler:
            drawn.append(sampler.sample_tasks(20))
    *others, test, test_of_workers = drawn
    for tasks in others:
        assert max(task["slope"] for task in tasks) <= 1.0 < 2.0 <= min(task["slope"] for task in test)
    assert others[0] != others[1]
    assert test_of_workers == test


def test_seek_continues_like_an_undisturbed_run(policy: NormalMLPPolicy) -> None:
    with make_sampler(policy) as sampler:
        undisturbed = [sampler.rollout(sampler.sample_tasks(2)).digest() for _ in range(4)]
    with make_sampler(policy) as sampler:
        sampler.seek(1)
        resumed = [sampler.rollout(sampler.sample_tasks(2)).digest() for _ in range(2)]
    assert resumed == undisturbed[2:]


def test_sample_is_the_same_as_rollouts_and_adapt(sampler: MultiTaskSampler, policy: NormalMLPPolicy) -> None:
    tasks = sampler.sample_tasks(4)
    train, valid = sampler.sample(tasks, num_steps=2, fast_lr=(0.5, 0.25), gamma=0.99, gae_lambda=0.9)
    sampler.seek(0)
    params = None
    for step, step_size in enumerate((0.5, 0.25)):
        episodes = sampler.rollout(tasks, params)
        assert episodes.digest() == train[step].digest()
        assert train[step].fast_lr == step_size
        episodes.compute_advantages(sampler.baseline, gamma=0.99, gae_lambda=0.9)
        params = adapt(policy, episodes, params, step_size=step_size, create_graph=False)
    assert sampler.rollout(tasks, params).digest() == valid.digest()


def test_sample_wait_returns_what_sample_does_and_env_has_the_spaces(policy: NormalMLPPolicy) -> None:
    arguments = {"num_steps": 1, "fast_lr": 0.1}
    with make_sampler(policy) as waited, make_sampler(policy) as direct:
        futures = waited.sample_async(waited.sample_tasks(2), **arguments)
        train, valid = waited.sample_wait(futures)
        expected_train, expected_valid = direct.sample(direct.sample_tasks(2), **arguments)
        made = get_policy_for_env(waited.env, hidden_sizes=(4,))
    assert [train[0].digest(), valid.digest()] == [expected_train[0].digest(), expected_valid.digest()]
    assert (made.input_size, made.output_size) == (2, 2)


@pytest.mark.parametrize(
    ("options", "deterministic"),
    [
        ({}, False),
        ({}, True),
        ({"backend": "device"}, False),
        ({"num_workers": 2}, False),
        ({"num_workers": 2, "inference": "central"}, True),
    ],
)
def test_policy_that_replaces_another_acts_from_the_next_phase_on(options: dict[str, Any], deterministic: bool) -> None:
    policies = [NormalMLPPolicy(2, 2, (8,), "tanh"), NormalMLPPolicy(2, 2, (8,), "relu"), NormalMLPPolicy(2, 2, (4,))]
    expected = []
    for policy in policies:
        with torch.no_grad():
            # Without biases the most probable actions of all are zero at the origin.
            for param in policy.parameters():
                param += 0.1
        with make_sampler(policy, **options) as sampler:
            expected.append(sampler.rollout(sampler.sample_tasks(4), deterministic=deterministic).digest())
    assert len(set(expected)) == 3
    with make_sampler(policies[0], **options) as sampler:
        tasks = sampler.sample_tasks(4)
        for which in (0, 1, 2, 0):
            sampler.policy = policies[which]
            sampler.seek(0)
            assert sampler.rollout(tasks, deterministic=deterministic).digest() == expected[which]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_another_number_of_tasks_needs_no_new_sampler(policy: NormalMLPPolicy, num_workers: int) -> None:
    with make_sampler(policy, num_workers=num_workers) as sampler:
        assert [len(sampler.rollout(sampler.sample_tasks(count))) for count in (1, 4, 2)] == [1, 4, 2]


def test_threads_and_their_number_are_left_as_they_were(policy: NormalMLPPolicy) -> None:
    before = threading.active_count(), torch.get_num_threads()
    with make_sampler(policy, num_workers=2) as sampler:
        sampler.sample(sampler.sample_tasks(2), num_steps=1, fast_lr=0.1)
    assert (threading.active_count(), torch.get_num_threads()) == before


def test_closed_sampler_is_a_clear_error(sampler: MultiTaskSampler) -> None:
    sampler.close()
    sampler.close()
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        sampler.sample_tasks(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"max_episode_steps": 0}, "max_episode_steps must be an integer of at least 1"),
        ({"slots_per_task": 2}, "slots_per_task must divide batch_size, got 2 and 3"),
        ({"seed": 2**32}, "a seed must be an integer"),
        ({"max_restart": 2}, "no argument 'max_restart'; did you mean 'max_restarts'"),
    ],
)
def test_wrong_argument_is_named(policy: NormalMLPPolicy, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError if "max_restart" in options else ValueError, match=message):
        make_sampler(policy, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_task_of_another_family_is_refused_by_name(policy: NormalMLPPolicy, num_workers: int) -> None:
    with make_sampler(policy, num_workers=num_workers) as sampler:
        # Its slots are in several workers, and the task is named once.
        with pytest.raises(TaskError, match=r"^task 0: unknown entry 'direction' of a task; expected \['goal'\]$"):
            sampler.rollout([{"direction": 1.0}])
        assert len(sampler.rollout([{"goal": [0.1, 0.2]}])) == 1
