"""What the tensor axis costs whole models: collectives by layer, counted in the placed graph without any ranks.

The models have four blocks, width 64 and about 128 tokens a rank: with fewer tokens than channels it would be
cheaper to move weights than activations.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, fx, nn

import autoshard
from autoshard.capture import Modules, call_model, capture_training
from autoshard.collectives import Axis
from autoshard.invariants import check_program
from autoshard.manager import PassContext, pass_list
from autoshard.passes.place import redistribute
from autoshard.placement import REPLICATE, Partial, Placement, Shard
from autoshard.plan import Mesh, Plan
from autoshard.program import TAG, Graph, Kind, Program, Role, tag
from autoshard.wishes import parameter_wishes
from tests import reference, zoo

CPU = torch.device("cpu")
WIDTH, HEADS, BLOCKS, LENGTH, VOCABULARY = 64, 4, 4, 64, 256


# ---------------------------------------------------------------- the models


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.SwiGLU(WIDTH, 3 * WIDTH) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


_HF: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}


def _hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = GPT2Config(n_positions=LENGTH, n_embd=WIDTH, n_layer=BLOCKS, n_head=HEADS, **off, **_HF)
    return GPT2LMHeadModel(config)


def _hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=LENGTH, **_HF
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _hf_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=BLOCKS, num_heads=HEADS,
        dropout_rate=0.0,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=BLOCKS, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=4 * WIDTH,
        num_classes=10,
    )  # fmt: skip


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig

    return torchvision.models.ConvNeXt([CNBlockConfig(WIDTH, None, BLOCKS)], num_classes=10)


def _tokens(rows: int, generator: torch.Generator) -> Any:
    return zoo._pair_batch(rows, generator, LENGTH, VOCABULARY)


def _vectors(rows: int, generator: torch.Generator) -> Any:
    tokens = rows * LENGTH
    return torch.randn(tokens, WIDTH, generator=generator), torch.randint(8, (tokens,), generator=generator)


def _labelled(rows: int, generator: torch.Generator) -> Any:
    tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


@dataclass(frozen=True)
class Golden:
    """A model and the activation collectives that its tensor axis may have.

    Args:
        block: pattern of a block's path, with one group.
        sublayers: collectives per block and direction, by the beginning of the block's name.
        outside: collectives (forward, backward) that are no block's nor the loss's: of embeddings and heads.
        arriving: backward collectives, by block, of a gradient that reaches its end from several other blocks.
        vocabulary: whether the loss is over a vocabulary.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Any]
    loss: Callable[[Any, Any], Any] | None
    block: str
    sublayers: Mapping[str, int]
    outside: tuple[int, int] = (1, 1)
    arriving: Mapping[str, int] = field(default_factory=dict)
    vocabulary: bool = False


_LLAMA = functools.partial(zoo.Llama, VOCABULARY, WIDTH, BLOCKS, HEADS, LENGTH)
_GPT = functools.partial(zoo.GPT, VOCABULARY, WIDTH, BLOCKS, HEADS, LENGTH)
_IMAGES = functools.partial(zoo._images, side=32)
MODELS: dict[str, Golden] = {
    "llama": Golden(_LLAMA, _tokens, zoo._pair_loss, r"(blocks\.\d+)", {"": 2}, vocabulary=True),
    "hf_llama": Golden(_hf_llama, _labelled, None, r"(layers\.\d+)", {"": 2}, vocabulary=True),
    "gpt": Golden(_GPT, _tokens, zoo._pair_loss, r"(blocks\.\d+)", {"": 2}, vocabulary=True),
    "hf_gpt2": Golden(_hf_gpt2, _labelled, None, r"(h\.\d+)", {"": 2}, vocabulary=True),
    "bert": Golden(_hf_bert, _labelled, None, r"(layer\.\d+)", {"": 2}, (2, 2)),
    "vit": Golden(_vit, _IMAGES, zoo._classify, r"(encoder_layer_\d+)", {"": 2}, (2, 0)),
    # A block of the decoder has a third sublayer, attention to the encoder. Its gradients for the encoder's output are
    # partial sums: of all blocks together they are reduced once, where the encoder's last block begins backward.
    "t5": Golden(
        _hf_t5,
        _labelled,
        None,
        r"((?:en|de)coder\.block\.\d+)",
        {"encoder": 2, "decoder": 3},
        (2, 2),
        {f"encoder.block.{BLOCKS - 1}": 1},
        vocabulary=True,
    ),
    "gated_mlp": Golden(GatedMLP, _vectors, zoo._classify, r"(?:blocks|norms)\.(\d+)", {"": 1}),
    "convnext": Golden(_convnext, _IMAGES, zoo._classify, r"(features\.1\.\d+)", {"": 2}, (3, 1)),
}


