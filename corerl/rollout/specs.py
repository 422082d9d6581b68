"""The spec of the sampler that comes with CoreRL; importing this loads no torch."""

from corerl.plugin.spec import NoOptions, SamplerSpec

PROMPTS = SamplerSpec(
    implementation="corerl.rollout.sampler:PromptSampler",
    config=NoOptions,
    api=(2, 0),
    summary="each sample is one response to its prompt",
)
