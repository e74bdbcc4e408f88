"""`echelon move`: import lines of other libraries' scripts, and what is said of the rest."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echelon.cli.compat_names import find, moved
from echelon.cli.imports import move
from echelon.cli.main import main
from echelon.cli.move import execute
from echelon.common.errors import CommandError
from echelon.compat.names import Missing

PUBLISHED = Path(__file__).parents[1] / "compat"

MOVED = {
    # whole modules
    "import lightning as L": "import echelon.compat.lightning as L",
    "import lightning.pytorch as pl": "import echelon.compat.lightning.pytorch as pl",
    "import pytorch_lightning as pl": "import echelon.compat.lightning.pytorch as pl",
    "import pytorch_lightning": "from echelon.compat.lightning import pytorch as pytorch_lightning",
    "import fairscale": "from echelon.compat import fairscale",
    "import fairscale.nn": "import echelon.compat.fairscale.nn\nfrom echelon.compat import fairscale",
    "import torchtnt.framework as tnt": "import echelon.compat.torchtnt.framework as tnt",
    "import os, lightning as L  # both": "import os  # both\nimport echelon.compat.lightning as L  # both",
    # names
    "from lightning import Trainer as T": "from echelon.compat.lightning import Trainer as T",
    "from pytorch_lightning import Trainer": "from echelon.compat.lightning.pytorch import Trainer",
    "from lightning.pytorch import callbacks": "from echelon.compat.lightning.pytorch import callbacks",
    "from lightning.pytorch.callbacks.lr_monitor import LearningRateMonitor": (
        "from echelon.compat.lightning.pytorch.callbacks.lr_monitor import LearningRateMonitor"
    ),
    "from fairscale.optim.oss import OSS": "from echelon.compat.fairscale.optim.oss import OSS",
    "from torchtnt.utils import init_from_env, seed": "from echelon.compat.torchtnt.utils import init_from_env, seed",
    "from nntool.slurm import slurm_fn": "from echelon.compat.nntool.slurm import slurm_fn",
    "from dragon.native.machine import System": "from echelon.compat.dragon.native.machine import System",
    "from torchtnt.framework import *": "from echelon.compat.torchtnt.framework import *",
    "x = 1; from lightning import Trainer": "x = 1; from echelon.compat.lightning import Trainer",
    # transformers' Trainer, and the rest is transformers'
    "from transformers import Trainer": "from echelon.compat.transformers import Trainer",
    "from transformers.training_args import TrainingArguments": "from echelon.compat.transformers import TrainingArguments",
    "from transformers import (\n    AutoModel,  # a model\n    Trainer,\n)": (
        "from transformers import (\n    AutoModel,  # a model\n)\nfrom echelon.compat.transformers import (\n    Trainer,\n)"
    ),
    # comments above a name went to the next that stayed, or were lost
    "from transformers import (  # x\n    # a\n    Trainer, AutoModel,\n    # b\n    TrainingArguments,\n    # c\n    T5,\n)": (
        "from transformers import (  # x\n    AutoModel,\n    # c\n    T5,\n)\n"
        "from echelon.compat.transformers import (  # x\n    # a\n    Trainer,\n    # b\n    TrainingArguments,\n)"
    ),
    "from transformers import AutoModel, Trainer": (
        "from transformers import AutoModel\nfrom echelon.compat.transformers import Trainer"
    ),
    "import transformers\n\nt = transformers.Trainer(model=transformers.AutoModel)": (
        "from echelon.compat import transformers\n\nt = transformers.Trainer(model=transformers.AutoModel)"
    ),
    "import transformers as hf\n\nclass Args(hf.TrainingArguments): ...": (
        "import echelon.compat.transformers as hf\n\nclass Args(hf.TrainingArguments): ..."
    ),
    "import transformers.utils\ntransformers.Trainer()": (
        "import transformers.utils\nfrom echelon.compat import transformers\ntransformers.Trainer()"
    ),
    # where they stand
    "try: import lightning as L\nexcept ImportError: import pytorch_lightning as L": (
        "try: import echelon.compat.lightning as L\nexcept ImportError: import echelon.compat.lightning.pytorch as L"
    ),
    "def f(): import fairscale.nn; return fairscale.nn": (
        "def f(): import echelon.compat.fairscale.nn; from echelon.compat import fairscale; return fairscale.nn"
    ),
    "if x: from transformers import AutoModel, Trainer  # both": (
        "if x: from transformers import AutoModel; from echelon.compat.transformers import Trainer  # both"
    ),
    "def f():\n    import lightning as L\n    return L": "def f():\n    import echelon.compat.lightning as L\n    return L",
    "if TYPE_CHECKING:\n\tfrom lightning import Trainer": "if TYPE_CHECKING:\n\tfrom echelon.compat.lightning import Trainer",
    "try:\n    import lightning as L\nexcept ImportError:\n    import pytorch_lightning as L": (
        "try:\n    import echelon.compat.lightning as L\nexcept ImportError:\n    import echelon.compat.lightning.pytorch as L"
    ),
}
STAY = (
    "from . import lightning",
    "from .fairscale import OSS",
    "import lightning_utilities",
    "from lightning_utilities.core.rank_zero import rank_zero_only",
    "import transformers_stream_generator",
    "import transformers\ntransformers.AutoModel",
    "from transformers import AutoModel, set_seed",
    "from transformers.trainer_utils import get_last_checkpoint",
    'x = "import lightning"  # import lightning',
    "from dragon.data.ddict import DDict",
    "from nntool.experiment import BaseExperimentConfig",
)


@pytest.mark.parametrize("before", MOVED)
def test_import_lines_move(before: str) -> None:
    done = move(before.encode())
    assert (done.text.decode(), done.notes) == (MOVED[before], [])
    again = move(done.text)
    assert again.text == done.text and again.names == 0


@pytest.mark.parametrize("text", STAY)
def test_what_is_not_compats_stays(text: str) -> None:
    done = move(text.encode())
    assert (done.text.decode(), done.names, done.notes) == (text, 0, [])


@pytest.mark.parametrize(
    ("text", "line", "name", "says"),
    [
        ("\nfrom fairscale.nn import Pipe, wrap", 2, "fairscale.nn.Pipe", "strategy 'pp=2'"),
        ("from fairscale.nn.moe import MOELayer", 1, "fairscale.nn.moe.MOELayer", "echelon.nn.MoE"),
        ("import fairscale.nn as fnn\n\nfnn.MOELayer()", 3, "fairscale.nn.MOELayer", "echelon.nn.MoE"),
        ("import fairscale\nfairscale.optim.AdaScale()", 2, "fairscale.optim.AdaScale", "FairScale's file"),
        ("from fairscale.nn.model_parallel import layers", 1, "fairscale.nn.model_parallel.layers", "FairScale's own"),
        ("import lightning as L\nL.pytorch.callbacks.Timer()", 2, "lightning.pytorch.callbacks.Timer", "--stop-after"),
        ("from lightning.pytorch import callbacks as c\nc.Timer()", 2, "lightning.pytorch.callbacks.Timer", "--stop-after"),
        ("from lightning.fabric import Fabric", 1, "lightning.fabric.Fabric", "prepare_module"),
        ("from lightning_fabric import Fabric", 1, "lightning_fabric.Fabric", "prepare_module"),
        ("from torchtnt.utils.nan import register_nan_hooks_on_whole_graph", 1, "torchtnt.utils.nan.register", "detect_anomaly"),
        ("from torchtnt.nothing import x", 1, "torchtnt.nothing.x", "does not know it"),
        ("from pytorch_lightning import Nothing", 1, "pytorch_lightning.Nothing", "does not know it"),
        ('importlib.import_module("lightning.pytorch")', 1, "importlib.import_module", "echelon.compat.lightning.pytorch"),
        ('__import__("transformers.models.bert")', 1, "__import__", "has other names"),
        ("import transformers.trainer as T\nT.Trainer()", 2, "transformers.trainer.Trainer", "import it by its name"),
        ("import transformers\ntransformers.trainer.Trainer()", 2, "transformers.trainer.Trainer", "import it by its name"),
        ("from transformers import *", 1, "transformers.*", "name what the script uses"),
    ],
)
def test_what_is_not_here_is_named_with_its_line_and_what_to_take(text: str, line: int, name: str, says: str) -> None:
    (note,) = move(text.encode()).notes
    assert note.line == line and note.name.startswith(name) and says in note.why


def test_a_name_that_another_library_gets_later_is_not_looked_up() -> None:
    done = move(b"import pytorch_lightning as pl\n\n\ndef read():\n    import polars as pl\n\n    return pl.col('a')\n")
    assert not done.notes and done.names == 1


def test_names_that_are_unknown_stay_beside_those_that_move() -> None:
    done = move(b"from lightning.pytorch.callbacks import Nothing, EarlyStopping\n")
    assert done.text.decode().splitlines() == [
        "from lightning.pytorch.callbacks import Nothing",
        "from echelon.compat.lightning.pytorch.callbacks import EarlyStopping",
    ]


def _published(library: str) -> dict[str, list[str]]:
    """Module -> its names: of Lightning those of its own release, of the others those that compat has or refuses."""
    if library == "lightning":
        return {module: names.split() for module, names in json.loads((PUBLISHED / "lightning_names.json").read_text()).items()}
    package = importlib.import_module(f"echelon.compat.{library}")
    absent = importlib.import_module(f"{package.__name__}.absent")
    found: dict[str, list[str]] = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        here = info.name.removeprefix("echelon.compat.")
        if info.name != absent.__name__ and find(here).is_known:
            found[here] = [*getattr(importlib.import_module(info.name), "__all__", ())]
    for module, lost in absent.NAMES.items():
        found.setdefault(f"{library}.{module}", []).extend(name for names in lost for name in names.split())
    for module, (names, _) in getattr(absent, "MODULES", {}).items():
        found[f"{library}.{module}"] = names.split()
    return found


def _refusal(value: Any) -> str:
    """What a name or a module says that is not here; "" of one that is."""
    if isinstance(value, ModuleType):
        return value.__doc__ or "" if (value.__doc__ or "").startswith("Not part of echelon.compat") else ""
    return repr(value) if isinstance(value, Missing) else ""


@pytest.mark.full
@pytest.mark.parametrize("library", ["fairscale", "lightning", "torchtnt"])
def test_what_is_read_of_compats_files_is_what_an_import_gives(library: str) -> None:
    wrong = []
    published = _published(library)
    for module, names in published.items():
        found: Any = importlib.import_module(moved(module))
        for name in names:
            value, answer = getattr(found, name, None), find(module, name)
            if said := _refusal(value):
                is_right = answer.instead is not None and answer.instead.rstrip(".") in said
            else:
                is_right = answer.instead is None and bool(answer.module) == answer.is_known == (value is not None)
            if not is_right:
                wrong.append(f"{module}.{name}: {value!r}, and {answer}")
    assert wrong == [] and sum(map(len, published.values())) > 20


def test_a_file_keeps_its_mode_encoding_and_line_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        "crlf.py": b"import lightning as L\r\nx = 1\r\n",
        "latin.py": "# coding: latin-1\nimport lightning as L  # Gr\xfc\xdfe\n".encode("latin-1"),
        "marked.py": b"\xef\xbb\xbfimport lightning as L\n",
        "open_end.py": b"x = 1\n\n\nimport lightning as L",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o751)
    files = [str(tmp_path / name) for name in texts]
    assert main(["move", *files]) == 0
    shown = capsys.readouterr().out
    assert shown.count("+import echelon.compat.lightning as L") == 4
    assert {name: (tmp_path / name).read_bytes() for name in texts} == texts
    assert main(["move", "--write", *files]) == 0
    for name, text in texts.items():
        assert (tmp_path / name).read_bytes() == text.replace(b"import lightning", b"import echelon.compat.lightning")
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o751
    assert sorted(os.listdir(tmp_path)) == sorted(texts)


def test_nothing_is_changed_unless_all_files_are_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, link = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "link.py"
    good.write_text("import lightning as L\n")
    bad.write_text("import lightning as L\nprint 'x'\n")
    link.symlink_to(good)
    assert main(["move", "--write", str(good), str(bad)]) == 2
    assert re.search(r"bad\.py:2 must be Python", capsys.readouterr().err)
    assert main(["move", "--write", str(good), str(link)]) == 2
    assert f"got a link to {good}" in capsys.readouterr().err
    assert good.read_text() == "import lightning as L\n" and link.is_symlink()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.py", None, "must be a file, got: No such file or directory"),
        (".", None, "must be a file, got: is not a regular file"),
        ("cells.ipynb", b'{"cells": [{"source": ["import lightning as L"]}]}', "got a notebook"),
        ("mac.py", b"import lightning as L\rx = 1\r", "line ends"),
    ],
)
def test_what_is_no_script_is_refused(tmp_path: Path, name: str, text: bytes | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(CommandError, match=re.escape(says)):
        execute(argparse.Namespace(files=[str(tmp_path / name)], write=True))


def test_what_was_saved_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("import lightning as L\n")

    def shown(*lines: object, **options: object) -> None:
        script.write_text("import lightning as L  # saved in an editor\n")

    monkeypatch.setattr("builtins.print", shown)
    with pytest.raises(CommandError, match="saved meanwhile"):
        execute(argparse.Namespace(files=[str(script)], write=True))
    assert "saved in an editor" in script.read_text()


def test_the_exit_code_says_whether_all_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("from fairscale.nn import Pipe, wrap\n")
    assert main(["move", "--write", str(script)]) == 1
    assert f"{script}:1: E-NOT-HERE fairscale.nn.Pipe: " in capsys.readouterr().err
    assert script.read_text() == "from echelon.compat.fairscale.nn import Pipe, wrap\n"


@pytest.mark.full
def test_it_works_without_torch_and_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from lightning import Trainer\nfrom fairscale.optim import OSS\nimport torchtnt.utils\n")
    program = "import sys; sys.modules['torch'] = None; from echelon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, "move", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "+from echelon.compat.lightning import Trainer" in done.stdout, done.stderr
    without = program.replace("'torch'", "'libcst'")
    done = subprocess.run([sys.executable, "-c", without, "move", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'echelon[move]'" in done.stderr
    done = subprocess.run([sys.executable, "-c", without, "move", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--write" in done.stdout
