"""OmniISR against plain PyTorch: the taps are written into the forward pass by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from fedloom import rng
from tests.helpers import everything, federation, fit, gap, own, shared
from tests.oracles import naive

ALPHA, LAM = 0.4, 0.05


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    )


class Supervised(nn.Module):
    """A network with adapters on some of its layers, and the objective written out."""

    def __init__(self, net: nn.Sequential, taps: list[int], channels: list[int], outputs: int) -> None:
        super().__init__()
        self.net, self.taps, self.outputs = net, taps, outputs
        self.adapters = nn.ModuleList(nn.Linear(c, outputs) for c in channels)
        draw = rng.stream(0, "adapters", "isr")
        for linear, c in zip(self.adapters, channels, strict=True):
            assert isinstance(linear, nn.Linear)
            bound = 1 / np.sqrt(c)
            linear.weight.data = torch.from_numpy(draw.uniform(-bound, bound, (outputs, c)))
            linear.bias.data = torch.from_numpy(draw.uniform(-bound, bound, (outputs,)))

    def features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        found = []
        for i, layer in enumerate(self.net):
            x = layer(x)
            if i in self.taps:
                found.append(x)
        return found, x


def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """CE + sum_m (alpha MI_m + lambda NE_m), straight from the text; pictures are pooled, tokens are (rows, T, D)."""
    assert isinstance(model, Supervised)
    features, output = model.features(x)

    def loss(logits: Tensor) -> Tensor:
        if model.outputs == 1:
            return F.binary_cross_entropy_with_logits(logits[:, 0], y.to(logits.dtype))
        return F.cross_entropy(logits, y)

    total = loss(output)
    for z, adapter in zip(features, model.adapters, strict=True):
        flat = z if z.dim() == 2 else z.flatten(2).transpose(1, 2) if z.dim() == 4 else z
        mean = flat if flat.dim() == 2 else flat.mean(1)
        p = torch.softmax(flat, -1)
        total = total + ALPHA * loss(adapter(mean)) + LAM * (p * p.log()).sum(-1).mean()
    return total


def oracle(
    model: Supervised,
    data: fl.Federation,
    loss: Callable[..., Tensor] = objective,
    *,
    cohort: int = 2,
    rounds: int = 3,
    personal: bool = False,
    lr: float = 0.1,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """FedAvg over network and adapters; with ``personal``, adapters stay where they are."""
    server = naive.state(model)
    kept: dict[str, dict[str, Tensor]] = {}
    for r in range(1, rounds + 1):
        people, states = naive.cohort(data, r, cohort), []
        for client in people:
            begin = {**server, **(kept.get(client.id, {}) if personal else {})}
            model.load_state_dict(begin)
            naive.train(model, client, naive.order(client, r), loss, lr=lr)
            states.append(naive.state(model))
            kept[client.id] = {k: v for k, v in states[-1].items() if k.startswith("adapters")}
        mean = naive.average(states, [float(len(c.train)) for c in people])
        server = {k: server[k] if personal and k.startswith("adapters") else v for k, v in mean.items()}
    return server, kept


def names(state: dict[str, Tensor], taps: list[int]) -> dict[str, Tensor]:
    """The oracle's names in fedloom's spelling."""
    found = {}
    for k, v in state.items():
        if k.startswith("net."):
            found[k[4:]] = v
        else:
            _, i, part = k.split(".")
            found[f"isr:{taps[int(i)]}.{part}"] = v
    return found


METHOD = f"isr(alpha={ALPHA}, lam={LAM})"


def test_federated_with_shared_adapters() -> None:
    data = federation((9, 14, 5))
    model = Supervised(naive.initial(deep), [1, 3, 5], [5, 4, 4], 3)  # type: ignore[arg-type]
    expected, _ = oracle(model, data)
    result = fit(f"fedavg + {METHOD}", deep, data, cohort=2)
    assert gap(names(expected, [1, 3, 5]), shared(result)) < 1e-10


def test_weights_that_follow_the_loss() -> None:
    """``alpha min(1, L / MI_m)`` and ``lambda L``, L and MI_m as numbers; alpha = 2 meets both sides of the minimum."""
    data, sides = federation((9, 14, 5)), set()
    model = Supervised(naive.initial(deep), [1, 3, 5], [5, 4, 4], 3)  # type: ignore[arg-type]

    def adaptive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(model, Supervised)
        features, output = model.features(x)
        task = total = F.cross_entropy(output, y)
        for z, adapter in zip(features, model.adapters, strict=True):
            information = F.cross_entropy(adapter(z), y)
            sides.add(bool(task < information))
            share = min(1.0, task.item() / information.item())
            entropy = (torch.softmax(z, 1) * torch.log_softmax(z, 1)).sum(1).mean()
            total = total + 2.0 * share * information + LAM * task.item() * entropy
        return total

    expected, _ = oracle(model, data, adaptive)
    assert sides == {True, False}
    for engine in ("loop", "vectorised"):
        method = f"omniisr(alpha=2.0, lam={LAM}, weights='adaptive')"
        assert gap(names(expected, [1, 3, 5]), shared(fit(method, deep, data, cohort=2, engine=engine))) < 1e-10


def test_personal_adapters_stay() -> None:
    data = federation((9, 14, 5))
    model = Supervised(naive.initial(deep), [1, 3, 5], [5, 4, 4], 3)  # type: ignore[arg-type]
    expected, kept = oracle(model, data, personal=True)
    result = fit(f"omniisr(alpha={ALPHA}, lam={LAM}, adapters='personal')", deep, data, cohort=2)
    assert gap(names(expected, [1, 3, 5]), shared(result)) < 1e-10
    for client, adapters in kept.items():
        mine = own(result, client)
        assert gap(names(adapters, [1, 3, 5]), {k: v for k, v in mine.items() if k.startswith("isr:")}) < 1e-10


def test_one_weight_per_tap() -> None:
    data = federation((9, 14))
    model = Supervised(naive.initial(deep), [1, 5], [5, 4], 3)  # type: ignore[arg-type]

    def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(model, Supervised)
        (first, last), output = model.features(x)
        entropy = (torch.softmax(last, 1) * torch.log_softmax(last, 1)).sum(1).mean()
        return F.cross_entropy(output, y) + 0.7 * F.cross_entropy(model.adapters[0](first), y) + 0.3 * entropy

    model.adapters = model.adapters[:1]
    expected, _ = oracle(model, data, weighted)
    result = fit("fedavg + isr(alpha=[0.7, 0], lam=[0, 0.3], spacing=2)", deep, data)
    assert gap(names(expected, [1]), shared(result)) < 1e-10


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 3, 3, padding=1), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


def test_pictures_are_pooled_for_mi_and_read_pixel_by_pixel_for_ne() -> None:
    data = federation((9, 7), (1, 6, 6))
    model = Supervised(naive.initial(pictures), [1, 4], [4, 3], 3)  # type: ignore[arg-type]
    expected, _ = oracle(model, data)
    method = f"fedavg + isr(alpha={ALPHA}, lam={LAM}, points=['1', '4'])"
    assert gap(names(expected, [1, 4]), shared(fit(method, pictures, data))) < 1e-10


class Mean(nn.Module):
    """Mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def tokens() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), Mean(), nn.Linear(4, 3))


