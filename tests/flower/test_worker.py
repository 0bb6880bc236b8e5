"""The worker beside a site's node: the same answers as without it, whatever happens to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

pytest.importorskip("flwr")
if not hasattr(socket, "AF_UNIX"):
    pytest.skip("there are no Unix sockets here", allow_module_level=True)

from flwr.app import Message, RecordDict

from fedloom.clients.messages import Post
from fedloom.flower import apps, wire
from fedloom.flower.error_codes import Code
from fedloom.flower.setup import bundle, project
from fedloom.flower.site import node
from fedloom.flower.site.site_data import SiteConfig
from fedloom.flower.site.worker import listen, serve
from tests.flower.consortium import wait_until
from tests.flower.sites import experiment, grid_of, people, write_sites
from tests.flower.test_serve import assert_same, deploy, simulated

METHODS = ["ditto", "fedavg"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker")
    write_sites(folder / "sites", people())
    return folder


@pytest.fixture(scope="module")
def worker(place: Path) -> Iterator[node.Worker]:
    config = SiteConfig.load(place / "sites" / "north" / "site.toml")
    with closing(node.Worker(place / "sites" / "north", config)) as made:
        made.start()
        made.wait()
        yield made


@pytest.fixture(scope="module")
def letters(place: Path, worker: node.Worker) -> list[tuple[Message, Message]]:
    """What went to the site north and what came back, in a deployment whose site north has a worker."""
    seen: list[tuple[Message, Message]] = []
    grid = grid_of({name: place / "sites" / name / "site.toml" for name in ("north", "south", "east")})
    grid.apps = dict.fromkeys(grid.apps, bundle.client)
    grid.configs[11]["worker"] = str(worker.address)
    grid.watch = lambda m, r: seen.append((m, r))
    table, here = experiment(METHODS), []
    answer = apps.answer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apps, "answer", lambda content, node: here.append(node["site"]) or answer(content, node))
        courses = deploy(place, table, people(), grid=grid)
    for method in METHODS:
        assert_same(courses[method], simulated(method, people(), table))
    assert set(here) == {"south", "east"}
    return [(m, r) for m, r in seen if m.metadata.dst_node_id == 11]


def parts(content: RecordDict) -> tuple[bytes, bytes, bytes]:
    found = bundle.parts_of(content)
    assert found is not None
    return found


def test_a_letter_gets_the_same_answer_from_worker_and_process(
    place: Path, letters: list[tuple[Message, Message]], worker: node.Worker
) -> None:
    facts = {"site": "north", "config": str(place / "sites" / "north" / "site.toml")}
    message, reply = letters[-2]
    assert {j.program for j in wire.unpack_letter(message.content).jobs} == {"own", "shared", "round"}
    again = bundle.from_worker(message.content, str(worker.address))
    assert again is not None
    for content in (again, apps.answer(message.content, facts)):
        assert parts(content) == parts(reply.content)


def test_nobody_else_can_call_it(worker: node.Worker) -> None:
    assert worker.address is not None
    assert stat.S_IMODE(worker.address.parent.stat().st_mode) == 0o700
    assert len(os.fsencode(worker.address)) < 100


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x05",
        b"\xff" * 8,
        (2**63).to_bytes(8, "little") + b"x",
        (1).to_bytes(8, "little") + b"\xff" + (0).to_bytes(8, "little"),
        (3).to_bytes(8, "little") + b"{}}",
    ],
)
def test_malformed_frames_do_not_end_it(
    letters: list[tuple[Message, Message]], worker: node.Worker, said: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(worker.address))
        line.sendall(said)
    assert worker.process is not None
    found = bundle.from_worker(letters[0][0].content, str(worker.address))
    assert found is not None
    assert wire.unpack_package(found).site == "north"
    assert worker.process.poll() is None


@pytest.mark.parametrize(
    ("outline", "size", "data"),
    [
        (b"{", b"", b""),
        (b"{}", b"9", b"\x80\x04pickle"),
        (b"[]" * 9, b"", b""),
        (b'{"format": 1}', b"4", b"\x93NUMPY\x09\x00"),
    ],
)
def test_a_letter_that_cannot_be_read_gets_a_code(
    worker: node.Worker, outline: bytes, size: bytes, data: bytes
) -> None:
    for _ in range(20):  # an empty last part once made the end of the conversation a matter of luck
        found = bundle.from_worker(bundle.content_of(outline, size, data), str(worker.address))
        assert found is not None
        assert wire.unpack_package(found).code == Code.MALFORMED


def test_it_goes_on_without_the_sites_store(
    place: Path, letters: list[tuple[Message, Message]], worker: node.Worker
) -> None:
    """Its log lies there: somebody takes the folder away, then there is something to log."""
    store, away = place / "sites" / "north" / "store", place / "away"
    store.rename(away)
    try:
        test_a_letter_that_cannot_be_read_gets_a_code(worker, b"{", b"", b"")
        assert "no JSON" in (store / "site.log").read_text()
    finally:
        shutil.rmtree(store, ignore_errors=True)
        away.rename(store)


def test_large_letters_go_both_ways(tmp_path: Path) -> None:
    """More bytes than fit beside the outline, and than a socket takes at once, through a worker that sends them back."""
    address = tmp_path / "w"
    job = wire.SiteJob("a", 0, "own", Post({"w": torch.arange(3e6)}, {}, {}, 1, 1, 1))
    letter = wire.pack_letter(wire.Letter("e", "", (job,)))
    with pytest.MonkeyPatch.context() as patch, listen(address) as door:
        patch.setattr("fedloom.flower.site.worker.answer", lambda content, node: content)
        threading.Thread(target=serve, args=(door, {}), daemon=True).start()
        back = bundle.from_worker(letter, str(address))
    assert back is not None
    assert parts(back) == parts(letter)
    assert torch.equal(wire.unpack_letter(back).jobs[0].post.leaves["w"], job.post.leaves["w"])


def test_the_sites_file_is_read_anew(place: Path, letters: list[tuple[Message, Message]], worker: node.Worker) -> None:
    path = place / "sites" / "north" / "site.toml"
    before = path.read_text()
    path.write_text('approve = "no"\n' + before)
    try:
        found = bundle.from_worker(letters[0][0].content, str(worker.address))
    finally:
        path.write_text(before)
    assert found is not None
    assert wire.unpack_package(found).code == Code.PLAN


def test_a_worker_that_dies_over_a_letter_is_done_without(
    tmp_path: Path, letters: list[tuple[Message, Message]], place: Path
) -> None:
    """One that reads the letter, or half of it, and is gone; and none at all."""
    address = node._socket_path()
    assert address is not None
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(address))
    door.listen()

    def die(half: bool) -> None:
        line, _ = door.accept()
        with line:
            bundle.receive(line)
            if not half:
                bundle.receive(line)
                bundle.receive(line)
                line.sendall((100).to_bytes(8, "little") + b"half an ans")

    grid = grid_of({"north": place / "sites" / "north" / "site.toml"})
    message, reply = letters[-2]
    with door:
        for half in (True, False):
            thread = threading.Thread(target=die, args=(half,))
            thread.start()
            assert bundle.from_worker(message.content, str(address)) is None
            thread.join()
    grid.apps, grid.configs[11]["worker"] = {11: bundle.client}, str(address)
    (key,) = grid.push_messages([Message(message.content, 11, "train")])
    (again,) = grid.pull_messages([key])
    assert parts(again.content) == parts(reply.content)
    address.unlink()
    address.parent.rmdir()


@pytest.mark.parametrize("address", [None, "", "nowhere", "x" * 300, "a\0b", 7])
def test_without_an_address_there_is_no_answer(letters: list[tuple[Message, Message]], address: Any) -> None:
    assert bundle.from_worker(letters[0][0].content, address) is None


THIN = """
import sys
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
sys.path.insert(0, sys.argv[1])
import fedloom_app
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
outline, data = (open(path, "rb").read() for path in sys.argv[3:5])
message = Message(fedloom_app.content_of(outline, b"", data), 11, "train")
message.metadata.__dict__["_message_id"] = "m"
reply = fedloom_app.client(message, Context(1, 11, {"site": "north", "worker": sys.argv[2]}, RecordDict(), {}))
outline, _, data = fedloom_app.parts_of(reply.content)
for path, part in zip(sys.argv[5:7], (outline, data)):
    open(path, "wb").write(part)
