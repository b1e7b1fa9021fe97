"""Training runs that take a second, and the part of their metrics that must be reproducible."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.errors import CheckpointError
from maml_rl.experiment.train import train
from maml_rl.runs.checkpoint import latest_intact
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


def assert_same_run(found: Path, wanted: Path) -> None:
    """Expect the same metrics but for times, and the same last checkpoint."""
    assert untimed(found) == untimed(wanted)
    mine, theirs = (latest_intact(folder / "checkpoints")[1] for folder in (found, wanted))
    assert (mine.iteration, mine.state) == (theirs.iteration, theirs.state)
    for found_values, wanted_values in ((mine.tensors, theirs.tensors), (mine.learner, theirs.learner)):
        assert found_values.keys() == wanted_values.keys()
        for name, value in wanted_values.items():
            same = found_values[name]
            assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value, name


def train_until(iteration: int, config: Config, folder: Path, **options: Any) -> None:
    """Train, and end right after `iteration` was recorded as a kill does: nothing more is saved."""

    def stop(metrics: Metrics) -> None:
        if metrics["iteration"] == iteration:
            # As where a checkpoint cannot be written.
            raise CheckpointError("killed")

    with pytest.raises(CheckpointError, match="killed"):
        train(config, folder, num_workers=0, on_iteration=stop, **options)


def exit_code(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Return the exit code of a command; argparse raises it."""
    try:
        return command(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def snapshot(folder: Path) -> dict[Path, bytes]:
    """Return the content of every file."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
