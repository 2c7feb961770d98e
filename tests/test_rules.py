"""Every row of the rule table is right by value: a wrong one would be a silently wrong gradient.

Each op is called on small double tensors; for every operand, dim and number of ranks the row that the table gives is
run shard by shard, as `lower` would, and what the ranks return is joined and compared with the whole.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.compat import FakeTensorMode, make_fx
from autoshard.placement import PARTIAL, Partial, Replicate, Shard
from autoshard.rules import Op, Row, Rule, candidates, rule_of, spread
from autoshard.rules.propose import Call, join, main, propose, run_on_shards
from autoshard.rules.rewrites import separate_samples
from autoshard.rules.table import TABLE

aten = torch.ops.aten
RANKS = (2, 3)
_generator = torch.Generator().manual_seed(0)
CALLS: dict[Any, list[Call]] = defaultdict(list)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def truths(*shape: int) -> Tensor:
    return floats(*shape) > 0


def positive(*shape: int) -> Tensor:
    return floats(*shape).abs() + 0.5


def add(op: Any, *args: Any, **kwargs: Any) -> None:
    CALLS[op].append(Call(op, args, kwargs))


def _reshapes() -> None:
    for before, after in (
        ((12, 6), (72,)), ((72,), (12, 6)), ((6, 12, 6), (72, 6)), ((72, 6), (6, 12, 6)), ((6, 12, 6), (6, 72)),
        ((12, 1, 6), (12, 6)), ((12, 6), (12, 1, 6, 1)), ((36, 4), (6, 24)), ((12, 12), (4, 3, 12)),
        ((17, 12), (204,)), ((2, 3, 6), (6, 6)), ((6, 2, 12), (12, 12)), ((6, 6), (6, 6)),
    ):  # fmt: skip
        for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            add(op, floats(*before), list(after))
    x = floats(6, 12, 6)
    add(aten.t.default, floats(6, 12))
    add(aten.t.default, floats(6))
    for dims in ((0, 1), (1, -1), (0, 0)):
        add(aten.transpose.int, x, *dims)
    for order in ([2, 0, 1], [-1, 1, 0], [0, 1, 2]):
        add(aten.permute.default, x, order)
    for dim in (0, 2, -1):
        add(aten.unsqueeze.default, x, dim)
        add(aten.select.int, x, dim, 1)
        add(aten.slice.Tensor, x, dim, 1, 5, 2)
        add(aten.unbind.int, x, dim)
        add(aten.flip.default, x, [dim])
        add(aten.roll.default, x, [2], [dim])
        add(aten.stack.default, [x, floats(6, 12, 6)], dim)
        add(aten.cat.default, [x, floats(6, 12, 6)], dim)
        for op in (aten.split.Tensor, aten.unsafe_split.Tensor, aten.chunk.default):
            add(op, x, 3, dim)
        for op in (aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default):
            add(op, x, [2, x.shape[dim] - 2], dim)
        add(aten.slice_backward.default, aten.slice.Tensor(x, dim, 1, 5, 2), [6, 12, 6], dim, 1, 5, 2)
        add(aten.select_backward.default, aten.select.int(x, dim, 1), [6, 12, 6], dim, 1)
        add(aten.slice_scatter.default, x, floats(*aten.slice.Tensor(x, dim, 1, 5).shape), dim, 1, 5)
        add(aten.unfold.default, x, dim, 3, 2)
        add(aten.unfold_backward.default, floats(*aten.unfold.default(x, dim, 3, 2).shape), [6, 12, 6], dim, 3, 2)
    add(aten.unbind.int, x)
    add(aten.split.Tensor, x, 4)
    _pieces()
    add(aten.roll.default, x, [3])
    add(aten.expand.default, floats(6, 1, 6), [6, 12, 6])
    add(aten.expand.default, floats(6), [12, 6])
    add(aten.expand.default, floats(6, 12), [6, 6, -1])
    add(aten.expand.default, floats(), [12, 6])
    for pad in ([1, 2], [0, 0, 1, 1], [0, 0, 0, 0, 2, 0], [-1, 0]):
        add(aten.constant_pad_nd.default, x, pad)
        add(aten.constant_pad_nd.default, x, pad, 1.5)
    for dims in ((0, 1), (2, 0), (-1, -2)):
        y = aten.diagonal.default(x, 1, *dims)
        add(aten.diagonal.default, x, 1, *dims)
        add(aten.diagonal_backward.default, floats(*y.shape), [6, 12, 6], 1, *dims)
        add(aten.diag_embed.default, x, 1, *dims)
    add(aten.diagonal.default, x)
    add(aten.diag_embed.default, x)
    add(aten.view_as_complex.default, floats(6, 12, 2))
    add(aten.view_as_real.default, torch.complex(floats(6, 12), floats(6, 12)))
    for op in (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default):
        add(op, x)
    add(aten.clone.default, x.transpose(0, 1), memory_format=torch.contiguous_format)
    add(aten.copy.default, floats(6, 12), floats(6, 12))
    add(aten.copy.default, floats(6, 12), floats(12))
    for dtype in (torch.float32, torch.bool, torch.int64):
        add(aten._to_copy.default, x, dtype=dtype)
    add(aten._to_copy.default, ints(9, 6, 12), dtype=torch.float64)
    add(torch.ops.prims.convert_element_type.default, floats(6, 12), torch.float16)


def _pieces() -> None:
    for x, dim in ((floats(2, 24), 1), (floats(24, 2), 0), (floats(2, 24, 2), -2)):
        rest = [1] * (x.dim() - 1 - dim % x.dim())
        for op in (aten.split.Tensor, aten.unsafe_split.Tensor):
            for size in (6, 8, 12, 24):
                add(op, x, size, dim)
        for count in (2, 3, 4):
            add(aten.chunk.default, x, count, dim)
        for sizes in ([12, 12], [6, 12, 6], [16, 8], [6, 6, 6, 6]):
            parts = x.split(sizes, dim)
            for op in (aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default):
                add(op, x, sizes, dim)
            add(aten.cat.default, list(parts), dim)
        for start, stop in ((0, 12), (6, 24), (-12, 2**63 - 1), (8, 16), (12, -6), (3, 9)):
            part = aten.slice.Tensor(x, dim, start, stop)
            add(aten.slice.Tensor, x, dim, start, stop)
            add(aten.slice_backward.default, part, list(x.shape), dim, start, stop, 1)
            add(aten.slice_scatter.default, x, floats(*part.shape), dim, start, stop)
        for pad in ([6, 0], [0, 12], [12, -12], [-6, 6], [3, 3]):
            add(aten.constant_pad_nd.default, x, [0, 0] * len(rest) + pad)
        add(aten.glu.default, x, dim)
        add(aten.glu_backward.default, x.narrow(dim, 0, 12), x, dim)
    add(aten.slice.Tensor, floats(24, 2))
    add(aten.slice.Tensor, floats(24, 2), 0, 12)
    add(aten.split.Tensor, floats(24, 2), 12)


def _creations() -> None:
    shape = [6, 12]
    like, other = floats(6, 12), floats(6)
    add(aten.full.default, shape, 2.5)
    add(aten.full.default, shape, 2.5, dtype=torch.float64)
    for op in (aten.zeros.default, aten.ones.default, aten.empty.memory_format):
        add(op, shape, dtype=torch.float64)
    for x in (like, other):
        for op in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default):
            add(op, x, shape)
        add(aten.new_full.default, x, shape, 1.5)
    for op in (aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default):
        add(op, like, dtype=torch.float32)
    add(aten.full_like.default, like, 3)
    add(aten.zero.default, like)


def _arithmetic() -> None:
    pairs = [(floats(6, 12), floats(6, 12)), (floats(6, 12), floats(12)), (floats(6, 1), floats(1, 12)),
             (floats(6, 12), floats()), (floats(), floats(6, 12)), (floats(12), floats(6, 12))]  # fmt: skip
    for a, b in pairs:
        for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Tensor,
                   aten.pow.Tensor_Tensor,
                   aten.maximum.default, aten.eq.Tensor, aten.atan2.default, aten.isclose.default,
                   aten.floor_divide.default, aten.complex.default, aten.fmod.Tensor, aten.lt.Tensor):  # fmt: skip
            if op not in (aten.isclose.default, aten.complex.default) or (a.dim() and b.dim()):
                add(op, a.abs() + 0.1 if op is aten.pow.Tensor_Tensor else a, b)
        add(aten.polar.default, a.abs(), b)
        add(aten.where.self, truths(6, 12), a, b)
        add(aten.where.self, truths(12), a, b)
        add(aten.lerp.Scalar, a, b, 0.3)
        add(aten.add.Tensor, a, b, alpha=0.5)
        add(aten.sub.Tensor, a, b, alpha=2.0)
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        add(op, floats(6, 12), 2.0)
    add(aten.add.Scalar, floats(6, 12), 2.0)
    add(aten.mul.Scalar, floats(6, 12), 2.0)
    add(aten.div.Scalar, floats(6, 12), 2.0)
    add(aten.div.Tensor_mode, floats(6, 12), floats(12), rounding_mode="floor")
    x, g = floats(6, 12), floats(6, 12)
    for packet in (aten.neg, aten.exp, aten.relu, aten.tanh, aten.sigmoid, aten.gelu, aten.silu, aten.erf, aten.sin,
               aten.abs,
               aten.isnan, aten.logical_not, aten.hardswish, aten.hardsigmoid, aten.softplus, aten.elu, aten.square,
               aten.leaky_relu, aten.mish, aten.round, aten.sign, aten.reciprocal, aten.nan_to_num):  # fmt: skip
        add(packet.default, x)
    add(aten.clamp.default, x, -0.5, 0.5)
    add(aten.pow.Tensor_Scalar, x, 2)
    add(aten.where.ScalarSelf, truths(6, 12), 1.0, x)
    add(aten.where.ScalarOther, truths(6, 12), floats(12), 0.0)
    add(aten.where.Scalar, truths(6, 12), 1.0, 0.0)
    add(aten.fill.Scalar, x, 1.0)
    add(aten.fill.Tensor, x, floats())
    add(aten.masked_fill.Scalar, x, truths(12), 1.0)
    add(aten.masked_fill.Tensor, x, truths(6, 1), floats())
    for packet in (aten.gelu_backward, aten.silu_backward, aten.hardswish_backward, aten.hardsigmoid_backward,
               aten.tanh_backward, aten.sigmoid_backward, aten.mish_backward):  # fmt: skip
        add(packet.default, g, x)
    add(aten.gelu_backward.default, g, x, approximate="tanh")
    add(aten.threshold_backward.default, g, x, 0)
    add(aten.hardtanh_backward.default, g, x, -1, 1)
    add(aten.hardshrink_backward.default, g, x, 0.5)
    add(aten.softshrink_backward.default, g, x, 0.5)
    add(aten.elu_backward.default, g, 1.0, 1, 1, False, x)
    add(aten.leaky_relu_backward.default, g, x, 0.1, False)
    add(aten.softplus_backward.default, g, x, 1, 20)
    add(aten._prelu_kernel.default, x, floats(1, 12))
    add(aten._prelu_kernel_backward.default, g, x, floats(1, 12))
    add(aten.log_sigmoid_forward.default, x)
    add(aten.log_sigmoid_backward.default, g, x, aten.log_sigmoid_forward.default(x)[1])


def _products() -> None:
    a, b = floats(6, 12), floats(12, 6)
    add(aten.mm.default, a, b)
    add(aten.mm.default, a, floats(6, 12).t())
    add(aten.bmm.default, floats(6, 6, 12), floats(6, 12, 6))
    for bias in (floats(6), floats(6, 6), floats(1, 6), floats(6, 1), floats(1), floats()):
        add(aten.addmm.default, bias, a, b)
    add(aten.addmm.default, floats(6), a, b, beta=0.5, alpha=2.0)
    for bias in (floats(6, 6, 6), floats(1, 6), floats(6, 6), floats(6, 1, 6), floats(6, 6, 1)):
        add(aten.baddbmm.default, bias, floats(6, 6, 12), floats(6, 12, 6), beta=0.5, alpha=2.0)
    add(aten.addmv.default, floats(6), a, floats(12))
    add(aten.addmv.default, floats(1), a, floats(12))
    add(aten.dot.default, floats(12), floats(12))
    add(aten.mv.default, a, floats(12))
    for lead in ((), (6,), (6, 2)):
        x, y = floats(*lead, 6, 4), floats(*lead, 12, 4)
        d = aten._cdist_forward.default(x, y, 2.0, None)
        add(aten._cdist_forward.default, x, y, 2.0, None)
        add(aten._cdist_backward.default, floats(*d.shape), x, y, 2.0, d)


def _reductions() -> None:
    x = floats(6, 12, 6)
    for op in (aten.sum, aten.nansum):
        add(op.default, x)
    for dims, keep in itertools.product(([0], [1, -1], [0, 1, 2], []), (False, True)):
        add(aten.sum.dim_IntList, x, dims, keep)
        add(aten.nansum.default, x, dims, keep)
        add(aten.amax.default, x, dims, keep)
        add(aten.amin.default, x, dims, keep)
        if dims:
            add(aten.any.dims, x > 0, dims, keep)
            add(aten.all.dims, x > 0, dims, keep)
            add(aten.logsumexp.default, x, dims, keep)
            add(aten.count_nonzero.dim_IntList, x > 0, dims)
    add(aten.sum.dim_IntList, x > 0, [0])
    add(aten.sum.dim_IntList, x, None, dtype=torch.float32)
    for dim, keep in itertools.product((0, -1), (False, True)):
        for overload in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.prod.dim_int,
                   aten.median.dim, aten.nanmedian.dim, aten.mode.default):  # fmt: skip
            add(overload, x, dim, keep)
        add(aten.any.dim, x > 0, dim, keep)
        add(aten.all.dim, x > 0, dim, keep)
        add(aten.kthvalue.default, x, 2, dim, keep)
        add(aten.aminmax.default, x, dim=dim, keepdim=keep)
    add(aten.argmax.default, x)
    add(aten.aminmax.default, x)


def _along_a_dim() -> None:
    x, g = floats(6, 12, 6), floats(6, 12, 6)
    for dim in (0, 1, -1):
        add(aten._softmax.default, x, dim, False)
        add(aten._log_softmax.default, x, dim, False)
        add(aten._safe_softmax.default, x, dim)
        add(aten._softmax_backward_data.default, g, x.softmax(dim), dim, torch.float64)
        add(aten._log_softmax_backward_data.default, g, x.log_softmax(dim), dim, torch.float64)
        for op in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin, aten.sort, aten.argsort):
            add(op.default, x, dim)
        add(aten.sort.stable, x, stable=True, dim=dim, descending=True)
        add(aten.argsort.stable, x, stable=True, dim=dim)
        add(aten.topk.default, x, 3, dim)
        add(aten.glu.default, x, dim)
        add(aten.glu_backward.default, floats(*aten.glu.default(x, dim).shape), x, dim)
    add(aten.topk.default, x, 3)
    add(aten.linalg_cross.default, floats(6, 12, 3), floats(6, 12, 3))
    add(aten.linalg_cross.default, floats(6, 3, 12), floats(6, 3, 12), dim=1)
    for dims in ([2], [0, 1]):
        c = torch.complex(x, g)
        add(aten._fft_c2c.default, c, dims, 0, True)
        add(aten._fft_r2c.default, x, dims, 0, True)
        add(aten._fft_c2r.default, c, dims, 0, 2 * (c.shape[dims[-1]] - 1))
    add(aten.tril.default, x)
    add(aten.triu.default, x, 1)
    square = floats(6, 2, 4, 4)
    spd = square @ square.mT + torch.eye(4)
    add(aten.linalg_cholesky_ex.default, spd)
    for op in (aten.linalg_inv_ex, aten._linalg_det, aten._linalg_slogdet, aten.linalg_qr):
        add(op.default, square)
    add(aten._linalg_eigh.default, spd)
    add(aten._linalg_svd.default, square)
    add(aten.linalg_solve_triangular.default, square, floats(6, 2, 4, 3), upper=True)


def _indexing() -> None:
    words = ints(9, 6, 12)
    add(aten.embedding.default, floats(9, 6), words, 3)
    add(aten.embedding.default, floats(9, 6), ints(9, 12))
    add(aten.embedding.default, floats(12, 6), ints(12, 6), 0)
    add(aten.embedding.default, floats(12, 6), ints(12, 6, 12))
    for scaled, padding in itertools.product((False, True), (-1, 3)):
        add(aten.embedding_dense_backward.default, floats(6, 12, 6), words, 9, padding, scaled)
        add(aten.embedding_dense_backward.default, floats(6, 12, 6), ints(12, 6, 12), 12, padding, scaled)
    x = floats(6, 12, 6)
    for dim in (0, 1, -1):
        where = ints(6, 6, 12, 6)
        add(aten.gather.default, x, dim, where)
        add(aten.gather.default, x, dim, ints(6, 6, 4, 6))
        add(aten.scatter_add.default, x, dim, where, floats(6, 12, 6))
        first = ints(6, *(1 if d == dim % 3 else s for d, s in enumerate(x.shape)))
        add(aten.gather.default, x, dim, first)
        add(aten.scatter_add.default, x, dim, ints(6, 3, 4, 2), floats(6, 12, 6))
        for place in (first, first[:3], first[:, :1], first[..., :1]):
            add(aten.scatter.src, x, dim, place, floats(6, 12, 6))
            add(aten.scatter.value, x, dim, place, 2.0)
        add(aten.scatter.value, ints(9, 6, 12, 6), dim, first, 2)
        # Each place is written once, or which write lasts would not be defined.
        places = floats(6, 12, 6).argsort(dim)
        add(aten.scatter.src, x, dim, places, floats(6, 12, 6))
        add(aten.scatter.value, x, dim, places, 2.0)
        add(aten.scatter.reduce, x, dim, where, floats(6, 12, 6), reduce="multiply")
        add(aten.scatter.value_reduce, x, dim, places, 2.0, reduce="multiply")
        add(aten.scatter_reduce.two, x, dim, where, floats(6, 12, 6), "mean")
        add(aten.scatter_reduce.two, x, dim, where, floats(6, 12, 6), "amax", include_self=False)
        one = torch.tensor([3, 0, 5])
        rows = floats(*(3 if d == dim % 3 else s for d, s in enumerate(x.shape)))
        add(aten.index_select.default, x, dim, ints(6, 12))
        add(aten.index_add.default, x, dim, one, rows)
        add(aten.index_add.default, x, dim, one, rows, alpha=2.0)
        add(aten.index_copy.default, x, dim, one, rows)
        add(aten.index_fill.int_Scalar, x, dim, one, 2.0)
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        add(op, x, [ints(6, 12)])
        add(op, x, [None, ints(6, 6, 12)])
        add(op, x, [None, ints(24, 4) - 12])
        add(op, x, [None, None, torch.tensor(-2)])
        add(op, ints(9, 12), [ints(24, 6, 1) - 12])
        add(op, x, [ints(6, 12), ints(6, 12)])
        add(op, x, [ints(6, 12, 1), ints(6, 1, 6)])
        add(op, x, [ints(6, 12), None, ints(6, 12)])
        add(op, x, [None, ints(6, 12), ints(6, 6, 1)])
    add(aten.index.Tensor, x, [truths(6, 12)])
    for op in (aten.index_put.default, aten._unsafe_index_put.default):
        for accumulate in (False, True):
            one = torch.tensor([3, 0, 5])
            add(op, x, [one], floats(3, 12, 6), accumulate)
            add(op, x, [one], floats(6), accumulate)
            add(op, x, [None, one], floats(6, 3, 6), accumulate)
            add(op, x, [None, one], floats(3, 1), accumulate)
            add(op, x, [None, one - 6], floats(3, 1), accumulate)
            add(op, x, [None, None, one.view(3, 1) - 6], floats(3, 1), accumulate)
            add(op, x, [None, one, one], floats(6, 3), accumulate)
            add(op, x, [one, None, one], floats(3, 12), accumulate)
        add(op, x, [ints(6, 12)], floats(12, 12, 6), True)
        add(op, x, [truths(6, 12)], floats(), False)
    bounds = floats(12).sort().values
    add(aten.bucketize.Tensor, floats(6, 12), bounds)
    add(aten.searchsorted.Tensor, bounds, floats(6, 12))
    add(aten.searchsorted.Tensor, bounds, floats(6))
    add(aten.searchsorted.Tensor, floats(6, 12).sort(-1).values, floats(6, 4), right=True)
    add(aten.isin.Tensor_Tensor, ints(9, 6, 12), ints(9, 6))


def _norms() -> None:
    x, w, b = floats(6, 12, 6), floats(6), floats(6)
    for shape, weight, bias in (([6], w, b), ([6], None, None), ([6], w, None), ([12, 6], floats(12, 6), floats(12, 6)),
                                ([6, 12, 6], floats(6, 12, 6), None)):  # fmt: skip
        add(aten.native_layer_norm.default, x, shape, weight, bias, 1e-5)
        _, mean, rstd = aten.native_layer_norm.default(x, shape, weight, bias, 1e-5)
        wanted = [True, weight is not None, bias is not None]
        add(aten.native_layer_norm_backward.default, floats(6, 12, 6), x, shape, mean, rstd, weight, bias, wanted)
        add(aten._fused_rms_norm.default, x, shape, weight, 1e-5)
    x = floats(6, 4, 5, 3)
    for weight, bias in ((floats(4), floats(4)), (None, None)):
        _, mean, rstd = aten.native_group_norm.default(x, weight, bias, 6, 4, 15, 2, 1e-5)
        add(aten.native_group_norm.default, x, weight, bias, 6, 4, 15, 2, 1e-5)
        wanted = [True, weight is not None, weight is not None]
        add(aten.native_group_norm_backward.default, floats(*x.shape), x, mean, rstd, weight, 6, 4, 15, 2, wanted)
    x, weight = floats(6, 12, 5), floats(12)
    _, mean, rstd = aten.native_group_norm.default(x, weight, weight, 6, 12, 5, 6, 1e-5)
    add(aten.native_group_norm.default, x, weight, None, 6, 12, 5, 6, 1e-5)
    for each in itertools.product((True, False), repeat=3):
        if any(each):
            add(aten.native_group_norm_backward.default, floats(*x.shape), x, mean, rstd, weight, 6, 12, 5, 6,
                list(each))  # fmt: skip
    v, g = floats(6, 4), positive(6, 1)
    w, norms = aten._weight_norm_interface.default(v, g, 0)
    add(aten._weight_norm_interface_backward.default, floats(6, 4), v, g, norms, 0)


def _convolutions() -> None:
    for space, groups, transposed, biased in itertools.product((1, 2, 3), (1, 2), (False, True), (False, True)):
        n = [1] * space
        x = floats(6, 6, *[5] * space)
        weight = floats(6, 6 // groups, *[3] * space)
        bias = floats(6) if biased else None
        rest = (n, n, n, transposed, [0] * space, groups)
        y = aten.convolution.default(x, weight, bias, *rest)
        add(aten.convolution.default, x, weight, bias, *rest)
        add(aten.convolution_backward.default, floats(*y.shape), x, weight, [6] if biased else None, *rest,
            [True, True, biased])  # fmt: skip
    for groups, width, transposed in itertools.product((1, 6, 12), (12, 24), (False, True)):
        x = floats(6, 12, 5)
        weight = floats(12, width // groups, 3) if transposed else floats(width, 12 // groups, 3)
        rest = ([1], [1], [1], transposed, [0], groups)
        add(aten.convolution.default, x, weight, None, *rest)
        add(aten.convolution.default, x, weight, floats(width), *rest)
        for wanted in ([True, True, True], [False, True, True], [True, False, False], [False, False, True]):
            add(aten.convolution_backward.default, floats(6, width, 5), x, weight, [width], *rest, wanted)


def _pools() -> None:
    for n, batch in itertools.product((1, 2, 3), ((6, 4), (4,))):
        x = floats(*batch, *[6] * n)
        if n > 1:
            y, where = getattr(aten, f"max_pool{n}d_with_indices").default(x, [2] * n)
            add(getattr(aten, f"max_pool{n}d_with_indices").default, x, [2] * n)
            add(getattr(aten, f"max_pool{n}d_with_indices_backward").default, floats(*y.shape), x, [2] * n, [2] * n,
                [0] * n, [1] * n, False, where)  # fmt: skip
            add(getattr(aten, f"avg_pool{n}d").default, x, [2] * n)
            add(getattr(aten, f"avg_pool{n}d_backward").default, floats(*y.shape), x, [2] * n, [2] * n, [0] * n, False,
                True, None)  # fmt: skip
            add(getattr(aten, f"_adaptive_avg_pool{n}d").default, x, [3] * n)
            add(getattr(aten, f"_adaptive_avg_pool{n}d_backward").default, floats(*batch, *[3] * n), x)
            y, where = getattr(aten, f"adaptive_max_pool{n}d").default(x, [3] * n)
            add(getattr(aten, f"adaptive_max_pool{n}d").default, x, [3] * n)
            add(getattr(aten, f"adaptive_max_pool{n}d_backward").default, floats(*y.shape), x, where)
        for name in (f"reflection_pad{n}d", f"replication_pad{n}d"):
            pad = [1, 2] * n
            y = getattr(aten, name).default(x, pad)
            add(getattr(aten, name).default, x, pad)
            add(getattr(aten, name + "_backward").default, floats(*y.shape), x, pad)
    for n in (1, 2, 3):
        x, size, scales = floats(6, 4, *[6] * n), [9] * n, [None] * n
        plain = [f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"]
        aligned = {
            1: ["upsample_linear1d"],
            2: ["upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"],
            3: ["upsample_trilinear3d"],
        }[n]
        for name in plain + aligned:
            extra = [False] if name in aligned else []
            add(getattr(aten, name).default, x, size, *extra, *scales)
            add(getattr(aten, name + "_backward").default, floats(6, 4, *size), size, [6, 4, *[6] * n], *extra, *scales)
    for n, op in ((2, aten.grid_sampler_2d), (3, aten.grid_sampler_3d)):
        x, grid = floats(6, 4, *[5] * n), floats(6, *[4] * n, n)
        add(op.default, x, grid, 0, 0, False)
        back = getattr(aten, f"grid_sampler_{n}d_backward").default
        add(back, floats(6, 4, *[4] * n), x, grid, 0, 0, False, [True, True])
    add(aten.pixel_shuffle.default, floats(6, 2, 8, 3, 3), 2)
    add(aten.pixel_unshuffle.default, floats(6, 2, 2, 4, 4), 2)
    x = floats(6, 4, 5, 5)
    y = aten.im2col.default(x, [3, 3], [1, 1], [0, 0], [1, 1])
    add(aten.im2col.default, x, [3, 3], [1, 1], [0, 0], [1, 1])
    add(aten.im2col.default, floats(6, 5, 5), [3, 3], [1, 1], [0, 0], [1, 1])
    add(aten.col2im.default, y, [5, 5], [3, 3], [1, 1], [0, 0], [1, 1])


def _attention() -> None:
    op, back = (getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}").default for end in ("", "_backward"))
    for heads, mask in itertools.product(
        (6, 3, 2, 1),
        (None, floats(4, 5), floats(6, 1, 4, 5), floats(1, 6, 4, 5), floats(6, 6, 4, 5), floats(1, 1, 4, 5)),
    ):
        q, k, v = floats(6, 6, 4, 8), floats(6, heads, 5, 8), floats(6, heads, 5, 8)
        try:
            out, lse = op(q, k, v, attn_mask=mask)
        except RuntimeError:
            assert heads != 6  # before torch 2.14 the kernel for CPU has no grouped heads
            continue
        add(op, q, k, v, attn_mask=mask)
        add(back, floats(*out.shape), q, k, v, out, lse, 0.0, False, attn_mask=mask)
    q, k, v = (floats(6, 6, 4, 8) for _ in range(3))
    add(op, q, k, v, 0.0, True, scale=0.3)


for _make in (
    _reshapes, _creations, _arithmetic, _products, _reductions, _along_a_dim, _indexing, _norms, _convolutions, _pools,
    _attention,
):  # fmt: skip
    _make()

# Kernels that only a GPU has.
ON_GPU = {op for op in TABLE if "scaled_dot_product" in str(op) and "_for_cpu" not in str(op)}
ON_GPU.add(aten._fused_rms_norm_backward.default)


def gpu_calls() -> list[Call]:
    """A call of each op in ON_GPU, in the precision that its kernel takes."""
    found = []

    def half(*shape: int) -> Tensor:
        return floats(*shape).to("cuda", torch.bfloat16)

    for kernel in ("flash", "cudnn", "efficient"):
        op, back = (getattr(aten, f"_scaled_dot_product_{kernel}_attention{end}").default for end in ("", "_backward"))
        q, k, v, g = half(6, 6, 16, 16), half(6, 6, 32, 16), half(6, 6, 32, 16), half(6, 6, 16, 16)
        for bias in (None, half(6, 6, 16, 32)) if kernel == "efficient" else (None,):
            masked = () if kernel == "flash" else (bias, True)
            found.append(Call(op, (q, k, v, *masked), {}))
            if kernel == "flash":
                found += [Call(op, (q, k[:, :heads], v[:, :heads]), {}) for heads in (3, 1)]
            out, lse, *rest = op(q, k, v, *masked)
            if kernel == "efficient":
                seed, offset = rest
                wanted = [True, True, True, bias is not None]
                found.append(Call(back, (g, q, k, v, bias, out, lse, seed, offset, 0.0, wanted), {}))
            elif kernel == "flash":
                args = (g, q, k, v, out, lse, *rest[:4], 0.0, False, rest[4], rest[5])
                found.append(Call(back, args, {}))
            else:
                cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
                args = (g, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, 0.0, False)
                found.append(Call(back, args, {}))
    x, w = floats(6, 12, 6).cuda(), floats(6).cuda()
    y, rms = aten._fused_rms_norm.default(x, [6], w, 1e-5)
    found.append(Call(aten._fused_rms_norm_backward.default, (y, x, [6], rms, w, [True, True]), {}))
    return found


def operand_shards(op: Op, ranks: int) -> list[tuple[int, bool, Shard]]:
    """Every way to split one dim of one operand, strided splits included."""
    found = []
    for tensors, output in ((op.inputs, False), (op.outputs, True)):
        for index, tensor in enumerate(tensors):
            for dim in range(tensor.dim() if tensor is not None else 0):
                found += [(index, output, Shard(dim, outer)) for outer in (1, 2, 3, 4)]
    return found


def complaints(call: Call) -> tuple[list[str], int]:
    """What is wrong with the rows for a call, in words, and how many rows were tried."""
    op, rule = call.op(), rule_of(call.target)
    assert rule is not None
    wrong, tried = [], set()
    for ranks in RANKS:
        for index, output, shard in operand_shards(op, ranks):
            row = spread(rule, op, index, shard, output, ranks)
            if row is None or (row, ranks) in tried:
                continue
            tried.add((row, ranks))
            placement = (row.outputs if output else row.inputs)[index]
            if placement != shard:
                wrong.append(f"asked for {shard} of operand {index}, the row has {placement}")
            wrong += _compare(call, op, rule, row, ranks)
        # A sum of truth values is a count: no rule makes one a term of a partial sum.
        counted = any(x.dtype == torch.bool for x in op.inputs)
        for row in [] if counted and op.target is not aten.where.self else _linear_rows(rule, op, ranks):
            tried.add((row, ranks))
            wrong += _compare(call, op, rule, row, ranks)
    return wrong, len(tried)


def _name(value: Any) -> str:
    return str(value) if isinstance(value, torch._ops.OpOverload) else ""


def _linear_rows(rule: Rule, op: Op, ranks: int) -> list[Row]:
    rows = []
    for inputs in rule.linear(op):
        placed = tuple(PARTIAL if i in inputs else Replicate() for i in range(len(op.inputs)))
        for row in candidates(rule, op, placed, ranks):
            if any(isinstance(p, Partial) for p in row.inputs):
                assert {i for i, p in enumerate(row.inputs) if p == PARTIAL} == set(inputs)
                rows.append(row)
    return rows


def _compare(call: Call, op: Op, rule: Rule, row: Row, ranks: int) -> list[str]:
    where = f"{call}: {' '.join(map(str, row.inputs))} -> {' '.join(map(str, row.outputs))} on {ranks}"
    try:
        results = run_on_shards(op, rule, row, ranks)
    except (RuntimeError, IndexError, ValueError) as error:
        return [f"{where}: {str(error).splitlines()[0]}"]
    wrong = []
    for i, (whole, placement) in enumerate(zip(op.outputs, row.outputs, strict=True)):
        if whole is None:
            continue
        found = join([result[i] for result in results], placement)
        if found is not None and isinstance(placement, Shard) and placement.outer == 1:
            found = found.narrow(placement.dim, 0, min(whole.shape[placement.dim], found.shape[placement.dim]))
        if found is None or found.shape != whole.shape or found.dtype != whole.dtype:
            wrong.append(
                f"{where}: output {i} is {found if found is None else tuple(found.shape)}, not {tuple(whole.shape)}"
            )
        elif "empty" not in str(call.target) and not _close(found, whole):
            wrong.append(f"{where}: output {i} is off by {(found.double() - whole.double()).abs().max():.1e}")
    return wrong


def _close(found: Tensor, whole: Tensor) -> bool:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(whole.dtype, 1e-9)
    return torch.allclose(found, whole, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_every_row_of_the_table_is_called() -> None:
    missing = [str(op) for op in TABLE if op not in CALLS and op not in ON_GPU]
    assert not missing, f"add a sample call to tests/test_rules.py for {', '.join(missing)}"


@pytest.mark.parametrize("target", list(CALLS), ids=str)
def test_rows_of_an_op_are_right_by_value(target: Any) -> None:
    wrong: list[str] = []
    tried = 0
    for call in CALLS[target]:
        found, count = complaints(call)
        wrong += found
        tried += count
    assert not wrong, "\n".join(wrong[:20])
    assert tried, f"no row of {target} was tried: its sample calls have no operand that the rule splits"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels exist only on a GPU")
def test_rows_of_ops_that_only_a_gpu_has_are_right_by_value() -> None:
    calls = gpu_calls()
    assert {call.target for call in calls} == ON_GPU
    for call in calls:
        wrong, tried = complaints(call)
        assert not wrong, "\n".join(wrong)
        assert tried, f"no row of {call} was tried"


@pytest.mark.parametrize(
    ("target", "args", "row"),
    [
        (aten._softmax.default, (floats(6, 12), -1, False), Row((Shard(1),), (Shard(1),))),
        (aten.sum.default, (floats(6, 12),), Row((Shard(0),), (Replicate(),))),
        (aten.mm.default, (floats(6, 12), floats(12, 6)), Row((Shard(1), Shard(0)), (Shard(0),))),
        (aten.exp.default, (floats(6, 12),), Row((PARTIAL,), (PARTIAL,))),
        (aten.add.Tensor, (floats(6, 12), floats(12)), Row((PARTIAL, Replicate()), (PARTIAL,))),
        (aten.view.default, (floats(12, 6), [72]), Row((Shard(1),), (Shard(0),))),
    ],
    ids=_name,
)
def test_a_wrong_row_is_noticed(target: Any, args: Any, row: Row) -> None:
    call, rule = Call(target, args, {}), rule_of(target)
    assert rule is not None
    assert _compare(call, call.op(), rule, row, 2)


ROWS: list[tuple[Any, Any, str, str]] = [
    (aten.amax.default, (floats(6, 12), [1]), "S(1)", "P(max)"),
    (aten.amin.default, (floats(6, 12), [1], True), "S(1)", "P(min)"),
    (aten.amax.default, (truths(6, 12), [1]), "S(1)", ""),
    (aten.embedding.default, (floats(12, 4), ints(12, 6)), "S(0) R", "P"),
    (aten.embedding.default, (floats(12, 4), ints(12, 6)), "S(0/2) R", ""),
    (aten.gather.default, (floats(6, 12), 1, ints(12, 6, 1)), "S(1) R", "P"),
    (aten.scatter.value, (floats(6, 12), 1, ints(12, 6, 1), 1.0), "S(1) R", "S(1)"),
    (aten.index.Tensor, (floats(6, 12), [None, ints(12, 6)]), "S(1) R", "P"),
    (aten.split.Tensor, (floats(6, 12), 4, 1), "S(1/3)", "S(1) S(1) S(1)"),
    (aten.split.Tensor, (floats(6, 12), 4, 1), "S(1)", ""),
    (aten.split.Tensor, (floats(6, 24), 12, 1), "S(1/4)", "S(1/2) S(1/2)"),
    (aten.split_with_sizes.default, (floats(6, 24), [16, 8], 1), "S(1/3)", "S(1/2) S(1)"),
    (aten.cat.default, ([floats(6, 4), floats(6, 4)], 1), "S(1) S(1)", "S(1/2)"),
    (aten.cat.default, ([floats(6, 4), floats(6, 4)], 0), "S(1) S(1)", "S(1)"),
    (aten.slice.Tensor, (floats(6, 12), 1, 4, 12), "S(1/3)", "S(1/2)"),
    (aten.slice.Tensor, (floats(6, 12), 1, 3, 12), "S(1/3)", ""),
    (
        aten.convolution.default,
        (floats(6, 6, 5), floats(12, 6, 3), None, [1], [0], [1], False, [0], 1),
        "S(1) S(1)",
        "P",
    ),
    (
        aten.convolution.default,
        (floats(6, 12, 5), floats(24, 1, 3), floats(24), [1], [0], [1], False, [0], 12),
        "S(1) S(0) S(0)",
        "S(1)",
    ),
    (aten.native_group_norm.default, (floats(6, 12, 5), None, None, 6, 12, 5, 3, 1e-5), "S(1)", ""),
    (aten.native_group_norm.default, (floats(6, 12, 5), None, None, 6, 12, 5, 4, 1e-5), "S(1)", "S(1) S(1) S(1)"),
]


@pytest.mark.parametrize(("target", "args", "inputs", "outputs"), ROWS, ids=_name)
def test_the_first_input_is_split_so(target: Any, args: Any, inputs: str, outputs: str) -> None:
    """`outputs` is empty where no row splits the first input so."""
    op, rule = Call(target, args, {}).op(), rule_of(target)
    assert rule is not None
    dim, _, outer = inputs.split()[0].strip("S()").partition("/")
    row = spread(rule, op, 0, Shard(int(dim), int(outer or 1)), False, 2)
    found = (" ".join(map(str, row.inputs)), " ".join(map(str, row.outputs))) if row is not None else (inputs, "")
    assert found == (inputs, outputs)


def test_a_cast_that_rounds_is_not_linear() -> None:
    def linear(x: Tensor, dtype: torch.dtype) -> bool:
        call = Call(aten._to_copy.default, (x,), {"dtype": dtype})
        return bool(TABLE[aten._to_copy.default].linear(call.op()))

    assert linear(floats(6), torch.float32)
    assert linear(ints(9, 6), torch.float64)
    assert not linear(floats(6), torch.int64)
    assert not linear(floats(6), torch.bool)


def test_a_gradient_scaled_by_word_counts_is_not_split_by_words() -> None:
    call = Call(aten.embedding_dense_backward.default, (floats(6, 12), ints(9, 6), 9, -1, True), {})
    assert spread(TABLE[call.target], call.op(), 1, Shard(0), False, 2) is None


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mm.default, (floats(6, 12), floats(12, 6))),
        (aten.sum.dim_IntList, (floats(6, 12), [0])),
        (aten._softmax.default, (floats(6, 12), -1, False)),
        (aten.convolution.default, (floats(6, 6, 5), floats(6, 6, 3), None, [1], [0], [1], False, [0], 1)),
        (aten.view.default, (floats(6, 12), [72])),
        (aten.new_full.default, (floats(6, 12), [6, 12], 1.5)),
        (aten.embedding_dense_backward.default, (floats(6, 12), ints(9, 6), 9, -1, False)),
    ],
    ids=_name,
)
def test_the_proposals_for_an_op_hold_the_rows_of_the_table(target: Any, args: Any) -> None:
    call, rule = Call(target, args, {}), TABLE[target]
    op = call.op()
    rows = {spread(rule, op, i, Shard(d), False, 2) for i, x in enumerate(op.inputs) for d in range(x.dim())} | set(
        _linear_rows(rule, op, 2)
    )
    rows.discard(None)
    assert rows
    assert rows <= set(propose(target, *args))


def test_rows_are_proposed_for_an_op_that_the_table_lacks() -> None:
    target = aten.cosine_similarity.default
    assert rule_of(target) is None
    assert propose(target, floats(6, 12), floats(6, 12), 1) == [Row((Shard(0), Shard(0)), (Shard(0),))]


def test_the_command_prints_rows_for_review(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten.mm.default", "f6,12 f12,6"]) == 0
    assert "S(1), S(0) -> P" in capsys.readouterr().out
    assert main([]) == 2


def _separated(function: Any, *args: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in args]
        module = make_fx(function, fake)
        with separate_samples(module):
            return module, make_fx(lambda *xs: torch.fx.Interpreter(module).run(*xs), fake)


def _rows(n: int, *more: int) -> Tensor:
    return torch.arange(n).view(-1, *[1] * len(more))


@pytest.mark.parametrize(
    ("name", "function", "args", "gone"),
    [
        ("row and column", lambda x, i: x[torch.arange(6), i], (floats(6, 5, 3), ints(5, 6)), aten.index.Tensor),
        (
            "rows and columns",
            lambda x, i: x[torch.arange(6)[:, None], i],
            (floats(6, 5), ints(5, 6, 4)),
            aten.index.Tensor,
        ),
        ("negative", lambda x, i: x[torch.arange(6), -1 - i], (floats(6, 5), ints(5, 6)), aten.index.Tensor),
        (
            "three",
            lambda x, i, j: x[torch.arange(6), i, j],
            (floats(6, 5, 4, 3), ints(5, 6), ints(4, 6)),
            aten.index.Tensor,
        ),
        (
            "gradient by row",
            lambda v, i: torch.zeros(6, 5, 3, dtype=v.dtype).index_put([torch.arange(6), i], v, True),
            (floats(6, 3), ints(5, 6)),
            aten.index_put.default,
        ),
        (
            "gradient by index",
            lambda v, i: torch.zeros(5, 3, dtype=v.dtype).index_put([i], v, True),
            (floats(6, 4, 3), ints(5, 6, 4)),
            aten.index_put.default,
        ),
        (
            "gradient by two",
            lambda v, i, j: torch.zeros(5, 4, 3, dtype=v.dtype).index_put([i, j], v, True),
            (floats(6, 3), ints(5, 6), ints(4, 6)),
            aten.index_put.default,
        ),
        (
            "bags of means",
            lambda w, i: torch.nn.functional.embedding_bag(i, w, mode="mean"),
            (floats(9, 4), ints(9, 6, 5)),
            aten._embedding_bag_forward_only.default,
        ),
        (
            "bags of sums",
            lambda w, i: torch.nn.functional.embedding_bag(i, w, mode="sum"),
            (floats(9, 4), ints(9, 6, 5)),
            aten._embedding_bag_forward_only.default,
        ),
    ],
)
def test_calls_with_known_indices_are_written_so_that_samples_stay_apart(
    name: str, function: Any, args: Any, gone: Any
) -> None:
    before, after = _separated(function, *args)
    assert any(node.target is gone for node in before.graph.nodes), before.graph
    assert not any(node.target is gone for node in after.graph.nodes), after.graph
    torch.testing.assert_close(after(*args), function(*args), rtol=1e-12, atol=1e-12)


def test_an_index_that_is_the_same_for_every_sample_stays_an_index() -> None:
    x = floats(6, 5)

    def pick(x: Tensor) -> Tensor:
        return x[_rows(6, 1, 1), torch.tensor([[4, 0, 2]]).expand(1, 3)[None]]

    _, after = _separated(pick, x)
    torch.testing.assert_close(after(x), pick(x))
    assert not any(node.target is aten.gather.default for node in after.graph.nodes)


def test_rows_in_another_order_are_left_alone() -> None:
    def pick(x: Tensor, i: Tensor) -> Tensor:
        return x[torch.arange(5, -1, -1), i]

    x, i = floats(6, 5), ints(5, 6)
    _, after = _separated(pick, x, i)
    assert any(node.target is aten.index.Tensor for node in after.graph.nodes)
    torch.testing.assert_close(after(x, i), pick(x, i))
