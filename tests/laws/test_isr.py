"""Hand cases and limits of OmniISR's supervision, and the choice of taps."""

from __future__ import annotations

import math
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom import tasks
from fedloom.engines.choose_device import choose_device
from fedloom.network import inspect_model
from fedloom.network.bound_method import Bound, bind
from fedloom.runs.tap_report import costs, information
from fedloom.spec.structure import Structure
from fedloom.spec.tap_losses import entropy_term, pooled
from fedloom.spec.taps import candidates, choose, leaves_before
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, own, run_of, shared, small_cnn


def deep(depth: int = 4) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        parts: list[nn.Module] = []
        for _ in range(depth):
            parts += [nn.Linear(6, 6), nn.Tanh()]
        return nn.Sequential(*parts, nn.Linear(6, 3))

    return make


def structure_of(model: nn.Module, shape: tuple[int, ...], task: str = "classification") -> Structure:
    return inspect_model.build(model, torch.zeros(2, *shape), task=task, device=choose_device("cpu", "fp32")).structure


def bound_of(method: str, model: nn.Module, shape: tuple[int, ...], task: str = "classification") -> Bound:
    net = inspect_model.build(model, torch.zeros(2, *shape), task=task, device=choose_device("cpu", "fp64"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return bind(fl.method(method), net, tasks.named(task))


def term_values(bound: Bound, x: Tensor, y: Tensor, leaves: dict[str, Tensor]) -> list[Tensor]:
    """Each supervising term on one batch at given leaves."""
    phase, batch = bound.phases["main"], Batch(x, y)
    none: Any = None
    view = View(bound, leaves, batch, none, taps=phase.taps)
    return [t.fn(view, batch, none) for t in phase.terms if t.owner.startswith("isr")]


# Formulas.


@pytest.mark.parametrize("shape", [(4,), (4, 3, 5)])
def test_equal_channels_have_the_lowest_entropy_term(shape: tuple[int, ...]) -> None:
    batch = Batch(torch.zeros(2, 1), torch.zeros(2))
    assert float(entropy_term(torch.full((2, *shape), 0.7), batch)) == pytest.approx(-1.386294, abs=1e-6)
    assert float(entropy_term(torch.full((2, 9, 4), 0.7), batch, 2)) == pytest.approx(-1.386294, abs=1e-6)


def test_one_hot_channels_have_none() -> None:
    z = torch.zeros(3, 5)
    z[:, 2] = 1e4
    assert float(entropy_term(z, Batch(torch.zeros(3, 1), torch.zeros(3)))) == 0.0


def test_entropy_leaves_padding_rows_out() -> None:
    z = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    padded = torch.cat([z, torch.full_like(z, 9.0)])
    mask = torch.tensor([1.0] * 4 + [0.0] * 4)
    whole = entropy_term(z, Batch(torch.zeros(4, 1), torch.zeros(4)))
    assert float(entropy_term(padded, Batch(torch.zeros(8, 1), torch.zeros(8), mask))) == pytest.approx(float(whole))


@pytest.mark.parametrize(("classes", "task"), [(3, "classification"), (10, "classification"), (2, "binary")])
def test_a_zero_adapter_costs_log_k(classes: int, task: str) -> None:
    outputs = 1 if task == "binary" else classes
    bound = bound_of("fedavg + isr(alpha=1, lam=0)", mlp(6, outputs)(), (6,), task)
    leaves = {k: torch.zeros_like(v) if k.startswith("isr:") else v for k, v in bound.start.items()}
    y = torch.arange(8) % classes
    (value,) = term_values(bound, torch.randn(8, 6), y, leaves)
    assert float(value) == pytest.approx(math.log(classes))


def test_zero_adapter_on_a_dense_task_costs_log_k_over_valid_pixels() -> None:
    model = fl.models.topformer_t(7, drop_path=0.0, dropout=0.0)
    bound = bound_of("fedavg + isr(alpha=1, lam=0, points=1)", model, (3, 32, 32), "segmentation")
    leaves = {k: torch.zeros_like(v) if k.startswith("isr:") else v for k, v in bound.start.items()}
    y = torch.randint(0, 7, (2, 32, 32))
    y[:, :10] = 255
    (value,) = term_values(bound, torch.randn(2, 3, 32, 32), y, leaves)
    assert float(value) == pytest.approx(math.log(7))


def test_parameters_of_an_adapter() -> None:
    bound = bound_of("fedavg + isr", fl.models.deeplabv3plus_resnet18(11), (3, 64, 64), "segmentation")
    sizes = {n: v.numel() for n, v in bound.start.items() if n.startswith("isr:")}
    widths = {"stem": 64, "layer2": 128, "layer4": 512}
    assert sizes == {f"isr:{t}.weight": 11 * c for t, c in widths.items()} | {f"isr:{t}.bias": 11 for t in widths}


# Limits.


@pytest.mark.parametrize("base", ["fedavg", "fedrep", "ditto", "scaffold", "local"])
def test_zero_weights_change_nothing(base: str) -> None:
    plain, none = fit(base, deep()), fit(f"{base} + isr(alpha=0, lam=0)", deep())
    assert set(shared(plain)) == set(shared(none))
    assert identical(shared(plain), shared(none))
    assert [r["train_loss"] for r in plain.history] == [r["train_loss"] for r in none.history]


def test_reading_features_does_not_change_the_step() -> None:
    """Adapters that learn from features, but whose gradient stops there: the network's steps are the plain ones, bitwise."""
    chosen = fl.compose(fl.fedavg(), fl.isr(alpha=1.0, lam=0.0))
    cut = tuple(
        replace(t, fn=lambda view, batch, seen, t=t: t.fn(view, batch, seen).detach())
        if t.owner.startswith("isr")
        else t
        for t in chosen.objective
    )
    plain, read = fit("fedavg", bn_mlp()), fit(replace(chosen, objective=cut), bn_mlp())
    assert identical(shared(plain), shared(read))


def test_gradient_behind_a_tap_is_exactly_zero() -> None:
    bound = bound_of("fedavg + isr(alpha=1, lam=1, spacing=1)", deep()(), (6,))
    leaves = {k: v.clone().requires_grad_() for k, v in bound.start.items()}
    values = term_values(bound, torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]), leaves)
    assert len(values) == 3
    for m, value in enumerate(values):
        for name, leaf in leaves.items():
            (grad,) = torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True)
            if name.startswith("isr:"):
                assert (grad is not None) == (name.split(":")[1].startswith(f"{2 * m + 1}.")), name
                continue
            behind = int(name.split(".")[0]) > 2 * m
            assert (grad is None) == behind, (m, name)


