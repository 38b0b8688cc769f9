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
    --prompts=FILE              or many of them, one a line, of any lengths, read in one batch
    --num_samples=1             how many of each, in the same batch
    --max_new_tokens=500        of each; a sample ends earlier at end-of-text
    --temperature=0.8           0: always the likeliest token
    --top_k=0                   only the k likeliest tokens; 0: all
    --top_p=1.0                 only the likeliest tokens that together reach p
    --draft=0                   the MTP layer drafts so many tokens at once (mtp.py); 0: none
    --seed=1                    of the first sample; the next ones have the next numbers, and each
                                is what it would be alone
    --device=auto               cuda, mps or cpu
    --chat                      talk to a model of post.py, a line at a time, until Ctrl-D
    --effort=low                or high or max: how much it is to think, in a chat

Text goes to standard output as it is decoded, the speed to standard error.
"""
import sys
import time
from pathlib import Path

import torch

import cli
from checkpoint import load_model
from data import chat, images, tokenizer
from model import K3, sample_token
from mtp import evaluating
from weights import end_ids

DEFAULTS = {"from": "", "out_dir": "out/shakespeare", "prompt": "\n", "prompts": "",
            "num_samples": 1, "max_new_tokens": 500, "temperature": 0.8, "top_k": 0, "top_p": 1.0,
            "draft": 0, "seed": 1, "device": "auto", "chat": False, "effort": ""}


def main(arguments):
    options = read_arguments(arguments)
    device = cli.find_device(options["device"])
    if options["from"]:
        model, enc, ends = load_released(options["from"], device)
    else:
        model, enc = load_model(options["out_dir"], device)
        ends = set()
    if options["chat"]:
        return talk(model, enc, options)
    ends = ends | {tokenizer.end_of_text(enc)}
    rows, seen = read_prompts(options, model, enc)
    seen = seen and (seen[0].to(device), seen[1])
    write = one_by_one if options["draft"] else together
    began = time.perf_counter()
    count = show(write(model, [ids for _, ids in rows], options, enc, ends, seen), enc, ends,
                 [prompt for prompt, _ in rows], options["max_new_tokens"])
    seconds = time.perf_counter() - began
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s, "
          f"{'prompts' if len(rows) > 1 else 'prompt'} of {sum(len(ids) for _, ids in rows)} "
          "included", file=sys.stderr)
    if options["draft"] and model.mtp.rounds:
        print(f"{model.mtp.kept / model.mtp.rounds:.2f} tokens per round of {options['draft']} "
              "drafts", file=sys.stderr)


def together(model, prompts, options, enc, ends, seen):
    """All rows in one batch → an iterator of {row: its new token}."""
    return model.generate_rows(prompts, options["max_new_tokens"], options["seed"], ends,
                               options["temperature"], options["top_k"] or None, options["top_p"],
                               enc.n_vocab, seen)


def one_by_one(model, prompts, options, enc, ends, seen):
    """The same with drafts, of which every row accepts its own number."""
    device = model.embed.weight.device
    how = dict(temperature=options["temperature"], top_k=options["top_k"] or None,
               top_p=options["top_p"], vocab_size=enc.n_vocab, images=seen, draft=options["draft"])
    streams = [model.generate(torch.tensor([ids], device=device), options["max_new_tokens"],
                              stream=True, **how) for ids in prompts]

    def tokens():
        for row, stream in enumerate(streams):
            torch.manual_seed((options["seed"] + row) % 2 ** 64)
            for token in stream:
                yield {row: token.item()}
                if token.item() in ends:
                    break
    return tokens()


def show(steps, enc, ends, prompts, most):
    """
    Print all rows, one after the other: the first one as it is decoded, the next ones what they
    have by then, and so on → how many tokens that was. most: tokens of a row.
    """
    decoders = [tokenizer.StreamDecoder(enc) for _ in prompts]
    texts, left, row, count = list(prompts), [most] * len(prompts), 0, 0
    print(texts[0], end="", flush=True)
    texts[0] = ""
    for new in steps:
        count += len(new)
        for i, token in new.items():
            left[i] = 0 if token in ends else left[i] - 1
            if token not in ends:
                texts[i] += decoders[i].push(token)
            if not left[i]:
                texts[i] += decoders[i].finish() + "\n"
        while row < len(texts):
            print(texts[row], end="", flush=True)
            texts[row] = ""
            if left[row]:
                break
            row += 1
            if row < len(texts):
                print("\n" + "-" * 80)
    return count


def read_arguments(arguments):
    """→ {name: value}, checked, and prompts: those to be read. Errors: ValueError."""
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
    odd = [name for name in ("prompt", "prompts", "num_samples", "draft")
           if options[name] != DEFAULTS[name]]
    if options["chat"] and (odd or files):
        raise ValueError(f"--{(odd or ['image'])[0]} is not for --chat, where you type what to say")
    if options["effort"] and (options["effort"] not in chat.EFFORTS or not options["chat"]):
        raise ValueError(f"--effort={options['effort']}: expected low, high or max, with --chat")
    if not 0 <= options["seed"] < 2 ** 64:
        raise ValueError(f"--seed={options['seed']}: expected 0 ≤ seed < 2**64")
    for name in ("from", "out_dir"):
        options[name] = str(Path(options[name]).expanduser()) if options[name] else ""
    options["prompts"] = written_prompts(options, with_images=bool(files))
    return options


def written_prompts(options, with_images):
    """What --prompt or --prompts says → a list of texts."""
    prompt, file = options["prompt"], options["prompts"]
    escapes = lambda text: text.replace("\\n", "\n").replace("\\t", "\t")
    try:
        if file and (with_images or prompt != DEFAULTS["prompt"]):
            raise ValueError("give either --prompts or --prompt and --image")
        if file:
            lines = cli.read_text(Path(file).expanduser()).split("\n")
            prompts = [escapes(line) for line in lines if line]
        elif prompt.startswith("FILE:"):
            prompts = [cli.read_text(Path(prompt[5:]).expanduser())]
        else:
            prompts = [escapes(prompt)]
    except (OSError, ValueError) as error:
        raise ValueError(f"--{'prompts' if file else 'prompt'}: {error}") from None
    if with_images and prompts == ["\n"]:
        return [""]                # an image is enough to start from
    if prompts in ([], [""]):
        raise ValueError('--prompt is empty; a model needs at least one token to start from, such '
                         'as --prompt="\\n"')
    return prompts


def read_prompts(options, model, enc):
    """→ [(prompt, its ids)] of every sample, and the images as K3.generate takes them, or None."""
    texts, seen = options["prompts"], None
    if options["images"]:
        ids, seen = with_images(texts[0], options["images"], model, enc)
        rows = [(texts[0], ids)]
    else:
        rows = [(text, tokenizer.encode(enc, text).tolist()) for text in texts]
    return [row for row in rows for _ in range(options["num_samples"])], seen


def with_images(prompt, files, model, enc):
    """→ ids of a prompt with images, and the images."""
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


def talk(model, enc, options):
    """A conversation. The cache holds all that was said before: nothing is read again."""
    effort, dim, plain = options["effort"], "\033[2m", "\033[0m"
    if not sys.stdout.isatty():
        dim = plain = ""
    *_, end = chat.control_ids(enc)
    torch.manual_seed(options["seed"])
    cache, unread = model.new_cache(1), []
    messages = [chat.effort_message(effort)] if effort else []
    for line in typed_lines():
        messages.append({"role": "user", "content": line})
        unread += chat.render(messages, enc, answer=True)[0]
        messages, said, shown = [], [], ""
        print(dim, end="")
        for kind, text in chat.events(answer(model, cache, unread, enc, said, options), enc):
            if kind == "text":
                shown += text
                print(text, end="", flush=True)
            elif kind == chat.CLOSE and text == "think":
                print(plain, end="\n" * bool(shown))
        unread = said[-1:]                        # of the answer this alone is not in the cache
        if unread != [end]:
            print(f"{plain} … (cut off by --max_new_tokens={options['max_new_tokens']})", end="")
            unread += [end]
        print(plain)


def answer(model, cache, unread, enc, said, options):
    """Read ids, then draw an answer, token by token; all of it goes into `said`, too."""
    end, how = chat.control_ids(enc)[-1], (options["top_k"] or None, options["top_p"])
    while len(said) < options["max_new_tokens"] and said[-1:] != [end]:
        with torch.no_grad(), evaluating(model):
            idx = torch.tensor([unread], device=model.embed.weight.device)     # (1, T)
            logits, _ = model(idx, cache=cache, last_only=True)
        logits = model.choices(logits[:, -1], enc.n_vocab)
        unread = sample_token(logits, options["temperature"], *how)[0].tolist()
        said += unread
        yield unread[0]


def typed_lines():
    """What is typed, or comes from a file, line by line; empty ones left out."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line:
            yield line


if __name__ == "__main__":
    cli.run(main, __doc__)
