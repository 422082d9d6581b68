"""Load a run's tokenizer: from a Hugging Face directory, or made from a string with one token per character."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from corerl.errors import ModelError
from corerl.messages import first_line, one_line, short_repr

if TYPE_CHECKING:
    from corerl.config.schema import ModelConfig

CHARACTERS = "characters:"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"  # the authors' sampling settings; some end tokens are only listed there
LARGEST = 2**31  # no token id is as large
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3 of a character tokenizer


def load_tokenizer(*, tokenizer: str, path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `model.tokenizer` names, or if that is empty, the one in the model's directory `path`.

    `characters:ABC` has one token for each character, after <pad> <bos> <eos> <unk>, and puts <bos> before a text that
    is encoded with special tokens. Never downloads anything.
    """
    if tokenizer.startswith(CHARACTERS):
        return character_tokenizer(tokenizer.removeprefix(CHARACTERS))
    setting, directory = ("model.tokenizer", tokenizer) if tokenizer else ("model.path", path)
    if not directory:
        raise ModelError(
            "the model has no tokenizer: set model.tokenizer to a directory or to 'characters:ABC', "
            "or model.path to a directory that contains one"
        )
    if not os.path.isdir(directory):
        raise ModelError(f"{setting}={directory!r} is not a directory, expected one with a Hugging Face tokenizer")
    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if isinstance(loaded, PreTrainedTokenizerBase):
            loaded("a")  # a post-processor that names no token fails only here
    except (KeyboardInterrupt, SystemExit):
        raise
    # transformers and tokenizers raise whatever their parsers do, from OSError to a panic, which is no Exception.
    except BaseException as error:
        raise _no_tokenizer(setting, directory, one_line(error)) from error
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise ModelError(
            f"{setting}={directory!r} contains a {type(loaded).__name__}, which is not a transformers tokenizer"
        )
    vocabulary = loaded.get_vocab()
    # Of a config.json alone, transformers makes the tokenizer of that model type with its special tokens and no others.
    if not (Path(directory) / TOKENIZER).exists() and vocabulary.keys() <= loaded.added_tokens_encoder.keys():
        raise _no_tokenizer(setting, directory, f"no file has the vocabulary of its {type(loaded).__name__}")
    loaded.init_kwargs.pop("auto_map", None)  # names code of the directory, which is never run nor exported
    return loaded


def _no_tokenizer(setting: str, directory: str, why: str) -> ModelError:
    found = ", ".join(sorted(entry.name for entry in Path(directory).iterdir())) or "nothing"
    return ModelError(
        f"{setting}={directory!r} has no tokenizer that transformers can load ({why}); "
        f"expected {TOKENIZER} and tokenizer_config.json, found {found}"
    )


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, in the given order; decoding adds no spaces. It can be saved."""
    if not characters or len(set(characters)) != len(characters):
        raise ModelError(
            f"model.tokenizer='{CHARACTERS}{characters}' must list at least one character, and each only once"
        )
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    begin, first, second = (
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        *({"Sequence": {"id": name, "type_id": 0}} for name in "AB"),
    )
    inner = {
        # Byte-pair encoding without merges: faster than splitting a text by a pattern.
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"},
        "decoder": {"type": "Fuse"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, second],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [vocabulary["<bos>"]], "tokens": ["<bos>"]}},
        },
    }
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / TOKENIZER
        file.write_text(json.dumps(inner))
        return PreTrainedTokenizerFast(
            tokenizer_file=str(file),
            pad_token="<pad>",
            bos_token="<bos>",
            eos_token="<eos>",
            unk_token="<unk>",
            clean_up_tokenization_spaces=False,
        )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The names, by id, of all tokens that a text without special tokens leaves out. Those that the tokenizer has a
    use for, which transformers calls its special tokens, are only some of them."""
    return {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> list[int]:
    """The tokens that end a text: the tokenizer's end of sequence, then those of the model's generation_config.json and
    of its config.json (or `model.config`), each of which may list several. Raises ModelError if a file cannot be read,
    or if transformers could not load an export with these settings.

    A config's class has end tokens of its own, which say nothing about this model: only those written down count.
    """
    named: list[Any] = [tokenizer.eos_token_id]
    for file in (Path(model.path) / GENERATION, Path(model.path) / CONFIG) if model.path else ():
        if file.is_file():
            try:
                fields = json.loads(file.read_bytes())
                named += _ends_in(fields)
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ModelError(f"model.path: cannot read the token ids in {file}: {first_line(error)}") from error
            if file.name == GENERATION:
                _require_loadable(fields, file)
    if not model.path:
        try:
            named += _ends_in(model.config)
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"model.config.eos_token_id: expected a token id or a list of them: {error}") from error
    # Old configs write -1 for none.
    return list(dict.fromkeys(token for token in named if token is not None and token >= 0))


