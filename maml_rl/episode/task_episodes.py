"""Episodes as tensors: `TaskEpisodes` (M, T, B, ...) of a batch of tasks, `BatchEpisodes` (T, B, ...) of one task.

M tasks, T time steps, B episodes per task. Every entry past the end of an episode is padding, and zero.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from maml_rl.arrays import to_device
from maml_rl.compat import AppendedEpisodes, Array
from maml_rl.envs.meta_env import Task
from maml_rl.episode.advantages import Baseline, EstimatedEpisodes, estimate_advantages, known_gamma
from maml_rl.machine import single_threaded

__all__ = ["Baseline", "BatchEpisodes", "TaskEpisodes"]

# What the digest covers: the sampled data, not what is derived from them.
_SAMPLED = ("observations", "actions", "rewards", "lengths", "terminated", "truncated", "final_observations")
_EPISODEWISE = ("lengths", "terminated", "truncated", "final_observations")


class TaskEpisodes(EstimatedEpisodes):
    """Episodes of a batch of tasks, as tensors; every computation covers all tasks at once.

    NumPy arrays are wrapped, not copied. The steps past the longest episode are cut off, so that the same episodes
    always have the same shape. Further arguments are the attributes of the same name, as far as they are known.

    Args:
        observations: (M, T, B, *observation shape), seen before each action.
        actions: (M, T, B, *action shape), as the policy returned them.
        rewards: (M, T, B), kept as float32.
        lengths: (M, B) number of real steps.
        terminated: (M, B) whether the episode ended in a terminal state.
        truncated: (M, B) whether it was cut off, by a time limit or by the sampler's horizon.
        final_observations: (M, B, *observation shape), seen after the last step.
        longest: length of the longest episode, where that is known; the lengths are then taken as they are, so that
            nothing waits for a device that has them.

    Attributes:
        infos: numbers from the environments' infos by name, kept as float32: (M, T, B) for those recorded at every
            step, (M, B) for those recorded at the end of an episode.
        log_probs: (M, T, B) log-probabilities recorded while sampling, or None.
        memory: the policy's memory before each action, tensors (M, T, B, *memory of one slot), or None.
        tasks: the M tasks.
        gamma: discount of `returns` and `advantages`.
        fast_lr: step size of the adaptation that these episodes were sampled for.
        rule: name of that adaptation's rule; see `AdaptationRule.name`.
        horizon: length of the longest possible episode, in steps. It determines the chunks of the update, so that they
            are known before anything is sampled; None for the T of the given arrays.
        mask: (M, T, B) float32, 1 for real steps, 0 for padding.
        first_task: of a `part`, the number of its first task in the whole batch.
        chunks: of the tasks of one host, the ranges of tasks that adaptation and update process together; None where
            the chunks are cut from the batch itself.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    def __init__(
        self,
        observations: Array,
        actions: Array,
        rewards: Array,
        lengths: Array,
        terminated: Array,
        truncated: Array,
        final_observations: Array,
        *,
        longest: int | None = None,
        infos: Mapping[str, Array] | None = None,
        log_probs: Array | None = None,
        memory: Sequence[Array] | None = None,
        tasks: Sequence[Task] = (),
        gamma: float | None = None,
        fast_lr: float | None = None,
        rule: str | None = None,
        horizon: int | None = None,
    ) -> None:
        self.lengths = as_tensor(lengths).long()
        self.terminated, self.truncated = as_tensor(terminated).bool(), as_tensor(truncated).bool()
        self.final_observations = as_tensor(final_observations)
        self.rewards = as_tensor(rewards)
        self.observations, self.actions = as_tensor(observations), as_tensor(actions)
        if self.rewards.dim() != 3:
            raise ValueError(f"rewards must have the shape (M, T, B), got {tuple(self.rewards.shape)}")
        self.log_probs = None if log_probs is None else as_tensor(log_probs)
        self.memory = None if memory is None else tuple(as_tensor(part) for part in memory)
        self.infos = {name: as_tensor(array).float() for name, array in (infos or {}).items()}
        self.tasks, self.gamma, self.fast_lr, self.rule = tuple(tasks), gamma, fast_lr, rule
        self.horizon = self.rewards.shape[1] if horizon is None else horizon
        _check_shapes(self)
        if longest is None:
            _check_lengths(self.lengths, self.rewards.shape[1])
        steps = int(self.lengths.max()) if longest is None else longest
        vars(self).update(self._each(lambda stepwise, tensor: _cut(tensor, steps, stepwise)))
        self.rewards, self.mask = self.rewards.float(), make_mask(self.lengths, steps)
        self.first_task = 0
        self.chunks: tuple[slice, ...] | None = None
        self._advantages: Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        num_tasks, steps, batch_size = self.rewards.shape
        mean = float(self.episode_returns().double().mean())
        return f"TaskEpisodes(M={num_tasks}, T={steps}, B={batch_size}, mean return {mean:.4g})"

    def __getitem__(self, index: int) -> "BatchEpisodes":
        """Return the episodes of one task, as views."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return BatchEpisodes.view(self, index)

    def __iter__(self) -> Iterator["BatchEpisodes"]:
        return (self[index] for index in range(len(self)))

    def _each(self, function: Callable[..., Tensor], others: Sequence["TaskEpisodes"] = ()) -> dict[str, Any]:
        """Return what a function makes of each array, and of the same ones of other batches, by attribute.

        Args:
            function: its arguments are whether the arrays have an axis of steps, (M, T, B, ...), and the arrays.
            others: with the same arrays.
        """
        batches = (self, *others)
        made: dict[str, Any] = {
            name: function(name not in _EPISODEWISE, *(vars(batch)[name] for batch in batches))
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        if self.memory is not None:
            memories = zip(*(batch.memory or () for batch in batches), strict=True)
            made["memory"] = tuple(function(True, *tensors) for tensors in memories)
        made["infos"] = {
            name: function(info.dim() == 3, *(batch.infos[name] for batch in batches))
            for name, info in self.infos.items()
        }
        return made

    @classmethod
    def join(cls, batches: Sequence["TaskEpisodes"]) -> "TaskEpisodes":
        """Join batches in their order; the arrays are copied, and those of shorter episodes padded."""
        first, *others = batches
        counts, steps = [len(batch) for batch in batches], max(batch.rewards.shape[1] for batch in batches)

        def cat(stepwise: bool, *tensors: Tensor) -> Tensor:
            if not stepwise:
                return torch.cat(tensors)
            joined = tensors[0].new_zeros((sum(counts), steps, *tensors[0].shape[2:]))
            for rows, tensor in zip(joined.split(counts), tensors, strict=True):
                rows[:, : tensor.shape[1]] = tensor
            return joined

        joined = copy.copy(first)
        vars(joined).update(first._each(cat, others))
        joined.tasks = tuple(task for batch in batches for task in batch.tasks)
        joined.first_task, joined.chunks = 0, None
        return joined

    def part(self, tasks: slice) -> "TaskEpisodes":
        """Return the episodes of a range of tasks, cut to the longest of them; observations and actions are views."""
        start, stop, _ = tasks.indices(len(self))
        steps = int(self.lengths[start:stop].max())
        part = copy.copy(self)
        vars(part).update(self._each(lambda stepwise, tensor: _cut(tensor[start:stop], steps, stepwise)))
        # The memory layout is that of the same tasks alone: it can change the order of a sum, and so its rounding.
        part.rewards = part.rewards.contiguous()
        part.infos = {name: info.contiguous() for name, info in part.infos.items()}
        part.tasks, part.first_task, part.chunks = self.tasks[start:stop], self.first_task + start, None
        return part

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.rewards.device

    @property
    def num_steps(self) -> int:
        """Number of real steps of all tasks and episodes together."""
        return int(self.lengths.sum())

    @property
    def next_observations(self) -> Tensor:
        """(M, T, B, *observation shape), seen after each action; computed at each access."""
        following = torch.zeros_like(self.observations)
        following[:, :-1] = self.observations[:, 1:]
        index = _last_steps(self.lengths).reshape(len(self), 1, -1, *(1,) * (following.dim() - 3))
        final = self.final_observations.unsqueeze(1)
        return following.scatter_(1, index.expand_as(final), final)

    @property
    def terminations(self) -> Tensor:
        """(M, T, B) bool, whether a step led to a terminal state: `terminated` for every step."""
        return _at_last_step(self, self.terminated)

    @property
    def truncations(self) -> Tensor:
        """(M, T, B) bool, whether the episode was truncated after a step: `truncated` for every step."""
        return _at_last_step(self, self.truncated)

    def episode_returns(self) -> Tensor:
        """Return the undiscounted sum of rewards of each episode, (M, B)."""
        return self.rewards.sum(1)

    def episode_infos(self) -> dict[str, Tensor]:
        """Return each info as one number per episode, (M, B): the mean over its steps, or its value at the end."""
        return {
            name: info.sum(1) / self.lengths.clamp(min=1) if info.dim() == 3 else info
            for name, info in self.infos.items()
        }

    @single_threaded()
    def compute_advantages(
        self,
        baseline: Baseline | None,
        *,
        gamma: float | None = None,
        gae_lambda: float = 1.0,
        normalize: bool = True,
        bootstrap: bool = True,
        fit: bool = True,
    ) -> Tensor:
        """Fit the baseline to these episodes, and estimate the advantages by GAE with its values.

        The value after the last step of a terminated episode is zero. A truncated episode would have received more
        reward: with `bootstrap` the baseline's value of the final observation replaces it; without, truncation is
        treated as termination, as in earlier systems. The baseline itself is fitted to the plain returns in both cases;
        `LinearFeatureBaseline` explains why.

        Args:
            baseline: predicts values; None for zero everywhere.
            gamma: discount per step, kept in `gamma`; the current one by default.
            gae_lambda: in [0, 1].
            normalize: give the real steps of each task mean 0 and standard deviation 1.
            bootstrap: whether to add the value of the final observation where an episode was truncated.
            fit: whether to fit the baseline first.

        Returns:
            (M, T, B) advantages, zero on padding; also kept in `advantages`.

        Raises:
            ValueError: If there is no `gamma`, or a factor is outside [0, 1].
        """
        self.gamma = known_gamma(self.gamma if gamma is None else gamma)
        if fit and baseline is not None:
            baseline.fit(self)
        self._advantages = estimate_advantages(self, baseline, self.gamma, gae_lambda, normalize, bootstrap)
        return self._advantages

    def to(self, device: torch.device | str) -> "TaskEpisodes":
        """Return the same episodes on `device`; tensors already on it are shared.

        They go to a GPU through pinned memory, without waiting for it.
        """
        moved, target = copy.copy(self), torch.device(device)
        vars(moved).update(self._each(lambda _, tensor: to_device(tensor, target)))
        return moved

    def digest(self) -> str:
        """Return the SHA-256, in hex, over names, types, shapes and bytes of the sampled arrays, infos included.

        It depends on neither the device, nor the number of padded steps, nor the advantages.
        """
        digest = hashlib.sha256()
        sampled = {name: getattr(self, name) for name in _SAMPLED}
        sampled |= {f"info {name}": self.infos[name] for name in sorted(self.infos)}
        for name, tensor in sampled.items():
            array = np.ascontiguousarray(tensor.detach().cpu().numpy())
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(array.data)
        return digest.hexdigest()

    @classmethod
    def stack(cls, batches: "TaskEpisodes | Sequence[BatchEpisodes]") -> "TaskEpisodes":
        """Stack the episodes of single tasks, unless they are stacked; arrays are copied, shorter ones padded.

        Raises:
            ValueError: If there is none, if they differ in the number of episodes, in gamma, fast_lr or rule, or if
                only some have log-probabilities, advantages or memory.
        """
        if isinstance(batches, TaskEpisodes):
            return batches
        if not batches:
            raise ValueError("expected the episodes of at least one task, got none")
        for name in ("batch_size", "gamma", "fast_lr", "rule"):
            values = {getattr(batch, name) for batch in batches}
            if len(values) > 1:
                raise ValueError(f"episodes of different {name} cannot be stacked: {sorted(values, key=str)}")
        names = {tuple(sorted(batch.infos)) for batch in batches}
        if len(names) > 1:
            raise ValueError(f"episodes of different infos cannot be stacked: {sorted(names)}")
        for name in ("log_probs", "memory", "_advantages"):
            have = sum(getattr(batch, name) is not None for batch in batches)
            if 0 < have < len(batches):
                raise ValueError(
                    f"either all episodes must have {name.strip('_')}, or none; {have} of {len(batches)} have"
                )
        episodes = cls.join([_of_one_task(batch) for batch in batches])
        tasks = [batch.task for batch in batches if batch.task is not None]
        episodes.tasks = tuple(tasks) if len(tasks) == len(batches) else ()
        known = [batch.horizon for batch in batches if batch.horizon is not None]
        episodes.horizon = max(known, default=episodes.rewards.shape[1])
        return episodes


class BatchEpisodes(AppendedEpisodes, EstimatedEpisodes):
    """Episodes of one task; every entry past the end of an episode is zero.

    They are views of `TaskEpisodes`, or are appended step by step.

    Args:
        batch_size: B, number of episodes.
        gamma: discount of `returns` and `advantages`.
        device: where the tensors are.
        task: the task of the episodes.

    Attributes:
        terminated: (B,) bool whether the episode ended in a terminal state.
        truncated: (B,) bool whether it was cut off.
        infos: numbers recorded from the environments' infos, by name: (T, B) for every step or (B,) for the last.
        log_probs: (T, B) log-probabilities recorded while sampling, or None.
        memory: the policy's memory before each action, tensors (T, B, *memory of one slot), or None.
        fast_lr: step size of the adaptation that these episodes were sampled for, or None.
        rule: name of that adaptation's rule, or None.
        horizon: length of the longest possible episode, in steps, or None.

    Raises:
        ValueError: If `batch_size` is not positive.
    """

    def __init__(
        self,
        batch_size: int,
        gamma: float | None = 0.95,
        device: torch.device | str = "cpu",
        *,
        task: Task | None = None,
    ) -> None:
        super().__init__(batch_size, device)
        self.gamma = gamma
        self.task = task
        self.fast_lr: float | None = None
        self.rule: str | None = None
        self.horizon: int | None = None
        self.log_probs: Tensor | None = None
        self.memory: tuple[Tensor, ...] | None = None
        self.infos: dict[str, Tensor] = {}

    @classmethod
    def view(cls, batch: TaskEpisodes, index: int) -> Self:
        """Return the episodes of one task of `TaskEpisodes`, without a copy; the first `append` copies them."""
        steps = int(batch.lengths[index].max())
        arrays = batch._each(lambda stepwise, tensor: tensor[index, :steps] if stepwise else tensor[index])
        task = batch.tasks[index] if batch.tasks else None
        episodes = cls(len(arrays["lengths"]), batch.gamma, batch.device, task=task)
        for name in ("lengths", "terminated", "truncated", "log_probs", "_advantages", "memory", "infos"):
            setattr(episodes, name, arrays.get(name))
        episodes._stored = {name: arrays[name] for name in ("observations", "actions", "rewards")}
        episodes._final_observations = arrays["final_observations"]
        episodes.fast_lr, episodes.rule, episodes.horizon = batch.fast_lr, batch.rule, batch.horizon
        return episodes

    def __repr__(self) -> str:
        mean = f", mean return {float(self.episode_returns().double().mean()):.4g}" if "rewards" in self._stored else ""
        return f"BatchEpisodes(T={len(self)}, B={self.batch_size}{mean})"

    @property
    def observations(self) -> Tensor:
        """(T, B, *observation shape), seen before each action."""
        return self._read("observations")

    @property
    def actions(self) -> Tensor:
        """(T, B, *action shape)."""
        return self._read("actions")

    @property
    def rewards(self) -> Tensor:
        """(T, B) float32."""
        return self._read("rewards")

    @property
    def mask(self) -> Tensor:
        """(T, B) float32, 1 for real steps, 0 for padding."""
        return make_mask(self.lengths, len(self))

    def episode_returns(self) -> Tensor:
        """Return the undiscounted sum of rewards of each episode, (B,)."""
        return self.rewards.sum(0)

    @single_threaded()
    def compute_advantages(
        self,
        baseline: Baseline | None,
        gae_lambda: float = 1.0,
        normalize: bool = True,
        *,
        bootstrap: bool = True,
        fit: bool = False,
    ) -> Tensor:
        """Estimate the advantages by GAE with the values of `baseline`, which the caller has fitted.

        The arguments are those of `TaskEpisodes.compute_advantages`, without a discount.

        Returns:
            (T, B) advantages, zero on padding; also kept in `advantages`.
        """
        gamma = known_gamma(self.gamma)
        if fit and baseline is not None:
            baseline.fit(self)
        self._advantages = estimate_advantages(self, baseline, gamma, gae_lambda, normalize, bootstrap)
        return self._advantages


def make_mask(lengths: Tensor, num_steps: int) -> Tensor:
    """Return the mask (..., T, B) float32 of episodes of the given lengths (..., B)."""
    steps = torch.arange(num_steps, device=lengths.device).unsqueeze(-1)
    return (steps < lengths.unsqueeze(-2)).float()


def as_tensor(array: Array) -> Tensor:
    """Return an array as a tensor, without a copy where that is possible."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    # torch can share neither a read-only array nor one with negative strides.
    shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shareable else array.copy())


