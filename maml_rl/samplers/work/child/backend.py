"""The backend with slots in child processes, in which the policy acts where that is possible and faster."""

from __future__ import annotations

from collections.abc import Sequence

from maml_rl.config.placement import Placement
from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import StageTimer
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.phase import UNITS_PER_WORKER, Phase, slots_together, units_of
from maml_rl.samplers.policy_copies import is_loadable, require_loadable
from maml_rl.samplers.remote_store import RemoteBatch
from maml_rl.samplers.vector_env_backend import VectorEnvBackend
from maml_rl.samplers.work.child.child_store import ChildStore
from maml_rl.samplers.work.child.phases import WorkerPhases
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv

# Units are faster where the busiest worker's environments take this much longer than the mean.
_UNEVEN_SECONDS, _UNEVEN_FRACTION = 0.2, 0.2


class ProcessBackend(VectorEnvBackend):
    """Steps the slots in child processes, in which the policy acts where that is possible and faster."""

    _env: ParallelVectorEnv | None

    def __init__(self, placement: Placement, recipe: Recipe, policy: Policy, slots_per_task: int) -> None:
        super().__init__(placement, recipe, slots_per_task)
        start_method = placement.start_method
        # Refused here rather than in the first phase.
        recipe.pickled()
        if start_method != "fork":
            recipe.require_importable()
        self._placement = placement
        # Whether in the last phase some workers had to wait long for others, whose tasks took more time.
        self._uneven = False
        waits_for_all = placement.recv_timeout is None and placement.num_groups == 1 and placement.acts_on_cpu
        # Workers that act by themselves never wait for each other within a phase.
        if placement.inference == "worker":
            require_loadable(policy, start_method)
        self._workers_act = placement.inference == "worker" or (
            placement.inference == "auto" and waits_for_all and is_loadable(policy, start_method)
        )
        self._phases: WorkerPhases | None = None

    @property
    def num_stores(self) -> int:
        """The workers of the last `prepare`, if the policy acts in them, and they are to compute updates."""
        computes = self._placement.update == "workers" and self._phases is not None
        return self._env.num_workers if computes and self._env is not None else 0

    def collect(self, batch: RemoteBatch, phase: Phase, timer: StageTimer) -> ChildStore:
        """Have the workers sample a batch into the memory that they share."""
        assert self._phases is not None
        return ChildStore(self._phases, batch, phase, timer)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return self._env.pids if self._env is not None else []

    def start_phase(self) -> None:
        """Count lost children from zero."""
        if self._env is not None:
            self._env.pool.start_phase()

    def recover(self) -> None:
        """Replace lost children and drop unfinished work."""
        if self._env is not None:
            self._env.recover()

    def kill(self) -> None:
        """Kill all children without logging."""
        env = self._env
        if env is not None:
            env.pool.kill()

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        workers_act, per_task = self._workers_act, self._slots_per_task
        env = ParallelVectorEnv(
            self._recipe.env,
            self._recipe.env_kwargs,
            num_envs=num_tasks * per_task,
            max_episode_steps=self._recipe.max_episode_steps,
            granularity=slots_together(num_tasks, per_task, self._placement.workers) if workers_act else 1,
            # It imports torch, which takes longer than the rest of a worker's start.
            preload=("maml_rl.samplers.work.child.phase_runner",) if workers_act else (),
            placement=self._placement,
        )
        self._phases = WorkerPhases(env) if workers_act else None
        return env

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase: each worker its own slots, or where these take very different times whichever are next."""
        num_tasks = len(phase.tasks)
        self._slots_for(num_tasks)
        env, phases = self._env, self._phases
        if env is None or phases is None:
            return super().run(phase, timer)
        phases.newest = None
        units = None
        if self._uneven and env.num_envs > env.num_workers:
            num_units = UNITS_PER_WORKER * env.num_workers
            units = units_of(env.num_envs, num_units, phase.per_task if num_tasks >= num_units else 1)
        episodes, seconds_of = phases.sample(phase, timer, units)
        if env.divides:
            self._uneven = _are_uneven(seconds_of, env.parts)
        if episodes.lengths.max() < phase.horizon:
            with timer.stage("assembly"):
                episodes = episodes.copy()
        return TaskEpisodes(**episodes.by_name(), tasks=phase.tasks)


def _are_uneven(seconds_of: Sequence[tuple[slice, float]], parts: Sequence[slice]) -> bool:
    """Return whether the busiest worker would take much longer than the mean, if each had its own slots."""

    def fraction(unit: slice, part: slice) -> float:
        common = min(unit.stop, part.stop) - max(unit.start, part.start)
        return float(max(0, common) / (unit.stop - unit.start))

    loads = [sum(seconds * fraction(unit, part) for unit, seconds in seconds_of) for part in parts]
    mean = sum(loads) / len(loads)
    return max(loads) - mean > max(_UNEVEN_SECONDS, _UNEVEN_FRACTION * mean)
