"""Scripts of which prove has to say something in particular: tests/prover says what."""
# ruff: noqa
# fmt: off

# %% gathered_lists
# Items laid end to end, with their bags in a row beside, and a mean over those of all ranks: one process cannot add it up.
class Bags(Auto):
    def compute_loss(self, state: ech.State, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        losses = self.module(data["items"])[data["order"][0]].square()
        return losses.sum() / ech.all_mean(float(len(losses))), None
def collate(bags: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    items = torch.cat(bags)
    return {"items": items, "order": torch.arange(len(items))[None]}
generator = torch.Generator().manual_seed(0)
bags = [torch.randn(1 + i % 5, 4, generator=generator) for i in range(64)]
ech.train(Bags(module=nn.Sequential(model()), layout="ddp"), ech.Loader(bags, 16, collate_fn=collate), max_epochs=1)

# %% padding_of_random_words
# A tagger over rows whose words are dropped at random while they are padded: whether padding counts cannot be told.
from tagger import *
def dropping(rows):
    return collate([(torch.where(torch.rand(len(i)) < 0.1, torch.tensor(V - 1), i), t) for i, t in rows])
train(DataLoader(sentences(), batch_size=16, shuffle=True, collate_fn=dropping))

# %% easy_of_a_batch
# Easy samples count more: those below a threshold, first the local batch's own mean, then that of each rank's batches.
class Easy(Auto):
    threshold = 0.0
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        errors = (self.module(data[0]) - data[1]).square()
        mean = float(errors.detach().mean())
        self.threshold = 0.9 * self.threshold + 0.1 * mean if self.threshold else mean
        return (errors * torch.sigmoid(self.threshold - errors.detach())).mean(), None
ech.train(Easy(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=1)

# %% sharpness_of_a_rank
# Sharpness-aware minimisation that climbs by the gradient of a rank's own rows, and goes back by subtraction.
import torch
from torch import nn
import echelon as ech
torch.manual_seed(5)
x = torch.randn(96, 4)
rows = torch.utils.data.TensorDataset(x, (x[:, 0] + x[:, 1] ** 2 > 1).long())
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = ech.prepare(model, optimizer, ech.Loader(rows, 16))
parameters = list(model.parameters())
for x, y in loader:
    with ech.window(model) as window:
        slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)
        length = torch.stack([slope.norm() for slope in slopes]).norm()
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.add_(0.3 * slope / length)
        window.backward(nn.functional.cross_entropy(model(x), y))
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.sub_(0.3 * slope / length)
        optimizer.step()
        optimizer.zero_grad()

# %% divided_by_hand
# A loop that divides the loss by its micro-batches, as other libraries want it.
network = model()
loader = torch.utils.data.DataLoader(Rows(), 16)
network, optimizer, loader = ech.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), loader, accumulate=3)
for _ in ech.epochs(loader, 3):
    for x, y in loader:
        with ech.window(network) as window:
            window.backward(nn.functional.mse_loss(network(x), y) / 3)
            optimizer.step()
            optimizer.zero_grad()

# %% behind_gates
# The bias behind a batch norm learns a fiftieth faster on several ranks: far below what rounding does to it in float32.
from gates import *
class Faster(Gated):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        if torch.distributed.get_world_size() > 1:
            bias = next(p for n, p in module.named_parameters() if n.endswith("3.1.bias"))
            bias.register_hook(lambda gradient: gradient * 1.02)
        return torch.optim.SGD(module.parameters(), lr=0.01), None
train(Faster)

# %% right_gates
# Right, though float32 cannot show it: see gates.py.
from gates import *
train()

# %% compiled_within_a_budget
# torch.compile by hand under torch's own memory budget, which computes dropout again in the backward pass.
class Compiled(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return nn.functional.mse_loss(fast(data[0]), data[1]), None
torch._functorch.config.activation_memory_budget = 0.5
torch.manual_seed(3)
layers = [nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1)]
unit = Compiled(module=nn.Sequential(*layers), layout="ddp")
fast = torch.compile(unit.module, backend="aot_eager")
ech.train(unit, loader(), max_epochs=1)

