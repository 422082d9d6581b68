import numpy as np
import torch

from corerl.ops.noise import GAMMA, mix


def reference_mix(z: int) -> int:
    """SplitMix64's output function on unbounded Python integers, as the paper prints it."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_mixing_gives_the_published_outputs_of_splitmix64_seeded_with_1234567():
    states = torch.tensor([1234567]) + torch.arange(1, 6) * GAMMA
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [value % 2**64 for value in mix(states).tolist()] == published


def test_torch_numpy_and_unbounded_integers_mix_alike_negative_numbers_included():
    values = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, GAMMA]
    expected = [reference_mix(value % 2**64) for value in values]
    assert [value % 2**64 for value in mix(torch.tensor(values)).tolist()] == expected
    assert [value % 2**64 for value in mix(np.array(values)).tolist()] == expected
