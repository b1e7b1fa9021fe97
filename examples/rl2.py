"""RL2: a recurrent policy that adapts only by its memory, trained by PPO through whole trials.

A trial is all episodes of a task, one after the other in one slot; the sampler carries the memory through it, and shows
the policy its last action and reward. `train.py --config configs/rl2/bandit-k5-n10.yaml` is the same with checkpoints,
metrics and an evaluation.

    python examples/rl2.py

On the bandit with five arms, after 40 iterations of 100 trials, the mean reward of a pull grows within a trial from
0.55 (first four of 20 pulls) to 0.69 (last four); it is 0.5 without learning.

Source: Duan et al. 2016, https://arxiv.org/abs/1611.02779
"""

import argparse

from maml_rl import MultiTaskSampler
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.episode import Steps
from maml_rl.metalearners import Plan
from maml_rl.metalearners.rl2 import RL2
from maml_rl.policies import GRUPolicy


def main(arguments: list[str] | None = None) -> None:
    """Train on a family, and print how the reward grows within a trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Bandit-K5-v0", help="id of a family (default: Bandit-K5-v0)")
    parser.add_argument("--episodes", type=int, default=20, help="in a trial (default: 20)")
    parser.add_argument("--tasks", type=int, default=100, help="in each iteration (default: 100)")
    parser.add_argument("--iterations", type=int, default=40, help="meta-updates (default: 40)")
    parser.add_argument("--hidden-size", type=int, default=48, help="units of the memory (default: 48)")
    parser.add_argument("--num-workers", type=int, default=0, help="child processes (default: 0)")
    options = parser.parse_args(arguments)

    env = make_vector_env(ObservedLastStep(options.env))
    policy = GRUPolicy(env.single_observation_space, env.single_action_space, options.hidden_size)
    learner = RL2(
        policy,
        None,
        settings=RL2.Settings.model_validate({"learning-rate": 1e-2, "clip": 0.2, "num-epochs": 6}),
        plan=Plan(gamma=0.9, gae_lambda=0.3),
    )
    with MultiTaskSampler(
        options.env,
        batch_size=options.episodes,
        policy=policy,
        slots_per_task=1,
        observe_last=True,
        seed=0,
        num_workers=options.num_workers,
    ) as sampler:
        for iteration in range(options.iterations):
            batch = learner.collect(sampler, sampler.sample_tasks(options.tasks))
            learner.update(batch)
            rewards = Steps.of_trials(batch.phases[0]).rewards
            fifth = -(-len(rewards) // 5)
            early, late = rewards[:fifth].mean(), rewards[-fifth:].mean()
            print(f"iteration {iteration:3}: mean reward {early:5.2f} early and {late:5.2f} late in a trial")


if __name__ == "__main__":
    main()
