"""Fill families.md from a run over transformers' models: ``python docs/families.py [TYPE ...]``.

Every class that AutoModelForCausalLM and AutoModelForMaskedLM know is built with a tiny
configuration and random weights, converted and compared with its source. With model types it
prints their rows; without any it takes all and writes the page (about 2 minutes on 2 cores).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin
from transformers.models.auto import modeling_auto

import softmax_rnn as sr
from softmax_rnn._utils.files import write_text
from softmax_rnn._utils.progress import ProgressBar
from softmax_rnn.report import markdown

HERE = Path(__file__).parent
TOKENS = 40  # beyond every window, chunk and compressor of the tiny configurations
NEW = 6  # generated tokens
SERIES = "taylor:2"  # has a state
# The Auto class of each kind, and its table of classes.
AUTO = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
}
CONVERTS, REFUSED, NOT_BUILT, FAILS = "converts", "refused", "cannot be built tiny", "FAILS"

# What a tiny configuration has in place of these fields, in whichever family they are.
LAYERS, HEADS, WIDTH, WINDOW = 2, 4, 32, 6
TINY: dict[int, str] = {
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_blocks num_encoder_layers num_decoder_layers num_layers_per_stack kv_heads "
    "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok top_k "
    "num_experts_per_token moe_topk moe_k linear_num_key_heads mamba_n_groups n_groups "
    "type_vocab_size o_groups index_n_heads laurel_rank altup_num_inputs index_topk_blocks",
    HEADS: "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_heads swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
    "linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads mamba_chunk_size chunk_size "
    "index_topk compress_rates rotary_dim index_block_size block_size mamba_dt_rank "
    "conv_kernel_size",
    WINDOW: "sliding_window sliding_window_size local_attention attention_window_size window_size "
    "keep_window_size attention_chunk_size attention_window",
    WIDTH // HEADS: "head_dim swa_head_dim kv_channels linear_key_head_dim linear_value_head_dim "
    "linear_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_head_dim mamba_d_head "
    "dim_head d_head attention_head_size attention_head_dim index_head_dim "
    "query_pre_attn_scalar mamba_d_state state_size ssm_state_size d_rel dim_model_base",
    16: "q_lora_rank kv_lora_rank o_lora_rank qk_head_dim time_step_rank gated_norm_rank "
    "hc_lowrank",
    WIDTH: "hidden_size d_model n_embd embedding_size emb_dim embedding_dim dim "
    "input_embedding_size output_embedding_size attention_hidden_size lru_width "
    "word_embed_proj_dim hidden_size_per_layer_input mamba_d_ssm d_embed backbone_hidden_size "
    "ple_embed_dim pooler_hidden_size",
    64: "intermediate_size moe_intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff dff "
    "n_inner shared_expert_intermediate_size ffn_hidden_size d_inner dim_ff feed_forward_size "
    "expert_ffn_hidden_size intermediate_size_mlp shared_intermediate_size "
    "shared_experts_intermediate_size dense_intermediate_size "
    "moe_shared_expert_intermediate_size rel_extent",
    61: "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size",
    128: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length",
    1: "topk_group n_group num_expert_group bos_token_id n_shared_experts num_shared_experts "
    "first_k_dense_replace num_dense_layers decoder_start_token_id",
    60: "eos_token_id",
    0: "pad_token_id num_kv_shared_layers",
}
SPREAD = ("initializer_range", "init_std", "embed_init_std")
# Further fields, where these do not make a model.
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
FURTHER: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 61},
    "cohere_compass_text": {"rope_parameters": {"full_attention": SECTIONS}},
    "dots3_note_text": {
        **{"head_dim": 16, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS},
        **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    },
    "esmc": {"num_key_value_heads": HEADS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 10},
    "mamba2": {"head_dim": 16},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": WIDTH, "num_latents": 8},
    "zamba": {
        **{"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": HEADS},
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "convbert": {"conv_kernel_size": 3},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}},
    "hrm_text": {"num_hidden_layers": 16},
    "nystromformer": {"conv_kernel_size": 3, "segment_means_seq_len": 40, "num_landmarks": 40},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": HEADS},
    "zaya": {"num_experts_per_tok": 1},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
}


def fields(config: Any, kind: str) -> dict[str, Any]:
    """The fields of a tiny configuration, for a default one of the same class."""
    known = {name: size for size, names in TINY.items() for name in names.split()}
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in config.sub_configs:
            part = getattr(config, name)
            found[name] = None if part is None else fields(part, kind)
        elif name in known:
            size = known[name]
            found[name] = dict.fromkeys(value, size) if isinstance(value, dict) else size
        elif name in SPREAD:
            found[name] = 0.3
        elif isinstance(value, float) and ("drop" in name or name.endswith("jitter_noise")):
            found[name] = 0.0
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types") and value:
            found[name] = list(dict.fromkeys(value))
    if kind == "causal" and hasattr(config, "is_decoder"):
        found["is_decoder"] = True
    found |= FURTHER.get(config.model_type, {})
    if "kv_lora_rank" in found:  # every head has keys of its own
        found["num_key_value_heads"] = HEADS
    kinds = [x for name, x in found.items() if name.endswith(("layer_types", "block_type"))]
    layers = max(LAYERS, *map(len, kinds), 0)
    for x in kinds:
        x += [x[-1]] * (layers - len(x))
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if kinds and name in found:
            found[name] = layers
    return found


def built(model_type: str, kind: str) -> Any:
    """A tiny model whose norms, biases and sinks matter as well."""
    config = transformers.CONFIG_MAPPING[model_type]
    config = config(**fields(config(), kind))
    model_class = getattr(transformers, AUTO[kind][1])[type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    parts = [getattr(config, name) for name in config.sub_configs]
    own = [part for part in parts if type(part) is model_class.config_class]
    config = own[0] if own else config  # of the decoder of a model with several parts
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.uniform_(-1, 1)
    return model


def ran(model: Any, **options: Any) -> tuple[list[Tensor], Tensor | None]:
    """The logits of whole and of padded rows, and what is generated; ``options`` are for that."""
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(ids)
    padded[1, :7] = 0
    masks = (torch.ones_like(ids), padded)
    with torch.no_grad():
        logits = [model(input_ids=ids, attention_mask=mask).logits[mask.bool()] for mask in masks]
        if model.config.is_encoder_decoder or not isinstance(model, GenerationMixin):
            return logits, None
        options |= {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
        return logits, model.generate(ids, attention_mask=padded, pad_token_id=0, **options)


def examined(model_type: str, kind: str) -> tuple[str, str]:
    """The outcome of a conversion, and the reason if it is not possible."""
    try:
        source, plain = (built(model_type, kind) for _ in range(2))
    except Exception as error:
        return NOT_BUILT, said(error)
    try:
        expected, continued = ran(source)
        runs = ""
    except Exception as error:
        runs = said(error)
    try:
        sr.convert(plain, "softmax")
        model = sr.convert(source, SERIES)
    except ValueError as error:
        # The error of a family's own code has a cause.
        return (
            (NOT_BUILT, f"it does not run: {runs}")
            if runs and error.__cause__
            else (REFUSED, str(error))
        )
    except Exception as error:
        return FAILS, f"convert: {said(error)}"
    if runs:
        return FAILS, f"it converts, but its source does not run: {runs}"
    step = "softmax"
    try:
        found, again = ran(plain)
        for x, y in zip(found, expected, strict=True):
            error = float((x - y).norm() / y.norm())
            if not error < 1e-4:
                return FAILS, f"the logits of softmax are off by {error:.2g}"
        if continued is not None and not torch.equal(again, continued):
            return FAILS, "softmax generates other tokens"
        step = SERIES
        logits, generated = ran(model)
        if not all(x.isfinite().all() for x in logits) or torch.allclose(logits[0], expected[0]):
            return FAILS, f"the logits of {SERIES} are not finite, or those of the source"
        if generated is not None and not torch.equal(generated, ran(model, use_cache=False)[1]):
            return FAILS, f"{SERIES} generates other tokens without a cache"
        step = "saving and loading"
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = getattr(transformers, AUTO[kind][0]).from_pretrained(folder).eval()
        if not all(map(torch.equal, ran(loaded)[0], logits)):
            return FAILS, "the loaded model has other logits"
    except Exception as error:
        return FAILS, f"{step}: {said(error)}"
    return CONVERTS, ""


def said(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def row(kind: str, model_type: str, name: str) -> tuple[str, str, str]:
    """The row of one class."""
    outcome, reason = examined(model_type, kind)
    reason = " ".join(reason.split()).replace("|", "\\|")
    return f"`{model_type}`", f"`{name}`", f"{outcome}: {reason}" if reason else outcome


def classes(kind: str) -> list[tuple[str, str, str]]:
    """Arguments of :func:`row` for every class of a kind."""
    names = getattr(modeling_auto, f"{AUTO[kind][1]}_NAMES").items()
    pairs = ((key, name if isinstance(name, str) else name[0]) for key, name in names)
    return sorted((kind, key, name) for key, name in pairs)


def quiet() -> None:
    """Prepare a process that computes rows."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def rows(chosen: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The rows of these classes, computed by as many processes as there are cores."""
    spawn = multiprocessing.get_context("spawn")
    with (
        ProgressBar("families", len(chosen)) as bar,
        ProcessPoolExecutor(os.cpu_count(), spawn, quiet) as processes,
    ):
        running = [processes.submit(row, *each) for each in chosen]
        for done, _ in enumerate(as_completed(running), 1):
            bar.update(done)
    return [each.result() for each in running]


def summary(found: Sequence[tuple[str, str, str]]) -> str:
    """How many rows have each outcome."""
    counts = Counter(outcome.partition(":")[0] for *_, outcome in found)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def main(types: Sequence[str]) -> int:
    """Print the rows of some types, or fill the page; the number of failures."""
    columns, failures, parts = ("model type", "class", "outcome"), 0, {}
    for kind, (auto, _) in AUTO.items():
        chosen = [each for each in classes(kind) if not types or each[1] in types]
        found = rows(chosen) if chosen else []
        failures += sum(outcome.startswith(FAILS) for *_, outcome in found)
        table = markdown.table(columns, found, left=3)
        counts = f"{auto}, transformers {transformers.__version__}: {summary(found)}."
        parts[kind] = f"{counts}\n\n{table}"
    if types:
        print(*parts.values(), sep="\n\n")
    else:
        page = HERE / "families.md"
        write_text(page, markdown.fill(page.read_text(encoding="utf-8"), parts))
    return failures


if __name__ == "__main__":
    failures = main(sys.argv[1:])
    sys.exit(f"{failures} classes FAIL." if failures else 0)
