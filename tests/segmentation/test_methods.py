"""Every method on dense prediction: the same numbers on both engines, or a refusal that says why."""

from __future__ import annotations

import re
import warnings

import pytest
from torch import nn

import fedloom as fl
from tests.engines.test_parity import texts
from tests.helpers import everything, fit, gap

REFUSED = {
    "aims": "supervises pooled features by one label per row",
    "fedaf": "learns synthetic pictures of one class each",
    "fedaims": "as aims",
    "fedaims_full": "as aims",
    "fedas": "matches the mean feature vector of each class of rows",
    "feddbe": "corrects one feature vector per row",
    "fedpac": "compares class means of feature vectors",
    "fedproto": "sends class means of feature vectors",
    "fedrod": "balances the soft-max by counts of rows per class",
    "gpfl": "conditions one feature vector per row on class counts",
    "prototypes": "as fedproto",
}
"""Methods without a meaning for dense prediction, and what they are about instead."""


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(6, 9, 1),
    )


@pytest.fixture(scope="module")
def streets() -> fl.Federation:
    return fl.data.load("street_scenes", towns=3, frames=15, length=3, size=(16, 16), quantity=0.3).partition()


def name_of(text: str) -> str:
    return re.split(r"\W", text.split("+")[-1].strip())[0]


@pytest.mark.parametrize("text", texts())
def test_runs_alike_on_both_engines_or_is_refused(text: str, streets: fl.Federation) -> None:
    options = {"task": "segmentation", "rounds": 2, "epochs": 1, "batch_size": 4}
    if name_of(text) in REFUSED:
        for engine in ("loop", "vectorised"):
            with pytest.raises(fl.UserError, match="per row"):
                fit(text, small, streets, engine=engine, **options)
        return
    a, b = (fit(text, small, streets, engine=engine, **options) for engine in ("loop", "vectorised"))
    assert gap(everything(a), everything(b)) <= 1e-9
    assert 0 <= a.history[-1]["miou"] <= 1


def test_refused_names_exist() -> None:
    assert set(REFUSED) <= {*fl.list_methods(), *fl.list_plugins()}


# The networks of the paper, one step in float64.

NETWORKS = {
    "deeplabv3plus_resnet18": ("fedavg + isr",),
    "topformer_t": ("fedper", "ditto", "fedavg + isr"),
    "seaformer_t": ("fedbn", "scaffold", "fedavg + isr"),
}
CASES = [(network, method) for network, methods in NETWORKS.items() for method in methods]
SLOW = [(n, m) for n in NETWORKS for m in ("fedavg", "fedper", "fedbn", "ditto", "scaffold", "fedavg + isr")]


def one_step(network: str, method: str, mode: str = "federated", **more: object) -> list[fl.Result]:
    # Scenes that have nothing to do with each other: on near-copies batch normalisation divides by next to nothing, and one
    # step of 1e3 leaves no digits to compare.
    data = fl.data.load("street_scenes", towns=2, frames=5, length=1, size=(32, 48), quantity=0.0).partition(test=0.2)
    options = {"task": "segmentation", "rounds": 1, "epochs": 1, "batch_size": 4, "mode": mode, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [fit(method, network, data, engine=engine, **options) for engine in ("loop", "vectorised")]


@pytest.mark.parametrize(("network", "method"), CASES)
def test_networks_of_the_paper(network: str, method: str) -> None:
    a, b = one_step(network, method)
    assert gap(everything(a), everything(b)) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("network", "method"), [case for case in SLOW if case not in CASES])
def test_networks_of_the_paper_with_every_method(network: str, method: str) -> None:
    a, b = one_step(network, method)
    assert gap(everything(a), everything(b)) <= 1e-9


@pytest.mark.parametrize("method", ["fedavg", "fedavg + isr"])
@pytest.mark.parametrize("mode", ["centralised", "hybrid"])
def test_modes(mode: str, method: str) -> None:
    more = {"hybrid": {"cloud_clients": ["town2"], "mixing": "fixed", "alpha": 0.5}} if mode == "hybrid" else {}
    a, b = one_step("topformer_t", method, mode, batch_size="full", **more)
    assert gap(everything(a), everything(b)) <= 1e-9
    assert a.history[-1]["global_miou"] is not None
