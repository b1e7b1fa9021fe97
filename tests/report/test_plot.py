import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from maml_rl.errors import ConfigError
from maml_rl.report.plot import Plot, check_figure, switched, write_panels
from maml_rl.results.scales import Axis


def drawn(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(plot.svg())


def marks(plot: Plot, css: str) -> list[ElementTree.Element]:
    return [mark for mark in drawn(plot).iter() if css in mark.get("class", "").split()]


def texts(plot: Plot) -> dict[str, tuple[float, float]]:
    return {text.text or "": (float(text.get("x", 0)), float(text.get("y", 0))) for text in drawn(plot).iter("text")}


def unit_plot(**options: object) -> Plot:
    return Plot(Axis(0.0, 1.0, **options), Axis(0.0, 1.0), "a test")


def test_dots_are_at_their_coordinates() -> None:
    plot = Plot(Axis(0.0, 10.0), Axis(-100.0, 0.0), "a test")
    plot.dots([0.0, 10.0, 5.0], [-100.0, 0.0, -50.0], "before")
    places = np.array([[float(dot.get("cx", 0)), float(dot.get("cy", 0))] for dot in marks(plot, "dot")])
    left, right = texts(plot)["2"][0], texts(plot)["8"][0]
    bottom, top = texts(plot)["\N{MINUS SIGN}100"][1], texts(plot)["\N{MINUS SIGN}20"][1]
    # The text of a tick is 4 pixels below its line.
    np.testing.assert_allclose(places[0], [left - (right - left) / 3, bottom - 4], atol=0.1)
    np.testing.assert_allclose(places[1], [right + (right - left) / 3, top + (top - bottom) / 4 - 4], atol=0.1)
    np.testing.assert_allclose(places[2], (places[0] + places[1]) / 2, atol=0.1)


def test_points_between_gaps_are_dots_and_intervals() -> None:
    plot = unit_plot()
    ys = [0.5, np.nan, 0.5, 0.6, np.nan, 0.7]
    plot.line(np.linspace(0, 1, 6), ys, "after")
    plot.band(np.linspace(0, 1, 6), np.array(ys) - 0.1, np.array(ys) + 0.1, "after")
    # Alone, and at the end of a run that was interrupted after a gap.
    across = [float(dot.get("cx", 0)) for dot in marks(plot, "dot")]
    assert len(across) == 2
    (line,) = marks(plot, "line")
    first, last = (float(x) for x in (line.get("d", "")[1:].split()[0], line.get("d", "").split("L")[1].split()[0]))
    assert across[0] < first < last < across[1]
    assert (len(marks(plot, "interval")), len(marks(plot, "band"))) == (2, 1)
    without = unit_plot()
    without.line([0.0, 1.0], [np.nan, np.nan], "after")
    without.band([0.0, 1.0], [np.nan, np.nan], [1.0, 1.0], "after")
    assert not marks(without, "after")


def test_axes_to_choose_from_share_their_drawing_where_it_is_the_same() -> None:
    plots = {
        name: Plot(Axis(0.0, end, name), Axis(0.0, 1.0), "a test")
        for name, end in (("steps", 10.0), ("iterations", 1.0), ("minutes", 4.0))
    }
    for plot, xs in zip(plots.values(), ([0.0, 10.0], [0.0, 1.0], [0.0, 1.0]), strict=True):
        plot.line(xs, [0.0, 1.0], "after")
    root = ElementTree.fromstring(switched(plots))
    layers = [(mark.get("class"), len(list(mark.iter("path")))) for mark in root.iter("g")]
    assert layers[3:] == [("by by-steps by-iterations", 1), ("by by-minutes", 1)]
    assert [mark.get("class") for mark in root.iter("g")][:3] == ["by by-steps", "by by-iterations", "by by-minutes"]
    assert sum(text.text == "1.0" for text in root.iter("text") if text.get("text-anchor") == "end") == 1


def test_band_has_one_outline_for_every_range_of_known_values() -> None:
    plot = unit_plot()
    lows = [0.1, 0.1, np.nan, 0.2, 0.2]
    plot.band(np.linspace(0, 1, 5), lows, [0.5] * 5, "after")
    outlines = [path.get("d", "") for path in marks(plot, "band")]
    assert [outline.count("L") for outline in outlines] == [3, 3]
    assert all(outline.endswith("Z") for outline in outlines)


def test_marks_of_one_point_have_their_place_their_side_and_a_title() -> None:
    plot = unit_plot(names=[(0.0, "left"), (1.0, "right")])
    plot.interval(0.5, 0.0, 1.0, "after")
    plot.dots([0.5, 0.5], [0.0, 1.0], "after", titles=["goal <here>", ""])
    for x in (0.1, 0.9):
        plot.label(x, 0.5, "pretrain", "rest")
    bottom, top = (dot.get("cy", "") for dot in marks(plot, "dot"))
    assert f"{bottom}V{top}" in marks(plot, "interval")[0].get("d", "")
    # A label is on the side that has room for it.
    assert [mark.get("text-anchor") for mark in marks(plot, "rest")] == ["start", "end"]
    # For screen readers.
    assert drawn(plot).get("aria-label") == "a test"
    assert marks(plot, "dot")[0].findtext("title") == "goal <here>"
    # Named places replace numbers.
    assert texts(plot)["left"][0] < texts(plot)["right"][0]


def test_long_line_is_averaged_to_what_a_screen_can_show() -> None:
    plot = unit_plot()
    plot.line(np.linspace(0, 1, 10_001), np.full(10_001, 0.5), "after")
    (path,) = marks(plot, "line")
    points = path.get("d", "").replace("M", "L").split("L")[1:]
    assert 400 < len(points) <= 960
    assert len({point.split()[1] for point in points}) == 1


def test_equal_axes_have_the_same_scale() -> None:
    plot = Plot(Axis(0.0, 1.0), Axis(0.0, 2.0), "a test", equal=True, width=300)
    plot.dots([0.0, 1.0, 0.0], [0.0, 0.0, 1.0], "before")
    origin, right, up = (np.array([float(dot.get("cx", 0)), float(dot.get("cy", 0))]) for dot in marks(plot, "dot"))
    assert right[0] - origin[0] == pytest.approx(origin[1] - up[1], abs=1.0)


def panel(title: str, height: int = 100) -> tuple[str, str, Plot]:
    plot = Plot(Axis(0.0, 1.0), Axis(0.0, 1.0), title, width=200, height=height)
    plot.line([0.0, 1.0], [0.0, 1.0], "group0")
    return "label", title, plot


def written(path: Path, **options: object) -> ElementTree.Element:
    write_panels(path, [panel("one", 150), panel("two"), panel("three")], 2, **options)
    return ElementTree.fromstring(path.read_text())


def test_panels_are_in_rows_within_the_picture_below_their_key(tmp_path: Path) -> None:
    root = written(tmp_path / "new/x.svg", key=[("group0", "a"), ("group1", "b")], caption="small print")
    moves = [re.findall(r"[\d.]+", g.get("transform", "")) for g in root if g.tag.endswith("}g")]
    places = [(float(x), float(y)) for x, y in moves]
    key = [float(text.get("y", 0)) for text in root if text.tag.endswith("}text")]
    assert places[0][1] == places[1][1] > max(key[:2])
    # The second row is below the highest chart of the first.
    assert places[2] == (places[0][0], pytest.approx(places[0][1] + 150 + 26 + 12))
    assert key[2] <= float(root.get("height", 0))
    assert places[2][1] + 26 + 100 < key[2]


def test_long_names_of_the_key_are_in_several_rows(tmp_path: Path) -> None:
    root = written(tmp_path / "x.svg", key=[(f"group{index}", "a name of thirty characters or") for index in range(3)])
    places = [(text.get("x"), text.get("y")) for text in root if text.tag.endswith("}text")]
    assert len({x for x, _ in places}) == 1
    assert len({y for _, y in places}) == 3


def test_picture_for_paper_has_colors_that_every_program_knows(tmp_path: Path) -> None:
    style = (written(tmp_path / "x.svg")[0].text or "", written(tmp_path / "dark.svg", dark=True)[0].text or "")
    assert "var(" not in style[0]
    assert "prefers-color-scheme" not in style[0]
    assert "path.line" in style[0]
    assert ".group0 { color: #05449f; }" in style[0]
    assert "prefers-color-scheme: dark" in style[1]


def test_converted_picture_has_the_size_of_print(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    width = float(written(tmp_path / "x.svg").get("width", 0))
    for ending in (".pdf", ".png"):
        write_panels(tmp_path / f"x{ending}", [panel("one"), panel("two")], 2)
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    box = re.search(rb"/MediaBox \[0 0 ([\d.]+)", (tmp_path / "x.pdf").read_bytes())
    assert box is not None
    assert float(box[1]) / 72 == pytest.approx(width / 96)
    assert int.from_bytes((tmp_path / "x.png").read_bytes()[16:20]) / 300 == pytest.approx(width / 96, rel=0.01)


@pytest.mark.parametrize("reason", ["No module named 'vl_convert'", "cannot open shared object file"])
def test_figure_without_its_package_says_why_and_svg_needs_none(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vl_convert.py").write_text(f"raise ImportError({reason!r})")
    monkeypatch.delitem(sys.modules, "vl_convert", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"--figure .*{re.escape(reason)}\).*maml-rl\[figures\].*\.svg"):
        check_figure(Path("figure.pdf"), "--figure")
    check_figure(Path("figure.svg"), "--figure")
    with pytest.raises(ConfigError, match=r"--figure x\.gif must end with \.pdf, \.svg, \.png"):
        check_figure(Path("x.gif"), "--figure")
