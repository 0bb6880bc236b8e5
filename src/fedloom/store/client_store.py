"""What clients keep: in memory as far as it fits, beyond that on disk, so that a population may be of any size.

Nothing that is on disk is ever changed: new states go to new segments, old segments are removed when no checkpoint needs them.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedloom.clients.states import ClientState
from fedloom.store import atomic
from fedloom.store.segments import Segment, content

LIMIT = 1 << 29
"""Bytes of states that are held in memory."""
SEGMENT = 1 << 26
"""Bytes of states that share a file."""
SMALL = 64
"""Files that are not nearly full, from which on some are joined."""
_OVERHEAD = 1000  # bytes of a tensor besides its numbers


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a state lies on disk."""

    file: str
    group: int
    row: int


@dataclass(frozen=True, slots=True)
class _Before:
    """What was known of a client at the last mark; no rounds: nothing."""

    state: ClientState | None
    spot: Spot | None
    rounds: int | None


class ClientStore(MutableMapping[str, ClientState]):
    """What each client keeps, by id.

    Args:
        folder: where segments go; a temporary folder without.
        device: where tensors are put that come back from disk.
        limit: bytes of states in memory.
    """

    def __init__(
        self, folder: Path | None = None, device: torch.device | str = "cpu", *, limit: int | None = None
    ) -> None:
        self._folder, self._own = folder, folder is None
        self.device, self.limit = torch.device(device), LIMIT if limit is None else limit
        self._cache: OrderedDict[str, tuple[ClientState, int]] = OrderedDict()
        self._held = 0
        self._dirty: dict[str, None] = {}
        self._spots: dict[str, Spot] = {}
        self._rounds: dict[str, int] = {}
        self._logs: dict[str, dict[str, _Before]] = {}
        self._segments: dict[str, Segment] = {}
        self._live: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self.gone: set[str] = set()
        self._number = 0

    # A mapping.

    def __getitem__(self, name: str) -> ClientState:
        entry = self._cache.get(name)
        if entry is not None:
            self._cache.move_to_end(name)
            return entry[0]
        spot = self._spots[name]
        state = self._segments[spot.file].read(spot.group, spot.row, self._rounds[name], self.device)
        self._keep(name, state)
        return state

    def __setitem__(self, name: str, state: ClientState) -> None:
        self._note(name)
        self._drop(name)
        self._leave(name)
        self._rounds[name] = state.rounds
        self._dirty[name] = None
        self.gone.discard(name)
        self._keep(name, state)

    def __delitem__(self, name: str) -> None:
        self._note(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self._rounds[name]
        self._drop(name)
        self._leave(name)
        self._dirty.pop(name, None)
        self.gone.add(name)  # a file may still speak of it

    def __iter__(self) -> Iterator[str]:
        return iter(self._rounds)

    def __len__(self) -> int:
        return len(self._rounds)

    def __contains__(self, name: object) -> bool:
        return name in self._rounds

    def rounds(self, name: str) -> int:
        """How often a client has taken part, without reading its state."""
        return self._rounds.get(name, 0)

    def take(self, clients: Mapping[str, ClientState]) -> None:
        """Makes the store hold these states and no others."""
        for name in [n for n in self._rounds if n not in clients]:
            del self[name]
        for name, state in clients.items():
            entry = self._cache.get(name)
            if entry is None or entry[0] is not state:
                self[name] = state

    # Going back.

    def mark(self, what: str = "round") -> None:
        """From here on :meth:`back` returns to the states of now; marks of several names stand side by side."""
        self._logs[what] = {}
        if self._own and self._segments:
            self._join()
            self._remove({f for f in self._segments if not self._live[f]})

    def back(self, what: str = "round") -> None:
        """The states at the last mark."""
        for name, state in self.since(what).items():
            if state is not None:
                self[name] = state  # written anew: files tell by their order which state is the newest
            elif name in self._rounds:
                del self[name]
        self._logs[what] = {}

    def since(self, what: str) -> dict[str, ClientState | None]:
        """What the clients that changed since a mark kept then; None for nothing."""
        found: dict[str, ClientState | None] = {}
        for name, old in self._logs.get(what, {}).items():
            found[name] = old.state
            if old.rounds is not None and old.state is None:
                assert old.spot is not None
                spot = old.spot
                found[name] = self._segments[spot.file].read(spot.group, spot.row, old.rounds, self.device)
        return found

    def remember(self, what: str, states: Mapping[str, ClientState | None]) -> None:
        """Sets a mark at which some clients kept something else than now."""
        self._logs[what] = {n: _Before(s, None, None if s is None else s.rounds) for n, s in states.items()}

    def _note(self, name: str) -> None:
        for log in self._logs.values():
            if name not in log:
                spot = self._spots.get(name)
                state = self._cache.get(name, (None, 0))[0] if spot is None else None
                log[name] = _Before(state, spot, self._rounds.get(name))

    # Memory.

    def _keep(self, name: str, state: ClientState) -> None:
        size = _size(state)
        self._cache[name] = (state, size)
        self._held += size
        if self._held > self.limit:
            self._shrink()

    def _drop(self, name: str) -> None:
        _, size = self._cache.pop(name, (None, 0))
        self._held -= size

    def _shrink(self) -> None:
        """Halves what is in memory: the states that were not used for longest go to disk."""
        oldest, left = [], self._held
        for name, (_, size) in self._cache.items():
            if left <= self.limit // 2:
                break
            oldest.append(name)
            left -= size
        self._write([n for n in oldest if n in self._dirty])
        for name in oldest:
            self._drop(name)

    # Disk.

    def place(self) -> Path:
        """The folder of the segments."""
        if self._folder is None:
            made = tempfile.TemporaryDirectory(prefix="fedloom-")
            self._folder = Path(made.name)
            weakref.finalize(self, made.cleanup)
        elif not self._segments:
            with atomic.writing(self._folder):
                self._folder.mkdir(exist_ok=True)
        return self._folder

    def flush(self) -> dict[str, str]:
        """Writes what is not on disk yet; returns the files that hold all states, oldest first, and their digests."""
        self._join()
        self._write(list(self._dirty))
        return {file: self.digests[file] for file in self._segments if self._live[file]}

    def _write(self, names: list[str]) -> None:
        """Writes the states of clients that are in memory."""
        some: dict[str, ClientState] = {}
        size = 0
        for i, name in enumerate(names):
            state, bytes_ = self._cache[name]
            some[name] = state
            size += bytes_
            if size >= SEGMENT or i == len(names) - 1:
                self._write_file(some)
                some, size = {}, 0

    def _write_file(self, states: dict[str, ClientState]) -> None:
        self._number += 1
        file, data = f"clients-{self._number:06d}.safetensors", content(states, self.device)
        self.digests[file] = atomic.write(self.place() / file, data)
        self._add(file, len(data))
        for name in states:
            del self._dirty[name]

    def _add(self, file: str, size: int) -> None:
        """Takes a file in; what it says of a client is newer than what files before it say."""
        segment = Segment(self.place() / file)
        members = segment.members()
        self._segments[file], self._sizes[file], self._bytes[file] = segment, len(members), size
        for name, (group, row, rounds) in members.items():
            self._leave(name)
            self._put(name, Spot(file, group, row))
            self._rounds[name] = rounds

    def _put(self, name: str, spot: Spot) -> None:
        self._spots[name] = spot
        self._live[spot.file] += 1

    def _leave(self, name: str) -> None:
        spot = self._spots.pop(name, None)
        if spot is not None:
            self._live[spot.file] -= 1

    def _join(self) -> None:
        """Writes anew what is in files that are mostly out of date, or small and many; little at a time."""
        left = {f: self._bytes[f] * self._live[f] // max(1, n) for f, n in self._sizes.items() if self._live[f]}
        chosen = {f for f in left if self._live[f] < self._sizes[f] / 2}
        small = sorted((f for f, size in left.items() if size < SEGMENT // 2), key=lambda f: left[f])
        if len(small) > SMALL:
            chosen |= set(small[: SMALL // 2])
        budget = self.limit // 2
        for file in sorted(chosen, key=lambda f: left[f]):
            budget -= left[file]
            if budget < 0:
                return
            for name, (group, row, _) in self._segments[file].members().items():
                if self._spots.get(name) != Spot(file, group, row):
                    continue
                state = self[name]
                self._leave(name)
                self._dirty[name] = None
                if name not in self._cache:  # another one took its place in memory meanwhile
                    self._keep(name, state)

    def open(self, files: Mapping[str, str], gone: Iterable[str] = ()) -> None:
        """Goes on with the files of a checkpoint, which were checked.

        Args:
            files: digests of the files, oldest first.
            gone: clients of which nothing is kept, whatever files say.
        """
        for file, digest in files.items():
            self.digests[file] = digest
            self._add(file, (self.place() / file).stat().st_size)
            self._number = max(self._number, int(file[len("clients-") :].split(".")[0]))
        for name in gone:
            if name in self._rounds:
                self._forget(name)
            self.gone.add(name)

    def clean(self, needed: Iterable[str]) -> None:
        """Removes files that hold no state of now and that no checkpoint needs."""
        kept = set(needed)
        self._remove({f for f in self._segments if not self._live[f] and f not in kept})
        for path in self.place().glob("clients-*.safetensors"):
            if path.name not in self._segments and path.name not in kept:
                atomic.remove(path)

    def _remove(self, files: set[str]) -> None:
        held = {b.spot.file for log in self._logs.values() for b in log.values() if b.spot is not None}
        for file in files - held:
            del self._segments[file]
            for facts in (self._sizes, self._bytes, self.digests, self._live):
                facts.pop(file, None)
            atomic.remove(self.place() / file)


def _size(state: ClientState) -> int:
    """Bytes that a state takes in memory, about."""
    tensors = [*state.leaves.values()]
    for kept in state.memory.values():
        tensors += kept.values()
    if state.optimizer:
        tensors += _tensors(state.optimizer)
    return _OVERHEAD * (1 + len(tensors)) + sum([v.nbytes for v in tensors])


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [t for f in getattr(value, "__dataclass_fields__", ()) for t in _tensors(getattr(value, f))]
