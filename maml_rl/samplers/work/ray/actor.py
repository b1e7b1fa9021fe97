"""The worker of a Ray cluster: it samples units of phases by the loop that all workers run.

Two threads use it: one works, the other reports progress and abandons work that is no longer needed.
"""

import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, NoReturn

import ray
import torch
from numpy.typing import NDArray

from maml_rl.envs.meta_env import EnvDescription, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError, causes
from maml_rl.machine import intra_op_threads
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.runs.system import package_versions
from maml_rl.samplers.describing import describe_task
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.failures import Failed, failed
from maml_rl.samplers.hosting import EpisodeHost, Request
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.policy_copies import take_state
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.work.ray.source_digests import digests_of
from maml_rl.samplers.worker_progress import IN_RESET, IN_UPDATE, EnvCalls, PhaseAbandonedError, Progress, ReportingEnv

# Slots are kept in this many different numbers: all units of a phase except the last have the same.
_SIZES_KEPT = 2
# The results do not depend on the versions of these.
_NO_MATTER = "mjbatch"
# Begins the names of digests among the versions.
CODE_OF = "code of "
# Remedy for digests that differ.
SAME_CODE = "copy the same files everywhere, and leave them alone during a run, or the episodes would differ"


@dataclass(frozen=True, slots=True)
class Introduction:
    """An actor's report about itself after its start.

    Attributes:
        pid: its process.
        node: id of its node.
        address: of its node.
        versions: of what results may depend on, the code of the package and of the user's modules included.
    """

    pid: int
    node: str
    address: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class PhaseData:
    """A phase on its way through the object store, once for all actors.

    Attributes:
        version: number of the phase.
        phase: of all tasks, without policy and parameters.
        state: the policy's own parameters and constants.
        timed: whether to measure where the time goes.
    """

    version: int
    phase: Phase
    state: dict[str, NDArray[Any]]
    timed: bool


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an actor has sampled.

    Attributes:
        result: the episodes of each block of a unit, without the steps past the longest, see `Phase.blocks`; of an
            actor that keeps them, what each block replies, see `EpisodeHost.carry_out`.
        seconds: of each stage, if they were measured.
        retries: how often episodes were restarted.
        waiting_seconds: for which no slot was ready, where they wait concurrently.
    """

    result: Any
    seconds: dict[str, float]
    retries: int
    waiting_seconds: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Part of an algorithm on its way through the object store.

    Attributes:
        pickled: the object.
        digests: of the user's modules that it is of, by name.
    """

    pickled: bytes
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class Raised:
    """A call has raised.

    Attributes:
        failure: what, and where.
        steps: of the episodes, done before; None outside of them.
        actor: which, in words.
        cannot_load: whether its node lacks what environment or policy need, so that another may do better.
    """

    failure: Failed
    steps: int | None
    actor: str
    cannot_load: bool


@dataclass(frozen=True, slots=True)
class Look:
    """Progress of an actor.

    Attributes:
        mark: other than before once it has moved on: number of its call, slot, and time of its latest step.
        steps: that it had done then; None before the first reset.
        slot: that it works on, counted over all slots of the phase; None if that is unknown.
        task: of that slot, as text.
        stack: of the working thread, if it was requested.
        updating: whether it computes on episodes, for which it has all the time it needs.
    """

    mark: tuple[int, int, float]
    steps: int | None
    slot: int | None
    task: str | None
    stack: str
    updating: bool = False


