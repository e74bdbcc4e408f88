"""Tiny models of transformers and PEFT, built from configurations: nothing is fetched. Import this inside functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn

tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()

_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_TWO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT: dict[str, Any] = {**_TWO, "intermediate_size": 32, "vocab_size": 50, "max_position_embeddings": 32}
_GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2, **_ENDS}
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


def without_dropout(module: Any) -> Any:
    """The module, whose layers drop nothing any more."""
    for part in module.modules():
        for attribute in ("p", "dropout", "attention_dropout", "dropout_rate"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
    return module


def gpt2(**more: Any) -> nn.Module:
    """Tied ends, dropout."""
    size: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32, **_ENDS}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**{**size, **more}))


def llama(**more: Any) -> nn.Module:
    """Rotary frequencies in buffers that are not saved."""
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**TEXT, "num_key_value_heads": 1, **more}))


def auto_bf16() -> nn.Module:
    config = tf.LlamaConfig(**TEXT, num_key_value_heads=1, tie_word_embeddings=True)
    made: nn.Module = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


def bert() -> nn.Module:
    return tf.BertForMaskedLM(tf.BertConfig(**TEXT))


def t5() -> nn.Module:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50, decoder_start_token_id=0)
    )


def vit() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**_IMAGE))


def composite() -> nn.Module:
    """An encoder and a decoder with configurations of their own."""
    parts = tf.BertConfig(**TEXT), tf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    return tf.EncoderDecoderModel(tf.EncoderDecoderConfig.from_encoder_decoder_configs(*parts))


def speech() -> nn.Module:
    """Asks for the device by name; a parametrized weight; a parameter that torch.Tensor(n) makes, which nothing sees."""
    size = {**_TWO, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 20}
    return tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(**size, **_CONVOLUTIONS, **_POSITIONS))


def state_space() -> nn.Module:
    """Parameters that `torch.empty` makes and `_init_weights` alone fills."""
    return tf.MambaForCausalLM(tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50, state_size=4))


def hybrid() -> nn.Module:
    """Its second and fourth layers have attention, the others a short convolution, of which a cache holds the state."""
    size = {**TEXT, "num_hidden_layers": 4, "num_key_value_heads": 1}
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**size, layer_types=["conv", "full_attention"] * 2, pad_token_id=0))


def lora(base: Any = gpt2, **more: Any) -> nn.Module:
    options: dict[str, Any] = {"r": 2, "init_lora_weights": "gaussian"} | ({"fan_in_fan_out": True} if base is gpt2 else {})
    made: nn.Module = get_peft_model(base(), LoraConfig(**{**options, **more}))
    return made


def resized() -> nn.Module:
    """Moved, resized with values that depend on the old ones, and of another type, all after the constructor."""
    made: Any = gpt2().to("cpu")
    made.resize_token_embeddings(57, mean_resizing=True)
    return made.cpu().to(torch.device("cpu"), torch.float64)  # type: ignore[no-any-return]


MODELS = (
    gpt2,
    llama,
    auto_bf16,
    bert,
    t5,
    vit,
    composite,
    speech,
    state_space,
    lora,
    functools.partial(lora, llama, use_dora=True),
    resized,
)

# Many kinds, each with an input and what it answers.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": lambda: llama(**_GROUPED),
    "llama, tied": lambda: llama(**_GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED, head_dim=8)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_GROUPED, head_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_GROUPED, head_dim=8)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GROUPED)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_GROUPED)),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**TEXT)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(**_TWO, ffn_dim=32, vocab_size=50, max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=1)
    ),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=50)),
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**_TWO, vocab_size=50, **_ENDS)),
    "mamba": state_space,
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_GROUPED, head_dim=8, **_MIXTURE)),
    "bert": bert,
    "roberta": lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**TEXT)),
    "t5": t5,
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_BOTH, max_position_embeddings=32)),
    "whisper": lambda: tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(**_BOTH, num_mel_bins=8, max_source_positions=16, max_target_positions=32)
    ),
    "vit": vit,
    "wav2vec2": speech,
    "clip": lambda: tf.CLIPModel(
        tf.CLIPConfig(text_config={**TEXT, "projection_dim": 8}, vision_config={**_IMAGE, "projection_dim": 8}, projection_dim=8)
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
