import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from maml_rl.errors import CheckpointError
from maml_rl.runs.metrics import EventLog, MetricsLog, read_metrics


def write(path: Path, iterations: range, finished: int = 0) -> None:
    log = MetricsLog(path, finished)
    for iteration in iterations:
        log.write({"iteration": iteration, "kl": 0.1 * iteration})
    log.close()


def iterations_of(path: Path) -> list[int]:
    return [metrics["iteration"] for metrics in read_metrics(path)]


def test_each_iteration_is_one_line_of_json(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", range(3))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"iteration": i, "kl": 0.1 * i} for i in range(3)]


def test_line_is_with_the_operating_system_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"iteration": 0})
    assert iterations_of(tmp_path / "metrics.jsonl") == [0]
    log.close()


@pytest.mark.parametrize("torn", [b"", b'{"iter', b'{"iteration": 6, "kl": 0.', b"\xff\xfe", b"null\n", b"{}\n"])
def test_lines_beyond_the_checkpoint_are_dropped_and_none_is_doubled_or_lost(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(6))
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    with path.open("ab") as file:
        file.write(torn)
    write(path, range(4, 8), finished=4)
    assert iterations_of(path) == list(range(8))
    assert path.read_bytes().startswith(b"".join(kept))


def test_resuming_without_an_iteration_that_the_checkpoint_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"does not hold the iterations up to 3"):
        MetricsLog(path, finished=4)
    assert path.read_bytes() == before


def test_metrics_moved_away_are_missed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(4, 6), finished=4)
    assert "the iterations before 4 are missing" in caplog.text
    write(path, range(6, 7), finished=6)
    assert iterations_of(path) == [4, 5, 6]


def test_numbers_that_json_cannot_write_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"iteration": 0, "kl": float("nan"), "loss/after": float("inf")})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"iteration": 0, "kl": None, "loss/after": None}]


def test_events_hold_the_numbers_and_a_resumed_run_hides_what_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    for finished, iterations, value in ((0, range(5), 1.0), (3, range(3, 6), 2.0)):
        # TensorBoard reads files in the order of their names, which have the second and then the number of the writer
        # as text: of one second, the tenth writer's before the ninth's.
        monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda now=finished: 1e9 + now))
        log = EventLog(tmp_path, finished)
        for iteration in iterations:
            log.write({"iteration": iteration, "return/step_0": value, "kl": 0.5, "digest": "abc"})
        log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("return/step_0")] == [
        *((step, 1.0) for step in range(3)),
        *((step, 2.0) for step in range(3, 6)),
    ]
    assert sorted(events.Tags()["scalars"]) == ["return/step_0", "train/kl"]


def test_without_tensorboard_one_message_names_the_extra_and_warns_where_events_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (tmp_path / "resumed").mkdir()
    (tmp_path / "resumed" / "events.out.tfevents.1").touch()
    with caplog.at_level("INFO", "maml_rl"):
        for name in ("new", "resumed"):
            log = EventLog(tmp_path / name)
            log.write({"iteration": 0, "kl": 0.5})
            log.close()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert all("pip install 'maml-rl[tensorboard]'" in message for message in caplog.messages)
    assert not (tmp_path / "new").exists()
