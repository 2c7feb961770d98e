"""Ctrl-C and SIGTERM on any rank, made into a step after which all ranks stop together."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist

from autoshard import compat


class Stop:
    """Catches signals within a `with` block; made by all ranks.

    Before `arm` a signal interrupts at once: there is nothing to save. Then the first one asks to stop, a second
    one interrupts. One rank that is asked is enough: each step starts an all-reduce of one number on the side,
    whose result is read at the next, so that nobody waits for it.

    Args:
        interrupt: called in the handler of a signal that comes before `arm`; KeyboardInterrupt is raised if it
            returns, and at once for a second signal.
    """

    def __init__(self, interrupt: Callable[[], object]) -> None:
        self._interrupt = interrupt
        self.decided: signal.Signals | None = None  # by all ranks
        self._asked = 0
        self._armed = False
        self._before: dict[signal.Signals, Any] = {}
        self._vote = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        # In host memory: NCCL would make the host wait for the device.
        self._group = cast(dist.ProcessGroup, dist.new_group(backend=compat.gloo_in_order()))

    def __enter__(self) -> Self:
        for name in (signal.SIGINT, signal.SIGTERM):
            self._before[name] = signal.signal(name, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)
        if error is None and self._work is not None:
            self._work.wait()

    def arm(self) -> None:
        """From here on a signal waits for the end of the step."""
        self._armed = True

    def disarm(self) -> None:
        """From here on a signal interrupts: all is saved."""
        self._armed = False

    def agreed(self) -> bool:
        """Whether all ranks stop here. A collective call, once per step; it tells what was asked a step earlier."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if int(self._vote):
                self.decided = signal.Signals(int(self._vote))
                return True
        self._vote.fill_(self._asked)
        self._work = dist.all_reduce(self._vote, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            self._interrupt()
            raise KeyboardInterrupt
        if self._asked:
            raise KeyboardInterrupt
        self._asked = number
