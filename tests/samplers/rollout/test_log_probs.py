"""Log-probabilities that are recorded while sampling, compared with those computed from the noise."""

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs import make_vector_env
from maml_rl.policies import NormalMLPPolicy
from maml_rl.seeding import PhaseStreams

pytestmark = pytest.mark.timeout(120)

CHILDREN = {"num_workers": 2, "inference": "worker", "start_method": "fork"}


@pytest.mark.parametrize("options", [{"num_workers": 0}, CHILDREN], ids=["central", "worker"])
def test_recorded_gaussian_log_probabilities_are_those_of_the_noise(options: dict[str, Any]) -> None:
    policy = NormalMLPPolicy(2, 2, (8,), "tanh")
    params = {name: value.detach().clone() for name, value in policy.stack_parameters(3).items()}
    params["sigma"] += torch.tensor([[0.0], [0.5], [-1.0]])
    settings = {"seed": 0, "max_episode_steps": 5, "record_log_probs": True, **options}
    with MultiTaskSampler("2DNavigation-v0", {}, 4, policy, **settings) as sampler:
        episodes = sampler.rollout(sampler.sample_tasks(3), params)
    noise = PhaseStreams(0, 0, 0).action_noise("normal", 3, range(4), range(5), 2)
    log_density = -0.5 * noise**2 - params["sigma"].numpy()[:, None] - 0.5 * math.log(2.0 * math.pi)
    expected = np.moveaxis(log_density.sum(-1), 0, 1)[:, : episodes.rewards.shape[1]]
    assert episodes.log_probs is not None
    np.testing.assert_allclose(episodes.log_probs, expected * episodes.mask.numpy(), atol=2e-5)


def test_recorded_categorical_log_probabilities_are_those_of_the_actions() -> None:
    with closing(make_vector_env("TabularMDP-v0")) as env:
        policy = get_policy_for_env(env, (8,), "tanh")
    settings: dict[str, Any] = {"seed": 0, "num_workers": 0, "record_log_probs": True}
    with MultiTaskSampler("TabularMDP-v0", {}, 4, policy, **settings) as sampler:
        episodes = sampler.rollout(sampler.sample_tasks(3))
    with torch.no_grad():
        probabilities = policy(episodes.observations).probs
    chosen = probabilities.gather(-1, episodes.actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(episodes.log_probs, chosen.log())


def test_log_probabilities_are_zero_past_the_end_of_an_episode() -> None:
    policy = NormalMLPPolicy(2, 2, (8,), "tanh")
    settings: dict[str, Any] = {"seed": 0, "num_workers": 0, "record_log_probs": True, "max_episode_steps": 50}
    with MultiTaskSampler("2DNavigation-v0", {}, 20, policy, **settings) as sampler:
        # The goal is at most one step away, so that some episodes end early.
        episodes = sampler.rollout([{"goal": [0.1, 0.1]}])
    assert episodes.lengths.min() < episodes.lengths.max()
    assert ((episodes.log_probs != 0) == (episodes.mask != 0)).all()


def test_recording_changes_no_episode_and_is_off_by_default() -> None:
    policy = NormalMLPPolicy(2, 2, (8,), "tanh")
    found = []
    for record in (False, True):
        settings: dict[str, Any] = {"seed": 0, "num_workers": 0, "max_episode_steps": 5, "record_log_probs": record}
        with MultiTaskSampler("2DNavigation-v0", {}, 4, policy, **settings) as sampler:
            found.append(sampler.rollout(sampler.sample_tasks(3)))
    assert found[0].digest() == found[1].digest()
    assert found[0].log_probs is None
