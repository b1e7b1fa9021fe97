import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maml_rl.seeding import (
    NamedStreams,
    PhaseStreams,
    Purpose,
    SlotStreams,
    StreamKey,
    check_seed,
    expand_noise,
    generator,
    philox,
)

WORD = 2**32
words = st.integers(0, WORD - 1)
keys = st.builds(StreamKey, words, st.integers(0, 255), words, st.integers(0, 2**24 - 1), words, words)


# Philox itself


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_agrees_with_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    # The known-answer vectors that Salmon et al. publish with Random123, philox4x32 with 10 rounds.
    assert philox(key, counter).tolist() == [list(expected)]


def _philox_in_integers(key: tuple[int, int], counter: tuple[int, ...]) -> list[int]:
    """The definition, word by word, in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second // WORD ^ c1 ^ k0, second % WORD, first // WORD ^ c3 ^ k1, first % WORD
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return [c0, c1, c2, c3]


@given(st.tuples(words, words), st.lists(st.tuples(words, words, words, words), min_size=1, max_size=5))
def test_philox_over_many_counters_equals_the_definition(key: tuple[int, int], counters: list[tuple[int, ...]]) -> None:
    columns = tuple(np.array(column) for column in zip(*counters, strict=True))
    assert philox(key, columns).tolist() == [_philox_in_integers(key, counter) for counter in counters]


@pytest.mark.parametrize("num_words", [1, 2, 4])
def test_philox_of_broadcast_words_equals_philox_of_each_counter(num_words: int) -> None:
    key = np.arange(3)[:, None, None], 2
    counter = np.arange(10).reshape(5, 1, 1, 2), 7, WORD - np.arange(1, 4)[:, None, None], np.arange(4)[:, None]
    columns = [np.broadcast_to(word, (5, 3, 4, 2)).ravel().tolist() for word in (*counter, *key)]
    expected = [_philox_in_integers(row[4:], row[:4])[:num_words] for row in zip(*columns, strict=True)]
    assert philox(key, counter, num_words).tolist() == expected
    assert philox(key, (1, 2, 3, 4), num_words).shape == (3, num_words)


# Keys


@given(keys, keys)
def test_different_keys_have_different_words_of_32_bits(first: StreamKey, second: StreamKey) -> None:
    assert (first.words() == second.words()) == (first == second)
    assert all(0 <= word < WORD for word in first.check().words())


def test_no_two_streams_of_a_run_share_a_key() -> None:
    # All 4 million streams of each purpose, 1,000 iterations x 5 phases x 40 tasks x 20 episodes: where the words give
    # the key back, no two keys can have the same words.
    sizes = {"purpose": len(Purpose), "iteration": 1_000, "phase": 5, "task": 40, "episode": 20}
    grid: Any = np.meshgrid(*(np.arange(size) for size in sizes.values()), indexing="ij", sparse=True)
    key = StreamKey(3, *grid)
    seed, purpose_and_phase, iteration, task, episode = key.words()
    found = StreamKey(seed, purpose_and_phase // 2**24, iteration, purpose_and_phase % 2**24, task, episode)
    for expected, entry in zip(key, found, strict=True):
        assert (np.asarray(entry) == expected).all()
    assert np.broadcast(*found).size == 4_000_000 * len(Purpose)


@given(keys)
def test_key_enters_its_generator_without_hashing(key: StreamKey) -> None:
    state = generator(key).bit_generator.state["state"]
    (first, second), counter = state["key"].tolist(), state["counter"].tolist()
    assert (first >> 32, first % WORD, second >> 32, second % WORD, counter[3]) == key.words()
    assert counter[:3] == [0, 0, 0]


def test_key_out_of_range_is_refused_by_name() -> None:
    wrong = [("seed", -1), ("seed", WORD), ("purpose", 256), ("iteration", WORD), ("phase", 2**24), ("task", -1)]
    for entry, value in (*wrong, ("episode", WORD)):
        with pytest.raises(ValueError, match=f"the {entry} of a random stream must be in"):
            generator(StreamKey(0, 0)._replace(**{entry: value}))


def test_phase_out_of_range_is_refused_when_drawing() -> None:
    with pytest.raises(ValueError, match="the phase of a random stream must be in"):
        PhaseStreams(0, 0, 2**24).episode_seeds(1, range(1))
    with pytest.raises(ValueError, match="the task of a random stream must be in"):
        PhaseStreams(0, 0, 0, first_task=WORD - 1).episode_seeds(2, range(1))


def test_seed_is_an_integer_of_32_bits_and_zero_is_one() -> None:
    for seed in (-1, WORD, True, 1.0, None):
        with pytest.raises(ValueError, match=r"a seed must be an integer in \[0, 2\*\*32\), got"):
            check_seed(seed)  # type: ignore[arg-type]
    assert (check_seed(0), check_seed(np.int64(7))) == (0, 7)
    zero, again, one = (generator(StreamKey(seed, Purpose.TASKS)).random(4) for seed in (0, 0, 1))
    assert np.array_equal(zero, again)
    assert not np.array_equal(zero, one)


# Streams of a phase


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("size", [1, 4, 6])
def test_noise_drawn_in_any_blocks_is_the_same(kind: Any, size: int) -> None:
    streams = PhaseStreams(1, 2, 3)
    whole = streams.action_noise(kind, 3, range(4), range(10), size)
    assert whole.shape == (10, 3, 4, size)
    assert whole.dtype == np.float32
    parts = [streams.action_noise(kind, 3, range(4), steps, size) for steps in (range(3), range(3, 4), range(4, 10))]
    assert np.array_equal(whole, np.concatenate(parts))
    waves = [streams.action_noise(kind, 3, episodes, range(10), size) for episodes in (range(1), range(1, 4))]
    assert np.array_equal(whole, np.concatenate(waves, axis=2))


def test_first_task_picks_tasks_of_the_same_phase() -> None:
    whole = PhaseStreams(1, 2, 3)
    part = whole._replace(first_task=2)
    assert np.array_equal(whole.episode_seeds(5, range(6))[2:], part.episode_seeds(3, range(6)))
    noise = whole.action_noise("normal", 5, range(6), range(7), 3)
    assert np.array_equal(noise[:, 2:], part.action_noise("normal", 3, range(6), range(7), 3))


def test_common_streams_are_those_of_task_zero_wherever_the_tasks_begin() -> None:
    single, common = PhaseStreams(1, 2, 3), PhaseStreams(1, 2, 3, first_task=5, common=True)
    seeds = common.episode_seeds(4, range(6))
    assert seeds.shape == (4, 6)
    assert (seeds == single.episode_seeds(1, range(6))).all()
    noise = common.action_noise("normal", 4, range(6), range(7), 3)
    assert noise.shape == (7, 4, 6, 3)
    assert (noise == single.action_noise("normal", 1, range(6), range(7), 3)).all()


@pytest.mark.parametrize("entry", ["seed", "iteration", "phase", "evaluation"])
def test_phases_that_differ_in_one_entry_have_other_streams(entry: str) -> None:
    streams = PhaseStreams(0, 0, 0)
    other = streams._replace(**{entry: type(getattr(streams, entry))(1)})
    assert not (streams.episode_seeds(3, range(4)) == other.episode_seeds(3, range(4))).any()
    noise = [which.action_noise("uniform", 3, range(4), range(5), 4) for which in (streams, other)]
    assert (noise[0] == noise[1]).mean() < 0.01


def test_episode_seeds_are_63_bit_and_use_all_bits() -> None:
    seeds = PhaseStreams(0, 0, 0).episode_seeds(100, range(50))
    assert seeds.dtype == np.int64
    assert seeds.min() >= 0
    ones = np.array([(seeds >> bit & 1).mean() for bit in range(63)])
    # 5,000 fair bits: five standard deviations.
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(5_000)


def test_normal_noise_has_the_moments_and_tails_of_a_normal() -> None:
    noise = PhaseStreams(0, 0, 0).action_noise("normal", 10, range(20), range(500), 6).astype(np.float64)
    count = noise.size
    assert np.isfinite(noise).all()
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((noise**power).mean() - moment) < 5 * np.sqrt(variance / count)
    assert abs((np.abs(noise) > 3).mean() - 0.0026998) < 5 * np.sqrt(0.0027 / count)
    # Entries of an action (pairs of the Box-Muller transform), steps, tasks and episodes are uncorrelated.
    for axis in range(4):
        there, here = np.moveaxis(noise, axis, 0)[1:], np.moveaxis(noise, axis, 0)[:-1]
        for power in (1, 2):
            first, second = here**power, there**power
            correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
            assert abs(correlation) < 5 / np.sqrt(first.size)


def test_uniform_noise_fills_the_interval_evenly() -> None:
    noise = PhaseStreams(0, 0, 0).action_noise("uniform", 10, range(20), range(500), 1)
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    counts = np.histogram(noise, bins=50, range=(0.0, 1.0))[0]
    expected = noise.size / 50
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    # 49 degrees of freedom: mean 49, standard deviation 9.9.
    assert chi_squared < 49 + 5 * 9.9


# Streams of slots


def test_draws_of_a_slot_do_not_depend_on_other_slots() -> None:
    seeds = np.array([0, 1, 2**62, 2**63 - 1])
    together = SlotStreams(seeds)
    whole = [together.uniform(3), together.normal(5), together.uniform(1)]
    for slot, seed in enumerate(seeds):
        alone = SlotStreams([seed])
        for numbers, expected in zip((alone.uniform(3), alone.normal(5), alone.uniform(1)), whole, strict=True):
            assert np.array_equal(numbers[0], expected[slot])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.integers(1, 5)), max_size=8))
def test_masked_draws_advance_only_the_masked_slots(draws: list[tuple[list[bool], int]]) -> None:
    streams, alone = SlotStreams([5, 6, 7]), [SlotStreams([seed]) for seed in (5, 6, 7)]
    for mask, size in draws:
        numbers = streams.uniform(size, np.array(mask))
        expected = [alone[slot].uniform(size)[0] for slot in np.flatnonzero(mask)]
        assert np.array_equal(numbers, np.array(expected).reshape(-1, size))


def test_reseeded_slots_restart_and_the_others_continue() -> None:
    seeds = np.array([1, 2, 3], np.uint64)
    streams, undisturbed = SlotStreams(seeds), SlotStreams([1, 2, 3])
    first = streams.normal(4)
    undisturbed.normal(4)
    streams.reseed([2, 9], np.array([True, False, True]))
    second, expected = streams.normal(4), undisturbed.normal(4)
    assert np.array_equal(second[0], first[1])
    assert np.array_equal(second[1], expected[1])
    assert np.array_equal(second[2], SlotStreams([9]).normal(4)[0])
    streams.reseed([1, 2, 3])
    assert np.array_equal(streams.normal(4), first)
    assert seeds.tolist() == [1, 2, 3], "the caller's own"


def test_numbers_of_slots_have_the_expected_moments() -> None:
    streams = SlotStreams(np.arange(1_000))
    uniform, normal = streams.uniform(101), streams.normal(101)
    assert uniform.shape == normal.shape == (1_000, 101)
    assert uniform.dtype == normal.dtype == np.float64
    assert 0.0 <= uniform.min() < uniform.max() < 1.0
    count = uniform.size
    assert abs(uniform.mean() - 0.5) < 5 * np.sqrt(1 / 12 / count)
    assert abs(uniform.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / count)
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((normal**power).mean() - moment) < 5 * np.sqrt(variance / count)
    # Slots with neighboring seeds are uncorrelated.
    for numbers in (uniform - 0.5, normal):
        assert abs(np.corrcoef(numbers[1:].ravel(), numbers[:-1].ravel())[0, 1]) < 5 / np.sqrt(count)


def test_streams_do_not_depend_on_the_global_random_states() -> None:
    kept = np.random.get_state()
    draws = []
    try:
        for seed in (1, 2):
            np.random.seed(seed)
            seeds = PhaseStreams(0, 0, 0).episode_seeds(2, range(2))
            draws.append((generator(StreamKey(0, 0)).random(), seeds.tolist()))
    finally:
        np.random.set_state(kept)
    assert draws[0] == draws[1]


def test_expanded_noise_depends_on_all_four_numbers_and_on_no_other_row() -> None:
    noise = PhaseStreams(0, 0, 0).action_noise("uniform", 50, range(1), range(1), 4).reshape(50, 4)
    numbers = expand_noise(noise, 1001)
    assert numbers.shape == (50, 1001)
    assert np.array_equal(expand_noise(noise[7:8], 1001)[0], numbers[7])
    assert np.array_equal(expand_noise(noise, 10), numbers[:, :10])
    for entry in range(4):
        other = noise.copy()
        other[:, entry] = (other[:, entry] + 0.5) % 1.0
        assert (expand_noise(other, 1001) == numbers).mean() < 0.001
    assert abs(numbers.mean() - 0.5) < 5 * (1 / 12 / numbers.size) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 0.001
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    correlation = np.corrcoef(numbers[:, :40].T)[~np.eye(40, dtype=bool)]
    assert abs(correlation.mean()) < 0.02


def test_named_streams_depend_only_on_the_place_and_the_name() -> None:
    first, other = (NamedStreams(StreamKey(3, Purpose.LEARNER_DRAWS, iteration)) for iteration in (1, 0))
    drawn = first.numpy("noise").random(4)
    assert not np.array_equal(first.numpy("noise").random(4), drawn), "a name goes on where it is"
    other.torch("noise")
    other.numpy("minibatches").random(7)
    assert not np.array_equal(other.numpy("noise").random(4), drawn)
    other.move_to(first.key)
    np.testing.assert_array_equal(other.numpy("noise").random(4), drawn)
    assert not np.array_equal(other.numpy("minibatches").random(4), drawn)
    place = torch.rand(4, generator=other.torch("noise"))
    other.move_to(first.key)
    assert not torch.equal(torch.rand(4, generator=other.torch("noise")), place)
    assert torch.equal(torch.rand(4, generator=first.torch("noise")), place)


def test_names_that_would_be_one_stream_are_refused() -> None:
    streams = NamedStreams(StreamKey(0, Purpose.LEARNER_DRAWS))
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    streams.numpy("plumless")
    with pytest.raises(ValueError, match="'buckeroo' and 'plumless' would be one random stream; rename one"):
        streams.torch("buckeroo")