def _of_one_task(batch: BatchEpisodes) -> TaskEpisodes:
    arrays: dict[str, Any] = {name: getattr(batch, name)[None] for name in _SAMPLED}
    one = TaskEpisodes(
        **arrays,
        infos={name: info[None] for name, info in batch.infos.items()},
        log_probs=None if batch.log_probs is None else batch.log_probs[None],
        memory=None if batch.memory is None else [part[None] for part in batch.memory],
        gamma=batch.gamma,
        fast_lr=batch.fast_lr,
        rule=batch.rule,
        longest=len(batch),
    )
    one._advantages = None if batch._advantages is None else batch._advantages[None]
    return one


def _cut(tensor: Tensor, steps: int, stepwise: bool) -> Tensor:
    return tensor[:, :steps] if stepwise else tensor


def _check_shapes(episodes: TaskEpisodes) -> None:
    num_tasks, steps, num_episodes = episodes.rewards.shape
    if num_tasks == 0 or num_episodes == 0:
        raise ValueError(f"expected at least one task and one episode, got {num_tasks} and {num_episodes}")
    for name, array in vars(episodes).items():
        if isinstance(array, Tensor):
            _check_lead(name, array, (num_tasks, *(() if name in _EPISODEWISE else (steps,)), num_episodes))
    for remembered in episodes.memory or ():
        _check_lead("memory", remembered, (num_tasks, steps, num_episodes))
    for name, info in episodes.infos.items():
        lead = (num_tasks, steps, num_episodes) if info.dim() == 3 else (num_tasks, num_episodes)
        if tuple(info.shape) != lead:
            raise ValueError(
                f"the info {name!r} must have the shape {(num_tasks, steps, num_episodes)} or "
                f"{(num_tasks, num_episodes)}, got {tuple(info.shape)}"
            )
    if episodes.tasks and len(episodes.tasks) != num_tasks:
        raise ValueError(f"expected {num_tasks} tasks, one per row of the arrays, got {len(episodes.tasks)}")


def _check_lead(name: str, array: Tensor, lead: tuple[int, ...]) -> None:
    if tuple(array.shape[: len(lead)]) != lead:
        raise ValueError(f"{name} must have the leading axes {lead}, got the shape {tuple(array.shape)}")


def _check_lengths(lengths: Tensor, steps: int) -> None:
    if lengths.max() == 0:
        raise ValueError("expected at least one step, but every episode has length 0")
    if lengths.min() < 0 or lengths.max() > steps:
        raise ValueError(f"lengths must be in [0, {steps}], got {lengths.min()} to {lengths.max()}")


def _last_steps(lengths: Tensor) -> Tensor:
    return (lengths - 1).clamp(min=0)


def _at_last_step(episodes: TaskEpisodes, flags: Tensor) -> Tensor:
    """Return flags (M, B) as flags of the last steps, (M, T, B)."""
    stepwise = torch.zeros_like(episodes.rewards, dtype=torch.bool)
    return stepwise.scatter_(1, _last_steps(episodes.lengths).unsqueeze(1), flags.unsqueeze(1))
