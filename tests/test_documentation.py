"""The documentation is built as by `make docs`; its code is run, or is part of an example that is run."""

import ast
import fcntl
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import maml_rl
from benchmarks.learning.plan import COMPARISON, LONG, read_plan
from benchmarks.suite import SUITE
from maml_rl.cli import main as cli
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import shipped_configs
from maml_rl.config.yaml_source import Mapping
from maml_rl.envs import FAMILIES
from maml_rl.experiment.record import record
from maml_rl.experiment.train import train
from maml_rl.metalearners import algorithms, find_metalearner
from maml_rl.task_distributions import find_task_distribution, task_distributions
from maml_rl.task_distributions.task_files import save_tasks
from tests.report.chromium import Browser
from tests.shown_commands import check_command, fenced_blocks

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Plans of trainings whose tables and charts are on a page.
PLANS = (COMPARISON, SUITE, read_plan(LONG))
# Their blocks need only each other, and a run in runs/maml/2d-navigation.
RUN_PAGES = (
    "adding-a-family.md",
    "algorithms.md",
    "benchmarks.md",
    "concepts.md",
    "faq.md",
    "families.md",
    "first-training.md",
    "gpu.md",
    "learning-histories.md",
    "memory.md",
    "migrating.md",
    "slow-environments.md",
    "task-distributions.md",
)
# Addresses that a page loads by itself; links may lead anywhere.
LOADED = re.compile(r'<(?:script|img|iframe|source|video)[^>]* src="?([^" >]+)|<link[^>]* rel="?stylesheet[^>]*>')
TOO_WIDE = "return document.documentElement.scrollWidth > innerWidth"
BROKEN = """
Promise.all([...document.images].map((image) => image.decode().then(() => '', () => image.src)))
"""
# Types a word as a reader does, and waits for the links in the results.
SEARCH = """
new Promise((resolve) => {
  document.querySelector("label[for=__search]").click();
  const query = document.querySelector("input[data-md-component=search-query]");
  query.focus();
  query.value = "cuda";
  query.dispatchEvent(new Event("keyup", {bubbles: true}));
  const until = performance.now() + 15000;
  (function look() {
    const found = [...document.querySelectorAll(".md-search-result__link")].map((link) => link.href);
    if (found.length || performance.now() > until) resolve(found); else setTimeout(look, 20);
  })();
})
"""


def blocks(page: str, language: str) -> list[str]:
    return [code for of_block, code in fenced_blocks(PAGES[page]) if of_block == language]


def command_lines() -> Iterator[str]:
    """Yield the command lines of the README and of all pages."""
    for text in (README, *PAGES.values()):
        for block in [code for language, code in fenced_blocks(text) if language == ""]:
            for line in block.replace("\\\n", " ").splitlines():
                line = line.partition(" #")[0].strip()
                if line.startswith(("python train.py", "python test.py", "maml-rl", "python -m maml_rl")):
                    yield line


