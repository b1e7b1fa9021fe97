"""RL2: its update against plain loops over single trials, and refusals."""

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import AffineTransform, Categorical, Independent, Normal, TransformedDistribution

from maml_rl import MultiTaskSampler, TaskEpisodes
from maml_rl.derivatives import LocalStore
from maml_rl.metalearners import trial_ppo
from maml_rl.metalearners.rl2 import RL2
from maml_rl.plan import Plan
from maml_rl.policies import CategoricalMLPPolicy, GRUPolicy, Policy, as_policy
from tests import synthetic
from tests.metalearners.plain_two_hot import cross_entropy, decoded
from tests.synthetic import randn, update

GAMMA, LAMBDA = 0.9, 0.7
PLAN = Plan(gamma=GAMMA, gae_lambda=LAMBDA)


def make_policy(**options: Any) -> GRUPolicy:
    policy = GRUPolicy(spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4), 6, **options).double()
    if policy.value == "two-hot":
        assert policy.value_head is not None
        with torch.no_grad():
            policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return policy


def make_episodes(lengths: list[list[int]], seed: int = 0) -> TaskEpisodes:
    episodes = synthetic.make_episodes(CategoricalMLPPolicy(3, 4), lengths, seed)
    episodes.rewards = randn(*episodes.rewards.shape, seed=seed) * episodes.mask
    return episodes


EPISODES = [[3, 1], [2, 2], [4, 4], [1, 2], [3, 3]]


def one_by_one(episodes: TaskEpisodes) -> list[tuple[Tensor, Tensor, list[float]]]:
    """Return observations, actions and rewards of each trial, in order."""
    trials = []
    for task, lengths in enumerate(episodes.lengths.tolist()):
        steps = [(t, b) for b, length in enumerate(lengths) for t in range(length)]
        trials.append(
            (
                torch.stack([episodes.observations[task, t, b] for t, b in steps]),
                torch.stack([episodes.actions[task, t, b] for t, b in steps]),
                [float(episodes.rewards[task, t, b]) for t, b in steps],
            )
        )
    return trials


