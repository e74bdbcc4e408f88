"""What else may lie in a folder of checkpoints, or be said in it; exports; and weights of others that are not believed either."""

from __future__ import annotations

import functools
import json
import os
import stat
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.checkpoint import commit, header, location, manifest, strict
from echelon.checkpoint.background import _done
from echelon.checkpoint.lease import Lease
from echelon.cli.main import main
from echelon.common.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointInUseError,
    CheckpointMismatchError,
    CheckpointWriteError,
)
from echelon.common.terminal import printable
from tests.kit import forged
from tests.kit.forged import (
    DEEP,
    EVIL,
    NEW,
    OLD,
    TENSOR,
    TENSORS,
    forge,
    loop,
    pipe,
    sparse,
    write,
)
from tests.kit.models import net
from tests.kit.refusals import refused
from tests.kit.saving import Held, held_by_another, make_loader, make_unit, no_locks

Saver = ech.DistributedCheckpointSaver
two, folder, bucket = forged.two, forged.folder, forged.bucket


# --- what lies in the folder


@pytest.mark.full
def test_nothing_in_the_folder_keeps_a_run_from_starting(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (folder / ".staged-step-00000006").symlink_to(elsewhere)
    (folder / ".staged-removed-step-00000001").symlink_to("nowhere")
    (folder / ".staged-x").write_text("a file")
    (folder / "step-00000003").symlink_to(elsewhere)
    (folder / "step-00000001").symlink_to(folder / OLD)
    pipe(folder / ".staged-pipe")
    loop(folder / "step-00000009")
    pipe(folder / "step-00000008")
    unit, loader = make_unit("none", seed=9), make_loader()
    assert Saver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=6, callbacks=[Saver(folder, keep_last_n_checkpoints=1)])
    assert (elsewhere / "precious").read_text() == "x"
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    assert [p.name for p in manifest.committed(folder)] == ["step-00000006"]


def test_what_cannot_be_removed_is_left_where_it_is_and_the_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".staged-step-00000002").mkdir()
    real = location.remove_tree

    def refuse(where: Any) -> None:
        if where.name == ".staged-step-00000002":
            raise PermissionError(13, "Permission denied")
        real(where)

    monkeypatch.setattr(commit, "remove_tree", refuse)
    ech.train(make_unit("none"), make_loader(), max_updates=2, callbacks=[Saver(tmp_path)])
    assert "Permission denied" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == [".staged-step-00000002", OLD]


@pytest.mark.full
def test_a_url_with_something_else_in_the_place_of_a_checkpoint(bucket: tuple[str, Any]) -> None:
    url, fs = bucket
    fs.pipe_file("/hostile/step-00000009", b"a file")
    fs.pipe_file("/hostile/.staged-x", b"a file")
    unit, loader = make_unit("none", seed=9), make_loader()
    assert Saver.restore_from_latest(url, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=6, callbacks=[Saver(url)])
    assert not fs.exists("/hostile/step-00000009") and not fs.exists("/hostile/.staged-x")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "another name of a file", "text"])
