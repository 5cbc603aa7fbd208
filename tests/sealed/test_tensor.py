"""Sealed tensors in memory: what was sealed comes out, or nothing and an error that names the place."""

import copy
import json
import pickle
import traceback
from itertools import permutations

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import by_hand, engines
from helpers.cases import each
from helpers.processes import run_python
from helpers.tampering import tampered
from hypothesis import given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import AuthenticationError, FormatError, Key, KeyRing, SealedRows, SealedTensor, UnknownKeyError
from fastrack._devices.base import BAD_PLAN
from fastrack._sealed import contexts, message_headers
from fastrack._sealed.messages import OpenMessage, bad_chunk
from fastrack._tensors import arrays, dtypes
from fastrack.errors import ClosedError
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, chunk_offset

SECRET = bytes(range(60, 92))
PLAIN = np.random.default_rng(7).integers(1, 256, 2 * CHUNK_SIZE + 100, dtype=np.uint8)  # three chunks, no zero in them


@pytest.fixture(scope="module")
def key():
    return Key.from_bytes(SECRET)


@pytest.fixture(scope="module")
def sealed(key):
    return fastrack.seal(PLAIN, key, name="images")


@pytest.fixture
def key_path(tmp_path, key):
    key.save(tmp_path / "owner.key")
    return tmp_path / "owner.key"


def with_message(sealed, message, **changes):
    return SealedTensor(sealed.context._replace(**changes), np.frombuffer(bytes(message), np.uint8), sealed.key_id)


def with_claim(sealed, **changes):
    return with_message(sealed, sealed.message, **changes)


def parts(sealed):
    """The header, then each chunk."""
    message = bytes(sealed.message)
    return message[:HEADER_SIZE], *(
        message[start : start + SEALED_CHUNK_SIZE] for start in range(HEADER_SIZE, len(message), SEALED_CHUNK_SIZE)
    )


def open_into(memory, sealed, ring):
    if isinstance(sealed, SealedRows):
        (part,) = sealed.slices()
        with OpenMessage(part.tensor, ring) as opened:
            opened.gather(part.ranges(), memory)
    else:
        with OpenMessage(sealed, ring) as opened:
            opened.read(memory)


def refusal(sealed, key):
    """The error of a message that must not open. Memory that was given to be filled holds zeros by then."""
    with pytest.raises(AuthenticationError) as caught:
        fastrack.unseal(sealed, key)
    error = caught.value
    assert error.tensor == sealed.name
    assert repr(sealed.name) in str(error)
    if error.chunk is not None:
        memory = np.full(sealed.nbytes, 0xAA, np.uint8)
        with pytest.raises(AuthenticationError) as again:
            open_into(memory, sealed, KeyRing(key))
        assert again.value.chunk == error.chunk
        assert not memory.any()
    return error


# What was sealed comes out


@each("bits", [128, 256])
@each("size", [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE, 3 * CHUNK_SIZE + 5])
def test_what_was_sealed_comes_out(bits, size):
    key = Key.generate(bits)
    plain = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    sealed = fastrack.seal(plain, key)
    assert sealed.message.nbytes == 56 + size + 16 * (size // CHUNK_SIZE + 1)
    assert np.array_equal(fastrack.unseal(sealed, key, framework="numpy"), plain)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 70_000), st.sampled_from([16, 32]), st.text(max_size=20))
def test_any_size_under_any_name_comes_out(size, length, name):
    plain = np.arange(size, dtype=np.uint32).astype(np.uint8)
    key = Key.generate(8 * length)
    try:
        sealed = fastrack.seal(plain, key, name=name)
    except FormatError:
        assert any("\ud800" <= letter <= "\udfff" for letter in name)
        return
    assert np.array_equal(fastrack.unseal(sealed, key, framework="numpy"), plain)


@given(st.text(), st.sampled_from(sorted(dtypes.BITS)), st.lists(st.integers(0, 2**60)), st.text(max_size=32))
def test_a_context_is_canonical_json(name, dtype, shape, file):
    fields = {"dtype": dtype, "file": file, "name": name, "shape": shape}
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    context = contexts.MessageContext(name, dtype, tuple(shape), file)
    assert context.encode() == b"fastrack/tensor@1\0" + canonical.encode()