def reference_update(
    policy: GRUPolicy,
    episodes: TaskEpisodes,
    epochs: int,
    value_lambda: float = LAMBDA,
    of_rewards: float = 0.0,
    *,
    bootstrap: bool = False,
) -> None:
    """PPO as in the papers: one trial after the other, no padding, no chunks."""
    trials = one_by_one(episodes)
    plain_returns = []
    for _, _, rewards in trials:
        plain_returns += [sum(GAMMA**k * r for k, r in enumerate(rewards[start:])) for start in range(len(rewards))]
    by_classes = policy.value == "two-hot"
    scale = 1.0 if by_classes else (sum(value**2 for value in plain_returns) / len(plain_returns)) ** 0.5
    old, advantages, targets = [], [], []
    with torch.no_grad():
        for task, (observations, actions, rewards) in enumerate(trials):
            unrolled = policy.unroll(observations.unsqueeze(1))
            values = [float(value) * scale for value in unrolled.values[:, 0]] + [0.0]
            if bootstrap and episodes.truncated[task, -1] and not episodes.terminated[task, -1]:
                whole = torch.cat([observations, episodes.final_observations[task, -1:].to(observations)])
                values[-1] = float(policy.unroll(whole.unsqueeze(1)).values[-1, 0]) * scale
            sums: dict[str, list[float]] = {"advantage": [0.0], "target": [0.0]}
            for step in reversed(range(len(rewards))):
                error = rewards[step] + GAMMA * values[step + 1] - values[step]
                for of, trace in (("advantage", LAMBDA), ("target", value_lambda)):
                    sums[of].insert(0, error + GAMMA * trace * sums[of][0])
            advantages.append(torch.tensor(sums["advantage"][:-1], dtype=torch.float64))
            errors = torch.tensor(sums["target"][:-1], dtype=torch.float64)
            targets.append((torch.tensor(values[:-1], dtype=torch.float64) + errors) / scale)
            old.append(torch.log_softmax(unrolled.distribution[0][:, 0], -1).gather(1, actions[:, None])[:, 0])
    every = torch.cat(advantages)
    advantages = [(each - every.mean()) / every.std(correction=0) for each in advantages]
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    spread = torch.tensor([reward for _, _, rewards in trials for reward in rewards]).var(correction=0)
    for _ in range(epochs):
        losses = []
        for trial, before, advantage, target in zip(trials, old, advantages, targets, strict=True):
            observations, actions, rewards = trial
            unrolled = policy.unroll(observations.unsqueeze(1))
            log_probs = torch.log_softmax(unrolled.distribution[0][:, 0], -1)
            ratio = (log_probs.gather(1, actions[:, None])[:, 0] - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            errors = (unrolled.values[:, 0] - target) ** 2
            if by_classes:
                logits = policy.value_head(policy.core(observations.unsqueeze(1))[0][:, 0])
                torch.testing.assert_close(unrolled.values[:, 0], decoded(logits), rtol=1e-12, atol=1e-12)
                errors = torch.stack([cross_entropy(*each) for each in zip(logits, target.tolist(), strict=True)])
            loss = -gain + 0.5 * errors - 0.1 * entropy
            for step, (action, reward) in enumerate(zip(actions, rewards, strict=True)):
                if of_rewards:
                    units = policy.core(observations.unsqueeze(1))[0][step, 0]
                    predicted = policy.reward_head(units)[action]
                    loss = loss + of_rewards * torch.eye(len(loss))[step] * (predicted - reward) ** 2 / spread
            losses.append(loss)
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()


def make_learner(policy: Policy, **settings: Any) -> RL2:
    values = {"learning_rate": 0.01, "num_epochs": 3, "clip": 0.05, "entropy_coefficient": 0.1, **settings}
    keys = {name.replace("_", "-"): value for name, value in values.items()}
    return RL2(policy, None, settings=RL2.Settings.model_validate(keys), plan=PLAN)


def assert_close(one: GRUPolicy, other: GRUPolicy) -> None:
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("value", "value_lambda"), [("network", None), ("head", 0.2), ("two-hot", None)])
def test_update_agrees_with_plain_loops_over_trials(value: Any, value_lambda: float | None) -> None:
    mine, plain, episodes = make_policy(value=value), make_policy(value=value), make_episodes(EPISODES)
    metrics = update(make_learner(mine, value_lambda=value_lambda), [episodes])
    reference_update(plain, episodes, epochs=3, value_lambda=LAMBDA if value_lambda is None else value_lambda)
    assert_close(mine, plain)
    assert metrics["loss/after"] < metrics["loss/before"]
    assert metrics["kl"] > 0.0


@pytest.mark.parametrize("value", ["network", "none"])
def test_values_continue_after_the_time_limit_of_a_trial_where_that_is_set(value: Any) -> None:
    policies, episodes = [make_policy(value=value) for _ in range(3)], make_episodes(EPISODES)
    generator = torch.Generator().manual_seed(5)
    episodes.final_observations = torch.randn(episodes.final_observations.shape, generator=generator)
    # One trial ends in a terminal state. Ends of episodes within a trial are steps like others.
    episodes.terminated[1, -1], episodes.truncated[1, -1] = True, False
    # And one there at its time limit.
    episodes.terminated[2, -1] = True
    episodes.terminated[3, 0], episodes.truncated[3, 0] = True, False
    plain, off, on = policies
    update(make_learner(on, bootstrap_trials=True), [episodes])
    update(make_learner(off), [episodes])
    if value == "none":
        assert _same(on, off)
        return
    assert not _same(on, off)
    reference_update(plain, episodes, epochs=3, bootstrap=True)
    assert_close(on, plain)


