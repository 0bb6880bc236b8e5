"""Any module as a function of its leaves: head, tied weights, taps, outputs, one-row rule."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.clients import batches
from fedloom.engines.choose_device import choose_device
from fedloom.network import functional, inspect_model
from fedloom.ops import forward_context
from fedloom.runs.problem import make_module
from fedloom.spec.parts import Phase, Sampler
from tests.helpers import bn_mlp, federation, fit, gap, identical, mlp, own, shared


def build(
    module: nn.Module, sample: Tensor | None = None, *, precision: str = "fp32", head: str | None = None
) -> functional.Network:
    x, device = torch.zeros(2, 6) if sample is None else sample, choose_device("cpu", precision)
    return inspect_model.build(module, x, task="classification", device=device, head=head)


class Branches(nn.Module):
    """A head that is not the last module in the list, behind a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 3)
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.classifier(torch.relu(self.body(x)))}


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(torch.tanh(self.a(x))))


def test_head_is_found_in_forward_order() -> None:
    net = build(Branches())
    assert net.structure.head == "classifier"
    assert net.structure.feature == 4
    assert net.structure.outputs == 3
    assert {i.name: i.role for i in net.structure.leaves}["body.weight"] == "body"


def test_head_of_a_dense_model_is_the_last_convolution() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Upsample(scale_factor=2))
    net = build(module, torch.zeros(2, 1, 4, 4))
    assert net.structure.head == "2"
    assert net.structure.outputs == 3


def test_head_can_be_named_and_a_wrong_name_lists_layers() -> None:
    net = build(mlp()(), head="0.*")
    assert [i.name for i in net.structure.leaves if i.role == "head"] == ["0.weight", "0.bias"]
    with pytest.raises(fl.UserError, match="last layers of the model are 0, 2"):
        build(mlp()(), head="fc.*")


def test_a_model_without_head_is_refused_only_where_a_head_is_needed() -> None:
    make = lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh())  # noqa: E731
    fit("fedavg", make)
    with pytest.raises(fl.UserError, match="head was not found"):
        fit("fedper", make)


def test_tied_weights_are_one_leaf() -> None:
    net = build(Tied())
    assert [i.name for i in net.structure.leaves] == ["a.weight", "head.weight", "head.bias"]
    result = fit("fedavg", Tied, federation())
    module = result.model()
    assert isinstance(module, Tied)
    assert module.a.weight is module.b.weight
    assert torch.equal(module.a.weight, shared(result)["a.weight"])


def test_forward_at_other_leaves_equals_the_module() -> None:
    original, x = bn_mlp()().double(), torch.randn(5, 6, dtype=torch.float64)
    for mode in (True, False):
        module = copy.deepcopy(original)
        net = build(module, precision="fp64")
        leaves = {k: v.clone() for k, v in net.start.items()}
        out = net(leaves, x, forward_context.Frame(), train=mode)
        module.train(mode)
        assert torch.equal(out, module(x))
        if mode:
            assert torch.equal(leaves["1.running_mean"], module.state_dict()["1.running_mean"])


def test_masked_batch_norm_equals_plain_on_the_real_rows() -> None:
    net = build(bn_mlp()(), precision="fp64")
    x = torch.randn(5, 6, dtype=torch.float64)
    padded = torch.cat([x, torch.full((3, 6), 7.0, dtype=torch.float64)])
    mask = torch.tensor([1.0] * 5 + [0.0] * 3)
    a, b = ({k: v.clone() for k, v in net.start.items()} for _ in range(2))
    plain = net(a, x, forward_context.Frame(), train=True)
    masked = net(b, padded, forward_context.Frame(mask=mask), train=True)
    torch.testing.assert_close(masked[:5], plain, rtol=1e-12, atol=1e-12)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12)
    assert int(b["1.num_batches_tracked"]) == 1
    nothing = {k: v.clone() for k, v in net.start.items()}
    net(nothing, padded, forward_context.Frame(mask=torch.zeros(8)), train=True)
    assert all(torch.equal(nothing[k], net.start[k]) for k in net.start)


def test_taps_are_copies() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    net = build(module)
    net.want(frozenset({"0", "z"}))
    frame = forward_context.Frame(wanted=frozenset({"0", "z"}))
    net(dict(net.start), torch.randn(9, 6), frame, train=True)
    assert float(frame.features["0"].min()) < 0
    assert float(frame.features["z"].min()) >= 0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(a) + self.right(b)))


