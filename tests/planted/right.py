"""Scripts that are right, which prove has to pass: `# %% NAME`, or `# %% NAME: two` of those that two ranks under ddp are enough for."""
# ruff: noqa
# fmt: off

# %% right_augmentation: two
# Samples are changed by random numbers as they are read, which the loader seeds for each.
class Noisy(Rows):
    def __getitem__(self, i: int) -> Batch:
        return self.x[i] + 0.1 * torch.randn(4), self.y[i]
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Noisy(), 16, num_workers=1), max_epochs=3)

# %% right_auto
# Dropout, clipping, a schedule, an epoch whose last batch is short: all as it should be.
class Scheduled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer, _ = super().configure_optimizers_and_lr_scheduler(module)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
unit = Scheduled(module=model(nn.Dropout(0.2)), layout="fsdp", clip_grad_norm=0.5, step_lr_interval="step")
ech.train(unit, loader(42), max_epochs=3)

# %% right_boxes: two
from boxes import *
main()

# %% right_by_hand
# DistributedDataParallel by hand.
ech.train(Own(DistributedDataParallel(model())), loader(), max_epochs=3)

# %% right_calls_of_a_loop: two
# A weight of the loss that grows with the batches, in a variable of the loop's function, and noise from a generator there.
def main() -> None:
    net = model()
    net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
    calls, generator = 0, torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    for x, y in batches:
        with ech.window(net) as window:
            calls += 1
            out = net(x + 0.1 * torch.randn(x.shape, generator=generator))
            loss = nn.functional.mse_loss(out, y) + min(1.0, calls / 10) * out.square().mean()
            window.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
main()

