"""Questions about handwritten digits: a real vision-language task that ships with scikit-learn."""

from __future__ import annotations

from functools import partial
from typing import TypedDict

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
IGNORE_INDEX = -100
PIXEL_MAX, PIXEL_MEAN, PIXEL_STD = 16.0, 0.305, 0.376


def number_words(number: int) -> str:
    """Spells a number from 0 to 29, with a space in compounds: "twenty seven"."""
    return NUMBERS[number] if number <= 20 else f"twenty {NUMBERS[number - 20]}"


class DigitsTokenizer:
    """Maps the words of the questions and answers to ids and back."""

    words = ("<pad>", "<eos>", "<image>", *"what is digit the sum plus ? 1 2 3 4 5 6 7 8 9".split(), *NUMBERS)
    pad_id, eos_id, image_id = range(3)
    vocab_size = 48
    """Number of words, rounded up so that tensor-parallel sizes divide it."""

    def __init__(self) -> None:
        self.ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the words, which are separated by spaces.

        Raises:
            KeyError: if a word is not in the vocabulary.
        """
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Returns the words up to the first end-of-sequence token."""
        ids = ids[: ids.index(self.eos_id)] if self.eos_id in ids else ids
        return " ".join(self.words[i] if i < len(self.words) else "<unused>" for i in ids)


class Sample(TypedDict):
    """One question: token ids (prompt, answer, end of sequence), the prompt's length, and [k, 1, 8, 8] images."""

    sample_id: int
    tokens: list[int]
    prompt_length: int
    images: Tensor


class DigitsQuestions(Dataset[Sample]):
    """Questions with one to `max_images` digits, or none and a sum in words.

    Sample k depends on the seed and k alone, and, if it has images, asks about image k modulo their number: every
    image is asked about equally often.

    Args:
        images: [M, 8, 8], values 0 to 16.
        digits: [M], what the images show.
        num_samples: length of the data set.
        seed: any non-negative integers, different for data sets that must differ.
        tokens_per_image: placeholder tokens per image.
        max_images: most images in a sample.
        text_share: probability that a sample has no image.
        sum_share: probability that a sample with images asks for their sum, not for one of them.
        noise: standard deviation of the Gaussian noise on the pixels, over that of the pixels.
    """

    def __init__(
        self,
        images: np.ndarray,
        digits: np.ndarray,
        *,
        num_samples: int,
        seed: tuple[int, ...],
        tokens_per_image: int,
        max_images: int,
        text_share: float,
        sum_share: float,
        noise: float,
    ) -> None:
        self.images = torch.from_numpy((images / PIXEL_MAX - PIXEL_MEAN) / PIXEL_STD).float().unsqueeze(1)
        self.digits = digits
        self.num_samples = num_samples
        self.seed = seed
        self.tokens_per_image = tokens_per_image
        self.max_images = max_images
        self.text_share = text_share
        self.sum_share = sum_share
        self.noise = noise
        self.tokenizer = DigitsTokenizer()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        rng = np.random.default_rng((*self.seed, index))
        if rng.random() < self.text_share:
            first, second = rng.integers(10, size=2).tolist()
            return self._sample(
                index, self.images[:0], f"what is {NUMBERS[first]} plus {NUMBERS[second]} ?", first + second
            )

        count = int(rng.integers(1, self.max_images + 1))
        asked = int(rng.integers(count))
        chosen = rng.integers(len(self.images), size=count).tolist()
        chosen[asked] = index % len(self.images)
        digits = [int(self.digits[i]) for i in chosen]
        ask_sum = rng.random() < self.sum_share
        images = self.images[chosen]
        if self.noise:
            images += self.noise * torch.from_numpy(rng.standard_normal(images.shape, dtype=np.float32))
        if ask_sum:
            return self._sample(index, images, "what is the sum ?", sum(digits))
        return self._sample(index, images, f"what is digit {asked + 1} ?", digits[asked])

    def _sample(self, index: int, images: Tensor, question: str, answer: int) -> Sample:
        placeholders = [self.tokenizer.image_id] * (len(images) * self.tokens_per_image)
        prompt = placeholders + self.tokenizer.encode(question)
        return Sample(
            sample_id=index,
            tokens=[*prompt, *self.tokenizer.encode(number_words(answer)), self.tokenizer.eos_id],
            prompt_length=len(prompt),
            images=images,
        )


