"""Rewrite what has no sharding rule into ops that have one; drop what computes nothing.

Before: a functional graph at global shapes, any aten ops.
After: batch norm is sums, losses are gathers and sums, means are sums over counts, every random draw is
``autoshard::uniform``; no detach, alias, or view to the same shape is left.

    native_batch_norm(x, w, b, ...)        ->  sum(x) / n, sum((x - mean) ** 2) / n, then pointwise
    nll_loss_forward(logp, y)              ->  gather(logp, 1, y), sum, div
    bernoulli(x, 0.9)                      ->  uniform(key, call, shape) < 0.9
    detach(x); view(x, x.shape)            ->  x

On a mesh with an axis that splits weights, sums that a fused op hides are written out too, so that the summed dim
can be split and only the sums are reduced:

    addmm(bias, x, w)                      ->  mm(x, w) + bias
    _log_softmax(x, 1)                     ->  x - amax(x, 1) - log(sum(exp(x - amax(x, 1)), 1))
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autoshard import compat, ops, randomness
from autoshard.compat import pytree
from autoshard.errors import CaptureError
from autoshard.fragments import Writer
from autoshard.manager import PassContext
from autoshard.program import TAG, Graph, Kind, Program, tag
from autoshard.retrace import Decompositions, clean, default_tag
from autoshard.rules.rewrites import separate_samples

aten = torch.ops.aten

_DROPPED = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_SAME_SHAPE = {aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.reshape.default}

# Losses and norms that torch itself can write with gather, sum and pointwise ops.
_SUMMED_BY_TORCH = [
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
    aten.mse_loss,
    aten.smooth_l1_loss,
    aten.huber_loss,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.linalg_vector_norm,
    aten.norm,
]
# What else torch can write so.
_BY_TORCH = [
    aten.nll_loss_backward,
    aten.nll_loss2d_backward,
    aten.mse_loss_backward,
    aten.smooth_l1_loss_backward,
    aten.huber_loss_backward,
    aten.binary_cross_entropy_backward,
    aten.soft_margin_loss_backward,
    aten.addcmul,
    aten.addcdiv,
    aten.repeat,
    aten.select_scatter,
    aten.trace,
]


def canonicalize(program: Program, context: PassContext) -> Program:
    for name, graph in program.graphs.items():
        program = program.with_graph(name, _canonical(graph, context))
    return program


def _canonical(graph: Graph, context: PassContext) -> Graph:
    table = compat.torch_decompositions(_BY_TORCH)
    summed = compat.torch_decompositions(_SUMMED_BY_TORCH)
    table.update({op: functools.partial(_summed_wide, form) for op, form in summed.items()})
    table.update(_OWN)
    if any(axis.name not in ("data", "pipeline") for axis in context.axes):
        table.update(_SUMS_WRITTEN_OUT)
    ranks = 1 if context.data is None else context.axes[context.data].ranks
    table[aten._native_batch_norm_legit_functional.default] = functools.partial(_batch_norm, ranks)
    table[aten._native_batch_norm_legit.no_stats] = functools.partial(_batch_norm_without_statistics, ranks)
    graph = _Rewrite(graph, table).run()
    module = graph.module
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_nothing(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    for node in module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace == "autoshard":
            continue
        if torch.Tag.nondeterministic_seeded in target.tags and _argument(node, "dropout_p") != 0:
            raise CaptureError(
                f"{tag(node).module or 'the loss'} draws random numbers with {target}, for which there is no "
                "counter-based form; use torch.rand*, torch.randn*, torch.bernoulli or dropout"
            )
    clean(module)
    return Graph(module, graph.signature)


def _argument(node: fx.Node, name: str) -> Any:
    """The value of an op's argument by its name in the schema, None if there is none of that name."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