def test_prediction_of_rewards_is_trained_with_the_policy() -> None:
    mine, plain = make_policy(predict_rewards=True), make_policy(predict_rewards=True)
    episodes = make_episodes(EPISODES)
    update(make_learner(mine, reward_prediction_coefficient=0.7), [episodes])
    reference_update(plain, episodes, epochs=3, of_rewards=0.7)
    assert_close(mine, plain)
    untrained = make_policy(predict_rewards=True)
    assert not torch.equal(mine.reward_head.weight, untrained.reward_head.weight)
    errors, rewards = [], []
    for observations, actions, of_trial in one_by_one(episodes):
        predicted = untrained.predict_rewards(untrained.unroll(observations.unsqueeze(1)), actions.unsqueeze(1))
        rewards += of_trial
        errors += (predicted[:, 0].detach() - torch.tensor(of_trial)).square().tolist()
    one_pass = update(make_learner(untrained, reward_prediction_coefficient=0.7, num_epochs=1), [episodes])
    expected = 1.0 - np.mean(errors) / np.var(rewards)
    assert one_pass["explained_rewards"] == pytest.approx(expected, rel=1e-6)
    assert update(make_learner(mine, reward_prediction_coefficient=0.7), [episodes])["explained_rewards"] > expected


def test_step_size_and_entropy_bonus_fall_to_zero() -> None:
    batches = [LocalStore([make_episodes(EPISODES, seed)], make_policy()) for seed in range(3)]
    settings = {"anneal_over": 2, "num_epochs": 1}
    annealed, plain, other = make_policy(), make_policy(), make_policy()
    learner = make_learner(annealed, **settings)
    # The first batch is learned from with the full values.
    learner.update(batches[0])
    steady = make_learner(plain, num_epochs=1)
    steady.update(batches[0])
    assert _same(annealed, plain)
    # The second with half of both; a restored learner has the number of batches.
    half = make_learner(plain, num_epochs=1, learning_rate=0.005, entropy_coefficient=0.05)
    half.load_state_dict(steady.state_dict())
    half.optimizer.param_groups[0]["lr"] = 0.005
    half.update(batches[1])
    other.load_state_dict(annealed.state_dict())
    resumed = make_learner(other, **settings)
    resumed.load_state_dict(learner.state_dict())
    for each in (learner, resumed):
        each.update(batches[1])
    assert _same(annealed, plain)
    assert _same(annealed, other)
    # From the third nothing is learned.
    learner.update(batches[2])
    assert _same(annealed, other)


def test_a_first_batch_without_reward_does_not_set_the_units_of_later_ones() -> None:
    settings: dict[str, Any] = {"reward_prediction_coefficient": 1.0, "num_epochs": 1}
    learner = make_learner(make_policy(predict_rewards=True), **settings)
    empty = make_episodes(EPISODES)
    empty.rewards.zero_()
    update(learner, [empty])
    metrics = update(learner, [make_episodes(EPISODES, seed=1)])
    # In units of the returns and of the rewards' variance both losses are of order 1; with fixed units they were 1e5.
    assert abs(metrics["loss/before"]) < 10.0
    assert metrics["explained_rewards"] > -10.0
    # A later batch without reward does not change the units, either.
    assert abs(update(learner, [empty])["loss/before"]) < 10.0


