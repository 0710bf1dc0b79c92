"""Formats answers under /v2/models: tensors as JSON or bytes, or as the fields of one object."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.http import text_errors
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.kserve_edge import binary, tensors
from quire.services.frontend.kserve_edge.format import TensorWriter
from quire.services.frontend.kserve_edge.inference_call import OpenInferenceCall
from quire.services.frontend.openai_edge.answers.chunks import event
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.request import Request
from quire.shared.errors import QuireError

Json = dict[str, Any]


class InferFormat:
    """Formats outputs as tensors with names, datatypes and shapes."""

    def __init__(
        self, call: OpenInferenceCall, texts: TokenTexts, model: str, binary_outputs: frozenset[str] = frozenset()
    ) -> None:
        """Prepares the format. `model`: the name that answers carry; `binary_outputs`: outputs to send as bytes after
        the JSON."""
        self._binary = binary_outputs
        self._answers = TensorWriter(call, texts)
        known = {"id": call.id} if call.id else {}
        self._frame: Json = {"model_name": model, "model_version": tensors.VERSION_OF_MODELS, **known}

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> Json:
        return self.parts(deltas, generation)[0]

    def parts(self, deltas: list[SampleDelta], generation: Generation) -> tuple[Json, bytes]:
        """Returns the JSON part and the bytes that follow it: the outputs that were requested as binary."""
        outputs, tail = [], bytearray()
        for name, datatype, values in self._answers.tensors(deltas, generation):
            output: Json = {"name": name, "datatype": datatype, "shape": [len(values)]}
            if name in self._binary:
                data = tensors.RAW[datatype](values)
                output["parameters"] = {binary.SIZE: len(data)}
                tail += data
            else:
                output["data"] = _written(datatype, values)
            outputs.append(output)
        return {**self._frame, "outputs": outputs}, bytes(tail)

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        return event(self.whole(deltas, generation))

    def last_events(self, generation: Generation) -> bytes:
        return b""

    def error_events(self, error: QuireError) -> bytes:
        return event(text_errors.as_object(error))

    def refusal(self, error: QuireError) -> Response:
        return text_errors.as_response(error)


class BinaryAnswer(GenerationResponse):
    """An answer in one piece: a JSON part, then the bytes of binary outputs."""

    def __init__(self, generator: Generator, request: Request, answer_format: InferFormat) -> None:
        super().__init__(generator, request, answer_format, stream=False)
        self._parts = answer_format.parts

    async def _body(self, generation: Generation) -> bytes:
        """Returns the JSON part and the bytes after it, and sets the header with the JSON's length."""
        document, tail = self._parts(await generation.collect(), generation)
        head = orjson.dumps(document)
        self.headers["content-type"] = binary.MEDIA_TYPE
        self.headers[binary.HEADER] = str(len(head))
        return head + tail


class KserveGenerateFormat(InferFormat):
    """Formats outputs as fields; those of a single sample without a list."""

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> Json:
        """Returns each output as a field of the answer: a list with one value per sample, or the value of a single
        one."""
        fields = dict(self._frame)
        for name, datatype, values in self._answers.tensors(deltas, generation):
            written = _written(datatype, values)
            fields[name] = written[0] if len(written) == 1 else written
        return fields


def _written(datatype: str, values: Any) -> list[Any]:
    return [value.decode() for value in values] if datatype == tensors.BYTES else list(values)
