"""The command line of train.py and test.py: arguments in, one function called, errors as one line and an exit code."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from maml_rl.config import Config, load_config
from maml_rl.config_file import parse_value
from maml_rl.errors import CheckpointError, ConfigError, MamlRLError, TaskError

# torch is imported inside the commands: a child that is spawned imports this module again, and must stay light.

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

_ROOT = Path(__file__).resolve().parent.parent
_DEFAULT_CONFIG = _ROOT / "configs" / "maml" / "2d-navigation.yaml"


def run_train(arguments: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """Run train.py, or the command that `prog` names, and return its exit code."""
    parser = Parser(
        prog=prog, description="Meta-train a policy by MAML-TRPO on a family of tasks, or one to compare it with."
    )
    parser.add_argument("--config", type=Path, help="YAML of the experiment (default: 2D navigation)")
    parser.add_argument("--output-folder", type=Path, help="where the run goes (default: runs/<name of the config>)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the output folder")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    parser.add_argument("--profile", action="store_true", help="measure the share of each stage")
    _add_common(parser)
    settings = parser.add_argument_group("settings of the config, as YAML, to be replaced for this run")
    for name, field in Config.model_fields.items():
        settings.add_argument(f"--{field.alias}", dest=name, metavar="VALUE", help=field.description)
    return run_command(parser, arguments, _train)


def run_test(arguments: Sequence[str] | None = None, prog: str = "test.py") -> int:
    """Run test.py, or the command that `prog` names, and return its exit code."""
    parser = Parser(prog=prog, description="Adapt a trained policy to tasks it never saw, and measure its returns.")
    parser.add_argument("--config", type=Path, required=True, help="a run's config.json, or a YAML")
    parser.add_argument(
        "--policy", help="a checkpoint, or 'latest' (the default) or 'best' of the run that the config belongs to"
    )
    parser.add_argument("--output", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    parser.add_argument("--num-batches", type=positive, default=1, help="batches of tasks (default: 1)")
    parser.add_argument("--meta-batch-size", type=positive, default=40, help="tasks in each (default: 40)")
    parser.add_argument("--num-steps", type=not_negative, help="gradient steps (default: the config's)")
    parser.add_argument("--fast-lr", help="step size (default: the config's)")
    parser.add_argument("--fast-batch-size", help="episodes for each task and step (default: the config's)")
    parser.add_argument(
        "--halve-step-size",
        choices=["never", "once", "always"],
        help="halve it after the first step (once) or after every step (always; default: the config's)",
    )
    parser.add_argument("--seed", help="seed of tasks and episodes (default: the config's)")
    _add_common(parser)
    return run_command(parser, arguments, _test)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line; takes no abbreviations, which would change meaning when an option is added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the arguments, and exit."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (--help lists the options)\n")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-workers", type=not_negative, help="processes (default: the cores; 0: this one alone)")
    parser.add_argument("--device", help="where the policy and the update run (default: cpu)")
    parser.add_argument("--use-cuda", action="store_true", help="the same as --device cuda")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: info)"
    )


def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, command: Callable[[argparse.Namespace], None]
) -> int:
    """Run a command, and turn what ends it into one line and an exit code."""
    options = parser.parse_args(arguments)
    try:
        with _log_to_standard_error(parser.prog, options.log_level):
            command(options)
    except KeyboardInterrupt:
        has_run = hasattr(options, "resume") and (_folder_of(options) / "config.json").is_file()
        remedy = "; the same command with --resume goes on" if has_run else ""
        print(f"{parser.prog}: interrupted{remedy}", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, CheckpointError, TaskError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (MamlRLError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return FAILED
    return 0


@contextmanager
def _log_to_standard_error(prog: str, level: str) -> Iterator[None]:
    """Show the package's log while a command runs; a caller's own logging is as it was afterwards."""
    root, package = logging.getLogger(), logging.getLogger("maml_rl")
    handler, level_before = logging.StreamHandler(), package.level
    handler.setFormatter(logging.Formatter(f"{prog}: %(message)s"))
    added = not root.handlers
    if added:
        root.addHandler(handler)
    package.setLevel(level.upper())
    try:
        yield
    finally:
        package.setLevel(level_before)
        if added:
            root.removeHandler(handler)


def _train(options: argparse.Namespace) -> None:
    config_path, folder = options.config or _DEFAULT_CONFIG, _folder_of(options)
    if options.resume and options.config is None and (folder / "config.json").is_file():
        config_path = folder / "config.json"
    config = _overridden(load_config(config_path), {name: getattr(options, name) for name in Config.model_fields})
    device = _device(options)

    from tqdm.contrib.logging import logging_redirect_tqdm

    from maml_rl.progress import TrainingProgress
    from maml_rl.training import train

    with logging_redirect_tqdm(), TrainingProgress(config.num_batches, config.training_steps) as progress:
        train(
            config,
            folder,
            num_workers=options.num_workers,
            device=device,
            resume=options.resume,
            overwrite=options.overwrite,
            profile=options.profile,
            on_iteration=progress,
        )
    print(progress.summary())
    if options.profile:
        print(progress.profile())
    print(f"the results lie in {folder}; to test the policy on new tasks:")
    print(f"  {_interpreter()} test.py --config {folder}/config.json --output {folder}/evaluation.npz")


def _test(options: argparse.Namespace) -> None:
    if options.output.exists() and not options.overwrite:
        raise ConfigError(f"{options.output} exists; replace it by --overwrite, or choose another --output")
    if not options.output.parent.is_dir():
        raise ConfigError(f"there is no folder {options.output.parent} for the --output; make it first")
    names = ("seed", "fast_lr", "fast_batch_size", "halve_step_size")
    config = _overridden(load_config(options.config), {name: getattr(options, name) for name in names})
    num_steps = config.evaluation_steps if options.num_steps is None else options.num_steps
    device = _device(options)

    from tqdm import tqdm

    from maml_rl.checkpoint import check_architecture
    from maml_rl.evaluation import evaluate, step_schedule
    from maml_rl.experiment import make_experiment

    experiment = make_experiment(config, device)
    path, checkpoint = _find_checkpoint(options.policy, options.config.parent / "checkpoints")
    check_architecture(checkpoint.tensors, experiment.policy.state_dict(), path)
    experiment.policy.load_state_dict(checkpoint.tensors)
    with tqdm(total=options.num_batches, unit="batch", disable=None) as bar:
        evaluation = evaluate(
            experiment,
            num_batches=options.num_batches,
            meta_batch_size=options.meta_batch_size,
            step_sizes=step_schedule(config.fast_lr, num_steps, halve=config.halve_step_size),
            num_workers=options.num_workers,
            on_batch=bar.update,
        )
    evaluation.save(options.output)
    print(f"{config.env_name}: {len(evaluation.tasks)} new tasks, {config.fast_batch_size} episodes before each step")
    print(evaluation.table())
    print(f"saved with the tasks in {options.output}")


def _find_checkpoint(choice: str | None, folder: Path) -> Any:
    from maml_rl.checkpoint import best_intact, latest_intact, load_checkpoint

    match choice:
        case None | "latest":
            return latest_intact(folder)
        case "best":
            return best_intact(folder)
        case _:
            return Path(choice), load_checkpoint(choice)


def _folder_of(options: argparse.Namespace) -> Path:
    """Return the folder of the run, by default named after the config; a run's config.json is named after its run."""
    if options.output_folder is not None:
        return Path(options.output_folder)
    path: Path = options.config or _DEFAULT_CONFIG
    return Path("runs") / (path.resolve().parent.name if path.name == "config.json" else path.stem)


def _overridden(config: Config, values: dict[str, Any]) -> Config:
    """Replace the settings that the command line gives, written as in a config."""
    given = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return config.override(
        {key: parse_value(value, f"--{key}") if isinstance(value, str) else value for key, value in given.items()}
    )


def _device(options: argparse.Namespace) -> Any:
    """Return the torch device, having made sure that it is there."""
    if options.device is not None and options.use_cuda and not options.device.startswith("cuda"):
        raise ConfigError(f"--use-cuda contradicts --device {options.device}; give one of them")
    name = options.device or ("cuda" if options.use_cuda else "cpu")

    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the device {name!r} cannot be used ({reason}); leave --device out for the CPU") from None
    return device


def _interpreter() -> str:
    """Return how to call this Python from here: .venv/bin/python where there is one."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def positive(text: str) -> int:
    """Read an option that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def not_negative(text: str) -> int:
    """Read an option that counts something, perhaps nothing."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {text}")
    return number
