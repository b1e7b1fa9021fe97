"""The recipe of a sampler's environment for its placement, and what can reach workers: pickles, which name modules."""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import gymnasium

from maml_rl.envs.calls import CallRules
from maml_rl.envs.make_env import EnvMaker, Recipe
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ConfigError
from maml_rl.machine import uses_jax
from maml_rl.samplers.failures import describe_env, describe_task

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


def _dumps(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def pickled(
    value: Any, name: str, remedy: str, receiver: str = "a child process", dumps: Callable[[Any], bytes] = _dumps
) -> bytes:
    """Return an object as bytes.

    Args:
        value: the object.
        name: of it, for messages.
        remedy: in words.
        receiver: of the bytes, in words.
        dumps: pickles it.

    Raises:
        TypeError: If a part of it cannot be pickled, with the name of the innermost.
    """
    try:
        return dumps(value)
    # A part's own __reduce__ may raise anything.
    except Exception as error:
        culprit = _culprit(value, name, dumps, set()) or name
        raise TypeError(
            f"{culprit} cannot be pickled for {receiver} ({type(error).__name__}: {error}); {remedy}"
        ) from error


def _culprit(value: Any, name: str, dumps: Callable[[Any], bytes], seen: set[int]) -> str:
    """Return the name of the innermost part that cannot be pickled; "" if that is in one seen before, in a circle."""
    parts = list(value.items()) if isinstance(value, Mapping) else list(getattr(value, "__dict__", {}).items())
    if dataclasses.is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    seen.add(id(value))
    is_within = False
    for key, part in parts:
        try:
            dumps(part)
        except Exception:
            of_part = name if key in ("_modules", "_parameters", "_buffers") else f"{name}.{key}"
            if id(part) not in seen and (culprit := _culprit(part, of_part, dumps, seen)):
                return culprit
            is_within = True
    return "" if is_within else name


def pickled_for_workers(value: Any, name: str, remedy: str, where: str, start_method: str | None = None) -> bytes:
    """Return an object as bytes for worker processes.

    Args:
        value: the object.
        name: of it, for messages.
        remedy: for what cannot be pickled, in words.
        where: else it can be used, for what cannot be imported, in words.
        start_method: of the workers; those that are forked inherit what they could not import.

    Raises:
        TypeError: If they could not load it.
    """
    data = pickled(value, name, remedy)
    missing = "" if start_method == "fork" else find_unimportable(value)
    if missing:
        raise TypeError(
            f"{name} needs {missing}, which workers cannot import, since it is defined in a notebook, an interactive "
            f"session, `python -c` or a script from standard input; move it to a module and import it from there, or "
            f"{where}"
        )
    return data


def main_is_importable() -> bool:
    """Return whether a worker can import this process's main module.

    It cannot import a notebook, an interactive session, `python -c`, or a script that comes from standard input.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    # Of a script from standard input the name is "<stdin>".
    return Path(getattr(main, "__file__", None) or "/").is_file()


def find_unimportable(value: Any) -> str:
    """Return the name of a class or function in the pickle of `value` that no worker could import; "" for none."""
    pickler = _ReferencePickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return next((name for module, name in pickler.references.items() if not _is_importable(module)), "")


def _is_importable(module: str) -> bool:
    if module == "__main__":
        return main_is_importable()
    found = sys.modules.get(module)
    # A module that a program has made itself has neither.
    return found is None or found.__spec__ is not None or hasattr(found, "__file__")


class _ReferencePickler(pickle.Pickler):
    """Records the modules of all classes and functions in a pickle, each with the first name.

    Those of the main module may be in texts, too: entry points of registrations.
    """

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.references: dict[str, str] = {}

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, type | FunctionType):
            self.references.setdefault(value.__module__, value.__qualname__)
        elif isinstance(value, str) and value.startswith("__main__:"):
            self.references.setdefault("__main__", value.removeprefix("__main__:"))
