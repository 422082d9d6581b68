"""Export a checkpoint's weights as a Hugging Face model directory, one tensor in memory at a time."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from corerl.backend.state import of_sums, rounded_sum
from corerl.checkpoint.commit import read_state
from corerl.checkpoint.format import WEIGHTS, write_tensors
from corerl.checkpoint.reader import CheckpointSource, read_extra
from corerl.config.schema import Config, LoraConfig, ModelConfig
from corerl.config.structuring import structure
from corerl.config.toml_text import to_plain
from corerl.errors import ModelError, SaveFailed
from corerl.messages import note
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.models.config import hf_config, reads_pictures
from corerl.models.files import initial_source, kept_config, kept_files, meta_model
from corerl.models.lora import PEFT_CONFIG, PEFT_WEIGHTS, peft_config, targets_in
from corerl.models.names import peft_names
from corerl.models.readers import INDEX, SINGLE, FirstOf, SafetensorsSource
from corerl.models.tokenizer import CHARACTERS, CONFIG, GENERATION, end_tokens, load_tokenizer
from corerl.plan.check import Problems
from corerl.plan.models import names_of_buffers, require_same_tensors, saved_shapes, trains_tower
from corerl.plan.settle import settle_adapters
from corerl.weights.adapters import WEIGHT, adapted, adapters_of, add_products_, is_adapter
from corerl.weights.chunks import TensorSource, finite

SHARD_BYTES = 4 * 2**30
# Copied from the tokenizer's directory: older versions of tokenizers read them.
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "special_tokens_map.json")
# Copied from the model's directory: without them nothing could show pictures to an export.
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "chat_template.jinja"),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    checkpoint: Path,
    directory: Path,
    *,
    role: str = "actor",
    config: Config | None = None,
    dtype: str = "",
    merge: bool | None = None,
    replace: bool = False,
    notify: Callable[[str], None] = note,
) -> Path:
    """Write `role`'s weights with its config and tokenizer; returns `directory`. `checkpoint` is a run's, or what a
    `TrainGroup` has saved, with the `config` that it was started with. `dtype` is a key of DTYPES; if it is empty,
    bfloat16 where the model came in that, else the precision it was trained in.

    Of a role that trains adapters, without `merge` a directory of PEFT with these alone, in float32 unless `dtype` says
    otherwise; with it the whole model, adapters merged into its base weights. None is False for such a role. `notify`
    gets a line if no directory has the base weights. With `replace`, an existing directory is replaced only once the
    new one is complete.

    Raises ModelError if `directory` exists and `replace` is not set, or `merge` does not suit the role, and
    CheckpointError if the checkpoint lacks a tensor of the role's model or has one in another shape.
    """
    if directory.exists() and not replace:
        raise ModelError(f"{directory} already exists; remove it, or choose another directory")
    if config is None:
        own, state = checkpoint / role, read_state(checkpoint)
        if not own.is_dir():
            roles = structure(state["config"], Config, path="").chosen_roles
            held = ", ".join(each for each in roles if (checkpoint / each).is_dir())
            raise ModelError(f"{checkpoint} has no role {role!r}; it has: {held}")
    else:
        settled = settle_adapters(config, problems := Problems())
        problems.raise_all()
        own, state = checkpoint, {"config": to_plain(settled)}
    saved = _Saved.of(own, role, state["config"])
    if merge is not None and saved.lora is None:
        raise ModelError(
            f"the {role} of {checkpoint} was trained as a whole, without adapters; export it without either of "
            "--adapter and --merge"
        )
    if saved.lora is not None and not merge:
        saved.write_adapters(directory, DTYPES[dtype or "float32"])
        if not saved.model.path:
            given = "" if config is None else " --config FILE"
            notify(
                f"{directory} has adapters alone, and no directory has their base weights, which the run made at "
                f"random: for a whole model use: corerl export {shlex.quote(str(checkpoint))} DIRECTORY{given} --merge"
            )
        return directory
    saved.write_model(directory, dtype)
    return directory


@frozen(kw_only=True, eq=False)
class _Saved:
    """A role in a checkpoint."""

    directory: Path
    role: str
    model: ModelConfig
    lora: LoraConfig | None
    precision: str  # it was trained in
    seed: int  # of the run
    tokens: ModelConfig  # whose tokenizer the run had
    template: Mapping[str, Any]  # options of the chat template
    hf: PreTrainedConfig
    source: CheckpointSource
    shapes: Mapping[str, tuple[int, ...]]  # of the model's tensors that the checkpoint has

    @classmethod
    def of(cls, directory: Path, role: str, written: Mapping[str, Any]) -> _Saved:
        config = structure(written, Config, path="")
        if role not in config.chosen_roles:
            raise ModelError(f"the config has no role {role!r}; it has: {', '.join(config.chosen_roles)}")
        model, lora = config.model_of(role), config.lora_of(role)
        hf, source = hf_config(model), CheckpointSource(directory, *WEIGHTS)
        with_head = VALUE_HEAD_WEIGHT in source.shapes
        shapes = saved_shapes(hf, value_head=with_head, lora=lora, tower=trains_tower(model, hf))
        require_same_tensors(directory, role, shapes)  # else nothing could load the export
        return cls(
            directory=directory,
            role=role,
            model=model,
            lora=lora,
            precision=config.train_of(role).settled("cpu").precision,
            seed=config.run.seed,
            tokens=config.model,
            template=config.data.chat_template_options,
            hf=hf,
            source=source,
            shapes=shapes,
        )

    def write_adapters(self, directory: Path, dtype: torch.dtype) -> None:
        assert self.lora is not None
        if VALUE_HEAD_WEIGHT in self.source.shapes:
            raise ModelError(f"PEFT has no place for the {self.role}'s value head; export it merged")
        adapters = {name: shape for name, shape in self.source.shapes.items() if is_adapter(name)}  # no buffers
        _export_adapters(directory, self.hf, self.lora, _read(self.source, adapters, dtype), base=self.model.path)

    def write_model(self, directory: Path, dtype: str) -> None:
        model, hf, tokens = self.model, self.hf, self.tokens
        tokenizer = load_tokenizer(tokenizer=tokens.tokenizer, path=tokens.path)
        exported = _with_special_tokens(hf, tokenizer)
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = with_defaults(tokenizer.chat_template, self.template)
        export_directory(
            directory,
            config=exported,
            tokenizer=tokenizer,
            tensors=self._tensors(dtype),
            generation=_generation(exported, model, end_tokens(tokenizer, model)),
            files=[*_of(tokens.tokenizer or tokens.path), *_of(model.path, PROCESSOR_FILES)],
            kept=_kept(model, hf, self.shapes),
            # As it was written: an older transformers, as engines have, may not read the words of the one that writes.
            kept_config=kept_config(model.path, hf) if model.path and reads_pictures(hf) else {},
        )

    def _tensors(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, adapters merged, in `dtype` but for buffers, which keep their precision."""
        chosen = DTYPES[dtype or ("bfloat16" if _came_in_bfloat16(self.hf, self.model) else self.precision)]
        precise = names_of_buffers(meta_model(self.hf))
        if self.lora is None:
            return _read(self.source, self.shapes, chosen, precise)
        wholes = saved_shapes(self.hf, value_head=VALUE_HEAD_WEIGHT in self.source.shapes, lora=None)
        base = initial_source(self.model, self.hf, wholes, seed=self.seed)
        merged = _merged(
            self.source,
            FirstOf(self.source, base),
            wholes,
            self.lora.scale,
            held=DTYPES[self.precision],
            base_digest=str(read_extra(self.directory, 0).get("frozen_weights")),
        )
        return ((name, tensor if name in precise else tensor.to(chosen)) for name, tensor in merged)


