"""Clients' data where they are computed with, made when they are first asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch

from fedloom.data import ClientData
from fedloom.data.rows import Rows
from fedloom.torch_internals import pytree
from fedloom.work import Site

EAGER = 1000
"""Up to so many clients are made before round one."""
SHARE = 4
"""A GPU holds the rows of clients in at most one part in so many of its memory; those not used for longest make room."""


class Sites(Mapping[str, Site]):
    """Sites by id, in federation order. Large populations cost what takes part, not what there is.

    Args:
        clients: the clients' rows.
        make: makes a site.
        device: where sites lie.
    """

    def __init__(
        self, clients: Mapping[str, ClientData], make: Callable[[ClientData], Site], device: torch.device
    ) -> None:
        self._clients, self._make = clients, make
        self._made: OrderedDict[str, Site] = OrderedDict()
        self._limit: int | None = None
        self._held = 0
        if device.type == "cuda":
            self._limit = torch.cuda.get_device_properties(device).total_memory // SHARE
        if len(clients) <= EAGER:
            for name in clients:
                self._made[name] = make(clients[name])

    def __getitem__(self, name: str) -> Site:
        site = self._made.get(name)
        if site is None:
            site = self._made[name] = self._make(self._clients[name])
            self._held += _size(site)
            while self._limit is not None and self._held > self._limit and len(self._made) > 1:
                self._held -= _size(self._made.popitem(last=False)[1])
        elif self._limit is not None and len(self._clients) > EAGER:
            self._made.move_to_end(name)
        return site

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def rows(self) -> dict[str, int]:
        """Training rows of every client, without making its site."""
        return {name: len(client.train) for name, client in self._clients.items()}


class Judges(Mapping[str, tuple[Site, str]]):
    """On whose rows models are tested, and whose state each uses: everyone's own, or one participant's.

    Args:
        sites: the sites.
        owner: whose state all of them use; None for each its own.
    """

    def __init__(self, sites: Sites, owner: str | None = None) -> None:
        self.sites, self._owner = sites, owner

    def __getitem__(self, name: str) -> tuple[Site, str]:
        return self.sites[name], self._owner or name

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)


def _size(site: Site) -> int:
    parts: list[Rows] = [p for p in (site.train, site.test, site.val) if p is not None]
    return sum(t.numel() * t.element_size() for p in parts for t in [*pytree.tree_leaves(p.x), p.y])
