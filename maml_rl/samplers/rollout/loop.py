"""The sampling loop of a phase: a policy acts in the slots of a vector environment until all episodes are over.

Every placement runs this loop: this process for all slots, a child process and a Ray actor for a unit of them.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray

from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.machine import single_threaded
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import Actor
from maml_rl.samplers.rollout.recorder import EpisodeRecorder, SlotIndex, SlotTable, numbers_of

# Quantity that a timer averages: the number of workers, or other parts, for which one forward pass acts.
WORKERS_PER_INFERENCE = "workers_per_inference"


def sample_phase(
    vector_env: MetaVectorEnv,
    phase: Phase,
    arrays: EpisodeArrays,
    timer: StageTimer = NULL_TIMER,
    device: torch.device | str = "cpu",
    recv_timeout: float | None = None,
    num_groups: int = 1,
) -> None:
    """Sample a phase: give the slots their tasks, and run each through its episodes under fixed parameters.

    With S = B slots per task all episodes run at once; with fewer they run in waves. Slots that advance independently
    do not wait for the others of their wave. An episode still running after T steps is truncated there.

    Args:
        vector_env: the slots of the phase.
        phase: what to sample.
        arrays: of all tasks of the phase, (M, T, B, ...); get the episodes in its slots.
        timer: gets the seconds of the stages.
        device: where the policy acts; the episodes stay on the CPU.
        recv_timeout: seconds to wait for parts that have not replied, and longer until one has; None: wait for all.
        num_groups: groups of parts that take turns: while one steps, the policy acts for another.

    Raises:
        NonFiniteError: If an observation, an action or a reward is NaN or infinite.
        TaskError: If a task is malformed.
    """
    with timer.stage("physics"):
        vector_env.reset_task(phase.slot_tasks)
    own = vector_env.buffers.observations
    # One thread: the products are small, and waiting OpenMP threads would spin on the cores that the physics needs.
    # The error about a number that is not finite says more than NumPy's warnings, which would come before it.
    try:
        with torch.inference_mode(), single_threaded(), np.errstate(over="ignore", invalid="ignore"):
            loop = _Loop(vector_env, phase, arrays, timer, device)
            if vector_env.advances_by_slot:
                loop.run_by_slot()
            else:
                loop.run_in_lockstep(recv_timeout, min(num_groups, len(vector_env.parts)))
    finally:
        if vector_env.buffers.observations is not own:
            own[...] = vector_env.buffers.observations
            vector_env.buffers.observations = own


class _Loop:
    """What the schedules share; see `sample_phase` for the arguments."""

    def __init__(
        self, env: MetaVectorEnv, phase: Phase, arrays: EpisodeArrays, timer: StageTimer, device: torch.device | str
    ) -> None:
        self._env, self._timer, self._own = env, timer, env.buffers.observations
        num_tasks, num_waves = len(phase.tasks), phase.episodes_per_task // phase.per_task
        seeds = phase.streams.episode_seeds(num_tasks, range(phase.episodes_per_task))
        seeds = seeds.reshape(num_tasks, num_waves, -1).swapaxes(0, 1).reshape(num_waves, -1)
        # (waves, slots)
        self._seeds = seeds[:, phase.own_slots]
        self._table, self._actor = SlotTable(phase), Actor(phase, device, arrays.actions.shape[3:])
        # Whether all rows that the policy sees are those of slots that step together, and of nobody else.
        self._is_whole = len(env.parts) == 1 and env.num_envs == num_tasks * phase.per_task
        # Such slots write their images where they are recorded, if those of a step are adjacent.
        together = env.observes_anywhere and self._is_whole and num_waves == 1
        in_place = together and arrays.observations[:, 0].flags.c_contiguous
        self._recorder = EpisodeRecorder(arrays, self._table, in_place=in_place)
        # What the policy sees of whole tasks, where not in place.
        self._rows: NDArray[np.generic] | None = None

    # The next two are on docs/architecture.md.
    # --8<-- [start:schedules]
    def run_in_lockstep(self, recv_timeout: float | None, num_groups: int) -> None:
        """Run all slots through their episodes wave by wave, group by group of the parts in which they step."""
        env, table, actor, timer = self._env, self._table, self._actor, self._timer
        for wave, seeds in enumerate(self._seeds):
            if wave == 0 or table.phase.reset_memory:
                actor.begin_trial()
            actor.begin_episodes()
            table.begin_all()
            with timer.stage("physics"):
                self._observe_at(0)
                env.reset_buffers(seeds)
            before = env.physics_seconds.copy()
            groups = [group.tolist() for group in np.array_split(np.arange(len(env.parts)), num_groups)]
            for group in groups:
                self._act(group)
            while any(groups):
                for group in filter(None, groups):
                    with timer.stage("waiting"):
                        replied = env.step_recv(recv_timeout, group)
                    if over := self._record(replied):
                        group[:] = [index for index in group if index not in over]
                        replied = [index for index in replied if index not in over]
                    self._act(replied)
            # Workers run in parallel: the parent has waited for the physics of the busiest.
            timer.move("waiting", "physics", float((env.physics_seconds - before).max()))
        self._finish()

    def run_by_slot(self) -> None:
        """Run every slot through its episodes by itself; the policy acts for all that have replied."""
        env, table, actor = self._env, self._table, self._actor
        num_waves, left = len(self._seeds), env.num_envs
        actor.begin_trial()
        self._begin(range(left))
        while left:
            with self._timer.stage("waiting"):
                replied = env.step_recv(0.0)
            over = self._record([slot for slot in replied if not table.resetting[slot]])
            table.resetting[replied] = False
            following = [slot for slot in sorted(over) if table.waves[slot] + 1 < num_waves]
            if following:
                actor.begin_episodes(np.array(following), forget=table.phase.reset_memory)
                self._begin(following)
            left -= len(over) - len(following)
            self._act([slot for slot in replied if slot not in over])
        self._finish()

    # --8<-- [end:schedules]

    def _begin(self, slots: Sequence[int]) -> None:
        """Start the reset of slots for their next episodes, each by itself."""
        with self._timer.stage("assembly"):
            self._table.begin(slots)
            for slot in slots:
                self._env.reset_send(slot, int(self._seeds[self._table.waves[slot], slot]))

    def _act(self, ready: list[int]) -> None:
        """Let the policy act for parts, and start their steps."""
        env, table, parts = self._env, self._table, self._env.parts
        for slots, members in self._slots_of(ready):
            with self._timer.stage("inference"):
                self._show(slots)
                actions = self._actor.act(slots, table.wave(slots), table.step(slots), table.running[slots])
                # As they are recorded, wherever they go from here.
                performed = self._actor.perform(actions.astype(self._recorder.action_dtype, copy=False))
            self._timer.observe(WORKERS_PER_INFERENCE, len(members))
            with self._timer.stage("assembly"):
                self._recorder.write_choice(slots, env.buffers.observations[slots], actions)
                if self._recorder.in_place and table.common_step is not None:
                    self._observe_at(table.common_step + 1)
            start = 0
            for index in members:
                stop = start + parts[index].stop - parts[index].start
                env.step_send(index, performed[start:stop])
                start = stop

    def _record(self, replied: list[int]) -> set[int]:
        """Record the steps of parts, and return which of these have no episode left."""
        env, table = self._env, self._table
        buffers, parts = env.buffers, env.parts
        with self._timer.stage("assembly"):
            for slots, _ in self._slots_of(replied):
                self._recorder.write_outcome(slots, buffers)
                if table.apart and np.count_nonzero(again := buffers.restarted[slots]):
                    self._actor.begin_anew(numbers_of(slots)[again])
            return {index for index in replied if not np.count_nonzero(table.running[parts[index]])}

    def _finish(self) -> None:
        with self._timer.stage("assembly"):
            self._recorder.finish()

    def _show(self, slots: SlotIndex) -> None:
        """Show the policy the observations of `slots`, in rows for the slots of whole tasks."""
        if self._recorder.in_place:
            return
        phase, observations = self._table.phase, self._own
        if self._rows is None:
            # What others have, or has not been reset, may be anything: a row of these slots stands for it.
            num_rows = len(phase.tasks) * phase.per_task
            self._rows = observations if self._is_whole else np.repeat(observations[slots][:1], num_rows, axis=0)
            self._actor.observe(self._rows)
        if self._rows is not observations:
            self._rows[phase.own_slots][slots] = observations[slots]

    def _observe_at(self, step: int) -> None:
        """Let slots write the observations before a step where they are recorded, if they can."""
        if self._recorder.in_place:
            rows = self._recorder.observations_at(step)
            self._env.buffers.observations = self._own if rows is None else rows[self._table.phase.own_slots]
            if rows is not None:
                self._actor.observe(rows)

    def _slots_of(self, indices: list[int]) -> Iterator[tuple[SlotIndex, list[int]]]:
        """Yield the slots of parts, for which the policy acts at once, each with the parts: ranges without a gap."""
        parts = self._env.parts
        if self._env.advances_by_slot:
            if indices:
                yield np.asarray(indices, np.intp), indices
            return
        if len(indices) == 1:
            yield parts[indices[0]], indices
            return
        ordered, members = sorted(indices), list[int]()
        for index, following in zip_longest(ordered, ordered[1:]):
            members.append(index)
            if following is None or parts[index].stop != parts[following].start:
                yield slice(parts[members[0]].start, parts[index].stop), members
                members = []
