"""The environments of the package `metaworld`: lists those of a benchmark, and makes a faster class of each."""

from __future__ import annotations

import math
import re
from functools import cache, cached_property
from importlib.metadata import requires
from typing import Any, Literal

import mujoco
import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

Split = Literal["train", "test"]
Floats = NDArray[np.float64]


def benchmark_environments(benchmark: str) -> dict[Split, tuple[str, ...]]:
    """Return the names of the environments of a benchmark, by split."""
    known = import_environments()
    if benchmark.startswith("ML1-") and benchmark.removeprefix("ML1-") in known.ALL_V3_ENVIRONMENTS:
        name = (benchmark.removeprefix("ML1-"),)
        return {"train": name, "test": name}
    if benchmark not in ("ML10", "ML25", "ML45"):
        raise ValueError(
            f"there is no benchmark {benchmark!r}; expected ML10, ML25, ML45, or ML1-<environment> with one of "
            f"{', '.join(known.ALL_V3_ENVIRONMENTS)}"
        )
    classes = getattr(known, f"{benchmark}_V3")
    return {"train": tuple(classes["train"]), "test": tuple(classes["test"])}


def import_environments() -> Any:
    """Import the list of Meta-World's environments."""
    remedy = (
        "run pip install 'maml-rl[metaworld]' in a virtual environment of its own, without the extra fast, which needs "
        "another MuJoCo"
    )
    try:
        needed = [re.match(r"mujoco *== *([\w.]+)", line) for line in requires("metaworld") or ()]
        from metaworld import env_dict
    except ImportError as error:
        raise DependencyNotInstalled(f"the Meta-World families need the package metaworld; {remedy}") from error
    for match in filter(None, needed):
        if match[1] != mujoco.__version__:
            raise DependencyNotInstalled(
                f"Meta-World needs MuJoCo {match[1]}, and {mujoco.__version__} is installed; {remedy}"
            )
    return env_dict


def make_environment(name: str) -> Any:
    """Return an environment, as "reach-v3", that is bit-identical to Meta-World's and faster."""
    return _faster(import_environments().ALL_V3_ENVIRONMENTS[name])()


class _Faster:
    """Mixin that replaces the slowest parts of a Meta-World step by bit-identical code that creates fewer objects.

    It is put before the class of an environment; the parts that it replaces are the same in all of them.
    """

    model: Any
    data: Any
    _get_pos_objects: Any
    _get_quat_objects: Any

    @cached_property
    def _rows(self) -> tuple[int, ...]:
        """Indices of the bodies of the hand and the two fingers, and of the geoms of the two pads."""
        bodies = [self.model.body(name).id for name in ("hand", "rightclaw", "leftclaw")]
        return (*bodies, *(self.model.geom(name).id for name in ("leftpad_geom", "rightpad_geom")))

    def _get_curr_obs_combined_no_goal(self) -> Floats:
        """Return the observation (18,) of one step: hand, opening of gripper, positions and rotations of objects."""
        hand, right, left, _, _ = self._rows
        positions, observation = self.data.xpos, np.zeros(18)
        observation[:3] = positions[hand]
        apart = positions[right] - positions[left]
        observation[3] = min(max(math.sqrt(apart.dot(apart)) / 0.1, 0.0), 1.0)
        places, rotations = self._get_pos_objects(), self._get_quat_objects()
        for index in range(len(places) // 3):
            start = 4 + 7 * index
            observation[start : start + 3] = places[3 * index : 3 * index + 3]
            observation[start + 3 : start + 7] = rotations[4 * index : 4 * index + 4]
        return observation

    def touching_object(self, object_geom_id: int) -> bool:
        """Return whether both pads press on an object."""
        contacts, forces = self.data.contact, self.data.efc_force
        first, second, addresses = contacts.geom1, contacts.geom2, contacts.efc_address
        of_object = (first == object_geom_id) | (second == object_geom_id)
        return all(
            sum(forces[address] for address in addresses[of_object & ((first == pad) | (second == pad))]) > 0
            for pad in self._rows[3:]
        )


@cache
def _faster(env_class: type) -> type:
    """Return the faster class of an environment."""
    return type(env_class.__name__, (_Faster, env_class), {})