def test_tokens_have_their_channels_last() -> None:
    data = federation((9, 7), (4, 3))
    model = Supervised(naive.initial(tokens), [1, 3], [5, 4], 3)  # type: ignore[arg-type]
    expected, _ = oracle(model, data)
    method = f"fedavg + isr(alpha={ALPHA}, lam={LAM}, points=2)"
    assert gap(names(expected, [1, 3]), shared(fit(method, tokens, data))) < 1e-10


def test_binary_task() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    data = federation((9, 7), classes=2)
    model = Supervised(naive.initial(net), [1], [5], 1)  # type: ignore[arg-type]
    expected, _ = oracle(model, data)
    result = fit(f"fedavg + {METHOD}", net, data, task="binary")
    assert gap(names(expected, [1]), shared(result)) < 1e-10


class Street(nn.Module):
    """A small dense network: two resolutions, output at the size of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 5, 3, stride=2, padding=1)
        self.head = nn.Conv2d(5, 3, 1)
        self.tap_points = ["one", "two"]

    def forward(self, x: Tensor) -> Tensor:
        z = self.two(torch.tanh(self.one(x)))
        return F.interpolate(self.head(torch.tanh(z)), size=x.shape[-2:], mode="bilinear", align_corners=False)


def streets(sizes: tuple[int, ...] = (6, 4)) -> fl.Federation:
    draw = np.random.default_rng(0)
    clients = []
    for n in sizes:
        x = draw.normal(size=(n, 2, 6, 8)).astype(np.float32)
        y = draw.integers(0, 3, size=(n, 6, 8))
        y[draw.random(y.shape) < 0.1] = 255
        clients.append(((x, y), (x[:2], y[:2])))
    return fl.Federation.from_arrays(clients)


def dense_objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Means over valid pixels of the labels for CE and MI, over latent pixels for NE."""
    net, adapters = model.net, model.adapters
    assert isinstance(net, Street)
    assert isinstance(adapters, nn.ModuleList)
    one = net.one(x)
    two = net.two(torch.tanh(one))
    total = F.cross_entropy(net(x), y, ignore_index=255)
    for z, adapter in zip((one, two), adapters, strict=True):
        assert isinstance(adapter, nn.Linear)
        q = F.interpolate(adapter(z.movedim(1, -1)).movedim(-1, 1), size=y.shape[-2:], mode="bilinear")
        p = torch.softmax(z, 1)
        total = total + ALPHA * F.cross_entropy(q, y, ignore_index=255) + LAM * (p * p.log()).sum(1).mean()
    return total


