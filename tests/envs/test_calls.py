"""Rules for calls of environments, seeds of 31 bits, what must be awaited, and what results may be."""

from contextlib import closing
from fractions import Fraction
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from maml_rl.envs import Retry, check_meta_env, make_vector_env
from maml_rl.envs.calls import (
    CallRules,
    async_methods,
    collect_infos,
    read_reset,
    read_step,
    recorded_number,
    without_wrappers,
)
from maml_rl.envs.serial import SerialVectorEnv
from tests.envs.third_party import WalkEnv


@pytest.mark.parametrize("after", [-1.0, float("inf"), True, "1"])
def test_pause_that_is_no_number_of_seconds_is_refused(after: Any) -> None:
    with pytest.raises(ValueError, match=r"Retry\(after=...\) takes a number of seconds, at least 0, got"):
        Retry(after)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"stepping": "serial", "threads": 2}, "stepping='serial' has no threads, but stepping_threads is 2"),
        ({"stepping": "fast"}, "stepping must be one of auto, serial, threads, got 'fast'"),
        ({"max_retries": -1}, "max_retries must be"),
        ({"threads": 0}, "stepping_threads must be"),
    ],
)
def test_rules_that_exclude_each_other_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CallRules(**rules)
    assert [CallRules(**wanted).want_threads for wanted in ({}, {"stepping": "threads"}, {"threads": 1})] == [
        *(False, True, True)
    ]


class TakesInt32(WalkEnv):
    """As environments whose seed is an int32."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None and seed >= 2**31:
            raise OverflowError("seed must fit into int32")
        return super().reset(seed=seed, options=options)


def awaited(kind: Any) -> Any:
    """Return the environment of a class with calls that are awaited."""

    async def reset(self: Any, **given: Any) -> Any:
        return kind.reset(self, **given)

    async def step(self: Any, action: Any) -> Any:
        return kind.step(self, action)

    return type(f"{kind.__name__}Awaited", (kind,), {"reset": reset, "step": step})


@pytest.mark.parametrize("made", [TakesInt32, awaited(TakesInt32)])
def test_check_of_an_environment_names_the_declaration_of_seeds_of_31_bits(made: Any) -> None:
    with pytest.raises(AssertionError, match=r"seed=4294967295\) must work: .* seed_bits = 31 in Takes"):
        check_meta_env(made())
    check_meta_env(type("Declares", (made,), {"seed_bits": 31})())


class FailsOnce(TakesInt32):
    """As where a service is there a moment later."""

    failed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None and not self.failed:
            self.failed = True
            raise ConnectionError("the service does not answer")
        return WalkEnv.reset(self, seed=seed, options=options)


@pytest.mark.parametrize("made", [FailsOnce, awaited(FailsOnce)])
def test_failure_that_does_not_come_from_the_seed_stays_what_it_is(made: Any) -> None:
    with closing(make_vector_env(made, {}, 1)) as env, pytest.raises(ConnectionError, match="does not answer"):
        env.reset_buffers([2**31 + 7])


def test_only_wrappers_that_check_or_limit_are_left_out_of_what_is_awaited() -> None:
    env = awaited(TakesInt32)()
    assert async_methods(env) == ["reset", "step"]
    assert without_wrappers(gymnasium.wrappers.TimeLimit(gymnasium.wrappers.OrderEnforcing(env), 3)) is env
    with pytest.raises(TypeError, match="which its wrapper TransformReward cannot await"):
        without_wrappers(gymnasium.wrappers.TransformReward(env, float))
    plain = gymnasium.wrappers.TimeLimit(WalkEnv(), 3)
    assert without_wrappers(plain) is plain


class Hostile:
    """An object whose methods raise, as of a library that is closed by then."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("array")

    def __repr__(self) -> str:
        raise RuntimeError("repr")


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"speed": Hostile()}, r"got an object of Hostile, the info has \['speed'\]"),
        ({"speed": "x" * 500}, "got 'x{79}..., the info has"),
        ({"speed": [1.0, 2.0]}, r"got 2 values, \[1\.0, 2\.0\], the info has"),
        (Hostile(), "got None, the info is an object of Hostile"),
    ],
    ids=["hostile value", "long value", "two numbers", "hostile info"],
)
def test_recorded_info_of_any_object_is_refused_in_one_short_line(info: Any, told: str) -> None:
    value = info["speed"] if isinstance(info, dict) else None
    with pytest.raises(TypeError, match=f"Walk declares 'speed' in recorded_infos, .* {told}") as caught:
        recorded_number("Walk", "speed", "step", value, info, required=True)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "result",
    [
        *(Hostile(), [Hostile()] * 4, None, 1.0, "ab", {"a": 1, "b": 2}, np.zeros(2), np.zeros(3), np.zeros(5)),
        *((1, 2), [0, 1], (0, {}, 0), (0, 0.0, False, {}), (0, 0.0, False, False)),
    ],
    ids=lambda result: type(result).__name__,
)
def test_result_of_another_form_is_refused_with_the_remedy(result: Any) -> None:
    for name, read in (("step", read_step), ("reset", read_reset)):
        told = rf"(?s){name} of <WalkEnv instance> returned .*; it must return the observation"
        with pytest.raises(TypeError, match=told):
            read(WalkEnv(), result)


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


