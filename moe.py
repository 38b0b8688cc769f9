"""
Stable LatentMoE with SiTU-GLU and Quantile Balancing (report §2.3, App. C, D; arXiv 2601.18089).

Experts work in a latent space of ℓ < d numbers a token, so that many small ones are cheap to hold and to send to:

    s = sigmoid(W_r x), in fp32            E scores a token
    chosen = the k largest of s + b        b: the router bias. It chooses, and nothing else
    p = s[chosen] / Σ s[chosen] · routed_scaling_factor
    y = W↑ RMSNorm(Σ p · expert(W↓ x)) + shared(x)

Each expert, and the shared one, is a SiTU-GLU: W_d [ β₁ tanh(g/β₁) sigmoid(g) ⊙ β₂ tanh(u/β₂) ], g = W_g x, u = W_u x, a SwiGLU whose
two factors cannot exceed β₁ = 4 and β₂ = 25.

Quantile Balancing sets b outright, once per step, from the step's own tokens. A token takes an expert if s + b is above the token's
cutoff α, the (k+1)-th largest of its s + b; so expert j would need the bias r = α − s_j to be taken by it. The k/E quantile of r over the
tokens is the bias with which k/E of them take the expert: a perfect load. `quantile_bias` is that, by sorting; `QuantileHistogram` is the
same from counts in 1000 bins, which can be added up over micro-batches and ranks.

With the experts split over M processes (`share_experts`), rank r is home to experts r·E/M … (r+1)·E/M − 1, and tokens travel. What is sent for a
token and expert, there and back, is its latent of ℓ numbers, not d: in bf16 8·k·ℓ bytes a token, backward included. `LatentMoE.dispatch` says who
sends what to whom, `experts` does it. Nothing is dropped and nothing padded: a rank may get any number of rows, none included. Since loads differ
from rank to rank, `plan_redundant` (§5.2.1, App. E: MoonEP) can even them out exactly, by lending experts to ranks that have less to do.

K3's routed experts are released in MXFP4. A model that is to be kept so can be trained for it: with qat="mxfp4" every forward sees the
routed experts as MXFP4 would keep them (`mxfp4_parts`), and the gradient goes straight through to the weights.
"""
import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from ops import RMSNorm, exchange, fp32, kernels, linears, triton_takes


# ----------------------------------------------------------------------------------------------------------------------
# SiTU-GLU

def situ_definition(g, u, beta, linear_beta):
    """g, u (..., m) → (..., m), inside in fp32. beta None: no limit on the gate; linear_beta None: none on the up branch; both: SwiGLU."""
    g, u, dtype = fp32(g), fp32(u), g.dtype
    gate = g if beta is None else beta * torch.tanh(g / beta)
    up = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (gate * torch.sigmoid(g) * up).to(dtype)


class _SiTU(torch.autograd.Function):
    """The same in fewer passes, with its derivative by hand: a = tanh(g/β₁), s = sigmoid(g), c = tanh(u/β₂)."""

    @staticmethod
    def forward(ctx, g, u, beta, linear_beta):
        a = (fp32(g) / beta).tanh_()
        s = fp32(g).sigmoid()
        c = fp32(u) if linear_beta is None else (fp32(u) / linear_beta).tanh_()
        ctx.save_for_backward(a, s, c)
        ctx.limits = beta, linear_beta, g.dtype
        return (a * s).mul_(c).mul_(beta * (linear_beta or 1)).to(g.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        a, s, c = ctx.saved_tensors
        beta, linear_beta, dtype = ctx.limits
        aten = torch.ops.aten                                              # tanh_backward(y, t) = y (1 − t²), sigmoid_backward(y, s) = y s (1 − s)
        dy = dy.to(a.dtype)
        du = dy * c                                                        # at first the gradient of the gate's factor
        dg = du * s
        aten.tanh_backward(dg, a, grad_input=dg)                           # d(β tanh(g/β) s)/dg = (1 − a²) s + β a s (1 − s)
        dg.add_(aten.sigmoid_backward(du.mul_(a), s, grad_input=du), alpha=beta)
        torch.mul(dy, a, out=du).mul_(s).mul_(beta)
        if linear_beta is not None:
            aten.tanh_backward(du, c, grad_input=du)
            dg.mul_(linear_beta)
        return dg.to(dtype), du.to(dtype), None, None


def situ(g, u, beta, linear_beta):
    """The activation that is used: situ_definition's arguments and result."""
    if beta is None:                                                       # SiLU is torch's own
        return F.silu(g) * (u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta))
    apply = kernels.situ if triton_takes(g) else _SiTU.apply
    return apply(g, u, beta, linear_beta)


