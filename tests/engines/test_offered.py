import pytest

from corerl.engines.offered import Shapes, shape_mismatch
from corerl.weights.adapters import adapters_of

A, B = adapters_of("model.layers.0.self_attn.q_proj.weight")
WHOLE: Shapes = {"a": (2, 3), "b": (4,)}
ADAPTERS: Shapes = {A: (8, 3), B: (2, 8)}


@pytest.mark.parametrize(
    ("offered", "told"),
    [
        (WHOLE, ""),
        ({"a": (2, 3)}, "the trainer does not send 1 of the model's 2 tensors, such as 'b'"),
        ({**WHOLE, "c": (1,)}, "the model lacks 1 of the 3 tensors that were sent, such as 'c'"),
        ({**WHOLE, "a": (3, 2)}, "the trainer sends 'a' with shape [3, 2], but the model requires [2, 3]"),
        ({}, "the trainer does not send 2 of the model's 2 tensors, such as 'a'"),
        ({**WHOLE, **ADAPTERS}, f"the model lacks 2 of the 4 tensors that were sent, such as {A!r}"),
    ],
)
def test_an_update_has_all_tensors_of_the_model_and_no_others(offered: Shapes, told: str) -> None:
    assert shape_mismatch(offered, WHOLE) == told


def test_adapters_may_arrive_alone_once_the_engine_has_the_rest() -> None:
    held = {**WHOLE, **ADAPTERS}
    for whole in (False, True):
        assert shape_mismatch(held, held, whole=whole) == ""
        assert shape_mismatch(WHOLE, held, whole=whole).startswith("the trainer does not send 2 of the model's 4 tens")
    assert shape_mismatch(ADAPTERS, held, whole=True) == ""
    assert shape_mismatch(ADAPTERS, held, whole=False).startswith("adapters have arrived alone, but the engine lacks")
    assert shape_mismatch({A: (8, 3)}, held, whole=True).startswith("the trainer does not send 1 of the model's 2 ")
