"""
What it costs, measured here. Ratios are of medians, with both sides run in turn in one process, so that a noisy machine falls on both.

    python bench.py              everything below
    python bench.py kda          kda_chunk against kda_recurrent, forward + backward; on a GPU the Triton kernels beside other forms
    python bench.py kernels      every Triton kernel compiled for several GPUs, none of which has to be here: registers, spills, shared memory
    python bench.py moe          the grouped experts against a loop over experts
    python bench.py step [--setting=…]      a training step of the quickstart model against a plain GPT of as many active parameters
    python bench.py decode       prefill and decode speed against context length
    python bench.py balance      Quantile Balancing against the sign rule, on a router skewed on purpose
    python bench.py profile [config/NAME.py --setting=…]        where the time of a training step goes, by part
    python bench.py dist         experts over 2 processes against the same work without exchange; memory and traffic per GPU, on paper

and, for minutes to hours, what each idea brings: python bench.py ablate, gpt, long, scaling (study.py).
"""
import copy
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import kda
import moe
import muon
import train
from attnres import Mix
from lab.study import STUDIES, PlainGPT, by_processor, in_turn, now
from mla import GatedMLA
from model import K3, K3Config


# ----------------------------------------------------------------------------------------------------------------------

def bench_kda():
    if torch.cuda.is_available():
        return bench_kda_gpu()
    print("kda_chunk against kda_recurrent, forward + backward, fp32; errors are of the largest value, against fp64")
    for (B, T, H, K), aim, runs in (((4, 256, 4, 64), 15, 5), ((1, 2048, 4, 64), 50, 3)):
        torch.manual_seed(0)
        inputs = [F.normalize(torch.randn(B, T, H, K), dim=-1), F.normalize(torch.randn(B, T, H, K), dim=-1), torch.randn(B, T, H, K),
                  -5 * torch.sigmoid(2 * torch.randn(B, T, H, K) - 2), torch.rand(B, T, H)]
        weight = torch.randn(B, T, H, K)

        def run(f, inputs=inputs):
            inputs = [x.detach().requires_grad_() for x in inputs]
            o, _ = f(*inputs)
            return [o, *torch.autograd.grad((o * weight.to(o.dtype)).sum(), inputs)]
        slow, fast = in_turn(runs, lambda: run(kda.kda_recurrent), lambda: [run(kda.kda_chunk) for _ in range(5)])
        fast /= 5                                                          # five at once, as the caches are full of the slow one's tensors before
        errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(run(kda.kda_chunk), run(kda.kda_recurrent, [x.double() for x in inputs]))]
        print(f"  B={B} T={T} H={H} K=V={K}: {slow / fast:.1f} times as fast (aim {aim}); error forward {errors[0]:.1e} (aim 1e-5), "
              f"gradients {max(errors[1:]):.1e} (aim 1e-4)")


