"""Episodes of one task and of a batch of tasks: their arrays, advantages and digests."""

import copy
import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maml_rl.episode import BatchEpisodes, TaskEpisodes
from maml_rl.errors import NonFiniteError

ARRAYS = ("observations", "actions", "rewards", "lengths", "terminated", "truncated", "final_observations")


class GivenBaseline:
    """A baseline with given values."""

    def __init__(self, values: Tensor, final_values: Tensor) -> None:
        self.values, self.final = values, final_values
        self.fits = 0

    def fit(self, episodes: Any) -> None:
        self.fits += 1

    def __call__(self, episodes: Any) -> Tensor:
        return self.values

    def final_values(self, episodes: Any) -> Tensor:
        return self.final


def make_arrays(lengths: list[list[int]], seed: int = 0, num_steps: int | None = None) -> dict[str, np.ndarray]:
    """Random episodes of the given lengths; every other one is terminated, the rest truncated."""
    generator = np.random.default_rng(seed)
    counts = np.array(lengths)
    num_tasks, num_episodes = counts.shape
    steps = int(counts.max()) if num_steps is None else num_steps
    real = np.arange(steps)[None, :, None] < counts[:, None, :]

    def numbers(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    terminated = np.arange(counts.size).reshape(counts.shape) % 2 == 0
    return {
        "observations": np.where(real[..., None], numbers(num_tasks, steps, num_episodes, 3), np.float32(0.0)),
        "actions": np.where(real[..., None], numbers(num_tasks, steps, num_episodes, 2), np.float32(0.0)),
        "rewards": np.where(real, numbers(num_tasks, steps, num_episodes), np.float32(0.0)),
        "lengths": counts,
        "terminated": terminated,
        "truncated": ~terminated,
        "final_observations": numbers(num_tasks, num_episodes, 3),
    }


def make(lengths: list[list[int]], seed: int = 0, **metadata: Any) -> TaskEpisodes:
    return TaskEpisodes(**make_arrays(lengths, seed), **metadata)


def appended(arrays: dict[str, np.ndarray], task: int, **kwargs: Any) -> BatchEpisodes:
    """Append the steps of one task one by one from the same buffers, like a sampler that reuses them."""
    lengths = arrays["lengths"][task]
    episodes = BatchEpisodes(len(lengths), **kwargs)
    buffers = {name: np.empty_like(arrays[name][task, 0]) for name in ("observations", "actions", "rewards")}
    for step in range(int(lengths.max())):
        ids = [int(episode) for episode in np.flatnonzero(lengths > step)]
        for name, buffer in buffers.items():
            buffer[: len(ids)] = arrays[name][task, step, ids]
        episodes.append(*(buffer[: len(ids)] for buffer in buffers.values()), ids)
        for buffer in buffers.values():
            buffer.fill(77)
    return episodes


def test_numpy_arrays_are_wrapped_without_a_copy_where_torch_can_share_them():
    arrays = make_arrays([[2, 1]])
    episodes = TaskEpisodes(**arrays)
    arrays["observations"][0, 0, 0] = 5.0
    assert episodes.observations[0, 0, 0].tolist() == [5.0, 5.0, 5.0]
    for array in arrays.values():
        array.flags.writeable = False
    episodes = TaskEpisodes(**arrays | {"rewards": arrays["rewards"].astype(np.float64)[:, ::-1]})
    assert episodes.rewards.dtype == torch.float32


def test_mask_and_number_of_steps_come_from_the_lengths():
    arrays = make_arrays([[1, 3], [2, 1]], num_steps=9)
    episodes = TaskEpisodes(**arrays, log_probs=np.zeros((2, 9, 2), np.float32))
    expected = [[[1, 1], [0, 1], [0, 1]], [[1, 1], [1, 0], [0, 0]]]
    assert torch.equal(episodes.mask, torch.tensor(expected, dtype=torch.float32))
    assert episodes.num_steps == 7
    assert len(episodes) == 2
    # Steps past the longest episode are cut off.
    for name in ("observations", "actions", "rewards", "mask", "log_probs"):
        assert getattr(episodes, name).shape[:3] == (2, 3, 2)
    narrow = {name: array[:, :3] if name in ARRAYS[:3] else array for name, array in arrays.items()}
    assert TaskEpisodes(**narrow).digest() == episodes.digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": np.zeros((2, 3, 3, 2))}, "actions"),
        ({"final_observations": np.zeros((2, 3))}, "final_observations"),
        ({"lengths": np.zeros(2)}, "lengths"),
        ({"rewards": np.zeros((2, 3))}, "rewards"),
        *(
            ({"lengths": np.array(lengths)}, "lengths|length 0")
            for lengths in ([[4, 3]] * 2, [[-1, 3]] * 2, [[0, 0]] * 2)
        ),
        ({"tasks": ({},) * 3}, "expected 2 tasks"),
        ({"infos": {"won": np.zeros(2)}}, r"the info 'won' must have the shape \(2, 3, 2\) or \(2, 2\), got \(2,\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TaskEpisodes(**make_arrays([[1, 3], [2, 1]]) | changes)


def test_returns_and_episode_returns_of_literal_rewards():
    arrays = make_arrays([[3, 2]])
    arrays["rewards"] = np.array([[[1, 2], [2, 4], [4, 0]]], np.float32)
    episodes = TaskEpisodes(**arrays, gamma=0.5)
    assert episodes.returns.tolist() == [[[3.0, 4.0], [4.0, 4.0], [4.0, 0.0]]]
    assert episodes.episode_returns().tolist() == [[7.0, 6.0]]
    assert episodes[0].episode_returns().tolist() == [7.0, 6.0]


def test_unknown_discount_and_missing_advantages_are_named():
    episodes = make([[2]])
    with pytest.raises(ValueError, match="gamma"):
        _ = episodes.returns
    with pytest.raises(ValueError, match="gamma"):
        episodes.compute_advantages(None)
    with pytest.raises(RuntimeError, match="compute_advantages"):
        _ = episodes.advantages


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_advantages_equal_a_double_loop_for_any_ends(data):
    lengths = data.draw(st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=2), min_size=1, max_size=3))
    bootstrap = data.draw(st.booleans())
    discount, gae_lambda = (data.draw(st.sampled_from([0.0, 0.9, 1.0])) for _ in range(2))
    arrays = make_arrays(lengths, seed=data.draw(st.integers(0, 1000)))
    # Some at a time limit and in a terminal state at once.
    arrays["truncated"] |= np.arange(arrays["lengths"].size).reshape(arrays["lengths"].shape) % 3 == 0
    episodes = TaskEpisodes(**arrays)
    generator = torch.Generator().manual_seed(0)
    values, final_values = (torch.randn(s, generator=generator) for s in (episodes.mask.shape, episodes.lengths.shape))
    advantages = episodes.compute_advantages(
        GivenBaseline(values, final_values), gamma=discount, gae_lambda=gae_lambda, normalize=False, bootstrap=bootstrap
    )
    expected = np.zeros(tuple(advantages.shape))
    for task, episode in itertools.product(range(len(lengths)), range(2)):
        length = lengths[task][episode]
        value = values[task, :length, episode].tolist()
        goes_on = bootstrap and not arrays["terminated"][task, episode]
        value.append(float(final_values[task, episode]) if goes_on else 0.0)
        estimate = 0.0
        for step in reversed(range(length)):
            error = float(arrays["rewards"][task, step, episode]) + discount * value[step + 1] - value[step]
            estimate = error + discount * gae_lambda * estimate
            expected[task, step, episode] = estimate
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_normalized_advantages_have_mean_zero_and_deviation_one_for_each_task():
    episodes = make([[5, 2, 4], [3, 6, 1]])
    advantages = episodes.compute_advantages(None, gamma=0.9)
    assert torch.equal(advantages, episodes.advantages)
    assert not advantages[episodes.mask == 0].any()
    for task in range(2):
        real = advantages[task][episodes.mask[task] > 0]
        torch.testing.assert_close(real.mean(), torch.tensor(0.0), rtol=0.0, atol=1e-6)
        torch.testing.assert_close(real.std(correction=0), torch.tensor(1.0))


