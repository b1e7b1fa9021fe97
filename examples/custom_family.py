"""Your own task family in 40 lines, and meta-training on it.

A tram must halt at a stop that it cannot see. The position of the stop is the task.

    python examples/custom_family.py
"""

import argparse
from typing import Any

import gymnasium
import numpy as np

from maml_rl import MAMLTRPO, LinearFeatureBaseline, MultiTaskSampler, get_policy_for_env
from maml_rl.envs import check_meta_env


class TramEnv(gymnasium.Env):
    """The observation is position and velocity, the action a force; the reward is minus the distance to the stop."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.state, self.stop = np.zeros(2), 0.0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks: dicts of numbers and arrays. Only np_random is seeded, so draw from nothing else."""
        return [{"stop": float(stop)} for stop in self.np_random.uniform(-1.0, 1.0, num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        """Become the member of the family that the task describes, until the next call; a reset does not change it."""
        if task.keys() != {"stop"}:
            raise ValueError(f"a task has the entry 'stop' alone, got {task}")
        self.stop = float(task["stop"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Put the tram somewhere near the middle of the line."""
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-0.1, 0.1, 2)
        return self.state.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Push for a tenth of a second. The time limit is part of the registration, not of the environment."""
        position, velocity = self.state
        force = float(np.clip(action[0], -2.0, 2.0))
        velocity += 0.1 * (force - velocity)
        self.state = np.array([position + 0.1 * velocity, velocity])
        return self.state.astype(np.float32), -abs(position - self.stop), False, False, {}


# The entry point is a string, so that a config can name the family: env-name: 'custom_family:Tram-v0'.
gymnasium.register("Tram-v0", entry_point=f"{__name__}:TramEnv", max_episode_steps=50)


def main(arguments: list[str] | None = None) -> None:
    """Check the family, and meta-train on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40, help="meta-updates (default: 40)")
    parser.add_argument("--num-workers", type=int, help="child processes (default: the cores)")
    options = parser.parse_args(arguments)

    env = gymnasium.make("Tram-v0")
    check_meta_env(env)  # Reports in one sentence what a family still lacks.
    policy = get_policy_for_env(env, hidden_sizes=(32, 32), nonlinearity="tanh")
    metalearner = MAMLTRPO(policy, fast_lr=0.1)
    with MultiTaskSampler(
        TramEnv,
        batch_size=10,
        policy=policy,
        baseline=LinearFeatureBaseline.for_space(env.observation_space),
        seed=0,
        num_workers=options.num_workers,
        max_episode_steps=50,
    ) as sampler:
        for iteration in range(options.iterations):
            tasks = sampler.sample_tasks(20)
            train_episodes, valid_episodes = sampler.sample(tasks, num_steps=1, fast_lr=0.1, gamma=0.99)
            metalearner.step(train_episodes, valid_episodes, max_kl=0.01)
            before, after = (phase.episode_returns().mean() for phase in (train_episodes[0], valid_episodes))
            print(f"iteration {iteration:3}: return {before:7.2f} before and {after:7.2f} after adaptation")


if __name__ == "__main__":
    main()
