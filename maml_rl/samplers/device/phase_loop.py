"""The loop of a phase on a device: act, step, record, without waiting for the device before the end.

What a branch does on the CPU a mask does here: every slot is stepped until the longest possible episode is over, and
what belongs to no episode is not recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.policies import Memory, Policy
from maml_rl.policies.policy import greedy, perform
from maml_rl.samplers.device.slots import DeviceSlots, Outcome
from maml_rl.samplers.device.streams import PhaseNoise
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import phase_parameters
from maml_rl.samplers.rollout.carried_memory import check_carried_memory
from maml_rl.samplers.rollout.recorder import not_finite

# Runs before a step is recorded as a graph.
_WARM_UPS = 2
# Recorded steps that are compared with the step itself, from the same state.
_COMPARED = 2
# Rounding: how close numbers are the same, and in which share of the slots a step may differ, as where a number that
# is rounded otherwise is on the other side of a limit.
_RELATIVE, _ABSOLUTE, _MOST_DIFFERENT = 1e-3, 1e-4, 0.01


class DeviceLoop:
    """Carries out phases of one shape: M tasks, S slots of each, and at most T steps.

    Args:
        slots: M * S of them.
        env: description of one slot.
        phase: of that shape, with its policy.
    """

    def __init__(self, slots: DeviceSlots, env: EnvDescription, phase: Phase) -> None:
        self._slots, self._device, self._env = slots, slots.device, env
        num_tasks, _, horizon = phase.sizes
        per_task = slots.num_envs // num_tasks
        self._grid = num_tasks, per_task
        self._horizon, self._deterministic = horizon, phase.deterministic
        # A graph reads a policy's buffers where they are.
        self._given_policy, self._buffers = phase.policy, _places(phase.policy)
        self._policy = greedy(phase.policy) if phase.deterministic else phase.policy
        given, self._is_stacked = phase_parameters(phase.policy, num_tasks, phase.params)
        self._params = {name: value.detach().to(self._device).clone() for name, value in given.items()}
        self._first_task = phase.streams.first_task
        size = phase.policy.noise_size
        self._noise = PhaseNoise(phase.policy.noise_kind, (horizon, num_tasks, per_task, size), self._device)
        self._record = _Record(env, (num_tasks, per_task, horizon), self._device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._running = torch.ones(self._grid, dtype=torch.bool, device=self._device)
        # Whether an episode may end before the horizon; known after the first step.
        self._may_end = True
        self._initial = self._initial_memory()
        self._memory = tuple(kept.clone() for kept in self._initial)
        self._act: Callable[..., tuple[Tensor, Memory]] | None = None
        self._outcome: Outcome | None = None
        self._prepare: Callable[[], None] = self._make_actor
        self._advance: Callable[[], None] = self._one_step
        self._is_ready = self._device.type != "cuda" or not self._policy.has_static_steps
        # What CUDA records runs on a stream of its own.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fits(self, phase: Phase) -> bool:
        """Return whether a phase has this shape, and this policy."""
        _, is_stacked = phase_parameters(phase.policy, len(phase.tasks), phase.params)
        return (
            len(phase.tasks) == self._grid[0]
            and phase.horizon == self._horizon
            and phase.deterministic == self._deterministic
            and is_stacked == self._is_stacked
            and phase.streams.first_task == self._first_task
            and phase.policy is self._given_policy
            and _places(phase.policy) == self._buffers
        )

    def run(self, phase: Phase) -> TaskEpisodes:
        """Sample a phase, and return its episodes, which stay on the device."""
        with torch.inference_mode(False), torch.no_grad():
            if self._stream is None:
                return self._run(phase)
            outside = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                episodes = self._run(phase)
            outside.wait_stream(self._stream)
            for value in (*vars(episodes).values(), *episodes.infos.values()):
                if isinstance(value, Tensor):
                    value.record_stream(outside)
            return episodes

    def _run(self, phase: Phase) -> TaskEpisodes:
        num_tasks, num_episodes, _ = phase.sizes
        per_task = self._grid[1]
        seeds = phase.streams.episode_seeds(num_tasks, range(num_episodes))
        there = self._slots.take_tasks(phase.tasks, seeds)
        given, _ = phase_parameters(phase.policy, num_tasks, phase.params)
        for name, value in given.items():
            self._params[name].copy_(value.detach())
        episodes = device_arrays(self._env, phase.sizes, self._device)
        for first in range(0, num_episodes, per_task):
            wave_seeds = there[:, first : first + per_task].reshape(-1)
            if not self._is_ready:
                self._record_graphs(wave_seeds)
                there = self._slots.take_tasks(phase.tasks, seeds)
            if first == 0:
                self._prepare()
            if not phase.deterministic:
                self._noise.draw(phase.streams, range(first, first + per_task))
            self._begin(wave_seeds, forget=first == 0 or phase.reset_memory)
            for _ in range(self._horizon):
                self._advance()
            wave = self._record.finish(self._slots.observations, self._running, self._may_end)
            episodes.view(slice(None), slice(first, first + per_task)).fill(wave)
        return self._collect(phase, episodes)

    def _begin(self, seeds: Tensor, *, forget: bool) -> None:
        """Begin an episode in every slot."""
        self._slots.begin(seeds)
        self._step.zero_()
        self._running.fill_(True)
        self._record.begin()
        if forget:
            for kept, empty in zip(self._memory, self._initial, strict=True):
                kept.copy_(empty)

    def _initial_memory(self) -> Memory:
        memory = self._policy.initial_memory(self._grid[0] * self._grid[1])
        return tuple(kept.detach().to(self._device).unflatten(0, self._grid) for kept in memory)

    def _make_actor(self) -> None:
        self._act = self._policy.actor(self._params, self._first_task)

    def _one_step(self) -> None:
        """Act, step and record, all of it without waiting."""
        self._choose()
        self._step_slots()
        self._tell()

    def _choose(self) -> None:
        """Act, and record what the policy saw and chose."""
        assert self._act is not None
        running = self._running
        observations = self._slots.observations.unflatten(0, self._grid)
        noise = self._noise.rows.index_select(0, self._step).reshape(*self._grid, -1)
        told = (running,) if self._policy.told_who_acts else ()
        actions, memory = self._act(observations, noise, self._memory, *told)
        active = running if self._may_end else None
        self._remember(memory, active)
        actions = self._record.choice(self._step, observations, actions, active)
        self._actions = perform(self._policy, actions.flatten(0, 1))

    def _step_slots(self) -> None:
        """Step, and keep the outcome, for slots that are no part of a graph always in the same place."""
        outcome = self._slots.step(self._actions, self._running.flatten() if self._may_end else None)
        if self._slots.can_be_recorded:
            self._outcome = outcome
        elif self._outcome is None:
            *flags, terms = outcome
            own = [flag.clone() if isinstance(flag, Tensor) else flag for flag in flags]
            self._outcome = (*own, {name: term.clone() for name, term in terms.items()})  # type: ignore[assignment]
        else:
            for kept, new in zip(_tensors_of(self._outcome), _tensors_of(outcome), strict=True):
                kept.copy_(new)

    def _tell(self) -> None:
        """Record the outcome of a step."""
        assert self._outcome is not None
        (rewards, terminated, truncated, terms), running = self._outcome, self._running
        active = running if self._may_end else None
        ended = died = None
        if terminated is False and truncated is False:
            self._may_end = False
        elif not self._may_end:
            raise ConfigError(
                f"{type(self._slots.family).__name__} returns False for terminated in one step and more in another; "
                "return a tensor (N,) of bool in every step"
            )
        else:
            died = running & (terminated if isinstance(terminated, bool) else terminated.reshape(self._grid))
            ended = died if truncated is False else died | (running & truncated.reshape(self._grid))
        self._record.outcome(self._step, rewards, terms, self._slots.observations, active, died, ended)
        if ended is not None:
            running &= ~ended
        self._step += 1

    def _remember(self, memory: Memory, active: Tensor | None) -> None:
        """Keep the memory after a step, in the slots that take it."""
        check_carried_memory(self._policy, memory, self._memory)
        for old, new in zip(self._memory, memory, strict=True):
            if new is old:
                # What was written into it counts only where the rest of the memory says so; see `Policy.actor`.
                continue
            if active is None:
                old.copy_(new)
            else:
                old.copy_(torch.where(active.reshape(*self._grid, *(1,) * (old.dim() - 2)), new, old))

    def _record_graphs(self, seeds: Tensor) -> None:
        """Record the step, and what comes before the first, as graphs, after having run them."""
        self._is_ready = True
        self._make_actor()
        for _ in range(_WARM_UPS):
            self._begin(seeds, forget=True)
            self._one_step()
        pool = torch.cuda.graph_pool_handle()
        self._begin(seeds, forget=True)
        self._prepare = _recorded(self._make_actor, pool)
        if self._slots.can_be_recorded:
            self._advance = _recorded(self._one_step, pool)
            # MuJoCo's state is in the engine, whose own tests compare it.
            if self._slots.physics is None:
                self._compare(seeds)
            return
        choose, tell = _recorded(self._choose, pool), _recorded(self._tell, pool)

        def advance() -> None:
            choose()
            self._step_slots()
            tell()

        self._advance = advance

    def _compare(self, seeds: Tensor) -> None:
        """Compare recorded steps with the step itself, taken operation by operation from the same state."""
        self._begin(seeds, forget=True)
        self._prepare()
        for number in range(min(_COMPARED, self._horizon)):
            before = {name: x.clone() for name, x in self._state().items()}
            self._advance()
            recorded = {name: x.clone() for name, x in self._state().items()}
            for name, x in self._state().items():
                x.copy_(before[name])
            self._one_step()
            taken = self._state()
            # Where other actions were taken by rounding, all else may differ.
            comparable = self._same_slots(recorded["actions"], taken["actions"])
            for name in recorded.keys() - {"actions"}:
                different = comparable & ~self._same_slots(recorded[name], taken[name])
                if float(different.double().mean()) > _MOST_DIFFERENT:
                    family = type(self._slots.family).__name__
                    raise ConfigError(
                        f"a recorded step of {family} differs from the step itself in {name!r}, at step {number}: it "
                        "depends on something that is not in its tensors, as a variable of Python; keep its state in "
                        "tensors, as attributes or in dicts of them, or use backend 'auto' without a device"
                    )

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors that a step reads and changes, by name."""
        memory = {f"memory {number}": kept for number, kept in enumerate(self._memory)}
        own = {"running": self._running, "step": self._step, **self._record.state()}
        return self._slots.state() | memory | own

    def _same_slots(self, one: Tensor, other: Tensor) -> Tensor:
        """Return in which slots (M, S) two tensors are the same: (M, S, ...), (M, T, S, ...) or (M * S, ...)."""
        num_tasks, per_task = self._grid
        same = _close(one, other) if one.is_floating_point() else one == other
        if same.shape[:1] == (num_tasks * per_task,):
            return same.reshape(num_tasks, per_task, -1).all(-1)
        if same.shape[:2] == self._grid:
            return same.reshape(num_tasks, per_task, -1).all(-1)
        if same.dim() > 2 and same.shape[::2][:2] == self._grid:
            return same.transpose(1, 2).reshape(num_tasks, per_task, -1).all(-1)
        return same.all().expand(self._grid)

    def _collect(self, phase: Phase, arrays: EpisodeArrays) -> TaskEpisodes:
        """Return the episodes of all waves, after waiting for the device once."""
        whole = arrays.by_name()
        numbers = [whole[name] for name in ("observations", "actions", "rewards", "final_observations")]
        faulty = torch.stack([~array.isfinite().all() for array in numbers if array.is_floating_point()]).any()
        physics = self._slots.physics
        state = [whole["lengths"].max(), faulty]
        if physics is not None:
            state.extend(physics.take_overflow().unbind())
        longest, is_faulty, *overflow = torch.stack([flag.long() for flag in state]).tolist()
        if physics is not None:
            physics.refuse_overflow(*map(bool, overflow))
        self._slots.family.refuse_faults()
        if is_faulty:
            _refuse_not_finite(whole, self._first_task)
        return TaskEpisodes(**arrays.first_steps(longest).by_name(), tasks=phase.tasks, longest=longest)


