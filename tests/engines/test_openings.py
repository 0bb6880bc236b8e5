"""The first layers of a network: a convolution, ReLU and pooling in one kernel, and the gradient of its filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from fedloom import chains, kernels, network
from fedloom.engines.vectorised import VectorisedEngine
from tests.engines.test_kernels import DEVICE, cuda
from tests.engines.test_tapped_kernels import returned
from tests.helpers import everything, federation, fit, gap

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
    if kernels.cohort.INTERPRETED:
        from fedloom.kernels import openings

        monkeypatch.setattr(openings, "_rounded", lambda x: x)


def plainly(x: Tensor, w: Tensor, b: Tensor | None, steps: Steps, window: tuple[int, int], six: bool) -> Tensor:
    """What torch makes of one client, in float64."""
    b = None if b is None else b.double()
    made = F.conv2d(x.double(), w.double(), b, steps[0], steps[1], steps[2])
    return F.max_pool2d((F.relu6 if six else F.relu)(made), window)


@cuda
@pytest.mark.parametrize("last", [False, True], ids=["plain", "last"])
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
    last: bool,
) -> None:
    clients = 2
    x, w = 2 * numbers(clients, 3, *size), numbers(clients if own else 1, filters[0], size[0], *filters[1:])
    b = numbers(len(w), filters[0]) if biased else None
    x[0, 1, 0, 0, 0] = torch.nan
    axes = (0, 0 if own else None, 0 if own and biased else None)
    given = x, w if own else w[0], b if own or b is None else b[0]

    def made(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = kernels.opened(x, w, b, steps, window, six=six, last=last)
        assert y is not None
        return y

    with torch.no_grad():
        ours = torch.vmap(made, axes)(*given)
    each = zip(x, w.expand(clients, *w.shape[1:]), [None] * 2 if b is None else b.expand(clients, -1), strict=True)
    theirs = torch.stack([plainly(*client, steps, window, six) for client in each])
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan().any()
    assert torch.allclose(ours.double(), theirs, rtol=TF32, atol=TF32 * 10, equal_nan=True)
    assert (ours.permute(0, 1, 3, 4, 2) if last else ours).is_contiguous()


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
            opened = kernels.opened_summed(x, w, b, steps, window, six=six, pooled=taps == 2)
            assert opened is not None
            return opened[0], *(t for summary in opened[1] for t in summary)
        y = kernels.opened(x, w, b, steps, window, six=six)
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
def test_numbers_are_rounded_to_the_nearest() -> None:
    """Of TF32, which has 10 bits behind the point: products of cut ones would all be too small."""
    from fedloom.kernels import openings

    x = torch.cat([numbers(5000), 1e30 * numbers(10), torch.tensor([0.0, torch.inf, -torch.inf], device=DEVICE)])
    kept = openings.rounded(x)
    assert ((kept - x).abs()[:-2] <= x[:-2].abs() * 2**-11).all()
    assert abs(float(((kept - x) / x)[:5000].mean())) < 1e-5 or kernels.cohort.INTERPRETED
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
        ours = torch.vmap(lambda x, w, b: kernels.opened(x, w, b, PLAIN, (2, 2)))(x, w, b)
    theirs = torch.stack([plainly(*client, PLAIN, (2, 2), False) for client in zip(x, w, b, strict=True)])
    assert ours.dtype is dtype
    assert torch.allclose(ours.double(), theirs, rtol=1 / 64, atol=1 / 16)


@cuda
def test_what_no_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = numbers(2, 3, 3, 8, 8), numbers(2, 8, 3, 3, 3), numbers(2, 8)

    def served(x: Tensor, w: Tensor, b: Tensor, steps: Steps = PLAIN, window: tuple[int, int] = (2, 2)) -> bool:
        found: list[bool] = []

        def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            found.append(kernels.opened(x, w, b, steps, window) is not None)
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
    assert kernels.opened(x[0], w[0], b[0], PLAIN, (2, 2)) is None  # outside of vmap
    with torch.enable_grad():
        assert kernels.fusions._opens(x[0], w[0], b[0], PLAIN, (2, 2), whole=False) is False
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not served(x, w, b)


@cuda
def test_where_a_model_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody listens in between; with own filters and with shared ones."""
    torch.manual_seed(0)
    body = nn.Conv2d(3, 5, 3, padding=1), nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)
    net = nn.Sequential(*body, nn.Conv2d(5, 4, 3), nn.ReLU6(), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(16, 2))
    built = network.build(net, numbers(2, 3, 8, 14), task="classification", device=DEVICE)
    x, leaves = numbers(2, 7, 3, 8, 14), {n: v.to(DEVICE) for n, v in built.start.items()}
    met: list[bool] = []
    plain = kernels.opened

    def opened(*args: object, **options: object) -> Tensor | None:
        y = plain(*args, **options)  # type: ignore[arg-type]
        met.append(y is not None)
        return y

    monkeypatch.setattr(kernels, "opened", opened)

    def made(wanted: str, own: bool, gradient: bool) -> list[Tensor]:
        mine = {n: torch.stack([v, v]) for n, v in leaves.items()} if own else {}
        return returned(built, leaves, mine, x, wanted, gradient=gradient)

    for wanted, own, gradient, expected in (
        ("", False, False, 2),
        ("", True, False, 2),
        ("3", True, False, 2),
        ("0", True, False, 1),
        ("2", False, False, 1),
        ("5", True, False, 1),
        ("", True, True, 2),
    ):
        met.clear()
        ours = made(wanted, own, gradient)
        with monkeypatch.context() as patch:
            patch.setattr(chains, "FUSE", False)
            theirs = made(wanted, own, gradient)
        assert sum(met) == expected
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=TF32, atol=TF32 * 10)


