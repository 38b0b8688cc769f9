"""
Kimi Delta Attention: linear attention with a matrix state and one decay per channel
(report §2.1.1; arXiv 2510.26692).

Per head, a state S (K×V) is a memory of key → value pairs. Each token lets it fade, channel by
channel; corrects what it returns for the token's key (the delta rule); and reads it with the query:

    S ← Diag(exp g) S                  g: log decay per channel, g_min < g ≤ 0
    S ← S + β k (v − Sᵀk)ᵀ             β in (0, 1): how much of the error to correct
    o = Sᵀ q · K^-½

1. `kda_recurrent` is just that, token by token: the definition.
2. `kda_chunk_plain` takes C tokens at a time, with matrix products that autograd differentiates.
3. `kda_chunk` is the same, with tiles so that fp32 holds, and its backward by hand.

`kda` chooses the fastest, or Triton's (kernels.py). `KDA` is the layer: projections, convolutions,
gates, and a cache that does not grow with the text.
Shapes: B sequences, T tokens, H heads, K and V channels of a key and a value, N chunks of C tokens;
BH is B·H, every head of every sequence.
"""
import math
import operator

import torch
import torch.nn as nn
import torch.nn.functional as F

from dispatch import pass_on
from ops import RMSNorm, by_hand, fp32, keep_dtype, kernels, linears, triton_takes

# --------------------------------------------------------------------------------------------------
# 1. The recurrence

def kda_recurrent(q, k, v, g, beta, state=None):
    """
    q, k, g (B, T, H, K), with q and k of unit length and g the log decay; v (B, T, H, V);
    beta (B, T, H); state (B, H, K, V), None for zeros.
    → o (B, T, H, V) in v's dtype, state (B, H, K, V) in fp32, or fp64 if any of q, k, v, g is.
    Errors: ValueError that names the argument.
    """
    q, k, v, g, beta, S, dtype = _arguments(q, k, v, g, beta, state)
    o = []
    with torch.autocast(q.device.type, enabled=False):
        for t in range(q.shape[1]):
            S = g[:, t].exp().unsqueeze(-1) * S  # (B, H, K, V)
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            update = beta[:, t].unsqueeze(-1) * error
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(o, dim=1).to(dtype), S


def _arguments(q, k, v, g, beta, state):
    """Check the arguments, cast to fp32 (or fp64), make the zero state. → all six, v's dtype."""
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q: expected (B, T, H, K), none of them zero, got {tuple(q.shape)}")
    B, T, H, K = q.shape
    V = v.shape[-1] if v.dim() == 4 else 1
    S = q.new_zeros(B, H, K, V, dtype=torch.float32) if state is None else state
    expected = dict(q=(q, (B, T, H, K)), k=(k, (B, T, H, K)), v=(v, (B, T, H, max(V, 1))),
                    g=(g, (B, T, H, K)), beta=(beta, (B, T, H)), state=(S, (B, H, K, V)))
    for name, (x, shape) in expected.items():
        if x.shape != shape or not x.is_floating_point() or x.device != q.device:
            raise ValueError(f"{name}: expected floats {shape} on {q.device}, to go with q; "
                             f"got {tuple(x.shape)}, {str(x.dtype)[6:]} on {x.device}")
    any_fp64 = torch.float64 in (q.dtype, k.dtype, v.dtype, g.dtype)
    dtype = torch.float64 if any_fp64 else torch.float32
    return *(x.to(dtype) for x in (q, k, v, g, beta, S)), v.dtype


# --------------------------------------------------------------------------------------------------
# 2. The chunk form. Unrolling the recurrence over C tokens turns it into matrix products. With q
# scaled by K^-½, G_i the sum of g from the chunk's start up to and including row i, and S₀ the
# state that enters:
#
#     A_qk[i,j] = Σ_c q_ic k_jc exp(G_ic − G_jc) for j ≤ i;    A_kk[i,j] likewise with k, for j < i
#     (I + Diag(β) A_kk) U = Diag(β) (V − K⁺ S₀)               K⁺ = K ⊙ e^G,  Q⁺ = Q ⊙ e^G
#     O = Q⁺ S₀ + A_qk U
#     S_C = Diag(e^{G_C}) S₀ + K⁻ᵀ U                           K⁻ = K ⊙ e^{G_C − G}
#
# Q, K, V, U, O are the chunk's rows as matrices, C × width; the width itself is only in K^-½. Row i
# of U is β times the error that token i corrects.

