"""Rules for calls of environments, seeds of 31 bits, and what must be awaited."""

from contextlib import closing
from typing import Any

import gymnasium
import pytest

from maml_rl.envs import Retry, check_meta_env, make_vector_env
from maml_rl.envs.calls import CallRules, async_methods, without_wrappers
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
