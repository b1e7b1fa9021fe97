"""Rules of single algorithms: Reptile, ANIL, Meta-SGD, and the penalty of ProMP."""

from pathlib import Path
from typing import Any

import pytest
import torch

from maml_rl.adaptation import AdaptationRule, adapt
from maml_rl.errors import NonFiniteError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.train import train
from maml_rl.metalearners import MAMLTRPO, MetaLearner, Plan, promp
from maml_rl.metalearners.adam import MAMLPPO, AdamLearner
from maml_rl.metalearners.meta_sgd import MetaSGD
from maml_rl.metalearners.reptile import Reptile
from maml_rl.policies import Policy
from maml_rl.runs.checkpoint import latest_intact
from tests.small_runs import config_of
from tests.synthetic import make_policy, make_problem, update

RAGGED = ((5, 2), (1, 3), (4, 4))


def copy_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in policy.named_parameters()}


def test_reptile_moves_by_its_step_size_toward_the_mean_of_the_adapted_parameters() -> None:
    policy, train_episodes, valid = make_problem("normal", 2, RAGGED)
    before = copy_of(policy)
    once = adapt(policy, train_episodes[0], step_size=0.3)
    twice = adapt(policy, train_episodes[1], once, step_size=0.2)
    settings = Reptile.Settings.model_validate({"meta-step-size": 0.25})
    metrics = update(Reptile(policy, [0.3, 0.2], settings=settings), [*train_episodes, valid])
    squares = 0.0
    for name, param in copy_of(policy).items():
        way = twice[name].detach().mean(0) - before[name]
        torch.testing.assert_close(param, before[name] + 0.25 * way)
        squares += float(way.square().sum())
    assert metrics["grad_norm"] == pytest.approx(squares**0.5)


def test_reptile_refuses_non_finite_parameters() -> None:
    policy, train_episodes, valid = make_problem("normal", 1, RAGGED)
    train_episodes[0].advantages[1] = torch.nan
    before = copy_of(policy)
    with pytest.raises(NonFiniteError, match="use a smaller fast-lr"):
        update(Reptile(policy, 0.3), [*train_episodes, valid])
    assert all(torch.equal(param, before[name]) for name, param in copy_of(policy).items())


@pytest.mark.parametrize("learner", [MAMLTRPO, MAMLPPO, Reptile])
def test_frozen_parameters_are_not_trained_by_any_kind_of_meta_update(learner: type[MetaLearner]) -> None:
    policy, train_episodes, valid = make_problem("normal", 1, RAGGED)
    policy.get_submodule("layer1").requires_grad_(False)
    before = copy_of(policy)
    update(learner(policy, 0.1), [*train_episodes, valid])
    for name, param in copy_of(policy).items():
        assert torch.equal(param, before[name]) is name.startswith("layer1."), name


def test_anil_adapts_the_output_layer_or_the_named_head() -> None:
    rule = make_experiment(config_of().override({"algorithm": "anil"})).metalearner.rule
    assert rule is not None
    assert rule.parameters == make_policy("normal", hidden_sizes=(8,)).perceptron.layer_names[-1]
    settings = {"head": [rule.parameters[1]]}
    config = config_of().override({"algorithm": "anil", "algorithm-settings": settings})
    named = make_experiment(config).metalearner.rule
    assert named is not None
    assert named.parameters == rule.parameters[1:]


def test_meta_sgd_changes_every_step_size_and_not_the_rule_of_other_threads() -> None:
    policy, train_episodes, valid = make_problem("normal", 2, RAGGED)
    learner = MetaSGD(policy, 0.3, plan=Plan(num_steps=2))
    before = learner.rule
    metrics = update(learner, [*train_episodes, valid])
    sizes, old = learner.rule.step_size(1), before.step_size(1)
    assert isinstance(sizes, dict)
    assert isinstance(old, dict)
    assert sizes.keys() == dict(policy.named_parameters()).keys()
    for name, size in sizes.items():
        assert torch.equal(old[name], torch.full_like(size, 0.3))
        assert float((size - 0.3).abs().min()) > 0
        assert not size.requires_grad
    assert metrics["step_size/mean"] != pytest.approx(0.3, abs=1e-6)
    head = policy.perceptron.layer_names[-1]
    of_some = MetaSGD(policy, AdaptationRule(0.3, parameters=head))
    update(of_some, [train_episodes[0], valid])
    assert tuple(of_some.rule.step_size(0)) == head
    with pytest.raises(ValueError, match="step sizes of "):
        MetaSGD(make_policy("normal", hidden_sizes=())).load_state_dict(learner.state_dict())


def test_policy_of_meta_sgd_is_loaded_with_its_step_sizes(tmp_path: Path) -> None:
    train(config_of(num_batches=1).override({"algorithm": "meta-sgd"}), tmp_path, num_workers=0)
    saved = latest_intact(tmp_path / "checkpoints")[1].learner
    sizes = load_policy(tmp_path).origin.rule.step_size(0)
    assert sizes
    for name, size in sizes.items():
        assert torch.equal(size, saved[f"step_sizes.{name}"])
        assert float((size - 0.1).abs().min()) > 0


def test_penalty_of_promp_is_the_mean_over_inner_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promp, "divergence", lambda new, old: new - old)
    monkeypatch.setattr(AdamLearner, "objective", lambda learner, new, old: new[-1])
    settings = promp.ProMP.Settings(inner_kl_penalty=0.5)
    learner: Any = promp.ProMP(make_policy("normal"), plan=Plan(num_steps=2), settings=settings)
    new, old = torch.tensor([3.0, 5.0, 7.0]), torch.tensor([1.0, 1.0, 0.0])
    assert float(learner.objective(new, old)) == 7.0 + 0.5 * (2.0 + 4.0) / 2
