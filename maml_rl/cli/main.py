"""The command `maml-rl`: training, testing, reports, lists of families and configs, benchmarks, checks."""

import re
import sys
import warnings
from argparse import SUPPRESS, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maml_rl import __version__
from maml_rl.arguments import suggest
from maml_rl.cli.compare import run_compare
from maml_rl.cli.console import (
    Parser,
    add_log_level,
    add_num_workers,
    add_placement,
    add_trust,
    complete_after_command,
    ending_in_order,
    file_path,
    not_negative,
    placement,
    positive,
    run_command,
    utf8,
    words_to_complete,
)
from maml_rl.cli.evaluate import run_test
from maml_rl.cli.listing import list_benchmarks, list_configs, list_entries, list_envs, list_zoo
from maml_rl.cli.play import run_play
from maml_rl.cli.record import run_record
from maml_rl.cli.train import run_train
from maml_rl.cli.tune import run_tune
from maml_rl.errors import ConfigError, MamlRLError, UsersCode, explain

# Causes of a flat curve that are shown.
_MOST_CAUSES = 3
# Steps of an episode that are compared with a loop.
_MOST_COMPARED_STEPS = 100
# Shorter steps than this end before another thread has started.
_LEAST_WAITING_SECONDS, _LEAST_WAITING_SHARE = 2e-3, 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """One of the commands.

    Attributes:
        purpose: in a line.
        run: takes the arguments after the command's name, and that name in full; returns the exit code.
    """

    purpose: str
    run: Callable[[Sequence[str], str], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `maml-rl`, and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    lines = "\n".join(f"  {name:<10} {command.purpose}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="maml-rl",
        usage="maml-rl [--version] COMMAND ...",
        description=f"Meta-reinforcement learning. Commands:\n\n{lines}\n\nmaml-rl COMMAND --help shows more.",
    )
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"maml-rl {__version__}")
    parser.add_argument("command", help=SUPPRESS).completer = lambda **_: [*COMMANDS]  # type: ignore[attr-defined]
    to_complete = words_to_complete()
    if to_complete is not None:
        arguments = to_complete
        if arguments[:1] and arguments[0] in COMMANDS:
            complete_after_command()
    elif not arguments:
        parser.print_help()
        return 0
    # The command parses the arguments after its name.
    name = parser.parse_args(arguments[:1]).command
    if name not in COMMANDS:
        known = list(COMMANDS)
        parser.error(f"there is no command {name!r}{suggest(name, known)} The commands are {', '.join(known)}")
    return COMMANDS[name].run(arguments[1:], f"maml-rl {name}")


def run_report(arguments: Sequence[str] | None = None, prog: str = "maml-rl report") -> int:
    """Write a report, and return the exit code."""
    parser = Parser(prog=prog, description="Write a self-contained HTML page about one or several training runs.")
    parser.add_argument("runs", nargs="+", type=file_path, metavar="RUN", help="folder of a run, or of several runs")
    parser.add_argument(
        "--output", type=file_path, help="the file (default: report.html in the folder that holds the runs)"
    )
    parser.add_argument("--title", type=utf8, help="title of the page (default: the names of the runs)")
    parser.add_argument(
        "--tasks",
        type=_count_or_file,
        default=40,
        metavar="COUNT|FILE",
        help="new tasks to try, 0 for none, or those in a file (default: 40)",
    )
    parser.add_argument(
        "--videos", type=not_negative, default=2, help="tasks to make videos of; 0 for none (default: 2)"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="also compare unfinished runs, as far as all runs have come"
    )
    add_placement(parser)
    add_trust(parser)
    add_log_level(parser)
    return run_command(parser, arguments, _report)


def _report(options: Namespace) -> None:
    from tqdm.contrib.logging import logging_redirect_tqdm

    from maml_rl.cli.progress import PartProgress
    from maml_rl.report import write_report

    with ending_in_order(), logging_redirect_tqdm(), PartProgress() as progress:
        path = write_report(
            options.runs,
            options.output,
            title=options.title,
            num_tasks=options.tasks if isinstance(options.tasks, int) else 0,
            task_file=None if isinstance(options.tasks, int) else options.tasks,
            num_videos=options.videos,
            placement=placement(options),
            trust=options.trust,
            unfinished=options.unfinished,
            on_part=progress,
        )
    print(f"the report is {path}; open it in any browser")