class SiTUGLU(nn.Module):
    """x (..., width) → (..., width), through `hidden` channels."""

    def __init__(self, width, hidden, beta=4.0, linear_beta=25.0):
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(situ(*linears(x, self.gate_proj, self.up_proj), self.beta, self.linear_beta))


# ----------------------------------------------------------------------------------------------------------------------
# Quantile Balancing

def choose(scores, bias, k):
    """
    The one function that picks experts, in training, evaluation and decoding. scores (m, E), bias (E) →
    chosen (m, k) int64, cutoff (m): the (k+1)-th largest biased score (−inf where k = E: then everything is chosen).
    """
    biased = scores + bias
    if k == scores.shape[-1]:
        return biased.topk(k).indices, biased.new_full(biased.shape[:-1], -math.inf)
    top = biased.topk(k + 1)
    return top.indices[..., :k], top.values[..., k]


def quantile_bias(scores, bias, k):
    """
    The definition, by sorting: scores (m, E), sigmoid outputs of the step's m tokens; bias (E), the one they were routed with →
    the new bias (E): the ceil(m k / E)-th smallest needed bias of each expert, less the mean of all.
    """
    m, E = scores.shape
    if k == E:
        return bias - bias.mean()
    _, cutoff = choose(scores, bias, k)
    needed = (cutoff.unsqueeze(-1) - scores).sort(dim=0).values            # (m, E)
    new = needed[math.ceil(m * k / E) - 1]
    return new - new.mean()


class QuantileHistogram(nn.Module):
    """
    Counts of needed biases, per expert, in uniform bins over [min b − 1, max b + 1]. A score lies in (0, 1) and a cutoff in
    (min b, max b + 1), so nothing falls outside. b does not move while counts are taken, so the range follows from b, which is saved.
    counts (E, bins) int32 is saved too: a checkpoint between two updates loses nothing.
    """

    def __init__(self, n_expert, bins=1000):
        super().__init__()
        self.register_buffer("counts", torch.zeros(n_expert, bins, dtype=torch.int32))

    @torch.no_grad()
    def observe(self, scores, cutoff, bias):
        """scores (m, E), cutoff (m), bias (E): add one count per token and expert."""
        E, bins = self.counts.shape
        low, high = bias.min() - 1, bias.max() + 1
        position = (cutoff.unsqueeze(-1) - scores - low) * (bins / (high - low))                    # (m, E), in bins
        index = position.long().clamp_(0, bins - 1)                        # (m, E)
        self.counts.scatter_add_(1, index.T, torch.ones_like(index.T, dtype=torch.int32))

    @torch.no_grad()
    def quantile_bias(self, bias, k):
        """bias (E) → the new bias (E), quantile_bias to within a bin. Without counts the bias stays."""
        E, bins = self.counts.shape
        m = self.counts[0].sum().item()
        if m == 0:
            return bias.clone()
        if k == E:
            return bias - bias.mean()
        q = m * k / E
        total = self.counts.cumsum(1)                                      # (E, bins), int64
        at = (total < math.ceil(q)).sum(1, keepdim=True)                   # the first bin that reaches ceil(q), (E, 1)
        inside = self.counts.gather(1, at)
        before = total.gather(1, at) - inside
        low, high = bias.min() - 1, bias.max() + 1
        new = low + (high - low) / bins * (at + (q - before) / inside).squeeze(1)
        return new - new.mean()


# ----------------------------------------------------------------------------------------------------------------------
# MXFP4, for routed experts: 4-bit numbers ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, and one power of two for each 32 inputs of a row

