"""Several charts in one file: SVG, the same bytes for the same numbers, or PDF and PNG made of it."""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from maml_rl.errors import ConfigError, explain
from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Plot
from maml_rl.runs.atomic_files import replace_file

ENDINGS = (".pdf", ".svg", ".png")
_GAP, _TITLE, _LINE = 12, 26, 20
# Of a line of the key: its length, the room after its name, and that for a letter.
_SAMPLE, _BESIDE, _LETTER = 30, 14, 7.2
# Of an inch: pixels of SVG, points of PDF, and pixels of a picture in print.
_SCREEN, _POINTS, _PRINT = 96, 72, 300


def check_figure(path: Path, option: str) -> None:
    """Refuse a file that `write_panels` could not write, before anything is computed."""
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"{option} {path} must end with {', '.join(ENDINGS)}")
    if path.suffix.lower() != ".svg":
        try:
            import vl_convert  # noqa: F401
        # One that is there and broken may raise anything.
        except Exception as error:
            raise ConfigError(
                f"{option} {path} needs vl-convert-python, which cannot be imported ({explain(error)}); run pip "
                "install 'maml-rl[figures]', or choose a name that ends with .svg"
            ) from None


def write_panels(
    path: Path,
    panels: Sequence[tuple[str, str, Plot]],
    columns: int = 3,
    key: Sequence[tuple[str, str]] = (),
    *,
    caption: str = "",
    dark: bool = False,
) -> None:
    """Write small multiples into one file.

    Args:
        path: of the file; its ending says which of `ENDINGS` it is.
        panels: (class of the title's color, title, chart) each.
        columns: number of charts side by side; all have the width of the first.
        key: (class of the color, name) of every line, above the charts.
        caption: small print below the charts.
        dark: have an SVG follow a reader's choice of light or dark colors; others are for white paper.
    """
    ending = path.suffix.lower()
    # A converter takes each pixel for a point of PDF.
    scale = _POINTS / _SCREEN if ending == ".pdf" else 1.0
    picture = _picture(panels, columns, key, caption, scale, dark and ending == ".svg")
    content = (picture + "\n").encode()
    if ending != ".svg":
        import vl_convert

        as_pdf = ending == ".pdf"
        content = vl_convert.svg_to_pdf(picture) if as_pdf else vl_convert.svg_to_png(picture, scale=_PRINT / _SCREEN)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def _picture(
    panels: Sequence[tuple[str, str, Plot]],
    columns: int,
    key: Sequence[tuple[str, str]],
    caption: str,
    scale: float,
    dark: bool,
) -> Markup:
    columns = min(columns, len(panels))
    across = panels[0][2].size[0] + _GAP
    width = columns * across + _GAP
    parts: list[Markup] = []
    top = _GAP
    longest = max((_SAMPLE + _BESIDE + round(_LETTER * len(name)) for _, name in key), default=1)
    together = min(len(key), max(1, (width - _GAP) // longest))
    for index, (css, name) in enumerate(key):
        left = _GAP + index % together * ((width - _GAP) // together)
        at = top + index // together * _LINE
        parts.append(element("path", class_=f"line {css}", d=f"M{left} {at + 10}h{_SAMPLE - 6}"))
        parts.append(element("text", name, class_=css, x=left + _SAMPLE, y=at + 14))
    top += -(-len(key) // max(together, 1)) * _LINE + 6 * bool(key)
    for first in range(0, len(panels), columns):
        in_row = panels[first : first + columns]
        for column, (css, title, plot) in enumerate(in_row):
            moved = f"translate({_GAP + column * across} {top})"
            content = element("g", plot.content(), transform=f"translate(0 {_TITLE})")
            parts.append(
                element("g", element("text", title, class_=f"title {css}", x=2, y=16), content, transform=moved)
            )
        top += max(plot.size[1] for *_, plot in in_row) + _TITLE + _GAP
    if caption:
        parts.append(element("text", caption, x=_GAP, y=top + 2))
        top += _LINE
    style = files("maml_rl.report").joinpath("charts.css").read_text(encoding="utf-8")
    return element(
        "svg",
        element("style", Markup(style if dark else _printed(style))),
        element("rect", class_="paper", width=width, height=top),
        parts,
        xmlns="http://www.w3.org/2000/svg",
        width=width * scale,
        height=top * scale,
        viewBox=f"0 0 {width} {top}",
        role="img",
        aria_label="; ".join(title for _, title, _ in panels),
    )


def _printed(style: str) -> str:
    """Return a style sheet with its light colors instead of variables, which only browsers know."""
    light = re.sub(r"@media[^{]*\{\s*:root \{.*?\}\s*\}\s*", "", style, flags=re.DOTALL)
    colors = dict(re.findall(r"(--\w+): ([^;]+);", light))
    return re.sub(r"var\((--\w+)\)", lambda match: colors[match[1]], light.partition("}")[2].lstrip())
