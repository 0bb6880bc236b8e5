"""``fit``: the front door of the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedloom import tasks
from fedloom.clients.lazy_clients import Judges, Sites
from fedloom.clients.messages import Site, Work
from fedloom.data import ClientData, Federation, concatenate
from fedloom.data.augment import Augmentation, augment_table, augmentation
from fedloom.engines import Engine, LoopEngine, distributed
from fedloom.engines.choose_device import choose_device, use_deterministic_kernels, use_tf32
from fedloom.engines.distributed import DistributedEngine
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.errors import UserError
from fedloom.network.functional import Network
from fedloom.rounds import diagnostics, sampling, server, unseen_clients
from fedloom.rounds.diagnostics.probe import Diagnostics, Probe
from fedloom.rounds.evaluation import Evaluate
from fedloom.rounds.logger import Logger
from fedloom.rounds.modes import CLOUD, POOL, Hybrid, Mixing
from fedloom.rounds.run import Record, Run
from fedloom.rounds.sampling import Participation
from fedloom.rounds.session import Session
from fedloom.runs import config_file, manifest, problem
from fedloom.runs import loggers as logging
from fedloom.runs.choose_engine import choose_engine
from fedloom.runs.loading import load_run
from fedloom.runs.model_files import fingerprint, model_files, rows_fingerprint
from fedloom.runs.options import Settings
from fedloom.runs.result import ClientResult, Clients, Result
from fedloom.runs.run_folder import RunFolder, amend, read_config
from fedloom.spec import text_form
from fedloom.spec.method import Method
from fedloom.spec.optimizer import Optimizer
from fedloom.spec.options import option_names, read
from fedloom.store.client_store import ClientStore
from fedloom.tasks import Task

Table = dict[str, Any]


def fit(
    method: Method | str,
    model: nn.Module | Callable[[], nn.Module] | str | Mapping[str, Any],
    data: Federation | str | Mapping[str, Any],
    *,
    mode: Literal["centralised", "federated", "hybrid"] = "federated",
    rounds: int = 10,
    cohort: float | int = 1.0,
    epochs: int = 1,
    batch_size: int | Literal["full"] = 32,
    optimizer: Optimizer | str | Mapping[str, Any] | None = None,
    task: str | Task = "classification",
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    seed: int = 0,
    workers: int = 0,
    deterministic: bool = False,
    optimizer_state: Literal["keep", "reset"] | None = None,
    head: str | None = None,
    evaluate: Mapping[str, Any] | None = None,
    participation: Mapping[str, Any] | None = None,
    hybrid: Mapping[str, Any] | None = None,
    augment: Augmentation | Mapping[str, Any] | None = None,
    diagnostics: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callable[[Record], object]] = (),
    loggers: Sequence[str | Logger] = (),
) -> Result:
    """Trains a method on a federation.

    Every key of a configuration file is an argument here, of the same name and with the same values.

    Args:
        method: a method, or its text form such as ``"fedprox(mu=0.01) + clip(1.0)"``.
        model: any module (its weights are round 0's), a callable that makes one (seeded), or a network by name such as
            ``"convnet4(width=64)"``.
        data: who has which rows: a federation, or the table ``[data]`` of a configuration.
        mode: ``"centralised"`` (one participant with everything), ``"federated"``, or ``"hybrid"`` (cloud and sites).
        rounds: number of rounds.
        cohort: fraction (float) or number (int) of clients in a round.
        epochs: local epochs.
        batch_size: rows of a mini-batch, or ``"full"``.
        optimizer: of the clients, such as ``fl.sgd(lr=0.1)``, ``"adam(lr=1e-3)"`` or a table; default ``fl.sgd(lr=0.05)``.
        task: ``"classification"``, ``"binary"``, ``"regression"``, ``"segmentation"``, or an ``fl.Task``.
        engine: ``"auto"``, ``"loop"``, ``"vectorised"``, ``"flower"``, or an engine of one's own.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        precision: ``"fp32"`` (on CUDA with torch's own settings: TF32 in convolutions, not in other products, unless you
            changed them), ``"tf32"`` (in all products), ``"bf16"`` (autocast) or ``"fp64"``.
        seed: of everything random.
        workers: processes of the loop engine; 0 for none.
        deterministic: use deterministic kernels only (the CPU always does).
        optimizer_state: ``"keep"`` or ``"reset"`` between rounds; centralised runs keep it, others reset it.
        head: pattern of the head's leaves; None to find it.
        evaluate: when and whom to test, see :class:`fedloom.rounds.evaluation.Evaluate`.
        participation: who takes part in a round, see :class:`fedloom.rounds.sampling.Participation`.
        hybrid: options of hybrid mode, see :class:`fedloom.rounds.modes.Mixing`.
        augment: random changes of training pictures and their masks, see :class:`fedloom.data.Augment`; or a function
            ``(x, y, key) -> (x, y)`` of one client's batch.
        diagnostics: measure drift, heterogeneity, noise, smoothness and conflict, see :class:`fedloom.rounds.diagnostics.probe.Diagnostics`; ``{}``
            for its defaults, None to measure nothing.
        out: folder for configuration, metrics, checkpoints and models; None writes nothing.
        resume: go on with what is in ``out``; the finished run is identical to one that was never interrupted (on a GPU to rounding).
        progress: whether a bar is shown (on terminals).
        callbacks: called with the record of each round; one that returns True stops the run.
        loggers: where else its numbers go: ``"tensorboard"``, ``"mlflow"``, or an object like :class:`fedloom.rounds.logger.Logger`.

    Returns:
        The result: history, clients, models, summary.

    Example:
        >>> import fedloom as fl
        >>> data = fl.data.load("digits").partition(fl.dirichlet(0.3), clients=4, seed=0)
        >>> result = fl.fit("fedavg", fl.models.mlp, data, rounds=2, progress=False)
        >>> len(result.history)
        2
    """
    chosen, goal, sgd = text_form.method(method), tasks.named(task), config_file.optimizer_of(optimizer)
    plain = {
        "mode": mode,
        "rounds": rounds,
        "cohort": cohort,
        "epochs": epochs,
        "batch_size": batch_size,
        "task": goal.name,
        "engine": engine if isinstance(engine, str) else "loop",
        "device": device,
        "precision": precision,
        "seed": seed,
        "workers": workers,
        "deterministic": deterministic,
        "optimizer_state": optimizer_state,
        "loggers": tuple(name for name in loggers if isinstance(name, str)),
    }
    told = logging.named(loggers)
    settings = read(Settings, plain, "")
    judging, asking = (
        read(Evaluate, evaluate or {}, "evaluate"),
        read(Participation, participation or {}, "participation"),
    )
    mixing = read(Mixing, hybrid or {}, "hybrid") if mode == "hybrid" else None
    changes = augmentation(augment)
    asked = None if diagnostics is None else read(Diagnostics, diagnostics, "diagnostics")
    if judging.folds:
        raise UserError(
            f"evaluate.folds={judging.folds}: cross-validation is several runs; use fl.cross_validate or `fedloom run`"
        )
    if resume and out is None:
        raise UserError("resume=True needs out='folder', the folder of the run to go on with")
    if mode != "centralised" and optimizer_state == "keep":
        raise UserError("optimizer_state='keep' is for mode='centralised'; clients begin each round with a fresh state")
    ranks = distributed.joined()
    if ranks is not None:
        ranks.ended(False)
    first = ranks is None or ranks.first
    target = choose_device(device, precision)
    where = target.torch_device
    federation, data_table, judging = _data(data, judging, seed)
    made, model_table = _model(model, federation, goal, head)
    names = unseen_clients.held_out(federation, judging.holdout, seed)
    there = federation.subset([i for i in federation.ids if i not in names]) if names else federation
    if mixing is not None:
        there = problem.with_cloud(there, mixing, seed)
    net = problem.make_network(made, federation, goal, seed=seed, head=model_table.get("head"), device=target)
    state = _run(chosen, net, goal, there, settings, sgd, where)
    state.work = replace(state.work, augment=changes)
    saved = _saved_plan(out, resume) if first else None
    saved = saved if ranks is None else ranks.agree(saved)
    state.engine, plan = choose_engine(
        state, engine, workers=settings.workers, head=model_table.get("head"), saved=saved
    )
    state.participation, state.moments = asking, tuple(m for m in ("before", "after") if m in judging.moments)
    if asking.trace is not None:
        state.trace = sampling.read_trace(asking.trace, list(state.sites))
    notes = problem.notes_of(chosen, sgd)
    tables = {
        "data": data_table or {"fingerprint": rows_fingerprint(federation)},
        "model": model_table if "name" in model_table else manifest.given_model(model_table, net),
        "optimizer": config_file.optimizer_table(sgd),
        "evaluate": {k: v for k, v in config_file.table_of(judging).items() if k not in ("folds", "repeats")},
        "participation": config_file.table_of(asking),
        "hybrid": None if mixing is None else config_file.table_of(mixing),
        "augment": augment_table(changes),
        "diagnostics": None if asked is None else config_file.table_of(asked),
    }
    full = manifest.configuration(chosen, settings, tables, goal, state, notes)
    full["resolved"] |= manifest.shapes(federation, net)
    full["resolved"] |= _settled(state)
    full["resolved"]["plan"] = plan.record()
    if ranks is not None:
        full["resolved"]["ranks"] = ranks.count
        ranks.check_same(json.dumps([full, fingerprint(net)], sort_keys=True, default=str))
    folder = None if out is None or not first else RunFolder(out, resume=resume)
    session = Session(
        state=state,
        mode=mode,
        options=judging,
        hybrid=(hybrids := _hybrid(state, there, mixing, where)),
        probe=None if asked is None else Probe(asked, None if hybrids is None else hybrids.cloud),
        folder=folder,
        new={n: problem.make_site(federation[n], goal, net.structure.outputs, where) for n in names},
        callbacks=callbacks if first else (),
        loggers=told if first else (),
        progress=progress and first,
        ranks=ranks,
        notes=list(notes),
    )
    if isinstance(state.engine, VectorisedEngine):
        state.engine.told = lambda changes: _amended(full, folder, changes)
    state.new, state.adapt_epochs = session.new, judging.adapt_epochs
    if ranks is not None:
        state.engine = DistributedEngine(state.engine, ranks)
    state.clients = ClientStore(device=where) if folder is None else folder.clients(where)
    try:
        done = folder is not None and folder.finished
        if done if ranks is None else ranks.agree(done):
            if folder is not None:
                folder.check_same(full)
            return load_run(Path(str(out)), model=made)
        with (
            use_deterministic_kernels(target, settings.deterministic),
            use_tf32(target),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            result = _finish(session, folder, federation, full, rounds, where)
        if ranks is not None:
            ranks.ended(True)
        return result
    finally:
        if folder is not None:
            folder.close()


def _amended(full: Table, folder: RunFolder | None, changes: Table) -> None:
    """Records what changes in the plan, before the run goes on with it."""
    amend(full["resolved"], changes)
    if folder is not None and folder.begun:
        folder.amend(changes)


def _saved_plan(out: str | Path | None, resume: bool) -> Table | None:
    """How a run that goes on was computed; None for a new one."""
    if out is None or not resume or not (Path(out) / "run.toml").exists():
        return None
    plan: Table | None = read_config(Path(out)).get("resolved", {}).get("plan")
    return plan


def _finish(
    session: Session, folder: RunFolder | None, data: Federation, full: Table, rounds: int, where: torch.device
) -> Result:
    """Plays the run to its end and writes what it leaves behind."""
    _open(session, folder, data, full, where)
    with logging.opened(session.loggers, full, None if folder is None else folder.path, len(session.history)):
        session.go(rounds)
    clients = _clients(session)
    if folder is not None:
        folder.finish([c.row() for c in clients.values()], model_files(session.state, data))
    task, path = session.state.bound.task, None if folder is None else folder.path
    return Result(session.history, clients, full, task, session.state, tuple(session.notes), path)


def _data(data: object, judging: Evaluate, seed: int) -> tuple[Federation, Table, Evaluate]:
    """The federation, the table that makes it again, and the evaluation with what the table says of new clients."""
    if not isinstance(data, (Federation, str, Mapping)):
        raise UserError(f"data: expected a Federation (fl.Federation.from_arrays makes one), got {type(data).__name__}")
    federation, table = config_file.federation_of(data, seed)
    given = {k: table.pop(k) for k in ("holdout", "adapt_epochs") if k in table}
    if not given:
        return federation, table, judging
    both = {k: v for k in option_names(Evaluate) if (v := getattr(judging, k)) is not None}
    return federation, table, read(Evaluate, both | given, "evaluate")


def _model(
    model: nn.Module | Callable[[], nn.Module] | str | Mapping[str, Any], data: Federation, task: Task, head: str | None
) -> tuple[nn.Module | Callable[[], nn.Module], Table]:
    """What makes the network, and its table."""
    table: Table = {}
    made = model
    if isinstance(model, (str, Mapping)):
        made, table = config_file.model_of(model, data, task)
    if head is not None:
        table["head"] = head
    assert not isinstance(made, (str, Mapping))
    return made, table


def _run(
    method: Method,
    net: Network,
    task: Task,
    data: Federation,
    settings: Settings,
    optimizer: Optimizer,
    where: torch.device,
) -> Run:
    bounds = problem.bind_all(method, net, task, settings.seed)

    def make(client: ClientData) -> Site:
        return problem.make_site(client, task, net.structure.outputs, where)

    everyone = Sites({c.id: c for c in data}, make, where)
    sites: Mapping[str, Site] = everyone
    judges = Judges(everyone)
    if settings.mode == "centralised":
        # A lone participant keeps its name, hence its stream: the cloud of a hybrid run is such a federation.
        name = POOL if len(sites) > 1 else next(iter(sites))
        sites = {name: make(ClientData(name, concatenate([c.train for c in data])))}
        judges = Judges(everyone, name)
    keep = settings.mode == "centralised" and settings.optimizer_state != "reset"
    work = Work(settings.epochs, settings.batch_size, optimizer, settings.seed, settings.rounds, keep_optimizer=keep)
    return Run(
        bound=bounds[0],
        engine=LoopEngine(),
        work=work,
        sites=sites,
        size=sampling.cohort_size(settings.cohort, len(sites)) if settings.mode != "centralised" else 1,
        state=server.initial_state(bounds[0]),
        later={r: b for r, b in bounds.items() if r},
        judges=judges,
    )


def _settled(state: Run) -> Table:
    """What the options of plug-ins came to for this model, by plug-in."""
    bounds = (state.bound, *state.later.values())
    found = [(e, b.structure) for b in bounds for e in b.method.partition.extras]
    return {e.owner: config_file.plain(dict(e.resolved(structure))) for e, structure in found if e.resolved is not None}


def _hybrid(state: Run, data: Federation, mixing: Mixing | None, where: torch.device) -> Hybrid | None:
    if mixing is None:
        return None
    assert data.cloud is not None
    cloud = ClientData(CLOUD, data.cloud)
    return Hybrid(problem.make_site(cloud, state.bound.task, state.bound.structure.outputs, where), mixing)


def _open(session: Session, folder: RunFolder | None, data: Federation, full: Table, where: torch.device) -> None:
    """Begins a run, or goes back to its last checkpoint."""
    found = None
    if folder is not None and folder.begun:
        folder.check_same(full)
        folder.describe(lambda: diagnostics.sketch(data))
        found = folder.restore(where)
    elif folder is not None:
        folder.begin(full)
        folder.describe(lambda: diagnostics.sketch(data))
    if session.ranks is not None:
        found = session.ranks.share(found, where)
    if found is None:
        session.state.setup()
    else:
        session.restore(*found)


def _clients(session: Session) -> Clients:
    state = session.state
    found = {
        name: ClientResult(name, state.last.get(name, {}), state.rounds_of(owner), len(site.train))
        for name, (site, owner) in state.judges.items()
    }
    for name, site in session.new.items():
        found[name] = ClientResult(name, session.fresh.get(name, {}), 0, len(site.train), new=True)
    return Clients(found)
