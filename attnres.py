"""
Attention Residuals: what a layer reads is a learned mixture over depth (report §2.2; arXiv 2603.15031).

A plain transformer adds every layer's output into one sum. Here the outputs are summed only within a block of a few layers; each layer
part (attention or MLP) reads a softmax mixture of all finished block sums and of the running one. With sources x_1 … x_S, each one
vector per token (x_1 is the token embedding), a learned pseudo-query w and an RMSNorm with weight n:

    logit_s = RMSNorm(x_s; n) · w        no 1/√d
    p       = softmax over s             in fp32
    h       = Σ_s p_s x_s                the raw x_s, not the normed ones

w starts at zero, so every mixture starts as a plain mean. "Full" AttnRes is the same with one block per layer part.

This file is the bottom of the house: triton_takes, fp32, linears, exchange, RMSNorm and the import of the kernels (used by the other files), the mixture,
the stream of blocks.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

kernels = None
if torch.cuda.is_available():                                              # NVIDIA's or AMD's; elsewhere the import would cost two seconds
    try:
        import kernels                                                     # Triton's, where it is installed
    except ImportError:
        pass


def triton_takes(x):
    """Whether a fused kernel does the element-wise work on x: on a GPU, but not in fp64, and not under torch.compile, which fuses by itself."""
    return kernels and x.is_cuda and x.dtype != torch.float64 and not torch.compiler.is_compiling()


def fp32(x):
    """x in at least fp32: what must not be rounded to bf16 goes through here. fp64 stays, so that tests can see every digit."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Linears(torch.autograd.Function):
    """Linear maps of one x. Their gradients of x are summed inside the products; autograd would add them up in passes of their own."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w) for w in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        dys, rows = [dy.flatten(0, -2) for dy in dys], x.flatten(0, -2).to(dys[0].dtype)           # (B·T, ·): under autocast a dy is in bf16
        dx = dys[0] @ weights[0].to(rows.dtype)
        for dy, w in zip(dys[1:], weights[1:]):
            dx.addmm_(dy, w.to(rows.dtype))
        return dx.view(x.shape).to(x.dtype), *((dy.mT @ rows).to(w.dtype) for dy, w in zip(dys, weights))


def linears(x, *maps):
    """maps: nn.Linear without bias, all of x (..., width) → what each gives."""
    return _Linears.apply(x, *(m.weight for m in maps))


class _Exchange(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.way_back = receive, send, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return _Exchange.apply(dout, *ctx.way_back), None, None, None


@torch.compiler.disable
def exchange(x, send, receive, group):
    """
    Between the ranks of a process group: x (rows, …), the first send[0] rows for rank 0, the next send[1] for rank 1, … → what came,
    (sum(receive), …), from rank 0 first. Gradients go back to where the rows came from. Every rank of the group has to call it, and has to
    go backward through it: also one that sends nothing or gets nothing.
    """
    return _Exchange.apply(x, send, receive, group)


# ----------------------------------------------------------------------------------------------------------------------
# RMSNorm: y = x / sqrt(mean x² + eps) · weight, the mean in fp32

class _RMSNorm(torch.autograd.Function):
    """F.rms_norm by hand: on a CPU torch runs it as ten separate passes; this takes a third of the time."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        r = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1] + eps)   # (..., 1)
        ctx.save_for_backward(x, r, weight)
        return (x * r).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, r, weight = ctx.saved_tensors
        dx = dy * x                                                        # at first dy ⊙ x, for two sums
        dweight = r.flatten() @ dx.flatten(0, -2)
        along = (dx @ weight).unsqueeze(-1) * r.square() / x.shape[-1]     # the part of dx that points along x, (..., 1)
        torch.mul(dy, weight, out=dx).addcmul_(x, along, value=-1).mul_(r)
        return dx, dweight, None


