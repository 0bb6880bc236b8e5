"""FedLAG: layers whose updates conflict between clients become personal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom import tree
from fedloom.aggregators import similarity
from fedloom.aggregators.sides import ended, gram, pairs_below
from fedloom.errors import Conflict, UserError
from fedloom.record import Method
from fedloom.reducers import mean, stack
from fedloom.registry import plugin
from fedloom.slots import Rule, ServerStage, Stage
from fedloom.structure import LeafInfo, Structure
from fedloom.transfer import Array
from fedloom.types import Cohort, Facts, Leaves, Memory, Message
from fedloom.uploads import unchanged

OWNER = "lag"
VALUE = "value:"
"""Begins the name of what a client has, its leaves one after another: ``value:client``."""
PAPER = "Nguyen et al., Towards Layer-Wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting Gradients"

Select = Literal["conflict", "first", "middle", "last"] | Sequence[str]
Layers = dict[str, tuple[str, ...]]


def conflicts(products: Tensor, xi: float = 0.0) -> int:
    """``GC_xi``: unordered pairs with ``cos(h_u, h_v) < xi``, from a Gram matrix; a zero vector's cosine is 0.

    Cosines are clamped to [-1, 1] and rounded to 10 digits, so that every engine decides alike.

    Example:
        >>> h = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-1.0, 0.0]])
        >>> conflicts(gram([h])), conflicts(gram([h]), xi=-0.8)
        (2, 1)

    Reference: FedLAG, Definition 4.1.
    """
    return int(pairs_below(products, xi))


def spread(products: Tensor) -> float:
    """``sum_uv (||h_u||^2 - <h_u, h_v>) / M^2``: the variance of the updates over clients (Lemma 5.2), to 10 digits."""
    return _ten_digits(float(_variance(products)))


def _variance(products: Tensor) -> Tensor:
    clients = products.shape[-1]
    return products.diagonal(dim1=-2, dim2=-1).mean(-1) - products.sum((-2, -1)) / clients**2


def _ten_digits(value: float) -> float:
    return float(f"{max(value, 0.0):.9e}")


@dataclass(frozen=True, slots=True)
class _Lag:
    """The options of the plug-in, and the server's side of it."""

    k: int
    xi: float
    weights: str
    schedule: str
    granularity: str
    warmup: int
    select: str | tuple[str, ...]
    score: str
    require_conflict: bool

    def memory(self, facts: Facts) -> Leaves:
        """Which leaves are shared now (``gate:``), this round's score of each layer, and the sum of the scores."""
        gated = [i.name for i in facts.structure.leaves if rankable(i) and facts.specs[i.name].kind == "shared"]
        layers = self.layers(facts.structure, gated)
        if not layers:
            raise Conflict("'lag' has nothing to rank here: the method shares no layer of the model")
        one = torch.ones((), dtype=facts.structure.dtype)  # of the host, which decides
        chosen: tuple[str, ...] = ()
        if self.select != "conflict" and self.schedule == "per_round":
            chosen = self.choose(dict.fromkeys(layers, 0.0))
        off = {leaf for layer in chosen for leaf in layers[layer]}
        found = {f"gate:{n}": torch.zeros_like(one) if n in off else one.clone() for n in gated}
        for what in ("score", "total"):
            found |= {f"{what}:{layer}": torch.zeros((), dtype=torch.float64) for layer in layers}
        return found

    def layers(self, structure: Structure, gated: Collection[str]) -> Layers:
        """The rankable layers in forward order: a module's shared leaves together, or each tensor by itself."""
        there = set(gated)
        whole = {m: tuple(n for n in names if n in there) for m, names in structure.layers().items()}
        if self.granularity == "tensor":
            return {name: (name,) for names in whole.values() for name in names}
        return {module: names for module, names in whole.items() if names}

    def stage(self, reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        """Scores the layers, and keeps the mean of those that are personal now."""
        gated = [i.name for i in cohort.structure.leaves if f"gate:{i.name}" in memory]
        layers = self.layers(cohort.structure, gated)
        updates = reduced["lag"]
        rated = self.rate([[updates[leaf] for leaf in leaves] for leaves in layers.values()])
        made = dict(memory)
        if self.k:
            off = set(tree.off(_common(memory, "gate:")))
            fixed = layers if self.select == "conflict" else self.choose(dict.fromkeys(layers, 0.0))
            stored = [leaf for name in fixed for leaf in layers[name]]
            reduced, made = self.average(reduced, made, cohort, stored, off)
        return {**reduced, "asked": {"scores": rated}}, made

    def decide(self, memory: Leaves, told: Mapping[str, Array], cohort: Cohort) -> Leaves:
        """This round's scores and their sums, and the gates that turn: nothing that the device would have to do."""
        before, gated = _common(memory, "total:"), _common(memory, "gate:")
        found = zip(self.layers(cohort.structure, gated), told["scores"].tolist(), strict=True)
        scores = {name: _ten_digits(v) if self.score == "variance" else v for name, v in found}
        totals = {name: before[name].item() + value for name, value in scores.items()}
        numbers = torch.tensor([*scores.values(), *totals.values()], dtype=torch.float64).unbind()
        names = [f"{what}:{name}" for what in ("score", "total") for name in scores]
        made = dict(zip(names, numbers, strict=True))
        chosen = self.scheduled(scores, totals, cohort) if self.k else None
        if chosen is not None:
            now = set(chosen) if self.granularity == "tensor" else _leaves(chosen, cohort.structure) & gated.keys()
            here = all(v.is_cpu for v in gated.values())  # after a checkpoint they are where all else is
            turned = now ^ set(tree.off(gated)) if here else gated.keys()
            if turned:
                kind = next(iter(gated.values())).dtype
                values = torch.tensor([float(n not in now) for n in turned], dtype=kind).unbind()
                made |= {f"gate:{n}": v for n, v in zip(turned, values, strict=True)}
        return made

    def rate(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        """The score of each layer, from the updates of its leaves, still on the device; a few Gram matrices are there at a time."""
        some = max(1, similarity.CHUNK // layers[0][0].shape[0] ** 2)
        found = []
        for start in range(0, len(layers), some):
            products = torch.stack([gram(updates) for updates in layers[start : start + some]])
            found.append(_variance(products) if self.score == "variance" else pairs_below(products, self.xi))
        return torch.cat(found)

    def average(
        self,
        reduced: Message,
        memory: Leaves,
        cohort: Cohort,
        leaves: Sequence[str],
        personal: Collection[str],
    ) -> tuple[Message, Leaves]:
        """Eq. 4 of personal layers too: the mean of the clients' values, for newcomers and for layers that return.

        Clients send how far they moved from their own start; the server stores what each has (as the paper's does).
        """
        if not leaves:
            return reduced, memory
        memory = _joined(memory, leaves)
        weights = cohort.rows if self.weights == "samples" and len(set(cohort.rows)) > 1 else [1] * len(cohort)
        widths = [cohort.leaves[leaf].numel() for leaf in leaves]
        parts = _parts(leaves, widths, personal)
        sent = torch.cat([cohort.leaves[leaf].reshape(-1) for leaf in leaves])
        some = max(1, similarity.CHUNK // len(sent))
        mean: Tensor | None = None
        for first in range(0, len(cohort), some):
            ids, own = cohort.ids[first : first + some], None
            moved = torch.cat([reduced["lag"][leaf][first : first + some].reshape(len(ids), -1) for leaf in leaves], 1)
            if any(kept for _, kept in parts):
                own = [memory.get(f"{VALUE}{client}", sent) for client in ids]
            values, away = ended(moved, sent, own, parts, weights[first : first + some])
            memory |= dict(zip([f"{VALUE}{client}" for client in ids], values, strict=True))
            if away is not None:
                mean = away if mean is None else mean.add_(away)
        if mean is None:
            return reduced, memory
        mean.div_(sum(weights))
        means = zip(leaves, mean.split_with_sizes(widths), strict=True)
        return {**reduced, "personal": {n: v.view_as(cohort.leaves[n]) for n, v in means if n in personal}}, memory

    def scheduled(self, scores: dict[str, float], totals: dict[str, float], cohort: Cohort) -> tuple[str, ...] | None:
        """The personal layers of the next round, as the schedule has it; None for those of this one."""
        waiting = self.warmup if cohort.rounds is None else min(self.warmup, cohort.rounds // 2)
        if self.schedule == "warmup_once":
            return self.choose(totals) if cohort.round == waiting + 1 else None
        early = self.schedule == "warmup_then_per_round" and cohort.round < waiting
        return None if early else self.choose(scores)

    def choose(self, scores: dict[str, float]) -> tuple[str, ...]:
        """The personal layers: the k highest scores, the deeper layer first among equals; or a fixed choice."""
        names = list(scores)
        k = min(self.k, len(names))
        if isinstance(self.select, tuple):
            unknown = [n for n in self.select if n not in scores]
            if unknown:
                raise UserError(f"lag: select names {unknown[0]!r}; layers that can be personal are {', '.join(names)}")
            return self.select
        if self.select != "conflict":
            first = {"first": 0, "middle": (len(names) - k) // 2, "last": len(names) - k}[self.select]
            return tuple(names[first : first + k])
        ranked = sorted(range(len(names)), key=lambda i: (-scores[names[i]], -i))
        if self.require_conflict:
            ranked = [i for i in ranked if scores[names[i]] > 0]
        return tuple(names[i] for i in ranked[:k])

    def report(self, memory: Leaves) -> dict[str, Any]:
        """One row of the layer x round matrix of scores, and the layers that are personal in the next round."""
        scores = {name: float(value) for name, value in _common(memory, "score:").items()}
        return {"score": scores, "personal": tree.off(gates({OWNER: memory}))}


def _parts(leaves: Sequence[str], widths: Sequence[int], chosen: Collection[str]) -> list[tuple[slice, bool]]:
    """Where leaves lie, one behind the other, and whether they are chosen; neighbours that are alike together."""
    found: list[tuple[slice, bool]] = []
    begin = 0
    for leaf, width in zip(leaves, widths, strict=True):
        alike = bool(found) and found[-1][1] == (leaf in chosen)
        start = found.pop()[0].start if alike else begin
        begin += width
        found.append((slice(start, begin), leaf in chosen))
    return found


def _joined(memory: Leaves, leaves: Sequence[str]) -> Leaves:
    """What clients have, a tensor each; folders of earlier runs hold it leaf by leaf, as ``value:client:leaf``."""
    last = next(reversed(memory))
    if not last.startswith(VALUE) or not last.endswith(tuple(f":{leaf}" for leaf in leaves)):
        return memory
    tail = f":{leaves[0]}"
    clients = [n.removesuffix(tail) for n in memory if n.startswith(VALUE) and n.endswith(tail)]
    made = {n: v for n, v in memory.items() if not n.startswith(VALUE)}
    return made | {c: torch.cat([memory[f"{c}:{leaf}"].reshape(-1) for leaf in leaves]) for c in clients}


def _leaves(modules: Collection[str], structure: Structure) -> set[str]:
    return {leaf.name for leaf in structure.leaves if leaf.module in modules}


def gates(memory: Memory) -> Leaves:
    """Per gated leaf 1 (shared) or 0 (personal), as the server remembers it."""
    return _common(memory[OWNER], "gate:")


def _common(memory: Leaves, what: str) -> Leaves:
    """What is remembered of no single client: it stands in front, in the order of making and in that of the alphabet alike."""
    found: Leaves = {}
    for name, value in memory.items():
        if name.startswith(what):
            found[name[len(what) :]] = value
        elif name.startswith(VALUE):
            break
    return found


def rankable(leaf: LeafInfo) -> bool:
    """Trainable leaves of the user's model, without normalisation."""
    return leaf.trainable and not leaf.buffer and not leaf.norm and not leaf.owner


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
            stages=(Stage(owner=OWNER, fn=unchanged, also={"lag": ("delta", stack())}, stacked=True),),
            server=(
                ServerStage(
                    owner=OWNER, fn=options.stage, memory=options.memory, decide=options.decide, report=options.report
                ),
            ),
        )

    return apply


def _reweighted(method: Method, reducer: Any) -> Method:
    """The method with other weights of its mean, unless it has weights of its own."""
    taken = {what for what, _ in method.claims}
    if "the reducer of the entry 'delta'" in taken:
        return method
    upload = tuple(
        replace(s, entries={**s.entries, "delta": reducer}) if s.entries.get("delta") == mean("n") else s
        for s in method.upload
    )
    return replace(method, upload=upload)