def mxfp4_parts(w):
    """
    w (..., n), n a multiple of 32 → x (..., n/32, 32) fp32, each on that grid, and e (..., n/32, 1) int32, with w ≈ x · 2^e.
    2^e is the smallest power of two with which the block's largest number is at most 6, so nothing is cut off; then every number
    goes to the nearest of the grid, halfway ones to the even code. Off by at most 2^e, which is at most a fifth of the largest.
    """
    blocks = w.detach().float().unflatten(-1, (-1, 32))
    m, e = torch.frexp(blocks.abs().amax(-1, keepdim=True))                # largest = m · 2^e, 0.5 ≤ m < 1, and 6 = 0.75 · 2^3
    e = (e - 3 + (m > 0.75)).clamp(-127, 125)                              # what a scale can say; 6 · 2^126 would pass fp32
    x = torch.ldexp(blocks, -e)
    step = 0.5 * (1 + (x.abs() >= 2) + 2 * (x.abs() >= 4))                 # the grid's: 0.5, from 2 on 1, from 4 on 2
    return (x / step).round() * step, e


class _MXFP4(torch.autograd.Function):
    """w as MXFP4 would keep it. Straight through: the gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx, w):
        x, e = mxfp4_parts(w)
        return torch.ldexp(x, e).flatten(-2).to(w.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy


# ----------------------------------------------------------------------------------------------------------------------
# Experts over ranks

def is_home(E, R):
    """→ (R, E) bool: whether rank r is home to expert e."""
    return torch.arange(E) // (E // R) == torch.arange(R).unsqueeze(1)


def at_home(counts, R):
    """counts (E) → (R, E) int64: the tokens of expert e that rank r computes, when every expert stays on its home rank."""
    return is_home(len(counts), R) * counts.long()


def plan_redundant(counts, R):
    """
    counts (E) int: tokens per expert, E a multiple of R → (R, E) int64: the tokens of expert e that rank r is to compute, so that every rank has
    the same number (to one, where R does not divide the total) and computes at most E/R experts that are not its own.

    One rank after another is filled up, each from a single rank that has too much: it takes that one's largest experts, whole but for the last.
    A rank that has given may be left with too little; then it is filled in its turn. Nobody is filled twice, so nobody borrows from two homes.
    """
    E = len(counts)
    if E % R:
        raise ValueError(f"plan_redundant: {E} experts cannot be split evenly over {R} ranks")
    plan = at_home(torch.as_tensor(counts).cpu(), R).tolist()
    total = sum(map(sum, plan))
    excess = [sum(row) - total // R - (r < total % R) for r, row in enumerate(plan)]
    while any(excess):
        low = min(range(R), key=excess.__getitem__)
        high = max(range(R), key=excess.__getitem__)                       # one giver is enough: it holds more than a full share
        for e in sorted(range(high * E // R, (high + 1) * E // R), key=lambda e: -plan[high][e]):
            moved = min(plan[high][e], -excess[low])
            plan[high][e] -= moved
            plan[low][e] += moved
            excess[high] -= moved
            excess[low] += moved
    return torch.tensor(plan)


# ----------------------------------------------------------------------------------------------------------------------
# The layer

class _Reorder(torch.autograd.Function):
    """Every row of x k times, in the order of a permutation. The gradient is again a gather, dy[inverse], where autograd would scatter."""

    @staticmethod
    def forward(ctx, x, order, inverse, k=1):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k if k > 1 else order)           # on a CPU a third of the time of x[order]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        dx = dy.index_select(0, ctx.saved_tensors[0])
        return dx.unflatten(0, (-1, ctx.k)).sum(1) if ctx.k > 1 else dx, None, None, None


def inverse_of(order):
    """The permutation that undoes order (n)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def grouped_mm(x, w, ends):
    """x (rows, a) sorted by expert, w (E, a, b), ends (E) int32: where each expert's rows end → (rows, b)."""
    return F.grouped_mm(x, w, offs=ends) if x.dtype == torch.bfloat16 else _eager_grouped_mm(x, w, offs=ends)


_eager_grouped_mm = torch.compiler.disable(F.grouped_mm)                   # torch.compile knows it in bf16 only


