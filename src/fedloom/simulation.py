"""``fit``: the front door of the simulator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from fedloom import expr, network, rng, run, sampling, server, tasks
from fedloom.bound import Bound, bind
from fedloom.data import ClientData, Federation, Rows, concatenate
from fedloom.engines import Engine, LoopEngine
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.errors import UserError
from fedloom.modes import CLOUD, POOL, Hybrid, Mixing
from fedloom.optim import Optimizer, sgd
from fedloom.record import Method
from fedloom.result import ClientResult, Clients, Result
from fedloom.run import Record, Run
from fedloom.tasks import Task
from fedloom.types import Inputs
from fedloom.work import Site, Work

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def fit(
    method: Method | str,
    model: nn.Module | Callable[[], nn.Module],
    data: Federation,
    *,
    mode: Literal["centralised", "federated", "hybrid"] = "federated",
    rounds: int = 10,
    cohort: float | int = 1.0,
    epochs: int = 1,
    batch_size: int | Literal["full"] = 32,
    optimizer: Optimizer | None = None,
    task: str | Task = "classification",
    engine: str | Engine = "auto",
    device: str = "auto",
    precision: str = "fp32",
    seed: int = 0,
    head: str | None = None,
    evaluate: Mapping[str, Any] | None = None,
    hybrid: Mapping[str, Any] | None = None,
    progress: bool = True,
    callbacks: Sequence[Callable[[Record], object]] = (),
) -> Result:
    """Trains a method on a federation.

    Args:
        method: a method, or its text form such as ``"fedprox(mu=0.01) + clip(1.0)"``.
        model: any module (its weights are round 0's), or a callable that makes one (seeded).
        data: who has which rows.
        mode: ``"centralised"`` (one participant with everything), ``"federated"``, or ``"hybrid"`` (cloud and sites).
        rounds: number of rounds.
        cohort: fraction (float) or number (int) of clients in a round.
        epochs: local epochs.
        batch_size: rows of a mini-batch, or ``"full"``.
        optimizer: of the clients; default ``fl.sgd(lr=0.05)``.
        task: ``"classification"``, ``"binary"``, ``"regression"``, ``"segmentation"``, or an ``fl.Task``.
        engine: ``"auto"``, ``"loop"`` or ``"vectorised"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        precision: ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp64"``.
        seed: of everything random.
        head: pattern of the head's leaves; None to find it.
        evaluate: ``every`` (rounds) and ``clients`` (``"all"``, ``"sampled"`` or a number).
        hybrid: options of hybrid mode, see :class:`fedloom.modes.Mixing`.
        progress: whether a bar is shown.
        callbacks: called with the record of each round; one that returns True stops the run.

    Returns:
        The result: history, clients, models, summary.

    Example:
        >>> import fedloom as fl
        >>> data = fl.data.load("digits").partition(fl.dirichlet(0.3), clients=4, seed=0)
        >>> net = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> result = fl.fit("fedavg", net, data, rounds=2, progress=False)
        >>> len(result.history)
        2
    """
    chosen = expr.method(method)
    goal = tasks.named(task)
    where = _device(device)
    optimizer = optimizer or sgd()
    _check_numbers(rounds=rounds, epochs=epochs, batch_size=batch_size)
    if not isinstance(data, Federation):
        raise UserError(f"data: expected a Federation (fl.Federation.from_arrays makes one), got {type(data).__name__}")
    if mode not in ("centralised", "federated", "hybrid"):
        raise UserError(f"mode={mode!r}: expected centralised, federated or hybrid")
    notes = _notes(chosen, optimizer)
    mixing = _mixing(hybrid) if mode == "hybrid" else None
    if mixing is not None:
        data = _with_cloud(data, mixing, seed)
    net = make_network(model, data, goal, seed=seed, head=head, device=where, precision=precision)
    bounds = _bind_all(chosen, net, goal, seed)
    sites = {c.id: make_site(c, goal, net.structure.outputs, where) for c in data}
    judges = {name: (site, name) for name, site in sites.items()}
    if mode == "centralised":
        pool = ClientData(POOL, concatenate([c.train for c in data]))
        sites = {POOL: make_site(pool, goal, net.structure.outputs, where)}
        judges = {name: (site, POOL) for name, (site, _) in judges.items()}
    work = Work(epochs, batch_size, optimizer, seed, rounds, keep_optimizer=mode == "centralised")
    state = Run(
        bound=bounds[0],
        engine=make_engine(engine),
        work=work,
        sites=sites,
        size=sampling.cohort_size(cohort, len(sites)) if mode != "centralised" else 1,
        state=server.opening(bounds[0]),
        later={r: b for r, b in bounds.items() if r},
        judges=judges,
    )
    state.setup()
    history = _loop(state, rounds, mode, data, mixing, evaluate or {}, progress, callbacks, where)
    config = {"method": chosen.text, "mode": mode, "rounds": rounds, "seed": seed}
    return Result(history, _clients(state, history), config, goal, state, notes)


def _loop(
    state: Run,
    total: int,
    mode: str,
    data: Federation,
    mixing: Mixing | None,
    options: Mapping[str, Any],
    progress: bool,
    callbacks: Sequence[Callable[[Record], object]],
    where: torch.device,
) -> list[Record]:
    every, whom = _evaluation(options, len(state.judges))
    task, hybrid = state.bound.task, None
    if mixing is not None:
        assert data.cloud is not None
        cloud = ClientData(CLOUD, data.cloud)
        hybrid = Hybrid(make_site(cloud, task, state.bound.structure.outputs, where), mixing)

    def play(round: int) -> Record:
        facts = hybrid(state, round) if hybrid is not None else run.federated(state, round)
        if mode == "centralised":
            facts |= {"bytes_up": 0, "bytes_down": 0}
        return {"mode": mode, **facts}

    def judge(round: int) -> Record:
        last = round == total
        if not last and (every == 0 or round % every):
            return {task.primary: None}
        own, shared = state.evaluate(_chosen(state, whom, last))
        found = evaluation_record(task, own, shared)
        state.last = own
        return found

    with _bar(progress) as bar:
        line = bar.add_task(state.bound.method.text, total=total)

        def after(record: Record) -> bool:
            value = record.get(task.primary)
            shown = "" if value is None else f"{task.primary} {value:.4f}"
            bar.update(line, advance=1, description=f"{state.bound.method.text}  {shown}")
            answers = [c(record) for c in callbacks]
            return any(a is True for a in answers)

        return run.rounds(state, total, play, evaluate=judge, after=after)


def evaluation_record(task: Task, own: Mapping[str, Any], shared: Mapping[str, Any] | None) -> Record:
    """The metrics of a round under the names of ``metrics.jsonl``."""
    from fedloom import evaluation

    found: Record = dict(evaluation.summary(task, own))
    if shared is None:
        found[f"global_{task.primary}"] = None
    else:
        found |= {f"global_{k}": v for k, v in shared.items()}
    return found


def _bar(shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not shown or not console.is_terminal,
        transient=True,
    )


def _chosen(state: Run, whom: str | int, last: bool) -> list[str]:
    names = list(state.judges)
    if last or whom == "all" or isinstance(whom, str):
        return names
    picked = rng.stream(state.work.seed, "sample", "evaluate").choice(
        len(names), size=min(whom, len(names)), replace=False
    )
    return [names[i] for i in sorted(picked)]


def _evaluation(options: Mapping[str, Any], clients: int) -> tuple[int, str | int]:
    unknown = set(options) - {"every", "clients"}
    if unknown:
        raise UserError(f"evaluate: unknown option {sorted(unknown)[0]!r}; expected every, clients")
    every, whom = options.get("every", 1), options.get("clients", "all" if clients <= 1000 else 1000)
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        raise UserError(f"evaluate.every={every!r}: expected a whole number of rounds (0: only at the end)")
    return every, whom


def _clients(state: Run, history: list[Record]) -> Clients:
    return Clients(
        {
            name: ClientResult(
                name,
                state.last.get(name, {}),
                rounds=state.state_of(owner).rounds,
                n_train=len(site.train),
            )
            for name, (site, owner) in state.judges.items()
        }
    )


# Making the parts -----------------------------------------------------------------------------------------


def make_engine(name: str | Engine) -> Engine:
    """The engine of a name; an engine is returned as it is."""
    if not isinstance(name, str):
        return name
    if name == "vectorised":
        return VectorisedEngine()
    if name not in ("auto", "loop"):
        raise UserError(f"engine={name!r}: expected auto, loop or vectorised")
    return LoopEngine()


def make_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module as it is, or what a callable makes under the run's seed; torch's global generator is not moved."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UserError(f"model: expected an nn.Module or a callable that makes one, got {type(model).__name__}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key_of(seed, "init"))
        made = model()
    if not isinstance(made, nn.Module):
        raise UserError(f"model: the callable returned {type(made).__name__}, expected an nn.Module")
    return made


def make_network(
    model: nn.Module | Callable[[], nn.Module],
    data: Federation,
    task: Task,
    *,
    seed: int,
    head: str | None,
    device: torch.device,
    precision: str,
) -> network.Network:
    """The user's model as a function, checked against the data."""
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r}: expected {', '.join(PRECISIONS)}")
    first = data.clients[0].train
    sample = first.take(torch.arange(min(2, len(first))))
    scale: tuple[Tensor, Tensor] | None = None
    dtype = PRECISIONS[precision]
    if data.scale is not None:
        shape = (1, -1, *[1] * (_dims(sample.x) - 2))
        mean, std = (
            torch.tensor(v, dtype=dtype, device=device).reshape(shape) for v in (data.scale.mean, data.scale.std)
        )
        scale = (mean, std)
    net = network.build(
        make_module(model, seed),
        _move(sample.x, device),
        task=task.name,
        head=head,
        dtype=dtype,
        device=device,
        scale=scale,
    )
    if precision == "bf16":
        net.autocast = torch.bfloat16
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if task.check is not None:
        for client in data:
            for part, rows in client.parts().items():
                task.check(net.structure.outputs, rows.y, f"client {client.id!r}, {part}")
    return net


