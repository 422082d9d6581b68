import pytest
import torch

from corerl.algorithms.losses import TensorMetric
from corerl.algorithms.metrics import MetricSum
from corerl.types import Metric, Reduction


def metric(total: float, weight: float, reduction: Reduction = Reduction.MEAN) -> TensorMetric:
    return TensorMetric(torch.tensor(total), torch.tensor(weight), reduction)


def test_micro_batches_add_up_by_each_metrics_own_reduction() -> None:
    together = MetricSum()
    together.add(
        {
            "entropy": metric(3.0, 2.0),
            "loss": metric(0.5, 1.0, Reduction.SUM),
            "most": metric(4.0, 1.0, Reduction.MAX),
            "least": metric(4.0, 1.0, Reduction.MIN),
        }
    )
    together.add(
        {
            "entropy": metric(1.0, 6.0),
            "loss": metric(0.25, 1.0, Reduction.SUM),
            "most": metric(9.0, 1.0, Reduction.MAX),
            "least": metric(9.0, 1.0, Reduction.MIN),
            "rare": metric(2.0, 1.0),
        }
    )
    assert together.finish() == {
        "entropy": Metric(4.0, 8.0),
        "loss": Metric(0.75, 2.0, Reduction.SUM),
        "most": Metric(9.0, 1.0, Reduction.MAX),
        "least": Metric(4.0, 1.0, Reduction.MIN),
        "rare": Metric(2.0, 1.0),
    }


def test_no_graph_is_kept_alive() -> None:
    weight = torch.ones((), requires_grad=True)
    parts = MetricSum()
    parts.add({"loss": TensorMetric(weight * 2, weight * 3)})
    assert parts.finish() == {"loss": Metric(2.0, 3.0)}


def test_two_reductions_under_one_name_are_refused() -> None:
    parts = MetricSum()
    parts.add({"x": metric(1.0, 1.0)})
    with pytest.raises(ValueError, match="metric 'x' has the reduction max, but had mean in an earlier micro-batch"):
        parts.add({"x": metric(1.0, 1.0, Reduction.MAX)})
