"""Which modules SGLang can hold adapters of. Imports nothing heavy, since the spec asks."""

from __future__ import annotations

from collections.abc import Collection, Iterator

# What SGLang 0.5.17 knows adapters of (the choices of its --lora-target-modules), and of those what it holds as one: it
# silently leaves out the adapters of a part whose first one has none.
KNOWN = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
    *("q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "wq_b", "wk", "weights_proj", "qkvr", "wo_ud"),
)
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def misfits(modules: Collection[str]) -> Iterator[str]:
    """Why SGLang cannot hold adapters of the modules with these last names."""
    merged = "leave them out of lora.targets, or set weights.lora to 'merged'"
    if unknown := sorted(set(modules) - set(KNOWN)):
        yield f"SGLang has no adapters of {', '.join(unknown)}; {merged}"
    for parts in TOGETHER:
        if 0 < len(found := [part for part in parts if part in modules]) < len(parts):
            yield (
                f"SGLang holds {', '.join(parts)} as one, but only {', '.join(found)} would have adapters; name all of "
                "them in lora.targets, or none, or set weights.lora to 'merged'"
            )
