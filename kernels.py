"""
KDA as Triton kernels: forward, backward and decode (report §2.1.1, §5.1). The algebra, and the slow
definition, stand in kda.py.

    kda(q, k, v, g, beta, state=None) → o, state     kda_chunk's contract, on a GPU
    kda_decode(q, k, v, g, beta, state) → o          a few tokens; the state changes in place
    python kernels.py       compiles these, and elementwise.py's, for sm_80, 89, 90, 100, gfx942,
                            without a GPU

Triton 3.6 or later.

A sequence goes in chunks of C = 64 tokens (or 32, where that was measured to be faster). Forward is
four kernels; only the third is sequential:

    scores   a program per 16 rows of a chunk, and head: A_qk and L = Diag(β) A_kk
    solve    a program per chunk and head: (I + L)^-1, from it W and U₀; and Q⁺, K⁻
    states   a program per head and block of V: U = U₀ − W S,  S ← Diag(e^{G_C}) S + K⁻ᵀ U
    output   a program per chunk, head and block of V: O = Q⁺ S + A_qk U

Backward keeps nothing but the arguments. It runs the first three again, and then:

    dstates  a program per head and block of V, from the last chunk to the first:
             dU = A_qkᵀ dO + K⁻ dS,  dS ← Diag(e^{G_C}) dS + Q⁺ᵀ dO − Wᵀ dU
    dsolve   a program per chunk and head: back through the triangular solve, dv, dβ, dA_qk, dA_kk
    dinputs  a program per chunk, head and block of K: dq, dk, dg

Q⁺ = K^-½ Q ⊙ e^G, K⁺ = K ⊙ e^G, K⁻ = K ⊙ e^{G_C − G}. As W = (I + L)^-1 Diag(β) K⁺ and
U₀ = (I + L)^-1 Diag(β) V, U = U₀ − W S solves (I + L) U = Diag(β) (V − K⁺ S).

On paper, at T = 4,096, H = 64 and K = V = 128 in bf16, with 4.3 TB/s and 780 TFLOP/s: 0.07 ms of
operations (203k a token and head), 0.09 ms of least bytes (1,540), 0.43 ms of bytes moved (7,060:
1,412 in scores, 2,700 in solve, 1,544 in states, 1,408 in output). Not yet timed on a GPU.

Shapes: B sequences, T tokens, H heads, K and V channels of a key and a value, N chunks of C tokens;
BH is B·H, every head of every sequence, and bh one of them. A token tensor is (B, T, H, ·), a chunk
tensor (BH, N, rows, ·). Programs go through K and V in blocks of BK and BV.
"""
import os
import re
import subprocess
import tempfile

import torch
import triton
import triton.language as tl

import elementwise
from elementwise import (  # noqa: F401 (all element-wise work can be imported from here, too)
    LOG2E,
    kda_arguments,
    launch,
    load,
    mix,
    norm,
    situ,
    store,
)

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Splits a tile's exponents evenly between rows and columns, 2^±64 at g = −5.9. kda.py has less, as
# its columns move on from tile to tile.
SHIFT = tl.constexpr(64.0)


# --------------------------------------------------------------------------------------------------
# What several kernels share. A place is a pair: offsets, and the mask of those inside the tensor.

