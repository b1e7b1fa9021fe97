"""AMAGO: losses, gradients and a step against plain torch code; scale of rewards; what is refused."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from maml_rl.config import Config, load_config
from maml_rl.config.yaml_source import Mapping
from maml_rl.envs import make_vector_env
from maml_rl.envs.observing import LastStepParts
from maml_rl.errors import AlgorithmError, ConfigError
from maml_rl.experience.hindsight import Hindsight
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners import Plan
from maml_rl.metalearners.amago import AMAGO, OfflineAMAGO
from maml_rl.policies import GRUPolicy, MultiCategorical, NormalMLPPolicy  # noqa: F401
from maml_rl.runs.metrics import read_metrics
from tests.metalearners.histories import ARMS, PULLS, bandit_config, bandit_histories
from tests.metalearners.plain_two_hot import cross_entropy, decoded

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (5,), np.float64)
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "squashed": spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 1.0]), dtype=np.float64),
}
GAMMA, FURTHER, HIDDEN, CRITICS, BINS, LIMIT, MULTIPLIER = 0.97, 0.8, 6, 3, 11, 50.0, 1.5
PAIR = [2, 0]
CENTER, HALF = torch.tensor([0.0, 0.5]).double(), torch.tensor([2.0, 0.5]).double()


def make_learner(kind: str, **settings: Any) -> AMAGO:
    policy = GRUPolicy(OBSERVATIONS, ACTIONS[kind], HIDDEN, value="none", squash=kind == "squashed", seed=3).double()
    given = AMAGO.Settings.model_validate(
        {
            "hidden-size": HIDDEN,
            "critic-layers": [7],
            "further-discounts": [FURTHER],
            "num-critics": CRITICS,
            "num-bins": BINS,
            "largest-value": LIMIT,
            "reward-multiplier": MULTIPLIER,
            **settings,
        }
    )
    learner = AMAGO(policy, None, settings=given, plan=Plan(gamma=GAMMA), seed=1)
    learner.networks.double()
    with torch.no_grad():
        # Values that are far from each other, so that the filter and the minimum matter.
        learner.critics.layers.weight1.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(2))
        learner.targets.load_state_dict({name: 1.1 * value for name, value in learner.critics.state_dict().items()})
    learner.optimizer.param_groups[0].update(lr=1e-2, weight_decay=0.1)
    return learner


def make_trials(kind: str) -> tuple[Tensor, ...]:
    """Three trials of 4, 2 and 3 steps; the second ends in a terminal state, the others are cut off."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([4, 2, 3])
    mask = (torch.arange(4)[:, None] < lengths).double()
    seen, rewards = draw(5, 3, 5), 5.0 * draw(4, 3) * mask
    terminal = torch.zeros(4, 3, dtype=torch.float64)
    terminal[1, 1] = 1.0
    actions = torch.randint(3, (4, 3), generator=generator) if kind == "discrete" else draw(4, 3, 2)
    return seen, actions, rewards, terminal, mask