def test_dense_task() -> None:
    data = streets()
    model = Supervised(naive.initial(Street), [0, 1], [4, 5], 3)  # type: ignore[arg-type]
    server = naive.state(model)
    for r in (1, 2):
        states = []
        for client in data:
            model.load_state_dict(server)
            naive.train(model, client, naive.order(client, r), dense_objective)
            states.append(naive.state(model))
        server = naive.average(states, [6.0, 4.0])
    result = fit(f"fedavg + isr(alpha={ALPHA}, lam={LAM}, points=2)", Street, data, task="segmentation", rounds=2)
    expected = {k.removeprefix("net."): v for k, v in server.items() if k.startswith("net.")}
    expected |= {f"isr:{('one', 'two')[int(k[9])]}.{k[11:]}": v for k, v in server.items() if k[:8] == "adapters"}
    assert gap(expected, shared(result)) < 1e-10
    other = fit(
        f"fedavg + isr(alpha={ALPHA}, lam={LAM}, points=2)",
        Street,
        data,
        task="segmentation",
        rounds=2,
        engine="vectorised",
    )
    assert gap(everything(result), everything(other)) < 1e-10


def fresh() -> Supervised:
    return Supervised(naive.initial(deep), [1, 3, 5], [5, 4, 4], 3)  # type: ignore[arg-type]


def test_both_copies_of_ditto_are_supervised() -> None:
    data = federation((9, 14))
    result = fit(f"ditto(lam=0.3) + {METHOD}", deep, data)
    received = [naive.state(fresh()), *(oracle(fresh(), data, rounds=r)[0] for r in (1, 2, 3))]
    main = {k: v for k, v in shared(result).items() if not k.startswith("own/")}
    assert gap(names(received[3], [1, 3, 5]), main) < 1e-10
    for client in data:
        model = fresh()
        for r in (1, 2, 3):

            def pulled(m: nn.Module, x: Tensor, y: Tensor, r: int = r) -> Tensor:
                return objective(m, x, y) + 0.15 * naive.square_distance(m, received[r - 1])

            naive.train(model, client, naive.order(client, r, stream="own"), pulled)
        mine = {k[4:]: v for k, v in own(result, client.id).items() if k.startswith("own/")}
        assert gap(names(naive.state(model), [1, 3, 5]), mine) < 1e-10


@pytest.mark.parametrize("head_epochs", [1, 2])
def test_fedrep_supervises_the_body_phase_only(head_epochs: int) -> None:
    data = federation((9, 14))
    start = naive.initial(deep)
    model = Supervised(start, [1, 3, 5], [5, 4, 4], 3)  # type: ignore[arg-type]
    server, heads = naive.state(model), {}
    body = [n for n in server if not n.startswith("net.6")]
    for r in (1, 2):
        states = []
        for client in data:
            model.load_state_dict({**server, **heads.get(client.id, {})})
            head = [p for n, p in model.named_parameters() if n.startswith("net.6")]
            rest = [p for n, p in model.named_parameters() if not n.startswith("net.6")]
            steps = naive.order(client, r, stream="head", epochs=head_epochs)
            naive.train(model, client, steps, lambda m, x, y: F.cross_entropy(m.features(x)[1], y), params=head)
            naive.train(model, client, naive.order(client, r), objective, params=rest)
            states.append(naive.state(model))
            heads[client.id] = {k: v for k, v in states[-1].items() if k not in body}
        mean = naive.average(states, [9.0, 14.0])
        server = {k: mean[k] if k in body else v for k, v in server.items()}
    result = fit(f"fedrep(head_epochs={head_epochs}) + {METHOD}", deep, data, rounds=2)
    assert gap(names(server, [1, 3, 5]), shared(result)) < 1e-10
