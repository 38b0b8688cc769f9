"""
Released weights in and out: K3.from_pretrained and K3.save_pretrained. A folder like K3's holds

    config.json                     sizes, in a nested text_config (or bare) and a vision_config
    *.safetensors                   the tensors: one file, or many and model.safetensors.index.json
    generation_config.json, tiktoken.model, tokenizer_config.json

Ours also has tokenizer.json, for llama.cpp's converter, MLX-LM, transformers, vLLM and SGLang:

    python weights.py out/shakespeare exported      a run's folder or one checkpoint → such a folder
    python weights.py out/shakespeare exported --dtype=bfloat16 --experts=mxfp4

    --dtype=float32     or bfloat16
    --experts=plain     or mxfp4; without it mxfp4 if the model was trained for it (qat)

Each tensor of the files is used once and each parameter is filled once, or an error names it. Files
are not trusted: nothing is unpickled, and names, shapes, types and offsets are checked in the
headers before any memory is spent on weights. Then tensors stream in, a few MB at a time.

Below: the tables of names, then config.json in, files in, weights in, all of it out, the command.
"""
import contextlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cli import options, run
from data import tokenizer
from mxfp4 import mxfp4_decode, mxfp4_encode

# --------------------------------------------------------------------------------------------------
# The tables
#
# A list for each part of the model; parts() says which of them a layer has, and what stands before
# their names. Released names also follow `language_model.`, which may be missing, but for those of
# the vision tower and its projector.
#
# A shape is written with d (n_embd), H, K, V (heads, the KDA state), R and v (MLA's latent and its
# values), l and m (the routed experts' latent and their width), D, Q, F and p (the tower's widths
# and its patches), and words; letters() has them all.
#
# dtype: W is the model's own, bf16 or fp32; F32 is fp32 in every file. cut: what part of our
# parameter the released tensor is,
#
#     whole       the same on both sides
#     row         one row there, (1, d), a vector here
#     tail        there it may be longer, with zeros at the end (K3: 128 for 96 heads). Written
#                 without them: engines cut them off, transformers' code has no place for them
#     E           one tensor an expert there, here stacked: E is the place in the first axis. These
#                 may also be MXFP4: then `.weight` is `.weight_packed`, uint8 (out, in/2), low
#                 nibble first, and `.weight_scale`, uint8 (out, in/32)
#     E gate      of an expert the first half of w13
#     E up        and the second
#     patch       a convolution there, a linear map of whole patches here
W, F32 = "W", "F32"
OF_MODEL = [
    # released                            ours                         shape         dtype cut
    ("model.embed_tokens.weight",         "embed.weight",              "vocab d",    W,   "whole"),
    ("model.norm.weight",                 "norm.weight",               "d",          W,   "whole"),
    ("model.output_attn_res_norm.weight", "out_mix.norm.weight",       "d",          W,   "whole"),
    ("model.output_attn_res_proj.weight", "out_mix.w",                 "1 d",        W,   "row"),
    ("lm_head.weight",                    "lm_head.weight",            "vocab d",    W,   "whole"),
]
OF_LAYER = [
    ("input_layernorm.weight",            "attn_norm.weight",          "d",          W,   "whole"),
    ("post_attention_layernorm.weight",   "mlp_norm.weight",           "d",          W,   "whole"),
    ("self_attention_res_norm.weight",    "attn_mix.norm.weight",      "d",          W,   "whole"),
    ("self_attention_res_proj.weight",    "attn_mix.w",                "1 d",        W,   "row"),
    ("mlp_res_norm.weight",               "mlp_mix.norm.weight",       "d",          W,   "whole"),
    ("mlp_res_proj.weight",               "mlp_mix.w",                 "1 d",        W,   "row"),
]
OF_MTP = [  # model.layers.N.… with N = num_hidden_layers → mtp.…; its MLA and MoE as elsewhere
    ("enorm.weight",                      "enorm.weight",              "d",          W,   "whole"),
    ("hnorm.weight",                      "hnorm.weight",              "d",          W,   "whole"),
    ("eh_proj.weight",                    "eh_proj.weight",            "d 2*d",      W,   "whole"),
    ("input_layernorm.weight",            "attn_norm.weight",          "d",          W,   "whole"),
    ("post_attention_layernorm.weight",   "mlp_norm.weight",           "d",          W,   "whole"),
    ("shared_head.norm.weight",           "norm.weight",               "d",          W,   "whole"),
]
OF_KDA = [  # self_attn.… → attn.…
    ("q_proj.weight",                     "q_proj.weight",             "H*K d",      W,   "whole"),
    ("k_proj.weight",                     "k_proj.weight",             "H*K d",      W,   "whole"),
    ("v_proj.weight",                     "v_proj.weight",             "H*V d",      W,   "whole"),
    ("q_conv1d.weight",                   "q_conv1d.weight",           "H*K 1 conv", F32, "whole"),
    ("k_conv1d.weight",                   "k_conv1d.weight",           "H*K 1 conv", F32, "whole"),
    ("v_conv1d.weight",                   "v_conv1d.weight",           "H*V 1 conv", F32, "whole"),
    ("f_a_proj.weight",                   "f_a_proj.weight",           "K d",        W,   "whole"),
    ("f_b_proj.weight",                   "f_b_proj.weight",           "H*K K",      W,   "whole"),
    ("b_proj.weight",                     "b_proj.weight",             "H d",        W,   "whole"),
    ("A_log",                             "A_log",                     "H",          F32, "tail"),
    ("dt_bias",                           "dt_bias",                   "H*K",        F32, "whole"),
    ("g_proj.weight",                     "g_proj.weight",             "H*V d",      W,   "whole"),
    ("o_norm.weight",                     "o_norm.weight",             "V",          F32, "whole"),
    ("o_proj.weight",                     "o_proj.weight",             "d H*V",      W,   "whole"),
]
OF_MLA = [  # self_attn.… → attn.…
    ("q_a_proj.weight",                   "q_a_proj.weight",           "q_lora d",   W,   "whole"),
    ("q_a_layernorm.weight",              "q_a_layernorm.weight",      "q_lora",     W,   "whole"),
    ("q_b_proj.weight",                   "q_b_proj.weight",           "H*key q_lora",W,   "whole"),
    ("kv_a_proj_with_mqa.weight",         "kv_a_proj_with_mqa.weight", "R+rope d",   W,   "whole"),
    ("kv_a_layernorm.weight",             "kv_a_layernorm.weight",     "R",          W,   "whole"),
    ("kv_b_proj.weight",                  "kv_b_proj.weight",          "H*nope+v R", W,   "whole"),
    ("g_proj.weight",                     "g_proj.weight",             "H*v d",      W,   "whole"),
    ("o_proj.weight",                     "o_proj.weight",             "d H*v",      W,   "whole"),
]
OF_DENSE = [  # mlp.… → mlp.…
    ("gate_proj.weight",                  "gate_proj.weight",          "dense d",    W,   "whole"),
    ("up_proj.weight",                    "up_proj.weight",            "dense d",    W,   "whole"),
    ("down_proj.weight",                  "down_proj.weight",          "d dense",    W,   "whole"),
]
OF_MOE = [  # block_sparse_moe.… → mlp.…
    ("gate.weight",                       "router.weight",             "experts d",  W,   "whole"),
    ("gate.e_score_correction_bias",      "router_bias",               "experts",    F32, "whole"),
    ("routed_expert_down_proj.weight",    "down_proj.weight",          "l d",        W,   "whole"),
    ("routed_expert_norm.weight",         "norm.weight",               "l",          W,   "whole"),
    ("routed_expert_up_proj.weight",      "up_proj.weight",            "d l",        W,   "whole"),
    ("shared_experts.gate_proj.weight",   "shared.gate_proj.weight",   "shared d",   W,   "whole"),
    ("shared_experts.up_proj.weight",     "shared.up_proj.weight",     "shared d",   W,   "whole"),
    ("shared_experts.down_proj.weight",   "shared.down_proj.weight",   "d shared",   W,   "whole"),
    ("experts.E.w1.weight",               "w13",                       "m l",        W,   "E gate"),
    ("experts.E.w3.weight",               "w13",                       "m l",        W,   "E up"),
    ("experts.E.w2.weight",               "w2",                        "l m",        W,   "E"),
]
OF_TOWER = [  # vision_tower.… → vision.…
    ("patch_embed.proj.weight",           "patch_map.weight",          "D 3 p p",    W,   "patch"),
    ("patch_embed.pos_emb.weight",        "table",                     "side side D",W,   "whole"),
    ("encoder.final_layernorm.weight",    "norm.weight",               "D",          W,   "whole"),
]
OF_BLOCK = [  # vision_tower.encoder.blocks.N.… → vision.blocks.N.…
    ("norm0.weight",                      "norm0.weight",              "D",          W,   "whole"),
    ("norm1.weight",                      "norm1.weight",              "D",          W,   "whole"),
    ("wqkv.weight",                       "wqkv.weight",               "3*Q D",      W,   "whole"),
    ("wo.weight",                         "wo.weight",                 "D Q",        W,   "whole"),
    ("mlp.fc0.weight",                    "fc0.weight",                "F D",        W,   "whole"),
    ("mlp.fc1.weight",                    "fc1.weight",                "D F",        W,   "whole"),
]
OF_PROJECTOR = [  # mm_projector.… → vision.…
    ("proj.0.weight",                     "proj0.weight",              "4*D 4*D",    W,   "whole"),
    ("proj.2.weight",                     "proj2.weight",              "d 4*D",      W,   "whole"),
    ("post_norm.weight",                  "post_norm.weight",          "d",          W,   "whole"),
]


