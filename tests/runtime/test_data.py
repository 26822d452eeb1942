import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzers.errors import InputError
from runtime.data import check_data
from runtime.packing import Dataset, Row, load_dataset, micro_batches, pack
from runtime.tokens import IGNORED, Example, Tokens, tokenise_once
from tests.runtime.runs import EXAMPLES


@pytest.fixture(scope="module")
def tokenizer():
    from runtime.build import build_tokenizer

    return build_tokenizer(str(EXAMPLES / "models" / "tiny-kimi-linear"))


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    return path


GOOD = '{"prompt": "a robin is", "completion": " a bird"}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ('{"text": "a', "broken JSON"),
        ("[" * 100_000, "broken JSON"),
        ("\udc80".encode("utf-8", "surrogateescape").decode("latin-1"), "broken JSON"),
        ("3", "not a JSON object"),
        ('{"question": "a"}', "nothing to learn"),
        ('{"text": ""}', "nothing to learn"),
        ('{"prompt": "a"}', "'prompt' and 'completion'"),
        ('{"messages": []}', "no assistant"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"text": "half of a pair: \\ud800"}', "nothing to learn"),
        ('{"prompt": "a", "completion": "\\udfff"}', "'prompt' and 'completion'"),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path, line, fault):
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(InputError) as caught:
        check_data(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: line 2: ")
    assert fault in message
    assert "\n" not in message


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match="line 2"):
        check_data(path)


def test_an_empty_or_absent_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="is empty"):
        check_data(write(tmp_path))
    with pytest.raises(InputError, match="does not exist"):
        check_data(tmp_path / "absent.jsonl")


def test_a_last_line_without_newline_counts(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}")
    assert check_data(path) == 2


def test_only_what_the_assistant_says_is_learned(tmp_path, tokenizer):
    line = (
        '{"messages": [{"role": "user", "content": "What is robin?"}, '
        '{"role": "assistant", "content": "It is a bird."}, '
        '{"role": "user", "content": "What is zinc?"}, '
        '{"role": "assistant", "content": "It is a metal."}]}'
    )
    example = load_dataset(write(tmp_path, line), tokenizer, 512).examples[0]
    learned = tokenizer.decode([t for t in example.labels if t != IGNORED])
    assert "bird" in learned
    assert "metal" in learned
    assert "What" not in learned
    assert len(example.labels) == len(example.input_ids)
    assert all(a in (b, IGNORED) for a, b in zip(example.labels, example.input_ids, strict=True))
    # The end of a turn is learned too, or generation would never stop.
    assert example.labels[-1] != IGNORED


def test_a_prompt_carries_no_loss(tmp_path, tokenizer):
    example = load_dataset(write(tmp_path, GOOD), tokenizer, 512).examples[0]
    assert "bird" in tokenizer.decode([t for t in example.labels if t != IGNORED])
    assert example.labels[0] == IGNORED
    assert example.labels[-1] == tokenizer.eos_token_id


def test_long_examples_are_cut_and_counted(tmp_path, tokenizer):
    path = write(tmp_path, '{"text": "' + "a bird " * 50 + '"}', '{"text": "a bird"}')
    dataset = load_dataset(path, tokenizer, 16)
    assert dataset.truncated == 1
    assert max(len(e.input_ids) for e in dataset.examples) == 16


def test_an_example_cut_before_its_first_label_is_refused(tmp_path, tokenizer):
    path = write(tmp_path, GOOD, '{"prompt": "' + "a bird " * 50 + '", "completion": "x"}')
    with pytest.raises(InputError, match="line 2: leaves no token to learn within 16 tokens"):
        load_dataset(path, tokenizer, 16)


def rows_of(examples):
    return Dataset(examples, truncated=0).rows(range(len(examples)))


def dataset_of(count):
    return Dataset([Example([i, i + 1], [i, i + 1]) for i in range(count)], truncated=0)


