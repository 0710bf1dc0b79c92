"""The gRPC service quire.inference.v1.InferenceService: generation, pooling, tokenization, models."""

from __future__ import annotations

from collections.abc import AsyncIterator

from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.grpc_edge import pooling_messages, requests, responses
from quire.services.frontend.grpc_edge.errors import Context, call_context
from quire.services.frontend.grpc_edge.services.resumable import ResponseWriter, ResumableCalls, ToMessage
from quire.services.frontend.grpc_edge.services.transcriptions import TranscriptionCalls
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.request.request import Request
from quire.services.frontend.streams.transcoding import CHAT, GENERATE
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc

FRONTEND_METADATA = "quire-frontend"  # trailing metadata of ListModels
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Quire's gRPC API: converts messages to requests and results to messages; the generator does the work."""

    def __init__(
        self,
        generator: Generator,
        processor: InputProcessor,
        tokenizer: Tokenizer,
        catalogue: Catalogue,
        *,
        resumable: ResumableCalls,
        transcriptions: TranscriptionCalls,
        metrics: FrontendMetrics,
        calls: Calls,
        name: str,
    ) -> None:
        """Stores the collaborators. `name`: this frontend's name, so that clients can tell frontends behind one address
        apart."""
        self._name = name
        self._generator = generator
        self._processor = processor
        self._tokenizer = tokenizer
        self._catalogue = catalogue
        self._resumable = resumable
        self._transcriptions = transcriptions
        self._metrics = metrics
        self._calls = calls

    async def Generate(self, message: pb.GenerateRequest, context: Context) -> None:
        """Streams the continuation of a prompt, one message per delta; as a resumable stream if the message asks for
        that."""
        arrival = requests.arrival_of(context)
        async with call_context("Generate", context, self._metrics, self._calls) as call:
            await call.admit()
            request = requests.generate_request(message, arrival, self._tokenizer.defaults)
            if message.resumable:
                await self._resumable.begin(GENERATE, message, request, call, context)
            else:
                await self._stream(request, call, responses.generate_response, context)

    async def Chat(self, message: pb.ChatRequest, context: Context) -> None:
        """Streams the answer to a conversation, one message per delta; as a resumable stream if the message asks for
        that."""
        arrival = requests.arrival_of(context)
        async with call_context("Chat", context, self._metrics, self._calls) as call:
            await call.admit()
            request = requests.chat_request(message, arrival, self._tokenizer.defaults)
            if message.resumable:
                await self._resumable.begin(CHAT, message, request, call, context)
            else:
                await self._stream(request, call, responses.chat_response, context)

    async def Attach(self, message: pb.AttachRequest, context: Context) -> None:
        """Streams a resumable stream of the caller's tenant from an offset on."""
        arrival = requests.arrival_of(context)
        async with call_context("Attach", context, self._metrics, self._calls) as call:
            await self._resumable.attach(message, arrival, call, context)

    async def Cancel(self, message: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Cancels a resumable stream of the tenant, at whichever frontend it runs."""
        arrival = requests.arrival_of(context)
        async with call_context("Cancel", context, self._metrics, self._calls) as call:
            return await self._resumable.cancel(message, arrival, call)

    async def _stream(self, request: Request, call: Call, to_message: ToMessage, context: Context) -> None:
        """Writes one message per sample with new output; further output collects while a message is being written."""
        messages = ResponseWriter(request.request_id, to_message)
        async with self._generator.start(request, call) as generation:
            async for deltas in generation:
                for delta in deltas:
                    await context.write(messages.to_message(delta, generation))

    async def Embed(self, message: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Returns the vectors of all inputs when the last is computed."""
        arrival = requests.arrival_of(context)
        async with call_context("Embed", context, self._metrics, self._calls) as call:
            await call.admit()
            request = pooling_messages.embed_request(message, arrival)
            async with self._generator.start(request, call) as generation:
                await generation.collect()
                return pooling_messages.embed_response(request.request_id, generation)

    async def EmbedStream(self, message: pb.EmbedStreamRequest, context: Context) -> None:
        """Sends one message per input, in the order in which the vectors are computed; the last one carries the
        usage."""
        arrival = requests.arrival_of(context)
        async with call_context("EmbedStream", context, self._metrics, self._calls) as call:
            await call.admit()
            request = pooling_messages.embed_request(message.embed, arrival)
            num_left = len(request.prompts)
            async with self._generator.start(request, call) as generation:
                async for deltas in generation:
                    for delta in deltas:
                        num_left -= 1
                        part = pooling_messages.embed_part(
                            request.request_id, generation, delta.sample, is_last=not num_left
                        )
                        await context.write(part)

    async def Classify(self, message: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Returns the class probabilities of each input, by the model's classification head."""
        arrival = requests.arrival_of(context)
        async with call_context("Classify", context, self._metrics, self._calls) as call:
            await call.admit()
            request = pooling_messages.classify_request(message, arrival)
            async with self._generator.start(request, call) as generation:
                await generation.collect()
                return pooling_messages.classify_response(request.request_id, generation, self._processor.classes)

    async def Score(self, message: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Returns the scores of documents for queries, by the method that the model supports."""
        arrival = requests.arrival_of(context)
        async with call_context("Score", context, self._metrics, self._calls) as call:
            await call.admit()
            scoring = self._processor.scoring(message.queries, pooling_messages.scored_documents(message))
            request = pooling_messages.score_request(message, scoring, arrival)
            async with self._generator.start(request, call) as generation:
                await generation.collect()
                return pooling_messages.score_response(request.request_id, generation, scoring)

    async def Rerank(self, message: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        """Returns the documents by score for one query, the best first; at most `top_n` of them, 0: all."""
        arrival = requests.arrival_of(context)
        async with call_context("Rerank", context, self._metrics, self._calls) as call:
            await call.admit()
            scoring = self._processor.scoring([message.query], pooling_messages.scored_documents(message))
            request = pooling_messages.score_request(message, scoring, arrival)
            async with self._generator.start(request, call) as generation:
                await generation.collect()
                return pooling_messages.rerank_response(request.request_id, generation, scoring, message.top_n)

    async def Transcribe(self, messages: AsyncIterator[pb.TranscribeRequest], context: Context) -> None:
        """Streams the text of a file of sound that the client streams."""
        arrival = requests.arrival_of(context)
        async with call_context("Transcribe", context, self._metrics, self._calls) as call:
            await call.admit()
            await self._transcriptions.answer(messages, arrival, call, context)

    async def Tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Returns the token ids of a text or a rendered conversation, without running the model; not subject to
        admission."""
        async with call_context("Tokenize", context, self._metrics, self._calls):
            entry = self._catalogue.entry(message.model)
            token_ids = await self._processor.tokenize(requests.tokenize_prompt(message), entry.max_model_len)
            return pb.TokenizeResponse(token_ids=token_ids, max_model_len=entry.max_model_len)

    async def Detokenize(self, message: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Returns the text of token ids; not subject to admission. Raises NotFound for an unknown model."""
        async with call_context("Detokenize", context, self._metrics, self._calls):
            self._catalogue.check(message.model)
            skips = message.skip_special_tokens
            text = await self._processor.detokenize_long(message.token_ids, skip_special_tokens=skips)
            return pb.DetokenizeResponse(text=text)

    async def ListModels(self, message: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Returns the model's names and adapters; the trailing metadata names this frontend."""
        async with call_context("ListModels", context, self._metrics, self._calls):
            context.set_trailing_metadata(((FRONTEND_METADATA, self._name),))
            return pb.ListModelsResponse(models=[responses.model(entry) for entry in self._catalogue.entries()])

    async def GetModel(self, message: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        async with call_context("GetModel", context, self._metrics, self._calls):
            return pb.GetModelResponse(model=responses.model(self._catalogue.entry(message.model)))
