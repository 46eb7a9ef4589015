"""Prompts and pairs beside TorchRL's own: the same tokens, masks and indices of the same texts."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from mouse_core import BatchSource, text
from mouse_core.groups import GrpoBatchMaker, RolloutRecord, TopK, Turn
from tests.core.text_cases import EOS, examples, made

llm = pytest.importorskip("torchrl.data.llm", reason="torchrl is of the extra bench")
transformers = pytest.importorskip("transformers", reason="transformers is of the extra trainers")
from tokenizers import Tokenizer  # noqa: E402
from torchrl.data.llm.dataset import TokenizedDatasetLoader  # noqa: E402
from torchrl.data.llm.prompt import PromptData, PromptTensorDictTokenizer  # noqa: E402
from torchrl.data.llm.reward import pre_tokenization_hook  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """As TorchRL's loader makes one: what ends a text fills it up."""
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(made()), eos_token="</s>")
    found.pad_token = found.eos_token
    return found


def stored(data: Any, tokenizer: Any, folder: Path, recipe: Any) -> dict[str, np.ndarray]:
    store = text.tokenize(data, tokenizer, folder, recipe).to_store()
    return dict(BatchSource(store, batch_size=len(store), windows={}, sampling="last")[0])


@pytest.mark.parametrize("max_length", [8, 12])
def test_prompts(tmp_path: Path, tokenizer: Any, max_length: int) -> None:
    data = examples()
    columns = {name: [one[name] for one in data] for name in ("prompt", "label")}
    theirs = PromptTensorDictTokenizer(tokenizer, max_length, return_tensordict=False)(columns)
    valid = np.array(theirs["valid_sample"])
    ours = stored(data, tokenizer, tmp_path, text.Prompts(max_length=max_length))
    assert 0 < len(ours["input_ids"]) == valid.sum() < len(data)
    for name in ("input_ids", "attention_mask", "prompt_rindex"):
        np.testing.assert_array_equal(ours[name], np.array(theirs[name])[valid])
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in ours.items()}
    masked = PromptData(**tensors, batch_size=[len(valid[valid])]).mask_label(pad_token_id=EOS)
    alone = text.mask_label(ours, pad_id=EOS)
    for name, values in alone.items():
        np.testing.assert_array_equal(values, getattr(masked, name).numpy())
    # The tokenizer was called with lengths and padding, and is the same still.
    assert text.tokenize(data, tokenizer, tmp_path, text.Prompts(max_length=max_length)).reopened


def test_pairs(tmp_path: Path, tokenizer: Any) -> None:
    data = examples()
    chosen = pre_tokenization_hook(datasets.Dataset.from_list(data))
    theirs = llm.TensorDictTokenizer(tokenizer, 16)({"text": list(chosen["text"])})
    half = len(chosen) // 2
    ours = text.as_pairs(stored(data, tokenizer, tmp_path, text.Pairs(max_length=16)))
    for side, rows in (("chosen_data", slice(0, half)), ("rejected_data", slice(half, None))):
        for name in ("input_ids", "attention_mask"):
            np.testing.assert_array_equal(ours[side][name], theirs[name][rows].numpy())


def test_texts_of_both_lengths(tmp_path: Path, tokenizer: Any) -> None:
    data = [one["chosen"] for one in examples()]
    for max_length in (4, 10):
        theirs = llm.TensorDictTokenizer(tokenizer, max_length)({"text": data})
        ours = stored(data, tokenizer, tmp_path, text.Texts(max_length=max_length))
        for name in ("input_ids", "attention_mask"):
            np.testing.assert_array_equal(ours[name], theirs[name].numpy())


def test_the_whole_way_of_their_loader(tmp_path: Path, tokenizer: Any) -> None:
    data = datasets.Dataset.from_list(examples()).select_columns(["prompt", "label"])
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "saved"))

    class Loader(TokenizedDatasetLoader):  # theirs downloads a tokenizer
        def make_tokenizer(self, **_: Any) -> None:
            self.tokenizer = tokenizer

    options = {"root_dir": tmp_path / "theirs", "from_disk": True}
    loader = Loader("train", 12, str(tmp_path / "saved"), PromptTensorDictTokenizer, **options)
    loader.num_workers = None  # in this process
    theirs = loader.load()
    # It marks the prompts that were cut, forgets the marks, and keeps all.
    recipe = text.Prompts(max_length=12, only_whole=False)
    ours = stored(tmp_path / "saved" / "train", tokenizer, tmp_path / "ours", recipe)
    assert len(theirs) == len(data)
    for name in ("input_ids", "attention_mask", "prompt_rindex"):
        np.testing.assert_array_equal(ours[name], theirs[name].numpy())


@pytest.mark.parametrize("rewards", [[0, 1, 1, 2, 5, 4], [3, 3, 3], [1, 2, 2, 2, 0], [4, 1, 3, 2]])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_best_of_a_group(rewards: list[float], k: int) -> None:
    chooser = llm.TopKRewardSelector(len(rewards), k, prompt_key="prompt", verbose=False)
    rollouts = [
        TensorDict(
            {
                "prompt": "p",
                "next": {
                    "reward": torch.full((2 + number, 1), float(reward)),
                    "done": torch.ones(1, 1, dtype=torch.bool),
                },
            }
        )
        for number, reward in enumerate(rewards)
    ]
    kept = chooser.inv(lazy_stack(rollouts))
    theirs = [] if kept is None else [len(one["next", "reward"]) - 2 for one in kept]
    maker = GrpoBatchMaker(retention=TopK(k, above_median=True), filter_zero_variance=False)
    for number, reward in enumerate(rewards):
        turn = Turn("x", "assistant", [1], [-1.0])
        maker.add_rollout(RolloutRecord("e", "p", "0", reward=reward, turns=[turn], rollout_uid=str(number)))
    ours = maker.create_batch(maker.available) if maker.available else None
    assert sorted(rewards[number] for number in theirs) == sorted(rewards[int(e.rollout_uid)] for e in ours or [])