def placed(
    golden: Golden, data: int = 1, tensor: int = 2, rows: int = 2, knobs: Mapping[str, Any] | None = None
) -> tuple[Graph, Mapping[str, Placement]]:
    """The training graph after `place`, and how the parameters lie on the tensor axis."""
    torch.manual_seed(0)
    model = zoo.without_randomness(golden.build())
    batch = reference.map_tensors(
        golden.batch(rows, torch.Generator().manual_seed(0)), lambda x: x.float() if x.is_floating_point() else x
    )
    plan = Plan(mesh=Mesh(data=data, tensor=tensor), backend="debug", device="cpu", **(knobs or {}))
    sizes = {"data": data, "tensor": tensor}
    group = f"autoshard:cpu:data{data}-tensor{tensor}"
    axes = tuple(Axis(name, ranks, f"{group}:{name}") for name, ranks in sizes.items() if ranks > 1)
    modules = Modules(model, {})
    context = PassContext(plan, axes, wishes=parameter_wishes(plan.rules, modules, tensor))
    captured = capture_training(modules, golden.loss or call_model, batch, ranks=data, accumulate=1, device=CPU)
    program = Program({"micro": captured.graph})
    for name, run in pass_list():
        program = run(program, context)
        check_program(program, context, name)
        if name == "place":
            break
    graph = program.graphs["micro"]
    ports = [port for _, port in graph.signature.find_inputs(Kind.PARAMETER)]
    return graph, {port.name: port.placements[-1] for port in ports}


@functools.cache
def plain(name: str, data: int = 1, tensor: int = 2) -> tuple[Graph, Mapping[str, Placement]]:
    return placed(MODELS[name], data, tensor)


# ---------------------------------------------------------------- counting


@dataclass(frozen=True)
class Moved:
    """A change of placement of an activation on the tensor axis that communicates.

    Args:
        where: the block, "" outside of blocks, "loss" for what only the loss uses.
    """

    node: fx.Node
    where: str

    @property
    def backward(self) -> bool:
        return tag(self.node).phase.backward

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node.meta["val"].shape)

    def __str__(self) -> str:
        source, _, now, then = self.node.args
        users = ", ".join(str(tag(user).module) if TAG in user.meta else "output" for user in self.node.users)
        where = f"{tag(self.node).phase.value} {self.where or 'outside'}"
        return f"{where}: {source} {list(self.shape)} {now}->{then} ({users})"


ACTIVATIONS = (Role.ACTIVATION_REDUCE, Role.ACTIVATION_GATHER)


def activations(graph: Graph, block: str) -> list[Moved]:
    """What the tensor axis, the last one, sends of activations: not of what leaves the graph as a gradient."""
    found = []
    for node in graph.module.graph.nodes:
        if node.target is redistribute and tag(node).role in ACTIVATIONS:
            last = len(tag(node).placements[0]) - 1
            if node.args[1] == last and not _is_gradient(node):
                found.append(Moved(node, _where(node, block)))
    return found


def _is_gradient(node: fx.Node) -> bool:
    """Whether it leaves the graph as the gradient of a vector, but for views and sums."""
    if node.op == "output":
        return True
    small = sum(size > 1 for size in node.meta["val"].shape) <= 1
    return small and tag(node).phase.backward and all(map(_is_gradient, node.users))


