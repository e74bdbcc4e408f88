"""Loggers: what is in the files, when it is written, and what is left after a kill."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon as ech
from echelon.common.errors import LoggerError, NotHereError, UsageError
from echelon.compat.torchtnt.utils.loggers import (
    InMemoryLogger,
    StdoutLogger,
    TensorBoardLogger,
)
from echelon.observe.loggers import CSVLogger, MetricLogger, scalar_to_float
from tests.conftest import Ranks, clean_environment
from tests.kit.refusals import refused


def read(path: Path | str) -> list[dict[str, Any]]:
    with open(path, newline="") as file:
        return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]


def column(path: Path | str, name: str) -> list[Any]:
    return [row.get(name) for row in read(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "metrics.csv"


def test_numbers_of_a_step_share_a_row(path: Path) -> None:
    logger = CSVLogger(path)
    logger.log("loss", torch.tensor(0.5), 1)
    logger.log_dict({"rate": np.float32(0.25), "loss": 3}, 2)
    logger.log("rate", 4, 1)
    logger.close()
    assert column(path, "step") == [1, 2]
    assert column(path, "loss") == [0.5, 3] and column(path, "rate") == [4, 0.25]
    assert isinstance(logger, MetricLogger) and logger.path == str(path)


def test_a_flush_appends_and_leaves_what_is_there_in_place(path: Path) -> None:
    """TorchTNT writes the whole file again at each flush."""
    logger = CSVLogger(path, steps_before_flushing=2)
    states = []
    for step in range(7):
        logger.log("loss", step, step)
        if path.exists():
            states.append((path.stat().st_ino, path.read_bytes()))
    logger.close()
    assert {inode for inode, _ in states} == {path.stat().st_ino}
    assert all(path.read_bytes().startswith(there) for _, there in states)
    assert column(path, "loss") == list(range(7))


def test_a_name_that_comes_later_gets_its_column(path: Path) -> None:
    logger = CSVLogger(path, steps_before_flushing=1)
    for step, name in enumerate(["a", "a", "b", "a"]):
        logger.log(name, step + 10, step)
    logger.close()
    assert column(path, "a") == [10, 11, None, 13] and column(path, "b") == [None, None, 12, None]


def test_a_file_that_is_there_is_continued(path: Path) -> None:
    for step in (1, 2):
        logger = CSVLogger(path)
        logger.log("loss", step, step)
        logger.close()
        logger.close()
    assert column(path, "loss") == [1, 2]


def test_another_programs_file_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("name;age\nA;3\n")
    with pytest.raises(UsageError, match="this logger did not write it"):
        CSVLogger(path)
    assert path.read_text() == "name;age\nA;3\n"


_RUN = """
import os, signal, sys
from echelon.observe.loggers import CSVLogger
assert "torch" not in sys.modules
logger = CSVLogger("m.csv", 100)
for step in range(250):
    logger.log("loss", step / 2, step)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "rows"), [("kill", 200), ("return", 250)])
def test_what_a_process_leaves_is_whole(tmp_path: Path, end: str, rows: int) -> None:
    done = subprocess.run([sys.executable, "-c", _RUN, end], cwd=tmp_path, env=clean_environment())
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0)
    assert column(tmp_path / "m.csv", "loss") == [step / 2 for step in range(rows)]


class OnGPU:
    """A number that lives on a device; reading it is noted."""

    is_cuda = True

    def __init__(self, value: float, read: list[float]) -> None:
        self.value, self.read = value, read

    def detach(self) -> OnGPU:
        return self

    def clone(self) -> OnGPU:
        return OnGPU(self.value, self.read)

    def numel(self) -> int:
        return 1

    def item(self) -> float:
        self.read.append(self.value)
        return self.value


def test_a_number_on_a_gpu_is_read_when_rows_are_written(path: Path) -> None:
    logger, was_read = CSVLogger(path, steps_before_flushing=4), []
    number = OnGPU(1.0, was_read)
    for step in range(3):
        logger.log("loss", number, step)
        number.value += 1  # in place, as an optimizer does it
    assert was_read == []
    logger.flush()
    assert was_read == column(path, "loss") == [1, 2, 3]
    logger.close()


