"""What makes a problem: configs and runs of different ones are not compared."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from maml_rl.config.config import Config
from maml_rl.envs import FAMILIES
from maml_rl.errors import ConfigError
from maml_rl.results.scales import readable_value


def problem_of(config: Config) -> dict[str, Any]:
    """Return the family, its arguments and its time limit, by their keys; the family's own limit where it is known."""
    steps, family = config.max_episode_steps, FAMILIES.get(config.env_name)
    if steps is None and family is not None and "max_episode_steps" not in config.env_kwargs:
        steps = family.max_episode_steps
    return {"env-name": config.env_name, "env-kwargs": config.env_kwargs, "max-episode-steps": steps}


def refuse_different_problems(configs: Sequence[Config]) -> None:
    """Refuse configs whose tasks differ, and name the settings that make them one problem."""
    differing: dict[str, list[str]] = {}
    for key in problem_of(configs[0]):
        values = list(dict.fromkeys(readable_value(problem_of(config)[key]) for config in configs))
        if len(values) > 1:
            differing[key] = values
    if differing:
        what = ", ".join(f"{key!r} is {' and '.join(each)}" for key, each in differing.items())
        settings = {key: json.dumps(problem_of(configs[0])[key]) for key in differing}
        given = " ".join(shlex.quote(f"{key}={value}") for key, value in settings.items())
        raise ConfigError(
            f"{what}: these are different problems; compare runs of one, or train all configs on that of the first: "
            f"--set {given}"
        )
