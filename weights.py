"""
Released weights in and out, for K3.from_pretrained and K3.save_pretrained (model.py): `read_config`, `read_folder` and `fill`; `save`. A folder in K3's layout holds

    config.json                     sizes, in a nested text_config (or bare)
    *.safetensors                   the tensors: one file, or many and model.safetensors.index.json
    generation_config.json, tiktoken.model, tokenizer_config.json

and so does one that we write, with tokenizer.json beside them, for llama.cpp's converter, MLX-LM, transformers, vLLM and SGLang:

    python weights.py out/shakespeare exported                    a run of train.py (or one checkpoint) → such a folder
    python weights.py out/shakespeare exported --dtype=bfloat16 --experts=mxfp4

What a tensor is called there and here is in TENSORS, what a size is called is in SIZES, and that is all: each tensor of the files is used
once and each parameter is filled once, or an error names it. Files are not trusted: nothing is unpickled, and names, shapes, types and
offsets are checked in the headers before any memory is spent on weights. Then tensors stream in, a few MB at a time.
"""
import functools
import json
import math
import os
import shutil
import sys
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from data import tokenizer
from moe import LatentMoE, mxfp4_parts

# ----------------------------------------------------------------------------------------------------------------------
# The tables
#
# Released names follow `language_model.` (which may be missing) and, from "layer" on, `model.layers.N.`; ours follow `layers.N.` there.
# Shapes are in d, H, K, V (n_embd, n_head, the KDA state's), R (kv_lora_rank), l (the latent of the routed experts), m (their width).
# A dtype of W is the model's own, bf16 or fp32; F32 stays fp32 in every file. Cuts:
#
#     whole       the same on both sides
#     row         one row there, (1, d), a vector here
#     tail        there it may be longer than here, with zeros at the end (K3: 128 for 96 heads). Written without them: engines cut them
#                 off, and the modeling code for transformers has no place for them
#     E           one tensor an expert there, here stacked: E is the place in the first axis. These may also be MXFP4, and then
#                 `.weight` is `.weight_packed` uint8 (out, in/2), low nibble first, and `.weight_scale` uint8 (out, in/32)