class Plain:
    """The same quantities by torch's layers, trial by trial and critic by critic."""

    def __init__(self, learner: AMAGO, kind: str, trials: tuple[Tensor, ...]) -> None:
        self.learner, self.kind = learner, kind
        self.seen, self.actions, self.rewards, self.terminal, self.mask = trials
        if kind == "squashed":
            # Recorded as they were before squashing.
            self.actions = CENTER + HALF * torch.tanh(self.actions)
        self.params = {name: value.detach().clone().requires_grad_() for name, value in self.named().items()}
        with torch.random.fork_rng():
            gru = nn.GRU(5, HIDDEN).double()
        for name, _ in list(gru.named_parameters()):
            delattr(gru, name)
            setattr(gru, name, self.params[f"policy.core.{name}"])
        gru._flat_weights = [getattr(gru, name) for name in gru._flat_weights_names]
        self.units = gru(self.seen)[0]

    def named(self) -> dict[str, Tensor]:
        of_policy = {f"policy.{name}": value for name, value in self.learner.policy.named_parameters()}
        return of_policy | {f"critics.{name}": value for name, value in self.learner.critics.named_parameters()}

    def value(self, critic: int, units: Tensor, action: Tensor | int, *, target: bool = False) -> Tensor:
        """Return logits (G, bins) of one action by one critic."""
        params = (
            {f"critics.{name}": value for name, value in self.learner.targets.named_parameters()}
            if target
            else self.params
        )
        inputs = units
        if isinstance(action, Tensor):
            inputs = torch.cat([units, (action - CENTER) / HALF if self.kind == "squashed" else action])
        first, bias = params["critics.layers.weight0"], params["critics.layers.bias0"]
        hidden = F.relu(inputs @ first[:, 7 * critic : 7 * critic + 7] + bias[7 * critic : 7 * critic + 7])
        out = hidden @ params["critics.layers.weight1"][critic] + params["critics.layers.bias1"][critic, 0]
        return out.view(3, 2, BINS)[action] if self.kind == "discrete" else out.view(2, BINS)

    def of_policy(self, units: Tensor, noise: Tensor | None, values: Any) -> Tensor:
        """Return the mean of values(action) over the policy's actions."""
        out = F.linear(units, self.params["policy.head.weight"], self.params["policy.head.bias"])
        if noise is None:
            return sum(out.softmax(-1)[each] * values(each) for each in range(3))
        if self.kind == "squashed":
            mean, log_std = out.chunk(2)
            return values(CENTER + HALF * torch.tanh(mean + noise * log_std.exp()))
        return values(out + noise * self.params["policy.sigma"].exp())

    def losses(self, temperature: float | None, share: float) -> tuple[Tensor, Tensor]:
        noise = None
        if self.kind != "discrete":
            drawn = torch.randn((5, 3, 2), generator=self.learner.torch_generator("actions"))
            noise = drawn.double()
        of_critics, of_actor, total = 0.0, 0.0, self.mask.sum()
        for step, trial in self.mask.nonzero().tolist():
            now, later = self.units[step, trial], self.units[step + 1, trial]
            with torch.no_grad():
                following = self.of_policy(
                    later,
                    None if noise is None else noise[step + 1, trial],
                    lambda action, later=later: torch.stack(
                        [decoded(self.value(each, later, action, target=True), LIMIT) for each in PAIR]
                    ),
                ).amin(0)
            action = self.actions[step, trial]
            chosen = int(action) if self.kind == "discrete" else action
            logits = [self.value(each, now, chosen) for each in range(CRITICS)]
            for number, gamma in enumerate((FURTHER, GAMMA)):
                discount = gamma * (1.0 - float(self.terminal[step, trial]))
                target = MULTIPLIER * float(self.rewards[step, trial]) + discount * float(following[number])
                of_critics += sum(cross_entropy(each[number], target, LIMIT) for each in logits) / (2 * CRITICS)

            def usual(action: Any, units: Tensor = now) -> Tensor:
                return sum(decoded(self.value(each, units, action), LIMIT)[1] for each in range(CRITICS)) / CRITICS

            own = None if noise is None else noise[step, trial]
            taken = sum(decoded(each, LIMIT)[1] for each in logits) / CRITICS
            advantage = float((taken - self.of_policy(now, own, usual)).detach())
            weight = float(advantage > 0) if temperature is None else min(20.0, np.exp(advantage / temperature))
            out = F.linear(now, self.params["policy.head.weight"], self.params["policy.head.bias"])
            if self.kind == "discrete":
                log_prob = out.log_softmax(-1)[chosen]
            elif self.kind == "squashed":
                mean, log_std = out.chunk(2)
                inside = (action - CENTER) / HALF
                log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(torch.atanh(inside)).sum()
                log_prob = log_prob - (HALF * (1.0 - inside**2)).log().sum()
            else:
                log_prob = torch.distributions.Normal(out, self.params["policy.sigma"].exp()).log_prob(action).sum()
            of_actor += -(1.0 - share) * weight * log_prob
            if share:
                of_actor += -share * self.of_policy(now, own, lambda action, now=now: self.fixed(action, now))
        return of_critics / total, of_actor / total

    def fixed(self, action: Any, units: Tensor) -> Tensor:
        """Return the mean value at units and critics that are constants; gradients go to the action alone."""
        kept, self.params = self.params, {name: value.detach() for name, value in self.params.items()}
        try:
            values = [decoded(self.value(each, units.detach(), action), LIMIT)[1] for each in range(CRITICS)]
            return sum(values) / CRITICS
        finally:
            self.params = kept


