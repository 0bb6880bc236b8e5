"""Between the device's answer to a round and the first step of the next one the device has nothing to do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

import fedloom as fl
from fedloom import server
from fedloom.aggregators import block_sampling
from fedloom.client import Desk
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.engines.vectorised.graphed import Arenas, GraphedStepper
from fedloom.engines.vectorised.layout import Stacked
from tests.helpers import bn_mlp, everything, federation, fit, gap, questions_of_rounds

DATA = federation((64, 64, 64, 64, 64, 64))
OPTIONS = {"device": "cpu", "cohort": 4, "epochs": 1, "batch_size": 64, "evaluate": {"every": 0}, "rounds": 6}


class Calls(TorchDispatchMode):
    """Counts tensor operations; those that read a number of the host are none of the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            self.made[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counter[str]]]:
    """Operations of each round from its answer until all is in place for the first step of the next one."""
    found, now = list[Counter[str]](), list[Calls]()
    outcome, settle = server.Sorting.outcome, GraphedStepper._settle

    def stop() -> None:
        if now:
            now[0].__exit__(None, None, None)
            found.append(now.pop().made)

    def answered(self: server.Sorting, round: int) -> server.Outcome:
        told = outcome(self, round)
        stop()
        now.append(Calls())
        now[0].__enter__()
        return told

    def settled(self: GraphedStepper) -> bool:
        done = settle(self)
        stop()
        return done

    monkeypatch.setattr(server.Sorting, "outcome", answered)
    monkeypatch.setattr(GraphedStepper, "_settle", settled)
    yield found
    stop()


@pytest.mark.parametrize(
    ("method", "most"),
    [("fedavg", 14), ("scaffold", 19), ("fedmap", 14), ("fedavg + lag(k=1)", 21), ("fedavg + isr + lag(k=1)", 23)],
)
def test_few_operations_stand_between_the_answer_and_the_next_step(
    method: str, most: int, between: list[Counter[str]]
) -> None:
    fit(method, bn_mlp(), DATA, engine=VectorisedEngine(step="graphed"), **OPTIONS)
    for made in between[2:5]:
        assert made.total() <= most, made


def test_the_similarities_of_fedaims_come_with_the_one_answer_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host has of clients' bodies, by which it groups them, and what it reports, it need not ask for."""
    monkeypatch.setattr(block_sampling, "cosines", lambda products: np.eye(len(products)))
    rounds, after = questions_of_rounds(monkeypatch, lambda value: value.shape == (4,))
    model = fl.models.mlp(6, 3, hidden=(8, 8, 8))
    fit("fedaims", model, DATA, engine=VectorisedEngine(step="graphed"), **OPTIONS, callbacks=[after])
    assert rounds[1:5] == [["answer"]] * 4


def test_fedaims_compares_clients_before_the_answer_as_far_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a round's clients only those are read after the answer to the round before who took part in that one."""
    read, outcome, dispatch = block_sampling._of_numpy, server.Sorting.outcome, server.dispatch
    late, rounds = list[torch.Tensor](), list[tuple[int, set[str]]]()

    def noted(vector: torch.Tensor) -> np.ndarray:
        late.append(vector)
        return read(vector)

    def answered(self: server.Sorting, round: int) -> server.Outcome:
        told = outcome(self, round)
        late.clear()
        return told

    def sent(*args: Any) -> Any:
        made = dispatch(*args)
        rounds.append((len(late), set(args[2].ids)))
        return made

    monkeypatch.setattr(block_sampling, "_of_numpy", noted)
    monkeypatch.setattr(server.Sorting, "outcome", answered)
    monkeypatch.setattr(server, "dispatch", sent)
    model, options = fl.models.mlp(6, 3, hidden=(8, 8, 8)), {**OPTIONS, "rounds": 9, "cohort": 3}
    fit("fedaims", model, DATA, engine=VectorisedEngine(step="graphed"), **options)
    pairs = list(pairwise(rounds[:9]))
    assert [count for _, (count, _) in pairs] == [len(before & ids) for (_, before), (_, ids) in pairs]


