"""Draw the pictures of the documentation as SVG files beside this one: `python docs/pictures/draw.py`.

What they show is asked of the code where it can be: which sample goes into which micro-batch, which process onto which
device, which rank into which of Megatron's groups. They stand on paper of their own, so that they read the same on a
light page and on a dark one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

import corerl
from corerl.cluster.arrangement import arrange
from corerl.data.plan import StepPlan, plan_steps
from corerl.engines.base import Generation, SamplingParams
from corerl.models.tokenizer import character_tokenizer
from corerl.plan.residency import FORWARD, SAMPLE, UPDATE, EngineMemory, residency_plan, training
from corerl.plugin.spec import ACTOR
from corerl.types import MemoryKind, ParallelLayout, SampleBatch, offsets_of
from corerl.weights.manifest import build_manifest
from corerl_agents.conversation import Conversation, Renderer

HERE = Path(__file__).parent
STYLE = """
    .paper { fill: #ffffff } .zone { fill: #f4f6f8; stroke: #c9d1d9 } .box { fill: #ffffff; stroke: #57606a }
    .core { fill: #ddf4e4; stroke: #2da44e } .plug { fill: #dbeafe; stroke: #2563eb; stroke-dasharray: 5 3 }
    .a { fill: #bfdbfe } .b { fill: #bbe7c8 } .c { fill: #fcd9a8 } .d { fill: #e4cdf5 } .prompt { fill: #afb8c1 }
    .token { stroke: #ffffff } .empty { fill: #ffffff; stroke: #8c959f; stroke-dasharray: 3 3 }
    .critic { fill: #fff3cd; stroke: #bf8700 } .ranks { fill: #2da44e } .engine { fill: #2563eb }
    .line { stroke: #d8dee4 }
    .name { fill: #1f2328 } .small { fill: #57606a; font-size: 12px }
    .middle { text-anchor: middle } .end { text-anchor: end }
    .way { fill: none; stroke: #1f2328; stroke-width: 1.5 } .weights { fill: none; stroke: #2563eb; stroke-width: 2 }
"""


class Picture:
    """SVG, element by element; x and y in pixels, from the upper left."""

    def __init__(self, width: int, height: int, *, title: str, description: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"',
            '     aria-labelledby="title description" font-size="14" font-family="ui-sans-serif, sans-serif">',
            f'  <title id="title">{escape(title)}</title>',
            f'  <desc id="description">{escape(description)}</desc>',
            f"  <style>{STYLE}  </style>",
            "  <defs>",
            *(
                f'    <marker id="{name}" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto" '
                f'markerUnits="userSpaceOnUse"><path d="M0 0 L9 4 L0 8 z" fill="{color}"/></marker>'
                for name, color in (("head", "#1f2328"), ("blue", "#2563eb"))
            ),
            "  </defs>",
        ]
        self.box(0, 0, width, height, "paper", round=0)

    def box(self, x: float, y: float, width: float, height: float, cls: str, *, round: float = 6) -> None:  # noqa: A002
        corners = f' rx="{round:g}"' if round else ""
        self.parts.append(f'  <rect class="{cls}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corners}/>')

    def text(self, x: float, y: float, words: str, cls: str = "small") -> None:
        self.parts.append(f'  <text class="{cls}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def named(self, x: float, y: float, width: float, height: float, cls: str, name: str, small: str = "") -> None:
        """A box with a name in its middle, and a smaller line below that."""
        self.box(x, y, width, height, cls)
        center, middle = x + width / 2, y + height / 2
        self.text(center, middle + (-3 if small else 5), name, "name middle")
        if small:
            self.text(center, middle + 14, small, "small middle")

    def way(self, path: str, *, weights: bool = False) -> None:
        """An arrow along a path of SVG."""
        cls, head = ("weights", "blue") if weights else ("way", "head")
        self.parts.append(f'  <path class="{cls}" d="{path}" marker-end="url(#{head})"/>')

    def curve(self, points: Sequence[tuple[float, float]], *, weights: bool = False) -> None:
        """A line through these points."""
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'  <path class="{"weights" if weights else "way"}" d="M{path}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'  <path class="line" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


# ---- the way that data takes -----------------------------------------------------------------------------------------

TOKEN = 11  # pixels
PROMPT = 2  # tokens of each prompt
GROUPS = "ABCD"
RESPONSES = (8, 1, 3, 4, 2, 6, 4, 3)  # tokens of each sample's response, two samples a prompt
BUDGET = 12  # tokens of a micro-batch
SHAPES = (("embed.weight", (16, 4)), ("q_proj.weight", (4, 4)), ("down_proj.weight", (4, 8)), ("norm", (4,)))


def example() -> list[StepPlan]:
    """The optimizer steps of the picture's rollout batch."""
    lengths = np.array(RESPONSES) + PROMPT
    offsets = offsets_of(lengths)
    mask = np.concatenate([np.arange(length) >= PROMPT for length in lengths])
    batch = SampleBatch(
        tokens=np.zeros(offsets[-1], dtype=np.int64),
        offsets=offsets,
        columns={"loss_mask": mask},
        rows={"group": np.repeat(np.arange(len(GROUPS)), 2)},
    )
    return plan_steps(
        batch,
        ParallelLayout.data_parallel(rank=0, world_size=2),
        tokens_per_micro_batch=BUDGET,
        mini_batches=2,
        aggregation="token-mean",
        max_tokens=max(RESPONSES),
        seed=1,
    )


def draw_sample(picture: Picture, x: float, y: float, sample: int, *, filler: bool = False) -> float:
    """Its tokens as squares, the prompt's gray; gives where it ends."""
    group, width = GROUPS[sample // 2], (PROMPT + RESPONSES[sample]) * TOKEN
    if filler:
        picture.box(x, y, width, 22, "empty", round=0)
    else:
        for token in range(PROMPT + RESPONSES[sample]):
            cls = "prompt" if token < PROMPT else group.lower()
            picture.box(x + token * TOKEN, y, TOKEN, 22, f"token {cls}", round=0)
    picture.text(x + width / 2, y + 16, f"{group}{sample % 2 + 1}", "small middle" if filler else "name middle")
    return x + width


def data() -> Picture:
    plans = example()
    picture = Picture(
        920,
        604,
        title="The way that data takes",
        description="Prompts become samples in an engine; samples end to end are a rollout batch; it is cut into "
        "optimizer steps, shared over dp ranks, packed into micro-batches, summed into a loss; the new weights go back "
        "to the engine in buckets.",
    )
    left, right = 24.0, 896.0

    picture.text(left, 28, "prompts", "name")
    for index, group in enumerate(GROUPS):
        x = 104.0 + index * 52
        picture.box(x, 12, PROMPT * TOKEN, 22, "token prompt", round=0)
        picture.text(x + PROMPT * TOKEN / 2, 28, group, "name middle")
    picture.way("M306 23 H452")
    picture.text(372, 16, "each twice", "small middle")
    picture.named(456, 8, 250, 48, "plug", "engine: generate", "tokens, log-probs, version")
    picture.way("M581 56 V92")

    picture.text(left, 86, "rollout batch", "name")
    picture.text(left + 100, 86, "all samples end to end, prompt first: SampleBatch.tokens [N]")
    x = left
    for sample in range(len(RESPONSES)):
        x = draw_sample(picture, x, 96, sample)
    picture.text(
        left, 138, "columns [N] beside it: loss_mask, rollout_logprobs, versions, and advantages from the rewards"
    )

    picture.way("M180 146 V178")
    picture.text(
        194, 167, "train.mini_batches = 2: the samples of a prompt stay together; the seed decides who goes first"
    )
    picture.text(left, 196, "optimizer steps", "name")
    x = left
    for number, plan in enumerate(plans):
        chosen = sorted({int(s) for micro in sum(plan.micro_batches, ()) for s in micro})
        picture.text(x, 216, f"step {number}")
        for sample in chosen:
            x = draw_sample(picture, x if sample != chosen[0] else x + 44, 202, sample)
        x += 40

    picture.way("M180 232 V264")
    picture.text(194, 252, f"step 0, shared over 2 dp ranks and packed: train.tokens_per_micro_batch = {BUDGET}")
    picture.text(left, 282, "micro-batches", "name")
    for dp_rank, (micro_batches, filler) in enumerate(zip(plans[0].micro_batches, plans[0].filler, strict=True)):
        y = 292.0 + 40 * dp_rank
        picture.text(left, y + 20, f"dp_rank {dp_rank}")
        x = left + 72
        for members, fills in zip(micro_batches, filler, strict=True):
            width = sum(PROMPT + RESPONSES[int(sample)] for sample in members) * TOKEN
            picture.box(x - 4, y, width + 8, 30, "box", round=4)
            end = x
            for sample in members:
                end = draw_sample(picture, end, y + 4, int(sample), filler=fills)
            if fills:
                picture.text(end + 12, y + 20, "a filler: tokens again, at weight 0, so that ranks stay in step")
            x += BUDGET * TOKEN + 20

    picture.way("M180 366 V396")
    picture.text(194, 385, "each token carries its weight: 1 / (loss tokens of the step)")
    picture.named(
        left, 400, 428, 48, "plug", "backend: train", "loss = sum of weight x loss; gradients summed; one step"
    )
    picture.way("M238 448 V484")
    picture.text(252, 470, "after the last step: update_weights")

    manifest = build_manifest(SHAPES, dtype="float32", bucket_bytes=256)
    picture.text(left, 504, "manifest", "name")
    picture.text(
        left + 72,
        504,
        "every Hugging Face tensor once, whole, in buckets of weights.bucket_bytes, each with a checksum",
    )
    x = left
    for bucket in manifest.buckets:
        names = [entry.name.removesuffix(".weight") for entry in bucket.entries]
        width = 16 + 116 * len(names)
        picture.box(x, 514, width, 64, "core")
        picture.text(x + 12, 531, f"bucket {bucket.index}")
        for index, name in enumerate(names):
            picture.named(x + 12 + index * 116, 540, 108, 28, "box", name)
        x += width + 16
    picture.way(f"M{x - 12:g} 546 H{right - 40:g} V32 H710", weights=True)
    picture.text(right - 54, 250, "weights,", "small end")
    picture.text(right - 54, 266, "one version up", "small end")
    return picture


# ---- four sources of batches -----------------------------------------------------------------------------------------

UNIT = 48  # pixels of the time that sampling a third of a batch takes
LEFT = 200  # where time begins
VERSIONS = "abcd"  # classes of the weights' versions


def bars(picture: Picture, y: float, spans: Sequence[tuple[float, float, int, str]], *, height: float = 26) -> None:
    """From when to when, under which version of the weights, and what is written on it."""
    for start, end, version, words in spans:
        x = LEFT + start * UNIT
        picture.box(x, y, (end - start) * UNIT, height, f"token {VERSIONS[version]}", round=0)
        picture.text(x + (end - start) * UNIT / 2, y + height / 2 + 5, words, "name middle")


def updates(picture: Picture, y: float, height: float, times: Sequence[float]) -> None:
    for version, time in enumerate(times, start=1):
        x = LEFT + time * UNIT
        picture.line(x, y - 6, x, y + height)
        picture.text(x, y - 10, f"version {version}", "small middle")


def sources() -> Picture:
    picture = Picture(
        920,
        572,
        title="Four sources of batches",
        description="Synchronous: engines sample a batch, then ranks train on it. Streamed: ranks begin with the "
        "prompts that are scored while engines sample the others of the batch. One step off: while ranks train on a "
        "batch, engines sample the next one with the weights from before. Asynchronous: engines generate all the time, "
        "updates interrupt them, and responses that are unfinished go on with the new weights.",
    )
    for y, name, small in (
        (60.0, "synchronous", "staleness 0"),
        (180.0, "streamed", "staleness 0"),
        (300.0, "one step off", "staleness 1"),
        (420.0, "asynchronous", "staleness up to k"),
    ):
        picture.text(24, y + 12, name, "name")
        picture.text(24, y + 30, small)
        picture.text(LEFT - 10, y + 18, "engines", "small end")
    for y in (90.0, 210.0, 330.0, 502.0):
        picture.text(LEFT - 10, y + 18, "ranks", "small end")

    updates(picture, 60, 56, (5, 10))
    bars(picture, 60, [(0, 3, 0, "batch 0"), (5, 8, 1, "batch 1"), (10, 13, 2, "batch 2")])
    bars(picture, 90, [(3, 5, 0, "train 0"), (8, 10, 1, "train 1"), (13, 14, 2, "train 2")])

    updates(picture, 180, 56, (3.7, 7.4, 11.1))
    for version, begin in enumerate((0, 3.7, 7.4, 11.1)):
        bars(picture, 180, [(begin, min(begin + 3, 14), version, f"batch {version}")])
        parts = [(begin + 1, begin + 1.6), (begin + 1.7, begin + 2.2), (begin + 2.4, begin + 2.9)]
        bars(picture, 210, [(start, min(end, 14), version, "") for start, end in parts if start < 14])
        if begin + 3.7 < 14:
            bars(picture, 210, [(begin + 3, begin + 3.7, version, "")])

    updates(picture, 300, 56, (6, 9, 12))
    bars(picture, 300, [(0, 3, 0, "batch 0"), (3, 6, 0, "batch 1"), (6, 9, 1, "batch 2"), (9, 12, 2, "batch 3")])
    bars(picture, 300, [(12, 14, 3, "batch 4")])
    bars(picture, 330, [(3, 5, 0, "train 0"), (6, 8, 1, "train 1"), (9, 11, 2, "train 2"), (12, 14, 3, "train 3")])

    updates(picture, 420, 108, (5, 8, 11))
    for row, ends in enumerate(
        ((1.5, 3, 4.2, 6.4, 7.4, 9.6, 13.2), (2.6, 5.6, 7, 8.8, 10.4, 12.6), (3, 9.2, 10.6, 13.6))
    ):
        start = 0.0
        for end in (*ends, 14.0):
            cuts = [start, *(time for time in (5.0, 8.0, 11.0) if start < time < end), end]
            for low, high in pairwise(cuts):  # one response, by the weights that draw each part of it
                version = sum(low >= time for time in (5.0, 8.0, 11.0))
                bars(picture, 420 + row * 26, [(low, high - (0.06 if high == end else 0), version, "")], height=22)
            start = end
    bars(picture, 502, [(3, 5, 0, "train 0"), (5, 8, 1, "train 1"), (8, 11, 2, "train 2"), (11, 14, 3, "train 3")])
    picture.text(
        150, 554, "Colors are versions of the weights. In the last row a bar is a response; some are drawn by two."
    )
    return picture


# ---- how samples come about ------------------------------------------------------------------------------------------


def sampling() -> Picture:
    picture = Picture(
        920,
        372,
        title="How samples come about",
        description="The main thread asks the source for a batch and replaces engines that died. On the event "
        "loop, every group of samples and every episode is a coroutine. Its requests wait in a queue of the engine "
        "that the router has chosen, from which they are sent together. What is not CoreRL's own, a user's function, a "
        "reward, a call of an engine, runs in a thread or in another process.",
    )
    picture.text(24, 30, "the main thread", "name")
    picture.named(24, 44, 150, 52, "box", "Run.batches", "for scored in ...")
    picture.named(24, 236, 150, 52, "box", "Run.ensure_serving", "new engines, weights")

    picture.box(206, 14, 452, 344, "zone")
    picture.text(220, 34, "one event loop: coroutines", "name")
    picture.named(220, 44, 120, 52, "core", "Source.next")
    picture.named(378, 44, 120, 52, "core", "a group's task", "or a batch")
    picture.named(536, 44, 108, 52, "core", "an episode", "turn by turn")
    picture.named(378, 132, 120, 46, "core", "Scoring", "one at a time")
    picture.named(378, 214, 266, 46, "core", "EngineFleet.generate", "through deaths, pauses and updates")
    picture.named(220, 214, 120, 46, "core", "PrefixRouter", "rows to engines")
    for index, y in enumerate((284.0, 320.0)):
        picture.named(378, y, 266, 30, "core", f"waiting for engine-{index}")
    picture.way("M174 70 H216")
    picture.way("M340 70 H374")
    picture.way("M498 70 H532")
    picture.way("M438 96 V128")
    picture.way("M590 96 V210")
    picture.way("M512 70 V210")
    picture.way("M378 237 H344")
    picture.way("M511 260 V280")
    picture.way("M374 250 C270 300 190 290 178 264", weights=True)
    picture.text(232, 310, "none serves", "small")

    picture.text(690, 34, "threads and processes", "name")
    picture.named(690, 44, 206, 52, "plug", "your function", "a thread, or your event loop")
    picture.named(690, 132, 206, 46, "plug", "your reward", "processes of their own")
    for index, y in enumerate((284.0, 320.0)):
        picture.named(690, y, 206, 30, "plug", f"engine-{index}: generate")
        picture.way(f"M644 {y + 15:g} H686")
    picture.way("M644 70 H686")
    picture.way("M498 155 H686")
    return picture


# ---- who is resident when --------------------------------------------------------------------------------------------

CRITIC = "critic"
TURNS = (ACTOR, CRITIC)  # roles that share a device with an engine
STEP = (  # one step's stages, with their widths
    (SAMPLE, 110, "engines work"),
    (FORWARD, 100, "values, log-probs"),
    (training(CRITIC), 120, "steps"),
    (training(ACTOR), 120, "steps"),
    (UPDATE, 110, "ranks send"),
    (SAMPLE, 80, "the next"),
)


def residency() -> Picture:
    """Drawn from the plan that a run follows."""
    plan = residency_plan(TURNS, passed=TURNS)
    picture = Picture(
        920,
        386,
        title="Who is resident when",
        description="One step of a colocated run with offload, stage by stage: engines hold weights and caches while "
        "they sample; critic and actor hold their parameters in forward, and all kinds of memory while they train, one "
        "after the other; in the update engines hold weights, and the actor its parameters.",
    )
    edges = [210.0]
    for _, width, _ in STEP:
        edges.append(edges[-1] + width)
    for (name, width, small), x in zip(STEP, edges, strict=False):
        picture.text(x + width / 2, 26, name, "name middle")
        picture.text(x + width / 2, 42, small, "small middle")
    for x in edges:
        picture.line(x, 52, x, 372)
    y = 48.0
    for role in TURNS:
        picture.text(24, y + 20, f"{role}'s ranks", "name")
        y += 28
        for kind in MemoryKind:
            holds = [kind in plan[name].ranks.get(role, ()) for name, _, _ in STEP]
            occupied(picture, y, str(kind), holds, edges, "ranks")
            y += 22
    picture.text(24, y + 20, "engine", "name")
    y += 28
    for name, least in (("weights", EngineMemory.WEIGHTS), ("keys and values", EngineMemory.ALL)):
        held = [plan[stage].engines or EngineMemory.NOTHING for stage, _, _ in STEP]
        occupied(picture, y, name, [each >= least for each in held], edges, "engine")
        y += 22
    return picture


def occupied(picture: Picture, y: float, name: str, holds: list[bool], edges: list[float], owner: str) -> None:
    """One row: a bar over each run of stages in which it is on the device."""
    picture.text(198, y + 15, name, "small end")
    start = 0
    for held, run in groupby(holds):
        stop = start + len(list(run))
        if held:
            picture.box(edges[start] + 1, y + 3, edges[stop] - edges[start] - 2, 16, owner, round=3)
        start = stop


# ---- placements ------------------------------------------------------------------------------------------------------

COLORS = {"actor": "core", "critic": "critic", "engines": "plug"}


def draw_placement(
    picture: Picture, y: float, *, title: str, words: str, groups: Mapping[str, int], own_devices: tuple[str, ...]
) -> None:
    """A row of devices with the processes on each."""
    placement = arrange(groups, own_devices=own_devices, cpus=1.0, gpus=1.0)
    picture.text(24, y + 16, title, "name")
    picture.text(24, y + 34, words)
    for bundle in range(placement.bundles):
        x = 24.0 + bundle * 146
        here = [
            f"engine-{index}" if name == "engines" else f"{name} rank {index}"
            for name, places in placement.places.items()
            for index, place in enumerate(places)
            if place == bundle
        ]
        picture.box(x, y + 44, 138, 118, "box")
        share = f"1/{len(here)} each" if len(here) > 1 else "alone"
        picture.text(x + 69, y + 62, f"GPU {bundle}: {share}", "small middle")
        assert placement.share(bundle) == 1 / len(here)
        for index, process in enumerate(here):
            cls = COLORS[process.split()[0] if "rank" in process else "engines"]
            picture.named(x + 8, y + 70 + index * 30, 122, 26, cls, process)


def placements() -> Picture:
    picture = Picture(
        920,
        566,
        title="Placements",
        description="Colocated: ranks of actor and critic share GPUs with engines. Colocated with a critic on devices "
        "of its own. Disaggregated: engines on devices of their own.",
    )
    draw_placement(
        picture,
        12,
        title='cluster.placement = "colocated"',
        words="actor 4 ranks, critic 4, 2 engines: ranks and engines take turns in the GPU's memory",
        groups={"actor": 4, "critic": 4, "engines": 2},
        own_devices=(),
    )
    draw_placement(
        picture,
        196,
        title='cluster.placement = "colocated", roles.critic.devices = "own"',
        words="actor 4 ranks, critic 2, 2 engines: the critic never sleeps",
        groups={"actor": 4, "critic": 2, "engines": 2},
        own_devices=("critic",),
    )
    draw_placement(
        picture,
        380,
        title='cluster.placement = "disaggregated"',
        words="actor 4 ranks, 2 engines: nobody sleeps, weights go from GPU to GPU",
        groups={"actor": 4, "engines": 2},
        own_devices=("engines",),
    )
    return picture


# ---- how Megatron splits a model over ranks --------------------------------------------------------------------------

RANKS = 4
LAYERS = 4  # of the picture's model, and as many experts in each
SEQUENCE = 8  # tokens
LAYOUTS: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("tensor_parallel = 2", "half of each matrix, all layers", {"tp": 2}),
    ("pipeline_parallel = 2", "whole matrices, half of the layers", {"pp": 2}),
    ("context_parallel = 2", "the whole model, half of each sequence's tokens", {"cp": 2}),
    ("expert_parallel = 4", "all but the experts whole, a quarter of the experts", {"ep": 4}),
)


def draw_rank(picture: Picture, x: float, y: float, rank: int, sizes: Mapping[str, int]) -> None:
    """What of the model it holds, and what of which sample it computes."""
    with warnings.catch_warnings():  # of libraries that megatron-core can do without
        warnings.simplefilter("ignore")
        from megatron.core.parallel_state import RankGenerator

        from corerl_megatron.packed import zigzag

    tp, pp, cp, ep = (sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    order = "tp-cp-ep-dp-pp"  # megatron-core's own
    dense = RankGenerator(tp=tp, ep=1, dp=RANKS // (tp * pp * cp), pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=tp, ep=ep, dp=RANKS // (tp * pp * ep), pp=pp, cp=1, order=order)

    def place(generator: RankGenerator, axis: str) -> int:
        (group,) = (group for group in generator.get_ranks(axis) if rank in group)
        return int(group.index(rank))

    picture.box(x, y, 100, 124, "box")
    picture.text(x + 50, y + 17, f"rank {rank}", "small middle")
    left, top, step = x + 10, y + 26, 13
    parts = ep if ep > 1 else 0
    width = 26 if parts else 80
    for layer in range(LAYERS):
        at = top + layer * step
        held = layer * pp // LAYERS == place(dense, "pp")
        for part in range(tp):
            mine = held and part == place(dense, "tp")
            picture.box(left + part * width / tp, at, width / tp - 2, 11, "ranks" if mine else "empty", round=2)
        for expert in range(parts):
            mine = expert == place(experts, "ep")
            picture.box(left + 30 + expert * 12.5, at, 10.5, 11, "engine" if mine else "empty", round=2)
    sample = GROUPS[place(dense, "dp")]
    computed = set(zigzag(np.array([0, SEQUENCE]), rank=place(dense, "cp"), ranks=cp).tolist()) if cp > 1 else None
    for token in range(SEQUENCE):
        mine = computed is None or token in computed
        cls = f"token {sample.lower()}" if mine else "empty"
        picture.box(left + token * 10, y + 85, 10, 14, cls, round=0)
    picture.text(x + 50, y + 115, f"samples {sample}", "small middle")


def megatron() -> Picture:
    picture = Picture(
        920,
        424,
        title="How Megatron splits a model over four ranks",
        description="Tensor parallelism: half of each matrix on a rank. Pipeline parallelism: half of the layers. "
        "Context parallelism: the whole model, half of each sequence. Expert parallelism: a quarter of the experts. "
        "Ranks that hold parts of one copy compute the same samples, but for experts, whose tokens travel.",
    )
    for index, (title, words, sizes) in enumerate(LAYOUTS):
        x, y = 24.0 + 450 * (index % 2), 12.0 + 186 * (index // 2)
        picture.text(x, y + 14, title, "name")
        picture.text(x, y + 32, words)
        for rank in range(RANKS):
            draw_rank(picture, x + rank * 106, y + 42, rank, sizes)
    x = 24.0
    for cls, words in (
        ("ranks", "weights it holds, a row for each layer"),
        ("engine", "experts it holds"),
        ("a", "tokens it computes"),
        ("empty", "on another rank"),
    ):
        picture.box(x, 396, 14, 11, cls, round=2)
        picture.text(x + 20, 406, words)
        x += 60 + 6.2 * len(words)
    return picture


# ---- an episode's row of tokens --------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ASKED = ({"role": "user", "content": "6?"}, {"role": "tool", "content": "01358"})
SAID = ("6<eos>", "01358<eos>")


def conversation() -> list[Conversation]:
    """After each turn."""
    tokenizer = character_tokenizer("0123456789?uat:")
    tokenizer.chat_template = TEMPLATE
    renderer, turns, messages = Renderer(tokenizer), [Conversation()], []
    for number, (message, said) in enumerate(zip(ASKED, SAID, strict=True)):
        messages.append(message)
        tokens = np.array(tokenizer.encode(said, add_special_tokens=False))
        generation = Generation(
            tokens=tokens,
            offsets=np.array([0, len(tokens)]),
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            versions=np.full(len(tokens), number),
            truncated=np.zeros(1, dtype=np.bool_),
        )
        asked = renderer.ask(turns[-1], messages)
        answer = renderer.answer(asked, tokens, SamplingParams(stop_tokens=(tokenizer.eos_token_id,)))
        turns.append(turns[-1].answered(asked, answer, generation))
        messages.append(answer.message)
    return turns[1:]


def episode() -> Picture:
    turns = conversation()
    tokenizer = character_tokenizer("0123456789?uat:")
    picture = Picture(
        920,
        192,
        title="An episode's row of tokens, turn by turn",
        description="The first request is the prompt; what the policy says stands behind it and stays as it was "
        "sampled; the second request adds only what its new message is; the last row is the sample.",
    )
    size, left = 29.0, 150.0
    for row, turn in enumerate(turns):
        y = 20.0 + row * 62
        picture.text(24, y + 20, f"after turn {row + 1}", "name")
        before = len(turns[row - 1].tokens) if row else 0
        for place, (token, sampled) in enumerate(zip(turn.tokens, turn.row().loss_mask, strict=True)):
            cls = ("a" if place < before else "b") if sampled else "prompt"
            x = left + place * size
            picture.box(x, y, size, 30, f"token {cls}", round=0)
            word = tokenizer.convert_ids_to_tokens(int(token)).replace("<eos>", "eos")
            picture.text(x + size / 2, y + 20, word, "small middle" if len(word) > 1 else "name middle")
        if row:
            picture.text(left, y + 48, "as they were, never tokenized again")
            picture.text(left + before * size, y + 48, "new: the tool's message, and the answer to it")
    x = left
    for cls, words in (
        ("prompt", "requests: no loss"),
        ("b", "sampled in this turn"),
        ("a", "sampled before; loss on both"),
    ):
        picture.box(x, 160, 14, 11, cls, round=2)
        picture.text(x + 20, 170, words)
        x += 60 + 6.2 * len(words)
    return picture


# ---- the driver's work at scale --------------------------------------------------------------------------------------

RESULTS = Path(corerl.__file__).parent.parent / "benchmarks" / "results" / "cpu-scale.md"


def measured() -> list[dict[str, float]]:
    """The rows of the table by ranks, by column."""
    lines = RESULTS.read_text().partition("## By number of ranks")[2].strip().splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [
        {name: float(cell.replace(",", "").removesuffix(" M")) for name, cell in zip(head, row, strict=True)}
        for row in rows
    ]


def curves(picture: Picture, left: float, title: str, across: Sequence[str], down: Sequence[str]) -> None:
    """The frame of a plot in which both axes are logarithmic: a vertical line for each tick `across`, at equal
    distances, and a horizontal one for each power of ten `down`."""
    picture.text(left, 28, title, "name")
    for column, label in enumerate(across):
        x = left + 50 + column * 290 / (len(across) - 1)
        picture.line(x, 50, x, 250)
        picture.text(x, 270, label, "small middle")
    for row, label in enumerate(down):
        y = 50 + row * 200 / (len(down) - 1)
        picture.line(left + 50, y, left + 340, y)
        picture.text(left + 42, y + 4, label, "small end")


def scale() -> Picture:
    rows = measured()
    picture = Picture(
        920,
        290,
        title="The driver's work in a step, and what a node pulls",
        description="Left: seconds of the driver against tokens, for 8 to 1,024 ranks. Right: megabytes that a node "
        "pulls against ranks, with 100 million tokens: each node's own samples, and the whole batch.",
    )
    one_dp_rank = [row for row in rows if row["dp"] * 8 == row["ranks"]]
    curves(
        picture,
        24,
        "seconds, by tokens and ranks",
        ["1 M", "10 M", "100 M tokens"],
        ["100 s", "10 s", "1 s", "0.1 s", "0.01 s"],
    )
    label = 0.0
    for place, ranks in enumerate((1024, 256, 64, 8)):
        points = [
            (74 + 145 * np.log10(row["tokens"]), 50 + 50 * (2 - np.log10(row["all, s"])))
            for row in one_dp_rank
            if row["ranks"] == ranks
        ]
        picture.curve(points)
        label = points[-1][1] if not place else label + 14  # lines may end close to each other
        picture.text(370, label, f"{ranks:,} ranks")
    most = max(row["tokens"] for row in rows)
    large = [row for row in one_dp_rank if row["tokens"] == most]
    curves(
        picture,
        480,
        "MB that a node pulls of 100 M tokens, by ranks",
        ["8", "", "32", "", "128", "", "512", "1,024"],
        ["10,000", "1,000", "100", "10"],
    )
    for column, words in (("a node pulls, MB", "its own"), ("of whole batches, MB", "whole batches")):
        points = [
            (530 + 290 * np.log2(row["ranks"] / 8) / 7, 50 + 200 / 3 * (4 - np.log10(row[column]))) for row in large
        ]
        picture.curve(points, weights=column == "a node pulls, MB")
        picture.text(points[1][0] + 20, points[1][1] - 8, words)
    return picture


PICTURES = {
    "sampling.svg": sampling,
    "data.svg": data,
    "sources.svg": sources,
    "residency.svg": residency,
    "placements.svg": placements,
    "megatron.svg": megatron,
    "episode.svg": episode,
    "scale.svg": scale,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(str(draw()))
