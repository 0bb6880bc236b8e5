"""FedLAG: layers in which the updates of users conflict become personal (Algorithms 1 and 2 of the paper).

The code uses the symbols of the paper:

    u, v      users: the clients of a round, U of them
    l         a layer; its leaves are ``layers[l]``
    theta_u   leaves of user u, one after another as a vector; ``w`` is the server's
    h         h_u = theta_u^(r,E) - theta_u^(r): what training changed, from the user's own start (eqs. 1, 2)
    G         G_uv = <h_lu, h_lv> of one layer
    GC        conflict score of each layer (Definition 4.1)
    L_p       personal layers; L_g, all others, are aggregated
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom import devices, tensors
from fedloom.errors import Conflict, UserError
from fedloom.ops import similarity
from fedloom.ops.gram import cosines, gram
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Rule, ServerStage, Stage
from fedloom.spec.reducers import mean, stack
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Cohort
from fedloom.spec.structure import LeafInfo, Structure
from fedloom.spec.uploads import unchanged
from fedloom.tensors import Leaves, Memory, Message

OWNER = "lag"
THETA = "value:"
"""Prefix of a user's memory entry: the stored leaves at the end of its last round, as one vector."""
PAPER = "Nguyen et al., Towards Layer-Wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting Gradients"

Select = Literal["conflict", "first", "middle", "last"] | Sequence[str]
Layers = dict[str, tuple[str, ...]]


@plugin("k >= 0", "-1 <= xi <= 2", "warmup >= 0", paper=PAPER)
def lag(
    k: int = 5,
    xi: float = 0.0,
    weights: Literal["uniform", "samples"] = "uniform",
    schedule: Literal["per_round", "warmup_once", "warmup_then_per_round"] = "per_round",
    granularity: Literal["layer", "tensor"] = "layer",
    warmup: int = 30,
    select: Select = "conflict",
    norm: Literal["shared", "personal"] = "shared",
    score: Literal["conflict", "variance"] = "conflict",
    require_conflict: bool = True,
) -> Callable[[Method], Method]:
    """Makes personal the k layers in which clients disagree most: ``GC_xi(l) = #{u < v: cos(h_lu, h_lv) < xi}``.

    h is what a client's training changed, from its own start. In the next round clients keep their own values of those layers, which
    are not sent down. Only layers that the method shares are ranked; normalisation never is. ``k=0`` changes nothing and records the
    scores. The scores of each round are in its record, under ``lag``.

    Args:
        k: number of personal layers, at most all that can be ranked.
        xi: pairs count below this cosine; above 1 all pairs count. Short vectors are often far apart by chance: the further below 0, the more
            biases are chosen with ``granularity="tensor"``.
        weights: of the mean, where the method weighs by rows: ``"uniform"`` (eq. 4) or ``"samples"``. A method with weights of its own
            keeps them.
        schedule: ``"per_round"`` (Algorithm 1), ``"warmup_once"`` (scores summed over the first warmup + 1 rounds, then fixed) or
            ``"warmup_then_per_round"``.
        granularity: ``"layer"`` (weight and bias together) or ``"tensor"``.
        warmup: rounds of the warm-up, at most half the run.
        select: ``"conflict"``; or, for ablations, the ``"first"``, ``"middle"`` or ``"last"`` k layers, or a list of layers.
        norm: whether batch normalisation is ``"shared"`` or ``"personal"``.
        score: ``"conflict"`` or ``"variance"``, the variance of h over clients, which is what Lemma 5.2 is about.
        require_conflict: a layer with score 0 stays shared.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedper(), fl.lag(k=2, xi=-0.1)))
        fedper() + lag(k=2, xi=-0.1)
    """
    chosen = select if isinstance(select, str) else tuple(select)
    options = _Lag(k, xi, weights, schedule, granularity, warmup, chosen, score, require_conflict)

    def apply(method: Method) -> Method:
        if "delta" not in method.reducers():
            raise Conflict(f"'lag' cannot be stacked on {method.text!r}, which uploads no trained layer")
        if k:
            method = _reweighted(method, mean("uniform" if weights == "uniform" else "n"))
        if norm == "personal":
            rule = Rule(owner=OWNER, pattern="norm", kind="personal", only="shared", optional=True)
            method = method.adding(rules=(rule,))
        method = method.claiming("what clients start from", OWNER)
        if k:
            method = method.replacing_gate(OWNER, rankable, gates)
        return method.adding(
            stages=(Stage(owner=OWNER, fn=unchanged, also={"lag": ("delta", stack())}),),
            server=(ServerStage(owner=OWNER, fn=options.stage, memory=options.memory, report=options.report),),
        )

    return apply


