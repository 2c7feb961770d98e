"""One training run: its loop, its output folder, its checkpoints and its report."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Subset

import autoshard
from autoshard import runtime
from autoshard.compile import compiled_for
from autoshard.conf import schema
from autoshard.data import Loader, Samples, evaluation_loader
from autoshard.datasets import ByteText, Splits
from autoshard.report import MetricsLog, Progress, plot_losses, read_metrics, summarise
from autoshard.runtime import Runtime
from autoshard.state import State
from autoshard.stop import Stop
from autoshard.tasks import generate

_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Args:
        output: the folder of everything it wrote.
        checkpoint: the last checkpoint, what `resume=` takes.
        steps: optimizer steps done.
        interrupted: the signal that stopped it, if one did.
    """

    output: Path
    checkpoint: Path
    steps: int
    interrupted: signal.Signals | None


def run(config: DictConfig, interrupt: Callable[[], object] = lambda: None) -> Result:
    """Runs a checked configuration to its end, or to a signal. A collective call; only rank 0 prints and reports.

    Args:
        interrupt: as for `Stop`.

    Raises:
        AutoshardError: something in the configuration cannot work.
        KeyboardInterrupt: a signal before the first step, or a second one.
    """
    job = Job(config)
    with Stop(interrupt) as stop:
        state, done = job.start()
        stop.arm()
        state, done = job.train(state, done, stop)
        checkpoint = job.save(state, done)
        stop.disarm()
    if stop.decided is not None:
        job.say(f"stopped by {stop.decided.name} after step {done}; saved to {checkpoint}")
        job.say(f"go on with: {job.resume_command}")
    else:
        job.report(state, checkpoint)
    return Result(job.folder, checkpoint, done, stop.decided)