def _require_loadable(fields: Mapping[str, Any], file: Path) -> None:
    """Raise ModelError if transformers could not load an export, which has these settings too."""
    try:
        GenerationConfig.from_dict(dict(fields))
    except Exception as error:  # its checks raise ValueError, its code whatever a wrong type leads to
        raise ModelError(
            f"model.path: transformers cannot load {file}: {one_line(error)}; correct or remove it"
        ) from error


def _ends_in(fields: Mapping[str, Any]) -> list[int]:
    """The end tokens that a config names, in its own fields or in those of its language model. Raises ValueError."""
    ends: list[int] = []
    for part in (fields, fields.get("text_config") or {}):
        named = part.get("eos_token_id")
        tokens = [token for token in (named if isinstance(named, list | tuple) else [named]) if token is not None]
        if wrong := [token for token in tokens if type(token) is not int or token >= LARGEST]:
            raise ValueError(f"got {short_repr(wrong[0])}, wanted an integer below 2^31")
        ends += tokens
    return ends


def known_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's largest id + 1. Embeddings often have more rows, for a number that divides well."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def require_room_for_tokens(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, table: str = "model"
) -> None:
    """Raise ModelError if a text could contain a token that the model has no embedding for.

    A special token that no text begins or ends with may lie beyond the embeddings: the tokenizer of Gemma 3's text
    models has one for images.
    """
    size = config.get_text_config().vocab_size
    spare = special_tokens(tokenizer).keys() - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    token, last = max(
        ((token, index) for token, index in tokenizer.get_vocab().items() if index not in spare),
        key=lambda item: item[1],
        default=("", -1),
    )
    if last >= size:
        what = f"{table}.path: its" if model.path else f"{table}.config.vocab_size: the model's"
        cure = "" if model.path else f"set {table}.config.vocab_size to at least {last + 1}, or "
        raise ModelError(
            f"{what} vocabulary has {size} tokens, but the tokenizer gives {token!r} the id {last}, which needs "
            f"{last + 1}; {cure}set model.tokenizer to the tokenizer of this model"
        )


def plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """[n] each text's tokens, without any that the tokenizer adds by itself."""
    if not texts:
        return []
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None and inner.truncation is None and inner.padding is None:
        # What transformers itself asks; its own part takes five times as long for a short text.
        return [each.ids for each in inner.encode_batch_fast(list(texts), add_special_tokens=False)]
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def require_same_tokens(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    *,
    rows: int | None,
    table: str,
) -> None:
    """Raise ModelError if a model that reads the actor's tokens lacks one of its tokenizer, or takes one for another:
    by the tokenizer in its directory, or where that has none, by the `rows` of the actor's embedding (None if they are
    not known). With a tokenizer, embeddings may be padded differently.

    Special tokens may differ in their names, as in a base and a chat model.
    """
    files = (Path(model.path) / name for name in (TOKENIZER, TOKENIZER_CONFIG))
    has_tokenizer = bool(model.path) and any(file.is_file() for file in files)
    size = config.get_text_config().vocab_size
    if not has_tokenizer and rows is not None and size != rows:
        raise ModelError(
            f"{table}{'.path' if model.path else '.config.vocab_size'}: a vocabulary of {size} tokens, and no "
            f"tokenizer to compare them by, but the actor's model has {rows}; choose a model with its vocabulary"
        )
    theirs = _texts(load_tokenizer(tokenizer="", path=model.path)) if has_tokenizer else {}
    for index, token in sorted(_texts(tokenizer).items()):
        if (other := theirs.get(index, token)) != token:
            raise ModelError(
                f"{table}.path: its tokenizer has {other!r} for the token {index}, but the actor's has {token!r}, so "
                "that log-probs of the actor's tokens mean nothing; choose a model with the actor's tokenizer"
            )


def _texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Token ids with the text of each that is no special token."""
    special = special_tokens(tokenizer)
    return {index: token for token, index in tokenizer.get_vocab().items() if index not in special}
