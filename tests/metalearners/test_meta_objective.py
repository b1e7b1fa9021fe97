"""The meta-objective: its gradient and curvature against finite differences and the straightforward version."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, InnerLoss, adapt_steps
from maml_rl.derivatives import LocalStore
from maml_rl.derivatives.store import KEPT_BYTES
from maml_rl.episode import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.losses import likelihood_ratio, likelihood_ratio_and_divisor, surrogate
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.policies import MLPPolicy, Policy
from tests.metalearners.reference_update import ReferenceUpdate
from tests.synthetic import direction, make_problem

STEP_SIZES = (0.3, 0.2, 0.25)
RAGGED = ((5, 2), (1, 3), (4, 4))
FULL = ((5, 5), (5, 5), (5, 5))
WAYS = pytest.mark.parametrize("automatic", [False, True], ids=["by_hand", "automatic"])


def meta_objective(
    policy: Policy,
    train: list[TaskEpisodes],
    valid: TaskEpisodes,
    tasks_per_chunk: int | None = None,
    room: int = KEPT_BYTES,
    *,
    automatic: bool = False,
    **options: Any,
) -> MetaObjective:
    cpu = torch.device("cpu")
    if automatic:
        # A subclass may compute anything: it has no derivatives by hand.
        act = {"act": lambda self, *arguments: MLPPolicy.act(self, *arguments)}
        policy = copy.copy(policy)
        policy.__class__ = type("Overridden", (type(policy),), act)
        assert isinstance(policy, MLPPolicy)
        assert policy.is_overridden
    hosts = LocalStore([*train, valid], policy, cpu, tasks_per_chunk=tasks_per_chunk, room=room)
    settings: dict[str, Any] = {"rule": AdaptationRule(STEP_SIZES[: len(train)]), "device": cpu}
    return MetaObjective(policy, hosts, **{"objective": surrogate, **settings, **options})


def linearized(
    policy: Policy, train: list[TaskEpisodes], valid: TaskEpisodes, **options: Any
) -> tuple[float, Tensor, Tensor]:
    """Return loss, gradient, and a curvature product."""
    meta = meta_objective(policy, train, valid, **options)
    loss, gradient = meta.gradient(meta.initial_parameters())
    return loss, gradient, meta.curvature_product(direction(policy))


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize(("kind", "automatic"), [("normal", False), ("categorical", False), ("normal", True)])
def test_everything_agrees_with_the_double_backward_version(kind: str, num_steps: int, automatic: bool) -> None:
    policy, train, valid = make_problem(kind, num_steps, RAGGED)
    expected_loss, expected_gradient, product = ReferenceUpdate(
        policy, train, valid, STEP_SIZES[:num_steps]
    ).gradient_and_product()
    loss, gradient, curvature = linearized(policy, train, valid, automatic=automatic)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(curvature, product(direction(policy)), rtol=1e-10, atol=1e-12)


@WAYS
@pytest.mark.parametrize("fraction", [1.0, 0.5], ids=["all_episodes", "half"])
def test_results_do_not_depend_on_the_size_of_chunks_or_on_what_is_cached(automatic: bool, fraction: float) -> None:
    policy, train, valid = make_problem("normal", 2, ((5, 2), (1, 3), (4, 4), (2, 2), (3, 5)))
    same: dict[str, Any] = {"automatic": automatic, "curvature_fraction": fraction}
    loss, gradient, curvature = linearized(policy, train, valid, **same, tasks_per_chunk=5)
    for options in ({"tasks_per_chunk": 1}, {"tasks_per_chunk": 2}, {"tasks_per_chunk": 2, "room": 0}):
        other = linearized(policy, train, valid, **same, **options)
        assert other[0] == pytest.approx(loss, rel=1e-13)
        torch.testing.assert_close(other[1], gradient, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(other[2], curvature, rtol=1e-11, atol=1e-13)


@WAYS
def test_contents_of_the_padding_do_not_matter(automatic: bool) -> None:
    policy, train, valid = make_problem("normal", 1, RAGGED)
    expected = linearized(policy, train, valid, automatic=automatic)
    for episodes in (*train, valid):
        padding = episodes.mask == 0
        assert bool(padding.any())
        for values in (episodes.observations, episodes.actions, episodes.advantages):
            values[padding] = torch.nan
    loss, gradient, curvature = linearized(policy, train, valid, automatic=automatic)
    assert loss == expected[0]
    assert torch.equal(gradient, expected[1])
    assert torch.equal(curvature, expected[2])


@WAYS
def test_curvature_of_a_fraction_is_that_of_its_episodes_with_the_same_adaptation(automatic: bool) -> None:
    policy, train, valid = make_problem("normal", 1, ((4, 4, 4, 4), (4, 4, 4, 4)))
    expected_loss, expected_gradient, _ = linearized(policy, train, valid, automatic=automatic)
    adapted = ReferenceUpdate(policy, train, valid, STEP_SIZES[:1]).adapted()
    loss, gradient, curvature = linearized(policy, train, valid, automatic=automatic, curvature_fraction=0.5)
    assert loss == expected_loss
    assert torch.equal(gradient, expected_gradient)
    # By definition: J of the inner step on episodes 0 and 2, F of valid episodes 0 and 2 at the adapted policy.
    half = ReferenceUpdate(policy, [some(train[0], [0, 2])], some(valid, [0, 2]), STEP_SIZES[:1])
    points = {name: param.detach().requires_grad_() for name, param in adapted.items()}
    distribution = policy.distribution_parameters(half.valid.observations, points)
    old = tuple(tensor.detach() for tensor in distribution)
    kl = policy.distributions.kl(old, distribution).mean((1, 2)).sum()
    kl_gradient = torch.autograd.grad(kl, list(points.values()), create_graph=True)
    own = dict(policy.named_parameters())
    stacked = {name: param.detach().expand(2, *param.shape).clone().requires_grad_() for name, param in own.items()}
    log_probs = policy.log_prob(half.train[0].observations, half.train[0].actions, stacked)
    inner = -(log_probs * half.train[0].advantages).mean((1, 2)).sum()
    inner_gradient = torch.autograd.grad(inner, list(stacked.values()), create_graph=True)

    def times_jacobian(vectors: list[Tensor]) -> list[Tensor]:
        bent = torch.autograd.grad(inner_gradient, list(stacked.values()), vectors, retain_graph=True)
        return [vector - STEP_SIZES[0] * b for vector, b in zip(vectors, bent, strict=True)]

    pieces = direction(policy).split([param.numel() for param in own.values()])
    vectors = [piece.reshape(p.shape).expand(2, *p.shape) for piece, p in zip(pieces, own.values(), strict=True)]
    vectors = times_jacobian(vectors)
    vectors = list(torch.autograd.grad(kl_gradient, list(points.values()), vectors))
    expected = torch.cat([vector.mean(0).flatten() for vector in times_jacobian(vectors)])
    torch.testing.assert_close(curvature, expected, rtol=1e-10, atol=1e-12)


def some(episodes: TaskEpisodes, columns: list[int]) -> TaskEpisodes:
    chosen = copy.copy(episodes)
    arrays = episodes._each(lambda stepwise, array: array[:, :, columns] if stepwise else array[:, columns])
    vars(chosen).update(arrays)
    return chosen


def test_ratio_is_relative_to_the_recorded_log_probabilities() -> None:
    policy, train, valid = make_problem("normal", 1, RAGGED)
    plain, _, _ = linearized(policy, train, valid)
    reference = ReferenceUpdate(policy, train, valid, STEP_SIZES[:1])
    reference.loss_and_kl()
    assert reference.old_log_probs is not None
    valid.log_probs = reference.old_log_probs - 0.5
    recorded, _, _ = linearized(policy, train, valid)
    assert recorded == pytest.approx(plain * math.exp(0.5), rel=1e-12)


def test_tasks_with_numbers_that_are_not_finite_are_named() -> None:
    policy, train, valid = make_problem("normal", 1, FULL)
    valid.advantages[1], train[0].advantages[2] = torch.nan, torch.inf
    with pytest.raises(NonFiniteError, match=r"loss after adaptation .* tasks \[1, 2\]"):
        linearized(policy, train, valid)


@WAYS
@pytest.mark.parametrize(
    ("kind", "tasks_per_chunk", "inner_loss"),
    [("normal", None, likelihood_ratio), ("categorical", 1, likelihood_ratio_and_divisor)],
    ids=["all", "one with the divisor"],
)
def test_ratio_of_the_inner_loss_is_relative_to_the_old_policy_at_any_parameters(
    kind: str, automatic: bool, tasks_per_chunk: int | None, inner_loss: InnerLoss
) -> None:
    policy, train, valid = make_problem(kind, 2, RAGGED)
    rule = AdaptationRule(0.3, inner_loss=inner_loss)
    meta = meta_objective(policy, train, valid, rule=rule, automatic=automatic, tasks_per_chunk=tasks_per_chunk)
    theta = meta.initial_parameters()
    _, gradient = meta.gradient(theta)
    there = theta + (0.2 if inner_loss is likelihood_ratio else 0.05) * direction(policy)
    moved, moved_gradient = meta.gradient(there)
    evaluated, _ = meta.evaluate(there)
    again, _ = meta.evaluate(theta)

    # Task by task, all in one graph: the old policy adapts beside the new one, on the same episodes.
    def loss_at(flat_theta: Tensor) -> Tensor:
        losses = []
        for task in range(len(valid)):
            old, new = unflattened(policy, theta.clone().requires_grad_()), unflattened(policy, flat_theta)
            for episodes in train:
                old_probs = chances(policy, episodes, task, old)
                old = descended(-mean_of(old_probs / old_probs.detach(), episodes, task), old)
                new_probs = chances(policy, episodes, task, new)
                ratio = new_probs / old_probs.detach()
                size = 0.3 if inner_loss is likelihood_ratio else 0.3 / divisor_of(ratio, episodes, task)
                new = descended(-mean_of(ratio, episodes, task), new, size)
            ratio = chances(policy, valid, task, new) / chances(policy, valid, task, old).detach()
            losses.append(-mean_of(ratio, valid, task))
        return torch.stack(losses).mean()

    def descended(loss: Tensor, params: dict[str, Tensor], size: float | Tensor = 0.3) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        return {name: x - size * g for (name, x), g in zip(params.items(), gradients, strict=True)}

    for point, loss, slope in ((theta, again, gradient), (there, moved, moved_gradient)):
        leaf = point.clone().requires_grad_()
        expected = loss_at(leaf)
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        torch.testing.assert_close(slope, torch.autograd.grad(expected, leaf)[0], rtol=1e-9, atol=1e-12)
    assert evaluated == pytest.approx(moved, rel=1e-12)
    fresh = meta_objective(policy, train, valid, rule=rule, automatic=automatic, tasks_per_chunk=tasks_per_chunk)
    assert fresh.evaluate(there)[0] == pytest.approx(moved, rel=1e-12), "without a gradient before"


def unflattened(policy: Policy, flat_theta: Tensor) -> dict[str, Tensor]:
    own = dict(policy.named_parameters())
    pieces = flat_theta.split([param.numel() for param in own.values()])
    return {name: piece.view_as(param) for piece, (name, param) in zip(pieces, own.items(), strict=True)}


def chances(policy: Policy, episodes: TaskEpisodes, task: int, params: dict[str, Tensor]) -> Tensor:
    stacked = {name: param.unsqueeze(0) for name, param in params.items()}
    one = slice(task, task + 1)
    return policy.log_prob(episodes.observations[one], episodes.actions[one], stacked)[0].exp()


def divisor_of(ratio: Tensor, episodes: TaskEpisodes, task: int) -> Tensor:
    """Return by what the deviation of a task's advantages is larger than 1 where actions have these ratios (T, B)."""
    logarithm, count = torch.zeros((), dtype=torch.float64), int(episodes.lengths[task].sum())
    for column, length in enumerate(episodes.lengths[task].tolist()):
        excess = (episodes.advantages[task, :length, column] ** 2 - 1.0).sum()
        logarithm = logarithm + excess * ratio[:length, column].log().sum() / (2 * count)
    return logarithm.exp()


