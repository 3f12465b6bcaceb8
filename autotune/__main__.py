"""The program `autotune`, and `python -m autotune`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent
"""Where the packages `autotune` and `runtime` lie."""


def main() -> None:
    """Run the command line and exit."""
    _open_standard_streams()
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        _leave_working_folder()
    import runtime

    found = Path(runtime.__file__ or "").resolve()
    if found.parent.parent != _HOME:
        print(
            f"autotune: {found} hides this program's own package 'runtime': rename it, or run "
            "from another folder",
            file=sys.stderr,
        )
        sys.exit(2)
    from autotune.cli import run

    sys.exit(run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """Open the null device where a standard stream is closed (`autotune search model.py >&-`).

    Else the next file to be opened, such as the study, would take its place and what is printed.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free
            if fd == 1:
                sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            elif fd == 2:
                sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _leave_working_folder() -> None:
    """Drop the working folder, which `python -m` puts first: a `runtime.py` there is not ours."""
    first = sys.path[0] if sys.path else ""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was deleted, so nothing can be imported from it
        return
    if first in ("", here) and Path(here).resolve() != _HOME:
        del sys.path[0]


if __name__ == "__main__":
    main()
