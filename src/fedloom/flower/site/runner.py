"""The work of a site: a letter comes in, its programs run on the site's own rows, a package goes out."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import logging.handlers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedloom import rng
from fedloom.clients.messages import Participant, Post, Reply, Site, Work
from fedloom.clients.runner import ClientRunner
from fedloom.clients.states import ClientState
from fedloom.flower import programs as named
from fedloom.flower.error_codes import Code, Refusal
from fedloom.flower.site.site_store import SiteStore
from fedloom.flower.wire import Letter, Malformed, Package, SiteJob, SiteReply, pack_package, unpack_letter
from fedloom.network.bound_method import Bound
from fedloom.store.codec import plain
from fedloom.tasks import Task
from fedloom.tensors import Leaves, Memory
from fedloom.version import __version__

log = logging.getLogger("fedloom.site")


@dataclass(slots=True)
class Bench:
    """All that a site needs for one run: the bound methods by the round after which they take over, options, rows."""

    bounds: Mapping[int, Bound]
    work: Work
    site: Site
    _declared: dict[tuple[int, str], named.Declared] = field(default_factory=dict)

    def declared(self, stage: int, program: str) -> named.Declared:
        """What a program of a bound method may send."""
        kind = named.SETUP if program == named.SETUP else named.ROUND
        if (stage, kind) not in self._declared:
            sample = named.Sample.of(self.site.train)
            self._declared[stage, kind] = named.declared(self.bounds[stage], self.work, sample, kind)
        return self._declared[stage, kind]


@dataclass(slots=True)
class Workshop:
    """A site at work.

    Args:
        name: the site.
        benches: the runs that share a message.
        store: the site's own folder.
        share_rows: whether outputs and targets of test rows may leave, so that the server can pool them; without, the
            metrics of such tasks are computed here and only they leave.
        secret: whether noise that protects the site is drawn from the operating system, not from the run's seed.
    """

    name: str
    benches: Mapping[str, Bench]
    store: SiteStore
    share_rows: bool = False
    secret: bool = False

    def facts(self) -> dict[str, Any]:
        """What a site says of itself: numbers of rows, its version, and which models it has."""
        return {
            "version": __version__,
            "rows": {
                key: {part: 0 if rows is None else len(rows) for part, rows in _parts(bench.site).items()}
                for key, bench in self.benches.items()
            },
            "models": {key: fingerprint(bench.bounds) for key, bench in self.benches.items()},
        }

    def reply(self, letter: Letter) -> Package:
        """Works through a letter; a job that fails leaves a code in its place."""
        answers = tuple(self._answer(letter.experiment, job) for job in letter.jobs)
        return Package(self.name, {} if letter.jobs else self.facts(), answers)

    def _answer(self, experiment: str, job: SiteJob) -> SiteReply:
        try:
            return self.perform(experiment, job)
        except Refusal as refusal:
            log.error("round %d, %s, %s: %s", job.post.round, job.run, job.program, refusal.reason)
            return SiteReply(code=refusal.code)
        except Exception:
            log.exception("round %d, %s, %s", job.post.round, job.run, job.program)
            return SiteReply(code=Code.FAILED)

    def perform(self, experiment: str, job: SiteJob) -> SiteReply:
        """One program: the definition of right is :class:`fedloom.clients.runner.ClientRunner` with one client."""
        bench = self.benches.get(job.run)
        if bench is None or job.stage not in bench.bounds:
            raise Refusal(Code.UNKNOWN_JOB, f"no run {job.run!r} (stage {job.stage})")
        bound = bench.bounds[job.stage]
        state = self.store.load(experiment, job.run, job.base)
        desk = desk_for(bench, job, state)
        program = named.programs(bound).get(job.program)
        if not program:
            raise Refusal(Code.UNKNOWN_JOB, f"no program {job.program!r}")
        with rng.from_system() if self.secret else contextlib.nullcontext():
            desk.run(program)
        (reply,) = desk.replies()
        if named.trains(job.program):
            named.check_leaving(reply, bench.declared(job.stage, job.program))
            kept = replace(reply.state, rounds=0) if job.program == named.SETUP else reply.state
            self.store.save(experiment, job.run, job.post.round, kept, job.base)
        elif job.program == named.OWN:
            self.store.save_model(experiment, job.run, _model(job))
        return self._packed(bound.task, reply, sends=named.trains(job.program))

    def _packed(self, task: Task, reply: Reply, *, sends: bool) -> SiteReply:
        judged: dict[str, tuple[Leaves, Leaves]] = {}
        for name, (sums, rows) in reply.judged.items():
            if rows and not self.share_rows:
                sums, rows = numbers(task, sums, rows), {}
            judged[name] = (sums, rows)
        loss = None if reply.loss is None else float(reply.loss)
        return SiteReply(message=reply.message if sends else {}, steps=reply.steps, loss=loss, judged=judged)


def desk_for(bench: Bench, job: SiteJob, state: ClientState) -> ClientRunner:
    """The desk of a job: what was sent laid over what the site makes itself."""
    bound = bench.bounds[job.stage]
    unknown = next((n for n in (*job.post.leaves, *job.post.gate) if n not in bound.start), None)
    if unknown is not None:
        raise Refusal(Code.PLAN, f"the server sent the leaf {unknown!r}, which the model here does not have")
    for name, value in job.post.leaves.items():
        if value.shape != bound.start[name].shape or value.dtype != bound.start[name].dtype:
            raise Refusal(
                Code.PLAN, f"the server's leaf {name!r} is {tuple(value.shape)} {value.dtype}, here it is not"
            )
    device = next(iter(bound.start.values())).device

    def here(values: Memory) -> Memory:
        return {owner: {k: v.to(device) for k, v in kept.items()} for owner, kept in values.items()}

    post = replace(
        job.post,
        leaves={n: job.post.leaves.get(n, v).to(device) for n, v in bound.start.items()},
        broadcast=here(job.post.broadcast),
        gate={n: v.to(device) for n, v in job.post.gate.items()},
    )
    person = Participant(bench.site, state, here(job.addressed), job.key, job.share)
    return ClientRunner(bound, bench.work, post, [person])


def numbers(task: Task, sums: Leaves, rows: Leaves) -> Leaves:
    """A site's metrics as tensors; NaN where there is none. :func:`remote` reads them again."""
    return {
        name: torch.tensor(float("nan") if value is None else value, dtype=torch.float64)
        for name, value in task.judge(sums, rows).items()
    }


