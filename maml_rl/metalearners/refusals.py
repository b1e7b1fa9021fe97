"""Configs that learners refuse: checks that several algorithms share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maml_rl.config import Config


def refuse_hidden_rewards(config: Config) -> None:
    """Refuse a config whose policy would not observe its last action and reward."""
    if not config.observe_last:
        raise config.error(
            f"{config.algorithm} learns from the last action and reward; add 'observe-last: true'", "algorithm"
        )


def refuse_small_replay(config: Config, env: Any, setting: str, num_steps: int, num_episodes: int = 1) -> None:
    """Refuse a config whose `setting`, of so many steps, makes a replay smaller than a trial of `num_episodes`."""
    steps = (config.max_episode_steps or env.max_episode_steps or 1) * num_episodes
    if num_steps < steps:
        raise config.error(
            f"a replay buffer of {num_steps:,} steps has no room for {'a trial' if num_episodes > 1 else 'an episode'} "
            f"of {steps:,}; use at least {steps}, better a hundred times as many",
            "algorithm-settings",
            setting,
        )


@contextmanager
def refuse_sizes(config: Config) -> Iterator[None]:
    """Turn a policy's error about the sizes of its transformer into an error of the config."""
    try:
        yield
    except ValueError as error:
        raise config.error(f"no transformer of these sizes: {error}", "algorithm-settings") from None
