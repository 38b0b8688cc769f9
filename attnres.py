"""
Attention Residuals: a layer reads a learned mixture over depth (report §2.2; arXiv 2603.15031).

A plain transformer adds every layer's output to one sum. Here outputs are summed only within a
block of a few layers, and each layer part (attention or MLP) reads a softmax mixture of all
finished block sums and of the running one. With sources x_1 … x_S, one vector per token each (x_1
is the token embedding), a learned pseudo-query w, and an RMSNorm with weight n:

    logit_s = RMSNorm(x_s; n) · w        no 1/√d
    p       = softmax over s             in fp32
    h       = Σ_s p_s x_s                the raw x_s, not the normed ones

w starts at zero, so every mixture starts as a plain mean. "Full" AttnRes is the same with one block
per layer part.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ops import RMSNorm, by_hand, fp32, kernels, triton_takes


def mix_definition(sources, u, eps=1e-5):
    """
    sources: list of (B, T, d); u (d) = n ⊙ w → (B, T, d). RMSNorm(x; n) · w = (x · u) / rms(x), so
    n and w enter only as u.
    """
    x = fp32(torch.stack(sources))  # (S, B, T, d)
    logits = F.rms_norm(x, x.shape[-1:], eps=eps) @ fp32(u)  # (S, B, T)
    p = logits.softmax(0)
    return torch.einsum("sbt,sbtd->btd", p, x).to(sources[0].dtype)


class _Mix(torch.autograd.Function):
    """
    The same without a copy of the sources in one tensor. Each source lives anyway (all later
    mixtures share a finished block), so a mixture keeps three numbers per token and source for
    backward, never sources × layers × d.
    """

    @staticmethod
    def forward(ctx, u, eps, *sources):
        lengths = [torch.linalg.vector_norm(fp32(x), dim=-1) for x in sources]
        products = [fp32(x) @ fp32(u) for x in sources]
        one_over_rms = torch.rsqrt(torch.stack(lengths).square_() / u.shape[0] + eps)
        logits = torch.stack(products) * one_over_rms  # (S, B, T)
        p = logits.softmax(0)
        out = sources[0] * p[0].unsqueeze(-1)  # (B, T, d), fp32
        for x, weight in zip(sources[1:], p[1:]):
            out.addcmul_(x, weight.unsqueeze(-1))
        ctx.save_for_backward(u, one_over_rms, logits, p, *sources)
        return out.to(sources[0].dtype)

    @by_hand
    def backward(ctx, dout):
        u, one_over_rms, logits, p, *sources = ctx.saved_tensors
        dout, d = fp32(dout), u.shape[0]
        dp = torch.stack([(dout * x).sum(-1) for x in sources])  # (S, B, T)
        dlogits = p * (dp - (p * dp).sum(0))
        # dx = p dout + along_u u + along_x x, the last through the length of x
        along_u = dlogits * one_over_rms  # (S, B, T)
        along_x = -along_u * logits * one_over_rms / d
        du, dsources = torch.zeros_like(fp32(u)), []
        for s, source in enumerate(sources):
            x = fp32(source)  # (B, T, d)
            du += along_u[s].flatten() @ x.flatten(0, -2)
            dx = dout * p[s].unsqueeze(-1)
            dx.addcmul_(along_u[s].unsqueeze(-1), fp32(u))
            dx.addcmul_(x, along_x[s].unsqueeze(-1))
            dsources.append(dx.to(source.dtype))
        return du.to(u.dtype), None, *dsources


class Mix(nn.Module):
    """One mixture: a list of (B, T, d) → (B, T, d). w is the pseudo-query, the norm the keys'."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.w = nn.Parameter(torch.zeros(width))

    def forward(self, sources, norm=None):
        """norm: an RMSNorm that takes the mixture, with the eps of the keys' norm."""
        if triton_takes(sources[0]):
            scale = None if norm is None else norm.weight
            return kernels.mix(self.w, self.norm.eps, *sources, keys=self.norm.weight, scale=scale)
        with torch.autocast(self.w.device.type, enabled=False):
            h = _Mix.apply(self.w * self.norm.weight, self.norm.eps, *sources)
        return h if norm is None else norm(h)


class Stream:
    """
    The finished block sums and the running one. Where another model writes x = x + f(norm(x)), here
    it is stream.add(f(stream.read(mix, norm))). No source counts twice: closing a block moves the
    running sum to the list, and the next block starts empty.
    """

    def __init__(self, embedding):
        self.blocks, self.running = [], embedding  # (B, T, d) each

    def read(self, mix, norm=None):
        if self.blocks:
            sources = [*self.blocks, self.running]
            return mix(sources, norm) if norm else mix(sources)
        # the first attention has nothing to mix yet
        return norm(self.running) if norm else self.running

    def close_block(self):
        self.blocks, self.running = [*self.blocks, self.running], None

    def add(self, x):
        self.running = x if self.running is None else self.running + x

    def checkpoint(self, layer, *arguments):
        """
        layer(stream, None, *arguments), of which only the input is kept: its backward runs it again
        first. (Not by torch's reentrant form, whose first run has no gradients to tell it from an
        evaluation.)
        """
        def run(running, *blocks):
            stream = Stream(running)
            stream.blocks = [*blocks]
            layer(stream, None, *arguments)
            return stream.running, *stream.blocks
        self.running, *self.blocks = checkpoint(run, self.running, *self.blocks,
                                                use_reentrant=False, preserve_rng_state=False)
