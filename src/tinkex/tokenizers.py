"""Finds and loads a model's tokenizer: from a directory, the hub's cache or the hub.

Promises: a tokenizer is a transformers one and is loaded once, by one thread while others wait; an empty one
is refused; offline means no network access. transformers is imported with the first load.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tinkex.config import Settings
from tinkex.errors import InvalidInputError, TokenizerError

# By prefix of a model's name: the tokenizer of models whose own repository is closed or has none. Used when
# the server names no tokenizer. Add what your server's models need.
OVERRIDES: dict[str, str] = {"meta-llama/Llama-3": "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"}

# Names whose tokenizer is another model's, in any request.
ALIASES: dict[str, str] = {
    "baseten/Meta-Llama-3-tokenizer": "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    "moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5",
}

# Tokenizers that are Python code in their repository. Code from the hub runs at these revisions only.
PINNED: dict[str, str] = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}


def tokenizer_name(model_name: str, tokenizer_id: str | None = None) -> str:
    """The name of a model's tokenizer: the server's id, else an override, else the model's own name.

    >>> tokenizer_name("meta-llama/Llama-3.1-8B")
    'thinkingmachineslabinc/meta-llama-3-instruct-tokenizer'
    >>> tokenizer_name("Qwen/Qwen3-8B/long:beta")
    'Qwen/Qwen3-8B'
    """
    name = tokenizer_id or model_name
    if not name.startswith(("/", "./", "../", "~")) and not Path(name).exists():
        name = name.partition(":")[0]
        if not tokenizer_id and name.count("/") == 2:
            name = name.rpartition("/")[0]  # org/model/variant
    if not tokenizer_id:
        name = next((target for prefix, target in OVERRIDES.items() if name.startswith(prefix)), name)
    return ALIASES.get(name, name)


# -- loading ---------------------------------------------------------------------------------------------


def load_tokenizer(
    name: str,
    *,
    directory: str | Path | None = None,
    offline: bool | None = None,
    fetch: Callable[[str], Path | None] | None = None,
) -> Any:
    """Load the tokenizer `name`, as `tokenizer_name` returns it; the 32 used last are cached.

    With `directory`, only that directory is searched. Otherwise: TINKEX_TOKENIZER_DIR/name, the path `name`,
    the directory that `fetch(name)` returns, the hub's cache, and the hub unless `offline` (default:
    HF_HUB_OFFLINE).
    """
    settings = Settings.read()
    offline = settings.offline if offline is None else offline
    name = ALIASES.get(name, name)
    key = (name, str(directory), settings.tokenizer_dir, offline)

    def load() -> Any:
        place = _find(name, directory, settings.tokenizer_dir)
        if place is None and fetch is not None:
            place = fetch(name)
        return _read(name, place) if place is not None else _from_hub(name, offline, settings.tokenizer_dir)

    return _loaded.get(key, load)


def _find(name: str, directory: str | Path | None, root: Path | None) -> Path | None:
    """The local directory of the tokenizer, if there is one; `root` is TINKEX_TOKENIZER_DIR."""
    if directory is not None:
        place = Path(directory).expanduser()
        if not place.is_dir():
            raise InvalidInputError(f"no directory {str(place)!r} to load the tokenizer {name!r} from")
        return place
    # Names also come from servers: none may lead out of the root.
    inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
    if root is not None and inside and (root / name).is_dir():
        return root / name
    place = Path(name).expanduser()
    return place if place.is_dir() else None


def _read(name: str, place: Path) -> Any:
    more = {"trust_remote_code": True} if name in PINNED else {}
    try:
        tokenizer = _auto_tokenizer().from_pretrained(str(place), local_files_only=True, **more)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise TokenizerError(
            f"{place} holds no tokenizer that transformers can load ({_first_line(error)}); a directory "
            "needs at least tokenizer.json and tokenizer_config.json"
        ) from error
    return _not_empty(tokenizer, str(place))


def _not_empty(tokenizer: Any, place: str) -> Any:
    """Refuse a tokenizer without a vocabulary.

    From a config.json alone, transformers builds one that encodes every text to [].
    """
    if len(tokenizer) > len(set(tokenizer.all_special_ids)):
        return tokenizer
    files = ", ".join(sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()}))
    raise TokenizerError(
        f"{place} holds no tokenizer: it has no vocabulary ({files}). Put the tokenizer's files there to use "
        "text; training and sampling with token ids need none"
    )


def _from_hub(name: str, offline: bool, root: Path | None) -> Any:
    if name.startswith(("TML/", "thinkingmachines/")):
        return _from_package(name)
    more = {"trust_remote_code": True, "revision": PINNED[name]} if name in PINNED else {}
    auto_tokenizer = _auto_tokenizer()
    try:
        if not offline:
            return _not_empty(auto_tokenizer.from_pretrained(name, **more), name)
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # a bare type

        # Load it by directory: by name, transformers requests files that not every tokenizer has.
        place = snapshot_download(name, revision=PINNED.get(name), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        local = f"{root / name} (TINKEX_TOKENIZER_DIR)" if root else "TINKEX_TOKENIZER_DIR (not set)"
        hub = (
            "the hub's cache (offline: the hub itself was not asked)" if offline else "the hub and its cache"
        )
        raise TokenizerError(
            f"no tokenizer {name!r}: tried {local}, the path {name!r}, and {hub} ({_first_line(error)}). "
            f"To work offline, put its tokenizer.json and tokenizer_config.json into "
            f"TINKEX_TOKENIZER_DIR/{name}, or pass the directory that has them as directory=…"
        ) from error
    return _read(name, Path(place))


def _from_package(name: str) -> Any:
    """Load a tokenizer of Thinking Machines' own models from their package."""
    try:
        package: Any = importlib.import_module("tml_tokenizers.tinker_tokenizers")
        load = package.get_tinker_tokenizer
    except (ImportError, AttributeError):
        raise TokenizerError(
            f"the tokenizer of {name!r} is not on the hub: it comes with the package tml-renderers, which is "
            "not installed"
        ) from None
    if (tokenizer := load(name)) is None:
        raise TokenizerError(f"the installed tml_tokenizers has no tokenizer for {name!r}")
    return tokenizer


