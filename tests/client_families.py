"""Families of transformers and diffusers, with adapters by peft: see offloaded_families.py.

Models are tiny, made from a configuration, and nothing is loaded. Those that train a weight in two
modules (tied embeddings) keep these on the device; of others all modules with weights are
offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import offloaded_families
import torch
from offloaded_families import Family, drawn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["FAMILIES", "UNUSUAL", "transformers_model"]

WORDS, WIDTH = 48, 32


def transformers_model(name: str, **settings: Any) -> nn.Module:
    """A model of transformers by its class, with settings of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**settings))
    return model


def _token_loss(model: nn.Module, number: int, device: str) -> Tensor:
    """Of a causal language model; the second sentence is padded."""
    ids = drawn(number, 3, 7, high=WORDS)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    loss: Tensor = model(**{name: each.to(device) for name, each in given.items()}).loss
    return loss


def _unmasked_loss(model: nn.Module, number: int, device: str) -> Tensor:
    ids = drawn(number, 3, 7, high=WORDS).to(device)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _translation_loss(model: nn.Module, number: int, device: str) -> Tensor:
    ids, labels = drawn(number, 3, 7, high=WORDS), drawn(number + 100, 3, 5, high=WORDS)
    loss: Tensor = model(input_ids=ids.to(device), labels=labels.to(device)).loss
    return loss


def _speech_loss(model: nn.Module, number: int, device: str) -> Tensor:
    sound, labels = drawn(number, 2, 8, 24).to(device), drawn(number, 2, 5, high=WORDS).to(device)
    loss: Tensor = model(input_features=sound, labels=labels).loss
    return loss


def _image_loss(model: nn.Module, number: int, device: str) -> Tensor:
    image, label = drawn(number, 3, 3, 16, 16).to(device), drawn(number, 3, high=4).to(device)
    loss: Tensor = model(pixel_values=image, labels=label).loss
    return loss


def _noise_loss(model: nn.Module, number: int, device: str) -> Tensor:
    noise, time = drawn(number, 2, 3, 8, 8).to(device), drawn(number, 2, high=900).to(device)
    text = drawn(number, 2, 4, 16).to(device)
    return nn.functional.mse_loss(model(noise, time, text).sample, noise)


def _checkpoints(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _adapt(*targets: str, model: nn.Module) -> nn.Module:
    import peft

    settings = peft.LoraConfig(
        r=2, target_modules=list(targets), lora_dropout=0.1, init_lora_weights=False
    )
    adapted: nn.Module = peft.get_peft_model(model, settings)
    return adapted


def _family(
    name: str,
    modules: Callable[[Any], Iterable[nn.Module]],
    loss: Callable[[Any, int, str], Tensor],
    targets: list[str],
    *,
    shares: bool = False,
    **settings: Any,
) -> Family:
    make = partial(transformers_model, name, **settings)

    def adapt(model: nn.Module) -> nn.Module:
        return _adapt(*targets, model=model)

    return Family(make, modules, loss, _checkpoints, adapt, shares)


def _unet() -> nn.Module:
    import diffusers

    model: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=4,
        attention_head_dim=8,
        dropout=0.1,
    )
    return model


def _unet_modules(model: Any) -> Iterable[nn.Module]:
    yield from (model.conv_in, model.time_embedding, model.conv_norm_out, model.conv_out)
    for block in (*model.down_blocks, model.mid_block, *model.up_blocks):
        for parts in block.children():
            yield from parts if isinstance(parts, nn.ModuleList) else ()


def _unet_checkpoints(model: Any, reentrant: bool) -> None:
    model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=reentrant))


def _of_decoder(model: Any) -> Iterable[nn.Module]:
    """All of a model as Llama; where its head is tied to its embedding, the layers alone."""
    if model.config.tie_word_embeddings:
        return [*model.model.layers, model.model.norm]
    return [model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head]


LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
}

