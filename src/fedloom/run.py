"""A run: everything is resolved before round one, then THE round loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedloom import evaluation, rng, sampling, server
from fedloom.bound import Bound
from fedloom.clients.runner import ClientRunner
from fedloom.data import Rows
from fedloom.engines import Engine
from fedloom.errors import RunError
from fedloom.options import Participation
from fedloom.server import Dispatch, Outcome, ServerState
from fedloom.sites import Sites
from fedloom.slots import Judge, Program, Receive, Send, Step
from fedloom.tasks.base import Metrics
from fedloom.traffic import traffic
from fedloom.types import Cohort, Memory
from fedloom.work import ClientState, Participant, Post, Reply, Site, Work

Record = dict[str, Any]

SERVER = "server"
JUDGED = 1024
"""Clients that are tested at a time: what they keep is in memory together."""


@dataclass(slots=True)
class Run:
    """The state of a run and the steps that change it.

    Args:
        bound: the method bound to model and task; ``later`` holds those that take over after some rounds.
        engine: where clients run.
        work: how they work.
        sites: the clients, in federation order.
        size: clients per round.
        state: the server.
        clients: what each client keeps.
        judges: the sites on whose rows models are tested, and the site whose state each uses.
        last: metrics of the last evaluation, by client.
        participation: who takes part in a round.
        trace: who is available in each round, where participation says so.
        moments: when the clients of a round are tested besides its end: ``before`` and ``after`` their training.
        new: clients that never take part and are adapted at the end.
        adapt_epochs: epochs of their adaptation.
        setup_replies: what clients sent in the setup program; the first round counts their bytes.
        watch: called in a round with the bound method, the server's state before it and the sorted replies, which it does
            not change.
    """

    bound: Bound
    engine: Engine
    work: Work
    sites: Mapping[str, Site]
    size: int
    state: ServerState
    clients: MutableMapping[str, ClientState] = field(default_factory=dict)
    later: Mapping[int, Bound] = field(default_factory=dict)
    judges: Mapping[str, tuple[Site, str]] = field(default_factory=dict)
    last: dict[str, Metrics] = field(default_factory=dict)
    participation: Participation = field(default_factory=Participation)
    trace: sampling.Trace = ()
    moments: tuple[str, ...] = ()
    new: Mapping[str, Site] = field(default_factory=dict)
    adapt_epochs: int = 5
    setup_replies: Sequence[Reply] = ()
    watch: Callable[[Bound, ServerState, Outcome], None] | None = None
    _roster: tuple[Mapping[str, Site], sampling.Roster, Mapping[str, int]] | None = None

    @property
    def roster(self) -> sampling.Roster:
        """Who there is and how many training rows each has."""
        if self._roster is None or self._roster[0] is not self.sites:
            rows = (
                self.sites.rows()
                if isinstance(self.sites, Sites)
                else {name: len(site.train) for name, site in self.sites.items()}
            )
            self._roster = (self.sites, sampling.Roster.of(rows), rows)
        return self._roster[1]

    def at(self, round: int) -> Bound:
        """The bound method in force in a round."""
        begun = [r for r in self.later if round > r]
        return self.later[max(begun)] if begun else self.bound

    def cohort(self, ids: Sequence[str], round: int) -> Cohort:
        """What server stages know of a cohort."""
        roster = self.roster
        assert self._roster is not None
        return Cohort(
            ids=tuple(ids),
            rows=roster.rows if ids is roster.ids else tuple([self._roster[2][i] for i in ids]),
            population=len(self.sites),
            round=round,
            leaves=self.state.leaves,
            lr=self.work.optimizer.lr_at(round, self.work.rounds),
            structure=self.at(round).structure,
            seed=self.work.seed,
            order=roster.ids,
            rounds=self.work.rounds,
        )

    def participant(self, name: str, sent: Dispatch | None = None, share: float = 1.0) -> Participant:
        """A client that is asked to work."""
        addressed: Memory = dict(sent.addressed[name]) if sent is not None else {}
        key = sent.keys.get(name) if sent is not None else None
        return Participant(self.sites[name], self.state_of(name), addressed, key, share)

    def state_of(self, name: str) -> ClientState:
        """What a client keeps; nothing before its first round."""
        return self.clients.get(name) or ClientState()

    def rounds_of(self, name: str) -> int:
        """How often a client has taken part."""
        counted = getattr(self.clients, "rounds", None)  # a store knows it without reading what the client keeps
        return self.state_of(name).rounds if counted is None else int(counted(name))

    # One round.

    def setup(self) -> None:
        """The setup program: every client, once, before round one; or one client for all."""
        program = self.bound.method.schedule.setup
        if not program:
            return
        ids = list(self.sites)
        if self.bound.method.schedule.setup_by == "one":
            ids = [ids[int(rng.stream(self.work.seed, "sample", "setup").integers(len(ids)))]]
        cohort = self.cohort(ids, 0)
        sent = server.plain_dispatch(self.bound, self.state, cohort)
        people = [self.participant(i, sent) for i in ids]
        replies = self.engine.run_cohort(self.bound, self.work, program, sent.post, people)
        pending = server.aggregate_replies(self.bound, self.state, replies, lambda ids: self.cohort(ids, 0), "setup")
        after, outcome = server.confirm(pending)
        if outcome.rejected:
            raise RunError(f"setup: no reply may be missing ({_reasons(outcome)}); nothing was stored")
        self.state, self.setup_replies = after, outcome.accepted
        for reply in outcome.accepted:
            self.clients[reply.id] = replace(reply.state, rounds=0)

    def drawn(self, round: int) -> sampling.Drawn:
        """Who takes part in a round."""
        everyone = self.at(round).method.schedule.participation == "all"
        return sampling.draw(
            self.participation, self.trace, self.work.seed, round, self.roster, self.size, everyone=everyone
        )

    def play(
        self,
        ids: Sequence[str],
        round: int,
        shares: Mapping[str, float] | None = None,
        dropped: Sequence[str] = (),
    ) -> tuple[Outcome, Dispatch]:
        """One round: prepare, clients, aggregate, confirm, store. Nothing is kept of a reply that is rejected.

        Args:
            ids: the clients that are asked.
            round: the round, from 1.
            shares: share of their steps that stragglers make.
            dropped: clients that were asked and send nothing; where all are, the round changes nothing.
        """
        bound = self.at(round)
        if round - 1 in self.later:
            self.state = server.handed_over(bound, self.state)
        self.state, sent = server.dispatch(bound, self.state, self.cohort(ids, round))
        people = [self.participant(i, sent, (shares or {}).get(i, 1.0)) for i in ids if i not in dropped]
        if not people:
            self.state = replace(self.state, round=round)
            return Outcome(), sent
        replies = self._replies(bound, sent.post, people)
        self._prefetch(round + 1)
        pending = server.aggregate_replies(bound, self.state, replies, lambda ids: self.cohort(ids, round))
        after, outcome = server.confirm(pending)
        if not outcome.accepted:
            reasons = _reasons(outcome) or "no client made a step"
            raise RunError(
                f"round {round}: no reply could be used ({reasons}); the last good state is that of round {round - 1}"
            )
        if self.watch is not None:
            self.watch(bound, self.state, outcome)
        self.state = after
        for reply in outcome.accepted:
            self.clients[reply.id] = reply.state
        self._own_work(bound, round)
        return outcome, sent

    def _prefetch(self, round: int) -> None:
        """Tells the engine which clients come next, before anything waits for the device. Most engines ignore it."""

        def participants() -> list[Participant]:
            drawn = self.drawn(round)
            working = [i for i in drawn.ids if i not in drawn.dropped]
            return [Participant(self.sites[i], ClientState(), share=drawn.shares.get(i, 1.0)) for i in working]

        if self.work.rounds is None or round <= self.work.rounds:
            self.engine.prefetch(self.at(round), self.work, round, participants)

    def _own_work(self, bound: Bound, round: int) -> None:
        """The server's own program: the server as one more participant, with the rows that it holds."""
        program, rows = bound.method.schedule.server, bound.method.server.rows
        if not program or rows is None:
            return
        x, y = rows(self.state.memory)
        site = Site(SERVER, Rows(x, y), None, None, y.cpu().numpy(), torch.zeros(0, device=y.device))
        cohort = replace(self.cohort([], round), ids=(SERVER,), rows=(len(y),))
        _, sent = server.dispatch(bound, self.state, cohort)
        desk = ClientRunner(bound, self.work, sent.post, [Participant(site, ClientState())])
        desk.run(program)
        (reply,) = desk.replies()
        leaves = server.add_update(self.state.leaves, reply.message)
        server.check_leaves(leaves)
        self.state = replace(self.state, leaves=leaves)

    def _replies(self, bound: Bound, post: Post, people: Sequence[Participant]) -> list[Reply]:
        """The clients' work; those that have test rows are tested in between, where the run asks for it."""
        program = bound.method.schedule.round
        if not self.moments:
            return self.engine.run_cohort(bound, self.work, program, post, people)
        tested = [p for p in people if p.site.test is not None]
        others = [p for p in people if p.site.test is None]
        found: dict[str, Reply] = {}
        for group, steps in ((tested, with_judgements(program, self.moments)), (others, program)):
            if group:
                found |= {r.id: r for r in self.engine.run_cohort(bound, self.work, steps, post, group)}
        return [found[p.site.id] for p in people]

    # Evaluation.

    def validate(self, ids: Iterable[str]) -> dict[str, Metrics]:
        """Metrics of clients' own models on their validation rows."""
        bound = self.at(self.state.round)
        sizes = {n: len(rows) for n in ids if (rows := self.judges[n][0].val) is not None}
        if not sizes:
            return {}
        program = (*bound.method.schedule.adapt, Judge(rows="val"))
        return evaluation.own_metrics(bound.task, self.judged(bound, program, list(sizes)), sizes)

    def evaluate(self, ids: Iterable[str], *, shared: bool = True) -> tuple[dict[str, Metrics], Metrics | None]:
        """Metrics of clients' own models on their test rows, and of the shared model on all of them."""
        bound = self.at(self.state.round)
        judges = [n for n in ids if self.judges[n][0].test is not None]
        if not judges:
            return {}, None
        sizes = {n: len(rows) for n in judges if (rows := self.judges[n][0].test) is not None}
        replies = self.judged(bound, (*bound.method.schedule.adapt, Judge()), judges)
        own = evaluation.own_metrics(bound.task, replies, sizes)
        if not shared or not bound.complete():
            return own, None
        if not bound.uniform():
            replies = self.judged(bound, (Receive(plain=True), Judge(route=False)), judges)
        return own, evaluation.pooled_metrics(bound.task, replies, "test")

    def judged(self, bound: Bound, program: Program, names: Sequence[str]) -> list[Reply]:
        """Runs a program that ends in a judgement; nothing that it changes is kept."""
        post, addressed = self._evaluation_post(bound)
        replies: list[Reply] = []
        for start in range(0, len(names), JUDGED):
            people = [self._judge(n, addressed) for n in names[start : start + JUDGED]]
            some = self.engine.run_cohort(bound, self.work, program, post, people)
            replies += [replace(r, state=ClientState()) for r in some]
        return replies

    def desk(self, name: str) -> ClientRunner:
        """A client's desk after its adapt program: its own model, ready for use."""
        return next(self.desks([name]))

    def desks(self, names: Iterable[str]) -> Iterator[ClientRunner]:
        """The desks of several clients, one after another."""
        bound = self.at(self.state.round)
        post, addressed = self._evaluation_post(bound)
        for name in names:
            desk = ClientRunner(bound, self.work, post, [self._judge(name, addressed)])
            with torch.inference_mode(False), torch.enable_grad():  # a caller may have switched gradients off
                desk.run(bound.method.schedule.adapt)
            yield desk

    def _evaluation_post(self, bound: Bound) -> tuple[Post, Mapping[str, Memory]]:
        """The post of the model that is tested; prepare stages run only where the method's own model depends on them."""
        cohort = self.cohort(self.roster.ids, self.state.round)
        method, state = bound.method, self.state
        if method.partition.receive is None and len(method.schedule.adapt) == 1 and method.evaluate.predict is None:
            return server.post(bound, state, cohort, {}, tested=True), {}
        state, sent = server.dispatch(bound, state, cohort)
        return server.post(bound, state, cohort, sent.post.broadcast, tested=True), sent.addressed

    def _judge(self, name: str, addressed: Mapping[str, Memory]) -> Participant:
        site, owner = self.judges[name]
        return Participant(site, self.state_of(owner), dict(addressed.get(owner, {})))


