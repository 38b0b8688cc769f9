"""
Gated MLA: softmax attention over compressed latents, without positions (report §2.1.2).
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from ops import RMSNorm, exchange, fp32, linears


class GatedMLA(nn.Module):
    """
    Multi-head latent attention without positions, with an output gate (§2.1.2). What is kept of a token is one latent c and one key
    slice k_shared for all heads; keys and values of a head are read out of c by W_kvb.

        q = W_qb RMSNorm(W_qa x)                      per head: nope + rope
        [c, k_shared] = W_kva x;  c ← RMSNorm(c)      kv_lora_rank + rope numbers: this is what the cache holds
        [k_nope, v] = W_kvb c                         per head: nope + V
        k = [k_nope, k_shared]                        "rope" is only a name here
        y = W_o [sigmoid(W_g x) ⊙ softmax(q kᵀ / √(nope + rope), causal) v]

    x (B, T, d) → (B, T, d). cache: a dict from new_cache, updated in place.
    """

    def __init__(self, config):
        super().__init__()
        d, self.H = config.n_embd, config.n_head
        self.nope, self.rope, self.V, self.R = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
        self.q_a_proj = nn.Linear(d, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.H * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, self.R + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.R, 1e-6)
        self.kv_b_proj = nn.Linear(self.R, self.H * (self.nope + self.V), bias=False)
        self.g_proj = nn.Linear(d, self.H * self.V, bias=False)
        self.o_proj = nn.Linear(self.H * self.V, d, bias=False)
        self.register_buffer("max_logit", torch.full((self.H,), -torch.inf), persistent=False)      # of the step, for QK-Clip
        self.context_group = None                  # of the ranks that hold one sequence between them; train.py sets it

    def new_cache(self, batch_size):
        return dict(latents=self.o_proj.weight.new_zeros(batch_size, 0, self.R + self.rope), length=0)

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        q, c, z = linears(x, self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj)
        q = self.q_b_proj(self.q_a_layernorm(q)).view(B, T, self.H, self.nope + self.rope)
        c, k_shared = c.split([self.R, self.rope], dim=-1)
        c = self.kv_a_layernorm(c)                                         # (B, T, R)
        if self.context_group:
            c, k_shared = self.latents_before(torch.cat([c, k_shared], dim=-1)).split([self.R, self.rope], dim=-1)     # (B, S, ·), S ≥ T
        past = cache["length"] if cache else 0
        if cache:
            self.append(cache, torch.cat([c, k_shared], dim=-1))
        o = self.absorbed(q, cache["latents"][:, :past + T]) if past else self.expanded(q, c, k_shared)
        return self.o_proj(z.sigmoid() * o.flatten(2))

    def latents_before(self, latents):
        """Context parallelism: latents (B, T, R + rope) go to this rank and all later ones → those from the start of the sequence on, (B, S, R + rope)."""
        rank, C = self.context_group.rank(), self.context_group.size()
        receive, send = [int(r <= rank) for r in range(C)], [int(r >= rank) for r in range(C)]
        got = exchange(latents.expand(sum(send), *latents.shape), send, receive, self.context_group)        # (rank + 1, B, T, ·)
        return torch.cat(got.unbind(0), dim=1)

    def expanded(self, q, c, k_shared):
        """The definition, for a sequence from its start: keys and values of every head. q's T tokens are the last of c's S. → (B, T, H, V)."""
        (B, T, H, _), S = q.shape, c.shape[1]
        k, v = self.kv_b_proj(c).view(B, S, H, self.nope + self.V).split([self.nope, self.V], dim=-1)
        k = torch.cat([k, k_shared.unsqueeze(2).expand(B, S, H, self.rope)], dim=-1)
        if self.training and torch.is_grad_enabled():
            largest = largest_logit(q.detach(), k.detach())
            self.max_logit.copy_(torch.maximum(self.max_logit, largest))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))                   # (B, H, T or S, ·)
        if S > T:                                                          # the diagonal ends at the last key, where is_causal starts it at the first
            return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(T, S)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def absorbed(self, q, latents):
        """
        The same against cached latents (B, S, R + rope), of which q's T tokens are the last. W_kvb moves over to the query and to the
        output, q·(W_k c) = (W_kᵀ q)·c, so a cached token costs R + rope products a head and is never expanded. → (B, T, H, V).
        """
        T, S = q.shape[1], latents.shape[1]
        w_k, w_v = self.kv_b_proj.weight.to(q.dtype).view(self.H, self.nope + self.V, self.R).split([self.nope, self.V], dim=1)
        q_latent = torch.einsum("bthn,hnr->bthr", q[..., :self.nope], w_k)
        q = torch.cat([q_latent, q[..., self.nope:]], dim=-1) * (self.nope + self.rope) ** -0.5     # (B, T, H, R + rope)
        o = []
        for start in range(0, T, 256):                                     # so that (T, S) logits never exist at once
            logits = fp32(torch.einsum("bthr,bsr->bhts", q[:, start:start + 256], latents))
            if T > 1:
                future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(S - T + start + 1)
                logits = logits.masked_fill(future, -torch.inf)
            o.append(torch.einsum("bhts,bsr->bthr", logits.softmax(-1).to(q.dtype), latents[..., :self.R]))
        return torch.einsum("bthr,hvr->bthv", torch.cat(o, dim=1), w_v)

    @staticmethod
    def append(cache, new):
        """Latents live in a buffer that doubles when it is full, so a token costs no copy of all the earlier ones."""
        length = cache["length"] + new.shape[1]
        if length > cache["latents"].shape[1]:
            grown = new.new_empty(new.shape[0], max(length, 2 * cache["latents"].shape[1]), new.shape[2])
            grown[:, :cache["length"]] = cache["latents"][:, :cache["length"]]
            cache["latents"] = grown
        cache["latents"][:, cache["length"]:length] = new.detach()
        cache["length"] = length


@torch.no_grad()
def largest_logit(q, k, tau=100.0):
    """
    q (B, T, H, D), k (B, S, H, D), q's tokens being the last of k's → (H): the largest causal logit of each head. |q||k| bounds it; where no
    bound exceeds tau nothing will be clipped, the exact maximum does not matter, and the bounds are returned.
    """
    scale = q.shape[-1] ** -0.5
    bound = q.norm(dim=-1).amax((0, 1)) * k.norm(dim=-1).amax((0, 1)) * scale
    if bound.max() <= tau:
        return bound
    T, past = q.shape[1], k.shape[1] - q.shape[1]
    largest = torch.full_like(bound, -torch.inf)
    for start in range(0, T, 256):                                         # so that (T, S) logits never exist at once
        logits = torch.einsum("bthd,bshd->bhts", q[:, start:start + 256], k[:, :past + start + 256]).float() * scale
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(past + start + 1)
        largest = torch.maximum(largest, logits.masked_fill(future, -torch.inf).amax((0, 2, 3)))
    return largest
