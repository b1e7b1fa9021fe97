"""From a config to an experiment: the environment is checked before training begins; policy and sampler are made."""

import inspect
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import torch
from gymnasium.envs.registration import EnvSpec, load_env_creator

from maml_rl.adaptation import AdaptationRule
from maml_rl.arguments import suggest
from maml_rl.baseline import make_baseline
from maml_rl.config.catalog import find_run
from maml_rl.config.config import SECTION, TASKS, Config
from maml_rl.config.settings import SettingsModel
from maml_rl.envs.global_generators import seeded_generators
from maml_rl.envs.make_env import EnvMaker, ObservedLastStep, ObservedTask, make_vector_env
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.envs.registration import FAMILIES, find_spec
from maml_rl.envs.tasks import task_key
from maml_rl.episode.task_episodes import Baseline
from maml_rl.errors import AlgorithmError, ConfigError, MamlRLError, TaskError, UsersCode, explain
from maml_rl.experience import Replay
from maml_rl.foreign_files import check_sum
from maml_rl.machine import refuse_if_too_large, usual_torch
from maml_rl.metalearners.metalearner import MetaLearner, without_numbers
from maml_rl.metalearners.registry import algorithm_of
from maml_rl.named_modules import import_named, is_of_this_package
from maml_rl.policies import Policy, as_policy
from maml_rl.policies.cnn import InputEncoder
from maml_rl.results.identity import sources_now
from maml_rl.runs.checkpoint import find_checkpoint, restore
from maml_rl.runs.run_folder import CHECKPOINTS, FIXED_TASKS, load_system, warn_of_changed_files
from maml_rl.runs.trust import check_code
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv
from maml_rl.seeding import Purpose, StreamKey, torch_seed
from maml_rl.spaces import PackedSpace, array_layout, is_image, require_numbers
from maml_rl.task_distributions import FamilyTasks, TaskDistribution, find_task_distribution, task_distributions
from maml_rl.task_distributions.task_distribution import TaskSplit
from maml_rl.task_distributions.task_files import read_tasks, try_tasks

