"""Hand cases, limits and published sizes of FedAIMS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.choose_device import choose_device
from fedloom.engines.vectorised import VectorisedEngine, waves
from fedloom.network.inspect_model import build
from fedloom.ops import similarity
from fedloom.ops.gram import cosines, gram
from fedloom.ops.similarity import dealt_groups, project, unlike_groups
from fedloom.plugins.aims.block_sampling import similarities
from fedloom.spec.blocks import blocks
from fedloom.spec.optimizer import Optimizer
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, own, run_of, shared, small_cnn


def deep(depth: int = 3) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        parts: list[nn.Module] = []
        for _ in range(depth):
            parts += [nn.Linear(6, 6), nn.Tanh()]
        return nn.Sequential(*parts, nn.Linear(6, 3))

    return make


def matrix(size: int, pairs: dict[tuple[int, int], float]) -> np.ndarray:
    s = np.eye(size)
    for (i, j), value in pairs.items():
        s[i, j] = s[j, i] = value
    return s


# (a) Limits.


@pytest.mark.parametrize(
    "method",
    [
        "fedaims(mu=0)",
        "fedaims_full(mu=0)",
        "fedper + aims(mu=0, assign='random')",
        "fedaims(mu=0, weights='adaptive')",
    ],
)
def test_one_block_and_no_prototypes_is_fedper(method: str) -> None:
    """(a) m = 1: a single hidden layer leaves no intermediate block."""
    assert identical(shared(fit("fedper", mlp(), cohort=2)), shared(fit(method, mlp(), cohort=2)))


def test_one_block_with_prototypes_is_fedper_pulled_to_the_received_bodys_means() -> None:
    pulled = fit("fedper + aims(mu=0.5)", mlp())
    assert not identical(shared(fit("fedper", mlp())), shared(pulled))
    assert identical(shared(fit("fedper", mlp(), rounds=1)), shared(fit("fedper + aims(mu=0.5)", mlp(), rounds=1)))


def test_fedaims_is_fedper_with_aims() -> None:
    assert identical(shared(fit("fedaims(mu=0.4)", deep())), shared(fit("fedper + aims(mu=0.4)", deep())))


@pytest.mark.parametrize("arguments", ["", "mu=0.3", "aux_ce='none'", "prototypes='blockwise'"])
def test_full_and_sampled_agree_for_two_blocks(arguments: str) -> None:
    """(d) m = 2."""
    one, all_ = (fit(f"{name}({arguments})", deep(2)) for name in ("fedaims", "fedaims_full"))
    assert identical(shared(one), shared(all_))
    assert identical(own(one, "1"), own(all_, "1"))


# (b) Algorithm 2.


def test_groups_by_hand() -> None:
    s = matrix(4, {(0, 1): 0.9, (0, 2): 0.1, (0, 3): 0.2, (1, 2): 0.3, (1, 3): 0.8, (2, 3): 0.5})
    assert unlike_groups(s, 2) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("clients", "groups", "sizes"), [(10, 2, [5, 5]), (10, 3, [3, 3, 4]), (2, 3, [0, 1, 1])])
def test_group_sizes(clients: int, groups: int, sizes: list[int]) -> None:
    draw = np.random.default_rng(0)
    s = draw.uniform(-1, 1, (clients, clients))
    assert [len(g) for g in unlike_groups((s + s.T) / 2, groups)] == sizes
    assert [len(g) for g in dealt_groups(list(range(clients)), groups)] == sizes


def test_groups_differ_by_at_most_one_and_hold_everybody() -> None:
    draw = np.random.default_rng(1)
    for clients in range(1, 12):
        s = draw.uniform(-1, 1, (clients, clients))
        found = unlike_groups((s + s.T) / 2, 4)
        lengths = [len(g) for g in found]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths)
        assert sorted(i for g in found for i in g) == list(range(clients))


def test_nothing_known_deals_in_turn() -> None:
    assert unlike_groups(np.zeros((5, 5)), 2) == [[1, 3], [0, 2, 4]]


def test_unknown_clients_are_similar_to_none() -> None:
    s = similarities([torch.tensor([1.0, 0.0]), None, torch.tensor([1.0, 1.0])])
    assert s.tolist() == [[1.0, 0.0, 0.7071067812], [0.0, 0.0, 0.0], [0.7071067812, 0.0, 1.0]]


def test_vectors_of_all_types_and_lengths_are_compared() -> None:
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for width in (2, 3):
            vectors = [torch.tensor([3.0, *[4.0] * (width - 1)], dtype=kind), torch.tensor([1.0] * width, dtype=kind)]
            expected = torch.cosine_similarity(*(v.double() for v in vectors), dim=0)
            assert similarities(vectors)[0, 1] == round(float(expected), 10)


def test_cosines_are_those_of_numpy() -> None:
    vectors = np.random.default_rng(0).normal(size=(5, 30))
    vectors[3] = 0.0
    s = cosines(gram([torch.from_numpy(vectors)])).numpy()
    np.testing.assert_allclose(np.corrcoef(np.hstack([vectors, -vectors])[:3]), s[:3, :3], atol=1e-9)
    assert not s[3].any()
    assert not s[:, 3].any()


def test_projection_keeps_cosines() -> None:
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(30000, generator=draw, dtype=torch.float64)
    bodies = {"w": torch.stack([base + 0.5 * torch.randn(30000, generator=draw) for _ in range(4)])}
    exact, short = (cosines(gram([v])) for v in (bodies["w"], project(bodies, 0)))
    assert project(bodies, 0).shape == (4, 4096)
    assert float((exact - short).abs().max()) < 0.03
    assert torch.equal(project(bodies, 0), project(bodies, 0))
    assert not torch.equal(project(bodies, 0), project(bodies, 1))
    assert torch.equal(project({"w": bodies["w"][:, :50]}, 0), bodies["w"][:, :50])


def test_pieces_of_leaves_change_neither_projections_nor_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (40, 90), "b": (7,), "c": (1500,), "d": (3,)}
    moved = {k: torch.randn(3, *shape, generator=draw) for k, shape in shapes.items()}
    base = {k: torch.randn(shape, generator=draw) for k, shape in shapes.items()}
    ends = {k: base[k] + v for k, v in moved.items()}
    whole, far = project(moved, 5, 64, base=base), similarity.farthest(moved, base)
    by_hand = max(sum(float(((moved[k][i] - base[k]).double() ** 2).sum()) for k in shapes) for i in range(3))
    assert float(far) == pytest.approx(by_hand, rel=1e-6)
    assert torch.equal(whole, project(ends, 5, 64))
    for numbers in (1, 8, 1501, 3607):
        monkeypatch.setattr(similarity, "CHUNK", 3 * numbers)
        torch.testing.assert_close(project(moved, 5, 64, base=base), whole, rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(similarity.farthest(moved, base), far)


# (c) Prototypes.


class Same(nn.Module):
    """The head's input is the picture itself, so that prototypes are class means of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(1, 2)
        nn.init.ones_(self.body.weight)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def test_prototypes_by_hand() -> None:
    """(c) counts (1, 3), class means 0 and 4: C_g = 3; taken from the received body, whatever training does."""
    rows = [
        (np.zeros((1, 1), np.float32), np.zeros(1, np.int64)),
        (np.full((3, 1), 4, np.float32), np.zeros(3, np.int64)),
    ]
    result = fit("fedaims", Same, fl.Federation.from_arrays([(r, r) for r in rows]), rounds=1)
    memory = run_of(result).state.memory["prototypes"]
    assert memory["mean"].tolist() == [[3.0], [0.0]]
    assert memory["known"].tolist() == [1.0, 0.0]


