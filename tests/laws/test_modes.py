"""Centralised, federated and hybrid training: limits bit for bit, the mixture by hand, every method in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedloom as fl
from fedloom.data import ClientData, concatenate
from fedloom.rounds.modes import CLOUD, Mixing, cosine, mix
from fedloom.spec.optimizer import Optimizer
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, mostly_slow, own, run_of, shared

SITES = federation((9, 14, 5))
ROWS = federation((11,), seed=7)["0"].train
DATA = SITES.with_cloud((ROWS.x, ROWS.y))
METHODS = ["fedavg", "fedprox(mu=0.4)", "scaffold", "fedavgm", "fedadam", "fedper", "fedbn", "ditto", "fedmap(1.0)"]


def lone(rows=ROWS) -> fl.Federation:  # type: ignore[no-untyped-def]
    """A federation whose only participant is the cloud."""
    return fl.Federation.from_arrays([((rows.x, rows.y), (rows.x, rows.y))], ids=[CLOUD])


def fixed(alpha: float, **more: object) -> dict[str, object]:
    return {"mixing": "fixed", "alpha": alpha, **more}


@pytest.mark.parametrize("optimizer", [fl.sgd(lr=0.1, momentum=0.9, decay=0.9), fl.adam(lr=0.01)])
@pytest.mark.parametrize("method", METHODS)
def test_all_cloud_is_centralised_bit_for_bit(method: str, optimizer: Optimizer) -> None:
    options = {"optimizer": optimizer, "model": bn_mlp()}
    hybrid = fit(method, data=DATA, mode="hybrid", hybrid=fixed(1.0), **options)
    central = fit(method, data=lone(), mode="centralised", optimizer_state="reset", **options)
    assert identical(shared(central), shared(hybrid))
    mine, theirs = run_of(hybrid), run_of(central)
    for owner, memory in theirs.state.memory.items():
        assert identical(memory, mine.state.memory[f"{CLOUD}/{owner}"])
    assert identical(theirs.clients[CLOUD].leaves, mine.clients[CLOUD].leaves)
    assert all(h["bytes_up"] == 0 and h["clients"] == [] for h in hybrid.history)


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize("method", METHODS)
def test_no_cloud_is_federated_bit_for_bit(method: str, engine: str) -> None:
    hybrid = fit(method, bn_mlp(), DATA, mode="hybrid", hybrid=fixed(0.0), cohort=2, engine=engine)
    plain = fit(method, bn_mlp(), SITES, cohort=2, engine=engine)
    assert identical(everything(plain), everything(hybrid))
    assert CLOUD not in run_of(hybrid).clients


def test_the_mixture_by_hand() -> None:
    theta, cloud, sites = ({"w": torch.tensor(v)} for v in (0.0, 0.0 - 0.1 * 2.0, -1.0))
    assert float(mix(theta, cloud, sites, 0.25)["w"]) == pytest.approx(-0.8)
    counters = ({"n": torch.tensor(v)} for v in (1, 5, 3))
    assert int(mix(*counters, 0.25)["n"]) == 5


def test_the_mixture_in_a_run() -> None:
    """Buffers, parameters and adapters alike: theta + a d_CL + (1 - a) d_FL."""
    method = "fedavg + isr(points=1)"
    ends = {a: shared(fit(method, bn_mlp(), DATA, mode="hybrid", hybrid=fixed(a), rounds=1)) for a in (0.0, 0.3, 1.0)}
    start = run_of(fit(method, bn_mlp(), DATA, mode="hybrid", hybrid=fixed(0.3), rounds=1)).bound.start
    names = [n for n, v in start.items() if v.is_floating_point()]
    assert any("running" in n for n in names)
    assert any(n.startswith("isr:") for n in names)
    for n in names:
        expected = start[n] + 0.3 * (ends[1.0][n] - start[n]) + 0.7 * (ends[0.0][n] - start[n])
        assert torch.allclose(ends[0.3][n], expected, rtol=1e-12, atol=1e-14), n


def test_the_cloud_has_personal_leaves_of_its_own() -> None:
    result = fit("fedper", data=DATA, mode="hybrid", hybrid=fixed(0.5))
    run = run_of(result)
    start = run.bound.start
    heads = [run.clients[name].leaves["2.weight"] for name in (CLOUD, "0", "1", "2")]
    for i, head in enumerate(heads):
        assert not torch.equal(head, start["2.weight"])
        assert all(not torch.equal(head, other) for other in heads[i + 1 :])
    assert torch.equal(shared(result)["2.weight"], start["2.weight"])


def test_alternating_begins_with_the_cloud() -> None:
    for period, shares in ((1, [1, 0, 1, 0]), (2, [1, 1, 0, 0])):
        options = {"mixing": "alternate", "period": period}
        result = fit("fedavg", data=DATA, mode="hybrid", hybrid=options, rounds=4)
        assert [h["alpha"] for h in result.history] == shares
        assert [bool(h["clients"]) for h in result.history] == [not s for s in shares]


def test_rules_by_hand() -> None:
    signed, literal, proportional = (Mixing(rule=r) for r in ("signed", "literal", "proportional"))  # type: ignore[arg-type]
    assert [round(signed.next(0.5, s), 12) for s in (1.0, 0.0, -1.0)] == [0.4, 0.5, 0.6]
    assert signed.next(0.06, 1.0) == 0.05
    assert signed.next(0.95, -1.0) == 1.0
    assert [round(literal.next(0.5, s), 12) for s in (1.0, 0.0, -1.0)] == [0.5, 0.6, 0.7]
    assert literal.next(1.0, 1.0) == 1.0
    assert [proportional.next(0.5, s) for s in (1.0, 0.0, -1.0)] == [0.05, 0.525, 1.0]


@given(st.floats(0, 1), st.floats(-1, 1))
def test_rules_in_general(a: float, s: float) -> None:
    assert Mixing(rule="literal").next(a, s) >= a
    for rule in ("signed", "proportional"):
        assert 0.05 <= Mixing(rule=rule).next(a, s) <= 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["signed", "literal", "proportional"])
def test_adaptive_shares_follow_the_alignment_of_the_round_before(rule: str) -> None:
    result = fit("fedavg", data=DATA, mode="hybrid", hybrid={"rule": rule, "alpha": 0.6}, rounds=4)
    share = 0.6
    for record in result.history:
        assert record["alpha"] == pytest.approx(share)
        assert -1 <= record["alignment"] <= 1
        share = Mixing(rule=rule).next(share, record["alignment"])  # type: ignore[arg-type]


def test_an_adaptive_share_leaves_one_again() -> None:
    options = {"rule": "signed", "alpha": 1.0, "beta": 0.3}
    result = fit("fedavg", data=DATA, mode="hybrid", hybrid=options, rounds=2, epochs=1)
    first, second = result.history
    assert first["alpha"] == 1.0
    assert first["alignment"] is not None
    assert second["alpha"] == pytest.approx(min(1.0, max(0.05, 1.0 - 0.3 * first["alignment"])))
    central = fit("fedavg", data=lone(), mode="centralised", optimizer_state="reset", rounds=1, epochs=1)
    one = fit("fedavg", data=DATA, mode="hybrid", hybrid=options, rounds=1, epochs=1)
    assert identical(shared(central), shared(one))


def test_alignment_by_hand() -> None:
    zero = {"w": torch.zeros(2)}
    ends = [{"w": torch.tensor(v)} for v in ([1.0, 0.0], [1.0, 1.0], [-2.0, 0.0], [0.0, 0.0])]
    found = [cosine(zero, ends[0], e, ("w",)) for e in ends]
    assert found == pytest.approx([1.0, 2**-0.5, -1.0, 0.0])


@pytest.mark.parametrize(("cl_gradient", "steps"), [("epochs", 6), ("minibatch", 1), ("full", 1)])
def test_the_three_gradients_of_the_cloud(cl_gradient: str, steps: int) -> None:
    """Plain PyTorch on the cloud's rows: E epochs, one mini-batch, all rows at once."""
    from tests.oracles import naive

    client = ClientData(CLOUD, ROWS)
    model = naive.initial(mlp())
    order = naive.order(client, 1) if cl_gradient != "full" else [torch.arange(len(ROWS))]
    assert naive.train(model, client, order[:steps]) == steps
    result = fit("fedavg", data=DATA, mode="hybrid", hybrid=fixed(1.0, cl_gradient=cl_gradient), rounds=1)
    assert gap(naive.state(model), shared(result)) < 1e-12