_importing = threading.Lock()  # transformers' lazy import is not thread-safe


def _auto_tokenizer() -> Any:
    with _importing:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise TokenizerError(
                "tokenizers need the transformers package: pip install 'tinkex[tokenizers]'"
            ) from error
        return AutoTokenizer


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _LoadCache:
    """An LRU cache that makes each value once among all threads; failures are not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._locks[key]:
            value = self._values[key] if key in self._values else make()
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
            return value


_loaded = _LoadCache(32)


def _reset_after_fork() -> None:
    """A load that another thread of the parent had begun never finishes in the child."""
    global _importing, _loaded
    _importing, _loaded = threading.Lock(), _LoadCache(32)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


# -- chat ------------------------------------------------------------------------------------------------


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **more: Any
) -> list[int]:
    """Return the tokens of a conversation, rendered by the tokenizer's own chat template.

    `more` is passed to the template: `tools=…`, `enable_thinking=False`, or `chat_template=…` to replace it.

    >>> render_chat(tokenizer, [{"role": "user", "content": "Hello!"}])  # doctest: +SKIP
    """
    if not messages:
        raise InvalidInputError("render_chat needs at least one message, like {'role': 'user', 'content': …}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidInputError(
                f"message {index} must be a mapping with a 'role', like {{'role': 'user', 'content': …}}, "
                f"got {message!r}"
            )
    if not (more.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise InvalidInputError(
            f"the tokenizer {name!r} has no chat template (base models often have none): use an "
            "instruction-tuned model's, pass chat_template=…, or tokenize your text with tokenizer.encode"
        )
    try:
        from jinja2.exceptions import TemplateError
    except ImportError:
        raise TokenizerError(
            "chat templates need the jinja2 package: pip install 'tinkex[tokenizers]'"
        ) from None
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **more,
        )
    except (TemplateError, TypeError, ValueError) as error:  # a template computes with its input
        raise InvalidInputError(f"the tokenizer's chat template refuses these messages: {error}") from error
