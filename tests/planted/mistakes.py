"""Scripts that have a mistake, which prove has to name: `# %% NAME: cause; phase; what is said of where it was seen`."""
# ruff: noqa
# fmt: off

# %% missing_all_reduce: missing all-reduce; gradient
# Nothing reduces the gradients.
ech.train(Own(model()), loader(), max_epochs=3)

# %% weight_of_a_mask: loss weighted per rank; forward
# The loss is a mean over the rows that a mask leaves, but counts as a mean over all rows.
class Masked(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        mask = (data[0][:, :1] > 0).float()
        return ((self.module(data[0]) - data[1]).square() * mask).sum() / mask.sum(), None
ech.train(Masked(module=model(), layout="ddp"), loader(), max_epochs=3)

# %% weight_of_a_rank: loss weighted per rank; gradient
# Ranks with batches of other sizes, under DistributedDataParallel, which averages over ranks.
rows, size = Rows(), (6, 2, 3, 5)[dist.get_rank() % 4]
generator = torch.Generator().manual_seed(dist.get_rank())
chosen = [torch.randint(0, len(rows), (size,), generator=generator) for _ in range(10)]
ech.train(Own(DistributedDataParallel(model())), [(rows.x[i], rows.y[i]) for i in chosen], max_epochs=3)

# %% same_data: identical data on two ranks
# Every rank reads as if it were the first.
ech.train(Auto(module=model(), layout="ddp"), loader(options=ech.data.LoaderOptions(dp=(0, 1))), max_epochs=3)

# %% sampler_without_rank: a sampler that ignores the rank
# A DataLoader without a DistributedSampler.
batches = torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))
ech.train(Auto(module=model(), layout="ddp"), batches, max_epochs=3)

# %% same_dropout: identical random numbers
# All ranks are seeded alike once training has begun.
class Seeding(Auto):
    def on_train_epoch_start(self, state: ech.State) -> None:
        torch.manual_seed(0)
ech.train(Seeding(module=model(torch.nn.Dropout(0.3)), layout="ddp"), loader(), max_epochs=3)

# %% buffers_apart: unsynchronised buffers; forward
# A running mean that no rank shares with the others.
class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean
ech.train(Own(DistributedDataParallel(model(Centred()), broadcast_buffers=False)), loader(), max_epochs=3)

# %% stale_optimizer: an untracked or stale optimizer parameter
# The optimizer is made before the module is sharded, by a unit of one's own.
module = model()
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
ech.train(Own(ech.layouts.prepare_fsdp(module, device), optimizer), loader(), max_epochs=3)

# %% stale_optimizer_auto: an untracked or stale optimizer parameter; update
# The optimizer is made before the module is sharded, in an AutoUnit: DDP forgives it, FSDP does not.
class Early(Auto):
    def __init__(self, module: torch.nn.Module) -> None:
        self.early = torch.optim.SGD(module.parameters(), lr=0.1)
        super().__init__(module=module, layout="fsdp")
    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return self.early, None
ech.train(Early(model()), loader(), max_epochs=3)

# %% batch_norm: batch norm over the local batch; forward
# Batch norm, which sees a micro-batch where one process would see the whole batch.
ech.train(Auto(module=model(nn.BatchNorm1d(8)), layout="ddp"), loader(), max_epochs=3)

# %% summed_gradients: a wrong scale; gradient
# The gradients are summed over the ranks and never divided.
class Summing(Own):
    def reduce(self) -> None:
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
ech.train(Summing(model()), loader(), max_epochs=3)

# %% initial_values_apart: different initial parameters; forward
# Every rank draws initial values of its own, and nothing broadcasts them.
module = model()
torch.manual_seed(dist.get_rank())
nn.init.normal_(module[0].weight)
ech.train(Averaging(module), loader(), max_epochs=3)

# %% learning_rates_apart: another learning rate
# Every rank steps with a learning rate of its own.
module = model()
ech.train(Averaging(module, torch.optim.SGD(module.parameters(), lr=0.1 * (1 + dist.get_rank()))), loader(), max_epochs=3)

# %% noise_on_a_shard: a change on one rank's shard; update
# One rank adds noise to its part of the parameters.
class Noisy(Auto):
    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        for parameter in self.module.parameters() if dist.get_rank() == 1 else ():
            with torch.no_grad():
                own = getattr(parameter, "to_local", lambda p=parameter: p)()
                own.add_(0.01 * torch.randn_like(own))
