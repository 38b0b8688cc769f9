"""
What lies between the matrix products, as Triton kernels: one pass over memory each way, where
torch's operations take dozens. The definitions stand in ops.py, kda.py, moe.py and attnres.py.

    norm(x, weight, eps, gate=None)     RMSNorm; with a gate, sigmoid(gate) ⊙ RMSNorm(x) (KDA)
    kda_arguments(…)                    KDA's q, k, v, g and β from its projections (report §2.1.1)
    situ(g, u, beta, linear_beta)       SiTU-GLU's activation (§2.3)
    mix(u, eps, *sources, …)            a mixture of attention residuals (§2.2), and a norm of it

Inside, all of it is fp32. Backward keeps what came in, and computes the rest again. The gradient of
a weight is summed by each program over its rows, and over programs by torch: without atomics, so
two runs agree bit for bit.
"""
import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


# A place is a pair: offsets, and the mask of those inside the tensor.

@triton.jit
def load(x, place):
    """Zero outside."""
    return tl.load(x + place[0], mask=place[1], other=0.0)


@triton.jit
def store(x, place, value):
    tl.store(x + place[0], value.to(x.dtype.element_ty), mask=place[1])


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * LOG2E * -1.0))


def launch(x, kernel, grid, *arguments, **constants):
    """On the GPU that holds x; by itself Triton would take the current one."""
    with torch.cuda.device_of(x):
        kernel[grid](*arguments, **constants)


# --------------------------------------------------------------------------------------------------
# RMSNorm (ops.py): y = x / sqrt(mean x² + eps) ⊙ weight over rows of D, and by sigmoid(gate) if
# there is one. In bf16 an element costs 4 bytes forward and 6 backward; 6 and 10 with a gate.

@triton.jit
def norm_forward(x, gate, weight, y, rows, stride, D, eps, ROWS: tl.constexpr, BD: tl.constexpr):
    """ROWS rows, `stride` apart in x. Grid (blocks of rows)."""
    row, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    inside, here = (row < rows)[:, None] & (c < D)[None, :], row[:, None] * D + c[None, :]
    bx = load(x, (row[:, None] * stride + c[None, :], inside)).to(tl.float32)      # (ROWS, BD)
    by = bx * tl.rsqrt(tl.sum(bx * bx, axis=1) / D + eps)[:, None]
    by *= load(weight, (c, c < D)).to(tl.float32)[None, :]
    if gate is not None:
        by *= _sigmoid(load(gate, (here, inside)).to(tl.float32))
    store(y, (here, inside), by)


