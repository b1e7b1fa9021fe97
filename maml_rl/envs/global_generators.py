"""The generators of `random`, NumPy and torch that belong to the process, for environments that draw from them.

The first call of an environment that draws from them is noticed. From then on each slot has such generators of its own
while its code runs, keyed as all other streams, and those of the process stay as they were. Constructors always have
them, all the same. Meanwhile other threads that would give them a state, or look at them, wait.
"""

from __future__ import annotations

import ctypes
import logging
import random
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from maml_rl.envs.calls import close_quietly
from maml_rl.envs.tasks import Task, task_key
from maml_rl.seeding import global_generators

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Steps of a slot before it is believed that the environment does not draw from the process's generators.
STEPS_TRIED = 100
# The Mersenne twister: how many words its state has, and one that tells whether they are other words than before.
_WORDS, _SOME_WORD = 624, 300
# In a generator of torch: where it says behind its words whether it keeps a normal number, of either size, and how many
# bytes are before its words at most.
_NORMALS, _MOST_BEFORE_WORDS = (8, 20), 512
# What a stream is for: the second word of its key.
EPISODE, _TASK, DRAWS, _CONSTRUCTOR = 1, 2, 3, 4
# Returns the key of a stream, two words.
Key = Callable[[], tuple[int, int]]


class DrawsGloballyError(Exception):
    """A step has drawn from a generator of the process, for the first time here; its episode must restart."""


@dataclass(frozen=True, slots=True)
class _Generator:
    """One generator of the process.

    Attributes:
        name: for messages.
        place: returns a value that every draw changes.
        save: returns the state.
        restore: takes a state.
        seeded: returns a state for some words.
    """

    name: str
    place: Callable[[], Any]
    save: Callable[[], Any]
    restore: Callable[[Any], None]
    seeded: Callable[[np.random.SeedSequence], Any]


@cache
def _numpy(bits: np.random.BitGenerator) -> _Generator:
    """Return NumPy's, which draws from `bits`; they live as long as what is read of them."""
    offset = _offset_of_gauss()
    if offset is None or not isinstance(bits, np.random.MT19937):
        get_state = partial(np.random.get_state, legacy=False)
        return _Generator(
            "np.random",
            lambda: repr(get_state()),
            get_state,
            np.random.set_state,
            lambda seed: np.random.RandomState(type(bits)(seed)).get_state(legacy=False),
        )
    # In memory, because `get_state` takes longer than the step of many environments.
    size, state, gauss = 4 * _WORDS + 4, bits.ctypes.state_address, id(np.random.mtrand._rand) + offset
    position, has_gauss = ctypes.c_int.from_address(state + 4 * _WORDS), ctypes.c_int.from_address(gauss)
    word = ctypes.c_uint32.from_address(state + 4 * _SOME_WORD)

    def restore(saved: tuple[bytes, bytes]) -> None:
        ctypes.memmove(state, saved[0], size)
        ctypes.memmove(gauss, saved[1], 16)

    return _Generator(
        "np.random",
        lambda: (position.value, word.value, has_gauss.value),
        lambda: (ctypes.string_at(state, size), ctypes.string_at(gauss, 16)),
        restore,
        lambda seed: (ctypes.string_at(np.random.MT19937(seed).ctypes.state_address, size), bytes(16)),
    )


def _offset_of_gauss() -> int | None:
    """Return where in a `RandomState` the flag and the number are that it has drawn ahead; None if it is unknown."""
    if sys.implementation.name != "cpython":
        return None
    example = np.random.RandomState(0)
    example.standard_normal()
    memory = ctypes.string_at(id(example), type(example).__basicsize__)
    offset = memory.find(struct.pack("=qd", 1, example.get_state(legacy=False)["gauss"]))
    return offset if offset >= 0 else None