def name_pairs(text):
    """{name in config.json: name in K3Config}, the second behind a colon where it differs."""
    pairs = (word.partition(":") for word in text.split())
    return {there: here or there for there, _, here in pairs}


SIZES = name_pairs("""
    vocab_size  num_hidden_layers:n_layer  hidden_size:n_embd  num_attention_heads:n_head
    q_lora_rank  kv_lora_rank  qk_nope_head_dim  qk_rope_head_dim  v_head_dim
    first_k_dense_replace  intermediate_size
    num_experts  num_experts_per_token  num_shared_experts
    moe_intermediate_size  routed_expert_hidden_size  routed_scaling_factor
    activation_situ_beta:situ_beta  activation_situ_linear_beta:situ_linear_beta
    attn_res_block_size  rms_norm_eps""")
MTP_SIZES = name_pairs("num_nextn_predict_layers:mtp_layers")
KDA_SIZES = name_pairs("""
    head_dim:kda_key_dim  short_conv_kernel_size:conv_size  gate_lower_bound:g_min""")
VISION_SIZES = name_pairs("""
    vt_num_hidden_layers:vit_layers  vt_hidden_size:vit_width  qkv_hidden_size:vit_attn_width
    vt_num_attention_heads:vit_heads  vt_intermediate_size:vit_mlp_width
    patch_size:vit_patch  init_pos_emb_height:vit_table""")
FLOATS = {"routed_scaling_factor", "activation_situ_beta", "activation_situ_linear_beta",
          "rms_norm_eps", "gate_lower_bound"}
# What a missing one means; the others must be there
MISSING = {"routed_scaling_factor": 1.0, "activation_situ_beta": 1.0,
           "activation_situ_linear_beta": None, "num_nextn_predict_layers": 0}
LIMITS = {"num_hidden_layers": range(1, 1001), "vt_num_hidden_layers": range(1, 1001),
          "head_dim": range(1, 1 << 24), "num_nextn_predict_layers": range(2)}
# Fields of which this code computes one value. MUST: leaving them out means something else. ONLY:
# leaving them out means the same, or the tensors would tell.
MUST = {"hidden_act": "situ", "mla_use_nope": True}
ONLY = {
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "rope_scaling": None,
}
KDA_ONLY = {"use_full_rank_gate": True}
VISION_ONLY = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_time": 4,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}
# Fields that are read elsewhere or change nothing: who wrote it, how to sample, and rope_theta,
# which turns nothing where nothing is rotated.
INERT = set("""
    _name_or_path architectures auto_map model_type transformers_version dtype torch_dtype
    bos_token_id eos_token_id pad_token_id initializer_range max_position_embeddings
    model_max_length use_cache return_dict id2label label2id rope_theta rope_parameters head_dim
    use_grouped_topk linear_attn_config quantization_config is_decoder ep_size pretraining_tp
    aux_loss_alpha seq_aux temperature top_k top_p typical_p num_beams num_beam_groups
    num_return_sequences max_length length_penalty repetition_penalty
    _attn_implementation video_attn_type""".split())

