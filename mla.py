"""
Gated MLA: multi-head latent attention without positions, with an output gate (report §2.1.2).

One latent c and one key slice k_shared, common to all heads, are all that is kept of a token. W_kvb
reads the keys and values of every head out of c.

    q = W_qb RMSNorm(W_qa x)                      per head: nope + rope
    [c, k_shared] = W_kva x;  c ← RMSNorm(c)      R + rope numbers, R = kv_lora_rank: the cache
    [k_nope, v] = W_kvb c                         per head: nope + V
    k = [k_nope, k_shared]                        nothing is rotated: "rope" is only a name
    y = W_o [sigmoid(W_g x) ⊙ softmax(q kᵀ / √(nope + rope), causal) v]

`expanded` is these lines. `absorbed` is the same for cached tokens, without expanding them.
"""
import functools
import operator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from dispatch import pass_on
from ops import RMSNorm, fp32, linears


class GatedMLA(nn.Module):
    """x (B, T, d) → (B, T, d). cache: a dict from new_cache, updated in place."""

    def __init__(self, config):
        super().__init__()
        d, self.H, self.V = config.n_embd, config.n_head, config.v_head_dim
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.R = config.kv_lora_rank
        self.q_a_proj = nn.Linear(d, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.H * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, self.R + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.R, 1e-6)
        self.kv_b_proj = nn.Linear(self.R, self.H * (self.nope + self.V), bias=False)
        self.g_proj = nn.Linear(d, self.H * self.V, bias=False)
        self.o_proj = nn.Linear(self.H * self.V, d, bias=False)
        # the largest logit of each head in this step, for QK-Clip
        self.register_buffer("max_logit", torch.full((self.H,), -torch.inf), persistent=False)
        # whether max_logit is exact in this step: False: a bound, True: yes, None: where it matters
        # (largest_logit). On a GPU a step's maxima are exact if the step before passed 100
        self.exact = None
        self.context_group = None  # the ranks that hold a sequence together (K3.share_context)

    def forward(self, x, cache=None):
        q, c, k_shared, gate = self.project(x)
        if self.context_group:  # each rank's latents go to itself and to all later ones
            latents = torch.cat([c, k_shared], dim=-1)
            parts = pass_on(latents, self.context_group, operator.le)  # (rank + 1, B, T, ·)
            c, k_shared = torch.cat(parts.unbind(0), dim=1).split([self.R, self.rope], dim=-1)
        past = cache["length"] if cache else 0
        latents = append(cache, torch.cat([c, k_shared], dim=-1)) if cache else None
        if isinstance(past, int) and not past:
            o = self.expanded(q, c, k_shared)  # (B, T, H, V)
        else:
            o = self.absorbed(q, latents, past)
        return self.o_proj(gate.sigmoid() * o.flatten(2))

    def project(self, x):
        """x (B, T, d) → q (B, T, H, nope + rope), c (B, T, R), k_shared (B, T, rope), the gate."""
        q, c, gate = linears(x, self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj)
        q = self.q_b_proj(self.q_a_layernorm(q)).unflatten(-1, (self.H, self.nope + self.rope))
        c, k_shared = c.split([self.R, self.rope], dim=-1)
        return q, self.kv_a_layernorm(c), k_shared, gate

    def expanded(self, q, c, k_shared):
        """
        The definition, for a sequence from its start. q (B, T, H, nope + rope), c (B, S, R),
        k_shared (B, S, rope): q's T tokens are the last of S → (B, T, H, V).
        """
        (B, T, H, _), S = q.shape, c.shape[1]
        kv = self.kv_b_proj(c).view(B, S, H, self.nope + self.V)
        k_nope, v = kv.split([self.nope, self.V], dim=-1)
        k = torch.cat([k_nope, k_shared.unsqueeze(2).expand(B, S, H, self.rope)], dim=-1)
        if self.training and torch.is_grad_enabled():
            if self.exact is None and q.is_cuda:
                self.exact = False
            largest = largest_logit(q.detach(), k.detach(), exact=self.exact)
            self.max_logit.copy_(torch.maximum(self.max_logit, largest))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, H, T|S, ·)
        # is_causal starts the diagonal at the first key; with S > T it must end at the last
        mask = dict(attn_mask=causal_lower_right(T, S)) if S > T else dict(is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, **mask).transpose(1, 2)

    def absorbed(self, q, latents, past):
        """
        The same with c and k_shared together in latents (B, S, R + rope), as the cache holds them.
        past: how many there were before q's tokens, an int or (B,) where rows differ.
        W_kvb moves over to the query and to the output: q · (W_k c) = (W_kᵀ q) · c. So a cached
        token costs R + rope products per head and is never expanded.
        """
        q, w_v = self.absorb(q)
        o = []
        if not isinstance(past, int):
            past = past.to(q.device).view(-1, 1, 1, 1)
        for rows in q.split(rows_at_once(q, latents.shape[1]), dim=1):
            logits = fp32(torch.einsum("bthr,bsr->bhts", rows, latents))
            p = hide_future(logits, past).softmax(-1).to(q.dtype)
            o.append(torch.einsum("bhts,bsr->bthr", p, latents[..., :self.R]))
            past = past + rows.shape[1]
        return torch.einsum("bthr,hvr->bthv", torch.cat(o, dim=1), w_v)

    def absorb(self, q):
        """q → the scaled query that meets latents, (B, T, H, R + rope), and W_v (H, V, R)."""
        w = self.kv_b_proj.weight.to(q.dtype).view(self.H, self.nope + self.V, self.R)
        w_k, w_v = w.split([self.nope, self.V], dim=1)
        q_latent = torch.einsum("bthn,hnr->bthr", q[..., :self.nope], w_k)
        q = torch.cat([q_latent, q[..., self.nope:]], dim=-1)
        return q * (self.nope + self.rope) ** -0.5, w_v

    def new_cache(self, batch_size):
        empty = self.o_proj.weight.new_zeros(batch_size, 0, self.R + self.rope)
        return dict(latents=empty, length=0)


