"""The generators of the process: keyed, looked at, and given back, for environments that draw from them."""

import multiprocessing
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import seeding
from maml_rl.envs import global_generators
from maml_rl.envs.global_generators import DRAWS, EPISODE, key_of_seed, key_of_task
from maml_rl.envs.serial import SerialVectorEnv
from tests.envs.third_party import WalkEnv


class Draws(WalkEnv):
    """Observes normal numbers of the process's generators; of two drawn together, the second is kept."""

    def observe(self) -> Any:
        return np.array([self.place, float(np.random.standard_normal()) + random.gauss(0.0, 1.0)])


@pytest.mark.parametrize("tried", [0, 100])
def test_generators_continue_from_call_to_call_of_a_slot_and_others_see_nothing(tried: int) -> None:
    generators = global_generators.SlotGenerators(2)
    generators._steps_to_try = tried
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()

    def draw() -> list[float]:
        return [np.random.uniform(), random.random(), float(torch.rand(()))]

    def expected(slot: int, count: int) -> list[list[float]]:
        words = [np.random.SeedSequence((30 + slot, 1, which)) for which in (1, 2, 3)]
        seeds = [int.from_bytes(seed.generate_state(4).tobytes(), "little") for seed in words]
        numpy = np.random.RandomState(np.random.MT19937(words[0]))
        python, tensors = random.Random(seeds[1]), torch.Generator().manual_seed(seeds[2] % 2**63)
        return [[numpy.uniform(), python.random(), float(torch.rand((), generator=tensors))] for _ in range(count)]

    seen: list[list[list[float]]] = [
        [generators.begin(slot, key_of_seed(30 + slot, EPISODE), draw)] for slot in range(2)
    ]
    for slot in (0, 1, 1, 0):
        seen[slot].append(generators.step(slot, draw))
    assert seen == [expected(slot, 3) for slot in range(2)]
    assert generators.used
    task = {"slope": 1.0}
    given = [generators.begin(slot, partial(key_of_task, dict(task)), draw) for slot in range(2)]
    assert given[0] == given[1] != seen[0][0]
    # In every interpreter, though each hashes texts in its own way.
    assert key_of_task({"slope": 0.5}) == (2498696667, 2)
    drawn = [generators.begin(0, key_of_seed(seed, DRAWS), draw) for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert before == (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist())


def test_place_of_torchs_generator_is_read_in_memory_and_moves_with_every_draw() -> None:
    """A state takes ten times as long, twice a step of every environment; this fails where torch keeps it elsewhere."""
    assert global_generators._offset_of_torch_words() is not None
    generator = global_generators._torch()
    before = generator.save()
    # The first normal number is drawn with the second, which leaves the words as they are.
    draws = [lambda: torch.rand(()), lambda: torch.randn(()), lambda: torch.randn(()), lambda: torch.randperm(3)]
    for draw in [*draws, lambda: torch.rand(624), lambda: torch.manual_seed(7)]:
        place = generator.place()
        assert generator.place() == place
        draw()
        assert generator.place() != place
    generator.restore(before)


FIRST_TO_IMPORT_TORCH = """
import os, sys
import numpy as np
from maml_rl.envs import global_generators, make_vector_env
from tests.envs.third_party import WalkEnv

class Imports(WalkEnv):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.drawn = self.draw("constructor")

    def draw(self, call):
        if call != self.call:
            return 0.0
        import torch
        return float(torch.rand(()))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.draw("reset"), self.drawn]), {}

    def step(self, action):
        _, *rest = super().step(action)
        return np.array([self.draw("step"), self.drawn]), *rest

def observed(call):
    env = make_vector_env(Imports, {"call": call}, 2)
    env.reset_task([{"slope": 0.5}] * 2)
    seen = []
    for _ in range(2):
        seen.append(env.reset(seed=[3, 4])[0].copy())
        for _ in range(3):
            seen.append(env.step(np.zeros((2, 1), np.float32))[0].copy())
    env.close()
    return np.array(seen).reshape(2, 4, 2, 2)

for call, steps_tried in (("constructor", 100), ("step", 0), ("step", 100)):
    if not (child := os.fork()):
        global_generators.STEPS_TRIED = steps_tried
        assert "torch" not in sys.modules
        first = observed(call)
        assert "torch" in sys.modules
        again = observed(call)
        assert (first[..., 1] == again[..., 1]).all(), (call, steps_tried)
        for episode, slot in np.ndindex(2, 2):
            # An episode may begin again at its first draw, and has then one less.
            drawn, wanted = (list(filter(None, seen[episode, :, slot, 0])) for seen in (first, again))
            assert drawn == wanted[: len(drawn)], (call, steps_tried)
            assert call == "constructor" or len(drawn) >= 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.timeout(120)
def test_first_call_that_imports_torch_draws_as_later_ones_do() -> None:
    """Three processes import torch, each in another call."""
    subprocess.run([sys.executable, "-c", FIRST_TO_IMPORT_TORCH], check=True, timeout=100)


@pytest.mark.parametrize("steps_tried", [0, 2, 100])
def test_policy_may_draw_from_global_generators_between_steps(
    steps_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others draw is not repeated, and not taken for what the environment draws."""
    monkeypatch.setattr(global_generators, "STEPS_TRIED", steps_tried)
    numpy, python = np.random.RandomState(3), random.Random(3)
    expected = [(numpy.standard_normal(), python.gauss(0.0, 1.0)) for _ in range(7)]
    states = np.random.get_state(), random.getstate()
    for make_env in (Draws, WalkEnv):
        np.random.seed(3)
        random.seed(3)
        drawn = []
        with closing(SerialVectorEnv(make_env, 2)) as env:
            env.reset(seed=0)
            for _ in range(7):
                drawn.append((np.random.standard_normal(), random.gauss(0.0, 1.0)))
                env.step(np.zeros((2, 1), np.float32))
            assert env._generators.used is (make_env is Draws)
        assert drawn == expected
    np.random.set_state(states[0])
    random.setstate(states[1])


READS_IN_TWO_THREADS = """
import gc, threading, time
import torch
from maml_rl.envs import Retry, global_generators

class Collected:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0005)

def read():
    for _ in range(300):
        Collected()
        global_generators._places()

gc.freeze()
gc.set_threshold(1)
threads = [threading.Thread(target=read) for _ in range(2)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_garbage_that_is_collected_while_threads_look_at_generators_blocks_none() -> None:
    subprocess.run([sys.executable, "-c", READS_IN_TWO_THREADS], check=True, timeout=40)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["with generators of its own", "watched", "a constructor"])
def test_call_in_another_thread_waits_while_generators_are_not_the_processs(how: str) -> None:
    def enter(call: Callable[[], Any]) -> None:
        if how == "a constructor":
            global_generators.construct(call)
            return
        generators = global_generators.SlotGenerators(1)
        if how == "watched":
            generators._steps_to_try = 0
        generators.step(0, call)

    inside, second_inside, crossed = threading.Event(), threading.Event(), []

    def first() -> None:
        inside.set()
        crossed.append(second_inside.wait(0.2))

    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    one = threading.Thread(target=enter, args=(first,))
    two = threading.Thread(target=enter, args=(second_inside.set,))
    one.start()
    assert inside.wait(20)
    two.start()
    one.join()
    two.join()
    assert (crossed, second_inside.is_set()) == ([False], True)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.timeout(30)
def test_states_that_another_thread_lends_are_not_taken_for_draws_of_a_slot() -> None:
    """As those of an update, while batches are collected ahead of it from slots that wait."""
    lent, over = threading.Event(), threading.Event()

    def update() -> None:
        with global_generators.seeded_generators(1):
            lent.set()
            over.wait(20)

    thread = threading.Thread(target=update)

    def begin() -> None:
        thread.start()
        assert lent.wait(20)

    def end() -> None:
        over.set()
        thread.join()

    generators = global_generators.SharedGenerators(1)
    for call in (begin, end):
        generators.step(0, call)
    with global_generators.KeptGenerators(), pytest.raises(RuntimeError, match="draws from torch"):
        generators.step(0, lambda: torch.rand(()))


def test_generator_of_numpy_may_be_of_any_kind() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        expected = np.random.Generator(np.random.PCG64(3)).random(2)
        generators = global_generators.SlotGenerators(1)
        seen = [generators.begin(0, key_of_seed(seed, EPISODE), np.random.random) for seed in (5, 5, 6)]
        assert seen[0] == seen[1] != seen[2]
        assert generators.used
        assert [np.random.random(), np.random.random()] == expected.tolist()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.timeout(30)
def test_process_forked_while_another_thread_holds_the_generators_makes_environments() -> None:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with seeding.global_generators():
            held.set()
            over.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(20)
        context = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = context.Process(target=global_generators.construct, args=(int,))
            child.start()
        child.join(10)
        assert child.exitcode == 0
    finally:
        over.set()
        thread.join()