def own_versions(modules: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of what results may depend on in this process, and digests of source code.

    Args:
        modules: of the user, beside the package. A missing one is left out: if it is needed, its import fails.
    """
    packages = {name: number for name, number in package_versions().items() if name not in _NO_MATTER}
    digests = digests_of(("maml_rl", *modules))
    return {
        "Python": platform.python_version(),
        **packages,
        "torch": torch.__version__,
        "CPU": platform.machine(),
        **{f"{CODE_OF}{name}": digest for name, digest in digests.items()},
    }


def differing_version(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return the first difference between the versions of an actor and of the driver in words; "" if there is none."""
    for name in {**ours, **theirs}:
        here, there = ours.get(name, "none"), theirs.get(name, "none")
        missing_module = name.startswith(CODE_OF) and name not in theirs
        if here != there and not missing_module:
            return f"{name} {there}, this process has {here}"
    return ""


def _from_store(reference: Any) -> Any:
    """Return the object that the driver has put into the store.

    Raises:
        ConfigError: If its modules differ here.
    """
    stored: Stored = ray.get(reference)
    for name, digest in digests_of(stored.digests).items():
        if digest != stored.digests[name]:
            raise ConfigError(
                f"the Ray node {ray.util.get_node_ip_address()} has {CODE_OF}{name} {digest}, the driver has "
                f"{stored.digests[name]}; {SAME_CODE}"
            )
    return ray.cloudpickle.loads(stored.pickled)


class RolloutActor:
    """Holds the environment and a copy of the policy, and carries out one call after the other."""

    _recipe: Recipe
    _policy: Policy

    def __init__(self, slots_per_task: int) -> None:
        self._slots_per_task = slots_per_task
        self._progress = Progress.here()
        self._envs: dict[int, ReportingEnv] = {}
        self._number, self._version, self._thread = -1, -1, 0
        self._abandoned: set[int] = set()
        self._host: EpisodeHost | None = None
        self._retries, self._waiting_seconds = 0, 0.0
        self._tasks: tuple[Task, ...] = ()
        self._first_slot = 0
        self._has_made_env = False
        self._calls = EnvCalls()
        self._lock = threading.Lock()

    def carry_out(self, number: int, method: str, *arguments: Any) -> Any:
        """Carry out a call.

        Returns:
            Its result, `Raised` if it raised, or None if the call was abandoned.
        """
        with self._lock:
            self._number, self._thread = number, threading.get_ident()
            self._progress.generation[0] = -1 if number in self._abandoned else number
            self._abandoned = {each for each in self._abandoned if each > number}
            self._progress.current_slots[0], self._progress.steps[0] = -1, -1
            self._progress.heartbeats[0] = monotonic()
            self._calls.raised = False
        if self._progress.generation[0] < 0:
            return None
        try:
            return getattr(self, method)(*arguments)
        except PhaseAbandonedError:
            return None
        # Even SystemExit: an environment that calls sys.exit has failed, and the driver has to report it.
        except BaseException as error:
            of_env = method not in ("run", "work") or self._calls.raised
            failure = failed(number, error, self._slot(), self._first_slot, self._tasks, of_env=of_env)
            self._drop_envs()
            if self._host is not None:
                self._host.forget()
            who = f"actor with pid {os.getpid()} on {ray.util.get_node_ip_address()}"
            # Also behind another error, as Gymnasium's DependencyNotInstalled.
            fails_to_import = any(isinstance(each, ImportError) for each in causes(error))
            cannot_load = not self._has_made_env and (method == "start" or fails_to_import)
            return Raised(failure, self._steps(), who, cannot_load)

    # Methods of the working thread.

    def start(self, code: tuple[bytes, bytes, dict[str, str]]) -> Introduction:
        """Unpack the recipe of the environment and the policy, unless the driver's versions, the third, differ."""
        recipe, policy, versions = code
        context = ray.get_runtime_context()
        modules = [name.removeprefix(CODE_OF) for name in versions if name.startswith(CODE_OF)]
        own = Introduction(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), own_versions(modules))
        if not differing_version(own.versions, versions):
            self._recipe, self._policy = ray.cloudpickle.loads(recipe), ray.cloudpickle.loads(policy)
        return own

    def describe(self) -> EnvDescription:
        """Return the description of one slot."""
        return EnvDescription.of(self._some_env().env)

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool) -> list[Task]:
        """Draw tasks of the family."""
        return self._some_env().env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def run(self, data: PhaseData, params: dict[str, NDArray[Any]] | None, slots: slice) -> Sampled:
        """Sample the episodes in a range of the slots of a phase, with the parameters of their tasks alone."""
        if data.version != self._version:
            take_state(self._policy, data.state)
            self._version = data.version
        # The store's arrays are read-only, which tensors cannot be.
        own = None if params is None else {name: torch.tensor(value) for name, value in params.items()}
        unit = data.phase.unit(slots).with_policy(self._policy, own)
        timer = StageTimer() if data.timed else NULL_TIMER
        arrays = self._sample(unit, slots.start, timer)
        blocks = [arrays.view(*block) for block in unit.ranges()]
        horizon = unit.horizon
        sampled = [block if block.lengths.max() == horizon else block.copy() for block in blocks]
        return Sampled(sampled, timer.take(), *self._take_counts())

    def work(self, request: Request) -> Sampled:
        """Sample the blocks of a batch that this actor lacks, and carry out the request on them."""
        if self._host is None:
            self._host = EpisodeHost(self._policy, self._sample_block, _from_store, self._beat)
        # What `run` has loaded, or the host, is no longer there for the other.
        self._version = -1
        self._beat()
        with intra_op_threads(1):
            replies = self._host.carry_out(request)
        return Sampled(replies, {}, *self._take_counts())

    def _sample_block(self, phase: Phase) -> TaskEpisodes:
        arrays = self._sample(phase, phase.streams.first_task * phase.per_task, NULL_TIMER)
        self._beat()
        if arrays.lengths.max() < phase.horizon:
            arrays = arrays.copy()
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

    def _sample(self, phase: Phase, first_slot: int, timer: StageTimer) -> EpisodeArrays:
        """Sample a phase, whose first slot is slot `first_slot` of a batch."""
        self._tasks, self._first_slot = tuple(phase.slot_tasks), first_slot
        env = self._env_of(len(self._tasks))
        before = env.env.retries, env.env.waiting_seconds
        arrays = EpisodeArrays.allocate(EpisodeArrays.layout(EnvDescription.of(env.env), *phase.sizes))
        env.begin(self._number)
        sample_phase(env, phase, arrays, timer)
        self._retries += env.env.retries - before[0]
        self._waiting_seconds += env.env.waiting_seconds - before[1]
        return arrays

    def _take_counts(self) -> tuple[int, float]:
        """Return retries and seconds of waiting since the last call."""
        counted = self._retries, self._waiting_seconds
        self._retries, self._waiting_seconds = 0, 0.0
        return counted

    def _beat(self) -> None:
        """Show that it is alive where no environment steps."""
        self._progress.steps[0] = IN_UPDATE
        self._progress.heartbeats[0] = monotonic()

    def close(self) -> None:
        """Close the environments."""
        self._drop_envs()

    def _env_of(self, num_slots: int) -> ReportingEnv:
        """Return so many slots."""
        if num_slots not in self._envs:
            if len(self._envs) >= _SIZES_KEPT:
                self._drop_envs()
            self._progress.steps[0] = IN_RESET
            with self._calls:
                made = self._recipe.make(num_slots, current_slots=self._progress.current_slots)
            self._envs[num_slots] = ReportingEnv(made, self._progress, 0, self._calls)
            self._has_made_env = True
            self._progress.heartbeats[0] = monotonic()
        return self._envs[num_slots]

    def _some_env(self) -> ReportingEnv:
        return next(iter(self._envs.values()), None) or self._env_of(1)

    def _drop_envs(self) -> None:
        envs, self._envs = self._envs, {}
        for each in envs.values():
            with suppress(Exception):
                each.env.close()

    def _slot(self) -> int | None:
        """Return which slot of the unit is being worked on, if that is known."""
        slot = int(self._progress.current_slots[0])
        return slot if slot >= 0 else 0 if len(self._tasks) == 1 else None

    def _steps(self) -> int | None:
        steps = int(self._progress.steps[0])
        return None if steps < 0 else steps

    # Methods of the other thread.

    @ray.method(concurrency_group="control")
    def look(self, with_stack: bool) -> Look:
        """Return the progress of the current call."""
        progress, slot, tasks = self._progress, self._slot(), self._tasks
        stack = ""
        if with_stack and (frame := sys._current_frames().get(self._thread)) is not None:
            stack = "".join(traceback.format_stack(frame))
        return Look(
            (self._number, int(progress.current_slots[0]), float(progress.heartbeats[0])),
            self._steps(),
            None if slot is None else self._first_slot + slot,
            None if slot is None or slot >= len(tasks) else describe_task(tasks[slot]),
            stack,
            updating=int(progress.steps[0]) == IN_UPDATE,
        )

    @ray.method(concurrency_group="control")
    def abandon(self, numbers: tuple[int, ...]) -> None:
        """Stop the calls of these numbers, at their next step if they have begun."""
        with self._lock:
            self._abandoned.update(numbers)
            if self._number in numbers:
                self._progress.generation[0] = -1

    @ray.method(concurrency_group="control")
    def leave(self) -> NoReturn:
        """End this process and its children, without the cluster's help."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit
