"""
Kimi K3 (arXiv 2607.24653), the whole model. This file is the map; each part has its own file,
and the sizes are in sizes.py.

    tokens → embedding → 93 layers → norm → lm_head

A layer is an attention part, then an MLP part. There is no x + f(x): what a part reads is a learned
mixture over depth (attnres.py). Attention is KDA (kda.py), a linear attention whose state has a
constant size; every 4th layer, and the last, is Gated MLA (mla.py), a softmax attention over
compressed latents. Neither knows positions. The MLP is a dense SiTU-GLU in the first layer and
Stable LatentMoE (moe.py) in all others. One more layer may look a token further (mtp.py). Per-Head
Muon trains the matrices (muon.py). weights.py reads and writes released models.

    python model.py FOLDER      what a folder of released weights holds, and the memory it takes
"""
import math
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F

import mla
import muon
import weights
from attnres import Mix, Stream
from cli import run
from kda import KDA
from mla import GatedMLA, largest_logit  # noqa: F401 (importable from here, too)
from moe import LatentMoE, SiTUGLU, load_figures, update_router_biases
from mtp import MTP, evaluating, speculate
from ops import RMSNorm, cross_entropy, fp32, low_precision
from sizes import K3Config
from vision import VisionTower, images_here, wrong_count


class Layer(nn.Module):
    """Attention, then an MLP. Each reads from the stream and adds its output to it."""

    def forward(self, stream, cache=None, counted=None):
        """counted: the tokens that count for balance, (B, T) bool, or None for all."""
        x = stream.read(self.attn_mix, self.attn_norm)  # (B, T, d)
        if self.starts_block:  # every attn_res_block_size-th layer
            stream.close_block()
        stream.add(self.attn(x, cache))

        x = stream.read(self.mlp_mix, self.mlp_norm)  # (B, T, d)
        if self.block_per_part:  # full AttnRes
            stream.close_block()
        stream.add(self.mlp(x, counted) if self.is_moe else self.mlp(x))

    def __init__(self, config, i):
        super().__init__()
        d, eps = config.n_embd, config.rms_norm_eps
        # attn_res = "none" never closes a block: the running sum is all there is to read, x + f(x)
        mixes = config.attn_res != "none"
        self.block_per_part = config.attn_res == "full"
        self.starts_block = mixes and (self.block_per_part or i % config.attn_res_block_size == 0)
        self.is_moe = i >= config.first_k_dense_replace

        self.attn_mix = Mix(d, eps) if mixes else None  # in layer 0 it is stored, but never read
        self.attn_norm = RMSNorm(d, eps)
        self.attn = GatedMLA(config) if config.is_mla(i) else KDA(config)
        self.mlp_mix = Mix(d, eps) if mixes else None
        self.mlp_norm = RMSNorm(d, eps)
        if self.is_moe:
            self.mlp = LatentMoE(config)
        else:
            limits = config.situ_beta, config.situ_linear_beta
            self.mlp = SiTUGLU(d, config.intermediate_size, *limits)


class K3(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        d, eps = config.n_embd, config.rms_norm_eps
        self.embed = nn.Embedding(config.vocab_size, d)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layer))
        self.out_mix = None if config.attn_res == "none" else Mix(d, eps)
        self.norm = RMSNorm(d, eps)
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        self.vision = VisionTower(config) if config.vit_layers else None
        self.context_group = None  # of the ranks that hold one sequence between them
        self.checkpoint_layers = False  # in training: keep a layer's input, and run it twice
        self.mtp = MTP(config) if config.mtp_layers else None
        self.mtp_loss = None  # MTP's own loss, without its weight, of the last call with targets
        self.tokenizer = None  # the tiktoken.Encoding that came with the weights, if any
        if not self.lm_head.weight.is_meta:
            self.init_weights()

    def forward(self, idx, targets=None, cache=None, last_only=False, images=None, counted=None):
        """
        idx, targets (B, T) int64 → logits and loss. Logits are (B, T, vocab), or (B, 1, vocab) with
        last_only, or None in training with targets. The loss is the mean cross-entropy in nats,
        None without targets; in training, with mtp_layers = 1, MTP's is added. A target of −1 is
        ignored, and its token does not count for balance. cache: from new_cache; the tokens then
        follow those of earlier calls. images: (patches, grids) as vision.py takes them; idx holds
        one media_pad per feature, in order, row by row, and their targets are −1. Image tokens do
        count for balance, as they are routed. counted: the tokens that count, (B, T) bool, where
        no targets say so.
        """
        if idx.dim() != 2 or idx.shape[1] < 1 or idx.dtype not in (torch.int64, torch.int32):
            raise ValueError("idx: expected token ids (B, T ≥ 1), int64 or int32, got "
                             f"{tuple(idx.shape)} {idx.dtype}")
        if targets is not None and (targets.shape != idx.shape or targets.dtype != torch.int64):
            raise ValueError(f"targets: expected int64 of idx's shape {tuple(idx.shape)}, got "
                             f"{tuple(targets.shape)} {targets.dtype}")
        embedded = self.embed_with_images(idx, images) if self.vision else self.embed(idx)
        if images is not None and self.vision is None:
            raise ValueError("images: this model has no vision tower (vit_layers = 0)")
        embedded = embedded.to(low_precision(embedded))  # in autocast the stream is bf16
        stream = Stream(embedded)  # (B, T, d)
        if targets is not None:
            counted = targets != -1
            if self.vision:
                counted = counted | (idx == self.config.media_pad)
        learns = self.training and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers):
            if self.checkpoint_layers and learns:
                stream.checkpoint(layer, counted)
            else:
                layer(stream, cache[i] if cache else None, counted)
        h = stream.read(self.out_mix)  # (B, T, d)
        taps = self.mtp.taps(stream, h) if self.mtp else None
        if cache and len(cache) > len(self.layers):
            cache[-1].update(taps=taps, embedded=embedded)
        x = self.norm(h)
        if targets is not None and learns:
            logits, loss = None, cross_entropy(x, self.lm_head.weight, targets)
        else:
            logits, loss = self.lm_head(x[:, -1:] if last_only else x), None
            if targets is None:
                return logits, None
            nats = F.cross_entropy(fp32(logits).flatten(0, 1), targets.flatten(), ignore_index=-1,
                                   reduction="sum")
            loss = nats / (targets != -1).sum().clamp(min=1)  # a rank's segment may be all image
        if self.mtp and not cache:
            ahead = self.mtp.loss(taps, embedded, targets, self.lm_head)
            self.mtp_loss = ahead.detach()
            loss = loss + self.config.mtp_weight * ahead if self.training else loss
        return logits, loss

    @torch.compiler.disable  # how many features there are is known only here
    def embed_with_images(self, idx, images):
        """
        idx (B, T) → (B, T, d): embeddings, and where pads stand the features of the images. Nothing
        is written in place: gradients reach the embedding and the tower.
        """
        x, pads = self.embed(idx), idx == self.config.media_pad
        if images is None and not pads.any():
            return x
        at = slice(None)
        if self.context_group and images is not None:
            images, at = images_here(images, pads, self.context_group)
        features = x[:0, 0] if images is None else self.vision(*images)[at]  # (N, d)
        if pads.sum() != len(features):
            raise ValueError(wrong_count(pads.sum(), len(features)))
        return x.masked_scatter(pads.unsqueeze(-1), features.to(x.dtype))

    @torch.no_grad()
    def init_weights(self, of=""):
        """
        of: the start of the names of those to initialise, all by default.

        embedding                  normal, std 0.1: mixtures read it raw, so it starts small
        lm_head                    zero: the first loss is exactly ln(vocab)
        the last matrix of a part  zero, so that every part starts by adding nothing: o_proj of
                                   attention, down_proj of dense and shared MLP, W↑ of MoE or, where
                                   there is no latent, w2 of the experts (never both: neither would
                                   get a gradient); W_o and W_fc1 of the vision tower
        all other matrices         normal, std 1/√(input width)
        convolutions               uniform ±1/√width
        norm weights               1; vision.post_norm 0.1, so that features start as small as the
                                   embeddings beside which mixtures read them
        pseudo-queries w           0: a plain mean over depth
        A_log                      0
        dt_bias                    softplus⁻¹ of log-uniform [0.001, 0.1]
        router bias                0
        """
        zero = [self.lm_head.weight]
        for layer in self.all_layers():
            mlp = layer.mlp
            zero.append(layer.attn.o_proj.weight)
            if layer.is_moe:
                zero.append(mlp.up_proj.weight if mlp.latent else mlp.w2)
                mlp = mlp.shared
            zero.append(mlp.down_proj.weight)
        for block in self.vision.blocks if self.vision else ():
            zero += [block.wo.weight, block.fc1.weight]
        zero = {id(p) for p in zero}
        for name, p in self.named_parameters():
            if not name.startswith(of):
                continue
            if id(p) in zero or name.endswith((".w", "A_log")):
                p.zero_()
            elif name == "embed.weight":
                p.normal_(std=0.1)
            elif name.endswith("dt_bias"):
                dt = torch.empty_like(p).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹(dt)
            elif name.endswith("conv1d.weight"):
                p.uniform_(-p.shape[-1] ** -0.5, p.shape[-1] ** -0.5)
            elif p.dim() >= 2:
                p.normal_(std=p.shape[-1] ** -0.5)
            else:
                p.fill_(0.1 if name == "vision.post_norm.weight" else 1)

    # ---- generation

    def new_cache(self, batch_size, draft=False):
        """
        A dict per layer. KDA: constant size. MLA: kv_lora_rank + rope numbers per token. draft:
        with one for the MTP layer, to which every call then adds what a draft reads.
        """
        layers = self.all_layers() if draft else self.layers
        return [layer.attn.new_cache(batch_size) for layer in layers]

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stream=False,
                 vocab_size=None, images=None, draft=None):
        """
        idx (B, T ≥ 1) → (B, T + max_new_tokens); with stream=True an iterator over the new tokens,
        each (B, 1). temperature 0 takes the likeliest token. top_k: only the k likeliest; top_p:
        only the likeliest that together reach p. vocab_size: ids from there on only pad the
        vocabulary and are never sampled. images: of idx, as in forward; no pad is sampled. draft:
        how many tokens the MTP layer proposes at once (mtp.py), with the same text at temperature 0
        and the same distribution otherwise. Draws from torch's global generator.
        """
        if idx.dim() != 2 or idx.shape[1] < 1:
            raise ValueError("idx: expected (B, T) with at least one token to start from, got "
                             f"{tuple(idx.shape)}")
        check_drawing(temperature, top_k, top_p)
        if draft is None:
            tokens = self._generate(idx, max_new_tokens, temperature, top_k, top_p, vocab_size,
                                    images)
        elif self.mtp is None or type(draft) is not int or draft < 1:
            raise ValueError("draft: expected None, or with an MTP layer at least 1 token; got "
                             f"{draft!r} and mtp_layers = {self.config.mtp_layers}")
        else:
            to_draw_from = lambda logits: probabilities(self.choices(logits, vocab_size),
                                                        temperature, top_k, top_p)
            tokens = speculate(self, idx, max_new_tokens, draft, to_draw_from, images=images)
        return tokens if stream else torch.cat([idx, *tokens], dim=1)

    @torch.no_grad()
    def _generate(self, idx, max_new_tokens, temperature, top_k, top_p, vocab_size, images):
        cache = self.new_cache(idx.shape[0])
        for _ in range(max_new_tokens):
            with evaluating(self):
                logits, _ = self(idx, cache=cache, last_only=True, images=images)
            logits, images = self.choices(logits[:, -1], vocab_size), None  # (B, vocab)
            idx = sample_token(logits, temperature, top_k, top_p)  # (B, 1)
            yield idx

    def generate_rows(self, prompts, max_new_tokens, seed, ends=(), temperature=1.0, top_k=None,
                      top_p=None, vocab_size=None, images=None):
        """
        Many texts in one batch. prompts: lists of ids, of any lengths. → an iterator over the
        steps: {row: its new token}, without the rows that have ended by one of the ids in ends. Row
        i draws from a generator of its own, seeded with seed + i, so neither the other rows nor
        their ends change what it says. images: of the prompt, if all rows have the same one.
        """
        check_drawing(temperature, top_k, top_p)
        device = self.embed.weight.device
        seeds = [(seed + i) % 2 ** 64 for i in range(len(prompts))]
        generators = [torch.Generator(device).manual_seed(number) for number in seeds]
        draw = lambda logits, going: sample_token(self.choices(logits[:, -1], vocab_size),
                                                  temperature, top_k, top_p,
                                                  [generators[i] for i in going])
        return self._generate_rows(prompts, max_new_tokens, draw, ends, images)

    @torch.no_grad()
    def _generate_rows(self, prompts, max_new_tokens, draw, ends, images):
        with evaluating(self):
            logits, cache = self.read(prompts, images)
        going = [*range(len(prompts))]
        for left in reversed(range(max_new_tokens)):
            idx = draw(logits, going)  # (rows, 1)
            new = dict(zip(going, idx.flatten().tolist()))
            yield new
            stay = [i for i, token in enumerate(new.values()) if token not in ends]
            if not stay or not left:
                return
            if len(stay) < len(going):
                idx, cache, going = idx[stay], rows_of(cache, stay), [going[i] for i in stay]
            with evaluating(self):
                logits, _ = self(idx, cache=cache, last_only=True)

    def read(self, prompts, images=None):
        """
        Lists of ids, of any lengths → logits for what comes next (rows, 1, vocab), and a cache. A
        state of KDA takes no padding: those of one length are read together, equal ones once.
        """
        different, by_length = [*dict.fromkeys(map(tuple, prompts))], {}
        for ids in different:
            by_length.setdefault(len(ids), []).append(ids)
        logits, caches = [], []
        for alike in by_length.values():
            idx = torch.tensor(alike, device=self.embed.weight.device)  # (B, T)
            cache = self.new_cache(len(alike))
            logits.append(self(idx, cache=cache, last_only=True, images=images)[0])
            caches.append(cache)
        order = {ids: i for i, ids in enumerate(sum(by_length.values(), []))}
        rows = [order[tuple(ids)] for ids in prompts]
        cache = caches[0] if len(caches) == 1 else [*map(join, zip(*caches))]
        return torch.cat(logits)[rows], rows_of(cache, rows)

    def choices(self, logits, vocab_size):
        """logits (n, vocab) → fp32, without the ids that only pad; −inf for an image's pad."""
        logits = fp32(logits[:, :vocab_size])
        if self.vision:
            logits[:, self.config.media_pad:][:, :1] = -torch.inf
        return logits

    # ---- training

    def moes(self):
        """{layer, from 0: its LatentMoE}, that of MTP after all layers."""
        return {i: layer.mlp for i, layer in enumerate(self.all_layers()) if layer.is_moe}

    def all_layers(self):
        return [*self.layers, self.mtp] if self.mtp else [*self.layers]

    def share_experts(self, group, balance_ranks=False):
        """Keep only this rank's experts; the process group computes all of them together."""
        for moe in self.moes().values():
            moe.share_experts(group, balance_ranks)

    def shared_out(self):
        """{name: parameter} of the expert weights, where each rank holds only its own experts'."""
        names = [*(f"layers.{i}" for i in range(self.config.n_layer)), "mtp"]
        return {f"{names[i]}.mlp.{name}": getattr(moe, name)
                for i, moe in self.moes().items() if moe.group for name in ("w13", "w2")}

    def share_context(self, group):
        """A batch is this rank's segment of each sequence; rank 0 of the group holds the first."""
        self.context_group = group
        for layer in self.all_layers():
            layer.attn.context_group = group

    @torch.no_grad()
    def update_router_bias(self):
        """
        Quantile Balancing, once per optimizer step → a dict per MoE layer: layer, from 0; load (E):
        tokens per expert; max_violation: max load / mean load − 1; dead: experts without a token.
        """
        moes, figures = self.moes(), []
        if moes:
            loads = update_router_biases([*moes.values()]).cpu()  # the one transfer from a GPU
            for i, load in zip(moes, loads):
                violation, dead = load_figures(load)
                figures.append(dict(layer=i, load=load, max_violation=violation, dead=dead))
        return figures

    def configure_optimizers(self, lr, weight_decay=0.1, ranks=None, replicas=None,
                             optimizer="muon"):
        """
        Per-Head Muon for the matrices, AdamW for the rest, QK-Clip at the end of every step.
        optimizer, for study: "whole" (Muon without cuts into heads) or "adamw" (for the matrices,
        too). With several processes, ranks is the process group that shares the work of a step; if
        experts are shared out, replicas is the group of those that hold the same experts.
        """
        c = self.config
        if optimizer not in ("muon", "whole", "adamw"):
            raise ValueError(f"optimizer = {optimizer!r}: expected muon, whole or adamw")
        if self.moes() and c.latent_norm and c.num_experts_per_token == 1 < c.num_experts:
            raise ValueError("num_experts_per_token = 1 with latent_norm = True: the norm cancels "
                             "the one routing weight, so the router would never learn. Train with "
                             "2 experts per token or more, or with latent_norm = False")
        per_head, whole, decayed, plain, queries, of_tower = self.parameter_lists()
        if optimizer == "adamw":
            matrices, decayed = [], per_head + of_tower + whole + decayed
        else:
            heads, blocks = (c.n_head, 3 * c.vit_heads) if optimizer == "muon" else (1, 1)
            matrices = [dict(params=per_head, blocks=heads), dict(params=whole)]
            matrices += [dict(params=of_tower, blocks=blocks)] if of_tower else []
        # AdamW moves all d entries of a pseudo-query at once, and a logit is their sum, with no
        # 1/√d: hence a tenth of the rate
        others = [dict(params=decayed), dict(params=plain, weight_decay=0.0),
                  dict(params=queries, weight_decay=0.0, lr=lr / 10, lr_scale=0.1)]
        # what all ranks of a group hold alike, and can share the work of
        experts = list(self.shared_out().values())
        dense = [p for p in self.parameters() if p not in set(experts)]
        copies = [pair for pair in ((ranks, dense), (replicas, experts)) if all(pair)]
        return muon.MuonAdamW(matrices, others, lr, weight_decay, self.qk_clip, copies)

    def parameter_lists(self):
        """
        Each parameter in exactly one of six lists: matrices cut by head, whole matrices (stacks of
        matrices included), AdamW with decay, AdamW without, pseudo-queries, and the vision tower's
        W_qkv, cut by head in each of its three parts.
        """
        per_head, whole, queries, of_tower = [], [], [], []
        decayed, plain = [self.embed, self.lm_head], [self.norm]
        mixes = [mix for layer in self.layers for mix in (layer.attn_mix, layer.mlp_mix)]
        for mix in filter(None, [self.out_mix, *mixes]):
            plain += [mix.norm]
            queries += [mix.w]
        if self.mtp:
            plain += [self.mtp.enorm, self.mtp.hnorm, self.mtp.norm]
            whole += list(filter(None, [self.mtp.eh_proj, self.mtp.w_e3]))
        for layer in self.all_layers():
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
            if layer.is_moe:
                whole += [m.router, m.w13, m.w2]
                whole += [m.down_proj, m.up_proj] if m.latent else []
                plain += [m.norm] if m.norm else []
                m = m.shared
            whole += [m.gate_proj, m.up_proj, m.down_proj]
        if self.vision:
            v = self.vision
            decayed += [v.patch_map, v.table]
            whole += [v.proj0, v.proj2]
            plain += [v.norm, v.post_norm]
            for block in v.blocks:
                of_tower += [block.wqkv]
                whole += [block.wo, block.fc0, block.fc1]
                plain += [block.norm0, block.norm1]
        lists = [[getattr(x, "weight", x) for x in entries]
                 for entries in (per_head, whole, decayed, plain, queries, of_tower)]
        listed = sorted(id(p) for params in lists for p in params)
        assert listed == sorted(map(id, self.parameters())), "list every parameter just once"
        return lists

    def qk_clip(self):
        """Scale down the MLA heads whose logits passed 100 in this step, and count anew."""
        mlas = [layer.attn for layer in self.all_layers() if isinstance(layer.attn, GatedMLA)]
        exact = [a for a in mlas if a.exact is not False]
        if exact:
            logits = torch.stack([a.max_logit for a in exact])
            q_b, kv_b = zip(*((a.q_b_proj.weight, a.kv_b_proj.weight) for a in exact))
            muon.qk_clip(q_b, kv_b, logits, exact[0].nope, exact[0].rope)
        late = [a for a in mlas if a.exact is not None]
        if late:  # on a GPU: who has to look closely in the next step
            largest = torch.stack([a.max_logit for a in late]).amax(1).cpu().tolist()
            for a, logit in zip(late, largest):
                a.exact = logit > 100
        for a in mlas:
            a.max_logit.fill_(-torch.inf)

    # ---- released weights

    @classmethod
    def from_pretrained(cls, folder, dtype=None, device="cpu", **training):
        """
        A folder as K3 is released (config.json, *.safetensors) → K3 in eval mode. dtype: float32 or
        bfloat16, None for the file's own. training: fields of K3Config that a released config does
        not have (qat, router_bias_ema, mtp_weight), and mtp_layers = 1 for a layer that starts
        fresh if there is none in the folder. weights.py says what is read and what is refused.
        """
        config = K3Config.from_released(folder)
        stored_dtype, found = weights.read_folder(folder, config)
        fresh_mtp = training.pop("mtp_layers", 0) and not config.mtp_layers
        with torch.device("meta"):
            model = cls(replace(config, **training))
        weights.fill(model, folder, found, dtype or stored_dtype, device)
        if fresh_mtp:
            model.config = replace(model.config, mtp_layers=1)
            model.mtp = MTP(model.config).to(model.embed.weight)
            model.init_weights(of="mtp.")
        return model.eval()

    def save_pretrained(self, folder, dtype=None, experts=None, tokenizer=None):
        """
        The way back. dtype: None for the model's own. experts: "mxfp4" or "plain", None for mxfp4
        if the model was trained for it. tokenizer: None for self.tokenizer.
        """
        weights.save(self, folder, dtype, experts, tokenizer)

    # ---- counting

    def num_params(self):
        """All parameters and router biases, the experts of other ranks included."""
        moes = self.moes().values()
        elsewhere = sum((m.E - len(w)) * w[0].numel() for m in moes for w in (m.w13, m.w2))
        here = [*self.parameters(), *(m.router_bias for m in moes)]
        return sum(p.numel() for p in here) + elsewhere

    def num_active_params(self):
        """
        Those that one token of text meets: of the experts only the chosen ones. The input
        embedding, a lookup, is not counted, nor are the vision tower and MTP.
        """
        idle = sum((m.E - m.k) * (m.w13[0].numel() + m.w2[0].numel()) for m in self.moes().values())
        tower = sum(p.numel() for p in self.vision.parameters()) if self.vision else 0
        of_mtp = self.mtp.num_active_params() if self.mtp else 0
        return self.num_params() - self.embed.weight.numel() - idle - tower - of_mtp

    def flops_per_token(self, T):
        """
        Matrix products only, for a token of a sequence of T. A weight costs 6: multiply and add,
        forward and in both products of backward. MLA: 2 products with T/2 earlier tokens on
        average; KDA: 3 products of K×V (read what the state held, add to it, read it). With MTP,
        its layer and the head once more.
        """
        c, flops = self.config, 6 * self.num_active_params()
        if self.mtp:
            flops += 6 * (self.mtp.num_active_params() + self.lm_head.weight.numel())
        for layer in self.all_layers():
            if isinstance(layer.attn, GatedMLA):
                width = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
                flops += 6 * c.n_head * width * T // 2
            else:
                flops += 6 * c.n_head * 3 * c.kda_key_dim * c.kda_value_dim
        return flops