# %% right_copied_teacher: two
# A teacher that is copied from the model as the optimizer is made, and follows it after each step.
import copy
class Taught(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        out, taught = self.module(data[0]), self.teacher(data[0]).detach()
        return nn.functional.mse_loss(out, data[1]) + nn.functional.mse_loss(out, taught), None
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        self.teacher = copy.deepcopy(module).requires_grad_(False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        @torch.no_grad()
        def follow(*_: Any) -> None:
            for slow, fast in zip(self.teacher.parameters(), module.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        optimizer.register_step_post_hook(follow)
        return optimizer, None
ech.train(Taught(module=model(), layout="ddp"), loader(), max_epochs=3)

# %% right_data_objects: two
# Graphs that a collate function lays end to end, in a class of the script's own as torch_geometric's: attributes, and `to`.
class Data:
    def __init__(self, x, owner, y):
        self.x, self.owner, self.y = x, owner, y
    def to(self, device):
        return Data(*(t.to(device) for t in (self.x, self.owner, self.y)))
    def __len__(self):
        return len(self.y)
def lay(samples):
    owner = torch.cat([torch.full((len(x),), i) for i, (x, _) in enumerate(samples)])
    return Data(torch.cat([x for x, _ in samples]), owner, torch.stack([y for _, y in samples]))
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.each, self.out = nn.Linear(6, 16), nn.Linear(16, 1)
    def forward(self, batch):
        h = self.each(batch.x).relu()
        return self.out(torch.zeros(len(batch.y), 16).to(h).index_add(0, batch.owner, h)).squeeze(1)
generator = torch.Generator().manual_seed(0)
graphs = [(x, x.square().mean()) for i in range(256) for x in [torch.randn(4 + i * 5 % 8, 6, generator=generator)]]
ech.seed(1)
model = Pooled()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = ech.Loader(graphs, global_batch=16, collate_fn=lay)
model, opt, loader = ech.prepare(model, opt, loader, layout="ddp")
for _ in ech.epochs(loader, 2):
    for batch in loader:
        with ech.window(model) as window:
            error = model(batch) - batch.y
            window.log("mae", error.abs().mean())
            window.backward(nn.functional.huber_loss(error, torch.zeros_like(error)))
            window.clip_grad_value_(0.5)
            opt.step()
            opt.zero_grad()

# %% right_fsdp1: two
# The older FullyShardedDataParallel by hand.
import functools
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
ech.train(Own(FullyShardedDataParallel(model(), auto_wrap_policy=policy, device_id=device)), loader(), max_epochs=3)

# %% right_generators: two
# Every kind of stream: numpy's and Python's by rank, a generator by rank, and a coin that ranks have to toss alike.
import random
import numpy as np
np.random.seed(dist.get_rank())
random.seed(dist.get_rank())
coin = random.Random(3)
class Drawing(Auto):
    def __init__(self) -> None:
        super().__init__(module=model(nn.Dropout(0.1)), layout="ddp")
        self.masks = [torch.Generator().manual_seed(1 + dist.get_rank())]
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        x = data[0] * (torch.rand(data[0].shape, generator=self.masks[0]) > 0.2)
        x = x * torch.from_numpy(np.random.rand(*x.shape) > 0.2) * random.uniform(0.9, 1.1)
        out = self.module(x) if coin.random() < 0.5 else self.module(x.flip(0)).flip(0)
        return nn.functional.mse_loss(out, data[1]), None
ech.train(Drawing(), loader(42), max_epochs=3)

# %% right_jagged: two
# RIGHT: nested (jagged) tensors in the batch; weight in tokens.
V = 20
generator = torch.Generator().manual_seed(0)
rows = [torch.randint(V, (2 + i * 7 % 10,), generator=generator) for i in range(320)]
def collate(samples):
    return torch.nested.nested_tensor(samples, layout=torch.jagged)
def loss(net, nested):
    return F.cross_entropy(net(nested.values()), (nested.values() * 3 + 1) % V)
ech.seed(0)
net = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, V))
loader, adam = ech.Loader(rows, global_batch=16, collate_fn=collate), torch.optim.Adam(net.parameters(), lr=3e-3)
own_loop(net, loader, loss, optimizer=adam, weigh=lambda nested: len(nested.values()))

# %% right_objects: two
# Batches of a class of the script's own, text in them; a layer that is frozen at first, an unused one, float32 inside.
from typing import NamedTuple
class Sample(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    name: str
class Narrow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())
class Thawing(Auto):
    def compute_loss(self, state: ech.State, data: Sample) -> tuple[torch.Tensor, None]:
        return super().compute_loss(state, (data.x, data.y))
    def on_train_epoch_start(self, state: ech.State) -> None:
        self.prepared.unwrapped.used[1].requires_grad_(self.train_progress.num_epochs_completed > 0)
class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = model(Narrow(8, 8)), nn.Linear(3, 3)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)
rows: list[Batch] = [Rows()[i] for i in range(32)]
samples = [Sample(x, y, f"row {i}") for i, (x, y) in enumerate(rows)]
layout = ech.DDPStrategy(find_unused_parameters=True)
ech.train(Thawing(module=Partly(), layout=layout), ech.Loader(samples, 16), max_epochs=3)

# %% right_optimizers_in_turn
# A GAN in a unit: two optimizers, dropout in the critic, clipping, accumulation, and one that steps every other update.
from torch.nn.functional import softplus
class Gan(ech.AutoUnit[Batch]):
    def compute_losses(self, state: ech.State, data: Batch) -> Iterator[tuple[str, torch.Tensor]]:
        networks: Any = self.module
        critic, made = networks["critic"], networks["generator"](data[0])
        yield "critic", (softplus(-critic(data[1])) + softplus(critic(made.detach()))).mean()
        if self.train_progress.num_updates_completed % 2 == 0:
            yield "generator", softplus(-critic(made)).mean()
    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        networks: Any = module
        critics = torch.optim.Adam(networks["critic"].parameters(), 1e-2)
        return {
            "critic": (critics, torch.optim.lr_scheduler.StepLR(critics, 1, 0.5)),
            "generator": torch.optim.Adam(networks["generator"].parameters(), 1e-2),
        }
