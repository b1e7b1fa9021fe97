"""Certified benchmarks: fixed tasks, checked rules, and submissions of results."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import gymnasium
import numpy as np
import pytest
import torch

from benchmarks import submissions
from maml_rl.cli.main import main
from maml_rl.envs import SampleTaskOnReset, make_vector_env
from maml_rl.errors import ConfigError
from maml_rl.experiment import certified, standings
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.certified import (
    benchmarks,
    find_benchmark,
    identity,
    measure,
    nearest,
    read_submission,
    save_submission,
    submission,
)
from maml_rl.experiment.train import train
from scripts import certify_tasks
from tests.small_runs import config_of

BENCHMARKS = benchmarks()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_tasks_are_the_certified_ones_and_of_the_family(name: str) -> None:
    rules = BENCHMARKS[name]
    assert hashlib.sha256(rules.file.read_bytes()).hexdigest() == rules.sha256
    tasks = rules.tasks()
    if rules.env_name.startswith("MetaWorld/"):
        # The tests of Meta-World compare them with its own.
        return
    env = make_vector_env(
        rules.env_name, dict(rules.env_kwargs), num_envs=len(tasks), max_episode_steps=rules.max_episode_steps
    )
    env.reset_task(tasks)
    assert env.max_episode_steps == rules.max_episode_steps
    env.close()


def test_every_file_of_tasks_belongs_to_a_benchmark() -> None:
    files = {path.stem for path in certified.FOLDER.glob("*.json")} - {"benchmarks", "references"}
    assert files == set(BENCHMARKS)


def test_gridnavi_has_every_goal_once() -> None:
    goals = {tuple(task["goal"]) for task in BENCHMARKS["gridnavi-v1"].tasks()}
    corner = {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}
    assert goals == {(float(x), float(y)) for x in range(5) for y in range(5)} - corner


def test_certified_benchmark_is_never_drawn_again() -> None:
    with pytest.raises(ConfigError, match="wind-v1 is certified already and must not change; add a new version"):
        certify_tasks.main(["wind-v1"])


def test_changed_tasks_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = BENCHMARKS["wind-v1"]
    content = rules.file.read_text().replace("0", "1", 1)
    (tmp_path / "wind-v1.json").write_text(content)
    monkeypatch.setattr(certified, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="does not hold the certified tasks of wind-v1, its SHA-256 differs; install"):
        rules.tasks()
    (tmp_path / "wind-v1.json").unlink()
    with pytest.raises(ConfigError, match="cannot read the tasks of wind-v1"):
        rules.tasks()


def test_an_unknown_benchmark_is_answered_with_the_closest() -> None:
    with pytest.raises(ConfigError, match="there is no benchmark 'wind-v2'; did you mean 'wind-v1'"):
        find_benchmark("wind-v2")


NAVIGATION: dict[str, Any] = {
    "env-name": "2DNavigation-v0",
    "env-kwargs": {"low": -0.5, "high": 0.5, "normalization_scale": 1.0},
    "max-episode-steps": 100,
    "fast-batch-size": 20,
}


def test_arguments_that_are_defaults_need_not_be_given() -> None:
    config = config_of().override(NAVIGATION | {"env-kwargs": {"normalization_scale": 1.0}})
    BENCHMARKS["2d-navigation-v1"].check(make_experiment(config), 1)


def test_unit_of_the_actions_is_the_own_of_a_policy() -> None:
    config = config_of().override(NAVIGATION | {"env-kwargs": {"normalization_scale": 10.0}})
    BENCHMARKS["2d-navigation-v1"].check(make_experiment(config), 1)


def test_a_check_leaves_no_environment_open(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = make_experiment(config_of().override(NAVIGATION | {"max-episode-steps": None}))
    made = [experiment.make_env()]
    monkeypatch.setattr(Experiment, "make_env", lambda self: made[0])
    monkeypatch.setattr(certified, "make_vector_env", lambda *given: made.append(make_vector_env(*given)) or made[-1])
    BENCHMARKS["2d-navigation-v1"].check(experiment, 1)
    assert [env.closed for env in made] == [True, True]


@pytest.mark.parametrize(
    ("values", "num_steps", "message"),
    [
        (
            {"env-name": "PointGoal-v0", "env-kwargs": {}},
            1,
            "is of the family 2DNavigation-v0, and the policy of Point",
        ),
        (
            {"env-kwargs": {"high": 1.0}},
            1,
            "has environments with high: 0.5, and the policy was trained with 1.0; train",
        ),
        (
            {"max-episode-steps": 50},
            1,
            "episodes of 100 steps, and the policy was trained with 50; train it with --max-",
        ),
        ({"method": "oracle"}, 0, "an oracle observes its task"),
        (
            {},
            2,
            "allows 20 episodes before those that count, .* adapt to 40; give --num-steps 1, or --fast-batch-size 10",
        ),
        ({"fast-batch-size": 30}, 1, "would adapt to 30; give --fast-batch-size 20"),
    ],
)
def test_a_policy_of_another_problem_is_refused(values: dict[str, Any], num_steps: int, message: str) -> None:
    experiment = make_experiment(config_of().override(NAVIGATION | values))
    with pytest.raises(ConfigError, match=message) as caught:
        BENCHMARKS["2d-navigation-v1"].check(experiment, num_steps)
    assert "\n" not in str(caught.value)


def test_a_trial_longer_than_allowed_is_refused() -> None:
    values = {"env-name": "GridNavi-v0", "env-kwargs": {}, "max-episode-steps": 15, "observe-last": True}
    config = config_of().override({**values, "algorithm": "rl2", "fast-batch-size": 5})
    with pytest.raises(ConfigError, match=r"allows 3 episodes .* would adapt to 4; give --fast-batch-size 4"):
        BENCHMARKS["gridnavi-v1"].check(make_experiment(config), 0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_run_is_measured_and_its_result_appears_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=2)
    monkeypatch.setattr(certified, "benchmarks", lambda: {small.name: small})
    monkeypatch.setattr(submissions, "benchmarks", lambda: {small.name: small})
    folder = tmp_path / "submissions"
    folder.mkdir()
    result = folder / "ours.json"
    command = ["test", "zoo:rl2/bandit-k5-n10", "--benchmark", small.name, "--submit", str(result)]
    command += ["--policy-name", "ours | 256 units"]
    assert main([*command, "--output", str(tmp_path / "x.npz"), "--num-workers", "0"]) == 0
    assert "500 tasks of bandit-k5-n10-v1, a trial of 1 episode of each, 2 times" in capsys.readouterr().out
    content = read_submission(result)
    assert content["command"] == "maml-rl test zoo:rl2/bandit-k5-n10 --benchmark bandit-k5-n10-v1"
    with np.load(tmp_path / "x.npz") as saved:
        np.testing.assert_allclose(np.mean(content["returns"]), saved["returns"].mean(), rtol=1e-6)
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- submissions -->\n<!-- end of submissions -->\nbelow\n")
    submissions.main(["--folder", str(folder), "--page", str(page)])
    mean = np.mean(content["returns"])
    assert f"| [ours &#124; 256 units](submissions/ours.json) | rl2 | 0 | {mean:.2f} |" in page.read_text()
    assert page.read_text().startswith("above\n")
    assert page.read_text().endswith("below\n")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_policy_of_a_run_that_is_not_trained_can_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=2)
    monkeypatch.setattr(certified, "benchmarks", lambda: {small.name: small})
    config = {"env-name": "Bandit-K5-v0", "env-kwargs": {"pulls": 10}, "max-episode-steps": 10, "observe-last": True}
    trials = {"algorithm": "rl2", "fast-batch-size": 1, "num-batches": 1}
    train(config_of().override({**config, **trials}), tmp_path / "run", num_workers=0)
    for checkpoint, meta_updates in (("initial", 0), ("last", 1)):
        result = tmp_path / f"{checkpoint}.json"
        command = ["test", str(tmp_path / "run"), "--checkpoint", checkpoint, "--num-workers", "0"]
        assert main([*command, "--benchmark", small.name, "--submit", str(result)]) == 0
        assert read_submission(result)["policy"]["meta-updates"] == meta_updates


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--submit", "x.json"], "--submit writes the result of a benchmark; give --benchmark, too"),
        (["--policy-name", "ours"], "--policy-name is what a table calls the policy; give --submit, too"),
        (["--submit", "x.json", "--policy-name", " "], "--policy-name is empty; give a name, or leave it out"),
        (["--benchmark", "wind-v1", "--repetitions", "2"], "--benchmark decides .* leave out --repetitions"),
        (["--benchmark", "wind-v1", "--num-batches", "2"], "--benchmark decides .* leave out --num-batches"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["test", "zoo:rl2/bandit-k5-n10", *options]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


class CountsPulls:
    """Records what it observes, and pulls the first arm."""

    def __init__(self, action: Any = 0) -> None:
        self.action, self.told, self.trials = action, [], 0

    def reset(self, num_tasks: int) -> None:
        self.num_tasks, self.trials = num_tasks, self.trials + 1

    def act(self, observations: Any, rewards: Any, dones: Any) -> Any:
        assert len(observations) == len(rewards) == len(dones) == self.num_tasks
        self.told.append((observations.copy(), rewards, dones))
        return np.repeat([self.action], self.num_tasks, axis=0)


def test_a_policy_of_another_package_is_measured_on_the_same_tasks() -> None:
    rules = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=2)
    policy = CountsPulls()
    evaluation = measure(policy, rules, seed=3)
    assert evaluation.returns.shape == (500, 1, 2)
    assert policy.num_tasks == 500
    # The rewards that it observed, all except the last of each trial, are those that were measured.
    by_trial = np.stack([rewards for _, rewards, _ in policy.told[-20:]]).reshape(2, 10, 500)
    assert not by_trial[:, 0].any()
    rest = evaluation.returns[:, 0].T - by_trial.sum(axis=1)
    assert np.isin(rest, (0.0, 1.0)).all()
    means = np.array([task["mean"][0] for task in evaluation.tasks])
    np.testing.assert_allclose(evaluation.task_returns()[:, 0].mean(), 10.0 * means.mean(), atol=0.2)


def test_a_trial_of_another_package_goes_through_episodes() -> None:
    rules = replace(BENCHMARKS["gridnavi-v1"], repetitions=1)
    policy = CountsPulls(action=2)
    evaluation = measure(policy, rules, num_episodes=3)
    assert evaluation.returns.shape == (21, 3, 1)
    told = policy.told[-45:]
    assert [bool(dones.all()) for _, _, dones in told] == [step in (15, 30) for step in range(45)]
    # Each episode begins in the corner.
    assert all((told[step][0] == 0.0).all() for step in (0, 15, 30))
    with pytest.raises(ConfigError, match="gridnavi-v1 has trials of 1 to 4 episodes, got 5"):
        measure(policy, rules, num_episodes=5)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (object(), "object has no method reset; a policy has reset"),
        (type("Half", (), {"reset": lambda self, n: None})(), "Half has no method act"),
    ],
)
def test_object_that_is_not_a_policy_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        measure(policy, "bandit-k5-n10-v1")


def test_invalid_actions_are_named() -> None:
    with pytest.raises(ValueError, match=r"CountsPulls returned actions of the shape \(\d+, 2\); expected \(\d+,\)"):
        measure(CountsPulls(action=np.zeros(2)), "bandit-k5-n10-v1")
    with pytest.raises(ValueError, match="CountsPulls returned actions of the type float64; expected int64"):
        measure(CountsPulls(action=0.5), "bandit-k5-n10-v1")


def test_submissions_of_other_tasks_or_shapes_are_refused(tmp_path: Path) -> None:
    rules = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=3)
    evaluation = measure(CountsPulls(), rules)
    good = submission(rules, evaluation, policy={"name": "first arm"})
    path = tmp_path / "s.json"
    save_submission(path, good)
    assert read_submission(path) == json.loads(path.read_text())
    for changes, message in (
        ({"tasks-sha256": "0" * 64}, "measured on other tasks than those of bandit-k5-n10-v1; measure it again"),
        ({"returns": good["returns"][:-1]}, "returns must be of 500 tasks and 3 repetitions of bandit-k5-n10-v1"),
        ({"format": 2}, "format: expected less than or equal to 1, got 2"),
        ({"benchmark": "wind-v9"}, "there is no benchmark 'wind-v9'"),
    ):
        save_submission(path, {**good, **changes})
        with pytest.raises(ConfigError, match=message):
            read_submission(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a submission"):
        read_submission(path)
    with pytest.raises(ConfigError, match="a submission names its policy"):
        submission(rules, evaluation, policy={})


@pytest.fixture(scope="module")
def honest() -> dict[str, Any]:
    """A submission of trials of four episodes, with an info."""
    rules = BENCHMARKS["gridnavi-v1"]
    evaluation = measure(CountsPulls(), rules)
    evaluation = replace(evaluation, infos={"success": np.zeros_like(evaluation.returns)})
    entrant = {"name": "stays", "algorithm": "by hand", "meta-updates": 3, "trained-by": "maml-rl train x"}
    return submission(rules, evaluation, policy=entrant, command="maml-rl test x")


def forged(content: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield files that are no honest submissions, by what is wrong with them."""
    text = json.dumps(content)
    texts = ["\x1b[2J", "line\nbreak", "\u202e", "\u2066", "\x00", "\ud800", "a\u200bb", "\x07", "x" * 5000]
    values: list[Any] = [None, -5, 1e308, "<b>0</b>", 10**9, 0.5, True, [], {}, [[[]]], "", "0", *texts]
    unlimited = {"seed": [10**9, -0], "policy": [], "command": [None, "<b>0</b>", "0"], "columns": ["<b>0</b>", "0"]}
    unlimited |= {"infos": [{}], "versions": [{}], "benchmark": [], "policy.name": ["<b>0</b>", "0"]}
    unlimited |= {"policy.algorithm": [None, "<b>0</b>", "0"], "policy.trained-by": [None, "<b>0</b>", "0"]}
    unlimited |= {"policy.meta-updates": [None, 10**9]}
    for key in content:
        for value in values:
            if value not in unlimited.get(key, []) or isinstance(value, bool):
                yield f"{key}: {value!r}"[:80], json.dumps({**content, key: value}).encode()
    for key in content["policy"]:
        for value in values:
            if value not in unlimited.get(f"policy.{key}", []) or isinstance(value, bool):
                policy = {**content["policy"], key: value}
                yield f"policy.{key}: {value!r}"[:80], json.dumps({**content, "policy": policy}).encode()
    for key in content:
        if key not in ("command", "infos", "versions"):
            yield f"without {key}", json.dumps({each: content[each] for each in content if each != key}).encode()
        yield f"{key} twice", (text[:-1] + f', "{key}": {json.dumps(content[key])}}}').encode()
    number = np.array(content["returns"])
    for value in (np.nan, np.inf, 1e12, -1e12):
        for name in ("returns", "infos"):
            values = np.where(np.arange(number.size).reshape(number.shape) == 7, value, number).tolist()
            yield (
                f"{name} of {value}",
                json.dumps({**content, name: values if name == "returns" else {"s": values}}).encode(),
            )
    for name, wrong in (
        ("fewer tasks", number[1:]),
        ("more tasks", np.concatenate([number, number[:1]])),
        ("fewer repetitions", number[:, 1:]),
        ("hundred columns", np.repeat(number, 25, axis=2)),
        ("two columns too many", np.repeat(number, 2, axis=2)),
        ("no columns", number[..., :0]),
        ("flat", number[..., 0]),
        ("deeper", number[..., None]),
    ):
        yield name, json.dumps({**content, "returns": wrong.tolist()}).encode()
    yield "uneven", json.dumps({**content, "returns": [*number.tolist()[:-1], [[0.0]] * number.shape[1]]}).encode()
    yield "1e999", text.replace(str(number.flat[0]), "1e999", 1).encode()
    for key in ("unknown", "Policy", "episodes_before"):
        yield f"unknown {key}", json.dumps({**content, key: 0}).encode()
    yield "unknown entry of the policy", json.dumps({**content, "policy": {"name": "x", "note": "y"}}).encode()
    for name in ("<script>", "a|b", "a\nb", "](javascript:", "x" * 60, ""):
        yield f"info {name}", json.dumps({**content, "infos": {name: content["returns"]}}).encode()
    yield "many infos", json.dumps({**content, "infos": {f"i{n}": content["returns"] for n in range(30)}}).encode()
    for name, data in (
        ("nothing", b""),
        ("null", b"null"),
        ("list", b"[]"),
        ("text", b'"text"'),
        ("no UTF-8", b"\xff\xfe"),
        ("UTF-16", text.encode("utf-16")),
        ("truncated", text.encode()[:-20]),
        ("more behind", text.encode() + b"{}"),
        ("deep", b"[" * 100_000),
        ("long number", b'{"seed": ' + b"9" * 10_000 + b"}"),
        ("large", b" " * 5_000_000 + text.encode()),
    ):
        yield name, data