# (e) What moves.


@pytest.mark.parametrize("engine", ["loop", "mapped", "graphed"])
@pytest.mark.parametrize("optimizer", [fl.sgd(0.1, momentum=0.9), fl.adam(weight_decay=0.1), fl.adamw()])
def test_adapters_of_other_blocks_stay(engine: Any, optimizer: Optimizer) -> None:
    side_by_side = engine if engine == "loop" else VectorisedEngine(step=engine)
    result = fit("fedaims(assign='round_robin')", deep(4), rounds=1, engine=side_by_side, optimizer=optimizer)
    start = run_of(result).bound.start
    for position, client in enumerate(("0", "1", "2")):
        mine = own(result, client)
        moved = {n.split(":")[1][0] for n in mine if n.startswith("aims:") and not torch.equal(mine[n], start[n])}
        assert moved == {str(position + 1)}


@pytest.mark.parametrize("step", ["mapped", "traced", "graphed"])
@pytest.mark.parametrize(
    "method",
    [
        "fedaims",
        "fedaims(weights='adaptive')",
        "fedaims(prototypes='blockwise', aux_ce='prototype')",
        "fedper + aims(assign='random', aux_ce='none')",
    ],
)
def test_clients_with_different_blocks_run_in_one_wave(method: str, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, cut = list[int](), waves.cut

    def counting(bound: Any, people: Any, most: int) -> Any:
        found = cut(bound, people, most)
        widths.extend(len(w) for w in found)
        return found

    monkeypatch.setattr(waves, "cut", counting)
    options = {"rounds": 3, "optimizer": fl.sgd(0.1, momentum=0.9, weight_decay=0.1, grad_clip=0.5)}
    alone, together = (fit(method, deep(), engine=e, **options) for e in ("loop", VectorisedEngine(step=step)))
    assert gap(everything(alone), everything(together)) < 1e-10
    assert set(widths[:3]) == {3}


def test_a_client_is_asked_for_its_key_as_a_bool_or_in_a_wave_as_a_tensor() -> None:
    kinds: dict[str, set[type]] = {}
    for engine in ("loop", "vectorised"):
        method = fl.method("fedaims")
        (term,) = [t for t in method.objective if t.owner == "aims"]

        def fn(view: Any, batch: Any, seen: Any, *carry: Any, term: Any = term, engine: str = engine) -> Any:
            kinds.setdefault(engine, set()).add(type(seen.selects(1)))
            return term.fn(view, batch, seen, *carry)

        objective = tuple(replace(t, fn=fn) if t is term else t for t in method.objective)
        fit(replace(method, objective=objective), deep(), engine=engine, rounds=1)
    assert kinds["loop"] == {bool}
    assert any(issubclass(kind, Tensor) for kind in kinds["vectorised"])  # its probe also runs single clients


def test_adapters_and_heads_never_leave() -> None:
    result = fit("fedaims", deep())
    start = run_of(result).bound.start
    for name, value in shared(result).items():
        if name.startswith("aims:"):
            assert torch.equal(value, start[name])
    assert set(result.model("0").state_dict()) == set(deep()().state_dict())


def test_period_refreshes_the_similarity() -> None:
    memory = [run_of(fit("fedaims(period=3)", deep(), rounds=r)).state.memory["block_sampling"] for r in (2, 3)]
    assert not any(name.startswith("used:") for name in memory[0])
    assert {name for name in memory[1] if name.startswith("used:")} == {"used:0", "used:1", "used:2"}
    assert all(torch.equal(memory[1][f"used:{i}"], memory[1][f"latest:{i}"]) for i in range(3))


@pytest.mark.parametrize("raw", ["raw", "delta"])
def test_bodies_with_single_numbers(raw: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.scale = deep(3)()[:6], nn.Linear(6, 3), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x) * self.scale)
            return out

    runs = [fit(f"fedaims(similarity={raw!r})", Scaled, engine=e, rounds=2) for e in ("loop", "vectorised")]
    vectors = run_of(runs[0]).state.memory["block_sampling"]
    assert vectors["latest:0"].shape == (3 * 42 + 1,)
    assert gap(*map(everything, runs)) < 1e-10


