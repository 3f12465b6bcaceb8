"""The output folder of a search: which one it is, whose it is, and who is writing to it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from runtime.errors import UserError

LOCK_FILE = "study.db.lock"
"""Names the folder's model and storage; locked while a search runs. The kernel drops the lock with
the process, so that a killed search leaves none behind."""

STUDIES = Path("studies")


@dataclass(frozen=True, kw_only=True)
class FolderOwner:
    """What the lock file says."""

    model_file: str
    model_hash: str
    storage: str | None
    """Optuna storage URL; None where the study lies in the folder itself."""

    def is_model(self, model_file: Path, model_hash: str) -> bool:
        """The same file, or the same content where the file has moved."""
        recorded = Path(self.model_file)
        moved = self.model_hash == model_hash and not recorded.exists()
        return moved or recorded == model_file.resolve()


def study_name(model_file: Path) -> str:
    """The file's stem, or its folder's name where the file is called `model.py`."""
    path = model_file.resolve()
    return path.parent.name or "model" if path.stem == "model" else path.stem


def choose_folder(
    model_file: Path, model_hash: str, out: Path | None, studies: Path = STUDIES
) -> Path:
    """`out`, or `studies/<name>`, with a suffix (`gpt-2`) where another model has that one.

    Raises:
        UserError: `out` holds the study of another model.
    """
    if out is not None:
        owner = owner_of(out)
        if owner is not None and not owner.is_model(model_file, model_hash):
            raise UserError(
                f"--out must be a new folder or one of the same model, but {out} holds the study "
                f"of {owner.model_file}: give another folder"
            )
        return out
    name = study_name(model_file)
    for number in itertools.count(1):
        folder = studies / (name if number == 1 else f"{name}-{number}")
        owner = owner_of(folder)
        if owner is None or owner.is_model(model_file, model_hash):
            return folder
    raise AssertionError("unreachable: itertools.count has no end")


@contextmanager
def locked(folder: Path, owner: FolderOwner) -> Iterator[None]:
    """Create the folder, take its lock and write down whose it is.

    Raises:
        UserError: it cannot be written, or another search is writing to it.
    """
    new = [place for place in (folder, folder.parent) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115  held throughout
    except OSError as error:
        raise _not_writable(folder, error) from error
    with file:
        _take(file, folder)
        content = json.dumps({**asdict(owner), "process": os.getpid()}).encode()
        try:
            # Unbuffered: what a full disk refuses would be tried again when the file closes.
            os.ftruncate(file.fileno(), 0)
            if os.write(file.fileno(), content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            remove_folders(folder, new)
            raise _not_writable(folder, error) from error
        yield


def _not_writable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"the output folder must be writable, but {folder} gave: {error.strerror}; "
        "give another with --out"
    )


def remove_folders(folder: Path, new: Sequence[Path]) -> None:
    """Remove the output folder, and its parent where that is then empty, if this search made them.

    Call it with the folder's lock held.
    """
    if folder in new:
        shutil.rmtree(folder, ignore_errors=True)
    if folder.parent in new:
        with suppress(OSError):  # another search has begun beside this one
            folder.parent.rmdir()


def owner_of(folder: Path) -> FolderOwner | None:
    """Whose folder it is; None where no search has written to it."""
    try:
        data = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
        return FolderOwner(
            model_file=data["model_file"], model_hash=data["model_hash"], storage=data["storage"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sqlite_url(folder: Path) -> str:
    """URL of the study that lies in the folder itself."""
    return f"sqlite:///{folder.resolve() / 'study.db'}"


def locate(folder_or_storage: Path | str) -> tuple[str, str | None]:
    """The storage URL of a folder or of itself, and the folder where several share that storage.

    Raises:
        UserError: no such folder, or no study in it.
    """
    text = str(folder_or_storage)
    if "://" in text:
        return text, None
    folder = Path(folder_or_storage)
    if folder.is_file():
        folder = folder.parent
    if (folder / "study.db").is_file():
        return sqlite_url(folder), None
    owner = owner_of(folder)
    if owner is None or owner.storage is None:
        raise UserError(
            f"a search writes its study into its output folder, but {folder} "
            f"{'has none' if folder.is_dir() else 'does not exist'}"
        )
    return owner.storage, str(folder.resolve())


def _take(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        try:
            process = json.load(file)["process"]
        except (ValueError, KeyError):
            process = "unknown"
        raise UserError(
            f"one search at a time may write to {folder}, but process {process} is doing so: "
            "wait for it, or give another folder with --out"
        ) from error
