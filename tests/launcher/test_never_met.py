"""What `echelon run` says at the end of a program whose ranks trained without each other."""

from __future__ import annotations

import pytest

from tests.kit.started import Started

TRAIN = """
import torch

def main():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), "model.pt")

"""
WORD = "nothing was distributed: the 2 ranks never met"
# The first that fails has the other one ended, which is to come to its own end.
FAIL = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nmain()\nraise ValueError('late')\n"
MEET = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"

PROGRAMS = {
    "alone": (TRAIN + "main()\n", True),
    "fails": (TRAIN + FAIL, True),
    "fails before it meets": ("import echelon as ech\n" + TRAIN + FAIL + "ech.init_from_env()\n", False),
    "rank of a matrix": (TRAIN + "rank = 8\nmain()\n", True),
    "meets": (TRAIN + MEET + "main()\n", False),
    "has met": (TRAIN + MEET + "main()\ndist.destroy_process_group()\n", False),
    "by ech": ("import echelon as ech\n" + TRAIN + "ech.init_from_env()\nmain()\n", False),
    "on purpose": (TRAIN + "import os\ntorch.manual_seed(int(os.environ['RANK']))\nmain()\n", False),
    "starts others": ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)\n", False),
    "by its own module": ("import mine\n" + TRAIN + "main()\n", False),
    "trains nothing": ("import torch\nprint(torch.ones(2).sum())\n", False),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_that_train_without_each_other_are_told_so_and_no_others(started: Started, name: str) -> None:
    text, said = PROGRAMS[name]
    (started.folder / "mine.py").write_text("import os\nSEED = int(os.environ['RANK'])\n")
    launcher = started.run("--ranks", "2", started.script(text))
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == (1 if name.startswith("fails") else 0), err.decode()
    assert (WORD in err.decode()) == said, err.decode()