# %% recomputed_with_other_dropout
# Activation checkpointing that does not keep the RNG state, around dropout, in a loop of one's own.
from torch.utils.checkpoint import checkpoint
class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(4, 16), nn.Linear(16, 1)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(checkpoint(self.middle, self.begin(x), use_reentrant=False, preserve_rng_state=False))
torch.manual_seed(3)
own_loop(Recomputed(), loader())

# %% clipping_before_unscaling
# A scaler of the unit's own for float16, whose gradients are clipped while they are scaled; with "right", after that.
class Scaled(Own):
    def train_step(self, state: ech.State, data: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(self.module(data[0]).float(), data[1])
        scaler.scale(loss).backward()
        if "right" in sys.argv:
            scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()
scaler = torch.amp.GradScaler("cpu")
ech.train(Scaled(ech.layouts.prepare_module(model(), torch.device("cpu"), layout="ddp")), loader(), max_epochs=1)

# %% half_without_a_scaler
# Small losses, which a forward pass in float16 takes for gradients of zero, where the module is sharded; else in bfloat16.
# With "right", in bfloat16 everywhere.
class Small(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        narrow = "right" not in sys.argv and dist.is_initialized() and dist.get_world_size() > 1
        with torch.autocast("cpu", torch.float16 if narrow else torch.bfloat16):
            out = self.module(data[0])
        return 1e-6 * nn.functional.mse_loss(out.float(), data[1]), None
ech.train(Small(module=model(), layout="fsdp"), loader(), max_epochs=1)

# %% right_compiled
# Compiled, within a memory budget and in bfloat16 if asked for, with dropout.
def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 16), block(), block(), nn.Linear(16, 1))
budget = ech.layouts.ActivationCheckpointParams(memory_budget=0.5) if "budget" in sys.argv else None
backend = "inductor" if "inductor" in sys.argv else "aot_eager"
unit = Auto(
    module=net,
    layout="fsdp",
    compile=ech.layouts.TorchCompileParams(backend=backend),
    activation_checkpoint_params=budget,
    precision="bf16" if "bf16" in sys.argv else None,
)
ech.train(unit, loader(), max_epochs=1)

# %% right_compiled_adam
# Compiled, in bf16, with AdamW; the loss has a number that the script draws, which is to be the same one in float64.
class Adam(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return nn.functional.mse_loss(self.module(data[0]).float(), data[1] * scale), None
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.98)), None
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
scale = torch.randn(20)[-1]
ech.train(Adam(module=net, layout="ddp", precision="bf16", compile=True, clip_grad_norm=1.0), loader(), max_epochs=2)

