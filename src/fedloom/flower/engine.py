"""The engine: what the simulator asks of a cohort goes to sites as jobs, and comes back as replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fedloom.clients.messages import Participant, Post, Reply, Work
from fedloom.clients.states import ClientState
from fedloom.engines.base import Engine
from fedloom.engines.loop import LoopEngine
from fedloom.errors import RunError
from fedloom.flower import programs as named
from fedloom.flower.transport import Answers, Hub
from fedloom.flower.wire import SiteJob, SiteReply
from fedloom.network.bound_method import Bound
from fedloom.rounds.modes import CLOUD, POOL
from fedloom.spec.parts import Program

OWNER = "flower"
"""Under this name the server remembers, for each site, the round of the state that it last accepted."""


def accepted_round(state: ClientState) -> int | None:
    """The round of a site's state that the server last accepted; None before the first."""
    kept = state.memory.get(OWNER)
    return None if kept is None else int(kept["round"])


@dataclass(slots=True)
class FlowerEngine(Engine):
    """One run's way to the sites.

    Args:
        hub: where jobs are left.
        run: the run's name among those that share messages.
        bounds: the bound methods, by the round after which they take over.
        work: how clients work.
        sample: the form of a row; with it, replies are checked against what the method declares.
    """

    hub: Hub
    run: str
    bounds: Mapping[int, Bound]
    work: Work
    sample: named.Sample | None = None
    name: str = "flower"
    _anew: set[str] = field(default_factory=set)
    _declared: dict[tuple[int, str], named.Declared] = field(default_factory=dict)

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given; the cloud's rows are the server's own and stay here."""
        if all(p.site.id in (CLOUD, POOL) for p in participants):
            return LoopEngine().run_cohort(bound, work, program, post, participants)
        name = named.name_of(bound, program)
        answers = self.hub.call(self.jobs(bound, name, post, participants))
        replies = [self.reply(bound, name, post, p, answers) for p in participants]
        if not name.startswith(named.ROUND):
            for reply in replies:
                if reply.fault is not None:
                    raise RunError(f"{name}: site {reply.id}: {reply.fault}")
        return replies

    def jobs(self, bound: Bound, program: str, post: Post, participants: Sequence[Participant]) -> dict[str, SiteJob]:
        """A program for each participant, with the leaves that travel."""
        sent = replace(post, leaves=named.travelling(bound, post.leaves))
        stage = next(k for k, b in self.bounds.items() if b is bound)
        return {
            p.site.id: SiteJob(
                run=self.run,
                stage=stage,
                program=program,
                post=sent,
                addressed=p.addressed,
                key=p.key,
                share=p.share,
                base=self.base(p),
            )
            for p in participants
        }

    def base(self, person: Participant) -> int | None:
        """The round of the state from which a site starts; None for one that has lost its state."""
        return None if person.site.id in self._anew else accepted_round(person.state)

    def reply(self, bound: Bound, program: str, post: Post, person: Participant, answers: Answers) -> Reply:
        """A site's answer as the simulator's reply. What the site keeps is not in it: only the round is."""
        site = person.site.id
        answer = answers.get(site, "no answer")
        if isinstance(answer, SiteReply) and named.trains(program):
            wrong = named.undeclared(answer.message, self._allowed(bound, program)) if self.sample is not None else None
            answer = answer if wrong is None else wrong
        if isinstance(answer, str):
            if answer == named.LOST_STATE:
                self._anew.add(site)
            return Reply(site, {}, ClientState(), {}, None, {}, fault=answer)
        if named.trains(program):
            self._anew.discard(site)
        memory = {OWNER: {"round": torch.tensor(post.round)}}
        device = next(iter(post.leaves.values())).device
        return Reply(
            id=site,
            message={e: {k: v.to(device) for k, v in m.items()} for e, m in answer.message.items()},
            state=ClientState(memory=memory, rounds=person.state.rounds + 1),
            steps=dict(answer.steps),
            loss=answer.loss,
            judged=dict(answer.judged),
        )

    def _allowed(self, bound: Bound, program: str) -> named.Declared:
        stage = next(k for k, b in self.bounds.items() if b is bound)
        kind = named.SETUP if program == named.SETUP else named.ROUND
        if (stage, kind) not in self._declared:
            assert self.sample is not None
            self._declared[stage, kind] = named.declared(bound, self.work, self.sample, kind)
        return self._declared[stage, kind]
