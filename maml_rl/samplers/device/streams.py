"""The random streams of a phase on a device: the words of `maml_rl.seeding`, for the same keys and counters.

The integers are equal to those of the CPU, and so are uniform numbers. Normal numbers may differ in the last bits,
where a device rounds a logarithm or a cosine differently.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from maml_rl.policies.distributions import NoiseKind, middle_of
from maml_rl.seeding import PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL, PhaseStreams

_LOW = 2**32 - 1
# Counters whose words are computed at once: enough to fill a device, little enough beside its memory.
_AT_ONCE = 2**24

Word = Tensor | int


def philox(key: tuple[Word, Word], counter: tuple[Word, Word, Word, Word]) -> tuple[Tensor, ...]:
    """Apply Philox4x32-10 to every counter; see `maml_rl.seeding.philox`.

    Args:
        key: two words, numbers or int64 tensors that broadcast.
        counter: four words, of which the first and the third are tensors.

    Returns:
        Four words, int64 tensors in [0, 2**32).
    """
    # Products of 64 bits wrap around in int64, which leaves their bits as they are.
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for number in range(PHILOX_ROUNDS):
        weyl0, weyl1 = (step * number & _LOW for step in PHILOX_WEYL)
        product0, product1 = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ (k0 + weyl0 & _LOW),
            product1 & _LOW,
            _high(product0) ^ c3 ^ (k1 + weyl1 & _LOW),
            product0 & _LOW,
        )
    assert isinstance(c0, Tensor)
    return tuple(torch.broadcast_tensors(c0, c1, c2, c3))


def _high(product: Word) -> Word:
    return (product >> 32) & _LOW


class PhaseNoise:
    """The action noise of one wave of episodes, at its place on a device.

    Args:
        kind: "normal" for N(0, 1), "uniform" for U[0, 1).
        shape: T, M, S and numbers per action.
        device: where it is.

    Attributes:
        rows: (T, M * S, numbers), of one step after the other.
    """

    def __init__(self, kind: NoiseKind, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self._kind, self._shape, self._device = kind, shape, device
        steps, tasks, slots, size = shape
        self.rows = torch.full((steps, tasks * slots, size), middle_of(kind), device=device)

    def draw(self, streams: PhaseStreams, episodes: range) -> None:
        """Draw the noise of `episodes` of all tasks."""
        steps, tasks, slots, size = self._shape
        counters = -(-size // 4)
        (seed, purpose_and_phase), iteration = streams.action_key(tasks, episodes)
        numbers = torch.arange(tasks, device=self._device) + streams.first_task
        if streams.common:
            numbers.zero_()
        numbers = numbers[:, None, None]
        columns = torch.arange(episodes.start, episodes.stop, device=self._device)[:, None]
        at_once = max(1, _AT_ONCE // max(1, tasks * slots * counters))
        for start in range(0, steps, at_once):
            stop = min(start + at_once, steps)
            index = torch.arange(start * counters, stop * counters, device=self._device)
            counter = (index.reshape(stop - start, 1, 1, counters), iteration, numbers, columns)
            words = torch.stack(philox((seed, purpose_and_phase), counter), -1)
            drawn = _normal32(words) if self._kind == "normal" else _uniform32(words)
            self.rows[start:stop] = drawn.reshape(stop - start, tasks * slots, counters * 4)[..., :size]


def _uniform32(words: Tensor) -> Tensor:
    return (words >> 8).float() * 2.0**-24


def _normal32(words: Tensor) -> Tensor:
    radius = torch.sqrt(-2.0 * torch.log((words[..., 0::2].double() + 0.5) * 2.0**-32)).float()
    angle = (words[..., 1::2] >> 8).float() * (2.0**-24 * 2.0 * math.pi)
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1).reshape(words.shape)


class DeviceSlotStreams:
    """One stream for each slot, as `SlotStreams`; what is drawn for a mask is drawn for all slots.

    All slots begin together, and those that are active have drawn equally often.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._drawn = torch.zeros((), dtype=torch.int64, device=device)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the next draw depends on."""
        return {"seeds": self._seeds, "drawn": self._drawn}

    def reseed(self, seeds: Tensor) -> None:
        """Restart the streams from seeds (N,), integers in [0, 2**63)."""
        self._seeds.copy_(seeds)
        self._drawn.zero_()

    def next_episodes(self, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return all seeds (N,) and places (N,) in their streams, and advance them by one; see `SlotStreams`."""
        places = self._drawn.expand(len(self._seeds)).clone()
        self._drawn += 1
        return self._seeds, places

    def uniform(self, size: int, mask: Tensor | None = None) -> Tensor:
        """Draw `size` numbers from U[0, 1) for every slot, (N, size) float64."""
        return self._doubles(size)[:, :size]

    def normal(self, size: int, mask: Tensor | None = None) -> Tensor:
        """Draw `size` numbers from N(0, 1) for every slot, (N, size) float64."""
        numbers = self._doubles(size)
        radius = torch.sqrt(-2.0 * torch.log1p(-numbers[:, 0::2]))
        angle = 2.0 * math.pi * numbers[:, 1::2]
        pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), 2)
        return pairs.reshape(numbers.shape)[:, :size]

    def _doubles(self, size: int) -> Tensor:
        counters = -(-size // 2)
        index = self._drawn + torch.arange(counters, device=self._drawn.device)
        seeds, zeros = self._seeds[:, None], torch.zeros_like(index)
        words = torch.stack(philox((seeds & _LOW, _high(seeds)), (index & _LOW, _high(index), zeros, zeros)), -1)
        self._drawn += counters
        first = (words[..., 0::2] >> 5) << 26 | (words[..., 1::2] >> 6)
        return (first.double() * 2.0**-53).reshape(len(self._seeds), counters * 2)
