"""Causal models of transformers, with the tokenizers of their folders."""

import json
import logging

import torch
from torch import nn

import fastrack
from examples.serving.refusals import ModelError, RefusedError, refuse_missing, told

try:  # before the supervisor forks, so that all workers share the modules, as each would take seconds for its own
    import transformers
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel  # noqa: F401
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from fastrack.transformers import from_pretrained
except ImportError:  # a model of this example needs none
    transformers = None
else:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

LENGTH = 4096  # tokens of a request, at most: each of them is work that other clients wait for
NEW_TOKENS = 64  # of an answer in text
_LETTERS = 16  # a token of a request, at most

log = logging.getLogger("serving")


class CausalModel:
    """A model that guesses the next token, and goes on with a text if it has a tokenizer."""

    def __init__(self, module: nn.Module, tokenizer: object) -> None:
        self.module, self._tokenizer = module, tokenizer
        self._vocabulary = len(module.get_input_embeddings().weight)
        places = getattr(module.config.get_text_config(), "max_position_embeddings", None)
        self._length = min(places or LENGTH, LENGTH)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        made = self._generate(tokens, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
        return made.logits[0][0].float()

    def takes(self, tokens: torch.Tensor) -> bool:
        is_in_range = (tokens >= 0) & (tokens < self._vocabulary)
        return 0 < len(tokens) <= self._length and bool(is_in_range.all())

    def write(self, text: str) -> str:
        if self._tokenizer is None:
            raise RefusedError("text")
        if len(text) > _LETTERS * self._length:  # before a tokenizer works on it
            raise RefusedError("tokens")
        if self._tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        # A template writes the tokens that begin a text itself.
        given = self._tokenizer(text, add_special_tokens=not self._tokenizer.chat_template)
        tokens = torch.tensor(given["input_ids"], dtype=torch.long)
        if not self.takes(tokens) or len(tokens) == self._length:
            raise RefusedError("tokens")
        made = self._generate(tokens, max_new_tokens=min(NEW_TOKENS, self._length - len(tokens)))
        return self._tokenizer.decode(made[0, len(tokens) :], skip_special_tokens=True)

    def _generate(self, tokens: torch.Tensor, **options: object) -> object:
        rows = tokens[None]
        return self.module.generate(rows, attention_mask=torch.ones_like(rows), **options)


def load(folder: fastrack.SealedFolder, keys: fastrack.KeyRing, config: dict) -> tuple[nn.Module, dict]:
    """Return the weights of the causal model in a folder, and words to build it again."""
    if transformers is None:
        raise ModelError("architecture", f"{folder.path}: its model needs transformers. Install it")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if name is None or name not in (config.get("architectures") or [name]):
        text = f"{folder.path}: expected config.json to name a causal model of transformers, got another architecture"
        raise ModelError("architecture", text)
    cls = transformers.AutoModelForCausalLM
    module, found = from_pretrained(cls, folder, keys=keys, output_loading_info=True)
    refuse_missing(folder, found["missing_keys"])  # of which transformers makes random numbers
    words = {
        "config": json.loads(module.config.to_json_string(use_diff=False)),
        "generation": module.generation_config.to_dict(),
        "tokenizer": _tokenizer_of(folder, keys),
    }
    return module, words


def build(words: dict) -> CausalModel:
    """Return a model without weights."""
    config = transformers.CONFIG_MAPPING[words["config"]["model_type"]].from_dict(words["config"])
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    module.generation_config = transformers.GenerationConfig.from_dict(words["generation"])
    tokenizer = None
    if words["tokenizer"] is not None:
        content, options = words["tokenizer"]
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(content), **options)
    return CausalModel(module, tokenizer)


def _tokenizer_of(folder: fastrack.SealedFolder, keys: fastrack.KeyRing) -> tuple[str, dict] | None:
    """Return the tokenizer of a model as text, with its chat template, or None where there is none that can be used."""
    try:
        tokenizer = from_pretrained(transformers.AutoTokenizer, folder, keys=keys)
        options = {"chat_template": tokenizer.chat_template, **tokenizer.special_tokens_map}
        return tokenizer.backend_tokenizer.to_str(), options
    except (fastrack.AuthenticationError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - transformers raises many when files are missing
        log.warning("the model has no tokenizer (%s): requests of text are refused", told(error))
        return None