def test_every_forged_submission_is_refused_in_one_printable_line(
    honest: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    save_submission(path, honest)
    assert main(["benchmarks", "enter", str(path)]) == 0
    capsys.readouterr()
    count = 0
    for name, data in forged(honest):
        path.write_bytes(data)
        assert main(["benchmarks", "enter", str(path)]) == 2, name
        shown = capsys.readouterr()
        assert not shown.out, name
        (line,) = shown.err.splitlines()
        assert line.isprintable(), name
        assert len(line) - len(str(path)) < 600, name
        count += 1
    assert count > 300


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_submission_that_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "missing"):
        assert main(["benchmarks", "enter", str(path)]) == 2
        assert f"cannot read the submission {path}" in capsys.readouterr().err


def test_names_of_a_submission_are_text_in_the_tables(
    honest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have characters with a meaning in Markdown and HTML."""
    odd = "<script>alert(1)</script> ](javascript:alert(1)) `code` *bold* {: onclick=x } a|b &lt; \\"
    content = {**honest, "command": odd, "policy": {"name": odd, "algorithm": odd, "trained-by": odd}}
    folder = tmp_path / "submissions"
    folder.mkdir()
    save_submission(folder / "x](javascript:y).json", content)
    page = tmp_path / "page.md"
    page.write_text("<!-- submissions -->\n<!-- end of submissions -->\n")
    submissions.main(["--folder", str(folder), "--page", str(page)])
    markdown = pytest.importorskip("markdown")
    shown = markdown.markdown(page.read_text(), extensions=["tables", "attr_list"])
    row = ElementTree.fromstring(f"<p>{shown}</p>").findall(".//tbody/tr")[0]
    cells = row.findall("td")
    assert len(cells) == 8
    assert ["".join(cell.itertext()) for cell in cells[:2]] == [odd, odd]
    assert "".join(cells[-1].itertext()) == f"{odd}, then {odd}"
    allowed = {"td", "a", "code"}
    assert {each.tag for each in row.iter()} - {"tr"} <= allowed
    assert {name for each in row.iter() for name in each.attrib} <= {"href", "style"}
    (link,) = row.iter("a")
    assert link.get("href") == "submissions/x%5D%28javascript%3Ay%29.json"


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\u202e", "x" * 200])
def test_name_that_a_submission_must_not_hold_is_refused_before_the_measurement(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["test", "zoo:rl2/bandit-k5-n10", "--benchmark", "bandit-k5-n10-v1", "--submit", str(tmp_path / "s.json")]
    assert main([*command, "--policy-name", name, "--output", str(tmp_path / "x.npz")]) == 2
    assert "a submission cannot hold this policy: name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_submission_keeps_recorded_infos_and_the_table_shows_them(tmp_path: Path) -> None:
    rules = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=3)
    evaluation = measure(CountsPulls(), rules)
    solved = np.zeros_like(evaluation.returns)
    solved[:125] = 1.0
    content = submission(rules, replace(evaluation, infos={"success": solved}), policy={"name": "first arm"})
    assert np.array(content["infos"]["success"]).shape == (500, 3, 1)
    save_submission(tmp_path / "one.json", content)
    save_submission(tmp_path / "two.json", submission(rules, evaluation, policy={"name": "no infos"}))
    table = standings.as_markdown(standings.standings(standings.read_submissions(tmp_path.glob("*.json"))[rules.name]))
    assert "worst task | mean success | command |" in table
    assert re.search(r"^\| first arm \|.* \| 0\.250 \|  \|$", table, re.MULTILINE)
    assert re.search(r"^\| no infos \|.* \|  \|  \|$", table, re.MULTILINE)


def test_table_has_the_command_that_trains_a_policy_before_the_one_that_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr("sys.argv", ["train.py", "2d-navigation", "--output-folder", str(tmp_path / "mine")])
    config = config_of(num_batches=1)
    policy = train(config, tmp_path / "mine", num_workers=0)
    entrant = identity(config, tmp_path / "mine", policy, 1)
    assert (entrant["name"], entrant["meta-updates"]) == ("mine", 1)
    rules = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=3)
    content = submission(rules, measure(CountsPulls(), rules), policy=entrant, command="maml-rl test mine")
    save_submission(tmp_path / "one.json", content)
    _, [*_, commands] = standings.standings(standings.read_submissions([tmp_path / "one.json"])[rules.name])
    assert commands == "`python train.py 2d-navigation --output-folder mine`, then `maml-rl test mine`"


def test_a_result_is_shown_in_the_table_among_the_entries_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = BENCHMARKS["bandit-k5-n10-v1"]
    mine = tmp_path / "mine.json"
    save_submission(mine, submission(rules, measure(CountsPulls(), rules), policy={"name": "first arm"}))
    assert main(["benchmarks", "enter", str(mine)]) == 0
    table = capsys.readouterr().out
    names = re.findall(r"^\| (\w[\w -]+) \|", table, re.MULTILINE)
    entered = {json.loads(path.read_text())["policy"]["name"] for path in standings.ENTERED.glob(f"*{rules.name}*")}
    assert {"first arm", "policy"} | entered <= set(names)
    assert "open a pull request" in table
    mine.write_text("{}")
    assert main(["benchmarks", "enter", str(mine)]) == 2
    assert "mine.json is not a submission" in capsys.readouterr().err


def test_committed_page_shows_the_committed_submissions() -> None:
    assert submissions.tables(submissions.FOLDER) in submissions.PAGE.read_text(encoding="utf-8")
    assert standings.ENTERED.resolve() == submissions.FOLDER


def test_the_distance_to_the_nearest_task_is_euclidean() -> None:
    tasks = [{"goal": np.array([0.0, 0.0])}, {"goal": np.array([1.0, 1.0])}]
    others = [{"goal": np.array([1.0, 0.5])}, {"goal": np.array([9.0, 9.0])}]
    assert nearest(tasks, others) == pytest.approx(0.5)
    assert nearest(tasks, []) == float("inf")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_policy_of_stable_baselines_is_measured(stable_baselines3: Any) -> None:
    env = SampleTaskOnReset(gymnasium.make("Wind-v0"))
    with torch.random.fork_rng(devices=[]):
        model = stable_baselines3.PPO("MlpPolicy", env, n_steps=16, batch_size=16, device="cpu")

    class Model:
        def reset(self, num_tasks: int) -> None:
            self.calls = 0

        def act(self, observations: Any, rewards: Any, dones: Any) -> Any:
            self.calls += 1
            return model.predict(observations, deterministic=True)[0]

    policy = Model()
    evaluation = measure(policy, replace(BENCHMARKS["wind-v1"], repetitions=1))
    assert evaluation.returns.shape == (100, 1, 1)
    assert policy.calls == 75


def test_tasks_that_a_policy_was_trained_on_are_refused() -> None:
    rules = BENCHMARKS["2d-navigation-v1"]
    fixed = {"tasks": {"distribution": "fixed", "train": 5, "test": 4}}
    experiment = make_experiment(config_of().override(NAVIGATION | fixed))
    assert len(rules.tasks_for(experiment)) == 100
    assert experiment.task_distribution is not None
    sets = {"training": [{"goal": [0.0, 0.1]}, *rules.tasks()[:2]], "test": [{"goal": [0.2, 0.3]}]}
    experiment.task_distribution.take_fixed_tasks(sets)
    with pytest.raises(ConfigError, match="2 of the 100 tasks of 2d-navigation-v1 are among the 3 training tasks of"):
        rules.tasks_for(experiment)