def test_values_under_the_padding_never_enter_the_advantages_and_nothing_is_changed():
    episodes = make([[1, 3], [2, 1]])
    values, final_values, rewards = torch.ones(episodes.mask.shape), torch.ones(2, 2), episodes.rewards.clone()
    clean = episodes.compute_advantages(GivenBaseline(values, final_values), gamma=0.9).clone()
    assert torch.equal(episodes.rewards, rewards)
    assert (values == 1.0).all()
    values[episodes.mask == 0] = torch.nan
    assert torch.equal(episodes.compute_advantages(GivenBaseline(values, final_values), gamma=0.9), clean)


def test_baseline_is_fitted_for_a_batch_of_tasks_and_by_the_caller_for_one():
    episodes = make([[2, 1]])
    baseline = GivenBaseline(torch.zeros(1, 2, 2), torch.zeros(1, 2))
    episodes.compute_advantages(baseline, gamma=0.9)
    episodes.compute_advantages(baseline, fit=False)
    assert baseline.fits == 1
    single = GivenBaseline(torch.zeros(2, 2), torch.zeros(2))
    episodes[0].compute_advantages(single)
    assert single.fits == 0
    episodes[0].compute_advantages(single, fit=True)
    assert single.fits == 1


def test_task_of_a_batch_is_a_view_with_the_same_numbers_until_steps_are_appended():
    episodes = make([[2, 4], [3, 1]], gamma=0.9, fast_lr=0.1, tasks=({"goal": 1}, {"goal": 2}))
    episodes.compute_advantages(None)
    digest = episodes.digest()
    one = episodes[1]
    assert isinstance(one, BatchEpisodes)
    assert len(one) == 3
    for name in ("observations", "actions", "rewards", "mask", "returns", "advantages"):
        assert torch.equal(getattr(one, name), getattr(episodes, name)[1, :3])
    assert one.observations.data_ptr() == episodes.observations[1].data_ptr()
    assert one.lengths.tolist() == [3, 1]
    assert (one.gamma, one.fast_lr, one.task) == (0.9, 0.1, {"goal": 2})
    assert torch.equal(episodes[-1].rewards, one.rewards)
    with pytest.raises(IndexError):
        _ = episodes[2]
    one.append(np.ones((2, 3)), np.ones((2, 2)), np.ones(2), [0, 1])
    assert one.lengths.tolist() == [4, 2]
    with pytest.raises(RuntimeError, match="compute_advantages"):
        _ = one.advantages
    assert episodes.digest() == digest


