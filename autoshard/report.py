"""What a person sees of a training run: progress while it runs; metrics.csv, loss.png and a summary after."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

HELDOUT = "heldout_loss"


class Progress:
    """Step, loss, throughput and time left: a bar on a terminal where `rich` is installed, otherwise plain lines.

    Args:
        visible: False on all ranks but one, where nothing is shown.
        steps: optimizer steps in all; `done` of them before this run.
    """

    def __init__(self, *, visible: bool, steps: int, done: int) -> None:
        self.visible = visible
        self.steps = steps
        self._first, self._started = done, time.monotonic()
        self._bar = _rich_bar(steps, done) if visible and sys.stdout.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int) -> None:
        """Another step is under way; reads nothing from the device."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def show(self, step: int, loss: float, rate: float, unit: str) -> None:
        """The loss as of `step`, and `rate` in `unit` per second."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, loss=f"{loss:.4f}", rate=f"{rate:,.0f} {unit}/s")
        elif self.visible:
            each = (time.monotonic() - self._started) / max(step - self._first, 1)
            left = _clock(each * (self.steps - step))
            self.say(f"step {step}/{self.steps}  loss {loss:.4f}  {rate:,.0f} {unit}/s  {left} left")

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self.visible:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)


class MetricsLog:
    """Every step's metrics, written to metrics.csv at each `flush`, which is what reads them from the device.

    Columns: step, what the step returned, the held-out loss where it was taken, and seconds since the run began.
    Floats are written in full: two runs are equal to the bit if their columns are.

    Args:
        file: the CSV; None on ranks that write nothing. An existing one is continued.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._pending: list[dict[str, Any]] = []
        self._started = time.monotonic()

    def add(self, step: int, metrics: Mapping[str, Tensor]) -> None:
        row = {"step": step, **metrics, HELDOUT: "", "seconds": round(time.monotonic() - self._started, 4)}
        self._pending.append(row)

    def add_heldout(self, loss: float) -> None:
        """Held-out loss after the step added last, be it written already or not."""
        if self._pending:
            self._pending[-1][HELDOUT] = loss
        elif self._file is not None:
            with self._file.open(newline="") as source:
                rows = list(csv.DictReader(source))
            rows[-1][HELDOUT] = repr(loss)
            written = self._file.with_suffix(".writing")
            with written.open("w", newline="") as out:
                writer = csv.DictWriter(out, list(rows[-1]))
                writer.writeheader()
                writer.writerows(rows)
            written.replace(self._file)

    def flush(self) -> dict[str, Any]:
        """Writes what was added, and returns the last row with its values read."""
        rows = [{key: v.item() if isinstance(v, Tensor) else v for key, v in row.items()} for row in self._pending]
        self._pending.clear()
        if self._file is not None and rows:
            new = not self._file.exists()
            with self._file.open("a", newline="") as out:
                writer = csv.DictWriter(out, list(rows[0]))
                if new:
                    writer.writeheader()
                writer.writerows(rows)
        return rows[-1] if rows else {}


