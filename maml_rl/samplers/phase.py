"""One phase of sampling, described by one value.

A worker that does not act itself never imports torch, so this module only names its types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from maml_rl.envs.meta_env import Task
from maml_rl.seeding import PhaseStreams

if TYPE_CHECKING:
    from torch import Tensor

    from maml_rl.policies import Policy


# The stages of a phase that a worker measures.
WORKER_STAGES = ("physics", "inference", "assembly")
# Units for each worker, where workers take them: more even out, but each costs a loop of its own.
UNITS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """One batch to sample: B episodes of each of M tasks under fixed parameters.

    Attributes:
        tasks: M tasks.
        policy: chooses the actions.
        params: parameters by name, (M, ...) per task or as the policy's own; None for the policy's own.
        streams: the random streams; `streams.first_task` is the number of `tasks[0]`.
        episodes_per_task: B.
        horizon: T, steps of the longest possible episode.
        reset_memory: whether the policy's memory is reset at the start of every episode, not only of the phase.
        deterministic: whether the policy takes its most probable actions instead of drawing them.
    """

    tasks: tuple[Task, ...]
    policy: Policy
    params: Mapping[str, Tensor] | None
    streams: PhaseStreams
    episodes_per_task: int
    horizon: int
    reset_memory: bool = False
    deterministic: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, B and T."""
        return len(self.tasks), self.episodes_per_task, self.horizon

    def part(self, tasks: slice) -> Phase:
        """Return the phase of a range of the tasks. Its episodes are those of the whole phase there, bit for bit."""
        start, stop, _ = tasks.indices(len(self.tasks))
        params = self.params
        if params is not None:
            own = dict(self.policy.named_parameters())
            params = {
                name: value if value.shape == own[name].shape else value[start:stop] for name, value in params.items()
            }
        streams = self.streams._replace(first_task=self.streams.first_task + start)
        return replace(self, tasks=self.tasks[start:stop], params=params, streams=streams)

    def without_policy(self) -> Phase:
        """Return the phase for a worker that has the policy and gets the parameters separately."""
        return replace(self, policy=None, params=None)  # type: ignore[arg-type]

    def with_policy(self, policy: Policy, params: Mapping[str, Tensor] | None) -> Phase:
        """Return the phase with its policy and parameters."""
        return replace(self, policy=policy, params=params)


def split_tasks(num_tasks: int, num_units: int) -> list[slice]:
    """Return contiguous ranges of tasks, all except the last of one size: the units that idle workers take.

    Args:
        num_tasks: M.
        num_units: how many ranges there may be.
    """
    size = -(-num_tasks // max(1, num_units))
    return [slice(start, min(start + size, num_tasks)) for start in range(0, num_tasks, size)]
