"""
The sizes of a model, and the rules between them. Every field can be set in a config file or on the
command line of train.py; its comment is its help.
"""
import math
from dataclasses import dataclass, fields

import weights


@dataclass
class K3Config:
    """
    Sizes of a model. The defaults are the small one that a laptop trains. Names are nanoGPT's, then
    the released config's.
    """
    vocab_size: int = 4096                 # data/prepare.py makes this many unless told otherwise
    n_layer: int = 4
    n_embd: int = 128
    n_head: int = 4                        # of KDA and of MLA
    # attention: some layers are MLA, all others KDA
    mla_every: int = 4                     # every so many, and the last; 0: none (for study)
    full_attn_layers: tuple = ()           # or a list of them, from 1; the last layer must be in it
    kda_key_dim: int = 0                   # K of the state; 0: n_embd / n_head
    kda_value_dim: int = 0                 # V of the state; 0: n_embd / n_head
    conv_size: int = 4
    g_min: float = -5.0                    # the log decay's lower bound
    kda_gate: str = "sigmoid"              # or "softplus": Kimi Linear's gate, cut at g_min (study)
    q_lora_rank: int = 64
    kv_lora_rank: int = 48                 # + rope: what MLA caches for a token
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 8              # this slice of k is shared by all heads; never rotated
    v_head_dim: int = 32
    # MLP
    first_k_dense_replace: int = 1         # dense layers at the start
    intermediate_size: int = 512           # of a dense layer
    num_experts: int = 16
    num_experts_per_token: int = 2
    num_shared_experts: int = 2            # one MLP of that many times moe_intermediate_size
    moe_intermediate_size: int = 64
    routed_expert_hidden_size: int = 64    # the latent ℓ; 0: experts work in all n_embd (for study)
    latent_norm: bool = True               # RMSNorm of the experts' sum; False: none (for study)
    routed_scaling_factor: float = 1.0
    situ_beta: float = 4.0                 # None: no limit on the gate; both None: SwiGLU
    situ_linear_beta: float = 25.0         # None: no limit on the up branch
    balance: str = "quantile"              # or "sign": DeepSeek's ±0.001 a step, or "none" (study)
    router_bias_ema: float = 0.0           # how much of the old router bias an update keeps
    qat: str = ""                          # "mxfp4": train for routed experts kept in MXFP4
    # attention residuals
    attn_res: str = "block"                # or "full": a block per part, "none": x + f(x) (study)
    attn_res_block_size: int = 2           # layers per block
    rms_norm_eps: float = 1e-5
    # multi-token prediction
    mtp_layers: int = 0                    # or 1: a layer beside the model, which drafts tokens
    mtp_weight: float = 0.3                # of its loss in training
    mtp_features: bool = False             # whether it reads W_E3 [low; mid; h]: python mtp.py
    # images: the vision tower
    vit_layers: int = 0                    # 0: none, the model reads text alone
    vit_width: int = 96
    vit_attn_width: int = 144              # of q, of k and of v, all heads together
    vit_heads: int = 3
    vit_mlp_width: int = 384
    vit_patch: int = 8                     # pixels along each side of a patch
    vit_table: int = 16                    # learned positions along each side
    media_pad: int = -1                    # the token in whose place a feature stands; −1: none

    @classmethod
    def k3(cls):
        """The released model: 2.78T parameters, 104B of them active for a token."""
        return cls(vocab_size=163840, n_layer=93, n_embd=7168, n_head=96,
                   full_attn_layers=(*range(4, 93, 4), 93), kda_key_dim=128, kda_value_dim=128,
                   q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                   v_head_dim=128, intermediate_size=33792, num_experts=896,
                   num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=3072,
                   routed_expert_hidden_size=3584, attn_res_block_size=12, vit_layers=27,
                   vit_width=1024, vit_attn_width=1536, vit_heads=12, vit_mlp_width=4096,
                   vit_patch=14, vit_table=64, media_pad=163605)

    @classmethod
    def from_released(cls, folder):
        """The sizes in a released folder's config.json. Errors: ValueError, in its own names."""
        given = weights.read_config(folder)
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(weights.in_released_words(folder, error)) from None

    def is_mla(self, i):
        """Whether layer i, from 0, is Gated MLA."""
        if self.full_attn_layers:
            return i + 1 in self.full_attn_layers
        is_last = i + 1 == self.n_layer
        return self.mla_every > 0 and ((i + 1) % self.mla_every == 0 or is_last)

    def __post_init__(self):
        def rule(holds, name, what):
            if not holds:
                raise ValueError(f"config: {name} = {getattr(self, name)!r}; {what}")

        may_be_zero = {"mla_every", "kda_key_dim", "kda_value_dim", "first_k_dense_replace",
                       "qk_rope_head_dim", "routed_expert_hidden_size", "vit_layers", "mtp_layers"}
        # below g_min = -5.9, the 16-row tiles of KDA leave fp32
        ranges = dict(g_min=(-5.9, 0), router_bias_ema=(0, 1), rms_norm_eps=(1e-12, 0.1),
                      routed_scaling_factor=(1e-6, 1e6), situ_beta=(1e-3, 1e6),
                      situ_linear_beta=(1e-3, 1e6), mtp_weight=(0, 100))
        for name, kind in ((f.name, f.type) for f in fields(self)):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and type(value) is not bool
            if kind is int:
                least = 0 if name in may_be_zero else -1 if name == "media_pad" else 1
                rule(type(value) is int and value >= least, name,
                     f"must be a whole number, at least {least}")
            elif kind is float and not (value is None and name.startswith("situ")):
                low, high = ranges.get(name, (-math.inf, math.inf))
                no_limit = ", or None for no limit"
                rule(is_number and low <= value < high, name, f"must be a number in [{low}, {high})"
                     + no_limit * name.startswith("situ"))

        if not (self.kda_key_dim and self.kda_value_dim):
            rule(self.n_embd % self.n_head == 0, "n_head", f"must divide n_embd = {self.n_embd}, "
                 "or kda_key_dim and kda_value_dim must be given")
            self.kda_key_dim = self.kda_key_dim or self.n_embd // self.n_head
            self.kda_value_dim = self.kda_value_dim or self.n_embd // self.n_head

        rule(type(self.full_attn_layers) in (tuple, list), "full_attn_layers", "expected a list")
        layers, n = tuple(self.full_attn_layers), self.n_layer
        self.full_attn_layers = layers
        in_range = all(type(i) is int and 1 <= i <= n for i in layers)
        rule(in_range and sorted(set(layers)) == list(layers), "full_attn_layers",
             f"must be ascending numbers from 1 to n_layer = {n}")
        rule(not layers or layers[-1] == n, "full_attn_layers",
             f"must end with the last layer, {n}")
        rule(self.first_k_dense_replace <= n, "first_k_dense_replace",
             f"must be at most n_layer = {n}")

        for name, words in (("attn_res", ("block", "full", "none")),
                            ("kda_gate", ("sigmoid", "softplus")),
                            ("balance", ("quantile", "sign", "none")), ("qat", ("", "mxfp4"))):
            rule(getattr(self, name) in words, name, f"must be one of {str(words)[1:-1]}")
        rule(self.num_experts_per_token <= self.num_experts, "num_experts_per_token",
             f"must be at most num_experts = {self.num_experts}")
        for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
            rule(getattr(self, name) % 8 == 0, name,
                 "must be a multiple of 8: grouped matrix products want rows of 16 bytes")
            rule(not self.qat or getattr(self, name) % 32 == 0, name,
                 "must be a multiple of 32, the block of MXFP4, with qat")
        for name in ("latent_norm", "mtp_features"):
            rule(type(getattr(self, name)) is bool, name, "must be True or False")
        rule(self.mtp_layers <= 1, "mtp_layers", "must be 0 or 1, as in K3")
        rule(self.mtp_layers or not self.mtp_features, "mtp_features", "needs mtp_layers = 1")
        if not self.routed_expert_hidden_size:
            no_latent = "with routed_expert_hidden_size = 0"
            rule(not self.latent_norm, "latent_norm",
                 f"must be False {no_latent}: there is no latent to norm")
            rule(not self.qat, "qat", f"must be '' {no_latent}: MXFP4 is for experts in a latent")

        if self.vit_layers:
            rule(self.vit_width % 2 == 0, "vit_width", "must be even: half of it is sines")
            rule(self.vit_attn_width % (4 * self.vit_heads) == 0, "vit_attn_width",
                 f"must be a multiple of 4 · vit_heads = {4 * self.vit_heads}: rotation takes "
                 "four numbers of a head at a time")
            rule(0 <= self.media_pad < self.vocab_size, "media_pad",
                 f"must be a token's id, below vocab_size = {self.vocab_size}, with vit_layers")
