"""The training step: every runner makes the same step, and a step changes its state in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom import rng
from fedloom.clients.arrangement import ONE_CLIENT, Arrangement, Shapes
from fedloom.clients.messages import Participant, Post
from fedloom.clients.runner import ClientRunner, planned
from fedloom.clients.step import EagerRunner, PhaseStart, Step, StepRunner, StepState
from fedloom.engines.vectorised import VectorisedEngine, compiled
from fedloom.engines.vectorised.arrangement import ManyClients
from fedloom.engines.vectorised.rows import RowCache
from fedloom.engines.vectorised.traced import TracedGradients, Traces
from fedloom.network.bound_method import BoundPhase
from fedloom.rounds import server
from fedloom.rounds.run import Run
from fedloom.spec.optimizer import OptState
from fedloom.spec.parts import Phase, Receive, Schedule, Send, Term
from fedloom.tensors import flatten, map_nested, structure_of, unflatten
from tests.helpers import bn_mlp, dropout_mlp, everything, federation, fit, gap, mlp, run_of

SIZES = (14, 9, 5)
CARRY = {"sum": torch.zeros(3, dtype=torch.float64), "count": torch.zeros((), dtype=torch.float64)}


def term(view: Any, batch: Any, seen: Any, carry: Any) -> Any:
    """A term whose carried values come back with their keys in another order."""
    output = view.output
    means = torch.stack([batch.mean(column) for column in output.unbind(1)])
    value = batch.mean((output - carry["sum"]).square().sum(-1)) * 0.1 * (1 + carry["count"])
    return value, {"count": carry["count"] + 1, "sum": carry["sum"] + means.detach()}


def method() -> fl.Method:
    """Only weights are trained; a projection writes a bias. All carries begin with one object."""
    phase = Phase(
        leaves="*.weight",
        repeat=2,
        project=lambda leaves, seen: {"0.bias": leaves["0.bias"] + leaves["0.weight"].sum(1)},
        after=lambda leaves, seen: {"2.weight": leaves["2.weight"] * 0.9},
    )
    record = replace(fl.fedavg(), schedule=Schedule(round=(Receive(), phase, Send())))
    return record.adding(terms=(Term(owner="memory", fn=term, carry=lambda structure: CARRY),))


def dispatch(run: Run, round: int = 1) -> tuple[Post, list[Participant], Any]:
    cohort = run.cohort(run.roster.ids, round)
    run.state, sent = server.dispatch(run.bound, run.state, cohort)
    return sent.post, [run.participant(name, sent) for name in run.roster.ids], cohort


def prepared(text: str | fl.Method, model: Any, sizes: Sequence[int], **options: Any) -> Run:
    """A run before its first round."""
    run = run_of(fit(text, model, federation(sizes), rounds=1, device="cpu", **options))
    run.state, run.clients = server.initial_state(run.bound), {}
    return run


def client_runner(run: Run, people: Sequence[Participant], post: Post, arrangement: Arrangement) -> ClientRunner:
    client = ClientRunner(run.bound, run.work, post, people, arrangement)
    client.receive(Receive())
    return client


def random_start(client: ClientRunner, phase: BoundPhase) -> PhaseStart:
    """A wave in the middle of a phase: every client has other values."""
    start, draw = client.start(phase), torch.Generator().manual_seed(0)

    def random(value: Tensor) -> Tensor:
        return torch.rand(value.shape, generator=draw, dtype=value.dtype)

    leaves = {name: random(value) for name, value in start.leaves.items()}
    slots = {"m": [random(leaves[name]) for name in phase.trained]}
    carry = {owner: {k: random(v) for k, v in values.items()} for owner, values in start.carry.items()}
    return PhaseStart(leaves, carry, random(start.total), [OptState(slots, 3)], start.clients)


def of_client(start: PhaseStart, i: int) -> PhaseStart:
    """One client's part of the beginning of a phase."""
    leaves, carry, total = map_nested(lambda value: value[i].clone(), (start.leaves, start.carry, start.total))
    moments = [OptState({"m": [m[i].clone() for m in state.slots["m"]]}, state.step) for state in start.moments or ()]
    return PhaseStart(leaves, carry, total, moments, 1)