def _where(node: fx.Node, block: str) -> str:
    """The block that a node belongs to; for a sum of gradients, which no module owns, that of its users."""
    own = tag(node).module
    users = [tag(user).module for user in node.users if TAG in user.meta]
    for path in users if tag(node).phase.backward and not own else [own]:
        if match := re.search(block, path):
            return match[1]
    return "" if own or any(users) else "loss"


def per_block(moved: list[Moved]) -> dict[str, tuple[int, int]]:
    """(forward, backward) by block."""
    count: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for m in moved:
        count[m.where][m.backward] += 1
    return {where: (forward, backward) for where, (forward, backward) in count.items()}


# ---------------------------------------------------------------- counts

FULL = os.environ.get("AUTOSHARD_FULL") == "1"
ON_OTHER_MESHES = tuple(MODELS) if FULL else ("hf_gpt2",)
RUNS = [(name, 1, 2) for name in MODELS] + [(name, *mesh) for name in ON_OTHER_MESHES for mesh in ((2, 2), (1, 4))]


@pytest.mark.parametrize(("name", "data", "tensor"), RUNS, ids=[f"{name}-{d}x{t}" for name, d, t in RUNS])
def test_a_block_sends_two_activations_forward_and_two_backward_and_nothing_else(
    name: str, data: int, tensor: int
) -> None:
    golden = MODELS[name]
    moved = activations(plain(name, data, tensor)[0], golden.block)
    count = per_block(moved)
    blocks = {where: found for where, found in count.items() if where not in ("", "loss")}
    story = "\n".join(map(str, moved))
    assert len(blocks) == BLOCKS * len(golden.sublayers), story
    for where, found in blocks.items():
        expected = next(n for kind, n in golden.sublayers.items() if where.startswith(kind))
        forward, backward = found
        assert forward <= expected, f"{where}: {found}\n{story}"
        assert backward <= expected + golden.arriving.get(where, 0), f"{where}: {found}\n{story}"
    forward, backward = count.get("", (0, 0))
    assert forward <= golden.outside[0], story
    assert sum(map(sum, count.values())) > BLOCKS  # the axis is used
    assert backward <= golden.outside[1] + 1, story  # what is before the first block reduces that block's gradient


@pytest.mark.parametrize("name", ["llama", "hf_llama", "gpt", "hf_gpt2", "t5"])
def test_the_gradients_of_q_k_and_v_are_summed_before_one_reduction(name: str) -> None:
    graph, placements = plain(name)
    golden = MODELS[name]
    reduced = [m for m in activations(graph, golden.block) if m.backward and m.where not in ("", "loss")]
    assert all(isinstance(m.node.args[2], Partial) for m in reduced)
    projections = re.compile(r"(query|key|value|qkv|c_attn|[qkv]|[qkv]_proj)\.weight$")
    split = [p for n, p in placements.items() if projections.search(n)]
    assert split
    assert REPLICATE not in split
    sublayers = sum(golden.sublayers.values()) * BLOCKS
    assert len(reduced) <= sublayers + 1  # T5's decoder adds a gradient to the encoder's


@pytest.mark.parametrize("name", [name for name, golden in MODELS.items() if golden.vocabulary])
def test_a_loss_over_a_split_vocabulary_sends_three_numbers_a_token(name: str) -> None:
    graph, placements = plain(name)
    moved = [m for m in activations(graph, MODELS[name].block) if m.where == "loss"]
    assert [placements[n] for n in placements if n in golden_heads(name)] == [Shard(0)]
    assert 2 <= len(moved) <= 3
    assert all(not m.backward and math.prod(m.shape) <= 2 * LENGTH for m in moved), list(map(str, moved))
    logits = [m for m in activations(graph, MODELS[name].block) if VOCABULARY in m.shape]
    assert not logits, list(map(str, logits))


def golden_heads(name: str) -> tuple[str, ...]:
    tied = {"gpt": "embed.weight", "hf_gpt2": "transformer.wte.weight", "t5": "shared.weight"}
    return (tied.get(name, "lm_head.weight" if name == "hf_llama" else "head.weight"),)