def kda_chunk_plain(q, k, v, g, beta, state=None, chunk=64):
    """
    The chunk form for reading and for testing: kda_recurrent's arguments and results, any T. It
    keeps chunk² · K numbers per head and chunk. Use fp64: it is a yardstick.
    """
    if chunk < 1:
        raise ValueError(f"chunk: expected at least one token, got {chunk}")
    *tokens, S, dtype = _arguments(q, k, v, g, beta, state)
    o = []
    for q, k, v, g, beta in zip(*(x.transpose(1, 2).split(chunk, dim=2) for x in tokens)):
        # from here on they are one chunk's: (B, H, C, K or V), beta (B, H, C)
        C, K = q.shape[-2:]
        q, beta, G = q * K ** -0.5, beta.unsqueeze(-1), g.cumsum(dim=2)
        later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)
        # (B, H, C, C, K): exp(G_i − G_j), masked before the exp: an inf would make a gradient NaN
        E = (G.unsqueeze(3) - G.unsqueeze(2)).masked_fill(later, -math.inf).exp()
        A_qk = torch.einsum("bhik,bhjk,bhijk->bhij", q, k, E)
        A_kk = torch.einsum("bhik,bhjk,bhijk->bhij", k, k, E).tril(-1)
        R = beta * (v - (k * G.exp()) @ S)
        # (I + Diag(β) A_kk) U = R; unitriangular adds the I
        U = torch.linalg.solve_triangular(beta * A_kk, R, upper=False, unitriangular=True)
        o.append((q * G.exp()) @ S + A_qk @ U)
        G_C = G[:, :, -1:]  # (B, H, 1, K)
        S = G_C.exp().mT * S + (k * (G_C - G).exp()).mT @ U
    return torch.cat(o, dim=2).transpose(1, 2).to(dtype), S


# --------------------------------------------------------------------------------------------------
# 3. The fast form: the same, with tiles so that fp32 holds, and its backward by hand.
#
# exp(G_i − G_j) = exp(G_i − a) · exp(a − G_j), a row and a column factor around an anchor a, turns
# A into a matrix product. As e^−G overflows within 64 tokens, rows go by tiles of 16, each anchored
# at its FIRST row: columns of earlier tiles have factors ≤ 1, those of the tile itself stay
# below e^75 at g = −5. (With an anchor further down, later tokens would change earlier outputs by
# rounding.) From one tile to the next, column factors are multiplied by exp(a_next − a) ≤ 1.
# A tile stacks 16 rows of q on 16 of k. Exponents are in base 2, which is faster.

# With g ≥ −5.9 the factors of a tile span at most e^(15·5.9) < 2^128. SHIFT moves 2^24 from columns
# to rows: exact, and it keeps both, earlier tiles' columns too, clear of fp32's ends.
TILE, SHIFT, LOG2E = 16, 24, math.log2(math.e)