def test_tasks_stacked_again_are_bit_identical():
    arrays = make_arrays([[2, 4], [3, 1], [1, 1]])
    known: dict[str, Any] = {"log_probs": arrays["rewards"].copy(), "infos": {"speed": 2.0 * arrays["rewards"]}}
    episodes = TaskEpisodes(**arrays, gamma=0.9, fast_lr=0.1, tasks=({}, {}, {}), **known)
    episodes.compute_advantages(None)
    episodes.memory = (episodes.mask * torch.arange(24.0).reshape(3, 4, 2),)
    again = TaskEpisodes.stack(list(episodes))
    assert again.memory is not None
    assert torch.equal(*again.memory, *episodes.memory)
    assert torch.equal(again.infos["speed"], episodes.infos["speed"])
    for name in (*ARRAYS, "mask", "advantages", "returns", "log_probs"):
        assert torch.equal(getattr(again, name), getattr(episodes, name)), name
    assert again.digest() == episodes.digest()
    assert (again.gamma, again.fast_lr, again.tasks) == (0.9, 0.1, ({}, {}, {}))


def test_episodes_that_differ_in_metadata_or_infos_are_not_stacked():
    first = make([[1, 1]], gamma=0.9)[0]
    with pytest.raises(ValueError, match="gamma"):
        TaskEpisodes.stack([first, make([[1, 1]], gamma=0.8)[0]])
    with pytest.raises(ValueError, match="batch_size"):
        TaskEpisodes.stack([first, make([[1]], gamma=0.9)[0]])
    with pytest.raises(ValueError, match="different infos"):
        TaskEpisodes.stack([make_with_infos()[0], make([[2, 3]])[0]])
    with pytest.raises(ValueError, match="at least one"):
        TaskEpisodes.stack([])
    second = make([[1, 1]], gamma=0.9)
    second.compute_advantages(None)
    with pytest.raises(ValueError, match="advantages"):
        TaskEpisodes.stack([first, second[0]])


def test_digest_covers_every_sampled_array_and_nothing_else():
    arrays = make_arrays([[2, 4], [3, 1]])
    arrays["infos"] = {"won": np.zeros((2, 2), np.float32)}
    episodes = TaskEpisodes(**arrays)
    digest = episodes.digest()
    assert TaskEpisodes(**copy.deepcopy(arrays)).digest() == digest
    episodes.compute_advantages(None, gamma=0.9)
    assert episodes.digest() == digest
    for name in (*ARRAYS, "won"):
        changed = copy.deepcopy(arrays)
        entry = changed[name] if name in changed else changed["infos"][name]
        entry[0, 0] = ~entry[0, 0] if entry.dtype == bool else 1
        assert TaskEpisodes(**changed).digest() != digest, name
    other_type = arrays | {"observations": arrays["observations"].astype(np.float64)}
    assert TaskEpisodes(**other_type).digest() != digest


