"""What a term sees of the model: its leaves, its output and its features on the batch at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedloom import ops, rng
from fedloom.ops import forward_context
from fedloom.spec.leaves import LeafSpec
from fedloom.spec.method import Method
from fedloom.spec.seen import Seen, TapName
from fedloom.spec.structure import Structure
from fedloom.tasks.base import Task, class_logits, classifier_loss
from fedloom.tasks.batch import Batch
from fedloom.tensors import Inputs, Leaves, Summary


class Model(Protocol):
    """The user's module as a view needs it: a function of leaves.

    :class:`fedloom.network.functional.Network` is one.
    """

    @property
    def noisy(self) -> bool:
        """Whether it draws noise in training."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The short type in which it computes, if any."""

    def __call__(
        self,
        leaves: Leaves,
        x: Inputs,
        frame: forward_context.Frame,
        *,
        train: bool,
        still: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Return the output for ``x`` at ``leaves``."""

    def head(self, leaves: Leaves, z: Tensor) -> Tensor:
        """Apply the head alone to features."""

    def prepared(self, x: Inputs) -> Inputs:
        """Return inputs as the module sees them."""


class BoundModel(Protocol):
    """A method, a model and a task as a view needs them.

    :class:`fedloom.network.bound_method.Bound` is one.
    """

    @property
    def method(self) -> Method:
        """The method."""

    @property
    def network(self) -> Model:
        """The user's module."""

    @property
    def task(self) -> Task:
        """The task."""

    @property
    def specs(self) -> Mapping[str, LeafSpec]:
        """Every leaf by its full name."""

    @property
    def structure(self) -> Structure:
        """The model's leaves and layers."""

    def of_copy(self, leaves: Leaves, copy: str) -> Leaves:
        """Return the leaves of a copy by their names within it."""


class View:
    """One client's model on one batch. The forward pass runs when its result is first asked for.

    Attributes:
        leaves: the leaves of this copy, by their names within it.
        trained: names of the leaves that the phase trains.
        batch: the batch.
    """

    __slots__ = (
        "_bound",
        "_features",
        "_fixed",
        "_full",
        "_out",
        "_seen",
        "_step",
        "_still",
        "_summaries",
        "_taps",
        "_train",
        "batch",
        "copy",
        "leaves",
        "trained",
    )

    def __init__(
        self,
        bound: BoundModel,
        full: Leaves,
        batch: Batch,
        seen: Seen,
        *,
        copy: str = "main",
        train: bool = False,
        taps: Mapping[str, tuple[TapName, ...]] | None = None,
        still: frozenset[str] = frozenset(),
        trained: tuple[str, ...] = (),
        step: Tensor | int = 0,
        leaves: Leaves | None = None,
        fixed: bool = False,
    ) -> None:
        self.leaves = bound.of_copy(full, copy) if leaves is None else leaves
        self.batch, self.trained, self.copy = batch, trained, copy
        self._bound, self._full, self._seen = bound, full, seen
        self._train, self._still, self._taps, self._step, self._fixed = train, still, taps or {}, step, fixed
        self._out: Tensor | None = None
        self._features: dict[str, Tensor] = {}
        self._summaries: dict[str, Summary] = {}

    @property
    def output(self) -> Tensor:
        """The model's output."""
        if self._out is None:
            self._run()
        assert self._out is not None
        return self._out

    @property
    def logits(self) -> Tensor:
        """Logits over classes; a binary task's single logit z is (0, z)."""
        return class_logits(self.output) if self._bound.task.name == "binary" else self.output

    @property
    def z(self) -> Tensor:
        """The head's input (ask for it with ``taps=("z",)``)."""
        return self.feature("z")

    def feature(self, name: str) -> Tensor:
        """Output of a tapped module."""
        if self._out is None:
            self._run()
        if name in self._summaries and name not in self._features:
            raise LookupError(f"feature {name!r} is only summed up: a term that reads it names it among its own taps")
        return self._features[name]

    def summary(self, name: str, axis: int = 1) -> Summary:
        """Return the summary of a tapped feature, in the run's floating type.

        Args:
            name: the tap, named in ``taps`` or requested by :func:`fedloom.spec.seen.summary_of`.
            axis: axis of the channels.
        """
        if self._out is None:
            self._run()
        dtype = self.structure.dtype  # a model may compute in another one
        if name not in self._summaries:
            return ops.channel_summary(self.feature(name).to(dtype).movedim(axis, 1))
        means, entropies = self._summaries[name]
        return means.to(dtype), entropies.to(dtype)

    def tapped(self, owner: str) -> dict[str, Tensor]:
        """Return the features that an owner named in ``taps``, in that order."""
        return {name: self.feature(name) for name in self._taps.get(owner, ()) if isinstance(name, str)}

    def loss(self, output: Tensor | None = None) -> Tensor:
        """The task's loss on the batch, of the model's output or of another one of its shape."""
        return self._bound.task.value(self.output if output is None else output, self.batch)

    def classifier_loss(self, u: Tensor, weight: Tensor, bias: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """Return :func:`fedloom.tasks.base.classifier_loss` on the batch."""
        return classifier_loss(self._bound.task, self.batch, u, weight, bias, *values)

    @property
    def structure(self) -> Structure:
        """What is known of the model: its leaves, its layers, their order."""
        return self._bound.structure

    @property
    def inputs(self) -> Inputs:
        """The batch's inputs as the model sees them: in the run's floating type, bytes scaled."""
        return self._bound.network.prepared(self.batch.x)

    def head(self, z: Tensor) -> Tensor:
        """The head alone, applied to features."""
        with self._graded():
            return self._bound.network.head(self.leaves, z)

    def of(self, copy: str) -> Leaves:
        """The leaves of another copy of the model."""
        return self._bound.of_copy(self._full, copy)

    def at(
        self,
        leaves: Leaves | None = None,
        *,
        batch: Batch | None = None,
        train: bool | None = None,
        fixed: bool | None = None,
    ) -> View:
        """The same model at other leaves (those not named stay), on another batch, or in another mode; ``fixed`` for no gradient."""
        return View(
            self._bound,
            self._full,
            self.batch if batch is None else batch,
            self._seen,
            copy=self.copy,
            train=self._train if train is None else train,
            taps=self._taps,
            still=self._still,
            trained=self.trained,
            step=self._step,
            leaves=self.leaves if leaves is None else {**self.leaves, **leaves},
            fixed=self._fixed if fixed is None else fixed,
        )

    def gradient(self, fn: Callable[[View], Tensor], names: tuple[str, ...]) -> Leaves:
        """Gradient of ``fn(view)`` with respect to some leaves of this copy; it can be differentiated again.

        Running statistics that ``fn`` moves are its own and are dropped.
        """
        buffers = [n for n in self.leaves if n in self._bound.specs and self._bound.specs[n].buffer]

        def inner(moved: Leaves) -> Tensor:
            return fn(self.at({**moved, **{n: self.leaves[n].clone() for n in buffers}}, fixed=False))

        with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels have one derivative only
            found: Leaves = torch.func.grad(inner)({n: self.leaves[n] for n in names})
        return found

    def _graded(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(torch.is_grad_enabled() and not self._fixed)

    def _run(self) -> None:
        bound, seen = self._bound, self._seen
        rewrite = bound.method.partition.rewrite
        leaves, taps = self.leaves, [t for taps in self._taps.values() for t in taps]
        features = frozenset(t for t in taps if isinstance(t, str))
        summaries = frozenset(t.name for t in taps if not isinstance(t, str))
        frame = forward_context.Frame(
            mask=self.batch.mask,
            key=rng.fold(seen.noise, self._step) if self._train and bound.network.noisy else None,
            wanted=features | summaries,
            summed=summaries - features,
            rewrite=None if rewrite is None else lambda z: rewrite(z, leaves, seen),
        )
        with self._graded():
            self._out = bound.network(leaves, self.batch.x, frame, train=self._train, still=self._still)
        self._features, self._summaries = frame.features, frame.summaries
        if bound.network.autocast is not None:  # client code multiplies them by leaves: of their type, as the output is
            self._features = {n: f.float() if f.is_floating_point() else f for n, f in frame.features.items()}
