"""References of families: the mean returns of random actions, and of a policy that observes its task.

Between them the returns of a mixture are normalized. `python -m benchmarks.references` measures them. The oracle is a
trained policy and no bound: others may be better.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from maml_rl.envs.mixture import HALF_CHEETAHS
from maml_rl.envs.registration import FAMILIES

FILE = Path(__file__).resolve().parents[1] / "certified" / "references.json"
# Arguments of environments that leave the problem as it is: the number of slots, pictures, and the unit of actions.
FREE = ("num_envs", "render_mode", "normalization_scale")


def references(env_kwargs: Mapping[str, Any], max_episode_steps: int | None) -> dict[str, tuple[float, float]]:
    """Return the returns of random actions and of the oracle, by family of a mixture; none of those not measured."""
    returns = {}
    for each in _measured(FILE):
        name = each["env-name"]
        arguments = (env_kwargs.get("arguments") or {}).get(name, {})
        changed = {key: value for key, value in arguments.items() if key not in (*FREE, "max_episode_steps")}
        steps = arguments.get("max_episode_steps") or max_episode_steps or FAMILIES[name].max_episode_steps
        # They are those of the default arguments, which a config may repeat.
        is_measured = steps == each["max-episode-steps"] and changed.items() <= each["env-kwargs"].items()
        if is_measured and name in env_kwargs.get("families", HALF_CHEETAHS):
            returns[name] = (each["random"], each["oracle"])
    return returns


@cache
def _measured(file: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return entries
