"""
Per-Head Muon, AdamW beside it, and QK-Clip (report §2.5; arXiv 2502.16982; QK-Clip: 2507.20534).

Muon moves a matrix by the orthogonal matrix nearest to its momentum: equally far in all directions.

    M ← 0.95 M + G                       momentum
    O = orthogonalise(G + 0.95 M)        Nesterov; five Newton–Schulz steps
    W ← (1 − lr·wd) W − lr · 0.2 √max(rows, cols) · O

By the factor 0.2 √max(rows, cols), an entry moves by about 0.2·lr, as with AdamW: learning rates
carry over. A matrix is orthogonalised as the blocks it really is: attention projections head by
head, every expert on its own. This file knows shapes and blocks only; model.py lists which
parameter has which. What is no matrix of a linear map (embedding, norms, biases, …) goes to
torch's AdamW.
"""
import torch

from dispatch import hand_round, share_out


def newton_schulz(G, steps=5):
    """
    G (…, rows, cols) → the same shape and dtype: the singular values of each matrix brought to
    about 1 (0.7 to 1.2), its singular vectors kept. Scale-free down to the tiniest gradients; a
    zero matrix gives zero. Works in bf16 on GPUs and on CPUs that multiply it (AVX512-BF16), else
    in fp32 at least.
    """
    has_bf16 = G.is_cuda or G.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    exact = torch.promote_types(G.dtype, torch.float32)
    work = torch.bfloat16 if has_bf16 and G.dtype != torch.float64 else exact
    is_tall = G.shape[-2] > G.shape[-1]
    X = (G.mT if is_tall else G).to(exact)  # rows ≤ cols keeps A small
    # first by the largest entry, whose square may underflow; the norm is then at least 1, or 0
    largest = X.abs().amax((-2, -1), keepdim=True)
    X = X / torch.where(largest > 0, largest, 1)
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=1)
    X = X.to(work).reshape(-1, *X.shape[-2:])  # (blocks, rows, cols)
    # X ← a X + b A X + c A² X with A = X Xᵀ: five rounds of this quintic bring singular values
    # from (0, 1] to about 1
    for _ in range(steps):
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # b A + c A²
        X = torch.baddbmm(X, B, X, beta=3.4445)
    return (X.mT if is_tall else X).reshape(G.shape).to(G.dtype)


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
        todo = {}  # shape of a block → [(parameter, its group, its update in blocks)]
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.others:
                    continue
                g = torch.zeros_like(p) if p.grad is None else p.grad
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"].mul_(group["momentum"]).add_(g)
                update = g.add(momentum, alpha=group["momentum"])  # Nesterov
                rows, cols = p.shape[-2] // group["blocks"], p.shape[-1]
                same_shape = todo.setdefault((rows, cols, p.dtype, p.device), [])
                same_shape.append((p, group, update.view(-1, rows, cols)))
        # one batch of Newton–Schulz for all blocks of a shape
        for (rows, cols, *_), same_shape in todo.items():
            updates = [update for _, _, update in same_shape]
            O = newton_schulz(torch.cat(updates))  # (blocks, rows, cols)
            for (p, group, _), o in zip(same_shape, O.split([len(update) for update in updates])):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(o.reshape(p.shape), alpha=-group["lr"] * 0.2 * max(rows, cols) ** 0.5)


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


@torch.no_grad()
def qk_clip(q_b, kv_b, max_logit, nope, rope, tau=100.0):
    """
    Keep attention logits from growing. A head whose largest logit of the step passed tau gets its
    query and key weights scaled by γ = tau / max, so that the same tokens would give tau. In place:
    q_b (H·(nope + rope), ·), the nope rows × √γ and the rope rows × γ (their key, k_shared, belongs
    to all heads and stays); kv_b (H·(nope + V), ·), the nope rows × √γ. max_logit (H): −inf if
    nothing was seen.
    """
    H = max_logit.numel()
    if q_b.shape[0] != H * (nope + rope) or kv_b.shape[0] % H:
        raise ValueError(f"qk_clip: {H} heads of {nope} + {rope} rows do not fit "
                         f"q_b {tuple(q_b.shape)} and kv_b {tuple(kv_b.shape)}")
    gamma = torch.where(max_logit > tau, tau / max_logit, 1.0).view(H, 1, 1).to(q_b.dtype)
    q, kv = q_b.view(H, nope + rope, -1), kv_b.view(H, kv_b.shape[0] // H, -1)
    q[:, :nope] *= gamma.sqrt()
    q[:, nope:] *= gamma
    kv[:, :nope] *= gamma.sqrt()
