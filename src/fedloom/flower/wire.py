"""What travels: letters to sites and their answers, as Flower records.

All tensors lie one behind the other in one string of bytes, and a JSON text, the outline, says which bytes are which tensor. Flower fetches
every part of a message by a request of its own, which costs more than a small message weighs: up to :data:`SMALL` the bytes therefore lie
beside the outline, in one record, and only more of them become an array, which Flower cuts into pieces. Names may therefore hold any character, a tensor that several programs need travels once, and nothing is unpickled:
types come from a short list, and shapes are believed only where they fit the bytes.
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

from fedloom.clients.messages import Post
from fedloom.store.format_number import FORMAT
from fedloom.tensors import Leaves, Memory, Message

TENSORS, OUTLINE, BYTES = "tensors", "outline", "bytes"
SMALL = 1 << 20
"""Bytes up to which tensors travel beside the outline."""
TYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}


class Malformed(ValueError):
    """A message that is not what fedloom sends."""


@dataclass(frozen=True, slots=True)
class SiteJob:
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
    jobs: tuple[SiteJob, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteReply:
    """What one program gave.

    Args:
        code: 0, or why there is nothing (:mod:`fedloom.flower.error_codes`).
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
    answers: tuple[SiteReply, ...] = ()
    code: int = 0


# Tensors --------------------------------------------------------------------------------------------------


class Sack:
    """Tensors on their way; each is packed once, however often it is mentioned."""

    def __init__(self) -> None:
        self.forms: list[tuple[str, list[int]]] = []
        self.parts: list[bytes] = []
        self._known: dict[int, tuple[int, Tensor]] = {}

    def add(self, tensor: Tensor) -> int:
        """The number of a tensor."""
        if id(tensor) not in self._known:
            kind = str(tensor.dtype).removeprefix("torch.")
            assert kind in TYPES, f"a tensor of type {kind} cannot travel"
            self._known[id(tensor)] = (len(self.forms), tensor)  # the reference keeps the id from being used again
            self.forms.append((kind, list(tensor.shape)))
            self.parts.append(tensor.detach().cpu().contiguous().numpy().tobytes())
        return self._known[id(tensor)][0]

    def leaves(self, values: Leaves) -> dict[str, int]:
        """Numbers by name."""
        return {name: self.add(value) for name, value in values.items()}

    def memory(self, values: Mapping[str, Leaves]) -> dict[str, dict[str, int]]:
        """Numbers by owner and name."""
        return {owner: self.leaves(kept) for owner, kept in values.items()}


def content_of(array: Array) -> memoryview:
    """The bytes of a Flower array of bytes; its header is believed only where it fits."""
    if not isinstance(array, Array) or array.stype != "numpy.ndarray":
        raise Malformed("an array of another kind")
    stream = io.BytesIO(array.data)
    try:
        if npy.read_magic(stream) != (1, 0):
            raise Malformed("an array of another version")
        shape, _, dtype = npy.read_array_header_1_0(stream)
    except ValueError as error:
        raise Malformed("an array without a header") from error
    content = memoryview(array.data)[stream.tell() :]
    if dtype != np.uint8 or shape != (len(content),):
        raise Malformed("an array whose header does not fit its bytes")
    return content


def bytes_of(content: RecordDict) -> memoryview:
    """The bytes of a message's tensors."""
    arrays, outline = content.array_records.get(TENSORS), content.config_records.get(OUTLINE)
    array = None if arrays is None else arrays.get(BYTES)
    small = None if outline is None else outline.get(BYTES)
    if array is not None and small is not None:
        raise Malformed("its bytes twice")
    if array is not None:
        return content_of(array)
    if not isinstance(small, bytes):
        raise Malformed("no bytes")
    return memoryview(small)


class Unpacked:
    """The tensors of a message by number."""

    def __init__(self, content: RecordDict, outline: Mapping[str, Any], device: torch.device) -> None:
        self._device, self._made = device, dict[int, Tensor]()
        self._places: list[tuple[str, list[int], memoryview]] = []
        rest = bytes_of(content)
        for form in _list(outline, "tensors"):
            kind, shape = _form(form)
            size = TYPES[kind].itemsize
            for side in shape:
                size *= side
            if size > len(rest):
                raise Malformed("an outline of more bytes than there are")
            self._places.append((kind, shape, rest[:size]))
            rest = rest[size:]
        if len(rest):
            raise Malformed("bytes that no tensor explains")

    def tensor(self, number: Any) -> Tensor:
        """The tensor of a number."""
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(self._places):
            raise Malformed("an outline that names a tensor which is not there")
        if number not in self._made:
            kind, shape, content = self._places[number]
            array = np.frombuffer(bytearray(content), TYPES[kind]).reshape(shape)
            self._made[number] = torch.from_numpy(array).to(self._device)
        return self._made[number]

    def leaves(self, outline: Any) -> Leaves:
        """Tensors by name."""
        return {name: self.tensor(number) for name, number in _table(outline).items()}

    def memory(self, outline: Any) -> dict[str, Leaves]:
        """Tensors by owner and name."""
        return {owner: self.leaves(kept) for owner, kept in _table(outline).items()}


def _form(form: Any) -> tuple[str, list[int]]:
    if not isinstance(form, list) or len(form) != 2 or str(form[0]) not in TYPES or not isinstance(form[1], list):
        raise Malformed("a tensor of an unknown form")
    if any(not isinstance(side, int) or isinstance(side, bool) or not 0 <= side < 2**40 for side in form[1]):
        raise Malformed("a tensor of an impossible shape")
    if len(form[1]) > 16:
        raise Malformed("a tensor of too many axes")
    return form[0], form[1]


def records(outline: Mapping[str, Any], sack: Sack) -> RecordDict:
    """The records of a message."""
    text = json.dumps({"format": FORMAT, **outline, "tensors": sack.forms})
    content = b"".join(sack.parts)
    if len(content) <= SMALL:
        return RecordDict({OUTLINE: ConfigRecord({"json": text, BYTES: content})})
    array = Array(np.frombuffer(content, np.uint8))
    return RecordDict({TENSORS: ArrayRecord({BYTES: array}), OUTLINE: ConfigRecord({"json": text})})


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
    if (number := outline.get("format")) != FORMAT:
        action = "install the same version of fedloom on the server and at every site"
        raise Malformed(f"format {number!r:.40} instead of format {FORMAT}; {action}")
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
    outline = outline_of(content)
    found = Unpacked(content, outline, device or torch.device("cpu"))
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
            SiteJob(
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
    outline = outline_of(content)
    found = Unpacked(content, outline, device or torch.device("cpu"))
    answers = []
    for part in _list(outline, "answers"):
        answer = _table(part)
        loss = answer.get("loss")
        judged = {name: _table(value) for name, value in _table(answer.get("judged")).items()}
        answers.append(
            SiteReply(
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
