"""The tour runs in one process and shows what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest


def test_the_tour_shows_every_pass_and_trains_as_plain_pytorch_does(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "tour.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.findall(r"^2\. pass (\w+):", out, re.M) == [
        "canonicalize", "place", "zero", "lower", "accumulate", "update"
    ]  # fmt: skip
    assert "1. capture" in out
    # 4 weights gathered forward, the last layer's again backward, 4 gradients scattered: and no more
    assert len(re.findall(r"^micro +parameter gather", out, re.M)) == 5
    assert len(re.findall(r"^micro +gradient reduce", out, re.M)) == 4
    losses = re.findall(r"^step +\d+ +loss (\S+) +in plain PyTorch (\S+)", out, re.M)
    assert len(losses) == 5
    assert all(ours == pytest.approx(theirs, abs=1e-10) for ours, theirs in ((float(a), float(b)) for a, b in losses))
    assert float(losses[-1][0]) < float(losses[0][0])
    assert "placements on the axes" in out
