"""The command `maml-rl`: training, testing, reports, lists of families and configs, benchmarks, checks."""

import sys
from argparse import SUPPRESS, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from maml_rl import __version__
from maml_rl.arguments import suggest
from maml_rl.cli.check_env import run_check_env
from maml_rl.cli.compare import run_compare
from maml_rl.cli.console import (
    Parser,
    add_num_workers,
    add_placement,
    add_trust,
    count_or_file,
    ending_in_order,
    file_path,
    not_negative,
    placement,
    positive,
    positive_number,
    run_command,
    utf8,
    words_to_complete,
)
from maml_rl.cli.evaluate import run_test
from maml_rl.cli.listing import list_benchmarks, list_configs, list_envs, list_zoo
from maml_rl.cli.record import run_record
from maml_rl.cli.run_options import key_values, path_or_name, refuse_untrusted_code, refuse_unused_steps, run_path
from maml_rl.cli.train import run_train
from maml_rl.config.catalog import find_config, find_run
from maml_rl.config.config import load_config
from maml_rl.config.placement import ELSEWHERE
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_output, replace_file

# Causes of a flat curve that are shown.
_MOST_CAUSES = 3
# Endings of videos.
_VIDEOS = (".mp4", ".gif", ".webp")
# Of all trials of a search and of the search itself: not that of a run that is reported.
_SEED_OF_SEARCHES = 7000
_RUNS = "folder of a run, or of several runs; `last`: the most recently written run below runs/"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `maml-rl`, and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    lines = "\n".join(f"  {name:<10} {purpose}" for name, (purpose, _) in COMMANDS.items())
    parser = Parser(
        prog="maml-rl",
        usage="maml-rl [--version] COMMAND ...",
        description=f"Meta-reinforcement learning. Commands:\n\n{lines}\n\nmaml-rl COMMAND --help shows more.",
    )
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"maml-rl {__version__}")
    parser.add_argument("command", help=SUPPRESS).completer = lambda **_: [*COMMANDS]  # type: ignore[attr-defined]
    to_complete = words_to_complete(COMMANDS)
    if to_complete is not None:
        arguments = to_complete
    elif not arguments:
        parser.print_help()
        return 0
    # The command parses the arguments after its name.
    name = parser.parse_args(arguments[:1]).command
    if name not in COMMANDS:
        hint = suggest(name, list(COMMANDS))
        # It lists all of them where none is like this one.
        hint += f" The commands are {', '.join(COMMANDS)}" * hint.endswith("?")
        parser.error(f"there is no command {name!r}{hint}")
    _, run = COMMANDS[name]
    return run(arguments[1:], f"maml-rl {name}")


def run_report(arguments: Sequence[str] | None = None, prog: str = "maml-rl report") -> int:
    """Write a report, and return the exit code."""
    parser = Parser(prog=prog, description="Write a self-contained HTML page about one or several training runs.")
    parser.add_argument("runs", nargs="+", type=run_path, metavar="RUN", help=_RUNS)
    parser.add_argument(
        "--output", type=file_path, help="the file (default: report.html in the folder that holds the runs)"
    )
    parser.add_argument("--title", type=utf8, help="title of the page (default: the names of the runs)")
    parser.add_argument(
        "--tasks",
        type=count_or_file,
        default=40,
        metavar="COUNT|FILE",
        help="new tasks to try, 0 for none, or those in a file (default: 40)",
    )
    parser.add_argument(
        "--videos", type=not_negative, default=2, help="tasks to make videos of; 0 for none (default: 2)"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="also compare unfinished runs, up to the steps that all runs have"
    )
    add_placement(parser)
    add_trust(parser)
    return run_command(parser, arguments, _report)


def _report(options: Namespace) -> None:
    from maml_rl.cli.progress import StepProgress
    from maml_rl.report import write_report

    with ending_in_order(), StepProgress() as progress:
        path = write_report(
            options.runs,
            options.output,
            title=options.title,
            tasks=options.tasks,
            num_videos=options.videos,
            placement=placement(options),
            trust=options.trust,
            unfinished=options.unfinished,
            on_step=progress,
        )
    print(f"the report is {path}; open it in any browser")


def run_play(arguments: Sequence[str], prog: str) -> int:
    """Write a video, and return the exit code."""
    parser = Parser(prog=prog, description="Show a policy before and after adaptation to a task, side by side.")
    parser.add_argument("policy", type=path_or_name, metavar="POLICY", help="folder of a run, or zoo:NAME")
    parser.add_argument("--task", help="the task, as YAML: '{goal: [0.3, -0.2]}' (default: a new one)")
    parser.add_argument(
        "--output", type=file_path, default=Path("runs/play.mp4"), help=".mp4, .gif or .webp (default: runs/play.mp4)"
    )
    parser.add_argument("--checkpoint", default="last", help="of the run: 'last' (default), 'best', or a number")
    parser.add_argument("--num-steps", type=not_negative, help="gradient steps (default: the config's)")
    parser.add_argument("--seed", type=not_negative, help="of task and episodes (default: the run's)")
    add_trust(parser)
    return run_command(parser, arguments, _play)