def test_zero_alpha_builds_no_adapter() -> None:
    bound = bound_of("fedavg + isr(alpha=[0, 1, 0], lam=0.1, spacing=1)", deep()(), (6,))
    assert [n for n in bound.specs if n.startswith("isr:")] == ["isr:3.weight", "isr:3.bias"]


def test_personal_adapters_do_not_travel() -> None:
    result = fit("fedavg + isr(adapters='personal')", deep())
    start = run_of(result).bound.start
    for name, value in shared(result).items():
        if name.startswith("isr:"):
            assert torch.equal(value, start[name])
            assert not torch.equal(own(result, "0")[name], own(result, "1")[name])
    plain = fit("fedavg", deep())
    assert result.history[0]["bytes_up"] == plain.history[0]["bytes_up"]


def test_local_training_keeps_adapters_at_home() -> None:
    result = fit("local + isr", deep())
    assert result.history[0]["bytes_up"] == 0
    assert not torch.equal(own(result, "0")["isr:1.weight"], own(result, "1")["isr:1.weight"])


def test_regression_has_the_entropy_part_only() -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(8, 6)).astype(np.float32), draw.normal(size=8).astype(np.float32)) for _ in range(2)]
    data = fl.Federation.from_arrays([(r, r) for r in rows])
    result = fit("fedavg + isr(alpha=1, lam=0.5)", mlp(6, 1), data, task="regression")
    assert not any(n.startswith("isr:") for n in shared(result))
    assert not identical(shared(result), shared(fit("fedavg", mlp(6, 1), data, task="regression")))
    with pytest.raises(fl.UserError, match="no classes"):
        fit("fedavg + isr(alpha=1, lam=0)", mlp(6, 1), data, task="regression")


def test_adapters_are_not_part_of_a_users_model() -> None:
    result = fit("fedavg + isr", deep())
    assert set(result.model("0").state_dict()) == set(deep()().state_dict())


# Choice of taps.


def test_candidates_of_the_shipped_networks() -> None:
    convnet = structure_of(fl.models.convnet3(), (1, 28, 28))
    assert [t.name for t in candidates(convnet)] == [f"body.block{i}.{p}" for i in (1, 2, 3) for p in ("act", "pool")]
    resnet = structure_of(fl.models.resnet18(10), (3, 16, 16))
    assert [t.name for t in candidates(resnet)][:3] == ["stem", "stages.stage1.0", "stages.stage1.1"]
    hidden = structure_of(fl.models.mlp(hidden=(8, 4)), (64,))
    assert [t.name for t in candidates(hidden)] == ["body.act1", "body.act2"]