class LatentMoE(nn.Module):
    """x (B, T, d) → (B, T, d). counted: (B, T) bool or None for all, the tokens that count for balance (padding should not)."""

    def __init__(self, config):
        super().__init__()
        d, self.latent, m = config.n_embd, config.routed_expert_hidden_size, config.moe_intermediate_size
        latent = self.latent or d                                          # without a latent, W↓ and W↑ are left out
        self.E, self.k, self.scale = config.num_experts, config.num_experts_per_token, config.routed_scaling_factor
        self.beta, self.linear_beta, self.bias_ema = config.situ_beta, config.situ_linear_beta, config.router_bias_ema
        self.qat, self.balance = config.qat, config.balance
        self.group, self.balance_ranks = None, False                       # share_experts sets them
        self.router = nn.Linear(d, self.E, bias=False)
        self.register_buffer("router_bias", torch.zeros(self.E))
        self.histogram = QuantileHistogram(self.E)
        self.register_buffer("load", torch.zeros(self.E, dtype=torch.int64))                       # tokens since the last update
        self.down_proj = nn.Linear(d, latent, bias=False) if self.latent else None                 # W↓
        self.w13 = nn.Parameter(torch.empty(self.E, 2, m, latent))         # gate and up of every expert
        self.w2 = nn.Parameter(torch.empty(self.E, latent, m))             # down of every expert
        self.norm = RMSNorm(latent, config.rms_norm_eps) if config.latent_norm else None
        self.up_proj = nn.Linear(latent, d, bias=False) if self.latent else None                   # W↑
        self.shared = SiTUGLU(d, config.num_shared_experts * m, self.beta, self.linear_beta)

    def _apply(self, fn, recurse=True):
        """A cast (.bfloat16(), .to(dtype)) must not round the router bias: it moves with the model and stays in fp32."""
        def keep(x):
            y = fn(x)
            return x.to(y.device) if x is self.router_bias and y.dtype != x.dtype else y
        return super()._apply(keep, recurse)

    def route(self, x, counted=None):
        """x (m, d) → chosen (m, k), p (m, k) in fp32. In training it also takes the counts for the next router bias."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(fp32(x), fp32(self.router.weight)).sigmoid()                          # (m, E)
        chosen, cutoff = choose(scores.detach(), self.router_bias, self.k)
        # evaluation, sampling and a forward that is only recomputed inside a backward must not move the bias
        if self.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.observe(scores.detach(), chosen, cutoff, counted)
        p = scores.gather(1, chosen)                                       # the score itself, never the biased one
        if self.k > 1:
            p = p / (p.sum(-1, keepdim=True) + 1e-20)
        return chosen, p * self.scale

    def observe(self, scores, chosen, cutoff, counted):
        if counted is not None:
            scores, chosen, cutoff = scores[counted], chosen[counted], cutoff[counted]
        self.load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        if self.k < self.E and self.balance == "quantile":
            self.histogram.observe(scores, cutoff, self.router_bias)

    def experts(self, z, chosen, p):
        """z (m, ℓ), chosen, p (m, k) → Σ p · expert(z), (m, ℓ). Tokens sorted by expert, then one grouped product per matrix."""
        (m, latent), k = z.shape, self.k
        by_expert, order = chosen.flatten().sort(stable=True)              # (m·k): expert and slot of each row
        w13, w2 = (_MXFP4.apply(w) if self.qat else w for w in (self.w13, self.w2))
        w13, w2 = w13.to(z.dtype).flatten(1, 2), w2.to(z.dtype)            # (E, 2m, ℓ), (E, ℓ, m)
        if self.group is None:
            ends = torch.searchsorted(by_expert, torch.arange(self.E, device=z.device), right=True).int()   # where each expert's rows end
        else:
            way = self.dispatch(by_expert)
            order = order[way.by_rank]
        inverse = inverse_of(order)
        rows = _Reorder.apply(z, order, inverse, k)                        # (m·k, ℓ), by expert
        if self.group is None:
            out = self.products(rows, w13, w2, ends)                       # (m·k, ℓ)
        else:                                                              # the same, with a journey before and after
            rows = exchange(rows, way.send, way.receive, self.group)       # (n, ℓ), by source rank, then by expert
            if self.balance_ranks:                                         # experts that are lent come after our own
                w13, w2 = (torch.cat([w, exchange(w[way.lend], way.lend_send, way.lend_receive, self.group)]) for w in (w13, w2))
            rows = _Reorder.apply(rows, way.by_slot, way.by_slot_back)     # (n, ℓ), by expert
            out = self.products(rows, w13, w2, way.ends)
            out = _Reorder.apply(out, way.by_slot_back, way.by_slot)
            out = exchange(out, way.receive, way.send, self.group)         # (m·k, ℓ)
        out = _Reorder.apply(out, inverse, order).view(m, k, latent)
        return (out * p.unsqueeze(-1).to(out.dtype)).sum(1)

    def products(self, rows, w13, w2, ends):
        """rows (n, ℓ) sorted by expert, w13 (experts, 2m, ℓ), w2 (experts, ℓ, m), ends (experts): where each one's rows end → (n, ℓ)."""
        g, u = grouped_mm(rows, w13.mT, ends).chunk(2, dim=-1)             # (n, hidden) each
        return grouped_mm(situ(g, u, self.beta, self.linear_beta), w2.mT, ends)

    @torch.compiler.disable
    @torch.no_grad()
    def dispatch(self, by_expert):
        """
        by_expert (rows): the expert of each of this rank's rows, ascending → who computes them, all that `experts` needs to know of it.
        One all-gather of E counts; from these every rank derives the whole plan.
        """
        M, me, device = self.group.size(), self.group.rank(), by_expert.device
        own = self.E // M
        counts = torch.bincount(by_expert, minlength=self.E)               # (E)
        all_counts = torch.empty(M, self.E, dtype=torch.int64, device=device)
        dist.all_gather(list(all_counts), counts, group=self.group)
        counts = all_counts.cpu()                                          # (source, E)
        plan = (plan_redundant if self.balance_ranks else at_home)(counts.sum(0), M)               # (worker, E)
        # all rows of an expert stand in one line, rank 0's first; its workers take from the head of the line, in order
        came, taken = counts.cumsum(0).unsqueeze(1), plan.cumsum(0)        # where each one's part of the line ends
        flow = (torch.minimum(came, taken) - torch.maximum(came - counts.unsqueeze(1), taken - plan)).clamp(min=0)     # (source, worker, E)
        worker = torch.arange(M).repeat(self.E).repeat_interleave(flow[me].T.flatten())            # (rows): of our own rows
        here = torch.arange(me * own, (me + 1) * own)
        borrows = (plan > 0) & ~is_home(self.E, M)                         # (worker, E)
        lent = borrows.view(M, M, own).sum(-1)                             # (worker, home): how many experts
        here = torch.cat([here, borrows[me].nonzero().squeeze(1)])         # the experts that are computed on this rank
        slot = torch.full((self.E,), -1).scatter_(0, here, torch.arange(len(here)))
        by_slot = slot.repeat(M).repeat_interleave(flow[:, me].flatten()).argsort(stable=True)     # (n): of the rows that come
        return SimpleNamespace(
            by_rank=worker.argsort(stable=True).to(device), send=flow[me].sum(1).tolist(), receive=flow[:, me].sum(1).tolist(),
            by_slot=by_slot.to(device), by_slot_back=inverse_of(by_slot).to(device), ends=plan[me, here].cumsum(0).int().to(device),
            lend=(borrows[:, me * own:(me + 1) * own].nonzero()[:, 1]).to(device), lend_send=lent[:, me].tolist(), lend_receive=lent[me].tolist())

    def share_experts(self, group, balance_ranks=False):
        """Keep only the experts that are at home on this rank of the process group, before there is an optimizer."""
        for name in ("w13", "w2"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().chunk(group.size())[group.rank()].clone()))
        self.group, self.balance_ranks = group, balance_ranks

    def forward(self, x, counted=None):
        flat = x.flatten(0, -2)                                            # (m, d)
        chosen, p = self.route(flat, None if counted is None else counted.flatten())
        y = self.experts(self.down_proj(flat) if self.latent else flat, chosen, p)                 # (m, ℓ)
        y = self.norm(y) if self.norm else y
        return (self.up_proj(y) if self.latent else y).view(x.shape) + self.shared(x)

    @torch.no_grad()
    def update_router_bias(self):
        """Once per optimizer step: the new bias from the step's tokens. → load (E), the tokens each expert got in this step."""
        load = self.load.clone()
        if self.balance == "quantile":
            new = self.histogram.quantile_bias(self.router_bias, self.k)
            self.router_bias.lerp_(new, 1 - self.bias_ema)
        elif self.balance == "sign":                                       # DeepSeek-V3's: too few tokens, a little up; too many, a little down
            self.router_bias += 1e-3 * torch.sign(load.float().mean() - load)
        self.histogram.counts.zero_()
        self.load.zero_()
        return load


def load_figures(load):
    """load (E): tokens per expert → max violation (max load / mean load − 1) and the number of experts that got none."""
    mean = load.float().mean().item()
    return (load.max().item() / mean - 1 if mean else 0.0), int((load == 0).sum())
