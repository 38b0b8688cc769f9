"""
Multi-token prediction, and decoding that is faster and exactly the same (report Table 1, §4.1.4,
§5.4.2; speculative sampling: arXiv 2211.17192; LK losses: arXiv 2602.23881).

K3 is trained with one more layer, which looks one token further than the model. It reads the
mixture over depth h_t that the model's last norm reads, and the embedding of the next token:

    u = W_eh [RMSNorm_e(E[x_{t+1}]) ; RMSNorm_h(h_t)]       W_eh (d, 2d), the embedding first
    a = u + GatedMLA(RMSNorm(u));    m = a + LatentMoE(RMSNorm(a))
    logits for x_{t+2} = head · RMSNorm_s(m)                E and head are the model's own

In decoding it drafts tokens, from the second on with its own m in the place of h, and the model
reads all of them in one call, so that several tokens may cost one reading of its weights.

    the layer and its loss      MTP
    decoding                    speculate, accept, Draft
    the fine-tuned draft        unrolled_loss, LK

    python mtp.py out/NAME      fine-tune the layer of a run's newest checkpoint into a draft, and
                                write out/NAME/ckpt_draft.pt, for sample.py --draft=3

    --steps=300  --lr=1e-3  --batch_size=4  --context=128  --seed=1  --device=auto
"""
import contextlib
import functools
import math
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import cli
from dispatch import pass_on
from mla import GatedMLA, hide_future
from moe import LatentMoE
from ops import RMSNorm, by_hand, cross_entropy, fp32


