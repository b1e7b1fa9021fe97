"""MAML over a recurrent policy: the meta-gradient through `unroll`, and runs that repeat."""

from pathlib import Path

import pytest
import torch

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.derivatives import LocalStore
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import adapt_to_task, load_policy
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners.autograd_objective import AutogradObjective
from maml_rl.metalearners.losses import surrogate
from maml_rl.metalearners.meta_objective import MetaObjective
from tests.small_runs import config_of, untimed

pytestmark = pytest.mark.usefixtures("forked_workers")


def recurrent(cell: str) -> Config:
    return config_of(num_batches=2, max_episode_steps=6, memory=cell, hidden_sizes=[4])


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_meta_gradient_has_the_slope_of_finite_differences(cell: str) -> None:
    experiment = make_experiment(recurrent(cell))
    with make_sampler(experiment, num_workers=0) as sampler:
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(3))
    policy = experiment.policy.double()
    rule = AdaptationRule(0.5)
    store, device = LocalStore(batch.phases, policy), torch.device("cpu")
    meta = MetaObjective(policy, store, rule=rule, objective=surrogate, device=device)
    theta = meta.initial_parameters()
    _, gradient = meta.gradient(theta)
    vector = torch.cos(torch.arange(len(theta), dtype=theta.dtype))

    def loss_at(distance: float) -> float:
        loss, *_ = meta.evaluate(theta + distance * vector)
        return float(loss)

    difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
    assert float(gradient @ vector) == pytest.approx(difference, rel=1e-5)
    product = meta.curvature_product(vector)
    assert float(vector @ product) > 0.0
    objective = AutogradObjective(
        policy,
        batch.phases,
        rule=rule,
        objective=lambda new, old: surrogate(new[-1].log_probs, old[-1].log_probs, new[-1].samples),
    )
    objective.backward()
    flat = torch.cat([param.grad.flatten() for param in policy.parameters() if param.grad is not None])
    torch.testing.assert_close(flat.double(), gradient.double(), rtol=1e-6, atol=1e-9)


def test_recurrent_policy_is_trained_through_inner_steps_tested_and_adapted(tmp_path: Path) -> None:
    config = recurrent("gru")
    for workers in (0, 2):
        train(config, tmp_path / str(workers), num_workers=workers)
        assert untimed(tmp_path / str(workers)) == untimed(tmp_path / "0")
    experiment = make_experiment(config)
    experiment.restore("last", tmp_path / "0")
    assert evaluate(experiment, tasks=2, num_steps=2, num_workers=0).returns.shape == (2, 3, 4)
    policy = load_policy(tmp_path / "0")
    adapted = adapt_to_task(policy, "2DNavigation-v0", {"goal": [0.3, -0.2]})
    changed = {name for name, x in policy.named_parameters() if not torch.equal(x, adapted.get_parameter(name))}
    assert "core.weight_hh_l0" in changed
