"""Every Python block of the README and the docs is run, page by page, from top to bottom.

Blocks in the form of a session (``>>>``) are run as doctests elsewhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import pytest

from fedloom.spec.registry import METHODS, PLUGINS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def registry() -> Iterator[None]:
    """Names that a page registers are gone afterwards."""
    methods, plugins = dict(METHODS), dict(PLUGINS)
    yield
    for table, before in ((METHODS, methods), (PLUGINS, plugins)):
        table.clear()
        table.update(before)


def blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: m.start(1)].count("\n"), m.group(1)) for m in found if not m.group(1).startswith(">>>")]


@pytest.mark.parametrize("page", [p for p in PAGES if p.exists() and blocks(p)], ids=lambda p: p.name)
def test_page(page: Path, registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names: dict[str, object] = {"__name__": "docs"}
    for line, block in blocks(page):
        code = compile("\n" * line + block, str(page), "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            exec(code, names)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        if not page.exists():
            continue
        for target in re.findall(r"\]\((?!http|#|mailto)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
