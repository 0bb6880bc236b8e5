"""Values that the host reads: what is read, how often, and that it is right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedloom import devices
from fedloom import tensors as tree
from fedloom.clients.states import ClientState
from fedloom.spec.optimizer import OptState
from fedloom.spec.reducers import mean
from fedloom.store.codec import pack, unpack
from fedloom.store.segments import Segment, content


def test_values_of_several_types_come_back_in_order() -> None:
    kinds = [torch.float32, torch.int64, torch.float64, torch.bfloat16, torch.float32, torch.float64]
    values = [torch.tensor(i + 0.5, dtype=torch.float64).to(kind) for i, kind in enumerate(kinds)]
    values.append(torch.tensor(math.nan))
    found = devices.read_scalars(values)
    assert found[:-1] == [float(v) for v in values[:-1]]
    assert math.isnan(found[-1])
    assert devices.read_scalars([]) == []


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_what_is_finite(kind: torch.dtype, bad: float | None) -> None:
    """The largest numbers of a type are finite though their sum is not; one bad element condemns its tree alone."""
    top = torch.finfo(kind).max
    whole = torch.full((3, 70_001), top, dtype=kind)
    whole[:, ::2] = -top
    gaps = torch.full((4, 6), top, dtype=kind)[:, ::3]
    common = torch.tensor(top, dtype=kind).expand(5)
    trees = [{"row": row, "gaps": gaps, "one": common, "double": torch.ones(2).double()} for row in whole.unbind(0)]
    trees.append({"count": torch.tensor([1, 2]), "none": torch.empty(0, dtype=kind)})
    if bad is not None:
        whole[1, -1] = bad
    assert [tree.all_finite(t) for t in trees] == [True, bad is None, True, True]
    ones = [v / torch.finfo(v.dtype).max for t in trees for v in t.values() if v.is_floating_point()]
    assert math.isfinite(tree.finite_indicator(ones)) == (bad is None)
    assert bad is None or not math.isfinite(tree.finite_indicator(v for t in trees for v in t.values()))
    assert tree.first_non_finite(trees[1]) == (None if bad is None else "row")


def test_uploaded_weights_may_have_any_shape_of_one_element() -> None:
    messages = [{"q": {"weight": torch.full(s, float(i))}} for i, s in enumerate([(), (1,), ()], 1)]
    assert mean("q").weights(messages, [1, 1, 1]) == [1 / 6, 2 / 6, 3 / 6]


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_copies_are_the_same_to_the_bit_and_share_nothing(kind: torch.dtype) -> None:
    numbers = torch.tensor([0.0, -0.0, 1e-45, math.inf, -math.inf, 7.0, 3.5, -1e-3])
    values = [numbers.to(kind), numbers.to(kind).reshape(2, 4).T, numbers.double(), numbers.to(kind)[:2].expand(3, 2)]
    made = tree.copies([values[0].clone().requires_grad_(kind.is_floating_point), *values[1:]])
    for value, copy in zip(values, made, strict=True):
        assert copy.dtype is value.dtype
        assert not copy.requires_grad
        assert copy.data_ptr() != value.data_ptr()
        assert copy.contiguous().numpy().tobytes() == value.contiguous().numpy().tobytes()


def test_a_tensor_of_the_host_comes_back_on_the_host() -> None:
    """The device of the run is ``meta``: its tensors have no values, so only those of the host are packed."""
    meta, cpu = torch.device("meta"), torch.device("cpu")
    moments = OptState({"m": [torch.arange(3.0)]}, torch.tensor(1))
    value = {"gate": torch.ones(2), "nested": [{"a": torch.zeros(())}, 3, "text"], "optimizer": moments}
    for run_device, device, kind in ((meta, meta, "cpu"), (cpu, meta, "meta"), (cpu, cpu, "cpu")):
        back = unpack(pack(value, run_device), device)
        assert back["nested"][1:] == [3, "text"]
        tensors = [back["gate"], back["nested"][0]["a"], *back["optimizer"].slots["m"], back["optimizer"].step]
        assert {v.device.type for v in tensors} == {kind}


def test_client_states_on_disk_keep_the_host(tmp_path: Path) -> None:
    device = torch.device("meta")
    state = ClientState(memory={"mine": {"v": torch.arange(4.0)}}, rounds=2)
    path = tmp_path / "clients.safetensors"
    path.write_bytes(content({"0": state}, device))
    segment = Segment(path)
    back = segment.read(*segment.members()["0"], device)
    assert back.memory["mine"]["v"].tolist() == [0, 1, 2, 3]
