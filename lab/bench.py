"""
What K3's parts cost, measured here. A ratio is one of medians, with both sides run in turn in one
process, so that other programs on the machine slow both alike.

    python -m lab.bench             all of these
    python -m lab.bench kda         kda_chunk against kda_recurrent, forward and backward; on a GPU
                                    the Triton kernels beside other forms
    python -m lab.bench kernels     every Triton kernel compiled for several GPUs, none of which has
                                    to be here: registers, spills, shared memory
    python -m lab.bench moe         the grouped experts against a loop over experts
    python -m lab.bench step        a training step of the quickstart's model against a plain GPT of
                                    equal active size
    python -m lab.bench decode      speed of prefill and decode by context length
    python -m lab.bench balance     Quantile Balancing against the sign rule, on a skewed router
    python -m lab.bench profile     where the time of a training step goes, by part
    python -m lab.bench gpu         what a GPU is asked to do, counted without one: launches, bytes,
                                    waits, memory, and from them its time on paper (lab/gpu.py)
    python -m lab.bench dist        experts over 2 processes against the same work without exchange;
                                    memory and traffic per GPU, on paper

Names can be combined: python -m lab.bench kda moe. Three benches take a config file (otherwise the
quickstart's) and settings: python -m lab.bench profile config/gpu_small.py --batch_size=2

    step       --batch_size, --context and the fields of K3Config
    gpu        these, and --grad_accum
    profile    these, and --grad_accum, --optimizer, --device, --dtype

How well a model reads after config/reading.py: python -m lab.bench reading (lab/reading.py). What
drafts bring after config/draft.py: python -m lab.bench draft (lab/draft.py). From a model to one
that thinks as long as it is told: python -m lab.bench post (lab/post.py).
What each idea of K3 brings, in minutes to hours: python -m lab.study.
"""
import contextlib
import copy
import os
import socket
import statistics
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import cli
import kda
import model as model_file
import moe
import muon
import train
from attnres import Mix
from lab import draft, post, reading
from lab.study import STUDIES, PlainGPT, by_processor, in_turn, now
from mla import GatedMLA
from model import K3, K3Config

# --------------------------------------------------------------------------------------------------
# kda, kernels

def bench_kda():
    """kda_chunk against its definition. On a GPU, the Triton kernels instead."""
    if torch.cuda.is_available():
        return bench_kda_gpu()
    print("kda_chunk against kda_recurrent, forward + backward, fp32; errors are of the largest "
          "value, against fp64")
    for (B, T, H, K), aim, runs in (((4, 256, 4, 64), 15, 5), ((1, 2048, 4, 64), 50, 3)):
        inputs, weight = kda_inputs(B, T, H, K)
        # five at once: the first of them finds the caches full of the slow form's tensors
        slow, five_fast = in_turn(
            runs, lambda: gradients(kda.kda_recurrent, inputs, weight),
            lambda: [gradients(kda.kda_chunk, inputs, weight) for _ in range(5)])
        exact = gradients(kda.kda_recurrent, [x.double() for x in inputs], weight)
        forward, *backward = (((a - b).abs().max() / b.abs().max()).item()
                              for a, b in zip(gradients(kda.kda_chunk, inputs, weight), exact))
        print(f"  B={B} T={T} H={H} K=V={K}: {slow / (five_fast / 5):.1f} times as fast "
              f"(aim {aim}); error forward {forward:.1e} (aim 1e-5), gradients "
              f"{max(backward):.1e} (aim 1e-4)")


def kda_inputs(B, T, H, K, device="cpu"):
    """[q, k, v, g (B, T, H, K), beta (B, T, H)] as a layer has them, and a weight of the output."""
    torch.manual_seed(0)
    draw = lambda: torch.randn(B, T, H, K, device=device)
    q, k, v = F.normalize(draw(), dim=-1), F.normalize(draw(), dim=-1), draw()
    g = -5 * torch.sigmoid(2 * draw() - 2)
    beta = torch.rand(B, T, H, device=device)
    return [q, k, v, g, beta], draw()


