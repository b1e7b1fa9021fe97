"""The command line of train.py and test.py: arguments in, one function called."""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from maml_rl.cli.console import (
    INTERRUPTED,
    Parser,
    add_log_level,
    add_placement,
    add_trust,
    ending_in_order,
    file_path,
    not_negative,
    placement,
    positive,
    run_command,
)
from maml_rl.config.catalog import SHIPPED, ZOO, find_config, find_run, name_of, shipped_configs, zoo
from maml_rl.config.config import SECTION, Config, load_config
from maml_rl.config.reference import FLAG, LIST, Setting, algorithm_settings, describe_settings
from maml_rl.config.yaml_source import parse_value, suggest
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_creatable, check_writable
from maml_rl.runs.numbered import new_file, new_folder, newest_path
from maml_rl.runs.trust import check_code

# torch is imported inside the commands: a spawned worker imports this module again, and must stay light.

# Before the names of the options that are settings of the algorithm.
_ALGORITHM = "algorithm_setting_"
_YAML = ".yaml", ".yml"
_DEFAULT_CONFIG = SHIPPED / "maml" / "2d-navigation.yaml"


def run_train(arguments: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """Run train.py, or the command that `prog` names, and return its exit code."""
    parser = Parser(prog=prog, description="Meta-train a policy on a family of tasks, or a policy to compare it with.")
    _add_config(parser, "the experiment: a name that `maml-rl configs` lists, a YAML file, or a run", "2d-navigation")
    parser.add_argument(
        "--output-folder",
        type=file_path,
        help="where the run goes (default: runs/<name of the config>, with a new number)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the output folder, or start it")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    parser.add_argument("--profile", action="store_true", help="record the share of time of each stage")
    parser.add_argument(
        "--seeds",
        nargs="+",
        action=_Seeds,
        metavar="SEED",
        help="train one run per seed, one after the other, in folders seed-... of the output folder",
    )
    parser.set_defaults(prog=prog)
    _add_common(parser)
    _add_settings(parser, "settings, as in YAML, that replace those of the config", describe_settings(Config))
    try:
        # Where the algorithm is the user's own, this imports torch, in the middle of which Ctrl-C may come.
        _add_algorithm_settings(parser, sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return run_command(parser, arguments, _train, _how_to_go_on)


def _add_settings(parser: Parser, title: str, settings: Sequence[Setting], prefix: str = "") -> None:
    group = parser.add_argument_group(title)
    for setting in settings:
        default = "required in the config" if setting.default is None else f"default {setting.default}"
        is_flag = setting.allowed == FLAG
        group.add_argument(
            f"--{setting.key}",
            dest=prefix + setting.key.replace("-", "_"),
            nargs="+" if setting.allowed.startswith(LIST) else "?" if is_flag else None,
            const="true" if is_flag else None,
            metavar="VALUE",
            help=f"{setting.meaning} [{setting.allowed}; {default}]".replace("%", "%%"),
        )


def _add_algorithm_settings(parser: Parser, arguments: Sequence[str]) -> None:
    """Add the settings of the algorithm that the arguments, or their config, name."""
    parser.set_defaults(algorithm_keys=[])
    # An unknown option whose value has spaces would be taken for the name of a config, and so would the next word.
    known = [each for each in arguments if each not in ("-h", "--help") and not parser.is_unknown_with_value(each)]
    for option in [each for each in parser.parse_known_args(known)[1] if each.startswith("--")]:
        place = known.index(option)
        del known[place : place + 2]
    options, _ = parser.parse_known_args(known)
    try:
        config_path = _config_to_train(options)
        config = _overridden(load_config(config_path), {"algorithm": options.algorithm})
        name, known_settings = config.algorithm, algorithm_settings()
        if name in known_settings:
            settings = known_settings[name]
        else:
            _check_code(config, config_path, options)

            from maml_rl.metalearners import find_metalearner

            settings = describe_settings(find_metalearner(name).Settings)
    except ValueError:
        # The command itself says what is wrong with its config.
        return
    _add_settings(parser, f"settings of the algorithm {name}", settings, _ALGORITHM)
    parser.set_defaults(algorithm_keys=[setting.key for setting in settings])


def run_test(arguments: Sequence[str] | None = None, prog: str = "test.py") -> int:
    """Run test.py, or the command that `prog` names, and return its exit code."""
    parser = Parser(prog=prog, description="Adapt a trained policy to tasks it never saw, and measure its returns.")
    _add_config(parser, "the folder of a run, its config.json, zoo:NAME, or a config by file or name")
    parser.add_argument(
        "--checkpoint",
        "--policy",
        type=_path_or_name,
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
    parser.add_argument("--tasks", type=file_path, metavar="FILE", help="evaluate on the tasks in this file")
    parser.add_argument(
        "--training-tasks",
        action="store_true",
        help="draw new tasks as training does, where evaluations draw from others, for training-tasks.npz in the run",
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
    _add_common(parser)
    return run_command(parser, arguments, _test)


def _add_config(parser: argparse.ArgumentParser, meaning: str, default: str | None = None) -> None:
    suffix = f" (default: {default})" if default else ""
    parser.add_argument("name", nargs="?", type=_path_or_name, metavar="CONFIG", help=meaning + suffix)
    parser.add_argument("--config", type=_path_or_name, help="the same as CONFIG")


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_trust(parser)
    parser.add_argument("--device", help="where the policy and the update run (default: cpu)")
    parser.add_argument("--use-cuda", action="store_true", help="the same as --device cuda")
    add_log_level(parser)


def _train(options: argparse.Namespace) -> None:
    given = _chosen_config(options)
    config_path = given or _DEFAULT_CONFIG
    config = _overridden(load_config(config_path), _settings(options))
    new = options.output_folder is None and not (options.resume or options.overwrite)
    if options.output_folder is None:
        options.output_folder = _default_folder(config_path, config.method, resume=options.resume)
    begun = _begun(options)
    if options.resume and begun and given is None:
        config_path = begun[0]
        config = _overridden(load_config(config_path), _settings(options))
    _check_code(config, config_path, options)
    device = _device(options)
    check_creatable(options.output_folder, "--output-folder")
    with new_folder(options.output_folder) if new else nullcontext(options.output_folder) as folder:
        options.output_folder = folder
        _check_run_folders(options)
        if options.seeds is None:
            progress = _train_one(config, folder, options, device)
            print(progress.summary())
            if options.profile:
                print(progress.profile())
        else:
            _train_seeds(config, options, device)
    if options.seeds is None:
        print(f"the results are in {folder}; to test the policy on new tasks:")
        print(f"  {_command(options, 'test')} {folder}")
    else:
        print(f"the results are in {folder}; to see the curves with their band over the seeds:")
        print(f"  {_command(options, 'report')} {folder}")


def _check_run_folders(options: argparse.Namespace) -> None:
    """Refuse folders of runs that cannot be written, or that hold other runs, before the first run is trained."""
    from maml_rl.runs.run_folder import check_run_folder

    if options.seeds is not None:
        _check_seeds(options)
    for run in _run_folders(options).values():
        check_run_folder(run, resume=options.resume, overwrite=options.overwrite)


def _train_seeds(config: Config, options: argparse.Namespace, device: Any) -> None:
    runs = [(config.override({"seed": seed}), run) for seed, run in _run_folders(options).items()]
    for number, (seeded, run) in enumerate(runs, start=1):
        progress = _train_one(seeded, run, options, device)
        print(f"seed {seeded.seed}, {number} of {len(runs)}:\n{progress.summary()}", flush=True)
        if options.profile:
            print(progress.profile())


def _train_one(config: Config, folder: Path, options: argparse.Namespace, device: Any) -> Any:
    """Train with one seed, and return the progress that was made."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    from maml_rl.cli.progress import TrainingProgress
    from maml_rl.experiment.train import train

    name = f"seed {config.seed}" if options.seeds else None
    with ending_in_order(), logging_redirect_tqdm(), TrainingProgress(config.num_batches, name) as progress:
        train(
            config,
            folder,
            device=device,
            resume=options.resume,
            overwrite=options.overwrite,
            profile=options.profile,
            on_iteration=progress,
        )
    return progress


class _Seeds(argparse.Action):
    """Reads seeds that are written as 0 1 2 or as 0,1,2."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store them as a list of numbers."""
        try:
            setattr(namespace, self.dest, [not_negative(seed) for text in values for seed in text.split(",")])
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def _check_seeds(options: argparse.Namespace) -> None:
    if options.seed is not None:
        raise ConfigError(f"--seed {options.seed} contradicts --seeds; give one of them")
    for seed in options.seeds:
        if options.seeds.count(seed) > 1:
            raise ConfigError(f"--seeds names {seed} more than once; leave out all but one")
    folder = options.output_folder
    if (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is the folder of a single run; choose another --output-folder for --seeds")


def _how_to_go_on(options: argparse.Namespace) -> str:
    if options.output_folder is None:
        return ""
    has_run = any((run / "config.json").is_file() for run in _run_folders(options).values())
    instead = " in place of --overwrite" if options.overwrite else ""
    advice = f"; finished iterations are saved, and the same command with --resume{instead} continues the run"
    return advice if has_run else ""


def _test(options: argparse.Namespace) -> None:
    if options.checkpoint.startswith("zoo:"):
        policy = find_run(options.checkpoint)
        if options.name is None and options.config is None:
            options.name = options.checkpoint
        options.checkpoint = str(next((policy / "checkpoints").iterdir()))
    config_path = _chosen_config(options, of_run=True)
    if config_path is None:
        raise ConfigError("which policy? give a run: its folder, or --config with its config.json")
    is_named = options.output is not None
    _check_outputs(options, config_path)
    for name in ("save_tasks", "num_batches", "training_tasks"):
        if options.tasks is not None and getattr(options, name):
            raise ConfigError(f"--tasks, whose tasks are all taken, contradicts --{name.replace('_', '-')}; give one")
    names = ("seed", "fast_lr", "fast_batch_size", "halve_step_size")
    config = _overridden(load_config(config_path), {name: getattr(options, name) for name in names})
    config = config.override(placement(options))
    _check_code(config, config_path, options)
    num_steps = config.test_steps if options.num_steps is None else options.num_steps
    if config.method == "oracle" and num_steps:
        raise ConfigError(f"an oracle knows its task and is not adapted; leave out --num-steps {num_steps}")
    device = _device(options)

    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from maml_rl.experiment.build import make_experiment
    from maml_rl.experiment.evaluate import REPETITIONS, evaluate
    from maml_rl.task_distributions.task_files import save_tasks

    experiment = make_experiment(config, device, num_workers=None)
    by_trials = experiment.metalearner.columns == "episode"
    if by_trials and options.num_steps is not None:
        raise ConfigError(f"{config.algorithm} adapts by its memory, in no gradient steps; leave out --num-steps")
    tasks = None if options.tasks is None else experiment.load_tasks(options.tasks)
    if options.checkpoint != "initial":
        _check_has_policy(config_path, options.checkpoint)
        experiment.restore(options.checkpoint, config_path.parent)
    num_batches = options.num_batches or 1 if tasks is None else -(-len(tasks) // options.meta_batch_size)
    repetitions = options.repetitions or (1 if tasks is None else REPETITIONS)
    with (
        ending_in_order(),
        _reserved_output(options, number=not is_named) as output,
        logging_redirect_tqdm(),
        tqdm(total=num_batches * repetitions, unit="batch", disable=None) as bar,
    ):
        evaluation = evaluate(
            experiment,
            num_batches=num_batches,
            meta_batch_size=options.meta_batch_size,
            num_steps=num_steps,
            tasks=tasks,
            training_tasks=options.training_tasks,
            repetitions=repetitions,
            on_tasks=partial(save_tasks, options.save_tasks, config.env_name) if options.save_tasks else None,
            on_batch=lambda _: bar.update(),
        )
        evaluation.save(output)
    kind = "new tasks" if options.tasks is None else f"tasks of {options.tasks}"
    if options.training_tasks:
        kind += " as in training"
    episodes = f"{config.fast_batch_size} episodes of each" + (" before each step" if num_steps else "")
    if by_trials:
        episodes = f"a trial of {config.fast_batch_size} episode{'s' * (config.fast_batch_size > 1)} of each"
    if repetitions > 1:
        episodes += f", {repetitions} times"
    print(f"{config.env_name}: {len(evaluation.tasks)} {kind}, {episodes}")
    print(evaluation.table())
    print(f"{evaluation.scope()}; saved with the tasks in {output}")


def _check_code(config: Config, config_path: Path, options: argparse.Namespace) -> None:
    """Refuse code that a run names unless it is trusted; a YAML file is of the user's own choice."""
    if not options.trust and config_path.suffix not in _YAML:
        check_code(config, "add --trust", samples=True)


def _config_to_train(options: argparse.Namespace) -> Path:
    """Return the config that is given, that of the run to be resumed, or the default."""
    given = _chosen_config(options)
    if given is not None or not options.resume:
        return given or _DEFAULT_CONFIG
    folder = options.output_folder or _default_folder(_DEFAULT_CONFIG, options.method or "maml", resume=True)
    begun = _begun(argparse.Namespace(output_folder=folder, seeds=options.seeds))
    return begun[0] if begun else _DEFAULT_CONFIG


def _begun(options: argparse.Namespace) -> list[Path]:
    """Return the configs of those runs that have begun already."""
    return [run / "config.json" for run in _run_folders(options).values() if (run / "config.json").is_file()]


def _check_outputs(options: argparse.Namespace, config_path: Path) -> None:
    """Refuse files that cannot be written, or that must not be, before any work is done; name those that are not given.

    Raises:
        ConfigError: If one is there and is not to be replaced, is read by the same command, or cannot be written.
    """
    named = {"--output": options.output, "--save-tasks": options.save_tasks}
    if options.output is None:
        # Reports take evaluation.npz of a run for its tests.
        file = "training-tasks.npz" if options.training_tasks else "evaluation.npz"
        options.output = _default_output(config_path, file)
        check_creatable(options.output.parent, "--output")
    used = {"--config": config_path, "--tasks": options.tasks}
    for option, path in named.items():
        if path is None:
            continue
        check_writable(path, option)
        for other, file in {**used, **named}.items():
            if other != option and file is not None and os.path.realpath(file) == os.path.realpath(path):
                raise ConfigError(f"{option} and {other} name the same file, {path}; choose another {option}")
        if path.exists() and not options.overwrite:
            raise _exists(path, option)


def _check_has_policy(config_path: Path, choice: str) -> None:
    """Refuse a config without a run, whose trained policy would be looked for in vain."""
    if not (choice in ("last", "latest", "best") or choice.isdecimal()) or config_path.name == "config.json":
        return
    if not (config_path.parent / "checkpoints").is_dir():
        raise ConfigError(
            f"{config_path} is a config and no run, so there is no trained policy beside it; give the folder of a run, "
            "or a checkpoint by --checkpoint, or --checkpoint initial for one at random"
        )


def _path_or_name(text: str) -> str:
    return str(file_path(text))


def _chosen_config(options: argparse.Namespace, *, of_run: bool = False) -> Path | None:
    """Return the file of the config that is given: by its path, by its run's folder, or by the name of a shipped one.

    Args:
        options: of the command.
        of_run: whether a run is meant rather than a config.

    Raises:
        ConfigError: If there is no such config, or if two are given.
    """
    if options.config is not None and options.name is not None:
        raise ConfigError(f"two configs are given, {options.name} and --config {options.config}; give one of them")
    given = options.config or options.name
    if given is None:
        return None
    path = find_run(given)
    if (path / "config.json").is_file():
        return path / "config.json"
    if path.suffix or path.is_symlink() or (path.exists() and not path.is_dir()):
        return path
    try:
        return find_config(given)
    except ConfigError as error:
        if path.is_dir():
            raise ConfigError(f"{path} is no run, it has no config.json; give a run, or a YAML file") from None
        if of_run:
            hint = suggest(given, [*shipped_configs(), *(f"zoo:{name}" for name in zoo())])
            raise ConfigError(
                f"there is no run folder {given!r}, and no config of that name{hint} (`maml-rl zoo` lists trained "
                "policies, `maml-rl configs` configs)"
            ) from error
        raise


def _is_run(config_path: Path) -> bool:
    """Tell whether a config lies in the folder of a run; the zoo, whose policies do, is not to be written to."""
    return config_path.name == "config.json" and not config_path.resolve().is_relative_to(ZOO)


def _run_folders(options: argparse.Namespace) -> dict[int | None, Path]:
    """Return the folder of the run of each of the --seeds, or of the only run."""
    folder = options.output_folder
    return {None: folder} if options.seeds is None else {seed: folder / f"seed-{seed}" for seed in options.seeds}


def _default_folder(config_path: Path, method: str, *, resume: bool) -> Path:
    """Return the folder of a run that names none; a new one may get a number, and the newest is resumed."""
    if _is_run(config_path):
        # A run is resumed or overwritten where it is, or repeated beside that.
        return config_path.parent
    folder = Path("runs") / name_of(config_path)
    if method != "maml":
        folder = folder.with_name(f"{folder.name}-{method}")
    return (resume and newest_path(folder)) or folder


def _default_output(config_path: Path, file: str) -> Path:
    """Return the file of results that name none: `file` in the run's folder, or named after the config."""
    return config_path.parent / file if _is_run(config_path) else Path("runs") / f"{name_of(config_path)}.npz"


@contextmanager
def _reserved_output(options: argparse.Namespace, *, number: bool) -> Iterator[Path]:
    """Reserve the name of the results, so that of two tests at once neither replaces what the other has measured."""
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


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a config and of its algorithm that the command line may give."""
    values = {name: getattr(options, name) for name in Config.model_fields}
    given = {key: getattr(options, _ALGORITHM + key.replace("-", "_")) for key in options.algorithm_keys}
    section = {key: parse_value(value, f"--{key}") for key, value in given.items() if value is not None}
    if section:
        whole = parse_value(values["algorithm_settings"] or "{}", f"--{SECTION}")
        values["algorithm_settings"] = {**whole, **section} if isinstance(whole, dict) else whole
    return values


def _overridden(config: Config, values: dict[str, Any]) -> Config:
    """Replace the settings that the command line gives, written as in a config."""
    given = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return config.override({key: _parsed(value, f"--{key}") for key, value in given.items()})


def _parsed(value: Any, option: str) -> Any:
    """Return what an option means as YAML; a list may be written as one or as several words."""
    if isinstance(value, list):
        words = ",".join(re.split(r"[\s,]+", " ".join(value).strip()))
        value = words if words.startswith("[") else f"[{words}]"
    return parse_value(value, option) if isinstance(value, str) else value


def _device(options: argparse.Namespace) -> Any:
    """Return the torch device, having made sure that it is there."""
    if options.device is not None and options.use_cuda and not options.device.startswith("cuda"):
        raise ConfigError(f"--use-cuda contradicts --device {options.device}; give one of them")
    name = options.device if options.device is not None else "cuda" if options.use_cuda else "cpu"

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            device = torch.device(name)
            # Some devices hold tensors, but no numbers.
            torch.ones(1, device=device).sum().item()
    # What a missing backend raises is as different as the backends.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"the device {name!r} cannot be used ({reason}); leave --device out for the CPU") from None
    return device


def _command(options: argparse.Namespace, name: str) -> str:
    """Return how to call another command, in the way in which this one was."""
    if options.prog.startswith("maml-rl") or name == "report":
        return f"maml-rl {name}"
    path = Path(sys.executable)
    interpreter = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    return f"{interpreter} {name}.py"
