"""
What a GPU is asked to do in one step of training, counted without one.

    python -m lab.bench gpu config/gpu_small.py
    python -m lab.bench gpu config/gpu_small.py --batch_size=4      with other settings

The step runs on fake tensors: shapes without numbers, on the code paths that a GPU takes. Every
operation that torch would launch is counted, and every Triton kernel. From the counts follow, on
paper, the time on named cards and the largest micro-batch that fits.

    a launch   one kernel. Views and allocations are free
    bytes      what an operation reads and writes, each tensor once, as if there were no cache
    a wait     the CPU needs a number from the GPU before it can go on: .item(), `if tensor`
    time       for each operation the longest of bytes / (85% of the card's bandwidth), operations /
               (60% of its dense bf16 rate) and LAUNCH; added up, as if the CPU were always ahead
"""
import collections
import contextlib
import math
import weakref
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from triton.runtime.jit import JITFunction

import attnres
import kda
import kernels
import model as model_file
import moe
import ops
import parallel
from mla import GatedMLA
from model import K3

LAUNCH = 2.2e-6      # seconds that the shortest kernel takes
HOST = 10e-6         # seconds of CPU time for a launch: what Python and torch take, roughly
CARDS = {            # by their data sheets: bytes/s, dense bf16 operations/s, bytes of memory
    "L4": (300e9, 121e12, 24e9), "4090": (1008e9, 165e12, 24e9), "A100": (2039e9, 312e12, 80e9),
    "H100": (3350e9, 989e12, 80e9), "H200": (4800e9, 989e12, 141e9),
    "B200": (8000e9, 2250e12, 180e9), "MI300X": (5300e9, 1307e12, 192e9)}

# ------------------------------------------------------------------------------------------------
# Counting: a mode through which every operation passes

Row = collections.namedtuple("Row", "phase part name launches bytes flops")
REST = "loss and what is left"
PARTS = {kda.KDA: "KDA", GatedMLA: "MLA", moe.LatentMoE: "MoE",
         moe.SiTUGLU: "dense and shared MLP", attnres.Mix: "AttnRes mixtures",
         ops.RMSNorm: "norms of the layers", torch.nn.Embedding: "embedding and head"}
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias",
        "_unsafe_view", "lift_fresh", "set_", "_assert_async", "promote_types"}
FILLED = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}


class Count(TorchDispatchMode):
    """
    rows: a Row for each operation that runs inside. waits: {phase: how many}. held, peak: bytes of
    the tensors that are alive now, and the most there were at once.
    """

    def __init__(self):
        super().__init__()
        self.rows, self.waits = [], collections.Counter()
        self.phase, self.parts = "forward", [REST]
        self.held, self.peak, self.alive = 0, 0, WeakIdKeyDictionary()

    def hold(self, x):
        storage = x.untyped_storage()
        if storage not in self.alive:
            self.alive[storage] = size = storage.nbytes()
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self.release, size)

    def release(self, size):
        self.held -= size

    def add(self, name, launches, size, flops=0):
        node = torch._C._current_autograd_node()     # in a backward: its part is its forward's
        part = node.metadata.get("part", REST) if node else self.parts[-1]
        self.rows.append(Row(self.phase, part, name, launches, size, flops))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            self.waits[self.phase] += 1
            self.add(name, 1, args[0].element_size())
            if args[0].dtype == torch.bool:      # as in a usual batch: no target is ignored
                return self.rows[-2].name != "any"
            return 1 if args[0].dtype == torch.int64 else 1.0
        out = func(*args, **kwargs)
        for x in tensors(out):
            self.hold(x)
        if func.is_view or name in FREE or name.startswith(("prim::", "profiler::")):
            return out
        self.add(name, launches(name, args), moved(name, func, args, kwargs, out),
                 operations(name, func, args, kwargs, out))
        return out

    def launch(self, kernel, arguments):
        """A Triton kernel, given its arguments by name."""
        found = {id(x): x for x in tensors(list(arguments.values()))}
        flops = KERNELS[kernel](arguments) if kernel in KERNELS else 0
        self.add("triton " + kernel, 1, sum(map(nbytes, found.values())), flops)