@pytest.mark.gpu
def test_logging_does_not_wait_for_the_device(path: Path) -> None:
    logger, number = CSVLogger(path), torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            logger.log("loss", number.add_(1), step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    logger.close()
    assert column(path, "loss") == [1, 2, 3]


def test_several_numbers_are_refused() -> None:
    for several in (torch.zeros(2), np.zeros(2)):
        with refused(LoggerError):
            scalar_to_float(several)
    assert [scalar_to_float(v) for v in (torch.tensor([2]), np.array([3.0]), 4, np.int64(5))] == [2, 3, 4, 5]


def _on_a_rank(folder: str) -> list[str]:
    rank = torch.distributed.get_rank()
    loggers = [CSVLogger(f"{folder}/one.csv"), CSVLogger(f"{folder}/all.csv", log_all_ranks=True)]
    for logger in loggers:
        logger.log("rank", rank, 0)
        logger.close()
    TensorBoardLogger(f"{folder}/board-{rank}").log("rank", rank, 0)
    return [logger.path for logger in loggers]


def test_rank_0_writes_or_each_rank_its_own_file(ranks: Ranks, tmp_path: Path) -> None:
    paths = ranks(2, _on_a_rank, str(tmp_path))
    assert column(tmp_path / "one.csv", "rank") == [0]
    assert [column(own, "rank") for _, own in paths] == [[0], [1]]
    assert os.listdir(tmp_path / "board-0") and not (tmp_path / "board-1").exists()


def test_memory_and_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    logger = InMemoryLogger()
    logger.log("a", 1, 5)
    logger.log_dict({"b": torch.tensor(2.0)}, 5)
    assert {k: v for k, v in logger.log_buffer[5].items() if k != "time"} == {"step": 5, "a": 1.0, "b": 2.0}
    logger.flush()
    assert "'b': 2.0" in capsys.readouterr().out
    logger.close()
    assert logger.log_buffer == {}
    shown = StdoutLogger(precision=2)
    shown.log("a", 0.126, 1)
    shown.log("b", torch.tensor(2), 1)
    shown.log_dict({"a": 3, "b": 4}, 2)
    shown.close()
    assert capsys.readouterr().out == "\n[Step 1] a=0.13 b=2.00\n[Step 2] a=3.00 b=4.00\n\n"


def test_a_rank_without_a_world_is_enough_to_know_who_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = StdoutLogger()
    logger.log("a", 1.0, 1)
    logger.close()
    assert capsys.readouterr().out == ""
    csv = CSVLogger(str(tmp_path / "a.csv"))
    csv.log("a", 1.0, 1)
    csv.close()
    assert not (tmp_path / "a.csv").exists()


def test_tensorboard_gets_numbers_texts_and_histograms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(str(tmp_path))
    logger.log_dict({"loss": torch.tensor(0.5), "rate": 0.25}, 1)
    logger.log("loss", 1.5, 2)
    logger.log_text("note", "hello", 1)
    logger.log_histogram("values", torch.arange(4.0), 1)
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors("loss")] == [(1, 0.5), (2, 1.5)]
    assert events.Tags()["histograms"] == ["values"] and "note/text_summary" in events.Tags()["tensors"]
    assert logger.path == str(tmp_path)
    with pytest.raises(NotHereError, match="tracked_metrics"):
        TensorBoardLogger(str(tmp_path), [object()])  # type: ignore[arg-type]


def test_tensorboards_numbers_on_a_gpu_are_read_in_portions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger, was_read = TensorBoardLogger(tmp_path), []
    number = OnGPU(0.0, was_read)
    for step in range(150):
        logger.log("loss", number, step)
        number.value += 1
        assert len(was_read) in (0, 100)
    logger.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    assert [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("loss")] == [(i, float(i)) for i in range(150)]


def _logs(log: CSVLogger) -> None:
    for step in range(3):
        log.log("loss", 1.0 / (step + 1), step)


def test_a_logger_that_was_sent_to_other_ranks_writes_there_and_once(tmp_path: Path) -> None:
    log = CSVLogger(tmp_path / "a.csv")
    ech.launch(_logs, ranks=2, args=(log,))
    log.close()
    assert (tmp_path / "a.csv").read_text().count("\n") == 4


# Python's own logging, by ranks


def _says(folder: str) -> None:
    import logging

    log = ech.loggers.get_logger("tests.by.rank")
    handler = logging.FileHandler(f"{folder}/{torch.distributed.get_rank()}.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(rank)d %(filename)s %(funcName)s: %(message)s"))
    log.logger.addHandler(handler)
    try:
        log.warning("once: %d", 5)
        log.warning("all: %d", 6, ranks="all")
        log.error("one: %d", 7, ranks=[1])
        log.debug("never", ranks="all")
    finally:
        log.logger.removeHandler(handler)
        handler.close()


def test_each_rank_says_what_it_is_to_say(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _says, str(tmp_path))
    where = "test_loggers.py _says:"
    assert (tmp_path / "0.log").read_text().splitlines() == [f"WARNING 0 {where} once: 5", f"WARNING 0 {where} [rank 0] all: 6"]
    assert (tmp_path / "1.log").read_text().splitlines() == [
        f"WARNING 1 {where} [rank 1] all: 6",
        f"ERROR 1 {where} [rank 1] one: 7",
    ]


def test_a_word_that_is_no_rank_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with refused(LoggerError):
        ech.loggers.get_logger("tests").warning("a", ranks="every")
    with caplog.at_level("ERROR"):
        ech.loggers.get_logger("tests").warning("a", ranks="every")  # a level that is not heard costs nothing
