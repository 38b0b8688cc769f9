"""
Kimi Delta Attention (report §2.1.1; arXiv 2510.26692): linear attention with a matrix state and one decay per channel.

Per head a state S (K×V) is a memory of key → value pairs. Each token first lets it fade, channel by channel, then corrects what it
returns for the token's key (the delta rule), then reads it with the query:

    S ← Diag(exp g) S                     g: log decay per channel, g_min < g ≤ 0
    S ← S + β k (v − Sᵀk)ᵀ                β in (0, 1): how much of the error to correct
    o = Sᵀ q · K^-½

`kda_recurrent` is that, token by token. `kda_chunk` computes the same for C tokens at a time, with matrix products (below), with a
backward written by hand. `KDA` is the layer: projections, short convolutions, gates, and a cache of constant size.

Shapes: B sequences, T tokens, H heads, K key and V value channels; N chunks of C tokens, M = B·H, n tiles of 16 tokens in a chunk.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops import RMSNorm, exchange, fp32, kernels, linears

LOG2E = math.log2(math.e)
TILE = 16            # rows that share one exponent anchor: with g ≥ −5.9 a tile spans at most e^(15·5.9) < 2^128 …
SHIFT = 24           # … so row factors are multiplied by 2^24 and column factors divided by it: both stay clear of fp32's ends, and what
                     # of earlier tiles' columns is left after this division may still fade a good deal before it is subnormal


def kda_recurrent(q, k, v, g, beta, state=None):
    """
    The definition. q, k, g (B, T, H, K), q and k of unit length, g the log decay; v (B, T, H, V); beta (B, T, H);
    state (B, H, K, V) or None for zeros. → o (B, T, H, V) in v's dtype, state (B, H, K, V) in fp32 (fp64 for fp64 inputs).
    """
    q, k, v, g, beta, S, dtype = _arguments(q, k, v, g, beta, state)
    o = []
    with torch.autocast(q.device.type, enabled=False):
        for t in range(q.shape[1]):
            S = g[:, t].exp().unsqueeze(-1) * S                                                          # (B, H, K, V)
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * error)
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(o, dim=1).to(dtype), S


def _arguments(q, k, v, g, beta, state):
    """Check shapes, bring everything to fp32 (fp64 if any of q, k, v, g is), make the zero state. Errors: ValueError naming the argument."""
    if q.dim() != 4 or q.shape[1] < 1:
        raise ValueError(f"q: expected (B, T, H, K) with T ≥ 1, got {tuple(q.shape)}")
    B, T, H, K = q.shape
    V = v.shape[-1]
    expected = dict(k=(k, (B, T, H, K)), v=(v, (B, T, H, V)), g=(g, (B, T, H, K)), beta=(beta, (B, T, H)), state=(state, (B, H, K, V)))
    for name, (x, shape) in expected.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name}: expected {shape} to go with q {tuple(q.shape)}, got {tuple(x.shape)}")
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype, g.dtype) else torch.float32
    state = q.new_zeros(B, H, K, V, dtype=dtype) if state is None else state
    return *(x.to(dtype) for x in (q, k, v, g, beta, state)), v.dtype


# ----------------------------------------------------------------------------------------------------------------------
# The chunk form. With q scaled by K^-½, G_i the sum of g over the chunk up to and with row i, and S₀ the state that enters:
#
#     A_qk[i,j] = Σ_c q_ic k_jc exp(G_ic − G_jc), j ≤ i       A_kk[i,j] likewise from k, j < i
#     (I + Diag(β) A_kk) U = Diag(β) (V − (K ⊙ e^G) S₀)       row i of U is β times the error that token i corrects
#     O = (Q ⊙ e^G) S₀ + A_qk U                               S_C = Diag(e^{G_C}) S₀ + (K ⊙ e^{G_C − G})ᵀ U
#
# exp(G_i − G_j) splits into a row and a column factor around an anchor a, exp(G_i − G_a) · exp(G_a − G_j), so that A is a matrix product.
# e^−G overflows over 64 tokens; so rows go by tiles of 16, anchored at the tile's FIRST row: columns of earlier tiles have factors ≤ 1,
# those of the tile itself stay below e^75 at g = −5. (An anchor further down would let later tokens change earlier outputs by rounding;
# a constant SHIFT, an exact power of two, changes nothing but the room left in fp32.)
# The column factors move from one tile's anchor to the next by a product with exp(a_next − a), which is ≤ 1.
# Everything for q and for k is done on stacked rows: a tile holds 16 rows of q, then 16 rows of k. Exponents are in base 2 (faster).

def _to_chunks(x, C):
    """(B, T, H, D) → (N, B·H, C, D), padded with zeros: a padding row has k = 0, β = 0, g = 0 and changes nothing."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C)) if x.shape[1] % C else x                              # a pad of nothing is a copy too
    return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).contiguous().flatten(1, 2)


