"""The protocol of metalearners: names, settings, and state that is kept from one run to the next."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl.adaptation import AdaptationRule, adapt, reinforce
from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.derivatives import PhaseOutcome
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import adapt_to_task, load_policy
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners import MAMLTRPO, EpisodeStore, MetaLearner, find_metalearner, register
from maml_rl.metalearners.losses import dice_and_divisor, likelihood_ratio, likelihood_ratio_and_divisor
from maml_rl.metalearners.registry import algorithm_of
from maml_rl.policies import Policy
from tests.small_runs import config_of as config_of_run
from tests.synthetic import make_policy

SHIFT = "tests.metalearners.test_metalearner:Shift"


class Shift(MetaLearner):
    """Takes steps of several optimizers with gradients of ones; two have other sizes at every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        first, second, *_ = self.policy.parameters()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.1)
        self.optimizers = {
            "critic": torch.optim.Adam([first], lr=torch.tensor(0.1)),
            "slow": torch.optim.SGD([first, second], lr=0.01, momentum=0.9),
        }
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizers["slow"], 0.1, total_iters=3)

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        assert self.optimizer is not None
        for index, param in enumerate(self.policy.parameters()):
            param.grad = torch.full_like(param, 1.0 + index)
        for optimizer in (self.optimizer, *self.optimizers.values()):
            optimizer.step()
        self.schedule.step()
        for halved in (self.optimizer, self.optimizers["critic"]):
            halved.param_groups[0]["lr"] *= 0.5
        return {}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])


def config_of(text: str) -> Config:
    return Config.from_mapping(parse_mapping(f"env-name: a\n{text}", "x.yaml"))


def message_of(text: str, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        algorithm_of(config_of(text).override(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_algorithm_is_found_by_its_name_which_is_taken_once_and_by_module_and_class() -> None:
    assert find_metalearner("maml-trpo") is MAMLTRPO
    assert find_metalearner(SHIFT).__qualname__ == "Shift"
    register("maml-trpo", MAMLTRPO)
    with pytest.raises(ValueError, match="the name 'maml-trpo' is taken"):
        register("maml-trpo", Shift)
    with pytest.raises(ValueError, match="must not contain a colon"):
        register("a:b", Shift)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maml-trop", "unknown algorithm 'maml-trop'; did you mean 'maml-trpo'?"),
        (
            "nowhere:Learner",
            "cannot import the algorithm 'nowhere:Learner' (ModuleNotFoundError: No module named 'nowhere'); put",
        ),
        ("math:Learner", "the module math has no 'Learner'"),
        ("math:pi", "'math:pi' is not a metalearner; make it a subclass"),
    ],
)
def test_unknown_algorithm_is_refused_in_one_line(name: str, message: str) -> None:
    found = message_of(f"algorithm: {name}")
    assert found.startswith("'algorithm' in x.yaml, line 2: ")
    assert message in found


def test_settings_in_the_section_and_at_the_top_level_are_equivalent() -> None:
    _, nested, one = algorithm_of(config_of("algorithm-settings:\n  max-kl: 0.5\n  first-order: true\n"))
    _, flat, other = algorithm_of(config_of("max-kl: 0.5\nfirst-order: true\n"))
    assert nested == flat == MAMLTRPO.Settings.model_validate({"max-kl": 0.5, "first-order": True})
    assert one.differences(other) == []
    assert one.algorithm_settings["cg-iters"] == 10, "the config of a run has every setting written out"
    again = Config.from_mapping(parse_mapping(one.to_json(), "config.json"))
    assert algorithm_of(again)[2].differences(one) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-kl: 0\n", "'max-kl' in x.yaml, line 2: expected more than 0.0, got 0 (trust region"),
        ("algorithm-settings:\n  cg-iters: ten\n", "'cg-iters' in x.yaml, line 3: expected an integer, got 'ten'"),
        ("algorithm-settings:\n  cg-iter: 5\n", "unknown key 'cg-iter' in x.yaml, line 3; did you mean 'cg-iters'?"),
        (
            "max-kl: 0.1\nalgorithm-settings:\n  max-kl: 0.2\n",
            "two values for 'max-kl' in x.yaml, line 2; keep the one below 'algorithm-settings'",
        ),
        (
            f"algorithm: {SHIFT}\nmax-kl: 0.1\n",
            "unknown key 'max-kl' in x.yaml, line 3; it is a setting of maml-trpo, and the algorithm is tests.",
        ),
        (
            "algorithm: reptile\nalgorithm-settings:\n  num-updates: 3\n",
            "unknown key 'num-updates' in x.yaml, line 4; it is a setting of maml-ppo, promp, anil, meta-sgd, cavia, "
            "rsac, pearl, amago, amago-offline, ad, dpt, and the algorithm is reptile",
        ),
    ],
)
def test_wrong_setting_is_refused_with_file_line_and_key(text: str, message: str) -> None:
    assert message_of(text).startswith(message)


