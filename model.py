"""
Kimi K3 (arXiv 2607.24653), the whole of it: this file is the map, the parts are in the files it imports.

    tokens → embedding → 93 layers → norm → lm_head

A layer is an attention part, then an MLP part. There is no x + f(x): what a part reads is a learned mixture over depth (attnres.py).
Attention is KDA (kda.py), a linear attention with a state of constant size; every 4th layer, and the last, is Gated MLA (here), a
softmax attention over compressed latents. Neither knows positions. The MLP is a dense SiTU-GLU in the first layer, then Stable LatentMoE
(moe.py). Weights are trained with Per-Head Muon (muon.py).

    K3Config      every size, and the checks between them; K3Config.k3() is the released model
    GatedMLA      §2.1.2
    Layer, K3     the wiring, initialisation, counting, optimizer and generation

    python model.py FOLDER      what a folder of released weights holds, and the memory it takes
"""
import math
import sys
from dataclasses import dataclass, fields, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

import muon
import weights
from attnres import Mix, Stream
from kda import KDA
from mla import GatedMLA, largest_logit  # noqa: F401 (largest_logit: for those who import it from here)
from moe import LatentMoE, SiTUGLU, load_figures
from ops import RMSNorm, fp32


class Layer(nn.Module):

    def __init__(self, config, i):
        super().__init__()
        d, eps = config.n_embd, config.rms_norm_eps
        self.full = config.attn_res == "full"
        plain = config.attn_res == "none"          # no block is ever closed, so the running sum is all there is to read: x + f(x)
        self.starts_block = not plain and (self.full or i % config.attn_res_block_size == 0)
        self.attn_mix = None if plain else Mix(d, eps)       # layer 0 has nothing to mix yet: there it is stored, and does nothing
        self.attn_norm = RMSNorm(d, eps)
        self.attn = GatedMLA(config) if config.is_mla(i) else KDA(config)
        self.mlp_mix = None if plain else Mix(d, eps)
        self.mlp_norm = RMSNorm(d, eps)
        if i < config.first_k_dense_replace:
            self.mlp = SiTUGLU(d, config.intermediate_size, config.situ_beta, config.situ_linear_beta)
        else:
            self.mlp = LatentMoE(config)

    def forward(self, stream, cache=None, counted=None):
        """Reads from the stream and adds to it. counted: which tokens count for balance, (B, T) bool or None for all."""
        x = self.attn_norm(stream.read(self.attn_mix))                     # (B, T, d)
        if self.starts_block:
            stream.close_block()
        stream.add(self.attn(x, cache))
        x = self.mlp_norm(stream.read(self.mlp_mix))
        if self.full:
            stream.close_block()
        stream.add(self.mlp(x, counted) if isinstance(self.mlp, LatentMoE) else self.mlp(x))


