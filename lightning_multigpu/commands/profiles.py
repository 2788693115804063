"""``lightning-multigpu report``: reports of earlier runs, shown again and side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.report import document
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.page import FILE_NAME, page
from lightning_multigpu.report.schema import ReportError
from lightning_multigpu.report.text import comparison, text


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the report of a run and writes its page again, or compares several runs."""
    parser = OptionParser(
        f"{PROGRAM} {name}",
        "Show the report of RunReport or ProfilerReport in a run's folder again, and write the page of its profile "
        f"({FILE_NAME}). Of several folders, print a table with a row for each run.",
    )
    parser.add_argument("folder", nargs="+", type=Path, help=f"folder of a run, with {document.FILE_NAME}")
    options = parser.parse(arguments)
    for folder in options.folder:
        if not folder.exists():
            raise UsageError(f"{folder}: there is no such folder")
    shown = [folder for folder in options.folder if _file(folder).is_file()] or options.folder
    for folder in options.folder:
        if folder not in shown:  # as one of a run of test
            print(f"{folder}: no {document.FILE_NAME}, left out", file=sys.stderr)
    if len(shown) > 1:
        reports = {str(folder): _read(_file(folder), lambda each: comparison({"": each}))[0] for folder in shown}
        print(comparison(reports))
        return 0
    report, shown_text = _read(_file(shown[0]), text)
    print(shown_text)
    if report.profile is not None:
        page_path = _file(shown[0]).with_name(FILE_NAME)
        document.write_bytes(_read(_file(shown[0]), page)[1].encode(), page_path)
        print(f"written to {page_path}")
    return 0


def _file(folder: Path) -> Path:
    """The report of a folder; the file itself may be named as well."""
    return folder if folder.name == document.FILE_NAME else folder / document.FILE_NAME


def _read(path: Path, show: Callable[[RunDocument], str]) -> tuple[RunDocument, str]:
    """A report, and what ``show`` makes of it."""
    try:
        report = document.read(path)
        return report, show(report)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; add RunReport or ProfilerReport of lightning_multigpu.callbacks to the run's "
            "callbacks"
        ) from error
    except (ValueError, ArithmeticError, LookupError) as error:  # the last ones of values that cannot be shown
        why = error if isinstance(error, ReportError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: the file is not as RunReport writes it ({why}); record it again") from error
