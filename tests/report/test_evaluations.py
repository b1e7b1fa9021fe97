import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from maml_rl.cli.evaluate import run_test
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.record import record_run
from maml_rl.experiment.train import train
from maml_rl.report.comparison import step_table
from maml_rl.report.writing import write_report
from maml_rl.results.comparable import RunGroup, read_runs
from maml_rl.results.evaluation import Evaluation, difference_interval, load_evaluation
from maml_rl.results.scales import decimals, readable_interval
from maml_rl.results.verdict import GroupResult
from maml_rl.runs.checkpoint import list_checkpoints
from maml_rl.task_distributions.task_files import save_tasks
from tests.report.conftest import measured
from tests.small_runs import config_of


def made_up(returns: np.ndarray, run: Path | None = None) -> Evaluation:
    """Return an evaluation with these returns (N, K + 1) of single episodes, as of the last policy of a run."""
    tasks = [{"goal": [0.1, 0.2]} for _ in returns]
    found = Evaluation(
        "2DNavigation-v0", 0, tasks, (0.1,) * (returns.shape[1] - 1), returns[:, :, None].astype(np.float32)
    )
    if run is None:
        return found
    ((group,), _) = read_runs([run])
    whose = group.runs[0]
    return dataclasses.replace(found, seed=whose.config.seed, identity=whose.identity, checkpoint=whose.finished)


@pytest.fixture
def run(navigation_runs: Path, tmp_path: Path) -> Path:
    """A run of the test's own."""
    return Path(shutil.copytree(navigation_runs / "seed-0", tmp_path / "run"))


def test_every_seed_of_a_group_is_evaluated_and_the_first_is_kept_for_pictures(navigation_runs: Path) -> None:
    (result,), notices = measured([navigation_runs], 3)
    assert not notices
    assert [evaluation.seed for evaluation in result.evaluations] == [0, 1]
    assert result.sampled is not None
    assert result.sampled.config.seed == 0
    # The median of four episodes is the second.
    returns = result.sampled.evaluation.returns[0, 1]
    assert (returns < returns[result.sampled.median_episode(1, 0)]).sum() == 1
    untrained = evaluate(make_experiment(result.group.config), tasks=3, num_steps=2, num_workers=0)
    assert result.untrained is not None
    np.testing.assert_array_equal(result.untrained.returns, untrained.returns)
    assert result.sampled.evaluation.returns.shape == (3, 3, 4)
    assert (result.sampled.evaluation.returns != untrained.returns).any()


def test_newest_of_several_saved_evaluations_is_used_unchanged(run: Path) -> None:
    for name, value in (("evaluation", 1.0), ("evaluation-2", 2.0), ("evaluation-10", 3.0)):
        saved = made_up(value + np.arange(6.0).reshape(2, 3), run)
        saved.save(run / f"{name}.npz")
    # The name that a test in progress has reserved.
    (run / "evaluation-11.npz").touch()
    (result,), notices = measured([run], 0)
    assert not notices
    assert result.sampled is None
    np.testing.assert_array_equal(result.evaluations[0].returns, saved.returns)
    assert result.evaluations[0].tasks == saved.tasks


def test_policies_are_evaluated_on_the_tasks_of_a_file(navigation_runs: Path, tmp_path: Path) -> None:
    goals = [{"goal": [0.1, 0.2]}, {"goal": [0.3, -0.2]}, {"goal": [0.0, 0.4]}]
    save_tasks(tmp_path / "tasks.json", "2DNavigation-v0", goals)
    shutil.copytree(navigation_runs, tmp_path / "runs")
    # One of the runs has been tested on these tasks, the other on others.
    on_these = made_up(np.ones((3, 3)), tmp_path / "runs" / "seed-0")
    on_these = dataclasses.replace(on_these, tasks=goals, fixed_tasks=True)
    on_these.save(tmp_path / "runs" / "seed-0" / "evaluation.npz")
    made_up(np.ones((3, 3)), tmp_path / "runs" / "seed-1").save(tmp_path / "runs" / "seed-1" / "evaluation.npz")
    (result,), notices = measured([tmp_path / "runs"], tmp_path / "tasks.json")
    assert not notices
    assert [evaluation.tasks for evaluation in result.evaluations] == [goals, goals]
    assert [evaluation.fixed_tasks for evaluation in result.evaluations] == [True, True]
    np.testing.assert_array_equal(result.evaluations[0].returns, on_these.returns)
    # An interval on fixed tasks needs several adaptations.
    assert [evaluation.repetitions for evaluation in result.evaluations] == [1, 3]
    assert result.evaluations[1].returns.shape == (3, 3, 12)
    assert result.sampled is not None
    assert result.sampled.phases[0].rewards.shape[2] == 4
    assert result.sampled.median_episode(1, 2) < 4
    assert result.untrained is not None
    assert result.untrained.tasks == goals


