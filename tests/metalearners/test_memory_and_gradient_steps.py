"""MAML over a recurrent policy: the meta-gradient through `unroll`, runs that repeat, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.derivatives import LocalStore
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import adapt_to_task, load_policy
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners import find_metalearner
from maml_rl.metalearners.autograd_objective import AutogradObjective
from maml_rl.metalearners.losses import surrogate
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.policies import MemoryPolicy
from tests.small_runs import config_of, untimed

pytestmark = pytest.mark.usefixtures("forked_workers")


def recurrent(algorithm: str = "maml-trpo", cell: str = "gru", **values: Any) -> Config:
    keys = {"algorithm": algorithm, "memory": cell, "hidden-sizes": [4], **values}
    given = {key: value for key, value in keys.items() if value is not None}
    return config_of(num_batches=3, max_episode_steps=6).override(given)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_meta_gradient_has_the_slope_of_finite_differences(cell: str) -> None:
    experiment = make_experiment(recurrent(cell=cell))
    with make_sampler(experiment, num_workers=0) as sampler:
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(3))
    policy = experiment.policy.double()
    rule = AdaptationRule(0.5)
    device = torch.device("cpu")
    hosts = LocalStore(batch.phases, policy, device)
    meta = MetaObjective(policy, hosts, rule=rule, objective=surrogate, device=device)
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


@pytest.mark.parametrize(("algorithm", "cell"), [("maml-trpo", "gru"), ("promp", "lstm"), ("reptile", "gru")])
def test_recurrent_policies_are_trained_through_inner_steps_and_adapted(
    algorithm: str, cell: str, tmp_path: Path
) -> None:
    config = recurrent(algorithm, cell)
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


class Silent(MemoryPolicy):
    """Has a memory, but no method for whole sequences."""

    noise_kind, noise_size = "normal", 2

    def __init__(self, *spaces: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def initial_memory(self, num: int) -> tuple[Tensor, ...]:
        return (torch.zeros(num, 1),)

    def act(self, observations: Tensor, noise: Tensor, memory: Any = (), params: Any = None) -> Any:
        return noise, memory


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"policy": f"{__name__}:Silent", "memory": None, "hidden-sizes": None},
            "Silent, which has a memory, does not say how .* unroll",
        ),
        ({"hidden-sizes": [4, 4]}, "'hidden-sizes'.*a policy with a memory has one layer; give one number"),
        ({"memory": "elman"}, "'memory'"),
        ({"algorithm": "cavia"}, "'memory' in the command line: cavia does not use it; leave it out"),
    ],
)
def test_unsupported_memories_are_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_experiment(recurrent(**values))
    assert "\n" not in str(caught.value)


class TwoOptimizers(find_metalearner("maml-vpg")):  # type: ignore[misc]
    """A learner with a critic that has an optimizer of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.critic = torch.nn.Linear(2, 1)
        self.optimizers = {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=0.1),
            "slow": torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9),
        }

    def update(self, batch: Any) -> dict[str, Any]:
        metrics = super().update(batch)
        loss = self.critic(batch.valid_episodes.observations).square().mean()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {**metrics, "critic": loss.item()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{f"critic.{name}": value for name, value in self.critic.state_dict().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.critic.load_state_dict({name: state[f"critic.{name}"] for name in ("weight", "bias")})


def test_checkpoints_hold_several_optimizers_and_keep_the_names_of_a_single_one(tmp_path: Path) -> None:
    config = config_of(num_batches=4).override({"algorithm": f"{__name__}:TwoOptimizers"})
    train(config, tmp_path / "whole", num_workers=0)
    train(config.override({"num-batches": 2}), tmp_path / "parts", num_workers=0)
    train(config, tmp_path / "parts", num_workers=0, resume=True)
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")
    learner = make_experiment(config).metalearner
    make = {key.rsplit(".", 2)[0] for key in _trained(learner)}
    assert make == {"optimizer", "optimizer.critic", "optimizer.slow"}
    other = make_experiment(config).metalearner
    with pytest.raises(ValueError, match="the state of the optimizer 'critic' is for 3 parameters, and there are 2"):
        other.load_state_dict({**_trained(learner), "optimizer.critic.7.step": torch.zeros(())})


def _trained(learner: Any) -> dict[str, Any]:
    """Return the state of the optimizers after a step of each."""
    for optimizer in (learner.optimizer, *learner.optimizers.values()):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    return {key: value for key, value in learner.state_dict().items() if key.startswith("optimizer")}