W, F32 = "W", "F32"
TENSORS = {
    "model": [
        # released                                                ours                           shape            dtype  cut
        ("model.embed_tokens.weight",                             "embed.weight",                "vocab d",       W,     "whole"),
        ("model.norm.weight",                                     "norm.weight",                 "d",             W,     "whole"),
        ("model.output_attn_res_norm.weight",                     "out_mix.norm.weight",         "d",             W,     "whole"),
        ("model.output_attn_res_proj.weight",                     "out_mix.w",                   "1 d",           W,     "row"),
        ("lm_head.weight",                                        "lm_head.weight",              "vocab d",       W,     "whole")],
    "layer": [
        ("input_layernorm.weight",                                "attn_norm.weight",            "d",             W,     "whole"),
        ("post_attention_layernorm.weight",                       "mlp_norm.weight",             "d",             W,     "whole"),
        ("self_attention_res_norm.weight",                        "attn_mix.norm.weight",        "d",             W,     "whole"),
        ("self_attention_res_proj.weight",                        "attn_mix.w",                  "1 d",           W,     "row"),
        ("mlp_res_norm.weight",                                   "mlp_mix.norm.weight",         "d",             W,     "whole"),
        ("mlp_res_proj.weight",                                   "mlp_mix.w",                   "1 d",           W,     "row")],
    "KDA": [
        ("self_attn.q_proj.weight",                               "attn.q_proj.weight",          "H*K d",         W,     "whole"),
        ("self_attn.k_proj.weight",                               "attn.k_proj.weight",          "H*K d",         W,     "whole"),
        ("self_attn.v_proj.weight",                               "attn.v_proj.weight",          "H*V d",         W,     "whole"),
        ("self_attn.q_conv1d.weight",                             "attn.q_conv1d.weight",        "H*K 1 conv",    F32,   "whole"),
        ("self_attn.k_conv1d.weight",                             "attn.k_conv1d.weight",        "H*K 1 conv",    F32,   "whole"),
        ("self_attn.v_conv1d.weight",                             "attn.v_conv1d.weight",        "H*V 1 conv",    F32,   "whole"),
        ("self_attn.f_a_proj.weight",                             "attn.f_a_proj.weight",        "K d",           W,     "whole"),
        ("self_attn.f_b_proj.weight",                             "attn.f_b_proj.weight",        "H*K K",         W,     "whole"),
        ("self_attn.b_proj.weight",                               "attn.b_proj.weight",          "H d",           W,     "whole"),
        ("self_attn.A_log",                                       "attn.A_log",                  "H",             F32,   "tail"),
        ("self_attn.dt_bias",                                     "attn.dt_bias",                "H*K",           F32,   "whole"),
        ("self_attn.g_proj.weight",                               "attn.g_proj.weight",          "H*V d",         W,     "whole"),
        ("self_attn.o_norm.weight",                               "attn.o_norm.weight",          "V",             F32,   "whole"),
        ("self_attn.o_proj.weight",                               "attn.o_proj.weight",          "d H*V",         W,     "whole")],
    "MLA": [
        ("self_attn.q_a_proj.weight",                             "attn.q_a_proj.weight",        "q_lora d",      W,     "whole"),
        ("self_attn.q_a_layernorm.weight",                        "attn.q_a_layernorm.weight",   "q_lora",        W,     "whole"),
        ("self_attn.q_b_proj.weight",                             "attn.q_b_proj.weight",        "H*key q_lora",  W,     "whole"),
        ("self_attn.kv_a_proj_with_mqa.weight",                   "attn.kv_a_proj_with_mqa.weight", "R+rope d",   W,     "whole"),
        ("self_attn.kv_a_layernorm.weight",                       "attn.kv_a_layernorm.weight",  "R",             W,     "whole"),
        ("self_attn.kv_b_proj.weight",                            "attn.kv_b_proj.weight",       "H*nope+v R",    W,     "whole"),
        ("self_attn.g_proj.weight",                               "attn.g_proj.weight",          "H*v d",         W,     "whole"),
        ("self_attn.o_proj.weight",                               "attn.o_proj.weight",          "d H*v",         W,     "whole")],
    "dense": [
        ("mlp.gate_proj.weight",                                  "mlp.gate_proj.weight",        "dense d",       W,     "whole"),
        ("mlp.up_proj.weight",                                    "mlp.up_proj.weight",          "dense d",       W,     "whole"),
        ("mlp.down_proj.weight",                                  "mlp.down_proj.weight",        "d dense",       W,     "whole")],
    "MoE": [
        ("block_sparse_moe.gate.weight",                          "mlp.router.weight",           "experts d",     W,     "whole"),
        ("block_sparse_moe.gate.e_score_correction_bias",         "mlp.router_bias",             "experts",       F32,   "whole"),
        ("block_sparse_moe.routed_expert_down_proj.weight",       "mlp.down_proj.weight",        "l d",           W,     "whole"),
        ("block_sparse_moe.routed_expert_norm.weight",            "mlp.norm.weight",             "l",             W,     "whole"),
        ("block_sparse_moe.routed_expert_up_proj.weight",         "mlp.up_proj.weight",          "d l",           W,     "whole"),
        ("block_sparse_moe.shared_experts.gate_proj.weight",      "mlp.shared.gate_proj.weight", "shared d",      W,     "whole"),
        ("block_sparse_moe.shared_experts.up_proj.weight",        "mlp.shared.up_proj.weight",   "shared d",      W,     "whole"),
        ("block_sparse_moe.shared_experts.down_proj.weight",      "mlp.shared.down_proj.weight", "d shared",      W,     "whole"),
        ("block_sparse_moe.experts.E.w1.weight",                  "mlp.w13",                     "m l",           W,     "E gate"),
        ("block_sparse_moe.experts.E.w3.weight",                  "mlp.w13",                     "m l",           W,     "E up"),
        ("block_sparse_moe.experts.E.w2.weight",                  "mlp.w2",                      "l m",           W,     "E")],
}