def run_diagnose(arguments: Sequence[str], prog: str) -> int:
    """Say why the curve of a run is flat, and return the exit code."""
    parser = Parser(prog=prog, description="Say why a curve is flat: likely causes, each with a setting to try.")
    parser.add_argument("runs", nargs="+", type=file_path, metavar="RUN", help="folder of a run, or of several runs")
    parser.add_argument("--all", action="store_true", help="show every cause (default: the first three)")
    add_log_level(parser)
    return run_command(parser, arguments, _diagnose)


def _diagnose(options: Namespace) -> None:
    from maml_rl.experiment.comparable import read_runs
    from maml_rl.experiment.diagnosis import diagnose

    groups, notices = read_runs(options.runs, unfinished=True)
    for notice in notices:
        print(notice)
    for run in (run for group in groups for run in group.runs):
        causes = diagnose(run)
        print(f"{run.path}: {run.config.algorithm} on {run.config.env_name}, {run.finished:,} iterations")
        if not causes:
            print("  nothing stands out in its metrics")
        for place, cause in enumerate(causes if options.all else causes[:_MOST_CAUSES], start=1):
            print(f"  {place}. {cause.name}: {cause.seen}.\n     Try {cause.remedy}.")
    print("docs/flat-curves.md explains each.")


def _count_or_file(text: str) -> int | Path:
    return not_negative(text) if re.fullmatch(r"-?\d+", text) else file_path(text)


def _run_list(entries: Callable[..., Iterable[str]], description: str, arguments: Sequence[str], prog: str) -> int:
    """Print what `entries` yields, more with --verbose, and return the exit code."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("text", nargs="?", default="", help="list only those with this text in their names")
    parser.add_argument("--verbose", action="store_true", help="list everything")
    add_log_level(parser)

    def show(options: Namespace) -> None:
        for line in entries(options.text, verbose=options.verbose):
            print(line)

    return run_command(parser, arguments, show)


def run_benchmarks(arguments: Sequence[str], prog: str) -> int:
    """List the certified benchmarks, or show a result in the table of its benchmark, and return the exit code."""
    if list(arguments[:1]) != ["enter"]:
        purpose = "List the benchmarks that maml-rl test --benchmark takes; `enter` shows a result among the others."
        return _run_list(list_benchmarks, purpose, arguments, prog)
    parser = Parser(
        prog=f"{prog} enter", description="Check results of maml-rl test --submit, and show them in their tables."
    )
    parser.add_argument("files", nargs="+", type=file_path, metavar="FILE", help="file that --submit has written")
    add_log_level(parser)

    def show(options: Namespace) -> None:
        for line in list_entries(options.files):
            print(line)

    return run_command(parser, arguments[1:], show)


def run_zoo(arguments: Sequence[str], prog: str) -> int:
    """List the trained policies that come with the package, or add one, and return the exit code."""
    if list(arguments[:1]) == ["add"]:
        return _run_zoo_add(arguments[1:], f"{prog} add")
    purpose = f"List the trained policies that come with the package. {prog} add RUN --name NAME adds one."
    return _run_list(list_zoo, purpose, arguments, prog)


def _run_zoo_add(arguments: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Evaluate the policy of a run on new tasks, and add it to the zoo.")
    parser.add_argument("run", type=file_path, metavar="RUN", help="folder of the run")
    parser.add_argument("--name", type=utf8, required=True, help="name of the policy in the zoo")
    parser.add_argument("--checkpoint", default="last", help="of the run: 'last' (default), 'best', or a number")
    parser.add_argument("--tasks", type=positive, default=40, help="new tasks to evaluate it on (default: 40)")
    parser.add_argument("--overwrite", action="store_true", help="replace the policy of this name")
    add_num_workers(parser)
    add_log_level(parser)
    return run_command(parser, arguments, _zoo_add)


def _zoo_add(options: Namespace) -> None:
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


def run_check_env(arguments: Sequence[str], prog: str) -> int:
    """Check a user's environment, and return the exit code."""
    parser = Parser(prog=prog, description="Check that an environment keeps the contract of a task family.")
    parser.add_argument("env", help="a registered id, module:Id-v0, or module:Class")
    parser.add_argument("--env-kwargs", default="{}", help="arguments of the environment, as YAML: '{size: 3}'")
    parser.add_argument(
        "--against-loop",
        action="store_true",
        help="also sample episodes, in this process, in threads and in workers, and compare every value with a loop",
    )
    add_log_level(parser)
    return run_command(parser, arguments, _check_env)


