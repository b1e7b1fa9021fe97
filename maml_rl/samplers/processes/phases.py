"""Phases that workers sample by themselves: parameters go to them, a message starts a unit, and episodes come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.env_recipe import require_picklable_tasks
from maml_rl.samplers.episode_arrays import EpisodeArrays, Layout
from maml_rl.samplers.phase import WORKER_STAGES, Phase, weighted_parts
from maml_rl.samplers.policy_copies import pickle_policy
from maml_rl.samplers.processes.messages import LoadPolicy, RunPhase, encode
from maml_rl.samplers.processes.shared_buffers import PhasePlan, SharedPhase
from maml_rl.samplers.processes.startup import LOAD_SECONDS
from maml_rl.samplers.processes.vector_env import ParallelVectorEnv
from maml_rl.samplers.rollout.actor import phase_parameters
from maml_rl.samplers.rollout.loop import WORKERS_PER_INFERENCE

# Phases from which the speeds of workers are estimated.
_PHASES_SEEN = 8
# Work is shared out by speeds where the last worker would otherwise take so many times as long.
WORTH_A_CHANGE = 1.03


class WorkerSpeeds:
    """How fast each worker is, as a multiple of the mean, as far as its last phases tell that from chance.

    Cores are not all equally fast: they differ by design, or share their arithmetic with another core.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._seen: deque[NDArray[np.float64]] = deque(maxlen=_PHASES_SEEN)

    def observe(self, steps: NDArray[np.int64], seconds: NDArray[np.float64]) -> None:
        """Take the steps of each worker in a phase into account, and the seconds that they took."""
        if (seconds > 0.0).all() and (steps > 0).all():
            speeds = steps / seconds
            self._seen.append(speeds / speeds.mean())

    def relative(self) -> NDArray[np.float64]:
        """Return the estimates (W,), positive: the mean of each, closer to 1 the more its phases differ."""
        if len(self._seen) < 2 or self._num_workers < 2:
            return np.ones(self._num_workers)
        seen = np.stack(self._seen)
        means = seen.mean(axis=0)
        by_chance = float(seen.var(axis=0, ddof=1).mean()) / len(seen)
        lasting = max(0.0, float(means.var(ddof=1)) - by_chance)
        trust = lasting / (lasting + by_chance) if lasting > 0.0 else 0.0
        estimates: NDArray[np.float64] = 1.0 + (means - 1.0) * trust
        return estimates


