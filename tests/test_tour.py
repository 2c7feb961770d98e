"""The examples run in one process and show what they say."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(name: str) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_tour_shows_every_pass_and_trains_as_plain_pytorch_does(capsys: pytest.CaptureFixture[str]) -> None:
    _run("tour.py")
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


def test_ragged_sequences_train_and_go_on_from_the_data_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _run("ragged.py")
    out = capsys.readouterr().out
    heldout = [float(x) for x in re.findall(r"^epoch \d: training loss [\d.]+, held-out ([\d.]+)$", out, re.M)]
    assert len(heldout) == 2
    assert heldout[1] < heldout[0] < math.log(8)  # of 8 numbers, better than a guess
    # 1003 samples in batches of 16 are 63 steps an epoch
    assert re.search(r'^saved and loaded at {.*"epoch": 2.*}; step 126$', out, re.M)
    assert (tmp_path / "outputs" / "ragged").is_dir()


def test_a_stock_hugging_face_model_trains_and_exports_under_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _run("hugging_face.py")
    losses = [float(x) for x in re.findall(r"^step \d+  loss ([\d.]+)", capsys.readouterr().out, re.M)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] < 1.2 * math.log(256)
    build = runpy.run_path(str(EXAMPLES / "hugging_face.py"))["build"]
    exported: dict[str, Tensor] = {}
    for file in (tmp_path / "outputs" / "hugging_face").rglob("*.safetensors"):
        exported |= load_file(file)
    assert build().load_state_dict(exported).missing_keys == []