@pytest.mark.parametrize("flag", ["no", float("nan"), None, 2, -1, 0.0, [True, False], np.array([0, 1])], ids=repr)
def test_end_of_an_episode_that_is_not_a_flag_is_refused(flag: Any) -> None:
    for name, result in (("terminated", (None, 0.0, flag, False, {})), ("truncated", (None, 0.0, True, flag, {}))):
        with pytest.raises(TypeError, match=f"returned {name}=.*; return True or False") as caught:
            read_step(WalkEnv(), result)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrap", [bool, int, np.bool_, np.int64, np.array, lambda flag: np.array([flag])])
def test_flags_of_every_kind_are_read(wrap: Any) -> None:
    for flag in (True, False):
        assert read_step(WalkEnv(), (None, 0.0, wrap(flag), wrap(not flag), {}))[2:4] == (flag, not flag)


@pytest.mark.parametrize("info", [{}, None])
def test_reset_with_an_info_or_none_is_read(info: Any) -> None:
    assert read_reset(WalkEnv(), (3, info)) == read_reset(WalkEnv(), [3, info]) == (3, info)


MASK = [True, True, False]


@pytest.mark.parametrize(
    "values",
    [(1, 2), (0.5, np.nan), (True, False), (np.float32(1), np.float32(2)), (np.zeros(2), np.ones(2)), ("a", "bc")],
    ids=str,
)
def test_infos_are_those_of_gymnasium_where_it_collects_them(values: tuple[Any, Any]) -> None:
    slots = [{"x": values[0], "nested": {"y": values[1]}}, {"x": values[1], "only": values[0]}]
    expected: dict[str, Any] = {}
    vector_env = SyncVectorEnv([WalkEnv] * 3)
    for slot, info in enumerate(slots):
        expected = vector_env._add_info(expected, info, slot)
    collected = collect_infos(dict(enumerate(slots)), 3)
    assert collected.keys() == expected.keys()
    for name, array in expected.items():
        if isinstance(array, dict):
            assert collected[name].keys() == array.keys()
            array, ours = array["y"], collected[name]["y"]
        else:
            ours = collected[name]
        assert ours.dtype == array.dtype
        np.testing.assert_array_equal(ours, array)


# Infos of two slots that do not fit into one array of numbers as they are, with what is told of three.
UNLIKE: dict[str, tuple[Any, Any, list[Any]]] = {
    "mixed": (0, 2.5, [0.0, 2.5, 0.0]),
    "exact": (2**53 + 1, 0.5, [2**53 + 1, 0.5, None]),
    "large": (1, 2**70, [1, 2**70, None]),
    "shape": (np.zeros(2), np.ones(3), [np.zeros(2), np.ones(3), None]),
    "none": (None, 1.5, [None, 1.5, None]),
    "text": ("text", 3, ["text", 3, None]),
    "dict": ({"inner": 1}, None, [{"inner": 1}, None, None]),
}


def test_infos_of_different_kinds_are_objects_and_numbers_are_not_rounded() -> None:
    infos = collect_infos({slot: {name: UNLIKE[name][slot] for name in UNLIKE} for slot in range(2)}, 3)
    for name, (*_, expected) in UNLIKE.items():
        np.testing.assert_equal(list(infos[name]), expected)
        assert infos[f"_{name}"].tolist() == MASK
    nested = collect_infos({0: {"of": {"inner": "text"}}, 1: {"of": {"inner": 1}}}, 3)["of"]
    assert nested["inner"].tolist() == ["text", 1, None]


class SharesItsInfos(WalkEnv):
    """Has one dict for the infos of all slots, and none at a reset."""

    infos: dict[str, Any] = {}  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0], None

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        self.infos["slope"] = self.slope
        return *result, self.infos


def test_infos_of_a_dict_that_slots_share_are_those_of_each_slot() -> None:
    vector_env = SerialVectorEnv(SharesItsInfos, num_envs=2)
    vector_env.reset_task([{"slope": 1.0}, {"slope": 2.0}])
    assert vector_env.reset(seed=0)[1] == {}
    assert vector_env.step(np.zeros((2, 1), np.float32))[-1]["slope"].tolist() == [1.0, 2.0]


class TellsAtTheEnd(WalkEnv):
    recorded_infos = {"success": "episode"}  # noqa: RUF012

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        own_limit = self.steps == 3
        return observation, reward, terminated, own_limit, info | ({"success": 1.0} if terminated else {})


def test_only_the_limit_of_a_wrapper_may_end_an_episode_without_its_info() -> None:
    still = np.zeros((1, 1), np.float32)
    limited = SerialVectorEnv(lambda: TimeLimit(TellsAtTheEnd(), 2))
    limited.reset(seed=0)
    limited.step(still)
    assert limited.step(still)[3].all()
    assert np.isnan(limited.buffers.infos["success"]).all()
    own = SerialVectorEnv(TellsAtTheEnd)
    own.reset(seed=0)
    for _ in range(2):
        own.step(still)
    with pytest.raises(TypeError, match="declares 'success' in recorded_infos, so its info must have that number at"):
        own.step(still)
