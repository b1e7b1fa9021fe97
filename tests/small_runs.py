"""Training runs that take a second, and the part of their metrics that must be reproducible."""

import json
from pathlib import Path
from typing import Any

from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.runs.metrics import Metrics, read_metrics

SMALL = {
    "env-name": "2DNavigation-v0",
    "max-episode-steps": 10,
    "hidden-sizes": [8],
    "fast-batch-size": 4,
    "meta-batch-size": 3,
    "num-batches": 5,
    "cg-iters": 3,
    "checkpoint-every": 2,
}


def config_of(**values: Any) -> Config:
    settings = SMALL | {key.replace("_", "-"): value for key, value in values.items()}
    if "policy" in values:
        del settings["hidden-sizes"]
    return Config.from_mapping(parse_mapping(json.dumps(settings), "x.yaml"))


def untimed(folder: Path) -> list[Metrics]:
    """Return the metrics without the times."""
    metrics = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in metrics]
