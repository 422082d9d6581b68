"""Tiny checkpoints that read pictures, with all files that a server asks for, tokenizer and processor included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from tests.pictures import FAMILIES, pictures_config, write_pictures

SHOWN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "mistral3")  # families with pictures that SGLang is asked for

# Sizes for which SGLang's kernels are made.
TEXT = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
}
STATES = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
WINDOWS = {
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "sliding_window": 1024,
    "query_pre_attn_scalar": 64,
}
INTERLEAVED = {"mrope_interleaved": True}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LARGER: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_parameters": {**ROPE, "mrope_section": [16, 8, 8]}},
    "qwen3_vl": {"rope_parameters": {**ROPE, "mrope_section": [16, 8, 8], **INTERLEAVED}},
    "qwen3_5": {
        **STATES,
        "rope_parameters": {**ROPE, **INTERLEAVED, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25},
    },
    "gemma3": WINDOWS,
    "mistral3": {},
}
TOWER = {"hidden_size": 128, "intermediate_size": 256}
SIDE = 64  # pixels of the largest picture of towers that have one
LARGER_TOWER: dict[str, dict[str, Any]] = {
    # SGLang (0.5.17) shows the tower patches of 14 x 14 only: others it takes for features.
    "qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1], "patch_size": 14, "window_size": 112},
    "gemma3": {"image_size": SIDE},
    "mistral3": {"image_size": SIDE, "head_dim": 64},
}

# What stands for pictures, from id 5 on, by the names that SGLang's processors search prompts for.
QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TOKENS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), QWEN),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
}
WRITTEN = {"gemma3": "<start_of_image>", "mistral3": "[IMG]"}  # by chat templates
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
FIRST_CHARACTER = 9  # the id of the first token that is a character, except for the empty line's 4
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-=?.,:;!()*/ ABCDEF"
TEMPLATE = (
    "<bos>{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}WRITTEN{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def write_larger(family: str, directory: Path) -> Path:
    """A checkpoint of the family in sizes that SGLang's kernels take."""
    return write_pictures(family, directory, config=larger_config(family))


def larger_config(family: str) -> PreTrainedConfig:
    fields = FAMILIES[family]
    text = {**fields["text_config"], **TEXT, **LARGER[family]}
    tower = {**fields["vision_config"], **TOWER, **LARGER_TOWER.get(family, {})}
    if "out_hidden_size" in tower:
        tower["out_hidden_size"] = TEXT["hidden_size"]
    whole = {**fields, "text_config": text, "vision_config": tower}
    if family == "gemma3":
        whole["mm_tokens_per_image"] = (SIDE // tower["patch_size"] // 2) ** 2
    return AutoConfig.for_model(family, **whole)


def write_readable(family: str, directory: Path) -> Path:
    """A checkpoint of the family, whose files have what its publishers' have to show pictures."""
    config = pictures_config(family)
    write_pictures(family, directory, config=config)
    tokenizer_of(family, int(config.get_text_config().vocab_size)).save_pretrained(directory)
    for name, content in processor_files(family, config).items():
        (directory / name).write_text(json.dumps(content))
    return directory


def tokenizer_of(family: str, size: int) -> PreTrainedTokenizerFast:
    """One token a character: what it decodes it encodes as it was."""
    names = TOKENS[family]
    words = [*SPECIAL, "\n", *names, *(f"<unused{at}>" for at in range(FIRST_CHARACTER - 5 - len(names))), *CHARACTERS]
    words += [chr(0x4E00 + at) for at in range(size - len(words))]
    vocabulary = {word: at for at, word in enumerate(words[:size])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.decoder = decoders.Fuse()  # type: ignore[assignment]
    core.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (*SPECIAL, *names)])
    own = dict(zip(("image_token", "boi_token", "eoi_token"), names, strict=True)) if family == "gemma3" else {}
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    made = PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=own, **special)
    made.chat_template = TEMPLATE.replace("WRITTEN", WRITTEN.get(family, "".join((QWEN[2], QWEN[0], QWEN[3]))))
    return made


def processor_files(family: str, config: PreTrainedConfig) -> dict[str, Any]:
    """The files of the family's processor, with the sizes of this config's tower."""
    tower = config.vision_config
    patch, scaled = tower.patch_size, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if family == "gemma3":
        side, count = tower.image_size, config.mm_tokens_per_image
        kind = {"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": count, "do_pan_and_scan": False}
        return {
            "preprocessor_config.json": {**kind, **scaled, "size": {"height": side, "width": side}},
            "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": count},
        }
    if family == "mistral3":
        size = {"size": {"longest_edge": tower.image_size}, "patch_size": patch}
        merge = {"spatial_merge_size": config.spatial_merge_size, "patch_size": patch}
        return {
            "preprocessor_config.json": {"image_processor_type": "PixtralImageProcessor", **scaled, **size},
            "processor_config.json": {"processor_class": "PixtralProcessor", **merge},
        }
    side = patch * tower.spatial_merge_size
    sizes = {
        **scaled,
        "patch_size": patch,
        "temporal_patch_size": tower.temporal_patch_size,
        "merge_size": tower.spatial_merge_size,
        "size": {"shortest_edge": 4 * side**2, "longest_edge": 256 * side**2},
    }
    old = family == "qwen2_5_vl"
    video = "Qwen2VLVideoProcessor" if old else "Qwen3VLVideoProcessor"
    return {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **sizes},
        "video_preprocessor_config.json": {"video_processor_type": video, **sizes},
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor" if old else "Qwen3VLProcessor"},
    }
