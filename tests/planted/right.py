"""Scripts that are right, which prove has to pass: `# %% NAME`, or `# %% NAME: two` of those that two ranks under ddp are enough for."""
# ruff: noqa
# fmt: off

# %% right_augmentation: two
# Samples are changed by random numbers as they are read, which the loader seeds for each.
class Noisy(Rows):
    def __getitem__(self, i: int) -> Batch:
        return self.x[i] + 0.1 * torch.randn(4), self.y[i]
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Noisy(), 16, num_workers=1), max_epochs=3)

# %% right_augmented_batches: two
# Random numbers are drawn as samples are put together into a batch.
def noisy(samples: list[Batch]) -> Batch:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return x + 0.1 * torch.randn_like(x), y
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Rows(), 16, collate_fn=noisy), max_epochs=3)

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

# %% right_class_weights: two
# Classes with weights of their own, dropout, and a `weight` that says what a batch counts.
CLASSES = torch.tensor([1.0, 6.0])
def classes(data: Batch) -> torch.Tensor:
    return (data[1] > 0).long().flatten()
class Classes(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        score = self.module(data[0])
        return nn.functional.cross_entropy(torch.cat([-score, score], 1), classes(data), weight=CLASSES), None
    def weight(self, data: Batch) -> float:
        return float(CLASSES[classes(data)].sum())
ech.train(Classes(module=model(nn.Dropout(0.1)), layout="ddp"), loader(), max_epochs=3)

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

# %% right_drawn_in_float64: two
# A loop in float64 over samples that are drawn from their number, as they are read.
from torch.utils.data import DataLoader, Dataset
class Drawn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))
torch.set_default_dtype(torch.float64)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
own_loop(net, DataLoader(Drawn(), 8), lambda net, x: (net(x) - x.sum(1, keepdim=True)).square().mean())

# %% right_drawn_mask: two
# A loop's mean over what a drawn mask hides, which counts what is hidden; with noise for no sample, and dropout across them.
net = model()
net, optimizer, loader = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), DataLoader(Rows(), 16), layout="ddp")
for x, _ in loader:
    hidden = torch.rand(x.shape) < 0.3
    with ech.window(net, weight=hidden.sum()) as window:
        made = net(nn.functional.dropout(x.masked_fill(hidden, 0.0).T, 0.1).T + 0.1 * torch.randn(4))
        window.backward((made - x)[hidden].square().mean())
        optimizer.step()
        optimizer.zero_grad()

# %% right_fsdp1
# The older FullyShardedDataParallel by hand.
import functools
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
ech.train(Own(FullyShardedDataParallel(model(), auto_wrap_policy=policy, device_id=device)), loader(), max_epochs=3)