def remote(task: Task) -> Task:
    """A task as the server of a deployment judges it: by metrics that sites computed, where rows would have to leave."""
    if task.statistics is not None:
        return task
    return replace(task, summarise=_read_numbers)


def _read_numbers(sums: Leaves) -> dict[str, float | None]:
    return {name: None if bool(value.isnan()) else float(value) for name, value in sums.items()}


def fingerprint(bounds: Mapping[int, Bound]) -> str:
    """SHA-256 of every leaf's name, kind and form, and of the values of those that do not travel."""
    digest = hashlib.sha256()
    for stage, bound in bounds.items():
        for name, spec in bound.specs.items():
            value = bound.start[name]
            digest.update(f"{stage} {name!r} {spec.kind} {tuple(value.shape)} {value.dtype}\n".encode())
            if not spec.sent and value.numel():
                digest.update(plain(value).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _parts(site: Site) -> dict[str, Any]:
    return {"train": site.train, "test": site.test, "val": site.val}


def _model(job: SiteJob) -> dict[str, Any]:
    post: Post = job.post
    return {
        "stage": job.stage,
        "base": job.base,
        "leaves": post.leaves,
        "broadcast": post.broadcast,
        "gate": post.gate,
        "round": post.round,
        "cohort": post.cohort,
        "population": post.population,
        "addressed": job.addressed,
    }


def client_app(open_workshop: Callable[[Letter, Mapping[str, Any]], Workshop], name: str = "") -> ClientApp:
    """A Flower client that works through letters and never lets an exception, or its text, out.

    Args:
        open_workshop: the site's workshop for a letter, by the configuration of its node.
        name: the site, for packages that are sent before the workshop is open.
    """
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: FlowerMessage, context: Context) -> FlowerMessage:
        return FlowerMessage(answered(message.content, context.node_config, open_workshop, name), reply_to=message)

    return app


def answered(
    content: RecordDict,
    node: Mapping[str, Any],
    open_workshop: Callable[[Letter, Mapping[str, Any]], Workshop],
    name: str = "",
) -> RecordDict:
    """The reply to a letter: what its programs gave, or a code; see :func:`client_app`."""
    site = str(node.get("site", name))
    try:
        try:
            letter = unpack_letter(content)
        except Malformed as error:
            raise Refusal(Code.MALFORMED, f"the message holds {error}") from None
        package = open_workshop(letter, node).reply(letter)
    except Refusal as refusal:
        log.error("%s", refusal.reason)
        package = Package(site, code=refusal.code)
    except Exception:
        log.exception("a letter could not be answered")
        package = Package(site, code=Code.FAILED)
    return pack_package(package)


class _SiteLog(logging.handlers.WatchedFileHandler):
    """A log that goes on where its file, or the folder around it, was taken away, and that never fails its caller."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
        except OSError:
            self.handleError(record)


def log_to(path: Path) -> None:
    """Sends the site's log to a file of its own, and to no other site's."""
    place = os.path.abspath(path)
    files = [known for known in log.handlers if isinstance(known, logging.FileHandler)]
    for known in files:
        if known.baseFilename != place:
            log.removeHandler(known)
            known.close()
    if any(known.baseFilename == place for known in files):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _SiteLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
