"""Writing that survives a power cut: to a temporary file, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from fedloom.errors import UserError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the operating system refuses into one clear line."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        hint = "make room and go on with --resume" if full else "choose another folder with --out"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {hint}") from error


def write(path: Path, data: bytes) -> str:
    """Writes a file whole or not at all; returns its SHA-256."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)
    return hashlib.sha256(data).hexdigest()


def sync_folder(path: Path) -> None:
    """Makes names in a folder durable (where the system can)."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:  # not on Windows
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def swap(temporary: Path, path: Path) -> None:
    """Puts a folder in the place of another."""
    with writing(path):
        sync_folder(temporary)
        remove(path)
        os.replace(temporary, path)
        sync_folder(path.parent)


def fresh(path: Path) -> Path:
    """A new, empty folder."""
    with writing(path):
        remove(path)
        path.mkdir(parents=True)
    return path


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def file_name(client: str) -> str:
    """A client's id as a file name: percent-encoded, so that any id is safe on any system.

    Example:
        >>> file_name("Zürich/7"), file_name("..")
        ('Z%C3%BCrich%2F7', '%2E%2E')
    """
    name = quote(client, safe="")
    return name if name.strip(".") else name.replace(".", "%2E")


class Lock:
    """One run per folder; the operating system releases it when the process dies."""

    def __init__(self, folder: Path) -> None:
        self._number: int | None = None
        try:
            import fcntl
        except ImportError:  # not on Windows: a run there is on its own
            return
        with writing(folder):
            number = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(number)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(f"another run is using {folder}; wait for it or choose another folder") from None
            return  # a file system without locks
        self._number = number

    def release(self) -> None:
        """Gives the folder back."""
        if self._number is not None:
            os.close(self._number)
            self._number = None
