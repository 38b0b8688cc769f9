"""
KDA as Triton kernels, forward, backward and decode (report §2.1.1, §5.1); the algebra is that of kda.py, where the slow definition is.

    kda(q, k, v, g, beta, state=None) → o, state         kda_chunk's contract, with Triton in both directions
    kda_decode(q, k, v, g, beta, state) → o              one token; the state is changed in place
    situ(g, u, beta, linear_beta), mix(u, eps, *sources) the element-wise work that would otherwise be a dozen passes each
    python kernels.py                                    compiles every kernel for sm_80, 89, 90, 100 and gfx942, without a GPU

A sequence goes in chunks of C = 64 tokens. Forward is four kernels; only the third is sequential:

    scores  one program per 16 rows of a chunk, and head: A_qk and L = Diag(β) A_kk
    solve   one program per chunk and head: (I + L)^-1, from it W and U₀, and the scaled copies Q⁺ and K⁻
    states  one program per head and block of V: carries the state S over the chunks, U = U₀ − W S, S ← Diag(e^{G_C}) S + K⁻ᵀ U
    output  one program per chunk, head and block of V: O = Q⁺ S + A_qk U

Backward keeps nothing but the arguments (0 bytes a token beyond them): it runs the first three again, and then

    dstates one program per head and block of V: dU = A_qkᵀ dO + K⁻ dS, dS ← Diag(e^{G_C}) dS + Q⁺ᵀ dO − Wᵀ dU, last chunk first
    dsolve  one program per chunk and head: through the triangular solve: dv, dβ, dA_qk, dA_kk
    dinputs one program per chunk, head and block of K: dq, dk, dg

In the formulas Q⁺ = K^-½ Q ⊙ e^G, K⁺ = K ⊙ e^G, K⁻ = K ⊙ e^{G_C − G}, R = Diag(β)(V − K⁺ S).

On paper, for a token and head at K = V = 128, C = 64, bf16 (g fp32). Operations: A_qk, A_kk, W, U₀ and A_qk U 16k each, the merges of the
inverse 3k in three tf32 products, the three products with S 33k each: 190k. Bytes: the least is q, k, v, g, β in and o out, 1,540; these
kernels move 1,028 + 384 (scores, its columns' re-reads from L2 not counted), 1,540 + 1,160 (solve), 776 + 768 (states) and 1,152 + 256
(output): 7,060. At T = 4,096, H = 64 (262,144 tokens × heads), 4.3 TB/s and 780 TFLOP/s: 0.06 ms of operations, 0.09 ms of least bytes,
0.43 ms of bytes moved. Nobody has timed these kernels on a GPU yet.
"""
import math
import os

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
C = 64                                                # tokens of a chunk
LOG2E = tl.constexpr(math.log2(math.e))
SHIFT = tl.constexpr(64.0)                            # splits a tile's exponents evenly between its row and column factors: 2^±64 at g = −5.9


# ----------------------------------------------------------------------------------------------------------------------
# Pieces that several kernels share. m counts sequences × heads; a token tensor is (B, T, H, D), a chunk tensor (M, N, rows, D).

