"""Griffe extension that turns the docstrings' reStructuredText roles into the Markdown that mkdocstrings renders."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
_INTRODUCED_BLOCK = re.compile(r"(?<=\S)::$", re.MULTILINE)
_LITERAL_BLOCK = re.compile(r"[ \t]*::$", re.MULTILINE)


class DocstringRoles(Extension):
    """Replaces roles such as ``:class:`~a.b.Name``` by `` `Name` ``, and ``::`` as reStructuredText does."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(_as_code, obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub("", _INTRODUCED_BLOCK.sub(":", text))


def _as_code(role: re.Match[str]) -> str:
    shortened, name = role.groups()
    return f"`{name.rsplit('.', 1)[-1] if shortened else name}`"
