"""The main job: train the model that the configuration names, on however many ranks there are.

    torchrun --nproc-per-node 2 -m autoshard.train
    python -m autoshard.train experiment=tiny plan.zero=2 model.layers=4
    torchrun --nproc-per-node 2 -m autoshard.train resume=outputs/2026-01-31_12-00-00

Everything about the model, plan and data is in conf/ (`--help` lists it); everything distributed is in
`autoshard.parallelize`. What is here: the loop, the output folder, checkpoints that also hold the data position,
and stopping at a step that all ranks agree on.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from torch.utils.data import Subset

import autoshard
from autoshard import runtime
from autoshard.conf import schema
from autoshard.data import Loader, evaluation_loader
from autoshard.datasets import ByteText, Splits
from autoshard.errors import AutoshardError
from autoshard.report import MetricsLog, Progress, plot_losses, read_metrics, summarise
from autoshard.tasks import generate

_CHECKPOINTS = "checkpoints"
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
    trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would print and exit; what is wrong is said here
    with _mistakes_told(rank, trace=trace):
        _hydra_main()
    if dist.is_initialized():
        dist.destroy_process_group()


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
        result = train(config)
    if result.interrupted is not None:
        sys.exit(128 + result.interrupted)


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


def train(config: DictConfig) -> Result:
    """Runs the configuration to its end, or to a signal. A collective call; rank 0 alone prints and writes reports.

    Raises:
        AutoshardError: something in the configuration cannot work.
    """
    plan = schema.plan_of(config)
    place = runtime.start(plan)
    first = place.rank == 0
    splits: Splits = instantiate(config.data)
    loader = Loader(
        splits.train,
        global_batch=config.global_batch,
        rank=place.data_coordinate,
        ranks=place.data_ranks,
        accumulate=plan.accumulate,
        seed=plan.seed,
        device=place.device,
    )
    resume = None if config.resume is None else find_checkpoint(Path(config.resume))
    folder = _make_folder(config, first, resume)
    say = functools.partial(print, flush=True) if first else _silent
    say(f"autoshard {autoshard.__version__}: {_what(config, place)}; results go to {folder}")

    step = autoshard.parallelize(
        functools.partial(instantiate, config.model),
        plan,
        loss=None if config.loss is None else get_object(config.loss),
        optimizer=instantiate(config.optimizer, _partial_=True, _convert_="all"),
        schedule=None if config.schedule is None else instantiate(config.schedule),
    )
    evaluate = functools.partial(_evaluate, step, place, config.global_batch)
    started = time.monotonic()
    with Stop(place.device) as stop:
        if resume is None:
            state, done = step.init(loader.example()), 0
        else:
            position = json.loads((resume / "position.json").read_text())
            loader.load_state_dict(position["data"])
            state, done = step.load(resume / "state", loader.example()), position["step"]
            say(f"resumed from {resume} after step {done}")
        start_up = time.monotonic() - started

        log = MetricsLog(folder / "metrics.csv" if first else None)
        saved: Path | None = resume
        seconds: list[float] = []
        batches = loader.stream()
        stop.arm()
        with Progress(visible=first, steps=config.steps, done=done) as progress:
            read_at, read_step = time.monotonic(), done
            while done < config.steps and not stop.agreed():
                before = time.monotonic()
                state, metrics = step(state, next(batches))
                done += 1
                log.add(done, metrics)
                progress.step(done)
                seen = done == config.steps
                if config.evaluate_every and done % config.evaluate_every == 0 and not seen:
                    loss = evaluate(state, _some(splits.heldout, config.evaluate_samples))
                    log.add_heldout(loss)
                    progress.say(f"step {done}/{config.steps}  held-out loss {loss:.4f}")
                if seen or done % config.log_every == 0:
                    row = log.flush()
                    now = time.monotonic()
                    unit = "tokens" if "tokens" in row else "samples"
                    progress.show(done, row["loss"], row[unit] * (done - read_step) / (now - read_at), unit)
                    read_at, read_step = now, done
                seconds.append(time.monotonic() - before)
                if config.save_every and done % config.save_every == 0 and not seen:
                    saved = _save(step, state, folder, done, loader, config, log)
        loader.close()
        log.flush()
        if saved is None or done != _step_of(saved) or saved.parent.parent != folder:
            saved = _save(step, state, folder, done, loader, config, log)
        stop.disarm()
    if stop.decided is not None:
        say(f"stopped by {stop.decided.name} after step {done}; saved to {saved}\ngo on with: {_go_on(place, folder)}")
        return Result(folder, saved, done, stop.decided)

    heldout = evaluate(state, splits.heldout)
    text = _sample(config, splits, step, state, place.device)
    if first:
        _report(config, place, step, splits, folder, saved, heldout, start_up, seconds, text)
    dist.barrier()
    return Result(folder, saved, done, None)


class Stop:
    """Ctrl-C and SIGTERM, made into a step after which all ranks stop together.

    Before `arm` a signal interrupts at once: there is nothing to save. Then the first one asks to stop, a second
    one interrupts. One rank that is asked is enough: each step starts an all-reduce of one number on the side,
    whose result is read at the next, so that nobody waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.decided: signal.Signals | None = None  # by all ranks
        self._asked = 0
        self._armed = False
        self._before: dict[signal.Signals, Any] = {}
        self._vote = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        # NCCL would make the host wait for the device: this is a number in host memory.
        self._group = dist.new_group(backend="gloo") if device.type == "cuda" else None

    def __enter__(self) -> Self:
        for name in (signal.SIGINT, signal.SIGTERM):
            self._before[name] = signal.signal(name, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)
        if error is None and self._work is not None:
            self._work.wait()

    def arm(self) -> None:
        """From here on a signal waits for the end of the step."""
        self._armed = True

    def disarm(self) -> None:
        """From here on a signal interrupts: all is saved."""
        self._armed = False

    def agreed(self) -> bool:
        """Whether all ranks stop here. A collective call, once per step; it tells what was asked a step earlier."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if int(self._vote):
                self.decided = signal.Signals(int(self._vote))
                return True
        self._vote.fill_(self._asked)
        self._work = dist.all_reduce(self._vote, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._armed or self._asked:
            raise KeyboardInterrupt
        self._asked = number


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


def _resumed_config(given: DictConfig, overrides: list[str]) -> DictConfig:
    """The checkpoint's configuration, with what the command line says besides."""
    saved_file = find_checkpoint(Path(given.resume)) / "config.yaml"
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


