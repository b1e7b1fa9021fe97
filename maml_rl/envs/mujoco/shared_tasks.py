"""Tasks that several bodies share, each a mixin before the family of a body: a velocity, a direction, parameters."""

from typing import Unpack

import mujoco
import numpy as np

from maml_rl.arguments import check_interval, check_positive
from maml_rl.arrays import Floats
from maml_rl.envs.meta_env import Task
from maml_rl.envs.mujoco.mujoco_family import MujocoFamily, MujocoOptions
from maml_rl.envs.tasks import TaskEntry, TaskParameter, TaskSpace

# Fields of the model, and the base of their factors.
_BASES = {"body_mass": 1.5, "body_inertia": 1.5, "geom_friction": 1.5, "dof_damping": 1.3}


def _is_direction(number: Floats) -> bool:
    return bool(np.abs(number) == 1.0)


class VelocityTasks(MujocoFamily):
    """Keep the velocity of the task: the body's reward for a velocity v is -|v - velocity|.

    Args:
        low: lowest velocity of a sampled task, in m/s.
        high: highest.
        **options: see `MujocoFamily`; the task is `{"velocity": number}`.
    """

    task_description = "velocity: forward speed to keep in m/s, uniform in [0, 2]"

    def __init__(
        self, num_envs: int = 1, *, low: float = 0.0, high: float = 2.0, **options: Unpack[MujocoOptions]
    ) -> None:
        self.low, self.high = check_interval(low, high)
        self.task_space = TaskSpace.of_numbers(velocity=TaskParameter.between(self.low, self.high))
        super().__init__(num_envs, {"velocity": TaskEntry()}, **options)

    def _forward_reward(self, velocity: Floats) -> Floats:
        reward: Floats = -self.xp.abs(velocity - self.tasks["velocity"])
        return reward


class AngleTasks(MujocoFamily):
    """Walk in the direction of the task, any in the plane."""

    task_description = "angle: the direction to walk in, in radians, uniform in [0, 2 pi)"
    task_space = TaskSpace.of_numbers(angle=TaskParameter.between(0.0, 2.0 * np.pi))

    def __init__(self, num_envs: int = 1, **options: Unpack[MujocoOptions]) -> None:
        super().__init__(num_envs, {"angle": TaskEntry()}, **options)

    def _tasks_changed(self) -> None:
        xp, angle = self.xp, self.tasks["angle"]
        self._direction = xp.stack((xp.cos(angle), xp.sin(angle)), axis=1)

    def _task_reward(self, velocity: Floats) -> Floats:
        """Return the parts (N,) of velocities (N, 2) along the directions."""
        along: Floats = velocity[:, 0] * self._direction[:, 0] + velocity[:, 1] * self._direction[:, 1]
        return along


class DirectionTasks(MujocoFamily):
    """Run in the direction of the task, forward or backward: the body's reward for a velocity v is direction * v.

    Args:
        **options: see `MujocoFamily`; the task is `{"direction": -1 or 1}`.
    """

    task_description = "direction: 1 to run forward, -1 to run backward, each with probability 1/2"
    task_space = TaskSpace.of_numbers(direction=TaskParameter.choice(-1.0, 1.0))

    def __init__(self, num_envs: int = 1, **options: Unpack[MujocoOptions]) -> None:
        entries = {"direction": TaskEntry((), "-1 or 1", _is_direction)}
        super().__init__(num_envs, entries, **options)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return [{"direction": direction} for direction in (2.0 * random.integers(2, size=num_tasks) - 1.0).tolist()]

    def _forward_reward(self, velocity: Floats) -> Floats:
        reward: Floats = self.tasks["direction"] * velocity
        return reward


class RandomParameters(MujocoFamily):
    """Mixin, to be put before the family of a body: every task has factors for the parameters of its model.

    The factors are 1.5^U(-3, 3) for each mass, principal moment of inertia and coefficient of friction, and
    1.3^U(-3, 3) for the damping of each joint, all drawn independently. The constants that MuJoCo derives from them are
    updated.

    Args:
        log_scale_limit: the exponents are drawn from U(-limit, limit).
        **options: see `MujocoFamily`; a task has factors by the names of the model's fields: `body_mass` (bodies,),
            `body_inertia` (bodies, 3), `geom_friction` (geoms, 3), `dof_damping` (nv,), the world being body 0.

    Source: Rakelly et al. 2019, appendix, https://arxiv.org/abs/1903.08254, and the authors' environments.
    """

    task_description = (
        "body_mass, body_inertia, geom_friction: factors 1.5^U(-3, 3) each; dof_damping: factors 1.3^U(-3, 3) each"
    )

    def __init__(self, num_envs: int = 1, *, log_scale_limit: float = 3.0, **options: Unpack[MujocoOptions]) -> None:
        self.log_scale_limit = check_positive("log_scale_limit", log_scale_limit)
        model: mujoco.MjModel = self.body_model()
        self._own_parameters: dict[str, Floats] = {name: getattr(model, name).copy() for name in _BASES}
        entries = {
            name: TaskEntry(values.shape, "positive factors", _are_positive)
            for name, values in self._own_parameters.items()
        }
        super().__init__(num_envs, entries, **options)
        limit = self.log_scale_limit
        self.task_space = TaskSpace(
            {
                name: (TaskParameter.between(base**-limit, base**limit, "log"), entries[name].shape)
                for name, base in _BASES.items()
            }
        )
        self._tasks_changed()

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        limit = self.log_scale_limit
        return [
            {
                name: _BASES[name] ** random.uniform(-limit, limit, values.shape)
                for name, values in self._own_parameters.items()
            }
            for _ in range(num_tasks)
        ]

    def _tasks_changed(self) -> None:
        # The first task is set before the physics exists.
        if hasattr(self, "physics"):
            self.physics.set_model(self.model_fields())

    def model_fields(self) -> dict[str, Floats]:
        """Return the fields in which the slots' models differ, (N, ...) by name."""
        return {name: own * self.tasks[name] for name, own in self._own_parameters.items()}


def _are_positive(factors: Floats) -> bool:
    return bool((factors > 0.0).all())
