"""Tables, JSON and the options that all benchmarks share."""

import importlib.util
import json
import re

import pytest

from benchmarks.measuring import Samples
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, draw, finish


@pytest.fixture
def report():
    facts = {"command": "python -m x", "cpu": "Z80", "cores": 1, "python": "3", "versions": {"a": "1", "b": None}}
    report = Report("x", {**facts, "load_before": 0.0}, {"repeats": 3})
    report.add("Speed", Row("fast", Samples([1500.0, 2000.0, 2500.0]), "steps/s", "one process"))
    report.add("Count", Row("faults", Samples([7.0]), "count"))
    report.remarks.append("somebody was left out")
    return report


def test_text_has_median_minimum_and_maximum_and_one_number_for_one_value(report):
    text = report.as_text()
    assert "| fast | one process | steps/s | 2,000 | 1,500 | 2,500 |" in text
    assert "| faults |  | count | 7 | | |" in text
    assert "Z80, 1 cores, Python 3, a 1" in text
    assert text.endswith("somebody was left out")
    assert "expect noise" not in text
    report.machine["load_before"] = 3.0
    assert "expect noise" in report.as_text()


def test_json_holds_every_value(report, tmp_path, capsys):
    options = common_options("x").parse_args(["--json", str(tmp_path / "new" / "x.json")])
    finish(report, options)
    written = json.loads((tmp_path / "new" / "x.json").read_text())
    assert written["tables"]["Speed"][0]["values"] == [1500.0, 2000.0, 2500.0]
    assert written["machine"]["versions"] == {"a": "1", "b": None}
    assert capsys.readouterr().out.strip() == report.as_text()


def test_chart_has_a_bar_of_each_median_and_is_drawn_again_from_the_json(report, tmp_path):
    options = common_options("x").parse_args(["--chart", str(tmp_path / "x.svg"), "--json", str(tmp_path / "x.json")])
    finish(report, options)
    drawn = (tmp_path / "x.svg").read_text()
    assert all(each in drawn for each in ("fast, one process", ">2,000<", "faults", "Z80, 1 cores"))
    (first, end), _ = [map(float, bar) for bar in re.findall(r'interval bar rest" d="M([\d.]+) [\d.]+H([\d.]+)', drawn)]
    spread = [float(x) for x in re.search(r'interval run" d="M([\d.]+) [\d.]+H([\d.]+)', drawn).groups()]
    # Of 1,500, 2,000 and 2,500 from 0.
    assert spread == pytest.approx([first + 0.75 * (end - first), first + 1.25 * (end - first)], abs=0.2)
    draw(json.loads((tmp_path / "x.json").read_text()), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn


def test_missing_package_or_wrong_ending_ends_the_command_before_it_measures(monkeypatch):
    options = common_options("x").parse_args(["--chart", "x.gif"])
    with pytest.raises(SystemExit, match=r"--chart x\.gif must end with"):
        check_packages(options)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--others needs envpool, which is not installed; try: pip install"):
        check_packages(common_options("x").parse_args([]), envpool="--others")


def test_settings_omit_the_paths_of_results():
    options = common_options("x").parse_args(["--json", "a", "--chart", "b", "--quick"])
    assert chosen(options) == {"repeats": 5, "warmup": 1, "quick": True, "seed": 0}