def _save(step: Any, state: Any, folder: Path, done: int, loader: Loader, config: DictConfig, log: MetricsLog) -> Path:
    """Checkpoint `folder`/checkpoints/step_N: state, data position, configuration and metrics so far, or nothing."""
    log.flush()
    parent = folder / _CHECKPOINTS
    final, partial = parent / f"step_{done:08}", parent / f".writing_{done:08}"
    step.save(state, partial / "state")
    if dist.get_rank() == 0:
        (partial / "position.json").write_text(json.dumps({"step": done, "data": loader.state_dict()}))
        OmegaConf.save(config, partial / "config.yaml")  # unresolved: what follows from steps still follows it
        if (folder / "metrics.csv").exists():
            shutil.copyfile(folder / "metrics.csv", partial / "metrics.csv")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        for old in sorted(parent.glob("step_*"))[: -config.keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _step_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "position.json").read_text())["step"])


def _evaluate(step: Any, place: runtime.Runtime, global_batch: int, state: Any, dataset: Any) -> float:
    """The mean loss over `dataset`, each sample once, weighed as the loss itself weighs."""
    loader = evaluation_loader(
        dataset,
        global_batch=global_batch,
        rank=place.data_coordinate,
        ranks=place.data_ranks,
        device=place.device,
    )
    total = weight = 0.0
    for batch in loader:
        metrics = step.evaluate(state, batch)
        here = float(metrics.get("tokens", metrics["samples"]))
        total += float(metrics["loss"]) * here
        weight += here
    return total / weight


