"""The command `maml-rl record`: learning histories of single tasks."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from maml_rl.cli.console import (
    Parser,
    add_placement,
    add_trust,
    ending_in_order,
    file_path,
    not_negative,
    placement,
    positive,
    run_command,
)
from maml_rl.cli.run_options import (
    add_config,
    chosen_config,
    mapping_option,
    overridden,
    path_or_name,
    refuse_untrusted_code,
)
from maml_rl.config.config import Config, load_config
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_creatable

# torch is imported inside the functions: a spawned worker imports this module again, and must stay light.

# Options that do not apply where the policy of a run is recorded.
_OF_LEARNERS = ("learner", "learner-settings", "iterations", "episodes", "seed")


def run_record(arguments: Sequence[str], prog: str) -> int:
    """Record learning histories, and return the exit code."""
    parser = Parser(
        prog=prog, description="Train one learner for each task, all in parallel, and record everything that they do."
    )
    add_config(parser, "the family and its settings: a name that `maml-rl configs` lists, or a file")
    parser.add_argument("--tasks", type=positive, default=100, help="learners, one for each task (default: 100)")
    parser.add_argument(
        "--learner", help="ppo (the default), q-learning, or a classical algorithm: ucb1, thompson, psrl, random"
    )
    parser.add_argument(
        "--learner-settings", help="settings of ppo, q-learning or ucb1, as YAML: '{learning-rate: 0.001, gamma: 0.9}'"
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
        "--source", type=path_or_name, metavar="RUN", help="record the policy of a run, checkpoint by checkpoint"
    )
    parser.add_argument("--resume", action="store_true", help="continue the recording there, or start it")
    parser.add_argument("--no-minari", action="store_true", help="write only what maml_rl itself reads")
    add_placement(parser)
    add_trust(parser)
    advice = "; what is recorded is kept, and the same command with --resume continues it"
    return run_command(parser, arguments, _record, lambda options: advice)


def _record(options: argparse.Namespace) -> None:
    check_creatable(options.output, "--output")
    learner = options.learner or "ppo"
    config = None
    if options.source is None:
        config = _to_learn(options)
    else:
        unused = {"a config": chosen_config(options)}
        unused |= {f"--{key}": getattr(options, key.replace("-", "_")) for key in _OF_LEARNERS}
        for name, value in unused.items():
            if value is not None:
                raise ConfigError(f"--source takes everything from its run; leave {name} out")

    from maml_rl.cli.progress import StepProgress
    from maml_rl.experiment.record import CLASSICAL, record, record_run

    if learner in CLASSICAL and options.iterations:
        raise ConfigError(
            f"{learner} goes through one trial of fast-batch-size episodes in each task; leave --iterations out"
        )
    with ending_in_order(), StepProgress("checkpoint" if config is None else "iteration") as progress:
        common: dict[str, Any] = {
            "num_tasks": options.tasks,
            "resume": options.resume,
            "minari": not options.no_minari,
            "on_iteration": progress,
        }
        if config is None:
            placed = placement(options)
            recorded = record_run(options.source, options.output, placement=placed, trust=options.trust, **common)
        else:
            given = "{}" if options.learner_settings is None else options.learner_settings
            settings = mapping_option(given, "--learner-settings", "{clip: 0.1}")
            recorded = record(config, options.output, learner=learner, settings=settings, **common)
    print(f"the histories are in {recorded.folder}; maml_rl.experience.load_histories reads them")
    if not options.no_minari:
        variable = f"MINARI_DATASETS_PATH={shlex.quote(str(options.output))}"
        print(f"{variable} and minari.load_dataset({recorded.identifier!r}) read them, too")


def _to_learn(options: argparse.Namespace) -> Config:
    config_path = chosen_config(options)
    if config_path is None:
        raise ConfigError("name a config, whose family is recorded, as in `maml-rl record dark-room --output runs/h`")
    given = {"fast-batch-size": options.episodes, "num-batches": options.iterations, "seed": options.seed}
    config = overridden(load_config(config_path), given)
    return refuse_untrusted_code(config, options).override(placement(options))
