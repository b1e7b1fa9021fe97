"""Batched inference for a rollout: every task under its own parameters, every slot with its own memory.

The noise of actions is keyed by task, episode and step, and drawn ahead. What acts on an accelerator gets what it sees
in one transfer a step, through pinned memory.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.errors import NonFiniteError
from maml_rl.policies import Memory, Policy
from maml_rl.policies.distributions import middle_of
from maml_rl.policies.policy import greedy, perform
from maml_rl.samplers.phase import Phase, task_ranges
from maml_rl.samplers.rollout.recorder import SlotIndex, numbers_of
from maml_rl.spaces import array_layout

# Slots of the trial call: an unusual number, so that a wrong axis shows.
_TRIED = 3
# Noise is drawn for as many steps at once as take this many blocks of four numbers: enough to amortize the call,
# little enough to stay in the cache.
_BLOCKS_PER_SPAN = 16_384
# Spans that are kept where slots step together, of a wave and a step, and where each slot is at a step of its own;
# others are drawn again.
_SPANS_KEPT, _SPANS_KEPT_BY_SLOT = 2, 32


class EpisodeNoise:
    """The action noise of the slots of a phase, in spans of steps.

    Args:
        phase: of the slots.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase, num_slots = phase, phase.own_slots.stop - phase.own_slots.start
        self._steps_per_span = max(1, _BLOCKS_PER_SPAN // max(1, num_slots * -(-phase.policy.noise_size // 4)))
        # By wave and number. The first goes first: of many that are in use in turn, most are found again.
        self._spans: dict[tuple[int, int], NDArray[np.float32]] = {}
        self._middle: NDArray[np.float32] | None = None
        if phase.deterministic:
            shape = num_slots, phase.policy.noise_size
            self._middle = np.full(shape, middle_of(phase.policy.noise_kind), np.float32)

    def rows(
        self, slots: SlotIndex, waves: int | NDArray[np.int64], steps: int | NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return the noise of `slots` in their waves, before their steps, (len(slots), noise_size)."""
        if self._middle is not None:
            return self._middle[slots]
        if isinstance(waves, int) and isinstance(steps, int):
            return self._at(waves, steps, _SPANS_KEPT)[slots]
        numbers, horizon = numbers_of(slots), self._phase.horizon
        waves, steps = np.broadcast_to(waves, len(numbers)), np.broadcast_to(steps, len(numbers))
        rows = np.zeros((len(numbers), self._phase.policy.noise_size), np.float32)
        # Episodes that are over may have all their steps behind them.
        for place in np.unique((waves * horizon + steps)[steps < horizon]).tolist():
            wave, step = divmod(place, horizon)
            chosen = (waves == wave) & (steps == step)
            rows[chosen] = self._at(wave, step, _SPANS_KEPT_BY_SLOT)[numbers[chosen]]
        return rows

    def _at(self, wave: int, step: int, num_kept: int) -> NDArray[np.float32]:
        """Return the noise of all slots in one step of a wave, from a span of which `num_kept` are kept."""
        span, offset = divmod(step, self._steps_per_span)
        if (wave, span) not in self._spans:
            while len(self._spans) >= num_kept:
                del self._spans[min(self._spans)]
            start = span * self._steps_per_span
            stop = min(start + self._steps_per_span, self._phase.horizon)
            self._spans[wave, span] = self._draw(wave, range(start, stop))
        rows: NDArray[np.float32] = self._spans[wave, span][offset]
        return rows

    def _draw(self, wave: int, steps: range) -> NDArray[np.float32]:
        """Return the noise of a span of steps of a wave, (len(steps), slots, noise_size)."""
        phase, parts = self._phase, []
        first, size = wave * phase.per_task, phase.policy.noise_size
        for tasks, places in task_ranges(phase.own_slots, phase.per_task):
            streams = phase.streams._replace(first_task=phase.streams.first_task + tasks.start)
            num_tasks, episodes = tasks.stop - tasks.start, range(first + places.start, first + places.stop)
            noise = streams.action_noise(phase.policy.noise_kind, num_tasks, episodes, steps, size)
            parts.append(noise.reshape(len(steps), num_tasks * len(episodes), size))
        return np.concatenate(parts, 1)


# A tensor may begin wherever its largest number may.
_ALIGNMENT = 16


class DeviceLink:
    """Carries observations and noise to a device, packed as bytes into one transfer, and brings actions back.

    Pages that are pinned cannot be swapped out, so that the device copies from and to them directly. The workers'
    shared memory is not pinned: its pages belong to several processes.

    Args:
        observations: (N, *obs), for its shape and type.
        noise_size: numbers of noise per row.
        device: any but the CPU.
    """

    def __init__(self, observations: NDArray[Any], noise_size: int, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._row, self._dtype = observations.shape[1:], observations.dtype
        self._row_bytes = math.prod(self._row) * self._dtype.itemsize
        self._noise_size = noise_size
        num_rows = len(observations)
        size = self._noise_start(num_rows) + num_rows * noise_size * np.dtype(np.float32).itemsize
        self._outbox = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self._arrived = torch.empty(size, dtype=torch.uint8, device=device)
        self._bytes: NDArray[np.uint8] = self._outbox.numpy()
        self._torch_dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        self._num_rows = num_rows
        self._inbox: Tensor | None = None

    def send(self, observations: NDArray[Any], noise: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        """Return both on the device, valid until the next call.

        Args:
            observations: (n, *obs), n at most N.
            noise: (n, noise_size).
        """
        rows = len(observations)
        end, start = rows * self._row_bytes, self._noise_start(rows)
        stop = start + noise.nbytes
        self._bytes[:end].view(self._dtype).reshape(observations.shape)[...] = observations
        self._bytes[start:stop].view(np.float32).reshape(noise.shape)[...] = noise
        arrived = self._arrived[:stop]
        arrived.copy_(self._outbox[:stop], non_blocking=self._pinned)
        return (
            arrived[:end].view(self._torch_dtype).view(rows, *self._row),
            arrived[start:].view(torch.float32).view(rows, self._noise_size),
        )

    def fetch(self, actions: Tensor) -> NDArray[Any]:
        """Wait for `actions` (n, *act), and return them in host memory, where the next call overwrites them."""
        if self._inbox is None:
            shape = (self._num_rows, *actions.shape[1:])
            self._inbox = torch.empty(shape, dtype=actions.dtype, pin_memory=self._pinned)
        landed = self._inbox[: len(actions)]
        landed.copy_(actions, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()
        result: NDArray[Any] = landed.numpy()
        return result

    def _noise_start(self, num_rows: int) -> int:
        return -(-num_rows * self._row_bytes // _ALIGNMENT) * _ALIGNMENT


class Actor:
    """Turns the observations of slots into actions, one batched forward pass at a time.

    It carries the policy's memory of every slot, which changes only where a step is taken.

    The pass always takes whole tasks, (tasks, S, ...) against stacked parameters (tasks, ...): a task's rows are
    multiplied in the same shape and order whichever tasks are in the batch, which makes the actions for some
    workers bit-identical to those for all at once.

    Args:
        phase: its policy, parameters and noise; slots are numbered from the first of its own.
        device: where the policy runs.
        action_shape: of one action; None where the policy has acted before.
    """

    def __init__(self, phase: Phase, device: torch.device | str, action_shape: tuple[int, ...] | None = None) -> None:
        self._phase, self._device, self._noise = phase, torch.device(device), EpisodeNoise(phase)
        self._action_shape = action_shape
        self._grid, self._first = (len(phase.tasks), phase.per_task), phase.own_slots.start
        self._policy = greedy(phase.policy) if phase.deterministic else phase.policy
        of_phase, self._is_stacked = phase_parameters(self._policy, len(phase.tasks), phase.params)
        self._params = {name: value.detach().to(self._device) for name, value in of_phase.items()}
        # By range of tasks: with `recv_timeout` or groups, the policy acts for some workers at a time.
        self._actors: dict[tuple[int, int], Callable[..., tuple[Tensor, Memory]]] = {}
        # The memory of every slot now, and at the start of its episode: tensors (M, S, ...).
        self.memory: Memory = ()
        self._at_start: Memory = ()
        self._link: DeviceLink | None = None

    def observe(self, observations: NDArray[np.generic]) -> None:
        """Read observations (M * S, *obs) there from now on, at every call again."""
        self._observations = torch.from_numpy(observations).unflatten(0, self._grid)
        if self._link is None and self._device.type != "cpu":
            self._link = DeviceLink(observations, self._policy.noise_size, self._device)

    def begin_trial(self) -> None:
        """Empty the memory of all slots."""
        self.memory = self._at_start = initial_memory(self._policy, self._grid, self._device)

    def begin_episodes(self, slots: NDArray[np.intp] | None = None, *, forget: bool = False) -> None:
        """Keep the memory of slots where episodes begin, for episodes that must restart.

        Args:
            slots: where they begin; None for all.
            forget: whether a trial begins with them.
        """
        if slots is None:
            self._at_start = self.memory
            return
        if forget:
            self.memory = self._with_rows(slots, self.memory, initial_memory(self._policy, self._grid, self._device))
        self._at_start = self._with_rows(slots, self._at_start, self.memory)

    def begin_anew(self, slots: NDArray[np.intp]) -> None:
        """Restore the memory that `slots` had when their episodes began."""
        self.memory = self._with_rows(slots, self.memory, self._at_start)

    def _with_rows(self, slots: NDArray[np.intp], memory: Memory, other: Memory) -> Memory:
        """Return `memory` with the rows `slots` of `other`."""
        if not memory:
            return memory
        rows = np.zeros(self._grid, np.bool_)
        rows.reshape(-1)[slots + self._first] = True
        which = torch.from_numpy(rows).to(self._device)
        return tuple(chosen(which, new, old) for old, new in zip(memory, other, strict=True))

    def perform(self, actions: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return actions (slots, *act) as the environment gets them."""
        recorded = torch.from_numpy(actions)
        performed = perform(self._policy, recorded)
        return actions if performed is recorded else performed.numpy()

    def act(
        self,
        slots: SlotIndex,
        waves: int | NDArray[np.int64],
        steps: int | NDArray[np.int64],
        running: NDArray[np.bool_],
    ) -> NDArray[np.generic]:
        """Return the actions of `slots`, (len(slots), *act), which the next call may overwrite.

        For a range of slots the pass takes their tasks, for others all: an action does not depend on which others are
        ready.

        Args:
            slots: which.
            waves: numbers of their episodes in them.
            steps: numbers of their steps.
            running: (len(slots),) whether the slot's episode continues; only there the memory changes.

        Raises:
            ValueError: If the policy returns actions or a memory of another shape.
            NonFiniteError: If a parameter of its distribution is outside of its range.
        """
        noise = self._noise.rows(slots, waves, steps)
        (num_tasks, per_task), told = self._grid, self._policy.told_who_acts
        tasks = slice(0, num_tasks)
        if isinstance(slots, slice) and not told:
            start, stop = slots.start + self._first, slots.stop + self._first
            tasks = slice(start // per_task, -(-stop // per_task))
            rows: SlotIndex = slice(start - tasks.start * per_task, stop - tasks.start * per_task)
        else:
            rows = numbers_of(slots) + self._first
        num_rows = (tasks.stop - tasks.start) * per_task
        # A range that cuts a task still passes the whole task; the actions of the other rows are dropped.
        noise = noise if len(noise) == num_rows and isinstance(rows, slice) else _spread(noise, rows, num_rows)
        before = tuple(tensor[tasks] for tensor in self.memory)
        acting: tuple[Tensor, ...] = ()
        if told or before:
            acting = (torch.from_numpy(_spread(running, rows, num_rows)).unflatten(0, (-1, per_task)),)
        seen = self._observations if num_rows == num_tasks * per_task else self._observations[tasks]
        if self._link is None:
            noise_seen = torch.from_numpy(noise.reshape(-1, per_task, noise.shape[1]))
        else:
            sent = self._link.send(seen.flatten(0, 1).numpy(), noise)
            seen, noise_seen = (tensor.unflatten(0, (-1, per_task)) for tensor in sent)
        actions, after = self._choose(tasks, seen, noise_seen, before, *(acting if told else ()))
        if self._action_shape is not None:
            check_actions(self._policy, actions, (tasks.stop - tasks.start, per_task, *self._action_shape))
        if before or after:
            self._remember(tasks, before, _apart_from(after, seen, noise_seen), *acting)
        there: NDArray[np.generic] = actions.numpy() if self._link is None else self._link.fetch(actions.flatten(0, 1))
        return there.reshape(num_rows, *actions.shape[2:])[rows]

    def _choose(
        self, tasks: slice, observations: Tensor, noise: Tensor, memory: Memory, *acting: Tensor
    ) -> tuple[Tensor, Memory]:
        """Return the actions of a range of tasks, and the memory after them; an error names the task."""
        try:
            return self._actor_of(tasks)(observations, noise, memory, *acting)
        except NonFiniteError as of_all:
            first_task, inner_steps = self._phase.streams.first_task, self._phase.streams.phase
            faults: dict[int, NonFiniteError] = {}
            for number, task in enumerate(range(tasks.start, tasks.stop)):
                row = slice(number, number + 1)
                given = observations[row], noise[row], tuple(tensor[row] for tensor in memory)
                try:
                    self._actor_of(slice(task, task + 1))(*given, *(tensor[row] for tensor in acting))
                except NonFiniteError as error:
                    faults[first_task + task] = error
            if not faults:
                raise
            task, fault = next(iter(faults.items()))
            steps = f" after {inner_steps} inner step{'s' * (inner_steps > 1)}" if inner_steps else ""
            named = NonFiniteError(f"in task {task}{steps}, {fault}")
            named.tasks = tuple(faults)
            raise named from of_all

    def _remember(self, tasks: slice, before: Memory, after: Memory, *acting: Tensor) -> None:
        """Keep the memory after a step of a range of tasks, in the slots that take it: `acting`, (tasks, S)."""
        check_carried_memory(self._policy, after, before)
        (acts,), is_all = acting, tasks == slice(0, self._grid[0])
        if is_all and bool(acts.all()):
            self.memory = after
            return
        acts, memory = acts.to(self._device), list[Tensor]()
        for whole, old, new in zip(self.memory, before, after, strict=True):
            # What was written into it counts only where the rest of the memory says so; see `Policy.actor`. Otherwise
            # another tensor than before: the policy may have returned its argument.
            if new is not old:
                kept = chosen(acts, new, old)
                whole = kept if is_all else torch.cat((whole[: tasks.start], kept, whole[tasks.stop :]))
            memory.append(whole)
        self.memory = tuple(memory)

    def _actor_of(self, tasks: slice) -> Callable[..., tuple[Tensor, Memory]]:
        """Return the function that acts for a range of tasks."""
        key = (tasks.start, tasks.stop)
        if key not in self._actors:
            params = {name: value[tasks] for name, value in self._params.items()} if self._is_stacked else self._params
            self._actors[key] = self._policy.actor(params, self._phase.streams.first_task + tasks.start)
        return self._actors[key]


def _spread(values: NDArray[Any], rows: SlotIndex, num_rows: int) -> NDArray[Any]:
    """Return values of some of the rows as those of all, zeros elsewhere."""
    spread = np.zeros((num_rows, *values.shape[1:]), values.dtype)
    spread[rows] = values
    return spread


def _apart_from(memory: Memory, *given: Tensor) -> Memory:
    """Return a memory that does not share storage with what the policy was given, which the next step overwrites."""
    overwritten = {tensor.untyped_storage().data_ptr() for tensor in given}
    return tuple(tensor.clone() if tensor.untyped_storage().data_ptr() in overwritten else tensor for tensor in memory)


def phase_parameters(
    policy: Policy, num_tasks: int, params: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], bool]:
    """Return the parameters for the policy of a phase, and whether they are stacked (M, ...).

    They are not for a policy with a memory whose parameters all tasks share: there may be thousands of trials. For
    another policy, such parameters are one view of M tasks: its products are those of M copies, but read memory once.
    """
    own: dict[str, Tensor] = dict(policy.named_parameters())
    shared = own if params is None else dict(params)
    if shared.keys() != own.keys() or any(shared[name].shape != own[name].shape for name in own):
        return policy.stack_parameters(num_tasks, params), True
    if policy.has_memory:
        return shared, False
    return {name: value.expand(num_tasks, *value.shape) for name, value in shared.items()}, True


def initial_memory(policy: Policy, grid: tuple[int, int], device: torch.device) -> Memory:
    """Return the memory of a grid (M, S) of slots at the start of their trials, tensors (M, S, ...)."""
    memory = policy.initial_memory(grid[0] * grid[1])
    return tuple(tensor.detach().to(device).unflatten(0, grid) for tensor in memory)


def check_actions(policy: Policy, actions: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse actions of another shape than expected, (tasks, slots, *act)."""
    if not isinstance(actions, Tensor) or actions.shape != expected:
        got = f"of the shape {tuple(actions.shape)}" if isinstance(actions, Tensor) else f"as {type(actions).__name__}"
        raise ValueError(
            f"{policy.class_name} returned actions {got}; return a tensor of the shape {expected} from act: an action "
            "for each slot of each task"
        )


def check_carried_memory(policy: Policy, memory: Memory, expected: Memory) -> None:
    """Refuse a memory of other shapes or types than expected."""
    if len(memory) == len(expected) and all(
        one.shape == other.shape and one.dtype == other.dtype for one, other in zip(memory, expected, strict=True)
    ):
        return
    raise ValueError(
        f"{policy.class_name} returned {_shapes(memory)}, got {_shapes(expected)}; return "
        "tensors of the same shapes and types from act"
    )


def chosen(where: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the rows of `new` where `where` (M, S) is true, and those of `old` elsewhere, (M, S, ...)."""
    rows = where.reshape(*where.shape, *(1,) * (old.dim() - where.dim()))
    is_like = new.is_cpu and new.dtype == old.dtype and old.dim() > where.dim()
    if is_like and _is_of_sixteens(new) and _is_of_sixteens(old):
        # Numbers are chosen one by one: of 16 bytes each, those of 1,024 slots take less than half of the time.
        return torch.where(rows, new.view(torch.complex128), old.view(torch.complex128)).view(new.dtype)
    return torch.where(rows, new, old)


def _is_of_sixteens(tensor: Tensor) -> bool:
    """Return whether 16 bytes at a time are a tensor's rows."""
    *strides, last = tensor.stride()
    places = tensor.shape[-1], tensor.storage_offset(), *strides
    return last == 1 and not any(place * tensor.itemsize % 16 for place in places)


def try_memory(policy: Policy, observation_space: gymnasium.Space[Any]) -> None:
    """Refuse a policy with a memory of the wrong shape, before a phase is sampled."""
    memory = policy.initial_memory(_TRIED)
    if not isinstance(memory, tuple) or any(
        not isinstance(tensor, Tensor) or tensor.shape[:1] != (_TRIED,) for tensor in memory
    ):
        shown = _shapes(memory) if isinstance(memory, tuple) else f"a {type(memory).__name__}"
        raise ValueError(
            f"initial_memory({_TRIED}) of {policy.class_name} returned {shown}; return a tuple of tensors of the "
            f"shape ({_TRIED}, ...), one row for each slot"
        )
    # An external policy must not be called with zeros.
    if not memory or policy.told_who_acts:
        return
    shape, dtype = array_layout(observation_space)
    zeros = np.zeros(shape, dtype)
    if isinstance(observation_space, gymnasium.spaces.Discrete):
        zeros = zeros + observation_space.start
    elif isinstance(observation_space, gymnasium.spaces.Box):
        zeros = zeros.clip(observation_space.low, observation_space.high)
    with torch.inference_mode():
        before = tuple(tensor.unsqueeze(0) for tensor in memory)
        rows = torch.from_numpy(np.broadcast_to(zeros, (1, _TRIED, *shape)).copy()).to(before[0].device)
        noise = torch.full((1, _TRIED, policy.noise_size), 0.5, device=before[0].device)
        _, after = policy.act(rows, noise, before)
    check_carried_memory(policy, after, before)


def _shapes(memory: Any) -> str:
    if not memory:
        return "no memory"
    shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in memory]
    return f"the shape {shapes[0]}" if len(shapes) == 1 else f"the shapes ({', '.join(shapes)})"