@triton.jit
def norm_backward(x, gate, weight, dy, dx, dgate, dweight, rows, stride, D, eps, steps,
                  ROWS: tl.constexpr, BD: tl.constexpr):
    """`steps` times ROWS rows, which share a row of dweight (programs, D). Grid (programs)."""
    c = tl.arange(0, BD)
    w, dw = load(weight, (c, c < D)).to(tl.float32)[None, :], tl.zeros((BD,), tl.float32)
    for step in range(steps):
        row = (tl.program_id(0).to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside, here = (row < rows)[:, None] & (c < D)[None, :], row[:, None] * D + c[None, :]
        bx = load(x, (row[:, None] * stride + c[None, :], inside)).to(tl.float32)  # (ROWS, BD)
        bdy = load(dy, (here, inside)).to(tl.float32)
        r = tl.rsqrt(tl.sum(bx * bx, axis=1) / D + eps)[:, None]
        n = bx * r
        if gate is not None:
            s = _sigmoid(load(gate, (here, inside)).to(tl.float32))
            store(dgate, (here, inside), bdy * n * w * s * (1 - s))
            bdy *= s
        dw += tl.sum(bdy * n, axis=0)
        dn = bdy * w
        store(dx, (here, inside), (dn - n * (tl.sum(dn * n, axis=1) / D)[:, None]) * r)
    store(dweight, (tl.program_id(0) * D + c, c < D), dw)


class _Norm(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, eps, gate):
        D = weight.shape[0]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # a part of a wider matrix stays a view
        x = (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, D)
        gate = gate if gate is None else gate.contiguous()
        BD = triton.next_power_of_2(D)
        ctx.save_for_backward(x, weight, gate)
        ctx.numbers, ctx.sizes = (len(x), x.stride(0), D, eps), dict(
            ROWS=max(1, 1024 // BD), BD=BD, num_warps=4 if BD <= 4096 else 8)
        launch(x, norm_forward, (triton.cdiv(len(x), ctx.sizes["ROWS"]),),
               x, gate, weight, y, *ctx.numbers, **ctx.sizes)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x, weight, gate), (rows, _, D, _) = ctx.saved_tensors, ctx.numbers
        dx = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
        dgate = None if gate is None else torch.empty_like(gate)
        steps = triton.cdiv(rows, ctx.sizes["ROWS"] * 512)     # 512 programs fill a GPU
        programs = triton.cdiv(rows, ctx.sizes["ROWS"] * steps)
        dweight = x.new_empty(programs, D, dtype=torch.float32)
        launch(x, norm_backward, (programs,), x, gate, weight, dy.contiguous(), dx, dgate, dweight,
               *ctx.numbers, steps, **ctx.sizes)
        return dx, dweight.sum(0).to(weight.dtype), None, dgate


def norm(x, weight, eps, gate=None):
    """x (…, D), weight (D), gate of as many elements as x → x's shape and dtype."""
    return _Norm.apply(x, weight, eps, gate)


# --------------------------------------------------------------------------------------------------
# What KDA reads (kda.py). Per token and head, from the projections x_q, x_k, x_v, raw and b:
#
#     q, k, v = SiLU(Σ_lag w_lag x_{t−lag}), then q and k to unit length
#     g = g_min · sigmoid(exp(A_log) · (raw + dt_bias)),  β = sigmoid(b)
#
# The inputs before x are its tail: (B, WIDTH − 1, H·D), or zeros. In bf16 a token and channel of K
# costs 14 bytes forward and 20 backward (6 of them g's), one of V 4 and 6; nothing is kept that was
# not there before.

@triton.jit
def _rows(i, t, h, T, H, D, c):
    """Offsets of tokens t and channels c of head h in sequence i of (B, T, H, D)."""
    return ((i.to(tl.int64) * T + t) * H + h)[:, None] * D + c[None, :]


@triton.jit
def _read(x, tail, i, t, h, T, H, D, c, PAST: tl.constexpr):
    """x (…, D) of tokens t, which may lie before x, in fp32."""
    inside = (c < D)[None, :]
    y = load(x, (_rows(i, t, h, T, H, D, c), inside & ((t >= 0) & (t < T))[:, None]))
    y = y.to(tl.float32)
    if tail is not None:
        early = inside & ((t < 0) & (t >= -PAST))[:, None]
        y += load(tail, (_rows(i, t + PAST, h, PAST, H, D, c), early)).to(tl.float32)
    return y


@triton.jit
def _tap(w, lag, h, D, c, WIDTH: tl.constexpr):
    return load(w, ((h * D + c) * WIDTH + WIDTH - 1 - lag, c < D)).to(tl.float32)[None, :]


@triton.jit
def _convolved(x, tail, w, i, t, h, T, H, D, c, WIDTH: tl.constexpr):
    y = _read(x, tail, i, t, h, T, H, D, c, WIDTH - 1) * _tap(w, 0, h, D, c, WIDTH)
    for lag in tl.static_range(1, WIDTH):
        y += _read(x, tail, i, t - lag, h, T, H, D, c, WIDTH - 1) * _tap(w, lag, h, D, c, WIDTH)
    return y


@triton.jit
def _convolution(x, tail, w, y, new_tail, i, t, h, T, H, D, c, is_first,
                 UNIT: tl.constexpr, WIDTH: tl.constexpr, PAST: tl.constexpr):
    by = _convolved(x, tail, w, i, t, h, T, H, D, c, WIDTH)
    by *= _sigmoid(by)
    if UNIT:
        by *= tl.rsqrt(tl.sum(by * by, axis=1) + 1e-6)[:, None]
    store(y, (_rows(i, t, h, T, H, D, c), (t < T)[:, None] & (c < D)[None, :]), by)
    if new_tail is not None:
        if is_first:     # the last inputs
            u = tl.arange(0, PAST)
            last = _read(x, tail, i, T - (WIDTH - 1) + u, h, T, H, D, c, WIDTH - 1)
            place = _rows(i, u, h, WIDTH - 1, H, D, c), (u < WIDTH - 1)[:, None] & (c < D)[None, :]
            store(new_tail, place, last)


@triton.jit
def arguments_forward(xs, tails, ws, raw, b, A_log, dt_bias, ys, new_tails, g, beta,
                      T, H, K, V, g_min, WIDTH: tl.constexpr, PAST: tl.constexpr,
                      ROWS: tl.constexpr, BD: tl.constexpr):
    """xs, tails, ws, ys, new_tails: of q, k and v. Grid (B · blocks of ROWS tokens, H, 4)."""
    blocks, h, part = tl.cdiv(T, ROWS), tl.program_id(1), tl.program_id(2)
    i, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    t, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    for n in tl.static_range(3):
        if part == n:
            _convolution(xs[n], tails[n] if tails is not None else None, ws[n], ys[n],
                         new_tails[n] if new_tails is not None else None,
                         i, t, h, T, H, K if n < 2 else V, c, block == 0, n < 2, WIDTH, PAST)
    if part == 3:
        here = _rows(i, t, h, T, H, K, c), (t < T)[:, None] & (c < K)[None, :]
        z = load(raw, here).to(tl.float32) + load(dt_bias, (h * K + c, c < K))[None, :]
        store(g, here, g_min * _sigmoid(z * tl.exp2(tl.load(A_log + h) * LOG2E)))
        here = (i.to(tl.int64) * T + t) * H + h, t < T
        store(beta, here, _sigmoid(load(b, here).to(tl.float32)))


@triton.jit
def _convolution_backward(x, tail, w, dy, i, t, h, T, H, D, c, dw,
                          UNIT: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """→ dx of tokens t (ROWS, BD), and dw (TAPS, BD), by lag, with what they add to it."""
    here = _read(x, tail, i, t, h, T, H, D, c, WIDTH - 1)
    dx = tl.zeros_like(here)
    for lag in range(WIDTH):
        # token t + lag once more, and back through length and SiLU. Before its rows and after
        # them dy is zero
        a = _convolved(x, tail, w, i, t + lag, h, T, H, D, c, WIDTH)
        da = _read(dy, None, i, t + lag, h, T, H, D, c, WIDTH - 1)
        s = _sigmoid(a)
        if UNIT:
            r = tl.rsqrt(tl.sum(a * s * a * s, axis=1) + 1e-6)[:, None]
            y = a * s * r
            da = (da - y * tl.sum(y * da, axis=1)[:, None]) * r
        da *= s * (1 + a * (1 - s))
        dx += da * _tap(w, lag, h, D, c, WIDTH)
        dw += tl.where((tl.arange(0, TAPS) == lag)[:, None], tl.sum(da * here, axis=0)[None, :], 0)
    return dx, dw


@triton.jit
def _convolutions_backward(x, tail, w, dy, dx, dtail, dw, i, block, h, T, H, D, c,
                           UNIT: tl.constexpr, WIDTH: tl.constexpr, PAST: tl.constexpr,
                           TAPS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
                           BD: tl.constexpr):
    """STEPS times ROWS tokens and, with the first, the tail; dw (H·D, WIDTH) of this program."""
    sum = tl.zeros((TAPS, BD), tl.float32)
    for step in range(STEPS):
        t = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        bdx, sum = _convolution_backward(x, tail, w, dy, i, t, h, T, H, D, c, sum,
                                         UNIT, WIDTH, TAPS)
        store(dx, (_rows(i, t, h, T, H, D, c), (t < T)[:, None] & (c < D)[None, :]), bdx)
    if tail is not None:
        if block == 0:
            u = tl.arange(0, PAST)
            t = tl.where(u < WIDTH - 1, u - (WIDTH - 1), T + WIDTH)     # those beyond are nowhere
            bdx, sum = _convolution_backward(x, tail, w, dy, i, t, h, T, H, D, c, sum,
                                             UNIT, WIDTH, TAPS)
            if dtail is not None:
                inside = (u < WIDTH - 1)[:, None] & (c < D)[None, :]
                store(dtail, (_rows(i, u, h, WIDTH - 1, H, D, c), inside), bdx)
    lag = tl.arange(0, TAPS)[:, None]
    here = (h * D + c)[None, :] * WIDTH + WIDTH - 1 - lag
    store(dw, (here, (lag < WIDTH) & (c < D)[None, :]), sum)


@triton.jit
def arguments_backward(xs, tails, ws, raw, b, A_log, dt_bias, dys, dg, dbeta, dxs, dtails, draw, db,
                       dweights, T, H, K, V, g_min, WIDTH: tl.constexpr, PAST: tl.constexpr,
                       TAPS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
                       BD: tl.constexpr):
    """
    dweights: a row per block of STEPS · ROWS tokens, the three convolutions' weights, then dt_bias
    and A_log. Grid (B · blocks, H, 4).
    """
    blocks, h, part = tl.cdiv(T, ROWS * STEPS), tl.program_id(1), tl.program_id(2)
    i, block, c = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.arange(0, BD)
    of_q, others = H * K * WIDTH, H * (2 * K + V) * WIDTH
    dweights += tl.program_id(0).to(tl.int64) * (others + H * K + H)
    for n in tl.static_range(3):
        if part == n:
            _convolutions_backward(
                xs[n], tails[n] if tails is not None else None, ws[n], dys[n], dxs[n],
                dtails[n] if dtails is not None else None, dweights + n * of_q, i, block, h, T, H,
                K if n < 2 else V, c, n < 2, WIDTH, PAST, TAPS, STEPS, ROWS, BD)
    if part == 3:
        slope = tl.exp2(tl.load(A_log + h) * LOG2E)
        bias = load(dt_bias, (h * K + c, c < K))[None, :]
        dbias, dslope = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
        for step in range(STEPS):
            t = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
            here = _rows(i, t, h, T, H, K, c), (t < T)[:, None] & (c < K)[None, :]
            z = load(raw, here).to(tl.float32) + bias
            s = _sigmoid(z * slope)
            dz = load(dg, here).to(tl.float32) * g_min * s * (1 - s) * slope
            store(draw, here, dz)
            dbias += tl.sum(dz, axis=0)
            dslope += tl.sum(dz * z, axis=0)
            here = (i.to(tl.int64) * T + t) * H + h, t < T
            s = _sigmoid(load(b, here).to(tl.float32))
            store(db, here, load(dbeta, here).to(tl.float32) * s * (1 - s))
        store(dweights + others, (h * K + c, c < K), dbias)
        tl.store(dweights + others + H * K + h, tl.sum(dslope))


class _Arguments(torch.autograd.Function):

    @staticmethod
    def forward(ctx, g_min, raw, b, A_log, dt_bias, *threes):
        raw, b, *threes = (x if x is None else x.contiguous() for x in (raw, b, *threes))
        xs, ws, tails = (tuple(threes[n:n + 3]) for n in (0, 3, 6))
        (B, T, _), H, WIDTH = raw.shape, A_log.shape[0], ws[0].shape[-1]
        K, V = raw.shape[-1] // H, xs[2].shape[-1] // H
        tails = None if tails[0] is None else tails
        q, k, v = ys = tuple(torch.empty_like(x).unflatten(-1, (H, -1)) for x in xs)
        g, beta = (x.new_empty(x.shape, dtype=torch.float32) for x in (raw, b))
        new_tails = tails and tuple(x.new_empty(B, WIDTH - 1, x.shape[-1]) for x in xs)
        BD = triton.next_power_of_2(max(K, V))
        ctx.sizes = dict(WIDTH=WIDTH, PAST=triton.next_power_of_2(max(1, WIDTH - 1)), BD=BD,
                         num_warps=4)
        ctx.numbers, rows = (T, H, K, V, g_min), max(1, 1024 // BD) if T > 1 else 1
        launch(raw, arguments_forward, (B * triton.cdiv(T, rows), H, 4),
               xs, tails, ws, raw, b, A_log, dt_bias, ys, new_tails, g, beta,
               *ctx.numbers, ROWS=rows, **ctx.sizes)
        ctx.save_for_backward(raw, b, A_log, dt_bias, *threes)
        new_tails = new_tails or (None,) * 3
        ctx.mark_non_differentiable(*(x for x in new_tails if x is not None))
        return q, k, v, g.unflatten(-1, (H, -1)), beta, *new_tails

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv, dg, dbeta, *_):
        raw, b, A_log, dt_bias, *threes = ctx.saved_tensors
        xs, ws, tails = (tuple(threes[n:n + 3]) for n in (0, 3, 6))
        (B, T, _), (_, H, K, *_), WIDTH = raw.shape, ctx.numbers, ctx.sizes["WIDTH"]
        tails = None if tails[0] is None else tails
        dq, dk, dv, dg, dbeta = (x.contiguous() for x in (dq, dk, dv, dg, dbeta))
        draw, db, *dxs = (torch.empty_like(x) for x in (raw, b, *xs))
        dtails = tails and any(ctx.needs_input_grad[-3:]) and tuple(map(torch.empty_like, tails))
        rows = max(1, 1024 // ctx.sizes["BD"])
        steps = max(1, 128 // rows)
        lengths = [w.numel() for w in ws] + [H * K, H]
        dweights = raw.new_empty(B * triton.cdiv(T, rows * steps), sum(lengths),
                                 dtype=torch.float32)
        launch(raw, arguments_backward, (len(dweights), H, 4),
               xs, tails, ws, raw, b, A_log, dt_bias, (dq, dk, dv), dg, dbeta, tuple(dxs),
               dtails or None, draw, db, dweights, *ctx.numbers, STEPS=steps, ROWS=rows,
               TAPS=triton.next_power_of_2(WIDTH), **ctx.sizes)
        *dws, dbias, dslope = dweights.sum(0).split(lengths)
        dws = [dw.view(w.shape).to(w.dtype) for dw, w in zip(dws, ws)]
        return (None, draw, db, dslope.to(A_log.dtype), dbias.to(dt_bias.dtype),
                *dxs, *dws, *(dtails or (None,) * 3))


def kda_arguments(xs, raw, b, tails, weights, A_log, dt_bias, g_min):
    """
    xs (B, T, H·D) for q, k and v, tails (B, width − 1, H·D) or None before them, weights
    (H·D, 1, width); raw (B, T, H·K), b (B, T, H), A_log (H), dt_bias (H·K)
    → q, k, v in x's dtype, g (B, T, H, K) and beta (B, T, H) in fp32; the new tails, or three None.
    """
    out = _Arguments.apply(g_min, raw, b, A_log, dt_bias, *xs, *weights, *tails)
    return out[:5], out[5:]


# --------------------------------------------------------------------------------------------------
# SiTU-GLU's activation (moe.py). In bf16, an element costs 6 bytes forward and 10 backward, and
# keeps 4 for backward; as separate operations of torch about 100 and 120 are moved, and 12 kept.

@triton.jit
def _tanh(x):
    small = tl.abs(x) < 0.03     # where the difference would cancel
    return tl.where(small, x - x * x * x / 3, 2.0 / (1.0 + tl.exp2(x * LOG2E * -2.0)) - 1.0)


@triton.jit
def situ_kernel(g, u, y, dy, dg, du, stride_g, stride_u, size, width, beta, linear_beta,
                BLOCK: tl.constexpr):
    """y from g and u or, given dy, dg and du. linear_beta = 0 stands for no limit."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column, inside = i // width, i % width, i < size
    bg = load(g, (row * stride_g + column, inside)).to(tl.float32)
    bu = load(u, (row * stride_u + column, inside)).to(tl.float32)
    a, s = _tanh(bg / beta), _sigmoid(bg)
    c = _tanh(bu / tl.maximum(linear_beta, 1e-30))
    up = tl.where(linear_beta > 0, c * linear_beta, bu)
    dup = tl.where(linear_beta > 0, 1 - c * c, 1.0)
    if dy is None:
        store(y, (i, inside), beta * a * s * up)
    else:
        bdy = load(dy, (i, inside)).to(tl.float32)
        store(dg, (i, inside), bdy * up * ((1 - a * a) * s + beta * a * s * (1 - s)))
        store(du, (i, inside), bdy * beta * a * s * dup)


class _SiTU(torch.autograd.Function):

    @staticmethod
    def forward(ctx, g, u, beta, linear_beta):
        if u.shape != g.shape or u.device != g.device:
            raise ValueError(f"u: expected {tuple(g.shape)} on {g.device}, as g, "
                             f"got {tuple(u.shape)} on {u.device}")
        y, width = torch.empty(g.shape, dtype=g.dtype, device=g.device), g.shape[-1]
        # halves of one matrix stay views
        g, u = (x.reshape(-1, width) if x.stride(-1) == 1 else x.contiguous().view(-1, width)
                for x in (g, u))
        ctx.save_for_backward(g, u)
        ctx.rest = g.stride(0), u.stride(0), y.numel(), width, beta, linear_beta or 0.0
        launch(y, situ_kernel, (triton.cdiv(y.numel(), 1024),),
               g, u, y, None, None, None, *ctx.rest, BLOCK=1024)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (g, u), dy = ctx.saved_tensors, dy.contiguous()
        dg, du = (torch.empty(dy.shape, dtype=x.dtype, device=x.device) for x in (g, u))
        launch(dy, situ_kernel, (triton.cdiv(dy.numel(), 1024),),
               g, u, None, dy, dg, du, *ctx.rest, BLOCK=1024)
        return dg, du, None, None


situ = _SiTU.apply     # g, u (..., m), beta, linear_beta or None → (..., m)


# --------------------------------------------------------------------------------------------------
# The mixture of attention residuals (attnres.py), and the norm that follows it. Every source is
# read once forward and twice backward, and 4 bytes a token and source are kept. With n sources of d
# bf16 numbers a token, forward moves 2 (n + 1) d bytes a token; as operations of torch about 26 n d
# for the mixture, and 4 d more for the norm.

@triton.jit
def mix_forward(w, keys, scale, eps, sources, out, logits, rows, d, BD: tl.constexpr):
    """One token: a softmax over the sources as they come, so each is read once. Grid (rows)."""
    at, row = tl.arange(0, BD), tl.program_id(0).to(tl.int64)
    u, here = _query(w, keys, (at, at < d)), (row * d + at, at < d)
    top, sum, acc = float("-inf"), 0.0, tl.zeros((BD,), tl.float32)
    for s in tl.static_range(len(sources)):
        x = load(sources[s], here).to(tl.float32)
        logit = tl.sum(x * u) * tl.rsqrt(tl.sum(x * x) / d + eps)
        tl.store(logits + s * rows + row, logit)
        new = tl.maximum(top, logit)
        p, fade = tl.exp2((logit - new) * LOG2E), tl.exp2((top - new) * LOG2E)
        acc, sum, top = acc * fade + p * x, sum * fade + p, new
    acc /= sum
    if scale is not None:     # the norm that follows
        acc *= tl.rsqrt(tl.sum(acc * acc) / d + eps) * load(scale, (at, at < d)).to(tl.float32)
    store(out, here, acc)


@triton.jit
def _query(w, keys, place):
    u = load(w, place).to(tl.float32)
    if keys is not None:
        u *= load(keys, place).to(tl.float32)
    return u


@triton.jit
def mix_backward(w, keys, scale, eps, sources, dout, logits, dsources, du, dscale, rows, d,
                 ROWS: tl.constexpr, BD: tl.constexpr):
    """ROWS tokens, which share a row of du and of dscale (programs, d). Grid (programs)."""
    at = tl.arange(0, BD)
    u, bdu = _query(w, keys, (at, at < d)), tl.zeros((BD,), tl.float32)
    bdscale = tl.zeros((BD,), tl.float32)
    for r in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + r
        # past the end everything is zero, and adds nothing to du
        here = row * d + at, at < tl.where(row < rows, d, 0)
        dh = load(dout, here).to(tl.float32)

        # the mixture once more
        top, sum, h = float("-inf"), 0.0, tl.zeros((BD,), tl.float32)
        for s in tl.static_range(len(sources)):
            logit = tl.load(logits + s * rows + tl.minimum(row, rows - 1))
            x = load(sources[s], here).to(tl.float32)
            new = tl.maximum(top, logit)
            p, fade = tl.exp2((logit - new) * LOG2E), tl.exp2((top - new) * LOG2E)
            h, sum, top = h * fade + p * x, sum * fade + p, new
        h /= sum

        # through the norm that follows, if one does; then Σ p dp is dh · h
        if scale is not None:
            rms = tl.rsqrt(tl.sum(h * h) / d + eps)
            bdscale += dh * h * rms
            dh *= load(scale, (at, at < d)).to(tl.float32) * rms
            dh -= h * (tl.sum(dh * h) * rms * rms / d)
        mean = tl.sum(dh * h)

        # through the values, the logits, and the norm of the keys
        for s in tl.static_range(len(sources)):
            logit = tl.load(logits + s * rows + tl.minimum(row, rows - 1))
            x = load(sources[s], here).to(tl.float32)
            p, rms = tl.exp2((logit - top) * LOG2E) / sum, tl.rsqrt(tl.sum(x * x) / d + eps)
            dlogit = p * (tl.sum(dh * x) - mean)
            bdu += dlogit * rms * x
            dx = dh * p + dlogit * rms * u - (dlogit * logit * rms * rms / d) * x
            store(dsources[s], here, dx)
    here = tl.program_id(0) * d + at, at < d
    store(du, here, bdu)
    if dscale is not None:
        store(dscale, here, bdscale)


class _Mix(torch.autograd.Function):

    @staticmethod
    def forward(ctx, w, keys, scale, eps, *sources):
        d, shape = w.shape[-1], sources[0].shape
        for x in sources:
            if x.shape != shape or x.shape[-1:] != w.shape or x.device != w.device:
                raise ValueError(f"sources: expected {(*shape[:-1], d)} on {w.device}, to go with "
                                 f"u {tuple(w.shape)}, got {tuple(x.shape)} on {x.device}")
        w, *sources = (x.contiguous() for x in (w, *sources))
        rows = sources[0].numel() // d
        out = torch.empty_like(sources[0])
        logits = w.new_empty(len(sources), rows, dtype=torch.float32)
        launch(w, mix_forward, (rows,), w, keys, scale, eps, tuple(sources), out, logits, rows, d,
               BD=triton.next_power_of_2(d), num_warps=4)
        ctx.save_for_backward(w, keys, scale, logits, *sources)
        ctx.eps = eps
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        w, keys, scale, logits, *sources = ctx.saved_tensors
        d, rows, per_program = w.shape[0], logits.shape[1], 16
        dsources = tuple(torch.empty_like(x) for x in sources)
        parts = w.new_empty(1 if scale is None else 2, triton.cdiv(rows, per_program), d,
                            dtype=torch.float32)
        launch(w, mix_backward, (parts.shape[1],), w, keys, scale, ctx.eps, tuple(sources),
               dout.contiguous(), logits, dsources, parts[0],
               None if scale is None else parts[1], rows, d,
               ROWS=per_program, BD=triton.next_power_of_2(d), num_warps=8 if d > 2048 else 4)
        du, *dscale = parts.sum(1)
        dw, dkeys = (du, None) if keys is None else (du * keys, (du * w).to(keys.dtype))
        dscale = dscale[0].to(scale.dtype) if dscale else None
        return dw.to(w.dtype), dkeys, dscale, None, *dsources


def mix(u, eps, *sources, keys=None, scale=None):
    """
    u (d), sources (…, d) each → (…, d). keys: the weight of the keys' norm, where u is without it;
    scale: the weight of an RMSNorm of the mixture, with the same eps.
    """
    return _Mix.apply(u, keys, scale, eps, *sources)