def rows_of(cache, rows):
    """A cache whose row i is row rows[i] of this one."""
    def chosen(value):
        if isinstance(value, torch.Tensor):
            return value[rows]
        return value if isinstance(value, int) else [chosen(part) for part in value]
    return [{name: chosen(value) for name, value in layer.items()} for layer in cache]


def join(caches):
    """Caches of one layer → one with all of their rows."""
    if "latents" in caches[0]:
        return mla.join(caches)
    tails = [torch.cat(parts) for parts in zip(*(cache["tails"] for cache in caches))]
    return dict(state=torch.cat([cache["state"] for cache in caches]), tails=tails)


def check_drawing(temperature, top_k, top_p):
    """Errors: ValueError for what no token can be drawn with."""
    good_k, good_p = top_k is None or top_k >= 1, top_p is None or 0 < top_p <= 1
    if not (temperature >= 0 and good_k and good_p):
        raise ValueError("expected temperature ≥ 0, top_k ≥ 1, 0 < top_p ≤ 1; got "
                         f"{temperature}, {top_k}, {top_p}")


def sample_token(logits, temperature, top_k, top_p, generators=None):
    """logits (B, vocab) fp32 → (B, 1). generators: one for each row, None for torch's own."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    p = probabilities(logits, temperature, top_k, top_p)
    if generators is None:
        return torch.multinomial(p, 1)
    rows = zip(p.split(1), generators)
    return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])


def probabilities(logits, temperature, top_k, top_p):
    """
    logits (B, vocab) fp32 → the distribution to draw from, (B, vocab). Also among equal logits,
    top_k keeps exactly k, and top_p no more than it takes to reach p.
    """
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # ≤ 0: no temperature overflows
    if top_k is not None or top_p is not None:
        vocab = logits.shape[-1]
        values, order = logits.topk(min(top_k or vocab, vocab))  # (B, k), the likeliest first
        if top_p is not None and top_p < 1:
            p = values.softmax(-1)
            likelier = p.cumsum(-1) - p  # the probability of all that come before
            values[likelier >= top_p] = -torch.inf
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, values)
    return logits.softmax(-1)


def main(arguments):
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ValueError("expected: python model.py FOLDER, a folder as K3 is released")
    with torch.device("meta"):
        model = K3(K3Config.from_released(arguments[0])).bfloat16()
    weights.describe(model, arguments[0])


if __name__ == "__main__":
    run(main, __doc__)