def make_site(client: ClientData, task: Task, classes: int, device: torch.device) -> Site:
    """A client's rows on the device, with what samplers and methods ask of them."""
    labels = client.train.y
    counts = torch.zeros(0)
    if task.classes and labels.dim() == 1:
        width = max(classes, 2)
        counts = torch.bincount(labels.long(), minlength=width).float()
    return Site(
        id=client.id,
        train=_rows(client.train, device),
        test=None if client.test is None else _rows(client.test, device),
        val=None if client.val is None else _rows(client.val, device),
        labels=labels.numpy() if labels.dim() == 1 else np.zeros(len(labels), np.int64),
        counts=counts.to(device),
    )


def _bind_all(method: Method, net: network.Network, task: Task, seed: int) -> dict[int, Bound]:
    """The bound method, and those that take over later, by the round after which they do."""
    bounds = {0: bind(method, net, task, seed=seed)}
    while method.then is not None:
        rounds, method = method.then
        bounds[rounds] = bind(replace(method), net, task, seed=seed)
    return bounds


def _rows(rows: Rows, device: torch.device) -> Rows:
    return Rows(_move(rows.x, device), rows.y.to(device))


def _move(x: Inputs, device: torch.device) -> Inputs:
    if isinstance(x, Tensor):
        return x.to(device)
    return {k: v.to(device) for k, v in x.items()} if isinstance(x, dict) else tuple(v.to(device) for v in x)


