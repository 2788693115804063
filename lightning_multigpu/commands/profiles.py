"""``lightning-multigpu report``: tables and profiles of earlier runs, shown again and side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.report import document, run_table
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.profile import profile_document, profile_page, profile_text
from lightning_multigpu.report.profile.profile_document import ProfileDocument
from lightning_multigpu.report.schema import ReportError, json_schema

T = TypeVar("T")
_SCHEMAS = {document.FILE_NAME: RunDocument, profile_document.FILE_NAME: ProfileDocument}


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the table and the profile of a run and writes its page again, or compares several runs."""
    parser = OptionParser(
        f"{PROGRAM} {name}",
        "Show the table of RunReport and the profile of ProfilerReport in a run's folder, and write the profile's page "
        "(report.html) again. Of several folders, print a table with a row for each profile.",
    )
    parser.add_argument("folder", nargs="*", type=Path, help="folder of a run: of multigpu_report.json, profile.json")
    parser.add_argument("--schema", choices=_SCHEMAS, help="print the JSON schema of a file, and nothing else")
    options = parser.parse(arguments)
    if options.schema is not None:
        print(json.dumps(json_schema(_SCHEMAS[options.schema]), indent=2))
        return 0
    if not options.folder:
        raise UsageError(f"{PROGRAM} {name}: name the folder of a run")
    for folder in options.folder:
        if not folder.exists():
            raise UsageError(f"{folder}: there is no such folder")
    table_path = options.folder[0] / document.FILE_NAME
    if len(options.folder) == 1 and table_path.is_file():
        _read(lambda path: run_table.show(document.read(path)), table_path, by="RunReport")
        if not _file(options.folder[0]).is_file():
            return 0
    shown = [folder for folder in options.folder if _file(folder).is_file()] or options.folder
    for folder in options.folder:
        if folder not in shown:
            print(f"{folder}: no {profile_document.FILE_NAME}, left out", file=sys.stderr)
    if len(shown) == 1:
        text, page = _read(_shown, _file(shown[0]))
        page_path = _file(shown[0]).with_name(profile_page.FILE_NAME)
        document.write_bytes(page.encode(), page_path)
        print(f"{text}\nwritten to {page_path}")
        return 0
    profiles = {str(folder): _read(_comparable, _file(folder)) for folder in shown}
    print(profile_text.comparison(profiles))
    return 0


def _shown(path: Path) -> tuple[str, str]:
    """The text and the page of a profile."""
    profile = profile_document.read(path)
    return profile_text.text(profile), profile_page.page(profile)


def _comparable(path: Path) -> ProfileDocument:
    profile = profile_document.read(path)
    profile_text.comparison({str(path): profile})  # raises here where values cannot be shown
    return profile


def _file(folder: Path) -> Path:
    """The profile of a folder; the file itself may be named as well."""
    return folder if folder.name == profile_document.FILE_NAME else folder / profile_document.FILE_NAME


def _read(read: Callable[[Path], T], path: Path, by: str = "ProfilerReport") -> T:
    try:
        return read(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; add ProfilerReport or RunReport of lightning_multigpu.callbacks to the run's "
            "callbacks"
        ) from error
    except (ValueError, ArithmeticError, LookupError) as error:  # the last ones of values that cannot be shown
        why = error if isinstance(error, ReportError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: the file is not as {by} writes it ({why}); record it again") from error
