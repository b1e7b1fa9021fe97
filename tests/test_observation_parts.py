"""`ObservationParts`: symbols as one-hot vectors."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl.observation_parts import ObservationParts
from maml_rl.spaces import PackedSpace


def test_symbols_of_a_grid_are_one_hot_vectors_and_others_are_zeros() -> None:
    sizes, starts = np.array([[3, 2], [4, 5]]), np.array([[1, 0], [2, 0]])
    grid: spaces.MultiDiscrete = spaces.MultiDiscrete(sizes, np.uint8, seed=0, start=starts)  # type: ignore[arg-type]
    parts = ObservationParts(PackedSpace(grid))
    elements = np.stack([grid.sample() for _ in range(40)])
    vectors = parts.numbers(torch.from_numpy(elements.reshape(8, 5, 4)), torch.float64)
    expected = np.array([spaces.flatten(grid, element) for element in elements])
    np.testing.assert_array_equal(vectors.reshape(40, -1), expected)
    assert vectors.dtype == torch.float64
    # A step that nobody has done has zeros, which only the second column has as a category; 200 is none at all.
    zeros, beyond = (parts.numbers(torch.full((1, 4), number, dtype=torch.uint8), torch.float32) for number in (0, 200))
    assert zeros.nonzero()[:, 1].tolist() == [3, 9]
    assert not beyond.any()


def test_parts_are_not_told_apart_by_identity_which_a_pickle_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maml_rl.observation_parts.id", lambda part: 0, raising=False)
    image = spaces.Box(0, 255, (3, 8, 8), np.uint8)
    space = PackedSpace(spaces.Dict({"first": spaces.Discrete(3), "image": image, "second": spaces.Discrete(5)}))
    row = np.zeros(space.shape or (), np.uint8)
    space.write({"first": 1, "image": np.zeros((3, 8, 8), np.uint8), "second": 4}, row)
    numbers = ObservationParts(space).numbers(torch.from_numpy(row), torch.float32)
    assert numbers.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_part_without_numbers_beside_an_image_has_none() -> None:
    space = PackedSpace(spaces.Tuple((spaces.Box(0, 255, (3, 8, 8), np.uint8), spaces.Box(-1.0, 1.0, (0,)))))
    assert ObservationParts(space).numbers(torch.zeros((5, 192), dtype=torch.uint8), torch.float32).shape == (5, 0)
