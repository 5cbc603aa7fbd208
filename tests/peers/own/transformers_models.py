"""Run Transformers' common tests of models on two small ones: its source archive has no tests of any model."""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

PACKAGE = "tests_of_transformers"
SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}


def module(name, folder=None, **names):
    sys.modules[name] = made = types.ModuleType(name)
    made.__path__ = [str(folder)] if folder else []
    vars(made).update(names)


class Absent:
    """Stand for what the archive lacks, and tests of saving and loading do not use."""


module(PACKAGE, Path(os.environ["FASTRACK_PEERS_SOURCE"], "tests"))
module(f"{PACKAGE}.exporters")
module(f"{PACKAGE}.exporters.test_export", ExportTesterMixin=Absent)
module(f"{PACKAGE}.generation")
module(f"{PACKAGE}.generation.test_utils", GenerationTesterMixin=Absent)
common = importlib.import_module(f"{PACKAGE}.test_modeling_common")


class Maker:
    is_training = False

    def __init__(self, config):
        self.config = config

    def get_config(self):
        return self.config(**SIZES, max_position_embeddings=64, pad_token_id=0)

    def prepare_config_and_inputs_for_common(self):
        tokens = common.ids_tensor([2, 7], SIZES["vocab_size"])
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class LlamaTest(common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (LlamaModel, LlamaForCausalLM)
    model_tester = Maker(LlamaConfig)


class BertTest(common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (BertModel, BertForMaskedLM)
    model_tester = Maker(BertConfig)
