"""Through Flower's messages every method gives the loop engine's numbers, bit for bit, and sends what it declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

import fedloom as fl
from fedloom.flower import LocalEngine, wire
from fedloom.flower.programs import ROUND, Sample, declared
from fedloom.tensors import Leaves
from tests.engines.test_parity import texts
from tests.helpers import bn_mlp, everything, federation, fit, run_of

COMMON = {"precision": "fp32", "rounds": 2, "epochs": 1, "batch_size": 4}


def both(method: str, watch: Any = None, folder: Path | None = None, **options: Any) -> tuple[fl.Result, fl.Result]:
    data = options.pop("data", None) or federation((9, 14, 5, 1))
    try:
        plain = fit(method, bn_mlp(), data, **{**COMMON, **options})
    except fl.UserError as error:
        pytest.skip(f"refused: {error}")
    return plain, fit(method, bn_mlp(), data, **{**COMMON, **options}, engine=LocalEngine(folder, watch))


def assert_equal(plain: fl.Result, sites: fl.Result) -> None:
    left = everything(plain)
    right = {k: v for k, v in everything(sites).items() if not k.endswith(" flower round")}
    assert set(left) == set(right)
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
    times = ("seconds", "seconds_eval", "seconds_total")
    for mine, theirs in zip(plain.history, sites.history, strict=True):
        assert json.dumps({k: v for k, v in mine.items() if k not in times}) == json.dumps(
            {k: v for k, v in theirs.items() if k not in times}
        )
    assert {k: c.metrics for k, c in plain.clients.items()} == {k: c.metrics for k, c in sites.clients.items()}


@pytest.mark.parametrize("method", texts())
def test_every_method(method: str) -> None:
    assert_equal(*both(method))


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedrep", "ditto", "fedavg + isr + lag"])
def test_some_clients_a_round(method: str) -> None:
    assert_equal(*both(method, cohort=2, rounds=5))


@pytest.mark.parametrize("mixing", ["adaptive", "alternate"])
def test_hybrid_with_the_cloud_at_the_server(mixing: str) -> None:
    seen: list[Message] = []
    plain, sites = both(
        "fedavg", lambda m, r: seen.append(m), mode="hybrid", hybrid={"cloud_fraction": 0.3, "mixing": mixing}
    )
    assert_equal(plain, sites)
    assert seen


def test_binary_task_pools_rows_only_in_a_simulation() -> None:
    data = federation((12, 15, 9), classes=2)
    model = lambda: torch.nn.Sequential(torch.nn.Linear(6, 1))  # noqa: E731
    options = {**COMMON, "task": "binary"}
    plain = fit("fedavg", model, data, **options)
    sites = fit("fedavg", model, data, **options, engine=LocalEngine())
    assert_equal(plain, sites)


UPLOADS = ["fedavg", "local", "scaffold", "fedrep", "ditto", "fedbn", "fedavg + isr + lag", "fedproto"]


@pytest.mark.parametrize("method", UPLOADS)
def test_only_what_is_declared_leaves_a_site(method: str) -> None:
    """Reads every reply as an eavesdropper would: each array is an upload, a count of steps or a sum over test rows."""
    replies: list[Any] = []
    plain, _ = both(method, lambda m, r: replies.append((m.content, r.content)))
    run = run_of(plain)
    allowed = declared(run.bound, run.work, Sample.of(next(iter(run.sites.values())).train), ROUND)
    entries = set(run.bound.method.reducers("round"))
    personal = {n for n, s in run.bound.specs.items() if s.kind == "personal"}
    rows = {float(v) for site in run.sites.values() for v in site.train.x.flatten()}  # type: ignore[union-attr]
    uploads = 0
    for asked, content in replies:
        assert set(content) == {wire.OUTLINE}
        assert set(content.config_records[wire.OUTLINE]) == {"json", wire.BYTES}
        letter, package = wire.unpack_letter(asked), wire.unpack_package(content)
        mentioned = 0
        for job, answer in zip(letter.jobs, package.answers, strict=True):
            assert not personal & set(job.post.leaves)
            if job.program == ROUND:
                uploads += 1
                assert set(answer.message) <= entries
                assert {e: set(m) for e, m in answer.message.items()} == {e: set(m) for e, m in allowed.items()}
                assert not answer.judged
            else:
                assert not answer.message
            named: list[Leaves] = [
                *answer.message.values(),
                *(part for pair in answer.judged.values() for part in pair),
            ]
            mentioned += sum(len(part) for part in named)
            assert not personal & {n for m in answer.message.values() for n in m}
            for part in answer.message.values():
                for value in part.values():
                    assert not rows & {float(v) for v in value.flatten()}
        outline = wire.outline_of(content)
        assert len(outline["tensors"]) <= mentioned
        assert set(outline) == {"format", "site", "facts", "answers", "code", "tensors"}
    assert uploads == 8


def test_a_site_that_lost_its_folder_begins_anew_and_is_named(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)

    def lose(record: fl.rounds.run.Record) -> None:
        if record["round"] == 2:
            for path in engine.sites["1"].store.folder.rglob("round-*"):
                path.unlink()

    options = {**COMMON, "rounds": 4, "evaluate": {"every": 0}}
    result = fit("scaffold", bn_mlp(), federation((9, 14, 5)), **options, engine=engine, callbacks=[lose])
    assert [r["client"] for r in result.history[2]["rejected"]] == ["1"]
    assert "begins anew" in result.history[2]["rejected"][0]["reason"]
