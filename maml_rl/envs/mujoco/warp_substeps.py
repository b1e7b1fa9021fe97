"""Substeps of MuJoCo Warp in an order in which a few hundred simulations take little time on a GPU.

There every launch waits for the one before, and few of them have work for the whole GPU. So what does not depend on
each other is launched side by side, as branches of one graph, and constraints are solved by one kernel, in which every
simulation ends by itself: MuJoCo Warp launches ten for an iteration of Newton's method, until the last simulation has
converged. The algorithm is the same here, and so are its tolerances.

Source: https://mujoco.readthedocs.io/en/stable/computation/index.html#algorithms
"""

# To Warp a literal is a constant; a variable begins as a call. Its arrays have no types for indices.
# ruff: noqa: UP018, RUF046
# mypy: disable-error-code="index,misc,no-any-return"

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mujoco_warp as mjw
import warp as wp
from mujoco_warp._src import forward as theirs
from mujoco_warp._src import smooth

# Lanes of a GPU that solve one simulation together.
_LANES = 32
# The smallest slope that can be told from the rounding of its terms, relative to them; and the smallest divisor.
_ROUNDING, _SMALLEST = wp.constant(4.0 * 2.0**-23), wp.constant(1e-15)
# States of a row.
_SATISFIED, _QUADRATIC = wp.constant(0), wp.constant(1)
_LINEAR_NEGATIVE, _LINEAR_POSITIVE = wp.constant(2), wp.constant(3)
_NOT_CONVERGED = wp.constant(int(mjw.OverflowType.ITERATIONS))


@wp.struct
class _Problem:
    """Constraints of N simulations with n degrees of freedom and at most R rows of constraints.

    Attributes:
        size: n.
        most_rows: R.
        iterations: of Newton's method, at most.
        line_iterations: of a line search, at most.
        tolerance: of a step's improvement and of the gradient, for one or N simulations.
        line_tolerance: of the slope, relative to that.
        mean_inertia: scale of both, for one or N simulations.
        inertia_start: row i of the inertia matrix has the entries from here to that of row i + 1.
        inertia_column: by entry.
        inertia_place: by entry, in `inertia`.
        inertia_element: (n, n) places in the lower triangle; negative for zeros.
        num_equalities: (N,) rows that come first.
        num_frictions: (N,) rows that come next.
        num_rows: (N,) all of them.
        jacobian: (N, R, n).
        weight: (N, R) of the quadratic cost of a row.
        reference: (N, R) acceleration at which a row costs nothing.
        friction: (N, R) force at which the cost of a friction becomes linear.
        inertia: (N, entries).
        passive_force: (N, n).
        bias_force: (N, n) of gravity and of velocities, with the other sign.
        actuator_force: (N, n).
        start: (N, n) first guess of the accelerations.
        residual: (N, R) scratch: the Jacobian times the accelerations, minus the reference.
        speed: (N, R) scratch: its change along the direction.
        active_weight: (N, R) scratch: the weights, zero where the cost of a row is not quadratic.
        direction: (N, n) scratch: of a line search.
        direction_force: (N, n) scratch: the inertia matrix times it.
        diagonal: (N, n) scratch: of the Cholesky factor.
        factor: (N, n + 1, n) scratch: the Hessian, then its factor; the last row is the gradient, then what solves it.
        smooth_force: (N, n) result: all forces except those of constraints.
        acceleration: (N, n) result.
        inertia_force: (N, n) result: the inertia matrix times the acceleration.
        constraint_force: (N, n) result.
        row_force: (N, R) result.
        row_state: (N, R) result.
        num_iterations: (N,) result.
        overflow: (N,) result: gets a bit where iterations did not suffice.
    """

    size: int
    most_rows: int
    iterations: int
    line_iterations: int
    tolerance: wp.array[float]
    line_tolerance: wp.array[float]
    mean_inertia: wp.array[float]
    inertia_start: wp.array[int]
    inertia_column: wp.array[int]
    inertia_place: wp.array[int]
    inertia_element: wp.array2d[int]
    num_equalities: wp.array[int]
    num_frictions: wp.array[int]
    num_rows: wp.array[int]
    jacobian: wp.array3d[float]
    weight: wp.array2d[float]
    reference: wp.array2d[float]
    friction: wp.array2d[float]
    inertia: wp.array2d[float]
    passive_force: wp.array2d[float]
    bias_force: wp.array2d[float]
    actuator_force: wp.array2d[float]
    start: wp.array2d[float]
    residual: wp.array2d[float]
    speed: wp.array2d[float]
    active_weight: wp.array2d[float]
    direction: wp.array2d[float]
    direction_force: wp.array2d[float]
    diagonal: wp.array2d[float]
    factor: wp.array3d[float]
    smooth_force: wp.array2d[float]
    acceleration: wp.array2d[float]
    inertia_force: wp.array2d[float]
    constraint_force: wp.array2d[float]
    row_force: wp.array2d[float]
    row_state: wp.array2d[int]
    num_iterations: wp.array[int]
    overflow: wp.array[int]