def _dims(x: Inputs) -> int:
    return x.dim() if isinstance(x, Tensor) else next(iter(x.values() if isinstance(x, dict) else x)).dim()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name!r}: expected auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name!r}: no CUDA device is available here; use device='cpu'")
    return device


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if name == "batch_size" and value == "full":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            more = " or 'full'" if name == "batch_size" else ""
            raise UserError(f"{name}={value!r}: expected a whole number of at least 1{more}")


def _notes(method: Method, optimizer: Optimizer) -> tuple[str, ...]:
    if method.plain_sgd and (optimizer.name != "sgd" or optimizer.momentum):
        note = f"off_spec: {method.text} is defined for SGD without momentum; with {optimizer.name} its correction is no gradient"
        warnings.warn(note, stacklevel=3)
        return (note,)
    return ()


def _mixing(options: Mapping[str, Any] | None) -> Mixing:
    try:
        return Mixing(**(options or {}))
    except TypeError:
        known = ", ".join(Mixing.__dataclass_fields__)
        raise UserError(f"hybrid: expected options among {known}, got {', '.join(options or {})}") from None


def _with_cloud(data: Federation, mixing: Mixing, seed: int) -> Federation:
    """The federation with rows moved to the cloud, unless it has cloud rows already."""
    if mixing.cloud_clients:
        moved = [data[c] for c in mixing.cloud_clients]
        rest = tuple(c for c in data if c.id not in mixing.cloud_clients)
        if not rest:
            raise UserError("hybrid.cloud_clients names every client; leave at least one site")
        return replace(data, clients=rest, cloud=concatenate([c.train for c in moved]))
    if mixing.cloud_fraction is None:
        if data.cloud is None:
            raise UserError(
                "mode='hybrid' needs cloud rows: data.with_cloud((x, y)), hybrid.cloud_fraction or hybrid.cloud_clients"
            )
        return data
    clients, taken = [], [] if data.cloud is None else [data.cloud]
    for client in data:
        order = torch.from_numpy(rng.stream(seed, "cloud", client.id).permutation(len(client.train)))
        count = min(int(mixing.cloud_fraction * len(client.train) + 0.5), len(client.train) - 1)
        if count:
            taken.append(client.train.take(order[:count].sort()[0]))
        clients.append(replace(client, train=client.train.take(order[count:].sort()[0])))
    if not taken:
        raise UserError(
            f"hybrid.cloud_fraction={mixing.cloud_fraction} takes no row from any client; give a larger one"
        )
    return replace(data, clients=tuple(clients), cloud=concatenate(taken))