# %% right_gathered_views: two
# Each sample against those of all ranks, in two noisy views: drawn and gathered in one pass.
from torch.distributed.nn.functional import all_gather
class Views(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        one, other = (self.module(nn.functional.dropout(data[0], 0.2)) for _ in range(2))
        first = 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            first, other = dist.get_rank() * len(one), torch.cat(all_gather(other))
        return nn.functional.cross_entropy(-((one - other.T) ** 2), first + torch.arange(len(one))), None
ech.train(Views(module=model(), layout="ddp"), loader(), max_epochs=3)

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

# %% right_generators_of_workers: two
# Each data worker makes the dataset a generator of its own, from the seed that it was given.
import numpy as np
from torch.utils.data import get_worker_info
class Noisy(Rows):
    rng = np.random.default_rng(0)
    def __getitem__(self, i: int) -> Batch:
        x, y = super().__getitem__(i)
        return x + torch.from_numpy(self.rng.normal(0, 0.1, 4)).to(x), y
data = Noisy()
def seed(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data.rng = np.random.default_rng(info.seed)
batches = torch.utils.data.DataLoader(data, 16, shuffle=True, num_workers=2, worker_init_fn=seed)
own_loop(model(), batches, epochs=3)

# %% right_graphs: two
# Graphs of a batch laid end to end, with offsets: no part of the batch has a row for each, but the loader knows its samples.
Graph = tuple[torch.Tensor, torch.Tensor]  # nodes (N, 4), edges (2, E)
Graphs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
class Edges(Auto):
    def compute_loss(self, state: ech.State, data: Graphs) -> tuple[torch.Tensor, None]:
        nodes, edges, graph_of_edge = data
        found = self.module(nodes[edges[0]] - nodes[edges[1]]).square().flatten()
        sums = torch.zeros(int(graph_of_edge[-1]) + 1).to(found).index_add(0, graph_of_edge, found)
        return sums.mean(), None
    def weight(self, data: Graphs) -> int:
        return int(data[2][-1]) + 1
def collate(graphs: list[Graph]) -> Graphs:
    offsets = [0, *torch.tensor([len(nodes) for nodes, _ in graphs]).cumsum(0).tolist()]
    edges = torch.cat([edges + offset for (_, edges), offset in zip(graphs, offsets, strict=False)], 1)
    which = torch.cat([torch.full((edges.shape[1],), i) for i, (_, edges) in enumerate(graphs)])
    return torch.cat([nodes for nodes, _ in graphs]), edges, which
generator = torch.Generator().manual_seed(0)
graphs = [
    (torch.randn(3 + i % 5, 4, generator=generator), torch.randint(3 + i % 5, (2, 4 + i % 3), generator=generator))
    for i in range(64)
]
ech.train(Edges(module=model(), layout="ddp"), ech.Loader(graphs, 16, collate_fn=collate), max_epochs=3)

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

# %% right_lists: two
# Batches that are lists of samples of different lengths, and a mean over them.
Lists = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
class Bags(Auto):
    def compute_loss(self, state: ech.State, data: Lists) -> tuple[torch.Tensor, None]:
        losses = [nn.functional.mse_loss(self.module(bag.mean(0)), y) for bag, y in zip(*data, strict=True)]
        return torch.stack(losses).mean(), None
    def weight(self, data: Lists) -> int:
        return len(data[0])
def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Lists:
    return tuple(zip(*samples, strict=True))
generator = torch.Generator().manual_seed(0)
bags = [(torch.randn(2 + i % 4, 4, generator=generator), torch.randn(1, generator=generator)) for i in range(64)]
ech.train(Bags(module=model(), layout="ddp"), ech.Loader(bags, 16, collate_fn=collate), max_epochs=3)

# %% right_networks_with_noise: two
# A loop of two networks, one of which has a spectral norm and learns from noise that the loop draws before the other's step.
import torch
from torch import nn
from torch.nn.functional import softplus
import echelon as ech
ech.init_from_env()
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
critic = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.LeakyReLU(), nn.Linear(8, 1))
of_generator, of_critic = torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
loader = ech.Loader(torch.utils.data.TensorDataset(rows), global_batch=16)
generator, critic, of_generator, of_critic, loader = ech.prepare(generator, critic, of_generator, of_critic, loader)
for _ in ech.epochs(loader, 4):
    for (real,) in loader:
        with ech.window(generator, critic) as window:
            made = generator(torch.randn(len(real), 4))
            of_critic.zero_grad()
            window.backward(softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean())
            of_critic.step()
            of_generator.zero_grad()
            window.backward(softplus(-critic(made)).mean())
            of_generator.step()

# %% right_nodes_of_graphs: two
# A mean over the nodes of a batch's graphs, which are laid end to end: its rows are nodes, and no row goes without its graph.
Graph = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # nodes (N, 4), adjacency (N, N), classes (N)
generator = torch.Generator().manual_seed(0)
def graph(count: int) -> Graph:
    nodes = torch.randn(count, 4, generator=generator)
    return nodes, torch.rand(count, count, generator=generator), nodes[:, :2].argmax(1)
def collate(graphs: list[Graph]) -> Graph:
    nodes, adjacencies, classes = zip(*graphs, strict=True)
    return torch.cat(nodes), torch.block_diag(*adjacencies), torch.cat(classes)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
loader = torch.utils.data.DataLoader([graph(2 + i * 5 % 9) for i in range(64)], 16, collate_fn=collate)
own_loop(model, loader, lambda net, data: F.cross_entropy(net(data[1] @ data[0]), data[2]))

# %% right_noise_of_a_loop: two
# A loop whose noise comes from an object that only its function holds, seeded by the rank.
class Noise:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
    def like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
def main() -> None:
    noise, net = Noise(ech.RankInfo().rank), model()
    net, optimizer, loader = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), DataLoader(Rows(), 8), layout="ddp")
    for x, y in loader:
        changed = x + 0.1 * noise.like(x)
        with ech.window(net) as window:
            window.backward((net(changed) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
main()

# %% right_noise_of_weights: two
# A loop adds the same noise to the parameters on all ranks, after the step: once an update, however many ranks there are.
network = model(nn.Dropout(0.1))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
shared = torch.Generator().manual_seed(5)
trained, optimizer, batches = ech.prepare(network, optimizer, ech.Loader(Rows(), 16), layout="ddp")
for rows, wanted in batches:
    with ech.window(trained) as window:
        window.backward(nn.functional.mse_loss(trained(rows), wanted))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=shared), alpha=0.01)

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

