"""The command line of test.py: arguments in, one function called."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from maml_rl.cli.console import (
    Parser,
    add_placement,
    count_or_file,
    ending_in_order,
    file_path,
    not_negative,
    placement,
    positive,
    run_command,
)
from maml_rl.cli.run_options import (
    add_common,
    add_config,
    chosen_config,
    is_run,
    overridden,
    path_or_name,
    refuse_untrusted_code,
    refuse_unused_steps,
    torch_device,
)
from maml_rl.config.catalog import find_run, name_of
from maml_rl.config.config import load_config
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_creatable, check_writable, new_file

if TYPE_CHECKING:
    from maml_rl.experiment.certified import Benchmark

# torch is imported inside the functions: a spawned worker imports this module again, and must stay light.

# Of files that --overwrite replaces: nothing else is lost by a mistaken name.
_ENDINGS = {"--output": ".npz", "--save-tasks": ".json"}


def run_test(arguments: Sequence[str] | None = None, prog: str = "test.py") -> int:
    """Run test.py, or the command that `prog` names, and return its exit code."""
    parser = Parser(prog=prog, description="Adapt a trained policy to tasks it never saw, and measure its returns.")
    add_config(parser, "the folder of a run, its config.json, zoo:NAME, or a config by file or name")
    parser.add_argument(
        "--checkpoint",
        "--policy",
        type=path_or_name,
        default="last",
        help="of the run: 'last' (the default), 'best', a number of iterations, or 'initial' (at random); a folder; or "
        "zoo:NAME",
    )
    parser.add_argument(
        "--output",
        type=file_path,
        help="the .npz file to write (default: evaluation.npz in the run, with a new number)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    parser.add_argument(
        "--tasks", type=count_or_file, metavar="COUNT|FILE", help="how many tasks, or those in a file (default: 40)"
    )
    parser.add_argument(
        "--benchmark", metavar="NAME", help="measure by the rules and on the tasks that `maml-rl benchmarks` lists"
    )
    parser.add_argument(
        "--training-tasks",
        action="store_true",
        help="draw new training tasks instead of test tasks; the results go to training-tasks.npz in the run",
    )
    parser.add_argument(
        "--save-tasks", type=file_path, metavar="FILE", help="write the tasks that are drawn to this file"
    )
    parser.add_argument("--num-batches", type=positive, help="batches of tasks (default: 1, or all of a file)")
    parser.add_argument("--meta-batch-size", type=positive, default=40, help="tasks in each (default: 40)")
    parser.add_argument(
        "--repetitions",
        type=positive,
        help="adaptations to each task, for the intervals on fixed tasks (default: 1; 3 with --tasks)",
    )
    parser.add_argument("--num-steps", type=not_negative, help="gradient steps (default: the config's)")
    parser.add_argument("--fast-lr", help="step size (default: the config's)")
    parser.add_argument("--fast-batch-size", help="episodes for each task and step (default: the config's)")
    parser.add_argument(
        "--halve-step-size",
        choices=["never", "once", "always"],
        help="halve it after the first step (once) or after every step (always; default: the config's)",
    )
    parser.add_argument("--seed", help="seed of tasks and episodes (default: the config's)")
    add_placement(parser)
    add_common(parser)
    return run_command(parser, arguments, _test)


def _test(options: argparse.Namespace) -> None:
    if options.checkpoint.startswith("zoo:"):
        policy = find_run(options.checkpoint)
        if options.name is None and options.config is None:
            options.name = options.checkpoint
        options.checkpoint = str(next((policy / "checkpoints").iterdir()))
    config_path = chosen_config(options, of_run=True)
    if config_path is None:
        raise ConfigError("which policy? give a run: its folder, or --config with its config.json")
    is_named = options.output is not None
    _check_outputs(options, config_path)
    if options.tasks is not None and options.num_batches:
        raise ConfigError("--tasks says how many tasks there are, so it contradicts --num-batches; give one")
    file = options.tasks if isinstance(options.tasks, Path) else None
    for name in ("save_tasks", "training_tasks"):
        if file is not None and getattr(options, name):
            raise ConfigError(f"--tasks {file} names the tasks, so it contradicts --{name.replace('_', '-')}; give one")
    names = ("seed", "fast_lr", "fast_batch_size", "halve_step_size")
    config = overridden(load_config(config_path), {name: getattr(options, name) for name in names})
    config = config.override(placement(options))
    rules = _benchmark(options)
    config = refuse_untrusted_code(config, options)
    num_steps = config.test_steps if options.num_steps is None else options.num_steps
    device = torch_device(options)

    from maml_rl.cli.progress import StepProgress
    from maml_rl.experiment.build import make_experiment
    from maml_rl.experiment.certified import nearest
    from maml_rl.experiment.evaluate import evaluate
    from maml_rl.results.evaluation import NORMALIZED, REPETITIONS, interval_cautions, intervals_cover
    from maml_rl.results.identity import identity_now
    from maml_rl.runs.run_folder import load_system
    from maml_rl.task_distributions.task_files import save_tasks

    experiment = make_experiment(config, device, num_workers=None)
    by_trials = experiment.metalearner.whole_trials
    refuse_unused_steps(options.num_steps, experiment)
    if rules is not None:
        rules.check(experiment, num_steps)
    meta_updates = 0
    if options.checkpoint != "initial":
        _check_has_policy(config_path, options.checkpoint)
        meta_updates = experiment.restore(options.checkpoint, config_path.parent)
    of_run = options.checkpoint in ("initial", "last", "latest", "best") or options.checkpoint.isdecimal()
    whose = identity_now(experiment.config, load_system(config_path.parent)) if is_run(config_path) and of_run else ""
    # A restored experiment has the tasks that it was trained on.
    tasks = None if file is None else experiment.load_tasks(file)
    if rules is not None:
        tasks = rules.tasks_for(experiment)
    split: Literal["training", "test"] = "training" if options.training_tasks else "test"
    chosen = experiment.fixed_tasks(split) if tasks is None else tasks
    for name in ("num_batches", "tasks"):
        if tasks is None and chosen is not None and getattr(options, name):
            raise ConfigError(
                f"the run has {len(chosen)} such tasks, and all of them are used; leave out "
                f"--{name.replace('_', '-')} {getattr(options, name)} (--meta-batch-size is how many at once)"
            )
    wanted = options.tasks if isinstance(options.tasks, int) else (options.num_batches or 1) * options.meta_batch_size
    num_batches = -(-(wanted if chosen is None else len(chosen)) // options.meta_batch_size)
    done = count(1)
    repetitions = options.repetitions or (1 if tasks is None else REPETITIONS)
    if rules is not None:
        repetitions = rules.repetitions
    with ending_in_order(), _reserved_output(options, number=not is_named) as output, StepProgress("batch") as progress:
        evaluation = evaluate(
            experiment,
            wanted if tasks is None else tasks,
            meta_batch_size=options.meta_batch_size,
            num_steps=num_steps,
            split=split,
            repetitions=repetitions,
            on_batch=lambda _: progress("evaluating", next(done), num_batches * repetitions),
        )
        evaluation = replace(evaluation, checkpoint=meta_updates, identity=whose)
        evaluation.save(output)
        if options.save_tasks is not None:
            save_tasks(options.save_tasks, config.env_name, evaluation.tasks)
    trained = experiment.fixed_tasks("training")
    if rules is not None and trained:
        print(f"the nearest of the {len(trained)} training tasks is {nearest(rules.tasks(), trained):.3g} away")
    if rules is not None:
        kind = f"tasks of {rules.name}"
    elif options.training_tasks:
        kind = "new tasks as in training" if chosen is None else "training tasks"
    else:
        kind = "new tasks" if chosen is None else "test tasks" if tasks is None else f"tasks of {file}"
    stepwise = bool(num_steps) and experiment.metalearner.takes_steps
    number = f"{config.fast_batch_size} episode{'s' * (config.fast_batch_size > 1)} of each"
    columns = experiment.metalearner.columns
    place = "" if not stepwise else " before each step" if columns == "step" else f" in each {columns}"
    episodes = f"a trial of {number}" if by_trials else number + place
    if repetitions > 1:
        episodes += f", {repetitions} times"
    print(f"{config.env_name}: {len(evaluation.tasks)} {kind}, {episodes}")
    print(evaluation.table())
    for name, part in evaluation.parts().items():
        print(f"{part.env_name}: {len(part.tasks)} of these tasks" if name != NORMALIZED else f"{part.env_name}:")
        print(part.table())
    notes = [
        intervals_cover([evaluation]),
        "; ".join(interval_cautions([evaluation])),
        f"saved with the tasks in {output}",
    ]
    for note in filter(None, notes):
        print(f"{note[0].upper()}{note[1:]}.")


def _benchmark(options: argparse.Namespace) -> "Benchmark | None":
    """Return the benchmark that --benchmark names; refuse options that the benchmark decides."""
    if options.benchmark is None:
        return None
    for name in ("tasks", "training_tasks", "save_tasks", "num_batches", "repetitions"):
        if getattr(options, name):
            raise ConfigError(f"--benchmark decides on tasks and repetitions; leave out --{name.replace('_', '-')}")
    from maml_rl.experiment.certified import find_benchmark

    return find_benchmark(options.benchmark)


def _check_outputs(options: argparse.Namespace, config_path: Path) -> None:
    """Before any work, refuse output files that cannot or must not be written; choose names for those not given."""
    named = {"--output": options.output, "--save-tasks": options.save_tasks}
    if options.output is None:
        # Reports take evaluation.npz of a run for its tests.
        file = "training-tasks.npz" if options.training_tasks else "evaluation.npz"
        named_after = Path("runs") / f"{name_of(config_path)}.npz"
        options.output = config_path.parent / file if is_run(config_path) else named_after
        check_creatable(options.output.parent, "--output")
    used = {"--config": config_path, "--tasks": options.tasks if isinstance(options.tasks, Path) else None}
    for option, path in named.items():
        if path is None:
            continue
        check_writable(path, option)
        for other, file in {**used, **named}.items():
            if other != option and file is not None and os.path.realpath(file) == os.path.realpath(path):
                raise ConfigError(f"{option} and {other} name the same file, {path}; choose another {option}")
        if path.exists() and not options.overwrite:
            raise _exists(path, option)
        ending = _ENDINGS[option]
        if path.exists() and path.stat().st_size and path.suffix != ending:
            raise ConfigError(
                f"{path} exists and does not end with {ending}, so --overwrite does not replace it; choose another "
                f"{option}"
            )


def _check_has_policy(config_path: Path, choice: str) -> None:
    """Refuse a config without a run: there is no trained policy beside it."""
    if not (choice in ("last", "latest", "best") or choice.isdecimal()) or config_path.name == "config.json":
        return
    if not (config_path.parent / "checkpoints").is_dir():
        raise ConfigError(
            f"{config_path} is a config and not a run folder, so there is no trained policy beside it; give the folder "
            "of a run, or a checkpoint by --checkpoint, or --checkpoint initial for one at random"
        )


@contextmanager
def _reserved_output(options: argparse.Namespace, *, number: bool) -> Iterator[Path]:
    """Reserve the name of the results, so that two tests at once never replace each other's results."""
    if options.overwrite:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        yield options.output
        return
    with ExitStack() as stack:
        try:
            output = stack.enter_context(new_file(options.output, number=number))
        except FileExistsError:
            # Another process was faster.
            raise _exists(options.output, "--output") from None
        yield output


def _exists(path: Path, option: str) -> ConfigError:
    return ConfigError(f"{path} exists; replace it with --overwrite, or choose another {option}")
