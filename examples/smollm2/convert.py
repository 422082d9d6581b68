"""`convert.py GGUF DIRECTORY` makes a Hugging Face directory of a file: config, bfloat16 weights, tokenizer, template.

The directory is then loaded and compared with the file. A difference ends the script with status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TEXT = "  3 - 12345 =\n\nDon't be na\u00efve, \u4f60\u597d"
CHAT = [
    {"role": "system", "content": "Reply with the answer alone."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
]


def convert(gguf: Path, directory: Path) -> PreTrainedModel:
    """Write the directory; returns the model as the file has it, in float32."""
    named = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "trust_remote_code": False}
    read: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved, so one that was not takes its weights.
    vars(read.config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**named).save_pretrained(directory)
    return read


def check(directory: Path, *, read: PreTrainedModel, gguf: Path) -> float:
    """Compare the directory with what the file says of itself and with the model read from it.

    Returns the mean absolute difference of log-probs, which bfloat16 makes. Raises ValueError for any other one.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    fields = GGUFReader(gguf).fields
    end = fields["tokenizer.ggml.eos_token_id"].contents()
    chat = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    found = {
        "vocabulary": vocabulary == fields["tokenizer.ggml.tokens"].contents(),
        "chat template": tokenizer.chat_template == fields["tokenizer.chat_template"].contents(),
        "text": tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT,
        "end tokens": {end} == {each.eos_token_id for each in (tokenizer, model.config, model.generation_config)},
        "end of a turn": end in chat[-2:],
    }
    if wrong := [name for name, right in found.items() if not right]:
        raise ValueError(f"{directory} differs from {gguf} in {', '.join(wrong)}; is it of another family of models?")
    tokens_BT = torch.tensor([chat])
    difference = (logprobs(model, tokens_BT) - logprobs(read, tokens_BT)).abs().mean().item()
    if not difference < 0.05:
        raise ValueError(f"log-probs of {directory} and {gguf} differ by {difference:.3f} on average, not below 0.05")
    return difference


def logprobs(model: PreTrainedModel, tokens_BT: torch.Tensor) -> torch.Tensor:
    """[B, T - 1] log p(token_t | tokens < t)."""
    with torch.inference_mode():
        logprobs_BTV = model(tokens_BT).logits[:, :-1].log_softmax(-1)
    return logprobs_BTV.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)


def main() -> None:
    gguf, directory = map(Path, sys.argv[1:])
    read = convert(gguf, directory)
    difference = check(directory, read=read, gguf=gguf)
    print(f"{directory}: log-probs differ from the file's by {difference:.1e} on average, as bfloat16 rounds")


if __name__ == "__main__":
    main()
