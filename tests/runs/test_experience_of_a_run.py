"""The experience of a run: written beside its checkpoints, resumed with them, and removed when none needs it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maml_rl.episode import TaskEpisodes
from maml_rl.errors import CheckpointError
from maml_rl.experience import Replay, replay_segments
from maml_rl.metalearners import MAMLTRPO
from maml_rl.policies import NormalMLPPolicy
from maml_rl.runs.run_folder import RunFolder
from tests.runs.test_run_folder import config_of


class Learner(MAMLTRPO):
    """A learner that keeps its last trials."""

    def __init__(self) -> None:
        super().__init__(NormalMLPPolicy(2, 2, (4,)))
        self.experience = {"trials": Replay(39)}


def append(learner: Learner, iteration: int) -> None:
    """Append two trials of eight steps, whose numbers are all that of the iteration."""
    values = np.full((2, 8, 1), iteration, np.float32)
    ends = np.ones((2, 1), bool)
    grid = values[..., None]
    learner.experience["trials"].append(
        TaskEpisodes(grid, grid, values, np.full((2, 1), 8), ends, ~ends, grid[:, 0], tasks=[{"goal": 0}] * 2)
    )


def iterate(run: RunFolder, learner: Learner, iterations: range) -> None:
    for iteration in iterations:
        append(learner, iteration)
        run.record({"iteration": iteration, "env_steps": 16 * (iteration + 1)})
        run.keep(0.0)
        if (iteration + 1) % 2 == 0:
            run.save()


def begin(folder: Path, iterations: int) -> None:
    """Train a run for some iterations."""
    learner = Learner()
    with RunFolder(folder, config_of(checkpoint_every=2), learner) as run:
        iterate(run, learner, range(iterations))


@contextmanager
def resumed(folder: Path) -> Iterator[tuple[RunFolder, Learner]]:
    learner = Learner()
    with RunFolder(folder, config_of(checkpoint_every=2), learner, resume=True) as run:
        yield run, learner


def rewards(learner: Learner) -> set[float]:
    return set(learner.experience["trials"].sample_transitions(np.random.default_rng(0), 500).rewards.tolist())


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "experience" / "trials").glob("*"))


def test_resumed_run_has_the_experience_of_its_checkpoint_and_a_new_one_none(tmp_path: Path) -> None:
    begin(tmp_path, 7)
    with resumed(tmp_path) as (run, learner):
        assert run.iteration == 6
        assert rewards(learner) == {4.0, 5.0}
    assert segments(tmp_path)
    with RunFolder(tmp_path, config_of(checkpoint_every=2), Learner(), overwrite=True):
        assert not (tmp_path / "experience").exists()


def test_run_that_was_killed_before_its_first_iteration_resumes(tmp_path: Path) -> None:
    learner = Learner()
    with RunFolder(tmp_path / "run", config_of(checkpoint_every=2), learner) as run:
        run.save()
    with resumed(tmp_path / "run") as (run, learner):
        assert run.iteration == 0
        assert learner.experience["trials"].num_trials == 0
        iterate(run, learner, range(2))
    assert rewards(learner) == {0.0, 1.0}


def test_interrupt_saves_the_experience_of_the_last_finished_iteration(tmp_path: Path) -> None:
    learner = Learner()
    with RunFolder(tmp_path, config_of(checkpoint_every=2), learner) as run:
        iterate(run, learner, range(7))
        append(learner, 7)
        append(learner, 8)
        run.save()
    with resumed(tmp_path) as (run, learner):
        assert run.iteration == 7
        assert rewards(learner) == {5.0, 6.0}


def test_segments_that_no_checkpoint_needs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_segments, "SEGMENT_BYTES", 1)
    begin(tmp_path, 40)
    # The newest three checkpoints, one of every other iteration, need four trials each; the best is among them.
    assert [int(name[:12]) for name in segments(tmp_path)] == list(range(68, 80))


def test_damaged_segment_is_named_and_an_earlier_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replay_segments, "SEGMENT_BYTES", 1)
    begin(tmp_path, 10)
    newest = tmp_path / "experience" / "trials" / segments(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    with resumed(tmp_path) as (run, learner):
        assert run.iteration == 8
        assert rewards(learner) == {6.0, 7.0}
        assert f"the experience {newest} is altered or truncated" in caplog.text
        iterate(run, learner, range(8, 10))
    with resumed(tmp_path) as (run, _):
        assert run.iteration == 10
    for name in segments(tmp_path):
        (tmp_path / "experience" / "trials" / name).unlink()
    with pytest.raises(CheckpointError, match=r"no intact checkpoint .*; cannot read the experience") as error:
        RunFolder(tmp_path, config_of(checkpoint_every=2), Learner(), resume=True)
    assert "\n" not in str(error.value)


def test_disk_full_of_experience_leaves_a_checkpoint_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner()
    write = os.write

    def refuse(descriptor: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path / "experience")):
            raise OSError(28, os.strerror(28))
        return write(descriptor, data)

    with RunFolder(tmp_path, config_of(checkpoint_every=2), learner) as run:
        iterate(run, learner, range(4))
        monkeypatch.setattr(os, "write", refuse)
        with pytest.raises(
            CheckpointError, match=r"cannot write the experience .*: No space left on device; checkpoints"
        ):
            iterate(run, learner, range(4, 9))
        monkeypatch.undo()
    with resumed(tmp_path) as (run, learner):
        assert run.iteration == 4
        assert rewards(learner) == {2.0, 3.0}


def test_checkpoint_without_experience_is_refused_by_a_learner_of_experience(tmp_path: Path) -> None:
    with RunFolder(tmp_path, config_of(checkpoint_every=2), MAMLTRPO(NormalMLPPolicy(2, 2, (4,)))):
        pass
    with pytest.raises(CheckpointError, match=r"has no experience 'trials'; train again with --overwrite"):
        RunFolder(tmp_path, config_of(checkpoint_every=2), Learner(), resume=True)
