"""Policies for images, against convolutions of torch.nn, finite differences, and themselves in other batches."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.derivatives import ParameterLayout, PolicyOnSamples
from maml_rl.episode import TaskEpisodes
from maml_rl.episode.steps import Steps
from maml_rl.machine import single_threaded
from maml_rl.policies import CNNPolicy, GaussianHead, NormalMLPPolicy, get_policy_for_env
from maml_rl.policies.layers import empty_layer
from tests.synthetic import different_params

# Patches, kernels that overlap, and one of each; not all divide the image.
LAYERS = {
    "patches": ((4, 4, 4), (5, 2, 2)),
    "overlapping": ((4, 3, 2), (5, 3, 1)),
    "both": ((4, 3, 3), (5, 3, 2)),
    "none": (),
}
SHAPES = {"channels last": (17, 19, 2), "channels first": (2, 17, 19)}
every_layers = pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def space(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def make(shape: tuple[int, ...] = (17, 19, 2), layers: Any = LAYERS["patches"], seed: int = 0) -> CNNPolicy:
    return CNNPolicy(shape, GaussianHead((2,)), (6,), layers, "tanh", seed=seed)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@every_layers
@every_shape
def test_features_are_those_of_torch_on_images_scaled_to_one(shape: tuple[int, ...], layers: Any) -> None:
    policy, rows = make(shape, layers), images(3, 5, *shape)
    units = rows.flatten(0, 1).float() / 255.0
    units = units if shape[0] == 2 else units.permute(0, 3, 1, 2)
    for index, (filters, kernel, stride) in enumerate(layers, start=1):
        layer = empty_layer(nn.Conv2d, units.shape[1], filters, kernel, stride)
        layer.load_state_dict(policy.get_submodule(f"conv{index}").state_dict())
        units = torch.tanh(layer(units))
    expected = units.movedim(1, -1).reshape(3, 5, -1)
    torch.testing.assert_close(policy.features(rows), expected)
    assert expected.shape[-1] == policy.perceptron.sizes[0]
    connected = NormalMLPPolicy(expected.shape[-1], 2, (6,), "tanh")
    connected.load_state_dict(policy.head.state_dict())
    torch.testing.assert_close(policy(rows).mean, connected(expected).mean)


@every_layers
def test_results_of_a_task_do_not_depend_on_the_other_tasks_of_the_batch(layers: Any) -> None:
    policy, rows = make(layers=layers), images(4, 3, *SHAPES["channels last"])
    params, noise = different_params(policy, 4), torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(), single_threaded():
        together = policy.actor(params)(rows, noise, ())[0]
        assert torch.equal(together, policy.act(rows, noise, params=params)[0])
        some = policy.actor({name: value[1:3] for name, value in params.items()}, 1)
        assert torch.equal(some(rows[1:3], noise[1:3], ())[0], together[1:3])
        for task in range(4):
            alone = policy.act(rows[task], noise[task], params={name: value[task] for name, value in params.items()})[0]
            torch.testing.assert_close(alone, together[task], rtol=1e-4, atol=1e-5)


@every_layers
def test_second_derivatives_are_slopes_of_the_first(layers: Any) -> None:
    policy = make((11, 11, 1), layers).double()
    rows = images(2, 3, 2, 11, 11, 1)
    ones = torch.ones(2, 2, dtype=torch.int64)
    generator = torch.Generator().manual_seed(3)
    actions = torch.randn((2, 3, 2, 2), generator=generator, dtype=torch.float64)
    episodes = TaskEpisodes(rows, actions, torch.zeros(2, 3, 2), 3 * ones, ones, ones, rows[:, 0])
    episodes.advantages = torch.randn((2, 3, 2), generator=generator, dtype=torch.float64)
    samples = Steps.of_tasks(episodes, slice(None), dtype=torch.float64, device=torch.device("cpu"))
    assert samples.observations.dtype == torch.uint8
    layout = ParameterLayout(policy)
    point = layout.flatten({name: value.double() for name, value in different_params(policy, 2).items()})
    vectors = torch.randn(point.shape, generator=generator, dtype=torch.float64)
    on_samples = PolicyOnSamples(policy, layout, samples)

    def gradient(at: Tensor) -> Tensor:
        loss = lambda log_probs: (log_probs * samples.advantages).sum((1, 2))  # noqa: E731
        found: Tensor = on_samples.at(at).differentiate(loss, twice=True)[1]
        return found

    linearization = on_samples.at(point)
    linearization.differentiate(lambda x: (x * samples.advantages).sum((1, 2)), twice=True)
    difference = (gradient(point + 1e-6 * vectors) - gradient(point - 1e-6 * vectors)) / 2e-6
    torch.testing.assert_close(linearization.hessian_product(vectors), difference, rtol=1e-5, atol=1e-6)


def test_layout_counts_the_numbers_of_every_layer_to_bound_memory() -> None:
    policy = make((32, 32, 1), ((8, 4, 4), (16, 2, 2)))
    assert policy.layer_widths == [1024, 512, 256, 6, 2]
    layout = ParameterLayout(policy)
    assert (layout.width, layout.units) == (1024, 1800)


def test_weights_depend_on_the_seed() -> None:
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert [name for name, _ in first.named_parameters()][:4] == [
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
    ]
    assert all(torch.equal(value, again.get_parameter(name)) for name, value in first.named_parameters())
    assert not torch.equal(first.get_parameter("conv1.weight"), other.get_parameter("conv1.weight"))
    copy = pickle.loads(pickle.dumps(first))
    assert torch.equal(copy(images(2, 17, 19, 2)).mean, first(images(2, 17, 19, 2)).mean)


@pytest.mark.parametrize(
    ("shape", "action_space"),
    [
        *(
            (shape, spaces.Box(-1.0, 1.0, (2,)))
            for shape in ((32, 32, 1), (3, 84, 84), (84, 84, 4), (5, 6, 3), (3, 3, 1))
        ),
        *(((5, 6, 3), space) for space in (spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4))),
    ],
    ids=str,
)
def test_images_get_suitable_convolutions_and_any_actions(shape: tuple[int, ...], action_space: Any) -> None:
    env = SimpleNamespace(single_observation_space=space(shape), single_action_space=action_space)
    policy = get_policy_for_env(env, (8,))
    assert isinstance(policy, CNNPolicy)
    policy.check_spaces(space(shape), action_space)
    observation = space(shape).sample()
    action = np.asarray(policy.choose(observation)[0], action_space.dtype)[()]
    assert action.shape == action_space.shape
    assert isinstance(action_space, spaces.Box) or action_space.contains(action)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (((8, 20, 1),), r"kernel of convolution 1 is 20 x 20.*only 17 x 19.*smaller conv-layers"),
        (((8, 4, 4), (8, 5, 1)), r"kernel of convolution 2 is 5 x 5.*only 4 x 4"),
        (((8, 4, 0),), "must be positive"),
    ],
)
def test_convolutions_that_do_not_fit_are_refused(layers: Any, message: str) -> None:
    env = SimpleNamespace(single_observation_space=space((17, 19, 2)), single_action_space=spaces.Discrete(2))
    with pytest.raises(ValueError, match=message):
        get_policy_for_env(env, conv_layers=layers)


def test_observations_that_do_not_fit_are_refused() -> None:
    policy = make()
    with pytest.raises(ValueError, match=r"images of bytes of shape \(17, 19, 2\), the environment has Box.*float32"):
        policy.check_spaces(spaces.Box(0.0, 1.0, (17, 19, 2)), spaces.Box(-1.0, 1.0, (2,)))
    with pytest.raises(ValueError, match="does not fit the action space Discrete"):
        policy.check_spaces(space((17, 19, 2)), spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"stacked for 2 tasks.*got \(3, 4, 17, 19, 2\)"):
        policy(images(3, 4, 17, 19, 2), policy.stack_parameters(2))
