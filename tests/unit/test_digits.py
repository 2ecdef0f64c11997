"""The digits data: deterministic, split by image, and with the right answers."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lightning_hetero.datasets.digits import NUMBERS, DigitsDataModule, DigitsTokenizer, collate, number_words

TOKENIZER = DigitsTokenizer()


def data_module(**kwargs: object) -> DigitsDataModule:
    data = DigitsDataModule(**{"train_samples": 300, "val_samples": 300, **kwargs})
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def digit_of() -> dict[bytes, int]:
    """What an image without noise shows, by its normalised pixels."""
    data = data_module(val_share=1.0)
    pixels = [image.numpy().tobytes() for image in data.val_set.images]
    return dict(zip(pixels, data.val_set.digits.tolist(), strict=True))


def equal(a: dict[str, object], b: dict[str, object]) -> bool:
    return all(torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a)


def text(sample: dict) -> tuple[str, str]:
    question = [token for token in sample["tokens"][: sample["prompt_length"]] if token != TOKENIZER.image_id]
    return TOKENIZER.decode(question), TOKENIZER.decode(sample["tokens"][sample["prompt_length"] :])


def test_tokenizer() -> None:
    ids = TOKENIZER.encode("what is three plus nine ?")
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_id, 5]) == "what is three plus nine ?"
    assert TOKENIZER.decode([TOKENIZER.vocab_size - 1]) == "<unused>"
    assert len(set(TOKENIZER.words)) == len(TOKENIZER.words) <= TOKENIZER.vocab_size
    assert TOKENIZER.vocab_size % 16 == 0
    assert (number_words(20), number_words(27)) == ("twenty", "twenty seven")
    with pytest.raises(KeyError):
        TOKENIZER.encode("what is love ?")


def test_samples_depend_on_seed_and_index_alone() -> None:
    first, second, other = data_module(), data_module(train_samples=500), data_module(seed=1)
    assert all(equal(first.train_set[k], second.train_set[k]) for k in (299, 0, 7))
    assert not all(equal(first.train_set[k], other.train_set[k]) for k in range(10))
    assert not all(first.train_set[k]["tokens"] == first.val_set[k]["tokens"] for k in range(10))


def test_no_validation_image_is_trained_on(digit_of: dict[bytes, int]) -> None:
    data = data_module(noise=0.0, val_share=0.2)
    parts = [{image.numpy().tobytes() for image in part.images} for part in (data.train_set, data.val_set)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(digit_of)
    assert len(parts[1]) == round(0.2 * len(load_digits().images))
    for part, questions in zip(parts, (data.train_set, data.val_set), strict=True):
        assert {image.numpy().tobytes() for sample in questions for image in sample["images"]} <= part


def test_answers_are_right(digit_of: dict[bytes, int]) -> None:
    data = data_module(sum_share=0.3)
    seen = set()
    for k in range(len(data.val_set)):
        sample = data.val_set[k]
        question, answer = text(sample)
        digits = [digit_of[image.numpy().tobytes()] for image in sample["images"]]
        words = question.split()
        if not digits:
            expected = NUMBERS.index(words[2]) + NUMBERS.index(words[4])
            assert question == f"what is {words[2]} plus {words[4]} ?"
        elif "sum" in words:
            expected = sum(digits)
        else:
            expected = digits[int(words[3]) - 1]
            assert question == f"what is digit {words[3]} ?"
        assert answer == number_words(expected)
        assert sample["tokens"][-1] == TOKENIZER.eos_id
        seen.add((len(digits), "sum" in words))
    assert seen == {(0, False), *((n, ask_sum) for n in (1, 2, 3) for ask_sum in (False, True))}


def test_text_share_and_no_sums_by_default() -> None:
    for share in (0.0, 0.15, 1.0):
        data = data_module(text_share=share, train_samples=1000)
        samples = list(data.train_set)
        assert sum(len(sample["images"]) == 0 for sample in samples) / 1000 == pytest.approx(share, abs=0.04)
        assert not any("sum" in text(sample)[0] for sample in samples)


def test_every_image_is_asked_about() -> None:
    data = data_module(text_share=0.0, val_samples=359)
    asked = set()
    for k in range(359):
        sample = data.val_set[k]
        asked.add(sample["images"][int(text(sample)[0].split()[3]) - 1].numpy().tobytes())
    assert asked == {image.numpy().tobytes() for image in data.val_set.images}


def test_noise_is_only_in_training_and_leaves_the_data_alone() -> None:
    noisy, clean = data_module(noise=0.5, text_share=0.0), data_module(noise=0.0, text_share=0.0)
    before = noisy.train_set.images.clone()
    difference = torch.cat([noisy.train_set[k]["images"] - clean.train_set[k]["images"] for k in range(300)])
    assert difference.std().item() == pytest.approx(0.5, rel=0.05)
    assert all(equal(noisy.val_set[k], clean.val_set[k]) for k in range(20))
    assert torch.equal(noisy.train_set.images, before)
    assert clean.train_set.images.mean().item() == pytest.approx(0.0, abs=0.05)
    assert clean.train_set.images.std().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("tokens_per_image", [1, 4])
@pytest.mark.parametrize("sum_share", [0.0, 1.0])
def test_batches(tokens_per_image: int, sum_share: float) -> None:
    data = data_module(batch_size=32, tokens_per_image=tokens_per_image, sum_share=sum_share, pad_to_multiple_of=8)
    for batch in (*data.train_dataloader(), *data.val_dataloader(), *data.predict_dataloader()):
        size = len(batch["sample_ids"])
        assert batch["input_ids"].shape == batch["labels"].shape == (size, data.sequence_length)
        assert data.sequence_length % 8 == 0
        assert batch["images"].shape == (batch["num_images"].sum(), 1, 8, 8)
        assert torch.equal(batch["feature_mask"].sum(dim=1), batch["num_images"] * tokens_per_image)
        assert torch.equal(batch["is_image_question"], batch["num_images"] > 0)
        is_answer = batch["labels"] != -100
        assert torch.equal(batch["labels"][is_answer], batch["input_ids"][is_answer])
        assert torch.equal(is_answer.int().argmax(dim=1), batch["prompt_lengths"])
        assert bool((batch["labels"] == TOKENIZER.eos_id).sum(dim=1).eq(1).all())


def test_every_sample_once_in_a_fixed_order() -> None:
    data = data_module(batch_size=64)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert torch.cat([batch["sample_ids"] for batch in loader]).tolist() == list(range(300))


def test_batch_without_images() -> None:
    data = data_module(text_share=1.0)
    batch = collate([data.train_set[k] for k in range(4)], data.sequence_length)
    assert batch["images"].shape == (0, 1, 8, 8)
    assert batch["images"].dtype == torch.float32
    assert not batch["feature_mask"].any()


@pytest.mark.parametrize("sizes", [{"max_images": 0}, {"max_images": 10}, {"max_images": 4, "sum_share": 0.5}])
def test_sizes_that_do_not_fit(sizes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="max_images"):
        DigitsDataModule(**sizes)