def test_whatever_is_in_the_place_of_the_lease_nothing_is_written_where_it_leads(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, path = tmp_path / "precious", tmp_path / "c" / ".lease"
    path.parent.mkdir()
    for locks in (True, False):
        precious.write_text("x")
        if kind == "link":
            path.symlink_to(precious)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "another name of a file":
            path.hardlink_to(precious)
        else:
            path.write_text('{"host": {}, "pid": "\u001b", "seen": 1e999, "since": 1e300, "user": 3}')
        if not locks:
            monkeypatch.setattr("fcntl.fcntl", no_locks)
        lease = Lease(path.parent)
        assert lease.acquire()
        assert stat.S_ISREG(path.lstat().st_mode) and json.loads(path.read_text())["pid"] == os.getpid()
        lease.release()
        assert precious.read_text() == "x" and [p.name for p in path.parent.iterdir()] == []


def test_the_text_of_a_lease_does_nothing_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.fcntl", no_locks)
    monkeypatch.setattr("echelon.checkpoint.lease._PATIENCE_S", 0.0)
    theirs = {"host": EVIL, "boot": "", "pid": 1, "start": "1", "user": EVIL, "since": 0, "seen": time.time()}
    (tmp_path / ".lease").write_text(json.dumps(theirs))
    with refused(CheckpointInUseError) as caught:
        Lease(tmp_path).acquire()
    assert printable(str(caught.value)) == str(caught.value)


def test_a_lease_that_another_holds_under_two_names_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a copy of the folder by hard links makes them."""
    monkeypatch.setattr("echelon.checkpoint.lease._PATIENCE_S", 0.0)
    with held_by_another(tmp_path):
        (tmp_path / "copy").hardlink_to(tmp_path / ".lease")
        with refused(CheckpointInUseError):
            Lease(tmp_path).acquire()


def test_a_full_disk_does_not_take_the_lease_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lease = Lease(tmp_path)
    assert lease.acquire()
    lease.refresh()
    lease.release()
    assert lease.acquire()  # nothing of the first was kept
    lease.release()


def test_a_complete_run_in_a_read_only_folder_ends_well_and_another_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Lease) -> bool:
        raise OSError(30, "Read-only file system", str(self._path))

    monkeypatch.setattr(Lease, "acquire", refuse)
    before = sorted(p.name for p in folder.rglob("*"))
    for steps in (4, 5):
        unit, loader = make_unit("none", seed=9), make_loader()
        Saver.restore_from_latest(folder, unit, train_dataloader=loader)
        if steps == 4:
            ech.train(unit, loader, max_updates=steps, callbacks=[ech.callbacks.RollBack(saver := Saver(folder)), saver])
            continue
        with refused(CheckpointWriteError):
            ech.train(unit, loader, max_updates=steps, callbacks=[Saver(folder)])
    assert sorted(p.name for p in folder.rglob("*")) == before


def test_small_files_replace_links_and_new_ones_never_follow_them(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    for name in ("link", "dangling"):
        with pytest.raises(FileExistsError):
            location.create(tmp_path / name)
        location.replace_file(tmp_path / name, b"new")
        assert (tmp_path / name).read_text() == "new"
    assert precious.read_text() == "x" and sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "link", "precious"]


def test_what_a_rank_says_it_has_written_is_read_strictly(tmp_path: Path) -> None:
    for text in ("[]", '{"../x": {"size": 1, "crc32": ["00000000"]}}', '{"x": 1}', "[" * 2000, '{"x": {}, "x": {}}'):
        (tmp_path / "done").write_text(text)
        with refused(CheckpointCorruptError):
            _done(tmp_path / "done")


# --- what is shown


def test_names_from_files_do_nothing_to_the_terminal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def evil(facts: dict[str, Any]) -> None:
        facts["config"].update(layout=EVIL, user={EVIL: EVIL})
        facts["metrics"] = {EVIL: 1.0}

    def renamed(value: dict[str, Any]) -> None:
        value[f"other{EVIL}.x\n"] = value.pop(TENSOR)

    forge(folder / NEW, "manifest.json", evil)
    unit = make_unit("none", seed=9)
    unit.config = {"mine": 1}
    Saver.restore(folder / NEW, unit, train_dataloader=make_loader())
    forge(folder / NEW, TENSORS, renamed)
    forge(folder / NEW, "index.json", renamed)
    assert main(["ckpt", "ls", str(folder)]) == 0 and main(["ckpt", "verify", str(folder)]) == 0
    assert main(["ckpt", "diff", str(folder / OLD), str(folder / NEW)]) == 1
    assert main(["ckpt", "export", str(folder / NEW), str(tmp_path / "out")]) == 2
    with pytest.raises(CheckpointMismatchError) as caught:
        Saver.restore(folder / NEW, make_unit("none"))
    Saver.restore(folder / NEW, make_unit("none"), restore_options=ech.callbacks.RestoreOptions(strict=False))
    head = json.dumps({f"a{EVIL}": {"dtype": f"F{EVIL}", "shape": [], "data_offsets": [0, 0]}}).encode()
    write(tmp_path / "theirs.safetensors", head, b"")
    assert main(["ckpt", "import", str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours")]) == 1
    shown = "".join(capsys.readouterr()) + caplog.text + str(caught.value)
    assert "other" in shown and printable(shown) == shown
    assert printable("a\tb\n\x1b\x7f\x9b\u202e\r\ud800é") == "a\tb\n??????é"


# --- exports, and weights of others


def test_an_export_follows_no_link_and_stumbles_over_nothing_that_a_killed_one_left(folder: Path, tmp_path: Path) -> None:
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_text("x")
    out.mkdir()
    for name in (".half-model.pt", ".parts-model.pt"):
        (out / name).symlink_to(precious)
    assert main(["ckpt", "export", str(folder), str(out / "model.pt")]) == 0
    torch.load(out / "model.pt", weights_only=True)
    (out / "model.safetensors").symlink_to(tmp_path / "nowhere")
    assert main(["ckpt", "export", str(folder), str(out)]) == 2  # there already, if only as a link
    (out / "linked.pt").symlink_to(tmp_path / "nowhere")
    assert main(["ckpt", "export", str(folder), str(out / "linked.pt")]) == 2
    assert precious.read_text() == "x" and not (tmp_path / "nowhere").exists()
    assert not [p for p in out.iterdir() if p.name.startswith(".export")]


def test_an_export_that_fails_half_way_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from echelon.checkpoint import export, tensorfile

    real, calls = tensorfile.assemble, []

    def full(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(tensorfile, "assemble", full)
    with pytest.raises(OSError, match="No space"):
        export.export_safetensors(folder / NEW, tmp_path / "out", state="module", shard_bytes=1000)
    assert len(calls) > 2 and list((tmp_path / "out").iterdir()) == []


HEADERS: dict[str, bytes] = {
    "overlap": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
    "gap": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
    "twice": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "negative": b'{"a":{"dtype":"F32","shape":[-2,-2],"data_offsets":[0,16]}}',
    "bool": b'{"a":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}',
    "huge": b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}',
    "list": b"[]",
    "deep": b"[" * 100_000,
    "no text": b'{"__metadata__":{"a":1},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "not unicode": b'{"\xff":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
}


def test_a_foreign_header_is_read_as_strictly_as_its_own_library_does(tmp_path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = tmp_path / "model.safetensors"
    for what, head in HEADERS.items():
        write(path, head, bytes(16))
        with refused(CheckpointCorruptError):
            Saver.restore(path, make_unit("none"))
        if what not in ("twice", "deep"):
            with pytest.raises((SafetensorError, ValueError, OverflowError)):
                load_file(path)
    path.unlink()
    sparse(path)  # zeros: a header of no bytes
    with refused(CheckpointCorruptError):
        Saver.restore(path, make_unit("none"))
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 1 << 39))
    with refused(CheckpointCorruptError):
        Saver.restore(path, make_unit("none"))


def test_foreign_indexes_and_torch_files_that_say_too_much_are_refused(tmp_path: Path) -> None:
    (tmp_path / "i").mkdir()
    for text in ('{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 3}}', "[" * 9999, '{"weight_map": []}', "{}"):
        (tmp_path / "i" / "model.safetensors.index.json").write_text(text)
        with refused(CheckpointCorruptError):
            Saver.restore(tmp_path / "i", make_unit("none"))
    tall = torch.zeros(1).expand(1 << 40)
    sparse, meta = torch.eye(2).to_sparse(), torch.empty(2, device="meta")
    for value in ({"a": tall}, {1: torch.zeros(1)}, {"a": sparse}, {"a": meta}, [1], {}):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(CheckpointError):
            Saver.restore(tmp_path / "x.pt", make_unit("none"))


# --- what is saved can be read again


def test_types_are_those_of_this_torch() -> None:
    known = {str(value): value.itemsize for value in vars(torch).values() if isinstance(value, torch.dtype)}
    newer = {"torch.bcomplex32"}  # of torch 2.15; tensors of it are not saved
    assert known.keys() - newer == header.SIZES.keys() | header.OTHERS
    assert {name: known[name] for name in header.SIZES} == header.SIZES


def test_a_state_is_refused_when_it_is_saved_and_not_when_it_is_read(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    for bad in (DEEP, itself, torch.eye(2).to_sparse()):
        unit = make_unit("none")
        unit.held = Held(bad)
        with refused(CheckpointError):
            ech.train(unit, make_loader(), max_updates=1, callbacks=[Saver(tmp_path)])
    unit, nested = make_unit("none"), functools.reduce(lambda inner, _: ({1: inner},), range(36), 0)
    unit.held, unit.config = Held(nested), {"deep": DEEP, "long": "x" * 2_000_000, "kept": 1}
    ech.train(unit, make_loader(), max_updates=1, callbacks=[Saver(tmp_path)])
    unit.held = Held(None)
    assert make_unit("none") and Saver.restore_from_latest(tmp_path, unit) and unit.held.value == nested
    assert manifest.read(tmp_path / "step-00000001")["config"]["user"] == {"kept": 1}


def test_json_is_read_strictly() -> None:
    for text in ('{"a": 1, "a": 2}', "[" * 5000, '{"a": ' * 5000, "1" * 5000, "\ufeff1", "", "nul"):
        with pytest.raises(strict.Wrong):
            strict.loads(text)
    for data in (b"\xff", '"a"'.encode("utf-16"), b'"\xed\xa0\x80"'):
        with pytest.raises(strict.Wrong):
            strict.loads(data)
    with pytest.raises(strict.Wrong, match="deeper than 200"):
        strict.check_depth(DEEP)
    strict.check_depth(functools.reduce(lambda inner, _: {"a": inner}, range(190), 0))


def test_a_fused_optimizer_never_gets_a_state_of_another_shape(tmp_path: Path) -> None:
    """Its kernel would write beyond the memory of it, and end the process."""

    def unit() -> Any:
        made = make_unit("none")
        made.configure_optimizers_and_lr_scheduler = lambda module: (torch.optim.AdamW(module.parameters(), fused=True), None)
        return made

    ech.train(unit(), make_loader(), max_updates=1, callbacks=[Saver(tmp_path)])
    checkpoint = tmp_path / "step-00000001"
    name = f"optimizer.state.{TENSOR.removeprefix('module.')}.exp_avg"
    shape = list(net().state_dict()[TENSOR.removeprefix("module.")].shape)

    def flat(index: dict[str, Any]) -> None:
        count = shape[0] * shape[1]
        index[name].update(shape=[count], pieces=[[[0], [count], TENSORS]])

    forge(checkpoint, TENSORS, lambda head: head[name].update(shape=[shape[0] * shape[1]]))
    forge(checkpoint, "index.json", flat)
    with refused(CheckpointMismatchError):
        Saver.restore(checkpoint, unit())
