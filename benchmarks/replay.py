"""The limit of sampling: only the physics, on the trajectories that were sampled.

The initial states and the applied controls of sampled episodes are replayed by plain `mj_step` in a tight loop, in one
process per core. The trajectories must be the same, because contacts make real states more expensive than resting ones.
The model must be the family's own, so that both sides pay for what it computes besides the motion (Ant's contact
forces).
"""

import copy
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.machine import usable_cores

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Trajectories to replay.

    Attributes:
        qpos: (E, nq) initial positions of E episodes.
        qvel: (E, nv) initial velocities.
        controls: (E, T, nu) controls of the actuators.
        lengths: (E,) steps of each episode.
        fields: of the model, where they differ between episodes: (E, ...) by name.
    """

    qpos: Float64
    qvel: Float64
    controls: NDArray[np.floating[Any]]
    lengths: NDArray[np.int64]
    fields: Mapping[str, Float64] = field(default_factory=dict)

    def part(self, episodes: slice) -> "Trajectories":
        """Return some of the episodes."""
        return Trajectories(
            self.qpos[episodes],
            self.qvel[episodes],
            self.controls[episodes],
            self.lengths[episodes],
            {name: values[episodes] for name, values in self.fields.items()},
        )


class Replay:
    """One process per core that replays trajectories on demand.

    Args:
        model: the family's `MjModel`.
        substeps: physics steps per environment step.
        processes: their number; one per usable core by default.
    """

    def __init__(self, model: Any, substeps: int, processes: int | None = None) -> None:
        # A fresh interpreter has no other threads, and imports only MuJoCo and NumPy.
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(processes or usable_cores()):
            ours, theirs = context.Pipe()
            process = context.Process(target=_replay_on_demand, args=(theirs, model, substeps), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes if process.pid is not None]

    def load(self, trajectories: Trajectories) -> None:
        """Hand every process an equal share of the episodes."""
        count, processes = len(trajectories.lengths), len(self._connections)
        for index, connection in enumerate(self._connections):
            connection.send(trajectories.part(slice(index * count // processes, (index + 1) * count // processes)))
        for connection in self._connections:
            connection.recv()

    def run(self) -> float:
        """Replay the loaded episodes; return the seconds."""
        start = time.perf_counter()
        for connection in self._connections:
            connection.send("run")
        for connection in self._connections:
            connection.recv()
        return time.perf_counter() - start

    def final_states(self) -> tuple[Float64, Float64]:
        """Return positions (E, nq) and velocities (E, nv) at the end of the episodes of the last run."""
        for connection in self._connections:
            connection.send("final states")
        answers: Sequence[tuple[Float64, Float64]] = [connection.recv() for connection in self._connections]
        return np.concatenate([qpos for qpos, _ in answers]), np.concatenate([qvel for _, qvel in answers])

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10.0)


def _replay_on_demand(connection: Connection, model: Any, substeps: int) -> None:
    import mujoco

    data = mujoco.MjData(model)
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    size = mujoco.mj_stateSize(model, kind)
    states, controls = np.empty((0, size)), np.empty((0, 0, model.nu))
    lengths = np.empty(0, np.int64)
    models = [model]
    finals = np.empty((0, model.nq)), np.empty((0, model.nv))
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        if isinstance(command, Trajectories):
            models = _models(model, data, command)
            states = _initial_states(models, data, command, size, kind)
            controls, lengths = np.ascontiguousarray(command.controls, np.float64), command.lengths
            finals = np.empty((len(lengths), model.nq)), np.empty((len(lengths), model.nv))
            connection.send("loaded")
        elif command == "run":
            _run(mujoco, models, data, states, controls, lengths, substeps, finals)
            connection.send("ready")
        else:
            connection.send(finals)


def _models(model: Any, data: Any, trajectories: Trajectories) -> list[Any]:
    """Return the model of each episode; consecutive episodes with the same fields share theirs."""
    import mujoco

    models: list[Any] = []
    last: list[Float64] = []
    for episode in range(len(trajectories.lengths)):
        values = [rows[episode] for rows in trajectories.fields.values()]
        if not models or not all(map(np.array_equal, values, last)):
            models.append(copy.copy(model) if values else model)
            for name, value in zip(trajectories.fields, values, strict=True):
                getattr(models[-1], name)[...] = value
            if values:
                mujoco.mj_setConst(models[-1], data)
            last = values
        else:
            models.append(models[-1])
    return models


def _initial_states(models: list[Any], data: Any, trajectories: Trajectories, size: int, kind: Any) -> Float64:
    """Return (E, size) integration states, warm start included, as a reset leaves them."""
    import mujoco

    states = np.empty((len(trajectories.lengths), size))
    for model, state, qpos, qvel in zip(models, states, trajectories.qpos, trajectories.qvel, strict=True):
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        mujoco.mj_getState(model, data, state, kind)
    return states


def _run(
    mujoco: Any,
    models: list[Any],
    data: Any,
    states: Float64,
    controls: Float64,
    lengths: NDArray[np.int64],
    substeps: int,
    finals: tuple[Float64, Float64],
) -> None:
    """Replay all episodes: the tight loop whose speed is the limit."""
    step, control, kind = mujoco.mj_step, data.ctrl, mujoco.mjtState.mjSTATE_INTEGRATION
    for episode, length in enumerate(lengths.tolist()):
        model = models[episode]
        mujoco.mj_setState(model, data, states[episode], kind)
        for row in controls[episode, :length]:
            control[:] = row
            step(model, data, substeps)
        finals[0][episode], finals[1][episode] = data.qpos, data.qvel
