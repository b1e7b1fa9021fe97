"""Guarantees of every registered family to planners: copies continue from the same state, and survive closing."""

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import numpy as np
import pytest

from maml_rl.envs import FAMILIES, make_vector_env
from tests.envs.contract import BASES, OWN_STEPS, QUICK, marks, random_actions, same

COPIES: tuple[Callable[[Any], Any], ...] = (copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env)))


def engines_of(env_id: str) -> tuple[str, ...]:
    """The engines copy the states of all bodies by the same code: one family of each base tries both."""
    if not FAMILIES[env_id].has_physics:
        return ("",)
    return ("mjbatch", "mujoco") if env_id in QUICK else ("mjbatch",)


def on_engines(names: Iterable[str]) -> list[Any]:
    """Return families, on an engine or both if they have physics."""
    return [
        pytest.param((env_id, {"engine": engine} if engine else {}), marks=marks(env_id), id=f"{env_id}-{engine}")
        for env_id in names
        for engine in engines_of(env_id)
    ]


def installed(family: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    if family[1] == {"engine": "mjbatch"}:
        pytest.importorskip("mjbatch", exc_type=ImportError)
    return family


@pytest.fixture(params=on_engines(OWN_STEPS))
def family(request: pytest.FixtureRequest) -> Any:
    return installed(request.param)


@pytest.fixture(params=on_engines(BASES))
def base_family(request: pytest.FixtureRequest) -> Any:
    return installed(request.param)


def go_on(env: Any, actions: list[Any]) -> list[Any]:
    """Return the results of some steps with an unseeded reset between them, which continues the current streams."""
    seen: list[Any] = []
    for index, action in enumerate(actions):
        if index == len(actions) // 2:
            seen.append(env.reset()[0])
        seen += [np.asarray(part) for part in env.step(action)[:4]]
    return seen


def test_copy_of_a_single_environment_continues_bit_identically(family: tuple[str, dict[str, Any]]) -> None:
    env_id, physics_kwargs = family
    env: Any = gymnasium.make(env_id, **physics_kwargs)
    env.reset(seed=3)
    env.unwrapped.reset_task(env.unwrapped.sample_tasks(1)[0])
    env.reset()
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(12)]
    if "Bandit" not in env_id:
        for action in actions[:5]:
            env.step(action)
    copies = [way(env) for way in COPIES] + [way(way(env)) for way in COPIES]
    played, *others = [go_on(each, actions) for each in (env, *copies)]
    assert all(same(played, other) for other in others)
    tasks = str(env.unwrapped.sample_tasks(2))
    assert all(str(each.unwrapped.sample_tasks(2)) == tasks for each in copies)
    for each in (env, *copies):
        each.close()


def test_copy_of_a_batch_continues_bit_identically(base_family: tuple[str, dict[str, Any]]) -> None:
    env_id, physics_kwargs = base_family
    env: Any = make_vector_env(env_id, physics_kwargs, 3, max_episode_steps=7, num_threads=2)
    env.reset_task(env.sample_tasks(3, seed=0))
    env.reset(seed=3)
    actions = random_actions(env, 12)
    for action in actions[:5]:
        env.step(action)
    copies = [way(env) for way in COPIES]
    played, *others = [go_on(each, actions) for each in (env, *copies)]
    assert all(same(played, other) for other in others)
    for each in (env, *copies):
        each.close()


def test_environment_can_be_reset_after_it_was_closed(base_family: tuple[str, dict[str, Any]]) -> None:
    env_id, physics_kwargs = base_family
    env: Any = gymnasium.make(env_id, **physics_kwargs)
    before = env.reset(seed=1)[0]
    env.close()
    np.testing.assert_array_equal(env.reset(seed=1)[0], before)
    env.step(env.action_space.sample())
    env.close()
    batch: Any = make_vector_env(env_id, physics_kwargs, 4, num_threads=2)
    before = batch.reset(seed=1)[0]
    batch.close()
    np.testing.assert_array_equal(batch.reset(seed=1)[0], before)
    batch.step(random_actions(batch, 1)[0])


def test_deep_copies_share_the_model() -> None:
    env: Any = gymnasium.make("HalfCheetahDir-v5").unwrapped
    assert copy.deepcopy(env)._family.model is env._family.model
