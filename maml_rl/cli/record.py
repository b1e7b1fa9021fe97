"""The command `maml-rl record`: learning histories of single tasks."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from maml_rl.cli.console import (
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
    utf8,
)
from maml_rl.cli.run_options import add_config, chosen_config, overridden, path_or_name, refuse_untrusted_code
from maml_rl.config.config import load_config
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_creatable

# torch is imported inside the functions: a spawned worker imports this module again, and must stay light.


def run_record(arguments: Sequence[str], prog: str) -> int:
    """Record learning histories, and return the exit code."""
    parser = Parser(
        prog=prog, description="Train one learner for each task, all in parallel, and record everything that they do."
    )
    add_config(parser, "the family and its settings: a name that `maml-rl configs` lists, or a file")
    parser.add_argument("--tasks", type=positive, default=100, help="learners, one of each task (default: 100)")
    parser.add_argument(
        "--learner",
        default="ppo",
        help="ppo (the default), q-learning, or a classical algorithm: ucb1, thompson, psrl, random",
    )
    parser.add_argument(
        "--learner-settings",
        default="{}",
        help="settings of ppo, q-learning or ucb1, as YAML: '{learning-rate: 0.001, gamma: 0.9}'",
    )
    parser.add_argument(
        "--iterations", type=positive, help="updates of each learner (default: the config's num-batches)"
    )
    parser.add_argument(
        "--episodes", type=positive, help="episodes between two updates (default: fast-batch-size of the config)"
    )
    parser.add_argument("--seed", type=not_negative, help="seed of all random streams (default: that of the config)")
    parser.add_argument(
        "--output", type=file_path, required=True, help="folder of data sets, to which this one is added"
    )
    parser.add_argument(
        "--source",
        type=path_or_name,
        metavar="RUN",
        help="record the policy of a run, checkpoint by checkpoint",
    )
    parser.add_argument("--resume", action="store_true", help="continue the recording there, or start it")
    parser.add_argument("--no-minari", action="store_true", help="write only what maml_rl itself reads")
    parser.add_argument("--author", type=utf8, default="maml_rl", help="for the metadata (default: maml_rl)")
    parser.add_argument("--author-email", type=utf8, default="", help="for the metadata")
    parser.add_argument("--code-permalink", type=utf8, default="", help="for the metadata: link to the code")
    parser.add_argument("--description", type=utf8, default="", help="for the metadata (default: of what is recorded)")
    add_placement(parser)
    add_trust(parser)
    add_log_level(parser)
    return run_command(parser, arguments, _record, _how_to_go_on)


def _record(options: argparse.Namespace) -> None:
    from tqdm.contrib.logging import logging_redirect_tqdm

    check_creatable(options.output, "--output")
    if options.source is not None:
        _record_run(options)
        return
    config_path = chosen_config(options)
    if config_path is None:
        raise ConfigError("name a config, whose family is recorded, as in `maml-rl record dark-room --output runs/h`")
    config = overridden(load_config(config_path), {"fast-batch-size": options.episodes, "seed": options.seed})
    refuse_untrusted_code(config, config_path, options)
    chosen = {key: value for key, value in placement(options).items() if key != "num-workers"}
    config = config.override(chosen)
    settings = parse_value(options.learner_settings, "--learner-settings")
    if not isinstance(settings, dict):
        raise ConfigError(f"--learner-settings must be a mapping as '{{clip: 0.1}}', got {options.learner_settings!r}")

    from maml_rl.cli.progress import PartProgress
    from maml_rl.experiment.record import record

    with ending_in_order(), logging_redirect_tqdm(), PartProgress("iteration") as progress:
        recorded = record(
            config,
            options.output,
            num_tasks=options.tasks,
            learner=options.learner,
            settings=settings,
            num_iterations=options.iterations,
            num_workers=options.num_workers,
            on_iteration=progress,
            **_common(options),
        )
    _say_where(recorded, options)


def _record_run(options: argparse.Namespace) -> None:
    from tqdm.contrib.logging import logging_redirect_tqdm

    from maml_rl.cli.progress import PartProgress
    from maml_rl.experiment.record import record_run

    unused = {"a config": chosen_config(options), "--iterations": options.iterations, "--episodes": options.episodes}
    for name, value in unused.items():
        if value is not None:
            raise ConfigError(f"--source takes everything from its run; leave {name} out")
    with ending_in_order(), logging_redirect_tqdm(), PartProgress("checkpoint") as progress:
        recorded = record_run(
            options.source,
            options.output,
            num_tasks=options.tasks,
            num_workers=options.num_workers,
            trust=options.trust,
            on_iteration=progress,
            **_common(options),
        )
    _say_where(recorded, options)


def _common(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that both ways to record have."""
    from maml_rl.experience.minari_data_set import Credits

    credits = Credits(options.author, options.author_email, options.code_permalink, options.description)
    return {"resume": options.resume, "minari": not options.no_minari, "credits": credits}


def _say_where(recorded: Any, options: argparse.Namespace) -> None:
    print(f"the histories are in {recorded.folder}; maml_rl.experience.load_histories reads them")
    if not options.no_minari:
        variable = f"MINARI_DATASETS_PATH={shlex.quote(str(options.output))}"
        print(f"{variable} and minari.load_dataset({recorded.identifier!r}) read them, too")


def _how_to_go_on(options: Any) -> str:
    return "; what is recorded is kept, and the same command with --resume continues it"
