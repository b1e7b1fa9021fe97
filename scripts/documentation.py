"""Transforms the pages of the documentation site, so that reading them needs neither network nor scripts.

MkDocs calls the functions `on_...`. Formulas become MathML, which browsers render themselves. Diagrams, blocks of
Mermaid, become the pictures that `scripts/draw_diagrams.py` has drawn from them. A comment `<!-- settings: KEYS -->`
becomes a table of these settings, read from the config's model, so that the page cannot differ from the code. A comment
`<!-- rows of NAME in PAGE -->` becomes the rows of another page's tables that begin with this name. A number stays on
one line with its unit and its interval.
"""

import hashlib
import html
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from maml_rl.config import Config
from maml_rl.config.config import OF_LEARNERS
from maml_rl.config.settings import Setting, describe_settings
from maml_rl.metalearners import find_metalearner
from maml_rl.task_distributions import find_task_distribution

# MkDocs counts the warnings of its own loggers, and fails on them in strict mode.
LOG = logging.getLogger("mkdocs.hooks.documentation")

DOCS = Path(__file__).resolve().parent.parent / "docs"
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Not text of a page: elements in which spaces have a meaning, and tags.
_NO_TEXT = re.compile(
    r"(<(?:pre|code|math|script|style|svg)\b.*?</(?:pre|code|math|script|style|svg)>|<[^>]*>)", re.DOTALL
)
_CELL = re.compile(r"<td( [^>]*)?>([^<]*)</td>")
_UNIT = re.compile(
    r"(?<=\d) (?=(?:[kM]|[mµ]?s|[kKMG]B|%|hours?|minutes?|seconds?|steps?|tasks?|episodes?|cores?|units?)\b|%|±|x )"
)
_RANGE = re.compile(r"\[-?[\d.]+, -?[\d.]+\]")
_WORDS_OF_NUMBERS = {"to", "k", "M", "KB", "MB", "GB", "s", "ms", "µs", "x"}
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_SETTINGS = re.compile(r"^<!-- settings: (.*) -->$", re.MULTILINE)
_ALGORITHM_SETTINGS = re.compile(r"^<!-- settings of (\S+) -->$", re.MULTILINE)
_TASK_SETTINGS = re.compile(r"^<!-- settings of tasks (\S+) -->$", re.MULTILINE)
_ROWS = re.compile(r"^<!-- rows of (\S+) in (\S+) -->$", re.MULTILINE)
_SECTION = re.compile(r"^## (.*)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
_TABLE = re.compile(r"^(\|.*\|)\n\|[-:| ]+\|\n((?:\|.*\|\n?)+)", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def diagrams_of(markdown: str) -> list[str]:
    """Return the source of every diagram of a page, in order."""
    return _DIAGRAM.findall(markdown)


def picture_of(page: str, index: int) -> str:
    """Return the path below `docs` of the picture of a page's diagram."""
    return f"images/diagrams/{page.removesuffix('.md').replace('/', '-')}-{index + 1}.svg"


def mark_of(diagram: str) -> str:
    """Return the comment by which a picture names the source that it was drawn from."""
    return f"<!-- drawn from {hashlib.sha256(diagram.encode()).hexdigest()} -->"


def with_pictures(markdown: str, page: str, docs: Path = DOCS) -> str:
    """Replace diagrams by pictures, and warn where a picture is missing or drawn from another source."""
    count = 0

    def to_picture(match: re.Match[str]) -> str:
        nonlocal count
        picture = picture_of(page, count)
        count += 1
        file = docs / picture
        if not file.is_file() or mark_of(match[1]) not in file.read_text(encoding="utf-8"):
            LOG.warning(f"{page}: diagram {count} has changed since it was drawn; run scripts/draw_diagrams.py")
        heading = [page, *_HEADING.findall(markdown[: match.start()])][-1]
        return f"![Diagram: {heading}]({posixpath.relpath(picture, posixpath.dirname(page) or '.')})"

    return _DIAGRAM.sub(to_picture, markdown)


def with_settings(markdown: str) -> str:
    """Replace comments by the tables of settings that they name; unknown keys are left out."""
    asked = _SETTINGS.findall(markdown)
    known = {setting.key: setting for setting in describe_settings(Config)}
    named = {key for keys in asked if keys != "all others" for key in keys.split()}

    def to_table(match: re.Match[str]) -> str:
        keys = [key for key in known if key not in named] if match[1] == "all others" else match[1].split()
        return table_of([known[key] for key in keys if key in known])

    def to_algorithm_table(match: re.Match[str]) -> str:
        learner = find_metalearner(match[1])
        of_all = ", ".join(f"`{key}`" for key in OF_LEARNERS if key in learner.uses)
        used = f"Of the general settings that not all algorithms use, `{match[1]}` uses {of_all or 'none'}."
        return f"{table_of(describe_settings(learner.Settings))}\n\n{used}"

    def to_task_table(match: re.Match[str]) -> str:
        return table_of(describe_settings(find_task_distribution(match[1]).Settings))

    markdown = _TASK_SETTINGS.sub(to_task_table, markdown)
    return _ALGORITHM_SETTINGS.sub(to_algorithm_table, _SETTINGS.sub(to_table, markdown))


def table_of(settings: list[Setting]) -> str:
    """Return a table of settings in Markdown."""
    rows = [
        f"| `{setting.key}` | {setting.meaning} | `{setting.allowed}` "
        f"| {'required' if setting.default is None else f'`{setting.default}`'} |"
        for setting in settings
    ]
    return "\n".join(["| key | meaning | range | default |", "|---|---|---|---|", *rows])


def with_rows(markdown: str, docs: Path = DOCS) -> str:
    """Replace comments that request the rows of one name on another page by tables with one row per section.

    The rows come from the first table of each section of that page, and the section's title replaces the name. Warns
    where there is no such row.
    """

    def to_table(match: re.Match[str]) -> str:
        name, page = match.groups()
        found: list[dict[str, str]] = []
        for section, text in _SECTION.findall((docs / page).read_text(encoding="utf-8")):
            table = _TABLE.search(text)
            rows = (
                [row for row in table[2].splitlines() if row.startswith((f"| {name} |", f"| [{name}]("))]
                if table
                else []
            )
            if table and rows:
                titles, cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (table[1], rows[0]))
                found.append(dict(zip(["family", *titles[1:]], [section, *cells[1:]], strict=True)))
        if not found:
            LOG.warning(f"{page} has no row of {name}")
            return ""
        # Tables may have different columns.
        titles = list(dict.fromkeys(title for row in found for title in row))
        lines = [[row.get(title, "") for title in titles] for row in found]
        return "\n".join(
            [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
            + [f"| {' | '.join(cells)} |" for cells in lines]
        )

    return _ROWS.sub(to_table, markdown)


def with_unbroken_numbers(page_html: str) -> str:
    """Keep on one line a number and its unit, the numbers of an interval, and the number cells of a table."""

    def to_cell(match: re.Match[str]) -> str:
        attributes, text = match[1] or "", match[2]
        words = re.findall(r"[^\W\d_]+", text)
        # Intervals, and the next of several numbers, may be on a new line, which leaves room for more columns.
        is_one_number = re.search(r"\d", text) and not re.search(r"\[|, ", text)
        if is_one_number and len(text) < 32 and set(words) <= _WORDS_OF_NUMBERS:
            return f'<td class="number"{attributes}>{text}</td>'
        return match[0]

    def unbroken(text: str) -> str:
        return _RANGE.sub(lambda match: match[0].replace(" ", "\u00a0"), _UNIT.sub("\u00a0", text))

    parts = _NO_TEXT.split(_CELL.sub(to_cell, page_html))
    return "".join(part if index % 2 else unbroken(part) for index, part in enumerate(parts))


def with_formulas(page_html: str) -> str:
    """Replace LaTeX by MathML."""

    def to_mathml(match: re.Match[str]) -> str:
        latex = html.unescape(match[2]).strip()[2:-2]
        return convert(latex, display="block" if match[1] == "div" else "inline")

    return _FORMULA.sub(to_mathml, page_html)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called with every page before it is rendered."""
    return with_rows(with_settings(with_pictures(markdown, page.file.src_uri)))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Called with every page after it was rendered."""
    return with_unbroken_numbers(with_formulas(html))
