"""Random streams keyed by (seed, purpose, iteration, phase, task, episode): never by a worker, never by position.

The generator is Philox4x32-10, a counter-based generator: it maps six words of 32 bits (a key of two, a counter of
four) to 128 random bits. The stream key fills five of the words, and the place within the stream the sixth. Nothing is
hashed, so two different keys can never share a stream, and all streams of a phase are drawn in one vectorized call,
without one generator object per environment.

Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405
"""

import os
import threading
import zlib
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.arrays import Floats, Mask

if TYPE_CHECKING:
    import torch

Noise = Literal["normal", "uniform"]

_WORD = 2**32
_MAX_PHASE = 2**24
_LOW = np.uint64(_WORD - 1)
_SHIFT = np.uint64(32)
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
_MULTIPLIERS = tuple(map(np.uint64, PHILOX_MULTIPLIERS))
_global_generators = threading.RLock()
# At most this many numbers are drawn ahead, for all slots of an environment together.
_NUMBERS_AHEAD = 16_384


class Purpose(IntEnum):
    """The use of a stream. Training, evaluation and populations never share one."""

    TASKS = 0
    RESET = 1
    ACTIONS = 2
    EVALUATION_TASKS = 5
    EVALUATION_RESET = 6
    EVALUATION_ACTIONS = 7
    POPULATION_TASKS = 8
    POPULATION_RESET = 9
    POPULATION_ACTIONS = 10
    LEARNER_CONSTRUCTION = 11
    LEARNER_UPDATE = 12
    LEARNER_DRAWS = 13
    SAMPLING_DRAWS = 14
    EVALUATION_SAMPLING_DRAWS = 15
    FIXED_TASKS = 16
    TASK_DISTRIBUTION = 17


class StreamKey(NamedTuple):
    """Names one random stream. Every entry is an integer in [0, 2**32), `purpose` below 256, `phase` below 2**24."""

    seed: int
    purpose: int
    iteration: int = 0
    phase: int = 0
    task: int = 0
    episode: int = 0

    def check(self) -> "StreamKey":
        """Return the key."""
        limits = {"purpose": 256, "phase": _MAX_PHASE}
        for name, value in zip(self._fields, self, strict=True):
            limit = limits.get(name, _WORD)
            if not 0 <= value < limit:
                raise ValueError(f"the {name} of a random stream must be in [0, {limit}), got {value}")
        return self

    def words(self) -> tuple[int, int, int, int, int]:
        """Return the five words that Philox takes beside the place in the stream; injective over valid keys."""
        return self.seed, self.purpose * _MAX_PHASE + self.phase, self.iteration, self.task, self.episode


def generator(key: StreamKey) -> np.random.Generator:
    """Return a separate NumPy generator for `key`."""
    seed, purpose_and_phase, iteration, task, episode = (int(word) for word in key.check().words())
    # NumPy's Philox is twice as wide. The key goes in as it is: a SeedSequence would hash it, and drop trailing zeros.
    wide_key = np.array([seed << 32 | purpose_and_phase, iteration << 32 | task], np.uint64)
    return np.random.Generator(np.random.Philox(key=wide_key, counter=np.array([0, 0, 0, episode], np.uint64)))


def torch_seed(key: StreamKey) -> int:
    """Return the seed of a torch generator for `key`."""
    return int(generator(key).integers(2**63))


