"""Pictures of rows are found in the order of their marks, read once, and stand in prompts as the model's processor has
them."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from corerl.data import Refused
from corerl.errors import ModelError
from corerl_vision import files, reader
from corerl_vision.reader import VisionReader
from corerl_vision.shapes import png
from corerl_vision.spec import VisionOptions
from plugins.vision.tests.test_processor import model_of, noise

WORDS = ["<pad>", "a", "b", "user", "<unk>", "<img>", "<begin>", "<end>"]
WORDS += ["[IMG_BREAK]", "[IMG_END]", "<vision>", "</vision>"]
IMAGE, BEGIN, END, BREAK, LAST, OPEN, CLOSE = 5, 6, 7, 8, 9, 10, 11
QWEN = "<vision><img></vision>"


def tokenizer_with(written: str) -> PreTrainedTokenizerFast:
    """Words, and a chat template that writes this for each picture, and ends a turn by what begins alike."""
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": WORDS[5:]})
    made.chat_template = (
        "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}"
        "{% if p.type == 'image' %}" + written + "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
        "<stop>{% endfor %}"
    )
    return made


def reader_of(family: str, directory: Path, written: str = QWEN, **options: Any) -> VisionReader:
    return VisionReader(VisionOptions(**options), model_of(family, directory / family), tokenizer_with(written))


def shown(width: int = 32, height: int = 32, seed: int = 0) -> bytes:
    return png(noise(width, height, seed))


def test_marks_of_texts_and_parts_take_pictures_in_order(tmp_path: Path) -> None:
    own = reader_of("qwen3_vl", tmp_path)
    first, second, third = (shown(seed=seed) for seed in range(3))
    prompt = [
        {"role": "user", "content": "<image>a<image>"},
        {"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}, {"type": "text", "text": "b"}]},
    ]
    prompt[1]["content"][0] = {"type": "image", "bytes": third}  # type: ignore[index]
    marked, found = own.find({"images": [{"bytes": first, "path": None}, second]}, prompt, root="")
    assert marked[0]["content"] == [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    assert marked[1]["content"] == [{"type": "image"}, {"type": "text", "text": "b"}]
    assert [each.read() for each in found] == [first, second, third]
    text, found = own.find({"images": second}, "a <image> b", root="")
    assert text == f"a {QWEN} b" and [each.read() for each in found] == [second]


def test_rows_without_pictures_stay_as_they_are(tmp_path: Path) -> None:
    own, chat = reader_of("qwen3_vl", tmp_path), [{"role": "user", "content": "a"}]
    for empty in (None, [], "", {"bytes": None, "path": None}, [None, ""]):
        for row in ({}, {"images": empty}):
            assert own.find(row, chat, root="") == (chat, []) and own.find(row, "a", root="") == ("a", [])
    _, found = own.find({"images": [None, shown()]}, "<image>", root="")
    assert [each.read() for each in found] == [shown()]


def test_a_part_that_is_no_text_stays_for_the_reader_of_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": ["<image>"]}]}]
    assert reader_of("qwen3_vl", tmp_path).find({}, chat, root="") == (chat, [])


def test_marks_and_pictures_must_agree(tmp_path: Path) -> None:
    own = reader_of("qwen3_vl", tmp_path)
    for images, prompt, why in (
        ([shown()], "a", "1 pictures more in the field 'images' than marks <image>"),
        ([shown()], "<image><image>", "more marks than pictures in the field 'images'"),
        (None, [{"role": "user", "content": [{"type": "image"}]}], "more marks than pictures"),
    ):
        with pytest.raises(Refused, match=why) as info:
            own.find({"images": images}, prompt, root="")
        assert info.value.kind == "whose pictures and marks differ in number"


def test_a_picture_that_is_alive_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, decoded = reader_of("qwen3_vl", tmp_path), Counter[str]()

    def counting(file: files.File) -> Any:
        decoded[file.name] += 1
        return files.pixels_of(file)

    monkeypatch.setattr(reader, "pixels_of", counting)
    (tmp_path / "a.png").write_bytes(shown())
    (_, found), (_, again) = (
        own.find({"images": [image]}, "<image>", root=str(tmp_path)) for image in ("a.png", shown())
    )
    picture = own.read(found[0])
    assert own.read(again[0]) is picture and decoded.total() == 1
    name = picture.id
    del picture
    assert own.read(again[0]).id == name and decoded.total() == 2


def test_threads_that_read_one_picture_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, threads = reader_of("qwen3_vl", tmp_path), 4
    references = [own.find({"images": [shown()]}, "<image>", root="")[1][0] for _ in range(threads)]
    began, decoded = Barrier(threads), list[str]()

    def slow(file: files.File) -> Any:
        decoded.append(file.name)
        time.sleep(0.05)  # so that all the others come meanwhile
        return files.pixels_of(file)

    def read(reference: files.File) -> Any:
        began.wait()
        return own.read(reference)

    monkeypatch.setattr(reader, "pixels_of", slow)
    with ThreadPoolExecutor(threads) as pool:
        pictures = list(pool.map(read, references))
    assert len(decoded) == 1 and all(picture is pictures[0] for picture in pictures)


@pytest.mark.parametrize(
    ("family", "written", "mark", "around", "features"),
    [
        ("qwen3_vl", QWEN, IMAGE, ([], []), None),
        ("glm4v", "<begin><img><end>", IMAGE, ([], []), None),
        ("gemma3", "<begin>", BEGIN, ([BEGIN], [END]), 4),
    ],
)
def test_a_picture_stands_as_its_processor_writes_it(
    family: str, written: str, mark: int, around: tuple[list[int], list[int]], features: int | None, tmp_path: Path
) -> None:
    own = reader_of(family, tmp_path, written)
    assert (own.placeholder, own.mark) == (IMAGE, mark)
    _, (found,) = own.find({"images": shown(48, 32)}, "<image>", root="")
    picture = own.read(found)
    processor = own._processor.own
    count = features
    if count is None:
        grid = processor(images=[picture.pixels], do_resize=False, return_tensors="np")["image_grid_thw"][0]
        count = int(grid.prod()) // processor.merge_size**2
    assert own.expand(picture).tolist() == [*around[0], *[IMAGE] * count, *around[1]]


def test_mistral_breaks_rows_of_features(tmp_path: Path) -> None:
    own = reader_of("mistral3", tmp_path, "<img>")
    _, (found,) = own.find({"images": shown(48, 32)}, "<image>", root="")
    picture = own.read(found)
    side = own._processor.config.vision_config.patch_size * own._processor.config.spatial_merge_size
    columns, rows = picture.size[0] // side, picture.size[1] // side
    line = [IMAGE] * columns
    assert rows > 1 and own.expand(picture).tolist() == [*[*line, BREAK] * (rows - 1), *line, LAST]


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_limits_bound_the_size_at_which_a_picture_is_seen(family: str, tmp_path: Path) -> None:
    own = reader_of(family, tmp_path, max_pixels=1024)
    _, (found,) = own.find({"images": shown(300, 200)}, "<image>", root="")
    width, height = own.read(found).size
    assert 600 < width * height <= 1024 and abs(width / height - 1.5) < 0.6
    smaller = reader_of(family, tmp_path, min_pixels=3000)
    _, (found,) = smaller.find({"images": shown(16, 16)}, "<image>", root="")
    assert 3000 <= np.prod(smaller.read(found).size) < 5000


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_limits_are_refused_where_the_model_has_its_own_size(family: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{family} has the size .*; remove them"):
        reader_of(family, tmp_path, max_pixels=1024)
