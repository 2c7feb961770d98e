"""One rank of one session, started by harness.Session; not run by hand."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from typing import Any

STARTED = time.monotonic()
_messages = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print goes to the log


def say(**message: Any) -> None:
    _messages.write(json.dumps(message) + "\n")
    _messages.flush()


def main() -> None:
    import engines
    import torch
    import torch.distributed as dist
    from harness import RunConfig, bytes_written, malloc_in_use, process_status, reset_peak_rss, state_bytes
    from model import ModelConfig, build_model, global_batch

    config = RunConfig(**json.loads(sys.argv[1]))
    torch.set_num_threads(config.threads)
    engine = engines.load(config.engine)
    sizes = ModelConfig(**config.model)
    if engine.needs_group and not dist.is_initialized():
        dist.init_process_group("gloo", rank=config.rank, world_size=config.ranks)
    if engine.preload is not None:
        engine.preload()  # imports count as start-up, not as memory
    import_s = time.monotonic() - STARTED
    base_rss, base_malloc = process_status("VmRSS"), malloc_in_use()

    started = time.monotonic()
    built = engine.build(build_model(sizes), config)
    say(import_s=import_s, build_s=time.monotonic() - started)

    def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = global_batch(sizes, step, config.sequences)
        if engine.data is engines.Data.SLICE:
            size = config.sequences // config.ranks
            mine = slice(config.rank * size, (config.rank + 1) * size)
            x, y = x[mine], y[mine]
        return x.contiguous(), y.contiguous()

    done = 0
    for line in sys.stdin:
        message = json.loads(line)
        match message["cmd"]:
            case "run":
                batches = [batch_of(done + i) for i in range(message["k"])]
                done += len(batches)
                if dist.is_initialized():
                    dist.barrier()
                times: list[float] = []
                losses: list[float | None] = []
                cpu: list[float] = []
                sent = bytes_written()
                for batch in batches:
                    wall, process = time.perf_counter(), time.process_time()
                    loss = built.step(batch)
                    losses.append(None if loss is None else float(loss))  # float() waits for the value
                    times.append(time.perf_counter() - wall)
                    cpu.append(time.process_time() - process)  # of all threads, gloo's too
                say(times=times, losses=losses, cpu=cpu, wire=bytes_written() - sent)
            case "reset_peak":
                reset_peak_rss()
                say()
            case "stats":
                gc.collect()
                say(
                    peak_rss=process_status("VmHWM"),
                    base_rss=base_rss,
                    live_bytes=malloc_in_use() - base_malloc,
                    state=state_bytes(built.state()) if built.state is not None else None,
                )
            case "exit":
                break
    os._exit(0)  # some libraries' exit handlers hang when gloo is gone


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        say(error=traceback.format_exc()[-2500:])
        sys.stdin.readline()
        os._exit(1)
