"""The two kinds of failure: a user's mistake and a broken invariant."""

from __future__ import annotations


class AutoshardError(ValueError):
    """A mistake in what the user gave: the message says where, what was found, what to do."""


class PlanError(AutoshardError):
    """A field of a plan, mesh or knob has a value that cannot work."""


class CaptureError(AutoshardError):
    """The model or loss cannot be traced to one graph; the message names the source line."""


class BatchError(AutoshardError):
    """A batch does not fit the plan or the program that was compiled for it."""


class StateError(AutoshardError):
    """A state is used after it was donated, or does not belong to this model."""


class CheckpointError(AutoshardError):
    """A checkpoint is missing, damaged, or of another model."""


class OptimizerError(AutoshardError):
    """The optimizer cannot be run under this plan and computes what one device computes."""


class DivergenceError(AutoshardError):
    """Ranks were given different plans, models or batches."""


class RankLostError(RuntimeError):
    """Another rank ended or cannot be reached, so a collective call cannot complete."""


class VerifyError(RuntimeError):
    """An invariant of the program does not hold: a defect of autoshard, with an excerpt of the graph."""
