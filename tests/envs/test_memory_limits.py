from pathlib import Path

import psutil
import pytest

from maml_rl.envs import memory
from maml_rl.errors import ConfigError


def test_memory_of_a_machine_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_LIMIT_OF_CONTAINER", tmp_path / "absent")
    assert memory.total_memory() == pytest.approx(psutil.virtual_memory().total, rel=0.05)


@pytest.mark.parametrize(("limit", "total"), [("1073741824\n", 2**30), ("max\n", None)])
def test_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, total: int) -> None:
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(memory, "_LIMIT_OF_CONTAINER", tmp_path / "memory.max")
    assert memory.total_memory() == total or (total is None and (memory.total_memory() or 0) > 2**30)


def test_what_does_not_fit_is_refused_with_both_sizes_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 8 * 2**30)
    memory.check_memory(8 * 2**30, "this", "eat less")
    with pytest.raises(ConfigError, match=r"this would take at least 12\.0 GiB .* has 8\.0; eat less"):
        memory.check_memory(12 * 2**30, "this", "eat less")
    monkeypatch.setattr(memory, "total_memory", lambda: None)
    memory.check_memory(12 * 2**30, "this", "eat less")
