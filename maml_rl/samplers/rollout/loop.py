"""The sampling loop of a phase: a policy acts in the slots of a vector environment until all episodes are over.

Every placement runs this loop: this process for all slots, a child process and a Ray actor for a unit of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.machine import intra_op_threads
from maml_rl.policies.policy import greedy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import Actor
from maml_rl.samplers.rollout.noise import EpisodeNoise
from maml_rl.samplers.rollout.recorder import EpisodeRecorder, SlotIndex

# Quantity that a timer averages: the number of workers, or other parts, for which one forward pass acts.
WORKERS_PER_INFERENCE = "workers_per_inference"


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

# Spans of noise that are kept, where slots step together and where every slot is at a step of its own.
_SPANS_KEPT = 2, 16


def sample_phase(
    vector_env: MetaVectorEnv,
    phase: Phase,
    arrays: EpisodeArrays,
    timer: StageTimer = NULL_TIMER,
    inference: CentralInference = WAIT_FOR_ALL,
) -> None:
    """Sample a phase: give the slots their tasks, and run each through its episodes under fixed parameters.

    With S = B slots per task all episodes run at once; with fewer they run in waves. Slots that advance independently
    do not wait for the others of their wave. An episode still running after T steps is truncated there.

    Args:
        vector_env: the slots of the phase.
        phase: what to sample.
        arrays: of all tasks of the phase, (M, T, B, ...); get the episodes in its slots.
        timer: gets the seconds of the stages.
        inference: how the policy acts, where the slots are in several parts.
    """
    with timer.stage("physics"):
        vector_env.reset_task(phase.slot_tasks)
    if phase.deterministic:
        phase = phase.with_policy(greedy(phase.policy), phase.params)
    own = vector_env.buffers.observations
    # One thread: the products are small, and waiting OpenMP threads would spin on the cores that the physics needs.
    # The error about a number that is not finite says more than NumPy's warnings, which would come before it.
    try:
        with torch.inference_mode(), intra_op_threads(1), np.errstate(over="ignore", invalid="ignore"):
            _Loop(vector_env, phase, arrays, timer, inference).run()
    finally:
        if vector_env.buffers.observations is not own:
            own[...] = vector_env.buffers.observations
            vector_env.buffers.observations = own


class _Loop:
    """The state of the loop; see `sample_phase` for the arguments."""

    def __init__(
        self, env: MetaVectorEnv, phase: Phase, arrays: EpisodeArrays, timer: StageTimer, inference: CentralInference
    ) -> None:
        self._env, self._phase, self._timer, self._inference = env, phase, timer, inference
        self._parts, self._buffers, self._by_slot = env.parts, env.buffers, env.advances_by_slot
        self._recorder = EpisodeRecorder(arrays, phase)
        num_waves = phase.episodes_per_task // phase.per_task
        # Of every slot the number of its episode, and whether it waits for a reset.
        self._waves, self._num_waves = np.zeros(env.num_envs, np.int64), num_waves
        self._resetting = np.zeros(env.num_envs, np.bool_)
        self._noise: dict[int, EpisodeNoise] = {}
        num_tasks, own, self._own_slots = len(phase.tasks), env.buffers.observations, phase.own_slots
        seeds = phase.streams.episode_seeds(num_tasks, range(phase.episodes_per_task))
        seeds = seeds.reshape(num_tasks, num_waves, -1).swapaxes(0, 1).reshape(num_waves, -1)
        # (waves, slots)
        self._seeds = seeds[:, self._own_slots]
        # Slots that all step together draw their images where they are recorded.
        together = env.observes_anywhere and len(env.parts) == 1
        self._after_the_last = own if together and num_waves == 1 and self._recorder.observe_in_place() else None
        # The policy acts for whole tasks: where others have some of their slots, rows of this unit stand for these.
        self._is_cut, self._is_padded = num_tasks * phase.per_task > len(own), False
        self._rows = np.empty((num_tasks * phase.per_task, *own.shape[1:]), own.dtype) if self._is_cut else own
        self._act_together = len(env.parts) == 1 and not phase.policy.told_who_acts
        self._shows_rows = self._is_cut and together and self._after_the_last is None
        if self._shows_rows:
            env.buffers.observations = self._rows[self._own_slots]
        self._actor = Actor(
            phase.policy,
            phase.params,
            self._rows,
            num_tasks,
            inference.device,
            phase.streams.first_task,
            phase.streams.phase,
        )

    def run(self) -> None:
        """Run all slots through their episodes, group by group of the parts in which they step."""
        num_groups = 1 if self._by_slot else min(self._inference.num_groups, len(self._parts))
        for wave in range(1 if self._by_slot else self._num_waves):
            groups = [group.tolist() for group in np.array_split(np.arange(len(self._parts)), num_groups)]
            if self._by_slot:
                self._actor.begin_trial()
                self._recorder.start_wave()
                self._begin_slots(groups[0])
            else:
                self._begin_wave(wave)
                before = self._env.physics_seconds.copy()
                for group in groups:
                    self._act(group)
            while any(groups):
                for group in groups:
                    self._act(self._record(self._receive(group), group))
            if not self._by_slot:
                # Workers run in parallel: the parent has waited for the physics of the busiest.
                self._timer.move("waiting", "physics", float((self._env.physics_seconds - before).max()))
        with self._timer.stage("assembly"):
            self._recorder.finish()

    def _begin_wave(self, wave: int) -> None:
        """Reset all slots for their next episodes."""
        self._waves[:] = wave
        if wave == 0 or self._phase.reset_memory:
            self._actor.begin_trial()
        self._actor.begin_episodes()
        self._recorder.start_wave(wave)
        with self._timer.stage("physics"):
            self._observe_at(0)
            self._env.reset_buffers(self._seeds[wave])

    def _begin_slots(self, slots: Sequence[int]) -> None:
        """Start the reset of slots for their next episodes, each by itself."""
        with self._timer.stage("assembly"):
            for slot in slots:
                wave = int(self._waves[slot])
                self._recorder.begin_episode(slot, wave)
                self._resetting[slot] = True
                self._env.reset_send(slot, int(self._seeds[wave, slot]))

    def _receive(self, group: list[int]) -> list[int]:
        """Wait for steps and resets of a group of parts, and return the parts that have answered."""
        if not group:
            return []
        timeout, indices = (0.0, None) if self._by_slot else (self._inference.recv_timeout, group)
        with self._timer.stage("waiting"):
            return self._env.step_recv(timeout, indices)

    def _record(self, replied: list[int], group: list[int]) -> list[int]:
        """Record the results of parts, remove from their group those that are done, and return those that go on."""
        recorder, buffers, parts = self._recorder, self._buffers, self._parts
        with self._timer.stage("assembly"):
            stepped = [index for index in replied if not self._resetting[index]]
            for slots, _ in self._slots_of(stepped):
                recorder.write_outcome(slots, buffers)
            if recorder.any_restarted and stepped and np.count_nonzero(buffers.restarted):
                answered = np.concatenate([np.arange(parts[index].start, parts[index].stop) for index in stepped])
                self._actor.begin_anew(answered[buffers.restarted[answered]] + self._own_slots.start)
            if self._by_slot:
                self._resetting[replied] = False
            over = {index for index in replied if not np.count_nonzero(recorder.running(parts[index]))}
        if over and self._by_slot:
            self._waves[list(over)] += 1
            following = sorted(slot for slot in over if self._waves[slot] < self._num_waves)
            if following:
                rows = np.array(following) + self._own_slots.start
                self._actor.begin_episodes(rows, forget=self._phase.reset_memory)
                self._begin_slots(following)
            over.difference_update(following)
            replied = [slot for slot in replied if slot not in following]
        if over:
            group[:] = [index for index in group if index not in over]
            replied = [index for index in replied if index not in over]
        return replied

    def _act(self, ready: list[int]) -> None:
        """Let the policy act for parts, and start their steps."""
        for slots, members in self._slots_of(ready):
            with self._timer.stage("inference"):
                actions = self._choose(slots)
                performed = self._actor.perform(actions)
            self._timer.observe(WORKERS_PER_INFERENCE, len(members))
            with self._timer.stage("assembly"):
                self._recorder.write_choice(slots, self._buffers.observations[slots], actions)
                if self._after_the_last is not None and (step := self._recorder.common_step) is not None:
                    self._observe_at(step + 1)
            start = 0
            for index in members:
                stop = start + self._parts[index].stop - self._parts[index].start
                self._env.step_send(index, performed[start:stop])
                start = stop

    def _choose(self, slots: SlotIndex) -> NDArray[np.generic]:
        """Return the actions of slots."""
        first = self._own_slots.start
        if self._is_cut and self._after_the_last is None:
            if not self._is_padded:
                shown = self._buffers.observations.copy()
                self._rows[...] = shown[slots][0]
                self._rows[self._own_slots] = shown
                self._is_padded = True
            if not self._shows_rows:
                self._rows[self._own_slots] = self._buffers.observations
        if isinstance(slots, slice):
            numbers, step = slice(slots.start + first, slots.stop + first), self._recorder.common_step
            if step is not None and self._act_together:
                noise = self._noise_at(int(self._waves[0])).of_tasks(step)
            else:
                noise = self._noise_of(slots)
            return self._actor.act(numbers, noise, self._recorder.running(slots))
        return self._actor.act_for(slots + first, self._noise_of(slots))

    def _noise_of(self, slots: SlotIndex) -> NDArray[np.float32]:
        waves, steps = self._waves[slots], self._recorder.steps(slots)
        if not self._by_slot or (waves == waves[0]).all():
            return self._noise_at(int(waves[0])).rows(slots, steps)
        assert not isinstance(slots, slice)
        rows = np.empty((len(slots), self._phase.policy.noise_size), np.float32)
        for wave in np.unique(waves).tolist():
            of_wave = waves == wave
            rows[of_wave] = self._noise_at(wave).rows(slots[of_wave], steps[of_wave])
        return rows

    def _noise_at(self, wave: int) -> EpisodeNoise:
        if wave not in self._noise:
            self._noise = {number: noise for number, noise in self._noise.items() if number >= self._waves.min()}
            self._noise[wave] = EpisodeNoise(self._phase, wave, _SPANS_KEPT[self._by_slot])
        return self._noise[wave]

    def _observe_at(self, step: int) -> None:
        """Let slots write the observations before a step where they are recorded, if they can."""
        if self._after_the_last is None:
            return
        rows = self._recorder.observations_at(step)
        self._buffers.observations = self._after_the_last if rows is None else rows[self._own_slots]
        if rows is not None:
            self._actor.observe(rows)

    def _slots_of(self, indices: list[int]) -> Iterator[tuple[SlotIndex, list[int]]]:
        """Yield the slots of parts, for which the policy acts at once, each with the parts."""
        if self._by_slot:
            if indices:
                yield np.asarray(indices, np.intp), indices
        elif len(indices) == 1:
            yield self._parts[indices[0]], indices
        else:
            yield from _adjacent(self._parts, indices)


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