def _can_solve(model: Any) -> bool:
    """Return whether a model of MuJoCo Warp has Newton's method, pyramidal cones and dense Jacobians."""
    return (
        model.opt.solver == mjw.SolverType.NEWTON
        and model.opt.cone == mjw.ConeType.PYRAMIDAL
        and not model.is_sparse
        and model.nv > 0
        and not model.opt.disableflags & mjw.DisableBit.WARMSTART
    )


def _problem_of(model: Any, data: Any) -> Any:
    """Return the simulations of MuJoCo Warp for `_solve`, which reads and writes their arrays."""
    efc, sims, size, rows = data.efc, data.nworld, model.nv, data.njmax
    problem: Any = _Problem()
    problem.size, problem.most_rows = size, rows
    problem.iterations, problem.line_iterations = model.opt.iterations, model.opt.ls_iterations
    problem.tolerance, problem.line_tolerance = model.opt.tolerance, model.opt.ls_tolerance
    problem.mean_inertia = model.stat.meaninertia
    problem.inertia_start, problem.inertia_column = model.M_mulm_rowadr, model.M_mulm_col
    problem.inertia_place, problem.inertia_element = model.M_mulm_madr, model.M_elemid
    problem.num_equalities, problem.num_frictions, problem.num_rows = data.ne, data.nf, data.nefc
    problem.jacobian, problem.weight, problem.reference, problem.friction = efc.J, efc.D, efc.aref, efc.frictionloss
    problem.inertia, problem.start = data.M, data.qacc_warmstart
    problem.passive_force, problem.bias_force = data.qfrc_passive, data.qfrc_bias
    problem.actuator_force, problem.smooth_force = data.qfrc_actuator, data.qfrc_smooth
    problem.residual, problem.speed, problem.active_weight = (wp.zeros((sims, rows), dtype=float) for _ in range(3))
    problem.direction, problem.direction_force, problem.diagonal = (
        wp.zeros((sims, size), dtype=float) for _ in range(3)
    )
    problem.factor = wp.zeros((sims, size + 1, size), dtype=float)
    problem.acceleration, problem.inertia_force = data.qacc, efc.Ma
    problem.constraint_force, problem.row_force, problem.row_state = data.qfrc_constraint, efc.force, efc.state
    problem.num_iterations, problem.overflow = data.solver_niter, data.overflow
    return problem


@wp.func_native(snippet="WP_TILE_SYNC();")
def _wait() -> None:
    """Wait for the other lanes of a simulation."""


@wp.func
def _sum(value: float) -> float:
    return wp.tile_reduce(wp.add, wp.tile(value))[0]