VISION = ("vision_tower.", "mm_projector.")
Row = namedtuple("Row", "name ours shape dtype cut")   # name: as released, without language_model.


def parts(config):
    """The lists of tensors that a model has, each with the prefix of its names there and here."""
    yield OF_MODEL, "", ""
    for i in range(config.n_layer):
        there, here = f"model.layers.{i}.", f"layers.{i}."
        yield OF_LAYER, there, here
        yield OF_MLA if config.is_mla(i) else OF_KDA, there + "self_attn.", here + "attn."
        if i < config.first_k_dense_replace:
            yield OF_DENSE, there + "mlp.", here + "mlp."
        else:
            yield OF_MOE, there + "block_sparse_moe.", here + "mlp."
    if config.vit_layers:
        yield OF_TOWER, "vision_tower.", "vision."
        yield OF_PROJECTOR, "mm_projector.", "vision."
    for i in range(config.vit_layers):
        yield OF_BLOCK, f"vision_tower.encoder.blocks.{i}.", f"vision.blocks.{i}."
    if config.mtp_layers:
        there = f"model.layers.{config.n_layer}."
        yield OF_MTP, there, "mtp."
        yield OF_MLA, there + "self_attn.", "mtp.attn."
        yield OF_MOE, there + "block_sparse_moe.", "mtp.mlp."


def letters(c):
    """What the letters and words of a shape stand for. c: K3Config."""
    return {
        "1": 1, "2": 2, "vocab": c.vocab_size, "d": c.n_embd, "H": c.n_head,
        "K": c.kda_key_dim, "V": c.kda_value_dim, "conv": c.conv_size,
        "q_lora": c.q_lora_rank, "R": c.kv_lora_rank, "R+rope": c.kv_lora_rank + c.qk_rope_head_dim,
        "key": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "v": c.v_head_dim, "nope+v": c.qk_nope_head_dim + c.v_head_dim,
        "dense": c.intermediate_size, "experts": c.num_experts,
        "l": c.routed_expert_hidden_size, "m": c.moe_intermediate_size,
        "shared": c.num_shared_experts * c.moe_intermediate_size,
        "D": c.vit_width, "Q": c.vit_attn_width, "F": c.vit_mlp_width, "side": c.vit_table,
        "p": c.vit_patch, "3": 3, "4": 4,
    }


def table(config):
    """A Row for every tensor of the model, experts one by one."""
    size = letters(config)
    for rows, there, here in parts(config):
        for name, ours, shape, dtype, cut in rows:
            sides = (math.prod(size[word] for word in side.split("*")) for side in shape.split())
            sides = tuple(sides)
            for e in range(config.num_experts if is_expert(cut) else 1):
                name_of_e, cut_of_e = name.replace(".E.", f".{e}."), cut.replace("E", str(e))
                yield Row(there + name_of_e, here + ours, sides, dtype, cut_of_e)


def is_expert(cut):
    """Whether a tensor is one of a routed expert: E in the tables, a number in a Row."""
    return cut[0] == "E" or cut[0].isdigit()


