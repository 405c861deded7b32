"""Export an adapter: as a PEFT directory, and merged into a full model.

    python examples/export.py tinker://…/sampler_weights/sft out --base path/to/the/base/model

PEFT loads the adapter, and so does vLLM if the unembedding was not trained. Without --base nothing is merged;
`tinkex model path SmolLM2-135M-Instruct` prints the default model's directory.
"""

import argparse
from pathlib import Path

import tinkex
from tinkex.client.download import download_archive


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="tinker://RUN/sampler_weights/NAME")
    parser.add_argument("out", type=Path, help="a directory that is not there yet")
    parser.add_argument("--base", type=Path, help="the base model's directory: merge into it")
    options = parser.parse_args()

    with tinkex.ServiceClient() as service:
        rest = service.create_rest_client()
        print(rest.get_weights_info_by_tinker_path(options.path).result())
        link = rest.get_checkpoint_archive_url_from_tinker_path(options.path).result().url
    adapter = options.out / "adapter"
    adapter.mkdir(parents=True)
    download_archive(link, adapter)  # the link is signed, and good for a while
    print(f"adapter: {adapter}")
    print(f"  model = peft.PeftModel.from_pretrained(base, {str(adapter)!r})")
    if options.base:
        from tinkex.engine.torch.merge import merge_adapter

        merge_adapter(options.base, adapter, options.out / "merged")
        print(f"merged: {options.out / 'merged'}")
        print(f"  model = transformers.AutoModelForCausalLM.from_pretrained({str(options.out / 'merged')!r})")


if __name__ == "__main__":
    main()
