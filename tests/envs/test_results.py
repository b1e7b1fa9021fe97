"""Results of `reset` and `step` of every form: numbers, or an error with the environment and the value."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl.envs.results import read_reset, read_step
from maml_rl.envs.serial import SerialVectorEnv
from tests.envs.third_party import WalkEnv


@pytest.mark.parametrize(
    "reward",
    [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2), 1, True, np.int64(2), np.bool_(True)],
    ids=repr,
)
def test_every_number_is_a_reward(reward: Any) -> None:
    number = read_step(WalkEnv(), (None, reward, False, False, {}))[1]
    assert type(number) is float
    assert number == float(reward)


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        (np.array([0.5]), r"array\(\[0.5\]\) of shape \(1,\); return one number, such as float"),
        ([0.5], r"1 values, \[0.5\]; return one number"),
        (np.array([0.5, 1.0]), r"array\(\[0.5, 1. \]\) of shape \(2,\); .* their sum with weights, .* of the task"),
        (torch.ones(2, requires_grad=True), r"tensor\(\[1., 1.\], requires_grad=True\); return one number"),
        (None, "None; return one number"),
        (np.timedelta64(3, "s"), r"(np|numpy).timedelta64\(3,'s'\); return one number"),
        (1j, "1j; return one number"),
        (10**400, "1000.*; return one number"),
    ],
    ids=repr,
)
def test_what_is_not_one_number_is_refused_with_environment_and_value(reward: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"step of <WalkEnv instance> returned the reward {shown}"):
        read_step(WalkEnv(), (None, reward, False, False, {}))

    class PaysOddly(WalkEnv):
        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, reward, *rest

    vector_env = SerialVectorEnv(PaysOddly)
    vector_env.reset(seed=0)
    with pytest.raises(TypeError, match="step of <PaysOddly instance> returned the reward"):
        vector_env.step(np.zeros((1, 1), np.float32))


@pytest.mark.parametrize("result", [None, np.zeros(2), np.zeros(3), (1, 2), (0, {}, 0), [0, 1], {"a": 1, "b": 2}, "ab"])
def test_reset_without_an_info_is_refused(result: Any) -> None:
    with pytest.raises(
        TypeError, match=r"(?s)reset of <WalkEnv instance> returned .*; it must return the observation a"
    ):
        read_reset(WalkEnv(), result)


@pytest.mark.parametrize("info", [{}, None])
def test_reset_with_an_info_or_none_is_read(info: Any) -> None:
    assert read_reset(WalkEnv(), (3, info)) == read_reset(WalkEnv(), [3, info]) == (3, info)


@pytest.mark.parametrize("result", [None, 1.0, (0, 0.0, False, {}), (0, 0.0, False, False), np.zeros(5)])
def test_step_with_another_number_of_values_is_refused(result: Any) -> None:
    with pytest.raises(
        TypeError, match=r"step of <WalkEnv instance> returned .*; it must return the observation, the r"
    ):
        read_step(WalkEnv(), result)
