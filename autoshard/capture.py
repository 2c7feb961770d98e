"""A module and a loss traced to one functional graph at global shapes, with no distributed code in sight.

Inputs, in order: parameters, buffers, batch, loss weights, rng key, constants that the loss closed over.
Outputs: loss totals and counts, extras, gradients, new buffers; or the results of a forward pass.
"""

from __future__ import annotations

import contextlib
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as nn_module

from autoshard import batch as batches
from autoshard import compat, ops
from autoshard.batch import BatchSpec
from autoshard.compat import pytree
from autoshard.errors import AutoshardError, CaptureError
from autoshard.known import KnownValues
from autoshard.loss import Objective, as_objective
from autoshard.names import hint
from autoshard.program import TAG, Graph, Kind, Phase, Port, Signature, Tag, tag
from autoshard.retrace import clean, default_tag, is_mutable, retrace, stamp, tag_the_rest
from autoshard.rules import strided

Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Modules:
    """The model and the frozen modules that its loss also uses, under one set of names."""

    model: nn.Module
    frozen: Mapping[str, nn.Module]

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        yield "", self.model
        yield from ((name + ".", module) for name, module in self.frozen.items())

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter under its first name."""
        return {prefix + name: p for prefix, module in self for name, p in module.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        return {prefix + name: b for prefix, module in self for name, b in module.named_buffers()}

    def trainable(self) -> tuple[str, ...]:
        return tuple(name for name, p in self.model.named_parameters() if p.requires_grad)


@dataclass(frozen=True)
class Term:
    """How one loss term or extra is spread over a graph's outputs: (total, count), count None where constant."""

    name: str
    constant_count: float | None


@dataclass(frozen=True)
class Captured:
    """A captured graph and what the graph alone does not say.

    Args:
        graph: functional, global shapes, every node tagged with phase and module.
        constants: values of the constant inputs, by port name.
        terms: loss terms, in the order of their output ports.
        extras: extras, likewise.
        result: tree of the results of a forward pass, and its leaves that are no tensors by position.
        weighted: names of terms whose weight (1 / count over all micro-batches) is an input.
    """

    graph: Graph
    constants: Mapping[str, Tensor]
    terms: tuple[Term, ...] = ()
    extras: tuple[Term, ...] = ()
    result: Any = None
    weighted: tuple[str, ...] = ()


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model called on a batch: as one argument, as positional arguments, or as keyword arguments."""
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, (tuple, list)):
            return model(*batch)
        return model(batch)
    except TypeError as error:
        error.add_note(
            "autoshard called the model on the whole batch because no loss was given. If the model does not return its "
            "loss itself, pass loss=lambda model, batch: ... to parallelize"
        )
        raise


def capture_training(
    modules: Modules, loss: Loss, batch: Any, *, ranks: int, accumulate: int, device: torch.device
) -> Captured:
    """Forward, loss and backward of one global micro-batch.

    Args:
        batch: one rank's batch for one step; only its structure, shapes and dtypes are read.
        ranks: how many data ranks pass such a batch.
        accumulate: micro-batches per step.

    Raises:
        CaptureError: control flow depends on data, the loss is not a scalar, or nothing trainable reaches it.
    """
    hooked = [name for name, p in modules.parameters().items() if compat.has_accumulation_hooks(p)]
    if hooked:
        raise CaptureError(
            f"{hooked[0]} has a hook from register_post_accumulate_grad_hook, which never runs: gradients are reduced "
            "and used by the program, not left in .grad. Change the gradient in register_hook, which is traced, or "
            "give the optimizer to parallelize"
        )
    return _trace(_Request(modules, loss, batch, ranks, accumulate, device, gradients=True))


def capture_evaluation(modules: Modules, loss: Loss, batch: Any, *, ranks: int, device: torch.device) -> Captured:
    """Forward and loss in eval mode, without gradient."""
    with _eval_mode(modules):
        return _trace(_Request(modules, loss, batch, ranks, 1, device, gradients=False))


def capture_forward(modules: Modules, args: Any, kwargs: Any, *, ranks: int, device: torch.device) -> Captured:
    """The model's own call in eval mode; results are whatever tensors it returns."""
    with _eval_mode(modules):

        def call(model: nn.Module, batch: Any) -> Any:
            return model(*batch[0], **batch[1])

        return _trace(_Request(modules, call, (args, kwargs), ranks, 1, device, gradients=False, raw=True))


