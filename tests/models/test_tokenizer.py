import json
from pathlib import Path

import pytest

from corerl.config.schema import ModelConfig
from corerl.errors import ModelError
from corerl.models.config import hf_config
from corerl.models.tokenizer import character_tokenizer, end_tokens, load_tokenizer, plain, require_room_for_tokens
from corerl_testing.models import tiny_fields

DIGITS = "characters:0123456789>s"


def test_a_character_tokenizer_has_special_tokens_then_characters():
    tokenizer = load_tokenizer(tokenizer=DIGITS, path="")
    assert len(tokenizer) == 16
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )
    assert tokenizer("350>s")["input_ids"] == [1, 7, 9, 4, 14, 15]
    assert tokenizer("350", add_special_tokens=False)["input_ids"] == [7, 9, 4]
    assert tokenizer("3xé日3")["input_ids"] == [1, 7, 3, 3, 3, 7]


def test_texts_are_encoded_whole_whatever_a_tokenizer_cuts():
    texts = ["350>s", "", "<eos>3", "3xé日3"]
    alone = [load_tokenizer(tokenizer=DIGITS, path="")(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokenizer = load_tokenizer(tokenizer=DIGITS, path="")
    assert plain(tokenizer, texts) == alone
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert plain(tokenizer, texts) == alone
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert plain(tokenizer, texts) == alone
    assert plain(tokenizer, []) == []


def test_what_cannot_be_loaded_is_named_with_its_setting(tmp_path: Path):
    with pytest.raises(ModelError, match="no tokenizer: set model.tokenizer"):
        load_tokenizer(tokenizer="", path="")
    with pytest.raises(ModelError, match="model.path='/nowhere/at/all' is not a directory"):
        load_tokenizer(tokenizer="", path="/nowhere/at/all")
    (tmp_path / "notes.txt").write_text("no tokenizer")
    with pytest.raises(ModelError, match="model.tokenizer=.*expected tokenizer.json.*found notes.txt"):
        load_tokenizer(tokenizer=str(tmp_path), path="")
    with pytest.raises(ModelError, match="each only once"):
        load_tokenizer(tokenizer="characters:aba", path="")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma"])
def test_a_directory_with_a_config_alone_has_no_tokenizer(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for more in ("", "tokenizer_config.json"):  # as after a download that was cut
        if more:
            (tmp_path / more).write_text("{}")
        with pytest.raises(ModelError, match=r"^model.path='.*' has no tokenizer that .*found config.json") as caught:
            load_tokenizer(tokenizer="", path=str(tmp_path))
        assert "\n" not in caught.value.message
    load_tokenizer(tokenizer=DIGITS, path="").save_pretrained(tmp_path)
    assert len(load_tokenizer(tokenizer="", path=str(tmp_path))) == 16


def test_a_special_token_that_no_sample_has_needs_no_room() -> None:
    model = ModelConfig(config={**tiny_fields("qwen3"), "vocab_size": 16})
    tokenizer = character_tokenizer("0123456789>s")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    require_room_for_tokens(hf_config(model), tokenizer, model)  # as Gemma 3's text models have one
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ModelError, match="has 16 tokens, but the tokenizer gives '<end>' the id 17, which needs 18"):
        require_room_for_tokens(hf_config(model), tokenizer, model)
    tokenizer = character_tokenizer("0123456789>s")
    tokenizer.add_tokens(["think"])
    with pytest.raises(ModelError, match="gives 'think' the id 16, which needs 17"):
        require_room_for_tokens(hf_config(model), tokenizer, model)


def test_a_model_of_fields_ends_where_they_say() -> None:
    tokenizer = load_tokenizer(tokenizer=DIGITS, path="")
    tokenizer.eos_token = None
    assert hf_config(ModelConfig(config={"model_type": "llama"})).eos_token_id == 2  # of Llama's first tokenizer
    assert end_tokens(tokenizer, ModelConfig(config={"model_type": "llama"})) == []
    assert end_tokens(tokenizer, ModelConfig(config={"model_type": "llama", "eos_token_id": [5, 6]})) == [5, 6]
    with pytest.raises(ModelError, match="^model.config.eos_token_id: expected a token id or a list of them: .*'</s>'"):
        end_tokens(tokenizer, ModelConfig(config={"model_type": "llama", "eos_token_id": "</s>"}))
    with pytest.raises(
        ModelError, match="^model.config.eos_token_id: expected .*: got inf, wanted an integer below 2.31$"
    ):
        end_tokens(tokenizer, ModelConfig(config={"model_type": "llama", "eos_token_id": float("inf")}))


@pytest.mark.parametrize("file", ["generation_config", "config"])
@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{", '{"eos_token_id": "</s>"}', '{"eos_token_id": Infinity}', '{"text_config": [2]}'),
        *('{"eos_token_id": [2, 1%s]}' % (30 * "0"), '{"eos_token_id": [1, "2"]}', '{"eos_token_id": true}'),
    ],
)
def test_ends_that_cannot_be_read_are_told_with_their_file(tmp_path: Path, text: str, file: str) -> None:
    (tmp_path / f"{file}.json").write_text(text)
    with pytest.raises(ModelError, match=rf"^model.path: cannot read the token ids in .*/{file}.json: "):
        end_tokens(load_tokenizer(tokenizer=DIGITS, path=""), ModelConfig(path=str(tmp_path)))


def test_settings_that_no_export_could_have_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": 2, "pad_token_id": "<pad>"}')
    with pytest.raises(ModelError, match=f"^model.path: transformers cannot load {file}: TypeError: .*; correct or"):
        end_tokens(character_tokenizer("ab"), ModelConfig(path=str(tmp_path)))


def test_a_tokenizer_that_panics_is_no_tokenizer(tmp_path: Path) -> None:
    character_tokenizer("ab").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"id": "<bos>"', '"id": "<none>"', 1))
    with pytest.raises(ModelError, match="has no tokenizer that transformers can load"):
        load_tokenizer(tokenizer=str(tmp_path), path="")
