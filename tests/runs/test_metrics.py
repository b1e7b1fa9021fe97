import errno
import json
import random
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from maml_rl.errors import CheckpointError
from maml_rl.runs.metrics import EventLog, MetricsLog, inspect_metrics, read_metrics


def write(path: Path, iterations: range, finished: int = 0) -> None:
    log = MetricsLog(path, finished)
    for iteration in iterations:
        log.write({"iteration": iteration, "kl": 0.1 * iteration})
    log.close()


def iterations_of(path: Path) -> list[int]:
    return [metrics["iteration"] for metrics in read_metrics(path)]


def test_each_iteration_is_one_line_of_json_with_its_checksum(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", range(3))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # The checksum is that of the line without it.
    assert [row.pop("crc32") for row in rows] == [f"{zlib.crc32(json.dumps(row).encode()):08x}" for row in rows]
    assert rows == [{"iteration": i, "kl": 0.1 * i} for i in range(3)]
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"iteration": 0, "kl": float("nan"), "loss/after": float("inf")})
    # A line is passed to the operating system immediately; what JSON cannot write becomes null.
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"iteration": 0, "kl": None, "loss/after": None}]
    log.close()


@pytest.mark.parametrize("torn", [b"", b'{"iter', b'{"iteration": 6, "kl": 0.', b"\xff\xfe", b"null\n", b"{}\n"])
def test_lines_after_the_checkpoint_are_dropped_and_none_is_repeated_or_lost(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(6))
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    with path.open("ab") as file:
        file.write(torn)
    write(path, range(4, 8), finished=4)
    assert iterations_of(path) == list(range(8))
    assert path.read_bytes().startswith(b"".join(kept))


@pytest.mark.parametrize(
    ("finished", "change", "message"),
    [
        (4, (b"", b""), "does not hold the iterations up to 3"),
        (3, (b'"kl": 0.1', b'"kl": 0.7'), r"iterations up to 2, .*\(damaged: line 2\); put it back"),
    ],
    ids=["missing", "damaged"],
)
def test_resuming_without_an_intact_iteration_that_the_checkpoint_has_is_refused(
    finished: int, change: tuple[bytes, bytes], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    path.write_bytes(path.read_bytes().replace(*change, 1))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=message):
        MetricsLog(path, finished=finished)
    assert path.read_bytes() == before


def test_missing_metrics_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(4, 6), finished=4)
    assert "the iterations before 4 are missing" in caplog.text
    write(path, range(6, 7), finished=6)
    assert iterations_of(path) == [4, 5, 6]


def test_every_altered_byte_is_noticed_and_its_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    content, rows = path.read_bytes(), read_metrics(path)
    *ends, last = [place for place, byte in enumerate(content) if byte == ord("\n")]
    draw = random.Random(0)
    for place in range(last):
        for bit in (0, draw.randrange(1, 8)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            intact, damaged = inspect_metrics(path)
            number = 1 + sum(end < place for end in ends)
            assert damaged[:1] == [number], (place, bit)
            assert all(row in rows for row in intact)
    assert last > 100


def test_damaged_line_is_left_out_with_a_warning_and_an_unfinished_one_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(4))
    path.write_bytes(path.read_bytes() + b'{"iteration": 4, "k')
    assert iterations_of(path) == [0, 1, 2, 3]
    assert caplog.text == ""
    path.write_bytes(path.read_bytes().replace(b'"kl": 0.1', b'"kl": 0.7'))
    assert iterations_of(path) == [0, 2, 3]
    assert f"{path}: line 2 is damaged" in caplog.text


def test_file_of_an_earlier_version_loads_and_gets_checksums_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"iteration": i, "kl": 0.1 * i}) + "\n" for i in range(3)))
    assert iterations_of(path) == [0, 1, 2]
    path.write_text(path.read_text().replace('"iteration": 1,', '"iteration": 1'))
    assert inspect_metrics(path)[1] == [2]
    path.write_text(path.read_text().replace('"iteration": 1', '"iteration": 1,'))
    write(path, range(3, 5), finished=3)
    assert read_metrics(path) == [{"iteration": i, "kl": 0.1 * i} for i in range(5)]
    assert path.read_text().count('"crc32"') == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_full_disk_names_the_file_and_the_remedy() -> None:
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(CheckpointError, match=r"cannot write /dev/full: No space left on device; .* --resume"):
        log.write({"iteration": 0})
    log.close()


def test_full_disk_under_the_events_names_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path)
    monkeypatch.setattr(log._writer, "add_scalar", fail_for_want_of_room)
    with pytest.raises(CheckpointError, match=rf"cannot write {tmp_path}: no room; .* --resume"):
        log.write({"iteration": 0, "kl": 0.5})
    monkeypatch.undo()
    log.close()


def fail_for_want_of_room(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "no room")


@pytest.mark.parametrize("resumed_at", [3, 0])
def test_events_hold_the_numbers_and_a_resumed_run_replaces_repeated_ones(
    resumed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    for second, (finished, last, value) in enumerate(((0, 5, 1.0), (resumed_at, 6, 2.0))):
        # TensorBoard reads files in the order of their names, which have the second and then the number of the writer
        # as text: of one second, the tenth writer's before the ninth's.
        monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda now=second: 1e9 + now))
        log = EventLog(tmp_path, finished)
        for iteration in range(finished, last):
            log.write({"iteration": iteration, "return/step_0": value, "kl": 0.5, "digest": "abc"})
        log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("return/step_0")] == [
        *((step, 1.0) for step in range(resumed_at)),
        *((step, 2.0) for step in range(resumed_at, 6)),
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
