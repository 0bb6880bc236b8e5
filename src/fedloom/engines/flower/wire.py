"""What travels: letters to sites and their answers, as Flower records.

A message holds two records: ``tensors``, an array record whose keys are numbers, and ``outline``, a JSON text that says which
number is which tensor. Names may therefore hold any character, a tensor that several programs need travels once, and nothing is
unpickled: an array is read as a plain ``.npy`` of numbers, whose header is checked against its length first.
"""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from fedloom.types import Leaves, Memory, Message
from fedloom.work import Post

TENSORS, OUTLINE = "tensors", "outline"
VERSION = 1
_KINDS = frozenset("biuf")


class Malformed(ValueError):
    """A message that is not what fedloom sends."""


@dataclass(frozen=True, slots=True)
class Job:
    """One program for one site.

    Args:
        run: which of the methods that share a message.
        stage: round after which the bound method took over; 0 for the first.
        program: name of the program.
        post: what the server sends to everybody; its leaves are those that travel.
        addressed: what it sends to this site alone.
        key: the static key of this site.
        share: share of its steps that the site makes.
        base: round whose state the site starts from, the last that the server accepted; None for a fresh one.
    """

    run: str
    stage: int
    program: str
    post: Post
    addressed: Memory = field(default_factory=dict)
    key: Hashable = None
    share: float = 1.0
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """All that a site is asked to do at once; without jobs, to say who it is.

    Args:
        experiment: the key of the site's folder.
        plan: the experiment as text, from which a site makes model and methods; empty where it has them already.
        jobs: the programs, in order.
    """

    experiment: str
    plan: str = ""
    jobs: tuple[Job, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one program gave.

    Args:
        code: 0, or why there is nothing (:mod:`fedloom.engines.flower.codes`).
        message: the upload.
        steps: optimiser steps made, by phase.
        loss: mean of the objective, or None.
        judged: by name of the judgement the sums, and the kept rows where the site shares them.
    """

    code: int = 0
    message: Message = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    loss: float | None = None
    judged: Mapping[str, tuple[Leaves, Leaves]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Package:
    """A site's whole reply.

    Args:
        site: its name.
        facts: numbers of rows, version, fingerprints of models.
        answers: one per job.
        code: 0, or why there are no answers.
    """

    site: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    code: int = 0


# Tensors --------------------------------------------------------------------------------------------------


class Sack:
    """Tensors on their way; each is packed once, however often it is mentioned."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self._known: dict[int, tuple[str, Tensor]] = {}

    def add(self, tensor: Tensor) -> str:
        """The number of a tensor."""
        if id(tensor) not in self._known:
            number = str(len(self.arrays))
            self.arrays[number] = Array(tensor.detach().cpu().contiguous().numpy())
            self._known[id(tensor)] = (number, tensor)  # the reference keeps the id from being used again
        return self._known[id(tensor)][0]

    def leaves(self, values: Leaves) -> dict[str, str]:
        """Numbers by name."""
        return {name: self.add(value) for name, value in values.items()}

    def memory(self, values: Mapping[str, Leaves]) -> dict[str, dict[str, str]]:
        """Numbers by owner and name."""
        return {owner: self.leaves(kept) for owner, kept in values.items()}


def decode(array: Array) -> Tensor:
    """A tensor from a Flower array, or an error; the header is believed only where it fits the bytes."""
    if not isinstance(array, Array) or array.stype != "numpy.ndarray":
        raise Malformed("an array of another kind")
    stream = io.BytesIO(array.data)
    try:
        if npy.read_magic(stream) != (1, 0):
            raise Malformed("an array of another version")
        shape, fortran, dtype = npy.read_array_header_1_0(stream)
    except ValueError as error:
        raise Malformed("an array without a header") from error
    content = array.data[stream.tell() :]
    count = 1
    for side in shape:
        count *= side
    if dtype.kind not in _KINDS or fortran or min(shape, default=0) < 0 or count * dtype.itemsize != len(content):
        raise Malformed("an array whose header does not fit its bytes")
    try:
        return torch.from_numpy(np.frombuffer(bytearray(content), dtype).reshape(shape))
    except (TypeError, ValueError) as error:
        raise Malformed("an array of numbers that torch does not know") from error


class Unpacked:
    """The tensors of a message by number."""

    def __init__(self, records: RecordDict, device: torch.device) -> None:
        found = records.array_records.get(TENSORS)
        self._arrays: Mapping[str, Array] = found if found is not None else {}
        self._made: dict[str, Tensor] = {}
        self._device = device

    def tensor(self, number: Any) -> Tensor:
        """The tensor of a number."""
        if not isinstance(number, str) or number not in self._arrays:
            raise Malformed("an outline that names a tensor which is not there")
        if number not in self._made:
            self._made[number] = decode(self._arrays[number]).to(self._device)
        return self._made[number]

    def leaves(self, outline: Any) -> Leaves:
        """Tensors by name."""
        return {name: self.tensor(number) for name, number in _table(outline).items()}

    def memory(self, outline: Any) -> dict[str, Leaves]:
        """Tensors by owner and name."""
        return {owner: self.leaves(kept) for owner, kept in _table(outline).items()}


def records(outline: Mapping[str, Any], sack: Sack) -> RecordDict:
    """The records of a message."""
    text = json.dumps({"version": VERSION, **outline})
    return RecordDict({TENSORS: ArrayRecord(sack.arrays), OUTLINE: ConfigRecord({"json": text})})


def outline_of(content: RecordDict) -> dict[str, Any]:
    """The outline of a message."""
    found = content.config_records.get(OUTLINE)
    text = None if found is None else found.get("json")
    if not isinstance(text, str):
        raise Malformed("a message without an outline")
    try:
        outline = _table(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise Malformed("an outline that is no JSON") from error
    if outline.get("version") != VERSION:
        raise Malformed(f"messages of version {outline.get('version')!r}; this fedloom speaks version {VERSION}")
    return outline


# Letters --------------------------------------------------------------------------------------------------


def pack_letter(letter: Letter) -> RecordDict:
    """A letter as records."""
    sack = Sack()
    jobs = [
        {
            "run": job.run,
            "stage": job.stage,
            "program": job.program,
            "leaves": sack.leaves(job.post.leaves),
            "broadcast": sack.memory(job.post.broadcast),
            "gate": sack.leaves(job.post.gate),
            "round": job.post.round,
            "cohort": job.post.cohort,
            "population": job.post.population,
            "addressed": sack.memory(job.addressed),
            "key": _key(job.key),
            "share": job.share,
            "base": job.base,
        }
        for job in letter.jobs
    ]
    return records({"experiment": letter.experiment, "plan": letter.plan, "jobs": jobs}, sack)


def unpack_letter(content: RecordDict, device: torch.device | None = None) -> Letter:
    """The inverse of :func:`pack_letter`."""
    outline, found = outline_of(content), Unpacked(content, device or torch.device("cpu"))
    jobs = []
    for part in _list(outline, "jobs"):
        job = _table(part)
        post = Post(
            leaves=found.leaves(job.get("leaves")),
            broadcast=found.memory(job.get("broadcast")),
            gate=found.leaves(job.get("gate")),
            round=_of(job, "round", int),
            cohort=_of(job, "cohort", int),
            population=_of(job, "population", int),
        )
        base = job.get("base")
        jobs.append(
            Job(
                run=_of(job, "run", str),
                stage=_of(job, "stage", int),
                program=_of(job, "program", str),
                post=post,
                addressed=found.memory(job.get("addressed")),
                key=_unkey(job.get("key")),
                share=float(_of(job, "share", (int, float))),
                base=None if base is None else _of(job, "base", int),
            )
        )
    return Letter(_of(outline, "experiment", str), _of(outline, "plan", str), tuple(jobs))


# Replies --------------------------------------------------------------------------------------------------


def pack_package(package: Package) -> RecordDict:
    """A site's reply as records."""
    sack = Sack()
    answers = [
        {
            "code": answer.code,
            "message": sack.memory(answer.message),
            "steps": dict(answer.steps),
            "loss": answer.loss,
            "judged": {
                name: {"sums": sack.leaves(sums), "rows": sack.leaves(rows)}
                for name, (sums, rows) in answer.judged.items()
            },
        }
        for answer in package.answers
    ]
    outline = {"site": package.site, "facts": dict(package.facts), "answers": answers, "code": package.code}
    return records(outline, sack)


def unpack_package(content: RecordDict, device: torch.device | None = None) -> Package:
    """The inverse of :func:`pack_package`."""
    outline, found = outline_of(content), Unpacked(content, device or torch.device("cpu"))
    answers = []
    for part in _list(outline, "answers"):
        answer = _table(part)
        loss = answer.get("loss")
        judged = {name: _table(value) for name, value in _table(answer.get("judged")).items()}
        answers.append(
            Answer(
                code=_of(answer, "code", int),
                message=found.memory(answer.get("message")),
                steps={name: _whole(count) for name, count in _table(answer.get("steps")).items()},
                loss=None if loss is None else float(_of(answer, "loss", (int, float))),
                judged={n: (found.leaves(v.get("sums")), found.leaves(v.get("rows"))) for n, v in judged.items()},
            )
        )
    return Package(_of(outline, "site", str), _table(outline.get("facts")), tuple(answers), _of(outline, "code", int))


# Details --------------------------------------------------------------------------------------------------


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed("an outline with a part that is no table")
    return value


def _list(outline: Mapping[str, Any], name: str) -> list[Any]:
    value = outline.get(name)
    if not isinstance(value, list):
        raise Malformed(f"an outline without {name}")
    return value


def _of(outline: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = outline.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Malformed(f"an outline whose {name} is missing or of another type")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Malformed("a number of steps that is none")
    return value


def _key(key: Hashable) -> Any:
    """A static key as JSON: tuples are marked, since JSON knows lists only."""
    if isinstance(key, tuple):
        return {"tuple": [_key(part) for part in key]}
    assert key is None or isinstance(key, (bool, int, float, str)), f"a key of type {type(key).__name__} cannot travel"
    return key


def _unkey(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(_unkey(part) for part in _list(value, "tuple"))
    if isinstance(value, list):
        raise Malformed("a key that is a list")
    return value if value is None else _scalar(value)


def _scalar(value: Any) -> Hashable:
    if not isinstance(value, (bool, int, float, str)):
        raise Malformed("a key of another type")
    return value
