"""A whole deployment in this process: several methods in the same rounds, the simulator's numbers, faults, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.clientapp import ClientApp

import fedloom as fl
from fedloom.flower import wire
from fedloom.flower.experiment import Experiment
from fedloom.flower.server import results
from fedloom.flower.server.serve import Course, serve
from fedloom.flower.site.runner import client_app
from tests.flower.sites import experiment, grid_of, people, write_sites

METHODS = ["fedavg", "scaffold", "fedrep", "ditto", "fedaims", "fedavg + isr(points=1) + lag(k=1)", "fedmap"]


def deploy(
    tmp_path: Path, table: dict[str, Any], data: fl.Federation, watch: Any = None, **options: Any
) -> dict[str, Course]:
    text = tomli_w.dumps(table)
    grid = options.pop("grid", None) or grid_of(write_sites(tmp_path / "sites", data), watch)
    return serve(grid, Experiment.parse(text), text, tmp_path / "out", poll=0.0, **options)


def simulated(method: str, data: fl.Federation, table: dict[str, Any], **more: Any) -> fl.Result:
    model = lambda: fl.models.build("mlp", num_classes=3, sample_shape=(6,), hidden=[5])  # noqa: E731
    options = {k: table[k] for k in ("rounds", "epochs", "batch_size")} | more
    return fl.fit(method, model, data, optimizer=fl.sgd(lr=0.1), progress=False, engine="loop", **options)


def assert_same(course: Course, result: fl.Result) -> None:
    assert result.run is not None
    for name, value in result.run.state.leaves.items():
        if result.run.bound.specs[name].sent:
            assert torch.equal(value, course.run.state.leaves[name]), name
    assert [r["round"] for r in course.history] == [r["round"] for r in result.history]
    for mine, theirs in zip(course.history, result.history, strict=True):
        for key in ("loss", "accuracy", "accuracy_std", "global_accuracy", "global_loss", "train_loss", "bytes_up"):
            assert mine.get(key) == theirs.get(key), (mine["round"], key)
    for name, client in result.clients.items():
        assert course.run.last[name] == client.metrics


def test_methods_share_messages_and_give_the_simulators_numbers(tmp_path: Path) -> None:
    data, messages = people(), []
    table = experiment(METHODS)
    courses = deploy(tmp_path, table, data, lambda m, r: messages.append((m, r)))
    # Three sites say who they are, then get one message a round, and one more with the tests of the last.
    assert len(messages) == 3 * (1 + 3 + 1)
    for method in METHODS:
        assert_same(courses[method], simulated(method, data, table))
    first = wire.unpack_letter(messages[3][0].content)
    assert [job.run for job in first.jobs] == METHODS
    assert [job.program for job in wire.unpack_letter(messages[6][0].content).jobs].count("round") == len(METHODS)


def test_hybrid_mode_with_rows_at_the_server(tmp_path: Path) -> None:
    data = people()
    cloud = (data[0].train.x.numpy()[:4], data[0].train.y.numpy()[:4])  # type: ignore[union-attr]
    np.savez(tmp_path / "cloud.npz", x=cloud[0], y=cloud[1])
    table = experiment(["fedavg"], mode="hybrid", hybrid={"cloud": str(tmp_path / "cloud.npz"), "mixing": "adaptive"})
    courses = deploy(tmp_path, table, data)
    result = simulated("fedavg", data.with_cloud(cloud), table, mode="hybrid", hybrid={"mixing": "adaptive"})
    assert_same(courses["fedavg"], result)
    assert [r["alpha"] for r in courses["fedavg"].history] == [r["alpha"] for r in result.history]


def test_augmented_pictures(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(n, 1, 4, 4)).astype("float32"), draw.integers(0, 3, n)) for n in (9, 4, 14, 4)]
    data = fl.Federation.from_arrays([(rows[0], rows[1]), (rows[2], rows[3])], ["north", "south"])
    changes = {"flip": 0.5, "pad": 1, "colour": 0.3}
    form = {"shape": [1, 4, 4], "classes": ["a", "b", "c"]}
    table = experiment(["ditto"], sites=2, inputs=form, augment=changes)
    course = deploy(tmp_path, table, data)["ditto"]
    model = lambda: fl.models.build("mlp", num_classes=3, sample_shape=(1, 4, 4), hidden=[5])  # noqa: E731
    options = {k: table[k] for k in ("rounds", "epochs", "batch_size")}
    options |= {"optimizer": fl.sgd(lr=0.1), "progress": False, "engine": "loop"}
    assert_same(course, fl.fit("ditto", model, data, augment=changes, **options))
    plain = fl.fit("ditto", model, data, **options)
    assert plain.history[-1]["train_loss"] != course.history[-1]["train_loss"]


def test_nothing_personal_is_in_any_message(tmp_path: Path) -> None:
    """Searches every byte that leaves a site for its rows, its labels' order and its personal leaves."""
    data, replies = people(), []
    deploy(tmp_path, experiment(["ditto", "fedrep"]), data, lambda m, r: replies.append(r))
    kept = list((tmp_path / "sites").rglob("round-*.safetensors"))
    assert len(kept) == 3 * 2 * 2
    secrets = [row.tobytes() for client in data for row in client.train.x.numpy()]  # type: ignore[union-attr]
    from fedloom.flower.site.site_store import SiteStore

    for site in (tmp_path / "sites").iterdir():
        store = SiteStore(site / "store")
        (experiment_key,) = [p.name for p in (site / "store").iterdir() if p.is_dir()]
        for run in ("ditto", "fedrep"):
            state = store.load(experiment_key, run, 3)
            assert state.leaves
            secrets += [v.numpy().tobytes() for v in state.leaves.values() if v.numel() > 1]
    sent = [bytes(wire.bytes_of(r.content)) for r in replies]
    sent += [json.dumps(wire.outline_of(r.content)).encode() for r in replies]
    assert not any(secret in data for secret in secrets for data in sent)


