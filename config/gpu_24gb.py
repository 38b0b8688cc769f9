"""
config/gpu_small.py, which gives the reasons, on one GPU with 24 GB: the same steps in smaller
micro-batches.

    python data/prepare.py path/to/texts --name=corpus --tokenizer=gpt2
    python train.py config/gpu_24gb.py --data=corpus
"""
data = "corpus"
vocab_size = 50304       # GPT-2's 50,257, padded to a multiple of 64; the padding is never sampled

# GPT-2 small's width, depth and heads of 64; K3's latent of half the width, two shared experts, and
# three KDA layers to one MLA layer
n_layer = 12
n_embd = 768
n_head = 12
q_lora_rank = 384
kv_lora_rank = 128       # MLA caches 128 + 32 numbers per token: a tenth of 12 heads' k and v
qk_nope_head_dim = 64
qk_rope_head_dim = 32
v_head_dim = 64
intermediate_size = 2048
num_experts = 64
num_experts_per_token = 6
moe_intermediate_size = 256
routed_expert_hidden_size = 384
attn_res_block_size = 3  # four blocks and the embedding: five sources at the end

# micro-batches of 16k tokens: by a count on paper about 17 GB, weights, gradients and momenta
# included
batch_size = 16
context = 1024
grad_accum = 8
steps = 20000            # 2.6B tokens, 20 per active parameter

lr = 2e-3
weight_decay = 0.1
eval_every = 500
eval_batches = 20