def collate(samples: list[Sample], length: int) -> dict[str, Tensor]:
    """Makes a batch, padded at the right to `length` tokens, with the images of all samples behind each other.

    Returns:
        `input_ids`, `labels` (-100 except on the answer and the end of sequence) and `feature_mask` (True at image
        placeholders), all [B, length]; `prompt_lengths`, `num_images`, `sample_ids` and `is_image_question`, all [B];
        `images` [sum of num_images, 1, 8, 8].
    """
    input_ids = torch.full((len(samples), length), DigitsTokenizer.pad_id)
    labels = torch.full((len(samples), length), IGNORE_INDEX)
    for row, sample in enumerate(samples):
        tokens, prompt_length = torch.tensor(sample["tokens"]), sample["prompt_length"]
        input_ids[row, : len(tokens)] = tokens
        labels[row, prompt_length : len(tokens)] = tokens[prompt_length:]
    num_images = torch.tensor([len(sample["images"]) for sample in samples])
    return {
        "input_ids": input_ids,
        "labels": labels,
        "feature_mask": input_ids == DigitsTokenizer.image_id,
        "prompt_lengths": torch.tensor([sample["prompt_length"] for sample in samples]),
        "images": torch.cat([sample["images"] for sample in samples]),
        "num_images": num_images,
        "is_image_question": num_images > 0,
        "sample_ids": torch.tensor([sample["sample_id"] for sample in samples]),
    }


class DigitsDataModule(LightningDataModule):
    """Questions about scikit-learn's 1,797 handwritten digits, split by image into training and validation.

    Args:
        batch_size: samples per batch of one data-parallel replica.
        train_samples: questions in the training set; each is a new draw of images, so one long epoch is as good as
            many short ones.
        val_samples: questions in the validation set.
        tokens_per_image: rows that the encoder returns for an image.
        max_images: most images in a question, at most 9.
        text_share: share of questions without an image: small sums in words. (Their 100 questions are the same in
            training and validation; the share counts as unseen only for images.)
        sum_share: share of the questions with images that are the harder "what is the sum ?"; needs `max_images` of at
            most 3.
        val_share: share of the images that is kept for validation.
        noise: standard deviation of the noise on the training images, over that of their pixels.
        pad_to_multiple_of: the fixed sequence length is rounded up to a multiple of this.
        num_workers: worker processes of a data loader.
        seed: determines the split and all samples.
    """

    def __init__(
        self,
        batch_size: int = 64,
        train_samples: int = 51_200,
        val_samples: int = 500,
        tokens_per_image: int = 1,
        max_images: int = 3,
        text_share: float = 0.15,
        sum_share: float = 0.0,
        val_share: float = 0.2,
        noise: float = 0.3,
        pad_to_multiple_of: int = 2,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= max_images <= 9 or (sum_share > 0 and max_images > 3):
            raise ValueError(f"max_images={max_images} must be 1 to 9, and at most 3 where sums are asked (sum_share).")
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.train_samples = train_samples
        self.val_samples = val_samples
        self.tokens_per_image = tokens_per_image
        self.max_images = max_images
        self.text_share = text_share
        self.sum_share = sum_share
        self.val_share = val_share
        self.noise = noise
        self.num_workers = num_workers
        self.seed = seed
        self.tokenizer = DigitsTokenizer()
        # Five words of a question with images (six without), the answer of one word (a sum may have two), the end.
        longest = max(max_images * tokens_per_image + 5 + (2 if sum_share > 0 else 1), 6 + 1) + 1
        self.sequence_length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of

    def setup(self, stage: str) -> None:
        data = load_digits()
        order = np.random.default_rng(self.seed).permutation(len(data.images))
        val_images, train_images = np.split(order, [round(self.val_share * len(order))])

        def questions(images: np.ndarray, num_samples: int, part: int, noise: float) -> DigitsQuestions:
            return DigitsQuestions(
                data.images[images],
                data.target[images],
                num_samples=num_samples,
                seed=(self.seed, part),
                tokens_per_image=self.tokens_per_image,
                max_images=self.max_images,
                text_share=self.text_share,
                sum_share=self.sum_share,
                noise=noise,
            )

        self.train_set = questions(train_images, self.train_samples, 0, self.noise)
        self.val_set = questions(val_images, self.val_samples, 1, 0.0)

    def _loader(self, questions: DigitsQuestions) -> DataLoader[Sample]:
        # Not shuffled: the samples are independent draws already, and step k sees the same ones on any number of ranks.
        return DataLoader(
            questions,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=partial(collate, length=self.sequence_length),
        )

    def train_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self.train_set)

    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self.val_set)

    def predict_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self.val_set)