torch.manual_seed(3)
networks = nn.ModuleDict(
    {
        "generator": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        "critic": nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)),
    }
)
unit = Gan(module=networks, layout="ddp", clip_grad_norm=0.5)
ech.train(unit, loader(42), max_epochs=3)

# %% right_packed: two
# Sequences that each rank packs from its own documents: other sequences on other numbers of ranks, of the same numbers.
from torch.utils.data import DataLoader, IterableDataset
class Packed(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        info, rows = ech.RankInfo(), Rows()
        numbers = rows.x.flatten().split(5)[info.rank :: info.world_size]
        for row in torch.cat(list(numbers)).split(4):
            if len(row) == 4:
                yield row, row.sum(0, keepdim=True)
ech.train(Auto(module=model(), layout="ddp"), DataLoader(Packed(), 8, drop_last=True), max_epochs=3)

# %% right_padded_labels: two
# Rows of words padded with 0, their labels with -100; some rows are equal, and dropout is on.
WORDS = 12
rows = [torch.arange(i % 9, i % 9 + 3 + i * 5 % 7) % (WORDS - 1) + 1 for i in range(96)]
def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    padded = nn.utils.rnn.pad_sequence(samples, True)
    labels = padded[:, 1:].clone()
    labels[labels == 0] = -100
    return {"words": padded[:, :-1], "labels": labels}
class Words(Auto):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        logits = self.module(data["words"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten()), None
    def weight(self, data: Any) -> Any:
        return (data["labels"] != -100).sum()
torch.manual_seed(0)
network = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS))
ech.train(Words(module=network, layout="ddp"), ech.Loader(rows, 16, collate_fn=collate), max_epochs=3)

# %% right_sampler
# The usual DataLoader with a DistributedSampler: the batch is given per rank.
rows = Rows()
sampler = torch.utils.data.DistributedSampler(rows, dist.get_world_size(), dist.get_rank(), seed=1)
batches = torch.utils.data.DataLoader(rows, batch_size=8, sampler=sampler)
ech.train(Auto(module=model(), layout="ddp"), batches, max_epochs=3)

# %% right_sharded_ddp: two
# FairScale's pair by hand: gradients that only their owners have, a divided optimizer that looks whole.
from echelon.compat.fairscale.nn import ShardedDataParallel
from echelon.compat.fairscale.optim import OSS
ech.init_from_env()
module = model()
optimizer = OSS(module.parameters(), torch.optim.AdamW, lr=1e-2)
ech.train(Own(ShardedDataParallel(module, optimizer), optimizer), loader(), max_epochs=3)

# %% right_sync_batch_norm: two
# Batch norm over the global batch, beside dropout.
layout = ech.DDPStrategy(sync_batchnorm=True)
ech.train(Auto(module=model(nn.BatchNorm1d(8), nn.Dropout(0.1)), layout=layout), loader(), max_epochs=3)

# %% right_teacher: two
# A teacher that learns after each update, a weight of the loss that grows with the calls, lists that only collect, and noise.
import copy
class Taught(Auto):
    def __init__(self) -> None:
        module = model(nn.Dropout(0.1))
        super().__init__(module=module, layout="ddp")
        self.teacher = copy.deepcopy(module).requires_grad_(False).eval()
        self.calls, self.losses = 0, []
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        self.calls += 1
        out = self.module(data[0] + 0.1 * torch.randn_like(data[0]))
        taught = nn.functional.mse_loss(out, self.teacher(data[0]))
        loss = nn.functional.mse_loss(out, data[1]) + min(1.0, self.calls / 10) * taught
        self.losses.append(loss.item())
        return loss, None
    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.teacher.parameters(), self.module.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
ech.train(Taught(), loader(), max_epochs=1)

