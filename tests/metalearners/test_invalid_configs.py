"""Configs that make no sense are refused in one line: every kind of error once, for each learner that asks for it."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.policies import GRUPolicy, MemoryPolicy, NormalMLPPolicy
from tests.metalearners.small_algorithms import OF_TRIALS
from tests.small_runs import config_of


def plain(observation_space: Any, action_space: Any) -> NormalMLPPolicy:
    return NormalMLPPolicy(spaces.flatdim(observation_space), 2)


def recurrent(observation_space: Any, action_space: Any) -> GRUPolicy:
    return GRUPolicy(observation_space, action_space, 4)


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


def settings(**values: Any) -> dict[str, Any]:
    return {"algorithm-settings": {key.replace("_", "-"): value for key, value in values.items()}}


@pytest.mark.parametrize(
    ("algorithm", "values", "message"),
    [
        ("rl2", {"slots-per-task": 4}, "'slots-per-task' in .*: the episodes of a trial follow each other in one slot"),
        ("rl2", {"observe-last": False}, "'algorithm' in .*: rl2 learns from the last action and reward; add"),
        *((name, {"observe-last": False}, f"{name} learns from the last action") for name in ("rsac", "varibad", "ad")),
        ("pearl", {"method": "pretrain"}, "'method' in .*: pearl adapts without gradient steps"),
        (
            *("rl2", {"num-batches": 3} | settings(anneal_over=2)),
            "'num-batches' in .*: rl2 learns nothing after meta-update 2, .*; use at most 2, or a longer anneal-over",
        ),
        # The memory.
        (
            "rl2",
            settings(cell="transformer", memory_span=5),
            "settings.memory-span' in .*: it is for a gru or lstm",
        ),
        ("rl2", settings(cell="transformer", layers=[8]), "layers' in .*: it is for a gru or lstm, and 'cell' is"),
        (
            "rl2",
            settings(products=8),
            "products' in .*: only layers see products; set layers, or leave it out",
        ),
        (
            "rl2",
            settings(token_shift=True),
            "token-shift' in .*: it is for a transformer, and 'cell' is 'gru'; leave it out",
        ),
        (
            *("rl2", settings(cell="transformer", hidden_size=12, num_heads=4)),
            "no transformer of these sizes: hidden_size must be a multiple of twice num_heads, 8, got 12",
        ),
        ("varibad", settings(cell="transformer", encoder_size=12), "'algorithm-settings' in .*no transformer of these"),
        ("ad", {"observe-last": True} | settings(hidden_size=10, num_heads=4), "no transformer of these sizes"),
        (
            "rl2",
            {"env-name": "tests.looking_env:Looking-v0"} | settings(cell="transformer", normalize_observations=True),
            "'env-name' in .*: only vectors are normalized, and the observations are",
        ),
        ("maml-trpo", {"memory": "gru", "hidden-sizes": [4, 4]}, "'hidden-sizes'.*with a memory has one layer"),
        # The policy.
        ("maml-trpo", {"policy": "Silent"}, "Silent, which has a memory, does not say how .* unroll"),
        ("rl2", {"policy": "plain"}, "'policy' in .*: rl2 trains a policy with a memory"),
        ("varibad", {"policy": "recurrent"}, "a policy of state and belief, and got a GRUP"),
        ("rsac", {"policy": "recurrent"}, "and GRUPolicy is not"),
        ("cavia", {"policy": "plain"}, "'policy' in .*cavia adapts a parameter named 'context', which NormalMLP"),
        ("anil", settings(head=["last.weight"]), "name the parameters of the head; those of the policy .*mu.weight"),
        # What is learned from, and how.
        ("varibad", settings(replay_steps=7), "a replay buffer of 7 steps has no room for a trial of 40; use at"),
        ("pearl", settings(buffer_steps=5), "a replay buffer of 5 steps has no room for an episode of 10; use at"),
        ("varibad", settings(reward_decoder="cells"), "reward-decoder' in .*observations are not the cells of a grid"),
        (
            "varibad",
            {"env-name": "GridNavi-v0", "env-kwargs": {"width": 200, "height": 200}} | settings(reward_decoder="cells"),
            "reward-decoder' in .*a grid of 4e.04 cells is too large for an output for each",
        ),
        ("pearl", {"env-name": "TabularMDP-v0"}, "pearl needs vectors and actions in a bounded Box"),
        ("pearl", settings(prior_rounds=2), "'num-steps'.*leave none to the posterior after 2 from the prior; raise"),
        (
            *("pearl", settings(context_reward="sparse_reward")),
            "context-reward.*2DNavigation-v0 does not record 'sparse_reward' at every step; choose null",
        ),
        ("reptile", {"method": "pretrain"}, "reptile learns only from inner steps, and pretrain takes none"),
        ("maml-trpo", settings(differentiate_divisor=True), "'algorithm-settings.differentiate-divisor' in .*: log-"),
        (
            *("maml-trpo", settings(inner_loss="likelihood-ratio", first_order=True, differentiate_divisor=True)),
            "first-order drops all derivatives",
        ),
    ],
)
def test_config_that_makes_no_sense_is_refused_in_one_line(
    algorithm: str, values: dict[str, Any], message: str
) -> None:
    own = {key: f"{__name__}:{value}" for key, value in values.items() if key == "policy"}
    changed = {"algorithm": algorithm, "observe-last": algorithm in OF_TRIALS, **values, **own}
    with pytest.raises(ConfigError, match=message) as caught:
        make_experiment(config_of(**own).override(changed))
    assert "\n" not in str(caught.value)
