"""The noise of actions: keyed by task, episode and step, and drawn ahead."""

import numpy as np
from numpy.typing import NDArray

from maml_rl.policies.distributions import middle_of
from maml_rl.samplers.phase import Phase, task_ranges
from maml_rl.samplers.rollout.recorder import SlotIndex

# Noise is drawn for as many steps at once as fill this many numbers: enough to amortize the call, little enough to
# stay in the cache.
_NUMBERS_PER_SPAN = 65_536


class EpisodeNoise:
    """The action noise of one wave of a phase, the episodes of the same number in all slots, in spans of steps.

    Args:
        phase: of the slots.
        wave: number of the episodes in their slots.
        spans_kept: how many spans of steps are kept, as slots may be some steps apart; others are drawn again.
    """

    def __init__(self, phase: Phase, wave: int, spans_kept: int = 2) -> None:
        self._spans_kept = spans_kept
        self._policy, self._streams, self._horizon = phase.policy, phase.streams, phase.horizon
        slots, per_task = phase.own_slots, phase.per_task
        first = wave * per_task
        self._episodes = [
            (tasks, range(first + places.start, first + places.stop)) for tasks, places in task_ranges(slots, per_task)
        ]
        self._own, self._num_rows = slots, len(phase.tasks) * per_task
        num_slots = slots.stop - slots.start
        self._steps_per_span = max(1, _NUMBERS_PER_SPAN // max(1, num_slots * phase.policy.noise_size))
        self._spans: dict[int, NDArray[np.float32]] = {}
        self._middle: NDArray[np.float32] | None = None
        if phase.deterministic:
            shape = self._num_rows, phase.policy.noise_size
            self._middle = np.full(shape, middle_of(phase.policy.noise_kind), np.float32)

    def of_tasks(self, step: int) -> NDArray[np.float32]:
        """Return the noise of whole tasks at one step, (M * S, noise_size): any for slots that are not the phase's."""
        return self._at(step) if self._middle is None else self._middle

    def rows(self, slots: SlotIndex, steps: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the noise of `slots`, each at its own step, (len(slots), noise_size)."""
        if self._middle is not None:
            return self._middle[self._own][slots]
        first = int(steps[0])
        if not np.count_nonzero(steps != first):
            return self._at(first)[self._own][slots]
        rows = np.zeros((len(steps), self._policy.noise_size), np.float32)
        # Episodes that are over may have all their steps behind them.
        for step in np.unique(steps[steps < self._horizon]):
            rows[steps == step] = self._at(int(step))[self._own][slots][steps == step]
        return rows

    def _at(self, step: int) -> NDArray[np.float32]:
        """Return the noise of one step; see `of_tasks`."""
        span, offset = divmod(step, self._steps_per_span)
        if span not in self._spans:
            while len(self._spans) >= self._spans_kept:
                del self._spans[min(self._spans)]
            start = span * self._steps_per_span
            self._spans[span] = self._draw(range(start, min(start + self._steps_per_span, self._horizon)))
        rows: NDArray[np.float32] = self._spans[span][offset]
        return rows

    def _draw(self, steps: range) -> NDArray[np.float32]:
        """Return the noise of a span of steps, (len(steps), M * S, noise_size)."""
        size, kind = self._policy.noise_size, self._policy.noise_kind
        drawn = np.zeros((len(steps), self._num_rows, size), np.float32)
        start = self._own.start
        for tasks, episodes in self._episodes:
            streams = self._streams._replace(first_task=self._streams.first_task + tasks.start)
            num_tasks = tasks.stop - tasks.start
            stop = start + num_tasks * len(episodes)
            noise = streams.action_noise(kind, num_tasks, episodes, steps, size)
            drawn[:, start:stop] = noise.reshape(len(steps), stop - start, size)
            start = stop
        return drawn
