from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from corerl.pictures import Picture, save_pictures


def test_each_picture_is_written_once(tmp_path: Path) -> None:
    first, second = (Picture(np.full((2, 3, 3), shade, np.uint8)) for shade in (0, 255))
    save_pictures([], tmp_path)
    assert not any(tmp_path.iterdir())
    save_pictures([first, first], tmp_path)
    kept = tmp_path / "pictures" / f"{first.id[:16]}.png"
    assert list(tmp_path.rglob("*.*")) == [kept]
    kept.write_bytes(b"as it is")
    save_pictures([first, second], tmp_path)
    assert kept.read_bytes() == b"as it is"
    written = tmp_path / "pictures" / f"{second.id[:16]}.png"
    np.testing.assert_array_equal(np.asarray(Image.open(written)), second.pixels)
    assert {*tmp_path.rglob("*.*")} == {kept, written}
