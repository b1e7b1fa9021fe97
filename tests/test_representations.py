"""Representations of a sampler, of episodes and of an evaluation: one line with sizes and returns."""

import numpy as np
import torch

from maml_rl import BatchEpisodes, MultiTaskSampler, TaskEpisodes, get_policy_for_env
from maml_rl.envs import make_vector_env
from maml_rl.results.evaluation import Evaluation


def sampled() -> TaskEpisodes:
    """Episodes of 2 tasks, 3 steps, 4 episodes; every reward is 2."""
    flags = torch.ones(2, 4, dtype=torch.bool)
    return TaskEpisodes(
        observations=torch.zeros(2, 3, 4, 1),
        actions=torch.zeros(2, 3, 4, 1),
        rewards=torch.full((2, 3, 4), 2.0),
        lengths=torch.full((2, 4), 3),
        terminated=flags,
        truncated=~flags,
        final_observations=torch.zeros(2, 4, 1),
    )


def test_episodes_show_their_sizes_and_mean_return() -> None:
    assert repr(sampled()) == "TaskEpisodes(M=2, T=3, B=4, mean return 6)"
    assert repr(sampled()[0]) == "BatchEpisodes(T=3, B=4, mean return 6)"
    assert repr(BatchEpisodes(5)) == "BatchEpisodes(T=0, B=5)"


def test_evaluation_shows_the_return_after_every_step() -> None:
    returns = np.stack([np.full((2, 3), -7.0), np.full((2, 3), 1.5)], axis=1).astype(np.float32)
    evaluation = Evaluation("2DNavigation-v0", 0, [{}, {}], (0.1,), returns)
    assert repr(evaluation) == "Evaluation(2DNavigation-v0, M=2, B=3, mean returns after 0, 1, ... steps: -7, 1.5)"


def test_sampler_shows_where_it_is() -> None:
    env = make_vector_env("2DNavigation-v0", {}, 1)
    policy = get_policy_for_env(env, (4,))
    env.close()
    sampler = MultiTaskSampler("2DNavigation-v0", batch_size=3, policy=policy, seed=5, num_workers=0)
    with sampler:
        assert repr(sampler) == "MultiTaskSampler(2DNavigation-v0, B=3, seed 5, iteration -1, phase 0)"
        sampler.sample_tasks(2)
        assert repr(sampler) == "MultiTaskSampler(2DNavigation-v0, B=3, seed 5, iteration 0, phase 0)"
    assert repr(sampler) == "MultiTaskSampler(2DNavigation-v0, B=3, seed 5, closed)"