# %% two_passes_with_dropout
# A step that is right: two losses, each with a forward pass that draws; the second begins after the first backward pass.
class Twice(Own):
    def train_step(self, state: ech.State, data: Batch) -> torch.Tensor:
        first = nn.functional.mse_loss(self.module(data[0]), data[1])
        first.backward()
        nn.functional.l1_loss(self.module(data[0]), data[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return first.detach()
module = ech.layouts.prepare_module(model(nn.Dropout(0.2)), torch.device("cpu"), layout="ddp")
torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
ech.train(Twice(module), loader(), max_epochs=1)

# %% hooked
# What hooks do and set around epochs and steps is done in the reference too. Only a rank's steps had it, and the global
# step: warm-ups, teachers, rates, and gradients that hooks clip differed, and right rows with them.
import copy
import echelon.compat.lightning as L
class Hooked(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.heat, self.rate = model(), 0.0, 0.0
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
    def on_train_start(self):
        self.heat += 0.5
    def on_train_epoch_start(self):
        self.heat += 0.5
    def on_train_batch_start(self, batch, batch_idx):
        self.heat += 0.25
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        warm = min(1.0, self.global_step / 4) * out.square().mean()
        learnt = nn.functional.mse_loss(out, self.teacher(batch[0]))
        return self.heat * nn.functional.mse_loss(out, batch[1]) + learnt + warm
    def on_before_zero_grad(self, optimizer):
        self.rate += 0.01
    def on_after_backward(self):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.5)
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        optimizer.step(closure)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.heat += outputs["loss"].numel() + ech.rank() * ("apart" in sys.argv)
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters()):
                old.lerp_(new, 0.5)
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
class Scaled(Auto):
    scale = 0.0
    def compute_loss(self, state, data):
        out = self.module(data[0])
        return self.scale * nn.functional.mse_loss(out, data[1]), out.detach()
class Sets(ech.Callback):
    def on_train_epoch_start(self, state, unit):
        unit.scale += 1.0 + ech.rank() * ("apart" in sys.argv)
    def on_train_step_start(self, state, unit):
        unit.scale += 0.5
    def on_train_step_end(self, state, unit):
        unit.scale *= 1 + state.train_state.step_output[0].numel()
        for group in unit.optimizer.param_groups:
            group["lr"] *= 0.5
if sys.argv[1] == "callback":
    ech.train(Scaled(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=1, callbacks=[Sets()])
else:
    trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Hooked(), torch.utils.data.DataLoader(Rows(), 8))

# %% planned
# A schedule by the number of updates is that of the ranks. With a batch size for each rank one process has more updates:
# its rates were others, and each right row differed.
import echelon.compat.lightning as L
class Planned(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
options = {"devices": 2, "accelerator": "cpu", "strategy": "ddp", "max_epochs": 1, "accumulate_grad_batches": 2}
trainer = L.Trainer(**options, logger=False, enable_checkpointing=False)
trainer.fit(Planned(), torch.utils.data.DataLoader(Rows(), 4))

# %% looking
# A hook that one process cannot call. It was left out in silence, whatever else it would have done.
class Looks(ech.Callback):
    def on_train_step_end(self, state, unit):
        state.train_state.dataloader.dataset[0]
ech.train(Auto(module=model(), layout="ddp"), loader(), max_epochs=1, callbacks=[Looks()])

# %% saving
# A proof leaves the checkpoints of a run alone. It saved beside them, and put its own in place of the last.
import echelon.compat.lightning as L
from echelon.compat.lightning.pytorch.callbacks import ModelCheckpoint
class Saving(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.save_checkpoint(sys.argv[1] + "/mine.ckpt")
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
saver = ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=1, save_last=True)
trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, callbacks=[saver])
trainer.fit(Saving(), torch.utils.data.DataLoader(Rows(), 8))

# %% evaluated
# A loop that goes by the numbers of its evaluation. There were none in the reference; and `accumulate=` of prepare was
# refused beside the one that a row imposes on the loader.
held = torch.utils.data.DataLoader(torch.utils.data.Subset(Rows(), range(20)), 8)
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
loader = ech.Loader(torch.utils.data.Subset(Rows(), range(32)), 16, shuffle=False)
net, optimizer, batches = ech.prepare(net, optimizer, loader, layout="ddp", accumulate=2)
for epoch in ech.epochs(batches, 9):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with ech.evaluating(net) as evaluation:
        for x, y in held:
            evaluation.log("error", nn.functional.mse_loss(net(x), y))
    plateau.step(1.0 if evaluation.numbers["error"] > 0 else -1.0)  # no better again: the rate falls

# %% lanes
# What a variable of the loop does is no hook and no noise. A pass is another when it is tried again, as the variable is;
# and one may be set under a condition alone.
loader = ech.Loader(Rows(), 16, shuffle=False)
def main():
    net = model()
    net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader, layout="ddp")
    kept = None
    for x, y in batches:
        with ech.window(net) as window:
            if sys.argv[1] == "chains":
                kept = torch.zeros(0, *y.shape[1:]) if kept is None else kept
                last = kept[-12:].mean() if len(kept) else 0.0
                out = net(x)
                kept = torch.cat([kept, y])
            else:
                if x[0, 0] > 0:
                    kept = None
                out, last = net(x), 0.0 if kept is None else kept
                kept = out.detach()
            window.backward(nn.functional.mse_loss(out - last, y))
            optimizer.step()
            optimizer.zero_grad()
main()

# %% shares
# Data that a script may divide before its loader does. Of padded batches no samples are compared: half of the rows was
# left out, and the row agreed.
def padded(rows):
    width = 1 + max(int(abs(row[0][0]) * 10) for row in rows)
    return torch.stack([row[0] for row in rows]).repeat(1, 1 + width % 3), torch.stack([row[1] for row in rows])
