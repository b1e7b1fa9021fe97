"""From a config to an experiment: the environment is checked before any process starts; policy and sampler are made."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from gymnasium.envs.registration import load_env_creator, registry

from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.config import Config
from maml_rl.config_file import suggest
from maml_rl.envs.making import make_vector_env
from maml_rl.policies import Policy, get_policy_for_env
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers import MultiTaskSampler

# Arguments that the sampler gives, and those of Gymnasium: right, but not what somebody meant to write into a config.
_NOT_SUGGESTED = {"self", "num_envs", "render_mode", "max_episode_steps"}


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a config describes.

    Attributes:
        config: the settings.
        policy: with its initial parameters, which depend on the config's seed alone.
        baseline: fits the policy's observations.
        device: where the policy lies.
    """

    config: Config
    policy: Policy
    baseline: LinearFeatureBaseline
    device: torch.device

    def make_sampler(
        self, *, num_workers: int | None = None, evaluation: bool = False, timer: StageTimer = NULL_TIMER
    ) -> MultiTaskSampler:
        """Make the sampler of this experiment; see `MultiTaskSampler` for the arguments."""
        config = self.config
        return MultiTaskSampler(
            config.env_name,
            config.env_kwargs,
            batch_size=config.fast_batch_size,
            policy=self.policy,
            baseline=self.baseline,
            seed=config.seed,
            num_workers=num_workers,
            slots_per_task=config.slots_per_task,
            max_episode_steps=config.max_episode_steps,
            evaluation=evaluation,
            device=self.device,
            timer=timer,
        )


def make_experiment(config: Config, device: torch.device | str = "cpu") -> Experiment:
    """Make what a config describes, having tried its environment in this process.

    Raises:
        ConfigError: If the environment is not registered, is no task family, or refuses its arguments.
    """
    device = torch.device(device)
    if config.fast_batch_size % (config.slots_per_task or 1):
        raise config.error(f"must divide fast-batch-size, which is {config.fast_batch_size}", "slots-per-task")
    _check_env_name(config)
    _check_env_kwargs(config)
    try:
        env = make_vector_env(config.env_name, config.env_kwargs, num_envs=1)
    except (TypeError, ValueError, AttributeError, ImportError, gymnasium.error.Error) as error:
        key = "env-kwargs" if config.env_kwargs else "env-name"
        raise config.error(f"{config.env_name} cannot be made: {_one_line(error)}", key) from error
    try:
        policy = get_policy_for_env(env, config.hidden_sizes, config.nonlinearity, seed=config.seed)
        baseline = LinearFeatureBaseline(gymnasium.spaces.flatdim(env.single_observation_space))
    except (TypeError, ValueError) as error:
        raise config.error(_one_line(error), "env-name") from error
    finally:
        env.close()
    return Experiment(config, policy.to(device), baseline, device)


def _check_env_name(config: Config) -> None:
    """Refuse an id that is not registered, after importing the module that a "module:id" names."""
    module, _, env_id = config.env_name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise config.error(f"the module {module!r} cannot be imported: {_one_line(error)}", "env-name") from error
    if env_id not in registry:
        raise config.error(f"no environment {env_id!r} is registered{suggest(env_id, list(registry))}", "env-name")


def _check_env_kwargs(config: Config) -> None:
    """Refuse arguments that the environment's signature does not have."""
    spec = registry[config.env_name.rpartition(":")[2]]
    parameters: dict[str, Any] = {}
    for entry_point in (spec.vector_entry_point, spec.entry_point):
        if entry_point is not None:
            creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
            parameters.update(inspect.signature(creator).parameters)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in config.env_kwargs:
        if name not in parameters:
            hint = suggest(name, [known for known in parameters if known not in _NOT_SUGGESTED])
            raise config.error(f"{config.env_name} takes no argument {name!r}{hint}", "env-kwargs", name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