def read_metrics(file: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv; empty cells are left out."""
    with file.open(newline="") as source:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(source)]


def plot_losses(rows: list[dict[str, float]], file: Path, *, baseline: tuple[str, float] | None) -> str | None:
    """Draws training and held-out loss over steps, and the baseline as a line.

    Returns:
        None, or why there is no picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no loss.png: matplotlib is not installed (pip install 'autoshard[train]')"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8)
    axes.plot(steps, _smooth(losses), color="tab:blue", label="training (smoothed)")
    held = [(row["step"], row[HELDOUT]) for row in rows if HELDOUT in row]
    if held:
        axes.plot(*zip(*held, strict=True), color="tab:orange", marker="o", label="held-out")
    if baseline is not None:
        axes.axhline(baseline[1], color="tab:gray", linestyle="--", label=f"{baseline[0]}, held-out")
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite:
        axes.set_ylim(top=max(finite) * 1.02)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    return None


@dataclass(frozen=True)
class Summary:
    """One screen about a run: (heading, text) lines for people, values for programs."""

    title: str
    lines: tuple[tuple[str, str], ...]
    values: Mapping[str, Any]

    def __str__(self) -> str:
        width = max(len(heading) for heading, _ in self.lines)
        return "\n".join([self.title, *(f"  {heading:<{width}}  {text}" for heading, text in self.lines)])

    def write(self, folder: Path) -> None:
        """summary.txt and summary.json."""
        (folder / "summary.txt").write_text(f"{self}\n")
        (folder / "summary.json").write_text(json.dumps(self.values, indent=2) + "\n")


def summarise(
    *,
    title: str,
    steps: int,
    start_up: float,
    step_seconds: Sequence[float],
    work: tuple[float, str],
    peak: int,
    at_rest: Mapping[str, int],
    communication: Mapping[str, int],
    heldout: float,
    baseline: tuple[str, float] | None,
    results: Sequence[str],
    resume: str,
) -> Summary:
    """
    Args:
        steps: optimizer steps done in all.
        start_up: seconds of tracing, rewriting, compiling and making the state.
        step_seconds: of steps of this run, or means over a few.
        work: how many tokens or samples one step takes in, and the word for them.
        peak, at_rest: bytes per rank.
        communication: bytes that one rank sends per step, by kind of collective.
        heldout, baseline: losses in nats.
        results, resume: where things are, and the command that goes on.
    """
    ordered = sorted(step_seconds) or [math.nan]
    median = statistics.median(ordered)
    low, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    held = f"{heldout:.4f} nats"
    if baseline is not None:
        verdict = "below" if heldout < baseline[1] else "NOT below"
        held += f", {verdict} the {baseline[0]}'s {baseline[1]:.4f} on the same samples"
    lines = [
        ("step time", f"{median * 1e3:.0f} ms median, {low * 1e3:.0f} to {high * 1e3:.0f} from 10% to 90%"),
        ("throughput", f"{work[0] / median:,.0f} {work[1]}/s over all ranks"),
        ("start-up", f"{start_up:.1f} s: trace, rewrite, compile, initial state"),
        ("peak memory", f"{bytes_text(peak)} on rank 0"),
        ("at rest", _total(at_rest, "per rank")),
        *_parts(at_rest),
        ("communication", _total(communication, "sent per rank and step")),
        *_parts(communication),
        ("held-out loss", held),
        *((("results", results[0]), *(("", line) for line in results[1:])) if results else ()),
        ("to go on", resume),
    ]
    values = {
        "steps": steps,
        "step_seconds": median,
        "items_per_second": work[0] / median,
        "item": work[1],
        "start_up_seconds": start_up,
        "peak_bytes": peak,
        "bytes_at_rest": dict(at_rest),
        "bytes_per_step": dict(communication),
        "heldout_loss": heldout,
        "baseline": None if baseline is None else {"name": baseline[0], "loss": baseline[1]},
    }
    return Summary(title, tuple(lines), values)


def _total(parts: Mapping[str, int], per: str) -> str:
    return f"{bytes_text(sum(parts.values()))} {per}"


def _parts(parts: Mapping[str, int]) -> list[tuple[str, str]]:
    return [("", f"  {bytes_text(count):>8}  {name}") for name, count in parts.items()]


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _smooth(values: list[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the values, unbiased at the start."""
    keep = 1 - 1 / max(len(values) / 50, 1)
    total = weight = 0.0
    found = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight)
    return found


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _rich_bar(steps: int, done: int) -> Any:
    try:
        from rich import progress
    except ImportError:
        return None
    columns = [
        progress.TextColumn("step {task.completed}/{task.total}"),
        progress.BarColumn(),
        progress.TextColumn("loss {task.fields[loss]}"),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    ]
    bar = progress.Progress(*columns, refresh_per_second=4)
    bar.add_task("training", total=steps, completed=done, loss="...", rate="")
    return bar
