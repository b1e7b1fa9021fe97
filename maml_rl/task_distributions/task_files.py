"""Tasks in files, so that policies can be evaluated on the same ones: JSON that restores every number bit-identically.

`{"env-name": "2DNavigation-v0", "tasks": [{"goal": [0.1, -0.3]}, ...]}`. A list stays a list; what was an array or a
number of NumPy's is written with its type, as `{"dtype": "float64", "values": [0.1, -0.3]}`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.errors import ChildEnvError, ConfigError, explain
from maml_rl.foreign_files import check_sum, looked_for, parse_json, read_regular
from maml_rl.runs.atomic_files import replace_file

_ENV_NAME, _TASKS = "env-name", "tasks"
_ARRAY = ({"dtype", "values"}, {"dtype", "values", "shape"})
_NUMBER = {"dtype", "value"}
_LOOKS_LIKE = f'a file of tasks looks like {{"{_ENV_NAME}": "2DNavigation-v0", "{_TASKS}": [{{"goal": [0.1, -0.3]}}]}}'


def save_tasks(path: str | Path, env_name: str, tasks: Sequence[Task]) -> None:
    """Write tasks, one a line; the file appears whole or not at all."""
    replace_file(Path(path), tasks_as_bytes(path, env_name, tasks))


def tasks_as_bytes(path: str | Path, env_name: str, tasks: Sequence[Task]) -> bytes:
    """Return the content of a file of tasks."""
    lines = []
    for index, task in enumerate(tasks):
        try:
            lines.append(json.dumps(_encode(task), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task {index + 1} of {env_name} cannot be written to {path}: {error}") from error
    body = ",\n    ".join(lines)
    return f'{{\n  "{_ENV_NAME}": {json.dumps(env_name)},\n  "{_TASKS}": [\n    {body}\n  ]\n}}\n'.encode()


def read_tasks(path: str | Path, env_name: str) -> list[Task]:
    """Read the tasks of a family; whether they are tasks of it, only its environment can tell: see `try_tasks`."""
    check_sum(Path(path))
    try:
        content = parse_json(read_regular(Path(path)))
    except OSError as error:
        raise ConfigError(f"cannot read the tasks in {path}: {error.strerror}{looked_for(Path(path))}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); {_LOOKS_LIKE}") from error
    if not isinstance(content, dict) or set(content) != {_ENV_NAME, _TASKS}:
        raise ConfigError(f"{path} is not a file of tasks; {_LOOKS_LIKE}")
    tasks = content[_TASKS]
    if content[_ENV_NAME] != env_name:
        raise ConfigError(f"{path} holds tasks of {content[_ENV_NAME]!r}, the policy is of {env_name!r}")
    if not isinstance(tasks, list) or not tasks:
        raise ConfigError(f"{path} holds no list of tasks; {_LOOKS_LIKE}")
    decoded: list[Task] = []
    for index, task in enumerate(tasks):
        try:
            decoded.append(_decode(task))
            if not isinstance(task, dict):
                raise TypeError(f"expected a mapping from names to values, got {task!r}")
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"task {index + 1} in {path}: {_in_a_line(error)}") from error
    return decoded


def try_tasks(tasks: Sequence[Task], env: MetaVectorEnv, origin: str | Path) -> None:
    """Give every task to an environment of one slot."""
    for index, task in enumerate(tasks):
        try:
            env.reset_task([task])
        # Errors of third-party environments for tasks that they cannot use.
        except (ValueError, TypeError, LookupError, ArithmeticError, ChildEnvError) as error:
            raise ConfigError(f"task {index + 1} in {origin}: {_in_a_line(error)}") from error


def _in_a_line(error: Exception) -> str:
    text = explain(error) if isinstance(error, ChildEnvError) else str(error)
    return " ".join(text.split()).removeprefix("slot 0: ") or type(error).__name__


def _encode(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, np.ndarray | np.generic):
        # Python's floats have 64 bits: wider ones would be cut off.
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise TypeError(f"expected numbers of at most 64 bits, got the dtype {value.dtype}")
        if isinstance(value, np.generic):
            return {"dtype": value.dtype.name, "value": value.item()}
        shape = {} if value.size else {"shape": list(value.shape)}
        return {"dtype": value.dtype.name, "values": value.tolist(), **shape}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"expected names that are text, got {list(value)}")
        return {name: _encode(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"expected numbers, arrays, text, lists or dicts, got {value!r}")


def _decode(value: Any) -> Any:
    """Return what `_encode` was given."""
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if set(value) in _ARRAY:
        array = _array(value["values"], value["dtype"])
        return array.reshape(value["shape"]) if "shape" in value else array
    if set(value) == _NUMBER:
        return _array(value["value"], value["dtype"])[()]
    return {name: _decode(entry) for name, entry in value.items()}


def _array(values: Any, name: Any) -> Any:
    dtype = np.dtype(name) if isinstance(name, str) else np.dtype(object)
    if dtype.kind not in "biuf":
        raise TypeError(f"expected a dtype of numbers, got {name!r}")
    array = np.array(values, dtype)
    if array.tolist() != values:
        raise ValueError(f"{values!r} are not numbers of the dtype {name}")
    return array
