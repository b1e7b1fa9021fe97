"""`train --track`: what the trackers have of a run, read back by their own libraries from their files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maml_rl.cli import main as cli
from maml_rl.cli import tracking
from maml_rl.runs.metrics import read_metrics
from tests.small_runs import SMALL

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    *(pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)),
    # The report at the end of a run is measured by workers.
    pytest.mark.usefixtures("forked_workers"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(json.dumps(SMALL))
    return tmp_path


def train(*arguments: str) -> int:
    return cli.main(["train", "small.yaml", "--output-folder", "run", "--num-workers", "0", "--quiet", *arguments])


def test_mlflow_has_config_metrics_report_and_checkpoints(folder: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    assert train("--track", "mlflow") == 0
    (run,) = mlflow.search_runs(experiment_names=["maml-rl"], output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["env-name"] == SMALL["env-name"]
    rows = read_metrics("run/metrics.jsonl")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "return/step_1")
    assert [(each.step, each.value) for each in history] == [(row["iteration"], row["return/step_1"]) for row in rows]
    kept = {each.path for each in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert kept == {"config.json", "report.html", "checkpoints"}


def test_wandb_has_config_metrics_report_and_checkpoints(folder: Path) -> None:
    pytest.importorskip("wandb")
    # In a process of its own, with which the service of wandb ends.
    command = [sys.executable, "-m", "maml_rl", "train", "small.yaml", "--output-folder", "run", "--num-workers", "0"]
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([*command, "--quiet", "--track", "wandb"], env={**os.environ, **quiet}, check=True, timeout=200)
    (record,) = Path("run/wandb").glob("offline-run-*/*.wandb")
    data = record.read_bytes()
    # The file of records has texts as they are.
    for each in (b"return/step_1", b"2DNavigation-v0", b"report.html", b"tensors.safetensors", b"config.json"):
        assert each in data, each


def test_tensorboard_has_the_config_beside_the_numbers(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("--track", "tensorboard") == 0
    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert "return/step_1" in events.Tags()["scalars"]
    assert {"config/text_summary", "files/text_summary"} <= set(events.Tags()["tensors"])


def test_missing_tracker_is_refused_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("maml_rl.cli.tracking.find_spec", lambda name: None)
    assert train("--track", "wandb") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--track wandb needs wandb; run pip install 'maml-rl[wandb]'" in line
    assert not Path("run").exists()


def test_failing_tracker_ends_the_run_in_one_line_with_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")

    def fail(*arguments: object) -> None:
        raise OSError("the service is down")

    made = tracking.TRACKERS["tensorboard"]
    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", lambda *of_run: made(*of_run)._replace(log=fail))
    assert train("--track", "tensorboard") == 1
    assert "--track tensorboard: OSError" in capsys.readouterr().err
    assert (folder / "run/checkpoints/iteration-000001").is_dir()
    assert train("--resume") == 0
