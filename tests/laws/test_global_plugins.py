"""Laws of the plug-ins on updates: robust rules and compression."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom as fl
from fedloom import rng
from fedloom.plugins.compress import largest, packed_bytes, quantised, sparse_bytes
from fedloom.plugins.robust import krum, median, trimmed_mean
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, run_of, shared, small_cnn
from tests.laws.test_global_server import slide, slopes

DATA = federation((9, 14, 5, 8))


def one(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)[:, None]}


def test_rules_by_hand() -> None:
    assert median(one(5, 1, 2))["w"].tolist() == [2.0]
    assert median(one(5, 1, 2, 4))["w"].tolist() == [3.0]
    assert trimmed_mean(one(100, 1, 2, 3, -50), 0.2)["w"].tolist() == [2.0]
    assert krum(one(0, 1, 1.5, 9), bad=1, keep=1)["w"].tolist() == [1.0]
    assert krum(one(0, 1, 1.5, 9), bad=1, keep=2)["w"].tolist() == [1.25]
    assert krum(one(0, 1, 1.5, 9), bad=1, keep=None)["w"].tolist() == pytest.approx([2.5 / 3])


def test_krum_gives_ties_to_the_earlier() -> None:
    assert krum(one(0, 1, 2, 3), bad=1)["w"].tolist() == [0.0]


def test_krum_needs_enough_replies() -> None:
    with pytest.raises(fl.RunError, match="at least 4"):
        krum(one(1, 2, 3), bad=1)
    with pytest.raises(fl.RunError, match="at least 9"):
        krum(one(1, 2, 3, 4), bad=1, keep=9)


def test_robust_limits() -> None:
    plain = shared(fit("fedavg('uniform')", bn_mlp(), DATA))
    all_kept = shared(fit("fedavg + robust('multi_krum', bad=0)", bn_mlp(), DATA))
    buffers = [n for n in plain if "running" in n or "tracked" in n]
    weighted = shared(fit("fedavg", bn_mlp(), DATA, rounds=1))
    once = shared(fit("fedavg + robust('multi_krum', bad=0)", bn_mlp(), DATA, rounds=1))
    assert identical({n: weighted[n] for n in buffers}, once)
    first = {n: v for n, v in shared(fit("fedavg('uniform')", bn_mlp(), DATA, rounds=1)).items() if n not in buffers}
    assert identical(first, once)
    assert set(all_kept) == set(plain)
    a, b = (shared(fit(m, mlp(), DATA)) for m in ("fedavg + robust('trimmed_mean', trim=0.0)", "fedavg('uniform')"))
    assert gap(a, b) < 1e-13


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_one_bad_client_cannot_move_far(rule: str) -> None:
    honest = [([1.0 + 0.1 * i], 0.0) for i in range(5)]
    data = slopes(*honest, ([-1e6], 0.0))
    moved = float(shared(slide(f"fedavg + robust('{rule}', trim=0.2)", data))["w"])
    assert 1.0 <= moved <= 1.4
    assert float(shared(slide("fedavg", data))["w"]) < -1e5


def test_robust_comes_before_server_steps_whatever_the_order() -> None:
    a, b = (shared(fit(m, mlp(), DATA)) for m in ("fedavgm + robust", "fedavg + robust + server_momentum"))
    assert identical(a, b)


def test_robust_conflicts_with_other_means() -> None:
    for base in ("scaffold", "fedexp", "feddyn", "fedavg + robust"):
        with pytest.raises(fl.Conflict, match="reducer"):
            fl.method(f"{base} + robust")
    with pytest.raises(fl.Conflict, match="does not upload"):
        fl.method("local + robust")
    with pytest.raises(fl.UserError, match="expected 'median'"):
        fl.method("fedavg + robust('mode')")


# Compression ----------------------------------------------------------------------------------------------


def test_everything_kept_changes_nothing() -> None:
    a, b = (fit(m, bn_mlp(), DATA, cohort=3) for m in ("fedavg + compress('topk', share=1.0)", "fedavg"))
    assert identical(everything(a), everything(b))
    assert [r["bytes_up"] for r in a.history] == [r["bytes_up"] for r in b.history]


def test_largest_by_hand() -> None:
    assert largest(torch.tensor([[1.0, -4.0], [2.0, 3.0]]), 0.5).tolist() == [[0.0, -4.0], [0.0, 3.0]]
    assert largest(torch.tensor([1.0, -1.0, 1.0]), 0.5).tolist() == [1.0, -1.0, 0.0]
    nearly = torch.tensor([0.3, -0.3, 1e-9, 0.0], dtype=torch.float64) * torch.tensor([1, 1 + 4e-16, 1, 1])
    assert largest(nearly, 0.25).tolist() == [0.3, 0.0, 0.0, 0.0]  # equal but for rounding
    assert largest(nearly, 0.75).tolist() == nearly.tolist()
    assert not largest(torch.zeros(3), 0.5).any()


def test_feedback_loses_nothing() -> None:
    # Two coordinates of constant slopes 3 and 1; one is sent per round, the other waits in memory.
    result = slide("fedavg + compress('topk', share=0.5)", slopes(([3.0, 1.0], 0.0)), 2, rounds=5)
    waiting = run_of(result).clients["0"].memory["compress"]["w"]
    assert (shared(result)["w"] + waiting).tolist() == [15.0, 5.0]
    forgetful = slide("fedavg + compress('topk', share=0.5, feedback=False)", slopes(([3.0, 1.0], 0.0)), 2, rounds=5)
    assert shared(forgetful)["w"].tolist() == [15.0, 0.0]


def test_bytes_are_those_of_the_compressed_form() -> None:
    sizes = {"0.weight": 30, "0.bias": 5, "2.weight": 15, "2.bias": 3}
    for precision, size in (("fp32", 4), ("fp64", 8)):
        dense = sum(sizes.values()) * size
        sparse = sum(min(n * size, math.ceil(0.1 * n) * (size + 4)) for n in sizes.values())
        packed = sum(math.ceil(n * 5 / 8) + size for n in sizes.values())
        for text, expected in (("", dense), ("+ compress", sparse), ("+ compress('quantise', bits=5)", packed)):
            result = fit(f"fedavg {text}", mlp(), DATA, cohort=3, rounds=2, precision=precision)
            assert [r["bytes_up"] for r in result.history] == [3 * expected] * 2


def test_bytes_of_buffers_are_not_compressed() -> None:
    a, b = (fit(m, bn_mlp(), DATA, rounds=1).history[0]["bytes_up"] for m in ("fedavg", "fedavg + compress"))
    leaves = {"0.weight": 30, "1.weight": 5, "1.bias": 5, "3.weight": 15, "3.bias": 3}
    saved = sum(n * 8 - min(n * 8, math.ceil(0.1 * n) * 12) for n in leaves.values())
    assert a - b == len(DATA) * saved


@given(st.integers(2, 10), st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=40)
def test_quantised_values_lie_on_the_grid(bits: int, count: int, seed: int) -> None:
    value = torch.from_numpy(np.random.default_rng(seed).normal(size=count))
    found = quantised(value, bits, torch.tensor(seed))
    unit = float(value.abs().max()) / (2 ** (bits - 1) - 1)
    assert float((found - value).abs().max()) <= unit * (1 + 1e-9)
    steps = found / unit
    assert float((steps - steps.round()).abs().max()) < 1e-6
    assert len(found.unique()) <= 2**bits - 1
    assert packed_bytes({"w": value}, bits) == math.ceil(count * bits / 8) + 8
    assert sparse_bytes({"w": value}, 0.5) == min(count * 8, math.ceil(count / 2) * 12)


def test_quantised_is_right_on_average() -> None:
    value = torch.linspace(-1, 1, 9, dtype=torch.float64)
    keys = [torch.tensor(rng.key_of(0, i)) for i in range(4000)]
    mean = torch.stack([quantised(value, 3, k) for k in keys]).mean(0)
    assert float((mean - value).abs().max()) < 0.02
    assert not quantised(torch.zeros(4), 3, keys[0]).any()


def test_compress_refuses_what_it_cannot_do() -> None:
    for text in (
        "compress('zip')",
        "compress(share=0.0)",
        "compress('quantise', bits=1)",
        "compress('quantise', bits=2.5)",
    ):
        with pytest.raises(fl.UserError, match="compress"):
            fl.method(f"fedavg + {text}")
    with pytest.raises(fl.Conflict, match="must follow"):
        fl.method("fedavg + compress + clip(1.0)")
    with pytest.raises(fl.Conflict, match="wire form"):
        fl.method("fedavg + compress + compress('quantise')")


# Settings other than the defaults, on both engines --------------------------------------------------------

VARIANTS = [
    "fedavg + robust('trimmed_mean', trim=0.25)",
    "fedavg + robust('krum')",
    "fedavg + robust('multi_krum', keep=2)",
    "fedavg + compress('quantise', bits=4)",
    "fedavg + compress('quantise', bits=4, feedback=True)",
    "fedavg + compress('topk', share=0.3, feedback=False)",
    "moon(projection=4)",
    "fedintr(projection=4, pool=False)",
    "fedir(clip=(0.5, 2.0))",
    "fedproto(predict='nearest')",
    "fedproto(weight='uniform')",
    "balancefl(augment=False)",
    "fedntd(tau=3.0)",
    "qfedavg(q=0.5)",
    "local_full(epochs=2)",
]


@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.parametrize("optimizer", [fl.sgd(0.1, momentum=0.9), fl.adam(1e-2)], ids=["sgd", "adam"])
def test_variant_is_the_same_on_both_engines(text: str, optimizer: Any) -> None:
    data = federation((1, 9, 14, 5, 8), (1, 6, 6), one_class=2)
    a, b = (fit(text, small_cnn(), data, engine=e, rounds=2, optimizer=optimizer) for e in ("loop", "vectorised"))
    assert gap(everything(a), everything(b)) < 1e-10
    for mine, theirs in zip(a.history, b.history, strict=True):
        assert mine["bytes_up"] == theirs["bytes_up"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-8)


class Odd(nn.Module):
    """With a parameter of no dimension and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.scale * self.body(x).tanh()) + self.nothing.sum()


@pytest.mark.parametrize(
    "method", ["scaffold", "fedavg + compress('topk', share=0.3)", "fedavg + compress('quantise')"]
)
def test_parameters_of_no_dimension_and_of_no_elements(method: str) -> None:
    a, b = (fit(method, Odd, DATA, engine=engine) for engine in ("loop", "vectorised"))
    assert gap(everything(a), everything(b)) < 1e-9
    assert shared(a)["scale"] != 1
