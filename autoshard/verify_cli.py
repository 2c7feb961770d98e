"""`autoshard.verify` for what a configuration names: is this plan, on these ranks, what one device computes?

    torchrun --nproc-per-node 2 -m autoshard.verify_cli experiment=tiny plan.zero=2
    python -m autoshard.verify_cli experiment=tiny steps=1

The same configuration as `autoshard.train`; the first global batch of the data is used for every step, at most
`steps` of them. Exits with 1 where something differs.
"""

from __future__ import annotations

import functools
import os
import sys

import hydra
import torch.distributed as dist
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from autoshard.compare import Report, verify
from autoshard.conf import schema
from autoshard.data import Loader

_STEPS = 2  # enough to see a wrong update in the next step's loss; the configuration's own number is for training


def verify_experiment(config: DictConfig) -> Report:
    """The report of a configuration as `autoshard.train` takes it. A collective call.

    Raises:
        AutoshardError: something in the configuration cannot work.
    """
    plan = schema.plan_of(config)
    loader = Loader(
        instantiate(config.data).train, global_batch=config.global_batch, accumulate=plan.accumulate, seed=plan.seed
    )
    batch = next(iter(loader))
    loader.close()
    return verify(
        functools.partial(instantiate, config.model, _convert_="all"),
        plan,
        batch,
        loss=None if config.loss is None else get_object(config.loss),
        optimizer=instantiate(config.optimizer, _partial_=True, _convert_="all"),
        steps=min(config.steps, _STEPS),
    )


@hydra.main(version_base="1.3", config_path="pkg://autoshard.conf", config_name="config")
def _hydra_main(config: DictConfig) -> None:
    config = OmegaConf.merge(OmegaConf.structured(schema.Config), config)  # type: ignore[assignment]
    schema.check(config)
    report = verify_experiment(config)
    if int(os.environ.get("RANK", "0")) == 0:
        print(report)
    dist.destroy_process_group()
    if not report.ok:
        sys.exit(1)


def main() -> None:
    """The command."""
    schema.register()
    _hydra_main()


if __name__ == "__main__":
    main()
