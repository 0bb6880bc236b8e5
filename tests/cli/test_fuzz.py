"""Whatever is written into a configuration or a method: an answer or one clear line, never a traceback."""

from __future__ import annotations

import contextlib
import io
import string
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom.cli import main
from fedloom.errors import UserError
from fedloom.runs import config_file
from fedloom.spec.options import option_names

CASES = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))

NAMES = [*fl.list_methods(), *fl.list_plugins(), "fedpox", "x", "inf", "None", "__import__", "lambda", "é"]
LITERALS = [
    "0",
    "-1",
    "1e400",
    "0.5",
    "inf",
    "-inf",
    "nan",
    "None",
    "True",
    "'a'",
    "[1, 2]",
    "{}",
    "(1,)",
    "x",
    "f(1)",
    "*a",
    "b'1'",
    "1j",
]
words = st.sampled_from(NAMES)
values = st.sampled_from(LITERALS)
keys = st.sampled_from(
    ["mu", "lam", "k", "norm", "points", "alpha", "eta_g", "pattern", "weight", "rounds", "preset", "q", "rule"]
)
arguments = st.lists(st.one_of(values, st.tuples(keys, values).map("=".join)), max_size=3).map(", ".join)
parts = st.one_of(words, st.tuples(words, arguments).map(lambda p: f"{p[0]}({p[1]})"))
joined = st.lists(parts, min_size=1, max_size=4).map(" + ".join)
noise = st.text(alphabet=string.printable + "é∑\x00", max_size=60)


@CASES
@given(st.one_of(joined, noise, st.tuples(joined, noise).map("".join)))
def test_text_form(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(UserError):
            assert isinstance(fl.method(text), fl.Method)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    noise,
    st.sampled_from(
        ["digits", "mlp", "sgd", "adam", "iid", "dirichlet(0.3)", "full", "all", "size", "cyclic", "hybrid", "binary"]
    ),
)
loose = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(noise, inner, max_size=3)),
    max_leaves=6,
)
sections = {name: option_names(cls) for name, cls in config_file.SECTIONS.items()}
sections |= {
    "optimizer": ("name", "lr", "momentum", "betas", "decay"),
    "model": ("name", "hidden", "width", "head", "norm"),
}


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration that is right in most places."""
    table: dict[str, Any] = {"method": "fedavg", "data": {"name": "digits", "clients": 3}, "rounds": 1}
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.one_of(st.sampled_from(config_file.KEYS), noise))
        if key in sections and draw(st.booleans()):
            inner = table.setdefault(key, {})
            if isinstance(inner, dict):
                inner[draw(st.one_of(st.sampled_from(sections[key]), noise))] = draw(loose)
        else:
            table[key] = draw(loose)
    return table


@CASES
@given(tables())
def test_tables(table: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):
        config_file.check(table)


@CASES
@given(st.one_of(noise, st.tuples(st.sampled_from(config_file.KEYS), noise).map("=".join), st.text(max_size=40)))
def test_assignments_and_files(text: str) -> None:
    table: dict[str, Any] = {"method": "fedavg", "data": {"name": "digits"}, "rounds": 3, "model": "mlp"}
    with contextlib.suppress(UserError):
        config_file.assign(table, text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(UserError):
            config_file.load(path)


def status(*argv: str) -> tuple[int, str]:
    """Exit status and stderr of the command line."""
    out, err = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("ignore")
        with pytest.raises(SystemExit) as leaving:
            main(argv)
    assert isinstance(leaving.value.code, int)
    return leaving.value.code, err.getvalue()


small = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(-2, 2),
    st.sampled_from(["digits", "x", "full", "size", "head", "gn"]),
)


@st.composite
def runnable(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of a short run with a few keys changed to something small."""
    table: dict[str, Any] = {
        "method": draw(
            st.sampled_from(["fedavg", "fedper", "ditto", "scaffold", "fedavg + clip(1.0)", "fedper + freeze('body')"])
        ),
        "data": {
            "name": "digits",
            "clients": 3,
            "partition": draw(st.sampled_from(["iid", "dirichlet(0.1)", "shards(2)"])),
        },
        "rounds": 1,
        "batch_size": 256,
        "model": {"name": "mlp", "hidden": [4]},
    }
    for _ in range(draw(st.integers(1, 3))):
        key = draw(
            st.sampled_from(
                [k for k in config_file.KEYS if k not in ("method", "device", "workers", "epochs", "rounds")]
            )
        )
        if key in sections:
            inner = table.setdefault(key, {})
            if isinstance(inner, dict):
                name = draw(st.sampled_from([n for n in sections[key] if n not in ("adapt_epochs",)]))
                inner[name] = draw(small)
        else:
            table[key] = draw(small)
    return table


@settings(CASES, max_examples=150)
@given(runnable())
def test_whole_runs(table: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder) / "c.toml", Path(folder) / "run"
        path.write_text(tomli_w.dumps(config_file.plain(table)))
        code, err = status("run", str(path), "--out", str(run), "--quiet")
        assert code in (0, 2), (code, err)
        assert "Traceback" not in err
        lines = [line for line in err.splitlines() if "warning" not in line]
        assert len(lines) == (0 if code == 0 else 1), err
        if code == 2:
            assert not (run / "models").exists()


@settings(CASES, max_examples=200)
@given(
    st.lists(
        st.one_of(noise, st.sampled_from(["run", "list", "--help", "--json", "predict", "theory", "cite", "-q"])),
        max_size=4,
    )
)
def test_command_lines(argv: list[str]) -> None:
    if "doctor" in argv or "demo" in argv:
        pytest.skip("these train")
    code, err = status(*argv)
    assert code in (0, 2), (argv, err)
    assert "Traceback" not in err