def test_units_are_part_of_the_checkpoint_and_those_of_earlier_versions_load() -> None:
    batches = [LocalStore([make_episodes(EPISODES, seed)], make_policy()) for seed in range(3)]
    settings: dict[str, Any] = {"reward_prediction_coefficient": 1.0}
    mine, other = make_policy(predict_rewards=True), make_policy(predict_rewards=True)
    learner, resumed = make_learner(mine, **settings), make_learner(other, **settings)
    for batch in batches[:2]:
        learner.update(batch)
    other.load_state_dict(mine.state_dict())
    kept = json.loads(json.dumps({key: x for key, x in learner.state_dict().items() if not isinstance(x, Tensor)}))
    resumed.load_state_dict(learner.state_dict() | kept)
    for each in (learner, resumed):
        each.update(batches[2])
    assert _same(mine, other)
    earlier = {key: x for key, x in learner.state_dict().items() if "square" not in key and "variance" not in key}
    resumed.load_state_dict(earlier | {"value_scale": 3.0})
    assert resumed.state_dict()["return_square"] == [9.0, 1.0]
    resumed.update(batches[0])
    # A run before its first update.
    resumed.load_state_dict({"value_scale": None, "num_updates": 0})
    assert resumed.state_dict()["return_square"] == [0.0, 0.0]


def _same(one: GRUPolicy, other: GRUPolicy) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(one.parameters(), other.parameters(), strict=True))


def test_update_does_not_depend_on_how_trials_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [make_policy() for _ in range(3)]
    # In chunks of a single task most have no trial of a minibatch.
    for policy, tasks_per_chunk in zip(policies, (None, None, 1), strict=True):
        learner = make_learner(policy, num_minibatches=3)
        learner.tasks_per_chunk = tasks_per_chunk or learner.tasks_per_chunk
        update(learner, [make_episodes(EPISODES)])
        monkeypatch.setattr(trial_ppo, "_CHUNK", 2)
    assert_close(*policies[:2])
    assert_close(*policies[1:])


class Remembering(nn.Module):
    """A user's module, with or without a value estimate."""

    def __init__(self, with_values: bool) -> None:
        super().__init__()
        self.cell, self.head, self.with_values = nn.GRUCell(3, 5), nn.Linear(5, 5), with_values

    def initial_memory(self, num: int) -> tuple[Tensor]:
        return (torch.zeros(num, 5),)

    def forward(self, observations: Tensor, memory: tuple[Tensor]) -> Any:
        hidden = self.cell(observations, memory[0])
        outputs = self.head(hidden)
        step = Categorical(logits=outputs[:, :4]), (hidden,)
        return (*step, outputs[:, 4]) if self.with_values else step


