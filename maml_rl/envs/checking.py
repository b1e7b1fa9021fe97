"""Tells the author of an environment what it still needs to be a task family."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from maml_rl.envs.meta_env import array_layout


def require_meta_env(env: Any) -> None:
    """Raise unless `env` has what sampling needs.

    Raises:
        TypeError: If it is no `gymnasium.Env`, a method is missing, or a space is not supported; the message names it.
    """
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"expected a gymnasium.Env, got {type(env).__name__}; derive the class from gymnasium.Env")
    for name, duty in (
        ("sample_tasks", "sample_tasks(num_tasks), which draws that many tasks (dicts of numbers and arrays) from np_random"),
        ("reset_task", "reset_task(task), which takes effect at the next step and survives reset"),
    ):
        find_method(env, name, duty)
    for kind in ("observation", "action"):
        try:
            array_layout(getattr(env, f"{kind}_space"))
        except TypeError as error:
            raise TypeError(f"{kind} space of {type(env.unwrapped).__name__}: {error}") from None


def find_method(env: gymnasium.Env[Any, Any], name: str, duty: str = "") -> Callable[..., Any]:
    """Return a method of `env`, also where wrappers hide it.

    Raises:
        TypeError: If there is none.
    """
    try:
        method = env.get_wrapper_attr(name)
    except AttributeError:
        method = None
    if not callable(method):
        raise TypeError(
            f"{type(env.unwrapped).__name__} is no task family: it lacks {duty or name}; "
            "maml_rl.envs.check_meta_env tells everything that is missing"
        )
    return method  # type: ignore[no-any-return]


def check_meta_env(env: gymnasium.Env[Any, Any], num_tasks: int = 3, seed: int = 0) -> None:
    """Check that `env` keeps the contract of a task family.

    It steps the environment a few times. Gymnasium's own rules are checked by `gymnasium.utils.env_checker.check_env`.

    Args:
        env: one environment, not a vector.
        num_tasks: how many tasks to try.
        seed: for resets.

    Raises:
        TypeError: If something is missing.
        AssertionError: If something is there and misbehaves; the message says what was expected.
    """
    require_meta_env(env)
    sample_tasks, reset_task = find_method(env, "sample_tasks"), find_method(env, "reset_task")
    env.reset(seed=seed)
    tasks = list(sample_tasks(num_tasks))
    _expect(len(tasks) == num_tasks, f"sample_tasks({num_tasks}) must return {num_tasks} tasks, got {len(tasks)}")
    for task in tasks:
        _expect(isinstance(task, dict), f"a task must be a dict, got {type(task).__name__}")
    env.reset(seed=seed)
    _expect(_same(tasks, sample_tasks(num_tasks)), "sample_tasks must repeat after reset(seed=...): draw from self.np_random")
    _check_randomness(env, sample_tasks, num_tasks, seed)
    for task in tasks:
        reset_task(task)
        before = _episode(env, seed)
        _expect(_same(before, _episode(env, seed)), "reset(seed=...) with the same task and actions must repeat an episode")
    reset_task(tasks[0])
    first = _episode(env, seed)
    env.reset(seed=seed + 1)
    _expect(_same(first, _episode(env, seed)), "a task must survive reset: only reset_task may change it")
    try:
        reset_task({"no such entry": 0.0})
    except (ValueError, KeyError):
        pass
    else:
        raise AssertionError("reset_task must refuse a task with unknown entries by raising a ValueError that names the entry")


def _check_randomness(env: gymnasium.Env[Any, Any], sample_tasks: Callable[..., Any], num_tasks: int, seed: int) -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    env.reset(seed=seed)
    sample_tasks(num_tasks)
    _episode(env, seed)
    unchanged = np.array_equal(state, np.random.get_state()[1])  # type: ignore[index]
    _expect(unchanged, "the environment must draw from self.np_random, never from the global np.random")


def _episode(env: gymnasium.Env[Any, Any], seed: int, num_steps: int = 5) -> list[Any]:
    observation, _ = env.reset(seed=seed)
    env.action_space.seed(seed)
    history: list[Any] = [np.array(observation)]
    for _ in range(num_steps):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        _expect(np.isfinite(reward), f"rewards must be finite, got {reward}")
        history += [np.array(observation), float(reward), terminated, truncated]
        if terminated or truncated:
            break
    return history


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return isinstance(second, dict) and first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    return bool(np.array_equal(first, second))


def _expect(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise AssertionError(message)