# Arguments that the sampler passes, and those of Gymnasium: valid, but not meant for a config.
_NOT_SUGGESTED = {"self", "num_envs", "render_mode", "max_episode_steps", "autoreset_mode"}
# Commands have an option for it, and say so before.
TRUST_REMEDY = "call trusted() of the config"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Experiment:
    """The experiment that a config describes.

    Attributes:
        config: the settings, with all of the algorithm's written out.
        metalearner: with the initial parameters of its policy, which depend only on the config's seed.
        baseline: fits the policy's observations.
        device: where the policy is.
        episode_bytes: least size of a recorded episode in bytes.
        in_child: whether the environment must not be made in this process.
        task_distribution: which tasks are drawn; None for the family's own distribution.
    """

    config: Config
    metalearner: MetaLearner
    baseline: Baseline
    device: torch.device
    episode_bytes: int
    in_child: bool = False
    task_distribution: TaskDistribution | None = None

    @property
    def policy(self) -> Policy:
        """The metalearner's policy."""
        return self.metalearner.policy

    @property
    def test_rule(self) -> AdaptationRule | None:
        """The inner loop of an evaluation; None for a metalearner that does not adapt by one."""
        rule = self.metalearner.rule
        return None if rule is None else rule.replace(halve=self.config.halve_step_size)

    def restore(self, checkpoint: str | Path | int, run: Path) -> int:
        """Load the parameters of a checkpoint of a run, and its tasks; return its meta-updates."""
        updates = self.load(checkpoint, run)
        self.take_files(run)
        return updates

    def load(self, checkpoint: str | Path | int, run: Path) -> int:
        """Load the parameters of a checkpoint of a run, as `find_checkpoint` finds it; return its meta-updates."""
        path, saved = find_checkpoint(checkpoint, run / CHECKPOINTS)
        with self.guard:
            restore(saved, self.metalearner, self.config.algorithm, path)
        return saved.iteration

    def take_files(self, run: Path) -> None:
        """Warn of the files of a run that have changed, and take its fixed tasks."""
        # What is damaged there is reported where it is needed.
        with suppress(ConfigError):
            system = load_system(run)
            warn_of_changed_files(run, system, {"sources": sources_now(self.config, system)})
        self.take_fixed_tasks(run)

    def begin_with(self, source: str | Path, *, policy_alone: bool) -> None:
        """Load the parameters, and possibly the learner's state, with which another run ended.

        Args:
            source: its folder, "zoo:NAME", or a checkpoint's folder.
            policy_alone: leave the learner's state as it is; the run may then be of another algorithm.
        """
        folder = find_run(source)
        choice: str | Path = "last" if (folder / CHECKPOINTS).is_dir() else folder
        path, saved = find_checkpoint(choice, folder / CHECKPOINTS)
        # The optimizers' numbers, such as a step size that has fallen, are those of this run.
        saved = replace(saved, learner=without_numbers(saved.learner))
        restore(saved, self.metalearner, self.config.algorithm, path, policy_alone=policy_alone)
        if not policy_alone:
            self.metalearner.begin_schedules()

    def take_fixed_tasks(self, run: Path) -> None:
        """Give the task distribution the sets of tasks that a run has drawn once, if it has any; check them first."""
        files = {split: run / name for split, name in FIXED_TASKS.items()}
        if self.task_distribution is not None and self.task_distribution.fixed_tasks():
            listed = {path.name: check_sum(path) for path in files.values()}
            known = {split: path for split, path in files.items() if path.is_file()}
            if unlisted := [path.name for path in known.values() if not listed[path.name]]:
                logger.warning(
                    "%s in %s: without checksums, as in runs of earlier versions, so a change of these tasks since the "
                    "training would not be noticed",
                    " and ".join(unlisted),
                    run,
                )
            if known.keys() == files.keys():
                sets = {split: read_tasks(path, self.config.env_name) for split, path in known.items()}
                self.task_distribution.take_fixed_tasks(sets)

    def fixed_tasks(self, split: TaskSplit) -> list[Task] | None:
        """Return the training or test tasks if they were drawn once and for all; else None."""
        return None if self.task_distribution is None else self.task_distribution.fixed_tasks().get(split)

    def make_env(self) -> MetaVectorEnv:
        """Make one environment for checks: in this process, or in a worker if it must not be made here."""
        return _make_env(self.config, in_child=self.in_child)

    def load_tasks(self, path: str | Path) -> list[Task]:
        """Read tasks from a file, and try them all in the environment."""
        tasks = read_tasks(path, self.config.env_name)
        with closing(self.make_env()) as env:
            try_tasks(tasks, env, path)
        trained = [task_key(task) for task in self.fixed_tasks("training") or []]
        for index, task in enumerate(tasks):
            if task_key(task) in trained:
                raise ConfigError(
                    f"task {index + 1} in {path} is among the training tasks of the run; leave it out, or test on them "
                    "all with --training-tasks"
                )
        self.refuse_learned_tasks(tasks)
        return tasks

    def refuse_learned_tasks(self, tasks: Sequence[Task]) -> None:
        """Refuse test tasks that are in the recorded data from which the policy has learned."""
        known = [task for task in tasks if task in self.metalearner.learned_tasks]
        if known:
            raise ConfigError(
                f"{len(known)} of the {len(tasks)} tasks are among those of the histories that the policy has learned "
                f"from, the first is {task_key(known[0])}; test on others, say by `tasks: {{distribution: fixed}}` in "
                "the config before the histories are recorded"
            )

    def open_data(self) -> None:
        """Let a learner of recorded data open them, and refuse what such a learner cannot do."""
        if self.metalearner.samples:
            return
        if self.config.prefetch:
            raise self.config.error(f"{self.config.algorithm} samples nothing in training; leave it out", "prefetch")
        with closing(self.make_env()) as env, self.guard:
            self.metalearner.open_data(self.config, env)

    @property
    def guard(self) -> UsersCode:
        """Turns what code of the algorithm, its policy or its tasks raises into one `AlgorithmError`."""
        name = self.config.algorithm
        # Errors of files name these.
        return UsersCode(lambda error: AlgorithmError(f"{name}: {explain(error)}"), (MamlRLError, OSError))


