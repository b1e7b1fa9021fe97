"""HTML and SVG as nested calls: everything except markup is escaped."""

import html
from collections.abc import Iterable
from typing import Any

# HTML elements that have no content, and no end tag.
_VOID = {"br", "img", "input", "link", "meta", "source"}


class Markup(str):
    """Text that is markup and is written to the page unescaped."""

    __slots__ = ()


Content = str | int | float | Iterable[Any] | None


def element(name: str, /, *children: Content, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Args:
        name: of the tag.
        children: text, which is escaped, markup, which is not, or lists of these; None is left out.
        attributes: `stroke_width=2` becomes stroke-width="2", `class_` class; True for an attribute without a
            value; None and False for none.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{html.escape(_text(value))}"')
    opening = f"<{' '.join(parts)}>"
    return Markup(opening if name in _VOID else f"{opening}{join(children)}</{name}>")


def join(contents: Iterable[Content]) -> Markup:
    """Return the markup of several contents, one after the other."""
    return Markup("".join(_content(content) for content in contents))


def _content(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str | int | float):
        return html.escape(_text(content), quote=False)
    return join(content)


def _text(value: str | float) -> str:
    # Coordinates with more digits than a screen has pixels only make the page larger.
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
