"""
Sample text from a checkpoint of train.py. All it needs is in the checkpoint: weights, sizes and the tokenizer.

    python sample.py --out_dir=out/shakespeare --prompt="ROMEO.\n" --max_new_tokens=300 --temperature=0.8

    --out_dir=out/shakespeare   a run's folder (its newest checkpoint), or one checkpoint file
    --from=FOLDER               instead of it, a folder of released weights: config.json, *.safetensors and tiktoken.model
    --prompt="\n"               what to begin with; \n and \t are line end and tab; FILE:path takes a file's text
    --num_samples=1             how many, one after the other
    --max_new_tokens=500        of each; a sample ends earlier at end-of-text
    --temperature=0.8           0: always the likeliest token
    --top_k=0  --top_p=1.0      only the k likeliest tokens (0: all); only the likeliest that together reach p
    --seed=1                    of the first sample; the next ones follow from it
    --device=auto               cuda, mps or cpu

Text goes to standard output as it is decoded, the speed to standard error.
"""
import difflib
import sys
import time
from pathlib import Path

import torch

from data import tokenizer
from model import K3, K3Config
from train import find_device, load_checkpoint
from weights import end_ids

DEFAULTS = {"from": ""} | dict(out_dir="out/shakespeare", prompt="\n", num_samples=1, max_new_tokens=500, temperature=0.8, top_k=0, top_p=1.0, seed=1,
                device="auto")


def read_arguments(arguments):
    options = dict(DEFAULTS)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if name not in DEFAULTS or not equals or not argument.startswith("--"):
            near = difflib.get_close_matches(name, DEFAULTS, 1)
            raise ValueError(f"unknown option {argument}; " + (f"did you mean --{near[0]}=…?" if near else "--help shows them all"))
        try:
            options[name] = type(DEFAULTS[name])(value)
        except ValueError:
            raise ValueError(f"{argument}: expected {'a whole number' if type(DEFAULTS[name]) is int else 'a number'}") from None
    if options["from"] and options["out_dir"] != DEFAULTS["out_dir"]:
        raise ValueError("--from and --out_dir both name a model; give one")
    if options["num_samples"] < 1 or options["max_new_tokens"] < 1 or options["top_k"] < 0:
        raise ValueError("expected num_samples ≥ 1, max_new_tokens ≥ 1, top_k ≥ 0")
    if options["prompt"].startswith("FILE:"):
        path = options["prompt"][5:]
        try:
            options["prompt"] = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompt=FILE:{path}: cannot be read as UTF-8 text ({error})") from None
    elif options["prompt"] != "\n":
        options["prompt"] = options["prompt"].replace("\\n", "\n").replace("\\t", "\t")
    if not options["prompt"]:
        raise ValueError('--prompt is empty; a model needs at least one token to start from, such as --prompt="\\n"')
    return options


def load_model(path, device):
    """A run's folder or checkpoint file → K3 in eval mode, tiktoken.Encoding."""
    checkpoint = load_checkpoint(path)
    model = K3(K3Config(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    model.tokenizer = tokenizer.from_dict(checkpoint["tokenizer"])
    if device == "cuda":
        model.bfloat16()                                                   # half the bytes to read for every token
    return model.to(device).eval(), model.tokenizer


def load_released(folder, device):
    """A folder of released weights → K3 in eval mode, tiktoken.Encoding, the ids that end a text."""
    model = K3.from_pretrained(folder, torch.bfloat16 if device == "cuda" else None, device)
    if model.tokenizer is None:
        raise FileNotFoundError(f"no tiktoken.model in {folder}, so text cannot become ids; put the file that belongs to the weights there")
    return model, model.tokenizer, end_ids(folder)


def main(arguments):
    options = read_arguments(arguments)
    device = find_device(options["device"])
    model, enc, ends = load_released(options["from"], device) if options["from"] else (*load_model(options["out_dir"], device), set())
    ends = ends | {tokenizer.end_of_text(enc)}
    ids = torch.from_numpy(tokenizer.encode(enc, options["prompt"]).astype("int64")).to(device).unsqueeze(0)   # (1, T)
    torch.manual_seed(options["seed"])
    count, began = 0, time.perf_counter()
    for sample in range(options["num_samples"]):
        if sample:
            print("\n" + "-" * 80)
        text = tokenizer.StreamDecoder(enc)
        tokens = model.generate(ids, options["max_new_tokens"], options["temperature"], options["top_k"] or None, options["top_p"],
                                stream=True, vocab_size=enc.n_vocab)       # checks the options before anything is printed
        print(options["prompt"], end="", flush=True)
        for token in tokens:
            count += 1
            if token.item() in ends:
                break
            print(text.push(token.item()), end="", flush=True)
        print(text.finish())
    seconds = time.perf_counter() - began
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s, prompt of {ids.shape[1]} included", file=sys.stderr)


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__.strip()))
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped")