@cache
def _python() -> _Generator:
    own: Any = random._inst
    header, size = object.__basicsize__, 4 * _WORDS + 4
    words = own.getstate()[1]
    if sys.implementation.name != "cpython" or ctypes.string_at(id(own) + header, size) != struct.pack(
        f"={_WORDS + 1}I", words[-1], *words[:-1]
    ):
        return _Generator(
            "random",
            random.getstate,
            random.getstate,
            random.setstate,
            lambda seed: random.Random(_integer(seed)).getstate(),
        )
    state = id(own) + header
    position, word = ctypes.c_int.from_address(state), ctypes.c_uint32.from_address(state + 4 + 4 * _SOME_WORD)

    def restore(saved: tuple[bytes, float | None]) -> None:
        ctypes.memmove(state, saved[0], size)
        own.gauss_next = saved[1]

    def seeded(seed: np.random.SeedSequence) -> tuple[bytes, None]:
        fresh = random.Random(_integer(seed))
        return ctypes.string_at(id(fresh) + header, size), None

    return _Generator(
        "random",
        lambda: (position.value, word.value, own.gauss_next),
        lambda: (ctypes.string_at(state, size), own.gauss_next),
        restore,
        seeded,
    )


@cache
def _torch() -> _Generator:
    import torch

    own: Any = torch.default_generator
    # Torch makes the tensor of a state while it holds a lock of its own, and up to Python 3.11 a garbage collection may
    # then run user code, during which another thread would wait for that lock without releasing Python's.
    turn = threading.Lock()

    def get_state() -> Any:
        with turn:
            return own.get_state()

    def set_state(state: Any) -> None:
        with turn:
            own.set_state(state)

    def seeded(seed: np.random.SeedSequence) -> Any:
        return torch.Generator().manual_seed(_integer(seed) % 2**63).get_state()

    offset = _offset_of_torch_words()
    if offset is None:
        return _Generator("torch", lambda: get_state().numpy().tobytes(), get_state, set_state, seeded)
    # In memory, which takes an eighth of the time of a state, and needs no lock.
    words = own._cdata + offset
    left, word = ctypes.c_int.from_address(words - 12), ctypes.c_uint32.from_address(words + 4 * _SOME_WORD)
    normal, other = (ctypes.c_bool.from_address(words + 4 * _WORDS + each) for each in _NORMALS)
    return _Generator(
        "torch", lambda: (left.value, word.value, normal.value, other.value), get_state, set_state, seeded
    )


def _offset_of_torch_words() -> int | None:
    """Return where a generator of torch has its words in memory; None if that is unknown.

    Before them is how many are left, behind them are the normal numbers that it keeps.
    """
    import torch

    example: Any = torch.Generator()
    address = getattr(example, "_cdata", None)
    if address is None:
        return None
    torch.rand(3, generator=example)
    state = example.get_state().numpy()
    if state.nbytes < 8 * (3 + _WORDS):
        return None
    # In the state every word has 8 bytes, after those of the seed, of what is left, and of the next word.
    words = state[: 8 * (3 + _WORDS)].view(np.uint64)[3:].astype(np.uint32).tobytes()
    # The words end within the object, so that nothing behind it is read before they are found.
    for offset in range(12, _MOST_BEFORE_WORDS, 4):
        if ctypes.string_at(address + offset, 64) == words[:64]:
            break
    else:
        return None

    found = ctypes.string_at(address + offset, 4 * _WORDS) == words
    # The first normal number is drawn with the second, which it keeps.
    left, keeps = [], []
    for _ in range(3):
        left.append(ctypes.c_int.from_address(address + offset - 12).value)
        keeps.append(ctypes.string_at(address + offset + 4 * _WORDS + _NORMALS[1], 1))
        torch.randn((), dtype=torch.float64, generator=example)
    expected = state[8:12].view(np.int32)[0]
    is_known = found and left == [expected, left[1], left[1]] and left[1] < expected and keeps == [b"\0", b"\1", b"\0"]
    return offset if is_known else None


def _integer(seed: np.random.SeedSequence) -> int:
    return int.from_bytes(seed.generate_state(4).tobytes(), "little")


