"""Laws of the server rules: limits bit for bit, and the cases that can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.spec.reducers import mean
from tests.helpers import bn_mlp, federation, fit, gap, identical, mlp, run_of, shared

DATA = federation((9, 14, 5, 8))


class Vector(nn.Module):
    """A model that is a vector w; its output is w x, so a client's rows are its gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w)[:, None]


SLOPE = fl.Task(lambda out, y: y - out[:, 0], primary="loss")
"""``f_k(w) = y_k - w x_k``: each step of size 1 adds x_k, whatever w is, and the loss at w = 0 is y_k."""


def slopes(*clients: tuple[list[float], float], rows: int = 1) -> fl.Federation:
    """Clients given by (x_k, y_k), each repeated."""
    made = [(np.tile(np.float32(x), (rows, 1)), np.full(rows, y, np.float32)) for x, y in clients]
    return fl.Federation.from_arrays([(part, part) for part in made])


def slide(method: str | fl.Method, data: fl.Federation, size: int = 1, **options: object) -> fl.Result:
    options = {"rounds": 1, "epochs": 1, "batch_size": 1, "optimizer": fl.sgd(1.0), "task": SLOPE} | options
    return fit(method, lambda: Vector(size), data, **options)


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
@pytest.mark.parametrize(
    ("limit", "base"),
    [
        ("fedavgm(beta=0)", "fedavg"),
        ("fedavg + server_momentum(0.0)", "fedavg"),
        ("fedavg + server_momentum(0.7)", "fedavgm(0.7)"),
        ("qfedavg(q=0)", "fedavg(weight='uniform')"),
    ],
)
def test_limit(limit: str, base: str, make: object) -> None:
    a, b = (fit(m, make, DATA, cohort=3, optimizer=fl.sgd(0.1, momentum=0.5)) for m in (limit, base))
    assert identical(shared(a), shared(b))


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi", "fedexp", "fednova", "qfedavg"])
def test_buffers_are_plainly_averaged(name: str) -> None:
    a, b = (fit(m, bn_mlp(), DATA, rounds=1) for m in (name, "fedavg"))
    for leaf in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(shared(a)[leaf], shared(b)[leaf])
    assert not torch.equal(shared(a)["0.weight"], shared(b)["0.weight"]) or name == "fedavgm"


def test_momentum_of_a_constant_update() -> None:
    beta, rounds = 0.7, 6
    result = slide(f"fedavgm({beta})", slopes(([2.0], 0.0)), rounds=rounds)
    expected = 2 * sum((1 - beta**i) / (1 - beta) for i in range(1, rounds + 1))
    assert float(shared(result)["w"]) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("name", "v"), [("fedadam", 0.0199), ("fedyogi", 0.02)])
def test_adaptive_first_round(name: str, v: float) -> None:
    result = slide(f"{name}(eta_s=0.01, tau=0.1)", slopes(([1.0], 0.0)))
    assert float(run_of(result).state.memory[name]["v/w"]) == pytest.approx(v, rel=1e-14)
    assert float(shared(result)["w"]) == pytest.approx(0.01 * 0.1 / (v**0.5 + 0.1), rel=1e-14)


def test_fedexp_by_hand() -> None:
    four = slopes(*[(row, 0.0) for row in np.eye(4).tolist()])
    assert shared(slide("fedexp(eps=0)", four, 4))["w"].tolist() == [0.5] * 4
    two = slopes(*[(row, 0.0) for row in np.eye(2).tolist()])
    assert shared(slide("fedexp(eps=0)", two, 2))["w"].tolist() == [0.5] * 2
    same = slopes(([3.0], 0.0), ([3.0], 0.0))
    assert identical(shared(slide("fedexp", same)), shared(slide("fedavg", same)))
    opposite = slopes(([3.0], 0.0), ([-3.0], 0.0))
    assert shared(slide("fedexp(eps=0)", opposite))["w"].tolist() == [0.0]


def test_fedexp_tests_the_mean_of_the_last_two() -> None:
    data = slopes(([3.0], 0.0))
    assert [float(r) for r in run_of(slide("fedexp", data, rounds=2)).desk("0").leaves["w"]] == [4.5]


def test_fednova_by_hand() -> None:
    # Displacements 2 in one step and 3 in three: FedAvg moves 2.5, FedNova 2 * (2/1 + 3/3) / 2 = 3.
    data = slopes(([2.0], 0.0), ([1.0], 0.0), rows=3)
    for name, expected in (("fednova", 3.0), ("fedavg", 2.5)):
        run = run_of(slide(name, data))
        before = float(run.state.leaves["w"])
        run.play(["0", "1"], 2, {"0": 1 / 3})
        assert float(run.state.leaves["w"]) - before == pytest.approx(expected, rel=1e-14)


def test_fednova_with_equal_steps_is_fedavg_to_rounding() -> None:
    data = federation((8, 8, 8))
    for momentum in (0.0, 0.9):
        a, b = (shared(fit(m, mlp(), data, optimizer=fl.sgd(0.1, momentum=momentum))) for m in ("fednova", "fedavg"))
        assert gap(a, b) < 1e-13


def test_qfedavg_by_hand() -> None:
    result = slide("qfedavg(q=1)", slopes(([1.0], 1.0), ([1.0], 2.0)))
    assert float(shared(result)["w"]) == pytest.approx(3 / 5, rel=1e-14)


@pytest.mark.parametrize("name", ["fedexp", "fednova", "qfedavg"])
def test_a_second_owner_of_the_mean_is_refused(name: str) -> None:
    with pytest.raises(fl.Conflict, match="the reducer of the entry 'delta'"):
        fl.method(f"{name} + control_variates")
    assert fl.method("fedavgm + control_variates").reducers()["delta"] == mean("uniform")


def test_wrong_settings_are_refused() -> None:
    for text in ("fedavgm(beta=1)", "fedadam(tau=0)", "fedexp(eps=-1)", "qfedavg(q=-1)"):
        with pytest.raises(fl.UserError, match="out of range"):
            fl.method(text)
