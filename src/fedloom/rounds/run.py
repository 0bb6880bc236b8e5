"""A run and THE round loop.

:meth:`Run.play` is one round: dispatch, ``run_cohort``, ``prefetch``, ``aggregate_replies``, ``confirm``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedloom import devices, rng
from fedloom.clients.lazy_clients import Sites
from fedloom.clients.messages import Participant, Post, Reply, Site, Work
from fedloom.clients.runner import ClientRunner
from fedloom.clients.states import ClientState, ServerState
from fedloom.data import Rows
from fedloom.engines import Engine
from fedloom.errors import RunError
from fedloom.network.bound_method import Bound
from fedloom.rounds import evaluation, sampling, server
from fedloom.rounds.sampling import Participation
from fedloom.rounds.server import Dispatch, Outcome
from fedloom.rounds.traffic import traffic
from fedloom.spec.parts import Judge, Program, Receive, Send, Step
from fedloom.spec.seen import Cohort
from fedloom.tasks.base import Metrics
from fedloom.tensors import Memory

Record = dict[str, Any]

SERVER = "server"
EVALUATION_COHORT = 1024
"""Largest number of clients that are evaluated together: their states are in memory at the same time."""


@dataclass(slots=True)
class Run:
    """State of a run, and the steps that change it.

    Args:
        bound: the method, bound to model and task.
        engine: runs the clients.
        work: options of the clients' training.
        sites: the clients, in federation order.
        size: clients per round.
        state: the server's state.
        clients: the clients' states.
        later: methods that replace ``bound``, by the round after which they do.
        judges: for each client with test rows its site, and the client whose state is tested on it.
        last: metrics of the last evaluation, by client.
        participation: options of the clients' participation.
        trace: the clients that are available in each round, if participation depends on it.
        moments: additional tests in a round: ``before`` and ``after`` the clients' training.
        new: clients that never take part and are adapted at the end.
        adapt_epochs: epochs of their adaptation.
        setup_replies: replies of the setup program; the first round counts their bytes.
        watch: called in each round with the bound method, the server's state before the round and
            the checked replies. It must not change them.
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
        """The clients and their numbers of training rows."""
        if self._roster is None or self._roster[0] is not self.sites:
            rows = (
                self.sites.rows()
                if isinstance(self.sites, Sites)
                else {name: len(site.train) for name, site in self.sites.items()}
            )
            self._roster = (self.sites, sampling.Roster.of(rows), rows)
        return self._roster[1]

    def at(self, round: int) -> Bound:
        """Return the bound method of a round."""
        switches = [r for r in self.later if round > r]
        return self.later[max(switches)] if switches else self.bound

    def cohort(self, ids: Sequence[str], round: int) -> Cohort:
        """Return the facts of a cohort for the server's stages."""
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
        """Return a client's task: its rows, its state and its messages."""
        addressed: Memory = dict(sent.addressed[name]) if sent is not None else {}
        key = sent.keys.get(name) if sent is not None else None
        return Participant(self.sites[name], self.state_of(name), addressed, key, share)

    def state_of(self, name: str) -> ClientState:
        """Return a client's state; empty before its first round."""
        return self.clients.get(name) or ClientState()

    def rounds_of(self, name: str) -> int:
        """Return the number of rounds in which a client took part."""
        rounds_in_store = getattr(self.clients, "rounds", None)  # a ClientStore counts without reading a file
        return self.state_of(name).rounds if rounds_in_store is None else int(rounds_in_store(name))

    # One round.

    def setup(self) -> None:
        """Run the setup program before round one: every client once, or one client for all."""
        program = self.bound.method.schedule.setup
        if not program:
            return
        ids = list(self.sites)
        if self.bound.method.schedule.setup_by == "one":
            ids = [ids[int(rng.stream(self.work.seed, "sample", "setup").integers(len(ids)))]]
        cohort = self.cohort(ids, 0)
        sent = server.setup_dispatch(self.bound, self.state, cohort)
        participants = [self.participant(i, sent) for i in ids]
        replies = self.engine.run_cohort(self.bound, self.work, program, sent.post, participants)
        pending = server.aggregate_replies(self.bound, self.state, replies, lambda ids: self.cohort(ids, 0), "setup")
        after, outcome = server.confirm(pending)
        if outcome.rejected:
            raise RunError(f"setup: no reply may be missing ({outcome.reasons}); nothing was stored")
        self.state, self.setup_replies = after, outcome.accepted
        for reply in outcome.accepted:
            self.clients[reply.id] = replace(reply.state, rounds=0)

    def drawn(self, round: int) -> sampling.Drawn:
        """Draw the clients of a round."""
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
        """Play one round. A rejected reply changes neither the server nor its client.

        Args:
            ids: the clients of the round.
            round: the round, from 1.
            shares: fraction of their steps that stragglers make.
            dropped: clients that do not reply. If all are, the round changes nothing.

        Returns:
            The checked replies and the server's messages.

        Raises:
            RunError: no reply is accepted, or a leaf of the server is no longer finite.
        """
        bound = self.at(round)
        if round - 1 in self.later:
            self.state = server.switch_method(bound, self.state)
        self.state, sent = server.dispatch(bound, self.state, self.cohort(ids, round))
        participants = [self.participant(i, sent, (shares or {}).get(i, 1.0)) for i in ids if i not in dropped]
        if not participants:
            self.state = replace(self.state, round=round)
            return Outcome(), sent
        replies = self._run_cohort(bound, sent.post, participants)
        self._prefetch(round + 1)  # before anything waits for the device
        pending = server.aggregate_replies(bound, self.state, replies, lambda ids: self.cohort(ids, round))
        after, outcome = server.confirm(pending)
        if not outcome.accepted:
            reasons = outcome.reasons or "no client made a step"
            raise RunError(
                f"round {round}: no reply could be used ({reasons}); the last good state is that of round {round - 1}"
            )
        if self.watch is not None:
            self.watch(bound, self.state, outcome)
        self.state = after
        for reply in outcome.accepted:
            self.clients[reply.id] = reply.state
        self._run_server_program(bound, round)
        return outcome, sent

    def _prefetch(self, round: int) -> None:
        """Give the engine the clients of the next round as a hint. Most engines ignore it."""

        def participants() -> list[Participant]:
            drawn = self.drawn(round)
            ids = [i for i in drawn.ids if i not in drawn.dropped]
            return [Participant(self.sites[i], ClientState(), share=drawn.shares.get(i, 1.0)) for i in ids]

        if self.work.rounds is None or round <= self.work.rounds:
            self.engine.prefetch(self.at(round), self.work, round, participants)

    def _run_server_program(self, bound: Bound, round: int) -> None:
        """Run the server's own training program, if the method has one, on the rows in its memory."""
        program, rows = bound.method.schedule.server, bound.method.server.rows
        if not program or rows is None:
            return
        x, y = rows(self.state.memory)
        site = Site(SERVER, Rows(x, y), None, None, y.cpu().numpy(), torch.zeros(0, device=y.device))
        cohort = replace(self.cohort([], round), ids=(SERVER,), rows=(len(y),))
        _, sent = server.dispatch(bound, self.state, cohort)
        runner = ClientRunner(bound, self.work, sent.post, [Participant(site, ClientState())])
        runner.run(program)
        (reply,) = runner.replies()
        leaves = server.add_update(self.state.leaves, reply.message)
        server.check_leaves(leaves)
        self.state = replace(self.state, leaves=leaves)

    def _run_cohort(self, bound: Bound, post: Post, participants: Sequence[Participant]) -> list[Reply]:
        """Run the round's program, with tests at the run's ``moments`` for clients with test rows."""
        program = bound.method.schedule.round
        if not self.moments:
            return self.engine.run_cohort(bound, self.work, program, post, participants)
        tested = [p for p in participants if p.site.test is not None]
        untested = [p for p in participants if p.site.test is None]
        replies: dict[str, Reply] = {}
        for group, steps in ((tested, add_tests(program, self.moments)), (untested, program)):
            if group:
                replies |= {r.id: r for r in self.engine.run_cohort(bound, self.work, steps, post, group)}
        return [replies[p.site.id] for p in participants]

    # Evaluation.

    def validate(self, ids: Iterable[str]) -> dict[str, Metrics]:
        """Return the metrics of clients' own models on their validation rows."""
        bound = self.at(self.state.round)
        sizes = {n: len(rows) for n in ids if (rows := self.judges[n][0].val) is not None}
        if not sizes:
            return {}
        program = (*bound.method.schedule.adapt, Judge(rows="val"))
        return evaluation.own_metrics(bound.task, self.judged(bound, program, list(sizes)), sizes)

    def evaluate(self, ids: Iterable[str], *, shared: bool = True) -> tuple[dict[str, Metrics], Metrics | None]:
        """Return the metrics of clients' own models, each on its test rows, and of the shared model on all rows."""
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
        """Run a program that ends in a test for some clients. Stores no state."""
        post, addressed = self._evaluation_post(bound)
        replies: list[Reply] = []
        for start in range(0, len(names), EVALUATION_COHORT):
            participants = [self._judge(n, addressed) for n in names[start : start + EVALUATION_COHORT]]
            cohort_replies = self.engine.run_cohort(bound, self.work, program, post, participants)
            replies += [replace(r, state=ClientState()) for r in cohort_replies]
        return replies

    def desk(self, name: str) -> ClientRunner:
        """Return a client's runner after its adapt program: its own model, ready for use."""
        return next(self.desks([name]))

    def desks(self, names: Iterable[str]) -> Iterator[ClientRunner]:
        """Yield the runners of several clients, one after another."""
        bound = self.at(self.state.round)
        post, addressed = self._evaluation_post(bound)
        for name in names:
            runner = ClientRunner(bound, self.work, post, [self._judge(name, addressed)])
            with torch.inference_mode(False), torch.enable_grad():  # a caller may have switched gradients off
                runner.run(bound.method.schedule.adapt)
            yield runner

    def _evaluation_post(self, bound: Bound) -> tuple[Post, Mapping[str, Memory]]:
        """Return the messages of the model that is tested, by client and owner where they are addressed.

        Prepare stages run only if the method's own model depends on them.
        """
        cohort = self.cohort(self.roster.ids, self.state.round)
        method, state = bound.method, self.state
        if method.partition.receive is None and len(method.schedule.adapt) == 1 and method.evaluate.predict is None:
            return server.post(bound, state, cohort, {}, tested=True), {}
        state, sent = server.dispatch(bound, state, cohort)
        return server.post(bound, state, cohort, sent.post.broadcast, tested=True), sent.addressed

    def _judge(self, name: str, addressed: Mapping[str, Memory]) -> Participant:
        site, owner = self.judges[name]
        return Participant(site, self.state_of(owner), dict(addressed.get(owner, {})))


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
        run: the run, after any number of rounds.
        total: number of rounds of the whole run.
        play: plays a round in the run's mode and returns its facts.
        evaluate: returns the metrics of a round from its facts (null in rounds without evaluation).
        after: called with each record, which it may complete. It returns whether the run stops.
    """
    for round in range(run.state.round + 1, total + 1):
        start = time.perf_counter()
        facts = play(round)
        devices.synchronise(next(iter(run.state.leaves.values())).device)
        middle = time.perf_counter()
        metrics = evaluate(round, facts)
        end = time.perf_counter()
        times = {"seconds": middle - start, "seconds_eval": end - middle, "seconds_total": end - start}
        if after({"round": round, **facts, **metrics, **times}):
            break


def add_tests(program: Program, moments: Sequence[str]) -> Program:
    """Return a round's program that also tests the client's model ``before`` or ``after`` its training."""
    steps: list[Step] = []
    for step in program:
        if isinstance(step, Send) and "after" in moments:
            steps.append(Judge(name="after"))
        steps.append(step)
        if isinstance(step, Receive) and "before" in moments:
            steps.append(Judge(name="before"))
    return tuple(steps)


def federated(run: Run, round: int) -> Record:
    """Play one round over the sites and return its record."""
    drawn = run.drawn(round)
    newcomers = sum(run.rounds_of(i) == 0 for i in drawn.ids) if round > 1 else 0
    bound = run.at(round)
    outcome, sent = run.play(drawn.ids, round, drawn.shares, drawn.dropped)
    losses = list(outcome.losses.values())
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
        numbers = [v for v in scores if v is not None]
        record[f"{task.primary}_{moment}"] = sum(numbers) / len(numbers) if numbers else None
    return record
