"""What is to be kept of samples that end at texts, found by looking at every prefix of what was drawn without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from corerl.engines.base import Generation


def assert_cut_at(
    stop: Sequence[str], found: Generation, whole: Generation, tokenizer: PreTrainedTokenizerBase
) -> list[bool]:
    """`found` has of each row of `whole` the tokens up to the one that completes a stop text, and only such rows have
    stopped that way; returns which have."""
    rows = np.split(whole.tokens, whole.offsets[1:-1])
    stopped = []
    for row, (tokens, kept) in enumerate(zip(rows, np.split(found.tokens, found.offsets[1:-1]), strict=True)):
        texts = [tokenizer.decode(tokens[: n + 1].tolist(), skip_special_tokens=True) for n in range(len(tokens))]
        first = next((n for n, text in enumerate(texts) if any(each in text for each in stop)), None)
        end = len(tokens) if first is None else first + 1
        assert kept.tolist() == tokens[:end].tolist()
        begins, first_begins = int(found.offsets[row]), int(whole.offsets[row])
        np.testing.assert_allclose(
            found.logprobs[begins : begins + end], whole.logprobs[first_begins : first_begins + end], atol=1e-5
        )
        assert bool(found.truncated[row]) == (first is None and bool(whole.truncated[row]))
        assert not found.unfinished[row]
        stopped.append(first is not None)
    return stopped
