"""The peers inside PyTorch: DDP, ZeroRedundancyOptimizer, FSDP2, tensor parallelism, pipelining; eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from harness import RunConfig
from model import Transformer, token_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from engines import Batch, Built, Data, adamw, adamw_options, autocast, engine, torch_state

Forward = Callable[[torch.Tensor], torch.Tensor]


def simple_step(forward: Forward, optimizer: torch.optim.Optimizer, config: RunConfig) -> Callable[[Batch], Any]:
    def step(batch: Batch) -> torch.Tensor:
        tokens, labels = batch
        optimizer.zero_grad(set_to_none=True)
        with autocast(config):
            loss = token_loss(forward(tokens), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def maybe_compiled(model: nn.Module, compiled: bool) -> Forward:
    return torch.compile(model) if compiled else model


# -- no communication: the floor of compute, and the reference of losses


@engine("local")
def local(model: Transformer, config: RunConfig, *, compiled: bool = False) -> Built:
    """Each rank trains on its slice alone, so its losses leave the reference."""
    optimizer = adamw(model.parameters(), config)
    return Built(simple_step(maybe_compiled(model, compiled), optimizer, config), torch_state(model, optimizer))


@engine("local_compile")
def local_compile(model: Transformer, config: RunConfig) -> Built:
    return local(model, config, compiled=True)


@engine("local_compile_opt")
def local_compile_opt(model: Transformer, config: RunConfig) -> Built:
    """Forward, backward and optimizer compiled: Inductor's AdamW, from the foreach one."""
    optimizer = adamw(model.parameters(), replace(config, optimizer="foreach"))
    forward, update = torch.compile(model), torch.compile(optimizer.step)

    def step(batch: Batch) -> torch.Tensor:
        tokens, labels = batch
        optimizer.zero_grad(set_to_none=True)
        with autocast(config):
            loss = token_loss(forward(tokens), labels)
        loss.backward()
        update()
        return loss.detach()

    return Built(step, torch_state(model, optimizer))


@engine("reference", data=Data.ALL, needs_group=False)
def reference(model: Transformer, config: RunConfig) -> Built:
    """One process, the whole global batch in pieces of micro_batch."""
    optimizer = adamw(model.parameters(), config)

    def step(batch: Batch) -> float:
        tokens, labels = batch
        optimizer.zero_grad(set_to_none=True)
        pieces, total = len(tokens) // config.micro_batch, 0.0
        for x, y in zip(tokens.chunk(pieces), labels.chunk(pieces), strict=True):
            with autocast(config):
                loss = token_loss(model(x), y) / pieces
            loss.backward()
            total += float(loss)
        optimizer.step()
        return total

    return Built(step, torch_state(model, optimizer))


# -- DDP


def wrapped_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


@engine("ddp")
def ddp(model: Transformer, config: RunConfig, *, compiled: bool = False) -> Built:
    wrapped = wrapped_ddp(model)
    optimizer = adamw(wrapped.parameters(), config)
    return Built(simple_step(maybe_compiled(wrapped, compiled), optimizer, config), torch_state(wrapped, optimizer))


@engine("ddp_compile")
def ddp_compile(model: Transformer, config: RunConfig) -> Built:
    """torch.compile(DDP(model)): Dynamo splits the graph at the bounds of buckets."""
    return ddp(model, config, compiled=True)


@engine("ddp_compile_inner")
def ddp_compile_inner(model: Transformer, config: RunConfig) -> Built:
    """DDP(torch.compile(model)): one graph, gradients reach the reducer when all of backward is done."""
    wrapped = wrapped_ddp(torch.compile(model))  # type: ignore[arg-type]
    optimizer = adamw(wrapped.parameters(), config)
    return Built(simple_step(wrapped, optimizer, config), torch_state(wrapped, optimizer))


@engine("ddp_compile_pyreducer")
def ddp_compile_pyreducer(model: Transformer, config: RunConfig) -> Built:
    """Compiled DDP with the Python reducer and compiled autograd: all-reduces inside the backward graph."""
    import torch._dynamo.config as dynamo_config

    dynamo_config.optimize_ddp = "python_reducer"
    dynamo_config.compiled_autograd = True
    return ddp(model, config, compiled=True)


