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

from fedloom import frames, layers, network, swaps
from fedloom.gpu import chains, cohort, fusions
from fedloom.models import convnet3
from fedloom.ops import dispatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
cuda = pytest.mark.skipif(
    DEVICE == "cpu" and not (cohort.INTERPRETED and find_spec("triton")),
    reason="needs a CUDA device, or TRITON_INTERPRET=1 and triton",
)
dispatch.prepare_for(torch.device(DEVICE))


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
        y = cohort.convolved(*tensors, *([] if bias else [None]), *geometry)
        assert y is not None
        return y

    theirs = torch.stack([F.conv2d(x[i], w[i], None if b is None else b[i], *geometry) for i in range(3)])
    compare(torch.vmap(ours)(*inputs), theirs, inputs)


@cuda
def test_patches_that_are_not_kept_are_laid_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort, "KEPT_BYTES", 0)
    x, w = random(2, 3, 2, 6, 6), random(2, 4, 2, 3, 3)
    ours = torch.vmap(lambda x, w: cohort.convolved(x, w, None, (1, 1), (1, 1), (1, 1)))(x, w)
    compare(ours, torch.stack([F.conv2d(x[i], w[i], padding=1) for i in range(2)]), [x, w])


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
        return cohort.normalised(packed["x"], packed.get("mask"), packed.get("w"), packed.get("b"), 1e-5)

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
@pytest.mark.parametrize("masked", [True, False])
def test_normalisation_with_a_weight_that_all_clients_share(masked: bool) -> None:
    layer = layers.MaskedBatchNorm2d(3, track_running_stats=False).double().to(DEVICE).requires_grad_(False)
    layer.weight.copy_(random(3)), layer.bias.copy_(random(3) + 1)
    x = random(2, 5, 3, 4, 4).detach()
    mask = (torch.arange(5) < 4).double().expand(2, 5).contiguous().to(DEVICE)

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        with frames.entered(frames.Frame(mask=mask if masked else None)):
            return layer(x)

    assert torch.vmap(lambda x: torch.tensor(cohort.serves(x, shared=[layer.weight])))(x).all()
    ours, theirs = torch.vmap(fn)(x, mask), torch.stack([fn(*each) for each in zip(x, mask, strict=True)])
    real = 4 if masked else 5
    assert torch.allclose(ours[:, :real], theirs[:, :real], atol=1e-12)


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
    swaps.prepare(net)
    leaves = {
        n: torch.stack([dict(c.named_parameters())[n].detach() for c in copies]) for n, _ in net.named_parameters()
    }
    leaves = {n: v.requires_grad_() for n, v in leaves.items()}
    buffers = {n: torch.stack([b.clone()] * 2).to(DEVICE) for n, b in net.named_buffers()}
    x = random(2, 6, 3, 8, 8).detach()

    def out(x: Tensor, leaves: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, {**leaves, **buffers}, (x,))

    with frames.entered(frames.Frame()):
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
    swaps.prepare(net)
    assert [type(m) for m in net] == [layers.CohortConv2d, nn.MaxPool2d]
    assert torch.equal(net(x), before)
    swaps.restore(net)
    assert [type(m) for m in net] == [nn.Conv2d, nn.MaxPool2d]


@cuda
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("window", [(1, 1), (2, 2), (3, 2)], ids=["no pooling", "2x2", "3x2 with a remainder"])
@pytest.mark.parametrize("six", [False, True], ids=["relu", "relu6"])
def test_normalisation_activation_and_pooling_at_once(masked: bool, affine: bool, window, six: bool) -> None:
    clients, batch, channels, height, width = shape = (2, 7, 3, 11, 6)
    x = random(*shape)
    weight, bias = (random(clients, channels), random(clients, channels)) if affine else (None, None)
    if weight is not None and six:
        weight = (weight * 4).detach().requires_grad_()  # some values beyond 6
    real = batch - 2 if masked else batch
    mask = (torch.arange(batch) < real).double().expand(clients, batch).contiguous().to(DEVICE) if masked else None
    packed = {k: v for k, v in {"x": x, "mask": mask, "w": weight, "b": bias}.items() if v is not None}
    y, mean, var, count = torch.vmap(
        lambda p: fusions.chained(p["x"], p.get("mask"), p.get("w"), p.get("b"), 1e-5, window, six=six)
    )(packed)
    act = F.relu6 if six else F.relu
    theirs = [
        F.batch_norm(x[i, :real], None, None, *((None, None) if weight is None else (weight[i], bias[i])), True)
        for i in range(clients)
    ]
    inputs = [t for t in (x, weight, bias) if t is not None]
    compare(y[:, :real], torch.stack([F.max_pool2d(act(v), window) for v in theirs]), inputs, 1e-9)
    flat = x[:, :real].transpose(1, 2).flatten(2)
    assert torch.allclose(mean, flat.mean(-1))
    assert torch.allclose(var, flat.var(-1, correction=0))
    assert torch.equal(count, torch.full_like(count, real * height * width))


