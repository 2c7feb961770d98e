"""The main job as a user runs it: torchrun, real ranks, files on disk, signals, mistakes on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from autoshard import compat, job, train
from autoshard.conf import schema
from autoshard.placement import Shard
from autoshard.plan import Mesh, Plan, Tensor, Zero
from autoshard.report import Progress, plot_losses, read_metrics
from tests.multirank.runner import run_ranks

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parent.parent
TINY = ["experiment=tiny", "schedule=constant", "log_every=1"]
EXACT = ("loss", "grad_norm", "lr", "tokens", "samples")


def environment(**extra: str) -> dict[str, str]:
    """Without what another torchrun or test set; importing from the checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_"))}
    path = os.pathsep.join([*filter(None, [extra.pop("PYTHONPATH", None)]), str(ROOT)])
    return kept | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": path} | extra


def torchrun(*arguments: str, ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, "-m", "autoshard.train", *arguments]


def finish(command: list[str], folder: Path, *, code: int = 0, **env: str) -> str:
    """What the command printed; it must end with `code`."""
    done = subprocess.run(
        command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def exact_columns(folder: Path, first: int, last: int) -> list[dict[str, float]]:
    rows = [row for row in read_metrics(folder / "metrics.csv") if first <= row["step"] <= last]
    return [{"step": row["step"]} | {name: row[name] for name in EXACT} for row in rows]


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    printed: str


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny preset on two ranks, uninterrupted, with a checkpoint halfway; once for all workers of pytest."""
    own = tmp_path_factory.getbasetemp()
    where = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    said = where / "train.txt"
    with open(where / "train.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            said.write_text(finish(torchrun(*TINY, "save_every=4", "output=whole"), where))
    return Run(where / "whole", said.read_text())


@dataclasses.dataclass(frozen=True)
class Said:
    """How the command ended on one rank."""

    code: int
    printed: str


def command_on_this_rank(folder: str, *arguments: str) -> Said:
    """The command in a process that has imported torch already, where starting it is not what is tested."""
    os.chdir(folder)
    sys.argv = ["autoshard.train", *arguments]
    code, printed = 0, io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            train.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, printed.getvalue())


def on_ranks(ranks: int, folder: Path, *arguments: str) -> Said:
    """What rank 0 says."""
    said: Said = run_ranks(command_on_this_rank, ranks, str(folder), *arguments, timeout=200, fresh=True)[0]
    return said


def test_a_run_leaves_everything_it_promises(run: Run) -> None:
    rows = read_metrics(run.folder / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if "heldout_loss" in row] == [4, 8]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["tokens"] == 8 * 16
    config = (run.folder / "config.yaml").read_text()
    assert "context: 16" in config, "interpolations are resolved"
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run.folder / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["heldout_loss"] == rows[-1]["heldout_loss"]
    assert summary["baseline"]["name"] == "byte bigram"
    assert summary["step_seconds"] > 0
    assert summary["start_up_seconds"] > 0
    assert summary["peak_bytes"] > 1e7
    assert any("gather" in name for name in summary["bytes_per_step"])
    # 2 ranks hold half of the parameters each, and of Adam's two moments
    assert summary["bytes_at_rest"]["optimizer"] == 2 * summary["bytes_at_rest"]["params"]
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["step_00000004", "step_00000008"]


def test_only_rank_0_prints_progress_and_a_one_screen_summary(run: Run) -> None:
    progress = re.findall(r"^step (\d+)/8  loss [\d.]+  [\d,]+ tokens/s  \d+:\d\d left$", run.printed, re.MULTILINE)
    assert progress == [str(step) for step in range(1, 9)]
    summary = (run.folder / "summary.txt").read_text()
    assert summary in run.printed
    assert run.printed.count("held-out loss  ") == 1
    assert len(summary.splitlines()) <= 24
    for word in ("step time", "start-up", "peak memory", "communication", "byte bigram", str(run.folder), "resume="):
        assert word in summary


def test_resuming_goes_on_to_the_bit(run: Run, tmp_path: Path) -> None:
    halfway = run.folder / "checkpoints" / "step_00000004"
    assert on_ranks(2, tmp_path, f"resume={halfway}", "output=resumed").code == 0
    assert exact_columns(tmp_path / "resumed", 1, 8) == exact_columns(run.folder, 1, 8)
    ends = [read_metrics(folder / "metrics.csv")[-1]["heldout_loss"] for folder in (run.folder, tmp_path / "resumed")]
    assert ends[0] == ends[1]
    assert (tmp_path / "resumed" / "sample.txt").read_text() == (run.folder / "sample.txt").read_text()


def test_one_rank_without_the_extras_trains_alike_and_another_plan_resumes_it(run: Run, tmp_path: Path) -> None:
    for missing in ("rich", "matplotlib", "safetensors"):
        (tmp_path / "without" / missing).mkdir(parents=True)
        (tmp_path / "without" / missing / "__init__.py").write_text(f"raise ImportError('no {missing}')")
    alone = [sys.executable, "-m", "autoshard.train", *TINY, "output=alone"]
    printed = finish(alone, tmp_path, PYTHONPATH=str(tmp_path / "without"))
    assert "no loss.png: matplotlib is not installed" in printed
    assert not (tmp_path / "alone" / "loss.png").exists()
    two, one = (exact_columns(folder, 1, 8) for folder in (run.folder, tmp_path / "alone"))
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], rel=1e-4)

    halfway = run.folder / "checkpoints" / "step_00000004"
    changed = ["plan=zero1", "plan.backend=debug", "steps=6"]
    assert on_ranks(1, tmp_path, f"resume={halfway}", *changed, "output=zero1").code == 0
    other = exact_columns(tmp_path / "zero1", 5, 8)
    assert [row["step"] for row in other] == [5, 6]
    assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in two[4:6]], rel=1e-4)
    assert "zero: 1" in (tmp_path / "zero1" / "config.yaml").read_text()

    refused = on_ranks(1, tmp_path, *TINY, "output=alone")
    assert refused.code == 1
    assert "holds the results of another run" in refused.printed


def test_ctrl_c_in_a_terminal_saves_says_where_and_the_run_goes_on_to_the_bit(run: Run, tmp_path: Path) -> None:
    command = torchrun(*TINY, "steps=100000", "evaluate_every=0", "output=stopped")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execve(command[0], command, environment(TERM="xterm", COLUMNS="120"))
    shown = ""

    def read_until(pattern: str | None) -> None:
        """The output until the pattern is in it, or to its end."""
        nonlocal shown
        deadline = time.monotonic() + 150
        while pattern is None or not re.search(pattern, shown):
            assert time.monotonic() < deadline, shown
            if select.select([terminal], [], [], 1.0)[0]:
                try:
                    shown += os.read(terminal, 65536).decode(errors="replace")
                except OSError:  # how Linux tells the end of a pseudo-terminal
                    return

    read_until(r"step [3-9]/100000.*loss [\d.]+")  # rich's bar
    os.write(terminal, b"\x03")
    read_until(None)
    os.close(terminal)
    os.waitpid(process, 0)
    told = re.search(r"stopped by SIG(?:INT|TERM) after step (\d+); saved to (\S+)", shown)
    assert told, shown
    assert shown.count("saved to") == 1
    steps, checkpoint = int(told[1]), Path(told[2])
    assert checkpoint.name == f"step_{steps:08}"
    compared = min(steps, 8)
    assert exact_columns(tmp_path / "stopped", 1, compared) == exact_columns(run.folder, 1, compared)
    position = json.loads((checkpoint / "position.json").read_text())
    assert position["step"] == steps
    per_epoch = position["data"]["length"] // 8 * 8
    assert (position["data"]["epoch"], position["data"]["sample"]) == divmod(steps * 8, per_epoch)
    assert on_ranks(2, tmp_path, f"resume={checkpoint}", f"steps={steps + 2}", "output=on").code == 0
    assert [row["step"] for row in read_metrics(tmp_path / "on" / "metrics.csv")][-2:] == [steps + 1, steps + 2]


def test_two_agents_as_two_nodes_with_caches_of_their_own_train_compiled(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = ["experiment=mlp_images", "steps=4", "evaluate_every=0", "data.heldout_samples=64", "output=nodes"]
    agents = []
    for node in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        rendezvous = [f"--node-rank={node}", "--master-addr=localhost", f"--master-port={port}"]
        env = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / f"cache{node}"))
        agents.append(
            subprocess.Popen(
                [*launcher, *rendezvous, "-m", "autoshard.train", *arguments],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [agent.communicate(timeout=200)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)
    assert [len(re.findall("held-out loss  ", text)) for text in printed] == [1, 0]
    assert all(any((tmp_path / f"cache{node}").rglob("*.so")) for node in range(2))
    assert len(read_metrics(tmp_path / "nodes" / "metrics.csv")) == 4


def test_a_sigterm_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "autoshard.train", *TINY, "model.layers=40", "output=early"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert "results go to" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert "interrupted" in rest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.zeroo=2"], r"plan\.zeroo does not exist; did you mean plan\.zero\?"),
        (["plan.tensor.sequnce=true"], r"plan\.tensor\.sequnce does not exist; did you mean plan\.tensor\.sequence\?"),
        (["+plan.tensor.seq=true"], r"plan\.tensor\.seq does not exist; did you mean plan\.tensor\.sequence\?"),
        (["mesh.data=1", "plan.tensor.sequence=true"], r"tensor\.sequence.*tensor=1"),
        (["+plan.zz=1"], r"plan\.zz does not exist; did you mean plan\.zero\?"),
        (["model.layrs=4"], r"did you mean model\.layers\?"),
        (["+model.layrs=4"], r"did you mean model\.layers\?"),
        (["stepz=4"], r"stepz does not exist; did you mean steps\?"),
        (["+stepz=4"], r"stepz does not exist; did you mean steps\?"),
        (["data.batch_size=8"], r"data\.batch_size does not exist; did you mean global_batch\? valid: data\."),
        (["+data.batch_size=8"], r"data\.batch_size does not exist; did you mean global_batch\?"),
        (["data=synthetic_images", "data.batch_size=8"], r"did you mean data\.size or global_batch\?"),
        (["layers=4"], r"layers does not exist; did you mean model\.layers\?"),
        (["optimizer.learning_rate=1"], r"did you mean optimizer\.lr\?"),
        (["plan=zero9"], r"plan=zero9 does not exist; did you mean plan=zero[0-3]\?"),
        (["experiment=tinny"], r"experiment=tinny does not exist; did you mean experiment=tiny\?"),
        (["plan.zero=many"], r"plan\.zero=many.*'many'"),
        (["plan.zero=4"], r"Zero\.stage is 4; valid: 0, 1, 2 or 3"),
        (["model._target_=autoshard.models.GTP"], r"autoshard\.models\.GTP.*cannot be imported"),
        (["steps=0"], r"steps is 0; valid: an integer >= 1"),
        (["resume=/nowhere"], r"resume=/nowhere has no checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_nothing_would_read_is_refused_with_the_nearest_valid_name(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autoshard.train", *arguments])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as ended:
        train.main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert re.search(rf"^error: .*{message}", printed.err), printed.err
    assert "Traceback" not in printed.err


def test_torchrun_names_a_mistake_or_the_users_error_as_the_root_cause(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def lacking(model, batch):\n    return undefined_name\n")
    for argument, said, by_ranks in (
        ("model.layrs=4", r"model\.layrs does not exist; did you mean model\.layers\?", 1),
        ("loss=losses.lacking", r"Traceback.*NameError: name 'undefined_name'.*autoshard was tracing \S+losses", 0),
    ):
        command = torchrun("experiment=tiny", "output=cause", argument)
        printed = finish(command, tmp_path, code=1, PYTHONPATH=str(tmp_path))
        assert re.search(rf"Root Cause.*traceback : {said}", printed, re.DOTALL), printed
        assert len(re.findall(r"^error", printed, re.MULTILINE)) == by_ranks
    assert not (tmp_path / "outputs").exists()


def test_what_is_compiled_for_the_sample_is_said_to_be_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema.register()
    monkeypatch.setattr(compat, "compile_inductor", lambda module, inputs: lambda args: module(*args))
    job.run(_small("tiny", tmp_path / "run", "plan.backend=inductor"))
    told = re.findall(r"compiling (\w+) \(\d+ nodes\) with Inductor(.*) \.\.\.", capsys.readouterr().err)
    assert told == [("micro", ""), ("epilogue", ""), ("evaluation", ""), ("forward", ", for the sample text")]


def test_an_experiment_cannot_be_changed_by_resuming(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autoshard.train", f"resume={run.folder}", "experiment=gpt_4m"])
    with pytest.raises(SystemExit):
        train.main()
    assert "experiment= cannot be given with resume=" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["autoshard.train", f"resume={run.folder}"])
    with pytest.raises(SystemExit):
        train.main()
    assert re.search(r"nothing is left to train; valid: resume=\S+ steps=N", capsys.readouterr().err)


def test_every_field_of_plan_zero_and_mesh_can_be_configured() -> None:
    def names(kind: Any) -> set[str]:
        return {f.name for f in dataclasses.fields(kind)}

    assert names(schema.PlanConf) == names(Plan) - {"mesh"} | names(Zero) - {"stage"}
    assert names(schema.MeshConf) == names(Mesh)


def test_the_plan_is_what_the_configuration_says() -> None:
    schema.register()
    with initialize_config_module("autoshard.conf", version_base="1.3"):
        config = compose(
            "config",
            ["plan=zero2", "plan.persistence_threshold=9", "mesh.data=4", "plan.accumulate=3", "plan.clip_norm=null"],
        )
        split = compose(
            "config",
            [
                "mesh.tensor=2",
                "plan.tensor.sequence=true",
                "+plan.rules={*.q:column,*.o.weight:1}",
                "plan.check_replicas=10",
            ],
        )
    expected = Plan(zero=Zero(stage=2, persistence_threshold=9), mesh=Mesh(data=4), accumulate=3)
    assert schema.plan_of(config) == expected
    schema.check(split)
    assert schema.plan_of(split) == Plan(
        zero=3,
        mesh=Mesh(tensor=2),
        tensor=Tensor(sequence=True),
        rules={"*.q": "column", "*.o.weight": Shard(1)},
        check_replicas=10,
        clip_norm=1.0,
    )


TEXT = ["data.sequence=8", "data.megabytes=0.1", "data.heldout_samples=4"]
SMALL = {
    "gpt_1m": ["data=random_tokens", "data.samples=16", "data.heldout_samples=4", "model.width=14", "plan=zero0"],
    "gpt_4m": [*TEXT, "model.layers=1", "model.width=16", "schedule=warmup_linear"],
    "hf_gpt2": [*TEXT, "model.config.n_layer=1", "model.config.n_embd=16", "plan=zero1"],
    "llama_1m": [*TEXT, "model.layers=1", "model.width=12", "optimizer=lion", "plan=zero2"],
    "mlp_images": ["data.samples=16", "data.heldout_samples=4"],
    "resnet_images": ["data.samples=16", "data.heldout_samples=4", "data.size=8", "schedule=constant"],
    "tiny": [*TEXT, "model.layers=1"],
}
"""Every preset, and between them every file of conf/, made small."""


def _small(name: str, folder: Path, *more: str) -> DictConfig:
    overrides = ["steps=2", "save_every=1", "evaluate_every=0", "global_batch=4", "log_every=1"]
    overrides.append("sample_bytes=2" if name == "tiny" else "sample_bytes=0")
    with initialize_config_module("autoshard.conf", version_base="1.3"):
        config = compose(
            "config", [f"experiment={name}", *SMALL[name], *overrides, "plan.backend=debug", f"output={folder}", *more]
        )
    schema.check(config)
    return config


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "conf" / "experiment").glob("*.yaml")))
def test_every_preset_trains(name: str, tmp_path: Path) -> None:
    schema.register()
    job.run(_small(name, tmp_path / "run"))
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["loss"] < 20 and row["grad_norm"] > 0 for row in rows)
    assert 0 < rows[-1]["heldout_loss"] < 20
    assert (tmp_path / "run" / "summary.txt").exists()
    if name == "mlp_images":  # a classifier whose extras are metrics; the tests above resume a language model
        halfway = tmp_path / "run" / "checkpoints" / "step_00000001"
        job.run(_small(name, tmp_path / "again", f"resume={halfway}"))
        again = read_metrics(tmp_path / "again" / "metrics.csv")
        timeless = [{k: v for k, v in row.items() if k != "seconds"} for row in (*rows, *again)]
        assert timeless[:2] == timeless[2:]


def test_the_presets_that_are_tried_use_every_file_of_the_configuration() -> None:
    schema.register()
    used: set[str] = set()
    for name in SMALL:
        with initialize_config_module("autoshard.conf", version_base="1.3"):
            choices = compose(
                "config", [f"experiment={name}", *SMALL[name]], return_hydra_config=True
            ).hydra.runtime.choices
        used |= {f"{group}/{choice}" for group, choice in choices.items()}
    every = {f"{file.parent.name}/{file.stem}" for file in (ROOT / "conf").glob("*/*.yaml")}
    assert every - used == {"plan/default"}  # of which the other plans are made


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for visible in (True, False):
        with Progress(visible=visible, steps=10, done=4) as progress:
            progress.step(5)
            progress.show(5, 2.5, 1234.5, "tokens")
    assert re.fullmatch(r"step 5/10  loss 2\.5000  1,234 tokens/s  0:00 left\n", capsys.readouterr().out)


def test_a_loss_that_is_not_finite_still_gives_a_picture(tmp_path: Path) -> None:
    rows = [{"step": 1.0, "loss": 2.0}, {"step": 2.0, "loss": float("nan")}]
    assert plot_losses(rows, tmp_path / "loss.png", baseline=("byte bigram", 2.4)) is None
    assert (tmp_path / "loss.png").stat().st_size > 1000