def test_file_of_tasks_of_another_family_is_a_notice(navigation_runs: Path, tmp_path: Path) -> None:
    save_tasks(tmp_path / "tasks.json", "AntPos-v5", [{"position": [1.0, 1.0]}])
    (result,), (notice,) = measured([navigation_runs / "seed-0"], tmp_path / "tasks.json")
    assert "could not be tried" in notice
    assert "tasks of 'AntPos-v5'" in notice
    assert (result.evaluations, result.sampled) == ([], None)


def test_policy_of_a_killed_run_is_that_of_its_last_checkpoint(run: Path) -> None:
    (*_, before, last) = sorted((run / "checkpoints").iterdir())
    shutil.rmtree(last)
    number = int(before.name.removeprefix("iteration-"))
    (result,), _ = measured([run], 2)
    assert result.evaluations[0].checkpoint == number
    saved = dataclasses.replace(made_up(np.ones((2, 3)), run), checkpoint=number)
    saved.save(run / "evaluation.npz")
    (result,), notices = measured([run], 0)
    assert not notices
    np.testing.assert_array_equal(result.evaluations[0].returns, saved.returns)


def test_every_altered_byte_of_an_evaluation_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.npz"
    saved = made_up(np.array([[1.0, 2.0], [3.0, 4.0]]))
    saved = dataclasses.replace(saved, fixed_tasks=True, columns="episode", identity="of a policy", checkpoint=3)
    saved.save(file)
    content, draw = file.read_bytes(), np.random.default_rng(0)
    errors = []
    for place in range(0, len(content), 5):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.integers(8)]) + content[place + 1 :])
        try:
            found = load_evaluation(file)
        except ConfigError as error:
            errors.append(str(error))
        else:
            assert found.returns.tolist() == saved.returns.tolist()
            assert dataclasses.replace(found, returns=saved.returns) == saved
    assert len(errors) > 200
    for wrong in (b"\0", b"no archive"):
        file.write_bytes(wrong)
        with pytest.raises(ConfigError) as caught:
            load_evaluation(file)
        errors.append(str(caught.value))
    assert all("evaluation.npz cannot be read (" in error and "\n" not in error for error in errors)


def test_broken_evaluation_is_a_notice_and_the_policy_is_evaluated_again(run: Path) -> None:
    (run / "evaluation.npz").write_bytes(b"PK\x03\x04 cut off")
    (result,), (notice,) = measured([run], 2)
    assert "evaluation.npz cannot be read" in notice
    assert f"`test.py {run} --overwrite --output {run / 'evaluation.npz'}` writes it again" in notice
    assert len(result.evaluations[0].tasks) == 2


def test_run_without_a_checkpoint_is_a_notice(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (result,), (notice,) = measured([run], 2)
    assert "could not be tried on new tasks" in notice
    assert "no intact checkpoint" in notice
    assert (result.evaluations, result.sampled) == ([], None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env_name": "AntDir-v5"}, "is not used here: it is of another family"),
        ({"identity": "of other settings"}, "it is of other settings"),
        ({"identity": ""}, "it is of an earlier version, or another seed"),
        ({"seed": 7}, "it is of an earlier version, or another seed"),
        ({"checkpoint": 2}, "it is of another checkpoint"),
        ({"returns": np.ones((2, 2, 1), np.float32)}, "of the policy after 1 gradient step on 1 episode, not after 2"),
    ],
)
def test_evaluation_of_another_policy_or_with_other_settings_is_not_used(
    run: Path, changes: dict[str, object], words: str
) -> None:
    dataclasses.replace(made_up(np.ones((2, 3)), run), **changes).save(run / "evaluation.npz")
    (result,), (notice,) = measured([run], 0)
    assert words in notice
    assert not result.evaluations


