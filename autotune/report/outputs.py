"""Writes the files that a finished search leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from autotune.records import SearchResult
from autotune.report.page import report_html
from autotune.report.table import trials_table
from runtime.config import save_config
from runtime.errors import UserError


def write_outputs(result: SearchResult, folder: Path) -> list[Path]:
    """Write best.json, trials.csv and report.html into `folder`, each whole or not at all.

    Without a winner there is no best.json; one left by an earlier search is removed.

    Returns:
        The paths written, best.json first.

    Raises:
        UserError: the folder cannot be written.
    """
    table, page = trials_table(result), report_html(result)
    writers: dict[str, Callable[[Path], object]] = {
        "trials.csv": lambda path: table.to_csv(path, index=False),
        "report.html": lambda path: path.write_text(page, encoding="utf-8"),
    }
    if result.best is not None:
        best = result.best.config
        writers = {"best.json": lambda path: save_config(best, path), **writers}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if result.best is None:
            (folder / "best.json").unlink(missing_ok=True)
        for name, write in writers.items():
            _write_whole(folder / name, write)
    except OSError as error:
        raise UserError(
            f"the output folder must be writable, but {error.filename or folder} is not: "
            f"{error.strerror}; choose another with --out"
        ) from error
    return [folder / name for name in writers]


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
