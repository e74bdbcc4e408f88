"""The process that forks ranks: what it hears while it imports, whom it ends, and how many files its owner may have open."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echelon.common.errors import EchelonError
from echelon.launcher.local.processes import runs, signal_if
from echelon.launcher.local.server import ForkServer
from echelon.launcher.local.start import Start
from tests.kit.started import wait_until

Command = Callable[..., subprocess.CompletedProcess[str]]

SLEEPS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ForkServer.start(())
    yield found
    found.close()


def rank_of(server: ForkServer, folder: Path, text: str) -> int:
    (folder / "rank.py").write_text(text)
    start = Start("script", str(folder / "rank.py"), [], dict(os.environ), str(folder), sys.path, log=str(folder / "log"))
    return server.fork(start)


def until(probe: Callable[[], bool]) -> None:
    wait_until(probe, "as it should be")


def test_while_the_server_imports_it_hears_of_ends_and_passes_signals_on(server: ForkServer, tmp_path: Path) -> None:
    """An import lasts seconds: the rank that failed first is known by when the server heard of it."""
    (tmp_path / "slow_one.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    first, second = (rank_of(server, tmp_path, SLEEPS) for _ in range(2))
    server.preload(["slow_one"])
    server.preload(["json"])
    until((tmp_path / "begun").exists)
    os.kill(first, signal.SIGKILL)
    until(lambda: first in server.poll(0.05))
    server.signal(second, signal.SIGKILL)
    until(lambda: second in server.poll(0.05))
    assert server.poll()[first][1] < server.poll()[second][1]
    (tmp_path / "go").touch()
    third = rank_of(server, tmp_path, "import sys\nassert 'slow_one' in sys.modules\n")
    until(lambda: third in server.poll(0.05))
    assert server.poll()[third][0] == 0, (tmp_path / "log").read_text()


def test_a_server_that_imports_for_ever_ends_with_its_owner(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\ntime.sleep(600)\n")
    rank = rank_of(server, tmp_path, SLEEPS)
    server.preload(["endless"])
    until((tmp_path / "begun").exists)
    server.close()
    assert not runs(rank) and not runs(server.pid)


def test_what_a_rank_started_ends_with_it(server: ForkServer, tmp_path: Path) -> None:
    rank = rank_of(
        server,
        tmp_path,
        f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'other')!r}, 'w').write(str(p.pid))\n{SLEEPS}",
    )
    until(lambda: (tmp_path / "other").exists() and bool((tmp_path / "other").read_text()))
    other = int((tmp_path / "other").read_text())
    server.signal(rank, signal.SIGTERM, group=False)
    until(lambda: rank in server.poll(0.05))
    until(lambda: not runs(other))


def test_a_server_that_has_gone_is_killed_no_more(tmp_path: Path) -> None:
    """Its number may be another process's."""
    server = ForkServer.start(())
    server.close()
    stranger = subprocess.Popen([sys.executable, "-S", "-c", SLEEPS])
    try:
        server.pid = stranger.pid
        server.kill()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_rank_that_the_system_gives_no_process_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server died of it, and the message asked for the OOM killer."""
    (tmp_path / "no_processes.py").write_text("import os\ndef fork(): raise BlockingIOError(11, 'Too many')\nos.fork = fork\n")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(ForkServer.start(("no_processes",))) as server:
        with pytest.raises(EchelonError, match=r"could not be started: Too many. See `ulimit -u`"):
            rank_of(server, tmp_path, "")
        assert server.alive()


@contextlib.contextmanager
def many_open_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * count), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_with_thousands_of_open_files_starts_ranks(tmp_path: Path) -> None:
    with many_open_files(1500), contextlib.closing(ForkServer.start(())) as server:
        rank = rank_of(server, tmp_path, "")
        until(lambda: rank in server.poll(0.05))
        assert server.poll()[rank][0] == 0, (tmp_path / "log").read_text()


def test_a_signal_goes_to_the_process_that_is_meant_and_to_no_other() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        looked = list[int]()
        signal_if(process.pid, signal.SIGKILL, lambda pid: looked.append(pid) is not None)
        assert looked == [process.pid] and process.poll() is None
        signal_if(process.pid, signal.SIGTERM, lambda pid: pid == process.pid)
        assert process.wait(60) == -signal.SIGTERM
    signal_if(2**31 - 1, signal.SIGKILL, lambda pid: True)  # there is none


def test_few_frames_lead_from_the_command_line_to_a_program_s_first(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(
        "import os, traceback\n"
        "if os.environ['RANK'] == '0':\n    print(*(frame.filename for frame in traceback.extract_stack()), sep='\\n')\n"
    )
    done = echelon_command("run", "--ranks", "2", "train.py", fresh=True)
    frames = [line for line in done.stdout.splitlines() if line.endswith(".py") and "runpy" not in line]
    assert done.returncode == 0 and frames[-1].endswith("train.py"), done.stderr
    assert len(frames[:-1]) <= 14 and all("echelon" in frame for frame in frames[:-1]), frames


RESUMES = """
import sys
before = set(sys.modules)
import torch
import echelon as ech

class Fit(ech.AutoUnit):
    def compute_loss(self, state, data):
        return self.module(data[0]).mean(), None

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters()), None

ech.init_from_env()
again = ech.RankInfo().restart_count > 0
unit = Fit(module=torch.nn.Linear(2, 1), layout="ddp")
saver = ech.DistributedCheckpointSaver("c", save_every_n_updates=1)
data = ech.Loader(torch.utils.data.TensorDataset(torch.randn(8, 2)), 4)
saver.restore_from_latest("c", unit, train_dataloader=data)
ech.train(unit, data, max_epochs=1 + again, callbacks=[saver])
assert again, "fails the first time"
print(*(name for name in sys.modules if name not in before and name.startswith(("echelon", "torch._dynamo"))))
"""


def test_a_rank_that_is_started_again_finds_imported_what_training_needs(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(RESUMES)
    done = echelon_command("run", "--max-restarts", "1", "train.py", fresh=True)
    assert done.returncode == 0 and "fails the first time" in done.stderr, done.stderr
    assert done.stdout.split() == []
