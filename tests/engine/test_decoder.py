"""The decoder against transformers: logits and gradients of every family, packed against one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tests.engine.forward import hidden, sequences
from tests.engine.tiny import FAMILIES, reference_logits, reference_model, tiny_model
from tinkex.engine.torch.hooks import LoraHook, Part, Site
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.rotary import read_rope

pytestmark = pytest.mark.slow

DENSE = [family for family in FAMILIES if family != "qwen3_moe"]


def assert_same_logits(path: Path) -> None:
    data, decoder = sequences(), load_decoder(path)
    ours = decoder.logits(hidden(decoder, data))
    torch.testing.assert_close(ours, torch.cat(reference_logits(path, data)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    assert_same_logits(tiny_model(tmp_path, family))


LLAMA3 = FAMILIES["llama3"][1]["rope_parameters"]
VARIANTS = {
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "untied": ("smollm2", {"tie_word_embeddings": False}),
    "biases": ("llama2", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "head_dim": ("mistral", {"head_dim": 32}),
    "one kv head": ("qwen3", {"num_key_value_heads": 1}),
    "no window": ("mistral", {"sliding_window": None}),
    "upper layers slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "listed layers slide": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "window unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}),
    "experts slide": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "raw router weights": ("qwen3_moe", {"norm_topk_prob": False}),
    "dense layers": ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "rope linear": ("llama2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "rope dynamic": (
        "llama2",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "rope theta": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "rope yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope yarn, all settings": (
        "llama2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
            }
        },
    ),
    "rope llama3": ("qwen3", {"rope_parameters": LLAMA3}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(tmp_path: Path, name: str) -> None:
    family, overrides = VARIANTS[name]
    assert_same_logits(tiny_model(tmp_path, family, **overrides))


def test_three_axes_of_positions_turn_as_transformers_has_them() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 3, 3], "mrope_interleaved": True}
    config = Qwen3VLTextConfig(head_dim=24, hidden_size=48, num_attention_heads=2, rope_parameters=rope)
    positions = torch.randint(0, 900, (3, 20), generator=torch.Generator().manual_seed(1))
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    ours = read_rope({"rope_parameters": rope}, 24).angles(positions, torch.float32)
    torch.testing.assert_close(ours, (cos[0, :, :12], sin[0, :, :12]))


@pytest.mark.parametrize("name", ["rope linear", "rope yarn", "rope llama3", "rope theta"])
def test_config_of_transformers_4_is_read(tmp_path: Path, name: str) -> None:
    family, overrides = VARIANTS[name]
    path = tiny_model(tmp_path, family, **overrides)
    fields = json.loads((path / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if fields["rope_scaling"] and name == "rope linear":
        rope["type"] = rope.pop("rope_type")  # the oldest spelling
    (path / "config.json").write_text(json.dumps(fields))
    assert_same_logits(path)


def test_moe_config_of_transformers_4_is_read(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen3_moe")
    fields = json.loads((path / "config.json").read_text())
    fields["num_experts"] = fields.pop("num_local_experts")
    (path / "config.json").write_text(json.dumps(fields))
    assert_same_logits(path)


# -- gradients -----------------------------------------------------------------------------------------


class Deltas(LoraHook):
    """A hook that adds x @ deltaᵀ with a full matrix (one for each expert) at every site.

    At delta = 0 its gradient is the gradient of the frozen weight itself, which transformers can tell.
    """

    def __init__(self, decoder: Decoder) -> None:
        count = decoder.config.experts.count if decoder.config.experts else 0
        self.deltas: dict[Site, Tensor] = {}
        for site, (in_features, parts) in decoder.sites().items():
            shape = (sum(part.out_features for part in parts), in_features)
            if site.group.startswith("experts"):
                shape = (count, *shape)
            self.deltas[site] = torch.zeros(shape, requires_grad=True)

    def __call__(
        self, site: Site, x: Tensor, y: Tensor, *, rows: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        delta = self.deltas[site]
        if experts is None:
            return y + x @ delta.T
        assert rows is not None
        assert bool((experts.diff() >= 0).all())
        return y + torch.einsum("ni,noi->no", x, delta[experts])


def our_gradients(
    decoder: Decoder, data: list[list[int]], cotangent: Tensor, **options: bool
) -> dict[Site, Tensor]:
    hook = Deltas(decoder)
    logits = decoder.logits(hidden(decoder, data, hook, **options), hook)
    (logits * cotangent).sum().backward()
    assert all(weight.grad is None for weight in decoder.parameters())
    return {site: delta.grad for site, delta in hook.deltas.items() if delta.grad is not None}


def transformers_gradients(path: Path, data: list[list[int]], cotangent: Tensor) -> dict[str, Tensor]:
    model = reference_model(path).requires_grad_(True)
    # a tied head's own gradient, apart from the embedding's
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    logits = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in data])
    (logits * cotangent).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def expected(gradients: dict[str, Tensor], parts: tuple[Part, ...]) -> Tensor:
    names = [part.name for part in parts]
    if ".experts." not in names[0]:
        return torch.cat([gradients[f"{name}.weight"] for name in names])
    stem = names[0].rpartition(".")[0]
    return gradients[f"{stem}.gate_up_proj" if len(parts) == 2 else f"{stem}.down_proj"]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_transformers(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    decoder, data = load_decoder(path), sequences((9, 30, 30, 4))
    cotangent = torch.randn(73, 320, generator=torch.Generator().manual_seed(2))
    ours = our_gradients(decoder, data, cotangent)
    theirs = transformers_gradients(path, data, cotangent)
    assert ours.keys() == decoder.sites().keys()
    for site, (_, parts) in decoder.sites().items():
        want = expected(theirs, parts)
        torch.testing.assert_close(ours[site], want, atol=1e-5 * float(want.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("family", ["llama2", "qwen3", "qwen3_moe"])
def test_checkpointing_gives_the_same_gradients(tmp_path: Path, family: str) -> None:
    decoder, data = load_decoder(tiny_model(tmp_path, family)), sequences((9, 30, 4))
    cotangent = torch.randn(43, 320, generator=torch.Generator().manual_seed(2))
    plain = our_gradients(decoder, data, cotangent)
    recomputed = our_gradients(decoder, data, cotangent, checkpoint=True)
    assert plain.keys() == recomputed.keys()
    for site, gradient in plain.items():
        torch.testing.assert_close(recomputed[site], gradient)


def test_checkpointing_calls_the_hook_again(tmp_path: Path) -> None:
    """The layers really are recomputed: the hook is asked again in the backward."""
    decoder, calls = load_decoder(tiny_model(tmp_path, "llama2")), []
    delta = torch.zeros((), requires_grad=True)

    class Counting(LoraHook):
        def __call__(self, site: Site, x: Tensor, y: Tensor, **of: Tensor | None) -> Tensor:
            calls.append(site)
            return y + delta

    hidden(decoder, sequences((6,)), Counting(), checkpoint=True).sum().backward()
    assert [site.layer for site in calls if site.group == "qkv"] == [0, 1, 1, 0]


# -- the interface -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_the_modules_of_transformers(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    decoder, modules = load_decoder(path), dict(reference_model(path).named_modules())
    for in_features, parts in decoder.sites().values():
        for part in parts:
            if ".experts." not in part.name:
                module = modules[part.name]
                assert (module.in_features, module.out_features) == (in_features, part.out_features)


def test_sites_of_experts(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0]))
    sites = decoder.sites()
    assert Site(0, "gate_up") in sites
    in_features, parts = sites[Site(1, "experts_gate_up")]
    assert in_features == 64
    assert [tuple(part) for part in parts] == [
        ("model.layers.1.mlp.experts.w1", 32, "mlp", 6, "A"),
        ("model.layers.1.mlp.experts.w3", 32, "mlp", 6, "A"),
    ]
    assert sites[Site(1, "experts_down")] == (32, (Part("model.layers.1.mlp.experts.w2", 64, "mlp", 6, "B"),))


def test_expert_rows_tell_their_tokens(tmp_path: Path) -> None:
    """`rows` at expert sites: the rows of token t are the ones that hold its hidden state."""
    decoder, seen = load_decoder(tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=1)), {}

    class Watching(LoraHook):
        def __call__(self, site: Site, x: Tensor, y: Tensor, **of: Tensor | None) -> Tensor:
            seen[site.group] = (x, of.get("rows"), of.get("experts"))
            return y

    hidden(decoder, sequences((7, 3)), Watching())
    x, rows, experts = seen["experts_gate_up"]
    assert sorted(rows.tolist()) == sorted(list(range(10)) * 2)
    by_token = {t: x[rows == t] for t in range(10)}
    assert all(torch.equal(pair[0], pair[1]) for pair in by_token.values())
    assert len({tuple(pair[0].tolist()) for pair in by_token.values()}) == 10
    assert all(len(set(experts[rows == t].tolist())) == 2 for t in range(10))


def test_logits_with_adapters(tmp_path: Path) -> None:
    decoder, asked = load_decoder(tiny_model(tmp_path, "smollm2")), []

    class AddingOne(LoraHook):
        def __call__(self, site: Site, x: Tensor, y: Tensor, **of: Tensor | None) -> Tensor:
            asked.append(site)
            return y + 1

    h = hidden(decoder, sequences((7, 3)))
    torch.testing.assert_close(decoder.logits(h, AddingOne()), decoder.logits(h) + 1)
    assert asked == [Site(-1, "unembed")]
    assert decoder.unembed_weight is decoder.embedding