class RMSNorm(nn.Module):
    """x (..., width) → same shape and dtype."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        if x.device.type == "cpu" and x.dtype == self.weight.dtype == fp32(x).dtype and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


# ----------------------------------------------------------------------------------------------------------------------
# The mixture: definition, then the form that is used

def mix_definition(sources, u, eps=1e-5):
    """sources: list of (B, T, d); u = n ⊙ w, (d). → (B, T, d). RMSNorm(x; n)·w = (x·u) / rms(x), so n and w meet only as u."""
    x = fp32(torch.stack(sources))                                         # (S, B, T, d)
    logits = F.rms_norm(x, x.shape[-1:], eps=eps) @ fp32(u)                # (S, B, T)
    p = logits.softmax(0)
    return torch.einsum("sbt,sbtd->btd", p, x).to(sources[0].dtype)


class _Mix(torch.autograd.Function):
    """
    The same without ever copying the sources into one tensor. A source is a tensor that lives anyway (a finished block is shared by
    all later mixtures), so what a mixture keeps for backward is three numbers per token and source, and never sources × layers × d.
    """

    @staticmethod
    def forward(ctx, u, eps, *sources):
        lengths, products = zip(*((torch.linalg.vector_norm(x, dim=-1), x @ fp32(u)) for x in map(fp32, sources)))
        rms = torch.rsqrt(torch.stack(lengths).square_() / u.shape[0] + eps)                       # (S, B, T), one over the root mean square
        logits = torch.stack(products) * rms
        p = logits.softmax(0)
        out = sources[0] * p[0].unsqueeze(-1)                              # (B, T, d), fp32
        for x, weight in zip(sources[1:], p[1:]):
            out.addcmul_(x, weight.unsqueeze(-1))
        ctx.save_for_backward(u, rms, logits, p, *sources)
        return out.to(sources[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        u, rms, logits, p, *sources = ctx.saved_tensors
        dout, d = fp32(dout), u.shape[0]
        dp = torch.stack([(dout * x).sum(-1) for x in sources])            # (S, B, T)
        dlogit = p * (dp - (p * dp).sum(0))
        along_u = dlogit * rms                                             # the part of dx along u
        along_x = -along_u * logits * rms / d                              # and along x, through its length
        du = torch.zeros_like(fp32(u))
        dsources = []
        for s, x in enumerate(sources):
            x = fp32(x)
            du += along_u[s].flatten() @ x.flatten(0, -2)                  # (d)
            dx = dout * p[s].unsqueeze(-1)
            dx.addcmul_(along_u[s].unsqueeze(-1), fp32(u)).addcmul_(x, along_x[s].unsqueeze(-1))
            dsources.append(dx.to(sources[s].dtype))
        return du.to(u.dtype), None, *dsources


class Mix(nn.Module):
    """One mixture: sources, a list of (B, T, d) → (B, T, d). w (d) is the pseudo-query, norm.weight (d) belongs to the keys."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.w = nn.Parameter(torch.zeros(width))

    def forward(self, sources):
        with torch.autocast(self.w.device.type, enabled=False):
            mix = kernels.mix if triton_takes(sources[0]) else _Mix.apply
            return mix(self.w * self.norm.weight, self.norm.eps, *sources)


# ----------------------------------------------------------------------------------------------------------------------
# The stream: the list of finished block sums, and the running one

class Stream:
    """
    Takes the place of `x`: where another model writes x = x + f(norm(x)), here it is stream.add(f(norm(stream.read(mix)))).
    Each source appears exactly once: a block is closed (its sum joins the list) and the next one starts without the old sum.
    """

    def __init__(self, embedding):
        self.blocks, self.running = [], embedding                          # each (B, T, d); the embedding becomes the first block

    def read(self, mix):
        return mix([*self.blocks, self.running]) if self.blocks else self.running

    def close_block(self):
        self.blocks, self.running = [*self.blocks, self.running], None     # a new list: a finished block is never written again

    def add(self, x):
        self.running = x if self.running is None else self.running + x