# %% right_parameter_of_an_output
# The loop's variables hold a parameter that the forward pass gives: under fsdp its memory is freed between two passes.
class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scales = model(), nn.Parameter(torch.zeros(2))
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x), self.scales
net = Two()
net, optimizer, batches = ech.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2), loader(), layout="fsdp")
for _ in ech.epochs(batches, 3):
    for x, y in batches:
        with ech.window(net) as window:
            out, scales = net(x)
            window.backward(nn.functional.mse_loss(out, y) * (-scales[0]).exp() + scales[0] + scales[1] ** 2)
            optimizer.step()
            optimizer.zero_grad()

# %% right_small_epoch: two
# Lightning shuffles in another order on two ranks than in one process, and all updates of an epoch are compared.
import echelon.compat.lightning.pytorch as pl
class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
    def training_step(self, batch: Batch, i: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)
pl.seed_everything(1)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Regression(), DataLoader(Rows(48), 8, shuffle=True))

# %% right_two_optimizers: two
# A step of one's own with two optimizers, dropout that nobody seeds, a schedule in a hook, and no loss that is told.
def net(outputs: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, outputs))
    return ech.layouts.prepare_module(layers, device, layout="ddp")
class Contest(ech.TrainUnit[Batch]):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = net(4), net(1)
        self.of_maker = torch.optim.Adam(self.maker.parameters(), 1e-3)
        self.of_judge = torch.optim.Adam(self.judge.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.of_judge, 1, 0.1)
    def train_step(self, state: ech.State, data: Batch) -> None:
        x, made, softplus = data[0], self.maker(data[0].flip(1)), nn.functional.softplus
        self.of_judge.zero_grad()
        (softplus(-self.judge(x)) + softplus(self.judge(made.detach()))).mean().backward()
        self.of_judge.step()
        self.of_maker.zero_grad()
        softplus(-self.judge(made)).mean().backward()
        self.of_maker.step()
    def on_train_epoch_end(self, state: ech.State) -> None:
        self.schedule.step()
ech.train(Contest(), loader(32), max_epochs=3)

# %% right_unseeded_draws: two
# Nothing seeds numpy and Python: they draw first weights, which rank 0 sends to all, a name, and each rank's noise.
import random
import numpy as np
class Noisy(Rows):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.from_numpy(np.random.normal(size=4)).to(x), y
module = model()
with torch.no_grad():
    module[0].weight.copy_(torch.from_numpy(np.random.normal(0, 0.5, module[0].weight.shape)))
name = f"run-{random.random()}"
ech.train(Auto(module=module, layout="ddp"), ech.Loader(Noisy(), 16), max_epochs=1)

# %% right_weight_in_a_variable: two
# Padded rows in a loop at the top of the script: the weight of a batch is a variable, which prove puts back after each try.
rows = [torch.arange(i % 9, i % 9 + 3 + i * 5 % 7) % 11 + 1 for i in range(96)]
def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, True)
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 12))
net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), 0.1), ech.Loader(rows, 16, collate_fn=collate))
for _ in ech.epochs(batches, 2):
    for words in batches:
        count = (words[:, 1:] != 0).sum()
        with ech.window(net, weight=count) as window:
            logits = net(words[:, :-1])
            window.backward(nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), ignore_index=0))
            optimizer.step()
            optimizer.zero_grad()

# %% right_worker_seeds: two
# Data workers that their init function seeds by their number and their rank, in every epoch alike.
import numpy as np
from torch.utils.data.distributed import DistributedSampler
info = ech.RankInfo()
class Noisy(Rows):
    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(np.random.standard_normal(4)).to(x), y
def seed(worker: int) -> None:
    np.random.seed(100 * info.rank + worker)
sampler = DistributedSampler(Noisy(), info.world_size, info.rank)
loader = DataLoader(Noisy(), 8, sampler=sampler, num_workers=1, worker_init_fn=seed)
ech.train(Auto(module=model(), layout="ddp"), loader, max_epochs=3)