# config.json's text_config ↔ K3Config. A missing β₁ or scaling factor means 1, a missing β₂ no limit; any other of these must be there.
SIZES = {
    "vocab_size": "vocab_size", "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim", "first_k_dense_replace": "first_k_dense_replace",
    "intermediate_size": "intermediate_size", "num_experts": "num_experts", "num_experts_per_token": "num_experts_per_token",
    "num_shared_experts": "num_shared_experts", "moe_intermediate_size": "moe_intermediate_size",
    "routed_expert_hidden_size": "routed_expert_hidden_size", "routed_scaling_factor": "routed_scaling_factor",
    "activation_situ_beta": "situ_beta", "activation_situ_linear_beta": "situ_linear_beta", "attn_res_block_size": "attn_res_block_size",
    "rms_norm_eps": "rms_norm_eps",
}
KDA_SIZES = {"head_dim": "kda_key_dim", "short_conv_kernel_size": "conv_size", "gate_lower_bound": "g_min"}       # in linear_attn_config
FLOATS = {"routed_scaling_factor", "activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps", "gate_lower_bound"}
# Fields of which one value is what this code computes. The first two must be there, as leaving them out means something else; of the others
# the tensors would tell, or leaving them out means the same.
MUST = {"hidden_act": "situ", "mla_use_nope": True}
ONLY = {"mla_use_output_gate": True, "latent_moe_use_norm": True, "linear_attn_config.use_full_rank_gate": True, "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "rope_scaling": None}
# Fields that are read elsewhere or change nothing: who wrote it, how to sample, and rope_theta, which without rotation turns nothing.
INERT = set("""_name_or_path architectures auto_map model_type transformers_version dtype torch_dtype bos_token_id eos_token_id pad_token_id
    initializer_range max_position_embeddings model_max_length use_cache return_dict id2label label2id rope_theta rope_parameters head_dim
    use_grouped_topk linear_attn_config linear_attn_config.full_attn_layers linear_attn_config.kda_layers quantization_config
    is_decoder ep_size pretraining_tp aux_loss_alpha seq_aux
    temperature top_k top_p typical_p num_beams num_beam_groups num_return_sequences max_length length_penalty repetition_penalty""".split())


def table(config):
    """For every tensor of the model: released name, our name, shape as released, dtype (W or F32), cut."""
    c = config
    size = {"1": 1, "vocab": c.vocab_size, "d": c.n_embd, "H": c.n_head, "K": c.kda_key_dim, "V": c.kda_value_dim, "conv": c.conv_size,
            "q_lora": c.q_lora_rank, "key": c.qk_nope_head_dim + c.qk_rope_head_dim, "R": c.kv_lora_rank, "v": c.v_head_dim,
            "R+rope": c.kv_lora_rank + c.qk_rope_head_dim, "nope+v": c.qk_nope_head_dim + c.v_head_dim, "dense": c.intermediate_size,
            "experts": c.num_experts, "l": c.routed_expert_hidden_size, "m": c.moe_intermediate_size,
            "shared": c.num_shared_experts * c.moe_intermediate_size}
    shape_of = lambda text: tuple(math.prod(size[factor] for factor in side.split("*")) for side in text.split())
    for name, ours, shape, dtype, cut in TENSORS["model"]:
        yield name, ours, shape_of(shape), dtype, cut
    for i in range(c.n_layer):
        for part in ("layer", "MLA" if c.is_mla(i) else "KDA", "dense" if i < c.first_k_dense_replace else "MoE"):
            for name, ours, shape, dtype, cut in TENSORS[part]:
                for e in range(c.num_experts if cut[0] == "E" else 1):
                    yield (f"model.layers.{i}." + name.replace(".E.", f".{e}."), f"layers.{i}.{ours}", shape_of(shape), dtype,
                           cut.replace("E", str(e)))


def cut_out(tensor, cut):
    """The view of our parameter that is one released tensor."""
    if cut == "row":
        return tensor[None]
    if cut[0].isdigit():
        expert, *half = cut.split()
        return tensor[int(expert)][["gate", "up"].index(half[0])] if half else tensor[int(expert)]
    return tensor


# ----------------------------------------------------------------------------------------------------------------------
# MXFP4 in bytes (the rounding is in moe.py)

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PAIRS = torch.stack([GRID.repeat(16), GRID.repeat_interleave(16)], dim=1)  # (256, 2): what a byte holds, low nibble first
CODES = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)                  # of 2|x|


@functools.cache
def mxfp4_words(dtype):
    """Every byte with every scale, its two numbers as one word: (65536), at 256 · scale + byte. Exact in fp32 and in bf16."""
    numbers = PAIRS * torch.exp2(torch.arange(256.0) - 127).view(256, 1, 1)                          # (256, 256, 2)
    return numbers.to(dtype).view({torch.float32: torch.int64, torch.bfloat16: torch.int32}[dtype]).flatten()


def mxfp4_decode(packed, scale, dtype=torch.float32, out=None):
    """packed uint8 (out, in/2), scale uint8 (out, in/32) → (out, in), fp32 or bf16, exact: each number · 2^(scale − 127). Into out, if given:
    a contiguous tensor of that shape and dtype."""
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8 or packed.shape != (*scale.shape[:-1], 16 * scale.shape[-1]):
        raise ValueError(f"MXFP4: expected uint8 (…, in/2) and (…, in/32), got {packed.dtype} {tuple(packed.shape)} and {scale.dtype} "
                         f"{tuple(scale.shape)}")
    if (scale == 255).any():
        raise ValueError("MXFP4: a scale is 255, which stands for no number; the file is spoiled")
    words = mxfp4_words(dtype)
    out = packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype) if out is None else out
    at = packed.int().unflatten(-1, (-1, 16)).add_(scale.int().unsqueeze(-1) << 8)                   # (out, in/32, 16)
    torch.index_select(words, 0, at.flatten(), out=out.view(-1).view(words.dtype))                   # no copy: half of the time is memory
    return out


def mxfp4_encode(w):
    """w (out, in), in a multiple of 32 → packed, scale: the nearest that mxfp4_decode can give (moe.py says how near)."""
    if w.shape[-1] % 32:
        raise ValueError(f"MXFP4: expected rows of a multiple of 32, got {tuple(w.shape)}")
    x, e = mxfp4_parts(w)                                                  # (out, in/32, 32), (out, in/32, 1)
    if not (x.abs() <= 6).all():
        raise ValueError("MXFP4: expected finite weights of at most 6 · 2^125; the model is spoiled")
    code = (CODES[(2 * x.abs()).long()] | x.signbit().to(torch.uint8) << 3).flatten(-2)
    return code[..., 0::2] | code[..., 1::2] << 4, (e.squeeze(-1) + 127).to(torch.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# Headers and config, untrusted

Stored = namedtuple("Stored", "path name dtype shape start size")          # a tensor in a file: where its bytes begin, and how many
ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16}
VISION = ("vision_tower.", "mm_projector.")


def safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("released weights need the safetensors library: pip install safetensors") from None
    return safetensors


