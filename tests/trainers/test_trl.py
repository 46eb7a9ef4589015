"""TRL's losses and advantages on our batches against those on its own: the same answers, collated by each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mouse_core import BatchSource, text
from mouse_core.groups import DrGrpo, Grpo, GrpoBatchMaker, Rloo, RolloutBuffer, RolloutColumn, RolloutRecord, Turn
from mouse_core.text import chat, kl_penalized_rewards
from mouse_torch.groups import pad
from tests.core.chat_cases import CHATML, template, tokenizer

pytestmark = pytest.mark.trainers
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

PROMPTS = ["a b c", "d e f g h", "i", "j k"]
GROUP_SIZE, LONGEST = 4, 8
BETA = 0.05
# 2 of the 16 tokens end an answer, so that answers differ in length.
WORDS = ["<pad>", "<end>", "<other>", *"abcdefghijklm"]
Kept = dict[str, torch.Tensor]


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """What answers earn: a function of their tokens alone, and of no group the same for all."""
    return [float(sum((place + 1) * token for place, token in enumerate(tokens)) % 11) / 4 for tokens in completion_ids]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with its tokenizer, as it is saved; positions are relative in it, as TRL fills up in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    where = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<other>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<other>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names).save_pretrained(where)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids)).save_pretrained(where)
    return where


def trained(trainer: type[Any], config: type[Any], model: Path, output: Path, **options: Any) -> tuple[Any, Kept]:
    """A trainer of TRL after one step, and the batch that it made and trained on."""
    from datasets import Dataset

    class Keeping(trainer):  # type: ignore[misc, valid-type]
        kept: Any = None

        def compute_loss(self, model: Any, inputs: Kept, **others: Any) -> Any:
            if self.kept is None:
                self.kept = {name: values.clone() for name, values in inputs.items()}
            return super().compute_loss(model, inputs, **others)

    arguments = config(
        output_dir=str(output),
        per_device_train_batch_size=len(PROMPTS) * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=LONGEST,
        max_steps=1,
        num_iterations=2,  # so that the log-probabilities of the sampled tokens are in the batch
        learning_rate=5.0,  # so far that ratios are clipped
        optim="sgd",
        beta=BETA,
        seed=0,
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        **options,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    data = Dataset.from_dict({"prompt": PROMPTS})
    made = Keeping(str(model), reward, args=arguments, train_dataset=data, processing_class=tokenizer)
    with torch.no_grad():  # away from the reference, which is the model that was saved
        for weights in made.model.parameters():
            weights += 0.05 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(weights.numel()))
    # Not a copy of the trainer's model, whose methods may be those of the original.
    made.sampled_with = transformers.AutoModelForCausalLM.from_pretrained(model)
    made.sampled_with.load_state_dict(made.model.state_dict())
    made.train()
    return made, made.kept


@pytest.fixture(scope="module")
def grpo(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Kept]:
    return trained(trl.GRPOTrainer, trl.GRPOConfig, folder, tmp_path_factory.mktemp("grpo"), loss_type="grpo")


def masked(kept: Kept, row: int) -> tuple[list[int], list[int]]:
    """The tokens of a prompt and of its answer, without what fills up."""
    both = ("prompt", "completion")
    prompt, answer = (kept[f"{of}_ids"][row][kept[f"{of}_mask"][row].bool()].tolist() for of in both)
    return prompt, answer


def records(kept: Kept) -> list[RolloutRecord]:
    """The answers of a batch of TRL's as a sampler of ours would send them."""
    found = []
    for row in range(len(kept["prompt_ids"])):
        prompt, answer = masked(kept, row)
        logprobs, reference = (
            kept[name][row][kept["completion_mask"][row].bool()].numpy()
            for name in ("old_per_token_logps", "ref_per_token_logps")
        )
        found.append(
            RolloutRecord(
                environment="words",
                example_id=" ".join(map(str, prompt)),
                policy_version=0,
                rollout_uid=str(row),
                turns=[
                    Turn("", "user", prompt),
                    Turn("", "assistant", answer, logprobs, columns={"reference_logprobs": reference}),
                ],
                reward=reward([answer])[0],
            )
        )
    return found


def by_row(kept: Kept, advantage: Any) -> NDArray[np.float64]:
    """Our advantages of the answers of a batch of TRL's."""
    sent = records(kept)
    _, groups = np.unique([one.example_id for one in sent], return_inverse=True)
    found: NDArray[np.float64] = advantage(np.array([one.reward for one in sent]), groups)
    return found


def ours(kept: Kept, folder: Path, **options: Any) -> Kept:
    """The same answers through a buffer, a batch maker and ``pad``, under the names that TRL's loss takes them by.

    The first token is its prompt, and all others its completion, of which ``tool_mask`` says which are in the loss.
    """
    maker = GrpoBatchMaker(filter_zero_variance=False, **options)
    columns = [RolloutColumn("reference_logprobs")]
    with RolloutBuffer(folder, GROUP_SIZE, batch_maker=maker, columns=columns) as buffer:
        buffer.add_rollouts(records(kept))
        examples = buffer.read_batch(buffer.create_and_store_batch(len(PROMPTS) * GROUP_SIZE))
    batch = pad(examples, 16)
    in_loss = batch["loss_mask"][:, 1:]
    return {
        "prompt_ids": batch["tokens"][:, :1].long(),
        "prompt_mask": batch["mask"][:, :1].long(),
        "completion_ids": batch["tokens"][:, 1:].long(),
        "completion_mask": batch["mask"][:, 1:].long(),
        "tool_mask": in_loss.long(),
        "advantages": batch["advantage"][:, 1:],
        "old_per_token_logps": batch["generator_log_probs"][:, 1:],
        "ref_per_token_logps": batch["reference_logprobs"][:, 1:],
        "num_items_in_batch": in_loss.sum(),
    }


