"""
Stable LatentMoE with SiTU-GLU and Quantile Balancing (report §2.3, App. C, D; arXiv 2601.18089).

Experts work in a latent of ℓ < d numbers per token, so that many small ones are cheap to hold and
to send tokens to:

    s = sigmoid(W_r x), in fp32            E scores per token
    chosen = the k largest of s + b        b, the router bias, chooses and does nothing else
    p = s[chosen] / Σ s[chosen] · routed_scaling_factor
    y = W↑ RMSNorm(Σ p · expert(W↓ x)) + shared(x)

Each expert, and the shared one, is a SiTU-GLU: a SwiGLU whose two factors cannot exceed β₁ = 4 and
β₂ = 25.

    W_d [β₁ tanh(g/β₁) sigmoid(g) ⊙ β₂ tanh(u/β₂)],    g = W_g x,  u = W_u x

Quantile Balancing sets b outright, once per step, from the step's own tokens. A token takes an
expert whose s + b is above the token's cutoff α, the (k+1)-th largest of its s + b. To be taken,
expert j needs the bias α − s_j. The k/E quantile of that over the tokens is the bias with which k/E
of them take the expert: a perfect load.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from dispatch import at_home, dispatch, exchange, is_home, plan_redundant  # noqa: F401
from mxfp4 import _MXFP4, mxfp4_parts, mxfp8  # noqa: F401
from ops import RMSNorm, by_hand, cast, fp32, keep_dtype, kernels, linears, triton_takes


def moe_definition(layer, x):
    """The layer, token by token and expert by expert: x (m, d), in the layer's dtype → (m, d)."""
    def glu(x, w_gate, w_up, w_down):
        return w_down @ situ_definition(w_gate @ x, w_up @ x, layer.beta, layer.linear_beta)

    out, shared = [], layer.shared
    for token in x:
        s = torch.sigmoid(layer.router.weight @ token)  # (E)
        chosen = (s + layer.router_bias).topk(layer.k).indices
        p = s[chosen] / (s[chosen].sum() + 1e-20) if layer.k > 1 else s[chosen]
        z = layer.down_proj.weight @ token if layer.latent else token  # (ℓ)
        y = sum(p[i] * layer.scale * glu(z, *layer.w13[e], layer.w2[e])
                for i, e in enumerate(chosen))
        if layer.norm:
            y = F.rms_norm(y, y.shape, layer.norm.weight, layer.norm.eps)
        y = layer.up_proj.weight @ y if layer.latent else y  # (d)
        weights = shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight
        out.append(y + glu(token, *weights))
    return torch.stack(out)


# ------------------------------------------------------------------------------------------------
# SiTU-GLU

def situ_definition(g, u, beta, linear_beta):
    """
    g, u (…, hidden) → the same, inside in fp32. beta None: no limit on the gate; linear_beta None:
    none on the up branch; both None: SwiGLU.
    """
    g, u, dtype = fp32(g), fp32(u), g.dtype
    gate = g if beta is None else beta * torch.tanh(g / beta)
    up = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (gate * torch.sigmoid(g) * up).to(dtype)


def situ(g, u, beta, linear_beta):
    """The activation that is used: situ_definition's arguments and result."""
    if beta is None:  # for study: SiLU is torch's own
        up = fp32(u) if linear_beta is None else linear_beta * torch.tanh(fp32(u) / linear_beta)
        return (F.silu(fp32(g)) * up).to(g.dtype)
    apply = kernels.situ if triton_takes(g) else _SiTU.apply
    return apply(g, u, beta, linear_beta)


class _SiTU(torch.autograd.Function):
    """The same in fewer passes, its derivative by hand."""

    @staticmethod
    def forward(ctx, g, u, beta, linear_beta):
        tanh_g = (fp32(g) / beta).tanh_()
        sigmoid_g = fp32(g).sigmoid()
        up = fp32(u) if linear_beta is None else (fp32(u) / linear_beta).tanh_()
        ctx.save_for_backward(tanh_g, sigmoid_g, up)
        ctx.limits = beta, linear_beta, g.dtype
        return (tanh_g * sigmoid_g).mul_(up).mul_(beta * (linear_beta or 1)).to(g.dtype)

    @by_hand
    def backward(ctx, dy):
        # aten's tanh_backward(y, t) = y (1 − t²), its sigmoid_backward(y, s) = y s (1 − s)
        tanh_g, sigmoid_g, up = ctx.saved_tensors
        beta, linear_beta, dtype = ctx.limits
        aten = torch.ops.aten
        dy = dy.to(tanh_g.dtype)
        dgate = dy * up
        # d(β tanh(g/β) sigmoid(g))/dg = (1 − tanh²) sigmoid + β tanh sigmoid (1 − sigmoid)
        dg = dgate * sigmoid_g
        aten.tanh_backward(dg, tanh_g, grad_input=dg)
        through_sigmoid = dgate.mul_(tanh_g)
        aten.sigmoid_backward(through_sigmoid, sigmoid_g, grad_input=through_sigmoid)
        dg.add_(through_sigmoid, alpha=beta)
        du = torch.mul(dy, tanh_g, out=through_sigmoid).mul_(sigmoid_g).mul_(beta)
        if linear_beta is not None:
            aten.tanh_backward(du, up, grad_input=du)
            dg.mul_(linear_beta)
        return dg.to(dtype), du.to(dtype), None, None


