"""The linear baseline, against NumPy's least squares, and on difficult episodes."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from maml_rl.baseline import LinearFeatureBaseline, ZeroBaseline, make_baseline
from maml_rl.episode import BatchEpisodes, TaskEpisodes


def make(lengths: Any, observations: Any = None, rewards: Any = None, seed: int = 0, **ends: Any) -> TaskEpisodes:
    """Episodes (M, B) of the given lengths, with random observations (M, T, B, 3) and rewards unless given."""
    generator = np.random.default_rng(seed)
    counts = np.array(lengths)
    steps = int(counts.max())
    grid = (len(counts), steps, counts.shape[1])
    real = np.arange(steps)[None, :, None] < counts[:, None, :]
    size = 3 if observations is None else observations.shape[-1]
    drawn = generator.normal(size=(*grid, 3)) if observations is None else np.broadcast_to(observations, (*grid, size))
    paid = generator.normal(size=grid) if rewards is None else np.broadcast_to(rewards, grid)
    everywhere = np.ones(counts.shape, bool)
    return TaskEpisodes(
        np.where(real[..., None], drawn, 0.0).astype(drawn.dtype),
        np.zeros(grid, np.int64),
        np.where(real, paid, 0.0).astype(np.float32),
        counts,
        ends.get("terminated", ~everywhere),
        ends.get("truncated", everywhere),
        generator.normal(size=(*counts.shape, size)),
        gamma=0.9,
    )


def design(observations: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the features of the docstring, (N, F)."""
    time = steps[:, None] / 100.0
    return np.concatenate((observations, observations**2, time, time**2, time**3, np.ones_like(time)), axis=1)


def least_squares(episodes: TaskEpisodes, task: int) -> np.ndarray:
    """Return the weights of one task, from its real steps only."""
    real = episodes.mask[task].numpy() > 0
    steps = np.broadcast_to(np.arange(real.shape[0])[:, None], real.shape)[real]
    features = design(episodes.observations[task].numpy()[real].astype(np.float64), steps)
    return np.linalg.lstsq(features, episodes.returns[task].numpy()[real].astype(np.float64), rcond=None)[0]


def test_values_equal_least_squares_on_the_real_steps_of_each_task():
    episodes = make([[40, 25, 60], [50, 60, 33]])
    baseline = LinearFeatureBaseline(3, reg_coeff=1e-9).fit(episodes)
    values, final_values = baseline(episodes), baseline.final_values(episodes)
    for task in range(2):
        weights = least_squares(episodes, task)
        for episode, length in enumerate(episodes.lengths[task].tolist()):
            observations = episodes.observations[task, :length, episode].numpy()
            expected = design(observations, np.arange(length)) @ weights
            np.testing.assert_allclose(values[task, :length, episode].numpy(), expected, rtol=1e-4, atol=1e-4)
            assert not values[task, length:, episode].any()
            largest = np.abs(episodes.observations[task].numpy()).max((0, 1))
            final_observation = np.clip(episodes.final_observations[task, episode].numpy(), -largest, largest)
            final = design(final_observation[None], np.array([length])) @ weights
            np.testing.assert_allclose(final_values[task, episode].numpy(), final[0], rtol=1e-4, atol=1e-4)


def wide() -> TaskEpisodes:
    """Episodes of two tasks with 26 and 30 steps; of the 40 entries of observations, 30 are the same in all of them."""
    observations = np.random.default_rng(0).normal(size=(2, 10, 3, 40))
    observations[..., 10:] = observations[:, :1, :1, 10:]
    return make([[10, 6, 10], [10, 10, 10]], observations)


