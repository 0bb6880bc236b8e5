"""Kernels are compiled side by side in a pass of which nothing is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine, graphed, stepper
from fedloom.kernels import products, rehearsals
from tests.helpers import bn_mlp, everything, federation, fit, gap

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_on_a_cpu_there_is_nothing_to_rehearse() -> None:
    assert not rehearsals.rehearsed(lambda: pytest.fail("gone through"), torch.zeros(1))


def test_memory_that_nobody_has_written_to_holds_zeros() -> None:
    shape, like = (64, 3), torch.ones(5, 4)
    with rehearsals._Zeros():
        made = [torch.empty(shape), like.new_empty(shape), torch.empty_like(like), torch.empty_strided((2, 3), (1, 2))]
        kept = torch.ones(3) + 1
    assert not any(t.any() for t in made)
    assert kept.tolist() == [2.0] * 3


def test_nothing_is_kept_of_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone through in earnest on a CPU: the run is the same to the bit, with running statistics, values that steps carry and noise."""

    def run(method: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        options = {"epochs": 2, "batch_size": 7, "rounds": 2}
        return everything(
            fit(method, bn_mlp(), federation((24, 30, 18)), engine=VectorisedEngine(step="graphed"), **options)
        )

    methods = ("scaffold", "fedaims", "fedala", "moon")
    plain = [run(method) for method in methods]
    times = list[int]()

    def rehearsed(go, there: Tensor) -> bool:  # type: ignore[no-untyped-def]
        times.append(1)
        go()
        return True

    for module in (stepper, graphed):
        monkeypatch.setattr(module, "rehearsed", rehearsed)
    for method, before in zip(methods, plain, strict=True):
        assert gap(before, run(method)) == 0
    assert len(times) >= 3 * len(methods), "the first step, and each shape that is captured"


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(0.5))


def test_a_model_may_change_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        made = VectorisedEngine(step="graphed")
        return everything(fit("fedavg", InPlace(), federation((24, 30)), engine=made, precision="fp32", rounds=3))

    plain = run()
    for module in (stepper, graphed):
        monkeypatch.setattr(module, "rehearsed", lambda go, there: go() or True)
    assert gap(plain, run()) == 0


@gpu
def test_kernels_are_compiled_and_not_run() -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(*shape, device="cuda").requires_grad_() for shape in ((3, 64, 128), (3, 128, 128)))

    def gradients() -> list[Tensor]:
        y = torch.vmap(products.linear, in_dims=(0, 0, None))(x, w, None)
        return [y, *torch.autograd.grad((y**2).sum(), [x, w])]

    found: list[Tensor] = []
    assert rehearsals.rehearsed(lambda: found.extend(gradients()), x)
    assert not found[0].any(), "the product is a kernel's"
    expected = torch.einsum("cri,coi->cro", x, w)
    for ours, theirs in zip(gradients(), [expected, *torch.autograd.grad((expected**2).sum(), [x, w])], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@gpu
def test_an_error_is_left_to_who_runs_it_in_earnest() -> None:
    def fails() -> None:
        raise ValueError("in earnest")

    assert rehearsals.rehearsed(fails, torch.zeros(1, device="cuda"))
    data = fl.Federation.from_arrays([((torch.randn(20, 6).numpy(), torch.randint(0, 3, (20,)).numpy()), None)] * 2)
    fit("fedavg", bn_mlp(), data, device="cuda", engine=VectorisedEngine(), rounds=2)