def gradients(f, inputs, weight):
    """→ f's first output, and the gradients of Σ weight · output for the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, _ = f(*leaves)
    return [o, *torch.autograd.grad((o * weight.to(o.dtype)).sum(), leaves)]


def bench_kda_gpu(K=128):
    """
    The Triton kernels beside kda_chunk, flash-linear-attention if it is installed, and the time to
    read and write q, k, v, g and o once.
    """
    import kernels
    sides = dict(triton=lambda *x: kernels.kda(*x, look_at_g=False)[0],
                 kda_chunk=lambda *x: kda.kda_chunk(*x)[0])
    try:
        from fla.ops.kda import chunk_kda
        sides["fla"] = lambda q, k, v, g, beta: chunk_kda(q=q, k=k, v=v, g=g, beta=beta,
                                                          safe_gate=True)[0]
    except ImportError:
        pass
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton "
          f"{kernels.triton.__version__}; B=1, K=V={K}, bf16, ms: forward / forward + backward")
    for H in (64, 16):
        for T in (65536, 16384, 8192, 4096, 2048, 512):    # kernels are tuned on the first: longest
            (q, k, v, g, beta), weight = kda_inputs(1, T, H, K, "cuda")
            inputs = [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta]
            words = [f"  H={H:2d} T={T:6,}"]
            for name, f in sides.items():
                if name == "kda_chunk" and T > 8192:       # would not fit in memory
                    continue
                forward, both = forward_and_backward_ms(f, inputs, weight.bfloat16())
                words.append(f"{name} {forward:.3f} / {both:.3f}")
            words.append(f"bytes alone {T * H * K * (4 * 2 + 4) / 4.3e9:.3f}")
            if T == 512:
                exact = kda.kda_recurrent(*(x.double() for x in inputs))[0]
                off = ((sides["triton"](*inputs) - exact).norm() / exact.norm()).item()
                words.append(f"error {off:.1e} (aim 1e-2)")
            print(" | ".join(words), flush=True)

    B, H = 64, 16
    q, k, v = (torch.randn(B, 1, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, beta = -torch.rand(B, 1, H, K, device="cuda"), torch.rand(B, 1, H, device="cuda")
    state = torch.randn(B, H, K, K, device="cuda")
    decode = gpu_ms(lambda: kernels.kda_decode(q, k, v, g, beta, state))
    once = gpu_ms(lambda: state.mul_(1))                   # reads and writes the state once
    print(f"  decode, B={B}, H={H}: {decode:.4f} ms a token, {decode / once:.2f} times as long as "
          "going over the state once (aim 1.3)")


def forward_and_backward_ms(f, inputs, weight):
    """→ ms of f without gradients, ms of f and its backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward = gpu_ms(torch.no_grad()(lambda: f(*inputs)))
    return forward, gpu_ms(lambda: torch.autograd.grad(f(*leaves), leaves, weight))


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


def bench_kernels():
    """Compile every kernel for chips that need not be here."""
    try:
        import kernels
    except ImportError:
        return print("triton is not installed: no kernels to compile")
    kernels.report()


# --------------------------------------------------------------------------------------------------
# moe, balance

def bench_moe():
    """The grouped experts against a loop over experts."""
    E, k, tokens, latent = 64, 4, 4096, 128
    layer = K3(K3Config(n_layer=1, first_k_dense_replace=0, n_embd=256, num_experts=E,
                        num_experts_per_token=k, moe_intermediate_size=64,
                        routed_expert_hidden_size=latent)).layers[0].mlp
    z = torch.randn(tokens, latent, requires_grad=True)
    chosen, p = torch.rand(tokens, E).topk(k).indices, torch.rand(tokens, k)

    def loop():
        out = torch.zeros(tokens, latent)
        for e in range(E):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            gate, up = z[token] @ layer.w13[e, 0].T, z[token] @ layer.w13[e, 1].T
            h = moe.situ(gate, up, 4.0, 25.0)
            out = out.index_add(0, token, h @ layer.w2[e].T * p[token, slot].unsqueeze(-1))
        return out

    grouped = lambda: layer.experts(z, chosen, p)
    difference = (loop() - grouped()).abs().max().item()
    slow, fast = in_turn(5, lambda: loop().sum().backward(), lambda: grouped().sum().backward())
    print(f"experts, {E} of width 64 in a latent of {latent}, top-{k}, {tokens} tokens, forward + "
          f"backward: grouped is {slow / fast:.1f} times as fast as a loop over experts (aim 4); "
          f"difference {difference:.1e}")


