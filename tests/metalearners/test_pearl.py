"""PEARL: its posterior, its rounds of adaptation, learning, resumed runs, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maml_rl.config import Config, load_config
from maml_rl.experience import Steps
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners.pearl import PEARL, Posterior, product_of_gaussians
from maml_rl.policies import GRUPolicy
from maml_rl.policies.soft_actors import CONTEXT, ContextActor
from tests.metalearners.small_algorithms import small
from tests.synthetic import randn

WIND: dict[str, Any] = {"env_name": "Wind-v0", "max_episode_steps": 5}


def pearl(settings: dict[str, Any] | None = None, **values: Any) -> Config:
    config = small("pearl", fast_batch_size=1, slots_per_task=1, num_steps=1, num_batches=4)
    keys = {key.replace("_", "-"): value for key, value in values.items()}
    return config.override({"algorithm-settings": settings or {}, **keys})


def learner_of(config: Config) -> PEARL:
    learner = make_experiment(config).metalearner
    assert isinstance(learner, PEARL)
    return learner


def test_posterior_is_the_product_of_its_factors_in_any_order() -> None:
    means, variances, mask = randn(2, 5, 3), randn(2, 5, 3, seed=1).exp(), torch.ones(2, 5)
    mask[1, 3:] = 0.0
    found = product_of_gaussians(means, variances, mask)
    # The density of a product, up to a constant, on a grid.
    points = torch.linspace(-8.0, 8.0, 4001).double()
    for task in range(2):
        for entry in range(3):
            real = mask[task].bool()
            factors = torch.distributions.Normal(means[task, real, entry].double(), variances[task, real, entry].sqrt())
            density = factors.log_prob(points[:, None]).sum(1)
            weights = torch.softmax(density, 0)
            mean = float((weights * points).sum())
            assert float(found.mean[task, entry]) == pytest.approx(mean, abs=1e-4)
            spread = float((weights * (points - mean).square()).sum())
            assert float(found.variance[task, entry]) == pytest.approx(spread, rel=1e-3)
    order = torch.tensor([4, 2, 0, 1, 3])
    again = product_of_gaussians(means[:, order], variances[:, order], mask[:, order])
    torch.testing.assert_close(again.mean, found.mean)
    normal = torch.distributions.Normal(found.mean, found.variance.sqrt())
    prior = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
    torch.testing.assert_close(found.divergence(), torch.distributions.kl_divergence(normal, prior).sum(-1))


def random_steps(num_tasks: int, num: int, generator: torch.Generator) -> Steps:
    """Transitions (M, N, ...) of `pearl()`."""
    shape = (num_tasks, num)
    return Steps(
        *(torch.randn((*shape, 2), generator=generator).clamp(-0.9, 0.9) for _ in range(2)),
        torch.randn(shape, generator=generator),
        torch.randn((*shape, 2), generator=generator),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape, dtype=torch.bool),
        torch.ones(shape),
    )


def test_step_in_chunks_of_tasks_is_that_on_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunks in ([slice(0, 5)], [slice(0, 2), slice(2, 5)]):
        monkeypatch.setattr("maml_rl.metalearners.pearl.cut", lambda *_, chunks=chunks: chunks)
        learner, generator = learner_of(pearl()), torch.Generator().manual_seed(0)
        losses = learner.stepper(*learner.inputs_of(random_steps(5, 6, generator), random_steps(5, 7, generator)))
        trained = [param for each in learner.optimizers.values() for param in each.param_groups[0]["params"]]
        found.append((losses, [param.grad for param in trained]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_each_loss_has_gradients_only_for_its_own_networks() -> None:
    learner = learner_of(pearl())
    generator = torch.Generator().manual_seed(0)
    before = {name: value.clone() for name, value in learner.state_dict().items() if isinstance(value, Tensor)}
    actor = {name: value.clone() for name, value in learner.policy.state_dict().items()}
    learner.stepper(*learner.inputs_of(random_steps(2, 5, generator), random_steps(2, 7, generator)))
    after = learner.state_dict()
    for prefix in ("encoder.", "critic.", "target.", "log_temperature"):
        assert any(not torch.equal(after[n], value) for n, value in before.items() if n.startswith(prefix)), prefix
    moved = {name for name, value in learner.policy.state_dict().items() if not torch.equal(value, actor[name])}
    assert CONTEXT not in moved
    assert "layer0.weight" in moved
    assert learner.policy.context.grad is None


def test_encoder_does_not_depend_on_the_units_of_actions() -> None:
    found = []
    for scale in (0.1, 1.0):
        learner = learner_of(pearl(env_kwargs={"normalization_scale": scale}))
        zeros = torch.zeros(2, 6, dtype=torch.bool)
        places, moves = randn(2, 6, 2), randn(2, 6, 2, seed=1).tanh()
        seen = Steps(places, scale * moves, randn(2, 6, seed=2), places, zeros, zeros, torch.ones(2, 6))
        found.append(learner.encoder(learner._transitions(seen), seen.mask).mean)
    torch.testing.assert_close(*found)


def test_context_sees_the_sparse_reward_and_the_critics_the_dense_one() -> None:
    kwargs = {"start": "origin", "reward": "distance"}
    config = pearl({"context-reward": "sparse_reward"}, env_name="SemiCircle-v0", env_kwargs=kwargs)
    experiment = make_experiment(config)
    learner = experiment.metalearner
    assert isinstance(learner, PEARL)
    with make_sampler(experiment, num_workers=0) as sampler:
        (first, *_) = learner.collect(sampler, sampler.sample_tasks(2)).phases
    first.infos["sparse_reward"][0, 3] = 0.75
    learner.experience["all"].append(first)
    steps = learner.experience["all"].sample_transitions(np.random.default_rng(0), 400, tasks=first.tasks)
    for seen in (first, steps):
        inputs = learner._transitions(seen)
        assert torch.equal(inputs[..., -1], seen.infos["sparse_reward"])
        assert float(inputs[..., -1].max()) == 0.75
        assert float(seen.rewards.max()) < 0.0


def test_actor_acts_under_the_context_of_each_task_and_another_policy_is_refused() -> None:
    actor = make_experiment(pearl()).policy
    assert isinstance(actor, ContextActor)
    with pytest.raises(TypeError, match="GRUPolicy"):
        PEARL(GRUPolicy(actor.observation_space, actor.action_space, 4), None)
    rows, contexts = randn(3, 4, 2), randn(3, 2, seed=1)
    stacked = actor.stack_parameters(3, {**dict(actor.named_parameters())})
    stacked[CONTEXT] = contexts
    found = actor.distribution_parameters(rows, stacked)
    for task in range(3):
        expected = actor.under(rows[task], contexts[task].expand(4, -1))
        torch.testing.assert_close(tuple(mine[task] for mine in found), tuple(expected))


def test_rounds_draw_contexts_from_the_prior_and_then_from_the_posterior() -> None:
    experiment = make_experiment(pearl())
    learner = experiment.metalearner
    with make_sampler(experiment, num_workers=0, evaluation=True) as sampler:
        tasks = sampler.sample_tasks(3)
        adapted = learner.adapt(sampler, tasks, 2)
        sampler.seek(0)
        tested = learner.test(sampler, tasks, 2)
        assert [each.digest() for each in tested.phases[:2]] == [each.digest() for each in adapted.phases]
        assert len(tested.phases) == 3
        assert learner.columns == "round"
        sampler.seek(0)
        prior = sampler.generator("context").standard_normal((3, 2), np.float32)
        own = dict(experiment.policy.named_parameters())
        first = sampler.rollout(tasks, {**own, CONTEXT: torch.from_numpy(prior)}, deterministic=True)
        assert first.digest() == adapted.phases[0].digest()
    assert adapted.params is not None
    assert adapted.params[CONTEXT].shape == (3, 2)


def test_every_round_of_the_prior_draws_its_own_context_and_adds_to_the_posterior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = make_experiment(pearl({"prior-rounds": 2, "warmup-steps": 2_000}, num_steps=3))
    learner = experiment.metalearner
    assert isinstance(learner, PEARL)
    seen: list[int] = []
    infer = learner.encoder.forward

    def watched(transitions: Tensor, mask: Tensor) -> Posterior:
        seen.append(transitions.shape[1])
        return infer(transitions, mask)

    monkeypatch.setattr(learner.encoder, "forward", watched)
    with make_sampler(experiment, num_workers=0) as sampler:
        tasks = sampler.sample_tasks(2)
        batch = learner.collect(sampler, tasks)
        # The posteriors of rounds 2 and 3 use the 10 steps of each round before them.
        assert seen == [20, 30]
        # Points start at the origin and act without noise: only a different context can change their path.
        first, second = learner.adapt(sampler, tasks, 2).phases
        assert not torch.equal(first.observations, second.observations)
        learner.update(batch)
    assert [learner.experience[name].num_trials for name in ("from_prior", "all")] == [4, 8]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pearl_learns_to_walk_to_goals_that_only_the_rewards_reveal() -> None:
    steps_of_adam = {"learning-rate": 3e-3, "temperature-learning-rate": 1e-3, "initial-temperature": 0.01}
    settings: dict[str, Any] = {**steps_of_adam, "encoder-sizes": [32], "kl-weight": 0.01}
    learner = learner_of(pearl(settings, hidden_sizes=[32, 32], gamma=0.0))
    generator = torch.Generator().manual_seed(0)

    def steps(goals: Tensor, num: int) -> Steps:
        """Random moves, with the negative remaining distance as reward."""
        seen, moves = (2.0 * torch.rand((len(goals), num, 2), generator=generator) - 1.0 for _ in range(2))
        after, no = seen + 0.5 * moves, torch.zeros((len(goals), num), dtype=torch.bool)
        rewards = -(after - goals[:, None]).norm(dim=-1)
        return Steps(seen, scale * moves, rewards, after, no, no, torch.ones_like(rewards))

    scale = learner.policy.distributions.half_range
    for _ in range(900):
        goals = 2.0 * torch.rand((16, 2), generator=generator) - 1.0
        learner.stepper(*learner.inputs_of(steps(goals, 20), steps(goals, 32)))
    goals = torch.tensor([[0.8, 0.8], [-0.8, 0.8], [0.8, -0.8], [-0.8, -0.8]])
    context, states = steps(goals, 20), torch.zeros(4, 2)
    with torch.no_grad():
        posterior = learner.encoder(learner._transitions(context), context.mask)
        means, _ = learner.policy.under(states, posterior.mean)
    # From the center, the action under the posterior of a task goes toward its goal.
    assert bool((torch.tanh(means) * goals > 0.1).all()), means


def test_encoder_sees_next_observations_by_default_where_tasks_differ_in_dynamics() -> None:
    for config, sees in (
        (pearl(), False),
        (pearl({"next-observations": True}), True),
        (pearl(**WIND), True),
        (pearl({"next-observations": False}, **WIND), False),
    ):
        experiment = make_experiment(config)
        learner = experiment.metalearner
        assert isinstance(learner, PEARL)
        assert experiment.config.algorithm_settings["next-observations"] is sees
        (size,) = learner.policy.observation_shape
        with make_sampler(experiment, num_workers=0) as sampler:
            episodes = sampler.rollout(sampler.sample_tasks(2))
        seen = learner._transitions(episodes)
        assert seen.shape[-1] == size + 2 + 1 + (size if sees else 0)
        if sees:
            assert torch.equal(seen[..., -size:], episodes.next_observations.float())
        assert learner.encoder.layers[0].in_features == seen.shape[-1]


def test_run_of_an_earlier_version_whose_encoder_saw_less_is_loaded_and_continued(tmp_path: Path) -> None:
    train(pearl({"next-observations": False}, num_batches=2, **WIND), tmp_path / "run", num_workers=0)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    del recorded["algorithm-settings"]["next-observations"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(recorded))
    (tmp_path / "run" / "SHA256SUMS").unlink()
    load_policy(tmp_path / "run")
    again = load_config(tmp_path / "run" / "config.json").override({"num-batches": 3})
    train(again, tmp_path / "run", num_workers=0, resume=True)
    assert load_config(tmp_path / "run" / "config.json").algorithm_settings["next-observations"] is False