@usual_torch()
def make_experiment(config: Config, device: torch.device | str = "cpu", *, num_workers: int | None = 0) -> Experiment:
    """Make the experiment that a config describes, after trying its environment.

    Args:
        config: the experiment.
        device: where the policy is.
        num_workers: of the later sampler. With 0 the environment is tried in this process; otherwise in a worker,
            because it may hold what must not be in the parent. The families of this package hold no such thing, and
            are always tried here.
    """
    check_code(config, TRUST_REMEDY)
    device = torch.device(device)
    learner, settings, config = algorithm_of(config)
    if config.fast_batch_size % (config.slots_per_task or 1):
        raise config.error(f"must divide fast-batch-size, which is {config.fast_batch_size}", "slots-per-task")
    try:
        spec = find_spec(config.env_name)
    except ValueError as error:
        raise config.error(explain(error), "env-name") from error
    with UsersCode(lambda error: _not_made(config, error), ConfigError):
        _check_env_kwargs(config, spec)
        placed = config.placement
        workers = placed.num_workers if num_workers is None else num_workers
        in_child = workers != 0 and placed.backend != "in-process" and spec.id not in FAMILIES and os.name == "posix"
        env = _make_env(config, in_child=in_child)
    try:
        require_numbers("training", env.single_observation_space, env.single_action_space)
        if env.max_episode_steps is None and config.max_episode_steps is None:
            raise config.error(f"{config.env_name} has no time limit of its own; add 'max-episode-steps'", "env-name")
        if config.policy is None:
            if not is_image(env.single_observation_space) and not isinstance(env.single_observation_space, PackedSpace):
                why = f"it is for images, and {config.env_name} has none; leave it out"
                config = config.without(dict.fromkeys(("conv-layers", "image-scale"), why))
            _check_policy_memory(learner, config, settings, env)
        own_policy = _make_own_policy(config, env)
        # Further networks of a learner also depend only on the config's seed.
        stream = torch_seed(StreamKey(config.seed, Purpose.LEARNER_CONSTRUCTION))
        # What a learner of this package refuses is the environment; of another, it may be anything.
        refusals = (TypeError, ValueError) if is_of_this_package(learner) else ()
        guard = UsersCode(
            lambda error: config.error(f"{config.algorithm} cannot be made: {explain(error)}", "algorithm"),
            (MamlRLError, *refusals),
        )
        with seeded_generators(stream, device), guard:
            policy = (own_policy or learner.make_policy(env, config, settings)).to(device)
            try:
                metalearner = learner.from_config(policy, config, settings, device)
            except TypeError as error:
                # A policy that the algorithm cannot train.
                raise config.error(explain(error), "algorithm" if config.policy is None else "policy") from error
        if metalearner.experience and torch.get_default_dtype() != torch.float32:
            raise config.error(
                f"{config.algorithm} learns from a replay in float32, and torch's default type is "
                f"{torch.get_default_dtype()}; call torch.set_default_dtype(torch.float32) before",
                "algorithm",
            )
        baseline = make_baseline(config.baseline, env.single_observation_space)
        distribution, config = make_task_distribution(config, env, samples=learner.samples)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise config.error(explain(error), "env-name") from error
    finally:
        env.close()
    length = config.max_episode_steps or env.max_episode_steps or 1
    layouts = map(array_layout, (env.single_observation_space, env.single_action_space))
    observation_bytes, action_bytes = (math.prod(shape) * dtype.itemsize for shape, dtype in layouts)
    # A replay has the next observation, the reward and two flags, too.
    kept_bytes = 2 * observation_bytes + action_bytes + 4 + 2
    replays = [experience for experience in metalearner.experience.values() if isinstance(experience, Replay)]
    try:
        refuse_if_too_large(
            sum(replay.bytes_in_memory(kept_bytes) for replay in replays),
            f"the replay buffers of {config.algorithm}, of {sum(replay.capacity for replay in replays):,} steps,",
            "keep fewer steps, or have them memory-mapped",
        )
    except ConfigError as error:
        raise config.error(str(error), "algorithm") from None
    # Rewards, advantages and the mask beside observations and actions.
    step_bytes = observation_bytes + action_bytes + 3 * 4
    return Experiment(config, metalearner, baseline, device, length * step_bytes, in_child, distribution)


