from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from maml_rl import machine
from maml_rl.envs import make_vector_env
from maml_rl.errors import ConfigError
from tests.envs.third_party import PixelEnv


def test_memory_of_a_machine_is_that_reported_by_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "absent")
    assert machine.total_memory() == pytest.approx(psutil.virtual_memory().total, rel=0.05)


# The groups of a container, of a job of Slurm or a slice of systemd (both versions), and of a container that sees the
# path of the host.
GROUPS = {
    "container": ("0::/\n", {"memory.max": "{}", "memory.current": "400000"}),
    "job": (
        "0::/slurm/job_7/step_0\n",
        {
            "slurm/job_7/step_0/memory.max": "max",
            "slurm/job_7/step_0/memory.current": "1",
            "slurm/job_7/memory.max": "{}",
            "slurm/job_7/memory.current": "400000",
            "slurm/memory.max": "99999999999",
            "slurm/memory.current": "5",
        },
    ),
    "version 1": (
        "4:memory:/slice/run\n3:cpu,cpuacct:/\n0::/\n",
        {
            "memory/slice/run/memory.limit_in_bytes": "9223372036854771712",
            "memory/slice/run/memory.usage_in_bytes": "1",
            "memory/slice/memory.limit_in_bytes": "{}",
            "memory/slice/memory.usage_in_bytes": "400000",
        },
    ),
    "path of the host": ("0::/docker/abc\n", {"memory.max": "{}", "memory.current": "400000"}),
}


@pytest.fixture(params=GROUPS)
def limited_to(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str], None]]:
    """Gives the group of this process a limit."""
    lines, files = GROUPS[request.param]

    def limit(value: str) -> None:
        machine.total_memory.cache_clear()
        (tmp_path / "own").write_text(lines)
        for name, content in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.format(value) + "\n")

    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    yield limit
    machine.total_memory.cache_clear()


def test_allocation_that_does_not_fit_is_refused_with_both_sizes_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 8 * 2**30)
    machine.refuse_if_too_large(8 * 2**30, "this", "eat less")
    with pytest.raises(ConfigError, match=r"this would take at least 12\.0 GiB .* has 8\.0; eat less"):
        machine.refuse_if_too_large(12 * 2**30, "this", "eat less")
    monkeypatch.setattr(machine, "total_memory", lambda: None)
    machine.refuse_if_too_large(12 * 2**30, "this", "eat less")


def test_smallest_limit_of_the_groups_of_a_process_counts(
    limited_to: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert machine.available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    limited_to("1073741824")
    assert machine.total_memory() == 2**30
    limited_to("max")
    assert (machine.total_memory() or 0) > 2**30
    limited_to("1000000")
    assert machine.available_memory() == 600_000
    monkeypatch.setattr(machine, "_MEMORY_OF_MACHINE", tmp_path / "absent")
    assert machine.available_memory() == 600_000
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "absent")
    assert machine.available_memory() is None


def test_images_that_do_not_fit_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 2**10)
    with pytest.raises(ConfigError) as caught:
        make_vector_env(PixelEnv, {}, 30)
    assert "one observation of Box(0, 255, (4, 4, 3), uint8) for each of 30 slots would take" in str(caught.value)
    assert str(caught.value).endswith("use fewer slots (slots_per_task) or smaller observations")
    assert "\n" not in str(caught.value)
