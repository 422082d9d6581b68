import numpy as np

from corerl.rollout.noise import noise_keys


def test_keys_differ_with_seed_step_prompt_and_sample_and_with_nothing_else() -> None:
    prompts, samples = np.repeat(np.arange(20), 8), np.tile(np.arange(8), 20)
    keys = noise_keys(0, 3, prompts, samples)
    order = np.random.default_rng(0).permutation(160)
    assert np.array_equal(noise_keys(0, 3, prompts[order], samples[order]), keys[order])
    everything = np.concatenate([keys, noise_keys(1, 3, prompts, samples), noise_keys(0, 4, prompts, samples)])
    assert len(np.unique(everything)) == 480
    # Prompt and sample are not interchangeable, nor are seed and step.
    assert noise_keys(0, 3, np.array([1]), np.array([2])) != noise_keys(0, 3, np.array([2]), np.array([1]))
    assert noise_keys(3, 0, prompts, samples)[0] != keys[0]
