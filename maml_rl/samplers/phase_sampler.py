"""PhaseSampler: samples tasks, and one phase after the other, in this process or in workers."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from maml_rl.arguments import check_count
from maml_rl.config.placement import Placement, PlacementOptions
from maml_rl.envs.checking import DrawsBySeed
from maml_rl.envs.global_generators import refusing_draws
from maml_rl.envs.make_env import EnvMaker, ObservedLastStep, Recipe
from maml_rl.envs.meta_env import EnvDescription, SlotCounts, Task
from maml_rl.envs.tasks import own_drawn
from maml_rl.episode.task_episodes import Baseline, TaskEpisodes
from maml_rl.errors import ChildLost, ConfigError, TaskError
from maml_rl.machine import single_threaded
from maml_rl.policies import Policy, as_policy
from maml_rl.policies.policy import check_parameters
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.backend import ClosesAtExit, RolloutBackend
from maml_rl.samplers.env_recipe import maker_of, placed
from maml_rl.samplers.failures import describe_env
from maml_rl.samplers.make_backend import choose, make_backend
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import try_memory
from maml_rl.samplers.rollout.recomputing import log_probs_of, memory_of
from maml_rl.seeding import NamedStreams, PhaseStreams, Purpose, StreamKey, check_seed, generator
from maml_rl.spaces import require_numbers
from maml_rl.task_distributions import FamilyTasks, TaskDistribution
from maml_rl.task_distributions.task_distribution import TaskSplit
from maml_rl.task_distributions.task_files import try_tasks

Result = TypeVar("Result")


class Supervised:
    """A backend whose work is repeated after every loss of a worker: keyed streams give the same result.

    An object of its own: in a circle of references with the source of tasks, a sampler would outlive its last use.

    Attributes:
        closed: whether its workers have been ended for good.
        interrupted: whether another thread has made work end with an error, now and later.
    """

    def __init__(self, backend: RolloutBackend, slots_per_task: int) -> None:
        self.backend, self._slots_per_task = backend, slots_per_task
        self.closed = self.interrupted = False

    def do(self, work: Callable[[RolloutBackend], Result]) -> Result:
        """Do work, again after every loss of a worker; an error about a malformed task names the task.

        torch has one thread here: others would still spin on the cores when the next phase needs them.
        """
        if self.closed:
            raise RuntimeError("this sampler or evaluator is closed; make a new one")
        with single_threaded():
            self.backend.start_phase()
            while not self.interrupted:
                try:
                    return work(self.backend)
                except ChildLost:
                    if not self.interrupted:
                        self.backend.recover()
                except TaskError as error:
                    if not error.in_slots:
                        raise
                    # The caller never chose slots, of which several have one task.
                    found = dict.fromkeys(
                        f"task {slot // self._slots_per_task}: {what}" for slot, what in error.in_slots
                    )
                    raise TaskError("; ".join(found)) from error
        raise RuntimeError("sampling was interrupted by another thread")


class TaskSource:
    """Draws tasks by keys, and refuses what are no tasks of the family.

    Args:
        recipe: of the environment.
        workers: draw the family's own tasks.
        distribution: what `sample` draws from; None for the family's own distribution.
        split: which tasks, where some are kept apart.
        seed: of the sampler.
        in_process: whether environments may be made in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        workers: Supervised,
        distribution: TaskDistribution | None,
        split: TaskSplit,
        seed: int,
        *,
        in_process: bool,
    ) -> None:
        self._recipe, self._workers, self._seed = recipe, workers, seed
        self._distribution, self._split = distribution, split
        self._draws = DrawsBySeed()
        self._has_drawn = False
        # An environment of the user's own may belong to the workers alone; of such a task the phase says what is wrong.
        self._tries = in_process or recipe.family is not None

    def draw(self, num_tasks: int, key: StreamKey) -> list[Task]:
        """Draw tasks of the family's own distribution from the random stream `key`."""
        check_count("num_tasks", num_tasks)
        return self._draw_seeded(num_tasks, int(generator(key).integers(2**63)))

    def _draw_seeded(self, num_tasks: int, seed: int) -> list[Task]:
        def draw(count: int, seed: int) -> list[Task]:
            return self._workers.do(lambda backend: backend.sample_tasks(count, seed, self._split == "test"))

        tasks = draw(num_tasks, seed)
        self._draws.check(seed, tasks, draw)
        return tasks

    def sample(self, num_tasks: int, key: StreamKey) -> list[Task]:
        """Draw tasks from the random stream `key`; see `PhaseSampler.sample_tasks`."""
        distribution = self._distribution
        if distribution is None:
            return self.draw(num_tasks, key)
        self._workers.do(lambda backend: backend.prepare(check_count("num_tasks", num_tasks)))
        family = FamilyTasks(
            self._recipe.id or "the family",
            self._workers.do(lambda backend: backend.describe()).task_space,
            self._draw_seeded,
            self._seed,
            lambda count, seed: self._workers.do(lambda backend: backend.sample_tasks(count, seed, True)),
        )
        distribution.admit(family, lambda tasks: self._try(tasks, "the distribution"))
        if self._split == "training":
            distribution.check_batch(num_tasks)
        method = "sample" if self._split == "training" else f"sample_{self._split}"
        name, draw = type(distribution).__name__, getattr(distribution, method)
        remedy = "draw from the random stream that it gets"
        with refusing_draws(f"{method} of {name}", remedy, only_warns=self._has_drawn) as excused:
            tasks = own_drawn(draw(family.drawing_by(excused), num_tasks, generator(key)), num_tasks, method, name)
        if not self._has_drawn:
            self._try(tasks, f"the first draw of {name}")
            self._has_drawn = True
        return tasks

    def _try(self, tasks: Sequence[Task], origin: str) -> None:
        """Refuse what are no tasks, in an environment of this process if there may be one."""
        if not all(isinstance(task, Mapping) for task in tasks):
            raise TaskError(f"{origin} has {tasks!r:.80}; a task is a dict from names to values")
        if not (tasks and self._tries):
            return
        env = self._recipe.make(1)
        try:
            try_tasks(tasks, env, origin)
        except ConfigError as error:
            raise TaskError(str(error)) from error
        finally:
            env.close()


