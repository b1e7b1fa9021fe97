"""Sampling speed on Meta-World: ours against as many plain processes, which step the same episodes in a loop.

    python -m benchmarks.metaworld --json metaworld.json

It needs the extra metaworld, in an environment of its own. The plain processes hold one environment for each task; only
our side also runs the policy, shares actions and assembles episodes.
"""

import argparse
from contextlib import ExitStack

from benchmarks.hosting import Host
from benchmarks.measuring import machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from benchmarks.systems.layouts import Workload

RATES = "Environment steps per second"
SHARES = "Share of plain Meta-World's speed"
OURS, BARE, IN_CPU_TIME = "maml_rl", "plain Meta-World", ", per second of CPU time"


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options, metaworld="this benchmark", psutil="the CPU time")
    report = Report("metaworld", machine(("gymnasium", "metaworld", "mujoco", "numpy", "torch")), chosen(options))
    workload = Workload(
        options.env,
        options.tasks,
        options.episodes,
        options.horizon,
        seed=options.seed,
        num_workers=options.num_workers,
        adapted=False,
    )
    with ExitStack() as stack:
        host = Host(
            OURS, "benchmarks.systems.bare_metaworld:SamplerAndBareMetaWorld", workload, OURS, BARE, IN_CPU_TIME
        )
        stack.callback(host.close)
        rows = take_turns(
            [host.participant()], repeats=options.repeats, warmup=options.warmup, report=progress(options)
        )
    for name, samples in rows.items():
        report.add(RATES, Row(name, samples, "steps/s", f"{workload}, {options.num_workers} processes"))
    for kind in ("", IN_CPU_TIME):
        share = ratios(rows[OURS + kind], rows[BARE + kind])
        report.add(SHARES, Row(f"{OURS} / {BARE}{kind}", share, "ratio", str(workload)))
    finish(report, options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", default="MetaWorld/ML10-v3", help="id of a benchmark with several environments")
    parser.add_argument("--tasks", type=int, default=10, help="of a batch")
    parser.add_argument("--episodes", type=int, default=2, help="of each task")
    parser.add_argument("--horizon", type=int, default=500, help="steps of an episode")
    parser.add_argument("--num-workers", type=int, default=2, help="processes on both sides")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tasks, options.episodes, options.horizon, options.repeats, options.warmup = 2, 2, 5, 1, 0
    if options.num_workers < 1:
        parser.error(f"--num-workers must be at least 1, got {options.num_workers}")
    return options


if __name__ == "__main__":
    main()