def test_digest_of_literal_episodes_is_the_sha256_of_names_types_shapes_and_bytes():
    number = np.array([1.0], "<f4").tobytes()
    parts = [
        b"observations <f4 (1, 1, 1, 1)\n" + number,
        b"actions <i8 (1, 1, 1)\n" + np.array([3], "<i8").tobytes(),
        b"rewards <f4 (1, 1, 1)\n" + number,
        b"lengths <i8 (1, 1)\n" + np.array([1], "<i8").tobytes(),
        b"terminated |b1 (1, 1)\n\x01",
        b"truncated |b1 (1, 1)\n\x00",
        b"final_observations <f4 (1, 1, 1)\n" + number,
    ]
    ones = np.ones((1, 1, 1, 1), np.float32)
    episodes = TaskEpisodes(
        ones,
        np.full((1, 1, 1), 3),
        ones[0],
        np.ones((1, 1), np.int64),
        np.ones((1, 1), bool),
        np.zeros((1, 1), bool),
        ones[0],
    )
    assert episodes.digest() == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_digest_is_the_same_on_an_accelerator():
    episodes = make([[2, 4], [3, 1]])
    assert episodes.to("cuda").digest() == episodes.digest()


def test_moved_episodes_are_complete_and_the_original_stays():
    episodes = make([[2, 4], [3, 1]], gamma=0.9)
    episodes.compute_advantages(None)
    moved = episodes.to("meta")
    tensors = (*ARRAYS, "mask", "advantages")
    assert all(getattr(moved, name).device.type == "meta" for name in tensors)
    assert all(getattr(episodes, name).device.type == "cpu" for name in tensors)
    assert moved.gamma == 0.9
    assert episodes.to("cpu").observations is episodes.observations


def test_appended_episodes_equal_the_arrays_even_from_reused_buffers():
    arrays = make_arrays([[2, 40, 17], [3, 1, 5]])
    for task in range(2):
        episodes, expected = appended(arrays, task, gamma=0.9), TaskEpisodes(**arrays, gamma=0.9)[task]
        for name in ("observations", "actions", "rewards", "mask", "lengths", "returns"):
            assert torch.equal(getattr(episodes, name), getattr(expected, name)), name
        assert torch.equal(episodes.compute_advantages(None), expected.compute_advantages(None))


def test_finished_episodes_stack_to_the_batch_they_came_from():
    arrays = make_arrays([[2, 4], [3, 1]])
    batches = [appended(arrays, task) for task in range(2)]
    for task, batch in enumerate(batches):
        assert not batch.truncated.any()
        for episode in (1, 0):
            ends = {name: arrays[name][task, [episode]] for name in ("terminated", "truncated")}
            batch.finish([episode], arrays["final_observations"][task, [episode]], **ends)
    assert TaskEpisodes.stack(batches).digest() == TaskEpisodes(**arrays).digest()


def test_rows_without_an_episode_are_skipped_and_episodes_may_pause():
    episodes = BatchEpisodes(2)
    with pytest.raises(RuntimeError, match="append"):
        _ = episodes.observations
    for rewards, ids in (([5.0, 6.0], [1, None]), ([7.0], [None]), ([8.0], [0]), ([9.0, 1.0], [1, 0])):
        rows = np.array(rewards)
        episodes.append(rows[:, None], rows.astype(np.int64), rows, ids)
    assert episodes.lengths.tolist() == [2, 2]
    assert episodes.observations.tolist() == [[[8.0], [5.0]], [[1.0], [9.0]]]
    assert episodes.rewards.tolist() == [[8.0, 5.0], [1.0, 9.0]]
    assert episodes.actions.dtype == torch.int64


@pytest.mark.parametrize("ids", [[0, 0], [0, 2], [-1, 0]])
def test_repeated_or_unknown_episodes_are_refused(ids):
    episodes = BatchEpisodes(2)
    with pytest.raises(ValueError, match="distinct"):
        episodes.append(np.zeros((2, 1)), np.zeros((2, 1)), np.zeros(2), ids)
    with pytest.raises(ValueError, match="one row of actions"):
        episodes.append(np.zeros((2, 1)), np.zeros((1, 1)), np.zeros(2), [0, 1])


def test_appended_images_become_float32_and_states_stay_integers():
    episodes = BatchEpisodes(1)
    episodes.append(np.full((1, 2, 2, 3), 255, np.uint8), np.zeros(1, np.int64), np.zeros(1), [0])
    assert episodes.observations.dtype == torch.float32
    assert (episodes.observations == 255.0).all()
    assert episodes.observation_shape == (2, 2, 3)
    assert episodes.action_shape == ()
    states = BatchEpisodes(1)
    states.append(np.array([3]), np.zeros((1, 2)), np.zeros(1), [0])
    assert states.observations.dtype == torch.int64
    assert states.action_shape == (2,)