class PhaseSampler(ClosesAtExit):
    """Samples tasks of one family, and phases of episodes of a policy in them, in this process or in workers.

    Randomness is keyed by (seed, iteration, phase, task, episode): the episodes are bit-identical for any number of
    workers, any start method, and after any worker has been replaced. `sample_tasks` begins an iteration, and every
    `rollout` in it is a phase.

    Args:
        env_name: registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        env_kwargs: keyword arguments of the environment.
        batch_size: B, episodes per task and phase.
        policy: acts in the environments: a policy, or any module that `as_policy` takes.
        baseline: estimates values for the advantages; only `sample` needs it.
        env: a callable instead of `env_name`. Scripts of pytorch-maml-rl pass an environment of the same id beside it,
            which is only compared with it: workers make their own.
        seed: integer in [0, 2**32); None draws one from the operating system (see the attribute `seed`).
        num_workers: worker processes; 0 steps in this process; None takes the number of usable cores, or of all CPUs of
            a Ray cluster.
        slots_per_task: environments per task, a divisor of B; None for B, or for what the family has by default. With
            fewer than B the episodes run in waves.
        max_episode_steps: horizon T; None for the environment's own.
        observe_last: show the policy the last step, too: observations become vectors of the
            observation, the last action, the last reward, and whether the last step ended an episode; see
            `envs.LastStepParts`.
        reset_memory_each_episode: reset the policy's memory at the start of every episode, not only of every phase.
        record_log_probs: record the log-probability of every action, for learners whose parameters change meanwhile.
        record_memory: keep with the episodes the policy's memory before every action, tensors (M, T, B, *memory
            of one slot). The policy acts a second time for it, in this process.
        evaluation: draw tasks and episodes from the evaluation's streams, which training never touches.
        task_split: for a family or a task distribution that keeps test tasks apart: "training" or "test" tasks, or
            "validation", which are drawn like those of training, for evaluations that choose something. None for "test"
            in an evaluation, else "training".
        task_distribution: what `sample_tasks` draws from; None for the family's own distribution. Your code passes the
            returns of its tasks to a curriculum, with the method `update`.
        timer: gets the seconds of every stage.
        placement: where and how the slots are stepped and the policy acts.
        **options: the fields of `Placement` one by one, such as `backend`, `device` and `inference`; they replace those
            of `placement`.

    Raises:
        ValueError: If a number is out of range, or two arguments exclude or contradict each other.
        TypeError: If an environment object is given where an id or a callable is expected, or environment or
            policy cannot be sent to the workers.
        ConfigError: If there is no Ray, or its cluster cannot be reached or is too small.
    """

    def __init__(
        self,
        env_name: EnvMaker | None,
        env_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        policy: nn.Module | None = None,
        baseline: Baseline | None = None,
        env: Callable[..., gymnasium.Env] | gymnasium.Env | None = None,
        seed: int | None = None,
        num_workers: int | None = None,
        *,
        slots_per_task: int | None = None,
        max_episode_steps: int | None = None,
        observe_last: bool = False,
        reset_memory_each_episode: bool = False,
        record_log_probs: bool = False,
        record_memory: bool = False,
        evaluation: bool = False,
        task_split: TaskSplit | None = None,
        task_distribution: TaskDistribution | None = None,
        timer: StageTimer = NULL_TIMER,
        placement: Placement | None = None,
        **options: Unpack[PlacementOptions],
    ) -> None:
        self.placement = Placement.of_call(type(self), placement, num_workers, options)
        if policy is None:
            raise TypeError("a sampler needs a policy; make one with get_policy_for_env(MultiTaskSampler.spaces(...))")
        policy = as_policy(policy)
        if record_memory and not policy.has_memory:
            raise ValueError(
                f"record_memory keeps what a policy remembers, and {policy.class_name} has no memory; leave it "
                "out, or use a policy with initial_memory"
            )
        self.batch_size = check_count("batch_size", batch_size)
        maker = maker_of(env_name, env)
        shown = ObservedLastStep(maker) if observe_last and maker is not None else maker
        self._recipe = Recipe.of(shown, env_kwargs, max_episode_steps)
        self._recipe.require_tasks()
        family = self._recipe.family
        if slots_per_task is None and family is not None:
            slots_per_task = family.slots_per_task
        self.slots_per_task = batch_size if slots_per_task is None else check_count("slots_per_task", slots_per_task)
        if batch_size % self.slots_per_task:
            raise ValueError(f"slots_per_task must divide batch_size, got {slots_per_task} and {batch_size}")
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else check_seed(seed)
        self._recipe = placed(self._recipe, self.placement)
        self.placement = choose(self.placement, self._recipe, policy)
        backend = make_backend(self.placement, self._recipe, policy, self.slots_per_task, batch_size)
        self._workers = Supervised(backend, self.slots_per_task)
        self.policy, self.baseline = policy, baseline
        # The policy, and its copy on the device where it acts.
        self._copied: tuple[Policy, Policy] | None = None
        self._streams: NamedStreams | None = None
        self.iteration, self.phase = -1, 0
        self._reset_memory = reset_memory_each_episode
        self._memory_tried: Policy | None = None
        self.record_log_probs, self.record_memory = record_log_probs, record_memory
        self.evaluation, self.timer = evaluation, timer
        self.task_source = TaskSource(
            self._recipe,
            self._workers,
            task_distribution,
            task_split or ("test" if evaluation else "training"),
            self.seed,
            in_process=self.placement.backend == "in-process",
        )

    @staticmethod
    def spaces(
        env_name: EnvMaker, env_kwargs: Mapping[str, Any] | None = None, *, observe_last: bool = False
    ) -> EnvDescription:
        """Return the spaces of one environment, as a sampler with these arguments has them, before there is one.

        They are what `get_policy_for_env` needs.
        """
        shown = ObservedLastStep(env_name) if observe_last else env_name
        env = Recipe.of(shown, env_kwargs, None).make(1)
        try:
            return EnvDescription.of(env)
        finally:
            env.close()

    def __repr__(self) -> str:
        horizon = self._recipe.max_episode_steps
        limit = "" if horizon is None else f", T={horizon}"
        state = "closed" if self._workers.closed else f"iteration {self.iteration}, phase {self.phase}"
        name = self._recipe.id or "of one's own"
        return f"{type(self).__name__}({name}, B={self.batch_size}{limit}, seed {self.seed}, {state})"

    def prepare(self, num_tasks: int) -> None:
        """Start workers for phases of `num_tasks` tasks now, not in the first phase; do nothing if they are running."""
        self.check_threads(num_tasks)
        self._workers.do(lambda backend: backend.prepare(check_count("num_tasks", num_tasks)))

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Begin the next iteration and draw its tasks.

        Args:
            num_tasks: M, at least 1.

        Returns:
            M tasks; the same for the same seed and iteration.

        Raises:
            ValueError: If the task distribution does not fit the family, or cannot draw so many tasks.
            TaskError: If it draws what are no tasks of the family.
        """
        iteration = self.iteration + 1
        key = StreamKey(self.seed, Purpose.EVALUATION_TASKS if self.evaluation else Purpose.TASKS, iteration)
        tasks = self.task_source.sample(num_tasks, key)
        self.seek(iteration)
        return tasks

    def seek(self, iteration: int) -> None:
        """Continue as if `iteration` had just begun: the next `rollout` is its phase 0.

        A resumed run seeks to the last finished iteration, and its next `sample_tasks` continues from there.
        """
        self.iteration, self.phase = iteration, 0

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the random stream for draws of your own code before the next phase, such as the latents of tasks.

        It is keyed by (seed, iteration, phase, purpose), and separate from all draws of the sampler.

        Args:
            purpose: any name; different names never share a stream.
        """
        which = Purpose.EVALUATION_SAMPLING_DRAWS if self.evaluation else Purpose.SAMPLING_DRAWS
        key = StreamKey(self.seed, which, max(self.iteration, 0), self.phase)
        self._streams = self._streams or NamedStreams(key)
        self._streams.move_to(key)
        return self._streams.numpy(purpose)

    def rollout(
        self,
        tasks: Sequence[Task],
        params: Mapping[str, Tensor] | None = None,
        *,
        num_episodes: int | None = None,
        deterministic: bool = False,
        streams: PhaseStreams | None = None,
    ) -> TaskEpisodes:
        """Sample B episodes of every task under fixed parameters: one phase.

        Args:
            tasks: M tasks.
            params: parameters by name, (M, ...) per task or as the policy's own; None for the policy's own.
            num_episodes: B; None for the sampler's `batch_size`. The first episodes of a task are the same for any
                number of them.
            deterministic: make the policy take its most probable actions instead of drawing them; a policy with its
                own `act` gets noise in the middle of its range. Environments draw as usual.
            streams: the random streams; None for those of the next phase of the iteration.

        Returns:
            Episodes (M, T, B, ...).

        Raises:
            ValueError: If `num_episodes` is not a multiple of the slots of a task.
            ChildEnvError: If an environment raised, or a worker died more than `max_restarts` times.
            ChildEnvTimeout: If an environment hangs.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            TaskError: If a task is malformed.
        """
        self.check_threads(check_count("the number of tasks", len(check_tasks(tasks))))
        if params is not None:
            params = check_parameters(self.policy, params)
        per_task = self.batch_size if num_episodes is None else check_count("num_episodes", num_episodes)
        if per_task % self.slots_per_task:
            raise ValueError(
                f"num_episodes must be a multiple of slots_per_task, which is {self.slots_per_task}, got {per_task}; "
                f"make the sampler with slots_per_task={math.gcd(per_task, self.slots_per_task)}"
            )
        if not self.policy.stateless and (deterministic or per_task > self.slots_per_task):
            raise ValueError(
                f"{self.policy.class_name} keeps something itself, so that it cannot sample "
                f"{'deterministically' if deterministic else f'more than {self.slots_per_task} episodes of a task'}; "
                "have it remember through initial_memory and act, or declare `stateless = True`"
            )
        is_next = streams is None
        keyed = streams or self._next_streams()

        def one_phase(backend: RolloutBackend) -> tuple[Phase, TaskEpisodes]:
            phase = self._describe_phase(tasks, params, keyed, per_task, deterministic)
            sampled = backend.run(phase, self.timer)
            sampled.horizon = phase.horizon
            return phase, sampled

        phase, episodes = self._workers.do(one_phase)
        if self.record_log_probs:
            with self.timer.stage("inference"):
                kept = None if self._reset_memory else self.slots_per_task
                episodes.log_probs = log_probs_of(self.policy, params, episodes, kept)
        if self.record_memory:
            with self.timer.stage("inference"):
                episodes.memory = memory_of(phase, episodes, self.placement.device)
        if is_next:
            self.phase += 1
        return episodes

    def _next_streams(self) -> PhaseStreams:
        """Return the random streams of the next phase of the iteration."""
        return PhaseStreams(self.seed, max(self.iteration, 0), self.phase, self.evaluation)

    def _describe_phase(
        self,
        tasks: Sequence[Task],
        params: Mapping[str, Tensor] | None,
        streams: PhaseStreams,
        per_task: int,
        deterministic: bool = False,
    ) -> Phase:
        """Prepare the workers for a phase, and return the phase."""
        backend = self._workers.backend
        backend.prepare(len(tasks))
        slot = backend.describe()
        if not self.policy.reads_text:
            require_numbers(self.policy.class_name, slot.observation_space, slot.action_space)
        self.policy.check_spaces(slot.observation_space, slot.action_space)
        if self._memory_tried is not self.policy:
            try_memory(self.policy, slot.observation_space)
            self._memory_tried = self.policy
        horizon = min(filter(None, (self._recipe.max_episode_steps, slot.max_episode_steps)), default=None)
        if horizon is None:
            raise ValueError(f"{describe_env(self._recipe.env)} has no time limit; pass max_episode_steps")
        return Phase(
            tuple(tasks),
            self._acting_policy(),
            params,
            streams,
            per_task,
            horizon,
            self._reset_memory,
            deterministic,
            self.slots_per_task,
        )

    def _acting_policy(self) -> Policy:
        """Return the policy on the device where it acts: itself if it is there, else a copy of its present parameters.

        The copy is the same object as long as it is the same policy.
        """
        policy, device = self.policy, torch.device(self.placement.device)
        if next((param.device.type for param in policy.parameters()), None) in (None, device.type):
            return policy
        if self._copied is None or self._copied[0] is not policy:
            self._copied = policy, copy.deepcopy(policy).to(device)
        there = self._copied[1]
        with torch.no_grad():
            copies, originals = (*there.parameters(), *there.buffers()), (*policy.parameters(), *policy.buffers())
            for ours, theirs in zip(copies, originals, strict=True):
                ours.copy_(theirs)
        return there

    def interrupt(self, *, now: bool) -> None:
        """Make the thread that samples end with an error, and any later attempt, too; any thread may call this.

        Args:
            now: kill the workers; otherwise the phase is finished first.
        """
        self._workers.interrupted = True
        if now:
            self._workers.backend.kill()

    def close(self) -> None:
        """End all workers; nothing can be sampled afterwards. Safe to call twice."""
        self._workers.closed = True
        self._workers.backend.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers on this machine that are running."""
        return self._workers.backend.pids

    @property
    def retries(self) -> int:
        """How often episodes were restarted so far, because their environment raised `Retry`."""
        return self._workers.backend.retries

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which no slot was ready, where they wait concurrently; of the worker that has waited longest."""
        return self._workers.backend.waiting_seconds

    @property
    def slot_counts(self) -> SlotCounts | None:
        """Current activity of slots that wait concurrently, for any thread; None where they do not, and on Ray."""
        return self._workers.backend.slot_counts

    @property
    def env(self) -> EnvDescription:
        """The `observation_space` and `action_space` of one environment, as in pytorch-maml-rl; not an environment."""
        return self._workers.do(lambda backend: backend.describe())

    @property
    def single_observation_space(self) -> gymnasium.Space[Any]:
        """Observation space of one environment."""
        return self.env.observation_space

    @property
    def single_action_space(self) -> gymnasium.Space[Any]:
        """Action space of one environment."""
        return self.env.action_space

    def check_threads(self, num_tasks: int) -> None:
        """Refuse more threads than slots. An evaluation may have fewer tasks than training, for which the threads are.

        Raises:
            ValueError: If there are more.
        """
        threads, num_slots = self.placement.stepping_threads, num_tasks * self.slots_per_task
        if threads is not None and threads > num_slots and not self.evaluation:
            raise ValueError(
                f"stepping_threads={threads} is more than the {num_slots} slots of a phase of {num_tasks} tasks; leave "
                "it out for one thread for each slot, or lower it"
            )


def check_tasks(tasks: Any) -> Sequence[Task]:
    """Return tasks."""
    if isinstance(tasks, Mapping | str) or not isinstance(tasks, Sequence):
        hint = "; pass [task] for one task" if isinstance(tasks, Mapping) else ""
        raise TypeError(f"tasks must be a list of tasks, got a {type(tasks).__name__}{hint}")
    for index, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise TypeError(f"task {index} is {task!r}; a task is a dict of numbers and arrays, as sample_tasks draws")
    return tasks
