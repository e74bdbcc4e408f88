"""python lightning_module.py NAME: a LightningModule trained by Lightning's lines, with its import changed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from echelon.compat.lightning import Trainer, seed_everything
from tests.compat import lightning_modules as modules


def main() -> None:
    seed_everything(5)
    kind = getattr(modules, sys.argv[1])
    trainer = Trainer(max_epochs=2, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(modules.made(kind), modules.loader_of(kind, trainer.world_size))


if __name__ == "__main__":
    main()
