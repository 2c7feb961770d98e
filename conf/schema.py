"""The types of the configuration, the refusal of unknown keys, and the way from it to a `Plan`.

Separate from `autoshard.Plan` on purpose: a plan is checked and frozen, this is what YAML and a command line can say.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, OmegaConf

from autoshard.errors import AutoshardError, PlanError
from autoshard.names import meant, question
from autoshard.plan import Mesh, Plan, Zero

_HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}


class ConfigError(AutoshardError):
    """A key or value of the configuration cannot work; the message names the nearest valid one."""


@dataclass
class TensorConf:
    """`autoshard.Tensor`."""

    sequence: bool = False


@dataclass
class PlanConf:
    """`autoshard.Plan`, with ZeRO's knobs beside its stage.

    In `rules` a value is "column", "row", "vocab", "replicate", or the dim that is split, as an integer; on a command
    line: "+plan.rules={*.q:column,*.o:row}".
    """

    zero: int = 3
    persistence_threshold: int = 0
    tensor: TensorConf = field(default_factory=TensorConf)
    rules: dict[str, Any] = field(default_factory=dict)
    precision: str = "model"
    recompute: str = "none"
    accumulate: int = 1
    clip_norm: float | None = None
    backend: str = "inductor"
    device: str | None = None
    check_replicas: int | None = None
    max_compiles: int = 8
    seed: int = 0
    without: list[str] = field(default_factory=list)


@dataclass
class MeshConf:
    """`autoshard.Mesh`."""

    data: int = -1
    tensor: int = 1
    pipeline: int = 1


@dataclass
class Config:
    """The whole configuration.

    Args:
        plan, mesh: how the model is trained; `plan.seed` is also that of the model's weights and the data's order.
        model, data, optimizer, schedule: `_target_` names a callable, the other keys are its arguments.
            data returns `autoshard.datasets.Splits`; schedule may be null.
        loss: import path of `loss(model, batch)`; null if the model returns its loss.
        global_batch: samples per optimizer step over all ranks.
        steps: optimizer steps in all.
        log_every: steps between two readings of the loss, each of which waits for the device.
        evaluate_every: steps between two evaluations on held-out samples; 0 only at the end.
        evaluate_samples: held-out samples of those; at the end all are used.
        save_every: steps between two checkpoints; 0 only at the end, and when interrupted.
        keep: number of checkpoints to keep.
        sample_prompt, sample_bytes, temperature: of the text generated at the end, where the data is text.
        output: folder for all results; null makes one under outputs/ named by date and time.
        resume: an output folder or a checkpoint in one, to go on from. Its configuration is used, and what the
            command line says besides.
    """

    plan: PlanConf = field(default_factory=PlanConf)
    mesh: MeshConf = field(default_factory=MeshConf)
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    schedule: dict[str, Any] | None = None
    loss: str | None = "autoshard.tasks.next_token"
    global_batch: int = 16
    steps: int = 240
    log_every: int = 10
    evaluate_every: int = 100
    evaluate_samples: int = 256
    save_every: int = 0
    keep: int = 2
    sample_prompt: str = "def "
    sample_bytes: int = 300
    temperature: float = 0.7
    output: str | None = None
    resume: str | None = None


def register() -> None:
    """Makes the types and the resolver known to Hydra; again does no harm."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("autoshard.share", lambda share, total: int(share * total), replace=True)


def check(config: DictConfig) -> None:
    """Refuses every key that nothing would read.

    Raises:
        ConfigError: with the nearest valid key.
    """
    for prefix, node, kind in (
        ("", config, Config),
        ("plan.", config.plan, PlanConf),
        ("plan.tensor.", config.plan.tensor, TensorConf),
        ("mesh.", config.mesh, MeshConf),
    ):
        _check_known(prefix, node, [f.name for f in fields(kind)], config)
    for name in ("model", "data", "optimizer", "schedule"):
        if config[name] is not None:
            _check_target(name, config[name], config)
    for name, least in (("global_batch", 1), ("steps", 1), ("log_every", 1), ("keep", 1), ("evaluate_samples", 1)):
        if config[name] < least:
            raise ConfigError(f"{name} is {config[name]}; valid: an integer >= {least}")
    for name in ("evaluate_every", "save_every", "sample_bytes", "temperature"):
        if config[name] < 0:
            raise ConfigError(f"{name} is {config[name]}; valid: 0 or more")


def plan_of(config: DictConfig) -> Plan:
    """
    Raises:
        ConfigError: a value is not valid, on every rank alike.
    """
    values: dict[str, Any] = dict(OmegaConf.to_container(config.plan, resolve=True))  # type: ignore[arg-type]
    try:
        zero = Zero(stage=values.pop("zero"), persistence_threshold=values.pop("persistence_threshold"))
        mesh = Mesh(**OmegaConf.to_container(config.mesh, resolve=True))  # type: ignore[arg-type]
        return Plan(mesh=mesh, zero=zero, **values)
    except PlanError as error:
        raise ConfigError(str(error)) from None


def unknown(key: str, valid: Iterable[str], prefix: str = "", config: Any = None) -> str:
    """What to say about a key that does not exist, where `valid` ones do; those elsewhere in `config` may be meant."""
    names = [prefix + name for name in sorted(set(valid) - _HYDRA_KEYS)]
    elsewhere = [other for other in _leaves(config) if other != prefix + key]
    return f"{prefix}{key} does not exist; {question(meant(key, names, elsewhere))}valid: {', '.join(names)}"


def _leaves(config: Any) -> list[str]:
    """The full keys of every value of ours in a whole configuration."""
    if config is None:
        return []
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return [key for f in fields(Config) for key in _keys_under(f.name, plain.get(f.name))]


def _keys_under(path: str, value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield path
        return
    for key, inner in value.items():
        if key not in _HYDRA_KEYS:
            yield from _keys_under(f"{path}.{key}", inner)


def _check_known(prefix: str, node: DictConfig, valid: Collection[str], config: DictConfig) -> None:
    for key in node:
        if key not in valid:
            raise ConfigError(unknown(str(key), valid, prefix, config))


def _check_target(path: str, node: DictConfig, config: DictConfig) -> None:
    if "_target_" not in node:
        raise ConfigError(f"{path} has no _target_; valid: {path}._target_=package.callable, or a group {path}=NAME")
    try:
        target = get_object(node._target_)
    except Exception as error:
        raise ConfigError(
            f"{path}._target_ is {node._target_!r}, which cannot be imported ({error}): correct it, or install it"
        ) from error
    accepted = _arguments(target)
    if accepted is not None:
        _check_known(f"{path}.", node, accepted | _HYDRA_KEYS, config)
    for name, child in _targets(node):
        _check_target(f"{path}.{name}", child, config)


def _targets(node: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    for key in node:
        if OmegaConf.is_dict(node[key]) and "_target_" in node[key]:
            yield str(key), node[key]


def _arguments(target: Any) -> set[str] | None:
    """Names that a callable takes; None: any. An optimizer's first argument is given by autoshard."""
    parameters = inspect.signature(target).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"params"}