class MTP(nn.Module):

    def __init__(self, config):
        super().__init__()
        d, eps = config.n_embd, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        self.attn_norm, self.attn = RMSNorm(d, eps), GatedMLA(config)
        self.mlp_norm, self.mlp = RMSNorm(d, eps), LatentMoE(config)
        self.norm = RMSNorm(d, eps)
        self.w_e3 = nn.Linear(3 * d, d, bias=False) if config.mtp_features else None
        # as in a model's Layer, for the loops over all layers
        self.is_moe, self.attn_mix, self.mlp_mix = True, None, None
        self.rounds = self.kept = 0  # in decoding: rounds, and the tokens that they gave

    def forward(self, f, e, cache=None, counted=None, attention=None):
        """
        f (B, T, d): what `features` gives for tokens, e (B, T, d): the embeddings of the tokens
        after them → m (B, T, d). counted: the tokens that count for balance, (B, T) bool.
        """
        u = self.eh_proj(torch.cat([self.enorm(e), self.hnorm(f)], dim=-1))
        x = self.attn_norm(u)
        a = u + (attention(x) if attention else self.attn(x, cache))
        return a + self.mlp(self.mlp_norm(a), counted)

    def taps(self, stream, h):
        """
        What is taken from the model: h (B, T, d), before its last norm. A fine-tuned draft sees the
        sums of the first and the middle block, too: [low; mid; h], (B, T, 3d).
        """
        if self.w_e3 is None:
            return h
        sums = [*stream.blocks, stream.running]  # the first is the embedding
        blocks = len(sums) - 1
        return torch.cat([sums[min(1, blocks)], sums[(blocks + 1) // 2], h], dim=-1)

    def features(self, taps):
        return taps if self.w_e3 is None else self.w_e3(taps)

    def loss(self, taps, embedded, targets, head):
        """
        The mean cross-entropy for x_{t+2}: position t reads the embedding of x_{t+1} and predicts
        the target of t + 1. The last position has none, nor has one whose target is −1.
        taps (B, T, ·), embedded (B, T, d) and targets (B, T) of the same tokens.
        """
        T, group = targets.shape[1], self.attn.context_group
        e = next_ones(embedded, group)
        ahead = next_ones(targets + 1, group) - 1  # −1 past the end
        m = self(self.features(taps), e, counted=ahead != -1)
        mean = cross_entropy(self.norm(m), head.weight, ahead)
        if group:  # the last rank has a position less: a mean over ranks must be one over positions
            ranks, is_last = group.size(), group.rank() == group.size() - 1
            mean = mean * (T - is_last) / (T - 1 / ranks)
        return mean

    def num_active_params(self):
        """Those that one token meets: of the experts only the chosen ones."""
        moe, experts = self.mlp, (self.mlp.w13, self.mlp.w2)
        dense = sum(p.numel() for p in self.parameters()) - sum(w.numel() for w in experts)
        return dense + moe.E + moe.k * sum(w[0].numel() for w in experts)


def next_ones(x, group=None):
    """
    x (B, T, …) → the same moved on by one token, zeros past the end. With context parallelism the
    last one comes from the next rank.
    """
    if group:
        first = pass_on(x[:, :1], group, lambda rank, to: to == rank - 1).sum(0)
    else:
        first = torch.zeros_like(x[:, :1])
    return torch.cat([x[:, 1:], first], dim=1)


# ------------------------------------------------------------------------------------------------
# Decoding. A round: the draft proposes γ tokens d_i ~ q_i. The model reads its own last token and
# these in one call, which gives p_1 … p_{γ+1}. What is kept is distributed as in plain sampling.

@torch.no_grad()
def speculate(model, idx, max_new_tokens, gamma, probabilities, draft=None, images=None):
    """
    idx (B, T) → an iterator over new tokens, (B, 1) each. probabilities: logits (n, vocab) → what
    to draw from, (n, vocab): temperature, top-k and top-p act on model and draft alike. draft: a
    function of cache[-1], the texts (B lists of ids) and a count → d (B, count), q (B, count,
    vocab). Rows keep different numbers of drafts; one that is ahead waits with what it has.
    """
    (B, T), texts = idx.shape, idx.tolist()
    draft = draft or (lambda cache, texts, count: draft_tokens(model, probabilities, cache, count))
    cache = model.new_cache(B, draft=True)
    with evaluating(model):  # the prompt is read without drafts
        logits, _ = model(idx, cache=cache, last_only=True, images=images)
        own = torch.multinomial(probabilities(logits[:, -1]), 1)  # (B, 1)
        after = torch.cat([cache[-1]["embedded"][:, 1:], model.embed(own)], dim=1)
        cache[-1].update(after=after, kept=[T] * B)
    for layer_cache in cache[:-1]:
        if "state" in layer_cache:
            layer_cache["window"] = None  # from now on, KDA can take tokens back
    for text, token in zip(texts, own.tolist()):
        text += token
    for at in range(T, T + max_new_tokens):
        if min(map(len, texts)) == at:
            with evaluating(model):
                count = min(gamma, T + max_new_tokens - at - 1)
                one_round(model, cache, texts, count, probabilities, draft)
        yield idx.new_tensor([text[at:at + 1] for text in texts])


def one_round(model, cache, texts, count, probabilities, draft):
    """The texts grow by what is kept of `count` drafts, and by a token of the model's own each."""
    last = torch.tensor([text[-1:] for text in texts], device=model.embed.weight.device)  # (B, 1)
    d, q = draft(cache[-1], texts, count) if count else (last[:, :0], None)
    logits, _ = model(torch.cat([last, d], dim=1), cache=cache)  # (B, count + 1, vocab)
    p = probabilities(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
    if count and q.shape != p[:, 1:].shape:
        raise ValueError(f"the draft has a vocabulary of {q.shape[-1]} tokens, the model one of "
                         f"{p.shape[-1]}; a draft must have the model's")
    r, own = accept(d, p, q if count else p[:, :0])
    new = torch.cat([d, own], dim=1).scatter_(1, r.unsqueeze(1), own)  # r + 1 of a row count
    kept = (r + 1).tolist()
    keep(model, cache, kept, count + 1)
    cache[-1]["after"] = model.embed(new[:, :max(kept)])
    for text, tokens, length in zip(texts, new.tolist(), kept):
        text += tokens[:length]
    model.mtp.rounds += len(kept)
    model.mtp.kept += sum(kept)


def accept(d, p, q):
    """
    d (B, γ) drawn from q (B, γ, vocab), and the model's p (B, γ + 1, vocab) → r (B), how many
    drafts each row keeps, and the model's own token after them, (B, 1). d_i passes with probability
    min(1, p_i/q_i). The token after those comes from max(p − q, 0), scaled to sum 1, which is the
    part of p that passing drafts leave out; after the last draft from p itself.
    """
    of_d = lambda x: x.gather(-1, d.unsqueeze(-1)).squeeze(-1)  # (B, γ)
    passes = torch.rand(d.shape, device=d.device) * of_d(q) < of_d(p[:, :-1])
    r = passes.long().cumprod(1).sum(1)
    rows = torch.arange(len(d), device=d.device)
    p, q = p[rows, r], F.pad(q, (0, 0, 0, 1))[rows, r]  # (B, vocab)
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.any(-1, keepdim=True), rest, p)  # p = q to rounding
    return r, torch.multinomial(rest / rest.sum(-1, keepdim=True), 1)


def keep(model, cache, kept, window):
    """Take back the last call's tokens, `window` a row, but for the first kept[b] (§5.4.2)."""
    counts = torch.tensor(kept, device=model.embed.weight.device)
    for layer, own in zip(model.layers, cache):
        if "latents" in own:
            cut(own, window, kept)
        elif min(kept) < window:
            layer.attn.keep(own, counts)
    cache[-1].update(taps=cache[-1]["taps"][:, :max(kept)], kept=kept)


def cut(own, window, kept):
    """MLA's cache is cut by length alone: what comes next overwrites the rest."""
    same = min(kept) == max(kept)
    own["length"] = own["length"] - window + (kept[0] if same else torch.tensor(kept))


def draft_tokens(model, probabilities, cache, count):
    """
    The MTP layer as a draft. cache: its latents, and what is new since the last round: taps of n
    tokens, the embeddings of those after them, and how many of each row were kept.
    → d (B, count), q (B, count, vocab).
    """
    mtp, drafts, distributions = model.mtp, [], []
    m = mtp(mtp.features(cache["taps"]), cache["after"], cache)  # (B, n, d)
    cut(cache, m.shape[1], cache["kept"])
    last = torch.tensor(cache["kept"], device=m.device) - 1
    f = m[torch.arange(len(m), device=m.device), last].unsqueeze(1)  # (B, 1, d)
    for i in range(count):
        if i:  # its own output in the place of the model's
            f = mtp(f, model.embed(drafts[-1]), cache)
        distributions.append(probabilities(model.lm_head(mtp.norm(f))[:, 0]))  # (B, vocab)
        drafts.append(torch.multinomial(distributions[-1], 1))
    cache["length"] = cache["length"] - (count - 1)  # what came from its own outputs goes
    return torch.cat(drafts, dim=1), torch.stack(distributions, dim=1)


@contextlib.contextmanager
def evaluating(model):
    """In eval mode inside. Outside, between two tokens, the mode is the caller's."""
    was_training = model.training
    if was_training:  # to set it in every module takes as long as a layer
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


# ------------------------------------------------------------------------------------------------
# Fine-tuning the layer into a draft, as EAGLE-3 does (§4.1.4). The model is frozen. From every
# position t a chain of drafts is unrolled: step i reads E[x_{t+1+i}] and the m of step i − 1, and
# its q is compared with the model's p of the same token. A chain attends to the first steps of all
# positions up to its own, and to its own later ones, as in decoding.

class LK(torch.autograd.Function):
    """
    −log A with A = Σ min(p, q), the probability that a draft from q passes. logits (…, vocab), q
    being their softmax, and p (…, vocab) → (…). With S = {x: q(x) < p(x)}:

        ∂/∂logit_j = −(1/A) q_j (1[j ∈ S] − Σ_{x∈S} q_x)
    """

    @staticmethod
    def forward(ctx, logits, p):
        q = fp32(logits).softmax(-1)
        A = torch.minimum(p, q).sum(-1, keepdim=True)
        ctx.save_for_backward(q, q < p, A)
        return -A.log().squeeze(-1)

    @by_hand
    def backward(ctx, dloss):
        q, in_s, A = ctx.saved_tensors
        q_in_s = q * in_s
        return (q * q_in_s.sum(-1, keepdim=True) - q_in_s) / A * dloss.unsqueeze(-1), None


def unrolled(model, idx, loss=LK.apply, steps=7):
    """idx (B, T) → a list with the loss of every chain for each step, (B, T − steps)."""
    mtp, n = model.mtp, idx.shape[1] - steps
    with torch.no_grad():
        cache = model.new_cache(len(idx), draft=True)
        p = fp32(model(idx, cache=cache)[0]).softmax(-1)  # (B, T, vocab)
    f, latents, losses = mtp.features(cache[-1]["taps"])[:, :n], [], []
    attention = lambda x: attend_in_chains(mtp.attn, x, latents)
    for next_one in range(1, steps + 1):
        there = slice(next_one, next_one + n)
        f = mtp(f, cache[-1]["embedded"][:, there], attention=attention)  # (B, n, d)
        losses.append(loss(model.lm_head(mtp.norm(f)), p[:, there]))
    return losses


def attend_in_chains(attn, x, latents):
    """
    x (B, T, d): one step of the chains from T positions → (B, T, d). latents: a list with those of
    the earlier steps, (B, T, R + rope) each; this step's are added to it.
    """
    T, R = x.shape[1], attn.R
    q, c, k_shared, gate = attn.project(x)
    latents.append(torch.cat([c, k_shared], dim=-1))
    q, w_v = attn.absorb(q)
    first, *later = latents
    logits = [hide_future(torch.einsum("bthr,bsr->bhts", q, first), 0)]
    logits += [torch.einsum("bthr,btr->bht", q, y).unsqueeze(-1) for y in later]
    weights = fp32(torch.cat(logits, dim=-1)).softmax(-1).to(x.dtype)  # (B, H, T, T + later)
    o = torch.einsum("bhts,bsr->bthr", weights[..., :T], first[..., :R])
    for i, y in enumerate(later):
        o = o + torch.einsum("bht,btr->bthr", weights[..., T + i], y[..., :R])
    o = torch.einsum("bthr,hvr->bthv", o, w_v)
    return attn.o_proj(gate.sigmoid() * o.flatten(2))


def add_features(model):
    """W_E3, which starts as [0 0 I]: at first the draft sees h alone, as in pre-training."""
    d = model.config.n_embd
    if model.mtp.w_e3 is None:
        model.mtp.w_e3 = nn.Linear(3 * d, d, bias=False).to(model.embed.weight)
        with torch.no_grad():
            model.mtp.w_e3.weight.copy_(torch.eye(3 * d)[2 * d:])
        model.config = replace(model.config, mtp_features=True)


def fine_tune(model, batches, lr, loss=LK.apply, log=None):
    """
    batches: a list of functions without arguments → ids (B, T), one for each update. Only the layer
    and W_E3 learn. log: a function of the number of updates and of the loss of each step.
    """
    add_features(model)
    model.eval().requires_grad_(False)
    learning = list(model.mtp.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(learning, lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step, batch in enumerate(batches):
        warm, left = (step + 1) / (0.05 * len(batches)), 1 - step / len(batches)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, warm, left)
        losses = [x.mean() for x in unrolled(model, batch(), loss)]
        (sum(losses) / len(losses)).backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if log:
            log(step + 1, torch.stack(losses).tolist())


def main(arguments, checkpoint, train):
    """checkpoint, train: these modules, which stand above this one."""
    given, paths = cli.options(arguments, dict(steps=300, lr=1e-3, batch_size=4, context=128,
                                               seed=1, device="auto"))
    steps, batch_size, context = given["steps"], given["batch_size"], given["context"]
    if len(paths) != 1 or min(steps, batch_size) < 1 or context < 8 or not given["lr"] > 0:
        raise ValueError("expected: python mtp.py RUN [--steps=300] [--lr=1e-3] [--batch_size=4] "
                         "[--context=128], each at least 1, context at least 8")
    content = checkpoint.load_checkpoint(paths[0])
    if not content["config"].get("mtp_layers"):
        raise ValueError(f"{paths[0]}: no MTP layer to fine-tune (mtp_layers = 0); train a run "
                         "with --mtp_layers=1")
    device = cli.find_device(given["device"])
    model = checkpoint.load_model(paths[0])[0].to(device)
    data = train.Data(content["settings"]["data"])
    if content["data"] != data.identity:
        raise ValueError(f"data/{content['settings']['data']} is not what {paths[0]} was trained "
                         "on; prepare that again")

    def batch(step):
        key = given["seed"], step
        tokens = data.tokens("train")
        return train.get_batch(tokens, batch_size, context, key)[0].to(device)

    def log(step, losses):
        if step % 20 == 0 or step == steps:
            passing = " ".join(f"{math.exp(-loss):.3f}" for loss in losses)
            print(f"update {step:>5}/{steps}  loss {sum(losses) / len(losses):.4f}  a draft passes "
                  f"in step 1, 2, …: {passing}", flush=True)
    batches = [functools.partial(batch, step) for step in range(steps)]
    fine_tune(model, batches, given["lr"], log=log)
    state = {name: x.cpu() for name, x in model.state_dict().items()}
    path = Path(paths[0])
    path = (path if path.is_dir() else path.parent) / "ckpt_draft.pt"
    torch.save(content | dict(model=state, config=asdict(model.config), optimizer={}), path)
    print(f"wrote {path}; python sample.py --out_dir={path} --draft=3")


if __name__ == "__main__":
    # The command alone stands above train.py
    import checkpoint
    import train

    cli.run(lambda arguments: main(arguments, checkpoint, train), __doc__)
