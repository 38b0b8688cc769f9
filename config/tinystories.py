"""
TinyStories (arXiv 2305.07759): 2.1M short stories, 1.9 GB, by a model of 50M parameters, the size
at which other small K3s have been trained on them; the best of those reach 1.63 nats a token with
8,192 tokens. One GPU with 24 GB. Not yet run, so there is no figure of ours:

    python data/prepare.py tinystories --vocab_size=8192
    python train.py config/tinystories.py

On paper (python -m lab.bench gpu config/tinystories.py): 17 GB; 41,000 tokens/s on an L4, 123,000
on a 4090, 243,000 on an A100, so 6 hours, 2 hours and 1 hour at least.
"""
data = "tinystories"     # validation is on the corpus's own part
vocab_size = 8192        # as the others have, so that nats a token compare

# 49.7M parameters, 29.0M of them active, in heads of 64. At this size a fixed number of parameters
# is the limit, so many of them are active: 4 experts of 16
n_layer = 8
n_embd = 512
n_head = 8
q_lora_rank = 256
kv_lora_rank = 128
qk_nope_head_dim = 48
qk_rope_head_dim = 16
v_head_dim = 64
intermediate_size = 1024
num_experts = 16
num_experts_per_token = 4
moe_intermediate_size = 256
routed_expert_hidden_size = 256
attn_res_block_size = 2  # as in the quickstart: four blocks and the embedding

batch_size = 64          # the largest for 24 GB is 86; --batch_size=32 --grad_accum=4 takes half
context = 512            # a story has some 200 tokens: a window holds two
grad_accum = 2           # 65,536 tokens a step
steps = 14000            # 0.9B tokens: the corpus about twice, 30 for each active parameter

lr = 4e-3                # by the rule for widths in docs/studies.md; not tried at this one
weight_decay = 0.1
eval_every = 500
eval_batches = 32        # 1M of the 4.7M tokens for validation