@torch.compiler.disable  # torch.compile would take it apart, and be slower
def kda_chunk(q, k, v, g, beta, state=None, chunk=64):
    """
    kda_recurrent's arguments and results, in fp32 inside; differentiable once in everything.
    chunk: tokens at a time, a multiple of 16. A longer chunk has fewer sequential steps and more
    work per token. g must lie in [−5.9, 0]: beyond that the factors of a tile leave fp32.
    """
    q, k, v, g, beta, S, dtype = _arguments(q, k, v, g, beta, state)
    if not isinstance(chunk, int) or chunk < TILE or chunk % TILE:
        raise ValueError(f"chunk: expected a multiple of {TILE}, got {chunk}")
    low, high = g.detach().aminmax()
    if low < -5.9001 or high > 0:  # NaN passes, so that it shows where it began and not here
        raise ValueError(f"g: expected log decays in [-5.9, 0], got {low:.4g} to {high:.4g}")
    C = min(chunk, -(-q.shape[1] // TILE) * TILE)
    with torch.autocast(q.device.type, enabled=False):
        o, S = _Chunk.apply(C, S, q, k, v, g, beta.unsqueeze(-1))
    return o.to(dtype), S


class _Chunk(torch.autograd.Function):
    """tokens: q, k, v, g (B, T, H, ·) and beta (B, T, H, 1), all in fp32 or all in fp64."""

    @staticmethod
    def forward(ctx, C, state, *tokens):
        B, T, H, K = tokens[0].shape
        q, k, v, g, beta = (_to_chunks(x, C) for x in tokens)  # (N, BH, C, ·)
        beta = beta.clamp(min=1e-30)  # backward divides by it
        (N, BH), V = q.shape[:2], v.shape[-1]
        # Decays: tile's anchor → row (row), chunk's start → anchor (start), anchor → anchor (step),
        # last anchor → chunk's end (end), all of the chunk (total)
        row, start, step, end, total = _decays(g)
        rows, A_qk, A_kk, columns = _scores(q, k, row, step)
        # Q⁺ (still without K^-½), K⁺ and K⁻: (N, BH, C, K)
        q_plus, k_plus = ((x * start).view(N, BH, C, K) for x in rows.unbind(3))
        k_minus = columns.mul_(end)

        # (I + Diag(β) A_kk)^-1, never by squaring: if a chunk's keys are alike, powers reach 1e9
        identity = torch.eye(C, dtype=q.dtype, device=q.device).expand_as(A_kk)
        inverse = torch.linalg.solve_triangular(A_kk.mul_(beta), identity,
                                                upper=False, unitriangular=True)
        inverse_beta = inverse * beta.mT  # (I + Diag(β) A_kk)^-1 Diag(β), (N, BH, C, C)
        W, U = inverse_beta @ k_plus, inverse_beta @ v  # (N, BH, C, K), (N, BH, C, V)

        # U −= W S₀, and the state: the only sequential part, chunk by chunk
        S = q.new_empty(N + 1, BH, K, V)
        S[0] = state.reshape(BH, K, V)
        by_chunk = zip(*(x.unbind(0) for x in (U, W, S[:-1], S[1:], total, k_minus.mT)))
        for u, w, s, s_next, decay, keys in by_chunk:
            u.baddbmm_(w, s, alpha=-1)
            torch.mul(s, decay, out=s_next).baddbmm_(keys, u)

        o = _mm(A_qk, U, _mm(q_plus, S[:-1], alpha=K ** -0.5), alpha=K ** -0.5)
        ctx.save_for_backward(k, beta, row, start, step, end, total,
                              rows, q_plus, k_minus, A_qk, inverse, W, U, S)
        ctx.sizes = B, T, H, C
        return _from_chunks(o, B, T), S[-1].view(B, H, K, V).clone()

    @by_hand
    def backward(ctx, do_tokens, dstate):
        (k, beta, row, start, step, end, total,
         rows, q_plus, k_minus, A_qk, inverse, W, U, S) = ctx.saved_tensors
        B, T, H, C = ctx.sizes
        N, BH, K, V = k.shape[0], k.shape[1], k.shape[-1], U.shape[-1]
        scale, by_tile = K ** -0.5, (N, BH, C // TILE, TILE)
        do = _to_chunks(do_tokens, C)  # (N, BH, C, V)

        # dU = A_qkᵀ dO + K⁻ dS_C,  dS₀ = Diag(e^{G_C}) dS_C + Q⁺ᵀ dO − Wᵀ dU: last chunk first.
        # S₀, S_C: the states that enter and leave a chunk. dS[c] is of the one that enters chunk c
        dU = _mm(A_qk.mT, do, alpha=scale)
        dS = k.new_empty(N + 1, BH, K, V)
        torch.bmm(q_plus.mT.flatten(0, 1), do.flatten(0, 1), out=dS[:-1].flatten(0, 1)).mul_(scale)
        dS[N] = dstate.reshape(BH, K, V)
        by_chunk = zip(*(x.unbind(0) for x in (dU, W.mT, dS[:-1], dS[1:], total, k_minus)))
        for du, w, ds, ds_next, decay, keys in reversed(list(by_chunk)):
            du.baddbmm_(keys, ds_next)
            ds.addcmul_(ds_next, decay).baddbmm_(w, du, alpha=-1)

        # dR = (I + Diag(β) A_kk)^-ᵀ dU,  dV = β ⊙ dR,  dβ_i = dR_i · U_i / β_i: U_i / β_i is the
        # error that token i corrects
        dR = inverse.mT @ dU
        dbeta = (dR * U).sum(-1, keepdim=True) / beta
        dv = dR.mul_(beta)

        # On stacked rows, dout = [dO; −dV] gives both: dA_qk = tril(dO Uᵀ),
        # dA_kk = −strict_tril(dV Uᵀ), and dQ⁺ = dO S₀ᵀ, dK⁺ = −dV S₀ᵀ
        dout = k.new_empty(N, BH, C // TILE, 2, TILE, V)
        torch.mul(do.view(*by_tile, V), scale, out=dout[:, :, :, 0])
        torch.neg(dv.view(*by_tile, V), out=dout[:, :, :, 1])
        dout = dout.view(N, BH, 2 * C, V)
        dA = _mm(dout, U.mT).view(N, BH, C // TILE, 2 * TILE, C)
        drows = _mm(dout, S[:-1].mT).view(N, BH, C // TILE, 2 * TILE, K).mul_(start)

        # dq = dQ⁺ ⊙ e^G + Σ_j dA_qk[i,j] k_j E_ij, and dk_row likewise. `columns` has the column
        # factors in it; the factor `row` comes at the end
        i = torch.arange(TILE, device=k.device)
        causal = torch.cat([i[:, None] >= i, i[:, None] > i]).to(k.dtype)  # a tile's, (32, 16)
        for tile, columns in _columns(k, row, step):
            dA[:, :, tile, :, tile * TILE:(tile + 1) * TILE] *= causal
            _mm(dA[:, :, tile, :, :(tile + 1) * TILE], columns, drows[:, :, tile])

        # dk_col = Σ_i (dA_qk[i,j] q_i + dA_kk[i,j] k_i) E_ij + dK⁻ ⊙ e^{G_C − G},  dK⁻ = U dS_Cᵀ.
        # dG_C is the last row's share: Σ_j K⁻_j ⊙ dK⁻_j + e^{G_C} ⊙ Σ_v S₀ ⊙ dS_C
        dcol = _mm(U, dS[1:].mT)  # (N, BH, C, K)
        dG_C = (k_minus * dcol).sum(2) + dS[1:].mul_(S[:-1]).sum(-1) * total.squeeze(-1)
        dcol.mul_(end)
        # dcol is measured at each tile's own anchor; one tile back, it takes a factor `step`
        for tile in reversed(range(C // TILE)):
            seen = dcol[:, :, :(tile + 1) * TILE]
            _mm(dA[:, :, tile, :, :(tile + 1) * TILE].mT, rows[:, :, tile].flatten(2, 3), seen)
            if tile > 0:
                dcol[:, :, :tile * TILE] *= step[:, :, tile - 1]
        dcol = dcol.view(*by_tile, K).div_(row)

        # dG = q ⊙ dq + k ⊙ dk_row − k ⊙ dk_col; dg sums those of all later rows of the chunk
        dq_row, dk_row = drows.view(*rows.shape).unbind(3)  # (N, BH, tiles, 16, K)
        q_row, k_row = rows.unbind(3)
        dq = dq_row * row
        dG = dq_row.mul_(q_row).addcmul_(k_row, dk_row).addcmul_(k.view_as(dcol), dcol, value=-1)
        dG = dG.reshape(N, BH, C, K)
        dG[:, :, -1] += dG_C
        dk = dcol.addcmul_(dk_row, row)
        dg = torch.ones(C, C, dtype=k.dtype, device=k.device).triu() @ dG
        dtokens = (_from_chunks(x.view(N, BH, C, -1), B, T) for x in (dq, dk, dv, dg, dbeta))
        return None, dS[0].view(B, H, K, V), *dtokens


def _decays(g):
    """
    g (N, BH, C, K) → the decays, from the running sum G in base 2 and the tiles' anchors a:

        row    2^(G − a + SHIFT)      from its tile's anchor to a row    (N, BH, tiles, 16, K)
        start  2^(a − SHIFT)          from the chunk's start to anchors  (N, BH, tiles, 1, K)
        step   2^(a_next − a)         from anchor to anchor              (N, BH, tiles − 1, 1, K)
        end    2^(G_C − a + SHIFT)    from the last anchor to the end    (N, BH, 1, K)
        total  2^G_C                  over the whole chunk               (N, BH, K, 1)
    """
    N, BH, C, K = g.shape
    # a running sum in base 2, as a product: faster than cumsum
    G = torch.full((C, C), LOG2E, dtype=g.dtype, device=g.device).tril() @ g
    a = G[:, :, ::TILE]  # (N, BH, tiles, K)
    row = (G.view(N, BH, -1, TILE, K) - (a - SHIFT).unsqueeze(3)).exp2_()
    start = _flush((a - SHIFT).exp2_()).unsqueeze(3)
    step = (a[:, :, 1:] - a[:, :, :-1]).exp2_().unsqueeze(3)
    end = (G[:, :, -1:] - a[:, :, -1:] + SHIFT).exp2_()
    total = _flush(G[:, :, -1].exp2()).unsqueeze(-1)
    return row, start, step, end, total


def _scores(q, k, row, step):
    """
    → the stacked rows (N, BH, tiles, 2, 16, K), A_qk and A_kk (N, BH, C, C), and the keys as the
    last tile sees them (N, BH, C, K). q is without its scale here: o gets it instead.
    """
    N, BH, C, K = q.shape
    rows = q.new_empty(N, BH, C // TILE, 2, TILE, K)
    torch.mul(q.view_as(row), row, out=rows[:, :, :, 0])
    torch.mul(k.view_as(row), row, out=rows[:, :, :, 1])
    i, zero = torch.arange(C, device=q.device), q.new_zeros(())
    at_or_before, before = i[:, None] >= i, i[:, None] > i  # (C, C)
    new = q.new_zeros if C > TILE else q.new_empty
    A_qk, A_kk = new(N, BH, C, C), new(N, BH, C, C)
    for tile, columns in _columns(k, row, step):
        A = _mm(rows[:, :, tile].flatten(2, 3), columns.mT)  # (N, BH, 32, 16 · (tile + 1))
        part = ..., slice(tile * TILE, (tile + 1) * TILE), slice(0, (tile + 1) * TILE)
        # `where`, not a mask product: entries above the diagonal may be inf
        torch.where(at_or_before[part], A[:, :, :TILE], zero, out=A_qk[part])
        torch.where(before[part], A[:, :, TILE:], zero, out=A_kk[part])
    return rows, A_qk, A_kk, columns


def _columns(k, row, step):
    """
    Yields for each tile its number and the keys up to its end, times the column factors of its
    anchor: (N, BH, 16 · (tile + 1), K), one buffer that the next tile overwrites.
    """
    columns = torch.empty_like(k)
    for tile in range(row.shape[2]):
        own = slice(tile * TILE, (tile + 1) * TILE)
        if tile > 0:
            _flush(columns[:, :, :tile * TILE].mul_(step[:, :, tile - 1]))
        torch.div(k[:, :, own], row[:, :, tile], out=columns[:, :, own])
        yield tile, columns[:, :, :(tile + 1) * TILE]


def _flush(x):
    """
    In place: fp32 below 2^-80, a decay of 2^-56 or less, becomes zero. Beside terms near 1 no sum
    sees it, and as a subnormal number it could cost ten times the time on some CPUs.
    """
    if x.dtype == torch.float32:
        torch.ops.aten.hardshrink.out(x, 2.0 ** -80, out=x)
    return x


def _mm(a, b, out=None, alpha=1):
    """alpha · a b for (N, BH, ·, ·), added to `out` if given: one pass where * and + take three."""
    batch, a, b = a.shape[:2], a.flatten(0, 1), b.flatten(0, 1)
    if out is None and alpha == 1:
        return torch.bmm(a, b).unflatten(0, batch)
    if out is None:
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=alpha).unflatten(0, batch)
    if out.is_contiguous():
        out.flatten(0, 1).baddbmm_(a, b, alpha=alpha)
        return out
    return out.add_(torch.bmm(a, b).view_as(out), alpha=alpha)  # baddbmm_ would loop over it


def _to_chunks(x, C):
    """(B, T, H, ·) → (N, BH, C, ·). Zeros fill the last chunk: k = β = g = 0 changes nothing."""
    if x.shape[1] % C:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).contiguous().flatten(1, 2)


def _from_chunks(x, B, T):
    """(N, BH, C, ·) → (B, T, H, ·)."""
    N, BH, C, D = x.shape
    x = x.reshape(N, B, BH // B, C, D).permute(1, 0, 3, 2, 4)  # (B, N, C, H, D)
    return x.reshape(B, N * C, BH // B, D)[:, :T]


# --------------------------------------------------------------------------------------------------
# Segments (§5.1). The state that leaves a segment is affine in the one that enters: S ↦ S̃ + P S.
# So the segments of a long sequence can be worked on side by side, and composed afterwards.

def kda_segment_definition(k, v, g, beta):
    """
    A segment's effect on the state: → P (B, H, K, K), a run from the identity with v = 0, and S̃
    (B, H, K, V), a run from zero. The query is not used: any of its shape will do.
    """
    B, T, H, K = k.shape
    identity = torch.eye(K, device=k.device).expand(B, H, K, K)
    P = kda_recurrent(k, k, torch.zeros_like(k), g, beta, identity)[1]
    return P, kda_recurrent(k, k, v, g, beta)[1]


def kda_segment(k, v, g, beta):
    """The same in one fast run: columns of a state do not interact, so [I, 0] becomes [P, S̃]."""
    (B, _, H, K), V = k.shape, v.shape[-1]
    identity = torch.eye(K, dtype=fp32(k).dtype, device=k.device).expand(B, H, K, K)
    state = F.pad(identity, (0, V))  # (B, H, K, K + V)
    values = torch.cat([torch.zeros_like(k), v.to(k.dtype)], dim=-1)  # (B, T, H, K + V)
    if kernels and kernels.fits(k, values):
        last = kernels.kda(k, k, values, g, beta, state, look_at_g=False, output=False)[1]
    else:
        last = kda(k, k, values, g, beta, state)[1]
    return last.split([K, V], dim=-1)


def compose(P, own, state):
    """
    L segments in a row: P (L, …, K, K), own (L, …, K, V): their S̃, state (…, K, V): what enters
    → the states at their borders (L + 1, …, K, V), the entering one first.
    """
    states = [state]
    with torch.autocast(state.device.type, enabled=False):  # states stay in fp32
        for p, s in zip(P, own):
            states.append(s + p @ states[-1])
    return torch.stack(states)


# --------------------------------------------------------------------------------------------------
# The choice between the forms

def kda(q, k, v, g, beta, state=None):
    """
    kda_recurrent's arguments and results, the fastest way: Triton on a GPU if it can take these
    widths; else the recurrence for a token or two, the plain chunk for a few more without gradients
    (a model reads the drafts of speculative decoding so), and tiles. g must lie in [−5.9, 0];
    Triton does not look. Its kernel for one token without gradients changes `state` in place; all
    else returns a new one.
    """
    if kernels and kernels.fits(q, v):
        if q.shape[1] <= TILE and state is not None and not torch.is_grad_enabled():
            new_state = state if q.shape[1] == 1 else torch.empty_like(state)
            return kernels.kda_decode(q, k, v, g, beta, state, new_state), new_state
        return kernels.kda(q, k, v, g, beta, state, look_at_g=False)
    if q.shape[1] <= 2:
        return kda_recurrent(q, k, v, g, beta, state)
    if q.shape[1] <= TILE and not torch.is_grad_enabled():
        return kda_chunk_plain(q, k, v, g, beta, state, chunk=TILE)
    # CPUs are faster with short chunks. Not by batch size: a row must not depend on its neighbours
    return kda_chunk(q, k, v, g, beta, state, chunk=64 if q.is_cuda else 16)


# --------------------------------------------------------------------------------------------------
# The layer

class KDA(nn.Module):
    """
    q, k, v = SiLU(conv(W x)), then q and k to unit length per head;    β = sigmoid(W_β x)
    g = g_min · sigmoid(exp(A_log) · (W_up W_down x + dt_bias)) in fp32, so that g_min < g < 0
    y = W_o [sigmoid(W_g x) ⊙ RMSNorm_head(o)], with one norm weight of width V for all heads

    x (B, T, d) → (B, T, d). cache: a dict from new_cache, updated in place; the result does not
    depend on how a sequence is cut into calls. Parameters have the released model's names.
    """

    def __init__(self, config):
        super().__init__()
        d, self.H = config.n_embd, config.n_head
        self.K, self.V = config.kda_key_dim, config.kda_value_dim
        self.g_min, self.softplus = config.g_min, config.kda_gate == "softplus"
        self.context_group = None  # the ranks that share every sequence; set from outside
        self.q_proj = nn.Linear(d, self.H * self.K, bias=False)
        self.k_proj = nn.Linear(d, self.H * self.K, bias=False)
        self.v_proj = nn.Linear(d, self.H * self.V, bias=False)
        self.q_conv1d = ShortConv(self.H * self.K, config.conv_size)
        self.k_conv1d = ShortConv(self.H * self.K, config.conv_size)
        self.v_conv1d = ShortConv(self.H * self.V, config.conv_size)
        self.f_a_proj = nn.Linear(d, self.K, bias=False)  # W_down: the rank is K
        self.f_b_proj = nn.Linear(self.K, self.H * self.K, bias=False)  # W_up
        self.A_log = nn.Parameter(torch.empty(self.H))
        self.dt_bias = nn.Parameter(torch.empty(self.H * self.K))
        self.b_proj = nn.Linear(d, self.H, bias=False)
        self.g_proj = nn.Linear(d, self.H * self.V, bias=False)
        self.o_norm = RMSNorm(self.V, config.rms_norm_eps)
        self.o_proj = nn.Linear(self.H * self.V, d, bias=False)

    def forward(self, x, cache=None):
        *inputs, low, b, gate = linears(x, self.q_proj, self.k_proj, self.v_proj, self.f_a_proj,
                                        self.b_proj, self.g_proj)
        raw = self.f_b_proj(low)  # (B, T, H·K)
        tails = cache["tails"] if cache else self.tails_before(inputs)
        (q, k, v, g, beta), new_tails = self.arguments(inputs, raw, b, tails)
        state = cache["state"] if cache else self.state_before(k, v, g, beta)
        o, new_state = kda(q, k, v, g, beta, state)
        if cache:
            if "window" in cache:
                cache["window"] = state, tails, *(y.detach() for y in (*inputs, k, v, g, beta))
            cache["state"] = new_state.detach()
            cache["tails"] = new_tails
        if triton_takes(o):
            o = kernels.norm(o, self.o_norm.weight, self.o_norm.eps, gate).flatten(2)
        else:
            o = gate.sigmoid() * self.o_norm(o).flatten(2)
        return self.o_proj(o)  # of (B, T, H·V)

    def arguments(self, inputs, raw, b, tails):
        """What kda takes, from x's projections. → (q, k, v, g, beta), and the new tails."""
        if triton_takes(raw) and not self.softplus:
            return kernels.kda_arguments(inputs, raw, b, tails, [c.weight for c in self._convs()],
                                         self.A_log, self.dt_bias, self.g_min)
        convolved = [conv(y, tail) for conv, y, tail in zip(self._convs(), inputs, tails)]
        q, k, v = (y.unflatten(-1, (self.H, -1)) for y, _ in convolved)  # (B, T, H, ·)
        beta = fp32(b).sigmoid()  # (B, T, H)
        return (unit(q), unit(k), v, self.decay(raw), beta), tuple(tail for _, tail in convolved)

    def log_decay(self, x):
        """x (B, T, d) → g (B, T, H, K), fp32 (fp64 from an fp64 model)."""
        return self.decay(self.f_b_proj(self.f_a_proj(x)))

    def decay(self, raw):
        z = (fp32(raw) + self.dt_bias).unflatten(-1, (self.H, self.K))
        slope = self.A_log.exp().unsqueeze(-1)
        if self.softplus:  # Kimi Linear's gate, cut off at the tiles' limit: e^-5 keeps 0.7%
            return (-slope * F.softplus(z)).clamp(min=self.g_min)
        return self.g_min * torch.sigmoid(slope * z)

    def new_cache(self, batch_size):
        """The state (B, H, K, V) in fp32 and each convolution's last inputs, all zeros."""
        device = self.A_log.device
        shapes = [(batch_size, c.weight.shape[-1] - 1, c.weight.shape[0]) for c in self._convs()]
        return dict(state=torch.zeros(batch_size, self.H, self.K, self.V, device=device),
                    tails=[torch.zeros(shape, device=device) for shape in shapes])

    @torch.no_grad()
    def keep(self, cache, count):
        """
        Take back the last tokens of the last call (§5.4.2): speculative decoding reads a window of
        drafts and keeps the accepted ones. After cache["window"] = None, every call leaves there
        what this needs: the state and tails before the window, and its projected inputs.
        count (B,), int64: tokens of the window that each row keeps, at least 1. Where every row
        keeps the whole window, there is nothing to take back.
        """
        if cache.get("window") is None:
            raise ValueError('cache["window"]: set it to None before the call that keep cuts short')
        state, tails, *inputs, k, v, g, beta = cache["window"]
        B, T = k.shape[:2]
        if T > 1 and kernels and kernels.fits(k, v):
            kernels.kda_decode(k, k, v, g, beta, state, kept=count)
            cache["state"] = state
        elif T > 1:  # with g = β = 0, a token leaves the state alone
            k, v, g, beta = (y[:, :count.max()] for y in (k, v, g, beta))
            rejected = torch.arange(k.shape[1], device=k.device) >= count.unsqueeze(1)  # (B, T)
            beta = beta.masked_fill(rejected.unsqueeze(-1), 0)
            g = g.masked_fill(rejected[..., None, None], 0)
            cache["state"] = kda(k, k, v, g, beta, state)[1]
        rows = torch.arange(B, device=k.device).unsqueeze(1)
        at = count.unsqueeze(1) + torch.arange(tails[0].shape[1], device=k.device)  # (B, width − 1)
        read = [torch.cat([tail.to(y.dtype), y], dim=1) for tail, y in zip(tails, inputs)]
        cache["tails"], cache["window"] = tuple(y[rows, at] for y in read), None

    def _convs(self):
        return self.q_conv1d, self.k_conv1d, self.v_conv1d

    def _apply(self, fn, recurse=True):
        """A cast must not round A_log, dt_bias, the head norm and the convolutions."""
        weights = [conv.weight for conv in self._convs()]
        kept = self.A_log, self.dt_bias, self.o_norm.weight, *weights
        return super()._apply(keep_dtype(fn, *kept), recurse)

    # What came before x if there is no cache: nothing, or with context parallelism (§5.1.2) the
    # earlier ranks' segments of the sequence, which are at least as long as a convolution's tail.

    def tails_before(self, inputs):
        """inputs: of the three convolutions, (B, T, D) each. → their tails from the rank before."""
        if not self.context_group:
            return [None] * 3
        past = self.q_conv1d.weight.shape[-1] - 1
        last = torch.cat(inputs, dim=-1)[:, -past:]  # (B, past, D of all)
        came = pass_on(last, self.context_group, lambda rank, to: to == rank + 1)
        return came.sum(0).split([y.shape[-1] for y in inputs], dim=-1)  # zeros on the first rank

    def state_before(self, k, v, g, beta):
        """Every rank sends its segment's effect to all later ones. → the state that enters here."""
        if not self.context_group:
            return None
        ours = torch.cat(kda_segment(k, v, g, beta), dim=-1)  # (B, H, K, K + V)
        came = pass_on(ours, self.context_group, operator.lt)
        P, own = came.split([self.K, self.V], dim=-1)  # (rank, B, H, K, ·)
        zeros = own[:0].sum(0)  # in the graph: the first rank goes backward through it, too
        return compose(P, own, zeros)[-1]


class ShortConv(nn.Module):
    """Causal depthwise convolution without bias, then SiLU. weight (D, 1, width), as released."""

    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(self, x, tail=None):
        """
        x (B, T, D); tail (B, width − 1, D): the inputs before x, None for zeros.
        → y (B, T, D), and the new tail (None without one).
        """
        w = self.weight.squeeze(1)
        if tail is None:
            return _ShortConv.apply(x, w), None
        past = tail.shape[1]
        longer = torch.cat([tail.to(x.dtype), x], dim=1)  # (B, width − 1 + T, D)
        new_tail = longer[:, x.shape[1]:].detach().clone()  # a view would keep all of `longer`
        return _ShortConv.apply(longer, w)[:, past:], new_tail


class _ShortConv(torch.autograd.Function):
    """
    y = SiLU(Σ_s w_s x_{t−s}) per channel: x (B, T, D) after zeros, w (D, width), newest input last.
    Shifted products: on a CPU, F.conv1d takes up to twice as long for so narrow a kernel.
    """

    @staticmethod
    def forward(ctx, x, w):
        taps = w.t().flip(0).contiguous()  # (width, D): lag 0, 1, 2, …
        y = x * taps[0]
        for lag in range(1, len(taps)):
            y[:, lag:].addcmul_(x[:, :-lag], taps[lag])
        ctx.save_for_backward(x, taps, y)
        return F.silu(y).to(x.dtype)

    @by_hand
    def backward(ctx, dout):
        x, taps, y = ctx.saved_tensors
        dy = torch.ops.aten.silu_backward(dout.to(y.dtype), y)  # (B, T, D)
        dx, dtaps = dy * taps[0], torch.empty_like(taps)
        dtaps[0] = (dy * x).sum((0, 1))
        for lag in range(1, len(taps)):
            dx[:, :-lag].addcmul_(dy[:, lag:], taps[lag])
            dtaps[lag] = (dy[:, lag:] * x[:, :-lag]).sum((0, 1))
        return dx.to(x.dtype), dtaps.flip(0).t()


def unit(x):
    """Every head's vector to length 1, in fp32 inside: (B, T, H, K) → the same shape and dtype."""
    return _Unit.apply(fp32(x)).to(x.dtype)


class _Unit(torch.autograd.Function):
    """x / sqrt(Σ x² + 1e-6) over the last axis."""

    @staticmethod
    def forward(ctx, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().add_(1e-6).rsqrt_()  # (..., 1)
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @by_hand
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        along = (y * dy).sum(-1, keepdim=True)  # dy along y counts for nothing: y keeps its length
        return torch.addcmul(dy, y, along, value=-1).mul_(r)