def append(cache, new):
    """
    In place → all latents so far, (B, S, R + rope). A full buffer doubles, so a token costs no copy
    of all earlier ones. cache["length"]: an int, or (B,) on the CPU where rows differ.
    """
    old, past, T = cache["latents"], cache["length"], new.shape[1]
    length = int(max(past) if torch.is_tensor(past) else past) + T
    if length > old.shape[1]:
        room = max(length, 2 * old.shape[1])
        cache["latents"] = F.pad(old.to(new.dtype), (0, 0, 0, room - old.shape[1]))
    if torch.is_tensor(past):
        at = (past.unsqueeze(1) + torch.arange(T)).to(new.device)  # (B, T)
        rows = torch.arange(len(at), device=new.device).unsqueeze(1)
        cache["latents"][rows, at] = new.detach()
    else:
        cache["latents"][:, past:length] = new.detach()
    cache["length"] = past + T
    return cache["latents"][:, :length]


def join(caches):
    """Caches of texts of different lengths → one with all their rows, and a length for each."""
    room = max(cache["latents"].shape[1] for cache in caches)
    parts, lengths = [cache["latents"] for cache in caches], [cache["length"] for cache in caches]
    lengths = [torch.as_tensor(n).expand(len(own)) for n, own in zip(lengths, parts)]
    parts = [F.pad(own, (0, 0, 0, room - own.shape[1])) for own in parts]
    return dict(latents=torch.cat(parts), length=torch.cat(lengths))


def rows_at_once(q, S, most=2 ** 28):
    """How many of q's T rows (B, T, H, ·) may meet S keys, for logits of at most 2^28 bytes."""
    B, T, H, _ = q.shape
    return max(1, min(T, most // (4 * B * H * S)))


def hide_future(logits, past):
    """
    In place: logits (…, rows, S), the first row being token `past`, an int or (B, 1, 1, 1) → −inf
    for later tokens.
    """
    rows, S = logits.shape[-2:]
    if isinstance(past, int) and past + 1 >= S:
        return logits
    arange = functools.partial(torch.arange, device=logits.device)
    return logits.masked_fill_(arange(S) > past + arange(rows).unsqueeze(1), -torch.inf)


@torch.no_grad()
def largest_logit(q, k, tau=100.0, exact=None):
    """
    q (B, T, H, D), k (B, S, H, D), q's tokens the last of k's → (H): the largest causal logit of
    each head, or a bound, |q||k|. exact None: where no bound exceeds tau, nothing will be clipped
    and the exact maximum does not matter: then the bounds. To know that, a CPU waits for a GPU;
    with True or False it does not.
    """
    scale = q.shape[-1] ** -0.5
    bound = q.norm(dim=-1).amax((0, 1)) * k.norm(dim=-1).amax((0, 1)) * scale  # (H)
    if exact is None:
        exact = bound.max() > tau
    if not exact:
        return bound
    largest, past = torch.full_like(bound, -torch.inf), k.shape[1] - q.shape[1]
    for rows in q.split(rows_at_once(q, k.shape[1]), dim=1):
        end = past + rows.shape[1]
        logits = torch.einsum("bthd,bshd->bhts", rows, k[:, :end]).float() * scale
        largest = torch.maximum(largest, hide_future(logits, past).amax((0, 2, 3)))
        past = end
    return largest
