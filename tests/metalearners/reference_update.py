"""The straightforward MAML-TRPO update, batched over tasks: the reference for the results of the fast one.

Automatic differentiation does everything: one graph through the inner steps of all tasks, the gradient of the
mean divergence with a graph of its own, and one pass back through that for every curvature product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners.maml_trpo import backtracking_line_search, longest_step
from maml_rl.policies.policy import Policy


class ReferenceUpdate:
    """One update, in the parts that tests compare.

    Args:
        policy: its own parameters are the initial ones.
        train: for each inner step the episodes of all tasks, with advantages.
        valid: the episodes of all tasks after the last inner step, with advantages.
        step_sizes: one for each inner step.
        first_order: ignore second derivatives of the inner loss.
    """

    def __init__(
        self,
        policy: Policy,
        train: Sequence[TaskEpisodes],
        valid: TaskEpisodes,
        step_sizes: Sequence[float],
        first_order: bool = False,
    ) -> None:
        self.policy, self.train, self.valid = policy, train, valid
        self.step_sizes, self.first_order = step_sizes, first_order
        self.params = list(policy.parameters())
        self.old: tuple[Tensor, ...] | None = None
        self.old_log_probs: Tensor | None = None

    def adapted(self) -> dict[str, Tensor]:
        """Return phi_K (M, ...) as a function of the policy's parameters."""
        params = self.policy.stack_parameters(len(self.valid))
        for episodes, step_size in zip(self.train, self.step_sizes, strict=True):
            log_probs = self.policy.log_prob(episodes.observations, episodes.actions, params)
            losses = -mean_over_real_steps(log_probs * episodes.advantages, episodes.mask)
            grads = torch.autograd.grad(losses.sum(), list(params.values()), create_graph=not self.first_order)
            params = {name: p - step_size * g for (name, p), g in zip(params.items(), grads, strict=True)}
        return params

    def loss_and_kl(self) -> tuple[Tensor, Tensor]:
        """Return surrogate loss and KL(old, new), means over tasks; the old parameters are those of the first call."""
        valid = self.valid
        distribution = self.policy.distribution_parameters(valid.observations, self.adapted())
        log_probs = self.policy.distributions.log_prob(distribution, valid.actions)
        if self.old is None:
            self.old = tuple(tensor.detach() for tensor in distribution)
            self.old_log_probs = log_probs.detach() if valid.log_probs is None else valid.log_probs
        assert self.old_log_probs is not None
        ratio = torch.exp(log_probs - self.old_log_probs)
        loss = -mean_over_real_steps(ratio * valid.advantages, valid.mask).mean()
        return loss, mean_over_real_steps(self.policy.distributions.kl(self.old, distribution), valid.mask).mean()

    def gradient_and_product(self) -> tuple[float, Tensor, Callable[[Tensor], Tensor]]:
        """Return loss, meta-gradient (D,), and the product with the Hessian of the mean divergence."""
        loss, kl = self.loss_and_kl()
        gradient = flat(torch.autograd.grad(loss, self.params, retain_graph=True))
        kl_gradient = flat(torch.autograd.grad(kl, self.params, create_graph=True))

        def product(vector: Tensor) -> Tensor:
            return flat(torch.autograd.grad(kl_gradient @ vector, self.params, retain_graph=True))

        return loss.item(), gradient, product

    def step(
        self, max_kl: float, cg_iters: int, cg_damping: float, ls_max_steps: int, ls_backtrack_ratio: float
    ) -> dict[str, Any]:
        """Take one trust-region step, by direction and line search of the fast one, which have tests of their own."""
        before, gradient, product = self.gradient_and_product()
        step = longest_step(product, gradient, iterations=cg_iters, damping=cg_damping, max_kl=max_kl)
        old = nn.utils.parameters_to_vector(self.params).detach()

        def at(fraction: float) -> tuple[float, float]:
            with torch.no_grad():
                nn.utils.vector_to_parameters(old + fraction * step, self.params)
            loss, kl = self.loss_and_kl()
            return loss.item(), kl.item()

        taken, tries, after, kl = backtracking_line_search(
            at, before, max_kl=max_kl, max_steps=ls_max_steps, ratio=ls_backtrack_ratio
        )
        at(taken)
        return {"loss/before": before, "loss/after": after, "kl": kl, "line_search_steps": tries}


def mean_over_real_steps(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of (M, T, B) over the real steps of each task."""
    return (values * mask).sum((1, 2)) / mask.sum((1, 2))


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all entries as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
