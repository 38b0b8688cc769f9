"""
How good is a model? Bits per byte of any text, and the field's benchmarks.

    python -m lab.evaluate out/shakespeare play.txt essay.txt
    python -m lab.evaluate out/NAME --tasks=hellaswag,arc_easy,piqa,lambada_openai

The model is a run's folder, one checkpoint file, or a folder of released weights (weights.py).

Texts are read twice, a line for each file: once with all of the context carried along by the cache
(K3 has no positions, so it reads as far as there is text), once in windows that know nothing of
each other, as train.py evaluates. The first token is given: its bytes do not count.

    --context=512        tokens of a window; otherwise the run's context, 1,024 for released weights

Tasks are those of EleutherAI's lm-evaluation-harness (pip install lm-eval), which fetches their
data, formats the questions and prints the table. Its figures of other models compare.

    --few_shot=5         examples before each question; otherwise the task's own number
    --limit=100          so many documents of each task; otherwise all
    --task_folder=DIR    tasks of your own: their YAML files

    --batch_size=16      windows, contexts or continuations in one forward pass
    --device=auto        cuda, mps or cpu
"""
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import checkpoint
import cli
from data import tokenizer
from model import rows_of
from ops import fp32
from sample import load_released

PIECE = 1024      # tokens of a sequence in one forward pass


# --------------------------------------------------------------------------------------------------
# Bits per byte

@torch.no_grad()
def carried(model, ids):
    """ids (n) → nats (n − 1): of each token but the first, predicted from all those before it."""
    cache, nats = model.new_cache(1), []
    for x, y in zip(ids[:-1].split(PIECE), ids[1:].split(PIECE)):
        logits, _ = model(x[None], cache=cache)
        nats.append(cross_entropy(logits[0], y))
    return torch.cat(nats)


@torch.no_grad()
def windowed(model, ids, context, batch_size):
    """The same in windows of `context` tokens, in each of which nothing before it is known."""
    x, y = ids[:-1], ids[1:]
    whole = len(x) // context * context
    nats = []
    for start in range(0, whole, batch_size * context):
        some = slice(start, min(start + batch_size * context, whole))
        logits, _ = model(x[some].view(-1, context))                      # (B, context, vocab)
        nats.append(cross_entropy(logits.flatten(0, 1), y[some]))
    if whole < len(x):
        logits, _ = model(x[None, whole:])
        nats.append(cross_entropy(logits[0], y[whole:]))
    return torch.cat(nats)


def cross_entropy(logits, targets):
    """logits (n, vocab), targets (n) → nats (n)."""
    return F.cross_entropy(fp32(logits), targets, reduction="none")


def evaluate_text(model, enc, path, text, context, batch_size):
    """One file's text → the line to print."""
    ids = torch.from_numpy(tokenizer.encode(enc, text).astype("int64"))
    if len(ids) < 2:
        raise ValueError(f"{path}: expected at least two tokens, of which the first is given; it "
                         f"has {len(ids)}")
    size = len(text.encode()) - len(enc.decode_single_token_bytes(ids[0].item()))
    ids = ids.to(model.embed.weight.device)
    bits = [nats.double().sum().item() / math.log(2) / size for nats in
            (carried(model, ids), windowed(model, ids, context, batch_size))]
    return (f"{path}: {bits[0]:.4f} bits per byte with all of the context, {bits[1]:.4f} in "
            f"windows of {context} ({len(ids):,} tokens, {size:,} bytes)")


# --------------------------------------------------------------------------------------------------
# Benchmarks

