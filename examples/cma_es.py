"""CMA-ES on a policy: the package `cma` proposes candidates, a `PopulationEvaluator` returns the value of each.

Every generation is one call, in which all candidates act in parallel in the workers.

    pip install -e '.[examples]'
    python examples/cma_es.py --env HalfCheetahDir-v5 --task '{"direction": 1}'

Source: Hansen 2016, The CMA evolution strategy: a tutorial, https://arxiv.org/abs/1604.00772
"""

import argparse
import json

import cma
import gymnasium
import numpy as np

import maml_rl
from maml_rl import PopulationEvaluator


def main(arguments: list[str] | None = None) -> None:
    """Search for weights, and print the returns of every generation, and those before and after the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetahDir-v5", help="id of a family (default: HalfCheetahDir-v5)")
    parser.add_argument("--task", type=json.loads, help="as JSON (default: one that the family draws)")
    parser.add_argument("--hidden-sizes", type=int, nargs="*", default=[], help="units (default: a linear policy)")
    parser.add_argument("--generations", type=int, default=100, help="of the search (default: 100)")
    parser.add_argument("--population", type=int, default=32, help="candidates in each (default: 32)")
    parser.add_argument("--episodes", type=int, default=2, help="of each candidate (default: 2)")
    parser.add_argument("--step-size", type=float, default=0.1, help="initial, of the search (default: 0.1)")
    parser.add_argument("--horizon", type=int, help="steps of an episode (default: the family's)")
    parser.add_argument("--num-workers", type=int, help="child processes (default: the cores)")
    options = parser.parse_args(arguments)

    # Noise in the actions only blurs the value of a candidate: the search itself explores.
    env = gymnasium.make(options.env)
    policy = maml_rl.get_policy_for_env(env, options.hidden_sizes, "tanh", init_std=0.01)
    env.close()
    with PopulationEvaluator(
        options.env,
        policy,
        options.num_workers,
        options.episodes,
        task=options.task,
        max_episode_steps=options.horizon,
    ) as evaluator:
        start = evaluator.policy_weights()
        settings = {"popsize": options.population, "seed": 1, "verbose": -9}
        strategy = cma.CMAEvolutionStrategy(start, options.step_size, settings)
        for generation in range(options.generations):
            candidates = strategy.ask()
            returns = evaluator.evaluate(candidates)
            strategy.tell(candidates, -returns)
            print(f"generation {generation:3}: return {returns.mean():8.2f} on average, {returns.max():8.2f} at best")
        # Half a population each: another number of members would need other children.
        half = options.population // 2
        rows = np.repeat([start, strategy.mean], [half, options.population - half], axis=0)
        returns = evaluator.evaluate(rows)
        evaluator.set_policy_weights(strategy.mean)
    before, after = returns[:half].mean(), returns[half:].mean()
    print(f"{options.env}: return {before:.2f} before and {after:.2f} after the search")


if __name__ == "__main__":
    main()