@ending_in_order()
def _check_env(options: Namespace) -> None:
    from maml_rl.envs import FAMILIES

    env = _make_env(options.env, _kwargs(options.env_kwargs))
    try:
        _check_made(env, options)
        if env.spec is None or env.spec.id not in FAMILIES:
            # The slots of this package's families are one batch.
            print(_advise_stepping(env, options))
        if options.against_loop:
            print(_compare_with_loop(env, options))
    except BaseException:
        with suppress(Exception):
            env.close()
        raise
    with UsersCode(lambda error: MamlRLError(f"{options.env}: close() raises {explain(error)}")):
        env.close()
    print(f"{options.env} is a task family; {_usage(env, options.env)}")


def _advise_stepping(env: Any, options: Namespace) -> str:
    """Advise whether slots of an environment should wait concurrently, by how long its steps take and wait."""
    from maml_rl.envs.calls import Awaited, CallRules
    from maml_rl.envs.checking import family_of
    from maml_rl.envs.make_env import steps_in_threads
    from maml_rl.envs.meta_env import declared
    from maml_rl.envs.waiting import measure_waiting

    with UsersCode(lambda error: MamlRLError(f"{options.env}: {explain(error)}")):
        seconds, share = measure_waiting(env)
    measured = f"a step takes {1e3 * seconds:.3g} ms, {share:.0%} of it waiting"
    name = type(family_of(env)).__name__
    if isinstance(env, Awaited):
        return f"ok: {measured}; its slots are awaited concurrently"
    if not declared(env, "thread_safe", True):
        return f"ok: {measured}; it declares that it is not thread-safe, so its slots are stepped one after the other"
    pays = seconds >= _LEAST_WAITING_SECONDS and share >= _LEAST_WAITING_SHARE
    if pays == steps_in_threads(env, CallRules()):
        return (
            f"ok: {measured}; its slots are stepped {'concurrently' if pays else 'one after the other'}, which suits it"
        )
    if pays:
        return (
            f"note: {measured}; with 'stepping: threads' slots wait concurrently (docs/slow-environments.md); "
            f'for a permanent choice, set stepping = "threads" in {name}'
        )
    return f'note: {measured}; threads do not help with that, but {name} sets stepping = "threads"; remove it'


def _compare_with_loop(env: Any, options: Namespace) -> str:
    """Compare sampled episodes with a plain loop, and return what was compared."""
    from maml_rl.envs.serial import time_limit
    from maml_rl.samplers.plain_loop import compare_with_loop

    kwargs = _kwargs(options.env_kwargs)
    limits = [time_limit(env), getattr(env.unwrapped, "max_episode_steps", None), _MOST_COMPARED_STEPS]
    with UsersCode(lambda error: MamlRLError(f"{options.env}: {explain(error)}")):
        compared = compare_with_loop(
            _maker(options.env),
            partial(_make_env, options.env, kwargs),
            env_kwargs=kwargs,
            max_episode_steps=min(limit for limit in limits if limit is not None),
        )
    return f"ok: {compared}"


def _usage(env: Any, name: str) -> str:
    """Describe how to pass an environment to the sampler."""
    from maml_rl.envs.serial import time_limit
    from maml_rl.policies import get_policy_for_env

    # A class has no id that a config could name.
    arguments = [repr(name) if env.spec is not None else name.rpartition(":")[2]]
    remarks = []
    if time_limit(env) is None and getattr(env.unwrapped, "max_episode_steps", None) is None:
        arguments.append("max_episode_steps=...")
        remarks.append("it has no time limit of its own")
    try:
        get_policy_for_env(env, hidden_sizes=(1,))
    except TypeError as error:
        arguments.append("policy=...")
        remarks.append(f"the policy must be your own, since the package has {error}")
    text = f"MultiTaskSampler({', '.join([*arguments, '...'])}) samples it"
    return "; ".join([text, *remarks])


