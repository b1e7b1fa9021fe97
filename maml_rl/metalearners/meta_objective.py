"""The meta-objective on all tasks of an update: cut into chunks, computed in parallel, summed in a fixed order."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, InnerLoop, flat_step_size, is_of_log_probs
from maml_rl.derivatives import (
    ChunkWorkers,
    ParameterLayout,
    PolicyOnSamples,
    Samples,
    chunks_of,
    every_nth,
    number_kept,
)
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.losses import OuterObjective
from maml_rl.metalearners.task_chunk import TaskChunk
from maml_rl.policies import Policy

# Bytes of intermediate results that may be kept between curvature products; what does not fit is computed again.
_CACHE = 1 << 30
# Numbers kept per unit and sample: value and delta.
_KEPT = 2


class MetaObjective:
    """Mean over tasks of the loss after adaptation, as a function of the initial parameters theta.

    Parameters and gradients are float64 vectors (D,) on the CPU, where the optimizer's few vector operations take no
    time and lose no digits; inside, everything is computed on `device` in the precision of the policy. The result
    depends neither on the number of cores nor on which chunk is finished first.

    Args:
        policy: any policy.
        train: for each inner step the episodes of all tasks.
        valid: the episodes of all tasks after the last.
        rule: of the inner steps.
        objective: outer objective.
        first_order: ignore second derivatives of the inner loss.
        curvature_fraction: share of each task's episodes that the curvature is computed from.
        device: where to compute.
        tasks_per_chunk: by default what `chunks_of` says.
        cache: bytes that may be kept between curvature products.
        automatic: differentiate automatically, whatever the policy.
    """

    def __init__(
        self,
        policy: Policy,
        train: Sequence[TaskEpisodes],
        valid: TaskEpisodes,
        *,
        rule: AdaptationRule,
        objective: OuterObjective,
        first_order: bool = False,
        curvature_fraction: float = 1.0,
        device: torch.device,
        tasks_per_chunk: int | None = None,
        cache: int = _CACHE,
        automatic: bool = False,
    ) -> None:
        self._policy, self._device = policy, device
        self._layout = ParameterLayout(policy)
        self._train, self._valid = train, valid
        self._inner_loss, self._objective, self._first_order = rule.inner_loss, objective, first_order
        self._curvature_fraction, self._automatic = curvature_fraction, automatic
        self._num_tasks = len(valid)
        self._dtype = next(policy.parameters()).dtype
        like = torch.empty(0, dtype=self._dtype, device=device)
        self._step_sizes = [flat_step_size(size, self._layout, like) for size in rule.step_sizes(len(train))]
        self._tasks_per_chunk, self._cache = tasks_per_chunk, cache
        self._workers = ChunkWorkers(device)
        self._chunks: list[TaskChunk] = []
        self._curvature_chunks: list[TaskChunk] = []
        self._anchored: tuple[Tensor, float, Tensor] | None = None

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._workers.__exit__(kind, error, traceback)
        self._chunks, self._curvature_chunks, self._anchored = [], [], None

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

    def anchor(self, theta: Tensor) -> None:
        """Make `theta` (D,) the old parameters, which ratios and divergences of what follows are taken against.

        Raises:
            NonFiniteError: As `gradient`.
        """
        fraction = self._curvature_fraction
        self._chunks = self._make_chunks(1.0, keep=fraction == 1.0)
        self._anchored = None
        # The pass that computes the old policy's outputs also gives the gradient there, which is usually needed next.
        self._anchored = theta.clone(), *self._differentiate(theta, anchor=True)
        self._curvature_chunks = self._chunks
        if fraction < 1.0:
            # Along the adaptation to all episodes.
            self._curvature_chunks = self._make_chunks(fraction, keep=True)
            for chunk, whole in zip(self._curvature_chunks, self._chunks, strict=True):
                chunk.follow(whole.trajectory)

    def gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """Return loss and gradient (D,) at `theta` (D,), against the old parameters.

        Raises:
            NonFiniteError: If one of them is not finite.
            RuntimeError: If there are no old parameters yet.
        """
        if self._anchored is None:
            raise RuntimeError("anchor must be called first")
        anchor, loss, gradient = self._anchored
        return (loss, gradient) if torch.equal(theta, anchor) else self._differentiate(theta, anchor=False)

    def _differentiate(self, theta: Tensor, *, anchor: bool) -> tuple[float, Tensor]:
        local = self._local(theta)
        results = self._workers.map(
            lambda chunk, workspace: chunk.differentiate(local, workspace, anchor=anchor), self._chunks
        )
        losses, gradients = zip(*results, strict=True)
        all_losses, gradient = torch.cat(losses), self._mean(gradients)
        if not bool(all_losses.isfinite().all()):
            bad = (~all_losses.isfinite()).nonzero().flatten().tolist()
            raise NonFiniteError(
                f"the loss after adaptation is not finite for the tasks {bad}; look for NaN in their advantages, "
                "or use a smaller fast_lr"
            )
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(
                "the meta-gradient is not finite though the losses are; look for overflow in the inner loop, where a "
                "smaller fast_lr may help"
            )
        return self._average(losses), gradient

    def curvature_product(self, vector: Tensor) -> Tensor:
        """Return the Hessian of the mean KL(old, new) at the old parameters, times `vector`; both (D,).

        Raises:
            NonFiniteError: If the product is not finite.
        """
        local = self._local(vector)
        products = self._workers.map(
            lambda chunk, workspace: chunk.curvature_product(local, workspace), self._curvature_chunks
        )
        product = self._mean(products)
        if not bool(product.isfinite().all()):
            raise NonFiniteError(
                "the curvature of the divergence is not finite; look for a standard deviation close to zero, or use a "
                "smaller fast_lr"
            )
        return product

    def evaluate(self, theta: Tensor) -> tuple[float, float]:
        """Return the loss and the mean KL(old, new) at `theta` (D,)."""
        local = self._local(theta)
        results = self._workers.map(lambda chunk, workspace: chunk.evaluate(local, workspace), self._chunks)
        losses, kls = zip(*results, strict=True)
        return self._average(losses), self._average(kls)

    def _make_chunks(self, fraction: float, *, keep: bool) -> list[TaskChunk]:
        """Return chunks of all tasks with this share of their episodes; `keep` as far as the cache has room."""
        phases = (*self._train, self._valid)
        shapes = [episodes.rewards.shape for episodes in phases]
        samples = sum(steps * number_kept(num_episodes, fraction) for _, steps, num_episodes in shapes)
        bytes_per_task = samples * self._layout.units * _KEPT * self._dtype.itemsize
        keep_until = self._cache // max(1, bytes_per_task) if keep else 0
        slices = chunks_of(phases, self._layout.width, self._device)
        if (size := self._tasks_per_chunk) is not None:
            slices = [slice(start, min(start + size, self._num_tasks)) for start in range(0, self._num_tasks, size)]
        return [self._make_chunk(tasks, fraction, keep=tasks.stop <= keep_until) for tasks in slices]

    def _make_chunk(self, tasks: slice, fraction: float, *, keep: bool) -> TaskChunk:
        # Only losses of log-probabilities are differentiated by hand.
        automatic = self._automatic or not is_of_log_probs(self._inner_loss)
        steps = [self._on_samples(episodes, tasks, fraction, automatic=automatic) for episodes in self._train]
        inner = InnerLoop(steps, self._step_sizes, self._inner_loss, first_order=self._first_order)
        valid = self._on_samples(self._valid, tasks, fraction, automatic=self._automatic)
        return TaskChunk(tasks, inner, valid, self._objective, keep=keep)

    def _on_samples(self, episodes: TaskEpisodes, tasks: slice, fraction: float, *, automatic: bool) -> PolicyOnSamples:
        columns = every_nth(episodes.rewards.shape[2], fraction)
        samples = Samples.of(episodes, tasks, columns=columns, dtype=self._dtype, device=self._device)
        return PolicyOnSamples(self._policy, self._layout, samples, automatic=automatic)

    def _local(self, vector: Tensor) -> Tensor:
        return vector.to(self._device, self._dtype)

    def _mean(self, sums: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.to("cpu", torch.float64) for part in sums]).sum(0) / self._num_tasks

    def _average(self, parts: Sequence[Tensor]) -> float:
        return torch.cat([part.to("cpu", torch.float64) for part in parts]).mean().item()