@cuda
@pytest.mark.parametrize("shape", [(2, 70, 3, 20, 21), (2, 3, 4, 46, 50)], ids=["several pieces", "several tiles"])
def test_chains_of_larger_maps(shape: tuple[int, ...]) -> None:
    x, weight, bias = random(*shape), random(2, shape[2]), random(2, shape[2])
    for window in ((1, 1), (2, 2)):
        y = torch.vmap(lambda *a, w=window: fusions.chained(a[0], None, a[1], a[2], 1e-5, w)[0])(x, weight, bias)
        theirs = [F.relu(F.batch_norm(x[i], None, None, weight[i], bias[i], True)) for i in range(2)]
        compare(y, torch.stack([F.max_pool2d(v, window) for v in theirs]), [x, weight, bias], 1e-9)


@cuda
def test_activation_and_pooling_at_once() -> None:
    x = (
        (random(2, 3, 4, 7, 9).detach() * 2).round().mul(2).requires_grad_()
    )  # ties, above zero too, and windows below it
    for window in ((2, 2), (2, 3)):
        for six, act in ((False, F.relu), (True, F.relu6)):
            ours = torch.vmap(lambda x, w=window, six=six: fusions.acted(x, w, six=six))(x)
            compare(ours, F.max_pool2d(act(x.flatten(0, 1)), window).unflatten(0, (2, 3)), [x])
    spoilt = x.detach().clone()
    spoilt[0, 0, 0, 1, 0] = torch.nan
    spoilt.requires_grad_()
    ours = torch.vmap(lambda x: fusions.acted(x, (2, 2)))(spoilt)
    theirs = F.max_pool2d(spoilt.flatten(0, 1).relu(), 2).unflatten(0, (2, 3))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours[0, 0, 0, 0, 0].isnan()
    found, expected = (torch.autograd.grad(y.sum(), spoilt)[0] for y in (ours, theirs))
    assert torch.equal(found, expected)