def _not_made(config: Config, error: BaseException) -> ConfigError:
    key = "env-kwargs" if config.env_kwargs else "env-name"
    if config.method == "oracle" and isinstance(error, TaskError):
        key = "method"
    return config.error(f"{config.env_name} cannot be made: {explain(error)}", key)


def make_task_distribution(
    config: Config, env: MetaVectorEnv, *, samples: bool
) -> tuple[TaskDistribution | None, Config]:
    """Make the distribution of the section `tasks`, and return it with the config that has all its settings."""
    if config.tasks is None:
        return None, config
    kind, settings = settings_of_tasks(config)
    family = FamilyTasks(
        config.env_name,
        env.task_space,
        lambda count, seed: env.sample_tasks(count, seed=seed),
        config.seed,
        lambda count, seed: env.sample_tasks(count, seed=seed, evaluation=True),
    )
    with UsersCode(lambda error: config.error(explain(error), "tasks")):
        with seeded_generators(torch_seed(StreamKey(config.seed, Purpose.TASK_DISTRIBUTION))):
            distribution = kind.from_settings(settings, config.env_name)
        distribution.admit(family, lambda tasks: try_tasks(tasks, env, "the distribution"))
        if samples:
            distribution.check_batch(config.meta_batch_size)
    return distribution, config.with_section(TASKS, settings)


def settings_of_tasks(config: Config) -> tuple[type[TaskDistribution], SettingsModel]:
    """Return the distribution that the section `tasks` names, and its settings in a run of the config's seed."""
    name = (config.tasks or {}).get("distribution")
    if not isinstance(name, str):
        names = ", ".join(task_distributions())
        raise config.error(f"add a line `distribution: ...`, one of {names}, or module:Class", "tasks")
    try:
        kind = find_task_distribution(name)
    except ValueError as error:
        raise config.error(str(error), "tasks", "distribution") from error
    return kind, kind.complete(config.check_section(TASKS, kind.Settings), config.seed)


def _check_policy_memory(
    learner: type[MetaLearner], config: Config, settings: SettingsModel, env: MetaVectorEnv
) -> None:
    """Refuse policies that certainly do not fit: parameters, a gradient of the same size, and memories of slots."""
    space = env.single_observation_space
    if is_image(space) or isinstance(space, PackedSpace):
        try:
            InputEncoder(space, config.conv_layers)
        except ValueError as error:
            raise config.error(str(error), "conv-layers") from None
    num_bytes, what = _size_of_policy(learner, config, settings, env)
    try:
        refuse_if_too_large(num_bytes, what, "lower it")
    except ConfigError as error:
        # The setting without which the policy would be smallest.
        sizes: dict[tuple[str, ...], int] = {("algorithm",): num_bytes}
        for path, others in _with_one_default(config, settings):
            sizes[path], _ = _size_of_policy(learner, *others, env)
        raise config.error(str(error), *min(sizes, key=lambda path: sizes[path])) from None


def _with_one_default(
    config: Config, settings: SettingsModel
) -> Iterator[tuple[tuple[str, ...], tuple[Config, SettingsModel]]]:
    """Yield the place of each setting that may have a size, and the config and settings with its default."""
    for name in ("hidden_sizes", "conv_layers"):
        default = Config.model_fields[name].get_default()
        yield (name.replace("_", "-"),), (config.model_copy(update={name: default}), settings)
    for name, field in type(settings).model_fields.items():
        # A choice by name decides which of the numbers count.
        if not field.is_required() and not isinstance(getattr(settings, name), str):
            default = field.get_default(call_default_factory=True)
            yield (SECTION, name.replace("_", "-")), (config, settings.model_copy(update={name: default}))


