"""How to do it again; pictures; and the tables of a comparison."""

from __future__ import annotations

import base64
import shlex
from html import escape
from typing import Any
from urllib.parse import unquote

from fedloom.reports.html import Section
from fedloom.reports.report_data import Book
from fedloom.runs.run_folder import flat

MOST = 8
"""Pictures shown at most, of all runs."""

_BYTES = 4_000_000  # of a picture that is put into the page


def pictures(book: Book) -> Section | None:
    """Pictures of dense prediction that lie in the runs' folders."""
    made: list[str] = []
    seen = 0
    for series in book.series:
        for run in series.runs:
            for path in run.pictures:
                seen += 1
                if len(made) < MOST and path.stat().st_size <= _BYTES:
                    data = base64.b64encode(path.read_bytes()).decode()
                    name = f"{series.label}, client {unquote(path.stem)}"
                    alt = f"{name}: images, ground truth, predictions and errors"
                    made.append(
                        f"<figure class='wide'><figcaption><h3>{escape(name)}</h3></figcaption>"
                        f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}"></figure>'
                    )
    if not made:
        return None
    more = f"<p class='hint'>{seen - len(made)} more lie in the runs' folders.</p>" if seen > len(made) else ""
    return Section("pictures", "What the models see", "".join(made) + more)


def tables(book: Book) -> Section | None:
    """The tables that a comparison wrote."""
    made = []
    for comparison in book.comparisons:
        for path in sorted((comparison.path / "tables").glob("*.md"), key=lambda p: (p.stem != "summary", p.stem)):
            title, _, text = path.read_text(encoding="utf-8", errors="replace").strip().partition("\n")
            made.append(f"<h3 class='sub'>{escape(title[:1].upper() + title[1:])}</h3>{_markdown(text)}")
    return Section("tables", "Tables of the comparison", "".join(made)) if made else None


def _markdown(text: str) -> str:
    """Headings, paragraphs and pipe tables, which is all that a comparison writes."""
    out: list[str] = []
    rows: list[list[str]] = []

    def close() -> None:
        if not rows:
            return
        head, *body = rows
        body = [r for r in body if not all(set(c) <= set(":- ") for c in r)]
        heads = "".join(f"<th scope='col'>{_plain(c)}</th>" for c in head)
        lines = "".join(f"<tr>{''.join(_cell(c) for c in r)}</tr>" for r in body)
        out.append(f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>")
        rows.clear()

    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("|"):
            rows.append([c.strip() for c in stripped.strip("|").split("|")])
            continue
        close()
        if stripped.startswith("#"):
            out.append(f"<h4>{_plain(stripped.lstrip('# '))}</h4>")
        elif stripped:
            out.append(f"<p class='hint'>{_plain(stripped)}</p>")
    close()
    return "".join(out)


def _cell(text: str) -> str:
    shown = f"<strong>{_plain(text)}</strong>" if text.startswith("**") else _plain(text)
    return f"<td>{shown}</td>"


def _plain(text: str) -> str:
    return escape(text.replace("**", "").replace("`", "").replace("\\", ""))


def how(book: Book) -> Section:
    """What all runs share, what differs, and the commands that repeat them."""
    flats = [flat({k: v for k, v in r.config.items() if k != "resolved"}) for r in book.runs]
    keys = [k for k in dict.fromkeys(k for f in flats for k in f) if not k.startswith("model.leaves.")]
    same = {k: flats[0].get(k) for k in keys if all(f.get(k) == flats[0].get(k) for f in flats)}
    differ = [k for k in keys if k not in same]
    resolved: dict[str, Any] = book.runs[0].config.get("resolved", {})
    computed: dict[str, Any] = {
        k: resolved[k]
        for k in ("engine", "device", "threads", "torch", "python", "clients", "cohort", "buffers")
        if k in resolved
    }
    body = (
        "<details open><summary>The same in all runs</summary>"
        if len(book.runs) > 1
        else "<details open><summary>Configuration</summary>"
    )
    body += _pairs(same) + "</details>"
    if differ:
        heads = "".join(f"<th scope='col'>{escape(k)}</th>" for k in ["run", *differ])
        rows = "".join(
            f"<tr><th scope='row'>{escape(_name(book, i))}</th>{''.join(f'<td>{escape(_value(f.get(k)))}</td>' for k in differ)}</tr>"
            for i, f in list(enumerate(flats))[:200]
        )
        body += (
            f"<details><summary>What differs</summary><div class='scroll'><table><thead><tr>{heads}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div></details>"
        )
    body += "<details><summary>How it was computed</summary>" + _pairs(computed) + "</details>"
    return Section("repeat", "How to repeat it", body + _commands(book))


def _commands(book: Book) -> str:
    lines, given = [], 0
    for run in book.runs[:20]:
        if run.path is None or not run.config.get("repeatable", False):
            given += 1
            continue
        again = run.path.with_name(run.path.name + "-again")
        lines.append(f"fedloom run {shlex.quote(str(run.path / 'run.toml'))} --out {shlex.quote(str(again))}")
    said = ""
    if lines:
        said = (
            "<p>Each run's folder holds its whole configuration; on the same machine and versions the numbers are the same, to the last digit.</p>"
            f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"
        )
    if given:
        said += (
            "<p>Runs whose data, model or method were given in Python are repeated by the script that made them.</p>"
        )
    return said


def _name(book: Book, i: int) -> str:
    run = book.runs[i]
    return run.path.name if run.path is not None else run.method


def _value(value: object) -> str:
    return "–" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(table: dict[str, Any]) -> str:
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(_value(v))}</dd></div>" for k, v in table.items())
    return f"<dl class='pairs'>{rows}</dl>"
