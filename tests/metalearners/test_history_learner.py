"""Learners of histories: sequences and predictions of algorithm distillation, targets of DPT, and refusals."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl.config import Config, load_config
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience import Histories
from maml_rl.experience.histories import EnvKind
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.metalearners.history_learner import AD, LearnedTasks
from maml_rl.policies import NormalMLPPolicy
from maml_rl.policies.heads import GaussianHead, LatentGaussianHead
from maml_rl.runs.checkpoint import Checkpoint, restore
from tests.metalearners.histories import ARMS, PULLS, bandit_config, bandit_histories
from tests.small_runs import config_of

# Equivalent to the tasks of the histories, but not among them.
HELD_OUT = [{"mean": mean} for mean in 0.9999 * np.eye(ARMS)]


def make(**settings: object) -> AD:
    learner = make_experiment(bandit_config("ad", **settings)).metalearner
    learner.learn_from(bandit_histories())
    return learner


def test_loss_is_the_mean_cross_entropy_with_smoothed_targets() -> None:
    learner = make(label_smoothing=0.2)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((4, 3, ARMS), generator=generator, dtype=torch.float64)
    actions = torch.randint(ARMS, (4, 3), generator=generator)
    probabilities = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True)
    targets = 0.2 / ARMS + 0.8 * np.eye(ARMS)[actions]
    expected = -(targets * np.log(probabilities)).sum(-1).mean()
    assert float(learner.imitation((logits,), actions)) == pytest.approx(expected, rel=1e-12)


BOX_CONFIG = {"env_name": "PointGoal-v0", "env_kwargs": {}, "fast_batch_size": 1, "observe_last": True}
SIZES = {"hidden-size": 8, "num-layers": 1, "num-heads": 2, "context": 4}


def box_config(algorithm: str, **settings: object) -> Config:
    return config_of(**BOX_CONFIG).override({"algorithm": algorithm, "algorithm-settings": SIZES | settings})


@pytest.mark.parametrize("algorithm", ["ad", "dpt", "amago-offline"])
def test_gaussians_are_squashed_into_a_box_except_in_runs_of_earlier_versions(algorithm: str, tmp_path: Path) -> None:
    made = make_experiment(box_config(algorithm))
    assert isinstance(made.policy.distributions, LatentGaussianHead)
    assert made.config.algorithm_settings["squash"] is True
    before = json.loads(made.config.model_dump_json(by_alias=True))
    del before["algorithm-settings"]["squash"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    again = make_experiment(load_config(tmp_path / "config.json"))
    assert isinstance(again.policy.distributions, GaussianHead)
    assert again.config.algorithm_settings["squash"] is False
    assert isinstance(make_experiment(box_config("ad", squash=False)).policy.distributions, GaussianHead)


def test_continuous_actions_are_learned_and_have_no_accuracy() -> None:
    learner = make_experiment(box_config("ad", **{"num-updates": 2, "batch-size": 3})).metalearner
    seen, done = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Box(-0.1, 0.1, (2,), np.float32)
    learner.learn_from(Histories([{}], [[8]], np.zeros((8, 2)), np.zeros((8, 2)), np.ones(8), EnvKind(seen, done)))
    metrics = learner.learn(learner.store_of(()), 0)
    assert metrics.keys() == {"updates", "loss"}
    assert np.isfinite(metrics["loss"])


def test_loss_of_actions_of_a_bounded_box_is_their_density_there() -> None:
    learner = make_experiment(box_config("ad")).metalearner
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn(4, 3, *learner.policy.observation_space.shape, generator=generator)
    actions = 0.2 * torch.rand(4, 3, 2, generator=generator) - 0.1
    actions[0, 0] = 0.1
    outputs = learner.policy.unroll(observations).distribution
    found = learner.imitation(outputs, actions)
    inside = (actions / 0.1).double().clamp(2e-6 - 1.0, 1.0 - 2e-6)
    mean, log_std = (each.detach().double() for each in outputs)
    density = torch.distributions.Normal(mean, log_std.exp()).log_prob(inside.atanh()) - (1.0 - inside**2).log()
    expected = -(density - np.log(0.1)).sum(-1).mean()
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-4, atol=1e-4)


def test_step_in_chunks_has_the_gradient_of_the_loss_on_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(max_grad_norm=1e9)
    observations, actions = learner.draw(np.random.default_rng(0))
    params = list(learner.policy.parameters())
    loss = learner.imitation(learner.policy.unroll(observations).distribution, actions)
    expected = torch.autograd.grad(loss, params)
    # Of different sizes.
    monkeypatch.setattr("maml_rl.metalearners.history_learner.cut", lambda num, *_: [slice(0, 5), slice(5, num)])
    found = learner.stepper(observations, actions)
    assert float(found[0]) == pytest.approx(loss.item(), rel=1e-6)
    for param, gradient in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad, gradient, rtol=1e-4, atol=1e-7)


def test_sequence_begins_like_a_trial_without_a_last_step() -> None:
    learner = make(context=3)
    observations, actions = learner.draw(np.random.default_rng(0))
    assert observations.shape == (3, 16, 1 + ARMS + 2)
    assert not observations[0].any()
    assert torch.equal(observations[1:, :, 1 : 1 + ARMS].argmax(-1), actions[:-1])
    # It may be longer than the context, as trials are.
    learner = make(context=3, sequence_length=PULLS)
    observations, actions = learner.draw(np.random.default_rng(0))
    assert observations.shape[:2] == actions.shape == (PULLS, 16)
    assert learner.policy.body.sizes.context == 3
    with pytest.raises(ValueError, match="sequence-length, 4, is shorter than the context, 8"):
        make(context=8, sequence_length=4)


@pytest.mark.slow
def test_distilled_policy_tries_one_arm_after_the_other_and_keeps_the_one_that_pays() -> None:
    experiment = make_experiment(bandit_config("ad", num_updates=80, label_smoothing=0.0, anneal_over=1))
    experiment.metalearner.learn_from(bandit_histories())
    metrics = experiment.metalearner.learn(experiment.metalearner.store_of(()), 0)
    # The arm that pays can only be found by trying; every other action is predictable.
    assert metrics["updates"] == 80
    returns = evaluate(experiment, tasks=HELD_OUT, num_workers=0).returns[:, 0, 0]
    assert np.allclose(returns, PULLS - np.arange(ARMS), atol=1.0)
    assert returns.mean() > 5.0


def test_step_size_rises_then_falls_to_zero_by_the_gradient_steps_of_the_whole_run() -> None:
    learner = make(num_updates=4, warmup=4, anneal_over=3, learning_rate=1.0)
    found = []
    for _ in range(12):
        learner._set_step_size()
        found.append(learner.optimizer.param_groups[0]["lr"])
    assert np.allclose(found, [min(1.0, (step + 1) / 4) * (1 - step / 12) for step in range(12)])


def test_tasks_of_the_histories_are_refused_in_a_test_even_without_the_data_set(tmp_path: Path) -> None:
    learner = make()
    saved = Checkpoint(1, dict(learner.policy.state_dict()), None, {"algorithm": "ad"}, learner.state_dict())
    experiment = make_experiment(bandit_config("ad"))
    restore(saved, experiment.metalearner, "ad", tmp_path)
    known = {"mean": [0.0, 1.0, 0.0, 0.0, 0.0]}
    with pytest.raises(
        ConfigError, match=r"1 of the 2 tasks are among those of the histories .* the first is"
    ) as error:
        evaluate(experiment, tasks=[HELD_OUT[0], known], num_workers=0)
    assert "\n" not in str(error.value)
    evaluate(experiment, tasks=[HELD_OUT[0]], num_workers=0)
    assert np.allclose(experiment.metalearner.source_returns, (8 + 7 + 6 + 5 + 4) / 5)


@pytest.mark.parametrize("count", [0, 1, 2, 33, 3000])
def test_tasks_of_the_histories_are_recognized_by_three_bytes_each(count: int) -> None:
    draws = np.random.default_rng(0).random((count + 1000, ARMS))
    tasks = [{"mean": draw} for draw in draws]
    packed = LearnedTasks([*tasks[:count], *tasks[:count]]).packed()
    assert (packed.shape, packed.dtype) == ((count, 3), torch.uint8)
    learned = LearnedTasks.unpacked(packed)
    assert all({"mean": draw.tolist()} in learned for draw in draws[:count])
    assert not any(task in learned for task in tasks[count:])
    assert torch.equal(learned.packed(), packed)


def test_longer_context_than_the_saved_one_and_other_histories_are_refused(tmp_path: Path) -> None:
    learner = make(context=4)
    saved = Checkpoint(1, dict(learner.policy.state_dict()), None, {"algorithm": "ad"}, learner.state_dict())
    with pytest.raises(CheckpointError, match="context of 8 steps is longer than the ring of the saved policy, 4"):
        restore(saved, make(context=8), "ad", tmp_path)
    other = make(context=4)
    other.learn_from(bandit_histories(0.5 * np.eye(ARMS)))
    with pytest.raises(CheckpointError, match="not those with which the training began"):
        restore(saved, other, "ad", tmp_path)


def test_wrong_policies_and_settings_are_refused_in_one_line() -> None:
    policy = make().policy
    with pytest.raises(TypeError, match="NormalMLPPolicy is neither"):
        AD(NormalMLPPolicy(2, 2), None)
    with pytest.raises(TypeError, match="a context of 200 steps is longer than the ring of the policy, which has 8"):
        AD(policy, None)
    with pytest.raises(ConfigError, match="add a line `histories: FOLDER`"):
        make_experiment(bandit_config("ad")).open_data()
    with pytest.raises(ConfigError, match=r"'prefetch' in .*: ad samples nothing in training; leave it out"):
        make_experiment(bandit_config("ad").override({"prefetch": 1})).open_data()
    with pytest.raises(ConfigError, match=r"'num-batches' in .*: ad learns nothing after meta-update 4"):
        make_experiment(bandit_config("ad", anneal_over=4)).open_data()


def test_unequal_histories_have_mean_returns_and_best_actions_only_of_a_family() -> None:
    histories = Histories(
        [{"mean": np.eye(ARMS)[0]}, {"mean": np.eye(ARMS)[1]}],
        [[1, 1], [1]],
        np.zeros((3, 1), np.float32),
        [0, 1, 2],
        [1.0, 5.0, 3.0],
        EnvKind(spaces.Box(0.0, 1.0, (1,), np.float32), spaces.Discrete(ARMS)),
    )
    learner = make(context=1)
    learner.learn_from(histories)
    assert learner.source_returns.tolist() == [2.0, 5.0]
    with pytest.raises(ValueError, match="the family does not know its best actions"):
        make_experiment(bandit_config("dpt", context=1)).metalearner.learn_from(histories)


def test_target_is_the_best_arm_at_every_step_for_any_pull() -> None:
    learner = make_experiment(bandit_config("dpt")).metalearner
    learner.learn_from(bandit_histories())
    observations, best = learner.draw(np.random.default_rng(0))
    assert best.shape == (PULLS, 16)
    # A learner that continues until an arm pays ends at the best arm, after pulling others.
    assert torch.equal(best, best[-1:].expand(PULLS, -1))
    assert torch.equal(observations[-1, :, 1 : 1 + ARMS].argmax(-1), best[-1])
    assert len(best.unique()) == ARMS


@pytest.mark.parametrize(("acts", "deterministic"), [("sampled", False), ("likeliest", True)])
def test_tests_draw_actions_or_take_the_most_probable_one(acts: str, deterministic: bool) -> None:
    learner = make_experiment(bandit_config("dpt", acts=acts)).metalearner
    sampler = Mock()
    learner.test(sampler, [{}])
    _, plan = sampler.collect.call_args.args
    assert (plan.whole_trials, plan.deterministic) == (True, deterministic)
