"""Tokenizers from folders whose files are all sealed: the same ids as from the plain ones, whatever their names."""

import ast
import base64
import io
import json
from pathlib import Path

import pytest
from helpers.cases import each

transformers = pytest.importorskip("transformers", minversion="5")

from transformers import AutoTokenizer  # noqa: E402 - it may be absent

from fastrack import Key, load_folder, mount_folder, seal_folder  # noqa: E402
from fastrack.transformers import from_pretrained  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
KEY = Key.from_bytes(bytes(range(32)))
TEXT = "the quick lazy fox"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
BYTES = [bytes([number]) for number in range(256)]
MERGES = [b"th", b"the", b"ox", b"fox", b"qu", b"la"]
# Of code beside a model, and of Mistral's mode of vLLM.
MORE = ("tiktoken.model", "tokenizer.model.v3", "tokenizer.mm.model.v7", "ice_text.model", "any.vocab", "vocab")


def sentence_piece(model_type):
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    written = io.BytesIO()
    lines = iter([f"{' '.join(WORDS)} {number}" for number in range(400)])
    ids = {"unk_id": 3, "bos_id": 1, "eos_id": 2, "pad_id": 0}
    trainer.train(
        sentence_iterator=lines, model_writer=written, vocab_size=50, model_type=model_type, minloglevel=2, **ids
    )
    return written.getvalue()


def tiktoken_ranks():
    return b"".join(base64.b64encode(word) + f" {rank}\n".encode() for rank, word in enumerate([*BYTES, *MERGES]))


def merged_words():
    """Return the codes and the vocabulary of fastBPE."""
    codes = "".join(f"{pair} 9\n" for pair in ("t h", "th e</w>", "o x</w>", "f ox</w>"))
    return codes.encode(), "".join(f"{word} 5\n" for word in ("the", "fox", "q@@", "u@@", "i@@", "c@@", "k")).encode()


def word_pieces():
    return "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "qu", "##ick"]).encode()


def byte_pairs():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = list(bytes_to_unicode().values())
    vocabulary = {word: number for number, word in enumerate([*characters, "th", "the", "ox", "fox", "<|endoftext|>"])}
    return json.dumps(vocabulary).encode(), b"#version: 0.2\nt h\nth e\no x\nf ox\n"


KINDS = {
    "deberta-v2": ("DebertaV2Tokenizer", lambda: {"spm.model": sentence_piece("unigram")}),
    "t5": ("T5Tokenizer", lambda: {"spiece.model": sentence_piece("unigram")}),
    "llama": ("LlamaTokenizer", lambda: {"tokenizer.model": sentence_piece("bpe")}),
    "bertweet": ("BertweetTokenizer", lambda: dict(zip(("bpe.codes", "vocab.txt"), merged_words(), strict=True))),
    "gpt2": ("GPT2Tokenizer", lambda: dict(zip(("vocab.json", "merges.txt"), byte_pairs(), strict=True))),
    "bert": ("BertTokenizer", lambda: {"vocab.txt": word_pieces()}),
}


def write(folder, kind):
    name, make = KINDS[kind]
    folder.mkdir()
    for file, content in make().items():
        (folder / file).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    return folder


def ids(tokenizer):
    return tokenizer(TEXT)["input_ids"]


@each("kind", KINDS)
def test_a_tokenizer_has_the_ids_that_it_has_unsealed(tmp_path_factory, kind):
    tmp_path = tmp_path_factory.mktemp(kind)
    plain = write(tmp_path / "plain", kind)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    expected = ids(tokenizer)
    assert len(set(expected)) > 2  # not all unknown
    seal_folder(plain, tmp_path / "sealed", KEY)
    assert load_folder(tmp_path / "sealed", KEY).plain_names == []
    with mount_folder(tmp_path / "sealed", KEY) as path:
        assert ids(AutoTokenizer.from_pretrained(path)) == expected
    loaded = from_pretrained(AutoTokenizer, tmp_path / "sealed", keys=KEY)
    assert ids(loaded) == expected
    tokenizer.save_pretrained(tmp_path / "again")
    loaded.save_pretrained(tmp_path / "saved")  # the folder stays while it lives
    again, saved = (ids(AutoTokenizer.from_pretrained(tmp_path / name)) for name in ("again", "saved"))
    assert saved == again


def tiktoken_ids(path):
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(path))
    return tiktoken.Encoding("own", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={}).encode(TEXT)


def tekken():
    words = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate([*BYTES, *MERGES])
    ]
    config = {"pattern": r"\S+|\s+", "num_vocab_tokens": len(words), "version": "v3"}
    config |= {"default_vocab_size": len(words) + 20, "default_num_special_tokens": 20}
    return json.dumps({"config": config, "vocab": words}).encode()


def tekken_ids(path):
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    return mistral.Tekkenizer.from_file(path).encode(TEXT, bos=True, eos=False)


@each("name", ["tiktoken.model", "tekken.json"])
def test_vocabularies_of_other_libraries_are_read_as_from_the_plain_file(tmp_path_factory, name):
    tmp_path = tmp_path_factory.mktemp(name)
    make, encode = {"tiktoken.model": (tiktoken_ranks, tiktoken_ids), "tekken.json": (tekken, tekken_ids)}[name]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / name).write_bytes(make())
    expected = encode(tmp_path / "plain" / name)
    assert 1 < len(expected) < len(TEXT)  # merged
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    assert load_folder(tmp_path / "sealed", KEY).plain_names == []
    with mount_folder(tmp_path / "sealed", KEY) as path:
        assert encode(f"{path}/{name}") == expected


def names_of_vocabularies():
    """Return the names of files that the sources of transformers give to vocabularies."""
    names = set()
    for path in Path(transformers.__file__).parent.rglob("tokenization_*.py"):
        constants = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            if targets and isinstance(node.value, ast.Constant):
                constants |= dict.fromkeys(targets, node.value.value)
            if {"VOCAB_FILES_NAMES", "vocab_files_names"} & set(targets) and isinstance(node.value, ast.Dict):
                values = node.value.values
                names |= {constants[value.id] if isinstance(value, ast.Name) else value.value for value in values}
    return names


def test_no_name_of_a_vocabulary_is_lost(tmp_path):
    names = {*names_of_vocabularies(), *MORE}
    assert len(names) > 25
    (tmp_path / "plain").mkdir()
    for number, name in enumerate(sorted(names)):
        (tmp_path / "plain" / name).write_bytes(bytes([number]) * 300)
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    assert load_folder(tmp_path / "sealed", KEY).plain_names == []
    lost = []
    with mount_folder(tmp_path / "sealed", KEY) as path:
        for name in names:
            found = Path(path, name)
            assert found.is_file()
            if found.stat().st_mode & 0o777 == 0:
                lost.append(name)
            else:
                assert found.read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert all(Path(name).suffix in {".bin", ".pkl"} for name in lost), lost
