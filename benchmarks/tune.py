"""Searches settings of runs of the suite: `maml-rl tune` with `suite:FAMILY/METHOD` as its config."""

import sys
from collections.abc import Sequence

from benchmarks.suite import SUITE
from maml_rl.cli.tune import config_of, run_tune
from maml_rl.config import Config
from maml_rl.errors import ConfigError

_OF_SUITE = "suite:"
RESERVED = {seed for seeds in SUITE.seeds.values() for seed in seeds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials that the CSV file lacks, and return the exit code."""
    return run_tune(arguments, "python -m benchmarks.tune", base_config, RESERVED)


def base_config(name: str) -> Config:
    """Return the config with a name, in a YAML file, or of a training of the suite.

    Raises:
        ConfigError: If there is none.
    """
    if not name.startswith(_OF_SUITE):
        return config_of(name)
    family_name, _, method_name = name.removeprefix(_OF_SUITE).partition("/")
    family, method = SUITE.families.get(family_name), SUITE.methods.get(method_name)
    if family is None or method is None:
        raise ConfigError(
            f"{name} is not a training of the suite; give {_OF_SUITE}FAMILY/METHOD with a family of "
            f"{', '.join(SUITE.families)} and a method of {', '.join(SUITE.methods)}"
        )
    return method.config(family, seed=0)


if __name__ == "__main__":
    sys.exit(main())
