"""Kernels for what the server makes of replies: sums over clients, and projections of their models."""

from __future__ import annotations

import pytest
import torch

from fedloom import reducers, tree
from fedloom.aggregators import sides, similarity
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


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clients", [1, 3, 10, 16, 17])
def test_products_of_all_pairs(clients: int, dtype: torch.dtype) -> None:
    """In float64, layer by layer: one shorter than a program reads at a time, one longer than all of them read at once."""
    widths = [5, 1000, 1, 20000]
    side = numbers(clients, sum(widths), dtype=dtype)
    found = sides.grams(side, widths)
    pieces = [piece.double() for piece in side.split_with_sizes(widths, 1)]
    torch.testing.assert_close(found, torch.stack([p @ p.T for p in pieces]), rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(found, found.mT, rtol=1e-13, atol=1e-12)
    for xi in (-1.0, -0.01, 0.0, 0.02, 2.0):
        assert torch.equal(sides.disagreeing(side, widths, xi), sides.pairs_below(found, xi))


@cuda
def test_pairs_in_conflict_where_cosines_are_whole_or_there_are_none() -> None:
    """Rounded to ten digits, as by torch: cosines of -1, 0 and 1 to the last bit, and of vectors of nothing."""
    rows = [[1.0, 2.0, 0.0], [-3.0, -6.0, 0.0], [2.0, -1.0, 0.0], [0.0, 0.0, 0.0], [0.1, 0.2, 0.0]]
    side = torch.tensor(rows, dtype=torch.float64, device=numbers(1).device)
    for xi in (-1.0, -0.9999999999, 0.0, 1e-10, 1.0, 1.5):
        found = sides.disagreeing(side, [2, 1], xi)
        assert torch.equal(
            found, sides.pairs_below(torch.stack([sides.gram([side[:, :2]]), sides.gram([side[:, 2:]])]), xi)
        )


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [(1, 1, 1), (5, 2, 3)])
def test_where_clients_ended(weights: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit as torch has it, but for the order of the sums; each client's is a tensor of its own."""
    moved, sent = numbers(3, 2500, dtype=dtype), numbers(2500, dtype=dtype)
    own = [sent, *numbers(2, 2500, dtype=dtype).unbind()]
    parts = [(slice(0, 7), False), (slice(7, 1100), True), (slice(1100, 2000), False), (slice(2000, 2500), True)]
    found, away = sides.ended(moved, sent, own, parts, weights)
    monkeypatch.setattr(sides, "_served", lambda side: False)
    expected, far = sides.ended(moved, sent, own, parts, weights)
    assert away is not None
    assert far is not None
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert a.untyped_storage().nbytes() == a.nbytes
    for at, kept in parts:
        if kept:
            torch.testing.assert_close(away[at], far[at])
