"""A program for TorchTNT 0.2, with its callbacks. The test changes the name in its import lines, and nothing else."""

import io
import sys

import torch
from torch.distributed import get_rank, get_world_size
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.callbacks import (
    BaseCSVWriter,
    DistributedCheckpointSaver,
    EarlyStopping,
    EmptyCudaCache,
    GarbageCollector,
    IterationTimeLogger,
    Lambda,
    LearningRateMonitor,
    MemorySnapshot,
    ModuleSummary,
    ProgressReporter,
    PyTorchProfiler,
    SlowRankDetector,
    SystemResourcesMonitor,
    TensorBoardParameterMonitor,
    ThroughputLogger,
    TimeLimitInterrupter,
    TimeWaitForBatchLogger,
    TorchCompile,
    TQDMProgressBar,
    TrainProgressMonitor,
)
from torchtnt.framework.fit import fit
from torchtnt.framework.predict import predict
from torchtnt.utils.early_stop_checker import EarlyStopChecker
from torchtnt.utils.loggers import CSVLogger, InMemoryLogger, JSONLogger, StdoutLogger, TensorBoardLogger

folder = sys.argv[1]


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


class Fit(AutoUnit):
    def __init__(self, **options):
        super().__init__(**options)
        self.latest = 0.0

    def compute_loss(self, state, data):
        x, y = data
        out = self.module(x)
        loss = torch.nn.functional.mse_loss(out, y)
        self.latest = float(loss.detach())
        return loss, out

    def configure_optimizers_and_lr_scheduler(self, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Rows(BaseCSVWriter):
    def get_step_output_rows(self, state, unit, step_output):
        return [[str(float(value))] for value in step_output]


class Snapshots:
    steps = 0

    def start(self): ...

    def stop(self): ...

    def step(self):
        self.steps += 1


unit = Fit(module=module(), strategy="ddp")
rank, world = get_rank(), get_world_size()
generator = torch.Generator().manual_seed(1)
data = [(torch.randn(8, 4, generator=generator).double(), torch.randn(8, 1, generator=generator).double()) for _ in range(5)]
share = [(x[rank::world], y[rank::world]) for x, y in data]

memory, snapshots, bar, told = InMemoryLogger(), Snapshots(), io.StringIO(), []
board = TensorBoardLogger(f"{folder}/board")
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
callbacks = [
    EarlyStopping("latest", EarlyStopChecker("min", patience=1000), interval="step"),
    EmptyCudaCache(2),
    GarbageCollector(2),
    IterationTimeLogger(memory, moving_avg_window=2),
    Lambda(on_train_epoch_end=lambda state, unit: told.append(unit.train_progress.num_epochs_completed)),
    LearningRateMonitor([CSVLogger(f"{folder}/rates.csv"), JSONLogger(f"{folder}/rates.json")], logging_interval="step"),
    MemorySnapshot(memory_snapshot_profiler=snapshots),
    ModuleSummary(max_depth=2),
    ProgressReporter(),
    PyTorchProfiler(profiler),
    SlowRankDetector(check_every_n_steps=2, logger=memory),
    SystemResourcesMonitor(memory),
    TensorBoardParameterMonitor(board),
    ThroughputLogger(memory, {"rows": 8}),
    TimeLimitInterrupter(duration="00:01:00"),
    TimeWaitForBatchLogger(memory),
    TorchCompile(3),
    TQDMProgressBar(file=bar),
    TrainProgressMonitor(StdoutLogger()),
    DistributedCheckpointSaver(f"{folder}/checkpoints", save_every_n_train_steps=5, keep_last_n_checkpoints=1),
]
fit(unit, share, share[:2], max_epochs=3, evaluate_every_n_epochs=1, callbacks=callbacks)
print()

again = Fit(module=module(), strategy="ddp")
assert DistributedCheckpointSaver.restore_from_latest(f"{folder}/checkpoints", again)
assert again.train_progress.num_steps_completed == 15
assert told == [1, 2, 3]
assert snapshots.steps == 15 + 6
assert bool(bar.getvalue()) == (rank == 0)
if rank == 0:
    names = {name for row in memory.log_buffer.values() for name in row}
    assert {"Train Iteration Time (seconds)", "Eval Iteration Time (seconds)", "Time Wait For Batch (Train)"} <= names
    assert {"Train: rows per second (epoch granularity)", "Difference between fastest/slowest rank (seconds)"} <= names
    assert {"cpu_percent", "worker_rss"} <= names

plain = Fit(module=getattr(again.module, "module", again.module), device=torch.device("cpu"))
predict(plain, [share[0][0]], callbacks=[Rows(["out"], folder)])
if rank == 0:
    parameters = {name.removeprefix("module."): p.detach() for name, p in again.module.named_parameters()}
    torch.save(parameters, f"{folder}/parameters.pt")
torch.distributed.barrier()
