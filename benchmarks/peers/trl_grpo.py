"""The quickstart's task on TRL's GRPOTrainer, in an environment of its own; one process a rank, started by torchrun.

    torchrun --standalone --nproc-per-node 2 trl_grpo.py TASK

TASK holds what `benchmarks.quickstart.write_task` wrote. Rank 0 leaves result.json there and prints it: seconds of the
training loop, and the share of the held-out prompts whose greedy answer is exact.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PACKAGES = ("trl", "accelerate", "torch", "transformers")


def position_match(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of positions that are right, over the longer of answer and response."""
    return [
        sum(wanted == got for wanted, got in zip(right, text, strict=False)) / max(len(right), len(text))
        for right, text in zip(answer, completions, strict=True)
    ]


class Clock(TrainerCallback):
    """Seconds from the first step's beginning to the last one's end."""

    seconds = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self._began


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.inference_mode()
def exact_match(model: Any, tokenizer: Any, prompts: list[dict[str, str]], max_tokens: int) -> float:
    """Of one greedy response to each prompt."""
    model.eval()
    inputs = tokenizer([row["prompt"] for row in prompts], return_tensors="pt", padding=True, padding_side="left")
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    found = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=config
    )
    texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == row["answer"] for text, row in zip(texts, prompts, strict=True)) / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    task: Path = parser.parse_args().task
    torch.set_num_threads(1)
    settings = json.loads((task / "settings.json").read_text())
    optimizer, schedule = settings["optimizer"], settings["schedule"]
    processes = int(os.environ["WORLD_SIZE"])
    # mini_batches optimizer steps on each batch that was generated; each on so many samples a process.
    per_process = settings["prompts"] * settings["samples"] // settings["mini_batches"] // processes
    assert schedule["decay"] == "linear", schedule
    config = GRPOConfig(
        output_dir=str(task / "trl"),
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        # the batch
        max_steps=settings["steps"],
        per_device_train_batch_size=per_process,
        steps_per_generation=settings["mini_batches"],
        num_generations=settings["samples"],
        gradient_accumulation_steps=1,
        shuffle_dataset=False,
        # sampling
        temperature=settings["temperature"],
        max_completion_length=settings["max_tokens"],
        # the loss
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        entropy_coef=settings["entropy_coef"],
        # the optimizer
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["clip_norm"],
        # transformers' "linear" ends at 0; this one is linear too, from the peak to a share of it
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=schedule["warmup_steps"],
        lr_scheduler_kwargs={
            "num_decay_steps": settings["steps"] - schedule["warmup_steps"],
            "decay_type": "linear",
            "min_lr_ratio": schedule["final_ratio"],
        },
        # nothing written, nothing shown; metrics as often as CoreRL's
        save_strategy="no",
        logging_steps=settings["mini_batches"],
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32),
        reward_funcs=position_match,
        args=config,
        train_dataset=Dataset.from_list(rows(task / "train.jsonl")),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if trainer.accelerator.is_main_process:
        model = trainer.accelerator.unwrap_model(trainer.model)
        result = {
            "loop_seconds": clock.seconds,
            "exact_match": exact_match(model, tokenizer, rows(task / "held_out.jsonl"), settings["max_tokens"]),
            "optimizer_steps": trainer.state.global_step,
            "rewards": [log["reward"] for log in trainer.state.log_history if "reward" in log],
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        }
        (task / "result.json").write_text(json.dumps(result))
        print(json.dumps(result), flush=True)
    trainer.accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