# a new length of a sequence is no reason to compile again
_any_length = triton.jit(do_not_specialize=["T", "N"])


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if INTERPRETED:     # the interpreter would multiply the bit patterns of bf16 numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _tokens(bh, t, T, H, D, columns):
    """The place of tokens t and columns of head bh in a token tensor (B, T, H, D)."""
    at = ((bh // H).to(tl.int64) * T + t) * H + bh % H
    return at[:, None] * D + columns[None, :], (t[:, None] < T) & (columns[None, :] < D)


@triton.jit
def _matrix(index, rows, R, columns, D):
    """The place of rows and columns in the index-th matrix (R, D) of a chunk tensor."""
    offsets = (index.to(tl.int64) * R + rows[:, None]) * D + columns[None, :]
    return offsets, (rows[:, None] < R) & (columns[None, :] < D)


@triton.jit
def _load_beta(beta, place):
    """Backward divides by it."""
    return tl.maximum(load(beta, place).to(tl.float32), 1e-30)


@triton.jit
def _running_sum(g, place):
    """G (C, BK), the sum of log decays up to each row in base 2, and its last row G_C (BK)."""
    G = tl.cumsum(load(g, place).to(tl.float32) * LOG2E, axis=0)
    is_last = tl.arange(0, G.shape[0]) == G.shape[0] - 1
    return G, tl.sum(tl.where(is_last[:, None], G, 0.0), axis=0)


@triton.jit
def _factors(G, tile, C: tl.constexpr, BK: tl.constexpr):
    """
    exp2(G_i − G_j) for the 16 rows i of a tile, as row (16, BK) · col (C, BK) around the tile's
    first row. col is zero for rows after the tile.
    """
    is_tile = (tl.arange(0, C // 16) == tile)[:, None, None]
    G_tile = tl.sum(tl.where(is_tile, tl.reshape(G, (C // 16, 16, BK)), 0.0), axis=0)     # (16, BK)
    anchor = tl.sum(tl.where((tl.arange(0, 16) == 0)[:, None], G_tile, 0.0), axis=0)      # (BK)
    seen = tl.arange(0, C) < (tile + 1) * 16
    # masked before the exp
    col = tl.exp2(tl.where(seen[:, None], anchor[None, :] - G - SHIFT, float("-inf")))
    return tl.exp2(G_tile - anchor[None, :] + SHIFT), col


# --------------------------------------------------------------------------------------------------
# Forward

@_any_length
def scores(q, k, g, beta, A_qk, L, T, H, N, K, scale,
           C: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr):
    """A_qk and L = Diag(β) A_kk, 16 rows of a chunk. Grid (N · C/16, BH)."""
    bh = tl.program_id(1)
    chunk, tile = tl.program_id(0) // (C // 16), tl.program_id(0) % (C // 16)
    j, rows = tl.arange(0, C), tile * 16 + tl.arange(0, 16)

    # both products at once, a block of K at a time
    a_qk, a_kk = tl.zeros((16, C), tl.float32), tl.zeros((16, C), tl.float32)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        whole = _tokens(bh, chunk * C + j, T, H, K, kk)
        part = _tokens(bh, chunk * C + rows, T, H, K, kk)
        G, _ = _running_sum(g, whole)
        row, col = _factors(G, tile, C, BK)
        seen_k = tl.trans(load(k, whole).to(tl.float32) * col)                            # (BK, C)
        a_qk += _dot(load(q, part).to(tl.float32) * row, seen_k, DOT)
        a_kk += _dot(load(k, part).to(tl.float32) * row, seen_k, DOT)

    # β by row, the scale, and the causal masks
    a_kk *= _load_beta(beta, _tokens(bh, chunk * C + rows, T, H, 1, tl.arange(0, 1)))
    square = _matrix(bh * N + chunk, rows, C, j, C)
    if A_qk is not None:
        store(A_qk, square, tl.where(rows[:, None] >= j[None, :], a_qk * scale, 0.0))
    store(L, square, tl.where(rows[:, None] > j[None, :], a_kk, 0.0))


@_any_length
def solve(q, k, v, g, beta, L, inverse, W, U0, q_plus, k_minus, total, T, H, N, K, V, scale,
          C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """(I + L)^-1, W, U₀, Q⁺, K⁻ (chunk tensors), and total = e^{G_C} (BH, N, K). Grid (N, BH)."""
    chunk, bh = tl.program_id(0), tl.program_id(1)
    index, i = bh * N + chunk, tl.arange(0, C)
    # the solve is as good as fp32, whatever the inputs are
    SOLVE: tl.constexpr = "ieee" if DOT == "ieee" else "tf32x3"

    # The tiles on the diagonal, inverted all at once by forward substitution, row by row. Never by
    # squaring: if keys are alike, powers reach 1e9.
    tile, r = tl.arange(0, C // 16), tl.arange(0, 16)
    row = (tile * 16)[:, None, None] + r[None, :, None]
    L_tile = L + index.to(tl.int64) * C * C + row * C + (tile * 16)[:, None, None]
    X = -tl.load(L_tile + r[None, None, :])                                       # (tiles, 16, 16)
    for s in range(2, 16):
        here = (r == s)[None, :, None]
        new = tl.sum(tl.where(here, X, 0.0), axis=1)                # row s of a tile, (tiles, 16)
        new += tl.sum(new[:, :, None] * X, axis=1)
        X = tl.where(here, new[:, None, :], X)
    X = tl.where((r[:, None] == r[None, :])[None], 1.0, X)

    # Below them, one row of tiles t after another: −X_tt (L_t,<t D_<t)
    is_diagonal = (i[:, None] // 16 == tile[None, :])[:, :, None]
    D = tl.reshape(tl.where(is_diagonal, tl.reshape(X, (C, 1, 16)), 0.0), (C, C))
    for t in range(1, C // 16):
        earlier = i[None, :] < t * 16
        left = tl.where(earlier, load(L, _matrix(index, t * 16 + r, C, i, C)), 0.0)       # (16, C)
        here = (tile == t)[:, None, None]
        X_tt = tl.sum(tl.where(here, X, 0.0), axis=0)                                     # (16, 16)
        new = _dot(X_tt, _dot(left, D, SOLVE), SOLVE)                                      # (16, C)
        D -= tl.reshape(tl.where(here, new[None], 0.0), (C, C))
    store(inverse, _matrix(index, i, C, i, C), D)

    # W from the keys, beside the scaled copies of q and k
    b = _load_beta(beta, _tokens(bh, chunk * C + i, T, H, 1, tl.arange(0, 1)))              # (C, 1)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        by_k, out = _tokens(bh, chunk * C + i, T, H, K, kk), _matrix(index, i, C, kk, K)
        G, G_C = _running_sum(g, by_k)
        bq, bk = load(q, by_k).to(tl.float32), load(k, by_k).to(tl.float32)
        store(W, out, _dot(D, bk * tl.exp2(G) * b, DOT))
        store(q_plus, out, bq * tl.exp2(G) * scale)
        store(k_minus, out, bk * tl.exp2(G_C[None, :] - G))
        store(total, (index.to(tl.int64) * K + kk, kk < K), tl.exp2(G_C))

    # U₀ from the values
    for start in range(0, V, BV):
        vv = start + tl.arange(0, BV)
        bv = load(v, _tokens(bh, chunk * C + i, T, H, V, vv)).to(tl.float32)
        store(U0, _matrix(index, i, C, vv, V), _dot(D, bv * b, DOT))


@_any_length
def states(W, U0, k_minus, total, first, U, entering, last, N, K, V,
           C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """
    From first (BH, K, V): U, the state entering each chunk, and the last one. first and U0 = None
    count as zero; with U and entering = None only the last state is made. KP is K up to a power of
    two.
    Grid (blocks of V, BH).
    """
    bh = tl.program_id(1)
    i, kk, vv = tl.arange(0, C), tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    S = tl.zeros((KP, BV), tl.float32)
    if first is not None:
        S = load(first, _matrix(bh, kk, K, vv, V)).to(tl.float32)
    for chunk in range(N):
        index = bh * N + chunk
        by_k, by_v = _matrix(index, i, C, kk, K), _matrix(index, i, C, vv, V)
        if entering is not None:
            store(entering, _matrix(index, kk, K, vv, V), S)
        # U = U₀ − W S
        w = load(W, by_k)
        u = -_dot(w, S.to(w.dtype), DOT)                                                   # (C, BV)
        if U0 is not None:
            u += load(U0, by_v).to(tl.float32)
        if U is not None:
            store(U, by_v, u)
        # S ← Diag(e^{G_C}) S + K⁻ᵀ U
        keep = load(k_minus, by_k)
        S *= load(total, (index.to(tl.int64) * K + kk, kk < K))[:, None]
        S += _dot(tl.trans(keep), u.to(keep.dtype), DOT)
    store(last, _matrix(bh, kk, K, vv, V), S)


@_any_length
def output(q_plus, A_qk, U, entering, o, T, H, N, K, V,
           C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """O = A_qk U + Q⁺ S, a token tensor. Grid (N · blocks of V, BH): a chunk's are neighbours."""
    blocks, bh = tl.cdiv(V, BV), tl.program_id(1)
    chunk, vv = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    index, i = bh * N + chunk, tl.arange(0, C)
    a, u = load(A_qk, _matrix(index, i, C, i, C)), load(U, _matrix(index, i, C, vv, V))
    out = _dot(a, u, DOT)                                                                  # (C, BV)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        q_block = load(q_plus, _matrix(index, i, C, kk, K))
        out += _dot(q_block, load(entering, _matrix(index, kk, K, vv, V)), DOT)
    store(o, _tokens(bh, chunk * C + i, T, H, V, vv), out)


# --------------------------------------------------------------------------------------------------
# Backward

@_any_length
def dstates(W, q_plus, k_minus, A_qk, total, do, dlast, dU, leaving, dfirst, T, H, N, K, V,
            C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """
    From dlast (BH, K, V) or zero, last chunk first: dU, the gradient of the state leaving each
    chunk, and dfirst, if asked for. Grid (blocks of V, BH).
    """
    bh = tl.program_id(1)
    i, kk, vv = tl.arange(0, C), tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    dS = tl.zeros((KP, BV), tl.float32)
    if dlast is not None:
        dS = load(dlast, _matrix(bh, kk, K, vv, V)).to(tl.float32)
    for step in range(N):
        chunk = N - 1 - step
        index = bh * N + chunk
        store(leaving, _matrix(index, kk, K, vv, V), dS)
        # dU = A_qkᵀ dO + K⁻ dS
        by_k = _matrix(index, i, C, kk, K)
        a, keep = load(A_qk, _matrix(index, i, C, i, C)), load(k_minus, by_k)
        bdo = load(do, _tokens(bh, chunk * C + i, T, H, V, vv)).to(a.dtype)
        du = _dot(tl.trans(a), bdo, DOT) + _dot(keep, dS.to(keep.dtype), DOT)
        store(dU, _matrix(index, i, C, vv, V), du)
        # dS ← Diag(e^{G_C}) dS + Q⁺ᵀ dO − Wᵀ dU
        dS *= load(total, (index.to(tl.int64) * K + kk, kk < K))[:, None]
        dS += _dot(tl.trans(load(q_plus, by_k)), bdo, DOT)
        dS -= _dot(tl.trans(load(W, by_k)), du.to(a.dtype), DOT)
    if dfirst is not None:
        store(dfirst, _matrix(bh, kk, K, vv, V), dS)


@_any_length
def dsolve(inverse, beta, U, dU, do, dv, dbeta, dA_qk, dA_kk, T, H, N, V,
           C: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """
    dR = (I + L)^-ᵀ dU, dv = β dR, dβ = Σ dR ⊙ error, where error = U / β;
    dA_qk = tril(dO Uᵀ), dA_kk = −strict_tril(dv Uᵀ). Grid (N, BH).
    """
    chunk, bh = tl.program_id(0), tl.program_id(1)
    index, i = bh * N + chunk, tl.arange(0, C)
    square = _matrix(index, i, C, i, C)
    by_token = _tokens(bh, chunk * C + i, T, H, 1, tl.arange(0, 1))
    b, back = _load_beta(beta, by_token), tl.trans(load(inverse, square))
    a_qk, a_kk = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    db = tl.zeros((C,), tl.float32)
    for start in range(0, V, BV):
        vv = start + tl.arange(0, BV)
        by_v, by_token_v = _matrix(index, i, C, vv, V), _tokens(bh, chunk * C + i, T, H, V, vv)
        u, dr = load(U, by_v), _dot(back, load(dU, by_v), DOT)                           # (C, BV)
        db += tl.sum(dr * (u.to(tl.float32) / b), axis=1)
        dr *= b
        store(dv, by_token_v, dr)
        a_qk += _dot(load(do, by_token_v).to(u.dtype), tl.trans(u), DOT)
        a_kk -= _dot(dr.to(u.dtype), tl.trans(u), DOT)
    store(dbeta, by_token, db[:, None])
    store(dA_qk, square, tl.where(i[:, None] >= i[None, :], a_qk, 0.0))
    store(dA_kk, square, tl.where(i[:, None] > i[None, :], a_kk, 0.0))


@_any_length
def dinputs(q, k, g, do, dv, U, entering, leaving, dA_qk, dA_kk, dq, dk, dg, T, H, N, K, V, scale,
            C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """
    Gradients of rows come through Q⁺ and K⁺ (with S) and through A's rows, those of columns through
    K⁻ and A's columns. x ⊙ dx with its sign is the gradient of G, and g gets the sum of all later
    ones in its chunk. Grid (N · blocks of K, BH): those of a chunk, which read the same, are
    neighbours.
    """
    blocks, bh = tl.cdiv(K, BK), tl.program_id(1)
    chunk, kk = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    index, i = bh * N + chunk, tl.arange(0, C)
    by_k = _tokens(bh, chunk * C + i, T, H, K, kk)

    # through the states: dQ⁺ = dO Sᵀ, dK⁺ = −dv Sᵀ, dK⁻ = U dSᵀ, and Σ_v S ⊙ dS for e^{G_C}
    drow_q, drow_k = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    dkeep, held = tl.zeros((C, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for start in range(0, V, BV):
        vv = start + tl.arange(0, BV)
        by_state, by_v = _matrix(index, kk, K, vv, V), _tokens(bh, chunk * C + i, T, H, V, vv)
        S, dS = load(entering, by_state), load(leaving, by_state)                       # (BK, BV)
        held += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
        drow_q += _dot(load(do, by_v).to(S.dtype), tl.trans(S), DOT)
        drow_k -= _dot(load(dv, by_v).to(S.dtype), tl.trans(S), DOT)
        dkeep += _dot(load(U, _matrix(index, i, C, vv, V)), tl.trans(dS), DOT)
    G, G_C = _running_sum(g, by_k)
    bk = load(k, by_k).to(tl.float32)
    drow_q, drow_k = drow_q * tl.exp2(G), drow_k * tl.exp2(G)
    dkeep = dkeep * tl.exp2(G_C[None, :] - G)

    # through A, a tile of rows after another
    dcol = dkeep
    for tile in range(0, C // 16):
        rows = tile * 16 + tl.arange(0, 16)
        row, col = _factors(G, tile, C, BK)
        part, strip = _tokens(bh, chunk * C + rows, T, H, K, kk), _matrix(index, rows, C, i, C)
        rows_q = load(q, part).to(tl.float32) * scale * row                              # (16, BK)
        rows_k = load(k, part).to(tl.float32) * row
        a_qk, a_kk = load(dA_qk, strip), load(dA_kk, strip)                              # (16, C)
        here = (tl.arange(0, C // 16) == tile)[:, None, None]
        new = (_dot(a_qk, col * bk, DOT) * row)[None]                                  # (1, 16, BK)
        drow_q += tl.reshape(tl.where(here, new, 0.0), (C, BK))
        new = (_dot(a_kk, col * bk, DOT) * row)[None]
        drow_k += tl.reshape(tl.where(here, new, 0.0), (C, BK))
        dcol += col * (_dot(tl.trans(a_qk), rows_q, DOT) + _dot(tl.trans(a_kk), rows_k, DOT))

    # the decays
    dG = load(q, by_k).to(tl.float32) * drow_q * scale + bk * (drow_k - dcol)
    dG_C = tl.sum(bk * dkeep, axis=0) + tl.exp2(G_C) * held
    dG += tl.where((i == C - 1)[:, None], dG_C[None, :], 0.0)
    store(dq, by_k, drow_q * scale)
    store(dk, by_k, drow_k + dcol)
    store(dg, by_k, tl.cumsum(dG, axis=0, reverse=True))


# --------------------------------------------------------------------------------------------------
# Launching. Autotune tries each of these once per widths, C and dtypes, on the first sequence of at
# least 1,024 tokens. Shorter ones, and the interpreter, take the first choice: it fits every chip
# of `python kernels.py`, also with K and V of 256 in fp32; in bf16 with K and V up to 128 it spills
# on no NVIDIA chip there, but for two warps on Hopper, a little.
#
# With four warps or more Triton uses the asynchronous products of Hopper and Blackwell, and its
# tracker has reports of kernels like these going wrong: on Hopper several products of 64 rows by 16
# or 32 columns read outside their memory (issue 11366, in 3.7.1); on Blackwell a state carried
# through products in 2 stages or more differs from run to run (9871, 10590, in 3.6 and 3.7). No
# release is known to mend both, so such choices are never taken there.

def _reported(name, major, choice):
    """Whether this choice is one of those, on a GPU of compute capability major."""
    if choice.num_warps < 4:
        return False
    return (major == 9 and name in ("dsolve", "dinputs")
            or major == 10 and name in ("states", "dstates") and choice.num_stages > 1)


def choices_on(kernel, device):
    """A tuned kernel's choices on this GPU, the first to be taken untuned."""
    major = 0
    if device.type == "cuda" and not torch.version.hip:
        major = torch.cuda.get_device_capability(device)[0]
    return [c for c in kernel.configs if not _reported(kernel.base_fn.__name__, major, c)]


def _tuned(kernel, key, *choices):
    """choices: (warps, stages, block sizes) each; key: the arguments that call for a new choice."""
    configs = [triton.Config(blocks, num_warps=warps, num_stages=stages)
               for warps, stages, blocks in choices]

    def prune(configs, arguments, **constants):
        return choices_on(tuned, arguments[kernel.arg_names[0]].device)
    tuned = triton.autotune(configs, key, prune_configs_by=dict(early_config_prune=prune))(kernel)
    return tuned


_scores = _tuned(scores, ["K", "C"],
    (4, 2, dict(BK=32)), (4, 2, dict(BK=64)), (2, 2, dict(BK=32)))
_solve = _tuned(solve, ["K", "V", "C"],
    (4, 2, dict(BK=32, BV=64)), (8, 2, dict(BK=32, BV=64)), (4, 2, dict(BK=16, BV=32)))
_states = _tuned(states, ["K", "V", "C"],
    (4, 1, dict(BV=32)), (4, 2, dict(BV=32)), (4, 2, dict(BV=16)), (4, 2, dict(BV=64)),
    (2, 2, dict(BV=16)))
_output = _tuned(output, ["K", "V", "C"],
    (4, 2, dict(BK=64, BV=64)), (4, 2, dict(BK=32, BV=128)), (4, 3, dict(BK=32, BV=64)))
_dstates = _tuned(dstates, ["K", "V", "C"],
    (4, 1, dict(BV=32)), (4, 2, dict(BV=16)), (8, 1, dict(BV=64)))
_dsolve = _tuned(dsolve, ["V", "C"],
    (4, 2, dict(BV=32)), (4, 2, dict(BV=64)), (8, 2, dict(BV=64)),
    (2, 2, dict(BV=32)))
_dinputs = _tuned(dinputs, ["K", "V", "C"],
    (4, 2, dict(BK=16, BV=64)), (8, 2, dict(BK=32, BV=32)), (4, 3, dict(BK=16, BV=32)),
    (2, 2, dict(BK=16, BV=32)))


class _Chunks:
    """The part of forward that backward runs again: `scores`, `solve` and `states`."""

    def __init__(self, q, k, v, g, beta, state, segments, C, tune, output=True):
        (B, T, H, K), V = q.shape, v.shape[-1]
        BH = B * H
        N = triton.cdiv(triton.cdiv(T, C), segments) * segments     # chunks past T change nothing
        work = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
        self.BH, self.N, self.sizes, self.scale = BH, N, (T, H, N, K, V), K ** -0.5
        self.new = lambda *shape, dtype=work: q.new_empty(BH, N, *shape, dtype=dtype)
        # how fp32 numbers are multiplied: tf32 keeps more than bf16 and fp16 inputs have
        dot = "ieee" if torch.version.hip else "tf32x3" if v.dtype == torch.float32 else "tf32"
        self.fixed, self.tune = dict(C=C, DOT=dot), tune

        self.beta = beta
        self.A_qk, self.inverse = self.new(C, C) if output else None, self.new(C, C)
        L = self.new(C, C, dtype=torch.float32)
        self.W, self.q_plus, self.k_minus = self.new(C, K), self.new(C, K), self.new(C, K)
        self.total = self.new(K, dtype=torch.float32)
        self.U, self.entering = (self.new(C, V), self.new(K, V)) if output else (None, None)
        U0 = self.new(C, V)
        self.launch(_scores, (N * C // 16, BH), q, k, g, self.beta, self.A_qk, L,
                    T, H, N, K, self.scale)
        self.launch(_solve, (N, BH), q, k, v, g, self.beta, L, self.inverse, self.W, U0,
                    self.q_plus, self.k_minus, self.total, *self.sizes, self.scale)

        first = None if state is None else state.reshape(BH, K, V)
        if segments > 1:
            first = self.borders(first, U0, segments)
        last = self.run(U0, first, BH * segments, self.U, self.entering)
        self.last = last.view(BH, segments, K, V)[:, -1].reshape(B, H, K, V).contiguous()

    def borders(self, first, U0, segments):
        """The state that enters each segment (BH · segments, K, V): S ↦ S̃ + P S, as in kda.py."""
        BH, (_, _, _, K, V) = self.BH, self.sizes
        S = self.run(U0, None, BH * segments).view(BH, segments, K, V)
        identity = torch.eye(K, device=U0.device).repeat(BH * segments, 1, 1)
        P = self.run(None, identity, BH * segments).view(BH, segments, K, K)
        entering = [torch.zeros_like(S[:, 0]) if first is None else first]
        with torch.autocast(U0.device.type, enabled=False):     # states stay in fp32
            for s in range(segments - 1):
                entering.append(S[:, s] + P[:, s] @ entering[-1])
        return torch.stack(entering, dim=1).reshape(BH * segments, K, V)

    def run(self, U0, first, rows, U=None, entering=None):
        """`states` from first (rows, K, ·), rows = BH · segments. → the last ones, as many."""
        *_, K, V = self.sizes
        V = V if first is None else first.shape[-1]
        last = self.W.new_empty(rows, K, V, dtype=torch.float32)
        chunks = self.N // (rows // self.BH)
        self.launch(_states, lambda meta: (triton.cdiv(V, meta["BV"]), rows),
                    self.W, U0, self.k_minus, self.total, first, U, entering, last,
                    chunks, K, V, KP=triton.next_power_of_2(K))
        return last

    def launch(self, kernel, grid, *arguments, **constants):
        constants |= self.fixed
        if not self.tune:
            choice = choices_on(kernel, self.W.device)[0]
            kernel, constants = kernel.fn, constants | choice.all_kwargs()
        launch(self.W, kernel, grid, *arguments, **constants)


class _KDA(torch.autograd.Function):

    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, segments, C, tune, output):
        c, o = _Chunks(q, k, v, g, beta, state, segments, C, tune, output), None
        if output:
            o = torch.empty_like(v)
            c.launch(_output, lambda meta: (c.N * triton.cdiv(v.shape[-1], meta["BV"]), c.BH),
                     c.q_plus, c.A_qk, c.U, c.entering, o, *c.sizes)
        ctx.save_for_backward(q, k, v, g, beta, state)
        ctx.rest = segments, C, tune
        ctx.set_materialize_grads(False)
        return o, c.last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlast):
        q, k, v, g, beta, state = ctx.saved_tensors
        c = _Chunks(q, k, v, g, beta, state, *ctx.rest)
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dlast = None if dlast is None else dlast.contiguous()
        (T, H, N, K, V), C = c.sizes, c.fixed["C"]
        dq, dk, dg, dbeta, dU, leaving = (
            torch.empty_like(x) for x in (q, k, g, beta, c.U, c.entering))
        dfirst = torch.empty_like(state) if ctx.needs_input_grad[5] else None
        dv = torch.empty_like(v, dtype=c.U.dtype)
        dA_qk, dA_kk = (c.new(C, C, dtype=torch.float32) for _ in range(2))
        c.launch(_dstates, lambda meta: (triton.cdiv(V, meta["BV"]), c.BH),
                 c.W, c.q_plus, c.k_minus, c.A_qk, c.total, do, dlast, dU, leaving,
                 dfirst, *c.sizes, KP=triton.next_power_of_2(K))
        c.launch(_dsolve, (N, c.BH),
                 c.inverse, c.beta, c.U, dU, do, dv, dbeta, dA_qk, dA_kk, T, H, N, V)
        c.launch(_dinputs, lambda meta: (N * triton.cdiv(K, meta["BK"]), c.BH),
                 q, k, g, do, dv, c.U, c.entering, leaving, dA_qk, dA_kk, dq, dk, dg,
                 *c.sizes, c.scale)
        return dq, dk, dv.to(v.dtype), dg, dbeta, dfirst, None, None, None, None


def _unfit(q, v):
    """What these kernels cannot do with q and v, in words; None if they can."""
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if size % 16 or not 16 <= size <= 256:
            return f"{name} = {size}: expected a multiple of 16 from 16 to 256; kda_chunk takes any"
    if q.shape[0] * q.shape[2] >= 1 << 16:
        return (f"q: {q.shape[0]} sequences × {q.shape[2]} heads; expected fewer than 65,536, "
                f"the limit of a launch; split the batch")
    if not (q.is_cuda or INTERPRETED.value):
        return (f"q: expected a tensor on a GPU, got one on {q.device}; kda_chunk runs anywhere, "
                f"and TRITON_INTERPRET=1 runs the kernels on a CPU")


def fits(q, v):
    """Whether these kernels can take q and v."""
    return q.is_cuda and v.dtype != torch.float64 and not _unfit(q, v)


def _check(q, k, v, g, beta, state, look_at_g):
    """Errors: ValueError that names the argument, what came and what is allowed."""
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name}: expected (B, T, H, ·), none of them zero, "
                             f"got {tuple(x.shape)}")
    if _unfit(q, v):
        raise ValueError(_unfit(q, v))
    (B, T, H, K), V = q.shape, v.shape[-1]
    floats, same = (torch.float32, torch.bfloat16, torch.float16), (q.dtype,)
    for name, x, shape, dtypes in (
            ("q", q, (B, T, H, K), floats), ("k", k, (B, T, H, K), same),
            ("v", v, (B, T, H, V), same), ("g", g, (B, T, H, K), floats),
            ("beta", beta, (B, T, H), floats), ("state", state, (B, H, K, V), floats[:1])):
        if x is None and name == "state":
            continue
        if x.shape != shape or x.dtype not in dtypes or x.device != q.device:
            allowed = " or ".join(str(d)[6:] for d in dtypes)
            raise ValueError(f"{name}: expected {shape}, {allowed} on {q.device}, to go with q; "
                             f"got {tuple(x.shape)}, {str(x.dtype)[6:]} on {x.device}")
    if look_at_g:
        low, high = g.detach().aminmax()
        if low < -5.9001 or high > 0:
            raise ValueError(f"g: expected log decays in [-5.9, 0], got {low:.4g} to {high:.4g}")


CHUNKS = {}     # (K, V, dtype, whether with backward) → tokens of a chunk, as measured


def _faster_chunk(inputs, segments, train):
    """64 or 32 tokens, whichever is faster for these inputs: forward and, to train, backward."""
    def run(C):
        o, _ = _KDA.apply(*inputs, segments, C, True, True)
        if train:
            wanted = [x for x in inputs if x is not None and x.requires_grad]
            torch.autograd.grad(o, wanted, o.detach())
    times = {C: triton.testing.do_bench(lambda: run(C)) for C in (64, 32)}
    return min(times, key=times.get)


@torch.compiler.disable
def kda(q, k, v, g, beta, state=None, segments=None, chunk=None, look_at_g=True, output=True):
    """
    kda_recurrent's arguments and results, differentiable in everything. q, k, v in fp32, bf16 or
    fp16; copied if not contiguous. g's sums, the solve and the carried state are fp32.

    segments: parts of the sequence whose states are found side by side; None: enough to fill the
    GPU. chunk: 32 or 64 tokens; None: the faster, measured on the first sequence of at least 1,024
    tokens of these widths, and 64 until then. Both choices, and the tuning of the kernels, move the
    last digits, and the first depends on the batch size: to compare bit for bit, give segments and
    chunk. look_at_g=False: g is known to lie in [−5.9, 0]; to look, the CPU waits for the GPU.
    output=False: only the state is wanted, and o is None.
    Errors: ValueError that names the argument.
    """
    _check(q, k, v, g, beta, state, look_at_g)
    (B, T, H, K), V = q.shape, v.shape[-1]
    if chunk not in (None, 32, 64):
        raise ValueError(f"chunk: expected 32 or 64 tokens, or None for the faster, got {chunk}")
    if segments is None:     # two programs a multiprocessor, at least 1,024 tokens a segment
        room = 1
        if q.is_cuda:
            room = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
        segments = max(1, min(room // (B * H * triton.cdiv(V, 32)), T // 1024))
    if segments < 1 or B * H * segments >= 1 << 16:
        raise ValueError(f"segments = {segments}: expected at least 1, and with {B} sequences × "
                         f"{H} heads fewer than 65,536 in all, the limit of a launch")
    inputs = [x if x is None else x.contiguous() for x in (q, k, v, g, beta, state)]
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    key = K, V, q.dtype, train
    with torch.cuda.device_of(q):
        # timing waits for the GPU, which a stream that is being captured must not
        tune = q.is_cuda and T >= 1024 and not torch.cuda.is_current_stream_capturing()
        if chunk is None and key not in CHUNKS and tune:
            CHUNKS[key] = _faster_chunk(inputs, segments, train)
    return _KDA.apply(*inputs, segments, chunk or CHUNKS.get(key, 64), tune, output)


# --------------------------------------------------------------------------------------------------
# Decode: the recurrence itself

@triton.jit
def decode(q, k, v, g, beta, state, new_state, o, kept, T, H, K, V, scale,
           KP: tl.constexpr, BV: tl.constexpr):
    """A few tokens of one head; a (K, BV) part of the state, read and written once.
    Grid (blocks of V, BH)."""
    bh = tl.program_id(1)
    kk, vv = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    whole = _matrix(bh, kk, K, vv, V)
    S = load(state, whole)
    count = T if kept is None else tl.load(kept + bh // H).to(tl.int32)
    for t in range(count):
        row = (bh // H * T + t) * H + bh % H
        by_k, by_v = (row * K + kk, kk < K), (row * V + vv, vv < V)
        S *= tl.exp2(load(g, by_k).to(tl.float32) * LOG2E)[:, None]
        bk, bq = load(k, by_k).to(tl.float32)[:, None], load(q, by_k).to(tl.float32)[:, None]
        error = load(v, by_v).to(tl.float32) - tl.sum(S * bk, axis=0)
        S += bk * (tl.load(beta + row).to(tl.float32) * error)[None, :]
        if o is not None:
            store(o, by_v, tl.sum(S * bq, axis=0) * scale)
    store(new_state, whole, S)


@torch.compiler.disable
@torch.no_grad()
def kda_decode(q, k, v, g, beta, state, new_state=None, kept=None):
    """
    A few tokens, in one launch: q, k, g (B, T, H, K), v (B, T, H, V), beta (B, T, H) → o of v's
    shape. state (B, H, K, V), fp32 and contiguous, is changed in place, or stays and new_state
    takes the new one. kept (B,) int64: of how many tokens of each row; then o is None.
    """
    _check(q, k, v, g, beta, state, look_at_g=False)
    (B, T, H, K), V = q.shape, v.shape[-1]
    new_state = state if new_state is None else new_state
    if not (state.is_contiguous() and new_state.is_contiguous()):
        raise ValueError(f"state: expected a contiguous one, to change it in place, "
                         f"got strides {state.stride()}")
    o = None if kept is not None else torch.empty(v.shape, dtype=v.dtype, device=v.device)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    launch(q, decode, (triton.cdiv(V, 32), B * H), q, k, v, g, beta, state, new_state, o, kept,
           T, H, K, V, K ** -0.5, KP=triton.next_power_of_2(K), BV=32, num_warps=4)
    return o


# --------------------------------------------------------------------------------------------------
# What the compiler says, without a GPU

def report():
    """
    Compile every kernel at its first choice, in bf16, for K = V = 64 and 128 and rows of 1,024, and
    print what ptxas says. Those that hold all of K also in fp32 for 256: these may spill, and must
    fit.
    """
    chips = [("cuda", 80, 32, 163), ("cuda", 89, 32, 99), ("cuda", 90, 32, 227),
             ("cuda", 100, 32, 227), ("hip", "gfx942", 64, 64)]     # threads a warp, KB a block
    kernels = [     # with the kinds of their arguments, below
        (_scores, "bbffbfiiiis"), (_solve, "bbbfffbbbbbfiiiiis"), (_states, "bbbffbbfiii"),
        (_output, "bbbbbiiiii"), (_dstates, "bbbbfbfbbfiiiii"), (_dsolve, "bfbbbbfffiiii"),
        (_dinputs, "bbfbbbbbffbbfiiiiis"), (decode, "bbbffffbliiiis"),
        (elementwise.norm_forward, "bbfbiiis"), (elementwise.norm_backward, "bbfbbbfiiisi"),
        (elementwise.arguments_forward, "tttbbffttffiiiis"),
        (elementwise.arguments_backward, "tttbbfftffttbbfiiiis"),
        (elementwise.situ_kernel, "bbnbbbiiiiss"), (elementwise.mix_forward, "bffstbfii"),
        (elementwise.mix_backward, "bffstbftffii")]
    print(f"triton {triton.__version__}, bf16, 256: fp32; "
          f"registers and spilled bytes of a thread, KB of shared memory a block")
    for kernel, kinds in kernels:
        configs = [triton.Config(dict(BV=32), num_warps=4, num_stages=2)]
        if hasattr(kernel, "configs"):
            kernel, configs = kernel.fn, kernel.configs
        widths = (64, 1024) if "norm" in kernel.__name__ else (1024,)
        if "arguments" in kernel.__name__:     # of which one takes a compiler 20 s
            widths = (128,)
        elif "V" in kernel.arg_names or "K" in kernel.arg_names:
            widths = (64, 128, 256) if "KP" in kernel.arg_names else (64, 128)
        for D in widths:
            line = f"{kernel.__name__:18s} {D:4d} wide"
            for chip in chips:
                major = 0 if chip[0] == "hip" else chip[1] // 10
                choice = [c for c in configs if not _reported(kernel.__name__, major, c)][0]
                line += f" | {chip[1]}: {_compiled(kernel, kinds, D, choice, *chip)}"
            print(line, flush=True)


def _compiled(kernel, kinds, D, config, backend, arch, warp, limit):
    """kinds: a letter of `words` per argument; those beyond are constants. → what is printed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    in_fp32 = D == 256 and "KP" in kernel.arg_names
    words = dict(b="*fp32" if in_fp32 else "*bf16", f="*fp32", t=("*bf16",) * 3,
                 i="i32", l="*i64", s="fp32", n=None)
    types = {name: words[kind] for name, kind in zip(kernel.arg_names, kinds)}
    dot = "ieee" if backend == "hip" else "tf32x3" if in_fp32 else "tf32"
    sizes = dict(C=64, KP=D, BLOCK=1024, BD=D, ROWS=1024 // D, WIDTH=4, PAST=4, TAPS=4,
                 STEPS=D // 8, DOT=dot, **config.kwargs)
    constants = {name: sizes.get(name) for name in kernel.arg_names if types.get(name) is None}
    signature = types | dict.fromkeys(constants, "constexpr")
    widths = "K", "V", "D", "stride", "width", "d"
    aligned = {(n,): [["tt.divisibility", 16]] for n, (name, word) in enumerate(types.items())
               if word in ("*bf16", "*fp32") or name in widths}
    source = ASTSource(kernel, signature, constants, aligned)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    try:
        built = triton.compile(source, GPUTarget(backend, arch, warp), options)
    except RuntimeError:     # triton 3.6 cannot make `solve` for gfx942, 3.7 can
        return "this triton fails"
    shared = f"{built.metadata.shared / 1024:.0f} KB"
    if built.metadata.shared > limit * 1024:
        shared += " TOO MUCH"
    if backend == "hip":
        return shared
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin", buffering=0) as file:
        file.write(built.asm["cubin"])
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout).groups()
    return shared + ", {} registers, {} spilled".format(*usage)


if __name__ == "__main__":
    report()
