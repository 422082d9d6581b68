"""What SGLang 0.5.17 makes of a prompt with pictures before it samples, by the files beside the config.

As its base_processor.py and the processors of families have it: the prompt is decoded, its pictures are searched for in
the text, the family's own processor writes the text with all placeholders, and where both agree on their number the
prompt's own tokens are kept. Pictures are read by Pillow and prepared by transformers; nothing here is CoreRL's.
"""

from __future__ import annotations

import io
import re
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QWEN = r"<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>"
PATTERNS = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), QWEN),
    "gemma3": r"<start_of_image>(?:(?:<image_soft_token>)*<end_of_image>)?",
    "mistral3": r"\[IMG\]",
}


class Processor:
    def __init__(self, directory: str) -> None:
        import transformers

        self.config = transformers.AutoConfig.from_pretrained(directory)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.images = transformers.AutoImageProcessor.from_pretrained(directory)
        self.kind = self.config.model_type
        self.pattern = re.compile(PATTERNS[self.kind])
        self.placeholder = getattr(self.config, "image_token_id", None) or self.config.image_token_index
        self.settings: dict[str, int] = {}
        if self.kind == "mistral3":
            self.settings["patch_size"] = self.config.vision_config.patch_size * self.config.spatial_merge_size
        self.read: list[str] = []  # the addresses of pictures, as they came

    def prompt(self, ids: list[int], data: Sequence[str]) -> tuple[list[int], dict[str, Any]]:
        """The tokens to sample after, and what the model takes besides them."""
        import torch

        pictures = [self.picture(each) for each in data]
        text = self.tokenizer.decode(ids)
        if len(self.pattern.findall(text)) != len(pictures):
            print("Mismatch: More 'IMAGE' tokens found than corresponding data provided.", flush=True)
            threading.Event().wait()  # nobody answers this request any more
        made = self.images(images=pictures, return_tensors="pt", **self.settings)
        written = iter([self.written(made, place) for place in range(len(pictures))])
        text = self.pattern.sub(lambda _: next(written), text)
        again = not text.startswith(self.tokenizer.bos_token)
        found: list[int] = self.tokenizer(text, add_special_tokens=again)["input_ids"]
        counts = [self.count(made, place) for place in range(len(pictures))]
        if found.count(self.placeholder) == sum(counts) and ids.count(self.placeholder) == len(counts):
            rest = iter(counts)
            found = [own for each in ids for own in [each] * (next(rest) if each == self.placeholder else 1)]
        else:
            print("falling back to decode+retokenize, which may change prompt length (token drift).", flush=True)
        given = {name: made[name] for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in made}
        return found, {**given, "types": (torch.tensor([found]) == self.placeholder).int()}

    def picture(self, data: str) -> Any:
        from PIL import Image

        self.read.append(data)
        address = urllib.parse.urlparse(data)
        assert address.scheme == "file"
        found = Image.open(io.BytesIO(Path(urllib.parse.unquote(address.path)).read_bytes()))
        return found if found.mode == "RGB" else found.convert("RGB")

    def features(self, made: Mapping[str, Any], place: int) -> tuple[int, int]:
        """Rows and columns of a picture's features."""
        tower = self.config.vision_config
        if "image_grid_thw" in made:
            _, rows, columns = made["image_grid_thw"][place].tolist()
            return rows // tower.spatial_merge_size, columns // tower.spatial_merge_size
        if "image_sizes" in made:
            height, width = made["image_sizes"][place]
            return int(height) // self.settings["patch_size"], int(width) // self.settings["patch_size"]
        return 1, self.images.image_seq_length

    def count(self, made: Mapping[str, Any], place: int) -> int:
        """By `_get_num_multimodal_tokens` of the family's processor."""
        rows, columns = self.features(made, place)
        return rows * (columns + (self.kind == "mistral3"))

    def written(self, made: Mapping[str, Any], place: int) -> str:
        """By the family's processor, in the place of what it finds in a text."""
        rows, columns = self.features(made, place)
        if self.kind == "mistral3":
            return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"
        if self.kind == "gemma3":
            return f"\n\n<start_of_image>{'<image_soft_token>' * columns}<end_of_image>\n\n"
        return f"<|vision_start|>{'<|image_pad|>' * rows * columns}<|vision_end|>"


def taken(model: Any, given: Mapping[str, Any], length: int) -> dict[str, Any]:
    """What the model takes besides `length` tokens, of which those after the prompt are text."""
    import inspect

    import torch

    takes = inspect.signature(model.model.forward).parameters
    types = torch.nn.functional.pad(given["types"], (0, length - given["types"].shape[1]))
    return {name: value for name, value in given.items() if name != "types"} | {
        name: types for name in ("mm_token_type_ids", "token_type_ids") if name in takes
    }