class Cohort:
    """Two clients of a network, with everything that comes out of a forward pass and its gradient."""

    def __init__(self, module: nn.Module, *, dtype: torch.dtype = torch.float64) -> None:
        self.net = network.build(module, random(2, 3, 8, 10).detach(), task="classify", dtype=dtype, device=DEVICE)

    def __call__(
        self, wanted: str = "", *, mask: bool = True, train: bool = True, still: str = ""
    ) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(0)
        noise = {n: torch.randn(2, *v.shape, generator=draw).to(v) for n, v in self.net.start.items()}
        leaves = {
            n: torch.stack([v, v]) + (0.3 * noise[n] if v.is_floating_point() else 0) for n, v in self.net.start.items()
        }
        leaves = {n: v.abs() if "running" in n else v for n, v in leaves.items()}
        names = {i.name for i in self.net.structure.leaves if i.trainable}
        for n in names:
            leaves[n].requires_grad_()
        x = random(2, 5, 3, 8, 10).detach().to(self.net.structure.dtype)
        rows = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], device=DEVICE).to(x.dtype)
        self.net.want(frozenset(wanted.split()))

        def out(x: Tensor, leaves: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            frame = frames.Frame(mask=rows if mask else None, wanted=frozenset(wanted.split()))
            y = self.net(leaves, x, frame, train=train, still=frozenset(still.split()))
            return y, frame.features

        y, features = torch.vmap(out)(x, leaves, rows)
        assert set(features) == set(wanted.split())
        loss = sum(((v * rows.reshape(2, 5, *[1] * (v.dim() - 2))) ** 2).sum() for v in (y, *features.values()))
        grads = torch.autograd.grad(loss, [leaves[n] for n in sorted(names)])
        rest = {f"buffer {n}": v for n, v in leaves.items() if n not in names}
        return {"y": y, **features, **dict(zip(sorted(names), grads, strict=True)), **rest}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which chains went through one kernel."""
    seen: list[str] = []
    for name in ("chained", "acted"):
        fn, place = getattr(fusions, name), 5 if name.startswith("chained") else 1

        def spy(*args, fn=fn, place=place, name=name, **options):
            seen.append(f"{name} {args[place][0]}x{args[place][1]}")
            return fn(*args, **options)

        monkeypatch.setattr(fusions, name, spy)
    return seen


def same(cohort: Cohort, monkeypatch: pytest.MonkeyPatch, *args, scale: float = 1e-9, **options) -> None:
    ours = cohort(*args, **options)
    with monkeypatch.context() as m:
        m.setattr(chains, "FUSE", False)
        theirs = cohort(*args, **options)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert ours[name].shape == value.shape
        assert torch.allclose(ours[name], value, atol=scale, rtol=scale), name


@cuda
def test_chains_end_where_somebody_listens(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = Cohort(convnet3(num_classes=3, in_channels=3, norm="bn_track", width=4))
    block = "body.block1"
    pooled = "chained 2x2"
    for wanted, expected in {
        "": [pooled],
        f"{block}.act": ["chained 1x1"],
        f"{block}.pool {block}.conv z": [pooled],
        f"{block}.norm": ["acted 2x2"],
        f"{block}.norm {block}.act {block}.pool": [],
    }.items():
        taken.clear()
        same(cohort, monkeypatch, wanted)
        assert taken == [*expected, pooled, pooled]
    taken.clear()
    same(cohort, monkeypatch, "", mask=False)  # all hooks are still there, none is wanted
    same(cohort, monkeypatch, "", still=f"{block}.norm")
    same(cohort, monkeypatch, "", train=False)
    assert taken == [pooled] * 3 + ["acted 2x2", pooled, pooled] + ["acted 2x2"] * 3
    heard: list[tuple[int, ...]] = []
    parts = dict(cohort.net.module.named_modules())
    handles = [
        parts[f"{block}.act"].register_forward_hook(lambda m, a, y: heard.append(tuple(y.shape))),
        parts["body.block2.pool"].register_forward_pre_hook(lambda m, a: heard.append(tuple(a[0].shape))),
    ]
    taken.clear()
    cohort()
    assert taken == ["chained 1x1", pooled]
    assert heard == [(5, 4, 8, 10), (5, 4, 4, 5)]
    for handle in handles:
        handle.remove()


@cuda
def test_chains_in_place_without_affine_shared_and_with_cumulative_statistics(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.ReLU()
            self.first = nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU6(inplace=True),
                nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
                nn.BatchNorm2d(4, affine=False), nn.ReLU(inplace=True), nn.BatchNorm2d(4), self.shared,
            )  # fmt: skip
            self.second = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2, stride=1))
            self.third = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))
            self.head = nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) - 0.5
            y = self.second(x - 0.1)
            z = self.third(x)  # which changes x
            return self.head(
                (y.mean((2, 3), keepdim=True) + z.mean((2, 3), keepdim=True) + x).flatten(2)[..., :3].flatten(1)
            )

    cohort = Cohort(Model())
    same(cohort, monkeypatch)
    assert taken == ["chained 1x1", "acted 2x2", "chained 1x1"]


@cuda
def test_chains_in_bfloat16_are_what_layers_return(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Values close to 1, of which many are equal in so few bits: the first of them gets the gradient.
    x, weight, bias = (
        random(2, 4, 3, 6, 6).detach().bfloat16(),
        random(2, 3).float() / 50,
        1 + random(2, 3).float() / 50,
    )
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    swaps.prepare(net)
    made = []
    for fuse in (True, False):
        monkeypatch.setattr(chains, "FUSE", fuse)
        inputs = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        buffers = {n: torch.stack([b.clone()] * 2).to(DEVICE) for n, b in net.named_buffers()}

        def out(x: Tensor, weight: Tensor, bias: Tensor, buffers: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(net, {"0.weight": weight, "0.bias": bias, **buffers}, (x,))

        with frames.entered(frames.Frame()):
            y = torch.vmap(out)(*inputs, buffers)
        made.append((y, *torch.autograd.grad((y.float() ** 2).sum(), inputs), *buffers.values()))
    assert taken == ["chained 2x2"]
    assert made[0][0].dtype == torch.bfloat16
    assert torch.equal(made[0][0], made[1][0])
    for ours, theirs in zip(*made, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-2)


def test_containers_are_copied_and_given_back_as_they_were() -> None:
    model = convnet3(num_classes=3, in_channels=3, norm="bn_track", width=4)
    kinds = [type(m) for m in model.modules()]
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    model.load_state_dict({k: torch.zeros_like(v) if "tracked" in k else v for k, v in model.state_dict().items()})
    swaps.prepare(model)
    chains.fuse(model)
    other = copy.deepcopy(model)
    block = other.body.block1
    assert "forward" in vars(block)
    assert block.forward.__self__ is block
    assert "forward" not in vars(other.body)  # nothing in it to be taken at once
    assert torch.equal(model(x), before)
    assert torch.equal(other(x), before)
    swaps.restore(other)
    assert [type(m) for m in other.modules()] == kinds
    assert all(vars(m).keys() == vars(n).keys() for m, n in zip(other.modules(), convnet3().modules(), strict=True))
    assert torch.equal(other(x), before)