def _close(one: Tensor, other: Tensor) -> Tensor:
    return torch.isclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True)


def _places(policy: Policy) -> list[int]:
    """Return where the buffers of a policy are, which may be replaced."""
    return [buffer.data_ptr() for buffer in policy.buffers()]


def _tensors_of(outcome: Outcome) -> list[Tensor]:
    *arrays, terms = outcome
    return [array for array in (*arrays, *terms.values()) if isinstance(array, Tensor)]


def _recorded(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Run work that has been run before, and return it as a CUDA graph, launched without Python in between."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        # A policy may have nothing to prepare.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local"):
            work()
    return graph.replay


def device_arrays(env: EnvDescription, sizes: tuple[int, int, int], device: torch.device) -> EpisodeArrays:
    """Return tensors of zeros for the episodes of a phase."""
    layout: dict[str, Any] = dict(EpisodeArrays.layout(env, *sizes))
    for name, (shape, dtype) in layout.items():
        layout[name] = torch.zeros(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)
    return EpisodeArrays.of(layout)


class _Record:
    """What happens in one wave of episodes, in tensors (M, T, S, ...) that stay where they are."""

    def __init__(self, env: EnvDescription, sizes: tuple[int, int, int], device: torch.device) -> None:
        self._grid, self._horizon = sizes[:2], sizes[2]
        self._arrays: Any = device_arrays(env, sizes, device)

    def state(self) -> dict[str, Tensor]:
        """Return what a step records, by name."""
        names = ("actions", "rewards", "lengths", "terminated")
        return {name: getattr(self._arrays, name) for name in names} | dict(self._arrays.infos)

    def begin(self) -> None:
        """Forget the wave before."""
        self._arrays.lengths.zero_()
        self._arrays.terminated.zero_()

    def choice(self, step: Tensor, observations: Tensor, actions: Tensor, active: Tensor | None) -> Tensor:
        """Record observations and actions (M, S, ...), and return the actions, zeros where no episode continues."""
        actions = _where(active, actions)
        self._arrays.observations.index_copy_(1, step, _where(active, observations).unsqueeze(1))
        self._arrays.actions.index_copy_(1, step, actions.to(self._arrays.actions.dtype).unsqueeze(1))
        return actions

    def outcome(
        self,
        step: Tensor,
        rewards: Tensor,
        terms: Mapping[str, Tensor],
        observations: Tensor,
        active: Tensor | None,
        terminated: Tensor | None,
        ended: Tensor | None,
    ) -> None:
        """Record the outcome of a step in all slots (M * S, ...), and which (M, S) terminated or ended in any way."""
        self._arrays.rewards.index_copy_(1, step, _where(active, rewards.float().reshape(self._grid)).unsqueeze(1))
        for name, info in self._arrays.infos.items():
            term = terms[name].float().reshape(self._grid)
            if info.dim() == 3:
                info.index_copy_(1, step, _where(active, term).unsqueeze(1))
            else:
                info.copy_(term if active is None else torch.where(active, term, info))
        if ended is not None and active is not None:
            self._arrays.lengths.add_(active)
            self._arrays.terminated.logical_or_(terminated)
            self._take_final(observations, ended)

    def _take_final(self, observations: Tensor, which: Tensor) -> None:
        final = self._arrays.final_observations
        rows = which.reshape(*which.shape, *(1,) * (final.dim() - 2))
        final.copy_(torch.where(rows, observations.reshape(final.shape), final))

    def finish(self, observations: Tensor, running: Tensor, may_end: bool) -> EpisodeArrays:
        """Return everything, after the last step, at which the episodes `running` (M, S) are truncated."""
        if not may_end:
            self._arrays.lengths.fill_(self._horizon)
        self._take_final(observations, running)
        torch.logical_not(self._arrays.terminated, out=self._arrays.truncated)
        episodes: EpisodeArrays = self._arrays
        return episodes


