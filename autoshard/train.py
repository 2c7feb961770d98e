"""The main job: train the model that the configuration names, on however many ranks there are.

    torchrun --nproc-per-node 2 -m autoshard.train
    python -m autoshard.train experiment=tiny plan.zero=2 model.layers=4
    torchrun --nproc-per-node 2 -m autoshard.train resume=outputs/2026-01-31_12-00-00

Everything about the model, plan and data is in conf/ (`--cfg job` prints it); the run itself is in `autoshard.job`.
Here is the command: composing the configuration, refusing what nothing would read, and saying so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from autoshard import job
from autoshard.conf import schema
from autoshard.errors import AutoshardError

_INTERRUPTED = "interrupted; nothing was saved after the last checkpoint"
_INTERRUPTED_CODE = 128 + signal.SIGINT
_ONLY_SHOWS = {"--cfg", "-c", "--help", "-h", "--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc"}


def main() -> None:
    """The command: composes the configuration, trains, and turns a user's mistake into a message."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    words = {argument.split("=")[0] for argument in sys.argv[1:]}
    if rank and words & _ONLY_SHOWS:
        return
    if world > 1 and words & {"--multirun", "-m"}:
        _give_up("--multirun cannot run inside torchrun; valid: a loop over torchrun, or one rank with python", rank)
    schema.register()
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it logs an error that it also raises
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would print and exit; what is wrong is said here
    try:
        with _mistakes_told(rank, trace=before == "1"):
            _hydra_main()
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@hydra.main(version_base="1.3", config_path="pkg://autoshard.conf", config_name="config")
def _hydra_main(config: DictConfig) -> None:
    with _mistakes_told(int(os.environ.get("RANK", "0")), trace=False):  # here too: Hydra announces what leaves a job
        # Keys added with + pass Hydra's own check: merged into the types again, they do not.
        config = OmegaConf.merge(OmegaConf.structured(schema.Config), config)  # type: ignore[assignment]
        if config.output is None and Path(HydraConfig.get().runtime.output_dir) != Path.cwd():
            config.output = HydraConfig.get().runtime.output_dir  # hydra.run.dir, or a job of --multirun
        if config.resume is not None:
            config = _resumed_config(config, list(HydraConfig.get().overrides.task))
        schema.check(config)
        result = job.run(config, _end_at_once)
    dist.destroy_process_group()
    if result.interrupted is not None:
        sys.exit(128 + result.interrupted)


def _resumed_config(given: DictConfig, overrides: list[str]) -> DictConfig:
    """The checkpoint's configuration, with what the command line says besides."""
    saved_file = job.find_checkpoint(Path(given.resume)) / "config.yaml"
    saved = OmegaConf.merge(OmegaConf.structured(schema.Config), OmegaConf.load(saved_file))
    assert isinstance(saved, DictConfig)
    saved.output = given.output
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if key == "experiment":
            raise schema.ConfigError(
                "experiment= cannot be given with resume=, which takes the checkpoint's configuration; "
                "valid: resume=PATH and single keys or groups, such as steps=1000 or plan=zero1"
            )
        value = OmegaConf.select(given, key)
        if OmegaConf.is_config(value):  # a group: nothing of the saved one is left
            OmegaConf.update(saved, key, None if value is None else value.copy(), merge=False, force_add=True)
        else:
            OmegaConf.update(saved, key, value, force_add=True)
    return saved


@contextlib.contextmanager
def _mistakes_told(rank: int, *, trace: bool) -> Iterator[None]:
    """A user's mistake and an interruption end the program with a message; a defect leaves a traceback."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, AutoshardError) as error:
        if trace:
            raise
        everywhere = not isinstance(error, AutoshardError) or isinstance(error, schema.ConfigError)
        _give_up(_explain(error), rank, same_everywhere=everywhere)
    except KeyboardInterrupt:
        _give_up(_INTERRUPTED, rank, code=_INTERRUPTED_CODE)


def _end_at_once() -> NoReturn:
    """Ends the process where it is: torch aborts it where an exception meets the C++ that traces a model."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"error: {_INTERRUPTED}\n".encode())  # a signal may come in the middle of a print
        _tell_launcher(_INTERRUPTED)
    with contextlib.suppress(RuntimeError):
        sys.stdout.flush()
    os._exit(_INTERRUPTED_CODE)


def _explain(error: BaseException) -> str:
    """A user's mistake in the configuration in one or two lines, with the nearest valid name."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, MissingConfigException) and link.options and link.missing_cfg_file:
            group, _, name = str(link.missing_cfg_file).rpartition("/")
            return schema.unknown(name, link.options, f"{group}=")
        if isinstance(link, ConfigKeyError | ConfigAttributeError) and link.parent_node is not None:
            parent = link.full_key.rpartition(".")[0] if link.full_key else ""
            prefix = f"{parent}." if parent else ""
            return schema.unknown(str(link.key), map(str, link.parent_node), prefix, _whole(link.parent_node))
        link = link.__cause__ or link.__context__
    if error.__cause__ is None or isinstance(error, AutoshardError):  # ours says all of it
        return str(error)
    return f"{error}: {str(error.__cause__).splitlines()[0]}"


def _whole(node: Any) -> Any:
    """The configuration that a node is in."""
    while node._get_parent() is not None:
        node = node._get_parent()
    return node


def _give_up(message: str, rank: int, *, same_everywhere: bool = True, code: int = 1) -> NoReturn:
    if rank and same_everywhere:
        time.sleep(20)  # rank 0 says it; an early exit here would make torchrun end rank 0 before it did
    else:
        print(f"error: {message}" if rank == 0 else f"error on rank {rank}: {message}", file=sys.stderr, flush=True)
        _tell_launcher(message)
    sys.exit(code)


def _tell_launcher(message: str) -> None:
    """Makes torchrun, which prints what it knows of a failure last, name this as the cause."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        detail = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": detail}}))


if __name__ == "__main__":
    record(main)()  # torchrun's last words are then a defect's traceback
