"""Recording: learners of single tasks, all in parallel, with all their episodes from the first to the last."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces
from pydantic import Field

from maml_rl.arguments import suggest
from maml_rl.baseline import make_baseline
from maml_rl.config.catalog import find_run
from maml_rl.config.config import Config
from maml_rl.config.settings import SettingsModel
from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.meta_env import EnvDescription, Task
from maml_rl.envs.observing import LastStepParts
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError, MamlRLError, UsersCode, explain
from maml_rl.experience.minari_data_set import dataset_id, require_describable, require_minari, write_data_set
from maml_rl.experience.recording import FOLDER, About, Recording, space_as_json
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.sampling import make_sampler, refuse_too_large_batches
from maml_rl.machine import refuse_if_too_large, usual_torch
from maml_rl.metalearners.single_task import (
    QLearning,
    QLearningSettings,
    SingleTaskLearner,
    SingleTaskPPO,
    SingleTaskPPOSettings,
)
from maml_rl.plan import Plan
from maml_rl.policies import Policy, performed
from maml_rl.policies.classical import PSRL, UCB1, RandomPolicy, ThompsonSampling
from maml_rl.policies.classical.tabular import check_countable
from maml_rl.runs.atomic_files import LOCK, lock_folder, made_folder, remove_unfinished
from maml_rl.runs.checkpoint import list_checkpoints
from maml_rl.runs.run_folder import CHECKPOINTS, load_run_config
from maml_rl.runs.trust import check_code
from maml_rl.samplers import MultiTaskSampler
from maml_rl.seeding import Purpose, StreamKey, generator

# (what the episodes returned, in words; how many iterations are recorded; of how many).
OnIteration = Callable[[str, int, int], None]
# A substitute for the learner of a config while its environment and tasks are tried; nothing of it is used.
_PLAIN = {
    "algorithm": "maml-vpg",
    "method": "maml",
    "meta-batch-size": 1,
    "observe-last": False,
    "memory": None,
    "policy": None,
}
_LEARNERS: dict[str, type[SingleTaskLearner]] = {"ppo": SingleTaskPPO, "q-learning": QLearning}


class UCB1Settings(SettingsModel):
    """Settings of `UCB1`."""

    c: Annotated[float, Field(ge=0, description="width of the confidence bounds")] = 1.0


_BANDIT_LEARNERS = ("ucb1", "thompson")
CLASSICAL = (*_BANDIT_LEARNERS, "psrl", "random")
LEARNERS = (*_LEARNERS, *CLASSICAL)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The location of a data set of histories.

    Attributes:
        identifier: of the data set, which `minari.load_dataset` takes where MINARI_DATASETS_PATH is the output folder.
        folder: of the data set, which `load_histories` takes.
    """

    identifier: str
    folder: Path