class Job:
    """What the parts of a run share."""

    def __init__(self, config: DictConfig) -> None:
        plan = schema.plan_of(config)
        self.config = config
        self.place: Runtime = runtime.start(plan)
        self.first = self.place.rank == 0
        self.splits: Splits = instantiate(config.data)
        self.loader = Loader(
            self.splits.train,
            global_batch=config.global_batch,
            rank=self.place.data_coordinate,
            ranks=self.place.data_ranks,
            accumulate=plan.accumulate,
            seed=plan.seed,
            device=self.place.device,
        )
        self.step = autoshard.parallelize(
            functools.partial(instantiate, config.model, _convert_="all"),
            plan,
            loss=None if config.loss is None else get_object(config.loss),
            optimizer=instantiate(config.optimizer, _partial_=True, _convert_="all"),
            schedule=None if config.schedule is None else instantiate(config.schedule, _convert_="all"),
        )
        self.resumed = None if config.resume is None else find_checkpoint(Path(config.resume))
        self.position = {} if self.resumed is None else json.loads((self.resumed / "position.json").read_text())
        done = self.position.get("step", 0)
        if done >= config.steps:
            raise schema.ConfigError(
                f"resume={config.resume} has had {done} steps and steps is {config.steps}: nothing is left to train; "
                f"valid: resume={config.resume} steps=N with N above {done}"
            )
        self.folder = _make_folder(config, self.first, self.resumed)
        self.log = MetricsLog(self.folder / "metrics.csv" if self.first else None)
        self.start_up = 0.0  # seconds
        self.step_seconds: list[float] = []  # per step, a mean over the steps between two readings of the loss
        self.say(f"autoshard {autoshard.__version__}: {self.what}; results go to {self.folder}")

    def start(self) -> tuple[State, int]:
        """The first state, or the one to go on from, and the steps it has had."""
        started = time.monotonic()
        if self.resumed is None:
            state, done = self.step.init(self.loader.example()), 0
        else:
            self.loader.load_state_dict(self.position["data"])
            state, done = self.step.load(self.resumed / "state", self.loader.example()), self.position["step"]
            self.say(f"resumed from {self.resumed} after step {done}")
        self.start_up = time.monotonic() - started
        return state, done

    def train(self, state: State, done: int, stop: Stop) -> tuple[State, int]:
        """Steps until all are done, or all ranks agree to stop; returns the state and the steps it has had."""
        config, batches = self.config, self.loader.stream()
        with Progress(visible=self.first, steps=config.steps, done=done) as progress:
            since, seconds = done, 0.0  # the loss was last read, without the time of evaluations and checkpoints
            while done < config.steps and not stop.agreed():
                started = time.monotonic()
                state, metrics = self.step(state, next(batches))
                done += 1
                self.log.add(done, metrics)
                progress.step(done)
                last = done == config.steps
                if last or done % config.log_every == 0:
                    row = self.log.flush()
                    seconds += time.monotonic() - started
                    self.step_seconds.append(seconds / (done - since))
                    amount, unit = _work_of(row)
                    progress.show(done, row["loss"], amount / self.step_seconds[-1], unit)
                    since, seconds = done, 0.0
                else:
                    seconds += time.monotonic() - started
                if config.evaluate_every and done % config.evaluate_every == 0 and not last:
                    loss = self.evaluate(state, _some(self.splits.heldout, config.evaluate_samples))
                    self.log.add_heldout(loss)
                    progress.say(f"step {done}/{config.steps}  held-out loss {loss:.4f}")
                if config.save_every and done % config.save_every == 0 and not last:
                    self.save(state, done)
        self.loader.close()
        return state, done

    def evaluate(self, state: State, dataset: Samples) -> float:
        """The mean loss over `dataset`, each sample once, weighed as the loss itself weighs."""
        loader = evaluation_loader(
            dataset,
            global_batch=self.config.global_batch,
            rank=self.place.data_coordinate,
            ranks=self.place.data_ranks,
            device=self.place.device,
        )
        total = weight = 0.0
        for batch in loader:
            metrics = self.step.evaluate(state, batch)
            here = float(metrics.get("tokens", metrics["samples"]))
            total += float(metrics["loss"]) * here
            weight += here
        return total / weight

    def save(self, state: State, done: int) -> Path:
        """A checkpoint with the state, the data position, the configuration and the metrics so far, or nothing.

        Older ones are removed only after it is complete.
        """
        self.log.flush()
        parent = self.folder / _CHECKPOINTS
        final, partial = parent / f"step_{done:08}", parent / f".writing_{done:08}"
        self.step.save(state, partial / "state")
        if self.first:
            position = {"step": done, "data": self.loader.state_dict()}
            (partial / "position.json").write_text(json.dumps(position))
            OmegaConf.save(self.config, partial / "config.yaml")  # unresolved: what follows from steps still does
            if (self.folder / "metrics.csv").exists():
                shutil.copyfile(self.folder / "metrics.csv", partial / "metrics.csv")
            partial.rename(final)
            for old in sorted(parent.glob("step_*"))[: -self.config.keep]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def sample(self, state: State) -> str | None:
        """Text from the model, where it was trained on text."""
        config = self.config
        if not isinstance(self.splits.train, ByteText) or config.sample_bytes == 0:
            return None
        with compiled_for("the sample text"):
            text = generate(
                lambda window: self.step.forward(state, window.to(self.place.device)),
                config.sample_prompt.encode(),
                length=config.sample_bytes,
                context=self.splits.train.sequence,
                temperature=config.temperature,
                seed=config.plan.seed,
            )
        return text.decode("utf-8", errors="replace")

    def report(self, state: State, checkpoint: Path) -> None:
        """Evaluates, generates, writes loss.png, sample.txt and the summary, and prints the latter."""
        heldout = self.evaluate(state, self.splits.heldout)
        text = self.sample(state)
        if self.first:
            self.log.add_heldout(heldout)
            self._write_report(heldout, text, checkpoint)
        dist.barrier()

    def _write_report(self, heldout: float, text: str | None, checkpoint: Path) -> None:
        folder, baseline = self.folder, self.splits.baseline
        line = None if baseline is None else (baseline[0], baseline[1]())
        rows = read_metrics(folder / "metrics.csv")
        missing = plot_losses(rows, folder / "loss.png", baseline=line)
        if text is not None:
            (folder / "sample.txt").write_text(text, encoding="utf-8")
        files = ["config.yaml", "metrics.csv", "summary.txt", "summary.json"]
        files += ["loss.png"] * (missing is None) + ["sample.txt"] * (text is not None)
        cost = self.step.cost()
        sent: dict[str, int] = {}
        for entry in cost.collectives:
            name = f"{entry.role.value} ({entry.op.removesuffix('_into_tensor').removesuffix('_tensor')}, {entry.axis})"
            sent[name] = sent.get(name, 0) + entry.sent
        summary = summarise(
            title=f"{self.what}: {int(rows[-1]['step'])} steps",
            steps=int(rows[-1]["step"]),
            start_up=self.start_up,
            step_seconds=self.step_seconds,
            work=_work_of(rows[-1]),
            peak=_peak_bytes(self.place.device),
            at_rest={name: size for name, size in cost.at_rest.items() if size},
            communication=sent,
            heldout=heldout,
            baseline=line,
            results=[str(folder), ", ".join(files), f"checkpoint in {checkpoint.relative_to(folder)}"],
            resume=self.resume_command,
        )
        summary.write(folder)
        self.say(f"\n{summary}")
        if missing is not None:
            self.say(missing)

    def say(self, line: str) -> None:
        if self.first:
            print(line, flush=True)

    @property
    def what(self) -> str:
        """Model, plan and place in a few words."""
        mesh = self.place.mesh
        axes = " x ".join(f"{name}={size}" for name, size in mesh.axes if size > 1)
        split = f" ({axes})" if mesh.size > mesh.axis("data") else ""
        where = (
            f"{mesh.size} rank{'s' if mesh.size > 1 else ''}{split} ({self.place.device.type}, {self.place.backend})"
        )
        model = str(self.config.model._target_).rpartition(".")[2]
        return f"{model}, ZeRO-{self.config.plan.zero} on {where}, {self.config.plan.backend}"

    @property
    def resume_command(self) -> str:
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        alone = dist.get_world_size() == 1
        launcher = _command("python") if alone else f"{_command('torchrun')} --nproc-per-node {local}"
        return f"{launcher} -m autoshard.train resume={self.folder}"


