"""
MXFP4, in which the released experts are kept: numbers of 4 bits, ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, and
one power of two per 32 inputs of a row (OCP Microscaling Formats 1.0). Here is the rounding; the
bytes are in weights.py. With qat="mxfp4" every forward sees the routed experts as MXFP4 would keep
them, and trains for that.
"""
import torch


def mxfp4_parts(w):
    """
    w (…, n), n a multiple of 32 → x (…, n/32, 32) fp32 on that grid, exponent (…, n/32, 1) int32:
    w ≈ x · 2^exponent. The power is the smallest with which the block's largest number is at most
    6, so nothing is cut off. Each number goes to the nearest of the grid, halfway to the even code.
    Off by at most 2^exponent, at most a fifth of the block's largest.
    """
    blocks = w.detach().float().unflatten(-1, (-1, 32))
    # largest = mantissa · 2^exponent with mantissa in [0.5, 1), and 6 = 0.75 · 2^3
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    exponent = exponent - 3 + (mantissa > 0.75)
    exponent = exponent.clamp(-127, 125)  # a scale's own range; 6 · 2^126 would overflow fp32
    x = torch.ldexp(blocks, -exponent)
    step = 0.5 * (1 + (x.abs() >= 2) + 2 * (x.abs() >= 4))  # of the grid: 0.5, from 2 1, from 4 2
    return (x / step).round() * step, exponent


class _MXFP4(torch.autograd.Function):
    """w as MXFP4 would keep it. The gradient passes straight through, as if nothing was rounded."""

    @staticmethod
    def forward(ctx, w):
        x, exponent = mxfp4_parts(w)
        return torch.ldexp(x, exponent).flatten(-2).to(w.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy
