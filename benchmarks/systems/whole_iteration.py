"""Our whole MAML-TRPO iterations, and the straightforward update on the same episodes."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from benchmarks.measuring import Measurements
from benchmarks.reference_update import ReferenceUpdate
from benchmarks.systems.layouts import Workload
from benchmarks.systems.own_training import FAST_LR, TRUST_REGION, make_training
from maml_rl.episode import TaskEpisodes
from maml_rl.profiling import StageTimer


class Iterations:
    """Iterations of one workload; each starts from the same parameters, so that all of them do the same work.

    Args:
        workload: what is sampled in every phase.
        num_steps: K, inner gradient steps.
    """

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._num_steps = num_steps
        self._timer = StageTimer()
        self._training = make_training(workload, self._timer)
        self._initial = {name: param.detach().clone() for name, param in self._training.policy.named_parameters()}
        self._episodes: tuple[list[TaskEpisodes], TaskEpisodes] | None = None

    def iterate(self) -> tuple[float, float, dict[str, float]]:
        """Sample, adapt and update; return the seconds of sampling, of the update, and of the stages."""
        self._restore()
        self._timer.take()
        start = time.perf_counter()
        train, valid = self._training.sample(self._num_steps)
        sampled = time.perf_counter()
        with self._timer.stage("outer"):
            self._training.update(train, valid)
        updated = time.perf_counter()
        self._episodes = train, valid
        return sampled - start, updated - sampled, self._timer.take()

    def reference_update(self) -> float:
        """Return the seconds that the straightforward update needs for the episodes of the last iteration."""
        if self._episodes is None:
            raise RuntimeError("there are no episodes yet; call iterate first")
        self._restore()
        train, valid = self._episodes
        start = time.perf_counter()
        ReferenceUpdate(self._training.policy, train, valid, [FAST_LR] * self._num_steps).step(**TRUST_REGION)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the sampler's workers."""
        self._training.sampler.close()

    def _restore(self) -> None:
        with torch.no_grad():
            for name, param in self._training.policy.named_parameters():
                param.copy_(self._initial[name])


class IterationAndReference:
    """One iteration per turn, then the straightforward update on its episodes.

    Args:
        workload: what is sampled in every phase.
        num_steps: inner gradient steps.
    """

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._iterations = Iterations(workload, num_steps)

    def turn(self) -> Measurements:
        """Return the seconds of the iteration, its two halves, the straightforward update, and every stage."""
        sampling, update, stages = self._iterations.iterate()
        return {
            "iteration": sampling + update,
            "sampling": sampling,
            "update": update,
            "reference update": self._iterations.reference_update(),
            **{f"stage {name}": seconds for name, seconds in stages.items()},
        }

    def close(self) -> None:
        """End the sampler's workers."""
        self._iterations.close()


class Growth:
    """One iteration of every size per turn.

    Args:
        sizes: (label, workload, inner steps) each.
    """

    def __init__(self, sizes: Sequence[tuple[str, Workload, int]]) -> None:
        self._sizes = sizes

    def turn(self) -> Measurements:
        """Return the seconds of sampling and update, by "label, sampling" and "label, update"."""
        measured: dict[str, float] = {}
        for label, workload, num_steps in self._sizes:
            with ExitStack() as stack:
                # Created for each turn: together they would need too much memory. The first iteration warms up.
                iterations = Iterations(workload, num_steps)
                stack.callback(iterations.close)
                iterations.iterate()
                measured[f"{label}, sampling"], measured[f"{label}, update"], _ = iterations.iterate()
        return measured

    def close(self) -> None:
        """Nothing is held between turns."""