def _generators() -> list[_Generator]:
    """Return the generators of the process; that of torch only where something has imported it."""
    numpy = _numpy(np.random.get_bit_generator())  # type: ignore[attr-defined]
    return [numpy, _python(), *([_torch()] if "torch" in sys.modules else [])]


def _looks_at(*places: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    """Return what looks at two or three generators, at every step: without a loop it takes half as long."""
    first, second, *others = places
    if not others:
        return lambda: (first(), second())
    (third,) = others
    return lambda: (first(), second(), third())


def _look_at(generators: Sequence[_Generator]) -> tuple[Any, ...]:
    return tuple([generator.place() for generator in generators])


def _has_drawn_from_new(generators: Sequence[_Generator]) -> bool:
    """Return whether a call that was the first to import torch has drawn from its generator, which is then as new."""
    new = _generators()[len(generators) :]
    if not new:
        return False
    import torch

    (generator,), untouched = new, torch.Generator().get_state()
    drawn = not torch.equal(generator.save(), untouched)
    generator.restore(untouched)
    return drawn


def _places() -> dict[str, Any]:
    """Return a value of each generator that every draw changes, by its name."""
    return {generator.name: generator.place() for generator in _generators()}


def _places_unless_lent() -> dict[str, Any] | None:
    """Return the places; None while another thread has given the generators other states, as an update does."""
    lock = global_generators()
    if not lock.acquire(blocking=False):
        return None
    try:
        return _places()
    finally:
        lock.release()


def _drawn_since(places: dict[str, Any] | None) -> list[str]:
    """Return the generators that were drawn from since then; none where another thread has lent them other states."""
    now = None if places is None else _places_unless_lent()
    return [] if places is None or now is None else _moved(places, now)


@contextmanager
def refusing_draws(who: str, remedy: str, *, only_warns: bool = False) -> Iterator[Callable[..., Any]]:
    """Refuse, by a RuntimeError, that code of users in the block draws from the process's generators.

    Unless another thread has lent them other states, for which the block does not wait.

    Args:
        who: draws, for the message.
        remedy: what to do instead.
        only_warns: for a block that has run before without a draw, so that it may be one of another thread.

    Yields:
        A function that calls another one with arguments: what an environment draws there is noticed where it is called.
    """
    places, earlier = _places_unless_lent(), list[str]()

    def excused(call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal places
        earlier.extend(_drawn_since(places))
        try:
            return call(*arguments)
        finally:
            places = _places_unless_lent()

    yield excused
    if drawn := list(dict.fromkeys([*earlier, *_drawn_since(places)])):
        text = f"{who} draws from {' and '.join(drawn)}, which no seed repeats; {remedy}"
        if not only_warns:
            raise RuntimeError(text)
        logger.warning("%s; if it does not, another thread has drawn meanwhile", text)


def _moved(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the generators that were drawn from; one that was imported meanwhile was not."""
    return [name for name, place in now.items() if before.get(name, place) != place]


def _states_of(words: tuple[int, int]) -> list[Any]:
    """Return the states of all generators for a key of two words."""
    # A fixed number of words, of which the last is never zero: no two keys are one stream.
    return [
        generator.seeded(np.random.SeedSequence((*words, which)))
        for which, generator in enumerate(_generators(), start=1)
    ]


def key_of_seed(seed: int | None, purpose: int) -> Key | None:
    """Return the key of a stream for a purpose; None without a seed, which continues the stream before."""
    return None if seed is None else lambda: (seed, purpose)


def key_of_task(task: Task) -> tuple[int, int]:
    """Return the key of the stream of what draws while a slot gets this task: the same in every slot."""
    return zlib.crc32(task_key(task).encode()), _TASK


class KeptGenerators:
    """Restores the process's generators after a block, and says from which of them the block has drawn."""

    def __init__(self) -> None:
        self._drawn: set[str] = set()
        self._before: list[Any] = []
        self._places: dict[str, Any] = {}

    def __enter__(self) -> KeptGenerators:
        """Keep the states."""
        self._before = [generator.save() for generator in _generators()]
        self._places = _places()
        return self

    def seed(self, seed: int) -> None:
        """Seed the generators, as those of a slot where an episode begins."""
        self.begin((seed, EPISODE))

    def begin(self, key: tuple[int, int]) -> None:
        """Begin streams."""
        self.drawn()
        for generator, state in zip(_generators(), _states_of(key), strict=True):
            generator.restore(state)
        self._places = _places()

    def drawn(self) -> list[str]:
        """Return the names of the generators from which the block has drawn so far."""
        self._drawn.update(_moved(self._places, _places()))
        return sorted(self._drawn)

    def __exit__(self, *error: object) -> None:
        """Restore the states."""
        self.drawn()
        for generator, state in zip(_generators(), self._before, strict=False):
            generator.restore(state)


@contextmanager
def seeded_generators(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python with `seed` for the block, and restore them afterward.

    For code of users, such as a constructor of a network, that uses no other generator. Those of torch are that of the
    CPU and that of `device`. They belong to the process: a block in another thread waits for the end of this one, and
    other code of another thread must not draw from them meanwhile.

    Args:
        seed: integer in [0, 2**63).
        device: where the code draws, besides the CPU.
    """
    import torch

    device, on_device = torch.device(device), []
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        on_device = [torch.cuda.default_generators[index]]
    with global_generators(), KeptGenerators() as kept:
        before = [generator.get_state() for generator in on_device]
        kept.seed(seed)
        # What networks begin with is torch's own stream of the seed.
        for generator in (torch.default_generator, *on_device):
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(on_device, before, strict=True):
                generator.set_state(state)


def construct(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what a constructor makes, and the names of the process's generators from which it has drawn.

    All constructions draw the same numbers, in any process and for any seed: what a constructor draws belongs to the
    family, of which each slot, each worker and each resumed run has the same environment.
    """
    with global_generators():
        return construct_for_holder(make)


def holds_generators() -> bool:
    """Return whether this thread holds the lock of the process's generators, as `threading.Condition` asks it."""
    lock: Any = global_generators()
    return bool(lock._is_owned())


def construct_for_holder(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """As `construct`, in any thread, for one that waits meanwhile and holds the lock of the process's generators."""
    generators = _generators()
    with KeptGenerators() as kept:
        kept.begin((0, _CONSTRUCTOR))
        made = make()
        drawn = kept.drawn()
    if not _has_drawn_from_new(generators):
        return made, drawn
    close_quietly(lambda: made.close())
    return construct_for_holder(make)


class SlotGenerators:
    """Gives slots whose environments draw from the process's generators such generators of their own.

    At first every call gets them. If no call draws from them for a while, the process's are only looked at, which costs
    a tenth; from the first call that draws from them then, every call gets them again.

    Attributes:
        used: whether a call has drawn from them.
    """

    def __init__(self, num_envs: int) -> None:
        self.used = False
        self._keys: list[Key] = [lambda: (0, DRAWS)] * num_envs
        self._states: list[list[Any] | None] = [None] * num_envs
        self._steps_to_try = STEPS_TRIED * num_envs
        # The process's states when something was last called, which they still are unless others have drawn since.
        self._places: tuple[Any, ...] = ()
        self._saved: list[Any] = []
        self._watched: list[_Generator] = []
        self._has_torch = False
        self._places_now: Callable[[], tuple[Any, ...]] = tuple

    def step(self, slot: int, call: Callable[[], Any]) -> Any:
        """Return the result of a step."""
        with global_generators():
            if self.used:
                return self._with_own(slot, call)
            if self._steps_to_try > 0:
                self._steps_to_try -= 1
                return self._with_own(slot, call)
            return self._watch(call)

    def begin(self, slot: int, key: Key | None, call: Callable[[], Any]) -> Any:
        """Return the result of a call with which streams begin, those of a key, or continue, without one."""
        if key is not None:
            self._keys[slot], self._states[slot] = key, None
        watched = not self.used and self._steps_to_try <= 0
        with global_generators():
            try:
                return self._watch(call) if watched else self._with_own(slot, call)
            except DrawsGloballyError:
                return self._with_own(slot, call)

    def _watch(self, call: Callable[[], Any]) -> Any:
        if not self._watched or (not self._has_torch and "torch" in sys.modules):
            self._watched, self._has_torch = _generators(), "torch" in sys.modules
            self._places_now = _looks_at(*[generator.place for generator in self._watched])
        look = self._places_now
        places = look()
        if places != self._places:
            self._places, self._saved = places, [generator.save() for generator in self._watched]
        try:
            result = call()
        finally:
            if look() != places:
                self.used = True
                for generator, state in zip(self._watched, self._saved, strict=True):
                    generator.restore(state)
            if not self._has_torch and "torch" in sys.modules and _has_drawn_from_new(self._watched):
                self.used = True
        if self.used:
            raise DrawsGloballyError
        return result

    def _with_own(self, slot: int, call: Callable[[], Any]) -> Any:
        generators = _generators()
        own = self._states[slot]
        if own is None or len(own) < len(generators):
            # A call may have been the first to import torch.
            own = [*(own or []), *_states_of(self._keys[slot]())[len(own or []) :]]
        before = [generator.save() for generator in generators]
        for generator, state in zip(generators, own, strict=True):
            generator.restore(state)
        places, is_over = _look_at(generators), False
        try:
            result = call()
            is_over = True
        finally:
            self.used = self.used or _look_at(generators) != places
            after = [generator.save() for generator in generators]
            for generator, state in zip(generators, before, strict=True):
                generator.restore(state)
            if is_over and _has_drawn_from_new(generators):
                # As if it had not been called.
                self.used, self._states[slot] = True, own
                raise DrawsGloballyError
            self._states[slot] = after
        return result


class SharedGenerators(SlotGenerators):
    """For slots that run side by side, or as one batch, and share the process's generators: these are not for them.

    Args:
        num_envs: N.
        refused: the names of those that are an error; the others are a warning. Libraries, for example, draw from
            `random` how long they wait before they try a request again.
        remedy: for the message.
    """

    def __init__(
        self,
        num_envs: int,
        refused: Collection[str] = ("np.random", "torch"),
        remedy: str = "self.np_random, or use stepping='serial', which gives each slot generators of its own",
    ) -> None:
        super().__init__(num_envs)
        self._refused, self._remedy = frozenset(refused), remedy

    def step(self, slot: int, call: Callable[[], Any]) -> Any:
        return self._look(call)

    def begin(self, slot: int, key: Key | None, call: Callable[[], Any]) -> Any:
        return self._look(call)

    def _look(self, call: Callable[[], Any]) -> Any:
        places = _places_unless_lent()
        result = call()
        if isinstance(result, Coroutine):
            return self._look_after(result, places)
        self._refuse(places)
        return result

    async def _look_after(self, coroutine: Coroutine[Any, Any, Any], places: dict[str, Any] | None) -> Any:
        result = await coroutine
        self._refuse(places)
        return result

    def _refuse(self, places: dict[str, Any] | None) -> None:
        if not (drawn := _drawn_since(places)):
            return
        message = (
            f"it draws from {' and '.join(drawn)}, a generator that all slots of the process share: no seed repeats "
            f"its episodes; draw from {self._remedy}"
        )
        if self._refused & set(drawn):
            raise RuntimeError(message)
        if not self.used:
            self.used = True
            logger.warning("%s", message)


def seconds_of_own_generators() -> float:
    """Return how many seconds a call takes longer in a slot that has generators of its own."""
    generators, calls = SlotGenerators(1), 50
    generators.used = True
    generators.begin(0, key_of_seed(0, EPISODE), int)
    started = perf_counter()
    for _ in range(calls):
        generators.step(0, int)
    return (perf_counter() - started) / calls
