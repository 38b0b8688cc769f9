"""
Per-Head Muon, AdamW beside it, and QK-Clip (report §2.5; arXiv 2502.16982; QK-Clip: arXiv 2507.20534).

Muon moves a matrix by the orthogonal matrix nearest to its momentum: every direction moves equally far.

    M ← 0.95 M + G                       momentum
    O = orthogonalise(G + 0.95 M)        Nesterov; five Newton–Schulz steps
    W ← (1 − lr·wd) W − lr · 0.2 √max(rows, cols) · O          an entry moves by about 0.2·lr, as with AdamW, so its rates carry over

A matrix is orthogonalised as the blocks it really is: attention projections head by head, every expert on its own. This file knows
shapes and blocks only; which parameter has which is listed in model.py. Parameters that are no matrices of a linear map (embedding,
norms, biases, …) go to torch's AdamW.
"""
import torch
import torch.distributed as dist


def newton_schulz(G, steps=5):
    """
    G (..., rows, cols) → the same shape and dtype, each matrix with its singular values brought to about 1 (0.7 to 1.2), its singular
    vectors kept. Scale-free down to the tiniest gradients; a zero matrix gives zero. In bf16 on GPUs and on CPUs that multiply it
    (AVX512-BF16), else at least in fp32.
    """
    bf16 = G.is_cuda or G.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    work = torch.bfloat16 if bf16 and G.dtype != torch.float64 else torch.promote_types(G.dtype, torch.float32)
    X = G.mT if G.shape[-2] > G.shape[-1] else G                           # rows ≤ cols: the product below is the small one
    X = X.to(torch.promote_types(G.dtype, torch.float32))
    largest = X.abs().amax((-2, -1), keepdim=True)
    X = X / torch.where(largest > 0, largest, 1)                           # first by the largest entry: its square may underflow
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=1)         # which is at least 1 now, but for a matrix of zeros
    X = X.to(work).flatten(0, -3) if G.dim() > 2 else X.to(work).unsqueeze(0)      # (blocks, rows, cols)
    for _ in range(steps):                                                 # X ← a X + b A X + c A² X with A = X Xᵀ: five rounds of this
        A = torch.bmm(X, X.mT)                                             # quintic take every singular value in (0, 1] to about 1
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)             # b A + c A²
        X = torch.baddbmm(X, B, X, beta=3.4445)
    return (X.mT if G.shape[-2] > G.shape[-1] else X).reshape(G.shape).to(G.dtype)


class Muon(torch.optim.Optimizer):
    """
    param_groups: dicts with params and, optionally, lr, weight_decay, momentum, and blocks: the number of equal blocks along the rows
    (the heads of a projection) that are orthogonalised one by one. A parameter (..., rows, cols) with leading axes (experts) is that
    many matrices. A missing gradient counts as zero, so what a rank does never depends on which parts its tokens reached.
    """

    def __init__(self, param_groups, lr=0.02, weight_decay=0.1, momentum=0.95):
        super().__init__(param_groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, blocks=1))
        self.others = set()                                                # parameters that another rank steps (MuonAdamW)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() < 2 or p.shape[-2] % group["blocks"]:
                    raise ValueError(f"Muon: a parameter of shape {tuple(p.shape)} is no matrix with rows in {group['blocks']} equal blocks")

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        todo = {}                                                          # block shape → [(parameter, group, its blocks)]
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.others:
                    continue
                g = torch.zeros_like(p) if p.grad is None else p.grad
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"].mul_(group["momentum"]).add_(g)
                update = g.add(momentum, alpha=group["momentum"])
                rows, cols = p.shape[-2] // group["blocks"], p.shape[-1]
                todo.setdefault((rows, cols, p.dtype, p.device), []).append((p, group, update.view(-1, rows, cols)))
        for (rows, cols, *_), same in todo.items():                        # one batch of Newton–Schulz for all blocks of a shape
            O = newton_schulz(torch.cat([update for *_, update in same]))  # (blocks, rows, cols)
            for (p, group, update), o in zip(same, O.split([len(update) for *_, update in same])):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(o.reshape(p.shape), alpha=-group["lr"] * 0.2 * max(rows, cols) ** 0.5)
        return loss


