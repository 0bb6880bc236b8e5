"""Limits of FedLAG, its scores by hand, and what it is refused on."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom as fl
from fedloom.ops import similarity
from fedloom.ops.gram import gram
from fedloom.plugins.lag import THETA, _Lag, conflicts, variance
from fedloom.spec.seen import Seen
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, mostly_slow, own, run_of, shared

DATA = federation((9, 14, 5, 8))
A = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
B = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-1.0, 0.0]])


def test_scores_by_hand() -> None:
    assert conflicts(gram([A])) == 1
    assert conflicts(gram([B])) == 2
    assert conflicts(gram([B]), -0.8) == 1
    assert conflicts(gram([A]), -1.0) == conflicts(gram([B]), -1.0) == 0
    assert conflicts(gram([A]), 2.0) == 3
    assert conflicts(gram([torch.zeros(3, 2)])) == 0
    # A weight and a bias of one layer are one vector.
    assert conflicts(gram([B[:, :1], B[:, 1:]])) == 2
    # Variance: mean ||h||^2 - ||mean h||^2 = 5/3 - 1/9.
    assert variance(gram([B])).item() == pytest.approx(5 / 3 - 1 / 9, rel=1e-9)


vectors = st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=2, max_size=6)


@given(vectors, st.lists(st.floats(0.1, 10), min_size=6, max_size=6), st.floats(-1, 1))
def test_scores_do_not_depend_on_sign_or_length(rows: list[list[int]], scale: list[float], xi: float) -> None:
    h = torch.tensor(rows, dtype=torch.float64)
    count = conflicts(gram([h]), xi)
    assert 0 <= count <= len(rows) * (len(rows) - 1) // 2
    assert conflicts(gram([-h]), xi) == count
    stretched = h * torch.tensor(scale[: len(rows)], dtype=torch.float64)[:, None]
    cosines = torch.nn.functional.cosine_similarity(h[:, None], h[None], dim=-1)
    if float((cosines - xi).abs().min()) > 1e-6:
        assert conflicts(gram([stretched]), xi) == count


def test_a_thousand_clients_are_one_product() -> None:
    h = torch.randn(1000, 6_000, generator=torch.Generator().manual_seed(0))
    begun = time.perf_counter()
    products = gram([h])
    count = conflicts(products)
    assert time.perf_counter() - begun < 60
    assert products.shape == (1000, 1000)
    assert 0.4 < count / (1000 * 999 / 2) < 0.6
    assert torch.allclose(products[3, 7], h[3].double() @ h[7].double(), rtol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize(
    "base", ["fedavg", "fedprox(mu=0.3)", "scaffold", "fedper", "fedrep", "ditto", "fedbn", "fedavg + clip(0.1)"]
)
def test_k_zero_is_the_base_bit_for_bit(base: str, engine: str) -> None:
    for model in (mlp(), bn_mlp()):
        plain = fit(base, model, DATA, cohort=3, engine=engine)
        stacked = fit(f"{base} + lag(k=0)", model, DATA, cohort=3, engine=engine)
        assert identical(everything(plain), everything(stacked))
        assert [h["bytes_down"] for h in plain.history] == [h["bytes_down"] for h in stacked.history]
        assert [h["bytes_up"] for h in plain.history] == [h["bytes_up"] for h in stacked.history]
        assert all(h["lag"]["score"] for h in stacked.history)


def test_fedlag_with_k_zero_is_fedavg_with_the_same_weights() -> None:
    for weights, weight in (("uniform", "uniform"), ("samples", "n")):
        plain, lag = fit(fl.fedavg(weight=weight), data=DATA), fit(fl.fedlag(k=0, weights=weights), data=DATA)
        assert identical(shared(plain), shared(lag))


@pytest.mark.parametrize("granularity", ["layer", "tensor"])
def test_every_layer_personal_is_local(granularity: str) -> None:
    alone = fit("local", data=DATA, rounds=4)
    lag = fit(f"fedavg + lag(k=99, xi=2, granularity={granularity!r})", data=DATA, rounds=4)
    assert [h["bytes_down"] for h in lag.history][1:] == [0, 0, 0]
    for client in DATA:
        assert identical(own(alone, client.id), own(lag, client.id))


def test_corrections_vanish_with_the_shared_layers() -> None:
    """With every layer personal from the start, a proximal term and control variates act on nothing."""
    alone = fit("local", data=DATA)
    for base in ("fedprox(mu=5.0)", "scaffold"):
        lag = fit(f"{base} + lag(k=99, select='first')", data=DATA)
        for client in DATA:
            assert identical(own(alone, client.id), own(lag, client.id))


def test_xi_of_minus_one_shares_everything() -> None:
    lag, plain = fit(fl.fedlag(k=9, xi=-1.0), data=DATA), fit(fl.fedavg(weight="uniform"), data=DATA)
    assert identical(shared(plain), shared(lag))
    assert all(h["lag"]["personal"] == [] for h in lag.history)


def test_layers_without_conflict_stay_shared_unless_asked() -> None:
    same = federation((8, 8))
    data = fl.Federation.from_arrays(
        [((c.train.x, c.train.y), (c.test.x, c.test.y)) for c in (same["0"], same["0"]) if c.test]
    )
    options = {"batch_size": "full", "epochs": 1, "rounds": 2}
    kept = fit(fl.fedlag(k=1), data=data, **options)
    assert [h["lag"]["personal"] for h in kept.history] == [[], []]
    forced = fit(fl.fedlag(k=1, require_conflict=False), data=data, **options)
    # Equal scores: the deeper layer first.
    assert forced.history[0]["lag"]["personal"] == ["2.weight", "2.bias"]


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("select", "layers"),
    [("first", ["0", "2"]), ("middle", ["2", "4"]), ("last", ["4", "5"]), (["0", "5"], ["0", "5"])],
)
def test_fixed_layers_are_personal_layers(select: str | list[str], layers: list[str]) -> None:
    lag = fit(fl.fedlag(k=2, select=select), deep, DATA)
    fixed = fit(fl.compose(fl.fedavg(weight="uniform"), fl.personal(tuple(f"{n}.*" for n in layers))), deep, DATA)
    for client in DATA:
        assert identical(own(fixed, client.id), own(lag, client.id))
    assert lag.history[0]["bytes_down"] == fixed.history[0]["bytes_down"]
    assert {n.split(".")[0] for n in lag.history[0]["lag"]["personal"]} == set(layers)


def test_ranks_only_what_the_base_shares() -> None:
    lag = fit("fedper + lag(k=5, xi=2)", deep, DATA)
    assert set(lag.history[0]["lag"]["score"]) == {"0", "2", "4"}
    assert "5.weight" not in lag.history[0]["lag"]["personal"]


def test_state_of_a_leaf_that_turns_personal_starts_from_zero() -> None:
    result = fit("scaffold + lag(k=1, select='last')", data=DATA)
    memory = everything(result)
    for name, value in memory.items():
        if "control_variates" in name:
            assert bool((value == 0).all()) == name.split()[-1].startswith("2."), name
    plain = fit("fedper", data=DATA)
    assert shared(result).keys() == shared(plain).keys()


def test_corrections_leave_personal_layers_alone() -> None:
    """A proximal term on a base with a personal last layer, by rule and by gate, is the same thing."""
    gate = fit("fedprox(mu=0.7) + lag(k=1, select='last', weights='samples')", data=DATA)
    rule = fit("fedprox(mu=0.7) + personal('2.*')", data=DATA)
    for client in DATA:
        assert identical(own(rule, client.id), own(gate, client.id))
    gate = fit("scaffold + lag(k=1, select='last')", data=DATA)
    rule = fit("fedavg + personal('2.*') + control_variates", data=DATA)
    for client in DATA:
        assert gap(own(rule, client.id), own(gate, client.id)) < 1e-12


@pytest.mark.parametrize(
    "base",
    [
        "fedavgm",
        "fedadam",
        "fedyogi",
        "feddyn(a=0.1)",
        "fedexp",
        "fednova",
        "moon",
        "fedntd",
        "fedavg + isr(points=1)",
    ],
)
def test_a_gate_that_stays_closed_is_a_personal_leaf(base: str) -> None:
    """Terms, client memory and server stages act on the leaves that are shared, whoever made the others personal."""
    gate = fit(f"{base} + lag(k=1, select='last', weights='samples')", data=DATA)
    rule = fit(f"{base} + personal('2.*')", data=DATA)
    for client in DATA:
        mine, theirs = own(gate, client.id), own(rule, client.id)
        assert gap(theirs, mine) < 1e-12
    for record, other in zip(gate.history, rule.history, strict=True):
        assert record["bytes_down"] == other["bytes_down"]
    initial = run_of(gate).bound.server_memory
    for owner, memory in run_of(gate).state.memory.items():
        if owner not in ("lag", "fedexp"):
            assert all(
                torch.equal(v, initial[owner][k]) for k, v in memory.items() if k.split("/")[-1].startswith("2.")
            )


REFUSED = {"fedaf", "fedas", "fedavg_then_local", "fedcac", "fedlag", "fedmap", "fedproto", "local", "local_full"}
"""Methods whose clients share no layer that they train, or that decide themselves what clients start from."""


KEPT = ("fedaims", "fedala", "fedavg", "fedexp", "fedrod", "pfedme", "scaffold")


@pytest.mark.parametrize("method", mostly_slow(sorted(set(fl.list_methods()) - REFUSED), KEPT))
def test_on_every_method_that_shares_layers(method: str) -> None:
    """Both engines, with layers that are personal and return."""
    text = f"{method} + lag(k=1, xi=0.5)"
    a, b = (fit(text, deep, DATA, rounds=3, epochs=1, cohort=3, engine=e) for e in ("loop", "vectorised"))
    assert [h["lag"] for h in a.history] == [h["lag"] for h in b.history]
    assert any(h["lag"]["personal"] for h in a.history)
    left, right = everything(a), everything(b)
    assert gap(left, right) < 1e-10
    assert all(torch.isfinite(v).all() for v in left.values())


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_refused_methods(method: str) -> None:
    with pytest.raises(fl.Conflict, match="lag"):
        fit(f"{method} + lag(k=1)", deep, DATA, rounds=1)


@pytest.mark.parametrize("text", ["local + lag", "fedproto + lag", "fedavg + lag + lag", "fedavg_then_local + lag"])
def test_refused(text: str) -> None:
    with pytest.raises(fl.Conflict):
        fit(text, data=DATA)


def test_refused_where_nothing_is_shared() -> None:
    with pytest.raises(fl.Conflict, match="nothing to rank"):
        fit("fedavg + personal('*') + lag", data=DATA)


@pytest.mark.parametrize(
    "arguments",
    [{"k": -1}, {"xi": -2.0}, {"k": 1.5}, {"weights": "n"}, {"schedule": "never"}, {"select": "top"}, {"norm": "x"}],
)
def test_ranges(arguments: dict[str, object]) -> None:
    with pytest.raises(fl.UserError, match="lag"):
        fl.lag(**arguments)  # type: ignore[arg-type]


def test_unknown_layer() -> None:
    with pytest.raises(fl.UserError, match="layers that can be personal"):
        fit(fl.fedlag(select=["nowhere"]), data=DATA)


def test_the_mean_of_personal_layers_is_kept_for_newcomers() -> None:
    result = fit(fl.fedlag(k=9, xi=2.0), data=DATA, rounds=3)
    models = [own(result, c.id) for c in DATA]
    mean: dict[str, Tensor] = {k: torch.stack([m[k] for m in models]).mean(0) for k in models[0]}
    assert gap(mean, shared(result)) < 1e-12


@pytest.mark.parametrize(
    "text",
    [
        "fedaims + lag(k=1, xi=0.5)",
        "scaffold + isr(points=1) + lag(k=1, xi=0.5)",
        "fedrep + map_prior(1.0) + isr(points=1)",
        "fedprox(mu=0.1) + lag(k=1, xi=0.5) + clip(0.5) + noise(0.01)",
        "fedavg + lag(k=1, xi=0.5) + control_variates",
        "fedavg + lag(k=2, xi=0.5, granularity='tensor') + server_momentum(beta=0.5)",
        "fedavg + robust('median') + lag(k=1, xi=0.5)",
        "fedmap(prior=student_t()) + isr(points=1) + clip(0.5)",
        "fedper + lag(k=1, xi=0.5, schedule='warmup_then_per_round', warmup=1) + isr(points=1)",
    ],
)
def test_stacks_on_both_engines(text: str) -> None:
    a, b = (fit(text, deep, DATA, rounds=3, epochs=1, cohort=3, engine=e) for e in ("loop", "vectorised"))
    assert [h.get("lag") for h in a.history] == [h.get("lag") for h in b.history]
    assert gap(everything(a), everything(b)) < 1e-10
    assert [h["bytes_up"] for h in a.history] == [h["bytes_up"] for h in b.history]
    assert [h["bytes_down"] for h in a.history] == [h["bytes_down"] for h in b.history]


def test_gates_and_scores_are_found_without_looking_at_every_client() -> None:
    """In front of what clients have, as a run makes the memory and as a checkpoint that sorts names brings it back."""
    run = run_of(fit("fedavg + lag(k=1)", mlp(), federation((8, 8, 8)), rounds=2))
    memory, method = run.state.memory["lag"], run.bound.method
    assert sum(name.startswith(THETA) for name in memory) == 3
    (stage,) = method.server.stages
    for held in (memory, dict(sorted(memory.items()))):
        assert method.server.gate is not None
        assert stage.report is not None
        assert {f"gate:{n}" for n in method.server.gate({"lag": held})} == {n for n in memory if n.startswith("gate:")}
        assert {f"score:{n}" for n in stage.report(held)["score"]} == {n for n in memory if n.startswith("score:")}


@pytest.mark.parametrize("room", [1, 1 << 24])
def test_some_users_at_a_time(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many users fit into memory: to the bit; the server holds no more than what each user has."""
    whole = run_of(fit(fl.fedlag(k=1, xi=2.0), deep, DATA, rounds=2))
    stage, memory = whole.bound.method.server.stages[-1], whole.state.memory["lag"]
    leaves = [n.removeprefix("gate:") for n in memory if n.startswith("gate:")]
    ids = [c.id for c in DATA]
    cohort = whole.cohort(ids, 3)
    moved = {n: torch.randn(len(ids), *whole.state.leaves[n].shape) for n in leaves}
    expected, kept = stage.fn({"lag": moved}, memory, cohort)
    monkeypatch.setattr(similarity, "CHUNK", room)
    found, made = stage.fn({"lag": moved}, memory, cohort)
    assert expected["personal"].keys() == found["personal"].keys() != set()
    assert all(torch.equal(v, found["personal"][n]) for n, v in expected["personal"].items())
    assert all(torch.equal(made[n], v) for n, v in kept.items() if n.startswith(THETA))
    assert all(v.untyped_storage().nbytes() == v.nbytes for n, v in made.items() if n.startswith(THETA))


