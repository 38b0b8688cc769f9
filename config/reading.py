"""
Learning to read from scratch: a language model and a vision tower, on lines of text as images and
on plain text, for as long as 2.8 quickstarts. It then reads 81% of random digits but few letters:
it needs more steps (docs/reading.md), and Pillow, and matplotlib for its faces:

    python data/reading.py && python train.py config/reading.py
    python sample.py --out_dir=out/reading --image=line.png
"""
data = "reading"              # half of the tokens are plain text, half images with what they say

# the language model of config/shakespeare.py, over single bytes; its reasons are there
intermediate_size = 384
vit_layers = 4                # the other sizes of the tower are K3Config's defaults

batch_size = 16
context = 256                 # seven or eight lines, each with its image
steps = 1000
lr = 8e-3
weight_decay = 0.3
eval_every = 250
