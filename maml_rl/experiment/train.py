"""Training: collect a batch, update the meta-policy, write metrics and checkpoints; repeat.

The metrics of an iteration's batch are computed where its episodes are.
"""

import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from maml_rl.config.config import TASKS, Config
from maml_rl.derivatives import Cache, EpisodeStore
from maml_rl.envs.global_generators import refusing_draws
from maml_rl.envs.meta_env import SlotCounts, Task
from maml_rl.envs.tasks import own_task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError, NonFiniteError
from maml_rl.experiment.build import Experiment, make_experiment, make_task_distribution
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import (
    make_sampler,
    refuse_too_large_batches,
    refuse_too_large_evaluations,
    training_update,
)
from maml_rl.machine import chunk_threads, single_threaded, usual_torch
from maml_rl.metalearners.metalearner import MetaLearner, check_metrics
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.results.identity import parameters_digest, sources
from maml_rl.runs.checkpoint import own_json
from maml_rl.runs.metrics import Metrics, return_keys
from maml_rl.runs.run_folder import EVALUATION_TASKS, FIXED_TASKS, RunFolder, has_begun, load_run_config
from maml_rl.runs.trust import remember_code
from maml_rl.samplers import MultiTaskSampler
from maml_rl.task_distributions import TaskDistribution
from maml_rl.task_distributions.task_files import tasks_as_bytes

logger = logging.getLogger(__name__)

# How often the progress of slots that wait concurrently is reported.
_WATCH_SECONDS = 1.0
# How long the work of a thread may take to end before it is interrupted, and between two interruptions.
_GRACE_SECONDS, _PAUSE_SECONDS = 1.0, 0.5

Item = TypeVar("Item")

OnIteration = Callable[[Metrics], None]

# Prefix of the policy's tensors among the published ones; the learner's own acting state has no prefix.
_POLICY = "policy/"


@usual_torch()
def train(
    config: Config,
    folder: str | Path,
    *,
    num_workers: int | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    init: str | Path | None = None,
    init_learner: bool = False,
    profile: bool = False,
    on_start: Callable[[], object] | None = None,
    on_iteration: OnIteration | None = None,
    on_slots: Callable[[SlotCounts], object] | None = None,
    stop: Event | None = None,
) -> Policy:
    """Train a meta-policy, or resume training one.

    Whatever ends it early, an error of an environment or a KeyboardInterrupt, a checkpoint then holds the state after
    the last finished iteration.

    The same config gives bit-identical parameters and metrics (except times), for any number of workers, after any
    worker has been replaced, and however often the run is killed and resumed. With `recv-timeout` this does not hold,
    because the samples then depend on timing. Evaluations (`evaluate-every`) have their own tasks, random streams and
    workers: the parameters are the same with and without them.

    Args:
        config: the experiment.
        folder: for config, metrics, TensorBoard events and checkpoints.
        num_workers: instead of the config's; see `MultiTaskSampler`.
        device: where the policy and the update run.
        resume: continue from the newest intact checkpoint in `folder`.
        overwrite: replace the run that is in `folder`.
        init: begin with the policy of the last checkpoint of another run, its folder or "zoo:NAME", or of a
            checkpoint's folder. A run that is resumed has begun already, and ignores it.
        init_learner: with `init`, begin with the state of its learner, too: optimizers, other networks, learned step
            sizes; but not with its experience.
        profile: add each stage's share of the time to the metrics.
        on_start: called once the run is in its folder, before the first iteration.
        on_iteration: called with the metrics of every iteration.
        on_slots: called every second, by its own thread, with the activity of slow environments' slots.
        stop: once it is set, by `on_iteration` or by another thread, training ends after the current iteration with a
            checkpoint, from which it can be resumed.

    Returns:
        The trained policy.

    Raises:
        ConfigError: If the config is wrong, or `folder` holds another run.
        CheckpointError: If a checkpoint cannot be written or, on resuming, read.
        ChildEnvError: If an environment fails.
        AlgorithmError: If code of the algorithm, its policy or its task distribution fails.
        NonFiniteError: If an environment or the policy returns NaN or infinity.
    """
    experiment = make_experiment(config, device, num_workers=num_workers)
    config, samples = experiment.config, experiment.metalearner.samples
    experiment.open_data()
    if init is not None:
        if not (resume and has_begun(Path(folder))):
            experiment.begin_with(init, policy_alone=not init_learner)
    elif init_learner:
        raise ConfigError("init_learner takes the learner's state from a run; name it with init")
    remember_code(config)
    num_steps = config.training_steps if experiment.metalearner.takes_steps else 0
    if samples and training_update(experiment) == "driver":
        batches = 1 + min(config.prefetch, config.num_batches)
        refuse_too_large_batches(experiment, config.meta_batch_size, num_steps, batches)
    held_out = _held_out_tasks(experiment, Path(folder), resume=resume)
    timer = StageTimer() if profile else NULL_TIMER
    guard = experiment.guard
    with ExitStack() as stack:
        sampler = None
        if samples:
            sampler = stack.enter_context(make_sampler(experiment, num_workers=num_workers, timer=timer, in_run=True))
            stack.enter_context(_watching(sampler, on_slots))
        # Evaluations draw from the distribution as it begins, whatever it has learned, and leave no trace in it.
        begun: TaskDistribution | None = None
        if config.evaluate_every and experiment.task_distribution is not None:
            with closing(experiment.make_env()) as env:
                begun, _ = make_task_distribution(config, env, samples=samples)
        apart = replace(experiment, task_distribution=begun)
        evaluate_if_due = stack.enter_context(_evaluating(apart, held_out, num_workers))
        with guard:
            origin = {
                "sources": sources(config),
                "init": None if init is None else parameters_digest(experiment.policy.state_dict()),
            }
            opened = RunFolder(
                folder, config, experiment.metalearner, resume=resume, overwrite=overwrite, origin=origin
            )
            run = stack.enter_context(opened)
            if isinstance(held_out, list):
                _write_tasks(run, EVALUATION_TASKS, config.env_name, held_out)
            _keep_fixed_tasks(experiment, run, begun)
            if sampler is not None:
                sampler.seek(run.iteration - 1)
            _resume_tasks(experiment, run)
            run.settle()
            stack.enter_context(_saving_when_broken_off(run))
            next_batch, publish = stack.enter_context(_collecting(run, experiment, sampler))
        if on_start is not None:
            on_start()
        for iteration in range(run.iteration, config.num_batches):
            if stop is not None and stop.is_set():
                run.save()
                break
            with guard:
                metrics, task_state = _iterate(iteration, experiment, next_batch)
                finished = iteration + 1
                earlier = publish(finished)
                metrics["env_steps"] += run.env_steps
                metrics |= evaluate_if_due(finished)
                run.record(metrics)
                # The best checkpoint is that of the highest return after adaptation, if any is known.
                evaluated = return_keys(metrics, evaluated=True)
                score = next((metrics[key] for key in reversed(evaluated or return_keys(metrics))), None)
                run.keep(score, evaluated=bool(evaluated), task_state=task_state, earlier=earlier)
                if evaluated or finished % config.checkpoint_every == 0 or finished == config.num_batches:
                    run.save()
            if on_iteration is not None:
                on_iteration(metrics)
    return experiment.policy


