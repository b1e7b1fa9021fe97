"""Where episodes are sampled: the protocol that a sampler uses.

Keyed streams, and the repetition of a phase after a worker is lost, belong to the sampler above, and are the same for
all backends. A backend has no state that could change a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from maml_rl.envs.meta_env import EnvDescription, SlotCounts, Task
    from maml_rl.episode.task_episodes import TaskEpisodes
    from maml_rl.profiling import StageTimer
    from maml_rl.samplers.phase import Phase
    from maml_rl.samplers.remote_store import RemoteBatch, RemoteStore


class ClosesAtExit:
    """Is closed at the end of a `with` block, however the block ended."""

    def close(self) -> Any:
        """End all workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RolloutBackend(ABC):
    """Samples tasks and phases somewhere. One thread uses it; any other may call `kill`.

    No worker is started before `prepare`, `describe`, `sample_tasks` or `run` needs one.
    """

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers on this machine that are running."""
        return []

    @property
    def retries(self) -> int:
        """How often episodes were restarted so far, because their environment raised `Retry`."""
        return 0

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which no slot was ready, where they wait concurrently; of the worker that has waited longest."""
        return 0.0

    @property
    def slot_counts(self) -> SlotCounts | None:
        """Activity of slots that wait concurrently, for any thread; None where they do not, or are elsewhere."""
        return None

    @property
    def num_stores(self) -> int:
        """Number of workers that keep the episodes of a batch and compute on them; 0 if they cannot."""
        return 0

    @abstractmethod
    def prepare(self, num_tasks: int) -> None:
        """Start the workers for phases of `num_tasks` tasks, unless they are ready."""

    @abstractmethod
    def describe(self) -> EnvDescription:
        """Return the description of one slot."""

    @abstractmethod
    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        """Draw tasks of the family from a generator seeded with `seed`; the worker that draws them makes no difference.

        Args:
            num_tasks: how many.
            seed: of the generator.
            evaluation: draw from the test tasks of a family that keeps them apart from those of training.

        Raises:
            ChildLost: If a worker died.
        """

    @abstractmethod
    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase.

        Args:
            phase: what to sample.
            timer: gets the seconds of the stages.

        Returns:
            Episodes (M, T, B, ...), the caller's own, T cut to the longest episode.

        Raises:
            ChildLost: If a worker died; after `recover` the phase can be run again.
            ChildEnvError: If an environment raised.
            ChildEnvTimeout: If an environment hangs.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            TaskError: If a task is malformed.
        """

    def collect(self, batch: RemoteBatch, phase: Phase, timer: StageTimer) -> RemoteStore:
        """Have workers sample all phases of a batch, and keep the episodes until the next phase or batch.

        Args:
            batch: what to sample.
            phase: its first phase, with the policy.
            timer: gets the seconds of the stages.
        """
        raise NotImplementedError

    def start_phase(self) -> None:
        """Count lost workers from zero."""
        return

    def recover(self) -> None:
        """Replace lost workers and drop unfinished work.

        Raises:
            ChildEnvError: If workers have died too often since `start_phase`.
        """
        return

    def kill(self) -> None:
        """Kill all workers without logging; waits raise `ChildLost`. Any thread may call this."""
        return

    @abstractmethod
    def close(self) -> None:
        """End all workers. Safe to call twice."""