def _from_chunks(x, B, T):
    """The way back: (N, B·H, C, D) → (B, T, H, D)."""
    N, M, C, D = x.shape
    return x.reshape(N, B, M // B, C, D).permute(1, 0, 3, 2, 4).reshape(B, N * C, M // B, D)[:, :T]


def _flush(x):
    """In place: below 2^-80 becomes zero in fp32, which is a decay of 2^-56 where a factor holds 2^-SHIFT. Beside terms near 1 no sum sees it;
    as subnormal numbers it would cost some CPUs ten times the time."""
    return torch.ops.aten.hardshrink.out(x, 2.0 ** -80, out=x) if x.dtype == torch.float32 else x


def _mm(a, b, out=None, alpha=1):
    """alpha · a b, (N, M, ·, ·) each; added to `out` if there is one. One pass over the result where a product and a sum would be three."""
    batch, shape = a.shape[:2], (a.shape[-2], b.shape[-1])
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    if out is None:
        out = torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=alpha) if alpha != 1 else torch.bmm(a, b)
        return out.view(*batch, *shape)
    if not out.is_contiguous():                                            # there baddbmm_ would go matrix by matrix
        return out.add_(torch.bmm(a, b).view_as(out), alpha=alpha)
    out.flatten(0, 1).baddbmm_(a, b, alpha=alpha)
    return out


