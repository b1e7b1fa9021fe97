"""Every registered algorithm in a config that trains in a second.

The learners of histories read the folder "histories" in the current folder, which `histories.record` writes.
"""

from collections.abc import Container, Iterable
from typing import Any

import pytest

from maml_rl.config import Config
from tests.metalearners.histories import bandit_config
from tests.small_runs import config_of

# Small settings of the algorithms that adapt by a memory, through whole trials.
OF_TRIALS: dict[str, dict[str, object]] = {
    "rl2": {"hidden-size": 8, "num-minibatches": 2, "layers": [6], "normalize-observations": True},
    "rsac": {"hidden-size": 8, "batch-size": 3, "num-updates": 2, "warmup-trials": 4, "buffer-steps": 40},
    "amago": {
        "hidden-size": 8,
        "context": 12,
        "critic-layers": [6],
        "num-bins": 9,
        # Of values of up to 10,000, rounding would hide the small ones of the first steps.
        "largest-value": 10.0,
        "batch-size": 3,
        # Values begin at exactly zero: what follows a step counts once the targets have moved.
        "num-updates": 4,
        "tau": 0.5,
        "warmup-trials": 4,
        "buffer-steps": 40,
        "policy-gradient-share": 0.1,
    },
    # The replay drops trials from the third meta-update on; some beliefs are decoded, and states are predicted, too.
    "varibad": {
        "encoder-size": 8,
        "replay-steps": 280,
        "belief-trials": 4,
        "belief-steps": 7,
        "state-coefficient": 1.0,
        "num-minibatches": 2,
    },
}


# Settings of those that adapt by a latent context.
OF_CONTEXTS: dict[str, dict[str, object]] = {
    "pearl": {
        "context-size": 2,
        "encoder-sizes": [6],
        "batch-size": 5,
        "context-batch": 4,
        "tasks-per-update": 2,
        "num-updates": 2,
        "warmup-steps": 20,
        "buffer-steps": 500,
    }
}


# Settings of those that learn from recorded histories, and sample only in tests.
OF_HISTORIES = ("ad", "dpt", "amago-offline")

# One of each kind of update, whose code the others share.
KINDS = ("maml-trpo", "promp", "reptile", "cavia", "rl2", "varibad", "rsac", "pearl", "amago", "amago-offline", "ad")


def once_a_kind(algorithms: Iterable[str], kinds: Container[str] = KINDS) -> list[Any]:
    """Return parameters of a test that tries one algorithm of each kind by day, and the others at night."""
    return [name if name in kinds else pytest.param(name, marks=pytest.mark.nightly) for name in algorithms]


def small(algorithm: str, **values: object) -> Config:
    keys = {key.replace("_", "-"): value for key, value in values.items()}
    if algorithm in OF_HISTORIES:
        config = bandit_config(algorithm, histories="histories", num_updates=2)
        return config.override({"num-batches": 3, "evaluate-every": 2, "evaluation-tasks": 2, **keys})
    if algorithm in OF_CONTEXTS:
        keys |= {"algorithm-settings": OF_CONTEXTS[algorithm]}
    if algorithm in OF_TRIALS:
        keys |= {"observe-last": True, "algorithm-settings": OF_TRIALS[algorithm]}
    return config_of(num_steps=2, num_batches=3).override({"algorithm": algorithm, **keys})
