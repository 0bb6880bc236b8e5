"""Pages of the documentation that are made from the program: methods, plug-ins, options and composition.

``python scripts/docs_pages.py`` writes docs/configuration.md and docs/composition.md; ``--check`` fails if one is not current.
``mkdocs.yml`` names this file as a hook, which makes the page of every method and plug-in while it builds the site.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fedloom as fl
from fedloom import tasks
from fedloom.cli.listing import form, option_rows
from fedloom.engines.choose_device import choose_device
from fedloom.network import inspect_model
from fedloom.network.bound_method import bind
from fedloom.runs import config_file as config
from fedloom.spec.options import meanings
from fedloom.spec.registry import METHODS, PLUGINS, Entry

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDERS = {"methods": METHODS, "plugins": PLUGINS}
REQUIRED = inspect.Parameter.empty

INDEX = {
    "methods": "# Methods\n\nEach method is a recipe: a record made of [five slots](../five-slots.md). Plug-ins "
    "[stack on them](../composition.md). `fedloom list methods` prints this list.\n",
    "plugins": "# Plug-ins\n\nA plug-in is a function from method to method: `fedavg + isr(points=3)`. "
    "[Which stack on which](../composition.md) is a table. `fedloom list plugins` prints this list.\n",
}

CONFIGURATION = """# Configuration

A run is described by a TOML file, `fedloom run CONFIG.toml`. Every key is also an argument of `fl.fit`, of the same name and with the
same values; tables are dictionaries there. All keys but `method` and `[data]` have defaults; unknown keys are errors, with a guess at
what was meant. `--set table.key=value` changes a key from the command line. The run's folder holds `run.toml`, the whole resolved
configuration, which is a configuration again. Its key `format` is the format number of the folder;
a folder of another format is refused.

```toml
method = "fedprox(mu=0.01) + isr(points=3) + lag(k=5)"
rounds = 50
cohort = 0.1

[data]
name = "cifar10"
clients = 100
partition = "dirichlet(0.3)"

[model]
name = "convnet4"

[optimizer]
name = "sgd"
lr = 0.1
decay = 0.99
```

`scripts/docs_pages.py` writes this page; a test keeps it current.
"""

COMPOSITION = """# What can be stacked on what

`scripts/docs_pages.py` writes this page; a test keeps it current. A tick means that the pair composes and
binds to a small network with batch normalisation (two hidden layers, three classes); a number names the reason below.

