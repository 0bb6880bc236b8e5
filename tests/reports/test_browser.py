"""A report in a real browser: no errors, charts that are drawn, tables that sort and filter, methods that hide."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from tests.reports.conftest import written

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

# Runs before the page's own script, and after it.
BEFORE = """<script>
window.problems = [];
window.addEventListener("error", (e) => problems.push(String(e.message)));
document.addEventListener("securitypolicyviolation", (e) => problems.push("blocked " + e.blockedURI));
console.error = (...words) => problems.push(words.join(" "));
</script>"""
AFTER = """<script>
(() => {
  const all = (what) => Array.from(document.querySelectorAll(what));
  const column = (i) => all("table.clients tbody tr").filter((r) => !r.hidden).map((r) => r.cells[i].dataset.v);
  const found = { ready: document.body.dataset.ready };
  const charts = all("svg.chart");
  found.charts = charts.length;
  found.empty = charts.filter((c) => c.getBoundingClientRect().width < 100 || !c.querySelector("polyline, circle, rect")).length;
  found.wide = document.documentElement.scrollWidth - innerWidth;
  const heads = all("table.clients thead button");
  const last = heads.length - 1;
  heads[last].click(); found.down = column(last);
  heads[last].click(); found.up = column(last);
  found.sort = heads[last].parentElement.getAttribute("aria-sort");
  heads[0].click(); found.names = column(0);
  const filter = document.getElementById("client-filter");
  filter.value = "C0001"; filter.dispatchEvent(new Event("input"));
  found.filtered = column(0); found.count = document.getElementById("client-count").textContent;
  filter.value = ""; filter.dispatchEvent(new Event("input"));
  const key = all("[data-toggle]")[0];
  const mine = all(`[data-s="${key.dataset.toggle}"]`);
  key.click(); found.hidden = mine.every((g) => getComputedStyle(g).display === "none");
  key.click(); found.shown = mine.every((g) => getComputedStyle(g).display !== "none");
  const chart = document.querySelector("svg.curves"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX: box.left + box.width * 0.4, clientY: box.top + 50 }));
  found.tip = document.getElementById("tip").textContent;
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  found.themes = [before, getComputedStyle(document.body).backgroundColor];
  found.problems = problems;
  const out = document.createElement("pre");
  out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>"""


def browse(page: Path, folder: Path) -> dict[str, Any]:
    """What the page does in a browser, by its own account."""
    text = page.read_text(encoding="utf-8")
    tried = folder / "tried.html"
    tried.write_text(
        text.replace("<style>", BEFORE + "<style>", 1).replace("</body>", AFTER + "</body>"), encoding="utf-8"
    )
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
    command = [
        BROWSER or "",
        *flags.split(),
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,1600",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", tried.as_uri()],
        capture_output=True,
        timeout=120,
        env={**os.environ, "HOME": str(folder)},
    )
    dom = done.stdout.decode("utf-8", "replace")
    assert '<pre id="found">' in dom, done.stderr.decode("utf-8", "replace")[-2000:]
    return json.loads(unescape(dom.split('<pre id="found">')[1].split("</pre>")[0]))  # type: ignore[no-any-return]


@needs_browser
def test_in_a_browser(tmp_path: Path, runs: dict[str, fl.Result]) -> None:
    many = [written(tmp_path / name, 30, method=f"{name}()") for name in ("local", "fedavg", "ditto")]
    found = browse(fl.report(many, tmp_path / "many.html"), tmp_path)
    assert found["problems"] == []
    assert found["ready"] == "yes"
    assert found["charts"] > 8
    assert found["empty"] == 0
    assert found["wide"] <= 0, "the page scrolls sideways"
    up, down = [float(v) for v in found["up"]], [float(v) for v in found["down"]]
    assert up == sorted(up)
    assert down == sorted(up, reverse=True)
    assert len(set(up)) > 10
    assert found["sort"] == "ascending"
    assert found["names"] == sorted(found["names"])
    assert found["filtered"] == ["c0001"]
    assert found["count"] == "1 client"
    assert found["hidden"]
    assert found["shown"]
    assert found["tip"].startswith("round ")
    assert "fedavg: 0." in found["tip"]
    assert found["themes"][0] != found["themes"][1]


@needs_browser
def test_every_kind_of_chart_in_a_browser(tmp_path: Path, runs: dict[str, fl.Result]) -> None:
    found = browse(fl.report([r.path for r in runs.values() if r.path], tmp_path / "all.html"), tmp_path)
    assert found["problems"] == []
    assert found["empty"] == 0
    assert found["wide"] <= 0
    assert found["charts"] > 25
