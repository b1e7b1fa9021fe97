"""Write the catalog of the algorithms' settings, which `maml-rl train --help` reads without importing torch."""

import json
from dataclasses import asdict

from maml_rl.config.reference import CATALOG, describe_settings
from maml_rl.metalearners import algorithms, find_metalearner


def catalog() -> str:
    """Return the settings of every registered algorithm as JSON."""
    settings = {name: describe_settings(find_metalearner(name).Settings) for name in algorithms()}
    return json.dumps({name: list(map(asdict, each)) for name, each in settings.items()}, indent=1) + "\n"


if __name__ == "__main__":
    CATALOG.write_text(catalog(), encoding="utf-8")
    print(f"written: {CATALOG}")
