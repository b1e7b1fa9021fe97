"""Small runs to report on, made once; and what a test needs of the machine."""

import ctypes.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, DRIVER, Browser, chromium

from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.experiment.train import train

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
    train(Config.from_mapping(Mapping("the test", settings)), folder, num_workers=0)
    return folder


@pytest.fixture(scope="session")
def navigation_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two seeds of one experiment; tests must not write to it."""
    folder = tmp_path_factory.mktemp("runs") / "navigation"
    for seed in (0, 1):
        make_run(folder / f"seed-{seed}", {**NAVIGATION, "seed": seed})
    return folder


@pytest.fixture(scope="session")
def compared_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A pretrained policy and an oracle, to go with the first of `navigation_runs`; tests must not write to them."""
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / method, {**NAVIGATION, "method": method}) for method in ("pretrain", "oracle")]


@pytest.fixture(scope="session")
def cheetah_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with pictures; tests must not write to it."""
    return make_run(tmp_path_factory.mktemp("runs") / "cheetah", CHEETAH)


@pytest.fixture
def opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test where nothing can be drawn; there is no screen for the others."""
    if ctypes.util.find_library("EGL") is None:
        pytest.skip("no EGL on this machine; scripts/install-system-packages installs it")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def browser() -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium on this machine; scripts/install-system-packages installs it")
    with chromium() as running:
        yield running
