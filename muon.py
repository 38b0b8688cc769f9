"""
Per-Head Muon, AdamW beside it, and QK-Clip (report §2.5; arXiv 2502.16982; QK-Clip: 2507.20534).

Muon moves a matrix by the orthogonal matrix nearest to its momentum: equally far in all directions.

    M ← 0.95 M + 0.05 G                  momentum, as a running mean
    O = orthogonalise(0.05 G + 0.95 M)   Nesterov; five Newton–Schulz steps
    W ← (1 − lr·wd) W − lr · 0.2 √max(rows, cols) · O

By the factor 0.2 √max(rows, cols), an entry moves by about 0.2·lr, as with AdamW: learning rates
carry over. A matrix is orthogonalised as the blocks it really is: attention projections head by
head, every expert on its own. This file knows shapes and blocks only; model.py lists which
parameter has which. What is no matrix of a linear map (embedding, norms, biases, …) goes to
torch's AdamW.
"""
import bisect
import itertools

import torch

from dispatch import hand_round, share_out

BATCH = 2 ** 26  # entries of all matrices that are orthogonalised at a time


def newton_schulz(G, steps=5):
    """
    G (…, rows, cols) → the same shape and dtype: the singular values of each matrix brought to
    about 1 (0.7 to 1.2), its singular vectors kept. Scale-free down to the tiniest gradients; a
    zero matrix gives zero. Works in bf16 on GPUs and on CPUs that multiply it (AVX512-BF16), else
    in fp32 at least.
    """
    is_tall = G.shape[-2] > G.shape[-1]
    X = G.mT if is_tall else G  # rows ≤ cols keeps A small
    X = X.to(work_dtype(G), copy=True).reshape(-1, *X.shape[-2:])
    X = orthogonalise(X, steps).view(*G.shape[:-2], *X.shape[-2:])
    return (X.mT if is_tall else X).to(G.dtype)


def work_dtype(x):
    has_bf16 = x.is_cuda or x.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    if has_bf16 and x.dtype != torch.float64:
        return torch.bfloat16
    return torch.promote_types(x.dtype, torch.float32)


def orthogonalise(X, steps=5, scale=1.0):
    """X (blocks, rows ≤ cols) in its work_dtype, overwritten → scale times the result."""
    # first by the largest entry, whose square may underflow; the norm is then at least 1, or 0
    tiny = torch.finfo(X.dtype).tiny
    X.div_(torch.linalg.vector_norm(X, torch.inf, (1, 2), keepdim=True).clamp_(min=tiny))
    X.div_(torch.linalg.vector_norm(X, 2, (1, 2), keepdim=True).clamp_(min=1))
    # X ← a X + b A X + c A² X with A = X Xᵀ: five rounds of this quintic bring singular values
    # from (0, 1] to about 1
    for step in range(steps):
        last = scale if step == steps - 1 else 1
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # b A + c A²
        X = torch.baddbmm(X, B, X, beta=3.4445 * last, alpha=last)
    return X