class NamedStreams:
    """Random generators by name, all at one place: that of a key, whose entries `task` and `episode` are theirs.

    The place is known from the key alone, so there is no state to keep in a checkpoint. Asked again at the same place,
    a name gives the generator that it gave before, which continues: nothing is drawn twice.
    """

    def __init__(self, key: StreamKey) -> None:
        self.key = key.check()
        self._names: dict[int, str] = {}
        self._numpy: dict[str, np.random.Generator] = {}
        self._torch: dict[str, torch.Generator] = {}

    def move_to(self, key: StreamKey) -> None:
        """Switch to `key`, where every name starts a new stream; no effect if it is current."""
        if key != self.key:
            self.key = key.check()
            self._numpy, self._torch = {}, {}

    def numpy(self, name: str) -> np.random.Generator:
        """Return the NumPy generator of a name."""
        if name not in self._numpy:
            self._numpy[name] = generator(self._key_of(name))
        return self._numpy[name]

    def torch(self, name: str) -> "torch.Generator":
        """Return the torch generator of a name, on the CPU."""
        if name not in self._torch:
            # Workers, which never load torch, import this module.
            import torch

            self._torch[name] = torch.Generator().manual_seed(torch_seed(self._key_of(name)._replace(episode=1)))
        return self._torch[name]

    def _key_of(self, name: str) -> StreamKey:
        word = zlib.crc32(name.encode())
        if self._names.setdefault(word, name) != name:
            raise ValueError(f"{name!r} and {self._names[word]!r} would be one random stream; rename one of them")
        return self.key._replace(task=word, episode=0)


def global_generators() -> "threading.RLock":
    """Return the lock of the process's generators (torch's, NumPy's, Python's).

    Whoever gives them other states holds it until they are restored; a thread may take it again.
    """
    return _global_generators


def _renew_lock() -> None:
    """Forget a thread that held the lock when this process was forked, and is not in it."""
    global _global_generators
    _global_generators = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def check_seed(seed: int | np.integer) -> int:
    """Return `seed` as an int."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < _WORD:
        raise ValueError(f"a seed must be an integer in [0, 2**32), got {seed!r}")
    return int(seed)


def philox(key: tuple[ArrayLike, ArrayLike], counter: tuple[ArrayLike, ...], num_words: int = 4) -> NDArray[np.uint32]:
    """Apply Philox4x32-10 to every counter.

    The first rounds are computed in the shapes of the words, of which most repeat a few numbers.

    Args:
        key: two words, each broadcastable to (n,).
        counter: four words, each broadcastable to (n,).
        num_words: how many words to return.

    Returns:
        (n, num_words) random words, the first of each counter.
    """
    c0, c1, c2, c3, k0, k1 = words = [np.array(word, np.uint64, ndmin=1) for word in (*counter, *key)]
    result = np.empty((*np.broadcast_shapes(*(word.shape for word in words)), num_words), np.uint32)
    for round_number in range(PHILOX_ROUNDS):
        weyl0, weyl1 = (np.uint64(step * round_number % _WORD) for step in PHILOX_WEYL)
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = _mixed(_mixed(product1 >> _SHIFT, c1), (k0 + weyl0) & _LOW)
        c2 = _mixed(_mixed(product0 >> _SHIFT, c3), (k1 + weyl1) & _LOW)
        product0 &= _LOW
        product1 &= _LOW
        c1, c3 = product1, product0
    for column, word in enumerate((c0, c1, c2, c3)[:num_words]):
        result[..., column] = word
    return result.reshape(-1, num_words)


def _mixed(words: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `words` ^ `others`, in the place of `words` where that saves an array."""
    fits = others.shape in ((1,), words.shape)
    mixed: NDArray[np.uint64] = np.bitwise_xor(words, others, out=words if fits else None)
    return mixed


def _uniform32(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Map words to float32 in [0, 1), 24 bits each."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def expand_noise(noise: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return many numbers for a few: `size` from U[0, 1) for each row, as a function of its four.

    For a policy that needs much noise, but at few steps.

    Args:
        noise: (N, 4) float32 from U[0, 1), in whole multiples of 2**-24, as `action_noise` draws it.
        size: numbers for each row.

    Returns:
        (N, size).
    """
    words = (noise * np.float32(2.0**24)).astype(np.uint64)[:, :, None]
    blocks = np.arange(-(-size // 4))
    drawn = philox((words[:, 0], words[:, 1]), (blocks, words[:, 2], words[:, 3], 0))
    return _uniform32(drawn).reshape(len(noise), -1)[:, :size]


def _normal32(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Map words (n, even) to standard normal float32 by the Box-Muller transform; n stays, pairs make pairs."""
    # 32 bits in the radius, centered in their cells, keep the tails finite and reach 6.7 standard deviations.
    radius = np.sqrt(-2.0 * np.log((words[:, 0::2].astype(np.float64) + 0.5) * 2.0**-32)).astype(np.float32)
    angle = (words[:, 1::2] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24 * 2.0 * np.pi)
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=2).reshape(words.shape)


