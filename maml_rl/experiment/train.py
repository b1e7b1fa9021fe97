"""Training: sample a batch of tasks, adapt to each, update the meta-policy; write it all down; again."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch

from maml_rl.config.config import Config
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.experiment.batches import Batch, PublishedParameters, collect_batch
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.prefetch import Prefetcher
from maml_rl.metalearners import MAMLTRPO
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.runs.metrics import Metrics
from maml_rl.runs.run_folder import RunFolder
from maml_rl.samplers import MultiTaskSampler

OnIteration = Callable[[Metrics], None]


def train(
    config: Config,
    folder: str | Path,
    *,
    num_workers: int | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    on_iteration: OnIteration | None = None,
) -> Policy:
    """Train a meta-policy, or go on training one.

    The same config gives the same parameters and metrics, bit for bit and but for the times, whatever the number of
    workers, whichever children die, and however often the run is killed and resumed. With `prefetch` or a
    `recv-timeout` this does not hold: what is sampled then depends on who happens to be ready first.

    Args:
        config: the experiment.
        folder: where config, metrics, TensorBoard events and checkpoints go.
        num_workers: child processes; 0 steps in this process, None takes the number of usable cores.
        device: where the policy and the update run.
        resume: go on from the newest intact checkpoint in `folder`.
        overwrite: replace the run that is in `folder`.
        profile: add each stage's share of the time to the metrics.
        on_iteration: is given the metrics of every iteration.

    Returns:
        The trained policy.

    Raises:
        ConfigError: If the config is wrong, or `folder` holds another run.
        CheckpointError: If a checkpoint cannot be written or, on resuming, read.
        ChildEnvError: If an environment fails.
        NonFiniteError: If an environment or the policy puts out NaN or infinity.
    """
    experiment = make_experiment(config, device)
    timer = StageTimer() if profile else NULL_TIMER
    with (
        experiment.make_sampler(num_workers=num_workers, timer=timer) as sampler,
        RunFolder(folder, config, experiment.policy, resume=resume, overwrite=overwrite) as run,
    ):
        metalearner = MAMLTRPO(
            experiment.policy,
            config.fast_lr,
            config.first_order,
            experiment.device,
            curvature_fraction=config.curvature_fraction,
        )
        sampler.seek(run.iteration - 1)
        published = PublishedParameters(experiment.policy, run.iteration)
        with _batches(run.iteration, config, sampler, published) as next_batch:
            for iteration in range(run.iteration, config.num_batches):
                metrics = _iterate(iteration, config, next_batch, metalearner)
                published.publish(experiment.policy, iteration + 1)
                metrics["env_steps"] += run.env_steps
                run.record(metrics)
                if (iteration + 1) % config.checkpoint_every == 0 or iteration + 1 == config.num_batches:
                    run.save(metrics[f"return/step_{config.training_steps}"])
                if on_iteration is not None:
                    on_iteration(metrics)
    return experiment.policy


@contextmanager
def _batches(
    first: int, config: Config, sampler: MultiTaskSampler, published: PublishedParameters
) -> Iterator[Callable[[], Batch]]:
    """Give a function that returns the batches from iteration `first` on, one after the other.

    Each is collected when it is asked for; or with `prefetch` ahead of that, by a thread that alone uses the sampler.
    """

    def collect() -> Batch:
        version = published.load_into(sampler.policy)
        return collect_batch(sampler, config, version)

    if config.prefetch == 0:
        yield collect
        return
    with Prefetcher(collect, config.num_batches - first, config.prefetch, sampler.interrupt) as prefetcher:
        yield prefetcher.take


def _iterate(iteration: int, config: Config, next_batch: Callable[[], Batch], metalearner: MAMLTRPO) -> Metrics:
    """Do one meta-update, and return what there is to say about it."""
    started = perf_counter()
    batch = next_batch()
    got = perf_counter()
    logs = metalearner.step(
        batch.train_episodes,
        batch.valid_episodes,
        max_kl=config.max_kl,
        cg_iters=config.cg_iters,
        cg_damping=config.cg_damping,
        ls_max_steps=config.ls_max_steps,
        ls_backtrack_ratio=config.ls_backtrack_ratio,
    )
    updated = perf_counter()
    metrics: Metrics = {"iteration": iteration, "env_steps": sum(episodes.num_steps for episodes in batch.phases)}
    for step, episodes in enumerate(batch.phases):
        metrics[f"return/step_{step}"] = mean_return(episodes)
        for name, info in episodes.episode_infos().items():
            metrics[f"info/{name}/step_{step}"] = float(info.double().mean())
    metrics |= logs
    if config.prefetch:
        metrics["staleness"] = iteration - batch.version
        metrics["time/wait_s"] = got - started
    metrics["digest"] = combined_digest(batch.phases)
    metrics["time/sample_s"] = batch.seconds
    metrics["time/update_s"] = updated - got
    metrics["time/steps_per_s"] = metrics["env_steps"] / batch.seconds
    metrics |= batch.means
    if batch.stages:
        for stage, seconds in {**batch.stages, "outer": updated - got}.items():
            metrics[f"time/share/{stage}"] = seconds / (updated - started)
    return metrics


def mean_return(episodes: TaskEpisodes) -> float:
    """Return the mean undiscounted return over all tasks and episodes."""
    return float(episodes.episode_returns().double().mean())


def combined_digest(phases: Sequence[TaskEpisodes]) -> str:
    """Return one SHA-256 for the episodes of several phases."""
    return hashlib.sha256("".join(episodes.digest() for episodes in phases).encode()).hexdigest()
