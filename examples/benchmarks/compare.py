"""Compare engines in turns; the first is the baseline.

    python compare.py --engines ddp fsdp2 autoshard_zero3 'ds_zero2:{"adam": "cpuadam"}' --rounds 8

Engines run in groups of --group sessions beside the baseline's. Each round runs --block steps of every session of the
group in turn, so an engine is only compared with steps of the baseline taken seconds before or after its own; the
ratio is the median over rounds of (its step / the baseline's step of the same round). Losses are checked against one
process that sees the same global batches. Prints a markdown table and writes JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import RunConfig, Session, SessionError
from run_one import Boot, add_arguments, config_of, start, summarize

_RUN_FIELDS = ("optimizer", "microbatches", "ranks", "dtype", "micro_batch")
_GB_PER_RANK = 2.0  # a full-size rank peaks at 1.1 to 1.9


@dataclass(frozen=True)
class Spec:
    """One engine to run, as `NAME`, `NAME:{json}` or `LABEL=NAME:{json}` on the command line."""

    label: str
    config: RunConfig
    env: dict[str, str] | None


def parse_spec(text: str, given: argparse.Namespace) -> Spec:
    label = None
    if "=" in text.split(":{")[0]:
        label, text = text.split("=", 1)
    name, brace, rest = text.partition(":{")
    opts = json.loads("{" + rest) if brace else {}
    overrides = {key: opts.pop(key) for key in _RUN_FIELDS if key in opts}
    env = opts.pop("env", None)
    config = replace(config_of(name, given), opts={**given.opts, **opts}, **overrides)
    return Spec(label or name, config, env)


@dataclass
class Runner:
    """A live session and what was measured of it."""

    session: Session
    boot: Boot
    times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    dead: bool = False

    def record(self, **more: Any) -> dict[str, Any]:
        return {**summarize(self.session, self.boot, self.times), **more}


class Comparison:
    """Runs the engines; `records` and `errors` are the result."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.reference: list[float] | None = None
        self.records: list[dict[str, Any]] = []
        self.errors: list[dict[str, str]] = []

    def run(self) -> None:
        given = self.given
        if not given.no_ref:
            self.reference = self._reference_losses()
        first, *todo = [parse_spec(text, given) for text in given.engines]
        baseline = Runner(*start(first.config, given.warmup, label=first.label, env=first.env))
        try:
            while True:
                group, todo = todo[: given.group], todo[given.group :]
                runners = [runner for spec in group if (runner := self._start(spec)) is not None]
                times = self._rounds(baseline, runners)
                if not self.records:
                    self.records.append(baseline.record(ratio=1.0))
                for runner in runners:
                    if not runner.dead:
                        ratio = statistics.median(runner.ratios)
                        self.records.append(
                            runner.record(ratio=ratio, ratios=runner.ratios, baseline_median_s=statistics.median(times))
                        )
                        log(f"{runner.session.label}: {statistics.median(runner.times):.3f} s, x {ratio:.3f}")
                    runner.session.close()
                self.save()
                if not todo:
                    break
        finally:
            baseline.session.close()

    def _reference_losses(self) -> list[float]:
        given = self.given
        config = replace(config_of("reference", given), global_batch=given.ranks * given.micro_batch, ranks=1)
        session, _ = start(config, 1)
        try:
            session.run(given.warmup - 1 + given.rounds * given.block)
            return session.losses
        finally:
            session.close()

    def _start(self, spec: Spec) -> Runner | None:
        needed = _GB_PER_RANK * spec.config.ranks + self.given.spare_gb
        if available_gb() < needed:
            self._failed(spec.label, f"not started: {available_gb():.1f} GB free, wants {needed:.1f}; lower --group")
            return None
        try:
            session, boot = start(spec.config, self.given.warmup, label=spec.label, env=spec.env)
        except SessionError as error:
            self._failed(spec.label, str(error))
            return None
        warmup = ", ".join(f"{seconds:.2f}" for seconds in boot.warmup_s)
        log(f"started {spec.label}: start-up {boot.startup_s:.1f} s, warm-up steps {warmup} s")
        return Runner(session, boot)

    def _rounds(self, baseline: Runner, runners: Sequence[Runner]) -> list[float]:
        """Run every session in turn; returns the baseline's seconds per step in these rounds."""
        found: list[float] = []
        for round_ in range(self.given.rounds):
            times = baseline.session.run(self.given.block)
            found += times
            for runner in runners if round_ % 2 == 0 else runners[::-1]:
                if runner.dead:
                    continue
                try:
                    own = runner.session.run(self.given.block)
                except SessionError as error:
                    self._failed(runner.session.label, str(error))
                    runner.dead = True
                    continue
                runner.times += own
                runner.ratios.append(statistics.mean(own) / statistics.mean(times))
        baseline.times += found
        return found

    def _failed(self, label: str, error: str) -> None:
        self.errors.append({"label": label, "error": error})
        log(f"FAILED {label}: {error[-1500:]}")

    def save(self) -> None:
        found = {
            "args": vars(self.given) | {"out": str(self.given.out)},
            "reference": self.reference,
            "results": self.records,
            "errors": self.errors,
        }
        self.given.out.write_text(json.dumps(found, indent=1))

    def loss_difference(self, record: dict[str, Any]) -> str:
        """The largest difference of a loss from the reference's, over the steps that both ran."""
        if self.reference is None:
            return "-"
        steps = min(len(self.reference), len(record["losses"]))
        pairs = zip(self.reference[:steps], record["losses"][:steps], strict=True)
        return f"{max(abs(x - y) for x, y in pairs):.1e} ({steps} steps)"

    def table(self) -> str:
        columns = (
            "engine",
            "step s (median)",
            "min s",
            "CPU s/rank",
            "sent MB/rank/step",
            "x baseline",
            "start-up s",
            "first step s",
            "peak RSS MB (max rank)",
            "peak over imports MB",
            "live MB/rank",
            "params/grads/optim MB",
            "max abs loss diff",
        )
        lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for r in self.records:
            state = r["state_mb"][0]
            cells = (
                r["label"],
                f"{r['step_median_s']:.3f}",
                f"{r['step_min_s']:.3f}",
                f"{r['cpu_median_s']:.3f}",
                f"{r['wire_mb']:.0f}",
                f"{r['ratio']:.3f}",
                f"{r['startup_s']:.1f}",
                f"{r['first_step_s']:.1f}",
                f"{max(r['peak_rss_mb']):.0f}",
                f"{max(r['peak_over_base_mb']):.0f}",
                "/".join(f"{x:.0f}" for x in r["live_mb"]),
                "/".join(f"{state[kind]:.1f}" for kind in ("params", "grads", "optim")) if state else "-",
                self.loss_difference(r),
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines += [f"\nFAILED {e['label']}: {e['error'][-400:]}" for e in self.errors]
        return "\n".join(lines)


def available_gb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block", type=int, default=1, help="steps per turn")
    parser.add_argument("--group", type=int, default=3, help="engines alive at once besides the baseline")
    parser.add_argument("--spare-gb", type=float, default=6.0, help="never start a session that leaves less than this")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-ref", action="store_true", help="do not check losses")
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    add_arguments(parser)
    given = parser.parse_args()
    comparison = Comparison(given)
    comparison.run()
    print(f"\n{given.ranks} ranks, {given.dtype}, micro-batch {given.micro_batch}, baseline {given.engines[0]}\n")
    print(comparison.table())


if __name__ == "__main__":
    main()