class PhaseStreams(NamedTuple):
    """The streams of one phase of one iteration, for all its tasks and episodes at once.

    Attributes:
        seed: the run's seed.
        iteration: which batch of tasks.
        phase: number of adaptation steps taken before these episodes.
        evaluation: draw from the evaluation's streams instead of the training's.
        first_task: number of the first task, where only some tasks of the phase are sampled.
        common: give every task the streams of task 0: common random numbers, which make tasks comparable.
        population: draw from the streams of populations, in which an iteration is a generation and a task a member.
    """

    seed: int
    iteration: int
    phase: int
    evaluation: bool = False
    first_task: int = 0
    common: bool = False
    population: bool = False

    def episode_seeds(self, num_tasks: int, episodes: range) -> NDArray[np.int64]:
        """Return one environment seed per episode, (M, len(episodes)) int64 in [0, 2**63)."""
        purpose = self._purpose(Purpose.RESET, Purpose.EVALUATION_RESET, Purpose.POPULATION_RESET)
        words = self._words(purpose, np.zeros(1), num_tasks, episodes, num_words=2).astype(np.uint64)
        seeds = (words[:, 0] << _SHIFT | words[:, 1]) >> np.uint64(1)
        return seeds.astype(np.int64).reshape(num_tasks, len(episodes))

    def action_noise(
        self, kind: Noise, num_tasks: int, episodes: range, steps: range, size: int
    ) -> NDArray[np.float32]:
        """Return the noise of some episodes at some steps, (len(steps), M, len(episodes), size) float32.

        An entry depends only on the key, the step and its place in `size`, not on which steps are drawn together.

        Args:
            kind: "normal" for N(0, 1), "uniform" for U[0, 1).
            num_tasks: M.
            episodes: which episodes of every task.
            steps: which steps.
            size: numbers per step.
        """
        blocks = -(-size // 4)
        index = np.arange(steps.start * blocks, steps.stop * blocks).reshape(len(steps), 1, 1, blocks)
        # Of one block only the pairs that are used.
        num_words = size + size % 2 if blocks == 1 else 4
        words = self._words(self._action_purpose, index, num_tasks, episodes, num_words)
        numbers = _normal32(words) if kind == "normal" else _uniform32(words)
        return numbers.reshape(len(steps), num_tasks, len(episodes), -1)[..., :size]

    def action_key(self, num_tasks: int, episodes: range) -> tuple[tuple[int, int], int]:
        """Return the key of Philox, and the second word of its counters, for the noise of actions.

        The first word is the place in the stream, the third the task, the fourth the episode; see `action_noise`.
        """
        last = self.first_task + num_tasks - 1
        key = StreamKey(self.seed, self._action_purpose, self.iteration, self.phase, last, episodes[-1]).check()
        seed, purpose_and_phase, iteration, _, _ = key.words()
        return (seed, purpose_and_phase), iteration

    @property
    def _action_purpose(self) -> Purpose:
        return self._purpose(Purpose.ACTIONS, Purpose.EVALUATION_ACTIONS, Purpose.POPULATION_ACTIONS)

    def _purpose(self, training: Purpose, evaluation: Purpose, population: Purpose) -> Purpose:
        return population if self.population else evaluation if self.evaluation else training

    def _words(
        self, purpose: Purpose, index: NDArray[np.generic], num_tasks: int, episodes: range, num_words: int
    ) -> NDArray[np.uint32]:
        """Return words (n, num_words) at `index`, broadcast against tasks (M, 1, 1) and episodes (B, 1)."""
        tasks = range(self.first_task, self.first_task + num_tasks)
        last = StreamKey(self.seed, purpose, self.iteration, self.phase, tasks[-1], episodes[-1])
        seed, purpose_and_phase, iteration, _, _ = last.check().words()
        numbers = np.zeros(num_tasks) if self.common else np.asarray(tasks)
        words = (index, iteration, numbers[:, None, None], np.asarray(episodes)[:, None])
        return philox((seed, purpose_and_phase), words, num_words)


class SlotStreams:
    """One stream per environment slot, each from an integer seed.

    The draws of a slot depend only on its own seed and on how much it has drawn.
    """

    def __init__(self, seeds: ArrayLike) -> None:
        self._seeds: NDArray[np.uint64] = np.array(seeds, dtype=np.uint64).reshape(-1)
        self._drawn: NDArray[np.uint64] = np.zeros_like(self._seeds)
        # Pairs of numbers (N, pairs, 2) that were drawn ahead, from the place `_first` of each slot on, and how many of
        # them are used: a call for few numbers costs as much as one for many.
        self._ahead: Floats = np.empty((len(self._seeds), 0, 2))
        self._first, self._used, self._next_pairs = self._drawn.copy(), 0, 1

    def reseed(self, seeds: ArrayLike, mask: Mask | None = None) -> None:
        """Restart the streams of the masked slots (all by default) from `seeds` (one per masked slot)."""
        where = slice(None) if mask is None else mask
        self._seeds[where] = np.asarray(seeds, dtype=np.uint64)
        self._drawn[where] = 0
        # A slot that draws only when it is reset never draws ahead.
        self._ahead, self._used, self._next_pairs = self._ahead[:, :0], 0, 1

    def next_episodes(self, mask: Mask | None = None) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Return all seeds (N,) and places (N,) in their streams, and advance the masked ones by one.

        For generators of other libraries, which make a key of both.
        """
        places = self._drawn.astype(np.int32)
        self._drawn[slice(None) if mask is None else mask] += np.uint64(1)
        return self._seeds, places

    def uniform(self, size: int, mask: Mask | None = None) -> Floats:
        """Draw `size` numbers from U[0, 1) for every masked slot; (N or masked, size) float64."""
        return self._doubles(size, mask)[:, :size]

    def normal(self, size: int, mask: Mask | None = None) -> Floats:
        """Draw `size` numbers from N(0, 1) for every masked slot; (N or masked, size) float64."""
        numbers = self._doubles(size, mask)
        radius = np.sqrt(-2.0 * np.log1p(-numbers[:, 0::2]))
        angle = 2.0 * np.pi * numbers[:, 1::2]
        pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=2)
        return pairs.reshape(numbers.shape)[:, :size]

    def _doubles(self, size: int, mask: Mask | None) -> Floats:
        """Return an even number, at least `size`, of 53-bit uniforms per masked slot."""
        where = slice(None) if mask is None else mask
        pairs, drawn = -(-size // 2), self._drawn[where]
        if self._used + pairs > self._ahead.shape[1] or (drawn - self._first[where] != self._used).any():
            most = max(1, _NUMBERS_AHEAD // (2 * max(1, len(self._seeds))))
            self._ahead = self._compute(max(pairs, min(self._next_pairs, most)))
            self._first, self._used = self._drawn.copy(), 0
            self._next_pairs *= 2
        numbers = self._ahead[where, self._used : self._used + pairs].reshape(len(drawn), pairs * 2)
        self._drawn[where] = drawn + np.uint64(pairs)
        self._used += pairs
        return numbers

    def _compute(self, pairs: int) -> Floats:
        """Return the next uniforms of every slot, (N, pairs, 2)."""
        index = np.add(self._drawn[:, None], np.arange(pairs), dtype=np.uint64, casting="unsafe")
        low, high = (self._seeds & _LOW)[:, None], (self._seeds >> _SHIFT)[:, None]
        words = philox((low, high), (index & _LOW, index >> _SHIFT, 0, 0)).astype(np.uint64)
        # As in any 53-bit uniform: 27 bits of one word above 26 of another.
        first = (words[:, 0::2] >> np.uint64(5)) << np.uint64(26) | (words[:, 1::2] >> np.uint64(6))
        return (first.astype(np.float64) * 2.0**-53).reshape(len(self._seeds), pairs, 2)
