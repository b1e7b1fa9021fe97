"""An environment of Meta-World whose whole state can be saved and loaded: no episode depends on earlier ones."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.metaworld.environments import Floats, make_environment
from maml_rl.envs.mujoco.rendering import Renderer
from maml_rl.errors import TaskError

_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
# What a reset changes of a model, and what attributes of an environment may be live views of.
_MODEL_FIELDS = ("body_pos", "site_pos")
_LIVE_FIELDS = ("xpos", "site_xpos")
# Attributes of an environment that never change, or are kept otherwise.
_NOT_KEPT = {"model", "data", "mujoco_renderer", "_np_random", "_np_random_seed"}
# A reset draws a goal twice, and some environments draw again until it is far enough; a fixed one never changes.
_MOST_DRAWS = 1_000
_CAMERA = "corner"


class _Live(NamedTuple):
    """Stands for an attribute that is a live view of MuJoCo's arrays: a row of one of them."""

    field: str
    row: int


class State(NamedTuple):
    """What an environment is like between two steps.

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
    """A Meta-World environment whose state can be saved and loaded, also into another one of the same name.

    What it does depends only on the state, and so never on episodes before.

    Args:
        name: of the environment, as "reach-v3".

    Attributes:
        env: the environment itself.
        low: (3,) or (6,) least numbers of a task.
        high: the greatest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.env: Any = make_environment(name)
        # As set_task leaves it; the family has a time limit of its own.
        self.env._set_task_called = self.env.seeded_rand_vec = True
        self.env.max_path_length = sys.maxsize
        self.low: Floats = self.env._random_reset_space.low
        self.high: Floats = self.env._random_reset_space.high
        self._unused = self.save(np.zeros(0))
        self._renderer: Renderer | None = None

    def draw_goals(self, seed: int, num_goals: int) -> Floats:
        """Return what `num_goals` resets draw from NumPy's generator with this seed, as Meta-World's benchmarks do.

        Which numbers a reset accepts does not depend on what the arm does meanwhile, so time stands still here.
        """
        env = self.env
        self.load(self._unused)
        env._np_random, env._freeze_rand_vec = np.random.RandomState(seed), False
        env.do_simulation = lambda *arguments: mujoco.mj_forward(env.model, env.data)
        goals = []
        for _ in range(num_goals):
            env.reset()
            goals.append(env._last_rand_vec.copy())
        env._np_random = None
        return np.array(goals)

    def start(self, vector: Floats) -> State:
        """Return what episodes of a task start from: what Meta-World's own reset leads to.

        Raises:
            TaskError: If the numbers are out of range, or Meta-World would draw others.
        """
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
        """Return the present state, which shows in this observation."""
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
        # The forward pass has moved what the solver starts from.
        mujoco.mj_setState(env.model, env.data, state.physics, _STATE)

    def _kept(self, value: Any) -> Any:
        """Return an attribute as `State` keeps it."""
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
        # The camera hangs upside down.
        return self._renderer.draw(self.env.data.qpos)[::-1, ::-1].copy()

    def close(self) -> None:
        """Free what it holds."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self.env.close()
