"""Batched inference for a rollout: every task under its own parameters, every episode with its own noise."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.derivatives import ParameterLayout, chunks_of
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.episode.trials import Trials
from maml_rl.errors import NonFiniteError
from maml_rl.machine import intra_op_threads
from maml_rl.policies import Memory, Policy, as_policy
from maml_rl.policies.distributions import middle_of
from maml_rl.policies.policy import greedy
from maml_rl.samplers.rollout.device_transfer import DeviceLink
from maml_rl.samplers.rollout.recorder import SlotIndex
from maml_rl.seeding import PhaseStreams
from maml_rl.spaces import array_layout

# Noise is drawn for as many steps at once as fill this many numbers: enough to amortize the call, little enough to
# stay in the cache.
_NUMBERS_PER_BLOCK = 65_536
# Slots in a trial of a policy's memory: a number that is not a usual size of one.
_TRIED = 3
# Trials whose log-probabilities are computed at once.
_TRIALS_PER_PASS = 128


class EpisodeNoise:
    """The action noise of one wave of episodes, drawn ahead in blocks of steps.

    Args:
        policy: has the kind and size of the noise of an action.
        streams: the phase's streams.
        num_tasks: M.
        episodes: the wave's range of episodes, S of them.
        horizon: T; no noise is drawn for later steps.
        deterministic: draw nothing, and take the middle of the noise's range.
        blocks_kept: how many blocks of steps are kept, as slots may be some steps apart; others are drawn again.
    """

    def __init__(
        self,
        policy: Policy,
        streams: PhaseStreams,
        num_tasks: int,
        episodes: range,
        horizon: int,
        deterministic: bool = False,
        blocks_kept: int = 2,
    ) -> None:
        self._blocks_kept = blocks_kept
        self._policy, self._streams = policy, streams
        self._num_tasks, self._episodes, self._horizon = num_tasks, episodes, horizon
        numbers_per_step = max(1, num_tasks * len(episodes) * policy.noise_size)
        self._steps_per_block = max(1, _NUMBERS_PER_BLOCK // numbers_per_step)
        self._blocks: dict[int, NDArray[np.float32]] = {}
        self._middle: NDArray[np.float32] | None = None
        if deterministic:
            shape = num_tasks * len(episodes), policy.noise_size
            self._middle = np.full(shape, middle_of(policy.noise_kind), np.float32)

    def rows(self, slots: SlotIndex, steps: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the noise of `slots`, each at its own step, (len(slots), noise_size)."""
        if self._middle is not None:
            return self._middle[slots]
        first = int(steps[0])
        if (steps == first).all():
            return self._at(first)[slots]
        rows = np.zeros((len(steps), self._policy.noise_size), np.float32)
        # Episodes that are over may have all their steps behind them.
        for step in np.unique(steps[steps < self._horizon]):
            rows[steps == step] = self._at(int(step))[slots][steps == step]
        return rows

    def _at(self, step: int) -> NDArray[np.float32]:
        """Return the noise of one step, (M * S, noise_size)."""
        block, offset = divmod(step, self._steps_per_block)
        if block not in self._blocks:
            while len(self._blocks) >= self._blocks_kept:
                del self._blocks[min(self._blocks)]
            start = block * self._steps_per_block
            steps = range(start, min(start + self._steps_per_block, self._horizon))
            noise = self._streams.action_noise(
                self._policy.noise_kind, self._num_tasks, self._episodes, steps, self._policy.noise_size
            )
            self._blocks[block] = noise.reshape(len(steps), -1, self._policy.noise_size)
        rows: NDArray[np.float32] = self._blocks[block][offset]
        return rows


