"""Run megatron-core without CUDA: inside `CudaOnHost`, the CPU stands in for the GPU.

megatron-core assumes a GPU in three ways, each with a narrow replacement:

- `torch.cuda.current_device()` as a device: the CPU device;
- the literal "cuda" as a device, `.cuda()`, pinned memory, and comparisons with `tensor.type()`, which begins with
  "torch.cuda" on a GPU: a TorchFunctionMode that rewrites these calls;
- streams, events and the GPU's random generator: no-ops, and the CPU's generator.

It also takes all communication for NCCL's, which gathers parts of different sizes, where gloo refuses them: the ranks
that split an expert each bring another number of tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextmanager
def calling_megatron(device: torch.device) -> Iterator[None]:
    """Wrap every call into megatron-core in this block; it can be nested.

    Function modes are per thread, and calls to one backend may come from several threads: enter it in each call.
    """
    with warnings.catch_warnings(), nullcontext() if device.type == "cuda" else CudaOnHost():
        # Warnings about optional libraries and about names that torch will change, which users cannot fix.
        warnings.filterwarnings("ignore", module="megatron")
        warnings.filterwarnings("ignore", message="`torch.distributed.|Please use DTensor", category=FutureWarning)
        yield


class CudaOnHost:
    def __enter__(self) -> None:
        from megatron.core.tensor_parallel import mappings, random
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

        self._undone = ExitStack()
        replaced: list[tuple[Any, dict[str, Any]]] = [
            (
                torch.cuda,
                {
                    "current_device": lambda: CPU,
                    "synchronize": lambda device=None: None,
                    "current_stream": lambda device=None: Stream(),
                    "default_stream": lambda device=None: Stream(),
                    "stream": lambda stream: nullcontext(),
                    "set_stream": lambda stream: None,
                    "Stream": Stream,
                    "Event": Stream,
                    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
                    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
                    # torch's own would note where each was called, for three kinds of devices that are not there.
                    "manual_seed": torch.default_generator.manual_seed,
                },
            ),
            (torch.cuda.nvtx, {"range_push": lambda message: 0, "range_pop": lambda: 0}),
            (
                random,
                {
                    "_get_cuda_rng_state": lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
                    "_set_cuda_rng_state": lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
                },
            ),
            (
                mappings,
                {
                    "_gather_along_first_dim": _gathering(mappings._gather_along_first_dim),
                    "_reduce_scatter_along_first_dim": _scattering(mappings._reduce_scatter_along_first_dim),
                },
            ),
            # The sizes of an all-to-all become a list only when moved from a GPU.
            (token_dispatcher, {"maybe_move_tensor_to_cpu": _to_list}),
            # 0.16.1 reads this name of TransformerEngine's even if that is not installed.
            (moe_utils, {"te_general_gemm": getattr(moe_utils, "te_general_gemm", None)}),
            (multi_latent_attention, {"HAVE_TE": False}),  # likewise, of names that are then no classes
            # torch runs the backward pass outside of function modes, but recomputed layers run forward code in it.
            (torch.autograd, {"_engine_run_backward": _inside_mode(torch.autograd._engine_run_backward)}),
        ]
        for owner, names in replaced:
            for name, value in names.items():
                self._undone.enter_context(mock.patch.object(owner, name, value, create=True))
        self._undone.enter_context(_Rewritten())

    def __exit__(self, *exception: Any) -> None:
        self._undone.close()


def _inside_mode(engine: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Rewritten():
            return engine(*args, **kwargs)

    return run


def _gathering(evenly: Callable[..., Any]) -> Callable[..., Any]:
    """megatron-core's all-gather, which also takes parts of different sizes, of `output_split_sizes` rows each."""

    def gather(input_: Any, group: Any, output_split_sizes: Any = None, *others: Any, **named: Any) -> Any:
        if output_split_sizes is None:
            return evenly(input_, group, output_split_sizes, *others, **named)
        sizes = [int(size) for size in output_split_sizes]
        padded = [input_.new_empty(max(sizes), *input_.shape[1:]) for _ in sizes]
        dist.all_gather(padded, pad(input_, (0, 0) * (input_.dim() - 1) + (0, max(sizes) - len(input_))), group=group)
        return torch.cat([part[:size] for part, size in zip(padded, sizes, strict=True)])

    return gather


def _scattering(evenly: Callable[..., Any]) -> Callable[..., Any]:
    """Likewise its reduce-scatter."""

    def scatter(input_: Any, group: Any, input_split_sizes: Any = None, *others: Any, **named: Any) -> Any:
        if input_split_sizes is None:
            return evenly(input_, group, input_split_sizes, *others, **named)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()]

    return scatter


def _to_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _names_cuda(device: Any) -> bool:
    return str(device).partition(":")[0] == "cuda" if isinstance(device, (str, torch.device)) else False


class _Rewritten(TorchFunctionMode):
    """Rewrites calls that place a tensor on a GPU to place it on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()  # pinning makes a copy, whose source may be freed
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class Stream:
    """A stream or event that does nothing: on the host everything runs in order."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def record_event(self, event: Any = None) -> Stream:
        return self

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True
