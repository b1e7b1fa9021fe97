"""The amount to collect, and its layout: plain data, importable without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """The amount to collect.

    Attributes:
        num_tasks: M.
        episodes_per_task: B.
        horizon: T.
        hidden_sizes: of the policy, tanh units.
        max_slots: environments that a system holds at once; the tasks are collected in waves of whole tasks.
        seed: of policy and noise.
        noise_scale: of the actions; with 0 they are a function of the observations, which tests check.
    """

    num_tasks: int
    episodes_per_task: int
    horizon: int
    hidden_sizes: tuple[int, ...] = (64, 64)
    max_slots: int = 160
    seed: int = 0
    noise_scale: float = 1.0

    @property
    def steps(self) -> int:
        """All environment steps of the job."""
        return self.num_tasks * self.episodes_per_task * self.horizon

    @property
    def tasks_per_wave(self) -> int:
        """The largest divisor of M whose slots do not exceed `max_slots`, at least 1."""
        most = max(1, self.max_slots // self.episodes_per_task)
        return max(number for number in range(1, most + 1) if self.num_tasks % number == 0)

    @property
    def slots(self) -> int:
        """Environments held at once."""
        return self.tasks_per_wave * self.episodes_per_task


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of our sampler.

    Attributes:
        env: id of the family.
        num_tasks: M.
        episodes_per_task: B.
        horizon: T.
        hidden_sizes: of the policy, tanh units.
        seed: of everything.
        num_workers: worker processes; None for the default placement.
        env_kwargs: of the family.
        adapted: each task under parameters adapted to it; otherwise under slightly different random ones, so that large
            workloads need no memory for the adaptation.
    """

    env: str
    num_tasks: int
    episodes_per_task: int
    horizon: int
    hidden_sizes: tuple[int, ...] = (64, 64)
    seed: int = 0
    num_workers: int | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    adapted: bool = True

    @property
    def slots(self) -> int:
        """Number of environments: M * B, one per episode."""
        return self.num_tasks * self.episodes_per_task

    def __str__(self) -> str:
        return f"{self.env} {self.num_tasks} x {self.episodes_per_task} x {self.horizon}"
