"""The first layers of a network: a convolution, ReLU and pooling in one kernel, and the gradient of its filters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.gpu import cohort, fusions
from tests.engines.test_kernels import DEVICE, cuda

Steps = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
PLAIN: Steps = ((1, 1), (0, 0), (1, 1))
TF32 = 4e-3
"""Products of numbers that have 10 bits behind the point."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


def coarse(*shape: int) -> Tensor:
    """Numbers of which products are exact: two ways to sum them up find the same maxima."""
    return (4 * numbers(*shape)).round() / 4


@pytest.fixture(autouse=True)
def as_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter, as what it is compared with on a CPU, multiplies float32."""
    if cohort.INTERPRETED:
        from fedloom.gpu import openings

        monkeypatch.setattr(openings, "_rounded", lambda x: x)


def plainly(x: Tensor, w: Tensor, b: Tensor | None, steps: Steps, window: tuple[int, int], six: bool) -> Tensor:
    """What torch makes of one client, in float64."""
    b = None if b is None else b.double()
    made = F.conv2d(x.double(), w.double(), b, steps[0], steps[1], steps[2])
    return F.max_pool2d((F.relu6 if six else F.relu)(made), window)


@cuda
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("size", "filters", "steps", "window", "six", "biased"),
    [
        ((3, 12, 12), (32, 5, 5), PLAIN, (2, 2), False, True),
        ((1, 9, 11), (5, 3, 3), ((1, 1), (1, 1), (1, 1)), (2, 2), True, True),  # a remainder that no window has
        ((3, 13, 17), (33, 3, 3), ((2, 2), (1, 2), (1, 1)), (3, 2), False, False),
        ((2, 14, 9), (6, 3, 2), ((1, 2), (0, 1), (2, 1)), (1, 2), False, True),
        ((14, 4, 4), (64, 3, 3), PLAIN, (2, 2), False, True),
    ],
)
def test_a_convolution_with_what_is_behind_it(
    size: tuple[int, int, int],
    filters: tuple[int, int, int],
    steps: Steps,
    window: tuple[int, int],
    six: bool,
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
        y = fusions.opened(x, w, b, steps, window, six=six)
        assert y is not None
        return y

    with torch.no_grad():
        ours = torch.vmap(made, axes)(*given)
    each = zip(x, w.expand(clients, *w.shape[1:]), [None] * 2 if b is None else b.expand(clients, -1), strict=True)
    theirs = torch.stack([plainly(*client, steps, window, six) for client in each])
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan().any()
    assert torch.allclose(ours.double(), theirs, rtol=TF32, atol=TF32 * 10, equal_nan=True)
    assert ours.is_contiguous()


@cuda
@pytest.mark.parametrize("taps", [0, 1, 2], ids=["pooled", "summed up", "both summed up"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("size", "filters", "steps", "window", "six", "biased"),
    [
        ((3, 12, 12), (32, 5, 5), PLAIN, (2, 2), False, True),
        ((1, 9, 12), (5, 3, 3), ((1, 1), (1, 1), (1, 1)), (3, 2), True, True),
        ((3, 13, 17), (33, 3, 3), ((2, 2), (1, 2), (1, 1)), (1, 2), False, False),
        ((2, 14, 10), (6, 3, 2), ((1, 2), (0, 1), (2, 1)), (5, 2), False, True),
        ((1, 20, 22), (64, 3, 3), ((1, 1), (1, 1), (1, 1)), (2, 2), False, True),  # several programs a picture
    ],
)
def test_gradient_of_filters(
    size: tuple[int, int, int],
    filters: tuple[int, int, int],
    steps: Steps,
    window: tuple[int, int],
    six: bool,
    biased: bool,
    own: bool,
    taps: int,
) -> None:
    """Also of what is summed up: what the ReLU returns, and what the pooling does."""
    clients, batch = 2, 5
    x, w = coarse(clients, batch, *size), coarse(clients if own else 1, filters[0], size[0], *filters[1:])
    mine = [t.requires_grad_() for t in (w, coarse(len(w), filters[0]) if biased else None) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in mine]

    def made(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        w, b = (*given, None)[:2]
        assert w is not None
        if taps:
            opened = fusions.opened_summed(x, w, b, steps, window, six=six, pooled=taps == 2)
            assert opened is not None
            return opened[0], *(t for summary in opened[1] for t in summary)
        y = fusions.opened(x, w, b, steps, window, six=six)
        assert y is not None
        return (y,)

    given = mine if own else [t[0] for t in mine]
    ours = torch.vmap(made, (0, *[0 if own else None] * len(given)))(x, *given)
    each = [[t[i if own else 0] for t in wide] for i in range(clients)]
    maps = torch.stack(
        [F.conv2d(v.double(), *(*own_ones, None)[:2], *steps) for v, own_ones in zip(x, each, strict=True)]
    )
    maps = (F.relu6 if six else F.relu)(maps)
    pooled = F.max_pool2d(maps.flatten(0, 1), window).unflatten(0, (clients, batch))
    theirs = (pooled, *summed_up(maps), *summed_up(pooled))[: len(ours)]
    weights = [torch.randn_like(y) for y in theirs]
    found, expected = (
        torch.autograd.grad(sum((y * v.to(y.dtype)).sum() for y, v in zip(ys, weights, strict=True)), given)
        for ys, given in ((ours, mine), (theirs, wide))
    )
    for a, b in zip((*ours, *found), (*theirs, *expected), strict=True):
        assert torch.allclose(a.double(), b, rtol=TF32, atol=TF32 * float(b.detach().abs().max()))


def summed_up(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Means over positions of maps (clients, rows, channels, height, width), and of negative entropies over channels."""
    logs = F.log_softmax(maps, 2)
    return maps.flatten(3).mean(3), (logs.exp() * logs).sum(2).flatten(2).mean(2)


