"""Where the files of data sets are, and how they get there."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import UserError

VARIABLE = "FEDLOOM_DATA"
# What reading a damaged file or archive may raise.
DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,
    TypeError,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)
_CHUNK = 1 << 18
_TIMEOUT = 30


@dataclass(frozen=True)
class Remote:
    """A file of the original distribution: its name, where to get it, and its MD5 sum as published ("" if none is)."""

    name: str
    urls: tuple[str, ...]
    md5: str = ""


@dataclass(frozen=True)
class Official:
    """The original distribution of a data set.

    Args:
        name: The data set.
        folders: Folders below the data folder that may hold its files; the first one receives downloads.
        remotes: Files or archives to download.
        archives: Further names of archives that hold the files.
        sums: SHA-256 sums of unpacked files, for archives that have no published sum.
    """

    name: str
    folders: tuple[str, ...]
    remotes: tuple[Remote, ...]
    archives: tuple[str, ...] = ()
    sums: tuple[tuple[str, str], ...] = ()


def data_folders(data_dir: str | Path | None = None) -> list[Path]:
    """The folders to look in: the one given, else `FEDLOOM_DATA` if set, and the user's cache."""
    if data_dir is not None:
        return [Path(data_dir)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"
    named = os.environ.get(VARIABLE)
    return [Path(named), cache] if named else [cache]


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The first data folder's file of this name, if there is one."""
    return next((folder / name for folder in data_folders(data_dir) if (folder / name).is_file()), None)


def load_npz(dataset: str, name: str, data_dir: str | Path | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file in a data folder."""
    path = find(name, data_dir)
    if path is None:
        where = " or ".join(str(folder) for folder in data_folders(data_dir))
        raise UserError(
            f"data set {dataset!r}: {name} is not in {where}. Put the file there, or set {VARIABLE} to the "
            "folder "
            "that holds it."
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except DAMAGED as error:
        raise UserError(f"data set {dataset!r}: cannot read {path}: {error}. Is the file complete?") from None


def read_official(
    source: Official, wanted: Sequence[str], data_dir: str | Path | None = None, download: bool = True
) -> dict[str, bytes]:
    """The contents of files of the original distribution, unpacked, downloaded if they are nowhere.

    Args:
        source: The distribution.
        wanted: Names of the files, without `.gz`.
        data_dir: Where to look; see `data_folders`.
        download: Whether to download what is missing.
    """
    found = _look(source, wanted, data_folders(data_dir))
    if found is not None:
        return _checked(source, found)
    places = [folder / source.folders[0] for folder in data_folders(data_dir)]
    files = ", ".join(remote.name for remote in source.remotes)
    hint = f"Get {files} from {source.remotes[0].urls[0].rsplit('/', 1)[0]}/ and put into {places[0]}"
    hint += "." if data_dir is not None or VARIABLE in os.environ else f", or set {VARIABLE}."
    if not download:
        raise UserError(f"data set {source.name!r} is not in {' or '.join(map(str, places))}. {hint}")
    folder = next((place for place in places if _writable(place)), None)
    if folder is None:
        raise UserError(f"data set {source.name!r}: cannot write into {' or '.join(map(str, places))}. {hint}")
    for remote in source.remotes:
        if not (folder / remote.name).is_file():
            _download(source.name, remote, folder, hint)
    found = _look(source, wanted, data_folders(data_dir))
    if found is None:
        raise UserError(
            f"data set {source.name!r}: {folder} does not hold {', '.join(wanted)}. Delete it and try again."
        )
    return _checked(source, found)


def _checked(source: Official, found: dict[str, bytes]) -> dict[str, bytes]:
    """The files themselves, if their sums are right."""
    for name, expected in source.sums:
        digest = hashlib.sha256(found[name]).hexdigest() if name in found else expected
        if digest != expected:
            raise UserError(
                f"data set {source.name!r}: {name} has the SHA-256 sum {digest}, expected {expected}. "
                "Delete it and try again."
            )
    return found


def _writable(folder: Path) -> bool:
    """Whether files can be put into this folder, which need not exist yet and is not made here."""
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), None)
    return nearest is not None and nearest.is_dir() and os.access(nearest, os.W_OK)


def _look(source: Official, wanted: Sequence[str], folders: Iterable[Path]) -> dict[str, bytes] | None:
    archives = (*source.archives, *(remote.name for remote in source.remotes))
    for top in folders:
        for place in (top / inner for inner in source.folders):
            try:
                loose = {name: _loose(place, name) for name in wanted}
                if all(content is not None for content in loose.values()):
                    return {name: content for name, content in loose.items() if content is not None}
                for path in (folder / name for name in archives for folder in (place, top)):
                    packed = _unpack(path, wanted) if path.is_file() and path.suffix != "" else {}
                    if len(packed) == len(set(wanted)):
                        return packed
            except DAMAGED as error:
                raise UserError(
                    f"data set {source.name!r}: cannot read the files in {place}: {error}. Delete them and try again."
                ) from None
    return None


def _loose(folder: Path, name: str) -> bytes | None:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.is_file():
        return plain.read_bytes()
    return gzip.decompress(packed.read_bytes()) if packed.is_file() else None


def _unpack(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """The wanted members of an archive, by file name; nothing is written, so member paths do not matter."""
    found: dict[str, bytes] = {}

    def take(member: str, content: bytes) -> None:
        name = PurePosixPath(member).name
        stem = name.removesuffix(".gz")
        if stem in wanted:
            found[stem] = gzip.decompress(content) if name.endswith(".gz") else content

    def needed(member: str) -> bool:
        return PurePosixPath(member).name.removesuffix(".gz") in wanted

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                if needed(entry):
                    take(entry, archive.read(entry))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as packed:
            for item in packed:
                file = packed.extractfile(item) if item.isfile() and needed(item.name) else None
                if file is not None:
                    take(item.name, file.read())
    return found


def _download(dataset: str, remote: Remote, folder: Path, hint: str) -> None:
    """Download with a progress bar into a temporary file, check the sum, then rename."""
    problems = []
    partial = folder / f"{remote.name}.part"
    for url in remote.urls:
        try:
            digest = _fetch(url, partial, remote.name)
        except (OSError, urllib.error.URLError) as error:
            problems.append(f"{url}: {getattr(error, 'reason', error)}")
            continue
        if remote.md5 and digest != remote.md5:
            partial.unlink()
            problems.append(f"{url}: MD5 sum {digest}, expected {remote.md5}")
            continue
        partial.replace(folder / remote.name)
        return
    partial.unlink(missing_ok=True)
    raise UserError(f"data set {dataset!r} could not be downloaded ({'; '.join(problems)}). {hint}")


def _fetch(url: str, target: Path, name: str) -> str:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    digest = hashlib.md5(usedforsecurity=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:
        # Only now: without a network nothing is left behind.
        target.parent.mkdir(parents=True, exist_ok=True)
        length = reply.headers.get("Content-Length")
        with target.open("wb") as file, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(name, total=int(length) if length else None)
            while chunk := reply.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                progress.advance(task, len(chunk))
    return digest.hexdigest()
