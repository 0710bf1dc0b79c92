"""Request body of /generate. Unknown fields are refused: a misspelled one would otherwise be a silent default."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.services.frontend.http.fields import ranges
from quire.services.frontend.http.fields.optional_fields import Flag
from quire.services.frontend.http.fields.ranges import exactly_one
from quire.services.frontend.http.fields.scalar_fields import ScalarFields
from quire.shared.errors import InvalidArgument

ONE_ID: ranges.Schema = {"minItems": 1, "items": {"minimum": 0}}  # one or more ids of a prompt


class SamplingBody(ScalarFields):
    """Sampling parameters under SGLang's names."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    sampling_seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: Flag = False
    no_stop_trim: Flag = Field(default=False, description="the text keeps the stop string")
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class SglangGenerateBody(BaseModel):
    """Request body of POST /generate: one prompt or several, as text or as token ids."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=exactly_one("text", "input_ids"))

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = Field(None, json_schema_extra={"items": {"minimum": 0, **ONE_ID}})
    image_data: Any = Field(
        None,
        description="pictures for the placeholders: URL or base64; a list of them; for several prompts one list each",
    )
    audio_data: Any = Field(None, description="clips of sound for the placeholders, as image_data")
    video_data: Any = Field(None, description="videos for the placeholders, in the forms of image_data")
    sampling_params: SamplingBody | None = None
    stream: Flag = False
    rid: str | None = Field(None, description="the id of the request")
    model: str = ""
    lora_path: str | None = Field(None, description="the name of an adapter")
    priority: int | None = Field(
        None, description="the larger first", json_schema_extra={"minimum": 1 - ranges.PRIORITY_BOUND}
    )
    return_logprob: Flag = False
    top_logprobs_num: int = Field(0, ge=0)
    token_ids_logprob: list[int] | None = None
    logprob_start_len: int = Field(-1, ge=-1, description="first prompt token with log-probabilities; -1: output only")
    return_text_in_logprobs: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_tgi(cls, body: Any) -> Any:
        """Raises InvalidArgument for a body of TGI's /generate, which has `inputs` and `parameters`."""
        if isinstance(body, dict) and "inputs" in body:
            text = (
                "inputs is of TGI's API; this path is SGLang's: send text and sampling_params, or use /v1/completions"
            )
            raise InvalidArgument(text, field="inputs")
        return body
