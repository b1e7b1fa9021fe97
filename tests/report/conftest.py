"""Small runs to report on, made once."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from maml_rl.config import Config
from maml_rl.experiment.measure import measure
from maml_rl.experiment.train import train
from maml_rl.results.comparable import read_runs
from maml_rl.results.verdict import GroupResult

NAVIGATION = {
    "env-name": "2DNavigation-v0",
    "max-episode-steps": 12,
    "hidden-sizes": [8],
    "fast-batch-size": 4,
    "meta-batch-size": 3,
    "num-batches": 3,
    "cg-iters": 2,
    "evaluation-steps": 2,
}
CHEETAH = {**NAVIGATION, "env-name": "HalfCheetahDir-v5", "num-batches": 1}


def make_run(folder: Path, settings: dict[str, object]) -> Path:
    train(Config.model_validate(settings), folder, num_workers=0)
    return folder


def measured(folders: Sequence[Path], tasks: int | Path) -> tuple[list[GroupResult], list[str]]:
    """Read runs, and measure them as a report does."""
    return measure(read_runs(folders)[0], tasks, placement={"num-workers": 0}, pictures=True, with_untrained=True)


@pytest.fixture(scope="session")
def navigation_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two seeds of one experiment; tests must not write to it."""
    folder = tmp_path_factory.mktemp("runs") / "navigation"
    for seed in (0, 1):
        make_run(folder / f"seed-{seed}", {**NAVIGATION, "seed": seed})
    return folder


@pytest.fixture(scope="session")
def compared_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A pretrained policy and an oracle, for the first of `navigation_runs`; tests must not write to them."""
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / method, {**NAVIGATION, "method": method}) for method in ("pretrain", "oracle")]


@pytest.fixture(scope="session")
def cheetah_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with pictures; tests must not write to it."""
    return make_run(tmp_path_factory.mktemp("runs") / "cheetah", CHEETAH)
