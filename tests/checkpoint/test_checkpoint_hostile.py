"""Checkpoints that somebody else has written: their checksums are right, and nothing in them is to be believed.

The only answers are the state that the files hold, or an error of the library that says what is wrong, and the older one.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import echelon as ech
from echelon.checkpoint import commit, location, manifest, store, strict, structure
from echelon.checkpoint.tensors import Tensors, local_files
from echelon.cli.main import main
from echelon.common.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    EchelonError,
)
from tests.kit import forged
from tests.kit.forged import (
    DEEP,
    FILES,
    KINDS,
    NEW,
    OLD,
    OWN,
    TENSOR,
    TENSORS,
    change,
    forge,
    forge_state,
    mutate,
    restored,
    sparse,
    spoil_file,
)
from tests.kit.models import largest_difference, whole
from tests.kit.saving import make_loader, make_unit

Saver = ech.DistributedCheckpointSaver
two, folder, bucket = forged.two, forged.folder, forged.bucket


def _no_pieces(index: Any) -> None:
    index[TENSOR]["pieces"] = []


def _numpys_position(own: Any) -> None:
    own["streams"]["numpy"]["v"][2] = 10**9


FORGED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no pieces": ("index.json", _no_pieces),
    "a negative offset": ("index.json", change(TENSOR, "pieces", 0, 0, 0, to=-1)),
    "half of it": ("index.json", change(TENSOR, "pieces", 0, 1, 0, to=1)),
    "a piece twice": ("index.json", lambda index: index[TENSOR]["pieces"].append(index[TENSOR]["pieces"][0])),
    "another shape": ("index.json", lambda index: index[TENSOR]["shape"].reverse()),
    "a name that leads out": ("index.json", change(TENSOR, "pieces", 0, 2, to="../../x.safetensors")),
    "an absolute name": ("index.json", change(TENSOR, "pieces", 0, 2, to="/etc/passwd")),
    "another file of it": ("index.json", change(TENSOR, "pieces", 0, 2, to="state.safetensors")),
    "a tensor too few": ("index.json", lambda index: index.pop(TENSOR) and None),
    "a tensor too many": ("index.json", lambda index: index.update(more=index[TENSOR])),
    "another type": ("index.json", change(TENSOR, "dtype", to="torch.float64x")),
    "a type of the same size": ("index.json", change(TENSOR, "dtype", to="torch.complex64")),
    "a huge shape": ("index.json", change(TENSOR, "shape", to=[2**62, 2**62])),
    "a list for an index": ("index.json", lambda index: []),
    "overlapping tensors": (TENSORS, lambda head: head[f"{TENSOR}"].update(data_offsets=[0, 8])),
    "a type that is none": (TENSORS, change(TENSOR, "dtype", to="O")),
    "negative bytes": (TENSORS, change(TENSOR, "data_offsets", to=[8, 0])),
    "huge bytes": (TENSORS, change(TENSOR, "data_offsets", to=[0, 2**64])),
    "metadata that is none": (TENSORS, change("__metadata__", to=[1])),
    "no files": ("manifest.json", change("files", to={})),
    "files in a list": ("manifest.json", change("files", to=[])),
    "no state listed": ("manifest.json", lambda facts: facts["files"].pop("state.safetensors") and None),
    "an entry of numbers": ("manifest.json", change("files", "index.json", to=3)),
    "no checksums": ("manifest.json", change("files", "index.json", "crc32", to=[])),
    "a checksum that is none": ("manifest.json", change("files", "index.json", "crc32", 0, to="0x12345z")),
    "a negative size": ("manifest.json", change("files", "index.json", "size", to=-1)),
    "a size of text": ("manifest.json", change("files", "index.json", "size", to="12")),
    "a step of text": ("manifest.json", change("step", to="4")),
    "another step": ("manifest.json", change("step", to=2)),
    "a huge time": ("manifest.json", change("time", to=1e300)),
    "time that is none": ("manifest.json", change("time", to=float("nan"))),
    "a metric of text": ("manifest.json", change("metrics", to={"loss": "low"})),
    "a huge metric": ("manifest.json", change("metrics", to={"loss": 10**400})),
    "deep": ("manifest.json", change("config", "user", to={"a": DEEP})),
    "a config that is none": ("manifest.json", change("config", to=[])),
    "a format that is none": ("manifest.json", change("format", to="2")),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_no_echelon_writes_is_corrupt_whatever_its_checksums_say(folder: Path, what: str) -> None:
    forge(folder / NEW, *FORGED[what])
    with pytest.raises(CheckpointCorruptError, match=NEW):
        commit.verify(folder / NEW)


FROZEN: list[Any] = [[], {"module": []}, {"module": {"first.weight": ["torch.float64", [8, 4]]}}, "all"]
TRAINED: list[Any] = [[], "all", {"built": {}}, {"built": {"module": 1}, "groups": {}, "unfrozen": [], "frozen": {}}]
CONFIGS: dict[str, Callable[[Any], Any]] = {
    "data": change("config", "data", to=[1]),
    "fingerprint": change("config", "data", "fingerprint", to={"length": 48}),
    "optimizers": change("config", "optimizers", to=5),
    "options": change("config", "options", to={"optimizer": [7]}),
    "user": change("config", "user", to="x"),
    "modules": change("config", "modules", to=5),
    "states": change("config", "states", to=[1]),
    "kinds": change("config", "states", "module", to=[1]),
    "position": change("config", "position", to=[1]),
    **{f"frozen {i}": change("frozen", to=to) for i, to in enumerate(FROZEN)},
    **{f"trained {i}": change("trained", to=to) for i, to in enumerate(TRAINED)},
}


def test_what_no_echelon_writes_is_not_exported(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor compared with another: beside `verify`, which looks first, these read as a restore does."""
    for what, (name, act) in FORGED.items():
        where = Path(shutil.copytree(two, tmp_path / what))
        forge(where / NEW, name, act)
        for out in ("out", "out.pt"):
            assert main(["ckpt", "export", str(where / NEW), str(tmp_path / out), "--state", "module"]) == 1, what
        assert main(["ckpt", "diff", str(where / OLD), str(where / NEW)]) == 1, what
        assert f"{what}/{NEW}" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists() and not list((tmp_path / "out").glob("*"))