def test_the_store_holds_what_predict_needs(tmp_path: Path) -> None:
    from fedloom.flower.site.predict import site_desk

    data, table = people(), experiment(["ditto", "fedavg"])
    deploy(tmp_path, table, data)
    for method in ("ditto", "fedavg"):
        desk = site_desk(tmp_path / "sites" / "south" / "site.toml", tomli_w.dumps(table), method)
        x = data["south"].test.x  # type: ignore[union-attr]
        expected = simulated(method, data, table).model("south")(x)
        assert torch.equal(desk.predict(x), expected)


# Faults ---------------------------------------------------------------------------------------------------


def replaced(app: ClientApp, change: Any) -> ClientApp:
    """An app whose packages are changed on their way out, once the site has said who it is."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Any) -> Message:
        reply = app(message, context)
        letter = wire.unpack_letter(message.content)
        return change(message, reply, letter) if any(j.program == "round" for j in letter.jobs) else reply

    return made


def changed_message(change: Any) -> Any:
    def apply(message: Message, reply: Message, letter: wire.Letter) -> Message:
        package = wire.unpack_package(reply.content)
        answers = tuple(
            wire.SiteReply(a.code, change(a.message), a.steps, a.loss, a.judged) if a.message else a
            for a in package.answers
        )
        return Message(wire.pack_package(wire.Package(package.site, {}, answers)), reply_to=message)

    return apply


def each(fn: Any) -> Any:
    return changed_message(lambda m: {e: {k: fn(v) for k, v in part.items()} for e, part in m.items()})


def garbage(message: Message, reply: Message, letter: wire.Letter) -> Message:
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    return Message(RecordDict({"tensors": ArrayRecord(), "outline": ConfigRecord({"json": "{"})}), reply_to=message)


def boom(message: Message, reply: Message, letter: wire.Letter) -> Message:
    from flwr.app import Error

    return Message(Error(code=5, reason="secret text"), reply_to=message)


FAULTS = {
    "nan": (each(lambda v: v * float("nan")), "not finite"),
    "shape": (each(lambda v: v[None]), "declared as"),
    "type": (each(lambda v: v.double()), "declared as"),
    "another model": (
        changed_message(lambda m: {e: {f"x.{k}": v for k, v in p.items()} for e, p in m.items()}),
        "not declared",
    ),
    "more than declared": (changed_message(lambda m: {**m, "rows": {"x": torch.ones(3)}}), "not declared"),
    "less than declared": (changed_message(lambda m: {"delta": dict(list(m["delta"].items())[1:])}), "missing"),
    "garbage": (garbage, "no JSON"),
    "dead": (boom, "not connected any more"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_rejected_and_named_and_the_run_goes_on(tmp_path: Path, fault: str) -> None:
    data = people()
    grid = grid_of(write_sites(tmp_path / "sites", data))
    change, reason = FAULTS[fault]
    grid.apps[12] = replaced(grid.apps[12], change)
    course = deploy(tmp_path, experiment(["fedavg"]), data, grid=grid)["fedavg"]
    for record in course.history:
        assert [r["client"] for r in record["rejected"]] == ["south"]
        assert reason in record["rejected"][0]["reason"]
    others = fl.Federation.from_arrays([data["north"], data["east"]], ["north", "east"])
    alone = simulated("fedavg", others, experiment(["fedavg"]))
    assert alone.run is not None
    for name, value in alone.run.state.leaves.items():
        assert torch.equal(value, course.run.state.leaves[name])


def test_a_lost_reply_changes_nothing_at_the_site(tmp_path: Path) -> None:
    """The site worked and kept a state, but its reply was lost: its next round starts from the state before."""
    data = people()
    grid = grid_of(write_sites(tmp_path / "sites", data))
    honest = grid.apps[12]
    grid.apps[12] = replaced(honest, lambda m, r, letter: boom(m, r, letter) if letter.jobs[-1].post.round == 2 else r)
    course = deploy(tmp_path, experiment(["ditto"], rounds=4), data, grid=grid)["ditto"]
    assert [len(r["rejected"]) for r in course.history] == [0, 1, 0, 0]
    jobs = course.run.clients["south"].rounds
    assert jobs == 3


def test_errors_at_a_site_leave_it_as_a_code_only(tmp_path: Path) -> None:
    from fedloom.flower.local import LocalGrid

    def open_workshop(letter: Any, context: Any) -> Any:
        raise RuntimeError("patient 4711")

    seen: list[Message] = []
    grid = LocalGrid({5: client_app(open_workshop, "north")}, watch=lambda m, r: seen.append(r))
    text = tomli_w.dumps(experiment(["fedavg"], sites=1))
    with pytest.raises(fl.RunError, match="north"):
        serve(grid, Experiment.parse(text), text, None, poll=0.0)
    outline = json.dumps(wire.outline_of(seen[0].content))
    assert "4711" not in outline
    assert json.loads(outline)["code"] == 16


@pytest.mark.parametrize("methods", [["ditto"], ["scaffold", "fedavg"]])
def test_a_server_that_dies_goes_on_where_it_was(tmp_path: Path, methods: list[str]) -> None:
    data, table = people(), experiment(methods, rounds=5)
    configs = write_sites(tmp_path / "sites", data)
    grid = grid_of(configs)
    count = 0

    def die(message: Message, reply: Message) -> None:
        nonlocal count
        count += 1
        if count == 3 + 3 * 3 + 1:  # in round 4, when one site has worked already
            raise KeyboardInterrupt

    grid.watch = die
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, table, data, grid=grid)
    grid.watch = None
    with pytest.raises(fl.UserError, match="--resume"):
        deploy(tmp_path, table, data, grid=grid)
    courses = deploy(tmp_path, table, data, grid=grid, resume=True)
    for method in methods:
        assert_same(courses[method], simulated(method, data, table))


def test_experiment_of_another_format_is_refused_in_one_line(tmp_path: Path) -> None:
    data, table = people(), experiment(["fedavg"], rounds=1)
    grid = grid_of(write_sites(tmp_path / "sites", data))
    deploy(tmp_path, table, data, grid=grid)
    (file,) = tmp_path.rglob("experiment.json")
    facts = json.loads(file.read_text())
    assert facts["format"] == 1
    file.write_text(json.dumps({**facts, "format": 2}))
    line = r"^.*experiment.json has format 2; expected format 1\. Run it again in another folder\.$"
    with pytest.raises(fl.UserError, match=line):
        deploy(tmp_path, table, data, grid=grid, resume=True)
    for read in (results.read, fl.report):
        with pytest.raises(fl.UserError, match=line):
            read(file.parent)


def test_missing_sites_are_named(tmp_path: Path) -> None:
    data = people()
    grid = grid_of(write_sites(tmp_path / "sites", data))
    del grid.apps[12]
    with pytest.raises(fl.RunError, match="south"):
        deploy(tmp_path, experiment(["fedavg"]), data, grid=grid)


def test_a_site_can_refuse_an_experiment(tmp_path: Path) -> None:
    data = people()
    configs = write_sites(tmp_path / "sites", data, approve="0" * 64)
    with pytest.raises(fl.RunError, match="did not accept"):
        deploy(tmp_path, experiment(["fedavg"]), data, grid=grid_of(configs))
    assert "not the approved one" in (tmp_path / "sites" / "north" / "store" / "site.log").read_text()
