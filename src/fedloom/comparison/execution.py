"""Playing the cells: one after another here, or several at once in processes of their own."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing as mp
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from fedloom import tasks
from fedloom.api import fit
from fedloom.comparison.arguments import arguments, federation
from fedloom.engines.processes import PATIENCE, hidden_main
from fedloom.errors import FedloomError
from fedloom.spec import registry, text_form
from fedloom.spec.method import Method

Tell = Callable[[int, float | None], object]

MAIN = "__main__"

UNGUARDED = "functions of a script can go to other processes only where it has `if __name__ == '__main__':`"

KILLED = "its process ended (killed, or out of memory); use fewer jobs"


@dataclass(frozen=True, slots=True)
class Job:
    """What is needed to play a cell.

    Args:
        method: its method, or the text of it.
        seed: its seed.
        options: its swept values.
        folder: its run folder.
    """

    method: Method | str
    seed: int
    options: dict[str, Any]
    folder: Path


def play(base: Mapping[str, Any], job: Job, tell: Tell) -> str:
    """Plays or resumes one cell; returns why it failed, or nothing."""
    made = arguments(base, job.method, job.seed, job.options)
    key: list[str] = []

    def heard(record: dict[str, Any]) -> None:
        tell(int(record["round"]), next((v for k in key if (v := record.get(k)) is not None), None))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            made["data"] = federation(made)
            key.append(tasks.named(made.get("task", "classification")).primary)
            fit(
                **made
                | {"out": job.folder, "resume": True, "progress": False}
                | {"callbacks": [*made.get("callbacks", ()), heard]},
            )
    except FedloomError as error:
        return " ".join(str(error).split())
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, OSError, AttributeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def one_by_one(base: Mapping[str, Any], jobs: Sequence[Job], board: Any) -> None:
    """Plays cells in this process."""
    for i, job in enumerate(jobs):
        board.begun(i)
        board.ended(i, play(base, job, partial(board.heard, i)))


# Processes --------------------------------------------------------------------------------------------------


class CannotSend(Exception):
    """Something given in Python cannot go to another process, with the reason."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    cell: int | None = None


@dataclass(slots=True)
class Pool:
    """Processes that play cells, with one share of the processors each.

    Args:
        base: arguments that all cells share.
        jobs: the cells.
        count: number of processes.
        board: is told what happens.
    """

    base: Mapping[str, Any]
    jobs: Sequence[Job]
    count: int
    board: Any
    _content: bytes = b""
    _workers: list[_Worker] = field(default_factory=list)
    _again: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        try:
            self._content = bytes(ForkingPickler.dumps((modules(self.jobs), dict(self.base), list(self.jobs))))
        except Exception as error:
            raise CannotSend(str(error).splitlines()[0] if str(error) else type(error).__name__) from error

    def go(self) -> None:
        """Plays all cells.

        Raises:
            CannotSend: the processes cannot be started with what was given.
        """
        waiting = list(range(len(self.jobs)))[::-1]
        try:
            self._open()
            while waiting or any(w.cell is not None for w in self._workers):
                self._deal(waiting)
                busy = [w for w in self._workers if w.cell is not None]
                for pipe in wait([w.pipe for w in busy]):
                    self._hear(next(w for w in busy if w.pipe is pipe), waiting)
        finally:
            self._end()

    def _open(self) -> None:
        if MAIN.encode() in self._content and not _guarded():
            raise CannotSend(UNGUARDED)
        try:
            self._start(self.count)
            for worker in self._workers:
                refused = worker.pipe.recv() if worker.pipe.poll(PATIENCE) else "a process did not start"
                if refused:
                    raise CannotSend(refused)
        except (EOFError, OSError) as error:
            raise CannotSend(UNGUARDED) from error

    def _start(self, count: int) -> None:
        context = mp.get_context("spawn")
        share = max(1, (os.cpu_count() or 1) // max(1, self.count))
        with hidden_main(MAIN.encode() in self._content), _unbroken():
            for _ in range(count):
                mine, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, share))
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, mine))
        for worker in self._workers[-count:]:
            worker.pipe.send_bytes(self._content)

    def _deal(self, waiting: list[int]) -> None:
        if waiting and not self._workers:
            self._start(1)
            self._workers[0].pipe.recv()
        for worker in self._workers:
            if waiting and worker.cell is None:
                worker.cell = waiting.pop()
                self.board.begun(worker.cell)
                with contextlib.suppress(OSError):  # a process that has ended is noticed when it is listened to
                    worker.pipe.send(worker.cell)

    def _hear(self, worker: _Worker, waiting: list[int]) -> None:
        assert worker.cell is not None
        cell = worker.cell
        try:
            kind, *rest = worker.pipe.recv()
        except (EOFError, OSError):
            # Memory is the likely reason: with one process fewer, the cell goes on once from its last checkpoint.
            self._workers.remove(worker)
            worker.pipe.close()
            if cell in self._again:
                self.board.ended(cell, KILLED)
            else:
                self._again.add(cell)
                waiting.insert(0, cell)
            return
        if kind == "round":
            self.board.heard(cell, *rest)
        else:
            worker.cell = None
            self.board.ended(cell, *rest)

    def _end(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
            if worker.cell is not None:
                worker.process.terminate()  # a run folder survives that
        for worker in self._workers:
            worker.process.join(10)
            if worker.process.is_alive():
                worker.process.kill()
        self._workers.clear()


def modules(jobs: Sequence[Job]) -> list[str]:
    """The modules, other than fedloom's own, that register the methods and plug-ins which the cells name."""
    found = set()
    for text in {job.method for job in jobs if isinstance(job.method, str)}:
        for name, _, _ in text_form.parse_call(text):
            found.add(inspect.unwrap(registry.describe(name).fn).__module__)
    return sorted(name for name in found if name.partition(".")[0] != "fedloom")


def _guarded() -> bool:
    """Whether the user's script can be imported by another process without being run again."""
    try:
        text = Path(str(getattr(sys.modules[MAIN], "__file__", ""))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False  # a notebook or a prompt
    return re.search(r"__name__\s*==\s*['\"]__main__['\"]", text) is not None


def _opened(content: bytes) -> tuple[Any, Any]:
    """What all cells share, and the cells, where everything they name is known in this process."""
    # The user's script, where it is needed, was imported when the process began.
    needed, base, jobs = ForkingPickler.loads(content)
    for name in needed:
        if name != MAIN:
            importlib.import_module(name)
    for text in {job.method for job in jobs if isinstance(job.method, str)}:
        text_form.method(text)
    return base, jobs


@contextlib.contextmanager
def _unbroken() -> Iterator[None]:
    """Processes begun here do not hear the interrupt key, from their first moment: it is for this one, which ends them."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve(pipe: Connection, share: int) -> None:
    """A process's life: takes what all cells share, then cells, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(share)
    os.environ["FEDLOOM_CPUS"] = str(share)
    try:
        try:
            base, jobs = _opened(pipe.recv_bytes())
        except (AttributeError, ImportError, FedloomError) as error:
            pipe.send(str(error))
            return
        pipe.send("")
        while True:
            cell = pipe.recv()
            pipe.send(("ended", play(base, jobs[cell], lambda *facts: pipe.send(("round", *facts)))))
    except (EOFError, OSError):
        return