def cut_out(tensor, cut):
    """The view of our parameter that is one released tensor."""
    if cut == "row":
        return tensor[None]                        # (d) → (1, d)
    if cut == "patch":
        side = math.isqrt(tensor.shape[1] // 3)
        return tensor.view(-1, 3, side, side)      # (D, 3·p²) → (D, 3, p, p)
    if is_expert(cut):
        expert, *half = cut.split()
        x = tensor[int(expert)]                    # w13: (2, m, l), w2: (l, m)
        return x[["gate", "up"].index(half[0])] if half else x
    return tensor


# --------------------------------------------------------------------------------------------------
# config.json in

RELEASED = "expected a folder as K3 is released: config.json and *.safetensors"


def read_config(folder):
    """
    config.json → the fields of K3Config, a dict.
    Errors: ValueError that names a field which asks for other arithmetic than ours.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; {RELEASED}")
    finish_export(folder)
    path = folder / "config.json"
    whole = read_json(path)
    try:
        text = inner(whole, "text_config") if "text_config" in whole else whole
        kda = inner(text, "linear_attn_config")
        given = read_sizes(text, SIZES | MTP_SIZES) | read_sizes(kda, KDA_SIZES)
        heads = given["n_head"]
        tied = text.get("tie_word_embeddings", False) or whole.get("tie_word_embeddings", False)
        check_fields(text | {"tie_word_embeddings": tied}, MUST,
                     ONLY | {"num_key_value_heads": heads}, {*SIZES, *MTP_SIZES, *INERT})
        check_fields(kda, {"num_heads": heads}, KDA_ONLY,
                     {*KDA_SIZES, "full_attn_layers", "kda_layers"}, "linear_attn_config.")
        mla = mla_layers(kda, given["n_layer"])
        if whole.get("vision_config") is not None and has_tower(folder):
            given |= read_vision(whole, given)
        for source in (text, whole):
            if source.get("quantization_config"):
                check_quantization(inner(source, "quantization_config"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; nanoK3 computes K3 and nothing else") from None
    return given | {"kda_value_dim": given["kda_key_dim"], "full_attn_layers": tuple(mla),
                    "mla_every": 4 if mla else 0}


def rule(holds, name, value, expected):
    if not holds:
        value = "missing" if value is None else repr(value)[:80]
        name = repr(name[:100])[1:-1]                  # of one line, also from a hostile file
        raise ValueError(f"{name} is {value}, expected {expected}")


def inner(source, name):
    """source[name], a JSON object."""
    rule(isinstance(source.get(name), dict), name, source.get(name), "an object")
    return source[name]


def read_sizes(source, names, usual=range(1 << 24)):
    """{our name: value}. Whole numbers are in range; K3Config knows the range of the others."""
    given = {}
    for name, ours in names.items():
        value, limits = source.get(name), LIMITS.get(name, usual)
        if value is None and name in MISSING:
            value = MISSING[name]
        elif name in FLOATS:
            good = type(value) in (int, float) and abs(value) < 1e9
            rule(good, name, value, "a number below 10^9")
            value = float(value)
        else:
            rule(type(value) is int and value in limits, name, value,
                 f"a whole number from {limits[0]} to {limits[-1]}")
        given[ours] = value
    return given


def check_fields(fields, must, only, known, where=""):
    """A field has the value that this code computes, is read elsewhere (known), or is empty."""
    expected = must | only
    for name, value in (dict.fromkeys(must) | fields).items():
        if name in expected:
            good = value == expected[name] and type(value) is type(expected[name])
            rule(good, where + name, value, repr(expected[name]))
        else:
            empty = value in (None, False, 0, "", [], {})
            rule(name in known or empty, where + name, value, "no such field")


def has_tower(folder):
    """Whether to read a vision_config: a folder with weights, but none of a tower, is text."""
    if not any(folder.glob("*.safetensors")):
        return True
    return any(name.startswith(VISION) for name in read_index(folder) or read_headers(folder))


def read_vision(whole, given):
    """{our name: value}: VISION_SIZES from vision_config, and the token of an image pad."""
    vision = inner(whole, "vision_config")
    vision = {name: value for name, value in vision.items() if value is not None}
    sizes = read_sizes(vision, VISION_SIZES, range(1, 1 << 16))
    widths = vision_widths(sizes["vit_table"], sizes["vit_width"], given["n_embd"])
    check_fields(vision, {}, VISION_ONLY | widths, {*VISION_SIZES, *INERT}, "vision_config.")
    pad = whole.get("media_placeholder_token_id")
    good = type(pad) is int and 0 <= pad < given["vocab_size"]
    rule(good, "media_placeholder_token_id", pad, "the id of a token")
    return sizes | {"media_pad": pad}


def vision_widths(table, width, text_width):
    """The fields of vision_config that say once more what others have said."""
    return {"init_pos_emb_width": table, "mm_hidden_size": width, "text_hidden_size": text_width}


def mla_layers(kda, layers):
    """The numbers of the MLA layers, from 1, ascending. Of the two lists one is enough."""
    mla, linear = kda.get("full_attn_layers"), kda.get("kda_layers")
    for numbers in (mla, linear):
        good = isinstance(numbers, list) and all(type(i) is int for i in numbers)
        rule(good or numbers is None, "full_attn_layers or kda_layers", numbers, "a list of layers")
    rule(mla is not None or linear is not None, "kda_layers", None, "a list of layers")
    every = set(range(1, layers + 1))
    if mla is None:
        mla = every.difference(linear)
    if linear is None:
        linear = every.difference(mla)
    rule(sorted([*mla, *linear]) == sorted(every), "full_attn_layers with kda_layers",
         (mla, linear), f"each layer from 1 to {layers} in one of them")
    return sorted(mla)


def check_quantization(q):
    """Routed experts in MXFP4, as compressed-tensors calls it, are all that may be quantized."""
    asked = [(q, "quant_method", "compressed-tensors"), (q, "format", "mxfp4-pack-quantized")]
    groups = inner(q, "config_groups") if "config_groups" in q else {}
    for name in groups:
        group = inner(groups, name)
        numbers = inner(group, "weights")
        asked += [(group, "input_activations", None), (numbers, "num_bits", 4),
                  (numbers, "group_size", 32)]
    for source, name, value in asked:
        given = source.get(name)
        rule(given == value, f"quantization_config: {name}", given, repr(value))


def in_released_words(folder, error):
    """K3Config's complaint about a size that came from config.json, with the name it has there."""
    ours, what = str(error).removeprefix("config: ").split(" ", 1)
    released = {here: there for there, here in (SIZES | KDA_SIZES | VISION_SIZES).items()}
    return f"{Path(folder) / 'config.json'}: {released.get(ours, ours)} {what}"


# --------------------------------------------------------------------------------------------------
# Files in: first the headers, untrusted

Stored = namedtuple("Stored", "path name dtype shape start size")   # start, size: of its bytes
ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
        "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16}
AGAIN = "the file is cut short or spoiled, fetch it again"


def safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("released weights need the safetensors library: pip install "
                         "safetensors") from None
    return safetensors


def parse_json(data, where):
    """bytes → dict. Stricter than json: no name twice, no NaN."""
    def no_doubles(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a name stands twice")
        return result

    def no_constants(word):
        raise ValueError(f"{word} is no number")

    try:
        result = json.loads(data.decode("utf-8"), object_pairs_hook=no_doubles,
                            parse_constant=no_constants)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({str(error)[:100]}); {AGAIN}") from None
    if not isinstance(result, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(result).__name__}; {AGAIN}")
    return result


def read_json(path, most=16 << 20):
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}; {RELEASED}")
    if path.stat().st_size > most:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, expected at most {most}; it is "
                         "not what its name says")
    return parse_json(path.read_bytes(), path)


def is_name(text):
    """Names come back in messages of one line."""
    return 0 < len(text) <= 300 and text.isprintable()


def read_header(path):
    """
    A safetensors file → {name: Stored}, without its data: 8 bytes with the length of the header,
    the header, JSON, and the data. Every byte of it must belong to exactly one tensor.
    """
    def rule(holds, what):
        if not holds:
            raise ValueError(f"{path}: {what}; {AGAIN}")

    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        rule(8 <= size and 2 <= length <= min(size - 8, 100 << 20),
             f"its header should have {length} bytes, but the file has {size}")
        header = parse_json(file.read(length), f"{path}: its header")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        rule(is_name(name), f"a tensor is called {name[:80]!r}")
        rule(isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"},
             f"tensor {name}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        rule(isinstance(dtype, str) and dtype in ITEM,
             f"tensor {name}: unknown dtype {str(dtype)[:40]!r}")
        rule(are_sizes(shape) and len(shape) <= 8, f"tensor {name}: shape {str(shape)[:80]}")
        rule(are_sizes(offsets) and len(offsets) == 2,
             f"tensor {name}: data_offsets {str(offsets)[:80]}")
        first, last = offsets
        taken = math.prod(shape) * ITEM[dtype]
        rule(last - first == taken,
             f"tensor {name}: {dtype} {shape} takes {taken} bytes, data_offsets are {offsets}")
        tensors[name] = Stored(path, name, dtype, tuple(shape), 8 + length + first, taken)
    end = 8 + length
    for stored in sorted(tensors.values(), key=lambda stored: (stored.start, stored.size)):
        rule(stored.start == end,
             f"tensor {stored.name} begins at byte {stored.start}, expected {end}: tensors overlap "
             "or leave a gap")
        end += stored.size
    rule(end == size, f"its tensors end at byte {end}, but the file has {size}")
    return tensors


