"""Padded entries of actions count in nothing that a head computes: compared with a head that has only the real ones."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners.soft_actor_critic import SACSettings, SoftCritics
from maml_rl.policies.heads import GaussianHead, SquashedGaussianHead, head_for
from maml_rl.spaces import PaddedBox
from tests.metalearners.small_algorithms import small

LOW, HIGH = np.float32([-1.0, -2.0, -1.0, -0.5]), np.float32([1.0, 2.0, 3.0, 0.5])
REAL = [0, 2]
SEEN = torch.tensor([9.0, 1.0, 0.0, 1.0, 0.0, 7.0]).expand(5, 6)
MIXTURE: dict[str, Any] = {"families": ["PointGoal-v0", "HalfCheetahVel-v5"]}


def box(entries: list[int]) -> spaces.Box:
    return spaces.Box(LOW[entries], HIGH[entries])


def make(kind: str) -> tuple[Any, Any, Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return a head with padding and one without, and units and own parameters of both that agree on real entries."""
    padded = PaddedBox(LOW, HIGH, slice(1, 5))
    generator = torch.Generator().manual_seed(0)
    units = torch.randn(5, 4 if kind == "gaussian" else 8, generator=generator, dtype=torch.float64)
    if kind == "gaussian":
        sigma = torch.tensor([0.3, -0.4, 0.1, 0.7], dtype=torch.float64)
        return head_for(padded), GaussianHead((2,)), units, units[:, REAL], {"sigma": sigma}, {"sigma": sigma[REAL]}
    columns = [*REAL, *(4 + entry for entry in REAL)]
    return SquashedGaussianHead(padded), SquashedGaussianHead(box(REAL)), units, units[:, columns], {}, {}


@pytest.mark.parametrize("kind", ["gaussian", "squashed"])
def test_log_prob_divergence_and_entropy_are_those_of_the_real_entries_alone(kind: str) -> None:
    head, alone, units, own_units, params, own_params = make(kind)
    parameters = head.masked(head.parametrize(units, params), SEEN)
    own = alone.parametrize(own_units, own_params)
    noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Whatever is stored in the padding, such as random actions.
    actions = alone.act(own, noise[:, REAL])
    stored = torch.full((5, 4), 0.4, dtype=torch.float64).index_copy(1, torch.tensor(REAL), actions)
    torch.testing.assert_close(head.log_prob(parameters, stored), alone.log_prob(own, actions))
    middle = torch.tensor((LOW + HIGH) / 2.0 if kind == "squashed" else np.zeros(4)).double()
    expected = middle.expand(5, 4).index_copy(1, torch.tensor(REAL), actions)
    torch.testing.assert_close(head.act(parameters, noise), expected)
    if kind == "squashed":
        (found, density), (wanted, own_density) = head.sample(parameters, noise), alone.sample(own, noise[:, REAL])
        torch.testing.assert_close(density, own_density)
        torch.testing.assert_close(found[:, REAL], wanted)
        return
    torch.testing.assert_close(head.entropy(parameters), alone.entropy(own).expand(5))
    other = head.masked(head.parametrize(2.0 * units + 1.0, {"sigma": 0.5 * params["sigma"]}), SEEN)
    other_own = alone.parametrize(2.0 * own_units + 1.0, {"sigma": 0.5 * own_params["sigma"]})
    torch.testing.assert_close(head.kl(parameters, other), alone.kl(own, other_own))


@pytest.mark.parametrize("kind", ["gaussian", "squashed"])
def test_units_of_padded_entries_get_no_gradient(kind: str) -> None:
    head, _, units, _, params, _ = make(kind)
    units = units.clone().requires_grad_()
    parameters = head.masked(head.parametrize(units, params), SEEN)
    head.log_prob(parameters, torch.full((5, 4), 0.4, dtype=torch.float64)).sum().backward()
    assert units.grad is not None
    moved = (units.grad != 0).all(0).reshape(-1, 4)
    assert moved.tolist() == [[True, False, True, False]] * len(moved)


def test_default_target_entropy_counts_real_entries() -> None:
    head, _, units, _, params, _ = make("squashed")
    parameters = head.masked(head.parametrize(units, params), SEEN)
    critics: Any = SoftCritics(torch.nn.Identity(), PaddedBox(LOW, HIGH, slice(1, 5)), SACSettings())
    assert critics.target_entropy_of(parameters, torch.ones(5)) == -2.0
    given: Any = SoftCritics(torch.nn.Identity(), box(REAL), SACSettings(target_entropy=-7.0))
    assert given.target_entropy_of(parameters, torch.ones(5)) == -7.0


POLICIES: dict[str, dict[str, Any]] = {
    "maml-trpo": {},
    "rl2": {},
    "transformer": {"algorithm-settings": {"cell": "transformer", "layers": []}},
    "varibad": {},
    "cavia": {},
    "pearl": {},
    "rsac": {},
    "amago": {},
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_of_all_learners_act_and_are_scored_on_real_entries(name: str) -> None:
    algorithm = "rl2" if name == "transformer" else name
    values = {"env-name": MIXTURE["families"], "max-episode-steps": 4, **POLICIES[name]}
    experiment = make_experiment(small(algorithm).override(values))
    with make_sampler(experiment, num_workers=0) as sampler:
        (task,) = [task for task in sampler.sample_tasks(2) if task["family"] == "PointGoal-v0"]
        batch = experiment.metalearner.collect(sampler, [task])
    policy, head = experiment.policy, experiment.policy.distributions
    assert isinstance(head, GaussianHead | SquashedGaussianHead)
    assert not any(episodes.actions[..., 2:].any() for episodes in batch.phases)
    seen, actions = (tensor[0] for tensor in (batch.phases[0].observations, batch.phases[0].actions))
    found = policy.unroll(seen).distribution if policy.has_memory else policy.distribution_parameters(seen)
    head.log_prob(found, actions).sum().backward()
    last_layer = {name for name, _ in policy.named_parameters() if name.split(".")[-2:-1] in (["mu"], ["head"])}
    last = policy.get_parameter(min(last_layer, key=lambda name: name.endswith("bias")))
    assert last.grad is not None
    moved = (last.grad != 0).any(1).reshape(-1, 6)
    assert moved.tolist() == [[True, True, False, False, False, False]] * len(moved)
