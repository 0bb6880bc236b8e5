"""The documentation's site builds without a warning: navigation, links and anchors are checked by mkdocs."""

from __future__ import annotations

import html
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.spec.registry import METHODS, PLUGINS
from scripts import docs_pages

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'fedloom[docs]'")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'fedloom[docs]'")

ROOT = Path(__file__).parents[2]

if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("mkdocs.yml is not here: this is no clone of the repository", allow_module_level=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in home or page.stem == "index", page.name
    for name, table in (("methods", METHODS), ("plugins", PLUGINS)):
        built = {p.stem for p in (site / name).glob("*.html")} - {"index"}
        assert built == {n for n, e in table.items() if inspect.unwrap(e.fn).__module__.startswith("fedloom")}


def test_a_page_says_what_its_docstring_says(site: Path) -> None:
    for name in ("fedmap", "fedprox", "ditto"):
        entry = fl.describe(name)
        text = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
        words = html.unescape(re.sub(r"<[^>]+>", "", text))
        for formula in re.findall(r"``(.+?)``", (inspect.getdoc(entry.fn) or "").partition("Args:")[0]):
            assert " ".join(formula.split()) in " ".join(words.split()), (name, formula)
        assert entry.paper in words
        for key in entry.parameters:
            assert f"<code>{key}</code>" in text


def test_the_site_fetches_nothing(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+", text)


def test_sections_of_a_docstring() -> None:
    head, sections = docs_pages.split_docstring(
        "Sums :func:`fedloom.fit`.\n\nMore.\n\nArgs:\n    mu: strength.\n\nReference: A paper, eq. 3.\n\nExample:\n    >>> 1\n    1"
    )
    assert head == "Sums `fedloom.fit`.\n\nMore."
    assert sections == {"Args": "mu: strength.", "Reference": "A paper, eq. 3.", "Example": ">>> 1\n1"}
