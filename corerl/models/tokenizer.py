"""The tokenizer of a run: one from a Hugging Face directory, or one token a character made from a string."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, processors
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.errors import ModelError
from corerl.messages import first_line, one_line

if TYPE_CHECKING:
    from corerl.config.schema import ModelConfig

CHARACTERS = "characters:"
GENERATION = "generation_config.json"  # how a model's authors sample from it; some ends of a text are named there alone
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3 of a character tokenizer


def load_tokenizer(*, tokenizer: str, path: str) -> PreTrainedTokenizerBase:
    """The tokenizer that `model.tokenizer` names, or, where that is empty, the one beside the model at `path`.

    `characters:ABC` has one token for each character, after <pad> <bos> <eos> <unk>, and puts <bos> before a text that
    is encoded with special tokens. Nothing is ever fetched from the network.
    """
    if tokenizer.startswith(CHARACTERS):
        return character_tokenizer(tokenizer.removeprefix(CHARACTERS))
    setting, directory = ("model.tokenizer", tokenizer) if tokenizer else ("model.path", path)
    if not directory:
        raise ModelError(
            "the model has no tokenizer: set model.tokenizer to a directory or to 'characters:ABC', "
            "or model.path to a directory that holds one"
        )
    if not os.path.isdir(directory):
        raise ModelError(f"{setting}={directory!r} is no directory; it must hold a Hugging Face tokenizer")
    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise whatever their parsers do, from OSError to Exception
        found = ", ".join(sorted(entry.name for entry in Path(directory).iterdir())) or "nothing"
        raise ModelError(
            f"{setting}={directory!r} holds no tokenizer that transformers can load ({one_line(error)}); "
            f"wanted tokenizer.json and tokenizer_config.json, found {found}"
        ) from error
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise ModelError(f"{setting}={directory!r} holds a {type(loaded).__name__}, which is no transformers tokenizer")
    return loaded


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token a character, in the order given; decoding joins them without spaces. Saves and loads as any other."""
    if not characters or len(set(characters)) != len(characters):
        raise ModelError(
            f"model.tokenizer='{CHARACTERS}{characters}' must list at least one character, and each only once"
        )
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    # Byte-pair encoding that merges nothing: faster than to split a text by a pattern.
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def end_tokens(tokenizer: PreTrainedTokenizerBase, path: str) -> list[int]:
    """At which a text ends: the tokenizer's own end of sequence, then what the generation_config.json beside the model
    at `path`, if there is one, names besides: the end of a turn, of models that talk. Raises ModelError where that
    cannot be read."""
    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    file = Path(path) / GENERATION
    if path and file.is_file():
        try:
            named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ends += [int(token) for token in (named if isinstance(named, list) else [named]) if token is not None]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"model.path: {file} names no tokens that can be read: {first_line(error)}") from error
    return list(dict.fromkeys(ends))


def require_room_for_tokens(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, table: str = "model"
) -> None:
    """Raises ModelError where a text could become a token that the model has no embedding for.

    A special token that nobody samples or starts with may lie beyond: Gemma 3's text models have a tokenizer with one
    for images, and no embedding for it.
    """
    size = config.get_text_config().vocab_size
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    spare = special - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    token, last = max(
        ((token, index) for token, index in tokenizer.get_vocab().items() if index not in spare),
        key=lambda item: item[1],
        default=("", -1),
    )
    if last >= size:
        what = f"{table}.path: its" if model.path else f"{table}.config.vocab_size: the model's"
        cure = "" if model.path else f"set {table}.config.vocab_size to at least {last + 1}, or "
        raise ModelError(
            f"{what} vocabulary has {size} tokens, and the tokenizer numbers {token!r} {last}, which wants {last + 1}; "
            f"{cure}give the tokenizer of this model as model.tokenizer"
        )