def fields(state: StepState) -> dict[str, Tensor]:
    """All tensors of a state by name."""
    tensors = {**state.leaves, "total": state.total}
    tensors |= {f"{owner} {k}": v for owner, values in state.carry.items() for k, v in values.items()}
    for group in state.groups or ():
        tensors |= {f"m {name}": m for name, m in zip(group.names, group.state.slots["m"], strict=True)}
    return tensors


Case = tuple[Run, list[Participant], Post, BoundPhase]


@pytest.fixture
def case() -> Case:
    run = prepared(method(), mlp(), SIZES, optimizer=fl.sgd(0.1, momentum=0.9, weight_decay=0.01))
    post, people, _ = dispatch(run)
    return run, people, post, run.bound.phases["main"]


def mapped(step: Step, start: PhaseStart, client: ClientRunner, phase: BoundPhase) -> StepRunner:
    return EagerRunner(step, start, client.inputs, client.schedule(phase, "narrow"))


def traced(step: Step, start: PhaseStart, client: ClientRunner, phase: BoundPhase) -> StepRunner:
    traces, schedule = Traces(1), client.schedule(phase, "narrow")
    gradients = TracedGradients(step, traces, schedule, 1)

    class Checked(EagerRunner):
        def finish(self) -> StepState:
            assert all(gradients.ready.values())
            assert not traces.notes
            return super().finish()

    return Checked(step, start, client.inputs, schedule, gradients)


def whole(step: Step, start: PhaseStart, client: ClientRunner, phase: BoundPhase) -> StepRunner:
    reached, schedule = set(phase.trained), client.schedule(phase, "fixed")
    store: Any = Traces(1, compiled=True)
    written = {*reached, "0.bias"}
    runner = compiled.start_compiled(step, start, client.inputs, schedule, (reached, written), store)  # type: ignore[arg-type]
    assert runner is not None, store.notes
    return runner


