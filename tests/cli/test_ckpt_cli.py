"""`echelon ckpt`: what it prints, its exit codes, and weights that go out and come back."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import echelon as ech
from echelon.cli.main import main
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.saving import Marked, make_loader, make_unit
from tests.kit.units import Regression

Saver = ech.DistributedCheckpointSaver


def _save(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    unit = make_unit(layout)
    unit.score = 0.25
    best = ech.callbacks.BestCheckpointConfig("score")
    saver = Saver(folder, save_every_n_updates=2, best_checkpoint_config=best)
    ech.train(unit, make_loader(), max_updates=4, callbacks=[saver])
    return whole(unit.module)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Written by two ranks, each half of every tensor; and the weights of its newest."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "c", Ranks(folder)(2, _save, folder / "c", "fsdp")[0]


def _run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    code = main(["ckpt", *map(str, words)])
    return code, "".join(capsys.readouterr())


@pytest.mark.full
def test_ls_shows_what_there_is_and_what_is_wrong(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(saved[0], folder)
    for path in (folder, tmp_path / "run"):
        code, text = _run(capsys, "ls", path)
        head, first, second = text.splitlines()
        assert code == 0 and head.split() == ["step", "time", "size", "ranks", "layout", "metrics", "whole"]
        assert first.split()[0] == "2" and second.split()[0] == "4"
        assert second.split()[-5:] == ["2", "fsdp", "score", "0.25", "yes"]
    (folder / "step-00000002" / "index.json").unlink()
    (folder / "step-00000004" / "manifest.json").unlink()
    text = _run(capsys, "ls", folder)[1]
    assert "no: a file is missing or cut off" in text and "no: " in text.splitlines()[2] and "manifest.json" in text
    assert _run(capsys, "ls", tmp_path) == (0, f"{tmp_path} holds no checkpoint.\n")
    attempt = tmp_path / "other" / "attempts" / "000"  # of a run that saved there
    attempt.mkdir(parents=True)
    event = {"event": "checkpoint_saved", "path": str(folder / "step-00000004")}
    (attempt / "events.rank0.jsonl").write_text(json.dumps(event) + "\n")
    assert _run(capsys, "ls", tmp_path / "other")[1] == text
    assert _run(capsys, "ls", tmp_path / "absent")[0] == 1


def test_verify_names_the_file_and_says_so_by_its_exit_code(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    shutil.copytree(saved[0], folder)
    code, text = _run(capsys, "verify", folder)
    assert code == 0 and text.count("ok: 6 files") == 2
    victim = folder / "step-00000004" / "rank-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[77] ^= 4
    victim.write_bytes(data)
    code, text = _run(capsys, "verify", folder)
    assert code == 1 and "step-00000002  ok" in text
    assert "step-00000004  CORRUPT" in text and "rank-00001.safetensors is not what was written" in text
    assert _run(capsys, "verify", folder / "step-00000002")[0] == 0
    assert _run(capsys, "verify", tmp_path / "absent")[0] == 1


def test_diff_says_how_far_tensors_are_apart(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved[0] / "step-00000002", saved[0] / "step-00000004"
    assert _run(capsys, "diff", a, a) == (0, "48 of 48 common tensors equal\n")
    code, text = _run(capsys, "diff", a, b)
    assert code == 1 and "module.first.weight  " in text
    one, other = {"x": torch.tensor([1.0, -4.0]), "y": torch.ones(2)}, {"x": torch.tensor([1.0, -3.0]), "z": torch.ones(2)}
    torch.save(one, tmp_path / "one.pt")
    torch.save(other, tmp_path / "other.pt")
    code, text = _run(capsys, "diff", tmp_path / "one.pt", tmp_path / "other.pt")
    assert code == 1 and text.splitlines() == [
        "x  0.25",
        f"y  only in {tmp_path / 'one.pt'}",
        f"z  only in {tmp_path / 'other.pt'}",
        "0 of 1 common tensors equal",
    ]
    torch.save({"x": one["x"] + 1e-6}, tmp_path / "near.pt")
    torch.save({"x": one["x"]}, tmp_path / "x.pt")
    assert _run(capsys, "diff", tmp_path / "near.pt", tmp_path / "x.pt", "--tolerance", "1e-5")[0] == 0
    assert _run(capsys, "diff", tmp_path / "near.pt", tmp_path / "x.pt")[0] == 1


class Watched(Regression):
    """Its error, of evaluations alone, is 2, 1 and 3."""

    told = 0

    def on_eval_end(self, state: ech.State) -> None:
        self.told += 1

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        state.log("error", (2.0, 1.0, 3.0)[min(self.told, 2)])
        return super().compute_loss(state, data)


def test_the_best_checkpoint_is_marked_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit, folder, out = Watched(), tmp_path / "c", tmp_path / "out.pt"
    data = [batch(4, i) for i in range(2)]
    kept = ech.Checkpoints(folder, best=("eval_error", "min"))
    numbers = ech.train(unit, data, max_epochs=3, eval=data, checkpoints=kept)
    assert numbers["eval_error"] == 3.0 and set(numbers) == {"loss", "error", "eval_loss", "eval_error"}
    code, text = _run(capsys, "ls", folder)
    assert code == 0 and [line.split()[0] for line in text.splitlines() if "(best)" in line] == ["4"]
    code, text = _run(capsys, "export", "--best", folder, out)
    assert code == 0 and "step-00000004" in text and out.is_file()
    assert _run(capsys, "diff", folder / "step-00000004", folder / "step-00000004")[0] == 0
    ech.train(Regression(), data, max_epochs=1, checkpoints=tmp_path / "none")
    code, text = _run(capsys, "export", "--best", tmp_path / "none", tmp_path / "other.pt")
    assert code == 1 and "best=NAME" in text and not (tmp_path / "other.pt").exists()


def test_of_the_best_the_weights_that_were_evaluated_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit, folder, data = Watched(ema=0.5), tmp_path / "c", [batch(4, i) for i in range(2)]
    ech.train(unit, data, max_epochs=2, eval=data, checkpoints=ech.Checkpoints(folder, best=("eval_error", "min")))
    code, text = _run(capsys, "export", "--best", folder, tmp_path / "out.pt")
    assert code == 0 and "step-00000004  swa_model, which was evaluated" in text
    with unit.swa_model.applied():  # type: ignore[union-attr]
        assert largest_difference(torch.load(tmp_path / "out.pt", weights_only=True), whole(unit.module)) == 0
    assert _run(capsys, "export", "--best", "--state", "module", folder, tmp_path / "module.pt")[0] == 0
    assert largest_difference(torch.load(tmp_path / "module.pt", weights_only=True), whole(unit.module)) == 0
    code, text = _run(capsys, "export", folder, tmp_path / "newest.pt")
    assert code == 2 and "module, swa_model" in text


def test_before_averages_begin_the_weights_themselves_were_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second epoch's error is the least; the averages begin in the third."""
    averaging = ech.units.SWAParams(5, 1, averaging_method="ema", use_in_evaluation=True)
    unit, folder, data = Watched(ema=averaging), tmp_path / "c", [batch(4, i) for i in range(2)]
    ech.train(unit, data, max_epochs=3, eval=data, checkpoints=ech.Checkpoints(folder, keep=9, best=("eval_error", "min")))
    assert unit.swa_model is not None and unit.swa_model.n_averaged
    code, text = _run(capsys, "export", "--best", folder, tmp_path / "out.pt")
    assert code == 0 and "step-00000004  module, which was evaluated" in text


