"""A loop for Accelerate, as its page has it: nothing in it knows of echelon.

accelerate_loop.py FOLDER: trains two epochs, saves after the first, and leaves what it trained in FOLDER/out.pt. Started once
more with --resume it goes on from there.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, EACH, ACCUMULATION = 2, 2, 2


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 4, generator=generator)
    return TensorDataset(rows, rows.sum(1, keepdim=True).sin())


def held_out() -> TensorDataset:
    """An odd number: the last batch is shared unevenly, and gather_for_metrics has to know."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(11, 4, generator=generator)
    return TensorDataset(rows, rows.sum(1, keepdim=True).sin())


def build_model() -> nn.Module:
    set_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATION)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(dataset(), EACH), DataLoader(held_out(), EACH), schedule
    )
    first = 0
    if args.resume:
        accelerator.load_state(args.folder / "state")
        first = 1
    for epoch in range(first, EPOCHS):
        model.train()
        for rows, targets in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(rows), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(args.folder / "state")
    model.eval()
    predictions = []
    for rows, _ in eval_loader:
        with torch.no_grad():
            predictions.append(accelerator.gather_for_metrics(model(rows)))
    accelerator.print(f"{accelerator.num_processes} processes have trained")
    if accelerator.is_main_process:
        parameters = {name: p.detach().cpu() for name, p in accelerator.unwrap_model(model).named_parameters()}
        torch.save((parameters, torch.cat(predictions).cpu()), args.folder / "out.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