def test_of_what_the_run_says_of_itself_nothing_is_believed_either(
    two: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for what, act in CONFIGS.items():
        where = Path(shutil.copytree(two, tmp_path / what))
        forge(where / NEW, "manifest.json", act)
        caplog.clear()
        assert restored(where) == 2, what
        assert "passed over" in caplog.text and "went on from" in caplog.text


STATES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "numpys position": (OWN, _numpys_position),
    "no streams": (OWN, lambda own: own.pop("streams") and None),
    "streams of another": (OWN, change("streams", "torch", to="x")),
    "an order of numbers": (OWN, change("reduction_order", to={"module": [1]})),
    "a state that is no dict": ("state.safetensors", change("module", to=[])),
    "a progress of text": ("state.safetensors", change("train_progress", "num_steps_completed", to="U8")),
    "a progress that skips": ("state.safetensors", change("train_progress", "skipped", to=[3])),
    "a loader of text": ("state.safetensors", change("train_dataloader", "position", to=[])),
    "a tensor that is not there": (OWN, change("streams", "torch", "v", to="99")),
    "a tensor of another shape": (OWN, change("streams", "torch", "shape", to=[-1])),
    "an array of objects": (OWN, change("streams", "torch", to={"~": "array", "v": "0", "dtype": "|O", "shape": [632]})),
    "a key that cannot be one": (OWN, change("metrics", to={"~": "dict", "v": [[[1], 2]]})),
    "no value": (OWN, change("metrics", to={"~": "tuple"})),
    "a tag of another": (OWN, change("metrics", to={"~": "object", "v": "os.system"})),
    "bytes that are none": (OWN, change("metrics", to={"~": "bytes", "v": "é"})),
    "a defaultdict of code": (OWN, change("metrics", to={"~": "defaultdict", "v": {}, "factory": "os.getpid"})),
    "a defaultdict of a list": (OWN, change("metrics", to={"~": "defaultdict", "v": [1], "factory": "list"})),
    "a defaultdict of a set": (OWN, change("metrics", to={"~": "defaultdict", "v": {"~": "set", "v": []}, "factory": "list"})),
    "a deque of text": (OWN, change("metrics", to={"~": "deque", "v": "abc", "maxlen": None})),
    "a deque that is too long": (OWN, change("metrics", to={"~": "deque", "v": [1, 2], "maxlen": 1})),
    "deep": (OWN, change("metrics", to={"a": DEEP})),
}


