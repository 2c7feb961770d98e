"""What a run of the zoo may cost, and which models may cost more, with the reason."""

from __future__ import annotations

from autoshard.program import Role
from tests.multirank import zoo_run
from tests.multirank.zoo_run import Combination, Measured

# What costs more than its share, by name, with the reason. Empty is the aim.
FLOPS_EXCEPTIONS: dict[str, str] = {}
BYTES_EXCEPTIONS: dict[str, str] = {}
TRAFFIC_EXCEPTIONS: dict[str, str] = {
    "recurrent": "its weights are used at every time step of a loop: gathered again for uses that are far apart",
}
FEW_NUMBERS = 64  # bytes a micro-batch: a gather of a label or a count a sample can take the place of two reductions
GATHER_EXCEPTIONS: dict[str, str] = {
    "resnet": "its last layers have 4 samples of few places: fewer numbers than the sums over them, which are reduced",
    "swin_v2": "its position bias comes from a small MLP on coordinates, no batch in it: split and gathered",
    "contrastive": "every sample is scored against every other: each rank needs the whole batch's embeddings",
}
# What misses the bound on values, with the reason. The bound stays: such a case is expected to fail, and a run in
# which it passes fails the suite, so that the entry goes.
INEXACT: dict[str, str] = {
    "hf_mamba": "sums over the batch in float32: one device that splits the batch moves this gradient by more than the "
    "bound too (test_zoo_reference measures it); without its casts to float32, hf_mamba_in_double, it is exact",
}
# What one device misses too when it takes the samples in another order, so that an entry of the table may fail.
SENSITIVE: dict[str, str] = {
    "resnet": "with batch norm over 4 samples a last bit grows 65-fold a step: after five, one device's gradient norm "
    "is off by up to 1.9e-8, too, when the samples of its batches are permuted",
}
# On a mesh with a tensor axis. What fails there, with the reason: expected to, strictly.
TENSOR_FAILS: dict[str, str] = {}
TENSOR_FLOPS_EXCEPTIONS: dict[str, str] = {
    "in_place": "its head of 16 x 5 on 4 ranks is not worth a collective",
    "odd_shapes": "of its 140 operations 20 are not worth a collective",
    "swin_v2": "its position bias comes from a small MLP on coordinates, which 2 x 2 ranks do not split on both axes",
    "contrastive": "its matrix of all pairs, 6,144 operations without a weight, is not worth all its collectives",
    "siamese": "of its 18,432 operations the second product's are not worth a collective for each of its two calls",
}
TENSOR_BYTES_EXCEPTIONS: dict[str, str] = {
    "topk": "its head of 5 x 8 is not worth a collective",
    "resnet": "a shortcut of 16 x 8 channels is not worth a collective",
}
EXCEPTIONS = (
    INEXACT,
    SENSITIVE,
    FLOPS_EXCEPTIONS,
    BYTES_EXCEPTIONS,
    TRAFFIC_EXCEPTIONS,
    GATHER_EXCEPTIONS,
    TENSOR_FLOPS_EXCEPTIONS,
    TENSOR_BYTES_EXCEPTIONS,
)

FLOPS = 1.05  # over global / N
TENSOR_FLOPS = 1.1  # the same with a tensor axis


def cost_complaints(combination: Combination, ranks: list[Measured]) -> list[str]:
    """What a run costs beyond its share, in words, but for the listed exceptions."""
    name, cost, split = combination.name, ranks[0].cost, ranks[0].split
    found = _flops_complaints(combination, ranks)
    allowed = zoo_run.allowed_bytes(combination, split)
    held = max(m.at_rest for m in ranks)
    if held > allowed.total and name not in (TENSOR_BYTES_EXCEPTIONS if combination.tensor > 1 else BYTES_EXCEPTIONS):
        found.append(
            f"{held} bytes at rest per rank, {allowed.total} allowed at stage {combination.stage}; whole on the tensor "
            f"axis: {', '.join(zoo_run.whole_matrices(combination, split)) or 'no matrix'}"
        )
    if cost.bytes_at_rest != held:
        found.append(f"{held} bytes at rest were measured, step.cost() says {cost.bytes_at_rest}")
    sent, most_sent = zoo_run.traffic(cost), zoo_run.allowed_traffic(combination, split)
    if combination.accumulate == 1 and sent > most_sent and name not in TRAFFIC_EXCEPTIONS:
        found.append(f"{sent} bytes sent for parameters and gradients on the data axis, {most_sent} allowed")
    gathers = zoo_run.collectives(cost, "data", Role.ACTIVATION_GATHER)
    gathered = sum(c.sent for c in cost.collectives if c.axis == "data" and c.role is Role.ACTIVATION_GATHER)
    if gathered > FEW_NUMBERS * combination.accumulate and name not in GATHER_EXCEPTIONS:
        found.append(f"{gathers} activations are gathered on the data axis, {gathered} bytes")
    return found


def _flops_complaints(combination: Combination, ranks: list[Measured]) -> list[str]:
    found = []
    share = zoo_run.flops_share(combination)
    most = max(m.cost.flops for m in ranks)
    bound = TENSOR_FLOPS if combination.tensor > 1 else FLOPS
    excepted = {*FLOPS_EXCEPTIONS, *(TENSOR_FLOPS_EXCEPTIONS if combination.tensor > 1 else ())}
    if most > bound * share and combination.name not in excepted:
        found.append(f"{most} FLOPs per rank, {most / share:.3f} of its share {share:.0f} (bound {bound})")
    # A product whose result is not used is not run. Of a convolution in groups torch counts the gradient as if there
    # were one group, squared in the channels: with its groups split it counts less than a share.
    if most < 0.85 * share and combination.tensor == 1:
        found.append(f"{most} FLOPs per rank, {most / share:.3f} of its share {share:.0f}: some are not counted")
    return found
