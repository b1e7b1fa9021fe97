"""What is computed from the episodes of a phase afterward: log-probabilities, and the memory before every action."""

import math
from contextlib import closing
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from trials import EPISODES, TASKS, Counting, Recurrent, make_sampler, sample

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs import make_vector_env
from maml_rl.envs.global_generators import seeded_generators
from maml_rl.policies import Memory, NormalMLPPolicy
from maml_rl.samplers.rollout import recomputing
from maml_rl.seeding import PhaseStreams


def test_gaussian_log_probabilities_are_those_of_the_noise_and_zero_past_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputing, "chunks_of", lambda *_: [slice(0, 2), slice(2, 3)])
    policy = NormalMLPPolicy(2, 2, (8,), "tanh")
    params = {name: value.detach().clone() for name, value in policy.stack_parameters(3).items()}
    params["sigma"] += torch.tensor([[0.0], [0.5], [-1.0]])
    settings: dict[str, Any] = {"seed": 0, "num_workers": 0, "max_episode_steps": 50, "record_log_probs": True}
    # Goals that are at most one step away, so that some episodes end early.
    tasks = [{"goal": [0.1, 0.1]}, {"goal": [0.1, 0.0]}, {"goal": [0.5, 0.5]}]
    with MultiTaskSampler("2DNavigation-v0", {}, 4, policy, **settings) as sampler:
        episodes = sampler.rollout(tasks, params)
    assert episodes.lengths.min() < episodes.lengths.max()
    noise = PhaseStreams(0, 0, 0).action_noise("normal", 3, range(4), range(50), 2)
    log_density = -0.5 * noise**2 - params["sigma"].numpy()[:, None] - 0.5 * math.log(2.0 * math.pi)
    expected = np.moveaxis(log_density.sum(-1), 0, 1)[:, : episodes.rewards.shape[1]]
    assert episodes.log_probs is not None
    np.testing.assert_allclose(episodes.log_probs, expected * episodes.mask.numpy(), atol=2e-5)


def test_categorical_log_probabilities_are_those_of_the_actions() -> None:
    with closing(make_vector_env("TabularMDP-v0")) as env:
        policy = get_policy_for_env(env, (8,), "tanh")
    settings: dict[str, Any] = {"seed": 0, "num_workers": 0, "record_log_probs": True}
    with MultiTaskSampler("TabularMDP-v0", {}, 4, policy, **settings) as sampler:
        episodes = sampler.rollout(sampler.sample_tasks(3))
    with torch.no_grad():
        probabilities = policy(episodes.observations).probs
    chosen = probabilities.gather(-1, episodes.actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(episodes.log_probs, chosen.log())


OPTIONS: list[dict[str, Any]] = [{"slots_per_task": 1}, {"slots_per_task": 2}, {"reset_memory_each_episode": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_recorded_memory_is_that_before_each_action(options: dict[str, Any]) -> None:
    episodes = sample(Counting(), record_memory=True, **options)
    assert episodes.memory is not None
    counts, sums = episodes.memory
    grid = episodes.rewards.shape
    assert (counts.shape, counts.dtype, sums.shape) == (grid, torch.int64, (*grid, 2))
    # The policy outputs its count before it increases it.
    assert torch.equal(counts.float(), episodes.actions[..., 0])
    slots, expected = options.get("slots_per_task", 1), torch.zeros_like(sums)
    for task, slot in product(range(len(TASKS)), range(slots)):
        remembered = torch.zeros(2)
        for episode in range(slot, EPISODES, slots):
            remembered = torch.zeros(2) if "reset_memory_each_episode" in options else remembered
            for step in range(int(episodes.lengths[task, episode])):
                expected[task, step, episode] = remembered
                remembered = 0.9 * remembered + torch.tanh(episodes.observations[task, step, episode].float())
    torch.testing.assert_close(sums, expected)


class Echoing(Counting):
    """Acts by the noise alone, and remembers its last action."""

    def initial_memory(self, num: int) -> Memory:
        return (torch.zeros(num, 1),)

    def act(self, observations: Any, noise: Any, memory: Memory = (), params: Any = None) -> tuple[Any, Memory]:
        return noise, (noise,)


def test_recorded_memory_is_that_after_the_noise_of_each_episode() -> None:
    episodes = sample(Echoing(), record_memory=True)
    assert episodes.memory is not None
    assert torch.equal(episodes.memory[0][:, 1:], episodes.actions[:, :-1] * episodes.mask[:, 1:, :, None])


@pytest.mark.parametrize("stacked", [False, True])
def test_log_probabilities_of_a_policy_with_a_memory_are_those_under_what_it_knew(stacked: bool) -> None:
    with seeded_generators(0):
        policy = Recurrent()
    scales = torch.linspace(0.5, 1.5, len(TASKS)) if stacked else torch.ones(len(TASKS))
    own = {name: value.detach().clone() for name, value in policy.named_parameters()}
    params = {name: torch.stack([scale * value for scale in scales]) for name, value in own.items()}
    options: dict[str, Any] = {"slots_per_task": 2, "record_memory": True, "record_log_probs": True}
    episodes = sample(policy, params=params if stacked else None, **options)
    assert episodes.memory is not None
    for task, scale in enumerate(scales):
        policy.load_state_dict({name: scale * value for name, value in own.items()})
        with torch.no_grad():
            seen, remembered = (values[task].flatten(0, 1) for values in (episodes.observations, episodes.memory[0]))
            distribution, _ = policy(seen.float(), (remembered,))
            expected = distribution.log_prob(episodes.actions[task].flatten(0, 1)).reshape(episodes.mask[task].shape)
        torch.testing.assert_close(episodes.log_probs[task], expected * episodes.mask[task])


def test_memory_and_log_probabilities_are_recorded_on_request_and_change_no_episode() -> None:
    with seeded_generators(0):
        policy = Recurrent()
    plain, recorded = sample(policy), sample(policy, record_memory=True, record_log_probs=True)
    assert (plain.memory, plain.log_probs) == (None, None)
    assert plain.digest() == recorded.digest()
    with pytest.raises(ValueError, match="NormalMLPPolicy has no memory; leave it out") as caught:
        make_sampler(NormalMLPPolicy(2, 1), record_memory=True)
    assert "\n" not in str(caught.value)