@wp.func
def _times_inertia(p: _Problem, sim: int, row: int, vector: wp.array2d[float]) -> float:
    total = float(0.0)
    for entry in range(p.inertia_start[row], p.inertia_start[row + 1]):
        total += p.inertia[sim, p.inertia_place[entry]] * vector[sim, p.inertia_column[entry]]
    return total


@wp.func
def _times_jacobian(p: _Problem, sim: int, row: int, vector: wp.array2d[float]) -> float:
    total = float(0.0)
    for i in range(p.size):
        total += p.jacobian[sim, row, i] * vector[sim, i]
    return total


@wp.func
def _begin(p: _Problem, sim: int, lane: int, rows: int) -> None:
    """Begin with the first guess."""
    for i in range(lane, p.size, wp.block_dim()):
        p.acceleration[sim, i] = p.start[sim, i]
        p.smooth_force[sim, i] = p.passive_force[sim, i] - p.bias_force[sim, i] + p.actuator_force[sim, i]
    _wait()
    for i in range(lane, p.size, wp.block_dim()):
        p.inertia_force[sim, i] = _times_inertia(p, sim, i, p.acceleration)
    for row in range(lane, rows, wp.block_dim()):
        p.residual[sim, row] = _times_jacobian(p, sim, row, p.acceleration) - p.reference[sim, row]


@wp.func
def _find_forces(p: _Problem, sim: int, lane: int, rows: int) -> None:
    """Set the forces and the states of rows."""
    equalities = p.num_equalities[sim]
    frictions = equalities + p.num_frictions[sim]
    for row in range(lane, rows, wp.block_dim()):
        force = -p.weight[sim, row] * p.residual[sim, row]
        state = _QUADRATIC
        if row >= frictions:
            if p.residual[sim, row] >= 0.0:
                force = 0.0
                state = _SATISFIED
        elif row >= equalities:
            most = p.friction[sim, row]
            if force >= most:
                force = most
                state = _LINEAR_NEGATIVE
            elif force <= -most:
                force = -most
                state = _LINEAR_POSITIVE
        p.row_force[sim, row] = force
        p.row_state[sim, row] = state
        p.active_weight[sim, row] = wp.where(state == _QUADRATIC, p.weight[sim, row], 0.0)
    _wait()


@wp.func
def _find_gradient(p: _Problem, sim: int, lane: int, rows: int) -> float:
    """Set the forces of constraints, and the gradient; return its length."""
    square = float(0.0)
    for i in range(lane, p.size, wp.block_dim()):
        force = float(0.0)
        for row in range(rows):
            force += p.jacobian[sim, row, i] * p.row_force[sim, row]
        gradient = p.inertia_force[sim, i] - p.smooth_force[sim, i] - force
        p.constraint_force[sim, i] = force
        p.factor[sim, p.size, i] = gradient
        square += gradient * gradient
    return wp.sqrt(_sum(square))


