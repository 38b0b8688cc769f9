"""
GPT-2 small's class, 117M active of 344M parameters, on 2.5B tokens of FineWeb-Edu. One GPU with
80 GB. Not yet run. A quarter of the sample of 10B tokens is enough, some 8 GB to fetch:

    python data/prepare.py fineweb-edu --limit=12GB --tokenizer=gpt2 --val_fraction=0.005
    python train.py config/fineweb.py
    python -m lab.evaluate out/fineweb --tasks=hellaswag,arc_easy,piqa,lambada_openai

On paper (python -m lab.bench gpu config/fineweb.py): 54 GB; 84,000 tokens/s on an A100, 160,000 on
an H100, so 8 and 4 hours at least.
"""
data = "fineweb-edu"
vocab_size = 50304       # GPT-2's 50,257, padded to a multiple of 64; the padding is never sampled

# the model of config/gpu_small.py, which gives the reasons
n_layer = 12
n_embd = 768
n_head = 12
q_lora_rank = 384
kv_lora_rank = 128
qk_nope_head_dim = 64
qk_rope_head_dim = 32
v_head_dim = 64
intermediate_size = 2048
num_experts = 64
num_experts_per_token = 6
moe_intermediate_size = 256
routed_expert_hidden_size = 384
attn_res_block_size = 3

batch_size = 32          # the largest for 80 GB is 44
context = 1024           # GPT-2's
grad_accum = 16          # 524,288 tokens a step, as nanoGPT's GPT-2 has
steps = 4800             # 2.5B tokens, 21 for each active parameter; each is read about once

lr = 2e-3                # config/gpu_small.py's; the rule in docs/studies.md would give 3e-3
weight_decay = 0.1
eval_every = 200
eval_batches = 20