class SiTUGLU(nn.Module):
    """x (…, width) → (…, width), through `hidden` channels."""

    def __init__(self, width, hidden, beta=4.0, linear_beta=25.0):
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        g, u = linears(x, self.gate_proj, self.up_proj)  # (…, hidden) each
        return self.down_proj(situ(g, u, self.beta, self.linear_beta))


# ------------------------------------------------------------------------------------------------
# Quantile Balancing: by sorting, then by counting in bins

def choose(scores, bias, k):
    """
    The one function that picks experts, in training, evaluation and decoding: scores (m, E), bias
    (E) → chosen (m, k) int64 and cutoff (m), the (k+1)-th largest biased score. Where k = E all are
    chosen, and the cutoff is −inf.
    """
    biased = scores + bias
    if k == scores.shape[-1]:
        return biased.topk(k).indices, biased.new_full(biased.shape[:-1], -math.inf)
    top = biased.topk(k + 1)
    return top.indices[..., :k], top.values[..., k]


def quantile_bias(scores, bias, k):
    """
    The definition: scores (m, E) of the step's m tokens, bias (E) that routed them → the new bias
    (E), for each expert the ceil(m k / E)-th smallest needed bias, less the mean over experts.
    """
    m, E = scores.shape
    if k == E:
        return bias - bias.mean()
    _, cutoff = choose(scores, bias, k)
    needed = (cutoff.unsqueeze(-1) - scores).sort(dim=0).values  # (m, E)
    new = needed[math.ceil(m * k / E) - 1]
    return new - new.mean()


class QuantileHistogram(nn.Module):
    """
    Needed biases, counted per expert in uniform bins over [min b − 1, max b + 1]: such counts add
    up over micro-batches and ranks. A score lies in (0, 1) and a cutoff in (min b, max b + 1), so
    nothing falls outside. b does not move while counts are taken and is saved, so the range is
    known. counts (E, bins) int32 is saved, too: a checkpoint between two updates loses nothing.
    """

    def __init__(self, n_expert, bins=1000):
        super().__init__()
        self.register_buffer("counts", torch.zeros(n_expert, bins, dtype=torch.int32))

    @torch.no_grad()
    def observe(self, scores, cutoff, bias, counted=None):
        """
        scores (m, E), cutoff (m), bias (E): one count more per token and expert. counted (m) bool:
        only these tokens.
        """
        E, bins = self.counts.shape
        low, high = bias.min() - 1, bias.max() + 1
        position = (cutoff.unsqueeze(-1) - scores - low) * (bins / (high - low))  # (m, E)
        index = position.long().clamp_(0, bins - 1).T  # (E, m)
        self.counts.scatter_add_(1, index, ones(index, counted, torch.int32))

    def quantile_bias(self, bias, k):
        """bias (E) → the new bias (E), to within a bin. Without counts the bias stays."""
        return bias_of_counts(self.counts, bias, k)


def ones(like, counted, dtype):
    """like (…, m), counted (m) bool: where not to write zeros instead; None: nowhere."""
    row = like.new_ones((), dtype=dtype) if counted is None else counted.to(dtype)
    return row.expand(like.shape)


