"""The whole update: it improves within its bound, is bit-identical when repeated, and refuses unusable input.

The halves of its step: conjugate gradients against a direct solver; the line search against its definition.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maml_rl.adaptation import adapt_steps
from maml_rl.derivatives import PhaseOutcome
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.losses import surrogate
from maml_rl.metalearners.maml_trpo import backtracking_line_search, conjugate_gradient, longest_step
from maml_rl.policies import Policy
from tests.metalearners.reference_update import ReferenceUpdate
from tests.synthetic import KINDS, make_problem, update

LENGTHS = ((6, 4), (5, 6), (3, 6), (6, 6))
SETTINGS: dict[str, Any] = {
    "max_kl": 1e-2,
    "cg_iters": 10,
    "cg_damping": 1e-5,
    "ls_max_steps": 15,
    "ls_backtrack_ratio": 0.8,
}


def snapshot(policy: Policy) -> bytes:
    return b"".join(param.detach().numpy().tobytes() for param in policy.parameters())


@pytest.mark.parametrize(
    ("kind", "num_steps", "first_order"),
    [("normal", 0, False), ("categorical", 2, False), ("normal", 2, True), ("categorical", 1, True)],
)
def test_step_agrees_with_the_double_backward_version(kind: str, num_steps: int, first_order: bool) -> None:
    policy, train, valid = make_problem(kind, num_steps, LENGTHS)
    other, _, _ = make_problem(kind, num_steps, LENGTHS)
    logs = MAMLTRPO(policy, 0.2, first_order).step(train, valid, **SETTINGS)
    expected = ReferenceUpdate(other, train, valid, [0.2] * num_steps, first_order).step(**SETTINGS)
    assert {name: logs[name] for name in expected} == pytest.approx(expected, rel=1e-8)
    for param, other_param in zip(policy.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, other_param, rtol=1e-7, atol=1e-9)


def test_rejected_step_leaves_the_parameters_bit_identical() -> None:
    policy, train, valid = make_problem("normal", 1, LENGTHS, dtype=torch.float32)
    before = snapshot(policy)

    def walled_in(log_probs: torch.Tensor, old_log_probs: torch.Tensor, samples: Any) -> torch.Tensor:
        # The loss has a descent direction, but the wall makes every step along it worse.
        wall = 1e9 * (log_probs - old_log_probs).square().sum((1, 2))
        return surrogate(log_probs, old_log_probs, samples) + wall

    logs = MAMLTRPO(policy, 0.1, objective=walled_in).step(train, valid, **SETTINGS)
    assert logs["grad_norm"] > 0.0
    assert (logs["accepted"], logs["line_search_steps"]) == (False, SETTINGS["ls_max_steps"])
    assert (logs["kl"], logs["loss/after"]) == (0.0, logs["loss/before"])
    assert snapshot(policy) == before


def test_lists_of_single_tasks_are_accepted_like_a_batch() -> None:
    policy, train, valid = make_problem("normal", 1, LENGTHS)
    other, _, _ = make_problem("normal", 1, LENGTHS)
    expected = MAMLTRPO(policy, 0.1).step(train, valid)
    logs = MAMLTRPO(other, 0.1).step([list(train[0])], list(valid))
    assert logs == pytest.approx(expected)


def test_step_with_a_fraction_of_the_curvature_stays_within_the_bound() -> None:
    policy, train, valid = make_problem("normal", 1, ((6, 6, 6, 6),) * 6)
    other, _, _ = make_problem("normal", 1, ((6, 6, 6, 6),) * 6)
    logs = MAMLTRPO(policy, 0.1, curvature_fraction=0.5).step(train, valid, **SETTINGS)
    assert logs["accepted"]
    assert 0.0 < logs["kl"] <= SETTINGS["max_kl"]
    MAMLTRPO(other, 0.1).step(train, valid, **SETTINGS)
    assert snapshot(policy) != snapshot(other), "its direction is that of other curvature"


def test_error_during_a_step_leaves_parameters_and_threads_unchanged() -> None:
    policy, train, valid = make_problem("normal", 1, LENGTHS)
    before = snapshot(policy)
    valid.advantages[0, 0, 0] = torch.nan
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(NonFiniteError, match=r"not finite for the tasks \[0\]"):
            MAMLTRPO(policy, 0.1).step(train, valid)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert snapshot(policy) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_kl": 0.0}, "max_kl must be greater than 0, got 0.0"),
        ({"cg_iters": 0}, "cg_iters must be greater than or equal to 1, got 0"),
        ({"ls_backtrack_ratio": 1.0}, "ls_backtrack_ratio must be less than 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    policy, train, valid = make_problem("normal", 1, LENGTHS)
    with pytest.raises(ValueError, match=message):
        MAMLTRPO(policy).step(train, valid, **arguments)
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="curvature_fraction must be"):
            MAMLTRPO(policy, curvature_fraction=fraction)


def test_step_uses_the_settings_except_for_given_arguments() -> None:
    values = {"max_kl": 2e-3, "cg_damping": 0.3, "ls_backtrack_ratio": 0.4}
    settings = MAMLTRPO.Settings(**values)
    moved = []
    for batch, overridden in ((True, {}), (False, {}), (True, {"max_kl": 1e-4}), (False, {"max_kl": 1e-4})):
        policy, train, valid = make_problem("normal", 1, LENGTHS)
        if batch:
            whole = MAMLTRPO.Settings(**(values | overridden))
            update(MAMLTRPO(policy, 0.1, settings=whole), [*train, valid])
        else:
            MAMLTRPO(policy, 0.1, settings=settings).step(train, valid, **overridden)
        moved.append(snapshot(policy))
    by_settings, by_step, by_other_settings, by_argument = moved
    assert by_settings == by_step
    assert by_other_settings == by_argument
    assert by_argument != by_step


def other_loss(outcome: PhaseOutcome) -> torch.Tensor:
    return -(outcome.log_probs.exp() * outcome.samples.advantages * outcome.samples.mask).sum((1, 2))


def test_episodes_that_do_not_fit_are_refused() -> None:
    policy, train, valid = make_problem("normal", 2, LENGTHS)
    _, _, fewer = make_problem("normal", 1, LENGTHS[:2])
    with pytest.raises(ValueError, match=r"expected the episodes of 1 inner steps.*got 0"):
        MAMLTRPO(policy, [0.1]).step([], valid)
    with pytest.raises(ValueError, match=r"expected the episodes of 3 inner steps.*got 2"):
        MAMLTRPO(policy, [0.1, 0.1, 0.1]).step(train, valid)
    with pytest.raises(ValueError, match=r"train_episodes\[0\] are of 4 tasks, but valid_episodes of 2"):
        MAMLTRPO(policy, 0.1).step(train, fewer)
    train[1].fast_lr = 0.5
    with pytest.raises(ValueError, match=r"train_episodes\[1\] were sampled for fast_lr 0.5, .* with 0.1"):
        MAMLTRPO(policy, 0.1).step(train, valid)
    train[1].fast_lr = 0.1
    MAMLTRPO(policy, 0.1).step(train, valid)
    train[0].rule = "reinforce"
    with pytest.raises(ValueError, match=r"were sampled for the inner loss reinforce, but .* other_loss"):
        MAMLTRPO(policy, 0.1, inner_loss=other_loss).step(train, valid)
    for episodes, name in ((valid, "valid_episodes"), (train[0], r"train_episodes\[0\]")):
        episodes.advantages = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match=f"{name} without advantages; call compute_advantages"):
            MAMLTRPO(policy, 0.1).step(train, valid)


@pytest.mark.slow
def test_update_runs_on_the_given_device_and_leaves_episodes_and_policy_on_theirs() -> None:
    policy, train, valid = make_problem("normal", 1, LENGTHS)
    # The meta device holds no numbers: an update that really runs on it cannot return a loss.
    with pytest.raises((RuntimeError, NotImplementedError)):
        MAMLTRPO(policy, 0.1, device="meta").step(train, valid)
    assert next(policy.parameters()).device == torch.device("cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_step_on_cuda_agrees_with_the_cpu(kind: str) -> None:
    policy, train, valid = make_problem(kind, 2, LENGTHS)
    other, _, _ = make_problem(kind, 2, LENGTHS)
    expected = MAMLTRPO(policy, 0.1).step(train, valid, **SETTINGS)
    logs = MAMLTRPO(other, 0.1, device="cuda").step(train, valid, **SETTINGS)
    assert logs == pytest.approx(expected, rel=1e-6)


def test_adaptation_of_one_task_is_a_row_of_the_batch_and_differentiable() -> None:
    policy, train, _ = make_problem("normal", 2)
    learner = MAMLTRPO(policy, fast_lr=0.1)
    expected = adapt_steps(policy, train, rule=0.1)
    for name, value in learner.adapt(train).items():
        torch.testing.assert_close(value, expected[name])
    alone = learner.adapt([episodes[1] for episodes in train])
    for name, value in alone.items():
        torch.testing.assert_close(value, expected[name][1])
    second, first = (
        torch.autograd.grad(
            sum(value.sum() for value in learner.adapt([train[0][1]] * 2, first_order=first_order).values()),
            policy.layer1.weight,
        )[0]
        for first_order in (False, True)
    )
    assert (second != first).any()


def positive_definite(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn((size, size), generator=generator, dtype=torch.float64)
    matrix = root @ root.T / size + torch.eye(size, dtype=torch.float64)
    return matrix, torch.randn(size, generator=generator, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_conjugate_gradient_agrees_with_the_direct_solver(size: int, seed: int) -> None:
    matrix, b = positive_definite(size, seed)
    x, curvature = conjugate_gradient(lambda v: matrix @ v, b, iterations=2 * size, tolerance=1e-24)
    expected = torch.linalg.solve(matrix, b)
    torch.testing.assert_close(x, expected, rtol=1e-8, atol=1e-9)
    assert curvature == pytest.approx(float(expected @ matrix @ expected), rel=1e-8)


def test_curvature_is_that_of_the_unfinished_solution() -> None:
    matrix, b = positive_definite(40, 1)
    products = []

    def product(vector: torch.Tensor) -> torch.Tensor:
        products.append(matrix @ vector)
        return products[-1]

    x, curvature = conjugate_gradient(product, b, iterations=3)
    assert len(products) == 3
    assert curvature == pytest.approx(float(x @ matrix @ x), rel=1e-10)
    # The best point of the Krylov space: no multiple of it is better.
    assert float(x @ (b - matrix @ x)) == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize(("right", "num_products"), [(torch.zeros, 0), (torch.ones, 1)], ids=["zeros", "ones"])
def test_search_ends_where_nothing_is_left_or_the_matrix_has_no_curvature(right: Any, num_products: int) -> None:
    products = []

    def product(vector: torch.Tensor) -> torch.Tensor:
        products.append(torch.zeros_like(vector))
        return products[-1]

    x, curvature = conjugate_gradient(product, right(3, dtype=torch.float64), iterations=5)
    assert len(products) == num_products
    assert x.tolist() == [0.0, 0.0, 0.0]
    assert curvature == 0.0


def test_line_search_takes_the_first_fraction_that_improves_within_the_bound() -> None:
    # At 1 the divergence is too large, at 1/2 the loss is not better, at 1/4 both conditions hold.
    table = {1.0: (-5.0, 0.2), 0.5: (1.0, 0.05), 0.25: (0.9, 0.1), 0.125: (0.0, 0.0)}
    found = backtracking_line_search(table.__getitem__, 1.0, max_kl=0.1, max_steps=9, ratio=0.5)
    assert found == (0.25, 3, 0.9, 0.1)


@pytest.mark.parametrize("result", [(2.0, 0.0), (0.0, 0.2), (float("nan"), 0.0), (0.0, float("nan"))])
def test_line_search_without_a_good_fraction_takes_none(result: tuple[float, float]) -> None:
    tried = []

    def evaluate(fraction: float) -> tuple[float, float]:
        tried.append(fraction)
        return result

    found = backtracking_line_search(evaluate, 1.0, max_kl=0.1, max_steps=3, ratio=0.8)
    assert found == (0.0, 3, 1.0, 0.0)
    assert tried == pytest.approx([1.0, 0.8, 0.64])


def test_longest_step_is_a_newton_step_as_long_as_the_quadratic_model_allows() -> None:
    matrix = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    gradient = torch.tensor([0.5, -2.0], dtype=torch.float64)
    step = longest_step(lambda v: matrix @ v, gradient, iterations=4, damping=0.1, max_kl=0.02)
    damped = matrix + 0.1 * torch.eye(2, dtype=torch.float64)
    newton = -torch.linalg.solve(damped, gradient)
    torch.testing.assert_close(step / step.norm(), newton / newton.norm())
    assert float(step @ damped @ step) / 2.0 == pytest.approx(0.02)
    # Where the curvature is not positive.
    assert not longest_step(lambda v: -v, gradient, iterations=4, damping=0.0, max_kl=0.02).any()
