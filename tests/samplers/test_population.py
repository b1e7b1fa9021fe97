"""PopulationEvaluator: the returns of each member's own episodes, in every placement."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
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


class LocalEnv(gymnasium.Env[Any, Any]):
    """Rewards actions near the task's `aim`; holds an object that cannot be pickled, and may have one fault."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, fault: str = "", marker: str = "") -> None:
        self._lock, self._fault, self._marker, self._aim = threading.Lock(), fault, Path(marker), 0.0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, float]]:
        return [{"aim": float(aim)} for aim in self.np_random.uniform(-1.0, 1.0, num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self._aim = task["aim"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._fault and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("out of fuel")
        reward = np.nan if self._fault == "nan" else -abs(float(action[0]) - self._aim)
        return np.zeros(1, np.float32), reward, False, False, {}


def navigator() -> NormalMLPPolicy:
    return NormalMLPPolicy(2, 2, (4,), "tanh", seed=1)


def members(policy: Policy, count: int, seed: int = 0) -> NDArray[np.float64]:
    size = sum(param.numel() for param in policy.parameters())
    return np.random.default_rng(seed).normal(0.0, 0.3, (count, size))


def make_evaluator(num_workers: int = 0, policy: Policy | None = None, **options: Any) -> PopulationEvaluator:
    settings = {"seed": 3, "task": GOAL, "max_episode_steps": HORIZON, **(FORK if num_workers else {}), **options}
    return PopulationEvaluator("2DNavigation-v0", policy or navigator(), num_workers, **settings)


def make_local(num_workers: int, fault: str = "", marker: str = "", **options: Any) -> PopulationEvaluator:
    env = partial(LocalEnv, fault, marker) if fault else LocalEnv
    return PopulationEvaluator(
        env, NormalMLPPolicy(1, 1, (3,), "tanh"), num_workers, seed=1, max_episode_steps=HORIZON, **FORK, **options
    )


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
    found = [generations(make_evaluator(num_workers, episodes=2), weights) for num_workers in (0, 2, 9)]
    assert all(other == found[0] for other in found[1:])


def test_placement_is_taken_as_a_whole() -> None:
    weights, whole = members(navigator(), 2), Placement(num_workers=2, start_method="fork", inference="central")
    evaluator = PopulationEvaluator("2DNavigation-v0", navigator(), placement=whole, max_episode_steps=HORIZON)
    given = evaluator._sampler.placement
    assert (given.workers, given.start_method, given.inference) == (2, "fork", "central")
    plain = PopulationEvaluator("2DNavigation-v0", navigator(), 0, max_episode_steps=HORIZON)
    assert generations(evaluator, weights) == generations(plain, weights)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_members_with_common_noise_differ_only_by_their_weights(num_workers: int) -> None:
    weights = np.repeat(members(navigator(), 2), [4, 1], axis=0)
    common: dict[str, Any] = {"common_noise": True, "episodes": 3}
    first, second = generations(make_evaluator(num_workers, **common), weights)
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


def test_all_members_have_the_given_task() -> None:
    assert next(iter(dict(navigator().named_parameters()))) == "sigma"
    still = np.zeros_like(members(navigator(), 3))
    still[:, :2] = -20.0
    (returns,) = generations(make_evaluator(), still, 1)
    np.testing.assert_allclose(returns, -HORIZON * np.hypot(*GOAL["goal"]), rtol=1e-4)


def test_drawn_task_depends_only_on_the_seed() -> None:
    weights = members(navigator(), 2)
    first = generations(make_evaluator(task=None), weights)
    with make_evaluator(task=None) as evaluator:
        evaluator.sample_tasks(4)
        assert evaluator.evaluate(weights).tolist() == first[0]
    assert first[0] != generations(make_evaluator(task=None, seed=4), weights)[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_member_may_have_a_task_of_its_own(num_workers: int) -> None:
    weights = members(navigator(), 3)
    with make_evaluator(num_workers, episodes=2) as evaluator:
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


def test_list_of_vectors_is_accepted_like_an_array() -> None:
    weights = members(navigator(), 3)
    assert generations(make_evaluator(), list(weights)) == generations(make_evaluator(), weights)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_members_that_are_not_finite_have_a_return_of_nan_and_the_others_their_own(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    weights = np.random.default_rng(0).normal(size=(5, 11))
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


@pytest.mark.parametrize(("fault", "error"), [("raise", ChildEnvError), ("nan", NonFiniteError)])
def test_fault_is_reported_and_the_generation_can_be_repeated(
    fault: str, error: type[Exception], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    if fault == "nan":
        marker.touch()
    weights = np.random.default_rng(0).normal(size=(3, 11))
    with make_local(2, fault, str(marker)) as evaluator:
        with pytest.raises(error):
            evaluator.evaluate(weights)
        assert evaluator.generation == 0
        if fault != "nan":
            assert evaluator.evaluate(weights).tolist() == generations(make_local(0), weights)[0]


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
