"""Chat with a base model or an adapter. (`tinkex chat` is the comfortable version.)

python examples/chat.py SmolLM2-135M-Instruct
python examples/chat.py tinker://…/sampler_weights/sft
"""

import argparse

import tinkex


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="SmolLM2-135M-Instruct")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args()

    with tinkex.ServiceClient() as service:
        is_path = options.model.startswith("tinker://")
        sampler = service.create_sampling_client(**{"model_path" if is_path else "base_model": options.model})
        tokenizer = sampler.get_tokenizer()
        params = tinkex.SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
        messages: list[dict[str, str]] = []
        while True:
            try:
                said = input("you: ").strip()
            except EOFError:
                break
            if not said:
                continue
            messages.append({"role": "user", "content": said})
            prompt = tinkex.ModelInput.from_ints(tinkex.render_chat(tokenizer, messages))
            tokens = sampler.sample(prompt, 1, params).result().sequences[0].tokens
            text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            messages.append({"role": "assistant", "content": text})
            print("model:", text)


if __name__ == "__main__":
    main()
