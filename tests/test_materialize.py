"""Initialising shard by shard gives the bits of one device, in the memory of the largest tensors."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.compat import TorchDispatchMode, pytree
from autoshard.errors import CaptureError
from autoshard.materialize import Recording, record, record_reset

SEED = 11


def _bits(t: torch.Tensor) -> bytes:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _replayed(recording: Recording, seed: int = SEED) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, whole: torch.Tensor) -> None:
        assert name not in found, f"{name} was handed over twice"
        found[name] = whole

    recording.replay(seed, keep)
    return found


def _assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, t in want.items():
        dense = torch.empty_like(t).stride()  # that of `t`, unless it is a part of something larger
        assert (found[name].shape, found[name].dtype, found[name].stride()) == (t.shape, t.dtype, dense), name
        assert _bits(found[name]) == _bits(t), f"{name} differs"


def _assert_like_one_device(fn: Callable[[], nn.Module], seed: int = SEED) -> Recording:
    recording = record(fn)
    torch.manual_seed(seed)
    want = _named(fn())
    _assert_same(_replayed(recording, seed), want)
    assert all(t.is_meta for t in _named(recording.module).values())
    return recording


class Attention(nn.Module):
    """Owns a causal mask, a rotary table and a tensor that is neither parameter nor buffer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim, bias=False)
        frequency = 1.0 / (10000 ** (torch.arange(0, dim // heads, 2) / (dim // heads)))
        angles = torch.outer(torch.arange(16), frequency)
        self.register_buffer("rotary", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())
        self.scale = torch.tensor(dim // heads) ** -0.5
        nn.init.orthogonal_(self.out.weight, gain=2**-0.5)


class Transformer(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 2, heads: int = 4, vocab: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=3)
        layer = nn.ModuleDict({"attn": Attention(dim, heads), "up": nn.Linear(dim, 64), "norm": nn.LayerNorm(dim)})
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self._reinitialise)
        with torch.no_grad():
            self.embed.weight[3].fill_(0)
        self.head.weight = self.embed.weight  # tied

    @staticmethod
    def _reinitialise(m: nn.Module) -> None:
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(m.weight, std=0.02)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _llama_config(dtype: str | None = None) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        dtype=dtype,
    )


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(_llama_config())


def _llama_bf16() -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(_llama_config("bfloat16"))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "resnet18_double": lambda: torchvision.models.resnet18().double(),
    "vit": lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64),
    "swin": lambda: torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1),
    "own_transformer": Transformer,
    "torch_transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 8, 2),
    "gpt2": _gpt2,
    "llama": _llama,
    "llama_bf16": _llama_bf16,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_bit_equals_one_device(name: str) -> None:
    _assert_like_one_device(MODELS[name])


def test_another_seed_gives_the_other_model() -> None:
    recording = record(Transformer)
    for seed in (0, 1):
        torch.manual_seed(seed)
        _assert_same(_replayed(recording, seed), _named(Transformer()))