@pytest.fixture(scope="module")
def documentation() -> Iterator[Any]:
    """The module of the site's hooks."""
    pytest.importorskip("latex2mathml")
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield import_module("documentation")
    finally:
        sys.path.remove(str(ROOT / "scripts"))
        sys.modules.pop("documentation")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built for all test processes by the first that needs it."""
    pytest.importorskip("mkdocs")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
            # With --quiet, warnings are not even counted.
            assert [line for line in ended.stderr.splitlines() if not line.startswith("INFO")] == []
            assert (ended.returncode, ended.stdout) == (0, "")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_site_is_built_without_warnings_and_loads_nothing_from_other_servers(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert {path.relative_to(site).as_posix() for path in pages} >= {page.replace(".md", ".html") for page in PAGES}
    for path in pages:
        text = path.read_text(encoding="utf-8")
        loaded = [match[0] for match in LOADED.finditer(text)]
        assert loaded
        assert not [element for element in loaded if "//" in element], path.name
        assert 'class="mermaid"' not in text
        assert "arithmatex" not in text
    assert "@import" not in (site / "stylesheets" / "site.css").read_text()


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    headings = set(re.findall(r'<h\d id="([\w.]+)"', reference))
    for package in ("", ".envs", ".samplers", ".policies", ".metalearners", ".report", ".task_distributions"):
        for name in import_module(f"maml_rl{package}").__all__:
            if name != "envs":
                assert any(heading.endswith(f".{name}") for heading in headings), f"maml_rl{package}.{name}"


@pytest.mark.slow
def test_formulas_and_diagrams_are_rendered(site: Path) -> None:
    for page, text in PAGES.items():
        built = (site / page.replace(".md", ".html")).read_text(encoding="utf-8")
        assert built.count("<math ") >= len(re.findall(r"^\$\$$", text, re.MULTILINE)) // 2
        assert built.count("images/diagrams/") == len(blocks(page, "mermaid"))
    assert (site / "algorithms.html").read_text(encoding="utf-8").count("<math ") > 20
    for name in algorithms():
        # Their pages refer to those of others.
        without = name in ("maml-trpo", "amago-offline")
        assert "<math " in (site / f"algorithms/{name}.html").read_text(encoding="utf-8") or without


@pytest.mark.slow
@pytest.mark.timeout(240)
# For every change a page of each kind, without scripts: these, with the search index, take a third of the time.
@pytest.mark.parametrize(
    ("kinds", "scripts"),
    [
        (("index", "settings", "results/suite", "algorithms/varibad", "api/sampling", "notes/maml-trpo"), False),
        pytest.param(("**/*",), True, marks=pytest.mark.nightly),
    ],
)
def test_pages_open_in_a_browser(kinds: tuple[str, ...], scripts: bool, browser: Browser, site: Path) -> None:
    browser.run_scripts_of_pages(scripts)
    for path in [path for kind in kinds for path in sorted(site.glob(f"{kind}.html"))]:
        if path.stem == "404":  # The error page has its address only on a server.
            continue
        # Loading takes much longer than a change of the layout.
        browser.open(path, width=1300, dark=False)
        for width, dark in ((1300, False), (390, True)):
            browser.become(width=width, dark=dark)
            assert [source for source in browser.wait(BROKEN) if source] == [], path.name
            assert not browser.run(TOO_WIDE), path.name
            assert browser.complaints() == [], path.name


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_every_chart_has_the_colors_of_the_page_whatever_the_system_prefers(
    scheme: str, browser: Browser, tmp_path: Path
) -> None:
    # Pictures of the same size and without a network, on the site's own style sheet and Material's page color.
    pictures = sorted((DOCS / "images").rglob("*.svg"))
    paper, system = {"default": ("#fff", "light"), "slate": ("#1e2129", "dark")}[scheme]
    images = "".join(f'<img src="{path.as_uri()}" style="width:300px;height:150px;margin:0">' for path in pictures)
    sheet = (DOCS / "stylesheets" / "site.css").as_uri()
    (tmp_path / "page.html").write_text(
        f'<link rel="stylesheet" href="{sheet}"><body data-md-color-scheme="{scheme}" '
        f'style="margin:0;background:{paper};color-scheme:{system}"><div class="md-typeset">{images}</div></body>'
    )
    browser.open(tmp_path / "page.html", width=800, dark=scheme == "default")
    browser.picture(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        gray = np.asarray(picture.convert("L"), np.float64)[:, :300]
    assert gray.shape[0] == 150 * len(pictures)
    for path, tile in zip(pictures, np.split(gray, len(pictures)), strict=True):
        # Most of a chart is paper, and something is drawn on it.
        middle = np.median(tile)
        assert np.ptp(tile) > 80, path.name
        assert middle < 60 if scheme == "slate" else middle > 230, (path.name, middle)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_search_finds_cuda_without_a_server(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html", width=1300, dark=False)
    found = browser.wait(SEARCH)
    assert any("sampling-modes.html#on-an-accelerator" in link for link in found), found
    assert browser.complaints() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "page", "content"),
    [
        ("cite", "cite.html", "@software{maml_rl"),
        ("callback", "faq.html", "on_iteration"),
        ("plot", "faq.html", "maml-rl report"),
        ("hyperparameters", "faq.html", "fast-lr"),
        ("BibTeX", "cite.html", "@software{maml_rl"),
    ],
)
def test_search_finds_a_useful_section_for_a_word(site: Path, word: str, page: str, content: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = [
        entry
        for entry in index["docs"]
        if re.search(rf"\b{word}\b", re.sub("<[^>]*>", "", f"{entry['title']} {entry['text']}"), re.IGNORECASE)
    ]
    texts = [entry["text"] for entry in found if entry["location"].partition("#")[0] == page]
    assert any(content in re.sub("<[^>]*>", "", text) for text in texts), texts


def test_every_algorithm_has_a_page_with_example_settings_and_results_and_its_paper() -> None:
    references = (DOCS / "references.bib").read_text(encoding="utf-8")
    for name in algorithms():
        page = PAGES[f"algorithms/{name}.md"]
        assert re.search(r"^maml-rl train \S+$", page, re.MULTILINE)
        headings = re.findall("^## (.*)$", page, re.MULTILINE)
        assert headings == ["What it computes", "Settings", "Results"]
        assert f"<!-- settings of {name} -->" in page
        # Rows of another page, a table of its own, or a word that there is neither.
        results = page.partition("## Results")[2]
        assert (
            f"<!-- rows of {name} in " in results or "There are no full-length runs yet." in results or "\n|" in results
        )
        assert f"](algorithms/{name}.md" in PAGES["algorithms.md"]
        # The paper is named in the text, and can be cited.
        assert re.search(rf"^% (.*, )?{name}(, .*)?$", references, re.MULTILINE)
        assert "https://arxiv.org/abs/" in page


def test_every_file_of_results_is_named_beside_its_figures_and_every_chart_is_shown() -> None:
    pages = "\n".join([*PAGES.values(), README])
    plans = {name for plan in PLANS for name in plan.families}
    folders = {path.name for path in (DOCS / "results").iterdir() if path.is_dir()}
    assert [name for name in folders - plans if f"docs/results/{name}" not in pages] == []
    files = [path for path in (DOCS / "results").iterdir() if path.is_file()]
    assert [path.name for path in files if path.name not in pages] == []
    assert [chart.name for chart in (DOCS / "images").glob("*.*") if f"images/{chart.name})" not in pages] == []


def test_rows_of_a_name_come_from_the_first_table_of_every_section(
    documentation: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = "| | k=0 |\n|---|---:|\n| a | {} |\n| a-b | {} |\n"
    page = "# Page\n\n## One\n\n" + table.format(1, 2) + "\n" + table.format(9, 9)
    (tmp_path / "page.md").write_text(page + "\n## Two\n\n" + table.format(3, 4) + "\n## Three\n\nNothing.\n")
    shown = documentation.with_rows("<!-- rows of a in page.md -->\n", tmp_path)
    assert shown == "| family | k=0 |\n|---|---:|\n| One | 1 |\n| Two | 3 |\n"
    assert not caplog.records
    documentation.with_rows("<!-- rows of c in page.md -->\n", tmp_path)
    assert "page.md has no row of c" in caplog.text
    # Different columns stay under their titles.
    table = "## {}\n\n| | k=0 | {} |\n|---|---:|---:|\n| a | {} | {} % |\n\n"
    (tmp_path / "page.md").write_text(table.format("One", "above", 1, 2) + table.format("Two", "success", 3, 4))
    assert documentation.with_rows("<!-- rows of a in page.md -->\n", tmp_path) == (
        "| family | k=0 | above | success |\n|---|---:|---:|---:|\n| One | 1 | 2 % |  |\n| Two | 3 |  | 4 % |\n"
    )


def test_numbers_do_not_wrap(documentation: Any) -> None:
    unbroken = documentation.with_unbroken_numbers
    assert unbroken("<p>takes 4.1 s, [-1.5, 2], 40 %</p>") == "<p>takes 4.1\xa0s, [-1.5,\xa02], 40\xa0%</p>"
    assert unbroken("<pre>4.1 s</pre> <a title='4 s'>x</a>") == "<pre>4.1 s</pre> <a title='4 s'>x</a>"
    assert unbroken("<td>-17.4 (-18.3 to -16.9)</td>") == '<td class="number">-17.4 (-18.3 to -16.9)</td>'
    assert unbroken("<td>-17.4 [-18.3, -16.9]</td>") == "<td>-17.4 [-18.3,\xa0-16.9]</td>"
    assert unbroken("<td>two of 3 trainings</td>") == "<td>two of 3 trainings</td>"


def test_changed_diagram_is_a_warning(documentation: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "# Title\n\n```mermaid\nflowchart\n    a --> b\n```\n\nThe end.\n"
    picture = tmp_path / documentation.picture_of("page.md", 0)
    picture.parent.mkdir(parents=True)
    (diagram,) = documentation.diagrams_of(text)
    picture.write_text(documentation.mark_of(diagram))
    shown = documentation.with_pictures(text, "page.md", tmp_path)
    assert shown == "# Title\n\n![Diagram: Title](images/diagrams/page-1.svg)\n\nThe end.\n"
    assert not caplog.records
    documentation.with_pictures(text.replace("b", "c"), "page.md", tmp_path)
    assert "diagram 1 has changed" in caplog.text
    caplog.clear()
    picture.unlink()
    documentation.with_pictures(text, "page.md", tmp_path)
    assert "draw_diagrams.py" in caplog.text


def test_formula_becomes_mathml(documentation: Any) -> None:
    inline = documentation.with_formulas(r'so <span class="arithmatex">\(a &lt; b_1\)</span>.')
    assert re.fullmatch(r"so <math [^>]*display=\"inline\">.*<msub>.*</math>\.", inline)
    assert "arithmatex" not in inline
    assert 'display="block"' in documentation.with_formulas('<div class="arithmatex">\\[\nx\n\\]</div>')


# The page on levels says what Gymnasium's checker remarks there.
@pytest.mark.filterwarnings("ignore:gymnasium.utils.env_checker on Levels")
@pytest.mark.parametrize("page", RUN_PAGES)
def test_python_of_a_page_runs_as_shown(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page in ("first-training.md", "faq.md"):
        sizes = {"hidden-sizes": [8], "fast-batch-size": 4, "meta-batch-size": 2, "num-batches": 1}
        config = Config.from_mapping(Mapping("the test", {"env-name": "2DNavigation-v0", **sizes}))
        train(config, "runs/maml/2d-navigation", num_workers=0)
    if page == "learning-histories.md":
        # The page sets this variable.
        monkeypatch.setenv("MINARI_DATASETS_PATH", "")
        sizes = {"fast-batch-size": 2, "hidden-sizes": [4], "num-batches": 2, "num-workers": 0}
        config = Config.from_mapping(Mapping("the test", {"env-name": "DarkRoom-v0", **sizes}))
        minari = find_spec("minari") is not None
        record(config, "runs/histories/rooms", num_tasks=2, minari=minari)
    if page == "memory.md":
        trials: dict[str, Any] = {"algorithm": "rl2", "observe-last": True, "algorithm-settings": {"hidden-size": 8}}
        trials |= {"env-kwargs": {"pulls": 10}, "fast-batch-size": 1, "meta-batch-size": 2, "num-batches": 1}
        config = Config.from_mapping(Mapping("the test", {"env-name": "Bandit-K5-v0", **trials}))
        train(config, "runs/rl2/bandit-k5-n10", num_workers=0)
    found = blocks(page, "python")
    assert found
    for block in found:
        # The tests with other Pythons lack the packages that only some readers need.
        if "minari" not in block or find_spec("minari") is not None:
            exec(block, {})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that writes every kind of file, and an evaluation of it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    sizes = {"hidden-sizes": [8], "fast-batch-size": 2, "meta-batch-size": 2, "num-batches": 1, "max-episode-steps": 5}
    tasks = folder.parent / "tasks.json"
    save_tasks(tasks, "2DNavigation-v0", [{"goal": [0.1, 0.2]}])
    settings = {"prefetch": 1, "evaluate-every": 1, "evaluation-tasks": str(tasks)}
    config = Config.from_mapping(Mapping("the test", {"env-name": "2DNavigation-v0", **sizes, **settings}))
    train(config, folder, num_workers=0, profile=True)
    options = ["--config", str(folder), "--output", str(folder.parent / "results.npz"), "--num-workers", "0"]
    assert cli.main(["test", *options, "--meta-batch-size", "2", "--num-steps", "1"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_blocks_for_other_libraries_run_as_shown(tmp_path: Path) -> None:
    for block in blocks("other-libraries.md", "python"):
        if "stable_baselines3" in block and find_spec("stable_baselines3") is None:
            continue
        # Stable-Baselines3 seeds the global generators.
        command = [sys.executable, "-c", block]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=140)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout


def test_job_of_slurm_trains_and_continues_when_it_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = [block for block in blocks("scaling.md", "bash") if "--array" in block]
    monkeypatch.chdir(tmp_path)
    small = Path("configs/maml/halfcheetah-dir.yaml")
    sizes = {"hidden-sizes": [8], "fast-batch-size": 2, "meta-batch-size": 2, "max-episode-steps": 5}
    for folder in (small.parent, Path(".venv/bin")):
        folder.mkdir(parents=True)
    small.write_text(load_config(ROOT / small).override(sizes).to_json())
    command = Path(".venv/bin/maml-rl")
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@" > called\n')
    command.chmod(0o755)
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "1"}
    subprocess.run(["bash", "-c", job], env=environment, check=True)
    threads, *words = Path("called").read_text().splitlines()
    assert threads == "1"
    for num_batches in ("1", "2"):
        assert cli.main([*words, "--num-batches", num_batches, "--num-workers", "0", "--quiet"]) == 0
    metrics = Path("runs/halfcheetah-dir/seed-3/metrics.jsonl").read_text()
    assert [json.loads(line)["iteration"] for line in metrics.splitlines()] == [0, 1]


def test_every_file_of_a_run_and_every_written_key_is_documented(run: Path) -> None:
    assert [path.name for path in run.iterdir() if f"`{path.name}" not in PAGES["runs.md"]] == []
    metrics, results = PAGES["runs.md"].split("## Keys of the results file")
    rows = [line.split("|")[1] for line in metrics.splitlines() if line.startswith("|")]
    patterns = {re.escape(key) for row in rows for key in re.findall("`([^`]+)`", row)}
    known = re.compile(
        "|".join(patterns).replace("step_K", r"step_\d+").replace("STAGE", r"\w+").replace("NAME", r"\w+")
    )
    (line,) = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [key for key in json.loads(line) if not known.fullmatch(key)] == []
    assert not known.fullmatch("undocumented")
    with np.load(run.parent / "results.npz") as written:
        assert [key for key in written if f"`{key}`" not in results] == []


@pytest.mark.slow
def test_every_setting_is_on_its_page_once(documentation: Any, site: Path) -> None:
    models = [Config, *(find_metalearner(name).Settings for name in algorithms())]
    keys = sorted(key for model in models for key in model.fields_by_key())
    of_tasks = [find_task_distribution(name).Settings for name in task_distributions()]
    others = sorted(str(field.alias) for model in of_tasks for field in model.model_fields.values())
    for page, wanted in (("settings.md", keys), ("task-distributions.md", others)):
        text = documentation.with_settings(PAGES[page])
        assert sorted(re.findall(r"^\| `([\w-]+)` \|(?:[^|]+\|){3}$", text, re.MULTILINE)) == wanted
    built = (site / "settings.html").read_text(encoding="utf-8")
    assert [key for key in keys if f"<td><code>{key}</code></td>" not in built] == []


def test_examples_that_pages_include_are_run_by_tests() -> None:
    included = {name for text in PAGES.values() for name in re.findall(r'--8<-- "examples/(.*?)"', text)}
    assert included == {"custom_family.py", "gymnax_family.py", "custom_algorithm.py", "learner_of_experience.py"}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "examples").glob("*.py"))
    assert [name for name in included if name.removesuffix(".py") not in tests] == []


def test_python_on_every_page_is_run_or_part_of_an_example() -> None:
    covered = {
        *RUN_PAGES,
        "other-libraries.md",
        # By tests/metalearners/outside_learner.py.
        "adding-an-algorithm.md",
    }
    for page in PAGES:
        assert page in covered or not blocks(page, "python"), page
        for block in blocks(page, "python"):
            ast.parse(textwrap.dedent(block) if page in RUN_PAGES else "if True:\n" + textwrap.indent(block, "  "))


def test_recipes_and_versions_for_other_packages_are_those_that_are_tested() -> None:
    page, families = PAGES["environments-of-others.md"], ROOT / "tests" / "others" / "families"
    lock = re.findall(r"^[\w.-]+==[\w.]+", (ROOT / "constraints-others.txt").read_text(encoding="utf-8"), re.MULTILINE)
    codes = {path.name: path.read_text(encoding="utf-8") for path in families.glob("*.py")}
    recipes = re.findall(r'--8<-- "tests/others/families/(.*?)"', page)
    assert len(recipes) == 7
    assert set(recipes) <= set(codes)
    rows = re.findall(r"\| `(\w+\.py)`, (\d+) \|.*\| ([\w-]+ [\w.]+) \|$", page, re.MULTILINE)
    assert {name: int(lines) for name, lines, _ in rows} == {
        name: len(code.splitlines()) for name, code in codes.items()
    }
    versions = [version for *_, version in rows]
    versions += re.findall(r"((?:Gymnasium|MuJoCo|NumPy) \d[\d.]*\d)", page.partition("\n## ")[0])
    assert len(versions) == len(codes) + 3
    assert [version for version in versions if version.lower().replace(" ", "==") not in lock] == []


def test_command_lines_name_existing_options_and_configs(capsys: pytest.CaptureFixture[str]) -> None:
    for line in command_lines():
        check_command(line.replace("python -m maml_rl.", "maml-rl "), capsys)


def test_every_family_is_described_and_has_a_picture() -> None:
    for env_id, family in FAMILIES.items():
        if family.extra == "jax":
            # Their packages draw them in windows of their own, if at all.
            assert f"`{env_id}`" in PAGES["environments-in-jax.md"]
            continue
        listed = re.sub("ML1-.*", "ML1-<environment>", env_id)
        assert f"`{listed}`" in PAGES["families.md"]
        if env_id == "Mixture-v0":
            continue
        same = [other for other, spec in FAMILIES.items() if spec.name == family.name]
        assert any(f"images/families/{other}.webp" in PAGES["families.md"] for other in same), env_id


def test_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (maml_rl.__version__, project["license"])
    for text in (PAGES["cite.md"], README):
        (entry,) = re.findall(r"@software\{maml_rl,.*?^\}", text, re.DOTALL | re.MULTILINE)
        assert f"version = {{{maml_rl.__version__}}}" in entry


def test_names_on_the_pages_exist() -> None:
    for page, text in PAGES.items():
        for path in re.findall(r"`((?:examples|scripts|configs|maml_rl|tests)/[\w./-]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{page}: {path}"
        for module in re.findall(r"python -m (benchmarks\.\w+)", text):
            assert find_spec(module), f"{page}: {module}"
        for name in re.findall(r"`maml_rl\.([\w.]+)`", text):
            found: Any = maml_rl
            for part in name.split("."):
                found = getattr(found, part, None) or import_module(f"{found.__name__}.{part}")


def test_histories_of_the_page_are_the_only_data_set_in_their_folder() -> None:
    """Those that the configs of learners of histories record are elsewhere."""
    page = (ROOT / "docs" / "learning-histories.md").read_text(encoding="utf-8")
    (loaded,) = set(re.findall(r'load_histories\("([^"]+)"\)', page))
    recorded = [str(load_config(path).algorithm_settings.get("histories", "")) for path in shipped_configs().values()]
    assert any(recorded)
    assert not [each for each in recorded if each and Path(each).is_relative_to(loaded)]
