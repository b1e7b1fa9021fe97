"""Humanoid family: a two-legged body that must walk in the direction of the task, any in the plane.

Source: Rakelly et al. 2019 (PEARL), https://arxiv.org/abs/1903.08254, and the authors' environments.
"""

from typing import Any, Unpack

from numpy.typing import NDArray

from maml_rl.arrays import Floats, Mask, as_floats
from maml_rl.envs.family import one_slot
from maml_rl.envs.mujoco.mujoco_family import MujocoOptions, sum_of_squares
from maml_rl.envs.mujoco.shared_tasks import AngleTasks

_FORWARD_REWARD = 1.25
_SURVIVE_REWARD = 5.0
_CONTACT_COST, _LARGEST_CONTACT_COST = 5e-7, 10.0
_LOWEST, _HIGHEST = 1.0, 2.0


class HumanoidDirVectorEnv(AngleTasks):
    """Walk in the direction of the task: the reward is that of Gymnasium's Humanoid-v5, along the direction.

    It is 1.25 times the velocity of the center of mass along (cos angle, sin angle), plus 5 for a healthy state, minus
    0.1 |a|^2, and minus 5e-7 times the sum of the squares of the contact forces, 10 at most. An episode terminates when
    the torso's height leaves (1, 2) m. Start states and observations (348,) are those of Humanoid-v5, a step is five
    substeps, 0.015 s; contact forces are those at the start of the last substep.

    Args:
        **options: see `MujocoFamily`; the task is `{"angle": radians}`.
    """

    model_file, contact_forces, observation_size = "humanoid.xml", True, 348
    start_noise, uniform_velocities, control_cost = 1e-2, True, 0.1
    velocity_terms = ("x_velocity", "y_velocity")

    def __init__(self, num_envs: int = 1, **options: Unpack[MujocoOptions]) -> None:
        super().__init__(num_envs, **options)
        self._mass_fractions = tuple((self.model.body_mass / self.model.body_mass.sum()).tolist())

    def _bind_fields(self) -> None:
        super()._bind_fields()
        self._centers = self.physics.bind("xipos")
        self._forces = self.physics.bind("cfrc_ext").reshape(self.num_envs, -1)
        # All bodies except the world, and all actuator forces except those of the free joint.
        bodies = [self.physics.bind(name)[:, 1:] for name in ("cinert", "cvel")]
        self._seen = [*bodies, self.physics.bind("qfrc_actuator")[:, 6:], self.physics.bind("cfrc_ext")[:, 1:]]

    def _place(self) -> Floats:
        """Return the center of mass (N, 2) in the plane."""
        center: Floats = self.xp.zeros((self.num_envs, 2))
        # A loop over bodies: a sum over an axis may be rounded differently for another number of slots.
        for body, fraction in enumerate(self._mass_fractions):
            center += fraction * self._centers[:, body, :2]
        return center

    def _task_reward(self, velocity: Floats) -> Floats:
        return _FORWARD_REWARD * super()._task_reward(velocity)

    def _survival(self) -> tuple[Floats, Mask]:
        healthy = (self._qpos[:, 2] > _LOWEST) & (self._qpos[:, 2] < _HIGHEST)
        return _SURVIVE_REWARD * as_floats(healthy), ~healthy

    def _contact_reward(self) -> Floats:
        contact: Floats = -self.xp.minimum(_CONTACT_COST * sum_of_squares(self._forces), _LARGEST_CONTACT_COST)
        return contact

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:, :22] = self._qpos[:, 2:]
        out[:, 22:45] = self._qvel
        start = 45
        for values in self._seen:
            flat = values.reshape(self.num_envs, -1)
            out[:, start : start + flat.shape[1]] = flat
            start += flat.shape[1]


HumanoidDirEnv = one_slot(HumanoidDirVectorEnv)