print(sorted({"torch", "fedloom"} & set(sys.modules)))
"""


def test_the_bundle_imports_no_torch_where_a_worker_answers(
    tmp_path: Path, letters: list[tuple[Message, Message]], worker: node.Worker
) -> None:
    (tmp_path / "fedloom_app.py").write_text(project.app_code())
    message, reply = letters[-2]
    files = [tmp_path / name for name in ("outline", "data", "outline back", "data back")]
    for path, part in zip(files, parts(message.content)[::2], strict=False):
        path.write_bytes(part)
    line = [sys.executable, "-c", THIN, str(tmp_path), str(worker.address), *map(str, files)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert (files[2].read_bytes(), files[3].read_bytes()) == parts(reply.content)[::2]


PARENT = """
import os, sys
from pathlib import Path
from fedloom.flower.site.node import Worker
from fedloom.flower.server.processes import started
from fedloom.flower.site.site_data import SiteConfig
from fedloom.flower.site.worker import listen, serve
folder = Path(sys.argv[1])
worker = Worker(folder, SiteConfig.load(folder / "site.toml"))
worker.start()
worker.wait()
with started(["sleep", "1000"], dict(os.environ)) as node:
    print(worker.process.pid, node.pid, worker.address, flush=True)
    sys.stdin.read()
"""


def test_worker_and_node_leave_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(tomli_w.dumps({"site": "north"}))
    line = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, node, address = parent.stdout.readline().split()
        assert Path(address).is_socket()
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(address).parent.exists(), 60)
    wait_until(lambda: not alive(int(pid)), 60)
    if sys.platform == "linux":
        wait_until(lambda: not alive(int(node)), 60)


def alive(pid: int) -> bool:
    """Whether a process still works: one that nobody waits for stays in the list after its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_that_died_is_started_again(letters: list[tuple[Message, Message]], worker: node.Worker) -> None:
    first, (message, reply) = worker.process, letters[-2]
    assert first is not None
    worker.start()
    assert worker.process is first
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert bundle.from_worker(message.content, str(worker.address)) is None
    worker.start()
    worker.wait()
    found = bundle.from_worker(message.content, str(worker.address))
    assert found is not None
    assert parts(found) == parts(reply.content)
