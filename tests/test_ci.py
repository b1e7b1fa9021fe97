"""Every test is run by some part of `.ci/run`, and every part by a workflow."""

import re
from itertools import product
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MARKERS = ("metaworld", "nightly", "ray", "slow")


def selected(target: str, marked: dict[str, bool]) -> bool:
    """Return whether a target of the Makefile runs tests with these markers; its expression is one of Python, too."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    (expression,) = re.findall(r"-m pytest .*-m '?([\w ]+?)'? \$\(ARGS\)", recipe[1])
    return bool(eval(expression, {}, marked))


def parts() -> set[str]:
    return set(re.findall(r"^        (\w+)\) ", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))


def test_every_test_is_run_by_day_or_by_night() -> None:
    for marks in product((False, True), repeat=len(MARKERS)):
        marked = dict(zip(MARKERS, marks, strict=True))
        by_day = [selected(target, marked) for target in ("test", "test-metaworld", "test-ray")]
        assert any(by_day) or selected("test-nightly", marked), marked
        assert any(by_day) or marked["nightly"], marked
        if selected("test-fast", marked):
            assert by_day[0], marked


def test_every_part_is_a_job_of_a_workflow() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (by_day,) = re.findall(r"^    set -- (.*)$", script, re.MULTILINE)
    workflows = {
        name: yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
        for name in ("ci", "nightly")
    }
    matrix = workflows["ci"]["jobs"]["part"]["strategy"]["matrix"]
    assert matrix["part"] == by_day.split()
    (by_night,) = (step["run"] for step in workflows["nightly"]["jobs"]["nightly"]["steps"] if ".ci" in str(step))
    assert by_night == "bash .ci/run nightly"
    assert parts() == {*by_day.split(), "nightly"}
    for part in parts():
        assert re.search(rf"^#   {part}\b", script, re.MULTILINE), f"the head of .ci/run does not describe {part}"
