"""Two processes of bench/line.py: our server, and the peer that it is compared with.

    line_child.py serve HOME MODEL THREADS DURABILITY   says when torch is imported, and its URL when ready
    line_child.py peer MODEL THREADS                    runs one measure for each name on stdin

The peer is what people write without a service: transformers' model with a peft adapter on every linear layer
and the head, fused AdamW, one padded batch; `generate` for sampling. Knows nothing of the client.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

MODEL, RANK, VOCAB = "m/line", 8, 4096
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def serve(home: str, model: str, threads: int, durability: Any = "process") -> None:
    import torch  # noqa: F401

    say(torch_at=time.time())
    from tinkex.engine.protocol import EngineConfig
    from tinkex.server.serve import ServerConfig
    from tinkex.server.serve import serve as serve_it
    from tinkex.service.config import ServiceConfig

    def heard(line: str) -> None:
        if found := re.search(r" serves (http://\S+)", line):
            say(url=found.group(1), at=time.time())

    engine = EngineConfig("", device="cpu", dtype="float32", threads=threads)
    service = ServiceConfig(
        Path(home), models={MODEL: model}, engine=engine, preload=True, durability=durability
    )
    serve_it(ServerConfig(service, port=0), heard)


class Peer:
    def __init__(self, model: str, threads: int) -> None:
        import peft
        import torch
        import transformers

        torch.set_num_threads(threads)
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        base.generation_config.eos_token_id = None
        config = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=LINEARS, task_type="CAUSAL_LM")
        self.torch, self.model = torch, peft.get_peft_model(base, config, autocast_adapter_dtype=False)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self.settings = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=64, pad_token_id=0
        )

    def train(self, steps: int = 4) -> dict[str, float]:
        work = [self.torch.randint(3, VOCAB, (8, 129)) for _ in range(steps)]
        self.model.train()
        began = time.perf_counter()
        for ids in work:
            logits = self.model(ids[:, :-1], use_cache=False).logits
            loss = self.torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"rate": steps * 8 * 128 / (time.perf_counter() - began)}

    def sample(self) -> dict[str, float]:
        self.model.eval()
        return {"rate": 512 / statistics.median(self._generate() for _ in range(5))}

    def _generate(self) -> float:
        prompts = self.torch.randint(3, VOCAB, (8, 64))
        began = time.perf_counter()
        with self.torch.inference_mode():
            out = self.model.generate(
                input_ids=prompts,
                attention_mask=self.torch.ones_like(prompts),
                generation_config=self.settings,
            )
        assert out.shape[1] == 128, out.shape
        return time.perf_counter() - began


def main() -> None:
    match sys.argv[1:]:
        case ["serve", home, model, threads, *durability]:
            serve(home, model, int(threads), *durability)
        case ["peer", model, threads]:
            peer = Peer(model, int(threads))
            say(ready=True)
            for line in sys.stdin:
                say(**getattr(peer, line.strip())())


if __name__ == "__main__":
    main()
