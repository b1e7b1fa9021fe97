"""VariBAD: the evidence bound against plain loops, the parameters that each objective trains, and invalid configs."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Bernoulli, Normal, kl_divergence

from maml_rl.config import Config
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.experience import Steps
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners.varibad import VariBAD
from maml_rl.policies import BeliefPolicy
from tests.small_runs import config_of

GRID = {
    "env-name": "GridNavi-v0",
    "env-kwargs": {"width": 3, "height": 2},
    "max-episode-steps": 4,
    "fast-batch-size": 2,
    "meta-batch-size": 8,
    "observe-last": True,
    "algorithm": "varibad",
}
SIZES = {"encoder-size": 8, "belief-trials": 6, "decoder-sizes": [8], "replay-steps": 1000}


def config(settings: dict[str, Any] | None = None, **values: Any) -> Config:
    return config_of().override({**GRID, **values, "algorithm-settings": {**SIZES, **(settings or {})}})


def learner_and_episodes(settings: dict[str, Any] | None = None, **values: Any) -> tuple[VariBAD, TaskEpisodes]:
    experiment = make_experiment(config(settings, **values))
    learner = experiment.metalearner
    assert isinstance(learner, VariBAD)
    with make_sampler(experiment, num_workers=0) as sampler:
        batch = learner.collect(sampler, sampler.sample_tasks(8))
    return learner, batch.phases[0]


def plain_bound(learner: VariBAD, steps: Steps, chosen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction and divergence, as means over trials and their decoded steps, one term after the other."""
    policy = learner.policy
    mean, log_variance, _ = policy.encode(steps.observations)
    std = (0.5 * log_variance).exp()
    own, seen_after = policy.own_size, steps.next_observations
    action = seen_after[..., own : own + 2 if isinstance(policy.action_space, spaces.Box) else own + 5]
    reconstruction, divergence = [], []
    for trial in range(steps.mask.shape[1]):
        real = [step for step in range(len(steps.mask)) if steps.mask[step, trial] > 0]
        of_trial = []
        for number, at in enumerate(chosen[:, trial].tolist()):
            if at not in real:
                continue
            posterior = Normal(mean[at, trial], std[at, trial])
            before = Normal(mean[at - 1, trial], std[at - 1, trial]) if at else Normal(torch.zeros(5), torch.ones(5))
            latent = mean[at, trial] + std[at, trial] * noise[number, trial]
            loss = torch.zeros(())
            for step in real:
                reward, after = steps.rewards[step, trial], seen_after[step, trial, :own]
                seen = torch.cat((steps.observations[step, trial, :own], action[step, trial]))
                loss = loss + plain_decoding(learner, latent, seen, after, reward)
            of_trial.append((loss, kl_divergence(posterior, before).sum()))
        losses, divergences = zip(*of_trial, strict=True)
        reconstruction.append(torch.stack(losses).mean())
        divergence.append(torch.stack(divergences).mean())
    return torch.stack(reconstruction).mean(), torch.stack(divergence).mean()


def plain_decoding(learner: VariBAD, latent: Tensor, seen: Tensor, after: Tensor, reward: Tensor) -> Tensor:
    settings, layers = learner.settings, dict(learner.decoder.named_children())

    def network(name: str, inputs: Tensor) -> Tensor:
        return layers[f"{name}_1"](torch.relu(layers[f"{name}_0"](inputs)))

    if settings.reward_decoder == "cells":
        x, y = after.long().tolist()
        loss = -Bernoulli(logits=network("cells", latent)[2 * x + y]).log_prob((reward > 0.0).float())
    else:
        loss = (network("rewards", torch.cat((latent, seen, after))) - reward).square().sum()
    if settings.state_coefficient:
        states = network("states", torch.cat((latent, seen)))
        loss = loss + settings.state_coefficient * (states - after).square().mean()
    return loss


