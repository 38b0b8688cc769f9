"""
Context that grows in four stages, as K3's does from 8k over 64k and 256k to 1M (§3.3); here from
64 to 4,096 tokens:

    python data/prepare.py shakespeare && python train.py config/staged.py

Most of the run sees short sequences, where MLA costs least; a model without positions needs no
change when they grow. `python -m lab.study long` reads models far beyond their training context.
"""
data = "shakespeare"

# model and learning rate as in config/shakespeare.py, which gives the reasons
intermediate_size = 384
lr = 1.2e-2
weight_decay = 1.0

# 4,096 tokens a step throughout: 64 sequences of 64 tokens at first, one of 4,096 at the end
batch_size = 1
context = 4096
context_stages = ((0.0, 64), (0.5, 256), (0.8, 1024), (0.95, 4096))
steps = 360

eval_every = 180
eval_batches = 16        # of 4,096 tokens