def _read(
    source: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    precise: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """These tensors in `dtype`, but for those in `precise`, which stay as they are: rounded, a router's biases would
    choose other experts."""
    for name, shape in shapes.items():
        tensor = source.read(name, (0,) * len(shape), shape)
        yield name, tensor if name in precise else tensor.to(dtype)


def _merged(
    saved: CheckpointSource,
    all_weights: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    scale: float,
    *,
    held: torch.dtype,
    base_digest: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights in float32, those with adapters merged. Raises ModelError at the end if those that were not trained
    are not the base weights of the adapters' training, in the dtype `held`."""
    sums: dict[str, int] = {}
    for name, weight in _read(all_weights, shapes, torch.float32):
        if saved.shape(name) is None:
            sums[name] = rounded_sum(weight.to(held))
        pair = [each for each in adapters_of(name) if saved.shape(each) is not None]
        if pair:
            (_, a), (_, b) = _read(saved, {each: saved.shapes[each] for each in pair}, torch.float32)
            add_products_(weight[None], b[None], a[None], scale=scale)
        yield name, weight
    if of_sums(sums) != base_digest:
        raise ModelError(
            f"the weights that the adapters belong to have the digest {base_digest}, these have {of_sums(sums)}; give "
            "back the model.path that they were trained with"
        )


def _export_adapters(
    directory: Path,
    hf: PreTrainedConfig,
    lora: LoraConfig,
    tensors: Iterator[tuple[str, torch.Tensor]],
    *,
    base: str,
) -> None:
    names = peft_names(meta_model(hf, lora=lora))
    held = {names[name]: tensor for name, tensor in tensors}
    modules = {adapted(name).removesuffix(WEIGHT) for name in held}
    last = sorted({name.rpartition(".")[2] for name in modules})
    # Engines know targets by their last names. Where other modules have these too, in a vision tower for example, PEFT
    # gets whole names.
    try:
        found = targets_in(meta_model(hf), evolve(lora, targets=tuple(last)))
        alike = found.keys() == modules and not reads_pictures(hf)
    except ModelError:  # modules that are no linear layers, too
        alike = False
    write_adapters(directory, held, peft_config(lora, base=base, targets=last if alike else sorted(modules)))


def _came_in_bfloat16(config: PreTrainedConfig, model: ModelConfig) -> bool:
    """Whether the model's config says so or, if it says nothing, most of the tensors in its files are."""
    if not model.path:
        return False
    if config.dtype is not None:
        return str(config.dtype).removeprefix("torch.") == "bfloat16"
    if not any((Path(model.path) / name).is_file() for name in (SINGLE, INDEX)):
        return False
    ((most, _),) = SafetensorsSource(model.path).dtypes.most_common(1) or [("", 0)]
    return most == "BF16"


def _with_special_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Fill in the special tokens that the config leaves open. `generate` takes them from there, and would otherwise
    never end a response."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        # Only one that the model has an embedding for: transformers cannot build a model that pads with another.
        if getattr(config, name, None) is None and token is not None and token < config.get_text_config().vocab_size:
            setattr(config, name, token)
    return config


def with_defaults(template: str, options: Mapping[str, Any]) -> str:
    """The chat template with the run's options as its defaults. Nothing else that comes with a tokenizer is read by all
    who render prompts: they would begin answers otherwise than the run did."""
    defaults = (f"{{% set {name} = {name} if {name} is defined else {value!r} %}}" for name, value in options.items())
    return "".join(defaults) + template


def _generation(config: PreTrainedConfig, model: ModelConfig, ends: Sequence[int]) -> dict[str, Any]:
    """The export's generation_config.json: the authors' settings if there are any, and all tokens that ended the run's
    samples. Without the file, `generate` would take only what config.json names."""
    known: dict[str, Any] = {name: getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")}
    file = Path(model.path) / GENERATION
    if model.path and file.is_file():
        known |= json.loads(file.read_bytes())
    size = config.get_text_config().vocab_size
    for name in ("bos_token_id", "pad_token_id", "decoder_start_token_id"):
        if isinstance(token := known.get(name), int) and not 0 <= token < size:
            known[name] = None  # `generate` would look up an embedding that is not there
    known["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends) or None
    return {name: value for name, value in known.items() if value is not None}


def _kept(model: ModelConfig, hf: PreTrainedConfig, trained: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a model's directory that are not `trained`, unchanged."""
    if model.path and reads_pictures(hf):
        files, names = kept_files(model.path, hf, trained)
        for name in names:
            shape = files.shape(name) or ()
            yield name, files.read(name, (0,) * len(shape), shape)


def _of(directory: str, names: Sequence[str] = TOKENIZER_FILES) -> list[Path]:
    """The files of these names that a model's or tokenizer's directory has, if it is one."""
    if not directory or directory.startswith(CHARACTERS):
        return []
    return [file for name in names if (file := Path(directory) / name).is_file()]


def export_directory(
    path: str | Path,
    *,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Iterable[tuple[str, torch.Tensor]],
    generation: Mapping[str, Any] | None = None,
    files: Iterable[Path] = (),
    kept: Iterable[tuple[str, torch.Tensor]] = (),
    kept_config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write config, tokenizer, `tensors` (HF name, tensor), then `kept` as they are, the generation_config.json
    `generation`, and copies of `files` that are not among these to `path`; returns the bytes of the tensors.
    `kept_config`: fields of config.json to write as given.

    At most one shard of `shard_bytes` is held in memory. Each tensor is copied to the CPU as it comes, so the stream
    may reuse its buffers. Tied weights come once, under the name used in the files. Called by one process; an existing
    directory is replaced only when the new one is complete. Raises SaveFailed if writing fails, and ModelError for a
    tensor with NaN or infinite values.
    """
    with _staged(Path(path)) as staging:
        written, dtype = _write_shards(staging, tensors, kept, shard_bytes)
        config = copy.deepcopy(config)
        config.dtype = config.get_text_config().dtype = dtype
        config.save_pretrained(staging)
        if kept_config:
            written_config = json.loads((staging / CONFIG).read_text(encoding="utf-8"))
            _write_json(staging / CONFIG, {**written_config, **kept_config})
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        if generation is not None:
            _write_json(staging / GENERATION, generation)
        for file in files:
            if not (staging / file.name).exists():
                shutil.copyfile(file, staging / file.name)
    return written


def write_adapters(path: str | Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write a directory of PEFT: the adapters `tensors` and the adapter_config.json `config`. As `export_directory`."""
    with _staged(Path(path)) as staging:
        for name, tensor in tensors.items():
            if not finite(tensor):
                raise ModelError(f"{name!r} has NaN or infinite values as {tensor.dtype}; nothing is exported")
        held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_tensors(held, staging / PEFT_WEIGHTS, metadata={"format": "pt"})
        _write_json(staging / PEFT_CONFIG, config)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A directory to write to, which takes the place of `path` once the block is done. Raises SaveFailed if writing
    fails."""
    path = path.resolve()  # keeps a link to another disk
    staging, replaced = path.with_name(f".{path.name}.writing"), path.with_name(f".{path.name}.replaced")
    try:
        for left_over in (staging, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        if path.exists():
            os.rename(path, replaced)
        os.rename(staging, path)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)  # free the disk space again
        if replaced.exists() and not path.exists():
            os.rename(replaced, path)
        if isinstance(error, OSError | SafetensorError):  # safetensors raises the latter for a full disk
            raise SaveFailed(f"the model could not be exported to {path}: {error}") from error
        raise


def _write_shards(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    kept: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int,
) -> tuple[int, str]:
    """Write the shards; returns bytes, and the dtype of most of `tensors`. Shards are named at the end, when their
    number is known."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    held = total = 0
    dtypes: Counter[str] = Counter()

    def flush() -> None:
        write_tensors(shard, directory / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    new = ((name, tensor, True) for name, tensor in tensors)
    old = ((name, tensor, False) for name, tensor in kept)
    for name, tensor, made in itertools.chain(new, old):
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
            held = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += size
        total += size
        if not made:
            continue
        if not finite(shard[name]):
            raise ModelError(f"{name!r} has NaN or infinite values as {tensor.dtype}; nothing is exported")
        dtypes[str(tensor.dtype).removeprefix("torch.")] += size
    flush()
    ((dtype, _),) = dtypes.most_common(1)
    if len(shards) == 1:
        os.rename(directory / "0.part", directory / SINGLE)
        return total, dtype
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for index, file in enumerate(files):
        os.rename(directory / f"{index}.part", directory / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return total, dtype
