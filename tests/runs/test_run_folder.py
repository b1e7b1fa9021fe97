import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maml_rl.config import Config, load_config
from maml_rl.config.config import SECTION
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.metalearners import MAMLTRPO
from maml_rl.policies import NormalMLPPolicy
from maml_rl.runs.metrics import read_metrics
from maml_rl.runs.run_folder import RunFolder, load_run_config, load_system
from tests.small_runs import snapshot


def config_of(**values: Any) -> Config:
    settings = {key.replace("_", "-"): value for key, value in values.items()}
    config = Config.from_mapping(parse_mapping(json.dumps({"env-name": "2DNavigation-v0", **settings}), "x.yaml"))
    return config.with_section(SECTION, config.check_section(SECTION, MAMLTRPO.Settings))


def learner_of(size: int = 4, seed: int = 0) -> MAMLTRPO:
    return MAMLTRPO(NormalMLPPolicy(2, 2, (size,), seed=seed))


def write_run(folder: Path, iterations: int, config: Config | None = None) -> None:
    config = config or config_of()
    with RunFolder(folder, config, learner_of(seed=3)) as run:
        for iteration in range(iterations):
            run.record({"iteration": iteration, "env_steps": 10 * (iteration + 1), "kl": 0.0})
        if iterations:
            run.keep(1.0)
            run.save()


