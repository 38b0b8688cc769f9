"""
nanoGPT's benchmark: tiny Shakespeare by single characters (all ASCII, so bytes), the last 10% for
validation. Ten minutes on two CPU cores:

    python data/prepare.py path/to/tinyshakespeare.txt --name=shakespeare_char --tokenizer=bytes
    python train.py config/shakespeare_char.py          (--steps=320 for two and a half minutes)
"""
data = "shakespeare_char"

# model and weight decay as in config/shakespeare.py, which gives the reasons
intermediate_size = 384
batch_size = 16
context = 256
lr = 8e-3
weight_decay = 1.0

steps = 1400             # 5.7M characters: the text six times
eval_every = 350
eval_batches = 28        # 448 windows, more than the validation split has: it is read whole
