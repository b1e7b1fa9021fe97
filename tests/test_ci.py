"""Some part of `.ci/run` runs every test, and a workflow runs every part."""

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
MARKERS = ("jax", "metaworld", "nightly", "others", "ray", "slow")


def selected(target: str, marked: dict[str, bool]) -> bool:
    """Return whether a target of the Makefile runs tests with these markers."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    expressions = re.findall(r"-m pytest .*-m '?([\w ]+?)'? \$\(ARGS\)", recipe[1])
    assert expressions
    return any(eval(expression, {}, marked) for expression in expressions)


def parts() -> set[str]:
    return set(re.findall(r"^        (\w+)\)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))


def test_every_test_runs_for_every_change_or_nightly() -> None:
    for marks in product((False, True), repeat=len(MARKERS)):
        marked = dict(zip(MARKERS, marks, strict=True))
        by_day = [
            selected(target, marked) for target in ("test", "test-metaworld", "test-others", "test-jax", "test-ray")
        ]
        assert any(by_day) or selected("test-nightly", marked), marked
        assert any(by_day) or marked["nightly"], marked
        if selected("test-fast", marked):
            assert by_day[0], marked


@pytest.mark.parametrize(
    ("marker", "some"),
    [
        ("metaworld", {"tests/envs/test_metaworld.py", "tests/envs/test_contract_tasks.py"}),
        ("others", {"tests/others/test_others.py"}),
        ("jax", {"tests/envs/test_jax_exactness.py"}),
    ],
)
def test_target_for_a_marker_collects_every_test_of_it(
    marker: str, some: set[str], request: pytest.FixtureRequest
) -> None:
    command = subprocess.run(["make", "-n", f"test-{marker}"], cwd=ROOT, capture_output=True, text=True, check=True)
    (search,) = re.findall(r"\$\((grep .*? tests)\)", command.stdout)
    found = subprocess.run(["sh", "-c", search], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {
        item.path.relative_to(ROOT).as_posix()
        for item in request.session.items
        if item.get_closest_marker(marker) is not None
    }
    assert files <= set(found)
    assert some <= set(found)


def test_every_part_is_a_job_of_a_workflow() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    by_day = re.findall(r"^    (?:begin_beside )?run_part (\w+)", script, re.MULTILINE)
    workflows = {
        name: yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
        for name in ("ci", "nightly")
    }
    matrix = workflows["ci"]["jobs"]["part"]["strategy"]["matrix"]
    assert sorted(matrix["part"]) == sorted(by_day)
    (by_night,) = (step["run"] for step in workflows["nightly"]["jobs"]["nightly"]["steps"] if ".ci" in str(step))
    assert by_night == "bash .ci/run nightly"
    assert parts() == {*by_day, "nightly"}
    for part in parts():
        assert re.search(rf"^#   {part}\b", script, re.MULTILINE), f"the head of .ci/run does not describe {part}"


def run_parts(folder: Path, *names: str, failing: str = "none", **variables: str) -> tuple[int, list[str], str]:
    """Run parts with a `make` that only records its calls; return the exit code, the calls, and standard error.

    The environment of the last call is then in the file log.env.
    """
    log = folder / "log"
    log.write_text("")
    programs = {
        ".ci/run": (ROOT / ".ci" / "run").read_text(encoding="utf-8"),
        "bin/make": f'#!/bin/sh\necho "$MAML_RL_NO_SKIPS $*" >> {log}\nenv > {log}.env\n[ "$1" != {failing} ]\n',
        "scripts/install-system-packages": "#!/bin/sh\n",
        # No other Python is found: one is that of .venv, and the others do not start.
        ".venv/bin/python": '#!/bin/sh\n[ "$1" != -c ] || exec /usr/bin/python3 "$@"\n',
        **{f"bin/python3{minor}": "#!/bin/sh\nexit 1\n" for minor in ("", ".11", ".12", ".13", ".14")},
        "constraints.txt": "",
    }
    for name, text in programs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYENV_ROOT": str(folder), **variables}
    ended = subprocess.run([".ci/run", *names], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return ended.returncode, log.read_text().splitlines(), ended.stderr


def test_parts_run_in_the_given_order_and_refuse_skips(tmp_path: Path) -> None:
    code, asked, _ = run_parts(tmp_path, "style", "ray", "metaworld", "others", "jax", "test", "nightly")
    assert code == 0
    assert asked == [
        "1 lint types",
        "1 test-ray ARGS=--durations=15",
        "1 test-metaworld ARGS=--durations=15",
        "1 test-others ARGS=--durations=15",
        "1 test-jax ARGS=--durations=15",
        "1 test ARGS=--durations=15",
        *("1 install", "1 test-nightly"),
    ]


def test_commands_run_in_the_environment_of_a_new_machine(tmp_path: Path) -> None:
    of_machine = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "PIP_CERT": "a file", "CI": "yes"}
    code, asked, _ = run_parts(tmp_path, "style", **of_machine, HOME="home")
    lines = (tmp_path / "log.env").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if not line.startswith(("PWD=", "SHLVL=", "_=")))
    assert (code, asked) == (0, ["1 lint types"])
    assert seen.pop("PATH").startswith(str(tmp_path))
    of_pip = {"PIP_CERT": "a file", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    assert seen == {"HOME": "home", "CI": "yes", "MAML_RL_NO_SKIPS": "1", **of_pip}


def test_suite_runs_in_a_locale_without_utf_8_and_in_lines_of_80_columns(tmp_path: Path) -> None:
    code, asked, _ = run_parts(tmp_path, "test", LANG="C.UTF-8", COLUMNS="200")
    assert (code, asked) == (0, ["1 test ARGS=--durations=15"])
    assert {"LANG=C", "COLUMNS=80"} <= set((tmp_path / "log.env").read_text().splitlines())


def test_without_a_part_all_that_are_not_nightly_run_once(tmp_path: Path) -> None:
    code, asked, _ = run_parts(tmp_path)
    assert code == 0
    targets = [line.split()[1] for line in asked if "--num-batches" not in line]
    assert sorted(targets) == [
        "install",
        "install-metaworld",
        "lint",
        "test",
        "test-jax",
        "test-metaworld",
        "test-oldest",
        "test-others",
        "test-ray",
    ]
    # No test shares a core with two set-ups, and the suite waits for that of its own environment alone.
    assert targets.index("install") < min(targets.index("test"), targets.index("lint"))
    assert targets.index("install-metaworld") < targets.index("lint")
    assert targets.index("test-ray") < targets.index("test-metaworld")


@pytest.mark.parametrize("failing", ["test-ray", "test-metaworld", "test-others", "test-jax"])
def test_failure_of_either_of_two_parallel_parts_ends_the_run(tmp_path: Path, failing: str) -> None:
    code, asked, shown = run_parts(tmp_path, failing=failing)
    assert code != 0
    assert "passed" not in shown
    assert any(failing in line for line in asked)


def test_failure_of_a_part_and_an_unknown_one_end_the_run(tmp_path: Path) -> None:
    code, asked, _ = run_parts(tmp_path, "nightly", "ray", failing="install")
    assert code != 0
    assert asked == ["1 install"]
    code, asked, errors = run_parts(tmp_path, "lint")
    assert (code, asked) == (2, [])
    assert "unknown part 'lint'; use style, test, metaworld, others, jax, oldest, ray, pythons or nightly" in errors
