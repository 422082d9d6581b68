from __future__ import annotations

import inspect
import pydoc

from attrs import field, frozen

from corerl.config.options import option
from corerl.fields import comments, explain
from corerl.types import GradientResult, ParallelLayout
from corerl.weights import Chunk


@frozen(kw_only=True)
class Sampled:
    """Tokens of one sample, in two lines
    of text."""

    # How many there are,
    # with those of the prompt.
    length: int
    tokens: list[int] = field(  # [length] in order
        factory=list
    )
    rate: float = option("how fast", default=1.0)  # the help is told instead
    name: str = "a # is no comment here"

    # This is of no field.

    def rows(self) -> int:
        count: int = 1  # nor is this
        return count


def test_comments_are_those_beside_a_field_and_directly_above_it() -> None:
    assert comments(inspect.getsource(Sampled)) == {
        "length": "How many there are, with those of the prompt.",
        "tokens": "[length] in order",
        "rate": "the help is told instead",
        "name": "",
    }


def test_help_shows_what_the_code_says_of_each_field_and_the_class_is_as_before() -> None:
    explain(__name__)
    assert inspect.getdoc(Sampled) == (
        "Tokens of one sample, in two lines\nof text.\n\nFields:\n"
        "    length: int  # How many there are, with those of the prompt.\n"
        "    tokens: list[int]  # [length] in order\n"
        "    rate: float  # how fast\n"
        "    name: str"
    )
    assert Sampled(length=2, tokens=[3, 4]).rows() == 1
    assert Sampled(length=2).__doc__ == Sampled.__doc__


def test_public_types_are_explained() -> None:
    for cls, line in (
        (ParallelLayout, "outputs: bool  # this rank returns metrics and per-token outputs"),
        (GradientResult, "tokens: int  # that went through the model"),
        (Chunk, "shape: tuple[int, ...]  # of the whole HF tensor"),
    ):
        assert line in pydoc.render_doc(cls, renderer=pydoc.plaintext)
