"""How an experiment is sampled: its sampler, where updates are computed, and whether its batches fit."""

import copy
from typing import Any

import torch

from maml_rl.config import Config
from maml_rl.config.placement import WAYS_OF_COLLECTING, Placement, Update
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import TRUST_REMEDY, Experiment, env_maker
from maml_rl.machine import available_memory, refuse_if_too_large
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.runs.trust import check_code
from maml_rl.samplers import MultiTaskSampler
from maml_rl.samplers.env_recipe import pickled_for_workers
from maml_rl.samplers.remote_store import WORKER_ROOM
from maml_rl.task_distributions.task_distribution import TaskSplit

# With this many worker processes, and chunks for them, a run leaves its updates to them.
_UPDATING_WORKERS = 4


def refuse_too_large_batches(experiment: Experiment, num_tasks: int, num_steps: int, num_batches: int = 1) -> None:
    """Refuse batches that certainly do not fit into the memory of this machine.

    Args:
        experiment: whose batches they are.
        num_tasks: in a batch.
        num_steps: inner steps, each of which has episodes of its own before it.
        num_batches: that are kept at once.
    """
    config = experiment.config
    # Elsewhere than on the CPU, the memory of the device holds the parameters.
    on_cpu = num_steps > 0 and experiment.device.type == "cpu"
    adapted = num_tasks * sum(param.nbytes for param in experiment.policy.parameters()) if on_cpu else 0
    refuse_if_too_large(
        num_batches * _batch_bytes(experiment, num_tasks, num_steps) + adapted,
        f"a batch of {num_tasks:,} tasks with {config.fast_batch_size:,} episodes before and after each of "
        f"{num_steps:,} inner steps",
        "lower one of these, the length of episodes, or hidden-sizes",
    )


def _batch_bytes(experiment: Experiment, num_tasks: int, num_steps: int) -> int:
    return num_tasks * (num_steps + 1) * experiment.config.fast_batch_size * experiment.episode_bytes


def refuse_too_large_evaluations(experiment: Experiment, num_tasks: int, num_steps: int) -> None:
    """Refuse batches of an evaluation that do not fit, unless they stay in workers."""
    if evaluation_update(experiment) == "driver":
        refuse_too_large_batches(experiment, num_tasks, num_steps)


def training_update(experiment: Experiment) -> Update:
    """Return where the update of a training is: "auto" only where it can be in the workers."""
    against = _against_workers(experiment.config, experiment.metalearner, experiment.device)
    if not against and experiment.config.prefetch:
        against = "prefetch collects a batch while the workers would compute the update; leave one of both out"
    placement = experiment.config.placement
    if placement.update == "workers" and against:
        raise experiment.config.error(against, "update")
    possible = placement.backend == "ray" and not against
    return placement.update if possible or placement.update != "auto" else "driver"


def _is_faster_in_workers(experiment: Experiment, placement: Placement) -> bool:
    """Return whether `update: auto` leaves updates to worker processes, which do not share Python's lock."""
    config, learner = experiment.config, experiment.metalearner
    possible = (
        placement.update == "auto"
        and placement.backend != "ray"
        and placement.workers_act
        and placement.workers >= _UPDATING_WORKERS
        and not config.prefetch
        and config.meta_batch_size > (_UPDATING_WORKERS - 1) * (learner.tasks_per_chunk or 0)
        and not _against_workers(config, learner, experiment.device)
        and _is_importable(learner)
    )
    left = available_memory() if possible else None
    num_steps = config.training_steps if learner.takes_steps else 0
    needed = _batch_bytes(experiment, config.meta_batch_size, num_steps) + placement.workers * WORKER_ROOM
    return possible and (left is None or needed <= left)


def evaluation_update(experiment: Experiment) -> Update:
    """Return where an evaluation adapts: "driver" if the workers cannot keep its episodes."""
    learner = experiment.metalearner
    # Trials adapt by a memory, while they are sampled.
    memory_alone = learner.whole_trials and experiment.device.type == "cpu"
    possible = memory_alone or not _against_workers(experiment.config, learner, experiment.device)
    placement = experiment.config.placement
    return placement.update if placement.backend == "ray" and possible else "driver"


def make_sampler(
    experiment: Experiment,
    *,
    num_workers: int | None = None,
    evaluation: bool = False,
    task_split: TaskSplit | None = None,
    timer: StageTimer = NULL_TIMER,
    in_run: bool = False,
) -> MultiTaskSampler:
    """Make the sampler of an experiment; see `MultiTaskSampler` for the arguments, of which the config has more.

    An evaluation is always sampled in the default mode. With `prefetch` the sampler has its own
    policy, because the experiment's policy changes meanwhile. An evaluation has its own baseline, because a
    baseline is fitted to every batch. In a run (`in_run`), which is done with a batch before it samples the next,
    `update: auto` may keep the episodes in worker processes.
    """
    config, placed = experiment.config, experiment.config.placement
    check_code(config, TRUST_REMEDY, samples=True)
    # The update may still run elsewhere; where else the policy acts is the sampler's choice.
    acts_elsewhere = placed.backend == "ray" or (placed.inference == "worker" and not evaluation)
    changes: dict[str, Any] = {"device": "cpu" if acts_elsewhere else experiment.device}
    changes |= {} if num_workers is None else {"num_workers": num_workers}
    prefetched = config.prefetch > 0 and not evaluation
    update = evaluation_update(experiment) if evaluation else training_update(experiment)
    try:
        change = placed.for_evaluation if evaluation else placed.replace
        if in_run and _is_faster_in_workers(experiment, placed.replace(**changes)):
            update = "workers"
        placement = change(update=update, **changes)
        sampler = MultiTaskSampler(
            env_maker(config),
            config.env_kwargs,
            batch_size=config.fast_batch_size,
            policy=copy.deepcopy(experiment.policy) if prefetched else experiment.policy,
            baseline=copy.deepcopy(experiment.baseline) if evaluation else experiment.baseline,
            seed=config.seed,
            slots_per_task=1 if experiment.metalearner.whole_trials else config.slots_per_task,
            max_episode_steps=config.max_episode_steps,
            # Gradient steps use every episode separately.
            reset_memory_each_episode=not experiment.metalearner.whole_trials and experiment.policy.has_memory,
            evaluation=evaluation,
            task_split=task_split,
            task_distribution=experiment.task_distribution,
            record_log_probs=not evaluation and (prefetched or experiment.metalearner.record_log_probs),
            timer=timer,
            placement=placement,
        )
        sampler.check_threads(config.meta_batch_size)
        return sampler
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        message = str(error)
        named = [name for name in placed.chosen if name in message and not (evaluation and name in WAYS_OF_COLLECTING)]
        if not named:
            raise
        first = min(named, key=lambda name: (message.index(name), -len(name)))
        raise config.error(message, first.replace("_", "-")) from error


def _against_workers(config: Config, learner: MetaLearner, device: torch.device) -> str:
    """Return the reason why the update cannot be in the workers; "" if it can."""
    if not learner.maps_over_tasks:
        return f"{config.algorithm} needs whole episodes in the main process; use `update: driver`"
    if learner.policy.has_memory and not learner.whole_trials:
        return f"the memory of {type(learner.policy).__name__} needs whole episodes; use `update: driver`"
    if device.type != "cpu":
        return f"the workers compute on CPUs, and the device is {str(device)!r}; use `update: driver`"
    return ""


def _is_importable(learner: MetaLearner) -> bool:
    """Return whether other processes can load a learner, with its policy."""
    try:
        pickled_for_workers(learner, "the algorithm", "", "")
    except TypeError:
        return False
    return True
