"""The quickstart: the complete works in about three minutes on two CPU cores. `make quickstart`, or:

    python data/prepare.py shakespeare && python train.py config/shakespeare.py

Every part of K3 is in it: three KDA layers and one MLA layer, two layers to an AttnRes block, one dense MLP and three with 16 experts.
"""
data = "shakespeare"            # BPE of 4,096 tokens, 3.4 bytes each: 1,024 and 8,192 end higher after the same time

# sizes: the defaults of K3Config (128 wide, 4 layers, 4 heads of 32); only the dense layer is made as wide as its cost allows
intermediate_size = 384

# a step of 4,096 tokens is the least that keeps the work in matrix products rather than in the launching of small ones
batch_size = 8
context = 512                   # costs 3% more than 16 × 256: only one layer in four has to look back over all of it
steps = 327                     # 1.34M tokens, as many as the text has

lr = 1.2e-2                     # Muon takes a matrix 0.2·lr per entry and step; 8e-3 ends higher, 1.6e-2 and 2.2e-2 no lower
weight_decay = 1.0              # far more than large models have: 0.5 ends higher, even in one pass over the text
eval_every = 164
