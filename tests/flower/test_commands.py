"""`fedloom deploy` without a network: the folder of a consortium, the dry run, predictions, mistakes."""

from __future__ import annotations

import json
import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path

import click
import numpy as np
import pytest
import tomli_w
import torch
import typer

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedloom.cli import main
from fedloom.cli.deploy import app
from fedloom.errors import UserError
from fedloom.flower.experiment import Experiment, digest
from fedloom.flower.programs import manifest
from fedloom.flower.server import results
from fedloom.flower.setup.project import read_consortium
from fedloom.rounds import server
from fedloom.rounds.run import Run
from fedloom.tensors import Message
from tests.flower.sites import experiment, people, write_sites
from tests.flower.test_serve import deploy, simulated


def call(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(w) for w in words])
    return int(left.value.code or 0)


def test_consortium_of_another_format_is_refused_in_one_line(tmp_path: Path) -> None:
    assert call("deploy", "init", tmp_path / "c", "--sites", "north") == 0
    file = tmp_path / "c" / "consortium.toml"
    file.write_text(file.read_text().replace("format = 1", "format = 2"))
    with pytest.raises(UserError, match=r"^.*toml has format 2; expected format 1\. Make .*$"):
        read_consortium(tmp_path / "c")


def test_init_makes_certificates_and_keys_that_fit(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert call("deploy", "init", folder, "--sites", "north,süd 1", "--host", "fl.example.org") == 0
    ca = x509.load_pem_x509_certificate((folder / "server" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((folder / "server" / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fl.example.org" in names.get_values_for_type(x509.DNSName)
    secrets = [folder / "server" / "ca.key", folder / "server" / "server.key"]
    for place in (folder / "sites").iterdir():
        private = load_ssh_private_key((place / "site.key").read_bytes(), None)
        public = load_ssh_public_key((place / "site.pub").read_bytes())
        assert private.public_key() == public
        secrets.append(place / "site.key")
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    plan, _ = Experiment.load(folder / "experiment.toml")
    assert plan.sites == ("north", "süd 1")
    assert call("deploy", "init", folder, "--sites", "a") == 2
    assert '["flwr"]' in (folder / "server" / "app" / "pyproject.toml").read_text()


def test_compose_starts_commands_that_there_are(tmp_path: Path) -> None:
    """As far as can be seen without docker: the form of the file, its folders, and that commands take these options."""
    yaml = pytest.importorskip("yaml")
    folder = tmp_path / "c"
    assert call("deploy", "init", folder, "--sites", "north,süd 1", "--host", "server", "--port", "8555") == 0
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert len(services) == 3
    deploys = typer.main.get_command(app)
    assert isinstance(deploys, click.Group)
    for name, service in services.items():
        assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", name)
        assert set(service) <= {"image", "command", "volumes", "ports", "init", "restart"}
        program, group, command, *words = shlex.split(service["command"])
        assert (program, group, command) == ("fedloom", "deploy", "server" if name == "server" else "site")
        context = deploys.commands[command].make_context(command, list(words))
        (volume,) = service["volumes"]
        source, _, target = volume.partition(":")
        assert str(context.params["folder"]) == target
        assert (folder / source / ("consortium.toml" if name == "server" else "site.toml")).is_file()
    assert services["server"]["ports"] == ["8555:8555"]
    for place in (folder / "sites").iterdir():
        # Inside of compose's network a service is reached by its name, and the certificate has it.
        assert tomllib.loads((place / "site.toml").read_text())["server"]["address"] == "server:8555"


def test_openssl_agrees(tmp_path: Path) -> None:
    assert call("deploy", "init", tmp_path / "c", "--sites", "a") == 0
    place = tmp_path / "c" / "server"
    line = [
        "openssl",
        "verify",
        "-x509_strict",
        "-purpose",
        "sslserver",
        "-CAfile",
        place / "ca.crt",
        place / "server.crt",
    ]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert done.returncode == 0, done.stderr


def test_dry_run_lists_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, table = people((9, 14)), experiment(["scaffold", "fedrep"], sites=2)
    configs = write_sites(tmp_path, data)
    (tmp_path / "trial.toml").write_text(tomli_w.dumps(table))
    place = configs["north"].parent
    assert call("deploy", "site", place, "--experiment", tmp_path / "trial.toml", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["approve"] == digest((tmp_path / "trial.toml").read_text())
    assert found["rows"]["scaffold"] == {"train": 9, "test": 3, "val": 0}
    for method, listed in found["runs"].items():
        sent = upload(simulated(method, data, {**table, "rounds": 1}).run, "north")
        lines = listed["leaves_site"]
        assert {(t["entry"], t["name"]): t["shape"] for t in lines} == {
            (e, n): list(v.shape) for e, m in sent.items() for n, v in m.items()
        }
        assert sum(t["bytes"] for t in lines) == sum(
            v.numel() * v.element_size() for m in sent.values() for v in m.values()
        )
    assert any("head" in name for name in found["runs"]["fedrep"]["stays"])
    assert not any("head" in t["name"] for t in found["runs"]["fedrep"]["leaves_site"])
    assert call("deploy", "site", place, "--experiment", tmp_path / "trial.toml", "--dry-run") == 0
    assert "leaves every round: delta[" in capsys.readouterr().out


def upload(run: Run | None, client: str) -> Message:
    """What a client of the simulator sends in a round."""
    assert run is not None
    _, sent = server.dispatch(run.bound, run.state, run.cohort([client], 1))
    program = run.bound.method.schedule.round
    (reply,) = run.engine.run_cohort(run.bound, run.work, program, sent.post, [run.participant(client, sent)])
    return reply.message


def test_manifest_counts_bytes() -> None:
    assert manifest({"delta": {"w": ((2, 3), "float32")}})[0]["bytes"] == 24


def test_predict_at_the_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, table = people((9, 14)), experiment(["ditto"], sites=2)
    deploy(tmp_path, table, data)
    (tmp_path / "trial.toml").write_text(tomli_w.dumps(table))
    x = data["south"].test.x  # type: ignore[union-attr]
    np.savez(tmp_path / "new.npz", x=x.numpy())  # type: ignore[union-attr]
    place = tmp_path / "sites" / "south"
    words = ("--experiment", tmp_path / "trial.toml", "--method", "ditto", "--input", tmp_path / "new.npz")
    assert call("deploy", "predict", place, *words) == 0
    lines = [[float(v) for v in line.split(",")] for line in capsys.readouterr().out.splitlines()]
    expected = simulated("ditto", data, table).model("south")(x)
    torch.testing.assert_close(torch.tensor(lines), expected, rtol=1e-4, atol=1e-5)


def test_results_have_intervals_over_seeds(tmp_path: Path) -> None:
    data, table = people((9, 14)), experiment(["fedavg", "local"], sites=2, seeds=[0, 1, 2], rounds=1)
    deploy(tmp_path, table, data)
    found = results.read(tmp_path / "out")
    assert set(found) == {"fedavg", "local"}
    assert len(found["fedavg"]["north"]["accuracy"]) == 3
    assert "±" in results.text(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": []}, "methods"),
        ({"methods": ["fedavg", "fedavg"]}, "twice"),
        ({"sites": []}, "sites"),
        ({"inputs": {"shape": []}}, "shape"),
        ({"rounds": 0}, "rounds"),
        ({"colour": 3}, "colour"),
        ({"augment": {"flip": 0.5}}, "pictures"),
        ({"augment": {"flip": 2.0}}, "flip"),
        ({"batch_size": "half"}, "batch_size"),
    ],
)
def test_mistakes_in_an_experiment_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], words: str
) -> None:
    (tmp_path / "trial.toml").write_text(tomli_w.dumps({**experiment(["fedavg"]), **change}))
    assert call("deploy", "init", tmp_path / "c", "--experiment", tmp_path / "trial.toml") == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
