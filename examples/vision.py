"""Classify images of a folder: augmentation, batch norm over all ranks, an average of the weights (EMA), tracked numbers.

    echelon run --ranks 2 examples/vision.py
    echelon run --ranks 2 --track wandb examples/vision.py      also sends its metrics there; or mlflow, trackio, tensorboard, csv
    echelon run --ranks 2 examples/vision.py --layout fsdp --data ~/images

The folder has one folder for each class. Without --data the digits of scikit-learn are written into one. Evaluations use an
exponential moving average of the weights. Started again, the script goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech

Batch = tuple[torch.Tensor, torch.Tensor]  # images (B, C, H, W), labels (B,)


def write_digits(folder: Path) -> None:
    """train/0/0.npy, ..., test/9/1796.npy; rank 0 writes them, and the other ranks wait for it"""
    from sklearn.datasets import load_digits

    if ech.is_main() and not (folder / "test" / "9").is_dir():
        digits = load_digits()
        for i, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            path = folder / ("test" if i % 4 == 0 else "train") / str(label) / f"{i}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, (image * 15).astype(np.uint8)[None])
    ech.all_mean(0.0)


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """FOLDER/CLASS/NAME.npy, each an image of bytes (C, H, W). For PNGs, replace np.load by `np.asarray(PIL.Image.open(path))`"""

    def __init__(self, folder: Path, *, augmented: bool) -> None:
        self.paths, self.augmented = sorted(folder.glob("*/*.npy")), augmented  # sorted, to be the same on every rank
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        image = torch.from_numpy(np.load(path)).to(torch.get_default_dtype()) / 255
        if self.augmented:  # shifted by at most a pixel; each rank draws its own numbers, and a resumed run draws the same
            down, right = torch.randint(3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, down : down + image.shape[1], right : right + image.shape[2]]
        return image, self.classes.index(path.parent.name)


def layer(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def network(channels: int, classes: int, width: int) -> nn.Module:
    """Images (B, C, H, W) -> logits (B, classes)"""
    layers = layer(channels, width), layer(width, width), nn.MaxPool2d(2), layer(width, 2 * width), layer(2 * width, 2 * width)
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes))
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)  # statistics over the images of all ranks


class Classify(ech.AutoUnit[Batch]):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = data
        logits = self.module(images)
        # The mean over all ranks' samples goes to metrics.jsonl, the report and trackers; in evaluations as "eval_accuracy".
        state.log("accuracy", (logits.argmax(1) == labels).double().mean())
        return F.cross_entropy(logits, labels), logits

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.05), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder with train/CLASS/*.npy and test/CLASS/*.npy; default: digits")
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1 or zero2")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--toy", action="store_true", help="a narrow network: seconds")
    parser.add_argument("--checkpoints", default="runs/vision/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    folder = args.data or Path(args.checkpoints).parent / "digits"
    if args.data is None:
        write_digits(folder)
    train_set, test_set = Images(folder / "train", augmented=True), Images(folder / "test", augmented=False)
    module = network(len(test_set[0][0]), len(test_set.classes), width=8 if args.toy else 32)
    unit = Classify(module=module, layout=args.layout, ema=0.98)
    numbers = ech.train(
        unit,
        ech.Loader(train_set, global_batch=64),
        max_epochs=args.epochs,
        eval=ech.Loader(test_set, global_batch=128, shuffle=False),
        checkpoints=ech.Checkpoints(args.checkpoints, best=("eval_accuracy", "max")),
    )
    if ech.is_main():
        loss, accuracy = numbers["eval_loss"], numbers["eval_accuracy"]
        print(f"held-out loss {loss:.3f} with averaged weights, accuracy {accuracy:.3f}, on {len(test_set)} images")


if __name__ == "__main__":
    main()