def bench_balance():
    """How fast a skewed router is evened out, by Quantile Balancing and by the sign rule."""
    print("max violation (max load / mean load − 1) after 0, 1, 2, … updates; a router skewed on "
          "purpose, fresh tokens every step")
    for E, k, tokens, aim, updates in ((64, 4, 8192, 0.25, 7), (896, 16, 32768, 0.3, 6)):
        def quantile(scores, cutoff, bias, load):
            histogram = moe.QuantileHistogram(E)
            histogram.observe(scores, cutoff, bias)
            return histogram.quantile_bias(bias, k)

        def sign(scores, cutoff, bias, load):
            return bias + 1e-3 * torch.sign(load.float().mean() - load)

        print(f"  {E} experts, top-{k}, {tokens:,} tokens (aim: {aim} within {updates} updates)")
        curves = dict(quantile=violations(quantile, E, k, tokens, updates))
        if E == 64:
            slow = violations(sign, E, k, tokens, 500)
            curves["sign rule at 1e-3, every 50 updates"] = slow[::50]
        for name, values in curves.items():
            print(f"    {name}: " + " ".join(f"{v:.2f}" for v in values))


def violations(update, E, k, tokens, updates):
    """Max violation of a skewed router before the first update of its bias, and after each."""
    torch.manual_seed(0)
    skew, bias, out = torch.randn(E) * 1.5, torch.zeros(E), []
    for _ in range(updates + 1):
        scores = torch.sigmoid(torch.randn(tokens, E) + skew)
        chosen, cutoff = moe.choose(scores, bias, k)
        load = torch.bincount(chosen.flatten(), minlength=E)
        out.append(moe.load_figures(load)[0])
        bias = update(scores, cutoff, bias, load)
    return out


# --------------------------------------------------------------------------------------------------
# step, decode

def bench_step(*arguments):
    """A training step of the quickstart's model, or one of other sizes, against a plain GPT."""
    arguments = with_config(arguments)
    settings, config = read_settings(arguments, used=("batch_size", "context"))
    batch, context = settings.batch_size, settings.context
    k3, gpt = K3(config), PlainGPT(config, context)
    optimizers = {model: model.configure_optimizers(1e-3) for model in (k3, gpt)}
    idx = torch.randint(0, config.vocab_size, (batch, context))

    def step(model):
        model(idx, idx)[1].backward()
        optimizers[model].step()
        optimizers[model].zero_grad()
        if model is k3:
            model.update_router_bias()

    ours, plain = in_turn(10, lambda: step(k3), lambda: step(gpt))
    print(f"a step of {' '.join(arguments)}, {batch} × {context} "
          f"tokens, {k3.num_active_params():,} active parameters, against a plain GPT with "
          f"{gpt.num_active_params():,} (MLP width {gpt.layers[0]['up'].out_features}): "
          f"{ours / plain:.2f} times as long (aim 1.6); {ours * 1e3:.0f} and {plain * 1e3:.0f} ms")