# %% right_packed_loop: two
# RIGHT: packed sequences in the batch.
from torch.nn.utils.rnn import pack_sequence
generator = torch.Generator().manual_seed(0)
series = [(s, s.mean()) for i in range(320) for s in [torch.randn(3 + i * 5 % 12, 3, generator=generator)]]
def collate(samples):
    return pack_sequence([s for s, _ in samples], enforce_sorted=False), torch.stack([y for _, y in samples])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 16, batch_first=True), nn.Linear(16, 1)
    def forward(self, packed):
        return self.out(self.rnn(packed)[1][0][-1]).squeeze(1)
ech.seed(0)
net = Net()
loader, adam = ech.Loader(series, global_batch=16, collate_fn=collate), torch.optim.Adam(net.parameters(), lr=3e-3)
own_loop(net, loader, lambda net, data: F.l1_loss(net(data[0]), data[1]), optimizer=adam, weigh=lambda data: len(data[1]))

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

# %% right_ramp_of_a_loop: two
# A loop whose penalty follows the number of the update, and is left out in every second one: nothing is wrong.
import torch
from torch import nn
import echelon as ech
numbers = torch.Generator().manual_seed(0)
x = torch.randn(240, 6, generator=numbers)
ech.seed(0)
model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = ech.Loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), global_batch=24)
model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="ddp")
for _ in ech.epochs(loader, 2):
    for inputs, targets in loader:
        with ech.window(model) as window:
            given = model(inputs)
            loss = (given - targets).pow(2).mean()
            if window.update % 2:
                loss = loss + min(1.0, window.update / 5) * given.abs().mean()
            window.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

# %% right_reduction
# All-reduce by hand.
ech.train(Averaging(model()), loader(), max_epochs=3)

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

# %% right_tokens
# A mean over what a mask leaves, weighed by it.
class Masked(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        mask = (data[0][:, :1] > 0).float()
        return ((self.module(data[0]) - data[1]).square() * mask).sum() / mask.sum().clamp(min=1), None
    def weight(self, data: Batch) -> torch.Tensor:
        return (data[0][:, 0] > 0).sum()
ech.train(Masked(module=model(), layout="ddp"), loader(), max_epochs=3)

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

# %% right_unseeded_draws
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

# %% right_width_of_a_batch: two
# A collate function draws one number for the whole batch, which all ranks draw alike.
import random
decide = random.Random(3)
def collate(samples: list[Batch]) -> Batch:
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return x * decide.choice((0.5, 1.0)), y
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Rows(), 16, collate_fn=collate), max_epochs=3)

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
