"""
Several processes that are one run: torch DDP for what all hold, experts and sequences shared out, checkpoints of one process.
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

from moe import LatentMoE


class Ranks:
    """
    N processes that are one run: this one's rank, and what they do together. With one process everything here is the identity.

    All hold the dense parameters, whose gradients DDP averages. M neighbours share out the experts (moe.py); the N/M that hold the same ones
    add up those gradients here. C neighbours share out every sequence (kda.py, model.py). Each draws the windows of the whole step and takes
    its part, so that a step is the same, to rounding, whatever N, M and C are.
    """

    def __init__(self):
        self.N, self.rank, self.local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
        self.M = self.C = self.data_ranks = 1
        self.data, self.everyone, self.experts, self.replicas, self.context, self.store = 0, None, None, None, None, None

    def check(self, settings, config):
        """That everything can be shared out evenly. Errors: ValueError naming the setting."""
        self.M, self.C = settings.expert_parallel, settings.context_parallel
        for name, parts in (("expert_parallel", self.M), ("context_parallel", self.C)):
            if parts < 1 or self.N % parts:
                raise ValueError(f"{name} = {parts}: must divide the number of processes, here {self.N} (torchrun --nproc_per_node=N train.py …)")
        if config.num_experts % self.M:
            raise ValueError(f"expert_parallel = {self.M}: must divide num_experts = {config.num_experts}")
        if settings.balance_ranks and self.M == 1:
            raise ValueError("balance_ranks: there is nothing to balance with expert_parallel = 1")
        self.data, self.data_ranks = self.rank // self.C, self.N // self.C
        self.accum = math.gcd(settings.grad_accum, self.data_ranks)        # micro-batches are shared out first, then the sequences in them
        for length in [length for _, length in settings.context_stages] or [settings.context]:
            if self.C > 1 and (length % self.C or length // self.C < config.conv_size - 1):
                raise ValueError(f"context_parallel = {self.C}: must divide the context, {length}, into stretches of at least {config.conv_size - 1} tokens")
            batch = settings.batch_size * settings.context // length
            if batch % (self.data_ranks // self.accum):
                raise ValueError(f"batch_size = {batch} at context {length} and grad_accum = {settings.grad_accum} cannot be shared out evenly over "
                                 f"{self.data_ranks} processes; make their product a multiple of that")

    def start(self, device, timeout):
        """Meet the other processes and form the groups."""
        if self.N == 1:
            return
        if device == "cuda":
            if self.local >= torch.cuda.device_count():
                raise ValueError(f"process {self.local + 1} of this machine has no GPU to itself: there are {torch.cuda.device_count()}")
            torch.cuda.set_device(self.local)
        wait, (N, M, C) = timedelta(seconds=timeout), (self.N, self.M, self.C)
        self.store, *_ = next(dist.rendezvous("env://", timeout=wait))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=self.store, rank=self.rank, world_size=N, timeout=wait)
        over = threading.Event()

        def beat():                                                        # a sign of life, also while the main thread waits for the others
            for n in itertools.count():
                self.store.set(f"beat/{self.rank}", str(n))
                if over.wait(2):
                    break
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        atexit.register(lambda: (over.set(), thread.join(5)))
        self.device, self.everyone, self.objects = device, dist.group.WORLD, dist.new_group(backend="gloo", timeout=wait)

        def groups(lists):
            return dist.new_subgroups_by_enumeration(lists, timeout=wait)[0]
        if M > 1:
            self.experts, self.replicas = groups([[*range(i, i + M)] for i in range(0, N, M)]), groups([[*range(i, N, M)] for i in range(M)])
        if C > 1:
            self.context = groups([[*range(i, i + C)] for i in range(0, N, C)])

    def wrap(self, model):
        """
        DDP for all parameters but experts that are shared out. find_unused_parameters: the first layer's attention mixture never has a gradient. Also,
        without it DDP would sort gradients anew after the first step, at 3 ranks or more sum them in another order, and so not resume bit for bit.
        """
        if self.N == 1:
            return model
        left_out = [*model.shared_out(), *(name for name, _ in model.named_buffers())]               # counts are summed in sum_counts
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_out)
        return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)

    def micro_batches(self, grad_accum):
        """The numbers of those that this rank has a part in."""
        return range(self.data % self.accum, grad_accum, self.accum) if self.N > 1 else range(grad_accum)

    def part(self, x):
        """This rank's part of a micro-batch, (B, T) → (B·accum/data_ranks, T/C)."""
        return self.stretch(x.chunk(self.data_ranks // self.accum)[self.data // self.accum]) if self.N > 1 else x

    def stretch(self, x):
        """This rank's part of sequences: (B, T) → (B, T/C)."""
        return x.chunk(self.C, dim=1)[self.rank % self.C]

    def sum(self, *values):
        """Numbers → their sums over all ranks, the same ones everywhere."""
        if self.N > 1:
            values = torch.tensor(values, dtype=torch.float64, device=self.device)
            dist.all_reduce(values)
            values = values.tolist()
        return values

    def sum_gradients(self, model, loss, stop):
        """
        After the step's last backward → the mean loss, the norm of all gradients (the dense parameters once, each expert once), whether any
        rank is to stop; the same on all ranks, so that they go on, skip or stop together.
        """
        experts = model.shared_out()
        for p in experts.values():                                         # a mean over all ranks' losses: each has sent its part to the expert's home
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(self.N)
            dist.all_reduce(p.grad, group=self.replicas)
        dense = [p.grad for name, p in model.named_parameters() if name not in experts and p.grad is not None]
        dense, own = (torch.nn.utils.get_total_norm(grads).item() ** 2 for grads in (dense, [p.grad for p in experts.values()]))
        loss, squares, stop = self.sum(loss / self.N, (dense + own * self.M) / self.N, float(stop))
        return loss, math.sqrt(squares), stop > 0

    def sum_counts(self, model):
        """What Quantile Balancing counted, in one message for all layers, and the largest logits for QK-Clip in another."""
        if self.N == 1:
            return
        counts = [x for layer in model.layers if isinstance(layer.mlp, LatentMoE) for x in (layer.mlp.histogram.counts, layer.mlp.load)]
        logits = [layer.attn.max_logit for layer in model.layers if hasattr(layer.attn, "max_logit")]
        for tensors, op in ((counts, dist.ReduceOp.SUM), (logits, dist.ReduceOp.MAX)):
            if tensors:
                flat = torch.cat([x.flatten().to(tensors[0].dtype) for x in tensors])
                dist.all_reduce(flat, op)
                for x, new in zip(tensors, flat.split([x.numel() for x in tensors])):
                    x.copy_(new.view(x.shape))

    def whole_state(self, model, optimizer):
        """→ the state of model and optimizer that one process would have, experts under their global numbers: on rank 0. None elsewhere."""
        state, moments = model.state_dict(), optimizer.state_dict()
        if self.N == 1:
            return state, moments
        experts = model.shared_out()
        ours = dict(model={name: state[name].cpu() for name in experts if self.rank < self.M},
                    **{kind: {i: {k: v.cpu() for k, v in s.items()} for i, s in moments[kind]["state"].items()} for kind in moments})
        if self.rank > 0:
            dist.send_object_list([ours], 0, group=self.objects)
            return None, None
        parts = [[ours], *([None] for _ in range(1, self.N))]
        for r in range(1, self.N):                                         # one by one: gather_object would pad all to the largest, N times that
            dist.recv_object_list(parts[r], r, group=self.objects)
        parts = [part for (part,) in parts]
        parts = [parts[r] for e in range(self.M) for r in range(e, self.N, self.M)]                # by the experts they hold
        for name in experts:
            state[name] = torch.cat([part["model"][name] for part in parts if name in part["model"]])
        for kind, whole in moments.items():
            params = [p for group in getattr(optimizer, kind).param_groups for p in group["params"]]
            whole["state"] = {}
            for i, p in enumerate(params):
                found = [part[kind][i] for part in parts if i in part[kind]]                       # one; of an expert weight one per slice
                if found:
                    whole["state"][i] = {k: torch.cat([s[k] for s in found]) if v.dim() and len(found) > 1 else v for k, v in found[0].items()}
        return state, moments

    def load_state(self, model, optimizer, state, moments):
        """The way back, on every rank: its part of the experts, and the moments of the parameters that it steps."""
        mine = lambda x: x.chunk(self.M)[self.rank % self.M] if x.dim() else x
        experts = model.shared_out()
        model.load_state_dict({name: mine(x) if name in experts else x for name, x in state.items()})
        part = {}
        for kind, whole in moments.items():
            params = [p for group in getattr(optimizer, kind).param_groups for p in group["params"]]
            kept = {i: s for i, s in whole["state"].items() if params[i] not in optimizer.muon.others}
            part[kind] = dict(whole, state={i: {k: mine(x) if params[i] in set(experts.values()) else x for k, x in s.items()} for i, s in kept.items()})
        try:
            optimizer.load_state_dict(part)
        except ValueError as error:
            raise ValueError(f"the checkpoint's optimizer is another version's ({error}); go on from its weights: python weights.py RUN FOLDER, then "
                             "train.py --init_from=FOLDER") from None

    def agree(self, **facts):
        """Errors: ValueError where a rank has other facts than rank 0, which would be another run."""
        if self.N > 1:
            others = [None] * self.N
            dist.all_gather_object(others, facts, group=self.objects)
            for r, theirs in enumerate(others):
                for name in facts:
                    if theirs[name] != others[0][name]:
                        raise ValueError(f"rank {r} has {name} = {theirs[name]}, rank 0 {others[0][name]}: all processes must get the same settings "
                                         "and see the same folders")

    def first(self, f):
        """f() on rank 0 alone, while the others wait; an error there is an error everywhere."""
        error = [None]
        if self.rank == 0:
            try:
                f()
            except (OSError, ValueError) as e:
                error = [e]
        if self.N > 1:
            dist.broadcast_object_list(error, src=0, group=self.objects)
        if error[0]:
            raise error[0]

    def last_words(self, error):
        """
        The message that this process ends with. An error of its own it leaves for the others to read; one that comes from the loss of another
        process names that: whoever has no heartbeat any more, or has said what stopped it.
        """
        if self.store is None:
            # before they met. Most likely the same on all: local rank 0 says it, and torchrun ends the others. If that one is well, they say it
            time.sleep(3 if self.local else 0)
            return f"rank {self.rank}: error: {error}" if self.local else f"error: {error}"
        from_others = isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "Connection", "Timed out"))
        others = [r for r in range(self.N) if r != self.rank]
        try:
            self.store.set(f"end/{self.rank}", "" if from_others else str(error))
            if not from_others:
                return f"rank {self.rank}: error: {error}"
            before = [self.store.get(f"beat/{r}") for r in others]
            time.sleep(7)
            ended = {r: self.store.get(f"end/{r}").decode() for r in others if self.store.check([f"end/{r}"])}
            lost = [f"rank {r} stopped: {text}" for r, text in ended.items() if text]
            silent = [r for r, beat in zip(others, before) if r not in ended and self.store.get(f"beat/{r}") == beat]
            lost += [f"rank {r} does not answer: it was killed, its machine is gone, or it is stopped" for r in silent]
            lost = lost or [f"rank {r} is alive, but does not come along: it hangs" for r in others if r not in ended]
        except Exception:
            lost = ["the process that keeps the store is gone (rank 0 or its torchrun)"]
        return f"rank {self.rank}: lost touch. {'; '.join(lost) or error}. Start again with --resume"
