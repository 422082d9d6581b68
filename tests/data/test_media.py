"""What fields of published data sets hold, by their names and by what is in them."""

from typing import Any

import pytest

from corerl.data.media import kind_in_field, kind_in_messages

PNG = b"\x89PNG\r\n\x1a\n"
STORED = {"bytes": PNG, "path": None}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("images", [STORED], "images"),
        ("images", ["a.png"], "images"),
        ("Image", STORED, "images"),
        ("image_1", {"url": "https://example.org/a.png"}, "images"),
        ("image_path", "a.png", "images"),
        ("images", [[255, 0], [0, 255]], "images"),
        ("audio", {"array": [0.0], "sampling_rate": 16000}, "audio"),
        ("videos", ["a.mp4"], "video"),
        ("figure", STORED, "media"),
        ("figure", {"bytes": None, "path": "a.png"}, "media"),
        ("scan", PNG, "media"),
        ("scan", b"RIFF....WAVE", "media"),
        ("clips", [None, b"....ftypisom"], "media"),
        ("recording", {"array": [0.0], "sampling_rate": 16000}, "media"),
        ("scan", "data:image/png;base64,iVBORw0KGgo=", "media"),
        # nothing
        ("images", None, ""),
        ("images", [], ""),
        ("images", [None, ""], ""),
        ("image", {"bytes": None, "path": None}, ""),
        ("images", 3, ""),
        ("has_image", True, ""),
        ("image_caption", "a red square", ""),
        ("imagery", "text", ""),
        ("digest", b"\x00\x01\x02\x03", ""),
        ("options", {"bytes": 1, "path": 2, "mode": 3}, ""),
        ("text", "see data:image/png", ""),
    ],
)
def test_a_field_is_known_by_its_name_or_its_content(name: str, value: Any, kind: str) -> None:
    assert kind_in_field(name, value) == kind


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"content": [{"type": "image"}, {"type": "text", "text": "?"}]}, "images"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "images"),
        ({"content": [{"type": "input_audio", "input_audio": {}}]}, "audio"),
        ({"content": [{"type": "input_image"}]}, "images"),
        ({"content": [{"type": "video"}]}, "video"),
        ({"content": [{"type": "file"}]}, "files"),
        ({"content": "<image>?", "images": ["a.png"]}, "images"),
        ({"content": [{"type": "text", "text": "?"}], "images": []}, ""),
        ({"content": "data:image/png"}, ""),
    ],
)
def test_messages_are_known_by_their_parts_and_fields(message: dict[str, Any], kind: str) -> None:
    assert kind_in_messages([{"role": "system", "content": "?"}, {"role": "user", **message}]) == kind