NUMPY_DTYPES = [name for name in dtypes.BITS if not name.startswith(("F4", "F6"))]
TORCH_DTYPES = [name for name in dtypes.BITS if not name.startswith("F6")]


@each("name", NUMPY_DTYPES)
@each("shape", [(), (0,), (7,), (0, 3), (3, 5, 2)])
def test_every_numpy_dtype_comes_out(key, name, shape):
    memory = np.random.default_rng(1).integers(0, 2, dtypes.nbytes(name, shape), dtype=np.uint8)
    array = memory.view(dtypes.to_numpy(name)).reshape(shape)
    sealed = fastrack.seal(array, key)
    assert (sealed.dtype, sealed.shape, sealed.nbytes) == (name, shape, array.nbytes)
    back = fastrack.unseal(sealed, key, framework="numpy")
    assert (back.dtype, back.shape) == (array.dtype, shape)
    assert back.tobytes() == array.tobytes()


@each("name", TORCH_DTYPES)
@each("shape", [(1,), (0,), (7,), (0, 3), (3, 5, 2)])
def test_every_torch_dtype_comes_out(key, name, shape):
    dtype = dtypes.to_torch(name)
    size = int(np.prod(shape)) * dtype.itemsize
    tensor = torch.randint(0, 2, (size,), dtype=torch.uint8).view(dtype).reshape(shape)
    back = fastrack.unseal(fastrack.seal(tensor, key), key, framework="torch")
    assert (back.dtype, back.shape) == (dtype, shape)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@each(
    "array",
    [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(12)[::-1],
        np.arange(24).reshape(4, 6)[::-2, 1::2],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.arange(4, dtype=ml_dtypes.bfloat16)[::2],
    ],
)
def test_any_layout_comes_out_dense(key, array):
    back = fastrack.unseal(fastrack.seal(array, key), key, framework="numpy")
    assert np.array_equal(back, array)
    assert back.flags.c_contiguous


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(2.5), torch.ones(3, requires_grad=True), torch.tensor([1 + 2j], dtype=torch.complex64).conj()],
    ids=["scalar", "with gradient", "conjugated"],
)
def test_a_tensor_comes_out_resolved_and_without_a_gradient(key, tensor):
    back = fastrack.unseal(fastrack.seal(tensor, key), key)
    assert torch.equal(back, tensor.detach().resolve_conj())
    assert not back.requires_grad
    assert not back.is_conj()


UNSEALABLE = [np.array([None, 1]), np.zeros(3, ">f4"), np.array(["text"]), np.zeros(3, "f4,i4"), np.zeros(3, complex)]
UNSEALABLE += [torch.zeros(3, dtype=torch.complex128), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()]
UNSEALABLE += [torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0], [1.0, 2.0], "text", None]


@each("tensor", UNSEALABLE)
def test_what_cannot_be_sealed_is_refused(key, tensor):
    with pytest.raises(TypeError):
        fastrack.seal(tensor, key)


def test_no_two_messages_are_alike(key):
    messages = [bytes(fastrack.seal(PLAIN, key).message) for _ in range(20)]
    assert len({message[:24] for message in messages}) == 20
    assert len({message[HEADER_SIZE : HEADER_SIZE + 32] for message in messages}) == 20


def test_the_result_is_of_the_framework_asked_for_and_can_be_written_to(key, sealed):
    for framework, kind in (("numpy", np.ndarray), ("torch", torch.Tensor), (None, torch.Tensor)):
        result = fastrack.unseal(sealed, key, framework=framework)
        assert isinstance(result, kind)
        result[0] = 1
        assert np.array_equal(fastrack.unseal(sealed, key, framework="numpy"), PLAIN)


def test_the_result_is_of_numpy_where_torch_is_not_installed(key, sealed, hide):
    hide("torch")
    assert isinstance(fastrack.unseal(sealed, key), np.ndarray)


