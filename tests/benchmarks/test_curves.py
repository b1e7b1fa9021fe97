"""The learning-curve chart."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.curves import columns, label, main, read_metrics


def test_chart_is_drawn_from_a_folder_and_from_a_file(tmp_path: Path) -> None:
    keys = [f"{name}/step_{step}" for name in ("return", "info/success") for step in (0, 1)]
    rows = [{"iteration": i, **dict.fromkeys(keys, float(i))} for i in range(5)]
    (tmp_path / "run").mkdir()
    for path in (tmp_path / "run" / "metrics.jsonl", tmp_path / "other.jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_metrics(tmp_path / "run") == rows
    chart = tmp_path / "charts" / "curves.svg"
    main([str(tmp_path / "run"), str(tmp_path / "other.jsonl"), "--chart", str(chart)])
    assert titles(chart) == ["run", "other"]
    assert "after 1 step" in chart.read_text()
    main([str(tmp_path / "run"), str(tmp_path / "other.jsonl"), "--infos", "success", "--chart", str(chart)])
    assert titles(chart) == ["run", "run", "other", "other"]


def titles(chart: Path) -> list[str]:
    texts = ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in texts if "title" in text.get("class", "").split()]


def test_episodes_of_a_trial_are_drawn_like_inner_steps() -> None:
    row = {"iteration": 0, **{f"return/episode_{number}": 0.0 for number in (10, 2, 0)}, "loss/before": 0.0}
    assert columns(row) == ["episode_0", "episode_2", "episode_10"]
    assert [label(column) for column in columns(row)] == [f"episode {number}" for number in (1, 3, 11)]
    assert columns({"return/step_1": 0.0, "return/step_0": 0.0}) == ["step_0", "step_1"]


def test_titles_must_match_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--chart", str(tmp_path / "x.svg"), "--titles", "one", "two"])
    assert "one title for each" in capsys.readouterr().err
