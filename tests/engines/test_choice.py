"""Which engine runs: the rule, the probe and its one line, worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from fedloom.clients.runner import ClientRunner
from fedloom.engines import LoopEngine
from fedloom.engines.processes import WorkersEngine
from fedloom.engines.vectorised import VectorisedEngine, compiled
from fedloom.engines.vectorised.arrangement import ManyClients
from fedloom.network import inspect_model
from fedloom.network.bound_method import Bound
from fedloom.network.functional import Network
from fedloom.runs import choose_engine
from fedloom.runs.choose_engine import choose_plan, planned_steps, step_flops
from fedloom.runs.probe import probe
from fedloom.spec.parts import Term
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, run_of, small_cnn

# The rule -------------------------------------------------------------------------------------------------


def structure(model: Any, shape: tuple[int, ...] = (6,)) -> Any:
    return run_of(fit("fedavg", model, federation((4, 4), shape), rounds=1, epochs=1)).bound.structure


def test_the_rule_is_a_function_of_its_arguments() -> None:
    dense, conv = structure(mlp()), structure(small_cnn(), (1, 6, 6))
    assert choose_plan(dense, "cpu", 10, 32, 1000, 2).engine == "vectorised"
    assert choose_plan(dense, "cpu", 10, 32, 1000, 2).step == "auto"
    assert choose_plan(dense, "cpu", 10, 32, 50_000, 2).step == "compiled"
    assert choose_plan(dense, "cpu", 10, 32, 10, 2).engine == "loop"
    assert choose_plan(dense, "cpu", 1, 32, 50_000, 2).engine == "loop"
    assert choose_plan(conv, "cuda", 10, 32, 10, 2).engine == "vectorised"
    assert choose_plan(conv, "cuda", 1, 32, 10, 2).engine == "vectorised"
    long = choose_plan(conv, "cpu", 10, 64, 10**7, 2)
    assert (long.engine, long.workers, long.single) == ("loop", 2, True)
    assert choose_plan(conv, "cpu", 10, 64, 10**7, 1).workers == 0
    assert choose_plan(conv, "cpu", 10, 64, 10, 2).workers == 0
    assert choose_plan(conv, "cpu", 10, 64, 10**7, 2) == choose_plan(conv, "cpu", 10, 64, 10**7, 2)


def test_arithmetic_of_a_step() -> None:
    assert step_flops(structure(mlp()), 32) == 6 * 32 * (6 * 5 + 5 * 3)
    conv = 4 * 9 * 36 + 4 * 3
    assert step_flops(structure(small_cnn(), (1, 6, 6)), 2) == 6 * 2 * conv


def test_planned_steps_are_those_of_the_longest_client() -> None:
    run = run_of(fit("fedavg", mlp(), federation((9, 14, 5)), rounds=3, epochs=2, batch_size=4))
    assert planned_steps(run) == 3 * 2 * 4


def test_the_plan_is_written_down() -> None:
    result = fit("fedavg", mlp(), federation(), engine="auto", device="cpu")
    plan = result.config["resolved"]["plan"]
    assert plan["engine"] == "loop"
    assert "pays" in plan["why"]
    long = fit("fedavg", mlp(), federation((64, 64)), engine="auto", device="cpu", rounds=8, epochs=4)
    assert long.config["resolved"]["plan"]["engine"] == "vectorised"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "fast"}, "engine"),
        ({"engine": "vectorised", "workers": 2}, "workers"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(fl.UserError, match=words):
        fit("fedavg", mlp(), federation(), **options)


# The probe ------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Two layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5, bias=False), nn.Linear(5, 3)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.between(self.a(x))))
        return out


class Branching(Odd):
    def between(self, h: Tensor) -> Tensor:
        return h + 1 if h.sum() > 0 else h


class OwnStatistics(Odd):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.training else h


class RowsSeeEachOther(Odd):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class OwnNoise(Odd):
    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5, self.training)


def verdict(model: Any) -> Any:
    return probe(run_of(fit("fedavg", model, federation((9, 14, 5)), rounds=1)))


def test_probe_passes_plain_models_and_changes_nothing() -> None:
    result = fit("scaffold", bn_mlp(), federation((9, 14, 5)), rounds=1)
    before, state = {k: v.clone() for k, v in everything(result).items()}, torch.get_rng_state()
    assert probe(run_of(result)) == probe(run_of(result))
    assert probe(run_of(result)).why == ""
    assert identical(before, everything(result))
    assert torch.equal(state, torch.get_rng_state())


def test_probe_names_the_line() -> None:
    found = verdict(Branching)
    assert not found.possible
    assert "test_choice.py" in found.why
    assert "h + 1 if h.sum() > 0 else h" in found.why
    with pytest.raises(fl.UserError, match=r"h\.sum\(\) > 0"):
        fit("fedavg", Branching, federation(), engine="vectorised")


def test_auto_falls_back_with_the_line() -> None:
    data = federation((64, 64))
    result = fit("fedavg", Branching, data, engine="auto", rounds=8, epochs=4)
    assert "h.sum() > 0" in result.config["resolved"]["plan"]["why"]
    assert identical(everything(fit("fedavg", Branching, data, rounds=8, epochs=4)), everything(result))


def test_probe_names_the_line_of_a_term() -> None:
    def term(view: Any, batch: Any, seen: Any) -> Tensor:
        return view.output.sum() * float(view.output.sum().item() > 0)

    method = fl.fedavg().adding(terms=(Term(owner="mine", fn=term),))
    found = probe(run_of(fit(method, mlp(), federation(), rounds=1)))
    assert not found.possible
    assert "in term" in found.why
    assert ".item()" in found.why


def test_own_batch_statistics_run_on_the_loop() -> None:
    found = verdict(OwnStatistics)
    assert not found.possible
    assert "rows of a batch see each other" in found.why


def test_rows_that_see_each_other_in_evaluation_run_on_the_loop() -> None:
    found = verdict(RowsSeeEachOther)
    assert not found.possible
    assert "padding" in found.why


def test_noise_of_the_models_own_is_said() -> None:
    found = verdict(OwnNoise)
    assert found.possible
    assert "noise" in found.why


# Workers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ditto", "scaffold"])
def test_workers_give_the_same_numbers_whatever_their_number(method: str) -> None:
    model = fl.models.mlp(6, 3, (5,))
    data = federation((9, 14, 5, 30))
    runs = [everything(fit(method, model, data, workers=n)) for n in (1, 2, 3)]
    alone = everything(fit(method, model, data, engine=LoopEngine(single=True)))
    assert all(identical(alone, other) for other in runs)


@pytest.mark.slow
def test_workers_that_cannot_start_are_not_missed() -> None:
    data = federation((9, 14, 5))
    run = run_of(fit("fedavg", lambda: Odd(), data, rounds=1))
    local = type("Local", (Odd,), {})
    run = run_of(fit("fedavg", local, data, rounds=1))
    with pytest.warns(UserWarning, match="the numbers are the same"):
        engine = WorkersEngine(run, 2)
    assert engine.facts()["events"]
    replies = engine.run_cohort(run.bound, run.work, run.bound.method.schedule.round, *_post(run))
    assert [r.id for r in replies] == ["0", "1", "2"]


def _post(run: Any) -> tuple[Any, Any]:
    from fedloom.rounds import server

    cohort = run.cohort(list(run.sites), 1)
    _, sent = server.dispatch(run.bound, run.state, cohort)
    return sent.post, [run.participant(i, sent) for i in run.sites]


SCRIPT = """
import os, sys, time
import fedloom as fl
from tests.helpers import federation, fit, run_of
from fedloom.engines.processes import WorkersEngine
from fedloom.spec.parts import Term
import multiprocessing as mp
run = run_of(fit("fedavg", fl.models.mlp(6, 3, (5,)), federation(), rounds=1))
engine = WorkersEngine(run, 2)
print(*[p.pid for p in mp.active_children()], flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_workers_die_with_a_killed_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    children = [int(p) for p in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(_alive(p) for p in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(p) for p in children)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_engine_of_ones_own_is_taken_as_it_is() -> None:
    engine = VectorisedEngine()
    run = run_of(fit("fedavg", mlp(), federation(), rounds=1))
    assert choose_engine.choose_engine(run, engine)[0] is engine


def test_long_runs_of_small_networks_are_compiled_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "fused", lambda graph, inputs: graph.forward)
    monkeypatch.setattr(choose_engine, "COMPILE_STEPS", 200)
    options: dict[str, Any] = {"rounds": 8, "epochs": 4, "device": "cpu", "out": tmp_path / "run"}
    result = fit("fedavg", mlp(), federation((64, 64)), engine="auto", **options)
    plan = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["resolved"]["plan"]
    assert (plan["engine"], plan["step"]) == ("vectorised", "compiled")
    alone = fit("fedavg", mlp(), federation((64, 64)), engine="loop", **options | {"out": None})
    assert gap(everything(alone), everything(result)) <= 1e-10


# What only a whole run shows --------------------------------------------------------------------------------


class FailsLater(Odd):
    """A layer whose backward pass fails for many clients, but not on the few rows of a probe."""

    def between(self, h: Tensor) -> Tensor:
        return LateFailure.apply(h, len(h))  # type: ignore[no-any-return]


class LateFailure(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, rows: int) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None

    @staticmethod
    def vmap(info: Any, axes: Any, x: Tensor, rows: int) -> tuple[Tensor, int]:
        return Refusing.apply(x, rows), axes[0]


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if ctx.rows > 10:
            raise RuntimeError("the tensor is not correctly aligned")
        return dy, None


def test_a_backward_pass_that_fails_in_the_first_step_hands_over_to_the_loop(tmp_path: Path) -> None:
    data, options = federation((64, 64)), {"rounds": 16, "epochs": 4, "batch_size": 16}
    with pytest.warns(UserWarning, match=r"one after another.*not correctly aligned"):
        result = fl.fit(
            "fedavg", FailsLater, data, engine="auto", precision="fp64", optimizer=fl.sgd(0.1), progress=False,
            out=tmp_path / "run", **options,
        )  # fmt: skip
    resolved = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["resolved"]
    assert resolved["engine"] == result.config["resolved"]["engine"] == "loop"
    written = resolved["plan"]
    assert written["engine"] == result.config["resolved"]["plan"]["engine"] == "loop"
    assert "not correctly aligned" in written["why"]
    assert written["wave"] == 0
    assert run_of(result).engine.facts()["engine"] == "loop"
    assert identical(everything(fit("fedavg", FailsLater, data, **options)), everything(result))
    run = run_of(result)
    engine, _ = choose_engine.choose_engine(run, "auto", saved=written)
    assert isinstance(engine, LoopEngine), "a run that goes on tries again"


def fail_in_the_second_wave_of_round_two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a wave of round 2 fail after its steps. Returns a list of the rounds of all waves."""
    waves, play = list[int](), ClientRunner.run

    def run(self: ClientRunner, program: Any) -> None:
        play(self, program)
        if isinstance(self.arrangement, ManyClients) and len(self.participants) > 1:
            waves.append(self.post.round)
            if waves.count(2) == 2:
                raise RuntimeError("late trouble")

    monkeypatch.setattr(ClientRunner, "run", run)
    return waves


def test_fallback_in_a_later_round_keeps_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_the_second_wave_of_round_two(monkeypatch)
    build, run_cohort = inspect_model.build, LoopEngine.run_cohort
    built, used = list[Network](), list[Network]()

    def recorded_build(*args: Any, **options: Any) -> Network:
        built.append(build(*args, **options))
        return built[-1]

    def recorded_cohort(self: LoopEngine, bound: Bound, *args: Any) -> Any:
        used.append(bound.network)
        return run_cohort(self, bound, *args)

    monkeypatch.setattr(inspect_model, "build", recorded_build)
    monkeypatch.setattr(LoopEngine, "run_cohort", recorded_cohort)
    engine = VectorisedEngine(step="mapped", wave=2, otherwise=choose_engine._take_over)
    options = {"rounds": 3, "cohort": 4, "evaluate": {"every": 0}}
    result = fit("fedavg", small_cnn(), federation((9, 14, 5, 8), (1, 6, 6)), engine=engine, **options)
    assert isinstance(engine.instead, LoopEngine)
    assert len(built) == 1
    assert used
    assert all(network is built[0] for network in (*used, run_of(result).bound.network))


@pytest.mark.parametrize("method", ["fedavg + lag(k=1)", "scaffold", "moon"])
def test_a_step_that_fails_in_the_second_wave_of_a_later_round_changes_no_numbers(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waves = fail_in_the_second_wave_of_round_two(monkeypatch)
    data, options = federation((9, 14, 5, 8)), {"rounds": 3, "cohort": 4, "evaluate": {"every": 0}}
    engine = VectorisedEngine(step="mapped", wave=2, otherwise=choose_engine._take_over)
    side = fit(method, mlp(), data, engine=engine, **options)
    assert waves == [1, 1, 2, 2]
    assert isinstance(engine.instead, LoopEngine)
    assert gap(everything(fit(method, mlp(), data, **options)), everything(side)) < 1e-10


def test_a_backward_pass_that_fails_is_named_where_the_engine_was_asked_for() -> None:
    with pytest.raises(fl.NotVectorisable, match=r"not correctly aligned.*engine='auto'"):
        fit("fedavg", FailsLater, federation((64, 64)), engine="vectorised", batch_size=16)
    with pytest.raises(RuntimeError, match="not correctly aligned"):
        fit("fedavg", FailsLater, federation((64, 64)), engine=VectorisedEngine(step="mapped"), batch_size=16)


def test_what_fails_in_the_loop_too_is_said_by_the_loop() -> None:
    class Broken(Odd):
        def between(self, h: Tensor) -> Tensor:
            if len(h) > 10:
                raise RuntimeError("no more than ten")
            return h

    data = federation((64, 64))
    with pytest.warns(UserWarning, match="one after another"), pytest.raises(RuntimeError, match="no more than ten"):
        fl.fit("fedavg", Broken, data, engine="auto", rounds=16, epochs=4, batch_size=16, progress=False)