def test_what_a_personal_leaf_is_measured_from() -> None:
    """The client's own start; no operation is made for it where the host knows that it is personal."""
    names, one = ("shared", "personal", "plain"), torch.ones(())
    received, start = ({n: torch.full((2,), v + i) for i, n in enumerate(names)} for v in (0.0, 10.0))
    rest = {key: {} for key in ("broadcast", "addressed", "memory", "swept", "steps")}
    gates = {"shared": one, "personal": 0 * one}
    seen = Seen(received=received, start=start, gate=gates, n=one, counts=one, first=one, noise=one, **rest)
    for personal in ((), ("personal",)):
        told = replace(seen, personal=personal)
        assert [told.base(n).tolist() for n in names] == [[0.0, 0.0], [11.0, 11.0], [2.0, 2.0]]
    assert told.base("personal") is start["personal"]
    assert told.base("plain") is received["plain"]


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_the_mean_of_layers_that_nobody_moved_stays_where_it_is(weights: str) -> None:
    """To the bit: what clients differ in is added up, not the long values themselves, of which a sum in float32 forgets it."""
    leaf = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    facts = {"ids": ["a", "b", "c"], "rows": [7, 8, 9], "leaves": {"w": leaf}, "__len__": lambda cohort: 3}
    options = _Lag(1, 0.0, weights, "per_round", "layer", 0, "conflict", "conflict", True)
    sent = {"lag": {"w": torch.zeros(3, 1000)}}
    _, shift = options.average(sent["lag"], {}, type("Few", (), facts)(), ["w"], {"w"})
    assert not shift["w"].any()


