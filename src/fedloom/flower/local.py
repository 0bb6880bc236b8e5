"""Sites in this process: the Flower engine without a network, for tests and for ``fit(engine="flower")``.

Everything is packed, unpacked and stored as at real sites.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

from fedloom.clients.messages import Participant, Post, Reply, Site, Work
from fedloom.engines.base import Engine
from fedloom.flower.engine import FlowerEngine, accepted_round
from fedloom.flower.site.runner import Bench, Workshop, client_app
from fedloom.flower.site.site_store import SiteStore
from fedloom.flower.transport import Hub, SiteTransport
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Program


class LocalGrid(Grid):
    """A grid whose nodes are client apps in this process.

    Args:
        apps: the app of each node.
        configs: the node configuration of each node.
        watch: called with every message and its reply.
    """

    def __init__(
        self,
        apps: dict[int, ClientApp],
        configs: dict[int, dict[str, str]] | None = None,
        watch: Callable[[Message, Message], None] | None = None,
    ) -> None:
        self.apps, self.configs, self.watch = apps, configs or {}, watch
        self._replies: dict[str, Message] = {}
        self._run = FlowerRun.create_empty(1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: FlowerRun) -> None:
        """Takes a run; there is only one here."""
        self._run = run

    @property
    def run(self) -> FlowerRun:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes."""
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Has each message answered at once."""
        keys: list[str] = []
        for message in messages:
            key = f"message-{len(self._replies)}-{len(keys)}"
            message.metadata.__dict__["_message_id"] = key
            node = message.metadata.dst_node_id
            context = Context(1, node, dict(self.configs.get(node, {})), RecordDict(), {})
            reply = self.apps[node](message, context)
            if self.watch is not None:
                self.watch(message, reply)
            self._replies[key] = reply
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies."""
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Both at once."""
        return self.pull_messages(self.push_messages(messages))


class LocalEngine(Engine):
    """``fit(engine="flower")``: every client becomes a site in this process, with a folder of its own.

    Args:
        folder: where sites keep their state; a temporary one without.
        watch: called with every message and its reply.
    """

    name = "flower"

    def __init__(
        self, folder: str | Path | None = None, watch: Callable[[Message, Message], None] | None = None
    ) -> None:
        self.folder = Path(folder or tempfile.mkdtemp(prefix="fedloom-sites-"))
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.grid = LocalGrid({}, watch=watch)
        self.post = SiteTransport(self.grid, poll=0.0)
        self.hub = Hub(self.post.exchange, "simulation")
        self.sites: dict[str, Workshop] = {}
        self._bounds: dict[int, Bound] = {}
        self._engine: FlowerEngine | None = None

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """As :meth:`FlowerEngine.run_cohort`; what sites keep is read back from their folders, for the result."""
        if not any(b is bound for b in self._bounds.values()):
            self._bounds[len(self._bounds)] = bound
        for person in participants:
            self._open(person.site, work)
        self._engine = self._engine or FlowerEngine(self.hub, "simulation", self._bounds, work)
        replies = self._engine.run_cohort(bound, work, program, post, participants)
        for reply in replies:
            round = accepted_round(reply.state)
            if round is not None and round in self.sites[reply.id].store.rounds("simulation", "simulation"):
                kept = self.sites[reply.id].store.load("simulation", "simulation", round)
                reply.state.leaves, reply.state.memory = kept.leaves, {**kept.memory, **reply.state.memory}
        return replies

    def _open(self, site: Site, work: Work) -> None:
        if site.id in self.sites:
            return
        store = SiteStore(self.folder / str(len(self.sites)), site.train.y.device)
        shop = Workshop(site.id, {"simulation": Bench(self._bounds, work, site)}, store, share_rows=True)
        self.sites[site.id] = shop
        node = len(self.sites)
        self.grid.apps[node] = client_app(lambda letter, context: shop, site.id)
        self.post.nodes[site.id] = node
