"""
What the parts share: whether a Triton kernel takes a tensor, what stays in fp32, backward passes by
hand, RMSNorm, and linear maps of one x.
"""
import contextlib
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

kernels = None
if torch.cuda.is_available():  # NVIDIA's or AMD's; elsewhere the import costs two seconds
    try:
        import kernels
    except ImportError:  # no Triton here
        pass


def triton_takes(x):
    """
    Whether a fused kernel does the element-wise work on x: on a GPU, not in fp64, and not under
    torch.compile, which fuses by itself.
    """
    fits = x.is_cuda and x.dtype != torch.float64
    return kernels is not None and fits and not torch.compiler.is_compiling()


def fp32(x):
    """x in at least fp32: for what bf16 must not round. fp64 stays, so tests see every digit."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def low_precision(x):
    """The dtype that autocast gives to products of x; without autocast its own."""
    device = x.device.type
    wide = x.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if wide else x.dtype


def by_hand(backward):
    """
    Makes a function the backward of an autograd Function: static, differentiable once, and free of
    autocast, even where loss.backward() is called inside it.
    """
    @torch.autograd.function.once_differentiable
    @functools.wraps(backward)
    def wrapped(ctx, *grads):
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)
    return staticmethod(wrapped)


casts = None  # {id of a weight: it and its copy in low precision}, within casting_once


@contextlib.contextmanager
def casting_once(device):
    """
    Within this, weights do not change, and are cast to low precision once, for all micro-batches:
    autocast keeps its casts until the outermost autocast ends, and `cast` keeps those of weights
    that do not go through a module.
    """
    global casts
    casts = {}
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        casts = None


def cast(weight, dtype):
    """A weight in dtype, its gradient in its own dtype."""
    return weight if weight.dtype == dtype else _Cast.apply(weight, dtype)


class _Cast(torch.autograd.Function):

    @staticmethod
    def forward(ctx, weight, dtype):
        ctx.dtype = weight.dtype
        if casts is None or not weight.is_leaf:
            return weight.to(dtype)
        if id(weight) not in casts:
            casts[id(weight)] = weight, weight.to(dtype)
        return casts[id(weight)][1].detach()  # every use has a place of its own in the graph

    @by_hand
    def backward(ctx, dweight):
        return dweight.to(ctx.dtype), None


def keep_dtype(fn, *tensors):
    """
    For a module's _apply, whose fn casts or moves a tensor (.bfloat16(), .to(…)): → the same, but
    these tensors and their gradients are only moved.
    """
    kept = {id(x) for p in tensors for x in (p, p.grad)}

    def apply(x):
        y = fn(x)
        return x.to(y.device) if id(x) in kept and y.dtype != x.dtype else y
    return apply


# ------------------------------------------------------------------------------------------------
# RMSNorm: y = x / sqrt(mean x² + eps) · weight, the mean in fp32

class RMSNorm(nn.Module):
    """x (…, width) → same shape and dtype."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        if triton_takes(x):
            return kernels.norm(x, self.weight, self.eps)
        plain_fp32 = x.dtype == self.weight.dtype == fp32(x).dtype
        if x.device.type == "cpu" and plain_fp32 and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class _RMSNorm(torch.autograd.Function):
    """F.rms_norm by hand. On a CPU torch makes ten passes of it; this takes a third of the time."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1]
        r = torch.rsqrt(mean_square + eps)  # (…, 1)
        ctx.save_for_backward(x, r, weight)
        return (x * r).mul_(weight)

    @by_hand
    def backward(ctx, dy):
        x, r, weight = ctx.saved_tensors
        product = dy * x
        dweight = r.flatten() @ product.flatten(0, -2)
        along = (product @ weight).unsqueeze(-1) * r.square() / x.shape[-1]  # dx along x
        dx = torch.mul(dy, weight, out=product).addcmul_(x, along, value=-1).mul_(r)
        return dx, dweight, None


# ------------------------------------------------------------------------------------------------
# Linear maps of one x

def linears(x, *maps):
    """x (…, width), maps: nn.Linear without bias → a tuple, what each map gives."""
    dtype = low_precision(x)
    with torch.autocast(x.device.type, enabled=False):
        return _Linears.apply(x.to(dtype), *(cast(m.weight, dtype) for m in maps))


class _Linears(torch.autograd.Function):
    """The maps' gradients of x are summed inside the products, not in passes of their own."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w) for w in weights)

    @by_hand
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        dys = [dy.flatten(0, -2) for dy in dys]  # (B·T, ·)
        dx = dys[0] @ weights[0]
        for dy, w in zip(dys[1:], weights[1:]):
            dx.addmm_(dy, w)
        rows = x.flatten(0, -2)
        return dx.view(x.shape), *(dy.mT @ rows for dy in dys)