def test_lengths_equal_a_list_of_the_same_numbers_and_are_a_tensor():
    episodes = make([[3, 1]])[0]
    assert episodes.lengths == [3, 1]
    assert episodes.lengths == (3, 1)
    assert episodes.lengths != [3, 2]
    assert episodes.lengths != [3]
    assert (episodes.lengths == torch.tensor([3, 2])).tolist() == [True, False]
    assert type(episodes.lengths + 1) is torch.Tensor
    appended = BatchEpisodes(2)
    assert appended.lengths == [0, 0]
    appended.append(np.zeros((1, 2)), np.zeros((1, 1)), np.zeros(1), [1])
    assert appended.lengths == [0, 1]


# Infos of the environments, and the arrays that off-policy learners read.


def make_with_infos() -> TaskEpisodes:
    speed = torch.arange(12.0).reshape(2, 3, 2)
    episodes = make([[3, 2], [1, 3]])
    speed = speed * episodes.mask
    return TaskEpisodes(
        **{name: getattr(episodes, name) for name in ARRAYS},
        infos={"speed": speed, "success": torch.tensor([[1.0, 0.0], [0.0, 0.0]])},
    )


def test_infos_are_kept_with_their_episodes() -> None:
    episodes = make_with_infos()
    assert episodes.infos["speed"].tolist() == [[[0, 1], [2, 3], [4, 0]], [[6, 7], [0, 9], [0, 11]]]
    assert episodes[0].infos["speed"].tolist() == [[0, 1], [2, 3], [4, 0]]
    assert episodes[1].infos["success"].tolist() == [0, 0]
    assert episodes.to("meta").infos["speed"].device.type == "meta"
    assert episodes.infos["speed"].device.type == "cpu"
    # The mean of the steps of an episode, or the value at its end.
    means = episodes.episode_infos()
    assert means["speed"].tolist() == [[2, 2], [6, 9]]
    assert means["success"].tolist() == [[1, 0], [0, 0]]


def test_transitions_end_in_the_final_observation() -> None:
    episodes = make([[3, 2], [1, 3]])
    following, terminations, truncations = episodes.next_observations, episodes.terminations, episodes.truncations
    assert following.shape == episodes.observations.shape
    assert terminations.shape == truncations.shape == episodes.rewards.shape
    for task, episode in itertools.product(range(2), range(2)):
        length = int(episodes.lengths[task, episode])
        column = following[task, :, episode]
        assert torch.equal(column[: length - 1], episodes.observations[task, 1:length, episode])
        assert torch.equal(column[length - 1], episodes.final_observations[task, episode])
        assert not column[length:].any()
        for stepwise, flag in ((terminations, episodes.terminated), (truncations, episodes.truncated)):
            expected = [step == length - 1 and bool(flag[task, episode]) for step in range(3)]
            assert stepwise[task, :, episode].tolist() == expected


def test_next_observations_of_pictures_and_of_numbers_alone() -> None:
    arrays = make_arrays([[2, 1]])
    for shape, dtype in (((2, 2, 3), np.uint8), ((), np.int64)):
        values = np.arange(4 * int(np.prod(shape))).reshape(1, 2, 2, *shape).astype(dtype)
        final = np.full((1, 2, *shape), 99, dtype)
        following = TaskEpisodes(**{**arrays, "observations": values, "final_observations": final}).next_observations
        assert following.dtype == torch.from_numpy(values).dtype
        np.testing.assert_array_equal(following[0, 0, 0], values[0, 1, 0])
        np.testing.assert_array_equal(following[0, 1, 0], final[0, 0])
        np.testing.assert_array_equal(following[0, 0, 1], final[0, 1])


def test_rewards_of_hand_made_episodes_that_are_not_finite_are_named_by_task() -> None:
    rewards = np.zeros((3, 4, 2))
    lengths = np.full((3, 2), 4)
    lengths[0, 1] = 2
    # The padding may contain anything.
    rewards[0, 3, 1], rewards[2, 1, 0] = np.nan, np.nan
    ends = np.ones((3, 2), bool)
    episodes = TaskEpisodes(
        np.zeros((3, 4, 2, 1)), np.zeros((3, 4, 2)), rewards, lengths, ~ends, ends, np.zeros((3, 2, 1))
    )
    with pytest.raises(NonFiniteError, match="the reward is nan in task 2, episode 0, step 1"):
        episodes.compute_advantages(None, gamma=0.9)
