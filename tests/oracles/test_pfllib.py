"""PFLlib's loops and fedloom's on one split, read from PFLlib's own folder: the same numbers, the same curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from tests.oracles.pfllib_loops import Options, curve

SAME = [
    ("Local", "local", {}),
    ("FedAvg", "fedavg", {}),
    ("FedProx", "fedprox(mu=0.3)", {"mu": 0.3}),
    ("FedPer", "fedper", {}),
    ("FedRep", "fedrep(head_epochs=3)", {"plocal_epochs": 3}),
    ("LG-FedAvg", "lg_fedavg", {}),
    ("Ditto", "ditto(lam=0.3, personal_epochs=3)", {"mu": 0.3, "plocal_epochs": 3}),
    ("SCAFFOLD", "scaffold", {}),
    ("MOON", "moon(mu=1.0, tau=0.5)", {"mu": 1.0, "tau": 0.5}),
    ("FedBABU", "fedbabu(finetune_epochs=4)", {"fine_tuning_epochs": 4}),
]


class Net(nn.Module):
    """A body and a head, as PFLlib splits its models."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits dealt to six clients and written as PFLlib's ``save_file`` writes them."""
    place = tmp_path_factory.mktemp("Digits")
    data = fl.data.load("digits").partition(fl.dirichlet(0.5), clients=6, seed=1)
    for part in ("train", "test"):
        (place / part).mkdir()
        for i, client in enumerate(data):
            rows = client.parts()[part]
            assert isinstance(rows.x, Tensor)
            with (place / part / f"{i}.npz").open("wb") as file:
                content: Any = {"x": rows.x.float().numpy(), "y": rows.y.numpy()}
                np.savez_compressed(file, data=content)
    return place


def seeded(dtype: torch.dtype) -> Net:
    torch.manual_seed(7)
    return Net().to(dtype)


def rows_of(data: fl.Federation, dtype: torch.dtype) -> list[Any]:
    return [tuple((p.x.to(dtype), p.y.long()) for p in (c.train, c.test)) for c in data]  # type: ignore[union-attr]


@pytest.mark.parametrize(("theirs", "ours", "options"), SAME, ids=[t for t, _, _ in SAME])
def test_full_batches_give_the_same_models(folder: Path, theirs: str, ours: str, options: dict[str, Any]) -> None:
    """With all rows in a batch nothing is left to chance: models agree to rounding, curves exactly."""
    data = fl.data.from_folder(folder)
    o = Options(local_learning_rate=0.3, full=True, local_epochs=2, global_rounds=3, **options)
    found, clients = curve(theirs, seeded(torch.float64), rows_of(data, torch.float64), o)
    result = fl.fit(
        ours, seeded(torch.float64), data, rounds=3, epochs=2, batch_size="full", optimizer=fl.sgd(0.3),
        precision="fp64", engine="loop", progress=False,
    )  # fmt: skip
    if theirs != "FedBABU":
        assert [r["accuracy_weighted"] for r in result.history] == pytest.approx(found[1:], abs=1e-12)
    assert result.history[-1]["accuracy_weighted"] == pytest.approx(found[-1], abs=1e-12)
    for i, client in enumerate(clients):
        model = client.kept["own"] if theirs == "Ditto" else client.model
        assert isinstance(model, nn.Module)
        mine = result.model(str(i)).state_dict()
        for name, value in model.state_dict().items():
            assert float((mine[name] - value).abs().max()) < 1e-10, name


@pytest.mark.parametrize(("theirs", "ours"), [("FedAvg", "fedavg"), ("FedPer", "fedper")])
def test_mini_batches_give_the_same_curve_up_to_the_order_of_rows(folder: Path, theirs: str, ours: str) -> None:
    """Orders are drawn differently, and PFLlib drops partial batches: curves agree as two seeds of one method do."""
    data = fl.data.from_folder(folder)
    o = Options(local_learning_rate=0.1, batch_size=10, local_epochs=1, global_rounds=8)
    net = seeded(torch.float32)
    torch.manual_seed(3)
    found, _ = curve(theirs, net, rows_of(data, torch.float32), o)
    result = fl.fit(
        ours, seeded(torch.float32), data, rounds=8, batch_size=10, optimizer=fl.sgd(0.1), progress=False,
        device="cpu",
    )  # fmt: skip
    mine = [r["accuracy_weighted"] for r in result.history]
    assert np.abs(np.array(mine) - np.array(found[1:])).mean() < 0.04
    assert abs(mine[-1] - found[-1]) < 0.05
    assert mine[-1] > found[0] + 0.3