@pytest.mark.parametrize("steps", [1, None])
@pytest.mark.parametrize("runner", [mapped, traced, whole])
def test_every_runner_makes_the_same_step(
    case: Case, runner: Callable[..., StepRunner], steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step, and a phase in which clients run out of rows, change every field as for each client alone."""
    monkeypatch.setattr(compiled, "fused", lambda graph, inputs: graph.forward)
    run, people, post, phase = case
    wave = client_runner(run, people, post, ManyClients(RowCache()))
    start = random_start(wave, phase)
    before = copy.deepcopy(start)
    together = runner(wave.step(phase), start, wave, phase)
    for slot in together.schedule.slots[:steps]:
        together.run(slot)
    state = together.finish()
    assert state.written == {*phase.trained, "0.bias"}
    for i, person in enumerate(people):
        client = client_runner(run, [person], post, ONE_CLIENT)
        schedule = client.schedule(phase, "narrow")
        alone = EagerRunner(client.step(phase), of_client(before, i), client.inputs, schedule)
        for slot in alone.schedule.slots[:steps]:
            alone.run(slot)
        expected = fields(alone.finish())
        actual = {name: value[i] for name, value in fields(state).items()}
        assert expected.keys() == actual.keys()
        if steps is None:  # carried values of clients without further rows are not used any more
            expected = {name: value for name, value in expected.items() if not name.startswith("memory ")}
        for name, value in expected.items():
            assert torch.allclose(actual[name], value, rtol=1e-11, atol=1e-11), name
        if steps:
            assert int(state.number) == int(alone.state.number) == steps
            counts = [int(g.state.step) for s in (state, alone.state) for g in s.groups or ()]
            assert counts == [3 + 2 * steps] * 2


def test_a_front_shares_memory_with_the_whole(case: Case) -> None:
    """Every tensor of a front is a view, also of leaves that a projection writes later."""
    run, people, post, phase = case
    wave = client_runner(run, people, post, ManyClients(RowCache()))
    step = wave.step(phase)
    state = random_start(wave, phase).state(step)
    state.start_optimizers(step, set(phase.trained))
    front = state.front(2).front(1)
    old = front.leaves
    front.writable("2.bias")
    assert front.leaves is not old, "a new dictionary tells TracedGradients that a leaf has new memory"
    assert front.leaves["2.bias"] is front.writable("2.bias")
    parts, wholes = fields(front), fields(state)
    for name, part in parts.items():
        assert part.shape[0] == 1
        assert part.data_ptr() == wholes[name].data_ptr(), name
    assert front.written is state.written
    assert front.whole is state


def test_clients_do_not_share_carried_values(case: Case) -> None:
    """The carry function returns one object each time; steps change neither it nor other clients' values."""
    run, people, post, phase = case
    for arrangement, group in ((ManyClients(RowCache()), people), (ONE_CLIENT, people[:1])):
        client = client_runner(run, group, post, arrangement)
        for value in client.start(phase).carry["memory"].values():
            value += 1
            assert value.untyped_storage().nbytes() == value.nbytes
        client.train(phase)
    assert all(not value.any() for value in CARRY.values())


@pytest.mark.parametrize("step", ["mapped", "traced"])
def test_losses_of_stopped_clients_may_be_nan(step: Any) -> None:
    """The rows of stopped clients are masked, so that a mean over them is NaN and changes nothing."""

    def mean(view: Any, batch: Any, seen: Any) -> Tensor:
        mask = torch.ones_like(view.output[:, 0]) if batch.mask is None else batch.mask
        return (view.output.square().sum(1) * mask).sum() / mask.sum()  # type: ignore[no-any-return]

    phase = Phase(until=lambda seen, losses, step: step < seen.n / 5)
    record = replace(fl.fedavg(), schedule=Schedule(round=(Receive(), phase, Send())), objective=())
    record = record.adding(terms=(Term(owner="mean", fn=mean, role="data"),))
    options: dict[str, Any] = {"epochs": 4, "rounds": 2}
    plain = fit(record, mlp(), federation(SIZES), **options)
    wave = fit(record, mlp(), federation(SIZES), engine=VectorisedEngine(step=step), **options)
    assert gap(everything(plain), everything(wave)) < 1e-10
    for a, b in zip(plain.history, wave.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"])


def test_clients_without_steps() -> None:
    """A client with one row and batch norm keeps the received leaves. Its loss is NaN, or None if nobody has a step."""
    run = prepared("fedavg", bn_mlp(), (9, 1))
    post, people, _ = dispatch(run)
    for group, losses in ((people, [False, True]), (people[1:], [None])):
        client = ClientRunner(run.bound, run.work, post, group, ManyClients(RowCache()))
        client.run(run.bound.method.schedule.round)
        replies = client.replies()
        assert [None if r.loss is None else bool(torch.as_tensor(r.loss).isnan()) for r in replies] == losses
        assert replies[-1].steps == {"main": 0}
        assert all(torch.equal(value[-1], post.leaves[name]) for name, value in client.leaves.items())


class ClientsOfRuns(ClientRunner):
    """Clients of several runs in one wave: fields that differ between runs have a client axis."""

    def __init__(self, runs: Sequence[Run], posts: Sequence[Post], people: Sequence[Participant]) -> None:
        super().__init__(runs[0].bound, runs[0].work, posts[0], people, ManyClients(RowCache()))
        self.runs = runs
        common = [{"received": p.leaves, "broadcast": p.broadcast, "gate": p.gate} for p in posts]
        rates = [run.work.optimizer.lr_at(post.round) for run, post in zip(runs, posts, strict=True)]
        keys = [
            rng.key_of(run.work.seed, "noise", p.site.id, posts[0].round) for run, p in zip(runs, people, strict=True)
        ]
        lr = torch.tensor(rates, dtype=torch.float64)
        own = self.inputs.own | unflatten(
            structure_of(common[0]), [torch.stack(values) for values in zip(*map(flatten, common), strict=True)]
        )
        own |= {"noise": torch.tensor(keys), "lr": lr, "rates": dict.fromkeys(self.bound.phases, lr)}
        facts = {k: v for k, v in self.inputs.facts.items() if k not in ("lr", "rates")}
        self.inputs = replace(self.inputs, own=own, common={"gate": {}}, facts=facts)

    def received(self) -> dict[str, Sequence[Tensor]]:
        return {name: value.unbind(0) for name, value in self.inputs.own["received"].items()}

    def receive(self, step: Receive) -> None:
        super().receive(step)
        self.inputs = replace(self.inputs, common={})

    def step(self, phase: BoundPhase) -> Step:
        step = super().step(phase)
        return replace(step, groups=tuple((names, o, self.inputs.own["lr"]) for names, o, _ in step.groups))

    def schedule(self, phase: BoundPhase, shapes: Shapes) -> Any:
        pairs = list(zip(self.runs, self.participants, strict=True))
        steps = [planned(self.bound, run.work, self.inputs.facts["round"], phase, p) for run, p in pairs]
        parts = [p.site.train for p in self.participants]
        return self.arrangement.schedule(parts, steps, self.bound.structure.dtype, shapes)


@pytest.mark.parametrize("optimizer", [fl.sgd, fl.adam])
@pytest.mark.parametrize("text", ["fedavg", "scaffold", "fedper", "ditto"])
def test_clients_of_several_runs_can_share_a_wave(text: str, optimizer: Any) -> None:
    """Two seeds and two learning rates, with dropout and clients of unequal sizes: every run as alone."""
    if text == "scaffold" and optimizer is fl.adam:
        pytest.skip("scaffold needs SGD")

    def runs() -> list[Run]:
        options = [{"seed": seed, "optimizer": optimizer(lr)} for seed in (0, 1) for lr in (0.05, 0.1)]
        return [prepared(text, dropout_mlp(), (9, 14, 5), **o) for o in options]

    def finish(run: Run, replies: Any, cohort: Any) -> None:
        run.state = server.aggregate(run.bound, run.state, replies, cohort)
        run.clients |= {reply.id: reply.state for reply in replies}

    alone, together = runs(), runs()
    for round in (1, 2):
        for run in alone:
            post, people, cohort = dispatch(run, round)
            client = ClientRunner(run.bound, run.work, post, sorted(people, key=_size), ManyClients(RowCache()))
            client.run(run.bound.method.schedule.round)
            finish(run, sorted(client.replies(), key=lambda reply: reply.id), cohort)
        sent = [dispatch(run, round) for run in together]
        pairs = sorted(
            ((i, p) for i, (_, people, _) in enumerate(sent) for p in people), key=lambda pair: _size(pair[1])
        )
        wave = ClientsOfRuns([together[i] for i, _ in pairs], [sent[i][0] for i, _ in pairs], [p for _, p in pairs])
        wave.run(together[0].bound.method.schedule.round)
        replies = wave.replies()
        for i, run in enumerate(together):
            of_run = [reply for (j, _), reply in zip(pairs, replies, strict=True) if j == i]
            finish(run, sorted(of_run, key=lambda reply: reply.id), sent[i][2])
    for a, b in zip(alone, together, strict=True):
        assert gap(a.state.leaves, b.state.leaves) < 1e-12
    assert gap(alone[0].state.leaves, alone[-1].state.leaves) > 1e-3


def _size(person: Participant) -> int:
    return -len(person.site.train)
