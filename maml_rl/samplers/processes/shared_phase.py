"""Shared memory of the phases that workers sample by themselves: parameters to the workers, episodes back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.samplers.episode_arrays import EpisodeArrays, Layout
from maml_rl.samplers.phase import WORKER_STAGES
from maml_rl.samplers.processes.shared_buffers import map_arrays


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The properties of a phase that determine where its arrays are in the shared file.

    Attributes:
        sizes: M, B and T.
        parameters: layout of the policy's parameters, each (M, ...) or as the policy's own.
        constants: layout of the policy's constants (the buffers of its modules), the same for all tasks.
        is_stacked: whether every task has its own parameters, (M, ...).
        num_phases: how many phases' episodes are there at once.
    """

    sizes: tuple[int, int, int]
    parameters: Layout
    constants: Layout
    is_stacked: bool = True
    num_phases: int = 1


class SharedPhase:
    """Arrays in the shared file. The parent writes the parameters, each worker the episodes of its units.

    Args:
        file: descriptor of the shared file.
        start: where in the file the arrays begin.
        plan: their sizes.
        env: description of the slots.
        num_workers: W.

    Attributes:
        version: (1,) int64 number of the parameters that are there, counted up when others are written.
        parameters: {name: (M, ...)}, or as the policy's own.
        constants: {name: array}.
        episodes: of each phase, (M, T, B, ...), valid until the next phase of this number begins.
        stage_seconds: (W, stages) seconds of each worker on each of `WORKER_STAGES` in the last phase that was timed;
            the parent sets them to zero, and workers add to them.

    Raises:
        ChildEnvError: If the memory cannot be allocated.
    """

    version: NDArray[np.int64]
    stage_seconds: NDArray[np.float64]

    def __init__(
        self,
        file: int,
        start: int,
        plan: PhasePlan,
        env: EnvDescription,
        num_workers: int,
    ) -> None:
        sizes = plan.sizes
        episodes, phases = EpisodeArrays.layout(env, *sizes), range(plan.num_phases)
        layout: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "version": ((1,), np.dtype(np.int64)),
            "stage_seconds": ((num_workers, len(WORKER_STAGES)), np.dtype(np.float64)),
        }
        kinds = {"parameter": plan.parameters, "constant": plan.constants}
        kinds |= {f"episodes of phase {phase}": episodes for phase in phases}
        for kind, of_kind in kinds.items():
            layout |= {f"{kind} {name}": entry for name, entry in of_kind.items()}
        arrays, _ = map_arrays(
            file, start, layout, f"episodes of {len(phases)} x {sizes[0]} x {sizes[1]} x {sizes[2]} steps"
        )
        self.version, self.stage_seconds = arrays["version"], arrays["stage_seconds"]
        self.parameters, self.constants, *by_name = (
            {name: arrays[f"{kind} {name}"] for name in of_kind} for kind, of_kind in kinds.items()
        )
        self.episodes = [EpisodeArrays.of(each) for each in by_name]
