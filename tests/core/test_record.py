"""The record, composition, the text form and the registry."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedloom as fl
from fedloom.engines.choose_device import choose_device
from fedloom.network import inspect_model
from fedloom.network.bound_method import bind
from fedloom.spec.method import Plugin
from fedloom.spec.parts import Rule
from fedloom.spec.registry import METHODS, plugin, recipe
from fedloom.spec.text_form import can_rebuild, parse_call
from fedloom.tasks import TASKS
from tests.helpers import bn_mlp, federation, fit, mlp


def bound(method: str | fl.Method, make=None):  # type: ignore[no-untyped-def]
    module = (make or bn_mlp())()
    return bind(
        fl.method(method),
        inspect_model.build(module, torch.zeros(2, 6), task="classification", device=choose_device("cpu", "fp32")),
        TASKS["classification"],
    )


def test_a_method_is_frozen_data() -> None:
    method = fl.fedavg()
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.text = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        fl.Method(())  # type: ignore[misc, call-arg]


def test_text_form_equals_python() -> None:
    python = fl.compose(fl.fedprox(mu=0.01), fl.clip(1.0), fl.personal("head"))
    text = fl.method("fedprox(mu=0.01) + clip(1.0) + personal('head')")
    assert python.text == text.text == "fedprox(mu=0.01) + clip(norm=1.0) + personal(pattern='head')"
    assert fl.method(text.text).text == text.text
    assert fl.method("fedprox(mu=inf)").text == "fedprox(mu=inf)"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_text_of_a_recipe_is_complete(name: str) -> None:
    method = METHODS[name].fn()
    assert can_rebuild(method)


def test_a_changed_method_has_an_incomplete_text() -> None:
    stacked = fl.compose(fl.fedavg(), fl.clip(1.0))
    own = Plugin("clip(norm=1.0)", lambda method: method)
    assert can_rebuild(stacked)
    for changed in (
        stacked.adding(rules=(Rule(owner="mine", pattern="head", kind="personal"),)),
        dataclasses.replace(stacked, plain_sgd=True),
        fl.compose(fl.fedavg(), own),
        fl.compose(dataclasses.replace(fl.fedavg(), plain_sgd=True), fl.clip(1.0)),
    ):
        assert not can_rebuild(changed), changed.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedpox", "Did you mean 'fedprox'"),
        ("fedavg + proximl", "Did you mean 'proximal'"),
        ("fedprox(nu=1)", "Known: mu"),
        ("fedprox(mu=-1)", "expected mu >= 0"),
        ("fedprox(mu='a')", "expected a number"),
        ("fedprox(mu=True)", "expected a number"),
        ("fedprox(1, 2)", "hyper-parameters are mu"),
        ("fedavg + fedprox(0.1)", "use its plug-in 'proximal'"),
        ("fedavg + scaffold", "use its plug-in 'control_variates'"),
        ("fedavg + fedper", "use its plug-in 'personal'"),
        ("proximal(0.1)", "cannot stand first"),
        ("", "expected text"),
        ("fedavg +", "cannot be read"),
        ("fedavg - clip(1)", "not a name or a call"),
        ("fedprox(mu=__import__('os'))", "not a literal"),
        ("fedprox(**{})", "not allowed"),
        ("fedavg + noise(0.1) + clip(1.0)", "must follow"),
        ("scaffold + control_variates", "both"),
        ("local + control_variates", "does not upload"),
        ("fedprox(preset='nobody')", "unknown preset"),
    ],
)
def test_mistakes_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(fl.UserError) as caught:
        fl.method(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_presets_and_overrides() -> None:
    assert fl.method("fedprox(preset='fedaims')").text == "fedprox(mu=0.5)"
    assert fl.method("ditto(preset='fedaims', lam=0.2)").text == "ditto(lam=0.2, personal_epochs=5)"


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(fl.UserError):
        fl.method(text)


@given(
    st.lists(st.sampled_from(["fedavg", "clip(1.0)", "noise(0.1)", "proximal(0.1)", "+", "(", ")", "mu=3", "local"]))
)
def test_no_mixture_breaks_the_parser(parts: list[str]) -> None:
    with contextlib.suppress(fl.UserError):
        fl.method(" + ".join(parts))


def test_parse_call_reads_literals_only() -> None:
    assert parse_call("a(1, 'x', k=[1, 2], n=None) + b") == [("a", (1, "x"), {"k": [1, 2], "n": None}), ("b", (), {})]


def test_compose_wants_a_method_and_plugins() -> None:
    with pytest.raises(fl.UserError, match="can only stand first"):
        fl.compose(fl.fedavg(), fl.fedper())  # type: ignore[arg-type]
    with pytest.raises(fl.UserError, match="expected a plug-in"):
        fl.compose(fl.fedavg(), "clip")  # type: ignore[arg-type]
    with pytest.raises(fl.UserError, match="must be a method"):
        fl.compose(fl.clip(1.0))  # type: ignore[arg-type]


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(fl.UserError, match="taken"):

        @recipe()
        def fedavg() -> fl.Method:
            """Mine."""
            return fl.local()

    with pytest.raises(fl.UserError, match="taken"):

        @plugin()
        def local():  # type: ignore[no-untyped-def]
            """Mine."""
            return lambda method: method

    assert METHODS["fedavg"].paper


def test_lists_and_descriptions() -> None:
    assert fl.list_methods() == sorted(fl.list_methods())
    for name in [*fl.list_methods(), *fl.list_plugins()]:
        entry = fl.describe(name)
        assert entry.summary.endswith((".", ":", "``")) or ":" in entry.summary, name
        assert getattr(fl, name) is entry.fn, f"fl.{name} is missing"
    with pytest.raises(fl.UnknownName, match="fedavg"):
        fl.describe("fedavgg")


def test_two_owners_of_a_leaf_conflict() -> None:
    with pytest.raises(fl.Conflict, match=r"both decide whether '3\.weight' is shared"):
        bound(
            fl.fedavg().adding(
                rules=(Rule(owner="a", pattern="head", kind="personal"), Rule(owner="b", pattern="3.*", kind="frozen"))
            )
        )


def test_two_copies_of_one_name_conflict() -> None:
    from fedloom.spec.parts import Copy

    with pytest.raises(fl.Conflict, match="copy of the model named 'own'"):
        bound(fl.ditto().adding(copies=(Copy(owner="x", name="own"),)))


@pytest.mark.parametrize("method", ["local", "fedavg", "fedper", "ditto", "fedbn"])
def test_merge_inverts_split(method: str) -> None:
    made = bound(method)
    parts = made.split(made.start)
    again = made.merge(parts)
    assert list(again) == list(made.start)
    assert all(again[k] is made.start[k] for k in again)
    assert sum(len(p) for p in parts.values()) == len(made.start)
    with pytest.raises(fl.UserError, match="stranger"):
        made.split({"stranger": torch.zeros(1)})


@given(
    st.lists(
        st.sampled_from(["0.*", "1.weight", "*.bias", "head", "norm", "3.weight"]), min_size=1, max_size=3, unique=True
    )
)
def test_split_and_merge_for_random_partitions(patterns: list[str]) -> None:
    made = bound(fl.compose(fl.fedavg(), fl.personal(tuple(patterns))))
    assert list(made.merge(made.split(made.start))) == list(made.start)


def test_frozen_leaves_neither_train_nor_travel() -> None:
    def make() -> nn.Module:
        module = mlp()()
        assert isinstance(module, nn.Sequential)
        module[0].requires_grad_(False)
        return module

    result = fit("fedavg", make, federation())
    assert result.run is not None
    specs = result.run.bound.specs
    assert specs["0.weight"].kind == specs["0.bias"].kind == "frozen"
    assert torch.equal(result.run.state.leaves["0.weight"], result.run.bound.start["0.weight"])
    head = sum(v.numel() * 8 for n, v in result.run.bound.start.items() if n.startswith("2."))
    assert result.history[0]["bytes_up"] == head * 3
