"""nanoGPT's benchmark, tiny Shakespeare by single characters (all ASCII, so bytes), last 10% for validation. Ten minutes on two CPU cores:

    python data/prepare.py path/to/tinyshakespeare.txt --name=shakespeare_char --tokenizer=bytes
    python train.py config/shakespeare_char.py                    (--steps=320 for two and a half minutes)
"""
data = "shakespeare_char"

# the model and the weight decay of config/shakespeare.py; its reasons are there
intermediate_size = 384
batch_size = 16
context = 256
lr = 8e-3
weight_decay = 1.0

steps = 1400                    # 5.7M characters: the text six times
eval_every = 350
eval_batches = 28               # 448 windows, more than validation has: it is read whole
