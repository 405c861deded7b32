"""Families with a mixture of experts: from a `config.json` to a `ModelConfig`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    ClampedSwiGlu,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    RouterConfig,
    SharedExpert,
    Temperature,
)
from tinkex.engine.torch.models.attend import Chunk
from tinkex.engine.torch.models.config_fields import (
    SANDWICH,
    Fields,
    activation_of,
    assembled,
    attention_of,
    experts_of,
    integer,
    layer_count,
    layer_types,
    mlp_of,
    refuse,
    sigmoid_router,
)
from tinkex.engine.torch.models.norms import ExpertNorms, NormConfig
from tinkex.engine.torch.models.rotary import read_rope, rope_fields


def qwen3_moe(fields: Fields) -> ModelConfig:
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    attention = attention_of(fields, qk_norm="head", biased=True, window=window)
    count = "num_experts" if "num_experts" in fields else "num_local_experts"  # transformers 4, 5
    router = RouterConfig(normalise=bool(fields.get("norm_topk_prob", False)))
    experts, mlp = experts_of(fields, count, router=router), mlp_of(fields)
    step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    sparse = (i not in dense and (i + 1) % step == 0 for i in range(layer_count(fields)))
    return assembled(fields, [LayerConfig(attention, experts if one else mlp) for one in sparse])


def qwen3_vl_moe(fields: Fields) -> ModelConfig:
    config = qwen3_moe({"rope_theta": 5e5, **fields, "norm_topk_prob": True})
    stack = [
        replace(layer, mlp=replace(layer.mlp, transposed="either"))
        if isinstance(layer.mlp, ExpertsConfig) else layer
        for layer in config.stack
    ]  # fmt: skip
    return replace(config, stack=tuple(stack))


def mixtral(fields: Fields) -> ModelConfig:
    activation_of(fields)
    experts = experts_of(fields, "num_local_experts", "intermediate_size")
    attention = attention_of(fields, window=fields.get("sliding_window"))
    return assembled(fields, [LayerConfig(attention, experts)] * layer_count(fields))


def gemma4(fields: Fields) -> ModelConfig:
    if fields.get("use_bidirectional_attention") == "all":
        refuse(fields, use_bidirectional_attention=None)
    fields = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **fields}
    count, same = layer_count(fields), bool(fields.get("attention_k_eq_v", False))
    types = layer_types(
        fields, ("full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count))
    )
    types = [*types[:-1], "full_attention"]
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    fields = {**fields, "rope_parameters": fields.get("rope_parameters") or ropes}
    wide = {"head_dim": fields.get("global_head_dim", 512)}
    if same and fields.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = fields["num_global_key_value_heads"]
    of_layer, lent = fields.get("per_layer_config") or {}, count - fields.get("num_kv_shared_layers", 0)
    stack = []
    for i, kind in enumerate(types):
        full, shares = kind == "full_attention", i >= lent > 0
        given = {**fields, **((of_layer.get(str(i)) or {}) if of_layer else wide if full else {})}
        mixer = attention_of(
            given, qk_norm="head", biased=True, scale=1.0, v_norm=True, k_as_v=same and full,
            window=None if full else fields.get("sliding_window", 512),
            rope=read_rope(given, given["head_dim"], kind),
            share=max(j for j in range(lent) if types[j] == kind) if shares else None,
            whole_images=not full and fields.get("use_bidirectional_attention") == "vision",
        )  # fmt: skip
        mlp, double = mlp_of(fields), fields.get("use_double_wide_mlp", False) and shares
        mlp = replace(mlp, width=mlp.width * (1 + double))
        if fields.get("enable_moe_block", False):
            norms = SANDWICH._replace(before_mlp=None)  # the experts' own
            stack.append(LayerConfig(mixer, _gemma4_experts(fields, mlp), norms))
        else:
            stack.append(LayerConfig(mixer, mlp, SANDWICH))
    width = fields.get("hidden_size_per_layer_input", 256)
    return assembled(
        fields,
        stack,
        norm=NormConfig(float(fields.get("rms_norm_eps", 1e-6)), "wide"),
        embedding_scale=integer(fields, "hidden_size") ** 0.5,
        logit_softcap=fields.get("final_logit_softcapping"),
        layer_inputs=(fields.get("vocab_size_per_layer_input", 262144), width) if width else None,
        layer_scalars=True,
        tied=bool(fields.get("tie_word_embeddings", True)),
    )


def _gemma4_experts(fields: Fields, mlp: MlpConfig) -> ExpertsConfig:
    """Experts in addition to the dense MLP, each with its own norms."""
    return ExpertsConfig(
        count=integer(fields, "num_experts"),
        per_token=integer(fields, "top_k_experts"),
        width=integer(fields, "moe_intermediate_size"),
        router=RouterConfig(norm=True, expert_scale=True),
        activation=mlp.activation,
        shared=SharedExpert(mlp.width, mlp=mlp),
        name="",
        norms=ExpertNorms(),
    )


def llama4(fields: Fields) -> ModelConfig:
    """Llama 4 (Scout, Maverick): rotated layers see chunks, every fourth one all; top-1 experts."""
    fields, count = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, **fields}, layer_count(fields)
    every = fields.get("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    types = layer_types(
        fields, ("chunked_attention" if one else "full_attention" for one in rotated), ("chunked_attention",)
    )
    norm: Literal["rotated"] | None = "rotated" if fields.get("use_qk_norm", True) else None
    rope = read_rope(fields, fields["head_dim"], adjacent=True)
    attention = attention_of(fields, qk_norm=norm, biased=True, rope=rope)
    hotter = Temperature(fields.get("attn_scale", 0.1), fields.get("floor_scale", 8192), offset=1)
    hotter = hotter if fields.get("attn_temperature_tuning", True) else None
    plain = replace(attention, rope=None, qk_norm=None, temperature=hotter)
    size = fields.get("attention_chunk_size", 8192)
    width = integer(fields, "intermediate_size")
    experts = ExpertsConfig(
        count=integer(fields, "num_local_experts"),
        per_token=fields.get("num_experts_per_tok", 1),
        width=width,
        router=RouterConfig("sigmoid", normalise=False, on_input=True),
        shared=SharedExpert(width, "shared_expert"),
        transposed=True,
        name="feed_forward",
    )
    dense = MlpConfig(integer(fields, "intermediate_size_mlp"), name="feed_forward")
    step, sparse = fields.get("interleave_moe_layer_step", 1), fields.get("moe_layers")
    sparse = range(step - 1, count, step) if sparse is None else sparse
    activation_of(fields)
    stack = []
    for i, (turned, kind) in enumerate(zip(rotated, types, strict=False)):
        mixer = attention if turned else plain
        if kind == "chunked_attention" and size is not None:
            mixer = replace(mixer, window=Chunk(size))
        stack.append(LayerConfig(mixer, experts if i in sparse else dense))
    return assembled(fields, stack)


def olmoe(fields: Fields) -> ModelConfig:
    refuse(fields, clip_qkv=None)
    attention = attention_of(fields, qk_norm="whole", biased=True)
    router = RouterConfig(normalise=bool(fields.get("norm_topk_prob", False)))
    experts = experts_of(fields, width="intermediate_size", router=router)
    norm = NormConfig(float(fields.get("rms_norm_eps", 1e-5)))
    return assembled(fields, [LayerConfig(attention, experts)] * layer_count(fields), norm=norm)


def gpt_oss(fields: Fields) -> ModelConfig:
    fields = {"rms_norm_eps": 1e-5, "head_dim": 64, "rope_theta": 1.5e5, "attention_bias": True, **fields}
    kinds = ("sliding_attention", "full_attention")
    types = layer_types(fields, (kinds[i % 2] for i in range(layer_count(fields))))
    full = attention_of(fields, biased=True, sinks=True)
    local = replace(full, window=fields.get("sliding_window", 128))
    count = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    clamped = ClampedSwiGlu(fields.get("swiglu_alpha", 1.702), fields.get("swiglu_limit", 7.0))
    experts = experts_of(
        fields, count, "intermediate_size", router=RouterConfig("softmax_of_best", bias=True),
        activation=clamped, bias=True, transposed=True, interleaved=True,
    )  # fmt: skip
    mixers = {"full_attention": full, "sliding_attention": local}
    norm = NormConfig(float(fields["rms_norm_eps"]), "wide")
    return assembled(fields, [LayerConfig(mixers[kind], experts) for kind in types], norm=norm)


def glm4_moe(fields: Fields) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7."""
    fields = {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, **fields}
    norm: Literal["head"] | None = "head" if fields.get("use_qk_norm", False) else None
    bias = bool(fields.get("attention_bias", False))
    attention = attention_of(fields, partial=0.5, qkv_bias=bias, qk_norm=norm)
    return _with_experts(fields, attention)


