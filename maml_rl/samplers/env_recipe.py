"""The recipe of a sampler's environment: for its placement, and as what can reach workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gymnasium

from maml_rl.envs.calls import CallRules
from maml_rl.envs.make_env import EnvMaker, Recipe
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ConfigError
from maml_rl.machine import uses_jax
from maml_rl.samplers.failures import describe_env, describe_task
from maml_rl.samplers.importing import pickled, pickled_for_workers

if TYPE_CHECKING:
    # Workers need no settings, nor the time that their models take.
    from maml_rl.config.placement import Placement


def maker_of(env_name: EnvMaker | None, env: Any) -> EnvMaker | None:
    """Return what makes the environments: `env`, or `env_name` where `env` is an environment of this id."""
    if env_name is None or not isinstance(env, gymnasium.Env):
        return env_name if env is None else env
    expected = Recipe.of(env_name).spec
    if env.spec is None or expected is None or env.spec.id != expected.id:
        raise ValueError(f"env is {env}, which env_name={env_name!r} does not make; leave one of them out")
    return env_name


def placed(recipe: Recipe, placement: Placement) -> Recipe:
    """Return a recipe with a placement's engine, and its rules for the calls of environment objects."""
    rules = CallRules(
        stepping=placement.stepping,
        threads=placement.stepping_threads,
        timeout=placement.step_timeout,
        max_retries=placement.max_retries,
    )
    recipe.check_stepping(rules)
    recipe, engine = replace(recipe, rules=rules), placement.engine
    if engine == "auto":
        return recipe
    if recipe.family is None or not recipe.family.has_physics:
        raise ValueError(f"engine={engine!r} is for the MuJoCo families of this package, not for {recipe.env}")
    if (own := recipe.env_kwargs.get("engine", engine)) != engine:
        raise ValueError(f"engine={engine!r} contradicts env_kwargs={own!r}; give one of both")
    return replace(recipe, env_kwargs={**recipe.env_kwargs, "engine": engine})


def pickled_recipe(recipe: Recipe, start_method: str | None = None) -> bytes:
    """Return a recipe as bytes for workers; refuse one that they could not follow."""
    if start_method == "fork" and uses_jax():
        raise ConfigError(
            "start_method='fork' copies a process that has used JAX, whose threads the workers would lack; use "
            "'forkserver' or 'spawn'"
        )
    return pickled_for_workers(
        recipe,
        f"the environment {describe_env(recipe.env)}",
        "pass plain data, and functions or classes that a module defines at its top level (functools.partial adds "
        "arguments), or an id",
        "pass num_workers=0 or start_method='fork'",
        start_method,
    )


def require_picklable_tasks(tasks: Sequence[Task]) -> None:
    """Refuse tasks that cannot be sent to a worker."""
    for slot, task in enumerate(tasks):
        for name, value in task.items() if isinstance(task, Mapping) else [("", task)]:
            pickled(
                value,
                f"entry {name!r} of the task of slot {slot}, {describe_task(task)},",
                "a task holds numbers and arrays",
            )
