"""Triton kernel for maps whose channels lie last, as fast convolutions make them: a bias, ReLU and pooling, without a gradient.

    y_w = relu(max_{p in w} x_p + b)

of windows w that do not overlap, each channel by itself. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.norms import rectified, wide


@triton.jit
def _windows(
    x, y, bias, cells,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SIX: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0).to(tl.int64) * BQ + tl.arange(0, BQ)
    here = q < cells
    channel, window = q % C, q // C
    picture, i, j = window // (OH * OW), (window // OW) % OH, window % OW
    corner = x + ((picture * H + i * R) * W + j * S) * C + channel
    best = tl.load(corner, mask=here, other=0.0).to(SUM)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            if r + s > 0:
                value = tl.load(corner + (r * W + s) * C, mask=here, other=0.0).to(SUM)
                best = tl.where((value > best) | (value != value), value, best)
    shift = tl.load(bias + channel, mask=here, other=0.0).to(SUM)
    tl.store(y + q, rectified(best + shift, SIX).to(y.dtype.element_ty), mask=here)


def windowed(x: Tensor, bias: Tensor, window: tuple[int, int], *, six: bool) -> Tensor:
    """What a chain of a bias, ReLU (of at most 6) and pooling returns, of (..., height, width, channels) without gaps."""
    *rows, height, width, channels = x.shape
    y = x.new_empty(*rows, height // window[0], width // window[1], channels)
    _windows[(triton.cdiv(y.numel(), 1024),)](
        x, y, bias, y.numel(), H=height, W=width, C=channels, OH=y.shape[-3], OW=y.shape[-2], R=window[0], S=window[1],
        SIX=six, SUM=wide(x)[1], BQ=1024, num_warps=4,
    )  # fmt: skip
    return y