def _reasons(outcome: Outcome) -> str:
    return "; ".join(f"client {r.client}: {r.reason}" for r in outcome.rejected)


def rounds(
    run: Run,
    total: int,
    play: Callable[[int], Record],
    *,
    evaluate: Callable[[int, Record], Record],
    after: Callable[[Record], bool],
) -> None:
    """THE round loop.

    Args:
        run: the run; it may have played some rounds already.
        total: number of rounds.
        play: plays a round in the run's mode and returns its facts.
        evaluate: returns the metrics of a round, given its facts (nulls where it is not evaluated).
        after: called with each record, which it may complete; true stops the run.
    """
    for round in range(run.state.round + 1, total + 1):
        begun = time.perf_counter()
        facts = play(round)
        synchronise(run)
        played = time.perf_counter()
        metrics = evaluate(round, facts)
        done = time.perf_counter()
        times = {"seconds": played - begun, "seconds_eval": done - played, "seconds_total": done - begun}
        if after({"round": round, **facts, **metrics, **times}):
            break


def synchronise(run: Run) -> None:
    """Waits for the device, so that times are true."""
    if next(iter(run.state.leaves.values())).is_cuda:
        torch.cuda.synchronize()


def with_judgements(program: Program, moments: Sequence[str]) -> Program:
    """A round's program that also tests the client's model before and after its training."""
    steps: list[Step] = []
    for step in program:
        if isinstance(step, Send) and "after" in moments:
            steps.append(Judge(name="after"))
        steps.append(step)
        if isinstance(step, Receive) and "before" in moments:
            steps.append(Judge(name="before"))
    return tuple(steps)


