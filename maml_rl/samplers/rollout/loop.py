"""The one way through a phase: a policy acts in the slots of a vector environment until all episodes are over.

This process takes it with all slots, a child process and a Ray actor with a copy of the policy and their own slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from maml_rl.envs.meta_env import StepBuffers
from maml_rl.machine import intra_op_threads
from maml_rl.policies.policy import greedy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import Actor, EpisodeNoise
from maml_rl.samplers.rollout.recorder import EpisodeRecorder

# Quantity that a timer averages: the number of workers, or other parts, per forward pass.
WORKERS_PER_INFERENCE = "workers_per_inference"


class Slots(Protocol):
    """The part of a `MetaVectorEnv` that sampling a phase needs."""

    num_envs: int
    parts: tuple[slice, ...]
    buffers: StepBuffers
    observes_anywhere: bool
    advances_by_slot: bool
    physics_seconds: NDArray[np.float64]

    def reset_buffers(self, seeds: NDArray[np.int64]) -> None:
        """Reset all slots, slot i with `seeds[i]`."""

    def reset_send(self, index: int, seed: int) -> None:
        """Start the reset of one slot, where `advances_by_slot`."""

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Start a step of the slots `parts[index]`."""

    def step_recv(self, timeout: float | None, indices: Sequence[int] | None) -> list[int]:
        """Wait for steps that were started, and return whose results are in the buffers."""


@dataclass(frozen=True, slots=True)
class CentralInference:
    """How one policy acts for all parts of a vector environment.

    Attributes:
        device: where the policy acts; the episodes stay on the CPU.
        recv_timeout: seconds to wait for parts that have not replied, and longer until one has; None: wait for all.
        num_groups: groups of parts that take turns: while one steps, the policy acts for another.
    """

    device: torch.device | str = "cpu"
    recv_timeout: float | None = None
    num_groups: int = 1


WAIT_FOR_ALL = CentralInference()

# Blocks of noise that are kept where every slot is at a step of its own.
_BLOCKS_KEPT = 16


def sample_phase(
    vector_env: Slots,
    phase: Phase,
    arrays: EpisodeArrays,
    timer: StageTimer = NULL_TIMER,
    inference: CentralInference = WAIT_FOR_ALL,
) -> None:
    """Sample a phase: one episode per slot and wave under fixed parameters.

    Slot m * S + s belongs to task m. With S = B slots per task all episodes run at once; with fewer they run in waves.
    An episode still running after T steps is truncated there.

    Args:
        vector_env: M * S slots which already have their tasks.
        phase: what to sample.
        arrays: get the episodes, (M, T, B, ...).
        timer: gets the seconds of the stages.
        inference: how the policy acts, where the slots are in several parts.

    Raises:
        NonFiniteError: If an observation, an action or a reward is NaN or infinite.
    """
    policy, streams, num_tasks = phase.policy, phase.streams, len(phase.tasks)
    if phase.deterministic:
        policy = greedy(policy)
    recorder = EpisodeRecorder(arrays, streams.first_task)
    slots_per_task = vector_env.num_envs // num_tasks
    buffers, own = vector_env.buffers, vector_env.buffers.observations
    # Slots that all step together draw their images where they are recorded.
    together = vector_env.observes_anywhere and len(vector_env.parts) == 1
    in_place = together and slots_per_task == recorder.episodes_per_task and recorder.observe_in_place()
    # One thread: the products are small, and waiting OpenMP threads would spin on the cores that the physics needs.
    # The error about a number that is not finite says more than NumPy's warnings, which would come before it.
    try:
        with torch.inference_mode(), intra_op_threads(1), np.errstate(over="ignore", invalid="ignore"):
            actor = Actor(policy, phase.params, own, num_tasks, inference.device, streams.first_task, streams.phase)
            if vector_env.advances_by_slot:
                _run_by_slot(vector_env, phase.with_policy(policy, phase.params), actor, recorder, timer)
            for first in () if vector_env.advances_by_slot else range(0, recorder.episodes_per_task, slots_per_task):
                if first == 0 or phase.reset_memory:
                    actor.begin_trial()
                actor.begin_episodes()
                episodes = range(first, first + slots_per_task)
                noise = EpisodeNoise(policy, streams, num_tasks, episodes, recorder.horizon, phase.deterministic)
                recorder.start_wave(episodes)
                with timer.stage("physics"):
                    if in_place:
                        buffers.observations = recorder.observation_slots(0, own)
                        actor.observe(buffers.observations)
                    vector_env.reset_buffers(streams.episode_seeds(num_tasks, episodes).ravel())
                before = vector_env.physics_seconds.copy()
                after_the_last = own if in_place else None
                _run_wave(vector_env, actor, noise, recorder, inference, timer, after_the_last)
                # Workers run in parallel: the parent has waited for the physics of the busiest.
                timer.move("waiting", "physics", float((vector_env.physics_seconds - before).max()))
    finally:
        if buffers.observations is not own:
            own[...] = buffers.observations
            buffers.observations = own
    with timer.stage("assembly"):
        recorder.finish()


