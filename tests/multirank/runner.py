"""Real gloo ranks for tests: processes forked from one that has imported torch, kept for many tests.

    values = run_ranks(function, 2, *args)     # one value per rank; any failure raises with every rank's traceback
    outcomes = run_outcomes(function, 2, ...)  # what became of each rank, for tests of failure

A world is reused as long as every rank returns; after an error, a death or a hang all its ranks are killed and
the next call gets new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 10.0  # seconds that ranks have to end after the first one failed
_LIFETIME = 40  # calls after which a world is renewed, so that memory does not pile up

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.multirank.preload"])


class End(enum.Enum):
    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Args:
        value: what the function returned.
        kind, message: type names of the exception and its bases (nearest first), and its text.
        details: traceback, exit code or stack, and the last lines that the rank printed.
        seconds: from the call to the end of this rank.
    """

    rank: int
    end: End
    value: Any = None
    kind: tuple[str, ...] = ()
    message: str = ""
    details: str = ""
    seconds: float = 0.0


class RanksFailedError(AssertionError):
    """At least one rank did not return; the text has every rank's story."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        stories = [f"--- rank {o.rank} {o.end.value} after {o.seconds:.1f} s\n{o.details}".rstrip() for o in outcomes]
        super().__init__("\n".join(["not every rank returned:", *stories]))


class World:
    """N rank processes with one gloo process group between them."""

    def __init__(self, ranks: int, environment: tuple[tuple[str, str], ...] = ()) -> None:
        self.ranks = ranks
        self.calls = 0
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="autoshard-ranks-"))
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, ranks, there, str(self._folder), environment), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any] | str, *args: Any, timeout: float) -> list[Outcome]:
        """Call `function(*args)` on every rank and wait for all, at most `timeout` seconds."""
        self.calls += 1
        started = time.monotonic()
        message = pickle.dumps((function, args))
        outcomes: dict[int, Outcome] = {}
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send_bytes(message)
        deadline = started + timeout
        while len(outcomes) < self.ranks:
            waiting: dict[Any, int] = {c: r for r, c in enumerate(self._connections) if r not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for answered in ready:
                rank = waiting[answered]
                outcomes[rank] = self._collect(rank, time.monotonic() - started)
                if outcomes[rank].end is not End.RETURNED:
                    deadline = min(deadline, time.monotonic() + GRACE)
        hung = [rank for rank in range(self.ranks) if rank not in outcomes]
        for rank in hung:
            outcomes[rank] = self._interrogate(rank, time.monotonic() - started)
        result = [outcomes[rank] for rank in range(self.ranks)]
        if any(outcome.end is not End.RETURNED for outcome in result):
            self.close()
        return result

    def _collect(self, rank: int, seconds: float) -> Outcome:
        try:
            ok, value = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            return Outcome(rank, End.DIED, details=f"exit code {code}\n{self._printed(rank)}", seconds=seconds)
        if ok:
            return Outcome(rank, End.RETURNED, value=value, seconds=seconds)
        kind, message, story = value
        return Outcome(rank, End.RAISED, None, kind, message, f"{story}\n{self._printed(rank)}", seconds)

    def _interrogate(self, rank: int, seconds: float) -> Outcome:
        """Ask a rank that did not end where it is."""
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
        return Outcome(rank, End.HUNG, details=self._printed(rank), seconds=seconds)

    def _printed(self, rank: int, lines: int = 60) -> str:
        path = self._folder / f"rank{rank}.log"
        text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
        return "\n".join(["last output:", *text]) if text else ""

    def close(self) -> None:
        """Kill the ranks of this world."""
        if not self.alive:
            return
        self.alive = False
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(10)
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(
    rank: int, ranks: int, connection: Connection, folder: str, environment: tuple[tuple[str, str], ...]
) -> None:
    """The life of a rank: join the group, then answer calls until the other end closes."""
    log = open(os.path.join(folder, f"rank{rank}.log"), "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(environment)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dict(environment).get("TESTS_NO_GROUP"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        log.seek(0)
        log.truncate()
        torch.manual_seed(0)
        try:
            function, args = pickle.loads(message)
            answer = pickle.dumps((True, _resolve(function)(*args)))
        except BaseException as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            answer = pickle.dumps((False, (kinds, str(error), traceback.format_exc())))
        connection.send_bytes(answer)
        del answer
        gc.collect()


def _resolve(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


_worlds: dict[int, World] = {}


def run_outcomes(
    function: Callable[..., Any] | str, ranks: int, *args: Any, timeout: float = 120.0, fresh: bool = False
) -> list[Outcome]:
    """Run `function(*args)` on every one of `ranks` gloo ranks and say what became of each.

    Args:
        function: a module-level function, or "module:name".
        timeout: seconds; ranks that have not ended then are asked for their stacks and killed.
        fresh: use ranks that have run nothing before, and nothing after.
    """
    if fresh:
        world = World(ranks)
        try:
            return world.run(function, *args, timeout=timeout)
        finally:
            world.close()
    found = _worlds.get(ranks)
    if found is None or not found.alive or found.calls >= _LIFETIME:
        if found is not None:
            found.close()
        found = _worlds[ranks] = World(ranks)
    return found.run(function, *args, timeout=timeout)


def run_ranks(
    function: Callable[..., Any] | str, ranks: int, *args: Any, timeout: float = 120.0, fresh: bool = False
) -> list[Any]:
    """As `run_outcomes`, but returns one value per rank.

    Raises:
        RanksFailedError: a rank raised, died or did not end in `timeout` seconds; names every rank's story.
    """
    outcomes = run_outcomes(function, ranks, *args, timeout=timeout, fresh=fresh)
    if any(outcome.end is not End.RETURNED for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.value for outcome in outcomes]


def close_worlds() -> None:
    """Kill every rank that is kept for later."""
    for world in _worlds.values():
        world.close()
    _worlds.clear()


atexit.register(close_worlds)
