"""A sampler's rows are bitwise identical to a trainer's many rows, with weights as large as 8B's, or experts.

In a model of that size with random weights whatever differs in the last bit shows in every logprob; in
smaller ones it does not, and their products are cut as is quickest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.by_kernels import DEVICE, random
from tests.engine.commands import do
from tests.engine.cuda_batch import new_batch, published, submit
from tests.engine.stepping import finish
from tinkex.engine.cuda import elementwise
from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda import lora_kernels as lora
from tinkex.engine.cuda import packed_attention as packed
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda.adapter_table import (
    AdapterTable,
    RowTiles,
    column_of,
    cut_tiles,
    site_adapters,
    tile_rows,
)
from tinkex.engine.cuda.attention_hooks import TOKENS, lay_out
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.cuda.decode_graphs import CapturedLora
from tinkex.engine.protocol import CreateAdapter, ForwardBackward, Pass
from tinkex.engine.torch.functions import split_rotate, swiglu
from tinkex.engine.torch.hooks import Frozen, Part, PartialProjection, Site
from tinkex.engine.torch.kv import PAGE, TokenSpan
from tinkex.engine.torch.load import empty_decoder
from tinkex.engine.torch.models.families import model_config
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput

pytestmark = pytest.mark.gpu

SITES = {
    "qkv": (4096, [4096, 1024, 1024]),
    "o": (4096, [4096]),
    "gate_up": (4096, [12288, 12288]),
    "down": (12288, [4096]),
    "unembed": (4096, [32000]),
    "shared_gate_up": (2048, [512, 512]),
    "shared_down": (512, [2048]),
}
RANK = 32
BACKEND = CudaBackend(DEVICE, torch.bfloat16)
FEW = (1, 7, 16, 20, 64, 65, 96, 128, 160, 192, 224, 256, 400, 511)  # rows of a sampler's step


class Case:
    """An adapter on a frozen product, by the trainer's and by the sampler's way."""

    def __init__(self, group: str, rows: int, scale: float) -> None:
        width, outs = SITES[group]
        self.at, self.width, self.outs = Site(0, group), width, outs
        self.x = random(rows, width)
        self.weight = random(sum(outs), width, seed=1) / width**0.5
        self.a = random(len(outs) * RANK, width, seed=2) / width**0.5
        self.bs = [random(RANK, out, seed=3 + i) for i, out in enumerate(outs)]
        column = column_of(self.at)
        addresses = torch.zeros(1, column + 4, dtype=torch.int64)
        addresses[0, 0], addresses[0, column] = RANK, self.a.data_ptr()
        addresses[0, column + 1 : column + 1 + len(outs)] = torch.tensor([b.data_ptr() for b in self.bs])
        scales = torch.full((1,), scale, device=DEVICE)
        self.table = AdapterTable(addresses.to(DEVICE), scales, RANK)

    def tiles(self, rows: int, of: int) -> RowTiles:
        return RowTiles(torch.from_numpy(cut_tiles([(0, 0, rows)], of)).to(DEVICE), of)

    def trained(self) -> Tensor:
        at = site_adapters(self.table, self.tiles(len(self.x), 64), self.at, self.width, self.outs)
        return grouped.product_with(self.x, self.weight, at)[0]

    def projected(self, rows: int) -> Tensor | PartialProjection:
        """The first rows, by the sampler."""
        tiles = self.tiles(rows, 64 if rows <= 64 else tile_rows(rows))
        parts = tuple(Part("", out, "attn") for out in self.outs)
        hook = CapturedLora({self.at: (self.width, parts)}, self.table, tiles, 0, torch.cuda.Stream())
        return hook.project(
            self.at, self.x[:rows].contiguous(), Frozen(self.weight, None, None, BACKEND.linear)
        )

    def sampled(self, rows: int) -> Tensor:
        y = self.projected(rows)
        y = y if isinstance(y, Tensor) else y.addend()
        return y if y.dim() == 2 else lora.summed(y, self.x.dtype)[0]


@pytest.mark.parametrize("group", SITES)
@pytest.mark.parametrize(("rows", "scale"), [(4096, 1.0), (1100, 0.3), (600, 2.0)])
def test_a_projection(group: str, rows: int, scale: float) -> None:
    case = Case(group, rows, scale)
    want = case.trained()
    for few in FEW:
        if few <= 64 or len(case.outs) == 1:  # others' are added up by what reads them
            assert torch.equal(case.sampled(few), want[:few]), few


def test_what_reads_a_projection() -> None:
    """Rotation and SwiGLU add up what is left as summands."""
    heads, norms = (32, 8), (random(128, seed=7), random(128, seed=8))
    cos, sin = random(600, 64, seed=9), random(600, 64, seed=10)
    qkv, gate_up = Case("qkv", 600, 0.3), Case("gate_up", 600, 0.3)
    rotated = elementwise.rotate(qkv.trained(), cos, sin, heads, norms, 1e-6)[:3]
    gated = elementwise.swiglu(gate_up.trained())
    for few in FEW:
        got = split_rotate(qkv.projected(few), cos[:few], sin[:few], heads, norms, 1e-6, elementwise)
        assert all(torch.equal(a, b[:few]) for a, b in zip(got, rotated, strict=True)), few
        assert torch.equal(swiglu(gate_up.projected(few), elementwise), gated[:few]), few


@pytest.mark.parametrize(
    ("heads", "dim"),
    [
        *((heads, dim) for heads in ((32, 8), (16, 8), (8, 8)) for dim in (128, 64)),
        ((16, 4), 256),
        ((16, 2), 256),
    ],
)
@pytest.mark.parametrize(("times", "splits"), [(1, 16), (8, 1), (32, 1)])
def test_attention_of_a_new_token(times: int, splits: int, heads: tuple[int, int], dim: int) -> None:
    (h, g), lengths = heads, [1, 2, 63, 64, 65, 200, 255, 300, 511] * times
    tokens = sum(lengths)
    q, k, v = (random(tokens, n, dim, seed=i) for i, n in enumerate((h, g, g)))
    tiles = packed.cut(lengths, DEVICE)
    want, _ = packed.forward(q, k, v, tiles, None)
    most = -(-max(lengths) // PAGE)
    pools = torch.zeros(2, len(lengths) * most * PAGE, g, dim, dtype=q.dtype, device=DEVICE)
    last = torch.tensor(lengths).cumsum(0) - 1
    for i, (end, length) in enumerate(zip(last.tolist(), lengths, strict=True)):
        first = i * most * PAGE
        pools[0, first : first + length - 1] = k[end - length + 1 : end]
        pools[1, first : first + length - 1] = v[end - length + 1 : end]
    got, _ = paged.attend(
        *(x[last.to(DEVICE)].contiguous() for x in (q, k, v)),
        *pools,
        one_token_tiles(lengths, most)._replace(splits=splits, min_split_keys=512),
        last.to(DEVICE),
        PAGE,
        None,
    )
    assert torch.equal(got, want[last.to(DEVICE)])


@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((16, 4), 256), ((16, 2), 256)])
def test_attention_of_prompts(heads: tuple[int, int], dim: int) -> None:
    """In tiles of 16 tokens, as prefill attends."""
    (h, g), lengths = heads, [1, 15, 63, 64, 65, 200, 511]
    q, k, v = (random(sum(lengths), n, dim, seed=i) for i, n in enumerate((h, g, g)))
    want, _ = packed.forward(q, k, v, packed.cut(lengths, DEVICE), None)
    pages = [-(-n // PAGE) for n in lengths]
    ends = np.cumsum(pages).tolist()
    pieces = [TokenSpan(range(end - n, end), 0, m) for end, n, m in zip(ends, pages, lengths, strict=True)]
    queries, slots = lay_out(pieces, TOKENS, DEVICE, min_split_keys=2048)
    pools = torch.zeros(2, ends[-1] * PAGE, g * dim, dtype=q.dtype, device=DEVICE)
    got, _ = paged.attend(q, k, v, *pools, queries, slots, PAGE, None)
    assert torch.equal(got, want)


def one_token_tiles(lengths: Sequence[int], pages: int) -> paged.Queries:
    count = len(lengths)
    cells = torch.tensor(
        [list(range(count)), [1] * count, [n - 1 for n in lengths], list(range(count))], dtype=torch.int32
    )
    table = torch.arange(count * pages, dtype=torch.int32).view(count, pages)
    return paged.Queries(cells.to(DEVICE), table.to(DEVICE), 1)


DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
HYBRID = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
HYBRID_EXPERTS = HYBRID | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
    "num_key_value_heads": 2, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "requests"),
    [
        *((DENSE, count) for count in (1, 3, 16, 24, 70, 130)),
        (EXPERTS, 16),
        *((config, count) for config in (HYBRID, HYBRID_EXPERTS) for count in (1, 16, 70)),
    ],
)
def test_logprobs_of_a_sampler_are_those_of_the_trainer(config: dict[str, Any], requests: int) -> None:
    """A few layers as large as those of 8B, 30B-A3B, and Qwen3.5-9B and 35B-A3B, so many prompts at once."""
    decoder = empty_decoder(model_config(config), "cuda", torch.bfloat16)
    torch.manual_seed(0)
    for name, weight in decoder.weights().items():
        plain = decoder.config.norm.kind != "offset" or name.endswith("linear_attn.norm.weight")
        weight.fill_(float(plain)) if name.endswith("norm.weight") else weight.normal_(std=0.02)
    batch, adapter = new_batch(decoder, pages=1000, sequences=requests), published(decoder, 32, 1)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, 8192, 40).astype(np.int32) for _ in range(requests)]
    futures = [submit(batch, ids, adapter, seed=i)[0] for i, ids in enumerate(prompts)]
    finish(batch)
    sampled = [future.result(timeout=0).sequences[0] for future in futures]
    trainer = TorchTrainer(decoder, "wide")
    do(trainer, CreateAdapter("run", adapter.adapter.lora))
    trainer.adapter("run").flat.copy_(adapter.adapter.flat)
    whole = [np.append(ids, one.tokens_np) for ids, one in zip(prompts, sampled, strict=True)]
    datums = [
        Datum(ModelInput.from_ints(ids[:-1].astype(np.int32)), {"target_tokens": ids[1:].astype(np.int64)})
        for ids in whole
    ]
    (output,) = do(trainer, ForwardBackward((Pass("run", datums, "cross_entropy", backward=False),)))
    assert isinstance(output, ForwardBackwardOutput)
    for one, trained in zip(sampled, output.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one.logprobs_np, trained["logprobs"].to_numpy()[39:], atol=1e-5)
