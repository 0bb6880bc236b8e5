"""What a report holds, section by section, and what it does with runs that lack something."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.reports.read_runs import collect
from fedloom.reports.report_data import Book
from fedloom.reports.svg import fixed
from tests.helpers import federation
from tests.reports.conftest import MODEL, OPTIONS, written
from tests.reports.page import Page, check


def made(out: Path, *sources: object) -> Page:
    return check(Page(fl.report(list(sources), out / "report.html")))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page(runs: dict[str, fl.Result], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return made(tmp_path_factory.mktemp("report"), *(r.path for r in runs.values()))


def test_every_section_that_has_data_is_there(page: Page) -> None:
    wanted = ["headline", "learning", "clients", "partition", "projection", "gap", "conflict", "terms", "prototypes"]
    wanted += ["hybrid", "diagnostics", "cost", "client-curves", "client-table", "repeat"]
    assert page.sections == wanted
    for key in wanted[1:-2]:
        section = page.section(key)
        assert section is not None
        assert section.all("svg", "chart"), key


def test_headline_numbers_are_those_of_the_runs(page: Page, runs: dict[str, fl.Result]) -> None:
    section = page.section("headline")
    assert section is not None
    rows = {r.inside[0].words: r for r in section.all("tbody")[0].all("tr")}
    for key, label in (("local", "local"), ("federated", "fedavg"), ("hybrid", "fedavg · hybrid"), ("aims", "fedaims")):
        cells = rows[label].inside
        assert float(cells[1].attributes["data-v"]) == runs[key].summary().mean
        if key != "local":
            over = fl.gain(runs[key], runs["local"])
            assert float(cells[4].attributes["data-v"]) == pytest.approx(over.mean)
            assert cells[5].words == f"{over.helped:.0%}"
    best = max(runs.values(), key=lambda r: r.summary().mean or 0.0)
    assert fixed(best.summary().mean) in section.all("strong")[-1].words


def test_gains_have_a_bar_per_client_with_its_value(page: Page, runs: dict[str, fl.Result]) -> None:
    section = page.section("clients")
    assert section is not None
    charts = {
        c.attributes["aria-label"].split(" over local")[0].split(" of ")[-1]: c for c in section.all("svg", "gains")
    }
    over = fl.gain(runs["lag"], runs["local"])
    tips = {r.attributes["data-tip"] for r in charts["fedavg + lag(k=1)"].all("rect", "bar")}
    assert tips == {f"{name}: {value:+.4g}" for name, value in over.clients.items()}
    assert len(section.all("svg", "strips")[0].all("circle")) == 3 * len(runs)


def test_conflict_map_has_every_layer_and_round(page: Page, runs: dict[str, fl.Result]) -> None:
    section = page.section("conflict")
    assert section is not None
    cells = {r.attributes["data-tip"].split(", personal")[0] for r in section.all("rect") if "data-tip" in r.attributes}
    history = runs["lag"].history
    told = {f"{n}, round {r['round']}: {v:.4g}" for r in history for n, v in r["lag"]["score"].items()}
    assert cells == told
    assert len(section.all("rect", "mark")) == sum(
        len({n.rpartition(".")[0] for n in r["lag"]["personal"]}) for r in history
    )


def test_gap_is_centralised_less_the_others(page: Page, runs: dict[str, fl.Result]) -> None:
    section = page.section("gap")
    assert section is not None
    cells = section.all("tbody")[0].all("tr")[0].inside
    top, sites, both = (runs[m].summary().mean for m in ("centralised", "federated", "hybrid"))
    assert [float(c.attributes["data-v"]) for c in cells[1:]] == pytest.approx(
        [top, sites, top - sites, both, top - both]
    )


def test_curves_carry_their_values(page: Page, runs: dict[str, fl.Result]) -> None:
    section = page.section("learning")
    assert section is not None
    chart = json.loads(section.all("svg", "curves")[0].attributes["data-chart"])
    lines = {line["n"]: line for line in chart["lines"]}
    assert lines["local"]["y"] == pytest.approx([r["accuracy"] for r in runs["local"].history], rel=1e-4)
    shown = json.loads(page.section("hybrid").all("svg", "curves")[1].attributes["data-chart"])  # type: ignore[union-attr]
    assert shown["lines"][0]["y"] == pytest.approx([r["alignment"] for r in runs["hybrid"].history], rel=1e-4)


def test_partition_counts_rows_and_classes(page: Page, data: fl.Federation) -> None:
    section = page.section("partition")
    assert section is not None
    tips = [r.attributes["data-tip"] for r in section.all("rect")]
    counts = data.summary().counts
    for i, client in enumerate(data.ids):
        assert f"{client}: {counts[i].sum()} rows" in tips
        assert {f"{client}: {n} of class {c} ({n / counts[i].sum():.0%})" for c, n in enumerate(counts[i]) if n} <= set(
            tips
        )


def test_one_run_in_memory_and_of_one_client(tmp_path: Path) -> None:
    result = fl.fit("fedavg", MODEL, federation((9,)), **{**OPTIONS, "rounds": 1})
    page = made(tmp_path, result)
    assert page.sections == ["headline", "learning", "cost", "client-table", "repeat"]
    assert "its one client" in page.section("headline").words  # type: ignore[union-attr]
    assert "given in Python" in page.section("repeat").words  # type: ignore[union-attr]


class Stop(Exception):
    pass


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_got(tmp_path: Path, data: fl.Federation) -> None:
    def stop(record: fl.rounds.run.Record) -> None:  # type: ignore[name-defined]
        if record["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        fl.fit("fedavg", MODEL, data, out=tmp_path / "run", **{**OPTIONS, "rounds": 9}, callbacks=[stop])
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"round": 3, "accura')
    with open(tmp_path / "run" / "curves.jsonl", "a") as file:
        file.write('{"round": 3, "cli')
    page = made(tmp_path, tmp_path / "run")
    words = page.section("headline").words  # type: ignore[union-attr]
    assert "2 of 9 rounds" in words
    assert "middle of a line" in words
    rows = page.section("client-table").all("tbody")[0].all("tr")  # type: ignore[union-attr]
    assert len(rows) == len(data)


def test_a_folder_without_extra_files_has_fewer_sections(tmp_path: Path, runs: dict[str, fl.Result]) -> None:
    assert runs["proto"].path is not None
    old = shutil.copytree(runs["proto"].path, tmp_path / "old")
    for name in ("data.json", "curves.jsonl"):
        (old / name).unlink()
    shutil.rmtree(old / "checkpoint")
    found = made(tmp_path, old).sections
    assert not {"partition", "projection", "client-curves", "prototypes"} & set(found)
    assert {"learning", "clients", "client-table"} <= set(found)


def test_damaged_extras_are_left_out(tmp_path: Path, runs: dict[str, fl.Result]) -> None:
    assert runs["proto"].path is not None
    bad = shutil.copytree(runs["proto"].path, tmp_path / "bad")
    (bad / "data.json").write_text("{")
    (bad / "checkpoint" / "LATEST").write_text("../../elsewhere")
    assert not {"partition", "prototypes"} & set(made(tmp_path, bad).sections)


def test_runs_without_an_evaluation_or_with_holes_in_it(tmp_path: Path) -> None:
    path = written(tmp_path / "run", 4)
    lines = [
        {"round": i, "train_loss": None if i == 2 else 1.0 / i, "accuracy": None, "seconds": 0.1} for i in (1, 2, 3)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("curves.jsonl", "clients.csv"):
        (path / name).unlink()
    page = made(tmp_path, path)
    assert "no accuracy to show" in page.section("headline").words  # type: ignore[union-attr]
    assert "clients" not in page.sections


def test_a_thousand_clients(tmp_path: Path) -> None:
    local = written(tmp_path / "local", 1000, method="local()")
    page = made(tmp_path, written(tmp_path / "run", 1000), local)
    assert len(page.source) < 2_500_000
    (gains,) = page.section("clients").all("svg", "gains")  # type: ignore[union-attr]
    assert len(gains.all("polygon", "bar")) == 2
    assert len(page.section("client-table").all("tbody")[0].all("tr")) == 1000  # type: ignore[union-attr]
    partition = page.section("partition")
    assert partition is not None
    assert len(partition.all("rect", "plain")) == 120
    assert "120 of 1,000 clients" in partition.words
    assert len(page.section("client-curves").all("polyline", "thin")) == 120  # type: ignore[union-attr]


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    path = written(tmp_path / "run", 3)
    evil = "<script>alert('x')</script>&\"'"
    for name in ("clients.csv", "curves.jsonl", "data.json"):
        text = (path / name).read_text()
        safe = json.dumps(evil)[1:-1] if name != "clients.csv" else '"' + evil.replace('"', '""') + '"'
        (path / name).write_text(text.replace("c0001", safe))
    page = made(tmp_path, path)
    assert len(page.root.all("script")) == 1
    assert evil in page.section("client-table").words  # type: ignore[union-attr]


def test_seeds_are_one_series_with_an_interval(tmp_path: Path) -> None:
    for seed in range(3):
        written(tmp_path / f"run{seed}", 5 + seed, seed=seed, data={"name": "made", "seed": seed})
    page = made(tmp_path, tmp_path)
    runs, comparisons, notes = collect([tmp_path])
    (series,) = Book(runs, comparisons, notes).series
    half = 4.30265 * statistics.stdev(series.finals) / 3**0.5
    headline = page.section("headline")
    assert headline is not None
    assert float(headline.all("tbody")[0].all("td")[1].attributes["data-v"]) == pytest.approx(half, rel=1e-5)
    chart = json.loads(page.section("learning").all("svg", "curves")[0].attributes["data-chart"])  # type: ignore[union-attr]
    assert chart["lines"][0]["h"][-1] - chart["lines"][0]["y"][-1] == pytest.approx(half, rel=1e-2)


def test_natural_clients_are_the_same_whichever_way_rows_are_cut(tmp_path: Path) -> None:
    for seed in range(2):
        written(
            tmp_path / f"natural{seed}", 4, seed=seed, data={"name": "made", "partition": "natural()", "seed": seed}
        )
    page = made(tmp_path, tmp_path)
    rows = page.section("client-table").all("tbody")[0].all("tr")  # type: ignore[union-attr]
    assert [r.inside[0].words for r in rows] == ["c0000", "c0001", "c0002", "c0003"]
    runs, _, _ = collect([tmp_path])
    mean = statistics.fmean(r.values["c0002"] for r in runs)
    value = next(c for c in rows[2].inside if c.words == fixed(mean))
    assert float(value.attributes["data-v"]) == pytest.approx(mean)


def test_runs_that_differ_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    for k in (2, 5):
        written(tmp_path / f"run{k}", 3, epochs=k)
    written(tmp_path / "hybrid", 3, epochs=2, mode="hybrid")
    runs, _, _ = collect([tmp_path])
    labels = {s.label for s in Book(runs).series}
    assert labels == {"fedavg · epochs=2", "fedavg · epochs=5", "fedavg · hybrid"}


def test_a_comparison_with_a_cell_that_failed(tmp_path: Path, data: fl.Federation) -> None:
    options = {"seeds": 2, "rounds": 2, "jobs": 1, "progress": False, "baseline": "local"}
    done = fl.compare(["local", "fedavg"], model=MODEL, data=data, out=tmp_path / "grid", **options)
    assert len(done.done) == 4
    (done.cells[0].path / "run.toml").write_text("not toml [")
    page = made(tmp_path, tmp_path / "grid")
    assert "tables" in page.sections
    assert "damaged" in page.section("headline").words  # type: ignore[union-attr]


def test_a_comparison_over_modes_has_the_gap(tmp_path: Path, data: fl.Federation) -> None:
    sweep = {"mode": ["centralised", "federated"], "epochs": [1, 2]}
    grid = fl.compare(
        "fedavg", model=MODEL, data=data, sweep=sweep, seeds=1, rounds=1, jobs=1, progress=False, out=tmp_path / "grid"
    )
    section = made(tmp_path, grid).section("gap")
    assert section is not None
    rows = section.all("tbody")[0].all("tr")
    assert [r.inside[0].words for r in rows] == ["fedavg · epochs=1", "fedavg · epochs=2"]
    one = [c.result.summary().mean for c in grid.of(seed=0) if c.options["epochs"] == 1]
    assert [float(c.attributes["data-v"]) for c in rows[0].inside[1:3]] == one


def test_pictures_are_put_into_the_page(tmp_path: Path) -> None:
    path = written(tmp_path / "run", 3)
    (path / "pictures").mkdir()
    (path / "pictures" / "city%20one.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    page = made(tmp_path, path)
    (image,) = page.section("pictures").all("img")  # type: ignore[union-attr]
    assert image.attributes["src"].startswith("data:image/png;base64,iVBOR")
    assert "client city one" in image.attributes["alt"]


def test_what_cannot_be_reported_is_said(tmp_path: Path) -> None:
    with pytest.raises(fl.UserError, match="is not a folder"):
        fl.report(tmp_path / "nowhere")
    with pytest.raises(fl.UserError, match=r"holds no run \(run.toml is missing"):
        fl.report(tmp_path)
    empty = written(tmp_path / "empty", 2)
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(fl.UserError, match="no round yet"):
        fl.report(empty)
    a = written(tmp_path / "a", 2)
    b = written(tmp_path / "b", 2, resolved={"primary": "mse", "higher_is_better": False})
    with pytest.raises(fl.UserError, match="different metrics"):
        fl.report([a, b])


def test_where_it_is_written(tmp_path: Path) -> None:
    a, b = written(tmp_path / "x" / "a", 2), written(tmp_path / "x" / "b", 2)
    assert fl.report(a) == (a / "report.html").resolve()
    assert fl.report([a, b]) == (tmp_path / "x" / "report.html").resolve()
    assert fl.report(a, tmp_path / "new" / "page.html") == tmp_path / "new" / "page.html"
    assert fl.report(a, tmp_path) == tmp_path / "report.html"