@pytest.mark.parametrize("rows", [(8, 8, 8), (1, 2, 5)])
@pytest.mark.parametrize("chunk", [1, 1 << 24], ids=["client by client", "at once"])
def test_the_mean_of_personal_layers_by_hand(
    rows: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weighted by rows, whether all have as many or not, and however many clients are taken at a time."""
    monkeypatch.setattr(similarity, "CHUNK", chunk)
    facts = {"ids": ["a", "b", "c"], "rows": rows, "leaves": {"w": torch.tensor([1.0, 2.0])}}
    options = _Lag(1, 0.0, "samples", "per_round", "layer", 0, "conflict", "conflict", True)
    moved = torch.tensor([[1.0, 0.0], [0.0, 4.0], [2.0, -2.0]])
    memory = {"gate:w": torch.zeros(()), f"{THETA}b": torch.tensor([10.0, 20.0])}
    cohort = type("Few", (), {**facts, "__len__": lambda cohort: 3})()
    theta, shift = options.average({"w": moved}, memory, cohort, ["w"], {"w"})
    ended = [[2.0, 2.0], [10.0, 24.0], [3.0, 0.0]]
    assert [theta[f"{THETA}{client}"].tolist() for client in "abc"] == ended
    mean = sum(n * torch.tensor(e) for n, e in zip(rows, ended, strict=True)) / sum(rows)
    assert torch.allclose(shift["w"] + facts["leaves"]["w"], mean)
