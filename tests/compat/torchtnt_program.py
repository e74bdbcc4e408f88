"""A program for TorchTNT 0.2, with its callbacks. The test changes the name in its import lines, and nothing else."""

import io
import sys

import torch
from torch.distributed import get_rank, get_world_size
from torchtnt.framework.auto_unit import AutoUnit, TrainStepResults
from torchtnt.framework.callback import Callback
from torchtnt.framework.callbacks import (
    DistributedCheckpointSaver,
    EarlyStopping,
    GarbageCollector,
    LearningRateMonitor,
    ModuleSummary,
    PyTorchProfiler,
    TQDMProgressBar,
)
from torchtnt.framework.fit import fit
from torchtnt.framework.predict import predict
from torchtnt.framework.state import State
from torchtnt.utils import init_from_env, seed
from torchtnt.utils.early_stop_checker import EarlyStopChecker
from torchtnt.utils.loggers import CSVLogger, InMemoryLogger, StdoutLogger, TensorBoardLogger

folder = sys.argv[1]


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


class Fit(AutoUnit):
    def __init__(self, **options):
        super().__init__(**options)
        self.latest, self.losses, self.evaluated = 0.0, [], []

    def compute_loss(self, state, data):
        x, y = data
        out = self.module(x)
        loss = torch.nn.functional.mse_loss(out, y)
        self.latest = float(loss.detach())
        return loss, out

    def configure_optimizers_and_lr_scheduler(self, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def on_train_step_end(self, state: State, data, step: int, results: TrainStepResults) -> None:
        self.losses.append(float(results.loss))
        assert self.losses[-1] == self.latest and step == len(self.losses) - 1

    def on_eval_step_end(self, state: State, data, step: int, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        self.evaluated.append(float(torch.nn.functional.mse_loss(outputs, data[1])))
        assert self.evaluated[-1] == float(loss)


class Outputs(Callback):
    def __init__(self):
        self.outputs = []

    def on_predict_step_end(self, state, unit):
        self.outputs.append(state.predict_state.step_output)


class Epochs(Callback):
    def __init__(self, logger):
        self.logger = logger

    def on_train_epoch_end(self, state, unit):
        done = unit.train_progress.num_epochs_completed
        self.logger.log("epochs", done, done)


seed(7)
unit = Fit(module=module(), device=init_from_env(), strategy="ddp", clip_grad_norm=0.2)
rank, world = get_rank(), get_world_size()
generator = torch.Generator().manual_seed(1)
data = [(torch.randn(8, 4, generator=generator).double(), torch.randn(8, 1, generator=generator).double()) for _ in range(5)]
share = [(x[rank::world], y[rank::world]) for x, y in data]

memory, bar, outputs = InMemoryLogger(), io.StringIO(), Outputs()
board = TensorBoardLogger(f"{folder}/board")
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
callbacks = [
    EarlyStopping("latest", EarlyStopChecker("min", patience=1000), interval="step"),
    GarbageCollector(2),
    Epochs(memory),
    Epochs(board),
    Epochs(StdoutLogger()),
    LearningRateMonitor([CSVLogger(f"{folder}/rates.csv")], logging_interval="step"),
    ModuleSummary(max_depth=2),
    PyTorchProfiler(profiler),
    TQDMProgressBar(file=bar),
    DistributedCheckpointSaver(f"{folder}/checkpoints", save_every_n_train_steps=5, keep_last_n_checkpoints=1),
]
fit(unit, share, share[:2], max_epochs=3, evaluate_every_n_epochs=1, callbacks=callbacks)
print()

again = Fit(module=module(), strategy="ddp")
assert DistributedCheckpointSaver.restore_from_latest(f"{folder}/checkpoints", again)
assert again.train_progress.num_steps_completed == 15
assert [row["epochs"] for row in memory.log_buffer.values()] == [1, 2, 3]
assert bool(bar.getvalue()) == (rank == 0) and len(unit.losses) == 15 and len(unit.evaluated) == 6

plain = Fit(module=getattr(again.module, "module", again.module), device=torch.device("cpu"))
predict(plain, [share[0][0]], callbacks=[outputs])
if rank == 0:
    torch.save(outputs.outputs, f"{folder}/predictions.pt")
    parameters = {name.removeprefix("module."): p.detach() for name, p in again.module.named_parameters()}
    torch.save(parameters, f"{folder}/parameters.pt")
torch.distributed.barrier()
