"""Streams and counter noise: equal wherever they are computed, and random enough."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.rng import PURPOSES, fold, key_of, normal, random_bits, stream, uniform

KEY = torch.tensor(key_of(0, "noise", "a"))
KEYS = torch.stack([fold(KEY, i) for i in range(20)])


def test_stream_depends_on_every_part_and_on_nothing_else():
    first = stream(0, "batches", "a", 1).random(4)
    np.random.seed(1)
    assert (stream(0, "batches", "a", 1).random(4) == first).all()
    for other in (stream(1, "batches", "a", 1), stream(0, "split", "a", 1), stream(0, "batches", "b", 1)):
        assert (other.random(4) != first).all()


def test_stream_is_the_same_on_every_machine():
    assert stream(0, "partition").integers(0, 1000, 5).tolist() == [375, 608, 366, 949, 130]


def test_stream_does_not_join_keys_that_differ():
    assert stream(0, "batches", "1", "23").random() != stream(0, "batches", "12", "3").random()


def test_no_global_generator_is_read_or_moved():
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for purpose in PURPOSES:
        stream(0, purpose).random()
    uniform(KEY, (3, 4)), normal(KEY, (3,))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7, 13), (1,), (3, 1100), (0, 5)])
def test_loop_equals_vmap_bit_for_bit(draw, dtype, shape):
    loop = torch.stack([draw(key, shape, dtype) for key in KEYS])
    assert torch.equal(loop, torch.vmap(lambda key: draw(key, shape, dtype))(KEYS))


def test_traced_graph_equals_eager():
    def step(key, number):
        return uniform(fold(key, number, 3), (5, 300))

    graph = make_fx(step)(KEY, torch.tensor(4))
    for key, number in ((KEY, 4), (KEYS[3], 9)):
        assert torch.equal(graph(key, torch.tensor(number)), step(key, number))


def test_fold_takes_numbers_and_tensors_alike_under_vmap():
    numbers = torch.tensor([0, 1, 2**31, 2**32 + 5, 2**40, 2**62])
    mapped = torch.vmap(lambda n: fold(KEY, n))(numbers)
    assert mapped.tolist() == [int(fold(KEY, int(n))) for n in numbers]
    assert len(set(mapped.tolist())) == len(numbers)
    assert (mapped >= 0).all()


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_rows_added_at_the_end_leave_earlier_rows_alone(rows):
    assert torch.equal(uniform(KEY, (40, 3, 77))[:rows], uniform(KEY, (rows, 3, 77)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_range_and_leading_bits(dtype):
    values = uniform(KEY, (200_000,), dtype)
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    width = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    assert torch.equal((values.double() * 2**width).long(), random_bits(KEY, (200_000,)) >> (32 - width))


def test_moments_and_every_bit():
    n = 1 << 20
    values = uniform(KEY, (n,), torch.float64)
    assert abs(values.mean() - 0.5) < 5 / np.sqrt(12 * n)
    assert abs(values.var() - 1 / 12) < 5 / np.sqrt(180 * n)
    words = random_bits(KEY, (n,))
    share = torch.stack([((words >> b) & 1).double().mean() for b in range(32)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / np.sqrt(n)


@pytest.mark.parametrize("shift", [0, 8, 16])
def test_chi_square_of_bytes(shift):
    n = 1 << 20
    counts = torch.bincount((random_bits(KEY, (n,)) >> shift) & 255, minlength=256).double()
    statistic = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert 255 - 5 * np.sqrt(510) < statistic < 255 + 5 * np.sqrt(510)


@pytest.mark.parametrize("lag", [1, 2, 3, 32, 1023, 1024, 1025, 4096])
def test_neighbours_are_uncorrelated(lag):
    values = uniform(KEY, (1 << 20,), torch.float64) - 0.5
    assert abs(float((values[:-lag] * values[lag:]).mean()) * 12) < 5 / np.sqrt(len(values))


@pytest.mark.parametrize("other", [KEY + 1, KEY ^ (1 << 40), fold(KEY, 0), fold(KEY, 1), torch.tensor(0)])
def test_keys_that_are_close_give_independent_noise(other):
    first, second = random_bits(KEY, (1 << 18,)), random_bits(other, (1 << 18,))
    assert abs(float(torch.corrcoef(torch.stack([first, second]).double())[0, 1])) < 5 / np.sqrt(1 << 18)
    flipped = torch.stack([(((first ^ second) >> b) & 1).double().mean() for b in range(32)])
    assert (flipped - 0.5).abs().max() < 5 * 0.5 / np.sqrt(1 << 18)
    assert int((first == second).sum()) < 5


def test_small_keys_are_not_shifted_copies_of_each_other():
    words = [set(random_bits(torch.tensor(key), (4096,)).tolist()) for key in range(8)]
    assert all(len(a & b) < 5 for i, a in enumerate(words) for b in words[:i])


def test_one_element_over_many_keys_is_uniform_too():
    keys = torch.vmap(lambda i: fold(KEY, i))(torch.arange(1 << 16))
    values = torch.vmap(lambda key: uniform(key, (2,), torch.float64))(keys)
    assert (values.mean(0) - 0.5).abs().max() < 5 / np.sqrt(12 * len(values))
    counts = torch.histc(values[:, 0], 64, 0, 1)
    assert float(((counts - 1024) ** 2 / 1024).sum()) < 63 + 5 * np.sqrt(126)


def test_normal_has_the_moments_of_the_normal_distribution():
    n = 1 << 20
    values = normal(KEY, (n,), torch.float64)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((values**power).mean()) - moment) < 5 * np.sqrt(spread / n)
    assert values.isfinite().all()


def test_key_of_is_63_bits():
    keys = {key_of(seed, "a", i) for seed in range(3) for i in range(1000)}
    assert len(keys) == 3000
    assert 2**62 <= max(keys) < 2**63
    assert min(keys) >= 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cuda_gives_the_same_bits(dtype):
    keys = KEYS.cuda()
    mapped = torch.vmap(lambda key: uniform(fold(key, 3), (7, 1300), dtype))(keys)
    assert torch.equal(mapped.cpu(), torch.stack([uniform(fold(key, 3), (7, 1300), dtype) for key in KEYS]))