class _Rewrite:
    """Writes a graph again: what `table` or `separate_samples` has a form for in that form, the rest as it is."""

    def __init__(self, graph: Graph, table: Decompositions) -> None:
        self.graph = graph
        self.writer = Writer()
        self.new: dict[fx.Node, Any] = {}
        self.key = graph.placeholders()[next(i for i, _ in graph.signature.find_inputs(Kind.RNG))]
        self.traced_key: Tensor | None = None  # of the fragment that is being traced
        self.table = table | randomness.decompositions(self._key_of_fragment)

    def run(self) -> Graph:
        first = default_tag(self.graph)
        with separate_samples(self.graph.module):
            for node in self.graph.module.graph.nodes:
                if node.op == "placeholder":
                    value = node.meta["val"]
                    given = node.meta.get(TAG, first)
                    self.new[node] = self.writer.placeholder(node.name, value.shape, value.dtype, value.device, given)
                elif node.op == "get_attr":
                    self.new[node] = self.writer.constant(node, self.graph.module)
                elif node.op == "call_function":
                    self.new[node] = self._call(node)
        module = self.writer.finish([self.new[node] for node in self.graph.output_nodes()])
        return Graph(module, self.graph.signature)

    def _key_of_fragment(self) -> Tensor:
        assert self.traced_key is not None
        return self.traced_key

    def _call(self, node: fx.Node) -> Any:
        given: Any = fx.map_arg((node.args, node.kwargs), self.new.__getitem__)
        args, kwargs = given
        has_form = not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem
        if not has_form and node.target not in self.table:
            return self.writer.copy(node, args, kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        target: Any = node.target

        def run(*tensors: Tensor) -> Any:
            *own, self.traced_key = tensors
            values = iter(own)
            args, kwargs = pytree.tree_unflatten([next(values) if isinstance(x, fx.Node) else x for x in leaves], tree)
            return target(*args, **kwargs)

        # Every draw has a number of its own, and so has every form.
        unique = has_form or torch.Tag.nondeterministic_seeded in target.tags
        fixed = tuple("*" if isinstance(leaf, fx.Node) else repr(leaf) for leaf in leaves)
        key = None if unique else (target, repr(tree), fixed)
        return self.writer.write(run, [*nodes, self.new[self.key]], tag(node), key, self.table)


def _is_nothing(node: fx.Node) -> bool:
    if node.target in _DROPPED:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if node.target in _SAME_SHAPE or node.target is aten.slice.Tensor:
        return before.shape == after.shape
    if node.target is aten._to_copy.default:
        same = before.dtype == after.dtype and before.device == after.device
        return same and node.kwargs.get("memory_format") in (None, torch.preserve_format)
    return node.target is aten.clone.default and before.stride() == after.stride()


def _summed_wide(form: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A loss or norm of half-precision tensors, summed in float32 and rounded once, as torch's kernels do.

    What it returns besides is for its own gradient only, and stays wide: a count of tokens does not fit float16.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    dtypes = {x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()}
    given = dtypes.pop() if len(dtypes) == 1 else None
    if given not in ops.HALF or any(isinstance(x, torch.dtype) for x in leaves):
        return form(*args, **kwargs)
    args, kwargs = pytree.tree_map(lambda x: ops.wide(x) if isinstance(x, Tensor) else x, (args, kwargs))
    found = form(*args, **kwargs)
    if isinstance(found, Tensor):
        return ops.rounded(found, given)
    return (ops.rounded(found[0], given), *found[1:])


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    given = dtype or x.dtype
    return ops.rounded(x.sum(dtype=torch.float32 if given in ops.HALF else dtype) / x.numel(), given)


def _mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    given = dtype or x.dtype
    total = x.sum(dim, keepdim, dtype=torch.float32 if given in ops.HALF else dtype)
    return ops.rounded(total / (x.numel() // max(total.numel(), 1)), given)


def _statistics(x: Tensor, ranks: int) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance over all dims but 1, kept as (1, C, 1, ...), and how many values each is of.

    The batch is seen as one part per data rank; the parts' (mean, M2) become whole in one collective and are
    combined by the parallel form of Chan, Golub and LeVeque (1979), which does not cancel. Both are float32 for
    half-precision `x`.
    """
    x = ops.wide(x)
    n = x.numel() // x.shape[1]
    parts = ranks if x.shape[0] % ranks == 0 else 1
    split = x.unflatten(0, (parts, -1))
    dims = [d for d in range(split.dim()) if d not in (0, 2)]
    each = split.sum(dims, keepdim=True) / (n // parts)
    spread = (split - each).square().sum(dims)
    both = torch.stack([each.flatten(1), spread], 1)
    if parts > 1:
        both = ops.whole(both)
    means, spreads = both[:, 0], both[:, 1]
    mean = means.sum(0) / parts
    variance = (spreads.sum(0) + (means - mean).square().sum(0) * (n // parts)) / n
    shape = (1, -1, *[1] * (x.dim() - 2))
    return mean.view(shape), variance.view(shape), n


def _channel(t: Tensor | None, x: Tensor) -> Tensor | None:
    return None if t is None else ops.wide(t).view(1, -1, *[1] * (x.dim() - 2))


def _batch_norm(
    ranks: int,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Batch norm (arXiv:1502.03167) over the global batch; also returns the new running statistics."""
    new_mean, new_var = running_mean, running_var
    if training or running_mean is None or running_var is None:
        mean, variance, n = _statistics(x, ranks)
        if running_mean is not None and running_var is not None:
            unbiased = variance.flatten() * (n / max(n - 1, 1))
            new_mean = ops.wide(running_mean) * (1 - momentum) + mean.flatten() * momentum
            new_var = ops.wide(running_var) * (1 - momentum) + unbiased * momentum
            new_mean = ops.rounded(new_mean, running_mean.dtype)
            new_var = ops.rounded(new_var, running_var.dtype)
    else:
        mean, variance = _channel(running_mean, x), _channel(running_var, x)  # type: ignore[assignment]
    rstd = (variance + eps).rsqrt()
    out = (ops.wide(x) - mean) * rstd
    if weight is not None:
        out = out * _channel(weight, x)  # type: ignore[operator]
    if bias is not None:
        out = out + _channel(bias, x)  # type: ignore[operator]
    out = ops.rounded(out, x.dtype)
    saved = (mean.flatten(), rstd.flatten()) if training else (x.new_empty((0,)), x.new_empty((0,)))
    return out, *saved, new_mean, new_var


def _batch_norm_without_statistics(
    ranks: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor | None, ...]:
    return _batch_norm(ranks, x, weight, bias, None, None, True, momentum, eps)[:3]


def _batch_norm_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    training: bool,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    given, x, gradient = x.dtype, ops.wide(x), ops.wide(gradient)
    dims = [d for d in range(x.dim()) if d != 1]
    n = x.numel() // x.shape[1]
    if training:
        mean, rstd = _channel(save_mean, x), _channel(save_rstd, x)
    else:
        assert running_var is not None
        mean, rstd = _channel(running_mean, x), _channel((ops.wide(running_var) + eps).rsqrt(), x)
    assert mean is not None
    assert rstd is not None
    normal = (x - mean) * rstd
    # Both sums in one tensor, so that they are reduced by one collective.
    sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
    scale = rstd if weight is None else rstd * _channel(weight, x)  # type: ignore[operator]
    if training:
        shift, slope = _channel(sums[0], x), _channel(sums[1], x)
        assert shift is not None
        assert slope is not None
        dx = (gradient - shift / n - normal * (slope / n)) * scale
    else:
        dx = gradient * scale
    of_weight = given if weight is None else weight.dtype
    return (
        ops.rounded(dx, given) if wanted[0] else None,
        ops.rounded(sums[1].clone(), of_weight) if wanted[1] else None,
        ops.rounded(sums[0].clone(), of_weight) if wanted[2] else None,
    )


def _filled(x: Tensor, size: Any, value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A tensor of one value reads nothing of what it is like, so nothing need be gathered for it."""
    return torch.full(size, value, dtype=dtype or x.dtype, device=x.device)


def _filled_like(x: Tensor, value: Any = 0, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.full(x.shape, value, dtype=dtype or x.dtype, device=x.device)


def _of_zeros(x: Tensor, size: Any, **options: Any) -> Tensor:
    return _filled(x, size, 0, **options)


def _of_ones(x: Tensor, size: Any, **options: Any) -> Tensor:
    return _filled(x, size, 1, **options)


def _ones_like(x: Tensor, **options: Any) -> Tensor:
    return _filled_like(x, 1, **options)


def _squeezed(x: Tensor, dim: Any = None) -> Tensor:
    """As a view, so that a dim that only the shards have of size 1 stays."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % max(x.dim(), 1) for d in dims}
    return x.view([size for d, size in enumerate(x.shape) if size != 1 or d not in gone])


def _moments(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean by two sums, so that a shard of a reduced dim gives partial sums.

    Both are float32 for half-precision `x`.
    """
    x = ops.wide(x)
    dims = list(range(x.dim())) if not dim and dim != 0 else [dim] if isinstance(dim, int) else list(dim)
    count = x.numel() // max(math.prod(s for d, s in enumerate(x.shape) if d not in {i % x.dim() for i in dims}), 1)
    mean = x.sum(dims, keepdim=True) / count
    away = x - mean
    spread = (away * away.conj()).sum(dims, keepdim=keepdim)
    freedom = max(count - (1 if correction is None else correction), 0)
    variance = (spread.real if spread.is_complex() else spread) / freedom
    return variance, mean if keepdim else x.sum(dims) / count


def _var(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return ops.rounded(_moments(x, dim, **options)[0], x.dtype) if x.dim() else NotImplemented


def _std(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return ops.rounded(_moments(x, dim, **options)[0].sqrt(), x.dtype) if x.dim() else NotImplemented


def _var_mean(x: Tensor, dim: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    if not x.dim():
        return NotImplemented
    variance, mean = _moments(x, dim, **options)
    return ops.rounded(variance, x.dtype), ops.rounded(mean, x.dtype)


def _std_mean(x: Tensor, dim: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    if not x.dim():
        return NotImplemented
    variance, mean = _moments(x, dim, **options)
    return ops.rounded(variance.sqrt(), x.dtype), ops.rounded(mean, x.dtype)


def _empty_strided(x: Tensor, size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Zeros whose dims lie in memory in the order of `stride`."""
    order = sorted(range(len(size)), key=lambda d: -stride[d])
    made = torch.full([size[d] for d in order], 0, dtype=dtype or x.dtype, device=x.device)
    return made if order == sorted(order) else made.permute([order.index(d) for d in range(len(size))])


def _product_added(product: Any) -> Callable[..., Tensor]:
    """addmm, addmv and baddbmm, so that what is added is added once where the product is a sum over ranks."""

    def form(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        found = product(a, b)
        found = found if alpha == 1 else found * alpha
        if beta == 0:  # torch reads nothing of `x` then, not even what is not a number
            return found
        return found + (x if beta == 1 else x * beta)

    return form


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The bias added after, so that it is added once where the convolution is a sum over ranks."""
    if bias is None or rest[-1] > 1:  # the channels of a group are not split
        return NotImplemented
    found = aten.convolution.default(x, weight, None, *rest)
    return found + bias.view(-1, *[1] * (x.dim() - 2))


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    given, x = x.dtype, ops.wide(x)
    away = x - x.amax(dim, keepdim=True) if x.numel() else x
    found = away - away.exp().sum(dim, keepdim=True).log()
    return found if half_to_float else ops.rounded(found, given)


def _log_softmax_gradient(gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    gradient, output = ops.wide(gradient), ops.wide(output)
    found = gradient - output.exp() * gradient.sum(dim, keepdim=True)
    return ops.rounded(found, input_dtype)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim)
    if not x.is_floating_point() or not x.numel():
        return NotImplemented
    given, x = x.dtype, ops.wide(x)
    largest = x.amax(dims, keepdim=True)
    largest = torch.where(largest.abs() == math.inf, 0, largest)  # inf - inf is not a number
    total = (x - largest).exp().sum(dims, keepdim=True).log() + largest
    return ops.rounded(total if keepdim else _squeezed(total, dims), given)


_SUMS_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: _product_added(aten.mm.default),
    aten.addmv.default: _product_added(aten.mv.default),
    aten.baddbmm.default: _product_added(aten.bmm.default),
    aten.convolution.default: _convolution,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_gradient,
    aten.logsumexp.default: _logsumexp,
}

_OWN: dict[Any, Callable[..., Any]] = {
    aten.new_full.default: _filled,
    aten.new_zeros.default: _of_zeros,
    aten.new_ones.default: _of_ones,
    aten.new_empty.default: _of_zeros,
    aten.full_like.default: _filled_like,
    aten.zeros_like.default: _filled_like,
    aten.zero.default: _filled_like,
    aten.empty_like.default: _filled_like,
    aten.ones_like.default: _ones_like,
    aten.new_empty_strided.default: _empty_strided,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.var_mean.correction: _var_mean,
    aten.std_mean.correction: _std_mean,
    aten.mean.default: _mean,
    aten.mean.dim: _mean_dim,
    aten.native_batch_norm_backward.default: _batch_norm_gradient,
}