def bench_decode():
    """Prefill and decode speed, and what the cache holds, by context length."""
    print("prefill in pieces of 1,024 tokens, then decode one by one; a model of the default "
          "sizes, one sequence")
    for name, mla_every, aim in (("KDA only", 0, 1.3), ("3:1 with MLA", 4, 2.5)):
        model = K3(K3Config(mla_every=mla_every, n_layer=4)).eval()
        with torch.no_grad():
            filled = {context: fill_cache(model, context) for context in (1024, 4096, 16384)}
            token = torch.zeros(1, 1, dtype=torch.long)
            decode = in_turn(100, *(
                lambda cache=cache: model(token, cache=cache, last_only=True)
                for cache, _ in filled.values()))
        for (context, (cache, prefill)), seconds in zip(filled.items(), decode):
            states = [layer for layer in cache if "state" in layer]
            constant = sum(layer["state"].numel() + sum(tail.numel() for tail in layer["tails"])
                           for layer in states)
            latents = sum(layer["latents"].shape[-1] * layer["length"]
                          for layer in cache if "latents" in layer)
            print(f"  {name:13s} context {context:>6,}: prefill {prefill:>7,.0f} tokens/s, decode "
                  f"{1 / seconds:>5.0f} tokens/s; cache {constant:,} numbers constant, {latents:,} "
                  "latents")
        print(f"  {name:13s} a token at 16,384 takes {decode[-1] / decode[0]:.2f} times as long as "
              f"at 1,024 (aim {aim})")


def fill_cache(model, context):
    """→ a cache that holds `context` random tokens, tokens per second of filling it."""
    cache, began = model.new_cache(1), time.perf_counter()
    for piece in torch.randint(0, 1024, (1, context)).split(1024, dim=1):
        model(piece, cache=cache, last_only=True)
    return cache, context / (time.perf_counter() - began)


# --------------------------------------------------------------------------------------------------
# profile

def bench_profile(*arguments):
    """Where a training step's time goes. Tokens are random, so no data are needed."""
    arguments = with_config(arguments)
    settings, config = read_settings(
        arguments, used=("batch_size", "context", "grad_accum", "optimizer", "device", "dtype"))
    device, dtype, _ = train.set_up_machine(settings)
    autocast = torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32)
    model = K3(config).train().to(device)
    optimizer = model.configure_optimizers(settings.lr, settings.weight_decay,
                                           optimizer=settings.optimizer)
    clock = Clock(device)
    idx = torch.randint(0, config.vocab_size, (settings.batch_size, settings.context),
                        device=device)
    step = lambda: timed_step(clock, model, optimizer, [idx] * settings.grad_accum, autocast)

    began = now()
    step()
    plain, runs = now() - began, 1
    if plain < 5:                      # a large model on a CPU takes minutes: one step must do
        runs = 5
        (plain,) = in_turn(runs, step, clock=now)          # before the clock is set up
    times = []
    with watched(model, clock):
        for _ in range(runs):
            began = now()
            step()
            times.append(now() - began)
    words = ", processor time" if by_processor() else ""
    print(f"{' '.join(arguments)}: {settings.grad_accum} × {settings.batch_size} × "
          f"{settings.context} tokens, {model.num_params():,} parameters, {device}, "
          f"{str(dtype)[6:]}{words}; a step takes {plain * 1e3:,.0f} ms, with the clock "
          f"{statistics.median(times) * 1e3:,.0f} ms\n")
    clock.print_table(runs)


def timed_step(clock, model, optimizer, batches, autocast):
    """A training step. The clock hears here of the phases, and of what is no part of the model."""
    clock.enter("forward", "what is left")
    for idx in batches:
        with autocast:
            loss = model(idx, idx)[1]
        clock.enter("backward", "what is left")
        loss.backward()
        loss.item()
        clock.enter("forward", "what is left")
    clock.enter("update", "gradient norm")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    clock.enter("update", "Muon and AdamW but for that")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    clock.enter("update", "router bias")
    model.update_router_bias()
    clock.enter("", "")


