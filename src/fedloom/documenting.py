"""The page of options, made from the classes that read them, so that it cannot drift."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterator
from typing import Any

from fedloom import config
from fedloom.options import Settings, default, meanings, option_names
from fedloom.simulation import fit
from fedloom.values import words

_INTRO = """# Configuration

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

This page is made from the program: `python -m fedloom.documenting > docs/configuration.md`.
"""

_NAMED = {
    "method": "the method: a recipe, then plug-ins, such as `fedprox(mu=0.01) + clip(1.0)` (`fedloom list methods`, `list plugins`)",
    "model": 'a network by name, `model = "convnet4(width=64)"` or a table `[model]` with `name` and the network\'s options '
    "(`fedloom list models`); `head` names the head's leaves where it is not found. In Python also any module",
    "optimizer": '`optimizer = "adam(lr=1e-3)"` or a table `[optimizer]` with `name` (sgd, adam, adamw) and its options',
}
_ELSEWHERE = ("out", "resume", "progress", "callbacks")


def rows() -> Iterator[dict[str, Any]]:
    """Every option: table, key, type in words, default, meaning."""
    for key, meaning in _NAMED.items():
        shown = {"model": "mlp", "optimizer": "sgd(lr=0.05)"}.get(key)
        yield {
            "table": "",
            "key": key,
            "type": "text or a table" if key != "method" else "text",
            "default": shown,
            "meaning": meaning,
        }
    yield from _rows(Settings, "")
    for table, cls in config.SECTIONS.items():
        yield from _rows(cls, table)


def _rows(cls: type[Any], table: str) -> Iterator[dict[str, Any]]:
    hints, said = typing.get_type_hints(cls), meanings(cls)
    for key in option_names(cls):
        yield {
            "table": table,
            "key": key,
            "type": words(hints[key]),
            "default": config.plain(default(cls, key)) if default(cls, key) is not None else None,
            "meaning": said[key],
        }


def page() -> str:
    """The page of all options as Markdown."""
    lines, last = [_INTRO], None
    for row in rows():
        if row["table"] != last:
            last = row["table"]
            title = f"`[{last}]`" if last else "Top level"
            lines.append(f"\n## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        shown = "" if row["default"] in (None, [], {}) else f"`{row['default']!r}`"
        lines.append(f"| `{row['key']}` | {_cell(row['type'])} | {shown} | {_cell(row['meaning'])} |")
    lines.append("\n## `[optimizer]`\n\n| optimiser | options and defaults |\n|---|---|")
    for name, make in config.OPTIMIZERS.items():
        lines.append(f"| `{name}` | {', '.join(f'`{k}={v!r}`' for k, v in _defaults(make))} |")
    said = meanings(fit)
    lines.append("\n## Only in Python and on the command line\n\n| argument of `fit` | meaning |\n|---|---|")
    lines += [f"| `{key}` | {_cell(said[key])} |" for key in _ELSEWHERE]
    return "\n".join(lines) + "\n"


def _defaults(make: Any) -> list[tuple[str, Any]]:
    return [(k, p.default) for k, p in inspect.signature(make).parameters.items()]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    sys.stdout.write(page())