def _size_of_policy(
    learner: type[MetaLearner], config: Config, settings: SettingsModel, env: MetaVectorEnv
) -> tuple[int, str]:
    """Return the least bytes that a policy takes in training, and what they hold; 0 where that is not known."""
    try:
        # Tensors there have shapes and no numbers.
        with seeded_generators(config.seed), torch.device("meta"):
            policy = learner.make_policy(env, config, settings)
            memory = sum(part.nbytes for part in policy.initial_memory(1))
    except Exception as error:
        # An algorithm of the user's own may need the numbers; other errors come again where the policy is made.
        is_huge = isinstance(error, RuntimeError | OverflowError) and "overflow" in str(error).lower()
        return (2**63 if is_huge else 0), "a policy of more parameters than torch counts"
    parameters = list(policy.parameters())
    num_bytes = sum(2 * param.nbytes for param in parameters) + sum(buffer.nbytes for buffer in policy.buffers())
    what = f"a policy of {sum(param.numel() for param in parameters):,} parameters"
    if memory:
        # A cluster spreads the slots over its machines.
        num_slots = 1 if config.placement.backend == "ray" else config.meta_batch_size
        what += f", with a memory in {num_slots:,} slots,"
        num_bytes += num_slots * memory
    return num_bytes, what


def _make_own_policy(config: Config, env: MetaVectorEnv) -> Policy | None:
    if config.policy is None:
        return None
    module, _, name = config.policy.partition(":")
    message = f"{config.policy} does not make a policy for {config.env_name}"
    with UsersCode(lambda error: config.error(f"{message}: {explain(error)}", "policy")):
        make = getattr(import_named(module), name)
        spaces = env.single_observation_space, env.single_action_space
        with seeded_generators(config.seed):
            policy = as_policy(make(*spaces))
        policy.check_spaces(*spaces)
    return policy


def _make_env(config: Config, *, in_child: bool) -> MetaVectorEnv:
    arguments: dict[str, Any] = {"env_kwargs": config.env_kwargs, "max_episode_steps": config.max_episode_steps}
    if in_child:
        limits = config.placement
        arguments |= {"step_timeout": limits.step_timeout, "max_restarts": limits.max_restarts}
        return ParallelVectorEnv(env_maker(config), **arguments)
    return make_vector_env(env_maker(config), **arguments)


def env_maker(config: Config) -> EnvMaker:
    """Return the id of the environment, or what makes it so that it shows what the config says."""
    env: EnvMaker = ObservedTask(config.env_name) if config.method == "oracle" else config.env_name
    return ObservedLastStep(env) if config.observe_last else env


def _check_env_kwargs(config: Config, spec: EnvSpec) -> None:
    """Refuse arguments that the environment's signature does not have."""
    entry_point = spec.vector_entry_point or spec.entry_point
    if entry_point is None:
        return
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    parameters: list[str] = []
    for name, parameter in inspect.signature(creator).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(name)
        elif options := _unpacked(creator, name):
            parameters += options
        else:
            return
    for name in config.env_kwargs:
        if name not in parameters:
            hint = suggest(name, [known for known in parameters if known not in _NOT_SUGGESTED])
            raise config.error(f"{config.env_name} takes no argument {name!r}{hint}", "env-kwargs", name)


def _unpacked(creator: Any, name: str) -> list[str]:
    """Return the names of the keyword arguments that a signature declares by a TypedDict after its `**`, if it does."""
    classes = creator.__mro__ if isinstance(creator, type) else ()
    function = next((vars(base)["__init__"] for base in classes if "__init__" in vars(base)), creator)
    try:
        hint = get_type_hints(function).get(name)
    # A string that is not a type here.
    except NameError:
        return []
    return list(get_type_hints(get_args(hint)[0])) if get_origin(hint) is Unpack else []
