"""The engine on transformers, which says what a script has, with the model's own log-probs of that."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from transformers import PreTrainedTokenizerBase

from corerl import Summary
from corerl.config import ModelConfig
from corerl.engines import EngineContext, GenerateRequest, Generation, OnFinished
from corerl.models import load_tokenizer
from corerl.types import offsets_of
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import SPEC as TRANSFORMERS
from tests.in_process import execute_here, small

NAME = "plugins.agents.tests.scripted_engine:SPEC"
CALL = (
    "I add.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n"
    "</parameter>\n</function>\n</tool_call>"
)
ANSWER = "I read it.\n</think>\n\nIt is {found}."


def reply(text: str, key: int) -> str:
    """The first answer calls the tool, with the numbers of the question or, by the noise, with others; the second one
    says what the tool has returned."""
    if results := re.findall(r"<tool_response>\n(.*)\n</tool_response>", text):
        return ANSWER.format(found=results[-1])
    a, b = re.findall(r"user\n(\d)\+(\d)=", text)[-1]
    return CALL.format(a=a, b=b if key % 2 else (int(b) + 1) % 10)


class ScriptedEngine(TransformersEngine):
    reply = staticmethod(reply)  # (text before the answer, noise key) -> the answer

    def __init__(self, model: ModelConfig, options: Any, context: EngineContext) -> None:
        super().__init__(model, options, context)
        self._tokenizer = load_tokenizer(tokenizer=model.tokenizer, path=model.path)

    @torch.inference_mode()
    def _generate(self, request: GenerateRequest, version: int, on_finished: OnFinished, *encoded: Any) -> Generation:
        tokens, logprobs, truncated = [], [], []
        begun = request.answered.tolist()  # tokens of answers that are sampled in parts
        rows = zip(request.by_row(), request.noise_keys.tolist(), request.left.tolist(), begun, strict=True)
        for row, key, left, answered in rows:
            text = self.reply(self._tokenizer.decode(row[: len(row) - answered]), key)
            said = np.array([*self._tokenizer.encode(text), request.params.stop_tokens[0]])[answered:]
            truncated.append(len(said) > left)
            said = said[:left]
            logits = self._model(torch.tensor([[*row, *said]])).logits[0, len(row) - 1 : -1]
            every = torch.log_softmax(logits.float() / request.params.temperature, dim=-1)
            tokens.append(said)
            logprobs.append(every.gather(1, torch.tensor(said)[:, None])[:, 0].numpy())
        sizes = np.array([len(each) for each in tokens])
        on_finished(len(sizes))
        return Generation(
            tokens=np.concatenate(tokens),
            offsets=offsets_of(sizes),
            logprobs=np.concatenate(logprobs),
            versions=np.full(sizes.sum(), version, dtype=np.int64),
            truncated=np.array(truncated),
            unfinished=np.zeros(len(sizes), np.bool_),
        )


def run(
    directory: Path, tokenizer: PreTrainedTokenizerBase, function: str, *settings: str, samples: int = 4
) -> Summary:
    """Train on episodes of this function about four sums, two each step, with a model of this tokenizer."""
    tokenizer.save_pretrained(directory / "tokenizer")
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in ((1, 2), (3, 4), (5, 2), (2, 2))]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
    tokens = ("model.config.vocab_size=257", *(f"model.config.{each}_token_id=256" for each in ("bos", "eos", "pad")))
    data = (f"data.source={directory}/prompts.jsonl", "data.chat=true", "data.held_out=0")
    rollout = ("rollout.sampler=episodes", "rollout.prompts=2", f"rollout.samples={samples}", "rollout.save=true")
    short = ("train.schedule.warmup_steps=0", "checkpoint.every=0", "checkpoint.export=false")
    own = (f"model.tokenizer={directory}/tokenizer", f"samplers.episodes.function={function}")
    return execute_here(small(directory, *own, *tokens, *data, *rollout, *short, *settings))


SPEC = evolve(TRANSFORMERS, implementation="plugins.agents.tests.scripted_engine:ScriptedEngine")
