"""Hooks of the documentation's site: a page for every method and plug-in, made from its docstring when the site is built.

`mkdocs.yml` names this file. Pages of docs/ that the navigation does not name yet are put below "More"; those that it names and that
are not there are left out.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fedloom as fl
from fedloom.options import meanings
from fedloom.registry import METHODS, PLUGINS, Entry

INDEX = {
    "methods": "Each method is a recipe: a record made of [five slots](../five-slots.md). Plug-ins [stack on them](../composition.md). "
    "`fedloom list methods` prints this list.",
    "plugins": "A plug-in is a function from method to method: `fedavg + isr(points=3)`. [Which stack on which](../composition.md) is a table. "
    "`fedloom list plugins` prints this list.",
}


# Events -----------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fits the navigation to the pages that there are."""
    folder = Path(config.docs_dir)
    config.nav = kept(config.nav, folder)
    known = set(listed(config.nav))
    more = [p.name for p in sorted(folder.glob("*.md")) if p.name not in known]
    if more:
        config.nav.append({"More": more})
    for title, name, table in (("Methods", "methods", METHODS), ("Plug-ins", "plugins", PLUGINS)):
        pages = [{entry: f"{name}/{entry}.md"} for entry in sorted(table)]
        place = next(i for i, item in enumerate(config.nav) if title in item)
        config.nav[place] = {title: [f"{name}/index.md", *pages]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def kept(nav: list[Any], folder: Path) -> list[Any]:
    """The navigation without pages that are not there; generated ones stay."""
    found: list[Any] = []
    for item in nav:
        title, value = next(iter(item.items())) if isinstance(item, dict) else (None, item)
        if isinstance(value, list):
            value = kept(value, folder)
        elif "/" not in value and not (folder / value).is_file():
            continue
        if value:
            found.append(value if title is None else {title: value})
    return found


def listed(nav: list[Any]) -> list[str]:
    """The pages of a navigation."""
    found: list[str] = []
    for item in nav:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        found += listed(value) if isinstance(value, list) else [value]
    return found


# Pages ------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Every generated page by its path."""
    made = {}
    for name, table in (("methods", METHODS), ("plugins", PLUGINS)):
        made[f"{name}/index.md"] = index(name, table)
        made |= {f"{name}/{entry.name}.md": page(entry) for entry in table.values()}
    return made


def index(name: str, table: dict[str, Entry]) -> str:
    """The list of all methods or plug-ins."""
    title = {"methods": "Methods", "plugins": "Plug-ins"}[name]
    lines = [f"# {title}", "", INDEX[name], "", "| name | what it does |", "|---|---|"]
    for key in sorted(table):
        entry = table[key]
        paper = f"<br><small>{cell(entry.paper)}</small>" if entry.paper else ""
        lines.append(f"| [`{key}`]({key}.md) | {cell(entry.summary)}{paper} |")
    return "\n".join(lines) + "\n"


def page(entry: Entry) -> str:
    """The page of a method or plug-in."""
    head, sections = parts(inspect.getdoc(entry.fn) or "")
    lines = [
        f"# {entry.name}",
        "",
        linked(head, entry),
        "",
        "```python",
        f"fl.{entry.name}{signature(entry)}",
        "```",
        "",
    ]
    lines += parameters(entry)
    if entry.presets:
        lines += [
            "## Presets",
            "",
            f'`fl.{entry.name}(preset="...")` takes the settings of a paper or of its code.',
            "",
        ]
        lines += ["| preset | settings |", "|---|---|"]
        for name, values in entry.presets.items():
            lines.append(f"| `{name}` | {cell(', '.join(f'`{k}={v!r}`' for k, v in values.items()))} |")
        lines.append("")
    if "Example" in sections:
        lines += ["## Example", "", "```pycon", sections["Example"], "```", ""]
    lines += use(entry) + travels(entry)
    for name in ("Raises", "Returns", "Note", "Reference"):
        if name in sections:
            lines += [f"## {name}", "", sections[name], ""]
    if entry.paper:
        lines += ["## Paper", "", entry.paper, ""]
    lines += ['??? note "How it is written"', "", "    ```python"]
    lines += ["    " + line for line in source(entry).splitlines()] + ["    ```", ""]
    return "\n".join(lines)


def parts(doc: str) -> tuple[str, dict[str, str]]:
    """What a docstring says, and its sections by name."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", doc)
    found: dict[str, str] = {}
    name, lines = "", dict[str, list[str]]()
    for line in text.splitlines():
        start = re.fullmatch(r"(Args|Example|Raises|Returns|Note|Reference):\s*(.*)", line)
        if start:
            name, line = start[1], start[2]
        lines.setdefault(name, []).append(line)
    for key, block in lines.items():
        first, rest = block[0].strip(), textwrap.dedent("\n".join(block[1:]))
        found[key] = "\n".join(b for b in (first, rest) if b).strip()
    return found.pop("", ""), found


def signature(entry: Entry) -> str:
    """The hyper-parameters with their defaults, as Python writes them."""
    shown = []
    for key, parameter in inspect.signature(entry.fn).parameters.items():
        shown.append(key if parameter.default is parameter.empty else f"{key}={parameter.default!r}")
    line = f"({', '.join(shown)})"
    return line if len(line) < 70 else "(\n" + "".join(f"    {part},\n" for part in shown) + ")"


def linked(text: str, entry: Entry) -> str:
    """Names of methods and plug-ins as links to their pages."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        if name == entry.name or name not in METHODS | PLUGINS:
            return found[0]
        return f"[`{name}`](../{'methods' if name in METHODS else 'plugins'}/{name}.md)"

    return re.sub(r"``(\w+)``", link, text)


def parameters(entry: Entry) -> list[str]:
    """The table of hyper-parameters."""
    said = meanings(entry.fn)
    if not entry.parameters:
        return ["It has no hyper-parameters.", ""]
    lines = ["## Hyper-parameters", "", "| name | default | range | meaning |", "|---|---|---|---|"]
    for key, default in entry.parameters.items():
        shown = "" if default is inspect.Parameter.empty else f"`{default!r}`"
        bounds = [f"`{b}`" for b in entry.bounds if re.search(rf"\b{key}\b", b)]
        lines.append(f"| `{key}` | {cell(shown)} | {cell(', '.join(bounds))} | {cell(said.get(key, ''))} |")
    return [*lines, ""]


def use(entry: Entry) -> list[str]:
    """How to run it."""
    needed = [k for k, v in entry.parameters.items() if v is inspect.Parameter.empty]
    call = f"{entry.name}({', '.join(f'{k}=...' for k in needed)})" if needed else entry.name
    text = call if entry.kind == "method" else f"fedavg + {call}"
    lines = [
        "## Use it",
        "",
        "```bash",
        f'fedloom run CONFIG.toml --set method="{text}"',
        f'fedloom check "{text}"',
        "```",
        "",
    ]
    if entry.plugin:
        lines += [f"On another method: the plug-in [`{entry.plugin}`](../plugins/{entry.plugin}.md).", ""]
    twins = [m.name for m in METHODS.values() if entry.kind == "plugin" and m.plugin == entry.name]
    if twins:
        lines += ["As a method of its own: " + ", ".join(f"[`{t}`](../methods/{t}.md)" for t in twins) + ".", ""]
    return lines


def travels(entry: Entry) -> list[str]:
    """What a client sends, and how the server reduces it."""
    try:
        made = entry.fn()
        method = made if entry.kind == "method" else fl.compose(fl.fedavg(), made)
    except (fl.UserError, TypeError):
        return []
    entries = method.reducers()
    if not entries:
        return ["## What leaves a client", "", "Nothing.", ""]
    where = "" if entry.kind == "method" else " (on `fedavg`)"
    rows = [f"| `{name}` | {cell(str(reducer))} |" for name, reducer in entries.items()]
    return ["## What leaves a client", "", f"| entry{where} | reduced by |", "|---|---|", *rows, ""]


def source(entry: Entry) -> str:
    """The text of the recipe, without its docstring."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(entry.fn)))
    return re.sub(r'\n +"""(?:.|\n)*?"""', "", text, count=1)


def cell(text: str) -> str:
    """Text in a table; bars within code stay as they are."""
    pieces = re.split(r"(`+[^`]*`+)", text.replace("\n", " "))
    return "".join(p if p.startswith("`") else p.replace("|", "\\|") for p in pieces)
