"""Kernels for what the server makes of replies: sums over clients, and projections of their models."""

from __future__ import annotations

import pytest
import torch

from fedloom import reducers, tree
from fedloom.aggregators import similarity
from tests.engines.test_kernels import cuda
from tests.engines.test_openings import numbers


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighed", ["host", "device"])
def test_sums_over_clients(dtype: torch.dtype, weighed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch adds them up, client by client; and by torch where they are not rows of one tensor."""
    wholes = [numbers(3, *shape, dtype=dtype) for shape in ((5, 7), (), (2050,))]
    wholes[0][1, 2, 3] = torch.inf
    messages = [{"delta": {str(i): whole[k] for i, whole in enumerate(wholes)}} for k in range(3)]
    reducer = reducers.mean()
    if weighed == "device":
        reducer = reducers.mean("w")
        for message, weight in zip(messages, numbers(3, dtype=dtype).abs().unbind(), strict=True):
            message["w"] = {"weight": weight}
        monkeypatch.setattr(reducers, "_of_the_host", lambda value: False)
    monkeypatch.setattr(reducers, "LARGE", 30)
    by_torch: list[int] = []
    plain = tree.weighted_sums
    monkeypatch.setattr(tree, "weighted_sums", lambda rows, *args: by_torch.append(len(rows[0])) or plain(rows, *args))
    found = [reducer.reduce("delta", messages, [5, 3, 2])]
    assert by_torch == [1]  # the one that is not large
    for message in messages:
        message["delta"] = tree.clone(message["delta"])
    found.append(reducer.reduce("delta", messages, [5, 3, 2]))
    assert by_torch == [1, 3]
    for name, value in found[0].items():
        assert value.shape == messages[0]["delta"][name].shape
        torch.testing.assert_close(value, found[1][name], rtol=1e-6, atol=1e-6)


@cuda
@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize(("clients", "dtype"), [(1, torch.float32), (3, torch.float64), (21, torch.float32)])
def test_projections(clients: int, dtype: torch.dtype, based: bool) -> None:
    """As coordinate by coordinate, with more for a sum than a program reads at a time; :func:`test_places_sum_by_sum` has sums of none."""
    bodies = {"a": numbers(clients, 30, 7, dtype=dtype), "b": numbers(clients, 95, dtype=dtype)}
    base = {name: numbers(*value.shape[1:], dtype=dtype) for name, value in bodies.items()} if based else None
    for width in (2, 300):
        plain = similarity.project(bodies, 3, width, base=base)
        ours = similarity.project(bodies, 3, width, base=base, whole=similarity.at_once(bodies))
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_places_sum_by_sum() -> None:
    places = similarity.Places(torch.tensor([2, 0, 2, 0]), torch.tensor([1, -1, -1, 1], dtype=torch.int8), 4)
    order, sign, starts = places.by_sum
    assert order.tolist() == [1, 3, 0, 2]
    assert sign.tolist() == [-1, 1, 1, -1]
    assert starts.tolist() == [0, 2, 2, 4, 4]