def test_a_result_of_torch_says_what_to_install_where_it_is_absent():
    said = run_python(WITHOUT_TORCH)
    told = "a torch.Tensor needs torch, which is not installed: pip install 'fastrack-io[torch]'"
    assert said.splitlines() == [f"torch {told}"] * 2


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import numpy, fastrack
key = fastrack.Key.generate()
sealed = fastrack.seal(numpy.ones(3), key)
for open_it in (fastrack.unseal, fastrack.to_device):
    try:
        open_it(sealed, keys=key, framework="torch")
    except ModuleNotFoundError as error:
        print(error.name, error)
"""


# Keys


def test_a_key_may_be_given_in_many_ways(key, key_path, sealed, monkeypatch):
    other = Key.generate()
    for keys in (key, key_path, str(key_path), [other, key], (key for _ in "1"), [[other], key_path], KeyRing(key)):
        assert np.array_equal(fastrack.unseal(sealed, keys, framework="numpy"), PLAIN)
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(key_path))
    assert np.array_equal(fastrack.unseal(sealed, framework="numpy"), PLAIN)


def test_a_wiped_key_opens_and_seals_nothing(sealed):
    key = Key.from_bytes(SECRET)
    key.wipe()
    with pytest.raises(ClosedError, match=key.id):
        fastrack.unseal(sealed, key)
    with pytest.raises(ClosedError):
        fastrack.seal(PLAIN, key)


# Altered messages


def test_every_flipped_bit_of_the_header_is_refused(key, sealed):
    message = bytearray(sealed.message)
    ring = KeyRing(key)
    for bit in range(8 * HEADER_SIZE):
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AuthenticationError, match="header") as caught:
            OpenMessage(with_message(sealed, message), ring)
        assert (caught.value.tensor, caught.value.chunk) == ("images", None)
        message[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.nightly)])  # each byte, and each bit
def test_a_flipped_bit_anywhere_in_the_chunks_is_refused(key, sealed, step):
    # By the engine itself, chunk by chunk: a third of a million calls that would take minutes one layer up.
    chunks = sealed.chunks.copy()
    engine = engines.make(threads=1)
    message_key = message_headers.open_header(sealed, KeyRing(key))
    schedule = engine.expand_key(message_key)
    for chunk in range(3):
        source = chunks[chunk * SEALED_CHUNK_SIZE : (chunk + 1) * SEALED_CHUNK_SIZE]
        target = np.empty(source.size - TAG_SIZE, np.uint8)
        for bit in range(0, 8 * source.size, step):
            target.fill(0xAA)  # zeros over zeros show nothing
            source[bit // 8] ^= 1 << bit % 8
            assert engine.open_run(schedule, source, target, chunk) == chunk
            assert not target.any()
            source[bit // 8] ^= 1 << bit % 8
        assert engine.open_run(schedule, source, target, chunk) is None
        assert np.array_equal(target, PLAIN[chunk * CHUNK_SIZE : (chunk + 1) * CHUNK_SIZE])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_flipped_bit_names_its_tensor_and_chunk(key, sealed, framework):
    for chunk in range(3):
        content = len(parts(sealed)[chunk + 1])
        for place in (0, content // 2, content - TAG_SIZE - 1, content - TAG_SIZE, content - 1):
            altered = tampered(sealed, chunk_offset(chunk) + place)
            with pytest.raises(AuthenticationError) as caught:
                fastrack.unseal(altered, key, framework=framework)
            assert (caught.value.tensor, caught.value.chunk) == ("images", chunk)
            assert refusal(altered, key).chunk == chunk


@pytest.mark.parametrize("chunk", [3, BAD_PLAN])
def test_an_error_about_a_chunk_or_a_plan_is_short_whatever_the_name(chunk):
    error = bad_chunk("x" * 10_000, chunk)
    assert len(str(error)) < 500
    assert error.tensor == "x" * 10_000


def test_the_first_of_several_bad_chunks_is_named(key, sealed):
    assert refusal(tampered(sealed, chunk_offset(2), chunk_offset(1)), key).chunk == 1


def test_every_truncation_is_refused(sealed):
    message = np.frombuffer(sealed.message, np.uint8)
    for size in range(message.size):
        with pytest.raises(FormatError, match="'images'"):
            SealedTensor(sealed.context, message[:size], sealed.key_id)


def test_every_extension_is_refused(sealed):
    message = np.append(np.frombuffer(sealed.message, np.uint8), np.zeros(2 * SEALED_CHUNK_SIZE, np.uint8))
    for extra in (*range(1, 100), CHUNK_SIZE, SEALED_CHUNK_SIZE, 2 * SEALED_CHUNK_SIZE):
        with pytest.raises(FormatError):
            SealedTensor(sealed.context, message[: len(sealed.message) + extra], sealed.key_id)


@each("size", [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 5, 2 * CHUNK_SIZE, 2 * CHUNK_SIZE + 99])
def test_a_truncation_with_a_shape_to_fit_is_refused(key, sealed, size):
    message = sealed.message[: HEADER_SIZE + size + TAG_SIZE * (size // CHUNK_SIZE + 1)]
    cut = with_message(sealed, message, shape=(size,))
    assert refusal(cut, key).chunk is None


@pytest.fixture(scope="module")
def long(key):
    return fastrack.seal(np.arange(4 * CHUNK_SIZE, dtype=np.uint32).astype(np.uint8), key, name="long")


def test_every_other_order_of_chunks_is_refused(key, long):
    header, *chunks, end = parts(long)
    for order in permutations(range(4)):
        shuffled = with_message(long, b"".join([header, *(chunks[i] for i in order), end]))
        if order == (0, 1, 2, 3):
            assert fastrack.unseal(shuffled, key).shape == long.shape
            continue
        moved = next(i for i in range(4) if order[i] != i)
        assert refusal(shuffled, key).chunk == moved


def test_every_repeated_chunk_is_refused(key, long):
    header, *chunks, end = parts(long)
    for place in range(4):
        for other in set(range(4)) - {place}:
            altered = [*chunks]
            altered[place] = chunks[other]
            assert refusal(with_message(long, b"".join([header, *altered, end])), key).chunk == place


def test_every_removed_or_added_chunk_is_refused(key, long):
    header, *chunks, end = parts(long)
    for place in range(4):
        rest = [*chunks[:place], *chunks[place + 1 :]]
        removed = b"".join([header, *rest, end])
        with pytest.raises(FormatError):
            with_message(long, removed)
        shorter = with_message(long, removed, shape=(3 * CHUNK_SIZE,))
        assert refusal(shorter, key).chunk is None
        # With another chunk in the gap at the end, the size fits again.
        filled = b"".join([header, *rest, chunks[place], end])
        assert place == 3 or refusal(with_message(long, filled), key).chunk == place
        with pytest.raises(FormatError):
            with_message(long, b"".join([header, *chunks, chunks[place], end]))


def test_a_chunk_from_another_message_of_the_same_key_is_refused(key, long):
    other = fastrack.seal(fastrack.unseal(long, key), key, name="long")
    header, *chunks = parts(long)
    for place, foreign in enumerate(parts(other)[1:]):
        spliced = [*chunks]
        spliced[place] = foreign
        assert refusal(with_message(long, b"".join([header, *spliced])), key).chunk == place


def test_the_header_of_another_message_is_refused(key, long):
    other = fastrack.seal(fastrack.unseal(long, key), key, name="long")
    swapped = parts(other)[0] + b"".join(parts(long)[1:])
    assert refusal(with_message(long, swapped), key).chunk is None
    # Even where the header is sound under its own claim, its chunks are not those.
    assert refusal(with_message(other, swapped), key).chunk == 0


@each(
    "change",
    [
        *({"name": name} for name in ("labels", "images ", "")),
        *({"dtype": dtype} for dtype in ("I8", "BOOL")),
        *({"shape": shape} for shape in ((2, CHUNK_SIZE + 50), (1, PLAIN.size), (PLAIN.size, 1))),
        *({"file": file} for file in ("0" * 32, "")),
    ],
)
def test_a_claim_it_was_not_sealed_under_is_refused(key, sealed, change):
    error = refusal(with_claim(sealed, **change), key)
    assert error.chunk is None
    assert "check the key first" in str(error)


@each(("dtype", "shape"), [("F32", (2 * CHUNK_SIZE + 100,)), ("U8", (5,)), ("F99", (3,)), ("U8", (-1,))])
def test_a_claim_of_another_size_is_no_sealed_tensor(sealed, dtype, shape):
    with pytest.raises(FormatError):
        with_claim(sealed, dtype=dtype, shape=shape)


def test_another_key_under_the_id_of_the_right_one_is_refused(sealed):
    for other in (Key.generate(256), Key.generate(128)):
        posing = SealedTensor(sealed.context, np.frombuffer(sealed.message, np.uint8), other.id)
        assert refusal(posing, other).chunk is None


# Rows


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(3).integers(1, 1 << 16, (100, 1500), dtype=np.uint16)  # 3000 bytes a row, 19 chunks


@pytest.fixture(scope="module")
def sealed_table(key, table):
    return fastrack.seal(table, key, name="table")


def test_rows_come_out_in_the_order_that_was_asked(key, table, sealed_table):
    chosen = [99, 0, -1, 5, 5, 50]
    rows = sealed_table[chosen]
    assert (rows.name, rows.dtype, rows.shape, rows.nbytes) == ("table", "U16", (6, 1500), 18000)
    assert rows.key_id == key.id
    assert np.array_equal(fastrack.unseal(rows, key, framework="numpy"), table[chosen])
    assert torch.equal(fastrack.unseal(rows, key, framework="torch"), torch.from_numpy(table[chosen]))


def test_a_tensor_is_a_sequence_of_its_rows(key, table, sealed_table):
    assert len(sealed_table) == 100
    rows = list(sealed_table)
    assert len(rows) == 100
    assert np.array_equal(fastrack.unseal(rows[42], key, framework="numpy"), table[42])
    assert len(sealed_table[3:7]) == 4
    assert len(sealed_table[3]) == 1500


def test_one_number_of_a_vector_is_a_row_too(key):
    row = fastrack.seal(np.arange(10.0), key)[-1]
    assert row.shape == ()
    assert fastrack.unseal(row, key).item() == 9
    with pytest.raises(TypeError, match="one dimension"):
        len(row)


def test_a_bad_chunk_matters_only_to_the_rows_it_holds(key, table, sealed_table):
    for chunk in range(19):
        altered = tampered(sealed_table, chunk_offset(chunk) + 7)
        held = [
            row for row in range(100) if row * 3000 < (chunk + 1) * CHUNK_SIZE and (row + 1) * 3000 > chunk * CHUNK_SIZE
        ]
        others = [row for row in range(100) if row not in held]
        assert np.array_equal(fastrack.unseal(altered[others], key, framework="numpy"), table[others])
        for rows in (altered[held], altered[held[0]], altered[:], altered[[*others, held[-1]]]):
            assert refusal(rows, key).chunk == chunk


def test_rows_of_a_tensor_with_another_header_are_refused(key, sealed_table):
    for rows in ([], slice(0, 3), 7):
        assert refusal(with_claim(sealed_table, name="other")[rows], key).chunk is None


def test_no_rows_are_an_empty_array(key, sealed_table):
    assert fastrack.unseal(sealed_table[[]], key).shape == (0, 1500)
    assert fastrack.unseal(fastrack.seal(np.empty((0, 5)), key)[:], key).shape == (0, 5)
    assert fastrack.unseal(fastrack.seal(np.empty((5, 0)), key)[[1, 2]], key).shape == (2, 0)


# What a handle shows, and what it does not


def test_a_handle_says_what_it_is(sealed, key):
    assert (sealed.name, sealed.dtype, sealed.shape) == ("images", "U8", (2 * CHUNK_SIZE + 100,))
    assert repr(sealed) == f"<SealedTensor 'images' U8 [32868] key {key.id[:8]}>"
    assert repr(sealed[:3]) == "<SealedRows of 'images' U8 [3]>"


def test_a_message_cannot_be_written_to(sealed):
    assert sealed.message.readonly
    with pytest.raises(TypeError):
        sealed.message[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        sealed.chunks[0] = 0


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_sealed_tensor_travels_without_its_key_or_its_plaintext(sealed, key, protocol):
    data = pickle.dumps(sealed, protocol)
    assert SECRET not in data
    assert SECRET.hex().encode() not in data
    assert PLAIN[:32].tobytes() not in data
    back = pickle.loads(data)
    assert (back.context, back.key_id, back.nbytes) == (sealed.context, sealed.key_id, sealed.nbytes)
    assert bytes(back.message) == bytes(sealed.message)
    assert np.array_equal(fastrack.unseal(back, key, framework="numpy"), PLAIN)
    with pytest.raises(UnknownKeyError):
        fastrack.unseal(back)


def test_rows_travel_too(sealed_table, key):
    for rows in (sealed_table[5], sealed_table[::-3], sealed_table[[1, 1, 2]]):
        back = pickle.loads(pickle.dumps(rows))
        assert isinstance(back, SealedRows)
        assert np.array_equal(fastrack.unseal(back, key), fastrack.unseal(rows, key))


def test_a_pickle_that_was_cut_short_is_refused(sealed):
    hook, (name, claim, message, key_id, binding) = sealed.__reduce__()
    with pytest.raises(FormatError, match="cut short"):
        hook(name, claim, message[:-1], key_id, binding)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_opens_like_the_original(sealed, key, duplicate):
    for handle in (sealed, sealed[1:]):
        opened = fastrack.unseal(duplicate(handle), key, framework="numpy")
        assert np.array_equal(opened, PLAIN[-opened.size :])


def shows_a_secret(text):
    secrets = (SECRET, PLAIN[:16].tobytes(), PLAIN[-16:].tobytes())
    return any(
        form in text
        for secret in secrets
        for form in (secret.hex(), repr(secret)[2:-1], repr(bytearray(secret))[12:-2], str(list(secret))[1:-1])
    )


def test_no_error_shows_a_secret_even_with_the_values_of_variables(sealed, key):
    assert all(map(shows_a_secret, [SECRET.hex(), repr(SECRET), repr(bytearray(SECRET)), repr(list(SECRET))]))
    first, last = tampered(sealed, 0), tampered(sealed, -1)
    wiped = Key.from_bytes(SECRET)
    wiped.wipe()
    failures = [
        lambda: fastrack.unseal(last, key),
        lambda: fastrack.unseal(last[-1], key),
        lambda: fastrack.unseal(first, key),
        lambda: fastrack.unseal(first, [Key.generate()]),
        lambda: fastrack.unseal(sealed, wiped),
        lambda: fastrack.unseal(sealed, key, framework="cupy"),
        lambda: fastrack.seal("text", key),
        lambda: fastrack.seal(torch.zeros(3, device="meta"), key),
        lambda: fastrack.seal(np.zeros(3), key, "\ud800"),
        lambda: fastrack.seal(np.zeros(3), wiped),
        lambda: pickle.dumps((sealed, key)),
    ]
    for fail in failures:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            fail()
        told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        frames = told.stack[1:]  # the first is this test, which has the plaintext in its hands
        told.stack = traceback.StackSummary.from_list(frames)
        assert not shows_a_secret("".join(told.format()) + repr(caught.value) + str(caught.value))


# One run of chunks at a time


def test_a_run_of_chunks_opens_on_its_own(key, long):
    plain = fastrack.unseal(long, key, framework="numpy")
    with OpenMessage(long, KeyRing(key)) as opened:
        for first, size in [(0, CHUNK_SIZE), (1, 2 * CHUNK_SIZE), (3, CHUNK_SIZE), (0, 4 * CHUNK_SIZE), (4, 0)]:
            memory = np.full(size, 0xAA, np.uint8)
            opened.read(memory, first)
            assert np.array_equal(memory, plain[first * CHUNK_SIZE : first * CHUNK_SIZE + size])
            assert opened.verify_run(first, size) is None


def test_a_bad_chunk_is_found_in_its_run_alone(key, long):
    with OpenMessage(tampered(long, chunk_offset(2)), KeyRing(key)) as opened:
        assert opened.verify_run(0, 2 * CHUNK_SIZE) is None
        assert opened.verify_run(1, 2 * CHUNK_SIZE) == 2
        memory = np.full(2 * CHUNK_SIZE, 0xAA, np.uint8)
        with pytest.raises(AuthenticationError, match="chunk 2") as caught:
            opened.read(memory, 1)
        assert caught.value.chunk == 2
        assert not memory.any()


def test_an_empty_last_chunk_is_checked_as_well(key, long):
    altered = tampered(long, -1)
    assert refusal(altered, key).chunk == 4
    with OpenMessage(altered, KeyRing(key)) as opened:
        assert opened.verify_run(3, CHUNK_SIZE) == 4


# Interoperation


@each("bits", [128, 256])
@each("name", ["images", "", 'a "quoted" \\ name', "größe 数据", "two\nlines\t\x7f\x01"])
def test_a_message_opens_by_hand(bits, name):
    secret = bytes(range(bits // 8))
    sealed = fastrack.seal(PLAIN.reshape(2, -1), Key.from_bytes(secret), name=name)
    context = by_hand.context(name, "U8", (2, PLAIN.size // 2), sealed.context.file)
    assert by_hand.unseal(secret, context, sealed.message) == PLAIN.tobytes()


@each("bits", [128, 256])
@each(("dtype", "shape"), [("U8", (PLAIN.size,)), ("F32", (PLAIN.size // 4,)), ("U8", (2, 2, 8217))])
def test_a_message_made_by_hand_opens(bits, dtype, shape, sealed):
    secret = bytes(range(bits // 8))
    key = Key.from_bytes(secret)
    message = by_hand.seal(secret, by_hand.context("x", dtype, shape, "f" * 32), PLAIN.tobytes())
    claim = sealed.context._replace(name="x", dtype=dtype, shape=shape, file="f" * 32)
    made = SealedTensor(claim, np.frombuffer(message, np.uint8), key.id)
    assert fastrack.unseal(made, key, framework="numpy").tobytes() == PLAIN.tobytes()


def test_rows_of_a_batch_leave_nothing_in_memory_after_an_error(key, monkeypatch):
    taken = []
    monkeypatch.setattr(arrays, "empty_bytes", lambda size: taken.append(np.empty(size, np.uint8)) or taken[-1])
    good, bad = (fastrack.seal(PLAIN.reshape(-1, 4), key, name) for name in ("good", "bad"))
    for place, allocations in ((-1, 1), (0, 0)):  # in the chunk, and in the header
        taken.clear()
        with pytest.raises(AuthenticationError) as caught:
            fastrack.unseal(fastrack.collate([good, tampered(bad, place)]), key)
        assert caught.value.tensor == "bad"
        assert len(taken) == allocations
        assert not any(memory.any() for memory in taken)

    original = OpenMessage.gather

    def interrupted(opened, *arguments):
        if opened._sealed is bad:
            raise KeyboardInterrupt
        original(opened, *arguments)

    monkeypatch.setattr(OpenMessage, "gather", interrupted)
    taken.clear()
    with pytest.raises(KeyboardInterrupt):
        fastrack.unseal(fastrack.collate([good, bad]), key)
    assert len(taken) == 1
    assert not any(memory.any() for memory in taken)


def test_an_error_does_not_repeat_a_long_name_at_length():
    key = Key.generate()
    sealed = fastrack.seal(np.arange(3), key, name="x" * 10**6)
    for altered in (tampered(sealed, 0), tampered(sealed, -1)):
        with pytest.raises(AuthenticationError) as caught:
            fastrack.unseal(altered, key)
        assert len(str(caught.value)) < 600
        assert caught.value.tensor == sealed.name