def test_round_records_kappa_and_the_spread_of_similarities() -> None:
    record = fit("fedaims", deep(), rounds=1).history[0]["block_sampling"]
    assert record["kappa2"] > 0
    assert -1 <= record["similarity_min"] <= record["similarity"] <= record["similarity_max"] <= 1


# Blocks of networks.


def block_names(model: nn.Module, shape: Sequence[int]) -> list[str]:
    net = build(model, torch.zeros(2, *shape), task="classification", device=choose_device("cpu", "fp32"))
    return [t.name for t in blocks(net.structure)]


def test_blocks() -> None:
    assert block_names(fl.models.convnet3(), (1, 28, 28)) == ["body.block1", "body.block2"]
    assert block_names(fl.models.convnet4(), (3, 32, 32)) == [f"body.block{i}" for i in (1, 2, 3)]
    assert block_names(fl.models.resnet18(100, norm="bn_batch"), (3, 16, 16)) == [f"stages.stage{i}" for i in (1, 2, 3)]
    assert block_names(deep(3)(), (6,)) == ["1", "3"]
    assert block_names(small_cnn()(), (1, 6, 6)) == []
    assert block_names(bn_mlp()(), (6,)) == []
    plain = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    assert block_names(plain, (1, 12, 12)) == ["2"]


# (f) Published sizes.

MIB = 2**20


def pictures(shape: tuple[int, ...], classes: int, rows: int = 4) -> fl.Federation:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(rows, *shape)).astype(np.float32), draw.integers(0, classes, rows)
    return fl.Federation.from_arrays([((x, y), (x, y))])


def one_round(method: str, model: Any, data: fl.Federation) -> fl.Result:
    return fit(method, model, data, rounds=1, epochs=1, batch_size=4, precision="fp32")