def are_sizes(x):
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in x)


def read_index(folder):
    """model.safetensors.index.json → {tensor: file of this folder}; {} without one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {}
    where = read_json(index, 256 << 20).get("weight_map")
    good = isinstance(where, dict) and where and all(map(is_name, where))
    if not good or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{index}: expected a weight_map from tensors to files; fetch it again")
    for name, file in where.items():
        bare = Path(file).name == file and "\\" not in file and is_name(file)
        if not bare or not file.endswith(".safetensors"):
            raise ValueError(f"{index}: {name} is in {file[:80]!r}, expected a .safetensors file "
                             "of this folder; do not trust it")
    return where


def read_headers(folder):
    """All safetensors files of a folder → {name: Stored}. An index, if there is one, must agree."""
    where = read_index(folder)
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    listed = set(where.values())
    for file in sorted(listed):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file} is missing, though the index names it; fetch "
                                    "it")
    for path in files:
        if where and path.name not in listed:
            raise ValueError(f"{path} is not in model.safetensors.index.json; remove the one that "
                             "does not belong here")
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}; expected a folder as K3 is "
                                "released (pickled weights are never read)")
    tensors = {}
    for path in files:
        for name, stored in read_header(path).items():
            if name in tensors:
                raise ValueError(f"tensor {name} is in {tensors[name].path} and in {path.name}; "
                                 "remove one of the files")
            if where and where.get(name) != path.name:
                raise ValueError(f"tensor {name} is in {path}, but the index has it in "
                                 f"{where.get(name, 'no file')}; fetch both again")
            tensors[name] = stored
    for name in where.keys() - tensors.keys():
        raise ValueError(f"tensor {name} is missing: the index has it in {where[name]}, which has "
                         "no such tensor; fetch both again")
    return tensors


# --------------------------------------------------------------------------------------------------
# Then what belongs where

Found = namedtuple("Found", "ours cut stored scale")   # scale: of MXFP4 its scales, else None


def read_folder(folder, config):
    """
    The headers of all files → the dtype of what is W, [Found].
    Errors: ValueError that names a tensor that is missing, left over, or of another dtype or shape.
    """
    folder = Path(folder)
    left = model_tensors(folder, config)
    found, missing, general = [], [], None         # general: the dtype of all that is W
    for row in table(config):
        if is_expert(row.cut) and row.name + "_packed" in left:
            stored, scale = take_packed(left, row)
            if scale is None:
                missing.append(row.name + "_scale")
        else:
            stored, scale = left.pop(row.name, None), None
            if stored is None:
                missing.append(row.name)
            else:
                check_plain(stored, row, general)
                general = general or (stored.dtype if row.dtype == W else None)
        if len(missing) > 3:                       # a config may promise without end
            break
        found.append(Found(row.ours, row.cut, stored, scale))
    if missing:
        also = f" (there are others that nothing asks for: {min(left)})" if left else ""
        raise ValueError(f"{folder}: tensor {some(missing)} missing; expected by config.json. "
                         f"Fetch the files again{also}")
    if left:
        raise ValueError(f"{folder}: tensor {some(sorted(left))} belongs to no parameter by "
                         "config.json; one of the two is wrong")
    return TORCH[general], found


def some(names):
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


def model_tensors(folder, config):
    """{name as in a Row: Stored}. Without a vision_config, a vision tower is skipped."""
    files = read_headers(folder)
    vision = [name for name in files if name.startswith(VISION)]
    if vision and not config.vit_layers:
        print(f"skipped {len(vision)} tensors of the vision tower ({', '.join(VISION)}): there is "
              "no vision_config in config.json", file=sys.stderr)
        files = {name: files[name] for name in files.keys() - set(vision)}
    tensors = {}
    for name in files:
        short = name.removeprefix("language_model.")
        if short in tensors:
            raise ValueError(f"{folder}: tensor {short} is there with language_model. before it "
                             "and without; remove one")
        tensors[short] = files[name]
    return tensors


def take_packed(left, row):
    """Out of left: the codes of an expert's tensor in MXFP4 and its scales, None if missing."""
    stored, scale = left.pop(row.name + "_packed"), left.pop(row.name + "_scale", None)
    rows, columns = row.shape
    if columns % 32:
        raise ValueError(f"{stored.path}: tensor {stored.name} is MXFP4, whose rows are a multiple "
                         f"of 32 long, but config.json says {columns}")
    check_tensor(stored, ("U8",), (rows, columns // 2))
    if scale:
        check_tensor(scale, ("U8",), (rows, columns // 32))
    return stored, scale


def check_plain(stored, row, general):
    """A tensor against its Row. general: the dtype that tensors before it had, or None."""
    shape = row.shape
    if row.cut == "tail" and len(stored.shape) == 1 and stored.shape[0] > shape[0]:
        check_tail(stored, shape[0])
        shape = stored.shape
    if row.dtype == F32:
        check_tensor(stored, ("F32",), shape)
    else:
        check_tensor(stored, (general,) if general else ("BF16", "F32"), shape)


def check_tensor(stored, dtypes, shape):
    if stored.dtype not in dtypes:
        raise ValueError(f"{stored.path}: tensor {stored.name} is {stored.dtype}, expected "
                         f"{' or '.join(dtypes)}; convert it first")
    if stored.shape != shape:
        raise ValueError(f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}, "
                         f"expected {list(shape)} by config.json; one of the two is wrong")


def check_tail(stored, used):
    with open_file(stored.path) as file:
        if (file.get_tensor(stored.name)[used:] != 0).any():
            raise ValueError(f"{stored.path}: tensor {stored.name} is {stored.shape[0]} long for "
                             f"{used} heads, and its tail is not zero; the file is not what "
                             "config.json says")


def open_file(path):
    """The library's view of a file whose header read_header has checked."""
    try:
        return safetensors().safe_open(path, "pt")
    except safetensors().SafetensorError as error:
        raise ValueError(f"{path}: {error}; {AGAIN}") from None


# --------------------------------------------------------------------------------------------------
# Then the weights

@torch.no_grad()
def fill(model, folder, found, dtype, device="cpu"):
    """
    A model on the meta device gets its memory, its weights and its tokenizer.

    found: what read_folder found in the folder. dtype: torch.float32 or torch.bfloat16; what is F32
    in the tables stays fp32.
    """
    folder = Path(folder)
    if dtype not in TORCH.values():
        raise ValueError(f"dtype = {dtype}: expected torch.float32 or torch.bfloat16")
    enc = read_tokenizer(folder, model.config.vocab_size)
    allocate(model, folder, dtype, device)
    ours = dict(model.named_parameters())
    ours |= {name: x for name, x in model.named_buffers() if name.endswith("router_bias")}
    assert ours.keys() == {row.ours for row in found}, "tables and parameters differ"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                       # in each of the pool: they would wait in turn
    try:
        with ThreadPoolExecutor(threads) as pool:
            copy_in(found, ours, dtype, pool)
    finally:
        torch.set_num_threads(threads)
    model.tokenizer = enc


def read_tokenizer(folder, vocab_size):
    """The folder's tiktoken.Encoding, None without a tiktoken.model."""
    if not (folder / "tiktoken.model").is_file():
        return None
    enc = tokenizer.from_file(folder / "tiktoken.model")
    if enc.n_vocab > vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {enc.n_vocab} tokens, config.json a "
                         f"vocab_size of {vocab_size}; one of the two is wrong")
    return enc


def allocate(model, folder, dtype, device):
    """The first memory that is spent. Buffers start as in a new model."""
    try:
        model.to(dtype).to_empty(device=device)
    except RuntimeError:                           # torch's word for too little memory
        size = sum(x.nbytes for x in model.to(dtype).parameters())
        raise ValueError(f"{folder}: {amount(size)} of weights do not fit into the memory of "
                         f"{device}") from None
    for name, buffer in model.named_buffers():
        buffer.fill_(-torch.inf if name.endswith("max_logit") else 0)


def copy_in(found, ours, dtype, pool):
    """
    The files' tensors into ours, a few rows at a time, in the order in which they lie on the disk.

    What was read through an open file counts as our memory until it is closed, so files are closed
    after every sixteenth of the whole, 64 MB at most.
    """
    total = sum(row.stored.size for row in found)
    at_once = min(64 << 20, max(4 << 20, total // 16))
    opened, seen = {}, 0

    def rows_of(stored, first, last):
        if stored.path not in opened:
            opened[stored.path] = open_file(stored.path)
        return opened[stored.path].get_tensor(stored.name)[first:last]

    in_order = sorted(found, key=lambda row: (row.stored.path, row.stored.start))
    for name, cut, stored, scale in in_order:
        target = cut_out(ours[name], cut)
        step = max(1, at_once * stored.shape[0] // stored.size)                # in rows
        try:
            for first in range(0, len(target), step):
                last = min(first + step, len(target))
                rows = rows_of(stored, first, last)
                seen += rows.nbytes
                if scale:
                    decode_in(target[first:last], rows, rows_of(scale, first, last), dtype, pool)
                else:
                    target[first:last] = rows
                del rows
                if seen >= at_once:
                    opened.clear()
                    seen = 0
        except (ValueError, safetensors().SafetensorError) as error:
            raise ValueError(f"{stored.path}: tensor {stored.name}: {error}") from None


def decode_in(target, packed, scale, dtype, pool):
    """mxfp4_decode into target, in pieces of 256 kB that stay in a thread's cache."""
    @torch.no_grad()                               # which is by thread
    def piece(rows):
        out = target[rows]
        if out.is_cpu:
            mxfp4_decode(packed[rows], scale[rows], dtype, out)
        else:
            out.copy_(mxfp4_decode(packed[rows], scale[rows], dtype))

    step = max(1, (256 << 10) // packed.shape[1])                              # in rows
    list(pool.map(piece, (slice(first, first + step) for first in range(0, len(packed), step))))


def end_ids(folder):
    """The ids that end a text, by generation_config.json or config.json: a set, maybe empty."""
    for file in ("generation_config.json", "config.json"):
        if not (Path(folder) / file).is_file():
            continue
        whole = read_json(Path(folder) / file)
        ids = whole.get("eos_token_id")
        if "eos_token_id" not in whole and isinstance(whole.get("text_config"), dict):
            ids = whole["text_config"].get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if all(type(i) is int for i in ids):
            return set(ids)
    return set()


# --------------------------------------------------------------------------------------------------
# Out

def released_config(config, dtype, experts, special):
    """
    K3Config → the content of config.json. special: bos_token_id and so on, {} without a tokenizer.

    auto_map is for transformers, which runs the release's own *.py; they are not ours to write.
    Errors: ValueError for an option for study, for which a released config has no words.
    """
    check_words(config)
    mla = [i + 1 for i in range(config.n_layer) if config.is_mla(i)]
    kda = [i + 1 for i in range(config.n_layer) if not config.is_mla(i)]
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": str(dtype)[6:],
        **special,
        **{name: getattr(config, ours) for name, ours in SIZES.items()},
        "num_key_value_heads": config.n_head,
        **MUST,
        **ONLY,
        "num_nextn_predict_layers": config.mtp_layers,
        "use_grouped_topk": True,
        "max_position_embeddings": 1 << 20,
        "use_cache": True,
    }
    text["linear_attn_config"] = {
        **{name: getattr(config, ours) for name, ours in KDA_SIZES.items()},
        "num_heads": config.n_head,
        **KDA_ONLY,
        "full_attn_layers": mla,
        "kda_layers": kda,
    }
    if experts == "mxfp4":
        text["quantization_config"] = QUANTIZATION
    vision = {}
    if config.vit_layers:
        sizes = {name: getattr(config, ours) for name, ours in VISION_SIZES.items()}
        widths = vision_widths(config.vit_table, config.vit_width, config.n_embd)
        vision = {"media_placeholder_token_id": config.media_pad,
                  "vision_config": {**sizes, **widths, **VISION_ONLY}}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config",
                     "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration"},
        "dtype": str(dtype)[6:],
        **special,
        "tie_word_embeddings": False,
        "text_config": text,
        **vision,
    }


def check_words(config):
    words = dict(attn_res="block", kda_key_dim=config.kda_value_dim, kda_gate="sigmoid",
                 latent_norm=True, situ_beta=config.situ_beta or "a number", mtp_features=False)
    for name, only in words.items():
        if getattr(config, name) != only:
            raise ValueError(f"{name} = {getattr(config, name)!r}: a released config has words for "
                             f"{only!r} only; such a model stays here")


QUANTIZATION = {  # routed experts in MXFP4, in compressed-tensors' words
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                    "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"},
        "input_activations": None,
        "output_activations": None,
    }},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*",
               r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*", "re:.*vision_tower.*",
               "re:.*mm_projector.*"],
}