class Scorer:
    """What benchmarks ask of a model. end: the id before a text; ends: the ids that stop one."""

    def __init__(self, model, enc, ends, batch_size):
        self.model, self.enc, self.batch_size = model, enc, batch_size
        self.device = model.embed.weight.device
        self.end = tokenizer.end_of_text(enc)
        self.ends = ends | {self.end}

    def encode(self, text):
        return tokenizer.encode(self.enc, text).tolist()

    def encode_pair(self, context, continuation):
        """
        Two texts → their ids, cut as the harness does: the text is encoded whole, blanks at the end
        of the context go to the continuation, and the first ids are as many as the context has.
        """
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        whole = self.encode(context + continuation)
        if not context:
            return [self.end], whole
        before = self.encode(context)
        if continuation:                                   # has one token of its own at least
            before = before[:len(whole) - 1]
        return before, whole[len(before):]

    @torch.no_grad()
    def log_likelihoods(self, pairs):
        """
        [(context ids, continuation ids)] → [(log-likelihood of the continuation in nats, whether
        each of its tokens is the likeliest)]. Every context is read once, whatever follows it.
        Contexts of one length make a batch: a state of KDA takes no padding.
        """
        results, by_context, by_length = [(0.0, True)] * len(pairs), {}, {}
        for number, (context, continuation) in enumerate(pairs):
            if continuation:
                by_context.setdefault(tuple(context), []).append(number)
        for context in by_context:
            by_length.setdefault(len(context), []).append(context)
        for contexts in by_length.values():
            for some in in_batches(contexts, self.batch_size):
                first, cache = self.read(torch.tensor(some, device=self.device))
                asked = [(row, number) for row, context in enumerate(some)
                         for number in by_context[context]]
                for batch in in_batches(asked, self.batch_size):
                    rows = [row for row, _ in batch]
                    continuations = [pairs[number][1] for _, number in batch]
                    scores = self.continue_from(first[rows], rows_of(cache, rows), continuations)
                    for (_, number), score in zip(batch, scores):
                        results[number] = score
        return results

    def read(self, idx):
        """Contexts (B, T) → logits for what comes next (B, 1, vocab), the cache."""
        cache = self.model.new_cache(len(idx))
        for piece in idx.split(PIECE, dim=1):
            logits, _ = self.model(piece, cache=cache, last_only=True)
        return logits, cache

    def continue_from(self, first, cache, continuations):
        """
        first (B, 1, vocab): logits after the contexts. B continuations of any lengths → [(log-
        likelihood, greedy)]. They are padded at the end, where nothing looks back at them.
        """
        lengths = [len(ids) for ids in continuations]
        targets = torch.zeros(len(lengths), max(lengths), dtype=torch.long, device=self.device)
        for row, ids in zip(targets, continuations):
            row[:len(ids)] = torch.tensor(ids)
        logits = [first]
        if max(lengths) > 1:
            logits.append(self.model(targets[:, :-1], cache=cache)[0])
        logits = fp32(torch.cat(logits, 1))                               # (B, T, vocab)
        nats = cross_entropy(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
        likeliest = logits.argmax(-1) == targets
        return [(-row[:n].sum().item(), same[:n].all().item())
                for row, same, n in zip(nats, likeliest, lengths)]

    def of_text(self, text):
        """Log-likelihood of a whole text, in nats, with all of its context."""
        ids = torch.tensor([self.end, *self.encode(text)], device=self.device)
        return -carried(self.model, ids).sum().item() if len(ids) > 1 else 0.0

    def generate(self, context, options):
        """What the model writes after the context, up to the first of options["until"]."""
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0.0
        idx = torch.tensor([self.encode(context) or [self.end]], device=self.device)
        tokens = self.model.generate(idx, options.get("max_gen_toks", 256), temperature,
                                     stream=True, vocab_size=self.enc.n_vocab)
        decoder, text = tokenizer.StreamDecoder(self.enc), ""
        for token in tokens:
            if token.item() in self.ends:
                break
            text += decoder.push(token.item())
            if any(stop in text for stop in until):
                break
        text += decoder.finish()
        return text[:min((text.find(stop) for stop in until if stop in text), default=None)]


def in_batches(items, size):
    return [items[i:i + size] for i in range(0, len(items), size)]


def run_tasks(scorer, options):
    """Let lm-evaluation-harness ask its questions → its table."""
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise ValueError(f"--tasks needs EleutherAI's harness, and {error.name} is not installed: "
                         "pip install lm-eval") from None

    class Asked(LM):
        """The model as the harness wants it; a request's args are the arguments there."""

        def loglikelihood(self, requests):
            return scorer.log_likelihoods([scorer.encode_pair(*r.args) for r in requests])

        def loglikelihood_rolling(self, requests):
            return [scorer.of_text(*r.args) for r in requests]

        def generate_until(self, requests):
            return [scorer.generate(*r.args) for r in requests]

    names = options["tasks"].split(",")
    manager = TaskManager(include_path=options["task_folder"] or None)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"--tasks: the harness has no task {unknown[0]}; it lists its own by "
                         "lm-eval ls tasks, and --task_folder=DIR adds yours")
    few_shot = options["few_shot"] if options["few_shot"] >= 0 else None
    results = lm_eval.simple_evaluate(model=Asked(), tasks=names, num_fewshot=few_shot,
                                      limit=options["limit"] or None, task_manager=manager)
    return make_table(results)


# --------------------------------------------------------------------------------------------------

DEFAULTS = dict(context=0, tasks="", few_shot=-1, limit=0, task_folder="", batch_size=16,
                device="auto")


def main(arguments):
    options, rest = cli.options(arguments, DEFAULTS)
    if not rest or not (rest[1:] or options["tasks"]):
        raise ValueError("expected a model, and texts or --tasks=…: "
                         "python -m lab.evaluate out/NAME FILE")
    for name, used in dict(context=rest[1:], few_shot=options["tasks"], limit=options["tasks"],
                           task_folder=options["tasks"]).items():
        if options[name] != DEFAULTS[name] and not used:
            raise ValueError(f"--{name} is for {'texts' if name == 'context' else '--tasks'}, and "
                             "there are none")
    if options["batch_size"] < 1 or options["context"] < 0 or options["limit"] < 0:
        raise ValueError("expected --batch_size of at least 1, --context and --limit above 0")
    texts = {path: cli.read_text(path) for path in rest[1:]}
    model, enc, ends, context = load(rest[0], cli.find_device(options["device"]))
    for path, text in texts.items():
        print(evaluate_text(model, enc, path, text, options["context"] or context,
                            options["batch_size"]), flush=True)
    if options["tasks"]:
        print(run_tasks(Scorer(model, enc, ends, options["batch_size"]), options))


def load(path, device):
    """A run or released weights → K3 in eval mode, its tokenizer, ids that end a text, context."""
    if (Path(path) / "config.json").is_file():
        return *load_released(path, device), 1024
    context = checkpoint.load_checkpoint(path)["settings"]["context"]
    return *checkpoint.load_model(path, device), set(), context


if __name__ == "__main__":
    cli.run(main, __doc__)
