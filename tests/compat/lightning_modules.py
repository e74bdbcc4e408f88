"""Modules such as Lightning's tutorials have, in words of our own, and what plain PyTorch makes of each in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon.compat.lightning.pytorch import LightningModule

Weights = dict[str, torch.Tensor]
GLOBAL = 8  # rows of a global batch
SAVING: dict[str, Any] = {"logger": False, "accelerator": "cpu"}  # options of a Trainer
QUIET: dict[str, Any] = {**SAVING, "enable_checkpointing": False}


def two_batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)


def images(rows: int = 32, seed: int = 1) -> TensorDataset:
    """Small pictures whose brightest quarter is their class."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(rows, 1, 6, 6, generator=generator, dtype=torch.float64)
    quarters = F.avg_pool2d(pictures, 3).flatten(1)
    return TensorDataset(pictures, quarters.argmax(1))


def words(rows: int = 32, length: int = 6, seed: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(0, 11, (rows, length + 1), generator=generator))


class Classifier(LightningModule):
    """Calls itself; a schedule by step."""

    def __init__(self, lr: float = 0.1, hidden: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, 4)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", (logits.argmax(1) == y).double().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log_dict({"val_loss": F.cross_entropy(self(x), y), "val_acc": (self(x).argmax(1) == y).double().mean()})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Autoencoder(LightningModule):
    """Calls its parts and never itself, and gives a dict; a schedule by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 10), nn.ReLU(), nn.Linear(10, 3)).double()
        self.decoder = nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 36)).double()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.flatten(1)) * self.scale

    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
        flat = batch[0].flatten(1)
        codes = self.encoder(flat) * self.scale
        loss = F.mse_loss(self.decoder(codes), flat) + 0.01 * self(batch[0]).square().mean()
        self.log("train_loss", loss)
        return {"loss": loss, "codes": codes.detach()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class Transformer(LightningModule):
    """A small language model."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
        return self.head(self.blocks(self.embedding(tokens), mask=mask, is_causal=True))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class GAN(LightningModule):
    """Two networks, two optimizers, stepped by hand. Its noise is part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 36)).double()
        self.discriminator = nn.Sequential(nn.Linear(36, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1)).double()

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pictures = batch[0].flatten(1)
        noise = pictures[:, :3]
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        judged = self.discriminator(self(noise))
        loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        real, fake = self.discriminator(pictures), self.discriminator(self.generator(noise).detach())
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        loss = (loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))) / 2
        self.log("d_loss", loss, prog_bar=True, on_epoch=True)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.5),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.5),
        ], []


def made(kind: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return kind()


def data_of(kind: Any) -> TensorDataset:
    return words() if kind is Transformer else images()


def loader_of(kind: Any, ranks: int) -> DataLoader[Any]:
    return DataLoader(data_of(kind), batch_size=GLOBAL // ranks)


def batches(kind: Any) -> Iterator[list[torch.Tensor]]:
    dataset = data_of(kind)
    for start in range(0, len(dataset), GLOBAL):
        yield [tensor[start : start + GLOBAL] for tensor in dataset.tensors]


def plainly(kind: Any, epochs: int) -> Weights:
    """The weights after so many epochs in a loop as everybody writes it, without a Trainer."""
    module = made(kind)
    module.log = module.log_dict = lambda *_, **__: None
    if kind is GAN:
        return _gan_plainly(module, epochs)
    chosen = module.configure_optimizers()
    schedule, by_step = None, False
    if kind is Classifier:
        (optimizer,), ((options),) = chosen
        schedule, by_step = options["scheduler"], True
    elif isinstance(chosen, dict):
        optimizer, schedule = chosen["optimizer"], chosen["lr_scheduler"]
    else:
        optimizer = chosen
    for _ in range(epochs):
        for batch in batches(kind):
            made_of = module.training_step(batch) if kind is Autoencoder else module.training_step(batch, 0)
            optimizer.zero_grad()
            (made_of["loss"] if isinstance(made_of, dict) else made_of).backward()
            optimizer.step()
            if by_step:
                schedule.step()
        if schedule is not None and not by_step:
            schedule.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


def _gan_plainly(module: Any, epochs: int) -> Weights:
    (first, second), _ = module.configure_optimizers()
    generator, discriminator = module.generator, module.discriminator
    for _ in range(epochs):
        for pictures, _ in batches(GAN):
            flat = pictures.flatten(1)
            judged = discriminator(generator(flat[:, :3]))
            generator.zero_grad()
            F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)).backward()
            first.step()
            discriminator.zero_grad()
            real, fake = discriminator(flat), discriminator(generator(flat[:, :3]).detach())
            loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            ((loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))) / 2).backward()
            second.step()
    return {name: value.detach() for name, value in module.state_dict().items()}
