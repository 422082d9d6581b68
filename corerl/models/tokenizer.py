"""The tokenizer of a run: one from a Hugging Face directory, or one token a character made from a string."""

from __future__ import annotations

import os
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.errors import ModelError

CHARACTERS = "characters:"
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
            f"{setting}={directory!r} holds no tokenizer that transformers can load ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); wanted tokenizer.json and tokenizer_config.json, "
            f"found {found}"
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