@wp.func
def _factor_hessian(p: _Problem, sim: int, lane: int, rows: int) -> float:
    """Set the Cholesky factor of M + J^T D J, and its solution for the gradient, whose squared length this returns."""
    for element in range(lane, p.size * (p.size + 1) // 2, wp.block_dim()):
        i = (int(wp.sqrt(float(8 * element + 1))) - 1) // 2
        j = element - i * (i + 1) // 2
        total = float(0.0)
        if p.inertia_element[i, j] >= 0:
            total = p.inertia[sim, p.inertia_element[i, j]]
        for row in range(rows):
            total += p.active_weight[sim, row] * p.jacobian[sim, row, i] * p.jacobian[sim, row, j]
        p.factor[sim, i, j] = total
    _wait()
    # Column by column; the gradient is a further row. The diagonal is kept apart, as all lanes read it meanwhile.
    for k in range(p.size):
        pivot = p.factor[sim, k, k]
        for j in range(k):
            pivot -= p.factor[sim, k, j] * p.factor[sim, k, j]
        root = wp.sqrt(wp.max(pivot, _SMALLEST))
        if lane == 0:
            p.diagonal[sim, k] = root
        for i in range(k + 1 + lane, p.size + 1, wp.block_dim()):
            total = p.factor[sim, i, k]
            for j in range(k):
                total -= p.factor[sim, i, j] * p.factor[sim, k, j]
            p.factor[sim, i, k] = total / root
        _wait()
    square = float(0.0)
    for i in range(lane, p.size, wp.block_dim()):
        square += p.factor[sim, p.size, i] * p.factor[sim, p.size, i]
    return _sum(square)


@wp.func
def _find_direction(p: _Problem, sim: int, lane: int) -> None:
    """Set Newton's direction, by what is left to solve."""
    _wait()
    for back in range(p.size):
        k = p.size - 1 - back
        value = p.factor[sim, p.size, k] / p.diagonal[sim, k]
        if lane == 0:
            p.direction[sim, k] = -value
        for i in range(lane, k, wp.block_dim()):
            p.factor[sim, p.size, i] -= p.factor[sim, k, i] * value
        _wait()


@wp.func
def _cost_of_row(
    is_equality: bool, friction: float, weight: float, residual: float, speed: float, step: float
) -> wp.vec3:
    """Return by how much the cost of a row changes in a step, and its slope and its curvature there.

    Args:
        is_equality: whether the cost is quadratic everywhere.
        friction: the force at which it becomes linear; negative for a row that costs on one side alone.
        weight: of the quadratic cost.
        residual: before the step.
        speed: its change in a step of 1.
        step: how far.
    """
    after = residual + step * speed
    change = weight * step * speed * (residual + 0.5 * step * speed)
    inside = wp.vec3(change, weight * after * speed, weight * speed * speed)
    if is_equality:
        return inside
    if friction >= 0.0:
        edge = friction / wp.max(weight, _SMALLEST)
        is_before, is_after = wp.abs(residual) < edge, wp.abs(after) < edge
        if is_before and is_after:
            return inside
        cost = wp.where(is_after, 0.5 * weight * after * after, friction * (wp.abs(after) - 0.5 * edge))
        cost -= wp.where(is_before, 0.5 * weight * residual * residual, friction * (wp.abs(residual) - 0.5 * edge))
        if is_after:
            return wp.vec3(cost, inside[1], inside[2])
        return wp.vec3(cost, wp.sign(after) * friction * speed, 0.0)
    if after >= 0.0:
        return wp.vec3(wp.where(residual < 0.0, -0.5 * weight * residual * residual, 0.0), 0.0, 0.0)
    if residual >= 0.0:
        return wp.vec3(0.5 * weight * after * after, inside[1], inside[2])
    return inside


@wp.func
def _search_line(p: _Problem, sim: int, lane: int, rows: int, tolerance: float) -> float:
    """Step to where the slope along the direction is zero, and return the improvement.

    By Newton's method, or by the secant where that leaves the bounds.

    Args:
        p: of which accelerations, and what follows from them, are changed.
        sim: which simulation.
        lane: of it.
        rows: of its constraints.
        tolerance: of the slope, relative to the length of the direction.
    """
    slope, curvature, square = float(0.0), float(0.0), float(0.0)
    for i in range(lane, p.size, wp.block_dim()):
        force, direction = _times_inertia(p, sim, i, p.direction), p.direction[sim, i]
        p.direction_force[sim, i] = force
        slope += direction * (p.inertia_force[sim, i] - p.smooth_force[sim, i])
        curvature += direction * force
        square += direction * direction
    for row in range(lane, rows, wp.block_dim()):
        p.speed[sim, row] = _times_jacobian(p, sim, row, p.direction)
    smooth = wp.tile_reduce(wp.add, wp.tile(wp.vec3(slope, curvature, square), preserve_type=True))[0]
    smallest = wp.max(tolerance * wp.sqrt(smooth[2]), 1e-6)

    equalities = p.num_equalities[sim]
    frictions = equalities + p.num_frictions[sim]
    step, improvement = float(0.0), float(0.0)
    low, low_slope, high, high_slope = float(0.0), float(0.0), float(0.0), float(0.0)
    for trial in range(p.line_iterations + 1):
        if trial > 0:
            following = step - slope / wp.max(curvature, _SMALLEST)
            if high > 0.0 and (following <= low or following >= high):
                following = low + (high - low) * low_slope / (low_slope - high_slope)
            # Nothing between the two can be told apart.
            if wp.abs(following - step) <= _ROUNDING * step:
                break
            step = following
        local, size_of_terms = wp.vec3(0.0), float(0.0)
        for row in range(lane, rows, wp.block_dim()):
            friction = float(-1.0)
            if row >= equalities and row < frictions:
                friction = p.friction[sim, row]
            cost = _cost_of_row(
                row < equalities, friction, p.weight[sim, row], p.residual[sim, row], p.speed[sim, row], step
            )
            local += cost
            size_of_terms += wp.abs(cost[1])
        local4 = wp.vec4(local[0], local[1], local[2], size_of_terms)
        found = wp.tile_reduce(wp.add, wp.tile(local4, preserve_type=True))[0]
        slope = found[1] + smooth[0] + step * smooth[1]
        curvature = found[2] + smooth[1]
        if trial == 0:
            smallest = wp.max(smallest, _ROUNDING * (found[3] + wp.abs(smooth[0])))
        else:
            improvement = -(found[0] + step * (smooth[0] + 0.5 * step * smooth[1]))
            # Of NaN, too.
            if not wp.abs(slope) >= smallest:
                break
        if slope < 0.0:
            low = step
            low_slope = slope
        else:
            high = step
            high_slope = slope
    if improvement <= 0.0:
        return 0.0
    for i in range(lane, p.size, wp.block_dim()):
        p.acceleration[sim, i] += step * p.direction[sim, i]
        p.inertia_force[sim, i] += step * p.direction_force[sim, i]
    for row in range(lane, rows, wp.block_dim()):
        p.residual[sim, row] += step * p.speed[sim, row]
    return improvement


@wp.kernel(enable_backward=False)
def _solve(p: _Problem) -> None:
    sim, lane = wp.tid()
    rows = wp.min(p.num_rows[sim], p.most_rows)
    tolerance = p.tolerance[sim % p.tolerance.shape[0]]
    tolerance *= p.mean_inertia[sim % p.mean_inertia.shape[0]] * float(p.size)
    line_tolerance = p.line_tolerance[sim % p.line_tolerance.shape[0]] * tolerance

    _begin(p, sim, lane, rows)
    improvement, count, is_converged = float(0.0), int(0), bool(False)
    # The first pass only finds a direction.
    for iteration in range(p.iterations + 1):
        count = iteration
        _find_forces(p, sim, lane, rows)
        gradient = _find_gradient(p, sim, lane, rows)
        if iteration > 0 and wp.min(improvement, gradient) < tolerance:
            is_converged = True
            break
        decrement = _factor_hessian(p, sim, lane, rows)
        # Of NaN, too: it will be found in the observations.
        if iteration > 0 and not 0.5 * decrement >= tolerance:
            is_converged = True
            break
        if iteration < p.iterations:
            _find_direction(p, sim, lane)
            improvement = _search_line(p, sim, lane, rows, line_tolerance)
    if lane == 0:
        p.num_iterations[sim] = count
        if not is_converged:
            p.overflow[sim] = p.overflow[sim] | _NOT_CONVERGED


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
        self._problem = _problem_of(model, data) if _can_solve(model) else None
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

    def _accelerate(self) -> None:
        """Find the accelerations and the forces of constraints."""
        if self._problem is not None:
            wp.launch_tiled(_solve, dim=self._data.nworld, inputs=[self._problem], block_dim=_LANES)
            return
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