def _held_out_tasks(experiment: Experiment, folder: Path, *, resume: bool) -> int | list[Task] | None:
    """Return the tasks of the evaluations, or the number to draw; None where there are no evaluations."""
    config, file = experiment.config, folder / EVALUATION_TASKS
    num_steps = config.test_steps if experiment.metalearner.takes_steps else 0
    if config.evaluate_every is None:
        return None
    # A resumed run keeps its tasks, even if the file has changed; one whose evaluations begin takes the file's.
    is_kept = resume and file.is_file() and has_begun(folder) and load_run_config(folder).evaluate_every is not None
    try:
        if isinstance(config.evaluation_tasks, int):
            refuse_too_large_evaluations(experiment, config.evaluation_tasks, num_steps)
            return config.evaluation_tasks
        tasks = experiment.load_tasks(file if is_kept else config.evaluation_tasks)
        refuse_too_large_evaluations(experiment, len(tasks), num_steps)
    except ConfigError as error:
        raise config.error(str(error), "evaluation-tasks") from error
    return tasks


@contextmanager
def _evaluating(
    experiment: Experiment, tasks: int | list[Task] | None, num_workers: int | None
) -> Iterator[Callable[[int], Metrics]]:
    """Yield a function that evaluates the parameters if the finished iterations are a multiple of evaluate-every.

    It returns metrics, none where nothing was evaluated. It has its own sampler.
    """
    every = experiment.config.evaluate_every
    if tasks is None or every is None:
        yield lambda finished: {}
        return
    given: int | list[Task] = tasks
    with make_sampler(experiment, num_workers=num_workers, evaluation=True, task_split="validation") as sampler:

        def evaluate_if_due(finished: int) -> Metrics:
            nonlocal given
            if finished % every:
                return {}
            started = perf_counter()
            evaluation = evaluate(experiment, given, split="validation", sampler=sampler)
            given = evaluation.tasks
            metrics: Metrics = {}
            for column in range(evaluation.returns.shape[1]):
                name = f"{experiment.metalearner.columns}_{column}"
                metrics[f"evaluation/return/{name}"] = float(evaluation.returns[:, column].mean(dtype=np.float64))
                for part, of_part in evaluation.parts().items():
                    metrics[f"evaluation/of {part}/{name}"] = float(of_part.returns[:, column].mean(dtype=np.float64))
                for key, info in evaluation.infos.items():
                    metrics[f"evaluation/info/{key}/{name}"] = float(info[:, column].mean(dtype=np.float64))
            return metrics | {"time/evaluation_s": perf_counter() - started}

        yield evaluate_if_due


