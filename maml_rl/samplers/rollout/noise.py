"""The noise of actions: keyed by task, episode and step, and drawn ahead."""

import numpy as np
from numpy.typing import NDArray

from maml_rl.policies.distributions import middle_of
from maml_rl.samplers.phase import Phase, task_ranges
from maml_rl.samplers.rollout.recorder import SlotIndex, numbers_of

# Noise is drawn for as many steps at once as fill this many numbers: enough to amortize the call, little enough to
# stay in the cache.
_NUMBERS_PER_SPAN = 65_536
# Spans that are kept where slots step together, of a wave and a step, and where each slot is at a step of its own;
# others are drawn again.
_SPANS_KEPT, _SPANS_KEPT_BY_SLOT = 2, 32


class EpisodeNoise:
    """The action noise of the slots of a phase, in spans of steps.

    Args:
        phase: of the slots.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase, num_slots = phase, phase.own_slots.stop - phase.own_slots.start
        self._steps_per_span = max(1, _NUMBERS_PER_SPAN // max(1, num_slots * phase.policy.noise_size))
        # By wave and number.
        self._spans: dict[tuple[int, int], NDArray[np.float32]] = {}
        self._middle: NDArray[np.float32] | None = None
        if phase.deterministic:
            shape = num_slots, phase.policy.noise_size
            self._middle = np.full(shape, middle_of(phase.policy.noise_kind), np.float32)

    def rows(
        self, slots: SlotIndex, waves: int | NDArray[np.int64], steps: int | NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return the noise of `slots` in their waves, before their steps, (len(slots), noise_size)."""
        if self._middle is not None:
            return self._middle[slots]
        if isinstance(waves, int) and isinstance(steps, int):
            return self._at(waves, steps, _SPANS_KEPT)[slots]
        numbers, horizon = numbers_of(slots), self._phase.horizon
        waves, steps = np.broadcast_to(waves, len(numbers)), np.broadcast_to(steps, len(numbers))
        rows = np.zeros((len(numbers), self._phase.policy.noise_size), np.float32)
        # Episodes that are over may have all their steps behind them.
        for place in np.unique((waves * horizon + steps)[steps < horizon]).tolist():
            wave, step = divmod(place, horizon)
            chosen = (waves == wave) & (steps == step)
            rows[chosen] = self._at(wave, step, _SPANS_KEPT_BY_SLOT)[numbers[chosen]]
        return rows

    def _at(self, wave: int, step: int, num_kept: int) -> NDArray[np.float32]:
        """Return the noise of all slots in one step of a wave, from a span of which `num_kept` are kept."""
        span, offset = divmod(step, self._steps_per_span)
        if (wave, span) not in self._spans:
            while len(self._spans) >= num_kept:
                del self._spans[min(self._spans)]
            start = span * self._steps_per_span
            stop = min(start + self._steps_per_span, self._phase.horizon)
            self._spans[wave, span] = self._draw(wave, range(start, stop))
        rows: NDArray[np.float32] = self._spans[wave, span][offset]
        return rows

    def _draw(self, wave: int, steps: range) -> NDArray[np.float32]:
        """Return the noise of a span of steps of a wave, (len(steps), slots, noise_size)."""
        phase, parts = self._phase, []
        first, size = wave * phase.per_task, phase.policy.noise_size
        for tasks, places in task_ranges(phase.own_slots, phase.per_task):
            streams = phase.streams._replace(first_task=phase.streams.first_task + tasks.start)
            num_tasks, episodes = tasks.stop - tasks.start, range(first + places.start, first + places.stop)
            noise = streams.action_noise(phase.policy.noise_kind, num_tasks, episodes, steps, size)
            parts.append(noise.reshape(len(steps), num_tasks * len(episodes), size))
        return np.concatenate(parts, 1)
