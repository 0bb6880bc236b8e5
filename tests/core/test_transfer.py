"""Questions to the device: what is asked, how often, and that the answers are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedloom import transfer, tree
from fedloom.reducers import mean


def test_values_of_several_types_come_back_in_order() -> None:
    kinds = [torch.float32, torch.int64, torch.float64, torch.bfloat16, torch.float32, torch.float64]
    values = [torch.tensor(i + 0.5, dtype=torch.float64).to(kind) for i, kind in enumerate(kinds)]
    values.append(torch.tensor(math.nan))
    found = transfer.read(values)
    assert found[:-1] == [float(v) for v in values[:-1]]
    assert math.isnan(found[-1])
    assert transfer.read([]) == []


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
    sound, told = tree.finite(trees, [torch.tensor(7.0), torch.tensor(2, dtype=torch.int64)])
    assert sound == [True, bad is None, True, True]
    assert told == [7.0, 2.0]


def test_an_answer_of_several_types_has_each_as_it_is() -> None:
    """No number is converted on its way; what lies with gaps or turned round is read as it is meant."""
    scores = torch.arange(6).reshape(2, 3).T
    others = [torch.tensor([True, False, True]), scores, torch.rand(4, 3)[:, ::2], torch.tensor(1e-300).double()]
    others += [torch.full((2,), 1.5, dtype=torch.bfloat16), torch.zeros(0, 3), torch.rand(6, dtype=torch.float64)[::2]]
    question = transfer.Question()
    question.ask([torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.2)])
    values, told = question.answer(others)
    assert values == [float(torch.tensor(0.1)), 0.1, float(torch.tensor(0.2))]
    for value, array in zip(others, told, strict=True):
        assert torch.equal(torch.from_numpy(array), value.float() if value.dtype is torch.bfloat16 else value)
        assert array.flags.aligned


def test_uploaded_weights_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    for name in ("item", "tolist", "cpu", "__float__"):
        plain = getattr(torch.Tensor, name)

        def ask(self: torch.Tensor, *args: Any, plain: Any = plain, name: str = name) -> Any:
            asked.append(name)
            return plain(self, *args)

        monkeypatch.setattr(torch.Tensor, name, ask)
    answer = transfer.Answer.arrays
    monkeypatch.setattr(transfer.Answer, "arrays", lambda self: asked.append("answer") or answer(self))
    shapes = [(), (1,), ()]
    messages = [{"q": {"weight": torch.full(s, float(i))}} for i, s in enumerate(shapes, 1)]
    assert mean("q").weights(messages, [1, 1, 1]) == [1 / 6, 2 / 6, 3 / 6]
    assert asked == ["answer"]


def test_an_answer_that_is_sent_for_is_that_of_then() -> None:
    """What is asked for is read as it was when it was sent for, not as it has become."""
    question, value = transfer.Question(), torch.tensor([1.0, 2.0])
    question.ask([value.sum()])
    question.send([value * 2, torch.arange(3)])
    value.zero_()
    values, told = question.answer()
    assert values == [3.0]
    assert [array.tolist() for array in told] == [[2.0, 4.0], [0, 1, 2]]
    assert transfer.Question().answer() == ([], [])


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