@dataclass(frozen=True, slots=True)
class _Lag:
    """The options of :func:`lag`, and the server's stage: Algorithm 1, lines 12 to 17."""

    k: int
    xi: float
    weights: str
    schedule: str
    granularity: str
    warmup: int
    select: str | tuple[str, ...]
    score: str
    require_conflict: bool

    def stage(self, reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        """Score the layers, choose the next round's L_p, and average this round's L_p.

        The mean of L_g (line 13) is that of the method; line 17 is the gate, which clients receive.
        """
        gates, h = _entries(memory, "gate:"), reduced["lag"]
        layers = self.layers(cohort.structure, gates)
        if self.k:
            candidates = self.choose(dict.fromkeys(layers, 0.0)) if self.select != "conflict" else layers
            stored = [leaf for layer in candidates for leaf in layers[layer]]
            theta, shift = self.average(h, memory, cohort, stored, tensors.zero_names(gates))
            memory = memory | theta
            reduced = {**reduced, "personal": shift} if shift else reduced
        GC = self.divergence(layers, h)
        total = torch.stack(list(_entries(memory, "total:").values())).cpu() + GC
        memory = memory | _named("score:", layers, GC) | _named("total:", layers, total)
        L_p = self.next_layers(layers, GC, total, cohort) if self.k else None
        if L_p is not None:
            memory |= _gates(gates, _leaves(layers, L_p), next(iter(gates.values())).dtype)
        return reduced, memory

    # Algorithm 2.

    def divergence(self, layers: Layers, h: Leaves) -> Tensor:
        """Lines 2 to 7: return the score of each layer, on the host.

        Args:
            layers: the leaves of each layer.
            h: the updates of each leaf, shape ``(U, *shape)``.
        """
        G = torch.stack([gram([h[leaf] for leaf in leaves]) for leaves in layers.values()])
        scores = variance(G) if self.score == "variance" else conflicts(G, self.xi)
        GC = scores.tolist()  # waits for the device
        return torch.tensor([_ten_digits(v) for v in GC] if self.score == "variance" else GC, dtype=torch.float64)

    def choose(self, scores: Mapping[str, float]) -> Collection[str]:
        """Line 8: return L_p, the k layers with the highest scores, of equal ones the deeper; or a fixed choice."""
        names = list(scores)
        k = min(self.k, len(names))
        if isinstance(self.select, tuple):
            unknown = [n for n in self.select if n not in scores]
            if unknown:
                raise UserError(f"lag: select names {unknown[0]!r}; layers that can be personal are {', '.join(names)}")
            return self.select
        if self.select != "conflict":
            first = {"first": 0, "middle": (len(names) - k) // 2, "last": len(names) - k}[self.select]
            return names[first : first + k]
        ranked = sorted(range(len(names)), key=lambda i: (-scores[names[i]], -i))
        if self.require_conflict:
            ranked = [i for i in ranked if scores[names[i]] > 0]
        return [names[i] for i in ranked[:k]]

    def next_layers(self, layers: Layers, GC: Tensor, total: Tensor, cohort: Cohort) -> Collection[str] | None:
        """Return L_p of the next round by the schedule; None if it stays as it is."""
        warmup = self.warmup if cohort.rounds is None else min(self.warmup, cohort.rounds // 2)
        if self.schedule == "warmup_once":
            return self.choose(dict(zip(layers, total.tolist(), strict=True))) if cohort.round == warmup + 1 else None
        if self.schedule == "warmup_then_per_round" and cohort.round < warmup:
            return None
        return self.choose(dict(zip(layers, GC.tolist(), strict=True)))

    # Algorithm 1, lines 13 and 17.

    def average(
        self, h: Leaves, memory: Leaves, cohort: Cohort, stored: Sequence[str], L_p: Collection[str]
    ) -> tuple[Leaves, Leaves]:
        """Return where each user ended, and the mean of L_p: eq. 4 for new users and for layers that return.

        Users send h. A user starts a layer of L_p where its last round ended, which the server stores (as the
        paper's server does), and any other layer at w.

        Args:
            h: the updates of each leaf, shape ``(U, *shape)``.
            memory: holds where the users' last rounds ended.
            cohort: the users.
            stored: leaves that are personal or may become so.
            L_p: leaves that are personal in this round.

        Returns:
            ``theta_u^(r,E)`` as memory entries, and ``mean_u theta_u^(r,E) - w`` of each leaf of L_p.
        """
        if not stored:
            return {}, {}
        sizes = [cohort.leaves[leaf].numel() for leaf in stored]
        ends = list(itertools.accumulate(sizes))
        columns = {leaf: slice(end - size, end) for leaf, size, end in zip(stored, sizes, ends, strict=True)}
        w = torch.cat([cohort.leaves[leaf].reshape(-1) for leaf in stored])
        n = cohort.rows if self.weights == "samples" else [1] * len(cohort)
        n_u = devices.to_device_async(torch.tensor(n, dtype=w.dtype), w.device)[:, None]
        theta, total = dict[str, Tensor](), torch.zeros_like(w)
        count = max(1, similarity.CHUNK // len(w))  # users whose vectors are in memory together
        for first in range(0, len(cohort), count):
            part = slice(first, first + count)
            users = cohort.ids[part]
            h_u = torch.cat([h[leaf][part].reshape(len(users), -1) for leaf in stored], 1)
            theta_u = w + h_u
            if L_p:
                start_u = torch.stack([memory.get(f"{THETA}{u}", w) for u in users])
                for leaf in L_p:
                    at = columns[leaf]
                    theta_u[:, at] = start_u[:, at] + h_u[:, at]
                # Add up differences, not models: a sum of large values in float32 loses small differences.
                total += ((theta_u - w) * n_u[part]).sum(0)
            theta |= dict(zip([f"{THETA}{u}" for u in users], tensors.copies(theta_u.unbind()), strict=True))
        means = zip(stored, (total / sum(n)).split(sizes), strict=True)
        return theta, {leaf: mean.view_as(cohort.leaves[leaf]) for leaf, mean in means if leaf in L_p}

    # Layers and memory.

    def layers(self, structure: Structure, gated: Collection[str]) -> Layers:
        """Return the leaves of each layer l, in forward order; with ``granularity="tensor"`` a leaf is a layer."""
        modules = {m: tuple(n for n in names if n in gated) for m, names in structure.layers().items()}
        if self.granularity == "tensor":
            return {name: (name,) for names in modules.values() for name in names}
        return {module: names for module, names in modules.items() if names}

    def memory(self, facts: Facts) -> Leaves:
        """Return the memory before round one, on the host.

        ``gate:leaf`` says whether a leaf is shared, ``score:layer`` is the last score and ``total:layer`` the
        sum of all. Where users ended (``value:user``) comes with their first round.
        """
        gated = [i.name for i in facts.structure.leaves if rankable(i) and facts.specs[i.name].kind == "shared"]
        layers = self.layers(facts.structure, gated)
        if not layers:
            raise Conflict("'lag' has nothing to rank here: the method shares no layer of the model")
        fixed = self.select != "conflict" and self.schedule == "per_round"
        L_p = self.choose(dict.fromkeys(layers, 0.0)) if fixed else ()
        zeros = torch.zeros(len(layers), dtype=torch.float64)
        return {
            **_gates(gated, _leaves(layers, L_p), facts.structure.dtype),
            **_named("score:", layers, zeros),
            **_named("total:", layers, zeros),
        }

    def report(self, memory: Leaves) -> dict[str, Any]:
        """Return the score of each layer in this round, and the leaves that are personal in the next one."""
        scores = {layer: value.item() for layer, value in _entries(memory, "score:").items()}
        return {"score": scores, "personal": tensors.zero_names(_entries(memory, "gate:"))}


# Definition 4.1, and its alternative.


def conflicts(G: Tensor, xi: float = 0.0) -> Tensor:
    """Return ``GC_xi = #{u < v: cos(h_u, h_v) < xi}`` of each layer; a zero vector has cosine 0.

    Cosines are rounded to 10 digits, so that every engine decides alike.

    Args:
        G: inner products ``<h_u, h_v>``, shape ``(..., U, U)``.
        xi: threshold.

    Example:
        >>> h = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-1.0, 0.0]])
        >>> conflicts(gram([h])), conflicts(gram([h]), xi=-0.8)
        (tensor(2), tensor(1))

    Reference: FedLAG, Definition 4.1.
    """
    return (cosines(G) < xi).triu(diagonal=1).sum((-2, -1))


def variance(G: Tensor) -> Tensor:
    """Return the variance of the updates over users, ``sum_uv (||h_u||^2 - <h_u, h_v>) / U^2``.

    Args:
        G: inner products ``<h_u, h_v>``, shape ``(..., U, U)``.

    Reference: FedLAG, Lemma 5.2.
    """
    return G.diagonal(dim1=-2, dim2=-1).mean(-1) - G.sum((-2, -1)) / G.shape[-1] ** 2


def _ten_digits(value: float) -> float:
    """Round a score to 10 digits, so that every engine decides alike."""
    return float(f"{max(value, 0.0):.9e}")


def _leaves(layers: Layers, chosen: Collection[str]) -> set[str]:
    return {leaf for layer in chosen for leaf in layers[layer]}


def _gates(gated: Collection[str], personal: Collection[str], dtype: torch.dtype) -> Leaves:
    """Return ``gate:leaf`` entries: 1 for a shared leaf, 0 for a personal one."""
    return _named("gate:", gated, torch.tensor([float(leaf not in personal) for leaf in gated], dtype=dtype))


def _named(prefix: str, names: Collection[str], values: Tensor) -> Leaves:
    """Return the elements of a vector as memory entries."""
    return {f"{prefix}{name}": value.clone() for name, value in zip(names, values, strict=True)}


def _entries(memory: Leaves, prefix: str) -> Leaves:
    """Return the entries with a prefix, without it. Entries of users come last, and may be very many."""
    found: Leaves = {}
    for name, value in memory.items():
        if name.startswith(THETA):
            break
        if name.startswith(prefix):
            found[name[len(prefix) :]] = value
    return found


def gates(memory: Memory) -> Leaves:
    """Return 1 (shared) or 0 (personal) for each gated leaf."""
    return _entries(memory[OWNER], "gate:")


def rankable(leaf: LeafInfo) -> bool:
    """Return whether a leaf is a trainable one of the user's model, without normalisation."""
    return leaf.trainable and not leaf.buffer and not leaf.norm and not leaf.owner


def _reweighted(method: Method, reducer: Any) -> Method:
    """Return the method with other weights of its mean, unless another part has set them."""
    taken = {what for what, _ in method.claims}
    if "the reducer of the entry 'delta'" in taken:
        return method
    upload = tuple(
        replace(s, entries={**s.entries, "delta": reducer}) if s.entries.get("delta") == mean("n") else s
        for s in method.upload
    )
    return replace(method, upload=upload)
