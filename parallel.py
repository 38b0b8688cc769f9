"""
Several processes that are one run, started by torchrun. Two examples: six processes with
--expert_parallel=2, and four with --context_parallel=2.

    ranks    dense weights    experts of 8         ranks    sequences of a batch    tokens of 512
    0 | 1    all              0–3 | 4–7            0 | 1    first half              0–255 | 256–511
    2 | 3    all              0–3 | 4–7            2 | 3    second half             0–255 | 256–511
    4 | 5    all              0–3 | 4–7

Dense weights are the same everywhere; torch's DDP averages their gradients. `expert_ranks`
neighbours share out the experts of every layer (moe.py); ranks that hold the same experts, here 0,
2, 4, are replicas, and add up those gradients. `context_ranks` neighbours share out every sequence
(kda.py, mla.py); there are `data_ranks` such groups. Each rank draws the windows of the whole step
and takes its part. So a step is the same, to rounding, however it is shared out, and a checkpoint
is always that of one process.
"""
import atexit
import itertools
import math
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpoint import load_weights


class Ranks:
    """This process's rank, and what all do together. With one process all of it does nothing."""

    def __init__(self):
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.expert_ranks = self.context_ranks = self.data_ranks = self.accum = 1
        self.data_rank = 0
        # process groups: everyone; those with whom the experts or a sequence are shared out; those
        # with the same experts; everyone for Python objects
        self.everyone = self.experts = self.context = self.replicas = self.objects = None
        self.store = None           # torch's key-value store: signs of life and last words
        self.way_back = "--resume"  # what to start again with

    def check(self, settings, config):
        """That everything can be shared out evenly. Errors: ValueError naming the setting."""
        self.expert_ranks, self.context_ranks = settings.expert_parallel, settings.context_parallel
        for name in ("expert_parallel", "context_parallel"):
            parts = getattr(settings, name)
            if parts < 1 or self.world_size % parts:
                alone = f"--{name}=1" + " --balance_ranks=False" * settings.balance_ranks
                raise ValueError(f"{name} = {parts}: must divide the number of processes, here "
                                 f"{self.world_size}; start that many with torchrun "
                                 f"--nproc_per_node=N train.py …, or give {alone}")
        if config.num_experts % self.expert_ranks:
            raise ValueError(f"expert_parallel = {self.expert_ranks}: must divide "
                             f"num_experts = {config.num_experts}")
        if settings.balance_ranks and self.expert_ranks == 1:
            raise ValueError("balance_ranks: there is nothing to balance with expert_parallel = 1; "
                             "give --balance_ranks=False")
        self.data_rank = self.rank // self.context_ranks
        self.data_ranks = self.world_size // self.context_ranks
        # micro-batches are shared out first, then the sequences in them
        self.accum = math.gcd(settings.grad_accum, self.data_ranks)
        shortest = config.conv_size - 1 if self.context_ranks > 1 else 1
        for length in [length for _, length in settings.context_stages] or [settings.context]:
            if length % self.context_ranks or length // self.context_ranks < shortest:
                raise ValueError(f"context_parallel = {self.context_ranks}: must divide the "
                                 f"context, {length}, into stretches of at least {shortest} tokens")
            batch = settings.batch_size * settings.context // length
            if batch % (self.data_ranks // self.accum):
                raise ValueError(f"batch_size = {batch} at context {length} and grad_accum = "
                                 f"{settings.grad_accum} cannot be shared out evenly over "
                                 f"{self.data_ranks} processes; make their product a multiple")

    def start(self, device, timeout):
        """Meet the other processes and form the groups. timeout in seconds."""
        if self.world_size == 1:
            return
        if device == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise ValueError(f"process {self.local_rank + 1} of this machine has no GPU to "
                                 f"itself: there are {torch.cuda.device_count()}")
            torch.cuda.set_device(self.local_rank)
        missing = {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
        if missing:
            raise ValueError(f"WORLD_SIZE is {self.world_size}, but there is no "
                             f"{', '.join(sorted(missing))}: start with torchrun "
                             f"--nproc_per_node={self.world_size} train.py …, or unset WORLD_SIZE")
        wait = timedelta(seconds=timeout)
        self.store, *_ = next(dist.rendezvous("env://", timeout=wait))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=self.store,
                                rank=self.rank, world_size=self.world_size, timeout=wait)
        self.give_signs_of_life()
        self.device, self.everyone = device, dist.group.WORLD
        self.objects = dist.new_group(backend="gloo", timeout=wait)

        def group(lists):
            """The process group of this rank's list."""
            return dist.new_subgroups_by_enumeration(lists, timeout=wait)[0]
        ranks, experts, context = range(self.world_size), self.expert_ranks, self.context_ranks
        if experts > 1:
            self.experts = group([[*ranks[i:i + experts]] for i in ranks[::experts]])
            self.replicas = group([[*ranks[i::experts]] for i in range(experts)])
        if context > 1:
            self.context = group([[*ranks[i:i + context]] for i in ranks[::context]])

    def give_signs_of_life(self):
        """Every two seconds, also while the main thread waits for the others."""
        over = threading.Event()

        def beat():
            for n in itertools.count():
                self.store.set(f"beat/{self.rank}", str(n))
                if over.wait(2):
                    break
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        atexit.register(lambda: (over.set(), thread.join(5)))

    def wrap(self, model):
        """
        DDP for all parameters but experts that are shared out. find_unused_parameters: the first
        layer's attention mixture never has a gradient. Also, without it DDP would sort gradients
        anew after the first step and, at 3 ranks or more, sum them in another order: a resumed run
        would not be the same bit for bit.
        """
        if self.world_size == 1:
            return model
        buffers = [name for name, _ in model.named_buffers()]      # counts: see sum_counts
        left_out = [*model.shared_out(), *buffers]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_out)
        return DistributedDataParallel(model, gradient_as_bucket_view=True,
                                       find_unused_parameters=True)

    # ---- a step

    def micro_batches(self, grad_accum):
        """The numbers of those that this rank has a part in."""
        return range(self.data_rank % self.accum, grad_accum, self.accum)

    def part(self, x):
        """This rank's part of a micro-batch: (B, T) → (B · accum/data_ranks, T/context_ranks)."""
        return self.stretch(self.rows(x))

    def rows(self, x):
        """This rank's sequences of a micro-batch: (B, …) → (B · accum/data_ranks, …)."""
        return x.chunk(self.data_ranks // self.accum)[self.data_rank // self.accum]

    def stretch(self, x):
        """This rank's part of sequences: (B, T) → (B, T/context_ranks)."""
        return x.chunk(self.context_ranks, dim=1)[self.rank % self.context_ranks]

    def sum(self, *values):
        """Numbers → their sums over all ranks, a list, the same everywhere. No GPU takes part."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.objects)
        return total.tolist()

    @torch.no_grad()
    def sum_gradients(self, model, losses, stop):
        """
        After the step's last backward; losses (n) on the device → their means over all ranks,
        the norm of all gradients (dense parameters count once, and each expert once), and whether
        any rank is to stop: the same on all ranks, so that they go on or stop together. The step's
        one wait for the GPU before its update.
        """
        experts = model.shared_out()
        for p in experts.values():
            # a mean over the losses of all ranks: each has sent its part to the expert's home
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(self.world_size)
            dist.all_reduce(p.grad, group=self.replicas)
        dense = [p.grad for name, p in model.named_parameters()
                 if name not in experts and p.grad is not None]
        norm = torch.nn.utils.get_total_norm
        square, ours = (norm(grads).square().to(losses.device)
                        for grads in (dense, [p.grad for p in experts.values()]))
        # the sum counts dense weights world_size times, an expert once for each of its replicas
        square = square + ours * self.expert_ranks
        total = torch.stack([*losses, square, torch.full_like(square, stop)]) / self.world_size
        if self.world_size > 1:
            dist.all_reduce(total)
        *losses, square, stop = total.cpu().tolist()
        return losses, math.sqrt(square), stop > 0

    def sum_counts(self, model):
        """Add up Quantile Balancing's counts, and take the largest of QK-Clip's logits."""
        if self.world_size == 1:
            return
        counts, logits = counted(model)
        for tensors, op in ((counts, dist.ReduceOp.SUM), (logits, dist.ReduceOp.MAX)):
            if tensors:
                flat = torch.cat([x.flatten().to(tensors[0].dtype) for x in tensors])
                dist.all_reduce(flat, op)
                for x, new in zip(tensors, flat.split([x.numel() for x in tensors])):
                    x.copy_(new.view(x.shape))

    # ---- checkpoints

    def whole_state(self, model, optimizer):
        """
        → the state of model and optimizer that one process would have, experts under their global
        numbers: on rank 0. None, None elsewhere.
        """
        state, moments = model.state_dict(), optimizer.state_dict()
        if self.world_size == 1:
            return state, moments
        experts = model.shared_out()
        ours = {(kind, i): values for kind, part in moments.items()
                for i, values in part["state"].items()}
        if self.rank < self.expert_ranks:         # replicas hold the same
            ours |= {("model", name): {"": state[name]} for name in experts}
        parts = self.gather({place: {k: x.cpu() for k, x in values.items()}
                             for place, values in ours.items()})
        if self.rank > 0:
            return None, None
        by_expert = sorted(range(self.world_size), key=lambda rank: rank % self.expert_ranks)
        parts, whole = [parts[rank] for rank in by_expert], {}
        for place in sorted(set().union(*parts)):
            found = [part[place] for part in parts if place in part]
            # several: the slices of an expert weight
            whole[place] = {k: torch.cat([values[k] for values in found])
                            if len(found) > 1 and x.dim() else x for k, x in found[0].items()}
        state |= {name: whole["model", name][""] for name in experts}
        for kind in moments:
            moments[kind]["state"] = {i: values for (k, i), values in whole.items() if k == kind}
        return state, moments

    def gather(self, ours):
        """A Python object of every rank → all of them, by rank, on rank 0; None elsewhere."""
        if self.rank > 0:
            dist.send_object_list([ours], 0, group=self.objects)
            return None
        parts = [ours]
        for r in range(1, self.world_size):       # one by one: gather_object pads to the largest
            part = [None]
            dist.recv_object_list(part, r, group=self.objects)
            parts += part
        return parts

    def load_state(self, model, optimizer, state, moments):
        """The way back, on every rank: its experts, and the moments of what it steps."""
        def mine(x, shared):
            if not shared or not x.dim():
                return x
            return x.chunk(self.expert_ranks)[self.rank % self.expert_ranks]
        experts, part = model.shared_out(), {}
        load_weights(model, {name: mine(x, name in experts) for name, x in state.items()})
        shared = set(experts.values())
        try:
            for kind, whole in moments.items():
                groups = getattr(optimizer, kind).param_groups
                params = [p for group in groups for p in group["params"]]
                kept = {i: {k: mine(x, params[i] in shared) for k, x in values.items()}
                        for i, values in whole["state"].items()
                        if params[i] not in optimizer.muon.others}
                part[kind] = {**whole, "state": kept}
            optimizer.load_state_dict(part)
        except (ValueError, AttributeError, KeyError, IndexError) as error:
            raise ValueError(f"the checkpoint's optimizer is another version's ({error}); go on "
                             "from its weights: python weights.py RUN FOLDER, then train.py "
                             "--init_from=FOLDER") from None

    # ---- agreement, and what goes wrong

    def agree(self, **facts):
        """Errors: ValueError, where a rank has other facts than rank 0: it would be another run."""
        if self.world_size == 1:
            return
        all_facts = [None] * self.world_size
        dist.all_gather_object(all_facts, facts, group=self.objects)
        for rank, theirs in enumerate(all_facts):
            for name, expected in all_facts[0].items():
                if theirs[name] != expected:
                    raise ValueError(f"rank {rank} has {name} = {theirs[name]}, rank 0 {expected}: "
                                     "all processes must get the same settings and see the same "
                                     "folders")

    def first(self, f):
        """
        f() on rank 0 alone, while the others wait → its result there, None elsewhere. An error
        there is an error everywhere.
        """
        result, error = None, [None]
        if self.rank == 0:
            try:
                result = f()
            except (OSError, ValueError) as e:
                error = [e]
        if self.world_size > 1:
            dist.broadcast_object_list(error, src=0, group=self.objects)
        if error[0]:
            raise error[0]
        return result

    def last_words(self, error):
        """
        The message that this process ends with. An error of its own is left for the others to read.
        One that comes from the loss of another process names it: whoever has said what stopped it,
        or gives no sign of life.
        """
        if self.store is None:
            # Before they met. Most likely it is the same on all: local rank 0 says it, and torchrun
            # ends the others. If that one is well, they say it.
            time.sleep(3 if self.local_rank else 0)
            return f"rank {self.rank}: error: {error}" if self.local_rank else f"error: {error}"
        words = ("gloo", "NCCL", "Connection", "Timed out")
        from_others = isinstance(error, dist.DistError) or any(word in str(error) for word in words)
        try:
            self.store.set(f"end/{self.rank}", "" if from_others else str(error))
            if not from_others:
                return f"rank {self.rank}: error: {error}"
            lost = self.who_is_lost()
        except Exception:
            lost = ["the process that keeps the store is gone (rank 0 or its torchrun)"]
        reason = "; ".join(lost) or error
        return f"rank {self.rank}: lost touch. {reason}. Start again with {self.way_back}"

    def who_is_lost(self):
        """Seven seconds of listening → a line for each rank that stopped, was killed or hangs."""
        others = [r for r in range(self.world_size) if r != self.rank]
        before = {r: self.store.get(f"beat/{r}") for r in others}
        time.sleep(7)
        ended = {r: self.store.get(f"end/{r}").decode() for r in others
                 if self.store.check([f"end/{r}"])}
        going_on = [r for r in others if r not in ended]
        lost = [f"rank {r} stopped: {text}" for r, text in ended.items() if text]
        lost += [f"rank {r} does not answer: it was killed, its machine is gone, or it is stopped"
                 for r in going_on if self.store.get(f"beat/{r}") == before[r]]
        return lost or [f"rank {r} is alive but does not go on: it hangs" for r in going_on]


def counted(model):
    """What a model counts between updates: tokens by expert; the largest logits by head."""
    counts = [x for moe in model.moes().values() for x in (moe.histogram.counts, moe.load)]
    layers = model.all_layers()
    logits = [layer.attn.max_logit for layer in layers if hasattr(layer.attn, "max_logit")]
    return counts, logits
