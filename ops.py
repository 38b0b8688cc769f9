"""
What the parts share: fp32, linear maps of one x, RMSNorm, exchange between ranks, and whether Triton takes a tensor.
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
