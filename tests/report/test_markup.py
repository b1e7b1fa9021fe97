from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maml_rl.report.markup import Markup, element, join


class Reader(HTMLParser):
    """Python's own parser, as the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])), st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_text_and_attributes_are_parsed_as_they_were_written(text: str, value: str) -> None:
    reader = read(element("p", text, title=value))
    assert reader.tags == [("p", {"title": value})]
    assert reader.text == text


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            element("ul", [element("li", 1), None, [element("li", 2.5)]], class_="few"),
            '<ul class="few"><li>1</li><li>2.5</li></ul>',
        ),
        (element("img", src="data:,", alt=""), '<img src="data:," alt="">'),
        (element("a", aria_label="b", for_="c"), '<a aria-label="b" for="c"></a>'),
        (element("a", a=True, b=False, c=None, d=1.25, e=3.0), '<a a d="1.25" e="3"></a>'),
        (join(["<", Markup("<")]), "&lt;<"),
    ],
)
def test_markup_is_written_as_html_has_it(made: Markup, expected: str) -> None:
    assert made == expected