@pytest.mark.parametrize("arguments", ["", "(period=2)", "(similarity='delta')"])
def test_what_fedaims_foresees_changes_no_number(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = fl.models.mlp(6, 3, hidden=(8, 8, 8)), {**OPTIONS, "rounds": 9, "cohort": 3}
    ahead = fit(f"fedaims{arguments}", model, DATA, engine=VectorisedEngine(step="graphed"), **options)
    monkeypatch.setattr(server, "foresee", lambda *args: None)
    plain = fit(f"fedaims{arguments}", model, DATA, engine=VectorisedEngine(step="graphed"), **options)
    assert gap(everything(ahead), everything(plain)) == 0


@pytest.mark.parametrize("method", ["fedavg + lag(k=1)", "fedavg + isr + lag(k=1, score='variance')"])
def test_the_scores_of_lag_come_with_the_one_answer_of_a_round(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host itself decided in an earlier round, it need not ask for."""
    module = sys.modules["fedloom.plugins.lag"]
    own, common = dict[int, torch.Tensor](), module._common

    def remembered(*args: Any) -> Any:
        found = common(*args)
        own.update((id(v), v) for v in found.values())
        return found

    monkeypatch.setattr(module, "_common", remembered)
    rounds, after = questions_of_rounds(monkeypatch, lambda value: id(value) in own)
    fit(method, bn_mlp(), DATA, engine=VectorisedEngine(step="graphed"), **OPTIONS, callbacks=[after])
    assert rounds[1:5] == [["answer"]] * 4


@pytest.mark.parametrize("method", ["fedavg", "fedavg + lag(k=1)"])
def test_a_further_client_costs_a_round_few_operations(method: str) -> None:
    """Two sums, whatever the leaves: what clients keep, send and have is made for all of them at once."""

    def of_a_round(cohort: int) -> int:
        found, calls = list[int](), Calls()

        def after(record: Any) -> None:
            found.append(calls.made.total())

        options = {**OPTIONS, "cohort": cohort, "callbacks": [after]}
        with calls:
            fit(method, bn_mlp(), DATA, engine=VectorisedEngine(step="graphed"), **options)
        return found[4] - found[3]

    assert of_a_round(6) - of_a_round(3) <= 3 * 2


@pytest.mark.parametrize(
    ("method", "most"), [("fedavg", 30), ("scaffold", 65), ("fedmap", 75), ("fedavg + lag(k=1)", 50), ("fedaims", 90)]
)
def test_a_cohort_takes_few_operations_besides_replays(method: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps there are: batches lie where captured steps find them, and uploads are made of a whole wave."""
    calls, found = list[Calls](), list[int]()
    record, run_cohort = Arenas.record, VectorisedEngine.run_cohort

    def recorded(self: Arenas, *args: Any) -> Any:
        replay = record(self, *args)

        def quiet() -> None:
            assert replay is not None
            with disable_current_modes():
                replay()

        return None if replay is None else quiet

    def counted(self: VectorisedEngine, *args: Any) -> Any:
        calls.append(Calls())
        with calls[-1]:
            return run_cohort(self, *args)

    monkeypatch.setattr(Arenas, "record", recorded)
    monkeypatch.setattr(VectorisedEngine, "run_cohort", counted)
    model = fl.models.mlp(6, 3, hidden=(8, 8, 8)) if method == "fedaims" else bn_mlp()
    for size in (16, 4):
        calls.clear()
        fit(method, model, DATA, engine=VectorisedEngine(step="graphed"), **{**OPTIONS, "batch_size": size})
        found.append(max(c.made.total() for c in calls[3:6]))
    # Forty steps and sixteen of them: a shelf holds sixteen.
    assert found[0] <= most
    assert found[1] <= most + 3


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedmap", "fedaims", "fedavg + clip"])
def test_only_uploads_that_need_it_are_mapped(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, call, send = list[str](), Stacked.call, Desk.send

    def counted(self: Stacked, fn: Any, *args: Any) -> Any:
        mapped.append("mapped")
        return call(self, fn, *args)

    def sent(self: Desk, when: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stacked, "call", counted)
            send(self, when)

    monkeypatch.setattr(Desk, "send", sent)
    model = fl.models.mlp(6, 3, hidden=(8, 8, 8)) if method == "fedaims" else bn_mlp()
    fit(method, model, DATA, engine=VectorisedEngine(step="graphed"), **OPTIONS)
    assert len(mapped) == (OPTIONS["rounds"] if "clip" in method else 0)


@pytest.mark.parametrize(
    ("method", "most"), [("scaffold", 0), ("fedavg + control_variates + lag(k=1)", 0), ("fedmap", 1e-12)]
)
def test_an_upload_of_a_whole_wave_is_that_of_its_clients(method: str, most: float) -> None:
    """Mapped over the clients or not; sums over leaves are made in another order."""
    made = fl.method(method)
    mapped = replace(made, upload=tuple(replace(stage, stacked=False) for stage in made.upload))
    engines = [VectorisedEngine(step="graphed") for _ in range(2)]
    a, b = (fit(m, bn_mlp(), DATA, engine=e, **OPTIONS) for m, e in zip((made, mapped), engines, strict=True))
    assert gap(everything(a), everything(b)) <= most
