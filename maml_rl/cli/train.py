"""The command line of train.py: arguments in, one function called."""

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from maml_rl.cli.console import (
    INTERRUPTED,
    Parser,
    add_settings,
    ending_in_order,
    file_path,
    log_to_standard_error,
    not_negative,
    positive,
    run_command,
)
from maml_rl.cli.listing import readable_minutes
from maml_rl.cli.run_options import (
    add_common,
    add_config,
    chosen_config,
    is_run,
    overridden,
    path_or_name,
    refuse_untrusted_code,
    torch_device,
)
from maml_rl.config.catalog import SHIPPED, name_of
from maml_rl.config.config import OF_LEARNERS, SECTION, Config, load_config
from maml_rl.config.settings import algorithm_settings, describe_settings, settings_in_use
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_creatable, new_folder, newest_path

# torch is imported inside the functions: a spawned worker imports this module again, and must stay light.

# Before the names of the options that are settings of the algorithm.
_ALGORITHM = "algorithm_setting_"
_DEFAULT_CONFIG = SHIPPED / "maml" / "2d-navigation.yaml"
# Seeds that are trained side by side, by the kind of the device: a small policy leaves an accelerator idle.
# `python -m benchmarks.accelerator --only seeds` measures it.
_SEEDS_AT_ONCE = {"cuda": 4}
# A single number after --seeds that may have been meant as how many.
_MOST_RUNS = 20


