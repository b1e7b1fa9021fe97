"""Recurrent policies: the same step by step and through whole sequences, and in every placement."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl import MultiTaskSampler
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.policies import GRUPolicy

SEEN = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {"box": spaces.Box(-1.0, 1.0, (2,)), "discrete": spaces.Discrete(4)}
# Arguments with which a policy has all its optional parts.
NORMALIZED: dict[str, Any] = {"layers": (5, 6), "normalize_observations": True}
STATISTICS = ("observation_mean", "observation_std")
KINDS = [(cell, actions) for cell in ("gru", "lstm") for actions in ACTIONS]


def make_policy(cell: Any, actions: str, **options: Any) -> GRUPolicy:
    policy = GRUPolicy(SEEN, ACTIONS[actions], 16, cell=cell, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Biases and heads that are nearly zero would hide errors.
        for param in policy.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator))
    return policy


def step_by_step(policy: GRUPolicy, observations: Tensor, noise: Tensor, params: Any = None) -> tuple[Tensor, Any]:
    """Return the actions (L, M, S, ...) of sequences (L, M, S, ...), and the last memory."""
    grid = noise.shape[1:3]
    memory = tuple(tensor.unflatten(0, grid) for tensor in policy.initial_memory(grid[0] * grid[1]))
    actions = []
    for seen, drawn in zip(observations, noise, strict=True):
        acted, memory = policy.act(seen, drawn, memory, params)
        actions.append(acted)
    return torch.stack(actions), memory


@pytest.mark.parametrize(
    ("cell", "actions", "options"),
    [*((*kind, {}) for kind in KINDS), *((cell, "box", NORMALIZED) for cell in ("gru", "lstm"))],
)
def test_cells_in_the_loop_agree_with_fused_kernels_in_the_update(cell: str, actions: str, options: Any) -> None:
    policy = make_policy(cell, actions, **options)
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn((30, 5, 7, 3), generator=generator)
    with torch.no_grad():
        unrolled = policy.unroll(observations.flatten(1, 2))
        if actions == "box":
            noise = torch.randn((30, 5, 7, 2), generator=generator)
            acted, memory = step_by_step(policy, observations, noise)
            mean, log_std = unrolled.distribution
            expected = mean + noise.flatten(1, 2) * log_std.exp()
            torch.testing.assert_close(acted.flatten(1, 2), expected, rtol=0.0, atol=1e-5)
        else:
            noise = torch.rand((30, 5, 7, 1), generator=generator)
            acted, memory = step_by_step(policy, observations, noise)
            cumulative = torch.softmax(unrolled.distribution[0], -1).cumsum(-1)
            expected = (cumulative[..., :-1] <= noise.flatten(1, 2)).sum(-1)
            # At the boundary between categories the two may differ.
            sure = (cumulative - noise.flatten(1, 2)).abs().amin(-1) > 1e-5
            assert sure.float().mean() > 0.99
            assert torch.equal(acted.flatten(1, 2)[sure], expected[sure])
        for mine, fused in zip(memory, unrolled.memory, strict=True):
            torch.testing.assert_close(mine.flatten(0, 1), fused, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(("cell", "actions"), KINDS)
def test_sequence_can_be_continued_from_its_middle(cell: str, actions: str) -> None:
    policy = make_policy(cell, actions)
    observations = torch.randn((9, 4, 3), generator=torch.Generator().manual_seed(0))
    whole, begun = policy.unroll(observations), policy.unroll(observations[:5])
    rest = policy.unroll(observations[5:], begun.memory)
    torch.testing.assert_close(rest.distribution[0], whole.distribution[0][5:], rtol=0.0, atol=1e-6)
    assert whole.values is not None
    assert rest.values is not None
    torch.testing.assert_close(rest.values, whole.values[5:], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("cell", "actions"), KINDS)
def test_actions_do_not_depend_on_other_rows(cell: str, actions: str) -> None:
    policy = make_policy(cell, actions)
    generator = torch.Generator().manual_seed(0)
    observations, noise = torch.randn((150, 2, 3), generator=generator), torch.rand((150, 2, 2), generator=generator)
    noise = noise[..., : policy.noise_size]
    memory = tuple(
        torch.randn(tensor.shape, generator=generator).unflatten(0, (150, 2)) for tensor in policy.initial_memory(300)
    )
    params = dict(policy.named_parameters())
    actions_of_all, after_all = policy.actor(params)(observations, noise, memory)
    for start, stop in ((0, 1), (31, 32), (33, 100), (149, 150), (1, 150)):
        part = slice(start, stop)
        acted, after = policy.actor(params, start)(
            observations[part], noise[part], tuple(tensor[part] for tensor in memory)
        )
        assert torch.equal(acted, actions_of_all[part])
        assert all(torch.equal(mine, whole[part]) for mine, whole in zip(after, after_all, strict=True))


@pytest.mark.parametrize(("cell", "actions", "options"), [*((*kind, {}) for kind in KINDS), ("gru", "box", NORMALIZED)])
def test_stacked_parameters_are_those_of_each_task(cell: str, actions: str, options: Any) -> None:
    policies = [make_policy(cell, actions, seed=seed, **options) for seed in range(3)]
    stacked = {
        name: torch.stack([dict(policy.named_parameters())[name].detach() for policy in policies])
        for name, _ in policies[0].named_parameters()
    }
    generator = torch.Generator().manual_seed(0)
    observations, noise = torch.randn((6, 3, 2, 3), generator=generator), torch.rand((6, 3, 2, 2), generator=generator)
    noise = noise[..., : policies[0].noise_size]
    with torch.no_grad():
        acted, _ = step_by_step(policies[0], observations, noise, stacked)
        for task, policy in enumerate(policies):
            own, _ = step_by_step(policy, observations[:, task : task + 1], noise[:, task : task + 1])
            torch.testing.assert_close(acted[:, task : task + 1], own, rtol=0.0, atol=1e-5)
        unrolled = policies[0].unroll(observations.transpose(0, 1), params=stacked)
        for task, policy in enumerate(policies):
            own = policy.unroll(observations[:, task])
            torch.testing.assert_close(unrolled.distribution[0][task], own.distribution[0], rtol=0.0, atol=1e-5)


def test_values_come_from_a_head_or_a_network_or_are_omitted() -> None:
    observations = torch.randn((4, 2, 3), generator=torch.Generator().manual_seed(0))
    for value, learned in (("head", ("core.", "value_head.")), ("network", ("value_core.", "value_head."))):
        policy = make_policy("gru", "box", value=value)
        values = policy.unroll(observations).values
        assert values is not None
        assert values.shape == (4, 2)
        params = dict(policy.named_parameters())
        gradients = torch.autograd.grad(values.sum(), list(params.values()), allow_unused=True)
        used = {name for name, gradient in zip(params, gradients, strict=True) if gradient is not None}
        assert used == {name for name in params if name.startswith(learned)}
    assert make_policy("gru", "box", value="none").unroll(observations).values is None


def test_layers_act_on_observation_and_memory_and_are_separate_for_values() -> None:
    policy = make_policy("gru", "box", layers=(5,))
    observations = torch.randn((4, 2, 3), generator=torch.Generator().manual_seed(0))
    unrolled = policy.unroll(observations)
    units, _ = policy.core(observations)
    known = torch.cat((observations, units), -1)
    mean = policy.head(torch.tanh(policy.acting_0(known)))
    torch.testing.assert_close(unrolled.distribution[0], mean, rtol=0.0, atol=1e-5)
    values = policy.value_head(torch.tanh(policy.estimating_0(known)))
    assert unrolled.values is not None
    torch.testing.assert_close(unrolled.values, values.squeeze(-1), rtol=0.0, atol=1e-5)


def test_only_unbounded_numbers_are_normalized() -> None:
    low, high = np.array([-np.inf, -1.0, -np.inf], np.float32), np.array([np.inf, 1.0, 0.0], np.float32)
    plain, normalizing = (
        GRUPolicy(spaces.Box(low, high), ACTIONS["box"], 4, normalize_observations=which) for which in (False, True)
    )
    observations = torch.randn((4, 2, 3), generator=torch.Generator().manual_seed(0))
    expected = plain.unroll(observations).distribution[0]
    assert torch.equal(normalizing.unroll(observations).distribution[0], expected)
    normalizing.normalize_by(torch.tensor([1.0, 5.0, -2.0]), torch.tensor([4.0, 9.0, 0.25]))
    raw = observations * torch.tensor([2.0, 1.0, 0.5]) + torch.tensor([1.0, 0.0, -2.0])
    torch.testing.assert_close(normalizing.unroll(raw).distribution[0], expected)
    # They are not weights: they are in the state, and no gradient changes them.
    assert [name for name, param in normalizing.named_parameters() if not param.requires_grad] == list(STATISTICS)
    assert set(STATISTICS) <= set(normalizing.state_dict())
    assert not set(STATISTICS) & set(plain.state_dict())
    with pytest.raises(ValueError, match=r"only vectors are normalized, and the observations are Discrete\(3\)"):
        GRUPolicy(spaces.Discrete(3), ACTIONS["box"], 4, normalize_observations=True)


def test_initial_weights_depend_only_on_the_seed() -> None:
    state = torch.get_rng_state()
    first, again, other = (GRUPolicy(SEEN, ACTIONS["box"], 8, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["core.weight_hh_l0"], other["core.weight_hh_l0"])


def test_a_discrete_observation_is_a_one_hot_vector() -> None:
    policy = GRUPolicy(spaces.Discrete(3, start=5), ACTIONS["discrete"], 4)
    numbers = torch.tensor([[5, 6], [7, 5]])
    same = GRUPolicy(spaces.Box(0.0, 1.0, (3,)), ACTIONS["discrete"], 4)
    vectors = torch.nn.functional.one_hot(numbers - 5, 3)
    torch.testing.assert_close(policy.unroll(numbers).distribution, same.unroll(vectors).distribution)
    noise, memory = torch.full((2, 2, 1), 0.4), (torch.zeros(2, 2, 4),)
    acted, expected = (each.act(seen, noise, memory) for each, seen in ((policy, numbers), (same, vectors)))
    torch.testing.assert_close(acted, expected)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("env", "cell"), [("TabularMDP-v0", "gru"), ("2DNavigation-v0", "lstm")])
def test_trials_of_a_recurrent_policy_are_bit_identical_for_any_placement(env: str, cell: Any) -> None:
    slots = make_vector_env(ObservedLastStep(env), {}, 1)
    # One of the two has all optional parts of a recurrent policy.
    options = NORMALIZED if cell == "lstm" else {}
    policy = GRUPolicy(slots.single_observation_space, slots.single_action_space, 16, cell=cell, **options)
    if options:
        size = policy.input_size
        policy.normalize_by(torch.linspace(-0.3, 0.3, size), torch.linspace(0.1, 4.0, size))
    with torch.no_grad():
        policy.head.weight.mul_(100.0)
    scale = torch.linspace(0.5, 1.5, 70)
    stacked = {
        name: param.detach() * scale.reshape(-1, *(1,) * param.dim()) for name, param in policy.named_parameters()
    }
    for params in (None, stacked):
        digests = set()
        for options in (
            {"num_workers": 0},
            {"num_workers": 1},
            {"num_workers": 2},
            {"num_workers": 3, "inference": "central"},
            {"num_workers": 3, "inference": "central", "num_groups": 3},
        ):
            settings: dict[str, Any] = {"max_episode_steps": 5, "slots_per_task": 1, "seed": 0, "observe_last": True}
            if options["num_workers"]:
                settings["start_method"] = "fork"
            with MultiTaskSampler(env, {}, 3, policy, **settings, **options) as sampler:
                digests.add(sampler.rollout(sampler.sample_tasks(70), params).digest())
        assert len(digests) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cell": "rnn"}, ValueError, "cell must be one of gru, lstm, got 'rnn'"),
        ({"value": "two"}, ValueError, "value must be one of head, network, two-hot, none"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be positive"),
        ({"action_space": spaces.Text(2)}, TypeError, "no policy for the action space"),
        ({"observation_space": spaces.MultiBinary(2)}, TypeError, "no policy for the observation space"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: Any, message: str) -> None:
    arguments = {"observation_space": SEEN, "action_space": ACTIONS["box"], **options}
    with pytest.raises(error, match=message):
        GRUPolicy(**arguments)


def test_a_policy_for_other_spaces_is_refused() -> None:
    policy = GRUPolicy(SEEN, ACTIONS["box"], 4)
    with (
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=0, slots_per_task=1) as sampler,
        pytest.raises(ValueError, match=r"3 observed numbers .* observe_last=True"),
    ):
        sampler.rollout_trials(sampler.sample_tasks(1))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_initial_units_keep_their_memory_for_their_span(cell: Any) -> None:
    held = {}
    for span in (None, 50):
        policy = GRUPolicy(SEEN, ACTIONS["discrete"], 64, cell=cell, memory_span=span)
        for name, weights in policy.core.named_parameters():
            if name.startswith("weight"):
                torch.nn.init.zeros_(weights)
        ones = tuple(torch.ones(1, 64) for _ in policy.initial_memory(1))
        with torch.no_grad():
            unrolled = policy.unroll(torch.zeros(1, 1, 3), ones)
        held[span] = unrolled.memory[-1][0]
    torch.testing.assert_close(held[None], torch.full((64,), 0.5))
    steps = 1.0 / (1.0 - held[50])
    assert 2.0 <= float(steps.min()) < 5.0
    assert 45.0 < float(steps.max()) <= 51.001


def test_initial_values_are_near_zero_with_a_span() -> None:
    policies = [GRUPolicy(SEEN, ACTIONS["box"], 8, memory_span=span) for span in (None, 9)]
    sizes = [float(policy.state_dict()["value_head.weight"].norm()) for policy in policies]
    assert sizes == pytest.approx([1.0, 0.01])
    with pytest.raises(ValueError, match="memory_span must be positive, got 0"):
        GRUPolicy(SEEN, ACTIONS["box"], 8, memory_span=0)


@pytest.mark.parametrize(("cell", "actions"), KINDS)
def test_predicted_rewards_depend_on_memory_and_action(cell: str, actions: str) -> None:
    policy = make_policy(cell, actions, predict_rewards=True)
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn((6, 4, 3), generator=generator)
    if actions == "box":
        done = torch.randn((6, 4, 2), generator=generator)
    else:
        done = torch.randint(4, (6, 4), generator=generator)
    with torch.no_grad():
        predicted = policy.predict_rewards(policy.unroll(observations), done)
        assert predicted.shape == (6, 4)
        # One row after the other, in plain products.
        units = policy.core(observations)[0]
        assert policy.reward_head is not None
        for step in range(6):
            for row in range(4):
                action, seen = done[step, row], units[step, row]
                if actions == "box":
                    expected = policy.reward_head(torch.cat((seen, action)))[0]
                else:
                    expected = policy.reward_head(seen)[action]
                torch.testing.assert_close(predicted[step, row], expected)


def test_a_head_for_rewards_changes_no_action_and_no_other_weight() -> None:
    with_head, without = (GRUPolicy(SEEN, ACTIONS["box"], 16, predict_rewards=which) for which in (True, False))
    for name, param in without.named_parameters():
        assert torch.equal(param, dict(with_head.named_parameters())[name]), name
    generator = torch.Generator().manual_seed(0)
    observations, noise = (torch.randn((2, 5, size), generator=generator) for size in (3, 2))
    memory = (torch.zeros(2, 5, 16),)
    assert torch.equal(with_head.act(observations, noise, memory)[0], without.act(observations, noise, memory)[0])
    with pytest.raises(TypeError, match="GRUPolicy predicts no rewards"):
        without.predict_rewards(without.unroll(observations), noise)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_initial_weights_are_the_same_for_any_number_of_threads(cell: Any) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            policy = GRUPolicy(SEEN, ACTIONS["discrete"], 128, cell=cell, value="network", predict_rewards=True)
            found.append(policy.state_dict())
    finally:
        torch.set_num_threads(before)
    for name, weights in found[0].items():
        assert all(torch.equal(other[name], weights) for other in found[1:]), name
