"""Imported once by the fork server, so that a new rank starts in a tenth of a second instead of ten.

Nothing here may start a thread or run an operator: ranks are forked from the process that imported it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # compile in the rank: no pool of processes per rank

_MODULES = (
    "torch",
    "torch.distributed.tensor",
    "torch.fx.experimental.proxy_tensor",
    "torchvision",
    "torch._inductor.compile_fx",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gpt2", "llama", "bert", "t5", "qwen2", "qwen3", "mamba")
    ),
    "tests.zoo",
    "tests.reference",
    "autoshard",
)

for _name in _MODULES:
    with contextlib.suppress(Exception):  # a rank that needs it will import it again and say what is wrong
        importlib.import_module(_name)

gc.freeze()  # a rank collects garbage after every call, and need not look through all of these for it
