"""The only file that touches private torch API. Holds for torch 2.11 to 2.14.

Each function says in one line what it stands for; nothing else in the package imports ``torch._*``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

_SUPPORTED = ((2, 11), (2, 14))
_found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if not _SUPPORTED[0] <= _found <= _SUPPORTED[1]:
    raise ImportError(
        f"autoshard works with torch 2.11 to 2.14, found {torch.__version__}; "
        "pip install torch==2.14.1 torchvision==0.29.1"
    )

from torch import _guards, _meta_registrations  # noqa: E402
from torch._decomp import get_decompositions as _get_decompositions  # noqa: E402
from torch._subclasses import fake_tensor as _fake  # noqa: E402
from torch.distributed.tensor import placement_types as _placement_types  # noqa: E402
from torch.fx import _lazy_graph_module  # noqa: E402
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes  # noqa: E402
from torch.fx.experimental.proxy_tensor import get_proxy_mode as _get_proxy_mode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx as _make_fx  # noqa: E402
from torch.nn.utils import stateless as _stateless  # noqa: E402
from torch.utils import _python_dispatch as _dispatch  # noqa: E402
from torch.utils import _pytree  # noqa: E402
from torch.utils import checkpoint as _checkpoint  # noqa: E402

if _found < (2, 12):
    # Attention in float64 on CPU returns its logsumexp in float64; torch 2.11 declares float32, and Inductor then
    # reads one as the other.
    _attention = "_scaled_dot_product_flash_attention_for_cpu"
    _declared = getattr(_meta_registrations, f"meta_{_attention}")

    def _as_returned(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp = _declared(query, *args, **kwargs)
        return out, logsumexp.to(torch.promote_types(query.dtype, torch.float32))

    _meta_kernels = torch.library.Library("aten", "IMPL", "Meta")
    _meta_kernels.impl(_attention, _as_returned, allow_override=True)

pytree = _pytree
FakeTensor = _fake.FakeTensor
FakeTensorMode = _fake.FakeTensorMode
TorchDispatchMode = _dispatch.TorchDispatchMode

DATA_DEPENDENT_ERRORS: tuple[type[BaseException], ...] = (
    _fake.DataDependentOutputException,
    _fake.DynamicOutputShapeException,
    _symbolic_shapes.GuardOnDataDependentSymNode,
)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shape, dtype and device but no values; shapes are static."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fx(
    function: Callable[..., Any], args: Sequence[Any], decompositions: dict[Any, Callable[..., Any]] | None = None
) -> fx.GraphModule:
    """Trace `function` on fake `args` to a graph of aten ops, backward included, metadata kept."""
    with fx.traceback.preserve_node_meta(), contextlib.ExitStack() as stack:
        if hasattr(torch.compiler, "_non_strict_tracing_context"):  # torch >= 2.12
            stack.enter_context(torch.compiler._non_strict_tracing_context())
        stack.enter_context(_lazy_graph_module._use_lazy_graph_module(True))
        return _make_fx(
            function, decomposition_table=decompositions or {}, tracing_mode="real", _allow_non_fake_inputs=True
        )(*args)


@contextlib.contextmanager
def engine_backward() -> Iterator[None]:
    """Backward nodes traced within get the sequence number of the forward node they differentiate."""
    if hasattr(torch.compiler, "_patch_engine_backward"):  # torch >= 2.12
        with torch.compiler._patch_engine_backward():
            yield
        return
    from torch._functorch._aot_autograd import logging_utils

    graph: Any = torch.autograd.graph
    autograd: Any = torch.autograd
    run = graph._engine_run_backward

    def hooked(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        roots = [x.grad_fn if isinstance(x, torch.Tensor) else x.node for x in outputs]
        logging_utils.setup_stacktrace_preservation_hooks([root for root in roots if root is not None])
        return run(outputs, *args, **kwargs)

    graph._engine_run_backward = autograd._engine_run_backward = hooked
    try:
        yield
    finally:
        graph._engine_run_backward = autograd._engine_run_backward = run


def fresh_inputs(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors like `values` in a mode of their own that can keep guards, as Inductor's graph cache demands."""
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=_symbolic_shapes.ShapeEnv(), static_shapes=True):
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