class Clock:
    """Time by part of the model and by phase: forward, backward, update."""

    def __init__(self, device):
        self.device, self.seconds, self.now = device, {}, ("", "")

    def enter(self, phase, part):
        """From here on, time belongs to this part."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        at = now()
        if self.now[0]:
            self.seconds[self.now] = self.seconds.get(self.now, 0.0) + at - self.began
        self.now, self.began = (phase, part), at

    def watch(self, f, part):
        """f with its time counted. Marks on its inputs and outputs show its backward too."""
        def mark(x, part):
            follows = isinstance(x, torch.Tensor) and x.requires_grad
            return Mark.apply(x, self, part) if follows else x

        def watched(*arguments, **named):
            phase, outside = self.now
            self.enter(phase, part)
            out = f(*(mark(x, outside) for x in arguments), **named)
            out = tuple(mark(x, part) for x in out) if isinstance(out, tuple) else mark(out, part)
            self.enter(phase, outside)
            return out
        return watched

    def print_table(self, steps):
        """A row for each part, the most expensive first; ms per step."""
        total = sum(self.seconds.values())
        rows = {part: [self.seconds.get((phase, part), 0.0) for phase in
                       ("forward", "backward", "update")] for _, part in self.seconds}
        print("| part | forward, ms | backward, ms | update, ms | share |\n|---|---|---|---|---|")
        for part, row in sorted(rows.items(), key=lambda item: -sum(item[1])):
            cells = " | ".join(f"{s / steps * 1e3:,.1f}" if s else "" for s in row)
            print(f"| {part} | {cells} | {sum(row) / total:.1%} |")


class Mark(torch.autograd.Function):
    """The identity. Its backward tells the clock that what follows belongs to `part`."""

    @staticmethod
    def forward(ctx, x, clock, part):
        ctx.clock, ctx.part = clock, part
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.clock.enter("backward", ctx.part)
        return dy, None, None


@contextlib.contextmanager
def watched(model, clock):
    """Within it, the clock knows which part of the model is at work. The model stays watched."""
    for name, module in model.named_modules():
        part = part_of(model, name, module)
        if part:
            module.forward = clock.watch(module.forward, part)
        if isinstance(module, moe.LatentMoE):
            module.route = clock.watch(module.route, "MoE: routing")
            module.experts = clock.watch(module.experts, "MoE: experts")
    functions = [(kda, "kda", "KDA: chunks"), (kda, "linears", "KDA: linear maps"),
                 (model_file, "cross_entropy", "head and loss"),
                 (muon, "orthogonalise", "Muon: Newton–Schulz")]
    clock.seconds.clear()
    with contextlib.ExitStack() as stack:
        for file, name, part in functions:
            function = clock.watch(getattr(file, name), part)
            stack.enter_context(mock.patch.object(file, name, function))
        yield


def part_of(model, name, module):
    """The row of the table that a module's own time belongs to, or None: its caller's."""
    if name == "embed":
        return "embedding"
    if name == "norm" or name.endswith(("attn_norm", "mlp_norm")):
        return "norms of the layers"
    if name.endswith("_proj") and isinstance(model.get_submodule(name.rpartition(".")[0]), kda.KDA):
        return "KDA: linear maps"
    return {kda.KDA: "KDA: gates, unit vectors, norm",
            kda.ShortConv: "KDA: convolutions",
            GatedMLA: "MLA",
            moe.SiTUGLU: "dense and shared MLP",
            moe.LatentMoE: "MoE: latent maps and norm",
            Mix: "AttnRes mixtures"}.get(type(module))


def with_config(arguments):
    """The arguments, with the quickstart's config file first if they name none."""
    has_config = any(not argument.startswith("-") for argument in arguments)
    return list(arguments) if has_config else ["config/shakespeare.py", *arguments]


def read_settings(arguments, used):
    """
    A config file and --name=value → Settings, K3Config. Of train.py's settings only the used ones
    may be given on the command line; a config file may hold any.
    """
    given, _ = train.read_arguments(arguments)
    sizes = {name: value for name, value in given.items()
             if name in K3Config.__dataclass_fields__}
    asked, _ = train.read_arguments([a for a in arguments if a.startswith("--")])
    for name in asked:
        if name not in sizes and name not in used:
            raise ValueError(f"--{name}: this bench does not use that setting; it takes the fields "
                             f"of K3Config and {', '.join(used)}")
    settings = {name: value for name, value in given.items() if name not in sizes}
    return train.Settings(**settings), K3Config(**sizes)


# --------------------------------------------------------------------------------------------------
# dist