NETWORKS: list[tuple[str, Any, tuple[int, ...], int, float, float, float]] = [
    ("EMNIST", lambda: fl.models.convnet3(47), (1, 8, 8), 47, 0.59, 0.06, 13.77),
    ("CIFAR-10", lambda: fl.models.convnet4(10), (3, 16, 16), 10, 3.42, 0.19, 8.79),
    ("CIFAR-100", lambda: fl.models.resnet18(100, norm="bn_batch"), (3, 8, 8), 100, 85.60, 0.49, 102.54),
    ("Tiny", lambda: fl.models.resnet18(200, norm="bn_batch"), (3, 8, 8), 200, 85.99, 0.49, 205.08),
]


@pytest.mark.parametrize(
    ("name", "model", "shape", "classes", "cost", "storage", "saved"), NETWORKS, ids=lambda v: str(v)[:9]
)
def test_tables_6_and_8_from_real_messages(
    name: str, model: Any, shape: tuple[int, ...], classes: int, cost: float, storage: float, saved: float
) -> None:
    data = pictures(shape, classes)
    last, every = (one_round(f"fedaims(prototypes='{p}')", model, data).history[0] for p in ("last", "blockwise"))
    kinds = last["bytes_up_by_kind"]
    named = kinds["parameters"] + kinds["prototypes"]
    told = last["bytes_down_by_kind"]
    assert (told["parameters"], told["prototypes"]) == (kinds["parameters"], kinds["prototypes"])
    assert round((named + told["parameters"] + told["prototypes"]) / MIB, 2) == cost
    assert kinds["counts"] == 4 * classes
    assert last["bytes_up"] == named + kinds["counts"]
    assert last["bytes_down"] == named + 4 * classes + 8
    more = every["bytes_up_by_kind"]["prototypes"] - kinds["prototypes"]
    assert round(300 * 2 * more / MIB, 2) == saved
    bound = run_of(one_round("fedaims", model, data)).bound
    adapters = sum(v.numel() for n, v in bound.start.items() if n.startswith("aims:") and ".head." not in n)
    assert round(4 * adapters / MIB, 2) == storage


def test_table_8_as_printed_counts_the_last_block_too() -> None:
    """The paper's 219.73 and 439.45 are 300 rounds of prototypes of all four blocks, the last included."""
    widths = {"without": 64 + 128 + 256, "with": 64 + 128 + 256 + 512}
    sizes = {k: [round(300 * 2 * 4 * c * w / MIB, 2) for c in (100, 200)] for k, w in widths.items()}
    assert sizes == {"without": [102.54, 205.08], "with": [219.73, 439.45]}


def test_table_6_of_the_baselines() -> None:
    data = pictures((1, 8, 8), 47)
    up = {m: one_round(m, lambda: fl.models.convnet3(47), data).history[0]["bytes_up"] for m in ("fedavg", "fedper")}
    assert [round(2 * v / MIB, 2) for v in up.values()] == [0.59, 0.57]


# Refusals.


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fedper + aims(assign='best')", "assign='best'"),
        ("fedper + aims(alpha=[0.5, 0.5])", "supervise='full'"),
        ("fedaims_full(alpha=[0.5, 0.4])", "sum to 1"),
        ("fedaims(lam=0)", "out of range"),
        ("fedaims(mu=-1)", "out of range"),
        ("fedaims(weights='adaptive', lam=0.5)", "without lam"),
        ("fedaims(weights='adaptive', aux_ce='none')", "aux_ce='head'"),
        ("fedaims(weights='best')", "'adaptive'"),
        ("local + aims", "uploads no trained body"),
        ("fedaims + aims", "aims"),
    ],
)
def test_refused(method: str, message: str) -> None:
    with pytest.raises(fl.UserError, match=message):
        fl.method(method)


def test_alpha_must_fit_the_model() -> None:
    with pytest.raises(fl.UserError, match="3 blocks"):
        fit("fedaims_full(alpha=[0.5, 0.5])", deep(3))


def test_needs_classes() -> None:
    with pytest.raises(fl.UserError, match="classification and binary"):
        fit("fedaims", mlp(6, 1), task="regression")


@pytest.mark.parametrize(
    ("base", "plugin"),
    [
        *((base, "aims") for base in ("fedrep", "fedbn", "fedavg", "ditto", "fedrep + isr")),
        *((base, "aims(weights='adaptive')") for base in ("fedper", "balancefl", "scaffold")),
    ],
)
def test_stacks_on_other_methods(base: str, plugin: str) -> None:
    model = bn_mlp() if base == "fedbn" else deep()
    results = [
        fit(f"{base} + {plugin}", model, federation((6, 9, 5)), cohort=2, engine=e) for e in ("loop", "vectorised")
    ]
    assert all(torch.isfinite(v).all() for v in shared(results[0]).values())
    assert [r["loss"] for r in results[0].history] == pytest.approx([r["loss"] for r in results[1].history], rel=1e-9)