def test_threads_keep_their_frames_apart() -> None:
    """Two forward passes that overlap, as those of a deployment's runs do: each keeps its own features."""
    began, overtaken, ended = threading.Event(), threading.Event(), threading.Event()

    class Pause(nn.Module):
        """The other thread enters first and goes on while this one is in the middle of its pass."""

        def forward(self, x: Tensor) -> Tensor:
            first = threading.current_thread() is not threading.main_thread()
            (began if first else overtaken).set()
            assert (overtaken if first else ended).wait(10)
            return x

    def tapped(net: functional.Network, x: Tensor) -> dict[str, Tensor]:
        frame = forward_context.Frame(wanted=frozenset({"z"}))
        net(net.start, x, frame, train=True)
        return frame.features

    def other() -> None:
        found.update(tapped(nets[1], torch.ones(2, 6)))
        ended.set()

    nets = [build(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))) for _ in range(2)]
    for net in nets:
        net.want(frozenset({"z"}))
        net.module[1] = Pause()  # type: ignore[operator]
    found: dict[str, Tensor] = {}
    thread = threading.Thread(target=other)
    thread.start()
    assert began.wait(10)
    mine = tapped(nets[0], torch.ones(5, 6))
    thread.join()
    assert mine["z"].shape == (5, 4)
    assert found["z"].shape == (2, 4)


@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_inputs_may_be_tuples_or_dicts(form: str, engine: str) -> None:
    draw = np.random.default_rng(0)

    def rows(n: int) -> tuple[object, np.ndarray]:
        a, b = draw.normal(size=(n, 3)).astype("f4"), draw.normal(size=(n, 2)).astype("f4")
        return ((a, b) if form == "tuple" else {"a": a, "b": b}), (a.sum(1) > 0).astype(int)

    data = fl.Federation.from_arrays([(rows(8), rows(4)) for _ in range(3)])
    result = fit("fedper", Two, data, engine=engine)
    assert result.history[-1]["loss"] < result.history[0]["loss"] + 1
    assert result.model("0") is not None


def test_one_row_batches_are_skipped_with_batch_norm_and_kept_without() -> None:
    data = federation((1, 5, 9))
    with_norm = fit("fedavg", bn_mlp(), data, batch_size=4, epochs=1, rounds=1)
    assert with_norm.history[0]["skipped"] == ["0"]
    without = fit("fedavg", mlp(), data, batch_size=4, epochs=1, rounds=1)
    assert without.history[0]["skipped"] == []


def test_batches_cover_every_row_once_per_epoch() -> None:
    steps = batches.plan(Phase(), np.zeros(10), np.random.default_rng(0), epochs=3, batch_size=4, skip_single=False)
    assert [len(r) for (r,) in steps] == [4, 4, 2] * 3
    for epoch in range(3):
        rows = np.concatenate([r for (r,) in steps[3 * epoch : 3 * epoch + 3]])
        assert sorted(rows) == list(range(10))


def test_pairs_drop_the_odd_batch_and_halve_a_lone_one() -> None:
    def plan(n: int) -> batches.Steps:
        phase = Phase(sampler=Sampler(group=2))
        return batches.plan(phase, np.zeros(n), np.random.default_rng(0), epochs=1, batch_size=4, skip_single=False)

    assert [tuple(len(r) for r in step) for step in plan(12)] == [(4, 4)]
    assert [tuple(len(r) for r in step) for step in plan(3)] == [(1, 2)]
    assert plan(1) == []


def test_result_model_is_the_users_class_with_plain_layers() -> None:
    result = fit("fedbn", bn_mlp(), federation())
    module = result.model("1")
    assert [type(m) for m in module] == [nn.Linear, nn.BatchNorm1d, nn.Tanh, nn.Linear]  # type: ignore[arg-type]
    leaves = own(result, "1")
    assert gap({k: v.double() for k, v in module.state_dict().items()}, {k: v.double() for k, v in leaves.items()}) == 0
    assert not module.training
    assert all(p.requires_grad for p in module.parameters())


def test_a_model_that_does_not_fit_is_one_clear_line() -> None:
    with pytest.raises(fl.UserError, match=r"failed on a sample .* shape \(2, 6\)"):
        fit("fedavg", lambda: nn.Linear(5, 3))
    with pytest.raises(fl.UserError, match="labels go from 0 to 2, but the model has 2 outputs"):
        fit("fedavg", lambda: nn.Linear(6, 2))
    with pytest.raises(fl.UserError, match="use task='binary'"):
        fit("fedavg", lambda: nn.Linear(6, 1))


def test_models_of_runs_in_threads_are_those_of_their_seeds() -> None:
    """Each is made of torch's global generator, which they share."""

    def slow() -> nn.Module:
        first = nn.Linear(6, 40)
        time.sleep(0.01)  # another thread may come in between
        return nn.Sequential(first, nn.Linear(40, 3))

    alone = [make_module(slow, seed).state_dict() for seed in range(4)]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        together = [module.state_dict() for module in pool.map(lambda seed: make_module(slow, seed), range(4))]
    assert all(identical(a, b) for a, b in zip(alone, together, strict=True))
    assert torch.equal(state, torch.get_rng_state())
