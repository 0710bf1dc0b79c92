"""Answer to echo with max_tokens=0: the prompt and its usage, without generation."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from quire.services.frontend.calls.measurements import Usage
from quire.services.frontend.generation.catalogue import CatalogueEntry
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.openai_edge.answers.chunks import DONE, event
from quire.services.frontend.openai_edge.answers.format import AnswerFrame, ending, usage_object
from quire.services.frontend.openai_edge.body.requests import AnswerOptions
from quire.services.frontend.request.outcome import Finish
from quire.services.frontend.request.request import Request
from quire.shared.pb.common.v1.finish_pb2 import FINISH_REASON_LENGTH

FULL = Finish(FINISH_REASON_LENGTH)


async def prompt_only(
    request: Request, options: AnswerOptions, processor: InputProcessor, model: CatalogueEntry
) -> Response:
    """Answers with `n` choices per prompt that hold only its text, as JSON or as a stream. The prompts are tokenized
    for their usage; nothing reaches a scheduler."""
    prompts = [await processor.tokenize(prompt, model.max_model_len) for prompt in request.prompts]
    n = request.sampling.n
    choices = [
        {"index": index, "text": options.prefix[index // n], "logprobs": None, **ending(FULL)}
        for index in range(len(prompts) * n)
    ]
    frame = AnswerFrame(f"cmpl-{request.request_id}", "text_completion", model.name)
    usage = {"usage": usage_object(Usage(sum(map(len, prompts)), 0, 0))}
    if not options.stream:
        return Response(orjson.dumps(frame(choices, **usage)), media_type="application/json")
    last = event(frame([], **usage)) if options.include_usage else b""
    return Response(event(frame(choices)) + last + DONE, media_type="text/event-stream")
