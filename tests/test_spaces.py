"""Spaces as arrays, against Gymnasium's own flattening."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.spaces import (
    ObservationFlattener,
    PackedSpace,
    array_layout,
    array_writer,
    flat_observation_space,
    is_image,
)
from tests.envs.third_party import DictEnv

NESTED = spaces.Dict(
    place=spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    inner=spaces.Tuple(
        [
            spaces.Discrete(4, start=-2),
            spaces.MultiDiscrete([[2, 3], [4, 5]]),
            spaces.Dict(lights=spaces.MultiBinary([2, 2]), shades=spaces.Box(0, 255, (2,), np.uint8)),
        ]
    ),
)
SPACES = {
    "nested": NESTED,
    "tuple": spaces.Tuple([spaces.Box(-1.0, 1.0, (), np.float32), spaces.Discrete(2)]),
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "multi-binary": spaces.MultiBinary(5),
}


@pytest.mark.parametrize("name", SPACES)
def test_observations_are_flattened_as_gymnasium_flattens_them(name: str) -> None:
    space = SPACES[name]
    space.seed(0)
    flattener = ObservationFlattener(space)
    assert flattener.flat_space == spaces.flatten_space(space) == flat_observation_space(space)
    vector = np.full(flattener.flat_space.shape, 7, flattener.flat_space.dtype)
    for _ in range(20):
        observation = space.sample()
        flattener.write(observation, vector)
        np.testing.assert_array_equal(vector, spaces.flatten(space, observation))
        assert vector in flattener.flat_space


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            spaces.Dict(a=spaces.Dict(b=spaces.OneOf([spaces.Discrete(2)]))),
            r"unsupported space OneOf.* at \['a'\]\['b'\]: expected Box",
        ),
        (spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]), r"unsupported space Sequence.* at \[0\]: expected"),
        (spaces.Graph(spaces.Discrete(2), None), r"unsupported space Graph.*: expected Box, Discrete"),
        (spaces.Dict(), "it has no parts"),
        (spaces.Dict(a=spaces.Box(0, 9, (1,), np.uint16)), "torch does not compute with uint16"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_unsupported_observations_are_refused_by_name(space: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        flat_observation_space(space)


def test_actions_of_several_kinds_are_not_an_array() -> None:
    with pytest.raises(TypeError, match=r"unsupported space Tuple.*MultiDiscrete or MultiBinary"):
        array_layout(spaces.Tuple([spaces.Discrete(2)]))
    assert array_layout(spaces.MultiDiscrete([2, 3])) == ((2,), np.int64)
    assert array_layout(spaces.MultiBinary([2, 3])) == ((2, 3), np.int8)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(0, 255, (32, 32, 1), np.uint8), True),
        (spaces.Box(0, 255, (3, 32, 32), np.uint8), True),
        (spaces.Box(0, 255, (32, 32), np.uint8), False),
        # Symbols instead of colors.
        (spaces.Box(0, 3, (32, 32, 3), np.uint8), True),
        (spaces.Box(0, np.array([[[3, 9]]], np.uint8), (1, 1, 2), np.uint8), False),
        (spaces.Box(0.0, 1.0, (32, 32, 3), np.float32), False),
        (spaces.Discrete(3, start=1), False),
    ],
    ids=str,
)
def test_images_are_bytes_on_three_axes(space: Any, expected: bool) -> None:
    assert is_image(space) is expected
    assert flat_observation_space(space) is space, "of one array"


def test_slots_show_their_observations_as_one_vector_without_loss() -> None:
    vector_env = SerialVectorEnv(DictEnv, 2)
    flat = spaces.flatten_space(DictEnv.observation_space)
    assert vector_env.single_observation_space == flat
    single = gymnasium.wrappers.FlattenObservation(DictEnv())
    observations, _ = vector_env.reset(seed=3)
    assert observations.dtype == np.float64
    assert vector_env.observation_space.contains(observations)
    np.testing.assert_array_equal(observations[0], single.reset(seed=3)[0], strict=True)
    action = np.array([0.3])
    np.testing.assert_array_equal(
        vector_env.step(np.array([action, action]))[0][0], single.step(action)[0], strict=True
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"place": np.zeros(1)}, r"shape \(1,\) and dtype float64 at \['place'\]; its space is Box"),
        ({"parts": None}, r"without \['parts'\]\[0\]"),
        ({"parts": (2, np.zeros(2, np.int8), np.zeros(2, np.int64))}, r"2 at .*, outside of its space Discrete"),
        ({"parts": (0.5, np.zeros(2, np.int8), np.zeros(2, np.int64))}, r"dtype float64 at \['parts'\]\[0\]"),
    ],
)
def test_observation_whose_part_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    class Wrong(DictEnv):
        def observe(self) -> Any:
            return {**super().observe(), **changed}

    with pytest.raises(ValueError, match=f"returned an observation.*{message}"):
        SerialVectorEnv(Wrong).reset(seed=0)


def test_element_of_a_row_of_bytes_is_the_callers_own_and_within_its_space() -> None:
    space = PackedSpace(spaces.Dict({"number": spaces.Box(-9.0, 9.0, (2,), np.float64), "word": spaces.Text(3)}))
    row = np.zeros(space.shape, np.uint8)
    space.write({"number": np.array([1.0, 2.0]), "word": "a"}, row)
    element = space.element(row)
    row[:] = 0
    assert element["number"].tolist() == [1.0, 2.0]
    # All bytes of one row, too: there is nothing beside them to leave out.
    space = PackedSpace(spaces.Box(0, 255, (2,), np.uint8))
    row = np.array([3, 4], np.uint8)
    element = space.element(row)
    row[:] = 0
    assert element.tolist() == [3, 4]
    # A number outside of its space is refused beside text, too.
    space = PackedSpace(spaces.Dict({"word": spaces.Text(3), "symbol": spaces.Discrete(3)}))
    with pytest.raises(ValueError, match=r"3 at \['symbol'\], outside of its space Discrete"):
        space.write({"word": "a", "symbol": 3}, np.zeros(space.shape, np.uint8))


@pytest.mark.parametrize(
    ("space", "right", "wrong", "message"),
    [
        (spaces.Box(-128, 127, (3,), np.int8), [0, 127, -128], [-153, 1000, -467], r"-153 at \[0\]"),
        (spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32), [0, -(2**31)], [0, 2**31], r"2147483648 at \[1\]"),
        (spaces.Box(0, 10, (2,), np.uint8), np.uint8([0, 10]), np.uint8([0, 11]), r"11 at \[1\]"),
        (spaces.Box(np.array([0, 5]), np.array([3, 9]), dtype=np.int64), [3, 5], [5, 5], r"5 at \[0\]"),
        (spaces.Discrete(3), 2, 7, "with 7, outside of its space Discrete"),
        (spaces.Discrete(3), np.int64(0), -1, "with -1, outside of its space Discrete"),
        (spaces.Discrete(3, start=1), 1, 0, "with 0, outside of its space Discrete"),
        (spaces.MultiDiscrete([3, 2]), [2, 1], [1, 2], r"2 at \[1\]"),
        (spaces.MultiBinary(2), [1, 0], [0, 2], r"2 at \[1\]"),
        (
            spaces.Dict({"a": spaces.Tuple((spaces.Box(-5, 5, (2,), np.int8),))}),
            {"a": (np.full(2, 5),)},
            {"a": (np.array([0, 300]),)},
            r"300 at \['a'\]\[0\]\[1\]",
        ),
    ],
    ids=str,
)
def test_whole_number_outside_of_its_space_is_refused_with_its_place(
    space: Any, right: Any, wrong: Any, message: str
) -> None:
    writer = array_writer(space)
    row = np.zeros(*array_layout(writer.flat_space))
    writer.write(right, row)
    before = row.copy()
    with pytest.raises(ValueError, match=message):
        writer.write(wrong, row)
    np.testing.assert_array_equal(row, before)
