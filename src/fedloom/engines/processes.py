"""The loop engine in several processes of one thread each: the same numbers whatever their number.

Processes are spawned, hold no lock and end when the pipe to their parent does. What goes through the pipe are arrays and
plain values; the model is sent once, between processes of one run, and nothing is read back from disk.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import types
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedloom import errors
from fedloom.clients.messages import Participant, Post, Reply, Work
from fedloom.engines import process_messages
from fedloom.engines.base import Engine, Problem
from fedloom.engines.loop import LoopEngine
from fedloom.errors import RunError
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Program

PATIENCE = 120.0
"""Seconds that a worker has to start."""


class WorkersEngine(Engine):
    """Clients of a cohort dealt out to worker processes.

    Args:
        run: the run whose clients work; its model and method are sent to the workers.
        count: number of processes.
        head: the pattern of the head's leaves that the run was given.
    """

    name = "loop"

    def __init__(self, run: Problem, count: int, *, head: str | None = None) -> None:
        self.count, self.events = count, list[str]()
        self._bounds = [run.bound, *run.later.values()]
        self._local = LoopEngine(single=True)
        self._pipes: list[Connection] = []
        self._sent: list[set[tuple[str, int]]] = []
        try:
            parcel = process_messages.parcel(run, head)
        except process_messages.CannotShip as error:
            self._stay(str(error))
            return
        self._start(parcel)

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given."""
        which = next((i for i, b in enumerate(self._bounds) if b is bound), None)
        steps = None if which is None else process_messages.encoded(program, bound)
        if not self._pipes or which is None or steps is None or len(participants) < 2:
            return self._local.run_cohort(bound, work, program, post, participants)
        shares = self._dealt(participants)
        sent = process_messages.packed(post)
        for i, (pipe, share) in enumerate(zip(self._pipes, shares, strict=True)):
            if share:
                people = [self._person(participants[j], i) for j in share]
                self._talk(pipe.send, ("run", which, work, steps, sent, people))
        found: dict[int, Reply] = {}
        failure: tuple[str, str] | None = None
        for pipe, share in zip(self._pipes, shares, strict=True):
            if share:
                kind, answer = self._talk(pipe.recv)
                if kind == "error":
                    failure = answer
                else:
                    found |= dict(zip(share, process_messages.unpacked(answer), strict=True))
        if failure is not None:
            raise getattr(errors, failure[0], RunError)(failure[1])
        return [found[j] for j in range(len(participants))]

    def facts(self) -> dict[str, Any]:
        """What was resolved, and what happened since."""
        return {"engine": self.name, "workers": self.count, "events": list(self.events)}

    def close(self) -> None:
        """Ends the workers."""
        _hang_up(self._pipes)

    def _start(self, parcel: process_messages.Parcel) -> None:
        context = mp.get_context("spawn")
        processes: list[BaseProcess] = []
        with hidden_main(parcel.needs_main):
            for _ in range(self.count):
                mine, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                self._pipes.append(mine)
        weakref.finalize(self, _hang_up, self._pipes)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(parcel.content)
            answers = [pipe.recv() if pipe.poll(PATIENCE) else ("error", "no answer") for pipe in self._pipes]
        except (EOFError, OSError):
            answers = [("error", "a worker ended; a script that starts workers needs `if __name__ == '__main__':`")]
        bad = [text for kind, text in answers if kind == "error"]
        if not bad and any(text != parcel.digest for _, text in answers):
            bad = ["a worker rebuilt another model or method"]
        self._sent = [set() for _ in self._pipes]
        if bad:
            _hang_up(self._pipes)
            self._pipes.clear()
            self._stay(bad[0])

    def _stay(self, why: str) -> None:
        line = f"workers={self.count}: clients run one after another in this process ({why}); the numbers are the same"
        self.events.append(line)
        warnings.warn(line, stacklevel=2)

    def _dealt(self, people: Sequence[Participant]) -> list[list[int]]:
        """Longest clients first, each to the worker with least to do; among equals to one that has its rows."""
        shares: list[list[int]] = [[] for _ in self._pipes]
        load = [0.0] * len(shares)
        for j in sorted(range(len(people)), key=lambda j: (-people[j].share * len(people[j].site.train), j)):
            site = people[j].site
            known = [(site.id, id(site)) not in sent for sent in self._sent]
            i = min(range(len(shares)), key=lambda i: (load[i], known[i], i))
            shares[i].append(j)
            load[i] += max(1.0, people[j].share * len(site.train))
        return shares

    def _person(self, person: Participant, worker: int) -> tuple[Any, ...]:
        site = person.site
        key = (site.id, id(site))
        rows = None if key in self._sent[worker] else process_messages.packed(site)
        self._sent[worker].add(key)
        return key, rows, process_messages.packed((person.state, person.addressed)), person.key, person.share

    def _talk(self, do: Any, *args: Any) -> Any:
        try:
            return do(*args)
        except (EOFError, OSError) as error:
            raise RunError("a worker process has ended (killed, or out of memory); use fewer workers") from error


def _hang_up(pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.close()


class hidden_main:
    """Keeps spawned processes from running the user's script again, where nothing in it is needed."""

    def __init__(self, needed: bool) -> None:
        self.needed, self.main = needed, sys.modules["__main__"]

    def __enter__(self) -> None:
        if not self.needed:
            sys.modules["__main__"] = types.ModuleType("__main__")

    def __exit__(self, *_: object) -> None:
        sys.modules["__main__"] = self.main


def serve(pipe: Connection) -> None:
    """A worker's life: takes the model and the method, then clients, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    engine = LoopEngine(single=True)
    sites: dict[Any, Any] = {}
    try:
        try:
            bounds, digest = process_messages.opened(pipe.recv())
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))
            return
        pipe.send(("ready", digest))
        while True:
            _, which, work, steps, post, people = pipe.recv()
            try:
                pipe.send(("replies", _work(engine, bounds[which], work, steps, post, people, sites)))
            except (EOFError, BrokenPipeError):
                raise
            except Exception as error:
                pipe.send(("error", (type(error).__name__, f"{error}")))
    except (EOFError, OSError):
        return


def _work(
    engine: LoopEngine, bound: Bound, work: Work, steps: Any, post: Any, people: Any, sites: dict[Any, Any]
) -> Any:
    cohort = []
    for key, rows, kept, static, share in people:
        if rows is not None:
            sites[key] = process_messages.unpacked(rows)
        state, addressed = process_messages.unpacked(kept)
        cohort.append(Participant(sites[key], state, addressed, static, share))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replies = engine.run_cohort(
            bound, work, process_messages.decoded(steps, bound), process_messages.unpacked(post), cohort
        )
    return process_messages.packed(replies)