@cuda
def test_each_output_alone() -> None:
    """What nobody uses adds nothing to the gradient; pictures that lie otherwise, a bias of each client's and filters that all share."""
    x, w, b = coarse(2, 3, 2, 6, 6).transpose(3, 4), coarse(5, 2, 3, 3).requires_grad_(), coarse(2, 5).requires_grad_()

    def made(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        opened = fusions.opened_summed(x, w, b, PLAIN, (2, 2), pooled=True)
        assert opened is not None
        return opened[0], *(t for summary in opened[1] for t in summary)

    maps = F.relu(torch.stack([F.conv2d(x[i].double(), w.double(), b[i].double()) for i in range(2)]))
    pooled = F.max_pool2d(maps.flatten(0, 1), 2).unflatten(0, (2, 3))
    ours, theirs = torch.vmap(made)(x, b), (pooled, *summed_up(maps), *summed_up(pooled))
    for mine, other in zip(ours, theirs, strict=True):
        slope = torch.randn_like(other)
        found = torch.autograd.grad(mine, (w, b), slope.float(), retain_graph=True)
        expected = torch.autograd.grad(other, (w, b), slope, retain_graph=True)
        for a, e in zip(found, expected, strict=True):
            assert torch.allclose(a, e, rtol=TF32, atol=TF32 * float(e.abs().max()))


@cuda
@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's
def test_summaries_of_the_largest_numbers() -> None:
    """As finite as torch's: what stands for filters that are none stays out of the way."""
    x, w = torch.full((2, 1, 1, 2, 2), 3e38, device=DEVICE), torch.ones(2, 3, 1, 1, 1, device=DEVICE)
    w[:, 1:] = 0
    made = torch.vmap(lambda x, w: fusions.opened_summed(x, w, None, PLAIN, (2, 2), pooled=True))(x, w)
    assert made is not None
    assert [entropy.tolist() for _, entropy in made[1]] == [[[0.0]] * 2] * 2


@cuda
def test_numbers_are_rounded_to_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of TF32, which has 10 bits behind the point: products of cut ones would all be too small."""
    from fedloom.gpu import openings

    monkeypatch.undo()  # here they are in the interpreter too

    x = torch.cat([numbers(5000), 1e30 * numbers(10), torch.tensor([0.0, torch.inf, -torch.inf], device=DEVICE)])
    kept = openings.rounded(x)
    assert ((kept - x).abs()[:-2] <= x[:-2].abs() * 2**-11).all()
    assert not (kept.view(torch.int32) & 0x1FFF).any()
    assert abs(float(((kept - x) / x)[:5000].mean())) < 1e-5
    assert kept[-2:].tolist() == [torch.inf, -torch.inf]
    assert openings.rounded(x.new_full((1,), torch.nan)).isnan()
    assert openings.rounded(x.bfloat16()).dtype == torch.bfloat16


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types(dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    x, w, b = (numbers(*size, dtype=dtype) for size in ((2, 3, 3, 8, 8), (2, 8, 3, 3, 3), (2, 8)))
    with torch.no_grad():
        ours = torch.vmap(lambda x, w, b: fusions.opened(x, w, b, PLAIN, (2, 2)))(x, w, b)
    theirs = torch.stack([plainly(*client, PLAIN, (2, 2), False) for client in zip(x, w, b, strict=True)])
    assert ours.dtype is dtype
    assert torch.allclose(ours.double(), theirs, rtol=1 / 64, atol=1 / 16)


@cuda
def test_what_no_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = numbers(2, 3, 3, 8, 8), numbers(2, 8, 3, 3, 3), numbers(2, 8)

    def served(x: Tensor, w: Tensor, b: Tensor, steps: Steps = PLAIN, window: tuple[int, int] = (2, 2)) -> bool:
        found: list[bool] = []

        def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            found.append(fusions.opened(x, w, b, steps, window) is not None)
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
    assert not served(large, w, b, window=(1, 2))  # more programs a picture than a grid has room for
    assert fusions.opened(x[0], w[0], b[0], PLAIN, (2, 2)) is None  # outside of vmap
    with torch.enable_grad():
        assert fusions._opens(x[0], w[0], b[0], PLAIN, (2, 2), whole=False) is None
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not served(x, w, b)


@cuda
def test_what_has_a_gradient_itself_is_not_opened() -> None:
    x, w, b = numbers(2, 3, 3, 8, 8).requires_grad_(), numbers(2, 8, 3, 3, 3), numbers(2, 8)
    found: list[bool] = []

    def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found.append(fusions.opened(x, w, b, PLAIN, (2, 2)) is not None)
        found.append(fusions.opened(x.detach(), w, b, PLAIN, (2, 2)) is not None)
        return x

    torch.vmap(one)(x, w, b)
    assert found == [False, True]