def bench_dist():
    """Experts over 2 processes, measured here; larger models over more GPUs, on paper."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(dist_rank, (port,), nprocs=2)
    dist_on_paper()


def dist_rank(rank, port, d=256, tokens=4096):
    """One of 2 processes, with one thread and tokens of its own."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    train.keep_memory()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = K3(K3Config(n_layer=1, first_k_dense_replace=0, num_experts=64, num_experts_per_token=4,
                        n_embd=d, moe_intermediate_size=128, routed_expert_hidden_size=d // 2))
    for p in model.parameters():
        if p.abs().sum() == 0:
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    whole = model.layers[0].mlp
    time_exchange(rank, whole, d, tokens)
    compare_with_one_process(rank, whole, d)
    dist.destroy_process_group()


def shared_out(whole, balance_ranks):
    """A copy of the layer that holds half of the experts."""
    layer = copy.deepcopy(whole)
    layer.share_experts(dist.group.WORLD, balance_ranks)
    return layer


def time_exchange(rank, whole, d, tokens):
    """Forward and backward with and without exchange; a time lasts from barrier to barrier."""
    sides = {"all experts on both, no exchange": whole, "experts over 2": shared_out(whole, False),
             "and balance_ranks": shared_out(whole, True)}
    inputs, weights = torch.randn(2, 2, 1, tokens, d)      # each (rank, 1, tokens, d)

    def run(layer):
        x = inputs[rank].detach().requires_grad_()
        (layer(x) * weights[rank]).sum().backward()
        dist.barrier()

    base, *others = in_turn(10, *(lambda layer=layer: run(layer) for layer in sides.values()))
    if rank == 0:
        print(f"LatentMoE over 2 processes of one thread, gloo, d={d}, latent {d // 2}, 64 "
              f"experts of width 128, top-4, {tokens} tokens each, forward + backward")
        for name, seconds in zip(sides, (base, *others)):
            print(f"  {name}: {seconds * 1e3:.0f} ms, {seconds / base:.2f} times as long"
                  + " (aim 1.35)" * (seconds != base))


def compare_with_one_process(rank, whole, d):
    """20 steps of plain gradient descent, beside one process that has all tokens."""
    worst = dict(outputs=0.0, gradients=0.0, weights=0.0)

    def compare(name, ours, one, values):
        off = ((ours - one).abs().max() / values.abs().max()).item()
        worst[name] = max(worst[name], off)

    for balance_ranks in (False, True):
        one, ours = copy.deepcopy(whole), shared_out(whole, balance_ranks)
        for step in range(20):
            torch.manual_seed(step)
            inputs, targets = torch.randn(2, 2, 1, 256, d)
            one.zero_grad()
            ours.zero_grad()
            y = torch.stack([one(x) for x in inputs])                             # (2, 1, 256, d)
            (y - targets).square().sum().backward()
            y_ours = ours(inputs[rank])
            (y_ours - targets[rank]).square().sum().backward()
            compare("outputs", y_ours, y[rank], y)
            for (name, p), q in zip(one.named_parameters(), ours.parameters()):
                expert = name in ("w13", "w2")
                part = slice(rank * 32, rank * 32 + 32) if expert else slice(None)
                if not expert:
                    dist.all_reduce(q.grad)
                compare("gradients", q.grad, p.grad[part], p.grad)
                with torch.no_grad():
                    p -= 1e-5 * p.grad
                    q -= 1e-5 * q.grad
                    compare("weights", q, p[part], p)
    of_both = torch.tensor(list(worst.values()))
    dist.all_reduce(of_both, dist.ReduceOp.MAX)
    if rank == 0:
        print("  20 steps of gradient descent against one process, largest difference over "
              "largest value (aim 1e-6): outputs {:.1e}, gradients {:.1e}, weights {:.1e}"
              .format(*of_both.tolist()))


