"""One run in several processes, on several GPUs or machines: each takes a share of every cohort, all have the same state.

Every process (rank) plays the same run. A cohort is dealt out, each rank's clients work on the rank's own engine, and all replies go to
all ranks, in the order of the cohort; reduce and server stages are then the same everywhere. Rank 0 alone writes and shows.
What travels are the bytes of safetensors files; nothing is pickled.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fedloom import devices
from fedloom.clients.messages import Participant, Post, Reply, Work
from fedloom.clients.states import ClientState, ServerState
from fedloom.engines.base import Engine
from fedloom.errors import RunError, UserError
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Program

PATIENCE = timedelta(seconds=30)
"""How long a rank whose run has ended well waits for the others before it leaves."""

_ended = False


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a run.

    Args:
        number: which of them this is, from 0.
        count: how many there are.
        device: where bytes lie while they travel.
    """

    number: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.number == 0

    def ended(self, well: bool) -> None:
        """Says whether the last run has ended well: at the end of the program ranks then wait for each other."""
        global _ended
        _ended = well

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank has, at every rank."""
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self.device))
        lengths = [int(s) for s in sizes]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.zeros(max(lengths), dtype=torch.uint8, device=self.device) for _ in range(self.count)]
        dist.all_gather(parts, mine.to(self.device))
        return [p[:n].cpu().numpy().tobytes() for p, n in zip(parts, lengths, strict=True)]

    def agree(self, value: Any, device: torch.device | None = None) -> Any:
        """Return rank 0's value at every rank.

        Args:
            value: numbers, texts, tensors, lists and dictionaries.
            device: the device of the run, for its tensors; None for the host.
        """
        from fedloom.store.codec import pack, unpack

        device = torch.device("cpu") if device is None else device
        data = pack({"value": value}, device) if self.first else b""
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, 0)
        sent = torch.zeros(int(size), dtype=torch.uint8)
        if self.first:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sent = sent.to(self.device)
        dist.broadcast(sent, 0)
        return unpack(sent.cpu().numpy().tobytes(), device)["value"]

    def check_same(self, text: str) -> None:
        """All ranks describe the run alike.

        Raises:
            UserError: they do not.
        """
        found = self.gather(hashlib.sha256(text.encode()).digest())
        if any(other != found[0] for other in found):
            raise UserError(
                "the processes of this run differ in their data, model or options; give the model by name or as a function, or call "
                "torch.manual_seed before you make it"
            )

    def share(self, found: tuple[Any, list[Any]] | None, device: torch.device) -> tuple[Any, list[Any]] | None:
        """Rank 0's checkpoint (snapshot and history) at every rank; None where it has none."""
        from fedloom.store.checkpoint import Snapshot
        from fedloom.store.client_store import ClientStore
        from fedloom.store.codec import state_tree

        sent = None
        if self.first and found is not None:
            snapshot, history = found
            state = snapshot.server
            sent = {
                "server": [state.leaves, state.memory, state.round],
                "clients": {name: state_tree(kept) for name, kept in snapshot.clients.items()},
                "facts": snapshot.facts,
                "best": None if snapshot.best is None else snapshot.best(),
                "history": history,
            }
        got = self.agree(sent, device)
        if self.first or got is None:
            return found
        clients = ClientStore(device=device)
        clients.take({name: ClientState(**kept) for name, kept in got["clients"].items()})
        clients.mark()
        return Snapshot(ServerState(*got["server"]), clients, got["facts"], lambda: got["best"]), got["history"]


def joined() -> Ranks | None:
    """The processes that this one belongs to; None unless ``torchrun`` started several, or the program made a group itself."""
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        asked = [os.environ.get(k, "") for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
        if not all(asked) or asked[1] == "1":
            return None
        cuda = devices.select_gpu(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo")
        atexit.register(_leave)
    if dist.get_world_size() == 1:
        return None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def _leave() -> None:
    if not dist.is_initialized():
        return
    # One that leaves while another still writes may be aborted by gloo; after an error nobody waits, the others must hear of it.
    if _ended and dist.get_backend() == "gloo":
        with suppress(RuntimeError):
            dist.monitored_barrier(timeout=PATIENCE)
    dist.destroy_process_group()


class DistributedEngine(Engine):
    """Deals a cohort out to ranks.

    Args:
        inner: the engine that each rank's share runs on.
        ranks: the processes of the run.
    """

    def __init__(self, inner: Engine, ranks: Ranks) -> None:
        self.inner, self.ranks, self.name = inner, ranks, inner.name

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given, the same at every rank."""
        from fedloom.store.codec import pack, unpack

        share = dealt(participants, self.ranks.count)[self.ranks.number]
        device = next(iter(post.leaves.values())).device
        fault, replies = "", list[Reply]()
        try:
            if share:
                people = [participants[j] for j in share]
                replies = self.inner.run_cohort(bound, work, program, post, people)
        except Exception as error:  # the others wait for this rank: they must hear of it
            fault = f"{type(error).__name__}: {error}"
            failure: Exception | None = error
        else:
            failure = None
        sent = {"fault": fault, "places": share, "replies": [_packed(r) for r in replies]}
        found: dict[int, Reply] = {}
        for number, data in enumerate(self.ranks.gather(pack(sent, device))):
            if number == self.ranks.number and failure is not None:
                raise failure
            got = unpack(data, device)
            if got["fault"]:
                raise RunError(f"round {post.round}, rank {number}: {got['fault']}")
            mine = replies if number == self.ranks.number else [_unpacked(r) for r in got["replies"]]
            found |= dict(zip(got["places"], mine, strict=True))
        return [found[j] for j in range(len(participants))]

    def prefetch(self, bound: Bound, work: Work, round: int, participants: Callable[[], Sequence[Participant]]) -> None:
        """Passes this rank's share of the clients on."""

        def share() -> list[Participant]:
            people = participants()
            return [people[j] for j in dealt(people, self.ranks.count)[self.ranks.number]]

        self.inner.prefetch(bound, work, round, share)

    def facts(self) -> dict[str, Any]:
        """What was resolved."""
        inner = getattr(self.inner, "facts", None)
        return {**(inner() if inner is not None else {"engine": self.name, "events": []}), "ranks": self.ranks.count}


def dealt(people: Sequence[Participant], ranks: int) -> list[list[int]]:
    """Places of the clients that each rank takes: longest first, each to the rank with least to do."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for j in sorted(range(len(people)), key=lambda j: (-people[j].share * len(people[j].site.train), j)):
        i = min(range(ranks), key=lambda i: (load[i], i))
        shares[i].append(j)
        load[i] += max(1.0, people[j].share * len(people[j].site.train))
    return [sorted(share) for share in shares]


def _packed(reply: Reply) -> dict[str, Any]:
    from fedloom.store.codec import state_tree

    return {
        "id": reply.id,
        "message": reply.message,
        "state": state_tree(reply.state),
        "steps": reply.steps,
        "loss": reply.loss,
        "judged": {name: list(parts) for name, parts in reply.judged.items()},
        "fault": reply.fault,
    }


def _unpacked(parts: dict[str, Any]) -> Reply:
    judged = {name: (sums, rows) for name, (sums, rows) in parts["judged"].items()}
    return Reply(**{**parts, "state": ClientState(**parts["state"]), "judged": judged})
