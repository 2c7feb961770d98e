"""Initialise a model one tensor at a time, with the very bits that building it on one CPU device would give.

`record` runs the user's constructor once, every tensor on the meta device, and logs in order each op that makes or
changes a tensor. `Recording.replay` runs that log for real under one seeded generator. A tensor lives only as long
as its content is still wanted: the first of two initialisations is drawn, because it moves the generator on, and
freed at once; a parameter is handed over after its last write and freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard import compat
from autoshard.errors import CaptureError
from autoshard.init_log import Machine, Reseed, Step, View, schedule
from autoshard.init_recorder import AsOnOneDevice, Recorder, named_tensors, source_line

Keep = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Recording:
    """A model's initialisation, ready to be replayed any number of times.

    Args:
        module: the model, its parameters and buffers on the meta device.
        tensors: name -> where it lies; every parameter and buffer once, under its first name.
    """

    module: nn.Module
    tensors: Mapping[str, View]
    _steps: tuple[Step, ...]
    _nbytes: tuple[int, ...]

    def replay(self, seed: int, keep: Keep) -> None:
        """Initialise on CPU as ``torch.manual_seed(seed); fn()`` would, handing over each tensor when it is complete.

        `keep(name, whole)` is called once per parameter and buffer, in order of completion. It owns `whole`, a CPU
        tensor of the model's shape, strides and dtype; what it does not keep is freed. The caller's random state and
        default dtype are left as they were.

        Raises:
            CaptureError: a tensor from outside that the constructor copied has been changed since.
        """
        marks = {s.entry.state for s in self._steps if isinstance(s.entry, Reseed) and isinstance(s.entry.state, int)}
        machine = Machine(self._nbytes, marks)
        sharers = Counter(view.storage for view in self.tensors.values())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            machine.mark(0, 0)

            def hand_over(step: Step) -> None:
                for name in step.complete:
                    view = self.tensors[name]
                    whole = machine.tensor(view)
                    exclusive = view.storage in step.drop and sharers[view.storage] == 1 and not step.borrow
                    if not exclusive or view.nbytes != self._nbytes[view.storage]:
                        whole = whole.clone()
                    if exclusive:
                        machine.drop(view.storage)
                    keep(name, whole)
                    del whole

            machine.run_all(self._steps, hand_over)


def record(fn: Callable[[], nn.Module]) -> Recording:
    """Run `fn` once without memory for its tensors and log how they are initialised.

    Values that do not depend on random numbers may be read while `fn` runs (``x.item()`` for x from linspace).

    Raises:
        CaptureError: `fn` does not return a module, or reads a random value, or leaves a parameter without values;
            the message names the source line or the parameter.
    """
    recorder = Recorder()
    module = _run(recorder, fn)
    if not isinstance(module, nn.Module):
        raise CaptureError(f"the model callable returned {type(module).__name__}; it must return an nn.Module")
    recorder.adopt(module)
    for name, t in named_tensors(module):
        if recorder.untouched(t):
            raise CaptureError(
                f"{name!r} is on the meta device and was never given values; initialise it in the model callable, "
                "or build it there without device='meta'"
            )
    return _recording(recorder, module)


def record_reset(module: nn.Module) -> Recording:
    """Log the initialisation of a model that was built on the meta device: reset_parameters() of every submodule.

    They are called in the order of ``module.modules()``, parents first. Parameters and buffers that are not on meta
    keep their values unless a reset writes them.

    Raises:
        CaptureError: a meta parameter or buffer is not initialised that way; the message names it.
    """
    advice = (
        "; give parallelize a callable that builds the model instead (parallelize(lambda: Model(...), plan)), "
        "which runs the model's own initialisation"
    )
    for path, m in module.named_modules():
        own = [n for n, t in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)) if t.is_meta]
        if own and not callable(getattr(m, "reset_parameters", None)):
            raise CaptureError(
                f"module {path or '(root)'!r} ({type(m).__name__}) owns {', '.join(own)} on the meta device and has no "
                f"reset_parameters(), so how to initialise it is unknown{advice}"
            )
    recorder = Recorder()

    def reset() -> None:
        for m in module.modules():
            reset_parameters = getattr(m, "reset_parameters", None)
            if callable(reset_parameters):
                reset_parameters()

    _run(recorder, reset)
    recorder.adopt(module)
    for name, t in named_tensors(module):
        if recorder.untouched(t):
            raise CaptureError(f"{name!r} is on the meta device and no reset_parameters() initialises it{advice}")
    return _recording(recorder, module)


def _run(recorder: Recorder, fn: Callable[[], Any]) -> Any:
    try:
        with torch.random.fork_rng(devices=[]):
            recorder.begin()
            with compat.trunc_normal_replaced(recorder.trunc_normal_), recorder, AsOnOneDevice(recorder):
                return fn()
    except CaptureError:
        raise
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise CaptureError(
            f"the model cannot be built without holding its values, at {source_line(error)}: {error}. "
            "Build the module first and give parallelize the module, not a callable"
        ) from error


def _recording(recorder: Recorder, module: nn.Module) -> Recording:
    tensors = {name: recorder.view(t) for name, t in named_tensors(module)}
    steps = schedule(recorder.entries, {name: view.storage for name, view in tensors.items()})
    return Recording(module, tensors, tuple(steps), tuple(recorder.nbytes))
