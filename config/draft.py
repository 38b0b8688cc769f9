"""
A model with an MTP layer, which drafts its tokens (mtp.py). Then the layer is fine-tuned, and text
comes faster, exactly as it would without. On one core of a busy machine it took 41 minutes:

    python data/prepare.py shakespeare --name=shakespeare_bytes --tokenizer=bytes
    python train.py config/draft.py && python mtp.py out/draft
    python sample.py --out_dir=out/draft/ckpt_draft.pt --draft=3
"""
data = "shakespeare_bytes"

# config/shakespeare.py's model and reasons, with twice its layers: a draft of one layer is the
# cheaper the deeper the model
n_layer = 8
intermediate_size = 384
mtp_layers = 1

batch_size = 16
context = 256
lr = 8e-3
weight_decay = 1.0
steps = 240              # 0.98M bytes
eval_every = 120
