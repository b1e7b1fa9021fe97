"""Write the catalog of the algorithms' settings, which `maml-rl train --help` reads without importing torch."""

import json
from dataclasses import asdict

from maml_rl.config.config import OF_LEARNERS
from maml_rl.config.settings import CATALOG, describe_settings
from maml_rl.metalearners import algorithms, find_metalearner


def catalog() -> str:
    """Return as JSON, for every registered algorithm, the general settings that it uses, and its own."""
    learners = {name: find_metalearner(name) for name in algorithms()}
    entries = {
        name: {
            "uses": [key for key in OF_LEARNERS if key in learner.uses],
            "settings": list(map(asdict, describe_settings(learner.Settings))),
        }
        for name, learner in learners.items()
    }
    return json.dumps(entries, indent=1) + "\n"


if __name__ == "__main__":
    CATALOG.write_text(catalog(), encoding="utf-8")
    print(f"written: {CATALOG}")
