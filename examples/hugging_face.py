"""For users of transformers: a stock model that returns its own loss, fine-tuned with frozen embeddings.

    torchrun --nproc-per-node 2 examples/hugging_face.py

The model gets no wrapper and no loss function is given: a batch that is a mapping becomes `model(**batch)`, and the
`.loss` of what it returns is trained. Labels of -100 do not count; a model's own mean is over each micro-batch.
"""

from __future__ import annotations

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.data import Loader, data_rank
from autoshard.datasets import stdlib_text


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.get_input_embeddings().weight.requires_grad_(False)  # frozen: no gradient, no optimizer state, still saved
    return model


class CausalText(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The standard library's sources, in the words of a Hugging Face batch."""

    def __init__(self) -> None:
        self.text = stdlib_text(sequence=64, megabytes=1.0).train

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.text[index]["x"]
        return {"input_ids": tokens, "labels": tokens}  # the model shifts the labels itself


def main() -> None:
    plan = autoshard.Plan(zero=3, clip_norm=1.0, backend="debug")  # backend="inductor" compiles the same graphs
    step = autoshard.parallelize(
        build(),
        plan,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
        schedule=autoshard.schedules.warmup_cosine(5, 30),
    )
    rank, ranks = data_rank(plan.mesh)
    loader = Loader(CausalText(), global_batch=16, rank=rank, ranks=ranks)
    state = step.init(loader.example())
    for number, batch in zip(range(1, 31), loader.stream(), strict=False):
        state, metrics = step(state, batch)
        if rank == 0 and number % 5 == 0:
            print(f"step {number}  loss {metrics['loss']:.4f}  gradient norm {metrics['grad_norm']:.3f}", flush=True)
    loader.close()
    step.export(state, "outputs/hugging_face")  # safetensors, under the names that from_pretrained knows


if __name__ == "__main__":
    main()
