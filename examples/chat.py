"""Instruction tuning with LoRA: conversations through a chat template, a loss over the answers alone, an adapter at the end.

    echelon run --ranks 2 examples/chat.py
    echelon run --ranks 8 examples/chat.py --model ~/models/Qwen2.5-0.5B-Instruct --layout fsdp

Without --model it makes a tiny Llama and a byte tokenizer, and teaches the model which numbers are even. Started again, the
script goes on from its newest checkpoint. Needs `pip install transformers peft`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import peft
import tokenizers as tk
import torch
import transformers as tf

import echelon as ech

Batch = dict[str, torch.Tensor]  # "input_ids", "attention_mask" and "labels": (B, T)
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_of(model: str | None) -> Any:
    if model:
        return tf.AutoTokenizer.from_pretrained(model)
    words = ["<|end|>", "<|user|>", "<|assistant|>", *sorted(tk.pre_tokenizers.ByteLevel.alphabet())]
    made = tk.Tokenizer(tk.models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = tk.pre_tokenizers.ByteLevel(add_prefix_space=False), tk.decoders.ByteLevel()
    made.add_special_tokens(words[:3])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>", padding_side="right", chat_template=TEMPLATE
    )


def base_of(model: str | None, vocabulary: int) -> Any:
    """The frozen base model, the same on every rank and at every start."""
    dtype = torch.get_default_dtype()
    if model:
        return tf.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    ech.seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Wide initial values, since an untrained base must be of some use.
    config = tf.LlamaConfig(
        vocab_size=vocabulary, initializer_range=0.1, bos_token_id=None, eos_token_id=0, pad_token_id=0, **size
    )
    return tf.AutoModelForCausalLM.from_config(config, dtype=dtype)


def asked(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Is {number} even?"}]


def sample(tokenizer: Any, number: int) -> dict[str, list[int]]:
    """One conversation; the labels of its prompt do not count."""
    answer = {"role": "assistant", "content": "No, it is odd." if number % 2 else "Yes."}
    prompt = tokenizer.apply_chat_template(asked(number), add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template([*asked(number), answer], return_dict=False)
    return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}


class Chat(ech.AutoUnit[Batch]):
    weight_unit = "tokens"

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return self.module(**data).loss, None

    def weight(self, data: Batch) -> torch.Tensor:
        return ech.count_tokens(data, next_token=True)  # answers have different lengths: a mean over tokens, not over rows

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a model and its tokenizer; default: a tiny one, untrained")
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1, zero2")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="fewer conversations: seconds")
    parser.add_argument("--checkpoints", default="runs/chat/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    tokenizer = tokenizer_of(args.model)
    numbers = torch.randperm(500, generator=torch.Generator().manual_seed(0)).tolist()
    held_out, seen = ([sample(tokenizer, i) for i in part] for part in (numbers[:50], numbers[50 : 200 if args.toy else None]))
    pad = tf.DataCollatorForSeq2Seq(tokenizer)  # labels with -100

    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    unit = Chat(module=peft.get_peft_model(base_of(args.model, len(tokenizer)), lora), layout=args.layout, clip_grad_norm=1.0)
    ech.train(
        unit,
        ech.Loader(seen, global_batch=16, collate_fn=pad),
        max_epochs=args.epochs,
        eval=ech.Loader(held_out, global_batch=16, shuffle=False, collate_fn=pad),
        checkpoints=ech.Checkpoints(args.checkpoints, save_options=ech.callbacks.SaveOptions(only_trained=True)),
    )
    folder = ech.save_pretrained(unit, Path(args.checkpoints).parent / "adapter")  # every rank calls it
    if ech.is_main():
        tuned = peft.PeftModel.from_pretrained(base_of(args.model, len(tokenizer)), folder)
        prompt = tokenizer.apply_chat_template(asked(777), add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = tuned.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        print(f"held-out loss {unit.eval_loss:.3f} nats per token of an answer; the adapter {folder} answers {answer!r}")


if __name__ == "__main__":
    main()
