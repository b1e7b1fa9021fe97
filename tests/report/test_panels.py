"""Several charts in one file."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from maml_rl.errors import ConfigError
from maml_rl.report.panels import check_figure, write_panels
from maml_rl.report.plot import Axis, Plot
from maml_rl.results.scales import Span


def panel(title: str, height: int = 100) -> tuple[str, str, Plot]:
    plot = Plot(Axis(Span(0.0, 1.0)), Axis(Span(0.0, 1.0)), title, width=200, height=height)
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
