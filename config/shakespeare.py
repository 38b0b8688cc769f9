"""
The quickstart: the complete works, in about three minutes on two CPU cores. `make quickstart`, or:

    python data/prepare.py shakespeare && python train.py config/shakespeare.py

Every part of K3 is in it: three KDA layers and one MLA layer, two layers per AttnRes block, a dense
MLP and three with 16 experts.
"""
data = "shakespeare"     # BPE of 4,096 tokens, 3.4 bytes each; 1,024 and 8,192 do worse

# The sizes are K3Config's defaults: 128 wide, 4 layers, 4 heads of 32. Only the dense layer
# differs: it is as wide as its cost allows.
intermediate_size = 384

# A step of 4,096 tokens is the least that keeps the time in matrix products rather than in starting
# small ones.
batch_size = 8
context = 512            # costs 3% more than 16 × 256: one layer in four looks back over all of it
steps = 327              # 1.34M tokens, as many as the text has

lr = 1.2e-2              # Muon moves an entry by 0.2 · lr a step; 8e-3 does worse, 1.6e-2 and
                         # 2.2e-2 no better
weight_decay = 1.0       # far more than large models use; 0.5 does worse, even in one pass
eval_every = 164
