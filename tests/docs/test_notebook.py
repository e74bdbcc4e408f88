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
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with warnings.catch_warnings(action="ignore"):
        from jupyter_client.manager import KernelManager

        # Over files: jupyter chooses ports before the kernel takes them, and another test may do so in between.
        manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(tmp_path_factory.mktemp("kernel") / "socket"))
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=180)

    def run(code: str) -> str:
        said: list[str] = []

        def hear(message: Any) -> None:
            content = message["content"]
            said.append(str(content.get("text", content.get("data", content.get("traceback", "")))))

        client.execute_interactive(code, timeout=180, output_hook=hear)
        return "".join(said)

    try:
        run(CELLS)
        run("ech.launch(len, ranks=1, args=('',), quiet=True)")  # whose server lives as long as the kernel
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.full
def test_functions_of_cells_run_on_ranks_again_and_again(cell: Any) -> None:
    assert "[(0, 12.0), (1, 12.0)]" in cell("ech.launch(meet, ranks=2, args=(2,))")
    cell("K = 5")
    assert "[(0, 10.0), (1, 10.0)]" in cell("ech.launch(meet, ranks=2, args=(1,))")


@pytest.mark.full
def test_a_group_of_a_function_of_a_cell(cell: Any) -> None:
    said = cell("with ech.launching.CollectiveGroup(meet, (1,), nprocs=2) as group:\n    group.join()\n    print(group.values)")
    assert "[(0, " in said and "(1, " in said


UNIT = """
class Cell(ech.AutoUnit):
    def compute_loss(self, state, data):
        out = self.module(data)
        return out.square().mean(), out
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None
class Counts(ech.Callback):
    steps = 0
    def on_train_step_end(self, state, unit):
        self.steps += 1
torch.manual_seed(0)
unit, counts = Cell(module=torch.nn.Linear(2, 1), device=torch.device("cpu")), Counts()
before = unit.module.weight.clone()
ech.Trainer(devices=2, max_epochs=2, callbacks=counts).fit(unit, ech.Loader(torch.ones(8, 2), 4))
print(counts.steps, bool((unit.module.weight != before).all()), ech.RankInfo().world_size)
"""


@pytest.mark.full
def test_a_trainer_of_a_unit_of_a_cell(cell: Any) -> None:
    assert "4 True 1" in cell(UNIT)


@pytest.mark.full
def test_a_fault_in_a_cell_is_shown_with_its_line(cell: Any) -> None:
    said = cell("try:\n    ech.launch(fall, ranks=2)\nexcept ech.EchelonError as error:\n    print(error)")
    assert "a fault in a cell" in said and ", in fall" in said
