"""An environment of Meta-World whose whole state can be saved and loaded: no episode depends on earlier ones."""

from __future__ import annotations

import copy
import math
import re
import sys
from functools import cache, cached_property
from importlib.metadata import requires
from typing import Any, Literal, NamedTuple

import mujoco
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from maml_rl.envs.mujoco.rendering import Renderer
from maml_rl.errors import TaskError

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


_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
# Fields of a model that a reset changes, and fields that attributes of an environment may be live views of.
_MODEL_FIELDS = ("body_pos", "site_pos")
_LIVE_FIELDS = ("xpos", "site_xpos")
# Attributes of an environment that never change or are saved separately.
_NOT_KEPT = {"model", "data", "mujoco_renderer", "_np_random", "_np_random_seed"}
# A reset draws a goal twice, and some environments redraw until it is far enough; a fixed goal never would be.
_MOST_DRAWS = 1_000
_CAMERA = "corner"


class _Live(NamedTuple):
    """Placeholder for an attribute that is a live view of a row of one of MuJoCo's arrays."""

    field: str
    row: int


class State(NamedTuple):
    """The whole state of an environment between two steps.

    Attributes:
        physics: MuJoCo's integration state.
        model: fields of the model, by name.
        attributes: of the environment's object, by name.
        observation: (39,).
    """

    physics: Floats
    model: dict[str, Floats]
    attributes: dict[str, Any]
    observation: Floats


class Arm:
    """A Meta-World environment whose state can be saved, and loaded into any environment of the same name.

    Its behavior depends only on the state, and so never on earlier episodes.

    Attributes:
        env: the environment itself.
        low: (3,) or (6,) lowest numbers of a task.
        high: the highest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.env: Any = make_environment(name)
        # As `set_task` leaves it; the family has its own time limit.
        self.env._set_task_called = self.env.seeded_rand_vec = True
        self.env.max_path_length = sys.maxsize
        self.low: Floats = self.env._random_reset_space.low
        self.high: Floats = self.env._random_reset_space.high
        self._unused = self.save(np.zeros(0))
        self._renderer: Renderer | None = None

    def draw_goals(self, random: np.random.RandomState, num_goals: int) -> Floats:
        """Return the goals that `num_goals` resets draw from this generator, as in Meta-World.

        The numbers that a reset accepts do not depend on the arm's motion, so the physics is not stepped.
        """
        env = self.env
        self.load(self._unused)
        env._np_random, env._freeze_rand_vec = random, False
        env.do_simulation = lambda *arguments: mujoco.mj_forward(env.model, env.data)
        goals = []
        for _ in range(num_goals):
            env.reset()
            goals.append(env._last_rand_vec.copy())
        env._np_random = None
        return np.array(goals)

    def start(self, vector: Floats) -> State:
        """Return the start state of a task's episodes: the one that Meta-World's own reset reaches."""
        size = self.low.size
        given, rest = vector[:size], vector[size:]
        if rest.any() or (given < self.low).any() or (given > self.high).any():
            zeros = f", and {rest.size} zeros after them" if rest.size else ""
            raise TaskError(
                f"entry 'rand_vec' of a task of {self.name} must be between {self.low.tolist()} and "
                f"{self.high.tolist()}{zeros}, got {vector.tolist()}"
            )
        env, draws = self.env, 0
        self.load(self._unused)

        def draw() -> Floats:
            nonlocal draws
            draws += 1
            if draws > _MOST_DRAWS:
                raise TaskError(
                    f"entry 'rand_vec' of a task of {self.name} puts goal and object too close to each other, got "
                    f"{given.tolist()}"
                )
            return given.copy()

        env._last_rand_vec = given.copy()
        env._get_state_rand_vec = draw
        observation, _ = env.reset()
        del env._get_state_rand_vec
        return self.save(observation)

    def save(self, observation: Floats) -> State:
        """Return the current state, whose observation is this one."""
        env = self.env
        physics = np.empty(mujoco.mj_stateSize(env.model, _STATE))
        mujoco.mj_getState(env.model, env.data, physics, _STATE)
        attributes = {
            name: self._kept(value)
            for name, value in env.__dict__.items()
            if name not in _NOT_KEPT and not isinstance(value, spaces.Space)
        }
        return State(
            physics, {name: getattr(env.model, name).copy() for name in _MODEL_FIELDS}, attributes, observation.copy()
        )

    def load(self, state: State) -> None:
        """Return to a saved state."""
        env = self.env
        for name in [name for name in env.__dict__ if name not in _NOT_KEPT and name not in state.attributes]:
            if not isinstance(env.__dict__[name], spaces.Space):
                del env.__dict__[name]
        for name, value in state.attributes.items():
            if isinstance(value, _Live):
                env.__dict__[name] = getattr(env.data, value.field)[value.row]
            else:
                env.__dict__[name] = copy.deepcopy(value)
        for name, values in state.model.items():
            getattr(env.model, name)[...] = values
        mujoco.mj_setState(env.model, env.data, state.physics, _STATE)
        mujoco.mj_forward(env.model, env.data)
        # The forward pass has changed the solver's warm start.
        mujoco.mj_setState(env.model, env.data, state.physics, _STATE)

    def _kept(self, value: Any) -> Any:
        """Return an attribute in the form that `State` stores."""
        if isinstance(value, np.ndarray) and not value.flags.owndata:
            for field in _LIVE_FIELDS:
                array = getattr(self.env.data, field)
                if np.shares_memory(array, value):
                    offset = value.__array_interface__["data"][0] - array.__array_interface__["data"][0]
                    return _Live(field, offset // array.strides[0])
        return copy.deepcopy(value)

    def draw(self) -> NDArray[np.uint8]:
        """Return a picture (480, 480, 3)."""
        if self._renderer is None:
            self._renderer = Renderer(self.env.model, _CAMERA)
        # The camera is mounted upside down.
        return self._renderer.draw(self.env.data.qpos)[::-1, ::-1].copy()

    def close(self) -> None:
        """Free the environment's resources."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self.env.close()
