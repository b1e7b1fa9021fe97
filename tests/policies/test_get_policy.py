"""The policies for different spaces."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl.policies import BernoulliHead, CategoricalHead, GaussianHead, MultiCategoricalHead, get_policy_for_env

BOX = spaces.Box(-1.0, 1.0, (3,))


def env(observation_space: gym.Space, action_space: gym.Space) -> SimpleNamespace:
    return SimpleNamespace(single_observation_space=observation_space, single_action_space=action_space)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("observation_space", "action_space", "head"),
    [
        (BOX, spaces.Box(-1.0, 1.0, (2,)), GaussianHead),
        (spaces.Box(-1.0, 1.0, (2, 3), np.float64), spaces.Box(-1.0, 1.0, (2,), np.float64), GaussianHead),
        (spaces.Box(-1.0, 1.0, ()), spaces.Discrete(5), CategoricalHead),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.MultiDiscrete([[3, 2]]), MultiCategoricalHead),
        (spaces.Discrete(7, start=2), spaces.MultiBinary([2, 2]), BernoulliHead),
    ],
    ids=str,
)
def test_policy_acts_on_observations_of_the_space_with_actions_of_it(observation_space, action_space, head, stacked):
    policy = get_policy_for_env(env(observation_space, action_space), (8,), "tanh")
    assert type(policy.distributions) is head
    observation_space.seed(0)
    observations = torch.from_numpy(np.stack([[observation_space.sample() for _ in range(3)] for _ in range(2)]))
    params = policy.stack_parameters(2) if stacked else None
    actions = policy.act(observations, torch.full((2, 3, policy.noise_size), 0.1), params=params)[0]
    assert actions.shape == (2, 3, *action_space.shape)
    for action in actions.detach().flatten(0, 1).numpy():
        clipped = np.clip(action, -1.0, 1.0) if isinstance(action_space, spaces.Box) else action
        clipped = np.asarray(clipped, action_space.dtype)[()]
        assert action_space.contains(clipped)
    assert policy.log_prob(observations, actions, params).shape == (2, 3)


def test_observations_of_several_parts_enter_as_one_vector():
    space = spaces.Dict(place=BOX, cell=spaces.Discrete(4))
    policy = get_policy_for_env(env(space, BOX))
    assert policy.observation_shape == (7,)
    policy.choose(spaces.flatten(space, space.sample()))


def test_single_and_vector_environments_give_the_same_policy():
    single = gym.make("CartPole-v1")
    vector = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    first, second = (get_policy_for_env(each, seed=3) for each in (single, vector))
    assert (first.input_size, first.output_size, first.hidden_sizes) == (4, 2, (100, 100))
    for name, value in first.named_parameters():
        assert torch.equal(value, second.get_parameter(name))
    single.close()
    vector.close()


def test_deviations_and_seed_are_passed_on():
    policy = get_policy_for_env(env(BOX, BOX), init_std=0.5, min_std=0.25, seed=4)
    torch.testing.assert_close(policy.sigma.exp(), torch.full((3,), 0.5))
    other = get_policy_for_env(env(BOX, BOX), init_std=0.5, seed=5)
    assert not torch.equal(policy.layer1.weight, other.layer1.weight)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (spaces.Dict(a=spaces.Graph(BOX, None)), BOX, r"observation space.*Graph.*at \['a'\].*TransformObservation"),
        (BOX, spaces.Box(0, 3, (2,), np.int64), r"action space.*a Box of floats.*TransformAction"),
        (BOX, spaces.Tuple([spaces.Discrete(2)]), r"action space.*TransformAction"),
    ],
    ids=["graph", "integers", "tuple"],
)
def test_unsupported_space_is_refused_with_a_remedy(observation_space, action_space, message):
    with pytest.raises(TypeError, match=message):
        get_policy_for_env(env(observation_space, action_space))


def test_object_without_spaces_is_refused():
    with pytest.raises(TypeError, match="observation space"):
        get_policy_for_env("HalfCheetahDir-v5")


@pytest.mark.parametrize(
    ("observation_space", "action_space", "hidden_sizes"),
    [(BOX, BOX, ()), (BOX, spaces.Discrete(3), (8, 8)), (spaces.Box(0, 255, (12, 12, 1), np.uint8), BOX, (8,))],
    ids=str,
)
def test_output_scale_multiplies_only_the_initial_weights_of_the_output_layer(
    observation_space, action_space, hidden_sizes
):
    usual, small = (
        get_policy_for_env(env(observation_space, action_space), hidden_sizes, "tanh", output_scale=scale)
        for scale in (1.0, 0.01)
    )
    outputs = usual.perceptron.layer_names[-1][0]
    for name, param in usual.named_parameters():
        torch.testing.assert_close(small.get_parameter(name), param * (0.01 if name.endswith(outputs) else 1.0))
    with pytest.raises(ValueError, match=r"output_scale must be positive, got 0\.0"):
        get_policy_for_env(env(BOX, BOX), output_scale=0.0)


@pytest.mark.parametrize(
    "empty",
    [
        spaces.Box(-1.0, 1.0, (0,)),
        spaces.Box(0, 255, (0, 4, 3), np.uint8),
        spaces.MultiDiscrete([]),
        spaces.Dict({}),
        spaces.Tuple([]),
    ],
    ids=str,
)
def test_space_without_entries_is_refused_by_name(empty: spaces.Space) -> None:
    for kind, spaces_of in (("observation", (empty, BOX)), ("action", (BOX, empty))):
        with pytest.raises(TypeError, match=f"no policy for the {kind} space .*: its elements have no entries; "):
            get_policy_for_env(env(*spaces_of))
