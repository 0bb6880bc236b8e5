"""Means over a cohort's rows and distances to centres on CUDA, as torch has them client by client; on a CPU the plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom import kernels
from tests.engines.test_kernels import DEVICE, compare, cuda, random


def labels(clients: int, rows: int, classes: int) -> Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randint(0, classes, (clients, rows), generator=draw).to(DEVICE)


def distances(z: Tensor, y: Tensor, centres: Tensor, known: Tensor) -> Tensor:
    """Row by row, as the formula says."""
    gaps = [(known[c], [a - b for a, b in zip(v, centres[c], strict=True)]) for v, c in zip(z, y, strict=True)]
    return torch.stack([there * sum(g**2 for g in gap) / len(gap) for there, gap in gaps])


def test_formulas() -> None:
    z, centres, known = random(5, 3).cpu(), random(4, 3).cpu(), torch.tensor([1.0, 0, 1, 1], dtype=torch.float64)
    y = torch.tensor([0, 1, 3, 3, 2])
    compare(kernels.class_distances(z, y, centres, known), distances(z, y, centres, known), [z, centres])
    mask, values = torch.tensor([1.0, 0, 1, 1, 0], dtype=torch.float64), z[:, 0]
    assert torch.allclose(kernels.masked_mean(values, mask), (values[0] + values[2] + values[3]) / 3)
    assert kernels.masked_mean(values, torch.zeros_like(mask)) == 0


@cuda
@pytest.mark.parametrize(("rows", "width", "classes"), [(5, 3, 4), (64, 33, 10), (130, 7, 47), (1, 1, 2), (2, 1030, 3)])
def test_distances(rows: int, width: int, classes: int) -> None:
    z, centres, y = random(3, rows, width), random(3, classes, width), labels(3, rows, classes)
    known = (torch.arange(classes, device=DEVICE) % 3 != 1).double().expand(3, -1)
    found = torch.vmap(kernels.class_distances)(z, y, centres, known)
    assert "CohortDistances" in type(found.grad_fn).__name__
    wanted = torch.stack([known[k][y[k]] * ((z[k] - centres[k][y[k]]) ** 2).mean(1) for k in range(3)])
    compare(found, wanted, [z, centres])


@cuda
def test_distances_to_centres_that_all_clients_share() -> None:
    z, y, centres, known = random(3, 6, 5), labels(3, 6, 4), random(4, 5).detach(), random(4).detach()
    found = torch.vmap(kernels.class_distances, in_dims=(0, 0, None, None))(z, y, centres, known)
    assert "CohortDistances" in type(found.grad_fn).__name__
    compare(found, known[y] * ((z - centres[y]) ** 2).mean(2), [z])


@cuda
@pytest.mark.parametrize("rows", [1, 5, 64, 1500])
def test_means(rows: int) -> None:
    values, mask = random(3, rows), (labels(3, rows, 2)).double()
    mask[0] = 0  # a client of padding only
    found = torch.vmap(kernels.masked_mean)(values, mask)
    assert "CohortMean" in type(found.grad_fn).__name__
    compare(found, (values * mask).sum(1) / mask.sum(1).clamp(min=1), [values])


@cuda
def test_means_of_what_is_no_floating_number() -> None:
    """A user's statistic may be a share: its mean is not a whole number."""
    right, mask = labels(3, 5, 2) == 1, torch.ones(3, 5, dtype=torch.float64, device=DEVICE)
    mask[:, 4] = 0
    for values in (right, right.long()):
        found = torch.vmap(kernels.masked_mean)(values, mask)
        assert torch.allclose(found.double(), right[:, :4].double().mean(1))


@cuda
def test_centres_may_be_differentiated_by_themselves() -> None:
    z, y, centres, known = random(3, 6, 5).detach(), labels(3, 6, 4), random(3, 4, 5).detach(), random(4).detach()

    def value(c: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return kernels.class_distances(z, y, c, known).sum()

    found = torch.vmap(torch.func.grad(value))(centres, z, y)
    wanted = torch.stack([torch.func.grad(value)(centres[i], z[i], y[i]) for i in range(3)])
    assert torch.allclose(found, wanted)
