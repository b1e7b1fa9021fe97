"""Load the policy of a finished run, adapt it to a task of your choice, and act in it.

make train
python examples/adapt_saved_policy.py runs/maml/2d-navigation '{"goal": [0.3, -0.2]}'
"""

import argparse
import json

import gymnasium
import numpy as np

import maml_rl
from maml_rl.policies import Policy
from maml_rl.spaces import own_actions, stored_actions


def main(arguments: list[str] | None = None) -> None:
    """Print the return in the task after 0, 1, ... gradient steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("task", type=json.loads, help="as JSON")
    parser.add_argument("--num-steps", type=int, default=3, help="maximum number of gradient steps (default: 3)")
    parser.add_argument(
        "--num-episodes", type=int, default=10, help="episodes to average the return over (default: 10)"
    )
    options = parser.parse_args(arguments)

    policy = maml_rl.load_policy(options.run)
    config = policy.trained_with
    env = gymnasium.make(
        config.env_name, max_episode_steps=config.max_episode_steps, task=options.task, **config.env_kwargs
    )
    for num_steps in range(options.num_steps + 1):
        adapted = maml_rl.adapt_to_task(policy, config.env_name, options.task, num_steps)
        returns = [_run_episode(env, adapted, seed) for seed in range(options.num_episodes)]
        print(f"after {num_steps} step{'s' * (num_steps != 1)}: return {np.mean(returns):8.2f}")
    env.close()


def _run_episode(env: gymnasium.Env, policy: Policy, seed: int) -> float:
    """Take the policy's most probable actions, and return the sum of rewards."""
    observation, _ = env.reset(seed=seed)
    memory, actions = None, stored_actions(env.action_space)
    total, over = 0.0, False
    while not over:
        action, memory = policy.choose(observation, memory)
        # As in training, the environment gets what is within its bounds, counted as it counts.
        observation, reward, terminated, truncated, _ = env.step(own_actions(actions, action))
        total += float(reward)
        over = terminated or truncated
    return total


if __name__ == "__main__":
    main()
