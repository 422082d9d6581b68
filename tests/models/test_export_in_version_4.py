"""Exports are read by transformers 4, on which many engines are; `make test-exports-oldest` installs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from corerl.config.load import load_config
from corerl.models.build import named_weights
from corerl.models.config import hf_config
from corerl.models.export import export_directory
from corerl.models.names import hf_boxes
from corerl.models.tokenizer import load_tokenizer
from corerl.types import Output
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model
from tests.models.passes import TEMPERATURE, drawn, passed, policy_of
from tests.models.test_export import LAYERS, LLAMA3, LONG, OLDER, PARTIAL, YARN

VERSION_4 = os.environ.get("CORERL_TEST_TRANSFORMERS_4", "")  # the directory that it is in
pytestmark = [pytest.mark.processes, pytest.mark.skipif(not VERSION_4, reason="`make test-exports-oldest` runs it")]

QUICKSTART = load_config(Path(__file__).parents[2] / "examples/quickstart.toml").model
TEXT = "3501>s97"  # what the quickstart's tokenizer knows
ENDS = [2, 3]
FACTORS = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8}  # one for every two of a head's 16 dimensions
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen2": {"rope_parameters": YARN},
    "phi3": {"rope_parameters": LONG | FACTORS, "original_max_position_embeddings": 64, "pad_token_id": None},
    "gpt_neox": {"rope_parameters": PARTIAL},
    "gemma3_text": {"rope_parameters": LAYERS},
    "mamba2": {"time_step_limit": (0.01, float("inf"))},
    "modernbert-decoder": {"sliding_window": 4},  # half of local_attention, of which both versions compute it
}
BOUNDS = {"apertus": 1e-3}  # whose activation has settings that version 4 rounds to bfloat16
UNUSED = {
    "gemma3n_text": "keys and values of layers that take another one's",
    "longcat_flash": "weights of experts that pass tokens on, which version 5 has",
}
READ = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
into, text, temperature, ids, *paths = sys.argv[1:]
found = {}
for path in paths:
    config = AutoConfig.from_pretrained(path)
    if getattr(config, "use_mamba_kernels", False):
        config.use_mamba_kernels = False  # there is no GPU
    model, info = AutoModelForCausalLM.from_pretrained(path, config=config, dtype="auto", output_loading_info=True)
    loose = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    tokens = torch.tensor(json.loads(ids)) % config.vocab_size
    with torch.no_grad():
        log_p = (model(input_ids=tokens[None]).logits[0, :-1] / float(temperature)).log_softmax(-1)
    logprobs = log_p.gather(-1, tokens[1:, None])[:, 0]
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoded = tokenizer.encode(text)
    ends = model.generation_config.eos_token_id
    found[path] = (loose, str(model.dtype), encoded, tokenizer.decode(encoded), ends, logprobs)
torch.save((transformers.__version__, found), into)
"""


def test_transformers_4_computes_the_log_probs_of_every_exported_model_and_reads_its_tokenizer(tmp_path: Path) -> None:
    configs: dict[str, PreTrainedConfig] = {"quickstart": hf_config(QUICKSTART)}
    configs |= {kind: smallest_config(kind, **FIELDS.get(kind, {})) for kind in OLDER}
    tokenizer = load_tokenizer(tokenizer=QUICKSTART.tokenizer, path="")
    (ids,) = drawn(60)
    wanted = {}
    for name, config in configs.items():
        model = drawn_model(config)
        weights = named_weights(model)
        tensors = [(box.name, box.view(weights[of].detach())) for of, boxes in hf_boxes(model).items() for box in boxes]
        path, ends = tmp_path / name, {"eos_token_id": ENDS}
        export_directory(path, config=config, tokenizer=tokenizer, tensors=tensors, generation=ends)
        with torch.no_grad():
            wanted[path] = passed(policy_of(model, "auto"), [ids % config.vocab_size], [Output.LOGPROBS])

    words = [str(tmp_path / "read"), TEXT, str(TEMPERATURE), json.dumps(ids.tolist()), *map(str, wanted)]
    environment = {**os.environ, "PYTHONPATH": VERSION_4}
    done = subprocess.run([sys.executable, "-c", READ, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, found = torch.load(tmp_path / "read")
    assert version.startswith("4.57.")
    encoded = tokenizer.encode(TEXT)
    for path, outputs in wanted.items():
        loose, *read, logprobs = found[str(path)]
        assert (path.name, bool(loose)) == (path.name, path.name in UNUSED), loose
        assert (path.name, read) == (path.name, ["torch.float32", encoded, tokenizer.decode(encoded), ENDS])
        apart = float((logprobs - outputs[Output.LOGPROBS][1:]).abs().max())
        assert apart < BOUNDS.get(path.name, 1e-5), (path.name, apart)
