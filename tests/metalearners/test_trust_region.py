"""Conjugate gradients against a direct solver; the line search against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maml_rl.metalearners.trust_region import backtracking_line_search, conjugate_gradient, longest_step


def positive_definite(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn((size, size), generator=generator, dtype=torch.float64)
    matrix = root @ root.T / size + torch.eye(size, dtype=torch.float64)
    return matrix, torch.randn(size, generator=generator, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_conjugate_gradient_agrees_with_the_direct_solver(size: int, seed: int) -> None:
    matrix, b = positive_definite(size, seed)
    x, curvature, _ = conjugate_gradient(lambda v: matrix @ v, b, iterations=2 * size, tolerance=1e-24)
    expected = torch.linalg.solve(matrix, b)
    torch.testing.assert_close(x, expected, rtol=1e-8, atol=1e-9)
    assert curvature == pytest.approx(float(expected @ matrix @ expected), rel=1e-8)


@pytest.mark.parametrize("iterations", [1, 3, 7])
def test_curvature_is_that_of_the_unfinished_solution(iterations: int) -> None:
    matrix, b = positive_definite(40, 1)
    x, curvature, products = conjugate_gradient(lambda v: matrix @ v, b, iterations=iterations)
    assert products == iterations
    assert curvature == pytest.approx(float(x @ matrix @ x), rel=1e-10)
    # The best point of the Krylov space: no multiple of it is better.
    assert float(x @ (b - matrix @ x)) == pytest.approx(0.0, abs=1e-10)


def test_zero_right_hand_side_needs_no_product() -> None:
    def product(vector: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not needed")

    x, curvature, _ = conjugate_gradient(product, torch.zeros(3, dtype=torch.float64), iterations=5)
    assert x.tolist() == [0.0, 0.0, 0.0]
    assert curvature == 0.0


def test_matrix_without_curvature_ends_the_search_instead_of_dividing_by_zero() -> None:
    x, _, products = conjugate_gradient(torch.zeros_like, torch.ones(3, dtype=torch.float64), iterations=5)
    assert products == 1
    assert x.tolist() == [0.0, 0.0, 0.0]


def test_line_search_takes_the_first_fraction_that_improves_within_the_bound() -> None:
    # At 1 the divergence is too large, at 1/2 the loss is not better, at 1/4 both conditions hold.
    table = {1.0: (-5.0, 0.2), 0.5: (1.0, 0.05), 0.25: (0.9, 0.1), 0.125: (0.0, 0.0)}
    search = backtracking_line_search(table.__getitem__, 1.0, max_kl=0.1, max_steps=9, ratio=0.5)
    assert (search.accepted, search.steps, search.fraction, search.loss, search.kl) == (True, 3, 0.25, 0.9, 0.1)


@pytest.mark.parametrize("result", [(2.0, 0.0), (0.0, 0.2), (float("nan"), 0.0), (0.0, float("nan"))])
def test_line_search_without_a_good_fraction_takes_none(result: tuple[float, float]) -> None:
    tried = []

    def evaluate(fraction: float) -> tuple[float, float]:
        tried.append(fraction)
        return result

    search = backtracking_line_search(evaluate, 1.0, max_kl=0.1, max_steps=3, ratio=0.8)
    assert (search.accepted, search.steps, search.fraction, search.loss, search.kl) == (False, 3, 0.0, 1.0, 0.0)
    assert tried == pytest.approx([1.0, 0.8, 0.64])


def test_longest_step_is_a_newton_step_as_long_as_the_quadratic_model_allows() -> None:
    matrix = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    gradient = torch.tensor([0.5, -2.0], dtype=torch.float64)
    step = longest_step(lambda v: matrix @ v, gradient, iterations=4, damping=0.1, max_kl=0.02)
    damped = matrix + 0.1 * torch.eye(2, dtype=torch.float64)
    newton = -torch.linalg.solve(damped, gradient)
    torch.testing.assert_close(step / step.norm(), newton / newton.norm())
    assert float(step @ damped @ step) / 2.0 == pytest.approx(0.02)


def test_longest_step_is_zero_where_the_curvature_is_not_positive() -> None:
    gradient = torch.ones(3, dtype=torch.float64)
    step = longest_step(lambda v: -v, gradient, iterations=4, damping=0.0, max_kl=0.02)
    assert step.count_nonzero() == 0