def test_settings_of_the_command_line_are_merged_and_errors_name_it() -> None:
    config = config_of("max-kl: 0.5\ncg-iters: 3\n")
    for values in ({"cg-iters": 4}, {"algorithm-settings": {"cg-iters": 4}}):
        settings = algorithm_of(config.override(values))[1]
        assert settings == MAMLTRPO.Settings.model_validate({"max-kl": 0.5, "cg-iters": 4})
    assert message_of("max-kl: 0.5\n", **{"cg-iters": 0}).startswith(
        "'cg-iters' in the command line: expected at least 1"
    )


def test_another_algorithm_of_the_command_line_starts_with_its_own_defaults() -> None:
    config = config_of("max-kl: 0.5\n").override({"algorithm": SHIFT})
    assert config.algorithm_settings == {}
    assert config_of("max-kl: 0.5\n").override({"algorithm": "maml-trpo"}).algorithm_settings == {"max-kl": 0.5}


def test_optimizers_restored_from_tensors_and_json_continue_bit_identically() -> None:
    learner, undisturbed = Shift(make_policy("normal")), Shift(make_policy("normal"))
    batch = learner.store_of([])
    for number in range(3):
        learner.learn(batch, number)
        undisturbed.learn(batch, number)
    state = learner.state_dict()
    rest = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    resumed = Shift(make_policy("normal", seed=9))
    resumed.policy.load_state_dict(learner.policy.state_dict())
    resumed.load_state_dict({**state, **json.loads(json.dumps(rest))})
    for number in range(3, 5):
        resumed.learn(batch, number)
        undisturbed.learn(batch, number)
    for mine, theirs in zip(resumed.policy.parameters(), undisturbed.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # A single one has the short name.
    names = {name.rsplit(".", 2)[0] for name in state if name.startswith("optimizer")}
    assert names == {"optimizer", "optimizer.critic", "optimizer.slow"}
    with pytest.raises(ValueError, match="the state of the optimizer 'critic' is for 2 parameters, and there are 1"):
        resumed.load_state_dict({**state, "optimizer.critic.7.step": torch.zeros(())})
    for forged in (5, [], [5], [{"params": 1.0}], [{"lr": "x"}], [{"lr": 1.0}] * 2):
        told = "the optimizer 'slow' has other numbers than its 1 groups of parameters: "
        with pytest.raises(ValueError, match=told):
            resumed.load_state_dict({**state, "optimizer.slow.groups": forged})


class Scaled(torch.nn.Module):
    """Has numbers of every kind that an update may change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = torch.nn.Identity(), torch.nn.Parameter(torch.zeros(2))
        self.inner.temperature = 1.0
        self.mean, self.count, self.name = torch.zeros(2), np.zeros(2), "scaled"
        with torch.inference_mode():
            self.cached = torch.zeros(2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("lost", torch.zeros(2), persistent=False)

    def forward(self, observations: torch.Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(self.inner(observations) * self.weight, 1.0)


class Scaler(MetaLearner):
    """Changes them."""

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        module = vars(self.policy)["module"]
        self.policy.eval()
        module.inner.temperature *= 0.5
        for _ in range(2):
            module.mean = module.mean + 1.0
        for number in (module.count, module.kept, module.lost):
            number += 1.0
        return {}


def test_update_that_changes_what_no_copy_of_the_policy_gets_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = Scaled()
    learner = Scaler(module)
    for number in range(2):
        learner.learn(learner.store_of([]), number)
    # As a checkpoint and the parameters that are published ahead of time have them.
    copied = Scaled()
    copied.load_state_dict(module.state_dict())
    assert copied.kept.tolist() == module.kept.tolist() == [2.0, 2.0]
    assert (copied.lost.tolist(), copied.inner.temperature) == ([0.0, 0.0], 1.0)
    (record,) = caplog.records
    assert "changes 'count' and 'inner.temperature' and 'lost' and 'mean' of the policy" in record.message


class Rememberer(Shift):
    """Takes no gradient steps to adapt, and needs the log-probabilities of the actions."""

    record_log_probs = True

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> None:
        return None


def exponential(outcome: PhaseOutcome) -> torch.Tensor:
    return -(outcome.log_probs.exp() * outcome.samples.advantages * outcome.samples.mask).sum((1, 2))


def test_inner_loss_of_the_metalearner_is_that_of_the_sampler() -> None:
    experiment = make_experiment(small_config())
    with make_sampler(experiment, num_workers=0) as sampler:
        tasks = sampler.sample_tasks(3)
        learner = MAMLTRPO(experiment.policy, 0.1, inner_loss=exponential)
        batch = learner.collect(sampler, tasks)
        (train,), valid = batch.train_episodes, batch.valid_episodes
        adapted = adapt(experiment.policy, train, step_size=0.1, inner_loss=exponential)
        sampler.seek(sampler.iteration)
        sampler.rollout(tasks)
        torch.testing.assert_close(valid.observations, sampler.rollout(tasks, adapted).observations)
        learner.update(batch)
        name, *_ = dict(experiment.policy.named_parameters())
        (of_some,), after = sampler.sample(tasks, rule=AdaptationRule(0.1, parameters=[name]))
        with pytest.raises(ValueError, match=r"sampled for the inner loss reinforce on"):
            MAMLTRPO(experiment.policy, 0.1).step([of_some], after)


def test_sampler_gives_the_adapted_parameters_that_it_would_sample_with() -> None:
    experiment = make_experiment(small_config())
    with make_sampler(experiment, num_workers=0) as sampler:
        tasks = sampler.sample_tasks(3)
        train, params = sampler.adapt(tasks, 2, AdaptationRule([0.2, 0.1]))
        valid = sampler.rollout(tasks, params)
        sampler.seek(sampler.iteration)
        again, expected = sampler.sample(tasks, 2, rule=AdaptationRule([0.2, 0.1]))
        assert [episodes.digest() for episodes in (*train, valid)] == [e.digest() for e in (*again, expected)]
        with pytest.raises(TypeError, match="either a fast_lr or a rule"):
            sampler.sample(tasks, fast_lr=0.1, rule=AdaptationRule(0.1))


def test_learner_without_inner_steps_has_one_phase_and_recorded_log_probabilities(tmp_path: Path) -> None:
    config = small_config(algorithm=f"{__name__}:Rememberer")
    experiment = make_experiment(config)
    with make_sampler(experiment, num_workers=0) as sampler:
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(3))
    assert len(batch.phases) == 1
    assert batch.phases[0].log_probs is not None
    train(config, tmp_path, num_workers=0)
    evaluation = evaluate(experiment, tasks=2, num_workers=0)
    assert (evaluation.returns.shape, evaluation.step_sizes) == ((2, 1, 4), ())
    with pytest.raises(ConfigError, match="does not adapt by gradient steps, nor in another way; let it act with"):
        adapt_to_task(load_policy(tmp_path), "2DNavigation-v0", {"goal": np.zeros(2, np.float32)})


def small_config(**values: Any) -> Config:
    """Return the config of a run of one iteration; other algorithms have no settings of MAML-TRPO."""
    return config_of_run(num_batches=1).override({key.replace("_", "-"): value for key, value in values.items()})


RATIO = "inner-loss: likelihood-ratio"
DIVISOR = "differentiate-divisor: true"


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("", reinforce),
        (f"{RATIO}\n", likelihood_ratio),
        (f"algorithm-settings: {{{RATIO}, {DIVISOR}}}\n", likelihood_ratio_and_divisor),
        (f"algorithm: promp\nalgorithm-settings: {{{DIVISOR}}}\n", likelihood_ratio_and_divisor),
        (f"algorithm: dice-maml\nalgorithm-settings: {{{DIVISOR}}}\n", dice_and_divisor),
    ],
)
def test_inner_loss_is_that_of_the_config_in_sampling_and_update(text: str, loss: Any) -> None:
    learner, settings, config = algorithm_of(config_of(text))
    policy = make_policy("normal")
    made = learner.from_config(policy, config, settings)
    assert made.rule is not None
    assert made.rule.inner_loss is loss
    assert made.rule.name() == loss.__qualname__
