"""A parameter of a user's distribution that leaves its range is named with its value, task and inner step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from maml_rl import MultiTaskSampler
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.errors import NonFiniteError
from maml_rl.policies import as_policy
from tests.envs.third_party import WalkEnv

TASKS = [{"slope": slope} for slope in (0.5, -0.5, 1.0)]
PLACEMENTS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "start_method": "fork", "inference": "central"},
    {"num_workers": 2, "start_method": "fork", "inference": "worker"},
]


class OwnDeviation(nn.Module):
    """Learns its deviation without keeping it positive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 1))
        self.deviation = nn.Parameter(torch.ones(1))

    def forward(self, observations: Tensor) -> Distribution:
        return Normal(observations @ self.weight, self.deviation.expand(len(observations), 1))


class WithAMemory(OwnDeviation):
    def initial_memory(self, num: int) -> tuple[Tensor, ...]:
        return (torch.zeros(num, 1),)

    def forward(self, observations: Tensor, memory: tuple[Tensor, ...]) -> Any:
        return super().forward(observations), memory


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "options", "value", "shown"),
    [
        *((OwnDeviation, options, -2.5, "-2.5") for options in PLACEMENTS),
        (OwnDeviation, PLACEMENTS[0], float("nan"), "NaN"),
        *((WithAMemory, options, -2.5, "-2.5") for options in PLACEMENTS[::2]),
    ],
)
def test_parameter_out_of_its_range_is_named_with_value_and_task(
    make: Any, options: dict[str, Any], value: float, shown: str
) -> None:
    policy = as_policy(make(), (2,))
    params = policy.stack_parameters(len(TASKS))
    params["deviation"] = torch.tensor([[1.0], [value], [value]])
    with (
        MultiTaskSampler(WalkEnv, {}, 2, policy, seed=0, max_episode_steps=3, **options) as sampler,
        pytest.raises(NonFiniteError) as caught,
    ):
        sampler.rollout(TASKS, params)
    message = str(caught.value)
    start = (
        f"in task 1, the parameter scale of the distribution Normal of {make.__name__} is {shown}, and must satisfy Gr"
    )
    assert message.startswith(start)
    assert "\n" not in message
    assert "softplus" in message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
def test_inner_step_after_which_a_parameter_is_out_of_its_range_is_named(options: dict[str, Any]) -> None:
    with (
        MultiTaskSampler(
            WalkEnv, {}, 4, OwnDeviation(), LinearFeatureBaseline(2), seed=0, max_episode_steps=3, **options
        ) as sampler,
        pytest.raises(NonFiniteError, match=r"^in task \d after [12] inner steps?, the parameter scale of .* is -\d"),
    ):
        sampler.sample(TASKS, num_steps=3, fast_lr=100.0, gamma=0.99, gae_lambda=1.0)