def test_of_a_folder_the_newest_is_meant_and_never_silently_an_older_one(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(saved[0], folder)
    code, text = _run(capsys, "diff", tmp_path / "run", folder / "step-00000004")
    assert code == 0 and f"{folder / 'step-00000004'}\n" in text and "48 of 48 common tensors equal" in text
    (folder / "step-00000004" / "manifest.json").unlink()
    for words in (("diff", folder, folder), ("diff", folder / "step-00000004", folder), ("export", folder, tmp_path / "out")):
        code, text = _run(capsys, *words)
        assert code == 1 and f"{folder / 'step-00000004'} is incomplete" in text and "Traceback" not in text
    assert f"The one before is {folder / 'step-00000002'}" in text
    assert _run(capsys, "diff", tmp_path / "absent", folder)[0] == 1
    (tmp_path / "empty").mkdir()
    assert _run(capsys, "diff", tmp_path / "empty", folder) == (1, f"echelon: {tmp_path / 'empty'} holds no checkpoint.\n")


def test_exports_are_read_by_others_and_come_back(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file, several with an index, and torch's; by the real libraries, and into a unit again."""
    folder, want = saved
    assert _run(capsys, "export", folder, tmp_path / "one", "--state", "module")[0] == 0
    assert largest_difference(load_file(tmp_path / "one" / "model.safetensors"), want) == 0
    assert _run(capsys, "export", folder, tmp_path / "many", "--shard-size", "1kB")[0] == 0
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    parts = sorted(set(index["weight_map"].values()))
    assert len(parts) > 3 and parts[0] == f"model-00001-of-{len(parts):05d}.safetensors"
    assert largest_difference({k: load_file(tmp_path / "many" / f)[k] for k, f in index["weight_map"].items()}, want) == 0
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
    assert _run(capsys, "export", folder, tmp_path / "model.pt")[0] == 0
    assert largest_difference(torch.load(tmp_path / "model.pt", weights_only=True), want) == 0
    for path in (tmp_path / "one", tmp_path / "one" / "model.safetensors", tmp_path / "many", tmp_path / "model.pt"):
        unit = make_unit("none", seed=8)
        Saver.restore(path, unit)
        assert largest_difference(whole(unit.module), want) == 0
    code, text = _run(capsys, "export", folder, tmp_path / "one")
    assert code == 2 and "exists already" in text
    assert not list(tmp_path.glob(".*"))
    code, text = _run(capsys, "export", folder, tmp_path / "x", "--state", "modul")
    assert code == 2 and "holds no tensors of the state 'modul'" in text
    for command in (("export", folder, "a.safetensors"), ("export", folder, "a.ckpt"), ("import", tmp_path / "model.pt", "a.pt")):
        code, text = _run(capsys, *command[:2], tmp_path / command[2])  # no folder of this name
        assert code == 2 and "OUT must be a folder" in text and not (tmp_path / command[2]).exists()


def test_a_damaged_checkpoint_is_not_exported(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(saved[0], tmp_path / "c")
    victim = tmp_path / "c" / "step-00000004" / "tensors-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-9] ^= 1
    victim.write_bytes(data)
    for out in ("folder", "model.pt"):
        code, text = _run(capsys, "export", tmp_path / "c", tmp_path / out)
        assert code == 1 and "tensors-00001.safetensors is not what was written" in text and "Nothing was exported" in text
    assert not list(tmp_path.rglob("model*"))


def test_a_foreign_pickle_needs_to_be_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = net(3).state_dict()
    torch.save({"state_dict": want, "made by": Marked(tmp_path / "ran")}, tmp_path / "theirs.ckpt")
    code, text = _run(capsys, "import", tmp_path / "theirs.ckpt", tmp_path / "ours")
    assert code == 1 and "--trust-pickle" in text and not (tmp_path / "ran").exists()
    assert _run(capsys, "import", tmp_path / "theirs.ckpt", tmp_path / "ours", "--trust-pickle")[0] == 0
    assert (tmp_path / "ran").exists()
    unit = make_unit("none", seed=8)
    Saver.restore(tmp_path / "ours", unit)
    assert largest_difference(whole(unit.module), dict(want)) == 0
    (tmp_path / "junk.pt").write_bytes(pickle.dumps([1]) + os.urandom(8))
    assert _run(capsys, "import", tmp_path / "junk.pt", tmp_path / "no")[0] == 1


def test_the_command_lists_without_torch(saved: Any, echelon_command: Any) -> None:
    code = """if True:
        import sys
        from echelon.cli.main import main
        for verb in ("ls", "verify"):
            assert main(["ckpt", verb, sys.argv[1]]) == 0
        assert "torch" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code, str(saved[0])], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert echelon_command("ckpt", "verify", str(saved[0])).returncode == 0
