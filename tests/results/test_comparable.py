import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maml_rl.config import Config
from maml_rl.errors import ConfigError
from maml_rl.results.comparable import (
    RunGroup,
    check_comparable,
    common_steps,
    difference_at_common_steps,
    equal_steps,
    moving_mean,
    read_runs,
    unequal_settings,
)
from maml_rl.runs.metrics import MetricsLog


def write_run(folder: Path, returns: list[float | None], *, num_batches: int | None = None, **settings: object) -> Path:
    """Write the files that training would write."""
    folder.mkdir(parents=True)
    values = {"env-name": "2DNavigation-v0", "num-batches": num_batches or max(1, len(returns))}
    values |= {key.replace("_", "-"): value for key, value in settings.items()}
    (folder / "config.json").write_text(Config.model_validate(values).to_json())
    lines = [
        json.dumps({"iteration": index, "env_steps": 10 * (index + 1), "return/step_0": value, "time/sample_s": 2.0})
        for index, value in enumerate(returns)
    ]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def only_group(*folders: Path) -> RunGroup:
    (group,), notices = read_runs(folders)
    assert not notices
    return group


def test_seeds_of_one_experiment_are_one_group(tmp_path: Path) -> None:
    for seed in (2, 0, 1):
        write_run(tmp_path / "study" / f"seed-{seed}", [1.0], seed=seed)
    group = only_group(tmp_path / "study")
    assert [run.config.seed for run in group.runs] == [0, 1, 2]
    assert group.name == "study"
    assert len(only_group(group.runs[0].path, tmp_path / "study" / ".." / "study" / "seed-0").runs) == 1, "given twice"
    write_run(tmp_path / "other/deep/seed-0", [1.0], fast_lr=0.5)
    assert [len(each.runs) for each in read_runs([tmp_path])[0]] == [1, 3]


def names_of(*folders: Path) -> list[str]:
    return [group.name for group in read_runs(folders)[0]]


def test_groups_are_named_by_the_algorithm_where_it_tells_them_apart(tmp_path: Path) -> None:
    first = write_run(tmp_path / "maml" / "2d-navigation", [1.0])
    second = write_run(tmp_path / "promp" / "2d-navigation", [1.0], algorithm="promp", fast_lr=0.3)
    assert names_of(first, second) == ["maml-trpo", "promp"]
    third = write_run(tmp_path / "pretrained", [1.0], method="pretrain")
    assert names_of(first, second, third) == ["maml-trpo", "promp", "maml-trpo, pretrained"]
    assert names_of(first, third) == ["meta-trained", "pretrained"]


def test_groups_of_one_algorithm_are_named_by_as_few_settings_as_tell_them_apart(tmp_path: Path) -> None:
    slow, fast = write_run(tmp_path / "a", [1.0]), write_run(tmp_path / "b", [1.0], fast_lr=0.5)
    assert names_of(slow, fast) == ["fast-lr 0.1", "fast-lr 0.5"]
    wide = write_run(tmp_path / "c", [1.0], fast_lr=0.5, hidden_sizes=[100])
    assert names_of(slow, fast, wide) == [
        "hidden-sizes [64, 64], fast-lr 0.1",
        "hidden-sizes [64, 64], fast-lr 0.5",
        "hidden-sizes [100], fast-lr 0.5",
    ]


def test_groups_that_differ_in_many_settings_are_named_by_their_folders(tmp_path: Path) -> None:
    many = {"gamma": 0.9, "fast_lr": 0.5, "meta_batch_size": 7, "gae_lambda": 0.9}
    folders = write_run(tmp_path / "mine" / "run", [1.0]), write_run(tmp_path / "theirs" / "run", [1.0], **many)
    assert names_of(*folders) == ["mine", "theirs"]
    for seed in range(2):
        write_run(tmp_path / "study" / f"mine-{seed}", [1.0], seed=seed)
        write_run(tmp_path / "study" / f"theirs-{seed}", [1.0], seed=seed, **many)
    assert names_of(tmp_path / "study") == ["mine-0", "theirs-0"]


def test_groups_of_several_families_are_named_by_these(tmp_path: Path) -> None:
    other = {"env_name": "AntDir-v5", "gamma": 0.9, "fast_lr": 0.5, "meta_batch_size": 7}
    assert names_of(write_run(tmp_path / "a", [1.0]), write_run(tmp_path / "b", [1.0], **other)) == [
        "2DNavigation-v0",
        "AntDir-v5",
    ]


