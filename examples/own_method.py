"""A researcher has an idea, writes it down in ten lines, and holds it against ten other methods.

    python examples/own_method.py [FOLDER]

The idea: a client with few rows should lean on the others, one with many may go its own way. FedProx pulls every client towards the shared
model with the same strength mu; here the pull of a client with n rows is mu n0 / (n + n0), and the head is the client's own. Whether that is any
good is not for its author to feel: the comparison below says how sure one may be. Stop it when you like; called again, it goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fedloom as fl
from fedloom import tensors
from fedloom.spec.parts import Term
from fedloom.spec.registry import plugin, recipe


# 1. What is new is one term of a client's objective. It is a plug-in: it stacks on every method there is.
@plugin("mu >= 0", "n0 > 0")
def lean(mu: float = 1.0, n0: float = 50.0):
    """Pulls a client towards the model it received, the harder the fewer rows it has: adds ``mu n0/(n + n0) ||theta - w||^2 / 2``."""

    def pull(view, batch, seen):
        names = [name for name in view.trained if seen.specs[name].sent]
        gap = {name: view.leaves[name] - seen.received[name] for name in names}
        return mu * n0 / (seen.n + n0) * tensors.square_norm(gap) / 2

    return lambda method: method.adding(terms=(Term(owner="lean", fn=pull),)) if mu else method


# 2. A name for the whole: a personal head (FedPer) with the new pull on its shared body.
@recipe("mu >= 0", "n0 > 0", plugin="lean")
def fedlean(mu: float = 1.0, n0: float = 50.0):
    """A personal head, and a body that leans on the others as far as a client's rows do not suffice."""
    return fl.compose(fl.fedper(), lean(mu, n0))


OTHERS = (
    "local",
    "fedavg",
    "fedprox(mu=0.1)",
    "scaffold",
    "fedper",
    "fedrep",
    "ditto",
    "fedproto",
    "fedlag",
    "fedmap",
)


# 3. Who has which rows: 12 clients with skewed digits, dealt anew for every seed.
def clients(seed: int) -> fl.Federation:
    return fl.data.load("digits").partition(fl.dirichlet(0.3), clients=12, seed=seed)


def main(
    folder: Path, rounds: int = 20, seeds: int = 3, others: tuple[str, ...] = OTHERS, jobs: int | str = "auto"
) -> Path:
    # 4. Does the method keep the contract: repeatable, nothing personal sent, the same numbers on every engine?
    report = fl.check_method("fedlean")
    assert report, report
    # A limit that must hold to the last bit: without a pull it is FedPer.
    first, second = (fl.fit(name, "mlp", clients(0), rounds=1, progress=False) for name in ("fedlean(mu=0)", "fedper"))
    assert first.clients["3"].metrics == second.clients["3"].metrics

    # 5. The comparison: every method with every seed, on the same rows and from the same initial weights.
    made = fl.compare(
        ["fedlean", *others],
        model={"name": "mlp", "hidden": [32]},
        data=clients,
        seeds=seeds,
        baseline="fedper",
        rounds=rounds,
        cohort=0.5,
        epochs=3,
        batch_size=16,
        optimizer=fl.sgd(lr=0.1),
        evaluate={"every": max(1, rounds // 5)},
        jobs=jobs,
        out=folder,
    )
    print(made)

    # 6. Tables for the paper are in the folder (Markdown, LaTeX, CSV); the page is for looking.
    page = fl.report(made, title="FedLean and ten others")
    print(f"tables: {folder / 'tables'}\nreport: {page}")
    return page


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/own-method"))
