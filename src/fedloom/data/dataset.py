"""A data set that has not been dealt to clients yet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data import recordings
from fedloom.data.client_data import ClientData, Scale, class_labels, is_class, take_or_none, to_float
from fedloom.data.federation import Federation
from fedloom.data.partition import Affine, Labels, Natural, Partitioner, iid
from fedloom.data.preprocess import Preprocess
from fedloom.data.rows import Rows, concatenate, map_inputs
from fedloom.data.split import SPLITS, check_share, matched, three_way
from fedloom.errors import UserError
from fedloom.rng import stream

_DEFAULT_CLIENTS = 10


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Rows, the official test rows if there are any, and the natural clients if there are any.

    Args:
        name: The name it is loaded by.
        train: Training rows, or all rows where there is no official test set.
        test: Official test rows.
        classes: Class names, by label.
        scale: How uint8 inputs are scaled in the step.
        groups: Names of the natural clients.
        train_groups: For each training row its natural client, as a position in `groups`.
        test_groups: The same for the test rows.
        options: Options of `load` that differ from their defaults; part of the federation's origin.
        preprocess: What to do with the columns of x once the rows are dealt.
        columns: Names of the columns of x.
        sequences: For data made of recordings, the sequence that each training row is a frame of, rows in order of
            time. Neighbouring frames are near-copies and are then never parted at random.
        test_sequences: The same for the test rows.
    """

    name: str
    train: Rows
    test: Rows | None = None
    classes: tuple[str, ...] | None = None
    scale: Scale | None = None
    groups: tuple[str, ...] = ()
    train_groups: Labels | None = None
    test_groups: Labels | None = None
    options: dict[str, Any] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    columns: tuple[str, ...] | None = None
    sequences: Labels | None = None
    test_sequences: Labels | None = None

    def __len__(self) -> int:
        return len(self.train) + (0 if self.test is None else len(self.test))

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, train={self.train!r}, test={self.test!r})"

    def partition(
        self,
        partitioner: Partitioner | None = None,
        clients: int | None = None,
        *,
        seed: int = 0,
        split: str | None = None,
        test: float = 0.25,
        val: float = 0.0,
        preprocess: Preprocess | Mapping[str, Any] | None = None,
        part_frames: bool = False,
    ) -> Federation:
        """Deal the rows to clients.

        Args:
            partitioner: Who gets which rows; without, `natural()` where the data have clients of their own,
                else `iid()`.
            clients: How many; without, all natural clients or 10.
            seed: Seed of the partition and of the splits.
            split: "matched": official test rows are dealt with each client's training proportions (default
                where there is an official test set). "per_client": all rows are pooled and dealt, then cut
                at each client, stratified where a class has two rows (default otherwise). "shared": everyone
                has the whole official test set.
            test: Share of a client's rows that "per_client" cuts off for testing.
            val: Share of a client's remaining training rows that is cut off for validation.
            preprocess: What to do with the columns of x, instead of the data set's own; see `Preprocess`.
            part_frames: Of recordings: deal and cut single frames at random all the same, with a warning. Without, rules
                that would part neighbouring frames are refused, and whole sequences are held out for testing.

        Example:
            >>> from fedloom.data import dirichlet, load
            >>> data = load("digits").partition(dirichlet(0.3), clients=20, seed=0)
            >>> len(data), sum(len(c.train) + len(c.test) for c in data)
            (20, 1797)
        """
        if partitioner is None:
            partitioner = Natural() if self.groups else iid()
        split, by_group = self._check(partitioner, split, test, val)
        film = self.sequences is not None and not part_frames
        if self.sequences is not None:
            recordings.check_neighbours(self.name, partitioner, part_frames)
        pool, groups, sequences = self._pool(split)
        if clients is None:
            clients = len(np.unique(groups)) if by_group else _DEFAULT_CLIENTS
        base = partitioner.base if isinstance(partitioner, Affine) else partitioner
        if base.by_class and not is_class(pool.y):
            raise UserError(
                f"{partitioner} deals by class, but these labels are no classes. Use iid, quantity or natural."
            )
        labels = class_labels(pool.y)
        parts = partitioner(groups if by_group else labels, clients, stream(seed, "partition"))
        owners = [int(groups[part[0]]) for part in parts]
        ids = _ids([self.groups[owner] for owner in owners]) if by_group else [str(k) for k in range(len(parts))]
        tests = self._tests(split, [labels[part] for part in parts], owners, by_group, seed, film)
        made = []
        for name, part, held_out in zip(ids, parts, tests, strict=True):
            share = test if split == "per_client" else 0.0
            cutting = stream(seed, "split", name)
            if film:
                train, off, checked = recordings.three_way(sequences[part], share, val, cutting)
            else:
                train, off, checked = three_way(labels[part], share, val, cutting)
            held_out = take_or_none(pool, part[off]) if split == "per_client" else held_out
            client = ClientData(
                name, pool.take(torch.from_numpy(part[train])), held_out, take_or_none(pool, part[checked])
            )
            made.append(_skew(client, partitioner, self.scale, seed) if isinstance(partitioner, Affine) else client)
        origin = {"name": self.name, "partition": str(partitioner), "clients": clients, "seed": seed}
        origin |= {"split": split, "test": test, "val": val, "options": self.options}
        origin |= {"part_frames": True} if part_frames else {}
        scale = None if isinstance(partitioner, Affine) else self.scale
        federation = Federation(tuple(made), None, self.name, self.classes, scale, origin)
        spec = self.preprocess if preprocess is None else Preprocess.of(preprocess)
        return federation if spec is None else federation.preprocess(spec, columns=self.columns)

    def _check(self, rule: Partitioner, split: str | None, test: float, val: float) -> tuple[str, bool]:
        """The split to use, and whether clients are the natural ones."""
        if not isinstance(rule, Partitioner):
            raise UserError(f"partition: got {rule!r}; expected a rule such as fl.dirichlet(0.3) or fl.iid().")
        by_group = isinstance(rule.base if isinstance(rule, Affine) else rule, (Natural, recordings.Chunks))
        if by_group and not self.groups:
            raise UserError(f"data set {self.name!r} has no natural clients. Use fl.iid() or fl.dirichlet(0.3).")
        if split is None:
            split = "per_client" if self.test is None else "matched"
        if split not in SPLITS:
            raise UserError(f"split = {split!r}; expected one of {', '.join(SPLITS)}.")
        if split != "per_client" and self.test is None:
            raise UserError(f"split = {split!r}: {self.name!r} has no official test set. Use 'per_client'.")
        check_share("test", test)
        check_share("val", val)
        return split, by_group

    def _pool(self, split: str) -> tuple[Rows, Labels, Labels]:
        """The rows to deal, and the natural client and the sequence of each (0 where there are none)."""
        pool, groups, sequences = self.train, [self.train_groups], [self.sequences]
        if split == "per_client" and self.test is not None:
            pool = concatenate([self.train, self.test])
            groups.append(self.test_groups)
            sequences.append(self.test_sequences)

        def joined(parts: list[Labels | None]) -> Labels:
            known = [part for part in parts if part is not None]
            return np.concatenate(known) if known else np.zeros(len(pool), np.int64)

        return pool, joined(groups), joined(sequences)

    def _tests(
        self, split: str, train: list[Labels], groups: list[int], by_group: bool, seed: int, film: bool
    ) -> list[Rows | None]:
        """Each client's share of the official test rows."""
        if split == "per_client" or self.test is None:
            return [None] * len(train)
        if split == "shared":
            return [self.test] * len(train)
        if film and self.test_groups is not None:
            dealt = recordings.deal_tests(self.test_groups, groups, [len(labels) for labels in train])
            return [take_or_none(self.test, index) for index in dealt]
        if by_group and self.test_groups is not None:
            return [take_or_none(self.test, np.flatnonzero(self.test_groups == group)) for group in groups]
        dealt = matched(train, class_labels(self.test.y), stream(seed, "split"))
        return [take_or_none(self.test, index) for index in dealt]


def _ids(names: list[str]) -> list[str]:
    """Names of clients, numbered where several bear the same one."""
    many = {name for name in names if names.count(name) > 1}
    return [f"{name}-{names[:k].count(name) + 1}" if name in many else name for k, name in enumerate(names)]


def _skew(client: ClientData, rule: Affine, scale: Scale | None, seed: int) -> ClientData:
    """The client's rows through its own affine map: one gain and offset per channel (axis 1)."""

    def change(rows: Rows) -> Rows:
        position = itertools.count()

        def skew(part: Tensor) -> Tensor:
            part = to_float(part, scale)
            if not part.is_floating_point():
                raise UserError(f"{rule}: inputs are whole numbers; expected floating or uint8 inputs.")
            channels = part.shape[1] if part.dim() > 1 else 1
            shape = (1, channels, *[1] * (part.dim() - 2))[-part.dim() :]
            drawn = rule.draw(channels, stream(seed, "partition", client.id, next(position)))
            gain, offset = (torch.from_numpy(value).to(part).reshape(shape) for value in drawn)
            return part * gain + offset

        return Rows(map_inputs(skew, rows.x), rows.y)

    return ClientData(client.id, **{name: change(rows) for name, rows in client.parts().items()})
