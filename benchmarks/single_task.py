"""Learners of single tasks in parallel, against one PPO of Stable-Baselines3 after another: steps per second.

    python -m benchmarks.single_task --tasks 500

Both learn dark rooms with the same networks, batches, epochs and step size, updates included, on one core. Processor
time is measured, so other work on the machine does not matter. The learners of Stable-Baselines3 run one after another,
so the speed of one is that of all. Its values come from a second network, ours from a linear baseline.
"""

import time

import gymnasium

from benchmarks.measuring import Measurements, Participant, machine, of_cpu_time, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from maml_rl import MultiTaskSampler
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.machine import intra_op_threads
from maml_rl.metalearners.single_task import SingleTaskPPO, SingleTaskPPOSettings

STEPS, RATIOS = "Steps per second of processor time, updates included", "Ratios, round by round"
ENV, HORIZON, EPISODES = "DarkRoom-v0", 20, 5


def side_by_side(num_tasks: int, num_iterations: int) -> Participant:
    """Return the function that trains learners of `num_tasks` tasks in parallel."""
    env = gymnasium.make(ENV)
    learner = SingleTaskPPO(
        env,
        range(num_tasks),
        SingleTaskPPOSettings(),
        baseline=LinearFeatureBaseline.for_space(env.observation_space),
    )
    sampler = MultiTaskSampler(ENV, {}, EPISODES, learner.policy, num_workers=0, seed=0)
    tasks = sampler.sample_tasks(num_tasks)

    def turn() -> Measurements:
        start = time.process_time()
        for _ in range(num_iterations):
            learner.update(sampler.rollout(tasks, learner.params))
        return {
            of_cpu_time("side by side"): num_tasks * num_iterations * EPISODES * HORIZON / (time.process_time() - start)
        }

    return Participant("maml_rl", turn, sampler.close)


def one_after_another(num_steps: int) -> Participant:
    """Return the function that trains one PPO for `num_steps` steps, on a different task each time."""
    from stable_baselines3 import PPO

    settings = SingleTaskPPOSettings()
    # Each learner first imports and builds networks, which is not counted.
    env = gymnasium.make(ENV, disable_env_checker=True)
    learner = PPO(
        "MlpPolicy",
        env,
        n_steps=EPISODES * HORIZON,
        batch_size=EPISODES * HORIZON,
        n_epochs=settings.num_epochs,
        learning_rate=settings.learning_rate,
        clip_range=settings.clip,
        ent_coef=settings.entropy_coefficient,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
        seed=0,
    )
    learner.learn(EPISODES * HORIZON)

    def turn() -> Measurements:
        env.unwrapped.reset_task(env.unwrapped.sample_tasks(1)[0])  # type: ignore[attr-defined]
        start = time.process_time()
        learner.learn(num_steps)
        return {of_cpu_time("one after another"): num_steps / (time.process_time() - start)}

    return Participant("Stable-Baselines3", turn)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=500, help="learners side by side")
    parser.add_argument("--iterations", type=int, default=3, help="updates of each in a round")
    parser.add_argument("--steps", type=int, default=3000, help="of Stable-Baselines3 in a round")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup, options.tasks, options.iterations, options.steps = 1, 0, 20, 1, 100
    check_packages(options)
    report = Report("single_task", machine(), chosen(options))
    with intra_op_threads(1):
        participants = [side_by_side(options.tasks, options.iterations), one_after_another(options.steps)]
        rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    together, alone = (rows[of_cpu_time(name)] for name in ("side by side", "one after another"))
    report.add(STEPS, Row(f"{options.tasks} learners side by side", together, "steps/s"))
    report.add(STEPS, Row("Stable-Baselines3, one after another", alone, "steps/s"))
    report.add(RATIOS, Row("side by side / one after another", ratios(together, alone), "ratio"))
    finish(report, options)


if __name__ == "__main__":
    main()
