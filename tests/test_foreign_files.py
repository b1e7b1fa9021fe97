"""Files of other people are opened in one way, which neither waits nor reads without end."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import maml_rl
from maml_rl.cli.main import main
from maml_rl.config import load_config
from maml_rl.errors import ConfigError, MamlRLError
from maml_rl.experience import load_histories
from maml_rl.experience.recording import FinishedRecording
from maml_rl.experiment.measure import measure
from maml_rl.experiment.search import open_study
from maml_rl.foreign_files import read_arrays, read_regular
from maml_rl.machine import available_memory
from maml_rl.results.comparable import read_runs
from maml_rl.runs.checkpoint import find_checkpoint
from maml_rl.runs.metrics import MetricsLog, inspect_metrics
from maml_rl.runs.run_folder import load_system
from maml_rl.runs.segments import Segment, read_segment
from maml_rl.task_distributions.task_files import read_tasks
from tests.report.conftest import NAVIGATION, make_run


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    """A file with holes, larger than any memory."""
    with path.open("wb") as file:
        file.truncate(2**42)


SEGMENT = f"{0:012}-{'0' * 16}.safetensors"
KINDS = [pipe, link_to_pipe, link_to_device, endless]


def saved_evaluation(path: Path) -> None:
    (group,), _ = read_runs([path.parent])
    _, notices = measure([group], 0)
    raise OSError(notices[0])


def trials(path: Path) -> None:
    pytest.importorskip("optuna")
    open_study(path, "a search")


def saved_system(path: Path) -> None:
    if not load_system(path.parent):
        raise OSError("as if it was not recorded")


def notice_of_metrics(path: Path) -> None:
    _, notices = read_runs([path.parent])
    raise OSError(next(notice for notice in notices if "metrics.jsonl cannot be read" in notice))


# Every reader, with the file of a run in the place of which something else is.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": ("config.json", load_config),
    "config of ones own": ("mine.yaml", load_config),
    "checksums": ("SHA256SUMS", lambda path: load_config(path.with_name("config.json"))),
    "system": ("system.json", saved_system),
    "metrics": ("metrics.jsonl", inspect_metrics),
    "metrics of runs": ("metrics.jsonl", notice_of_metrics),
    "metrics of a resumed run": ("metrics.jsonl", lambda path: MetricsLog(path, 1)),
    "metrics of a run that begins": ("metrics.jsonl", lambda path: MetricsLog(path)),
    "tasks": ("tasks.json", lambda path: read_tasks(path, "2DNavigation-v0")),
    "evaluation": ("evaluation.npz", saved_evaluation),
    "trials": ("studies.db", trials),
    "checkpoint": ("checkpoints/iteration-000001/state.json", lambda path: find_checkpoint(1, path.parents[1])),
    "checksums of a checkpoint": (
        "checkpoints/iteration-000001/SHA256SUMS",
        lambda path: find_checkpoint(1, path.parents[1]),
    ),
    "tensors": ("checkpoints/iteration-000001/tensors.safetensors", lambda path: find_checkpoint(1, path.parents[1])),
    "segment": (
        SEGMENT,
        lambda path: read_segment(path.parent, Segment(first=0, file=path.name, sha256="0" * 64, size=9), "again"),
    ),
    "recording": ("recorded/recording/recording.json", lambda path: load_histories(path.parents[1])),
    "recording to be shown": ("recorded/recording/recording.json", lambda path: FinishedRecording(path.parents[1])),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "finished", {**NAVIGATION, "num-batches": 1})


# Every reader with one kind, and those that open files otherwise with all.
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        (reader, kind)
        for reader in READERS
        for kind in KINDS
        if kind is pipe or reader in ("config", "metrics of a run that begins", "trials")
    ],
)
def test_what_is_no_file_or_too_large_is_refused_at_once(
    reader: str, kind: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    name, read = READERS[reader]
    if reader == "metrics of a run that begins" and kind is endless:
        return  # It is cut to nothing.
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    kind(path)
    with pytest.raises((OSError, MamlRLError)) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
def test_commands_do_not_wait_for_the_metrics_of_a_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "metrics.jsonl").unlink()
    pipe(run / "metrics.jsonl")
    assert main(["diagnose", str(run)]) == 0
    assert "metrics.jsonl cannot be read" in capsys.readouterr().out
    more = ["--num-batches", "2", "--num-workers", "0", "--quiet"]
    assert main(["train", "--resume", "--output-folder", str(run), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "metrics.jsonl" in line


@pytest.mark.parametrize("finished_iterations", [0, 1])
def test_metrics_are_never_written_through_a_link(finished_iterations: int, finished: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    content = (finished / "metrics.jsonl").read_bytes()
    precious.write_bytes(content)
    (tmp_path / "metrics.jsonl").symlink_to(precious)
    # Those of a run that goes on are rewritten beside the link, which is replaced.
    with nullcontext() if finished_iterations else pytest.raises(OSError, match="symbolic link"):
        log = MetricsLog(tmp_path / "metrics.jsonl", finished_iterations)
        log.write({"iteration": finished_iterations})
        log.close()
    assert precious.read_bytes() == content


def test_evaluation_that_expands_beyond_memory_is_a_notice(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    np.savez_compressed(run / "evaluation.npz", returns=np.zeros(100_000))
    monkeypatch.setattr("maml_rl.machine.total_memory", lambda: 100_000)
    (group,), _ = read_runs([run])
    _, (notice,) = measure([group], 0)
    assert "would take at least" in notice


def test_arrays_beyond_memory_are_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "large.npz", zeros=np.zeros(100_000))
    monkeypatch.setattr("maml_rl.machine.total_memory", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"^[^:]*large\.npz would take at least .* GiB of memory"):
        read_arrays(tmp_path / "large.npz")


def test_regular_file_is_read_whole_also_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"abc"
    assert read_regular(tmp_path / "file", 3) == b"abc"
    with pytest.raises(OSError, match="it has 3 bytes, more than 2"):
        read_regular(tmp_path / "file", 2)
    with pytest.raises(OSError, match="it is a folder, not a file"):
        read_regular(tmp_path)
    assert (available_memory() or 2**41) < 2**42


# Modules that open files otherwise: those of the system, of the package itself, or that are written.
OTHERWISE = {
    "atomic files": "runs/atomic_files.py",
    "locks of trials": "experiment/search.py",
    "nothing": "samplers/work/child/process_setup.py",
    "arrays of a replay of our own": "experience/replay.py",
    "cluster": "samplers/work/ray/connection.py",
    "the package's catalog": "config/settings.py",
    "the package's certified tasks": "experiment/certified.py",
    "the package's configs and zoo": "cli/listing.py",
    "the package's page": "report/page.py",
    "the package's style": "report/plot.py",
    "the package's references": "experiment/evaluate.py",
    "sources of modules": "samplers/work/ray/source_digests.py",
    "system": "machine.py",
    "system's clocks": "cli/check_env.py",
    "system's processes": "samplers/work/child/launcher.py",
    "system's processors": "runs/system.py",
    "terminal": "cli/console.py",
    "the one way": "foreign_files.py",
    "written metrics": "runs/metrics.py",
    "written set of Minari": "experience/minari_data_set.py",
    "what is installed": "runs/trust.py",
}


def test_files_are_opened_in_one_way() -> None:
    package = Path(maml_rl.__file__).parent
    opens = re.compile(
        r"\b(open|read_bytes|read_text|fromfile|memmap|(np|numpy|torch|pickle)\.load|loadtxt|load_file|safe_open|h5py\.File)\("
    )
    opening = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if opens.search(path.read_text(encoding="utf-8"))
    }
    assert opening == set(OTHERWISE.values())
