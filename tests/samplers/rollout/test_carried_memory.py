"""A policy whose memory changes its shape is refused, before a phase or in one."""

import numpy as np
import pytest
import torch
from torch import Tensor
from trials import TASKS, Counting, make_sampler

from maml_rl.policies import Memory, NormalMLPPolicy, Params


class Shapeless(Counting):
    """Returns a memory of a wrong shape, at a given place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def initial_memory(self, num: int) -> Memory:
        match self.place:
            case "rows":
                return (torch.zeros(1, 4),)
            case "list":
                return [torch.zeros(num, 4)]  # type: ignore[return-value]
        return (torch.zeros(num, 4),)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        after = {"size": memory[0][..., :3], "type": memory[0].double(), "none": None}.get(self.place, memory[0])
        return noise, () if after is None else (after,)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("rows", r"initial_memory\(3\) of Shapeless returned the shape \(1, 4\) float32; .*\(3, \.\.\.\)"),
        ("list", r"initial_memory\(3\) of Shapeless returned a list; return a tuple"),
        ("size", r"the shape \(1, 3, 3\) float32, got the shape \(1, 3, 4\) float32"),
        ("type", r"the shape \(1, 3, 4\) float64, got the shape \(1, 3, 4\) float32"),
        ("none", r"Shapeless returned no memory, got the shape"),
    ],
)
def test_a_memory_of_the_wrong_shape_is_refused(place: str, message: str) -> None:
    with make_sampler(Shapeless(place)) as sampler, pytest.raises(ValueError, match=message) as caught:
        sampler.rollout_trials(TASKS)
    assert "\n" not in str(caught.value)


def test_a_policy_steps_through_a_trial_by_itself_as_in_the_sampler() -> None:
    policy, memory = Counting(), None
    for step in range(4):
        action, memory = policy.choose(np.zeros(2), memory)
        assert action.tolist() == [step]
    with pytest.raises(TypeError, match="Counting has a memory"):
        policy(torch.zeros(1, 2))
    assert policy.has_memory
    assert not NormalMLPPolicy(2, 1).has_memory