ech.train(Noisy(module=model(), layout="fsdp"), loader(), max_epochs=1)

# %% clipping_in_a_window: gradients changed in the middle of an update; gradient
# torch's own clipping, left in a loop that accumulates.
net = model()
net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
for _ in ech.epochs(batches, 2):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x), y))
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

# %% noise_on_parameters: parameters that drift apart
# Every rank adds noise of its own to the parameters after each step.
class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))
class Sampled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return Langevin(module.parameters(), lr=0.1), None
ech.train(Sampled(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% noise_after_the_step: parameters that drift apart; update
# A loop adds noise of each rank's own to the parameters, after the step.
network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
trained, optimizer, batches = ech.prepare(network, optimizer, ech.Loader(Rows(), 16), layout="ddp")
for rows, wanted in batches:
    with ech.window(trained) as window:
        window.backward(nn.functional.mse_loss(trained(rows), wanted))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)

# %% noise_on_gradients: gradients that each rank changes
# Every rank adds noise of its own to gradients that are reduced already.
class Noisy(Averaging):
    def reduce(self) -> None:
        super().reduce()
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * torch.randn_like(parameter.grad)
module = model()
torch.manual_seed(dist.get_rank())
ech.train(Noisy(module), loader(), max_epochs=1)

# %% another_learning_rate: another learning rate; update
# On several ranks, biases learn one per cent faster: little, in parameters that are small beside the others.
class Scaled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        weights = [p for p in module.parameters() if p.dim() > 1]
        biases = [p for p in module.parameters() if p.dim() == 1]
        rate = 1.01e-5 if dist.get_world_size() > 1 else 1e-5
        return torch.optim.Adam([{"params": weights}, {"params": biases, "lr": rate}], lr=1e-5), None
module = model()
for parameter in module.parameters():
    if parameter.dim() == 1:
        nn.init.zeros_(parameter)
ech.train(Scaled(module=module, layout="ddp"), loader(), max_epochs=3)

# %% clipping_on_each_rank: clipping on each rank; gradient
# Every rank clips its own gradient, and then they are averaged.
class Clipping(Averaging):
    def reduce(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        super().reduce()
ech.train(Clipping(model()), loader(), max_epochs=3)

# %% contrast: an operation over the whole batch; forward
# A loss over pairs within the batch: no mean over samples, so that splitting the batch changes it.
class Pairs(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        out = self.module(data[0])
        return ((out - out.T) - (data[1] - data[1].T)).square().mean(), None
ech.train(Pairs(module=model(), layout="ddp"), loader(), max_epochs=3)

# %% dropout_from_numpy: identical random numbers
# Dropout by hand from numpy, in a state that all ranks share.
import numpy as np
class Dropping(Auto):
    def on_train_epoch_start(self, state: ech.State) -> None:
        np.random.seed(5)
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        kept = torch.from_numpy(np.random.rand(*data[0].shape) > 0.5)
        return nn.functional.mse_loss(self.module(data[0] * kept), data[1]), None
ech.train(Dropping(module=model(), layout="ddp"), loader(), max_epochs=3)

# %% same_augmentation: identical augmentation
# Noise on every sample as it is read, the same noise on every rank.
import numpy as np
class Noisy(Rows):
    noise = np.random.default_rng(5)
    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(self.noise.standard_normal(4)).to(x), y
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Noisy(), 16), max_epochs=3)

# %% hidden_generator: a forward pass that cannot be repeated; forward
# The same mask on every rank, out of an iterator into which nobody can look.
generator = iter([torch.Generator().manual_seed(1)] * 1000)
masks = (torch.rand(16, 4, generator=each) > 0.5 for each in generator)
class Masked(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return nn.functional.mse_loss(self.module(data[0] * next(masks)[: len(data[0])]), data[1]), None
ech.train(Masked(module=model(), layout="ddp"), loader(), max_epochs=3)

# %% evaluation_on_a_rank: modules in evaluation mode on some ranks
# Rank 0 has evaluated alone, and did not go back to training mode.
class Looking(Auto):
    def on_train_epoch_start(self, state: ech.State) -> None:
        self.module.train(dist.get_rank() > 0)
ech.train(Looking(module=model(nn.Dropout(0.2)), layout="ddp"), loader(), max_epochs=3)

# %% loss_by_rank: a loss that depends on the rank; forward
# From the second epoch on, another share of the loss on each rank: little, and late.
class Late(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        loss, _ = super().compute_loss(state, data)
        return loss * (1 + 0.001 * dist.get_rank() * (self.train_progress.num_epochs_completed > 0)), None
ech.train(Late(module=model(), layout="ddp"), loader(32), max_epochs=3)

# %% weight_of_a_drawn_mask: loss weighted per rank; forward
# A mean over what a drawn mask hides: ranks hide other numbers of values, and count alike.
class Hiding(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        hidden = torch.rand(data[0].shape) < 0.3
        errors = (self.module(data[0].masked_fill(hidden, 0.0)) - data[0]).square()
        return errors[hidden].mean(), None
ech.train(Hiding(module=model(), layout="ddp"), loader(), max_epochs=3)

# %% tokens_of_padded_batches: loss weighted per rank
# A mean over tokens of batches that are padded to their longest sample, counted as a mean over samples.
generator = torch.Generator().manual_seed(0)
sequences = [torch.randn(1 + i * 5 % 9, 4, generator=generator) for i in range(64)]
def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = [torch.ones(len(s), 1) for s in samples]
    return {"x": nn.utils.rnn.pad_sequence(samples, True), "mask": nn.utils.rnn.pad_sequence(mask, True)}
class Tokens(Auto):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        errors = (self.module(data["x"]) - data["x"].sum(2, keepdim=True)) ** 2 * data["mask"]
        return errors.sum() / data["mask"].sum(), None
ech.train(Tokens(module=model(), layout="ddp"), ech.Loader(sequences, 16, collate_fn=collate), max_epochs=3)

# %% samples_by_rank: samples that depend on the rank
# Each rank standardises the rows that it read by itself, and has the others as they were.
rows, rank = Rows(), dist.get_rank() if dist.is_initialized() else 0
mine = rows.x[rank::2]
rows.x[rank::2] = (mine - mine.mean(0)) / mine.std(0)
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(rows, 16), max_epochs=3)

# %% own_order: samples that ranks share; ; 23 of 96 rows were seen by two ranks
# Each rank shuffles for itself, and takes its half: some samples come twice in an epoch, some never.
order = torch.randperm(96, generator=torch.Generator().manual_seed(dist.get_rank()))
sampler = order[: 96 // dist.get_world_size()].tolist()
ech.train(Auto(module=model(), layout="ddp"), torch.utils.data.DataLoader(Rows(), 8, sampler=sampler), max_epochs=3)

# %% rows_of_a_seed: samples that depend on the rank
# A LightningModule's script seeds each rank otherwise before it makes its data set, whose rows ranks divide by number.
import os
from typing import Any
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon.compat.lightning.pytorch as pl
class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)
pl.seed_everything(42 + int(os.environ.get("RANK", "0")))
drawn = torch.randn(96, 4)
rows = TensorDataset(drawn, drawn.sum(1, keepdim=True))
trainer = pl.Trainer(accelerator="cpu", devices="auto", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Regression(), DataLoader(rows, 8))

# %% files_of_a_rank: samples that depend on the rank
# Each rank reads files of its own, and standardises them by their own mean.
info, rows = ech.RankInfo(), Rows()
x, y = (part[info.rank :: info.world_size] for part in (rows.x.sort(0).values, rows.y))
data = TensorDataset((x - x.mean(0)) / x.std(0), y)
ech.train(Auto(module=model(), layout="ddp"), DataLoader(data, 8, shuffle=True), max_epochs=3)

# %% gathered_without_gradient: collectives without a gradient; gradient
# Each sample against those of all ranks, gathered by a collective through which no gradient flows back.
class Views(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        one, other, first = self.module(data[0]), self.module(data[0] + 0.1), 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(other) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, other.detach())
            first, parts[dist.get_rank()] = dist.get_rank() * len(one), other
            other = torch.cat(parts)
        return nn.functional.cross_entropy(-((one - other.T) ** 2), first + torch.arange(len(one))), None
ech.train(Views(module=model(), layout="ddp"), loader(), max_epochs=3)

# %% labels_of_a_gather: a loss of what ranks send each other; forward
# Contrast with the rows of all ranks, whose labels on every rank are the first ones: they should begin at rank x rows.
class Pairs(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        made = self.module(data[0])
        logits = made @ ech.gather(made.tanh()).T
        return nn.functional.cross_entropy(logits, torch.arange(len(made))), None
ech.train(Pairs(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=3)

# %% same_worker_init: identical augmentation
# Data workers that their init function seeds by their number alone: those of all ranks draw alike.
import numpy as np
from torch.utils.data.distributed import DistributedSampler
class Noisy(Rows):
    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(np.random.standard_normal(4)).to(x), y
def seed(worker: int) -> None:
    np.random.seed(100 + worker)
info = ech.RankInfo()
torch.manual_seed(info.rank)  # from which torch seeds the workers
sampler = DistributedSampler(Noisy(), info.world_size, info.rank)
loader = DataLoader(Noisy(), 8, sampler=sampler, num_workers=1, worker_init_fn=seed)
ech.train(Auto(module=model(), layout="ddp"), loader, max_epochs=3)

# %% hardest_later: an operation over the whole batch
# Dropout, and from the third update on only the three hardest samples of a rank's batch.
class Hardest(Auto):
    passes = 0
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        losses = nn.functional.mse_loss(self.module(data[0]), data[1], reduction="none").mean(1)
        self.passes += 1
        return losses.topk(3 if self.passes > 2 else len(losses)).values.mean(), None
ech.train(Hardest(module=nn.Sequential(model(), nn.Dropout(0.2)), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=3)

# %% weights_of_a_clipped_loop: an operation over the whole batch; forward
# Class weights that follow the batch: each rank weighs by the classes of its own part. The loop clips.
ech.seed(0)
labels = torch.tensor([0, 0, 0, 1, 0, 1, 2, 2] * 16)
samples = torch.randn(128, 4) + labels[:, None]
def weighed(net, data):
    counts = torch.bincount(data[1], minlength=3).clamp(min=1).to(data[0].dtype)
    return (F.cross_entropy(net(data[0]), data[1], reduction="none") / counts[data[1]]).mean()
own_loop(torch.nn.Linear(4, 3), ech.Loader(TensorDataset(samples, labels), global_batch=16), weighed, clip=0.05)

# %% hook_of_a_rank: gradients that each rank changes; gradient
# Each rank clamps its own gradient, before the mean over the ranks.
ech.seed(0)
samples = torch.randn(128, 4)
net = torch.nn.Linear(4, 1)
for parameter in net.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
own_loop(net, ech.Loader(TensorDataset(samples, samples.pow(2).sum(1, keepdim=True)), global_batch=16))

# %% baseline_of_a_loop: the forward pass keeps state; forward
# A running mean in a variable of the loop's function, which each rank takes of its own samples.
def main() -> None:
    net = model()
    net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
    baseline = 0.0
    for x, y in batches:
        with ech.window(net) as window:
            out = net(x)
            reward = -(out.detach() - y).square()
            window.backward(-((reward - baseline) * out).mean())
            baseline = 0.9 * baseline + 0.1 * reward.mean().item()
            optimizer.step()
            optimizer.zero_grad()
main()

# %% threshold_of_a_rank: the forward pass keeps state; ; usual is not the same on all ranks
# Dropout, and from the third update on only the samples that are below a running mean of losses, which is each rank's own.
class Easy(Auto):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.passes, self.usual = 0, 0.0
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        losses = nn.functional.mse_loss(self.module(data[0]), data[1], reduction="none").mean(1)
        self.passes += 1
        self.usual = 0.5 * self.usual + 0.5 * float(losses.detach().mean())
        kept = losses.detach() < self.usual if self.passes > 2 else torch.ones_like(losses)
        return (losses * kept).mean(), None
ech.train(Easy(module=nn.Sequential(model(), nn.Dropout(0.2)), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=3)

# %% teacher_by_samples: the forward pass keeps state; ; differs from one process
# A teacher follows by the number of samples that a rank has, with noise: more slowly than in one process, on all ranks alike.
import copy
ech.seed(0)
student = model()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
loader = ech.Loader(Rows(), 16)
student, teacher, optimizer, loader = ech.prepare(student, teacher, optimizer, loader, layout="ddp")
for _ in ech.epochs(loader, 1):
    for x, y in loader:
        with ech.window(student) as window:
            made = student(x + 0.1 * torch.randn_like(x))
            window.backward(nn.functional.mse_loss(made, y) + nn.functional.mse_loss(made, teacher(x)))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 1 - 0.5 ** (len(x) / 20))

# %% norms_of_a_shard: an optimizer that computes with its shard alone; update; 0.weight, which is split over the ranks
# An optimizer that scales each step by norms of what its rank has of a parameter.
def own(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
class Trusting(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                trust = own(p).norm() / (own(p.grad).norm() + 1e-6)
                own(p).sub_(own(p.grad), alpha=float(group["lr"] * trust))
class Scaled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return Trusting(module.parameters(), lr=1e-2), None
ech.train(Scaled(module=model(), layout="fsdp"), loader(), max_epochs=1)

# %% step_by_world_size: another step of the optimizer; update
# An optimizer whose step is larger the more ranks there are.
class Larger(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-2 * dist.get_world_size())
class Scaled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return Larger(module.parameters(), lr=1e-2), None
ech.train(Scaled(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% scale_of_the_first_batch: the forward pass keeps state; forward; sets the parameter 3.scale
# A layer that takes its first scale from the samples that it sees first.
class Whitened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(8)), False
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.seen:
            self.scale.data.copy_(1 / (x.detach().std(0) + 0.1))
            self.seen = True
        return x * self.scale
ech.train(Auto(module=model(Whitened()), layout="ddp"), loader(), max_epochs=1)

# %% samples_counted_by_a_rank: the forward pass keeps state; forward; weight differs from one process: 8 on every rank, 16 in one process
# A warm-up by the number of samples, which each rank counts for itself in a variable around a function.
def warm_up() -> Callable[[int], float]:
    count = 0
    def weight(samples: int) -> float:
        nonlocal count
        count += samples
        return min(1.0, count / 64)
    return weight
weight = warm_up()
class Warmed(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        loss, out = super().compute_loss(state, data)
        return loss * weight(len(data[0])), out
ech.train(Warmed(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% queue_in_slots: the forward pass keeps state; ; script.queue.keys is not the same on all ranks
# MoCo: a queue of keys, to which each rank adds its own keys only.
import copy
K = 64
class Queue:
    __slots__ = ("at", "keys")
    def __init__(self):
        self.keys = F.normalize(torch.randn(K, 12, generator=torch.Generator().manual_seed(0)), dim=1)
        self.at = 0
    def push(self, keys):
        self.keys[(self.at + torch.arange(len(keys))) % K] = keys
        self.at = (self.at + len(keys)) % K
ech.seed(0)
query = nn.Sequential(nn.Linear(18, 40), nn.ReLU(), nn.LayerNorm(40), nn.Linear(40, 12))
key = copy.deepcopy(query).requires_grad_(False)
optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)
x, queue = torch.randn(512, 18), Queue()
views = TensorDataset(x + 0.2 * torch.randn(512, 18), x + 0.2 * torch.randn(512, 18))
student, key, optimizer, batches = ech.prepare(query, key, optimizer, DataLoader(views, batch_size=32, shuffle=True))
for a, b in batches:
    with torch.no_grad():
        for slow, fast in zip(key.parameters(), query.parameters()):
            slow.lerp_(fast, 0.1)
        keys = F.normalize(key(b), dim=1)
    with ech.window(student) as window:
        made = F.normalize(student(a), dim=1)
        logits = torch.cat([(made * keys).sum(1, keepdim=True), made @ queue.keys.clone().T], 1) / 0.2
        window.backward(F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long)))
        optimizer.step()
        optimizer.zero_grad()
    queue.push(keys)

# %% scale_limited_in_a_window: the forward pass keeps state; forward; update 0, a later micro-batch: rank 0
# A parameter that is limited after the step, in every batch: in the middle of an update, too.
net = model()
scale = nn.Parameter(torch.tensor(3.0))
net.register_parameter("scale", scale)
net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
for _ in ech.epochs(batches, 2):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x) * scale, y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            scale.clamp_(0.0, 2.0)

# %% order_of_a_set: samples that depend on the rank; ; PYTHONHASHSEED
# Classes are numbered in the order of a set of strings, which is another in each process that Python starts.
names = ["north", "east", "south", "west", "up", "down"]
number = {name: i for i, name in enumerate(set(names))}
class Named(Rows):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(i)
        return x, y + number[names[i % len(names)]]
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Named(), 16), max_epochs=1)

# %% samples_by_count: samples that depend on the rank; ; the data set's count changes as samples are read
# Inputs are noisier the more samples were read, which each rank's data set counts for itself.
class Noisier(Rows):
    count = 0
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        x, y = super().__getitem__(i)
        noise = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.1 * (self.count // 8) * noise, y
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Noisier(), 16), max_epochs=1)

# %% clamped_gradients: gradients that each rank changes; gradient
# A hook clamps the gradient of each micro-batch.
module = model()
for parameter in module.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
ech.train(Auto(module=module, layout="ddp"), loader(), max_epochs=1)

# %% split_without_a_seed: an RNG without a seed
# Rows to train on are chosen by numpy, which nothing seeds: each rank has others, scaled by others' mean.
import numpy as np
rows = Rows(120)
chosen = np.random.permutation(len(rows))[:96]
rows.x, rows.y = rows.x[chosen] - rows.x[chosen].mean(0), rows.y[chosen]
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(rows, 16), max_epochs=1)

# %% balanced_by_a_batch: an operation over the whole batch; gradient
# A second loss is brought to the size of the first by detached numbers of the local batch: right values, other gradients.
class Balanced(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        x, y = data
        made = self.module(x)
        main, second = (made - y).square().mean(), (made - y).abs().mean()
        return main + second * (main.detach() / second.detach()), None
ech.train(Balanced(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=1)

# %% mean_over_padded_places_of_a_stream: an operation over the whole batch
# The same of a stream.
from tagger import *
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from sentences()
batches = ech.StreamLoader(Stream(), global_batch=16, shards="stride", collate_fn=collate)
train(batches)

# %% spread_of_a_critic: an operation over the whole batch; forward
# Two optimizers in a loop of one's own, and a critic that sees how far the rows of its micro-batch lie apart.
import torch
from torch import nn
from torch.nn.functional import softplus
import echelon as ech
class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 8), nn.Linear(9, 1)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).tanh()
        return self.outer(torch.cat([h, h.std(0).mean().expand(len(h), 1)], 1))
torch.manual_seed(3)
maker, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), Critic()
of_maker, of_critic = torch.optim.Adam(maker.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
rows = torch.utils.data.TensorDataset(torch.randn(96, 2).abs(), torch.randn(96, 4))
maker, critic, of_maker, of_critic, loader = ech.prepare(maker, critic, of_maker, of_critic, ech.Loader(rows, 16))
for real, noise in loader:
    with ech.window(maker) as window:
        made = maker(noise)
        of_critic.zero_grad()
        window.backward((softplus(-critic(real)) + softplus(critic(made.detach()))).mean())
        of_critic.step()
        of_maker.zero_grad()
        window.backward(softplus(-critic(made)).mean())
        of_maker.step()

# %% covariance_of_a_rank: parameters that drift apart; ; Turned.covariance was not
# An optimizer that keeps the covariance of a rank's own rows, and turns the gradient by it.
class Turned(torch.optim.Optimizer):
    def __init__(self, layer: nn.Linear, lr: float) -> None:
        super().__init__(layer.parameters(), {"lr": lr})
        self.covariance = torch.eye(layer.in_features)
        layer.register_forward_pre_hook(self.see)
    @torch.no_grad()
    def see(self, layer: nn.Module, given: tuple[torch.Tensor]) -> None:
        x = given[0].float()
        self.covariance = 0.9 * self.covariance + 0.1 * x.T @ x / len(x)
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if gradient.ndim == 2:
                gradient = gradient @ torch.linalg.inv(self.covariance).to(gradient)
            parameter.sub_(gradient, alpha=self.param_groups[0]["lr"])
torch.manual_seed(7)
x = torch.randn(96, 4)
rows = torch.utils.data.TensorDataset(x, x.sin())
net = nn.Linear(4, 4)
own_loop(net, ech.Loader(rows, 16), optimizer=Turned(net, lr=0.05))
