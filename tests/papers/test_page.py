"""The tables of docs/reproductions.md are those of the logs."""

from __future__ import annotations

from papers import page


def test_tables_say_what_the_logs_say() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.MARK.search(text)
    assert page.filled(text) == text, "run python -m papers.page"