The rules behind it: additions (terms, upload stages, server stages, personal leaves) never clash, replacements (data term,
reducer of an entry, receive rule, predict route, gate, a program) can each be made once, a leaf has one owner for its sharing,
and two parts may not keep memory under one name. Upload and server stages run in the order written; terms commute.
`account` stands for `clip + noise + account`: it counts what the two before it are worth, and is written last.
"""


# Hooks of mkdocs ----------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of methods and plug-ins into the navigation."""
    for item in config.nav:
        for title, path in item.items():
            folder = str(path).partition("/")[0]
            if folder in FOLDERS:
                item[title] = [path, *({name: f"{folder}/{name}.md"} for name in sorted(FOLDERS[folder]))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of methods and plug-ins."""
    from mkdocs.structure.files import File

    for folder, entries in FOLDERS.items():
        files.append(File.generated(config, f"{folder}/index.md", content=index_page(folder)))
        for entry in entries.values():
            files.append(File.generated(config, f"{folder}/{entry.name}.md", content=entry_page(entry)))
    return files


# Markdown -----------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Makes a table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def cell(text: str) -> str:
    """Makes text fit a cell of a table; bars within code stay as they are."""
    pieces = re.split(r"(`[^`]*`)", text.replace("\n", " ").replace("``", "`"))
    return "".join(p if p.startswith("`") else p.replace("|", "\\|") for p in pieces)


def codes(values: Mapping[str, Any]) -> str:
    """Lists keys and values as code."""
    return ", ".join(f"`{k}={v!r}`" for k, v in values.items())


# Methods and plug-ins -----------------------------------------------------------------------------------------


def index_page(folder: str) -> str:
    """Makes the list of all methods or plug-ins."""
    rows = []
    for name, entry in sorted(FOLDERS[folder].items()):
        paper = f"<br><small>{cell(entry.paper)}</small>" if entry.paper else ""
        rows.append((f"[`{name}`]({name}.md)", cell(entry.summary) + paper))
    return INDEX[folder] + "\n" + table(("name", "what it does"), rows)


def entry_page(entry: Entry) -> str:
    """Makes the page of a method or plug-in."""
    text, sections = split_docstring(inspect.getdoc(entry.fn) or "")
    call = textwrap.fill(f"fl.{form(entry.fn, entry.name)}", 78, subsequent_indent="    ", break_on_hyphens=False)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(entry.fn)))
    source = re.sub(r'\n +"""(?:.|\n)*?"""', "", source, count=1)
    parts = [f"# {entry.name}\n\n{link_names(text, entry)}\n\n```python\n{call}\n```\n", hyper_parameters(entry)]
    if entry.presets:
        text = f'`fl.{entry.name}(preset="...")` takes the settings of a paper or of its code.\n\n'
        rows = [(f"`{name}`", cell(codes(values))) for name, values in entry.presets.items()]
        parts.append("## Presets\n\n" + text + table(("preset", "settings"), rows))
    if "Example" in sections:
        parts.append(f"## Example\n\n```pycon\n{sections['Example']}\n```\n")
    parts += [use(entry), uploads(entry)]
    parts += [f"## {n}\n\n{sections[n]}\n" for n in ("Raises", "Returns", "Note", "Reference") if n in sections]
    if entry.paper:
        parts.append(f"## Paper\n\n{entry.paper}\n")
    parts.append('??? note "How it is written"\n\n' + textwrap.indent(f"```python\n{source.rstrip()}\n```\n", " " * 4))
    return "\n".join(part for part in parts if part)


def split_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Splits a docstring into its text and its sections by name."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", doc)
    text, *found = re.split(r"^(Args|Example|Raises|Returns|Note|Reference):", text, flags=re.MULTILINE)
    sections = {}
    for name, block in zip(found[::2], found[1::2], strict=True):
        first, _, rest = block.partition("\n")
        sections[name] = f"{first.strip()}\n{textwrap.dedent(rest)}".strip()
    return text.strip(), sections


def link_names(text: str, entry: Entry) -> str:
    """Makes names of other methods and plug-ins links to their pages."""

    def link(found: re.Match[str]) -> str:
        folder = next((f for f, entries in FOLDERS.items() if found[1] in entries and found[1] != entry.name), None)
        return found[0] if folder is None else f"[`{found[1]}`](../{folder}/{found[1]}.md)"

    return re.sub(r"``(\w+)``", link, text)


def hyper_parameters(entry: Entry) -> str:
    """Makes the table of hyper-parameters."""
    if not entry.parameters:
        return "It has no hyper-parameters.\n"
    texts, rows = meanings(entry.fn), []
    for key, default in entry.parameters.items():
        bounds = ", ".join(f"`{b}`" for b in entry.bounds if re.search(rf"\b{key}\b", b))
        rows.append((f"`{key}`", "" if default is REQUIRED else f"`{default!r}`", bounds, cell(texts.get(key, ""))))
    return "## Hyper-parameters\n\n" + table(("name", "default", "range", "meaning"), rows)


def use(entry: Entry) -> str:
    """Says how to run a method or plug-in, and in which other form it exists."""
    required = [k for k, v in entry.parameters.items() if v is REQUIRED]
    call = f"{entry.name}({', '.join(f'{k}=...' for k in required)})" if required else entry.name
    text = call if entry.kind == "method" else f"fedavg + {call}"
    page = f'## Use it\n\n```bash\nfedloom run CONFIG.toml --set method="{text}"\nfedloom check "{text}"\n```\n'
    if entry.plugin:
        page += f"\nOn another method: the plug-in [`{entry.plugin}`](../plugins/{entry.plugin}.md).\n"
    methods = [m.name for m in METHODS.values() if entry.kind == "plugin" and m.plugin == entry.name]
    if methods:
        page += "\nAs a method of its own: " + ", ".join(f"[`{m}`](../methods/{m}.md)" for m in methods) + ".\n"
    return page


def uploads(entry: Entry) -> str:
    """Says what a client sends and how the server reduces it; empty where hyper-parameters are required."""
    try:
        made = entry.fn()
        method = made if entry.kind == "method" else fl.compose(fl.fedavg(), made)
    except (fl.UserError, TypeError):
        return ""
    rows = [(f"`{name}`", cell(str(reducer))) for name, reducer in method.reducers().items()]
    head = ("entry" if entry.kind == "method" else "entry (on `fedavg`)", "reduced by")
    return "## What leaves a client\n\n" + (table(head, rows) if rows else "Nothing.\n")


# Options ------------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Makes the page of all options."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for row in option_rows():
        default = "" if row["default"] in (None, [], {}) else f"`{row['default']!r}`"
        line = (f"`{row['key']}`", cell(row["type"]), default, cell(row["meaning"]))
        tables.setdefault(f"`[{row['table']}]`" if row["table"] else "Top level", []).append(line)
    head = ("key", "type", "default", "meaning")
    parts = [CONFIGURATION, *(f"## {title}\n\n{table(head, rows)}" for title, rows in tables.items())]
    makers = {n: inspect.signature(make).parameters for n, make in config.OPTIMIZERS.items()}
    rows = [(f"`{n}`", codes({k: p.default for k, p in parameters.items()})) for n, parameters in makers.items()]
    parts.append("## `[optimizer]`\n\n" + table(("optimiser", "options and defaults"), rows))
    texts = meanings(fl.fit)
    rows = [(f"`{key}`", cell(texts[key])) for key in ("out", "resume", "progress", "callbacks")]
    parts.append("## Only in Python and on the command line\n\n" + table(("argument of `fit`", "meaning"), rows))
    return "\n".join(parts)


# Composition --------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    """Two hidden layers with batch normalisation: enough for every method to have something to do."""
    return nn.Sequential(
        nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def plugins() -> dict[str, str]:
    """Lists the plug-ins that need no arguments, each with its text on a method."""
    names = [n for n, entry in sorted(PLUGINS.items()) if REQUIRED not in entry.parameters.values()]
    return {n: "clip + noise + account" if n == "account" else n for n in names}


def refusal(text: str) -> str | None:
    """Says why a composition is refused; None if it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method: fl.Method | None = fl.method(text)
            while method is not None:
                cpu = choose_device("cpu", "fp32")
                model = inspect_model.build(net(), torch.zeros(2, 6), task="classification", device=cpu)
                bind(method, model, tasks.named("classification"))
                method = None if method.then is None else method.then[1]
        except fl.UserError as error:
            return shorten(str(error))
    return None


def shorten(reason: str) -> str:
    """Leaves out the names that row and column show, so that equal reasons read alike."""
    for pattern, text in (
        (r"^'\w+' cannot be stacked on '[^']*'(: |, )?", ""),
        (r"both '\w+' and '\w+' replace", "both replace"),
        (r"whether '[\d.\w]+' is", "whether a layer is"),
        (r"<function .*? at 0x[0-9a-f]+> ", ""),
        (r" in '[^']*',", ","),
        (r"^which ", "the method "),
        (r"also sends '\w+': no noise", "also sends what no noise"),
        (r"noise covers it", "noise covers"),
        (r"; (leave one|leaves are).*", ""),
        (r"'", "`"),
        (r"\|", r"\\|"),
    ):
        reason = re.sub(pattern, text, reason)
    return reason


def composition_page() -> str:
    """Makes the page of what can be stacked on what; composes and binds every pair."""
    columns, reasons = plugins(), dict[str, int]()

    def mark(text: str) -> str:
        reason = refusal(text)
        return "✓" if reason is None else str(reasons.setdefault(reason, len(reasons) + 1))

    parts = [COMPOSITION]
    for title, bases in (
        ("Methods and plug-ins", {n: n for n in fl.list_methods()}),
        (
            "Plug-in after plug-in, on `fedavg`: first the row, then the column",
            {n: f"fedavg + {t}" for n, t in columns.items()},
        ),
    ):
        rows = [(f"`{n}`", *(mark(f"{base} + {text}") for text in columns.values())) for n, base in bases.items()]
        parts.append(f"## {title}\n\n" + table(("", *(f"`{n}`" for n in columns)), rows))
    parts.append("## Reasons\n\n" + "".join(f"{i}. {reason}\n" for reason, i in reasons.items()))
    return "\n".join(parts)


WRITTEN = {"configuration.md": configuration_page, "composition.md": composition_page}


def main() -> int:
    """Writes or checks the pages that are part of the repository."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is not current")
    if parser.parse_args().check:
        return int(any((DOCS / name).read_text(encoding="utf-8") != make() for name, make in WRITTEN.items()))
    for name, make in WRITTEN.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
