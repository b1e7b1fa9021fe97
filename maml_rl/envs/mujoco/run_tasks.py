"""Tasks that several bodies share: keep a velocity, run in a direction."""

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskEntry


def _is_direction(number: NDArray[np.float64]) -> bool:
    return bool(np.abs(number) == 1.0)


VELOCITY = {"velocity": TaskEntry()}
DIRECTION = {"direction": TaskEntry((), "-1 or 1", _is_direction)}


def draw_velocities(random: np.random.Generator, num_tasks: int, low: float, high: float) -> list[Task]:
    """Draw tasks {"velocity": number}, uniform in [low, high], in m/s."""
    return [{"velocity": velocity} for velocity in random.uniform(low, high, num_tasks).tolist()]


def draw_directions(random: np.random.Generator, num_tasks: int) -> list[Task]:
    """Draw tasks {"direction": -1.0 or 1.0}, each with probability 1/2."""
    return [{"direction": direction} for direction in (2.0 * random.integers(2, size=num_tasks) - 1.0).tolist()]
