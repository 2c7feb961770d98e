"""Small models of our own, for the presets in conf/. Plain `nn.Module`s: nothing in them knows about ranks."""

from autoshard.models.gpt import GPT
from autoshard.models.llama import Llama
from autoshard.models.mlp import MLP

__all__ = ["GPT", "MLP", "Llama"]
