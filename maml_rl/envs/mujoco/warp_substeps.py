"""Substeps of MuJoCo Warp in an order in which a few hundred simulations take little time on a GPU.

There every launch waits for the one before, and few of them have work for the whole GPU. So what does not depend on
each other is launched side by side, as branches of one graph, and constraints are solved by one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mujoco_warp as mjw
import warp as wp
from mujoco_warp._src import forward as theirs
from mujoco_warp._src import smooth

from maml_rl.envs.mujoco.warp_newton import NewtonSolver

# Stages of Runge-Kutta after the first: how far they look ahead, and their weights.
_STAGES = ((0.5, 1.0 / 3.0), (0.5, 1.0 / 3.0), (1.0, 1.0 / 6.0))


class Substeps:
    """Launches substeps of simulations; nothing else launches work on them meanwhile.

    Args:
        model: of MuJoCo Warp, without flexible bodies and without sleep.
        data: of MuJoCo Warp.
    """

    def __init__(self, model: Any, data: Any) -> None:
        self._model, self._data = model, data
        self._accelerate = NewtonSolver(model, data).solve if NewtonSolver.can_solve(model) else self._accelerate_theirs
        # Forces of adhesion are passive ones, and depend on contacts.
        has_branches = data.qpos.device.is_cuda and not model.flg_adhesion
        self._branches = [wp.Stream(data.qpos.device) for _ in range(3)] if has_branches else []
        if not model.nsensor:
            # Only sensors look at them.
            model.ncam = model.nlight = 0
        self._integrate: Callable[[Any, Any], None] = {
            mjw.IntegratorType.EULER: mjw.euler,
            mjw.IntegratorType.RK4: self._runge_kutta,
        }.get(model.opt.integrator, mjw.implicit)

    def forward(self) -> None:
        """Compute what follows from positions, velocities and controls."""
        self._stage(with_sensors=True)

    def run(self, count: int) -> None:
        """Advance by some substeps."""
        for _ in range(count):
            self.forward()
            self._integrate(self._model, self._data)

    def _stage(self, *, with_sensors: bool) -> None:
        """Compute accelerations, and what MuJoCo computes once in a substep, if asked for."""
        model, data = self._model, self._data
        mjw.kinematics(model, data)
        self._beside(0, mjw.collision)
        mjw.com_pos(model, data)
        mjw.camlight(model, data)
        mjw.tendon(model, data)
        # Constraints between bodies read their velocities.
        mjw.com_vel(model, data)
        self._beside(0, mjw.make_constraint)
        self._beside(1, mjw.crb, smooth.tendon_armature)
        self._beside(2, mjw.transmission, _find_velocities, mjw.passive, mjw.fwd_actuation)
        mjw.rne(model, data)
        for branch in self._branches:
            wp.get_stream().wait_stream(branch)
        smooth.tendon_bias(model, data, data.qfrc_bias)
        if with_sensors and model.nsensor:
            data.sensordata.zero_()
            mjw.sensor_pos(model, data)
            mjw.sensor_vel(model, data)
        self._accelerate()
        if with_sensors and model.nsensor:
            mjw.sensor_acc(model, data)

    def _accelerate_theirs(self) -> None:
        mjw.fwd_acceleration(self._model, self._data, factorize=True)
        mjw.solve(self._model, self._data)

    def _beside(self, index: int, *works: Callable[[Any, Any], None]) -> None:
        """Launch work that depends on what has been launched so far, beside what follows."""
        with ExitStack() as stack:
            if self._branches:
                self._branches[index].wait_stream(wp.get_stream())
                stack.enter_context(wp.ScopedStream(self._branches[index], sync_enter=False))
            for work in works:
                work(self._model, self._data)

    def _runge_kutta(self, model: Any, data: Any) -> None:
        """Advance by Runge-Kutta of order 4, from the first stage on."""
        start = [wp.clone(array) for array in (data.qpos, data.qvel, data.act)]
        speed, acceleration, activation = (wp.zeros_like(array) for array in (data.qvel, data.qvel, data.act))
        theirs._rk_accumulate(model, data, 1.0 / 6.0, speed, acceleration, activation)
        for ahead, weight in _STAGES:
            theirs._rk_perturb_state(model, data, ahead, *start)
            self._stage(with_sensors=False)
            theirs._rk_accumulate(model, data, weight, speed, acceleration, activation)
        for array, values in zip((data.qpos, data.qvel, data.act, data.act_dot), (*start, activation), strict=True):
            wp.copy(array, values)
        theirs._advance(model, data, acceleration, speed)


def _find_velocities(model: Any, data: Any) -> None:
    """Compute the velocities of actuators and tendons."""
    wp.launch(
        theirs._actuator_velocity,
        dim=(data.nworld, model.nactuator),
        inputs=[data.qvel, data.moment_rownnz, data.moment_rowadr, data.moment_colind, data.actuator_moment],
        outputs=[data.actuator_velocity],
        block_dim=model.block_dim.actuator_velocity,
    )
    wp.launch(
        theirs._tendon_velocity,
        dim=(data.nworld, model.ntendon),
        inputs=[model.ten_J_rownnz, model.ten_J_rowadr, model.ten_J_colind, data.qvel, data.ten_J],
        outputs=[data.ten_velocity],
    )
