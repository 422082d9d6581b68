"""The engine on transformers, which says what a script has, with the model's own log-probs of that."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from attrs import evolve

from corerl.config import ModelConfig
from corerl.engines import EngineContext, GenerateRequest, Generation, OnFinished
from corerl.models import load_tokenizer
from corerl.types import offsets_of
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import SPEC as TRANSFORMERS

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


SPEC = evolve(TRANSFORMERS, implementation="plugins.agents.tests.scripted_engine:ScriptedEngine")
