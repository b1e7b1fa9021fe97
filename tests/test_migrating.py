"""The statements of the page on pytorch-maml-rl about its functions, in numbers, and the loop of its train.py."""

import gymnasium
import torch
from torch import Tensor

import maml_rl
from maml_rl import functional

VALUES = torch.tensor([[1.0, 4.0], [1.0, 7.0], [1.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])


def weighted_mean(tensor: Tensor, lengths: list[int]) -> Tensor:
    """Return the mean of each episode's real steps, by a plain formula."""
    return torch.stack([tensor[:length, episode].mean() for episode, length in enumerate(lengths)])


def test_means_per_episode_need_dims() -> None:
    per_episode = functional.masked_mean(VALUES, MASK, dims=(-2,))
    assert torch.equal(per_episode, weighted_mean(VALUES, [3, 1]))
    assert float(per_episode.mean()) == 2.5
    assert float(functional.masked_mean(VALUES, MASK)) == 1.75


def test_loop_of_the_ancestor_runs() -> None:
    env = gymnasium.make("2DNavigation-v0")
    policy = maml_rl.get_policy_for_env(env, hidden_sizes=(8,))
    baseline = maml_rl.LinearFeatureBaseline.for_space(env.observation_space)
    options = {"seed": 0, "num_workers": 0, "max_episode_steps": 4}
    before = [param.detach().clone() for param in policy.parameters()]
    with maml_rl.MultiTaskSampler("2DNavigation-v0", {}, 4, policy, baseline, **options) as sampler:  # type: ignore[arg-type]
        metalearner = maml_rl.MAMLTRPO(policy, fast_lr=0.1, first_order=False, device="cpu")
        tasks = sampler.sample_tasks(num_tasks=3)
        futures = sampler.sample_async(tasks, num_steps=2, fast_lr=0.1, gamma=0.95, gae_lambda=1.0, device="cpu")
        assert sampler.phase == 0
        logs = metalearner.step(*futures, max_kl=1e-3, cg_iters=3, cg_damping=1e-2, ls_backtrack_ratio=0.5)
        assert sampler.phase == 3
        train_episodes, valid_episodes = sampler.sample_wait(futures)
        # Nothing was sampled twice.
        assert sampler.phase == 3
        assert sampler.sample_wait(futures)[1] is valid_episodes
        assert len(train_episodes) == 2
        sampler.seek(0)
        expected = sampler.sample(tasks, num_steps=2, fast_lr=0.1, gamma=0.95)
    assert logs["accepted"]
    assert any(not torch.equal(one, other) for one, other in zip(before, policy.parameters(), strict=True))
    assert expected[0][0].digest() != train_episodes[0].digest()
