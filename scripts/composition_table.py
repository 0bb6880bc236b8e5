"""Writes docs/composition.md: which methods and plug-ins can be stacked, and why the others cannot.

Every pair of method and plug-in, and every ordered pair of plug-ins on FedAvg, is composed and bound to a small network.
Usage: ``python scripts/composition_table.py`` writes the page, ``--check`` fails if it is not current.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import fedloom as fl
from fedloom import network, tasks
from fedloom.bound import bind

PAGE = Path(__file__).resolve().parent.parent / "docs" / "composition.md"

HEAD = """# What can be stacked on what

This page is written by `scripts/composition_table.py`; a test keeps it current. A tick means that the pair composes and
binds to a small network with batch normalisation (two hidden layers, three classes); a number names the reason below.

The rules behind it: additions (terms, upload stages, server stages, personal leaves) never clash, replacements (data term,
reducer of an entry, receive rule, predict route, gate, a program) can each be made once, a leaf has one owner for its sharing,
and two parts may not keep memory under one name. Upload and server stages run in the order written; terms commute.
`account` stands for `clip + noise + account`: it counts what the two before it are worth, and is written last.
"""


def net() -> nn.Module:
    """Two hidden layers with batch normalisation: enough for every method to have something to do."""
    return nn.Sequential(
        nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def plugins() -> list[str]:
    """Plug-ins that can be made without arguments."""
    empty = inspect.Parameter.empty
    return [n for n in fl.list_plugins() if empty not in fl.describe(n).parameters.values()]


def written(plugin: str) -> str:
    """A plug-in as it is stacked on a method: `account` comes with what it accounts for."""
    return "clip + noise + account" if plugin == "account" else plugin


def refusal(text: str) -> str | None:
    """Why a composition is refused; None if it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method: fl.Method | None = fl.method(text)
            while method is not None:
                bind(
                    method,
                    network.build(net(), torch.zeros(2, 6), task="classification"),
                    tasks.named("classification"),
                )
                method = None if method.then is None else method.then[1]
        except fl.UserError as error:
            return tidy(str(error))
    return None


def tidy(reason: str) -> str:
    """A reason without the names at hand (row and column tell them), so that equal reasons read alike."""
    reason = re.sub(r"^'\w+' cannot be stacked on '[^']*'(: |, )?", "", reason)
    reason = re.sub(r"both '\w+' and '\w+' replace", "both replace", reason)
    reason = re.sub(r"whether '[\d.\w]+' is", "whether a layer is", reason)
    reason = re.sub(r"<function .*? at 0x[0-9a-f]+> ", "", reason)
    reason = re.sub(r" in '[^']*',", ",", reason)
    reason = re.sub(r"^which ", "the method ", reason)
    reason = re.sub(r"also sends '\w+': no noise", "also sends what no noise", reason).replace(
        "noise covers it", "noise covers"
    )
    return reason.partition("; leave one")[0].partition("; leaves are")[0].replace("'", "`").replace("|", "\\|")


def table(title: str, rows: dict[str, str], columns: list[str], reasons: list[str]) -> list[str]:
    """One table in Markdown; ``rows`` maps a label to the text before the plug-in."""
    lines = [
        f"## {title}",
        "",
        "| | " + " | ".join(f"`{c}`" for c in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for label, base in rows.items():
        cells = []
        for column in columns:
            reason = refusal(f"{base} + {written(column)}")
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("✓" if reason is None else str(reasons.index(reason) + 1))
        lines.append(f"| `{label}` | " + " | ".join(cells) + " |")
    return [*lines, ""]


def page() -> str:
    """The whole page."""
    columns, reasons = plugins(), []
    methods = {n: n for n in fl.list_methods()}
    lines = table("Methods and plug-ins", methods, columns, reasons)
    pairs = {n: f"fedavg + {written(n)}" for n in columns}
    lines += table("Plug-in after plug-in, on `fedavg`: first the row, then the column", pairs, columns, reasons)
    lines += ["## Reasons", "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, start=1)), ""]
    return HEAD + "\n" + "\n".join(lines)


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not current")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made)


if __name__ == "__main__":
    sys.exit(main())