def test_one_full_batch_step_is_the_same_federated_and_centralised() -> None:
    options = {"epochs": 1, "batch_size": "full", "rounds": 4, "optimizer": fl.sgd(lr=0.3)}
    apart, together = (fit("fedavg", data=SITES, mode=m, **options) for m in ("federated", "centralised"))
    assert gap(shared(together), shared(apart)) < 1e-12


@pytest.mark.parametrize("optimizer", [fl.sgd(lr=0.1, momentum=0.9), fl.adam(lr=0.01)])
def test_centralised_is_plain_training_that_keeps_its_optimiser(optimizer: Optimizer) -> None:
    """Three rounds of two epochs against ``torch.optim`` over six, on the rows of all clients."""
    from tests.oracles import naive

    pool = ClientData("pool", concatenate([c.train for c in SITES]))
    for state in ("keep", "reset"):
        model = naive.initial(mlp())
        x, y = naive.rows(pool)

        def fresh(model: nn.Module = model) -> torch.optim.Optimizer:
            if optimizer.name == "adam":
                return torch.optim.Adam(model.parameters(), lr=0.01)
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        stepper = fresh()
        for r in (1, 2, 3):
            stepper = fresh() if state == "reset" else stepper
            for index in naive.order(pool, r):
                stepper.zero_grad()
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                stepper.step()
        for engine in ("loop", "vectorised"):
            result = fit(
                "fedavg", data=SITES, mode="centralised", optimizer_state=state, optimizer=optimizer, engine=engine
            )
            assert gap(naive.state(model), shared(result)) < 1e-10
    default = fit("fedavg", data=SITES, mode="centralised", optimizer=optimizer)
    kept = fit("fedavg", data=SITES, mode="centralised", optimizer=optimizer, optimizer_state="keep")
    assert identical(shared(default), shared(kept))
    assert all(h["bytes_up"] == h["bytes_down"] == 0 for h in default.history)


