"""The vectorised engine's own ways: narrowing, waves, traced and compiled steps, memory, bad clients, odd models."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.clients.runner import ClientRunner
from fedloom.engines.vectorised import VectorisedEngine, compiled, rows
from fedloom.engines.vectorised.rows import widened
from fedloom.spec.parts import Term
from tests.engines.test_parity import texts
from tests.helpers import AWKWARD, bn_mlp, dropout_mlp, everything, federation, fit, gap, mlp, small_cnn

UNEQUAL = (40, 33, 5, 21, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 4, 3, 2, 20)


def agree(
    method: str | fl.Method, model: Any, data: fl.Federation, engine: VectorisedEngine, **options: Any
) -> fl.Result:
    a = fit(method, model, data, engine="loop", **options)
    b = fit(method, model, data, engine=engine, **options)
    left, right = everything(a), everything(b)
    assert set(left) == set(right)
    assert gap(left, right) <= 1e-10
    return b


# Not SCAFFOLD with Adam: a batch of two rows has next to no gradient before batch normalisation, Adam blows the rounding
# up, and SCAFFOLD divides it by the learning rate.
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        ("fedavg", fl.adam(1e-2)),
        ("ditto", fl.adam(1e-2)),
        ("ditto", fl.sgd(0.1, momentum=0.9)),
        ("scaffold", fl.sgd(0.1, momentum=0.9)),
    ],
)
def test_a_wave_of_twenty_one_narrows_as_clients_run_out(method: str, optimizer: Any) -> None:
    agree(method, bn_mlp(), federation(UNEQUAL), VectorisedEngine(step="mapped"), batch_size=4, optimizer=optimizer)


@pytest.mark.parametrize("wave", [1, 2, 7])
def test_waves_change_nothing(wave: int) -> None:
    agree("scaffold", mlp(), federation(UNEQUAL), VectorisedEngine(wave=wave), batch_size=4)


def test_no_more_than_an_eighth_is_wasted() -> None:
    for clients in range(1, 2000):
        assert clients <= widened(clients) <= clients * 1.125 + (clients <= 16)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *(("fedavg", model) for model in (bn_mlp, dropout_mlp, small_cnn)),
        ("scaffold", small_cnn),
        ("ditto", bn_mlp),
        ("fedrep", small_cnn),
        ("fedprox(0.1)", dropout_mlp),
        ("fedavg + clip(0.1)", dropout_mlp),
    ],
)
def test_traced(method: str, model: Callable[[], Any]) -> None:
    shape = (1, 6, 6) if model is small_cnn else (6,)
    engine = VectorisedEngine(step="traced")
    agree(method, model(), federation((9, 14, 5), shape), engine, rounds=2)
    assert engine.facts()["events"] == []


@pytest.mark.slow
@pytest.mark.parametrize("method", texts())
def test_every_method_traced(method: str) -> None:
    try:
        agree(method, bn_mlp(), federation((9, 14, 5)), VectorisedEngine(step="traced"), rounds=3, cohort=2, epochs=1)
    except fl.UserError as error:
        pytest.skip(f"refused: {error}")


def test_a_rate_that_a_term_reads_is_not_baked_into_a_trace() -> None:
    def term(view: Any, batch: Any, seen: Any) -> Tensor:
        return seen.lr * sum((v**2).sum() for v in view.leaves.values() if v.is_floating_point())

    method = fl.fedavg().adding(terms=(Term(owner="rate", fn=term),))
    engine = VectorisedEngine(step="traced")
    options = {"rounds": 5, "optimizer": fl.sgd(0.1, decay=0.5)}
    agree(method, mlp(), federation(), engine, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedaims"])
@pytest.mark.parametrize("optimizer", [fl.adam(1e-2, weight_decay=0.01), fl.sgd(0.1, momentum=0.9, grad_clip=0.5)])
def test_compiled(method: str, optimizer: Any) -> None:
    engine = VectorisedEngine(step="compiled")
    agree(method, bn_mlp(), federation((9, 14, 5, 6)), engine, optimizer=optimizer, rounds=3, epochs=2)
    assert engine.facts()["events"] == []


@pytest.mark.slow
def test_compiled_code_is_found_on_disk() -> None:
    from torch._dynamo.utils import counters

    for _ in range(2):
        before = counters["inductor"]["fxgraph_cache_hit"]
        fit("fedavg", mlp(), federation((9, 14, 5, 6)), engine=VectorisedEngine(step="compiled"), rounds=2)
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 1


def test_cohorts_of_ever_new_sizes_are_not_compiled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    monkeypatch.setattr(compiled, "PROGRAMS", 2)
    engine = VectorisedEngine(step="compiled")
    agree("fedavg", mlp(), federation((9, 14, 5, 6, 7, 8)), engine, rounds=8, participation={"dropout": 0.4})
    assert engine.traces is not None
    assert len(engine.traces.programs) == 2
    assert any("often enough" in event for event in engine.facts()["events"])


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps as they are before the compiler gets them: everything of the compiled way but its code."""
    monkeypatch.setattr(compiled, "fused", lambda graph, inputs: graph.forward)


