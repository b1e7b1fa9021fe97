"""Evaluation of adaptation to new tasks: the returns after 0 ... K gradient steps.

Returns of a mixture are normalized between the references of its families: the mean returns of random actions, and of a
policy that observes its task. `python -m benchmarks.references` measures them. The oracle is a trained policy and no
bound: others may be better.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.adaptation import StepSize
from maml_rl.arguments import check_count
from maml_rl.config.config import MIXTURE
from maml_rl.derivatives import EpisodeStore
from maml_rl.envs.make_env import EnvMaker, Recipe, make_vector_env
from maml_rl.envs.meta_env import Task
from maml_rl.envs.mixture import HALF_CHEETAHS
from maml_rl.envs.registration import FAMILIES
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import Experiment
from maml_rl.experiment.sampling import make_sampler, refuse_too_large_evaluations
from maml_rl.machine import refuse_if_too_large, usual_torch
from maml_rl.policies import Policy
from maml_rl.policies.external_policy import ExternalPolicy, ForeignPolicy
from maml_rl.results.evaluation import Evaluation, possible_ranges
from maml_rl.samplers import MultiTaskSampler
from maml_rl.samplers.failures import describe_env
from maml_rl.task_distributions.task_distribution import TaskSplit

# Repetitions of an adaptation, so far apart in the iterations of the random streams, share none.
_BETWEEN_REPETITIONS = 2**20
_MOST_REPETITIONS = 2**12 - 1
# Evaluations that choose the best checkpoint must be no part of later tests: they have their own range of iterations.
_VALIDATION = _MOST_REPETITIONS * _BETWEEN_REPETITIONS
# The smallest numbers of float32 are about this many halvings below 1.
_MOST_HALVINGS = 126
REFERENCES = Path(__file__).resolve().parents[1] / "certified" / "references.json"
# Arguments of environments that leave the problem as it is: the number of slots, pictures, and the unit of actions.
FREE = ("num_envs", "render_mode", "normalization_scale")


@usual_torch()
def evaluate(
    experiment: Experiment,
    tasks: Sequence[Task] | int = 40,
    *,
    meta_batch_size: int | None = None,
    num_steps: int | None = None,
    split: TaskSplit = "test",
    repetitions: int = 1,
    num_workers: int | None = None,
    sampler: MultiTaskSampler | None = None,
    on_batch: Callable[[EpisodeStore], object] | None = None,
) -> Evaluation:
    """Adapt the experiment's policy to fresh tasks, with new episodes before each gradient step.

    Tasks and episodes come from streams that training never draws from, for any seed.

    Args:
        experiment: its policy is evaluated, and left as it is.
        tasks: the tasks, or how many to draw. Where a set of tasks was drawn once, all of them are used instead of new
            ones.
        meta_batch_size: tasks at once; None for all, or for as many as would be drawn.
        num_steps: inner steps; None for the config's.
        split: the tasks to draw: "test"; "training", as training does, where both differ; or "validation", for choosing
            a checkpoint, from streams that no other evaluation draws from, and as in training where test tasks are kept
            apart.
        repetitions: how often each task is adapted to, each time from the meta-policy and with new episodes. The first
            repetition is the same for any number of repetitions.
        num_workers: instead of the config's; see `MultiTaskSampler`.
        sampler: of the experiment, for evaluations; it is used and stays open, and `num_workers` has no meaning.
        on_batch: receives each batch and repetition, whose episodes can be fetched until it returns.

    Returns:
        Returns of all tasks.

    Raises:
        ConfigError: If a number is out of range, or more memory would be needed than there is.
        ChildEnvError: If an environment fails.
    """
    config, metalearner, rule = experiment.config, experiment.metalearner, experiment.test_rule
    num_steps = config.test_steps if num_steps is None else num_steps
    num_steps = num_steps if metalearner.takes_steps else 0
    wanted = tasks if isinstance(tasks, int) else len(tasks)
    at_once = wanted if meta_batch_size is None else meta_batch_size
    for name, number, least in (("tasks", wanted, 1), ("meta-batch-size", at_once, 1), ("num-steps", num_steps, 0)):
        if number < least:
            raise ConfigError(f"{name} must be at least {least}, got {number}")
    if rule is not None and rule.halve == "always" and num_steps > _MOST_HALVINGS:
        raise ConfigError(
            f"num-steps is {num_steps}, but a step size that is halved more than {_MOST_HALVINGS} times vanishes; take "
            "fewer steps, or halve it once or never"
        )
    if not 1 <= repetitions <= _MOST_REPETITIONS:
        raise ConfigError(f"repetitions must be in [1, {_MOST_REPETITIONS}], got {repetitions}")
    given = None if isinstance(tasks, int) else list(tasks)
    drawn = given is None
    if given is None and split != "validation":
        # A fixed set is always evaluated as a whole.
        given = experiment.fixed_tasks(split)
    num_tasks = wanted if given is None else len(given)
    if given is not None and split == "test":
        experiment.refuse_learned_tasks(given)
    refuse_too_large_evaluations(experiment, min(at_once, num_tasks), num_steps)
    results = 4 * num_tasks * repetitions * (num_steps + 1) * config.fast_batch_size
    refuse_if_too_large(results, f"the returns on {num_tasks:,} tasks", "lower num-batches or meta-batch-size")
    returns: list[list[NDArray[np.float32]]] = []
    infos: list[list[dict[str, NDArray[np.float32]]]] = []
    opened: AbstractContextManager[MultiTaskSampler] = (
        make_sampler(experiment, num_workers=num_workers, evaluation=True, task_split=split)
        if sampler is None
        else nullcontext(sampler)
    )
    start = _VALIDATION if split == "validation" else 0
    with opened as sampler:
        if given is None:
            sampler.seek(start - 1)
            sizes = [min(at_once, num_tasks - first) for first in range(0, num_tasks, at_once)]
            with experiment.guard:
                given = [task for size in sizes for task in sampler.sample_tasks(size)]
            if split == "test":
                experiment.refuse_learned_tasks(given)
        described = sampler.env
        for index, first in enumerate(range(0, num_tasks, at_once)):
            returns.append([])
            infos.append([])
            for repetition in range(repetitions):
                sampler.seek(start + index + repetition * _BETWEEN_REPETITIONS)
                with experiment.guard:
                    batch = metalearner.test(sampler, given[first : first + at_once], num_steps, rule)
                    returns[-1].append(metalearner.returns(batch).cpu().numpy())
                    infos[-1].append({name: info.cpu().numpy() for name, info in metalearner.infos(batch).items()})
                if on_batch is not None:
                    on_batch(batch)
    return Evaluation(
        config.env_name,
        config.seed,
        given,
        () if rule is None else tuple(_number(size) for size in rule.step_sizes(num_steps)),
        _joined(returns),
        fixed_tasks=not drawn,
        infos={name: _joined([[each[name] for each in repeated] for repeated in infos]) for name in infos[0][0]},
        repetitions=repetitions,
        columns=metalearner.columns,
        ranges=possible_ranges(described.value_ranges, config.max_episode_steps or described.max_episode_steps),
        references=references(config.env_kwargs, config.max_episode_steps) if config.env_name == MIXTURE else {},
    )


def evaluate_trials(
    policy: ForeignPolicy | Policy,
    env: EnvMaker,
    tasks: Sequence[Task] | int,
    num_episodes: int,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    repetitions: int = 1,
    seed: int = 0,
    **settings: Any,
) -> Evaluation:
    """Measure a policy of any other package, such as one that calls a language model, in trials of several episodes.

    The policy manages its own state from episode to episode of a trial: `reset` marks the start of trials.

    Args:
        policy: has `reset(num_tasks)` and `act(observations, rewards, dones)`, see `ForeignPolicy`; or a `Policy` that
            observes the last step, as the classical ones do.
        env: a registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        tasks: the tasks, or how many to draw from the streams of evaluations.
        num_episodes: of a trial.
        env_kwargs: of the environment.
        max_episode_steps: of an episode; None for the environment's own.
        repetitions: trials of each task.
        seed: of tasks and episodes.
        **settings: further arguments of `MultiTaskSampler`, such as `stepping`. Without `num_workers` all is in this
            process; each worker has a copy of the policy.

    Returns:
        Returns of every episode of the trials.

    Raises:
        TypeError: If the policy or the spaces of the environment are not supported.
        ValueError: If the policy returns actions that do not fit, or `repetitions` is not at least 1.
        ChildEnvError: If an environment fails.
    """
    check_count("repetitions", repetitions)
    if not isinstance(policy, Policy):
        with closing(make_vector_env(env, env_kwargs, max_episode_steps=max_episode_steps)) as made:
            policy = ExternalPolicy(policy, made.single_observation_space, made.single_action_space)
    returns, infos = [], []
    with MultiTaskSampler(
        env,
        env_kwargs,
        batch_size=num_episodes,
        policy=policy,
        seed=seed,
        slots_per_task=1,
        max_episode_steps=max_episode_steps,
        observe_last=True,
        evaluation=True,
        **{"num_workers": 0, **settings},
    ) as sampler:
        described = sampler.env
        given = sampler.sample_tasks(tasks) if isinstance(tasks, int) else list(tasks)
        for _ in range(repetitions):
            trials = sampler.rollout_trials(given)
            returns.append(trials.episode_returns().cpu().numpy())
            infos.append({name: info.cpu().numpy() for name, info in trials.episode_infos().items()})
    return Evaluation(
        Recipe(env).id or describe_env(env),
        seed,
        given,
        (),
        np.stack(returns, axis=2),
        fixed_tasks=not isinstance(tasks, int),
        infos={name: np.stack([each[name] for each in infos], axis=2) for name in infos[0]},
        repetitions=repetitions,
        columns="episode",
        ranges=possible_ranges(described.value_ranges, max_episode_steps or described.max_episode_steps),
    )


def _joined(batches: Sequence[Sequence[NDArray[np.float32]]]) -> NDArray[np.float32]:
    """Return the episodes (N, K + 1, R * B) of batches of tasks, each with its repetitions (M, K + 1, B)."""
    return np.concatenate([np.concatenate(repeated, axis=2) for repeated in batches])


def _number(step_size: StepSize) -> float:
    """Return a step size as one number; NaN where every parameter has its own."""
    sizes = set(step_size.values()) if isinstance(step_size, Mapping) else {step_size}
    size = sizes.pop()
    return math.nan if sizes or not isinstance(size, float) else size


def references(env_kwargs: Mapping[str, Any], max_episode_steps: int | None) -> dict[str, tuple[float, float]]:
    """Return the returns of random actions and of the oracle, by family of a mixture; none of those not measured."""
    returns = {}
    for each in _measured(REFERENCES):
        name = each["env-name"]
        arguments = (env_kwargs.get("arguments") or {}).get(name, {})
        changed = {key: value for key, value in arguments.items() if key not in (*FREE, "max_episode_steps")}
        steps = arguments.get("max_episode_steps") or max_episode_steps or FAMILIES[name].max_episode_steps
        # They are those of the default arguments, which a config may repeat.
        is_measured = steps == each["max-episode-steps"] and changed.items() <= each["env-kwargs"].items()
        if is_measured and name in env_kwargs.get("families", HALF_CHEETAHS):
            returns[name] = (each["random"], each["oracle"])
    return returns


@cache
def _measured(file: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return entries
