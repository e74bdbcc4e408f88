"""A script for transformers' Trainer, as its pages have it: nothing in it knows of echelon.

transformers_trainer.py --output_dir FOLDER ...: takes every argument of TrainingArguments, trains, evaluates, predicts, saves
the model to FOLDER/model, and leaves numbers in FOLDER/numbers.pt. With --resume_from_checkpoint it goes on from its newest one.
"""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

ROWS, LENGTH = 22, 8


class Rows(Dataset):
    """Rows of tokens of different lengths; what is padding has the label -100."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 50, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        seen = torch.arange(LENGTH) < self.lengths[at]
        ids = self.ids[at]
        return {
            "input_ids": ids,
            "attention_mask": seen.long(),
            "labels": ids.masked_fill(~seen, -100),
            "number": torch.tensor(at),
        }


def build_model() -> LlamaForCausalLM:
    set_seed(3)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=1, vocab_size=50, max_position_embeddings=32))


def accuracy(prediction) -> dict[str, float]:
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    counts = labels != -100
    return {"accuracy": float((guesses == labels)[counts].mean()), "labels": int(np.sum(counts))}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    with args.main_process_first(desc="making the data"):
        train_set, eval_set = Rows(ROWS, 1), Rows(7, 2)
    trainer = Trainer(model=build_model(), args=args, train_dataset=train_set, eval_dataset=eval_set, compute_metrics=accuracy)
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint is not None)
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    predictions = trainer.predict(Rows(5, 3))
    trainer.save_model(f"{args.output_dir}/model")
    trainer.save_state()
    if trainer.is_world_process_zero():
        numbers = {
            "updates": result.global_step,
            "loss": result.training_loss,
            "metrics": metrics,
            "predictions": torch.from_numpy(predictions.predictions),
            "predicted": predictions.metrics,
            "history": trainer.state.log_history,
        }
        torch.save(numbers, f"{args.output_dir}/numbers.pt")


if __name__ == "__main__":
    main()