@usual_torch()
def record(
    config: Config,
    output: str | Path,
    *,
    num_tasks: int,
    learner: str = "ppo",
    settings: Mapping[str, Any] = MappingProxyType({}),
    resume: bool = False,
    minari: bool = True,
    on_iteration: OnIteration | None = None,
) -> Recorded:
    """Train one learner for each task, all in parallel, and record all their episodes from the first on.

    The content is bit-identical for any number of workers, and after any number of kills with `resume`: the segments of
    the recording, and the file of episodes of the data set.

    Args:
        config: the family and its arguments, the placement, settings of learners with a network (hidden-sizes,
            baseline, gamma, ...), and fast-batch-size, the episodes between two updates, or of a trial of a classical
            algorithm. num-batches is the number of updates; a classical algorithm has one trial. Tasks are those of the
            config's training; with a distribution `fixed`, its training tasks are repeated with other learners.
        output: folder of data sets; this one is in `maml_rl/FAMILY/LEARNER-v0` there.
        num_tasks: M, learners and histories.
        learner: one of `LEARNERS`: "ppo", "q-learning", or a classical algorithm for bandits or tabular processes.
        settings: of the learner, by the names of its `Settings`; and those of the config that it uses, which these
            replace.
        resume: continue a recording that was interrupted.
        minari: also write a data set of Minari; without it, only what `load_histories` reads.
        on_iteration: called after each iteration with its returns in words, the number of recorded iterations, and
            their total number.

    Raises:
        ConfigError: If the config, the learner or a setting is wrong, Minari is missing, or `output` holds another
            recording; before anything is sampled.
        CheckpointError: If a file cannot be written, or is damaged.
        ChildEnvError: If an environment fails.
        NonFiniteError: If an environment or a learner returns NaN or infinity.
    """
    if learner not in LEARNERS:
        raise ConfigError(f"there is no learner {learner!r}{suggest(learner, list(LEARNERS))}")
    if minari:
        require_minari()
    of_config, checked = _split_settings(learner, settings)
    config = config.override({**_PLAIN, **of_config}, "the settings of the learner")
    experiment = make_experiment(config, num_workers=None)
    config = experiment.config
    if minari:
        require_describable(config.env_name, config.env_kwargs)
    with closing(experiment.make_env()) as env:
        described = EnvDescription.of(env)
    _refuse_too_large(experiment, learner, described, num_tasks)
    keys = [StreamKey(config.seed, Purpose.LEARNER_CONSTRUCTION, task=number) for number in range(num_tasks)]
    # Of the initial weights of each learner.
    seeds = [int(generator(key).integers(2**31)) for key in keys]
    with UsersCode(
        lambda error: ConfigError(f"{learner} cannot learn {config.env_name}: {explain(error)}"), ConfigError
    ):
        learners = _make_learners(learner, described, config, seeds, checked)
        horizon = _horizon(config, described)
        policy = learners.policy if learners is not None else _make_classical(learner, described, horizon, checked)
        shown = described.observation_space
        if learners is None:
            size = LastStepParts.of(shown, described.action_space).size
            shown = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        policy.check_spaces(shown, described.action_space)
    with MultiTaskSampler(
        config.env_name,
        config.env_kwargs,
        batch_size=config.fast_batch_size,
        policy=policy,
        seed=config.seed,
        slots_per_task=1 if learners is None else config.slots_per_task,
        max_episode_steps=config.max_episode_steps,
        observe_last=learners is None,
        task_distribution=experiment.task_distribution,
        placement=config.placement.replace(update="driver"),
    ) as sampler:
        tasks = _draw_tasks(experiment, sampler, num_tasks)

        def sample(iteration: int) -> TaskEpisodes:
            sampler.seek(iteration)
            episodes = sampler.rollout(tasks, None if learners is None else learners.params)
            if learners is not None:
                update = f"the update of {learner} in iteration {iteration}"
                remedy = "lower its learning-rate"
                with UsersCode(lambda error: MamlRLError(f"{update} fails ({explain(error)}); {remedy}"), MamlRLError):
                    learners.update(episodes)
            if learner in _BANDIT_LEARNERS:
                _check_pays(learner, episodes)
            return episodes

        about = _about(
            config,
            described,
            tasks=tasks,
            learner_seeds=seeds,
            learner=learner,
            settings=_what_counts(config, checked),
            num_iterations=1 if learners is None else config.num_batches,
        )
        recorded = _record(output, about, sample, learners, on_iteration, resume=resume)
    if minari:
        write_data_set(recorded.folder, recorded.identifier)
    return recorded


