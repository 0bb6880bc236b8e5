"""The task: class weights as torch has them, metrics that do not depend on how pixels are cut into batches and clients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchmetrics.functional.classification as tm
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom as fl
from fedloom.tasks.batch import Batch
from tests.helpers import fit, gap, shared

WEIGHTS = [0.5, 3.0, 1.0, 0.0]


def drawn(seed: int, n: int = 4, void: float = 0.3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 4, 5, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 4, (n, 5, 6), generator=draw)
    return logits, torch.where(torch.rand(n, 5, 6, generator=draw) < void, 255, y)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_loss_is_torchs(weights: list[float] | None) -> None:
    logits, y = drawn(0)
    task = fl.segmentation(weights)
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = F.cross_entropy(logits, y, weight=tensor, ignore_index=255)
    assert float(task.value(logits, Batch(logits, y))) == pytest.approx(float(expected), rel=1e-12)
    assert task.statistics is not None
    judged = task.judge(task.statistics(logits, Batch(logits, y)), {})
    assert judged["loss"] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_padding_rows_do_not_count(weights: list[float] | None) -> None:
    logits, y = drawn(1)
    task = fl.segmentation(weights)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    with_padding = task.value(logits, Batch(logits, y, mask))
    assert float(with_padding) == pytest.approx(float(task.value(logits[:3], Batch(logits[:3], y[:3]))), rel=1e-12)


def test_void_pictures_have_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    y = torch.full((2, 3, 3), 255)
    for weights in (None, WEIGHTS):
        value = fl.segmentation(weights).value(logits, Batch(logits, y))
        (gradient,) = torch.autograd.grad(value, logits)
        assert float(value.detach()) == 0
        assert not gradient.any()


@given(st.integers(0, 50), st.lists(st.integers(0, 6), max_size=3), st.floats(0, 0.9))
def test_metrics_equal_torchmetrics_however_pixels_are_cut(seed: int, cuts: list[int], void: float) -> None:
    logits, y = drawn(seed, 6, void)
    task = fl.segmentation()
    assert task.statistics is not None
    sums: dict[str, Tensor] = {}
    for out, target in zip(logits.tensor_split(sorted(cuts)), y.tensor_split(sorted(cuts)), strict=True):
        if len(out):
            part = task.statistics(out, Batch(out, target))
            sums = {k: sums[k] + v if sums else v for k, v in part.items()}
    found = task.judge(sums, {})
    valid = y != 255
    said, true = logits.argmax(1)[valid], y[valid]
    seen = torch.tensor([bool(((said == c) | (true == c)).any()) for c in range(4)])
    for name, score in (
        ("miou", tm.multiclass_jaccard_index(said, true, 4, average="none")),
        ("mf1", tm.multiclass_f1_score(said, true, 4, average="none")),
        ("mprecision", tm.multiclass_precision(said, true, 4, average="none")),
        ("mrecall", tm.multiclass_recall(said, true, 4, average="none")),
    ):
        assert found[name] == pytest.approx(float(score[seen].double().mean()), abs=1e-6)


def test_wrong_weights() -> None:
    with pytest.raises(fl.UserError, match="weights"):
        fl.segmentation([1.0, -1.0])
    data = fl.data.load("street_scenes", towns=2, frames=6, length=3, size=(16, 16)).partition()
    with pytest.raises(fl.UserError, match=r"3 weights.*9 outputs"):
        fit("fedavg", lambda: nn.Conv2d(3, 9, 1), data, task=fl.segmentation([1.0, 2.0, 3.0]))


def test_a_weighted_run_on_both_engines() -> None:
    data = fl.data.load("street_scenes", towns=3, frames=9, length=3, size=(16, 16)).partition()
    task = fl.segmentation([1.0 + i for i in range(9)])
    options = {"data": data, "model": lambda: nn.Conv2d(3, 9, 3, padding=1), "rounds": 2}
    a, b = (fit("fedavg", task=task, engine=engine, **options) for engine in ("loop", "vectorised"))
    assert gap(shared(a), shared(b)) <= 1e-10
    assert gap(shared(a), shared(fit("fedavg", task="segmentation", **options))) > 1e-3
    assert a.config["repeatable"] is False