def test_runs_whose_sets_of_tasks_follow_their_seeds_are_one_experiment(tmp_path: Path) -> None:
    for name, sets in {"own": (0, 1, 2), "chosen": (1, 1, 1), "other": (7, 7, 7)}.items():
        for seed, of_tasks in enumerate(sets):
            tasks = {"distribution": "fixed", "seed": of_tasks}
            write_run(tmp_path / name / str(seed), [1.0], seed=seed, tasks=tasks)
    assert len(only_group(tmp_path / "own").runs) == 3
    groups, _ = read_runs([tmp_path / "chosen", tmp_path / "other"])
    assert [[run.config.seed for run in group.runs] for group in groups] == [[0, 1, 2]] * 2
    for seed in (3, 4):
        tasks = {"distribution": "fixed", "seed": seed}
        write_run(tmp_path / "promp" / str(seed), [1.0], seed=seed, tasks=tasks, algorithm="promp")
    assert check_comparable(read_runs([tmp_path / "own", tmp_path / "promp"])[0]) == []


def test_settings_of_the_machine_or_of_no_evaluations_make_no_other_experiment(tmp_path: Path) -> None:
    for seed in range(2):
        placed = {"num_workers": seed, "backend": "auto", "max_restarts": seed}
        write_run(tmp_path / "study" / str(seed), [1.0], seed=seed, evaluation_tasks=40 + seed, **placed)
    assert len(only_group(tmp_path / "study").runs) == 2


def test_unequal_settings_are_those_that_both_algorithms_have(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [1.0], seed=1, algorithm_settings={"max-kl": 0.1}, num_workers=1)
    second = write_run(tmp_path / "b", [1.0], algorithm="promp", fast_lr=0.5, gamma=0.9)
    groups, _ = read_runs([first, second])
    assert unequal_settings(groups) == {"gamma": [0.99, 0.9], "fast-lr": [0.1, 0.5]}
    one, other = (group.name for group in groups)
    gamma, step = f"gamma is 0.99 ({one}), 0.9 ({other})", f"fast-lr is 0.1 ({one}), 0.5 ({other})"
    assert check_comparable(groups) == [f"Not only the algorithm differs: {gamma}; {step}."]


def test_difference_is_that_of_the_last_returns_within_common_steps(tmp_path: Path) -> None:
    # Ten steps an iteration: thirty are common, at which the shorter ones end.
    long, short = ([[0.0, 1.0, 5.0, 99.0], [0.0, 1.0, 7.0, 99.0]], [[0.0, 0.0, 2.0], [0.0, 0.0, 4.0]])
    for name, lr, runs in (("long", 0.1, long), ("short", 0.5, short)):
        for seed, returns in enumerate(runs):
            write_run(tmp_path / name / str(seed), returns, seed=seed, fast_lr=lr)
    groups, _ = read_runs([tmp_path / "long", tmp_path / "short"])
    assert common_steps(groups) == 30
    assert not equal_steps(groups)
    assert equal_steps(groups[:1])
    found = difference_at_common_steps(*groups)
    assert found is not None
    interval, evaluated = found
    assert not evaluated
    # Welch's interval: both samples have the same variance, so their degrees of freedom add up.
    reach = 4.3027 * np.sqrt(2.0)
    np.testing.assert_allclose(interval, [3.0, 3.0 - reach, 3.0 + reach], rtol=1e-3)


def test_difference_between_single_runs_has_no_interval(tmp_path: Path) -> None:
    folders = write_run(tmp_path / "a", [1.0]), write_run(tmp_path / "b", [4.0], fast_lr=0.5)
    found = difference_at_common_steps(*read_runs(folders)[0])
    assert found is not None
    np.testing.assert_array_equal(found[0], [-3.0, np.nan, np.nan])


def test_runs_without_returns_near_their_common_steps_are_not_compared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [1.0, 2.0, None])
    second = write_run(tmp_path / "b", [1.0] * 3, fast_lr=0.5)
    assert difference_at_common_steps(*read_runs([first, second])[0]) is None


def test_unfinished_run_is_named_and_left_out_of_its_group_unless_it_is_asked_for(tmp_path: Path) -> None:
    for seed, returns in enumerate(([1.0, 1.0], [3.0, 3.0], [8.0])):
        write_run(tmp_path / "my study" / str(seed), returns, seed=seed, num_batches=2)
    (group,), notices = read_runs([tmp_path / "my study"])
    assert [run.config.seed for run in group.runs] == [0, 1]
    continues = f"`train.py --resume --output-folder '{tmp_path / 'my study' / '2'}'` continues it"
    assert notices[0] == f"{tmp_path / 'my study' / '2'} is unfinished, 1 of 2 iterations are done; {continues}."
    assert "left out of means and comparisons; `--unfinished` includes" in notices[1]
    (whole,), _ = read_runs([tmp_path / "my study"], unfinished=True)
    assert [run.config.seed for run in whole.runs] == [0, 1, 2]
    np.testing.assert_allclose(whole.curve("return/step_0").mean, [4.0])


