"""Griffe extension that turns the docstrings' reStructuredText roles into the Markdown that mkdocstrings renders."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


class DocstringRoles(Extension):
    """Replaces ``:class:`~a.b.Name``` by `` `Name` `` and the ``::`` before a literal block by ``:``."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(_as_code, obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub(":", text)


def _as_code(role: re.Match[str]) -> str:
    shortened, name = role.groups()
    return f"`{name.rsplit('.', 1)[-1] if shortened else name}`"