def test_overwrite_removes_everything_of_the_earlier_run(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    with RunFolder(tmp_path, config_of(seed=5), learner_of(), overwrite=True) as run:
        assert run.iteration == 0
    assert load_config(tmp_path / "config.json").seed == 5
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration-000000"]
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_that_holds_something_else_is_never_written_to(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty and is not a run folder"):
        RunFolder(tmp_path, config_of(), learner_of(), overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_resumed_run_tells_which_files_have_changed_since_it_began(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_files = {"env-name": "one", "env-kwargs.rulesets": "two", "evaluation-tasks": "three"}
    changed = {"env-name": "other", "evaluation-tasks": "other"}
    for resume, sources in ((False, of_files), (True, of_files), (True, of_files | changed)):
        assert not caplog.records
        with RunFolder(tmp_path, config_of(), learner_of(), resume=resume, origin={"sources": sources}):
            pass
    (record,) = caplog.records
    assert f"the file of 'env-name' has changed since the run in {tmp_path} began" in record.message


def test_resume_may_change_where_workers_are_unless_these_are_not_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    with RunFolder(tmp_path, config_of(num_workers=3, step_timeout=5.0), learner_of(), resume=True) as run:
        assert run.iteration == 1
    with pytest.raises(ConfigError, match="was made with another 'recv-timeout'"):
        RunFolder(tmp_path, config_of(num_workers=3, recv_timeout=1.0), learner_of(), resume=True)


def test_tasks_of_evaluations_are_compared_only_where_both_configs_have_evaluations(tmp_path: Path) -> None:
    write_run(tmp_path, 1, config_of(evaluate_every=1, evaluation_tasks=7))
    with pytest.raises(ConfigError, match="was made with another 'evaluation-tasks'"):
        RunFolder(tmp_path, config_of(evaluate_every=2), learner_of(), resume=True)
    for config in (config_of(), config_of(evaluate_every=2)):
        with RunFolder(tmp_path, config, learner_of(), resume=True) as run:
            run.settle()


@pytest.mark.parametrize("files", [["config.json"], ["config.json", "system.json"], ["config.json", "metrics.jsonl"]])
def test_run_that_an_earlier_version_had_only_begun_starts_on_resume(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoints" / ".unfinished-iteration-000000").mkdir(parents=True)
    with RunFolder(tmp_path, config_of(), learner_of(), resume=True) as run:
        run.record({"iteration": 0, "env_steps": 10, "kl": 0.0})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration-000000"]


def test_run_with_metrics_but_without_checkpoints_does_not_start_again(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoints")
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*: put one back, or .* --overwrite"):
        RunFolder(tmp_path, config_of(), learner_of(), resume=True)
    assert snapshot(tmp_path) == before


# Forks, for every call of `MOMENTS`, a process that starts a run, new or instead of another, and is killed in it.
KILLER = """
import json, logging, os, shutil, signal, sys
from pathlib import Path
from tests.runs.test_checkpoint import arm
from tests.runs.test_run_folder import config_of, learner_of, write_run
from maml_rl.runs import run_folder
from maml_rl.runs.metrics import read_metrics
from maml_rl.runs.run_folder import RunFolder

# What takes long here and is not under test: git, TensorBoard and the disk.
run_folder.describe_system = dict
sys.modules["torch.utils.tensorboard"] = None
os.fsync = lambda descriptor: None
logging.disable()

def begin(work, **how):
    with RunFolder(work, config_of(seed=7), learner_of(seed=5), **how) as run:
        assert run.iteration == 0, run.iteration
        run.record({"iteration": 0, "env_steps": 10, "kl": 0.0})

def content(left):
    return {str(path.relative_to(left)): path.is_file() and path.name != ".lock" and path.read_bytes()
            for path in left.rglob("*")}

folder, replaces, stride = Path(sys.argv[1]), sys.argv[2] == "overwrite", int(sys.argv[3])
moments, found, before = 0, [], None
if replaces:
    write_run(folder / "old", 3)
    (folder / "old" / "tensorboard").mkdir()
while True:
    moments += stride
    left = folder / str(moments)
    if replaces:
        shutil.copytree(folder / "old", left)
    pid = os.fork()
    if pid == 0:
        arm(moments)
        RunFolder(left, config_of(seed=7), learner_of(seed=5), overwrite=replaces)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    # What is left of two moments may be the same.
    if not left.exists() or (killed and content(left) == before):
        continue
    before = content(left)
    for again in (dict(resume=True), dict(overwrite=True), dict()):
        work = folder / f"{moments}-{'-'.join(again)}"
        shutil.copytree(left, work)
        has_config = (work / "config.json").is_file()
        is_old = has_config and '"seed": 0' in (work / "config.json").read_text()
        # A run that the killed process has not touched is the old one, whose config differs.
        if is_old and not again.get("overwrite"):
            found.append([killed, "old", len(read_metrics(work / "metrics.jsonl"))])
            continue
        if not has_config or again:
            begin(work, **again)
            names = sorted(path.name for path in work.iterdir())
            found.append([killed, "begun", names, len(read_metrics(work / "metrics.jsonl"))])
        shutil.rmtree(work)
    if not killed:
        break
print(json.dumps([moments, found]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(300)
# For every change every third moment, nightly all.
@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("overwrite", 3),
        pytest.param("overwrite", 1, marks=pytest.mark.nightly),
        pytest.param("new", 1, marks=pytest.mark.nightly),
    ],
)
def test_run_killed_at_any_moment_of_its_start_starts_again(tmp_path: Path, kind: str, stride: int) -> None:
    command = [sys.executable, "-c", KILLER, str(tmp_path), kind, str(stride)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=290).stdout
    moments, found = json.loads(output)
    assert moments > 60, "too few moments: is the start still patched?"
    assert sum(killed for killed, *_ in found) > 30 // stride
    files = [".lock", "SHA256SUMS", "checkpoints", "config.json", "metrics.jsonl", "system.json"]
    for _, state, *rest in found:
        # Either no file of the old run and of the killed process remains, or no file of the old run is missing.
        assert rest == ([3] if state == "old" else [files, 1])


def test_altered_config_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"config.json is damaged or was edited: .* remove the line of config"):
            RunFolder(tmp_path, config_of(), learner_of(), resume=True) if resume else load_config(config)
    sums = tmp_path / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "config.json" not in line))
    assert load_config(config).seed == 1
    with RunFolder(tmp_path, config_of(seed=1), learner_of(), resume=True) as run:
        run.settle()
    assert "config.json" in sums.read_text()


def test_every_altered_byte_of_config_and_system_is_noticed(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    for name, load in (("config.json", load_config), ("system.json", lambda path: load_system(path.parent))):
        path = tmp_path / name
        content = path.read_bytes()
        for place in range(0, len(content), 3):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(ConfigError, match=f"{name} is damaged or was edited"):
                load(path)
        path.write_bytes(content)
        load(path)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_checksums_of_a_run_are_those_of_sha256sum_after_a_resume_even_without_any(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    for batches in (500, 1000):
        with RunFolder(tmp_path, config_of(num_batches=batches), learner_of(), resume=True) as run:
            assert run.iteration == 1
            # What ended it before no longer counts, and has no checksum.
            run.fail("diverged")
            run.settle()
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True)
        assert sorted((tmp_path / "SHA256SUMS").read_text().split()[1::2]) == ["config.json", "system.json"]
        # A run of an earlier version has none.
        (tmp_path / "SHA256SUMS").unlink()


def test_folders_that_are_links_are_used_and_only_files_of_the_run_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("checkpoints", "tensorboard"):
        (tmp_path / "scratch" / name).mkdir(parents=True)
        (tmp_path / "scratch" / name / "mine.txt").write_text("kept")
        (run / name).symlink_to(tmp_path / "scratch" / name)
    write_run(run, 2)
    checkpoints = tmp_path / "scratch" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["iteration-000000", "iteration-000002", "mine.txt"]
    with RunFolder(run, config_of(seed=5), learner_of(), overwrite=True) as again:
        assert again.iteration == 0
    assert (run / "checkpoints").is_symlink()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["iteration-000000", "mine.txt"]
    assert sorted(path.name.split(".")[0] for path in (run / "tensorboard").iterdir()) == ["events", "mine"]
    assert read_metrics(run / "metrics.jsonl") == []


def test_only_the_link_of_a_linked_checkpoint_is_removed(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 2)
    moved = tmp_path / "scratch"
    (tmp_path / "run" / "checkpoints" / "iteration-000002").rename(moved)
    (tmp_path / "run" / "checkpoints" / "iteration-000002").symlink_to(moved)
    with RunFolder(tmp_path / "run", config_of(), learner_of(), overwrite=True):
        pass
    assert len(list(moved.iterdir())) == 3


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "resume") for name in ("metrics.jsonl", "config.json", "system.json", "SHA256SUMS", ".lock")),
        ("metrics.jsonl", "overwrite"),
    ],
)
def test_file_that_is_a_link_is_refused_and_nothing_changes(tmp_path: Path, name: str, how: str) -> None:
    write_run(tmp_path / "run", 1)
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name} is a link to .*elsewhere"):
        RunFolder(tmp_path / "run", config_of(), learner_of(), **{how: True})
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_broken_link_or_link_into_another_run_is_refused_and_nothing_changes(tmp_path: Path, how: str) -> None:
    write_run(tmp_path / "other", 1)
    write_run(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for target, words in (
        (tmp_path / "gone", "where there is none"),
        (tmp_path / "other" / "checkpoints", "another run"),
    ):
        (tmp_path / "run" / "checkpoints").symlink_to(target)
        before = snapshot(tmp_path)
        with pytest.raises(ConfigError, match=words):
            RunFolder(tmp_path / "run", config_of(), learner_of(), **{how: True})
        assert snapshot(tmp_path) == before
        (tmp_path / "run" / "checkpoints").unlink()


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    write_run(tmp_path, 1)
    with RunFolder(tmp_path, config_of(), learner_of(), resume=True):
        with pytest.raises(ConfigError, match="another process is training"):
            RunFolder(tmp_path, config_of(), learner_of(), resume=True)
        with pytest.raises(ConfigError, match="another process is training"):
            RunFolder(tmp_path, config_of(), learner_of(), overwrite=True)
    with RunFolder(tmp_path, config_of(), learner_of(), resume=True):
        pass


@pytest.mark.parametrize(
    ("place", "is_lost"),
    [("session_1/runtime_resources/working_dir_files/_ray_pkg_1a2b/runs/x", True), ("shared/runs/x", False)],
)
def test_run_folder_in_the_temporary_working_directory_of_a_ray_job_is_a_warning(
    place: str, is_lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / place, 0)
    warned = [
        record.message for record in caplog.records if "temporary working directory of a Ray job" in record.message
    ]
    assert len(warned) == is_lost
    assert all(str(tmp_path / place) in message and "--output-folder" in message for message in warned)


@pytest.mark.parametrize("missing", ["runs/maml/2d-navigaton", "runs/mamml/2d-navigation"])
def test_missing_run_is_refused_with_the_nearest_one(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/maml/2d-navigation", "runs/maml/ant-dir"):
        Path(name).mkdir(parents=True)
        (Path(name) / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"no folder {missing}; did you mean 'runs/maml/2d-navigation'"):
        load_run_config(Path(missing))
