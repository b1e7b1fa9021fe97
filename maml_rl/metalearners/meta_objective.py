"""The meta-objective on all tasks of an update: chunks computed where their episodes are, summed in a fixed order."""

from collections.abc import Callable

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, flat_step_size
from maml_rl.derivatives import Answer, Hosts, ParameterLayout
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners import task_chunk
from maml_rl.metalearners.losses import OuterObjective
from maml_rl.policies import Policy


class MetaObjective:
    """Mean over tasks of the loss after adaptation, as a function of the initial parameters theta.

    The policy's own parameters at first are the old ones, the reference of ratios and divergences.

    Parameters and gradients are float64 vectors (D,) on the CPU, where the optimizer's few vector operations are cheap
    and precise; inside, everything is computed on `device` in the precision of the policy. The result
    depends neither on the number of cores nor on which chunk is finished first, nor on where the hosts are.

    Args:
        policy: any policy.
        hosts: of the episodes of all tasks before each inner step and after the last.
        rule: of the inner steps.
        objective: outer objective.
        first_order: ignore second derivatives of the inner loss.
        curvature_fraction: share of each task's episodes that the curvature is computed from.
        device: where to compute.
        automatic: always differentiate automatically, even if the policy has hand-written derivatives.
    """

    def __init__(
        self,
        policy: Policy,
        hosts: Hosts,
        *,
        rule: AdaptationRule,
        objective: OuterObjective,
        first_order: bool = False,
        curvature_fraction: float = 1.0,
        device: torch.device,
        automatic: bool = False,
    ) -> None:
        self._policy, self._device, self._hosts = policy, device, hosts
        self._layout = ParameterLayout(policy)
        self._dtype = next(policy.parameters()).dtype
        like = torch.empty(0, dtype=self._dtype, device=device)
        self._problem = hosts.share(
            task_chunk.MetaProblem(
                policy,
                [flat_step_size(size, self._layout, like) for size in rule.step_sizes(hosts.num_phases - 1)],
                rule.inner_loss,
                objective,
                first_order=first_order,
                curvature_fraction=curvature_fraction,
                device=device,
                automatic=automatic,
                old=self._inside(self.initial_parameters()),
            )
        )

    def initial_parameters(self) -> Tensor:
        """Return the policy's own parameters, (D,)."""
        with torch.no_grad():
            return self._layout.flatten(dict(self._policy.named_parameters())).to("cpu", torch.float64)

    def write_to_policy(self, theta: Tensor) -> None:
        """Give the policy the parameters `theta` (D,)."""
        with torch.no_grad():
            views = self._layout.views(theta)
            for name, param in self._policy.named_parameters():
                param.copy_(views[name])

    def gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """Return loss and gradient (D,) at `theta` (D,), against the old parameters.

        Raises:
            NonFiniteError: If one of them is not finite.
        """
        there = self._inside(theta)
        at_old = torch.equal(there, self._problem.old)
        return self._checked(self._hosts.total(task_chunk.differentiate, self._problem, None if at_old else there))

    def curvature_product(self, vector: Tensor) -> Tensor:
        """Return the Hessian of the mean KL(old, new) at the old parameters, times `vector`; both (D,).

        Raises:
            NonFiniteError: If the product is not finite.
        """
        product = self._total(task_chunk.curvature_product, vector).sums[0] / self._hosts.num_tasks
        if not bool(product.isfinite().all()):
            raise NonFiniteError(
                "the curvature of the divergence is not finite; look for a standard deviation close to zero, or use a "
                "smaller fast_lr"
            )
        return product

    def evaluate(self, theta: Tensor) -> tuple[float, float]:
        """Return the loss and the mean KL(old, new) at `theta` (D,)."""
        losses, kls = self._total(task_chunk.evaluate, theta).of_tasks
        return _average(losses), _average(kls)

    def mean_adapted(self, theta: Tensor) -> Tensor:
        """Return the mean over tasks of the adapted parameters (D,), from `theta` (D,)."""
        return self._total(task_chunk.adapt, theta).sums[0] / self._hosts.num_tasks

    def _checked(self, answer: Answer) -> tuple[float, Tensor]:
        """Return the mean of the losses and their gradient."""
        (losses,), gradient = answer.of_tasks, answer.sums[0] / self._hosts.num_tasks
        if not bool(losses.isfinite().all()):
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            raise NonFiniteError(
                f"the loss after adaptation is not finite for the tasks {bad}; look for NaN in their advantages, "
                "or use a smaller fast_lr"
            )
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(
                "the meta-gradient is not finite though the losses are; look for overflow in the inner loop, where a "
                "smaller fast_lr may help"
            )
        return _average(losses), gradient

    def _total(self, question: Callable[..., Answer], vector: Tensor) -> Answer:
        return self._hosts.total(question, self._problem, self._inside(vector))

    def _inside(self, vector: Tensor) -> Tensor:
        return vector.to(self._device, self._dtype)


def _average(of_tasks: Tensor) -> float:
    return of_tasks.to("cpu", torch.float64).mean().item()
