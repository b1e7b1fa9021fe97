"""MAML with a trust region as the outer optimizer, and the halves of its step: the direction and the length."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from maml_rl.adaptation import AdaptationRule, InnerLoss, RuleLike, adapt_steps, as_rule, check_phases, reinforce
from maml_rl.arguments import check_count
from maml_rl.compat import CalledWithEpisodes
from maml_rl.config import Config
from maml_rl.config.settings import Count, Positive
from maml_rl.derivatives import EpisodeStore
from maml_rl.episode.task_episodes import BatchEpisodes, TaskEpisodes
from maml_rl.metalearners.losses import DivisorSettings, OuterObjective, chosen_loss, likelihood_ratio, surrogate
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.policies import Policy

# By the name in a config.
INNER_LOSSES: dict[str, InnerLoss] = {"log-probability": reinforce, "likelihood-ratio": likelihood_ratio}

Episodes = TaskEpisodes | Sequence[BatchEpisodes]


class MAMLTRPO(CalledWithEpisodes, MetaLearner):
    """Model-agnostic meta-learning with trust-region policy optimization.

    Args:
        policy: whose parameters are the initial parameters of every task; `update` changes them.
        fast_lr: the inner loop: a step size for all inner steps, one for each, or a rule.
        first_order: ignore second derivatives of the inner loss in gradient and curvature; None for the default of
            `Settings`.
        device: where the update is computed; the policy itself stays where it is.
        num_steps: inner steps that `step` expects; None for as many as it gets.
        inner_loss: see `maml_rl.adapt`; None for the rule's own.
        objective: outer objective.
        curvature_fraction: share of each task's episodes, in (0, 1], that the curvature is computed from; None for the
            default of `Settings`.
        options: `settings`, all of these and those of the trust region, instead of `first_order` and
            `curvature_fraction`; `plan` and `seed`, see `MetaLearner`.

    Raises:
        ValueError: If `curvature_fraction` or `num_steps` is out of range.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400; Schulman et al. 2015, https://arxiv.org/abs/1502.05477
    """

    class Settings(DivisorSettings):
        """Settings of MAML-TRPO."""

        inner_loss: Annotated[
            Literal["log-probability", "likelihood-ratio"],
            Field(description="loss of the inner steps; likelihood-ratio keeps the policy from drifting"),
        ] = "log-probability"
        first_order: Annotated[bool, Field(description="drop the second derivatives of the inner steps")] = False
        max_kl: Annotated[
            Positive, Field(description="trust region: mean KL divergence that one meta-update may cause")
        ] = 1e-2
        cg_iters: Annotated[Count, Field(description="conjugate gradient iterations")] = 10
        cg_damping: Annotated[float, Field(ge=0, description="added to the diagonal of the curvature")] = 1e-5
        curvature_fraction: Annotated[
            float, Field(gt=0, le=1, description="share of the episodes that the curvature is computed from")
        ] = 1.0
        ls_max_steps: Annotated[Count, Field(description="step lengths that the line search tries")] = 15
        ls_backtrack_ratio: Annotated[
            float, Field(gt=0, lt=1, description="length of each try of the line search relative to the one before")
        ] = 0.8

    maps_over_tasks = True
    settings: Settings
    rule: AdaptationRule

    def __init__(
        self,
        policy: nn.Module,
        fast_lr: RuleLike = 0.1,
        first_order: bool | None = None,
        device: torch.device | str = "cpu",
        *,
        num_steps: int | None = None,
        inner_loss: InnerLoss | None = None,
        objective: OuterObjective = surrogate,
        curvature_fraction: float | None = None,
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {"first_order": first_order, "curvature_fraction": curvature_fraction}
        if options.get("settings") is None:
            options["settings"] = self.Settings(**{name: value for name, value in given.items() if value is not None})
        super().__init__(policy, device=device, **options)
        self.rule = as_rule(fast_lr).replace(inner_loss=inner_loss)
        self.num_steps = None if num_steps is None else check_count("num_steps", num_steps, least=0)
        self._objective = objective

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Settings) -> AdaptationRule:
        return AdaptationRule(
            config.fast_lr, inner_loss=chosen_loss(INNER_LOSSES[settings.inner_loss], settings, config)
        )

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        if batch.in_this_process:
            check_phases(batch.train_episodes, batch.valid_episodes, self.rule)
        settings = self.settings
        with batch:
            meta = MetaObjective(
                self.policy,
                batch,
                rule=self.rule,
                objective=self._objective,
                first_order=settings.first_order,
                curvature_fraction=settings.curvature_fraction,
                device=self.device,
            )
            theta = meta.initial_parameters()
            loss, gradient = meta.gradient(theta)
            full_step = longest_step(
                meta.curvature_product,
                gradient,
                iterations=settings.cg_iters,
                damping=settings.cg_damping,
                max_kl=settings.max_kl,
            )
            taken, tries, after, kl = backtracking_line_search(
                lambda fraction: meta.evaluate(theta + fraction * full_step),
                loss,
                max_kl=settings.max_kl,
                # Without a direction, as without any signal in the rewards, there is nothing to search.
                max_steps=settings.ls_max_steps if bool(full_step.any()) else 0,
                ratio=settings.ls_backtrack_ratio,
            )
            if taken:
                meta.write_to_policy(theta + taken * full_step)

        return {
            "kl": kl,
            "loss/before": loss,
            "loss/after": after,
            "line_search_steps": tries,
            "accepted": taken > 0.0,
            "grad_norm": gradient.norm().item(),
        }

    def batch_of(self, train_episodes: Sequence[Episodes], valid_episodes: Episodes) -> EpisodeStore:
        """Return the batch of episodes that have advantages."""
        return self.store_of([TaskEpisodes.stack(phase) for phase in (*train_episodes, valid_episodes)])

    def adapted_to(self, train_episodes: Sequence[Episodes], *, first_order: bool) -> dict[str, Tensor]:
        """Return the parameters (M, ...) after inner steps on the episodes of all tasks."""
        train = [TaskEpisodes.stack(phase) for phase in train_episodes]
        return adapt_steps(self.policy, train, rule=self.rule, first_order=first_order)


def longest_step(
    product: Callable[[Tensor], Tensor], gradient: Tensor, *, iterations: int, damping: float, max_kl: float
) -> Tensor:
    """Return the longest step along the direction that keeps the quadratic model of the divergence within `max_kl`.

    Args:
        product: v -> A v, both (D,), with A the Hessian of the divergence.
        gradient: (D,), of the loss.
        iterations: of conjugate gradients.
        damping: added to the diagonal of A.
        max_kl: bound of the divergence, positive.

    Returns:
        (D,); zero where A is not positive definite to working precision.

    Source: Schulman et al. 2015, appendix C, https://arxiv.org/abs/1502.05477
    """
    x, curvature = conjugate_gradient(lambda v: product(v) + damping * v, gradient, iterations=iterations)
    length = math.sqrt(2.0 * max_kl / curvature) if curvature > 0.0 else 0.0
    return -length * x


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, *, iterations: int, tolerance: float = 1e-10
) -> tuple[Tensor, float]:
    """Solve A x = b for a symmetric positive definite A that is given only by its products.

    Args:
        product: v -> A v, both (D,).
        b: (D,).
        iterations: maximum number of products, at least 1.
        tolerance: stop once |b - A x|^2 is below it times |b|^2.

    Returns:
        x; and x^T A x without another product, from the residual b - A x.
    """
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    square = first = torch.dot(b, b).item()
    for _ in range(iterations):
        if not square > tolerance * first:
            break
        image = product(direction)
        curvature = torch.dot(direction, image).item()
        if not curvature > 0.0:
            # Not positive definite to working precision (or NaN): further iterations would diverge.
            break
        step = square / curvature
        x = x + step * direction
        residual = residual - step * image
        previous, square = square, torch.dot(residual, residual).item()
        direction = residual + (square / previous) * direction
    return x, torch.dot(x, b - residual).item()


def backtracking_line_search(
    evaluate: Callable[[float], tuple[float, float]], loss: float, *, max_kl: float, max_steps: int, ratio: float
) -> tuple[float, int, float, float]:
    """Shorten a step until the loss falls and the divergence stays within its bound.

    Args:
        evaluate: fraction of the full step -> (loss, KL(old, new)) there.
        loss: before the step.
        max_kl: bound of the divergence, positive.
        max_steps: maximum number of fractions 1, ratio, ratio^2, ... to try.
        ratio: strictly between 0 and 1.

    Returns:
        The fraction to take, 0 if none will do; how many were tried; loss and divergence at that fraction.
    """
    fraction = 1.0
    for steps in range(1, max_steps + 1):
        new_loss, kl = evaluate(fraction)
        # Written so that NaN is refused.
        if new_loss < loss and kl <= max_kl:
            return fraction, steps, new_loss, kl
        fraction *= ratio
    return 0.0, max_steps, loss, 0.0
