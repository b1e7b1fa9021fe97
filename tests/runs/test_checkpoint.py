import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maml_rl.errors import CheckpointError
from maml_rl.foreign_files import read_regular
from maml_rl.runs import checkpoint as checkpoint_module
from maml_rl.runs.atomic_files import replace_file
from maml_rl.runs.checkpoint import (
    Checkpoint,
    best_intact,
    check_architecture,
    latest_intact,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)


def checkpoint_at(iteration: int, score: float | None = None, size: int = 2) -> Checkpoint:
    tensors = {"mean.weight": torch.full((size, 3), float(iteration)), "log_std": torch.tensor([0.1 * iteration])}
    return Checkpoint(iteration, tensors, score, {"env_steps": 100 * iteration})


def assert_same(found: Checkpoint, wanted: Checkpoint) -> None:
    # As text, since code may go through a state in its order.
    assert json.dumps([found.iteration, found.score, found.state]) == json.dumps(
        [wanted.iteration, wanted.score, wanted.state]
    )
    assert repr(found.learner) == repr(wanted.learner)
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def iterations_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("iteration-")) for path in list_checkpoints(folder)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_saved_checkpoint_loads_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": (torch.arange(6).reshape(2, 3) / 7).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "b": torch.zeros(0),
    }
    learner = {name: {"z": 1, "a": 2} if name == "k" else torch.zeros(1, dtype=dtype) for name in "zskybax"}
    wanted = Checkpoint(7, tensors, -1.25, {"nested": {"list": [1, None, "x"], "first": 2}}, learner)
    path = save_checkpoint(wanted, tmp_path)
    assert_same(load_checkpoint(path), wanted)
    # A file of it stands for its folder.
    assert_same(load_checkpoint(path / "tensors.safetensors"), wanted)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    path = save_checkpoint(checkpoint_at(1), tmp_path)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True)
    # No pickle is written.
    assert sorted(entry.name for entry in path.iterdir()) == ["SHA256SUMS", "state.json", "tensors.safetensors"]


def test_every_altered_byte_is_detected_and_its_folder_named(tmp_path: Path) -> None:
    path = save_checkpoint(checkpoint_at(1, score=1.0), tmp_path)
    altered = 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(len(content)):
            file.write_bytes(content[:place] + bytes([content[place] ^ (1 + place % 255)]) + content[place + 1 :])
            with pytest.raises(CheckpointError, match="iteration-000001"):
                load_checkpoint(path)
            altered += 1
        file.write_bytes(content)
    assert altered > 400
    assert_same(load_checkpoint(path), checkpoint_at(1, score=1.0))


@pytest.mark.parametrize("name", ["SHA256SUMS", "state.json", "tensors.safetensors"])
def test_every_truncation_and_extension_is_detected_and_the_file_named(tmp_path: Path, name: str) -> None:
    file = save_checkpoint(checkpoint_at(1), tmp_path) / name
    content = file.read_bytes()
    for wrong in [*(content[:length] for length in range(len(content))), content + b"\n", content + content]:
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError):
            load_checkpoint(file.parent)
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="altered or truncated"):
        load_checkpoint(file.parent)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: No such file"):
        load_checkpoint(file.parent)


def test_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = {1: -5.0, 2: 3.0, 3: None, 4: -1.0, 5: 0.0, 6: -2.0}
    for iteration, score in scores.items():
        save_checkpoint(checkpoint_at(iteration, score), tmp_path, keep=2)
    assert iterations_in(tmp_path) == [2, 5, 6]
    assert best_intact(tmp_path)[1].iteration == 2
    # Of equals the newest is the best, and numbers beyond six digits are ordered as numbers.
    for iteration in (999_999, 1_000_000):
        save_checkpoint(checkpoint_at(iteration, 3.0), tmp_path, keep=1)
    assert iterations_in(tmp_path) == [1_000_000]