NAVIGATION = {"env-name": "2DNavigation-v0", "env-kwargs": {}, "max-episode-steps": 3}


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"reward-decoder": "cells", "belief-steps": 3}, {}),
        ({"reward-decoder": "network", "state-coefficient": 0.5}, {}),
        ({"reward-decoder": "network", "belief-steps": 2}, NAVIGATION),
    ],
)
def test_bound_and_its_gradient_agree_with_plain_loops(settings: dict[str, Any], values: dict[str, Any]) -> None:
    learner, episodes = learner_and_episodes(settings, **values)
    replay = learner.experience["trials"]
    replay.append(episodes)
    steps = replay.sample_sequences(np.random.default_rng(0), 4)
    # One trial is shorter than the others.
    steps.mask[-2:, 1] = 0.0
    inputs = learner.inputs_of(steps, np.random.default_rng(1))
    wanted = plain_bound(learner, *inputs)
    bound, (reconstruction, divergence) = learner.loss(*inputs)
    torch.testing.assert_close(reconstruction, wanted[0].detach())
    torch.testing.assert_close(divergence, wanted[1].detach())
    loss = wanted[0] + learner.settings.kl_coefficient * wanted[1]
    trained = [*learner.policy.encoder_parameters(), *learner.decoder.parameters()]
    torch.testing.assert_close(bound, loss)
    gradients = (torch.autograd.grad(each, trained) for each in (bound, loss))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_beliefs_are_decoded_at_different_real_steps_of_every_trial() -> None:
    learner, episodes = learner_and_episodes({"belief-steps": 3})
    learner.experience["trials"].append(episodes)
    steps = learner.experience["trials"].sample_sequences(np.random.default_rng(0), 50)
    steps.mask[4:, :25] = 0.0
    _, chosen, _ = learner.inputs_of(steps, np.random.default_rng(1))
    assert (chosen.diff(dim=0) > 0).all()
    assert (steps.mask.gather(0, chosen) > 0).all()
    assert len(chosen[:, 25:].unique()) == 8


def test_objective_of_the_policy_changes_the_policy_and_the_bound_changes_the_belief(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, episodes = learner_and_episodes()

    def parts() -> list[list[Tensor]]:
        groups = learner.policy.encoder_parameters(), learner.decoder.parameters(), learner.policy.acting_parameters()
        return [[param.detach().clone() for param in group] for group in groups]

    def changed(before: list[list[Tensor]]) -> list[bool]:
        pairs = zip(before, parts(), strict=True)
        return [any(not torch.equal(x, y) for x, y in zip(old, new, strict=True)) for old, new in pairs]

    learner.experience["trials"].append(episodes)
    before = parts()
    learner._update_belief()
    assert changed(before) == [True, True, False]
    monkeypatch.setattr(learner, "_update_belief", dict)
    before = parts()
    learner.update(learner.store_of([episodes]))
    assert changed(before) == [False, False, True]


def test_policy_normalizes_observations_by_the_moments_of_all_samples() -> None:
    learner, episodes = learner_and_episodes()
    for _ in range(2):
        learner.update(learner.store_of([episodes]))
    seen = episodes.observations[..., :2].flatten(0, 2).double()
    torch.testing.assert_close(learner.policy.observation_mean.double(), seen.mean(0), rtol=0.0, atol=1e-6)
    deviation = seen.std(0, unbiased=False)
    torch.testing.assert_close(learner.policy.observation_std.double(), deviation, rtol=0.0, atol=1e-6)
    learner, episodes = learner_and_episodes({"normalize-observations": False})
    learner.update(learner.store_of([episodes]))
    assert torch.equal(learner.policy.observation_std, torch.ones(2))


def test_state_of_another_decoder_is_refused() -> None:
    state = learner_and_episodes()[0].state_dict()
    other, _ = learner_and_episodes({"decoder-sizes": [9]})
    with pytest.raises(ValueError, match="the state of decoder does not fit"):
        other.load_state_dict(state)
    assert isinstance(other.policy, BeliefPolicy)
