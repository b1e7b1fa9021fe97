"""Cards of the page: a drawing or a table with its title, its legend, its numbers, and how to read it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from maml_rl.report.markup import Content, Markup, element, join
from maml_rl.report.plot import Plot

# What the reader chooses for all charts at once, by radio buttons that need no script: the first is the default.
X_AXES = {"steps": "environment steps", "iterations": "iterations", "minutes": "minutes of training"}
SMOOTHINGS = 1, 5, 25
_SHORT = 24
_CHOICES = {
    "x": ("Horizontal axis:", {"steps": "environment steps", "iterations": "iterations", "minutes": "minutes"}),
    "smoothing": ("Moving average:", {"1": "off", "5": "5", "25": "25 iterations"}),
}


@dataclass(frozen=True, slots=True)
class Series:
    """The numbers of one line, or of one kind of dots.

    Attributes:
        css: class of its color.
        name: as in the legend.
        places: (n,) each, by the name of the axis, or of what else tells the points apart.
        values: (n,) numbers.
        low: (n,) lower bounds of intervals; None where there are none.
        high: (n,) upper bounds.
    """

    css: str
    name: str
    places: Mapping[str, ArrayLike]
    values: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None


def figure(title: str, explanation: str, *content: Markup | None, css: str = "", data: Markup | None = None) -> Markup:
    """Return a card with a title, the drawing, and how to read it; `data` are the numbers that `numbers` returns."""
    return element(
        "figure",
        element("figcaption", element("h3", title)),
        content,
        element("p", explanation, class_="note") if explanation else None,
        data,
        class_=f"card {css}".strip(),
    )


def numbers(label: str, series: Sequence[Series], plots: Mapping[str, Plot] | None = None) -> Markup:
    """Return the numbers of a chart, which the page's script saves as a table and shows at the pointer.

    Args:
        label: name of the values.
        series: of the chart.
        plots: the drawings of lines by the name of their horizontal axis; None where the marks have titles instead.
    """
    content = {
        "label": label,
        "axes": {name: plot.frame for name, plot in (plots or {}).items()},
        "series": [
            {
                "css": curve.css,
                "name": curve.name,
                "places": {name: _rounded(values) for name, values in curve.places.items()},
                "values": _rounded(curve.values),
                **(
                    {}
                    if curve.low is None or curve.high is None
                    else {"low": _rounded(curve.low), "high": _rounded(curve.high)}
                ),
            }
            for curve in series
        ],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return element("script", Markup(text), type="application/json")


def _rounded(values: ArrayLike) -> list[Any]:
    """Return numbers with six digits, None for those that are not finite, and texts as they are."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        return [str(value) for value in array.tolist()]
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in array.astype(np.float64).tolist()]


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return names with their colors; each entry is (class, name)."""
    return element("ul", [element("li", element("i", class_=css), name) for css, name in entries], class_="legend")


def named(css: str, name: str) -> Markup:
    """Return a name with its color before it: as a color of text, it could be too pale to read."""
    both = element("i", class_=f"swatch {css}"), element("b", name)
    # A short name stays on the line of its color.
    return element("span", both, class_="named") if len(name) <= _SHORT else join(both)


def table(title: str, head: Iterable[Content], rows: Iterable[Content], css: str, *, wide: bool = True) -> Markup:
    """Return a table with a caption for screen readers, in a frame that shows where it scrolls.

    Args:
        title: the caption.
        head: cells of the first row, texts for titles of columns; empty for none.
        rows: made by `row`.
        css: class of the table.
        wide: whether it may be wider than the page.
    """
    heads = [element("th", cell, scope="col") if cell else element("td") for cell in head]
    content = element(
        "table",
        element("caption", title),
        element("thead", element("tr", heads)) if heads else None,
        element("tbody", rows),
        class_=css,
    )
    return element("div", content, class_="scroll", tabindex=0, role="region", aria_label=title) if wide else content


def row(title: Content, *cells: Content, css: str | None = None) -> Markup:
    """Return a row of a table: the title of the row, and its other cells."""
    return element("tr", element("th", title, scope="row"), cells, class_=css)


def choices() -> list[Markup]:
    """Return the inputs, which must come before all charts, and the bar with their labels."""
    inputs = [
        element(
            "input",
            type="radio",
            name=name,
            id=f"{name}-{value}",
            class_="choice",
            checked=index == 0,
            aria_label=f"{words} {label}",
        )
        for name, (words, values) in _CHOICES.items()
        for index, (value, label) in enumerate(values.items())
    ]
    labels = [
        element(
            "span",
            words,
            [join([" ", element("label", label, for_=f"{name}-{value}")]) for value, label in values.items()],
        )
        for name, (words, values) in _CHOICES.items()
    ]
    return [*inputs, element("div", labels, class_="choices")]
