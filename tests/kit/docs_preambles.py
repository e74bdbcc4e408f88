"""What code blocks of the documentation need before them, and readers do not: data, a model, a script that stands for theirs.

A block asks for one by `<!-- code: after NAME -->`. `BEFORE` is put in front of a block of Python; `FILES` are in the folder in
which a block of commands runs.
"""

from __future__ import annotations

from pathlib import Path

_PROGRAMS = Path(__file__).parents[1] / "compat/programs"

_UNIT = """\
import torch, echelon as ech

class Unit(ech.AutoUnit):
    def compute_loss(self, state, data):
        x, y = data
        out = self.module(x)
        return torch.nn.functional.mse_loss(out, y), out

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters(), lr=1e-2), None

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x))

ech.seed(0)
x = torch.randn(256, 4)
data = dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""

_BUILT = _UNIT + "unit, loader = Unit(module=Model()), ech.Loader(data, global_batch=32)\n"
_BUILT += "eval_loader = ech.Loader(data, global_batch=64, shuffle=False)\n"

BEFORE = {
    "unit": _BUILT,
    "classes": _UNIT,
    "dataset": _UNIT + "unit = Unit(module=Model(), accumulate=2)\n",
    "saver": _BUILT + 'saver = ech.DistributedCheckpointSaver("checkpoints", save_every_n_updates=8)\n',
    "checkpoint": f"""{_UNIT}
import safetensors.torch

class Renamed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.backbone(x))

unit, other, loader = Unit(module=Model()), Unit(module=Renamed()), ech.Loader(data, global_batch=32)
best, options = ech.callbacks.BestCheckpointConfig("eval_loss", "min"), ech.callbacks.SaveOptions(restart=True)
folder = "runs/a/checkpoints"
saver = ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1, best_checkpoint_config=best, options=options)
unit.on_eval_step_end = lambda state, data, step, loss, outputs: setattr(unit, "eval_loss", float(loss))
ech.fit(unit, loader, ech.Loader(data, global_batch=256, shuffle=False), max_epochs=1, callbacks=[saver])
(path,) = (str(each) for each in __import__("pathlib").Path("runs/a/checkpoints").glob("step-*"))
safetensors.torch.save_file(unit.module.state_dict(), "model.safetensors")
""",
    "pretrained": """\
import echelon as ech, torch
from transformers import LlamaConfig, LlamaForCausalLM

class Unit(ech.AutoUnit):
    def compute_loss(self, state, data):
        out = self.module(**data)
        return out.loss, out.logits

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters()), None

size = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
unit = Unit(module=LlamaForCausalLM(LlamaConfig(**size)))
""",
    "line": """\
import torch
import echelon as ech

class Line(ech.AutoUnit):
    def compute_loss(self, state, data):
        x, y = data
        out = self.module(x)
        return torch.nn.functional.mse_loss(out, y), out

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)

def points():
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
""",
    "trainer": f"""{_UNIT}
MyUnit, model = Unit, Model()
train_loader = val_loader = test_loader = ech.Loader(data, global_batch=64)
loader = torch.utils.data.DataLoader(x, batch_size=64)
""",
    "proof": f"""{_UNIT}
def make_unit():
    ech.seed(0)
    return Unit(module=Model(), layout="ddp")

def make_data():
    return ech.Loader(data, global_batch=32)
""",
    # A job of this machine instead of one of a cluster, and what the page's script trains.
    "slurm_fn": f"""{_UNIT}
_config = ech.SlurmConfig
ech.SlurmConfig = lambda **options: _config(**{{**options, "mode": "local"}})

class Recorded(Unit):
    def on_train_step_end(self, state, data, step, results):
        self.last_loss = float(results.loss)

def fit(lr):
    unit = Recorded(module=torch.nn.Linear(4, 1), layout="ddp")
    ech.train(unit, ech.Loader(data, global_batch=32), max_epochs=1)
    return unit.last_loss
""",
}

_SCRIPT = (
    _UNIT
    + """\
run = ech.evidence.RunDir.current()
unit, loader = Unit(module=Model(), layout="ddp"), ech.Loader(data, global_batch=32)
saver = ech.DistributedCheckpointSaver(run.checkpoints, save_every_n_updates=4)
saver.restore_from_latest(run.checkpoints, unit, train_dataloader=loader)
ech.train(unit, loader, max_epochs=2, callbacks=[saver])
"""
)

FILES = {
    "script": {"train.py": _SCRIPT},
    "transformers": {"train.py": (_PROGRAMS / "transformers_trainer.py").read_text()},
}