@engine("zero_ro")
def zero_ro(model: Transformer, config: RunConfig, *, compiled: bool = False) -> Built:
    """DDP with ZeroRedundancyOptimizer: ZeRO-1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = wrapped_ddp(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=config.opts.get("bucket_view", True),
        **adamw_options(config),
    )
    return Built(
        simple_step(maybe_compiled(wrapped, compiled), optimizer, config), torch_state(wrapped, optimizer.optim)
    )


@engine("zero_ro_compile")
def zero_ro_compile(model: Transformer, config: RunConfig) -> Built:
    return zero_ro(model, config, compiled=True)


# -- FSDP2


def fsdp2_built(model: Transformer, config: RunConfig, *, compile_: str = "", reshard: bool = True) -> Built:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (config.ranks,))
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if config.dtype == "bf16"
        else MixedPrecisionPolicy()
    )

    def shard(part: Any, after_forward: bool = reshard) -> None:
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=after_forward)

    if compile_ == "block":  # torchtitan's recipe: compile each block, then shard it
        for block in model.blocks:
            block.compile(fullgraph=True)
    for block in model.blocks:
        shard(block)
    shard(model.embed)
    shard([model.norm, model.head], False)
    shard(model)
    optimizer = adamw(model.parameters(), config)
    forward = maybe_compiled(model, compile_ == "model")

    def step(batch: Batch) -> torch.Tensor:
        tokens, labels = batch
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(forward(tokens), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Built(step, torch_state(model, optimizer))


@engine("fsdp2")
def fsdp2(model: Transformer, config: RunConfig) -> Built:
    return fsdp2_built(model, config)


@engine("fsdp2_zero2")
def fsdp2_zero2(model: Transformer, config: RunConfig) -> Built:
    """Parameters stay gathered between forward and backward."""
    return fsdp2_built(model, config, reshard=False)


@engine("fsdp2_compile")
def fsdp2_compile(model: Transformer, config: RunConfig) -> Built:
    return fsdp2_built(model, config, compile_="block")


@engine("fsdp2_compile_model")
def fsdp2_compile_model(model: Transformer, config: RunConfig) -> Built:
    return fsdp2_built(model, config, compile_="model")


# -- tensor parallelism


@engine("tp", data=Data.ALL)
def tp(model: Transformer, config: RunConfig, *, compiled: bool = False) -> Built:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (config.ranks,), mesh_dim_names=("tp",))
    columns = ("attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3")
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {name: ColwiseParallel() for name in columns} | {n: RowwiseParallel() for n in ("attn.wo", "mlp.w2")},
        )
    split_loss = config.opts.get("loss_parallel", False)
    head = ColwiseParallel(output_layouts=Shard(-1) if split_loss else Replicate(), use_local_output=not split_loss)
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"embed": embed, "head": head})
    # Fused AdamW does not take sharded and plain parameters in one group.
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    optimizer = adamw([{"params": group} for group in groups], config)
    forward = maybe_compiled(model, compiled)
    if not split_loss:
        return Built(simple_step(forward, optimizer, config), torch_state(model, optimizer))

    def step(batch: Batch) -> torch.Tensor:
        tokens, labels = batch
        optimizer.zero_grad(set_to_none=True)
        with autocast(config), loss_parallel():
            loss = token_loss(forward(tokens), labels)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return Built(step, torch_state(model, optimizer))


@engine("tp_compile", data=Data.ALL)
def tp_compile(model: Transformer, config: RunConfig) -> Built:
    return tp(model, config, compiled=True)


# -- pipelining


def keep_stage(model: Transformer, stage: int, stages: int) -> Transformer:
    """The model with only the blocks of this stage, the embedding on the first, the head on the last."""
    layers = len(model.blocks)
    low, high = stage * layers // stages, (stage + 1) * layers // stages
    model.blocks = nn.ModuleList(list(model.blocks)[low:high])
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None
    return model


@engine("pp_1f1b", data=Data.ALL)
def pp_1f1b(model: Transformer, config: RunConfig, *, compiled: bool = False, schedule: str = "1f1b") -> Built:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    part = keep_stage(model, config.rank, config.ranks)
    optimizer = adamw(part.parameters(), config)
    module: Any = torch.compile(part) if compiled else part
    stage = PipelineStage(module, config.rank, config.ranks, torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    runner = kind(stage, n_microbatches=config.microbatches, loss_fn=token_loss)
    first, last = config.rank == 0, config.rank == config.ranks - 1

    def step(batch: Batch) -> torch.Tensor | None:
        tokens, labels = batch
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        with autocast(config):
            if first:
                runner.step(tokens, target=labels if last else None, losses=losses)
            elif last:
                runner.step(target=labels, losses=losses)
            else:
                runner.step()
        optimizer.step()
        return torch.stack(losses).mean() if last else None

    return Built(step, torch_state(part, optimizer))


@engine("pp_1f1b_compile", data=Data.ALL)
def pp_1f1b_compile(model: Transformer, config: RunConfig) -> Built:
    return pp_1f1b(model, config, compiled=True)


@engine("pp_gpipe", data=Data.ALL)
def pp_gpipe(model: Transformer, config: RunConfig) -> Built:
    return pp_1f1b(model, config, schedule="gpipe")
