"""The public names of the folder: each docstring has shapes per rank, the communication in bytes, and a source."""

from __future__ import annotations

import inspect
import re

import pytest

from lightning_multigpu.engine import tensor_split

TABLE = re.compile(r"^=[= ]+\nN ranks.* shape on each rank  .*\n=[= ]+\n(.+\n)+?=[= ]+$", re.MULTILINE)
COMMUNICATION = re.compile(r"Communication.*\b(all|reduce)[-_](reduce|gather|scatter)\b.*\bbytes\b", re.DOTALL)
SOURCE = re.compile(r"([A-Z]\w+ et al\.|[A-Z]\w+ and [A-Z]\w+)[^.]*\(\d{4}\)")


@pytest.mark.parametrize("name", tensor_split.__all__)
def test_a_docstring_has_shapes_communication_and_source(name: str) -> None:
    text = inspect.getdoc(getattr(tensor_split, name))
    assert text is not None
    assert TABLE.search(text)
    assert COMMUNICATION.search(text) or name == "TensorGroup", "its table has the communication"
    assert SOURCE.search(" ".join(text.split()))