@torch.no_grad()
def bias_of_counts(counts, bias, k):
    """counts (…, E, bins) of a QuantileHistogram, bias (…, E) → the new bias (…, E)."""
    E, bins = counts.shape[-2:]
    total = counts.cumsum(-1, dtype=torch.int32)
    m = total[..., -1:].long()  # (…, E, 1), the same for every expert
    if k == E:
        new = bias
    else:
        # (…, E, 1): the bin that reaches ceil(q), q = m k / E
        reached = (total < (m * k + E - 1) // E).sum(-1, keepdim=True)
        inside = counts.gather(-1, reached)
        before = total.gather(-1, reached) - inside
        low = bias.amin(-1, keepdim=True) - 1
        width = (bias.amax(-1, keepdim=True) + 1 - low) / bins
        new = low + width * (reached + (m * k - E * before) / (E * inside)).squeeze(-1)
    return torch.where(m.squeeze(-1) > 0, new - new.mean(-1, keepdim=True), bias)


@torch.no_grad()
def update_router_biases(layers):
    """Once per optimizer step, all layers at once → load (layers, E): this step's tokens."""
    first, load = layers[0], torch.stack([layer.load for layer in layers])
    bias = torch.stack([layer.router_bias for layer in layers])  # (layers, E)
    if first.balance == "quantile":
        counts = torch.stack([layer.histogram.counts for layer in layers])
        bias.lerp_(bias_of_counts(counts, bias, first.k), 1 - first.bias_ema)
    elif first.balance == "sign":  # DeepSeek-V3's rule: a small step towards the mean load
        bias += 1e-3 * torch.sign(load.float().mean(-1, keepdim=True) - load)
    torch._foreach_copy_([layer.router_bias for layer in layers], [*bias])
    torch._foreach_zero_([x for layer in layers for x in (layer.load, layer.histogram.counts)])
    return load


def load_figures(load):
    """load (E): tokens per expert → max load / mean load − 1, and how many experts got none."""
    mean = load.float().mean().item()
    return (load.max().item() / mean - 1 if mean else 0.0), int((load == 0).sum())


# ------------------------------------------------------------------------------------------------
# The layer: moe_definition, with the tokens sorted by expert and one grouped product per matrix

class LatentMoE(nn.Module):
    """x (B, T, d) → the same. counted: which tokens count for balance, (B, T) bool; None: all."""

    def __init__(self, config):
        super().__init__()
        d, hidden = config.n_embd, config.moe_intermediate_size
        self.latent = config.routed_expert_hidden_size  # 0: no latent, no W↓ and no W↑
        width = self.latent or d
        self.E, self.k = config.num_experts, config.num_experts_per_token
        self.scale, self.qat = config.routed_scaling_factor, config.qat
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.balance, self.bias_ema = config.balance, config.router_bias_ema
        self.group, self.balance_ranks = None, False  # share_experts sets them
        self.router = nn.Linear(d, self.E, bias=False)
        self.register_buffer("router_bias", torch.zeros(self.E))
        self.histogram = QuantileHistogram(self.E)
        self.register_buffer("load", torch.zeros(self.E, dtype=torch.int64))  # since the update
        self.down_proj = nn.Linear(d, width, bias=False) if self.latent else None  # W↓
        self.w13 = nn.Parameter(torch.empty(self.E, 2, hidden, width))  # gate and up of all experts
        self.w2 = nn.Parameter(torch.empty(self.E, width, hidden))  # down of all experts
        self.norm = RMSNorm(width, config.rms_norm_eps) if config.latent_norm else None
        self.up_proj = nn.Linear(width, d, bias=False) if self.latent else None  # W↑
        self.shared = SiTUGLU(d, config.num_shared_experts * hidden, self.beta, self.linear_beta)

    def forward(self, x, counted=None):
        flat = x.flatten(0, -2)  # (m, d)
        chosen, p = self.route(flat, None if counted is None else counted.flatten())
        y = self.experts(self.down_proj(flat) if self.latent else flat, chosen, p)  # (m, ℓ)
        y = self.norm(y) if self.norm else y
        y = self.up_proj(y) if self.latent else y  # (m, d)
        return y.view(x.shape) + self.shared(x)

    def route(self, x, counted=None):
        """x (m, d) → chosen (m, k), p (m, k) in fp32. In training it counts for the next bias."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(fp32(x), fp32(self.router.weight)).sigmoid()  # (m, E)
        chosen, cutoff = choose(scores.detach(), self.router_bias, self.k)
        p = scores.gather(1, chosen)  # the score itself, never the biased one
        # Each token of training counts once; evaluation and sampling do not. A reentrant checkpoint
        # runs its first forward without gradients and a second one inside backward. The second
        # counts, by a hook that fires only if its p gets a gradient: a forward that is recomputed
        # only to be thrown away gets none.
        if self.training and torch.is_grad_enabled():
            def count(*_):
                self.observe(scores.detach(), chosen, cutoff, counted)
            if torch._C._current_graph_task_id() == -1:  # not inside a backward
                count()
            elif p.requires_grad:
                p.register_hook(count)
        if self.k > 1:
            p = p / (p.sum(-1, keepdim=True) + 1e-20)
        return chosen, p if self.scale == 1 else p * self.scale

    def observe(self, scores, chosen, cutoff, counted):
        by_choice = chosen.T  # (k, m)
        index, weight = by_choice.flatten(), ones(by_choice, counted, torch.int64).flatten()
        self.load.scatter_add_(0, index, weight)
        if self.k < self.E and self.balance == "quantile":
            self.histogram.observe(scores, cutoff, self.router_bias, counted)

    def update_router_bias(self):
        """Once per optimizer step: the new bias → load (E), the tokens per expert in this step."""
        return update_router_biases([self])[0]

    def experts(self, z, chosen, p):
        """z (m, ℓ), chosen, p (m, k) → Σ p · expert(z), (m, ℓ)."""
        (m, width), k = z.shape, self.k
        # a row per token and choice, (m·k); order: where in chosen.flatten() it was
        by_expert, order = chosen.flatten().sort(stable=True)
        w13, w2 = (_MXFP4.apply(w) if self.qat else w for w in (self.w13, self.w2))
        z = mxfp8(z) if self.qat else z
        w13 = cast(w13, z.dtype).flatten(1, 2)  # (E, 2·hidden, ℓ)
        w2 = cast(w2, z.dtype)  # (E, ℓ, hidden)
        if self.group:
            way = dispatch(by_expert, self.E, self.group, self.balance_ranks)
            order = order[way.by_worker]
        inverse = inverse_of(order)
        rows = _Reorder.apply(z, order, inverse, k)  # (m·k, ℓ)
        if self.group:
            out = self.products_over_ranks(rows, w13, w2, way)
        else:
            experts = torch.arange(self.E, device=z.device)
            ends = torch.searchsorted(by_expert, experts, right=True).int()
            out = self.products(rows, w13, w2, ends)
        out = _Reorder.apply(out, inverse, order).view(m, k, width)
        return (out * p.unsqueeze(-1).to(out.dtype)).sum(1)

    def products(self, rows, w13, w2, ends):
        """rows (n, ℓ) sorted by expert, ends (experts): where each expert's rows end → (n, ℓ)."""
        g, u = grouped_mm(rows, w13.mT, ends).chunk(2, dim=-1)  # (n, hidden) each
        hidden = situ(g, u, self.beta, self.linear_beta)
        return grouped_mm(mxfp8(hidden) if self.qat else hidden, w2.mT, ends)

    def products_over_ranks(self, rows, w13, w2, way):
        """The same rows, w13 and w2 of this rank, computed where `way` (dispatch) says."""
        group = self.group
        rows = exchange(rows, way.send, way.receive, group)  # (n, ℓ), by source, then by expert
        if self.balance_ranks:  # borrowed experts come after our own
            counts = way.lend_counts, way.borrow_counts
            w13, w2 = (torch.cat([w, exchange(w[way.lend], *counts, group)]) for w in (w13, w2))
        inverse = inverse_of(way.by_slot)
        rows = _Reorder.apply(rows, way.by_slot, inverse)  # (n, ℓ), by expert
        out = _Reorder.apply(self.products(rows, w13, w2, way.ends), inverse, way.by_slot)
        return exchange(out, way.receive, way.send, group)

    def share_experts(self, group, balance_ranks=False):
        """Keep only this rank's experts. Before an optimizer is made."""
        for name in ("w13", "w2"):
            own = getattr(self, name).detach().chunk(group.size())[group.rank()].clone()
            setattr(self, name, nn.Parameter(own))
        self.group, self.balance_ranks = group, balance_ranks

    def _apply(self, fn, recurse=True):
        return super()._apply(keep_dtype(fn, self.router_bias), recurse)


def grouped_mm(x, w, ends):
    """x (n, a) sorted by expert, w (E, a, b), ends (E) int32, where its rows end → (n, b)."""
    product = F.grouped_mm if x.dtype == torch.bfloat16 else _eager_grouped_mm
    return product(x, w, offs=ends)


_eager_grouped_mm = torch.compiler.disable(F.grouped_mm)  # torch.compile knows it in bf16 only


class _Reorder(torch.autograd.Function):
    """
    Each row of x k times, in the order of a permutation. The gradient is a gather again,
    dy[inverse], where autograd would scatter.
    """

    @staticmethod
    def forward(ctx, x, order, inverse, k=1):
        ctx.save_for_backward(inverse)
        ctx.k = k
        # on a CPU, index_select takes a third of the time of x[order]
        return x.index_select(0, order // k if k > 1 else order)

    @by_hand
    def backward(ctx, dy):
        (inverse,) = ctx.saved_tensors
        dx = dy.index_select(0, inverse)
        return dx.unflatten(0, (-1, ctx.k)).sum(1) if ctx.k > 1 else dx, None, None, None


def inverse_of(order):
    """The permutation that undoes order (n)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