def test_observations_are_normalized_by_all_batches_before_and_never_within_one() -> None:
    space = spaces.Box(-np.inf, np.inf, (3,))
    mine, plain = (GRUPolicy(space, spaces.Discrete(4), 6, normalize_observations=which) for which in (True, False))
    learner, other = make_learner(mine.double(), normalize_observations=True), make_learner(plain.double())
    batches = [make_episodes(EPISODES, seed) for seed in range(3)]
    for number, batch in enumerate(batches):
        update(learner, [batch])
        if number == 0:
            # The first batch was observed without normalization, and is learned from like that.
            update(other, [batch])
            assert all(torch.equal(x, mine.get_parameter(name)) for name, x in plain.named_parameters())
        seen = torch.cat([observations for each in batches[: number + 1] for observations, _, _ in one_by_one(each)])
        torch.testing.assert_close(mine.observation_mean, seen.mean(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(mine.observation_std, seen.std(0, correction=0), rtol=1e-9, atol=1e-12)
        if number == 1:
            # A run that was interrupted here.
            resumed = GRUPolicy(space, spaces.Discrete(4), 6, normalize_observations=True).double()
            again = make_learner(resumed, normalize_observations=True)
            again.load_state_dict(copy.deepcopy(learner.state_dict()))
            resumed.load_state_dict(mine.state_dict())
    update(again, [batches[2]])
    assert _same(resumed, mine)
    with pytest.raises(TypeError, match="normalize-observations is true, but this GRUPolicy sees observations as they"):
        make_learner(make_policy(), normalize_observations=True)


@pytest.mark.parametrize("with_values", [True, False])
def test_modules_of_users_learn_through_their_memory(with_values: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        module = Remembering(with_values)
    before = [param.detach().clone() for param in module.parameters()]
    metrics = update(make_learner(as_policy(module, (3,)), value="none"), [make_episodes(EPISODES)])
    assert metrics["loss/after"] < metrics["loss/before"]
    assert all(not torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


class Scaled(Remembering):
    """The same with Gaussian actions, or as a transformed distribution with those actions times a number."""

    scale: float | None = None

    def __init__(self, with_values: bool) -> None:
        super().__init__(with_values)
        self.std: Any = 0.7

    def forward(self, observations: Tensor, memory: tuple[Tensor]) -> Any:
        hidden = self.cell(observations, memory[0])
        normal = Independent(Normal(self.head(hidden)[:, :2], self.std), 1)
        actions = normal if self.scale is None else TransformedDistribution(normal, [AffineTransform(0.0, self.scale)])
        return actions, (hidden,)


def test_distributions_without_an_entropy_are_learned_as_those_that_they_transform() -> None:
    episodes, modules, entropies, surprises = make_episodes(EPISODES), [], [], []
    actions = randn(*episodes.mask.shape, 2, seed=1) * episodes.mask.unsqueeze(-1)
    for scale in (None, 2.0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = Scaled(with_values=False)
        module.scale, episodes.actions = scale, actions * (scale or 1.0)
        policy, log_probs = as_policy(module, (3,)), []
        for observations, taken, _ in one_by_one(episodes):
            distribution = policy.unroll(observations.unsqueeze(1)).distribution
            log_probs.append(policy.distributions.log_prob(distribution, taken.unsqueeze(1)).detach())
        surprises.append(-float(torch.cat(log_probs).mean()))
        metrics = update(make_learner(policy, value="none", entropy_coefficient=0.0), [episodes])
        entropies.append(metrics["policy/entropy"])
        modules.append(dict(module.named_parameters()))
    torch.testing.assert_close(modules[1], modules[0])
    # torch knows that of a Gaussian; the other is that of the actions taken.
    assert entropies == pytest.approx([1.0 + np.log(2 * np.pi) + 2 * np.log(0.7), surprises[0] + 2 * np.log(2.0)])
    assert surprises[1] == pytest.approx(entropies[1])


def test_estimated_entropy_is_raised_by_a_larger_deviation() -> None:
    with torch.random.fork_rng(devices=[]):
        module = Scaled(with_values=False)
    module.scale, module.std = 2.0, nn.Parameter(torch.ones(()))
    with torch.no_grad():
        for param in module.head.parameters():
            param.zero_()
    policy, episodes = as_policy(module, (3,)), make_episodes(EPISODES)
    actions = randn(*episodes.mask.shape, 2, seed=1) * episodes.mask.unsqueeze(-1)
    # Farther from the mean than expected, so that the actions alone are likelier where the deviation is larger.
    episodes.actions = actions * module.scale * (2.1 * episodes.mask.sum() / actions.square().sum()).sqrt()
    episodes.rewards = torch.zeros_like(episodes.rewards)
    update(make_learner(policy, value="none", entropy_coefficient=1.0), [episodes])
    assert module.std.item() > 1.0


def test_policies_that_the_learner_cannot_train_and_several_slots_are_refused() -> None:
    with pytest.raises(TypeError, match="CategoricalMLPPolicy has none; use GRUPolicy"):
        RL2(CategoricalMLPPolicy(3, 4), None)
    with pytest.raises(TypeError, match="this GRUPolicy predicts no rewards; make a GRUPolicy with predict_rewards"):
        make_learner(make_policy(), reward_prediction_coefficient=1.0)
    policy = GRUPolicy(spaces.Box(-1.0, 1.0, (1 + 5 + 2,)), spaces.Discrete(5), 4)
    with (
        MultiTaskSampler("Bandit-K5-v0", {}, 2, policy, num_workers=0, observe_last=True) as sampler,
        pytest.raises(ValueError, match="slots_per_task is 2"),
    ):
        RL2(policy, None).collect(sampler, sampler.sample_tasks(1))
