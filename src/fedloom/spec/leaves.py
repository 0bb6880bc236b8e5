"""Facts about each leaf of a bound method: how it travels and who trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedloom.tensors import Leaves

Kind = Literal["shared", "personal", "mirrored", "frozen"]
"""How a leaf travels.

``shared``: received, trained, sent. ``personal``: neither received nor sent, ever. ``mirrored``: sent, but a
client starts from its own; what is received is only an anchor. ``frozen``: neither trained nor sent.
"""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf of a bound method.

    Args:
        name: its full name; a second copy's leaves are ``copy/leaf``, a plug-in's ``owner:leaf``.
        local: its name within its copy.
        copy: the copy of the model that it belongs to.
        kind: how it travels.
        trainable: whether a gradient step may move it.
        buffer: whether it is a buffer.
        floating: whether it holds floating-point numbers.
        owner: the plug-in that brought it, or empty.
        gated: whether the server switches its sharing from round to round.
        phases: the phases of a round that train it.
        key: the static key of the clients that train it; None for all.
    """

    name: str
    local: str
    copy: str
    kind: Kind
    trainable: bool
    buffer: bool
    floating: bool
    owner: str = ""
    gated: bool = False
    phases: tuple[str, ...] = ()
    key: int | None = None

    @property
    def sent(self) -> bool:
        """Whether a client uploads it."""
        return self.kind in ("shared", "mirrored")

    @property
    def kept(self) -> bool:
        """Whether a client keeps a value of its own from round to round."""
        return self.kind in ("personal", "mirrored") or self.gated


def choose(
    specs: Mapping[str, LeafSpec],
    kinds: tuple[Kind, ...],
    copy: str,
    trainable: bool | None,
    extra: bool | None,
) -> tuple[str, ...]:
    """Names of the leaves of some kinds; see :meth:`Seen.names`."""
    return tuple(
        s.name
        for s in specs.values()
        if s.copy == copy
        and (not kinds or s.kind in kinds)
        and (trainable is None or s.trainable is trainable)
        and (extra is None or bool(s.owner) is extra)
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known when memory is first laid out.

    Args:
        structure: the model's leaves and layers.
        specs: the facts of every leaf.
        start: every leaf before round one.
    """

    structure: Any
    specs: Mapping[str, LeafSpec]
    start: Leaves

    def travelling(self, *, extra: bool | None = False) -> Leaves:
        """Trainable leaves of the user's model that are sent, before round one."""
        names = choose(self.specs, ("shared", "mirrored"), "main", True, extra)
        return {n: self.start[n] for n in names}
