"""Frames of recordings: neighbours are near-copies, so they are never parted at random."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.data.partition import PARTITIONS, Affine, Generator, Index, Labels, Natural, Partitioner, largest_remainder
from fedloom.errors import UserError


@dataclass(frozen=True, slots=True)
class Chunks(Partitioner):
    """See `chunks`."""

    name = "chunks"

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[Index]:
        names, counts = np.unique(labels, return_counts=True)
        if clients < len(names):
            raise UserError(
                f"chunks(): {clients} clients, but there are {len(names)} recordings and a chunk lies in one. "
                f"Ask for at least {len(names)}, or use natural()."
            )
        pieces = _pieces(counts, clients)
        parts: list[Index] = []
        for name, share in zip(names, pieces, strict=True):
            parts += np.array_split(np.flatnonzero(labels == name), share)
        return parts


def chunks() -> Chunks:
    """Each recording cut into contiguous chunks, a client each; longer recordings into more of them.

    Example:
        >>> recordings = np.array([0] * 6 + [1] * 3)
        >>> [part.tolist() for part in chunks()(recordings, 3, np.random.default_rng(0))]
        [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    """
    return Chunks()


def _pieces(counts: Index, clients: int) -> Index:
    """Chunks of each recording: one each, then one by one to the recording whose chunks are longest (d'Hondt)."""
    pieces = np.ones(len(counts), np.int64)
    for _ in range(clients - len(counts)):
        longest = int(np.argmax(counts / pieces))
        if counts[longest] < pieces[longest] + 1:
            raise UserError(f"chunks(): {clients} clients for {counts.sum()} frames; expected a frame for each.")
        pieces[longest] += 1
    return pieces


def keeps_neighbours(rule: Partitioner) -> bool:
    """Whether a rule leaves neighbouring frames together."""
    return isinstance(rule.base if isinstance(rule, Affine) else rule, (Natural, Chunks))


def check_neighbours(name: str, rule: Partitioner, forced: bool) -> None:
    """Refuses rules that part neighbouring frames; warns where that is asked for in so many words."""
    if keeps_neighbours(rule) and not forced:
        return
    reason = (
        f"{name!r} holds frames of recordings, and neighbouring frames are near-copies: dealt at random, "
        "copies of a client's training frames are among everybody's test frames"
    )
    if not forced:
        raise UserError(
            f"partition: {rule}: {reason}. Use fl.natural() (a client per recording or town) or fl.chunks() (contiguous "
            "pieces of them); part_frames=True deals them at random all the same."
        )
    warnings.warn(f"{reason}; test scores will be too good. This was asked for by part_frames=True.", stacklevel=4)


def hold_out(sequences: Labels, share: float, generator: Generator) -> tuple[Index, Index]:
    """Positions kept and positions cut off: whole sequences, drawn, up to about ``share`` of the frames.

    Where whole sequences do not come near the share (a client with one long recording), the end of one is cut off.

    Args:
        sequences: The sequence of each frame, frames in order of time.
        share: Share to cut off, in [0, 1).
        generator: Source of the choice of sequences.
    """
    n = len(sequences)
    if share == 0 or n < 2:
        return np.arange(n), np.empty(0, np.int64)
    wanted = min(max(int(np.floor(share * n + 0.5)), 1), n - 1)
    names, first = np.unique(sequences, return_index=True)
    whole = [np.flatnonzero(sequences == names[i]) for i in generator.permutation(np.argsort(first))]
    off: list[Index] = []
    kept: list[Index] = []
    left = wanted
    for frames in whole:
        # Taken where that comes nearer to the share; the last sequence that is left is never taken.
        nearer = abs(left - len(frames)) < left and len(off) < len(whole) - 1
        (off if nearer else kept).append(frames)
        left -= len(frames) if nearer else 0
    longest = max(kept, key=len)
    if 2 * left > wanted and len(longest) > left:
        off.append(longest[len(longest) - left :])
    cut = np.sort(np.concatenate(off))
    return np.setdiff1d(np.arange(n), cut), cut


def three_way(sequences: Labels, test: float, val: float, generator: Generator) -> tuple[Index, Index, Index]:
    """Positions for training, test and validation: as `splits.three_way`, but neighbours stay together."""
    train, tested = hold_out(sequences, test, generator)
    kept, off = hold_out(sequences[train], val, generator)
    return train[kept], tested, train[off]


def deal_tests(tests: Labels, owners: Sequence[int], sizes: Sequence[int]) -> list[Index]:
    """Official test frames for clients, each frame to one client, neighbours together.

    Frames of a recording go to the clients that train on it; frames of recordings that nobody trains on are dealt to all.
    Either way they are cut into contiguous pieces in proportion to the clients' training frames.

    Args:
        tests: The recording of each test frame.
        owners: The recording of each client.
        sizes: Training frames of each client.

    Example:
        >>> [piece.tolist() for piece in deal_tests(np.array([0, 0, 7, 7, 7, 7]), [0, 1], [5, 5])]
        [[0, 1, 2, 3], [4, 5]]
    """
    dealt: list[list[Index]] = [[np.empty(0, np.int64)] for _ in owners]
    holders = {int(r): [k for k, owner in enumerate(owners) if owner == r] for r in np.unique(tests)}
    pools = [(np.flatnonzero(tests == r), who) for r, who in holders.items() if who]
    strange = np.flatnonzero([not holders[int(r)] for r in tests])
    pools.append((strange, list(range(len(owners)))))
    fixed = np.random.default_rng(0)
    for frames, who in pools:
        taken = largest_remainder(len(frames), np.array([sizes[k] for k in who], np.float64), fixed)
        for k, piece in zip(who, np.split(frames, np.cumsum(taken)[:-1]), strict=True):
            dealt[k].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in dealt]


PARTITIONS["chunks"] = chunks
