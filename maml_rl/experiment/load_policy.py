"""Trained policies in user code: load one from its run, adapt it to one task, act with it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maml_rl.adaptation import AdaptationRule
from maml_rl.baseline import make_baseline
from maml_rl.config.catalog import find_run
from maml_rl.config.config import Config
from maml_rl.envs.make_env import EnvMaker
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.machine import usual_torch
from maml_rl.metalearners.metalearner import MetaLearner, adapt
from maml_rl.plan import Plan
from maml_rl.policies import MLPPolicy, Policy, get_policy_for_env
from maml_rl.runs.run_folder import load_run_config
from maml_rl.runs.trust import check_code
from maml_rl.samplers import MultiTaskSampler


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a policy comes from, which is not part of its state: copies share it, and it is not pickled.

    Attributes:
        config: of the run.
        learner: that trained the policy, and adapts it.
        rule: the inner loop of its tests; None for a learner without one.
    """

    config: Config
    learner: MetaLearner
    rule: AdaptationRule | None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # None, where it is loaded.
        return type(None), ()


def load_policy(
    run: str | Path, checkpoint: str | Path | int = "last", device: torch.device | str = "cpu", *, trust: bool = False
) -> Policy:
    """Load the policy of a training run, or one that comes with the package.

    Args:
        run: the run's folder; or "zoo:NAME", with a name that `maml-rl zoo` lists.
        checkpoint: "last"; "best", by the evaluations of the run if it has any, otherwise by its returns in training; a
            number of iterations; or the folder of a checkpoint.
        device: where the policy goes.
        trust: whether to import modules that the run names even if they are neither installed nor known from training
            on this machine. Importing a module executes it.

    Returns:
        The policy; its attribute `trained_with` is the config of the run, and `origin` has the learner by which
        `adapt_to_task` adapts it.

    Raises:
        ConfigError: If the folder is not a run folder, the zoo has no such policy, the environment cannot be made, or
            the run needs `trust`.
        CheckpointError: If the checkpoint is missing, broken, or of another architecture.
    """
    folder = find_run(run)
    config = load_run_config(folder)
    if trust:
        config = config.trusted()
    check_code(config, "pass trust=True to load_policy")
    experiment = make_experiment(config, device)
    experiment.restore(checkpoint, folder)
    policy = experiment.policy
    policy.origin = Origin(experiment.config, experiment.metalearner, experiment.test_rule)
    return policy


@usual_torch()
def adapt_to_task(
    policy: Policy,
    env_name: EnvMaker,
    task: Task,
    num_steps: int = 1,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    step_size: float | None = None,
    rule: AdaptationRule | None = None,
    num_episodes: int | None = None,
    max_episode_steps: int | None = None,
    gamma: float | None = None,
    gae_lambda: float | None = None,
    seed: int = 0,
    num_workers: int = 0,
) -> Policy:
    """Adapt a policy to one task as its learner does: by gradient steps with new episodes before each, or by a memory.

    A policy without a run takes gradient steps, or, if it has a memory, goes through a trial.

    Arguments that are None are taken from the config of the run that the policy was loaded from; for a policy without
    a run, from the defaults of `Config`.

    Args:
        policy: the initial one; it does not change.
        env_name: registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        task: of that family.
        num_steps: of adaptation; a learner that does not adapt in steps ignores it.
        env_kwargs: keyword arguments of the environment; None for those of the run, if it was of this family.
        step_size: of each gradient step, instead of the rule's.
        rule: the inner loop, for a learner that takes gradient steps.
        num_episodes: sampled before each step, or in the trial.
        max_episode_steps: time limit; None for the run's, if it was of this family, or the environment's own.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
        seed: of the episodes.
        num_workers: worker processes; 0 samples in this process.

    Returns:
        An adapted copy of the policy, ready to act; if its memory adapts, its trials start with that memory.

    Raises:
        ConfigError: If the policy is an oracle, or of an algorithm that does not adapt, or if a step size or rule is
            given for one that takes no gradient steps.
        TaskError: If the task is malformed, or of another family.
        ValueError: If the policy does not fit the environment, or an argument is out of range.
        ChildEnvError: If the environment fails.
    """
    origin: Origin | None = policy.origin
    config = Config.model_validate({"env-name": "none"}) if origin is None else origin.config
    if config.method == "oracle":
        raise ConfigError(
            "the policy is an oracle, which observes its task and needs no adaptation; load that of another run"
        )
    by_trials = policy.has_memory if origin is None else origin.learner.whole_trials
    by_gradients = not policy.has_memory if origin is None else origin.learner.rule is not None
    if not by_gradients and not (rule is None and step_size is None):
        how = f"the algorithm {config.algorithm!r}" if origin else f"{type(policy).__name__}, which has a memory,"
        raise ConfigError(f"{how} does not adapt by gradient steps; leave out rule and step_size")
    if by_gradients:
        rule = rule or (AdaptationRule(config.fast_lr) if origin is None else origin.rule)
        assert rule is not None
        rule = rule.replace(step_size=step_size)
    same_family = config.env_name == env_name
    device = next((param.device for param in policy.parameters()), torch.device("cpu"))
    with MultiTaskSampler(
        env_name,
        config.env_kwargs if env_kwargs is None and same_family else env_kwargs,
        batch_size=config.fast_batch_size if num_episodes is None else num_episodes,
        policy=policy,
        seed=seed,
        num_workers=num_workers,
        slots_per_task=1 if by_trials else None,
        max_episode_steps=config.max_episode_steps if max_episode_steps is None and same_family else max_episode_steps,
        observe_last=config.observe_last,
        reset_memory_each_episode=not by_trials and policy.has_memory,
        evaluation=True,
        device=device,
    ) as sampler:
        _check_spaces(policy, sampler, env_name)
        sampler.baseline = make_baseline(config.baseline, sampler.single_observation_space)
        plan = Plan(
            num_steps=num_steps,
            rule=rule,
            whole_trials=by_trials,
            gamma=config.gamma if gamma is None else gamma,
            gae_lambda=config.gae_lambda if gae_lambda is None else gae_lambda,
            bootstrap=config.bootstrap,
            device=device,
        )
        if origin is not None:
            # A copy: the policy may have moved since it was loaded, and its learner is left as it is.
            learner = copy.copy(origin.learner)
            learner.plan, learner.device = plan, device
            adapted = learner.adapt(sampler, [task], num_steps, rule)
        else:
            adapted = adapt(sampler, [task], plan)
    if adapted.params is None and not adapted.memory and num_steps > 0:
        raise ConfigError(
            f"a policy of the algorithm {config.algorithm!r} does not adapt by gradient steps, nor in another way; let "
            "it act with choose, or load one of another algorithm"
        )
    return adapted.policy_of(policy)


def _check_spaces(policy: Policy, sampler: MultiTaskSampler, env_name: EnvMaker) -> None:
    """Refuse a policy that was made for another family; a user's own policy checks this itself."""
    if not isinstance(policy, MLPPolicy):
        return
    fitting = get_policy_for_env(sampler)
    mine, theirs = ((made.observation_shape, made.noise_kind, made.noise_size) for made in (policy, fitting))
    if mine != theirs:
        raise ValueError(
            f"the policy is for observations of shape {policy.observation_shape} and actions of {policy.noise_size} "
            f"entries, {env_name} has observations of shape {fitting.observation_shape} and {fitting.noise_size}; "
            "load the policy of a run of this family"
        )