def _play(options: Namespace) -> None:
    if options.output.suffix not in _VIDEOS:
        raise ConfigError(f"--output {options.output} must end with {', '.join(_VIDEOS)}")
    check_output(options.output, "--output")
    # Beside this it imports torch, which the other commands do not wait for.
    from maml_rl.runs.run_folder import load_run_config

    folder = find_run(options.policy)
    config = load_run_config(folder)
    config = refuse_untrusted_code(config, options)
    config = config.override(ELSEWHERE | ({} if options.seed is None else {"seed": options.seed}))

    from maml_rl.episode import TaskEpisodes
    from maml_rl.experiment.build import make_experiment
    from maml_rl.experiment.evaluate import evaluate
    from maml_rl.policies import performed
    from maml_rl.report.task_charts import describe
    from maml_rl.report.videos import encode_animation, encode_h264, film
    from maml_rl.results.evaluation import SampledEvaluation
    from maml_rl.task_distributions.task_files import try_tasks

    phases: list[TaskEpisodes] = []
    with ending_in_order():
        experiment = make_experiment(config)
        refuse_unused_steps(options.num_steps, experiment)
        experiment.restore(options.checkpoint, folder)
        # Where test tasks were drawn once and for all, the first of them.
        tasks = (experiment.fixed_tasks("test") or [])[:1] or 1
        if options.task is not None:
            tasks = [parse_value(options.task, "--task")]
            with closing(experiment.make_env()) as env:
                try_tasks(tasks, env, "--task")
        evaluation = evaluate(
            experiment,
            tasks,
            num_steps=options.num_steps,
            num_workers=0,
            on_batch=lambda batch: phases.extend(performed(experiment.policy, phase) for phase in batch.phases),
        )
        frames, fps = film(SampledEvaluation(experiment.config, phases, evaluation))
        kind = options.output.suffix
        data = encode_h264(frames, fps) if kind == ".mp4" else encode_animation(frames, fps, kind[1:].upper())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.output, data)
    print(f"{describe(evaluation.tasks[0])}: wrote {options.output}")


