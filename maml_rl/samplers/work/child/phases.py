"""Phases that workers sample by themselves: parameters go to them, a message starts a unit, and episodes come back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.episode_arrays import EpisodeArrays, KeptMemory, Layout
from maml_rl.samplers.phase import Phase, count_busiest
from maml_rl.samplers.policy_copies import pickle_policy
from maml_rl.samplers.rollout.actor import phase_parameters
from maml_rl.samplers.rollout.loop import WORKERS_PER_INFERENCE
from maml_rl.samplers.work.child.messages import LoadPolicy, RunPhase, encode
from maml_rl.samplers.work.child.shared_buffers import PhasePlan, SharedPhase
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv
from maml_rl.samplers.work.unit import Unit


class WorkerPhases:
    """Lets the workers of a vector environment sample phases by themselves."""

    def __init__(self, env: ParallelVectorEnv) -> None:
        self.env, self._memory = env, KeptMemory()
        # The batch whose phases are in the shared memory, if a store computes on them.
        self.newest: object = None
        self._loaded: tuple[Policy, PhasePlan, SharedPhase, dict[str, Any]] | None = None

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
        """Have workers sample a phase, and wait for it; a unit whose worker dies is sampled by another.

        A worker hangs if one call of one slot takes too long.

        Args:
            phase: its policy's parameters are sent every time, the rest of the policy only the first time.
            timer: gets the seconds of the stages.
            units: ranges of slots, none longer than any worker's, which workers take when they are idle; None if each
                samples its own slots.
            number: which of the phases in the shared memory it is.
            num_phases: for how many there is room.
            copies: return a copy, which is made while workers run, as they write the next phase into their memory.

        Returns:
            The episodes, (M, T, B, ...), in the shared memory or copied; and the units, each with the seconds that its
            environments took.
        """
        env, pool, timed = self.env, self.env.pool, timer is not NULL_TIMER
        env.recover()
        shared, alike = self._write_parameters(phase, num_phases)
        timer.observe(WORKERS_PER_INFERENCE, 1)
        episodes = shared.episodes[number].empty_like(self._memory) if copies else shared.episodes[number]
        without, generation = phase.without_policy(), pool.generation

        def unit_of(slots: slice) -> Unit:
            part = without.unit(slots)
            command = RunPhase(generation, slots.start // phase.per_task, part, alike, timed, number)
            given = command, encode(command, phase.slot_tasks), pool.limits.call
            return Unit("phase", (lambda worker: given,), slots, part.tasks)

        seconds_of: list[tuple[slice, float]] = []
        stages: defaultdict[int, Counter[str]] = defaultdict(Counter)
        work = pool.results([unit_of(slots) for slots in units or env.parts], self.prepare)
        with timer.stage("waiting"):
            for unit, worker, seconds in work:
                stages[worker.index].update(seconds)
                seconds_of.append((unit.part, float(env.physics_seconds[worker.index]) - worker.physics))
                if copies:
                    for of_tasks in phase.ranges(unit.part):
                        episodes.view(*of_tasks).fill(shared.episodes[number].view(*of_tasks))
        if timed:
            count_busiest(timer, stages.values())
        return episodes, seconds_of

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
        return shared, alike

    def _load(self, policy: Policy, plan: PhasePlan) -> SharedPhase:
        """Return the memory for phases of `policy`, the same as long as policy and plan are the same.

        Workers get the policy, all of it except parameters and constants, before their next unit.
        """
        env = self.env
        if self._loaded is None or self._loaded[0] is not policy or self._loaded[1] != plan:
            shared = SharedPhase(env.memory, env.shared.size, plan, EnvDescription.of(env))
            text = pickle_policy(policy)
            load: dict[str, Any] = {"plan": plan, "policy": text, "interpreter": env.interpreter_for(text)}
            self._loaded = policy, plan, shared, load
        return self._loaded[2]

    def episodes(self, number: int) -> EpisodeArrays:
        """Return the episodes of a phase in the shared memory, which are valid until the next of this number begins."""
        assert self._loaded is not None
        return self._loaded[2].episodes[number]

    def prepare(self) -> None:
        """Start the workers that are missing, and give those without it the policy."""
        assert self._loaded is not None
        env, load = self.env, self._loaded[3]
        pool = env.pool
        env.complete()
        without = [index for index in range(env.num_workers) if pool.worker(index).policy is not load]
        if without:
            pool.ask(without, pool.limits.load, [LoadPolicy(pool.generation, **load) for _ in without])
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
