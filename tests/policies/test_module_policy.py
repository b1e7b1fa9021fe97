"""Plain modules as policies: against the package's own MLPs, in other batches, and from sampling to the update."""

import copy
import pickle
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Laplace, Normal

from maml_rl import MAMLTRPO, LinearFeatureBaseline, MultiTaskSampler, adapt
from maml_rl.envs.global_generators import KeptGenerators
from maml_rl.policies import CategoricalMLPPolicy, MultiCategorical, NormalMLPPolicy, as_policy
from maml_rl.samplers.rollout.actor import try_memory
from tests.synthetic import different_params, make_episodes, randn

OBSERVATIONS = spaces.Box(-1.0, 1.0, (3,))
ACTIONS = spaces.Box(-1.0, 1.0, (2,))
TWO_OF_THREE = spaces.MultiDiscrete([3, 3])


class Gaussian(nn.Module):
    """A user's policy; with sigmoid, because its rounding under vmap depends on the other tasks."""

    def __init__(self, inputs: int = 3, outputs: int = 2, hidden: int = 7, activation: type[nn.Module] = nn.Sigmoid):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, outputs))
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, observations: Tensor) -> Normal:
        return Normal(self.body(observations), torch.exp(self.log_std))


class Branching(Gaussian):
    """Control flow that depends on the data, which vmap does not allow."""

    def forward(self, observations: Tensor) -> Normal:
        scale = 2.0 if bool(self.log_std.sum() > 100.0) else 1.0
        return Normal(scale * self.body(observations), torch.exp(self.log_std))