@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if INTERPRETED:                                                        # which would multiply the bits of bf16 numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _tokens(m, t, T, H, D, columns):
    """Offsets and mask of the rows t of a token tensor."""
    at = ((m // H).to(tl.int64) * T + t) * H + m % H
    return at[:, None] * D + columns[None, :], (t[:, None] < T) & (columns[None, :] < D)


@triton.jit
def _matrix(index, rows, R, columns, D):
    """Offsets and mask in the index-th matrix (R, D) of a chunk tensor."""
    return (index.to(tl.int64) * R + rows[:, None]) * D + columns[None, :], (rows[:, None] < R) & (columns[None, :] < D)


@triton.jit
def _running_sum(g, at, mask):
    """G (C, BK), the sum of the log decays up to each row, in base 2, and its last row (BK)."""
    G = tl.cumsum(tl.load(g + at, mask=mask, other=0.0).to(tl.float32) * LOG2E, axis=0)
    return G, tl.sum(tl.where((tl.arange(0, G.shape[0]) == G.shape[0] - 1)[:, None], G, 0.0), axis=0)


@triton.jit
def _factors(G, tile, C: tl.constexpr, BK: tl.constexpr):
    """exp2(G_i − G_j) for the 16 rows i of a tile as row (16, BK) · col (C, BK), anchored at the tile's first row. col is zero behind the tile."""
    n: tl.constexpr = C // 16
    G_tile = tl.sum(tl.where((tl.arange(0, n) == tile)[:, None, None], tl.reshape(G, (n, 16, BK)), 0.0), axis=0)
    anchor = tl.sum(tl.where((tl.arange(0, 16) == 0)[:, None], G_tile, 0.0), axis=0)                     # (BK)
    seen = tl.arange(0, C) < (tile + 1) * 16
    col = tl.exp2(tl.where(seen[:, None], anchor[None, :] - G - SHIFT, float("-inf")))                   # masked before the exp
    return tl.exp2(G_tile - anchor[None, :] + SHIFT), col


# ----------------------------------------------------------------------------------------------------------------------
# Forward

@triton.jit
def scores(q, k, g, beta, A_qk, L, T, H, N, K, scale, C: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr):
    """A_qk and L = Diag(β) A_kk, 16 rows of a chunk. Grid (N · C/16, M)."""
    m, chunk, tile = tl.program_id(1), tl.program_id(0) // (C // 16), tl.program_id(0) % (C // 16)
    j, rows = tl.arange(0, C), tile * 16 + tl.arange(0, 16)
    a_qk = tl.zeros((16, C), tl.float32)
    a_kk = tl.zeros((16, C), tl.float32)
    for start in range(0, K, BK):
        columns = start + tl.arange(0, BK)
        at, mask = _tokens(m, chunk * C + j, T, H, K, columns)
        G, _ = _running_sum(g, at, mask)
        row, col = _factors(G, tile, C, BK)
        seen_k = tl.trans(tl.load(k + at, mask=mask, other=0.0).to(tl.float32) * col)                    # (BK, C)
        at, mask = _tokens(m, chunk * C + rows, T, H, K, columns)
        a_qk += _dot(tl.load(q + at, mask=mask, other=0.0).to(tl.float32) * row, seen_k, TILES)
        a_kk += _dot(tl.load(k + at, mask=mask, other=0.0).to(tl.float32) * row, seen_k, TILES)
    by_token, here = _tokens(m, chunk * C + rows, T, H, 1, tl.arange(0, 1))
    a_kk *= tl.maximum(tl.load(beta + by_token, mask=here, other=0.0).to(tl.float32), 1e-30)             # backward divides by β
    at, _ = _matrix(m * N + chunk, rows, C, j, C)
    tl.store(A_qk + at, tl.where(rows[:, None] >= j[None, :], a_qk * scale, 0.0).to(A_qk.dtype.element_ty))
    tl.store(L + at, tl.where(rows[:, None] > j[None, :], a_kk, 0.0))


@triton.jit
def _merge(D, L, C: tl.constexpr, size: tl.constexpr, MERGE: tl.constexpr):
    """Inverted diagonal blocks D (C/size, size, size) of I + L → those of twice the size, exactly: [[A, 0], [X, B]]^-1 = [[A^-1, 0], [−B^-1 X A^-1, B^-1]]."""
    pairs: tl.constexpr = C // size // 2
    p, low = tl.arange(0, pairs), tl.arange(0, 2) == 1
    D = tl.reshape(D, (pairs, 2, size, size))
    top_left = tl.sum(tl.where(low[None, :, None, None], 0.0, D), axis=1)                                # (pairs, size, size)
    low_right = tl.sum(tl.where(low[None, :, None, None], D, 0.0), axis=1)
    own = (p[:, None] == p[None, :])[:, None, None, :, None] & low[None, :, None, None, None]            # the block row's second half …
    X = tl.sum(tl.sum(tl.where(own, tl.reshape(L, (pairs, 2, size, pairs, 2 * size)), 0.0), axis=3), axis=1)          # (pairs, size, 2 size)
    X = tl.sum(tl.where(low[None, None, :, None], 0.0, tl.reshape(X, (pairs, size, 2, size))), axis=2)   # … and its first columns
    X = -_dot(_dot(low_right, X, MERGE), top_left, MERGE)
    upper = tl.where(low[None, None, :, None], 0.0, top_left[:, :, None, :])                             # (pairs, size, 2, size)
    lower = tl.where(low[None, None, :, None], low_right[:, :, None, :], X[:, :, None, :])
    out = tl.where(low[None, :, None, None, None], lower[:, None], upper[:, None])                       # (pairs, 2, size, 2, size)
    return tl.reshape(out, (pairs, 2 * size, 2 * size))


@triton.jit
def solve(q, k, v, g, beta, L, inverse, W, U0, q_plus, k_minus, total, T, H, N, K, V, scale,
          C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, MERGE: tl.constexpr):
    """(I + L)^-1, W and U₀ from it, Q⁺, K⁻ (chunk tensors), and total = e^{G_C} (M, N, K). Grid (N, M)."""
    chunk, m = tl.program_id(0), tl.program_id(1)
    index = m * N + chunk
    i = tl.arange(0, C)

    # forward substitution in the 16-row tiles, all at once, then exact merges. Never by squaring: its powers reach 1e9 for keys that are alike
    tile, r = tl.arange(0, C // 16), tl.arange(0, 16)
    at = (tile * 16)[:, None, None] + r[None, :, None]
    X = -tl.load(L + index.to(tl.int64) * C * C + at * C + (tile * 16)[:, None, None] + r[None, None, :])             # (n, 16, 16)
    for s in range(2, 16):
        here = (r == s)[None, :, None]
        new = tl.sum(tl.where(here, X, 0.0), axis=1)                                                     # (n, 16): row s of each tile
        new += tl.sum(new[:, :, None] * X, axis=1)
        X = tl.where(here, new[:, None, :], X)
    square, _ = _matrix(index, i, C, i, C)
    whole = tl.load(L + square)
    D = tl.where((r[:, None] == r[None, :])[None], 1.0, X)
    D = tl.reshape(_merge(_merge(D, whole, C, 16, MERGE), whole, C, 32, MERGE), (C, C))
    tl.store(inverse + square, D.to(inverse.dtype.element_ty))

    by_token, rows = _tokens(m, chunk * C + i, T, H, 1, tl.arange(0, 1))
    b = tl.maximum(tl.load(beta + by_token, mask=rows, other=0.0).to(tl.float32), 1e-30)                 # (C, 1)
    for start in range(0, K, BK):
        columns = start + tl.arange(0, BK)
        by_k, mask_k = _tokens(m, chunk * C + i, T, H, K, columns)
        G, end = _running_sum(g, by_k, mask_k)
        bq = tl.load(q + by_k, mask=mask_k, other=0.0).to(tl.float32)
        bk = tl.load(k + by_k, mask=mask_k, other=0.0).to(tl.float32)
        out_k, mask_k = _matrix(index, i, C, columns, K)
        w = _dot(D, bk * tl.exp2(G) * b, TILES)
        tl.store(W + out_k, w.to(W.dtype.element_ty), mask=mask_k)
        tl.store(q_plus + out_k, (bq * tl.exp2(G) * scale).to(q_plus.dtype.element_ty), mask=mask_k)
        tl.store(k_minus + out_k, (bk * tl.exp2(end[None, :] - G)).to(k_minus.dtype.element_ty), mask=mask_k)
        tl.store(total + index.to(tl.int64) * K + columns, tl.exp2(end), mask=columns < K)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        by_v, mask_v = _tokens(m, chunk * C + i, T, H, V, channels)
        bv = tl.load(v + by_v, mask=mask_v, other=0.0).to(tl.float32)
        out_v, mask_v = _matrix(index, i, C, channels, V)
        tl.store(U0 + out_v, _dot(D, bv * b, TILES).to(U0.dtype.element_ty), mask=mask_v)


@triton.jit
def states(W, U0, k_minus, total, first, U, entering, last, N, K, V, C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """From first (M, K, V): U, the state entering each chunk, and the last one. Without U0 it counts as zero; U and entering may be
    None: then only the last state is made. Grid (blocks of V, M)."""
    m = tl.program_id(1)
    i, kk, columns = tl.arange(0, C), tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    whole, inside = _matrix(m, kk, K, columns, V)
    S = tl.load(first + whole, mask=inside, other=0.0).to(tl.float32)                                    # (KP, BV)
    for chunk in range(N):
        index = m * N + chunk
        if entering is not None:
            at, _ = _matrix(index, kk, K, columns, V)
            tl.store(entering + at, S.to(entering.dtype.element_ty), mask=inside)
        by_k, mask_k = _matrix(index, i, C, kk, K)
        by_v, mask_v = _matrix(index, i, C, columns, V)
        w = tl.load(W + by_k, mask=mask_k, other=0.0)
        u = -_dot(w, S.to(w.dtype), DOT)                                                               # (C, BV)
        if U0 is not None:
            u += tl.load(U0 + by_v, mask=mask_v, other=0.0).to(tl.float32)
        if U is not None:
            tl.store(U + by_v, u.to(U.dtype.element_ty), mask=mask_v)
        keep = tl.load(k_minus + by_k, mask=mask_k, other=0.0)
        S *= tl.load(total + index.to(tl.int64) * K + kk, mask=kk < K, other=0.0)[:, None]
        S += _dot(tl.trans(keep), u.to(keep.dtype), DOT)
    tl.store(last + whole, S, mask=inside)


@triton.jit
def output(q_plus, A_qk, U, entering, o, T, H, N, K, V, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """O = Q⁺ S + A_qk U, a token tensor. Grid (N, blocks of V, M)."""
    chunk, m = tl.program_id(0), tl.program_id(2)
    index = m * N + chunk
    i, columns = tl.arange(0, C), tl.program_id(1) * BV + tl.arange(0, BV)
    square, _ = _matrix(index, i, C, i, C)
    by_v, mask_v = _matrix(index, i, C, columns, V)
    a = tl.load(A_qk + square)
    out = _dot(a, tl.load(U + by_v, mask=mask_v, other=0.0), DOT)                                      # (C, BV)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        by_k, mask_k = _matrix(index, i, C, kk, K)
        at, mask = _matrix(index, kk, K, columns, V)
        S = tl.load(entering + at, mask=mask, other=0.0)
        out += _dot(tl.load(q_plus + by_k, mask=mask_k, other=0.0), S, DOT)
    at, mask = _tokens(m, chunk * C + i, T, H, V, columns)
    tl.store(o + at, out.to(o.dtype.element_ty), mask=mask)


# ----------------------------------------------------------------------------------------------------------------------
# Backward

@triton.jit
def dstates(W, q_plus, k_minus, A_qk, total, do, dlast, dU, leaving, dfirst, T, H, N, K, V,
            C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """From dlast (M, K, V), last chunk first: dU, the gradient of the state that leaves each chunk, and dfirst. Grid (blocks of V, M)."""
    m = tl.program_id(1)
    i, kk, columns = tl.arange(0, C), tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    whole, inside = _matrix(m, kk, K, columns, V)
    dS = tl.load(dlast + whole, mask=inside, other=0.0).to(tl.float32)                                   # (KP, BV)
    for step in range(N):
        chunk = N - 1 - step
        index = m * N + chunk
        at, _ = _matrix(index, kk, K, columns, V)
        tl.store(leaving + at, dS.to(leaving.dtype.element_ty), mask=inside)
        square, _ = _matrix(index, i, C, i, C)
        by_k, mask_k = _matrix(index, i, C, kk, K)
        by_v, mask_v = _matrix(index, i, C, columns, V)
        at, mask = _tokens(m, chunk * C + i, T, H, V, columns)
        a = tl.load(A_qk + square)
        bdo = tl.load(do + at, mask=mask, other=0.0).to(a.dtype)
        keep = tl.load(k_minus + by_k, mask=mask_k, other=0.0)
        du = _dot(tl.trans(a), bdo, DOT) + _dot(keep, dS.to(keep.dtype), DOT)
        tl.store(dU + by_v, du.to(dU.dtype.element_ty), mask=mask_v)
        dS *= tl.load(total + index.to(tl.int64) * K + kk, mask=kk < K, other=0.0)[:, None]
        dS += _dot(tl.trans(tl.load(q_plus + by_k, mask=mask_k, other=0.0)), bdo, DOT)
        dS -= _dot(tl.trans(tl.load(W + by_k, mask=mask_k, other=0.0)), du.to(a.dtype), DOT)
    tl.store(dfirst + whole, dS, mask=inside)


@triton.jit
def dsolve(inverse, beta, U, dU, do, dv, dbeta, dA_qk, dA_kk, T, H, N, V, C: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """dR = M^-ᵀ dU, dv = β dR, dβ = Σ dR ⊙ error with error = U / β; dA_qk = tril(dO Uᵀ), dA_kk = −strict_tril(dv Uᵀ). Grid (N, M)."""
    chunk, m = tl.program_id(0), tl.program_id(1)
    index = m * N + chunk
    i = tl.arange(0, C)
    square, _ = _matrix(index, i, C, i, C)
    by_token, rows = _tokens(m, chunk * C + i, T, H, 1, tl.arange(0, 1))
    b = tl.maximum(tl.load(beta + by_token, mask=rows, other=0.0).to(tl.float32), 1e-30)                 # (C, 1)
    back = tl.trans(tl.load(inverse + square))
    a_qk = tl.zeros((C, C), tl.float32)
    a_kk = tl.zeros((C, C), tl.float32)
    db = tl.zeros((C,), tl.float32)
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        by_v, mask_v = _matrix(index, i, C, columns, V)
        at, mask = _tokens(m, chunk * C + i, T, H, V, columns)
        u = tl.load(U + by_v, mask=mask_v, other=0.0)
        dr = _dot(back, tl.load(dU + by_v, mask=mask_v, other=0.0), DOT)                               # (C, BV)
        db += tl.sum(dr * (u.to(tl.float32) / b), axis=1)
        dr *= b
        tl.store(dv + at, dr.to(dv.dtype.element_ty), mask=mask)
        bdo = tl.load(do + at, mask=mask, other=0.0).to(u.dtype)
        a_qk += _dot(bdo, tl.trans(u), DOT)
        a_kk -= _dot(dr.to(u.dtype), tl.trans(u), DOT)
    tl.store(dbeta + by_token, db[:, None].to(dbeta.dtype.element_ty), mask=rows)
    tl.store(dA_qk + square, tl.where(i[:, None] >= i[None, :], a_qk, 0.0))
    tl.store(dA_kk + square, tl.where(i[:, None] > i[None, :], a_kk, 0.0))


@triton.jit
def dinputs(q, k, g, do, dv, U, entering, leaving, dA_qk, dA_kk, dq, dk, dg, T, H, N, K, V, scale,
            C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, DOT: tl.constexpr):
    """
    Row gradients through Q⁺ and K⁺ (with S) and through A's rows, column gradients through K⁻ and A's columns; x ⊙ dx with its sign is
    the gradient of G, and g gets the sum of all later ones in its chunk. Grid (N, blocks of K, M).
    """
    chunk, m = tl.program_id(0), tl.program_id(2)
    n: tl.constexpr = C // 16
    index = m * N + chunk
    i, kk = tl.arange(0, C), tl.program_id(1) * BK + tl.arange(0, BK)
    at_k, mask_k = _tokens(m, chunk * C + i, T, H, K, kk)

    drow_q = tl.zeros((C, BK), tl.float32)
    drow_k = tl.zeros((C, BK), tl.float32)
    dkeep = tl.zeros((C, BK), tl.float32)
    held = tl.zeros((BK,), tl.float32)                                                                   # Σ_v S₀ ⊙ dS
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        at, mask = _matrix(index, kk, K, columns, V)
        S = tl.load(entering + at, mask=mask, other=0.0)                                                 # (BK, BV)
        dS = tl.load(leaving + at, mask=mask, other=0.0)
        held += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
        at, mask = _tokens(m, chunk * C + i, T, H, V, columns)
        by_v, mask_v = _matrix(index, i, C, columns, V)
        drow_q += _dot(tl.load(do + at, mask=mask, other=0.0).to(S.dtype), tl.trans(S), DOT)
        drow_k -= _dot(tl.load(dv + at, mask=mask, other=0.0).to(S.dtype), tl.trans(S), DOT)
        dkeep += _dot(tl.load(U + by_v, mask=mask_v, other=0.0), tl.trans(dS), DOT)

    G, end = _running_sum(g, at_k, mask_k)
    bk = tl.load(k + at_k, mask=mask_k, other=0.0).to(tl.float32)
    drow_q, drow_k, dkeep = drow_q * tl.exp2(G), drow_k * tl.exp2(G), dkeep * tl.exp2(end[None, :] - G)
    dcol = dkeep
    for tile in range(0, n):
        rows = tile * 16 + tl.arange(0, 16)
        row, col = _factors(G, tile, C, BK)
        at, mask = _tokens(m, chunk * C + rows, T, H, K, kk)
        rows_q = tl.load(q + at, mask=mask, other=0.0).to(tl.float32) * scale * row                      # (16, BK)
        rows_k = tl.load(k + at, mask=mask, other=0.0).to(tl.float32) * row
        at, _ = _matrix(index, rows, C, i, C)
        a_qk, a_kk = tl.load(dA_qk + at), tl.load(dA_kk + at)                                            # (16, C)
        here = (tl.arange(0, n) == tile)[:, None, None]
        to_q = _dot(a_qk, col * bk, TILES) * row                                                       # (16, BK)
        to_k = _dot(a_kk, col * bk, TILES) * row
        drow_q += tl.reshape(tl.where(here, to_q[None], 0.0), (C, BK))
        drow_k += tl.reshape(tl.where(here, to_k[None], 0.0), (C, BK))
        dcol += col * (_dot(tl.trans(a_qk), rows_q, TILES) + _dot(tl.trans(a_kk), rows_k, TILES))
    bq = tl.load(q + at_k, mask=mask_k, other=0.0).to(tl.float32)
    dG = bq * drow_q * scale + bk * (drow_k - dcol)
    last = tl.sum(bk * dkeep, axis=0) + tl.exp2(end) * held
    dG += tl.where((i == C - 1)[:, None], last[None, :], 0.0)
    tl.store(dq + at_k, (drow_q * scale).to(dq.dtype.element_ty), mask=mask_k)
    tl.store(dk + at_k, (drow_k + dcol).to(dk.dtype.element_ty), mask=mask_k)
    tl.store(dg + at_k, tl.cumsum(dG, axis=0, reverse=True).to(dg.dtype.element_ty), mask=mask_k)


# ----------------------------------------------------------------------------------------------------------------------
# Launching. Each list is what autotune tries per width, on a GPU; its first entry is the default: in bf16 with K and V up to
# 128 it spills on none of the chips that `python kernels.py` compiles for, and it is what runs where nothing can be timed.

def _tuned(kernel, key, *choices):
    configs = [triton.Config({name: value for name, value in c.items() if name[0] == "B"}, num_warps=c["warps"], num_stages=c["stages"]) for c in choices]
    return triton.autotune(configs[:1] if INTERPRETED.value else configs, key)(kernel)


_scores = _tuned(scores, ["K"], dict(BK=32, warps=4, stages=2), dict(BK=64, warps=4, stages=2), dict(BK=32, warps=2, stages=2))
_solve = _tuned(solve, ["K", "V"], dict(BK=32, BV=64, warps=4, stages=2), dict(BK=64, BV=64, warps=4, stages=2), dict(BK=32, BV=32, warps=8, stages=2))
_states = _tuned(states, ["K", "V"], dict(BV=32, warps=4, stages=2), dict(BV=16, warps=4, stages=2), dict(BV=64, warps=4, stages=2), dict(BV=32, warps=4, stages=3))
_output = _tuned(output, ["K", "V"], dict(BK=64, BV=64, warps=4, stages=2), dict(BK=32, BV=128, warps=4, stages=2), dict(BK=32, BV=64, warps=4, stages=3))
_dstates = _tuned(dstates, ["K", "V"], dict(BV=32, warps=4, stages=1), dict(BV=16, warps=4, stages=2), dict(BV=64, warps=8, stages=1))
_dsolve = _tuned(dsolve, ["V"], dict(BV=32, warps=4, stages=2), dict(BV=64, warps=4, stages=2), dict(BV=64, warps=8, stages=2))
_dinputs = _tuned(dinputs, ["K", "V"], dict(BK=16, BV=64, warps=4, stages=2), dict(BK=32, BV=32, warps=8, stages=2), dict(BK=16, BV=32, warps=4, stages=3))


def _precisions(dtype, hip=torch.version.hip):
    """How tl.dot multiplies: inside A's tiles and the solve's merges, which see fp32, and elsewhere. bf16 operands need no choice."""
    if hip:
        return dict(TILES="ieee", MERGE="ieee", DOT="ieee")
    exact = "tf32x3" if dtype == torch.float32 else "tf32"                 # tf32 keeps more than bf16 and fp16 inputs have
    return dict(TILES=exact, MERGE="tf32x3", DOT=exact)


class _Chunks:
    """What `scores` and `solve` make of the arguments, and the state's way over the chunks: the part of forward that backward runs again."""

    def __init__(self, q, k, v, g, beta, state, segments):
        B, T, H, K = q.shape
        V, M = v.shape[-1], B * H
        N = triton.cdiv(triton.cdiv(T, C), segments) * segments            # chunks past the end change nothing
        new = lambda *shape, dtype=torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32: q.new_empty(*shape, dtype=dtype)
        self.sizes, self.scale, self.new, p = (T, H, N, K, V), K ** -0.5, new, _precisions(v.dtype)
        self.A_qk, self.inverse, L = new(M, N, C, C), new(M, N, C, C), new(M, N, C, C, dtype=torch.float32)
        self.W, self.q_plus, self.k_minus, self.total = new(M, N, C, K), new(M, N, C, K), new(M, N, C, K), new(M, N, K, dtype=torch.float32)
        U0 = new(M, N, C, V)
        _scores[N * C // 16, M](q, k, g, beta, self.A_qk, L, T, H, N, K, self.scale, C=C, TILES=p["TILES"])
        _solve[N, M](q, k, v, g, beta, L, self.inverse, self.W, U0, self.q_plus, self.k_minus, self.total, T, H, N, K, V, self.scale, C=C, TILES=p["TILES"], MERGE=p["MERGE"])

        def run(U0, first, U, entering, width):
            last, n = torch.empty_like(first), N // (len(first) // M)
            _states[lambda meta: (triton.cdiv(width, meta["BV"]), len(first))](
                self.W, U0, self.k_minus, self.total, first, U, entering, last, n, K, width, C=C, KP=triton.next_power_of_2(K), DOT=p["DOT"])
            return last
        first = state.reshape(M, K, V)
        if segments > 1:
            # segment by segment, all at once: S ↦ S̃ + M S, with S̃ from a zero state and M from the identity without values
            from kda import compose                                        # here, as kda.py imports this file
            ends = run(U0, first.new_zeros(M * segments, K, V), None, None, V).view(M, segments, K, V)
            through = run(None, torch.eye(K, device=q.device).repeat(M * segments, 1, 1), None, None, K).view(M, segments, K, K)
            first = compose(through.transpose(0, 1), ends.transpose(0, 1), first)[:-1].transpose(0, 1).reshape(M * segments, K, V).contiguous()
        self.U, self.entering = new(M, N, C, V), new(M, N, K, V)
        self.last = run(U0, first, self.U, self.entering, V).view(M, segments, K, V)[:, -1].reshape(B, H, K, V).contiguous()
        self.p = p


class _KDA(torch.autograd.Function):

    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, segments):
        c = _Chunks(q, k, v, g, beta, state, segments)
        T, H, N, K, V = c.sizes
        o = torch.empty_like(v)
        _output[lambda meta: (N, triton.cdiv(V, meta["BV"]), len(c.W))](c.q_plus, c.A_qk, c.U, c.entering, o, *c.sizes, C=C, DOT=c.p["DOT"])
        ctx.save_for_backward(q, k, v, g, beta, state)
        ctx.segments = segments
        return o, c.last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlast):
        q, k, v, g, beta, state = ctx.saved_tensors
        c = _Chunks(q, k, v, g, beta, state, ctx.segments)
        T, H, N, K, V = c.sizes
        M, p, do = len(c.W), c.p, do.contiguous()
        dq, dk, dv, dg, dbeta, dfirst = (torch.empty_like(x) for x in (q, k, v, g, beta, state))
        dU, leaving = torch.empty_like(c.U), torch.empty_like(c.entering)
        dA_qk, dA_kk = (c.new(M, N, C, C, dtype=torch.float32) for _ in range(2))
        _dstates[lambda meta: (triton.cdiv(V, meta["BV"]), M)](
            c.W, c.q_plus, c.k_minus, c.A_qk, c.total, do, dlast.contiguous(), dU, leaving, dfirst, *c.sizes, C=C, KP=triton.next_power_of_2(K), DOT=p["DOT"])
        _dsolve[N, M](c.inverse, beta, c.U, dU, do, dv, dbeta, dA_qk, dA_kk, T, H, N, V, C=C, DOT=p["DOT"])
        _dinputs[lambda meta: (N, triton.cdiv(K, meta["BK"]), M)](
            q, k, g, do, dv, c.U, c.entering, leaving, dA_qk, dA_kk, dq, dk, dg, *c.sizes, c.scale, C=C, TILES=p["TILES"], DOT=p["DOT"])
        return dq, dk, dv, dg, dbeta, dfirst, None


def _good_width(size):
    return size % 16 == 0 and 16 <= size <= 256


def _launchable(q):
    return q.shape[0] * q.shape[2] < 1 << 16                               # sequences × heads: a launch's limit


def fits(q, v):
    """Whether these kernels can take q and v."""
    return q.is_cuda and _good_width(q.shape[-1]) and _good_width(v.shape[-1]) and _launchable(q) and v.dtype != torch.float64


def _check(q, k, v, g, beta, state, look_at_g):
    """Errors: ValueError that names the argument, what came and what is allowed."""
    if q.dim() != 4 or q.shape[1] < 1:
        raise ValueError(f"q: expected (B, T, H, K) with T ≥ 1, got {tuple(q.shape)}")
    B, T, H, K = q.shape
    V = v.shape[-1]
    for name, size in (("K", K), ("V", V)):
        if not _good_width(size):
            raise ValueError(f"{name} = {size}: expected a multiple of 16 from 16 to 256; kda_chunk takes any")
    if not _launchable(q):
        raise ValueError(f"q: {B} sequences × {H} heads; expected fewer than 65,536, the limit of a launch; split the batch")
    expected = dict(q=(q, (B, T, H, K)), k=(k, (B, T, H, K)), v=(v, (B, T, H, V)), g=(g, (B, T, H, K)), beta=(beta, (B, T, H)), state=(state, (B, H, K, V)))
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"{name}: expected {shape} to go with q {tuple(q.shape)}, got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected it on {q.device}, where q is, got {x.device}")
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or name in ("k", "v") and x.dtype != q.dtype or name == "state" and x.dtype != torch.float32:
            raise ValueError(f"{name}: expected {'float32' if name == 'state' else 'float32, bfloat16 or float16, the same for q, k and v'}, got {x.dtype}")
    if not (q.is_cuda or INTERPRETED.value):
        raise ValueError(f"q: expected a tensor on a GPU, got one on {q.device}; kda_chunk runs anywhere, and TRITON_INTERPRET=1 runs the kernels on a CPU")
    if look_at_g:
        low, high = g.detach().aminmax()
        if low < -5.9001 or high > 0:
            raise ValueError(f"g: expected log decays in [-5.9, 0], got values from {low:.4g} to {high:.4g}")


@torch.compiler.disable
def kda(q, k, v, g, beta, state=None, segments=None, look_at_g=True):
    """
    kda_recurrent's arguments and results, differentiable in everything; q, k, v in fp32, bf16 or fp16, made contiguous if they are not.
    g's sums, the solve and the carried state are fp32. segments: parts of the sequence whose states are found side by side, None: as many
    as fill the GPU. look_at_g=False: g is known to lie in [−5.9, 0]; looking makes the CPU wait for the GPU.
    """
    if state is None and q.dim() == 4:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[-1], dtype=torch.float32)
    _check(q, k, v, g, beta, state, look_at_g)
    B, T, H, K = q.shape
    if segments is None:                                                   # two programs a multiprocessor, 16 chunks a segment at least
        room = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        segments = max(1, min(room // (B * H * triton.cdiv(v.shape[-1], 32)), T // (16 * C)))
    return _KDA.apply(*(x.contiguous() for x in (q, k, v, g, beta, state)), segments)


# ----------------------------------------------------------------------------------------------------------------------
# Decode: the recurrence itself

@triton.jit
def decode(q, k, v, g, beta, state, o, K, V, scale, KP: tl.constexpr, BV: tl.constexpr):
    """One token of one head; reads and writes a (K, BV) part of the state once. Grid (blocks of V, M)."""
    m = tl.program_id(1)
    kk, columns = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    at, inside = _matrix(m, kk, K, columns, V)
    by_k, mask_k, by_v, mask_v = m * K + kk, kk < K, m * V + columns, columns < V
    S = tl.load(state + at, mask=inside, other=0.0) * tl.exp2(tl.load(g + by_k, mask=mask_k, other=0.0).to(tl.float32) * LOG2E)[:, None]
    bk = tl.load(k + by_k, mask=mask_k, other=0.0).to(tl.float32)[:, None]
    error = tl.load(v + by_v, mask=mask_v, other=0.0).to(tl.float32) - tl.sum(S * bk, axis=0)
    S += bk * (tl.load(beta + m).to(tl.float32) * error)[None, :]
    bq = tl.load(q + by_k, mask=mask_k, other=0.0).to(tl.float32)[:, None]
    tl.store(o + by_v, (tl.sum(S * bq, axis=0) * scale).to(o.dtype.element_ty), mask=mask_v)
    tl.store(state + at, S, mask=inside)


@torch.compiler.disable
@torch.no_grad()
def kda_decode(q, k, v, g, beta, state):
    """One token: q, k, g (B, 1, H, K), v (B, 1, H, V), beta (B, 1, H) → o (B, 1, H, V). state (B, H, K, V) fp32 is changed in place."""
    if q.shape[1] != 1 or not state.is_contiguous():
        raise ValueError(f"expected one token and a contiguous state, got {q.shape[1]} tokens and strides {state.stride()}")
    _check(q, k, v, g, beta, state, look_at_g=False)
    B, _, H, K = q.shape
    V, o = v.shape[-1], torch.empty(v.shape, dtype=v.dtype, device=v.device)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    decode[triton.cdiv(V, 32), B * H](q, k, v, g, beta, state, o, K, V, K ** -0.5, KP=triton.next_power_of_2(K), BV=32, num_warps=4)
    return o


# ----------------------------------------------------------------------------------------------------------------------
# SiTU-GLU's activation. In bf16 an element costs 6 bytes forward and 10 backward, and keeps 4 for backward; as separate operations of
# torch (moe.py) about 100 and 120 are moved, and 12 are kept.

@triton.jit
def _tanh(x):
    return tl.where(tl.abs(x) < 0.03, x - x * x * x / 3, 2.0 / (1.0 + tl.exp2(x * LOG2E * -2.0)) - 1.0)        # the difference would cancel


@triton.jit
def situ_kernel(g, u, y, dy, dg, du, stride_g, stride_u, size, width, beta, linear_beta, BLOCK: tl.constexpr):
    """y from g and u or, given dy, dg and du. linear_beta = 0 stands for no limit."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // width, i % width
    bg = tl.load(g + row * stride_g + column, mask=i < size, other=0.0).to(tl.float32)
    bu = tl.load(u + row * stride_u + column, mask=i < size, other=0.0).to(tl.float32)
    a, s, c = _tanh(bg / beta), 1.0 / (1.0 + tl.exp2(bg * LOG2E * -1.0)), _tanh(bu / tl.maximum(linear_beta, 1e-30))
    up, dup = tl.where(linear_beta > 0, c * linear_beta, bu), tl.where(linear_beta > 0, 1 - c * c, 1.0)
    if dy is None:
        tl.store(y + i, (beta * a * s * up).to(y.dtype.element_ty), mask=i < size)
    else:
        bdy = tl.load(dy + i, mask=i < size, other=0.0).to(tl.float32)
        tl.store(dg + i, (bdy * up * ((1 - a * a) * s + beta * a * s * (1 - s))).to(dg.dtype.element_ty), mask=i < size)
        tl.store(du + i, (bdy * beta * a * s * dup).to(du.dtype.element_ty), mask=i < size)


class _SiTU(torch.autograd.Function):

    @staticmethod
    def forward(ctx, g, u, beta, linear_beta):
        y, width = torch.empty(g.shape, dtype=g.dtype, device=g.device), g.shape[-1]
        g, u = (x.reshape(-1, width) if x.stride(-1) == 1 else x.contiguous().view(-1, width) for x in (g, u))        # halves of one matrix stay views
        ctx.save_for_backward(g, u)
        ctx.rest = g.stride(0), u.stride(0), y.numel(), width, beta, linear_beta or 0.0
        situ_kernel[triton.cdiv(y.numel(), 1024),](g, u, y, None, None, None, *ctx.rest, BLOCK=1024)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (g, u), dy = ctx.saved_tensors, dy.contiguous()
        dg, du = (torch.empty(dy.shape, dtype=x.dtype, device=x.device) for x in (g, u))
        situ_kernel[triton.cdiv(dy.numel(), 1024),](g, u, None, dy, dg, du, *ctx.rest, BLOCK=1024)
        return dg, du, None, None


situ = _SiTU.apply                                                         # g, u (..., m), beta, linear_beta or None → (..., m)


# ----------------------------------------------------------------------------------------------------------------------
# The mixture of attention residuals (attnres.py). Every source is read once forward and twice backward; 4 bytes a token and source are
# kept. With S sources of d bf16 numbers a token, forward moves 2 (S + 1) d bytes; as operations of torch about 26 S d.

@triton.jit
def mix_forward(u, eps, sources, out, logits, rows, d, BD: tl.constexpr):
    """One program a token: a softmax over the sources as they come, so each is read once. Grid (rows)."""
    at = tl.arange(0, BD)
    row, inside = tl.program_id(0).to(tl.int64), at < d
    bu = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    top, sum, acc = float("-inf"), 0.0, tl.zeros((BD,), tl.float32)
    for s in tl.static_range(len(sources)):
        x = tl.load(sources[s] + row * d + at, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(x * bu) * tl.rsqrt(tl.sum(x * x) / d + eps)
        tl.store(logits + s * rows + row, logit)
        new = tl.maximum(top, logit)
        p, fade = tl.exp2((logit - new) * LOG2E), tl.exp2((top - new) * LOG2E)
        acc, sum, top = acc * fade + p * x, sum * fade + p, new
    tl.store(out + row * d + at, (acc / sum).to(out.dtype.element_ty), mask=inside)


@triton.jit
def mix_backward(u, eps, sources, dout, logits, dsources, du, rows, d, ROWS: tl.constexpr, BD: tl.constexpr):
    """One program for ROWS tokens, which share a row of du (programs, d). Grid (programs)."""
    at = tl.arange(0, BD)
    inside = at < d
    bu = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    bdu = tl.zeros((BD,), tl.float32)
    for r in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + r
        here = at < tl.where(row < rows, d, 0)                             # past the end everything is zero, and adds nothing to du
        bdout = tl.load(dout + row * d + at, mask=here, other=0.0).to(tl.float32)
        top, sum, mean = float("-inf"), 0.0, 0.0                           # of the softmax, and Σ p dp
        for s in tl.static_range(len(sources)):
            logit = tl.load(logits + s * rows + tl.minimum(row, rows - 1))
            x = tl.load(sources[s] + row * d + at, mask=here, other=0.0).to(tl.float32)
            new = tl.maximum(top, logit)
            p, fade = tl.exp2((logit - new) * LOG2E), tl.exp2((top - new) * LOG2E)
            mean, sum, top = mean * fade + p * tl.sum(bdout * x), sum * fade + p, new
        mean /= sum
        for s in tl.static_range(len(sources)):
            logit = tl.load(logits + s * rows + tl.minimum(row, rows - 1))
            x = tl.load(sources[s] + row * d + at, mask=here, other=0.0).to(tl.float32)
            p, rms = tl.exp2((logit - top) * LOG2E) / sum, tl.rsqrt(tl.sum(x * x) / d + eps)
            dlogit = p * (tl.sum(bdout * x) - mean)
            bdu += dlogit * rms * x
            dx = bdout * p + dlogit * rms * bu - (dlogit * logit * rms * rms / d) * x
            tl.store(dsources[s] + row * d + at, dx.to(dsources[s].dtype.element_ty), mask=here)
    tl.store(du + tl.program_id(0) * d + at, bdu, mask=inside)


class _Mix(torch.autograd.Function):

    @staticmethod
    def forward(ctx, u, eps, *sources):
        sources = tuple(x.contiguous() for x in sources)
        d, rows = u.shape[0], sources[0].numel() // u.shape[0]
        out, logits = torch.empty_like(sources[0]), u.new_empty(len(sources), rows, dtype=torch.float32)
        mix_forward[(rows,)](u, eps, sources, out, logits, rows, d, BD=triton.next_power_of_2(d), num_warps=4)
        ctx.save_for_backward(u, logits, *sources)
        ctx.eps = eps
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        u, logits, *sources = ctx.saved_tensors
        d, rows, per_program = u.shape[0], logits.shape[1], 16
        dsources = tuple(torch.empty_like(x) for x in sources)
        du = u.new_empty(triton.cdiv(rows, per_program), d, dtype=torch.float32)
        mix_backward[(len(du),)](u, ctx.eps, tuple(sources), dout.contiguous(), logits, dsources, du, rows, d, ROWS=per_program,
                                 BD=triton.next_power_of_2(d), num_warps=8 if d > 2048 else 4)
        return du.sum(0).to(u.dtype), None, *dsources


mix = _Mix.apply                                                           # u (d), eps, sources (..., d) each → (..., d)


# ----------------------------------------------------------------------------------------------------------------------
# python kernels.py

def report():
    """Compile every kernel at its default, bf16, for K = V = 64 and 128 and rows of d = 1024, and print what ptxas says of it."""
    import re
    import subprocess
    import tempfile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    x, f, i, s = "*bf16", "*fp32", "i32", "fp32"
    kernels = [                                                            # a kernel or its tuned form, and its arguments' types
        (_scores, [x, x, f, f, x, f, i, i, i, i, s]), (_solve, [x, x, x, f, f, f, x, x, x, x, x, f, i, i, i, i, i, s]), (_states, [x, x, x, f, f, x, x, f, i, i, i]),
        (_output, [x, x, x, x, x, i, i, i, i, i]), (_dstates, [x, x, x, x, f, x, f, x, x, f, i, i, i, i, i]), (_dsolve, [x, f, x, x, x, x, f, f, f, i, i, i, i]),
        (_dinputs, [x, x, f, x, x, x, x, x, f, f, x, x, f, i, i, i, i, i, s]), (decode, [x, x, x, f, f, f, x, i, i, s]),
        (situ_kernel, [x, x, None, x, x, x, i, i, i, i, s, s]), (mix_forward, [x, s, (x,) * 4, x, f, i, i]), (mix_backward, [x, s, (x,) * 4, x, f, (x,) * 4, f, i, i])]
    targets = (GPUTarget("cuda", 80, 32), 163), (GPUTarget("cuda", 89, 32), 99), (GPUTarget("cuda", 90, 32), 227), (GPUTarget("cuda", 100, 32), 227), (GPUTarget("hip", "gfx942", 64), 64)
    print(f"triton {triton.__version__}, bf16; registers and spilled bytes of a thread, KB of shared memory a block")
    for kernel, types in kernels:
        config = kernel.configs[0] if hasattr(kernel, "configs") else triton.Config(dict(BV=32), num_warps=4, num_stages=2)
        kernel = kernel.fn if hasattr(kernel, "configs") else kernel
        for D in (64, 128):
            line = f"{kernel.__name__:12s} K = V = {D:3d}"
            for target, limit in targets:
                known = {**dict(C=C, KP=D, BLOCK=1024, BD=1024, ROWS=16), **config.kwargs, **(_precisions(torch.bfloat16, target.backend == "hip"))}
                known = {name: value for name, value in known.items() if name in kernel.arg_names} | {n: None for n, t in zip(kernel.arg_names, types) if t is None}
                signature = {**dict(zip(kernel.arg_names, types)), **{name: "constexpr" for name in known}}
                aligned = {(n,): [["tt.divisibility", 16]] for n, t in enumerate(types) if t in (x, f) or kernel.arg_names[n] in ("K", "V", "width", "d")}
                try:
                    built = triton.compile(ASTSource(kernel, signature, known, aligned), target, dict(num_warps=config.num_warps, num_stages=config.num_stages))
                except RuntimeError:                                       # triton 3.6 cannot make `solve` for gfx942, 3.7 can
                    line += f" | {target.arch}: this triton fails"
                    continue
                line += f" | {target.arch}: {built.metadata.shared / 1024:.0f} KB" + " TOO MUCH" * (built.metadata.shared > limit * 1024)
                if target.backend == "cuda":
                    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                        file.write(built.asm["cubin"])
                        file.flush()
                        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
                        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
                    line += ", {} registers, {} spilled".format(*re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
            print(line)


if __name__ == "__main__":
    report()