class MuonAdamW:
    """
    Muon and AdamW as one object, with the interface of an optimizer. after_step() runs at the end of every step.

    copies: pairs of a process group and the parameters of which all its ranks hold the same copy, with the same gradient. The work is then
    shared out: each parameter has one rank that keeps its moments and steps it, and then hands it round. The messages are the same ones in every
    step, whatever gradients there are. state_dict() holds the moments of this rank's share, under the numbers that one process would give them.
    """

    def __init__(self, muon_groups, adamw_groups, lr, weight_decay, after_step=lambda: None, copies=()):
        self.muon = Muon(muon_groups or [dict(params=[])], lr=lr, weight_decay=weight_decay)
        self.adamw = torch.optim.AdamW(adamw_groups, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95), fused=True)
        self.after_step = after_step
        self.shares = [(group, share_out(params, group.size())) for group, params in copies if group.size() > 1]
        self.muon.others = {p for group, shares in self.shares for r, share in enumerate(shares) for p in share if r != group.rank()}

    @property
    def param_groups(self):
        return self.muon.param_groups + self.adamw.param_groups

    def step(self):
        for p in self.muon.others:
            p.grad = None                                                  # AdamW, too, leaves it alone
        self.muon.step()
        self.adamw.step()
        for group, shares in self.shares:
            hand_round(shares, group)
        self.after_step()

    def zero_grad(self, set_to_none=True):
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self):
        return dict(muon=self.muon.state_dict(), adamw=self.adamw.state_dict())

    def load_state_dict(self, state):
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def share_out(params, n):
    """A list of parameters → n lists with about as many numbers in each; the same on every rank, as it looks at shapes only."""
    shares, load = [[] for _ in range(n)], [0] * n
    for p in sorted(params, key=lambda p: -p.numel()):
        r = load.index(min(load))
        shares[r].append(p)
        load[r] += p.numel()
    return shares


@torch.no_grad()
def hand_round(shares, group):
    """
    Every rank's own parameters to all ranks of the group, in place: one message from each. (One gathering of all would pad each share to the
    largest, which holds the embedding: on many ranks that many embeddings.)
    """
    for r, share in enumerate(shares):
        if share:
            values = torch.cat([p.flatten() for p in share])               # in a dtype that holds all: bf16 survives fp32
            dist.broadcast(values, group=group, group_src=r)
            if r != group.rank():
                for p, value in zip(share, values.split([p.numel() for p in share])):
                    p.copy_(value.view(p.shape))


@torch.no_grad()
def qk_clip(q_b, kv_b, max_logit, nope, rope, tau=100.0):
    """
    Keep attention logits from growing: a head whose largest logit of the step passed tau gets its query and key weights scaled by
    γ = tau / max, so that the same tokens would give tau. In place: q_b (H·(nope+rope), ·): the nope rows × √γ, the rope rows × γ
    (the key they meet, k_shared, belongs to all heads and stays); kv_b (H·(nope+v), ·): the nope rows × √γ. max_logit (H), −inf if unseen.
    """
    H = max_logit.numel()
    if q_b.shape[0] != H * (nope + rope) or kv_b.shape[0] % H:
        raise ValueError(f"qk_clip: {H} heads of {nope} + {rope} rows do not fit q_b {tuple(q_b.shape)} and kv_b {tuple(kv_b.shape)}")
    gamma = torch.where(max_logit > tau, tau / max_logit, 1.0).view(H, 1, 1).to(q_b.dtype)
    q, kv = q_b.view(H, nope + rope, -1), kv_b.view(H, kv_b.shape[0] // H, -1)
    q[:, :nope] *= gamma.sqrt()
    q[:, nope:] *= gamma
    kv[:, :nope] *= gamma.sqrt()