@pytest.mark.parametrize(
    ("kind", "temperature", "share"), [("discrete", 2.0, 0.3), ("box", None, 0.0), ("squashed", 2.0, 0.3)]
)
def test_losses_gradients_and_a_step_agree_with_plain_torch_code(
    kind: str, temperature: float | None, share: float
) -> None:
    learner = make_learner(kind, **{"filter-temperature": temperature, "policy-gradient-share": share})
    trials = make_trials(kind)
    plain = Plain(learner, kind, trials)
    expected = plain.losses(temperature, share)
    again = make_learner(kind, **{"filter-temperature": temperature, "policy-gradient-share": share})
    found = again.losses(*trials, *again._noise(trials[0]), pair=PAIR)
    assert 0.0 < found[3].item() < 1.0
    torch.testing.assert_close(found[:2], expected, rtol=1e-12, atol=1e-12)
    (10.0 * expected[0] + expected[1]).backward()
    (10.0 * found[0] + found[1]).backward()
    own = dict(again.policy.named_parameters(prefix="policy")) | dict(again.critics.named_parameters(prefix="critics"))
    found, expected = (
        {name: 0.0 * params[name] if params[name].grad is None else params[name].grad for name in own}
        for params in (own, plain.params)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_step_is_one_of_adamw_on_the_clipped_gradient_and_moves_the_targets() -> None:
    settings = {"policy-gradient-share": 0.3, "max-grad-norm": 0.5, "tau": 0.25}
    learner, reference = (make_learner("box", **settings) for _ in range(2))
    trials = make_trials("box")
    pair = reference.generator("critics").permutation(CRITICS)[:2].tolist()
    losses = reference.losses(*trials, *reference._noise(trials[0]), pair=pair)
    (10.0 * losses[0] + losses[1]).backward()
    params = reference.stepper.params
    before = [param.detach().clone() for param in reference.targets.parameters()]
    norm = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
    assert norm > 0.5
    expected = []
    for param in params:
        gradient = param.grad * 0.5 / (norm + 1e-6)
        # The first step of Adam goes by the sign of the gradient.
        expected.append(param.detach() * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8))
    learner.stepper(*learner.inputs_of(*trials))
    for param, value in zip(learner.stepper.params, expected, strict=True):
        torch.testing.assert_close(param.detach(), value, rtol=1e-12, atol=1e-12)
    for target, old, new in zip(learner.targets.parameters(), before, learner.critics.parameters(), strict=True):
        torch.testing.assert_close(target, old + 0.25 * (new.detach() - old), rtol=1e-12, atol=1e-12)


