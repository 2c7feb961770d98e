"""Values that depend on no input, computed for real while the rest is traced on shapes alone.

So ``if mask.all()`` works where the mask comes from ``arange``, and fails, rightly, where it comes from data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard import compat
from autoshard.compat import pytree

_LARGEST = 1 << 20  # elements; above it a value is not worth a second computation
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)


class KnownValues(compat.TorchDispatchMode):
    """Keeps real values beside the traced ones for tensors made from nothing but shapes and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = all(x in self._known for x in tensors)
        if func in _READS and known:
            return self._compute(func, args, kwargs)
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            if any(x in self._known for x in tensors):
                self._known = WeakTensorKeyDictionary()  # an alias may have changed: forget, never be wrong
            return result
        random = torch.Tag.nondeterministic_seeded in func.tags
        wanted = isinstance(result, torch.Tensor) and result.numel() <= _LARGEST and func.namespace == "aten"
        if known and not random and wanted:
            self._known[result] = self._compute(func, args, kwargs)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return self._known[x]
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, kwargs = pytree.tree_map(real, (args, kwargs))
        with compat.without_modes():
            return func(*args, **kwargs)