def test_positions_and_spacing() -> None:
    model = structure_of(deep(7)(), (6,))
    every = [t.name for t in candidates(model)]
    assert every == [str(2 * i + 1) for i in range(7)]

    def taken(points: int | None, spacing: int | None, position: Any) -> list[int]:
        return [every.index(t.name) for t in choose(model, points, spacing, position)]

    assert taken(None, None, "input") == [0, 2, 4]
    assert taken(None, None, "middle") == [1, 3, 5]
    assert taken(None, None, "output") == [2, 4, 6]
    assert taken(2, 3, "input") == [0, 3]
    assert taken(1, None, "output") == [6]
    assert taken(5, None, "input") == [0, 1, 2, 3, 4]


def test_defaults_shrink_and_given_values_do_not() -> None:
    small = structure_of(deep(2)(), (6,))
    assert [t.name for t in choose(small, None, None, "input")] == ["1", "3"]
    four = structure_of(deep(4)(), (6,))
    assert [t.name for t in choose(four, None, None, "input")] == ["1", "3", "5"]
    with pytest.raises(fl.UserError, match="points=3 needs 3 candidates"):
        choose(small, 3, None, "input")
    with pytest.raises(fl.UserError, match="spacing=2"):
        choose(four, None, 2, "input")
    with pytest.raises(fl.UserError, match="points=2 with spacing=4 needs 5"):
        choose(four, 2, 4, "input")
    with pytest.warns(UserWarning, match="points=1 instead of 3"):
        fl.fit("fedavg + isr", mlp(), federation(), rounds=1, progress=False)
    with pytest.raises(fl.UserError, match="no layer before its head"):
        fit("fedavg + isr", lambda: nn.Sequential(nn.Linear(6, 3)))


def test_deeplab_takes_five_points_at_spacing_one() -> None:
    model = structure_of(fl.models.deeplabv3plus_resnet18(11), (3, 32, 32), "segmentation")
    assert [t.name for t in choose(model, 5, None, "input")] == ["stem", "layer1", "layer2", "layer3", "layer4"]
    with pytest.raises(fl.UserError, match="needs 9 candidates"):
        choose(model, 5, 2, "input")


