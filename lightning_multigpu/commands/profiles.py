"""``lightning-multigpu report``: the report of an earlier run, shown again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.report import document
from lightning_multigpu.report.page import FILE_NAME, page
from lightning_multigpu.report.schema import ReportError
from lightning_multigpu.report.text import text


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the report of a run, and writes its page again."""
    parser = OptionParser(
        f"{PROGRAM} {name}",
        "Show the report of RunReport or ProfilerReport in a run's folder again, and write the page of its profile "
        f"({FILE_NAME}).",
    )
    parser.add_argument("folder", type=Path, help=f"folder of a run, with {document.FILE_NAME}")
    folder: Path = parser.parse(arguments).folder
    if not folder.exists():
        raise UsageError(f"{folder}: there is no such folder")
    path = folder if folder.name == document.FILE_NAME else folder / document.FILE_NAME
    try:
        report = document.read(path)
        print(text(report))
        if report.profile is not None:
            page_path = path.with_name(FILE_NAME)
            document.write_bytes(page(report).encode(), page_path)
            print(f"written to {page_path}")
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}; add RunReport or ProfilerReport of lightning_multigpu.callbacks to "
            "the run's callbacks"
        ) from error
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:  # the last ones of what cannot be shown
        why = error if isinstance(error, ReportError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: the file is not as RunReport writes it ({why}); record it again") from error
    return 0