def open_file(path):
    """The library's view of a file, of which read_header has already looked at every byte that it trusts."""
    try:
        return safetensors().safe_open(path, "pt")
    except safetensors().SafetensorError as error:
        raise ValueError(f"{path}: {error}; the file is cut short or spoiled, fetch it again") from None


def parse_json(data, where):
    def no_doubles(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a name stands twice")
        return result

    def no_constants(word):
        raise ValueError(f"{word} is no number")
    try:
        result = json.loads(data.decode("utf-8"), object_pairs_hook=no_doubles, parse_constant=no_constants)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({str(error)[:100]}); the file is cut short or spoiled, fetch it again") from None
    if not isinstance(result, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(result).__name__}; the file is spoiled, fetch it again")
    return result


def read_json(path, most=16 << 20):
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}; expected a folder as K3 is released: config.json and *.safetensors")
    if path.stat().st_size > most:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, expected at most {most}; it is not what its name says")
    return parse_json(path.read_bytes(), path)


def is_name(text):
    """Names come back in messages of one line."""
    return 0 < len(text) <= 300 and text.isprintable()


def read_header(path):
    """A safetensors file → {name: Stored}, checked so that every byte of the file belongs to exactly one tensor. Reads no data."""
    def rule(holds, what):
        if not holds:
            raise ValueError(f"{path}: {what}; the file is cut short or spoiled, fetch it again")
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        rule(8 <= size and 2 <= length <= min(size - 8, 100 << 20), f"its header should have {length} bytes, but the file has {size}")
        header = parse_json(file.read(length), f"{path}: its header")
    header.pop("__metadata__", None)
    whole = lambda x: type(x) is int and 0 <= x < 1 << 63
    tensors = {}
    for name, entry in header.items():
        rule(is_name(name), f"a tensor is called {name[:80]!r}")
        rule(isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}, f"tensor {name}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        rule(isinstance(dtype, str) and dtype in ITEM, f"tensor {name}: unknown dtype {str(dtype)[:40]!r}")
        rule(isinstance(shape, list) and len(shape) <= 8 and all(map(whole, shape)), f"tensor {name}: shape {str(shape)[:80]}")
        rule(isinstance(offsets, list) and len(offsets) == 2 and all(map(whole, offsets)), f"tensor {name}: data_offsets {str(offsets)[:80]}")
        taken = math.prod(shape) * ITEM[dtype]
        rule(offsets[1] - offsets[0] == taken, f"tensor {name}: {dtype} {shape} takes {taken} bytes, data_offsets are {offsets}")
        tensors[name] = Stored(path, name, dtype, tuple(shape), 8 + length + offsets[0], taken)
    end = 8 + length
    for t in sorted(tensors.values(), key=lambda t: (t.start, t.size)):
        rule(t.start == end, f"tensor {t.name} begins at byte {t.start}, expected {end}: tensors overlap or leave a gap")
        end += t.size
    rule(end == size, f"its tensors end at byte {end}, but the file has {size}")
    return tensors


def read_headers(folder):
    """All safetensors files of a folder → {name: Stored}. An index, if there is one, must agree with the files."""
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    index, where = folder / "model.safetensors.index.json", {}
    if index.is_file():
        where = read_json(index, 256 << 20).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(file, str) and is_name(name) for name, file in where.items()):
            raise ValueError(f"{index}: expected a weight_map from tensors to files; fetch it again")
        for name, file in where.items():
            if Path(file).name != file or not file.endswith(".safetensors") or "\\" in file or not is_name(file):
                raise ValueError(f"{index}: {name} is in {file[:80]!r}, expected a .safetensors file of this folder; do not trust it")
        for file in sorted(set(where.values())):
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{folder / file} is missing, though the index names it; fetch it")
        stray = [p.name for p in files if p.name not in set(where.values())]
        if stray:
            raise ValueError(f"{folder / stray[0]} is not in {index.name}; remove the one that does not belong here")
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}; expected a folder as K3 is released (pickled weights are never read)")
    tensors = {}
    for path in files:
        for name, stored in read_header(path).items():
            if name in tensors:
                raise ValueError(f"tensor {name} is in {tensors[name].path} and in {path.name}; remove one of the files")
            if where and where.get(name) != path.name:
                raise ValueError(f"tensor {name} is in {path}, but the index has it in {where.get(name, 'no file')}; fetch both again")
            tensors[name] = stored
    for name in where.keys() - tensors.keys():
        raise ValueError(f"tensor {name} is missing: the index has it in {where[name]}, which has no such tensor; fetch both again")
    return tensors