class Statistics(Gaussian):
    """Normalizes by a running mean, which is changed in place or replaced."""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced
        self.register_buffer("middle", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("of_weights", self.log_std.mean())

    def forward(self, observations: Tensor) -> Normal:
        if not len(self.cache):
            self.cache = torch.ones(3)
        if self.training and self.replaced:
            self.middle = 0.9 * self.middle + 0.1 * observations.mean(0)
        elif self.training:
            self.middle += 0.1 * (observations.mean(0) - self.middle)
        return super().forward((observations - self.middle) * self.cache)


@pytest.mark.parametrize("replaced", [False, True])
def test_module_whose_every_call_writes_into_a_buffer_is_refused_and_others_are_not(replaced: bool) -> None:
    policy = as_policy(seeded(lambda: Statistics(replaced)))
    refusal = pytest.raises(ValueError, match="forward of Statistics changes its buffer 'middle', so that actions")
    # What it assigns is as before in the next call.
    with nullcontext() if replaced else refusal:
        policy.check_spaces(OBSERVATIONS, ACTIONS)
    policy.eval().check_spaces(OBSERVATIONS, ACTIONS)


class Counts(Gaussian):
    """Acts otherwise in every call."""

    calls = 0

    def forward(self, observations: Tensor) -> Normal:
        self.calls += 1
        return Normal(self.body(observations) + self.calls, torch.exp(self.log_std))


class Widens(Counts):
    """Returns more actions from its second call on."""

    def forward(self, observations: Tensor) -> Normal:
        mean = super().forward(observations).mean
        return Normal(mean if self.calls == 1 else mean.repeat(1, 2), 1.0)


class Switches(Counts):
    """Returns another kind of distribution from its second call on."""

    def forward(self, observations: Tensor) -> Distribution:
        mean = super().forward(observations).mean - self.calls
        return (Normal if self.calls == 1 else Laplace)(mean, 1.0)


class Rounds(Counts):
    """Rounds otherwise in every call."""

    def forward(self, observations: Tensor) -> Normal:
        return Normal(super().forward(observations).mean * 1e-6, torch.exp(self.log_std))


class Grows(Gaussian):
    """Makes a parameter in its first call."""

    def forward(self, observations: Tensor) -> Normal:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros(2))
        return Normal(self.body(observations) + self.late, torch.exp(self.log_std))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Counts, "forward of Counts returns another distribution when it is called again with the same obs"),
        (Widens, "forward of Widens returns another distribution when it is called again"),
        (Switches, "forward of Switches returns another distribution when it is called again"),
        (Grows, "forward of Grows registers the parameter 'late', which nothing would train; register it in __init__"),
    ],
)
def test_module_that_its_calls_change_is_refused(module: type[Gaussian], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_policy(seeded(module)).check_spaces(OBSERVATIONS, ACTIONS)


def test_module_that_rounds_otherwise_in_every_call_is_accepted() -> None:
    as_policy(seeded(Rounds)).check_spaces(OBSERVATIONS, ACTIONS)


class Discrete(nn.Module):
    """Logits from an embedding and a convolution-free network."""

    def __init__(self, kind: type[Distribution], outputs: int, inputs: int = 3) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(inputs, outputs)

    def forward(self, observations: Tensor) -> Distribution:
        return self.kind(logits=self.linear(observations))


class Returning(nn.Module):
    def __init__(self, make: object) -> None:
        super().__init__()
        self.make, self.weight = make, nn.Parameter(torch.zeros(2))

    def forward(self, observations: Tensor) -> object:
        return self.make(observations, self.weight)  # type: ignore[operator]


def seeded(make: object, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()  # type: ignore[operator]


def twin(mlp: NormalMLPPolicy | CategoricalMLPPolicy) -> nn.Module:
    """Return a plain module with the parameters of an MLP policy, and the names that it gives them."""

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, child in mlp.named_children():
                self.add_module(name, copy.deepcopy(child))
            if isinstance(mlp, NormalMLPPolicy):
                self.sigma = nn.Parameter(mlp.sigma.detach().clone())

        def forward(self, observations: Tensor) -> Distribution:
            *hidden, last = self.children()
            for layer in hidden:
                observations = torch.tanh(layer(observations))
            units = last(observations)
            if isinstance(mlp, NormalMLPPolicy):
                return Independent(Normal(units, torch.exp(self.sigma)), 1)
            return Categorical(logits=units)

    return Twin()


def make_mlp(kind: str) -> NormalMLPPolicy | CategoricalMLPPolicy:
    if kind == "normal":
        return NormalMLPPolicy(3, 2, (6,), "tanh", init_std=0.8).double()
    return CategoricalMLPPolicy(3, 4, (6,), "tanh").double()


@pytest.mark.parametrize("kind", ["normal", "categorical"])
@pytest.mark.parametrize("stacked", [False, True])
def test_module_agrees_with_the_mlp_of_the_same_parameters(kind, stacked):
    mlp = make_mlp(kind)
    policy = as_policy(twin(mlp), (3,))
    params = different_params(mlp, 4, 0.3) if stacked else None
    episodes = make_episodes(mlp, ((5, 2), (3, 3), (1, 4), (5, 5)))
    args = episodes.observations, episodes.actions, params
    torch.testing.assert_close(policy.log_prob(*args), mlp.log_prob(*args))
    old, new = (
        [each.distribution_parameters(episodes.observations, with_params) for with_params in (None, params)]
        for each in (policy, mlp)
    )
    torch.testing.assert_close(policy.distributions.kl(*old), mlp.distributions.kl(*new), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(policy.distributions.entropy(old[1]), mlp.distributions.entropy(new[1]))
    noise = torch.rand((4, 5, 2, mlp.noise_size), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.act(args[0], noise, params=params)[0], mlp.act(args[0], noise, params=params)[0])


@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_update_of_a_module_equals_that_of_the_mlp(kind):
    mlp = make_mlp(kind)
    module = twin(mlp)
    lengths = ((6, 4, 5), (6, 6, 6), (2, 3, 1))
    train, valid = make_episodes(mlp, lengths), make_episodes(mlp, lengths, seed=4)
    adapted, expected = adapt(module, train, step_size=0.1), adapt(mlp, train, step_size=0.1)
    for name, value in expected.items():
        torch.testing.assert_close(adapted[name], value)
    results = [MAMLTRPO(policy, fast_lr=0.1).step([train], valid, max_kl=0.01) for policy in (module, mlp)]
    assert results[0]["accepted"]
    assert results[0]["kl"] == pytest.approx(results[1]["kl"], rel=1e-6)
    for name, value in mlp.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), value, rtol=1e-6, atol=1e-9)


def test_module_that_vmap_cannot_trace_is_computed_task_by_task():
    plain, branching = (as_policy(seeded(make), (3,)) for make in (Gaussian, Branching))
    observations, params = randn(3, 4, 2, 3), different_params(plain, 3, 0.3)
    for values in zip(
        *(each.distribution_parameters(observations, params) for each in (plain, branching)), strict=True
    ):
        torch.testing.assert_close(*values)


@pytest.mark.parametrize(
    ("make", "num_episodes"),
    [
        (Gaussian, 1),
        (Gaussian, 3),
        (Gaussian, 20),
        (lambda: Gaussian(hidden=64), 3),
        (lambda: Discrete(Categorical, 4), 3),
        (Branching, 3),
        (lambda: Gaussian(hidden=17_000), 1),
    ],
)
def test_actions_of_a_task_are_bit_identical_in_any_batch_of_tasks(make, num_episodes):
    policy = as_policy(seeded(make), (3,))
    policy(randn(1, 3))
    num_tasks = 4 if policy.get_parameter(next(iter(policy.state_dict()))).numel() > 10_000 else 35
    params, observations = different_params(policy, num_tasks, 0.3), randn(num_tasks, num_episodes, 3)
    noise = torch.rand((num_tasks, num_episodes, policy.noise_size), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        together = policy.act(observations, noise, params=params)[0]
        for task in (0, num_tasks - 1):
            alone = policy.act(
                observations[task], noise[task], params={name: value[task] for name, value in params.items()}
            )[0]
            torch.testing.assert_close(together[task], alone)
        for first, last in ((0, num_tasks), (0, 1), (3, 4), (1, 3), (num_tasks // 2, num_tasks)):
            # Views start at other memory addresses, like the arrays of a child.
            views = {name: value[first:last] for name, value in params.items()}
            actions = policy.actor(views, first)(observations[first:last], noise[first:last], ())[0]
            assert torch.equal(actions, together[first:last])


def test_policy_shares_parameters_names_and_mode_with_the_module():
    module = seeded(Gaussian)
    policy = as_policy(module)
    assert [name for name, _ in policy.named_parameters()] == [name for name, _ in module.named_parameters()]
    policy.load_state_dict({name: torch.full_like(value, 0.5) for name, value in policy.state_dict().items()})
    assert all(bool((value == 0.5).all()) for value in module.parameters())
    policy.double().eval()
    assert module.log_std.dtype == torch.float64
    assert not module.training
    assert not as_policy(module).training
    assert as_policy(policy) is policy
    copied = pickle.loads(pickle.dumps(copy.deepcopy(policy)))
    with torch.no_grad():
        copied.get_parameter("log_std").fill_(3.0)
    torch.testing.assert_close(copied(randn(2, 3)).stddev, torch.full((2, 2), 3.0).exp().double())
    assert bool((module.log_std == 0.5).all())


def test_module_chooses_actions_for_single_observations():
    policy = as_policy(seeded(Gaussian))
    observation = np.array([0.1, -0.2, 0.3], np.float32)
    mode, _ = policy.choose(observation)
    np.testing.assert_allclose(mode, policy(torch.from_numpy(observation)[None]).mean[0].detach().numpy())
    first, again = (policy.choose(observation, rng=np.random.default_rng(0))[0] for _ in range(2))
    assert (first == again).all()
    assert (first != mode).all()
    assert as_policy(seeded(lambda: Discrete(Categorical, 4))).choose(observation)[0] in range(4)


@pytest.mark.parametrize(
    ("make", "action_space"),
    [
        (lambda: Discrete(Categorical, 4), spaces.Discrete(4)),
        (lambda: Discrete(Bernoulli, 4), spaces.MultiBinary(4)),
        (lambda: Discrete(lambda logits: MultiCategorical(logits, [3, 2]), 5), spaces.MultiDiscrete([3, 2])),
        (lambda: Discrete(lambda logits: Categorical(logits=logits.unflatten(-1, (2, 3))), 6), TWO_OF_THREE),
        (Gaussian, ACTIONS),
    ],
    ids=["discrete", "multi-binary", "multi-discrete", "equal multi-discrete", "box"],
)
def test_fitting_spaces_are_accepted(make, action_space):
    policy = as_policy(seeded(make))
    policy.check_spaces(OBSERVATIONS, action_space)
    assert policy.observation_shape == (3,)
    noise = torch.full((5, policy.noise_size), 0.3)
    assert policy.act(torch.zeros(5, 3), noise)[0].shape == (5, *action_space.shape)


@pytest.mark.parametrize(
    ("make", "action_space", "error", "message"),
    [
        (lambda: Discrete(Categorical, 4), spaces.Discrete(3), ValueError, r"4 categories.*Discrete\(3\)"),
        (
            lambda: Discrete(lambda logits: MultiCategorical(logits, [2, 3]), 5),
            spaces.MultiDiscrete([3, 2]),
            ValueError,
            r"\[2, 3\] categories.*MultiDiscrete\(\[3 2\]\)",
        ),
        (lambda: Discrete(Categorical, 4), ACTIONS, ValueError, "Categorical of Discrete has integer actions"),
        (lambda: Gaussian(outputs=3), ACTIONS, ValueError, r"shape \(3,\).*do not fit"),
        (lambda: Gaussian(), spaces.Discrete(2), ValueError, "has real actions"),
        (
            lambda: Returning(lambda x, w: x + w.sum()),
            ACTIONS,
            TypeError,
            r"must return .*got a Tensor; for a Gaussian",
        ),
        (lambda: Returning(lambda x, w: Normal(w, 1.0)), ACTIONS, ValueError, r"batch shape begins with .* 7; got"),
        (
            lambda: Returning(lambda x, w: torch.distributions.Beta(w.exp().expand(len(x), 2), 1.0)),
            ACTIONS,
            TypeError,
            "no rule makes actions of a Beta",
        ),
    ],
    ids=["categories", "numbers of categories", "integers", "shape", "reals", "tensor", "batch", "beta"],
)
def test_module_that_does_not_fit_is_refused_in_one_line(make, action_space, error, message):
    with pytest.raises(error, match=message) as caught:
        as_policy(seeded(make)).check_spaces(OBSERVATIONS, action_space)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "draw"), [("torch", lambda: torch.randn(2)), ("np.random", np.random.random), ("random", random.random)]
)
def test_module_that_draws_from_a_generator_of_the_process_is_refused(name, draw):
    noisy = Returning(lambda x, w: Independent(Normal(w.expand(len(x), 2) + draw(), 1.0), 1))
    with (
        KeptGenerators(),
        pytest.raises(RuntimeError, match=rf"forward of Returning draws from {name}, which no seed repeats; leave"),
    ):
        as_policy(noisy).check_spaces(OBSERVATIONS, ACTIONS)


def test_memory_that_grows_is_refused_with_the_name_of_the_module():
    class Growing(Gaussian):
        def initial_memory(self, num):
            return (torch.zeros(num, 1),)

        def forward(self, observations, memory):
            return super().forward(observations), (memory[0].repeat(1, 2),)

    policy = as_policy(seeded(Growing))
    policy.check_spaces(OBSERVATIONS, ACTIONS)
    with pytest.raises(ValueError, match=r"^Growing returned the shape \(1, 3, 2\) float32, got the shape \(1, 3, 1\)"):
        try_memory(policy, OBSERVATIONS)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: "policy", TypeError, "got 'policy'"),
        (lambda: nn.ReLU(), ValueError, "ReLU has no parameters"),
        (lambda: nn.LazyLinear(3), ValueError, "no shape yet"),
        (lambda: Gaussian().requires_grad_(False), ValueError, "frozen"),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double()), ValueError, "several types"),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), ValueError, r"'1'.*Dropout.*eval\(\)"),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), ValueError, "BatchNorm1d"),
    ],
    ids=["no module", "no parameters", "lazy", "frozen", "types", "dropout", "batch norm"],
)
def test_module_that_cannot_be_adapted_is_refused_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        as_policy(seeded(make))
    with pytest.raises(error, match=message):
        MultiTaskSampler("2DNavigation-v0", policy=seeded(make), num_workers=0)


def test_stacked_observations_of_another_number_of_tasks_are_refused():
    policy = as_policy(seeded(Gaussian), (3,))
    with pytest.raises(ValueError, match="stacked for 3 tasks"):
        policy.distribution_parameters(randn(2, 5, 3), policy.stack_parameters(3))


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_module_samples_adapts_and_updates_bit_identically_wherever_it_acts():
    outcomes = []
    for num_workers, inference in ((0, "central"), (2, "worker")):
        module = seeded(lambda: Gaussian(2, 2, 16))
        settings = {"max_episode_steps": 6, "seed": 0, "baseline": LinearFeatureBaseline(2), "inference": inference}
        with MultiTaskSampler("2DNavigation-v0", {}, 4, module, num_workers=num_workers, **settings) as sampler:
            train, valid = sampler.sample(sampler.sample_tasks(3), num_steps=1, fast_lr=0.5)
        result = MAMLTRPO(module, fast_lr=0.5).step(train, valid, max_kl=0.01)
        state = torch.cat([value.flatten() for value in module.state_dict().values()])
        outcomes.append((train[0].digest(), valid.digest(), result["loss/before"], state.tolist()))
    assert outcomes[0] == outcomes[1]
    assert result["accepted"]