def federated(run: Run, round: int) -> Record:
    """One round over the sites."""
    drawn = run.drawn(round)
    newcomers = sum(run.rounds_of(i) == 0 for i in drawn.ids) if round > 1 else 0
    bound = run.at(round)
    outcome, sent = run.play(drawn.ids, round, drawn.shares, drawn.dropped)
    losses = [float(r.loss) for r in outcome.accepted if r.loss is not None]
    record: Record = {
        "train_loss": sum(losses) / len(losses) if losses else None,
        **traffic(bound, [*outcome.accepted, *run.setup_replies], sent, drawn.ids, newcomers),
        **server.reports(bound, run.state),
        "clients": list(drawn.ids),
        "skipped": list(outcome.skipped),
        "rejected": [{"client": r.client, "round": round, "reason": r.reason} for r in outcome.rejected],
    }
    run.setup_replies = ()
    if run.participation.dropout:
        record["dropped"] = list(drawn.dropped)
    if run.participation.stragglers:
        record["stragglers"] = list(drawn.shares)
    task = run.bound.task
    for moment in run.moments:
        scores = [task.judge(*r.judged[moment]).get(task.primary) for r in outcome.accepted if moment in r.judged]
        known = [v for v in scores if v is not None]
        record[f"{task.primary}_{moment}"] = sum(known) / len(known) if known else None
    return record