def read_config(folder):
    """config.json → the fields of K3Config, a dict. A field that asks for other arithmetic than ours is an error that names it."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder {folder}; expected one as K3 is released: config.json and *.safetensors")
    path = Path(folder) / "config.json"
    whole = read_json(path)
    text = whole.get("text_config", whole)

    def rule(holds, name, value, expected):
        if not holds:
            value = "missing" if value is None else repr(value)[:80]
            raise ValueError(f"{path}: {name} is {value}, expected {expected}; nanoK3 computes K3 and nothing else")
    rule(isinstance(text, dict), "text_config", text, "an object")
    kda = text.get("linear_attn_config")
    rule(isinstance(kda, dict), "linear_attn_config", kda, "an object")
    given = {}
    for source, names in ((text, SIZES), (kda, KDA_SIZES)):
        for name, ours in names.items():
            value = source.get(name)
            if value is None and name in ("activation_situ_beta", "routed_scaling_factor"):
                value = 1.0
            if name not in FLOATS:
                rule(type(value) is int and 0 <= value < 1 << 24, name, value, "a whole number below 2^24")
            elif value is not None or name != "activation_situ_linear_beta":
                rule(type(value) in (int, float) and math.isfinite(value), name, value, "a number")
            given[ours] = float(value) if name in FLOATS and value is not None else value
    given["kda_value_dim"] = given["kda_key_dim"]
    layers, heads = given["n_layer"], given["n_head"]
    rule(1 <= layers <= 1000, "num_hidden_layers", layers, "1 to 1000")
    rule(given["kda_key_dim"] > 0, "linear_attn_config.head_dim", given["kda_key_dim"], "at least 1")
    rule(-5.9 <= given["g_min"] < 0, "linear_attn_config.gate_lower_bound", given["g_min"], "at least -5.9 and below 0")
    rule(given["rms_norm_eps"] > 0, "rms_norm_eps", given["rms_norm_eps"], "more than 0")
    same = {"num_key_value_heads": heads, "linear_attn_config.num_heads": heads}
    flat = {**text, **{f"linear_attn_config.{name}": value for name, value in kda.items()}}
    flat["tie_word_embeddings"] = text.get("tie_word_embeddings", False) or whole.get("tie_word_embeddings", False)
    for name, only in {**MUST, **ONLY, **same}.items():
        if name in flat or name in MUST or name == "linear_attn_config.num_heads":
            rule(flat.get(name) == only and type(flat[name]) is type(only), name, flat.get(name), repr(only))
    for name, value in flat.items():
        known = name.removeprefix("linear_attn_config.") in KDA_SIZES or name in {*SIZES, *MUST, *ONLY, *same, *INERT}
        rule(known or value in (None, False, 0, "", [], {}), repr(name[:80])[1:-1], value, "no such field")

    # which layers are MLA: both lists count from 1; one of them is enough
    full, linear = kda.get("full_attn_layers"), kda.get("kda_layers")
    for name, numbers in (("full_attn_layers", full), ("kda_layers", linear)):
        good = numbers is None or isinstance(numbers, list) and all(type(i) is int and 1 <= i <= layers for i in numbers)
        rule(good and len(set(numbers or ())) == len(numbers or ()), f"linear_attn_config.{name}", numbers, f"distinct layers from 1 to {layers}")
    rule(full is not None or linear is not None, "linear_attn_config.kda_layers", None, "a list of layers")
    if full is None:
        full = sorted(set(range(1, layers + 1)) - set(linear))
    rule(linear is None or sorted(full + linear) == list(range(1, layers + 1)), "linear_attn_config.kda_layers", linear,
         "every layer that is not in full_attn_layers")
    given["full_attn_layers"], given["mla_every"] = tuple(sorted(full)), 4 if full else 0

    # routed experts in MXFP4, as compressed-tensors calls it, or nothing
    for q in filter(None, (text.get("quantization_config"), whole.get("quantization_config"))):
        rule(isinstance(q, dict), "quantization_config", q, "an object")
        groups = q.get("config_groups", {})
        rule(isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values()), "config_groups", groups, "an object of objects")
        asked = [(q, "quant_method", "compressed-tensors"), (q, "format", "mxfp4-pack-quantized")]
        for group in groups.values():
            numbers = group.get("weights")
            rule(isinstance(numbers, dict), "config_groups.weights", numbers, "an object")
            asked += [(group, "input_activations", None), (numbers, "num_bits", 4), (numbers, "group_size", 32)]
        for source, name, only in asked:
            rule(source.get(name) == only, f"quantization_config: {name}", source.get(name), repr(only))
    return given


def in_released_words(folder, error):
    """K3Config's complaint about a size that came from config.json, with the name it has there."""
    ours, what = str(error).removeprefix("config: ").split(" ", 1)
    name = next((name for name in SIZES if SIZES[name] == ours), ours)
    return f"{Path(folder) / 'config.json'}: {name} {what}"


