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


def test_markup_in_lists_is_nested_and_none_is_left_out() -> None:
    assert (
        element("ul", [element("li", 1), None, [element("li", 2.5)]], class_="few")
        == '<ul class="few"><li>1</li><li>2.5</li></ul>'
    )


def test_elements_without_content_have_no_end_tag() -> None:
    assert element("img", src="data:,", alt="") == '<img src="data:," alt="">'


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, "<a x></a>"), (False, "<a></a>"), (None, "<a></a>"), (1.25, '<a x="1.25"></a>'), (3.0, '<a x="3"></a>')],
)
def test_attribute_values_are_written_as_html_has_them(value: float | bool | None, expected: str) -> None:
    assert element("a", x=value) == expected


def test_names_of_attributes_get_hyphens() -> None:
    assert element("a", aria_label="b", for_="c") == '<a aria-label="b" for="c"></a>'


def test_joined_text_is_escaped_unless_it_is_markup() -> None:
    assert join(["<", Markup("<")]) == "&lt;<"