class WorkerPhases:
    """Lets the workers of a vector environment sample phases by themselves."""

    def __init__(self, env: ParallelVectorEnv) -> None:
        self.env = env
        # Units of the current phase whose episodes are in the memory, by their first slots.
        self._done: set[int] = set()
        self.speeds, self._parts = WorkerSpeeds(env.num_workers), list(env.parts)
        self._loaded: tuple[Policy, PhasePlan, SharedPhase, dict[str, Any]] | None = None

    def start_phase(self) -> None:
        """Begin another phase: no unit of it is done."""
        self._done.clear()

    def sample(
        self,
        phase: Phase,
        timer: StageTimer = NULL_TIMER,
        units: Sequence[slice] | None = None,
        *,
        number: int = 0,
        num_phases: int = 1,
        copies: bool = True,
    ) -> tuple[EpisodeArrays, list[tuple[slice, float]]]:
        """Have workers sample a phase, and wait for it.

        A worker hangs if it takes longer than `step_timeout` for one call of one slot. After a `ChildLost` the units
        that were done are not sampled again, until `start_phase`.

        Args:
            phase: its policy's parameters are sent every time, the rest of the policy only the first time.
            timer: gets the seconds of the stages.
            units: ranges of slots, none longer than any worker's, which workers take when they are idle; None if each
                samples its own slots, the more the faster it is.
            number: which of the phases in the shared memory it is.
            num_phases: for how many there is room.
            copies: return a copy, which is made while workers run, as they write the next phase into their memory.

        Returns:
            The episodes, (M, T, B, ...), in the shared memory or copied; and the units, each with the seconds that its
            environments took.

        Raises:
            TypeError: If the policy or a task cannot be pickled.
            ChildLost: If a worker died.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            TaskError: If a task is malformed.
            ChildEnvError: If an environment raised, or the memory cannot be allocated.
            ChildEnvTimeout: If a worker hangs.
        """
        env, pool, timed = self.env, self.env.pool, timer is not NULL_TIMER
        shared, alike = self._write_parameters(phase, num_phases)
        timer.observe(WORKERS_PER_INFERENCE, 1)
        shared.stage_seconds[:] = 0.0
        episodes = shared.episodes[number].empty_like() if copies else shared.episodes[number]
        ranges, without, generation = units or self._own_parts(), phase.without_policy(), pool.generation
        version = int(shared.version[0])
        commands = [
            RunPhase(generation, version, unit.start // phase.per_task, without.unit(unit), alike, timed, number)
            for unit in ranges
        ]
        try:
            messages = [encode(each) for each in commands]
        except Exception:
            require_picklable_tasks(phase.slot_tasks)
            raise
        # For each busy worker its unit, and its seconds before that.
        having: dict[int, tuple[slice, float]] = {}
        seconds_of: list[tuple[slice, float]] = []

        def give(index: int, which: int) -> None:
            having[index] = ranges[which], float(env.physics_seconds[index])
            pool.send(index, commands[which], pool.step_timeout, messages[which])

        def take_episodes(unit: slice) -> None:
            if copies:
                for of_tasks in phase.ranges(unit):
                    episodes.view(*of_tasks).fill(shared.episodes[number].view(*of_tasks))

        with timer.stage("waiting"):
            waiting = deque(which for which, unit in enumerate(ranges) if unit.start not in self._done)
            done = [unit for unit in ranges if unit.start in self._done]
            if units is None:
                while waiting:
                    give(waiting[0], waiting.popleft())
            for index in range(min(env.num_workers, len(waiting))):
                give(index, waiting.popleft())
            for unit in done:
                take_episodes(unit)
            while having:
                for index in pool.wait(list(having), timeout=0.0):
                    pool.take(index)
                    unit, before = having.pop(index)
                    self._done.add(unit.start)
                    seconds_of.append((unit, float(env.physics_seconds[index]) - before))
                    if waiting:
                        give(index, waiting.popleft())
                    take_episodes(unit)
            self._done.clear()
        if units is None and env.is_batch and not done:
            of_workers = sorted(seconds_of, key=lambda each: each[0].start)
            steps = [sum(int(episodes.lengths[at].sum()) for at in phase.ranges(unit)) for unit, _ in of_workers]
            self.speeds.observe(np.array(steps), np.array([seconds for _, seconds in of_workers]))
        if timed:
            # Workers run in parallel: the parent has waited for the busiest.
            of_busiest = shared.stage_seconds[shared.stage_seconds.sum(axis=1).argmax()]
            for stage, seconds in zip(WORKER_STAGES, of_busiest.tolist(), strict=True):
                timer.move("waiting", stage, seconds)
        return episodes, seconds_of

    def _own_parts(self) -> Sequence[slice]:
        """Return the slots of each worker: its own, or as many as fit its speed where that is worth it."""
        if self.env.is_batch:
            speeds: list[float] = self.speeds.relative().tolist()

            def until_last(parts: Sequence[slice]) -> float:
                return max(float(part.stop - part.start) / speed for part, speed in zip(parts, speeds, strict=True))

            parts = weighted_parts(self.env.num_envs, speeds)
            is_possible = all(part.start < part.stop for part in parts)
            if is_possible and until_last(self._parts) > WORTH_A_CHANGE * until_last(parts):
                self._parts = parts
        return self._parts

    def _write_parameters(self, phase: Phase, num_phases: int) -> tuple[SharedPhase, bool]:
        """Write the parameters of a phase into the shared memory, and give workers its policy.

        Returns:
            The memory, and whether only the parameters of the first task are there, which are those of all.
        """
        num_tasks, constants = len(phase.tasks), dict(phase.policy.named_buffers())
        # The policy's own parameters are sent once, in the place of those of the first task.
        alike = phase.params is None and not phase.policy.has_memory
        if alike:
            of_phase, is_stacked = {name: value.unsqueeze(0) for name, value in phase.policy.named_parameters()}, True
        else:
            with torch.no_grad():
                of_phase, is_stacked = phase_parameters(phase.policy, num_tasks, phase.params)
        plan = PhasePlan(
            phase.sizes, _layout(of_phase, num_tasks if alike else None), _layout(constants), is_stacked, num_phases
        )
        shared = self._load(phase.policy, plan)
        for tensors, arrays in ((of_phase, shared.parameters), (constants, shared.constants)):
            for name, tensor in tensors.items():
                target = arrays[name][:1] if alike and tensors is of_phase else arrays[name]
                target[...] = tensor.detach().cpu().numpy()
        shared.version[0] += 1
        return shared, alike

    def _load(self, policy: Policy, plan: PhasePlan) -> SharedPhase:
        """Return the memory for phases of `policy`, the same as long as policy and plan are the same.

        Workers get the policy, all of it except parameters and constants, before their next unit.
        """
        env, startup = self.env, self.env.startup
        if self._loaded is None or self._loaded[0] is not policy or self._loaded[1] != plan:
            shared = SharedPhase(env.memory, startup.buffers.size, plan, startup.env, env.num_workers)
            shared.version[0] = 0
            text = pickle_policy(policy)
            load: dict[str, Any] = {"plan": plan, "policy": text, "interpreter": startup.interpreter_for(text)}
            self._loaded = policy, plan, shared, load
        self.load_again()
        return self._loaded[2]

    def episodes(self, number: int) -> EpisodeArrays:
        """Return the episodes of a phase in the shared memory, which are valid until the next of this number begins."""
        assert self._loaded is not None
        return self._loaded[2].episodes[number]

    def load_again(self) -> None:
        """Give workers that replace others the policy."""
        assert self._loaded is not None
        env, load = self.env, self._loaded[3]
        pool = env.pool
        without = [index for index in range(env.num_workers) if pool.worker(index).policy is not load]
        if without:
            seconds = max(pool.step_timeout, LOAD_SECONDS)
            pool.ask(without, seconds, [LoadPolicy(pool.generation, **load) for _ in without])
            for index in without:
                pool.worker(index).policy = load


def _layout(tensors: Mapping[str, Tensor], num_tasks: int | None = None) -> Layout:
    """Return shapes and types of tensors; with `num_tasks` for so many tasks, where the tensors are of one."""
    return {
        name: (
            tuple(tensor.shape) if num_tasks is None else (num_tasks, *tensor.shape[1:]),
            torch.empty(0, dtype=tensor.dtype).numpy().dtype,
        )
        for name, tensor in tensors.items()
    }