class _Chunk(torch.autograd.Function):

    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, C):
        B, T, H, K = q.shape
        V, n = v.shape[-1], C // TILE
        q, k, v, g, beta = (_to_chunks(x, C) for x in (q, k, v, g, beta.unsqueeze(-1)))                  # (N, M, C, ·)
        beta = beta.clamp(min=1e-30)                                                                     # backward divides by it
        N, M = q.shape[:2]
        i = torch.arange(C, device=q.device)
        before, at_or_before, zero = i[:, None] > i, i[:, None] >= i, q.new_zeros(())                    # (C, C)
        tile = (N, M, n, TILE)

        # decays, all from the running sum G, in base 2, and the anchors a
        G = (at_or_before.to(q.dtype) * LOG2E) @ g                                                      # (N, M, C, K)
        a = G[:, :, ::TILE]                                                                              # (N, M, n, K)
        row = (G.view(*tile, K) - (a - SHIFT).unsqueeze(3)).exp2_()                                      # within a tile, (N, M, n, 16, K)
        start = _flush((a - SHIFT).exp2_()).unsqueeze(3)                                                 # chunk start → anchor, (N, M, n, 1, K)
        step = (a[:, :, 1:] - a[:, :, :-1]).exp2_().unsqueeze(3)                                         # anchor → next, (N, M, n-1, 1, K)
        end = (G[:, :, -1:] - a[:, :, -1:] + SHIFT).exp2_()                                              # last anchor → chunk end, (N, M, 1, K)
        total = _flush(G[:, :, -1].exp2()).unsqueeze(-1)                                                 # (N, M, K, 1)

        # stacked rows and A, tile by tile. From here on q is without its scale, which o gets instead
        rows = q.new_empty(N, M, n, 2, TILE, K)
        torch.mul(q.view(*tile, K), row, out=rows[:, :, :, 0])
        torch.mul(k.view(*tile, K), row, out=rows[:, :, :, 1])
        A_qk, A_kk = ((q.new_zeros if n > 1 else q.new_empty)(N, M, C, C) for _ in range(2))
        for i, col in _columns(k, row, step):
            A = _mm(rows[:, :, i].flatten(2, 3), col.mT)                                                 # (N, M, 32, 16(i+1))
            part = ..., slice(i * TILE, (i + 1) * TILE), slice(0, (i + 1) * TILE)
            torch.where(at_or_before[part], A[:, :, :TILE], zero, out=A_qk[part])                        # not a product: ahead of the row
            torch.where(before[part], A[:, :, TILE:], zero, out=A_kk[part])                              # there may be an overflow
        keep = col.mul_(end)                                                                             # K ⊙ e^{G_C − G}, (N, M, C, K)

        # U = U₀ − W S₀ for the whole sequence, then the one part that is sequential: the state, chunk by chunk
        q_start, k_start = ((rows[:, :, :, i] * start).view(N, M, C, K) for i in (0, 1))                 # Q ⊙ e^G, K ⊙ e^G
        identity = torch.eye(C, dtype=q.dtype, device=q.device).expand_as(A_kk)
        # (I + Diag(β) A_kk)^-1, never by squaring: where the keys of a chunk are alike, its intermediate powers reach 1e9
        inverse = torch.linalg.solve_triangular(A_kk.mul_(beta), identity, upper=False, unitriangular=True)
        solve = inverse * beta.mT                                                                        # (N, M, C, C)
        W = solve @ k_start                                                                              # (N, M, C, K)
        U = solve @ v                                                                                    # (N, M, C, V)
        S = q.new_empty(N + 1, M, K, V)
        S[0] = state.reshape(M, K, V)
        for u, w, s, s_next, t, kept in zip(*(x.unbind(0) for x in (U, W, S[:-1], S[1:], total, keep.mT))):
            u.baddbmm_(w, s, alpha=-1)
            torch.mul(s, t, out=s_next).baddbmm_(kept, u)

        o = _mm(A_qk, U, _mm(q_start, S[:-1], alpha=K ** -0.5), alpha=K ** -0.5)
        ctx.save_for_backward(k, beta, row, start, step, end, total, rows, q_start, A_qk, inverse, W, U, S, keep)
        ctx.shape = B, T, H, K, V, C
        return _from_chunks(o, B, T), S[-1].view(B, H, K, V).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dstate):
        k, beta, row, start, step, end, total, rows, q_start, A_qk, inverse, W, U, S, keep = ctx.saved_tensors
        B, T, H, K, V, C = ctx.shape
        N, M = k.shape[:2]
        n = C // TILE
        scale = K ** -0.5
        do = _to_chunks(do, C)                                                                           # (N, M, C, V)

        # the state's gradient, from the last chunk to the first; dS[c + 1] belongs to the state that leaves chunk c
        dU = _mm(A_qk.mT, do, alpha=scale)
        dS = k.new_empty(N + 1, M, K, V)
        torch.bmm(q_start.mT.flatten(0, 1), do.flatten(0, 1), out=dS[:-1].flatten(0, 1)).mul_(scale)
        dS[N] = dstate.reshape(M, K, V)
        for du, w, ds, ds_next, t, kept in reversed(list(zip(*(x.unbind(0) for x in (dU, W.mT, dS[:-1], dS[1:], total, keep))))):
            du.baddbmm_(kept, ds_next)
            ds.addcmul_(ds_next, t).baddbmm_(w, du, alpha=-1)
        dR = inverse.mT @ dU                                                                             # through the triangular solve
        dbeta = (dR * U).sum(-1, keepdim=True) / beta                                                    # U = β ⊙ error
        dv = dR.mul_(beta)

        # the gradients of A and of the stacked rows, tile by tile
        dout = k.new_empty(N, M, n, 2, TILE, V)
        torch.mul(do.view(N, M, n, TILE, V), scale, out=dout[:, :, :, 0])
        torch.neg(dv.view(N, M, n, TILE, V), out=dout[:, :, :, 1])
        dout = dout.view(N, M, 2 * C, V)
        dA = _mm(dout, U.mT).view(N, M, n, 2 * TILE, C)
        drows = _mm(dout, S[:-1].mT).view(N, M, n, 2 * TILE, K).mul_(start)
        i = torch.arange(TILE, device=k.device)
        causal = torch.cat([i[:, None] >= i, i[:, None] > i]).to(k.dtype)                                # of stacked rows on their own tile, (32, 16)
        for i, col in _columns(k, row, step):
            dA[:, :, i, :, i * TILE:(i + 1) * TILE] *= causal
            _mm(dA[:, :, i, :, :(i + 1) * TILE], col, drows[:, :, i])
        dcol = _mm(U, dS[1:].mT)                                                                         # of K ⊙ e^{G_C − G}, at first
        dend = (keep * dcol).sum(2) + dS[1:].mul_(S[:-1]).sum(-1) * total.squeeze(-1)                    # of G_C, (N, M, K)
        dcol.mul_(end)                                                                                   # the columns, at the last anchor
        for i in reversed(range(n)):
            _mm(dA[:, :, i, :, :(i + 1) * TILE].mT, rows[:, :, i].flatten(2, 3), dcol[:, :, :(i + 1) * TILE])
            if i > 0:
                dcol[:, :, :i * TILE] *= step[:, :, i - 1]                                               # back to the anchor before
        dcol = dcol.view(N, M, n, TILE, K).div_(row)

        # x ⊙ dx summed with its sign is the gradient of G; g gets the sum of all later ones in the chunk
        dq_row, dk_row = drows.view(N, M, n, 2, TILE, K).unbind(3)                                       # (N, M, n, 16, K)
        q_row, k_row = rows.unbind(3)
        dq = dq_row * row
        dG = dq_row.mul_(q_row).addcmul_(k_row, dk_row).addcmul_(k.view_as(dcol), dcol, value=-1).reshape(N, M, C, K)
        dG[:, :, -1] += dend
        dk = dcol.addcmul_(dk_row, row)
        dg = torch.ones(C, C, dtype=k.dtype, device=k.device).triu() @ dG
        dq, dk, dv, dg, dbeta = (_from_chunks(x.view(N, M, C, -1), B, T) for x in (dq, dk, dv, dg, dbeta))
        return dq, dk, dv, dg, dbeta.squeeze(-1), dS[0].view(B, H, K, V), None


