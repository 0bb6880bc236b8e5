"""Laws of the methods that change FedAvg's objective or weights: limits bit for bit, and cases computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom as fl
from fedloom.methods.balancefl import balanced_order
from fedloom.methods.fedgau import bhattacharyya, matched
from fedloom.spec.class_losses import divergence, teacher, weighted_cross_entropy
from fedloom.spec.parts import Term
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, own, run_of, shared
from tests.laws.test_global_server import slide, slopes

DATA = federation((9, 14, 5, 8))
FULL = {"rounds": 1, "epochs": 1, "batch_size": "full"}


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
@pytest.mark.parametrize("limit", ["moon(mu=0)", "fedintr(mu=0)", "fedntd(beta=0)"])
def test_limit_is_fedavg(limit: str, make: object) -> None:
    a, b = (fit(m, make, DATA, cohort=3, optimizer=fl.sgd(0.1, momentum=0.5)) for m in (limit, "fedavg"))
    assert identical(everything(a), everything(b))


# FedProto -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_fedproto_without_pull_is_local(make: object) -> None:
    a, b = fit("fedproto(lam=0)", make, DATA, cohort=2), fit("local", make, DATA, cohort=2)
    for client in DATA:
        assert identical(own(a, client.id), own(b, client.id))


def lone_head(inputs: int = 1) -> Any:
    return lambda: nn.Sequential(nn.Linear(inputs, 2))


def values(*clients: tuple[list[float], list[int]]) -> fl.Federation:
    made = [(np.float32(x)[:, None], np.int64(y)) for x, y in clients]
    return fl.Federation.from_arrays([(part, part) for part in made])


@pytest.mark.parametrize(("weight", "centre"), [("n", 3.0), ("uniform", 2.0)])
def test_prototypes_by_hand(weight: str, centre: float) -> None:
    # The model is its head, so z = x: one row at 0 and three at 4, all of class 0.
    data = values(([0.0], [0]), ([4.0, 4.0, 4.0], [0, 0, 0]))
    kept = run_of(fit(f"fedproto(weight='{weight}')", lone_head(), data, rounds=1)).state.memory["prototypes"]
    assert kept["mean"].tolist() == [[centre], [0.0]]
    assert kept["known"].tolist() == [1.0, 0.0]


def test_prototypes_that_nobody_holds_are_kept() -> None:
    data = values(([2.0, 2.0], [0, 0]), ([5.0, 5.0], [1, 1]))
    result = fit("fedproto", lone_head(), data, rounds=6, cohort=1)
    assert len({tuple(r["clients"]) for r in result.history}) == 2
    kept = run_of(result).state.memory["prototypes"]
    assert kept["mean"].tolist() == [[2.0], [5.0]]
    assert kept["known"].tolist() == [1.0, 1.0]


def test_prototypes_travel_alone() -> None:
    result = fit("fedproto", mlp(), DATA, rounds=2)
    float64, classes, width = 8, 3, 5
    assert result.history[1]["bytes_up"] == len(DATA) * float64 * (classes * width + classes)
    assert result.history[1]["bytes_down"] == len(DATA) * float64 * (classes * width + classes)


def test_prototypes_refuse_numbers() -> None:
    x, y = np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)
    data = fl.Federation.from_arrays([((x, y), (x, y))])
    with pytest.raises(fl.UserError, match="classification"):
        fit("fedproto", lambda: nn.Sequential(nn.Linear(2, 1)), data, task="regression")


# MOON and FedIntR -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["moon(mu=0.7)", "moon(mu=0.7, projection=4)", "fedintr(mu=0.7, projection=4)"])
def test_first_participation_costs_ln_2_and_moves_nothing(text: str) -> None:
    a, b = fit(text, mlp(), DATA, **FULL), fit("fedavg", mlp(), DATA, **FULL)
    assert a.history[0]["train_loss"] - b.history[0]["train_loss"] == pytest.approx(0.7 * math.log(2), abs=1e-12)
    assert identical(shared(b), shared(a))
    start = run_of(a).bound.start
    assert identical({k: v for k, v in start.items() if ":" in k}, shared(a))


def test_moon_differs_once_a_client_comes_back() -> None:
    a, b = fit("moon", mlp(), DATA, rounds=2), fit("fedavg", mlp(), DATA, rounds=2)
    assert not identical(shared(b), shared(a))


# FedDyn ---------------------------------------------------------------------------------------------------


def test_feddyn_by_hand() -> None:
    # From w, theta = w - 0.4 and w - 0.2: g = (0.04, 0.02), h = 0.03, and w moves by -0.3 - 0.3.
    result = slide("feddyn(0.1)", slopes(([-0.4], 0.0), ([-0.2], 0.0)))
    run = run_of(result)
    assert [float(run.clients[k].memory["feddyn"]["w"]) for k in ("0", "1")] == pytest.approx([0.04, 0.02], abs=1e-8)
    assert float(run.state.memory["feddyn"]["w"]) == pytest.approx(0.03, abs=1e-8)
    assert float(shared(result)["w"]) == pytest.approx(-0.6, abs=1e-7)
    assert float(own(result, "0")["w"]) == pytest.approx(-0.3, abs=1e-7)


def test_feddyn_state_is_the_mean_of_the_clients() -> None:
    run = run_of(fit("feddyn(0.3)", mlp(), DATA, rounds=4))
    for name, h in run.state.memory["feddyn"].items():
        mean = torch.stack([s.memory["feddyn"][name] for s in run.clients.values()]).mean(0)
        torch.testing.assert_close(h, mean, rtol=1e-12, atol=1e-14)


def test_feddyn_refuses_zero() -> None:
    with pytest.raises(fl.UserError, match="out of range"):
        fl.method("feddyn(a=0)")


# FedNTD ---------------------------------------------------------------------------------------------------


def test_fedntd_first_step_is_fedavg() -> None:
    a, b = (fit(m, mlp(), DATA, **FULL) for m in ("fedntd(beta=3.0)", "fedavg"))
    assert a.history[0]["train_loss"] == pytest.approx(b.history[0]["train_loss"], abs=1e-15)
    assert gap(shared(a), shared(b)) < 1e-14


def test_divergence_by_hand() -> None:
    student, known = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[-9.0, 0.0, math.log(3.0)]])
    allowed = torch.tensor([[False, True, True]])
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert float(divergence(student, known, allowed, 1.0)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_divergence_over_none_or_one_class_is_zero(count: int) -> None:
    student = torch.randn(4, 3, requires_grad=True)
    allowed = torch.arange(3)[None] < count
    value = divergence(student, torch.randn(4, 3), allowed, 2.0).sum()
    (gradient,) = torch.autograd.grad(value, student)
    assert float(value.detach()) == 0
    assert not gradient.any()


# FedIR ----------------------------------------------------------------------------------------------------


def test_fedir_weights_by_hand() -> None:
    x = [0.1, 0.2, 0.3, 0.4, 0.5]
    data = values((x, [0, 0, 0, 0, 1]), (x, [1, 1, 1, 1, 0]))
    result = fit("fedir", lone_head(), data, **FULL)
    start = run_of(result).bound.start
    logits = F.linear(torch.tensor(x).double()[:, None], start["0.weight"], start["0.bias"])
    losses = [F.cross_entropy(logits, torch.tensor(y), reduction="none") for y in ([0, 0, 0, 0, 1], [1, 1, 1, 1, 0])]
    weight = torch.tensor([0.625, 0.625, 0.625, 0.625, 2.5]).double()
    expected = sum(float((weight * v).sum()) / 5 for v in losses) / 2
    assert result.history[0]["train_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_fedir_with_equal_labels_is_fedavg(make: object) -> None:
    draw = np.random.default_rng(0)
    parts = [(draw.normal(size=(3 * k, 6)).astype(np.float32), np.tile([0, 1, 2], k)) for k in (2, 5, 3)]
    data = fl.Federation.from_arrays([(p, p) for p in parts])
    a, b = (fit(m, make, data, optimizer=fl.sgd(0.1, momentum=0.9)) for m in ("fedir", "fedavg"))
    assert identical(shared(a), shared(b))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=2, max_size=4))
@settings(max_examples=30)
def test_fedir_weights_add_up_to_the_share_of_the_held_classes(counts: list[list[int]]) -> None:
    table = np.array(counts, float)
    p = table.sum(0) / table.sum()
    for row in table:
        q = row / row.sum()
        rows = torch.arange(3).repeat_interleave(torch.tensor(row).long())
        weight = torch.tensor([p[c] / q[c] if q[c] else 0.0 for c in range(3)])
        loss = weighted_cross_entropy(torch.zeros(len(rows), 3).double(), Batch(torch.zeros(0), rows), weight)
        assert float(loss) / math.log(3) == pytest.approx(p[row > 0].sum(), rel=1e-12)


def test_histograms_and_statistics_are_counted_once() -> None:
    float64, classes, numbers = 8, 3, 2
    plain, fedir, fedgau = (fit(m, mlp(), DATA, cohort=2, rounds=2).history for m in ("fedavg", "fedir", "fedgau"))
    assert [a["bytes_up"] - b["bytes_up"] for a, b in zip(fedir, plain, strict=True)] == [
        len(DATA) * classes * float64,
        0,
    ]
    weights = 2 * float64
    more = [a["bytes_up"] - b["bytes_up"] for a, b in zip(fedgau, plain, strict=True)]
    assert more == [len(DATA) * numbers * float64 + weights, weights]


def test_fedir_refuses_bad_bounds() -> None:
    for clip in ("(2, 1)", "(-1, 1)", "(1,)"):
        with pytest.raises(fl.UserError, match=r"smallest|expected 2 values"):
            fl.method(f"fedir(clip={clip})")


# BalanceFL ------------------------------------------------------------------------------------------------


def test_balancefl_with_all_classes_is_cross_entropy() -> None:
    logits = torch.randn(8, 3).double()
    batch = Batch(torch.zeros(8, 1), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0]))
    (term,) = fl.balancefl(lam=5.0, entropy=0.0, augment=False).objective
    view = SimpleNamespace(logits=logits, leaves={}, at=lambda leaves, **_: SimpleNamespace(logits=logits * 2))
    seen = SimpleNamespace(swept={"balancefl": {"count": torch.tensor([4, 2, 2])}}, specs={}, gate={})
    value, carry = term.fn(view, batch, seen, {"step": torch.tensor(3)})
    assert float(value) == float(F.cross_entropy(logits, batch.y, reduction="none").mean())
    assert int(carry["step"]) == 4


def test_balanced_order_draws_classes_alike() -> None:
    labels = np.repeat([0, 1, 2], [10, 100, 890])
    drawn = labels[np.concatenate([balanced_order(np.random.default_rng(s), labels) for s in range(20)])]
    assert len(drawn) == 20 * len(labels)
    assert np.abs(np.bincount(drawn) / len(drawn) - 1 / 3).max() < 0.02


def test_balanced_order_of_pictures_goes_by_presence() -> None:
    held = np.zeros((100, 2), bool)
    held[:, 0] = True
    held[:5, 1] = True
    drawn = np.concatenate([balanced_order(np.random.default_rng(s), held) for s in range(50)])
    # Class 1 is in five pictures: they are drawn for it half of the time, and 5 % of the rest.
    assert np.mean(drawn < 5) == pytest.approx(0.5 + 0.5 * 0.05, abs=0.02)


def test_balancefl_augments_the_rare_with_the_covariance() -> None:
    from fedloom.methods.balancefl import _root

    z = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).double() @ torch.randn(3, 3).double()
    y = torch.cat([torch.zeros(150), torch.ones(50)]).long()
    hot = F.one_hot(y, 2).double()
    found = _root({"count": hot.sum(0), "sum": hot.T @ z, "square": z.T @ z}, None)  # type: ignore[arg-type]
    expected = sum(np.cov(z[y == c].numpy().T, bias=True) * int((y == c).sum()) for c in (0, 1)) / 200
    np.testing.assert_allclose(found["root"] @ found["root"], expected, rtol=1e-10, atol=1e-12)
    assert found["chance"].tolist() == pytest.approx([0.0, 1 - 50 / 150])


# FedGau ---------------------------------------------------------------------------------------------------


def test_fedgau_by_hand() -> None:
    numbers = lambda *v: torch.tensor(v, dtype=torch.float64)  # noqa: E731
    centre, width = matched(numbers(0.0, 2.0), numbers(1.0, 1.0), numbers(1.0, 1.0))
    assert (float(centre), float(width)) == (1.0, 2.0)
    assert float(bhattacharyya(numbers(0.0), numbers(1.0), numbers(1.0), numbers(2.0))) == pytest.approx(
        0.112779, abs=1e-6
    )


def test_fedgau_with_equal_clients_is_fedavg_to_rounding() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(6, 6)).astype(np.float32), np.array([0, 1, 2, 0, 1, 2])
    data = fl.Federation.from_arrays([((np.tile(x, (k, 1)), np.tile(y, k)), (x, y)) for k in (1, 3, 2)])
    a, b = (fit(m, mlp(), data, cohort=2) for m in ("fedgau", "fedavg"))
    assert gap(shared(a), shared(b)) < 1e-12


# Local training of everybody ------------------------------------------------------------------------------


def test_local_full_with_everybody_is_local() -> None:
    a, b = fit("local_full", bn_mlp(), DATA), fit("local", bn_mlp(), DATA)
    assert identical(everything(a), everything(b))


def test_local_full_trains_everybody() -> None:
    result = fit("local_full(epochs=3)", mlp(), DATA, cohort=1, rounds=2)
    assert all(len(r["clients"]) == len(DATA) and r["bytes_up"] == 0 for r in result.history)
    same = fit("local", mlp(), DATA, epochs=3, rounds=2)
    assert identical(everything(result), everything(same))


# Pictures with a label per pixel --------------------------------------------------------------------------


def pictures() -> fl.Federation:
    draw = np.random.default_rng(0)
    clients = []
    for k, n in enumerate((5, 3, 6)):
        x = draw.normal(size=(n, 2, 8, 8)).astype(np.float32)
        y = (x[:, 0] > 0.4 * k).astype(np.int64) + (x[:, 1] > 1.0)
        y[:, 0] = 255
        clients.append(((x, np.minimum(y, 1 if k == 1 else 2) if k == 1 else y), (x, y)))
    return fl.Federation.from_arrays(clients)


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 3, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    )


@pytest.mark.parametrize(
    "text", ["fedir", "balancefl", "fedgau", "moon", "fedntd", "feddyn", "fedavgm", "qfedavg", "fedintr(projection=4)"]
)
def test_segmentation_on_both_engines(text: str) -> None:
    options = {"task": "segmentation", "rounds": 2, "epochs": 1, "batch_size": 2}
    a, b = (fit(text, dense, pictures(), engine=e, **options) for e in ("loop", "vectorised"))
    assert gap(everything(a), everything(b)) < 1e-9
    plain = fit("fedavg", dense, pictures(), **options)
    assert not identical(shared(plain), shared(a))
    assert all(math.isfinite(r["loss"]) for r in a.history)


def test_a_teacher_has_no_gradient_but_one_can_be_asked_of_it() -> None:
    """What it says is a constant to the student; ``view.gradient`` at its leaves is theirs all the same."""
    found: list[tuple[bool, float]] = []

    def fn(view: View, batch: Batch, seen: Seen) -> Tensor:
        known = teacher(view, seen, {name: view.leaves[name] for name in view.trained})
        moved = known.gradient(lambda other: other.loss(), view.trained)
        found.append((known.logits.requires_grad, max(float(v.detach().abs().max()) for v in moved.values())))
        return view.loss()

    fit(fl.fedavg().adding(terms=(Term(owner="asks", fn=fn),)), rounds=1, epochs=1)
    assert found
    assert not any(moves for moves, _ in found)
    assert all(size > 0 for _, size in found)