def config_of(env_name: Any, settings: dict[str, Any], **values: Any) -> Config:
    """Return the config of a small run."""
    of_run = {"hidden-size": 8, "num-bins": 9, "critic-layers": [6], "batch-size": 4, "num-updates": 2}
    keys = {key.replace("_", "-"): value for key, value in values.items()}
    given = {"env-name": env_name, "algorithm": "amago", "observe-last": True, "meta-batch-size": 4, "gamma": 0.9}
    given |= {"algorithm-settings": of_run | {"warmup-trials": 1} | settings}
    return Config.from_mapping(Mapping("the test", given | keys))


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("env_name", "settings", "shape"),
    [
        # Padded to 81 numbers, and as many that say which are real; the second to 20, and 6 for the entries of actions.
        (["DarkRoom-v0", "GridNavi-v0"], {"cell": "gru", "sequence-length": 7}, (162,)),
        (["HalfCheetahVel-v5", "HopperVel-v5"], {"cell": "gru"}, (46,)),
        ("PixelNavigation-v0", {"context": 8}, None),
    ],
    ids=["discrete", "box", "images"],
)
def test_mixtures_of_padded_spaces_and_images_train_and_are_tested(
    env_name: Any, settings: dict[str, Any], shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    config = config_of(env_name, settings, max_episode_steps=5, fast_batch_size=2, num_batches=2)
    digests = []
    for workers in (0, 2) if "DarkRoom-v0" in env_name else (0,):
        train(config, tmp_path / str(workers), num_workers=workers)
        digests.append([row["digest"] for row in read_metrics(tmp_path / str(workers) / "metrics.jsonl")])
    assert digests == digests[:1] * len(digests)
    experiment = make_experiment(config)
    experiment.restore("last", tmp_path / "0")
    found = evaluate(experiment, 4, num_workers=0)
    assert found.returns.shape == (4, 2, 1)
    assert np.isfinite(found.returns).all()
    if shape is not None:
        (own,) = make_vector_env(config.env_name, config.env_kwargs).single_observation_space.shape
        assert own == shape[0]
        assert [len(part.tasks) for name, part in found.parts().items()] == [2, 2]


def test_hindsight_relabels_with_tasks_of_the_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relabeled: list[Any] = []
    relabel = Hindsight.relabel

    def noted(self: Hindsight, trials: Any, tasks: Any) -> None:
        relabeled.extend(tasks)
        relabel(self, trials, tasks)

    monkeypatch.setattr(Hindsight, "relabel", noted)
    tasks = {"distribution": "split", "train": {"goal_0": [0, 1]}, "test": {"goal_0": [2, 3]}}
    values = {"env_kwargs": {"size": 5}, "tasks": tasks, "max_episode_steps": 4, "fast_batch_size": 1, "num_batches": 6}
    train(config_of("DarkRoom-v0", {"cell": "gru", "hindsight-share": 1.0}, **values), tmp_path, num_workers=0)
    assert len(relabeled) > 20
    assert len({tuple(task["goal"]) for task in relabeled}) >= 2
    assert {task["goal"][0] for task in relabeled} <= {0.0, 1.0}


def test_replay_of_an_earlier_version_with_squashed_actions_is_refused() -> None:
    sizes = {"max_episode_steps": 4, "fast_batch_size": 1, "num_batches": 2}
    experiment = make_experiment(config_of("PointGoal-v0", {"cell": "gru"}, **sizes))
    state = experiment.metalearner.state_dict()
    del state["actions_before_squashing"]
    # Without its replay the learner continues.
    experiment.metalearner.load_state_dict(state)
    with make_sampler(experiment, num_workers=0) as sampler:
        for number in range(2):
            experiment.metalearner.learn(experiment.metalearner.collect(sampler, sampler.sample_tasks(4)), number)
        experiment.metalearner.load_state_dict(state)
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(4))
        with pytest.raises(AlgorithmError, match="an earlier version of amago has recorded the trials of this run"):
            experiment.metalearner.learn(batch, 2)


def test_recorded_ends_and_what_follows_reach_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"num_bins": 9, "critic_layers": [6], "normalize_observations": True, "num_updates": 3}
    learner = make_experiment(bandit_config("amago-offline", **settings)).metalearner
    learner.learn_from(bandit_histories())
    found: list[tuple[Tensor, ...]] = []
    inputs_of = learner.inputs_of
    monkeypatch.setattr(learner, "inputs_of", lambda *trials: found.append(trials) or inputs_of(*trials))
    learner.learn(learner.store_of(()), 0)
    assert len(found) == 3
    parts = LastStepParts.of(spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(ARMS))
    for seen, actions, rewards, terminal, mask in found:
        assert seen.shape[:2] == (PULLS + 1, 16)
        # The last pull ends the history, in a terminal state, after which the policy is shown it.
        assert terminal.sum(0).tolist() == terminal[-1].tolist() == mask[-1].tolist() == [1.0] * 16
        assert torch.equal(seen[1:, :, parts.last_reward].squeeze(-1), rewards)
        assert torch.equal(seen[1:, :, parts.last_action].argmax(-1), actions)
        assert seen[-1, :, parts.last_termination].all()
    # The moments follow those of the observations, of which the last reward has no bounds.
    mean, expected = learner.policy.observation_mean[parts.last_reward], 0.0
    for seen, *_ in found:
        expected += learner.settings.tau * (float(seen[:-1, :, parts.last_reward].mean()) - expected)
    assert mean.item() == pytest.approx(expected, rel=1e-5)


def test_policy_without_a_memory_is_refused() -> None:
    with pytest.raises(TypeError, match="amago trains a GRUPolicy or TransformerPolicy"):
        AMAGO(NormalMLPPolicy(3, 1), None)


