"""
MXFP4, in which the released experts are kept: numbers of 4 bits, ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, and
one power of two per 32 inputs of a row (OCP Microscaling Formats 1.0). With qat="mxfp4" every
forward sees the routed experts as MXFP4 would keep them, and trains for that. What enters their
matrices it sees in MXFP8 (report §4.1.4): the same with numbers of 8 bits, E4M3, up to ±448.
"""
import functools

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


def mxfp8_parts(rows):
    """
    rows (…, n), n a multiple of 32 → x (…, n/32, 32) fp32 of E4M3, exponent (…, n/32, 1) int32, as
    above: the smallest power with which no number is above 448. E4M3 has 3 bits after the leading
    one, from 2^−6 on; below, steps of 2^−9.
    """
    blocks = rows.detach().float().unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))      # 448 = 0.875 · 2^9
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(-127, 118)
    x = torch.ldexp(blocks, -exponent)
    step = torch.exp2((torch.frexp(x)[1] - 4).clamp(min=-9).float())           # of the grid at x
    return (x / step).round() * step, exponent


class _MXFP4(torch.autograd.Function):
    """w as MXFP4 would keep it. The gradient passes straight through, as if nothing was rounded."""

    @staticmethod
    def forward(ctx, w, parts=mxfp4_parts):
        x, exponent = parts(w)
        return torch.ldexp(x, exponent).flatten(-2).to(w.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def mxfp8(rows):
    """rows (…, n) as MXFP8 would keep them."""
    return _MXFP4.apply(rows, mxfp8_parts)


# ------------------------------------------------------------------------------------------------
# The bytes of released files

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# What a byte holds, its low nibble first: (256, 2)
PAIRS = torch.stack([GRID.repeat(16), GRID.repeat_interleave(16)], dim=1)
CODES = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)   # of 2|x|


@functools.cache
def mxfp4_words(dtype):
    """
    Every byte with every scale, its two numbers as one word: (65536), at 256 · scale + byte.
    Exact in fp32 and in bf16.
    """
    scales = torch.exp2(torch.arange(256.0) - 127)                             # (256)
    numbers = PAIRS * scales.view(256, 1, 1)                                   # (256, 256, 2)
    word = {torch.float32: torch.int64, torch.bfloat16: torch.int32}[dtype]
    return numbers.to(dtype).view(word).flatten()


def mxfp4_decode(packed, scale, dtype=torch.float32, out=None):
    """
    packed uint8 (out, in/2), scale uint8 (out, in/32) → (out, in), fp32 or bf16, exact: each number
    · 2^(scale − 127). Into out, if given: a contiguous tensor of that shape and dtype.
    """
    bytes_alone = packed.dtype == scale.dtype == torch.uint8
    if not bytes_alone or packed.shape != (*scale.shape[:-1], 16 * scale.shape[-1]):
        raise ValueError(f"MXFP4: expected uint8 (…, in/2) and (…, in/32), got {packed.dtype} "
                         f"{tuple(packed.shape)} and {scale.dtype} {tuple(scale.shape)}")
    if (scale == 255).any():
        raise ValueError("MXFP4: a scale is 255, which stands for no number; the file is spoiled")
    words = mxfp4_words(dtype)
    if out is None:
        out = packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype)
    blocks = packed.int().unflatten(-1, (-1, 16))                              # (out, in/32, 16)
    at = blocks.add_(scale.int().unsqueeze(-1) << 8)
    # Straight into out: half of the time is memory
    torch.index_select(words, 0, at.flatten(), out=out.view(-1).view(words.dtype))
    return out


def mxfp4_encode(w):
    """w (out, in), in a multiple of 32 → packed, scale: the nearest that mxfp4_decode can give."""
    if w.shape[-1] % 32:
        raise ValueError(f"MXFP4: expected rows of a multiple of 32, got {tuple(w.shape)}")
    x, e = mxfp4_parts(w)                          # (out, in/32, 32), (out, in/32, 1)
    if not (x.abs() <= 6).all():
        raise ValueError("MXFP4: expected finite weights of at most 6 · 2^125; the model is "
                         "spoiled")
    sign = x.signbit().to(torch.uint8) << 3
    code = (CODES[(2 * x.abs()).long()] | sign).flatten(-2)                    # (out, in)
    return code[..., 0::2] | code[..., 1::2] << 4, (e.squeeze(-1) + 127).to(torch.uint8)
