import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import maml_rl
from maml_rl.config import Config
from maml_rl.errors import ConfigError, TaskError
from maml_rl.experiment.train import train
from maml_rl.policies import CategoricalMLPPolicy, NormalMLPPolicy
from maml_rl.runs.checkpoint import latest_intact

SETTINGS = {
    "env-name": "2DNavigation-v0",
    "env-kwargs": {"low": -0.4},
    "max-episode-steps": 8,
    "hidden-sizes": [6],
    "fast-batch-size": 5,
    "fast-lr": 0.3,
    "gamma": 0.9,
    "meta-batch-size": 2,
    "num-batches": 2,
    "cg-iters": 2,
    "checkpoint-every": 1,
}
GOAL = {"goal": [0.3, -0.2]}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not write to it."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    train(Config.model_validate(SETTINGS), folder, num_workers=0)
    return folder


def parameters(policy: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in policy.named_parameters()}


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def test_oracle_is_loaded_and_not_adapted(tmp_path: Path) -> None:
    config = Config.model_validate({**SETTINGS, "method": "oracle", "num-batches": 1})
    train(config, tmp_path / "run", num_workers=0)
    policy = maml_rl.load_policy(tmp_path / "run")
    # It observes the goal, too.
    assert np.shape(policy.choose(np.zeros(4))[0]) == (2,)
    with pytest.raises(ConfigError, match="an oracle, which observes its task and needs no adaptation"):
        maml_rl.adapt_to_task(policy, "2DNavigation-v0", GOAL)


def test_adapted_policy_agrees_with_the_sampler_and_plain_gradient_steps(run_folder: Path) -> None:
    policy = maml_rl.load_policy(run_folder)
    adapted = maml_rl.adapt_to_task(policy, "2DNavigation-v0", GOAL, num_steps=2, seed=7)
    mirror = maml_rl.load_policy(run_folder)
    baseline = maml_rl.LinearFeatureBaseline(2)
    with maml_rl.MultiTaskSampler(
        "2DNavigation-v0", {"low": -0.4}, 5, mirror, seed=7, num_workers=0, max_episode_steps=8, evaluation=True
    ) as sampler:
        for _ in range(2):
            episodes = sampler.rollout([GOAL])
            episodes.compute_advantages(baseline, gamma=0.9, gae_lambda=1.0)
            loss = -(mirror.log_prob(episodes.observations, episodes.actions) * episodes.advantages).sum()
            gradients = torch.autograd.grad(loss / episodes.mask.sum(), list(mirror.parameters()))
            with torch.no_grad():
                for param, gradient in zip(mirror.parameters(), gradients, strict=True):
                    param -= 0.3 * gradient
    for name, array in parameters(adapted).items():
        np.testing.assert_allclose(array, parameters(mirror)[name], rtol=1e-4, atol=1e-6)


def test_adaptation_leaves_the_policy_as_it_was_and_repeats(run_folder: Path) -> None:
    policy = maml_rl.load_policy(run_folder)
    before = parameters(policy)
    _, saved = latest_intact(run_folder / "checkpoints")
    assert_same(before, {name: tensor.numpy() for name, tensor in saved.tensors.items()})
    assert policy.trained_with is not None
    assert policy.trained_with.fast_lr == 0.3
    first, again = (maml_rl.adapt_to_task(policy, "2DNavigation-v0", GOAL) for _ in range(2))
    assert_same(parameters(policy), before)
    assert_same(parameters(first), parameters(again))
    assert (parameters(first)["mu.bias"] != before["mu.bias"]).any()
    copy = maml_rl.adapt_to_task(policy, "2DNavigation-v0", GOAL, num_steps=0)
    assert copy is not policy
    assert_same(parameters(copy), before)
    assert first.trained_with == policy.trained_with
    assert pickle.loads(pickle.dumps(policy)).trained_with is None, "a worker needs no learner"


def test_adaptation_raises_the_return_in_its_task() -> None:
    policy = CategoricalMLPPolicy(1, 5, [])
    task = {"mean": [0.0, 0.0, 1.0, 0.0, 0.0]}
    adapted = maml_rl.adapt_to_task(policy, "Bandit-K5-v0", task, 5, step_size=5.0, num_episodes=50)
    assert adapted.choose([0.0])[0] == 2
    assert adapted(torch.zeros(1)).probs[2] > 0.9


def test_task_and_policy_of_another_family_are_refused(run_folder: Path) -> None:
    with pytest.raises(TaskError, match="goal"):
        maml_rl.adapt_to_task(maml_rl.load_policy(run_folder), "2DNavigation-v0", {"velocity": 1.0})
    with pytest.raises(ValueError, match=r"observations of shape \(2,\).*HalfCheetahDir-v5 has.*\(20,\)"):
        maml_rl.adapt_to_task(maml_rl.load_policy(run_folder), "HalfCheetahDir-v5", {"direction": 1})


def test_drawn_actions_follow_the_distribution_and_the_generator() -> None:
    policy = NormalMLPPolicy(2, 1, [], init_std=0.5)
    rng = np.random.default_rng(0)
    actions = np.array([policy.choose([1.0, 2.0], rng=rng)[0] for _ in range(2_000)])
    mean = policy(torch.tensor([1.0, 2.0])).mean.item()
    assert actions.mean() == pytest.approx(mean, abs=0.04)
    assert actions.std() == pytest.approx(0.5, abs=0.03)
    assert policy.choose([1.0, 2.0], rng=np.random.default_rng(0))[0] == actions[0]
