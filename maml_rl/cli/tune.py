"""The command `maml-rl tune`: a search over settings of a config."""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from maml_rl.cli.console import (
    Parser,
    add_num_workers,
    add_trust,
    ending_in_order,
    file_path,
    not_negative,
    positive,
    positive_number,
    run_command,
)
from maml_rl.cli.run_options import key_values, path_or_name, refuse_untrusted_code
from maml_rl.config import load_config
from maml_rl.config.catalog import find_config
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError

# Of all trials and of the search: not that of a run that is reported.
_SEED = 7000


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
        "--seed", type=not_negative, default=_SEED, help=f"of all trials and of the search (default: {_SEED})"
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

    def tune(options: argparse.Namespace) -> None:
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
