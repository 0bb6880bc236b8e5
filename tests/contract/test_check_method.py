"""``fl.check_method``: every registered method passes, and each way to break the contract is caught and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.spec.parts import Stage, Term
from fedloom.spec.seen import Seen
from fedloom.spec.terms import data_term
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message

SHORT = {"fedaf": "fedaf(ipc=1, image_steps=2, server_epochs=1)"}
"""Settings for methods whose own are long."""


@pytest.mark.parametrize("name", fl.list_methods())
def test_every_method_keeps_the_contract(name: str) -> None:
    report = fl.check_method(SHORT.get(name, name))
    assert report, str(report)


def broken(term: Term) -> fl.Method:
    return replace(fl.fedavg(), objective=(data_term(), term), text="mine")


def test_a_term_that_cannot_be_mapped_is_named_by_line() -> None:
    def penalty(view: View, batch: Batch, seen: Seen) -> Tensor:
        chosen = view.logits[batch.y == 0]
        return chosen.sum()

    report = fl.check_method(broken(Term(owner="mine", fn=penalty)))
    assert not report
    (line,) = report.failed
    assert "mapped" in line.name
    assert "test_check_method.py" in str(line.problem)
    assert "view.logits[batch.y == 0]" in str(line.problem)


def test_a_mean_over_padding_rows_is_named() -> None:
    def penalty(view: View, batch: Batch, seen: Seen) -> Tensor:
        return view.logits.square().mean()

    report = fl.check_method(broken(Term(owner="mine", fn=penalty)))
    (line,) = report.failed
    assert "rows of a batch see each other" in str(line.problem)


def test_a_branch_on_a_tensor_is_named_by_line() -> None:
    def penalty(view: View, batch: Batch, seen: Seen) -> Tensor:
        loss = view.logits.square().mean()
        if loss > 1e9:
            loss = loss * 2
        return loss

    report = fl.check_method(broken(Term(owner="mine", fn=penalty)))
    assert any("if loss > 1e9" in str(c.problem) for c in report.failed)


def test_global_noise_is_found() -> None:
    def penalty(view: View, batch: Batch, seen: Seen) -> Tensor:
        return (view.logits * torch.rand(1)).mean()

    names = [c.name for c in fl.check_method(broken(Term(owner="mine", fn=penalty))).failed]
    assert "leaves the global generators alone" in names


def test_an_undeclared_entry_is_found() -> None:
    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, "secret": {"n": seen.n}}, memory

    method = fl.fedavg().adding(stages=(Stage(owner="mine", fn=tell),))
    assert any("no stage declares it" in str(c.problem) for c in fl.check_method(method).failed)


def test_a_personal_leaf_in_a_message_is_found() -> None:
    def leak(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        head = seen.names("personal")
        return {**message, "leak": {n: seen.final[n] for n in head}}, memory

    stage = Stage(owner="mine", fn=leak, entries={"leak": fl.fedavg().reducers()["delta"]})
    report = fl.check_method(fl.fedper().adding(stages=(stage,)))
    assert any("is a personal leaf" in str(c.problem) for c in report.failed)


def test_writing_in_place_is_found() -> None:
    def renew(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        memory["count"].add_(1)
        return message, memory

    stage = Stage(owner="mine", fn=renew, memory=lambda facts: {"count": torch.zeros(())})
    report = fl.check_method(fl.fedavg().adding(stages=(stage,)))
    assert any("changed in place" in str(c.problem) for c in report.failed)


def test_a_method_that_does_not_bind_is_one_line() -> None:
    report = fl.check_method("fedavg + personal('nothing.*')")
    assert len(report.checks) == 1
    assert "matches no leaf" in str(report)
