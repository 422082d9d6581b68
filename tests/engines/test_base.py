import numpy as np
import pytest

from corerl.engines.base import GenerateRequest, SamplingParams


def request(rows: int) -> GenerateRequest:
    """Rows of one to three tokens."""
    offsets = np.concatenate([[0], np.cumsum(np.arange(rows) % 3 + 1)])
    return GenerateRequest(
        tokens=np.arange(offsets[-1]), offsets=offsets, noise_keys=np.arange(rows) * 31, params=SamplingParams()
    )


@pytest.mark.parametrize(("rows", "n", "expected"), [(10, 3, [3, 3, 4]), (2, 4, [1, 1]), (5, 1, [5]), (0, 2, [])])
def test_requests_are_split_evenly_and_in_order(rows: int, n: int, expected: list[int]) -> None:
    shares = request(rows).parts(n)
    assert [len(share) for share in shares] == expected
    assert [key for share in shares for key in share.noise_keys.tolist()] == request(rows).noise_keys.tolist()
    assert [token for share in shares for token in share.tokens.tolist()] == request(rows).tokens.tolist()
