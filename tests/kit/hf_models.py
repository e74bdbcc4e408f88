"""Tiny models of transformers and PEFT, built from configurations: nothing is fetched. Import this inside functions."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn

tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()

_TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}


def without_dropout(module: Any) -> Any:
    """The module, whose layers drop nothing any more."""
    for part in module.modules():
        for attribute in ("p", "dropout", "attention_dropout", "dropout_rate"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
    return module


def gpt2(**more: Any) -> nn.Module:
    """Tied ends, dropout."""
    size: dict[str, Any] = {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": 50,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return tf.GPT2LMHeadModel(tf.GPT2Config(**{**size, **more}))


def llama(**more: Any) -> nn.Module:
    """Rotary frequencies in buffers that are not saved."""
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**_TEXT, "num_key_value_heads": 1, **more}))


def auto_bf16() -> nn.Module:
    config = tf.LlamaConfig(**_TEXT, num_key_value_heads=1, tie_word_embeddings=True)
    made: nn.Module = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


def bert() -> nn.Module:
    return tf.BertForMaskedLM(tf.BertConfig(**_TEXT))


def t5() -> nn.Module:
    size: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 50,
        "decoder_start_token_id": 0,
    }
    return tf.T5ForConditionalGeneration(tf.T5Config(**size))


def vit() -> nn.Module:
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return tf.ViTForImageClassification(tf.ViTConfig(**size, image_size=16, patch_size=4))


def composite() -> nn.Module:
    """An encoder and a decoder with configurations of their own."""
    parts = tf.BertConfig(**_TEXT), tf.BertConfig(**_TEXT, is_decoder=True, add_cross_attention=True)
    return tf.EncoderDecoderModel(tf.EncoderDecoderConfig.from_encoder_decoder_configs(*parts))


def speech() -> nn.Module:
    """Asks for the device by name; a parametrized weight; a parameter that torch.Tensor(n) makes, which nothing sees."""
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 20,
    }
    convolutions: dict[str, Any] = {
        "conv_dim": (8, 8),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
    }
    return tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(**size, **convolutions, num_conv_pos_embedding_groups=2))


def state_space() -> nn.Module:
    """Parameters that `torch.empty` makes and `_init_weights` alone fills."""
    return tf.MambaForCausalLM(tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50, state_size=4))


def hybrid() -> nn.Module:
    """Its second and fourth layers have attention, the others a short convolution, of which a cache holds the state."""
    size = {**_TEXT, "num_hidden_layers": 4, "num_key_value_heads": 1}
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
