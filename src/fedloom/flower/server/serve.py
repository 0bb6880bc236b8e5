"""The server of a deployment: all methods of an experiment in the same rounds, one message a site a round.

A message carries, for each method, the test of the model that the last round made and the next round's training; after the last
round one more message carries the tests alone. So the record of a round is complete when the next message has come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid

from fedloom import rng, tensors
from fedloom.clients.messages import Site
from fedloom.data import ClientData, Rows
from fedloom.devices import Device
from fedloom.engines.choose_device import choose_device
from fedloom.errors import RunError, UserError
from fedloom.flower import programs as named
from fedloom.flower.engine import FlowerEngine
from fedloom.flower.error_codes import words
from fedloom.flower.experiment import Experiment
from fedloom.flower.server.records import RunRecords, show
from fedloom.flower.site.runner import fingerprint, remote
from fedloom.flower.transport import Answers, Hub, SiteTransport
from fedloom.flower.wire import Letter, Package, SiteReply, pack_letter
from fedloom.rounds import evaluation, run, sampling, server
from fedloom.rounds.modes import CLOUD, Hybrid
from fedloom.rounds.run import Record, Run
from fedloom.tasks.base import Metrics

log = logging.getLogger("fedloom.server")


def roll_call(post: SiteTransport, plan: Experiment, text: str, experiment: str) -> dict[str, Mapping[str, Any]]:
    """Waits until every site of the experiment has said who it is; returns what they said."""
    found: dict[str, Mapping[str, Any]] = {}
    refused: dict[str, str] = {}
    asked: set[int] = set()
    end = time.monotonic() + plan.wait
    hello = pack_letter(Letter(experiment, text))
    while True:
        nodes = [n for n in post.grid.get_node_ids() if n not in asked]
        for node, package in post.ask(dict.fromkeys(nodes, hello), 0).items():
            if isinstance(package, str):
                log.warning("node %d: %s", node, package)
                continue
            asked.add(node)
            if package.code:
                refused[package.site] = words(package.code)
            elif package.site not in plan.sites:
                log.warning("a site calls itself %r, which the experiment does not name", package.site)
            elif package.site in found:
                raise RunError(f"two sites call themselves {package.site!r}; give each a name of its own")
            else:
                found[package.site], post.nodes[package.site] = package.facts, node
        missing = [s for s in plan.sites if s not in found]
        if not missing:
            return found
        if refused and not set(missing) - set(refused):
            raise RunError("; ".join(f"site {s} {why}" for s, why in refused.items()))
        if time.monotonic() >= end:
            why = ", ".join(f"{s} ({refused.get(s, 'not connected')})" for s in missing)
            raise RunError(f"waited {plan.wait:g} s for sites: {why}")
        time.sleep(1.0 if post.poll else 0.0)


@dataclass(slots=True)
class _Pending:
    """A round whose tests are on their way."""

    expected: int
    record: Record = field(default_factory=dict)
    own: dict[str, Metrics] = field(default_factory=dict)
    shared: Metrics | None = None


class Course:
    """One method of an experiment at the server.

    Args:
        plan: the experiment.
        key: the run's name.
        hub: where jobs are left.
        facts: what sites said of themselves.
        records: the run's folder, or None.
        device: where the server computes.
    """

    def __init__(
        self,
        plan: Experiment,
        key: str,
        hub: Hub,
        facts: Mapping[str, Mapping[str, Any]],
        records: RunRecords | None,
        device: Device,
    ) -> None:
        method, seed = plan.runs()[key]
        made = plan.bounds(method, seed, device)
        self._check_models(key, fingerprint(made), facts)
        bounds = {stage: replace(bound, task=remote(bound.task)) for stage, bound in made.items()}
        work = plan.work(seed)
        sites = {name: _absent(name, _rows_of(facts[name], key)) for name in plan.sites}
        self.plan, self.key, self.hub, self.records = plan, key, hub, records
        self.engine = FlowerEngine(hub, key, bounds, work, named.Sample.of(plan.rows()))
        self.history: list[Record] = []
        self.run = Run(
            bound=bounds[0],
            engine=self.engine,
            work=work,
            sites=sites,
            size=sampling.cohort_size(plan.cohort, len(sites)),
            state=server.initial_state(bounds[0]),
            later={stage: bound for stage, bound in bounds.items() if stage},
            judges={name: (site, name) for name, site in sites.items()},
            moments=plan.moments,
        )
        self._pending: _Pending | None = None
        self.hybrid = self._with_cloud(device.torch_device)

    @staticmethod
    def _check_models(key: str, mine: str, facts: Mapping[str, Mapping[str, Any]]) -> None:
        for site, said in facts.items():
            if said.get("models", {}).get(key) != mine:
                raise RunError(
                    f"site {site} makes another model for {key!r}: its torch or fedloom (version {said.get('version')}) differs "
                    "from the server's; install the same versions everywhere"
                )

    def _with_cloud(self, device: torch.device) -> Hybrid | None:
        mixing = self.plan.mixing()
        if mixing is None:
            return None
        path = Path(str(self.plan.hybrid["cloud"]))
        try:
            with np.load(path, allow_pickle=False) as arrays:
                rows = Rows(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"hybrid.cloud {path}: expected an npz file with x and y ({error})") from None
        site = self.plan.site(ClientData(CLOUD, rows), self.run.bound.structure.outputs, device)
        return Hybrid(site, mixing)

    # The run.

    def resume(self) -> int:
        """Goes on from the last checkpoint; returns its round."""
        if self.records is None:
            return 0
        snapshot = self.records.restore()
        if snapshot is None:
            return 0
        self.run.state, self.run.clients = snapshot.server, snapshot.clients
        if self.hybrid is not None:
            self.hybrid.alpha = float(snapshot.facts["alpha"])
        self.history = self.records.history()
        record = snapshot.facts["record"]
        if all(known["round"] != record["round"] for known in self.history):
            self.judge(int(record["round"]))
            self._remember(record)
        return self.run.state.round

    def play(self) -> None:
        """Plays the rounds that are left."""
        if self.run.state.round == 0:
            self.run.setup()
        hybrid = self.hybrid

        def play(round: int) -> Record:
            facts = run.federated(self.run, round) if hybrid is None else hybrid(self.run, round)
            for bad in facts.get("rejected", ()):
                log.warning("round %d, %s: site %s: %s", round, self.key, bad["client"], bad["reason"])
            return {"mode": self.plan.mode, **facts}

        with rng.from_system():  # sites know the seed; noise that protects them from each other must not come from it
            run.rounds(self.run, self.plan.rounds, play, evaluate=self.judge, after=self._after)

    def _after(self, record: Record) -> bool:
        alpha = None if self.hybrid is None else self.hybrid.alpha
        if self.records is not None:
            self.records.checkpoint(self.run.state, self.run.clients, {"record": record, "alpha": alpha})
        self._remember(record)
        return False

    def _remember(self, record: Record) -> None:
        if self._pending is not None:
            self._pending.record = record
        else:
            self._write(record)

    # Tests.

    def judge(self, round: int, facts: Record | None = None) -> Record:
        """Leaves the tests of a round for the next message."""
        self._pending = None
        task = self.run.bound.task
        if round != self.plan.rounds and (self.plan.every == 0 or round % self.plan.every):
            return {task.primary: None}
        bound = self.run.at(self.run.state.round)
        post, addressed = self.run._evaluation_post(bound)
        people = [self.run._judge(n, addressed) for n, (site, _) in self.run.judges.items() if site.test is not None]
        if not people:
            return {task.primary: None}
        additive = task.statistics is not None
        both = bound.complete() and additive and not bound.uniform()
        pending = self._pending = _Pending(2 if both else 1)
        pooled = bound.complete() and additive and bound.uniform()
        self.hub.submit(
            self.engine.jobs(bound, named.OWN, post, people), lambda a: self._own(pending, a, pooled=pooled)
        )
        if both:
            self.hub.submit(self.engine.jobs(bound, named.SHARED, post, people), lambda a: self._shared(pending, a))
        return {task.primary: None}

    def _own(self, pending: _Pending, answers: Answers, *, pooled: bool) -> None:
        task = self.run.bound.task
        for site, answer in answers.items():
            if isinstance(answer, SiteReply) and "test" in answer.judged:
                test = self.run.judges[site][0].test
                assert test is not None
                pending.own[site] = task.judge(*answer.judged["test"]) | {"n_test": len(test)}
        if pooled:
            pending.shared = self._pooled(answers)
        self._arrived(pending)

    def _shared(self, pending: _Pending, answers: Answers) -> None:
        pending.shared = self._pooled(answers)
        self._arrived(pending)

    def _pooled(self, answers: Answers) -> Metrics | None:
        parts = [a.judged["test"][0] for a in answers.values() if isinstance(a, SiteReply) and "test" in a.judged]
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = tensors.add(total, part)
        return self.run.bound.task.judge(total, {})

    def _arrived(self, pending: _Pending) -> None:
        pending.expected -= 1
        if pending.expected:
            return
        task = self.run.bound.task
        found: Record = dict(evaluation.summary(task, pending.own))
        shared = pending.shared or {task.primary: None}
        found |= {f"global_{k}": v for k, v in shared.items()}
        self.run.last = self.run.last | pending.own
        self._write({**pending.record, **found, "sites": pending.own})

    def _write(self, record: Record) -> None:
        self.history.append(record)
        if self.records is not None:
            self.records.append(record)
        log.info("%s", show(self.key, record, self.run.bound.task.primary))

    def finish(self) -> None:
        """Writes what is left when all rounds are over."""
        if self.records is not None:
            self.records.finish(self.run)


def serve(
    grid: Grid,
    plan: Experiment,
    text: str,
    out: Path | None = None,
    *,
    resume: bool = False,
    experiment: str | None = None,
    poll: float = 0.4,
) -> dict[str, Course]:
    """Runs an experiment over a Flower grid.

    Args:
        grid: Flower's.
        plan: the experiment.
        text: the experiment as sites get it.
        out: folder for records and checkpoints; None keeps nothing.
        resume: go on with what is in that folder.
        experiment: key of the sites' folders; that of the folder without.
        poll: seconds between looks for replies.
    """
    device = choose_device("cpu", plan.precision)
    key = RunRecords.experiment(out, plan, text, resume=resume) if experiment is None else experiment
    post = SiteTransport(grid, timeout=plan.timeout, poll=poll)
    facts = roll_call(post, plan, text, key)
    log.info(
        "sites: %s", ", ".join(f"{s} ({_rows_of(facts[s], next(iter(plan.runs())))['train']} rows)" for s in plan.sites)
    )
    keys = plan.runs()
    hub = Hub(_Exchange(post, plan, text, key), key, text, list(keys))
    courses = {k: Course(plan, k, hub, facts, RunRecords.of(out, k), device) for k in keys}
    if resume:
        for course in courses.values():
            log.info("%s goes on after round %d", course.key, course.resume())
    errors: dict[str, BaseException] = {}

    def go(course: Course) -> None:
        try:
            course.play()
        except BaseException as error:
            errors[course.key] = error
        finally:
            hub.leave()

    _together([lambda c=c: go(c) for c in courses.values()])  # type: ignore[misc]
    hub.flush()
    for key, course in courses.items():
        if key not in errors:
            course.finish()
    for error in errors.values():
        raise error
    return courses


def _together(calls: list[Callable[[], None]]) -> None:
    """Each call in a thread of its own; a lone one needs none."""
    if len(calls) == 1:
        calls[0]()
        return
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(slots=True)
class _Exchange:
    """The exchange of a deployment: a site that came back under another node is recognised first."""

    post: SiteTransport
    plan: Experiment
    text: str
    experiment: str
    _known: set[int] = field(default_factory=set)

    def __call__(self, letters: Mapping[str, Letter], round: int) -> dict[str, Package | str]:
        nodes = set(self.post.grid.get_node_ids())
        gone = [s for s in letters if self.post.nodes.get(s) not in nodes]
        strangers = nodes - set(self.post.nodes.values()) - self._known
        if gone and strangers:
            hello = pack_letter(Letter(self.experiment, self.text))
            for node, package in self.post.ask(dict.fromkeys(strangers, hello), round).items():
                self._known.add(node)
                if isinstance(package, Package) and package.site in gone:
                    self.post.nodes[package.site] = node
        return self.post.exchange(letters, round)


def _rows_of(facts: Mapping[str, Any], key: str) -> dict[str, int]:
    try:
        rows = {part: int(facts["rows"][key][part]) for part in ("train", "test", "val")}
    except (KeyError, TypeError, ValueError):
        raise RunError("a site did not say how many rows it has") from None
    if rows["train"] < 1 or min(rows.values()) < 0:
        raise RunError("a site has no training rows")
    return rows


def _absent(name: str, rows: Mapping[str, int]) -> Site:
    """A site as the server knows it: numbers of rows without the rows."""

    def blank(count: int) -> Rows:
        return Rows(torch.empty(count, 0), torch.empty(count, 0))

    test, val = (blank(rows[part]) if rows[part] else None for part in ("test", "val"))
    return Site(name, blank(rows["train"]), test, val, np.zeros(0, np.int64), torch.zeros(0))
