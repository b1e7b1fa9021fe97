"""Histories of learners that search the one arm of a bandit that pays; and recordings of random pulls."""

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from maml_rl import MultiTaskSampler
from maml_rl.config import Config
from maml_rl.experience import Histories
from maml_rl.experience.histories import EnvKind
from maml_rl.experience.recording import About, Recording, space_as_json
from maml_rl.policies.classical import RandomPolicy
from tests.small_runs import config_of

ARMS, PULLS = 5, 8
BANDIT = {"env_name": "Bandit-K5-v0", "env_kwargs": {"pulls": PULLS}, "max_episode_steps": None, "fast_batch_size": 1}
SMALL = {
    "context": PULLS,
    "hidden-size": 16,
    "num-layers": 2,
    "num-heads": 2,
    "batch-size": 16,
    "num-updates": 4,
    "warmup": 0,
    "learning-rate": 0.01,
}


def bandit_histories(means: Any = None) -> Histories:
    """Return histories of learners that pull one arm after the other until one pays, and then only that one."""
    means = np.eye(ARMS) if means is None else np.asarray(means)
    best = means.argmax(1)[:, None]
    actions = np.minimum(np.arange(PULLS), best)
    return Histories(
        [{"mean": mean} for mean in means],
        [[PULLS]] * len(means),
        np.zeros((actions.size, 1), np.float32),
        actions.ravel(),
        (actions == best).ravel(),
        EnvKind(spaces.Box(0.0, 1.0, (1,), np.float32), spaces.Discrete(ARMS), "Bandit-K5-v0", {"pulls": PULLS}),
        terminated=[True] * len(means),
        final_observations=np.zeros((len(means), 1), np.float32),
    )


def bandit_config(algorithm: str, **settings: Any) -> Config:
    """Return the config of a small learner of such histories."""
    given = SMALL | {key.replace("_", "-"): value for key, value in settings.items()}
    config = config_of(**BANDIT, observe_last=True)
    return config.override({"algorithm": algorithm, "algorithm-settings": given})


def record(folder: Path) -> Path:
    """Write a recording of random pulls of some bandits, and return its folder."""
    with MultiTaskSampler("Bandit-K5-v0", {"pulls": PULLS}, 1, RandomPolicy(ARMS), num_workers=0, seed=0) as sampler:
        episodes = sampler.rollout(sampler.sample_tasks(4))
        described = [space_as_json(space) for space in (sampler.env.observation_space, sampler.env.action_space)]
    about = About(
        env_id="Bandit-K5-v0",
        env_kwargs={"pulls": PULLS},
        horizon=PULLS,
        observation_space=described[0],
        action_space=described[1],
        tasks=list(episodes.tasks),
        learner_seeds=[0] * 4,
        learner="random",
        settings={},
        num_iterations=1,
    )
    recording = Recording(folder, about)
    recording.append(episodes)
    recording.save({})
    return folder