@pytest.mark.parametrize(
    "method",
    ["ditto", "pfedme", "apfl", "feddbe", "peravg", "scaffold", "fedavg + clip(0.1)", "fedmap(implicit=True)"],
)
def test_whole_steps_change_tensors_in_place(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    monkeypatch.setattr(rows, "BLOCK_BYTES", 1500)  # several blocks, and a last one that is not full
    engine = VectorisedEngine(step="compiled")
    agree(method, bn_mlp(), federation((9, 14, 5, 6)), engine, optimizer=fl.adam(1e-2), rounds=3, cohort=3, epochs=2)
    assert engine.facts()["events"] == []
    assert engine.traces is not None
    assert engine.traces.programs


@pytest.mark.slow
@pytest.mark.parametrize("method", texts())
def test_every_method_in_whole_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    try:
        agree(method, bn_mlp(), federation((9, 14, 5)), VectorisedEngine(step="compiled"), rounds=3, cohort=2, epochs=1)
    except fl.UserError as error:
        pytest.skip(f"refused: {error}")


def test_a_step_that_cannot_be_compiled_is_traced_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "fused", refuse)
    engine = VectorisedEngine(step="compiled")
    result = agree("scaffold", bn_mlp(), federation((9, 14, 5)), engine, rounds=4)
    assert "no compiler here" in engine.facts()["events"][0]
    assert "no compiler here" in result.history[1]["plainer_steps"][0]
    assert "often enough" in engine.facts()["events"][-1]


def test_out_of_memory_halves_the_wave_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ClientRunner.run

    def run(desk: ClientRunner, program: Any) -> None:
        if len(desk.participants) > 2:
            raise torch.OutOfMemoryError("no room")
        plain(desk, program)

    monkeypatch.setattr(ClientRunner, "run", run)
    engine = VectorisedEngine()
    agree("fedavg", mlp(), federation((9, 14, 5, 6, 8)), engine)
    events = engine.facts()["events"]
    assert "round 1: out of memory with 5 clients, waves of 3 from now on" in events
    assert engine.facts()["wave"] == 2


def test_out_of_memory_is_recorded_before_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In run.toml at once, in the round's record, and obeyed by a run that is resumed."""
    plain, seen = ClientRunner.run, list[Any]()

    def run(desk: ClientRunner, program: Any) -> None:
        if desk.post.round == 2 and len(desk.participants) > 2:
            raise torch.OutOfMemoryError("no room")
        if desk.post.round == 2 and (tmp_path / "run.toml").exists():
            seen.append(tomllib.loads((tmp_path / "run.toml").read_text())["resolved"]["plan"]["halved"])
        plain(desk, program)

    def crash(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"rounds": 4, "engine": "vectorised", "progress": False, "evaluate": {"every": 0}}
    data, model = federation((9, 14, 5, 6, 8)), mlp()
    with monkeypatch.context() as patch:
        patch.setattr(ClientRunner, "run", run)
        with pytest.raises(KeyboardInterrupt):
            fl.fit("fedper", model, data, **options, out=tmp_path, callbacks=[crash])
    assert seen[0] == 2, "the halved wave was not written before its clients were tried again"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [len(r.get("out_of_memory", ())) for r in records] == [0, 2]
    result = fl.fit("fedper", model, data, **options, out=tmp_path, resume=True)
    assert result.config["resolved"]["plan"]["halved"] == 2
    assert result.run.engine.wave == 2
    loop = fl.fit("fedper", model, data, **options | {"engine": "loop"})
    assert gap(everything(result), everything(loop)) < 1e-4


def poisoned(data: fl.Federation, client: str, value: float) -> fl.Federation:
    clients = []
    for c in data:
        x = np.asarray(c.train.x)
        assert c.test is not None
        clients.append(((np.full_like(x, value) if c.id == client else x, c.train.y), (c.test.x, c.test.y)))
    return fl.Federation.from_arrays(clients)


