"""Random numbers on a device are those of the CPU."""

import numpy as np
import pytest
import torch

from maml_rl.samplers.device import streams as device_streams
from maml_rl.samplers.device.streams import DeviceSlotStreams, PhaseNoise, philox
from maml_rl.seeding import PhaseStreams, SlotStreams
from maml_rl.seeding import philox as philox_of_numpy

CPU = torch.device("cpu")


def test_philox_gives_the_same_words_as_on_the_cpu():
    random = np.random.default_rng(0)
    counter, key = random.integers(2**32, size=(4, 100)), random.integers(2**32, size=(2, 100))
    words = philox(tuple(map(torch.from_numpy, key)), tuple(map(torch.from_numpy, counter)))  # type: ignore[arg-type]
    np.testing.assert_array_equal(torch.stack(words, 1).numpy(), philox_of_numpy(tuple(key), tuple(counter)))


@pytest.mark.parametrize(("kind", "common", "size"), [("uniform", False, 6), ("normal", True, 6), ("normal", False, 0)])
def test_action_noise_is_that_of_the_cpu(kind, common, size, monkeypatch):
    # Few steps at once.
    monkeypatch.setattr(device_streams, "_AT_ONCE", 100)
    streams = PhaseStreams(2**32 - 1, 7, 3, first_task=5, common=common)
    ours = PhaseNoise(kind, (11, 4, 5, size), CPU)
    ours.draw(streams, range(2, 7))
    theirs = streams.action_noise(kind, 4, range(2, 7), range(11), size).reshape(11, 20, size)
    np.testing.assert_allclose(ours.rows.numpy(), theirs, rtol=0, atol=0 if kind == "uniform" else 1e-6)


def test_slots_draw_what_they_draw_on_the_cpu_and_again_from_the_same_state():
    seeds = np.array([0, 5, 2**63 - 1, 123_456_789_012_345])
    ours = DeviceSlotStreams(4, CPU)
    for _ in range(2):
        theirs, places = SlotStreams(seeds), []
        ours.reseed(torch.from_numpy(seeds))
        for size in (3, 1, 4):
            np.testing.assert_array_equal(ours.uniform(size).numpy(), theirs.uniform(size))
            np.testing.assert_allclose(ours.normal(size).numpy(), theirs.normal(size), rtol=1e-14)
            places.append((ours.next_episodes()[1], theirs.next_episodes()[1]))
        for own, expected in places:
            np.testing.assert_array_equal(own.numpy(), expected)
    before = {name: value.clone() for name, value in ours.state().items()}
    first = ours.uniform(2)
    for name, value in ours.state().items():
        value.copy_(before[name])
    assert torch.equal(ours.uniform(2), first)
