"""Every benchmark command runs from end to end with tiny sizes, and writes its table, its JSON and its chart.

Only the cheapest of them run for every change; the others are nightly.
"""

import json

import pytest

from benchmarks import accelerator, device_updates, sampling, scaling, updates
from maml_rl.machine import usable_cores


@pytest.fixture
def files(tmp_path):
    return tmp_path / "result.json", tmp_path / "result.svg"


def run(main, files, *arguments, positive=True):
    main(["--quick", "--quiet", "--json", str(files[0]), "--chart", str(files[1]), *arguments])
    assert files[1].stat().st_size > 1000
    result = json.loads(files[0].read_text())
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["versions"]["mujoco"]
    rows = {row["name"]: row for table in result["tables"].values() for row in table}
    assert all(row["min"] <= row["median"] <= row["max"] for row in rows.values())
    assert not positive or all(row["median"] > 0.0 for row in rows.values())
    return result, rows


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sampling_measures_ours_the_limits_and_installed_systems(files, capsys):
    result, rows = run(sampling.main, files)
    for workload in ("HalfCheetahDir-v5 2 x 2 x 5", "Walker2DRandParams-v5 2 x 2 x 5"):
        share = rows[f"maml_rl, {workload}"]["median"] / rows[f"replay, {workload}"]["median"]
        assert rows[workload]["median"] == pytest.approx(share)
    names = set(rows) | {remark.split(" was left out")[0] for remark in result["remarks"]}
    assert {other.name for other in sampling.OTHERS} <= names
    assert "How many times as fast as others" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_system_that_is_not_installed_is_left_out_with_a_sentence(files, monkeypatch):
    monkeypatch.setattr(sampling, "OTHERS", (sampling.Other("nobody's", "nobody:make", "nothing", "nobody_s_package"),))
    result, _ = run(sampling.main, files, "--only", "others")
    (remark,) = result["remarks"]
    assert remark.startswith("nobody's was left out, because nobody_s_package is not installed; try: pip install")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scaling_measures_cores_environments_and_counts(files):
    cores = ["2", "1"][usable_cores() == 1 :]
    result, rows = run(scaling.main, files, "--cores", *cores, "--environments", "4", "40", "--minutes", "1")
    tables = result["tables"]
    assert [row["median"] <= 1.05 for row in tables[scaling.BUSIEST]] == [True] * len(scaling.CASES)
    seconds = [row["median"] for row in tables[scaling.SECONDS]]
    # In threads and in workers, and on one core once.
    assert len(seconds) == 3 * (2 * len(cores) - 1)
    for sampled, update, whole in zip(seconds[::3], seconds[1::3], seconds[2::3], strict=True):
        assert sampled + update == pytest.approx(whole)
    counts = {row["name"]: row["median"] for row in tables[scaling.COUNTS]}
    assert counts["1 core, messages to workers in a phase"] == 1.0
    # Two phases in both workers, adaptation, a gradient and an evaluation.
    assert counts["2 workers, main process, messages in an iteration"] >= 2 * 2 + 1 + 2
    assert counts["2 workers, main process, CPU time of an update in workers"] > 0.0
    assert counts["of these under Python's lock"] < counts["update on one core, profiled"]
    assert {"physics", "inference", "assembly"} <= {row["name"].split(", ")[1] for row in tables[scaling.STAGES]}
    assert [row["name"] for row in tables[scaling.MEMORY]] == ["4 environments", "40 environments"]
    assert all(0.05 < row["median"] < 5.0 for row in tables[scaling.MEMORY])
    share = rows["40 environments, share"]["median"]
    ours, limit = (rows[f"40 environments, {name}"]["median"] for name in (scaling.SAMPLER, scaling.LIMIT))
    assert share == pytest.approx(ours / limit)


def test_size_that_does_not_make_whole_tasks_is_refused(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--environments", "50"])
    assert "must be a multiple" in capsys.readouterr().err


@pytest.mark.slow
def test_updates_on_a_device_are_written_row_by_row_with_the_errors_of_learners(tmp_path, capsys):
    path = tmp_path / "updates.json"
    names = ["varibad/gridnavi", "dpt/bandit-k5-n100", "maml/no-such-config"]
    device_updates.LEARNERS["maml/no-such-config"] = {}
    try:
        updates.main(["--quick", "--repeats", "1", "--json", str(path), "--only", *names])
    finally:
        del device_updates.LEARNERS["maml/no-such-config"]
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == names
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert all(row["seconds"] > 0.0 and row["error"] is None for row in rows[:2])
    assert rows[2]["seconds"] is None
    assert "there is no config 'maml/no-such-config'" in rows[2]["error"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sections", [["arrays", "copies"], pytest.param(list(accelerator.SECTIONS), marks=pytest.mark.nightly)]
)
def test_accelerator_shows_that_every_section_works(files, sections):
    pytest.importorskip("mujoco_warp")
    rows = accelerator.main(["--device", "cpu", "--json", str(files[0]), "--only", *sections])
    assert json.loads(files[0].read_text())["rows"] == rows
    assert {row["section"] for row in rows} == {*sections, "end"}
    assert [row for row in rows if row["value"] == "failed"] == []
