"""The server's desk for messages: jobs of all runs are gathered, sent in one message a site, and answers handed out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.flower.error_codes import words
from fedloom.flower.wire import Letter, Malformed, Package, SiteJob, SiteReply, pack_letter, unpack_package

Answers = dict[str, SiteReply | str]
"""By site its answer, or in words why there is none."""

_ERRORS = {
    3: "the message was lost",
    4: "the reply was lost",
    5: "no answer: the site is not connected any more",
    8: "no answer: its process died",
}


@dataclass(slots=True)
class SiteTransport:
    """Exchanges messages with sites over a Flower grid.

    Args:
        grid: Flower's.
        nodes: the node of each site that has said who it is.
        timeout: seconds after which a site that has not answered is left out of the round.
        poll: seconds between looks for replies.
    """

    grid: Grid
    nodes: dict[str, int] = field(default_factory=dict)
    timeout: float = 90.0
    poll: float = 0.4

    def exchange(self, letters: Mapping[str, Letter], round: int) -> dict[str, Package | str]:
        """Sends each site its letter and waits; a site without an answer has a reason instead."""
        found: dict[str, Package | str] = {}
        here = set(self.grid.get_node_ids())
        asked: dict[int, tuple[str, RecordDict]] = {}
        for site, letter in letters.items():
            node = self.nodes.get(site)
            if node is None or node not in here:
                found[site] = "no answer: the site is not connected"
            else:
                asked[node] = (site, pack_letter(letter))
        for node, reply in self.ask({node: content for node, (_, content) in asked.items()}, round).items():
            site = asked[node][0]
            found[site] = reply
            if isinstance(reply, Package) and reply.site != site:
                found[site] = f"answered as {reply.site!r}"
            elif isinstance(reply, Package) and reply.code:
                found[site] = words(reply.code)
        return found

    def ask(self, contents: Mapping[int, RecordDict], round: int) -> dict[int, Package | str]:
        """Sends each node a message and waits for the replies.

        Replies are told apart by the message that they answer: the report of a dead node comes from another one.
        """
        nodes = list(contents)
        if not nodes:
            return {}
        group, ttl = str(round), self.timeout + 60
        messages = [Message(contents[n], n, "train", group_id=group, ttl=ttl) for n in nodes]
        waiting = {key: node for key, node in zip(self.grid.push_messages(messages), nodes, strict=True) if key}
        found: dict[int, Package | str] = dict.fromkeys(nodes, "no answer: the message could not be sent")
        found |= dict.fromkeys(waiting.values(), f"no answer within {self.timeout:g} s")
        end = time.monotonic() + self.timeout
        while waiting:
            for message in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    found[node] = read_package(message)
            if not waiting or time.monotonic() >= end:
                break
            time.sleep(self.poll)
        return found


def read_package(message: Message) -> Package | str:
    """A site's package, or why there is none; nothing that a site sends can raise here."""
    if message.has_error():
        return _ERRORS.get(message.error.code, f"no answer: Flower reports error {message.error.code}")
    try:
        return unpack_package(message.content)
    except Malformed as error:
        return f"sent {error}"
    except Exception as error:
        return f"sent a message that cannot be read ({type(error).__name__})"


@dataclass(slots=True)
class _Ticket:
    jobs: Mapping[str, SiteJob]
    done: Callable[[Answers], None]


class Hub:
    """Lets several runs share one message a site a round.

    Each run has a thread. A run that needs answers waits in :meth:`call` until every other run waits too; then all jobs
    are sent together. :meth:`submit` leaves jobs for the next exchange without waiting: evaluations travel that way.

    Args:
        exchange: sends letters.
        experiment: key of the sites' folders.
        plan: the experiment as text.
        runs: the runs that will call; their jobs stand in this order in a letter, whichever thread came first.
    """

    def __init__(
        self,
        exchange: Callable[[Mapping[str, Letter], int], Mapping[str, Package | str]],
        experiment: str,
        plan: str = "",
        runs: Sequence[str] = ("",),
    ) -> None:
        self._exchange, self._experiment, self._plan = exchange, experiment, plan
        self._places = {name: i for i, name in enumerate(runs)}
        self._runs, self._waiting, self._turn = len(runs), 0, 0
        self._tickets: list[_Ticket] = []
        self._turned = threading.Condition()
        self._error: BaseException | None = None

    def submit(self, jobs: Mapping[str, SiteJob], done: Callable[[Answers], None]) -> None:
        """Leaves jobs, by site, for the next exchange; ``done`` is called with the answers."""
        with self._turned:
            self._tickets.append(_Ticket(jobs, done))

    def call(self, jobs: Mapping[str, SiteJob]) -> Answers:
        """Answers to jobs; waits until every run has called."""
        found: Answers = {}
        self.submit(jobs, found.update)
        with self._turned:
            self._waiting += 1
            turn = self._turn
            self._go_if_complete()
            self._turned.wait_for(lambda: self._turn > turn)
            self._check()
        return found

    def leave(self) -> None:
        """A run that will not call again; what it has submitted goes with the others' next exchange."""
        with self._turned:
            self._runs -= 1
            if self._runs:
                self._go_if_complete()

    def flush(self) -> None:
        """Sends what has been submitted, once every run has left."""
        with self._turned:
            if self._tickets:
                self._send()
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _go_if_complete(self) -> None:
        if self._waiting == self._runs and self._runs:
            self._send()

    def _send(self) -> None:
        tickets, self._tickets = sorted(self._tickets, key=self._place), []
        self._waiting = 0
        try:
            if self._error is None:
                _deliver(tickets, self._exchanged(tickets))
        except BaseException as error:  # every run must hear of it, or its thread would wait for ever
            self._error = error
        self._turn += 1
        self._turned.notify_all()

    def _place(self, ticket: _Ticket) -> int:
        """Where a ticket's run stands; tickets of one run stay as they came."""
        return min((self._places.get(job.run, 0) for job in ticket.jobs.values()), default=0)

    def _exchanged(self, tickets: Iterable[_Ticket]) -> dict[str, list[SiteReply | str]]:
        jobs: dict[str, list[SiteJob]] = {}
        for ticket in tickets:
            for site, job in ticket.jobs.items():
                jobs.setdefault(site, []).append(job)
        round = max((job.post.round for listed in jobs.values() for job in listed), default=0)
        letters = {site: Letter(self._experiment, self._plan, tuple(listed)) for site, listed in jobs.items()}
        found: dict[str, list[SiteReply | str]] = {}
        for site, package in self._exchange(letters, round).items():
            count = len(jobs[site])
            if isinstance(package, str):
                found[site] = [package] * count
            elif len(package.answers) != count:
                found[site] = [f"sent {len(package.answers)} answers to {count} programs"] * count
            else:
                found[site] = [words(a.code) if a.code else a for a in package.answers]
        return found


def _deliver(tickets: Iterable[_Ticket], answers: Mapping[str, list[SiteReply | str]]) -> None:
    """Each ticket its answers, in the order in which the jobs were gathered."""
    left = {site: iter(found) for site, found in answers.items()}
    for ticket in tickets:
        ticket.done({site: next(left[site]) for site in ticket.jobs})