def test_group_without_a_finished_run_is_not_compared_unless_it_is_asked_for(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", [1.0, 1.0]), write_run(tmp_path / "b", [4.0], num_batches=2, fast_lr=0.5)]
    assert [group.compared for group in read_runs(folders)[0]] == [True, False]
    assert [group.compared for group in read_runs(folders, unfinished=True)[0]] == [True, True]


def test_curve_is_the_mean_over_seeds_within_its_interval(tmp_path: Path) -> None:
    for seed, returns in enumerate(([0.0, 3.0], [1.0, 3.0], [5.0, 3.0])):
        write_run(tmp_path / "study" / str(seed), returns, seed=seed)
    curve = only_group(tmp_path / "study").curve("return/step_0")
    np.testing.assert_allclose(curve.mean, [2.0, 3.0])
    # Student's t of two degrees of freedom, and a variance of 7 among three.
    reach = 4.3027 * np.sqrt(7.0 / 3.0)
    np.testing.assert_allclose([curve.low, curve.high], [[2.0 - reach, 3.0], [2.0 + reach, 3.0]], rtol=1e-3)
    np.testing.assert_allclose(curve.seeds, [[0.0, 3.0], [1.0, 3.0], [5.0, 3.0]])
    one = only_group(tmp_path / "study" / "0")
    np.testing.assert_array_equal([one.curve("return/step_0").low, one.curve("return/step_0").high], [[np.nan] * 2] * 2)
    assert (one.runs[0].total("time/sample_s"), one.runs[0].total("absent")) == (4.0, 0.0)


def test_mean_ends_with_the_shortest_run_and_has_no_value_where_a_seed_has_none(tmp_path: Path) -> None:
    for seed, returns in enumerate(([1.0, 1.0, 7.0, 7.0], [3.0, None, 5.0])):
        write_run(tmp_path / "study" / str(seed), returns, seed=seed)
    curve = only_group(tmp_path / "study").curve("return/step_0")
    np.testing.assert_array_equal(curve.mean, [2.0, np.nan, 6.0])
    np.testing.assert_array_equal(curve.seeds, [[1.0, 1.0, 7.0], [3.0, np.nan, 5.0]])


def test_damaged_line_is_left_out_with_a_notice_and_the_run_is_not_called_unfinished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, [])
    log = MetricsLog(folder / "metrics.jsonl")
    for iteration in range(3):
        log.write({"iteration": iteration, "return/step_0": 1.0})
    log.close()
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('batches": 1', 'batches": 3'))
    for number in (1, 3):
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        before = b"".join(lines)
        lines[number - 1] = lines[number - 1].replace(b"1.0", b"9.0")
        (folder / "metrics.jsonl").write_bytes(b"".join(lines))
        (group,), (notice,) = read_runs([folder])
        assert f"metrics.jsonl: line {number} is damaged" in notice
        assert np.nanmax(group.curve("return/step_0").mean) == 1.0
        (folder / "metrics.jsonl").write_bytes(before)
    # With an iteration to go, a damaged line among those before is none of it.
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('batches": 3', 'batches": 4'))
    (folder / "metrics.jsonl").write_bytes(before.replace(b"1.0", b"9.0", 1))
    (group,), _ = read_runs([folder])
    assert not group.runs[0].complete


def test_altered_config_and_system_are_named_in_notices(tmp_path: Path) -> None:
    good, bad, worse = (write_run(tmp_path / name, [1.0]) for name in ("good", "bad", "worse"))
    for folder in (good, bad, worse):
        (folder / "system.json").write_text('{"cores": 2}')
        files = [folder / "config.json", folder / "system.json"]
        lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
        (folder / "SHA256SUMS").write_text("".join(lines))
    (bad / "system.json").write_text('{"cores": 9}')
    (worse / "config.json").write_text((worse / "config.json").read_text().replace("0.99", "0.98"))
    (group,), notices = read_runs([good, bad, worse])
    assert [(run.path, run.system) for run in group.runs] == [(good, {"cores": 2}), (bad, {})]
    assert [notice.split(" is damaged or was edited")[0] for notice in notices] == [
        str(bad / "system.json"),
        str(worse / "config.json"),
    ]


