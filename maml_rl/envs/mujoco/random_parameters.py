"""Tasks that are dynamics parameters: masses, inertias, dampings and frictions of a model, each scaled by a factor.

Source: Rakelly et al. 2019, appendix, https://arxiv.org/abs/1903.08254, and the authors' environments.
"""

from typing import Any, ClassVar, Unpack

import mujoco
import numpy as np
from numpy.typing import NDArray

from maml_rl.arguments import check_positive
from maml_rl.envs.meta_env import Task
from maml_rl.envs.mujoco.mujoco_family import MujocoFamily, MujocoOptions
from maml_rl.envs.task_entries import TaskEntry
from maml_rl.envs.task_space import TaskParameter, TaskSpace

# Fields of the model, and the base of their factors.
_BASES = {"body_mass": 1.5, "body_inertia": 1.5, "geom_friction": 1.5, "dof_damping": 1.3}


class RandomParameters(MujocoFamily):
    """Mixin, to be put before the family of a body: every task has factors for the parameters of its model.

    The factors are 1.5^U(-3, 3) for each mass, principal moment of inertia and coefficient of friction, and
    1.3^U(-3, 3) for the damping of each joint, all drawn independently. The constants that MuJoCo derives from them are
    updated.

    Args:
        log_scale_limit: the exponents are drawn from U(-limit, limit).
        **options: see `MujocoFamily`; a task has factors by the names of the model's fields: `body_mass` (bodies,),
            `body_inertia` (bodies, 3), `geom_friction` (geoms, 3), `dof_damping` (nv,), the world being body 0.

    Raises:
        ValueError: If the limit is not positive; see also `MujocoFamily`.
    """

    task_description = (
        "body_mass, body_inertia, geom_friction: factors 1.5^U(-3, 3) each; dof_damping: factors 1.3^U(-3, 3) each"
    )
    body_model: ClassVar[Any]

    def __init__(self, num_envs: int = 1, *, log_scale_limit: float = 3.0, **options: Unpack[MujocoOptions]) -> None:
        self.log_scale_limit = check_positive("log_scale_limit", log_scale_limit)
        model: mujoco.MjModel = self.body_model()
        self._own_parameters: dict[str, NDArray[np.float64]] = {name: getattr(model, name).copy() for name in _BASES}
        entries = {
            name: TaskEntry(values.shape, "positive factors", _are_positive)
            for name, values in self._own_parameters.items()
        }
        # The family of the body loads the model itself.
        super().__init__(num_envs, entries, **options)  # type: ignore[call-arg]
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

    def model_fields(self) -> dict[str, NDArray[np.float64]]:
        """Return the fields in which the slots' models differ, (N, ...) by name."""
        return {name: own * self.tasks[name] for name, own in self._own_parameters.items()}


def _are_positive(factors: NDArray[np.float64]) -> bool:
    return bool((factors > 0.0).all())