def run_tune(arguments: Sequence[str], prog: str) -> int:
    """Search settings, and return the exit code."""
    parser = Parser(
        prog=prog,
        description="Search settings of a config with Optuna. Trial 0 is the config itself; bad trials end early. The "
        "same command continues the search, and several may run at once.",
    )
    parser.add_argument("config", type=path_or_name, help="a name that `maml-rl configs` lists, or a YAML file")
    parser.add_argument(
        "--search",
        nargs="+",
        required=True,
        metavar="KEY=VALUES",
        help="LOW:HIGH, LOW:HIGH:log, or A|B|C; as algorithm-settings.learning-rate=1e-4:1e-2:log",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all trials")
    parser.add_argument("--trials", type=positive, default=20, help="trials in all (default: 20)")
    parser.add_argument("--env-steps", type=positive_number, required=True, help="environment steps of a whole trial")
    parser.add_argument("--minutes", type=positive_number, default=1e6, help="begin no trial after so many minutes")
    parser.add_argument(
        "--seed",
        type=not_negative,
        default=_SEED_OF_SEARCHES,
        help=f"of all trials and of the search (default: {_SEED_OF_SEARCHES})",
    )
    parser.add_argument(
        "--runs",
        type=file_path,
        default=Path("runs/tune"),
        help="folder of all searches: studies.db has their trials, and each has its runs and trials.csv in a folder "
        "of its own (default: runs/tune)",
    )
    add_num_workers(parser)
    add_trust(parser)

    def tune(options: Namespace) -> None:
        path = Path(options.config)
        # Before some of its arguments are replaced: the others stay as they are in the file.
        config = load_config(path if path.is_file() else find_config(options.config))
        config = refuse_untrusted_code(config, options)
        if find_spec("optuna") is None:
            raise ConfigError("this needs Optuna; run pip install 'maml-rl[search]'")
        from maml_rl.experiment.search import changed, search

        workers = {} if options.num_workers is None else {"num-workers": options.num_workers}
        fixed = {key: parse_value(text, f"--set {key}") for key, text in key_values(options.set, "--set").items()}
        with ending_in_order():
            for sentence in search(
                changed(config, {**fixed, **workers, "seed": options.seed}),
                key_values(options.search, "--search"),
                options.runs,
                num_trials=options.trials,
                env_steps=options.env_steps,
                minutes=options.minutes,
            ):
                print(sentence, flush=True)

    return run_command(parser, arguments, tune, lambda options: "; the same command continues the search")


def run_diagnose(arguments: Sequence[str], prog: str) -> int:
    """Say why the curve of a run is flat, and return the exit code."""
    parser = Parser(prog=prog, description="Say why a curve is flat: likely causes, each with a setting to try.")
    parser.add_argument("runs", nargs="+", type=run_path, metavar="RUN", help=_RUNS)
    parser.add_argument("--all", action="store_true", help="show every cause (default: the first three)")
    return run_command(parser, arguments, _diagnose)


def _diagnose(options: Namespace) -> None:
    from maml_rl.results.comparable import read_runs
    from maml_rl.results.diagnosis import diagnose

    groups, notices = read_runs(options.runs, unfinished=True)
    for notice in notices:
        print(notice)
    for run in (run for group in groups for run in (*group.runs, *group.failed)):
        causes = diagnose(run)
        finished = f"{run.finished:,} iteration{'s' * (run.finished != 1)}"
        print(f"{run.path}: {run.config.algorithm} on {run.config.env_name}, {finished}")
        if not causes:
            print("  nothing stands out in its metrics")
        for place, cause in enumerate(causes if options.all else causes[:_MOST_CAUSES], start=1):
            print(f"  {place}. {cause.name}: {cause.seen}.\n     Try {cause.remedy}.")
    print("docs/flat-curves.md explains each.")


def _run_list(entries: Callable[..., Iterable[str]], description: str, arguments: Sequence[str], prog: str) -> int:
    """Print what `entries` yields, more with --verbose, and return the exit code."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("text", nargs="?", default="", help="list only those with this text in their names")
    parser.add_argument("--verbose", action="store_true", help="list everything")

    def show(options: Namespace) -> None:
        for line in entries(options.text, verbose=options.verbose):
            print(line)

    return run_command(parser, arguments, show)


def run_zoo(arguments: Sequence[str], prog: str) -> int:
    """List the trained policies that come with the package, or add one, and return the exit code."""
    if list(arguments[:1]) != ["add"]:
        purpose = f"List the trained policies that come with the package. {prog} add RUN --name NAME adds one."
        return _run_list(list_zoo, purpose, arguments, prog)
    parser = Parser(prog=f"{prog} add", description="Evaluate the policy of a run on new tasks, and add it to the zoo.")
    parser.add_argument("run", type=file_path, metavar="RUN", help="folder of the run")
    parser.add_argument("--name", type=utf8, required=True, help="name of the policy in the zoo")
    parser.add_argument("--checkpoint", default="last", help="of the run: 'last' (default), 'best', or a number")
    parser.add_argument("--tasks", type=positive, default=40, help="new tasks to evaluate it on (default: 40)")
    parser.add_argument("--overwrite", action="store_true", help="replace the policy of this name")
    add_num_workers(parser)

    def add(options: Namespace) -> None:
        from maml_rl.experiment.zoo import add_to_zoo

        with ending_in_order():
            folder = add_to_zoo(
                options.run,
                options.name,
                options.checkpoint,
                num_tasks=options.tasks,
                overwrite=options.overwrite,
                num_workers=options.num_workers,
            )
        print(f"added {folder}; maml-rl test zoo:{options.name} tests it")

    return run_command(parser, arguments[1:], add)


def run_help(arguments: Sequence[str], prog: str) -> int:
    """Show what the commands are for, or the options of one of them, and return the exit code."""
    return main([*arguments[:1], "--help"])


def run_version(arguments: Sequence[str], prog: str) -> int:
    """Show the versions that a report of a fault needs, and return the exit code."""
    from maml_rl.runs.system import describe_system

    parser = Parser(prog=prog, description="Show the version of the package, of Python and of the libraries.")

    def show(options: Namespace) -> None:
        print(f"maml-rl {__version__}")
        system = describe_system()
        packages = ", ".join(f"{name} {number}" for name, number in system.pop("packages").items())
        for name, value in {**system, "packages": packages}.items():
            print(f"  {name}: {value}")

    return run_command(parser, arguments, show)


# What each is for, and what runs it: with the arguments after its name, and that name in full.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str], str], int]]] = {
    "train": ("meta-train a policy", run_train),
    "test": ("measure how fast a trained policy adapts to new tasks", run_test),
    "report": ("write an HTML page about training runs", run_report),
    "play": ("make a video of a policy before and after adaptation", run_play),
    "diagnose": ("say why a curve is flat, and what to try", run_diagnose),
    "compare": ("compare algorithms: train what is missing; figure, table, sentence", run_compare),
    "tune": ("search settings of a config", run_tune),
    "record": ("record learning histories of single tasks", run_record),
    "envs": (
        "list the task families and their tasks",
        partial(_run_list, list_envs, "List the task families and their tasks."),
    ),
    "configs": (
        "list the configs that come with the package",
        partial(_run_list, list_configs, "List the configs that maml-rl train takes by name."),
    ),
    "benchmarks": (
        "list the benchmarks for comparing policies",
        partial(_run_list, list_benchmarks, "List the benchmarks that maml-rl test --benchmark takes."),
    ),
    "zoo": ("list the trained policies that come with the package", run_zoo),
    "check-env": ("check that your environment is a task family", run_check_env),
    "help": ("show the options of a command: maml-rl help train", run_help),
    "version": ("show the versions of the package and of what it uses", run_version),
}

if __name__ == "__main__":
    sys.exit(main())
