import pytest

from analyzers.errors import InputError
from runtime.data import IGNORED, Dataset, Example, check_data, load_dataset, micro_batches
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


def dataset_of(count):
    return Dataset([Example([i, i + 1], [i, i + 1]) for i in range(count)], truncated=0)


def test_every_epoch_visits_each_example_once_in_another_order():
    dataset = dataset_of(10)
    seen = [e.input_ids[0] for s in range(4) for e in dataset.batch(s, 5, seed=1)]
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
    examples = [Example([1] * n, [1] * n) for n in (3, 70, 5, 9)]
    batches = [b for r in range(ranks) for b in micro_batches(examples, r, ranks, 1, 512, 0)]
    assert [int(b.valid_BT.sum()) for b in batches] == [3, 70, 5, 9]
    assert {b.input_ids_BT.shape[1] for b in batches} == {128}  # one length on all ranks


def test_labels_are_the_next_tokens_and_padding_has_none():
    batch = next(micro_batches([Example([5, 6, 7], [IGNORED, 6, 7])], 0, 1, 1, 64, 0))
    assert batch.labels_BT[0, :4].tolist() == [6, 7, IGNORED, IGNORED]
    assert batch.valid_BT[0].sum() == 3