def _some(dataset: Any, count: int) -> Any:
    """At most `count` samples, spread evenly."""
    length = len(dataset)
    return dataset if length <= count else Subset(dataset, [i * length // count for i in range(count)])


def _sample(config: DictConfig, splits: Splits, step: Any, state: Any, device: torch.device) -> str | None:
    if not isinstance(splits.train, ByteText) or config.sample_bytes == 0:
        return None
    text = generate(
        lambda window: step.forward(state, window.to(device)),
        config.sample_prompt.encode(),
        length=config.sample_bytes,
        context=splits.train.sequence,
        temperature=config.temperature,
        seed=config.plan.seed,
    )
    return text.decode("utf-8", errors="replace")


def _report(
    config: DictConfig,
    place: runtime.Runtime,
    step: Any,
    splits: Splits,
    folder: Path,
    checkpoint: Path,
    heldout: float,
    start_up: float,
    seconds: list[float],
    text: str | None,
) -> None:
    """Writes loss.png, sample.txt and the summary, and prints the latter."""
    baseline = None if splits.baseline is None else (splits.baseline[0], splits.baseline[1]())
    rows = read_metrics(folder / "metrics.csv")
    rows[-1]["heldout_loss"] = heldout
    missing = plot_losses(rows, folder / "loss.png", baseline=baseline)
    if text is not None:
        (folder / "sample.txt").write_text(text, encoding="utf-8")
    files = ["config.yaml", "metrics.csv", "summary.json"]
    files += ["loss.png"] * (missing is None) + ["sample.txt"] * (text is not None)
    last = rows[-1]
    summary = summarise(
        title=f"{_what(config, place)}: {int(last['step'])} steps",
        steps=int(last["step"]),
        start_up=start_up,
        seconds=seconds,
        items=(last["tokens"], "tokens") if "tokens" in last else (float(config.global_batch), "samples"),
        peak=_peak_bytes(place.device),
        at_rest=_bytes_at_rest(step.cost()),
        communication=_bytes_sent(step.cost()),
        heldout=heldout,
        baseline=baseline,
        results=[str(folder), ", ".join(files), f"checkpoint in {checkpoint.relative_to(folder)}"],
        resume=_go_on(place, folder),
    )
    summary.write(folder)
    print(f"\n{summary}", flush=True)
    if missing is not None:
        print(missing, flush=True)


def _what(config: DictConfig, place: runtime.Runtime) -> str:
    ranks = f"{place.data_ranks} rank{'s' if place.data_ranks > 1 else ''}"
    backend = dist.get_backend()
    model = str(config.model._target_).rpartition(".")[2]
    return f"{model}, ZeRO-{config.plan.zero} on {ranks} ({place.device.type}, {backend}), {config.plan.backend}"


def _go_on(place: runtime.Runtime, folder: Path) -> str:
    world = dist.get_world_size()
    launcher = "python" if world == 1 else f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', world)}"
    return f"{launcher} -m autoshard.train resume={folder}"


def _bytes_at_rest(cost: Any) -> dict[str, int]:
    raise NotImplementedError


def _bytes_sent(cost: Any) -> dict[str, int]:
    raise NotImplementedError


def _peak_bytes(device: torch.device) -> int:
    """Of this rank: allocated on the GPU, or resident in host memory, the interpreter included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
        _give_up("interrupted; nothing was saved after the last checkpoint", rank, code=128 + signal.SIGINT)


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
            return schema.unknown(str(link.key), map(str, link.parent_node), prefix)
        link = link.__cause__ or link.__context__
    cause = f": {str(error.__cause__).splitlines()[0]}" if error.__cause__ is not None else ""
    return f"{error}{cause}"


def _give_up(message: str, rank: int, *, same_everywhere: bool = True, code: int = 1) -> NoReturn:
    if rank and same_everywhere:
        time.sleep(20)  # rank 0 says it; an early exit here would make torchrun end rank 0 before it did
    else:
        print(f"error: {message}" if rank == 0 else f"error on rank {rank}: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _silent(*_: object) -> None:
    pass


if __name__ == "__main__":
    main()
