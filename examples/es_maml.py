"""ES-MAML: meta-learning without derivatives, in which adaptation is also an evolution strategy.

Meta-parameters are perturbed, each perturbation is adapted to its own task, and the meta-parameters move toward
the perturbations with higher returns after adaptation. Adaptation perturbs once more. All perturbations of all
perturbations act in one population, so two calls of `evaluate` replace two nested loops.

    python examples/es_maml.py

Source: Song et al. 2020, ES-MAML: simple Hessian-free meta learning, https://arxiv.org/abs/1910.01215, algorithm 3
"""

import argparse

import gymnasium
import numpy as np
from numpy.typing import NDArray

from maml_rl import PopulationEvaluator, get_policy_for_env
from maml_rl.envs.meta_env import Task

Weights = NDArray[np.float64]


class ESMAML:
    """Zeroth-order ES-MAML with antithetic perturbations.

    Args:
        evaluator: returns the value of weights in tasks.
        num_pairs: K, pairs of perturbations that one adaptation tries.
        inner_step: alpha, step size of adaptation.
        outer_step: beta, step size of the meta-update.
        sigma: standard deviation of perturbations.
        seed: of the perturbations.
    """

    def __init__(
        self,
        evaluator: PopulationEvaluator,
        num_pairs: int = 10,
        inner_step: float = 0.002,
        outer_step: float = 0.05,
        sigma: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.evaluator, self.num_pairs = evaluator, num_pairs
        self.inner_step, self.outer_step, self.sigma = inner_step, outer_step, sigma
        self.rng = np.random.default_rng(seed)

    def adapt(self, centers: Weights, tasks: list[Task]) -> tuple[Weights, Weights]:
        """Do one step of an evolution strategy for every row of `centers` (C, D) in its own task.

        Returns:
            The adapted weights (C, D), and the mean return around each center (C,).
        """
        directions = self.rng.normal(size=(len(centers), self.num_pairs, centers.shape[1]))
        members = centers[:, None] + self.sigma * np.concatenate([directions, -directions], axis=1)
        returns = self._evaluate(members, tasks)
        gains = returns[:, : self.num_pairs] - returns[:, self.num_pairs :]
        gradients = np.einsum("ck,ckd->cd", gains, directions) / (2 * self.num_pairs * self.sigma)
        return centers + self.inner_step * gradients, returns.mean(1)

    def worth(self, centers: Weights, tasks: list[Task]) -> Weights:
        """Return the mean return (C,) of every row of `centers`, over as many episodes as adaptation takes."""
        return self._evaluate(np.repeat(centers[:, None], 2 * self.num_pairs, axis=1), tasks).mean(1)

    def step(self, weights: Weights, tasks: list[Task]) -> tuple[Weights, float, float]:
        """Do one meta-update of `weights` (D,), with one pair of perturbations for each task.

        Returns:
            The new weights, and the mean return of the perturbed weights before and after adaptation.
        """
        directions = self.rng.normal(size=(len(tasks), len(weights)))
        centers = weights + self.sigma * np.concatenate([directions, -directions])
        adapted, before = self.adapt(centers, [*tasks, *tasks])
        after = self.worth(adapted, [*tasks, *tasks])
        gains = after[: len(tasks)] - after[len(tasks) :]
        # In units of the returns' deviation, so that one step size fits most families.
        gradient = gains @ directions / (len(tasks) * (gains.std() + 1e-8))
        return weights + self.outer_step * gradient, float(before.mean()), float(after.mean())

    def _evaluate(self, members: Weights, tasks: list[Task]) -> Weights:
        """Return the returns (C, P) of members (C, P, D), those of a row in its task."""
        flat_tasks = [task for task in tasks for _ in range(members.shape[1])]
        returns = self.evaluator.evaluate(members.reshape(-1, members.shape[2]), flat_tasks)
        return returns.reshape(members.shape[:2])


def main(arguments: list[str] | None = None) -> None:
    """Meta-train, and print the returns of every iteration, and those on new tasks before and after all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="2DNavigation-v0", help="id of a family (default: 2DNavigation-v0)")
    parser.add_argument("--hidden-sizes", type=int, nargs="*", default=[], help="units (default: a linear policy)")
    parser.add_argument("--iterations", type=int, default=100, help="meta-updates (default: 100)")
    parser.add_argument("--tasks", type=int, default=20, help="in each (default: 20)")
    parser.add_argument("--pairs", type=int, default=10, help="of perturbations per adaptation (default: 10)")
    parser.add_argument("--inner-step", type=float, default=0.002, help="of adaptation (default: 0.002)")
    parser.add_argument("--outer-step", type=float, default=0.05, help="of the meta-update (default: 0.05)")
    parser.add_argument("--sigma", type=float, default=0.1, help="of perturbations (default: 0.1)")
    parser.add_argument("--horizon", type=int, help="steps of an episode (default: the family's)")
    parser.add_argument("--num-workers", type=int, help="child processes (default: the cores)")
    options = parser.parse_args(arguments)

    env = gymnasium.make(options.env)
    policy = get_policy_for_env(env, options.hidden_sizes, "tanh", init_std=0.01)
    env.close()
    with PopulationEvaluator(options.env, policy, options.num_workers, max_episode_steps=options.horizon) as evaluator:
        learner = ESMAML(evaluator, options.pairs, options.inner_step, options.outer_step, options.sigma)
        weights = start = evaluator.policy_weights()
        for iteration in range(options.iterations):
            weights, before, after = learner.step(weights, evaluator.sample_tasks(options.tasks))
            print(f"iteration {iteration:3}: return {before:8.2f} before and {after:8.2f} after adaptation")
        # Both on the same new tasks.
        tasks = evaluator.sample_tasks(options.tasks) * 2
        adapted, _ = learner.adapt(np.repeat([start, weights], options.tasks, axis=0), tasks)
        returns = learner.worth(adapted, tasks).reshape(2, options.tasks).mean(1)
        evaluator.set_policy_weights(weights)
    print(f"{options.env}, new tasks: return {returns[0]:.2f} untrained and {returns[1]:.2f} trained, after adaptation")


if __name__ == "__main__":
    main()