def test_evaluation_before_a_change_of_the_environments_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = tmp_path / "of_mine.py"
    module.write_text("import gymnasium\ngymnasium.register('Mine-v0', 'tests.envs.third_party:WalkEnv')\n")
    monkeypatch.syspath_prepend(tmp_path)
    run, tasks = tmp_path / "run", tmp_path / "tasks.json"
    command = [str(run), "--tasks", "2", "--num-workers", "0"]
    given = {"evaluate_every": 1, "evaluation_tasks": str(tasks)}
    save_tasks(tasks, "of_mine:Mine-v0", [{"slope": 1.0}])
    train(config_of(env_name="of_mine:Mine-v0", max_episode_steps=5, num_batches=1, **given), run, num_workers=0)
    assert run_test(command) == 0
    assert "has changed" not in caplog.text
    # The run has a copy.
    tasks.write_text("[]")
    assert len(measured([run], 0)[0][0].evaluations) == 1
    module.write_text(module.read_text() + "# Changed.\n")
    (result,), (notice,) = measured([run], 0)
    assert result.evaluations == []
    assert "evaluation.npz is not used here: it is of other settings, or other files." in notice
    assert run_test(command) == 0
    assert f"the file of 'env-name' has changed since the run in {run} began: from here on" in caplog.text
    assert len(measured([run], 0)[0][0].evaluations) == 1
    # On which tasks it was, is known without the module.
    with pytest.raises(ConfigError, match=r"tasks\.json"):
        write_report([run], tmp_path / "report.html", tasks=tasks)
    on = load_evaluation(run / "evaluation-2.npz").tasks
    for given, found in ((on, 1), ([{"slope": 1.0}], 0)):
        save_tasks(tasks, "of_mine:Mine-v0", given)
        (result,), notices = measured([run], tasks)
        assert (len(result.evaluations), len(notices)) == (found, 1 - found)
    assert "imports nothing that a run names" in notices[0]
    caplog.clear()
    assert len(list_checkpoints(run / "checkpoints")) == 2
    record_run(run, tmp_path / "recorded", num_tasks=1, placement={"num-workers": 0}, minari=False)
    assert caplog.text.count("has changed since") == 1


def test_table_compares_groups_with_pretraining_at_equal_steps(
    navigation_runs: Path, compared_runs: list[Path]
) -> None:
    groups, _ = read_runs([navigation_runs, compared_runs[0]])
    tasks = [{"goal": [0.1, 0.01 * number]} for number in range(30)]
    rng = np.random.default_rng(0)
    hard, better = rng.normal(0.0, 10.0, 30), rng.uniform(0.5, 1.5, 30)
    # Both seeds are better on all tasks but three.
    better[:3] = -0.5

    def result(group: RunGroup, *returns: np.ndarray) -> GroupResult:
        evaluations = [
            Evaluation("2DNavigation-v0", seed, tasks, (0.1,), each[:, None, None].repeat(2, axis=1).astype(np.float32))
            for seed, each in enumerate(returns)
        ]
        return GroupResult(group, evaluations, None, None)

    ours, pretrained = result(groups[0], hard + better, hard + better + 0.01), result(groups[1], hard, hard - 0.2)
    # One iteration of pretraining uses half of the environment steps of one of MAML, so they are not compared.
    assert "difference to" not in str(step_table([ours, pretrained]))
    rows = [{**row, "env_steps": 2 * row["env_steps"]} for row in groups[1].runs[0].metrics]
    longer = dataclasses.replace(groups[1], runs=[dataclasses.replace(groups[1].runs[0], metrics=rows)])
    table = str(step_table([ours, dataclasses.replace(pretrained, group=longer)]))
    assert "difference to pretrained" in table
    found = difference_interval(ours.evaluations, pretrained.evaluations)
    assert readable_interval(found, decimals(found[0]))[1] in table
    assert "P(better than pretrained), %" in table
    assert "<td>90<small>" in table
