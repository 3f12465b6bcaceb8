"""The program `autotune`, and `python -m autotune`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent
"""Where the packages `autotune` and `runtime` lie."""


def main() -> None:
    """Run the command line and exit."""
    if not sys.flags.safe_path if hasattr(sys.flags, "safe_path") else True:
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


def _leave_working_folder() -> None:
    """Drop the working folder, which `python -m` puts first: a `runtime.py` there is not ours."""
    first = sys.path[0] if sys.path else ""
    if Path(first or os.getcwd()).resolve() in (_HOME, _HOME / "bin"):
        return
    if first in ("", os.getcwd()):
        del sys.path[0]


if __name__ == "__main__":
    main()