def _where(active: Tensor | None, values: Tensor) -> Tensor:
    """Return values (M, S, ...), zeros where `active` (M, S) is false; None for everywhere."""
    if active is None:
        return values
    return torch.where(active.reshape(*active.shape, *(1,) * (values.dim() - 2)), values, torch.zeros_like(values))


def _refuse_not_finite(arrays: Mapping[str, Tensor], first_task: int) -> None:
    """Name the first number that is not finite, in the order in which the CPU would have met it."""
    lengths = arrays["lengths"].cpu()
    found: list[tuple[int, int, int, int, str]] = []
    for order, (what, name) in enumerate(
        (("observation", "observations"), ("action", "actions"), ("reward", "rewards"))
    ):
        array = arrays[name]
        if array.is_floating_point():
            faulty = ~array.isfinite().flatten(3).all(-1) if array.dim() > 3 else ~array.isfinite()
            found += [(step, order, task, episode, what) for task, step, episode in faulty.nonzero().tolist()]
    final = arrays["final_observations"]
    if final.is_floating_point():
        faulty = ~final.isfinite().flatten(2).all(-1) if final.dim() > 2 else ~final.isfinite()
        found += [
            (int(lengths[task, episode]) - 1, 3, task, episode, "observation")
            for task, episode in faulty.nonzero().tolist()
        ]
    step, order, task, episode, what = min(found)
    name = ("observations", "actions", "rewards", "final_observations")[order]
    shown = arrays[name][task, episode] if order == 3 else arrays[name][task, step, episode]
    place = f"task {first_task + task}, episode {episode}, step {step + (order == 3)}"
    faulty_tasks = sorted({first_task + fault[2] for fault in found if fault[:2] == (step, order)})
    raise not_finite(f"the {what} of {place} is not finite: {shown.cpu().numpy()}", faulty_tasks)
