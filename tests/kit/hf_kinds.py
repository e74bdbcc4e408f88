"""Tiny models of many kinds of transformers, each with an input and what it answers. Import this inside functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()

_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_TWO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT: dict[str, Any] = {**_TWO, "intermediate_size": 32, "vocab_size": 50, "max_position_embeddings": 32}
_GROUPED: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, **_ENDS}
_ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
_BOTH: dict[str, Any] = {
    **_ENCODER,
    "d_model": 16,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "vocab_size": 50,
    **_ENDS,
    "decoder_start_token_id": 0,
}
_IMAGE: dict[str, Any] = {**_TWO, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
_MIXTURE = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
_CONVOLUTIONS: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
_POSITIONS: dict[str, Any] = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}

KINDS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32, **_ENDS)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED)),
    "llama, tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED, tie_word_embeddings=True)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED, head_dim=8)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_GROUPED, head_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_GROUPED, head_dim=8)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GROUPED)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_GROUPED)),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_TEXT)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(**_TWO, ffn_dim=32, vocab_size=50, max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=1)
    ),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=50)),
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**_TWO, vocab_size=50, **_ENDS)),
    "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50, state_size=4)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_GROUPED, head_dim=8, **_MIXTURE)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**_TEXT)),
    "roberta": lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**_TEXT)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50, decoder_start_token_id=0)
    ),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_BOTH, max_position_embeddings=32)),
    "whisper": lambda: tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(**_BOTH, num_mel_bins=8, max_source_positions=16, max_target_positions=32)
    ),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**_IMAGE)),
    "wav2vec2": lambda: tf.Wav2Vec2ForCTC(
        tf.Wav2Vec2Config(**{**_TWO, "num_hidden_layers": 1}, intermediate_size=32, vocab_size=20, **_CONVOLUTIONS, **_POSITIONS)
    ),
    "clip": lambda: tf.CLIPModel(
        tf.CLIPConfig(text_config={**_TEXT, "projection_dim": 8}, vision_config={**_IMAGE, "projection_dim": 8}, projection_dim=8)
    ),
}


def inputs(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (2, 8), generator=generator)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    special = {
        "vit": {"pixel_values": images},
        "clip": {"input_ids": ids, "pixel_values": images},
        "wav2vec2": {"input_values": torch.randn(2, 400, generator=generator)},
        "whisper": {"input_features": torch.randn(2, 8, 32, generator=generator), "decoder_input_ids": ids},
        "t5": {"input_ids": ids, "decoder_input_ids": ids},
        "bart": {"input_ids": ids, "decoder_input_ids": ids},
    }
    return special.get(kind, {"input_ids": ids})


@torch.no_grad()
def answer(module: nn.Module, kind: str) -> torch.Tensor:
    outputs = module.eval()(**inputs(kind))
    found: torch.Tensor = outputs.logits_per_text if kind == "clip" else outputs.logits
    return found
