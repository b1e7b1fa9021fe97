"""A minute of faults of all kinds: they change no result, leave no process, and no resource grows."""

import json

import pytest

from benchmarks import soak

COUNTS = {"digest mismatches": 0, "hangs": 0, "processes left": 0, "files left in /dev/shm": 0}


def found(path):
    tables = json.loads(path.read_text())["tables"]
    return {row["name"]: row["median"] for row in tables[soak.FOUND]}, tables


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_minute_of_faults_changes_no_result(tmp_path):
    soak.main(["--minutes", "1", "--quiet", "--json", str(tmp_path / "soak.json")])
    counts, tables = found(tmp_path / "soak.json")
    assert {name: counts[name] for name in COUNTS} == COUNTS
    assert counts["faults injected: kill"] >= 10
    assert counts["faults injected: stop"] >= 1
    # A worker that is killed while its run ends need not be replaced.
    kills, replaced = counts["faults injected: kill"], counts["workers replaced"]
    assert kills - counts["training runs"] - 1 <= replaced <= kills
    growth = {row["name"]: row["median"] for row in tables[soak.GROWTH]}
    assert growth["open files"] == 0
    assert growth["processes"] == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_kills_are_counted_and_timed(tmp_path):
    file = f"--json={tmp_path / 'soak.json'}"
    soak.main(["--kills", "3", "--families", "2DNavigation-v0", "--iterations", "2", "--quiet", file])
    counts, tables = found(tmp_path / "soak.json")
    assert counts["faults injected: kill"] == 3
    assert {name: counts[name] for name in COUNTS} == COUNTS
    assert 0.0 < tables[soak.RECOVERY][0]["median"] < 5.0


def test_growth_compares_the_last_third_with_the_first_without_the_first_run():
    assert soak.growth([900, 1, 2, 3, 10, 11, 12, 21, 22, 23]) == 20


def test_negative_minutes_are_refused(capsys):
    with pytest.raises(SystemExit):
        soak.main(["--minutes", "-1"])
    assert "--minutes must be positive" in capsys.readouterr().err