def test_answers_differ_in_what_could_go_wrong(grpo: tuple[Any, Kept]) -> None:
    trainer, kept = grpo
    lengths = kept["completion_mask"].sum(1)
    assert len(set(lengths.tolist())) > 2
    assert len(set(kept["prompt_mask"].sum(1).tolist())) > 2
    mask = kept["completion_mask"].bool()
    assert (kept["old_per_token_logps"] - kept["ref_per_token_logps"])[mask].abs().max() > 1e-3
    now, _ = logprobs_of(trainer.model, [masked(kept, row) for row in range(len(lengths))])
    ratios = (now - kept["old_per_token_logps"])[mask].exp()
    assert ratios.min() < 0.8 < 1.2 < ratios.max()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_the_loss_is_the_same(loss_type: str, level: str, grpo: tuple[Any, Kept], tmp_path: Path) -> None:
    trainer, kept = grpo
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    expected = trainer.compute_loss(trainer.model, kept)
    found = trainer.compute_loss(trainer.model, ours(kept, tmp_path, advantage=Grpo()))
    assert abs(expected.item()) > 1e-3
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    parameters = list(trainer.model.parameters())
    pairs = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True)
    for own, others in pairs:
        torch.testing.assert_close(own, others, rtol=1e-4, atol=1e-6)


def test_advantages_are_those_of_grpo(grpo: tuple[Any, Kept]) -> None:
    np.testing.assert_allclose(by_row(grpo[1], Grpo()), grpo[1]["advantages"], rtol=1e-5, atol=1e-6)


def test_advantages_are_those_of_dr_grpo(folder: Path, tmp_path: Path) -> None:
    options = {"loss_type": "dr_grpo", "scale_rewards": "none"}
    trainer, kept = trained(trl.GRPOTrainer, trl.GRPOConfig, folder, tmp_path / "theirs", **options)
    np.testing.assert_allclose(by_row(kept, DrGrpo()), kept["advantages"], rtol=1e-5, atol=1e-6)
    expected = trainer.compute_loss(trainer.model, kept)
    found = trainer.compute_loss(trainer.model, ours(kept, tmp_path / "ours", advantage=DrGrpo()))
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)


def test_advantages_are_those_of_rloo_with_the_penalty_in_the_reward(folder: Path, tmp_path: Path) -> None:
    trainer, kept = trained(trl.RLOOTrainer, trl.RLOOConfig, folder, tmp_path)
    answers = [masked(kept, row) for row in range(len(kept["prompt_ids"]))]
    logprobs, mask = logprobs_of(trainer.sampled_with, answers)
    reference, _ = logprobs_of(trainer.ref_model, answers)
    torch.testing.assert_close(torch.where(mask, logprobs, 0).sum(1), kept["old_logps"], rtol=1e-5, atol=1e-5)
    earned = torch.tensor([reward([answer])[0] for _, answer in answers])
    penalized = kl_penalized_rewards(earned, logprobs, reference, mask, coef=BETA).sum(1)
    assert (penalized - earned).abs().max() > 1e-3
    _, groups = np.unique([str(prompt) for prompt, _ in answers], return_inverse=True)
    np.testing.assert_allclose(Rloo()(penalized.numpy(), groups), kept["advantages"], rtol=1e-5, atol=1e-6)


def logprobs_of(model: Any, answers: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of answers' tokens, a row an answer, NaN behind its end; and which are there."""
    found, mask = torch.full((len(answers), LONGEST), torch.nan), torch.zeros(len(answers), LONGEST, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(answers):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found[row, : len(answer)] = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
        mask[row, : len(answer)] = True
    return found, mask


PAIR = {
    "prompt": [{"role": "user", "content": "one and one"}],
    "chosen": [{"role": "assistant", "content": "two"}],
    "rejected": [{"role": "assistant", "content": "three, or more"}],
}


@pytest.mark.parametrize(("side", "mode"), [("right", "keep_start"), ("left", "keep_end")])
def test_pairs_are_those_of_trl(side: str, mode: str, tmp_path: Path) -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    made = template(CHATML)
    ids = chat.encode_preference(made, **PAIR, tokenizer=tokenizer())
    options = {"pad_token_id": 0, "max_length": 24, "truncation_mode": mode, "pad_to_multiple_of": 24}
    wanted = DataCollatorForPreference(**options)([{name: one.tolist() for name, one in ids.items()}])
    recipe = chat.Preferences(template=made, max_length=24, pad_id=0, truncation_side=side)
    store = text.tokenize([PAIR], tokenizer(), tmp_path, recipe).to_store()
    batch = BatchSource(store, batch_size=1, windows={})[0]
    for name, values in wanted.items():
        found = [batch[f"{answer}_data.{name}"][0] for answer in ("chosen", "rejected")]
        np.testing.assert_array_equal(values.numpy(), found)