FAMILIES: dict[str, Family] = {
    "Llama": _family("LlamaForCausalLM", _of_decoder, _token_loss, ["q_proj", "v_proj"], **LLAMA),
    "tied-Llama": _family(
        "LlamaForCausalLM",
        _of_decoder,
        _token_loss,
        ["q_proj", "down_proj"],
        tie_word_embeddings=True,
        **LLAMA,
    ),
    "GPT2": _family(
        "GPT2LMHeadModel",
        lambda model: [model.transformer.wpe, *model.transformer.h, model.transformer.ln_f],
        _token_loss,
        ["c_attn", "c_fc"],
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=5,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "Mixtral": _family(
        "MixtralForCausalLM",
        _of_decoder,
        _token_loss,
        ["q_proj", "v_proj"],
        **{**LLAMA, "num_local_experts": 4, "intermediate_size": 16},
    ),
    "T5": _family(
        "T5ForConditionalGeneration",
        lambda model: [
            *model.encoder.block,
            model.encoder.final_layer_norm,
            *model.decoder.block,
            model.decoder.final_layer_norm,
        ],
        _translation_loss,
        ["q", "wo"],
        shares=True,
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "ViT": _family(
        "ViTForImageClassification",
        lambda model: [
            model.vit.embeddings,
            *model.vit.layers,
            model.vit.layernorm,
            model.classifier,
        ],
        _image_loss,
        ["q_proj", "v_proj"],
        hidden_size=WIDTH,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=4,
        hidden_dropout_prob=0.1,
    ),
    "BERT": _family(
        "BertForMaskedLM",
        lambda model: [*model.bert.encoder.layer, model.cls.predictions.transform],
        _token_loss,
        ["query", "dense"],
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
    ),
    "Whisper": _family(
        "WhisperForConditionalGeneration",
        lambda model: [
            model.model.encoder.conv1,
            model.model.encoder.conv2,
            *model.model.encoder.layers,
            model.model.encoder.layer_norm,
            *model.model.decoder.layers,
            model.model.decoder.layer_norm,
        ],
        _speech_loss,
        ["q_proj", "fc1"],
        shares=True,
        vocab_size=WORDS,
        num_mel_bins=8,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        d_model=WIDTH,
        max_source_positions=12,
        max_target_positions=16,
        dropout=0.1,
        encoder_layerdrop=0.3,
        decoder_layerdrop=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "Mamba": _family(
        "MambaForCausalLM",
        lambda model: [*model.backbone.layers, model.backbone.norm_f],
        _unmasked_loss,
        ["in_proj", "x_proj"],
        vocab_size=WORDS,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=5,
    ),
    "ResNet": replace(
        offloaded_families.FAMILIES["ResNet"],
        adapt=lambda model: _adapt("first", "second", model=model),
    ),
    "UNet": Family(
        _unet,
        _unet_modules,
        _noise_loss,
        _unet_checkpoints,
        lambda model: _adapt("to_q", "to_v", "conv1", model=model),
        shares=True,
    ),
    "LSTM": replace(
        offloaded_families.FAMILIES["LSTM"], adapt=lambda model: _adapt("project", model=model)
    ),
}


def _of_routers(model: nn.Module, number: int, device: str) -> Tensor:
    """With the loss of the routers, whose results hooks record within modules."""
    ids = drawn(number, 3, 7, high=WORDS).to(device)
    loss: Tensor = model(input_ids=ids, labels=ids, output_router_logits=True).loss
    return loss


def _of_attentions(model: nn.Module, number: int, device: str) -> Tensor:
    """With what hooks record of attentions and hidden states within modules."""
    ids, labels = drawn(number, 3, 7, high=WORDS), drawn(number + 100, 3, 5, high=WORDS)
    result = model(
        input_ids=ids.to(device),
        labels=labels.to(device),
        output_attentions=True,
        output_hidden_states=True,
    )
    recorded = (*result.encoder_attentions, *result.cross_attentions, *result.decoder_hidden_states)
    loss: Tensor = result.loss + sum(each.square().mean() for each in recorded)
    return loss


def _eager_t5() -> nn.Module:
    model: Any = FAMILIES["T5"].make()
    model.set_attn_implementation("eager")  # which gives attentions
    made: nn.Module = model
    return made


def _adapt_by(kind: str, **settings: Any) -> Callable[[Any], nn.Module]:
    def adapt(model: Any) -> nn.Module:
        import peft

        adapted: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(**settings))
        return adapted

    return adapt


_QUERIES: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

UNUSUAL: dict[str, tuple[str, Family]] = {
    "routers": ("plain", replace(FAMILIES["Mixtral"], loss=_of_routers)),
    "attentions": ("plain", replace(FAMILIES["T5"], make=_eager_t5, loss=_of_attentions)),
    "DoRA": (
        "lora",
        replace(FAMILIES["Llama"], adapt=_adapt_by("LoraConfig", **{**_QUERIES, "use_dora": True})),
    ),
    "experts": (
        "lora",
        replace(
            FAMILIES["Mixtral"],
            adapt=_adapt_by("LoraConfig", **_QUERIES, target_parameters=_EXPERTS),
        ),
    ),
    "IA3": (
        "lora",
        replace(
            FAMILIES["Llama"],
            adapt=_adapt_by(
                "IA3Config",
                target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"],
            ),
        ),
    ),
}
"""What leads to a module's tensors in other ways than its forward, with its variant."""
