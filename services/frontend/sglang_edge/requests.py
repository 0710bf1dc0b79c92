"""Conversion of a body to the frontend's request."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from quire.services.frontend.http.fields import scalar_fields
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.openai_edge.body.logit_bias import logit_bias
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.conversation import MEDIA
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import Prompt, Request, TextPrompt, TokenPrompt
from quire.services.frontend.sglang_edge.bodies import SamplingBody, SglangGenerateBody
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import InvalidArgument
from quire.shared.media.modalities import AUDIO, IMAGE, VIDEO
from quire.shared.pb.common.v1 import sampling_pb2

URL_SCHEMES = ("data:", "http:", "https:", "file:")
MOST_PATH_CHARACTERS = 200  # base64 of a JPEG begins with a slash as well, and is longer
MODALITIES = {"image_data": IMAGE, "video_data": VIDEO, "audio_data": AUDIO}  # of the items of each field
MAX_NEW_TOKENS = 128  # SGLang's default
FORMS = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
SHARED_FIELDS = (
    "temperature",
    "n",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def generate_request(body: SglangGenerateBody, headers: CallHeaders, defaults: GenerationDefaults) -> Request:
    """Converts a body of /generate. `lora_path` names the model before `model`; priorities are negated, since SGLang
    runs larger values first."""
    sampling = body.sampling_params or SamplingBody()
    return Request(
        request_id=body.rid or headers.request_id or uuid.uuid4().hex,
        model=body.lora_path or body.model,
        prompts=_prompts(body),
        sampling=sampling_rules.build(_given(sampling) | _logprobs(body), defaults),
        arrival_s=headers.arrival_s,
        deadline_s=headers.deadline_s,
        priority=-(body.priority or 0),  # SGLang runs larger values first
        tenant=headers.tenant,
        default_max_tokens=MAX_NEW_TOKENS,
        final_only=not body.stream,
    )


def has_several_answers(body: SglangGenerateBody) -> bool:
    """Returns whether the answer is a list."""
    given = body.input_ids if body.text is None else body.text
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    return several or (body.sampling_params is not None and (body.sampling_params.n or 1) > 1)


def _prompts(body: SglangGenerateBody) -> Sequence[Prompt]:
    """Returns the prompts of text or input_ids, one or several. Raises InvalidArgument unless exactly one of them is
    set and not empty."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidArgument("exactly one of text and input_ids must be given", field="text")
    if body.text == []:
        raise InvalidArgument("text must contain at least one prompt", field="text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        media = _media(body, len(texts), is_list=not isinstance(body.text, str))
        return [TextPrompt(text, media=parts) for text, parts in zip(texts, media, strict=True)]
    several = [ids for ids in body.input_ids or () if isinstance(ids, list)]
    prompts: list[Any] = several or [body.input_ids]
    media = _media(body, len(prompts), is_list=bool(several))
    return [TokenPrompt(ids, parts) for ids, parts in zip(prompts, media, strict=True)]


def _media(body: SglangGenerateBody, num_prompts: int, *, is_list: bool) -> list[list[MediaPart]]:
    """Returns the pictures, videos and clips of each prompt. `is_list`: the prompts were given as a list, and so are
    their media. Raises InvalidArgument for another number."""
    found = [
        _items_of_field(getattr(body, name), PartOrigin(name, "", name), modality, num_prompts, is_list)
        for name, modality in MODALITIES.items()
    ]
    return [[part for parts in of_prompt for part in parts] for of_prompt in zip(*found, strict=True)]


def _items_of_field(
    given: Any, origin: PartOrigin, modality: str, num_prompts: int, is_list: bool
) -> list[list[MediaPart]]:
    """Returns the items of one field for each prompt. Raises InvalidArgument for another number of prompts."""
    if given is None:
        return [[] for _ in range(num_prompts)]
    each = given if is_list and isinstance(given, list) else [given]
    if len(each) != num_prompts:
        text = f"{origin.field} has {MEDIA[modality]} for {len(each)} prompts; there are {num_prompts}"
        raise InvalidArgument(text, field=origin.field)
    return [[_part(one, origin, modality) for one in (entry if isinstance(entry, list) else [entry])] for entry in each]


def _part(given: Any, origin: PartOrigin, modality: str) -> MediaPart:
    """Returns the item of a URL, a path, base64 text, or an object with a url. Raises InvalidArgument for other types;
    what the text refers to is not read yet."""
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        text = f"{origin.field} must hold URLs or base64 texts, got {type(url).__name__}"
        raise InvalidArgument(text, field=origin.field)
    if url.startswith("/") and len(url) < MOST_PATH_CHARACTERS:
        url = f"file://{quote(url)}"
    elif not url.startswith(URL_SCHEMES):
        url = f"data:;base64,{url}"
    return MediaPart(url, origin=origin, modality=modality)


def _given(sampling: SamplingBody) -> dict[str, Any]:
    """Maps SGLang's sampling parameters to ours; None for unset ones."""
    given: dict[str, Any] = {name: getattr(sampling, name) for name in SHARED_FIELDS} | scalar_fields.given(sampling)
    return given | {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "seed": sampling.sampling_seed,
        "stop": [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop,
        "include_stop_str_in_output": sampling.no_stop_trim,
        "logit_bias": logit_bias(sampling.logit_bias) if sampling.logit_bias else None,
        "structured_output": _form(sampling),
    }


def _form(sampling: SamplingBody) -> sampling_pb2.StructuredOutput | None:
    """Returns the constraint of the one field that is set, None without any; raises InvalidArgument if two are set."""
    given = [name for name in FORMS if getattr(sampling, name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgument(f"{given[0]} and {given[1]} both constrain the output: send one of them", field=given[1])
    value = getattr(sampling, given[0])
    form = sampling_pb2.StructuredOutput()
    setattr(form, FORMS[given[0]], value if isinstance(value, str) else json.dumps(value))
    return form


def _logprobs(body: SglangGenerateBody) -> dict[str, Any]:
    """Returns the logprob parameters, {} unless return_logprob is set. A logprob_start_len of at least 0 adds the
    prompt's logprobs from that position."""
    if not body.return_logprob:
        return {}
    wanted: dict[str, Any] = {"logprobs": body.top_logprobs_num, "logprob_token_ids": body.token_ids_logprob or None}
    if body.logprob_start_len >= 0:
        wanted |= {"prompt_logprobs": body.top_logprobs_num, "prompt_logprob_start": body.logprob_start_len}
    return wanted
