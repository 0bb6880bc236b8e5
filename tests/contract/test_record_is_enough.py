"""The record is large enough: methods that strain it, as thin recipes, on both engines.

Each is written here from the outside, with the public parts only, and none touches the client loop, the round loop or an
engine. What each needs is in its name. They are skeletons: the package's own versions are complete and have their own tests.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.spec.parts import (
    Copy,
    Extra,
    Phase,
    Prepare,
    Prepared,
    Receive,
    Rule,
    Sampler,
    Send,
    ServerStage,
    Stage,
    Sweep,
    Term,
)
from fedloom.spec.reducers import mean, ratio, stack
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.terms import quadratic
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message
from tests.helpers import bn_mlp, everything, federation, fit, gap, mlp

DATA = federation((9, 14, 5, 8))


def pfedme(lam: float = 15.0, inner: int = 3, eta: float = 0.005) -> fl.Method:
    """Second copy; several gradient steps on one batch, then a pure update of the other copy."""

    def pull(view: View, batch: Batch, seen: Seen) -> Tensor:
        return lam * quadratic(view.trained, view.leaves, view.of("main"))

    def outer(leaves: Leaves, seen: Seen) -> Leaves:
        names = seen.names("shared")
        return {n: leaves[n] - eta * lam * (leaves[n] - leaves[f"own/{n}"]) for n in names}

    def restart(start: Leaves, seen: Seen) -> Leaves:
        return {f"own/{n}": start[n] for n in seen.names(trainable=None)}

    step = Phase(name="own", copy="own", repeat=inner, after=outer, stream="main")
    method = fl.fedavg("uniform").replacing_schedule("pfedme", round=(Receive(), step, Send()))
    return (
        method.adding(copies=(Copy(owner="pfedme", name="own"),), terms=(Term(owner="pfedme", fn=pull, copy="own"),))
        .replacing_receive("pfedme", restart)
        .replacing_evaluation("pfedme", copy="own")
    )


def fedpac(lam: float = 1.0) -> fl.Method:
    """Sweep under the received model; stacked upload; a message addressed to each client; two phases."""

    def sums(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"sum": batch.by_class(view.z, 3), "count": batch.one_hot(3, view.z.dtype).sum(0)}

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        head = {n: seen.final[n] for n in seen.names("mirrored")}
        return {**message, "centres": seen.swept["centres"], "head": head}, memory

    def combine(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        new = {k: v.clone() for k, v in memory.items()}
        new["centres"] = torch.where(
            reduced["centres"]["count"][:, None] > 0, reduced["centres"]["mean"], memory["centres"]
        )
        for name, heads in reduced["head"].items():
            for i in cohort.ids:
                new[f"{i} {name}"] = heads.mean(0)
        return reduced, new

    def send(memory: Leaves, cohort: Cohort) -> Prepared:
        heads = {i: {n: memory[f"{i} {n}"] for n in ("2.weight", "2.bias")} for i in cohort.ids}
        return Prepared(memory=memory, broadcast={"centres": memory["centres"]}, addressed=heads)

    def start(start: Leaves, seen: Seen) -> Leaves:
        return dict(seen.addressed["fedpac"])

    def near(view: View, batch: Batch, seen: Seen) -> Tensor:
        centres = seen.broadcast["fedpac"]["centres"][batch.y]
        return lam * batch.mean(((view.z - centres) ** 2).mean(1))

    def memory(facts):  # type: ignore[no-untyped-def]
        made = {"centres": torch.zeros(3, facts.structure.feature, dtype=facts.structure.dtype)}
        return made | {f"{c.id} {n}": facts.start[n] for c in DATA for n in ("2.weight", "2.bias")}

    entries = {"centres": ratio(), "head": stack()}
    sweep = Sweep(name="centres", fn=sums, at="received", taps=("z",))
    phases = (Phase(name="head", leaves="head", epochs=1, stream="head"), Phase(name="body", leaves="body"))
    return (
        fl.fedavg()
        .adding(
            rules=(Rule(owner="fedpac", pattern="head", kind="mirrored"),),
            terms=(Term(owner="fedpac", fn=near, phases=("body",), taps=("z",)),),
            stages=(Stage(owner="fedpac", fn=tell, entries=entries),),
            prepare=(Prepare(owner="fedpac", fn=send),),
            server=(ServerStage(owner="fedpac", fn=combine, memory=memory),),
        )
        .replacing_schedule("fedpac", round=(Receive(), sweep, *phases, Send()))
        .replacing_receive("fedpac", start)
    )


def fedaims() -> fl.Method:
    """Extra personal leaves of which only those of the client's key move; a static key per client from the server."""

    def build(structure, generator):  # type: ignore[no-untyped-def]
        return {f"{j}": torch.from_numpy(generator.normal(size=(5, 3)) * 0.1) for j in (0, 1)}

    def auxiliary(view: View, batch: Batch, seen: Seen) -> Tensor:
        logits = view.feature("1") @ view.leaves[f"aims:{seen.key}"]
        return 0.5 * batch.mean(torch.nn.functional.cross_entropy(logits, batch.y, reduction="none"))

    def assign(memory: Leaves, cohort: Cohort) -> Prepared:
        return Prepared(memory=memory, keys={i: k % 2 for k, i in enumerate(cohort.ids)})

    return fl.fedper().adding(
        extras=(Extra(owner="aims", build=build, kind="personal"),),
        terms=(Term(owner="aims", fn=auxiliary, taps=("1",)),),
        prepare=(Prepare(owner="aims", fn=assign),),
    )


