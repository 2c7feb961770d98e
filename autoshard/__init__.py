"""autoshard: a PyTorch model written for one device, as the program that each rank of a cluster runs."""

from __future__ import annotations

__version__ = "0.1.0"

from autoshard import (
    compat,  # noqa: F401  first: refuses a torch it was not made for
    data,
    memory,
    optim,
    schedules,
)
from autoshard.api import Step, parallelize
from autoshard.batch import Replicated
from autoshard.compare import Report, verify
from autoshard.errors import (
    AutoshardError,
    BatchError,
    CaptureError,
    CheckpointError,
    DivergenceError,
    OptimizerError,
    PlanError,
    RankLostError,
    StateError,
    VerifyError,
)
from autoshard.loss import Mean
from autoshard.placement import Replicate, Shard
from autoshard.plan import Mesh, Plan, Tensor, Zero
from autoshard.state import State

__all__ = [
    "AutoshardError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "DivergenceError",
    "Mean",
    "Mesh",
    "OptimizerError",
    "Plan",
    "PlanError",
    "RankLostError",
    "Replicate",
    "Replicated",
    "Report",
    "Shard",
    "State",
    "StateError",
    "Step",
    "Tensor",
    "VerifyError",
    "Zero",
    "data",
    "memory",
    "optim",
    "parallelize",
    "schedules",
    "verify",
]
