"""MAML with a trust region as the outer optimiser."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from maml_rl.adaptation import InnerLoss, check_advantages, per_step, reinforce
from maml_rl.episode.task_episodes import BatchEpisodes, TaskEpisodes
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.metalearners.objectives import OuterObjective, surrogate
from maml_rl.metalearners.trust_region import backtracking_line_search, conjugate_gradient
from maml_rl.policies import as_policy

Episodes = TaskEpisodes | Sequence[BatchEpisodes]


class MAMLTRPO:
    """Model-agnostic meta-learning with trust-region policy optimisation.

    Args:
        policy: whose parameters are the initial parameters of every task; `step` updates them.
        fast_lr: step size of the inner loop, one for all inner steps or one for each.
        first_order: ignore second derivatives of the inner loss in gradient and curvature.
        device: where the update is computed; the policy itself stays where it is.
        inner_loss: see `maml_rl.adapt`.
        objective: outer objective.
        curvature_fraction: share of each task's episodes, in (0, 1], that the curvature is computed from.

    Raises:
        ValueError: If `curvature_fraction` is out of range.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400; Schulman et al. 2015, https://arxiv.org/abs/1502.05477
    """

    def __init__(
        self,
        policy: nn.Module,
        fast_lr: float | Sequence[float] = 0.1,
        first_order: bool = False,
        device: torch.device | str = "cpu",
        *,
        inner_loss: InnerLoss = reinforce,
        objective: OuterObjective = surrogate,
        curvature_fraction: float = 1.0,
    ) -> None:
        if not 0.0 < curvature_fraction <= 1.0:
            raise ValueError(f"curvature_fraction must lie in (0, 1], got {curvature_fraction}")
        self.policy = as_policy(policy)
        self.fast_lr = fast_lr
        self.first_order = first_order
        self.device = torch.device(device)
        self._inner_loss, self._objective = inner_loss, objective
        self._curvature_fraction = curvature_fraction

    def step(
        self,
        train_episodes: Sequence[Episodes],
        valid_episodes: Episodes,
        max_kl: float = 1e-3,
        cg_iters: int = 10,
        cg_damping: float = 1e-2,
        ls_max_steps: int = 10,
        ls_backtrack_ratio: float = 0.5,
    ) -> dict[str, Any]:
        """Update the policy's parameters by one trust-region step.

        Args:
            train_episodes: for each inner step the episodes of all tasks before it, with advantages; none for plain
                TRPO on all tasks at once.
            valid_episodes: the episodes of all tasks after the last inner step, with advantages.
            max_kl: bound of KL(old, new), averaged over the real valid steps of a task, then over tasks.
            cg_iters: iterations of conjugate gradients.
            cg_damping: added to the diagonal of the curvature.
            ls_max_steps: step lengths to try; if none is good the parameters stay as they are, to the last bit.
            ls_backtrack_ratio: of one step length to the one before.

        Returns:
            `kl`, `loss/before`, `loss/after`, `line_search_steps`, `accepted`, `grad_norm`.

        Raises:
            ValueError: If an argument is out of range, or episodes are missing, have no advantages, or were sampled
                for another step size.
            NonFiniteError: If the loss, its gradient or the curvature is not finite; the parameters stay as they are.
        """
        _check_ranges(max_kl, cg_iters, cg_damping, ls_max_steps, ls_backtrack_ratio)
        train, valid = [_stacked(episodes) for episodes in train_episodes], _stacked(valid_episodes)
        step_sizes = per_step(self.fast_lr, len(train))
        _check_episodes(train, valid, step_sizes)

        with MetaObjective(
            self.policy,
            train,
            valid,
            step_sizes=step_sizes,
            inner_loss=self._inner_loss,
            objective=self._objective,
            first_order=self.first_order,
            curvature_fraction=self._curvature_fraction,
            device=self.device,
        ) as meta:
            theta = meta.initial_parameters()
            loss, gradient = meta.linearise(theta)
            solution = conjugate_gradient(
                lambda vector: meta.curvature_product(vector) + cg_damping * vector, gradient, iterations=cg_iters
            )
            # The longest step along the direction that keeps the quadratic model of the divergence within max_kl.
            length = math.sqrt(2.0 * max_kl / solution.curvature) if solution.curvature > 0.0 else 0.0
            full_step = -length * solution.x
            search = backtracking_line_search(
                lambda fraction: meta.evaluate(theta + fraction * full_step),
                loss,
                max_kl=max_kl,
                max_steps=ls_max_steps,
                ratio=ls_backtrack_ratio,
            )
            if search.accepted:
                meta.write_to_policy(theta + search.fraction * full_step)

        return {
            "kl": search.kl,
            "loss/before": loss,
            "loss/after": search.loss,
            "line_search_steps": search.steps,
            "accepted": search.accepted,
            "grad_norm": gradient.norm().item(),
        }


def _stacked(episodes: Episodes) -> TaskEpisodes:
    return episodes if isinstance(episodes, TaskEpisodes) else TaskEpisodes.stack(episodes)


def _check_ranges(max_kl: float, cg_iters: int, cg_damping: float, ls_max_steps: int, ratio: float) -> None:
    if not 0.0 < max_kl < math.inf:
        raise ValueError(f"max_kl must be positive and finite, got {max_kl}")
    if cg_iters < 1:
        raise ValueError(f"cg_iters must be at least 1, got {cg_iters}")
    if not 0.0 <= cg_damping < math.inf:
        raise ValueError(f"cg_damping must be non-negative and finite, got {cg_damping}")
    if ls_max_steps < 1:
        raise ValueError(f"ls_max_steps must be at least 1, got {ls_max_steps}")
    if not 0.0 < ratio < 1.0:
        raise ValueError(f"ls_backtrack_ratio must lie strictly between 0 and 1, got {ratio}")


def _check_episodes(train: Sequence[TaskEpisodes], valid: TaskEpisodes, step_sizes: Sequence[float]) -> None:
    for index, (episodes, step_size) in enumerate(zip(train, step_sizes, strict=True)):
        name = f"train_episodes[{index}]"
        check_advantages(episodes, name)
        if episodes.fast_lr is not None and episodes.fast_lr != step_size:
            raise ValueError(
                f"{name} were sampled for fast_lr {episodes.fast_lr}, but the metalearner adapts with {step_size}; "
                "give both the same"
            )
        if len(episodes) != len(valid):
            raise ValueError(f"{name} are of {len(episodes)} tasks, but valid_episodes of {len(valid)}")
    check_advantages(valid, "valid_episodes")
