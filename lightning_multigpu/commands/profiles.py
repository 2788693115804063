"""``lightning-multigpu report``: profiles of earlier runs, shown again and side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.report import document
from lightning_multigpu.report.profile import profile_document, profile_page, profile_text
from lightning_multigpu.report.schema import ReportError


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the profile of a run and writes its page again, or compares several runs.

    Raises:
        UsageError: an option is unknown, or a folder has no profile.
        SystemExit: for ``--help``.
    """
    parser = OptionParser(
        f"{PROGRAM} {name}",
        "Show the profile that ProfilerReport has written to a run's folder, and write its page (report.html) again. "
        "Of several folders, print a table with a row for each run.",
    )
    parser.add_argument("folder", nargs="+", type=Path, help="folder of a run, with its profile.json")
    parser.add_argument("--page", type=Path, help="write the comparison of several runs to this HTML file")
    options = parser.parse(arguments)
    if options.page is not None and len(options.folder) == 1:
        raise UsageError(f"--page={options.page} is the comparison of several runs: name two folders or more")
    profiles = {str(folder): _profile(folder) for folder in options.folder}
    if len(profiles) == 1:
        [(folder, profile)] = profiles.items()
        page_path = _file(Path(folder)).with_name(profile_page.FILE_NAME)
        text, page = _made(profile_text.text, profile, folder), _made(profile_page.page, profile, folder)
        document.write_bytes(page.encode(), page_path)
        print(f"{text}\nwritten to {page_path}")
        return 0
    print(_made(profile_text.comparison, profiles, *profiles))
    if options.page is not None:
        document.write_bytes(_made(profile_page.comparison, profiles, *profiles).encode(), options.page)
        print(f"written to {options.page}")
    return 0


def _made(make: Callable[[dict[str, Any]], str], profile: dict[str, Any], *folders: str) -> str:
    """The text or page of a profile, or of profiles by folder; a file may hold anything under the right version."""
    try:
        return make(profile)
    except Exception as error:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UsageError(
            f"{', '.join(folders)}: a profile is not as ProfilerReport writes it ({what:.200}); record it again"
        ) from error


def _file(folder: Path) -> Path:
    """The profile of a folder; the file itself may be named as well."""
    return folder if folder.name == profile_document.FILE_NAME else folder / profile_document.FILE_NAME


def _profile(folder: Path) -> dict[str, Any]:
    path = _file(folder)
    try:
        return profile_document.read(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; add lightning_multigpu.callbacks.ProfilerReport to the run's callbacks"
        ) from error
    except ReportError as error:
        raise UsageError(str(error)) from error
