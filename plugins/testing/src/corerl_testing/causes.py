"""The usual causes of each check's failure, most frequent first: a failed check says them after what it compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CAUSES: Mapping[str, Sequence[str]] = {
    # ---- the spec ----------------------------------------------------------------------------------------------------
    "C01": ("the spec's module imports the backend's class", "a helper that it imports loads torch"),
    "C02": ("api is of another CoreRL", "the implementation is a class, not its name as text"),
    "C03": ("a field without option(...)", "attrs.define in place of attrs.frozen", "a default that is shared"),
    "C04": ("a field whose type JSON has not, such as a set or a Path", "a converter that changes what it is given"),
    "C05": ("a field of type Any or without a type", "a converter that accepts what has another type"),
    "C06": (
        "a hook or a method of Backend that a later API has renamed or split",
        "an argument under another name than the hook's",
        "an argument that is keyword-only",
    ),
    "C07": ("data_parallel does not divide the ranks", "environment writes os.environ", "a default that is random"),
    "C08": ("a lambda or a function inside a function in the spec", "an open file or a lock in the spec"),
    "C09": ("dependencies without corerl", "corerl without an upper bound"),
    "C10": ("no empty file py.typed in the package", "it is there, but not among the package's data"),
    "C44": ("Support without a reason", "text in place of a member of Capability"),
    "C71": ("two variants of one name", "options that the spec's check refuses on the variant's ranks"),
    # ---- loading -----------------------------------------------------------------------------------------------------
    "C11": (
        "data_parallel counts all ranks where several share samples, or the other way around",
        "a weight is in no chunk, or its chunk has the offsets of the rank's part",
        "random weights are drawn by place, not by name",
    ),
    "C45": (
        "the whole tensor is read, then cut",
        "all weights are read into a dictionary before any is copied",
        "the same file is read once for masters and once for parameters",
    ),
    "C49": ("a snapshot is cloned before it moves to the host", "moments are read all at once"),
    # ---- forward -----------------------------------------------------------------------------------------------------
    "C51": (
        "log-probs are off by one token, or not in the samples' order",
        "logits are not divided by the temperature, or dropout is active",
        "attention leaks between packed sequences: positions or cu_seqlens are ignored, or only up to a block's length",
    ),
    "C48": (
        "a snapshot stays in the model's place after the pass, or where the pass raises",
        "it shares memory with the weights",
        "it is rounded to the parameters' precision",
    ),
    "C52": (
        "the head is drawn by place, not by name, or the language head is kept",
        "values are of the token after",
        "attention leaks between packed sequences, if only the long ones differ",
    ),
    "C60": (
        "the column routed_experts is ignored in training or in forward",
        "layers or tokens are in another order than the samples'",
        "scores of the given experts are not taken from the router",
    ),
    # ---- training ----------------------------------------------------------------------------------------------------
    "C12": (
        "optimizer_step returns nothing, or before the step",
        "local_state('master') gives copies, or parameters that the optimizer does not update",
        "a metric is only there in some steps",
    ),
    "C13": (
        "the passes in training have another temperature than those of forward, or dropout",
        "the loss is looked up by name, not by resolve_loss",
        "gradients have the wrong sign",
    ),
    "C14": ("a random number without the seed, such as dropout", "the order of a sum depends on threads or on memory"),
    "C15": (
        "the loss is divided by the micro-batch's tokens, or by the number of micro-batches, not by its weights alone",
        "each micro-batch's gradients replace those before",
        "attention leaks between packed sequences, if only the long ones differ",
    ),
    "C16": ("an array is changed in place", "a tensor that shares the array's memory is: torch.from_numpy"),
    "C17": ("padding counts in the loss or in attention", "loss_mask or weights are ignored", "0 * NaN is NaN"),
    "C26": (
        "gradients are not summed, but averaged, over data-parallel ranks, or clipped before they are summed",
        "squares of the gradient norm are summed over ranks that hold the same part",
        "sums of gradients leave out the last micro-batch",
    ),
    "C27": ("a rank reports a mean where (sum, weight) is asked for", "ranks that share samples all report"),
    "C29": ("ranks without samples leave out a collective", "a gradient that is None on some ranks is not summed"),
    "C41": (
        "gradients are not summed over all ranks that have other samples, or more than once",
        "the clip: its norm is of one rank's part, or counts what several ranks hold more than once",
        "the optimizer: step.lr, weight decay (only of matrices), eps, or the count of steps",
    ),
    "C50": (
        "the step is taken whatever the norm is",
        "adam_step counts the skipped step, or its gradients are not cleared",
        "ranks decide by their own gradients, not by the norm of all",
    ),
    "C55": ("masters are in bfloat16", "precision is taken from the model's files", "logits stay in bfloat16"),
    "C56": ("the loss is not scaled, so that gradients vanish", "masters are in float16"),
    "C57": ("recomputation is not switched on in training mode", "random state is not kept for the second pass"),
    "C61": (
        "the clip scales by limit / norm also where the norm is below the limit",
        "0 means clip to nothing, not no clip",
        "a norm of 0 is divided by",
    ),
    "C79": (
        "step.adam is ignored, or only some of its fields",
        "what one step sets holds in the next one too",
        "weight decay is set for norms and biases too, or stays 0 where the config's is",
    ),
    "C81": (
        "log-probs are of the row's own tokens, or of the target that comes one token later",
        "of equal targets of a token only one has a gradient: add them up, as scatter_add does",
        "the column is not passed to the rank, or to the pipeline stage, that has the logits",
    ),
    "C82": (
        "tokens of a branch see those of another, or positions are not those of the path",
        "the first token of a branch is predicted from the token that is packed before it, not from its prefix's last",
        "gradients of the copies of a prefix are not summed",
    ),
    "C63": ("padding takes part in attention", "positions count padding", "rows are cut at the longest of the rank"),
    "C76": ("aux_loss_coef is ignored", "it is counted by micro-batch, not by tokens", "padding counts as tokens"),
    "C77": (
        "pictures are not passed to the model, which then sees placeholders",
        "positions are numbered in one direction",
        "the gradients of the tower are summed over ranks, not averaged, or are left out of the norm",
    ),
    "C78": ("the tower's moments are not saved", "a frozen tower has masters", "a frozen tower is decayed"),
    # ---- a step in several calls -------------------------------------------------------------------------------------
    "C67": (
        "gradients are cleared at the beginning of forward_backward, not at the end of optimizer_step",
        "forward_backward takes a step",
        "gradients of earlier calls are summed over ranks once more",
    ),
    "C68": ("optimizer_step ignores scale", "gradients are scaled after they are clipped", "scale is applied twice"),
    "C69": ("forward or update_weights clears gradients", "sleep frees gradients whatever kinds it is given"),
    "C70": (
        "outputs are of the last micro-batch alone, or in another order",
        "passes in training have another temperature than those of forward, or dropout",
    ),
    # ---- checkpoints -------------------------------------------------------------------------------------------------
    "C18": (
        "moments or their count (adam_step, set_adam_step) are not restored",
        "after_load is not called for, or ignores, masters, so that parameters stay as they were",
        "the optimizer keeps its own learning rate or state of its schedule",
    ),
    "C80": (
        "after_load without adam_step leaves a count of steps",
        "working copies are not refreshed from masters where moments are not loaded",
    ),
    "C19": ("the index is written before the files that it lists", "the save before is removed first"),
    "C20": ("state is read in the background thread, not before save returns", "a failure is kept, and raised twice"),
    "C30": ("chunks have the offsets of the rank's part", "padding of shards is saved", "replicas are saved twice"),
    "C42": ("names or shapes are not those of the Hugging Face files", "moments are of the fused parameter"),
    # ---- weight updates ----------------------------------------------------------------------------------------------
    "C21": (
        "weights are gathered once and kept",
        "a tied weight is left out, or sent twice",
        "what is sent is the parameters before the step's masters are copied into them",
    ),
    "C22": ("weights_version is not saved with the checkpoint", "the version is compared after the first bucket"),
    "C46": ("all buckets are gathered before the first is sent", "a fused parameter is gathered for each of its parts"),
    "C47": ("an engine's failure is raised, not reported by finish", "the rest of the buckets are not gathered"),
    "C64": ("buffers are not in buffers()", "they are rounded to weights.dtype", "the optimizer has them"),
    "C73": ("adapters are not merged", "they are merged without the scale, or into the weights themselves"),
    # ---- memory ------------------------------------------------------------------------------------------------------
    "C43": (
        "tensors(kind) leaves out what holds the memory, such as moments or flat buffers",
        "a copy or a view of what sleeps is kept",
        "wake_up zeroes what it must restore, or a buffer; only gradients come back as zeros",
    ),
    "C58": ("forward or update_weights reads masters", "masters and parameters share a storage that sleeps"),
    "C65": (
        "memory() leaves out a kind",
        "it counts the whole model where ranks hold a part",
        "padding is not counted",
    ),
    "C66": ("an optimizer, moments or masters are made for a frozen role", "wake_up creates them"),
    "C72": (
        "the scale alpha / rank is left out, or applied twice",
        "weights beside adapters are in the optimizer",
        "the gradient norm counts frozen weights",
    ),
    "C74": ("the checkpoint has the frozen weights too", "adapters are saved by names of their own"),
    "C75": ("memory() ignores lora", "frozen weights have gradients or masters"),
    # ---- errors and the end ------------------------------------------------------------------------------------------
    "C23": ("a method of the backend is called around the host", "init keeps state where it is refused"),
    "C24": ("an error is caught and counts as a batch without samples", "it is raised anew without its cause"),
    "C25": ("a thread or process group outlives shutdown", "state of a module is kept for the next worker"),
    "C28": ("the error is caught on one rank", "a rank waits for the others before it raises"),
    "C59": ("build checks nothing, and fails later in other words", "the reason is not that of the spec"),
    # ---- a critic ----------------------------------------------------------------------------------------------------
    "C53": ("the head has no gradient, or is decayed as matrices are not", "values of fillers count"),
    "C54": ("the head is not among the chunks", "its moments are not"),
    # ---- GPUs --------------------------------------------------------------------------------------------------------
    "C31": ("a copy stays on the device", "the cache is not emptied", "communicators keep memory"),
    "C32": ("each round keeps a tensor", "moments are restored in another precision"),
    "C33": ("sleep moves again what sleeps", "the second call counts what the first has freed"),
    "C34": ("parameters are still on the host when they are sent", "a stream is not waited for"),
    "C35": ("tensors are put on cuda:0, not on the rank's device", "a library initializes all devices"),
    "C62": ("TF32 or a reduced precision of sums", "attention kernels leak between sequences", "masters are rounded"),
    # ---- under Ray ---------------------------------------------------------------------------------------------------
    "C36": ("weights are sent before the step has ended", "log-probs of engine and trainer have other temperatures"),
    "C37": ("the worker imports another copy of the package", "its metadata is not that of the imported code"),
    "C38": ("a rank catches what its death raises in the others", "a thread keeps the process of another rank alive"),
    "C39": ("the spec's environment is empty", "the spec or its package imports torch"),
    "C40": ("a hook calls another hook's method itself", "results are changed by what a wrapper returns"),
    # ---- algorithms --------------------------------------------------------------------------------------------------
    "A01": ("the spec's module imports the algorithm's class", "a helper that it imports loads torch"),
    "A02": ("api is of another CoreRL", "an abstract method is not implemented"),
    "A03": ("an option without help or a default", "a class that is not frozen"),
    "A04": ("an option without a type", "a type that JSON has not"),
    "A05": ("a role without an objective", "a column that core fills already"),
    "A06": ("a column by another name", "a pass that fills it is missing in forwards()"),
    "A07": ("an operation in place, such as +=", "a sort in place"),
    "A08": ("a division by the standard deviation of one sample", "a random number without a seed"),
    "A09": ("a mean over all tokens, not over those of loss_mask", "numbers outside multiplied by 0 and not replaced"),
    "A10": ("samples are compared by place, not by rows['group']", "groups are taken for numbers from 0 on"),
    "A11": ("a rounded mean is subtracted", "the spread is divided by where it is 0"),
    "A12": ("tokens that weigh 0 count", "a mean over the micro-batch"),
    "A13": ("the loss is divided by the micro-batch's tokens", "a statistic of the micro-batch is in the loss"),
    "A14": ("a detach() of what should be learned", "a derivative that is written by hand"),
    "A15": ("a metric that is a mean, not (sum, number)", "a maximum that is summed"),
    "A16": ("a name that core has", "a name without ROLE/"),
    "A17": ("samples are counted, not episodes", "a group's size is taken for its number of episodes"),
    "A18": ("by_prompt is set, but advantages are normalized over the batch", "a mean over all prompts is subtracted"),
}


class Mismatch(AssertionError):
    """A comparison that says where to look: what is usual may contradict it."""


def usual(id_: str) -> str:
    """The clause that ends a failed check's message; "" for a check that is not CoreRL's."""
    causes = CAUSES.get(id_, ())
    return f"; usual causes: {'; '.join(causes)}" if causes else ""
