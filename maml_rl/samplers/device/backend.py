"""Samples whole phases on a device, where the episodes stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.arguments import check_choices
from maml_rl.config.placement import Placement
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.policies import Memory
from maml_rl.policies.policy import greedy, perform
from maml_rl.profiling import StageTimer
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.device.slots import DeviceSlots, reason_against
from maml_rl.samplers.device.streams import PhaseNoise
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.failures import describe_env
from maml_rl.samplers.in_process import WorkHere
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import check_actions, check_carried_memory, chosen, initial_memory, phase_parameters
from maml_rl.samplers.rollout.recorder import SlotTable, check_finite
from maml_rl.samplers.worker_progress import IN_RESET, IN_SAMPLE_TASKS, MAKING, describe_activity
from maml_rl.spaces import ArrayElements

# Loops that are kept: one for each shape of a phase and way of acting.
_LOOPS_KEPT = 4


class DeviceBackend(RolloutBackend):
    """Carries out phases on one device; tasks are drawn on the CPU."""

    def __init__(self, placement: Placement, recipe: Recipe, slots_per_task: int) -> None:
        self._device, self._slots_per_task = torch.device(placement.device), slots_per_task
        self._recipe, self._work = recipe, WorkHere(describe_env(recipe.env))
        # One slot on the CPU, which describes the others and draws their tasks.
        own = {name: value for name, value in recipe.env_kwargs.items() if name != "engine"}
        with self._work.begin(describe_activity(MAKING)):
            self._host: MetaVectorEnv = replace(recipe, env_kwargs=own).make(1)
        against = reason_against(self._host)
        if against:
            raise ConfigError(f"backend 'device' cannot sample {recipe.env}: {against}; use backend 'auto'")
        self._slots: DeviceSlots | None = None
        self._loops: list[DeviceLoop] = []

    @property
    def slots(self) -> DeviceSlots:
        """The slots of the last phase."""
        assert self._slots is not None
        return self._slots

    def prepare(self, num_tasks: int) -> None:
        num_slots = num_tasks * self._slots_per_task
        if self._slots is None or self._slots.num_envs != num_slots:
            self._close_slots()
            recipe = self._recipe
            if recipe.family is not None and recipe.family.has_physics:
                own: dict[str, Any] = {"engine": "warp", "device": str(self._device)}
                recipe = replace(recipe, env_kwargs={**recipe.env_kwargs, **own})
            with self._work.begin(describe_activity(MAKING)):
                self._slots = DeviceSlots(recipe.make(num_slots), self._device, self._work)

    def describe(self) -> EnvDescription:
        return EnvDescription.of(self._host)

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        with self._work.begin(describe_activity(IN_SAMPLE_TASKS)):
            return self._host.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        self.prepare(len(phase.tasks))
        assert self._slots is not None
        self._work.begin("", self._slots.num_envs, phase.slot_tasks)
        with timer.stage("physics"):
            shape = _shape(phase)
            loop = next((candidate for candidate in self._loops if candidate.shape == shape), None)
            if loop is None:
                loop = DeviceLoop(self._slots, self.describe(), phase)
                self._loops = [loop, *self._loops[: _LOOPS_KEPT - 1]]
            return loop.run(phase)

    def close(self) -> None:
        self._close_slots()
        self._host.close()

    def _close_slots(self) -> None:
        slots, self._loops, self._slots = self._slots, [], None
        if slots is not None:
            slots.close()


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

    Attributes:
        shape: what its phases have in common.
    """

    def __init__(self, slots: DeviceSlots, env: EnvDescription, phase: Phase) -> None:
        self._slots, self._device, self._env, self.shape = slots, slots.device, env, _shape(phase)
        num_tasks, _, self._horizon = phase.sizes
        self._grid = num_tasks, phase.per_task
        self._policy = greedy(phase.policy) if phase.deterministic else phase.policy
        given, _ = phase_parameters(phase.policy, num_tasks, phase.params)
        self._params = {name: value.detach().to(self._device).clone() for name, value in given.items()}
        self._first_task = phase.streams.first_task
        size = phase.policy.noise_size
        self._noise = PhaseNoise(phase.policy.noise_kind, (self._horizon, *self._grid, size), self._device)
        self._recorder = _MaskedRecorder(slots, env, (*self._grid, self._horizon))
        self._initial = initial_memory(self._policy, self._grid, self._device)
        self._memory = tuple(kept.clone() for kept in self._initial)
        self._act: Callable[..., tuple[Tensor, Memory]] | None = None
        self._outcome: list[Any] = []
        self._prepare: Callable[[], None] = self._make_actor
        self._advance: Callable[[], None] = self._one_step
        self._is_ready = self._device.type != "cuda" or not self._policy.has_static_steps
        # What CUDA records runs on a stream of its own.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

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
        (num_tasks, per_task), num_episodes = self._grid, phase.episodes_per_task
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
            episodes.view(slice(None), slice(first, first + per_task)).fill(self._recorder.finish())
        return self._collect(phase, episodes)

    def _begin(self, seeds: Tensor, *, forget: bool) -> None:
        """Begin an episode in every slot."""
        self._slots.begin(seeds)
        self._recorder.begin()
        if forget:
            for kept, empty in zip(self._memory, self._initial, strict=True):
                kept.copy_(empty)

    def _make_actor(self) -> None:
        self._act = self._policy.actor(self._params, self._first_task)

    def _one_step(self) -> None:
        """Act, step and record, all of it without waiting."""
        self._choose()
        self._step_slots()
        self._tell()

    def _choose(self) -> None:
        """Act, record what the policy saw and chose, and keep its memory in the slots that continue."""
        assert self._act is not None
        recorder, observations = self._recorder, self._slots.observations.unflatten(0, self._grid)
        noise = self._noise.rows.index_select(0, recorder.step).reshape(*self._grid, -1)
        told = (recorder.running,) if self._policy.told_who_acts else ()
        actions, memory = self._act(observations, noise, self._memory, *told)
        check_actions(self._policy, actions, (*self._grid, *recorder.action_shape))
        check_carried_memory(self._policy, memory, self._memory)
        for old, new in zip(self._memory, memory, strict=True):
            # What was written into it counts only where the rest of the memory says so; see `Policy.actor`.
            if new is not old:
                old.copy_(new if recorder.active is None else chosen(recorder.active, new, old))
        self._actions = perform(self._policy, recorder.write_choice(observations, actions).flatten(0, 1))

    def _step_slots(self) -> None:
        """Step, and keep the outcome, for slots that are no part of a graph always in the same place."""
        active = self._recorder.active
        outcome = self._slots.step(self._actions, None if active is None else active.flatten())
        if self._slots.can_be_recorded:
            self._outcome = outcome
        elif not self._outcome:
            self._outcome = [new.clone() if isinstance(new, Tensor) else new for new in outcome]
        else:
            for kept, new in zip(self._outcome, outcome, strict=True):
                if isinstance(new, Tensor):
                    kept.copy_(new)

    def _tell(self) -> None:
        """Record the outcome of a step."""
        self._recorder.write_outcome(*self._outcome)

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
                        "tensors, as attributes or in dicts and lists of them, or use backend 'auto' without a device"
                    )

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors that a step reads and changes, by name."""
        memory = {f"memory {number}": kept for number, kept in enumerate(self._memory)}
        return self._slots.state() | memory | self._recorder.state()

    def _same_slots(self, one: Tensor, other: Tensor) -> Tensor:
        """Return in which slots (M, S) two tensors are the same: (M, S, ...), (M, T, S, ...) or (M * S, ...)."""
        num_tasks, per_task = self._grid
        if one.is_floating_point():
            same = torch.isclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True)
        else:
            same = one == other
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
        faults = [~array.isfinite().all() for array in numbers if array.is_floating_point()]
        real = torch.arange(phase.horizon, device=self._device)[:, None] < whole["lengths"].unsqueeze(1)
        faults += _are_outside(self._env.observation_space, whole["observations"], real)
        faults += _are_outside(self._env.observation_space, whole["final_observations"], whole["lengths"] > 0)
        if isinstance(self._env.action_space, spaces.Discrete):
            faults += _are_outside(self._env.action_space, whole["actions"], real)
        faulty = torch.stack(faults).any()
        physics = self._slots.physics
        state = [whole["lengths"].max(), faulty]
        if physics is not None:
            state.extend(physics.take_overflow().unbind())
        longest, is_faulty, *overflow = torch.stack([flag.long() for flag in state]).tolist()
        if physics is not None:
            physics.refuse_overflow(*map(bool, overflow))
        self._slots.family.refuse_faults()
        if is_faulty:
            self._refuse(phase, arrays)
        return TaskEpisodes(**arrays.first_steps(longest).by_name(), tasks=phase.tasks, longest=longest)

    def _refuse(self, phase: Phase, episodes: EpisodeArrays) -> None:
        """Name the first number that is not finite or not in its space, in the order in which the CPU meets them."""
        arrays: dict[str, Any] = {
            name: array.cpu().numpy() for name, array in episodes.by_name().items() if name != "infos"
        }
        host, table, slots, work = EpisodeArrays(**arrays), SlotTable(phase), phase.own_slots, self._slots.work
        family, choices = type(self._slots.family).__name__, self._env.action_space
        elements = ArrayElements(self._env.observation_space)

        def refuse_outside(observations: Any) -> None:
            for slot in np.flatnonzero(table.running).tolist():
                work.progress.current_slots[0] = slot
                try:
                    elements.array(observations[slot])
                except ValueError as error:
                    raise ValueError(f"{family} wrote {error}") from None

        for first in range(0, phase.episodes_per_task, phase.per_task):
            wave = host.view(slice(None), slice(first, first + phase.per_task))
            lengths, final = wave.lengths.reshape(-1), wave.final_observations
            final = final.reshape(len(lengths), *final.shape[2:])
            observations, actions, rewards = (
                array.swapaxes(0, 1).reshape(phase.horizon, len(lengths), *array.shape[3:])
                for array in (wave.observations, wave.actions, wave.rewards)
            )
            table.begin_all()
            with work.at(IN_RESET):
                refuse_outside(observations[0])
            for step in range(phase.horizon):
                check_finite(table, "observation", observations[step], slots)
                check_finite(table, "action", actions[step], slots)
                ends = (lengths == step + 1).reshape(-1, *(1,) * (final.ndim - 1))
                work.progress.current_slots[0] = -1
                with work.at(step):
                    if isinstance(choices, spaces.Discrete):
                        check_choices(actions[step], int(choices.n))
                    refuse_outside(np.where(ends, final, observations[min(step + 1, phase.horizon - 1)]))
                check_finite(table, "reward", rewards[step], slots)
                table.common_step, table.running[:] = step + 1, lengths == step + 1
                check_finite(table, "observation", final, slots)
                table.running[:] = lengths > step + 1


def _shape(phase: Phase) -> tuple[Any, ...]:
    """Return what the phases of one loop have in common."""
    policy, num_tasks = phase.policy, len(phase.tasks)
    _, is_stacked = phase_parameters(policy, num_tasks, phase.params)
    # A graph reads a policy's buffers where they are.
    places = [buffer.data_ptr() for buffer in policy.buffers()]
    return num_tasks, phase.horizon, phase.deterministic, is_stacked, phase.streams.first_task, policy, places


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


class _MaskedRecorder:
    """Writes one wave of episodes into tensors (M, T, S, ...) that stay where they are, where masks say so.

    Args:
        slots: all of which step together.
        env: description of one slot.
        sizes: M, S and T.

    Attributes:
        action_shape: of one action.
        running: (M, S) bool, whether the episode continues.
        step: (1,) int64, the steps that all slots have done.
    """

    def __init__(self, slots: DeviceSlots, env: EnvDescription, sizes: tuple[int, int, int]) -> None:
        self._slots, self._grid, self._horizon = slots, sizes[:2], sizes[2]
        self._arrays: Any = device_arrays(env, sizes, slots.device)
        self.action_shape = tuple(self._arrays.actions.shape[3:])
        self.running = torch.ones(self._grid, dtype=torch.bool, device=slots.device)
        self.step = torch.zeros(1, dtype=torch.int64, device=slots.device)

    @property
    def active(self) -> Tensor | None:
        """`running`; None where all episodes run until the horizon."""
        return None if self._slots.may_end is False else self.running

    def state(self) -> dict[str, Tensor]:
        """Return what a step reads and records, by name."""
        names = ("actions", "rewards", "lengths", "terminated")
        own = {name: getattr(self._arrays, name) for name in names}
        return own | dict(self._arrays.infos) | {"running": self.running, "step": self.step}

    def begin(self) -> None:
        """Begin the next wave."""
        self.running.fill_(True)
        for tensor in (self.step, self._arrays.lengths, self._arrays.terminated):
            tensor.zero_()

    def write_choice(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Record observations and actions (M, S, ...), and return the actions, zeros where no episode continues."""
        self._write(self._arrays.observations, observations)
        return self._write(self._arrays.actions, actions)

    def write_outcome(self, rewards: Tensor, terminated: Any, truncated: Any, *infos: Tensor) -> None:
        """Record the outcome of a step in all slots, (M * S,) each, and count it; see `DeviceSlots.step`."""
        arrays, running = self._arrays, self.running
        self._write(arrays.rewards, rewards.float())
        for array, info in zip(arrays.infos.values(), infos, strict=True):
            if array.dim() == 3:
                self._write(array, info.float())
            else:
                of_slots = info.float().reshape(self._grid)
                array.copy_(of_slots if self.active is None else chosen(running, of_slots, array))
        if self.active is not None:
            died = running & (terminated if isinstance(terminated, bool) else terminated.reshape(self._grid))
            ended = died if truncated is False else died | (running & truncated.reshape(self._grid))
            arrays.lengths.add_(running)
            arrays.terminated.logical_or_(died)
            self._take_final(ended)
            running &= ~ended
        self.step += 1

    def finish(self) -> EpisodeArrays:
        """Return everything, after the last step, at which the episodes that still run are truncated."""
        if self.active is None:
            self._arrays.lengths.fill_(self._horizon)
        self._take_final(self.running)
        torch.logical_not(self._arrays.terminated, out=self._arrays.truncated)
        episodes: EpisodeArrays = self._arrays
        return episodes

    def _write(self, array: Tensor, values: Tensor) -> Tensor:
        """Write values of a step in all slots, and return them so, (M, S, ...), zeros where no episode continues."""
        values = values.reshape(*self._grid, *array.shape[3:]).to(array.dtype)
        values = values if self.active is None else chosen(self.running, values, torch.zeros_like(values))
        array.index_copy_(1, self.step, values.unsqueeze(1))
        return values

    def _take_final(self, which: Tensor) -> None:
        final = self._arrays.final_observations
        final.copy_(chosen(which, self._slots.observations.reshape(final.shape), final))


def _are_outside(space: spaces.Space[Any], values: Tensor, real: Tensor) -> list[Tensor]:
    """Return whether any `real` one of whole numbers (*real, ...) is outside of its space; [] if none can be."""
    if (limits := ArrayElements(space).limits) is None:
        return []
    low, high = (torch.as_tensor(limit, device=values.device) for limit in limits)
    outside = ((values < low) | (values > high)).reshape(*real.shape, -1).any(-1)
    return [(outside & real).any()]
