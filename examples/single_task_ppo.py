"""Stable-Baselines3's PPO on one task of a family: its environments are ordinary Gymnasium environments.

pip install -e '.[examples]'
python examples/single_task_ppo.py --env 2DNavigation-v0 --task '{"goal": [0.4, 0.3]}' --steps 40000
"""

import argparse
import json

import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

import maml_rl  # Registers the families.  # noqa: F401


def main(arguments: list[str] | None = None) -> None:
    """Train on the task, and print the return before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetahDir-v5", help="id of a family (default: HalfCheetahDir-v5)")
    parser.add_argument("--task", type=json.loads, default={"direction": -1}, help="as JSON (default: run backwards)")
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps (default: 100,000)")
    parser.add_argument("--horizon", type=int, default=2048, help="steps before each update (default: 2048)")
    options = parser.parse_args(arguments)

    env = gymnasium.make(options.env, task=options.task)
    model = PPO("MlpPolicy", env, n_steps=options.horizon, seed=0, device="cpu")
    before, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
    model.learn(options.steps)
    after, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
    env.close()
    print(f"{options.env}, {options.task}: return {before:.1f} before and {after:.1f} after {options.steps} steps")


if __name__ == "__main__":
    main()
