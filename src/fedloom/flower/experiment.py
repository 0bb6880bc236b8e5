"""An experiment that sites agree on: methods, model, options, and the form of a row. It travels as text with every letter."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from fedloom import tasks
from fedloom.clients.messages import Site, Work
from fedloom.data import ClientData, Federation, Rows, Scale
from fedloom.data.augment import Augmentation, augmentation
from fedloom.devices import Device
from fedloom.errors import UserError
from fedloom.network.bound_method import Bound
from fedloom.rounds.modes import Mixing
from fedloom.runs import config_file, problem
from fedloom.spec import text_form
from fedloom.spec.options import read

_TYPES = {"float32": torch.float32, "float64": torch.float64, "uint8": torch.uint8, "int64": torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowForm:
    """The form of a row, the same at every site.

    Args:
        shape: of an input without the row axis: [13] for thirteen columns, [3, 32, 32] for pictures.
        type: float32, float64, uint8 (pictures, scaled by 1/255) or int64.
        classes: names of the classes, in the order of the model's outputs; text labels are looked up here.
        target: shape of a target without the row axis; empty for a class or a number.
        columns: of tables, the input columns in order; without, all but the label in the order of the file.
        words: of text columns, the values they can take; each becomes a column of zeros and ones.
        mean: of uint8 inputs, mean per channel after 1/255.
        std: of uint8 inputs, standard deviation per channel after 1/255.
    """

    shape: tuple[int, ...]
    type: Literal["float32", "float64", "uint8", "int64"] = "float32"
    classes: tuple[str, ...] = ()
    target: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """An experiment.

    Args:
        name: of the experiment.
        methods: methods that are trained in the same rounds, each with a model of its own.
        sites: names of the sites, in the order that sums and ties follow.
        inputs: the form of a row.
        model: name and options of the network.
        seeds: each method is trained once per seed, in the same rounds; a seed also cuts the sites' rows anew.
        mode: federated, or hybrid with rows at the server.
        rounds: number of rounds.
        cohort: sites in a round, as a fraction or a number.
        epochs: local epochs.
        batch_size: rows of a mini-batch, or "full".
        task: classification, binary, regression or segmentation.
        precision: fp32 or fp64.
        head: pattern of the head's leaves, where it is not found.
        optimizer: name and options of the sites' optimiser.
        augment: random changes of training pictures, see :class:`fedloom.data.Augment`.
        data: how sites read their rows: label, test, val, seed, preprocess; a site's own file can say more.
        hybrid: options of hybrid mode, and ``cloud``, an npz file with x and y at the server.
        every: rounds between evaluations.
        moments: before and after: sites also test what they received and what they made of it.
        timeout: seconds after which a round goes on without a site.
        wait: seconds that the server waits at the start until every site has come.
    """

    name: str
    methods: tuple[str, ...]
    sites: tuple[str, ...]
    inputs: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "mlp"})
    seeds: tuple[int, ...] = (0,)
    mode: Literal["federated", "hybrid"] = "federated"
    rounds: int = 10
    cohort: float | int = 1.0
    epochs: int = 1
    batch_size: int | Literal["full"] = 32
    task: str = "classification"
    precision: Literal["fp32", "fp64"] = "fp32"
    head: str | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    augment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    hybrid: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1
    moments: tuple[Literal["before", "after"], ...] = ()
    timeout: float = 90.0
    wait: float = 300.0

    BOUNDS: ClassVar[tuple[str, ...]] = (
        "1 <= rounds <= 10000000",
        "1 <= epochs <= 1000000",
        "batch_size >= 1",
        "cohort > 0",
        "every >= 0",
        "timeout > 0",
        "wait >= 0",
    )

    def __post_init__(self) -> None:
        for what, values in (("methods", self.methods), ("sites", self.sites), ("seeds", self.seeds)):
            if not values or len(set(values)) != len(values):
                raise UserError(f"{what}: expected at least one and none twice, got {list(values)}")
        if not self.name or not self.name.isprintable() or len(self.name) > 60:
            raise UserError(f"name={self.name!r}: expected 1 to 60 printable characters")
        form = self.form()
        if self.changes() is not None and len(form.shape) != 3:
            raise UserError(
                f"augment: inputs.shape={list(form.shape)}; only pictures [channels, height, width] can be augmented"
            )

    # Reading.

    @staticmethod
    def of(table: Mapping[str, Any]) -> Experiment:
        """A plan from its table, checked."""
        for key in ("name", "methods", "sites", "inputs"):
            if key not in table:
                raise UserError(f"the experiment has no {key!r}; expected at least name, methods, sites and [inputs]")
        return read(Experiment, table, "")

    @staticmethod
    def parse(text: str) -> Experiment:
        """A plan from the text of its file."""
        try:
            table = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UserError(f"the experiment is no TOML: {error}") from None
        return Experiment.of(table)

    @staticmethod
    def load(path: str | Path) -> tuple[Experiment, str]:
        """A plan and its text from a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the experiment {path}: {error}") from None
        return Experiment.parse(text), text

    def form(self) -> RowForm:
        """The form of a row."""
        form = read(RowForm, self.inputs, "inputs")
        if not form.shape or min(form.shape) < 1:
            raise UserError(f"inputs.shape={list(form.shape)}: expected sizes of at least 1, such as [13]")
        if len(form.mean) != len(form.std):
            raise UserError("inputs.mean and inputs.std belong together; give both or neither")
        return form

    def changes(self) -> Augmentation | None:
        """The augmentation; None for none."""
        return augmentation(self.augment or None)

    # Making.

    def runs(self) -> dict[str, tuple[str, int]]:
        """Method and seed of each run, by its name among those that share messages."""
        many = len(self.seeds) > 1
        return {f"{m} [seed {s}]" if many else m: (m, s) for s in self.seeds for m in self.methods}

    def rows(self) -> Rows:
        """A few rows of zeros in the form that every site's rows have."""
        form, task = self.form(), tasks.named(self.task)
        kind = torch.int64 if task.classes or task.name == "binary" else torch.float32
        return Rows(torch.zeros(4, *form.shape, dtype=_TYPES[form.type]), torch.zeros(4, *form.target, dtype=kind))

    def federation(self, client: ClientData | None = None) -> Federation:
        """A federation of one: a site's rows, or rows of zeros."""
        form = self.form()
        scale = Scale(form.mean, form.std) if form.mean else None
        return Federation((client or ClientData("zeros", self.rows()),), None, self.name, form.classes or None, scale)

    def bounds(self, method: str, seed: int, device: Device) -> dict[int, Bound]:
        """A method bound to the model, by the round after which it takes over."""
        task, form = tasks.named(self.task), self.form()
        if task.classes and not form.classes:
            raise UserError(f"task {self.task!r}: list the names of the classes as inputs.classes, in order")
        zeros = self.federation()
        make, _ = config_file.model_of(self.model, zeros, task)
        net = problem.make_network(make, zeros, task, seed=seed, head=self.head, device=device)
        return problem.bind_all(text_form.method(method), net, task, seed)

    def work(self, seed: int) -> Work:
        """How sites work."""
        optimizer = config_file.optimizer_of(dict(self.optimizer))
        return Work(self.epochs, self.batch_size, optimizer, seed, self.rounds, augment=self.changes())

    def site(self, client: ClientData, outputs: int, device: torch.device) -> Site:
        """A site's rows on a device, once they are found to have the form that was agreed on."""
        self.check_rows(client)
        task = tasks.named(self.task)
        if task.check is not None:
            for part, rows in client.parts().items():
                task.check(outputs, rows.y, f"site {client.id!r}, {part}")
        return problem.make_site(client, task, outputs, device)

    def check_rows(self, client: ClientData) -> None:
        """Says in words where a site's rows differ from what was agreed on."""
        expected = self.rows()
        for part, rows in client.parts().items():
            for what, ours, theirs in (("inputs", rows.x, expected.x), ("targets", rows.y, expected.y)):
                assert isinstance(theirs, torch.Tensor)
                if not isinstance(ours, torch.Tensor) or ours.shape[1:] != theirs.shape[1:]:
                    got = tuple(ours.shape[1:]) if isinstance(ours, torch.Tensor) else "several arrays"
                    raise UserError(
                        f"site {client.id!r}, {part}: {what} have the shape {got}; the experiment says {tuple(theirs.shape[1:])}"
                    )
                if ours.dtype != theirs.dtype:
                    raise UserError(
                        f"site {client.id!r}, {part}: {what} are {ours.dtype}; the experiment says {theirs.dtype}"
                    )

    def mixing(self) -> Mixing | None:
        """The options of hybrid mode."""
        if self.mode != "hybrid":
            return None
        options = {k: v for k, v in self.hybrid.items() if k != "cloud"}
        if "cloud" not in self.hybrid or {"cloud_fraction", "cloud_clients"} & set(options):
            raise UserError("hybrid: expected cloud = 'rows.npz', a file at the server; sites do not send rows")
        try:
            return Mixing(**options)
        except TypeError:
            raise UserError(f"hybrid: expected options among {', '.join(Mixing.__dataclass_fields__)}") from None


def digest(text: str) -> str:
    """SHA-256 of an experiment's text: what a site approves.

    Example:
        >>> digest("rounds = 3")[:8]
        '7e5eef83'
    """
    return hashlib.sha256(text.encode()).hexdigest()
