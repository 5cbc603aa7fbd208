"""Models for servers of others."""

import json


def write_llama(folder, seed):
    """Write a random Llama of transformers, of 1.1 MB in four shards, whose answers depend on all that it reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="300KB")


def write_tokenizer(folder, *, template=None, **special):
    """Write a tokenizer of transformers, of the words w0 to w511, for `write_llama`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", **special)
    made.chat_template = template
    made.save_pretrained(folder)


def write_adapter(folder):
    """Write a random LoRA adapter of the Llama, as PEFT does."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(5)
    folder.mkdir()
    sizes, tensors = {"q_proj": 128, "v_proj": 64}, {}
    for layer in range(2):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, 128)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, 4)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