def _batch_norm(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """native_batch_norm writes its running statistics without saying so in its schema; here the write is an op."""
    functional = torch.ops.aten._native_batch_norm_legit_functional
    if mean is None or var is None:
        return torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    out, save_mean, save_rstd, new_mean, new_var = functional(x, weight, bias, mean, var, training, momentum, eps)
    if training:
        mean.copy_(new_mean)
        var.copy_(new_var)
    return out, save_mean, save_rstd


def _within(x: Tensor, *view: Any, **_: Any) -> Any:
    """A view by places in memory is refused where it cannot be said by elements, else traced as it is."""
    strided.check(x, *view)
    return NotImplemented


def _of_one_dtype(*args: Any, **_: Any) -> Any:
    """Shapes alone do not tell that kernels refuse operands of several dtypes; what is right is traced as it is."""
    dtypes = {str(x.dtype).removeprefix("torch."): x for x in args if isinstance(x, Tensor)}
    if len(dtypes) > 1:
        of = ", ".join(f"{dtype} {list(x.shape)}" for dtype, x in dtypes.items())
        raise TypeError(
            f"a product of tensors of different dtypes ({of}), which PyTorch refuses; cast the batch or the model, so "
            "that both have one"
        )
    return NotImplemented


_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution)
# How ops are traced that write without saying so, and ops that are looked at first.
_TRACED_AS: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: _batch_norm,
    **dict.fromkeys(strided.READS, _within),
    **dict.fromkeys((op.default for op in _PRODUCTS), _of_one_dtype),
}


@dataclass(frozen=True)
class _Request:
    modules: Modules
    loss: Loss
    batch: Any
    ranks: int
    accumulate: int
    device: torch.device
    gradients: bool
    raw: bool = False


