"""Training's own parts: the network against transformers, packing, export, decoding, and that it learns."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.evals import Split, check, items
from tools.training.chat import END_OF_TEXT, prompt

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tools.training.corpus import Corpus  # noqa: E402
from tools.training.decode import GreedyDecoder  # noqa: E402
from tools.training.drafters.export import save_draft  # noqa: E402
from tools.training.drafters.trainer import DraftTrainer  # noqa: E402
from tools.training.evaluate import answer_all  # noqa: E402
from tools.training.export import BUNDLED, END, load_network, save_configs, save_weights  # noqa: E402
from tools.training.loop import Trainer  # noqa: E402
from tools.training.network import Network, NetworkShape, PackedSpan, packed_attention  # noqa: E402
from tools.training.packing import PROMPT, PackedBatch, collect, pack  # noqa: E402
from tools.training.recipe import Recipe  # noqa: E402
from tools.training.tokenizer import FastEncoder  # noqa: E402

SMALL = NetworkShape(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
)
CPU = torch.device("cpu")


def random_network(shape: NetworkShape = SMALL) -> Network:
    """Returns a network without zero or unit weights, some of which are so before training."""
    torch.manual_seed(0)
    network = Network(shape)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return network


@pytest.fixture(scope="module")
def encoder() -> FastEncoder:
    return FastEncoder(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))


def some_batch(encoder: FastEncoder, tokens: int = 8192, progress: float = 0.0) -> PackedBatch:
    return pack(collect(Corpus("test", encoder), tokens, progress), tokens // 4, np.random.default_rng(0))


def spans_of(batch: PackedBatch) -> list[PackedSpan]:
    return [
        PackedSpan(int(x[0]), int(x[-1]), torch.as_tensor(x - x[0]), int((x[1:] - x[:-1]).max())) for x in batch.limits
    ]


def test_exported_folder_gives_the_networks_logits_in_transformers(tmp_path: Path) -> None:
    network = random_network()
    save_configs(SMALL, tmp_path)
    save_weights(network, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, 4096, (1, 50))
    decoder = GreedyDecoder(load_network(tmp_path, CPU), (END,))
    with torch.inference_mode():
        positions = torch.arange(50)[None]
        ours = decoder.network.logits(decoder.forward(tokens, positions, decoder.empty_cache(1, 50), None))
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=2e-5, rtol=1e-4)


def test_stored_weights_are_the_networks_in_bfloat16(tmp_path: Path) -> None:
    network = random_network()
    save_configs(SMALL, tmp_path)
    save_weights(network, tmp_path)
    loaded = dict(load_network(tmp_path, CPU).named_parameters())
    for name, parameter in network.named_parameters():
        assert torch.equal(loaded[name], parameter.bfloat16().float())


def test_packed_conversations_do_not_see_each_other(encoder: FastEncoder) -> None:
    network = random_network()
    batch = some_batch(encoder, 2048)
    tokens, positions = torch.as_tensor(batch.tokens), torch.as_tensor(batch.positions)
    together = network.hidden_states(tokens, positions, spans_of(batch))
    for span in spans_of(batch):
        start = span.start + int(span.cumulative[-2])
        one = slice(start, span.stop)
        length = span.stop - start
        alone = [PackedSpan(0, length, torch.tensor([0, length], dtype=torch.int32), length)]
        torch.testing.assert_close(
            network.hidden_states(tokens[one], positions[one], alone), together[one], atol=0.05, rtol=0.05
        )


def test_targets_are_next_tokens_of_the_same_conversation(encoder: FastEncoder) -> None:
    batch = some_batch(encoder)
    assert len(batch.tokens) == len(batch.positions) == 8192
    assert len(set(batch.target_index.tolist())) == len(batch.target_index) == 2048
    assert np.array_equal(batch.positions[batch.target_index + 1], batch.positions[batch.target_index] + 1)
    assert np.array_equal(batch.tokens[batch.target_index + 1], batch.targets)
    assert batch.limits[0][0] == 0
    assert batch.limits[-1][-1] == 8192


def test_every_answer_token_is_a_target_when_there_is_room(encoder: FastEncoder) -> None:
    examples = collect(Corpus("test", encoder), 8192, 0.0)
    batch = pack(examples, 6000, np.random.default_rng(0))
    assert (batch.skills != PROMPT).sum() == sum(sum(e.answers[1:]) for e in examples)


def test_examples_stay_within_the_positions_there_are(encoder: FastEncoder) -> None:
    corpus = Corpus("test", encoder)
    lengths = [len(corpus.next(1.0, 1 << 20).tokens) for _ in range(3000)]
    assert 3400 < max(lengths) <= 4096


def test_documents_grow_during_the_run(encoder: FastEncoder) -> None:
    first = max(len(e.tokens) for e in collect(Corpus("test", encoder), 60_000, 0.01) if e.skill == "recall")
    last = max(len(e.tokens) for e in collect(Corpus("test", encoder), 60_000, 0.9) if e.skill == "recall")
    assert first < 700 < last


def test_batched_decoding_says_what_decoding_alone_says() -> None:
    network = random_network()
    rng = Random(3)
    prompts = [[rng.randrange(4096) for _ in range(length)] for length in (3, 17, 40, 8)]
    decoder = GreedyDecoder(network, (END,))
    alone = [decoder.generate([p], 12)[0].tokens for p in prompts]
    assert [c.tokens for c in decoder.generate(prompts, 12)] == alone


def test_learning_rate_goes_up_stays_and_ends_at_nothing() -> None:
    recipe = Recipe(seconds=100)
    assert recipe.lr_scale(0.0) == 0.0
    assert recipe.lr_scale(0.3) == 1.0
    assert 0.0 < recipe.lr_scale(0.9) < 0.3
    assert recipe.lr_scale(1.0) == 0.0


def test_steps_lower_the_loss(encoder: FastEncoder) -> None:
    trainer = Trainer(Recipe(seconds=1, shape=SMALL), CPU)
    batch = some_batch(encoder, 2048)
    means = []
    for _ in range(12):
        trainer.step(batch, 1.0)
        scores = trainer.scores.take()
        means.append(sum(loss for loss, _ in scores.values()) / len(scores))
    assert means[-1] < 0.7 * means[0]


def test_an_endless_count_is_trained_without_an_end(encoder: FastEncoder) -> None:
    corpus = Corpus("test", encoder)
    item = next(items("counting", Split.TRAIN, "open"))
    parts = corpus.cut([(prompt(item.messages), False), (item.expected + "<|im_end|>", True), ("\n", False)])
    assert item.expected.startswith(parts[-1][0])
    assert END_OF_TEXT not in parts[-1][0]


@pytest.mark.gpu
def test_packed_attention_on_the_gpu_is_that_on_the_cpu() -> None:
    torch.manual_seed(0)
    limits = torch.tensor([0, 1, 130, 700], dtype=torch.int32)
    inputs = [torch.randn(700, heads, 32).bfloat16() for heads in (8, 4, 4)]
    results = []
    for device in ("cpu", "cuda"):
        q, k, v = (x.detach().to(device).requires_grad_() for x in inputs)
        out = packed_attention(q, k, v, [PackedSpan(0, 700, limits.to(device), 570)])
        out.float().square().sum().backward()
        results.append([x.float().cpu() for x in (out, q.grad, k.grad, v.grad)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() < 0.02 * ours.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("skill", "size"), [("recall", "256"), ("arithmetic", "sum-2"), ("json", "3"), ("tools", "2")])
def test_the_shipped_model_answers_held_back_questions(skill: str, size: str, dtype: str) -> None:
    asked = list(islice(items(skill, Split.HELD_BACK, size, group=4), 8))
    answers = answer_all(BUNDLED, asked, getattr(torch, dtype), CPU, batch_tokens=4000)
    assert sum(check(item, answer.text).right for item, answer in zip(asked, answers, strict=True)) >= 7


def test_drafters_learn_from_the_model_and_their_folders_load(encoder: FastEncoder, tmp_path: Path) -> None:
    target = random_network()
    trainer = DraftTrainer(target, CPU, seed=1)
    before = [parameter.clone() for parameter in target.parameters()]
    batch = some_batch(encoder, 1024)
    losses = []
    for _ in range(4):
        trainer.step(batch, 1.0)
        losses.append(
            {name: np.mean([loss for loss, _ in rows.values()]) for name, rows in trainer.take_scores().items()}
        )
    assert all(losses[-1][name] < losses[0][name] for name in losses[0])
    assert all(torch.equal(old, new) for old, new in zip(before, target.parameters(), strict=True))
    save_draft(trainer.draft, tmp_path / "draft")
    loaded = dict(load_network(tmp_path / "draft", CPU).named_parameters())
    assert torch.equal(loaded["embedding"], trainer.draft.embedding.bfloat16().float())
