"""`launch` from a notebook: a real kernel, functions that exist in its cells only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="needs a kernel: pip install ipykernel jupyter_client")

CELLS = """
import torch, torch.distributed as dist
import echelon as ech
K = 3
def meet(x):
    ech.init_from_env()
    total = torch.ones(1) * x * K
    dist.all_reduce(total)
    return ech.RankInfo().rank, float(total)
def fall():
    raise KeyError("a fault in a cell")
"""


@pytest.fixture(scope="module")
def cell() -> Iterator[Any]:
    with warnings.catch_warnings(action="ignore"):
        from jupyter_client.manager import start_new_kernel

        manager, client = start_new_kernel(kernel_name="python3")

    def run(code: str) -> str:
        said: list[str] = []

        def hear(message: Any) -> None:
            content = message["content"]
            said.append(str(content.get("text", content.get("data", content.get("traceback", "")))))

        client.execute_interactive(code, timeout=90, output_hook=hear)
        return "".join(said)

    try:
        run(CELLS)
        run("ech.launch(len, ranks=1, args=('',), quiet=True)")  # whose server lives as long as the kernel
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_functions_of_cells_run_on_ranks_again_and_again(cell: Any) -> None:
    assert "[(0, 12.0), (1, 12.0)]" in cell("ech.launch(meet, ranks=2, args=(2,))")
    cell("K = 5")
    assert "[(0, 10.0), (1, 10.0)]" in cell("ech.launch(meet, ranks=2, args=(1,))")


def test_a_fault_in_a_cell_is_shown_with_its_line(cell: Any) -> None:
    said = cell("try:\n    ech.launch(fall, ranks=2)\nexcept ech.EchelonError as error:\n    print(error)")
    assert "a fault in a cell" in said and ", in fall" in said
