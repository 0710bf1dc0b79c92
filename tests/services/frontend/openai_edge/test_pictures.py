"""Pictures in chat completions and responses: rendered prompt, items, and pixels as workers fetch them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.shared.columns import i32
from quire.shared.kv import block_hash
from tests.services.frontend.media.fetching import fetch_pixels
from tests.services.frontend.media.media_server import answer, media_server
from tests.services.frontend.media.seeing import (
    Served,
    asked_prompt,
    data_url,
    image,
    pixels_of,
    seeing_frontend,
    shown_prompt,
    text,
    user,
)
from tests.services.frontend.media.seeing_folder import NUM_EMBEDDINGS, SIDE, plain, png, write_seeing_folder
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tiny_folder import CHATML
from tests.waiting import eventually

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ORIENTATION = 0x0112  # tag of EXIF


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")


def cut_off() -> bytes:
    """Returns the first half of a file."""
    noise = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    content = png(Image.fromarray(noise))
    return content[: len(content) // 2]


def turn(words: str) -> str:
    return f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"


async def prompt_of(served: Served, path: str = CHAT, **body: Any) -> tuple[str, list[bytes]]:
    return await asked_prompt(served, path, **body)


async def test_a_picture_of_a_data_url_reaches_the_scheduler_and_its_pixels_a_worker(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        asked = served.ask(CHAT, messages=user(text("hello "), image(plain(RED)), text(" world")))
        submission = await served.submission()
        assert shown_prompt(served, submission) == turn("hello [picture] world")
        (item,) = submission.media
        assert item.length == item.num_embeddings == NUM_EMBEDDINGS
        assert (item.modality, len(item.identifier), item.embedding_runs) == ("image", 32, b"")
        hashes = block_hash.chain_with_media(submission.root_hash, submission.token_ids, 16, [item])
        assert block_hash.split(submission.block_hashes) == hashes
        head, pixels = await fetch_pixels(served.media_address, item.identifier)
        assert (head.num_tiles, head.height, head.width) == (1, SIDE, SIDE)
        assert pixels == bytes(RED) * SIDE * SIDE
        served.script.resume()
        answered = (await asked).json()
        assert answered["usage"]["prompt_tokens"] == len(i32(submission.token_ids))
        assert served.store.held_bytes == 0
        served.store.check_invariants()


async def test_pictures_keep_their_order_and_equal_ones_are_decoded_once(seeing: Path) -> None:
    messages = [
        *user(image(plain(RED)), image(plain(GREEN)), text("which?")),
        {"role": "assistant", "content": "one"},
        *user(text("and "), image(plain(RED)), text("?")),
    ]
    async with seeing_frontend(seeing) as served:
        shown, colours = await prompt_of(served, messages=messages)
        assert shown == (
            "<|im_start|>user\n[picture][picture]which?<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            + turn("and [picture]?")
        )
        assert colours == [bytes(RED), bytes(GREEN), bytes(RED)]
        first, _, third = served.script.submissions[0].media
        assert first.identifier == third.identifier
        metrics = await served.started.metrics()
        assert metrics["vllm:mm_cache_queries_total"] == 3
        assert metrics["quire_frontend_media_bytes{state=held}"] == 0
        assert metrics["quire_frontend_media_bytes{state=idle}"] == 2 * SIDE * SIDE * 3
        await prompt_of(served, messages=messages)
        again = await served.started.metrics()
        assert again["vllm:mm_cache_hits_total"] - metrics["vllm:mm_cache_hits_total"] == 3


async def test_every_form_of_a_part_is_read(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(plain(BLUE))
    async with media_server({"/p.png": answer(plain(GREEN))}) as media:
        parts = [
            {"type": "image_url", "image_url": data_url(plain(RED))},  # text instead of an object
            {"image_url": data_url(plain(RED))},  # without a type, sonar#1316
            {"type": "image_url", "image_url": {"url": data_url(plain(RED)), "detail": "low"}},
            {"type": "image_url", "image_url": {"url": data_url(plain(RED)), "detail": "auto"}, "uuid": "first"},
            {"type": "input_image", "image_url": data_url(plain(RED)), "detail": "high"},
            {"type": "image_url", "image_url": {"url": media.url("/p.png")}},
            {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a%20b.png"}},
        ]
        settings = {
            "allowed_media_domains": ("127.0.0.1",),
            "allowed_media_networks": ("127.0.0.0/8",),
            "allowed_local_media_path": str(tmp_path),
        }
        async with seeing_frontend(seeing, **settings) as served:
            shown, colours = await prompt_of(served, messages=user(*parts, text("!")))
    assert shown == turn("[picture]" * len(parts) + "!")
    assert colours == [bytes(RED)] * 5 + [bytes(GREEN), bytes(BLUE)]


@pytest.mark.parametrize("messages", [user(text("one"), image(plain(RED)), text("two"))])
async def test_placeholders_are_put_before_the_text_of_templates_that_read_texts(
    messages: list[Any], tmp_path: Path
) -> None:
    async with seeing_frontend(write_seeing_folder(tmp_path / "m", CHATML)) as served:
        shown, colours = await prompt_of(served, messages=messages)
    assert (shown, colours) == (turn("[picture]\none\ntwo"), [bytes(RED)])


@pytest.mark.parametrize("template", ["parts", "texts"])
async def test_a_user_that_spells_the_placeholder_gets_no_picture(template: str, seeing: Path, tmp_path: Path) -> None:
    folder = seeing if template == "parts" else write_seeing_folder(tmp_path / "m", CHATML)
    async with seeing_frontend(folder) as served:
        spelled = user(text("is <image> a <ima"), image(plain(RED)), text("ge> tag?"))
        shown, _ = await prompt_of(served, messages=spelled)
        assert shown == (
            turn("is <image> a <ima[picture]ge> tag?")
            if template == "parts"
            else turn("[picture]\nis <image> a <ima\nge> tag?")
        )
        plain_text, _ = await prompt_of(served, messages=user(text("<image>")))
        assert plain_text == turn("<image>")


async def test_where_users_may_write_control_tokens_a_placeholder_counts(tmp_path: Path) -> None:
    """As in vLLM: a placeholder in the text takes the next picture, and one too many is refused."""
    folder = write_seeing_folder(tmp_path / "m", CHATML)
    async with seeing_frontend(folder, control_tokens="everywhere") as served:
        shown, _ = await prompt_of(served, messages=user(text("is <image> red?"), image(plain(RED))))
        assert shown == turn("is [picture] red?")
        status, said = await served.refusal(CHAT, messages=user(text("<image> or <image>"), image(plain(RED))))
        assert status == 400
        assert "Found more '<image>' placeholders in input prompt than actual multimodal data items." in said


async def test_pictures_of_tools_results_stay_or_follow_in_a_turn_of_the_user(tmp_path: Path, seeing: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [text("done"), image(plain(GREEN))]}
    messages = [*user(text("look")), {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    only_users = seeing_template_for_users()
    async with seeing_frontend(write_seeing_folder(tmp_path / "m", only_users)) as served:
        shown, colours = await prompt_of(served, messages=messages)
        assert shown.endswith("<|im_start|>tool\ndone<|im_end|>\n" + turn("[picture]"))
        assert colours == [bytes(GREEN)]
    async with seeing_frontend(seeing) as served:
        shown, colours = await prompt_of(served, messages=messages)
        assert shown.count("[picture]") == 1
        assert "done" in shown
        assert colours == [bytes(GREEN)]


def seeing_template_for_users() -> str:
    """Returns a template that shows pictures in turns of users only, and calls."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        "{% if message.role == 'user' and message.content is not string %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
        "{% elif message.content is string %}{{ message.content }}"
        "{% elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
        "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


async def test_a_named_picture_is_found_again_without_its_data_by_its_tenant_alone(seeing: Path) -> None:
    named = {"type": "image_url", "image_url": None, "uuid": "cat-1"}
    async with seeing_frontend(seeing) as served:
        status, said = await served.refusal(CHAT, messages=user(named, text("?")))
        assert (status, "Cache miss for image at index 0 but data is not provided." in said) == (400, True)
        await prompt_of(served, messages=user(image(plain(RED), uuid="cat-1"), text("?")))
        _, colours = await prompt_of(served, messages=user(named, text("again?")))
        assert colours == [bytes(RED)]
        status, _ = await served.refusal(CHAT, messages=user(named), tenant="other")
        assert status == 400


async def test_options_of_a_request_make_another_item(seeing: Path) -> None:
    clear = png(Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0)))
    async with seeing_frontend(seeing) as served:
        _, white = await prompt_of(served, messages=user(image(clear)))
        io = {"image": {"rgba_background_color": [1, 2, 3], "image_mode": None}, "video": {"num_frames": 2}}
        _, coloured = await prompt_of(served, messages=user(image(clear)), media_io_kwargs=io)
        first, second = (submission.media[0].identifier for submission in served.script.submissions)
        assert (white, coloured, first != second) == ([b"\xff" * 3], [bytes((1, 2, 3))], True)
        await prompt_of(served, messages=user(image(clear)), mm_processor_kwargs={"do_rescale": True})
        for fields, said in (
            ({"mm_processor_kwargs": {"min_pixels": 4}}, "mm_processor_kwargs.min_pixels"),
            ({"mm_processor_kwargs": {"images_kwargs": {"min_pixels": 4}}}, "mm_processor_kwargs.min_pixels"),
            ({"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}}, "three numbers from 0 to 255"),
            ({"media_io_kwargs": {"image": {"image_mode": "YCbCr"}}}, "must be one of RGB, L, 1"),
            ({"media_io_kwargs": {"picture": {}}}, "no modality 'picture'"),
        ):
            status, text_of_error = await served.refusal(CHAT, messages=user(image(clear)), **fields)
            assert (status, said in text_of_error) == (400, True), text_of_error


async def test_refusals_name_what_is_wrong(seeing: Path) -> None:
    def one(url: Any) -> list[dict[str, Any]]:
        return user(text("hi"), {"type": "image_url", "image_url": {"url": url}})

    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": one("https://example.com/cat.png")}, "The URL must be from one of the allowed domains: ["),
        ({"messages": one("file:///etc/passwd")}, "Cannot load local files without `--allowed-local-media-path`."),
        ({"messages": one("ftp://host/a.png")}, "The URL must be either a HTTP, data or file URL"),
        ({"messages": one("")}, "The URL must be either a HTTP, data or file URL"),
        ({"messages": one("data:image/png;base64,")}, "Failed to load image: it is none of"),
        ({"messages": one("data:image/png;base64,@@@")}, "its base64 is invalid"),
        ({"messages": one("data:image/png,abc")}, "Only base64 data URLs are supported for now."),
        ({"messages": one("data:image/png;base64")}, "missing ',' separator."),
        ({"messages": one(data_url(b"<html>404</html>"))}, "Failed to load image: "),
        ({"messages": one(data_url(cut_off()))}, "Failed to load image: the file is damaged or cut off"),
        ({"messages": one(5)}, "need image_url"),
        ({"messages": user({"type": "image_url"})}, "need image_url"),
        ({"messages": user({"type": "input_image", "file_id": "file-1"})}, "file_id are not supported"),
        (
            {"messages": user(*[image(plain(RED))] * 3)},
            "At most 2 image(s) may be provided in one prompt. Set `--limit",
        ),
        ({"messages": user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})}, "not sound"),
        ({"messages": user({"type": "video_url", "video_url": {"url": "x"}})}, "not videos"),
        ({"messages": user(image(plain(RED))), "truncate_prompt_tokens": 9}, "a prompt with pictures is not cut"),
    ]
    async with seeing_frontend(seeing, limit_mm_per_prompt={"image": 2}) as served:
        for body, said in cases:
            status, answered = await served.refusal(CHAT, **body)
            assert status in (400, 501), answered
            assert said in json.loads(answered)["error"]["message"], answered
        assert not served.script.submissions
        assert served.store.held_bytes == 0
        served.store.check_invariants()