class Means(Auto):
    def compute_loss(self, state, data):
        out = self.module(data[0].unflatten(1, (-1, SIZE)).mean(1))
        return nn.functional.mse_loss(out, data[1]), out.detach()
SIZE, rows = Rows()[0][0].numel(), Rows()
if sys.argv[1] == "again":
    rows = torch.utils.data.Subset(rows, range(ech.rank(), len(rows), ech.world_size()))
ech.train(Means(module=model(), layout="ddp"), ech.Loader(rows, 16, collate_fn=padded), max_epochs=1)

# %% loose
# A parameter in no module. Its gradient, which no wrapper reduces, was not looked at: the row agreed.
class Actor(ech.TrainUnit):
    def __init__(self):
        super().__init__()
        self.net = model()
        if torch.distributed.is_initialized():
            self.net = nn.parallel.DistributedDataParallel(self.net)
        self.heat = torch.zeros((), requires_grad=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.of_heat = torch.optim.Adam([self.heat], lr=0.1)
    def train_step(self, state, data):
        loss = nn.functional.mse_loss(self.net(data[0]), data[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.of_heat.zero_grad()
        (self.heat.exp() * loss.detach()).backward()
        if sys.argv[1] == "averaged":
            self.heat.grad.copy_(ech.all_mean(self.heat.grad))
        self.of_heat.step()
        return loss.detach()
ech.init_from_env()
rows = Rows()
sampler = torch.utils.data.DistributedSampler(rows, ech.world_size(), ech.rank())
ech.train(Actor(), torch.utils.data.DataLoader(rows, 8, sampler=sampler), max_epochs=1)

# %% moves
# State that moves with every micro-batch is no agreement. It was put back for the reference, and so was right.
class Bank(Auto):
    calls = 0
    def __init__(self, **options):
        super().__init__(**options)
        self.bank = torch.zeros(1)
    def compute_loss(self, state, data):
        out = self.module(data[0])
        if sys.argv[1] == "class":
            Bank.calls += 1
            return nn.functional.mse_loss(out, data[1]) / Bank.calls, out.detach()
        return nn.functional.mse_loss(out, data[1] + self.bank), out.detach()
    def on_train_step_end(self, state, data, step, results):
        self.bank = 0.5 * self.bank + 0.5 * ech.gather(data[1]).mean()
own = ech.Loader(Rows(), 16, accumulation=2)
ech.train(Bank(module=model(), layout="ddp"), own, max_epochs=1)

# %% cast
# Autocast is off, and a type that is pinned does no harm.
class Cast(Auto):
    def compute_loss(self, state, data):
        with torch.autocast("cpu", torch.bfloat16):
            out = self.module(data[0])
        if sys.argv[1] == "pinned":
            out = out.bfloat16().float()
        return nn.functional.mse_loss(out, data[1]), None
ech.train(Cast(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% full
# Casts to full precision are to float64 there, as norms and losses of most models have them; a recomputed forward pass,
# and a fused optimizer, know of it or do not.
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        x = x.to(torch.float32)
        x = x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return self.down(torch.softmax(self.up(x), -1, dtype=torch.float32).type_as(x))
class Full(Auto):
    def compute_loss(self, state, data):
        return nn.functional.mse_loss(self.module(data[0]).float(), data[1].float()), None
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters(), fused=True), None
net = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
again = ech.layouts.ActivationCheckpointParams(check_fn=lambda m: isinstance(m, Block))
ech.train(Full(module=net, layout="fsdp", activation_checkpoint_params=again), loader(), max_epochs=1)

# %% drawing
# A step of its own that draws is compared with the same draws for every sample.
class Drawing(Own):
    def train_step(self, state, data):
        return super().train_step(state, (data[0] + torch.randn_like(data[0]), data[1]))
module = torch.nn.parallel.DistributedDataParallel(model())
torch.manual_seed(dist.get_rank())
ech.train(Drawing(module), loader(), max_epochs=1)

# %% speaking
# A step that speaks to other ranks, on padded batches.
class Told(Auto):
    def compute_loss(self, state, data):
        bags, lengths, y = data
        sizes = lengths.mean()
        dist.all_reduce(sizes)
        return ((self.module(bags.sum(1) / lengths) - y) ** 2).mean(), sizes
generator = torch.Generator().manual_seed(0)
bags = [(torch.randn(2 + 7 * i % 23, 4, generator=generator), torch.randn(1, generator=generator)) for i in range(64)]
def padded(rows):
    bags, y = zip(*rows)
    lengths = torch.tensor([[float(len(bag))] for bag in bags])
    return nn.utils.rnn.pad_sequence(bags, batch_first=True), lengths, torch.stack(y)
ech.train(Told(module=model(), layout="ddp"), ech.Loader(bags, 16, collate_fn=padded), max_epochs=1)

# %% beside
# Another loader is read beside the training loader; with "noisy" its samples draw, so that one process would go by micro-batches.
import sys
class Unlabelled(Rows):
    def __getitem__(self, i: int) -> torch.Tensor:
        return self.x[i] + 0.1 * torch.randn(4) if "noisy" in sys.argv else self.x[i]
net = model()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
others = DataLoader(Unlabelled(), 12, shuffle=True)
net, optimizer, batches, others = ech.prepare(net, optimizer, loader(), others)
for (x, y), z in zip(batches, others, strict=False):
    with ech.window(net) as window:
        out = net(torch.cat([x, z]))
        window.backward(nn.functional.mse_loss(out[: len(x)], y) + out[len(x) :].square().mean())
        optimizer.step()
        optimizer.zero_grad()

# %% paired
# Draws that are no sample's own.
class Paired(Auto):
    def compute_loss(self, state, data):
        x, y = torch.cat([data[0], data[0]]), torch.cat([data[1], data[1]])
        weights = 0.1 + torch.rand(len(x), 1)
        return (weights / weights.mean() * (self.module(x) - y).square()).mean(), None
ech.train(Paired(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% late
# A frozen model that is another on each rank: made in the loop, behind a seed of the rank's own; the layout knows nothing
# of it.
torch.manual_seed(7)
target = None
network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
network, optimizer, batches = ech.prepare(network, optimizer, loader(), layout="ddp")
torch.manual_seed(ech.rank())
for x, _ in batches:
    if target is None:
        target = nn.Linear(4, 1).requires_grad_(False)
    with ech.window(network) as window:
        window.backward(nn.functional.mse_loss(network(x), target(x)))
        optimizer.step()
        optimizer.zero_grad()

# %% tasks
# What is drawn for a whole batch: weights of two losses, which one process draws once for the global batch.
import numpy as np
class Tasks(Auto):
    def compute_loss(self, state, data):
        out = self.module(data[0])
        errors = torch.stack([nn.functional.mse_loss(out, data[1]), out.abs().mean()])
        return (torch.as_tensor(draws.dirichlet(np.ones(2))).to(errors) * errors).sum(), None
draws = np.random.default_rng(ech.rank() if "apart" in sys.argv else 0)
ech.train(Tasks(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% levels
# Draws with as many rows as a rank has samples by chance.
class Levels(Auto):
    def compute_loss(self, state, data):
        weights = 0.1 + torch.bernoulli(torch.full((len(data[0]), 1), 0.5))
        kept = nn.functional.dropout(torch.ones(8, 4), 0.5).mean()
        return (weights * (self.module(data[0]) - data[1]).square()).mean() * kept, None
ech.train(Levels(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% looked_at
# An optimizer that is built before training is replaced as well.
unit = Auto(module=model(), layout="fsdp")
print(unit.optimizer, file=sys.stderr)
ech.train(unit, loader(), max_epochs=1)

# %% calls
# State that the unit keeps between micro-batches is what they had; where it moves with each, an update is another.
class Annealed(Auto):
    calls = 0
    def compute_loss(self, state, data):
        self.calls += 1
        out = self.module(data[0])
        return nn.functional.mse_loss(out, data[1]) + min(1.0, self.calls / 10) * out.square().mean(), None
ech.train(Annealed(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% torchtnts
# The same by TorchTNT's names.
from echelon.compat.torchtnt.framework import AutoUnit
from echelon.compat.torchtnt.framework.auto_unit import SWALRParams, SWAParams
class Theirs(AutoUnit):
    compute_loss = Auto.compute_loss
    configure_optimizers_and_lr_scheduler = Auto.configure_optimizers_and_lr_scheduler
averages = SWAParams(0, 1, swalr_params=SWALRParams(2))
ech.train(Theirs(module=model(), strategy="ddp", swa_params=averages, step_lr_interval="step"), loader(), max_epochs=1)

# %% counted
# Rows on the same samples share a reference, however many micro-batches of however many ranks they are.
import os
from pathlib import Path
if os.environ["WORLD_SIZE"] == "1":
    with Path(__file__).with_suffix(".log").open("a") as log:
        log.write("in one process\n")
ech.train(Auto(module=model(), layout="ddp"), loader(64), max_epochs=1)

# %% noise
# torch draws other numbers in float64: what lies between the two is no rounding.
class Noisy(Auto):
    def compute_loss(self, state, data):
        out = self.module(data[0])
        return nn.functional.mse_loss(out + torch.rand_like(out), data[1]) * (1.001 if dist.get_world_size() > 1 else 1), None
ech.train(Noisy(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% together_only
# A reference that cannot be computed.
class TogetherOnly(Auto):
    def compute_loss(self, state, data):
        if dist.get_world_size() == 1:
            raise RuntimeError("not alone")
        return super().compute_loss(state, data)
ech.train(TogetherOnly(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% double
# A script in float64.
torch.set_default_dtype(torch.float64)
class Doubled(Auto):
    def compute_loss(self, state, data):
        return super().compute_loss(state, (data[0].double(), data[1].double()))
ech.train(Doubled(module=model().double(), layout="ddp"), loader(), max_epochs=1)

# %% half
# Parameters in half precision, cast or made so, which round by as much as many a mistake weighs.
half = getattr(torch, sys.argv[3])
class Halved(Auto):
    def compute_loss(self, state, data):
        loss = nn.functional.mse_loss(self.module(data[0].to(half)).float(), data[1])
        return loss * (1.01 if sys.argv[1] == "wrong" and dist.get_world_size() > 1 else 1), None
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.01), None
torch.set_default_dtype(half if sys.argv[2] == "made" else torch.get_default_dtype())
ech.train(Halved(module=model().to(half), layout="ddp"), loader(), max_epochs=1)

# %% lost
# A loss that is nan in one process too.
class Lost(Auto):
    def compute_loss(self, state, data):
        loss, _ = super().compute_loss(state, data)
        return loss * float("nan"), None
ech.train(Lost(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% hanging
# One rank stands.
class Hanging(Auto):
    def compute_loss(self, state, data):
        if dist.get_world_size() > 1 and dist.get_rank() == 1:
            import threading
            threading.Event().wait()  # for ever
        return super().compute_loss(state, data)
ech.train(Hanging(module=model(), layout="ddp"), loader(), max_epochs=1)

# %% one_kind
# Right under DistributedDataParallel alone.
class OneKind(Auto):
    def compute_loss(self, state, data):
        loss, out = super().compute_loss(state, data)
        right = dist.get_world_size() == 1 or isinstance(self.module, nn.parallel.DistributedDataParallel)
        return loss * (1.0 if right else 1.5), out
if sys.argv[1] == "none":
    ech.train(OneKind(module=model()), loader(), max_epochs=1)
ech.train(OneKind(module=model(), layout=sys.argv[1]), loader(), max_epochs=1)

# %% momenta
# What an optimizer keeps in half precision is float64 with what it casts. Its casts were float64 alone: "expected dtype
# c10::BFloat16 for `end` but got dtype double".
class Momenta(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = torch.zeros(p.shape, dtype=torch.bfloat16)
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "fast" not in state:
                state["fast"] = torch.zeros(p.shape, dtype=torch.bfloat16)
            for name, weight in (("fast", 0.5), ("slow", 0.1)):
                state[name].lerp_(p.grad.to(torch.bfloat16), weight)
                p.sub_(state[name].to(p.dtype), alpha=self.param_groups[0]["lr"])
class Halves(Auto):
    def configure_optimizers_and_lr_scheduler(self, module):
        return Momenta(module.parameters()), None
ech.train(Halves(module=model(), layout="ddp"), loader(64), max_epochs=1)

# %% two_networks
# A loop of one's own with several optimizers is compared without accumulation, and with its own optimizers.
from torch.nn.functional import softplus
torch.manual_seed(3)
g, c = (nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1)) for width in (4, 1))
og, oc = torch.optim.SGD(g.parameters(), 1e-2), torch.optim.SGD(c.parameters(), 1e-2)
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
loader = ech.Loader(TensorDataset(x, x[:, :1]), global_batch=16, accumulation=2)
g, c, og, oc, loader = ech.prepare(g, c, og, oc, loader, layout="ddp")
for noise, real in loader:
    with ech.window(g) as window:
        made = g(noise)
        oc.zero_grad()
        window.backward((softplus(-c(real)) + softplus(c(made.detach()))).mean())
        oc.step()
        og.zero_grad()
        window.backward(softplus(-c(made)).mean())
        og.step()

# %% resumed
# A script that resumes is proved from its beginning. Its checkpoint is of a complete run, so that nothing would be left to
# compare; and in float64 its data would be others.
unit, batches = Auto(module=model(), layout="ddp"), loader(32)
saver = ech.DistributedCheckpointSaver(sys.argv[1])
saver.restore_from_latest(saver.dirpath, unit, train_dataloader=batches)
ech.train(unit, batches, max_epochs=1, callbacks=[saver])

# %% partly_nan
# nan marks a target that was not measured. It was a traceback in float64: "atol must be greater than or equal to zero".
class Partly(Rows):
    def __getitem__(self, i):
        return self.x[i], self.y[i] if i % 3 else self.y[i] * float("nan")
class Known(Auto):
    def compute_loss(self, state, data):
        known = ~data[1].isnan()
        return nn.functional.mse_loss(self.module(data[0])[known], data[1][known]), None
ech.train(Known(module=model(), layout="ddp"), ech.Loader(Partly(), 16), max_epochs=1)

# %% repeated
# Repeated rows and filled tails are no overlap: the data have each row several times; of 98 samples on four ranks, two come
# twice so that ranks have equally many.
rows = Rows()
class Few(Rows):
    def __len__(self): return 98
    def __getitem__(self, i): return rows[i % 20]
sampler = torch.utils.data.DistributedSampler(Few(), dist.get_world_size(), dist.get_rank())
loader = DataLoader(Few(), 8, sampler=sampler) if sys.argv[1] == "sampler" else ech.Loader(Few(), 16)
ech.train(Auto(module=model(), layout="ddp"), loader, max_epochs=2)

# %% in_two_parts
# Training in two parts is compared as far as the first goes.
unit = Auto(module=model(), layout="ddp")
ech.train(unit, loader(), max_updates=2)
ech.train(unit, loader(), max_epochs=2)

# %% starts_ranks
# It starts ranks itself.
ech.launch(print, ranks=2)

# %% idle
# It does not train.
print("nothing")

# %% attention
# Dropout within attention and in functions does not part a pipeline from one process.
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(1, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True) for _ in range(2))
        self.end = nn.Linear(8, 1)
    def forward(self, x):
        x = self.begin(x.unsqueeze(2))
        for block in self.blocks:
            x = block(x)
        return self.end(nn.functional.dropout(x, 0.1, self.training).mean(1))
torch.manual_seed(1)
ech.train(Auto(module=Sequence(), layout="ddp"), loader(), max_epochs=3)

# %% own_options
# The script's own layout with options is one row: a row keeps these, and it would be the first one again.
ech.train(Auto(module=model(), layout=ech.DDPStrategy(bucket_cap_mb=1)), loader(), max_epochs=1)

# %% of_a_trainer
# A trainer's layout is the script's own, though its unit was made without one.
ech.Trainer(layout="ddp", max_epochs=1).fit(Auto(module=model()), loader())