@pytest.mark.parametrize("what", STATES)
def test_a_forged_state_is_passed_over_for_the_older_checkpoint(
    folder: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """numpy alone would read at the position that it is told, and end the process."""
    forge_state(folder / NEW, *STATES[what])
    assert restored(folder) == 2
    assert NEW in caplog.text and "passed over" in caplog.text and "went on from" in caplog.text


# --- a URL


def _forge_there(fs: Any, tmp_path: Path, name: str, act: Callable[[Any], Any]) -> None:
    here = tmp_path / "there" / NEW
    here.mkdir(parents=True)
    for path in fs.ls(f"/hostile/{NEW}", detail=False):
        (here / path.rsplit("/", 1)[1]).write_bytes(fs.cat_file(path))
    forge(here, name, act)
    for each in here.iterdir():
        fs.pipe_file(f"/hostile/{NEW}/{each.name}", each.read_bytes())


def test_a_name_in_the_index_of_a_url_writes_no_file(
    bucket: tuple[str, Any], two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, fs = bucket
    target = tmp_path / "written"
    _forge_there(fs, tmp_path, "index.json", change(TENSOR, "pieces", 0, 2, to=str(target)))
    fs.pipe_file(f"/hostile/{NEW}/{target}", (two / NEW / TENSORS).read_bytes())  # what the name leads to, there
    assert restored(url) == 2
    assert main(["ckpt", "verify", f"{url}/{NEW}"]) == 1 and "CORRUPT" in capsys.readouterr().out
    for out in ("out", "out.pt"):
        assert main(["ckpt", "export", f"{url}/{NEW}", str(tmp_path / out)]) == 1
    assert not target.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_what_was_exchanged_after_it_was_verified_is_not_taken(bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url, fs = bucket
    real = store.read_states

    def exchanged(folder: Any, *args: Any, **options: Any) -> Any:
        if folder.name == NEW:
            fs.pipe_file(f"/hostile/{NEW}/{TENSORS}", fs.cat_file(f"/hostile/{OLD}/{TENSORS}"))
        return real(folder, *args, **options)

    monkeypatch.setattr(store, "read_states", exchanged)
    assert restored(url) == 2


def test_a_url_of_this_machines_files_is_a_folder(tmp_path: Path) -> None:
    assert location.location(f"file://{tmp_path}/c") == tmp_path / "c"


# --- what is no file


@pytest.mark.full
def test_what_is_no_file_is_passed_over_and_hangs_nobody(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the place of each file, and of the checkpoint itself; or a terabyte where some bytes were."""
    for name in [*FILES, ""]:
        for kind, make in {**KINDS, "sparse": sparse}.items():
            if name == "" and kind == "folder":
                continue
            where = Path(shutil.copytree(two, tmp_path / f"{name}-{kind}"))
            victim = where / NEW / name if name else where / NEW
            shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
            make(victim)
            names = commit.candidates(where)
            assert [p.name for p in names] == [NEW, OLD]
            with pytest.raises((CheckpointCorruptError, CheckpointNotFoundError), match=NEW):
                commit.verify(where / NEW)
            assert not manifest.is_whole(where / NEW), (name, kind)
            assert main(["ckpt", "ls", str(where)]) == 0 and main(["ckpt", "verify", str(where)]) == 1
            assert "Traceback" not in "".join(capsys.readouterr())
            shutil.rmtree(where)


def test_a_checkpoint_whose_files_are_links_to_files_is_read(folder: Path, tmp_path: Path) -> None:
    """As caches of downloads have them."""
    shutil.move(folder / NEW, tmp_path / "blobs")
    (folder / NEW).mkdir()
    for each in (tmp_path / "blobs").iterdir():
        (folder / NEW / each.name).symlink_to(each)
    assert restored(folder) == 4


def test_a_step_has_one_name(folder: Path) -> None:
    """No second folder of step 4, and digits of other scripts are none."""
    for name in ("step-000000004", "step-0000000\N{ARABIC-INDIC DIGIT FIVE}", f"step-{'9' * 200}", "step-0000009 "):
        shutil.copytree(folder / NEW, folder / name)
    assert [p.name for p in commit.candidates(folder)] == [NEW, OLD]


# --- any change at all


@pytest.fixture(scope="module")
def scratch(two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(two / NEW, tmp_path_factory.mktemp("scratch") / NEW))


@pytest.mark.full
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(dice=st.randoms(use_true_random=False), name=st.sampled_from(FILES), how=st.sampled_from(["json", "state", "bytes"]))
def test_whatever_is_changed_is_read_as_it_is_or_called_corrupt(
    two: Path, scratch: Path, dice: random.Random, name: str, how: str
) -> None:
    """All that is read of a checkpoint but what becomes of it in a model; what verify lets through can be read."""
    for each in FILES:
        shutil.copyfile(two / NEW / each, scratch / each)
    if how == "bytes":
        spoil_file(scratch, name, dice)
    elif how == "state" and name in ("state.safetensors", OWN):
        forge_state(scratch, name, lambda value: mutate(value, dice))
    else:
        forge(scratch, name, lambda value: mutate(value, dice))
    try:
        facts = commit.verify(scratch)
    except CheckpointCorruptError:
        return
    except CheckpointError as error:
        assert "has format" in str(error)  # "update echelon"
        return
    with local_files(scratch, facts) as files:
        saved = Tensors(files)
        for tensor in saved.index:
            assert list(saved.whole(tensor).shape) == saved.shape(tensor)
        files.state("state.safetensors")
        files.state(OWN)
    time.localtime(facts["time"])


@pytest.mark.full
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(dice=st.randoms(use_true_random=False), name=st.sampled_from(FILES))
def test_a_restore_from_what_was_changed_gives_the_weights_or_the_librarys_own_error(
    two: Path, scratch: Path, dice: random.Random, name: str
) -> None:
    for each in FILES:
        shutil.copyfile(two / NEW / each, scratch / each)
    if name in ("state.safetensors", OWN) and dice.random() < 0.8:
        forge_state(scratch, name, lambda value: mutate(value, dice))
    else:
        forge(scratch, name, lambda value: mutate(value, dice))
    unit = make_unit("none", seed=9)
    random_state = torch.get_rng_state()
    try:
        Saver.restore(scratch, unit, train_dataloader=make_loader())
    except EchelonError:
        return
    finally:
        torch.set_rng_state(random_state)
    same = make_unit("none", seed=9)
    Saver.restore(two / NEW, same)
    assert largest_difference(whole(unit.module), whole(same.module)) == 0


boxes = st.integers(1, 3).flatmap(lambda n: st.lists(st.integers(1, 5), min_size=n, max_size=n))


@given(shape=boxes, dice=st.randoms(use_true_random=False))
def test_pieces_fill_a_tensor_if_and_only_if_each_element_lies_in_one(shape: list[int], dice: random.Random) -> None:
    """Against counting, for pieces that were cut again and again, and perhaps one changed."""
    pieces = [([0] * len(shape), list(shape))]
    for _ in range(dice.randrange(6)):
        offsets, sizes = pieces.pop(dice.randrange(len(pieces)))
        dim = dice.randrange(len(shape))
        first = dice.randint(0, sizes[dim]) if dice.random() < 0.1 else -(-sizes[dim] // 2)
        rest = sizes[dim] - first
        pieces.append((offsets, [*sizes[:dim], first, *sizes[dim + 1 :]]))
        if rest:
            pieces.append(([*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]], [*sizes[:dim], rest, *sizes[dim + 1 :]]))
    if dice.random() < 0.5:
        offsets, sizes = pieces[dice.randrange(len(pieces))]
        dim = dice.randrange(len(shape))
        if dice.random() < 0.5:
            offsets[dim] = dice.randint(0, shape[dim] - sizes[dim])
        else:
            sizes[dim] = dice.randint(0, shape[dim] - offsets[dim])
    count = torch.zeros(shape)
    for offsets, sizes in pieces:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    empty = any(0 in sizes for _, sizes in pieces)
    assert structure._fill(shape, pieces) == (bool((count == 1).all()) and not empty)


def test_a_text_of_more_values_than_are_written_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(strict.Wrong, match="values"):
        strict.loads("[" + "[]," * (strict.JSON_VALUES // 2) + "[]]")


def test_a_name_that_comes_twice_among_many_is_named() -> None:
    names = [f'"{n}": 0' for n in range(1000)]
    with pytest.raises(strict.Wrong, match="'77' comes twice"):
        strict.loads("{" + ", ".join([*names, '"77": 1']) + "}")