def dist_on_paper(tokens=16384):
    """
    Per GPU, from the formulas: fp32 weights, gradients and moments as muon.py shares them out; bf16
    latents. Activations are not counted.
    """
    billion = K3Config(vocab_size=50304, n_layer=24, n_embd=1792, n_head=14, kda_key_dim=128,
                       kda_value_dim=128, q_lora_rank=896, kv_lora_rank=256, qk_nope_head_dim=128,
                       qk_rope_head_dim=64, v_head_dim=128, intermediate_size=7168, num_experts=128,
                       num_experts_per_token=8, moe_intermediate_size=512,
                       routed_expert_hidden_size=896, attn_res_block_size=4)
    print(f"on paper, per GPU and step of {tokens:,} tokens a GPU, in GB: memory for weights + "
          "gradients + moments (without activations), what travels for\n"
          "dense gradients and weights | expert gradients and weights | tokens to and from "
          "experts")
    for name, config, layouts in (("1B active", billion, {8: 8, 64: 8, 1024: 8}),
                                  ("K3", K3Config.k3(), {8: 8, 64: 64, 1024: 128})):
        with torch.device("meta"):
            model = K3(config)
        moes = [layer.mlp for layer in model.layers if isinstance(layer.mlp, moe.LatentMoE)]
        experts = [w for layer in moes for w in (layer.w13, layer.w2)]
        dense = [p for p in model.parameters() if p not in set(experts)]
        print(f"  {name}: {model.num_params() / 1e9:,.1f}B parameters, "
              f"{model.num_active_params() / 1e9:.2f}B active, {size(dense) / 1e9:.1f}B outside "
              "the experts")
        latents = sum(layer.k for layer in moes) * config.routed_expert_hidden_size * tokens
        for processes, expert_parallel in layouts.items():
            own = [w[:len(w) // expert_parallel] for w in experts]
            replicas = processes // expert_parallel
            moments = [most_moments(model, dense, processes), most_moments(model, own, replicas)]
            memory = 8 * size(dense + own) + 4 * sum(moments)
            others = lambda n: (n - 1) / n
            travels = (12 * size(dense) * others(processes),       # gradients twice, weights once
                       12 * size(own) * others(replicas),
                       8 * latents * others(expert_parallel))      # there and back, twice, 2 bytes
            print(f"    N = {processes:4}, experts over {expert_parallel:3}: memory "
                  f"{memory / 1e9:7,.0f} | travels "
                  + " | ".join(f"{x / 1e9:6,.1f}" for x in travels))


def size(params):
    return sum(p.numel() for p in params)


def most_moments(model, params, processes):
    """Numbers in the optimizer's moments on the process that has most; AdamW has two, Muon one."""
    embeddings = {model.embed.weight, model.lm_head.weight}
    return max(size(share) + size(embeddings & set(share))
               for share in muon.share_out(params, processes))


def bench_gpu(*arguments):
    """A step on fake tensors, as a GPU would be asked to do it."""
    try:
        from lab import gpu
    except ImportError:
        return print("triton is not installed: there are no kernels to count")
    gpu.report(*read_settings(arguments, used=("batch_size", "context", "grad_accum")))


BENCHES = dict(kda=bench_kda, kernels=bench_kernels, moe=bench_moe, step=bench_step,
               decode=bench_decode, balance=bench_balance, profile=bench_profile, gpu=bench_gpu,
               dist=bench_dist)
WITH_SETTINGS = ("step", "gpu", "profile")


def main(arguments):
    name, *rest = arguments or [""]
    if name in STUDIES:                                    # as in lab.study
        return STUDIES[name](rest)
    if name == "reading":                                  # as in lab.reading, after a run of it
        return reading.main(rest or ["read"])
    if name == "draft":                                    # and as in lab.draft
        return draft.bench(rest)
    if name == "post":                                     # as in lab.post
        return post.main(rest)
    names, settings = arguments or list(BENCHES), []
    if name in WITH_SETTINGS and rest and rest[0] not in BENCHES:
        names, settings = [name], rest
    for unknown in [name for name in names if name not in BENCHES]:
        if unknown.startswith("-"):
            raise ValueError(f"{unknown}: only {', '.join(WITH_SETTINGS)} take settings, "
                             "one bench at a time")
        there = ", ".join([*BENCHES, "reading", "draft", "post", *STUDIES])
        raise ValueError(f"no bench {unknown}; there are: {there}")
    train.keep_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in names:
        BENCHES[name](*settings)


if __name__ == "__main__":
    cli.run(main, __doc__)
