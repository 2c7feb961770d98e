"""Launch, drive and measure engine sessions.

A session is N rank processes of one engine. Ranks wait on stdin until the driver tells them to run k steps, so
several sessions stay alive at once and are timed in turns (A B A B ...): the only comparison to trust on a machine
whose cores are shared. Every message is one line of JSON; what libraries print goes to a log file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOGS = Path(tempfile.gettempdir()) / "autoshard-bench-logs"

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What an engine may read.

    Args:
        engine: its name, or "module:name".
        ranks, rank: filled in per process.
        micro_batch: sequences per rank; the global batch is ranks x micro_batch.
        global_batch: sequences, or 0 for ranks x micro_batch (set to run the reference on one process).
        dtype: "fp32", or "bf16": bf16 compute over fp32 masters, in the engine's own way.
        optimizer: flavour of torch's AdamW: "fused", "foreach" or "forloop".
        microbatches: of the pipeline engines.
        threads: per rank.
        model: overrides of ModelConfig.
        opts: options of the engine.
    """

    engine: str = "ddp"
    ranks: int = 2
    rank: int = 0
    micro_batch: int = 4
    global_batch: int = 0
    dtype: str = "fp32"
    lr: float = 1e-3
    weight_decay: float = 0.01
    optimizer: str = "fused"
    microbatches: int = 4
    threads: int = 1
    model: dict[str, int] = field(default_factory=dict)
    opts: dict[str, Any] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """The global batch."""
        return self.global_batch or self.ranks * self.micro_batch


# -- memory, in bytes


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloc_in_use() -> int:
    """What malloc has handed out, all arenas and mapped blocks: it sees buffers that C++ holds, too."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo2
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def process_status(key: str) -> int:
    """VmRSS, VmHWM, ... of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def bytes_written() -> int:
    """What this process passed to write(): what gloo sends over TCP, plus negligible logging."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def reset_peak_rss() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def state_bytes(named: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Bytes of the distinct storages behind {"params": [...], "grads": [...], "optim": [...]}."""
    import torch
    from torch.distributed.tensor import DTensor

    seen: set[int] = set()
    found: dict[str, int] = {}
    for kind, tensors in named.items():
        found[kind] = 0
        for item in tensors:
            if not isinstance(item, torch.Tensor):
                continue
            local: torch.Tensor = item.to_local() if isinstance(item, DTensor) else item
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[kind] += storage.nbytes()
    return found


# -- the driver's side


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def rank_environment(rank: int, ranks: int, port: int, threads: int = 1) -> dict[str, str]:
    """What one rank of a local gloo world needs in its environment."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }


class SessionError(RuntimeError):
    """A rank of a session failed, died or was silent for too long."""


class Session:
    """N rank processes of one engine.

    Args:
        label: name in tables and logs.
        cache_dir: Inductor's cache; None is a fresh one, so that the start-up measured is a cold one.
        env: more environment.
        timeout: seconds that a message may take.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        label: str | None = None,
        cache_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 900.0,
    ) -> None:
        self.config, self.label, self.timeout = config, label or config.engine, timeout
        self.losses: list[float] = []
        self.wire: list[float] = []  # bytes sent per step, mean over ranks
        self.cpu: list[float] = []  # CPU seconds per step, mean over ranks
        LOGS.mkdir(parents=True, exist_ok=True)
        self._own_cache = Path(tempfile.mkdtemp(prefix="inductor_", dir=LOGS)) if cache_dir is None else None
        cache = str(self._own_cache or cache_dir)
        self._logs = [LOGS / f"{self.label}.{config.dtype}.n{config.ranks}.r{r}.log" for r in range(config.ranks)]
        self._unread = [b""] * config.ranks
        port = free_port()
        self._processes = [
            self._start(rank, port, {"TORCHINDUCTOR_CACHE_DIR": cache, **(env or {})}) for rank in range(config.ranks)
        ]

    def _start(self, rank: int, port: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        given = json.dumps(asdict(replace(self.config, rank=rank)))
        with self._logs[rank].open("w") as log:
            return subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), given],
                env={**rank_environment(rank, self.config.ranks, port, self.config.threads), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=HERE,
            )

    def ready(self) -> Message:
        """Wait until the engine is built (what compiles lazily does so in the first step)."""
        return self._receive()[0]

    def run(self, steps: int) -> list[float]:
        """Run `steps` on all ranks; seconds per step, of the slowest rank."""
        self._send({"cmd": "run", "k": steps})
        found = self._receive()
        for i in range(steps):
            losses = [r["losses"][i] for r in found if r["losses"][i] is not None]
            self.losses.append(sum(losses) / len(losses))
            self.cpu.append(sum(r["cpu"][i] for r in found) / len(found))
            self.wire.append(sum(r["wire"] for r in found) / len(found) / steps)
        return [max(r["times"][i] for r in found) for i in range(steps)]

    def reset_peak(self) -> None:
        self._send({"cmd": "reset_peak"})
        self._receive()

    def stats(self) -> list[Message]:
        """Memory of every rank, in bytes."""
        self._send({"cmd": "stats"})
        return self._receive()

    def close(self) -> None:
        """End the ranks, and the cache if it was ours."""
        self._send({"cmd": "exit"})
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._own_cache is not None:
            shutil.rmtree(self._own_cache, ignore_errors=True)

    def _send(self, message: Message) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write((json.dumps(message) + "\n").encode())
                process.stdin.flush()

    def _receive(self) -> list[Message]:
        """One message of every rank."""
        found: dict[int, Message] = {}
        deadline = time.monotonic() + self.timeout
        while len(found) < len(self._processes):
            waiting = {p.stdout: r for r, p in enumerate(self._processes) if r not in found and p.stdout is not None}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SessionError(f"{self.label}: silent for {self.timeout:.0f} s; {self._tail()}")
            for pipe in ready:
                rank = waiting[pipe]
                chunk = os.read(pipe.fileno(), 1 << 16)
                if not chunk:
                    raise SessionError(f"{self.label}: rank {rank} died; {self._tail()}")
                self._unread[rank] += chunk
                if b"\n" in self._unread[rank]:
                    line, self._unread[rank] = self._unread[rank].split(b"\n", 1)
                    found[rank] = json.loads(line)
                    if "error" in found[rank]:
                        raise SessionError(f"{self.label}: rank {rank}: {found[rank]['error']}")
        return [found[rank] for rank in range(len(self._processes))]

    def _tail(self, characters: int = 1500) -> str:
        return "\n".join(f"[{log.name}] ...{log.read_text(errors='replace')[-characters:]}" for log in self._logs)