@pytest.mark.parametrize("reg_coeff", [1e-5, 1e-2])
def test_fit_with_fewer_steps_than_features_and_with_more_is_the_ridge_regression(reg_coeff):
    few = wide()
    empty = [(0, 0), (0, 0), (0, 10)]
    lengths, rewards = np.pad(few.lengths, empty[1:]), np.pad(few.rewards, empty)
    many = make(lengths, np.pad(few.observations, [*empty, (0, 0)]), rewards)
    many.final_observations[:, :3] = few.final_observations
    one, other = (LinearFeatureBaseline(40, reg_coeff).fit(episodes) for episodes in (few, many))
    assert few.mask[0].numel() < one.feature_size <= many.mask[0].numel()
    torch.testing.assert_close(other(many)[:, :, :3], one(few), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(other.final_values(many)[:, :3], one.final_values(few), rtol=0.0, atol=1e-5)
    for task, values in enumerate(one(few).numpy()):
        real = few.mask[task].numpy() > 0
        steps = np.broadcast_to(np.arange(10)[:, None], real.shape)[real]
        features = design(few.observations[task].numpy()[real], steps)
        # The ridge is on features of unit root mean square; augmented rows make a least-squares problem of it.
        features /= np.sqrt((features**2).mean(0)).clip(min=1e-30)
        rows = np.concatenate((features, np.sqrt(reg_coeff) * np.eye(features.shape[1])))
        targets = np.concatenate((few.returns[task].numpy()[real], np.zeros(features.shape[1])))
        weights = np.linalg.lstsq(rows, targets, rcond=None)[0]
        np.testing.assert_allclose(values[real], features @ weights, rtol=0.0, atol=1e-6 if reg_coeff > 1e-5 else 1e-5)


def test_padded_steps_never_enter_the_fit():
    episodes = make([[4, 9], [7, 2]])
    clean = LinearFeatureBaseline(3).fit(episodes)(episodes).clone()
    padding = episodes.mask == 0
    episodes.observations[padding] = torch.nan
    targets = torch.where(padding, torch.nan, episodes.returns)
    assert torch.equal(LinearFeatureBaseline(3).fit(episodes, targets)(episodes), clean)


def test_each_task_is_fitted_as_if_it_were_alone():
    # Long enough that the tasks are cut into several groups.
    episodes = make(np.random.default_rng(0).integers(1, 300, (40, 20)))
    together = LinearFeatureBaseline(3).fit(episodes)
    values, finals = together(episodes), together.final_values(episodes)
    for task in (0, 17, 39):
        one = episodes[task]
        alone = LinearFeatureBaseline(3).fit(one)
        torch.testing.assert_close(alone(one), values[task, : len(one)], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone.final_values(one), finals[task], rtol=1e-4, atol=1e-4)


def test_tasks_are_one_group_on_an_accelerator_and_several_on_a_cpu():
    for device, count in (("cpu", 20), ("meta", 1)):
        groups = LinearFeatureBaseline(20)._groups(torch.empty(40, 100, 20, device=device))
        assert len(groups) == count
        assert [task for group in groups for task in range(40)[group]] == [*range(40)]


def test_values_do_not_depend_on_the_units_of_an_observation():
    episodes = make([[50, 30]])
    values = LinearFeatureBaseline(3).fit(episodes)(episodes).clone()
    episodes.observations *= torch.tensor([1e-12, 1.0, 1e12])
    torch.testing.assert_close(LinearFeatureBaseline(3).fit(episodes)(episodes), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reg_coeff", [0.0, 1e-5])
@pytest.mark.parametrize("length", [1, 2, 100])
@pytest.mark.parametrize(
    ("observations", "dtype"), [*((each, np.float32) for each in (0.0, 5.0, 1e30, 1e-40)), (1e200, np.float64)]
)
def test_constant_and_huge_observations_and_short_episodes_never_give_nan(observations, dtype, length, reg_coeff):
    everywhere = np.full((1, 1, 1, 3), observations, dtype)
    episodes = make([[length, 1], [length, length]], observations=everywhere, rewards=1.0)
    baseline = LinearFeatureBaseline(3, reg_coeff).fit(episodes)
    assert torch.isfinite(baseline(episodes)).all()
    assert torch.isfinite(baseline.final_values(episodes)).all()
    assert torch.isfinite(episodes.compute_advantages(baseline)).all()
    # The observations carry no information, so that the best values are the best cubic in time.
    returns, time = episodes.returns[1, :, 0].double().numpy(), np.arange(length) / 100.0
    cubic = np.polynomial.Polynomial.fit(time, returns, min(3, length - 1))
    np.testing.assert_allclose(baseline(episodes)[1, :, 0].numpy(), cubic(time), rtol=0.0, atol=1e-2)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-5]))
def test_values_are_finite_for_any_observations(seed, reg_coeff):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 6, (3, 2))
    lengths[0, 0] = 5
    magnitude = 10.0 ** generator.integers(-300, 300, 3)
    observations = np.round(generator.normal(size=(3, 5, 2, 3))) * magnitude
    episodes = make(lengths, observations=observations, seed=seed)
    baseline = LinearFeatureBaseline(3, reg_coeff).fit(episodes)
    assert torch.isfinite(baseline(episodes)).all()
    assert torch.isfinite(baseline.final_values(episodes)).all()
    assert torch.isfinite(episodes.compute_advantages(baseline)).all()


def test_final_observation_far_outside_of_the_fitted_ones_is_clipped_to_them():
    episodes = make([[50, 50]])
    largest = episodes.observations.abs().amax((1, 2))
    baseline = LinearFeatureBaseline(3).fit(episodes)
    episodes.final_observations[0] = torch.stack((1e30 * largest[0], largest[0]))
    final_values = baseline.final_values(episodes)
    torch.testing.assert_close(final_values[0, 0], final_values[0, 1])


def test_task_without_steps_has_value_zero():
    episodes = make([[3, 2], [0, 0]])
    baseline = LinearFeatureBaseline(3).fit(episodes)
    assert not baseline.final_values(episodes)[1].any()


def test_integer_observations_become_one_hot_vectors():
    generator = np.random.default_rng(0)
    states = generator.integers(0, 4, (2, 30, 5))
    rewards = np.array([1.0, -2.0, 0.5, 7.0])[states]
    ends = np.ones((2, 5), bool)
    lengths = np.full((2, 5), 30)
    episodes = TaskEpisodes(states, states, rewards, lengths, ~ends, ends, states[:, 0], gamma=0.0)
    baseline = LinearFeatureBaseline(4).fit(episodes)
    torch.testing.assert_close(baseline(episodes), episodes.rewards, rtol=0.0, atol=1e-4)
    expected = torch.tensor([1.0, -2.0, 0.5, 7.0])[episodes.final_observations]
    torch.testing.assert_close(baseline.final_values(episodes), expected, rtol=0.0, atol=0.05)


def test_images_are_flattened():
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (1, 60, 2, 2, 2)).astype(np.uint8)
    ends, lengths = np.ones((1, 2), bool), np.full((1, 2), 60)
    rewards = images[..., 1, 0].astype(np.float32)
    episodes = TaskEpisodes(
        images, lengths[:, None].repeat(60, 1), rewards, lengths, ends, ~ends, images[:, 0], gamma=0
    )
    torch.testing.assert_close(LinearFeatureBaseline(4).fit(episodes)(episodes), episodes.rewards, rtol=0, atol=1e-3)


def test_baseline_of_a_single_task_works_as_in_pytorch_maml_rl():
    episodes = BatchEpisodes(batch_size=2, gamma=0.9)
    for step in range(20):
        observations = np.array([[step, 1.0], [0.0, step]])
        episodes.append(observations, np.zeros((2, 1)), np.array([1.0, 2.0]), [0, 1])
    baseline = LinearFeatureBaseline(2)
    baseline.fit(episodes)
    assert baseline(episodes).shape == (20, 2)
    torch.testing.assert_close(baseline(episodes), episodes.returns, rtol=0.0, atol=0.2)
    episodes.compute_advantages(baseline, gae_lambda=1.0, normalize=False)
    torch.testing.assert_close(episodes.advantages, episodes.returns - baseline(episodes), rtol=0.0, atol=1e-4)


def test_episode_truncated_early_bootstraps_with_the_later_rewards_of_others():
    # Terminated episodes last 50 steps; the one truncated at 10 has the same value under the policy.
    lengths = [[50] * 8 + [10]]
    truncated = np.array([[False] * 8 + [True]])
    episodes = make(lengths, rewards=1.0, truncated=truncated, terminated=~truncated)
    advantages = {}
    for bootstrap in (True, False):
        baseline = LinearFeatureBaseline(3)
        episodes.compute_advantages(baseline, gamma=1.0, normalize=False, bootstrap=bootstrap)
        advantages[bootstrap] = float(episodes.advantages[0, 0, 8])
    assert advantages[False] < -25.0
    assert abs(advantages[True]) < 15.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LinearFeatureBaseline(0), ValueError, "input_size"),
        (lambda: LinearFeatureBaseline(10**6), ValueError, "images.*baseline: zero"),
        (lambda: LinearFeatureBaseline(3, -1.0), ValueError, "reg_coeff"),
        (lambda: LinearFeatureBaseline(3, image_shape=(8, 8, 1)), TypeError, "either an input_size or an image_shape"),
        (lambda: LinearFeatureBaseline(), TypeError, "either an input_size or an image_shape"),
        (lambda: LinearFeatureBaseline(4).fit(make([[2]])), ValueError, "4 entries"),
        (
            lambda: LinearFeatureBaseline(image_shape=(8, 8, 1)).fit(make([[3, 2]])),
            ValueError,
            r"images of shape \(8, 8, 1\), got the shape \(3,\)",
        ),
        (lambda: LinearFeatureBaseline(3)(make([[2]])), RuntimeError, "fit it"),
        (lambda: LinearFeatureBaseline(3).fit(make([[2], [2]]))(make([[2]])), RuntimeError, "fitted for 2 tasks"),
    ],
)
def test_wrong_arguments_and_episodes_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_advantages_are_the_same_for_any_number_of_threads() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            of_tasks = make(np.full((4, 40), 300))
            advantages = [of_tasks.compute_advantages(LinearFeatureBaseline(3))]
            advantages.append(of_tasks[0].compute_advantages(LinearFeatureBaseline(3), fit=True))
            found.append(advantages)
    finally:
        torch.set_num_threads(before)
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