class Actor:
    """Turns the observations of a range of slots into actions, one batched forward pass at a time.

    It carries the policy's memory of every slot, which changes only where a step is taken.

    The pass always takes whole tasks, (tasks, S, ...) against stacked parameters (tasks, ...): a task's rows are
    multiplied in the same shape and order whichever tasks are in the batch, which makes groups of workers bit-identical
    to all at once.

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

        Raises:
            ValueError: If the policy returns a memory of another shape than it got.
            NonFiniteError: If a parameter of its distribution is outside of its range.
        """
        per_task = self._slots_per_task
        if self._policy.told_who_acts and slots.stop - slots.start < self._num_tasks * per_task:
            return self.act_for(np.arange(slots.start, slots.stop), noise, running)
        tasks = slice(slots.start // per_task, -(-slots.stop // per_task))
        rows = slice(slots.start - tasks.start * per_task, slots.stop - tasks.start * per_task)
        num_rows = (tasks.stop - tasks.start) * per_task
        if len(noise) != num_rows:
            # A range that cuts a task still passes the whole task; the actions of the other rows are dropped.
            padded = np.zeros((num_rows, noise.shape[1]), np.float32)
            padded[rows] = noise
            noise = padded
        before = tuple(tensor[tasks] for tensor in self._memory)
        acting: tuple[Tensor, ...] = ()
        if self._policy.told_who_acts:
            whose = np.ones(num_rows, np.bool_) if running is None else running
            acting = (torch.from_numpy(whose).unflatten(0, (-1, per_task)),)
        if self._link is None:
            noise_rows = torch.from_numpy(noise).unflatten(0, (-1, per_task))
            observed = self._observations[tasks]
            actions, after = self._choose(tasks, observed, noise_rows, before, *acting)
            self._remember(tasks, rows, running, before, _apart_from(after, observed, noise_rows))
            result: NDArray[np.generic] = actions.flatten(0, 1)[rows].numpy()
            return result
        whole = self._rows[tasks.start * per_task : tasks.stop * per_task]
        there, noise_there = (tensor.unflatten(0, (-1, per_task)) for tensor in self._link.send(whole, noise))
        actions, after = self._choose(tasks, there, noise_there, before, *acting)
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
                parts = observations[row], noise[row], tuple(tensor[row] for tensor in memory)
                try:
                    self._actor_of(slice(task, task + 1))(*parts, *(tensor[row] for tensor in acting))
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
        if not before and not after:
            return
        if any(new.shape != old.shape or new.dtype != old.dtype for new, old in zip(after, before, strict=False)) or (
            len(after) != len(before)
        ):
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
            part = torch.where(steps.reshape(*steps.shape, *(1,) * (old.dim() - 2)), new, old)
            kept.append(torch.cat((whole[: tasks.start], part, whole[tasks.stop :])))
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
    overwritten = {tensor.untyped_storage().data_ptr() for tensor in given} if memory else set()
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


def state_of(policy: Policy) -> dict[str, NDArray[Any]]:
    """Return the policy's own parameters and constants as arrays by name, for `take_state`."""
    tensors = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def take_state(policy: Policy, state: Mapping[str, NDArray[Any]]) -> None:
    """Give a copy of a policy what `state_of` has returned."""
    with torch.no_grad():
        for name, tensor in (*policy.named_parameters(), *policy.named_buffers()):
            # The arrays may be read-only, which tensors cannot be.
            tensor.copy_(torch.tensor(state[name]))


def check_carried_memory(policy: Policy, memory: Memory, expected: Memory) -> None:
    """Refuse a memory of other shapes or types than expected.

    Raises:
        ValueError: If it is; the message names both.
    """
    if len(memory) == len(expected) and all(
        one.shape == other.shape and one.dtype == other.dtype for one, other in zip(memory, expected, strict=True)
    ):
        return
    raise ValueError(
        f"{type(policy).__name__} returned {_shapes(memory)}, got {_shapes(expected)}; return "
        "tensors of the same shapes and types from act"
    )


def try_memory(policy: Policy, observation_space: gymnasium.Space[Any]) -> None:
    """Refuse a policy with a memory of the wrong shape, before a phase is sampled.

    Args:
        policy: acts once, on three slots, on its device.
        observation_space: of one slot.

    Raises:
        ValueError: If `initial_memory` or `act` returns a wrong shape; the message names it.
    """
    memory = policy.initial_memory(_TRIED)
    if not isinstance(memory, tuple) or any(
        not isinstance(tensor, Tensor) or tensor.shape[:1] != (_TRIED,) for tensor in memory
    ):
        shown = _shapes(memory) if isinstance(memory, tuple) else f"a {type(memory).__name__}"
        raise ValueError(
            f"initial_memory({_TRIED}) of {type(policy).__name__} returned {shown}; return a tuple of tensors of the "
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


def memory_of(
    policy: Policy,
    params: Mapping[str, Tensor] | None,
    episodes: TaskEpisodes,
    streams: PhaseStreams,
    **options: Any,
) -> Memory:
    """Return the policy's memory before every action, tensors (M, T, B, *one slot's), zero on padding.

    Args:
        policy: has chosen the actions.
        params: as the policy had them.
        episodes: of M tasks, on the CPU.
        streams: of the phase.
        options: the other arguments of `memory_after`.
    """
    num_tasks, steps, num_episodes = episodes.rewards.shape
    recorded: Memory = ()

    def record(actor: Actor, step: int, wave: slice) -> None:
        nonlocal recorded
        if not recorded:
            recorded = tuple(
                torch.zeros(num_tasks, steps, num_episodes, *kept.shape[2:], dtype=kept.dtype) for kept in actor.memory
            )
        real = episodes.lengths[:, wave] > step
        for kept, now in zip(recorded, actor.memory, strict=True):
            kept[:, step, wave][real] = now.cpu()[real]

    memory_after(policy, params, episodes, streams, before_step=record, **options)
    return recorded


def memory_after(
    policy: Policy,
    params: Mapping[str, Tensor] | None,
    episodes: TaskEpisodes,
    streams: PhaseStreams,
    *,
    slots_per_task: int,
    reset_memory: bool = False,
    deterministic: bool = False,
    device: torch.device | str = "cpu",
    before_step: Callable[[Actor, int, slice], None] | None = None,
) -> Memory:
    """Return the policy's memory after the last step of each slot, by acting once more in that step.

    Noise is keyed, and rows are computed in the same shape wherever they are, so that this is what was remembered in
    the phase itself, bit for bit. Nothing has to be kept or sent meanwhile.

    Args:
        policy: has chosen the actions.
        params: as the policy had them.
        episodes: of M tasks, on the CPU.
        streams: of the phase.
        slots_per_task: S.
        reset_memory: whether the memory was reset at every episode.
        deterministic: whether the policy took its most probable actions.
        device: where the policy acted.
        before_step: is given what acts, the number of the step, and the wave's range of episodes.

    Returns:
        Tensors (M, S, *one slot's).
    """
    num_tasks, steps, num_episodes = episodes.rewards.shape
    rows = np.zeros((num_tasks * slots_per_task, *episodes.observations.shape[3:]), episodes.observations.numpy().dtype)
    slots, running = slice(0, len(rows)), np.ones(len(rows), np.bool_)
    policy = greedy(policy) if deterministic else policy
    with torch.inference_mode(False), torch.no_grad(), intra_op_threads(1):
        actor = Actor(policy, params, rows, num_tasks, device, streams.first_task)
        for first in range(0, num_episodes, slots_per_task):
            if first == 0 or reset_memory:
                actor.begin_trial()
            wave = slice(first, first + slots_per_task)
            noise = EpisodeNoise(policy, streams, num_tasks, range(wave.start, wave.stop), steps, deterministic)
            for step in range(int(episodes.lengths[:, wave].max())):
                if before_step is not None:
                    before_step(actor, step, wave)
                rows[...] = episodes.observations[:, step, wave].flatten(0, 1).numpy()
                np.copyto(running, (episodes.lengths[:, wave] > step).flatten().numpy())
                actor.act(slots, noise.rows(slots, np.full(len(rows), step)), running)
    return actor.memory


def log_probs_of(
    policy: Policy, params: Mapping[str, Tensor] | None, episodes: TaskEpisodes, slots_per_task: int | None = None
) -> Tensor:
    """Return the log-probability of every action under the parameters that it was chosen with.

    These are the same for all steps of a phase: in one pass afterwards it costs less than step by step.

    Args:
        policy: has chosen the actions.
        params: as the policy had them.
        episodes: of M tasks, on the CPU.
        slots_per_task: S, where the policy's memory was kept from episode to episode of a slot; None for none kept.

    Returns:
        (M, T, B) float32, zero on padding.
    """
    policy = as_policy(policy, episodes.observations.shape[3:])
    device = next(policy.parameters()).device
    if policy.has_memory:
        trials = Trials.of(episodes, slots_per_task or episodes.rewards.shape[2])
        with torch.no_grad(), intra_op_threads(1):
            of_phase, is_stacked = phase_parameters(policy, len(episodes), params)
            per_task = trials.mask.shape[1] // len(episodes)
            columns = torch.arange(trials.mask.shape[1]).split(per_task if is_stacked else _TRIALS_PER_PASS)
            parts = []
            for index, part in enumerate(columns):
                own = {name: (value[index] if is_stacked else value).to(device) for name, value in of_phase.items()}
                unrolled = policy.unroll(trials.observations[:, part].to(device), params=own)
                log_probs = policy.distributions.log_prob(unrolled.distribution, trials.actions[:, part].to(device))
                parts.append(log_probs.float().cpu())
        return trials.as_episodes(torch.cat(parts, 1), episodes)
    log_probs = torch.zeros_like(episodes.rewards)
    with torch.no_grad(), intra_op_threads(1):
        stacked = policy.stack_parameters(len(episodes), params)
        for tasks in chunks_of([episodes], ParameterLayout(policy).width, device):
            of_chunk = {name: value[tasks].to(device) for name, value in stacked.items()}
            part = episodes.part(tasks)
            found = policy.log_prob(part.observations.to(device), part.actions.to(device), of_chunk)
            log_probs[tasks, : found.shape[1]] = found.float().cpu() * part.mask
    return log_probs
