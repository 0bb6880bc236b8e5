"""The clients' rows on the device of the run, created lazily."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch

from fedloom import devices
from fedloom.clients.messages import Site
from fedloom.data import ClientData
from fedloom.data.rows import Rows
from fedloom.tensors import flatten

EAGER = 1000
"""Largest number of clients whose sites are created before round one."""
GPU_FRACTION = 0.25
"""Largest fraction of a GPU's memory for the clients' rows. Beyond it, the least recently used sites are evicted."""


class Sites(Mapping[str, Site]):
    """Sites by client id, in federation order. Above :data:`EAGER` clients a site is created on first access.

    Args:
        clients: the clients' rows.
        make: creates a site.
        device: the device of the sites.
    """

    def __init__(
        self, clients: Mapping[str, ClientData], make: Callable[[ClientData], Site], device: torch.device
    ) -> None:
        self._clients, self._make = clients, make
        self._cache: OrderedDict[str, Site] = OrderedDict()
        self._budget = devices.memory_budget(device, GPU_FRACTION)
        self._bytes = 0
        if len(clients) <= EAGER:
            for name in clients:
                self._cache[name] = make(clients[name])

    def __getitem__(self, name: str) -> Site:
        site = self._cache.get(name)
        if site is None:
            site = self._cache[name] = self._make(self._clients[name])
            self._bytes += _size_in_bytes(site)
            while self._budget is not None and self._bytes > self._budget and len(self._cache) > 1:
                self._bytes -= _size_in_bytes(self._cache.popitem(last=False)[1])
        elif self._budget is not None and len(self._clients) > EAGER:
            self._cache.move_to_end(name)
        return site

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def rows(self) -> dict[str, int]:
        """Return the number of training rows of every client. Creates no site."""
        return {name: len(client.train) for name, client in self._clients.items()}


class Judges(Mapping[str, tuple[Site, str]]):
    """For each client its site, for the test rows, and the id of the client whose state is tested.

    Args:
        sites: the sites.
        owner: the client whose state is tested on all sites; None for each client's own state.
    """

    def __init__(self, sites: Sites, owner: str | None = None) -> None:
        self.sites, self._owner = sites, owner

    def __getitem__(self, name: str) -> tuple[Site, str]:
        return self.sites[name], self._owner or name

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)


def _size_in_bytes(site: Site) -> int:
    parts: list[Rows] = [p for p in (site.train, site.test, site.val) if p is not None]
    return sum(t.numel() * t.element_size() for p in parts for t in flatten((p.x, p.y)))
