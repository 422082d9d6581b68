from __future__ import annotations

from unittest import mock

import pytest

from docs import quoted


@pytest.mark.parametrize("page", quoted.pages(), ids=lambda page: page.name)
def test_the_code_of_a_page_is_that_of_its_files(page: quoted.Path) -> None:
    text = page.read_text()
    assert quoted.written(text) == text, "write it anew: python docs/quoted.py"


def test_a_block_is_rewritten_as_its_line_asks() -> None:
    def page(asked: str, code: str = "old\n") -> str:
        return f"before\n\n<!-- code: {asked} -->\n```python3\n{code}```\n\nafter\n\n```python\nx = 1\n```\n"

    asked = "corerl/types.py ParallelLayout.data_parallel from 'return' to 'no such line, so none'"
    with pytest.raises(ValueError, match="no line with 'no such line, so none'"):
        quoted.written(page(asked))
    for old in ("", "old\n", "def f():\n\n    pass\n"):
        found = quoted.written(page("docs/quoted.py pages", old))
        assert found == page(
            "docs/quoted.py pages",
            'def pages() -> list[Path]:\n    return sorted(page for page in (ROOT / "docs").rglob("*.md") '
            'if "_build" not in page.parts)\n',
        )
    table = "before\n\n<!-- table: docs.quoted {} -->\n| a |\n|---|\n| b |\n\nafter | c |\n"
    with mock.patch.object(quoted, "rows", create=True, return_value="| d |\n|---|\n"):
        found = quoted.written(table.format("rows"))
    assert found == "before\n\n<!-- table: docs.quoted rows -->\n| d |\n|---|\n\nafter | c |\n"
    method = quoted.written(page("corerl/types.py ParallelLayout.data_parallel to 'return'"))
    assert "```python3\n@classmethod\ndef data_parallel(cls, " in method and "return cls" not in method
    with pytest.raises(ValueError, match="^there is no class, function or method ParallelLayout.none$"):
        quoted.written(page("corerl/types.py ParallelLayout.none"))
