"""DeepSpeed on CPU over gloo. Options: {"adam": "torch" | "cpuadam" | "fused_ds", "zero": {overrides}}."""

from __future__ import annotations

import os
from typing import Any

import torch
from harness import RunConfig
from model import Transformer, token_loss
from torch import nn

from engines import Batch, Build, Built, Data, adamw, engine


def preload() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401


def common_options(config: RunConfig) -> dict[str, Any]:
    return {
        "bf16": {"enabled": config.dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0: losses then leave the reference in silence
    }


def zero(model: Transformer, config: RunConfig, stage: int, compile_: str = "") -> Built:
    import deepspeed

    options = {
        **common_options(config),
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, **config.opts.get("zero", {})},
    }
    if compile_ == "deepcompile":
        options["compile"] = {"deepcompile": True}
    adam = {"lr": config.lr, "betas": (0.9, 0.95), "weight_decay": config.weight_decay}
    kind = config.opts.get("adam", "torch")
    optimizer: Any = None
    if kind == "torch":
        optimizer = adamw(model.parameters(), config)
    elif kind == "cpuadam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **adam)
    else:  # what the user of a config file gets
        options["optimizer"] = {"type": "AdamW", "params": adam}
    runner, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=options,
        model_parameters=None if optimizer is not None else model.parameters(),
    )
    if compile_ == "deepcompile":
        runner.compile()
    elif compile_:
        runner.compile(backend=compile_)

    def step(batch: Batch) -> torch.Tensor:
        tokens, labels = batch
        loss = token_loss(runner(tokens), labels)
        runner.backward(loss)
        runner.step()
        return loss.detach()

    return Built(step)


def _at(stage: int, compile_: str) -> Build:
    return lambda model, config: zero(model, config, stage, compile_)


for _stage in range(4):
    for _suffix, _compile in (("", ""), ("_compile", "inductor"), ("_deepcompile", "deepcompile")):
        engine(f"ds_zero{_stage}{_suffix}", preload=preload)(_at(_stage, _compile))


class _BlockOf(nn.Module):
    """A block with its rotary tables, as DeepSpeed's layers take one tensor."""

    def __init__(self, model: Transformer, block: nn.Module) -> None:
        super().__init__()
        self.block, self.tables = block, (model.cos, model.sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, *self.tables)


@engine("ds_pipe", data=Data.ALL, preload=preload)
def ds_pipe(model: Transformer, config: RunConfig) -> Built:
    """PipelineModule, one stage per rank, 1F1B."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    pipeline = PipelineModule(
        layers=[model.embed, *(_BlockOf(model, block) for block in model.blocks), model.norm, model.head],
        num_stages=config.ranks,
        loss_fn=token_loss,
        partition_method="type:_BlockOf",
        activation_checkpoint_interval=0,
    )
    size = config.ranks * config.micro_batch // config.microbatches
    options = {
        **common_options(config),
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": config.microbatches,
        "train_batch_size": size * config.microbatches,
    }
    optimizer = adamw(list(pipeline.parameters()), config)
    runner, *_ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=options)

    def step(batch: Batch) -> Any:
        pieces = zip(*(t.chunk(config.microbatches) for t in batch), strict=True)
        return runner.train_batch(data_iter=iter(list(pieces)))

    return Built(step)
