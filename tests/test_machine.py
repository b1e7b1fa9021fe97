from pathlib import Path

import psutil
import pytest

from maml_rl import machine
from maml_rl.envs import make_vector_env
from maml_rl.errors import ConfigError
from tests.envs.third_party import PixelEnv


def test_memory_of_a_machine_is_that_reported_by_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_LIMIT_OF_CONTAINER", tmp_path / "absent")
    assert machine.total_memory() == pytest.approx(psutil.virtual_memory().total, rel=0.05)


@pytest.mark.parametrize(("limit", "total"), [("1073741824\n", 2**30), ("max\n", None)])
def test_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, total: int) -> None:
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(machine, "_LIMIT_OF_CONTAINER", tmp_path / "memory.max")
    assert machine.total_memory() == total or (total is None and (machine.total_memory() or 0) > 2**30)


def test_allocation_that_does_not_fit_is_refused_with_both_sizes_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 8 * 2**30)
    machine.refuse_if_too_large(8 * 2**30, "this", "eat less")
    with pytest.raises(ConfigError, match=r"this would take at least 12\.0 GiB .* has 8\.0; eat less"):
        machine.refuse_if_too_large(12 * 2**30, "this", "eat less")
    monkeypatch.setattr(machine, "total_memory", lambda: None)
    machine.refuse_if_too_large(12 * 2**30, "this", "eat less")


def test_available_memory_is_that_of_the_machine_or_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_LIMIT_OF_CONTAINER", tmp_path / "memory.max")
    assert machine.available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine.available_memory() == 600_000
    monkeypatch.setattr(machine, "_MEMORY_OF_MACHINE", tmp_path / "absent")
    assert machine.available_memory() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() is None


def test_images_that_do_not_fit_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 2**20)
    with pytest.raises(ConfigError) as caught:
        make_vector_env(PixelEnv, {}, 30_000)
    assert "one observation of Box(0, 255, (4, 4, 3), uint8) for each of 30,000 slots would take" in str(caught.value)
    assert str(caught.value).endswith("use fewer slots (slots_per_task) or smaller observations")
    assert "\n" not in str(caught.value)