@torch.no_grad()
def save(model, folder, dtype=None, experts=None, enc=None, shard_bytes=5 * 10**9):
    """
    K3 → a folder in the released layout, in the place of an earlier one.

    dtype: torch.float32 or torch.bfloat16, None for the model's own. experts: "mxfp4" or "plain",
    None for mxfp4 if the model was trained for it (qat). enc: its tokenizer, None for the model's
    own. A file takes up to shard_bytes; one at a time is put together in memory.
    """
    folder, config, enc = Path(folder), model.config, enc or model.tokenizer
    dtype = dtype or model.embed.weight.dtype
    experts = experts or ("mxfp4" if config.qat else "plain")
    check_request(config, dtype, experts, enc)
    special = tokenizer.special_ids(enc) if enc else {}
    content = released_config(config, dtype, experts, special)

    folder.mkdir(parents=True, exist_ok=True)
    finish_export(folder)
    earlier = earlier_export(folder)
    for old in folder.glob(".writing-*"):          # of an export that was killed
        shutil.rmtree(old, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        index = write_tensors(model, temporary, dtype, experts, shard_bytes)
        if enc:
            tokenizer.write_model(enc, temporary)
        texts = {"generation_config.json": {**special, **SAMPLING}, "config.json": content}
        if len(set(index["weight_map"].values())) > 1:
            texts["model.safetensors.index.json"] = index
        for file, text in texts.items():
            (temporary / file).write_text(json.dumps(text, indent=2), encoding="utf-8")
        replace_export(temporary, folder, earlier)
    except (OSError, safetensors().SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(f"could not write {folder} ({why}); make room or give another "
                      "folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_request(config, dtype, experts, enc):
    if dtype not in TORCH.values() or experts not in ("mxfp4", "plain"):
        raise ValueError("expected dtype torch.float32 or torch.bfloat16 and experts 'mxfp4' or "
                         f"'plain', got {dtype} and {experts!r}")
    m, l = config.moe_intermediate_size, config.routed_expert_hidden_size
    if experts == "mxfp4" and (m % 32 or l % 32):
        raise ValueError(f"MXFP4 goes by blocks of 32: moe_intermediate_size = {m} and "
                         f"routed_expert_hidden_size = {l} must be multiples of it; write plain "
                         "experts")
    if enc and enc.n_vocab > config.vocab_size:
        raise ValueError(f"the tokenizer has {enc.n_vocab} tokens, the model a vocabulary of "
                         f"{config.vocab_size}; give the one it was trained with")


def write_tensors(model, folder, dtype, experts, shard_bytes):
    """All weights into one or more files of the folder → the content of the index."""
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shards = shared_out(table(model.config), dtype, experts, shard_bytes)
    where, total = {}, 0
    for number, rows in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for row in rows:
            tensors |= as_released(row, ours[row.ours].detach(), dtype, experts)
        safetensors().torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(x.nbytes for x in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": where}


def shared_out(rows, dtype, experts, shard_bytes):
    """Rows → a list of them for each file, in their order, each of up to shard_bytes."""
    shards, room = [], 0
    for row in rows:
        size = math.prod(row.shape) * (4 if row.dtype == F32 else dtype.itemsize)
        if experts == "mxfp4" and is_expert(row.cut):
            size = math.prod(row.shape) * 17 // 32
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(row)
        room -= size
    return shards


def as_released(row, parameter, dtype, experts):
    """{released name: tensor on the CPU} of a Row: one, or the two of MXFP4."""
    name, x = row.name, cut_out(parameter, row.cut)
    if not name.startswith(VISION):
        name = "language_model." + name
    if experts == "mxfp4" and is_expert(row.cut):
        try:
            packed, scale = mxfp4_encode(x.cpu())
        except ValueError as error:
            raise ValueError(f"{row.ours}: {error}") from None
        return {name + "_packed": packed, name + "_scale": scale}
    return {name: x.to("cpu", torch.float32 if row.dtype == F32 else dtype).contiguous()}


# Every name that an export writes. Nothing else in a folder is replaced or deleted.
EXPORTED = re.compile(
    r"config\.json|generation_config\.json|tiktoken\.model|tokenizer(_config)?\.json"
    r"|model\.safetensors(\.index\.json)?|model-\d{5}-of-\d{5}\.safetensors")
SAMPLING = {"do_sample": True, "temperature": 0.8}
# A whole export on its way into the folder, and in it the names of old files that go
WHOLE, GOES = ".new-export", "goes.json"


def earlier_export(folder):
    """
    The names in a folder that an earlier export wrote. It is known by its generation_config.json:
    the release's own differs. Errors: FileExistsError for a name like these that it did not write.
    """
    there = {path.name for path in folder.iterdir() if EXPORTED.fullmatch(path.name)}
    ours = set()
    try:
        kind = read_json(folder / "config.json").get("model_type")
        sampling = read_json(folder / "generation_config.json")
        if kind == "kimi_k3" and sampling.items() >= SAMPLING.items():
            files = set(read_index(folder).values()) or {"model.safetensors"}
            ours = {name for name in there if name in files or not name.endswith(".safetensors")}
    except (OSError, ValueError):
        pass
    if there - ours:
        raise FileExistsError(f"{folder / min(there - ours)} is there, and no earlier export wrote "
                              "it; move it away, or give another folder")
    return ours


def replace_export(temporary, folder, earlier):
    """
    A whole export, in a folder within folder, takes the place of an earlier one: by one rename.
    Whoever is stopped before it leaves the old one whole; after it, finish_export goes on.
    """
    names = {path.name for path in temporary.iterdir()}
    mode = (temporary / "config.json").stat().st_mode
    for path in temporary.iterdir():
        path.chmod(mode)                           # safetensors lets nobody but the owner read
    goes = json.dumps({"names": sorted(earlier - names)})
    (temporary / GOES).write_text(goes, encoding="utf-8")
    os.rename(temporary, folder / WHOLE)
    # Until it is back, the mixture of old files and new ones is no model for anybody
    (folder / "config.json").unlink(missing_ok=True)
    finish_export(folder)
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names)
    if others:
        print(f"{some(others)} in {folder} is no part of the export and stays; a program that "
              "reads every *.safetensors of a folder needs it moved away", file=sys.stderr)


def finish_export(folder):
    """
    Moves a whole export in, config.json last. What stopped halfway is finished by the next call, in
    an export or in reading the folder; two at once do no harm.
    """
    whole = folder / WHOLE
    if whole.is_symlink() or not whole.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):       # another call was faster
        if (whole / GOES).is_file():
            names = read_json(whole / GOES).get("names")
            for name in names if isinstance(names, list) else ():
                if EXPORTED.fullmatch(str(name)):
                    (folder / name).unlink(missing_ok=True)
        for path in sorted(whole.iterdir(), key=lambda path: path.name == "config.json"):
            if EXPORTED.fullmatch(path.name):
                os.replace(path, folder / path.name)
        (whole / GOES).unlink(missing_ok=True)
        whole.rmdir()


# --------------------------------------------------------------------------------------------------
# Looking at a folder, and the command

def describe(model, folder):
    """
    What python model.py FOLDER prints: from config.json, and from the headers if there are weights.
    model: on the meta device, in bf16.
    """
    folder, c = Path(folder), model.config
    here = any(folder.glob("*.safetensors"))
    if here:
        read_folder(folder, c)
    mla = sum(c.is_mla(i) for i in range(c.n_layer))
    dense, kda = min(c.first_k_dense_replace, c.n_layer), c.n_layer - mla
    moes = model.moes().values()
    bf16 = sum(x.nbytes for x in [*model.parameters(), *(moe.router_bias for moe in moes)])
    routed = sum(moe.w13.numel() + moe.w2.numel() for moe in moes)
    mxfp4 = bf16 - 2 * routed + routed * 17 // 32
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # For one sequence, in bytes: KDA's states and convolution tails in fp32, MLA's latents in bf16
    state = kda * c.n_head * c.kda_key_dim * c.kda_value_dim * 4
    tails = kda * c.n_head * (2 * c.kda_key_dim + c.kda_value_dim) * (c.conv_size - 1) * 4
    latent = mla * (c.kv_lora_rank + c.qk_rope_head_dim) * 2

    def columns(*texts):
        return "".join(f"{text:>20}" for text in texts)

    latents = (amount(tokens * latent) for tokens in (8192, 131072, 1048576))
    files = "there are none here, this is from config.json"
    if here:
        files = f"{amount(on_disk)} in the files here"
    print(f"architecture    {c.n_layer} layers, {kda} KDA and {mla} MLA; {dense} dense, "
          f"{c.n_layer - dense} LatentMoE of {c.num_experts} experts, {c.num_experts_per_token} "
          f"for a token, {c.num_shared_experts} shared; {c.attn_res_block_size} layers a block of "
          "AttnRes" + "; an MTP layer" * c.mtp_layers)
    print(f"                width {c.n_embd}, {c.n_head} heads, KDA state "
          f"{c.kda_key_dim}×{c.kda_value_dim}, latents of MLA {c.kv_lora_rank} + "
          f"{c.qk_rope_head_dim}, of the experts {c.routed_expert_hidden_size}; "
          f"vocabulary {c.vocab_size:,}")
    if c.vit_layers:
        print(f"                a vision tower of {c.vit_layers} layers, width {c.vit_width}, "
              f"{c.vit_heads} heads, patches of {c.vit_patch}×{c.vit_patch} pixels")
    print(f"parameters      {model.num_params():,} in all, {model.num_active_params():,} active "
          "for a token")
    print(f"weights         {amount(bf16)} in bf16, {amount(mxfp4)} with routed experts in MXFP4; "
          f"{files}")
    print("for a sequence of   " + columns("8k (8,192)", "128k (131,072)", "1M (1,048,576)")
          + " tokens")
    print("KDA state, fp32     " + columns(*3 * [amount(state)])
          + f"   and {amount(tails)} of conv tails, whatever the length")
    print("MLA latents, bf16   " + columns(*latents))


def amount(size):
    """Bytes in words: 5.559 TB."""
    power = min(4, max(0, (len(str(int(size))) - 1) // 3))
    return f"{size / 1000 ** power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def main(arguments, load_model):
    """load_model: path, device → K3, tiktoken.Encoding."""
    given, paths = options(arguments, {"dtype": "float32", "experts": ""})
    dtype, experts = given["dtype"], given["experts"]
    known = dtype in ("float32", "bfloat16") and experts in ("", "plain", "mxfp4")
    if len(paths) != 2 or not known:
        raise ValueError("expected: python weights.py RUN FOLDER [--dtype=float32|bfloat16] "
                         "[--experts=plain|mxfp4]")
    source, folder = (os.path.expanduser(path) for path in paths)
    model, enc = load_model(source, "cpu")
    save(model, folder, getattr(torch, dtype), experts or None, enc)
    files = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
    print(f"wrote {folder}: {', '.join(files)}")


if __name__ == "__main__":
    # The command alone stands above checkpoint.py
    from checkpoint import load_model

    run(lambda arguments: main(arguments, load_model), __doc__)
