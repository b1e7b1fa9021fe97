"""A trained policy outside of the scripts: load it from its run, adapt it to one task, let it act."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from maml_rl.adaptation import AdaptationRule
from maml_rl.baseline import make_baseline
from maml_rl.config.catalog import find_run
from maml_rl.config.config import Config, load_config
from maml_rl.envs.make_env import EnvMaker
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.policies import MLPPolicy, Policy, get_policy_for_env
from maml_rl.runs.run_folder import CONFIG
from maml_rl.runs.trust import check_code
from maml_rl.samplers import MultiTaskSampler

AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


def load_policy(
    run: str | Path,
    checkpoint: str | Path | int = "last",
    device: torch.device | str = "cpu",
    *,
    trust: bool = False,
) -> Policy:
    """Load the policy of a training run, or one that comes with the package.

    Args:
        run: the run's folder; or "zoo:NAME", with a name that `maml-rl zoo` lists.
        checkpoint: "last"; "best", by the evaluations of the run if it has any, otherwise by its returns in training; a
            number of iterations; or the folder of a checkpoint.
        device: where the policy goes.
        trust: whether to import modules that the run names, though they are neither installed nor known from training
            on this machine. To import a module is to execute it.

    Returns:
        The policy; its attribute `trained_with` is the config of the run, and `adaptation_rule` the inner loop that
        `adapt_to_task` takes.

    Raises:
        ConfigError: If the folder is no run, the zoo has no such policy, the environment cannot be made, or the run
            needs `trust`.
        CheckpointError: If the checkpoint is missing, broken, or of another architecture.
    """
    folder = find_run(run)
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} is not a run folder, it has no {CONFIG}; give the --output-folder of a training run"
        )
    config = load_config(folder / CONFIG)
    if not trust:
        check_code(config, "pass trust=True to load_policy")
    experiment = make_experiment(config, device)
    experiment.restore(checkpoint, folder)
    policy = experiment.policy
    # Where a policy comes from is no part of what a policy is.
    policy.__dict__.update(trained_with=experiment.config, adaptation_rule=experiment.test_rule)
    return policy


def adapt_to_task(
    policy: AnyPolicy,
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
) -> AnyPolicy:
    """Adapt a policy to one task by gradient steps, with new episodes before each.

    What is None is taken from the config of the run that the policy was loaded from; for a policy of no run, from the
    defaults of `Config`.

    Args:
        policy: where to start; it is left as it is.
        env_name: registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        task: of that family.
        num_steps: gradient steps.
        env_kwargs: keyword arguments of the environment; None for those of the run, where it was of this family.
        step_size: of each gradient step, instead of the rule's.
        rule: the inner loop.
        num_episodes: sampled before each step.
        max_episode_steps: time limit; None for the run's, where it was of this family, or the environment's own.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
        seed: of the episodes.
        num_workers: worker processes; 0 samples in this process.

    Returns:
        An adapted copy of the policy, ready to act.

    Raises:
        ConfigError: If the policy is an oracle, or of an algorithm that does not adapt by gradient steps.
        TaskError: If the task is malformed, or of another family.
        ValueError: If the policy does not fit the environment, or an argument is out of range.
        ChildEnvError: If the environment fails.
    """
    trained_with: Config | None = getattr(policy, "trained_with", None)
    learned_rule: AdaptationRule | None = getattr(policy, "adaptation_rule", None)
    config = trained_with or Config.model_validate({"env-name": "none"})
    if config.method == "oracle":
        raise ConfigError(
            "the policy is an oracle, which observes its task and has nothing to adapt to; load that of another run"
        )
    if policy.has_memory:
        raise ConfigError(
            f"{type(policy).__name__} has a memory, which adapts while it acts, and takes no gradient steps; let it "
            "act in the task with choose, or with sampler.rollout_trials"
        )
    if trained_with is not None and learned_rule is None:
        raise ConfigError(
            f"a policy of the algorithm {config.algorithm!r} does not adapt by gradient steps; let it act with choose, "
            "or load one of another algorithm"
        )
    rule = learned_rule if rule is None and trained_with is not None else rule
    rule = (rule or AdaptationRule(config.fast_lr)).replace(step_size=step_size)
    same_family = config.env_name == env_name
    device = next(policy.parameters()).device
    with MultiTaskSampler(
        env_name,
        config.env_kwargs if env_kwargs is None and same_family else env_kwargs,
        batch_size=config.fast_batch_size if num_episodes is None else num_episodes,
        policy=policy,
        seed=seed,
        num_workers=num_workers,
        max_episode_steps=config.max_episode_steps if max_episode_steps is None and same_family else max_episode_steps,
        evaluation=True,
        device=device,
    ) as sampler:
        _check_spaces(policy, sampler, env_name)
        sampler.baseline = make_baseline(config.baseline, sampler.single_observation_space)
        _, adapted = sampler.adapt(
            [task],
            num_steps,
            rule,
            gamma=config.gamma if gamma is None else gamma,
            gae_lambda=config.gae_lambda if gae_lambda is None else gae_lambda,
            bootstrap=config.bootstrap,
            device=device,
        )
    ready = copy.deepcopy(policy)
    if adapted is not None:
        ready.load_state_dict({name: param.squeeze(0) for name, param in adapted.items()}, strict=False)
    return ready


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
