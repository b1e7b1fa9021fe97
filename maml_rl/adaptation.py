"""The inner loop of MAML: gradient steps from common to task-specific parameters, for all tasks at once.

phi_0 = theta, phi_{k+1} = phi_k - step_size_k * grad L_k(phi_k), where L_k is the inner loss on the episodes sampled
under phi_k. `adapt` takes one step and is differentiable by torch; `InnerLoop` takes several on a chunk of tasks, and
gives products with the Jacobian of phi_K in theta.

Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.derivatives import (
    ChunkWorkers,
    Linearization,
    ParameterLayout,
    PolicyOnSamples,
    Samples,
    Workspace,
    cut,
)
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Params, Policy, as_policy

# (log_probs (M, T, B), something with advantages and mask (M, T, B)) -> one loss per task, (M,).
InnerLoss = Callable[[Tensor, Any], Tensor]


def reinforce(log_probs: Tensor, samples: Any) -> Tensor:
    """Return the inner loss of MAML, -mean(log pi(a|s) * A) over the real steps of each task."""
    return functional.reinforce_loss(log_probs, samples.advantages, samples.mask)


def adapt(
    policy: nn.Module,
    episodes: TaskEpisodes,
    params: Params | None = None,
    *,
    step_size: float,
    inner_loss: InnerLoss = reinforce,
    first_order: bool = False,
    create_graph: bool | None = None,
) -> dict[str, Tensor]:
    """Take one gradient step for every task.

    Args:
        policy: a policy, or a module that `as_policy` takes; its own parameters stay as they are.
        episodes: (M, T, B, ...), with advantages; sampled under `params`.
        params: where to start: of the policy's own shapes, or stacked (M, ...); the policy's own by default.
        step_size: of the step.
        inner_loss: maps log-probabilities (M, T, B) and `episodes` to one loss per task.
        first_order: treat the inner gradient as a constant when differentiating the result.
        create_graph: whether the result is differentiable with respect to `params`; by default wherever torch
            records gradients and they ask for them. Without, the step is computed in chunks of tasks on all cores.

    Returns:
        {name: (M, ...)} the adapted parameters, on the device of the episodes.

    Raises:
        ValueError: If the episodes have no advantages, or `params` do not fit the policy.
    """
    check_advantages(episodes, "episodes")
    policy = as_policy(policy, episodes.observations.shape[3:])
    with torch.set_grad_enabled(torch.is_grad_enabled() if create_graph is None else create_graph):
        start = {name: param.to(episodes.device) for name, param in _start(policy, params).items()}
        stacked = policy.stack_parameters(len(episodes), start)
        if not any(param.requires_grad for param in stacked.values()):
            return _adapt_in_chunks(policy, episodes, stacked, step_size, inner_loss)
        dtype = next(iter(stacked.values())).dtype
        samples = Samples.of(episodes, slice(None), dtype=dtype, device=episodes.device)
        losses = inner_loss(policy.log_prob(samples.observations, samples.actions, stacked), samples)
        gradients = torch.autograd.grad(
            losses.sum(),
            list(stacked.values()),
            create_graph=not first_order,
            allow_unused=True,
            materialize_grads=True,
        )
        return {
            name: param - step_size * gradient
            for (name, param), gradient in zip(stacked.items(), gradients, strict=True)
        }


def adapt_steps(
    policy: nn.Module,
    episodes: Sequence[TaskEpisodes],
    params: Params | None = None,
    *,
    step_sizes: float | Sequence[float],
    inner_loss: InnerLoss = reinforce,
    first_order: bool = False,
    create_graph: bool | None = None,
) -> dict[str, Tensor]:
    """Take one gradient step per batch of episodes, each from where the last one ended; see `adapt`.

    Args:
        policy: see `adapt`.
        episodes: for each step those that were sampled under the parameters before it.
        params: see `adapt`.
        step_sizes: one for all steps, or one for each.
        inner_loss: see `adapt`.
        first_order: see `adapt`.
        create_graph: see `adapt`.

    Raises:
        ValueError: If there are no episodes, or not as many as step sizes.
    """
    if not episodes:
        raise ValueError("expected the episodes of at least one inner step, got none")
    sizes = per_step(step_sizes, len(episodes))
    for batch, step_size in zip(episodes, sizes, strict=True):
        params = adapt(
            policy,
            batch,
            params,
            step_size=step_size,
            inner_loss=inner_loss,
            first_order=first_order,
            create_graph=create_graph,
        )
    return dict(_start(policy, params))


def per_step(step_sizes: float | Sequence[float], num_steps: int) -> tuple[float, ...]:
    """Return one step size for each of `num_steps` inner steps.

    Raises:
        ValueError: If a sequence has another length.
    """
    if isinstance(step_sizes, int | float):
        return (float(step_sizes),) * num_steps
    if len(step_sizes) != num_steps:
        raise ValueError(
            f"expected the episodes of {len(step_sizes)} inner steps, one for each of the step sizes "
            f"{list(step_sizes)}, got {num_steps}"
        )
    return tuple(float(size) for size in step_sizes)


def check_advantages(episodes: TaskEpisodes, name: str) -> None:
    """Refuse episodes without advantages.

    Raises:
        ValueError: If they have none; `name` says in the message which they are.
    """
    try:
        _ = episodes.advantages
    except RuntimeError as error:
        raise ValueError(f"{name} without advantages; call compute_advantages(baseline, gamma=...) first") from error


class Adaptation:
    """A chunk of tasks after the inner loop, and the Jacobian J of each task's parameters with respect to theta.

    J is the product of one factor I - step_size * H per step, H the Hessian of its inner loss; each is symmetric.
    """

    def __init__(self, trajectory: list[Tensor], steps: Sequence[tuple[Linearization, float]]) -> None:
        self.trajectory = trajectory
        self._steps = steps

    @property
    def parameters(self) -> Tensor:
        """The adapted parameters, (k, D)."""
        return self.trajectory[-1]

    def push_forward(self, vectors: Tensor, workspace: Workspace) -> Tensor:
        """Return J v, (k, D): how the adapted parameters move when theta moves along `vectors` (k, D)."""
        for step, step_size in self._steps:
            vectors = vectors - step_size * step.hessian_product(vectors, workspace)
        return vectors

    def pull_back(self, vectors: Tensor, workspace: Workspace) -> Tensor:
        """Return J^T v, (k, D): from gradients in the adapted parameters to gradients in theta."""
        for step, step_size in reversed(self._steps):
            vectors = vectors - step_size * step.hessian_product(vectors, workspace)
        return vectors


class InnerLoop:
    """The inner loop of a chunk of k tasks.

    Args:
        steps: for each inner step the policy on its episodes.
        step_sizes: one for each.
        inner_loss: see `adapt`.
        first_order: take every Hessian, and so J - I, for zero.
    """

    def __init__(
        self,
        steps: Sequence[PolicyOnSamples],
        step_sizes: Sequence[float],
        inner_loss: InnerLoss = reinforce,
        *,
        first_order: bool = False,
    ) -> None:
        self._steps = list(zip(steps, step_sizes, strict=True))
        self._inner_loss, self._first_order = inner_loss, first_order

    def run(self, start: Tensor, workspace: Workspace) -> Tensor:
        """Return the adapted parameters (k, D) from `start` (k, D), and keep nothing."""
        for step, step_size in self._steps:
            gradient = self._differentiate(step, step.at(start, workspace), workspace)
            start = start - step_size * gradient
        return start

    def linearise(self, start: Tensor, workspace: Workspace, trajectory: list[Tensor] | None = None) -> Adaptation:
        """Adapt from `start` (k, D), and keep what products with the Jacobian need.

        Args:
            start: (k, D).
            workspace: of the calling thread.
            trajectory: phi_0 ... phi_K, if they are known: then the Jacobian is computed along them.
        """
        if self._first_order:
            return Adaptation(trajectory or [start, self.run(start, workspace)], [])
        points, kept = [start], []
        for index, (step, step_size) in enumerate(self._steps):
            linearisation = step.at(points[-1], Workspace())
            gradient = self._differentiate(step, linearisation, workspace, twice=True)
            points.append(points[-1] - step_size * gradient if trajectory is None else trajectory[index + 1])
            kept.append((linearisation, step_size))
        return Adaptation(points, kept)

    def _differentiate(
        self, step: PolicyOnSamples, linearisation: Linearization, workspace: Workspace, *, twice: bool = False
    ) -> Tensor:
        return linearisation.differentiate(
            lambda log_probs: self._inner_loss(log_probs, step.samples), workspace, twice=twice
        )[1]


def _start(policy: nn.Module, params: Params | None) -> Params:
    return dict(policy.named_parameters()) if params is None else params


def _adapt_in_chunks(
    policy: Policy, episodes: TaskEpisodes, stacked: Params, step_size: float, inner_loss: InnerLoss
) -> dict[str, Tensor]:
    layout = ParameterLayout(policy)
    start = layout.flatten(stacked)

    def adapt_chunk(tasks: slice, workspace: Workspace) -> Tensor:
        samples = Samples.of(episodes, tasks, dtype=start.dtype, device=start.device)
        return InnerLoop([PolicyOnSamples(policy, layout, samples)], [step_size], inner_loss).run(
            start[tasks], workspace
        )

    samples_per_task = episodes.rewards.shape[1] * episodes.rewards.shape[2]
    with ChunkWorkers(start.device) as workers:
        chunks = cut(len(episodes), samples_per_task, layout.width, start.device)
        adapted = torch.cat(workers.map(adapt_chunk, chunks))
    return {name: param.contiguous() for name, param in layout.views(adapted).items()}
