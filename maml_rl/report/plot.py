"""A chart as SVG: axes, lines, bands, dots. Colors come from the page's style sheet, by class, for dark and light.

Several charts are one file: SVG, the same bytes for the same numbers, or PDF and PNG made of it.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.errors import ConfigError, explain
from maml_rl.report.markup import Markup, element, join
from maml_rl.results.scales import Axis
from maml_rl.runs.atomic_files import replace_file

_WIDTH, _HEIGHT = 480, 300
_RIGHT, _BOTTOM = 14, 44
# Room for a character of the axes' font, and as many points as a line of this width can show.
_CHARACTER = 8
_MOST_POINTS = 960
_DOT = 4
ENDINGS = (".pdf", ".svg", ".png")
_GAP, _TITLE, _LINE = 12, 26, 20
# Of a line of the key: its length, the room after its name, and that for a letter.
_SAMPLE, _BESIDE, _LETTER = 30, 14, 7.2
# Of an inch: pixels of SVG, points of PDF, and pixels of a picture in print.
_SCREEN, _POINTS, _PRINT = 96, 72, 300


class Plot:
    """Axes, and the drawing between them.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        summary: one sentence about the chart, for readers who cannot see it.
        equal: give both axes the same scale, and the chart the shape that follows.
        width: of the chart in pixels, to which the texts are 12 pixels high.
        height: of the chart.
    """

    def __init__(
        self, x: Axis, y: Axis, summary: str, *, equal: bool = False, width: int = _WIDTH, height: int = _HEIGHT
    ) -> None:
        self._x, self._y, self._summary = x, y, summary
        y_ticks = y.marks(max(2, height // 55))
        below = _BOTTOM if x.label else _BOTTOM - 18
        self._left = 12 + _CHARACTER * max((len(text) for _, text in y_ticks), default=0)
        self._top = 34 if y.label else 10
        self._right, self._bottom = width - _RIGHT, height - below
        if equal:
            share = (self._y.high - self._y.low) / (self._x.high - self._x.low)
            self._bottom = self._top + round((self._right - self._left) * share)
            height = self._bottom + below
        self._size = (width, height)
        self._scale = self._y_axis(y_ticks, y.label)
        self._base = self._x_axis(x.marks(max(2, width // 60)), x.label)
        self._marks: list[Markup] = []
        self._layers: list[tuple[str, list[Markup]]] = [("", self._marks)]

    def layer(self, css: str) -> None:
        """Put all further marks into a group of a class, which a style sheet may show or hide."""
        self._marks = []
        self._layers.append((css, self._marks))

    def line(self, xs: ArrayLike, ys: ArrayLike, css: str) -> None:
        """Connect points; non-finite values leave gaps, and a point between two gaps is a dot."""
        points = self._points(*_thinned(np.asarray(xs, np.float64), np.asarray(ys, np.float64)))
        parts = [points[part] for part in _runs(_known(points))]
        path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in part) for part in parts if len(part) > 1)
        if path:
            self._marks.append(element("path", class_=f"line {css}", d=path))
        for ((x, y),) in (part for part in parts if len(part) == 1):
            self._marks.append(element("circle", class_=f"dot {css}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=_DOT))

    def band(self, xs: ArrayLike, lows: ArrayLike, highs: ArrayLike, css: str) -> None:
        """Fill the space between two lines; at a point between two gaps it is an interval."""
        xs = np.asarray(xs, np.float64)
        below = self._points(*_thinned(xs, np.asarray(lows, np.float64)))
        above = self._points(*_thinned(xs, np.asarray(highs, np.float64)))
        known = _known(below) & _known(above)
        for part in _runs(known):
            if part.stop - part.start == 1:
                self._interval(below[part.start], above[part.start], css)
                continue
            outline = np.concatenate([above[part], below[part][::-1]])
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in outline) + "Z"
            self._marks.append(element("path", class_=f"band {css}", d=path))

    def dots(self, xs: ArrayLike, ys: ArrayLike, css: str, *, radius: float = _DOT, titles: Sequence[str] = ()) -> None:
        """Draw points; `titles` appear when one is pointed at."""
        for index, (x, y) in enumerate(self._points(xs, ys)):
            if np.isfinite(x) and np.isfinite(y):
                title = element("title", titles[index]) if titles else None
                self._marks.append(
                    element("circle", title, class_=f"dot {css}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=radius)
                )

    def label(self, x: float, y: float, text: str, css: str, *, beside: bool = False) -> None:
        """Write a word above a point: to its left, or to its right where the left has no room; or `beside` it."""
        ((across, down),) = self._points([x], [y])
        fits = across - self._left > _CHARACTER * len(text) and not beside
        at, anchor = (across - 2.0, "end") if fits else (across + (6.0 if beside else 2.0), "start")
        place = {"x": f"{at:.1f}", "y": f"{down + (4 if beside else -4):.1f}", "text_anchor": anchor}
        self._marks.append(element("text", text, class_=css, **place))

    def interval(self, x: float, low: float, high: float, css: str) -> None:
        """Draw a vertical bar from `low` to `high`, with caps."""
        below, above = self._points([x, x], [low, high])
        self._interval(below, above, css)

    def across(self, low: float, high: float, y: float, css: str) -> None:
        """Draw a horizontal bar from `low` to `high`, without caps."""
        (left, down), (right, _) = self._points([low, high], [y, y])
        if np.isfinite([left, right]).all():
            self._marks.append(element("path", class_=f"interval {css}", d=f"M{left:.1f} {down:.1f}H{right:.1f}"))

    def _interval(self, below: NDArray[np.float64], above: NDArray[np.float64], css: str) -> None:
        (left, bottom), (_, top) = below, above
        if np.isfinite([bottom, top]).all():
            path = f"M{left:.1f} {bottom:.1f}V{top:.1f}M{left - 4:.1f} {bottom:.1f}h8M{left - 4:.1f} {top:.1f}h8"
            self._marks.append(element("path", class_=f"interval {css}", d=path))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self._size

    @property
    def frame(self) -> list[float]:
        """Pixels of the left and right end of the horizontal axis and of the top and bottom, and the values there."""
        return [self._left, self._right, self._top, self._bottom, self._x.low, self._x.high]

    def content(self) -> list[Markup]:
        """Return the drawing without the frame of a picture."""
        return [*self._scale, *self._base, *self._drawing()]

    def svg(self) -> Markup:
        """Return the chart, as wide as its container."""
        return self._picture(self.content())

    def _drawing(self) -> list[Markup]:
        return [element("g", marks, class_=css) if css else join(marks) for css, marks in self._layers]

    def _picture(self, content: Sequence[Markup]) -> Markup:
        width, height = self._size
        return element("svg", content, viewBox=f"0 0 {width} {height}", role="img", aria_label=self._summary)

    def _points(self, xs: ArrayLike, ys: ArrayLike) -> NDArray[np.float64]:
        """Return pixels (n, 2)."""
        across = (np.asarray(xs, np.float64) - self._x.low) / (self._x.high - self._x.low)
        up = (np.asarray(ys, np.float64) - self._y.low) / (self._y.high - self._y.low)
        return np.stack(
            [self._left + across * (self._right - self._left), self._bottom + up * (self._top - self._bottom)], axis=-1
        )

    def _y_axis(self, names: Sequence[tuple[float, str]], label: str) -> list[Markup]:
        parts = []
        for (_, place), (_, text) in zip(
            self._points(np.full(len(names), self._x.low), [y for y, _ in names]), names, strict=True
        ):
            css = "axis" if text == "0" else "grid"
            parts.append(element("path", class_=css, d=f"M{self._left} {place:.1f}H{self._right}"))
            parts.append(element("text", text, x=self._left - 6, y=f"{place + 4:.1f}", text_anchor="end"))
        if label:
            parts.append(element("text", label, class_="label", x=2, y=14))
        return parts

    def _x_axis(self, names: Sequence[tuple[float, str]], label: str) -> list[Markup]:
        parts = [element("path", class_="axis", d=f"M{self._left} {self._bottom}H{self._right}")]
        for (place, _), (_, text) in zip(
            self._points([x for x, _ in names], np.full(len(names), self._y.low)), names, strict=True
        ):
            parts.append(element("text", text, x=f"{place:.1f}", y=self._bottom + 17, text_anchor="middle"))
        if label:
            middle = (self._left + self._right) / 2
            parts.append(element("text", label, class_="label", x=middle, y=self._bottom + 36, text_anchor="middle"))
        return parts


def switched(plots: Mapping[str, Plot]) -> Markup:
    """Return one chart of several that differ only in the horizontal axis, which a style sheet chooses by its name.

    Each is in layers of the class `by-<name>`; equal drawings are one layer of several classes.
    """
    drawings: dict[Markup, list[str]] = {}
    for name, plot in plots.items():
        drawings.setdefault(join(plot._drawing()), []).append(f"by-{name}")
    layers = [element("g", plot._base, class_=f"by by-{name}") for name, plot in plots.items()]
    layers += [element("g", drawing, class_=" ".join(["by", *names])) for drawing, names in drawings.items()]
    first = next(iter(plots.values()))
    return first._picture([*first._scale, *layers])


def _thinned(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Average neighbors, where there are more points than can be distinguished."""
    group = -(-len(xs) // _MOST_POINTS)
    if group <= 1:
        return xs, ys
    starts = np.arange(0, len(xs), group)
    counts = np.diff([*starts, len(xs)])
    return np.add.reduceat(xs, starts) / counts, np.add.reduceat(ys, starts) / counts


def _known(points: NDArray[np.float64]) -> NDArray[np.bool_]:
    finite = np.isfinite(points)
    return finite[:, 0] & finite[:, 1]


def _runs(known: NDArray[np.bool_]) -> list[slice]:
    """Return the longest ranges in which all are known."""
    edges = np.flatnonzero(np.diff([False, *known.tolist(), False]))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


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
    picture = _in_rows(panels, columns, key, caption, scale, dark and ending == ".svg")
    content = (picture + "\n").encode()
    if ending != ".svg":
        import vl_convert

        as_pdf = ending == ".pdf"
        content = vl_convert.svg_to_pdf(picture) if as_pdf else vl_convert.svg_to_png(picture, scale=_PRINT / _SCREEN)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def _in_rows(
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