def read_folder(folder, config):
    """The headers of all files → the dtype of what is W, [(our name, cut, Stored, Stored of its scales or None)]."""
    folder = Path(folder)
    files = read_headers(folder)
    vision = [name for name in files if name.startswith(VISION)]
    if vision:
        print(f"skipped {len(vision)} tensors of the vision tower ({', '.join(VISION)}): nanoK3 is text only", file=sys.stderr)
    left = {}
    for name in files.keys() - set(vision):
        short = name.removeprefix("language_model.")
        if short in left:
            raise ValueError(f"{folder}: tensor {short} is there with language_model. before it and without; remove one")
        left[short] = files[name]

    def check(stored, dtypes, shape):
        if stored.dtype not in dtypes:
            raise ValueError(f"{stored.path}: tensor {stored.name} is {stored.dtype}, expected {' or '.join(dtypes)}; convert it first")
        if stored.shape != shape:
            raise ValueError(f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}, expected {list(shape)} by config.json; one of the "
                             "two is wrong")
    found, missing, general = [], [], None                                 # general: the dtype of all that is W
    for name, ours, shape, dtype, cut in table(config):
        packed, scale = name + "_packed", None
        if cut[0].isdigit() and packed in left:
            stored, scale = left.pop(packed), left.pop(name + "_scale", None)
            if shape[1] % 32:
                raise ValueError(f"{stored.path}: tensor {packed} is MXFP4, whose rows are a multiple of 32 long, but config.json says {shape[1]}")
            check(stored, ("U8",), (shape[0], shape[1] // 2))
            if scale:
                check(scale, ("U8",), (shape[0], shape[1] // 32))
            else:
                missing.append(name + "_scale")
        else:
            stored = left.pop(name, None)
            if stored and cut == "tail" and len(stored.shape) == 1 and stored.shape[0] > shape[0]:
                check_tail(stored, shape[0])
                shape = stored.shape
            if stored:
                check(stored, ("F32",) if dtype == F32 else (general,) if general else ("BF16", "F32"), shape)
                general = general or (stored.dtype if dtype == W else None)
            else:
                missing.append(name)
        if len(missing) > 3:                                               # of a config that promises too much there is no end
            break
        found.append((ours, cut, stored, scale))
    if missing:
        names = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        raise ValueError(f"{folder}: tensor {names} missing; expected by config.json. Fetch the files again" +
                         (f" (there are others that nothing asks for: {min(left)})" if left else ""))
    if left:
        names = ", ".join(sorted(left)[:3]) + (" and more" if len(left) > 3 else "")
        raise ValueError(f"{folder}: tensor {names} belongs to no parameter by config.json; one of the two is wrong")
    return TORCH[general], found


def check_tail(stored, used):
    with open_file(stored.path) as file:
        if (file.get_tensor(stored.name)[used:] != 0).any():
            raise ValueError(f"{stored.path}: tensor {stored.name} is {stored.shape[0]} long for {used} heads, and its tail is not zero; the file "
                             "is not what config.json says")


# ----------------------------------------------------------------------------------------------------------------------
# In

@torch.no_grad()
def fill(model, folder, found, dtype, device="cpu"):
    """
    A model on the meta device gets its memory, its weights and its tokenizer. found: what read_folder found in the folder. dtype:
    torch.float32 or torch.bfloat16; what is F32 in TENSORS stays fp32.
    """
    folder, config = Path(folder), model.config
    if dtype not in TORCH.values():
        raise ValueError(f"dtype = {dtype}: expected torch.float32 or torch.bfloat16")
    enc = tokenizer.from_file(folder / "tiktoken.model") if (folder / "tiktoken.model").is_file() else None
    if enc and enc.n_vocab > config.vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {enc.n_vocab} tokens, config.json a vocab_size of {config.vocab_size}; one of the two is "
                         "wrong")
    try:
        model.to(dtype).to_empty(device=device)                            # the first memory that is spent
    except RuntimeError:                                                   # torch's word for too little of it
        size = sum(x.nbytes for x in model.to(dtype).parameters())
        raise ValueError(f"{folder}: {amount(size)} of weights do not fit into the memory of {device}") from None
    for name, buffer in model.named_buffers():
        buffer.fill_(-torch.inf if name.endswith("max_logit") else 0)
    ours = dict(model.named_parameters()) | {name: x for name, x in model.named_buffers() if name.endswith("router_bias")}
    assert ours.keys() == {name for name, *_ in found}, "TENSORS and the model's parameters differ"

    # Views into a file make its pages ours until the file is closed; so it is closed after every sixteenth of the whole, 64 MB at most
    opened, seen, at_once = {}, 0, min(64 << 20, max(4 << 20, sum(stored.size for _, _, stored, _ in found) // 16))

    def rows_of(stored, first, last):
        if stored.path not in opened:
            opened[stored.path] = open_file(stored.path)
        return opened[stored.path].get_tensor(stored.name)[first:last]

    def decode(target, packed, scale):
        """In pieces of 256 kB, so that what lies between file and weights stays in the cache, on as many threads as torch has."""
        @torch.no_grad()                                                   # which is by thread
        def piece(rows):
            out = target[rows]
            if out.is_cpu:
                mxfp4_decode(packed[rows], scale[rows], dtype, out)
            else:
                out.copy_(mxfp4_decode(packed[rows], scale[rows], dtype))
        few = max(1, (256 << 10) // packed.shape[1])
        list(pool.map(piece, (slice(first, first + few) for first in range(0, len(packed), few))))
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    torch.set_num_threads(1)                                               # each piece on one: threads of threads wait for each other
    try:
        for name, cut, stored, scale in sorted(found, key=lambda row: (row[2].path, row[2].start)):              # as the files lie on the disk
            target = cut_out(ours[name], cut)
            step = max(1, at_once * stored.shape[0] // stored.size)                                              # rows
            for first in range(0, len(target), step):
                last = min(first + step, len(target))
                rows = rows_of(stored, first, last)
                seen += rows.nbytes
                if scale:
                    decode(target[first:last], rows, rows_of(scale, first, last))
                else:
                    target[first:last] = rows
                del rows
                if seen >= at_once:
                    opened.clear()
                    seen = 0
    except (ValueError, safetensors().SafetensorError) as error:
        raise ValueError(f"{stored.path}: tensor {stored.name}: {error}") from None
    finally:
        pool.shutdown()
        torch.set_num_threads(threads)
    model.tokenizer = enc


def end_ids(folder):
    """The ids that end a text, by generation_config.json or config.json of a released folder: a set, empty if they say nothing."""
    for file in ("generation_config.json", "config.json"):
        if (Path(folder) / file).is_file():
            whole = read_json(Path(folder) / file)
            text = whole.get("text_config")
            ids = whole.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
            ids = ids if isinstance(ids, list) else [ids]
            if all(type(i) is int for i in ids):
                return set(ids)
    return set()


# ----------------------------------------------------------------------------------------------------------------------
# Out

def released_config(config, dtype, experts, special):
    """K3Config → the content of config.json. special: bos_token_id and so on, {} if there is no tokenizer. auto_map is for transformers, which
    runs the release's own *.py; they are not ours to write."""
    words = dict(attn_res="block", kda_key_dim=config.kda_value_dim, kda_gate="sigmoid", latent_norm=True, situ_beta=config.situ_beta or "a number")
    for name, only in words.items():                                       # options for study, and what depends on them
        if getattr(config, name) != only:
            raise ValueError(f"{name} = {getattr(config, name)!r}: a released config has words for {only!r} only; such a model stays here")
    mla = [i + 1 for i in range(config.n_layer) if config.is_mla(i)]
    text = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": str(dtype)[6:], **special,
            **{name: getattr(config, ours) for name, ours in SIZES.items()}, "num_key_value_heads": config.n_head, **MUST, **ONLY,
            "use_grouped_topk": True, "max_position_embeddings": 1 << 20, "use_cache": True}
    text["linear_attn_config"] = {
        **{name: getattr(config, ours) for name, ours in KDA_SIZES.items()}, "num_heads": config.n_head,
        "use_full_rank_gate": text.pop("linear_attn_config.use_full_rank_gate"),
        "full_attn_layers": mla, "kda_layers": [i for i in range(1, config.n_layer + 1) if i not in mla]}
    if experts == "mxfp4":
        numbers = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
                   "scale_dtype": "torch.uint8"}
        text["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": numbers, "input_activations": None,
                                          "output_activations": None}},
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
                       "re:.*vision_tower.*", "re:.*mm_projector.*"]}
    code = {"AutoConfig": "configuration_kimi_k3.KimiK3Config", "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration"}
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "auto_map": code, "dtype": str(dtype)[6:], **special,
            "tie_word_embeddings": False, "text_config": text}


@torch.no_grad()
def save(model, folder, dtype=None, experts=None, enc=None, shard_bytes=5 * 10**9):
    """
    K3 → a folder in the released layout. dtype: torch.float32 or torch.bfloat16, None for the model's own. experts: "mxfp4" or "plain",
    None for mxfp4 if the model was trained for it (qat). A file takes up to shard_bytes; one at a time is put together in memory.
    """
    folder, config, enc = Path(folder), model.config, enc or model.tokenizer
    dtype = dtype or model.embed.weight.dtype
    experts = experts or ("mxfp4" if config.qat else "plain")
    if dtype not in TORCH.values() or experts not in ("mxfp4", "plain"):
        raise ValueError(f"expected dtype torch.float32 or torch.bfloat16 and experts 'mxfp4' or 'plain', got {dtype} and {experts!r}")
    if experts == "mxfp4" and (config.moe_intermediate_size % 32 or config.routed_expert_hidden_size % 32):
        raise ValueError(f"MXFP4 goes by blocks of 32: moe_intermediate_size = {config.moe_intermediate_size} and routed_expert_hidden_size = "
                         f"{config.routed_expert_hidden_size} must be multiples of it; write plain experts")
    if enc and enc.n_vocab > config.vocab_size:
        raise ValueError(f"the tokenizer has {enc.n_vocab} tokens, the model a vocabulary of {config.vocab_size}; give the one it was trained with")
    special = tokenizer.special_ids(enc) if enc else {}
    content = released_config(config, dtype, experts, special)
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def is_packed(cut):
        return experts == "mxfp4" and cut[0].isdigit()

    # which file takes what
    shards, room = [], 0
    for row in table(config):
        _, _, shape, kept, cut = row
        size = math.prod(shape) * 17 // 32 if is_packed(cut) else math.prod(shape) * (4 if kept == F32 else dtype.itemsize)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(row)
        room -= size

    folder.mkdir(parents=True, exist_ok=True)
    temporary, where, total = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder)), {}, 0
    try:
        for number, rows in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors = {}
            for name, our_name, _, kept, cut in rows:
                x = cut_out(ours[our_name].detach(), cut)
                name = "language_model." + name
                if is_packed(cut):
                    try:
                        tensors[name + "_packed"], tensors[name + "_scale"] = mxfp4_encode(x.cpu())
                    except ValueError as error:
                        raise ValueError(f"{our_name}: {error}") from None
                else:
                    tensors[name] = x.to("cpu", torch.float32 if kept == F32 else dtype).contiguous()
            safetensors().torch.save_file(tensors, temporary / file, metadata={"format": "pt"})
            where.update(dict.fromkeys(tensors, file))
            total += sum(x.nbytes for x in tensors.values())
        texts = {"generation_config.json": {**special, "do_sample": True, "temperature": 0.8}, "config.json": content}
        if len(shards) > 1:
            texts = {"model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": where}, **texts}
        if enc:
            tokenizer.write_model(enc, temporary)
        for file, text in texts.items():
            (temporary / file).write_text(json.dumps(text, indent=2), encoding="utf-8")
        # all is on the disk: put it in the place of an earlier export, config.json last, with which the folder is whole
        for old in [folder / "config.json", *folder.glob("model*.safetensors"), *folder.glob("model.safetensors.index.json")]:
            old.unlink(missing_ok=True)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, folder / path.name)
    except (OSError, safetensors().SafetensorError) as error:
        raise OSError(f"could not write {folder} ({getattr(error, 'strerror', None) or error}); make room or give another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------------------
# Looking at a folder, and the command

def describe(model, folder):
    """What python model.py FOLDER prints: from config.json, and from the headers if the weights are there. model: on the meta device, in bf16."""
    folder, c = Path(folder), model.config
    here = any(folder.glob("*.safetensors"))
    if here:
        read_folder(folder, c)
    mla = sum(c.is_mla(i) for i in range(c.n_layer))
    dense, kda = min(c.first_k_dense_replace, c.n_layer), c.n_layer - mla
    moes = [layer.mlp for layer in model.layers if isinstance(layer.mlp, LatentMoE)]
    bf16 = sum(x.nbytes for x in [*model.parameters(), *(m.router_bias for m in moes)])
    routed = sum(m.w13.numel() + m.w2.numel() for m in moes)
    state = kda * c.n_head * c.kda_key_dim * c.kda_value_dim * 4
    tails = kda * c.n_head * (2 * c.kda_key_dim + c.kda_value_dim) * (c.conv_size - 1) * 4
    latent = mla * (c.kv_lora_rank + c.qk_rope_head_dim) * 2
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"architecture    {c.n_layer} layers, {kda} KDA and {mla} MLA; {dense} dense, {c.n_layer - dense} LatentMoE of {c.num_experts} experts, "
          f"{c.num_experts_per_token} for a token, {c.num_shared_experts} shared; {c.attn_res_block_size} layers a block of AttnRes")
    print(f"                width {c.n_embd}, {c.n_head} heads, KDA state {c.kda_key_dim}×{c.kda_value_dim}, latents of MLA {c.kv_lora_rank} + "
          f"{c.qk_rope_head_dim}, of the experts {c.routed_expert_hidden_size}; vocabulary {c.vocab_size:,}")
    print(f"parameters      {model.num_params():,} in all, {model.num_active_params():,} active for a token")
    print(f"weights         {amount(bf16)} in bf16, {amount(bf16 - 2 * routed + routed * 17 // 32)} with routed experts in MXFP4; "
          + (f"{amount(on_disk)} in the files here" if here else "there are none here, this is from config.json"))
    print("for a sequence of   " + "".join(f"{text:>20}" for text in ("8k (8,192)", "128k (131,072)", "1M (1,048,576)")) + " tokens")
    print("KDA state, fp32     " + f"{amount(state):>20}" * 3 + f"   and {amount(tails)} of conv tails, whatever the length")
    print("MLA latents, bf16   " + "".join(f"{amount(tokens * latent):>20}" for tokens in (8192, 131072, 1048576)))


