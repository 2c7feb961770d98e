"""Ops of our own that stand in graphs between passes."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define("whole(Tensor x) -> Tensor")
_library.impl("whole", lambda x: x.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("autoshard::whole", lib=_library)
def _whole_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# The identity. It has no placement rule on purpose: what enters it is gathered there, in one collective.
whole = torch.ops.autoshard.whole.default

HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """`x` as float32 where it is of half precision, in which torch's kernels sum; else `x`."""
    return x.to(torch.float32) if x.dtype in HALF else x


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to `dtype` where that is of half precision, else `x`.

    Unlike a cast, the op has no rule for partial sums: they are added up before, so that the sum is rounded once.
    """
    return x if dtype not in HALF or x.dtype == dtype else torch.ops.prims.convert_element_type.default(x, dtype)