def inputs_of_any_length(
    values: Sequence[torch.Tensor], length: int
) -> tuple[list[torch.Tensor], Callable[[int], bool]]:
    """Flat fake tensors of one symbolic length for those of `values` that have dims, 0-dim ones for the rest.

    Args:
        length: elements; what a compiler may tune for, at least 2.

    Returns:
        The inputs; and a function that says whether code compiled for them is right for a length.
    """
    from torch._dynamo.source import ConstantSource

    environment = _symbolic_shapes.ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
    context: Any = _symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=[_symbolic_shapes.DimDynamic.DUCK])
    inputs = []
    for i, value in enumerate(values):
        example = torch.empty((length,) if value.dim() else (), dtype=value.dtype, device="meta")
        source = ConstantSource(f"input{i}")
        fake = mode.from_tensor(example, symbolic_context=context if value.dim() else None, source=source)
        with mode:
            inputs.append(torch.empty_strided(fake.shape, fake.stride(), dtype=value.dtype, device=value.device))

    def holds(other: int) -> bool:
        guards = [guard.expr for guard in environment.guards]
        return all(bool(g.subs(dict.fromkeys(g.free_symbols, other))) for g in guards)

    return inputs, holds


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module whose Python code is written when it is first called; most graphs are only rewritten."""
    return _lazy_graph_module._LazyGraphModule(root, graph)


def traced_graph() -> fx.Graph:
    """The graph that the innermost running `make_fx` is building."""
    mode = _get_proxy_mode()
    if mode is None:
        raise RuntimeError("traced_graph() is called outside of make_fx")
    return mode.tracer.graph


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Tensor ops within run for real, whatever tracing is going on."""
    return _dispatch._disable_current_modes()