def test_every_epoch_visits_each_example_once_in_another_order():
    dataset = dataset_of(10)
    seen = [r.indices[0] for s in range(4) for r in dataset.batch(s, 5, seed=1)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_a_resumed_run_continues_with_the_same_batches():
    # KempnerForge#57, prime-rl#3332: the data loader loses its place on the second resume.
    first, again = dataset_of(7), dataset_of(7)
    straight = [first.batch(step, 3, seed=0) for step in range(9)]
    assert [again.batch(step, 3, seed=0) for step in (4, 5)] == straight[4:6]
    assert [again.batch(step, 3, seed=0) for step in (6, 7, 8)] == straight[6:]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(ranks):
    rows = rows_of([Example([1] * n, [1] * n) for n in (3, 70, 5, 9)])
    batches = [b for r in range(ranks) for b in micro_batches(rows, r, ranks, 1, 512, 0)]
    assert [int(b.valid_BT.sum()) for b in batches] == [3, 70, 5, 9]
    assert {b.input_ids_BT.shape[1] for b in batches} == {128}  # one length on all ranks


def test_labels_are_the_next_tokens_and_padding_has_none():
    rows = rows_of([Example([5, 6, 7], [IGNORED, 6, 7])])
    batch = next(micro_batches(rows, 0, 1, 1, 64, 0))
    assert batch.labels_BT[0, :4].tolist() == [6, 7, IGNORED, IGNORED]
    assert batch.valid_BT[0].sum() == 3


# ---------------------------------------------------------------------------------------- packing


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=200),
    st.randoms(use_true_random=False),
)
def test_packing_keeps_every_document_whole_and_once(lengths, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    rows = pack(lengths, order, 64)
    assert sorted(i for row in rows for i in row) == sorted(order)
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    # Any two rows that were open together hold more than one row does.
    sums = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(sums) < 2 or sums[0] + sums[1] > 64


def test_packed_rows_lose_little():
    dataset = Dataset([Example([1] * n, [1] * n) for n in range(1, 200)] * 5, truncated=0)
    rows = dataset.packed(256).epoch(0, 0)
    assert sum(r.length for r in rows) / (256 * len(rows)) > 0.97


def test_packed_epochs_are_laid_end_to_end():
    # Epochs of different numbers of rows: the place of a step does not depend on earlier calls.
    examples = [Example([i] * n, [i] * n) for i, n in enumerate((30, 30, 20, 50, 10, 40, 7))]
    first, again = (Dataset(examples, truncated=0).packed(64) for _ in range(2))
    straight = [[r.indices for r in first.batch(s, 3, seed=2)] for s in range(12)]
    assert [r.indices for r in again.batch(9, 3, seed=2)] == straight[9]
    assert [r.indices for r in again.batch(2, 3, seed=2)] == straight[2]
    flat = [i for batch in straight for row in batch for i in row]
    for epoch in range(3):
        assert sorted(flat[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_a_packed_row_is_labelled_and_positioned_by_document():
    examples = [Example([5, 6, 7], [IGNORED, 6, 7]), Example([8, 9], [8, 9])]
    dataset = Dataset(examples, truncated=0).packed(8)
    rows = dataset.rows([0, 1]) + dataset.rows([1])
    (batch,) = micro_batches(rows, 0, 1, 2, 8, 0)
    assert batch.input_ids_BT[0].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert batch.labels_BT[0].tolist() == [6, 7, IGNORED, 9, *[IGNORED] * 4]
    assert batch.positions_BT is not None
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.valid_BT.sum(1).tolist() == [5, 2]
    (flat,) = micro_batches(rows, 0, 1, 2, 8, 0, flat=True)
    assert flat.input_ids_BT.shape == (1, 16)
    assert flat.limits is not None
    assert flat.limits.tolist() == [0, 3, 5, 8, 10, 16]
    assert flat.lengths == (3, 2, 2)


def test_a_row_to_fill_a_batch_has_nothing_to_learn():
    rows = [*rows_of([Example([5, 6], [5, 6])]), Row([], (), 0)]
    (batch,) = micro_batches(rows, 0, 1, 2, 64, 0)
    assert batch.valid_BT.sum(1).tolist() == [2, 0]
    assert (batch.labels_BT[1] == IGNORED).all()


# ----------------------------------------------------------------------------------- tokenised once


def test_data_is_tokenised_once(tmp_path, tokenizer):
    path = write(tmp_path, GOOD, '{"text": "a bird"}')
    first, key = tokenise_once(path, tokenizer, tmp_path / "cache")

    def fails(*args, **kwargs):
        raise AssertionError("tokenised again")

    broken = copy.copy(tokenizer)
    broken._encode_plus = fails
    again, same = tokenise_once(path, broken, tmp_path / "cache")
    assert same == key
    assert [vars(e) for e in again] == [vars(e) for e in first]
    path.write_text(path.read_text() + GOOD + "\n")
    with pytest.raises(AssertionError, match="tokenised again"):
        tokenise_once(path, broken, tmp_path / "cache")
    assert len(tokenise_once(path, tokenizer, tmp_path / "cache")[0]) == 3


def test_another_tokenizer_tokenises_anew(tmp_path, tokenizer):
    import shutil

    from runtime.tokens import fingerprint

    path = write(tmp_path, GOOD)
    other = copy.copy(tokenizer)
    other.name_or_path = str(tmp_path / "model")
    shutil.copytree(tokenizer.name_or_path, tmp_path / "model")
    assert fingerprint(path, other) == fingerprint(path, tokenizer)
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    assert fingerprint(path, other) != fingerprint(path, tokenizer)


def test_a_part_set_apart_is_not_learned_from():
    examples = [Example([i], [i]) for i in range(20)]
    learned, apart = Dataset(Tokens.of(examples), truncated=0).split(0.2, seed=3)
    ids = [sorted(e.input_ids[0] for e in d.examples) for d in (learned, apart)]
    assert len(ids[1]) == 4
    assert sorted(ids[0] + ids[1]) == list(range(20))
    again = Dataset(Tokens.of(examples), truncated=0).split(0.2, seed=3)[1]
    assert [e.input_ids for e in again.examples] == [e.input_ids for e in apart.examples]
