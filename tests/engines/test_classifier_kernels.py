"""Losses of linear classifiers of a cohort on CUDA, as torch has them client by client; what methods make of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import kernels, tasks
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.kernels import classifiers
from fedloom.types import Batch
from fedloom.view import View
from tests.engines.test_kernels import DEVICE, compare, cuda, random
from tests.engines.test_row_kernels import labels
from tests.helpers import everything, federation, fit, gap

SIZES = [(5, 3, 4), (64, 32, 10), (64, 512, 10), (70, 33, 47), (1, 1, 1), (3, 200, 64), (130, 7, 2), (9, 5, 17)]


def deep_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def pooling_cnn() -> nn.Module:
    maps = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.ReLU())
    return nn.Sequential(maps, nn.Flatten(), nn.Linear(20, 3))


def formula(
    u: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mask: Tensor | None, extra: Tensor | None, a: float, b: float
) -> Tensor:
    """``(a sum m CE + b sum m e) / max(1, sum m)``."""
    rows = torch.ones_like(u[:, 0]) if mask is None else mask
    value = a * F.cross_entropy(u @ weight.T + bias, y, reduction="none")
    return ((value if extra is None else value + b * extra) * rows).sum() / rows.sum().clamp(min=1)


def ours(parts: dict[str, Tensor], a: float, b: float) -> Tensor:
    found = kernels.classified(**parts, scale=a, share=b)
    assert found is not None
    return found


def theirs(parts: dict[str, Tensor], a: float, b: float) -> Tensor:
    given = {"mask": None, "extra": None, **parts}
    clients = range(len(parts["u"]))
    return torch.stack(
        [formula(**{n: None if t is None else t[k] for n, t in given.items()}, a=a, b=b) for k in clients]
    )


def made(rows: int, width: int, classes: int, *, masked: bool, extra: bool) -> dict[str, Tensor]:
    parts = {"u": random(3, rows, width), "weight": random(3, classes, width), "bias": random(3, classes)}
    parts["y"] = labels(3, rows, classes)
    parts["y"][2, 0] = -100  # a row that counts, but adds nothing
    if masked:
        parts["mask"] = labels(3, rows, 2).double()
        parts["mask"][0] = 0  # a client of padding only
    return parts | ({"extra": random(3, rows)} if extra else {})


def trained(parts: dict[str, Tensor]) -> list[Tensor]:
    return [t for t in parts.values() if t.requires_grad]


@cuda
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole"])
@pytest.mark.parametrize("extra", [True, False], ids=["with a value per row", "alone"])
@pytest.mark.parametrize(("rows", "width", "classes"), SIZES)
def test_classifiers(rows: int, width: int, classes: int, masked: bool, extra: bool) -> None:
    parts, (a, b) = made(rows, width, classes, masked=masked, extra=extra), (0.1, 0.7)
    found = torch.vmap(lambda p: ours(p, a, b))(parts)
    assert "CohortClassifier" in type(found.grad_fn).__name__
    compare(found, theirs(parts, a, b), trained(parts))


@cuda
@pytest.mark.parametrize("size", SIZES[1:4])
def test_classifiers_in_float32(size: tuple[int, int, int]) -> None:
    exact = made(*size, masked=True, extra=True)
    short = {n: t.float() if t.is_floating_point() else t for n, t in exact.items()}
    leaves = {n: t.detach().requires_grad_() for n, t in short.items() if exact[n].requires_grad}
    found = torch.vmap(lambda p: ours(p, 0.1, 0.7))(short | leaves)
    assert found.dtype == torch.float32
    slopes = torch.autograd.grad(found.sum(), list(leaves.values()))
    expected = theirs({n: t.double() if t.is_floating_point() else t for n, t in (short | leaves).items()}, 0.1, 0.7)
    assert torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-5)
    for slope, other in zip(slopes, torch.autograd.grad(expected.sum(), list(leaves.values())), strict=True):
        assert slope.dtype == torch.float32
        assert torch.allclose(slope, other, atol=1e-6, rtol=1e-4)


@cuda
def test_features_and_labels_that_all_clients_share() -> None:
    parts = made(6, 5, 4, masked=False, extra=True)
    parts |= {"u": random(6, 5), "y": labels(1, 6, 4)[0]}
    shared = dict.fromkeys(parts, 0) | {"u": None, "y": None}
    found = torch.vmap(lambda p: ours(p, 1.0, 2.0), in_dims=(shared,))(parts)
    wide = parts | {"u": parts["u"].expand(3, -1, -1), "y": parts["y"].expand(3, -1)}
    compare(found, theirs(wide, 1.0, 2.0), trained(parts))
    fixed = wide | {"u": wide["u"].detach(), "extra": wide["extra"].detach()}  # of which no gradient is asked
    compare(torch.vmap(lambda p: ours(p, 1.0, 2.0))(fixed), theirs(fixed, 1.0, 2.0), trained(fixed))


@cuda
def test_views_with_gaps() -> None:
    parts = made(6, 5, 4, masked=True, extra=True)
    apart = parts | {"u": parts["u"].flatten(1).T.reshape(6, 5, 3), "extra": parts["extra"].T}
    axes = dict.fromkeys(parts, 0) | {"u": 2, "extra": 1}
    compare(torch.vmap(lambda p: ours(p, 0.5, 1.0), in_dims=(axes,))(apart), theirs(parts, 0.5, 1.0), trained(parts))


@cuda
def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = made(6, 5, 4, masked=False, extra=False)

    def none(**changed: Any) -> bool:
        seen = []
        torch.vmap(lambda p: seen.append(kernels.classified(**p)) or p["bias"])(parts | changed)
        return seen == [None]

    assert not none()
    assert none(u=parts["u"].bfloat16())
    assert none(**made(6, 5, classifiers.CLASSES + 1, masked=False, extra=False))
    assert none(**made(classifiers.ROWS + 1, 2, 3, masked=False, extra=False))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert none()
    one = {n: t[0] for n, t in parts.items()}
    assert kernels.classified(**one) is None
    monkeypatch.setattr(classifiers, "PRODUCTS", 3 * 6 * 5 * 4 - 1)
    assert none()


@pytest.mark.parametrize("mapped", [False, pytest.param(True, marks=cuda)])
@pytest.mark.parametrize("name", ["classification", "binary", "user's"])
def test_a_view_has_the_loss_of_its_task(name: str, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tasks.TASKS[name if name == "binary" else "classification"]
    task = (
        replace(known, mean=lambda out, batch: batch.mean(3 * known.loss(out, batch.y))) if name == "user's" else known
    )
    parts = made(6, 5, 1 if name == "binary" else 4, masked=True, extra=True)
    parts["y"] = parts["y"].clamp(min=0)
    launched: list[int] = []
    monkeypatch.setattr(classifiers._CohortClassifier, "apply", _noting(launched, classifiers._CohortClassifier.apply))

    def value(p: dict[str, Tensor]) -> Tensor:
        bound: Any = SimpleNamespace(task=task)
        view = View(bound, {}, Batch(p["u"], p["y"], p["mask"]), None, leaves={})  # type: ignore[arg-type]
        return view.classifier_loss(p["u"], p["weight"], p["bias"], p["extra"], scale=0.3, share=0.2)

    def wanted(p: dict[str, Tensor]) -> Tensor:
        batch = Batch(p["u"], p["y"], p["mask"])
        return 0.3 * task.value(p["u"] @ p["weight"].T + p["bias"], batch) + 0.2 * batch.mean(p["extra"])

    every = [{n: t[k] for n, t in parts.items()} for k in range(3)]
    found = torch.vmap(value)(parts) if mapped else torch.stack([value(p) for p in every])
    compare(found, torch.stack([wanted(p) for p in every]), trained(parts))
    assert bool(launched) == (mapped and name == "classification")


@cuda
@pytest.mark.parametrize("pictures", [True, False], ids=["maps", "vectors"])
@pytest.mark.parametrize(
    "method",
    ["fedavg + isr", "fedavg + isr(lam=0.0)", "fedavg + isr(weights='adaptive')", "fedaims", "fedaims(mu=0.0)"],
)
def test_methods_do_the_same_with_and_without_the_kernel(
    method: str, pictures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = federation((5, 7, 4), shape=(1, 6, 6)) if pictures else federation((5, 7, 4))
    make, launched, found = pooling_cnn if pictures else deep_mlp, list[int](), []
    monkeypatch.setattr(classifiers._CohortClassifier, "apply", _noting(launched, classifiers._CohortClassifier.apply))
    for engine, classes in (("loop", 0), (VectorisedEngine(step="mapped"), 0), (VectorisedEngine(step="mapped"), 64)):
        monkeypatch.setattr(classifiers, "CLASSES", classes)
        found.append(everything(fit(method, make, data, engine=engine, rounds=2, epochs=1, cohort=3)))
        assert bool(launched) == bool(classes)
    assert max(gap(found[0], found[1]), gap(found[1], found[2])) < 1e-10


def _noting(launched: list[int], apply):  # type: ignore[no-untyped-def]
    def noted(*args):  # type: ignore[no-untyped-def]
        launched.append(1)
        return apply(*args)

    return noted
