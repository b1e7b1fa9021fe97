"""The policies, against torch.nn, torch.distributions, finite differences, and themselves in other batches."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor
from torch.distributions import kl_divergence

from maml_rl.machine import single_threaded
from maml_rl.policies import (
    BernoulliMLPPolicy,
    CategoricalMLPPolicy,
    GRUPolicy,
    Memory,
    MLPPolicy,
    MultiCategoricalMLPPolicy,
    NormalMLPPolicy,
    Params,
    Policy,
)
from maml_rl.policies.distributions import mode
from maml_rl.policies.soft_actors import ContextActor
from tests.synthetic import different_params, randn


def make(kind: str, nonlinearity: str = "tanh", seed: int = 0, hidden_sizes: tuple[int, ...] = (7, 5)) -> MLPPolicy:
    if kind == "normal":
        return NormalMLPPolicy(3, 2, hidden_sizes, nonlinearity, init_std=0.7, seed=seed)
    if kind == "multi-categorical":
        return MultiCategoricalMLPPolicy(3, [4, 2, 3], hidden_sizes, nonlinearity, seed=seed)
    if kind == "bernoulli":
        return BernoulliMLPPolicy(3, 4, hidden_sizes, nonlinearity, seed=seed, action_shape=(2, 2))
    return CategoricalMLPPolicy(3, 4, hidden_sizes, nonlinearity, seed=seed)


def make_noise(policy: Policy, *lead: int, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    draw = {"normal": torch.randn, "uniform": torch.rand}[policy.noise_kind]
    return draw((*lead, policy.noise_size), generator=generator)


def of_task(params: Params, task: int) -> dict[str, Tensor]:
    return {name: value[task] for name, value in params.items()}


CHANCES = torch.tensor([0.5, 0.3, 0.2])
every_kind = pytest.mark.parametrize("kind", ["normal", "categorical", "multi-categorical", "bernoulli"])


@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
@every_kind
def test_network_equals_layers_of_torch_with_the_same_weights(kind, nonlinearity):
    policy = make(kind, nonlinearity)
    last = "mu" if kind == "normal" else "layer3"
    reference = torch.nn.Sequential()
    for index, name in enumerate(("layer1", "layer2", last)):
        if index:
            reference.append({"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}[nonlinearity]())
        reference.append(getattr(policy, name))
    observations = randn(6, 4, 3)
    torch.testing.assert_close(policy.distribution_parameters(observations)[0], reference(observations))


@every_kind
def test_stacked_parameters_give_each_task_the_results_of_its_own_parameters(kind):
    policy, observations = make(kind), randn(4, 6, 5, 3)
    params = different_params(policy, 4)
    noise = make_noise(policy, 4, 6, 5)
    stacked = policy(observations, params)
    actions = policy.act(observations, noise, params=params)[0]
    assert stacked.batch_shape == (4, 6, 5)
    for task in range(4):
        alone = policy(observations[task], of_task(params, task))
        of_task_alone, of_all = alone.log_prob(actions[task].float()), stacked.log_prob(actions.float())
        torch.testing.assert_close(of_task_alone, of_all[task])
        torch.testing.assert_close(
            policy.act(observations[task], noise[task], params=of_task(params, task))[0],
            actions[task],
            rtol=1e-4,
            atol=1e-5,
        )


def test_class_derived_from_the_gaussian_policy_acts_by_its_own_methods():
    class Still(NormalMLPPolicy):
        def act(
            self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
        ) -> tuple[Tensor, Memory]:
            return torch.zeros_like(noise), ()

    policy = Still(3, 2, (7,))
    actions = policy.actor(different_params(policy, 4))(randn(4, 6, 3), make_noise(policy, 4, 6), ())[0]
    assert not actions.any()


@every_kind
def test_log_prob_kl_and_entropy_equal_those_of_the_distributions(kind):
    policy, observations = make(kind), randn(3, 4, 3)
    first, second = different_params(policy, 3), policy.stack_parameters(3)
    p, q = policy(observations, first), policy(observations, second)
    actions = policy.act(observations, make_noise(policy, 3, 4), params=first)[0]
    torch.testing.assert_close(policy.log_prob(observations, actions, first), p.log_prob(actions.float()))
    old, new = (policy.distribution_parameters(observations, params) for params in (first, second))
    torch.testing.assert_close(policy.distributions.kl(old, new), kl_divergence(p, q))
    torch.testing.assert_close(policy.distributions.entropy(old), p.entropy())


@every_kind
def test_fisher_product_is_the_hessian_of_the_kl_at_equal_distributions(kind):
    policy = make(kind).double()
    observations = randn(2, 3, 3).double()
    distribution = tuple(x.detach() for x in policy.distribution_parameters(observations, policy.stack_parameters(2)))
    tangents = tuple(randn(*entry.shape, seed=3).double() for entry in distribution)
    weights = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def weighted_kl(*new: Tensor) -> Tensor:
        return (weights * policy.distributions.kl(distribution, new)).sum()

    _, expected = torch.autograd.functional.hvp(weighted_kl, distribution, tangents)
    for product, reference in zip(
        policy.distributions.fisher_product(distribution, tangents, weights), expected, strict=True
    ):
        torch.testing.assert_close(product, reference)


def test_same_seed_gives_the_same_weights():
    first, again, other = (make("normal", seed=seed) for seed in (1, 1, 2))
    for name, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(name))
        if name.endswith("weight"):
            assert not torch.equal(value, other.get_parameter(name))
            assert value.abs().max() <= math.sqrt(6.0 / sum(value.shape))
        elif name.endswith("bias"):
            assert not value.any()


def test_parameters_have_the_familiar_names():
    assert {name.split(".")[0] for name, _ in make("normal").named_parameters()} == {"layer1", "layer2", "mu", "sigma"}
    assert {name.split(".")[0] for name, _ in make("categorical").named_parameters()} == {"layer1", "layer2", "layer3"}


def test_stack_parameters_copies_each_task_and_gradients_flow_back():
    policy = make("normal")
    stacked = policy.stack_parameters(3)
    for name, value in policy.named_parameters():
        assert stacked[name].is_contiguous()
        assert stacked[name].data_ptr() != value.data_ptr()
        assert torch.equal(stacked[name], value.expand(3, *value.shape))
    sum(value.sum() for value in stacked.values()).backward()
    for value in policy.parameters():
        assert torch.equal(value.grad, torch.full_like(value, 3))
    with torch.no_grad():
        assert not any(value.requires_grad for value in policy.stack_parameters(3).values())
    again = policy.stack_parameters(3, stacked)
    assert all(torch.equal(again[name], stacked[name]) for name in stacked)


@pytest.mark.parametrize("first_order", [False, True])
def test_updated_parameters_are_one_gradient_step_away_and_differentiable(first_order):
    policy = make("normal")
    observations = randn(5, 3)
    actions = policy.act(observations, make_noise(policy, 5))[0].detach()
    loss = -policy.log_prob(observations, actions).square().mean()
    gradients = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
    params = policy.update_params(loss, step_size=0.1, first_order=first_order)
    for (name, own), gradient in zip(policy.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(params[name], own - 0.1 * gradient)
    again = policy.update_params(
        policy.log_prob(observations, actions, params).mean(), params, dict.fromkeys(params, 0.0)
    )
    assert all(torch.equal(again[name], params[name]) for name in params)
    (second,) = torch.autograd.grad(params["layer1.bias"].sum(), policy.layer1.weight, allow_unused=True)
    assert (second is None) == first_order


def test_parameters_of_another_policy_and_other_numbers_of_tasks_are_refused():
    policy = make("normal")
    with pytest.raises(ValueError, match="stacked for 3 tasks"):
        policy.act(randn(2, 5, 3), randn(2, 5, 2), params=policy.stack_parameters(3))
    with pytest.raises(ValueError, match="expected parameters"):
        policy.stack_parameters(2, dict(make("categorical").named_parameters()))
    with pytest.raises(ValueError, match=r"layer1\.weight.*for 3 tasks"):
        policy.stack_parameters(3, policy.stack_parameters(2) | {"sigma": torch.zeros(2)})


def test_gaussian_actions_are_the_mean_plus_scaled_noise():
    policy = make("normal")
    observations, noise = randn(5, 3), randn(5, 2, seed=1)
    mean = policy(observations).mean
    torch.testing.assert_close(policy.act(observations, torch.zeros(5, 2))[0], mean)
    torch.testing.assert_close(policy.act(observations, noise)[0], mean + 0.7 * noise)


def test_deviation_never_falls_below_its_minimum():
    policy = NormalMLPPolicy(3, 2, min_std=0.1)
    with torch.no_grad():
        policy.sigma.copy_(torch.tensor([-50.0, 0.0]))
    torch.testing.assert_close(policy(randn(4, 3)).stddev, torch.tensor([0.1, 1.0]).expand(4, 2))


def test_gaussian_actions_have_the_shape_of_the_space():
    policy = NormalMLPPolicy(3, 6, (4,), action_shape=(2, 3))
    params = policy.stack_parameters(5)
    actions = policy.act(randn(5, 7, 3), randn(5, 7, 6), params=params)[0]
    assert actions.shape == (5, 7, 2, 3)
    distribution = policy(randn(5, 7, 3), params)
    assert distribution.event_shape == (2, 3)
    torch.testing.assert_close(policy.log_prob(randn(5, 7, 3), actions, params), distribution.log_prob(actions))


@pytest.mark.parametrize(
    ("policy", "logits", "shape", "dtype", "chances", "likeliest"),
    [
        (CategoricalMLPPolicy(1, 3), CHANCES.log(), (), torch.int64, [[0.5, 0.3, 0.2]], 0),
        (
            MultiCategoricalMLPPolicy(1, [3, 2], action_shape=(2, 1)),
            torch.cat((CHANCES, torch.tensor([0.9, 0.1]))).log(),
            *((2, 1), torch.int64, [[0.5, 0.3, 0.2], [0.9, 0.1]], [[0], [0]]),
        ),
        (BernoulliMLPPolicy(1, 2), CHANCES[1:].logit(), (2,), torch.int8, [[0.7, 0.3], [0.8, 0.2]], [0, 0]),
    ],
    ids=["one choice", "several choices", "switches"],
)
def test_actions_follow_the_probabilities_of_each_entry(policy, logits, shape, dtype, chances, likeliest):
    with torch.no_grad():
        policy.layer1.bias.copy_(logits)
        policy.layer1.weight.zero_()
    actions = policy.act(torch.zeros(20_000, 1), make_noise(policy, 20_000))[0]
    assert (actions.shape, actions.dtype) == ((20_000, *shape), dtype)
    entries = actions.reshape(20_000, -1).long()
    for entry, expected in zip(entries.T, chances, strict=True):
        torch.testing.assert_close(torch.bincount(entry) / 20_000, torch.tensor(expected), rtol=0.0, atol=0.015)
    # Entries are independent.
    ends = (entries == torch.tensor([len(each) - 1 for each in chances])).all(1)
    assert ends.float().mean().item() == pytest.approx(math.prod(each[-1] for each in chances), abs=0.01)
    assert policy.choose(np.zeros(1))[0].tolist() == likeliest
    with torch.random.fork_rng():
        assert policy(torch.zeros(5, 1)).sample((4,)).shape == (4, 5, *shape)


@pytest.mark.parametrize("logit", [-200.0, 200.0])
@pytest.mark.parametrize("kind", ["multi-categorical", "bernoulli"])
def test_certain_choices_have_finite_probabilities_and_divergences(kind, logit):
    policy = make(kind)
    logits = torch.full((2, policy.output_size), logit).requires_grad_()
    with torch.no_grad():
        logits[:, 1::2] = -logit
    other = torch.zeros(2, policy.output_size, requires_grad=True)
    certain = mode(policy.distributions.distribution((logits,)))
    for value in (policy.distributions.log_prob((logits,), certain), policy.distributions.kl((logits,), (other,))):
        assert bool(value.isfinite().all())
        for gradient in torch.autograd.grad(value.sum(), (logits, other), allow_unused=True):
            assert gradient is None or bool(gradient.isfinite().all())


SPACES = {
    "normal": spaces.Box(-1.0, 1.0, (2,)),
    "categorical": spaces.Discrete(4),
    "multi-categorical": spaces.MultiDiscrete([4, 2, 3]),
    "bernoulli": spaces.MultiBinary([2, 2]),
}


@every_kind
def test_policy_accepts_only_the_action_space_that_it_was_made_for(kind):
    policy, observations = make(kind), spaces.Box(-1.0, 1.0, (3,))
    policy.check_spaces(observations, SPACES[kind])
    for other in (*SPACES.values(), spaces.MultiDiscrete([4, 3, 2]), spaces.Discrete(5)):
        if other != SPACES[kind]:
            refused = f"{type(policy.distributions).__name__}, .* does not fit the action space {re.escape(str(other))}"
            with pytest.raises(ValueError, match=refused):
                policy.check_spaces(observations, other)
    with pytest.raises(ValueError, match=r"for observations of shape \(3,\), the environment has Box.*\(2,\)"):
        policy.check_spaces(spaces.Box(-1.0, 1.0, (2,)), SPACES[kind])
    with pytest.raises(ValueError, match=r"does not fit the action space Box.*int64"):
        policy.check_spaces(observations, spaces.Box(0, 9, (2,), np.int64))


@pytest.mark.parametrize(("impossible", "noise"), [(0, 0.0), (1, 0.5), (3, 0.0), (3, 1.0 - 2.0**-24)])
def test_action_of_probability_zero_is_never_chosen(impossible, noise):
    policy = CategoricalMLPPolicy(3, 4)
    observations = randn(1000, 3)
    with torch.no_grad():
        policy.layer1.weight[impossible] = 0.0
        policy.layer1.bias[impossible] = -1e4
    actions = policy.act(observations, torch.full((1000, 1), noise))[0]
    assert not (actions == impossible).any()
    assert actions.min() >= 0
    assert actions.max() <= 3


def test_integer_observations_enter_as_one_hot_vectors():
    policy = CategoricalMLPPolicy(4, 2, (5,), observation_start=3)
    one_hot = CategoricalMLPPolicy(4, 2, (5,))
    observations = torch.tensor([[3, 6, 4], [5, 5, 3]])
    expected = one_hot(F.one_hot(observations - 3, 4).float()).probs
    torch.testing.assert_close(policy(observations).probs, expected)
    torch.testing.assert_close(policy(observations, policy.stack_parameters(2)).probs, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.int32])
def test_images_of_any_number_type_are_flattened_to_float32(dtype):
    policy = NormalMLPPolicy(12, 2, (5,), observation_shape=(2, 2, 3))
    images = (torch.arange(4 * 5 * 12).reshape(4, 5, 2, 2, 3) % 200).to(dtype)
    expected = policy.act(images.float(), torch.zeros(4, 5, 2))[0]
    assert policy.encode(images).dtype == torch.float32
    assert policy.encode(images).shape == (4, 5, 12)
    assert torch.equal(policy.act(images, torch.zeros(4, 5, 2))[0], expected)


def test_callable_nonlinearity_is_used():
    named, called = (NormalMLPPolicy(3, 2, (4,), nonlinearity) for nonlinearity in ("tanh", torch.tanh))
    assert torch.equal(named(randn(5, 3)).mean, called(randn(5, 3)).mean)
    other = NormalMLPPolicy(3, 2, (4,), F.softplus)
    assert not torch.equal(other(randn(5, 3)).mean, called(randn(5, 3)).mean)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": 0}, "positive"),
        ({"nonlinearity": "rleu"}, "relu"),
        ({"init_std": 0.0}, "init_std"),
        ({"min_std": -1.0}, "min_std"),
        ({"action_shape": (3,)}, "2 entries"),
        ({"observation_shape": (2, 2)}, "3 entries"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NormalMLPPolicy(**{"input_size": 3, "output_size": 2, **arguments})


def vector(size: int, bound: float = np.inf) -> spaces.Box:
    return spaces.Box(-bound, bound, (size,), np.float32)


def shifted(values: Tensor) -> Tensor:
    """Return a copy that begins where few vector instructions find their numbers aligned."""
    return torch.cat((values.new_zeros(2), values.reshape(-1)))[2:].view(values.shape)


@pytest.mark.parametrize(
    "policy",
    [
        *(NormalMLPPolicy(11, 3, hidden) for hidden in ((), (1,), (35, 1), (65, 33), (67,))),
        *(NormalMLPPolicy(inputs, outputs, (65, 33)) for inputs, outputs in ((2, 1), (19, 1), (23, 3))),
        *(NormalMLPPolicy(inputs, 2, (64, 64)) for inputs in (1, 2)),
        *(make(kind, "relu", hidden_sizes=(100, 100)) for kind in SPACES),
        *(ContextActor(vector(17), vector(outputs, 1.0), 5, (30, 50)) for outputs in (1, 3)),
        *(
            GRUPolicy(vector(2), vector(outputs, 1.0), size, cell=cell, layers=layers)
            for cell, size, outputs, layers in (("gru", 30, 3, (30,)), ("lstm", 50, 3, (50,)), ("gru", 64, 1, ()))
        ),
        GRUPolicy(vector(2), vector(3, 1.0), 30, layers=(30,), products=30, embedding_size=30),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_actor_agrees_with_act_in_any_batch_of_tasks_and_for_odd_sizes(policy: Policy) -> None:
    size = policy.observation_space.shape[0] if hasattr(policy, "observation_space") else policy.input_size
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    params = {name: value.detach() + 0.01 * draw(6, *value.shape) for name, value in policy.named_parameters()}
    for episodes in (1, 2, 3, 5, 7, 20):
        observations, noise = draw(6, episodes, size), draw(6, episodes, policy.noise_size)
        memory = tuple(tensor.unflatten(0, (6, episodes)) for tensor in policy.initial_memory(6 * episodes))
        with torch.inference_mode(), single_threaded():
            actions, after = policy.actor(params)(observations, noise, memory)
            assert torch.equal(actions, policy.act(observations, noise, memory, params)[0])
            logits = () if policy.has_memory else policy.distribution_parameters(observations, params)[:1]
            for tasks in (slice(0, 1), slice(3, 4), slice(1, 3), slice(1, 6)):
                for part in (lambda values, at=tasks: values[at], lambda values, at=tasks: shifted(values[at])):
                    own = {name: part(value) for name, value in params.items()}
                    seen, drawn, before = part(observations), part(noise), tuple(map(part, memory))
                    some, carried = policy.actor(own, tasks.start)(seen, drawn, before)
                    assert torch.equal(some, actions[tasks]), (episodes, tasks)
                    assert torch.equal(policy.act(seen, drawn, before, own)[0], actions[tasks])
                    assert all(torch.equal(new, old[tasks]) for new, old in zip(carried, after, strict=True))
                    for whole in logits:
                        assert torch.equal(policy.distribution_parameters(seen, own)[0], whole[tasks])
