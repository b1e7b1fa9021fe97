"""The worker of a Ray cluster: it samples units of phases by the loop that all workers run.

Two threads use it: one works, the other reports progress and abandons work that is no longer needed.
"""

import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NoReturn

import ray
import torch
from numpy.typing import NDArray

from maml_rl.envs.meta_env import EnvDescription, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError, causes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.runs.system import package_versions
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.failures import Failed, describe_task, failed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.policy_copies import take_state
from maml_rl.samplers.remote_store import Reference, Request
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.ray.source_digests import digests_of, modules_of_user
from maml_rl.samplers.worker_progress import (
    FIRST_ACTIVITY,
    IN_RESET_TASK,
    LOADING,
    PhaseAbandonedError,
    Progress,
    describe_activity,
)

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
        versions: of what results may depend on, the code of the package included.
    """

    pid: int
    node: str
    address: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an actor has sampled.

    Attributes:
        result: the episodes of each block of a unit, without the steps past the longest, see `Phase.blocks`; of an
            actor that keeps them, what each block replies, see `KeptBlocks.carry_out`.
        seconds: of each stage, if they were measured.
        retries: how often episodes were restarted.
        waiting_seconds: for which no slot was ready, where they wait concurrently.
    """

    result: Any
    seconds: dict[str, float]
    retries: int
    waiting_seconds: float


@dataclass(frozen=True, slots=True)
class Job:
    """A sampler, as its actors know it.

    Attributes:
        number: of the sampler, or of another policy of it.
        code: reference to its environment and policy, in a list, since Ray fetches arguments that are references.
    """

    number: int
    code: list[Any]


@dataclass(frozen=True, slots=True)
class Look:
    """Progress of an actor.

    Attributes:
        mark: other than before once it has moved on: number of its call, slot, and time of its latest step.
        steps: what it did then, as in `Progress`.
        slot: that it works on, counted over all slots of the phase; None if that is unknown.
        task: of that slot, as text.
        stack: of the working thread, if it was requested.
    """

    mark: tuple[int, int, float]
    steps: int
    slot: int | None
    task: str | None
    stack: str


def own_versions() -> dict[str, str]:
    """Return the versions of what results may depend on in this process, and a digest of the package's source code."""
    packages = {name: number for name, number in package_versions().items() if name not in _NO_MATTER}
    return {
        "Python": platform.python_version(),
        **packages,
        "torch": torch.__version__,
        "CPU": platform.machine(),
        **{f"{CODE_OF}{name}": digest for name, digest in digests_of(("maml_rl",)).items()},
    }


