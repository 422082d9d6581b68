"""The config of most runs of the tests, apart from what imports Ray."""

SMALL = """
backend.name = "fsdp"
run.steps = 6
cluster.device = "cpu"
roles.actor.ranks = 2
extensions = [{ name = "jsonl" }]

[model]
tokenizer = "characters:0123456789>s"
[model.config]
model_type = "qwen3"
vocab_size = 16
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 64
tie_word_embeddings = true
initializer_range = 0.08
bos_token_id = 1
eos_token_id = 2
pad_token_id = 0

[data]
source = "sort-digits"
held_out = 16

[rollout]
prompts = 8
samples = 4
max_tokens = 7

[train]
mini_batches = 2
[train.optimizer]
lr = 2e-3
[train.schedule]
warmup_steps = 2
decay = "linear"

[eval]
every = 3

[checkpoint]
every = 2
keep = 0
"""
