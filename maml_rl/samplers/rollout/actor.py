"""Batched inference for a rollout: every task under its own parameters, every slot with its own memory."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.errors import NonFiniteError
from maml_rl.policies import Memory, Policy
from maml_rl.policies.policy import perform
from maml_rl.samplers.rollout.carried_memory import check_carried_memory
from maml_rl.samplers.rollout.device_transfer import DeviceLink


class Actor:
    """Turns the observations of a range of slots into actions, one batched forward pass at a time.

    It carries the policy's memory of every slot, which changes only where a step is taken.

    The pass always takes whole tasks, (tasks, S, ...) against stacked parameters (tasks, ...): a task's rows are
    multiplied in the same shape and order whichever tasks are in the batch, which makes the actions for some
    workers bit-identical to those for all at once.

    Args:
        policy: whose `act` is called.
        params: parameters by name, each (M, ...) or as the policy's own; None for the policy's own.
        observations: (N, *obs) array that the environments write; read again at every call.
        num_tasks: M; N = M * S.
        device: where the policy runs.
        first_task: number of the first of the M tasks.
        inner_steps: how often the parameters were adapted, for messages.
    """

    def __init__(
        self,
        policy: Policy,
        params: Mapping[str, Tensor] | None,
        observations: NDArray[np.generic],
        num_tasks: int,
        device: torch.device | str,
        first_task: int = 0,
        inner_steps: int = 0,
    ) -> None:
        self._policy, self._first_task, self._inner_steps = policy, first_task, inner_steps
        self._device = torch.device(device)
        of_phase, self._is_stacked = phase_parameters(policy, num_tasks, params)
        self._params = {name: value.detach().to(self._device) for name, value in of_phase.items()}
        # By range of tasks: with `recv_timeout` or groups, the policy acts for some workers at a time.
        self._actors: dict[tuple[int, int], Callable[..., tuple[Tensor, Memory]]] = {}
        self._memory: Memory = ()
        # The memory at the start of a trial, and that of every slot at the start of its episode.
        self._initial: Memory = ()
        self._at_start: Memory = ()
        self._num_tasks = num_tasks
        self._slots_per_task = len(observations) // num_tasks
        self.observe(observations)
        self._link: DeviceLink | None = None
        if self._device.type != "cpu":
            self._link = DeviceLink(observations, policy.noise_size, self._device)

    def observe(self, observations: NDArray[np.generic]) -> None:
        """Read observations (N, *obs) there from now on."""
        self._rows = observations
        self._observations = torch.from_numpy(observations).unflatten(0, (self._num_tasks, self._slots_per_task))

    def begin_trial(self) -> None:
        """Empty the memory of all slots."""
        grid = self._num_tasks, self._slots_per_task
        memory = self._policy.initial_memory(grid[0] * grid[1])
        self._memory = tuple(tensor.detach().to(self._device).unflatten(0, grid) for tensor in memory)
        self._initial = self._at_start = self._memory

    def begin_episodes(self, slots: NDArray[np.intp] | None = None, *, forget: bool = False) -> None:
        """Keep the memory of slots where episodes begin, for episodes that must restart.

        Args:
            slots: where they begin; None for all.
            forget: whether a trial begins with them.
        """
        if slots is None:
            self._at_start = self._memory
            return
        if forget:
            self._memory = self._with_rows(slots, self._memory, self._initial)
        self._at_start = self._with_rows(slots, self._at_start, self._memory)

    def begin_anew(self, slots: NDArray[np.intp]) -> None:
        """Restore the memory that `slots` had when their episodes began."""
        self._memory = self._with_rows(slots, self._memory, self._at_start)

    def _with_rows(self, slots: NDArray[np.intp], memory: Memory, other: Memory) -> Memory:
        """Return `memory` with the rows `slots` of `other`."""
        if not memory:
            return memory
        rows = torch.zeros(self._num_tasks * self._slots_per_task, dtype=torch.bool)
        rows[torch.from_numpy(slots)] = True
        rows = rows.unflatten(0, (-1, self._slots_per_task)).to(self._device)
        return tuple(
            torch.where(rows.reshape(*rows.shape, *(1,) * (old.dim() - 2)), new, old)
            for old, new in zip(memory, other, strict=True)
        )

    def act_for(
        self, slots: NDArray[np.intp], noise: NDArray[np.float32], running: NDArray[np.bool_] | None = None
    ) -> NDArray[np.generic]:
        """Return the actions of slots anywhere, (len(slots), *act), as those of a pass over all slots.

        The pass always has the shape of all slots, so an action does not depend on which others are ready. The memory
        changes only in `slots`.

        Args:
            slots: numbers of slots.
            noise: (len(slots), noise_size).
            running: see `act`.
        """
        num_slots = self._num_tasks * self._slots_per_task
        rows, ready = np.zeros((num_slots, noise.shape[1]), np.float32), np.zeros(num_slots, np.bool_)
        rows[slots], ready[slots] = noise, True if running is None else running
        return self.act(slice(0, num_slots), rows, ready)[slots]

    def perform(self, actions: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return actions (slots, *act) as the environment gets them."""
        recorded = torch.from_numpy(actions)
        performed = perform(self._policy, recorded)
        return actions if performed is recorded else performed.numpy()

    @property
    def memory(self) -> Memory:
        """The memory of every slot before its next step, tensors (M, S, ...)."""
        return self._memory

    def act(
        self, slots: slice, noise: NDArray[np.float32], running: NDArray[np.bool_] | None = None
    ) -> NDArray[np.generic]:
        """Return the actions of `slots`, (len(slots), *act), which the next call may overwrite.

        Args:
            slots: range of slots.
            noise: (len(slots), noise_size).
            running: (len(slots),) whether the slot's episode continues; only there the memory changes. None for all.
        """
        per_task, told = self._slots_per_task, self._policy.told_who_acts
        if told and slots.stop - slots.start < self._num_tasks * per_task:
            return self.act_for(np.arange(slots.start, slots.stop), noise, running)
        tasks = slice(slots.start // per_task, -(-slots.stop // per_task))
        rows = slice(slots.start - tasks.start * per_task, slots.stop - tasks.start * per_task)
        num_tasks = tasks.stop - tasks.start
        num_rows = num_tasks * per_task
        if len(noise) != num_rows:
            # A range that cuts a task still passes the whole task; the actions of the other rows are dropped.
            padded = np.zeros((num_rows, noise.shape[1]), np.float32)
            padded[rows] = noise
            noise = padded
        before = tuple(tensor[tasks] for tensor in self._memory)
        acting: tuple[Tensor, ...] = ()
        if told:
            whose = np.ones(num_rows, np.bool_) if running is None else running
            acting = (torch.from_numpy(whose).unflatten(0, (-1, per_task)),)
        if self._link is None:
            noise_rows = torch.from_numpy(noise.reshape(num_tasks, per_task, noise.shape[1]))
            observed = self._observations if num_tasks == self._num_tasks else self._observations[tasks]
            actions, after = self._choose(tasks, observed, noise_rows, before, *acting)
            if before or after:
                self._remember(tasks, rows, running, before, _apart_from(after, observed, noise_rows))
            of_tasks: NDArray[np.generic] = actions.numpy()
            return of_tasks.reshape(num_rows, *of_tasks.shape[2:])[rows]
        whole = self._rows[tasks.start * per_task : tasks.stop * per_task]
        there, noise_there = (tensor.unflatten(0, (-1, per_task)) for tensor in self._link.send(whole, noise))
        actions, after = self._choose(tasks, there, noise_there, before, *acting)
        if before or after:
            self._remember(tasks, rows, running, before, _apart_from(after, there, noise_there))
        return self._link.fetch(actions.flatten(0, 1)[rows])

    def _choose(
        self, tasks: slice, observations: Tensor, noise: Tensor, memory: Memory, *acting: Tensor
    ) -> tuple[Tensor, Memory]:
        """Return the actions of a range of tasks, and the memory after them; an error names the task."""
        try:
            return self._actor_of(tasks)(observations, noise, memory, *acting)
        except NonFiniteError as of_all:
            faults: dict[int, NonFiniteError] = {}
            for number, task in enumerate(range(tasks.start, tasks.stop)):
                row = slice(number, number + 1)
                given = observations[row], noise[row], tuple(tensor[row] for tensor in memory)
                try:
                    self._actor_of(slice(task, task + 1))(*given, *(tensor[row] for tensor in acting))
                except NonFiniteError as error:
                    faults[self._first_task + task] = error
            if not faults:
                raise
            task, fault = next(iter(faults.items()))
            steps = f" after {self._inner_steps} inner step{'s' * (self._inner_steps > 1)}" if self._inner_steps else ""
            named = NonFiniteError(f"in task {task}{steps}, {fault}")
            named.tasks = tuple(faults)
            raise named from of_all

    def _remember(
        self, tasks: slice, rows: slice, running: NDArray[np.bool_] | None, before: Memory, after: Memory
    ) -> None:
        """Keep the memory after a step, in the slots that take it.

        Args:
            tasks: range of tasks for which the policy has acted.
            rows: those of their slots that were requested.
            running: see `act`.
            before: memory of these tasks, (tasks, S, ...).
            after: the memory that the policy returned.
        """
        check_carried_memory(self._policy, after, before)
        num_rows = (tasks.stop - tasks.start) * self._slots_per_task
        everywhere = rows == slice(0, num_rows) and (running is None or bool(running.all()))
        if everywhere and num_rows == self._num_tasks * self._slots_per_task:
            self._memory = after
            return
        steps = torch.zeros(num_rows, dtype=torch.bool)
        steps[rows] = True if running is None else torch.from_numpy(running)
        steps = steps.unflatten(0, (-1, self._slots_per_task)).to(self._device)
        kept = []
        for whole, old, new in zip(self._memory, before, after, strict=True):
            if new is old:
                # What was written into it counts only where the rest of the memory says so; see `Policy.actor`.
                kept.append(whole)
                continue
            # Another tensor than before: the policy may have returned its argument.
            own = torch.where(steps.reshape(*steps.shape, *(1,) * (old.dim() - 2)), new, old)
            kept.append(torch.cat((whole[: tasks.start], own, whole[tasks.stop :])))
        self._memory = tuple(kept)

    def _actor_of(self, tasks: slice) -> Callable[..., tuple[Tensor, Memory]]:
        """Return the function that acts for a range of tasks."""
        key = (tasks.start, tasks.stop)
        if key not in self._actors:
            params = {name: value[tasks] for name, value in self._params.items()} if self._is_stacked else self._params
            self._actors[key] = self._policy.actor(params, self._first_task + tasks.start)
        return self._actors[key]


def _apart_from(memory: Memory, *given: Tensor) -> Memory:
    """Return a memory that does not share storage with what the policy was given, which the next step overwrites."""
    overwritten = {tensor.untyped_storage().data_ptr() for tensor in given}
    return tuple(tensor.clone() if tensor.untyped_storage().data_ptr() in overwritten else tensor for tensor in memory)


def phase_parameters(
    policy: Policy, num_tasks: int, params: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], bool]:
    """Return the parameters for the policy of a phase, and whether they are stacked (M, ...).

    They are not for a policy with a memory whose parameters all tasks share: there may be thousands of trials.
    """
    if policy.has_memory:
        own: dict[str, Tensor] = dict(policy.named_parameters())
        shared = own if params is None else dict(params)
        if shared.keys() == own.keys() and all(shared[name].shape == own[name].shape for name in own):
            return shared, False
    return policy.stack_parameters(num_tasks, params), True
