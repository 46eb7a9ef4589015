"""What tests of texts share: a small tokenizer, trained here, and texts."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

UNKNOWN, PAD, EOS = 0, 1, 2
WORDS = ["knock", "who", "is", "there", "lettuce", "in", "it", "is", "cold", "out", "here", "said", "king", "nowhere"]


@cache
def made() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "<pad>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS), *WORDS], trainer)
    return str(tokenizer.to_str())


def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(made())


def sentence(number: int, words: int) -> str:
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(words))


def examples(count: int = 40) -> list[dict[str, Any]]:
    """Prompts with answers, good and bad ones, some of them equal, short or long."""
    return [
        {
            "text": sentence(n, n % 9),
            "prompt": sentence(n + 1, 1 + n % 4),
            "label": " " + sentence(n + 2, n % 11),
            "chosen": sentence(n + 3, 3 + n % 6),
            "rejected": sentence(n + 3 + n % 3, 3 + n % 6),
            "score": n / 4,
        }
        for n in range(count)
    ]


class Called:
    """A tokenizer that is called as those of transformers are, and counts in a list beside it how many texts it got."""

    pad_token_id, eos_token_id = PAD, EOS

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def __call__(self, texts: Sequence[str], *, truncation: bool, max_length: int | None) -> dict[str, Any]:
        global SEEN
        SEEN = (*SEEN, len(texts))  # what a function sets itself says nothing of what it gives
        assert truncation == (max_length is not None)
        return {"input_ids": [[len(word) for word in text.split()][:max_length] for text in texts]}


SEEN: tuple[int, ...] = ()


class Rereadable:
    """Texts that are read one by one, any number of times."""

    def __init__(self, texts: Sequence[Any]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[Any]:
        yield from self.texts
