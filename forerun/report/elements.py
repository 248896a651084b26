"""HTML and SVG as trees, so that no text of a run can become markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

# What HTML has no character for; a completion may hold any of them.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")

Child = Element | str | None


def tag(name: str, /, *children: Child, **attributes: object) -> Element:
    """An element with children in order; None is passed over.

    Attributes that are None are left out; `class_` is class, and other underscores are hyphens.
    """
    made = Element(name)
    for key, value in attributes.items():
        if value is not None:
            made.set(key.rstrip("_").replace("_", "-"), printable(str(value)))
    append(made, *children)
    return made


def append(parent: Element, *children: Child) -> None:
    """Add children behind those that are there."""
    for child in children:
        if isinstance(child, str):
            text = printable(child)
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + text
            else:
                parent.text = (parent.text or "") + text
        elif child is not None:
            parent.append(child)


def printable(text: str) -> str:
    """The text with a replacement character for each that no HTML document may hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def document(root: Element) -> str:
    """A whole HTML page."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"