def _command(name: str) -> str:
    """A command of this environment, with its folder where the shell would find another or none."""
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    return str(own) if own.exists() and (found is None or Path(found) != own) else name


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the last one in the output folder `path`.

    Raises:
        ConfigError: there is none.
    """
    candidates = [path, *sorted((path / _CHECKPOINTS).glob("step_*"), reverse=True)]
    for candidate in candidates:
        if (candidate / "position.json").is_file():
            return candidate.absolute()
    raise schema.ConfigError(
        f"resume={path} has no checkpoint; valid: a run's output folder, or one of its {_CHECKPOINTS}/step_* folders"
    )


def _make_folder(config: DictConfig, first: bool, resume: Path | None) -> Path:
    """The output folder, the same on all ranks, with the resolved configuration in it."""
    named: list[str | None] = [None]
    if first:
        path = Path(config.output) if config.output is not None else _new_name(Path("outputs"))
        path.mkdir(parents=True, exist_ok=True)
        if (path / "metrics.csv").exists():
            named = [f"!output={path} holds the results of another run; valid: a new folder, or resume={path}"]
        else:
            if resume is not None and (resume / "metrics.csv").exists():
                shutil.copyfile(resume / "metrics.csv", path / "metrics.csv")
            OmegaConf.save(config, path / "config.yaml", resolve=True)
            named = [str(path.absolute())]
    dist.broadcast_object_list(named, src=0)
    answer = str(named[0])
    if answer.startswith("!"):
        raise schema.ConfigError(answer[1:])
    return Path(answer)


def _new_name(parent: Path) -> Path:
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = itertools.chain([stamp], (f"{stamp}_{n}" for n in itertools.count(2)))
    return next(parent / name for name in names if not (parent / name).exists())


def _work_of(row: Mapping[str, Any]) -> tuple[float, str]:
    """How much one step took in, and the word for it."""
    return (row["tokens"], "tokens") if "tokens" in row else (row["samples"], "samples")


def _some(dataset: Any, count: int) -> Any:
    """At most `count` samples, spread evenly."""
    length = len(dataset)
    return dataset if length <= count else Subset(dataset, [i * length // count for i in range(count)])


def _peak_bytes(device: torch.device) -> int:
    """Of this rank: allocated on the GPU, or resident in host memory, the interpreter included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