def mean_of(weights: Tensor, episodes: TaskEpisodes, task: int) -> Tensor:
    real = episodes.mask[task].bool()
    return (weights * episodes.advantages[task])[real].mean()


@WAYS
@pytest.mark.parametrize("by_name", [False, True], ids=["some_parameters", "a_size_for_every_entry"])
def test_derivatives_through_a_rule_by_parameter_agree_with_double_backward(automatic: bool, by_name: bool) -> None:
    policy, train, valid = make_problem("normal", 2, RAGGED)
    own = dict(policy.named_parameters())
    rule = AdaptationRule(0.3, parameters=list(own)[2:])
    if by_name:
        rule = AdaptationRule({name: param.detach().sigmoid() for name, param in own.items()})
    valid.mask = valid.mask.double()
    adapted = adapt_steps(policy, train, rule=rule)
    old_log_probs = policy.log_prob(valid.observations, valid.actions).detach() * valid.mask
    loss = surrogate(policy.log_prob(valid.observations, valid.actions, adapted), old_log_probs, valid).mean()
    valid.log_probs = old_log_probs
    expected = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(own.values()))])
    meta = meta_objective(policy, train, valid, automatic=automatic, rule=rule)
    theta = meta.initial_parameters()
    found, gradient = meta.gradient(theta)
    assert found == pytest.approx(loss.item(), rel=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    vector, step = direction(policy) / direction(policy).norm(), 1e-3
    ahead, behind = meta.evaluate(theta + step * vector)[1], meta.evaluate(theta - step * vector)[1]
    curvature = float(vector @ meta.curvature_product(vector))
    assert curvature == pytest.approx((ahead + behind) / step**2, rel=1e-4)


def test_curvature_that_overflows_is_named() -> None:
    policy, train, valid = make_problem("normal", 1, FULL, dtype=torch.float32)
    meta = meta_objective(policy, train, valid)
    meta.gradient(meta.initial_parameters())
    with pytest.raises(NonFiniteError, match="the curvature of the divergence is not finite"):
        meta.curvature_product(1e38 * direction(policy))


def test_policy_does_not_change_until_parameters_are_written() -> None:
    policy, train, valid = make_problem("normal", 1, FULL)
    before = [param.detach().clone() for param in policy.parameters()]
    linearized(policy, train, valid)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), before, strict=True))
    assert all(param.grad is None and param.requires_grad for param in policy.parameters())
    meta = meta_objective(policy, train, valid)
    meta.write_to_policy(meta.initial_parameters() + 1.0)
    assert all(torch.equal(a, b + 1.0) for a, b in zip(policy.parameters(), before, strict=True))