def test_broken_checkpoint_is_skipped_with_a_warning_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration, score in ((8, 1.0), (9, 2.0), (10, 3.0)):
        save_checkpoint(checkpoint_at(iteration, score), tmp_path)
    assert best_intact(tmp_path)[1].iteration == 10
    caplog.clear()
    with (tmp_path / "iteration-000010" / "tensors.safetensors").open("ab") as file:
        file.write(b"x")
    with caplog.at_level("INFO"):
        path, checkpoint = latest_intact(tmp_path)
    assert path.name == "iteration-000009"
    assert_same(checkpoint, checkpoint_at(9, 2.0))
    assert "passing over a broken checkpoint" in caplog.messages[0]
    assert "iteration-000010/tensors.safetensors is altered or truncated" in caplog.messages[0]
    assert "loading the checkpoint" in caplog.messages[1]
    assert "iteration-000009" in caplog.messages[1]
    assert best_intact(tmp_path)[1].iteration == 9


def test_no_intact_checkpoint_is_an_error_with_every_reason(tmp_path: Path) -> None:
    for iteration in (1, 2):
        (save_checkpoint(checkpoint_at(iteration), tmp_path) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no intact checkpoint.*iteration-000002.*iteration-000001"):
        latest_intact(tmp_path)
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        latest_intact(tmp_path / "nowhere")


def test_broken_checkpoint_is_replaced_and_an_intact_one_never(tmp_path: Path) -> None:
    path = save_checkpoint(checkpoint_at(1), tmp_path)
    with pytest.raises(CheckpointError, match="intact one exists already"):
        save_checkpoint(checkpoint_at(1, size=5), tmp_path)
    assert_same(load_checkpoint(path), checkpoint_at(1))
    (path / "SHA256SUMS").write_bytes(b"")
    save_checkpoint(checkpoint_at(1, size=5), tmp_path)
    assert_same(load_checkpoint(path), checkpoint_at(1, size=5))


def test_state_that_a_file_cannot_hold_leaves_nothing_behind(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    for checkpoint, named in [
        (Checkpoint(1, {}, float("nan")), "score = nan"),
        (Checkpoint(1, {}, learner={"scales": {"a": [float("inf")]}}), "learner/scales/a = inf"),
        (Checkpoint(1, {}, learner={"kept": [1, {"rng": {2}}]}), r"learner/kept/rng = \{2\}"),
        (Checkpoint(1, {}, state={"tasks": {(0, 1): 3}}), r"the name \(0, 1\) in state/tasks"),
        # JSON would return another name, and cannot sort two kinds of them.
        (Checkpoint(1, {}, state={"tasks": {2: 3}}), "the name 2 in state/tasks"),
        (Checkpoint(1, {}, learner={"kept": {"a": 3, None: 3}}), "the name None in learner/kept"),
        (Checkpoint(1, {}, learner={3: 3}), "the name 3 in learner"),
        (
            Checkpoint(1, {}, learner={"table": torch.eye(2).to_sparse()}),
            "learner/table of the layout torch.sparse_coo",
        ),
        (Checkpoint(1, {}, learner={"kept": endless}), "learner/kept, which is in itself, or nested too deeply"),
        # Those of the learner, and of earlier iterations, begin so.
        (
            Checkpoint(1, {"learner/x": torch.zeros(1)}),
            "the parameter or buffer 'learner/x' of a policy, which must not begin so",
        ),
        (
            Checkpoint(1, {"earlier/0/x": torch.zeros(1)}),
            "the parameter or buffer 'earlier/0/x' of a policy, which must not begin so",
        ),
        # A part of a policy may keep what it likes.
        (Checkpoint(1, {"mean._extra_state": {"calls": 3}}), r"mean._extra_state = \{'calls': 3\}"),
    ]:
        with pytest.raises(TypeError, match=f"a checkpoint cannot hold {named}; state_dict returns"):
            save_checkpoint(checkpoint, tmp_path)
    assert iterations_in(tmp_path) == []


def test_other_architecture_is_refused_with_both_shapes() -> None:
    mine, origin = checkpoint_at(1).tensors, Path("runs/a")
    check_architecture(mine, mine, origin)
    with pytest.raises(CheckpointError, match=r"runs/a.*'mean.weight' is \(4, 3\) there and \(2, 3\) in the policy"):
        check_architecture(checkpoint_at(1, size=4).tensors, mine, origin)
    with pytest.raises(CheckpointError, match=r"the policy has no 'extra'"):
        check_architecture({**mine, "extra": torch.zeros(1)}, mine, origin)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no 'extra'"):
        check_architecture(mine, {**mine, "extra": torch.zeros(1)}, origin)
    with pytest.raises(CheckpointError, match=r"'log_std' is torch.float64 there"):
        check_architecture({**mine, "log_std": mine["log_std"].double()}, mine, origin)


# At each of these calls a process can be killed, or the disk be full.
MOMENTS = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir")


def die(name: str, original: Callable[..., Any], *args: Any) -> None:
    """Kill this process; a write is cut in half first."""
    if name == "write":
        original(args[0], bytes(args[1])[: len(args[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: int, fail: Callable[..., Any] = die, replace: Callable[..., Any] = setattr) -> list[int]:
    """Have the call of this number fail; return the number of calls."""
    passed = [0]

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            passed[0] += 1
            if passed[0] == moment:
                fail(name, original, *args)
            return original(*args, **kwargs)

        return function

    for name in MOMENTS if fail is die else ("open", "write", "fsync", "mkdir", "rename"):
        replace(os, name, wrap(name, getattr(os, name)))
    return passed


# Forks, for every such call, a process that saves and is killed in it.
KILLER = """
import json, os, signal, sys
from pathlib import Path
from tests.runs.test_checkpoint import arm, checkpoint_at
from maml_rl.runs.checkpoint import latest_intact, load_checkpoint, list_checkpoints, save_checkpoint

# What takes long here and is not under test.
os.fsync = lambda descriptor: None
folder, moments, found = Path(sys.argv[1]), 0, []
while True:
    moments += 1
    work = folder / str(moments)
    for iteration in (1, 2, 3):
        save_checkpoint(checkpoint_at(iteration), work, keep=2)
    pid = os.fork()
    if pid == 0:
        arm(moments)
        save_checkpoint(checkpoint_at(4), work, keep=2)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    after = latest_intact(work)[1]
    broken = 0
    for path in list_checkpoints(work):
        load_checkpoint(path)
    save_checkpoint(checkpoint_at(5), work, keep=2)
    found.append([killed, after.iteration, after.tensors["mean.weight"][0, 0].item(), sorted(os.listdir(work))])
    if not killed:
        break
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(60)
def test_process_killed_at_every_moment_of_a_save_leaves_an_intact_newest_checkpoint(tmp_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    found = json.loads(output)
    *killed, undisturbed = found
    assert len(killed) > 20, "too few moments: is the save still patched?"
    assert all(was_killed for was_killed, *_ in killed)
    assert undisturbed[0] is False
    newest = [iteration for _, iteration, _, _ in found]
    # Before the rename the old checkpoint is the newest, afterwards the new one.
    assert newest == sorted(newest)
    assert set(newest) == {3, 4}
    assert all(value == iteration for _, iteration, value, _ in found)
    # The next save removes the files that the killed process left.
    assert all(not name.startswith(".") for *_, names in found for name in names)


@pytest.fixture
def full_disk_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Makes the n-th write or folder fail for lack of space; returns the number of calls."""

    def fail(*call: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda moment: arm(moment, fail, monkeypatch.setattr)


def test_disk_full_at_any_write_is_a_clear_error_and_the_previous_checkpoint_loads(
    tmp_path: Path, full_disk_at: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(checkpoint_at(1), tmp_path)
    errors = []
    for moment in range(1, 100):
        passed = full_disk_at(moment)
        try:
            save_checkpoint(checkpoint_at(2), tmp_path)
        except CheckpointError as error:
            errors.append(str(error))
        monkeypatch.undo()
        newest = latest_intact(tmp_path)[1]
        assert_same(newest, checkpoint_at(newest.iteration))
        if passed[0] < moment:
            break
        shutil.rmtree(tmp_path / "iteration-000002", ignore_errors=True)
    assert len(errors) > 10
    assert all("No space left on device" in error and "iteration-000002" in error for error in errors)
    assert iterations_in(tmp_path) == [1, 2]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where the machine permits mounting one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here; the injected errors of the test above must do")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_really_full_disk_is_a_clear_error_and_the_previous_checkpoint_loads(tiny_disk: Path) -> None:
    save_checkpoint(checkpoint_at(1), tiny_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(checkpoint_at(2, size=10_000), tiny_disk)
    assert_same(latest_intact(tiny_disk)[1], checkpoint_at(1))
    # The failed attempt released its space.
    save_checkpoint(checkpoint_at(3), tiny_disk)
    assert iterations_in(tiny_disk) == [1, 3]


def test_replaced_file_is_old_or_new_whole_when_the_disk_is_full(
    tmp_path: Path, full_disk_at: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"old")
    full_disk_at(2)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"new")
    monkeypatch.undo()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"


def forge(path: Path, state: Any) -> None:
    """Write another state, and the checksums of both files."""
    content = state if isinstance(state, str | bytes) else json.dumps(state)
    (path / "state.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    names = "state.json", "tensors.safetensors"
    lines = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (path / "SHA256SUMS").write_text("".join(lines))


def test_every_forged_state_is_one_line(tmp_path: Path) -> None:
    path = save_checkpoint(replace(checkpoint_at(3), state={"env_steps": 7, "algorithm": "maml-trpo"}), tmp_path)
    state = json.loads((path / "state.json").read_text())
    forged: list[Any] = [None, [], "{", b"\xff", '{"format": 1, "format": 1}', json.dumps(state).replace("7", "1e999")]
    for value in (None, -5, 1.5, True, "x", [], {}, 10**30, "\x1b[2J"):
        harmless = {"score": [None, -5, 1.5, 10**30], "learner": [{}], "state": [{}], "evaluated": [True]}
        forged += [
            {**state, key: value}
            for key in state
            if value not in harmless.get(key, []) or (key == "score" and value is True)
        ]
        forged += [{**state, "state": {**state["state"], "env_steps": value}}] * (value != 10**30)
        forged += [{**state, "state": {**state["state"], "algorithm": value}}] * (not isinstance(value, str))
    forged += [{key: state[key] for key in state if key != name} for name in ("iteration", "score", "state", "format")]
    forged += [{**state, "unknown": 1}, {**state, "iteration": 4}, "[" * 100_000]
    for content in forged:
        forge(path, content)
        with pytest.raises(CheckpointError, match="is not the state of a checkpoint") as caught:
            load_checkpoint(path)
        assert str(caught.value).isprintable(), content
        assert len(str(caught.value)) < 500, content
    forge(path, state)
    assert load_checkpoint(path).state["env_steps"] == 7


def test_foreign_tensors_with_correct_checksums_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_checkpoint(checkpoint_at(1), tmp_path)
    state = (path / "state.json").read_text()
    for content in (b"", b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.", b"\xff" * 64):
        (path / "tensors.safetensors").write_bytes(content)
        forge(path, state)
        with pytest.raises(CheckpointError, match=r"tensors\.safetensors is not a safetensors file"):
            load_checkpoint(path)
    assert not (tmp_path / "hacked").exists()


def test_save_reads_the_states_of_earlier_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors may be large, and all of them were read and hashed at every save."""
    read: list[str] = []

    def reading(path: Path, most_bytes: int | None = None) -> bytes:
        read.append(path.name)
        return read_regular(path, most_bytes)

    monkeypatch.setattr(checkpoint_module, "read_regular", reading)
    for iteration in range(5):
        save_checkpoint(checkpoint_at(iteration, float(iteration)), tmp_path, keep=10)
    assert set(read) == {"state.json", "SHA256SUMS"}
    assert len(list(tmp_path.iterdir())) == 5