@contextmanager
def _watching(sampler: MultiTaskSampler, on_slots: Callable[[SlotCounts], object] | None) -> Iterator[None]:
    """Report the activity of the slots, as long as some of them wait."""
    if on_slots is None:
        yield
        return
    over = Event()

    def watch() -> None:
        while not over.wait(_WATCH_SECONDS):
            counts = sampler.slot_counts
            if counts is not None and counts.waiting:
                on_slots(counts)

    thread = Thread(target=watch, name="slots-watched", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _saving_when_broken_off(run: RunFolder) -> Iterator[None]:
    """Save the last finished iteration when anything ends the training early: Ctrl-C, or an error of an environment."""
    try:
        yield
    except CheckpointError:
        # It could not be saved.
        raise
    except BaseException as ended:
        try:
            if isinstance(ended, NonFiniteError):
                run.fail("diverged")
            run.save()
        except (CheckpointError, NonFiniteError) as error:
            logger.warning("%s", error)
        raise


@dataclass(frozen=True, slots=True)
class _Collected:
    """A batch, and how it was collected.

    Attributes:
        batch: the episodes.
        version: number of meta-updates of the parameters that it was collected with.
        seconds: that the collection took.
        stages: seconds of each stage, if they are measured.
        means: of quantities, if they are measured.
        task_state: state of the task distribution after this batch.
        task_metrics: its metrics after this batch.
    """

    batch: EpisodeStore
    version: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    task_state: dict[str, Any] | None = None
    task_metrics: Metrics = field(default_factory=dict)


@contextmanager
def _collecting(
    run: RunFolder, experiment: Experiment, sampler: MultiTaskSampler | None
) -> Iterator[tuple[Callable[[], _Collected], Callable[[int], dict[int, dict[str, Tensor]]]]]:
    """Yield two functions: one returns the next batch, from the run's next iteration on, one publishes the parameters.

    A batch is collected on demand; or with `prefetch` ahead of time, by a thread that alone uses the sampler and its
    copy of the policy. Batch k is then collected with the parameters before meta-update k - `prefetch`, no matter which
    newer ones are published: the same for every timing. What is published is returned as far as later batches need it,
    for the checkpoint. Without a sampler every batch is empty.
    """
    config, metalearner, distribution = experiment.config, experiment.metalearner, experiment.task_distribution
    if sampler is None:
        yield lambda: _Collected(metalearner.store_of([])), lambda version: {}
        return
    first, lag, updates = run.iteration, config.prefetch, itertools.count()

    def collect(version: int, metalearner: MetaLearner) -> _Collected:
        started = perf_counter()
        retried, waited = sampler.retries, sampler.waiting_seconds
        tasks = sampler.sample_tasks(config.meta_batch_size)
        batch = metalearner.collect(sampler, tasks)
        seconds = perf_counter() - started
        task_state, task_metrics = None, {}
        if distribution is not None:
            # Here rather than after the meta-update: even with `prefetch`, it receives every batch before the next.
            returns = metalearner.returns(batch).double().mean(2).cpu().numpy()
            who = type(distribution).__name__
            remedy = "draw from a generator whose place is in state_dict"
            with refusing_draws(f"update of {who}", remedy, only_warns=next(updates) > 0):
                distribution.update([own_task(task) for task in tasks], returns)
                task_state, own_metrics = distribution.state_dict(), distribution.metrics()
            if not isinstance(task_state, dict):
                raise TypeError(f"{who}.state_dict returned {task_state!r:.80}; return a dict of JSON values by name")
            task_state = own_json(task_state, f"state/{TASKS}")
            check_metrics(own_metrics, f"{who}.metrics")
            task_metrics = {f"tasks/{name}": value for name, value in own_metrics.items()}
        stages, means = sampler.timer.take(), sampler.timer.take_means()
        # Both depend on the machine and its services, as times do, and only slow environments have them.
        retries, waiting = sampler.retries - retried, sampler.waiting_seconds - waited
        if retries or waiting:
            means |= {"time/waiting": waiting, "time/retries": float(retries)}
        return _Collected(batch, version, seconds, stages, means, task_state, task_metrics)

    threads = chunk_threads()
    # Before each meta-update: the policy, and the rest of the learner's acting state.
    published = dict(run.earlier)
    numbers = itertools.count(first)

    def publish(version: int) -> dict[int, dict[str, Tensor]]:
        if not lag:
            return {}
        policy, rest = metalearner.policy.state_dict(), metalearner.acting_state()
        published[version] = {f"{_POLICY}{name}": tensor.detach().clone() for name, tensor in policy.items()} | rest
        published.pop(version - lag - 1, None)
        return {earlier: acting for earlier, acting in published.items() if earlier < version}

    def collect_ahead() -> _Collected:
        version = max(next(numbers) - lag, 0)
        acting = dict(published[version])
        policy = {name.removeprefix(_POLICY): acting.pop(name) for name in list(acting) if name.startswith(_POLICY)}
        sampler.policy.load_state_dict(policy)
        with single_threaded(threads):
            return collect(version, metalearner.collector(acting))

    if not lag:
        yield lambda: collect(first, metalearner), publish
        return
    publish(first)
    with made_ahead(collect_ahead, config.num_batches - first, lag, sampler.interrupt) as take:
        yield take, publish


@contextmanager
def made_ahead(
    make: Callable[[], Item], count: int, ahead: int, interrupt: Callable[..., None]
) -> Iterator[Callable[[], Item]]:
    """Yield a function that returns the next of `count` items, which a thread makes while earlier ones are in use.

    An error of the thread is raised in the place of the item. The end of the block, for any reason, ends the thread.

    Args:
        make: makes the next item.
        count: of items.
        ahead: how many items may be finished or in progress and not yet taken, at least 1.
        interrupt: makes `make` end with an error, at once or soon, as its keyword argument `now` says.
    """
    room, over, items = Semaphore(ahead), Event(), SimpleQueue[Future[Item]]()

    def run() -> None:
        for _ in range(count):
            # Only when there is room: what an item needs exists once the one `ahead` places before is taken.
            room.acquire()
            if over.is_set():
                return
            item = Future[Item]()
            try:
                item.set_result(make())
            except BaseException as error:
                item.set_exception(error)
                return
            finally:
                items.put(item)

    def take() -> Item:
        item = items.get()
        room.release()
        return item.result()

    # A daemon, so that not even an environment that hangs in this process can keep it alive.
    thread = Thread(target=run, name="maml_rl-prefetch", daemon=True)
    thread.start()
    try:
        yield take
    finally:
        over.set()
        room.release()
        interrupt(now=False)
        thread.join(_GRACE_SECONDS)
        while thread.is_alive():
            interrupt(now=True)
            thread.join(_PAUSE_SECONDS)


def _keep_fixed_tasks(experiment: Experiment, run: RunFolder, begun: TaskDistribution | None) -> None:
    """Write the sets of tasks that are drawn once into the run's folder; a resumed run takes those that are there.

    So does `begun`, the distribution of its evaluations.
    """
    if run.iteration:
        experiment.take_fixed_tasks(run.path)
    sets = {split: tasks for split in FIXED_TASKS if (tasks := experiment.fixed_tasks(split)) is not None}
    for split, tasks in sets.items():
        _write_tasks(run, FIXED_TASKS[split], experiment.config.env_name, tasks)
    if sets and begun is not None:
        begun.take_fixed_tasks(sets)


def _write_tasks(run: RunFolder, name: str, env_name: str, tasks: Sequence[Task]) -> None:
    run.write(name, tasks_as_bytes(run.path / name, env_name, tasks))


def _resume_tasks(experiment: Experiment, run: RunFolder) -> None:
    """Restore the state of the task distribution from before the interruption."""
    if experiment.task_distribution is None or run.task_state is None:
        return
    try:
        experiment.task_distribution.load_state_dict(run.task_state)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the run in {run.path} cannot be resumed with these tasks: {error}") from error


def _iterate(
    iteration: int, experiment: Experiment, next_batch: Callable[[], _Collected]
) -> tuple[Metrics, dict[str, Any] | None]:
    """Do one meta-update, and return its metrics, and the state of the task distribution after its batch."""
    metalearner = experiment.metalearner
    started = perf_counter()
    collected = next_batch()
    batch, got = collected.batch, perf_counter()
    if not metalearner.samples:
        logs = metalearner.learn(batch, iteration)
        times = {"time/sample_s": 0.0, "time/update_s": perf_counter() - got}
        return {"iteration": iteration, "env_steps": 0, **logs, **times}, None
    spread = policy_spread(metalearner.policy, batch)
    updating = perf_counter()
    logs = metalearner.learn(batch, iteration)
    updated = perf_counter()
    metrics: Metrics = {"iteration": iteration, "env_steps": count_steps(batch)}
    infos = metalearner.infos(batch)
    for column, returns in enumerate(metalearner.returns(batch).unbind(1)):
        name = f"{metalearner.columns}_{column}"
        metrics[f"return/{name}"] = float(returns.double().mean())
        for key, info in infos.items():
            metrics[f"info/{key}/{name}"] = float(info[:, column].double().mean())
    metrics |= collected.task_metrics | spread | share_without_signal(batch) | logs
    if experiment.config.prefetch:
        metrics["staleness"] = iteration - collected.version
        metrics["time/wait_s"] = got - started
    metrics["digest"] = digest_of(batch)
    metrics["time/sample_s"] = collected.seconds
    metrics["time/update_s"] = updated - updating
    metrics["time/steps_per_s"] = metrics["env_steps"] / collected.seconds
    metrics |= collected.means
    if collected.stages:
        for stage, seconds in {**collected.stages, "outer": updated - updating}.items():
            metrics[f"time/share/{stage}"] = seconds / (updated - started)
    return metrics, collected.task_state


def count_steps(batch: EpisodeStore) -> int:
    """Return the number of real steps, all phases together."""
    return sum(batch.map(_steps))


def policy_spread(policy: Policy, batch: EpisodeStore) -> dict[str, float]:
    """Return the mean entropy and standard deviation of a policy's actions: how much it still explores.

    Args:
        policy: as it is, before any adaptation.
        batch: the episodes; the metrics use the first episode of each task before adaptation.

    Returns:
        "policy/entropy", in nats, and "policy/std", the mean over the entries of an action; without what the policy's
        distribution does not have, and empty for a policy with a memory.
    """
    if not policy.stateless or policy.has_memory:
        return {}
    of_chunks = batch.map(_spread, policy)
    names = [name for name in of_chunks[0] if all(name in chunk for chunk in of_chunks)]
    totals = {name: torch.stack([chunk[name] for chunk in of_chunks]).sum(0) for name in names}
    spread = {f"policy/{name}": float(total[0] / total[1]) for name, total in totals.items()}
    return {name: value for name, value in spread.items() if math.isfinite(value)}


def share_without_signal(batch: EpisodeStore) -> dict[str, float]:
    """Return "no_signal", the share of tasks whose rewards gave no signal, over all phases; {} without advantages."""
    of_chunks = batch.map(_without_signal)
    known = [flags for flags in of_chunks if len(flags)]
    return {"no_signal": float(torch.cat(known).double().mean())} if known else {}


def digest_of(batch: EpisodeStore) -> str:
    """Return one SHA-256 for the episodes of all phases, from those of each task, phase by phase."""
    of_chunks = batch.map(_digests)
    in_order = [digest for of_phase in zip(*of_chunks, strict=True) for of_chunk in of_phase for digest in of_chunk]
    return hashlib.sha256("".join(in_order).encode()).hexdigest()


def _steps(phases: Sequence[TaskEpisodes], cache: Cache) -> int:
    return sum(episodes.num_steps for episodes in phases)


def _without_signal(phases: Sequence[TaskEpisodes], cache: Cache) -> Tensor:
    """Return for each phase with advantages and each task whether all of them are zero."""
    flags = [(episodes.advantages == 0.0).all(2).all(1).cpu() for episodes in phases if episodes.has_advantages]
    return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool)


def _digests(phases: Sequence[TaskEpisodes], cache: Cache) -> list[list[str]]:
    return [[episodes.part(slice(task, task + 1)).digest() for task in range(len(episodes))] for episodes in phases]


def _spread(phases: Sequence[TaskEpisodes], cache: Cache, policy: Policy) -> dict[str, Tensor]:
    """Return sum and number of the averaged values, (2,) float64 by name."""
    episodes = phases[0]
    real = episodes.mask[:, :, 0].bool()
    observations = episodes.observations[:, :, 0][real].to(next(policy.parameters()).device)
    with torch.no_grad():
        distribution = policy(observations)
    spread = {}
    for name, measure in (("entropy", distribution.entropy), ("std", lambda: distribution.stddev)):
        try:
            values = measure().double()
        except (NotImplementedError, AttributeError):
            continue
        spread[name] = torch.stack([values.sum(), values.new_tensor(float(values.numel()))]).cpu()
    return spread