@usual_torch()
def record_run(
    run: str | Path,
    output: str | Path,
    *,
    num_tasks: int,
    placement: Mapping[str, Any] = MappingProxyType({}),
    resume: bool = False,
    minari: bool = True,
    trust: bool = False,
    on_iteration: OnIteration | None = None,
) -> Recorded:
    """Record the episodes of a meta-training's policy in each task, from its first checkpoint to its last.

    An iteration is a checkpoint that the run has kept (`keep-checkpoints`). Its policy acts before any gradient step;
    a policy with a memory goes through a trial. Arguments that are not described here are those of `record`.

    Args:
        run: folder of a training run.
        output: folder of data sets; this one is in `maml_rl/FAMILY/ALGORITHM-v0` there.
        num_tasks: M, histories; tasks as in `record`.
        placement: settings that replace those of the run, as "num-workers".
        resume: continue a recording that was interrupted.
        minari: see `record`.
        trust: whether to import modules that the run names, even if they are not known: this executes their code.
        on_iteration: see `record`.

    Raises:
        ConfigError: If there is no such run, it needs `trust`, Minari is missing, or `output` holds another recording.
        CheckpointError: If a file cannot be written, or is damaged.
    """
    if minari:
        require_minari()
    path = find_run(run)
    config = load_run_config(path)
    # With prefetch, a sampler has its own policy.
    placed = config.override({"prefetch": 0, **placement})
    if trust:
        placed = placed.trusted()
    check_code(placed, "add --trust", samples=True)
    experiment = make_experiment(placed, num_workers=None)
    if minari:
        require_describable(config.env_name, config.env_kwargs)
    checkpoints = list_checkpoints(path / CHECKPOINTS)
    if not checkpoints:
        raise ConfigError(f"{path} has no checkpoints to record; train it first")
    with closing(
        make_vector_env(config.env_name, config.env_kwargs, max_episode_steps=config.max_episode_steps)
    ) as env:
        described = EnvDescription.of(env)
    experiment.take_files(path)
    refuse_too_large_batches(experiment, num_tasks, 0)
    with make_sampler(experiment) as sampler:
        tasks = _draw_tasks(experiment, sampler, num_tasks)

        def sample(iteration: int) -> TaskEpisodes:
            experiment.load(checkpoints[iteration], path)
            sampler.seek(iteration)
            return performed(experiment.policy, sampler.rollout(tasks))

        # The content does not depend on the placement.
        trained = experiment.config.model_copy(update={"placement": config.placement})
        about = _about(
            trained,
            described,
            tasks=tasks,
            learner_seeds=[config.seed] * num_tasks,
            learner=config.algorithm,
            settings={"checkpoints": [checkpoint.name for checkpoint in checkpoints], **json.loads(trained.to_json())},
            num_iterations=len(checkpoints),
        )
        recorded = _record(output, about, sample, None, on_iteration, resume=resume)
    if minari:
        write_data_set(recorded.folder, recorded.identifier)
    return recorded


def _horizon(config: Config, env: EnvDescription) -> int:
    horizon = config.max_episode_steps or env.max_episode_steps
    assert horizon is not None
    return horizon


def _about(config: Config, env: EnvDescription, **learned: Any) -> About:
    """Return what a recording says of its family, beside who `learned`."""
    return About(
        env_id=config.env_name,
        env_kwargs=config.env_kwargs,
        horizon=_horizon(config, env),
        observation_space=space_as_json(env.observation_space),
        action_space=space_as_json(env.action_space),
        infos=dict(env.recorded_infos),
        **learned,
    )


def _refuse_too_large(experiment: Experiment, learner: str, env: EnvDescription, num_tasks: int) -> None:
    refuse_too_large_batches(experiment, num_tasks, 0)
    # PPO keeps a gradient and two averages of each parameter.
    each = 4 * sum(param.nbytes for param in experiment.policy.parameters())
    if learner == "q-learning" and isinstance(env.action_space, spaces.Discrete):
        each = 8 * spaces.flatdim(env.observation_space) * int(env.action_space.n)
    if learner in _LEARNERS:
        remedy = "lower --tasks or hidden-sizes"
        refuse_if_too_large(num_tasks * each, f"{num_tasks:,} learners", remedy)


def _draw_tasks(experiment: Experiment, sampler: MultiTaskSampler, num_tasks: int) -> list[Task]:
    """Return the tasks of histories: training tasks, those of a fixed set again and again."""
    fixed = experiment.fixed_tasks("training")
    with experiment.guard:
        drawn = sampler.sample_tasks(num_tasks) if fixed is None else fixed
    return [drawn[number % len(drawn)] for number in range(num_tasks)]


