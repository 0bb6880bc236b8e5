"""``fedloom report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.reports import make_report
from tests.cli.conftest import Cli
from tests.reports.conftest import written


def test_report_says_where_it_is(cli: Cli, tmp_path: Path) -> None:
    run, other = written(tmp_path / "a", 3), written(tmp_path / "b", 3, method="ditto()")
    assert cli("report", run).out == f"report: {run / 'report.html'}\n"
    found = cli("report", run, other, "-o", tmp_path / "both.html", "--title", "Two <runs>", "--json", "--no-tsne")
    assert json.loads(found.out) == {"report": str(tmp_path / "both.html")}
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<h1>Two &lt;runs&gt;</h1>" in text
    assert "ditto" in text
    assert cli("report", run, "--quiet").out == ""


def test_watch_goes_on_until_the_run_is_finished(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path / "run", 3)
    table = (run / "clients.csv").read_bytes()
    (run / "clients.csv").unlink()
    seen = []

    def sleep(seconds: float) -> None:
        seen.append((seconds, (run / "report.html").read_text(encoding="utf-8")))
        (run / "clients.csv").write_bytes(table)

    monkeypatch.setattr(make_report.time, "sleep", sleep)
    assert cli("report", run, "--watch", "5").out == f"report: {run / 'report.html'}\n"
    ((seconds, during),) = seen
    assert seconds == 5
    assert '<meta http-equiv="refresh" content="5">' in during
    assert "not finished" in during
    after = (run / "report.html").read_text(encoding="utf-8")
    assert "refresh" not in after
    assert "not finished" not in after


def test_mistakes(cli: Cli, tmp_path: Path) -> None:
    assert "is not a folder" in cli("report", tmp_path / "nowhere").mistake()
    assert "holds no run" in cli("report", tmp_path).mistake()
    run = written(tmp_path / "run", 2)
    (tmp_path / "file").write_text("")
    assert "cannot write" in cli("report", run, "-o", tmp_path / "file" / "report.html").mistake()
    (run / "run.toml").write_text("[")
    assert "damaged" in cli("report", run).mistake()