def test_zero_baseline_gives_the_advantages_of_none():
    episodes = make([[4, 2], [3, 4]])
    expected = episodes.compute_advantages(None, normalize=False).clone()
    for bootstrap in (False, True):
        torch.testing.assert_close(
            episodes.compute_advantages(ZeroBaseline(), normalize=False, bootstrap=bootstrap), expected, rtol=0, atol=0
        )
    one = episodes[0]
    assert ZeroBaseline().fit(one)(one).shape == (4, 2)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((32, 32, 1), 64), ((84, 84, 4), 256), ((12, 84, 84), 192), ((3, 5, 5), 192), ((40, 30, 29), 116)],
)
def test_images_are_averaged_over_a_grid_of_few_cells(shape, size):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (2, 9, 3, *shape)).astype(np.uint8)
    counts, ends = np.full((2, 3), 9), np.ones((2, 3), bool)
    rewards = generator.normal(size=(2, 9, 3)).astype(np.float32)
    episodes = TaskEpisodes(images, np.zeros((2, 9, 3)), rewards, counts, ends, ~ends, images[:, 0], gamma=0.9)
    baseline = make_baseline("linear", spaces.Box(0, 255, shape, np.uint8))
    assert baseline.input_size == size
    assert baseline.feature_size == 2 * size + 4
    values = baseline.fit(episodes)(episodes)
    assert values.shape == (2, 9, 3)
    assert bool(values.isfinite().all())
    assert bool(baseline.final_values(episodes).isfinite().all())


@pytest.mark.parametrize("axes", [(0, 1, 2, 3, 4, 5), (0, 1, 2, 5, 3, 4)], ids=["channels last", "channels first"])
def test_returns_that_are_linear_in_the_light_of_a_cell_are_recovered(axes):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (1, 60, 5, 16, 24, 2)).astype(np.uint8)
    cells = images.reshape(1, 60, 5, 8, 2, 8, 3, 2).mean((4, 6)) / 255.0
    rewards = (3.0 * cells[..., 2, 5, 1] - cells[..., 7, 0, 0] + 0.5).astype(np.float32)
    counts, ends = np.full((1, 5), 60), np.ones((1, 5), bool)
    images = np.ascontiguousarray(images.transpose(axes))
    episodes = TaskEpisodes(images, np.zeros((1, 60, 5)), rewards, counts, ends, ~ends, images[:, 0], gamma=0.0)
    baseline = LinearFeatureBaseline(image_shape=images.shape[3:])
    torch.testing.assert_close(baseline.fit(episodes)(episodes), episodes.rewards, rtol=0.0, atol=2e-3)


def test_baseline_is_made_by_name_and_only_the_linear_one_refuses_large_observations():
    small, images = spaces.Box(-1.0, 1.0, (2, 3)), spaces.Box(0.0, 1.0, (64, 64, 3))
    linear = make_baseline("linear", small)
    assert isinstance(linear, LinearFeatureBaseline)
    assert linear.input_size == 6
    assert isinstance(make_baseline("zero", images), ZeroBaseline)
    with pytest.raises(ValueError, match="baseline: zero"):
        make_baseline("linear", images)
    with pytest.raises(ValueError, match="unknown baseline 'none'"):
        make_baseline("none", small)


def test_state_of_a_fitted_baseline_predicts_the_same_in_another():
    episodes = make([[5, 9], [7, 2]])
    fitted = LinearFeatureBaseline(3).fit(episodes)
    other = LinearFeatureBaseline(3)
    assert other.state_dict() == {}
    other.load_state_dict(fitted.state_dict())
    assert torch.equal(other(episodes), fitted(episodes))
    with pytest.raises(ValueError, match="observations of 4 entries"):
        LinearFeatureBaseline(4).load_state_dict(fitted.state_dict())