def amount(size):
    power = min(4, max(0, (len(str(int(size))) - 1) // 3))
    return f"{size / 1000 ** power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def main(arguments, load_model):
    options = {"dtype": "float32", "experts": ""}
    paths = [a for a in arguments if not a.startswith("--")]
    for argument in arguments:
        name, equals, value = argument[2:].partition("=")
        if argument.startswith("--") and (name not in options or not equals):
            raise ValueError(f"unknown option {argument}; there are --dtype=float32 or bfloat16, and --experts=plain or mxfp4")
        options.update({name: value} if argument.startswith("--") else {})
    if len(paths) != 2 or options["dtype"] not in ("float32", "bfloat16") or options["experts"] not in ("", "plain", "mxfp4"):
        raise ValueError("expected: python weights.py RUN FOLDER [--dtype=float32|bfloat16] [--experts=plain|mxfp4]")
    model, enc = load_model(paths[0], "cpu")
    save(model, paths[1], getattr(torch, options["dtype"]), options["experts"] or None, enc)
    print(f"wrote {paths[1]}: {', '.join(sorted(path.name for path in Path(paths[1]).iterdir() if path.is_file()))}")


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__.strip()))
    from sample import load_model              # the command alone stands above sample.py
    try:
        main(sys.argv[1:], load_model)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
