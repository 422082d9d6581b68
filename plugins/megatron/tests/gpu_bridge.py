"""Compare small models that Megatron-Bridge builds on GPUs with transformers and the plain backend: rows of a table.

    python -m plugins.megatron.tests.gpu_bridge draw DIRECTORY minimax_m2 olmoe
    python -m plugins.megatron.tests.gpu_bridge compare DIRECTORY minimax_m2 olmoe --options '{"expert_parallel": 2}'

`draw` writes models and what they should compute; flash-linear-attention must not be importable in it, which
transformers would use. A comparison of several ranks needs as many GPUs. The columns of a row: log-probs' distance from
transformers in float32, mean and largest; that of transformers in bfloat16; how far the gradient norms of three steps
are from the plain backend's; how many tensors are not as in the file after loading.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from corerl.types import FloatArray, Output
from corerl_testing import (
    PLAIN,
    TRAIN,
    RankFailed,
    RankPool,
    Setup,
    different,
    drawn_model,
    grad_norm_of,
    in_order,
    make_samples,
    running,
    smallest_config,
    train,
    transformers_outputs,
    whole,
)
from plugins.megatron.tests import ranks

GDN = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
# What the kernels of gated delta nets want, and what Megatron-Bridge does not build.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_text": GDN,
    "qwen3_5_moe_text": GDN,
    "qwen3_next": {**GDN, "mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
}
SAMPLES = make_samples(7, samples=13)
STEPS = 3
WEIGHTS, WANTED = "model.safetensors", "wanted.npz"


def draw(directory: Path, model_type: str) -> None:
    drawn_model(smallest_config(model_type, initializer_range=0.1, **FIELDS.get(model_type, {}))).save_pretrained(
        directory
    )
    setup = Setup(backend=PLAIN, model=str(directory), train=evolve(TRAIN, recompute="none"))
    with running(setup) as worker:
        norms = [train(worker, setup, number).grad_norm for number in range(STEPS)]
    logprobs = transformers_outputs(directory, SAMPLES)[Output.LOGPROBS]
    np.savez(directory / WANTED, logprobs=logprobs, bfloat16=in_bfloat16(directory), norms=norms)


@torch.no_grad()
def in_bfloat16(directory: Path) -> FloatArray:
    """Log-probs [tokens] of each sample by transformers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    found = np.zeros(len(SAMPLES.tokens), np.float32)
    for start, end in zip(SAMPLES.offsets[:-1], SAMPLES.offsets[1:], strict=True):
        tokens = torch.tensor(SAMPLES.tokens[start:end], device=device)
        logits = model(input_ids=tokens[None]).logits[0, :-1].float() / SAMPLES.temperature
        found[start + 1 : end] = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].cpu().numpy()
    return found


def compare(directory: Path, model_type: str, precision: str, options: Mapping[str, Any], device: str = "cuda") -> str:
    of_model = [options.get(f"{name}_parallel", 1) for name in ("tensor", "pipeline", "context")]
    setup = Setup(
        backend="megatron",
        model=str(directory),
        device=device,
        train=evolve(TRAIN, precision=precision, recompute="none"),
        options=options,
    )
    pool = RankPool(
        max(math.prod(of_model), options.get("expert_parallel", 1)), device, environment={"NVIDIA_TF32_OVERRIDE": "0"}
    )
    try:
        found = pool.run(ranks.built, setup, SAMPLES, STEPS)
    except RankFailed as failed:
        return f"| `{model_type}` | {precision} | {json.dumps(options)} | {str(failed).splitlines()[-1]} |"
    finally:
        pool.close()
    with np.load(directory / WANTED) as wanted:
        apart = np.abs(in_order([each.outputs for each in found], SAMPLES, Output.LOGPROBS) - wanted["logprobs"])
        half = np.abs(wanted["bfloat16"] - wanted["logprobs"])
        norms = np.array([grad_norm_of([each.results[step] for each in found]) for step in range(STEPS)])
        norms = np.abs(norms / wanted["norms"] - 1)
    state = whole([each.at_start for each in found])
    loaded = {**state["master"], **state.get("buffer", {})}
    changed = different({"": loaded}, {"": load_file(directory / WEIGHTS)}, [""])
    return (
        f"| `{model_type}` | {precision} | {json.dumps(options)} | {apart.mean():.1e}, {apart.max():.1e} | "
        f"{half.mean():.1e}, {half.max():.1e} | {', '.join(f'{each:.1e}' for each in norms)} | {len(changed)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["draw", "compare"])
    parser.add_argument("directory", type=Path, help="where the models are")
    parser.add_argument("model_types", nargs="+")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--options", type=json.loads, default={}, help="of the backend, as JSON; one by default")
    arguments = parser.parse_args()
    for name in arguments.model_types:
        directory = arguments.directory / name
        if arguments.what == "draw":
            draw(directory, name)
            continue
        for precision in arguments.precision or ["float32", "bfloat16"]:
            print(compare(directory, name, precision, {"bridge": True, **arguments.options}), flush=True)


if __name__ == "__main__":
    main()
