"""Convolution, ReLU and pooling in one kernel, and the gradient of its filters, against torch's layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.ops import dispatch
from tests.gpu.helpers import DEVICE, TF32, coarse, kernels, numbers

pytest.importorskip("triton")
from fedloom.gpu import conv_relu_pool as layers
from fedloom.gpu.conv_relu_pool import conv_relu_pool, conv_relu_pool_summary

Parameters = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
PLAIN: Parameters = ((1, 1), (0, 0), (1, 1))


@pytest.fixture(autouse=True)
def without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies float32, like the CPU with which it is compared."""
    if dispatch.INTERPRETED:
        monkeypatch.setattr(layers, "_to_tf32", lambda x: x)


def plain_layers(
    x: Tensor, w: Tensor, b: Tensor | None, steps: Parameters, window: tuple[int, int], relu6: bool
) -> Tensor:
    """Return the output of torch's layers for one client, in float64."""
    b = None if b is None else b.double()
    made = F.conv2d(x.double(), w.double(), b, steps[0], steps[1], steps[2])
    return F.max_pool2d((F.relu6 if relu6 else F.relu)(made), window)


@kernels
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("size", "filters", "steps", "window", "relu6", "biased"),
    [
        ((3, 12, 12), (32, 5, 5), PLAIN, (2, 2), False, True),
        ((1, 9, 11), (5, 3, 3), ((1, 1), (1, 1), (1, 1)), (2, 2), True, True),  # the windows leave a remainder
        ((3, 13, 17), (33, 3, 3), ((2, 2), (1, 2), (1, 1)), (3, 2), False, False),
        ((2, 14, 9), (6, 3, 2), ((1, 2), (0, 1), (2, 1)), (1, 2), False, True),
        ((14, 4, 4), (64, 3, 3), PLAIN, (2, 2), False, True),
    ],
)
def test_values(
    size: tuple[int, int, int],
    filters: tuple[int, int, int],
    steps: Parameters,
    window: tuple[int, int],
    relu6: bool,
    biased: bool,
    own: bool,
) -> None:
    clients = 2
    x, w = 2 * numbers(clients, 3, *size), numbers(clients if own else 1, filters[0], size[0], *filters[1:])
    b = numbers(len(w), filters[0]) if biased else None
    x[0, 1, 0, 0, 0] = torch.nan
    axes = (0, 0 if own else None, 0 if own and biased else None)
    given = x, w if own else w[0], b if own or b is None else b[0]

    def made(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = conv_relu_pool(x, w, b, steps, window, relu6=relu6)
        assert y is not None
        return y

    with torch.no_grad():
        ours = torch.vmap(made, axes)(*given)
    each = zip(x, w.expand(clients, *w.shape[1:]), [None] * 2 if b is None else b.expand(clients, -1), strict=True)
    theirs = torch.stack([plain_layers(*client, steps, window, relu6) for client in each])
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan().any()
    assert torch.allclose(ours.double(), theirs, rtol=TF32, atol=TF32 * 10, equal_nan=True)
    assert ours.is_contiguous()


@kernels
@pytest.mark.parametrize("taps", [0, 1, 2], ids=["no summary", "one summary", "two summaries"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("size", "filters", "steps", "window", "relu6", "biased"),
    [
        ((3, 12, 12), (32, 5, 5), PLAIN, (2, 2), False, True),
        ((1, 9, 12), (5, 3, 3), ((1, 1), (1, 1), (1, 1)), (3, 2), True, True),
        ((3, 13, 17), (33, 3, 3), ((2, 2), (1, 2), (1, 1)), (1, 2), False, False),
        ((2, 14, 10), (6, 3, 2), ((1, 2), (0, 1), (2, 1)), (5, 2), False, True),
        ((1, 20, 22), (64, 3, 3), ((1, 1), (1, 1), (1, 1)), (2, 2), False, True),  # several programs per image
    ],
)
def test_gradient_of_filters(
    size: tuple[int, int, int],
    filters: tuple[int, int, int],
    steps: Parameters,
    window: tuple[int, int],
    relu6: bool,
    biased: bool,
    own: bool,
    taps: int,
) -> None:
    """Also through the summaries of ReLU and pooling."""
    clients, batch = 2, 5
    x, w = coarse(clients, batch, *size), coarse(clients if own else 1, filters[0], size[0], *filters[1:])
    mine = [t.requires_grad_() for t in (w, coarse(len(w), filters[0]) if biased else None) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in mine]

    def made(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        w, b = (*given, None)[:2]
        assert w is not None
        if taps:
            opened = conv_relu_pool_summary(x, w, b, steps, window, relu6=relu6, pooled=taps == 2)
            assert opened is not None
            return opened[0], *(t for summary in opened[1] for t in summary)
        y = conv_relu_pool(x, w, b, steps, window, relu6=relu6)
        assert y is not None
        return (y,)

    given = mine if own else [t[0] for t in mine]
    ours = torch.vmap(made, (0, *[0 if own else None] * len(given)))(x, *given)
    each = [[t[i if own else 0] for t in wide] for i in range(clients)]
    maps = torch.stack(
        [F.conv2d(v.double(), *(*own_ones, None)[:2], *steps) for v, own_ones in zip(x, each, strict=True)]
    )
    maps = (F.relu6 if relu6 else F.relu)(maps)
    pooled = F.max_pool2d(maps.flatten(0, 1), window).unflatten(0, (clients, batch))
    theirs = (pooled, *summary(maps), *summary(pooled))[: len(ours)]
    weights = [torch.randn_like(y) for y in theirs]
    found, expected = (
        torch.autograd.grad(sum((y * v.to(y.dtype)).sum() for y, v in zip(ys, weights, strict=True)), given)
        for ys, given in ((ours, mine), (theirs, wide))
    )
    for a, b in zip((*ours, *found), (*theirs, *expected), strict=True):
        assert torch.allclose(a.double(), b, rtol=TF32, atol=TF32 * float(b.detach().abs().max()))


def summary(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means over positions of maps (clients, rows, channels, height, width) and of negative entropies."""
    logs = F.log_softmax(maps, 2)
    return maps.flatten(3).mean(3), (logs.exp() * logs).sum(2).flatten(2).mean(2)


@kernels
def test_gradient_of_each_output() -> None:
    """With transposed images, a bias per client and shared filters."""
    x, w, b = coarse(2, 3, 2, 6, 6).transpose(3, 4), coarse(5, 2, 3, 3).requires_grad_(), coarse(2, 5).requires_grad_()

    def made(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        opened = conv_relu_pool_summary(x, w, b, PLAIN, (2, 2), pooled=True)
        assert opened is not None
        return opened[0], *(t for summary in opened[1] for t in summary)

    maps = F.relu(torch.stack([F.conv2d(x[i].double(), w.double(), b[i].double()) for i in range(2)]))
    pooled = F.max_pool2d(maps.flatten(0, 1), 2).unflatten(0, (2, 3))
    ours, theirs = torch.vmap(made)(x, b), (pooled, *summary(maps), *summary(pooled))
    for mine, other in zip(ours, theirs, strict=True):
        slope = torch.randn_like(other)
        found = torch.autograd.grad(mine, (w, b), slope.float(), retain_graph=True)
        expected = torch.autograd.grad(other, (w, b), slope, retain_graph=True)
        for a, e in zip(found, expected, strict=True):
            assert torch.allclose(a, e, rtol=TF32, atol=TF32 * float(e.abs().max()))


@kernels
@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's
def test_summaries_of_the_largest_numbers() -> None:
    """The values of absent filters do not change a softmax over the largest floats."""
    x, w = torch.full((2, 1, 1, 2, 2), 3e38, device=DEVICE), torch.ones(2, 3, 1, 1, 1, device=DEVICE)
    w[:, 1:] = 0
    made = torch.vmap(lambda x, w: conv_relu_pool_summary(x, w, None, PLAIN, (2, 2), pooled=True))(x, w)
    assert made is not None
    assert [entropy.tolist() for _, entropy in made[1]] == [[[0.0]] * 2] * 2


@kernels
def test_round_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to nearest has no bias; truncation would make all products too small."""
    monkeypatch.undo()
    x = torch.cat([numbers(5000), 1e30 * numbers(10), torch.tensor([0.0, torch.inf, -torch.inf], device=DEVICE)])
    kept = layers.round_to_tf32(x)
    assert ((kept - x).abs()[:-2] <= x[:-2].abs() * 2**-11).all()
    assert not (kept.view(torch.int32) & 0x1FFF).any()
    assert abs(float(((kept - x) / x)[:5000].mean())) < 1e-5
    assert kept[-2:].tolist() == [torch.inf, -torch.inf]
    assert layers.round_to_tf32(x.new_full((1,), torch.nan)).isnan()
    assert layers.round_to_tf32(x.bfloat16()).dtype == torch.bfloat16


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types(dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    x, w, b = (numbers(*size, dtype=dtype) for size in ((2, 3, 3, 8, 8), (2, 8, 3, 3, 3), (2, 8)))
    with torch.no_grad():
        ours = torch.vmap(lambda x, w, b: conv_relu_pool(x, w, b, PLAIN, (2, 2)))(x, w, b)
    theirs = torch.stack([plain_layers(*client, PLAIN, (2, 2), False) for client in zip(x, w, b, strict=True)])
    assert ours.dtype is dtype
    assert torch.allclose(ours.double(), theirs, rtol=1 / 64, atol=1 / 16)


@kernels
def test_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = numbers(2, 3, 3, 8, 8), numbers(2, 8, 3, 3, 3), numbers(2, 8)

    def served(x: Tensor, w: Tensor, b: Tensor, steps: Parameters = PLAIN, window: tuple[int, int] = (2, 2)) -> bool:
        found: list[bool] = []

        def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            found.append(conv_relu_pool(x, w, b, steps, window) is not None)
            return x

        with torch.no_grad():
            torch.vmap(one)(x, w, b)
        return found[0]

    assert served(x, w, b)
    assert not served(x.double(), w.double(), b.double())
    assert not served(x, w, b.double())
    assert not served(x, w, b, window=(2, 3))
    assert not served(x, w, b, window=(7, 2))  # larger than the map
    assert not served(x[:1], w[:1], b[:1])  # one client alone
    assert not served(numbers(2, 3, 15, 8, 8), numbers(2, 8, 15, 3, 3), b)  # long patches
    assert not served(numbers(2, 3, 4, 8, 8), w, b)  # another number of channels
    assert not served(x, numbers(2, 65, 3, 3, 3), numbers(2, 65))
    large = x[:, :1, :, :1, :1].expand(2, 1, 3, 2100, 2100)
    assert not served(large, w, b, window=(1, 2))  # more programs per image than a grid has
    assert conv_relu_pool(x[0], w[0], b[0], PLAIN, (2, 2)) is None  # outside of vmap
    with torch.enable_grad():
        assert layers._cast_arguments(x[0], w[0], b[0], PLAIN, (2, 2), whole=False) is None
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not served(x, w, b)


@kernels
def test_images_with_gradient_are_left_to_torch() -> None:
    x, w, b = numbers(2, 3, 3, 8, 8).requires_grad_(), numbers(2, 8, 3, 3, 3), numbers(2, 8)
    found: list[bool] = []

    def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found.append(conv_relu_pool(x, w, b, PLAIN, (2, 2)) is not None)
        found.append(conv_relu_pool(x.detach(), w, b, PLAIN, (2, 2)) is not None)
        return x

    torch.vmap(one)(x, w, b)
    assert found == [False, True]
