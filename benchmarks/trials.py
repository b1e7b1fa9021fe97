"""The cost of a memory: trials of a recurrent policy against a memoryless one, and against its plain cell.

    python -m benchmarks.trials --json trials.json

On HalfCheetahDir a GRU and a perceptron of as many units act in the same slots, one for each task, with the physics in
between. On bandits nearly all the time is spent in the policy: the pulls of whole trials are compared with as many
steps of torch's own `GRUCell` in a tight loop on one thread, which samples no action and records nothing; and a
transformer of the same width, which attends to the last `--context` pulls, is compared with the GRU.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.measuring import Participant, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.policies import GRUPolicy, Policy, TransformerPolicy
from maml_rl.policies.transformer import Attention

RATES, PULLS = "Environment steps per second in trials", "Pulls per second in trials"
SHARES = "Shares"
CHEETAH, BANDIT = "HalfCheetahDir-v5", "Bandit-K5-v0"


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    report = Report("trials", machine(), chosen(options))
    settings = {"repeats": options.repeats, "warmup": options.warmup, "report": progress(options)}
    with ExitStack() as stack:

        def trials(env: str, policy: Policy, tasks: int, episodes: int, **sampling: Any) -> Callable[[], float]:
            sampler = MultiTaskSampler(env, batch_size=episodes, policy=policy, slots_per_task=1, seed=0, **sampling)
            stack.callback(sampler.close)
            chosen_tasks = sampler.sample_tasks(tasks)

            def sample() -> float:
                started = time.perf_counter()
                return sampler.rollout_trials(chosen_tasks).num_steps / (time.perf_counter() - started)

            return sample

        units, size = options.units, (options.tasks, options.episodes)
        cheetah = {"max_episode_steps": options.horizon, "num_workers": options.num_workers}
        with_memory = trials(CHEETAH, _recurrent(CHEETAH, {}, units), *size, **cheetah, observe_last=True)
        without = trials(CHEETAH, get_policy_for_env(make_vector_env(CHEETAH), (units, units)), *size, **cheetah)
        pulling: dict[str, Any] = {"env_kwargs": {"pulls": options.pulls}, "observe_last": True}
        bandit = _recurrent(BANDIT, pulling["env_kwargs"], units)
        pulls = trials(BANDIT, bandit, options.trials, 1, num_workers=options.num_workers, **pulling)
        attending = TransformerPolicy(
            bandit.observation_space, bandit.action_space, units, Attention(options.context, options.layers)
        )
        attention = trials(BANDIT, attending, options.trials, 1, num_workers=options.num_workers, **pulling)
        bare = _bare_cell(bandit, options.trials, options.pulls)
        names = (
            f"GRU of {units}",
            f"MLP of {units}, {units}",
            f"GRU of {units}, in trials",
            f"GRUCell of {units}, bare",
            f"transformer of {units}, context {options.context}, in trials",
        )
        rows = take_turns(
            [
                Participant(name, lambda name=name, turn=turn: {name: turn()})  # type: ignore[misc]
                for name, turn in zip(names, (with_memory, without, pulls, bare, attention), strict=True)
            ],
            **settings,
        )
    cheetah_note = f"{CHEETAH}, {options.tasks} x {options.episodes} x {options.horizon}"
    bandit_note = f"{BANDIT}, {options.trials} x {options.pulls}"
    for index, name in enumerate(names):
        title, note = (RATES, cheetah_note) if index < 2 else (PULLS, bandit_note)
        report.add(title, Row(name, rows[name], "steps/s" if index < 2 else "pulls/s", note))
    pairs = (0, 1, cheetah_note), (2, 3, bandit_note), (4, 2, bandit_note)
    for first, second, note in ((names[first], names[second], note) for first, second, note in pairs):
        report.add(SHARES, Row(f"{first} / {second}", ratios(rows[first], rows[second]), "ratio", note))
    finish(report, options)


def _recurrent(env: str, env_kwargs: dict[str, Any], units: int) -> GRUPolicy:
    slots = make_vector_env(ObservedLastStep(env), env_kwargs)
    return GRUPolicy(slots.single_observation_space, slots.single_action_space, units)


def _bare_cell(policy: GRUPolicy, num_trials: int, num_steps: int) -> Callable[[], float]:
    with torch.random.fork_rng(devices=[]):
        cell = torch.nn.GRUCell(policy.input_size, policy.hidden_size)
    inputs = torch.rand(num_trials, policy.input_size, generator=torch.Generator().manual_seed(0))

    def run() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.inference_mode():
            memory = torch.zeros(num_trials, policy.hidden_size)
            started = time.perf_counter()
            for _ in range(num_steps):
                memory = cell(inputs, memory)
            seconds = time.perf_counter() - started
        torch.set_num_threads(threads)
        return num_trials * num_steps / seconds

    return run


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--units", type=int, default=64, help="of the recurrent layer, and of each layer of the MLP")
    parser.add_argument("--tasks", type=int, default=40, help=f"of {CHEETAH}")
    parser.add_argument("--episodes", type=int, default=20, help="of a trial")
    parser.add_argument("--horizon", type=int, default=100, help="steps of an episode")
    parser.add_argument("--trials", type=int, default=100, help="of bandits at a time")
    parser.add_argument("--pulls", type=int, default=1000, help="of a trial")
    parser.add_argument("--context", type=int, default=500, help="pulls that the transformer attends to")
    parser.add_argument("--layers", type=int, default=2, help="of the transformer")
    parser.add_argument("--num-workers", type=int, help="children; the default placement if not given")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tasks, options.episodes, options.horizon, options.trials, options.pulls = 2, 2, 3, 3, 4
        options.repeats, options.warmup = 1, 0
    return options


if __name__ == "__main__":
    main()
