"""The commands of the README and the documentation run in order, nightly twice, and write only to `runs/`."""

import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from maml_rl.cli import main as cli
from maml_rl.machine import usable_cores
from tests.shown_commands import fenced_blocks

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"num-batches": 1, "meta-batch-size": 2, "fast-batch-size": 2, "max-episode-steps": 4}
# Options that make a command shorter; of an option that is given twice, the last one counts.
SMALLER = {
    "train": [*(word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))), "--num-workers", "0"],
    "test": ["--meta-batch-size", "2", "--fast-batch-size", "2", "--num-workers", "0"],
    "record": ["--tasks", "2", "--episodes", "2", "--num-workers", "0"],
    "report": ["--tasks", "2", "--videos", "0", "--num-workers", "0"],
    "compare": ["--seeds", "2", "--tasks", "2", "--num-workers", "0", "--set"]
    + [f"{key}={value}" for key, value in SETTINGS.items()],
}
# Those that leave the sizes of a page as they are.
BRIEFER = {
    "train": ["--num-batches", "1"],
    "record": [],
    "report": ["--videos", "0"],
    "compare": ["--set", "num-batches=1"],
}
# These take minutes even in short form, which other tests run; here only the files that they write matter.
BENCHMARK = re.compile(r"python -m benchmarks\.")
# These need Meta-World, JAX or a Ray cluster, whose own tests train in environments of their own.
# Certified benchmarks refuse shorter runs; their own tests run them whole.
ELSEWHERE = re.compile(
    r".*\bml1|.* (rl2|runs)/xland\b"
    r"|.* --backend ray\b|.*/tune_step_size|.* --benchmark |maml-rl (benchmarks enter|tune) "
)


# By day this is not run: it has a test with smaller numbers.
TESTED = re.compile(r"python examples/slow_service")


def pages() -> list[Path]:
    """The README, then the pages in the order of the site."""
    found = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return [ROOT / "README.md", *(ROOT / "docs" / page for page in dict.fromkeys(found))]


def commands(page: Path) -> Iterator[str]:
    blocks = fenced_blocks(page.read_text(encoding="utf-8"))
    for block in (block for language, block in blocks if language in ("", "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+#.*", "", line).strip().replace("--device cuda", "--device cpu")
            command = "python train.py" if command == "make train" else command
            if re.match(r"maml-rl |python (train|test)\.py|python examples/|python -m (benchmarks|maml_rl)", command):
                yield command


def shown() -> list[str]:
    """Return the commands of all pages that are tried here."""
    left_out = (BENCHMARK, ELSEWHERE)
    return [line for page in pages() for line in commands(page) if not any(kind.match(line) for kind in left_out)]


def run(command: str, monkeypatch: pytest.MonkeyPatch, shorter: dict[str, list[str]] = SMALLER) -> None:
    words = shlex.split(re.sub(r"^python (train|test)\.py", r"maml-rl \1", command))
    words = words if words[0] == "maml-rl" else words[1:]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        if words[0] == "maml-rl":
            # Sequences are cut from trials of one episode.
            whole = ["--fast-batch-size", "1"] if "rsac/wind" in words else []
            smaller = list(shorter.get(words[1], []))
            if (
                "--meta-batch-size" in smaller
                and words[1] == "train"
                and re.search(" (ad|dpt|amago-offline)/", command)
            ):
                place = smaller.index("--meta-batch-size")
                smaller[place : place + 2] = ["--num-updates", "2"]
            assert cli.main([*words[1:], *smaller, *whole]) == 0, command
        elif words[0] == "-m":
            patch.setattr(sys, "argv", words[1:])
            # Another test may have imported it.
            patch.delitem(sys.modules, words[1], raising=False)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            patch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")


def test_commands_after_blocks_of_other_languages_and_in_lists_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "``` { .python .example }\nmaml-rl is no command here\n```\n\nmaml-rl in a sentence.\n\n"
        "```\nmaml-rl envs  # all\n```\n\n- and\n\n    ```bash\n    maml-rl zoo\n    ```\n"
    )
    assert [*commands(page)] == ["maml-rl envs", "maml-rl zoo"]


def files(folder: Path) -> set[str]:
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {path for path in paths if not path.startswith("runs/") and "__pycache__" not in path}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of what the commands read."""
    pytest.importorskip("vl_convert")
    for name in ("benchmarks", "configs", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("repetitions", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_commands_of_the_pages_run_in_order_and_write_only_to_runs(
    repetitions: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(place)
    lines = [line for line in shown() if repetitions > 1 or not TESTED.match(line)]
    new = [line for line in lines if re.search(r"\btrain\b", line) and not re.search("--(overwrite|dry-run)", line)]
    named = [line for line in new if "--output-folder" in line and "--resume" not in line]
    assert len(lines) > 15
    for repetition in range(1, repetitions + 1):
        # A folder that is named gets one run.
        for command in lines if repetition == 1 else [line for line in lines if line not in named]:
            # A recording is made only once.
            run(command + " --resume" * (repetition > 1 and "maml-rl record" in command), monkeypatch)
        assert files(place) == before
        # No run has replaced another.
        runs = {
            path.parent for path in Path("runs").rglob("config.json") if not {"comparison", "compare"} & {*path.parts}
        }
        # That of a page whose command can be repeated.
        runs -= {Path("runs/flat")}
        assert len(runs) == repetition * len(new) - (repetition - 1) * len(named)
    for page in pages():
        for path in re.findall(r'load_policy\("(?!zoo:)(.*?)"', page.read_text(encoding="utf-8")):
            assert (place / path / "config.json").is_file(), f"{page.name}: {path}"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("place")
def test_commands_run_at_the_sizes_of_their_pages_with_the_threads_that_a_user_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, usable_cores()))
    try:
        for command in shown():
            run(command, monkeypatch, BRIEFER)
    finally:
        torch.set_num_threads(before)


def test_benchmarks_on_the_pages_write_to_runs() -> None:
    lines = [line for page in pages() for line in commands(page) if BENCHMARK.match(line)]
    assert lines
    for line in lines:
        for path in re.findall(r"\S+\.(?:json|svg|png)\b", line):
            assert path.startswith(("runs/", "docs/results/")), line