class Holder(nn.Module):
    """A module made of the given tensors."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, t in tensors.items():
            if isinstance(t, nn.Parameter):
                self.register_parameter(name, t)
            else:
                self.register_buffer(name, t)


def _views() -> nn.Module:
    w = torch.empty(4, 6)
    with torch.no_grad():
        w[:2].normal_()
        w[2:].uniform_().t().mul_(2)
        w[torch.tensor([0, 3])] = 1.5
        w[:, w.new_ones(6, dtype=torch.bool)] += 1
    return Holder(w=nn.Parameter(w), column=nn.Parameter(w[:, 1]), copy=w.clone(memory_format=torch.contiguous_format))


def _data_assignment() -> nn.Module:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    a.weight.data = torch.eye(3) + torch.rand(3, 3)
    b.weight.data.copy_(a.weight.data.T)
    b.bias.data = a.bias.data.clone().fill_(2)
    return nn.Sequential(a, b)


def _constants() -> nn.Module:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    t = torch.from_numpy(table)
    mixed = torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.randn(4)
    return Holder(numpy=nn.Parameter(t), sine=nn.Parameter(t.sin()), mixed=mixed, count=torch.tensor(0))


def _reads_values_without_randomness() -> nn.Module:
    rates = [x.item() for x in torch.linspace(0, 0.1, 3)] + torch.arange(3).tolist()
    positions = torch.arange(6).float()
    if (positions > 4).any() and torch.equal(positions, positions.clone()):
        rates.append(float(positions.numpy().sum()))
    return Holder(rates=torch.tensor(rates), chosen=positions[positions > 2], drawn=torch.rand(len(rates)))


def _default_dtype() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return Holder(a=torch.arange(4) / 3, b=torch.rand(3), c=nn.Parameter(torch.empty(3).exponential_()))
    finally:
        torch.set_default_dtype(torch.float32)


def _generators() -> nn.Module:
    own = torch.Generator().manual_seed(5)
    tensors = {"a": torch.rand(3), "own": torch.rand(3, generator=own)}
    with torch.random.fork_rng(devices=[]):
        tensors["inside"] = torch.rand(3)
        torch.manual_seed(7)
        tensors["seeded"] = torch.randn(20)
    tensors["after"] = torch.rand(3)  # as if `inside` had not been drawn
    state = torch.get_rng_state()
    tensors["b"] = torch.randperm(9)
    torch.set_rng_state(state)
    tensors["again"] = torch.randperm(9)
    own.manual_seed(6)
    tensors["own_again"] = torch.empty(3).normal_(generator=own)
    return Holder(**tensors)


def _parametrizations() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(normed, spectral)


def _lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyBatchNorm1d())
    model(torch.randn(4, 3))
    return model


def _odd_shapes() -> nn.Module:
    shapes = {"scalar": (), "empty": (0,), "one": (1,), "three": (3,), "matrix": (5, 7)}
    drawn = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    conv = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last).normal_()
    eye = torch.eye(3, out=torch.empty(0))
    return Holder(**drawn, conv=nn.Parameter(conv), transposed=torch.randn(3, 4).T, eye=eye)


@pytest.mark.parametrize(
    "fn",
    [
        _views,
        _data_assignment,
        _constants,
        _reads_values_without_randomness,
        _default_dtype,
        _generators,
        _parametrizations,
        _lazy,
        _odd_shapes,
    ],
)
def test_what_constructors_do(fn: Callable[[], nn.Module]) -> None:
    _assert_like_one_device(fn)


def test_pretrained_values_are_loaded_without_a_second_copy_and_left_alone() -> None:
    torch.manual_seed(0)
    pretrained = nn.Linear(64, 64).state_dict()
    before = copy.deepcopy(pretrained)

    def fn() -> nn.Module:
        model = nn.Linear(64, 64)
        model.load_state_dict(pretrained)
        model.extra = nn.Parameter(pretrained["bias"])
        with torch.no_grad():
            model.weight[0] = 0
        return model

    recording = record(fn)
    found = _replayed(recording)
    torch.manual_seed(SEED)
    _assert_same(found, _named(fn()))
    found["extra"].zero_()
    _assert_same(pretrained, before)

    pretrained["bias"].add_(1)
    with pytest.raises(CaptureError, match="changed in place after the model was recorded"):
        _replayed(recording)


def test_a_callable_may_load_a_pretrained_model(tmp_path: Path) -> None:
    _gpt2().save_pretrained(tmp_path)  # type: ignore[operator]
    _assert_like_one_device(lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


class WithTables(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.tensor(4) ** -0.5
        self.tables: dict[str, list[Any]] = {"steps": [torch.arange(3), (torch.ones(2), "x")]}


def test_plain_tensor_attributes_keep_their_values() -> None:
    model = record(WithTables).module
    assert isinstance(model, WithTables)
    steps, (ones, text) = model.tables["steps"]
    assert (model.scale.item(), steps.tolist(), ones.tolist(), text) == (0.5, [0, 1, 2], [1.0, 1.0], "x")


def test_a_random_plain_attribute_is_refused_by_name() -> None:
    def fn() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].noise = torch.rand(3)
        return model

    with pytest.raises(CaptureError, match=r"0\.noise is a tensor with random values.*register_buffer"):
        record(fn)


def test_a_branch_on_random_values_names_the_source_line() -> None:
    def fn() -> nn.Module:
        model = nn.Linear(2, 2)
        if model.weight.abs().max() > 0.5:  # the offending line
            model.weight.data.mul_(0.5)
        return model

    with pytest.raises(CaptureError, match=r"test_materialize.py:\d+, in fn: `if model.weight.abs.*the offending line"):
        record(fn)


def test_a_callable_that_returns_no_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="returned int; it must return"):
        record(lambda: 3)  # type: ignore[arg-type, return-value]


def test_a_parameter_that_the_model_left_on_meta_is_refused() -> None:
    with pytest.raises(CaptureError, match="'weight' is on the meta device and was never given values"):
        record(lambda: nn.Linear(2, 2, device="meta"))


def test_the_model_s_own_mistakes_are_not_disguised() -> None:
    with pytest.raises(RuntimeError, match=r"size of tensor|broadcast"):
        record(lambda: Holder(a=torch.ones(2) + torch.ones(3)))


def test_the_caller_s_random_state_and_dtype_are_untouched() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    recording = record(_default_dtype)
    _replayed(recording)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32


class LiveBytes(TorchDispatchMode):
    """Measures the bytes of all storages alive, at every op; it knows nothing of the code under test."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self._seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._seen = {key: item for key, item in self._seen.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._seen.values()))
        return out