class K3(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layer))
        self.out_mix = None if config.attn_res == "none" else Mix(config.n_embd, config.rms_norm_eps)
        self.norm = RMSNorm(config.n_embd, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tokenizer = None                      # the tiktoken.Encoding that came with the weights, if one did: save_pretrained writes it
        if not self.lm_head.weight.is_meta:        # there a model is only its shapes
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        embedding                            normal, std 0.1: small beside what layers add, as mixtures take raw values
        lm_head                              zero: the first loss is exactly ln(vocab)
        o_proj of attention, down_proj of    zero: every layer part starts by adding nothing. Of the routed path only the last
          dense and shared MLP, W↑ of MoE      matrix (w2 without a latent): with w2 at zero as well, neither would ever get a gradient
        every other matrix, experts too      normal, std 1/√(its input width)
        convolutions                         uniform ±1/√width
        norm weights                         1
        pseudo-queries w                     0: a plain mean over depth
        A_log                                0
        dt_bias                              softplus⁻¹ of log-uniform [0.001, 0.1]
        router bias                          0
        """
        zero = [self.lm_head]
        for layer in self.layers:
            m = layer.mlp
            zero += [layer.attn.o_proj]
            zero += [m.up_proj if m.latent else m.w2, m.shared.down_proj] if isinstance(m, LatentMoE) else [m.down_proj]
        zero = {id(getattr(x, "weight", x)) for x in zero}
        for name, p in self.named_parameters():
            if id(p) in zero or name.endswith((".w", "A_log")):
                p.zero_()
            elif name == "embed.weight":
                p.normal_(std=0.1)
            elif name.endswith("dt_bias"):
                dt = torch.empty_like(p).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))                 # softplus⁻¹(dt)
            elif name.endswith("conv1d.weight"):
                p.uniform_(-p.shape[-1] ** -0.5, p.shape[-1] ** -0.5)
            elif p.dim() >= 2:
                p.normal_(std=p.shape[-1] ** -0.5)
            else:
                p.fill_(1)

    # ---- running it

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """
        idx, targets (B, T) int64 → logits (B, T, vocab), or (B, 1, vocab) with last_only, and the loss, the mean cross-entropy in nats
        (None without targets). A target of −1 is ignored, and its token does not count for balance. cache: from new_cache; the tokens
        then follow those of earlier calls.
        """
        stream = Stream(self.embed(idx))                                   # (B, T, d)
        counted = None if targets is None or (targets != -1).all() else targets != -1
        for i, layer in enumerate(self.layers):
            layer(stream, cache[i] if cache else None, counted)
        x = self.norm(stream.read(self.out_mix))
        logits = self.lm_head(x[:, -1:] if last_only else x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(fp32(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)

    def new_cache(self, batch_size):
        """One dict a layer: for KDA a state and three conv tails of constant size, for MLA kv_lora_rank + rope numbers a token."""
        return [layer.attn.new_cache(batch_size) for layer in self.layers]

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stream=False, vocab_size=None):
        """
        idx (B, T ≥ 1) → (B, T + max_new_tokens); with stream=True an iterator over the new tokens, each (B, 1). temperature 0 takes the
        likeliest. top_k: only the k likeliest; top_p: only the likeliest that together reach p. vocab_size: ids from there on (rows that
        only pad the vocabulary) are never sampled. Draws from torch's global generator.
        """
        if idx.dim() != 2 or idx.shape[1] < 1:
            raise ValueError(f"idx: expected (B, T) with at least one token to start from, got {tuple(idx.shape)}")
        if not temperature >= 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
            raise ValueError(f"expected temperature ≥ 0, top_k ≥ 1, 0 < top_p ≤ 1; got {temperature}, {top_k}, {top_p}")
        tokens = self._generate(idx, max_new_tokens, temperature, top_k, top_p, vocab_size)
        return tokens if stream else torch.cat([idx, *tokens], dim=1)

    @torch.no_grad()
    def _generate(self, idx, max_new_tokens, temperature, top_k, top_p, vocab_size):
        was_training, cache = self.training, self.new_cache(idx.shape[0])
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits = fp32(self(idx, cache=cache, last_only=True)[0][:, -1, :vocab_size])        # (B, vocab)
                idx = sample_token(logits, temperature, top_k, top_p)                               # (B, 1): the only input from now on
                yield idx
        finally:
            self.train(was_training)

    # ---- training it

    def share_experts(self, group, balance_ranks=False):
        """From now on this process holds its part of the experts only, and the process group computes them together."""
        for layer in self.layers:
            if isinstance(layer.mlp, LatentMoE):
                layer.mlp.share_experts(group, balance_ranks)

    def shared_out(self):
        """{name: parameter} of the expert weights, if this process holds only its part of them."""
        moes = {i: layer.mlp for i, layer in enumerate(self.layers) if isinstance(layer.mlp, LatentMoE) and layer.mlp.group}
        return {f"layers.{i}.mlp.{name}": getattr(m, name) for i, m in moes.items() for name in ("w13", "w2")}

    def share_context(self, group):
        """From now on a batch is this process's stretch of sequences that the process group holds together, rank 0 their start."""
        for layer in self.layers:
            layer.attn.context_group = group

    @torch.no_grad()
    def update_router_bias(self):
        """
        Once per optimizer step: Quantile Balancing from the step's tokens. → per MoE layer a dict: layer (from 0), load (E), the tokens
        of each expert, max_violation = max load / mean load − 1, dead = experts without a token.
        """
        figures = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mlp, LatentMoE):
                load = layer.mlp.update_router_bias()
                violation, dead = load_figures(load)
                figures.append(dict(layer=i, load=load, max_violation=violation, dead=dead))
        return figures

    def configure_optimizers(self, lr, weight_decay=0.1, ranks=None, replicas=None, optimizer="muon"):
        """Per-Head Muon for the matrices, AdamW for the rest; every step ends with QK-Clip. The lists are all there is: each parameter
        stands in exactly one. For study, optimizer may be "whole" (Muon without cuts into heads) or "adamw" (for the matrices too).
        ranks: the process group that shares the work of the step, if there are several processes; replicas: likewise
        the group of those that hold the same experts as this one, if experts are shared out."""
        if optimizer not in ("muon", "whole", "adamw"):
            raise ValueError(f"optimizer = {optimizer!r}: expected muon, whole or adamw")
        per_head, whole, decayed, plain, queries = [], [], [self.embed, self.lm_head], [self.norm], []
        for mix in (self.out_mix, *(mix for layer in self.layers for mix in (layer.attn_mix, layer.mlp_mix))):
            plain += [mix.norm] if mix else []
            queries += [mix.w] if mix else []
        for layer in self.layers:
            a, m = layer.attn, layer.mlp
            plain += [layer.attn_norm, layer.mlp_norm]
            whole += [a.g_proj, a.o_proj]
            if isinstance(a, KDA):
                per_head += [a.q_proj, a.k_proj, a.v_proj]
                whole += [a.f_a_proj, a.f_b_proj, a.b_proj]
                plain += [a.q_conv1d, a.k_conv1d, a.v_conv1d, a.A_log, a.dt_bias, a.o_norm]
            else:
                per_head += [a.q_b_proj, a.kv_b_proj]
                whole += [a.q_a_proj, a.kv_a_proj_with_mqa]
                plain += [a.q_a_layernorm, a.kv_a_layernorm]
            if isinstance(m, LatentMoE):
                whole += [m.router, m.w13, m.w2]                           # w13 and w2 are matrices stacked by expert
                whole += [m.down_proj, m.up_proj] if m.latent else []
                plain += [m.norm] if m.norm else []
                m = m.shared
            whole += [m.gate_proj, m.up_proj, m.down_proj]
        per_head, whole, decayed, plain = ([getattr(p, "weight", p) for p in group] for group in (per_head, whole, decayed, plain))
        listed = [id(p) for p in per_head + whole + decayed + plain + queries]
        assert sorted(listed) == sorted(id(p) for p in self.parameters()), "a parameter is listed twice or not at all"
        matrices = [dict(params=per_head, blocks=self.config.n_head if optimizer == "muon" else 1), dict(params=whole)]
        # pseudo-queries at a tenth of the rate: AdamW moves all d entries of one at once, and a logit is their sum with no 1/√d
        others = [dict(params=decayed), dict(params=plain, weight_decay=0.0), dict(params=queries, weight_decay=0.0, lr=lr / 10, lr_scale=0.1)]
        if optimizer == "adamw":
            matrices, others = [], [dict(params=per_head + whole + decayed), *others[1:]]
        experts = list(self.shared_out().values())
        own = set(experts)
        copies = [(ranks, [p for p in self.parameters() if p not in own]), (replicas, experts)]
        return muon.MuonAdamW(matrices, others, lr, weight_decay, after_step=self.qk_clip,
                              copies=[(group, params) for group, params in copies if group and params])

    def qk_clip(self):
        """Scale down the MLA heads whose logits passed 100 in this step, and start counting anew."""
        for layer in self.layers:
            a = layer.attn
            if isinstance(a, GatedMLA):
                muon.qk_clip(a.q_b_proj.weight, a.kv_b_proj.weight, a.max_logit, a.nope, a.rope)
                a.max_logit.fill_(-torch.inf)

    # ---- released weights

    @classmethod
    def from_pretrained(cls, folder, dtype=None, device="cpu", **training):
        """
        A folder as K3 is released: config.json and safetensors → K3 in eval mode. dtype: torch.float32 or torch.bfloat16, None for the file's own.
        training: fields of K3Config that a released config does not have (qat, router_bias_ema). What is read and refused: weights.py.
        """
        config = K3Config.from_released(folder)
        stored_dtype, found = weights.read_folder(folder, config)
        with torch.device("meta"):
            model = cls(replace(config, **training))
        weights.fill(model, folder, found, dtype or stored_dtype, device)
        return model.eval()

    def save_pretrained(self, folder, dtype=None, experts=None, tokenizer=None):
        """
        The way back: config.json, safetensors, generation_config.json, and the tokenizer (self.tokenizer, or the one given). dtype: None for the
        model's own. experts: "mxfp4" or "plain", None for mxfp4 if the model was trained for it.
        """
        weights.save(self, folder, dtype, experts, tokenizer)

    # ---- counting it

    def num_params(self):
        """All parameters, embedding and router biases included, and the experts of all ranks."""
        moes = [layer.mlp for layer in self.layers if isinstance(layer.mlp, LatentMoE)]
        elsewhere = sum((m.E - len(w)) * w[0].numel() for m in moes for w in (m.w13, m.w2))
        return sum(p.numel() for p in [*self.parameters(), *(m.router_bias for m in moes)]) + elsewhere

    def num_active_params(self):
        """Those that one token meets: of the experts only the chosen; the input embedding, a lookup, is not counted."""
        idle = 0
        for layer in self.layers:
            if isinstance(layer.mlp, LatentMoE):
                m = layer.mlp
                idle += (m.w13[0].numel() + m.w2[0].numel()) * (m.E - m.k)
        return self.num_params() - self.embed.weight.numel() - idle

    def flops_per_token(self, T):
        """
        Forward and backward, matrix products only, for a token of a sequence of T: 6 per active parameter; softmax attention over T/2
        earlier tokens on average, 2 products; the KDA state, 3 products of K×V (what it held, what is added, what is read).
        """
        c, flops = self.config, 6 * self.num_active_params()
        for i in range(c.n_layer):
            if c.is_mla(i):
                flops += 6 * c.n_head * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim) * T // 2
            else:
                flops += 6 * c.n_head * 3 * c.kda_key_dim * c.kda_value_dim
        return flops