def swapped_tensors(module: nn.Module, tensors: dict[str, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """`module` has `tensors` as its parameters and buffers within; tied names follow."""
    return _stateless._reparametrize_module(module, tensors, tie_weights=True, strict=False)


def carry_over(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`target`, which stands for `source`, with the attributes and gradient hooks that the user put on `source`."""
    for name, value in vars(source).items():
        vars(target).setdefault(name, value)
    if target.requires_grad:
        for hook in (source._backward_hooks or {}).values():
            target.register_hook(hook)
    return target


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Something is to run when autograd has written ``parameter.grad``."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_compiled(module: nn.Module) -> bool:
    """``torch.compile`` wraps this module, or its ``compile()`` was called."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@contextlib.contextmanager
def checkpoint_bypassed() -> Iterator[None]:
    """``torch.utils.checkpoint`` regions run once, as plain code: recompute is the plan's business.

    The function itself is often imported by name, so what it calls is replaced.
    """

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            return function(*args)

    def generator(function: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    replaced = {
        "CheckpointFunction": Plain,
        "_checkpoint_without_reentrant_generator": generator,
        "_checkpoint_without_reentrant_generator_impl": generator,  # torch >= 2.14
    }
    saved = {name: getattr(_checkpoint, name) for name in replaced if hasattr(_checkpoint, name)}
    for name in saved:
        setattr(_checkpoint, name, replaced[name])
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(_checkpoint, name, value)


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with in-place ops replaced by pure ones; writes into inputs remain as final copies."""
    return torch.func.functionalize(function, remove="mutations")


def torch_decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own way of writing `ops` with simpler ones."""
    return dict(_get_decompositions(ops))


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor wants decomposed before it compiles a graph."""
    from torch._inductor.decomposition import select_decomp_table  # importing Inductor takes seconds: not at the top

    return dict(select_decomp_table())


def compile_inductor(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[[list[Any]], Any]:
    """Compile a decomposed graph of local shapes. The result takes a list, which it empties, and returns a tuple.

    `inputs` are from `fresh_inputs` or `inputs_of_any_length`: without their mode Inductor's graph cache is passed by.
    With Inductor's reordering for memory off, gathers stay where the `zero` pass put them or start one use
    earlier; tests/test_compile.py asserts it on the generated code.
    """
    from torch._inductor import compile_fx, config

    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    changes: dict[str, bool | None] = {
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        "comprehensive_padding": False,
    }
    if any(x.device.type == "cpu" for x in inputs):
        changes["cpp.vec_isa_ok"] = _vectors_work()
    with (
        config.patch(changes),
        _guards.tracing(_guards.TracingContext(mode)),
    ):
        return compile_fx.compile_fx_inner(gm, list(inputs), is_inference=True)


@functools.cache
def _vectors_work() -> bool | None:
    """Whether the widest vectors of an x86 CPU work with its compiler; None leaves it to Inductor.

    Inductor itself tries out every width that the CPU has, two seconds each on a cold cache, and takes the widest.
    """
    from torch._inductor import config, cpu_vec_isa

    if platform.machine() != "x86_64" or config.cpp.vec_isa_ok is not None:
        return config.cpp.vec_isa_ok
    flags = cpu_vec_isa.x86_isa_checker()
    kinds = (isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split()))
    widest = next(kinds, None)
    return True if widest else None  # its truth is that a small program with it builds and loads


def all_gather(output: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Every rank's `value` stacked in `output`; torch 2.14 renamed the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, value, group=group)


@contextlib.contextmanager
def generated_code() -> Iterator[list[str]]:
    """The source that Inductor generates within, one string a graph."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    saved = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(found.append)
    try:
        with config.patch(force_disable_caches=True):
            yield found
    finally:
        GraphLowering.save_output_code = saved


def strided_shard(dim: int, outer: int) -> Any:
    """DTensor's private placement for a shard of every one of `outer` parts of a dim."""
    return _placement_types._StridedShard(dim, split_factor=outer)


def split_factor(placement: Any) -> int:
    """Into how many parts a dim is seen before a DTensor placement shards it: 1 but for a strided shard."""
    return int(placement.split_factor) if isinstance(placement, _placement_types._StridedShard) else 1


@functools.cache
def gloo_in_order() -> str:
    """Name of a backend: gloo with one worker thread, which runs the collectives of a group one after the other.

    Gloo as torch makes it has two. Each writes the name of the collective it has completed into one ``std::string``
    without a lock (torch 2.14, ``ProcessGroupGloo::runLoop``: ``lastCompletedWorkName``), which corrupts the heap: a
    process aborts after some ten thousand collectives. A group made beside a default group of gloo has its timeout.
    """
    gloo: Any = dist.ProcessGroupGloo
    name = "autoshard_gloo"

    def make(given: Any, _options: object) -> Any:
        # What torch does in C++ for a gloo group that is given no options.
        interfaces = [interface for interface in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if interface]
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=i) for i in interfaces] or [gloo.create_default_device()]
        options._threads = 1
        options._timeout = _gloo_timeout() or given.timeout
        options.global_ranks_in_group = given.global_ranks_in_group
        options.group_name = given.group_id
        return gloo(given.store, given.group_rank, given.group_size, options)

    dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
    return name


def _gloo_timeout() -> Any:
    """That of the default group for CPU tensors; None without one."""
    if not dist.is_initialized():
        return None
    with contextlib.suppress(RuntimeError):  # the default group may have no backend for the CPU
        world: Any = dist.group.WORLD
        return world._get_backend(torch.device("cpu")).options._timeout
    return None


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` under `name`, which is the same on every rank."""
    registry: Any = torch._C._distributed_c10d
    with contextlib.suppress(Exception):
        registry._resolve_process_group(name)
        registry._unregister_process_group(name)
    registry._register_process_group(name, group)


@contextlib.contextmanager
def trunc_normal_replaced(replacement: Callable[..., torch.Tensor]) -> Iterator[None]:
    """``nn.init.trunc_normal_`` becomes ``replacement(original, tensor, mean, std, a, b, ...)``.

    It loops on random values (torch >= 2.14). The function is often imported by name, so what it calls is replaced.
    """
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = functools.partial(replacement, original)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