def _run_wave(
    vector_env: Slots,
    actor: Actor,
    noise: EpisodeNoise,
    recorder: EpisodeRecorder,
    inference: CentralInference,
    timer: StageTimer,
    after_the_last: NDArray[Any] | None,
) -> None:
    """Step the parts of the vector environment, group by group, until all their episodes are over.

    Args:
        vector_env: see `sample_phase`, as for the other arguments.
        actor: chooses the actions.
        noise: of the wave's episodes.
        recorder: of the wave's episodes.
        inference: see `sample_phase`.
        timer: gets the seconds of the stages.
        after_the_last: given if observations are written where they are recorded: where those after the last step go.
    """
    parts, buffers = vector_env.parts, vector_env.buffers

    def choose_and_send(indices: list[int]) -> None:
        for slots, members in _adjacent(parts, indices):
            with timer.stage("inference"):
                actions = actor.act(slots, noise.rows(slots, recorder.steps(slots)), recorder.running(slots))
            timer.observe(WORKERS_PER_INFERENCE, len(members))
            with timer.stage("assembly"):
                recorder.write_choice(slots, buffers.observations[slots], actions)
                if after_the_last is not None:
                    following = int(recorder.steps(slots)[0]) + 1
                    buffers.observations = recorder.observation_slots(following, after_the_last)
                    actor.observe(buffers.observations)
            for index in members:
                vector_env.step_send(index, actions[parts[index].start - slots.start : parts[index].stop - slots.start])

    groups = [group.tolist() for group in np.array_split(np.arange(len(parts)), min(inference.num_groups, len(parts)))]
    for group in groups:
        choose_and_send(group)
    while any(groups):
        for group in groups:
            with timer.stage("waiting"):
                replied = vector_env.step_recv(inference.recv_timeout, group) if group else []
            with timer.stage("assembly"):
                unfinished = [index for index in replied if recorder.write_outcome(parts[index], buffers)]
                if buffers.restarted.any():
                    answered = np.concatenate([np.arange(parts[index].start, parts[index].stop) for index in replied])
                    actor.begin_anew(answered[buffers.restarted[answered]])
            for index in set(replied) - set(unfinished):
                group.remove(index)
            choose_and_send(unfinished)


def _run_by_slot(vector_env: Slots, phase: Phase, actor: Actor, recorder: EpisodeRecorder, timer: StageTimer) -> None:
    """Run every slot through its episodes, one after the other, without waiting for any other slot.

    Args:
        vector_env: its slots advance independently.
        phase: see `sample_phase`.
        actor: chooses the actions of the slots that are ready.
        recorder: of the phase's episodes.
        timer: gets the seconds of the stages.
    """
    buffers, streams, num_tasks, num_slots = vector_env.buffers, phase.streams, len(phase.tasks), vector_env.num_envs
    per_task, per_slot = num_slots // num_tasks, recorder.episodes_per_task * num_tasks // num_slots
    seeds = streams.episode_seeds(num_tasks, range(recorder.episodes_per_task))
    waves, resetting = np.zeros(num_slots, np.int64), np.ones(num_slots, np.bool_)
    noise: dict[int, EpisodeNoise] = {}

    def begin(slot: int) -> None:
        task, place = divmod(slot, per_task)
        episode = int(waves[slot]) * per_task + place
        recorder.begin_episode(slot, episode)
        resetting[slot] = True
        vector_env.reset_send(slot, int(seeds[task, episode]))

    def noise_of(ready: NDArray[np.intp]) -> NDArray[np.float32]:
        rows, steps = np.empty((len(ready), phase.policy.noise_size), np.float32), recorder.steps(ready)
        for wave in np.unique(waves[ready]).tolist():
            if wave not in noise:
                episodes = range(wave * per_task, (wave + 1) * per_task)
                noise[wave] = EpisodeNoise(
                    phase.policy,
                    streams,
                    num_tasks,
                    episodes,
                    recorder.horizon,
                    phase.deterministic,
                    blocks_kept=_BLOCKS_KEPT,
                )
            of_wave = waves[ready] == wave
            rows[of_wave] = noise[wave].rows(ready[of_wave], steps[of_wave])
        return rows

    recorder.start_wave(range(per_task))
    actor.begin_trial()
    with timer.stage("assembly"):
        for slot in range(num_slots):
            begin(slot)
    left = num_slots
    while left:
        with timer.stage("waiting"):
            replied = np.asarray(vector_env.step_recv(0.0, None), np.intp)
        if not len(replied):
            continue
        with timer.stage("assembly"):
            stepped = replied[~resetting[replied]]
            resetting[replied] = False
            if len(stepped):
                recorder.write_outcome(stepped, buffers)
                restarted = stepped[buffers.restarted[stepped]]
                if len(restarted):
                    actor.begin_anew(restarted)
            is_ready = recorder.running(replied)
            ready, over = replied[is_ready], replied[~is_ready]
            waves[over] += 1
            following = over[waves[over] < per_slot]
            left -= len(over) - len(following)
            if len(following):
                actor.begin_episodes(following, forget=phase.reset_memory)
                for slot in following.tolist():
                    begin(slot)
                for wave in [wave for wave in noise if wave < waves.min()]:
                    del noise[wave]
        if not len(ready):
            continue
        with timer.stage("inference"):
            actions = actor.act_for(ready, noise_of(ready))
        timer.observe(WORKERS_PER_INFERENCE, len(ready))
        with timer.stage("assembly"):
            recorder.write_choice(ready, buffers.observations[ready], actions)
            for row, slot in enumerate(ready.tolist()):
                vector_env.step_send(slot, actions[row : row + 1])


def _adjacent(parts: Sequence[slice], indices: Sequence[int]) -> Iterator[tuple[slice, list[int]]]:
    """Yield the ranges of slots that `indices` cover without a gap, each with its members."""
    members: list[int] = []
    for index in sorted(indices):
        if members and parts[members[-1]].stop != parts[index].start:
            yield slice(parts[members[0]].start, parts[members[-1]].stop), members
            members = []
        members.append(index)
    if members:
        yield slice(parts[members[0]].start, parts[members[-1]].stop), members
