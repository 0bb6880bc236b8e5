"""Puts the tables of the logs into docs/reproductions.md, between its markers; the words around them are written by hand.

PYTHONPATH=src python -m papers.page
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproductions.md"
MARK = re.compile(r"<!-- table (?P<module>[\w.]+) (?P<log>[\w./]+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """The page with every table made anew; a log that is not there yet leaves a word."""

    def table(found: re.Match[str]) -> str:
        log = ROOT / "papers" / found["log"]
        made = importlib.import_module(found["module"]).report(log) if log.exists() else ""
        return f"<!-- table {found['module']} {found['log']} -->\n\n{made or 'Not run yet.'}\n\n<!-- end -->"

    return MARK.sub(table, text)


def main() -> None:
    """Writes the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