def tensors(x):
    """All tensors in nested lists and tuples."""
    if isinstance(x, (list, tuple)):
        return [y for part in x for y in tensors(part)]
    return [x] if isinstance(x, torch.Tensor) else []


def nbytes(x):
    """The bytes behind a tensor; an expanded axis counts once."""
    lengths = [length for length, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return x.element_size() * math.prod(lengths)


def launches(name, args):
    """Kernels of one operation. Those on lists take so many tensors and entries at a time."""
    if not name.startswith(("_foreach", "_fused")):
        return 2 if name == "_grouped_mm" else 1
    lists = [x for x in args if isinstance(x, (list, tuple)) and tensors(x)]
    at_once = (110, 64, 48, 36, 30)[min(len(lists), 5) - 1]
    blocks = sum(-(-x.numel() // 65536) for x in lists[0])
    return max(-(-len(lists[0]) // at_once), -(-blocks // 320))


def moved(name, func, args, kwargs, out):
    """Bytes that one operation reads and writes."""
    if name in ("index_select", "gather", "embedding", "index"):     # only the rows asked for
        return 2 * sum(map(nbytes, tensors(out)))
    if name.startswith("scatter"):                                   # only the entries written to
        return args[2].numel() * (args[2].itemsize + 3 * args[0].itemsize)
    if name in FILLED:
        return sum(map(nbytes, tensors(out)))
    read, written = [], [] if func._schema.is_mutable else tensors(out)
    for i, argument in enumerate(func._schema.arguments):
        given = tensors([args[i] if i < len(args) else kwargs.get(argument.name)])
        read += [] if argument.is_out or i == 0 and name in ("copy_", "fill_", "zero_") else given
        written += given if argument.alias_info and argument.alias_info.is_write else []
    same = {(x.untyped_storage()._cdata, x.storage_offset(), nbytes(x)): x for x in read}
    return sum(map(nbytes, [*same.values(), *written]))


def operations(name, func, args, kwargs, out):
    """Floating-point operations of a matrix product or of attention; 0 for all else."""
    if name == "_grouped_mm":                                        # so many rows, however grouped
        return 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
    if func._overloadpacket in flop_registry:
        return flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
    return 0


def kda_flops(of_one_token):
    """of_one_token(C, K, V): operations of a token and head → of a launch, from its arguments."""
    def flops(a):
        K, V, C = a.get("K", 0), a.get("V", 0), a["C"]
        squares = [a[name] for name in ("A_qk", "inverse", "dA_qk") if name in a]      # (…, C, C)
        rows = squares[0].numel() // C if squares else a["W"].numel() // K             # (…, C, K)
        return rows * of_one_token(C, K, V)
    return flops


KERNELS = {      # operations that are done, the half above the diagonal included
    "scores": kda_flops(lambda C, K, V: 4 * C * K),
    "solve": kda_flops(lambda C, K, V: 2 * C * (K + V) + 6 * C * C),
    "states": kda_flops(lambda C, K, V: 4 * K * V),
    "output": kda_flops(lambda C, K, V: 2 * K * V + 2 * C * V),
    "dstates": kda_flops(lambda C, K, V: 2 * C * V + 6 * K * V),
    "dsolve": kda_flops(lambda C, K, V: 6 * C * V),
    "dinputs": kda_flops(lambda C, K, V: 6 * K * V + 8 * C * K)}


def mark_parts(model, count):
    """Hooks that say which part runs: forward by a stack, backward by marks on autograd's nodes."""
    def enter(part):
        def hook(module, inputs, kwargs):
            count.parts.append(part)
        return hook

    def leave(part):
        def hook(module, inputs, kwargs, output):
            count.parts.pop()
            before = {x.grad_fn for x in tensors((inputs, list(kwargs.values())))}
            todo = [x.grad_fn for x in tensors(output) if x.grad_fn]
            seen = set(before)
            while todo:                              # from the output back to the inputs
                node = todo.pop()
                if node in seen or node is None:
                    continue
                seen.add(node)
                node.metadata.setdefault("part", part)
                todo += [other for other, _ in node.next_functions]
        return hook
    modules = {module: PARTS[type(module)] for module in model.modules() if type(module) in PARTS}
    modules[model.lm_head] = "embedding and head"
    for module, part in modules.items():
        module.register_forward_pre_hook(enter(part), with_kwargs=True)
        module.register_forward_hook(leave(part), with_kwargs=True)


# ------------------------------------------------------------------------------------------------
# A step as a GPU would see it

@contextlib.contextmanager
def as_if_on_a_gpu(count):
    """Fake tensors say that they are on a GPU, and Triton's kernels are counted, not launched."""
    def run(self, *args, grid, warmup, **kwargs):
        count.launch(self.fn.__name__, {**dict(zip(self.arg_names, args, strict=False)), **kwargs})

    def attention(q, k, v, is_causal=False):
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        return attend(q, k, v, None, True, 0.0, is_causal)[0]

    def transfer(x):
        count.waits[count.phase] += 1
        with unset_fake_temporarily():
            return torch.ones(x.shape)
    card, total_norm = mock.Mock(multi_processor_count=132), torch.nn.utils.get_total_norm
    with contextlib.ExitStack() as stack:
        for target, name, value in (
                (FakeTensor, "is_cuda", property(lambda x: True)), (JITFunction, "run", run),
                (F, "scaled_dot_product_attention", attention),
                (torch.cuda, "get_device_properties", lambda *_: card),
                (torch.cuda, "is_current_stream_capturing", lambda: True),     # so nothing is tuned
                (kda, "kernels", kernels), (moe, "kernels", kernels), (attnres, "kernels", kernels),
                (ops, "kernels", kernels), (K3, "init_weights", lambda self: None),
                (torch.nn.utils, "get_total_norm", lambda grads: total_norm(grads, foreach=True)),
                (torch.Tensor, "cpu", transfer), (model_file, "load_figures", lambda load: (0, 0))):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def count_step(settings, config):
    """
    Two micro-batches forward and backward, of which the second finds gradients to add to, and the
    update → the model; a Count of the second micro-batch and the update; bytes kept for a backward;
    peak bytes in a micro-batch, the optimizer's moments included.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        count, kept = Count(), {}

        def keep(x):
            if not isinstance(x, torch.nn.Parameter):
                kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x
        with as_if_on_a_gpu(count):
            model = K3(config).train()
            model.checkpoint_layers = settings.checkpoint_layers
            optimizer = model.configure_optimizers(settings.lr)
            mark_parts(model, count)
            for p in model.parameters():
                count.hold(p)
            idx = torch.empty(settings.batch_size, settings.context, dtype=torch.long)
            with count, ops.casting_once("cpu"):
                for _ in range(2):
                    for counted in (count.rows, count.waits, kept):
                        counted.clear()
                    count.peak = count.held
                    count.phase = "forward"
                    with torch.autocast("cpu", dtype=torch.bfloat16), \
                            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                        loss = model(idx, idx)[1] / settings.grad_accum
                    count.phase = "backward"
                    loss.backward()
            with count:
                before, peak = count.held, count.peak
                count.phase = "update"
                means = torch.stack([loss.detach(), 0 * loss.detach()])
                parallel.Ranks().sum_gradients(model, means, stop=False)
                optimizer.step()                     # the first step makes the moments
                moments = count.held - before
                count.rows = [row for row in count.rows if row.phase != "update"]
                count.waits["update"] = 0
                count.peak = count.held
                parallel.Ranks().sum_gradients(model, means, stop=False)
                model.update_router_bias()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                torch._foreach_mul_(grads, settings.grad_clip)
                optimizer.step()
                # what ops.casting_once spares a micro-batch falls due once a step
                matrices = [p for p in model.parameters() if p.dim() > 1]
                count.add("weights in bf16", len(matrices), sum(6 * p.numel() for p in matrices))
    return model, count, sum(kept.values()), peak + moments


def count_decode(config):
    """→ a Count of one token of one sequence, after another, with bf16 weights."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        count = Count()
        with as_if_on_a_gpu(count), torch.no_grad():
            model = K3(config).eval()
            for name, p in list(model.named_parameters()):     # as .bfloat16() would
                if not name.endswith(("conv1d.weight", "A_log", "dt_bias", "o_norm.weight")):
                    module, _, name = name.rpartition(".")
                    p = torch.nn.Parameter(p.bfloat16())
                    setattr(model.get_submodule(module), name, p)
            mark_parts(model, count)
            cache, idx = model.new_cache(1), torch.empty(1, 1, dtype=torch.long)
            with count:
                for _ in range(2):
                    count.rows.clear()
                    model(idx, cache=cache, last_only=True)
    return count


# ------------------------------------------------------------------------------------------------
# What it says

def seconds(rows, card):
    """Time of these rows on a card, as if the CPU were always ahead."""
    bandwidth, rate, _ = CARDS[card]
    return sum(max(r.bytes / (0.85 * bandwidth), r.flops / (0.6 * rate), LAUNCH * r.launches)
               for r in rows)


def report(settings, config):
    """The tables for train.py's settings and a config."""
    model, count, kept, peak = count_step(settings, config)
    tokens = settings.batch_size * settings.context
    step_tokens = tokens * settings.grad_accum
    micro = [r for r in count.rows if r.phase != "update"]
    update = [r for r in count.rows if r.phase == "update"]

    print(f"{model.num_params() / 1e6:,.0f}M parameters, {model.num_active_params() / 1e6:,.0f}M "
          f"active; a micro-batch of {settings.batch_size} × {settings.context} tokens, "
          f"{settings.grad_accum} of them a step")
    print("\n| part | launches | GB | KB a token | TFLOP |\n|---|---|---|---|---|")
    by_part = collections.defaultdict(list)
    for row in micro:
        by_part[row.part].append(row)
    for part, rows in sorted(by_part.items(), key=lambda item: -sum(r.bytes for r in item[1])):
        print_row(part, rows, tokens)
    print_row("a micro-batch, forward and backward", micro, tokens)
    print_row("the update", update, step_tokens)

    waits = settings.grad_accum * (count.waits["forward"] + count.waits["backward"])
    print(f"\nwaits for the GPU: {waits + count.waits['update']} a step")
    print(f"kept for the backward: {kept / tokens / 1e6:.2f} MB a token; peak {peak / 1e9:.1f} GB")

    print("\n| card | step, ms | tokens/s | MFU | largest micro-batch |\n|---|---|---|---|---|")
    other = replace(settings, batch_size=settings.batch_size // 2 or 2)
    sequences = settings.batch_size - other.batch_size
    per_sequence = (peak - count_step(other, config)[3]) / sequences
    for card, (_, rate, memory) in CARDS.items():
        step = settings.grad_accum * seconds(micro, card) + seconds(update, card)
        mfu = step_tokens * model.flops_per_token(settings.context) / step / rate
        fits = settings.batch_size + (0.92 * memory - peak) / per_sequence
        print(f"| {card} | {step * 1e3:,.0f} | {step_tokens / step:,.0f} | {mfu:.1%} | "
              f"{max(0, int(fits))} × {settings.context} |")
    token = sum(r.launches for r in count_decode(config).rows)
    launches = settings.grad_accum * sum(r.launches for r in micro)
    launches += sum(r.launches for r in update)
    print(f"A CPU that needs {HOST * 1e6:.0f} µs a launch does no more than "
          f"{step_tokens / (launches * HOST):,.0f} tokens/s, whatever the card.")
    print(f"A token of one sequence is {token:,} launches: no more than "
          f"{1 / (token * HOST):,.0f} tokens/s.")


def print_row(name, rows, tokens):
    launches, size, flops = (sum(r[i] for r in rows) for i in (3, 4, 5))
    print(f"| {name} | {launches:,} | {size / 1e9:.2f} | {size / tokens / 1e3:,.0f} "
          f"| {flops / 1e12:.3f} |")
