r"""
Sample text from a checkpoint of train.py. All it needs is there: weights, sizes and the tokenizer.

    python sample.py --out_dir=out/shakespeare --prompt="ROMEO.\n" --max_new_tokens=300

    --out_dir=out/shakespeare   a run's folder (its newest checkpoint), or one checkpoint file
    --from=FOLDER               or a folder of released weights: config.json, *.safetensors and
                                tiktoken.model
    --prompt="\n"               what to begin with; \n and \t are line end and tab; FILE:path takes
                                a file's text
    --image=FILE                an image to begin with, png, jpeg or webp, for a model that has a
                                vision tower. Several are read in order; <|kimi_image_placeholder|>
                                in the prompt says where they stand, otherwise before it
    --num_samples=1             how many, one after the other
    --max_new_tokens=500        of each; a sample ends earlier at end-of-text
    --temperature=0.8           0: always the likeliest token
    --top_k=0                   only the k likeliest tokens; 0: all
    --top_p=1.0                 only the likeliest tokens that together reach p
    --draft=0                   the MTP layer drafts so many tokens at once (mtp.py); 0: none
    --seed=1                    of the first sample; the next ones follow from it
    --device=auto               cuda, mps or cpu

Text goes to standard output as it is decoded, the speed to standard error.
"""
import sys
import time
from pathlib import Path

import torch

import cli
from checkpoint import load_model
from data import images, tokenizer
from model import K3
from weights import end_ids

DEFAULTS = {"from": "", "out_dir": "out/shakespeare", "prompt": "\n", "num_samples": 1,
            "max_new_tokens": 500, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "draft": 0,
            "seed": 1, "device": "auto"}


def main(arguments):
    options = read_arguments(arguments)
    device = cli.find_device(options["device"])
    if options["from"]:
        model, enc, ends = load_released(options["from"], device)
    else:
        model, enc = load_model(options["out_dir"], device)
        ends = set()
    ends = ends | {tokenizer.end_of_text(enc)}
    ids, seen = read_prompt(options, model, enc)
    ids = torch.tensor(ids, dtype=torch.int64, device=device).unsqueeze(0)     # (1, T)
    seen = seen and (seen[0].to(device), seen[1])
    torch.manual_seed(options["seed"])
    count, began = 0, time.perf_counter()
    for sample in range(options["num_samples"]):
        if sample:
            print("\n" + "-" * 80)
        # generate checks its options: call it before anything is printed
        tokens = model.generate(ids, options["max_new_tokens"], options["temperature"],
                                options["top_k"] or None, options["top_p"], stream=True,
                                vocab_size=enc.n_vocab, images=seen,
                                draft=options["draft"] or None)
        print(options["prompt"], end="", flush=True)
        text = tokenizer.StreamDecoder(enc)
        for token in tokens:
            count += 1
            if token.item() in ends:
                break
            print(text.push(token.item()), end="", flush=True)
        print(text.finish())
    seconds = time.perf_counter() - began
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s, "
          f"prompt of {ids.shape[1]} included", file=sys.stderr)
    if options["draft"] and model.mtp.rounds:
        print(f"{model.mtp.kept / model.mtp.rounds:.2f} tokens per round of {options['draft']} "
              "drafts", file=sys.stderr)


def read_arguments(arguments):
    """→ {name: value}, checked, the prompt as it is to be read. Errors: ValueError."""
    files = [a.partition("=")[2] for a in arguments if a.startswith("--image=")]
    arguments = [a for a in arguments if not a.startswith("--image=")]
    options, rest = cli.options(arguments, DEFAULTS)
    options["images"] = [Path(file).expanduser() for file in files]
    if rest:
        raise ValueError(f"expected options only, got {rest[0]}; for a run, --out_dir={rest[0]}")
    if options["from"] and options["out_dir"] != DEFAULTS["out_dir"]:
        raise ValueError("--from and --out_dir both name a model; give one")
    if options["num_samples"] < 1 or options["max_new_tokens"] < 1 or options["top_k"] < 0:
        raise ValueError("expected num_samples ≥ 1, max_new_tokens ≥ 1, top_k ≥ 0")
    if not 0 <= options["seed"] < 2 ** 64:
        raise ValueError(f"--seed={options['seed']}: expected 0 ≤ seed < 2**64")
    for name in ("from", "out_dir"):
        options[name] = str(Path(options[name]).expanduser()) if options[name] else ""
    prompt = options["prompt"]
    if prompt.startswith("FILE:"):
        try:
            prompt = cli.read_text(Path(prompt[5:]).expanduser())
        except (OSError, ValueError) as error:
            raise ValueError(f"--prompt: {error}") from None
    elif prompt != "\n":
        prompt = prompt.replace("\\n", "\n").replace("\\t", "\t")
    if files and prompt == "\n":
        prompt = ""               # an image is enough to start from
    elif not prompt:
        raise ValueError('--prompt is empty; a model needs at least one token to start from, such '
                         'as --prompt="\\n"')
    return options | {"prompt": prompt}


def read_prompt(options, model, enc):
    """→ ids of the prompt, and its images as K3.generate takes them, None without."""
    prompt, files = options["prompt"], options["images"]
    if not files:
        return tokenizer.encode(enc, prompt).tolist(), None
    if not model.vision or not tokenizer.media_ids(enc):
        raise ValueError("--image: this model has no vision tower, or its tokenizer no tokens for "
                         "images; train one with images (config/reading.py)")
    texts = prompt.split(images.MARK)
    if len(texts) == 1:
        texts = [""] * len(files) + texts
    if len(texts) != len(files) + 1:
        raise ValueError(f"--prompt has {images.MARK} {len(texts) - 1} times, for {len(files)} "
                         "images; expected it once for each, or not at all")
    parts = [part for pair in zip(texts, files) for part in pair] + texts[-1:]
    ids, patches, found = images.encode(enc, parts, model.config.vit_patch)
    return ids, (torch.from_numpy(patches), [(h, w) for _, _, h, w in found])


def load_released(folder, device):
    """Released weights → K3 in eval mode, tiktoken.Encoding, the ids that end a text."""
    model = K3.from_pretrained(folder, torch.bfloat16 if device == "cuda" else None, device)
    if model.tokenizer is None:
        raise FileNotFoundError(f"no tiktoken.model in {folder}, so text cannot become ids; put "
                                "the file that belongs to the weights there")
    return model, model.tokenizer, end_ids(folder)


if __name__ == "__main__":
    cli.run(main, __doc__)