def sample_token(logits, temperature, top_k, top_p):
    """logits (B, vocab) fp32 → (B, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        values, order = logits.sort(descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)       # the mass of all likelier tokens: the first one always stays
        logits = logits.masked_fill((before >= top_p).scatter(1, order, before >= top_p), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)


# ----------------------------------------------------------------------------------------------------------------------
# Sizes, and the rules between them

@dataclass
class K3Config:
    """Sizes of a model. The defaults are the small one that a laptop trains. Names are nanoGPT's, then the released config's."""
    vocab_size: int = 4096                 # what data/prepare.py makes unless told otherwise
    n_layer: int = 4
    n_embd: int = 128
    n_head: int = 4                        # of KDA and of MLA
    # attention: which layers are MLA, counted from 1; all others are KDA
    mla_every: int = 4                     # every so many, and the last; 0: none (for study)
    full_attn_layers: tuple = ()           # or listed one by one; the last layer must be among them
    kda_key_dim: int = 0                   # K and V of the state; 0: n_embd / n_head
    kda_value_dim: int = 0
    conv_size: int = 4
    g_min: float = -5.0                    # the log decay's lower bound
    kda_gate: str = "sigmoid"              # or "softplus": Kimi Linear's, unbounded but for a floor at g_min (for study)
    q_lora_rank: int = 64
    kv_lora_rank: int = 48                 # + rope: what MLA caches for a token
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 8              # the slice of q and k that is shared by all heads; nothing is rotated
    v_head_dim: int = 32
    # MLP
    first_k_dense_replace: int = 1         # dense layers at the start
    intermediate_size: int = 512           # of a dense layer
    num_experts: int = 16
    num_experts_per_token: int = 2
    num_shared_experts: int = 2            # one MLP of that many times moe_intermediate_size
    moe_intermediate_size: int = 64
    routed_expert_hidden_size: int = 64    # the latent ℓ; 0: none, experts read and write all n_embd (for study)
    latent_norm: bool = True               # RMSNorm of what the experts give; False: none (for study)
    routed_scaling_factor: float = 1.0
    situ_beta: float = 4.0                 # None: no limit on the gate; both None: SwiGLU
    situ_linear_beta: float = 25.0         # None: no limit on the up branch
    balance: str = "quantile"              # of the router; or "sign": DeepSeek's rule, ±0.001 a step, or "none" (both for study)
    router_bias_ema: float = 0.0           # how much of the old router bias an update keeps
    qat: str = ""                          # "mxfp4": routed experts are rounded to MXFP4 in every forward, to be kept in it later
    # attention residuals
    attn_res: str = "block"                # or "full": a block per layer part, or "none": x + f(x) (both for study)
    attn_res_block_size: int = 2           # layers a block
    rms_norm_eps: float = 1e-5

    @classmethod
    def k3(cls):
        """The released model: 2.78T parameters, 104B of them active for a token."""
        return cls(vocab_size=163840, n_layer=93, n_embd=7168, n_head=96, full_attn_layers=(*range(4, 93, 4), 93),
                   kda_key_dim=128, kda_value_dim=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                   v_head_dim=128, intermediate_size=33792, num_experts=896, num_experts_per_token=16, num_shared_experts=2,
                   moe_intermediate_size=3072, routed_expert_hidden_size=3584, attn_res_block_size=12)

    @classmethod
    def from_released(cls, folder):
        """The sizes in a released folder's config.json. Errors: ValueError with the name that config.json has for it."""
        given = weights.read_config(folder)
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(weights.in_released_words(folder, error)) from None

    def __post_init__(self):
        def rule(holds, name, what):
            if not holds:
                raise ValueError(f"config: {name} = {getattr(self, name)!r}; {what}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is int:
                rule(isinstance(value, int) and not isinstance(value, bool), f.name, "expected a whole number")
                may_be_zero = f.name in ("mla_every", "kda_key_dim", "kda_value_dim", "first_k_dense_replace", "qk_rope_head_dim",
                                         "routed_expert_hidden_size")
                rule(value >= (0 if may_be_zero else 1), f.name, f"must be at least {0 if may_be_zero else 1}")
        if not (self.kda_key_dim and self.kda_value_dim):
            rule(self.n_embd % self.n_head == 0, "n_head",
                 f"must divide n_embd = {self.n_embd}, or kda_key_dim and kda_value_dim must be given")
            self.kda_key_dim = self.kda_key_dim or self.n_embd // self.n_head
            self.kda_value_dim = self.kda_value_dim or self.n_embd // self.n_head
        rule(-5.9 <= self.g_min < 0, "g_min", "must lie in [-5.9, 0): below that the 16-row tiles of KDA leave fp32")
        layers = self.full_attn_layers = tuple(self.full_attn_layers)
        rule(all(type(i) is int for i in layers) and sorted(set(layers)) == list(layers) and all(1 <= i <= self.n_layer for i in layers), "full_attn_layers",
             f"must be ascending numbers from 1 to n_layer = {self.n_layer}")
        rule(not layers or layers[-1] == self.n_layer, "full_attn_layers", f"must end with the last layer, {self.n_layer}")
        rule(self.first_k_dense_replace <= self.n_layer, "first_k_dense_replace", f"must be at most n_layer = {self.n_layer}")
        rule(self.num_experts_per_token <= self.num_experts, "num_experts_per_token", f"must be at most num_experts = {self.num_experts}")
        for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
            rule(getattr(self, name) % 8 == 0, name, "must be a multiple of 8: grouped matrix products want rows of 16 bytes")
            rule(not self.qat or getattr(self, name) % 32 == 0, name, "must be a multiple of 32, the block of MXFP4, with qat")
        rule(self.qat in ("", "mxfp4"), "qat", "must be 'mxfp4', or '' for none")
        for name, words in dict(attn_res=("block", "full", "none"), kda_gate=("sigmoid", "softplus"), balance=("quantile", "sign", "none")).items():
            rule(getattr(self, name) in words, name, f"must be one of {', '.join(map(repr, words))}")
        rule(type(self.latent_norm) is bool, "latent_norm", "must be True or False")
        if not self.routed_expert_hidden_size:
            rule(not self.latent_norm, "latent_norm", "must be False with routed_expert_hidden_size = 0: there is no latent to norm")
            rule(not self.qat, "qat", "must be '' with routed_expert_hidden_size = 0: MXFP4 is for experts in a latent")
        rule(0 <= self.router_bias_ema < 1, "router_bias_ema", "must lie in [0, 1)")
        rule(self.situ_beta is None or self.situ_beta > 0, "situ_beta", "must be positive, or None for no limit")
        rule(self.situ_linear_beta is None or self.situ_linear_beta > 0, "situ_linear_beta", "must be positive, or None for no limit")

    def is_mla(self, i):
        """Whether layer i, counted from 0, is Gated MLA."""
        if self.full_attn_layers:
            return i + 1 in self.full_attn_layers
        return self.mla_every > 0 and ((i + 1) % self.mla_every == 0 or i + 1 == self.n_layer)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("expected: python model.py FOLDER, a folder as K3 is released (config.json and *.safetensors)")
    try:
        with torch.device("meta"):
            model = K3(K3Config.from_released(sys.argv[1])).bfloat16()
        weights.describe(model, sys.argv[1])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