def deepseek_v3(fields: Fields) -> ModelConfig:
    """DeepSeek-V3, V3.1 and R1, Kimi-K2, GLM-4.7-Flash."""
    nope, rotated = integer(fields, "qk_nope_head_dim"), integer(fields, "qk_rope_head_dim")
    rope, scale = rope_fields(fields), (nope + rotated) ** -0.5
    if rope["rope_type"] != "default" and (all_dim := rope.get("mscale_all_dim")):
        scale *= (0.1 * all_dim * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0) ** 2
    attention = LatentConfig(
        heads=integer(fields, "num_attention_heads"),
        rank=integer(fields, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=integer(fields, "v_head_dim"),
        rope=read_rope(fields, rotated, adjacent=bool(fields.get("rope_interleave", True))),
        scale=scale,
        query_rank=fields.get("q_lora_rank"),
        bias=bool(fields.get("attention_bias", False)),
    )
    return _with_experts(fields, attention)


def glm_moe_dsa(fields: Fields) -> ModelConfig:
    """GLM-5, up to the context where its sparse attention sees every token: there it is plain MLA."""
    context = min(integer(fields, "max_position_embeddings"), fields.get("index_topk", 2048))
    indexers = tuple(f"model.layers.{i}.self_attn.indexer." for i in range(layer_count(fields)))
    config = deepseek_v3({"rms_norm_eps": 1e-5, **fields})
    return replace(config, max_context=context, skipped=config.skipped + indexers)


def _with_experts(fields: Fields, mixer: AttentionConfig | LatentConfig) -> ModelConfig:
    """DeepSeek's MLPs: the first layers dense, then routed and shared experts."""
    width, count = integer(fields, "moe_intermediate_size"), layer_count(fields)
    dense = fields.get("first_k_dense_replace", 1 if fields["model_type"] == "glm4_moe_lite" else 3)
    types = fields.get("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(count)]
    shared = fields.get("n_shared_experts") or 0
    own = SharedExpert(width * shared) if shared else None
    experts = experts_of(fields, "n_routed_experts", router=sigmoid_router(fields), shared=own)
    mlp = mlp_of(fields)
    stack = [LayerConfig(mixer, mlp if kind == "dense" else experts) for kind in types]
    return assembled(fields, stack, skipped=(f"model.layers.{count}.",))  # a head for a further token