# ------------------------------------------------------------------------------------------------
# The head and its loss in one

def cross_entropy(x, weight, targets):
    """
    The mean cross-entropy of a linear map without all of its logits at once: x (…, d), weight
    (vocab, d), targets (…) int64, of which −1 is ignored → a scalar in fp32, 0 if all are ignored.
    It is F.cross_entropy(x @ weight.T, targets, ignore_index=-1).
    """
    if not torch.is_grad_enabled():
        nats = F.cross_entropy(fp32(F.linear(x, weight)).flatten(0, -2), targets.flatten(),
                               ignore_index=-1, reduction="sum")
        return nats / (targets != -1).sum().clamp(min=1)
    dtype = low_precision(x)
    with torch.autocast(x.device.type, enabled=False):
        x, targets = x.to(dtype).flatten(0, -2), targets.flatten()
        return _CrossEntropy.apply(x, cast(weight, dtype), targets)


class _CrossEntropy(torch.autograd.Function):
    """
    The gradients are made in the forward pass, where the logits are; a piece of rows at a time.
    With p the softmax of a row but for its target, where it is −rest, rest being the sum of all
    others, dlogits = p, and a bf16 p keeps its digits even where the target's own is near 1.
    """

    @staticmethod
    def forward(ctx, x, weight, targets):
        d = x.shape[1]
        counted = (targets != -1).unsqueeze(1)  # (n, 1)
        count, targets = counted.sum().clamp(min=1), targets.clamp(min=0).unsqueeze(1)
        wide = F.pad(weight, (0, 8), value=1)  # a product with ones gives sums, too
        loss, dx, dw = 0, torch.empty_like(x), torch.zeros_like(weight)
        at_once = (2 ** 29 if x.is_cuda else 2 ** 24) // weight.shape[0] // x.itemsize
        for rows, drows, target, taken in zip(*(y.split(max(1, at_once))
                                                for y in (x, dx, targets, counted))):
            logits = rows @ weight.mT  # (rows, vocab)
            p, logit = logits.softmax(-1), logits.gather(1, target)
            p_target = fp32(p.gather(1, target))
            sums = p.scatter_(1, target, 0) @ wide  # (rows, d + 8)
            rest = sums[:, d:d + 1]
            # of p_target and 1 − rest, the one with more digits; where p_target is 0 in fp32, Σ p
            # logits takes the place of logsumexp, which is more by p's entropy
            mean = (sums[:, :d] * rows).sum(1, keepdim=True)
            nats = torch.where(p_target > 1e-37, -p_target.log(), fp32(mean - logit))
            nats = torch.where(rest < 0.5, -torch.log1p(-fp32(rest)), nats)
            loss = loss + nats.where(taken, 0).sum()
            torch.mul(sums[:, :d] - rest * weight[target[:, 0]], taken, out=drows)
            dw.addmm_(p.scatter_(1, target, -rest).mT, rows * taken)
        ctx.save_for_backward(dx, dw, count)
        return loss / count

    @by_hand
    def backward(ctx, dloss):
        dx, dw, count = ctx.saved_tensors
        return dx * (dloss / count).to(dx.dtype), dw * (dloss / count).to(dx.dtype), None