def lag() -> fl.Method:
    """Which leaves are shared is server state; the stacked updates decide, at no extra bytes."""

    def choose(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        h = reduced["lag:stack"]["0.weight"].flatten(1).double()
        unit = h / h.norm(dim=1, keepdim=True).clamp(min=1e-30)
        conflicts = ((unit @ unit.T).triu(1).round(decimals=10) < 0).sum()
        return reduced, {"open": (conflicts == 0).to(torch.float64)}

    stage = Stage(
        owner="lag", fn=lambda message, memory, seen: (message, memory), also={"lag:stack": ("delta", stack())}
    )
    server = ServerStage(owner="lag", fn=choose, memory=lambda facts: {"open": torch.ones((), dtype=torch.float64)})
    method = fl.scaffold().adding(stages=(stage,), server=(server,))
    return method.replacing_gate(
        "lag", "0.*", lambda memory: dict.fromkeys(("0.weight", "0.bias"), memory["lag"]["open"])
    )


def fedala() -> fl.Method:
    """Leaves that are weights of others (a view), projected after each step, on a share of the rows, until the loss settles."""

    def build(structure, generator):  # type: ignore[no-untyped-def]
        return {n: torch.ones(tuple(i.shape)) for i in structure.leaves if i.role == "head" for n in (i.name,)}

    def blend(leaves: Leaves, seen: Seen) -> Leaves:
        old = seen.memory["ala"]
        return {n: old[n] + (seen.received[n] - old[n]) * leaves[f"ala:{n}"] for n in old}

    def keep(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return message, {n: seen.final[n] for n in memory}

    weights = Phase(
        name="ala",
        leaves="ala:*",
        stream="ala",
        epochs=3,
        sampler=Sampler(fraction=0.5),
        view=blend,
        project=lambda leaves, seen: {n: v.clamp(0, 1) for n, v in leaves.items() if n.startswith("ala:")},
        after=lambda leaves, seen: blend(leaves, seen),
        until=lambda seen, losses, step: (seen.first == 0) & ((step < 2) | (losses.std() > 0.1)),
    )
    method = fl.fedavg().replacing_schedule(
        "fedala", round=(Receive(), weights, Phase(), Send()), adapt=(Receive(), weights)
    )
    head = ("2.weight", "2.bias")
    return method.adding(
        extras=(Extra(owner="ala", build=build, kind="personal", role="none"),),
        stages=(Stage(owner="ala", fn=keep, memory=lambda facts: {n: facts.start[n] for n in head}),),
    )


def feddbe(kappa: float = 2.0) -> fl.Method:
    """A setup program; a personal leaf at the head's input, in training and prediction; a state carried within a phase."""

    def means(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"sum": batch.sum(view.z), "count": batch.count().to(view.z.dtype)}

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {"mean": seen.swept["mean"]}, memory

    def term(view: View, batch: Batch, seen: Seen, carry: Leaves) -> tuple[Tensor, Leaves]:
        here = batch.sum(view.z) / batch.count()
        running = 0.9 * carry["mean"] + 0.1 * here
        return kappa / 2 * ((running - seen.broadcast["dbe"]["mean"]) ** 2).mean(), {"mean": running}

    size = {"zeros": lambda structure: {"mean": torch.zeros(structure.feature, dtype=structure.dtype)}}
    sweep = Sweep(name="mean", fn=means, taps=("z",))
    return (
        fl.fedavg()
        .replacing_schedule("dbe", setup=(Receive(), sweep, Send()))
        .replacing_rewrite("dbe", lambda z, leaves, seen: z + leaves["dbe:bias"])
        .adding(
            extras=(
                Extra(owner="dbe", build=lambda s, g: {"bias": torch.zeros(s.feature)}, kind="personal", role="head"),
            ),
            terms=(Term(owner="dbe", fn=term, taps=("z",), carry=size["zeros"]),),
            stages=(Stage(owner="dbe", fn=tell, entries={"mean": ratio()}, when="setup"),),
            prepare=(Prepare(owner="dbe", fn=lambda memory, cohort: Prepared(memory=memory, broadcast=memory)),),
            server=(
                ServerStage(
                    owner="dbe",
                    when="setup",
                    fn=lambda reduced, memory, cohort: (reduced, {"mean": reduced["mean"]["mean"]}),
                    memory=lambda facts: {"mean": torch.zeros(facts.structure.feature, dtype=facts.structure.dtype)},
                ),
            ),
        )
    )


def fedmap(sigma2: float = 15.0) -> fl.Method:
    """Mirrored leaves; a sweep after training; a mean whose weights are uploaded logarithms in float64."""

    def prior(view: View, batch: Batch, seen: Seen) -> Tensor:
        return quadratic(view.trained, view.leaves, seen.received) / sigma2

    def likelihood(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"sum": view.loss() * batch.count(), "n": batch.count()}

    def weigh(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        names = seen.names("mirrored")
        penalty = quadratic(names, seen.final, seen.received) / sigma2
        swept = seen.swept["likelihood"]
        return {**message, "omega": {"weight": (-swept["sum"] / swept["n"] - penalty).double()}}, memory

    base = fl.fedavg()
    send = replace(base.upload[0], entries={**base.upload[0].entries, "delta": mean("omega", log=True)})
    return (
        replace(base, upload=(send,))
        .replacing_schedule("map", round=(Receive(), Phase(), Sweep(name="likelihood", fn=likelihood), Send()))
        .adding(
            rules=(Rule(owner="map", pattern="all", kind="mirrored"),),
            terms=(Term(owner="map", fn=prior),),
            stages=(Stage(owner="map", fn=weigh, entries={"omega": stack()}),),
        )
    )


SKELETONS = {f.__name__: f for f in (pfedme, fedpac, fedaims, lag, fedala, feddbe, fedmap)}


@pytest.mark.parametrize("name", SKELETONS)
def test_fits_the_record_on_both_engines(name: str) -> None:
    method = SKELETONS[name]()
    a, b = (fit(method, mlp(), DATA, engine=e, cohort=3) for e in ("loop", "vectorised"))
    left, right = everything(a), everything(b)
    assert set(left) == set(right)
    assert gap(left, right) < 1e-10
    plain = everything(fit("fedavg", mlp(), DATA, cohort=3))
    assert not all(torch.equal(v, right[k]) for k, v in plain.items() if k in right), "it does something"
    assert all(np.isfinite(r["loss"]) for r in a.history)


@pytest.mark.parametrize("mixing", ["alternate", "fixed", "adaptive"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper", "ditto"])
def test_hybrid_is_a_mode_around_the_round(mixing: str, method: str) -> None:
    options = {"mode": "hybrid", "hybrid": {"mixing": mixing, "cloud_fraction": 0.3}, "rounds": 3}
    a, b = (fit(method, bn_mlp(), DATA, engine=e, **options) for e in ("loop", "vectorised"))
    assert gap(everything(a), everything(b)) < 1e-10
    shares = [r["alpha"] for r in a.history]
    assert shares == {"alternate": [1.0, 0.0, 1.0], "fixed": [0.5] * 3}.get(mixing, shares)


def test_there_is_one_local_loop_and_one_round_loop() -> None:
    """Gradients of parameters are taken in one place; nested gradients of terms in one other."""
    package = Path(fl.__file__).parent
    calls: dict[str, list[str]] = {"grad": [], "backward": [], "func": []}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                if text.endswith("autograd.grad"):
                    calls["grad"].append(file.name)
                elif text.endswith(".backward"):
                    calls["backward"].append(file.name)
                elif text.endswith("func.grad"):
                    calls["func"].append(file.name)
    assert set(calls["backward"]) <= {"tap_report.py"}, "what a tap costs is measured there; nothing is trained"
    assert set(calls["grad"]) <= {"step.py"}, "one gradient"
    assert set(calls["func"]) <= {"view.py"}