def differing_version(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return the first difference between the versions of an actor and of the driver in words; "" if there is none."""
    for name in {**ours, **theirs}:
        here, there = ours.get(name, "none"), theirs.get(name, "none")
        if here != there:
            return f"{name} {there}, this process has {here}"
    return ""


class _DifferentCodeError(ConfigError):
    """A module of the user differs from the driver's; the message says which."""


def for_store(*pickled: bytes, needs_modules: bool = True) -> tuple[tuple[bytes, ...], dict[str, str]]:
    """Return pickled objects of the user with the digests of his modules that they are of, by name.

    Other nodes must have these modules in the same form, if the objects need any.
    """
    return pickled, digests_of(modules_of_user(pickled) if needs_modules else ())


def _from_store(reference: Any) -> tuple[Any, ...]:
    """Return the objects that the driver has put into the store."""
    pickled, digests = ray.get(reference)
    here = {f"{CODE_OF}{name}": digest for name, digest in digests_of(digests).items()}
    there = {f"{CODE_OF}{name}": digest for name, digest in digests.items()}
    if difference := differing_version(here, {name: there[name] for name in here}):
        raise _DifferentCodeError(difference)
    return tuple(ray.cloudpickle.loads(data) for data in pickled)


class RolloutActor:
    """Has environments and policies of the samplers of one process, and carries out one call after the other."""

    def __init__(self) -> None:
        self._progress = Progress.here()
        # By job, a copy of its sampler's policy, and the slots.
        self._jobs: dict[int, tuple[Policy, Body]] = {}
        self._body: Body | None = None
        self._number, self._thread = -1, 0
        self._abandoned: set[int] = set()
        self._lock = threading.Lock()

    def carry_out(self, number: int, method: str, *arguments: Any) -> Any:
        """Carry out a call.

        Returns:
            Its result, `Failed` if it raised, or None if the call was abandoned.
        """
        progress = self._progress
        with self._lock:
            self._number, self._thread = number, threading.get_ident()
            progress.generation[0] = -1 if number in self._abandoned else number
            self._abandoned = {each for each in self._abandoned if each > number}
            progress.current_slots[0], progress.steps[0] = -1, FIRST_ACTIVITY.get(method, IN_RESET_TASK)
            progress.heartbeats[0] = monotonic()
        if progress.generation[0] < 0:
            return None
        self._body = None
        try:
            return getattr(self, method)(*arguments)
        except PhaseAbandonedError:
            return None
        # Even SystemExit: an environment that calls sys.exit has failed, and the driver has to report it.
        except BaseException as error:
            return self._raised(error, number, method)

    def _raised(self, error: BaseException, number: int, method: str) -> Failed:
        body = self._body
        if body is None:
            failure = failed(number, error, None, 0, (), describe_activity(int(self._progress.steps[0])))
        else:
            failure = body.failed(number, error, of_env=method not in ("run", "work"))
            body.forget()
        # Also behind another error, as Gymnasium's DependencyNotInstalled.
        fails_to_import = any(isinstance(cause, ImportError) for cause in causes(error))
        cannot_load = body is None or (not body.has_made_env and fails_to_import)
        # Parts of an algorithm are loaded late: no other node would do better with the next.
        difference = str(error) if body is None and isinstance(error, _DifferentCodeError) else ""
        return replace(failure, cannot_load=cannot_load, difference=difference)

    # Methods of the working thread.

    def start(self) -> Introduction:
        """Report about itself."""
        context = ray.get_runtime_context()
        return Introduction(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), own_versions())

    def describe(self, job: Job) -> EnvDescription:
        """Return the description of one slot."""
        return EnvDescription.of(self._hosted(job)[1].any_slots())

    def sample_tasks(self, job: Job, num_tasks: int, seed: int, evaluation: bool) -> list[Task]:
        """Draw tasks of the family."""
        return self._hosted(job)[1].any_slots().sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def run(
        self,
        job: Job,
        of_phase: tuple[Phase, dict[str, NDArray[Any]], bool],
        params: dict[str, NDArray[Any]] | None,
        slots: slice,
    ) -> Sampled:
        """Sample the episodes in a range of the slots of a phase.

        Args:
            job: whose.
            of_phase: once for all actors: the phase without policy and parameters, the policy's own parameters and
                constants, and whether to measure where the time goes.
            params: of the tasks in the slots alone; None for the policy's own.
            slots: which.
        """
        policy, body = self._hosted(job)
        phase, state, timed = of_phase
        take_state(policy, state)
        # The store's arrays are read-only, which tensors cannot be.
        own = None if params is None else {name: torch.tensor(value) for name, value in params.items()}
        unit = phase.unit(slots).with_policy(policy, own)
        timer = StageTimer() if timed else NULL_TIMER
        arrays = self._sample(body, unit, slots.start, timer)
        blocks = [arrays.view(*block) for block in unit.ranges()]
        horizon = unit.horizon
        sampled = [block if block.lengths.max() == horizon else block.copy() for block in blocks]
        return Sampled(sampled, timer.take(), *body.take_counts())

    def work(self, job: Job, request: Request) -> Sampled:
        """Sample the blocks of a batch that this actor lacks, and carry out the request on them."""
        policy, body = self._hosted(job)

        def sample_block(phase: Phase) -> TaskEpisodes:
            arrays = self._sample(body, phase, phase.streams.first_task * phase.per_task, NULL_TIMER)
            body.beat()
            if arrays.lengths.max() < phase.horizon:
                arrays = arrays.copy()
            return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

        replies = body.compute(request, lambda: policy, sample_block, _part_of_algorithm)
        return Sampled(replies, {}, *body.take_counts())

    def forget(self, job: Job) -> None:
        """Close the environments of a sampler that is closed, or has another policy."""
        if (hosted := self._jobs.pop(job.number, None)) is not None:
            hosted[1].forget()

    def _hosted(self, job: Job) -> tuple[Policy, Body]:
        """Return environment and policy of a sampler, loaded the first time."""
        if job.number not in self._jobs:
            # Imports may take long.
            before, self._progress.steps[0] = int(self._progress.steps[0]), LOADING
            recipe, policy = _from_store(job.code[0])
            self._jobs[job.number] = policy, Body(recipe, self._progress, 0)
            self._progress.steps[0] = before
            self._progress.heartbeats[0] = monotonic()
        policy, self._body = self._jobs[job.number]
        return policy, self._body

    def _sample(self, body: Body, phase: Phase, first_slot: int, timer: StageTimer) -> EpisodeArrays:
        body.generation = self._number
        slots = body.slots_of(phase, first_slot)
        arrays = EpisodeArrays.allocate(EpisodeArrays.layout(EnvDescription.of(slots), *phase.sizes))
        sample_phase(slots, phase, arrays, timer)
        return arrays

    # Methods of the other thread.

    @ray.method(concurrency_group="control")
    def look(self, with_stack: bool) -> Look:
        """Return the progress of the current call."""
        progress, body = self._progress, self._body
        slot, tasks = (None, ()) if body is None else (body.slot, body.tasks)
        stack = ""
        if with_stack and (frame := sys._current_frames().get(self._thread)) is not None:
            stack = "".join(traceback.format_stack(frame))
        return Look(
            (self._number, int(progress.current_slots[0]), float(progress.heartbeats[0])),
            int(progress.steps[0]),
            None if slot is None or body is None else body.first_slot + slot,
            None if slot is None or slot >= len(tasks) else describe_task(tasks[slot]),
            stack,
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


def _part_of_algorithm(reference: Reference) -> Any:
    """Return part of an algorithm."""
    try:
        (part,) = _from_store(reference.held)
    except _DifferentCodeError as error:
        text = str(error).replace("this process has", "the driver has")
        raise ConfigError(f"the Ray node {ray.util.get_node_ip_address()} has {text}; {SAME_CODE}") from None
    return part
