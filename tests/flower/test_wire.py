"""Letters and packages survive the way through Flower's records, and nothing hostile gets through it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedloom.clients.messages import Post
from fedloom.flower import wire
from fedloom.store.format_number import FORMAT

NAMES = st.text(min_size=1, max_size=8)
TYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape, kind = draw(SHAPES), draw(TYPES)
    return (torch.arange(int(np.prod(shape, dtype=int))).reshape(shape) % 2).to(kind)


LEAVES = st.dictionaries(NAMES, tensors(), max_size=3)
MEMORY = st.dictionaries(NAMES, LEAVES, max_size=2)


def carried(content: RecordDict) -> RecordDict:
    """As Flower moves it: every object by its bytes."""
    made = RecordDict()
    for key, arrays in content.array_records.items():
        copies = {}
        for name, array in arrays.items():
            children = {k: type(child).inflate(child.deflate()) for k, child in array.children.items()}
            copies[name] = Array.inflate(array.deflate(), children)
        made[key] = ArrayRecord(copies)
    for key, config in content.config_records.items():
        made[key] = ConfigRecord.inflate(config.deflate())
    return made


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    return bool(a == b)


@given(
    LEAVES, MEMORY, MEMORY, LEAVES, st.sampled_from([None, 3, "red", (1, ("a", 2.5))]), st.sampled_from([None, 0, 7])
)
def test_letters_survive(leaves: Any, broadcast: Any, addressed: Any, gate: Any, key: Any, base: Any) -> None:
    job = wire.SiteJob("fedavg", 0, "round", Post(leaves, broadcast, gate, 3, 2, 5), addressed, key, 1 / 3, base)
    back = wire.unpack_letter(carried(wire.pack_letter(wire.Letter("trial", "plan", (job, job)))))
    assert (back.experiment, back.plan, len(back.jobs)) == ("trial", "plan", 2)
    for made in back.jobs:
        assert same(made.post.leaves, leaves)
        assert same(made.post.broadcast, broadcast)
        assert same(made.post.gate, gate)
        assert same(made.addressed, addressed)
        assert (made.key, made.share, made.base, made.post.round) == (key, 1 / 3, base, 3)


@given(MEMORY, LEAVES)
def test_packages_survive(message: Any, sums: Any) -> None:
    answer = wire.SiteReply(0, message, {"main": 4}, float("nan"), {"test": (sums, {})})
    package = wire.Package("site é/1", {"rows": 3}, (answer, wire.SiteReply(code=16)))
    back = wire.unpack_package(carried(wire.pack_package(package)))
    assert back.site == package.site
    assert back.facts == {"rows": 3}
    assert same(back.answers[0].message, message)
    assert same(back.answers[0].judged["test"][0], sums)
    assert back.answers[0].loss != back.answers[0].loss
    assert back.answers[1].code == 16


def test_a_tensor_that_two_jobs_share_travels_once() -> None:
    weight = torch.zeros(100)
    jobs = tuple(wire.SiteJob("a", 0, p, Post({"w": weight}, {}, {}, 1, 1, 1)) for p in ("own", "round"))
    content = wire.pack_letter(wire.Letter("e", "", jobs))
    assert len(wire.bytes_of(content)) == 400
    assert len(wire.outline_of(content)["tensors"]) == 1


def test_channels_last_and_transposed_tensors_arrive_in_order() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)
    job = wire.SiteJob("a", 0, "own", Post({"w": value}, {}, {}, 1, 1, 1))
    back = wire.unpack_letter(carried(wire.pack_letter(wire.Letter("e", "", (job,)))))
    assert torch.equal(back.jobs[0].post.leaves["w"], value)


def npy(header: str) -> bytes:
    text = header.encode("latin1") + b" " * 10 + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}") + b"\x80\x04K\x01.",
        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,)}"),
        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (-1,)}"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}") + bytes(4),
        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 4)}") + bytes(4),
    ],
    ids=["empty", "pickle", "objects", "huge", "negative", "floats", "table"],
)
def test_hostile_arrays_are_refused(data: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.content_of(Array("uint8", (1,), "numpy.ndarray", data))


GOOD = {"format": FORMAT, "site": "a", "facts": {}, "answers": [], "code": 0, "tensors": [["float32", [1]]]}


@pytest.mark.parametrize(
    "forms",
    [
        [],
        [["float32", [2]]],
        [["object", [1]]],
        [["float32", [-1]]],
        [["float32", [2**39, 2**39]]],
        [["float32", [True]]],
        [["float32"]],
        [["float32", [1] * 40]],
        "float32",
        [[["float32"], [1]]],
    ],
)
def test_forms_that_do_not_fit_the_bytes_are_refused(forms: Any) -> None:
    text = json.dumps({**GOOD, "tensors": forms})
    arrays = ArrayRecord({wire.BYTES: Array(np.zeros(4, np.uint8))})
    whole = RecordDict({wire.TENSORS: arrays, wire.OUTLINE: ConfigRecord({"json": json.dumps(GOOD)})})
    assert wire.unpack_package(whole).site == "a"
    with pytest.raises(wire.Malformed):
        wire.unpack_package(RecordDict({wire.TENSORS: arrays, wire.OUTLINE: ConfigRecord({"json": text})}))


def test_few_bytes_travel_beside_the_outline_and_many_as_an_array() -> None:
    """Flower fetches each part of a message by a request of its own."""
    for count, parts in ((wire.SMALL // 4, [wire.OUTLINE]), (wire.SMALL // 4 + 1, [wire.TENSORS, wire.OUTLINE])):
        job = wire.SiteJob("a", 0, "own", Post({"w": torch.arange(float(count))}, {}, {}, 1, 1, 1))
        content = carried(wire.pack_letter(wire.Letter("e", "", (job,))))
        assert sorted(content) == sorted(parts)
        assert torch.equal(wire.unpack_letter(content).jobs[0].post.leaves["w"], job.post.leaves["w"])


def test_bytes_that_are_missing_or_there_twice_are_refused() -> None:
    arrays = ArrayRecord({wire.BYTES: Array(np.zeros(4, np.uint8))})
    for more, small in ((True, {wire.BYTES: bytes(4)}), (False, {}), (False, {wire.BYTES: "text"})):
        outline = ConfigRecord({"json": json.dumps(GOOD), **small})
        with pytest.raises(wire.Malformed, match="bytes"):
            wire.unpack_package(RecordDict({wire.OUTLINE: outline} | ({wire.TENSORS: arrays} if more else {})))


EMPTY = {**GOOD, "tensors": []}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({**EMPTY, "site": 3}),
        json.dumps({**EMPTY, "answers": {}}),
        json.dumps({**EMPTY, "answers": [{"code": 0, "message": {"delta": {"w": 9}}}]}),
        json.dumps({**EMPTY, "answers": [{"code": 0, "message": {"delta": {"w": -1}}}]}),
        json.dumps({**EMPTY, "answers": [{"code": 0, "message": {"delta": [0]}}]}),
        "[" * 100_000,
    ],
)
def test_hostile_outlines_are_refused(text: str) -> None:
    content = RecordDict({wire.OUTLINE: ConfigRecord({"json": text, wire.BYTES: b""})})
    with pytest.raises(wire.Malformed):
        wire.unpack_package(content)


@pytest.mark.parametrize("number", [2, "1", None])
def test_message_of_another_format_is_refused_in_one_line(number: object) -> None:
    text = json.dumps({**EMPTY, "format": number})
    content = RecordDict({wire.OUTLINE: ConfigRecord({"json": text, wire.BYTES: b""})})
    for unpack in (wire.unpack_package, wire.unpack_letter):
        with pytest.raises(wire.Malformed, match=f"^format {number!r} instead of format 1; install .*$"):
            unpack(content)