@pytest.mark.parametrize("step", ["mapped", "traced"])
@pytest.mark.parametrize("optimizer", [fl.sgd(10.0, momentum=0.9), fl.adam(1e-2), fl.sgd(10.0, grad_clip=1e9)])
@pytest.mark.parametrize("model", [mlp, bn_mlp, lambda: nn.Sequential(nn.Linear(6, 3))])
def test_an_overflowing_client_leaves_the_others_bitwise_alone(step: Any, optimizer: Any, model: Any) -> None:
    data = federation((12, 8, 5))
    made = model if model is not mlp and model is not bn_mlp else model()
    runs = []
    for federated in (data, poisoned(data, "1", 1e38)):
        options = {"rounds": 1, "precision": "fp32", "optimizer": optimizer, "engine": VectorisedEngine(step=step)}
        runs.append(everything(fit("local", made, federated, **options)))
    good, hurt = runs
    others = [n for n in hurt if n.startswith(("0 ", "2 "))]
    assert others
    for name in others:
        assert torch.equal(good[name], hurt[name]), name


# Models ---------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Tokens to classes through a recurrent layer."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(7, 5, padding_idx=0), layer(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.words(x))[0][:, -1])
        return out


class Attention(nn.Module):
    """Tokens to classes through an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.words(x)).mean(1))
        return out


def sentences(sizes: tuple[int, ...] = (9, 14, 5)) -> fl.Federation:
    draw = np.random.default_rng(0)
    clients = []
    for n in sizes:
        x = draw.integers(0, 7, (n, 6))
        clients.append(((x, x.sum(1) % 3), (x[:3], x[:3].sum(1) % 3)))
    return fl.Federation.from_arrays(clients)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("step", ["mapped", "traced"])
def test_recurrent_layers(layer: Any, step: Any) -> None:
    result = agree("fedavg", lambda: Words(layer), sentences(), VectorisedEngine(step=step), rounds=2)
    start = Words(layer)
    trained = result.model()
    assert set(trained.state_dict()) == set(start.state_dict())
    assert type(trained.layer) is layer
    leaves = everything(result)
    out = trained.double()(torch.zeros(2, 6, dtype=torch.long))
    fresh = Words(layer).double()
    fresh.load_state_dict({k: leaves[f"server {k}"] for k in start.state_dict()})
    assert torch.allclose(out, fresh(torch.zeros(2, 6, dtype=torch.long)), atol=1e-6)


@pytest.mark.parametrize("extra", [{"num_layers": 2}, {"bidirectional": True}, {"bias": False}, {"batch_first": False}])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_step_by_step_are_torchs(layer: Any, extra: dict[str, Any]) -> None:
    from fedloom.network import replace_layers

    torch.manual_seed(0)
    module = layer(5, 4, **extra).double()
    x = torch.randn(3, 6, 7, 5, dtype=torch.float64)
    plain = [module(part) for part in x]
    replace_layers.prepare(module)
    out, state = torch.vmap(module)(x)
    for i, (theirs, last) in enumerate(plain):
        assert torch.allclose(out[i], theirs, atol=1e-12)
        for a, b in zip(state if layer is nn.LSTM else (state,), last if layer is nn.LSTM else (last,), strict=True):
            assert torch.allclose(a[i], b, atol=1e-12)


def test_transformer_encoder_without_noise() -> None:
    def model() -> nn.Module:
        made = Attention()
        for part in made.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        return made

    agree("fedavg", model, sentences(), VectorisedEngine(), rounds=2)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "squeezenet1_1"])
def test_torchvision(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    data = federation((4, 3), (3, 32, 32))
    agree("fedavg", lambda: getattr(models, name)(num_classes=3), data, VectorisedEngine(), rounds=1, epochs=1)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    size = {"img_size": 32} if name.startswith("vit") else {}
    data = federation((4, 3), (3, 32, 32))
    agree(
        "fedavg", lambda: timm.create_model(name, num_classes=3, **size), data, VectorisedEngine(), rounds=1, epochs=1
    )


def test_transformers() -> None:
    hub = pytest.importorskip("transformers")
    config = hub.BertConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3,
        attn_implementation="eager", attention_probs_dropout_prob=0.0,  # its noise is torch's own
    )  # fmt: skip
    agree("fedavg", lambda: hub.BertForSequenceClassification(config), sentences((5, 4)), VectorisedEngine(), rounds=1)


def test_awkward_sizes_in_one_wave_and_one_class() -> None:
    agree("fedavg", bn_mlp(track=False), federation(AWKWARD, one_class=4), VectorisedEngine(), batch_size=64, epochs=1)
