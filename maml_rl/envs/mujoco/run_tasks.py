"""Tasks that several bodies share: run at a velocity, run in a direction."""

import numpy as np

from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskEntry

DIRECTION = {"direction": TaskEntry((), "-1 or 1", lambda direction: abs(float(direction)) == 1.0)}


def check_range(low: float, high: float) -> tuple[float, float]:
    """Return (low, high).

    Raises:
        ValueError: If low is not below high, or one is not finite.
    """
    if not (np.isfinite([low, high]).all() and low < high):
        raise ValueError(f"low must be below high, both finite, got {low} and {high}")
    return low, high


def draw_velocities(random: np.random.Generator, num_tasks: int, low: float, high: float) -> list[Task]:
    """Draw tasks {"velocity": number}, uniform in [low, high], m/s."""
    return [{"velocity": float(velocity)} for velocity in random.uniform(low, high, num_tasks)]


def draw_directions(random: np.random.Generator, num_tasks: int) -> list[Task]:
    """Draw tasks {"direction": -1.0 or 1.0}, each with probability one half."""
    return [{"direction": float(direction)} for direction in 2.0 * random.integers(2, size=num_tasks) - 1.0]
