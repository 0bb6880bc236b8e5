"""Which features of a forward pass are kept as they are, and which as copies because a layer behind them works in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import frames, models, network

IN_PLACE = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU(inplace=True),
    nn.Linear(64, 2),
)  # fmt: skip


def dense(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), layer, nn.Linear(4, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(c, 4, 3, padding=1) for c in (3, 4))
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 2)

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.middle(self.first(x)).mean((2, 3)))
        return y


class Residual(Model):
    def middle(self, x: Tensor) -> Tensor:
        y = self.act(self.second(x))
        y += x
        return y


class ChangedView(Model):
    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)
        y[:, 1:].mul_(2)
        return self.act(y)


class ChangedInAnotherLayout(Model):
    """``reshape`` copies here, but returns a view of maps whose channels are last."""

    def middle(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(-1, 4)
        rows += 1
        return self.act(self.second(x) + rows.mean())


class ChangedData(Model):
    def middle(self, x: Tensor) -> Tensor:
        x.data.mul_(3)
        return self.act(self.second(x))


class InTraining(Model):
    def middle(self, x: Tensor) -> Tensor:
        return self.second(self.act(F.dropout(x, 0.5, self.training, inplace=self.training)))


class Twice(Model):
    def middle(self, x: Tensor) -> Tensor:
        x = self.act(x)
        x += 1
        return self.act(self.second(x))


class NotCalled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.ReLU(inplace=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.act(self.second(x))


class ChangedByTheHead(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))

    def middle(self, x: Tensor) -> Tensor:
        return self.second(self.act(x))


CASES = {
    "a residual": (Residual, "act"),
    "a view": (ChangedView, "second"),
    "a view of another layout": (ChangedInAnotherLayout, "first"),
    "behind autograd's back": (ChangedData, "first"),
    "in training only": (InTraining, "first"),
    "one of two calls": (Twice, "act"),
    "a layer that was not called": (NotCalled, "first second act head other z"),
    "by the head": (ChangedByTheHead, "z"),
    "layers in place": (lambda: IN_PLACE, "0 2 3"),  # 3 is a view of 2
    "our dropout": (dense(nn.Dropout(inplace=True)), ""),
    "a noisy layer": (dense(nn.RReLU(inplace=True)), "1"),
    "nothing": (lambda: models.convnet3(num_classes=2, in_channels=3, norm="bn_track"), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_overwritten_is_copied(case: str) -> None:
    make, changed = CASES[case]
    torch.manual_seed(0)
    head = "head*" if make is ChangedByTheHead else None
    net = network.build(make(), torch.randn(2, 3, 8, 8), task="classification", head=head)
    names = frozenset(name for name, _ in net.module.named_modules() if name) | {"z"}
    assert names - net._lasting == set(changed.split())
    net.want(names)
    x = torch.randn(3, 3, 8, 8)
    heard: dict[str, Tensor] = {}
    for name, part in net.module.named_modules():
        part.register_forward_hook(lambda part, args, y, name=name: heard.update({name: y.clone()}))
    frame = frames.Frame(wanted=names)
    net(net.start, x, frame, train=True)
    for name in heard.keys() - {""}:
        assert torch.equal(frame.features[name], heard[name]), name


def test_features_are_copies_where_the_heads_input_is_rewritten() -> None:
    net = network.build(
        nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.Linear(4, 2)), torch.zeros(2, 9), task="classification"
    )
    net.want(frozenset({"1", "z"}))
    for rewrite, same in ((None, True), (lambda z: z.mul_(2), False)):
        frame = frames.Frame(wanted=frozenset({"1", "z"}), rewrite=rewrite)
        net(net.start, torch.ones(2, 9), frame, train=True)
        assert (frame.features["1"] is frame.features["z"]) == same
        assert torch.allclose(frame.features["1"], net.start["1.weight"].sum(1).expand(2, 4) + net.start["1.bias"])
