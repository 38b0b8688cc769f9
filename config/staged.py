"""Context that grows in four stages, as K3's does from 8k over 64k and 256k to 1M (§3.3); here from 64 to 4,096 tokens:

    python data/prepare.py shakespeare && python train.py config/staged.py

Most of the run sees short sequences, which cost MLA least; a model without positions needs nothing changed when they get longer.
`python bench.py long` reads models far beyond the context that they were trained on.
"""
data = "shakespeare"

# the model and the rate of config/shakespeare.py; its reasons are there
intermediate_size = 384
lr = 1.2e-2
weight_decay = 1.0

# 4,096 tokens a step throughout: 64 sequences of 64 tokens at first, one of 4,096 at the end
batch_size = 1
context = 4096
context_stages = ((0.0, 64), (0.5, 256), (0.8, 1024), (0.95, 4096))
steps = 360

eval_every = 180
eval_batches = 16               # of 4,096 tokens