def _record(
    output: str | Path,
    about: About,
    sample: Callable[[int], TaskEpisodes],
    learners: SingleTaskLearner | None,
    on_iteration: OnIteration | None,
    *,
    resume: bool,
) -> Recorded:
    """Sample iterations until everything is recorded, with the state of the learners; return where it is."""
    identifier = dataset_id(about.env_id, about.learner.rpartition(":")[2].lower())
    recorded = Recorded(identifier, Path(output) / identifier)
    with _locked(recorded.folder / FOLDER):
        recording = Recording(recorded.folder / FOLDER, about, resume=resume)
        state = recording.learner_state()
        if state is not None and learners is not None:
            try:
                learners.load(state)
            except (KeyError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"the learners in {recording.folder} do not fit the recording ({explain(error)}); remove it and "
                    "record again"
                ) from error
        for iteration in range(recording.iteration, about.num_iterations):
            episodes = sample(iteration)
            if recording.append(episodes):
                recording.save({} if learners is None else learners.state())
            if on_iteration is not None:
                mean = float(episodes.episode_returns().double().mean())
                on_iteration(f"return {mean:.2f}", iteration + 1, about.num_iterations)
    return recorded


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; remove it if nothing was written to it."""
    with made_folder(folder):
        lock = lock_folder(folder, "recording")
        try:
            # What a process that was killed has left.
            remove_unfinished(folder)
            yield
        finally:
            if [entry.name for entry in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
            os.close(lock)


def _split_settings(learner: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], SettingsModel | None]:
    """Return those of the settings that a config has, by their keys, and the learner's own, if it has any."""
    made = _LEARNERS.get(learner)
    named = {str(name).replace("_", "-"): value for name, value in settings.items()}
    of_config = {key: named.pop(key) for key in list(named) if made is not None and key in made.uses}
    if made is None and learner != "ucb1":
        if named:
            raise ConfigError(f"the learner {learner} has no settings; leave --learner-settings out")
        return of_config, None
    model = UCB1Settings if made is None else made.Settings
    known = list(model.fields_by_key())
    for key in named:
        if key not in known:
            raise ConfigError(f"the learner {learner} has no setting {key!r}{suggest(key, known)}")
    try:
        return of_config, model(**named)
    except ValueError as error:
        raise ConfigError(f"a setting of the learner {learner}: {error}") from None


def _make_learners(
    learner: str, env: EnvDescription, config: Config, seeds: list[int], settings: SettingsModel | None
) -> SingleTaskLearner | None:
    """Return the learners; None for a classical algorithm, which learns by its memory."""
    if isinstance(settings, SingleTaskPPOSettings):
        return SingleTaskPPO(
            env,
            seeds,
            settings,
            hidden_sizes=config.hidden_sizes,
            nonlinearity=config.nonlinearity,
            baseline=make_baseline(config.baseline, env.observation_space),
            plan=Plan.of(config),
        )
    if isinstance(settings, QLearningSettings):
        return QLearning(env, len(seeds), settings, gamma=config.gamma)
    return None


def _make_classical(learner: str, env: EnvDescription, horizon: int, settings: SettingsModel | None) -> Policy:
    if not isinstance(env.action_space, spaces.Discrete):
        raise ValueError(f"it chooses among Discrete actions, and they are {env.action_space}; use ppo")
    num_states, num_actions = spaces.flatdim(env.observation_space), int(env.action_space.n)
    if learner in _BANDIT_LEARNERS and num_states > 1:
        raise ValueError(
            f"it knows arms alone, and there are states, {env.observation_space}; use psrl, q-learning or ppo"
        )
    match learner:
        case "ucb1":
            assert isinstance(settings, UCB1Settings)
            return UCB1(num_actions, settings.c)
        case "thompson":
            return ThompsonSampling(num_actions)
        case "psrl":
            check_countable(env.observation_space)
            return PSRL(num_states, num_actions, horizon)
        case _:
            return RandomPolicy(num_actions)


def _check_pays(learner: str, episodes: TaskEpisodes) -> None:
    """Refuse rewards that cannot be counted as successes and failures."""
    rewards = episodes.rewards[episodes.mask > 0]
    others = rewards[(rewards != 0.0) & (rewards != 1.0)]
    if len(others):
        raise ConfigError(f"{learner} counts rewards of 0 and 1, and one is {float(others[0]):g}; use ppo")


def _what_counts(config: Config, settings: SettingsModel | None) -> dict[str, Any]:
    """Return the settings that the content of a recording depends on, besides family and tasks."""
    keys = ("seed", "fast-batch-size", "gamma", "gae-lambda", "bootstrap", "baseline", "hidden-sizes", "nonlinearity")
    of_config = config.model_dump(mode="json", by_alias=True)
    of_learner = {} if settings is None else settings.model_dump(mode="json", by_alias=True)
    return {key: of_config[key] for key in keys} | of_learner
