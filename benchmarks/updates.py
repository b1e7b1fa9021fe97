"""The cost of every algorithm's meta-update, relative to that of MAML-TRPO.

    python -m benchmarks.updates --json updates.json --chart updates.svg
    python -m benchmarks.updates --device cuda --json cuda.json

Each has its own config of HalfCheetahDir, but 40 tasks x 20 episodes x 100 steps. Its episodes are sampled once; one
turn is one update, always from the same parameters and the same state of the optimizer. With `--device` it is instead
one update of every learner on that device, by the configs in `benchmarks.device_updates`.
"""

import argparse
import copy
import time

from benchmarks import device_updates
from benchmarks.learning.plan import ALGORITHMS, HALFCHEETAH_DIR, TRPO, Method
from benchmarks.measuring import Measurements, Participant, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from maml_rl.experiment.build import make_experiment

SECONDS = "Seconds of one meta-update"
RATIOS = "Times the update of MAML-TRPO"
# MAML-TRPO with the curvature from a quarter of the episodes.
QUARTER_CURVATURE = Method("quarter-curvature", changes={"algorithm-settings": {"curvature-fraction": 0.25}})
# MAML-TRPO with half the usual iterations of conjugate gradients, and with both.
FIVE_ITERATIONS = Method("five-iterations", changes={"algorithm-settings": {"cg-iters": 5}})
FIVE_OF_A_QUARTER = Method(
    "five-iterations-of-a-quarter", changes={"algorithm-settings": {"cg-iters": 5, "curvature-fraction": 0.25}}
)
METHODS = (
    TRPO,
    QUARTER_CURVATURE,
    FIVE_ITERATIONS,
    FIVE_OF_A_QUARTER,
    *(Method(name, name) for name in ALGORITHMS),
)
# The sizes are those of `benchmarks.scaling`.
WHOLE = {"meta-batch-size": 40, "fast-batch-size": 20, "max-episode-steps": 100}
SMALL = {"meta-batch-size": 2, "fast-batch-size": 2, "max-episode-steps": 4}


class Update:
    """The update of one algorithm, on episodes that are sampled once.

    Args:
        method: the algorithm.
        options: of the command.
    """

    def __init__(self, method: Method, options: argparse.Namespace) -> None:
        config = method.config(HALFCHEETAH_DIR, options.seed).override(SMALL if options.quick else WHOLE)
        experiment = make_experiment(config)
        self._name, self._learner = method.name, experiment.metalearner
        self._initial = copy.deepcopy(self._learner.policy.state_dict()), copy.deepcopy(self._learner.state_dict())
        with experiment.make_sampler(num_workers=options.num_workers) as sampler:
            self._batch = self._learner.collect(sampler, sampler.sample_tasks(config.meta_batch_size))

    def turn(self) -> Measurements:
        """Return the seconds of the update."""
        policy, kept = copy.deepcopy(self._initial)
        self._learner.policy.load_state_dict(policy)
        self._learner.load_state_dict(kept)
        started = time.perf_counter()
        self._learner.update(self._batch)
        return {self._name: time.perf_counter() - started}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    if options.device is not None:
        names = [name for name in device_updates.LEARNERS if name.split("/")[0] in (*options.only, "maml")]
        device_updates.run(options.device, options.json, names, options.repeats, options.seed, small=options.quick)
        return
    check_packages(options)
    report = Report("updates", machine(), chosen(options))
    wanted = [method for method in METHODS if method is TRPO or method.name in options.only]
    participants = [Participant(method.name, Update(method, options).turn) for method in wanted]
    rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    for method in wanted:
        note = _note(method, options)
        report.add(SECONDS, Row(method.name, rows[method.name], "s", note))
        if method is not TRPO:
            share = ratios(rows[method.name], rows[TRPO.name])
            report.add(RATIOS, Row(f"{method.name} / {TRPO.name}", share, "ratio", note))
    finish(report, options)


def _note(method: Method, options: argparse.Namespace) -> str:
    settings = method.config(HALFCHEETAH_DIR, options.seed).algorithm_settings
    words = (
        ("num-updates", "{} steps of Adam"),
        ("cg-iters", "{} iterations of conjugate gradients"),
        ("curvature-fraction", "curvature from {} of the episodes"),
    )
    return ", ".join(text.format(settings[setting]) for setting, text in words if setting in settings)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    further = (name.split("/")[0] for name in device_updates.LEARNERS)
    names = list(dict.fromkeys([*(method.name for method in METHODS[1:]), *further]))
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="beside MAML-TRPO")
    parser.add_argument("--num-workers", type=int, help="worker processes that sample the episodes")
    parser.add_argument("--device", help="measure every learner on this device alone, such as cuda or cpu")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup, options.num_workers = 1, 0, 0
    return options


if __name__ == "__main__":
    main()
