"""Steps of trials against plain loops over Python lists."""

from dataclasses import replace

import pytest
import torch

from maml_rl.episode import Steps, TaskEpisodes
from maml_rl.policies import NormalMLPPolicy
from tests import synthetic
from tests.synthetic import randn

GAMMA, LAMBDA = 0.9, 0.7


def make_episodes(lengths: list[list[int]]) -> TaskEpisodes:
    episodes = synthetic.make_episodes(NormalMLPPolicy(3, 2), lengths, dtype=torch.float32)
    episodes.rewards = randn(*episodes.rewards.shape) * episodes.mask
    episodes.log_probs = -episodes.rewards
    return episodes


@pytest.mark.parametrize("lengths", [[[4, 4, 4, 4]], [[1, 3], [5, 2], [2, 0]]])
def test_episodes_of_a_trial_are_concatenated_and_returns_continue_across_their_ends(lengths: list[list[int]]) -> None:
    episodes = make_episodes(lengths)
    trials = Steps.of_trials(episodes)
    values = torch.randn(trials.mask.shape, generator=torch.Generator().manual_seed(1))
    returns, advantages = trials.returns(GAMMA), trials.trial_advantages(values, GAMMA, LAMBDA)
    for task, of_task in enumerate(lengths):
        steps = [(t, b) for b, length in enumerate(of_task) for t in range(length)]
        assert trials.mask[:, task].tolist() == [1.0] * len(steps) + [0.0] * (len(trials.mask) - len(steps))
        for place, (t, b) in enumerate(steps):
            assert torch.equal(trials.observations[place, task], episodes.observations[task, t, b])
            assert torch.equal(trials.actions[place, task], episodes.actions[task, t, b])
            assert trials.rewards[place, task] == episodes.rewards[task, t, b]
            assert trials.log_probs is not None
            assert trials.log_probs[place, task] == -episodes.rewards[task, t, b]
            assert trials.episodes[place, task] == b
        assert not trials.rewards[len(steps) :, task].any()
        rewards = [float(episodes.rewards[task, t, b]) for t, b in steps]
        estimates = values[:, task].tolist()
        for start in range(len(rewards)):
            expected = sum(GAMMA**later * reward for later, reward in enumerate(rewards[start:]))
            assert float(returns[start, task]) == pytest.approx(expected, abs=1e-5)
            advantage = 0.0
            for later in range(start, len(rewards)):
                after = estimates[later + 1] if later + 1 < len(rewards) else 0.0
                error = rewards[later] + GAMMA * after - estimates[later]
                advantage += (GAMMA * LAMBDA) ** (later - start) * error
            assert float(advantages[start, task]) == pytest.approx(advantage, abs=1e-5)
        assert not advantages[len(rewards) :, task].any()
    assert torch.equal(trials.as_episodes(trials.rewards, episodes), episodes.rewards)


def test_slots_of_a_task_are_trials_of_their_own() -> None:
    episodes = make_episodes([[3, 1, 4, 2], [2, 2, 2, 1]])
    trials = Steps.of_trials(episodes, slots_per_task=2)
    assert trials.mask.sum(0).tolist() == [7, 3, 4, 3]
    first = [(t, b) for b in (0, 2) for t in range((3, 0, 4)[b])]
    assert trials.rewards[:, 0].tolist() == [float(episodes.rewards[0, t, b]) for t, b in first]
    assert trials.episodes[:3, 1].tolist() == [0, 1, 1]
    each = Steps.of_trials(episodes, slots_per_task=4)
    assert each.mask.sum(0).tolist() == [3, 1, 4, 2, 2, 2, 2, 1]
    assert torch.equal(each.as_episodes(each.rewards, episodes), episodes.rewards)
    with pytest.raises(ValueError, match="must divide the 4 episodes"):
        Steps.of_trials(episodes, slots_per_task=3)


def test_observation_after_a_trial_is_the_one_after_its_last_real_step() -> None:
    trials = Steps.of_trials(make_episodes([[2, 1], [1, 0]]))
    seen = torch.arange(6.0).reshape(3, 2, 1).expand(3, 2, 3)
    ends = replace(trials, next_observations=seen).with_end()
    assert ends[3, 0].tolist() == [4.0] * 3
    assert ends[1, 1].tolist() == [1.0] * 3
    assert torch.equal(ends[:3, 0], trials.observations[:, 0])
    assert not ends[2:, 1].any()


def test_functions_of_all_tensors_leave_out_the_fields_that_are_not_known() -> None:
    steps = Steps(*torch.arange(3.0).split(1), mask=torch.ones(1), infos={"power": torch.tensor([5.0])})
    doubled = steps.map(lambda values: 2.0 * values).tensors()
    expected = {"observations": 0.0, "actions": 2.0, "rewards": 4.0, "mask": 2.0, "info power": 10.0}
    assert {name: values.item() for name, values in doubled.items()} == expected
    assert Steps.of(doubled).infos["power"].item() == 10.0
    assert Steps.of(doubled).log_probs is None
