"""Pages are read in the repository too, where a link says only what stands in its brackets."""

import re
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import FENCE, PAGES, ROOT

OTHERS = [ROOT / "CHANGELOG.md"]
OTHERS += [page for folder in ("benchmarks", "examples") for page in sorted((ROOT / folder).rglob("*.md"))]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_words_and_leads_to_a_file(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text()))
    assert [target for words, target in links if not words.strip()] == []
    files = [target.partition("#")[0] for _, target in links if "://" not in target]
    assert [file for file in files if not (page.parent / file).exists()] == []