@pytest.mark.parametrize(
    ("name", "weight", "bias", "placement"),
    [
        ("gpt", "blocks.0.qkv.weight", "blocks.0.qkv.bias", Shard(0, 3)),
        ("hf_gpt2", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.bias", Shard(1, 3)),
        (
            "vit",
            "encoder.layers.encoder_layer_0.self_attention.in_proj_weight",
            "encoder.layers.encoder_layer_0.self_attention.in_proj_bias",
            Shard(0, 3),
        ),
    ],
)
def test_each_rank_has_its_part_of_a_fused_q_k_and_v(name: str, weight: str, bias: str, placement: Shard) -> None:
    _, placements = plain(name)
    assert placements[weight] == placement
    assert placements[bias] == Shard(0, 3)


def test_what_stays_whole_are_vectors() -> None:
    for name, golden in MODELS.items():
        shapes = {n: tuple(p.shape) for n, p in golden.build().named_parameters()}
        whole = [n for n, placement in plain(name)[1].items() if placement == REPLICATE]
        assert all(sum(size > 1 for size in shapes[n]) <= 1 for n in whole), (name, whole)
        assert sum(math.prod(shapes[n]) for n in whole) < 0.02 * sum(map(math.prod, shapes.values())), name


def test_attention_whose_heads_the_ranks_do_not_divide_is_split_by_the_batch() -> None:
    three = functools.partial(zoo.GPT, VOCABULARY, 96, BLOCKS, 3, LENGTH)
    graph, placements = placed(dataclasses.replace(MODELS["gpt"], build=three))
    attention = [n for n in graph.module.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert len(attention) == 2 * BLOCKS
    assert all(p == (Shard(0),) for n in attention for p in tag(n).placements)
    assert all(placements[f"blocks.{i}.mlp.0.weight"] == Shard(0) for i in range(BLOCKS))


# ---------------------------------------------------------------- wishes


def test_in_sequence_the_residual_stream_is_split_by_tokens_and_reduced_by_scattering() -> None:
    sequence = autoshard.Tensor(sequence=True)
    golden = MODELS["llama"]
    graph, _ = placed(golden, rows=1, knobs={"tensor": sequence})
    moved = activations(graph, golden.block)
    blocks = [m for m in moved if m.where not in ("", "loss")]
    changes = collections.Counter((str(m.node.args[2]), str(m.node.args[3]), m.backward) for m in blocks)
    assert not any(then == "R" for now, then, _ in changes if now == "P"), list(map(str, blocks))
    forward = {change[:2]: n for change, n in changes.items() if not change[2]}
    assert sum(n for (now, _), n in forward.items() if now == "P") == 2 * BLOCKS
    assert sum(n for (now, _), n in forward.items() if now != "P") == 2 * BLOCKS
    residuals = [n for n in graph.module.graph.nodes if TAG in n.meta and re.fullmatch(r"blocks\.\d+", tag(n).module)]
    assert {tag(n).placements[0][-1] for n in residuals if n.meta["val"].dim() == 3} == {Shard(1)}


def test_rules_are_obeyed_whatever_they_cost() -> None:
    golden = MODELS["llama"]
    rules = {
        "*.mlp.up.weight": "row",
        "*.attention.out": "replicate",
        "embed": "vocab",
        "blocks.1.mlp.down.weight": Shard(0),
        "*.mlp_norm.weight": Shard(0),
    }
    graph, placements = placed(golden, knobs={"rules": rules})
    for block in range(BLOCKS):
        assert placements[f"blocks.{block}.mlp.up.weight"] == Shard(1)
        assert placements[f"blocks.{block}.attention.out.weight"] == REPLICATE
        assert placements[f"blocks.{block}.mlp_norm.weight"] == Shard(0)
    assert placements["embed.weight"] == Shard(0)
    assert placements["blocks.1.mlp.down.weight"] == Shard(0)
    assert len(activations(graph, golden.block)) > len(activations(plain("llama")[0], golden.block))
