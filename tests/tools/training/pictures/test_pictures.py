"""Vision training: conversations and their packing, the tower against the serving one, export, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from quire import kernels  # noqa: E402
from quire.services.worker.layers.config_file import ConfigFile  # noqa: E402
from quire.services.worker.layers.placement import LayerPlacement  # noqa: E402
from quire.services.worker.models.loading.loader import Loader  # noqa: E402
from quire.services.worker.models.vision.llava import LlavaVision, read_llava  # noqa: E402
from quire.services.worker.models.vision.port import MediaInput  # noqa: E402
from quire.shared.media.picture_sizes import read_processor  # noqa: E402
from quire.shared.media.processor import Normalization  # noqa: E402
from tools.evals import held_back_items  # noqa: E402
from tools.training.chat import END_OF_TEXT, IMAGE, segments  # noqa: E402
from tools.training.export import BUNDLED, load_network, text_tensors  # noqa: E402
from tools.training.pictures.evaluate import answer_pictures, picture_of  # noqa: E402
from tools.training.pictures.examples import PictureCorpus, PictureExample, pack  # noqa: E402
from tools.training.pictures.export import load_tower, preprocessor_config, save_llava, save_tower, vision_config  # noqa: E402
from tools.training.pictures.recipe import PictureRecipe, TowerShape  # noqa: E402
from tools.training.pictures.tower import TrainedTower  # noqa: E402
from tools.training.pictures.trainer import TowerTrainer  # noqa: E402
from tools.training.tokenizer import FastEncoder, load_tokenizer  # noqa: E402

SMALL = TowerShape(32, 48, 2, 2, image_size=32, patch_size=8)
RECIPE = PictureRecipe(60, pictures=4, text_tokens=180, shape=SMALL)
CPU = torch.device("cpu")
TEXT_SIZE = 256


@pytest.fixture(scope="module")
def encoder() -> FastEncoder:
    return FastEncoder(load_tokenizer(BUNDLED))


def examples(encoder: FastEncoder, count: int) -> list[PictureExample]:
    corpus = PictureCorpus("test", encoder, RECIPE)
    return [corpus.next() for _ in range(count)]


def text(written: str) -> dict[str, str]:
    return {"type": "text", "text": written}


def random_tower() -> TrainedTower:
    """Returns a tower without zero or unit weights, some of which are so before training."""
    torch.manual_seed(0)
    tower = TrainedTower(SMALL, TEXT_SIZE)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return tower


def test_the_placeholder_is_one_token(encoder: FastEncoder) -> None:
    assert len(encoder.encode(IMAGE)) == 1
    assert len(encoder.encode(f"{IMAGE}{IMAGE}\n")) == 3


def test_conversations_have_one_run_of_picture_tokens_before_the_first_question(encoder: FastEncoder) -> None:
    image, (end,) = encoder.encode(IMAGE)[0], encoder.encode("<|im_end|>")
    for example in examples(encoder, 50):
        places = [i for i, token in enumerate(example.tokens) if token == image]
        assert places == list(range(places[0], places[0] + SMALL.num_patches))
        assert example.tokens[example.shortest - 1] == end
        assert example.shortest > places[-1]
        assert example.pixels.shape == (32, 32, 3)


def test_a_batch_has_fixed_sizes_and_the_pictures_embeddings_in_order(encoder: FastEncoder) -> None:
    image, padding = encoder.encode(IMAGE)[0], encoder.encode(END_OF_TEXT)[0]
    for _ in range(5):
        drawn = examples(encoder, RECIPE.pictures)
        batch = pack(drawn, RECIPE, image, padding)
        assert len(batch.tokens) == len(batch.positions) == batch.limits[0][-1] == RECIPE.batch_tokens
        assert len(batch.picture_index) == RECIPE.pictures * SMALL.num_patches
        assert np.array_equal(batch.tokens[batch.target_index + 1], batch.targets)
        assert len(batch.weights) == RECIPE.batch_targets
        assert all(batch.kinds[batch.weights > 0] >= 0)
        starts = batch.limits[0][: len(drawn)]
        assert all(batch.positions[start] == 0 for start in starts)
        for start, example in zip(starts, drawn, strict=True):
            assert batch.tokens[start : start + example.shortest].tolist() == example.tokens[: example.shortest]


def test_conversations_that_do_not_fit_are_refused(encoder: FastEncoder) -> None:
    with pytest.raises(ValueError, match="4 conversations of"):
        pack(examples(encoder, 4), PictureRecipe(60, pictures=4, text_tokens=2, shape=SMALL), 9, 0)


def test_exported_tower_is_the_serving_one(tmp_path: Path) -> None:
    tower = random_tower()
    save_tower(tower, tmp_path / "model.safetensors")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(SMALL)))
    vision = vision_config(SMALL)
    values = {"vision_config": vision, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    place = LayerPlacement(kernels.load("cpu"), torch.float32, CPU)
    processor = read_processor(tmp_path)
    assert (processor.size.height, processor.size.resampling) == (32, "bicubic")
    normalization = Normalization(processor.mean, processor.std, processor.factor)
    served = LlavaVision(read_llava(ConfigFile(values), ConfigFile(vision), TEXT_SIZE), place, normalization)
    Loader("auto", 0).load(served, tmp_path, lambda _: True)
    pixels = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)
    with torch.no_grad():
        ours = load_tower(tmp_path / "model.safetensors")(pixels, torch.float32)
        torch.testing.assert_close(
            torch.stack(served.encode([MediaInput(one[None]) for one in pixels])), ours, rtol=1e-4, atol=1e-4
        )


def test_stored_weights_are_the_towers_in_bfloat16(tmp_path: Path) -> None:
    tower = random_tower()
    save_tower(tower, tmp_path / "vision.safetensors")
    loaded = load_tower(tmp_path / "vision.safetensors")
    assert loaded.shape == SMALL
    for (name, one), other in zip(loaded.named_parameters(), tower.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16().float()), name


def test_every_answer_has_the_root_of_its_length_as_weight(encoder: FastEncoder) -> None:
    image, padding = encoder.encode(IMAGE)[0], encoder.encode(END_OF_TEXT)[0]
    example = next(e for e in examples(encoder, 50) if len(set(e.kinds)) == 4)
    chosen = PictureRecipe(60, pictures=1, text_tokens=300, targets=60, shape=SMALL)
    batch = pack([example], chosen, image, padding)
    for kind in {*example.kinds} - {-1}:
        number = example.kinds.count(kind)
        assert batch.weights[(batch.kinds == kind) & (batch.weights > 0)].sum() == pytest.approx(number**0.5)


def test_the_text_models_weights_are_copied_bit_for_bit(tmp_path: Path) -> None:
    save_llava(BUNDLED, random_tower(), tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for name, tensor in text_tensors(BUNDLED).items():
        assert torch.equal(written[f"language_model.{name}"], tensor), name
    again = tmp_path / "again"
    save_llava(tmp_path, load_tower(tmp_path), again)  # a tower takes the place of another
    for name in ("config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_answers_are_those_of_transformers(encoder: FastEncoder, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_llava(BUNDLED, random_tower(), tmp_path)
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    item = held_back_items(1, ("picture_shapes",))[0]
    conversation = [{"role": "user", "content": [{"type": "image"}, item.messages[0]["content"][1]]}]
    written = processor.apply_chat_template(conversation, add_generation_prompt=True)
    inputs = processor(images=[picture_of(item)], text=written, return_tensors="pt")
    found = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = answer_pictures(load_network(tmp_path, CPU), load_tower(tmp_path), [item])[0].text
    assert answer
    assert answer.startswith(processor.decode(found, skip_special_tokens=True))


def test_training_lowers_the_loss_and_leaves_the_text_model_as_it_is(encoder: FastEncoder) -> None:
    trainer = TowerTrainer(RECIPE, BUNDLED, CPU)
    before = {name: weight.clone() for name, weight in trainer.network.named_parameters()}
    batch = pack(examples(encoder, 4), RECIPE, encoder.encode(IMAGE)[0], encoder.encode(END_OF_TEXT)[0])
    losses = [float(trainer.step(batch, 1.0)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    for name, weight in trainer.network.named_parameters():
        assert torch.equal(weight, before[name]), name
    assert trainer.scores.take()


def test_greedy_answers_depend_on_the_picture_rows(encoder: FastEncoder) -> None:
    items = held_back_items(2, ("picture_digits",))
    network = load_network(BUNDLED, CPU)
    towers = [TrainedTower(SMALL, TEXT_SIZE), random_tower()]
    answers = [[answer.text for answer in answer_pictures(network, tower, items)] for tower in towers]
    assert all(len(found) == len(items) for found in answers)
    assert answers[0] != answers[1]


def test_pictures_are_rendered_as_the_chat_template_does() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment().from_string((BUNDLED / "chat_template.jinja").read_text())
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "what?"}],
        },
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
        {"role": "tool", "content": [text("done"), {"type": "image"}]},
    ]
    assert template.render(messages=messages) == "".join(part for part, _ in segments(messages))
    texts = [{"role": "user", "content": [text("a"), text("b")]}]
    assert template.render(messages=texts) == "<|im_start|>user\nab<|im_end|>\n"