class Muon(torch.optim.Optimizer):
    """
    param_groups: dicts with params and, optionally, lr, weight_decay, momentum, and blocks, the
    number of equal blocks of rows (the heads of a projection) that are orthogonalised one by one. A
    parameter (…, rows, cols) with leading axes (experts) is that many matrices. A missing gradient
    counts as zero, so what a rank does never depends on which parts its tokens reached.
    """

    def __init__(self, param_groups, lr=0.02, weight_decay=0.1, momentum=0.95):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, blocks=1)
        super().__init__(param_groups, defaults)
        self.others = set()  # parameters that another rank steps (MuonAdamW)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() < 2 or p.shape[-2] % group["blocks"]:
                    raise ValueError(f"Muon: a parameter of shape {tuple(p.shape)} is no matrix "
                                     f"with rows in {group['blocks']} equal blocks")

    @torch.no_grad()
    def step(self):
        todo = {}  # shape of a block, … → [(parameter, gradient, mean, group)], in blocks
        for group in self.param_groups:
            params = [p for p in group["params"] if p not in self.others]
            for p in params:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                if "mean" not in self.state[p]:
                    self.state[p]["mean"] = torch.zeros_like(p)
            means = [self.state[p]["mean"] for p in params]
            if params:
                torch._foreach_lerp_(means, [p.grad for p in params], 1 - group["momentum"])
            for p, mean in zip(params, means):
                rows, cols = p.shape[-2] // group["blocks"], p.shape[-1]
                same = todo.setdefault((rows, cols, group["lr"], p.dtype, p.device), [])
                # `view`: of what is to be written, reshape might give a copy
                blocks = (p.detach().view(-1, rows, cols), p.grad.reshape(-1, rows, cols),
                          mean.view(-1, rows, cols))
                parts = [x.split(max(1, BATCH // (rows * cols))) for x in blocks]
                same += [(*part, group) for part in zip(*parts)]
        for (rows, cols, *_), same in todo.items():
            while same:  # as many as a batch may hold, and at least one
                ends = list(itertools.accumulate(len(p) for p, *_ in same))
                count = max(1, bisect.bisect_right(ends, BATCH // (rows * cols)))
                self.move(same[:count])
                same = same[count:]

    def move(self, batch):
        """As one batch: [(parameter, gradient, mean, group)], (blocks, rows, cols) each."""
        p, *_, group = batch[0]
        rows, cols = p.shape[1:]
        counts = [len(p) for p, *_ in batch]
        X = p.new_empty(sum(counts), rows, cols, dtype=work_dtype(p))
        for x, (_, gradient, mean, group) in zip(X.split(counts), batch):
            nesterov = group["momentum"] / (1 - group["momentum"])
            torch.add(gradient, mean, alpha=nesterov, out=x)
        scale = -group["lr"] * 0.2 * max(rows, cols) ** 0.5
        O = orthogonalise(X.mT, scale=scale).mT if rows > cols else orthogonalise(X, scale=scale)
        for o, (p, *_, group) in zip(O.split(counts), batch):
            torch.add(o, p, alpha=1 - group["lr"] * group["weight_decay"], out=p)


class MuonAdamW:
    """
    Muon and AdamW as one optimizer. after_step() runs at the end of every step.

    copies: pairs of a process group and the parameters of which all its ranks hold the same copy
    with the same gradient. They share out the work: one rank keeps a parameter's moments, steps it
    and hands it round. The messages are the same in every step, whatever gradients there are.
    state_dict() holds the moments of this rank's share, under the numbers of a single process.
    """

    def __init__(self, muon_groups, adamw_groups, lr, weight_decay, after_step=lambda: None,
                 copies=()):
        common = dict(lr=lr, weight_decay=weight_decay)
        self.muon = Muon(muon_groups or [dict(params=[])], **common)
        self.adamw = torch.optim.AdamW(adamw_groups, betas=(0.9, 0.95), fused=True, **common)
        self.after_step = after_step
        self.shares = [(group, share_out(params, group.size()))
                       for group, params in copies if group.size() > 1]
        self.muon.others = {p for group, shares in self.shares
                            for rank, share in enumerate(shares) if rank != group.rank()
                            for p in share}

    @property
    def param_groups(self):
        return self.muon.param_groups + self.adamw.param_groups

    def step(self):
        for p in self.muon.others:
            p.grad = None  # so that AdamW leaves it alone, too
        # what AdamW has stepped, the large embeddings among it, travels while Muon works
        sent = []
        for optimizer in (self.adamw, self.muon):
            optimizer.step()
            stepped = {p for group in optimizer.param_groups for p in group["params"]}
            for group, shares in self.shares:
                ours = [[p for p in share if p in stepped] for share in shares]
                sent += hand_round(ours, group)
        for arrived in sent:
            arrived()
        self.after_step()

    def zero_grad(self, set_to_none=True):
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self):
        return dict(muon=self.muon.state_dict(), adamw=self.adamw.state_dict())

    def load_state_dict(self, state):
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


@torch.no_grad()
def qk_clip(q_b, kv_b, max_logit, nope, rope, tau=100.0):
    """
    Keep attention logits from growing. A head whose largest logit of the step passed tau gets its
    query and key weights scaled by γ = tau / max, so that the same tokens would give tau. In place:
    q_b (H·(nope + rope), ·), the nope rows × √γ and the rope rows × γ (their key, k_shared, belongs
    to all heads and stays); kv_b (H·(nope + V), ·), the nope rows × √γ. max_logit (H): −inf if
    nothing was seen. Or lists of the weights of several layers, and max_logit (layers, H).
    """
    if max_logit.dim() == 1:
        q_b, kv_b, max_logit = [q_b], [kv_b], max_logit.unsqueeze(0)
    H = max_logit.shape[1]
    gammas = (tau / max_logit.clamp(min=tau)).view(-1, H, 1, 1)
    for q, kv, gamma, root in zip(q_b, kv_b, gammas, gammas.sqrt()):
        if q.shape[0] != H * (nope + rope) or kv.shape[0] % H:
            raise ValueError(f"qk_clip: {H} heads of {nope} + {rope} rows do not fit "
                             f"q_b {tuple(q.shape)} and kv_b {tuple(kv.shape)}")
        q, kv = q.view(H, nope + rope, -1), kv.view(H, kv.shape[0] // H, -1)
        q[:, :nope].mul_(root)
        q[:, nope:].mul_(gamma)
        kv[:, :nope].mul_(root)