def _check_made(env: Any, options: Namespace) -> None:
    """Check an environment, and print which rules it follows."""
    from maml_rl.envs import check_meta_env
    from maml_rl.envs.checking import GYMNASIUM

    with (
        UsersCode(lambda error: MamlRLError(f"{options.env}: {explain(error)}")),
        warnings.catch_warnings(record=True) as remarks,
    ):
        warnings.simplefilter("always")
        check_meta_env(env, make_another=lambda: _make_env(options.env, _kwargs(options.env_kwargs)))
    notes = list(dict.fromkeys(str(remark.message) for remark in remarks))
    for note in notes:
        print(f"note: {note}")
    print("ok: tasks are drawn, set, and kept over resets")
    if not any(note.startswith(GYMNASIUM) for note in notes):
        print("ok: Gymnasium's own rules are kept")


def _make_env(name: str, kwargs: dict[str, Any]) -> Any:
    """Make an environment from an id or a class."""
    import gymnasium

    from maml_rl.envs.calls import Awaited, is_async
    from maml_rl.envs.registration import find_spec

    with UsersCode(lambda error: ConfigError(f"{name} cannot be made: {explain(error)}")):
        maker = _maker(name)
        env = gymnasium.make(find_spec(maker).id, **kwargs) if isinstance(maker, str) else maker(**kwargs)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{name} makes {type(env).__name__}, which is not a gymnasium.Env; derive it from that")
    return Awaited(env) if is_async(env) else env


def _maker(name: str) -> Any:
    """Return the class or function of the name `module:Class`; any other name as it is."""
    from maml_rl.envs.registration import import_module_of

    module, _, attribute = name.rpartition(":")
    found = getattr(import_module_of(module, name), attribute, None) if module else None
    return found if callable(found) else name


def _kwargs(text: str) -> dict[str, Any]:
    from maml_rl.config.yaml_source import parse_value

    kwargs = parse_value(text, "--env-kwargs")
    if not isinstance(kwargs, dict):
        raise ConfigError(f"--env-kwargs must be a mapping as '{{size: 3}}', got {text!r}")
    return kwargs


def run_help(arguments: Sequence[str], prog: str) -> int:
    """Show what the commands are for, or the options of one of them, and return the exit code."""
    return main([*arguments[:1], "--help"])


def run_version(arguments: Sequence[str], prog: str) -> int:
    """Show the versions that a report of a fault needs, and return the exit code."""
    from maml_rl.runs.system import describe_system

    parser = Parser(prog=prog, description="Show the version of the package, of Python and of the libraries.")
    add_log_level(parser)

    def show(options: Namespace) -> None:
        print(f"maml-rl {__version__}")
        system = describe_system()
        packages = ", ".join(f"{name} {number}" for name, number in system.pop("packages").items())
        for name, value in {**system, "packages": packages}.items():
            print(f"  {name}: {value}")

    return run_command(parser, arguments, show)


COMMANDS = {
    "train": Command("meta-train a policy", run_train),
    "test": Command("measure how fast a trained policy adapts to new tasks", run_test),
    "report": Command("write an HTML page about training runs", run_report),
    "play": Command("make a video of a policy before and after adaptation", run_play),
    "diagnose": Command("say why a curve is flat, and what to try", run_diagnose),
    "compare": Command("compare algorithms: train what is missing; figure, table, sentence", run_compare),
    "tune": Command("search settings of a config", run_tune),
    "record": Command("record learning histories of single tasks", run_record),
    "envs": Command(
        "list the task families and their tasks",
        partial(_run_list, list_envs, "List the task families and their tasks."),
    ),
    "configs": Command(
        "list the configs that come with the package",
        partial(_run_list, list_configs, "List the configs that maml-rl train takes by name."),
    ),
    "benchmarks": Command(
        "list the benchmarks for comparing policies",
        run_benchmarks,
    ),
    "zoo": Command("list the trained policies that come with the package", run_zoo),
    "check-env": Command("check that your environment is a task family", run_check_env),
    "help": Command("show the options of a command: maml-rl help train", run_help),
    "version": Command("show the versions of the package and of what it uses", run_version),
}

if __name__ == "__main__":
    sys.exit(main())
