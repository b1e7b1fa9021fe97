import logging
import re
import shutil
from pathlib import Path

import gymnasium
import pytest

from maml_rl.cli.main import run_report
from maml_rl.envs.mujoco import rendering
from maml_rl.report import write_report
from maml_rl.task_distributions.task_files import save_tasks


def report(*arguments: object) -> int:
    return run_report(["--num-workers", "0", "--tasks", "2", *map(str, arguments)])


def test_report_is_in_the_run_folder_and_self_contained(
    navigation_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(navigation_runs / "seed-0", tmp_path / "run")
    assert report(tmp_path / "run") == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert str(tmp_path / "run" / "report.html") in capsys.readouterr().out
    addresses = re.findall(r'(?:src|href|action|data)="([^"]*)"|url\(([^)]*)\)|@import', page)
    assert all(address.startswith("data:") for address, _ in addresses)
    assert not re.search(r"<script[^>]* src", page)
    for title in ("Learning curve", "Return after each gradient step", "Paths before and after", "Time per iteration"):
        assert title in page


def test_every_problem_gets_a_sentence_and_the_rest_is_still_made(
    navigation_runs: Path,
    cheetah_run: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_opengl(self: object, model: object) -> None:
        raise gymnasium.error.DependencyNotInstalled("cannot draw: no usable OpenGL")

    monkeypatch.setattr(rendering.Renderer, "__init__", no_opengl)
    monkeypatch.setattr(rendering.Renderer, "close", lambda self: None)
    unfinished = tmp_path / "unfinished"
    shutil.copytree(navigation_runs / "seed-0", unfinished)
    lines = (unfinished / "metrics.jsonl").read_text().splitlines(keepends=True)
    (unfinished / "metrics.jsonl").write_text(lines[0] + lines[1][:20])
    with caplog.at_level(logging.WARNING, "maml_rl"):
        path = write_report(
            [cheetah_run, unfinished, tmp_path / "missing"],
            tmp_path / "report.html",
            tasks=2,
            placement={"num-workers": 0},
        )
    page = path.read_text()
    for sentence in (
        "unfinished, 1 of 3 iterations are done",
        "there is no folder",
        "There are no videos: cannot draw: no usable OpenGL.",
    ):
        assert sentence in page
        assert any(sentence in message for message in caplog.messages)
    for title in ("Learning curve", "Return after each gradient step", "Return against direction", "Paths before"):
        assert title in page


def test_names_of_runs_cannot_inject_markup_and_every_setting_is_a_row(navigation_runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(navigation_runs / "seed-0", folder)
    page = write_report([folder], tmp_path / "report.html", tasks=0).read_text()
    assert "<img" not in page
    assert "&lt;img src=x" in page
    settings = page.split("Settings</h2>")[1]
    changed, _, others = settings.partition("settings with their defaults")
    assert '<th scope="row">cg-iters</th><td><code>2</code>' in changed
    assert '<th scope="row">max-kl</th><td><code>0.01</code>' in others
    assert "algorithm-settings" not in settings


def test_families_have_charts_of_their_own(navigation_runs: Path, cheetah_run: Path, tmp_path: Path) -> None:
    page = write_report(
        [navigation_runs, cheetah_run], tmp_path / "report.html", tasks=2, num_videos=0, placement={"num-workers": 0}
    ).read_text()
    assert "<h1>2DNavigation-v0 and HalfCheetahDir-v5</h1>" in page
    assert "What differs" in page
    for title in (
        "Learning curve",
        "Return after each gradient step",
        "Returns in numbers",
        "Size of the meta-updates",
    ):
        assert page.count(f"{title}</h3>") == 2
    assert "Learning curves</h3>" not in page
    assert page.count('<i class="swatch untrained"></i><b>random initialization</b>') == 2


@pytest.mark.slow
def test_report_compares_the_methods_on_the_tasks_of_a_file(
    navigation_runs: Path, compared_runs: list[Path], tmp_path: Path
) -> None:
    save_tasks(tmp_path / "tasks.json", "2DNavigation-v0", [{"goal": [0.1, 0.2]}, {"goal": [0.3, -0.2]}])
    runs = [navigation_runs / "seed-0", *compared_runs]
    assert report(*runs, "--output", tmp_path / "report.html", "--tasks", tmp_path / "tasks.json") == 0
    page = (tmp_path / "report.html").read_text()
    for phrase in (
        "meta-trained",
        "pretrained",
        "oracle, sees the task",
        "random initialization",
        "On the same 2 tasks of a file",
        "interquartile mean",
    ):
        assert phrase in page
    assert page.count("Return after each gradient step</h3>") == 1


def test_report_of_an_oracle_alone_is_made(compared_runs: list[Path], tmp_path: Path) -> None:
    assert report(compared_runs[-1], "--output", tmp_path / "report.html", "--title", "of an oracle") == 0
    page = (tmp_path / "report.html").read_text()
    assert "<h1>of an oracle</h1>" in page
    assert "without adaptation" in page
    assert "random initialization" not in page


def test_report_of_several_runs_is_written_to_their_common_folder(
    navigation_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(navigation_runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert write_report(["runs/seed-0", "runs/seed-1"], tasks=0) == Path("runs/report.html")
    assert write_report([Path("runs/seed-0"), tmp_path / "runs" / "seed-1"], tasks=0) == Path("report.html")


def test_report_shows_which_of_its_steps_is_next(tmp_path: Path, navigation_runs: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    write_report(
        [navigation_runs],
        tmp_path / "report.html",
        tasks=2,
        placement={"num-workers": 0},
        num_videos=1,
        on_step=lambda *step: steps.append(step),
    )
    # Two runs; navigation has no videos.
    runs = [f"measuring {navigation_runs / name}" for name in ("seed-0", "seed-1")]
    assert steps == [(runs[0], 0, 3), (runs[1], 1, 3), ("writing the page", 3, 3)]
