"""The environments that are made from ids and callables."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from maml_rl.envs import MetaVectorEnv, ObservedLastStep, make_vector_env
from maml_rl.envs.adapted_batch import CheckedVectorEnv
from maml_rl.envs.calls import CallRules
from maml_rl.envs.families.navigation import Navigation2DVectorEnv
from maml_rl.envs.mixture import MixtureVectorEnv
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.envs.threaded import ThreadedVectorEnv
from tests.envs.third_party import NoTaskEnv, WalkEnv


@pytest.fixture
def registered() -> Any:
    """Register ids for one test."""
    before = set(gymnasium.registry)
    yield gymnasium.register
    for env_id in set(gymnasium.registry) - before:
        del gymnasium.registry[env_id]


@pytest.mark.parametrize(("env", "limit"), [("tests.envs.third_party:Walk-v0", 4), (WalkEnv, None)])
def test_third_party_id_or_class_becomes_serial_slots(env: Any, limit: int | None, registered: Any) -> None:
    registered("Walk-v0", entry_point="tests.envs.third_party:WalkEnv", max_episode_steps=4)
    vector_env = make_vector_env(env, {"scale": 10.0}, 3)
    assert isinstance(vector_env, SerialVectorEnv)
    assert (vector_env.num_envs, vector_env.max_episode_steps) == (3, limit)
    assert [env.unwrapped.scale for env in vector_env.envs] == [10.0] * 3
    assert make_vector_env(env, max_episode_steps=9).max_episode_steps == 9


def test_vector_entry_point_that_is_not_a_family_is_not_used(registered: Any) -> None:
    class OtherVectorEnv(gymnasium.vector.VectorEnv):
        def __init__(self, **kwargs: Any) -> None:
            raise AssertionError("this family was not asked for")

    registered("Walk-v0", entry_point=WalkEnv, vector_entry_point=OtherVectorEnv)
    assert isinstance(make_vector_env("Walk-v0"), SerialVectorEnv)


def test_vector_entry_point_may_be_a_function_that_returns_a_family(registered: Any) -> None:
    def make(num_envs: int, **kwargs: Any) -> MetaVectorEnv:
        return SerialVectorEnv(lambda: WalkEnv(5.0), num_envs)

    registered("Walk-v0", entry_point=WalkEnv, vector_entry_point=make)
    assert make_vector_env("Walk-v0", {}, 2).envs[0].scale == 5.0  # type: ignore[attr-defined]


class OwnFamily(Navigation2DVectorEnv):
    """A family of somebody else: its module is another."""


MIXED = {"families": ["2DNavigation-v0", "PointGoal-v0"]}


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [(Navigation2DVectorEnv, {}), (OwnFamily, {}), (MixtureVectorEnv, MIXED), ("2DNavigation-v0", {})],
)
def test_time_limit_ends_episodes_of_a_batched_family_however_it_is_given(env: Any, kwargs: dict[str, Any]) -> None:
    made = make_vector_env(ObservedLastStep(env), kwargs, 2, max_episode_steps=2)
    assert made.max_episode_steps == 2
    made.reset_task(made.sample_tasks(2, seed=0))
    made.reset(seed=0)
    steps = [made.step(np.zeros((2, 2), np.float32)) for _ in range(3)]
    # It stays as it is then, and shows that the episode is over.
    assert [truncated.tolist() for _, _, _, truncated, _ in steps] == [[False] * 2, [True] * 2, [True] * 2]
    assert [observations[:, -1].tolist() for observations, *_ in steps] == [[0.0] * 2, [1.0] * 2, [1.0] * 2]
    longer = make_vector_env(env, kwargs, 2, max_episode_steps=500)
    assert longer.max_episode_steps == (500 if isinstance(env, str) else 100)


def test_third_party_environment_that_is_not_a_family_is_refused(registered: Any) -> None:
    registered("NoTask-v0", entry_point=NoTaskEnv)
    for env in ("NoTask-v0", NoTaskEnv):
        with pytest.raises(TypeError, match="NoTaskEnv is not a task family"):
            make_vector_env(env)


def test_callable_that_makes_no_environment_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a gymnasium.Env, got dict"):  # noqa: RUF043
        make_vector_env(dict, max_episode_steps=3)


def test_array_code_of_others_is_checked_and_that_of_this_package_is_not() -> None:
    class Others(Navigation2DVectorEnv):
        """Defined here."""

    made = make_vector_env(Others, {}, 2)
    assert isinstance(made, CheckedVectorEnv)
    assert type(made.env) is Others
    assert type(make_vector_env(Navigation2DVectorEnv, {}, 2)) is Navigation2DVectorEnv
    with pytest.raises(ValueError, match="stepping='threads' is for environments that wait, and Others steps all"):
        make_vector_env(Others, {}, 2, rules=CallRules(stepping="threads"))


class MostlyWaits(WalkEnv):
    stepping = "threads"


class IsAwaited(WalkEnv):
    async def step(self, action: Any) -> Any:
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "rules", "in_threads"),
    [
        (WalkEnv, {}, False),
        (WalkEnv, {"threads": 2}, True),
        (MostlyWaits, {}, True),
        (lambda: gymnasium.wrappers.TransformReward(MostlyWaits(), float), {}, True),
        (MostlyWaits, {"stepping": "serial"}, False),
        (IsAwaited, {}, True),
        (lambda: IsAwaited(), {}, True),
    ],
)
def test_family_chooses_how_it_is_stepped_whatever_makes_it(env: Any, rules: dict[str, Any], in_threads: bool) -> None:
    vector_env = make_vector_env(env, {}, 2, rules=CallRules(**rules))
    assert isinstance(vector_env, ThreadedVectorEnv) == in_threads
    assert len({id(each) for each in vector_env.envs}) == 2  # type: ignore[attr-defined]
    vector_env.close()
    with pytest.raises(TypeError, match=r"IsAwaited has an async step, which is not awaited .* use stepping='threads'"):
        make_vector_env(lambda: IsAwaited(), rules=CallRules(stepping="serial"))
