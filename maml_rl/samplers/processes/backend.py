"""The backend with slots in child processes, in which the policy acts where that is possible and faster."""

from __future__ import annotations

from collections.abc import Sequence

from maml_rl.config.placement import Placement
from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import StageTimer
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.in_process import VectorEnvBackend
from maml_rl.samplers.phase import UNITS_PER_WORKER, Phase, split_tasks
from maml_rl.samplers.processes.in_children import require_loadable, sample_in_children
from maml_rl.samplers.processes.vector_env import ParallelVectorEnv

# Units are faster where the busiest worker's environments take this much longer than an even share.
_UNEVEN_SECONDS, _UNEVEN_SHARE = 0.2, 0.2


class ProcessBackend(VectorEnvBackend):
    """Steps the slots in child processes, in which the policy acts where that is possible and faster.

    Args:
        placement: how many workers, and how the policy acts.
        recipe: of the environment.
        policy: of the phases; says whether it can act in workers.
        slots_per_task: S, environments per task.

    Raises:
        TypeError: If the environment, or a policy that must act in workers, cannot be pickled.
    """

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
        # Workers that act by themselves never wait for each other within a phase, but each needs whole tasks.
        self._fewest_tasks_to_act: int | None = None
        if placement.inference == "worker":
            require_loadable(policy, start_method)
            self._fewest_tasks_to_act = 1
        elif placement.inference == "auto" and waits_for_all and _is_loadable(policy, start_method):
            self._fewest_tasks_to_act = placement.workers

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return self._env.pids if self._env is not None else []

    def start_phase(self) -> None:
        """Count lost children from zero."""
        if self._env is not None:
            self._env.start_phase()

    def recover(self) -> None:
        """Replace lost children and drop unfinished work."""
        if self._env is not None:
            self._env.recover()

    def kill(self) -> None:
        """Kill all children without logging."""
        env = self._env
        if env is not None:
            env.kill()

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        workers_act = self._workers_act(num_tasks)
        return ParallelVectorEnv(
            self._recipe.env,
            self._recipe.env_kwargs,
            num_envs=num_tasks * self._slots_per_task,
            max_episode_steps=self._recipe.max_episode_steps,
            granularity=self._slots_per_task if workers_act else 1,
            # It imports torch, which takes longer than the rest of a worker's start.
            preload=("maml_rl.samplers.processes.phase_runner",) if workers_act else (),
            placement=self._placement,
        )

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase: each worker its own tasks, or where these take very different times whichever is next."""
        num_tasks = len(phase.tasks)
        if not self._workers_act(num_tasks):
            return super().run(phase, timer)
        env = self._slots_for(num_tasks)
        assert isinstance(env, ParallelVectorEnv)
        of_slots = [task for task in phase.tasks for _ in range(self._slots_per_task)]
        units = None
        if self._uneven and num_tasks > env.num_workers:
            units = split_tasks(num_tasks, UNITS_PER_WORKER * env.num_workers)
            env.expect_units(of_slots)
        else:
            env.reset_task(of_slots)
        episodes, seconds_of = sample_in_children(env, phase, timer, units)
        if env.divides:
            self._uneven = _are_uneven(seconds_of, env.phases.parts_of_tasks(num_tasks))
        return episodes

    def _workers_act(self, num_tasks: int) -> bool:
        return self._fewest_tasks_to_act is not None and num_tasks >= self._fewest_tasks_to_act


def _are_uneven(seconds_of: Sequence[tuple[slice, float]], parts: Sequence[slice]) -> bool:
    """Return whether the busiest worker would take much longer than an even share, if each had its own tasks.

    Args:
        seconds_of: ranges of tasks, each with its seconds.
        parts: tasks of each worker.
    """

    def share(tasks: slice, part: slice) -> float:
        common = min(tasks.stop, part.stop) - max(tasks.start, part.start)
        return float(max(0, common) / (tasks.stop - tasks.start))

    loads = [sum(seconds * share(tasks, part) for tasks, seconds in seconds_of) for part in parts]
    even = sum(loads) / len(loads)
    return max(loads) - even > max(_UNEVEN_SECONDS, _UNEVEN_SHARE * even)


def _is_loadable(policy: Policy, start_method: str | None) -> bool:
    try:
        require_loadable(policy, start_method)
    except TypeError:
        return False
    return True
