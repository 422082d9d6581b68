"""Move HF-named weights from trainer to engines.

A `Box` is a block of a tensor: its offsets and sizes. A `Chunk` is the block of one HF tensor that a rank holds, with
its memory. A `Manifest` says which HF tensors an update has, with their shapes and dtypes, in which `Bucket`s: a bucket
is sent at once, and has a place for each tensor in flat memory. `GatherPlan` fills a bucket from the chunks of all
ranks; a transport's `WeightSender` sends it, and its `Receiver` gives the engine views of the HF tensors.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.weights.adapters import adapted as adapted
    from corerl.weights.adapters import adapters_of as adapters_of
    from corerl.weights.adapters import is_adapter as is_adapter
    from corerl.weights.checksums import bit_sums as bit_sums
    from corerl.weights.checksums import checksum as checksum
    from corerl.weights.checksums import digest as digest
    from corerl.weights.chunks import Box as Box
    from corerl.weights.chunks import Chunk as Chunk
    from corerl.weights.chunks import TensorSource as TensorSource
    from corerl.weights.chunks import fill as fill
    from corerl.weights.chunks import flat_range_views as flat_range_views
    from corerl.weights.chunks import intersect as intersect
    from corerl.weights.chunks import within as within
    from corerl.weights.gather import all_gather_json as all_gather_json
    from corerl.weights.manifest import Bucket as Bucket
    from corerl.weights.manifest import Manifest as Manifest
    from corerl.weights.manifest import build_manifest as build_manifest
    from corerl.weights.manifest import proportionate_bucket as proportionate_bucket
    from corerl.weights.pinning import CudaPinning as CudaPinning
    from corerl.weights.quantize import FP8 as FP8
    from corerl.weights.quantize import SCALE as SCALE
    from corerl.weights.quantize import as_sent as as_sent
    from corerl.weights.quantize import converted_manifest as converted_manifest
    from corerl.weights.quantize import is_quantized as is_quantized
    from corerl.weights.transport import Address as Address
    from corerl.weights.transport import Arriving as Arriving
    from corerl.weights.transport import Receiver as Receiver
    from corerl.weights.transport import WeightSender as WeightSender
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
