"""
Between ranks: who does what, and who sends what to whom. First experts over ranks (report §5.2.1,
App. E: MoonEP), then the sending itself, then an optimizer's work shared out.

Each rank has tokens of its own and is home to E / ranks experts, in order. A row is the latent of
one token for one of its experts, ℓ numbers. With 2 ranks, 4 experts, and a row written as its
expert's number:

              its rows          sorted by worker     what comes           sorted by expert
    rank 0    0 0 1 1 2 3       0 0 1 1 | 2 3        0 0 1 1 | 0 0        0 0 0 0 | 1 1
    rank 1    0 0 1 1 1 2       0 0 | 1 1 1 2        2 3 | 1 1 1 2        2 2 | 3 | 1 1 1

The results go back the same way. At home, experts 0 and 1 would have 9 rows and experts 2 and 3
only 3; so rank 0 lends expert 1, weights and all, to rank 1, which computes three of its five rows
after its own experts'. Nothing is dropped and nothing padded; a rank may get any number of rows,
even none. There and back, forward and backward, a token costs 8·k·ℓ bytes in bf16.
"""
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from ops import by_hand


def is_home(E, ranks):
    """→ (ranks, E) bool: whether the rank is home to the expert."""
    return torch.arange(E) // (E // ranks) == torch.arange(ranks).unsqueeze(1)


def at_home(counts, ranks):
    """counts (E): tokens per expert → (ranks, E) int64: who computes them, if no expert is lent."""
    return is_home(len(counts), ranks) * counts.long()


def plan_redundant(counts, ranks):
    """
    Even loads by lending experts. counts (E) int: tokens per expert, E a multiple of ranks →
    (ranks, E) int64: the tokens of each expert that each rank computes. All ranks get the same
    number of tokens, to one where it does not divide, and borrow at most E/ranks experts.

    One rank after another is filled up, from the one rank that has most: it takes that rank's
    largest experts, whole but for the last. A giver may be left with too little; then it is filled
    in its turn. No rank is filled twice, so no rank borrows from two homes.
    """
    E = len(counts)
    if E % ranks:
        raise ValueError(f"plan_redundant: {E} experts cannot be split evenly over {ranks} ranks")
    own = E // ranks
    plan = at_home(torch.as_tensor(counts).cpu(), ranks).tolist()
    share, rest = divmod(sum(map(sum, plan)), ranks)
    excess = [sum(row) - share - (rank < rest) for rank, row in enumerate(plan)]
    while any(excess):
        low = min(range(ranks), key=excess.__getitem__)
        high = max(range(ranks), key=excess.__getitem__)  # has more than a whole share to give
        largest_first = sorted(range(high * own, high * own + own), key=lambda e: -plan[high][e])
        for e in largest_first:
            moved = min(plan[high][e], -excess[low])
            plan[high][e] -= moved
            plan[low][e] += moved
            excess[high] -= moved
            excess[low] += moved
    return torch.tensor(plan)


@torch.compiler.disable
@torch.no_grad()
def dispatch(by_expert, E, group, balance_ranks):
    """
    by_expert (rows): the expert of each of this rank's rows, ascending. The ranks exchange E counts
    each, and all derive the same plan from them: of (ranks, E) numbers on the host, which has to
    know how much to send, and of rows only where they are. → a namespace:

        by_worker                          order that sorts this rank's rows by who computes them
        send, receive                      rows to and from each rank
        by_slot                            order that sorts the rows that came by expert
        ends                               where the rows of each expert computed here end
        lend, lend_counts, borrow_counts   own experts to lend; how many to and from each rank
    """
    ranks, me, device = group.size(), group.rank(), by_expert.device
    own = E // ranks
    all_counts = torch.empty(ranks, E, dtype=torch.int64, device=device)
    dist.all_gather(list(all_counts), torch.bincount(by_expert, minlength=E), group=group)
    counts = all_counts.cpu().numpy()  # (source, E)
    plan = plan_redundant if balance_ranks else at_home
    plan = plan(torch.from_numpy(counts.sum(0)), ranks).numpy()  # (worker, E)

    # all rows of an expert stand in one line, rank 0's first; workers take from its head, in order
    came_end, taken_end = counts.cumsum(0), plan.cumsum(0)
    came_start, taken_start = came_end - counts, taken_end - plan
    overlap = lambda end, other, start, later: np.maximum(
        np.minimum(end, other) - np.maximum(start, later), 0)
    sent = overlap(came_end[me], taken_end, came_start[me], taken_start)  # (worker, E)
    came = overlap(came_end, taken_end[me], came_start, taken_start[me])  # (source, E)

    home = np.arange(E) // own  # by expert
    borrows = (plan > 0) & (home != np.arange(ranks)[:, None])  # (worker, E)
    lent = borrows.reshape(ranks, ranks, own).sum(-1)  # (worker, home): how many experts
    ours = slice(me * own, me * own + own)
    here = np.concatenate([np.arange(E)[ours], borrows[me].nonzero()[0]])  # computed here
    # rows are sent by expert, from rank to rank; here they go by slot
    return SimpleNamespace(
        by_worker=order_of_runs(sent, starts(sent.T).T, device),
        by_slot=order_of_runs(came.T[here], starts(came).T[here], device),
        send=sent.sum(1).tolist(), receive=came.sum(1).tolist(),
        ends=torch.from_numpy(plan[me, here].cumsum().astype(np.int32)).to(device),
        lend=torch.from_numpy(borrows[:, ours].nonzero()[1]).to(device),
        lend_counts=lent[:, me].tolist(), borrow_counts=lent[me].tolist())