def run_train(arguments: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """Run train.py, or the command that `prog` names, and return its exit code."""
    parser = Parser(prog=prog, description="Meta-train a policy on a family of tasks, or a policy to compare it with.")
    add_config(parser, "the experiment: a name that `maml-rl configs` lists, a YAML file, or a run", "2d-navigation")
    parser.add_argument(
        "--output-folder",
        type=file_path,
        help="where the run goes (default: runs/<name of the config>, with a new number)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the output folder, or start it")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    parser.add_argument(
        "--init", type=path_or_name, metavar="RUN", help="begin with the policy of another run, or of zoo:NAME"
    )
    parser.add_argument(
        "--init-learner", action="store_true", help="with --init: begin with its learner's optimizers and networks, too"
    )
    parser.add_argument("--profile", action="store_true", help="record the share of time of each stage")
    parser.add_argument(
        "--track",
        nargs="+",
        default=[],
        choices=("wandb", "mlflow", "tensorboard"),
        help="send config, metrics, report and checkpoints to experiment trackers",
    )
    parser.add_argument("--quiet", action="store_true", help="show neither progress nor results, only warnings")
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting and where it is from, as YAML; train nothing"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="the same, and what the run will take: steps, memory, minutes"
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=_seeds,
        metavar="SEED",
        help="train one run per seed, in folders seed-... of the output folder",
    )
    parser.add_argument(
        "--seeds-at-once",
        type=positive,
        metavar="N",
        help="train so many of the --seeds side by side, each in a process (default: "
        + "; ".join(f"{count} on {kind}" for kind, count in _SEEDS_AT_ONCE.items())
        + "; elsewhere one after the other)",
    )
    parser.set_defaults(prog=prog)
    add_common(parser)
    add_settings(parser, "settings, as in YAML, that replace those of the config", describe_settings(Config))
    try:
        # Where the algorithm is the user's own, this imports torch, in the middle of which Ctrl-C may come.
        _add_algorithm_settings(parser, sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return run_command(parser, arguments, _train, _how_to_go_on)


def _add_algorithm_settings(parser: Parser, arguments: Sequence[str]) -> None:
    """Add the settings of the algorithm that the arguments, or their config, name."""
    parser.set_defaults(algorithm_keys=[])
    # An unknown option whose value has spaces would be read as the name of a config, and so would the next word.
    known = [
        argument
        for argument in arguments
        if argument not in ("-h", "--help") and not parser.is_unknown_with_value(argument)
    ]
    for option in [argument for argument in parser.parse_known_args(known)[1] if argument.startswith("--")]:
        place = known.index(option)
        del known[place : place + 2]
    options, _ = parser.parse_known_args(known)
    try:
        config_path = _config_to_train(options)
        config = overridden(load_config(config_path), {"algorithm": options.algorithm})
        name, known_settings = config.algorithm, algorithm_settings()
        if name in known_settings:
            settings = known_settings[name]
        else:
            refuse_untrusted_code(config, options)

            from maml_rl.metalearners import find_metalearner

            settings = describe_settings(find_metalearner(name).Settings)
    except ValueError:
        # The command itself reports errors of its config.
        return
    used = settings_in_use().get(name, OF_LEARNERS)
    unused = ", ".join(key for key in OF_LEARNERS if key not in used)
    add_settings(
        parser,
        f"settings of the algorithm {name}{f', which does not use {unused}' * bool(unused)}",
        settings,
        _ALGORITHM,
    )
    parser.set_defaults(algorithm_keys=[setting.key for setting in settings])


def _train(options: argparse.Namespace) -> None:
    if options.init_learner and options.init is None:
        raise ConfigError("--init-learner takes the learner's state from a run; name it with --init")
    if options.seeds_at_once is not None and options.seeds is None:
        raise ConfigError(f"--seeds-at-once {options.seeds_at_once} is for several seeds; name them with --seeds")
    given = chosen_config(options)
    config_path = given or _DEFAULT_CONFIG
    config = overridden(load_config(config_path), _settings(options))
    new = options.output_folder is None and not (options.resume or options.overwrite)
    if options.output_folder is None:
        options.output_folder = _default_folder(config_path, config.method, resume=options.resume)
    begun = _begun(options.output_folder, options.seeds)
    if options.resume and begun and given is None:
        config_path = begun[0]
        config = overridden(load_config(config_path), _settings(options))
    config = refuse_untrusted_code(config, options)
    device = torch_device(options)
    check_creatable(options.output_folder, "--output-folder")
    if options.track:
        from maml_rl.cli.tracking import check_trackers

        check_trackers(options.track)
    if options.seeds is not None:
        if options.seed is not None:
            raise ConfigError(f"--seed {options.seed} contradicts --seeds; give one of them")
        seeds = list(chain(*options.seeds))
        if repeated := [seed for seed in seeds if seeds.count(seed) > 1]:
            raise ConfigError(f"--seeds names {repeated[0]} more than once; leave out all except one")
        # Refused here if it is too large.
        config.override({"seed": max(seeds)})
    # Loaded before the work begins, for until then Ctrl-C ends the process at once.
    for module in ("maml_rl.cli.progress", "maml_rl.cli.tracking", "maml_rl.experiment.train"):
        import_module(module)
    reserved = new_folder(options.output_folder) if new else nullcontext(options.output_folder)
    with ending_in_order(), reserved as folder:
        wanted, options.output_folder = options.output_folder, folder
        _check_run_folders(options)
        if options.print_config or options.dry_run:
            _describe(config, options, device, continues=bool(options.resume and begun))
            return
        where = "" if options.quiet else _where(wanted, folder, options.seeds)
        if options.seeds is None:
            _show(_train_one(config, folder, options, device, where), options)
        else:
            runs = _run_folders(options.output_folder, options.seeds)
            trained = _train_seeds(config, runs, options, device, where)
            for number, (name, texts) in enumerate(trained, start=1):
                _show(texts, options, f"{name}, {number} of {len(runs)}:\n")
    if options.quiet:
        return
    quoted = shlex.quote(str(folder))
    if options.seeds is None:
        print(f"the results are in {folder}; to test the policy on new tasks, and to see the curves:")
        print(f"  {_command(options, 'test')} {quoted}")
    else:
        print(f"the results are in {folder}; to see the curves with their band over the seeds:")
    print(f"  {_command(options, 'report')} {quoted}")


def _where(wanted: Path, folder: Path, seeds: list[list[int]] | None) -> str:
    """Return where the run goes, and what a single number after --seeds means."""
    what = "this run is" if seeds is None else "these runs are in"
    text = f"{what} {folder}" if folder == wanted else f"{wanted} exists; {what} {folder}"
    if seeds is not None and len(given := list(chain(*seeds))) == 1:
        text += f"\n--seeds {given[0]} trains seed {given[0]} alone"
        if 1 < given[0] <= _MOST_RUNS:
            text += f"; --seeds {','.join(map(str, range(given[0])))} trains {given[0]}"
    return text


def _describe(config: Config, options: argparse.Namespace, device: Any, *, continues: bool) -> None:
    """Print every setting with its source; for a dry run also what the run will take, measured."""
    from maml_rl.experiment.build import make_experiment
    from maml_rl.runs.run_folder import check_resumable

    experiment = make_experiment(config, device)
    for seed, run in _run_folders(options.output_folder, options.seeds).items() if continues else ():
        if (run / "config.json").is_file():
            own = experiment if seed is None else make_experiment(config.override({"seed": seed}), device)
            check_resumable(run, own.config, own.metalearner)
    if options.init is not None and not continues:
        experiment.begin_with(options.init, policy_alone=not options.init_learner)
    print("\n".join(experiment.config.with_sources()))
    if options.dry_run:
        from maml_rl.experiment.estimate import estimate

        needs = estimate(config, device=device)
        each = f"{needs.seconds:.2g} s for each iteration"
        if needs.num_evaluations:
            each += f", {needs.evaluating:.2g} s for each evaluation"
        print(
            f"Steps: {needs.num_iterations:,} iterations of {needs.env_steps:,.0f} environment steps, "
            f"{needs.total_env_steps:,.0f} in all."
        )
        if needs.without_updates is None:
            each += ", without updates: those begin later"
        elif needs.without_updates:
            each += f" with updates, which begin in iteration {needs.without_updates + 1:,}"
        time = readable_minutes(needs.minutes)
        print(f"Time: about {time} on this machine ({each}; iterations timed: {needs.timed}).")
        if needs.num_bytes is not None:
            in_worker = f", and {needs.of_worker / 2**20:,.0f} MiB in a worker" if needs.of_worker is not None else ""
            in_process = f"{needs.num_bytes / 2**20:,.0f} MiB in this process"
            print(f"Memory: at most {in_process}{in_worker}, in these iterations.")
        what = "The run would be"
        if options.seeds is not None:
            num_runs = len(list(chain(*options.seeds)))
            print(f"All that is for one seed; --seeds names {num_runs}.")
            what = f"The run{'s' * (num_runs > 1)} would be"
        print(f"{what} in {options.output_folder}; this was a dry run, which has written nothing.")


def _check_run_folders(options: argparse.Namespace) -> None:
    """Refuse folders of runs that cannot be written, or that hold other runs, before the first run is trained."""
    from maml_rl.runs.run_folder import check_run_folder

    folder = options.output_folder
    if options.seeds is not None and (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is the folder of a single run; choose another --output-folder for --seeds")
    for run in _run_folders(options.output_folder, options.seeds).values():
        check_run_folder(run, resume=options.resume, overwrite=options.overwrite)


def _show(texts: Sequence[str], options: argparse.Namespace, head: str = "") -> None:
    """Print how a run went, unless nothing is to be shown."""
    if not options.quiet:
        print(head + "\n".join(texts), flush=True)


def _train_seeds(
    config: Config, runs: dict[int | None, Path], options: argparse.Namespace, device: Any, where: str
) -> Iterator[tuple[str, list[str]]]:
    """Train with each of the seeds, and yield how each run went: one after the other, or side by side as they end."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for seed, run in runs.items():
        arguments = config.override({"seed": seed}), run, options, device, where
        # Only the first says where they are.
        calls.append((f"seed {seed}", arguments if not calls else (*arguments[:-1], "")))
    at_once = options.seeds_at_once or _SEEDS_AT_ONCE.get(device.type, 1)
    if min(at_once, len(calls)) == 1:
        yield from ((name, _train_one(*arguments)) for name, arguments in calls)
        return
    from maml_rl.experiment.build import make_experiment
    from maml_rl.experiment.in_processes import in_processes

    # Refuses wrong settings before any process starts.
    make_experiment(config, device)
    yield from in_processes(_train_beside, calls, at_once)


def _train_beside(
    send: Callable[[list[str]], None],
    config: Config,
    folder: Path,
    options: argparse.Namespace,
    device: Any,
    where: str,
) -> None:
    """Train one of several seeds in a process of its own; lines of a log instead of a bar say how far it is."""
    level = "warning" if options.quiet and options.log_level == "info" else options.log_level
    with log_to_standard_error(options.prog, level):
        send(_train_one(config, folder, options, device, where, bar=False))


def _train_one(
    config: Config, folder: Path, options: argparse.Namespace, device: Any, where: str, *, bar: bool = True
) -> list[str]:
    """Train with one seed, print `where` once the run has begun, and return how it went."""
    from maml_rl.cli.progress import TrainingProgress
    from maml_rl.cli.tracking import tracked
    from maml_rl.experiment.train import train
    from maml_rl.runs.metrics import Metrics

    name = f"seed {config.seed}" if options.seeds else None
    shown = bar and not options.quiet
    with (
        TrainingProgress(config.num_batches, name, shown=shown) as progress,
        tracked(options.track, config, folder) as track,
    ):

        def show(metrics: Metrics) -> None:
            progress(metrics)
            track(metrics)

        train(
            config,
            folder,
            device=device,
            resume=options.resume,
            overwrite=options.overwrite,
            init=options.init,
            init_learner=options.init_learner,
            profile=options.profile,
            on_start=lambda: where and print(where, flush=True),
            on_iteration=show,
            on_slots=progress.show_slots,
        )
    return [progress.summary(), *([progress.profile()] if options.profile else [])]


def _seeds(text: str) -> list[int]:
    """Read one seed, or several as in 0,1,2."""
    return [not_negative(seed) for seed in text.split(",")]


def _how_to_go_on(options: argparse.Namespace) -> str:
    if options.output_folder is None or options.print_config or options.dry_run:
        return ""
    instead = " instead of --overwrite" if options.overwrite else ""
    advice = f"; finished iterations are saved, and the same command with --resume{instead} continues the run"
    return advice if _begun(options.output_folder, options.seeds) else ""


def _config_to_train(options: argparse.Namespace) -> Path:
    """Return the config that is given, that of the run to be resumed, or the default."""
    given = chosen_config(options)
    if given is not None or not options.resume:
        return given or _DEFAULT_CONFIG
    folder = options.output_folder or _default_folder(_DEFAULT_CONFIG, options.method or "maml", resume=True)
    begun = _begun(folder, options.seeds)
    return begun[0] if begun else _DEFAULT_CONFIG


def _begun(folder: Path, seeds: list[list[int]] | None) -> list[Path]:
    """Return the configs of those runs that have already started."""
    return [run / "config.json" for run in _run_folders(folder, seeds).values() if (run / "config.json").is_file()]


def _run_folders(folder: Path, seeds: list[list[int]] | None) -> dict[int | None, Path]:
    """Return the folder of the run of each of the --seeds, or of the only run."""
    return {None: folder} if seeds is None else {seed: folder / f"seed-{seed}" for seed in chain(*seeds)}


def _default_folder(config_path: Path, method: str, *, resume: bool) -> Path:
    """Return the folder of a run that names none; a new one may get a number, and the newest is resumed."""
    if is_run(config_path):
        # A run is resumed or overwritten where it is, or repeated beside that.
        return config_path.parent
    folder = Path("runs") / name_of(config_path)
    if method != "maml":
        folder = folder.with_name(f"{folder.name}-{method}")
    return (resume and newest_path(folder)) or folder


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a config and of its algorithm that the command line may give."""
    names = [key.replace("-", "_") for key in Config.fields_by_key()]
    values = {name: getattr(options, name) for name in names}
    given = {key: getattr(options, _ALGORITHM + key.replace("-", "_")) for key in options.algorithm_keys}
    section = {key: parse_value(value, f"--{key}") for key, value in given.items() if value is not None}
    if section:
        whole = parse_value(values["algorithm_settings"] or "{}", f"--{SECTION}")
        values["algorithm_settings"] = {**whole, **section} if isinstance(whole, dict) else whole
    return values


def _command(options: argparse.Namespace, name: str) -> str:
    """Return how to call another command in the same way as this one."""
    if options.prog.startswith("maml-rl") or (name == "report" and shutil.which("maml-rl")):
        return f"maml-rl {name}"
    # The environment is not activated; the report has no script of its own.
    path = Path(sys.executable).with_name("maml-rl") if name == "report" else Path(sys.executable)
    called = shlex.quote(str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name)
    return f"{called} report" if name == "report" else f"{called} {name}.py"
