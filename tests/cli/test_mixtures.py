"""A mixture of families from training to reports: every family apart, and the mean of normalized returns."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from maml_rl.cli import main as cli
from maml_rl.config import load_config
from maml_rl.config.catalog import find_config
from maml_rl.envs import make_vector_env
from maml_rl.experiment import certified, evaluate
from maml_rl.results.evaluation import NORMALIZED
from maml_rl.runs.metrics import read_metrics
from tests.small_runs import SMALL

pytestmark = pytest.mark.timeout(120)
FAMILIES = ["2DNavigation-v0", "SparsePointGoal-v0"]
REFERENCES = {name: (low, high) for name, low, high in zip(FAMILIES, (-100.0, -2.0), (-10.0, 10.0), strict=True)}


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write references of short episodes of these families."""
    entries = [
        {"env-name": name, "env-kwargs": {}, "max-episode-steps": 10, "random": low, "oracle": high}
        for name, (low, high) in REFERENCES.items()
    ]
    (tmp_path / "references.json").write_text(json.dumps(entries))
    monkeypatch.setattr(evaluate, "REFERENCES", tmp_path / "references.json")
    monkeypatch.chdir(tmp_path)


def test_every_family_is_shown_apart_and_the_mean_is_normalized(capsys: pytest.CaptureFixture[str]) -> None:
    values = {**SMALL, "env-name": FAMILIES, "num-batches": 2, "evaluate-every": 2, "evaluation-tasks": 6}
    for name, more in {"one": {}, "other": {"gamma": 0.5}}.items():
        Path(f"{name}.yaml").write_text(json.dumps(values | more))
    quick = ["--num-workers", "0", "--log-level", "warning"]
    assert cli.main(["compare", "one.yaml", "other.yaml", "--seeds", "1", "--tasks", "20", *quick]) == 0
    shown = capsys.readouterr().out
    normalized = "Mixture-v0, normalized from random actions (0) to the oracle of each family (1)"
    assert re.findall(r"Returns on the same (\d+) new tasks of (.+?), after", shown) == [
        *(("20", normalized), ("10", FAMILIES[0]), ("10", FAMILIES[1])),
    ]
    run = next(Path("runs/compare/one").iterdir())
    assert cli.main(["test", str(run), "--meta-batch-size", "20", *quick]) == 0
    lines = capsys.readouterr().out.splitlines()
    with np.load(run / "evaluation.npz") as arrays:
        returns, tasks = arrays["returns"], json.loads(str(arrays["tasks"]))
        for name, pair in REFERENCES.items():
            assert tuple(arrays[f"reference/{name}"]) == pair
    bounds = np.array([REFERENCES[task["family"]] for task in tasks])[..., None, None]
    expected = ((returns - bounds[:, 0]) / (bounds[:, 1] - bounds[:, 0])).mean((0, 2))
    place = lines.index(f"{normalized}:")
    assert [float(line.split()[1]) for line in lines[place + 2 : place + 2 + len(expected)]] == pytest.approx(
        expected, abs=0.006
    )
    for name in FAMILIES:
        assert f"{name}: 10 of these tasks" in lines
    assert (
        cli.main(["report", str(run), "--output", "page.html", "--videos", "0", "--tasks", "0", "--log-level", "error"])
        == 0
    )
    page = Path("page.html").read_text()
    for title in (normalized, *FAMILIES):
        assert f"<h2>{title}</h2>" in page
    for part in (NORMALIZED, *FAMILIES):
        assert f"Evaluations: {part}" in page
    metrics = read_metrics(run / "metrics.jsonl")[-1]
    means = [metrics[f"evaluation/of {name}/step_1"] for name in FAMILIES]
    assert np.mean(means) == pytest.approx(metrics["evaluation/return/step_1"], rel=1e-5)


def test_distance_of_tasks_of_a_mixture_is_within_each_family() -> None:
    tasks = certified.find_benchmark("half-cheetahs-2x100-v1").tasks()
    of_bodies = [task for task in tasks if "body_mass" in task]
    others = [task for task in tasks if "body_mass" not in task]
    assert 0.0 < certified.nearest([*others, *of_bodies[:5]], of_bodies[5:]) < np.inf
    assert certified.nearest(others, of_bodies) == np.inf


@pytest.mark.parametrize(
    ("kwargs", "steps", "expected"),
    [
        ({"families": FAMILIES}, 10, FAMILIES),
        ({"families": {FAMILIES[1]: 2.0, "PointGoal-v0": 1.0}}, 10, FAMILIES[1:]),
        ({"families": FAMILIES}, None, []),
        ({"families": FAMILIES, "arguments": {FAMILIES[0]: {"low": 0.0}}}, 10, FAMILIES[1:]),
        ({"families": FAMILIES, "arguments": {FAMILIES[0]: {"normalization_scale": 3.0}}}, 10, FAMILIES),
        ({"families": FAMILIES, "arguments": {FAMILIES[0]: {"max_episode_steps": 5}}}, 10, FAMILIES[1:]),
        ({"families": FAMILIES, "arguments": {FAMILIES[1]: {"max_episode_steps": 10}}}, None, FAMILIES[1:]),
    ],
)
def test_references_are_those_of_the_same_problem(kwargs: dict[str, object], steps: int, expected: list[str]) -> None:
    assert list(evaluate.references(kwargs, steps)) == expected


def test_references_of_the_package_are_of_its_default_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for each in json.loads(evaluate.REFERENCES.read_text()):
        env = make_vector_env(each["env-name"], {})
        assert {name: getattr(env, name) for name in each["env-kwargs"]} == each["env-kwargs"]
        assert each["random"] < each["oracle"]
    config = load_config(find_config("amago/half-cheetahs"))
    assert evaluate.references(config.env_kwargs, config.max_episode_steps).keys() == {
        "HalfCheetahDir-v5",
        "HalfCheetahVel-v5",
        "HalfCheetahRandParams-v5",
    }
