"""The quickstart: the complete works in about three minutes on two CPU cores. `make quickstart`, or:

    python data/prepare.py shakespeare && python train.py config/shakespeare.py

Every part of K3 is in it: three KDA layers and one MLA layer, two layers to an AttnRes block, one dense MLP and three with 16 experts.
"""
data = "shakespeare"            # BPE of 1,024 tokens, 2.5 bytes each: words come sooner than with single bytes

# sizes: the defaults of K3Config (128 wide, 4 layers, 4 heads of 32); only the dense layer is made as wide as its cost allows
intermediate_size = 384

# a step of 4,096 tokens is the least that keeps the work in matrix products rather than in the launching of small ones
batch_size = 16
context = 256
steps = 360                     # 1.5M tokens, four fifths of the text

lr = 8e-3                       # Muon takes a matrix 0.2·lr per entry and step; 4e-3 and 1.2e-2 end a little higher
weight_decay = 1.0              # far more than large models have: 0.3 ends higher, even in one pass over the text
eval_every = 180