def test_run_without_metrics_is_read_with_a_notice(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink()
    (group,), (notice,) = read_runs([folder])
    assert len(group.curve("return/step_0").mean) == 0
    assert "no finished iteration" in notice
    assert "--resume" in notice


def test_folder_that_is_not_a_run_or_has_a_broken_config_is_skipped_with_a_notice(tmp_path: Path) -> None:
    good, bad = write_run(tmp_path / "run", [1.0]), write_run(tmp_path / "bad", [1.0])
    (bad / "config.json").write_text('{"env-name": "2DNavigation-v0", "gama": 1}')
    (tmp_path / "other").mkdir()
    folders = {tmp_path / "other": "--output-folder", tmp_path / "missing": f"did you mean '{good}'", bad: "gama"}
    groups, notices = read_runs([good, *folders])
    assert [run.path for group in groups for run in group.runs] == [good]
    for (folder, word), notice in zip(folders.items(), notices, strict=True):
        assert str(folder) in notice
        assert word in notice


def test_only_folders_that_are_not_runs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder, it has no config\.json; give the --output-folder"):
        read_runs([tmp_path])


def test_moving_mean_is_of_the_last_known_values() -> None:
    values = np.array([[1.0, 3.0, 5.0, 10.0], [1.0, np.nan, 5.0, 10.0]])
    np.testing.assert_allclose(moving_mean(values, 2), [[1.0, 2.0, 4.0, 7.5], [1.0, np.nan, 5.0, 7.5]])
    np.testing.assert_array_equal(moving_mean(values, 1), values)
    np.testing.assert_allclose(moving_mean(values[0], 99), [1.0, 2.0, 3.0, 4.75])


def test_curves_of_runs_with_different_steps_are_averaged_at_equal_steps(tmp_path: Path) -> None:
    # Both seeds have the return steps / 100, but one takes twice as many steps in an iteration.
    for seed, steps in enumerate((10, 20)):
        run = write_run(tmp_path / str(seed), [0.0] * 6, seed=seed)
        rows = [
            {"iteration": index, "env_steps": steps * (index + 1), "return/step_0": steps * (index + 1) / 100}
            for index in range(6)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = only_group(tmp_path / "0", tmp_path / "1").curve("return/step_0")
    assert curve.steps.tolist() == [10, 20, 30, 40, 50, 60]
    np.testing.assert_allclose(curve.mean[1:], curve.steps[1:] / 100)


def test_bands_of_curves_stay_within_the_returns_that_are_possible(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), [value], seed=seed) for seed, value in enumerate((-1.0, -9.0, -2.0))]
    group = replace(only_group(*runs), ranges={"return": (-10.0, 0.0)})
    curve = group.curve("return/step_0")
    assert (curve.low[0], curve.high[0]) == (-10.0, 0.0)
    assert replace(group, ranges={}).curve("return/step_0").high[0] > 0.0


def test_run_that_diverged_is_named_and_in_no_mean(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), [1.0, 2.0], seed=seed) for seed in range(3)]
    (runs[1] / "failure.json").write_text(json.dumps({"iteration": 1, "reason": "diverged"}))
    (group,), notices = read_runs([tmp_path])
    assert group.counted == "2 of 3 runs; one diverged at iteration 1"
    assert [run.config.seed for run in group.runs] == [0, 2]
    assert any("1 diverged at iteration 1, and is in no mean" in notice for notice in notices)
    (runs[1] / "failure.json").write_text(json.dumps({"iteration": "x", "reason": "diverged"}))
    _, notices = read_runs([tmp_path])
    assert any("is not what a run writes" in notice for notice in notices)


@pytest.mark.parametrize(
    "system",
    [
        {"packages": {"maml-rl": "0.1.0"}},
        {"packages": {"maml-rl": "0.2.0"}, "sources": {"algorithm": "of an edited file"}},
        {"packages": {"maml-rl": "0.2.0"}, "init": "of another run"},
    ],
)
def test_runs_of_other_versions_files_or_beginnings_are_other_experiments(
    tmp_path: Path, system: dict[str, object]
) -> None:
    for seed, each in enumerate(({"packages": {"maml-rl": "0.2.0"}}, system)):
        run = write_run(tmp_path / str(seed), [1.0], seed=seed)
        (run / "system.json").write_text(json.dumps(each))
    groups, _ = read_runs([tmp_path])
    assert len(groups) == 2
    assert len(unequal_settings(groups)) == 1
