"""Mixtures of families: every slot is a slot of its family, whatever the others are."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs import make_vector_env
from tests.envs.contract import random_actions

POINTS = {"families": ["2DNavigation-v0", "PointGoal-v0", "SemiCircle-v0"]}
GRIDS = {"families": ["DarkRoom-v0", "GridNavi-v0", "Bandit-K5-v0"]}
BODIES = {"families": ["HalfCheetahVel-v5", "HopperVel-v5", "SwimmerVel-v5"]}
WIDER = {**BODIES, "arguments": {name: {"normalization_scale": 10.0} for name in BODIES["families"]}}
UNEQUAL: dict[str, Any] = {"families": ["PointGoal-v0", "HalfCheetahVel-v5"]}
CHEETAHS: dict[str, Any] = {}
SEEDS = np.array([5, 2**40, 7, 8, 9, 10])


@pytest.mark.parametrize(
    ("kwargs", "is_padded"),
    [(POINTS, False), (CHEETAHS, False), (GRIDS, True), (BODIES, True), (WIDER, True), (UNEQUAL, True)],
    ids=["points", "cheetahs", "grids", "bodies", "wider bodies", "unequal"],
)
def test_slot_is_a_slot_of_its_family(kwargs: dict[str, Any], is_padded: bool) -> None:
    mixture: Any = make_vector_env("Mixture-v0", kwargs, 6)
    tasks = mixture.sample_tasks(6, seed=3)
    mixture.reset_task(tasks)
    mixture.reset_buffers(SEEDS)
    actions = random_actions(mixture, 12)
    seen = [mixture.buffers.observations.copy()]
    rewards, ends = [], []
    for each in actions:
        mixture.step_send(0, each)
        mixture.step_recv()
        seen.append(mixture.buffers.observations.copy())
        rewards.append(mixture.buffers.rewards.copy())
        ends.append(mixture.buffers.terminated.copy())
    entries = mixture.single_action_space.shape[0] if is_padded and kwargs is not GRIDS else 0
    half = (mixture.observation_space.shape[1] - entries) // 2
    for slot, task in enumerate(tasks):
        name = task["family"]
        alone: Any = make_vector_env(name, kwargs.get("arguments", {}).get(name, {}), 1)
        alone.reset_task([{key: value for key, value in task.items() if key != "family"}])
        alone.reset_buffers(SEEDS[slot : slot + 1])
        space = alone.single_observation_space
        size, own_action = spaces.flatdim(space), alone.single_action_space
        for step in range(len(actions) + 1):
            if step:
                action = actions[step - 1][slot]
                if is_padded and isinstance(own_action, spaces.Discrete):
                    action = action % own_action.n
                elif is_padded:
                    low, high, action = own_action.low, own_action.high, action[: own_action.shape[0]]
                    # Bit for bit as the family alone where all families have one range.
                    if kwargs is UNEQUAL and name == "PointGoal-v0":
                        action = (low + (action + 1.0) * (high - low) / 2.0).astype(np.float32)
                alone.step_send(0, np.asarray(action)[None])
                alone.step_recv()
                assert rewards[step - 1][slot] == alone.buffers.rewards[0]
                assert ends[step - 1][slot] == alone.buffers.terminated[0]
            own = np.asarray(spaces.flatten(space, alone.buffers.observations[0]), np.float32)
            if not is_padded:
                np.testing.assert_array_equal(seen[step][slot], own)
            else:
                np.testing.assert_array_equal(seen[step][slot][:size], own)
                np.testing.assert_array_equal(seen[step][slot][size:half], 0.0)
                mask, of_actions = np.split(seen[step][slot][half:], [half])
                np.testing.assert_array_equal(mask, np.arange(half) < size)
                np.testing.assert_array_equal(of_actions, np.arange(entries) < np.prod(own_action.shape))


def test_every_family_ends_at_its_own_time_limit() -> None:
    own = {"arguments": {"PointGoal-v0": {"max_episode_steps": 5}}}
    mixture: Any = make_vector_env("Mixture-v0", {**POINTS, **own}, 6)
    mixture.reset_task(tasks := mixture.sample_tasks(6, seed=0))
    mixture.reset_buffers(SEEDS)
    lengths = np.zeros(6, int)
    while not (over := mixture.buffers.terminated | mixture.buffers.truncated).all():
        lengths += ~over
        mixture.step(np.zeros(mixture.action_space.shape, np.float32))
    limits = {"2DNavigation-v0": 100, "PointGoal-v0": 5, "SemiCircle-v0": 60}
    assert mixture.max_episode_steps == 100
    for length, task, terminated in zip(lengths, tasks, mixture.buffers.terminated, strict=True):
        assert length == limits[task["family"]] or terminated


def test_batch_has_as_many_tasks_of_a_family_as_its_weight_says() -> None:
    kwargs = {"families": {"2DNavigation-v0": 2.0, "PointGoal-v0": 1.0, "SemiCircle-v0": 1.0}}
    mixture = make_vector_env("Mixture-v0", kwargs, 1)
    batches = [[task["family"] for task in mixture.sample_tasks(10)] for _ in range(400)]
    counts = np.array([[batch.count(name) for name in kwargs["families"]] for batch in batches])
    assert (counts.sum(1) == 10).all()
    assert (abs(counts - [5, 2.5, 2.5]) < 1).all()
    np.testing.assert_allclose(counts.mean(0), [5, 2.5, 2.5], atol=0.1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"families": ["2DNavigation-v0"]}, "at least two families"),
        ({"families": "2DNavigation-v0"}, "families must be ids"),
        ({"families": [3, 4]}, "families must be ids"),
        ({"families": ["2DNavigation-v0", "CartPole-v1"]}, "'CartPole-v1' is another environment"),
        ({"families": ["2DNavigation-v0", "DarkRoom-v0"]}, "differ in kind"),
        ({"families": ["2DNavigation-v0", "PixelNavigation-v0"]}, "images, as of PixelNavigation-v0"),
        ({"families": {"2DNavigation-v0": 0.0, "PointGoal-v0": 1.0}}, "the weight of 2DNavigation-v0"),
        ({**POINTS, "arguments": {"Wind-v0": {}}}, "arguments of 'Wind-v0'"),
        ({"families": ["PointGoal-v0", "PointGoal-v0", "Wind-v0"]}, "PointGoal-v0 is named twice.*with its weight"),
        (
            {**POINTS, "arguments": {"PointGoal-v0": {"max_episode_steps": 5}}, "max_episode_steps": 9},
            "two time limits of PointGoal-v0: 9 of the mixture, and 5 of its own",
        ),
        ({"families": ["2DNavigation-v0", "PointGaol-v0"]}, "did you mean 'PointGoal-v0'"),
    ],
)
def test_families_that_cannot_be_mixed_are_refused_in_one_line(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        make_vector_env("Mixture-v0", kwargs, 2)
    assert "\n" not in str(raised.value)


def test_arguments_reach_their_family() -> None:
    kwargs = {**POINTS, "arguments": {"2DNavigation-v0": {"low": 0.1, "high": 0.2}}}
    mixture = make_vector_env("Mixture-v0", kwargs, 1)
    goals = [task["goal"] for task in mixture.sample_tasks(30, seed=0) if task["family"] == "2DNavigation-v0"]
    assert len(goals) == 10
    assert all((goal >= 0.1).all() and (goal <= 0.2).all() for goal in goals)