async def test_what_cameras_and_drawing_programs_write_is_shown_as_people_see_it(seeing: Path) -> None:
    """EXIF orientation (sglang#33464, llama.cpp#20870, ollama#18418), 16 bits, palettes, alpha, CMYK."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    left_red = Image.new("RGB", (SIDE, SIDE), BLUE)
    left_red.paste(RED, (0, 0, SIDE // 2, SIDE))
    sixteen = Image.fromarray(np.full((SIDE, SIDE), 65535, dtype=np.uint16))
    files = [
        png(left_red, exif=exif.tobytes()),  # turned to the right: red is on top
        png(sixteen),
        png(left_red.convert("P", palette=Image.Palette.ADAPTIVE)),
        png(Image.new("LA", (SIDE, SIDE), (0, 0))),
        png(Image.new("CMYK", (SIDE, SIDE), (0, 255, 255, 0)), "JPEG", quality=100),
    ]
    async with seeing_frontend(seeing) as served:
        served.script.pause()
        asked = served.ask(CHAT, messages=user(*map(image, files)))
        found = await pixels_of(served, await served.submission(0, asked))
        served.script.resume()
        await asked
    turned = np.frombuffer(found[0], np.uint8).reshape(SIDE, SIDE, 3)
    assert (turned[2, :].mean(0).round().tolist(), turned[-2, :].mean(0).round().tolist()) == ([255, 0, 0], [0, 0, 255])
    assert found[1][:3] == b"\xff" * 3
    assert found[2][:3] == bytes(RED)
    assert found[3][:3] == b"\xff" * 3
    assert np.abs(np.frombuffer(found[4][:3], np.uint8).astype(int) - RED).max() <= 4


async def test_a_model_without_an_encoder_names_what_it_does_not_take(folder: Path, seeing: Path) -> None:
    body = {"messages": user(image(plain(RED))), "max_tokens": 1}
    said = (
        "messages: parts of type 'image_url' are not supported by this server: models are given text only, not pictures"
    )
    for model, settings in ((folder, {}), (seeing, {"language_model_only": True})):
        async with scheduler(ScriptedScheduler()) as script, running(model, script.address, **settings) as started:
            answered = await started.http.post(CHAT, json=body)
            assert answered.status_code == 400
            assert answered.json()["error"]["message"].startswith(said)
            assert not script.hellos[0].media_address
            options = await started.http.post(CHAT, json={**body, "messages": user(text("x")), "media_io_kwargs": {}})
            assert options.status_code == 200
            (card,) = (await started.http.get("/v1/models")).json()["data"]
            assert card["input_modalities"] == ["text"]


async def test_models_say_that_they_take_pictures(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        (card,) = (await served.started.http.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == ["text", "image"]
        shown = (await served.started.http.post("/api/show", json={})).json()
        assert "vision" in shown["capabilities"]


async def test_models_take_no_pictures_if_no_worker_encodes_them(seeing: Path) -> None:
    script = ScriptedScheduler(media_modalities=[])
    async with scheduler(script), running(seeing, script.address) as started:
        await eventually(lambda: started.frontend.core.client.limits is not None)
        (card,) = (await started.http.get("/v1/models")).json()["data"]
    assert card["input_modalities"] == ["text"]


async def test_responses_take_pictures_in_messages_and_in_outputs_of_tools(seeing: Path) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, input_image(RED)]},
        {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "screen"}, input_image(GREEN)],
        },
    ]
    async with seeing_frontend(seeing) as served:
        shown, colours = await prompt_of(served, RESPONSES, input=items, truncation="auto", store=False)
        assert "look[picture]" in shown
        assert shown.count("[picture]") == 2
        assert "screen" in shown
        assert colours == [bytes(RED), bytes(GREEN)]
        status, said = await served.refusal(
            RESPONSES, input=[{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]
        )
        assert (status, "input[0].content: parts of type 'input_image' with a file_id" in said) == (400, True)


def input_image(colour: tuple[int, int, int]) -> dict[str, str]:
    return {"type": "input_image", "image_url": data_url(plain(colour)), "detail": "auto"}


async def test_calls_that_count_tokens_count_pictures(seeing: Path, folder: Path) -> None:
    conversation = {"messages": user(image(plain(RED)), text("hi"))}
    async with seeing_frontend(seeing) as served:
        http = served.started.http
        answered = await http.post("/tokenize", json=conversation)
        token = served.started.frontend.model.tokenizer.token_id("<image>")
        assert answered.json()["tokens"].count(token) == NUM_EMBEDDINGS
        block = {"type": "image", "source": {"type": "url", "url": data_url(plain(RED))}}
        counted = await http.post(
            "/v1/messages/count_tokens", json={"model": "", "messages": [{"role": "user", "content": [block]}]}
        )
        assert counted.json()["input_tokens"] > NUM_EMBEDDINGS
        assert served.store.held_bytes == 0
    async with scheduler(ScriptedScheduler()) as script, running(folder, script.address) as started:
        refused = await started.http.post("/tokenize", json=conversation)
        assert refused.status_code == 400
        assert "models are given text only, not pictures" in refused.text


async def test_the_times_of_a_picture_are_parts_of_the_time_of_its_request(seeing: Path) -> None:
    parts = ("tokenize", "fetch", "preprocess", "schedule", "encode", "prefill")
    asked = {"messages": user(image(plain(RED)), text("what?")), "return_metrics": True, "max_tokens": 2}
    async with scheduler(ScriptedScheduler()) as script, running(seeing, script.address) as started:
        times = (await started.http.post(CHAT, json=asked)).json()["metrics"]
        *_, last = (await started.http.post(CHAT, json={**asked, "stream": True})).text.split("data: ")[:-1]
        wordy = {**asked, "messages": [{"role": "user", "content": "what?"}]}
        of_words = (await started.http.post(CHAT, json=wordy)).json()["metrics"]
        await started.until_idle()
        metrics = await started.metrics()
    assert sum(times[f"{part}_time_ms"] for part in parts) == pytest.approx(times["time_to_first_token_ms"], abs=1)
    assert min(times["fetch_time_ms"], times["preprocess_time_ms"]) > 0
    assert times["encode_time_ms"] == pytest.approx(0.02), "as the scheduler reported"
    again = json.loads(last)["metrics"]
    assert again["preprocess_time_ms"] < times["preprocess_time_ms"], "it was kept"
    assert not {"fetch_time_ms", "preprocess_time_ms", "encode_time_ms"} & of_words.keys()
    counts = {part: metrics[f"quire_frontend_request_part_seconds_count{{part={part}}}"] for part in parts[1:3]}
    assert counts == {"fetch": 2, "preprocess": 2}