class ReinitialisedAtTheEnd(nn.Module):
    """As Hugging Face's post_init: every parameter is drawn when made and once more when all are there."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.embed = nn.Embedding(4 * dim, dim, padding_idx=0)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)
        with torch.no_grad():
            self.embed.weight[0].zero_()


def test_the_peak_is_that_of_the_largest_parameter() -> None:
    dim, layers = 64, 20
    recording = _assert_like_one_device(lambda: ReinitialisedAtTheEnd(layers, dim))
    largest = 4 * dim * dim * 4
    with LiveBytes() as live:
        recording.replay(SEED, lambda name, whole: None)
    total = sum(t.nbytes for t in _named(recording.module).values())
    assert total > 5 * largest
    assert largest <= live.peak <= 2 * largest

    with LiveBytes() as live:
        ReinitialisedAtTheEnd(layers, dim)
    assert live.peak >= total, "the measure itself sees a model that is held whole"


@pytest.mark.parametrize("fn", [_gpt2, _llama, torchvision.models.resnet18])
def test_real_models_stay_near_their_largest_parameter(fn: Callable[[], nn.Module]) -> None:
    recording = record(fn)
    sizes = [t.nbytes for t in _named(recording.module).values()]
    with LiveBytes() as live:
        recording.replay(SEED, lambda name, whole: None)
    assert live.peak <= 3 * max(sizes)


def test_recording_a_large_model_holds_little() -> None:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    recording = record(lambda: ReinitialisedAtTheEnd(layers=100, dim=16_384))  # 109 GB
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(t.nbytes for t in _named(recording.module).values()) > 100e9
    assert after - before < 5e6


def _reset_reference(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    model = build()
    torch.manual_seed(SEED)
    for m in model.modules():
        reset_parameters = getattr(m, "reset_parameters", None)
        if callable(reset_parameters):
            reset_parameters()
    return _named(model)


def _resettable() -> nn.Module:
    embed = nn.Embedding(9, 6, padding_idx=2)
    model = nn.Sequential(embed, nn.LSTM(6, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Linear(6, 9, bias=False))
    model[4].weight = embed.weight  # tied: drawn twice, the second stays
    return model


def test_a_model_built_on_meta_is_reset_in_module_order() -> None:
    with torch.device("meta"):
        model = _resettable()
    recording = record_reset(model)
    assert recording.module is model
    _assert_same(_replayed(recording), _reset_reference(_resettable))


def test_real_tensors_of_a_meta_model_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(3, 3, device="meta"), Holder(table=torch.arange(3.0)))
    found = _replayed(record_reset(model))
    assert found["1.table"].tolist() == [0, 1, 2]
    assert model.get_buffer("1.table").is_meta


@pytest.mark.parametrize("build", [lambda: nn.MultiheadAttention(8, 2), Transformer])
def test_a_meta_module_that_cannot_be_reset_is_refused_by_name(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(build())
    with pytest.raises(CaptureError, match=r"module '0.*owns (in_proj_weight|rotary).*no reset_parameters.*callable"):
        record_reset(model)


def test_a_buffer_that_no_reset_writes_is_refused_by_name() -> None:
    model = nn.Linear(3, 3, device="meta")
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(CaptureError, match=r"'table' is on the meta device and no reset_parameters\(\) initialises it"):
        record_reset(model)
