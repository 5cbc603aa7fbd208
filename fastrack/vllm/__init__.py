"""Sealed model folders in vLLM: ``load_format="fastrack"``.

vLLM finds `register` by itself, through the entry point ``vllm.general_plugins``: nothing has to be imported.

Examples
--------
>>> from vllm import LLM  # doctest: +SKIP
>>> llm = LLM("sealed", load_format="fastrack", model_loader_extra_config={"keys": "owner.key"})  # doctest: +SKIP
"""

__all__ = ["register"]


def register() -> None:
    """Register the load format ``fastrack`` in a process of vLLM. vLLM calls it in each.

    ``LLM(model=folder, load_format="fastrack")`` and ``vllm serve folder --load-format fastrack`` then serve a folder
    that `fastrack.seal_folder` made. Before vLLM reads anything of it, the process that starts the others authenticates
    its index, the headers of all weights, and every other file, and gives vLLM a private copy of the latter:
    configuration, tokenizer, chat template, and code with ``trust_remote_code``. Workers open the weights, one after
    the other, on their device. They take the folder that was authenticated and no other.

    ``model_loader_extra_config`` may have ``keys``, a key file or a provider as `fastrack.to_device` takes it, by
    default the environment's, ``anchor``, the path of an anchor, and ``require``, as `fastrack.Channel` takes it. They
    are names: secrets do not belong there, as vLLM logs it.

    LoRA adapters (``LoRARequest``, ``--lora-modules``) come from sealed folders, too, under the same keys and anchor;
    others are refused. vLLM reads their weights in host memory.

    Where this version of vLLM has not what the load format needs, a warning of the logger "fastrack" says so, and vLLM
    refuses the load format. Others load as ever.

    Examples
    --------
    >>> import fastrack.vllm
    >>> fastrack.vllm.register()  # doctest: +SKIP
    """
    try:
        from fastrack.vllm._front_end import install

        install()
    except (ImportError, AttributeError) as error:  # which would end vLLM for all load formats
        import logging

        logging.getLogger("fastrack").warning(
            "vLLM has no load format fastrack: expected a version like 0.32 or 0.33, got one without what it needs "
            "(%s). Install another version of either",
            error,
        )