class Reused(nn.Module):
    """One activation module for all layers, functional pooling: its output cannot be told apart by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.act, self.pool, self.head = nn.ReLU(), nn.MaxPool2d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.a(x)))
        logits: Tensor = self.head(self.act(self.b(x)).mean((2, 3)))
        return logits


def test_generic_criteria() -> None:
    found = candidates(structure_of(Reused(), (1, 6, 6)), 2)
    assert [(t.name, t.kind) for t in found] == [("a", "scale"), ("b", "bottleneck")]
    found = candidates(structure_of(small_cnn()(), (1, 6, 6)), 1)
    assert [(t.name, t.kind) for t in found] == [("2", "scale")]
    bare = replace(structure_of(fl.models.resnet18(10), (3, 16, 16)), tap_points=())
    assert [t.kind for t in candidates(bare)] == ["block"] * 8
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(40, 3))
    kinds = [(t.kind, t.channels, t.positions) for t in candidates(structure_of(encoder, (5, 8)))]
    assert kinds == [("fusion", 8, 5), ("block", 8, 5), ("fusion", 8, 5), ("block", 8, 5)]


def test_leaves_before_a_tap() -> None:
    model = structure_of(deep(3)(), (6,))
    assert leaves_before(model, "3") == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("isr(alpha=-1)", "alpha=-1"),
        ("isr(alpha='x')", "alpha='x'"),
        ("isr(lam=[0.1, 0.2], points=3)", "one weight per tap"),
        ("isr(points=0)", "points=0"),
        ("isr(spacing=1.5)", "spacing=1.5"),
        ("isr(position='left')", "position='left'"),
        ("isr(adapters='mine')", "adapters='mine'"),
    ],
)
def test_bad_arguments(call: str, message: str) -> None:
    with pytest.raises(fl.UserError, match=message.replace("[", r"\[")):
        fl.method(f"fedavg + {call}")


def test_bad_names_and_twice() -> None:
    with pytest.raises(fl.UserError, match="calls no module 'nowhere'"):
        fit("fedavg + isr(points='nowhere')", deep())
    with pytest.raises(fl.Conflict):
        fl.method("fedavg + isr + isr")


# What taps cost and tell.


def test_costs_of_taps() -> None:
    small, large = (costs(fl.models.convnet3(10), torch.zeros(n, 1, 16, 16), repeats=2) for n in (2, 8))
    assert [c.parameters for c in small] == [10 * 64 + 10] * 6
    assert [c.positions for c in small] == [256, 64, 64, 16, 16, 4]
    assert sum(c.chosen for c in small) == 3
    assert all(c.seconds > 0 for c in small)
    for few, many in zip(small, large, strict=True):
        # The feature itself, its log-softmax twice over and the pooled part all grow with the batch.
        assert few.memory >= 2 * 64 * few.positions * 4 * 2
        assert 3 * few.memory < many.memory <= 4 * few.memory + 4096
    dense = costs(fl.models.topformer_t(7), torch.zeros(2, 3, 32, 32), task="segmentation", repeats=1)
    assert dense[0].parameters == 16 * 7 + 7
    assert costs(mlp(6, 1)(), torch.zeros(2, 6), task="regression", repeats=1)[0].parameters == 0


def test_information_of_zero_adapters_is_at_most_zero_and_grows_with_training() -> None:
    data = federation((40, 60))
    runs = [fit("fedavg + isr(alpha=1, lam=0)", deep(2), data, rounds=r, optimizer=fl.sgd(0.3)) for r in (1, 15)]
    first, last = (information(r) for r in runs)
    assert [(i.client, i.tap) for i in first] == [(c, t) for c in ("0", "1") for t in ("1", "3")]
    counts = np.bincount(data[0].train.y.numpy(), minlength=3) / 40
    assert first[0].entropy == pytest.approx(float(-(counts[counts > 0] * np.log(counts[counts > 0])).sum()))
    assert all(i.bound == pytest.approx(i.entropy - i.loss) for i in first)
    assert all(i.bound <= i.entropy for i in first + last)
    assert sum(i.bound for i in last) > sum(i.bound for i in first)
    with pytest.raises(fl.UserError, match="no adapters"):
        information(fit("fedavg", deep(2), data, rounds=1))


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("topformer_t", 32),
        # Smaller pictures leave maps of one pixel, whose batch normalisation over three rows is ill-conditioned.
        pytest.param("seaformer_t", 64, marks=pytest.mark.slow),
        pytest.param("deeplabv3plus_resnet18", 32, marks=pytest.mark.slow),
    ],
)
def test_one_step_of_a_dense_network_on_both_engines(name: str, side: int) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for n in (4, 3):
        x, y = draw.normal(size=(n, 3, side, side)).astype(np.float32), draw.integers(0, 4, (n, side, side))
        y[:, :4] = 255
        rows.append(((x, y), (x, y)))
    options = {"rounds": 1, "epochs": 1, "batch_size": 4, "task": "segmentation", "optimizer": fl.sgd(0.01)}
    data, model = fl.Federation.from_arrays(rows), getattr(fl.models, name)
    runs = [fit("omniisr", lambda: model(num_classes=4), data, engine=e, **options) for e in ("loop", "vectorised")]
    assert len([n for n in shared(runs[0]) if n.startswith("isr:")]) == 6
    assert gap(everything(runs[0]), everything(runs[1])) <= 1e-9


def test_what_the_options_came_to_is_in_the_run(tmp_path: Path) -> None:
    """Defaults that shrink, given numbers and names; and per round the bound on the information, as asked for at the end."""
    data = federation((9, 14))
    result = fit("fedavg + isr", deep(2), data, rounds=2, out=tmp_path / "few")
    written = tomllib.loads((tmp_path / "few" / "run.toml").read_text())["resolved"]["isr"]
    assert written == result.config["resolved"]["isr"] == {"taps": ["1", "3"], "points": 2, "spacing": 1}
    told = information(result)
    for tap in ("1", "3"):
        mean = sum(t.bound for t in told if t.tap == tap) / 2
        assert result.history[-1]["information"][tap] == pytest.approx(mean, rel=1e-9)
    given = fit("fedavg + isr(points=2, spacing=3)", deep(5), data, rounds=1)
    assert given.config["resolved"]["isr"] == {"taps": ["1", "7"], "points": 2, "spacing": 3}
    named = fit("fedavg + isr(points=['3'])", deep(5), data, rounds=1)
    assert named.config["resolved"]["isr"] == {"taps": ["3"], "points": 1, "spacing": 0}
    assert "isr" not in fit("fedavg", deep(2), data, rounds=1).config["resolved"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pooling_is_a_mean_whose_gradient_is_not_spread_out(dtype: torch.dtype) -> None:
    z = torch.randn(3, 4, 7, 5, dtype=dtype, requires_grad=True)
    found = pooled(z)
    assert torch.equal(found, z.flatten(2).mean(2))
    (slope,) = torch.autograd.grad(found.square().sum(), z)
    assert torch.equal(slope, torch.autograd.grad(z.flatten(2).mean(2).square().sum(), z)[0])
    assert (slope.stride()[2:] == (0, 0)) == (dtype is not torch.bfloat16)
