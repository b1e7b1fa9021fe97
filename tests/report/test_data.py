import csv
import json
from pathlib import Path

import numpy as np
import pytest

from maml_rl.errors import ConfigError
from maml_rl.report import write_report
from maml_rl.results.comparable import read_runs
from maml_rl.runs.metrics import read_metrics


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_of_a_report_are_in_a_file_beside_it(navigation_runs: Path, tmp_path: Path) -> None:
    page = write_report([navigation_runs], tmp_path / "report.html", tasks=2, placement={"num-workers": 0}).read_text()
    training, returns = read(tmp_path / "report.training.csv"), read(tmp_path / "report.returns.csv")
    assert "report.training.csv and report.returns.csv" in page
    for seed in (0, 1):
        rows = [row for row in training if row["seed"] == str(seed)]
        metrics = read_metrics(navigation_runs / f"seed-{seed}" / "metrics.jsonl")
        for key in ("iteration", "env_steps", "return/step_1", "policy/std", "digest"):
            assert [row[key] for row in rows] == [str(each[key]) for each in metrics]
    # Two policies and a random one, two tasks, after 0, 1 and 2 steps.
    assert len(returns) == 3 * 2 * 3
    assert {row["experiment"] for row in returns} == {"navigation", "navigation: random initialization"}
    assert len(json.loads(returns[0]["parameters"])["goal"]) == 2
    (first,) = {
        row["return"]
        for row in returns
        if [row[key] for key in ("policy", "task", "gradient_steps")] == list("012")
        and row["experiment"] == "navigation"
    }
    assert np.isfinite(float(first))


def test_file_of_another_kind_is_not_replaced(navigation_runs: Path, tmp_path: Path) -> None:
    (tmp_path / "report.returns.csv").write_text("my,own\n")
    with pytest.raises(ConfigError, match=r"report\.returns\.csv exists and is not a table of a report"):
        write_report([navigation_runs], tmp_path / "report.html", tasks=0)
    assert [path.name for path in tmp_path.iterdir()] == ["report.returns.csv"]


def test_report_without_new_tasks_has_the_system_of_a_run_and_is_written_again(
    navigation_runs: Path, tmp_path: Path
) -> None:
    (group,), _ = read_runs([navigation_runs])
    system = group.runs[0].system
    for title in ("first", "second"):
        page = write_report([navigation_runs], tmp_path / "report.html", tasks=0, title=title).read_text()
        assert f"<h1>{title}</h1>" in page
    assert read(tmp_path / "report.returns.csv") == []
    assert f"{system['cores']} cores of {system['cpu']}" in page.split("</header>")[0]