@pytest.mark.parametrize("on_device", [False, True])
def test_normalizing_moments_follow_the_observations_and_leave_bounded_ones(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maml_rl.metalearners.amago.records_steps", lambda device: on_device)
    bounds = np.array([np.inf, np.inf, 1.0, np.inf, 1.0])
    policy = GRUPolicy(
        spaces.Box(-bounds, bounds, dtype=np.float64),
        ACTIONS["discrete"],
        HIDDEN,
        value="none",
        normalize_observations=True,
    ).double()
    settings = AMAGO.Settings.model_validate({"tau": 0.25, "normalize-observations": True})
    learner = AMAGO(policy, None, settings=settings, plan=Plan(gamma=GAMMA))
    trials = 50.0 + 20.0 * torch.randn(100, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = (torch.arange(100)[:, None] < torch.tensor([100, 80, 1, 99, 60])).float()
    seen = trials[mask > 0]
    learner._follow(trials, mask)
    is_normalized = torch.tensor([True, True, False, True, False])
    mean, std = policy.observation_mean, policy.observation_std
    torch.testing.assert_close(mean, torch.where(is_normalized, 0.25 * seen.mean(0), 0.0))
    for _ in range(100):
        learner._follow(trials, mask)
    torch.testing.assert_close(mean, torch.where(is_normalized, seen.mean(0), 0.0))
    torch.testing.assert_close(std, torch.where(is_normalized, seen.std(0, correction=0), 1.0))


def test_rewards_are_normalized_in_mixtures_except_in_runs_of_earlier_versions(tmp_path: Path) -> None:
    made = make_experiment(config_of(["DarkRoom-v0", "GridNavi-v0"], {}))
    assert made.config.algorithm_settings["normalize-rewards"] is True
    assert made.policy._compresses
    before = json.loads(made.config.model_dump_json(by_alias=True))
    del before["algorithm-settings"]["normalize-rewards"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    again = make_experiment(load_config(tmp_path / "config.json"))
    assert again.config.algorithm_settings["normalize-rewards"] is False
    assert not again.policy._compresses
    single = make_experiment(config_of("DarkRoom-v0", {}))
    assert single.config.algorithm_settings["normalize-rewards"] is False
    assert not single.policy._compresses
    with pytest.raises(ConfigError, match="relabeled rewards are not normalized"):
        make_experiment(config_of("DarkRoom-v0", {"normalize-rewards": True, "hindsight-share": 0.5}))


@pytest.mark.parametrize("cell", ["gru", "transformer"])
def test_memory_sees_the_last_reward_as_its_symlog_in_steps_and_in_updates(cell: str) -> None:
    """A reward of 1000 is 6.9 for the memory: a policy without compression gets that number itself."""
    env = SimpleNamespace(
        single_observation_space=OBSERVATIONS, single_action_space=ACTIONS["discrete"], max_episode_steps=5
    )
    sizes: dict[str, Any] = {"cell": cell, "hidden-size": 8, "normalize-rewards": True}
    sizes |= {"context": 8, "num-layers": 1, "num-heads": 2} if cell == "transformer" else {}
    config = Config.from_mapping(Mapping("the test", {"env-name": "DarkRoom-v0", "observe-last": True}))
    of_offline = OfflineAMAGO.Settings.model_validate(sizes)
    policies = [
        AMAGO.make_policy(env, config, AMAGO.Settings.model_validate(sizes | {"buffer-steps": 10_000})),
        OfflineAMAGO.make_policy(env, config, of_offline),
    ]
    seen = torch.randn(5, 3, 5, generator=torch.Generator().manual_seed(0))
    seen[..., -2] *= 1000.0
    shown = seen.clone()
    shown[..., -2] = seen[..., -2].sign() * torch.log(1.0 + seen[..., -2].abs())
    for policy in policies:
        plain = copy.deepcopy(policy)
        plain._compresses = False
        torch.testing.assert_close(policy.unroll(seen).units, plain.unroll(shown).units)
        noise, memory = torch.full((1, 3, policy.noise_size), 0.5), policy.initial_memory(3)
        found, expected = (
            each.act(rows[:1], noise, tuple(kept.unsqueeze(0) for kept in memory))[1]
            for each, rows in ((policy, seen), (plain, shown))
        )
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
