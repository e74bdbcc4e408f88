"""The store in which ranks meet: on an address of its own, and every key of one start begins with a token of that start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist, echelon as ech
ech.init_from_env()
dist.all_reduce(torch.ones(1))
info = ech.RankInfo()
stranger = dist.TCPStore(info.master_addr, info.master_port, is_master=False, wait_for_workers=False)
if info.rank == 0:
    said = {"address": info.master_addr, "keys": stranger.list_keys()}
    Path(f"keys{info.restart_count}.json").write_text(json.dumps(said))
dist.barrier()
if info.restart_count == 0:
    sys.exit(3)
"""


def test_every_key_of_a_start_begins_with_its_own_token(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = echelon_command("run", "--ranks", "2", "--max-restarts", "1", "train.py")
    assert said.returncode == 0, said.stderr
    tokens = []
    for attempt in range(2):
        seen = json.loads((tmp_path / f"keys{attempt}.json").read_text())
        assert seen["address"] == "127.0.0.1" and len(seen["keys"]) >= 2
        begins = {tuple(key.split("/")[:2]) for key in seen["keys"]}
        assert len(begins) == 1, seen["keys"]
        token, number = begins.pop()
        assert len(token) == 32 and number == str(attempt)
        tokens.append((token, number))
    assert tokens[0] != tokens[1]