def bench_kda_gpu(K=128):
    """The Triton kernels beside kda_chunk, flash-linear-attention where it is installed, and the time to read and write q, k, v, g and o once."""
    import kernels
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        chunk_kda = None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {kernels.triton.__version__}; B=1, K=V={K}, bf16, ms: forward / forward + backward")
    for H in (64, 16):
        for T in (65536, 16384, 8192, 4096, 2048, 512):                    # the longest first: the kernels are tuned on what they see first
            torch.manual_seed(0)
            q, k, v, weight = (torch.randn(1, T, H, K, device="cuda") for _ in range(4))
            inputs = [F.normalize(q, dim=-1).bfloat16(), F.normalize(k, dim=-1).bfloat16(), v.bfloat16(),
                      -5 * torch.sigmoid(2 * torch.randn(1, T, H, K, device="cuda") - 2), torch.rand(1, T, H, device="cuda")]
            weight = weight.bfloat16()
            sides = dict(triton=lambda *x: kernels.kda(*x, look_at_g=False)[0])
            if T <= 8192:                                                  # beyond that it does not fit
                sides["kda_chunk"] = lambda *x: kda.kda_chunk(*x)[0]
            if chunk_kda:
                sides["fla"] = lambda q, k, v, g, beta: chunk_kda(q=q, k=k, v=v, g=g, beta=beta, safe_gate=True)[0]
            line = f"  H={H:2d} T={T:6,}"
            for name, f in sides.items():
                leaves = [x.detach().requires_grad_() for x in inputs]

                def forward(f=f):
                    with torch.no_grad():
                        f(*inputs)
                both = lambda f=f, leaves=leaves: torch.autograd.grad(f(*leaves), leaves, weight)
                line += f" | {name} {gpu_ms(forward):.3f} / {gpu_ms(both):.3f}"
            line += f" | bytes alone {T * H * K * (4 * 2 + 4) / 4.3e9:.3f}"
            if T == 512:
                truth = kda.kda_recurrent(*(x.double() for x in inputs))[0]
                line += f" | error {((sides['triton'](*inputs) - truth).norm() / truth.norm()).item():.1e} (aim 1e-2)"
            print(line, flush=True)
    B, H = 64, 16                                                          # decode: the state is read and written once
    q, k, v = (torch.randn(B, 1, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, beta, state = -torch.rand(B, 1, H, K, device="cuda"), torch.rand(B, 1, H, device="cuda"), torch.randn(B, H, K, K, device="cuda")
    ms, copy = gpu_ms(lambda: kernels.kda_decode(q, k, v, g, beta, state)), gpu_ms(lambda: state.mul_(1))
    print(f"  decode, B={B}, H={H}: {ms:.4f} ms a token, {ms / copy:.2f} times as long as going over the state once (aim 1.3)")


def bench_kernels():
    """Compile every kernel for chips that need not be here."""
    try:
        import kernels
    except ImportError:
        return print("triton is not installed: no kernels to compile")
    kernels.report()


def gpu_ms(f, runs=20):
    """Median ms of f on the GPU, after warming up (and tuning)."""
    for _ in range(3):
        f()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def bench_moe():
    E, k, tokens = 64, 4, 4096
    layer = K3(K3Config(n_layer=1, first_k_dense_replace=0, num_experts=E, num_experts_per_token=k, n_embd=256, moe_intermediate_size=64,
                        routed_expert_hidden_size=128)).layers[0].mlp
    z = torch.randn(tokens, 128, requires_grad=True)
    chosen, p = torch.rand(tokens, E).topk(k).indices, torch.rand(tokens, k)

    def loop():
        out = torch.zeros(tokens, 128)
        for e in range(E):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            h = moe.situ(z[token] @ layer.w13[e, 0].T, z[token] @ layer.w13[e, 1].T, 4.0, 25.0)
            out = out.index_add(0, token, h @ layer.w2[e].T * p[token, slot].unsqueeze(-1))
        return out
    grouped = lambda: layer.experts(z, chosen, p)
    same = (loop() - grouped()).abs().max().item()
    slow, fast = in_turn(5, lambda: loop().sum().backward(), lambda: grouped().sum().backward())
    print(f"experts, {E} of width 64 in a latent of 128, top-{k}, {tokens} tokens, forward + backward: grouped is {slow / fast:.1f} times as fast as a "
          f"loop over experts (aim 4); difference {same:.1e}")


def bench_step(*arguments):
    given, _ = train.read_arguments(["config/shakespeare.py", *arguments])
    sizes = {name: value for name, value in given.items() if name in K3Config.__dataclass_fields__}
    config, batch, context = K3Config(**sizes), given.get("batch_size", train.Settings.batch_size), given.get("context", train.Settings.context)
    k3 = K3(config)
    k3_optimizer = k3.configure_optimizers(1e-3)
    gpt = PlainGPT(config, context)                # as many active parameters: the same width and depth, the MLP's width makes up the difference
    gpt_optimizer = gpt.configure_optimizers(1e-3)
    idx = torch.randint(0, config.vocab_size, (batch, context))

    def step(model, optimizer):
        model(idx, idx)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if model is k3:
            model.update_router_bias()
    ours, plain = in_turn(10, lambda: step(k3, k3_optimizer), lambda: step(gpt, gpt_optimizer))
    print(f"a step of {' '.join(['config/shakespeare.py', *arguments])}, {batch} × {context} tokens, {k3.num_active_params():,} active parameters, "
          f"against a plain GPT with {gpt.num_active_params():,} (MLP width {gpt.layers[0]['up'].out_features}): {ours / plain:.2f} times as long "
          f"(aim 1.6); {ours * 1e3:.0f} and {plain * 1e3:.0f} ms")


def bench_decode():
    print("prefill in pieces of 1,024 tokens, then decode one by one; a model of the default sizes, one sequence")
    for name, mla_every, aim in (("KDA only", 0, 1.3), ("3:1 with MLA", 4, 2.5)):
        model = K3(K3Config(mla_every=mla_every, n_layer=4)).eval()
        caches, prefill = {}, {}
        with torch.no_grad():
            for context in (1024, 4096, 16384):
                cache, began = model.new_cache(1), time.perf_counter()
                for piece in torch.randint(0, 1024, (1, context)).split(1024, dim=1):
                    model(piece, cache=cache, last_only=True)
                caches[context], prefill[context] = cache, context / (time.perf_counter() - began)
            token = torch.zeros(1, 1, dtype=torch.long)
            decode = dict(zip(caches, in_turn(100, *(lambda cache=cache: model(token, cache=cache, last_only=True) for cache in caches.values()))))
        for context in caches:
            constant = sum(layer["state"].numel() + sum(t.numel() for t in layer["tails"]) for layer in caches[context] if "state" in layer)
            latents = sum(layer["latents"].shape[-1] * layer["length"] for layer in caches[context] if "latents" in layer)
            print(f"  {name:13s} context {context:>6,}: prefill {prefill[context]:>7,.0f} tokens/s, decode {1 / decode[context]:>5.0f} tokens/s; cache "
                  f"{constant:,} numbers constant, {latents:,} latents")
        print(f"  {name:13s} a token at 16,384 takes {decode[16384] / decode[1024]:.2f} times as long as at 1,024 (aim {aim})")


def bench_balance():
    print("max violation (max load / mean load − 1) after 0, 1, 2, … updates; a router skewed on purpose, fresh tokens every step")
    for E, k, tokens, aim, updates in ((64, 4, 8192, 0.25, 7), (896, 16, 32768, 0.3, 6)):
        def curve(update, steps, every=1):
            torch.manual_seed(0)
            skew, bias, out = torch.randn(E) * 1.5, torch.zeros(E), []
            for step in range(steps + 1):
                scores = torch.sigmoid(torch.randn(tokens, E) + skew)
                chosen, cutoff = moe.choose(scores, bias, k)
                load = torch.bincount(chosen.flatten(), minlength=E)
                if step % every == 0:
                    out.append(moe.load_figures(load)[0])
                bias = update(scores, cutoff, bias, load)
            return out

        def quantile(scores, cutoff, bias, load):
            histogram = moe.QuantileHistogram(E)
            histogram.observe(scores, cutoff, bias)
            return histogram.quantile_bias(bias, k)
        sign = lambda scores, cutoff, bias, load: bias + 1e-3 * torch.sign(load.float().mean() - load)
        curves = dict(quantile=curve(quantile, updates))
        if E == 64:
            curves["sign rule at 1e-3, every 50 updates"] = curve(sign, 500, every=50)
        print(f"  {E} experts, top-{k}, {tokens:,} tokens (aim: {aim} within {updates} updates)")
        for name, values in curves.items():
            print(f"    {name}: " + " ".join(f"{v:.2f}" for v in values))


class Mark(torch.autograd.Function):
    """Does nothing, but tells in the backward that it has come by here: what follows belongs to `part`."""

    @staticmethod
    def forward(ctx, x, clock, part):
        ctx.clock, ctx.part = clock, part
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.clock.enter("backward", ctx.part)
        return dy, None, None


class Clock:
    """Time by part of the model, and by phase: forward, backward, update."""

    def __init__(self, device):
        self.device, self.seconds, self.now = device, {}, ("", "")

    def enter(self, phase, part):
        """From here on, time is this part's."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        at = now()
        if self.now[0]:
            self.seconds[self.now] = self.seconds.get(self.now, 0.0) + at - self.began
        self.now, self.began = (phase, part), at

    def watch(self, f, part):
        """f, with its time counted: on what goes in and comes out sit marks, so its backward is seen too."""
        def mark(x, part):
            return Mark.apply(x, self, part) if isinstance(x, torch.Tensor) and x.requires_grad else x

        def watched(*arguments, **more):
            phase, outside = self.now
            self.enter(phase, part)
            out = f(*(mark(x, outside) for x in arguments), **more)
            out = tuple(mark(x, part) for x in out) if isinstance(out, tuple) else mark(out, part)
            self.enter(phase, outside)
            return out
        return watched


def bench_profile(*arguments):
    """The settings are those of a config file; tokens are random, so no data are needed."""
    given, _ = train.read_arguments(list(arguments) or ["config/shakespeare.py"])
    settings = train.Settings(**{name: value for name, value in given.items() if name in train.Settings.__dataclass_fields__})
    device, dtype, _ = train.set_up_machine(settings)
    model = K3(K3Config(**{name: value for name, value in given.items() if name in K3Config.__dataclass_fields__})).train().to(device)
    optimizer = model.configure_optimizers(settings.lr, settings.weight_decay, optimizer=settings.optimizer)
    idx = torch.randint(0, model.config.vocab_size, (settings.batch_size, settings.context), device=device)
    clock = Clock(device)

    def step():
        clock.enter("forward", "loss and what is left")
        for _ in range(settings.grad_accum):
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                loss = model(idx, idx)[1]
            clock.enter("backward", "loss and what is left")
            loss.backward()
            loss.item()
            clock.enter("forward", "loss and what is left")
        clock.enter("update", "gradient norm")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        clock.enter("update", "Muon and AdamW but for that")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.enter("update", "router bias")
        model.update_router_bias()
        clock.enter("", "")
    began = now()
    step()
    plain = now() - began
    runs = 5 if plain < 5 else 1                                           # a large model on a CPU takes minutes a step: its first one must do
    if runs > 1:
        (plain,) = in_turn(runs, step, clock=now)                                # before the marks are set
    for name, m in model.named_modules():
        part = {kda.KDA: "KDA: gates, unit vectors, norm", kda.ShortConv: "KDA: convolutions", GatedMLA: "MLA", moe.SiTUGLU: "dense and shared MLP",
                moe.LatentMoE: "MoE: latent maps and norm", Mix: "AttnRes mixtures"}.get(type(m))
        if name.endswith(("attn_norm", "mlp_norm")) or name == "norm":
            part = "norms of the layers"
        if name.endswith("_proj") and isinstance(model.get_submodule(name.rpartition(".")[0]), kda.KDA):
            part = "KDA: linear maps"
        if name in ("embed", "lm_head"):
            part = "embedding and head"
        if part:
            m.forward = clock.watch(m.forward, part)
        if isinstance(m, moe.LatentMoE):
            m.route, m.experts = clock.watch(m.route, "MoE: routing"), clock.watch(m.experts, "MoE: experts")
    kept = kda.kda, kda.linears, muon.newton_schulz
    kda.kda, kda.linears = clock.watch(kda.kda, "KDA: chunks"), clock.watch(kda.linears, "KDA: linear maps")
    muon.newton_schulz = clock.watch(muon.newton_schulz, "Muon: Newton–Schulz")
    clock.seconds.clear()
    times = []
    for _ in range(runs):
        began = now()
        step()
        times.append(now() - began)
    kda.kda, kda.linears, muon.newton_schulz = kept
    total = sum(clock.seconds.values())
    print(f"{' '.join(arguments) or 'config/shakespeare.py'}: {settings.grad_accum} × {settings.batch_size} × {settings.context} tokens, "
          f"{model.num_params():,} parameters, {device}, {str(dtype)[6:]}{', processor time' if by_processor() else ''}; a step takes "
          f"{plain * 1e3:,.0f} ms, with the clock {statistics.median(times) * 1e3:,.0f} ms\n")
    print("| part | forward, ms | backward, ms | update, ms | share |\n|---|---|---|---|---|")
    parts = dict.fromkeys(part for _, part in clock.seconds)
    rows = {part: [clock.seconds.get((phase, part), 0.0) / len(times) for phase in ("forward", "backward", "update")] for part in parts}
    for part, row in sorted(rows.items(), key=lambda item: -sum(item[1])):
        print(f"| {part} | {' | '.join(f'{s * 1e3:,.1f}' if s else '' for s in row)} | {sum(row) * len(times) / total:.1%} |")


def bench_dist():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(dist_rank, (port,), nprocs=2)
    dist_on_paper()


def dist_rank(rank, port, d=256, tokens=4096):
    """One of 2 processes, each with a thread and with tokens of its own. Every time is of both, from one barrier to the next."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    train.keep_memory()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = K3(K3Config(n_layer=1, first_k_dense_replace=0, num_experts=64, num_experts_per_token=4, n_embd=d, moe_intermediate_size=128,
                        routed_expert_hidden_size=d // 2))
    for p in model.parameters():
        if p.abs().sum() == 0:
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    whole = model.layers[0].mlp
    sides = {"all experts on both, no exchange": whole}
    for name, balance_ranks in (("experts over 2", False), ("and balance_ranks", True)):
        sides[name] = copy.deepcopy(whole)
        sides[name].share_experts(dist.group.WORLD, balance_ranks)
    x, weight = torch.randn(2, 2, 1, tokens, d)                            # [inputs, weights of the loss], [rank]

    def run(layer):
        (layer(x[rank].detach().requires_grad_()) * weight[rank]).sum().backward()
        dist.barrier()
    times = dict(zip(sides, in_turn(10, *(lambda layer=layer: run(layer) for layer in sides.values()))))
    base = times["all experts on both, no exchange"]
    if rank == 0:
        print(f"LatentMoE over 2 processes of one thread, gloo, d={d}, latent {d // 2}, 64 experts of width 128, top-4, {tokens} tokens each, forward + backward")
        for name, seconds in times.items():
            print(f"  {name}: {seconds * 1e3:.0f} ms, {seconds / base:.2f} times as long" + " (aim 1.35)" * (seconds != base))
    # 20 steps of plain gradient descent, beside one process that has all tokens
    worst = torch.zeros(3)                                                 # of outputs, gradients, weights
    for balance_ranks in (False, True):
        one, ours = copy.deepcopy(whole), copy.deepcopy(whole)
        ours.share_experts(dist.group.WORLD, balance_ranks)
        for step in range(20):
            torch.manual_seed(step)
            x, target = torch.randn(2, 2, 1, 256, d)
            for layer in (one, ours):
                layer.zero_grad()
            y = torch.stack([one(half) for half in x])                     # (2, 1, 256, d)
            (y - target).square().sum().backward()
            y_ours = ours(x[rank])
            (y_ours - target[rank]).square().sum().backward()
            worst[0] = max(worst[0], (y_ours - y[rank]).abs().max() / y.abs().max())
            for (name, p), q in zip(one.named_parameters(), ours.parameters()):
                part = slice(rank * 32, rank * 32 + 32) if name in ("w13", "w2") else slice(None)
                if name not in ("w13", "w2"):
                    dist.all_reduce(q.grad)
                worst[1] = max(worst[1], (q.grad - p.grad[part]).abs().max() / p.grad.abs().max())
                with torch.no_grad():
                    p -= 1e-5 * p.grad
                    q -= 1e-5 * q.grad
                    worst[2] = max(worst[2], (q - p[part]).abs().max() / p.abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print("  20 steps of gradient descent against one process, largest difference over largest value (aim 1e-6): outputs {:.1e}, gradients {:.1e}, "
              "weights {:.1e}".format(*worst.tolist()))
    dist.destroy_process_group()


def dist_on_paper(tokens=16384):
    """Per GPU, from the formulas: fp32 weights, gradients and moments as muon.py shares them out; bf16 latents; without activations."""
    b1 = K3Config(vocab_size=50304, n_layer=24, n_embd=1792, n_head=14, kda_key_dim=128, kda_value_dim=128, q_lora_rank=896, kv_lora_rank=256,
                  qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=7168, num_experts=128, num_experts_per_token=8,
                  moe_intermediate_size=512, routed_expert_hidden_size=896, attn_res_block_size=4)
    print(f"on paper, per GPU and step of {tokens:,} tokens a GPU, in GB: memory for weights + gradients + moments (without activations), what travels for")
    print("dense gradients and weights | expert gradients and weights | tokens to and from experts")
    for name, config, Ms in (("1B active", b1, {8: 8, 64: 8, 1024: 8}), ("K3", K3Config.k3(), {8: 8, 64: 64, 1024: 128})):
        with torch.device("meta"):
            model = K3(config)
        moes = [layer.mlp for layer in model.layers if isinstance(layer.mlp, moe.LatentMoE)]
        experts = [w for m in moes for w in (m.w13, m.w2)]
        dense = [p for p in model.parameters() if p not in set(experts)]
        size = lambda params: sum(p.numel() for p in params)
        moments = lambda params: size(params) + size({model.embed.weight, model.lm_head.weight} & set(params))      # AdamW has two, Muon one
        share = lambda n: (n - 1) / n
        print(f"  {name}: {model.num_params() / 1e9:,.1f}B parameters, {model.num_active_params() / 1e9:.2f}B active, "
              f"{size(dense) / 1e9:.1f}B outside the experts")
        for N, M in Ms.items():
            ours = [w[:len(w) // M] for w in experts]
            memory = 8 * size(dense + ours) + 4 * sum(max(map(moments, muon.share_out(params, n))) for params, n in ((dense, N), (ours, N // M)))
            travels = (12 * size(dense) * share(N), 12 * size(ours) * share(N / M),                  # gradients twice round, weights once
                       8 * sum(m.k for m in moes) * config.routed_expert_hidden_size * tokens * share(M))           # there and back, twice, 2 bytes
            print(f"    N = {N:4}, experts over {M:3}: memory {memory / 1e9:7,.0f} | travels " + " | ".join(f"{x / 1e9:6,.1f}" for x in travels))


BENCHES = dict(kda=bench_kda, kernels=bench_kernels, moe=bench_moe, step=bench_step, decode=bench_decode, balance=bench_balance, profile=bench_profile, dist=bench_dist)

if __name__ == "__main__":
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    train.keep_memory()
    try:
        if name in STUDIES:
            STUDIES[name](rest)
            sys.exit()
        settings = rest if name == "profile" or name == "step" and rest and rest[0].startswith("--") else []
        names = [name] if settings else sys.argv[1:] or list(BENCHES)
        unknown = [n for n in names if n not in BENCHES]
        if unknown:
            raise ValueError(f"no bench {unknown[0]}; there are: {', '.join([*BENCHES, *STUDIES])}")
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
        for name in names:
            BENCHES[name](*settings)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; a study goes on from its last finished run")