class _Trace:
    """One run of the user's code under the tracer: builds the inputs, keeps what the outputs mean."""

    def __init__(self, request: _Request) -> None:
        self.request = request
        self.mode = compat.fake_mode()
        self.spec: BatchSpec = batches.describe(request.batch)
        batches.check_divides(self.spec, request.accumulate)
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self.terms: tuple[Term, ...] = ()
        self.extras: tuple[Term, ...] = ()
        self.result: Any = None
        self.weighted: tuple[str, ...] = ()
        self.batch: Any = None  # as the loss gets it

    def run(self, weights: int) -> fx.GraphModule:
        request = self.request
        parameters, buffers = request.modules.parameters(), request.modules.buffers()
        with self.mode:
            args = [self._input(Kind.PARAMETER, name, p.shape, p.dtype) for name, p in parameters.items()]
            args += [self._input(Kind.BUFFER, name, b.shape, b.dtype) for name, b in buffers.items()]
            args += [
                self._input(Kind.BATCH, leaf.path, self._global(leaf), leaf.dtype, leaf.sharded)
                for leaf in self.spec.leaves
                if leaf.shape is not None and leaf.dtype is not None
            ]
            args += [self._input(Kind.WEIGHT, str(i), (), torch.float64) for i in range(weights)]
            args.append(self._input(Kind.RNG, "rng", (2,), torch.int64))

            def body(*flat: Tensor) -> list[Tensor]:
                with _explained(self):
                    return self._body(list(parameters), list(buffers), flat)

            return compat.make_fx(body, args, _TRACED_AS)

    def _input(self, kind: Kind, name: str, shape: Sequence[int], dtype: torch.dtype, sharded: bool = False) -> Tensor:
        self.inputs.append(Port(kind, name, tuple(shape), dtype, sharded=sharded))
        return torch.empty(tuple(shape), dtype=dtype, device=self.request.device)

    def _global(self, leaf: batches.Leaf) -> tuple[int, ...]:
        shape = leaf.shape or ()
        if not leaf.sharded:
            return shape
        return (shape[0] // self.request.accumulate * self.request.ranks, *shape[1:])

    def _body(self, parameters: list[str], buffers: list[str], flat: Sequence[Tensor]) -> list[Tensor]:
        request = self.request
        stamp(compat.traced_graph(), Tag(Phase.FORWARD))
        rest = iter(flat)
        trainable = set(request.modules.trainable()) if request.gradients else set()
        given = request.modules.parameters()
        params = {
            n: compat.carry_over(given[n], next(rest).detach().requires_grad_(n in trainable)) for n in parameters
        }
        bufs = {n: next(rest) for n in buffers}
        leaves, _, tree = batches.flatten(request.batch)
        batch = self.batch = pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], tree)
        weights = list(rest)[:-1]

        with contextlib.ExitStack() as stack:
            for prefix, module in request.modules:
                own = {n: t for n, t in {**params, **bufs}.items() if _owned(n, prefix, request.modules.frozen)}
                swapped = {n.removeprefix(prefix): t for n, t in own.items()}
                stack.enter_context(compat.swapped_tensors(module, swapped))
            stack.enter_context(compat.checkpoint_bypassed())
            stack.enter_context(compat.engine_backward())
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its batch norm hides what it saves
            stack.enter_context(_module_paths(request.modules))
            stack.enter_context(KnownValues())
            stack.enter_context(contextlib.nullcontext() if request.gradients else torch.no_grad())
            returned = request.loss(request.modules.model, batch)
            if any(p.grad is not None for p in params.values()):
                raise CaptureError("the loss calls backward itself; valid: a loss that returns what is to be minimised")
            outputs = self._results(returned) if request.raw else self._losses(as_objective(returned), params, weights)
            for prefix, module in request.modules:
                for name, value in module.named_buffers():
                    if request.gradients and prefix + name in bufs:
                        self.outputs.append(Port(Kind.BUFFER, prefix + name, tuple(value.shape), value.dtype))
                        outputs.append(value.detach())
        return outputs

    def _losses(self, objective: Objective, params: Mapping[str, Tensor], weights: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = []
        self.terms = self._emit(Kind.LOSS, [("loss", mean) for mean in objective.terms], outputs)
        self.extras = self._emit(Kind.EXTRA, list(objective.extras.items()), outputs)
        if not self.request.gradients:
            return outputs
        loss = None
        weighted: list[str] = []
        for i, mean in enumerate(objective.terms):
            if self.request.accumulate == 1:
                value = mean.total if isinstance(mean.count, (int, float)) and mean.count == 1 else mean.value
            elif isinstance(mean.count, Tensor):
                total = ops.wide(mean.total)  # a weight of a count is too small a number for half precision
                value = total * weights[len(weighted)].to(total.dtype) if weights else total
                weighted.append(str(i))
            else:
                value = mean.total / (mean.count * self.request.accumulate)
            loss = value if loss is None else loss + value
        self.weighted = tuple(weighted)
        trainable = self.request.modules.trainable()
        if loss is None or not loss.requires_grad:
            raise CaptureError(
                "the loss does not depend on any trainable parameter; check for .detach(), torch.no_grad() or "
                "requires_grad=False on the way, or use step.evaluate"
            )
        stamp(compat.traced_graph(), Tag(Phase.FORWARD))
        gradients = torch.autograd.grad(loss, [params[n] for n in trainable], allow_unused=True)
        for name, gradient in zip(trainable, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise CaptureError(
                    f"the gradient of {name} is sparse; valid: dense, such as nn.Embedding(sparse=False)"
                )
        stamp(compat.traced_graph(), Tag(Phase.INPUT_GRADIENT))
        for name, gradient in zip(trainable, gradients, strict=True):
            if gradient is not None:
                self.outputs.append(Port(Kind.GRADIENT, name, tuple(gradient.shape), gradient.dtype))
                outputs.append(gradient)
        return outputs

    def _emit(self, kind: Kind, means: list[tuple[str, Any]], outputs: list[Tensor]) -> tuple[Term, ...]:
        terms = []
        for i, (name, mean) in enumerate(means):
            constant = None if isinstance(mean.count, Tensor) else float(mean.count)
            terms.append(Term(name, constant))
            # Half precision would lose bits, or overflow, where ranks and micro-batches are added up.
            parts = [ops.wide(x) for x in (mean.total.detach(), *([mean.count] if constant is None else []))]
            for part, value in zip(("total", "count"), parts, strict=False):
                self.outputs.append(Port(kind, f"{name}.{i}.{part}", (), value.dtype))
                outputs.append(value)
        return tuple(terms)

    def _results(self, returned: Any) -> list[Tensor]:
        leaves, tree = pytree.tree_flatten(returned)
        static = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        self.result = (tree, len(leaves), static)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.outputs += [Port(Kind.RESULT, str(i), tuple(t.shape), t.dtype) for i, t in enumerate(tensors)]
        return tensors


def _trace(request: _Request) -> Captured:
    with _kept_state(request.modules) as changed_attributes:
        trace, module = _traced(request, weights=0)
        if trace.weighted:
            trace, module = _traced(request, weights=len(trace.weighted))
        changed = changed_attributes()
        if changed:
            _, again = _traced(request, weights=len(trace.weighted))
            if _outline(again) != _outline(module):
                raise CaptureError(
                    f"forward changes Python state that changes what it computes: {', '.join(changed)}. A traced "
                    "program would repeat the first call for ever. Keep such state in a buffer (register_buffer) and "
                    "update it with tensor ops, or choose the branch outside of forward"
                )
    constants = _lift_constants(trace, module)
    _finish_backward_tags(module)
    clean(module)
    graph = Graph(module, Signature(tuple(trace.inputs), tuple(trace.outputs)))
    if any(is_mutable(node) for node in module.graph.nodes):
        lost = (Kind.PARAMETER, Kind.CONSTANT) if request.gradients else ()
        graph = retrace(graph, functionalize=True, may_write=lambda port: port.kind not in lost)
    else:
        tag_the_rest(module, default_tag(graph))
    graph = _without_unchanged_buffers(graph)
    if request.gradients:
        _mark_weight_gradients(graph)
    return Captured(graph, constants, trace.terms, trace.extras, trace.result, trace.weighted)


def _without_unchanged_buffers(graph: Graph) -> Graph:
    """A buffer that is returned as it came in is no output."""
    output = next(iter(reversed(graph.module.graph.nodes)))
    values = zip(graph.output_nodes(), graph.signature.outputs, strict=True)
    kept = [(v, p) for v, p in values if p.kind is not Kind.BUFFER or _origin(v).op != "placeholder"]
    output.args = (tuple(v for v, _ in kept),)
    clean(graph.module)
    return Graph(graph.module, Signature(graph.signature.inputs, tuple(p for _, p in kept)))


def _origin(node: fx.Node) -> fx.Node:
    while node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _traced(request: _Request, weights: int) -> tuple[_Trace, fx.GraphModule]:
    trace = _Trace(request)
    return trace, trace.run(weights)


@contextlib.contextmanager
def _explained(trace: _Trace) -> Iterator[None]:
    """An error in the user's code says where in it, and that it was being traced.

    Raises:
        CaptureError: the code cannot be traced, or asked the batch for a key that it lacks.
    """
    try:
        yield
    except strided.LayoutError as error:
        raise CaptureError(f"{_place(_user_frame(error))}: {error}") from error
    except AutoshardError:
        raise
    except compat.DATA_DEPENDENT_ERRORS as error:
        found = _user_frame(error)
        inside = _called_layer(error, found)
        called = "" if inside is None else f" (which calls {_place(inside)})"
        raise CaptureError(
            f"{_place(found)}{called}: the model's Python control flow or an output's shape depends on "
            "the values of a tensor, so it cannot be traced to one program. Use torch.where or masking instead of `if` "
            "on a tensor, and ops of fixed output shape instead of nonzero or boolean indexing"
        ) from error
    except Exception as error:
        found = _user_frame(error)
        if found is None:
            raise
        if isinstance(error, KeyError) and _may_come_from(trace.batch, found[0], error):
            keys = [str(key) for key in trace.batch]
            raise CaptureError(
                f"{_place(found)}: the batch has no key {error}; {hint(str(error.args[0]), keys)}"
                f"valid: {', '.join(keys) or 'none'}"
            ) from error
        error.add_note(
            f"autoshard was tracing {_place(found)}, on tensors that have shapes, dtypes and devices but no values"
        )
        raise


def _called_layer(error: BaseException, user: tuple[FrameType, int] | None) -> tuple[FrameType, int] | None:
    """The innermost frame of a layer of torch's that the user's frame calls."""
    frames = list(traceback.walk_tb(error.__traceback__))
    after = frames[frames.index(user) + 1 :] if user is not None else frames
    folder = nn.modules.__path__[0] + "/"
    return next((at for at in reversed(after) if at[0].f_code.co_filename.startswith(folder)), None)


def _user_frame(error: BaseException) -> tuple[FrameType, int] | None:
    """The innermost frame that is neither torch's nor ours nor Python's own, and the line it is at."""
    inside = (torch.__path__[0] + "/", __file__.rsplit("/", 1)[0] + "/")
    # What is installed lies under the standard library's folder too, and may be the model.
    python, installed = sysconfig.get_path("stdlib"), ("site-packages", "dist-packages")
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        own = file.startswith(python) and not any(folder in file for folder in installed)
        if not own and not file.startswith(inside):
            found = frame, line
    return found


def _place(found: tuple[FrameType, int] | None) -> str:
    if found is None:
        return "in the model"
    frame, line = found
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return f"{file}:{line}, in {name}: `{linecache.getline(file, line, frame.f_globals).strip()}`"


def _may_come_from(batch: Any, frame: FrameType, error: KeyError) -> bool:
    """Whether `frame`, which raised `error`, has the batch, and the batch lacks the key."""
    has_it = any(value is batch for value in frame.f_locals.values())
    return has_it and isinstance(batch, Mapping) and error.args[:1] != () and error.args[0] not in batch


def _owned(name: str, prefix: str, frozen: Mapping[str, nn.Module]) -> bool:
    if prefix:
        return name.startswith(prefix)
    return not any(name.startswith(other + ".") for other in frozen)


@contextlib.contextmanager
def _eval_mode(modules: Modules) -> Iterator[None]:
    flags = [(m, m.training) for _, root in modules for m in root.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextlib.contextmanager
def _module_paths(modules: Modules) -> Iterator[None]:
    """Nodes traced within are stamped with the path of the innermost module whose forward is running."""
    names = {id(m): prefix + name for prefix, root in modules for name, m in root.named_modules()}
    stack = [""]

    def flush() -> None:
        stamp(compat.traced_graph(), Tag(Phase.FORWARD, stack[-1]))

    def enter(module: nn.Module, _args: Any) -> None:
        flush()
        stack.append(names.get(id(module), stack[-1]))

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        flush()
        if len(stack) > 1:
            stack.pop()

    handles = [
        nn_module.register_module_forward_pre_hook(enter),
        nn_module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _kept_state(modules: Modules) -> Iterator[Callable[[], list[str]]]:
    """Attributes that tracing sets on modules are undone at the end; yields what names which simple ones changed."""
    inner = ("_parameters", "_buffers", "_modules")
    every = [(prefix + name, m) for prefix, root in modules for name, m in root.named_modules()]
    before = {
        id(m): (dict(m.__dict__), {k: dict(m.__dict__[k]) for k in inner if k in m.__dict__}, _simple(m))
        for _, m in every
    }

    def changed() -> list[str]:
        return [
            f"{name or type(m).__name__}.{key}"
            for name, m in every
            for key, value in _simple(m).items()
            if before[id(m)][2].get(key, "absent") != value
        ]

    try:
        yield changed
    finally:
        for _, m in every:
            outer, nested, _ = before[id(m)]
            for key, value in nested.items():
                outer[key].clear()
                outer[key].update(value)
            m.__dict__.clear()
            m.__dict__.update(outer)


def _simple(module: nn.Module) -> dict[str, str]:
    kept = {}
    for key, value in module.__dict__.items():
        if isinstance(value, (int, float, str, bool, type(None))):
            kept[key] = repr(value)
        elif isinstance(value, (list, tuple, set, dict)) and not key.startswith("_") and key != "training":
            kept[key] = f"{type(value).__name__} of {len(value)}"
    return kept


def _outline(module: fx.GraphModule) -> list[str]:
    names = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}

    def text(x: Any) -> str:
        return names[x] if isinstance(x, fx.Node) else str(x)

    return [f"{n.op} {n.target} {pytree.tree_map(text, (n.args, n.kwargs))}" for n in module.graph.nodes]


def _lift_constants(trace: _Trace, module: fx.GraphModule) -> dict[str, Tensor]:
    """Tensors that the graph took from a closure become inputs."""
    constants: dict[str, Tensor] = {}
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    device = trace.request.device
    for node in nodes:
        value = getattr(module, str(node.target))
        if not isinstance(value, Tensor):
            continue
        if value.requires_grad:
            raise CaptureError(
                f"the loss captures a tensor of shape {tuple(value.shape)} that requires grad and is not a parameter "
                "of the model; pass its module as frozen={'name': module}, or detach it"
            )
        name = str(node.target)
        if name not in constants:
            constants[name] = value.detach().to(device)
            trace.inputs.append(Port(Kind.CONSTANT, name, tuple(value.shape), value.dtype))
            with module.graph.inserting_after(last):
                lifted = last = module.graph.placeholder(name)
            with trace.mode:
                lifted.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=device)
            lifted.meta[TAG] = Tag(Phase.FORWARD)
            for other in [n for n in nodes if n.target == node.target]:
                other.replace_all_uses_with(lifted)
                module.graph.erase_node(other)
    return constants


def _finish_backward_tags(module: fx.GraphModule) -> None:
    """A backward node belongs to the module of the forward node that it differentiates."""
    owner: dict[int, str] = {}
    for node in module.graph.nodes:
        number = node.meta.get("seq_nr")
        if node.op != "call_function" or number is None or TAG not in node.meta:
            continue
        if not tag(node).phase.backward:
            owner[number] = tag(node).module
        else:
            node.meta[TAG] = tag(node).but(module=owner.get(number, ""))


def _mark_weight_gradients(graph: Graph) -> None:
    """A backward node that leads to one parameter's gradient and nowhere else is weight-gradient work."""
    leads: dict[fx.Node, set[str]] = {}
    for node, port in zip(graph.output_nodes(), graph.signature.outputs, strict=True):
        if isinstance(node, fx.Node):
            leads.setdefault(node, set()).add(port.name if port.kind is Kind.GRADIENT else "*")
    for node in reversed(graph.module.graph.nodes):
        mine = leads.setdefault(node, set())
        for user in node.users:
            mine |= leads.get(user, set()) if user.op != "output" else set()
        if TAG in node.meta and tag(node).phase.backward and len(mine) == 1 and "*" not in mine:
            node.meta[TAG] = tag(node).but(phase=Phase.WEIGHT_GRADIENT)