def test_rows_are_moved_not_copied() -> None:
    result = fit("fedavg", data=SITES, mode="hybrid", hybrid={"cloud_fraction": 0.3})
    sizes = {c.id: len(c.train) for c in SITES}
    left = {n: len(s.train) for n, s in run_of(result).sites.items()}
    assert left == {n: sizes[n] - round(0.3 * sizes[n]) for n in sizes}
    whole = fit("fedavg", data=SITES, mode="hybrid", hybrid={"cloud_clients": ["1"]})
    assert set(run_of(whole).sites) == {"0", "2"}


@pytest.mark.parametrize(
    "options",
    [
        {"mixing": "both"},
        {"rule": "sign"},
        {"alpha": 1.5},
        {"alpha_min": 0.9, "alpha_max": 0.1},
        {"period": 0},
        {"beta": -1.0},
        {"cloud_fraction": 1.0},
        {"cl_gradient": "half"},
        {"cloud_clients": ["0", "1", "2"]},
        {"nonsense": 1},
    ],
)
def test_ranges(options: dict[str, object]) -> None:
    with pytest.raises(fl.UserError):
        fit("fedavg", data=DATA, mode="hybrid", hybrid=options)


def test_hybrid_needs_cloud_rows() -> None:
    with pytest.raises(fl.UserError, match="cloud"):
        fit("fedavg", data=SITES, mode="hybrid")


KEPT = ("fedaims", "fedala", "fedavg", "fedlag", "fedmap", "omniisr", "scaffold")


@pytest.mark.parametrize("mode", ["centralised", "hybrid"])
@pytest.mark.parametrize("method", mostly_slow(fl.list_methods(), KEPT))
def test_every_method_in_every_mode(method: str, mode: str) -> None:
    """Two rounds, finite, and the clients' models differ from the start; what is refused says why."""
    options = {"hybrid": {"mixing": "adaptive"}} if mode == "hybrid" else {}
    result = fit(method, mlp(), DATA, mode=mode, rounds=2, epochs=1, **options)
    assert len(result.history) == 2
    for client in SITES:
        mine = own(result, client.id)
        assert all(torch.isfinite(v).all() for v in mine.values())
        assert not identical(mine, run_of(result).bound.start)


@pytest.mark.parametrize("mode", ["centralised", "federated", "hybrid"])
@pytest.mark.parametrize(
    "plugins", ["isr(points=1)", "lag(k=1)", "isr(points=1) + lag(k=1)", "map_prior(1.0) + isr(points=1)"]
)
def test_stacks_in_every_mode(plugins: str, mode: str) -> None:
    for engine in ("loop", "vectorised"):
        result = fit(f"fedavg + {plugins}", mlp(), DATA, mode=mode, rounds=2, epochs=1, engine=engine)
        assert all(torch.isfinite(v).all() for v in shared(result).values())


class Stop(Exception):
    """Ends a run from a callback, as a crash would."""


@pytest.mark.parametrize("mode", ["hybrid", "centralised", "federated"])
@pytest.mark.parametrize("method", ["fedavgm + lag(k=1, xi=0.5)", "fedmap(prior=learnable_gaussian())"])
def test_an_interrupted_run_goes_on_bit_for_bit(method: str, mode: str, tmp_path: Path) -> None:
    """The cloud's memory, its own leaves, the share, LAG's choices and what a prior has learnt are all in a checkpoint."""

    def crash(record: dict[str, object]) -> None:
        if record["round"] == 2:
            raise Stop

    options = {"mode": mode, "rounds": 4, "epochs": 1, "cohort": 1.0 if mode == "centralised" else 2}
    whole = fit(method, bn_mlp(), DATA, **options)
    with pytest.raises(Stop):
        fit(method, bn_mlp(), DATA, out=tmp_path / "cut", callbacks=[crash], **options)
    resumed = fit(method, bn_mlp(), DATA, out=tmp_path / "cut", resume=True, **options)
    left, right = everything(whole), everything(resumed)
    assert set(left) == set(right)
    assert identical(left, right)
    assert [h.get("alpha") for h in whole.history] == [h.get("alpha") for h in resumed.history]
