"""Fine-tune a causal language model of Hugging Face, read from a folder in parts and written for `from_pretrained`."""

from __future__ import annotations

import argparse
import contextlib
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf

import echelon as ech
from echelon.data import split_files

BYTES = 256  # the vocabulary of a model without a tokenizer
Batch = dict[str, torch.Tensor]  # "input_ids" and "labels": (B, T)


def small_config(name: str, width: int) -> tf.PretrainedConfig:
    """GPT-2 ties its head to its embedding; Llama and Qwen do not, unless their config says so."""
    ends = {"vocab_size": BYTES, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        return tf.GPT2Config(n_embd=width, n_layer=2, n_head=4, n_positions=512, **ends)
    size = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds = {"llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config, "mixtral": tf.MixtralConfig}
    return kinds[name](**size, num_key_value_heads=2, **ends)


def build(folder: Path, width: int) -> torch.nn.Module:
    """The model; if there is a folder, without memory for its weights, which each rank then reads its own part of."""
    config = tf.AutoConfig.from_pretrained(folder) if folder.is_dir() else small_config(folder.name, width)
    with ech.on_meta(on_device=True) if folder.is_dir() else contextlib.nullcontext():
        # float32, also of weights that are saved as bf16: small updates would be lost in them
        return tf.AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())


def rows_of(tokenizer: Any, files: list[Path], context: int, most: int) -> list[Batch]:
    """The files, as at most so many rows of tokens that follow one another, and for each token the next one: (context,) both"""
    text = "\n".join(path.read_text(errors="replace") for path in files)[: 8 * most * context]
    ids = torch.tensor(list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"])
    starts = range(0, min(most * context, len(ids) - context), context)
    return [{"input_ids": ids[at : at + context], "labels": ids[at + 1 : at + context + 1]} for at in starts]


class FineTune(ech.AutoUnit[Batch]):
    """Next-token prediction: nats per token."""

    weight_unit = "tokens"
    lr = 2e-5

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        logits = self.module(input_ids=data["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten()), None

    def weight(self, data: Batch) -> int:
        return data["labels"].numel()

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=self.lr, weight_decay=0.0), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama", help="a local folder; or llama, qwen2, gpt2, mixtral: small and untrained")
    parser.add_argument("--data", type=Path, help="a folder of text files; default: Python's own source")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_finetune/model"), help="where the model is written")
    parser.add_argument(
        "--layout", default="fsdp", help="none, ddp, fsdp, hsdp, zero1, zero2, tp, cp, pp; or axes: dp_shard=2,tp=2, ep=2"
    )
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--toy", action="store_true", help="a narrower model and short rows: seconds")
    parser.add_argument("--checkpoints", default="runs/hf_finetune/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    context, width = (32, 32) if args.toy else (128, 128)
    folder, pattern = (args.data, "**/*") if args.data else (Path(sysconfig.get_paths()["stdlib"]), "*.py")
    train_files, held_out = split_files(folder, pattern)
    source = Path(args.model).expanduser()
    tokenizer = tf.AutoTokenizer.from_pretrained(source) if (source / "tokenizer_config.json").exists() else None
    train_loader = ech.Loader(rows_of(tokenizer, train_files, context, 4096), global_batch=16)
    eval_loader = ech.Loader(rows_of(tokenizer, held_out, context, 128), global_batch=16, shuffle=False)

    unit = FineTune(module=build(source, width), layout=args.layout, clip_grad_norm=1.0)
    if source.is_dir():
        ech.DistributedCheckpointSaver.restore(source, unit)  # each rank reads its own part of the weights
    else:
        unit.lr = 1e-3
    ech.evaluate(unit, eval_loader)
    before = unit.eval_loss
    ech.train(unit, train_loader, max_updates=args.updates, checkpoints=args.checkpoints)
    ech.evaluate(unit, eval_loader)
    ech.save_pretrained(unit, args.out)  # every rank calls it
    if ech.is_main():
        if tokenizer is not None:
            tokenizer.save_pretrained(args.out)
        print(f"held-out loss {before:.3f} -> {unit.eval_loss:.3f} nats per token; written to {args.out}")


if __name__ == "__main__":
    main()
