"""Run one engine and print its numbers as JSON.

python run_one.py --engine autoshard_zero3 --ranks 2 --micro-batch 2 --steps 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import RunConfig, Session, SessionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--optimizer", default="fused", choices=["fused", "foreach", "forloop"])
    parser.add_argument("--microbatches", type=int, default=4, help="of the pipeline engines")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model", type=json.loads, default={}, help='overrides of ModelConfig, e.g. {"n_layers": 4}')
    parser.add_argument("--opts", type=json.loads, default={}, help="JSON of options of the engine")


def config_of(engine: str, given: argparse.Namespace) -> RunConfig:
    return RunConfig(
        engine=engine,
        ranks=given.ranks,
        micro_batch=given.micro_batch,
        dtype=given.dtype,
        optimizer=given.optimizer,
        microbatches=given.microbatches,
        lr=given.lr,
        model=given.model,
        opts=given.opts,
    )


@dataclass(frozen=True)
class Boot:
    """How a session started, in seconds: process to end of the first step, the first step, imports, build."""

    startup_s: float
    first_step_s: float
    import_s: float
    build_s: float
    warmup_s: tuple[float, ...]


def start(
    config: RunConfig, warmup: int, *, label: str | None = None, env: Mapping[str, str] | None = None
) -> tuple[Session, Boot]:
    """Start a session and run `warmup` steps, at least one."""
    started = time.monotonic()
    session = Session(config, label=label, env=env)
    try:
        info = session.ready()
        times = session.run(1)
        startup = time.monotonic() - started
        if warmup > 1:
            times += session.run(warmup - 1)
        session.reset_peak()
    except SessionError:
        session.close()
        raise
    return session, Boot(startup, times[0], info["import_s"], info["build_s"], tuple(times))


def summarize(session: Session, boot: Boot, times: Sequence[float]) -> dict[str, Any]:
    """The record of one engine; memory in MiB."""

    def mib(size: float) -> float:
        return round(size / 2**20, 1)

    stats = session.stats()
    return {
        "label": session.label,
        "engine": session.config.engine,
        "ranks": session.config.ranks,
        "dtype": session.config.dtype,
        "step_median_s": statistics.median(times),
        "step_min_s": min(times),
        "steps": len(times),
        "startup_s": boot.startup_s,
        "first_step_s": boot.first_step_s,
        "import_s": boot.import_s,
        "build_s": boot.build_s,
        "peak_rss_mb": [mib(s["peak_rss"]) for s in stats],
        "peak_over_base_mb": [mib(s["peak_rss"] - s["base_rss"]) for s in stats],
        "live_mb": [mib(s["live_bytes"]) for s in stats],
        "state_mb": [s["state"] and {kind: mib(size) for kind, size in s["state"].items()} for s in stats],
        "losses": session.losses,
        "wire_mb": mib(statistics.median(session.wire[-len(times) :])),
        "cpu_median_s": statistics.median(session.cpu[-len(times) :]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    add_arguments(parser)
    given = parser.parse_args()
    try:
        session, boot = start(config_of(given.engine, given), given.warmup)
    except SessionError as error:
        raise SystemExit(str(error)) from error
    try:
        print(json.dumps(summarize(session, boot, session.run(given.steps)), indent=1))
    finally:
        session.close()


if __name__ == "__main__":
    main()
