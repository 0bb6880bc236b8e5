"""Kernels for cohorts on CUDA against torch's own operations, client by client, in float64; what a CPU does with their layers.

Without a GPU, ``TRITON_INTERPRET=1`` and an installed triton run the same tests on a CPU.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import kernels, layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
cuda = pytest.mark.skipif(
    DEVICE == "cpu" and not (kernels.cohort.INTERPRETED and find_spec("triton")),
    reason="needs a CUDA device, or TRITON_INTERPRET=1 and triton",
)


def random(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(DEVICE).requires_grad_()


def compare(ours: Tensor, theirs: Tensor, inputs: list[Tensor], scale: float = 1e-11) -> None:
    assert torch.allclose(ours, theirs, atol=scale, rtol=scale)
    weight = torch.randn(theirs.shape, dtype=theirs.dtype, device=theirs.device)
    found, expected = (torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=scale * 100, rtol=scale * 100)


@cuda
@pytest.mark.parametrize("outputs", [4, 200], ids=["picture by picture", "all pictures at once"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((5, 5), (1, 1), (0, 0), (1, 1)), ((3, 2), (2, 1), (1, 2), (1, 2)), ((1, 1), (2, 2), (0, 0), (1, 1))],
)
def test_convolution(outputs: int, bias: bool, kernel: tuple[int, int], stride, padding, dilation) -> None:
    x, w = random(3, 5, 7, 11, 10), random(3, outputs, 7, *kernel)
    b = random(3, outputs) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    geometry = stride, padding, dilation

    def ours(*tensors: Tensor) -> Tensor:
        y = kernels.convolved(*tensors, *([] if bias else [None]), *geometry)
        assert y is not None
        return y

    theirs = torch.stack([F.conv2d(x[i], w[i], None if b is None else b[i], *geometry) for i in range(3)])
    compare(torch.vmap(ours)(*inputs), theirs, inputs)


@cuda
def test_patches_that_are_not_kept_are_laid_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cohort, "KEPT_BYTES", 0)
    x, w = random(2, 3, 2, 6, 6), random(2, 4, 2, 3, 3)
    ours = torch.vmap(lambda x, w: kernels.convolved(x, w, None, (1, 1), (1, 1), (1, 1)))(x, w)
    compare(ours, torch.stack([F.conv2d(x[i], w[i], padding=1) for i in range(2)]), [x, w])


@cuda
def test_pooling_with_ties_a_remainder_and_nan() -> None:
    x = random(2, 3, 4, 7, 9).detach().relu().requires_grad_()  # many ties at zero
    compare(
        torch.vmap(lambda x: kernels.pooled(x, (2, 3)))(x),
        F.max_pool2d(x.flatten(0, 1), (2, 3)).unflatten(0, (2, 3)),
        [x],
    )
    spoilt = x.detach().clone()
    spoilt[0, 0, 0, 0, 0] = torch.nan
    assert torch.vmap(lambda x: kernels.pooled(x, (2, 2)))(spoilt)[0, 0, 0, 0, 0].isnan()


@cuda
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(3, 6, 5, 4, 3), (2, 70, 3, 33, 40)], ids=["small", "several pieces"])
def test_normalisation(masked: bool, affine: bool, shape: tuple[int, ...]) -> None:
    clients, batch, channels = shape[:3]
    x = random(*shape)
    weight, bias = (random(clients, channels), random(clients, channels)) if affine else (None, None)
    mask = (torch.arange(batch) < batch - 2).double().expand(clients, batch).contiguous().to(DEVICE) if masked else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    real = batch - 2 if masked else batch

    def ours(packed: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return kernels.normalised(packed["x"], packed.get("mask"), packed.get("w"), packed.get("b"), 1e-5)

    packed = {k: v for k, v in {"x": x, "mask": mask, "w": weight, "b": bias}.items() if v is not None}
    y, mean, var, count = torch.vmap(ours)(packed)
    theirs = torch.stack(
        [
            F.batch_norm(x[i, :real], None, None, *((None, None) if weight is None else (weight[i], bias[i])), True)
            for i in range(clients)
        ]
    )
    # Rows of padding are normalised too, but count for nothing: cut off, their gradient is zero.
    compare(y[:, :real], theirs, inputs, 1e-9)
    flat = x[:, :real].transpose(1, 2).flatten(2)
    assert torch.allclose(mean, flat.mean(-1))
    assert torch.allclose(var, flat.var(-1, correction=0))
    assert torch.equal(count, torch.full_like(count, real * shape[3] * shape[4]))


@cuda
def test_layers_that_work_in_place_behind_the_kernels() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.ReLU(inplace=True),
        nn.Conv2d(4, 200, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(),
    ).double()  # fmt: skip
    copies = [copy.deepcopy(net).to(DEVICE) for _ in range(2)]
    with torch.no_grad():
        for p in copies[1].parameters():
            p.mul_(1.5)
    layers.prepare(net)
    leaves = {
        n: torch.stack([dict(c.named_parameters())[n].detach() for c in copies]) for n, _ in net.named_parameters()
    }
    leaves = {n: v.requires_grad_() for n, v in leaves.items()}
    buffers = {n: torch.stack([b.clone()] * 2).to(DEVICE) for n, b in net.named_buffers()}
    x = random(2, 6, 3, 8, 8).detach()

    def out(x: Tensor, leaves: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, {**leaves, **buffers}, (x,))

    with layers.entered(layers.Frame()):
        ours = torch.vmap(out)(x, leaves, buffers)
    theirs = torch.stack([c(part) for c, part in zip(copies, x, strict=True)])
    assert torch.allclose(ours, theirs, atol=1e-10)
    weight = torch.randn_like(theirs)
    found = torch.autograd.grad((ours * weight).sum(), list(leaves.values()))
    expected = torch.autograd.grad((theirs * weight).sum(), [p for c in copies for p in c.parameters()])
    for i, grad in enumerate(found):
        assert torch.allclose(grad, torch.stack([expected[i], expected[i + len(found)]]), atol=1e-8)
    assert torch.allclose(buffers["1.running_var"], torch.stack([c[1].running_var for c in copies]))


def test_on_a_cpu_the_layers_are_torchs_own() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    x = torch.randn(2, 1, 6, 6)
    before = net(x)
    layers.prepare(net)
    assert [type(m) for m in net] == [layers.CohortConv2d, layers.CohortMaxPool2d]
    assert torch.equal(net(x), before)
    layers.restore(net)
    assert [type(m) for m in net] == [nn.Conv2d, nn.MaxPool2d]
