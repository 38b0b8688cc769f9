"""
This Python's own library sources, 12 MB of code that every reader has; needs no network at all.

    python data/prepare.py stdlib --vocab_size=2048 && python train.py config/stdlib.py

Code has long-range structure (indentation, names used again), so context grows as in K3's
curriculum, from 64 over 128 and 256 to 512 tokens, with 4,096 tokens a step throughout. About ten
minutes on two CPU cores.
"""
data = "stdlib"

intermediate_size = 384
batch_size = 8
context = 512
context_stages = ((0.0, 64), (0.4, 128), (0.7, 256), (0.9, 512))
steps = 1200

lr = 8e-3
weight_decay = 1.0
eval_every = 300