def _columns(k, row, step):
    """For each tile i: the keys of tiles 0 … i, times exp(G_a − G_j) with a the first row of tile i. Yields i, (N, M, 16(i+1), K)."""
    N, M, n, _, K = row.shape
    col = k.new_empty(N, M, n * TILE, K)
    for i in range(n):
        if i > 0:
            _flush(col[:, :, :i * TILE].mul_(step[:, :, i - 1]))
        torch.div(k[:, :, i * TILE:(i + 1) * TILE], row[:, :, i], out=col[:, :, i * TILE:(i + 1) * TILE])
        yield i, col[:, :, :(i + 1) * TILE]


@torch.compiler.disable                                                    # torch.compile would take it apart, and be slower
def kda_chunk(q, k, v, g, beta, state=None, chunk=64):
    """
    kda_recurrent by chunks, in plain PyTorch: same arguments, same results (fp32 inside), differentiable once in everything.
    chunk: tokens at a time, a multiple of 16. Longer chunks are fewer sequential steps, and more work per token.
    g must lie in [−5.9, 0]: beyond that a tile's factors leave fp32.
    """
    q, k, v, g, beta, state, dtype = _arguments(q, k, v, g, beta, state)
    if chunk < TILE or chunk % TILE:
        raise ValueError(f"chunk: expected a multiple of {TILE}, got {chunk}")
    low, high = g.detach().aminmax()
    if low < -5.9001 or high > 0:                                          # a NaN may pass: it is to be seen where it began, not here
        raise ValueError(f"g: expected log decays in [-5.9, 0], got values from {low:.4g} to {high:.4g}")
    C = min(chunk, -(-q.shape[1] // TILE) * TILE)
    with torch.autocast(q.device.type, enabled=False):
        o, state = _Chunk.apply(q, k, v, g, beta, state, C)
    return o.to(dtype), state


def kda_segment_definition(k, v, g, beta):
    """
    What a stretch of the sequence does to any state that enters it, S ↦ S̃ + P S (§5.1): → P (B, H, K, K), S̃ (B, H, K, V). By its definition,
    the recurrence from the identity without values, and from nothing.
    """
    identity = torch.eye(k.shape[-1], device=k.device).expand(k.shape[0], k.shape[2], -1, -1)
    return kda_recurrent(k, k, torch.zeros_like(k), g, beta, identity)[1], kda_recurrent(k, k, v, g, beta)[1]


def kda_segment(k, v, g, beta):
    """The same from the fast form, in one call: the columns of the state do not see each other, so [P, S̃] is the state that [I, 0] becomes."""
    B, T, H, K = k.shape
    identity = torch.eye(K, dtype=fp32(k).dtype, device=k.device).expand(B, H, K, K)
    state = F.pad(identity, (0, v.shape[-1]))                                                            # (B, H, K, K+V)
    return kda(k, k, torch.cat([torch.zeros_like(k), v.to(k.dtype)], dim=-1), g, beta, state)[1].split([K, v.shape[-1]], dim=-1)


def compose(P, S, state):
    """Segments one after another: P (L, ..., K, K), S (L, ..., K, V), the first entering state (..., K, V) → the states at their borders (L+1, ..., K, V)."""
    states = [state]
    with torch.autocast(state.device.type, enabled=False):                 # states stay in fp32
        for through, own in zip(P, S):
            states.append(own + through @ states[-1])
    return torch.stack(states)


def kda(q, k, v, g, beta, state=None):
    """
    The one place that chooses: Triton on a GPU, if it can take these widths; else a single token is the recurrence itself, and more are
    chunks. g must lie in [−5.9, 0]: Triton does not look. Its kernel for one token, without gradients, changes `state` in place; all else
    returns a new one.
    """
    if kernels and kernels.fits(q, v):
        if q.shape[1] == 1 and state is not None and not torch.is_grad_enabled():
            return kernels.kda_decode(q, k, v, g, beta, state), state
        return kernels.kda(q, k, v, g, beta, state, look_at_g=False)
    if q.shape[1] == 1:
        return kda_recurrent(q, k, v, g, beta, state)
    wide = q.shape[0] * q.shape[2] >= 16       # many heads at once: a sequential step is wide enough, so chunks may be short
    return kda_chunk(q, k, v, g, beta, state, chunk=16 if wide and not q.is_cuda else 64)


# ----------------------------------------------------------------------------------------------------------------------
# The layer

class _ShortConv(torch.autograd.Function):
    """
    y = SiLU(Σ_s w_s x_{t−s}), each channel by itself: x (B, T, D) after zeros, w (D, W) with the newest input last. Written as W shifted
    products: on a CPU F.conv1d takes up to twice as long for so narrow a kernel.
    """

    @staticmethod
    def forward(ctx, x, w):
        taps = w.t().flip(0).contiguous()                                                                # (W, D): lag 0, 1, 2, …
        y = x * taps[0]                                                                                  # (B, T, D)
        for lag in range(1, len(taps)):
            y[:, lag:].addcmul_(x[:, :-lag], taps[lag])
        ctx.save_for_backward(x, taps, y)
        return F.silu(y).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        x, taps, y = ctx.saved_tensors
        dy = torch.ops.aten.silu_backward(dout.to(y.dtype), y)                                           # (B, T, D)
        dx, dtaps = dy * taps[0], torch.empty_like(taps)
        dtaps[0] = (dy * x).sum((0, 1))
        for lag in range(1, len(taps)):
            dx[:, :-lag].addcmul_(dy[:, lag:], taps[lag])
            dtaps[lag] = (dy[:, lag:] * x[:, :-lag]).sum((0, 1))
        return dx.to(x.dtype), dtaps.flip(0).t()


class ShortConv(nn.Module):
    """Causal depthwise convolution, no bias, then SiLU: (B, T, D) → (B, T, D). weight (D, 1, width), as released."""

    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(self, x, tail=None):
        """tail (B, width−1, D): the inputs that came before x; None stands for zeros. → output, the new tail (None without one)."""
        if tail is None:
            return _ShortConv.apply(x, self.weight.squeeze(1)), None
        past = tail.shape[1]
        x = torch.cat([tail.to(x.dtype), x], dim=1)                                                      # (B, width-1+T, D)
        return _ShortConv.apply(x, self.weight.squeeze(1))[:, past:], x[:, x.shape[1] - past:].detach().clone()   # not a view: that would hold all of x


class _Unit(torch.autograd.Function):
    """x / sqrt(Σ x² + 1e-6) over the last axis."""

    @staticmethod
    def forward(ctx, x):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()              # (..., 1)
        n = x * r
        ctx.save_for_backward(n, r)
        return n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        n, r = ctx.saved_tensors
        along = (n * dy).sum(-1, keepdim=True)                             # the part of dy that points along n moves nothing
        return torch.addcmul(dy, n, along, value=-1).mul_(r)


def unit(x):
    """Each head's vector to length 1, inside in fp32: (B, T, H, K) → the same shape and dtype."""
    return _Unit.apply(fp32(x)).to(x.dtype)


class KDA(nn.Module):
    """
    q, k, v = SiLU(conv(W x)), q and k to unit length per head;   β = sigmoid(W_β x);
    g = g_min · sigmoid(exp(A_log) · (W_up W_down x + dt_bias)), in fp32, so g_min < g < 0;
    y = W_o [sigmoid(W_g x) ⊙ RMSNorm_head(o)], one norm weight of width V for all heads.

    x (B, T, d) → (B, T, d). cache: a dict from new_cache, updated in place; the same result however a sequence is cut into calls.
    Parameter names are those of the released model.
    """

    def __init__(self, config):
        super().__init__()
        d, self.H, self.K, self.V = config.n_embd, config.n_head, config.kda_key_dim, config.kda_value_dim
        self.g_min, self.softplus = config.g_min, config.kda_gate == "softplus"
        self.context_group = None                                          # of the ranks that hold one sequence between them; train.py sets it
        self.q_proj = nn.Linear(d, self.H * self.K, bias=False)
        self.k_proj = nn.Linear(d, self.H * self.K, bias=False)
        self.v_proj = nn.Linear(d, self.H * self.V, bias=False)
        self.q_conv1d = ShortConv(self.H * self.K, config.conv_size)
        self.k_conv1d = ShortConv(self.H * self.K, config.conv_size)
        self.v_conv1d = ShortConv(self.H * self.V, config.conv_size)
        self.f_a_proj = nn.Linear(d, self.K, bias=False)                   # W_down; the rank of the decay is K
        self.f_b_proj = nn.Linear(self.K, self.H * self.K, bias=False)     # W_up
        self.A_log = nn.Parameter(torch.empty(self.H))
        self.dt_bias = nn.Parameter(torch.empty(self.H * self.K))
        self.b_proj = nn.Linear(d, self.H, bias=False)
        self.g_proj = nn.Linear(d, self.H * self.V, bias=False)
        self.o_norm = RMSNorm(self.V, config.rms_norm_eps)
        self.o_proj = nn.Linear(self.H * self.V, d, bias=False)

    def _apply(self, fn, recurse=True):
        """A cast (.bfloat16(), .to(dtype)) must not round these: they move with the model and stay in fp32, and so do their gradients."""
        kept = (self.A_log, self.dt_bias, self.o_norm.weight, *(c.weight for c in self._convs()))
        kept = {id(x) for p in kept for x in (p, p.grad)} - {id(None)}

        def keep(x):
            y = fn(x)
            return x.to(y.device) if id(x) in kept and y.dtype != x.dtype else y
        return super()._apply(keep, recurse)

    def _convs(self):
        return self.q_conv1d, self.k_conv1d, self.v_conv1d

    def new_cache(self, batch_size):
        """State (B, H, K, V) in fp32 and the last inputs of each convolution: constant in the length of the text."""
        device = self.A_log.device
        tails = [torch.zeros(batch_size, c.weight.shape[-1] - 1, c.weight.shape[0], device=device) for c in self._convs()]
        return dict(state=torch.zeros(batch_size, self.H, self.K, self.V, device=device), tails=tails)

    def log_decay(self, x):
        """x (B, T, d) → g (B, T, H, K), fp32 (fp64 from an fp64 model)."""
        z = (fp32(self.f_b_proj(self.f_a_proj(x))) + self.dt_bias).unflatten(-1, (self.H, self.K))
        if self.softplus:                                                  # Kimi Linear's gate, cut off where the tiles need it: e^-5 is 0.7%
            return (-self.A_log.exp().unsqueeze(-1) * F.softplus(z)).clamp(min=self.g_min)
        return self.g_min * torch.sigmoid(self.A_log.exp().unsqueeze(-1) * z)

    def tails_before(self, inputs):
        """Context parallelism: the last inputs of each convolution on the rank before, zeros on the first. inputs: three of (B, T, D)."""
        rank, C = self.context_group.rank(), self.context_group.size()
        last = torch.cat(inputs, dim=-1)[:, 1 - self.q_conv1d.weight.shape[-1]:]                         # (B, width-1, D of all)
        receive, send = [int(r == rank - 1) for r in range(C)], [int(r == rank + 1) for r in range(C)]
        received = exchange(last.expand(sum(send), *last.shape), send, receive, self.context_group)      # (0 or 1, B, width-1, D of all)
        return received.sum(0).split([y.shape[-1] for y in inputs], dim=-1)

    def state_before(self, k, v, g, beta):
        """Context parallelism (§5.1.2): what this rank's stretch makes of any state goes to all later ranks; from those before → the entering state."""
        rank, C, K = self.context_group.rank(), self.context_group.size(), k.shape[-1]
        ours = torch.cat(kda_segment(k, v, g, beta), dim=-1)                                             # (B, H, K, K+V)
        receive, send = [int(r < rank) for r in range(C)], [int(r > rank) for r in range(C)]
        before = exchange(ours.expand(sum(send), *ours.shape), send, receive, self.context_group)        # (rank, B, H, K, K+V)
        nothing = before[:0, ..., K:].sum(0)                               # zeros, but in the graph: the first rank, too, goes backward through it
        return compose(before[..., :K], before[..., K:], nothing)[-1]

    def forward(self, x, cache=None):
        """With a context_group, x is this rank's stretch of the sequence, at least as long as a convolution's tail and without a cache."""
        *inputs, b, z = linears(x, self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.g_proj)
        tails = cache["tails"] if cache else self.tails_before(inputs) if self.context_group else [None] * 3
        (q, k, v), tails = zip(*(conv(y, tail) for conv, y, tail in zip(self._convs(), inputs, tails)))
        q = unit(q.unflatten(-1, (self.H, self.K)))                        # (B, T, H, K)
        k = unit(k.unflatten(-1, (self.H, self.K)))                        # (B, T, H, K)
        v = v.unflatten(-1, (self.H, self.V))                              # (B, T, H, V)
        beta = fp32(b).sigmoid()                                           # (B, T, H)
        g = self.log_decay(x)
        state = cache["state"] if cache else self.state_before(k, v, g, beta) if self.context_group else None
        o, state = kda(q, k, v, g, beta, state)
        if cache:
            cache["state"], cache["tails"] = state.detach(), tails
        return self.o_proj(z.sigmoid() * self.o_norm(o).flatten(2))        # of (B, T, H·V)
