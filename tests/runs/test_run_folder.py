import json
from pathlib import Path
from typing import Any

import pytest
import torch

from maml_rl.config import Config, load_config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.metalearners import MAMLTRPO
from maml_rl.policies import NormalMLPPolicy
from maml_rl.runs.metrics import read_metrics
from maml_rl.runs.run_folder import RunFolder


def config_of(**values: Any) -> Config:
    settings = {key.replace("_", "-"): value for key, value in values.items()}
    config = Config.from_mapping(parse_mapping(json.dumps({"env-name": "2DNavigation-v0", **settings}), "x.yaml"))
    return config.with_algorithm_settings(config.check_algorithm_settings(MAMLTRPO.Settings))


def learner_of(size: int = 4, seed: int = 0) -> MAMLTRPO:
    return MAMLTRPO(NormalMLPPolicy(2, 2, (size,), seed=seed))


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_run(folder: Path, iterations: int, config: Config | None = None) -> None:
    config = config or config_of()
    with RunFolder(folder, config, learner_of(seed=3)) as run:
        for iteration in range(iterations):
            run.record({"iteration": iteration, "env_steps": 10 * (iteration + 1), "kl": 0.0})
        if iterations:
            run.keep(1.0)
            run.save()


def test_new_run_begins_with_its_config_and_a_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0)
    assert load_config(tmp_path / "run" / "config.json").differences(config_of()) == []
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["iteration-000000"]


def test_resumed_run_has_the_parameters_and_the_count_of_its_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    learner = learner_of(seed=9)
    with RunFolder(tmp_path, config_of(), learner, resume=True) as run:
        assert (run.iteration, run.env_steps) == (3, 30)
    for name, tensor in learner_of(seed=3).policy.state_dict().items():
        assert torch.equal(learner.policy.state_dict()[name], tensor)


def test_iterations_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    with RunFolder(tmp_path, config_of(), learner_of(), resume=True) as run:
        run.record({"iteration": 3, "env_steps": 40})
    with RunFolder(tmp_path, config_of(), learner_of(), resume=True) as run:
        assert run.iteration == 3
    assert [metrics["iteration"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_another_run_is_not_touched_without_being_told(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"holds another run; continue it with --resume, replace it with --overwrite"):
        RunFolder(tmp_path, config_of(), learner_of())
    assert snapshot(tmp_path) == before


def test_overwrite_leaves_nothing_of_the_earlier_run(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    with RunFolder(tmp_path, config_of(seed=5), learner_of(), overwrite=True) as run:
        assert run.iteration == 0
    assert load_config(tmp_path / "config.json").seed == 5
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration-000000"]
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_that_holds_something_else_is_never_written_to(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        RunFolder(tmp_path, config_of(), learner_of(), overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "run", config_of(), learner_of())


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run to resume"):
        RunFolder(tmp_path / "run", config_of(), learner_of(), resume=True)
    assert not (tmp_path / "run").exists()


def test_resuming_and_overwriting_at_once_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"--resume continues .* --overwrite replaces it"):
        RunFolder(tmp_path, config_of(), learner_of(), resume=True, overwrite=True)


def test_resuming_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"another 'fast-lr' and 'seed'"):
        RunFolder(tmp_path, config_of(seed=5, fast_lr=0.3), learner_of(), resume=True)
    assert snapshot(tmp_path) == before


def test_resumed_run_may_go_further(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    with RunFolder(tmp_path, config_of(num_batches=1000), learner_of(), resume=True):
        pass
    assert load_config(tmp_path / "config.json").num_batches == 1000


def test_run_without_an_intact_checkpoint_does_not_start_from_scratch(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    for file in (tmp_path / "checkpoints").glob("*/state.json"):
        file.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        RunFolder(tmp_path, config_of(), learner_of(), resume=True)


def test_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"another architecture.*\(4,\) there and \(5,\) in the policy"):
        RunFolder(tmp_path, config_of(), learner_of(5), resume=True)


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
def test_run_folder_in_the_temporary_working_directory_of_a_ray_job_is_warned_of(
    place: str, is_lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / place, 0)
    warned = [
        record.message for record in caplog.records if "temporary working directory of a Ray job" in record.message
    ]
    assert len(warned) == is_lost
    assert all(str(tmp_path / place) in message and "--output-folder" in message for message in warned)
