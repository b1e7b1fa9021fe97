"""PopulationEvaluator: the returns of each member's own episodes, in every placement."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_env import FaultyEnv
from numpy.typing import NDArray

from maml_rl import MultiTaskSampler, PopulationEvaluator
from maml_rl.config.placement import Placement
from maml_rl.envs import make_vector_env
from maml_rl.errors import ChildEnvError, NonFiniteError, TaskError
from maml_rl.policies import NormalMLPPolicy, Policy
from maml_rl.seeding import PhaseStreams

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.slow, pytest.mark.timeout(60)]

HORIZON = 5
GOAL = {"goal": [0.3, -0.2]}
# Forked children share the torch of this process, and so start at once.
FORK: dict[str, Any] = {"start_method": "fork"}


def navigator() -> NormalMLPPolicy:
    return NormalMLPPolicy(2, 2, (4,), "tanh", seed=1)


def members(policy: Policy, count: int, seed: int = 0) -> NDArray[np.float64]:
    size = sum(param.numel() for param in policy.parameters())
    return np.random.default_rng(seed).normal(0.0, 0.3, (count, size))


def make_evaluator(num_workers: int = 0, policy: Policy | None = None, **options: Any) -> PopulationEvaluator:
    settings = {"seed": 3, "task": GOAL, "max_episode_steps": HORIZON, **(FORK if num_workers else {}), **options}
    return PopulationEvaluator("2DNavigation-v0", policy or navigator(), num_workers, **settings)


SMALL = NormalMLPPolicy(2, 1, (3,), "tanh")


def make_local(num_workers: int, fault: str = "", marker: str = "", **options: Any) -> PopulationEvaluator:
    env = partial(FaultyEnv, fault, 0, marker) if fault else FaultyEnv
    return PopulationEvaluator(env, SMALL, num_workers, seed=1, max_episode_steps=HORIZON, **FORK, **options)


def generations(evaluator: PopulationEvaluator, weights: Any, count: int = 2) -> list[list[float]]:
    with evaluator:
        return [evaluator.evaluate(weights).tolist() for _ in range(count)]


# The return of a member.


def test_return_of_each_member_is_that_of_its_weights_stepped_by_hand() -> None:
    policy, episodes = navigator(), 3
    weights = members(policy, 4)
    with make_evaluator(policy=policy, episodes=episodes) as evaluator:
        found = [evaluator.evaluate(weights) for _ in range(2)]
    env = make_vector_env("2DNavigation-v0", {}, 1, max_episode_steps=HORIZON)
    expected = np.zeros((2, 4, episodes))
    for generation, member, episode in np.ndindex(expected.shape):
        streams = PhaseStreams(3, generation, 0, first_task=member, population=True)
        torch.nn.utils.vector_to_parameters(torch.tensor(weights[member]).float(), policy.parameters())
        env.reset_task([GOAL])
        observations, _ = env.reset(seed=int(streams.episode_seeds(1, range(episode, episode + 1))[0, 0]))
        noise = streams.action_noise("normal", 1, range(episode, episode + 1), range(HORIZON), 2)[:, 0]
        for step in range(HORIZON):
            with torch.no_grad():
                actions = policy.act(torch.from_numpy(observations), torch.from_numpy(noise[step]))[0].numpy()
            observations, rewards, *_ = env.step(actions)
            expected[generation, member, episode] += rewards[0]
    env.close()
    np.testing.assert_allclose(found, expected.mean(2), rtol=1e-5)


# The same in every placement.


def test_returns_do_not_depend_on_the_number_of_workers() -> None:
    weights = members(navigator(), 5)
    found = [generations(make_evaluator(num_workers, episodes=2), weights) for num_workers in (0, 2)]
    assert found[0] == found[1]


def test_evaluator_takes_a_whole_placement() -> None:
    placement = Placement(num_workers=2, inference="central")
    with PopulationEvaluator("2DNavigation-v0", navigator(), placement=placement) as made:
        assert (made._sampler.placement.workers, made._sampler.placement.inference) == (2, "central")


def test_members_with_common_noise_differ_only_by_their_weights() -> None:
    weights = np.repeat(members(navigator(), 2), [4, 1], axis=0)
    common: dict[str, Any] = {"common_noise": True, "episodes": 3}
    first, second = generations(make_evaluator(2, **common), weights)
    for returns in (first, second):
        assert len(set(returns[:4])) == 1
        assert returns[4] != returns[0]
    assert first[0] != second[0]
    # All members have the noise of the first.
    assert first[0] == generations(make_evaluator(episodes=3), weights, 1)[0][0]


def test_resumed_search_gets_the_tasks_of_an_undisturbed_one() -> None:
    weights = members(navigator(), 2)

    def search(evaluator: PopulationEvaluator, generations: int) -> list[Any]:
        found = []
        for _ in range(generations):
            tasks = evaluator.sample_tasks(1) + evaluator.sample_tasks(1)
            found.append((*(tuple(task["goal"]) for task in tasks), *evaluator.evaluate(weights, tasks)))
        return found

    with make_evaluator() as evaluator:
        undisturbed = search(evaluator, 4)
    with make_evaluator() as evaluator:
        evaluator.generation = 2
        assert search(evaluator, 2) == undisturbed[2:]
        assert evaluator.generation == 4
    assert len({goal for generation in undisturbed for goal in generation[:2]}) == 8


def test_population_shares_no_stream_with_training_or_evaluation() -> None:
    settings: dict[str, Any] = {"batch_size": 2, "seed": 3, "num_workers": 0, "max_episode_steps": HORIZON}
    policy = navigator()
    with (
        MultiTaskSampler("2DNavigation-v0", policy=policy, **settings) as training,
        MultiTaskSampler("2DNavigation-v0", policy=policy, evaluation=True, **settings) as evaluation,
        make_evaluator(episodes=2) as evaluator,
    ):
        drawn = [{tuple(task["goal"]) for task in each.sample_tasks(20)} for each in (training, evaluation, evaluator)]
    assert len(set.union(*drawn)) == 60


# Tasks.


def test_drawn_task_depends_only_on_the_seed() -> None:
    weights = members(navigator(), 2)
    # A list of vectors is like an array.
    first = generations(make_evaluator(task=None), list(weights))
    with make_evaluator(task=None) as evaluator:
        evaluator.sample_tasks(4)
        assert evaluator.evaluate(weights).tolist() == first[0]
    assert first[0] != generations(make_evaluator(task=None, seed=4), weights)[0]


def test_each_member_may_have_a_task_of_its_own() -> None:
    weights = members(navigator(), 3)
    with make_evaluator(2, episodes=2) as evaluator:
        tasks = evaluator.sample_tasks(3)
        together = evaluator.evaluate(weights, tasks)
    for number, task in enumerate(tasks):
        (alone,) = generations(make_evaluator(episodes=2, task=task), weights, 1)
        assert alone[number] == together[number]


# Weights.


def test_weights_can_be_taken_from_a_policy_and_put_into_one() -> None:
    policy = navigator()
    with make_evaluator(policy=policy) as evaluator:
        before = evaluator.policy_weights()
        assert before.shape == (evaluator.size,)
        assert torch.equal(
            torch.from_numpy(before).float(), torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
        )
        evaluator.set_policy_weights(before + 1.0)
        np.testing.assert_allclose(evaluator.policy_weights(), before + 1.0, rtol=1e-6)
        evaluator.evaluate(members(policy, 2))
        np.testing.assert_allclose(evaluator.policy_weights(), before + 1.0, rtol=1e-6)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_members_that_are_not_finite_have_a_return_of_nan_and_the_others_their_own(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    weights = members(SMALL, 5)
    (undisturbed,) = generations(make_local(num_workers), weights, 1)
    weights[1, 0], weights[[2, 4]] = np.nan, 1e6
    (returns,) = generations(make_local(num_workers), weights, 1)
    assert np.isnan(returns).tolist() == [False, True, True, False, True]
    assert [returns[member] for member in (0, 3)] == [undisturbed[member] for member in (0, 3)]
    told = [message for message in caplog.messages if "is NaN" in message]
    assert [f"of member {member} of generation 0 is" in told[row] for row, member in enumerate((1, 2, 4))] == [True] * 3
    assert told[0].endswith("its weights are not finite as torch.float32")
    assert "the action of task" in told[1]


def test_weights_that_are_not_finite_are_not_given_to_the_policy() -> None:
    with make_evaluator() as evaluator, pytest.raises(ValueError, match="the weights are not finite as"):
        evaluator.set_policy_weights(np.full(24, 1e300))


# Environments and their faults.


def test_fault_is_reported_and_the_generation_can_be_repeated(tmp_path: Path) -> None:
    weights = members(SMALL, 3)
    with make_local(2, "raise", str(tmp_path / "marker")) as evaluator:
        with pytest.raises(ChildEnvError):
            evaluator.evaluate(weights)
        assert evaluator.generation == 0
        assert evaluator.evaluate(weights).tolist() == generations(make_local(0), weights)[0]


def test_own_weights_that_are_not_finite_either_are_an_error() -> None:
    policy = navigator()
    torch.nn.init.constant_(policy.sigma, np.inf)
    with make_evaluator(policy=policy) as evaluator:
        with pytest.raises(NonFiniteError, match="the action of task 0"):
            evaluator.evaluate(np.full((2, 24), np.nan))
        assert evaluator.generation == 0


# Bad input.


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros((3, 7)), r"expected weights of the shape \(P, 24\), .* got the shape \(3, 7\)"),
        (np.zeros((0, 24)), r"got the shape \(0, 24\)"),
        ([np.zeros(24), np.zeros(23)], r"expected weights of the shape \(P, 24\)"),
        ([["a"] * 24], r"expected weights of the shape \(P, 24\)"),
    ],
)
def test_weights_of_a_wrong_shape_are_refused_before_any_child_starts(weights: Any, message: str) -> None:
    with make_evaluator(2) as evaluator:
        assert evaluator.size == 24
        with pytest.raises(ValueError, match=message):
            evaluator.evaluate(weights)
        assert evaluator.pids == []


def test_tasks_that_do_not_fit_are_refused() -> None:
    with make_evaluator() as evaluator:
        with pytest.raises(ValueError, match="expected one task for each of the 2 members, got 1"):
            evaluator.evaluate(members(navigator(), 2), [GOAL])
        with pytest.raises(TaskError, match="'direction'"):
            evaluator.evaluate(members(navigator(), 1), [{"direction": 1.0}])