@cuda
def test_methods_that_open_what_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """MOON's two other models, FedMAP's sweep: as layer by layer, to TF32."""
    data = federation((9, 14, 5), (3, 8, 10), classes=2)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2))

    met: list[bool] = []
    plain = kernels.opened

    def opened(*args: object, **options: object) -> Tensor | None:
        met.append(True)
        return plain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "opened", opened)
    options = {
        "engine": VectorisedEngine(),
        "rounds": 2,
        "device": DEVICE,
        "precision": "fp32",
        "evaluate": {"every": 0},
    }
    for method in ("moon", "fedmap"):
        found = []
        for fuse in (True, False):
            met.clear()
            monkeypatch.setattr(chains, "FUSE", fuse)
            found.append(everything(fit(method, model, data, **options)))
            assert any(met) == fuse
        assert gap(*found) < TF32


@cuda
def test_what_has_a_gradient_itself_is_not_opened() -> None:
    x, w, b = numbers(2, 3, 3, 8, 8).requires_grad_(), numbers(2, 8, 3, 3, 3), numbers(2, 8)
    found: list[bool] = []

    def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found.append(kernels.opened(x, w, b, PLAIN, (2, 2)) is not None)
        found.append(kernels.opened(x.detach(), w, b, PLAIN, (2, 2)) is not None)
        return x

    torch.vmap(one)(x, w, b)
    assert found == [False, True]


def opening(*behind: nn.Module) -> nn.Module:
    """A model whose first layers are opened, with weights of which products are exact."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), *behind)
    for leaf in net.parameters():
        leaf.data = (16 * leaf.data).round() / 16
    return net


def after_an_epoch(method: Any, model: Callable[[], nn.Module]) -> Any:
    rows = [(coarse(n, 3, 8, 10).cpu().numpy(), np.arange(n) % 2) for n in (9, 14, 5)]
    data = fl.Federation.from_arrays([(own, own) for own in rows])
    options = {"engine": VectorisedEngine(), "rounds": 1, "epochs": 1, "batch_size": 16, "evaluate": {"every": 0}}
    return everything(fit(method, model, data, **options, device=DEVICE, precision="fp32"))


@cuda
@pytest.mark.parametrize(
    ("method", "through"), [("fedavg", "opened"), ("fedavg + isr", "opened_summed"), ("fedper", "opened")]
)
def test_training_with_opened_layers(method: str, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is as layer by layer, to TF32; also with ISR, which has what the ReLU returns summed up."""

    def model() -> nn.Module:
        return opening(nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2))

    met: list[str] = []
    for name in ("opened", "opened_summed"):
        plain = getattr(kernels, name)

        def noted(*args: object, _plain: Any = plain, _name: str = name, **options: object) -> Any:
            y = _plain(*args, **options)
            met.append(_name if y is not None else "")
            return y

        monkeypatch.setattr(kernels, name, noted)
    found = []
    for fuse in (True, False):
        met.clear()
        monkeypatch.setattr(chains, "FUSE", fuse)
        found.append(after_an_epoch(method, model))
        assert (through in met) == fuse
    assert gap(*found) < TF32


class Doubled(nn.Module):
    """Works in place, as a user's own layer may."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return x


@cuda
@pytest.mark.parametrize("overwritten", [False, True], ids=["lasting", "overwritten"])
def test_poolings_are_summed_up_on_the_way_unless_they_are_overwritten(
    overwritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pooling returned is read again on the way back."""

    def model() -> nn.Module:
        return opening(Doubled() if overwritten else nn.Identity(), nn.Flatten(), nn.Linear(120, 2))

    pooled: list[object] = []
    plain = kernels.opened_summed

    def opened_summed(*args: Any, **options: Any) -> Any:
        pooled.append(options["pooled"])
        return plain(*args, **options)

    monkeypatch.setattr(kernels, "opened_summed", opened_summed)
    method = fl.compose(fl.fedavg(), fl.isr(points=("1", "2")))
    found = []
    for fuse in (True, False):
        monkeypatch.setattr(chains, "FUSE", fuse)
        found.append(after_an_epoch(method, model))
    assert set(pooled) == {not overwritten}
    assert gap(*found) < TF32