def starts(counts):
    """counts: of runs of rows that follow each other → where each begins."""
    return counts.cumsum().reshape(counts.shape) - counts


def order_of_runs(counts, begins, device):
    """
    Runs of rows, in the order in which they are to stand: how many in each, and where each begins
    now → the order (rows) that moves them there.
    """
    moves = torch.from_numpy(np.stack([begins - starts(counts), counts]).reshape(2, -1)).to(device)
    n = int(counts.sum())
    return moves[0].repeat_interleave(moves[1], output_size=n) + torch.arange(n, device=device)


# ------------------------------------------------------------------------------------------------
# The sending itself: rows to chosen ranks, and one tensor to many

@torch.compiler.disable
def exchange(x, send, receive, group):
    """
    x (rows, …): the first send[0] rows go to rank 0, the next send[1] to rank 1, … → what came,
    (sum(receive), …), rank 0's rows first. Gradients go back to where the rows came from. Every
    rank of the group must call this and go backward through it, even one without rows.
    """
    return _Exchange.apply(x, send, receive, group)


class _Exchange(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.way_back = receive, send, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @by_hand
    def backward(ctx, dout):
        return _Exchange.apply(dout, *ctx.way_back), None, None, None


def pass_on(x, group, goes):
    """
    Context parallelism: x of every rank goes, whole, to each rank `to` with goes(rank, to).
    x (…) → what came, (ranks that sent, …), by rank. All ranks' x have one shape.
    """
    rank, ranks = group.rank(), range(group.size())
    send, receive = [int(goes(rank, r)) for r in ranks], [int(goes(r, rank)) for r in ranks]
    return exchange(x.expand(sum(send), *x.shape), send, receive, group)


# ------------------------------------------------------------------------------------------------
# The optimizer's work: of parameters that all ranks of a group hold alike, each steps a share

def share_out(params, ranks):
    """Parameters → `ranks` lists of about equal size. By shapes alone: every rank gets the same."""
    shares, load = [[] for _ in range(ranks)], [0] * ranks
    for p in sorted(params, key=lambda p: -p.numel()):
        least = load.index(min(load))
        shares[least].append(p)
        load[least] += p.numel()
    return shares


@torch.no_grad()
def hand_round(shares, group):
    """
    Every rank's own parameters to all ranks of the group, in place: a large one as it is, the small
    ones of a rank in one message. (One all-gather would pad each share to the largest, which holds
    the embedding.) → functions to call before the parameters are used: each waits for a message.
    """
    def send(x, rank, parts=()):
        work = dist.broadcast(x, group=group, group_src=rank, async_op=True)

        def arrived():
            work.wait()
            if parts and rank != group.rank():
                for p, value in zip(parts, x.split([p.numel() for p in parts])):
                    p.copy_(value.view(p.shape))
        return arrived
    sent = []
    for rank, share in enumerate(shares):
        small = [p.detach() for p in share if p.numel() < 2 ** 16]
        sent += [send(p.detach(), rank) for p in share if p.numel() >= 2 ** 16]
        if small:  # mixed dtypes: in the widest
            sent += [send(torch.cat([p.flatten() for p in small]), rank, small)]
    return sent
