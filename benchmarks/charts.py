"""Charts of the pages: SVG files with the axes and colors of the reports, the same bytes for the same results."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Plot

_GAP, _TITLE = 12, 26


def write_panels(
    path: Path, panels: Sequence[tuple[str, str, Plot]], columns: int = 3, key: Sequence[tuple[str, str]] = ()
) -> None:
    """Write small multiples into one file.

    Args:
        path: of the file.
        panels: (class of the title's color, title, chart) each; all charts have the size of the first.
        columns: number of charts side by side.
        key: (class of the color, name) of every line, above the charts.
    """
    columns = min(columns, len(panels))
    across, down = panels[0][2].size[0] + _GAP, panels[0][2].size[1] + _TITLE + _GAP
    top = _GAP + (_TITLE if key else 0)
    width, height = columns * across + _GAP, -(-len(panels) // columns) * down + top
    parts = [
        element(
            "g",
            element("text", title, class_=f"title {css}", x=2, y=16),
            element("g", plot.content(), transform=f"translate(0 {_TITLE})"),
            transform=f"translate({_GAP + index % columns * across} {top + index // columns * down})",
        )
        for index, (css, title, plot) in enumerate(panels)
    ]
    for index, (css, name) in enumerate(key):
        left = _GAP + index * (width - _GAP) // len(key)
        parts.append(element("path", class_=f"line {css}", d=f"M{left} {_GAP + 10}h24"))
        parts.append(element("text", name, class_=css, x=left + 30, y=_GAP + 14))
    style = files("maml_rl.report").joinpath("charts.css").read_text(encoding="utf-8")
    picture = element(
        "svg",
        element("style", Markup(style)),
        element("rect", class_="paper", width=width, height=height),
        parts,
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label="; ".join(title for _, title, _ in panels),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture + "\n", encoding="utf-8")
